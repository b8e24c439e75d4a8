"""The server's optimiser: what the server does with the averaged upload.

    previous model, averaged upload ─(momentum, step)→ next model ─(average, best)→ final model

It costs no privacy. Its inputs are noised uploads and the loss on the validation rows, which are
public or else not covered by the guarantee. A function of these reveals nothing more about a record
that was trained on (differential privacy is closed under post-processing), so that tanks, prices
and σ do not depend on this file.

Arrays are numpy's in a federation and JAX's in the compiled round: the same lines serve both,
because they use only +, − and ×.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np

from sottovoce.errors import InputError

DecayKind: TypeAlias = Literal["linear", "cosine", "root"]
Leaves: TypeAlias = Mapping[Any, Any]  # a model: name → array
Memory: TypeAlias = dict[str, Leaves]  # models kept from round to round: velocity, average, best


@dataclass(frozen=True)
class Decay:
    """s_t, the factor of the step of round t of T: large at first, small when noise dominates.

    linear 1 − t/T, cosine (1 + cos πt/T)/2, root 1/√(1 + t).

    >>> [Decay("linear").scale(t, 4) for t in range(4)]
    [1.0, 0.75, 0.5, 0.25]
    """

    kind: DecayKind

    def scale(self, t: int, horizon: int) -> float:
        """Return s_t; a horizon that shrank below t counts as t + 1."""
        if self.kind == "root":
            return 1 / math.sqrt(1 + t)
        done = t / max(horizon, t + 1)
        return 1 - done if self.kind == "linear" else (1 + math.cos(math.pi * done)) / 2


@dataclass(frozen=True)
class ExponentialAverage:
    """a ← κa + (1 − κ)w; the first 1/(1 − κ) iterates get a plain mean, so that w⁰ does not count.

    >>> [round(ExponentialAverage(0.5).share(n, 0, 1), 2) for n in range(3)]
    [1.0, 0.5, 0.5]
    """

    keep: float

    def __post_init__(self) -> None:
        if not 0 < self.keep < 1:
            remedy = "0.9 averages about ten iterates"
            raise InputError.of("keep", self.keep, "above 0 and below 1", remedy)

    def counts(self, t: int, horizon: int) -> bool:
        """Return whether the iterate of round t is averaged: always."""
        return True

    def share(self, averaged: int, t: int, horizon: int) -> float:
        """Return the weight of the newest iterate after `averaged` others."""
        return max(1 - self.keep, 1 / (1 + averaged))


@dataclass(frozen=True)
class TailAverage:
    """The mean of the iterates of the last rounds, a `fraction` of all.

    >>> [round(TailAverage(0.5).share(max(0, t - 2), t, 4), 2) for t in range(4)]
    [1, 1, 1.0, 0.5]
    """

    fraction: float

    def __post_init__(self) -> None:
        if not 0 < self.fraction <= 1:
            remedy = "0.5 averages the second half"
            raise InputError.of("tail", self.fraction, "above 0 and at most 1", remedy)

    def counts(self, t: int, horizon: int) -> bool:
        """Return whether round t is one of the last: t + 1 > (1 − fraction)·T."""
        return t + 1 > (1 - self.fraction) * horizon

    def share(self, averaged: int, t: int, horizon: int) -> float:
        """Return 1/(1 + averaged) in the last rounds; before them the newest iterate is all."""
        return 1 / (1 + averaged) if self.counts(t, horizon) else 1


OPTIMIZER = "optimizer"  # the name of a transformation's state among the models that are kept


class StepInputs(NamedTuple):
    """Inputs of the server step: scalars for one run, arrays for a batch."""

    momentum: Any  # β, or 0
    scale: Any  # r·s_t, or 1
    share: Any  # weight of the newest iterate in the average, or 1
    best: Any  # the smallest public loss so far
    transformation: Any = None  # a `server.federation.OptaxStep`, in place of momentum and scale


class Marks(NamedTuple):
    """The counters that are kept from round to round."""

    averaged: int = 0
    best: float = math.inf  # public loss of the best model so far
    chosen: int | None = None  # after how many rounds it was made
    step: float = 1.0  # r, the factor of all steps that a forecast found


NO_MARKS = Marks()


class StepResult(NamedTuple):
    """The next model, the memory, and the public loss of the candidate (NaN if not needed)."""

    params: dict[Any, Any]
    memory: Memory
    offered: float


@dataclass(frozen=True)
class Finish:
    """The server's optimiser of a plan; by default the averaged upload is the next model.

    >>> Finish().idle, Finish(momentum=0.5, best=True).memory_names
    (True, ('velocity', 'best'))
    """

    momentum: float | None = None  # β of v ← βv + (w̄ − w): steps add up, noise adds up less
    decay: Decay | None = None
    average: ExponentialAverage | TailAverage | None = None
    best: bool = False
    transformation: Any = None  # an `OptaxStep`, which has a state of arrays in the memory
    is_step_free: bool = False  # whether `Marks.step` may differ from 1

    def __post_init__(self) -> None:
        if self.transformation is not None and (self.momentum, self.decay) != (None, None):
            raise InputError(
                "optimizer takes the place of server.momentum and server.decay; leave them out and "
                "put them into the transformation"
            )
        if self.momentum is not None and not 0 < self.momentum < 1:
            remedy = "0.5 doubles a step in the long run"
            raise InputError.of("momentum", self.momentum, "above 0 and below 1", remedy)

    @property
    def idle(self) -> bool:
        """Whether there is nothing to do."""
        return not (self.memory_names or self.decay or self.is_step_free)

    @property
    def memory_names(self) -> tuple[str, ...]:
        """The names of what is kept besides the newest model."""
        settings: dict[str, Any] = {"velocity": self.momentum, "average": self.average}
        settings |= {"best": self.best or None, OPTIMIZER: self.transformation}
        return tuple(name for name, setting in settings.items() if setting is not None)

    def begin(self, first: Leaves) -> Memory:
        """Return the memory before the first round."""
        zero = {name: np.zeros_like(leaf) for name, leaf in first.items()}
        memory = {name: zero if name == "velocity" else dict(first) for name in self.memory_names}
        if self.transformation is not None:
            memory[OPTIMIZER] = dict(self.transformation.begin(first))
        return dict(memory)

    def step_inputs(self, marks: Marks, t: int, horizon: int) -> StepInputs:
        """Return the inputs of the step of round t.

        >>> Finish(decay=Decay("linear")).step_inputs(Marks(), 1, 4)
        StepInputs(momentum=0.0, scale=0.75, share=1.0, best=inf, transformation=None)
        """
        average = self.average
        return StepInputs(
            momentum=self.momentum or 0.0,
            scale=marks.step * (1.0 if self.decay is None else self.decay.scale(t, horizon)),
            share=1.0 if average is None else float(average.share(marks.averaged, t, horizon)),
            best=marks.best,
            transformation=self.transformation,
        )

    def update_marks(self, marks: Marks, t: int, horizon: int, offered: float) -> Marks:
        """Return the marks after round t, whose candidate has the public loss `offered`."""
        if self.average is not None and self.average.counts(t, horizon):
            marks = marks._replace(averaged=marks.averaged + 1)
        if self.best and offered < marks.best:
            marks = marks._replace(best=offered, chosen=t + 1)
        return marks

    def close(
        self,
        marks: Marks,
        t: int,
        horizon: int,
        memory: Memory,
        previous: Leaves,
        averaged: Leaves,
        loss: Callable[[dict[Any, Any]], float],
    ) -> StepResult:
        """Take the step of round t in numpy; `best` alone needs `loss`, on the public rows.

        >>> done = Finish(decay=Decay("linear")).close(
        ...     Marks(), 2, 4, {}, {"w": np.zeros(1)}, {"w": np.ones(1)}, loss=lambda _: 0.0)
        >>> done.params["w"].tolist()
        [0.5]
        """
        if self.idle:
            return StepResult(dict(averaged), memory, math.nan)
        numbers = self.step_inputs(marks, t, horizon)
        with np.errstate(over="ignore", invalid="ignore"):
            params, memory = take_step(numbers, memory, previous, averaged)
        offered = math.nan
        if self.best:
            offered = loss(dict(choose_candidate(memory, params)))
            memory = keep_better(memory, params, offered < marks.best, np.where)
        return StepResult(params, memory, offered)

    def describe(self, marks: Marks) -> str | None:
        """Describe what was done, for a run record; None if nothing was.

        >>> Finish(average=TailAverage(0.5)).describe(Marks(3))
        'the model is the mean of the last 3 iterates'
        """
        texts = []
        if self.transformation is not None:
            texts.append(f"steps are taken by {self.transformation.name}")
        if marks.step != 1:
            texts.append(f"steps are {marks.step:g} times as long, as was forecast")
        if self.momentum is not None:
            texts.append(f"steps carry on with momentum {self.momentum:g}")
        if self.decay is not None:
            texts.append(f"steps get shorter ({self.decay.kind})")
        if isinstance(self.average, ExponentialAverage):
            texts.append(f"the model is a running average of the iterates ({self.average.keep:g})")
        if isinstance(self.average, TailAverage):
            mean = f"the mean of the last {marks.averaged} iterates"
            texts.append(f"the model is {mean if marks.averaged else 'the newest iterate'}")
        if self.best:
            when = "none was better than the first" if marks.chosen is None else marks.chosen
            chosen = "of all rounds the best one on the validation rows is handed out"
            texts.append(f"{chosen} ({when})")
        return "; ".join(texts) or None


def take_step(
    numbers: StepInputs, memory: Memory, previous: Leaves, averaged: Leaves
) -> tuple[dict[Any, Any], Memory]:
    """Return the next model w + s·v, v = βv + (w̄ − w), and the memory with v and the average.

    >>> one = {"w": np.ones(1)}
    >>> take_step(StepInputs(0.5, 1.0, 1.0, 0.0), {"velocity": one}, one, {"w": np.array([3.0])})[0]
    {'w': array([3.5])}
    """
    moved = {name: averaged[name] - leaf for name, leaf in previous.items()}
    memory = dict(memory)
    if "velocity" in memory:
        old = memory["velocity"]
        moved = {name: numbers.momentum * old[name] + leaf for name, leaf in moved.items()}
        memory["velocity"] = moved
    if numbers.transformation is None:
        new = {name: leaf + numbers.scale * moved[name] for name, leaf in previous.items()}
    else:
        state = memory[OPTIMIZER]
        new, memory[OPTIMIZER] = numbers.transformation.step(state, previous, averaged)
    if "average" in memory:
        old, share = memory["average"], numbers.share
        average = {name: (1 - share) * old[name] + share * leaf for name, leaf in new.items()}
        memory["average"] = average
    return new, memory


def choose_candidate(memory: Memory, newest: Leaves) -> Leaves:
    """Return the model that this round proposes: the average if there is one, else the newest."""
    return memory.get("average", newest)


def keep_better(memory: Memory, newest: Leaves, better: Any, where: Callable[..., Any]) -> Memory:
    """Return the memory with the best model so far; `where` is numpy's or JAX's."""
    offered, old = choose_candidate(memory, newest), memory["best"]
    return memory | {"best": {name: where(better, offered[name], old[name]) for name in old}}


def choose_model(memory: Memory, newest: Leaves) -> Leaves:
    """Return the final model: the best, else the average, else the newest.

    >>> choose_model({"average": {"w": 1}}, {"w": 2})
    {'w': 1}
    """
    return memory.get("best", choose_candidate(memory, newest))
