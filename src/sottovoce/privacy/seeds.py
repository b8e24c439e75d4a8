"""The tree of simulated randomness: seed → purpose → round. A simulation has no other."""

from __future__ import annotations

import secrets
from enum import IntEnum

import numpy as np

from sottovoce.errors import InputError


class Purpose(IntEnum):
    """What a branch of the tree is for. Changing a number changes the runs of every seed."""

    SPLIT = 0
    INIT = 1
    COHORT = 2
    NOISE = 3
    FORECAST = 4


def draw_seed() -> int:
    """Draw a seed from the operating system, for a run that was given none."""
    return secrets.randbits(63)


def check_seed(seed: object) -> int:
    """Return the seed as an int; raise InputError unless it is from 0 to 2^63 − 1."""
    if isinstance(seed, np.integer):
        seed = int(seed)
    if not isinstance(seed, int) or isinstance(seed, bool) or not 0 <= seed < 2**63:
        raise InputError.of("seed", seed, "a whole number from 0 to 2^63 − 1", "or give none")
    return seed


def refuse_seed(noise: str, seed: object) -> None:
    """Refuse a seed with secure noise, which cannot be repeated."""
    if noise == "secure" and seed is not None:
        remedy = "its noise comes from the operating system alone; leave the seed out"
        raise InputError.of("seed", seed, "absent with noise = secure", remedy)


def branch(seed: int, purpose: Purpose, *path: int) -> np.random.SeedSequence:
    """Return the branch of the tree for this purpose (and round, …)."""
    return np.random.SeedSequence(seed, spawn_key=(int(purpose), *path))


def generator(seed: int, purpose: Purpose, *path: int) -> np.random.Generator:
    """Return numpy's generator for a branch.

    >>> [int(generator(seed, Purpose.COHORT, 3).integers(1000)) for seed in (7, 7, 8)]
    [377, 377, 394]
    """
    return np.random.default_rng(branch(seed, purpose, *path))


def make_key_words(seed: int, purpose: Purpose, *path: int) -> np.ndarray:
    """Return the 64 bits of a JAX key for a branch, as two words."""
    return branch(seed, purpose, *path).generate_state(2, np.uint32)
