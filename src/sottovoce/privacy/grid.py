"""Clipped gradients on an integer grid: sums that are exact, and so a sensitivity without slack.

One grid unit is u = C / ((1 − 2⁻⁴⁰)·2³⁰). A sample's gradient is scaled so that norm C becomes
(1 − 2⁻⁴⁰)·2³⁰ units, truncated toward zero (which never grows a norm) to a whole vector q, and
kept only if a proven upper bound on Σq² is at most 2⁶⁰. Whatever the floating-point arithmetic
before it did, ‖q‖ ≤ 2³⁰ then holds exactly; the sum over samples is exact in int64 and does not
depend on their order, and replacing one sample moves it by at most 2³¹ units. docs/proofs.md has
the proof.

A sample whose gradient is not finite (or whose squared norm is not) becomes the zero vector: the
same behaviour whatever was wrong with it, never an error.

The operations that are carried out, and the sizes of their arrays, depend on the numbers of samples
and parameters alone: a server that measures time must not read a record's gradient from it. No
subnormal number, which a processor may treat more slowly, enters a product.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sottovoce.errors import InputError
from sottovoce.privacy.budget import Unit
from sottovoce.privacy.gaussian import Floats

Integers = NDArray[np.int64]

NORM = 2**30  # what a clipped gradient's norm is at most, in units
REPLACED = 2 * NORM  # what replacing one sample changes the sum by, at most
_CLIP = (1 - 2**-40) * NORM  # aimed at: 8192 roundings of float64 below NORM
MOST_SAMPLES = 2**32  # sums stay below 2⁶², with room for the noise
LARGEST_NOISE = 2**52  # what the sampler draws
_ROWS = 64  # samples worked on together: their sums are exact in float64, too
_SEGMENT = 2**16  # numbers of them written out at a time: they stay in a core's cache
_TOO_LONG = 2**61  # stands for every squared norm from there on
_TERMS = 2**11  # squares that float64 adds at a time: such a sum's relative error is below 2⁻⁴¹
_SLACK = 1 + 2**-41  # makes such a sum an upper bound
_TINY = 2.0**-250  # factors below it count as 0, so that no product of squares underflows


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


@dataclass(frozen=True)
class Products:
    """Gradients of several samples as dense layers have them: products that nobody wrote out.

    Row m is left_m ⊗ right_m of each piece, one piece after the other; left is (samples, a), right
    (samples, b), the piece a·b numbers a sample. Of a large model one sample's gradient, written
    out, is too large for a core's cache, and going through it many times is what takes long.

    >>> block = Products(((np.array([[1.0, 2.0]]), np.array([[10.0, 1.0]])),))
    >>> block.written().tolist(), block.squared().tolist()
    ([[10.0, 1.0, 20.0, 2.0]], [505.0])
    """

    pieces: tuple[tuple[Floats, Floats], ...]

    @classmethod
    def of(cls, block: Floats | Products) -> Products:
        """Gradients that were written out, (samples, parameters), are one times themselves."""
        if isinstance(block, Products):
            return block
        return cls(((np.ones((len(block), 1)), block),))

    def __len__(self) -> int:
        return len(self.pieces[0][0])

    def written(self) -> Floats:
        """All of it, (samples, parameters)."""
        return np.concatenate(
            [np.einsum("ia,ib->iab", *piece).reshape(len(self), -1) for piece in self.pieces],
            axis=1,
        )

    def some(self, start: int, stop: int) -> Products:
        """The samples from `start` to `stop`."""
        return Products(tuple((left[start:stop], right[start:stop]) for left, right in self.pieces))

    def without_tiny(self) -> Products:
        """Factors below 2⁻²⁵⁰ as 0: no norm is then underrated because its squares underflow.

        A number of a gradient that is written out is below 2⁻¹⁶⁰ units then, which truncates to 0.
        """
        return Products(tuple((flushed(left), flushed(right)) for left, right in self.pieces))

    def squared(self) -> Floats:
        """‖g_m‖² of every sample, Σ ‖left‖²·‖right‖² of the pieces: finite only if all of g is."""
        return sum(
            (_squared(left) * _squared(right) for left, right in self.pieces),
            start=np.zeros(len(self)),
        )

    def scaled(self, scale: Floats) -> Products:
        """Row m times scale_m; 0 makes a row zero whatever was in it."""
        keep = scale[:, None] != 0
        return Products(
            tuple(
                (np.where(keep, left * scale[:, None], 0.0), np.where(keep, right, 0.0))
                for left, right in self.pieces
            )
        )

    def segments(self, out: Integers) -> Iterator[tuple[Integers, Floats]]:
        """All of it, some columns at a time, (samples, p, q); before it their places in `out`.

        What was yielded is overwritten by the next.
        """
        rows, first = len(self), 0
        width = max(1, min(_SEGMENT // max(1, rows), _TERMS))
        room = np.empty(rows * width)
        for left, right in self.pieces:
            size = left.shape[1] * right.shape[1]
            places = out[first : first + size].reshape(left.shape[1], right.shape[1])
            first += size
            if left.shape[1] > right.shape[1]:  # the longer side is the faster one to go along
                left, right, places = right, left, places.T
            for j in range(0, right.shape[1], width):
                two = np.ascontiguousarray(right[:, None, j : j + width])
                several = max(1, width // two.shape[2])
                for i in range(0, left.shape[1], several):
                    one = left[:, i : i + several, None]
                    shape = (rows, one.shape[1], two.shape[2])
                    part = room[: math.prod(shape)].reshape(shape)
                    yield places[i : i + several, j : j + width], np.multiply(one, two, out=part)


def clipped_sum(blocks: Iterable[Floats | Products], clip: float, parameters: int) -> Integers:
    """Σ_m q_m over blocks of per-sample gradients, each block (rows, parameters), exact.

    >>> rows = np.array([[3.0, 4.0], [np.nan, 1.0], [0.0, -0.5]])
    >>> (clipped_sum([rows], clip=1.0, parameters=2) * unit(1.0)).round(6).tolist()
    [0.6, 0.3]
    """
    total, some = np.zeros(parameters, dtype=np.int64), np.empty(parameters, dtype=np.int64)
    for block in map(Products.of, blocks):
        for start in range(0, len(block), _ROWS):
            total += _quantised_sum(block.some(start, start + _ROWS), clip, some)
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


def _quantised_sum(block: Products, clip: float, out: Integers) -> Integers:
    """Σ_m q_m of a few samples; a row that is not finite, or too long, is the zero vector.

    docs/proofs.md shows that floating point lets no row become too long. The loop is there in case
    that a machine does not compute as IEEE 754 says: no data make it run twice on one that does.
    """
    with np.errstate(all="ignore"):
        block = block.without_tiny()
        squared = block.squared()
        usable = np.isfinite(squared)
        while True:
            # norm ≤ C is scaled by units per C, a larger norm to just below 2³⁰.
            scale = _CLIP / np.maximum(np.sqrt(np.where(usable, squared, 0.0)), clip)
            fits = _truncated_sum(block.scaled(np.where(usable, scale, 0.0)), out) <= NORM**2
            if np.all(fits):
                return out
            usable &= fits


def _truncated_sum(block: Products, out: Integers) -> Integers:
    """Σ_m trunc(row m) into `out`; returned is an upper bound on ‖trunc(row m)‖² of every row.

    What is in `out` has a meaning only if no row is too long.
    """
    lengths = np.zeros(len(block), dtype=np.int64)
    for places, part in block.segments(out):
        np.trunc(part, out=part)
        lengths = np.minimum(lengths + _lengths(part.reshape(len(block), -1)), _TOO_LONG)
        # At most 2⁶ numbers of at most 2³⁰: whole numbers that float64 adds exactly.
        places[...] = part.sum(axis=0)
    return lengths


def _lengths(whole: Floats) -> Integers:
    """An upper bound on Σq² of rows of at most 2¹¹ whole numbers, less than 2⁻⁴⁰ of it too large.

    Whatever is 2⁶¹ and more, or no number, is 2⁶¹. One path for all values: an exact sum in int64
    would take twice as long, and taking it only where sums reach 2⁵³ told of the values.
    """
    sums: Floats = np.matmul(whole[:, None, :], whole[:, :, None])[:, 0, 0]
    # Truncated it is still a bound, since Σq² is whole. fmin, not minimum: NaN is too long, too.
    return np.fmin(sums * _SLACK, float(_TOO_LONG)).astype(np.int64)


def _squared(rows: Floats) -> Floats:
    """Σv² of every row: sums of at most 2¹¹ squares, which are added in pairs."""
    sums = [
        np.einsum("ij,ij->i", rows[:, j : j + _TERMS], rows[:, j : j + _TERMS])
        for j in range(0, rows.shape[1], _TERMS)
    ]
    return np.asarray(np.stack(sums, axis=1).sum(axis=1))


def flushed(values: Floats) -> Floats:
    """Return the values with those below 2⁻²⁵⁰ as 0; what is no number stays none."""
    return np.where(np.abs(values) < _TINY, 0.0, values)
