"""A staircase over the bell exp(−y²/2σ²), from which proposals cost one random word.

The integers are cut into bars of 2ᵐ neighbours, the bell is scaled by a whole number S, and every
bar gets two whole heights that enclose S times the bell over the bar:

    sure ≤ S·exp(−y²/2σ²) ≤ top        for every y of the bar.

All bars together are at most 2⁶² high. A height is split into 2¹⁶ slots of 2⁴⁶: the whole slots
below `sure` need no further test, whatever y turns out to be, and about 98 % of all proposals
end there. What remains of each bar, from its last whole slot to its top, is laid end to end; a
proposal that falls there is accepted if its height is below the bell.

The heights come from floating point, and that is harmless: *any* whole numbers with the two
inequalities give exactly the same distribution, and a relative margin of 2⁻⁴⁰ keeps them true
(docs/proofs.md). Beyond `REACH` standard deviations a bar would be lower than one unit; the two
tails are entries of their own, walked in exact arithmetic.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from sottovoce.privacy.gaussian import Floats

Integers = NDArray[np.int64]

SLOT_BITS = 16
FINE_BITS = 46  # of a height within a slot: 62 bits in all, so that sums stay in int64
SLOTS = 2**SLOT_BITS
BARS = 64  # a standard deviation spans 64 to 127 bars; small σ have one bar an integer
REACH = 8
# What `bell` is off by is below 2⁻⁴⁴ (docs/proofs.md); a factor of 16 is to spare.
MARGIN = 2.0**-40


@dataclass(frozen=True, eq=False)
class Envelope:
    """Bars, slots and what is left of the bars, for one σ. `envelope(sigma)` makes it."""

    sigma: int
    width_bits: int  # m
    scale: int  # S
    sure: int  # slots 0 … sure − 1 are accepted without a test
    slots: Integers  # the first integer of each slot's bar (2¹⁶ entries, zero from `sure` on)
    starts: Integers  # the first integer of each bar
    floors: Integers  # the height up to which each bar is in slots
    edges: Integers  # where the rest of each bar begins; then those of both tails, and the end
    tail_start: int  # the tails: y ≥ tail_start, y < −tail_start
    tail_bits: int  # blocks of a tail are 2ᵗ wide, each half as high as the one before
    tail_height: int

    def __post_init__(self) -> None:
        for array in (self.slots, self.starts, self.floors, self.edges):
            array.setflags(write=False)  # kept between calls: nobody may change it

    def bell(self, values: Integers) -> Floats:
        """S·exp(−y²/2σ²) in float64: off by less than 2⁻⁴⁴ of itself for |y| ≤ 9σ.

        >>> envelope(2**40).bell(np.array([2**40])) / envelope(2**40).scale == np.exp(-0.5)
        array([ True])
        """
        return float(self.scale) * _bell(values, self.sigma)


def _bell(values: Integers, sigma: int) -> Floats:
    standard = values / float(sigma)
    return np.asarray(np.exp(standard * standard * -0.5), dtype=np.float64)


@lru_cache(maxsize=4)
def envelope(sigma: int, reach: int = REACH) -> Envelope:
    """The staircase for this σ: public, a function of σ alone.

    >>> staircase = envelope(2**35)
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

    # From Y on, the bell falls by e in σ²/Y: blocks that wide are each less than half as high.
    tail_start = count << width_bits
    tail_bits = (-(-sigma * sigma // tail_start) - 1).bit_length()
    tail_bits = max(tail_bits, width_bits)
    per_tail = 2 << (tail_bits - width_bits)  # Σ 2⁻ᵇ = 2 blocks, counted in bars

    top = _bell(nearest, sigma)
    tail = float(_bell(np.array([tail_start]), sigma)[0])
    # A millionth is left free for rounding up; a proposal that falls there is refused.
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
