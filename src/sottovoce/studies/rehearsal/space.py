"""What is searched: one line a key. A setting is a point of this space: what the plan becomes.

`Ladder`: a number on a geometric scale, open at both ends: where the best value found is the last
one tried, the next is tried. `Fork`: alternatives, each a few keys; the plan's own is one of them.
To search one more key, add a line to `KNOBS`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from sottovoce.data.datasets import DATASETS
from sottovoce.errors import PlanError
from sottovoce.plan import Plan
from sottovoce.plan.section import split_key

Setting: TypeAlias = Mapping[str, Any]  # knob → value of a ladder, or name of a fork's option
Changes: TypeAlias = dict[str, Any]  # plan key → value
ROUNDS, RATE, CLIP = "rounds.rounds", "local.learning_rate", "local.clip"
SCHEDULE = "rounds.schedule"
AS_PLANNED = "as planned"


@dataclass(frozen=True)
class Ladder:
    """A number: the coarse values first, then neighbours, `low` and `high` the last there are."""

    key: str
    coarse: tuple[float, ...]
    low: float
    high: float
    why: str
    whole: bool = False

    def step(self, value: float, ratio: float) -> float | None:
        """The next value up (ratio > 1) or down, or None where the ladder ends.

        >>> Ladder("local.clip", (1.0,), 0.1, 10.0, "").step(1.0, 2), CUT.step(0.015, 0.5)
        (2.0, None)
        """
        next_ = value * ratio
        rounded = _whole(next_) if self.whole else float(f"{next_:.3g}")
        if not self.low <= rounded <= self.high or rounded == value:
            return None
        return rounded


def _whole(value: float) -> float:
    """Rounded; near 10·2^(k/2), that: two steps of √2 end where one of two does.

    >>> [_whole(v) for v in (10 * 2**0.5, 14 * 2**0.5, 57 * 2**0.5, 60.0)]
    [14.0, 20.0, 80.0, 60.0]
    """
    if value < 1:
        return 0.0
    near = 10 * 2 ** (round(2 * math.log2(value / 10)) / 2)
    return float(round(near if abs(near / value - 1) < 0.03 else value))


@dataclass(frozen=True)
class Fork:
    """Alternatives by name. An option is the keys it sets, which may depend on the rounds T."""

    key: str
    options: Mapping[str, Callable[[float], Changes]]
    why: str


CUT = Ladder(CLIP, (1.0,), 0.01, 100.0, "the norm that leaves most signal for the noise it costs")


def _set_keys(**values: Any) -> Callable[[float], Changes]:
    """Return an option that sets the same keys for every T: `_set_keys(model__name="softmax")`."""
    changes = {key.replace("__", "."): value for key, value in values.items()}
    return lambda T: changes


def _grow_shares(g: float) -> Callable[[float], Changes]:
    """Return an option whose noise falls: σ_t = (1 − s·t)·σ₀, s = g/T₀, T₀ = (1 + g)·T."""
    return lambda T: {
        "rounds.schedule": "decaying",
        "rounds.rounds": round(T * (1 + g)),
        "rounds.slope": float(f"{g / round(T * (1 + g)):.3g}"),
    }


def _discount_rounds(beta: float, window: int) -> Callable[[float], Changes]:
    """Return an option with CRD from T₀ = 1.5·T, which stops after about T rounds."""
    return lambda T: {
        "rounds.schedule": "discounted",
        "rounds.rounds": round(1.5 * T),
        "rounds.beta": beta,
        "rounds.window": window,
        "rounds.zeta": 0.0,
    }


_LINEAR = {"model__name": "softmax"}
_HOG = _LINEAR | {"model__features": "hog"}
#: Models of the rows as they are: of a plan with features, without them.
PLAIN: dict[str, dict[str, Any]] = {
    "softmax": _LINEAR,
    "mlp": {"model__name": "mlp", "model__hidden": 32},
}
BODIES: dict[str, Callable[[float], Changes]] = {
    "softmax": _set_keys(**PLAIN["softmax"]),
    "softmax on histograms": _set_keys(**_HOG, model__cell=4, model__upright=False),
    "softmax on upright histograms": _set_keys(**_HOG, model__cell=4, model__upright=True),
    "softmax on finer histograms": _set_keys(**_HOG, model__cell=2, model__upright=False),
    "mlp": _set_keys(**PLAIN["mlp"]),
}
SCHEDULES: dict[str, Callable[[float], Changes]] = {
    "fixed": _set_keys(rounds__schedule="fixed"),
    "growing shares, g = 1/4": _grow_shares(0.25),
    "growing shares, g = 1": _grow_shares(1.0),
    "discounted, β = 0.8": _discount_rounds(0.8, 3),
    "discounted, β = 0.9": _discount_rounds(0.9, 5),
}
WEIGHTS: dict[str, Callable[[float], Changes]] = {
    "samples": _set_keys(server__weights="samples"),
    "precision": _set_keys(server__weights="precision"),
}
DECAYS = {kind: _set_keys(server__decay=kind) for kind in ("linear", "cosine")}
AVERAGES: dict[str, Callable[[float], Changes]] = {
    "tail": _set_keys(server__average="tail", server__tail=0.5),
    "exponential": _set_keys(server__average="exponential", server__keep=0.9),
}
OPTIONAL = ("server.decay", "server.average", "server.momentum")  # that a plan may do without

#: Everything that is searched, in the order of the search.
KNOBS: tuple[Ladder | Fork, ...] = (
    Fork("model", BODIES, "the model and the features that learn most at this noise"),
    Ladder(ROUNDS, (10, 40, 160), 1, 4096, "more rounds learn longer and share the budget", True),
    Ladder(RATE, (0.5, 2.0, 8.0), 1e-4, 1e4, "the step; its noise grows with it"),
    CUT,
    Fork(SCHEDULE, SCHEDULES, "how the budget is shared among the rounds"),
    Fork("server.weights", WEIGHTS, "what an upload counts by"),
    Fork("server.decay", DECAYS, "how the server's steps get shorter, after the noise"),
    Fork("server.average", AVERAGES, "an average of the iterates handed out, after the noise"),
    Fork("server.momentum", {"0.5": _set_keys(server__momentum=0.5)}, "the server's momentum"),
)

#: Two ladders that pull at the same thing: one up while the other goes down.
TRADES = ((ROUNDS, RATE), (CLIP, RATE))


@dataclass(frozen=True)
class Space:
    """The knobs that are free for this plan, with the options that it allows."""

    plan: Plan
    ladders: tuple[Ladder, ...]
    forks: tuple[Fork, ...]

    def start(self) -> dict[str, Any]:
        """The plan as it stands, as a setting."""
        found: dict[str, Any] = {fork.key: AS_PLANNED for fork in self.forks}
        for ladder in self.ladders:
            found[ladder.key] = float(_value(self.plan, ladder.key))
        return found

    def changes(self, setting: Setting) -> Changes:
        """What a setting changes in the plan."""
        T = float(setting.get(ROUNDS, self.plan.rounds.rounds))
        changed: Changes = {}
        for ladder in self.ladders:
            value = setting[ladder.key]
            changed[ladder.key] = int(value) if ladder.whole else float(value)
        for fork in self.forks:
            name = setting[fork.key]
            if name != AS_PLANNED:
                changed |= fork.options[name](T)
        return changed

    def apply_setting(self, setting: Setting) -> Plan:
        """Return the plan with a setting applied."""
        return self.plan.replace(**self.changes(setting))

    def fork(self, key: str) -> Fork | None:
        """Return the fork of this name, if it is free."""
        return next((fork for fork in self.forks if fork.key == key), None)


def space_of(
    plan: Plan,
    keep: Sequence[str] = (),
    *,
    shape: tuple[int, ...] | None = None,
    bodies: bool = True,
) -> Space:
    """What may be changed: everything but the keys (or whole sections) that are to be kept.

    `shape` is that of a row, for the features that need pictures; left out, it is the data set's.
    Without `bodies` the model stays.

    >>> found = space_of(Plan(), ["model", "local.clip", "server"])
    >>> [ladder.key for ladder in found.ladders], [fork.key for fork in found.forks]
    (['rounds.rounds', 'local.learning_rate'], ['rounds.schedule'])
    """
    sections = plan.to_dict()
    known = DATASETS.get(str(plan.data.name))
    shape = known.shape if shape is None and known is not None else shape
    for key in keep:
        _require_known(plan, key)

    def is_kept(key: str) -> bool:
        section, name = split_key(key) if "." in key else ("", key)
        return key in keep or section in keep or (not section and name in keep)

    ladders = tuple(knob for knob in KNOBS if isinstance(knob, Ladder) and not is_kept(knob.key))
    if plan.local.clip == "median":
        ladders = tuple(ladder for ladder in ladders if ladder.key != CLIP)
    forks = []
    for knob in KNOBS:
        if not isinstance(knob, Fork) or is_kept(knob.key):
            continue
        if knob.key == "model" and not (bodies and plan.model.name != "custom"):
            continue
        if knob.key == "server.weights" and not _has_unequal_clients(plan):
            continue
        options = {
            name: option
            for name, option in _options(knob, plan)
            if _is_allowed(plan, option(float(plan.rounds.rounds)), keep, sections, shape or ())
        }
        if options:
            forks.append(Fork(knob.key, options, knob.why))
    return Space(plan, ladders, tuple(forks))


def _options(knob: Fork, plan: Plan) -> Iterator[tuple[str, Callable[[float], Changes]]]:
    """The options of a fork, and what this plan adds to them: to leave out what it has."""
    for name, option in knob.options.items():
        if name in PLAIN and plan.model.features is not None:
            yield name, _set_keys(**PLAIN[name], model__features=None)
        else:
            yield name, option
    if knob.key in OPTIONAL and _value(plan, knob.key) is not None:
        yield "none", lambda T: {knob.key: None}


def _is_allowed(
    plan: Plan,
    changes: Changes,
    keep: Sequence[str],
    before: Mapping[str, Any],
    shape: tuple[int, ...],
) -> bool:
    """Return whether an option makes another valid plan and leaves kept keys alone."""
    try:
        changed = plan.replace(**changes)
    except PlanError:
        return False
    after = changed.to_dict()
    for key in keep:
        section, _, name = key.partition(".")
        one, other = before.get(section), after.get(section)
        if name and isinstance(one, dict) and isinstance(other, dict):
            one, other = one.get(name), other.get(name)
        if one != other:
            return False
    if _steers(changed) and not _steers(plan) and plan.data.validation == 0:
        return False  # by the test rows: what is tested would have had a say in the rounds
    if changed.model.features is not None and not _fits_a_cell(changed.model.cell, shape):
        return False
    own = {k: v for k, v in changes.items() if k != ROUNDS}
    return any(_value(plan, key) != value for key, value in own.items())


def _fits_a_cell(cell: int | None, shape: tuple[int, ...]) -> bool:
    """Features are of pictures; cells of two pixels are for small ones, of four for large ones."""
    return len(shape) >= 2 and 3 <= min(shape[:2]) / (cell or 1) <= 10


def _steers(plan: Plan) -> bool:
    """Whether the server looks at a loss to decide the rounds."""
    return plan.rounds.schedule == "discounted"


def _has_unequal_clients(plan: Plan) -> bool:
    given = (plan.privacy.epsilon, plan.privacy.delta, plan.data.samples)
    return any(isinstance(values, tuple) and len(set(values)) > 1 for values in given)


def _value(plan: Plan, key: str) -> Any:
    section, name = split_key(key)
    return getattr(getattr(plan, section), name)


def _require_known(plan: Plan, key: str) -> None:
    section, _, name = key.partition(".")
    table = getattr(plan, section, None) if section in type(plan).model_fields else None
    if table is None or (name and name not in type(table).model_fields):
        raise PlanError.of(
            "--keep", key, "a key or a section of the plan", "as local.clip, or model"
        )


def identity(setting: Setting) -> str:
    """A setting as one text, the same for the same setting."""
    return json.dumps(dict(setting), sort_keys=True, ensure_ascii=False)


def sort_distinct(values: Sequence[float]) -> list[float]:
    """Return the distinct values in order.

    >>> sort_distinct([8.0, 2.0, 8.0])
    [2.0, 8.0]
    """
    return [float(v) for v in np.unique(np.asarray(values, dtype=float))]
