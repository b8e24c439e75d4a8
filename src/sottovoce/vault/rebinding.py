"""The operator's rare moments: other data, another place, a backup. Debits are never taken back.

A state is only taken into service if it is the newest that is known, or if everything that may have
been released since is booked as burnt:

    move      the file was copied and the original is gone: its witness must fit, nothing is lost
    restore   a backup, or the witness was lost: what newer receipts prove beyond it is burnt; if
              nothing can be proved, all that is left
    rebind    the records changed: all debits stay with them
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

from sottovoce.errors import InputError, PolicyRefusal, VaultRefusal
from sottovoce.privacy.tank import FULL
from sottovoce.vault import witness
from sottovoce.vault.books import OVERLAPS
from sottovoce.vault.chest import Chest
from sottovoce.vault.vault import require_dataset
from sottovoce.vault.witness import Receipt


def rebind(path: str | Path, *, dataset: str, samples: int, overlap: str) -> Receipt:
    """Bind a vault to changed data (R11). Every debit stays, for old and new records alike."""
    require_dataset(dataset)
    if overlap == "none":
        raise PolicyRefusal(
            "records that have nothing in common with the old ones need a vault of their own; "
            "run `sottovoce ledger create` and keep this one with the old records"
        )
    if overlap not in OVERLAPS:
        raise InputError.of(
            "overlap", overlap, "all, some or none", "say which old records are among the new ones"
        )
    with closing(Chest.open(Path(path))) as chest:
        chest.require_newest()
        books = chest.books
        if (dataset, samples) == (books.dataset, books.policy.samples):
            raise PolicyRefusal(f"{chest.path} is bound to these records already; just use it")
        facts = {
            "from": books.dataset,
            "dataset": dataset,
            "overlap": overlap,
            "policy": replace(books.policy, samples=samples).to_json(),
        }
        return chest.append("rebind", [("rebind", facts)])


def move(path: str | Path) -> Receipt:
    """Take a copy into service in place of the original, which the operator says is gone."""
    with closing(Chest.open(Path(path))) as chest:
        chest.require_witnessed()
        if not chest.is_copy():
            raise PolicyRefusal(f"{chest.path} is where it was; just use it")
        return chest.append("move", [("move", {"inode": chest.path.stat().st_ino})])


def restore(
    path: str | Path, *, receipts: Sequence[Receipt] = (), burn_rest: bool = False
) -> tuple[Receipt, int]:
    """Take a backup into service; the new receipt, and the units burnt for what is not in it.

    The witness, where it survived, proves how much was spent. Receipts from servers prove it up to
    themselves: the operator states that none is newer. With `burn_rest` nothing needs a proof.
    """
    with closing(Chest.open(Path(path))) as chest:
        books, seen = chest.books, witness.read(chest.path)
        proofs = [*receipts, *([] if seen is None else [seen])]
        for proof in proofs:
            if proof.vault != books.id:
                raise InputError.of(
                    "receipt", proof.vault, f"of the vault {books.id}", "give one of this vault"
                )
        unknown = [proof for proof in proofs if not chest.contains(proof)]
        if not unknown and seen is not None and not chest.is_copy() and not burn_rest:
            raise PolicyRefusal(f"{chest.path} is the newest state and in its place; just use it")
        if not burn_rest:
            _require_proof(chest, proofs, unknown)
        known = [proof.spent for proof in unknown if proof.spent is not None]
        burnt = FULL - books.spent if burn_rest else max([0, *(s - books.spent for s in known)])
        facts = {
            "inode": chest.path.stat().st_ino,
            "burnt": burnt,
            "witness": None if seen is None else seen.to_proof(),
            "receipts": [receipt.to_proof() for receipt in receipts],
        }
        newest = max([books.seq, *(proof.seq for proof in unknown)])
        # Lost lines keep their numbers, so that old receipts are not mistaken for new ones.
        return chest.append("restore", [("restore", facts)], seq=newest + 1), burnt


def _require_proof(chest: Chest, proofs: list[Receipt], unknown: list[Receipt]) -> None:
    if not proofs:
        why = "its witness is gone and no receipt was given"
    elif any(proof.seq <= chest.books.seq for proof in unknown):
        why = "it has parted from the vault that gave the receipt: both were in use"
    elif any(proof.spent is None for proof in unknown):
        why = "the newer receipt does not say how much was spent"
    else:
        return
    raise VaultRefusal(
        f"{chest.path} cannot be restored without loss, because {why}; put the witness back, give "
        "the newest `--receipt`, or burn all that is left with `--burn-rest`"
    )
