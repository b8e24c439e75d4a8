"""A batch of runs at one table: who wants a round, who sits where, and the books after it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple, cast
from weakref import WeakKeyDictionary

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import ArrayLike, NDArray

from sottovoce.data.federated import Samples
from sottovoce.models.base import Inspected, JaxModel, Model, Params
from sottovoce.models.clipping import inspect, product_type, rows_per_chunk
from sottovoce.privacy import seeds as seeding
from sottovoce.privacy.seeds import Purpose
from sottovoce.privacy.tank import stack_rows
from sottovoce.runs.checkpoint import ServerState
from sottovoce.schedules import optimizer
from sottovoce.schedules.base import Round
from sottovoce.schedules.optimizer import Finish, Marks, StepInputs
from sottovoce.server import rounds
from sottovoce.server.federation import Federation, put_on_device
from sottovoce.simulation.compiled import Orders, StackedRows, play

# A batch of runs as arrays: the rows they look at, and what each asks for in a round.


def rows_of(federations: Sequence[Federation], model: JaxModel) -> tuple[StackedRows, list[int]]:
    """The rows of all splits of the batch, stacked, and which of them each run uses."""
    splits = list({id(own.held): own for own in federations}.values())
    places = {id(own.held): i for i, own in enumerate(splits)}
    held = [own.held for own in splits]
    train, valid = [], [put_on_device(own.validation) for own in held]
    for own in held:
        train.append((inspect_rows(model, own.train), put_on_device(own.train)[1]))
    rows = StackedRows(
        x=jax.tree.map(lambda *parts: _stacked(parts), *(x for x, _ in train)),
        y=_stacked([y for _, y in train]),
        owner=_stacked([own.owner for own in held]),
        samples=_stacked([own.samples.astype(np.float32) for own in held]),
        valid_x=_stacked([x for x, _ in valid]),
        valid_y=_stacked([y for _, y in valid]),
    )
    return rows, [places[id(own.held)] for own in federations]


_INSPECTED: WeakKeyDictionary[Samples, dict[tuple[object, bool], Inspected]] = WeakKeyDictionary()


def inspect_rows(model: JaxModel, samples: Samples) -> Inspected:
    """The rows made ready for `clipped_sum`, once for all the runs that train on them."""
    known = _INSPECTED.setdefault(samples, {})
    x, dtype = put_on_device(samples)[0], jnp.zeros(()).dtype
    dtype_of_products = product_type(model, dtype)
    kind = (dtype_of_products, model.cleans_rows)
    if kind not in known:
        is_clean, squared = _inspect_by_pieces(model, x)
        # Rows that need no change are not copied.
        same = dtype_of_products == x.dtype and (
            not model.cleans_rows or bool(np.all(np.asarray(is_clean)))
        )
        known[kind] = Inspected(x if same else _inspect(model, x).x, is_clean, squared)
    return known[kind]


@partial(jax.jit, static_argnums=0)
def _inspect(model: JaxModel, x: jax.Array) -> Inspected:
    return inspect(model, x)


@partial(jax.jit, static_argnums=0)
def _inspect_by_pieces(model: JaxModel, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """What `inspect` says of the rows, piece by piece: it would hold a copy of all of them."""
    n = x.shape[0]
    rows = min(n, rows_per_chunk(2 * max(1, x.size // n), x.dtype.itemsize))
    first = np.arange(0, n, rows)
    starts = np.minimum(first, n - rows)  # the last piece ends with the data, as in `fold`

    def of(start: jax.Array) -> tuple[jax.Array, jax.Array]:
        return inspect(model, jax.lax.dynamic_slice_in_dim(x, start, rows))[1:]

    def joined(pieces: jax.Array) -> jax.Array:
        return jnp.concatenate([pieces[:-1].reshape(-1), pieces[-1, first[-1] - starts[-1] :]])

    is_clean, squared = jax.lax.map(of, jnp.asarray(starts))
    return joined(is_clean), joined(squared)


def _stacked(arrays: Sequence[jax.Array | NDArray[Any]]) -> jax.Array:
    if len(arrays) > 1:
        return jnp.stack(arrays)
    if jax.default_backend() == "cpu":  # the same memory under another shape, not a copy of it
        alone: jax.Array = jax.device_put(np.asarray(arrays[0])[None])
        return alone
    return jnp.asarray(arrays[0])[None]


class Seat(NamedTuple):
    """One run's place in a batch, and what it asks for in this round."""

    federation: Federation
    split: int
    state: ServerState
    asks: rounds.PreparedRound | None  # None: the run is over; its seat computes what nobody reads


def orders_of(seats: Sequence[Seat], always: dict[str, NDArray[Any]]) -> Orders:
    """What the runs of a batch ask for, as arrays; `always` is what they ask for in every round.

    The seats may be those of several rounds, one after the other.
    """
    turns = len(seats) // len(always["rate"])
    if turns > 1:
        always = {name: np.concatenate([own] * turns) for name, own in always.items()}
    asked = [own.asks for own in seats]
    weight, sigma = _column(asked, "weight"), _column(asked, "sigma")
    return Orders(
        **always,
        split=np.array([own.split for own in seats], np.int32),
        weight=weight.astype(np.float32),
        std=rounds.average_noise(weight, sigma[:, 0]).astype(np.float32),
        sigma=np.nan_to_num(sigma).astype(np.float32),
        signal_std=rounds.average_noise(weight, _column(asked, "signal_sigma")).astype(np.float32),
        finish=stack_numbers(
            [own.federation.finish for own in seats],
            [own.state.marks for own in seats],
            [None if p is None else p.turn for p in asked],
        ),
        members=members_of([own.federation for own in seats], weight),
    )


def stack_numbers(
    finishes: Sequence[Finish], marks: Sequence[Marks], turns: Sequence[Round | None]
) -> StepInputs | None:
    """A round's numbers for a batch, an array each; None where every upload is left as it is.

    A run that is over has no turn: whatever its seat computes is thrown away.

    >>> best = Finish(best=True)
    >>> stack_numbers([best, best], [Marks(), Marks(best=0.5)], [Round(0, 4), None]).best.tolist()
    [inf, 0.5]
    """
    if finishes[0].idle:
        return None
    numbers = [
        finish.step_inputs(mark, 0, 1)
        if turn is None
        else finish.step_inputs(mark, turn.t, turn.horizon)
        for finish, mark, turn in zip(finishes, marks, turns, strict=True)
    ]
    return StepInputs(*(np.array(column, np.float32) for column in zip(*numbers, strict=True)))


FEW_ROWS = 256  # a client's; with fewer, going client by client costs more than it saves


def members_of(
    federations: Sequence[Federation], weight: NDArray[np.float64]
) -> NDArray[np.int32] | None:
    """The K clients that a round goes through, of each run, or None: all rows at once.

    Where K < U the rows of the others need not be looked at. With several local steps clients are
    gone through one by one anyway. With one step that pays where a client has enough rows to keep a
    CPU busy; runs of a batch on an accelerator look at the same rows, whoever of them counts.
    """
    size = max(own.terms.per_round for own in federations)
    first = federations[0]
    samples, longest = first.samples, int(max(first.samples))
    if size >= len(samples):
        return None
    alone = len(federations) == 1 and jax.default_backend() == "cpu" and longest >= FEW_ROWS
    if first.plan.local.steps == 1 and not (alone and size * longest <= 0.9 * samples.sum()):
        return None
    return cohort(weight, size)


def cohort(weight: ArrayLike, size: int) -> NDArray[np.int32]:
    """Those who count, filled up with others, whose weight is 0, to `size` of each run.

    >>> cohort([[0.5, 0.0, 0.5, 0.0], [0.0, 1.0, 0.0, 0.0]], 2).tolist()
    [[0, 2], [0, 1]]
    """
    order = np.argsort(-np.asarray(weight), axis=1, kind="stable")[:, :size]
    return np.sort(order, axis=1).astype(np.int32)


def _column(asked: Sequence[rounds.PreparedRound | None], name: str) -> NDArray[np.float64]:
    """One array of each run, zeros for a run that is over."""
    told = {i: getattr(own, name) for i, own in enumerate(asked) if own is not None}
    idle = np.zeros_like(next(iter(told.values())))
    return stack_rows([told.get(i, idle) for i in range(len(asked))])


def lasting(federations: Sequence[Federation], seeds: Sequence[int]) -> dict[str, NDArray[Any]]:
    """What runs ask for in every round alike."""
    plans = [own.plan for own in federations]
    return {
        "rate": np.array([plan.local.learning_rate for plan in plans], np.float32),
        "clip": np.array([own.recipe.clip for own in federations], np.float32),
        "bound": np.array([plan.server.loss_bound or 0.0 for plan in plans], np.float32),
        "key": np.stack([seeding.make_key_words(seed, Purpose.NOISE) for seed in seeds]),
    }


PreparedRounds = dict[int, rounds.PreparedRound]  # what each run of the batch asks for in a round


class BatchRun(rounds.Run):
    """One run of the batch, and its models: a seat of those of the batch."""

    # The state, stacked models, its own place among them, and what the server keeps, stacked. The
    # place is a seat of the batch, or a round of a stretch and a seat.
    at: tuple[ServerState, Params, int | tuple[int, int], dict[str, Params]]

    @property
    def params(self) -> Params:
        _, stacked, place, _ = self.at
        return jax.tree.map(lambda leaf: leaf[place], stacked)

    @property
    def memory(self) -> dict[str, Params]:
        """The models that the server keeps beside the newest."""
        _, _, place, kept = self.at
        return {p: jax.tree.map(lambda leaf: leaf[place], tree) for p, tree in kept.items()}

    @property
    def handed(self) -> Params:
        """The model that is handed out if the run ends here."""
        return optimizer.choose_model(self.memory, self.params)


AfterRound = Callable[[BatchRun], None]


def alone(params: Params) -> Params:
    """Return a model as a batch of one."""
    return jax.tree.map(lambda leaf: np.asarray(leaf)[None], params)


def models_alone(
    model: Model, params: optimizer.Leaves, memory: optimizer.Memory
) -> tuple[Params, int, dict[str, Params]]:
    """Return models by the names of their parameters as those of a batch of one."""
    kept = {part: alone(model.unflatten(dict(leaves))) for part, leaves in memory.items()}
    return alone(model.unflatten(dict(params))), 0, kept


Models = tuple[Params, dict[str, Params]]  # of a batch, stacked, and what the server keeps


class Seating(NamedTuple):
    """Which run sits where: as many seats as a compiled round has."""

    runs: list[int]
    always: dict[str, NDArray[Any]]  # what they ask for in every round


class RunTable:
    """The batch with its rows where JAX computes, and the time it has taken."""

    def __init__(self, model: JaxModel, batch: list[BatchRun]) -> None:
        first = batch[0].federation
        self.batch = batch
        self.rows, self.split = rows_of([run.federation for run in batch], model)
        self.signal = first.plan.server.signal
        self.longest = int(max(first.samples))

    def asked(self, live: Iterable[int], states: list[ServerState]) -> PreparedRounds:
        """The next round of each run that is not over, from its state, paid for."""
        live = list(live)
        runs = [
            rounds.WaitingRun(self.batch[i].federation, states[i], self.batch[i].seed) for i in live
        ]
        each = zip(live, rounds.prepare_rounds(runs), strict=True)
        return {i: ask for i, ask in each if ask is not None}

    def seated(self, live: Iterable[int]) -> Seating:
        """Seats for these runs. They are a power of two, so that few sizes are ever compiled."""
        live = list(live)
        spare = (1 << (len(live) - 1).bit_length()) - len(live)
        runs = live + live[:1] * spare
        own = [self.batch[i] for i in runs]
        return Seating(runs, lasting([run.federation for run in own], [run.seed for run in own]))

    def models(self, seating: Seating) -> Models:
        """The models of the runs as they sit, and what the server keeps beside them."""
        at = [self.batch[i].at for i in seating.runs]
        _, params, _, memory = at[0]
        if all(own[1] is params for own in at):  # they played the same round: one launch
            return cast(Models, _taken((params, memory), np.array([own[2] for own in at])))
        runs = [self.batch[i] for i in seating.runs]
        each = [jax.tree.map(np.asarray, (run.params, run.memory)) for run in runs]
        # JAX's from the first round on: numpy's would be compiled for once more.
        return cast(Models, jax.tree.map(lambda *leaves: jnp.asarray(np.stack(leaves)), *each))

    def places(
        self, seating: Seating, states: list[ServerState], asks: PreparedRounds
    ) -> list[Seat]:
        """What they ask for by seat; one whose run is over computes what nobody reads."""
        return [
            Seat(self.batch[i].federation, self.split[i], states[i], asks.get(i))
            for i in seating.runs
        ]

    def played(
        self,
        seating: Seating,
        asks: PreparedRounds,
        score: NDArray[Any],
        made: Models,
        index: int | None = None,
    ) -> Iterator[tuple[int, rounds.PlayedRound]]:
        """Each run's round: the score by seat, the models by (index of the round and) seat."""
        seats = {i: seat for seat, i in reversed([*enumerate(seating.runs)])}
        params, memory = made
        for i, ask in asks.items():
            seat = seats[i]
            place = seat if index is None else (index, seat)
            loss, accuracy, signal, offered = score[seat].tolist()
            models = (params, place, memory)
            yield i, rounds.PlayedRound(ask, loss, accuracy, signal, offered, models)


@jax.jit
def _taken(stacked: Any, places: jax.Array) -> Any:
    """The models at these places, [runs] or [runs, 2], of a stack."""
    where = tuple(places.T) if places.ndim == 2 else places
    return jax.tree.map(lambda leaf: leaf[where], stacked)


class Compiled:
    """The engine of a CPU, and of batches whose next rounds cannot be guessed: a launch a round."""

    def __init__(self, model: JaxModel, batch: list[BatchRun]) -> None:
        self.table, self.model, self.batch = RunTable(model, batch), model, batch
        self.seating = Seating([], {})
        self.params: Params = None
        self.memory: dict[str, Params] = {}

    def prepare_rounds(self, live: Sequence[int]) -> PreparedRounds:
        """The next round of each run that is not over, paid for."""
        return self.table.asked(live, [run.state for run in self.batch])

    def begin_rounds(self, asks: PreparedRounds) -> bool:
        """Launch the round; its scores are on their way before they are asked for."""
        if 2 * len(asks) <= len(self.seating.runs) or self.params is None:  # they shrink by halves
            self.seating = self.table.seated(asks)
            self.params, self.memory = self.table.models(self.seating)
        states = [run.state for run in self.batch]
        places = self.table.places(self.seating, states, asks)
        outcome = play(
            self.model,
            self.table.rows,
            self.params,
            orders_of(places, self.seating.always),
            next(iter(asks.values())).turn.t,
            signal=self.table.signal,
            longest=self.table.longest,
            memory=self.memory,
        )
        outcome.score.copy_to_host_async()
        self.params, self.memory, self.score = outcome.params, outcome.memory, outcome.score
        return True

    def end_rounds(self, asks: PreparedRounds) -> Iterator[tuple[int, rounds.PlayedRound]]:
        """Wait for the scores."""
        made = self.params, self.memory
        return self.table.played(self.seating, asks, np.asarray(self.score), made)


def rounds_of(
    model: JaxModel, batch: list[BatchRun], after_round: AfterRound | None = None
) -> Iterator[None]:
    """Round by round, compiled."""
    return rounds.play_rounds(batch, Compiled(model, batch), after_round)
