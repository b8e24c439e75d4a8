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

    With `decay` the step of round t of T has the factor s_t, large at first, small when noise
    dominates: linear 1 − t/T, cosine (1 + cos πt/T)/2, root 1/√(1 + t).

    With `keep` κ the final model is a running average, a ← κa + (1 − κ)w; the first 1/(1 − κ)
    iterates get a plain mean, so that w⁰ does not count. With `tail` it is the mean of the iterates
    of the last rounds, this fraction of all.

    >>> Finish().idle, Finish(momentum=0.5, best=True).memory_names
    (True, ('velocity', 'best'))
    >>> [Finish(decay="linear").step_inputs(Marks(), t, 4).scale for t in range(4)]
    [1.0, 0.75, 0.5, 0.25]
    >>> [round(Finish(keep=0.5).step_inputs(Marks(n), n, 9).share, 2) for n in range(3)]
    [1.0, 0.5, 0.5]
    >>> [Finish(tail=0.5).step_inputs(Marks(max(0, t - 2)), t, 4).share for t in range(4)]
    [1.0, 1.0, 1.0, 0.5]
    """

    momentum: float | None = None  # β of v ← βv + (w̄ − w): steps add up, noise adds up less
    decay: DecayKind | None = None
    keep: float | None = None
    tail: float | None = None
    best: bool = False
    transformation: Any = None  # an `OptaxStep`, which has a state of arrays in the memory
    is_step_free: bool = False  # whether `Marks.step` may differ from 1

    def __post_init__(self) -> None:
        if self.transformation is not None and (self.momentum, self.decay) != (None, None):
            raise InputError(
                "optimizer takes the place of server.momentum and server.decay; leave them out and "
                "put them into the transformation"
            )
        for name, remedy in (
            ("momentum", "0.5 doubles a step in the long run"),
            ("keep", "0.9 averages about ten iterates"),
        ):
            if (value := getattr(self, name)) is not None and not 0 < value < 1:
                raise InputError.of(name, value, "above 0 and below 1", remedy)
        if self.tail is not None and not 0 < self.tail <= 1:
            remedy = "0.5 averages the second half"
            raise InputError.of("tail", self.tail, "above 0 and at most 1", remedy)

    @property
    def idle(self) -> bool:
        """Whether there is nothing to do."""
        return not (self.memory_names or self.decay or self.is_step_free)

    @property
    def memory_names(self) -> tuple[str, ...]:
        """The names of what is kept besides the newest model."""
        is_kept = {
            "velocity": self.momentum is not None,
            "average": self.keep is not None or self.tail is not None,
            "best": self.best,
            OPTIMIZER: self.transformation is not None,
        }
        return tuple(name for name, kept in is_kept.items() if kept)

    def begin(self, first: Leaves) -> Memory:
        """Return the memory before the first round."""
        zero = {name: np.zeros_like(leaf) for name, leaf in first.items()}
        memory = {name: zero if name == "velocity" else dict(first) for name in self.memory_names}
        if self.transformation is not None:
            memory[OPTIMIZER] = dict(self.transformation.begin(first))
        return dict(memory)

    def step_inputs(self, marks: Marks, t: int, horizon: int) -> StepInputs:
        """Return the inputs of the step of round t; a horizon below t counts as t + 1.

        >>> Finish(decay="linear").step_inputs(Marks(), 1, 4)
        StepInputs(momentum=0.0, scale=0.75, share=1.0, best=inf, transformation=None)
        """
        done, share = t / max(horizon, t + 1), 1.0
        scales = {"linear": 1 - done, "cosine": (1 + math.cos(math.pi * done)) / 2}
        scales["root"] = 1 / math.sqrt(1 + t)
        if self._is_averaged(t, horizon):
            share = max(1 - (self.keep or 1.0), 1 / (1 + marks.averaged))
        return StepInputs(
            momentum=self.momentum or 0.0,
            scale=marks.step * (1.0 if self.decay is None else scales[self.decay]),
            share=share,
            best=marks.best,
            transformation=self.transformation,
        )

    def _is_averaged(self, t: int, horizon: int) -> bool:
        """Return whether the iterate of round t is averaged: with `tail`, if t + 1 > (1 − tail)·T.

        Before that the newest iterate alone is the average.
        """
        is_late = self.tail is not None and t + 1 > (1 - self.tail) * horizon
        return is_late or self.keep is not None

    def update_marks(self, marks: Marks, t: int, horizon: int, offered: float) -> Marks:
        """Return the marks after round t, whose candidate has the public loss `offered`."""
        if self._is_averaged(t, horizon):
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

        >>> done = Finish(decay="linear").close(
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

        >>> Finish(tail=0.5).describe(Marks(3))
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
            texts.append(f"steps get shorter ({self.decay})")
        if self.keep is not None:
            texts.append(f"the model is a running average of the iterates ({self.keep:g})")
        if self.tail is not None:
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
