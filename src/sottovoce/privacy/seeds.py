"""One tree of randomness a run: seed → purpose → round. Nothing else is random in a simulation."""

from __future__ import annotations

import secrets
from enum import IntEnum

import numpy as np

from sottovoce.errors import InputError


class Purpose(IntEnum):
    """What a branch of the tree is for; the numbers are part of what a seed means."""

    SPLIT = 0
    INIT = 1
    COHORT = 2
    NOISE = 3


def fresh() -> int:
    """A seed from the operating system, for a run that was given none."""
    return secrets.randbits(63)


def check(seed: object) -> int:
    """The seed, or a refusal."""
    if isinstance(seed, np.integer):
        seed = int(seed)
    if not isinstance(seed, int) or isinstance(seed, bool) or not 0 <= seed < 2**63:
        raise InputError.of("seed", seed, "a whole number from 0 to 2^63 − 1", "or give none")
    return seed


def require_none_for(noise: str, seed: object) -> None:
    """Secure noise cannot be repeated, so a seed would promise what cannot be had."""
    if noise == "secure" and seed is not None:
        raise InputError.of(
            "seed",
            seed,
            "absent with noise = secure",
            "its noise comes from the operating system alone; leave the seed out",
        )


def branch(seed: int, purpose: Purpose, *path: int) -> np.random.SeedSequence:
    """The branch of the tree for this purpose (and round, …)."""
    return np.random.SeedSequence(seed, spawn_key=(int(purpose), *path))


def generator(seed: int, purpose: Purpose, *path: int) -> np.random.Generator:
    """numpy's generator for a branch.

    >>> [int(generator(seed, Purpose.COHORT, 3).integers(1000)) for seed in (7, 7, 8)]
    [377, 377, 394]
    """
    return np.random.default_rng(branch(seed, purpose, *path))


def words(seed: int, purpose: Purpose, *path: int) -> np.ndarray:
    """The 64 bits of a JAX key for a branch, as two words."""
    return branch(seed, purpose, *path).generate_state(2, np.uint32)
