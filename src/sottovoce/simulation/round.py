"""One round of a batch of runs, compiled: clipped step, averaged noise, evaluation.

A round is linear in the uploads, w^{t+1} = w − Σ_i p_i·(η/n_i)·Σ_m clip(g_m) + Σ_i p_i·n_i, so the
cohort's samples are one matrix in which every row carries c_i = p_i·η/n_i of its client, and the
averaged noise is one draw of standard deviation √(Σ p_i²σ_i²): equal in distribution to drawing
every client's noise, K times cheaper. Clients outside the cohort have c_i = 0.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from sottovoce.learning.clipping import clipped_sum
from sottovoce.learning.evaluate import evaluate
from sottovoce.learning.models import Model, Params
from sottovoce.noise import simulated


class Rows(NamedTuple):
    """The samples of one or several splits, stacked: a run names the split it uses."""

    x: Array  # [splits, n, features]
    y: Array  # [splits, n]
    owner: Array  # [splits, n]: the client a row belongs to
    steer_x: Array  # [splits, v, features]: the rows whose loss steers
    steer_y: Array  # [splits, v]


class Orders(NamedTuple):
    """What the hosts of the runs ask for in this round, one entry a run."""

    split: Any  # [runs] int32
    coefficient: Any  # [runs, clients] float32: p_i·η/n_i
    clip: Any  # [runs] float32
    std: Any  # [runs] float32: √(Σ p_i²σ_i²)
    key: Any  # [runs, 2] uint32: the two words of a key


class Outcome(NamedTuple):
    """The new models and how good they are, one entry a run."""

    params: Params
    score: Array  # [runs, 2]: loss and accuracy, in one piece because fetching is what takes time


def play(model: Model, rows: Rows, params: Params, orders: Orders, t: int) -> Outcome:
    """Round t of every run. One compilation per model, number of runs and shape of the rows."""
    return cast(Outcome, _play(model, rows, params, orders, np.uint32(t)))


@partial(jax.jit, static_argnums=0)
def _play(model: Model, rows: Rows, params: Params, orders: Orders, t: Array) -> Outcome:
    def one(params: Params, order: Orders) -> Outcome:
        x, y, owner, steer_x, steer_y = (_of(part, order.split) for part in rows)
        step = clipped_sum(model, params, x, y, order.coefficient[owner], order.clip)
        key = jax.random.fold_in(jax.random.wrap_key_data(order.key), t)
        noise = simulated.draw(key, params, order.std)
        new = jax.tree.map(lambda w, g, z: w - g + z, params, step, noise)
        return Outcome(new, jnp.stack(evaluate(model, new, steer_x, steer_y)))

    if orders.std.shape[0] > 1:
        return jax.vmap(one)(params, orders)
    alone = one(*jax.tree.map(lambda part: part[0], (params, orders)))
    return cast(Outcome, jax.tree.map(lambda part: part[None], alone))


def _of(part: Array, split: Array) -> Array:
    # With one split there is nothing to choose, and no copy to make.
    return part[0] if part.shape[0] == 1 else part[split]


def compilations() -> int:
    """How many versions of the round have been compiled in this process."""
    size: Any = _play._cache_size  # type: ignore[attr-defined]
    return int(size())
