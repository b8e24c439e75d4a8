"""Gaussian noise that is safe to release: exact, on the integers, from the system's entropy.

`draw(count, sigma)` has the discrete Gaussian distribution

    P(y) = exp(−y²/2σ²) / Σ_k exp(−k²/2σ²),        y any integer,

exactly: no value is rounded, no tail is cut off and no integer is missing (docs/proofs.md). Each
value is proposed from a staircase over the bell and accepted if it falls under the bell. Where
floating point cannot decide that (2 draws in 10¹²), `is_below` does in whole numbers: of a uniform
number it draws only as many random bits as the decision needs, and encloses exp(−a/b) between two
fractions of denominator 2ᵏ, until the two intervals no longer overlap.

Every call takes a new AES-256 key and counter from the operating system, so that forked processes,
restored snapshots and retried messages never share noise. There is no seed.

The time of a draw reveals nothing about the data: a step's noise is drawn before that step reads
them.

The staircase (`Envelope`) has bars over 2ᵐ neighbours each, with two whole heights that enclose S
times the bell over the bar: sure ≤ S·exp(−y²/2σ²) ≤ top. A proposal takes one random word; about
98 % fall into slots below `sure` and need no test, the others are accepted if their height is below
the bell. *Any* whole heights with the two inequalities give exactly the same distribution, so that
they may be computed in floating point, with a relative margin of 2⁻⁴⁰. The two tails beyond `REACH`
standard deviations are separate entries, computed in exact arithmetic.
"""

from __future__ import annotations

import operator
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from numpy.typing import NDArray

from sottovoce.errors import InputError
from sottovoce.privacy.gaussian import Floats
from sottovoce.privacy.grid import LARGEST_NOISE, Integers

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
        """Return S·exp(−y²/2σ²) in float64, with a relative error below 2⁻⁴⁴ for |y| ≤ 9σ."""
        return float(self.scale) * _bell(values, self.sigma)


def _bell(values: Integers, sigma: int) -> Floats:
    standard = values / float(sigma)
    return np.asarray(np.exp(standard * standard * -0.5), dtype=np.float64)


@lru_cache(maxsize=4)
def build_envelope(sigma: int, reach: int = REACH, margin: float = MARGIN) -> Envelope:
    """Return the staircase for this σ. It is public, because it depends on σ alone."""
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
    tail_bits = max((-(-sigma * sigma // tail_start) - 1).bit_length(), width_bits)
    per_tail = 2 << (tail_bits - width_bits)  # Σ 2⁻ᵇ = 2 blocks, counted in bars

    top = _bell(nearest, sigma)
    tail = float(_bell(np.array([tail_start]), sigma)[0])
    # About a millionth stays free for rounding up; a proposal that falls there is refused.
    scale = int(2.0**62 * (1 - 2**-20) / (float(top.sum()) + 2 * per_tail * tail))
    tops = np.ceil(scale * top * (1 + margin)).astype(np.int64)
    sure = np.floor(scale * _bell(farthest, sigma) * (1 - margin)).astype(np.int64)
    tail_height = int(np.ceil(scale * tail * (1 + margin)))

    whole = sure >> FINE_BITS
    slots = np.zeros(SLOTS, dtype=np.int64)
    sure_slots = int(whole.sum())
    slots[:sure_slots] = np.repeat(starts, whole)
    floors = whole << FINE_BITS
    rests = np.concatenate([[0], tops - floors, [per_tail * tail_height] * 2])
    return Envelope(
        sigma=sigma,
        width_bits=width_bits,
        scale=scale,
        sure=sure_slots,
        slots=slots,
        starts=starts,
        floors=floors,
        edges=np.cumsum(rests, dtype=np.int64),
        tail_start=tail_start,
        tail_bits=tail_bits,
        tail_height=tail_height,
    )


_STEP = 64  # bits by which both intervals shrink at a time; one step nearly always decides


def exp_enclosure(numerator: int, denominator: int, bits: int) -> tuple[int, int]:
    """Return whole numbers low ≤ 2ᵇⁱᵗˢ·exp(−numerator/denominator) ≤ high, at most a few apart.

    x = numerator/denominator is halved until it is below 1, where the series Σ (−x)ʲ/j! alternates
    with falling terms, so that its rest is smaller than the last term; each term is an interval.
    Squaring undoes the halving. Every step rounds outwards.

    >>> low, high = exp_enclosure(1, 1, 64)
    >>> low <= 0x5E2D58D8B3BCDF1A <= high, high - low <= 2  # 2⁶⁴/e = 0x5E2D58D8B3BCDF1A.BADE…
    (True, True)
    """
    halvings = (numerator // denominator).bit_length()
    divisor = denominator << halvings
    work = bits + 2 * halvings + 16  # guard bits; the result is an enclosure with any number
    low = high = term_low = term_high = 1 << work
    order = 0
    while term_high > 0:
        order += 1
        term_low = term_low * numerator // (divisor * order)
        term_high = -(-term_high * numerator // (divisor * order))
        if order % 2:
            low, high = low - term_high, high - term_low
        else:
            low, high = low + term_low, high + term_high
        if term_high == 1:  # the rest of the series is at most this term
            low, high = low - 1, high + 1
            break
    low = max(low, 0)
    for _ in range(halvings):
        low, high = low * low >> work, -(-high * high >> work)
    return low >> work - bits, -(-high >> work - bits)


def is_below(
    start: int,
    width: int,
    factor: int,
    numerator: int,
    denominator: int,
    random_bits: Callable[[int], int],
) -> bool:
    """Decide whether start + width·U < factor·exp(−numerator/denominator), U uniform on [0, 1).

    `random_bits(k)` returns k fresh random bits as a whole number.

    >>> is_below(0, 1, 1, 1, 2, random_bits=lambda k: 0)  # U = 0.000…
    True
    >>> is_below(0, 1, 1, 1, 2, random_bits=lambda k: 2**k - 1)  # U = 0.111…
    False
    """
    uniform = bits = 0
    while True:
        uniform = uniform << _STEP | random_bits(_STEP)
        bits += _STEP
        low, high = exp_enclosure(numerator, denominator, bits)
        lower = (start << bits) + width * uniform
        if lower + width <= factor * low:
            return True
        if lower >= factor * high:
            return False


_CHUNK = 2**16  # values drawn at a time: 8 MB besides the result, however long it is
_ZEROS = memoryview(bytes(8 * _CHUNK))

Words = NDArray[np.uint64]


def draw(count: int, sigma: int) -> Integers:
    """Draw `count` independent integers from the discrete Gaussian of parameter σ, 1 ≤ σ ≤ 2⁵².

    >>> noise = draw(100_000, 2**33)
    >>> bool(abs(noise.std() / 2**33 - 1) < 0.02)  # fails by chance below 1e-17
    True
    """
    count = _check_whole_number("count", count, 0, 2**48, "it is the number of values")
    sigma = _check_whole_number("sigma", sigma, 1, LARGEST_NOISE, "count it in grid units")
    source, staircase = _Stream(), build_envelope(sigma)
    noise = np.empty(count, dtype=np.int64)
    for start in range(0, count, _CHUNK):
        piece = noise[start : start + _CHUNK]
        refused = _propose(piece, staircase, source)
        while refused.size:
            redrawn = np.empty(refused.size, dtype=np.int64)
            refused_again = _propose(redrawn, staircase, source)
            piece[refused] = redrawn
            refused = refused[refused_again]
    return noise


class _Stream:
    """The AES-256-CTR key stream of one call."""

    def __init__(self) -> None:
        cipher = Cipher(algorithms.AES(os.urandom(32)), modes.CTR(os.urandom(16)))
        self._encryptor = cipher.encryptor()

    def draw_words(self, count: int) -> Words:
        """Draw so many (at most 2¹⁶) random 64-bit words."""
        return np.frombuffer(self._encryptor.update(_ZEROS[: 8 * count]), dtype=np.uint64)

    def draw_bits(self, count: int) -> int:
        """Draw so many random bits as one whole number."""
        block = self._encryptor.update(bytes(-(-count // 8)))
        return int.from_bytes(block) >> -count % 8


def _propose(into: Integers, staircase: Envelope, source: _Stream) -> Integers:
    """Fill `into` with proposals, and return the indices of those that were refused.

    The top 16 bits of a word choose a slot and with it a bar, the low m bits an integer of the bar.
    """
    words = source.draw_words(into.size)
    slot = (words >> np.uint64(64 - SLOT_BITS)).view(np.int64)
    np.take(staircase.slots, slot, out=into, mode="clip")
    into += (words & np.uint64((1 << staircase.width_bits) - 1)).view(np.int64)
    open_places = np.flatnonzero(slot >= staircase.sure)
    if not open_places.size:
        return open_places
    values, accepted = _settle_proposals(
        slot[open_places] - staircase.sure, into[open_places], staircase, source
    )
    into[open_places] = values
    return open_places[~accepted]


def _settle_proposals(
    slot: Integers, within: Integers, staircase: Envelope, source: _Stream
) -> tuple[Integers, NDArray[np.bool_]]:
    """Return the values of proposals outside the sure slots, and which are accepted.

    `slot` and 46 more random bits are a position in the rests of the bars, and so choose a bar and
    a height; the value is accepted if that height (with fresh bits behind the point) is below the
    bell.
    """
    fine = (source.draw_words(slot.size) >> np.uint64(64 - FINE_BITS)).view(np.int64)
    position = (slot << FINE_BITS) + fine
    bar = np.searchsorted(staircase.edges, position, side="right") - 1
    bars = staircase.starts.size
    in_bars = bar < bars
    bar_or_last = np.minimum(bar, bars - 1)
    values = staircase.starts[bar_or_last] + within
    height = staircase.floors[bar_or_last] + (position - staircase.edges[bar_or_last])

    bell = staircase.bell(values)
    accepted = in_bars & (height + 1 <= bell * (1 - MARGIN))
    unsure = in_bars & ~accepted & (height < bell * (1 + MARGIN))
    for i in np.flatnonzero(unsure):
        exponent = int(values[i]) ** 2, 2 * staircase.sigma**2
        accepted[i] = is_below(int(height[i]), 1, staircase.scale, *exponent, source.draw_bits)
    for i in np.flatnonzero(~in_bars & (bar < bars + 2)):  # beyond the tails: refused
        values[i], accepted[i] = _propose_from_tail(bar[i] == bars, staircase, source)
    return values, accepted


def _propose_from_tail(right: bool, staircase: Envelope, source: _Stream) -> tuple[int, bool]:
    """Propose from a tail: block b with probability 2⁻¹⁻ᵇ, then an integer of the block."""
    block = 0
    while source.draw_bits(1):
        block += 1
    start = staircase.tail_start + (block << staircase.tail_bits)
    value = start + source.draw_bits(staircase.tail_bits)
    value = value if right else ~value
    factor, exponent = staircase.scale << block, (value**2, 2 * staircase.sigma**2)
    return value, is_below(0, staircase.tail_height, factor, *exponent, source.draw_bits)


def _check_whole_number(name: str, value: int, least: int, most: int, remedy: str) -> int:
    with suppress(TypeError):
        number = operator.index(value)
        if least <= number <= most and not isinstance(value, bool):
            return number
    raise InputError.of(name, value, f"a whole number from {least} to {most}", remedy)
