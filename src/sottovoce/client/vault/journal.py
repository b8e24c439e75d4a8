"""The vault's one SQLite file: lines are added, never changed, and durable when `append` returns.

`journal_mode = DELETE` keeps everything in one file (write-ahead logging would leave the newest
lines in a second one, which a copy forgets), and `synchronous = EXTRA` syncs the folder as well
after a rollback journal is removed: with FULL alone a power cut can bring that journal back, and
with it the state before the commit. Triggers refuse UPDATE and DELETE to whoever opens the file
with other tools; the hash chain shows what got past them. Two tables are overwritten: `summary`,
one row, and `nodes`, the tree of its records. A file of the first form has neither; its next write
adds them.

`Books` are what the lines add up to. Every line is also checked for sense: a ledger with fitting
hashes but impossible numbers is refused like one whose hashes do not fit. What grows with the
history (runs, rounds, servers) are `Records`; all else is a few numbers. A summary holds these
numbers and the root of the records' tree, so that not all lines are read at each opening. Its hash
is part of the line that follows it, so that any later hash tells whether a summary is right.

`Records` keeps the newest values in memory, all others in a hash tree in the file. A leaf holds up
to 16 records; one that would hold more becomes an inner node with 16 children, chosen by the next
digit of SHA-256 of the key. A node is named by the digits before it and checked by its SHA-256,
which its parent holds; the hash of the root stands for all of it:

    look up:  root → … → leaf, at most log₁₆(records) + 1 nodes, each checked by its hash

So a changed or missing record is noticed where it is read, and "there is no such record" is as
certain as a record. Nothing is removed, so equal records make an equal tree.
"""

from __future__ import annotations

import json
import math
import mmap
import re
import sqlite3
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import astuple, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, NoReturn, Self

from sottovoce.client.vault import chain
from sottovoce.client.vault.chain import GENESIS, Line, encode_canonical, is_hash, link_line, sha256
from sottovoce.client.vault.policy import Policy
from sottovoce.data.files import DAMAGE
from sottovoce.errors import VaultRefusal
from sottovoce.privacy.tank import FULL

_LEAF_SIZE = 16  # records at most


class Records:
    """Values by key, over a tree whose nodes `read` returns by name (None: there is none)."""

    def __init__(self, read: Callable[[str], str | None], root: str = "") -> None:
        self.changed: dict[str, Any] = {}  # since the tree was written
        self._read, self._root = read, root  # no root: an empty tree

    def get(self, *key: object) -> Any:
        """Return the value of a key, None if it has none; refuse a damaged node."""
        name = encode_canonical(key)
        if name in self.changed:
            return self.changed[name]
        digits, depth, wanted = sha256(name), 0, self._root
        while wanted:
            node = self._read_node(digits[:depth], wanted)
            if isinstance(node, dict):
                return node.get(name)
            wanted, depth = node[int(digits[depth], 16)], depth + 1
        return None

    def put(self, *key: object, value: Any) -> None:
        """Set the value of a key, in memory."""
        self.changed[encode_canonical(key)] = value

    def fold(self) -> tuple[str, dict[str, str]]:
        """Move all changes into the tree; return its new root, and the nodes to write."""
        nodes: dict[str, str] = {}
        if self.changed:
            by_digits = {sha256(name): (name, value) for name, value in self.changed.items()}
            self._root = self._merge("", self._root, by_digits, nodes)
            self.changed = {}
        return self._root, nodes

    def _merge(
        self, name: str, wanted: str, more: Mapping[str, tuple[str, Any]], nodes: dict[str, str]
    ) -> str:
        """Add records to the node of this name and those below it; return the node's new hash."""
        node = self._read_node(name, wanted) if wanted else {}
        if isinstance(node, dict):
            more = {**{sha256(key): (key, value) for key, value in node.items()}, **more}
            node = dict(more.values()) if len(more) <= _LEAF_SIZE else [""] * 16
        if isinstance(node, list):
            groups: dict[str, dict[str, tuple[str, Any]]] = {}
            for digits, record in more.items():
                groups.setdefault(digits[len(name)], {})[digits] = record
            for digit, group in groups.items():
                child = int(digit, 16)
                node[child] = self._merge(name + digit, node[child], group, nodes)
        nodes[name] = encode_canonical(node)
        return sha256(nodes[name])

    def _read_node(self, name: str, wanted: str) -> Any:
        content = self._read(name)
        if content is None or sha256(content) != wanted:
            _refuse_content(f"node {name or 'root'} of its records is not the one that was written")
        return json.loads(content)


OVERLAPS = ("all", "some")
MOST_UNPAID = 64  # rounds of sums that are opened and never paid for; a debit makes up for two
_ID = re.compile(r"[0-9a-f]{32}")  # a file of the machine's own witness is named by it


@dataclass(frozen=True)
class LedgerRun:
    """One run as this ledger has seen it."""

    opened: int  # units spent when it began
    debits: int = 0  # releases booked, whether or not the upload arrived
    units: int = 0  # booked for them
    before: int = 0  # uploads of rounds before this one are dropped …
    line: int = 0  # … if they were stored before this line


@dataclass(frozen=True)
class Turn:
    """The newest reserve of one round of one run, and its stored upload."""

    reserve: int
    hash: str  # of that line
    stored: int | None = None
    sha256: str = ""  # of the upload


@dataclass
class Books:
    """The sums of a ledger so far. They change in place: a copy per line would cost n²."""

    seq: int = 0
    hash: str = GENESIS
    id: str = ""
    made: str = ""
    capacity: float = 0.0  # μ² of 2⁵⁰ units, for the vault's whole life
    policy: Policy = None  # type: ignore[assignment]  # set by the first line
    promised: Policy | None = None  # the policy when the first debit was booked
    dataset: str = ""
    salt: str = ""  # of the line that names the data set
    inode: int = 0
    spent: int = 0
    alone: int = 0  # the same by this client's own noise, whatever others do
    burnt: int = 0  # the part of `spent` that restores have booked for what they could not know
    restored: int = 0  # the line of the last restore: no upload is stored for a reserve before it
    unanswered: int = 0  # reserves in a row without an upload, since the last `resume`
    failed: bool = False  # whether an answer has failed since then
    unpaid: int = 0  # rounds of sums opened, less two for each debit, since the last `resume`
    records: Records = field(default_factory=lambda: Records(lambda _: None))
    line: Callable[[int], Line | None] = lambda seq: None  # how an earlier line is read

    def run(self, name: str) -> LedgerRun | None:
        """Return what is known of a run."""
        values = self.records.get("run", name)
        return None if values is None else LedgerRun(*values)

    def turn(self, run: str, t: int) -> Turn | None:
        """Return what is known of a round."""
        values = self.records.get("turn", run, t)
        return None if values is None else Turn(*values)

    def spent_by_run(self, name: str) -> int:
        """Return the units booked by one run."""
        run = self.run(name)
        return 0 if run is None else run.units

    def spent_by_server(self, server: str) -> int:
        """Return the units booked for what one server asked, by the name it gave."""
        return int(self.records.get("server", server) or 0)

    def is_dropped(self, run: str, t: int) -> bool:
        """Return whether a round's upload was dropped, because its server has it."""
        turn, asked_by = self.turn(run, t), self.run(run)
        if turn is None or turn.stored is None or asked_by is None:
            return False
        return t < asked_by.before and turn.stored < asked_by.line

    def list_stored(self) -> Iterator[tuple[str, int, Turn]]:
        """Yield every round with an upload, dropped or not; needs the whole ledger to be read."""
        for key, value in self.records.changed.items():
            kind, *key_fields = json.loads(key)
            if kind == "turn" and (turn := Turn(*value)).stored is not None:
                yield key_fields[0], key_fields[1], turn

    def make_summary(self) -> tuple[str, dict[str, str]]:
        """Return the summary of all lines so far, and the nodes of its tree that are new."""
        root, nodes = self.records.fold()
        return encode_canonical(
            {name: _to_plain(getattr(self, name)) for name in _SUMMED} | {"root": root}
        ), nodes

    @classmethod
    def from_summary(cls, content: str, read: Callable[[str], str | None]) -> Self | None:
        """Return the books that a summary was made of, None if another version made it."""
        facts = dict(json.loads(content))
        root = facts.pop("root")
        if facts.keys() != set(_SUMMED):
            return None
        for name in ("policy", "promised"):
            stored = facts[name]
            facts[name] = None if stored is None else Policy.from_json(stored)
            if stored is not None and facts[name].to_json() != stored:  # a version with fewer terms
                return None
        return cls(**facts, records=Records(read, root))

    def add(self, line: Line) -> None:
        """Add one more line, or refuse it and change nothing that matters."""
        try:
            facts = line.facts
            self._require(line.seq == self.seq + 1 or line.kind == "restore", "its number")
            self._require((line.kind == "create") == (self.seq == 0), "its place")
            add = getattr(self, f"_add_{line.kind}", None)  # one for each kind of line
            if add is None:
                raise ValueError("a kind this version does not know")
            add(line, facts)
        except (*DAMAGE, RecursionError) as error:
            _refuse_content(f"line {line.seq} makes no sense: {error}")
        self.seq, self.hash = line.seq, line.hash

    def _add_create(self, line: Line, facts: dict[str, Any]) -> None:
        self._require(line.seq == 1, "its number")
        self._require(bool(_ID.fullmatch(facts["vault"])), "its id")
        self._require(0 < facts["capacity"] < math.inf, "its capacity")
        self._require(is_hash(facts["dataset"]), "its data set")
        self.id, self.made, self.capacity = facts["vault"], line.time, float(facts["capacity"])
        self.policy, self.dataset = Policy.from_json(facts["policy"]), facts["dataset"]
        self.salt = str(facts["salt"])
        self.inode = int(facts["inode"])

    def _add_run(self, line: Line, facts: dict[str, Any]) -> None:
        name = facts["run"]
        self._require(isinstance(name, str) and self.run(name) is None, "its run")
        self.records.put("run", name, value=astuple(LedgerRun(opened=self.spent)))

    def _add_reserve(self, line: Line, facts: dict[str, Any]) -> None:
        name, t, units, server = facts["run"], facts["t"], facts["units"], facts["server"]
        run, turn = self.run(name), self.turn(name, t)
        self._require(type(t) is int and is_hash(facts["request"]), "its round")
        self._require(turn is None or turn.stored is None, "its round has an answer")
        self._require(bool(units) and all(type(u) is int and u > 0 for u in units), "its units")
        self._require(self.spent + sum(units) <= FULL, "more than there was")
        if run is None:
            raise ValueError("its run")
        self.promised = self.promised or self.policy
        alone = facts.get("alone", sum(units))
        self._require(type(alone) is int and alone >= sum(units), "its units alone")
        self.spent += sum(units)
        self.alone += alone
        run = replace(run, debits=run.debits + len(units), units=run.units + sum(units))
        if "acknowledged" in facts:
            before, seen = facts["acknowledged"]
            self._require(self.may_drop(name, t, before, seen), "what it drops")
            run = replace(run, before=before, line=seen)
        self.records.put("run", name, value=astuple(run))
        self.records.put("server", server, value=self.spent_by_server(server) + sum(units))
        self.records.put("turn", name, t, value=astuple(Turn(line.seq, line.hash)))
        self.unanswered += 1
        self.unpaid = max(0, self.unpaid - 2)

    def may_drop(self, name: str, t: int, before: int, seen: int) -> bool:
        """Return whether a server that asks for round t has acknowledged round `before`.

        It has if it knows the line of that round's reserve, whose hash left only with the answer.
        Both bounds only grow: otherwise a round between two of them would be dropped unseen.
        """
        run, turn = self.run(name), self.turn(name, before)
        if run is None or turn is None or turn.stored is None:
            return False
        return run.before < before < t and run.line < seen == turn.reserve

    def _add_store(self, line: Line, facts: dict[str, Any]) -> None:
        name, t, reserve = facts["run"], facts["t"], facts["reserve"]
        turn = self.turn(name, t)
        if turn is None or turn.stored is not None or reserve <= self.restored:
            raise ValueError("its round has no open reserve")
        if reserve != turn.reserve:  # an earlier one of the same round, which was open as well
            earlier = self.line(reserve)
            if earlier is None or earlier.kind != "reserve":
                raise ValueError("its reserve")
            self._require((earlier.facts["run"], earlier.facts["t"]) == (name, t), "its round")
            turn = Turn(reserve, earlier.hash)
        self._require(is_hash(facts["sha256"]) and type(facts["size"]) is int, "its upload")
        turn = replace(turn, stored=line.seq, sha256=facts["sha256"])
        self.records.put("turn", name, t, value=astuple(turn))
        self.unanswered = 0

    def _add_tighten(self, line: Line, facts: dict[str, Any]) -> None:
        self.policy = Policy.from_json(facts["policy"])

    def _add_rebind(self, line: Line, facts: dict[str, Any]) -> None:
        self._require(is_hash(facts["dataset"]) and facts["overlap"] in OVERLAPS, "its data set")
        self.policy = Policy.from_json(facts["policy"])
        self.dataset, self.salt = facts["dataset"], str(facts["salt"])

    def _add_move(self, line: Line, facts: dict[str, Any]) -> None:
        self.inode = int(facts["inode"])

    def _add_restore(self, line: Line, facts: dict[str, Any]) -> None:
        burnt = facts["burnt"]
        self._require(type(burnt) is int and 0 <= burnt <= FULL - self.spent, "its units")
        self._require(line.seq > self.seq, "its number")
        if "policy" in facts:  # of releases that the backup lacks, which were its first
            self._require(self.promised is None, "its policy")
            self.policy = Policy.from_json(facts["policy"])
        if burnt:
            self.promised = self.promised or self.policy
        alone = facts.get("alone", math.ceil(burnt * self.policy.share))
        self._require(type(alone) is int and alone >= burnt, "its units alone")
        self.spent += burnt
        self.alone += alone
        self.burnt += burnt
        self.inode = int(facts["inode"])
        self.restored = line.seq

    def _add_note(self, line: Line, facts: dict[str, Any]) -> None:
        key = "note", facts["run"], facts["t"], facts["step"]
        self._require(isinstance(facts["content"], str), "its content")
        self._require(self.records.get(*key) is None, "its step was noted before")
        self.records.put(*key, value=[line.seq, line.hash])
        self.unpaid += facts["step"] == "key"

    def _add_stop(self, line: Line, facts: dict[str, Any]) -> None:
        self.failed = True

    def _add_resume(self, line: Line, facts: dict[str, Any]) -> None:
        self.failed, self.unanswered, self.unpaid = False, 0, 0

    @staticmethod
    def _require(holds: bool, what: str) -> None:
        if not holds:
            raise ValueError(what)


_SUMMED = tuple(f.name for f in fields(Books) if f.name not in ("records", "line"))


def _to_plain(value: object) -> object:
    return value.to_json() if isinstance(value, Policy) else value


APPLICATION = 0x50_77_0C_E1  # "application_id": tells a vault from other SQLite files
BACKUP = 0x50_77_0C_EB  # a backup instead: whole, and never served as it is
VERSION = 2
MOST_DROPPED = 16  # uploads in one write, so that no write takes long; the next drops more
MOST_BYTES = 10**9 - 1024  # of one upload: SQLite's limit on a value, with room for its row

# A damaged file can make even the text of an error unreadable.
_FAULTS = (sqlite3.Error, UnicodeError, OverflowError)
# Errors of the disk, which may pass: nothing is known to be wrong with the file.
_NOT_NOW = tuple(f"SQLITE_{c}" for c in ("FULL", "READONLY", "IOERR", "CANTOPEN", "PERM"))
_PRAGMAS = (
    "trusted_schema = OFF",
    "cell_size_check = ON",
    "locking_mode = EXCLUSIVE",
    "journal_mode = DELETE",
    "synchronous = EXTRA",
    "fullfsync = ON",  # macOS: past the drive's own cache
    "secure_delete = ON",  # what is dropped is overwritten, and its pages are used again
)
_OLD_GUARD = (
    "CREATE TRIGGER uploads_delete BEFORE DELETE ON uploads "
    "BEGIN SELECT RAISE(ABORT, 'uploads are only added'); END"
)
_GUARD = (
    "CREATE TRIGGER uploads_delete BEFORE DELETE ON uploads "
    "WHEN OLD.t >= (SELECT max(t) FROM uploads WHERE run = OLD.run) "
    "BEGIN SELECT RAISE(ABORT, 'uploads are only added, the newest of a run is kept'); END"
)
_TABLES = (
    "CREATE TABLE summary (id INTEGER PRIMARY KEY CHECK (id = 1), content TEXT NOT NULL)",
    "CREATE TABLE nodes (place TEXT PRIMARY KEY, content TEXT NOT NULL) WITHOUT ROWID",
)
_OLD_SCHEMA = (
    "CREATE TABLE entries (seq INTEGER PRIMARY KEY, time TEXT NOT NULL, kind TEXT NOT NULL, "
    "payload TEXT NOT NULL, prev TEXT NOT NULL, hash TEXT NOT NULL)",
    "CREATE TABLE uploads (seq INTEGER PRIMARY KEY, run TEXT NOT NULL, t INTEGER NOT NULL, "
    "content BLOB NOT NULL, UNIQUE (run, t))",
    "CREATE TRIGGER entries_in_order BEFORE INSERT ON entries "
    "WHEN NEW.seq <= (SELECT max(seq) FROM entries) "
    "BEGIN SELECT RAISE(ABORT, 'entries are only added'); END",
    *(
        f"CREATE TRIGGER {table}_{verb.lower()} BEFORE {verb} ON {table} "
        f"BEGIN SELECT RAISE(ABORT, '{table} are only added'); END"
        for table, verb in (("entries", "UPDATE"), ("entries", "DELETE"), ("uploads", "UPDATE"))
    ),
    _OLD_GUARD,
)
_SCHEMA = (*_OLD_SCHEMA[:-1], _GUARD, *_TABLES)
_FORMS = {1: _OLD_SCHEMA, VERSION: _SCHEMA}
_UPGRADE = ("DROP TRIGGER uploads_delete", _GUARD, *_TABLES, f"PRAGMA user_version = {VERSION}")
_LINE = "SELECT seq, time, kind, payload, prev, hash FROM entries"


class Journal:
    """An open vault file, locked for this process. Every failure is a `VaultRefusal`."""

    def __init__(self, path: Path, connection: sqlite3.Connection) -> None:
        self._path, self._db = path, connection
        self.backup = False  # whether the file is marked as one
        self._version = VERSION

    @classmethod
    def make(cls, path: Path, first: Line) -> None:
        """Make a new file with its first line, and close it again."""
        journal = cls(path, _connect(path, "rwc"))
        try:
            journal._execute("BEGIN EXCLUSIVE")
            for statement in _SCHEMA:
                journal._execute(statement)
            journal._execute(f"PRAGMA application_id = {APPLICATION}")
            journal._execute(f"PRAGMA user_version = {VERSION}")
            journal._insert(first)
            journal._execute("COMMIT")
        finally:
            journal.close()

    @classmethod
    def open(cls, path: Path) -> Self:
        """Open an existing file and take SQLite's lock; check its form, not its chain."""
        _require_form(path)
        journal = cls(path, _connect(path, "rw"))
        try:
            journal._execute("BEGIN EXCLUSIVE")
            journal._execute("COMMIT")  # the lock stays: locking_mode is EXCLUSIVE
            journal._check_form()
        except BaseException:
            journal.close()
            raise
        return journal

    def lines(self, after: int = 0, prev: str = GENESIS) -> Iterator[Line]:
        """Yield the lines after one in order, each checked against the one before it."""
        try:
            for row in self._db.execute(f"{_LINE} WHERE seq > ? ORDER BY seq", (after,)):
                line = Line(*row)
                if line != link_line(prev, *row[:4]):
                    self.refuse_damaged(f"line {row[0]} does not fit the one before it")
                yield line
                prev = line.hash
        except _FAULTS as error:
            _refuse(self._path, error)

    def line(self, seq: int) -> Line | None:
        """Return one line by its number, checked against its own hash."""
        return self._line("WHERE seq = ?", seq)

    def find_line(self, seq: int, booked: str) -> Line:
        """Return a line whose hash is known from the books."""
        line = self.line(seq)
        if line is None or line.hash != booked:
            self.refuse_damaged(f"line {seq} is not the one that was booked")
        return line

    def find_terms(self, seq: int) -> Line | None:
        """Return the line with the terms that stood at a line; None if nothing was tightened since.

        Lines have no index of kinds: the whole ledger is searched only in the other case.
        """
        since = "EXISTS (SELECT 1 FROM entries WHERE seq > ?1 AND kind = 'tighten')"
        kinds = "kind IN ('create', 'tighten', 'rebind')"
        return self._line(f"WHERE {since} AND seq <= ?1 AND {kinds} ORDER BY seq DESC LIMIT 1", seq)

    def has_gap(self, seq: int) -> bool:
        """Return whether a missing line was lost and paid for: a restore follows on the gap."""
        below = self._line("WHERE seq < ? ORDER BY seq DESC LIMIT 1", seq)
        above = self._line("WHERE seq > ? ORDER BY seq LIMIT 1", seq)
        if below is None or above is None or above.kind != "restore" or above.prev != below.hash:
            self.refuse_damaged(f"line {seq} is gone")
        return True

    def _line(self, which: str, seq: int) -> Line | None:
        row = self._row(f"{_LINE} {which}", seq)
        if row is None:
            return None
        line = Line(*row)
        if line != link_line(line.prev, *row[:4]):
            self.refuse_damaged(f"line {row[0]} is not the one that was written")
        return line

    def summary(self) -> str | None:
        """Return the newest summary of the lines, if there is one."""
        return None if self._version == 1 else self._text("SELECT content FROM summary")

    def node(self, name: str) -> str | None:
        """Return one node of the records' tree, by its name."""
        return self._text("SELECT content FROM nodes WHERE place = ?", name)

    def _text(self, statement: str, *values: object) -> str | None:
        row = self._row(statement, *values)
        return None if row is None or not isinstance(row[0], str) else row[0]

    def list_uploads(self) -> dict[int, tuple[str, int]]:
        """Return which rounds have stored uploads, by line; their bytes are not read."""
        return {seq: (run, t) for seq, run, t in self._rows("SELECT seq, run, t FROM uploads")}

    def upload(self, turn: Turn) -> bytes:
        """Return the bytes stored for a round, checked against the hash in the books."""
        row = self._row("SELECT content FROM uploads WHERE seq = ?", turn.stored)
        if row is None or not isinstance(row[0], bytes):
            self.refuse_damaged(f"the upload of line {turn.stored} is gone")
        content: bytes = row[0]
        if sha256(content) != turn.sha256:
            self.refuse_damaged(f"the upload of line {turn.stored} is not the one that was stored")
        return content

    def append(
        self,
        lines: Sequence[Line],
        kind: str,
        upload: tuple[str, int, bytes] | None = None,
        *,
        summary: tuple[str, Mapping[str, str]] | None = None,
        drop: tuple[str, int, int] | None = None,
    ) -> None:
        """Add lines (and the upload of the last one): all of it, durable, or nothing.

        A summary of the lines before comes with the new nodes of its tree. `drop` drops uploads of
        a run from before a round and a line, the oldest `MOST_DROPPED` of them. A backup that is
        written to is in service; the chest lets only a restore do that.
        """
        self._execute("BEGIN EXCLUSIVE")
        if self.backup:
            self._execute(f"PRAGMA application_id = {APPLICATION}")
        for statement in _UPGRADE if self._version == 1 else ():
            self._execute(statement)
        if summary is not None:
            for node in summary[1].items():
                self._execute("INSERT OR REPLACE INTO nodes VALUES (?, ?)", *node)
            self._execute("INSERT OR REPLACE INTO summary VALUES (1, ?)", summary[0])
            chain.pass_step(f"{kind}: summarised")
        if drop is not None:
            which = "SELECT seq FROM uploads WHERE run = ? AND t < ? AND seq < ? ORDER BY t LIMIT ?"
            self._execute(f"DELETE FROM uploads WHERE seq IN ({which})", *drop, MOST_DROPPED)
            chain.pass_step(f"{kind}: dropped")
        for line in lines:
            self._insert(line)
        if upload is not None:
            self._execute("INSERT INTO uploads VALUES (?, ?, ?, ?)", lines[-1].seq, *upload)
        chain.pass_step(f"{kind}: inserted")
        self._execute("COMMIT")
        self.backup, self._version = False, VERSION

    def copy_to(self, target: Path) -> None:
        """Write a consistent copy into an empty file, marked as a backup."""
        try:
            with closing(sqlite3.connect(target, isolation_level=None)) as copy:
                self._db.backup(copy)
                copy.execute(f"PRAGMA application_id = {BACKUP}")
        except _FAULTS as error:
            _refuse(target, error)

    def check_pages(self) -> None:
        """Run SQLite's own check of every page, for `ledger verify`."""
        row = self._row("PRAGMA integrity_check(1)")
        if row is None or row[0] != "ok":
            self.refuse_damaged("no answer" if row is None else str(row[0]))

    def close(self) -> None:
        """Release the file."""
        self._db.close()

    def _insert(self, line: Line) -> None:
        self._execute(
            "INSERT INTO entries VALUES (?, ?, ?, ?, ?, ?)",
            line.seq, line.time, line.kind, line.payload, line.prev, line.hash,
        )  # fmt: skip

    def _check_form(self) -> None:
        form = self._rows("SELECT sql FROM sqlite_master WHERE sql IS NOT NULL")
        ((application,),) = self._rows("PRAGMA application_id")
        ((version,),) = self._rows("PRAGMA user_version")
        self.backup = application == BACKUP
        known = application in (APPLICATION, BACKUP) and version in _FORMS
        if not known or sorted(sql for (sql,) in form) != sorted(_FORMS[version]):
            self.refuse_damaged("its tables or their guards are not those of a vault")
        self._version = version

    def _row(self, statement: str, *values: object) -> tuple[Any, ...] | None:
        return next(iter(self._rows(statement, *values)), None)

    def _rows(self, statement: str, *values: object) -> list[tuple[Any, ...]]:
        try:
            return self._db.execute(statement, values).fetchall()
        except _FAULTS as error:
            _refuse(self._path, error)

    def _execute(self, statement: str, *values: object) -> None:
        try:
            self._db.execute(statement, values)
        except _FAULTS as error:
            _refuse(self._path, error)

    def refuse_damaged(self, why: str) -> NoReturn:
        """Refuse this file, and say what is wrong with it."""
        _refuse(self._path, sqlite3.DatabaseError(why))


def _require_form(path: Path) -> None:
    """Refuse a file that says it is no vault, before SQLite gives it the form of one.

    Opened as immutable nothing is locked or written. The file may be in the middle of a write, so
    what seems damaged is left to SQLite, and so is all where a crash has left a journal of its own.
    """
    if (undo := path.with_name(path.name + "-journal")).exists():
        return _require_own_undo(path, undo)
    try:
        with closing(sqlite3.connect(f"{path.as_uri()}?mode=ro&immutable=1", uri=True)) as file:
            ((application,),) = file.execute("PRAGMA application_id").fetchall()
        if application not in (APPLICATION, BACKUP):
            error = sqlite3.DatabaseError("it does not say that it is one")
            error.sqlite_errorname = "SQLITE_NOTADB"
            raise error
    except _FAULTS as error:
        if not getattr(error, "sqlite_errorname", "").startswith("SQLITE_CORRUPT"):
            _refuse(path, error)


def _require_own_undo(path: Path, undo: Path) -> None:
    """Refuse a backup beside SQLite's journal of a vault: opening would write old pages into it.

    A restore that was cut short leaves a journal, too, whose first page is still the backup's.
    """
    with suppress(OSError), path.open("rb") as file, undo.open("rb") as journal:
        if file.read(72)[68:] != BACKUP.to_bytes(4) or not undo.stat().st_size:
            return
        with mmap.mmap(journal.fileno(), 0, access=mmap.ACCESS_READ) as pages:
            first = pages.find(b"\0\0\0\1SQLite format 3\0")  # page 1 after its number
            if first >= 0 and pages[first + 72 : first + 76] == APPLICATION.to_bytes(4):
                raise VaultRefusal(
                    f"{path} is a backup, and a journal beside it is of the vault that was there "
                    f"before, and would be written into it; move {undo.name} into another folder"
                )


def _connect(path: Path, mode: str) -> sqlite3.Connection:
    try:
        connection = sqlite3.connect(
            f"{path.absolute().as_uri()}?mode={mode}",
            uri=True,
            timeout=0,  # a second process is refused at once
            isolation_level=None,
            check_same_thread=False,  # the vault has a lock of its own
        )
    except _FAULTS as error:
        _refuse(path, error)
    try:
        for pragma in _PRAGMAS:
            answer = connection.execute(f"PRAGMA {pragma}").fetchone()
            if pragma.startswith("journal_mode") and answer != ("delete",):
                raise sqlite3.DatabaseError("its journal mode cannot be set")
    except _FAULTS as error:
        connection.close()
        _refuse(path, error)
    return connection


def _refuse_content(why: str) -> NoReturn:
    raise VaultRefusal(
        f"the vault is damaged ({why}); put its backup back and run "
        "`sottovoce ledger rebind VAULT --restored`"
    ) from None


def _refuse(path: Path, error: Exception) -> NoReturn:
    code = getattr(error, "sqlite_errorname", "")
    if code.startswith(("SQLITE_BUSY", "SQLITE_LOCKED")):
        raise VaultRefusal(
            f"{path} is in use by another process; wait until it has ended, then try again"
        ) from None
    if code.startswith(_NOT_NOW):
        raise VaultRefusal(
            f"{path} cannot be read or written ({error}); nothing that was booked is lost: make "
            "room, check its permissions and its disk, and try again, for it may have passed"
        ) from None
    what = f"is damaged ({error});"
    if code == "SQLITE_NOTADB":  # its first bytes are not those of an SQLite file
        what = f"is no vault ({error}); name the file of a vault, or, if it was one,"
    raise VaultRefusal(
        f"{path} {what} put its backup back and run "
        f"`sottovoce ledger rebind {path.name} --restored`"
    ) from None
