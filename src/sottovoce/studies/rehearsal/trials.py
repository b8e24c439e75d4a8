"""Whole federations on the stand-in: each is written down as soon as it is done.

A trial is a function of setting and seed (on a CPU to the last bit), so that a rehearsal that was
stopped goes on by reading what is done, and ends where it would have ended anyway.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sottovoce.data.federated import Given, Samples
from sottovoce.errors import RunError
from sottovoce.models import features
from sottovoce.plan import Plan
from sottovoce.runs.trained import Trained
from sottovoce.server.federation import build
from sottovoce.server.scoring import scores
from sottovoce.simulation.given import adapted
from sottovoce.simulation.interrupts import Interrupts
from sottovoce.simulation.many import simulate_each
from sottovoce.studies.rehearsal.space import Setting, Space, identity
from sottovoce.studies.rehearsal.standin import StandIn
from sottovoce.studies.rehearsal.theorem import Theory, theory

NAME = "runs.jsonl"
NOISE, WITHOUT = "noise", "none"  # a setting that has this is run without the budget's noise
UNBOUNDED = 1e6  # the largest ε of a plan: noise that is nothing beside a step
SITTING = "sitting"  # the key of what a sitting ran on, in the first line of it
COMPILED_S = 10.0  # that the theorem takes to be compiled; of a short time, a tenth of it
PREDICTION, UNNOISED = "prediction", "without noise"  # the stages that are promised at the end
Job = tuple[Setting, int]


class Spent(Exception):
    """The runs or the minutes that were granted are used up."""


@dataclass(frozen=True)
class Trial:
    """One federation: its setting and seed, and what came out on the rows that choose and tell."""

    stage: str
    setting: dict[str, Any]
    seed: int
    loss: float | None  # on the rows that choose; None: not finite
    accuracy: float  # on the rows that choose
    test_accuracy: float  # on the rows that tell
    rounds: int
    seconds: float


class Trials:
    """Runs what is asked and remembers it; `limit` trials in all, and minutes if they are given."""

    def __init__(
        self,
        space: Space,
        fitted: Plan,
        rows: StandIn,
        *,
        limit: int,
        minutes: float | None = None,
        journal: Path | None = None,
        known: Iterable[Trial] = (),
        told: Callable[[Trials], None] | None = None,
    ) -> None:
        """`known` are trials of an earlier sitting; `told` is called after each one."""
        self.space, self.fitted, self.rows = space, fitted, rows
        self.limit, self.minutes, self.journal, self.told = limit, minutes, journal, told
        self.done = {(identity(trial.setting), trial.seed): trial for trial in known}
        self.asked: dict[tuple[str, int], str] = {}  # in the order of asking → stage
        self.settings: dict[str, Setting] = {}
        self.began = time.monotonic()
        self.ran = 0
        self.share = 1.0  # of the minutes, for what is asked now
        self.promised = 0  # federations that are run at the end whatever the clock says
        self._seen: dict[Any, dict[str, tuple[NDArray[np.float32], NDArray[np.int32]]]] = {}

    def ask(self, stage: str, jobs: Sequence[Job], *, reserve: int = 0, must: bool = False) -> None:
        """Have these trials done. Raises `Spent` when what is granted, less `reserve`, is used.

        With `must` they are done in any case: what is promised at the end is not up to the clock.
        """
        fresh: dict[tuple[str, int], Setting] = {}
        for setting, seed in jobs:
            where = identity(setting), seed
            if where not in self.asked:
                fresh[where] = setting
        left = max(0, self.limit - reserve - len(self.asked))
        granted = list(fresh) if must else list(fresh)[:left]
        for where in granted:
            self.asked[where] = stage
            self.settings[where[0]] = fresh[where]
        missing = [where for where in granted if where not in self.done]
        self._run(stage, missing, must)
        if len(granted) < len(fresh):
            raise Spent

    def mean(self, setting: Setting, seeds: Sequence[int]) -> float:
        """The mean accuracy on the rows that choose, over these seeds."""
        return statistics.fmean(self.done[identity(setting), seed].accuracy for seed in seeds)

    def best(self, settings: Iterable[Setting], seeds: Sequence[int]) -> Setting:
        """The best of these: accuracy, then fewer rounds, then the smaller loss."""

        def rank(setting: Setting) -> tuple[float, float, float]:
            own = [self.done[identity(setting), seed] for seed in seeds]
            losses = [float("inf") if trial.loss is None else trial.loss for trial in own]
            rounds = statistics.fmean(trial.rounds for trial in own)
            return -round(self.mean(setting, seeds), 9), rounds, statistics.fmean(losses)

        known = [s for s in settings if all((identity(s), seed) in self.done for seed in seeds)]
        if not known:
            raise Spent
        return min(known, key=rank)

    def tried(self, seeds: Sequence[int]) -> list[Setting]:
        """Every setting that has been tried with all these seeds, in the order of asking."""
        found = dict.fromkeys(key for key, _ in self.asked)
        return [
            self.settings[key]
            for key in found
            if all((key, seed) in self.asked and (key, seed) in self.done for seed in seeds)
        ]

    def all(self) -> list[Trial]:
        """What was asked and done, in the order of asking."""
        return [self.done[where] for where in self.asked if where in self.done]

    def theory(self, setting: Setting, seed: int) -> Theory | None:
        """Theorem 2 for this setting on the stand-in."""
        plan = self._candidate(setting)
        rows = self._rows(_lens(plan, self.rows.shape))
        given = Given(rows["train"], rows["validation"], rows["test"])
        built = build(adapted(_bare(plan), given, None), seed=seed, data=given)
        return theory(built, seed)

    def pace(self) -> float:
        """The seconds of a federation so far, in the mean."""
        seconds = [trial.seconds for trial in self.done.values()]
        return statistics.fmean(seconds) if seconds else 0.0

    def aside(self) -> float:
        """The seconds of what is promised: federations at the pace so far, and the theorem.

        Its descent goes through about as many rows as a federation, and it compiles anew.
        """
        compiled = COMPILED_S if self.minutes is None else min(COMPILED_S, 6 * self.minutes)
        return self.pace() * (self.promised + 1) + compiled

    def left(self) -> float:
        """The seconds that are left at most, at the pace so far."""
        promised = self.aside()
        left = max(promised, self.pace() * (self.limit - len(self.asked)))
        if self.minutes is None:
            return left
        return min(left, max(promised, 60 * self.minutes - (time.monotonic() - self.began)))

    def _late(self) -> bool:
        """Whether time is up for what is asked now; what is promised has its time set aside."""
        if self.minutes is None:
            return False
        granted = 60 * self.minutes - self.aside()
        return time.monotonic() - self.began > granted * self.share

    def _run(self, stage: str, missing: list[tuple[str, int]], must: bool) -> None:
        with Interrupts() as interrupts:
            for keys, seeds in self._groups(missing):
                if self._late() and not must:
                    raise Spent
                rows = self._rows(_lens(self._candidate(self.settings[keys[0]]), self.rows.shape))
                plans = [_bare(self._candidate(self.settings[key])) for key in keys]
                x, y = rows["validation"]
                judges, since = Samples(x.reshape(len(y), -1), y), time.monotonic()
                for i, trained in simulate_each(
                    plans,
                    seeds=seeds,
                    data=rows["train"],
                    validation=rows["validation"],
                    test=rows["test"],
                ):
                    now = time.monotonic()
                    where = keys[i // len(seeds)], seeds[i % len(seeds)]
                    score = scores(trained.model, trained.params, judges)
                    trial = _trial(stage, self.settings[where[0]], trained, score, now - since)
                    self._keep(where, trial)
                    since = now
                    interrupts.check()
                    if self._late() and not must:
                        raise Spent

    def _groups(self, missing: list[tuple[str, int]]) -> list[tuple[list[str], list[int]]]:
        """Settings with the same features and the same seeds, which are run in one go."""
        seeds: dict[str, list[int]] = {}
        for key, seed in missing:
            seeds.setdefault(key, []).append(seed)
        groups: dict[tuple[Any, tuple[int, ...]], list[str]] = {}
        for key, own in seeds.items():
            lens = _lens(self._candidate(self.settings[key]), self.rows.shape)
            groups.setdefault((lens, tuple(own)), []).append(key)
        return [(keys, list(own)) for (_, own), keys in groups.items()]

    def _keep(self, where: tuple[str, int], trial: Trial) -> None:
        self.done[where] = trial
        self.ran += 1
        if trial.stage in (PREDICTION, UNNOISED):
            self.promised = max(0, self.promised - 1)
        if self.journal is not None:
            append(self.journal, asdict(trial))
        if self.told is not None:
            self.told(self)

    def _candidate(self, setting: Setting) -> Plan:
        changes = self.space.changes(setting)
        if setting.get(NOISE) == WITHOUT:
            changes["privacy.epsilon"] = UNBOUNDED
        return self.fitted.replace(**changes)

    def _rows(self, lens: Any) -> dict[str, tuple[NDArray[np.float32], NDArray[np.int32]]]:
        """The stand-in as these features see it, computed once for all trials."""
        if lens not in self._seen:
            shape = self.rows.shape
            parts = {name: getattr(self.rows, name) for name in ("train", "validation", "test")}
            self._seen[lens] = {
                name: (x.reshape(len(x), *shape) if lens is None else lens.apply(x), y)
                for name, (x, y) in parts.items()
            }
        return self._seen[lens]


def _lens(plan: Plan, shape: tuple[int, ...]) -> Any:
    own = plan.model
    return features.build(own.features, shape, own.cell, own.upright, own.colours)


def _trial(
    stage: str, setting: Setting, trained: Trained, score: tuple[float, float], seconds: float
) -> Trial:
    """`score` is of the model that is handed out, which need not be the last round's."""
    told, (loss, accuracy) = trained.record, score
    return Trial(
        stage=stage,
        setting=dict(setting),
        seed=int(told["seed"]),
        loss=loss if math.isfinite(loss) else None,
        accuracy=accuracy,
        test_accuracy=trained.accuracy,
        rounds=trained.rounds_used,
        seconds=round(seconds, 3),
    )


def _bare(plan: Plan) -> Plan:
    """The plan for rows that are features already."""
    if plan.model.features is None:
        return plan
    keys = ("features", "cell", "upright", "colours")
    return plan.replace(**{f"model.{key}": None for key in keys})


def append(path: Path, content: Mapping[str, Any]) -> None:
    """One line more, on the disk before this returns."""
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(content, ensure_ascii=False, allow_nan=False) + "\n")
        file.flush()
        os.fsync(file.fileno())


def begun(
    path: Path, head: Mapping[str, Any], sitting: Mapping[str, str]
) -> tuple[list[Trial], list[dict[str, str]]]:
    """The trials of earlier sittings, and what all sittings ran on, each once, this one the last.

    A new file is begun with `head`, an old one must have it. A line that was being written when
    the process was killed is no trial, and is cut off.
    """
    if not path.exists():
        append(path, {**head, SITTING: sitting})
        return [], [dict(sitting)]
    lines = path.read_text("utf-8").split("\n")
    whole = [line for line in lines[:-1] if line]
    try:
        first, *rest = (json.loads(line) for line in whole)
        found = [Trial(**line) for line in rest if SITTING not in line]
        sat = [line[SITTING] for line in (first, *rest) if SITTING in line]
    except (ValueError, TypeError):
        raise RunError(f"{path} is damaged; remove it and rehearse anew") from None
    if SITTING not in first:
        sat.insert(0, {"version": "unknown", "backend": "unknown"})
    for key in head:
        if first.get(key) != head[key]:
            raise RunError(
                f"{path.parent} was begun with another {key}; resume with the same, or name a new "
                "folder with --out"
            )
    if lines[-1]:
        path.write_text("".join(f"{line}\n" for line in whole), "utf-8")
    if sat[-1] != sitting:
        append(path, {SITTING: sitting})
    distinct = [each for i, each in enumerate(sat) if each not in sat[:i] and each != sitting]
    return found, [*distinct, dict(sitting)]
