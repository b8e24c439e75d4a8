"""What the lines of a ledger add up to, and the summary of it that spares reading them all again.

Every line is checked for sense as well: a ledger whose hashes fit but whose numbers cannot be is
refused like one whose hashes do not.

What grows with the history (runs, rounds, servers) are `Records`; all else is a few numbers. The
summary holds these numbers and the root of the records' tree, and its hash is part of the line that
follows it. Whoever knows the hash of a later line can therefore tell whether a summary is right.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import astuple, dataclass, field, fields, replace
from typing import Any, Self

from sottovoce.client.vault.chain import GENESIS, Line, canonical, is_hash
from sottovoce.client.vault.policy import Policy
from sottovoce.client.vault.records import Records
from sottovoce.errors import InputError, VaultRefusal
from sottovoce.privacy.tank import FULL

KINDS = (
    *("create", "run", "reserve", "store", "tighten", "rebind", "move", "restore"),
    *("stop", "resume"),
)
OVERLAPS = ("all", "some")
_ID = re.compile(r"[0-9a-f]{32}")  # a file of the machine's own witness is named by it


@dataclass(frozen=True)
class Run:
    """One run as this ledger saw it."""

    opened: int  # units spent when it began
    debits: int = 0  # releases booked, whether or not the upload arrived
    units: int = 0  # booked for them
    before: int = 0  # uploads of rounds before this one are dropped …
    line: int = 0  # … if they were stored before this line


@dataclass(frozen=True)
class Turn:
    """The newest reserve of one round of one run, and its one stored upload."""

    reserve: int
    hash: str  # of that line
    stored: int | None = None
    sha256: str = ""  # of the upload


def _no_line(seq: int) -> Line | None:
    return None


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
    restored: int = 0  # the line of the last restore: no upload is stored for a reserve before it
    unanswered: int = 0  # reserves in a row without an upload, since the operator's last word
    failed: bool = False  # whether an answer has failed since then
    records: Records = field(default_factory=lambda: Records(lambda _: None))
    line: Callable[[int], Line | None] = _no_line  # how an earlier line is read

    def run(self, name: str) -> Run | None:
        """Return what is known of a run."""
        known = self.records.get("run", name)
        return None if known is None else Run(*known)

    def turn(self, run: str, t: int) -> Turn | None:
        """Return what is known of a round."""
        known = self.records.get("turn", run, t)
        return None if known is None else Turn(*known)

    def spent_by_run(self, name: str) -> int:
        """Return the units booked by one run."""
        run = self.run(name)
        return 0 if run is None else run.units

    def spent_by_server(self, server: str) -> int:
        """Return the units booked for what one server asked, by the name it gave."""
        return int(self.records.get("server", server) or 0)

    def is_dropped(self, run: str, t: int) -> bool:
        """Return whether the bytes of a round's upload were given up: its server has them."""
        turn, known = self.turn(run, t), self.run(run)
        if turn is None or turn.stored is None or known is None:
            return False
        return t < known.before and turn.stored < known.line

    def stored(self) -> Iterator[tuple[str, int, Turn]]:
        """Every round with an upload, dropped or not; only where the whole ledger was read."""
        for key, value in self.records.changed.items():
            kind, *place = json.loads(key)
            if kind == "turn" and (turn := Turn(*value)).stored is not None:
                yield place[0], place[1], turn

    def summary(self) -> tuple[str, dict[str, str]]:
        """Return the summary of all lines so far, and the nodes of its tree that are new."""
        root, nodes = self.records.fold()
        return canonical(
            {name: _plain(getattr(self, name)) for name in _SUMMED} | {"root": root}
        ), nodes

    @classmethod
    def from_summary(cls, content: str, read: Callable[[str], str | None]) -> Self | None:
        """Return the books that a summary was made of, None if another version made it."""
        facts = dict(json.loads(content))
        root = facts.pop("root")
        if facts.keys() != set(_SUMMED):
            return None
        for name in ("policy", "promised"):
            told = facts[name]
            facts[name] = None if told is None else Policy.from_json(told)
            if told is not None and facts[name].to_json() != told:  # a version with fewer terms
                return None
        return cls(**facts, records=Records(read, root))

    def add(self, line: Line) -> None:
        """Take one more line into account, or refuse it and change nothing that matters."""
        try:
            facts = line.facts
            self._require(line.seq == self.seq + 1 or line.kind == "restore", "its number")
            self._require((line.kind == "create") == (self.seq == 0), "its place")
            self._require(line.kind in KINDS, "a kind this version does not know")
            getattr(self, f"_{line.kind}")(line, facts)
        except (KeyError, TypeError, ValueError, InputError, RecursionError) as error:
            raise VaultRefusal(
                f"the vault is damaged (line {line.seq} makes no sense: {error}); put its backup "
                "back and run `sottovoce ledger rebind VAULT --restored`"
            ) from None
        self.seq, self.hash = line.seq, line.hash

    def _create(self, line: Line, facts: dict[str, Any]) -> None:
        self._require(line.seq == 1, "its number")
        self._require(bool(_ID.fullmatch(facts["vault"])) and facts["capacity"] > 0, "its id")
        self._require(is_hash(facts["dataset"]), "its data set")
        self.id, self.made, self.capacity = facts["vault"], line.time, float(facts["capacity"])
        self.policy, self.dataset = Policy.from_json(facts["policy"]), facts["dataset"]
        self.salt = str(facts["salt"])
        self.inode = int(facts["inode"])

    def _run(self, line: Line, facts: dict[str, Any]) -> None:
        name = facts["run"]
        self._require(isinstance(name, str) and self.run(name) is None, "its run")
        self._put_run(name, Run(opened=self.spent))

    def _reserve(self, line: Line, facts: dict[str, Any]) -> None:
        name, t, units, server = facts["run"], facts["t"], facts["units"], facts["server"]
        run, turn = self.run(name), self.turn(name, t)
        self._require(type(t) is int and is_hash(facts["request"]), "its round")
        self._require(turn is None or turn.stored is None, "its round has an answer")
        self._require(bool(units) and all(type(u) is int and u > 0 for u in units), "its units")
        self._require(self.spent + sum(units) <= FULL, "more than there was")
        if run is None:
            raise ValueError("its run")
        self.promised = self.promised or self.policy
        self.spent += sum(units)
        run = replace(run, debits=run.debits + len(units), units=run.units + sum(units))
        if "acknowledged" in facts:
            before, seen = facts["acknowledged"]
            self._require(self.may_drop(name, t, before, seen), "what it drops")
            run = replace(run, before=before, line=seen)
        self._put_run(name, run)
        self.records.put("server", server, value=self.spent_by_server(server) + sum(units))
        self.records.put("turn", name, t, value=astuple(Turn(line.seq, line.hash)))
        self.unanswered += 1

    def may_drop(self, name: str, t: int, before: int, seen: int) -> bool:
        """Return whether a server that asks for round t has acknowledged the one named `before`.

        It has if it knows the line of that round's reserve, whose hash left with the answer alone.
        Bounds only grow, both of them: else a round between two of them would be dropped unseen.
        """
        run, turn = self.run(name), self.turn(name, before)
        if run is None or turn is None or turn.stored is None:
            return False
        return run.before < before < t and run.line < seen == turn.reserve

    def _store(self, line: Line, facts: dict[str, Any]) -> None:
        name, t, reserve = facts["run"], facts["t"], facts["reserve"]
        turn = self.turn(name, t)
        if turn is None or turn.stored is not None or reserve <= self.restored:
            raise ValueError("its round has no open reserve")
        if reserve != turn.reserve:  # an earlier one of the same round, which was open as well
            found = self.line(reserve)
            if found is None or found.kind != "reserve":
                raise ValueError("its reserve")
            self._require((found.facts["run"], found.facts["t"]) == (name, t), "its round")
            turn = Turn(reserve, found.hash)
        self._require(is_hash(facts["sha256"]) and type(facts["size"]) is int, "its upload")
        turn = replace(turn, stored=line.seq, sha256=facts["sha256"])
        self.records.put("turn", name, t, value=astuple(turn))
        self.unanswered = 0

    def _put_run(self, name: str, run: Run) -> None:
        self.records.put("run", name, value=astuple(run))

    def _tighten(self, line: Line, facts: dict[str, Any]) -> None:
        self.policy = Policy.from_json(facts["policy"])

    def _rebind(self, line: Line, facts: dict[str, Any]) -> None:
        self._require(is_hash(facts["dataset"]) and facts["overlap"] in OVERLAPS, "its data set")
        self.policy = Policy.from_json(facts["policy"])
        self.dataset, self.salt = facts["dataset"], str(facts["salt"])

    def _move(self, line: Line, facts: dict[str, Any]) -> None:
        self.inode = int(facts["inode"])

    def _restore(self, line: Line, facts: dict[str, Any]) -> None:
        burnt = facts["burnt"]
        self._require(type(burnt) is int and 0 <= burnt <= FULL - self.spent, "its units")
        self._require(line.seq > self.seq, "its number")
        if burnt:
            self.promised = self.promised or self.policy
        self.spent += burnt
        self.burnt += burnt
        self.inode = int(facts["inode"])
        self.restored = line.seq

    def _stop(self, line: Line, facts: dict[str, Any]) -> None:
        self.failed = True

    def _resume(self, line: Line, facts: dict[str, Any]) -> None:
        self.failed, self.unanswered = False, 0

    @staticmethod
    def _require(holds: bool, what: str) -> None:
        if not holds:
            raise ValueError(what)


_SUMMED = tuple(f.name for f in fields(Books) if f.name not in ("records", "line"))


def _plain(value: object) -> object:
    return value.to_json() if isinstance(value, Policy) else value
