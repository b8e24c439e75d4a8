"""What an operator does rarely: other data, another place, a backup. Debits are never taken back.

A state is taken into service only if it is the newest that is known, or if everything that may have
been released since is booked as burnt:

    move      the original itself is elsewhere now, or the machine's own witness of it is lost:
              the witness beside it must fit, nothing is burnt
    restore   a backup, or the witness was lost: what newer receipts prove beyond it is burnt; if
              nothing newer is known, all that is left
    rebind    the records changed: all debits stay with them

What a file contains proves nothing about what came after it, and a pair of vault and witness that
was moved looks like one that was copied long ago. So the operator can state that nothing was
released since; the statement is a line of the ledger, and certificates show it.

A backup is the vault file alone, marked as a backup, so that it is never used as it is. No witness
goes with it: a witness that was backed up with its vault would fit it for ever.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from contextlib import closing, suppress
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

from sottovoce.client.vault import witness
from sottovoce.client.vault.chest import (
    Chest,
    require_usable_name,
    resolve_path,
    state_second_ledger,
)
from sottovoce.client.vault.journal import MOST_UNPAID, OVERLAPS, Books
from sottovoce.client.vault.policy import Policy, require_tighter
from sottovoce.client.vault.vault import require_dataset
from sottovoce.client.vault.witness import VaultReceipt, sync_folder
from sottovoce.errors import InputError, PolicyRefusal, VaultRefusal
from sottovoce.privacy.tank import FULL


def backup(path: str | Path, out: str | Path) -> VaultReceipt:
    """Write a backup of the newest state to a new file; return the receipt of its last line."""
    require_usable_name(Path(out))
    target = resolve_path(Path(out).parent) / Path(out).name
    with closing(Chest.open(Path(path), reading=True)) as chest:
        chest.require_newest(reading=True)
        if os.path.lexists(target):  # a link to nowhere would choose another place
            raise VaultRefusal(f"{target} exists already; name another file for the backup")
        draft = target.with_name(target.name + ".part")
        try:
            draft.unlink(missing_ok=True)
            draft.touch(mode=0o600, exist_ok=False)
            with chest.use() as journal:
                journal.copy_to(draft)
            with draft.open("rb") as file:
                os.fsync(file.fileno())
            draft.rename(target)
            sync_folder(target.parent)
        except OSError as error:
            raise VaultRefusal(
                f"{target} cannot be written ({error.strerror}); check the folder and its room"
            ) from None
        finally:  # half a copy, if it failed
            with suppress(OSError):
                draft.unlink()
        return chest.receipt()


NOTHING_SINCE = "nothing was released since"  # as it stands in the chain
_LAST_LINE = 2**52  # that a proof may name; half of what a receipt can number


def rebind(
    path: str | Path,
    *,
    dataset: str,
    samples: int,
    overlap: str,
    second_ledger: bool = False,
    counts_persons: bool = False,
) -> VaultReceipt:
    """Bind a vault to changed data (R11). Every debit stays, for old and new records alike.

    `counts_persons` says that `samples` are what the vault protects, also where these are persons,
    as a node file counts them. Data for which this machine has seen another ledger need
    `second_ledger`, as in `Vault.create`.
    """
    require_dataset(dataset)
    if overlap == "none":
        raise PolicyRefusal(
            "records that have nothing in common with the old ones need a vault of their own; "
            "run `sottovoce ledger create` and keep this one with the old records"
        )
    if overlap not in OVERLAPS:
        remedy = "say which old records are among the new ones"
        raise InputError.of("overlap", overlap, "all, some or none", remedy)
    with closing(Chest.open(Path(path))) as chest:
        chest.require_newest()
        books = chest.books
        if (dataset, samples) == (books.dataset, books.policy.samples):
            raise PolicyRefusal(f"{chest.path} is bound to these records already; just use it")
        if books.policy.unit == "person" and not counts_persons:
            raise PolicyRefusal(
                f"{chest.path} protects persons, and only a node file tells how many there are; "
                f"run `sottovoce ledger rebind --node NODE.toml --overlap {overlap}`"
            )
        facts: dict[str, Any] = {"from": books.dataset, "dataset": dataset, "overlap": overlap}
        facts["policy"] = replace(books.policy, samples=samples).to_json()
        with witness.hold_ledgers(dataset):  # or a creation at the same time sees none either
            facts |= state_second_ledger(dataset, vault=books.id, second_ledger=second_ledger)
            receipt = chest.append("rebind", [("rebind", facts)])
            witness.note_ledger(dataset, books.id)
        return receipt


def resume(path: str | Path) -> VaultReceipt:
    """Go on after answers that were paid for and failed, or rounds that were never paid for."""
    with closing(Chest.open(Path(path))) as chest:
        chest.require_newest()
        books = chest.books
        if not (books.failed or books.unanswered or books.unpaid >= MOST_UNPAID):
            raise PolicyRefusal(f"{chest.path} has not stopped; just use it")
        return chest.append("resume", [("resume", {})])


def move(
    path: str | Path, *, nothing_since: bool = False, second_ledger: bool = False
) -> VaultReceipt:
    """Take the original into service at another place, on the operator's word.

    If its rows have another ledger already, that needs `second_ledger`, as in `Vault.create`.
    """
    with closing(Chest.open(Path(path), whole=True)) as chest:
        chest.require_in_service()
        chest.claim_id()
        chest.require_witnessed()
        if not chest.is_copy() and chest.is_known() and not chest.is_second():
            raise PolicyRefusal(f"{chest.path} is where it was; just use it")
        if not nothing_since:
            name = chest.path.name
            raise VaultRefusal(
                f"{chest.path} may be an older copy, which looks like a moved original; run "
                f"`sottovoce ledger rebind {name} --restored` if it is a backup, or add "
                "`--nothing-since` to state that it is the original and nothing was released since"
            )
        facts = {"inode": chest.path.stat().st_ino, "stated": NOTHING_SINCE}
        return _take_into_service(chest, "move", facts, second_ledger)


def _take_into_service(
    chest: Chest, kind: str, facts: dict[str, Any], second_ledger: bool, seq: int | None = None
) -> VaultReceipt:
    """Write the operator's statement; only then note that these rows have this ledger."""
    books = chest.books
    known = witness.read_machine_witness(books.id)  # after a crash: on which machine it was stated
    facts["kept"] = None if known is None else known.to_proof()
    with witness.hold_ledgers(books.dataset):
        if second_ledger or chest.is_second():
            facts |= state_second_ledger(books.dataset, vault=books.id, second_ledger=second_ledger)
        receipt = chest.append(kind, [(kind, facts)], seq=seq)
        witness.note_ledger(books.dataset, books.id)
    return receipt


def restore(
    path: str | Path,
    *,
    receipts: Sequence[VaultReceipt] = (),
    burn_rest: bool = False,
    nothing_since: bool = False,
    second_ledger: bool = False,
) -> tuple[VaultReceipt, int]:
    """Take a backup into service; return the new receipt, and what was burnt for what it lacks.

    A witness or receipt that is newer than the file proves how much was spent up to it. One that
    the file contains proves nothing. Without a newer one the operator burns all that is left
    (`burn_rest`), or states that nothing was released since (`nothing_since`), which is recorded.
    Giving a receipt states that nothing was released after it, which is recorded, too; a witness
    beside the file that this machine did not write states no such thing.
    """
    if burn_rest and nothing_since:
        raise InputError("--burn-rest and --nothing-since exclude each other; give one of the two")
    with closing(Chest.open(Path(path), whole=True)) as chest:
        chest.claim_id()
        books, seen = chest.books, witness.read_witness(chest.path)
        known = witness.read_machine_witness(books.id)
        proofs = [*receipts, *(proof for proof in (seen, known) if proof is not None)]
        for proof in proofs:
            if proof.vault != books.id:
                remedy = "give one of this vault, and move the witness of another one away"
                raise InputError.of("receipt", proof.vault, f"of the vault {books.id}", remedy)
            if proof.seq > _LAST_LINE:  # the lines after it would have no numbers
                remedy = "no vault has so many lines, so ask again for its newest receipt"
                raise InputError.of("receipt.seq", proof.seq, f"at most {_LAST_LINE}", remedy)
        unknown = [proof for proof in proofs if not chest.contains(proof)]  # to this file
        witnessed = seen is not None and chest.is_known()
        in_place = witnessed and not (chest.is_copy() or chest.is_second())
        if not unknown and in_place and not burn_rest:
            raise PolicyRefusal(f"{chest.path} is the newest state and in its place; just use it")
        if not burn_rest:
            _require_proof(chest, unknown, [*receipts, known], nothing_since)
        spent = [proof.spent for proof in unknown if proof.spent is not None]
        burnt = FULL - books.spent if burn_rest else max([0, *(s - books.spent for s in spent)])
        policy = books.policy
        if burnt and not books.promised:
            policy = _recall_promise(books, unknown, books.spent + burnt)
        alone = [proof.alone - books.alone for proof in unknown if proof.alone is not None]
        if any(proof.spent is not None and proof.alone is None for proof in unknown):
            alone.append(burnt * policy.honest)  # the most, whatever was tightened since
        newest = max([books.seq, *(proof.seq for proof in unknown)])
        unseen = not burn_rest and newest > (0 if known is None else known.seq)
        facts = {
            "inode": chest.path.stat().st_ino,
            "burnt": burnt,
            "alone": max([burnt, math.ceil(burnt * Fraction(policy.share)), *alone]),
            "stated": NOTHING_SINCE if nothing_since or unseen else None,
            "witness": None if seen is None else seen.to_proof(),
            "receipts": [receipt.to_proof() for receipt in receipts],
        }
        if policy != books.policy:
            facts["policy"] = policy.to_json()
        # Lost lines keep their numbers, so that old receipts are not mistaken for new ones.
        return _take_into_service(chest, "restore", facts, second_ledger, newest + 1), burnt


def _recall_promise(books: Books, unknown: list[VaultReceipt], spent: int) -> Policy:
    """Return the policy of a first release that a backup lacks.

    The terms of sums are free until then, so the backup's own may say too little. Where no newer
    proof has them, two disagree, or one cannot be true (looser than the backup, or too small for
    what was spent), they are the loosest that any policy can have.
    """
    promises = {proof.promised for proof in unknown if proof.promised is not None}
    if len(promises) == 1:
        promise = replace(promises.pop(), samples=books.policy.samples)
        with suppress(PolicyRefusal):
            require_tighter(books.policy, promise, spent=0)
            if spent <= promise.count_parts(books.capacity):
                return promise
    return replace(books.policy, honest=books.policy.most_honest, corrupt=0, epsilon_alone=None)


def _have_parted(proofs: Sequence[VaultReceipt], spent: int) -> bool:
    """Return whether no single ledger, with `spent` before, can have given all these receipts.

    A line has one hash, and what is spent never falls.
    """
    hashes = dict[int, str]()
    sums = [spent, *(p.spent for p in sorted(proofs, key=lambda p: p.seq) if p.spent is not None)]
    return sums != sorted(sums) or any(hashes.setdefault(p.seq, p.hash) != p.hash for p in proofs)


def _require_proof(
    chest: Chest,
    unknown: list[VaultReceipt],
    trusted: list[VaultReceipt | None],
    nothing_since: bool,
) -> None:
    newest_known = max((proof.seq for proof in unknown if proof.spent is not None), default=0)
    if any(proof.seq <= chest.books.seq for proof in unknown):
        why = "it has parted from the vault that gave the receipt: both were in use"
    elif _have_parted(unknown, chest.books.spent):
        why = "its receipts are of two copies that have parted: both were in use"
    elif any(proof.seq > newest_known for proof in unknown):
        why = "the newer receipt does not say how much was spent"
    elif any(proof.seq > max([0, *(t.seq for t in trusted if t)]) for proof in unknown):
        beside = witness.locate_witness(chest.path).name
        why = (
            "its witness was not written by this machine and may be an old copy (`--receipt "
            f"{beside}` is your recorded word that nothing was released after it)"
        )
    elif unknown and nothing_since:
        raise VaultRefusal(
            f"{chest.path} has {chest.books.seq} lines and line {newest_known} is known, so "
            "something was released since; leave `--nothing-since` out, "
            "and what is known will be burnt"
        )
    elif unknown or nothing_since:
        return
    else:
        why = "nothing newer than itself is known, and what it contains says nothing of later"
    raise VaultRefusal(
        f"{chest.path} cannot be restored without loss, because {why}; put the newest witness back "
        "or give the newest `--receipt`, state with `--nothing-since` that nothing was released "
        "after it, or burn all that is left with `--burn-rest`"
    )
