"""Every check there is: hashes, pages, stored bytes, witness, place."""

from __future__ import annotations

from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sottovoce.client.vault.books import Turn
from sottovoce.client.vault.chest import Chest, require_there
from sottovoce.errors import VaultRefusal


@dataclass(frozen=True)
class Check:
    """One check: what was looked at, and what is wrong with it, if anything."""

    name: str
    looks: str
    wrong: str | None


@dataclass(frozen=True)
class Verified:
    """What the checks found, in the order they were made; later ones need the earlier."""

    path: str
    checks: tuple[Check, ...]

    @property
    def broken(self) -> str | None:
        """The first thing that is wrong, as a sentence."""
        return next((check.wrong for check in self.checks if check.wrong), None)

    def require(self) -> None:
        """A refusal unless all is well."""
        if self.broken:
            raise VaultRefusal(self.broken)

    def to_json(self) -> dict[str, Any]:
        """One object."""
        return {
            "path": self.path,
            "whole": self.broken is None,
            "checks": [asdict(check) for check in self.checks],
        }

    def __str__(self) -> str:
        return "\n".join(
            f"{'ok    ' if check.wrong is None else 'WRONG '} {check.name:<8} {check.looks}"
            for check in self.checks
        )


def verify(path: str | Path) -> Verified:
    """Look at everything. A backup is whole inside, and says that it is a copy."""
    require_there(Path(path))
    checks: list[Check] = []
    try:
        chest = Chest.open(Path(path), whole=True)
    except VaultRefusal as no:
        return Verified(
            str(path), (Check("chain", "lock, form, and the hashes of its lines", str(no)),)
        )
    with closing(chest):
        seq = chest.books.seq
        checks.append(
            Check(
                "chain",
                f"lock, form, and the hashes of {seq:,} line{'' if seq == 1 else 's'}",
                None,
            )
        )
        books = chest.books
        answers = list(books.stored())
        stored = [turn for run, t, turn in answers if not books.is_dropped(run, t)]
        dropped = len(answers) - len(stored)
        for name, looks, look in (
            ("pages", "SQLite's own check of the file", chest.check_pages),
            (
                "uploads",
                f"{len(stored):,} stored uploads, byte by byte"
                + (f"; {dropped:,} were acknowledged and dropped" if dropped else ""),
                lambda: _all(chest, stored),
            ),
            ("witness", "whether a newer state is known", lambda: _newest(chest)),
            ("place", "whether it is the original file", chest.require_original),
        ):
            try:
                look()
                checks.append(Check(name, looks, None))
            except VaultRefusal as no:
                checks.append(Check(name, looks, str(no)))
    return Verified(str(path), tuple(checks))


def _newest(chest: Chest) -> None:
    chest.require_witnessed()
    chest.require_known()


def _all(chest: Chest, stored: list[Turn]) -> None:
    for turn in stored:
        chest.upload(turn)
