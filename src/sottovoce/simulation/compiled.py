"""One round of a batch of runs, compiled: clipped step, averaged noise, evaluation.

A round is linear in the uploads, w^{t+1} = w − Σ_i p_i·(η/n_i)·Σ_m clip(g_m) + Σ_i p_i·n_i, so the
cohort's samples are one matrix in which every row carries c_i = p_i·η/n_i of its client, and the
averaged noise is one draw of standard deviation √(Σ p_i²σ_i²): equal in distribution to drawing
every client's noise, K times cheaper. Clients outside the cohort have p_i = 0; where `members`
names the cohort, their rows are not even looked at.

With several local steps (noise at each) the clients' models part ways, and the round goes through
the cohort client by client instead; memory stays that of two models and one client's rows.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any, Literal, NamedTuple, TypeAlias, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from numpy.typing import NDArray

from sottovoce.models.base import Inspected, JaxModel, Params
from sottovoce.models.clipping import clipped_sum, compute_losses, evaluate
from sottovoce.privacy.noise import simulated
from sottovoce.schedules import optimizer
from sottovoce.schedules.optimizer import StepInputs

# A round's orders as one array of bits: a transfer to an accelerator costs more than its bytes.


Shape = tuple[int, ...]


class Packing(NamedTuple):
    """How to read it: the tree's structure, and of each leaf its shape without runs and type."""

    structure: Any
    leaves: tuple[tuple[Shape, str], ...]


def pack(orders: Any) -> tuple[NDArray[np.uint32], Packing]:
    """A tree of arrays [runs, …] of four- or eight-byte numbers → [runs, words], how to read it.

    >>> words, layout = pack({"a": np.array([1.5], np.float32), "b": np.array([[7, 8]], np.uint32)})
    >>> jax.tree.map(lambda leaf: leaf.tolist(), unpack(jnp.asarray(words), layout))
    {'a': [1.5], 'b': [[7, 8]]}
    """
    leaves, structure = jax.tree.flatten(orders)
    leaves = [np.asarray(leaf, jax.dtypes.canonicalize_dtype(leaf.dtype)) for leaf in leaves]
    runs = len(leaves[0])
    words = [np.ascontiguousarray(leaf).view(np.uint32).reshape(runs, -1) for leaf in leaves]
    kinds = tuple((leaf.shape[1:], leaf.dtype.str) for leaf in leaves)
    return np.concatenate(words, axis=1), Packing(structure, kinds)


def unpack(words: Array, layout: Packing) -> Any:
    """The tree again, where JAX computes."""
    leaves, at = [], 0
    for shape, kind in layout.leaves:
        dtype = jnp.dtype(kind)
        whole = (words.shape[0], *shape) + (() if dtype.itemsize == 4 else (2,))
        size = math.prod(whole[1:])
        part = words[:, at : at + size].reshape(whole)
        leaves.append(jax.lax.bitcast_convert_type(part, dtype))
        at += size
    return jax.tree.unflatten(layout.structure, leaves)


Signal: TypeAlias = Literal["public", "clients", "raw"]


class StackedRows(NamedTuple):
    """The samples of one or several splits, stacked: a run names the split it uses."""

    x: Any  # [splits, n, features], or `Inspected` with the same leading axis
    y: Array  # [splits, n]
    owner: Array  # [splits, n]: the client a row belongs to
    samples: Array  # [splits, clients]: how many rows each client has
    valid_x: Array  # [splits, v, features]: the public validation set
    valid_y: Array  # [splits, v]


class Orders(NamedTuple):
    """What the hosts of the runs ask for in this round, one entry a run."""

    split: Any  # [runs] int32
    weight: Any  # [runs, clients] float32: p_i
    rate: Any  # [runs] float32: η
    clip: Any  # [runs] float32: C
    std: Any  # [runs] float32: √(Σ p_i²σ_i²), for one local step
    sigma: Any  # [runs, steps, clients] float32: σ_i, for several
    signal_std: Any  # [runs] float32: √(Σ p_i²σ_V,i²), for the signal `clients`
    bound: Any  # [runs] float32: B, for the signal `clients`
    key: Any  # [runs, 2] uint32: the two words of a key
    finish: StepInputs | None = None  # each [runs] float32; None where the server adds nothing
    # [runs, K] int32: every client with p_i > 0, each once, filled up with others; None: all rows.
    members: Any = None


class RoundResult(NamedTuple):
    """The new models and how good they are, one entry a run."""

    params: Params
    # [runs, 4]: validation loss and accuracy, signal, the loss of what could be handed out; one
    # piece, quick to fetch.
    score: Array
    memory: dict[str, Params] = {}  # noqa: RUF012  # never written to: what the server keeps


def play(
    model: JaxModel,
    rows: StackedRows,
    params: Params,
    orders: Orders,
    t: int,
    *,
    signal: Signal = "public",
    longest: int = 0,
    memory: dict[str, Params] | None = None,
) -> RoundResult:
    """Round t of every run. One compilation per model, number of runs and shape of the rows.

    `longest` is the largest number of rows any client has; it matters where the round goes client
    by client.
    `memory` is what the server keeps beside the newest model (`schedules.optimizer`).
    """
    now = np.full(len(orders.std), t, np.uint32)
    words, layout = pack((orders, now))
    options = {"signal": signal, "longest": longest, "layout": layout}
    return cast(RoundResult, _play(model, rows, params, memory or {}, words, **options))


@partial(jax.jit, static_argnums=0, static_argnames=("signal", "longest", "layout"))
def _play(
    model: JaxModel,
    rows: StackedRows,
    params: Params,
    memory: dict[str, Params],
    words: Array,
    *,
    signal: Signal,
    longest: int,
    layout: Packing,
) -> RoundResult:
    orders, now = unpack(words, layout)
    return traced(model, rows, params, memory, orders, now, signal=signal, longest=longest)


def traced(
    model: JaxModel,
    rows: StackedRows,
    params: Params,
    memory: dict[str, Params],
    orders: Orders,
    now: Array,
    *,
    signal: Signal,
    longest: int,
) -> RoundResult:
    """The round inside a compiled program: of this file, or of `accelerator`."""

    def one(params: Params, memory: dict[str, Params], order: Orders, t: Array) -> RoundResult:
        own: StackedRows = jax.tree.map(lambda part: _of(part, order.split), rows)
        key = jax.random.fold_in(jax.random.wrap_key_data(order.key), t)
        if order.sigma.shape[0] == 1:
            new = _one_step(model, own, params, order, key, longest)
        else:
            new = _several_steps(model, own, params, order, key, longest)
        if order.finish is not None:
            new, memory = finished(params, new, memory, order.finish)
        loss, accuracy = evaluate(model, new, own.valid_x, own.valid_y)
        heard = loss
        if signal == "raw":
            plain, is_clean = _plain(own.x)
            heard = evaluate(model, new, plain, own.y)[0]
            heard = jnp.where(jnp.all(is_clean), heard, jnp.nan)
        elif signal == "clients":
            heard = _told_by_clients(model, own, params, order, key)
        offered = loss
        if order.finish is not None and "best" in memory:
            if "average" in memory:
                offered = evaluate(model, memory["average"], own.valid_x, own.valid_y)[0]
            memory = keep_better(memory, new, offered < order.finish.best)
        return RoundResult(new, jnp.stack([loss, accuracy, heard, offered]), memory)

    if now.shape[0] > 1:
        return jax.vmap(one)(params, memory, orders, now)
    alone = one(*jax.tree.map(lambda part: part[0], (params, memory, orders, now)))
    return cast(RoundResult, jax.tree.map(lambda part: part[None], alone))


def finished(
    params: Params, averaged: Params, memory: dict[str, Params], numbers: StepInputs
) -> tuple[Params, dict[str, Params]]:
    """`optimizer.take_step` on trees of arrays."""
    kept: optimizer.Memory = {part: _flat(tree) for part, tree in memory.items()}
    new, kept = optimizer.take_step(numbers, kept, _flat(params), _flat(averaged))
    return _like(params, new), {part: _like(params, leaves) for part, leaves in kept.items()}


def keep_better(memory: dict[str, Params], new: Params, better: Array) -> dict[str, Params]:
    """`optimizer.keep_better` on trees of arrays."""
    kept: optimizer.Memory = {part: _flat(tree) for part, tree in memory.items()}
    kept = optimizer.keep_better(kept, _flat(new), better, jnp.where)
    return {part: _like(new, leaves) for part, leaves in kept.items()}


def _flat(tree: Params) -> dict[int, Array]:
    return dict(enumerate(jax.tree.leaves(tree)))


def _like(tree: Params, leaves: optimizer.Leaves) -> Params:
    return jax.tree.unflatten(jax.tree.structure(tree), list(leaves.values()))


def _plain(x: Any) -> tuple[Array, Array]:
    """Rows, and which of them are whole."""
    return (x.x, x.is_clean) if isinstance(x, Inspected) else (x, jnp.full(x.shape[0], True))


def _of(part: Array, split: Array) -> Array:
    # With one split there is nothing to choose, and no copy to make.
    return part[0] if part.shape[0] == 1 else part[split]


def _one_step(
    model: JaxModel, rows: StackedRows, params: Params, order: Orders, key: Array, longest: int
) -> Params:
    """w − Σ_i p_i·(η/n_i)·Σ_m clip(g_m) + one draw for all the clients' noise."""
    coefficient = order.weight * order.rate / rows.samples
    if order.members is None:
        step = clipped_sum(model, params, rows.x, rows.y, coefficient[rows.owner], order.clip)
    else:

        def client(total: Params, i: Array) -> tuple[Params, None]:
            x, y, mine = _window(rows, i, longest)
            weight = jnp.where(mine, coefficient[i], 0)
            own = clipped_sum(model, params, x, y, weight, order.clip)
            return jax.tree.map(jnp.add, total, own), None

        step = jax.lax.scan(client, jax.tree.map(jnp.zeros_like, params), order.members)[0]
    noise = simulated.draw(key, params, order.std)
    return jax.tree.map(lambda w, g, z: w - g + z, params, step, noise)


def _window(rows: StackedRows, i: Array, longest: int) -> tuple[Any, Array, Array]:
    """`longest` rows with those of client i among them, their labels, and which of them are its."""
    first = (jnp.cumsum(rows.samples) - rows.samples)[i]
    # The window may end beyond the data: it is moved back, and rows of others weigh nothing.
    start = jnp.minimum(first.astype(int), rows.y.shape[0] - longest)
    x, y = jax.tree.map(
        lambda part: jax.lax.dynamic_slice_in_dim(part, start, longest), (rows.x, rows.y)
    )
    place = start + jnp.arange(longest)
    return x, y, (place >= first) & (place < first + rows.samples[i])


def _several_steps(
    model: JaxModel, rows: StackedRows, params: Params, order: Orders, key: Array, longest: int
) -> Params:
    """Σ_i p_i·w_i, where each client takes its steps from w with noise at every one of them."""
    steps, clients = order.sigma.shape

    def client(total: Params, i: Array) -> tuple[Params, None]:
        x, y, mine = _window(rows, i, longest)
        weight = jnp.where(mine, order.rate / rows.samples[i], 0)

        def step(e: Array, w: Params) -> Params:
            moved = clipped_sum(model, w, x, y, weight, order.clip)
            noise = simulated.draw(jax.random.fold_in(key, e * clients + i), w, order.sigma[e, i])
            return jax.tree.map(lambda w, g, z: w - g + z, w, moved, noise)

        final = jax.lax.fori_loop(0, steps, step, params)
        p = order.weight[i]
        return jax.tree.map(lambda s, w: s + jnp.where(p > 0, p * w, 0), total, final), None

    zero = jax.tree.map(jnp.zeros_like, params)
    members = jnp.arange(clients) if order.members is None else order.members
    return jax.lax.scan(client, zero, members)[0]


def _told_by_clients(
    model: JaxModel, rows: StackedRows, params: Params, order: Orders, key: Array
) -> Array:
    """Σ_i p_i·(mean of client i's losses, each cut to [0, B], of the model received) + noise."""
    plain, is_clean = _plain(rows.x)
    told = jnp.where(is_clean, compute_losses(model, params, plain, rows.y), jnp.inf)
    told = jnp.clip(jnp.nan_to_num(told, nan=jnp.inf, posinf=jnp.inf), 0, order.bound)
    mean = jnp.sum((order.weight / rows.samples)[rows.owner] * told)
    noise = jax.random.normal(jax.random.fold_in(key, np.uint32(2**32 - 1)), (), mean.dtype)
    return cast(Array, mean + order.signal_std * noise)


def compilations() -> int:
    """How many versions of the single round have been compiled in this process."""
    size: Any = _play._cache_size  # type: ignore[attr-defined]
    return int(size())
