"""The vault: what a client may still release, what it has released, and nothing twice.

Rules R1 to R4, R10 and R11 of docs/protocol.md. A reserve is durable before anything is computed,
an upload is durable before it is sent, and nothing is ever refunded. A round of a run has at most
one stored upload; a reserve without an upload stays spent, and the round may be reserved again.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from sottovoce._version import __version__
from sottovoce.client.vault import witness
from sottovoce.client.vault.chain import Line, encode_canonical, is_hash, sha256
from sottovoce.client.vault.chest import Chest
from sottovoce.client.vault.journal import MOST_BYTES, MOST_UNPAID, Books
from sottovoce.client.vault.policy import Policy, require_tighter
from sottovoce.client.vault.witness import VaultReceipt
from sottovoce.errors import (
    DatasetChanged,
    InputError,
    PolicyRefusal,
    RoundAnswered,
    TankEmpty,
    VaultRefusal,
)
from sottovoce.privacy.tank import FULL, Tank, most_units

if TYPE_CHECKING:
    from sottovoce.client.messages import Receipt

MOST_RELEASES = 10_000  # of one turn
_MOST_FACTS = 65_536  # bytes of what is noted beside a reserve
_MOST_UNANSWERED = 2  # debits in a row: one may be a process that was killed
_RUN = re.compile(r"[A-Za-z0-9._-]{1,64}")


@dataclass(frozen=True)
class Entry:
    """What the vault knows of one round of a run: its newest reserve, and its stored upload."""

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
    """A durable debit: one upload may be stored for it, once."""

    run: str
    t: int
    receipt: VaultReceipt  # of the line that books it


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
    """

    def __init__(self, chest: Chest, *, readable_only: bool) -> None:
        self._chest, self._readable_only = chest, readable_only
        self._live: dict[int, Reservation] = {}  # of this opening, not yet stored

    @classmethod
    def create(
        cls,
        path: str | Path,
        policy: Policy,
        *,
        dataset: str,
        second_ledger: bool = False,
        others: Sequence[str] = (),
        maker: str = "",
    ) -> Self:
        """Make a vault where there is none. `dataset` is the `fingerprint` of the client's rows.

        Rows for which this machine has seen a ledger get another one only with `second_ledger`: the
        operator's word that budgets add up, stored in the new vault's first line, with the ids of
        `others` that may have some of these rows. A command that states it of its own is `maker`.
        """
        require_dataset(dataset)
        facts = {
            "vault": os.urandom(16).hex(),
            "capacity": policy.capacity(),
            "policy": policy.to_json(),
            "dataset": dataset,
            "software": __version__,
        } | ({"maker": maker} if maker else {})
        Chest.make(Path(path), facts, second_ledger=second_ledger, others=others)
        return cls.open(path, dataset=dataset)

    @classmethod
    def open(cls, path: str | Path, *, dataset: str | None, wait: float = 0.0) -> Self:
        """Open, lock and check a vault; without a dataset it is opened for reading only.

        For reading the whole chain is checked, for use what came after its newest summary. `wait`
        is how many seconds another process may still have it.
        """
        if dataset is not None:
            require_dataset(dataset)
        chest = Chest.open(Path(path), wait=wait, reading=dataset is None)
        try:
            chest.require_newest(reading=dataset is None)
            if dataset is not None and dataset != chest.books.dataset:
                raise DatasetChanged(
                    # Without the fingerprints: logs are copied, and one confirms a guessed record.
                    f"{chest.path} keeps the ledger of other records than these; bring the old "
                    "ones back, or run `sottovoce ledger rebind --node NODE.toml --overlap all` "
                    f"(`rebind {chest.path.name} DATA` if it was made without a node file)"
                )
        except BaseException:
            chest.close()
            raise
        return cls(chest, readable_only=dataset is None)

    def close(self) -> None:
        """Release the vault for other processes."""
        if not self._readable_only:  # nothing that is not stored by now needs room
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
                enough = size + size // 50 + 2**16
                os.posix_fallocate(file.fileno(), 0, enough + 2**16)  # twice: for the reserve, too
                file.truncate(enough)
        except OSError as error:
            self._room.unlink(missing_ok=True)
            raise VaultRefusal(
                f"{self.path} has no room beside it for an upload of {size} bytes "
                f"({error.strerror}); nothing was booked, make room on its disk"
            ) from None

    @property
    def is_stopped(self) -> bool:
        """Whether debits were burnt without an upload, so that the operator has to look first."""
        return self._books.failed or self._books.unanswered >= _MOST_UNANSWERED

    def require_running(self) -> None:
        """Refuse if debits were burnt without an upload and the operator has not resumed the vault.

        One burnt debit may come from a process that was killed: the round is reserved again, once.
        A failed answer, or a second burnt debit, would burn more budget at every request.
        """
        if self.is_stopped:
            raise VaultRefusal(
                f"{self.path} has paid for an upload that was never made, and nothing more is "
                "booked: look into the log, make room on its disk or in memory, then run "
                f"`sottovoce ledger resume {self.path.name}`"
            )

    def stop(self, why: str) -> None:
        """Note that an answer failed after it was paid for; `why` is the kind of the error."""
        with self._write():
            self._chest.append("stop", [("stop", {"why": why})])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def _books(self) -> Books:
        return self._chest.books

    @property
    def path(self) -> Path:
        """The vault's file."""
        return self._chest.path

    @property
    def id(self) -> str:
        """The vault's random id, drawn when it was made."""
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
        """The fingerprint of the records whose ledger this is."""
        return self._books.dataset

    @property
    def other_ledgers(self) -> tuple[str, ...]:
        """The other vaults that this machine has seen with a ledger of the same rows, by id."""
        return tuple(vault for vault in witness.find_ledgers(self.dataset) if vault != self.id)

    @property
    def seal(self) -> str:
        """What others may know of the dataset: SHA-256 of its fingerprint and a secret salt.

        Whoever knows all records but one could test guesses of that one against the fingerprint
        itself. The salt is in the vault, so its owner can show later what was sealed.
        """
        return sha256(f"sottovoce.seal/1\n{self._books.salt}\n{self.dataset}\n")

    @property
    def spent(self) -> int:
        """Parts of the capacity booked by all runs, and burnt by restores."""
        return self._books.spent

    @property
    def burnt(self) -> int:
        """The part of `spent` that restores have booked for releases they could not know of."""
        return self._books.burnt

    @property
    def restored(self) -> int:
        """The line of the last restore, before which lines may be missing; 0 if there is none."""
        return self._books.restored

    @property
    def promised(self) -> Policy:
        """The policy whose (ε, δ) holds for everything released: the one at the first release.

        Until then it is the current policy. Later, the decision to tighten may depend on what was
        released, and a cap chosen in hindsight proves nothing about the past.
        """
        return self._books.promised or self._books.policy

    def compare_with_promise(self) -> tuple[float, float]:
        """Return μ² of the `promised` (ε, δ), and how much of it is spent: what a server may know.

        The parts keep the size that they had when the vault was made, so a promise tightened before
        the first release is worth fewer than 2⁵⁰ of them. What was withheld later counts as spent,
        since none of it will be released. What was released ≤ spent ≤ the promise.
        """
        with self._chest.use():
            whole = self._books.capacity
            units = self.promised.count_parts(whole)
            spent = min(units, self.spent + units - self.limit)
            return min(self.promised.capacity(), whole), whole * (spent / FULL)

    @property
    def limit(self) -> int:
        """Parts of the capacity that may ever be booked: 2⁵⁰, fewer in a tightened budget."""
        return self.policy.count_parts(self._books.capacity)

    @property
    def left(self) -> float:
        """The share of the budget that is left; a tightened one may be worth no part at all."""
        return max(0.0, 1 - self.spent / self.limit) if self.limit else 0.0

    @property
    def capacity(self) -> float:
        """μ² of 2⁵⁰ parts, for the vault's whole life."""
        return self._books.capacity

    @property
    def alone(self) -> int:
        """Parts of the capacity that all releases cost by this client's own noise alone."""
        return self._books.alone

    @property
    def limit_alone(self) -> int:
        """The most that `alone` may become: h times the limit, or what `epsilon_alone` allows."""
        share = self.promised.share
        most = math.ceil(self.limit * Fraction(share) / (1 if share == int(share) else 1 - 2**-20))
        cap = self.policy.count_alone(self._books.capacity)
        return most if cap is None else min(most, cap)

    def find_note(self, run: str, t: int, step: str) -> str | None:
        """Return what was noted for a step of a round of the sum view."""
        with self._chest.use() as journal:
            noted = self._books.records.get("note", run, t, step)  # the line's number and hash
            return None if noted is None else str(journal.find_line(*noted).facts["content"])

    def write_note(self, run: str, t: int, step: str, content: str) -> None:
        """Note a step of a round, once: durable when this returns."""
        with self._write():
            if step == "key":
                self.require_paying()
            if self._books.records.get("note", run, t, step) is not None:
                raise RoundAnswered(f"round {t} of run {run} has its {step} already")
            facts = {"run": run, "t": t, "step": step, "content": content}
            self._chest.append("note", [("note", facts)])

    def require_paying(self) -> None:
        """Refuse to open a round of sums where many were opened and never paid for.

        Their notes cost no budget: a server that only asked for keys would fill the disk.
        """
        if self._books.unpaid >= MOST_UNPAID:
            raise VaultRefusal(
                f"{self.path} has opened {MOST_UNPAID} rounds of sums that were never paid for, "
                "and opens no more: ask the server why they were not closed, then run "
                f"`sottovoce ledger resume {self.path.name}`"
            )

    @property
    def ceiling(self) -> int:
        """The most that one turn may book, all its releases together: 1/floor² in μ²."""
        return min(FULL, most_units(self.policy.floor, self._books.capacity))

    def find_greeted(self, run: str, receipt: Receipt) -> tuple[int, Policy]:
        """Return the line that a run's server was greeted at, and the terms that stood there.

        The receipt is the greeting's own, or that of a turn of the run, which notes the line.
        """
        with self._chest.use() as journal:
            line, seq = journal.line(receipt.seq), receipt.seq
            if line is not None and line.kind == "reserve" and line.facts["run"] == run:
                seq = line.facts["facts"].get("greeted", seq)
            terms = journal.find_terms(seq)
        return seq, self.policy if terms is None else Policy.from_json(terms.facts["policy"])

    def count_left(self, run: str, server: str, policy: Policy | None = None) -> int:
        """Return the parts that this run of this server may still book, by budget and shares."""
        books, policy = self._books, policy or self.policy
        return min(
            self.limit - books.spent,
            self._count_share(policy.run_share) - books.spent_by_run(run),
            self._count_share(policy.server_share) - books.spent_by_server(server),
        )

    def _count_share(self, share: float) -> int:
        """Return a share of the promised budget, which does not change any more."""
        return int(Fraction(share) * self.promised.count_parts(self._books.capacity))

    def tank(self, run: str, server: str = "", policy: Policy | None = None) -> Tank:
        """Return the tank as this run of this server sees it; `debits` are those of the run.

        What a tightened budget withholds, and what is beyond the run's share, counts as spent
        before the run began: a run is planned within its share, with more noise, and does not stop
        halfway. With a `policy` it is the tank as that one's shares would leave it.
        """
        policy = policy or self.policy
        with self._chest.use():
            books, earlier = self._books, self._books.run(run)
            opened = books.spent if earlier is None else earlier.opened
            began = min(self.limit - opened, self._count_share(policy.run_share))
            return Tank(
                capacity=np.array(books.capacity, dtype=np.float64),
                spent=np.array(FULL - max(0, self.count_left(run, server, policy)), dtype=np.int64),
                opened=np.array(FULL - max(0, began), dtype=np.int64),
                debits=np.array(0 if earlier is None else earlier.debits, dtype=np.int64),
            )

    def find(self, run: str, t: int) -> Entry | None:
        """Return a round's stored answer, else its newest reserve, else None."""
        with self._chest.use() as journal:
            turn = self._books.turn(run, t)
            if turn is None:
                return None
            dropped = self._books.is_dropped(run, t)
            has_upload = turn.stored is not None and not dropped
            upload = journal.upload(turn) if has_upload else None
            return _make_entry(journal.find_line(turn.reserve, turn.hash), upload, dropped)

    def reserve(
        self,
        run: str,
        t: int,
        request_hash: str,
        units: Sequence[int],
        *,
        server: str,
        facts: Mapping[str, Any],
        acknowledged: Receipt | VaultReceipt | None = None,
        room: int = 0,
        alone: int | None = None,
    ) -> Reservation:
        """Book a turn, one debit a release: all of it or nothing, durable when this returns.

        `alone` is what the turn costs by this client's own noise alone, where only a sum of uploads
        is released: the vault keeps both accounts, and both must have enough left.

        `acknowledged` is the newest receipt that the server has. If it came with the answer to an
        earlier round of this run, the uploads of the rounds before that one are dropped. `room` is
        the size of the upload in bytes: the disk must have them free before anything is booked.
        """
        paid = _check_booking(run, t, request_hash, units, server, facts)
        with self._write():
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
            self._require_unanswered(run, t)
            alone = max(alone or 0, sum(paid))
            all_alone = books.alone + alone
            if sum(paid) > self.count_left(run, server) or all_alone > self.limit_alone:
                raise TankEmpty(
                    "the privacy budget, or the share of it that one run or one server may take, "
                    "has not enough left for this release; nothing was booked"
                )
            entries: list[tuple[str, dict[str, Any]]] = []
            if books.run(run) is None:
                entries.append(("run", {"run": run, "server": server}))
            booking: dict[str, Any] = {"run": run, "t": t, "request": request_hash}
            booking |= {"units": list(paid), "server": server, "facts": dict(facts)}
            if alone > sum(paid):  # absent, it is the same
                booking["alone"] = alone
            self._hold_room(room)
            drop = self._find_droppable(run, t, acknowledged)
            if drop is not None:
                booking["acknowledged"] = drop[1:]
            receipt = self._chest.append("reserve", [*entries, ("reserve", booking)], drop=drop)
            self._live[receipt.seq] = Reservation(run, t, receipt)
            return self._live[receipt.seq]

    def _find_droppable(
        self, run: str, t: int, seen: Receipt | VaultReceipt | None
    ) -> tuple[str, int, int] | None:
        """Return which uploads a receipt lets go: those of its run before its round and its line.

        The hash of a reserve's line leaves only with the answer that was made under it (each line
        has a secret salt). So a server that knows the hash has that answer, and asks for a later
        round.
        """
        if seen is None or not self.contains(seen):
            return None
        with self._chest.use() as journal:
            line = journal.line(seen.seq)
        if line is None or line.kind != "reserve" or line.facts["run"] != run:
            return None
        before = line.facts["t"]
        return (run, before, seen.seq) if self._books.may_drop(run, t, before, seen.seq) else None

    def store(self, reservation: Reservation, upload: bytes) -> VaultReceipt:
        """Store a reservation's upload: durable when this returns, and only then may it leave."""
        if type(upload) is not bytes or not 1 <= len(upload) <= MOST_BYTES:
            shown = len(upload) if isinstance(upload, bytes) else type(upload).__name__
            raise InputError.of("upload", shown, f"1 to {MOST_BYTES} bytes", "send a smaller model")
        with self._write():
            reserve = reservation.receipt.seq
            if self._live.get(reserve) != reservation:
                raise VaultRefusal(
                    "the reservation is not one of this opening, or has its upload already; "
                    "reserve anew, which books anew"
                )
            run, t = reservation.run, reservation.t
            self._require_unanswered(run, t)
            facts = {"reserve": reserve, "run": run, "t": t, "size": len(upload)}
            facts["sha256"] = sha256(upload)
            self._room.unlink(missing_ok=True)
            receipt = self._chest.append("store", [("store", facts)], upload=(run, t, upload))
            del self._live[reserve]
            return receipt

    def tighten(self, policy: Policy) -> VaultReceipt:
        """Tighten the policy for everything that follows; an equal one changes nothing.

        Before the first release this is a new promise; afterwards `promised` stays what it was.
        """
        with self._write():
            if policy == self.policy:
                return self.receipt()
            self.require_tightening(policy)
            return self._chest.append("tighten", [("tighten", {"policy": policy.to_json()})])

    def require_tightening(self, policy: Policy) -> None:
        """Refuse a policy that the current one may not become; nothing is written."""
        if policy == self.policy:
            return
        require_tighter(self.policy, policy, spent=self.spent)
        cap = policy.count_alone(self._books.capacity)
        is_new = policy.epsilon_alone != self.policy.epsilon_alone
        if is_new and cap is not None and cap < self.alone:
            raise PolicyRefusal(
                f"sum.epsilon_alone = {policy.epsilon_alone} is less than what was already "
                "released; a promise cannot be made for the past, so choose a larger one"
            )
        if policy.count_parts(self._books.capacity) < self.spent:
            raise PolicyRefusal(
                f"({policy.epsilon:g}, {policy.delta:g}) is less than what was already "
                "released; a promise cannot be made for the past, so choose a larger budget"
            )

    def receipt(self) -> VaultReceipt:
        """Return the receipt of the last line: its number and hash."""
        return self._chest.receipt()

    def contains(self, receipt: Receipt | VaultReceipt) -> bool:
        """Return whether this ledger has the receipt's line; an older copy has not."""
        return self._chest.contains(receipt)

    def entries(self) -> Iterator[Entry]:
        """Yield every reserve from the first, answered or burnt; uploads are not read."""
        for line in self.lines():
            if line.kind == "reserve":
                yield _make_entry(line)

    def lines(self) -> list[Line]:
        """Return all lines, from the first."""
        with self._chest.use() as journal:
            return list(journal.lines())

    def find_answered_reserve(self, run: str, t: int) -> int | None:
        """Return the line of the reserve of a round's stored upload, if it has one."""
        with self._chest.use():
            turn = self._books.turn(run, t)
            return None if turn is None or turn.stored is None else turn.reserve

    def _require_unanswered(self, run: str, t: int) -> None:
        if self.find_answered_reserve(run, t) is not None:
            raise RoundAnswered(
                f"round {t} of run {run} has its answer already; send the stored one again"
            )

    @contextmanager
    def _write(self) -> Iterator[None]:
        with self._chest.use():
            if self._readable_only:
                raise VaultRefusal(
                    f"{self.path} was opened without its data set, for reading only; "
                    "open it with the data's fingerprint"
                )
            yield


def require_dataset(dataset: object) -> None:
    """Refuse what is not a fingerprint."""
    if not is_hash(dataset):
        remedy = "take client.vault.fingerprint(x, y)"
        raise InputError.of("dataset", dataset, "64 hexadecimal digits", remedy)


def _make_entry(line: Line, upload: bytes | None = None, dropped: bool = False) -> Entry:
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


def _check_booking(
    run: str, t: int, request: str, units: Sequence[int], server: str, facts: Mapping[str, Any]
) -> tuple[int, ...]:
    """Return the debits as plain integers, or raise one sentence about what cannot be booked."""
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
        remedy = "take those of an offer"
        raise InputError.of("units", list(paid)[:4], "whole numbers ≥ 1, one a release", remedy)
    try:
        small = len(encode_canonical(dict(facts))) <= _MOST_FACTS
    except (TypeError, ValueError, RecursionError):
        small = False
    if not small:
        raise InputError.of("facts", type(facts).__name__, "a little plain JSON", "note less")
    return tuple(int(u) for u in paid)
