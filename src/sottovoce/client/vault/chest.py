"""One open vault: its lock, its journal, the books that its lines add up to, and its witnesses.

What may be written is decided in `vault` and `rebinding`. After every write the order is: commit
(durable) → witness (durable) → books. A write that fails leaves the chest closed for good, because
nobody can know what a failed sync has kept; opening it again reads what is there. One process uses
a vault at a time, under a lock of the operating system that ends with its holder.
"""

from __future__ import annotations

import errno
import os
import stat
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, Self

from sottovoce.client.vault import chain, witness
from sottovoce.client.vault.chain import GENESIS, Line, add_salt, link_line, sha256
from sottovoce.client.vault.journal import Books, Journal, Records
from sottovoce.client.vault.witness import VaultReceipt
from sottovoce.data.files import DAMAGE
from sottovoce.errors import InputError, VaultRefusal

if TYPE_CHECKING:
    from sottovoce.client.messages import Receipt

_POLL_SECONDS = 0.05


@contextmanager
def hold_lock(
    vault: Path, wait: float = 0.0, *, at: Path | None = None, what: str = ""
) -> Iterator[None]:
    """Hold the lock of a vault, or refuse.

    A second process is refused at once, or after waiting so many seconds for the first to end. The
    lock is on a file beside the vault, because closing any descriptor of a SQLite file drops
    SQLite's own locks on it; SQLite's lock on the vault itself is the second protection. `at` names
    another file to lock, and `what` says in the refusal what that lock protects.
    """
    try:
        import fcntl
    except ImportError:  # pragma: no cover
        raise VaultRefusal(
            "a vault needs POSIX file locks, which this system has not; keep it on Linux or macOS"
        ) from None
    file = at or vault.with_name(vault.name + ".lock")
    with ExitStack() as held:
        try:
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
            descriptor = os.open(file, flags, 0o600)
            held.callback(os.close, descriptor)
            found = os.fstat(descriptor)
            if not stat.S_ISREG(found.st_mode) or found.st_nlink > 1:
                # Root would give a file that another user chose to that user.
                raise OSError(errno.ELOOP, "it is another file, too")
            content = os.pread(descriptor, 21, 0)
        except OSError as error:
            witness.refuse_reading(file, error)
        if content.strip(b"0123456789\n"):  # more than the number of a process
            raise VaultRefusal(
                f"{file} is not the lock of a vault, and a lock needs this name; move that file, "
                "or name the vault otherwise"
            )
        witness.give_to_owner(descriptor, vault)
        until = time.monotonic() + wait
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.ftruncate(descriptor, 0)
                os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
                break
            except BlockingIOError:
                if time.monotonic() >= until:
                    raise VaultRefusal(
                        f"{what or vault} is in use{_name_holder(descriptor)}; wait until it has "
                        "ended, then try again"
                    ) from None
                time.sleep(_POLL_SECONDS)
            except OSError as error:
                raise VaultRefusal(
                    f"{vault} cannot be locked ({error.strerror}); keep it on a local disk with "
                    "room left"
                ) from None
        yield


def _name_holder(descriptor: int) -> str:
    with suppress(OSError, ValueError):
        return f" by process {int(os.pread(descriptor, 20, 0))}"
    return ""


SUMMARY_EVERY = 32  # lines; an opening reads at most so many and those of one write
_PATIENCE = 20.0  # seconds that another creation on this machine may take
_MOST_LINES = 2  # of one write: a reserve, and before a run's first reserve the run itself


class Chest:
    """An open vault file with its lock and witness; `Chest.open` reads and checks the chain."""

    def __init__(
        self, path: Path, held: ExitStack, journal: Journal, books: Books, summed: int
    ) -> None:
        self.path, self.books = path, books
        self._held, self._journal = held, journal  # `held` closes the journal and frees its locks
        self._owner, self._usable = os.getpid(), True
        self._inode = path.stat().st_ino
        self._summed = summed  # the line up to which there is a summary
        self._thread_lock = threading.RLock()

    @staticmethod
    def make(
        path: Path,
        facts: dict[str, Any],
        *,
        second_ledger: bool = False,
        others: Sequence[str] = (),
    ) -> None:
        """Make a new vault; until the last step there is none, after it there is a complete one.

        For rows that have a ledger on this machine the operator's word is needed; it is recorded
        with their ids and those of `others`, which may have some of these rows.
        """
        require_usable_name(path)
        path = resolve_path(path.parent) / path.name  # a link there may be another user's choice
        with ExitStack() as held:
            held.enter_context(hold_lock(path))
            try:
                _require_unused(path)
                rows = facts["dataset"]
                if not second_ledger:  # before the other lock: federate takes them in this order
                    held.enter_context(witness.hold_ledgers(rows))
                # One creation at a time: two would not see each other's ledgers.
                with witness.open_state() as state:
                    held.enter_context(hold_lock(path, _PATIENCE, at=state / "create.lock"))
                facts = facts | state_second_ledger(rows, second_ledger=second_ledger, known=others)
                draft = path.with_name(path.name + ".part")
                for leftover in (draft, draft.with_name(draft.name + "-journal")):
                    leftover.unlink(missing_ok=True)  # of a crashed creation: nothing is booked
                chain.pass_step("create: begun")
                draft.touch(mode=0o600, exist_ok=False)
                facts = {**facts, "inode": draft.stat().st_ino}  # renaming keeps it
                first = link_line(GENESIS, 1, _now(), "create", add_salt(facts))
                Books().add(first)
                Journal.make(draft, first)
                chain.pass_step("create: committed")
                made = VaultReceipt(facts["vault"], 1, first.hash, spent=0, alone=0)
                witness.write_machine_witness(made)
                witness.write_witness(path, made, "create")
                chain.pass_step("create: witnessed")
                draft.rename(path)
                witness.sync_folder(path.parent)
                chain.pass_step("create: named")
                witness.note_ledger(rows, facts["vault"])  # after a crash, opening does it
            except OSError as error:
                raise VaultRefusal(
                    f"{path} cannot be made ({error.strerror}); check the folder and its "
                    "permissions"
                ) from None

    @classmethod
    def open(
        cls, path: Path, *, wait: float = 0.0, whole: bool = False, reading: bool = False
    ) -> Self:
        """Lock and read a vault, and check its chain; not yet whether it is the newest.

        The lines after the newest summary are read, or all of them if there is no summary or
        `whole` or `reading` is set. `wait` is how many seconds another process may still have the
        vault. Reading makes no lock file: where there is none, SQLite's own lock has to do.
        """
        path, whole = resolve_path(path), whole or reading
        require_file(path)  # before a lock file is left where there is no vault
        with ExitStack() as held:
            if not reading or os.path.lexists(f"{path}.lock"):
                held.enter_context(hold_lock(path, wait))
            require_file(path)
            journal = held.enter_context(closing(Journal.open(path)))
            books, summed = _read_books(path, journal, whole)
            return cls(path, held.pop_all(), journal, books, summed)

    def close(self) -> None:
        """Release the vault; closing twice is allowed."""
        with self._thread_lock:
            self._usable = False
            self._held.close()

    @contextmanager
    def use(self) -> Iterator[Journal]:
        """Be the one thread that uses the chest, from a check to the write that rests on it.

        Yields the file, to be read. A closed chest, or one that another process has opened, is
        refused.
        """
        with self._thread_lock:
            if os.getpid() != self._owner:
                raise VaultRefusal(
                    f"{self.path} was opened by another process (a fork shares no vault); "
                    "open it in the process that uses it"
                )
            if not self._usable:
                raise VaultRefusal(f"{self.path} is closed; open it again")
            yield self._journal

    def receipt(self) -> VaultReceipt:
        """Return the receipt of the last line."""
        books = self.books
        proof = books.spent, books.alone, books.promised
        return VaultReceipt(books.id, books.seq, books.hash, *proof)

    def contains(self, receipt: Receipt | VaultReceipt) -> bool:
        """Return whether this ledger has that line, or has paid for the gap it was lost in."""
        with self.use():
            seq = receipt.seq
            if receipt.vault != self.books.id or not 1 <= seq <= self.books.seq:
                return False
            line = self._journal.line(seq)
            return self._journal.has_gap(seq) if line is None else line.hash == receipt.hash

    def is_copy(self) -> bool:
        """Return whether this file is not the one that was made, moved or restored as this vault.

        A backup is marked as one. Any other copy mostly has another inode, and is then refused
        before it has done anything. Where an inode was reused, the machine's witness and its lock
        decide. The device number is not compared: it may change at a reboot.
        """
        return self._journal.backup or self.path.stat().st_ino != self.books.inode

    def require_newest(self, *, reading: bool = False) -> None:
        """Refuse a backup, a copy, a state older than its witnesses, or one unknown here.

        Reading leaves the witnesses as they are: lines that no witness has seen have released
        nothing, since an upload is sent after its witness. The next use writes what is missing. A
        reader may have another state folder, and releases nothing.
        """
        self.require_in_service()
        if not reading:
            self.require_known()
            self.claim_id()
        ahead = self.require_witnessed()
        self.require_original()
        if reading:
            return
        if ahead:  # a crash came between commit and witness
            self._write_witnesses("open")
        if self.books.id in witness.find_ledgers(self.books.dataset):
            return
        with witness.hold_ledgers(self.books.dataset):
            if self.is_second():  # made or used elsewhere, or before rows were noted
                state_second_ledger(self.books.dataset)
            witness.note_ledger(self.books.dataset, self.books.id)

    def claim_id(self) -> None:
        """Keep every other file with this ledger's id out, on this machine, until `close`.

        Two copies have two lock files, and each would find its witness in order. Call this before
        the machine's witness is read for a use.
        """
        with witness.open_state():
            at = witness.locate_machine_witness(self.books.id)
        at = at.with_name(at.name + ".lock")
        what = f"another file with {self.path}'s id"
        self._held.enter_context(hold_lock(self.path, at=at, what=what))

    def is_known(self) -> bool:
        """Return whether this machine's witness has seen all lines but those of one write.

        A crash between commit and witness leaves no more than that. Further lines were written with
        another state folder, which may have seen even more. So was a move or a restore that this
        machine has not seen, unless its line names this machine's witness (again a crash).
        """
        known, last = witness.read_machine_witness(self.books.id), self.books.seq
        if known is None or last - known.seq > _MOST_LINES:
            return False
        unseen = range(known.seq + 1, last + 1)
        with self.use() as journal:
            lines = [line for n in unseen if (line := journal.line(n))]
        taken = [line.facts for line in lines if line.kind in ("move", "restore")]
        return all(facts.get("kept") == known.to_proof() for facts in taken)

    def is_second(self) -> bool:
        """Return whether this machine has seen other ledgers of these rows, and not this one."""
        ledgers = witness.find_ledgers(self.books.dataset)
        return bool(ledgers) and self.books.id not in ledgers

    def require_known(self) -> None:
        """Refuse a ledger whose last lines this machine's state folder has not seen.

        An old pair of vault and witness looks like one that was just moved here.
        """
        if not self.is_known():
            known = witness.read_machine_witness(self.books.id)
            raise VaultRefusal(
                f"{self.path} has no witness of its {self.books.seq} lines in this machine's state "
                f"folder ({witness.locate_state()}, which has seen "
                f"{0 if known is None else known.seq}), "
                "so an older copy would look the same; set SOTTOVOCE_STATE "
                "to the folder that has it (in a container, one on a volume that lasts), or give "
                f"your recorded word: `sottovoce ledger rebind {self.path.name} --moved "
                "--nothing-since` states that this is the original and nothing was released after "
                "this state, and burns nothing; `--restored` instead is for a backup, and burns "
                "what newer receipts prove, or all that is left"
            )

    def require_original(self) -> None:
        """Refuse a backup or a copy."""
        self.require_in_service()
        if self.is_copy():
            name = self.path.name
            raise VaultRefusal(
                f"{self.path} is a copy of a vault, and two would spend the budget twice; use the "
                f"original, or run `sottovoce ledger rebind {name} --restored` if this is a backup "
                f"and `sottovoce ledger rebind {name} --moved` if the original itself was moved"
            )

    def require_in_service(self) -> None:
        """Refuse a file that `sottovoce ledger backup` made, and that nobody has restored."""
        if self._journal.backup:
            raise VaultRefusal(
                f"{self.path} is a backup, which does not know what was released after it; run "
                f"`sottovoce ledger rebind {self.path.name} --restored` to take it into service"
            )

    def require_witnessed(self) -> bool:
        """Refuse a state older than a witness; return whether it is ahead of one."""

        def refuse(what: str, first: str = "") -> NoReturn:
            remedy = f"or {first}run `sottovoce ledger rebind {self.path.name} --restored`"
            raise VaultRefusal(f"{self.path} {what}, {remedy}")

        seen, lines = witness.read_witness(self.path), self.books.seq
        if seen is None:
            refuse(
                f"has no witness ({witness.locate_witness(self.path).name}), so nobody can tell "
                "whether it is the newest state; put it back"
            )
        if seen.vault != self.books.id:
            what = "lies beside the witness of another vault; put its own witness back"
            refuse(what, "move that one away and ")
        older = f"is an older or a parted copy: it has {lines} lines and"
        if not self.contains(seen):
            refuse(f"{older} its witness has seen {seen.seq}; put the newest file back")
        known = witness.read_machine_witness(self.books.id)
        if known is not None and not self.contains(known):
            place = witness.locate_machine_witness(self.books.id)
            refuse(f"{older} this machine has seen {known.seq} ({place}); put the newest file back")
        return min(seen.seq, 0 if known is None else known.seq) < lines

    def append(
        self,
        kind: str,
        entries: Sequence[tuple[str, dict[str, Any]]],
        *,
        upload: tuple[str, int, bytes] | None = None,
        drop: tuple[str, int, int] | None = None,
        seq: int | None = None,
    ) -> VaultReceipt:
        """Add entries in one write: durable, witnessed and in the books when this returns.

        Every `SUMMARY_EVERY` lines the write begins with a summary of all lines before it.
        """
        with self.use():
            chain.pass_step(f"{kind}: begun")
            lines: list[Line] = []
            prev, first_seq, now = self.books.hash, seq or self.books.seq + 1, _now()
            self._usable = False  # until everything has succeeded
            summary, mark = None, dict[str, Any]()
            if self.books.seq - self._summed >= SUMMARY_EVERY:
                summary, self._summed = self.books.make_summary(), self.books.seq
                mark = {"summary": sha256(summary[0])}
            for number, (what, facts) in enumerate(entries):
                facts = facts if number else {**facts, **mark}
                lines.append(link_line(prev, first_seq + number, now, what, add_salt(facts)))
                prev = lines[-1].hash
            try:
                if self.path.stat().st_ino != self._inode:
                    raise VaultRefusal(f"{self.path} was replaced while it was in use; look why")
                self._journal.append(lines, kind, upload, summary=summary, drop=drop)
                chain.pass_step(f"{kind}: committed")
                for line in lines:
                    self.books.add(line)
                self._write_witnesses(kind)
            except FileNotFoundError:
                raise VaultRefusal(f"{self.path} was removed while it was in use") from None
            self._usable = True
            chain.pass_step(f"{kind}: witnessed")
            return self.receipt()

    def _write_witnesses(self, kind: str) -> None:
        witness.write_machine_witness(self.receipt())
        try:
            witness.write_witness(self.path, self.receipt(), kind)
        except OSError as error:
            raise VaultRefusal(
                f"{witness.locate_witness(self.path)} cannot be written ({error.strerror}); make "
                "room and check its permissions, then open the vault again"
            ) from None


def state_second_ledger(
    dataset: str, *, vault: str = "", second_ledger: bool = False, known: Sequence[str] = ()
) -> dict[str, Any]:
    """Refuse a second ledger for rows that have one on this machine, unless it is stated.

    Returns the facts that record the operator's statement. The vault these rows are for does not
    count; `known` ones do, which may have some of the rows, and a deleted ledger does: what it
    released cannot be taken back.
    """
    others = sorted({*witness.find_ledgers(dataset), *known} - {vault})
    if others and not second_ledger:
        raise VaultRefusal(
            f"these rows have a ledger on this machine already ({', '.join(others[:3])}"
            f"{'' if len(others) <= 3 else ', …'}), and the budgets of two add up; use that one, "
            "or add `--second-ledger`, your recorded word that you want another (for a vault that "
            "there is already: `sottovoce ledger rebind VAULT --moved --nothing-since "
            "--second-ledger`)"
        )
    return {"second": others} if second_ledger else {}


def resolve_path(path: Path) -> Path:
    """Return the path without links, so that one vault has one lock whatever it is called."""
    return Path(os.path.realpath(path))


_BESIDE = (".lock", ".part", ".room", ".secrets", ".witness", "-journal")


def require_usable_name(path: Path) -> None:
    """Refuse a name that is none, or that a vault gives to a file beside it, and may overwrite."""
    if path.name in ("", "..") or path.name.endswith(_BESIDE):
        bound = f"a file's name that does not end in {', '.join(_BESIDE)}"
        raise InputError.of("name", path.name, bound, "such files lie beside a vault")


def _require_unused(path: Path) -> None:
    """Refuse a name under which, as far as the folder shows, a vault was ever in use."""
    if any(os.path.lexists(f"{path}{end}") for end in ("", "-journal")):
        raise VaultRefusal(f"{path} exists already; a vault is never replaced, name another")
    seen = witness.read_witness(path)
    # At its first line nothing has been released, so a creation that crashed may be repeated.
    if seen is not None and seen.seq > 1:
        raise VaultRefusal(
            f"{path} is missing, but its witness is there; put the vault back, or name another "
            "for another data set"
        )


def require_file(path: Path) -> None:
    """Refuse if there is no such file; nothing is created."""
    try:
        file = path.stat()
    except FileNotFoundError:
        raise VaultRefusal(
            f"{path} does not exist; put it back if it was there, or make one with "
            "`sottovoce ledger create`"
        ) from None
    except OSError as error:
        raise VaultRefusal(f"{path} cannot be read ({error.strerror})") from None
    if not stat.S_ISREG(file.st_mode):
        raise VaultRefusal(f"{path} is not a file; name the vault itself")
    if file.st_nlink != 1:
        raise VaultRefusal(f"{path} has a second name (a hard link); remove one of the two")


def _read_books(path: Path, journal: Journal, whole: bool) -> tuple[Books, int]:
    """Add up the lines, from the newest summary on or all; return also how far the summary goes.

    The first line after a summary contains the summary's hash: an edited summary does not fit the
    chain, and if lines were removed, none follows it. The witnesses tell whether the chain is the
    newest.
    """
    content = journal.summary()
    try:
        earlier = None if content is None else Books.from_summary(content, journal.node)
    except (*DAMAGE, RecursionError):
        journal.refuse_damaged("its summary cannot be read")
    summed = 0 if earlier is None else earlier.seq  # another version's summary is ignored
    books = earlier
    if books is None or whole:
        books = Books(records=Records(journal.node))
    complete, confirmed, books.line = books.seq == 0, earlier is None, journal.line
    for line in journal.lines(books.seq, books.hash):
        if earlier is not None and content is not None and books.seq == summed:
            confirmed = line.facts.get("summary") == sha256(content)
            if whole:
                _require_summary(journal, books, content)
        books.add(line)
    if not confirmed:
        journal.refuse_damaged("its summary is not that of its lines")
    if books.seq == 0:
        raise VaultRefusal(f"{path} is damaged (it has no lines); put its backup back")
    if complete:
        _require_uploads(journal, books)
    return books, summed


def _require_summary(journal: Journal, books: Books, content: str) -> None:
    """Refuse a summary, or a tree of records, that is not the sum of all lines up to it."""
    copy = replace(books, records=Records(lambda _: None))
    copy.records.changed = dict(books.records.changed)
    expected, nodes = copy.make_summary()
    if expected != content or any(journal.node(name) != node for name, node in nodes.items()):
        journal.refuse_damaged("its summary is not that of its lines")


def _require_uploads(journal: Journal, books: Books) -> None:
    """Refuse stored uploads that are not those of the lines; only dropped ones may be missing."""
    expected = {turn.stored: (run, t) for run, t, turn in books.list_stored()}
    stored = journal.list_uploads()
    missing = [round_key for seq, round_key in expected.items() if seq not in stored]
    if any(expected.get(seq) != round_key for seq, round_key in stored.items()) or not all(
        books.is_dropped(*round_key) for round_key in missing
    ):
        journal.refuse_damaged("its uploads are not those of its lines")


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")
