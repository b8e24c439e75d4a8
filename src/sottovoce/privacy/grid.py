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

NORM = 2**30  # the largest norm of a clipped gradient, in grid units
REPLACED = 2 * NORM  # the most by which replacing one sample moves the sum
_CLIP = (1 - 2**-40) * NORM  # the norm aimed at: 8192 rounding errors of float64 below NORM
MOST_SAMPLES = 2**32  # sums then stay below 2⁶², with room for the noise
LARGEST_NOISE = 2**52  # the largest σ that the sampler draws
_ROWS = 64  # samples processed together: float64 adds that many whole numbers exactly
_SEGMENT = 2**16  # numbers written out at a time: they fit into a core's cache
_TOO_LONG = 2**61  # stands for every squared norm of this size and above
_TERMS = 2**11  # squares that float64 adds at a time: such a sum's relative error is below 2⁻⁴¹
_SLACK = 1 + 2**-41  # makes such a sum an upper bound
_TINY = 2.0**-250  # factors below it count as 0, so that no product of squares underflows


def grid_unit(clip: float) -> float:
    """Return the size of one grid unit on the gradient's own scale."""
    return clip / _CLIP


def grid_sensitivity(protected: Unit, samples: int) -> int:
    """Return Δ in grid units: how far the sum moves if one sample, or the dataset, is replaced."""
    if not 1 <= samples <= MOST_SAMPLES:
        raise InputError.of("samples", samples, "from 1 to 2³²", "split the dataset")
    return REPLACED * (samples if protected == "client" else 1)


@dataclass(frozen=True)
class Products:
    """Per-sample gradients of dense layers, held as the factors of their outer products.

    The gradient of sample m is left_m ⊗ right_m of each piece, one piece after the other; left has
    shape (samples, a), right (samples, b), and the piece has a·b numbers a sample. The product of a
    large model does not fit into a core's cache, and reading it many times is what takes long.

    >>> block = Products(((np.array([[1.0, 2.0]]), np.array([[10.0, 1.0]])),))
    >>> block.write_out().tolist(), block.squared_norms().tolist()
    ([[10.0, 1.0, 20.0, 2.0]], [505.0])
    """

    pieces: tuple[tuple[Floats, Floats], ...]

    @classmethod
    def of(cls, block: Floats | Products) -> Products:
        """Return gradients as `Products`; an array (samples, parameters) is 1 times itself."""
        if isinstance(block, Products):
            return block
        return cls(((np.ones((len(block), 1)), block),))

    def __len__(self) -> int:
        return len(self.pieces[0][0])

    def write_out(self) -> Floats:
        """Return all gradients as one array (samples, parameters)."""
        return np.concatenate(
            [np.einsum("ia,ib->iab", *piece).reshape(len(self), -1) for piece in self.pieces],
            axis=1,
        )

    def take_rows(self, start: int, stop: int) -> Products:
        """Return the samples from `start` to `stop`."""
        return Products(tuple((left[start:stop], right[start:stop]) for left, right in self.pieces))

    def flush_tiny(self) -> Products:
        """Set factors below 2⁻²⁵⁰ to 0, so that no norm is too small because a square underflows.

        In an array of gradients such a number is below 2⁻¹⁶⁰ grid units, and truncates to 0.
        """
        return Products(tuple((flush_tiny(left), flush_tiny(right)) for left, right in self.pieces))

    def squared_norms(self) -> Floats:
        """Return ‖g_m‖² = Σ ‖left‖²·‖right‖² of every sample; it is finite only if all of g is."""
        return sum(
            (_sum_squares(left) * _sum_squares(right) for left, right in self.pieces),
            start=np.zeros(len(self)),
        )

    def scale_rows(self, scale: Floats) -> Products:
        """Multiply row m by scale_m; a scale of 0 gives a zero row even where values are NaN."""
        keep = scale[:, None] != 0
        return Products(
            tuple(
                (np.where(keep, left * scale[:, None], 0.0), np.where(keep, right, 0.0))
                for left, right in self.pieces
            )
        )

    def segments(self, out: Integers) -> Iterator[tuple[Integers, Floats]]:
        """Yield pieces of the gradients, (samples, p, q), each after its view (p, q) of `out`.

        The next piece overwrites the one before.
        """
        rows, first = len(self), 0
        width = max(1, min(_SEGMENT // max(1, rows), _TERMS))
        buffer = np.empty(rows * width)
        for left, right in self.pieces:
            size = left.shape[1] * right.shape[1]
            view = out[first : first + size].reshape(left.shape[1], right.shape[1])
            first += size
            if left.shape[1] > right.shape[1]:  # an inner loop over the longer side is faster
                left, right, view = right, left, view.T
            for j in range(0, right.shape[1], width):
                columns = np.ascontiguousarray(right[:, None, j : j + width])
                several = max(1, width // columns.shape[2])
                for i in range(0, left.shape[1], several):
                    factors = left[:, i : i + several, None]
                    shape = (rows, factors.shape[1], columns.shape[2])
                    segment = buffer[: math.prod(shape)].reshape(shape)
                    np.multiply(factors, columns, out=segment)
                    yield view[i : i + several, j : j + width], segment


def clipped_sum(
    blocks: Iterable[Floats | Products], clip: float, parameters: int, weights: Floats | None = None
) -> Integers:
    """Return the exact Σ_m q_m over blocks of per-sample gradients, each (rows, parameters).

    `weights`, one for each row of all blocks and at most 1, multiply gradients after clipping.

    >>> rows = np.array([[3.0, 4.0], [np.nan, 1.0], [0.0, -0.5]])
    >>> (clipped_sum([rows], clip=1.0, parameters=2) * grid_unit(1.0)).round(6).tolist()
    [0.6, 0.3]
    """
    total, part = np.zeros(parameters, dtype=np.int64), np.empty(parameters, dtype=np.int64)
    first = 0  # of the block's rows among all rows
    for block in map(Products.of, blocks):
        for start in range(0, len(block), _ROWS):
            rows = block.take_rows(start, start + _ROWS)
            weight = 1.0 if weights is None else weights[first + start :][: len(rows)]
            total += _quantised_sum(rows, clip, weight, part)
        first += len(block)
    return total


def bounded_sum(values: Floats, bound: float) -> int:
    """Return the sum of values clipped to [0, bound], where `bound` is 2³¹ grid units.

    Replacing one value moves the sum by at most 2³¹. NaN counts as the bound.

    >>> bounded_sum(np.array([0.5, 7.0, np.nan, -1.0]), bound=1.0) / REPLACED
    2.5
    """
    with np.errstate(all="ignore"):  # a warning would reveal something about the data
        scaled = np.nan_to_num(values, nan=bound, posinf=bound, neginf=0.0) / bound
        whole = np.minimum(np.maximum(np.trunc(scaled * REPLACED), 0), REPLACED)
    return int(whole.astype(np.uint64).sum())  # 2³² of them at the bound are 2⁶³, beyond int64


def _quantised_sum(block: Products, clip: float, weight: float | Floats, out: Integers) -> Integers:
    """Return Σ_m q_m of a few samples; a row that is not finite, or too long, counts as zero.

    docs/proofs.md shows that no row becomes too long under IEEE 754 arithmetic. The loop is for
    machines that compute otherwise; on all others it runs once, whatever the data are.
    """
    with np.errstate(all="ignore"):
        block = block.flush_tiny()
        squared = block.squared_norms()
        usable = np.isfinite(squared)
        while True:
            # A norm ≤ C is scaled by _CLIP / C, a larger one to just below 2³⁰; then by its weight.
            scale = weight * _CLIP / np.maximum(np.sqrt(np.where(usable, squared, 0.0)), clip)
            fits = _truncated_sum(block.scale_rows(np.where(usable, scale, 0.0)), out) <= NORM**2
            if np.all(fits):
                return out
            usable &= fits


def _truncated_sum(block: Products, out: Integers) -> Integers:
    """Write Σ_m trunc(row m) to `out`, and return an upper bound on ‖trunc(row m)‖² of every row.

    `out` is meaningful only if no row is too long.
    """
    bounds = np.zeros(len(block), dtype=np.int64)
    for view, segment in block.segments(out):
        np.trunc(segment, out=segment)
        more = _bound_squared_norms(segment.reshape(len(block), -1))
        bounds = np.minimum(bounds + more, _TOO_LONG)
        # At most 2⁶ whole numbers of at most 2³⁰, which float64 adds exactly.
        view[...] = segment.sum(axis=0)
    return bounds


def _bound_squared_norms(whole: Floats) -> Integers:
    """Return an upper bound on Σq² of rows of at most 2¹¹ whole numbers, too large by < 2⁻⁴⁰ of it.

    Sums of 2⁶¹ and more, and NaN, give 2⁶¹. All values take one path: an exact sum in int64 would
    take twice as long, and taking it only where sums reach 2⁵³ would reveal values by the time.
    """
    sums: Floats = np.matmul(whole[:, None, :], whole[:, :, None])[:, 0, 0]
    # It is still a bound when truncated, since Σq² is whole. fmin maps NaN to too long, too.
    return np.fmin(sums * _SLACK, float(_TOO_LONG)).astype(np.int64)


def _sum_squares(rows: Floats) -> Floats:
    """Return Σv² of every row: sums of at most 2¹¹ squares, which are then added."""
    sums = [
        np.einsum("ij,ij->i", rows[:, j : j + _TERMS], rows[:, j : j + _TERMS])
        for j in range(0, max(1, rows.shape[1]), _TERMS)  # a parameter may have no numbers
    ]
    return sums[0] if len(sums) == 1 else np.asarray(np.stack(sums, axis=1).sum(axis=1))


def flush_tiny(values: Floats) -> Floats:
    """Return the values with those below 2⁻²⁵⁰ set to 0; NaN stays NaN."""
    return np.where(np.abs(values) < _TINY, 0.0, values)
