"""Forecast the best number of rounds and length of steps on public rows, before the first round.

For each candidate of the schedule (a number of rounds T, a factor r of the server's steps) the
server trains the first model on four fifths of its public rows and measures it on them and on the
rest, with the clipping, the noise, the steps and the optimiser that the run would have. With one
local step a round of the federation is a step on all clients' rows plus Gaussian noise of known
variance, so this is the run itself on other rows of the same kind. One part is memorised and the
other is not: their mean stands for a run on many rows.

It costs no privacy: it reads the plan, the first model, public rows, and the noise that clients
announce. No row, gradient, loss or upload of a client enters (as with `server.signal = public`). No
σ or Δ depends on r, which multiplies what the server has received.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from sottovoce.data.federated import Samples
from sottovoce.errors import InputError
from sottovoce.models import clipping
from sottovoce.models.base import JaxModel, Params
from sottovoce.models.metrics import choose_metric
from sottovoce.privacy import seeds
from sottovoce.privacy.seeds import Purpose
from sottovoce.privacy.tank import Tank
from sottovoce.schedules import optimizer
from sottovoce.schedules.aggregate import limit_noise, limit_samples
from sottovoce.schedules.algorithms import Candidate, ForecastRounds
from sottovoce.schedules.base import Progress, Round
from sottovoce.schedules.optimizer import NO_MARKS, Finish, Leaves, Marks, Memory, StepInputs
from sottovoce.schedules.pricing import price_release, share_noise
from sottovoce.server.federation import Federation
from sottovoce.server.rounds import average_noise, weigh_uploads

# Public rows that a forecast uses. With fewer rows, it memorises them more than a run
# memorises its clients' rows, and takes paths that are too long. More rows only take longer.
MOST_ROWS = 2000
PAIR = 2  # trainings that are compiled together, each with a split of its own
# A candidate that stays to the end has 2 to 8 pairs, as many as MOST_NUMBERS (trainings × rows ×
# parameters) allow.
FEWEST_PAIRS, MOST_PAIRS, MOST_NUMBERS = 2, 8, 25 * 10**6
MOST_THREADS = 4  # a training of few rows keeps one core busy
NEED_TWO = ("auroc", "auprc", "r2")  # metrics that need different labels


def start_schedule(
    federation: Federation, params: Params, signal: float | None, *, tank: Tank, seed: int
) -> tuple[Progress, Marks]:
    """Return progress and marks before the first round; forecast T and r for `ForecastRounds`."""
    schedule = federation.schedule
    if not isinstance(schedule, ForecastRounds):
        return schedule.start(signal), NO_MARKS
    public = federation.held.validation
    measure, most = prepare_forecast(federation, params, public, tank=tank, seed=seed)
    with ThreadPoolExecutor(min(MOST_THREADS, os.cpu_count() or 1), "forecast") as threads:
        is_step_free = federation.finish.is_step_free
        T, r = schedule.choose(measure, most, is_step_free=is_step_free, spread=threads.map)
    return Progress(0, T), Marks(step=r)


def prepare_forecast(
    federation: Federation, params: Params, public: Samples, *, tank: Tank, seed: int
) -> tuple[Callable[[Candidate, int], float], int]:
    """Return a function that measures a candidate's i-th forecast, and the most of them to measure.

    A forecast is the mean of what two runs on public rows miss of the metric. The i-th
    forecasts of all candidates share their splits and their noise, so that these favour none.
    """
    schedule, plan, recipe = federation.schedule, federation.plan, federation.recipe
    assert isinstance(schedule, ForecastRounds)
    rng, count = seeds.generator(seed, Purpose.FORECAST, 0), min(len(public.y), MOST_ROWS)
    chosen, trained = rng.permutation(len(public.y))[:count], 4 * count // 5
    size = sum(leaf.size for leaf in jax.tree.leaves(params))
    most = int(np.clip(MOST_NUMBERS // (trained * size) // PAIR, FEWEST_PAIRS, MOST_PAIRS))
    splits = np.stack([rng.permutation(count) for _ in range(PAIR * most)]).reshape(most, PAIR, -1)
    x, y = np.asarray(public.x)[chosen], np.asarray(public.y)[chosen]
    weight = np.full(count, plan.local.rate / trained, np.float32)
    if recipe.class_weights is not None:
        weight *= np.array(recipe.class_weights, np.float32)[y]
    finish = replace(federation.finish, best=False)  # of a candidate, the last model is taken
    first = dict(enumerate(map(np.asarray, jax.tree.leaves(params))))
    rows, start = jax.device_put((x, y, weight)), jax.device_put((first, finish.begin(first)))
    metric: str | None = plan.metric
    if metric is None and federation.held.target is None:  # from these labels alone, not test rows
        metric = choose_metric(public.y, federation.held.classes)
    parts = np.split(y[splits], [trained], axis=-1)
    if metric in NEED_TWO and any(np.any(np.ptp(part, axis=-1) == 0) for part in parts):
        metric = None  # undefined on one of the parts, which would count as diverged
    static = federation.model.code, plan.local.steps, metric, jax.tree.structure(params), trained
    key = seeds.make_key_words(seed, Purpose.FORECAST, 1)

    @cache
    def list_rounds(candidate: Candidate) -> tuple[StepInputs, Any, Any]:
        T, r = candidate
        std = np.float32(compute_noise(federation, tank, T))
        return _list_inputs(finish, T, r, schedule.rounds), std, np.int32(T)

    def list_arguments(candidate: Candidate, i: int) -> tuple[Any, ...]:
        pair = np.arange(PAIR * i, PAIR * (i + 1), dtype=np.int32), splits[i]
        return start, rows, pair, np.float32(recipe.clip), key, *list_rounds(candidate)

    # Compiled here: JAX has settings for each thread, and `measure` may run in another thread.
    program = _train_pair.lower(*static, *list_arguments((schedule.rounds, 1.0), 0)).compile()

    def measure(candidate: Candidate, i: int) -> float:
        missing = program(*list_arguments(candidate, i))
        return float(np.mean(np.asarray(missing, np.float64)))

    return measure, most


def compute_noise(federation: Federation, tank: Tank, rounds: int) -> float:
    """Return √(Σ p_i²σ_i²) of a first step whose horizon is `rounds`, for an average cohort.

    Clients that hide their budgets are left out: T and r are published, and must not tell their
    numbers (R9 of docs/protocol.md), not even by the median that limits what others count for.
    """
    terms = federation.terms
    offer = price_release(tank, Round(0, rounds), terms, federation.sensitivity)
    disclosed = offer.granted & ~np.isnan(federation.capacity)
    if not disclosed.any():
        bound = "one without a forecast where no client discloses a budget"
        raise InputError.of("rounds.schedule", "forecast", bound, "the noise is not known")
    sigma = offer.sigma
    if terms.honest > 1:  # the server learns only sums
        sigma = share_noise(sigma, federation.samples, disclosed, honest=terms.honest)
    if np.isnan(federation.capacity).any():
        counted, known = federation.samples.copy(), federation.samples[disclosed].tolist()
        counted[disclosed] = limit_samples(known, [None] * len(known))
        federation = replace(federation, counted=counted)
    weight = weigh_uploads(federation, disclosed, sigma)
    if federation.unregistered is not None:  # as in a round: one with much noise counts for less
        weight = limit_noise(weight, sigma, federation.unregistered)
    ratio = np.count_nonzero(disclosed) / min(terms.per_round, terms.clients)
    return float(average_noise(weight, sigma)) * math.sqrt(ratio)


def _list_inputs(finish: Finish, rounds: int, step: float, length: int) -> StepInputs:
    """Return the optimiser's inputs of T rounds as arrays of so many numbers."""
    marks, rows = Marks(step=step), []
    for t in range(rounds):
        rows.append(finish.step_inputs(marks, t, rounds))
        marks = finish.update_marks(marks, t, rounds, math.inf)
    columns: dict[str, Any] = {
        name: np.resize(np.array([getattr(row, name) for row in rows], np.float32), length)
        for name in ("momentum", "scale", "share", "best")
    }
    return StepInputs(**columns, transformation=finish.transformation)


@partial(jax.jit, static_argnums=(0, 1, 2, 3, 4))
def _train_pair(
    model: JaxModel,
    steps: int,
    metric: str | None,
    structure: Any,
    trained: int,
    start: tuple[Leaves, Memory],
    public: tuple[Array, Array, Array],
    pair: tuple[Array, Array],
    clip: Array,
    key_words: Array,
    inputs: StepInputs,
    std: Array,
    rounds: Array,
) -> Array:
    """Train on `trained` rows of each split; return what is missing on them and on the rest.

    Without a metric, the loss counts. One compilation serves every candidate.
    """

    def make_tree(leaves: Leaves) -> Params:
        return jax.tree.unflatten(structure, list(leaves.values()))

    def measure(params: Params, x: Array, y: Array) -> Array:
        if metric == "accuracy":
            return 1 - clipping.evaluate(model, params, x, y)[1]
        return clipping.judge_public(model, params, x, y, metric)[2]

    def train(index: Array, split: Array) -> Array:
        x, y, weight = (column[split] for column in public)
        rows = clipping.inspect(model, x[:trained])
        weight, labels = weight[:trained], y[:trained]
        key = jax.random.fold_in(jax.random.wrap_key_data(key_words), index)

        def play_round(t: Array, carried: tuple[Leaves, Memory]) -> tuple[Leaves, Memory]:
            before, memory = carried
            leaves = before
            for step in range(steps):
                keys = jax.random.split(jax.random.fold_in(key, t * steps + step), len(leaves))
                moved = clipping.clipped_sum(model, make_tree(leaves), rows, labels, weight, clip)
                leaves = {
                    i: leaf - move + std * jax.random.normal(keys[i], leaf.shape, leaf.dtype)
                    for (i, leaf), move in zip(leaves.items(), jax.tree.leaves(moved), strict=True)
                }
            round_inputs = jax.tree.map(lambda column: column[t], inputs)
            return optimizer.take_step(round_inputs, memory, before, leaves)

        newest, memory = jax.lax.fori_loop(0, rounds, play_round, start)
        final = make_tree(optimizer.choose_candidate(memory, newest))
        missing = measure(final, x[:trained], y[:trained]), measure(final, x[trained:], y[trained:])
        return jnp.stack(missing)

    return jax.vmap(train)(*pair)
