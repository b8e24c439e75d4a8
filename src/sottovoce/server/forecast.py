"""Forecast the best number of rounds on the server's public rows, before the first round.

For each candidate T of the schedule the server trains the first model on one half of its public
rows and measures it on both halves, with the clipping, the noise, the steps and the optimiser that
T rounds of the run would have. With one local step a round of the federation is a step on all
clients' rows plus Gaussian noise of known variance, so this is the run itself on other rows of the
same kind. One half is memorised and the other is not: their mean stands for a run on many rows.

It costs no privacy: it reads the plan, the first model, public rows, and the noise that clients
announce. No row, gradient, loss or upload of a client enters (as with `server.signal = public`).
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from sottovoce.data.federated import Samples
from sottovoce.errors import InputError
from sottovoce.models import clipping
from sottovoce.models.base import JaxModel, Params
from sottovoce.privacy import seeds
from sottovoce.privacy.seeds import Purpose
from sottovoce.privacy.tank import Tank
from sottovoce.schedules import optimizer
from sottovoce.schedules.algorithms import ForecastRounds
from sottovoce.schedules.base import Progress, Round
from sottovoce.schedules.optimizer import NO_MARKS, Finish, Leaves, Memory, StepInputs
from sottovoce.schedules.pricing import price_release, share_noise
from sottovoce.server.federation import Federation
from sottovoce.server.rounds import average_noise, weigh_uploads

FEWEST_ROWS, MOST_ROWS = 40, 1000  # public rows that a forecast needs, and that it uses
MOST_REPEATS = 8  # splits into halves; as many as `MOST_ROWS` rows allow, and at least two


def start_schedule(
    federation: Federation, params: Params, signal: float | None, *, tank: Tank, seed: int
) -> Progress:
    """Return the progress before the first round; with `ForecastRounds`, T is forecast here."""
    schedule = federation.schedule
    progress = schedule.start(signal)
    if not isinstance(schedule, ForecastRounds):
        return progress
    public = federation.held.validation
    if not isinstance(federation.model.code, JaxModel):
        bound = "fixed, discounted or decaying for a model that is not JAX's"
        raise InputError.of("rounds.schedule", "forecast", bound, "its steps cannot be compiled")
    if len(public.y) < FEWEST_ROWS:
        bound = f"at least {FEWEST_ROWS} rows with rounds.schedule = forecast"
        raise InputError.of("data.validation", len(public.y), bound, "or choose discounted")
    missing = forecast(federation, params, public, tank=tank, seed=seed)
    return replace(progress, horizon=schedule.choose(missing))


def forecast(
    federation: Federation, params: Params, public: Samples, *, tank: Tank, seed: int
) -> list[float]:
    """Return for each candidate T of the schedule what a run of T rounds misses of the metric."""
    schedule, plan, recipe = federation.schedule, federation.plan, federation.recipe
    assert isinstance(schedule, ForecastRounds)
    rng, half = seeds.generator(seed, Purpose.FORECAST, 0), min(len(public.y), MOST_ROWS) // 2
    repeats = max(2, min(MOST_REPEATS, MOST_ROWS // half))
    some = rng.permutation(len(public.y))[: 2 * half]
    # Few rows are split anew for each training, so that they cost as much as many and tell more.
    rows = np.concatenate([rng.permutation(some).reshape(2, half) for _ in range(repeats)])
    x, y = np.asarray(public.x)[rows], np.asarray(public.y)[rows]
    weight = np.full(rows.shape, plan.local.rate / half, np.float32)
    if recipe.class_weights is not None:
        weight *= np.array(recipe.class_weights, np.float32)[y]
    finish = replace(federation.finish, best=False)  # of one T, the last model is taken
    first = dict(enumerate(map(np.asarray, jax.tree.leaves(params))))
    halves, start = jax.device_put((x, y, weight)), jax.device_put((first, finish.begin(first)))
    settings = _Settings(
        steps=plan.local.steps,
        metric=plan.metric or (federation.metric if federation.held.target is None else None),
        structure=jax.tree.structure(params),
    )
    key = seeds.make_key_words(seed, Purpose.FORECAST, 1)
    missing = []
    for rounds in schedule.candidates:
        numbers = np.array([recipe.clip, compute_noise(federation, tank, rounds)], np.float32)
        inputs = _list_inputs(finish, rounds, schedule.rounds)
        found = _train_halves(
            federation.model.code, settings, start, halves, inputs, numbers, key, np.int32(rounds)
        )
        missing.append(float(np.mean(np.asarray(found, np.float64))))
    return missing


def compute_noise(federation: Federation, tank: Tank, rounds: int) -> float:
    """Return √(Σ p_i²σ_i²) of one step in a run of so many rounds, for an average cohort.

    Clients that hide their budgets are left out: T is published, and must not tell their numbers
    (R9 of docs/protocol.md).
    """
    terms = federation.terms
    offer = price_release(tank, Round(0, rounds), terms, federation.sensitivity)
    shown = offer.granted & ~np.isnan(federation.capacity)
    if not shown.any():
        bound = "fixed, discounted or decaying where no client discloses a budget"
        raise InputError.of("rounds.schedule", "forecast", bound, "the noise is not known")
    sigma = offer.sigma
    if terms.honest > 1:  # the server learns only sums
        sigma = share_noise(sigma, federation.samples, shown, honest=terms.honest)
    weight = weigh_uploads(federation, shown, sigma)
    fewer = np.count_nonzero(shown) / min(terms.per_round, terms.clients)
    return float(average_noise(weight, sigma)) * math.sqrt(fewer)


class _Settings(NamedTuple):
    """What a compiled forecast depends on, beside the model and the shapes."""

    steps: int  # local steps of a round
    metric: str | None  # None: a number is predicted, and its loss counts
    structure: Any  # of the parameters


def _list_inputs(finish: Finish, rounds: int, most: int) -> StepInputs | None:
    """Return the optimiser's inputs of every round as arrays of length `most`; None if idle."""
    if finish.idle:
        return None
    marks, listed = NO_MARKS, []
    for t in range(rounds):
        listed.append(finish.step_inputs(marks, t, rounds))
        marks = finish.update_marks(marks, t, rounds, math.inf)
    columns: dict[str, Any] = {
        name: np.resize(np.array([getattr(one, name) for one in listed], np.float32), most)
        for name in ("momentum", "scale", "share", "best")
    }
    return StepInputs(**columns, transformation=finish.transformation)


@partial(jax.jit, static_argnums=(0, 1))
def _train_halves(
    model: JaxModel,
    settings: _Settings,
    start: tuple[Leaves, Memory],
    halves: tuple[Array, Array, Array],
    inputs: StepInputs | None,
    numbers: Array,
    words: Array,
    rounds: Array,
) -> Array:
    """Train on each half; return what is missing on it and on its other half, [halves, 2].

    Two halves of the same rows follow each other. One compilation serves every number of rounds.
    """
    clip, std = numbers

    def make_tree(leaves: Leaves) -> Params:
        return jax.tree.unflatten(settings.structure, list(leaves.values()))

    def measure(params: Params, x: Array, y: Array) -> Array:
        if settings.metric == "accuracy":
            return 1 - clipping.evaluate(model, params, x, y)[1]
        return clipping.judge_public(model, params, x, y, settings.metric)[2]

    def train(index: Array, half: tuple[Array, ...], other: tuple[Array, ...]) -> Array:
        x, y, weight = half
        rows = clipping.inspect(model, x)
        key = jax.random.fold_in(jax.random.wrap_key_data(words), index)

        def play_round(t: Array, carried: tuple[Leaves, Memory]) -> tuple[Leaves, Memory]:
            before, memory = carried
            leaves = before
            for step in range(settings.steps):
                drawn = jax.random.split(
                    jax.random.fold_in(key, t * settings.steps + step), len(leaves)
                )
                total = clipping.clipped_sum(model, make_tree(leaves), rows, y, weight, clip)
                leaves = {
                    i: leaf - moved + std * jax.random.normal(drawn[i], leaf.shape, leaf.dtype)
                    for (i, leaf), moved in zip(leaves.items(), jax.tree.leaves(total), strict=True)
                }
            if inputs is None:
                return leaves, memory
            now = jax.tree.map(lambda column: column[t], inputs)
            return optimizer.take_step(now, memory, before, leaves)

        newest, memory = jax.lax.fori_loop(0, rounds, play_round, start)
        final = make_tree(optimizer.choose_candidate(memory, newest))
        return jnp.stack([measure(final, x, y), measure(final, *other[:2])])

    index = jnp.arange(halves[0].shape[0])
    return jax.vmap(train)(index, halves, jax.tree.map(lambda leaf: leaf[index ^ 1], halves))
