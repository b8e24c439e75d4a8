"""The floating-point support attack: which uploads are possible from which data at all?

A server that sees an upload and two candidate gradients asks of each whether *any* noise leads from
it to the upload. If from one only, the upload proves which it was, whatever ε says.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any
from unittest import mock

import numpy as np

from sottovoce.client.release import Price
from sottovoce.models import base
from sottovoce.privacy import grid, secure_noise
from sottovoce.privacy.secure_noise import FINE_BITS, SLOT_BITS, Envelope
from sottovoce.privacy.sensitivity import Recipe


def float_normals() -> np.ndarray:
    """Every value `jax.random.normal` can take in float32, sorted: from 23 random bits, so 2²³."""
    import jax  # the attack on uploads runs on machines and in processes without it
    import jax.numpy as jnp

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

    def draw_words(self, count: int) -> Any:
        answer = self._answers.pop(0)
        assert answer.size == count
        return answer

    def draw_bits(self, count: int) -> int:
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


def unit_of_uploads(recipe: Recipe, samples: int) -> float:
    """By how much an upload moves for one unit of the grid: (η/n)·C/((1 − 2⁻⁴⁰)·2³⁰)."""
    return recipe.learning_rate / samples * (recipe.clip / ((1 - 2**-40) * 2**30))


def upload_possible(
    uploads: np.ndarray, start: np.ndarray, unit: float, *, slack: float = 0.0
) -> np.ndarray:
    """Whether each uploaded value is float32(w − unit·k) for some whole k.

    Those are the values that every data set can lead to; another value rules out all data sets but
    some. `slack` is what float64 may have rounded away before: with several steps their sum is off
    the grid by a few 2⁻⁵³ of the largest model in between. Values that are large beside
    2²⁴ units prove nothing: float32 is coarser than the grid there.
    """
    possible = np.zeros(uploads.shape, dtype=bool)
    nearest = np.rint((start - uploads.astype(np.float64)) / unit)
    for step in range(-2, 3):
        point = start - unit * (nearest + step)
        low, high = (point - slack).astype(np.float32), (point + slack).astype(np.float32)
        possible |= (low <= uploads) & (uploads <= high)
    return possible


def flat(arrays: Any) -> np.ndarray:
    """All parameters in the order of their names."""
    return np.concatenate([np.asarray(arrays[name]).reshape(-1) for name in sorted(arrays)])


def attack_upload(
    client: ModuleType,
    form: Any,
    start: dict[str, np.ndarray],
    x: np.ndarray,
    y: np.ndarray,
    recipe: Recipe,
    own: Any = None,
) -> np.ndarray:
    """Which values of one upload every data set can lead to, where the attack is strongest.

    The noise is as large as any, and chosen so that the last step ends near zero, where float32 is
    finer than the grid and every value tells whether it lies on it.
    """
    rng, noise = np.random.default_rng(0), []
    unit, count = unit_of_uploads(recipe, len(y)), sum(leaf.size for leaf in start.values())
    now, largest = {name: np.asarray(start[name], np.float64) for name in sorted(start)}, 0.0
    for step in range(recipe.steps):
        blocks = base.gradient_blocks(form, now, x, y, own)
        total = grid.clipped_sum(blocks, recipe.clip, count)
        drawn = np.rint(rng.normal(size=count) * 2**31).astype(np.int64)
        if step == recipe.steps - 1:
            small = rng.integers(-(2**18), 2**18, count)
            drawn = np.rint(flat(now) / unit).astype(np.int64) - total + small
        noise.append(drawn)
        moved = flat(now) - unit * (total + drawn)
        largest, at = max(largest, float(np.abs(moved).max())), 0
        for name, leaf in now.items():
            now[name] = moved[at : at + leaf.size].reshape(leaf.shape)
            at += leaf.size
    paid = Price((1,) * recipe.steps, (2**31,) * recipe.steps)
    with mock.patch.object(secure_noise, "draw", side_effect=noise):
        upload = client.release(
            form, start, x, y, recipe=recipe, paid=paid, head={"kind": "upload"}, own=own
        )
    slack = 0.0 if recipe.steps == 1 else recipe.steps * 2.0**-51 * largest
    return upload_possible(flat(upload.params), flat(start).astype(np.float64), unit, slack=slack)
