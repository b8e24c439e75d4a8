"""Clipped gradients on an integer grid: sums that are exact, and so a sensitivity without slack.

One grid unit is u = C / ((1 − 2⁻⁴⁰)·2³⁰). A sample's gradient is scaled so that norm C becomes
(1 − 2⁻⁴⁰)·2³⁰ units, truncated toward zero (which never grows a norm) to a whole vector q, and
kept only if Σq² ≤ 2⁶⁰, checked in integers. Whatever the floating-point arithmetic before it did,
‖q‖ ≤ 2³⁰ then holds exactly; the sum over samples is exact in int64 and does not depend on their
order, and replacing one sample moves it by at most 2³¹ units. docs/proofs.md has the proof.

A sample whose gradient is not finite (or whose squared norm is not) becomes the zero vector: the
same behaviour whatever was wrong with it, never an error.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from sottovoce.errors import InputError
from sottovoce.privacy.budget import Unit
from sottovoce.privacy.normal import Floats

Integers = NDArray[np.int64]

NORM = 2**30  # what a clipped gradient's norm is at most, in units
REPLACED = 2 * NORM  # what replacing one sample changes the sum by, at most
_CLIP = (1 - 2**-40) * NORM  # aimed at: 8192 roundings of float64 below NORM
MOST_SAMPLES = 2**32  # sums stay below 2⁶², with room for the noise
LARGEST_NOISE = 2**52  # what the sampler draws


def unit(clip: float) -> float:
    """How large one grid unit is in the gradient's own scale.

    >>> unit(1.0) > 2**-30, round(unit(5.0) * NORM, 9)
    (True, 5.0)
    """
    return clip / _CLIP


def change(protected: Unit, samples: int) -> int:
    """Δ in units: by how much the sum moves if one sample, or the whole data set, is replaced.

    >>> change("record", 800) == 2**31, change("client", 800) == 800 * 2**31
    (True, True)
    """
    if not 1 <= samples <= MOST_SAMPLES:
        raise InputError.of("samples", samples, "from 1 to 2³²", "split the data set")
    return REPLACED * (samples if protected == "client" else 1)


def clipped_sum(blocks: Iterable[Floats], clip: float, parameters: int) -> Integers:
    """Σ_m q_m over blocks of per-sample gradients, each block (rows, parameters), exact.

    Blocks are overwritten. Memory is that of one block.

    >>> rows = np.array([[3.0, 4.0], [np.nan, 1.0], [0.0, -0.5]])
    >>> (clipped_sum([rows], clip=1.0, parameters=2) * unit(1.0)).round(6).tolist()
    [0.6, 0.3]
    """
    total = np.zeros(parameters, dtype=np.int64)
    for block in blocks:
        total += _quantised(block, clip).sum(axis=0)
    return total


def bounded_sum(values: Floats, bound: float) -> int:
    """Σ of values cut to [0, bound], where bound is 2³¹ units: replacing one moves it by ≤ 2³¹.

    What is not a number counts as the bound.

    >>> bounded_sum(np.array([0.5, 7.0, np.nan, -1.0]), bound=1.0) / REPLACED
    2.5
    """
    with np.errstate(all="ignore"):  # a warning would tell of the data
        scaled = np.nan_to_num(values, nan=bound, posinf=bound, neginf=0.0) / bound
        whole = np.minimum(np.maximum(np.trunc(scaled * REPLACED), 0), REPLACED)
    return int(whole.astype(np.uint64).sum())  # 2³² of them at the bound are 2⁶³, beyond int64


def _quantised(block: Floats, clip: float) -> Integers:
    with np.errstate(all="ignore"):
        squared = np.einsum("ij,ij->i", block, block)
        usable = np.isfinite(squared)
        block[~usable] = 0.0  # 0 · NaN would be NaN
        # norm ≤ C is scaled by units per C, a larger norm to just below 2³⁰.
        scale = _CLIP / np.maximum(np.sqrt(np.where(usable, squared, 0.0)), clip)
        block *= scale[:, None]
        approximate = np.einsum("ij,ij->i", block, block)
    # Below 2⁶¹ in floats the exact sum is below 2⁶³ (all terms ≥ 0, relative error < 2⁻¹²).
    block[~(approximate < 2.0**61)] = 0.0
    whole = block.astype(np.int64)  # truncates toward zero
    whole[np.einsum("ij,ij->i", whole, whole) > NORM**2] = 0
    return whole
