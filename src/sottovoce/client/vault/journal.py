"""The vault's one SQLite file: lines are added, never changed, and durable when `append` returns.

`journal_mode = DELETE` keeps everything in one file (write-ahead logging would leave the newest
lines in a second one, which a copy forgets), and `synchronous = EXTRA` syncs the folder as well
after a rollback journal is removed: with FULL alone a power cut can bring that journal back, and
with it the state before the commit. Triggers refuse UPDATE and DELETE to whoever opens the file
with other tools; the hash chain shows what got past them. Two tables are written over: `summary`,
one row, and `nodes`, the tree of its records. A file of the first form has neither; its next write
adds them.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, NoReturn, Self

from sottovoce.client.vault import steps
from sottovoce.client.vault.chain import GENESIS, Line, chained
from sottovoce.errors import VaultRefusal

APPLICATION = 0x50_77_0C_E1  # "application_id": tells a vault from other SQLite files
BACKUP = 0x50_77_0C_EB  # a backup instead: whole, and never served as it is
VERSION = 2
MOST_DROPPED = 16  # uploads in one write, so that none takes long; the next one goes on
MOST_BYTES = 10**9 - 1024  # of one upload: SQLite's limit on a value, with room for its row

# A damaged file can also make an error's own text unreadable.
_FAULTS = (sqlite3.Error, UnicodeError, OverflowError)
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
            journal._run("BEGIN EXCLUSIVE")
            for statement in _SCHEMA:
                journal._run(statement)
            journal._run(f"PRAGMA application_id = {APPLICATION}")
            journal._run(f"PRAGMA user_version = {VERSION}")
            journal._insert(first)
            journal._run("COMMIT")
        finally:
            journal.close()

    @classmethod
    def open(cls, path: Path) -> Self:
        """Open an existing file and take SQLite's own lock; its form is checked, not its chain."""
        journal = cls(path, _connect(path, "rw"))
        try:
            journal._run("BEGIN EXCLUSIVE")
            journal._run("COMMIT")  # the lock stays: locking_mode is EXCLUSIVE
            journal._check_form()
        except BaseException:
            journal.close()
            raise
        return journal

    def lines(self, after: int = 0, prev: str = GENESIS) -> Iterator[Line]:
        """The lines after one in order, each checked against the one before it."""
        try:
            for row in self._db.execute(f"{_LINE} WHERE seq > ? ORDER BY seq", (after,)):
                line = Line(*row)
                if line != chained(prev, *row[:4]):
                    self.refuse_damaged(f"line {row[0]} does not fit the one before it")
                yield line
                prev = line.hash
        except _FAULTS as error:
            self.refuse_damaged(str(error))

    def line(self, seq: int) -> Line | None:
        """One line by its number, checked against its own hash."""
        return self._line("WHERE seq = ?", seq)

    def has_gap(self, seq: int) -> bool:
        """Whether a line that is not there was lost and paid for: a restore follows on the gap."""
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
        if line != chained(line.prev, *row[:4]):
            self.refuse_damaged(f"line {row[0]} is not the one that was written")
        return line

    def summary(self) -> str | None:
        """The newest summary of the lines, if there is one."""
        return None if self._version == 1 else self._text("SELECT content FROM summary")

    def node(self, place: str) -> str | None:
        """One node of the records' tree, by its name."""
        return self._text("SELECT content FROM nodes WHERE place = ?", place)

    def _text(self, statement: str, *values: object) -> str | None:
        row = self._row(statement, *values)
        return None if row is None or not isinstance(row[0], str) else row[0]

    def answered(self) -> dict[int, tuple[str, int]]:
        """Which rounds have stored uploads, by line; their bytes are not read."""
        try:
            rows = self._db.execute("SELECT seq, run, t FROM uploads").fetchall()
        except _FAULTS as error:
            self.refuse_damaged(str(error))
        return {seq: (run, t) for seq, run, t in rows}

    def upload(self, seq: int) -> bytes:
        """The bytes of a stored upload; the caller holds them against their line's hash."""
        row = self._row("SELECT content FROM uploads WHERE seq = ?", seq)
        if row is None or not isinstance(row[0], bytes):
            self.refuse_damaged(f"the upload of line {seq} is gone")
        content: bytes = row[0]
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

        A summary of the lines before comes with the nodes of its tree that are new. Uploads of a
        run from before a round and a line are dropped, the oldest `MOST_DROPPED` of them. A backup
        that is written to is in service; chest lets only a restore come so far.
        """
        self._run("BEGIN EXCLUSIVE")
        if self.backup:
            self._run(f"PRAGMA application_id = {APPLICATION}")
        for statement in _UPGRADE if self._version == 1 else ():
            self._run(statement)
        if summary is not None:
            for node in summary[1].items():
                self._run("INSERT OR REPLACE INTO nodes VALUES (?, ?)", *node)
            self._run("INSERT OR REPLACE INTO summary VALUES (1, ?)", summary[0])
            steps.reached(f"{kind}: summarised")
        if drop is not None:
            which = "SELECT seq FROM uploads WHERE run = ? AND t < ? AND seq < ? ORDER BY t LIMIT ?"
            self._run(f"DELETE FROM uploads WHERE seq IN ({which})", *drop, MOST_DROPPED)
            steps.reached(f"{kind}: dropped")
        for line in lines:
            self._insert(line)
        if upload is not None:
            self._run("INSERT INTO uploads VALUES (?, ?, ?, ?)", lines[-1].seq, *upload)
        steps.reached(f"{kind}: inserted")
        self._run("COMMIT")
        self.backup, self._version = False, VERSION

    def copy_to(self, part: Path) -> None:
        """A consistent copy into an empty file, marked as a backup."""
        try:
            with closing(sqlite3.connect(part, isolation_level=None)) as copy:
                self._db.backup(copy)
                copy.execute(f"PRAGMA application_id = {BACKUP}")
        except _FAULTS as error:
            _refuse(part, error)

    def check_pages(self) -> None:
        """SQLite's own check of every page, for `ledger verify`."""
        row = self._row("PRAGMA integrity_check(1)")
        if row is None or row[0] != "ok":
            self.refuse_damaged("no answer" if row is None else str(row[0]))

    def close(self) -> None:
        """Release the file."""
        self._db.close()

    def _insert(self, line: Line) -> None:
        self._run(
            "INSERT INTO entries VALUES (?, ?, ?, ?, ?, ?)",
            line.seq, line.time, line.kind, line.payload, line.prev, line.hash,
        )  # fmt: skip

    def _check_form(self) -> None:
        try:
            form = self._db.execute(
                "SELECT sql FROM sqlite_master WHERE sql IS NOT NULL"
            ).fetchall()
            marks = [
                self._db.execute(f"PRAGMA {name}").fetchone()[0]
                for name in ("application_id", "user_version")
            ]
        except _FAULTS as error:
            self.refuse_damaged(str(error))
        self.backup = marks[0] == BACKUP
        known = marks[0] in (APPLICATION, BACKUP) and marks[1] in _FORMS
        if not known or sorted(sql for (sql,) in form) != sorted(_FORMS[marks[1]]):
            self.refuse_damaged("its tables or their guards are not those of a vault")
        self._version = marks[1]

    def _row(self, statement: str, *values: object) -> tuple[Any, ...] | None:
        try:
            row: tuple[Any, ...] | None = self._db.execute(statement, values).fetchone()
        except _FAULTS as error:
            self.refuse_damaged(str(error))
        return row

    def _run(self, statement: str, *values: object) -> None:
        try:
            self._db.execute(statement, values)
        except _FAULTS as error:
            _refuse(self._path, error)

    def refuse_damaged(self, why: str) -> NoReturn:
        """Refuse this file, and say what is wrong with it."""
        raise VaultRefusal(
            f"{self._path} is damaged ({why}); put its backup back and run "
            f"`sottovoce ledger rebind {self._path.name} --restored`"
        ) from None


def _connect(path: Path, mode: str) -> sqlite3.Connection:
    try:
        connection = sqlite3.connect(
            f"{path.absolute().as_uri()}?mode={mode}",
            uri=True,
            timeout=0,  # who comes second is told at once
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


def _refuse(path: Path, error: Exception) -> NoReturn:
    code = getattr(error, "sqlite_errorname", "")
    if code.startswith(("SQLITE_BUSY", "SQLITE_LOCKED")):
        raise VaultRefusal(
            f"{path} is in use by another process; wait until it has ended, then try again"
        ) from None
    if code.startswith(("SQLITE_FULL", "SQLITE_IOERR", "SQLITE_READONLY", "SQLITE_CANTOPEN")):
        raise VaultRefusal(
            f"{path} cannot be written ({error}); make room and check its permissions, "
            "nothing that was booked is lost"
        ) from None
    raise VaultRefusal(
        f"{path} is damaged ({error}); put its backup back and run "
        f"`sottovoce ledger rebind {path.name} --restored`"
    ) from None
