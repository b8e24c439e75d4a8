"""What the server does with the averaged upload once it has come: small values, composed.

    previous model, averaged upload ─(momentum, decay)→ next model ─(average, best)→ handed out

All of it is free. Its inputs are what clients have released, with their noise in it, and the loss
on the validation rows, which are public or else not covered by the guarantee; a function of these
tells nothing more about a record that was trained on (privacy survives post-processing). Tanks,
prices and σ do not know that this file exists.

Arrays here are numpy's in a federation and JAX's in the compiled round: only + − × are used on
them, so that both are the same few lines.
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
Memory: TypeAlias = dict[str, Leaves]  # what is kept from round to round: part → model


@dataclass(frozen=True)
class Momentum:
    """v ← βv + (w̄ − w): steps in the same direction add up, noise does so less.

    >>> Momentum(0.9).beta
    0.9
    """

    beta: float

    def __post_init__(self) -> None:
        if not 0 < self.beta < 1:
            raise InputError.of(
                "momentum", self.beta, "above 0 and below 1", "0.5 doubles a step in the long run"
            )


@dataclass(frozen=True)
class Decay:
    """s_t, by which the step of round t of T is shortened: long at first, short when noise rules.

    linear 1 − t/T, cosine (1 + cos πt/T)/2, root 1/√(1 + t).

    >>> [Decay("linear").scale(t, 4) for t in range(4)]
    [1.0, 0.75, 0.5, 0.25]
    """

    kind: DecayKind

    def scale(self, t: int, horizon: int) -> float:
        """s_t; a horizon that shrank below t counts as t + 1."""
        if self.kind == "root":
            return 1 / math.sqrt(1 + t)
        done = t / max(horizon, t + 1)
        return 1 - done if self.kind == "linear" else (1 + math.cos(math.pi * done)) / 2


@dataclass(frozen=True)
class ExponentialAverage:
    """a ← κa + (1 − κ)w; of the first 1/(1 − κ) iterates the plain mean, so that w⁰ has no part.

    >>> [round(ExponentialAverage(0.5).share(n, 0, 1), 2) for n in range(3)]
    [1.0, 0.5, 0.5]
    """

    keep: float

    def __post_init__(self) -> None:
        if not 0 < self.keep < 1:
            raise InputError.of(
                "keep", self.keep, "above 0 and below 1", "0.9 averages about ten iterates"
            )

    def counts(self, t: int, horizon: int) -> bool:
        """Whether the iterate of round t is averaged: each is."""
        return True

    def share(self, averaged: int, t: int, horizon: int) -> float:
        """What the newest iterate counts after `averaged` others."""
        return max(1 - self.keep, 1 / (1 + averaged))


@dataclass(frozen=True)
class TailAverage:
    """The mean of the iterates of the last part of the rounds.

    >>> [round(TailAverage(0.5).share(max(0, t - 2), t, 4), 2) for t in range(4)]
    [1, 1, 1.0, 0.5]
    """

    part: float

    def __post_init__(self) -> None:
        if not 0 < self.part <= 1:
            raise InputError.of(
                "tail", self.part, "above 0 and at most 1", "0.5 averages the second half"
            )

    def counts(self, t: int, horizon: int) -> bool:
        """Whether round t is one of the last: t + 1 > (1 − part)·T."""
        return t + 1 > (1 - self.part) * horizon

    def share(self, averaged: int, t: int, horizon: int) -> float:
        """1/(1 + averaged) of the last rounds; before them the newest iterate stands for all."""
        return 1 / (1 + averaged) if self.counts(t, horizon) else 1


class Numbers(NamedTuple):
    """What a round's arithmetic needs, a number each; of a batch an array each."""

    momentum: Any  # β, or 0
    scale: Any  # s_t, or 1
    share: Any  # of the newest iterate in the average, or 1
    best: Any  # the public loss to beat


class Marks(NamedTuple):
    """The numbers that are kept from round to round."""

    averaged: int = 0
    best: float = math.inf  # public loss of the best model so far
    chosen: int | None = None  # after how many rounds it was made


NO_MARKS = Marks()


class Closed(NamedTuple):
    """After a round: the next model, what is kept, and the loss of what would be handed out."""

    params: dict[Any, Any]
    memory: Memory
    offered: float


@dataclass(frozen=True)
class Finish:
    """The parts that a plan names; without any, the averaged upload is the next model.

    >>> Finish().idle, Finish(momentum=Momentum(0.5), best=True).parts
    (True, ('velocity', 'best'))
    """

    momentum: Momentum | None = None
    decay: Decay | None = None
    average: ExponentialAverage | TailAverage | None = None
    best: bool = False

    @property
    def idle(self) -> bool:
        """Whether there is nothing to do."""
        return not self.parts and self.decay is None

    @property
    def parts(self) -> tuple[str, ...]:
        """The models that are kept beside the newest."""
        kept = {"velocity": self.momentum, "average": self.average, "best": self.best or None}
        return tuple(name for name, part in kept.items() if part is not None)

    def begin(self, first: Leaves) -> Memory:
        """The memory before the first round."""
        still = {name: np.zeros_like(leaf) for name, leaf in first.items()}
        return {part: still if part == "velocity" else dict(first) for part in self.parts}

    def numbers(self, marks: Marks, t: int, horizon: int) -> Numbers:
        """Those of round t.

        >>> Finish(decay=Decay("linear")).numbers(Marks(), 1, 4)
        Numbers(momentum=0.0, scale=0.75, share=1.0, best=inf)
        """
        own = self.average
        return Numbers(
            momentum=0.0 if self.momentum is None else self.momentum.beta,
            scale=1.0 if self.decay is None else self.decay.scale(t, horizon),
            share=1.0 if own is None else float(own.share(marks.averaged, t, horizon)),
            best=marks.best,
        )

    def marked(self, marks: Marks, t: int, horizon: int, offered: float) -> Marks:
        """The marks after round t, whose model on offer has this public loss."""
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
    ) -> Closed:
        """Round t in numpy; `loss` is that on the server's public rows, asked for `best` alone.

        >>> done = Finish(decay=Decay("linear")).close(
        ...     Marks(), 2, 4, {}, {"w": np.zeros(1)}, {"w": np.ones(1)}, loss=lambda _: 0.0)
        >>> done.params["w"].tolist()
        [0.5]
        """
        if self.idle:
            return Closed(dict(averaged), memory, math.nan)
        numbers = self.numbers(marks, t, horizon)
        with np.errstate(over="ignore", invalid="ignore"):
            params, memory = step(numbers, memory, previous, averaged)
        offered = math.nan
        if self.best:
            offered = loss(dict(on_offer(memory, params)))
            memory = keep_better(memory, params, offered < marks.best, np.where)
        return Closed(params, memory, offered)

    def words(self, marks: Marks) -> str | None:
        """What was done, for a record and its reader; None where nothing was.

        >>> Finish(average=TailAverage(0.5)).words(Marks(3))
        'the model is the mean of the last 3 iterates'
        """
        said = []
        if self.momentum is not None:
            said.append(f"steps carry on with momentum {self.momentum.beta:g}")
        if self.decay is not None:
            said.append(f"steps get shorter ({self.decay.kind})")
        if isinstance(self.average, ExponentialAverage):
            said.append(f"the model is a running average of the iterates ({self.average.keep:g})")
        if isinstance(self.average, TailAverage):
            some = f"the mean of the last {marks.averaged} iterates"
            said.append(f"the model is {some if marks.averaged else 'the newest iterate'}")
        if self.best:
            when = "none was better than the first" if marks.chosen is None else marks.chosen
            said.append(f"of all rounds the best one on the validation rows is handed out ({when})")
        return "; ".join(said) or None


def step(
    numbers: Numbers, memory: Memory, previous: Leaves, averaged: Leaves
) -> tuple[dict[Any, Any], Memory]:
    """The next model w + s·v with v = βv + (w̄ − w), and the memory with v and the average in it.

    >>> one = {"w": np.ones(1)}
    >>> step(Numbers(0.5, 1.0, 1.0, 0.0), {"velocity": one}, one, {"w": np.array([3.0])})[0]
    {'w': array([3.5])}
    """
    moved = {name: averaged[name] - leaf for name, leaf in previous.items()}
    memory = dict(memory)
    if "velocity" in memory:
        old = memory["velocity"]
        moved = {name: numbers.momentum * old[name] + leaf for name, leaf in moved.items()}
        memory["velocity"] = moved
    new = {name: leaf + numbers.scale * moved[name] for name, leaf in previous.items()}
    if "average" in memory:
        old = memory["average"]
        memory["average"] = {
            name: (1 - numbers.share) * old[name] + numbers.share * leaf
            for name, leaf in new.items()
        }
    return new, memory


def on_offer(memory: Memory, newest: Leaves) -> Leaves:
    """What could be handed out after this round: the average where there is one."""
    return memory.get("average", newest)


def keep_better(memory: Memory, newest: Leaves, better: Any, where: Callable[..., Any]) -> Memory:
    """The memory with the best model so far; `where` is numpy's or JAX's."""
    offered, old = on_offer(memory, newest), memory["best"]
    return memory | {"best": {name: where(better, offered[name], old[name]) for name in old}}


def handed(memory: Memory, newest: Leaves) -> Leaves:
    """The model that is handed out: the best, else the average, else the newest.

    >>> handed({"average": {"w": 1}}, {"w": 2})
    {'w': 1}
    """
    return memory.get("best", on_offer(memory, newest))
