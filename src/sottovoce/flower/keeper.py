"""A small process that starts others and leaves none behind, whatever happens to its parent.

Flower's processes start further processes, some in new sessions, so that neither a process group
nor a list of pids in the parent covers them all. The keeper is their ancestor: on Linux it adopts
every orphan below it (PR_SET_CHILD_SUBREAPER), and it ends them all when it is told to, when the
pipe from its parent closes, or when its parent is no longer there (kill -9 included). If the keeper
itself is killed, the processes it started get SIGKILL from the kernel, and what they had started
watches its parent, as Flower's processes do.

It reads one JSON object a line from its standard input and answers on its standard output:

    {"start": NAME, "argv": [...], "env": {...}, "log": PATH}   →  {"started": NAME, "pid": N}
    {"start": …, "grace": SECONDS}: told first to end, and waited for before the others are told
    {"stop": true}                                              →  {"stopped": true}
    (a process ended)                                           →  {"ended": NAME, "code": N}

Only the standard library is used: it is run as a file and starts in a few hundredths of a second.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

GRACE = 5.0
# How long SIGKILL may take before the keeper gives up: an uninterruptible sleep on a dead disk.
LAST = 10.0
BEAT = 1.0  # seconds between two looks at the parent

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36


class Keeper:
    """The processes of one parent, from their start to their end."""

    def __init__(self) -> None:
        self.pids: dict[int, str] = {}
        self.first: dict[int, float] = {}  # told to end before the others, and how long they have
        self.prctl = find_prctl()
        self.prctl(PR_SET_CHILD_SUBREAPER, 1)

    def start(self, order: dict[str, Any]) -> None:
        """Start one process in a new session; its output is appended to its log."""
        mine = os.getpid()

        def before_exec() -> None:
            self.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != mine:
                os._exit(1)

        try:
            with Path(order["log"]).open("ab") as log:
                process = subprocess.Popen(
                    order["argv"],
                    env=order["env"],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                    preexec_fn=before_exec,
                )
        except OSError as error:
            write_line({"ended": order["start"], "code": 127, "why": str(error)})
            return
        process.returncode = 0  # reaped here, with every other child, by waitpid
        self.pids[process.pid] = order["start"]
        if order.get("grace"):
            self.first[process.pid] = float(order["grace"])
        write_line({"started": order["start"], "pid": process.pid})

    def reap(self) -> None:
        """Collect ended processes: children, and orphans that were adopted."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            name = self.pids.pop(pid, None)
            self.first.pop(pid, None)
            if name is not None:
                write_line({"ended": name, "code": os.waitstatus_to_exitcode(status)})

    def stop(self, grace: float) -> None:
        """Send SIGTERM, wait, then send SIGKILL until no process is left below this one."""
        descendants = list_descendants(os.getpid())
        for pid in list(self.first):
            send_signal(pid, signal.SIGTERM)
        began = time.monotonic()
        while any(time.monotonic() < began + seconds for seconds in self.first.values()):
            self.reap()
            time.sleep(0.02)
        for pid in list(self.pids):
            send_signal(pid, signal.SIGTERM)
        self._wait(grace)
        until = time.monotonic() + LAST
        while time.monotonic() < until:
            descendants = [pid for pid in descendants if is_alive(pid)]
            left = list_descendants(os.getpid()) or descendants
            if not left:
                break
            for pid in left:
                send_signal(pid, signal.SIGKILL)
            self._wait(0.05)
        write_line({"stopped": True})

    def _wait(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            self.reap()
            if not list_descendants(os.getpid()):
                return
            time.sleep(0.02)


def serve(parent: int, grace: float) -> None:
    """Follow orders until the parent says stop, closes the pipe, or dies."""
    keeper = Keeper()
    wake, wake_write = os.pipe()
    os.set_blocking(wake_write, False)
    signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
    ended: list[int] = []
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _frame: ended.append(number))
    watch = selectors.DefaultSelector()
    watch.register(0, selectors.EVENT_READ)
    watch.register(wake, selectors.EVENT_READ)
    rest = b""
    while not ended and os.getppid() == parent:
        ready = {key.fd for key, _ in watch.select(timeout=BEAT)}
        if wake in ready:
            os.read(wake, 4096)
        keeper.reap()
        if 0 not in ready:
            continue
        chunk = os.read(0, 65536)
        if not chunk:
            break
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            order = json.loads(line)
            if "start" in order:
                keeper.start(order)
            else:
                ended.append(0)
    keeper.stop(grace)


def list_descendants(root: int) -> list[int]:
    """Return every living process below `root`, nearest first."""
    children: dict[int, list[int]] = {}
    for pid, parent in _list_processes():
        children.setdefault(parent, []).append(pid)
    descendants, queue = [], [root]
    while queue:
        below = children.get(queue.pop(0), [])
        descendants += below
        queue += below
    return descendants


def is_alive(pid: int) -> bool:
    """Return whether a process with this pid exists."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def send_signal(pid: int, number: int) -> None:
    """Send a signal to a process that may be gone."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


def write_line(words: dict[str, Any]) -> None:
    """Write one line to the parent, which may be gone."""
    with contextlib.suppress(OSError):
        os.write(1, json.dumps(words).encode() + b"\n")


def _list_processes() -> list[tuple[int, int]]:
    """Return (pid, parent) of every process that is not a zombie."""
    proc = Path("/proc")
    if not (proc / "self" / "stat").exists():
        listed = subprocess.run(
            ["ps", "-A", "-o", "pid=,ppid=,stat="], capture_output=True, text=True, check=False
        )
        rows = [line.split() for line in listed.stdout.splitlines()]
        return [(int(row[0]), int(row[1])) for row in rows if not row[2].startswith("Z")]
    table = []
    for name in os.listdir(proc):  # noqa: PTH208 - a generator of Paths costs more than the rest
        if not name.isdigit():
            continue
        try:
            stat = (proc / name / "stat").read_bytes()
        except OSError:
            continue
        state, parent = stat.rpartition(b")")[2].split()[:2]  # a command may contain ") "
        if state != b"Z":
            table.append((int(name), int(parent)))
    return table


def find_prctl() -> Callable[[int, int], object]:
    """Return Linux's prctl, or a function that does nothing elsewhere."""
    if not sys.platform.startswith("linux"):
        return lambda *_: None
    call = ctypes.CDLL(None, use_errno=True).prctl
    return lambda option, value: call(option, value, 0, 0, 0)


if __name__ == "__main__":
    serve(int(sys.argv[1]), float(sys.argv[2]))
