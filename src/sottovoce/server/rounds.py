"""The rounds of Algorithms 1 and 2: one loop over an `Engine`, and the server's side of a round.

`play_rounds` is the loop. A round is `prepare` (the schedule's turn, the cohort, each client's
price, booked before any noise is drawn), then the engine (clipped and noised updates, their mean,
the server's optimiser), then `finish` (the schedule hears the loss, the books are written).
Everything here is a few numbers a client; arrays are trained by the engines.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, Protocol, TypeVar, cast
from weakref import WeakKeyDictionary

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from sottovoce.data.federated import Samples, fairness
from sottovoce.models.base import AnyModel, Custom, Model, Params, first, unnamed
from sottovoce.models.clipping import Inspected, inspect, product_type, rows_per_chunk
from sottovoce.models.evaluate import confusion, evaluate, right
from sottovoce.models.gradients import ForeignModel
from sottovoce.privacy import seeds
from sottovoce.privacy import seeds as seeding
from sottovoce.privacy.calibration import charges_absent
from sottovoce.privacy.gaussian import Floats
from sottovoce.privacy.seeds import Purpose
from sottovoce.privacy.tank import Tank
from sottovoce.runs import checkpoint, record
from sottovoce.runs.checkpoint import MANY_CLIENTS, ServerState
from sottovoce.schedules.aggregate import by_precision, by_samples
from sottovoce.schedules.base import Round
from sottovoce.schedules.cohort import pick
from sottovoce.schedules.optimizer import Closed, Finish, Leaves, Marks, Memory, Numbers
from sottovoce.schedules.pricing import LOSS_SHARE
from sottovoce.schedules.pricing import offers as price
from sottovoce.server.federation import Federation

# What the server makes of averaged uploads (`schedules.optimizer`): a batch, or one in numpy.


def numbers(
    each: Sequence[Finish], marks: Sequence[Marks], turns: Sequence[Round | None]
) -> Numbers | None:
    """A round's numbers for a batch, an array each; None where every upload is left as it is.

    A run that is over has no turn: whatever its seat computes is thrown away.

    >>> own = Finish(best=True)
    >>> numbers([own, own], [Marks(), Marks(best=0.5)], [Round(0, 4), None]).best.tolist()
    [inf, 0.5]
    """
    if each[0].idle:
        return None
    told = [
        own.numbers(mark, 0, 1) if turn is None else own.numbers(mark, turn.t, turn.horizon)
        for own, mark, turn in zip(each, marks, turns, strict=True)
    ]
    return Numbers(*(np.array(column, np.float32) for column in zip(*told, strict=True)))


def closed(
    federation: Federation,
    state: ServerState,
    turn: Round,
    memory: Memory,
    previous: Leaves,
    averaged: Leaves,
) -> Closed:
    """The averaged upload made into the next model, in numpy: secure noise, real federations."""
    model, public = federation.model, federation.held.validation
    return federation.finish.close(
        state.marks,
        turn.t,
        turn.horizon,
        memory,
        previous,
        averaged,
        loss=lambda leaves: scores(model, unnamed(model, leaves), public)[0],
    )


# The first model, and how good a model is: loss, accuracy, confusion, fairness; no noise here.


FOREIGN_ROWS = 1024  # evaluated at a time where the model is not JAX's


def first_model(model: AnyModel, seed: int) -> Params:
    """w⁰, which is public: anyone may know the seed of it."""
    if isinstance(model, ForeignModel):
        return model.first(seed)
    key = jax.random.wrap_key_data(jnp.asarray(seeding.make_key_words(seed, Purpose.INIT)))
    return first(model, key)


_PLACED: WeakKeyDictionary[Samples, tuple[jax.Array, jax.Array]] = WeakKeyDictionary()


def on_device(samples: Samples) -> tuple[jax.Array, jax.Array]:
    """The rows where JAX computes, brought there once however many runs look at them."""
    if samples not in _PLACED:
        # One copy: `jnp.asarray` makes two of an array that does not begin at 64 bytes.
        x = jax.device_put(samples.x, may_alias=False)
        _PLACED[samples] = x, jnp.asarray(samples.y)
    return _PLACED[samples]


_INSPECTED: WeakKeyDictionary[Samples, dict[tuple[object, bool], Inspected]] = WeakKeyDictionary()


def inspected(model: Model, samples: Samples) -> Inspected:
    """The rows made ready for `clipped_sum`, once for all the runs that train on them."""
    known = _INSPECTED.setdefault(samples, {})
    x, dtype = on_device(samples)[0], jnp.zeros(()).dtype
    taken = product_type(model, dtype)
    kind = (taken, isinstance(model, Custom))
    if kind not in known:
        is_clean, squared = _facts(model, x)
        # Rows that need no change are not copied.
        same = taken == x.dtype and (kind[1] or bool(np.all(np.asarray(is_clean))))
        known[kind] = Inspected(x if same else _inspect(model, x).x, is_clean, squared)
    return known[kind]


@partial(jax.jit, static_argnums=0)
def _inspect(model: Model, x: jax.Array) -> Inspected:
    return inspect(model, x)


@partial(jax.jit, static_argnums=0)
def _facts(model: Model, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """What `inspect` says of the rows, piece by piece: it would hold a copy of all of them."""
    n = x.shape[0]
    rows = min(n, rows_per_chunk(2 * max(1, x.size // n), x.dtype.itemsize))
    first = np.arange(0, n, rows)
    starts = np.minimum(first, n - rows)  # the last piece ends with the data, as in `fold`

    def of(start: jax.Array) -> tuple[jax.Array, jax.Array]:
        return inspect(model, jax.lax.dynamic_slice_in_dim(x, start, rows))[1:]

    def joined(part: jax.Array) -> jax.Array:
        return jnp.concatenate([part[:-1].reshape(-1), part[-1, first[-1] - starts[-1] :]])

    is_clean, squared = jax.lax.map(of, jnp.asarray(starts))
    return joined(is_clean), joined(squared)


def scores(model: AnyModel, params: Params, samples: Samples) -> tuple[float, float]:
    """Mean loss and accuracy."""
    if isinstance(model, ForeignModel):
        pieces = range(0, len(samples.y), FOREIGN_ROWS)
        parts = [(samples.x[i : i + FOREIGN_ROWS], samples.y[i : i + FOREIGN_ROWS]) for i in pieces]
        each = [model.losses(params, x, y) for x, y in parts]
        hits = [model.predict(params, x) == y for x, y in parts]
        return float(np.mean(np.concatenate(each))), float(np.mean(np.concatenate(hits)))
    loss, accuracy = jax.device_get(evaluate(model, params, *on_device(samples)))
    return float(loss), float(accuracy)


def confused(
    model: AnyModel, classes: int, params: Params, samples: Samples
) -> list[list[int]] | None:
    """How many rows of each class are taken for which; None where there are too many classes."""
    if classes > record.MOST_CONFUSED:
        return None
    if isinstance(model, ForeignModel):
        table = np.zeros((classes, classes), int)
        np.add.at(table, (samples.y, model.predict(params, samples.x)), 1)
    else:
        table = np.asarray(_told(model, classes, params, *on_device(samples)))
    return cast(list[list[int]], table.tolist())


@partial(jax.jit, static_argnums=(0, 1))
def _told(model: Model, classes: int, params: Params, x: jax.Array, y: jax.Array) -> jax.Array:
    return confusion(model, params, x, y, classes)


def fairness_of(federation: Federation, params: Params) -> dict[str, Any]:
    """Accuracy by client and by budget, where the test rows have owners."""
    test, owner = federation.held.test, federation.held.test_owner
    hits = np.zeros(0, dtype=bool)
    model = federation.model
    if owner is not None and isinstance(model, ForeignModel):
        hits = model.predict(params, test.x) == test.y
    elif owner is not None and isinstance(model, Model):
        hits = np.asarray(right(model, params, *on_device(test)))
    return fairness(hits, owner, federation.epsilon, federation.delta)


@dataclass(frozen=True, eq=False)
class Prepared:
    """A round that is paid for: what the compiled round needs, and what the books will say."""

    turn: Round
    weight: Floats  # [clients]: p_i
    sigma: Floats  # [steps, clients]: of each charged client, else NaN
    signal_sigma: Floats  # [clients]: of its loss, where it tells one, else NaN
    mu2: Floats  # [clients]: what was booked
    uploads: NDArray[np.bool_]
    tank: Tank
    asked: NDArray[np.int64]

    @property
    def std(self) -> float:
        """√(Σ p_i²σ_i²) of one step."""
        return float(root_sum(self.weight, self.sigma[0]))

    @property
    def signal_std(self) -> float:
        """√(Σ p_i²σ_V,i²)."""
        return float(root_sum(self.weight, self.signal_sigma))


def root_sum(weight: Floats, sigma: Floats) -> Floats:
    """√(Σ p_i²σ_i²) over the last axis; who has no part has no noise in it.

    >>> float(root_sum(np.array([0.6, 0.4, 0.0]), np.array([5.0, 10.0, np.nan])))
    5.0
    """
    part = weight * np.where(weight > 0, sigma, 0.0)
    return np.asarray(np.sqrt(np.sum(part**2, axis=-1)))


def start(
    federation: Federation,
    loss: float,
    accuracy: float,
    signal: float | None,
    tank: Tank | None = None,
) -> ServerState:
    """The state before the first round; `signal` is the loss that steers, if it is known.

    `tank` is what real clients say of theirs; left out, all are full.
    """
    zero = np.zeros(len(federation.samples), dtype=np.int64)
    return ServerState(
        progress=federation.schedule.start(signal),
        tank=federation.tank() if tank is None else tank,
        asked=zero,
        turns=zero,
        rounds=(),
        sigma=(),
        mu2=(),
        initial=(loss, accuracy, signal),
        seconds=0.0,
    )


@dataclass(eq=False)
class Run:
    """A run on its way: `at`, its state and models, is replaced whole, so that it is never torn."""

    federation: Federation
    seed: int
    at: tuple[Any, ...]  # the state, then the models as the engine keeps them

    @property
    def state(self) -> ServerState:
        """The state after the last complete round."""
        return cast(ServerState, self.at[0])


class Played(NamedTuple):
    """One run's round as an engine computed it."""

    paid: Prepared  # what was booked, with the noise that was drawn
    loss: float  # of the new model on the public validation rows
    accuracy: float
    signal: float  # the loss that steers the schedule
    offered: float  # the loss of the model that could be handed out now
    models: tuple[Any, ...]  # as the engine keeps them; ignored where nothing was uploaded
    entry: Mapping[str, Any] = {}  # what else the record says of this round


Asks = dict[int, Any]  # what each run of a batch asks for in a round, by its place in the batch


class Engine(Protocol):
    """Computes the rounds of a batch of runs: each cohort's mean update, and the next model.

    `simulation.table` (compiled), `simulation.accelerator` (rounds begun ahead),
    `simulation.streamed`, `simulation.secure` and `server.coordinator` are engines.
    """

    def ask(self, live: Sequence[int]) -> Asks:
        """Return the next round of each of these runs that is not over, priced and booked."""

    def begin(self, asks: Asks) -> bool:
        """Begin to compute these rounds; return whether the host may do other work meanwhile."""

    def end(self, asks: Asks) -> Iterable[tuple[int, Played]]:
        """Wait for these rounds, and return each run's."""


def play_rounds(
    runs: Sequence[RunOf], engine: Engine, after_round: Callable[[RunOf], None] | None = None
) -> Iterator[None]:
    """Algorithms 1 and 2 for a batch of runs side by side; each is left at a complete round.

    Yields while the engine computes, before its answer is awaited: whoever drives two batches in
    turn has one on the accelerator while the other keeps its books.
    """
    began, before = time.monotonic(), [run.state.seconds for run in runs]
    live = list(range(len(runs)))
    while asks := engine.ask(live):
        if engine.begin(asks):
            yield
        outcome = engine.end(asks)
        seconds = time.monotonic() - began
        for i, played in outcome:
            run = runs[i]
            state = finish(run.federation, run.state, played, seconds=before[i] + seconds)
            # Where nothing was uploaded there is nothing to make a step of: the model stays.
            run.at = (state, *(run.at[1:] if state.exhausted else played.models))
        if after_round is not None:
            after_round(runs[0])
        live = list(asks)


RunOf = TypeVar("RunOf", bound=Run)


class Asked(NamedTuple):
    """A run that wants its next round."""

    federation: Federation
    state: ServerState
    seed: int


def prepare(federation: Federation, state: ServerState, seed: int) -> Prepared | None:
    """The next round, debited, or None when the run is over."""
    return prepare_all([Asked(federation, state, seed)])[0]


def prepare_all(runs: Sequence[Asked]) -> list[Prepared | None]:
    """The next round of each run; those alike are priced and debited side by side, as one array."""
    alike: dict[tuple[Any, ...], list[tuple[int, Round]]] = {}
    for place, (federation, state, _) in enumerate(runs):
        turn = None if state.exhausted else federation.schedule.round(state.progress)
        if turn is not None:
            kind = federation.terms, federation.plan.server.signal, turn.scale, turn.spread
            alike.setdefault(kind, []).append((place, turn))
    paid: dict[int, Prepared] = {}
    for members in alike.values():
        places, turns = zip(*members, strict=True)
        paid |= zip(places, _prepared([runs[i] for i in places], turns), strict=True)
    return [paid.get(place) for place in range(len(runs))]


def _prepared(runs: Sequence[Asked], turns: Sequence[Round]) -> Iterator[Prepared]:
    """The rounds of runs whose terms and signal are the same.

    Arrays are [runs, clients]; of one run alone [clients], which takes a third less time.
    """
    federations, states, seeded = zip(*runs, strict=True)
    first: Federation = federations[0]
    terms, tells = first.terms, first.plan.server.signal == "clients"
    beside, alone = (np.stack, False) if len(runs) > 1 else (_only, True)
    asked: NDArray[np.int64] = beside([state.asked for state in states])
    in_cohort = np.full(asked.shape, terms.per_round >= terms.clients)
    if terms.per_round < terms.clients:
        each = [(asked, in_cohort)] if alone else zip(asked, in_cohort, strict=True)
        for (before, chosen), seed, turn in zip(each, seeded, turns, strict=True):
            rng = seeds.generator(seed, Purpose.COHORT, turn.t)
            chosen[pick(terms.cohort, asked=before, size=terms.per_round, rng=rng)] = True

    full = states[0].tank if alone else Tank.stack([state.tank for state in states])
    tank, sensitivity = full, beside([own.sensitivity for own in federations])
    signal_sigma, sigmas = np.full(asked.shape, np.nan), []
    uploads = in_cohort
    for step in range(terms.releases):
        offer = price(tank, turns, terms, sensitivity)
        granted = offer.granted & (offer.units >= LOSS_SHARE) if tells else offer.granted
        uploads = uploads & granted
        charged = granted if charges_absent(terms.calibration) else uploads
        units = np.where(charged, offer.units, 0)
        sigma = offer.sigma
        if tells and step == 0:
            part = np.maximum(units // LOSS_SHARE, 1)
            own_loss = beside([own.loss_sensitivity for own in federations])
            signal_sigma = np.where(charged, tank.noise(part, own_loss), np.nan)
            rest = np.maximum(units - part, 1)
            sigma = tank.noise(rest, sensitivity)
        sigmas.append(np.where(charged, sigma, np.nan))
        tank = tank.spend(units)

    sigma = sigmas[0][..., None, :] if len(sigmas) == 1 else np.stack(sigmas, axis=-2)
    mu2 = tank.spent_mu2 - full.spent_mu2
    asked = asked + in_cohort
    if all(own.plan.server.weights == "samples" for own in federations):
        weight = by_samples(beside([own.samples for own in federations]), uploads)
    elif alone:
        weight = weights(first, uploads, sigma[0])
    else:
        rows = zip(federations, uploads, sigma[:, 0], strict=True)
        weight = np.stack([weights(*row) for row in rows])
    if alone:
        yield Prepared(turns[0], weight, sigma, signal_sigma, mu2, uploads, tank, asked)
        return
    for row, (_, state, _) in enumerate(runs):
        yield Prepared(
            turn=turns[row],
            weight=weight[row],
            sigma=sigma[row],
            signal_sigma=signal_sigma[row],
            mu2=mu2[row],
            uploads=uploads[row],
            tank=replace(state.tank, spent=tank.spent[row], debits=tank.debits[row]),
            asked=asked[row],
        )


def _only(arrays: Sequence[NDArray[Any]]) -> NDArray[Any]:
    return arrays[0]


def expected(federation: Federation, state: ServerState, prepared: Prepared) -> ServerState:
    """Where the run will be after this round if its loss does not shorten the horizon.

    An accelerator may begin the next round on this, before the loss is known; `same_turn` says
    whether that was right.
    """
    progress = replace(state.progress, done=state.progress.done + 1)
    marks = federation.finish.marked(state.marks, prepared.turn.t, prepared.turn.horizon, math.inf)
    return replace(
        state,
        progress=progress,
        tank=prepared.tank,
        asked=prepared.asked,
        exhausted=not prepared.uploads.any(),
        marks=marks,
    )


def same_turn(federation: Federation, state: ServerState, prepared: Prepared) -> bool:
    """Whether the round that was begun early is the one that is next now."""
    return not state.exhausted and federation.schedule.round(state.progress) == prepared.turn


def weights(federation: Federation, uploads: NDArray[np.bool_], sigma: Floats) -> Floats:
    """p_i of the uploads that came, as the plan says; public numbers only."""
    plan = federation.plan
    samples = federation.samples if federation.counted is None else federation.counted
    if plan.server.weights == "samples":
        return by_samples(samples, uploads)
    # Who counts for fewer samples than it declares counts with the σ that those would have.
    return by_precision(
        samples,
        uploads,
        sigma=sigma * (federation.samples / samples) * math.sqrt(plan.local.steps),
        dimension=federation.dimension,
        learning_rate=plan.local.learning_rate,
        clip=federation.recipe.clip,
        divergence=federation.divergence,
    )


def finish(
    federation: Federation, state: ServerState, played: Played, *, seconds: float
) -> ServerState:
    """Return the state after the round: the schedule hears the signal, the books are written."""
    prepared, loss, signal = played.paid, played.loss, played.signal
    uploads = np.flatnonzero(prepared.uploads)
    if not len(uploads):  # every client asked has an empty tank: nothing was released
        return replace(state, exhausted=True, asked=prepared.asked)
    progress = federation.schedule.advance(state.progress, signal)
    many = len(state.asked) > MANY_CLIENTS
    entry: dict[str, Any] = {
        "t": prepared.turn.t,
        "horizon": prepared.turn.horizon,
        "next_horizon": progress.horizon,
        **({} if many else {"cohort": uploads.tolist()}),
        "uploads": len(uploads),
        "sigma": _spread(prepared.sigma[:, uploads]),
        "validation_loss": loss if math.isfinite(loss) else None,
        "validation_accuracy": played.accuracy,
    }
    if federation.plan.server.signal != "public":
        entry["signal"] = signal if math.isfinite(signal) else None
    if played.entry:
        entry |= played.entry
    turn = prepared.turn
    return replace(
        state,
        progress=progress,
        tank=prepared.tank,
        asked=prepared.asked,
        turns=state.turns + prepared.uploads,
        rounds=(*state.rounds, entry),
        sigma=checkpoint.kept(state.sigma, prepared.sigma[0], checkpoint.together),
        mu2=checkpoint.kept(state.mu2, prepared.mu2, np.add),
        seconds=seconds,
        marks=federation.finish.marked(state.marks, turn.t, turn.horizon, played.offered),
    )


def _spread(sigma: Floats) -> dict[str, float | None]:
    """Least, median and most of those that are told; a real client may keep its σ to itself."""
    least, most = float(sigma.min()), float(sigma.max())
    if math.isnan(least):
        sigma = sigma[~np.isnan(sigma)]
        if not sigma.size:
            return {"min": None, "median": None, "max": None}
        least, most = float(sigma.min()), float(sigma.max())
    median = least if least == most else float(np.median(sigma))
    return {"min": least, "median": median, "max": most}
