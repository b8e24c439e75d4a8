"""A vault to play with: made, used, closed; and what must be found in it afterwards."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from pathlib import Path

from sottovoce.errors import VaultRefusal
from sottovoce.privacy.tank import FULL
from sottovoce.vault import Policy, Vault

DATASET = "ab" * 32
OTHER = "cd" * 32
POLICY = Policy(epsilon=8, delta=1e-5, samples=143, clip=1.0)


def request(run: str, t: int) -> str:
    """The hash of what a server might ask in a round."""
    return hashlib.sha256(f"{run} {t}".encode()).hexdigest()


@dataclass
class Known:
    """What has left a vault, and what was booked for it, as an outsider noted it down."""

    spent: int = 0
    uploads: dict[tuple[str, int], bytes] = field(default_factory=dict)

    def held_by(self, vault: Vault) -> None:
        """No unit and no byte differs; a damaged upload may be refused, never be another one."""
        assert vault.spent == self.spent
        assert int(vault.tank("x").left) == FULL - self.spent
        for (run, t), content in self.uploads.items():
            try:
                entry = vault.find(run, t)
            except VaultRefusal:
                continue
            assert entry is not None
            assert entry.upload == content


def play(vault: Vault, known: Known, run: str, rounds: range, units: int = FULL // 500) -> None:
    """Answer some rounds; every third is burnt once before."""
    for t in rounds:
        if t % 3 == 2:
            vault.reserve(run, t, request(run, t), [units], server="s", facts={})
            known.spent += units
        paid = vault.reserve(run, t, request(run, t), [units, units], server="s", facts={"t": t})
        content = hashlib.sha512(f"{run} {t}".encode()).digest() * (1 + t % 40)
        vault.store(paid, content)
        known.spent += 2 * units
        known.uploads[run, t] = content


def used(path: Path, rounds: int = 6) -> Known:
    """Make a vault, use it in two runs and close it."""
    known = Known()
    with Vault.create(path, POLICY, dataset=DATASET) as vault:
        play(vault, known, "run-a", range(rounds))
        play(vault, known, "run-b", range(rounds))
    return known
