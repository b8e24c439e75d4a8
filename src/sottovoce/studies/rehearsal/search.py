"""Which settings are tried, and in which order: coarse to fine, the better half each time.

1. every model and kind of features at three pairs (T, η) that trade rounds for length of step,
   with a fixed number of rounds; the better half of them at all nine pairs;
2. from the best one, steps of a factor two in T, η and C (and in two of them against each other)
   while they gain a tenth of a point: no end of a range stops them;
3. the other schedules and weights;
4. the whole grid (T, η) around the best; where the best lies on its edge, it grows there;
5. steps of √2, with two seeds;
6. the best few with more seeds. The best mean wins; of equals, the one with fewer rounds.

Only accuracies on rows that choose are looked at. Same seeds, same rows and noise for all.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from sottovoce.studies.rehearsal.space import (
    AS_PLANNED,
    RATE,
    ROUNDS,
    SCHEDULE,
    TRADES,
    Ladder,
    Setting,
    Space,
    identity,
    spaced,
)
from sottovoce.studies.rehearsal.trials import Spent, Trials

FINALISTS, CONFIRMED = 4, 4  # settings, and seeds of each
PREDICTED = 5  # fresh seeds
LEAST = 40  # runs below which there is nothing to choose from
SEEKING = 0.8  # of the minutes; the rest is for the finalists
MARGIN = 0.001  # of accuracy that a step must gain: less is the luck of one seed
MOST_STEPS = 8  # of a climb: each is a factor, so this is far


@dataclass(frozen=True)
class Found:
    """The choice, the seeds that made it, and whether the search came to its end by itself."""

    setting: Setting
    seeds: tuple[int, ...]
    complete: bool


def seeds_of(seed: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The seeds that choose, and the fresh ones that predict.

    >>> seeds_of(0)
    ((1, 2, 3, 4), (51, 52, 53, 54, 55))
    """
    base = 100 * seed
    return tuple(range(base + 1, base + 1 + CONFIRMED)), tuple(
        range(base + 51, base + 51 + PREDICTED)
    )


def search(space: Space, trials: Trials, seed: int = 0) -> Found:
    """The setting to be recommended."""
    choosing, _ = seeds_of(seed)
    seeking = _Search(space, trials, choosing)
    complete = True
    try:
        trials.share = SEEKING
        seeking.all()
    except Spent:
        complete = False
    trials.share = 1.0
    return seeking.confirmed(complete)


class _Search:
    def __init__(self, space: Space, trials: Trials, seeds: tuple[int, ...]) -> None:
        self.space, self.trials, self.seeds = space, trials, seeds
        self.reserve = PREDICTED + FINALISTS * (CONFIRMED - 1)

    def ask(self, stage: str, settings: Sequence[Setting], count: int = 1) -> None:
        jobs = [(setting, seed) for seed in self.seeds[:count] for setting in settings]
        self.trials.ask(stage, jobs, reserve=self.reserve)

    def best(self, settings: Sequence[Setting], count: int = 1) -> Setting:
        return self.trials.best(settings, self.seeds[:count])

    def all(self) -> None:
        start = self.space.start()
        self.trials.ask("as planned", [(start, self.seeds[0])], must=True)
        best = self.bodies(start)
        best = self.climb("steps of two", best, 2.0)
        best = self.forks(best)
        best = self.grid(best)
        self.climb("steps of √2", best, 2**0.5, count=2, most=2)

    def bodies(self, start: Setting) -> Setting:
        fork = self.space.fork("model")
        names = [AS_PLANNED] if fork is None else [AS_PLANNED, *fork.options]
        plain = _steady(self.space, start)
        every = {name: plain if fork is None else {**plain, "model": name} for name in names}
        crossed = list(_crossed(self.space))
        traded = _traded(crossed)
        tried = {name: [{**body, **pair} for pair in traded] for name, body in every.items()}
        self.ask("models", [s for own in tried.values() for s in own])
        ranked = sorted(names, key=lambda name: -self._score(self.best(tried[name])))
        kept = ranked[: max(1, (len(ranked) + 1) // 2)]
        grids = [{**every[name], **pair} for name in kept for pair in crossed]
        self.ask("coarse grid", grids)
        return self.best([start, *grids])

    def climb(
        self, stage: str, best: Setting, ratio: float, count: int = 1, most: int = MOST_STEPS
    ) -> Setting:
        self.ask(stage, [best], count)
        for _ in range(most):
            around = list(_neighbours(self.space, best, ratio))
            self.ask(stage, around)
            if count > 1 and around:  # the better half earns more seeds
                around.sort(key=lambda s: -self._score(s))
                around = around[: (len(around) + 1) // 2]
                self.ask(stage, around, count)
            new = self.best([best, *around], count)
            if self._score(new, count) < self._score(best, count) + MARGIN:
                break
            best = new
        return best

    def forks(self, best: Setting) -> Setting:
        for fork in self.space.forks:
            if fork.key == "model":
                continue
            other = [{**best, fork.key: name} for name in (AS_PLANNED, *fork.options)]
            self.ask(fork.key, other, count=2)
            best = self.best([best, *other], count=2)
        return best

    def grid(self, best: Setting) -> Setting:
        """All pairs (T, η) around the best, grown where the best lies on the edge."""
        axes = {
            ladder.key: _around(ladder, float(best[ladder.key]))
            for ladder in self.space.ladders
            if ladder.key in (ROUNDS, RATE)
        }
        ladders = {ladder.key: ladder for ladder in self.space.ladders}
        for _ in range(MOST_STEPS):
            pairs = itertools.product(*axes.values())
            points = [{**best, **dict(zip(axes, pair, strict=True))} for pair in pairs]
            self.ask("grid", points)
            best = self.best([best, *points])
            grown = False
            for key, values in axes.items():
                at = float(best[key])
                for edge, ratio in ((values[0], 0.5), (values[-1], 2.0)):
                    further = ladders[key].step(at, ratio) if at == edge else None
                    if further is not None and further not in values:
                        axes[key] = spaced([*values, further])
                        grown = True
            if not grown:
                break
        return best

    def confirmed(self, complete: bool) -> Found:
        """The finalists with as many seeds as can be had, each with the same."""
        first = self.seeds[:1]
        tried = self.trials.tried(first)
        if not tried:
            raise Spent
        known = sorted(tried, key=lambda s: (-self._score(s), self._rounds(s)))[: 4 * FINALISTS]
        known.sort(key=lambda s: (-self._known(s), self._rounds(s)))
        finalists = known[:FINALISTS]
        seeds = first
        try:
            for count in range(2, CONFIRMED + 1):
                jobs = [(s, seed) for seed in self.seeds[:count] for s in finalists]
                self.trials.ask("finalists", jobs, reserve=PREDICTED)
                seeds = self.seeds[:count]
        except Spent:
            complete = False
        return Found(self.trials.best(finalists, seeds), seeds, complete)

    def _score(self, setting: Setting, count: int = 1) -> float:
        return self.trials.mean(setting, self.seeds[:count])

    def _rounds(self, setting: Setting) -> int:
        return self.trials.done[identity(setting), self.seeds[0]].rounds

    def _known(self, setting: Setting) -> float:
        """The mean over the seeds there are: one lucky run ranks below two good ones."""
        done = [s for s in self.seeds if (identity(setting), s) in self.trials.done]
        done = [s for s in done if (identity(setting), s) in self.trials.asked]
        return self.trials.mean(setting, done)


def _steady(space: Space, start: Setting) -> Setting:
    """The plan with a fixed number of rounds, where that is free to choose.

    A schedule that reacts to the noise of its losses would blur what T and η do; it is tried later.
    """
    fork = space.fork(SCHEDULE)
    return {**start, SCHEDULE: "fixed"} if fork is not None and "fixed" in fork.options else start


def _crossed(space: Space) -> Iterator[dict[str, Any]]:
    """All coarse pairs (T, η); of a kept one the planned value alone."""
    own = [ladder for ladder in space.ladders if ladder.key in (ROUNDS, RATE)]
    for values in itertools.product(*(ladder.coarse for ladder in own)):
        yield {ladder.key: float(v) for ladder, v in zip(own, values, strict=True)}


def _traded(pairs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Few rounds with long steps to many with short ones, or all where one of the two is kept."""
    if not pairs or len(pairs[0]) < 2:
        return pairs
    rounds, rates = (spaced([pair[key] for pair in pairs]) for key in (ROUNDS, RATE))
    return [{ROUNDS: T, RATE: eta} for T, eta in zip(rounds, reversed(rates), strict=True)]


def _neighbours(space: Space, best: Setting, ratio: float) -> Iterator[dict[str, Any]]:
    free = {ladder.key: ladder for ladder in space.ladders}
    for ladder in free.values():
        for r in (ratio, 1 / ratio):
            value = ladder.step(float(best[ladder.key]), r)
            if value is not None:
                yield {**best, ladder.key: value}
    for one, other in TRADES:
        if one in free and other in free:
            for r in (ratio, 1 / ratio):
                up = free[one].step(float(best[one]), r)
                down = free[other].step(float(best[other]), 1 / r)
                if up is not None and down is not None:
                    yield {**best, one: up, other: down}


def _around(ladder: Ladder, value: float) -> list[float]:
    low, high = ladder.step(value, 0.5), ladder.step(value, 2.0)
    return spaced([v for v in (low, value, high) if v is not None])
