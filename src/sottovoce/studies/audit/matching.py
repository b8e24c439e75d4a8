"""Several samples found by matching gradients: pictures whose gradients add up to what came.

The server looks for x that minimise 1 − cos(Σ clip(g(x, y)), told) with Adam from several random
starts, all at once (Zhu et al. 2019, Geiping et al. 2020; the code is our own). Labels are read off
the last bias first. Without noise a handful of small pictures is found; the more noise, the less.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from sottovoce.client.release import Parameters
from sottovoce.models.base import Mlp, Params
from sottovoce.models.form import Form
from sottovoce.privacy.sensitivity import Recipe
from sottovoce.studies.audit.inversion import Reconstructions
from sottovoce.studies.audit.similarity import recognised
from sottovoce.studies.audit.uploads import Labels, Level, Rows, Victim

Floats = NDArray[np.float64]


def labels(gradient: Parameters, count: int, shares: Floats) -> NDArray[np.int64]:
    """So many labels, greedily: each takes its share out of where the last bias was pulled up.

    >>> labels({"b2": np.array([-1.9, 0.6, -0.6])}, 3, np.full(3, 0.95)).tolist()
    [0, 0, 2]
    """
    pulled, found = np.array(gradient["b2"], dtype=np.float64), []
    for _ in range(count):
        found.append(int(np.argmin(pulled)))
        pulled[found[-1]] += shares[found[-1]]
    return np.array(sorted(found))


def match(
    model: Mlp,
    params: Parameters,
    told: Parameters,
    y: NDArray[np.int64],
    clip: float,
    *,
    seed: int,
    steps: int,
    starts: int = 4,
) -> Floats:
    """The samples with these labels whose clipped gradients fit best what was told."""
    tree = {name: jnp.asarray(leaf, jnp.float32) for name, leaf in params.items()}
    goal = {name: jnp.asarray(leaf, jnp.float32) for name, leaf in told.items()}
    keys = jax.random.split(jax.random.key(seed), starts)
    found, misfit = _search(model, steps, tree, goal, jnp.asarray(y), clip, keys)
    return np.asarray(found[int(np.argmin(np.asarray(misfit)))], dtype=np.float64)


def _misfit(
    model: Mlp, params: Params, goal: Params, clip: float, x: jax.Array, y: jax.Array
) -> Any:
    def one(row: jax.Array, label: jax.Array) -> Params:
        own = jax.grad(lambda p: model.loss(p, row[None], label[None])[0])(params)
        norm = jnp.sqrt(sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(own)) + 1e-20)
        return jax.tree.map(lambda leaf: leaf / jnp.maximum(1.0, norm / clip), own)

    total = jax.tree.map(lambda leaf: leaf.sum(axis=0), jax.vmap(one)(x, y))
    pairs = list(zip(jax.tree.leaves(total), jax.tree.leaves(goal), strict=True))
    inner = sum(jnp.sum(a * b) for a, b in pairs)
    sizes = [jnp.sqrt(sum(jnp.sum(pair[i] ** 2) for pair in pairs) + 1e-20) for i in (0, 1)]
    return 1 - inner / (sizes[0] * sizes[1])


@partial(jax.jit, static_argnums=(0, 1))
def _search(
    model: Mlp,
    steps: int,
    params: Params,
    goal: Params,
    y: jax.Array,
    clip: float,
    keys: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    slope = jax.value_and_grad(lambda x: _misfit(model, params, goal, clip, jax.nn.sigmoid(x), y))

    def from_one(key: jax.Array) -> tuple[jax.Array, jax.Array]:
        start = jax.random.normal(key, (y.shape[0], model.features))

        def step(i: jax.Array, state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            x, mean, square, _ = state
            value, g = slope(x)
            mean, square = 0.9 * mean + 0.1 * g, 0.999 * square + 0.001 * g**2
            t = i + 1.0
            rate = 0.1 * 0.5 * (1 + jnp.cos(jnp.pi * i / steps))
            move = (mean / (1 - 0.9**t)) / (jnp.sqrt(square / (1 - 0.999**t)) + 1e-12)
            return x - rate * move, mean, square, value

        zero = jnp.zeros_like(start)
        x, _, _, value = jax.lax.fori_loop(0, steps, step, (start, zero, zero, jnp.inf))
        return jax.nn.sigmoid(x), value

    return jax.vmap(from_one)(keys)


def attack(
    level: Level, recipe: Recipe, form: Form, params: Parameters, pool: Rows, y: Labels,
    own: NDArray[np.int64], *, seed: int, steps: int,
) -> Reconstructions:  # fmt: skip
    """The samples `own` of the pool from one upload, each beside the find that it is most like.

    An original is recognised if one of the finds resembles it more than any other of the pool. The
    first of `own` is judged. Given the others it is equally likely to be any of the rest of the
    pool, and a server that names k is right in Φ(Φ⁻¹(k/rest) + μ) at most.
    """
    victim, count = Victim(form, recipe, pool[own], y[own]), len(own)
    told = victim.gradient(level, params)
    model = Mlp(form.features, form.hidden, form.classes)
    guessed = labels(told, count, np.full(form.classes, _share(told)))
    found = match(model, params, told, guessed, victim.recipe.clip, seed=seed, steps=steps)
    named = recognised(found, pool)
    shown = found[recognised(victim.x, found)]
    left, hits = list(guessed), np.zeros(count, dtype=bool)
    for i, label in enumerate(victim.y):
        if int(label) in left:
            left.remove(int(label))
            hits[i] = True
    names, judged = np.isin(own, named), np.arange(count) == 0
    rest = len(pool) - count + 1
    return Reconstructions(level, victim.x, victim.y, shown, names, hits, judged, rest, count)


def joined(each: Sequence[Reconstructions]) -> Reconstructions:
    """Reconstructions of several clients as one."""
    parts = ("originals", "truth", "found", "names", "labels", "judged")
    whole: dict[str, Any] = {
        part: np.concatenate([getattr(one, part) for one in each]) for part in parts
    }
    return replace(each[0], **whole)


def _share(told: Parameters) -> float:
    """How far one label pulls: the bias moves sum to zero, so what is below it is all of them."""
    pulled = np.asarray(told["b2"])
    return float(max(-pulled.min() / 2, 1e-12))


def fits(rows: Rows) -> bool:
    """Whether samples are pictures with pixels from 0 to 1, as the search assumes.

    >>> fits(np.array([[0.0, 1.0]])), fits(np.array([[-3.0, 1.0]]))
    (True, False)
    """
    return bool(np.min(rows) >= 0 and np.max(rows) <= 1)
