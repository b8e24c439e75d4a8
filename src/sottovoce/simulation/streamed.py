"""A round over rows that do not fit in memory: block by block, each read while one is computed.

The round of `compiled` is a sum over rows, Σ_m c_i·clip(g_m) with c_i = p_i·η/n_i of the row's
client, so it may be taken in blocks: the same compiled sum for each, added to one that is carried
along in place. Memory is that of two blocks and two models, however many rows there are, and rows
of clients outside the cohort are not even read. Noise, optimiser and evaluation are the same.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple, TypeAlias, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from numpy.typing import NDArray

from sottovoce.data.federated import Holdings
from sottovoce.data.streaming import is_stored
from sottovoce.models.base import JaxModel, Params
from sottovoce.models.clipping import clipped_sum, compute_losses, evaluate
from sottovoce.privacy import seeds
from sottovoce.privacy.gaussian import Floats
from sottovoce.privacy.noise import simulated
from sottovoce.privacy.seeds import Purpose
from sottovoce.schedules.optimizer import StepInputs
from sottovoce.server import rounds
from sottovoce.server.federation import Federation, put_on_device
from sottovoce.simulation import interrupts
from sottovoce.simulation.compiled import finished, keep_better
from sottovoce.simulation.table import BatchRun, stack_numbers

BLOCK_BYTES = 64 << 20  # of float32 rows in a block
# Which rows, and what each of them weighs.
Place: TypeAlias = tuple[slice | NDArray[np.int64], NDArray[np.float32]]


class Block(NamedTuple):
    """A block of rows where JAX computes; every block has the same shape."""

    x: Any  # [rows, features] float32
    y: Any  # [rows] int32
    weight: Any  # [rows] float32: c_i of the row's client, 0 beyond the last row


def is_streamed(held: Holdings) -> bool:
    """Whether the clients' rows are left where they are."""
    return is_stored(held.train.x)


class Streamed:
    """The engine of one run whose rows are streamed."""

    def __init__(self, run: BatchRun) -> None:
        self.run = run
        self.valid = put_on_device(run.federation.held.validation)
        self.key = seeds.make_key_words(run.seed, Purpose.NOISE)

    def prepare_rounds(self, live: Sequence[int]) -> rounds.RoundsByRun:
        """The next round, paid for, or nothing when the run is over."""
        paid = rounds.prepare_round(self.run.federation, self.run.state, self.run.seed)
        return {} if paid is None else {0: paid}

    def begin_rounds(self, asks: rounds.RoundsByRun) -> bool:
        """Nothing goes on beside the host: it reads the rows."""
        return False

    def end_rounds(self, asks: rounds.RoundsByRun) -> list[tuple[int, rounds.PlayedRound]]:
        """Compute the round, block by block."""
        run, paid = self.run, asks[0]
        federation, model = run.federation, cast(JaxModel, run.federation.model)
        if not paid.uploads.any():
            return [(0, rounds.PlayedRound(paid, math.nan, math.nan, math.nan, math.nan, ()))]
        # JAX's arrays from the first round on: numpy's would be compiled for once more.
        params, memory = jax.tree.map(jnp.asarray, (run.params, run.memory))
        step, told = total(federation, params, paid.weight)
        own = stack_numbers([federation.finish], [run.state.marks], [paid.turn])
        alone = None if own is None else StepInputs(*(part[0] for part in own))
        noise: Any = (self.key, np.uint32(paid.turn.t), np.float32(paid.std))
        new, memory, said = _close(model, params, memory, step, noise, alone, *self.valid)
        loss, accuracy, offered = np.asarray(said).tolist()
        signal = loss
        if federation.plan.server.signal == "clients":
            signal = _heard(told, noise[0], noise[1], paid.signal_std)
        models = (_stacked(new), 0, {part: _stacked(tree) for part, tree in memory.items()})
        return [(0, rounds.PlayedRound(paid, loss, accuracy, signal, offered, models))]


def _stacked(tree: Params) -> Params:
    return jax.tree.map(lambda leaf: leaf[None], tree)


def total(federation: Federation, params: Params, weight: Floats) -> tuple[Params, Array]:
    """Σ_i p_i·(η/n_i)·Σ_m clip(g_m), and Σ_i p_i·(mean loss of client i), over all blocks.

    The losses are taken, each cut to [0, B], only where clients tell theirs; else it is 0.
    """
    plan, model = federation.plan, cast(JaxModel, federation.model)
    rate = plan.local.learning_rate
    coefficient = weight * rate / federation.samples
    told = plan.server.signal == "clients"
    clip, bound = np.float32(federation.recipe.clip), np.float32(plan.server.loss_bound or 0.0)
    carried: Any = jax.tree.map(jnp.zeros_like, params), jnp.zeros(())
    # Read into one while the other is computed on; kept from round to round they were slower.
    free, filled = _buffer(federation), _buffer(federation)
    places = stretches(federation.samples, coefficient, len(free.y))
    with ThreadPoolExecutor(1) as reader:
        waiting = [reader.submit(_fill, federation.held, free, next(places))]
        while waiting:
            block = waiting.pop().result()
            _await(carried)  # only now may the other buffer be written to
            free, filled = filled, free
            if (place := next(places, None)) is not None:
                waiting.append(reader.submit(_fill, federation.held, free, place))
            carried = add(model, carried, params, block, clip, bound, told=told)
            interrupts.check()
        _await(carried)
    step, heard = carried
    return step, heard / rate


def _await(carried: Any) -> None:
    jax.block_until_ready(carried)  # type: ignore[no-untyped-call]


@partial(jax.jit, static_argnums=0, static_argnames="told", donate_argnums=1)
def add(
    model: JaxModel,
    carried: tuple[Params, Array],
    params: Params,
    block: Block,
    clip: Array,
    bound: Array,
    *,
    told: bool,
) -> tuple[Params, Array]:
    """What is carried along, and this block: one compilation a run."""
    summed, heard = carried
    step = clipped_sum(model, params, block.x, block.y, block.weight, clip)
    if told:
        each = compute_losses(model, params, block.x, block.y)
        each = jnp.clip(jnp.nan_to_num(each, nan=jnp.inf, posinf=jnp.inf), 0, bound)
        heard += jnp.sum(jnp.where(block.weight > 0, block.weight * each, 0))
    return jax.tree.map(jnp.add, summed, step), heard


@partial(jax.jit, static_argnums=0)
def _close(
    model: JaxModel,
    params: Params,
    memory: dict[str, Params],
    step: Params,
    noise: tuple[Array, Array, Array],
    own: StepInputs | None,
    valid_x: Array,
    valid_y: Array,
) -> tuple[Params, dict[str, Params], Array]:
    """The rest of a round: noise, what the server adds, and loss, accuracy, loss of what is kept.

    The same key and draw as in `compiled`, so that a streamed run has the noise of the other.
    """
    words, t, std = noise
    drawn = simulated.draw(jax.random.fold_in(jax.random.wrap_key_data(words), t), params, std)
    new = jax.tree.map(lambda w, g, z: w - g + z, params, step, drawn)
    if own is not None:
        new, memory = finished(params, new, memory, own)
    loss, accuracy = evaluate(model, new, valid_x, valid_y)
    offered = loss
    if own is not None and "best" in memory:
        if "average" in memory:
            offered = evaluate(model, memory["average"], valid_x, valid_y)[0]
        memory = keep_better(memory, new, offered < own.best)
    return new, memory, jnp.stack([loss, accuracy, offered])


def _heard(told: Array, words: Any, t: Any, std: float) -> float:
    key = jax.random.fold_in(jax.random.wrap_key_data(jnp.asarray(words)), t)
    noise = jax.random.normal(jax.random.fold_in(key, np.uint32(2**32 - 1)), (), jnp.float32)
    return float(told) + std * float(noise)


def block_rows(federation: Federation) -> int:
    """Rows of a block: at most `BLOCK_BYTES` of them, even parts of the largest cohort's rows.

    A last block that is not full costs as much as a full one, so there is none.
    """
    numbers_a_row = int(federation.held.train.x.shape[1])
    cohort = np.sort(federation.samples)[-federation.terms.per_round :]
    most = int(cohort.sum())
    blocks = -(-most // max(1, BLOCK_BYTES // (4 * numbers_a_row)))
    return -(-most // blocks)


def stretches(samples: NDArray[np.int64], coefficient: Floats, rows: int) -> Iterator[Place]:
    """The rows of the clients that count, in blocks of `rows`: where they are, and what they weigh.

    >>> where = stretches(np.array([2, 2, 3]), np.array([0.5, 0.0, 0.25]), 3)
    >>> [(np.arange(7)[w].tolist(), c.tolist()) for w, c in where]
    [([0, 1, 4], [0.5, 0.5, 0.25]), ([5, 6], [0.25, 0.25])]
    """
    present = np.flatnonzero(coefficient)
    first = (np.cumsum(samples) - samples)[present]
    count, weight = samples[present], coefficient[present].astype(np.float32)
    end = np.cumsum(count)
    shift = first - (end - count)  # from a place among the rows that count to one among all
    for low in range(0, int(end[-1]), rows):
        high = min(low + rows, int(end[-1]))
        a, b = np.searchsorted(end, low, "right"), np.searchsorted(end, high, "left") + 1
        # Of the first and the last client of the block perhaps only a part.
        own = np.minimum(end[a:b], high) - np.maximum(end[a:b] - count[a:b], low)
        moved = shift[a:b]
        where: slice | NDArray[np.int64] = slice(low + int(moved[0]), high + int(moved[0]))
        if moved[0] != moved[-1]:  # somebody in between is left out
            where = np.arange(low, high) + np.repeat(moved, own)
        yield where, np.repeat(weight[a:b], own)


def _buffer(federation: Federation) -> Block:
    rows, features = block_rows(federation), int(federation.held.train.x.shape[1])
    return Block(
        _aligned((rows, features), np.float32),
        _aligned((rows,), np.int32),
        _aligned((rows,), np.float32),
    )


def _aligned(shape: tuple[int, ...], dtype: Any) -> NDArray[Any]:
    """Zeros where a CPU computes on them in place: XLA copies what does not begin at 64 bytes."""
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    raw = np.zeros(size + 64, np.uint8)
    skip = -raw.ctypes.data % 64
    aligned: NDArray[Any] = raw[skip : skip + size].view(dtype).reshape(shape)
    return aligned


def _fill(held: Holdings, buffer: Block, place: Place) -> Block:
    """Read the rows into the buffer and bring it to where JAX computes; runs in a thread."""
    where, weight = place
    count = len(weight)
    train: Any = held.train
    train.x.read_rows(where, buffer.x[:count])
    train.y.read_rows(where, buffer.y[:count])
    buffer.weight[:count], buffer.weight[count:] = weight, 0
    return Block(*jax.device_put(tuple(buffer), may_alias=True))
