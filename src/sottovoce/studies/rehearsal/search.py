"""The search of a rehearsal: which settings are tried in which order, and the trials themselves.

docs/rehearsal.md has the seven steps. The plan as given comes first, then the same with η by the
public rule (`choose_learning_rate`). Only the plan's metric on the rows that choose counts, and all
settings have the same seeds, rows and noise.

A trial is a whole federation on the stand-in, and a function of setting and seed (on a CPU to the
last bit). It is stored as soon as it is done: a rehearsal that was stopped reads what is done, and
ends where it would have ended anyway.

`estimate_theory` gives the best T by Theorem 2, as derived in `schedules.algorithms`, with
constants estimated on the stand-in:

    F*   the least mean loss of full gradient descent without noise or clipping, STEPS steps
    Θ    F(w⁰) − F*
    L    the largest eigenvalue of ∇²F, by power iteration at w⁰ and where the descent ends
    μ    the least ½‖∇F‖²/(F − F*) along the first half of the descent (the PL inequality)
    ε̄²   the mean ‖∇F_i − ∇F‖² over clients at w⁰, where not all take part in a round

The theorem covers neither clipping nor steps beyond 1/L. It therefore gets η = min(η chosen, 1/L)
and Δ_i = 2ηC/n_i with that η: a point of comparison for the rehearsed T, not a recommendation.
"""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

from sottovoce.data.federated import Given, Samples
from sottovoce.errors import InputError, RunError
from sottovoce.models import metrics
from sottovoce.models.base import LEAST_SQUARES, JaxModel, predict_numbers
from sottovoce.models.features import NORM
from sottovoce.models.network import KEYS, build_lens
from sottovoce.plan import Plan
from sottovoce.privacy.gaussian import Floats
from sottovoce.runs.trained import Trained
from sottovoce.schedules.algorithms import Bound, Landscape
from sottovoce.schemas import TheoryEntry
from sottovoce.server.federation import Federation, build, score_model
from sottovoce.server.rounds import Interrupts
from sottovoce.simulation.simulate import adapt_plan, simulate_each
from sottovoce.studies import store
from sottovoce.studies.rehearsal.space import (
    AS_PLANNED,
    RATE,
    ROUNDS,
    TRADES,
    Ladder,
    Setting,
    Space,
    encode_setting,
)
from sottovoce.studies.rehearsal.standin import StandIn

STEPS, ROWS, POWERS = 300, 2048, 20


def estimate_theory(federation: Federation, seed: int) -> TheoryEntry | None:
    """Estimate Theorem 2 for a federation; return None where its assumptions cannot be met."""
    model, plan, held = federation.model, federation.plan, federation.held
    if not isinstance(model, JaxModel):
        return None
    params = model.draw_parameters(seed)
    first, restore = ravel_pytree(params)

    def mean_loss(w: jax.Array, x: Any, y: Any) -> jax.Array:
        return jnp.mean(model.loss(restore(w), jnp.asarray(x), jnp.asarray(y)))

    pick = np.random.default_rng(seed).permutation(len(held.train.y))[:ROWS]
    loss = partial(mean_loss, x=held.train.x[pick], y=held.train.y[pick])
    leaves = jax.tree.leaves(params)
    keys = jax.random.split(jax.random.key(0), len(leaves))
    start = jnp.concatenate([
        jax.random.normal(key, (leaf.size,)) for key, leaf in zip(keys, leaves, strict=True)
    ])  # fmt: skip
    divergence = 0.0
    if plan.per_round < plan.clients:
        clients = [held.client(i) for i in range(min(len(held.samples), 50))]
        slopes = np.stack([jax.grad(mean_loss)(first, client.x, client.y) for client in clients])
        divergence = float(np.mean(np.sum((slopes - slopes.mean(axis=0)) ** 2, axis=1)))
    try:
        smoothness = _estimate_smoothness(loss, first, start)
        losses, squares, last = _descend(loss, first, 1 / smoothness)
        smoothness = max(smoothness, _estimate_smoothness(loss, last, start))
        least, head = float(losses.min()), len(losses) // 2
        slopes = squares[:head] / (2 * np.maximum(losses[:head] - least, 1e-12))
        eta = min(plan.local.rate, 1 / smoothness * (1 - 1e-6))
        landscape = Landscape(
            smoothness=smoothness,
            curvature=min(float(slopes.min()), smoothness),
            gap=float(losses[0]) - least,
            learning_rate=eta,
            divergence=divergence,
        )
        bound = Bound.from_derivation(
            landscape,
            sensitivity=federation.sensitivity * (eta / plan.local.rate),
            worth=federation.capacity * federation.terms.honest,
            per_round=plan.per_round,
            dimension=federation.dimension,
        )
    except InputError:  # a loss that does not fall, or is not finite
        return None
    size = {"dimension": federation.dimension, "best_rounds": bound.best_rounds()}
    return cast(TheoryEntry, asdict(landscape) | size)


def _descend(loss: Any, first: jax.Array, rate: float) -> tuple[Floats, Floats, jax.Array]:
    """Return losses and squared gradient norms of full gradient descent, and its last model."""

    def step(w: jax.Array, _: None) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        value, slope = jax.value_and_grad(loss)(w)
        return w - rate * slope, (value, slope @ slope)

    last, (losses, squares) = jax.jit(lambda w: jax.lax.scan(step, w, None, STEPS))(first)
    return np.asarray(losses, float), np.asarray(squares, float), last


def _estimate_smoothness(loss: Any, at: jax.Array, start: jax.Array) -> float:
    def power(v: jax.Array, _: None) -> tuple[jax.Array, jax.Array]:
        curved = jax.jvp(jax.grad(loss), (at,), (v,))[1]
        norm = jnp.linalg.norm(curved)
        return curved / jnp.maximum(norm, 1e-30), norm

    _, norms = jax.jit(lambda v: jax.lax.scan(power, v, None, POWERS))(start)
    return float(norms[-1])


NOISE, WITHOUT = "noise", "none"  # a setting with this key and value is run without noise
UNBOUNDED = 1e6  # the largest ε of a plan: its noise is negligible
SITTING = "sitting"  # the journal's key of what a session ran on
COMPILED_S = 10.0  # seconds to compile the theorem, at most a tenth of the minutes
PREDICTION, UNNOISED = "prediction", "without noise"  # the stages at the end, which always run
Job = tuple[Setting, int]
Where = tuple[str, int]  # a setting, as `encode_setting` writes it, and a seed
PREDICTED = 5  # fresh seeds


class Spent(Exception):
    """The runs or the minutes that were granted are used up."""


@dataclass(frozen=True)
class Trial:
    """One federation: its setting and seed, and its results on the rows that choose and tell."""

    stage: str
    setting: dict[str, Any]
    seed: int
    loss: float | None  # on the rows that choose; None: not finite
    accuracy: float | None  # on the rows that choose; None: a number is predicted
    test_accuracy: float | None  # on the rows that tell
    rounds: int
    seconds: float
    metric: str = "accuracy"  # that chooses: the plan's, or else by the rule of docs/results.md
    gain: float | None = None  # of another metric, on the rows that choose
    error: float | None = None  # its standard error
    test_gain: float | None = None  # the same on the rows that tell
    test_error: float | None = None

    @property
    def value(self) -> float:
        """What the choice makes large, 1 at most."""
        return (self.accuracy or 0.0) if self.gain is None else self.gain

    def estimate_error(self, rows: StandIn) -> float:
        """Return the standard error of `value` on the rows that choose; of shares √(p(1−p)/n)."""
        p = self.value
        if self.error is None:
            return math.sqrt(p * (1 - p) / rows.choosing)
        return self.error * math.sqrt(len(rows.validation[1]) / rows.choosing)

    @property
    def test_value(self) -> float:
        """The same metric on the rows that tell."""
        return (self.test_accuracy or 0.0) if self.test_gain is None else self.test_gain


def format_gain(metric: str, value: float, digits: int = 1) -> str:
    """Return what a trial reached as it is read: shares of rows in per cent.

    >>> format_gain("accuracy", 0.8125), format_gain("auroc", 0.8125)
    ('81.2 %', '0.812')
    """
    if metric in metrics.SHARES:
        return f"{100 * value:.{digits}f} %"
    return f"{value:.{digits + 2}f}"


def format_difference(metric: str, value: float) -> str:
    """Return a difference of what two trials reached.

    >>> format_difference("accuracy", 0.0125), format_difference("auroc", 0.0125)
    ('1.2 points', '0.013')
    """
    return f"{100 * value:.1f} points" if metric in metrics.SHARES else f"{value:.3f}"


class Trials:
    """Run trials and remember them: at most `limit` trials, and `minutes` if they are given."""

    def __init__(
        self,
        space: Space,
        fitted: Plan,
        rows: StandIn,
        *,
        limit: int,
        minutes: float | None = None,
        folder: Path | None = None,
        known: Iterable[Trial] = (),
        on_trial: Callable[[Trials], None] | None = None,
    ) -> None:
        """Begin with the trials `known` from earlier sessions; call `on_trial` after each one."""
        self.space, self.fitted, self.rows = space, fitted, rows
        self.limit, self.minutes, self.folder, self.on_trial = limit, minutes, folder, on_trial
        self.done = {(encode_setting(trial.setting), trial.seed): trial for trial in known}
        self.asked: dict[Where, str] = {}  # → stage, in order
        self.began = time.monotonic()
        self.ran = 0
        self.share = 1.0  # of the minutes, for the current stage
        # Federations that `run_fresh_seeds` will run at the end in any case.
        self.promised = PREDICTED * (1 + (rows.kind == "synthetic"))
        self.on: Executor | None = None  # where trials are computed
        self._seen: dict[Any, Given] = {}

    def run_jobs(
        self, stage: str, jobs: Sequence[Job], *, reserve: int = 0, must: bool = False
    ) -> None:
        """Run these trials; raise `Spent` when the limit, less `reserve`, or the time is used up.

        With `must` they are run in any case.
        """
        fresh = {(encode_setting(setting), seed): setting for setting, seed in jobs}
        fresh = {where: setting for where, setting in fresh.items() if where not in self.asked}
        left = len(fresh) if must else max(0, self.limit - reserve - len(self.asked))
        granted = dict(itertools.islice(fresh.items(), left))
        self.asked |= dict.fromkeys(granted, stage)
        missing = {where: setting for where, setting in granted.items() if where not in self.done}
        self._run_missing(stage, missing, must)
        if len(granted) < len(fresh):
            raise Spent

    def run_fresh_seeds(
        self, setting: Setting, seeds: Sequence[int]
    ) -> tuple[list[Trial], list[Trial] | None]:
        """Run the choice with seeds that did not choose, and on synthetic rows without noise too.

        An accuracy on synthetic rows means nothing, but what noise costs does.
        """
        with_noise = self._run_seeds(PREDICTION, setting, seeds)
        if self.rows.kind != "synthetic":
            return with_noise, None
        return with_noise, self._run_seeds(UNNOISED, {**setting, NOISE: WITHOUT}, seeds)

    def _run_seeds(self, stage: str, setting: Setting, seeds: Sequence[int]) -> list[Trial]:
        self.run_jobs(stage, [(setting, seed) for seed in seeds], must=True)
        return [self.done[encode_setting(setting), seed] for seed in seeds]

    def average_accuracy(self, setting: Setting, seeds: Sequence[int]) -> float:
        """Return the mean accuracy, or other metric, on the rows that choose, over these seeds."""
        return statistics.fmean(self.done[encode_setting(setting), seed].value for seed in seeds)

    def choose_best(self, settings: Iterable[Setting], seeds: Sequence[int]) -> Setting:
        """Return the setting with the best accuracy, then fewest rounds, then smallest loss."""

        def rank(setting: Setting) -> tuple[float, float, float]:
            trials = [self.done[encode_setting(setting), seed] for seed in seeds]
            accuracy = round(self.average_accuracy(setting, seeds), 9)
            rounds = statistics.fmean(trial.rounds for trial in trials)
            losses = (math.inf if trial.loss is None else trial.loss for trial in trials)
            return -accuracy, rounds, statistics.fmean(losses)

        keys = {encode_setting(setting): setting for setting in settings}
        complete = [s for key, s in keys.items() if all((key, seed) in self.done for seed in seeds)]
        if not complete:
            raise Spent
        return min(complete, key=rank)

    def list_trials(self) -> list[Trial]:
        """List the trials of this rehearsal, in order."""
        return [self.done[where] for where in self.asked if where in self.done]

    def estimate_theory(self, setting: Setting, seed: int) -> TheoryEntry | None:
        """Estimate Theorem 2 for this setting on the stand-in."""
        lens, plan = split_features(self._apply_setting(setting), self.rows.shape)
        given = self._prepare_rows(lens)
        return estimate_theory(build(adapt_plan(plan, given, None), seed=seed, data=given), seed)

    def average_seconds(self) -> float:
        """Return the mean seconds of a federation so far, but for the first, which is compiled."""
        seconds = [trial.seconds for trial in self.done.values()] or [0.0]
        return statistics.fmean(seconds[1:]) if len(seconds) > 1 else seconds[0] / 10

    def estimate_reserved(self) -> float:
        """Estimate the seconds of what always runs at the end: federations and the theorem.

        The theorem takes about as long as a federation, and is compiled first.
        """
        compiled = COMPILED_S if self.minutes is None else min(COMPILED_S, 6 * self.minutes)
        return self.average_seconds() * (self.promised + 1) + compiled

    def estimate_seconds_left(self) -> float:
        """Estimate the seconds that are left at most."""
        promised = self.estimate_reserved()
        left = max(promised, self.average_seconds() * (self.limit - len(self.asked)))
        if self.minutes is None:
            return left
        return min(left, max(promised, 60 * self.minutes - (time.monotonic() - self.began)))

    def _is_late(self) -> bool:
        """Return whether the time for the current stage is up; the end has its time reserved."""
        if self.minutes is None:
            return False
        granted = 60 * self.minutes - self.estimate_reserved()
        return time.monotonic() - self.began > granted * self.share

    def _run_missing(self, stage: str, missing: Mapping[Where, Setting], must: bool) -> None:
        with Interrupts() as interrupts:
            for (lens, seeds), group in self._group_jobs(missing).items():
                if self._is_late() and not must:
                    raise Spent
                rows, plans = self._prepare_rows(lens), [plan for _, plan in group]
                x, y = cast(tuple[Any, Any], rows.validation)
                y = y if self.rows.target is None else self.rows.target.scale(y)
                judges, since = Samples(x.reshape(len(y), -1), y), time.monotonic()
                for i, trained in simulate_each(plans, seeds=seeds, given=rows, on=self.on):
                    now, (setting, _) = time.monotonic(), group[i // len(seeds)]
                    trial = self._make_trial(stage, setting, trained, judges, now - since)
                    self._store_trial(trial)
                    since = now
                    interrupts.check()
                    if self._is_late() and not must:
                        raise Spent

    def _group_jobs(
        self, missing: Mapping[Where, Setting]
    ) -> dict[tuple[Any, tuple[int, ...]], list[tuple[Setting, Plan]]]:
        """Group settings by what they are run with in one call: their features and seeds."""
        seeds: dict[str, list[int]] = {}
        for key, seed in missing:
            seeds.setdefault(key, []).append(seed)
        groups: dict[tuple[Any, tuple[int, ...]], list[tuple[Setting, Plan]]] = {}
        for key, some in seeds.items():
            setting = missing[key, some[0]]
            lens, plan = split_features(self._apply_setting(setting), self.rows.shape)
            groups.setdefault((lens, tuple(some)), []).append((setting, plan))
        return groups

    def _make_trial(
        self, stage: str, setting: Setting, trained: Trained, judges: Samples, seconds: float
    ) -> Trial:
        """Make a trial of the final model, which may be an average, on rows that choose."""
        loss, accuracy = score_model(trained.model, trained.params, judges)
        result, target = trained.record["result"], self.rows.target
        metric, gains = result["headline"]["metric"], {}
        if metric != "accuracy":
            if target is None:
                answer = trained.model.answer(trained.params, judges.x)
                measured = metrics.measure_classes(judges.y, *answer)[metric]
            else:
                numbers = target.restore(predict_numbers(trained.model, trained.params, judges.x))
                measured = metrics.measure_regression(target.restore(judges.y), numbers)[metric]
            on_test = result["metrics"][metric]
            # An error in the target's unit is one in shares of its range.
            width = target.high - target.low if target is not None and metric != "r2" else 1.0
            gains = {
                "gain": metrics.to_gain(metric, measured.value, width),
                "error": _keep_finite(measured.error / width),
                "test_gain": metrics.to_gain(metric, on_test["value"], width),
                "test_error": _keep_finite(on_test["error"] / width),
            }
        return Trial(
            stage=stage,
            setting=dict(setting),
            seed=int(trained.record["seed"]),
            loss=_keep_finite(loss),
            accuracy=accuracy if target is None else None,
            test_accuracy=_keep_finite(trained.accuracy),
            rounds=trained.rounds_used,
            seconds=round(seconds, 3),
            metric=metric,
            **gains,
        )

    def _store_trial(self, trial: Trial) -> None:
        self.done[encode_setting(trial.setting), trial.seed] = trial
        self.ran += 1
        if trial.stage in (PREDICTION, UNNOISED):
            self.promised = max(0, self.promised - 1)
        if self.folder is not None:
            store.append_line(self.folder, asdict(trial))
        if self.on_trial is not None:
            self.on_trial(self)

    def _apply_setting(self, setting: Setting) -> Plan:
        changes = self.space.list_changes(setting)
        if setting.get(NOISE) == WITHOUT:
            changes["privacy.epsilon"] = UNBOUNDED
        return self.fitted.replace(**changes)

    def _prepare_rows(self, lens: Any) -> Given:
        """Return the stand-in's rows as these features, computed once for all trials."""
        if lens not in self._seen:
            shape = self.rows.shape
            pairs = {name: getattr(self.rows, name) for name in ("train", "validation", "test")}
            self._seen[lens] = Given(
                **{
                    name: (x.reshape(len(x), *shape) if lens is None else lens.apply(x), y)
                    for name, (x, y) in pairs.items()
                },
                person=self.rows.person,
            )
        return self._seen[lens]


def split_features(plan: Plan, shape: tuple[int, ...]) -> tuple[Any, Plan]:
    """Return what makes the plan's features, if any, and the plan for rows that are features."""
    lens = build_lens(shape, dict(plan.model))
    if lens is None:
        return None, plan
    changes: dict[str, Any] = {f"model.{key}": None for key in KEYS}
    if plan.model.name == LEAST_SQUARES:
        changes["model.norm"] = NORM  # of features; of other rows the plan says it
    return lens, plan.replace(**changes)


def _keep_finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def read_trials(
    folder: Path, head: Mapping[str, Any], sitting: Mapping[str, str]
) -> tuple[list[Trial], list[dict[str, str]]]:
    """Return the trials of earlier sessions, and what each session ran on, this one last.

    A new journal is begun with `head`, an old one must have it.
    """
    if not (folder / store.JOURNAL).exists():
        store.append_line(folder, {**head, SITTING: sitting})
        return [], [dict(sitting)]
    notes: list[dict[str, Any]] = []  # the head, and what each later session ran on

    def parse(line: dict[str, Any]) -> Trial | None:
        if "schema" not in line and SITTING not in line:
            return Trial(**line)
        notes.append(line)
        return None

    trials = [trial for trial in store.read_lines(folder, parse, "rehearse anew") if trial]
    if not notes:
        raise RunError(f"{folder / store.JOURNAL} is damaged; remove it and rehearse anew")
    sat = [note.get(SITTING, {"version": "unknown", "backend": "unknown"}) for note in notes]
    for key in head:
        if notes[0].get(key) != head[key]:
            raise RunError(
                f"{folder} was begun with another {key}; resume with the same, or name a new "
                "folder with --out"
            )
    if sat[-1] != sitting:
        store.append_line(folder, {SITTING: sitting})
    distinct = [note for i, note in enumerate(sat) if note not in sat[:i] and note != sitting]
    return trials, [*distinct, dict(sitting)]


FINALISTS, CONFIRMED = 4, 4  # settings, and seeds of each
LEAST = 40  # runs: with fewer there is nothing to choose from
SEEKING = 0.8  # the share of the minutes before the finalists
MARGIN = 0.001  # the accuracy that a step must gain: less may be the luck of one seed
MOST_STEPS = 8  # of a climb; each is a factor


@dataclass(frozen=True)
class ChosenSetting:
    """The best setting, the seeds that it was chosen by, and whether the search was complete."""

    setting: Setting
    seeds: tuple[int, ...]
    complete: bool


def choose_seeds(seed: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the seeds that choose, and fresh ones that predict.

    >>> choose_seeds(0)
    ((1, 2, 3, 4), (51, 52, 53, 54, 55))
    """
    first, fresh = 100 * seed + 1, 100 * seed + 51
    return tuple(range(first, first + CONFIRMED)), tuple(range(fresh, fresh + PREDICTED))


def search_settings(space: Space, trials: Trials, seed: int = 0) -> ChosenSetting:
    """Search for the setting to recommend."""
    seeking, complete = _Search(space, trials, choose_seeds(seed)[0]), True
    trials.share = SEEKING
    try:
        seeking.run_stages()
    except Spent:
        complete = False
    trials.share = 1.0
    return seeking.confirm_finalists(complete)


class _Search:
    def __init__(self, space: Space, trials: Trials, seeds: tuple[int, ...]) -> None:
        self.space, self.trials, self.seeds = space, trials, seeds
        self.defaults = space.list_defaults()
        self.reserve = PREDICTED + FINALISTS * (CONFIRMED - 1)

    def run_jobs(self, stage: str, settings: Sequence[Setting], count: int = 1) -> None:
        jobs = [(setting, seed) for seed in self.seeds[:count] for setting in settings]
        self.trials.run_jobs(stage, jobs, reserve=self.reserve)

    def choose_best(self, settings: Sequence[Setting], count: int = 1) -> Setting:
        return self.trials.choose_best(settings, self.seeds[:count])

    def run_stages(self) -> None:
        start = self.defaults[0]
        for stage, setting in zip(("as planned", "public rule"), self.defaults, strict=False):
            self.trials.run_jobs(stage, [(setting, self.seeds[0])], must=True)
        best = self.compare_models(start)
        best = self.climb("steps of two", best, 2.0)
        best = self.compare_options(best)
        best = self.search_grid(best)
        self.climb("steps of √2", best, 2**0.5, count=2, most=2)

    def compare_models(self, start: Setting) -> Setting:
        fork, plain = self.space.find_fork("model"), self.space.fix_rounds(start)
        names = () if fork is None else (AS_PLANNED, *fork.options)
        models = [{**plain, "model": name} for name in names] or [plain]
        ladders = _list_grid_ladders(self.space)  # of T and η, without those that are kept
        coarse = itertools.product(*map(self.space.list_coarse, ladders))
        keys = [ladder.key for ladder in ladders]
        crossed = [dict(zip(keys, values, strict=True)) for values in coarse]
        tried = [[{**model, **pair} for pair in _pick_trade_offs(crossed)] for model in models]
        self.run_jobs("models", list(itertools.chain(*tried)))
        reached = [self._average_accuracy(self.choose_best(settings)) for settings in tried]
        ranked = sorted(range(len(models)), key=lambda i: -reached[i])
        kept = [models[i] for i in ranked[: (len(models) + 1) // 2]]
        grids = [{**model, **pair} for model in kept for pair in crossed]
        self.run_jobs("coarse grid", grids)
        return self.choose_best([*self.defaults, *grids])

    def climb(
        self, stage: str, best: Setting, ratio: float, count: int = 1, most: int = MOST_STEPS
    ) -> Setting:
        self.run_jobs(stage, [best], count)
        for _ in range(most):
            around = list(_list_neighbours(self.space, best, ratio))
            self.run_jobs(stage, around)
            if count > 1 and around:  # the better half earns more seeds
                around.sort(key=lambda s: -self._average_accuracy(s))
                around = around[: (len(around) + 1) // 2]
                self.run_jobs(stage, around, count)
            new = self.choose_best([best, *around], count)
            if self._average_accuracy(new, count) < self._average_accuracy(best, count) + MARGIN:
                break
            best = new
        return best

    def compare_options(self, best: Setting) -> Setting:
        for fork in (fork for fork in self.space.forks if fork.key != "model"):
            other = [{**best, fork.key: name} for name in (AS_PLANNED, *fork.options)]
            self.run_jobs(fork.key, other, count=2)
            best = self.choose_best([best, *other], count=2)
        return best

    def search_grid(self, best: Setting) -> Setting:
        """Try all pairs (T, η) around the best, and more where the best is at the edge."""
        ladders = {ladder.key: ladder for ladder in _list_grid_ladders(self.space)}
        axes = {key: knob.list_around(float(best[key]), 2.0) for key, knob in ladders.items()}
        for _ in range(MOST_STEPS):
            pairs = itertools.product(*axes.values())
            points = [{**best, **dict(zip(axes, pair, strict=True))} for pair in pairs]
            self.run_jobs("grid", points)
            best = self.choose_best([best, *points])
            grown = False
            for key, values in axes.items():
                at = float(best[key])
                for edge, ratio in ((values[0], 0.5), (values[-1], 2.0)):
                    further = ladders[key].find_next(at, ratio) if at == edge else None
                    if further is not None and further not in values:
                        axes[key] = sorted({*values, further})
                        grown = True
            if not grown:
                break
        return best

    def confirm_finalists(self, complete: bool) -> ChosenSetting:
        """Try the finalists with as many seeds as there is time for, and return the best.

        On synthetic rows the plan as given, or with the public rule, is among them, and stays
        unless another is better by a standard error.
        """
        trials, seeds = self.trials, self.seeds[:1]

        def rank(setting: Setting, average: Callable[[Setting], float]) -> tuple[float, int]:
            rounds = trials.done[encode_setting(setting), self.seeds[0]].rounds
            return -average(setting), rounds

        def average_known(setting: Setting) -> float:  # two good runs rank above a lucky one
            key = encode_setting(setting)
            done = [s for s in self.seeds if (key, s) in trials.done and (key, s) in trials.asked]
            return trials.average_accuracy(setting, done)

        where = [w for w in trials.asked if w[1] == self.seeds[0] and w in trials.done]
        ranked: list[Setting] = [trials.done[w].setting for w in where]
        ranked = sorted(ranked, key=lambda s: rank(s, self._average_accuracy))[: 4 * FINALISTS]
        ranked.sort(key=lambda s: rank(s, average_known))
        default, finalists = self.choose_best(self.defaults), ranked[:FINALISTS]
        is_made_up = trials.rows.kind == "synthetic"  # small differences say nothing of real rows
        if is_made_up and default not in finalists:
            finalists = [*ranked[: FINALISTS - 1], default]
        try:
            for count in range(2, CONFIRMED + 1):
                jobs = [(s, seed) for seed in self.seeds[:count] for s in finalists]
                trials.run_jobs("finalists", jobs, reserve=PREDICTED)
                seeds = self.seeds[:count]
        except Spent:
            complete = False
        best = trials.choose_best(finalists, seeds)
        if is_made_up:
            error = trials.done[encode_setting(best), seeds[0]].estimate_error(trials.rows)
            near = trials.average_accuracy(best, seeds) - error
            best = default if trials.average_accuracy(default, seeds) >= near else best
        return ChosenSetting(best, seeds, complete)

    def _average_accuracy(self, setting: Setting, count: int = 1) -> float:
        return self.trials.average_accuracy(setting, self.seeds[:count])


def _list_grid_ladders(space: Space) -> list[Ladder]:
    return [ladder for ladder in space.ladders if ladder.key in (ROUNDS, RATE)]


def _pick_trade_offs(pairs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return pairs from few rounds with long steps to many with short ones; all if one is kept."""
    if not pairs or len(pairs[0]) < 2:
        return pairs
    rounds, rates = (sorted({pair[key] for pair in pairs}) for key in (ROUNDS, RATE))
    return [{ROUNDS: T, RATE: eta} for T, eta in zip(rounds, reversed(rates), strict=False)]


def _list_neighbours(space: Space, best: Setting, ratio: float) -> Iterator[dict[str, Any]]:
    free = {ladder.key: ladder for ladder in space.ladders}
    for ladder in free.values():
        for r in (ratio, 1 / ratio):
            value = ladder.find_next(float(best[ladder.key]), r)
            if value is not None:
                yield {**best, ladder.key: value}
    for first, second in TRADES:
        if first in free and second in free:
            for r in (ratio, 1 / ratio):
                up = free[first].find_next(float(best[first]), r)
                down = free[second].find_next(float(best[second]), 1 / r)
                if up is not None and down is not None:
                    yield {**best, first: up, second: down}
