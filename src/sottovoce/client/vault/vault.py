"""The vault: what a client may still release, what it has released, and nothing twice.

Rules R1 to R4, R10 and R11 of docs/protocol.md. A reserve is durable before anything is computed,
an upload is durable before it is sent, and nothing is ever refunded. A round of a run has at most
one stored upload; a reserve without one stays spent, and the round may be reserved anew.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np

from sottovoce._version import __version__
from sottovoce.client.vault import witness
from sottovoce.client.vault.chain import Line, canonical, is_hash
from sottovoce.client.vault.chest import Chest
from sottovoce.client.vault.fingerprint import sha256
from sottovoce.client.vault.journal import MOST_BYTES, Books
from sottovoce.client.vault.policy import Policy, require_tighter, withheld_units
from sottovoce.client.vault.witness import Place, VaultReceipt
from sottovoce.errors import (
    DatasetChanged,
    InputError,
    PolicyRefusal,
    RoundAnswered,
    TankEmpty,
    VaultRefusal,
)
from sottovoce.privacy.tank import FULL, Tank, most_units

MOST_RELEASES = 10_000  # of one turn
_MOST_FACTS = 65_536  # bytes of what is noted beside a reserve
_MOST_UNANSWERED = 2  # debits in a row: one may be a process that was killed
_RUN = re.compile(r"[A-Za-z0-9._-]{1,64}")


@dataclass(frozen=True)
class Entry:
    """What the vault knows of one round of a run: its newest reserve, and its upload if stored."""

    seq: int
    time: str
    run: str
    t: int
    request_hash: str
    units: tuple[int, ...]
    server: str
    facts: Mapping[str, Any]
    upload: bytes | None
    dropped: bool = False  # answered; its server has the upload, and this ledger only its hash


@dataclass(frozen=True)
class Reservation:
    """A debit that is durable: one upload may be stored against it, once."""

    vault: str
    seq: int
    run: str
    t: int
    request_hash: str
    units: tuple[int, ...]
    receipt: VaultReceipt


class Vault:
    """A client's ledger and outbox for one data set. Use it as a context manager.

    >>> import tempfile
    >>> place = Path(tempfile.mkdtemp()) / "ward-3.vault"
    >>> policy = Policy(epsilon=8, delta=1e-5, samples=143, clip=1, run_share=1.0)
    >>> dataset = os.urandom(32).hex()  # in real use: the fingerprint of the rows
    >>> with Vault.create(place, policy, dataset=dataset) as vault:
    ...     asked = "cd" * 32
    ...     paid = vault.reserve("run-1", 0, asked, [FULL // 120], server="s", facts={})
    ...     receipt = vault.store(paid, b"noised")
    ...     vault.find("run-1", 0).upload, float(vault.tank("run-1").left_fraction.round(6))
    (b'noised', 0.991667)
    >>> with Vault.open(place, dataset=dataset) as vault:
    ...     vault.contains(receipt), int(vault.tank("run-1").debits)
    (True, 1)
    >>> Vault.open(place.with_name("another.vault"), dataset=dataset)
    Traceback (most recent call last):
        ...
    sottovoce.errors.VaultRefusal: ...another.vault does not exist; put it back if it was there, \
or make one with `sottovoce ledger create`
    """

    def __init__(self, chest: Chest, *, readable_only: bool) -> None:
        self._chest, self._readable_only = chest, readable_only
        self._live: dict[int, Reservation] = {}  # of this opening, not yet stored

    @classmethod
    def create(
        cls, path: str | Path, policy: Policy, *, dataset: str, second_ledger: bool = False
    ) -> Self:
        """Make a vault where there is none. `dataset` is the `fingerprint` of the client's rows.

        Rows that this machine has seen a ledger of get another with `second_ledger` only: the
        operator's word that budgets add up, kept in the new vault's first line.
        """
        require_dataset(dataset)
        facts = {
            "vault": os.urandom(16).hex(),
            "capacity": policy.capacity(),
            "policy": policy.to_json(),
            "dataset": dataset,
            "software": __version__,
        }
        Chest.make(Path(path), facts, second_ledger=second_ledger)
        return cls.open(path, dataset=dataset)

    @classmethod
    def open(cls, path: str | Path, *, dataset: str | None, wait: float = 0.0) -> Self:
        """Open, lock and check a vault; `None` for the data set opens it for reading only.

        For reading the whole chain is checked, for use what came after its newest summary.
        `wait` is how many seconds another process may still have it.
        """
        if dataset is not None:
            require_dataset(dataset)
        chest = Chest.open(Path(path), wait=wait, whole=dataset is None)
        try:
            chest.require_newest(reading=dataset is None)
            if dataset is not None and dataset != chest.books.dataset:
                raise DatasetChanged(
                    # Without the fingerprints: logs are copied, and one confirms a guessed record.
                    f"{chest.path} keeps the ledger of other records than these; bring the old "
                    f"ones back, or run `sottovoce ledger rebind {chest.path.name} DATA "
                    "--overlap all`"
                )
        except BaseException:
            chest.close()
            raise
        return cls(chest, readable_only=dataset is None)

    def close(self) -> None:
        """Give the vault back to whoever waits for it."""
        if self._live:  # a reservation that will not be stored needs no room
            self._room.unlink(missing_ok=True)
        self._chest.close()

    @property
    def _room(self) -> Path:
        """A file that keeps the bytes of the next upload free from the reserve to the store."""
        return self.path.with_name(self.path.name + ".room")

    def _hold_room(self, size: int) -> None:
        self._room.unlink(missing_ok=True)  # of a process that was killed
        if size == 0 or not hasattr(os, "posix_fallocate"):  # macOS has none
            return
        try:
            with self._room.open("xb") as file:  # a little more: SQLite's pages, the witness
                os.posix_fallocate(file.fileno(), 0, size + size // 50 + 2**16)
        except OSError as error:
            self._room.unlink(missing_ok=True)
            raise VaultRefusal(
                f"{self.path} has no room beside it for an upload of {size} bytes "
                f"({error.strerror}); nothing was booked, make room on its disk"
            ) from None

    @property
    def is_stopped(self) -> bool:
        """Whether debits were burnt without an upload, so that its operator has to look first."""
        return self._books.failed or self._books.unanswered >= _MOST_UNANSWERED

    def require_going(self) -> None:
        """Refuse if debits were burnt without an upload and the operator has not said to go on.

        One burnt debit may be a process that was killed: the round is reserved anew, once. An
        answer that failed, or a second burnt debit, would go on burning budget at every request.
        """
        if self.is_stopped:
            raise VaultRefusal(
                f"{self.path} has paid for an upload that was never made, and nothing more is "
                "booked: look into the log, make room on its disk or in memory, then run "
                f"`sottovoce ledger resume {self.path.name}`"
            )

    def stop(self, why: str) -> None:
        """Note that an answer has failed after it was paid for; `why` is the kind of the error."""
        with self._chest.alone:
            self._require_writable()
            self._chest.append("stop", [("stop", {"why": why})])

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def _books(self) -> Books:
        return self._chest.books

    @property
    def path(self) -> Path:
        """Where the vault lies."""
        return self._chest.path

    @property
    def id(self) -> str:
        """The vault's own number, drawn when it was made."""
        return self._books.id

    @property
    def made(self) -> str:
        """When the vault was made."""
        return self._books.made

    @property
    def policy(self) -> Policy:
        """The client's terms, as tightened so far."""
        return self._books.policy

    @property
    def dataset(self) -> str:
        """The fingerprint of the records this vault keeps the ledger of."""
        return self._books.dataset

    @property
    def other_ledgers(self) -> tuple[str, ...]:
        """The other vaults that this machine has seen with a ledger of the same rows, by id."""
        return tuple(found for found in witness.find_ledgers(self.dataset) if found != self.id)

    @property
    def seal(self) -> str:
        """The data set as others may be told of it: SHA-256 of its fingerprint and a secret salt.

        Whoever knows all records but one could try that one against the fingerprint itself. With
        the salt, which is in the vault, its owner can show later what was sealed.
        """
        return sha256(f"sottovoce.seal/1\n{self._books.salt}\n{self.dataset}\n".encode())

    @property
    def spent(self) -> int:
        """Units booked by all runs, and burnt by restores."""
        return self._books.spent

    @property
    def burnt(self) -> int:
        """The part of `spent` that restores have booked for what they could not know."""
        return self._books.burnt

    @property
    def promised(self) -> Policy:
        """The policy whose (ε, δ) holds for everything released: the one at the first release.

        Until then it is the policy as it stands. Afterwards the decision to tighten may depend on
        what was released, and a cap chosen in hindsight proves nothing about the past.
        """
        return self._books.promised or self._books.policy

    def against_promise(self) -> tuple[float, float]:
        """μ² of the `promised` (ε, δ), and how much of it is spent: what a server may be told.

        Units keep the size that they had when the vault was made, so a promise tightened before the
        first release is worth fewer than 2⁵⁰ of them. What was withheld after it counts as spent,
        since nothing of it will be released. What was released ≤ spent ≤ the promise.
        """
        with self._chest.alone:
            whole = self._books.capacity
            units = FULL - withheld_units(self.promised, whole)
            spent = min(units, self.spent + units - self.limit)
            return min(self.promised.capacity(), whole), whole * (spent / FULL)

    @property
    def limit(self) -> int:
        """Units that may ever be booked: 2⁵⁰, or less once the budget was tightened."""
        return FULL - withheld_units(self.policy, self._books.capacity)

    @property
    def ceiling(self) -> int:
        """The most units one turn may book, all its releases together: 1/floor² in μ²."""
        return min(FULL, most_units(self.policy.floor, self._books.capacity))

    def spent_by_run(self, run: str) -> int:
        """Units booked by one run."""
        with self._chest.alone:
            self._chest.require_usable()
            return self._books.spent_by_run(run)

    def spent_by_server(self, server: str) -> int:
        """Units booked for what one server asked, by the name that it gave."""
        with self._chest.alone:
            self._chest.require_usable()
            return self._books.spent_by_server(server)

    def left(self, run: str, server: str) -> int:
        """Units that this run of this server may still book: of the budget, and of its shares."""
        books = self._books
        return min(
            self.limit - books.spent,
            self._share(self.policy.run_share) - books.spent_by_run(run),
            self._share(self.policy.server_share) - books.spent_by_server(server),
        )

    def _share(self, part: float) -> int:
        """Units of a part of the promised budget, which does not change any more."""
        return int(Fraction(part) * (FULL - withheld_units(self.promised, self._books.capacity)))

    def tank(self, run: str, server: str = "") -> Tank:
        """The fuel as this run of this server sees it; `debits` are its own.

        Units keep the size they had when the vault was made. What a tightened budget withholds, and
        what is beyond the run's share, counts as spent before the run began: a run is planned
        within its share, with more noise, and does not end in its middle.
        """
        with self._chest.alone:
            self._chest.require_usable()
            books = self._books
            known = books.run(run)
            opened = books.spent if known is None else known.opened
            began = min(self.limit - opened, self._share(self.policy.run_share))
            return Tank(
                capacity=np.array(books.capacity, dtype=np.float64),
                spent=np.array(FULL - max(0, self.left(run, server)), dtype=np.int64),
                opened=np.array(FULL - max(0, began), dtype=np.int64),
                debits=np.array(0 if known is None else known.debits, dtype=np.int64),
            )

    def find(self, run: str, t: int) -> Entry | None:
        """The stored answer of a round, else its newest reserve, else nothing."""
        with self._chest.alone:
            self._chest.require_usable()
            turn = self._books.turn(run, t)
            if turn is None:
                return None
            dropped = self._books.is_dropped(run, t)
            kept = turn.stored is not None and not dropped
            upload = self._chest.upload(turn) if kept else None
            return _entry(self._chest.reserve_of(turn), upload, dropped)

    def reserve(
        self,
        run: str,
        t: int,
        request_hash: str,
        units: Sequence[int],
        *,
        server: str,
        facts: Mapping[str, Any],
        acknowledged: Place | None = None,
        room: int = 0,
    ) -> Reservation:
        """Book a turn, one debit a release: all of it or nothing, durable when this returns.

        `acknowledged` is the newest receipt that the server has. If it came with the answer to an
        earlier round of this run, the uploads of the rounds before that one are dropped.
        `room` is how many bytes its upload will have: the disk must have them before it is paid.
        """
        paid = _checked(run, t, request_hash, units, server, facts)
        with self._chest.alone:
            self._require_writable()
            policy, books = self.policy, self._books
            if t >= policy.max_rounds:
                raise PolicyRefusal(
                    f"round {t} was asked for and a run may have {policy.max_rounds}; "
                    "announce fewer rounds"
                )
            if sum(paid) > self.ceiling:
                raise PolicyRefusal(
                    f"a turn's releases must be worth no more than one of σ/Δ = {policy.floor:g}; "
                    "ask for more noise or fewer steps"
                )
            turn = books.turn(run, t)
            if turn is not None and turn.stored is not None:
                raise RoundAnswered(
                    f"round {t} of run {run} has its answer already; send the stored one again"
                )
            if sum(paid) > self.left(run, server):
                raise TankEmpty(
                    "the privacy budget, or the share of it that one run or one server may take, "
                    "has not enough left for this release; nothing was booked"
                )
            entries: list[tuple[str, dict[str, Any]]] = []
            if books.run(run) is None:
                entries.append(("run", {"run": run, "server": server}))
            booking = {
                "run": run,
                "t": t,
                "request": request_hash,
                "units": list(paid),
                "server": server,
                "facts": dict(facts),
            }
            self._hold_room(room)
            drop = self._acknowledged(run, t, acknowledged)
            if drop is not None:
                booking["acknowledged"] = drop[1:]
            receipt = self._chest.append("reserve", [*entries, ("reserve", booking)], drop=drop)
            reservation = Reservation(self.id, receipt.seq, run, t, request_hash, paid, receipt)
            self._live[reservation.seq] = reservation
            return reservation

    def _acknowledged(self, run: str, t: int, seen: Place | None) -> tuple[str, int, int] | None:
        """Return which uploads a receipt lets go: those of its run before its round and its line.

        The hash of a reserve's line leaves with the one answer that was made under it (each line
        has a secret salt), so who knows it has that answer, and asks for a later round.
        """
        if seen is None or not self.contains(seen):
            return None
        line = self._chest.line(seen.seq)
        if line is None or line.kind != "reserve" or line.facts["run"] != run:
            return None
        before = line.facts["t"]
        return (run, before, seen.seq) if self._books.may_drop(run, t, before, seen.seq) else None

    def store(self, reservation: Reservation, upload: bytes) -> VaultReceipt:
        """Keep a reservation's upload: durable when this returns, and only then may it leave."""
        if type(upload) is not bytes or not 1 <= len(upload) <= MOST_BYTES:
            shown = len(upload) if isinstance(upload, bytes) else type(upload).__name__
            raise InputError.of("upload", shown, f"1 to {MOST_BYTES} bytes", "send a smaller model")
        with self._chest.alone:
            self._require_writable()
            if self._live.get(reservation.seq) != reservation:
                raise VaultRefusal(
                    "the reservation is not one of this opening, or has its upload already; "
                    "reserve anew, which books anew"
                )
            run, t = reservation.run, reservation.t
            turn = self._books.turn(run, t)
            if turn is not None and turn.stored is not None:
                raise RoundAnswered(
                    f"round {t} of run {run} has its answer already; send the stored one again"
                )
            facts = {
                "reserve": reservation.seq,
                "run": run,
                "t": t,
                "sha256": sha256(upload),
                "size": len(upload),
            }
            self._room.unlink(missing_ok=True)
            receipt = self._chest.append("store", [("store", facts)], upload=(run, t, upload))
            del self._live[reservation.seq]
            return receipt

    def tighten(self, policy: Policy) -> VaultReceipt:
        """Narrow the policy for everything that follows; an equal one changes nothing.

        Before the first release this is a new promise; after it `promised` stays what it was.
        """
        with self._chest.alone:
            self._require_writable()
            if policy == self.policy:
                return self.receipt()
            self.require_tightening(policy)
            return self._chest.append("tighten", [("tighten", {"policy": policy.to_json()})])

    def require_tightening(self, policy: Policy) -> None:
        """A refusal unless the policy as it stands may become this one; nothing is written."""
        if policy == self.policy:
            return
        require_tighter(self.policy, policy, spent=self.spent)
        if FULL - withheld_units(policy, self._books.capacity) < self.spent:
            raise PolicyRefusal(
                f"({policy.epsilon:g}, {policy.delta:g}) is less than what was already "
                "released; a promise cannot be made for the past, so choose a larger budget"
            )

    def receipt(self) -> VaultReceipt:
        """How far the ledger has come: its last line's number and hash."""
        return self._chest.receipt()

    def contains(self, receipt: Place) -> bool:
        """False: this file is older than, or has parted from, the one that gave the receipt."""
        return self._chest.contains(receipt)

    def entries(self) -> Iterator[Entry]:
        """Every reserve from the first, answered or burnt; uploads are not read."""
        for line in self._chest.lines():
            if line.kind == "reserve":
                yield _entry(line)

    def lines(self) -> list[Line]:
        """The chain itself, from the first line."""
        return self._chest.lines()

    def answered(self, run: str, t: int) -> int | None:
        """The line of the reserve that a round's stored upload was made under, if it has one."""
        with self._chest.alone:
            self._chest.require_usable()
            turn = self._books.turn(run, t)
            return None if turn is None or turn.stored is None else turn.reserve

    def _require_writable(self) -> None:
        self._chest.require_usable()
        if self._readable_only:
            raise VaultRefusal(
                f"{self.path} was opened without its data set, for reading only; "
                "open it with the data's fingerprint"
            )


def require_dataset(dataset: object) -> None:
    """A sentence if this is no fingerprint."""
    if not is_hash(dataset):
        raise InputError.of(
            "dataset",
            dataset,
            "64 hexadecimal digits",
            "take client.vault.fingerprint(x, y)",
        )


def _entry(line: Line, upload: bytes | None = None, dropped: bool = False) -> Entry:
    facts = line.facts
    return Entry(
        seq=line.seq,
        time=line.time,
        run=facts["run"],
        t=facts["t"],
        request_hash=facts["request"],
        units=tuple(facts["units"]),
        server=facts["server"],
        facts=facts["facts"],
        upload=upload,
        dropped=dropped,
    )


def _checked(
    run: str, t: int, request: str, units: Sequence[int], server: str, facts: Mapping[str, Any]
) -> tuple[int, ...]:
    """The units as plain integers, or one sentence about what cannot be booked."""
    if not isinstance(run, str) or not _RUN.fullmatch(run):
        raise InputError.of("run", run, "1 to 64 letters, digits, . _ -", "name the run plainly")
    if type(t) is not int or t < 0:
        raise InputError.of("t", t, "a whole number ≥ 0", "rounds are counted from 0")
    if not is_hash(request):
        raise InputError.of("request_hash", request, "64 hex digits", "hash the request's content")
    if not isinstance(server, str) or len(server) > 200 or not server.isprintable():
        raise InputError.of("server", server, "at most 200 printable letters", "name it plainly")
    paid = tuple(units)
    whole = all(isinstance(u, int | np.integer) and not isinstance(u, bool) for u in paid)
    if not 1 <= len(paid) <= MOST_RELEASES or not whole or min(paid) < 1:
        raise InputError.of(
            "units", list(paid)[:4], "whole numbers ≥ 1, one a release", "take those of an offer"
        )
    try:
        small = len(canonical(dict(facts))) <= _MOST_FACTS
    except (TypeError, ValueError, RecursionError):
        small = False
    if not small:
        raise InputError.of("facts", type(facts).__name__, "a little plain JSON", "note less")
    return tuple(int(u) for u in paid)
