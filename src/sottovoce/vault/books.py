"""What the lines of a ledger add up to. Nothing here is stored: it is computed anew at every open.

Every line is checked for sense as well: a ledger whose hashes fit but whose numbers cannot be is
refused like one whose hashes do not.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from sottovoce.errors import InputError, VaultRefusal
from sottovoce.privacy.tank import FULL
from sottovoce.vault.chain import GENESIS, Line, is_hash
from sottovoce.vault.policy import Policy

KINDS = ("create", "run", "reserve", "store", "tighten", "rebind", "move", "restore")
OVERLAPS = ("all", "some")
_ID = re.compile(r"[0-9a-f]{32}")  # a file of the machine's own witness is named by it


@dataclass
class Run:
    """One run as this ledger saw it."""

    opened: int  # units spent when it began
    debits: int = 0  # releases booked, whether or not the upload arrived
    units: int = 0  # booked for them


@dataclass
class Turn:
    """The newest reserve of one round of one run, and its one stored upload."""

    reserve: int
    request: str
    stored: int | None = None


@dataclass
class Books:
    """The sums of a ledger so far. It grows: a copy for each of n lines would cost n²."""

    seq: int = 0
    hash: str = GENESIS
    id: str = ""
    made: str = ""
    capacity: float = 0.0  # μ² of 2⁵⁰ units, for the vault's whole life
    policy: Policy = None  # type: ignore[assignment]  # the first line says it
    promised: Policy | None = None  # the one that stood when the first unit was booked
    dataset: str = ""
    salt: str = ""  # of the line that names the data set
    inode: int = 0
    spent: int = 0
    burnt: int = 0  # the part of `spent` that restores have booked for what they could not know
    runs: dict[str, Run] = field(default_factory=dict)
    turns: dict[tuple[str, int], Turn] = field(default_factory=dict)
    waiting: dict[int, tuple[str, int, str]] = field(default_factory=dict)  # reserves not stored
    gaps: list[tuple[int, int]] = field(default_factory=list)  # lines lost and paid for

    def add(self, line: Line) -> None:
        """Take one more line into account, or refuse it and change nothing that matters."""
        try:
            facts = line.facts
            self._require(line.seq == self.seq + 1 or line.kind == "restore", "its number")
            self._require((line.kind == "create") == (self.seq == 0), "its place")
            self._require(line.kind in KINDS, "a kind this version does not know")
            getattr(self, f"_{line.kind}")(line.seq, line.time, facts)
        except (KeyError, TypeError, ValueError, InputError, RecursionError) as error:
            raise VaultRefusal(
                f"the vault is damaged (line {line.seq} makes no sense: {error}); put its backup "
                "back and run `sottovoce ledger rebind VAULT --restored`"
            ) from None
        self.seq, self.hash = line.seq, line.hash

    def _create(self, seq: int, time: str, facts: dict[str, Any]) -> None:
        self._require(seq == 1, "its number")
        self._require(bool(_ID.fullmatch(facts["vault"])) and facts["capacity"] > 0, "its id")
        self._require(is_hash(facts["dataset"]), "its data set")
        self.id, self.made, self.capacity = facts["vault"], time, float(facts["capacity"])
        self.policy, self.dataset = Policy.from_json(facts["policy"]), facts["dataset"]
        self.salt = str(facts["salt"])
        self.inode = int(facts["inode"])

    def _run(self, seq: int, time: str, facts: dict[str, Any]) -> None:
        self._require(isinstance(facts["run"], str) and facts["run"] not in self.runs, "its run")
        self.runs[facts["run"]] = Run(opened=self.spent)

    def _reserve(self, seq: int, time: str, facts: dict[str, Any]) -> None:
        run, t, request, units = facts["run"], facts["t"], facts["request"], facts["units"]
        turn = self.turns.get((run, t))
        self._require(run in self.runs and type(t) is int and is_hash(request), "its round")
        self._require(turn is None or turn.stored is None, "its round has an answer")
        self._require(bool(units) and all(type(u) is int and u > 0 for u in units), "its units")
        self._require(self.spent + sum(units) <= FULL, "more than there was")
        self.promised = self.promised or self.policy
        self.spent += sum(units)
        self.runs[run].debits += len(units)
        self.runs[run].units += sum(units)
        self.turns[run, t] = Turn(seq, request)
        self.waiting[seq] = (run, t, request)

    def _store(self, seq: int, time: str, facts: dict[str, Any]) -> None:
        run, t, request = self.waiting[facts["reserve"]]
        turn = self.turns[run, t]
        self._require((facts["run"], facts["t"]) == (run, t), "its round")
        self._require(turn.stored is None, "its round has an answer")
        self._require(is_hash(facts["sha256"]) and type(facts["size"]) is int, "its upload")
        del self.waiting[facts["reserve"]]
        self.turns[run, t] = Turn(facts["reserve"], request, stored=seq)

    def _tighten(self, seq: int, time: str, facts: dict[str, Any]) -> None:
        self.policy = Policy.from_json(facts["policy"])

    def _rebind(self, seq: int, time: str, facts: dict[str, Any]) -> None:
        self._require(is_hash(facts["dataset"]) and facts["overlap"] in OVERLAPS, "its data set")
        self.policy = Policy.from_json(facts["policy"])
        self.dataset, self.salt = facts["dataset"], str(facts["salt"])

    def _move(self, seq: int, time: str, facts: dict[str, Any]) -> None:
        self.inode = int(facts["inode"])

    def _restore(self, seq: int, time: str, facts: dict[str, Any]) -> None:
        burnt = facts["burnt"]
        self._require(type(burnt) is int and 0 <= burnt <= FULL - self.spent, "its units")
        self._require(seq > self.seq, "its number")
        if seq > self.seq + 1:
            self.gaps.append((self.seq + 1, seq - 1))
        if burnt:
            self.promised = self.promised or self.policy
        self.spent += burnt
        self.burnt += burnt
        self.inode = int(facts["inode"])
        self.waiting.clear()

    @staticmethod
    def _require(holds: bool, what: str) -> None:
        if not holds:
            raise ValueError(what)
