"""A staircase over the bell exp(−y²/2σ²), from which a proposal takes one random word.

The integers are divided into bars of 2ᵐ neighbours, the bell is scaled by a whole number S, and
every bar gets two whole heights that enclose S times the bell over the bar:

    sure ≤ S·exp(−y²/2σ²) ≤ top        for every y of the bar.

The heights of all bars add up to at most 2⁶², which is divided into 2¹⁶ slots of 2⁴⁶. The whole
slots of a bar below `sure` need no further test, whatever y is, and about 98 % of all proposals
fall there. The rests of the bars, from the last whole slot to the top, are laid end to end; a
proposal that falls there is accepted if its height is below the bell.

The heights are computed in floating point, which is harmless: *any* whole numbers with the two
inequalities give exactly the same distribution, and a relative margin of 2⁻⁴⁰ keeps them true
(docs/proofs.md). Beyond `REACH` standard deviations a bar would be lower than one; the two tails
are separate entries, computed in exact arithmetic.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from sottovoce.privacy.gaussian import Floats

Integers = NDArray[np.int64]

SLOT_BITS = 16
FINE_BITS = 46  # bits of a height within a slot: 62 bits in all, so that sums fit into int64
SLOTS = 2**SLOT_BITS
BARS = 64  # a standard deviation spans 64 to 127 bars; for small σ every integer is a bar
REACH = 8
# The relative error of `bell` is below 2⁻⁴⁴ (docs/proofs.md): the margin is 16 times that.
MARGIN = 2.0**-40


@dataclass(frozen=True, eq=False)
class Envelope:
    """The bars, slots, rests and tails for one σ. `build_envelope(sigma)` makes it."""

    sigma: int
    width_bits: int  # m
    scale: int  # S
    sure: int  # slots 0 … sure − 1 are accepted without a test
    slots: Integers  # the first integer of each slot's bar (2¹⁶ entries, zero from `sure` on)
    starts: Integers  # the first integer of each bar
    floors: Integers  # the height up to which each bar consists of whole slots
    edges: Integers  # where the rest of each bar begins, then both tails, then the end
    tail_start: int  # the tails: y ≥ tail_start, y < −tail_start
    tail_bits: int  # blocks of a tail are 2ᵗ wide, each half as high as the one before
    tail_height: int

    def __post_init__(self) -> None:
        for array in (self.slots, self.starts, self.floors, self.edges):
            array.setflags(write=False)  # the cache hands out the same arrays to every call

    def bell(self, values: Integers) -> Floats:
        """Return S·exp(−y²/2σ²) in float64, with a relative error below 2⁻⁴⁴ for |y| ≤ 9σ.

        >>> staircase = build_envelope(2**40)
        >>> staircase.bell(np.array([2**40])) / staircase.scale == np.exp(-0.5)
        array([ True])
        """
        return float(self.scale) * _bell(values, self.sigma)


def _bell(values: Integers, sigma: int) -> Floats:
    standard = values / float(sigma)
    return np.asarray(np.exp(standard * standard * -0.5), dtype=np.float64)


@lru_cache(maxsize=4)
def build_envelope(sigma: int, reach: int = REACH) -> Envelope:
    """Return the staircase for this σ. It is public, because it depends on σ alone.

    >>> staircase = build_envelope(2**35)
    >>> 0.97 < staircase.sure / SLOTS < 1
    True
    """
    width_bits = max(0, sigma.bit_length() - BARS.bit_length())
    width = 1 << width_bits
    count = -(-reach * sigma // width)
    starts = np.arange(-count, count, dtype=np.int64) << width_bits
    ends = starts + (width - 1)
    nearest = np.minimum(np.abs(starts), np.abs(ends))
    farthest = np.maximum(np.abs(starts), np.abs(ends))

    # From Y on, the bell falls by a factor e within σ²/Y. In blocks of that width or more, each
    # block is less than half as high as the one before.
    tail_start = count << width_bits
    tail_bits = (-(-sigma * sigma // tail_start) - 1).bit_length()
    tail_bits = max(tail_bits, width_bits)
    per_tail = 2 << (tail_bits - width_bits)  # Σ 2⁻ᵇ = 2 blocks, counted in bars

    top = _bell(nearest, sigma)
    tail = float(_bell(np.array([tail_start]), sigma)[0])
    # About a millionth stays free for rounding up; a proposal that falls there is refused.
    scale = int(2.0**62 * (1 - 2**-20) / (float(top.sum()) + 2 * per_tail * tail))
    tops = np.ceil(scale * top * (1 + MARGIN)).astype(np.int64)
    sure = np.floor(scale * _bell(farthest, sigma) * (1 - MARGIN)).astype(np.int64)
    tail_height = int(np.ceil(scale * tail * (1 + MARGIN)))

    whole = sure >> FINE_BITS
    slots = np.zeros(SLOTS, dtype=np.int64)
    taken = int(whole.sum())
    slots[:taken] = np.repeat(starts, whole)
    floors = whole << FINE_BITS
    rests = np.concatenate([[0], tops - floors, [per_tail * tail_height] * 2])
    return Envelope(
        sigma=sigma,
        width_bits=width_bits,
        scale=scale,
        sure=taken,
        slots=slots,
        starts=starts,
        floors=floors,
        edges=np.cumsum(rests, dtype=np.int64),
        tail_start=tail_start,
        tail_bits=tail_bits,
        tail_height=tail_height,
    )
