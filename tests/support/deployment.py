"""docs/deploy.md followed command by command on machines of their own: a server and its clients."""

from __future__ import annotations

import contextlib
import json
import math
import re
import shutil
import subprocess
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from sottovoce.flower import federate, local
from sottovoce.flower.federate import load_plan
from support import ROOT
from support.machines import Machine, memory_of, wire

PAGE = ROOT / "docs" / "deploy.md"
# What a test machine has not: a package index, a firewall, NTP, systemd (its units are started).
NOT_RUN = ("python3 -m venv", "/opt/sottovoce/bin/pip", "pip wheel", "export PATH", "ufw ",
           "timedatectl ", "systemctl daemon-reload")  # fmt: skip
SERVER = ("sottovoce-superlink", "sottovoce-server", "sottovoce-proxy")
NODE = ("sottovoce-worker", "sottovoce-node")
HOSTILE = Path(__file__).parent / "hostile_party.py"
DOOR = "server.example.org:8000"
# Asks the SuperLink whenever it is told to: `flwr list` costs a second of computing each time.
DESK = """
import json, sys
from pathlib import Path
from flwr.proto.control_pb2 import ListNodesRequest, ListRunsRequest
from sottovoce.errors import FederationError
from sottovoce.flower import local
link = local.Link("127.0.0.1:8001", Path("/etc/sottovoce/server/ca.crt"))
for line in sys.stdin:
    try:
        if line.strip() == "online":
            print(len(local.list_online(link)), flush=True)
        elif line.strip() == "everything":
            with local._open_control(link) as client:
                runs = client.ListRuns(ListRunsRequest()).run_dict
                nodes = client.ListNodes(ListNodesRequest()).nodes_info
            told = {str(run): state.status.status for run, state in runs.items()}
            print(json.dumps([told, sorted(node.node_id for node in nodes)]), flush=True)
        else:
            state = local.read_run_state(link, int(line))
            print(state.status, state.outcome, sep=":", flush=True)
    except FederationError:
        print("unknown", flush=True)
"""


def until(question, seconds=900):
    end = time.monotonic() + seconds
    while not question():
        if time.monotonic() > end:
            return False
        time.sleep(0.2)
    return True


def blocks():
    """The page's console blocks: where each is run, and its commands."""
    for block in re.findall(r"```console\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL):
        where, *lines = block.splitlines()
        assert where.startswith("# "), f"a block of the page does not say where it is run: {block}"
        assert all(line.startswith("$ ") for line in lines), block
        yield where[2:], [line[2:] for line in lines]


@dataclass
class Deployment:
    """A server, its clients and a stranger, as the page makes them."""

    folder: Path
    server: Machine
    wards: dict[str, Machine]
    stranger: Machine
    rounds: int
    longer: int
    floor: float  # many runs follow: none may take more than a little of the budget
    said: dict[str, str] = field(default_factory=dict)
    desk: subprocess.Popen[str] | None = None

    @property
    def machines(self):
        return [self.server, *self.wards.values(), self.stranger]

    def play(self, machine, lines, **more):
        """Run a block's commands on a machine; systemd's are done by starting units."""
        said, kept = "", []
        for line in [*lines, "systemctl enable --now "]:
            if line.startswith("systemctl enable --now "):
                said += machine.shell("\n".join(kept), **more) if kept else ""
                kept = []
                for unit in line.split()[3:]:
                    machine.start(unit)
            elif not line.startswith(NOT_RUN):
                kept.append(line)
        return said

    def follow(self):
        """Go through the page from its first command to its last."""
        for where, lines in blocks():
            if where.startswith("on the server") and "for each client" in where:
                for name, ward in self.wards.items():
                    public = ward.read(f"/etc/sottovoce/node/{name}.pub")
                    self.server.write(f"/srv/admin/{name}.pub", public)
                    own = [line.replace("ward-3", name) for line in lines]
                    until(self.answers)
                    self.play(self.server, own, folder="/srv/admin")
            elif where.startswith("on the server"):
                if any("flwr run" in line for line in lines):
                    self.bring_study()
                    assert until(self.all_online)
                self.said[where] = self.play(self.server, lines, typed="correct horse\n" * 2)
            elif where.startswith("on each client"):
                for name, ward in self.wards.items():
                    own = [line.replace("ward-3", name) for line in lines]
                    if any("node init" in line for line in lines):
                        ca = self.server.read("/etc/sottovoce/authority/ca.crt")
                        ward.write("/srv/admin/ca.crt", ca)
                    if any("ledger create" in line for line in lines):
                        place = f"client-{list(self.wards).index(name)}"
                        rows = self.folder / "dealt" / "nodes" / place / "rows.npz"
                        ward.write(f"/srv/{name}/rows.npz", rows.read_bytes())
                        ward.shell(f"echo floor = {self.floor} >> /srv/{name}/node.toml")
                    self.said[f"{name}: {lines[0]}"] = self.play(ward, own, folder="/srv/admin")
            else:
                assert where in ("in the clone", "on every machine, as root"), where

    def bring_study(self):
        self.server.run("mkdir", "-p", "/srv/sottovoce/study")
        for name in ("plan.toml", "public.npz"):
            content = (self.folder / "dealt" / name).read_bytes()
            self.server.write(f"/srv/sottovoce/study/{name}", content)
        longer = (self.folder / "dealt" / "plan.toml").read_text("utf-8")
        longer = longer.replace(f"rounds = {self.rounds}", f"rounds = {self.longer}")
        self.server.write("/srv/sottovoce/study/longer.toml", longer.encode())

    def answers(self):
        knock = "echo > /dev/tcp/127.0.0.1/8001"
        return self.server.run("bash", "-c", knock, check=False).returncode == 0

    def flwr(self, *words, check=True):
        home = "/etc/sottovoce/server/flwr"
        return self.server.run("flwr", *words, check=check, FLWR_HOME=home).stdout

    def ask(self, question):
        """Ask the SuperLink through one process on the server that stays; return its words."""
        if self.desk is None:
            self.desk = self.server.open("python", "-c", DESK)
        self.desk.stdin.write(f"{question}\n")
        self.desk.stdin.flush()
        return self.desk.stdout.readline().strip()

    def close_desk(self):
        if self.desk is not None:
            self.desk.communicate(timeout=900)

    def online(self):
        """How many SuperNodes the server counts as online; nan while it does not answer."""
        said = self.ask("online")
        return math.nan if said == "unknown" else int(said)

    def all_online(self):
        return self.online() == len(self.wards)

    def runs_and_nodes(self):
        return json.loads(self.ask("everything"))

    def run(self, out, **config):
        """Start a run of our own app as the page does, and return its id."""
        settings = {
            "plan": "/srv/sottovoce/study/plan.toml",
            "public": "/srv/sottovoce/study/public.npz",
            "out": f"/srv/sottovoce/{out}",
            "clients": 2,
            "minimum": 2,
            "deadline": 120.0,
        } | config
        words = " ".join(f"{key}={value!r}" for key, value in settings.items())
        said = self.flwr("run", local.APP, "federation", "--run-config", words)
        return int(re.search(r"started run (\d+)", said).group(1))

    def state(self, run):
        """What the SuperLink says of a run; `unknown` while it does not answer."""
        return self.ask(run)

    def hostile(self, *words, machine=None):
        """Start a hostile party on a machine; what it found out is read from it at its end."""
        machine = machine or self.stranger
        return subprocess.Popen(
            machine.inside("python", HOSTILE, *words),
            env=machine.environment(),
            stdout=subprocess.PIPE,
            start_new_session=True,
            cwd="/",
        )

    def record(self, run="study/run"):
        return json.loads(self.server.read(f"/srv/sottovoce/{run}/record.json"))

    def revive(self):
        """Start services again that have ended, as their units' Restart=always does."""
        for machine in self.machines:
            for name, process in list(machine.services.items()):
                if process.poll() is not None:
                    machine.start(name)

    def follow_run(self, run, on_look=lambda: None):
        """Wait for a run's end; return its state and the services' peak memory in bytes."""
        most = Counter()
        while not (state := self.state(run)).startswith("finished"):
            on_look()
            for name in SERVER[:2]:
                most[name] = max(most[name], memory_of(self.server.services[name]))
            time.sleep(1)
        return state, most

    def verify_books(self):
        """Hold every client's vault against its own chain; its SuperNode lives, if it has one."""
        for name, ward in self.wards.items():
            assert all(process.poll() is None for process in ward.services.values())
            vault, state = f"/srv/{name}/{name}.vault", f"/var/lib/{name}/state"
            ward.run("sottovoce", "ledger", "verify", vault, user=name, SOTTOVOCE_STATE=state)


@contextlib.contextmanager
def deployed(*wards, rounds, longer, floor=8.0):
    """The page, followed for these clients; everything that it started ends with this."""
    folder = Path(tempfile.mkdtemp(prefix="sottovoce-machines-"))
    folder.chmod(0o755)
    machines, it = [], None
    try:
        for name in ("server", *wards, "stranger"):
            machines.append(Machine(folder, name))
        server, *others = machines
        wire(server, others, "server.example.org")
        federate.deal(load_plan(None, [f"rounds.rounds={rounds}"], len(wards)), folder / "dealt")
        clients = dict(zip(wards, others[:-1], strict=True))
        it = Deployment(folder, server, clients, others[-1], rounds, longer, floor)
        it.follow()
        yield it
    finally:
        if it is not None:
            it.close_desk()
        for machine in machines:
            machine.close()
        shutil.rmtree(folder)
