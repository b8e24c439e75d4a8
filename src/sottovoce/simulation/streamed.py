"""Engines of one run that go through its rows block by block: streamed, or summed by the model.

`AveragingEngine`, which `secure` is too, prices a round, asks `average` for the mean upload,
and applies the server's optimiser. `SummingEngine` simulates a model that is not JAX's, such as a
PyTorch module, from clipped sums that the model computes itself.

`StreamedEngine` is for rows that do not fit in memory: a block is read while another is computed.
The round of `compiled` is a sum over rows, Σ_m c_i·clip(g_m) with c_i = p_i·η/n_i of the row's
client, so it can be computed block by block, with one compiled program and one running sum. Memory
is that of two blocks and two models, however many rows there are, and rows of clients outside the
cohort are not read. Noise, optimiser and evaluation are those of `compiled`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple, TypeAlias, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.flatten_util import ravel_pytree
from jax.sharding import Mesh, NamedSharding
from numpy.typing import NDArray

from sottovoce.data.federated import Holdings
from sottovoce.models.base import JaxModel, Params
from sottovoce.models.clipping import clipped_sum, compute_losses
from sottovoce.privacy import seeds
from sottovoce.privacy.gaussian import Floats
from sottovoce.privacy.seeds import Purpose
from sottovoce.schedules.optimizer import StepInputs
from sottovoce.server import rounds
from sottovoce.server.federation import Federation, judge_model, put_on_device, score_model
from sottovoce.server.rounds import PreparedRound, apply_optimizer, check_interrupts
from sottovoce.simulation import compiled
from sottovoce.simulation.compiled import BatchRun, draw_simulated_noise, finish_step, stack_models

Arrays = dict[str, NDArray[np.float32]]
BLOCK_BYTES = 64 << 20  # of float32 rows in a block
# Which rows, and the weight of each.
RowSelection: TypeAlias = tuple[slice | NDArray[np.int64], NDArray[np.float32]]


class Block(NamedTuple):
    """A block of rows where JAX computes; every block has the same shape."""

    x: Any  # [rows, features] float32
    y: Any  # [rows] int32, or float32 where it is a number
    weight: Any  # [rows] float32: c_i of the row's client, 0 beyond the last row


class HostEngine(ABC):
    """What engines of one run that compute a round on the host have in common."""

    def __init__(self, run: BatchRun) -> None:
        self.run = run

    def prepare_rounds(self, live: Sequence[int]) -> rounds.RoundsByRun:
        """Price the next round; return nothing when the run is over."""
        paid = rounds.prepare_round(self.run.federation, self.run.state, self.run.seed)
        return {} if paid is None else {0: paid}

    def begin_rounds(self, opened: rounds.RoundsByRun) -> bool:
        """Begin nothing: the host itself computes the round."""
        return False

    def end_rounds(self, opened: rounds.RoundsByRun) -> list[tuple[int, rounds.PlayedRound]]:
        """Compute the round, unless nobody uploads."""
        if opened[0].uploads.any():
            return [(0, self.play_round(opened[0]))]
        return [(0, rounds.PlayedRound(opened[0], math.nan, math.nan, math.nan, math.nan, ()))]

    @abstractmethod
    def play_round(self, paid: PreparedRound) -> rounds.PlayedRound:
        """Compute a round in which clients upload."""


def make_round_key(words: Any, t: Any) -> Any:
    """Return the key of a round's simulated noise from the run's, the same as in `compiled`."""
    return jax.random.fold_in(jax.random.wrap_key_data(jnp.asarray(words)), t)


def draw_signal_noise(key: Any, std: float) -> float:
    """Draw the noise of the clients' mean loss, the same as in `compiled`."""
    return std * float(jax.random.normal(jax.random.fold_in(key, np.uint32(2**32 - 1))))


class AveragingEngine(HostEngine):
    """The engine of one run that makes the mean upload of a round in numpy."""

    @abstractmethod
    def average(
        self, paid: PreparedRound, params: Arrays
    ) -> tuple[Arrays, PreparedRound, float | None]:
        """Return the mean upload, the round with its noise, and the loss that steers, if known."""

    def play_round(self, paid: PreparedRound) -> rounds.PlayedRound:
        """Compute the mean upload of the cohort, and make the next model of it."""
        run, federation = self.run, self.run.federation
        params, memory = run.name_models()
        averaged, paid, steering = self.average(paid, params)
        params, memory, offered = apply_optimizer(
            federation, run.state, paid.round, memory, params, averaged
        )
        tree = federation.model.unflatten(dict(params))
        loss, accuracy, signal = judge_model(federation, tree)
        if federation.plan.server.signal == "raw":
            steering, _ = score_model(federation.model, tree, federation.held.train)
        models = stack_models(federation.model, params, memory)
        signal = signal if steering is None else steering
        return rounds.PlayedRound(paid, loss, accuracy, signal, offered, models)


class StreamedEngine(HostEngine):
    """The engine of one run whose rows are streamed; a compiled program closes a round."""

    def __init__(self, run: BatchRun) -> None:
        super().__init__(run)
        self.valid = put_on_device(run.federation.held.validation)
        self.key = seeds.make_key_words(run.seed, Purpose.NOISE)

    def play_round(self, paid: PreparedRound) -> rounds.PlayedRound:
        """Compute the round, block by block."""
        run, federation = self.run, self.run.federation
        # JAX's arrays from the first round on: numpy's would need another compilation.
        params, memory = jax.tree.map(jnp.asarray, (run.params, run.memory))
        step, client_loss = sum_blocks(federation, params, paid.weight)
        finish, round_ = federation.finish, paid.round
        numbers = finish.step_inputs(run.state.marks, round_.t, round_.horizon)
        inputs = None if finish.idle else jax.tree.map(np.float32, numbers)
        noise: Any = (self.key, np.uint32(paid.round.t), np.float32(paid.std))
        model, metric = cast(JaxModel, federation.model), federation.plan.metric
        new, memory, score = _close_round(
            model, metric, params, memory, step, noise, inputs, self.valid
        )
        loss, accuracy, signal, offered = np.asarray(score).tolist()
        if federation.plan.server.signal == "clients":
            key = make_round_key(*noise[:2])
            signal = float(client_loss) + draw_signal_noise(key, paid.signal_std)
        new, memory = jax.tree.map(lambda leaf: leaf[None], (new, memory))
        return rounds.PlayedRound(paid, loss, accuracy, signal, offered, (new, (0,), memory))


class SummingEngine(AveragingEngine):
    """The engine of simulated noise for a model with clipped sums of its own (`Model`)."""

    def average(
        self, paid: PreparedRound, params: Arrays
    ) -> tuple[Arrays, PreparedRound, float | None]:
        """Return w − Σ_i p_i·(η/n_i)·Σ_m clip(g_m) + noise, as `compiled` does."""
        federation, rate = self.run.federation, self.run.federation.plan.local.rate
        words = seeds.make_key_words(self.run.seed, Purpose.NOISE)
        key = make_round_key(words, np.uint32(paid.round.t))
        signal = self._average_losses(paid, params, key)
        if len(paid.sigma) == 1:
            coefficient = paid.weight * rate / federation.samples
            return self._move(params, coefficient, key, paid.std), paid, signal
        total = {name: np.zeros_like(leaf) for name, leaf in params.items()}
        for i in np.flatnonzero(paid.weight):
            coefficient = np.zeros(len(paid.weight))
            coefficient[i], moved = rate / federation.samples[i], params
            for step, sigma in enumerate(paid.sigma[:, i]):
                folded = jax.random.fold_in(key, step * len(paid.weight) + int(i))
                moved = self._move(moved, coefficient, folded, float(sigma))
            p = np.float32(paid.weight[i])
            total = {name: leaf + p * moved[name] for name, leaf in total.items()}
        return total, paid, signal

    def _move(self, params: Arrays, coefficient: Floats, key: Any, std: float) -> Arrays:
        """Return the parameters after one step of the clients that have a coefficient."""
        federation, moved = self.run.federation, dict(params)
        by_class = federation.recipe.class_weights
        for x, y, weight in self._read_blocks(coefficient):
            weight = weight if by_class is None else weight * np.array(by_class, np.float32)[y]
            step = federation.model.clipped_sum(params, x, y, weight, federation.recipe.clip)
            moved = {name: leaf - step[name].astype(leaf.dtype) for name, leaf in moved.items()}
            check_interrupts()
        noise = jax.device_get(draw_simulated_noise(key, params, jnp.float32(std)))
        return {name: leaf + noise[name] for name, leaf in moved.items()}

    def _average_losses(self, paid: PreparedRound, params: Arrays, key: Any) -> float | None:
        """Return Σ_i p_i·(mean loss of client i in [0, B]) + noise, where clients upload it."""
        federation = self.run.federation
        if federation.plan.server.signal != "clients":
            return None
        bound, mean = federation.plan.server.loss_bound or 0.0, 0.0
        for x, y, weight in self._read_blocks(paid.weight / federation.samples):
            losses = np.nan_to_num(federation.model.losses(params, x, y), nan=np.inf)
            mean += float(np.clip(losses, 0, bound) @ weight)
        return mean + draw_signal_noise(key, paid.signal_std)

    def _read_blocks(self, coefficient: Floats) -> Iterator[tuple[Any, Any, NDArray[np.float32]]]:
        """Yield the rows of the clients that have a coefficient, and the coefficient of each."""
        train = self.run.federation.held.train
        rows = max(1, BLOCK_BYTES // (4 * int(train.x.shape[1])))
        for where, weight in plan_blocks(self.run.federation.samples, coefficient, rows):
            yield train.x[where], train.y[where], weight


def sum_blocks(federation: Federation, params: Params, weight: Floats) -> tuple[Params, Array]:
    """Return Σ_i p_i·(η/n_i)·Σ_m clip(g_m) and Σ_i p_i·(mean loss of client i) over all blocks.

    The losses are computed, clipped to [0, B], only where clients upload theirs; else they are 0.
    """
    plan, model = federation.plan, cast(JaxModel, federation.model)
    rate = plan.local.rate
    coefficient = weight * rate / federation.samples
    with_loss = plan.server.signal == "clients"
    clip, bound = np.float32(federation.recipe.clip), np.float32(plan.server.loss_bound or 0.0)
    weights = federation.recipe.class_weights
    by_class = None if weights is None else np.array(weights, np.float32)
    carried: Any = jax.tree.map(jnp.zeros_like, params), jnp.zeros(())
    mesh = compiled.choose_mesh(federation)
    if mesh is not None:  # every device adds up its own rows
        carried = jax.tree.map(lambda leaf: jnp.stack([leaf] * mesh.size), carried)
    sharding = None if mesh is None else NamedSharding(mesh, compiled.BY_DEVICE)
    wait: Any = jax.block_until_ready
    # One buffer is read into while the other is computed on; reusing both next round was slower.
    free, filled = _make_buffer(federation), _make_buffer(federation)
    selections = plan_blocks(federation.samples, coefficient, len(free.y))
    with ThreadPoolExecutor(1) as reader:
        waiting = [reader.submit(_fill_buffer, federation.held, free, next(selections), sharding)]
        while waiting:
            block = waiting.pop().result()
            wait(carried)  # only now the other buffer may be overwritten
            free, filled = filled, free
            if (selection := next(selections, None)) is not None:
                waiting.append(
                    reader.submit(_fill_buffer, federation.held, free, selection, sharding)
                )
            inputs = (params, block, clip, bound, by_class)
            carried = add_block(model, carried, *inputs, with_loss=with_loss, mesh=mesh)
            check_interrupts()
        wait(carried)
    step, loss = carried if mesh is None else _add_devices(carried)
    return step, loss / rate


@jax.jit
def _add_devices(carried: Any) -> Any:
    """Return the sum over devices, in one all-reduce."""
    _, restore = ravel_pytree(jax.tree.map(lambda leaf: leaf[0], carried))
    return restore(jax.vmap(lambda tree: ravel_pytree(tree)[0])(carried).sum(axis=0))


@partial(jax.jit, static_argnums=0, static_argnames=("with_loss", "mesh"), donate_argnums=1)
def add_block(
    model: JaxModel,
    carried: tuple[Params, Array],
    params: Params,
    block: Block,
    clip: Array,
    bound: Array,
    class_weights: Array | None = None,
    *,
    with_loss: bool,
    mesh: Mesh | None = None,
) -> tuple[Params, Array]:
    """Add a block to the running sum, or to that of each device; one compilation a run."""
    if mesh is not None:
        own, whole = compiled.BY_DEVICE, compiled.WHOLE

        def add(carried: Any, *inputs: Any) -> Any:
            first = jax.tree.map(lambda leaf: leaf[0], carried)
            added = add_block(model, first, *inputs, with_loss=with_loss)
            return jax.tree.map(lambda leaf: leaf[None], added)

        specs = (own, whole, own, whole, whole, whole)
        divided = jax.shard_map(add, mesh=mesh, in_specs=specs, out_specs=own, check_vma=False)
        made: tuple[Params, Array] = divided(carried, params, block, clip, bound, class_weights)
        return made
    summed, loss = carried
    weight = compiled.weigh_rows(block.weight, block.y, class_weights)
    step = clipped_sum(model, params, block.x, block.y, weight, clip)
    if with_loss:
        row_losses = compute_losses(model, params, block.x, block.y)
        row_losses = jnp.clip(jnp.nan_to_num(row_losses, nan=jnp.inf, posinf=jnp.inf), 0, bound)
        loss += jnp.sum(jnp.where(block.weight > 0, block.weight * row_losses, 0))
    return jax.tree.map(jnp.add, summed, step), loss


@partial(jax.jit, static_argnums=(0, 1))
def _close_round(
    model: JaxModel,
    metric: str | None,
    params: Params,
    memory: dict[str, Params],
    step: Params,
    noise: tuple[Array, Array, Array],
    inputs: StepInputs | None,
    valid: tuple[Array, Array],
) -> tuple[Params, dict[str, Params], Array]:
    """Add the noise, apply the optimiser, and return the models with four scores, as `compiled`."""
    words, t, std = noise
    drawn = draw_simulated_noise(make_round_key(words, t), params, std)
    new = jax.tree.map(lambda w, g, z: w - g + z, params, step, drawn)
    new, memory, score = finish_step(model, params, new, memory, inputs, valid, metric)
    return new, memory, jnp.stack(score)


def choose_block_rows(federation: Federation) -> int:
    """Return the rows of a block: at most `BLOCK_BYTES`, and equal parts of the largest cohort.

    A last block that is not full would cost as much as a full one.
    """
    numbers_a_row = int(federation.held.train.x.shape[1])
    cohort = np.sort(federation.samples)[-federation.terms.per_round :]
    most = int(cohort.sum())
    blocks = -(-most // max(1, BLOCK_BYTES // (4 * numbers_a_row)))
    mesh = compiled.choose_mesh(federation)
    share = 1 if mesh is None else mesh.size
    return share * -(-most // (blocks * share))


def plan_blocks(
    samples: NDArray[np.int64], coefficient: Floats, rows: int
) -> Iterator[RowSelection]:
    """Yield the rows of the cohort's clients in blocks of `rows`: their indices and weights.

    >>> where = plan_blocks(np.array([2, 2, 3]), np.array([0.5, 0.0, 0.25]), 3)
    >>> [(np.arange(7)[w].tolist(), c.tolist()) for w, c in where]
    [([0, 1, 4], [0.5, 0.5, 0.25]), ([5, 6], [0.25, 0.25])]
    """
    present = np.flatnonzero(coefficient)
    first = (np.cumsum(samples) - samples)[present]
    count, weight = samples[present], coefficient[present].astype(np.float32)
    end = np.cumsum(count)
    shift = first - (end - count)  # from an index among the cohort's rows to one among all rows
    for low in range(0, int(end[-1]), rows):
        high = min(low + rows, int(end[-1]))
        a, b = np.searchsorted(end, low, "right"), np.searchsorted(end, high, "left") + 1
        # The first and the last client of the block may be in it with a part of their rows only.
        rows_of_client = np.minimum(end[a:b], high) - np.maximum(end[a:b] - count[a:b], low)
        moved = shift[a:b]
        where: slice | NDArray[np.int64] = slice(low + int(moved[0]), high + int(moved[0]))
        if moved[0] != moved[-1]:  # a client in between is left out
            where = np.arange(low, high) + np.repeat(moved, rows_of_client)
        yield where, np.repeat(weight[a:b], rows_of_client)


def _make_buffer(federation: Federation) -> Block:
    rows, features = choose_block_rows(federation), int(federation.held.train.x.shape[1])
    return Block(
        _make_aligned((rows, features), np.float32),
        _make_aligned((rows,), federation.held.train.y.dtype),
        _make_aligned((rows,), np.float32),
    )


def _make_aligned(shape: tuple[int, ...], dtype: Any) -> NDArray[Any]:
    """Return zeros that a CPU computes on in place: XLA copies arrays not aligned to 64 bytes."""
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    raw = np.zeros(size + 64, np.uint8)
    skip = -raw.ctypes.data % 64
    aligned: NDArray[Any] = raw[skip : skip + size].view(dtype).reshape(shape)
    return aligned


def _fill_buffer(held: Holdings, buffer: Block, selection: RowSelection, sharding: Any) -> Block:
    """Read rows into the buffer and bring it to where JAX computes; runs in a thread."""
    where, weight = selection
    count = len(weight)
    train: Any = held.train
    train.x.read_rows(where, buffer.x[:count])
    train.y.read_rows(where, buffer.y[:count])
    buffer.weight[:count], buffer.weight[count:] = weight, 0
    return Block(*jax.device_put(tuple(buffer), sharding, may_alias=True))
