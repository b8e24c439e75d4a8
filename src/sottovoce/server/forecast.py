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
from sottovoce.schedules.aggregate import limit_samples
from sottovoce.schedules.algorithms import Candidate, ForecastRounds
from sottovoce.schedules.base import Progress, Round
from sottovoce.schedules.optimizer import NO_MARKS, Finish, Leaves, Marks, Memory, StepInputs
from sottovoce.schedules.pricing import price_release, share_noise
from sottovoce.server.federation import Federation
from sottovoce.server.rounds import average_noise, weigh_uploads

# Public rows that a forecast uses: of fewer it memorises more than a run does of its clients' rows,
# and takes paths that are too long; of more it only takes longer.
MOST_ROWS = 2000
PAIR = 2  # trainings that are compiled together, each with a split of its own
FEWEST_PAIRS, MOST_PAIRS = 2, 8  # of a candidate that stays to the end;
MOST_NUMBERS = 25 * 10**6  # as many trainings as this many rows × parameters allow
MOST_THREADS = 4  # a training of few rows keeps one core busy
NEED_TWO = ("auroc", "auprc", "r2")  # metrics that need different labels


def start_schedule(
    federation: Federation, params: Params, signal: float | None, *, tank: Tank, seed: int
) -> tuple[Progress, Marks]:
    """Return progress and marks before the first round; of `ForecastRounds`, T and r."""
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
    """Return what measures the i-th forecast of a candidate, and how many are worth their time.

    A forecast is what a pair of runs on public rows misses of the metric. The i-th forecasts of all
    candidates share their splits and their draws of noise, so that these favour none.
    """
    schedule, plan, recipe = federation.schedule, federation.plan, federation.recipe
    assert isinstance(schedule, ForecastRounds)
    rng, count = seeds.generator(seed, Purpose.FORECAST, 0), min(len(public.y), MOST_ROWS)
    some, seen = rng.permutation(len(public.y))[:count], 4 * count // 5
    size = sum(leaf.size for leaf in jax.tree.leaves(params))
    most = int(np.clip(MOST_NUMBERS // (seen * size) // PAIR, FEWEST_PAIRS, MOST_PAIRS))
    splits = np.stack([rng.permutation(count) for _ in range(PAIR * most)]).reshape(most, PAIR, -1)
    x, y = np.asarray(public.x)[some], np.asarray(public.y)[some]
    weight = np.full(count, plan.local.rate / seen, np.float32)
    if recipe.class_weights is not None:
        weight *= np.array(recipe.class_weights, np.float32)[y]
    finish = replace(federation.finish, best=False)  # of a candidate, the last model is taken
    first = dict(enumerate(map(np.asarray, jax.tree.leaves(params))))
    rows, start = jax.device_put((x, y, weight)), jax.device_put((first, finish.begin(first)))
    metric: str | None = plan.metric
    if metric is None and federation.held.target is None:  # by these labels alone: no test rows
        metric = choose_metric(public.y, federation.held.classes)
    parts = np.split(y[splits], [seen], axis=-1)
    if metric in NEED_TWO and any(np.any(np.ptp(part, axis=-1) == 0) for part in parts):
        metric = None  # it is not defined on some part, which would count as diverged
    static = federation.model.code, plan.local.steps, metric, jax.tree.structure(params), seen
    key = seeds.make_key_words(seed, Purpose.FORECAST, 1)

    @cache
    def list_rounds(candidate: Candidate) -> tuple[StepInputs, Any, Any]:
        T, r = candidate
        std = np.float32(compute_noise(federation, tank, T))
        return _list_inputs(finish, T, r, schedule.rounds), std, np.int32(T)

    def list_arguments(candidate: Candidate, i: int) -> tuple[Any, ...]:
        which = np.arange(PAIR * i, PAIR * (i + 1), dtype=np.int32), splits[i]
        return start, rows, which, np.float32(recipe.clip), key, *list_rounds(candidate)

    # Compiled here: JAX's settings are those of a thread, and another one may measure.
    program = _train_pair.lower(*static, *list_arguments((schedule.rounds, 1.0), 0)).compile()

    def measure(candidate: Candidate, i: int) -> float:
        found = program(*list_arguments(candidate, i))
        return float(np.mean(np.asarray(found, np.float64)))

    return measure, most


def compute_noise(federation: Federation, tank: Tank, rounds: int) -> float:
    """Return √(Σ p_i²σ_i²) of a first step whose horizon is `rounds`, for an average cohort.

    Clients that hide their budgets are left out: T and r are published, and must not tell their
    numbers (R9 of docs/protocol.md), not even by the median that limits what others count for.
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
    if np.isnan(federation.capacity).any():
        counted = federation.samples.copy()
        counted[shown] = limit_samples(counted[shown].tolist(), [None] * np.count_nonzero(shown))
        federation = replace(federation, counted=counted)
    weight = weigh_uploads(federation, shown, sigma)
    fewer = np.count_nonzero(shown) / min(terms.per_round, terms.clients)
    return float(average_noise(weight, sigma)) * math.sqrt(fewer)


def _list_inputs(finish: Finish, rounds: int, step: float, most: int) -> StepInputs:
    """Return the optimiser's inputs of T rounds as arrays of length `most`."""
    marks, listed = Marks(step=step), []
    for t in range(rounds):
        listed.append(finish.step_inputs(marks, t, rounds))
        marks = finish.update_marks(marks, t, rounds, math.inf)
    columns: dict[str, Any] = {
        name: np.resize(np.array([getattr(one, name) for one in listed], np.float32), most)
        for name in ("momentum", "scale", "share", "best")
    }
    return StepInputs(**columns, transformation=finish.transformation)


@partial(jax.jit, static_argnums=(0, 1, 2, 3, 4))
def _train_pair(
    model: JaxModel,
    steps: int,
    metric: str | None,
    structure: Any,
    seen: int,
    start: tuple[Leaves, Memory],
    public: tuple[Array, Array, Array],
    which: tuple[Array, Array],
    clip: Array,
    words: Array,
    inputs: StepInputs,
    std: Array,
    rounds: Array,
) -> Array:
    """Train on the first `seen` rows of each split; return what is missing on them and on the rest.

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
        rows = clipping.inspect(model, x[:seen])
        weight, labels = weight[:seen], y[:seen]
        key = jax.random.fold_in(jax.random.wrap_key_data(words), index)

        def play_round(t: Array, carried: tuple[Leaves, Memory]) -> tuple[Leaves, Memory]:
            before, memory = carried
            leaves = before
            for step in range(steps):
                drawn = jax.random.split(jax.random.fold_in(key, t * steps + step), len(leaves))
                total = clipping.clipped_sum(model, make_tree(leaves), rows, labels, weight, clip)
                leaves = {
                    i: leaf - moved + std * jax.random.normal(drawn[i], leaf.shape, leaf.dtype)
                    for (i, leaf), moved in zip(leaves.items(), jax.tree.leaves(total), strict=True)
                }
            now = jax.tree.map(lambda column: column[t], inputs)
            return optimizer.take_step(now, memory, before, leaves)

        newest, memory = jax.lax.fori_loop(0, rounds, play_round, start)
        final = make_tree(optimizer.choose_candidate(memory, newest))
        both = measure(final, x[:seen], y[:seen]), measure(final, x[seen:], y[seen:])
        return jnp.stack(both)

    return jax.vmap(train)(*which)
