"""Machines for tests: a file system for its own eyes, users and a network of its own, each.

A machine is a process in a mount and a network namespace: /etc, /srv, ~root and /var/lib are
private copies, so that what a page prints can be run as it stands, on a server and on clients at
once, and nothing of it is left when the process ends. It takes root and Linux's namespaces.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

from support import ROOT

SOURCES = ROOT / "src"
NET = "198.18.0"
SETUP = r"""
set -e
mount --make-rprivate /
base="$1" top="$2" venv="$3" home=~root
mount -t tmpfs -o mode=755 none "$top"
mkdir -m 755 "$top/home" "$top/srv" "$top/srv/admin" "$top/lib" "$top/base" "$top/opt"
ln -s "$venv" "$top/opt/sottovoce"
cp -a /etc "$top/etc"
mount --bind "$base" "$top/base"
for name in etc srv opt; do mount --bind "$top/$name" "/$name"; done
mount --bind "$top/home" "$home"
mount --bind "$top/lib" /var/lib
# An interpreter in the home of root would be out of reach for any other user.
case "$base" in "$home"/*) mkdir -p "$base"; mount --bind "$top/base" "$base";; esac
ip link set lo up
echo ready
exec sleep infinity
"""


def missing() -> str | None:
    """Why there can be no machines here, or None."""
    if os.geteuid() != 0:
        return "needs root for namespaces and users"
    for tool in ("nginx", "ip", "nsenter", "unshare", "setpriv", "useradd"):
        if shutil.which(tool) is None:
            return f"needs {tool}, which is not installed"
    if subprocess.run(["unshare", "-m", "-n", "true"], capture_output=True).returncode:
        return "needs mount and network namespaces, which are not allowed here"
    return None


class Machine:
    """One machine; its services are started from their units as systemd would, without systemd."""

    def __init__(self, folder: Path, name: str) -> None:
        self.name = name
        self.logs = folder / name
        self.logs.mkdir(parents=True)
        top = folder / f"{name}.top"
        top.mkdir()
        self.services: dict[str, subprocess.Popen[bytes]] = {}
        self.holder = subprocess.Popen(
            [
                "unshare",
                "-m",
                "-n",
                "bash",
                "-c",
                SETUP,
                name,
                sys.base_prefix,
                str(top),
                sys.prefix,
            ],
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        assert self.holder.stdout is not None
        assert self.holder.stdout.readline() == b"ready\n"

    def inside(self, *argv: object, user: str | None = None) -> list[str]:
        """The command line that runs `argv` in here, as a user without any privilege."""
        # What is started here ends with the test, however that ends.
        enter = ["nsenter", "-t", str(self.holder.pid), "-m", "-n", "--"]
        enter += ["setpriv", "--pdeathsig=KILL"]
        if user is not None:
            enter += [f"--reuid={user}", f"--regid={user}", "--init-groups"]
            enter += ["--inh-caps=-all", "--bounding-set=-all", "--no-new-privs"]
        return [*enter, *map(str, argv)]

    def environment(self, more: dict[str, str] | None = None) -> dict[str, str]:
        """What a login shell of this machine has."""
        return {
            "PATH": "/opt/sottovoce/bin:/usr/sbin:/usr/bin:/sbin:/bin",
            "PYTHONPATH": str(SOURCES),
            "PYTHONDONTWRITEBYTECODE": "1",
            "LANG": "C.UTF-8",
            "HOME": "/srv/admin",
            "OMP_NUM_THREADS": "1",
            "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.5",
            **(more or {}),
        }

    def run(
        self,
        *argv: object,
        user: str | None = None,
        check: bool = True,
        typed: str = "",
        folder: str = "/",
        **more: str,
    ) -> subprocess.CompletedProcess[str]:
        """Run a command and return what it said; `typed` is what a person types."""
        done = subprocess.run(
            self.inside("env", f"--chdir={folder}", *argv, user=user),
            env=self.environment(more),
            input=typed,
            capture_output=True,
            text=True,
            timeout=900,
            start_new_session=True,  # no terminal: what is typed comes from here
            cwd="/",
        )
        assert not check or done.returncode == 0, f"{argv}: {done.stdout}{done.stderr}"
        return done

    def open(self, *argv: object, user: str | None = None) -> subprocess.Popen[str]:
        """Start a command that is talked with line by line."""
        return subprocess.Popen(
            self.inside(*argv, user=user), env=self.environment(), text=True, cwd="/",
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True,
        )  # fmt: skip

    def shell(self, lines: str, *, typed: str = "", folder: str = "/") -> str:
        """Run lines as they are printed on a page."""
        return self.run("bash", "-ec", lines, typed=typed, folder=folder).stdout

    def read(self, path: str | Path) -> bytes:
        """A file of this machine."""
        return subprocess.run(self.inside("cat", path), capture_output=True, check=True).stdout

    def write(self, path: str | Path, content: bytes) -> None:
        """Make a file of this machine."""
        subprocess.run(self.inside("tee", path), input=content, check=True, capture_output=True)

    def unit(self, name: str) -> dict[str, list[str]]:
        """The settings of one of its units."""
        found: dict[str, list[str]] = {}
        for line in self.read(f"/etc/systemd/system/{name}.service").decode().splitlines():
            key, _, value = line.partition("=")
            if value and not line.startswith("#"):
                found.setdefault(key, []).append(value)
        return found

    def start(self, name: str, *words: str, **also: str) -> None:
        """Start a unit's ExecStart with its User, Environment and UMask, and what is given here."""
        unit = self.unit(name)
        pairs = [pair for line in unit.get("Environment", []) for pair in shlex.split(line)]
        more = {**dict(pair.partition("=")[::2] for pair in pairs), **also}
        with (self.logs / f"{name}.log").open("ab") as log:
            self.services[name] = subprocess.Popen(
                self.inside(*shlex.split(unit["ExecStart"][0]), *words, user=unit["User"][0]),
                env=self.environment(more),
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                umask=int(unit["UMask"][0], 8),
                cwd="/",
            )

    def stop(self, name: str, number: int = signal.SIGTERM) -> None:
        """End a service, and wait for that."""
        process = self.services.pop(name)
        process.send_signal(number)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def log(self, name: str) -> str:
        """What a service has said."""
        return (self.logs / f"{name}.log").read_text("utf-8", "replace")

    def close(self) -> None:
        """End everything that was started here."""
        for process in self.services.values():
            process.terminate()
        until = time.monotonic() + 20
        for process in self.services.values():
            try:
                process.wait(max(0.1, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self.services.clear()
        self.holder.kill()
        self.holder.wait()
        assert self.holder.stdout is not None
        self.holder.stdout.close()


def wire(server: Machine, clients: list[Machine], name: str) -> None:
    """Connect the clients with the server, each by an address of its own; all know its name."""
    at = server.holder.pid
    server.run("ip", "link", "add", "lan", "type", "bridge")
    server.run("ip", "addr", "add", f"{NET}.1/24", "dev", "lan")
    server.run("ip", "link", "set", "lan", "up")
    for number, client in enumerate(clients, 2):
        own, port = client.holder.pid, f"to{number}"
        pair = f"ip link add {port} netns {at} type veth peer name eth0 netns {own}"
        subprocess.run(shlex.split(pair), check=True)
        server.run("ip", "link", "set", port, "master", "lan", "up")
        client.run("ip", "addr", "add", f"{NET}.{number}/24", "dev", "eth0")
        client.run("ip", "link", "set", "eth0", "up")
    for machine in (server, *clients):
        machine.shell(f"echo {NET}.1 {name} >> /etc/hosts")


def forget_peak(process: subprocess.Popen[bytes]) -> None:
    """Let the peak memory of a process and those below it begin anew."""
    from sottovoce.flower import keeper

    for pid in (process.pid, *keeper.list_descendants(process.pid)):
        with contextlib.suppress(OSError):
            Path(f"/proc/{pid}/clear_refs").write_text("5")


def memory_of(process: subprocess.Popen[bytes]) -> int:
    """The most memory that a process and those below it have had, in bytes, added up."""
    from sottovoce.flower import keeper

    total = 0
    for pid in (process.pid, *keeper.list_descendants(process.pid)):
        try:
            lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        except OSError:
            continue
        total += next((int(x.split()[1]) for x in lines if x.startswith("VmHWM")), 0) * 1024
    return total
