"""Gaussian noise that is safe to release: exact, on the integers, from the system's entropy.

`draw(count, sigma)` has the discrete Gaussian distribution

    P(y) = exp(−y²/2σ²) / Σ_k exp(−k²/2σ²),        y any integer,

to the last digit: there is no rounding, no cut tail and no hole (docs/proofs.md). Each value is
proposed from a staircase over the bell and accepted under it; where floating point cannot be sure
of that comparison (2 draws in 10¹²), whole-number arithmetic decides.

Every call takes a new AES-256 key and counter from the operating system, so that forked processes,
restored snapshots and retried messages never share noise. There is no seed.

The time a draw takes says nothing of the data, which it does not depend on: a step's noise is drawn
before that step touches them.
"""

from __future__ import annotations

import operator
import os

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from numpy.typing import NDArray

from sottovoce.errors import InputError
from sottovoce.privacy.noise.comparison import below
from sottovoce.privacy.noise.envelope import (
    FINE_BITS,
    MARGIN,
    SLOT_BITS,
    Envelope,
    Integers,
    envelope,
)

LARGEST_SIGMA = 2**52
_CHUNK = 2**16  # values drawn at a time: 8 MB beside the result, however long it is
_ZEROS = memoryview(bytes(8 * _CHUNK))

Words = NDArray[np.uint64]


def draw(count: int, sigma: int) -> Integers:
    """`count` independent integers from the discrete Gaussian of parameter σ, 1 ≤ σ ≤ 2⁵².

    >>> noise = draw(100_000, 2**33)
    >>> bool(abs(noise.std() / 2**33 - 1) < 0.02)  # false alarm: below 1e-17
    True
    """
    count = _whole("count", count, 0, 2**48, "it is the number of values")
    sigma = _whole("sigma", sigma, 1, LARGEST_SIGMA, "count it in grid units")
    source, staircase = _Stream(), envelope(sigma)
    noise = np.empty(count, dtype=np.int64)
    for start in range(0, count, _CHUNK):
        piece = noise[start : start + _CHUNK]
        refused = _propose(piece, staircase, source)
        while refused.size:
            again = np.empty(refused.size, dtype=np.int64)
            still = _propose(again, staircase, source)
            piece[refused] = again
            refused = refused[still]
    return noise


class _Stream:
    """The AES-256-CTR key stream of one call."""

    def __init__(self) -> None:
        cipher = Cipher(algorithms.AES(os.urandom(32)), modes.CTR(os.urandom(16)))
        self._encryptor = cipher.encryptor()

    def words(self, count: int) -> Words:
        """So many (at most 2¹⁶) random 64-bit words."""
        return np.frombuffer(self._encryptor.update(_ZEROS[: 8 * count]), dtype=np.uint64)

    def bits(self, count: int) -> int:
        """So many random bits as one whole number."""
        block = self._encryptor.update(bytes(-(-count // 8)))
        return int.from_bytes(block) >> -count % 8


def _propose(into: Integers, staircase: Envelope, source: _Stream) -> Integers:
    """One proposal for every place of `into`; the places whose proposal was refused.

    The top 16 bits of a word choose a slot and with it a bar, the low m bits an integer of the bar.
    """
    words = source.words(into.size)
    slot = (words >> np.uint64(64 - SLOT_BITS)).view(np.int64)
    np.take(staircase.slots, slot, out=into, mode="clip")
    into += (words & np.uint64((1 << staircase.width_bits) - 1)).view(np.int64)
    open_places = np.flatnonzero(slot >= staircase.sure)
    if not open_places.size:
        return open_places
    values, accepted = _settle(
        slot[open_places] - staircase.sure, into[open_places], staircase, source
    )
    into[open_places] = values
    return open_places[~accepted]


def _settle(
    slot: Integers, within: Integers, staircase: Envelope, source: _Stream
) -> tuple[Integers, NDArray[np.bool_]]:
    """Proposals outside the sure slots: their values, and which are accepted.

    `slot` and 46 more random bits are a place in what remains of the bars, and so a bar and a
    height; the value is accepted if that height (with fresh bits behind the point) is below the
    bell.
    """
    fine = (source.words(slot.size) >> np.uint64(64 - FINE_BITS)).view(np.int64)
    place = (slot << FINE_BITS) + fine
    bar = np.searchsorted(staircase.edges, place, side="right") - 1
    bars = staircase.starts.size
    in_bars = bar < bars
    bar_or_last = np.minimum(bar, bars - 1)
    values = staircase.starts[bar_or_last] + within
    height = staircase.floors[bar_or_last] + (place - staircase.edges[bar_or_last])

    bell = staircase.bell(values)
    accepted = in_bars & (height + 1 <= bell * (1 - MARGIN))
    unsure = in_bars & ~accepted & (height < bell * (1 + MARGIN))
    for i in np.flatnonzero(unsure):
        accepted[i] = _under_the_bell(int(height[i]), int(values[i]), staircase, source)
    for i in np.flatnonzero(~in_bars & (bar < bars + 2)):  # beyond the tails: refused
        values[i], accepted[i] = _tail(bar[i] == bars, staircase, source)
    return values, accepted


def _under_the_bell(height: int, value: int, staircase: Envelope, source: _Stream) -> bool:
    return below(height, 1, staircase.scale, value**2, 2 * staircase.sigma**2, source.bits)


def _tail(right: bool, staircase: Envelope, source: _Stream) -> tuple[int, bool]:
    """A proposal beyond the bars: block b with probability 2⁻¹⁻ᵇ, then an integer of the block."""
    block = 0
    while source.bits(1):
        block += 1
    value = staircase.tail_start + (block << staircase.tail_bits) + source.bits(staircase.tail_bits)
    value = value if right else ~value
    accepted = below(
        0,
        staircase.tail_height,
        staircase.scale << block,
        value**2,
        2 * staircase.sigma**2,
        source.bits,
    )
    return value, accepted


def _whole(name: str, value: int, least: int, most: int, remedy: str) -> int:
    if not isinstance(value, bool):
        try:
            number = operator.index(value)
        except TypeError:
            pass
        else:
            if least <= number <= most:
                return number
    raise InputError.of(name, value, f"a whole number from {least} to {most}", remedy)
