"""The floating-point support attack: which uploads are possible from which data at all?

A server that sees an upload and two candidate gradients asks of each whether *any* noise leads from
it to the upload. If from one only, the upload proves which it was, whatever ε says.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from sottovoce.noise.envelope import FINE_BITS, SLOT_BITS, Envelope


def float_normals() -> np.ndarray:
    """Every value `jax.random.normal` can take in float32, sorted: from 23 random bits, so 2²³."""
    low = np.nextafter(np.float32(-1), np.float32(0))
    unit = (jnp.arange(2**23, dtype=jnp.uint32) | 0x3F800000).view(jnp.float32) - 1
    uniform = jnp.maximum(low, unit * (np.float32(1) - low) + low)
    return np.sort(np.asarray(np.float32(np.sqrt(2)) * jax.lax.erf_inv(uniform)))


def float_possible(uploads: np.ndarray, value: np.float32, noises: np.ndarray) -> np.ndarray:
    """Whether some noise of this sorted list gives each upload in float32, v + noise."""
    at = np.searchsorted(noises, uploads.astype(np.float64) - float(value))
    possible = np.zeros(uploads.size, dtype=bool)
    for step in range(-8, 9):
        candidate = noises[np.clip(at + step, 0, noises.size - 1)]
        possible |= value + candidate == uploads
    return possible


class Script:
    """A source of randomness that says what it is told to; its late bits are zeros."""

    def __init__(self, *answers: np.ndarray) -> None:
        self._answers = list(answers)

    def words(self, count: int) -> Any:
        answer = self._answers.pop(0)
        assert answer.size == count
        return answer

    def bits(self, count: int) -> int:
        return 0


def secure_possible(needed: np.ndarray, staircase: Envelope, sampler: ModuleType) -> np.ndarray:
    """Whether the sampler can give each noise: random words that should lead to it are tried."""
    bar = (needed - staircase.starts[0]) >> staircase.width_bits
    within = (needed & ((1 << staircase.width_bits) - 1)).astype(np.uint64)
    slots_of_bar = staircase.floors[bar] >> FINE_BITS
    first_slot = np.searchsorted(staircase.slots[: staircase.sure], staircase.starts[bar])
    place = staircase.edges[bar]  # the lowest height of what remains of the bar
    slot = np.where(slots_of_bar > 0, first_slot, staircase.sure + (place >> FINE_BITS))
    words = (slot.astype(np.uint64) << np.uint64(64 - SLOT_BITS)) | within
    fine = (place & (2**FINE_BITS - 1)).astype(np.uint64) << np.uint64(64 - FINE_BITS)
    into = np.empty(needed.size, dtype=np.int64)
    refused = sampler._propose(into, staircase, Script(words, fine[slots_of_bar == 0]))
    reached = into == needed
    reached[refused] = False
    return reached
