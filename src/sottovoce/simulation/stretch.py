"""Several rounds in one launch: a host that asks an accelerator for each round waits for it.

A launch costs the host about as much as an accelerator needs for the round of a small model. So
the orders of the next rounds go there together, and a loop on the accelerator plays them. How many
they are is a number like the others: one compilation serves stretches of every length. Each
round's models and score are kept, one beside the other, so that a run may go on from any of them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple, TypeAlias, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from numpy.typing import NDArray

from sottovoce.models.base import Model, Params
from sottovoce.simulation.packed import Layout, unpack
from sottovoce.simulation.round import Outcome, Rows, Signal, traced

Words: TypeAlias = NDArray[np.uint32]


class Place(NamedTuple):
    """A round of a stretch that was played: where the next one starts."""

    stack: Outcome  # every leaf is [rounds, runs, …]; beyond the last round played it is zero
    at: int


Launch: TypeAlias = Callable[[Place, Words, int], Outcome]


def first(params: Params, memory: dict[str, Params], rounds: int) -> Place:
    """Models [runs, …] as the place where a run's first stretch starts."""
    params, memory, score = _repeated(params, memory, rounds)
    return Place(Outcome(params, score, memory), 0)


@partial(jax.jit, static_argnums=2)
def _repeated(
    params: Params, memory: dict[str, Params], rounds: int
) -> tuple[Params, dict[str, Params], Array]:
    params, memory = jax.tree.map(
        lambda leaf: jnp.broadcast_to(leaf, (rounds, *leaf.shape)), (params, memory)
    )
    return params, memory, jnp.zeros((rounds, *jax.tree.leaves(params)[0].shape[1:2], 4))


def program(
    model: Model,
    rows: Rows,
    start: Place,
    words: Words,
    layout: Layout,
    *,
    signal: Signal = "public",
    longest: int = 0,
) -> Launch:
    """(where to start, `words` of some rounds, how many they are) → their outcome, compiled now.

    `words` are the packed orders of each round, [rounds, runs, …]. It is compiled here, where the
    settings of JAX are the caller's, and may be called from any thread.
    """
    options = {"signal": signal, "longest": longest, "layout": layout}
    stack, where = start.stack, np.zeros(2, np.int32)
    lowered = _stretch.lower(model, rows, stack.params, stack.memory, words, where, **options)
    compiled = lowered.compile()  # JAX remembers it: the next run finds it made

    def launch(start: Place, words: Words, count: int) -> Outcome:
        stack, where = start.stack, np.array([start.at, count], np.int32)
        made: Outcome = compiled(rows, stack.params, stack.memory, words, where)
        made.score.copy_to_host_async()  # it is on its way before it is asked for
        return made

    return launch


@partial(jax.jit, static_argnums=0, static_argnames=("signal", "longest", "layout"))
def _stretch(
    model: Model,
    rows: Rows,
    params: Params,
    memory: dict[str, Params],
    words: Array,
    where: Array,
    *,
    signal: Signal,
    longest: int,
    layout: Layout,
) -> Outcome:
    _VERSIONS.append(model)
    start, count = where
    before = Outcome(params, jnp.zeros((*words.shape[:2], 4)), memory)

    def step(k: Array, carried: tuple[Outcome, Outcome]) -> tuple[Outcome, Outcome]:
        last, stack = carried
        orders, now = unpack(_round(words, k), layout)
        new = traced(
            model, rows, last.params, last.memory, orders, now, signal=signal, longest=longest
        )
        return new, jax.tree.map(
            lambda kept, leaf: jax.lax.dynamic_update_index_in_dim(kept, leaf, k, 0), stack, new
        )

    last: Outcome = jax.tree.map(lambda leaf: _round(leaf, start), before)
    stack: Outcome = jax.tree.map(jnp.zeros_like, before)
    _, played = jax.lax.fori_loop(0, count, step, (last, stack))
    return cast(Outcome, played)


def _round(leaf: Array, k: Array) -> Array:
    return cast(Array, jax.lax.dynamic_index_in_dim(leaf, k, keepdims=False))


def versions() -> int:
    """How many versions of a stretch have been compiled in this process."""
    return len(_VERSIONS)


_VERSIONS: list[Model] = []  # one each: JAX itself counts only what it called
