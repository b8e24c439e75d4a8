"""`sottovoce federate` as a process, followed line by line, and the vaults it leaves."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from sottovoce.client.node import Node
from sottovoce.flower import keeper
from support.devices import books_hold
from support.processes import until

PAUSE = 0.5  # every look reads the state of all processes of the machine
COMMAND = [sys.executable, "-m", "sottovoce", "federate"]


class Command:
    """`sottovoce federate …`, followed line by line; every process it ever had is remembered."""

    def __init__(self, log: Path, *words: object) -> None:
        self.log, self.seen = log, set[int]()
        with log.open("wb") as file:
            self.process = subprocess.Popen(
                [*COMMAND, *map(str, words)], stdout=file, stderr=subprocess.STDOUT
            )

    def below(self) -> list[int]:
        """The processes of this federation that live now."""
        now = keeper.list_descendants(self.process.pid)
        self.seen |= set(now)
        return now

    def rounds(self) -> int:
        """How many rounds it has shown."""
        self.below()
        lines = self.log.read_text("utf-8", "replace").splitlines()
        return sum(line.startswith("round ") for line in lines)

    def until_round(self, count: int, seconds: float = 900.0) -> None:
        """Wait until it has shown so many rounds."""
        came = until(
            lambda: self.rounds() >= count or self.process.poll() is not None, seconds, PAUSE
        )
        assert came, self.log.read_text()
        assert self.rounds() >= count, self.log.read_text()

    def end(self, seconds: float = 900.0) -> int:
        """Its exit code; its processes are noted until then."""
        assert until(lambda: not self.below() and self.process.poll() is not None, seconds, PAUSE)
        return self.process.wait()

    def stop(self) -> None:
        """End it, should a test have failed."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()


def running(pids, word):
    """Those of these processes whose command has the word in it."""
    found = []
    for pid in pids:
        try:
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if any(Path(part.decode("utf-8", "replace")).name == word for part in words[:3]):
            found.append(pid)
    return sorted(found)


def nodes_of(out):
    return [Node.load(path) for path in sorted(out.glob("nodes/*/node.toml"))]


def answers_of(node):
    return dict(books_hold(node).answers)


def record_of(out):
    return json.loads((out / "record.json").read_text("utf-8"))
