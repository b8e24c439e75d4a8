"""The space that a rehearsal searches. A setting is a point of it and says what the plan becomes.

A `Ladder` is a number on a geometric scale: where the best value found is the last one tried, the
next one is tried too. A `Fork` is a choice among alternatives, which set a few keys each; to leave
the plan as it is, is one of them. To search one more key, add a line to `KNOBS`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, TypeAlias

from sottovoce.data.datasets import DATASETS
from sottovoce.errors import PlanError
from sottovoce.plan import Plan

Setting: TypeAlias = Mapping[str, Any]  # knob → value of a ladder, or name of a fork's option
Changes: TypeAlias = dict[str, Any]  # plan key → value
Option: TypeAlias = Callable[[float], Changes]  # rounds T → the plan's keys that it sets
ROUNDS, RATE, CLIP = "rounds.rounds", "local.learning_rate", "local.clip"
SCHEDULE = "rounds.schedule"
AS_PLANNED = "as planned"


@dataclass(frozen=True)
class Ladder:
    """A number to choose: coarse values first, then their neighbours, from `low` to `high`."""

    key: str
    coarse: tuple[float, ...]
    low: float
    high: float
    why: str
    whole: bool = False

    def find_next(self, value: float, ratio: float) -> float | None:
        """Return the next value up (ratio > 1) or down, or None where the ladder ends.

        >>> Ladder("local.clip", (1.0,), 0.1, 10.0, "").find_next(1.0, 2), CUT.find_next(0.015, 0.5)
        (2.0, None)
        """
        next_ = value * ratio
        rounded = _round_value(next_) if self.whole else float(f"{next_:.3g}")
        return rounded if self.low <= rounded <= self.high and rounded != value else None

    def list_around(self, value: float, ratio: float) -> list[float]:
        """Return the value between the next ones down and up, as far as the ladder goes."""
        around = (self.find_next(value, 1 / ratio), value, self.find_next(value, ratio))
        return [v for v in around if v is not None]


def _round_value(value: float) -> float:
    """Round to a whole number; close to 10·2^(k/2), to that, so that two steps of √2 make one of 2.

    >>> [_round_value(v) for v in (10 * 2**0.5, 14 * 2**0.5, 57 * 2**0.5, 60.0)]
    [14.0, 20.0, 80.0, 60.0]
    """
    if value < 1:
        return 0.0
    near = 10 * 2 ** (round(2 * math.log2(value / 10)) / 2)
    return float(round(near if abs(near / value - 1) < 0.03 else value))


@dataclass(frozen=True)
class Fork:
    """Alternatives by name."""

    key: str
    options: Mapping[str, Option]
    why: str


CUT = Ladder(CLIP, (1.0,), 0.01, 100.0, "the norm that leaves most signal for the noise it costs")


def _set_keys(**values: Any) -> Option:
    """Return an option that sets the same keys for any T, as `_set_keys(model__name="softmax")`."""
    changes = {key.replace("__", "."): value for key, value in values.items()}
    return lambda T: changes


def _grow_shares(g: float) -> Option:
    """Return an option with growing shares: σ_t = (1 − s·t)·σ₀, s = g/T₀ and T₀ = (1 + g)·T.

    The budget then lasts for about T rounds.
    """
    return lambda T: {
        SCHEDULE: "decaying",
        ROUNDS: round(T * (1 + g)),
        "rounds.slope": float(f"{g / round(T * (1 + g)):.3g}"),
    }


def _discount_rounds(beta: float, window: int) -> Option:
    """Return an option with the discounted schedule from T₀ = 1.5·T, which stops after about T."""
    rule = {"rounds.beta": beta, "rounds.window": window, "rounds.zeta": 0.0}
    return lambda T: {SCHEDULE: "discounted", ROUNDS: round(1.5 * T)} | rule


_LINEAR = {"model__name": "softmax"}
_HOG = _LINEAR | {"model__features": "hog"}
#: Models without features; a plan that has features loses them.
PLAIN: dict[str, dict[str, Any]] = {
    "softmax": _LINEAR,
    "mlp": {"model__name": "mlp", "model__hidden": 32},
}
MODELS: dict[str, Option] = {
    "softmax": _set_keys(**PLAIN["softmax"]),
    "softmax on histograms": _set_keys(**_HOG, model__cell=4, model__upright=False),
    "softmax on upright histograms": _set_keys(**_HOG, model__cell=4, model__upright=True),
    "softmax on finer histograms": _set_keys(**_HOG, model__cell=2, model__upright=False),
    "mlp": _set_keys(**PLAIN["mlp"]),
}
SCHEDULES: dict[str, Option] = {
    "fixed": _set_keys(rounds__schedule="fixed"),
    "growing shares, g = 1/4": _grow_shares(0.25),
    "growing shares, g = 1": _grow_shares(1.0),
    "discounted, β = 0.8": _discount_rounds(0.8, 3),
    "discounted, β = 0.9": _discount_rounds(0.9, 5),
}
WEIGHTS = {kind: _set_keys(server__weights=kind) for kind in ("samples", "precision")}
DECAYS = {kind: _set_keys(server__decay=kind) for kind in ("linear", "cosine")}
AVERAGES: dict[str, Option] = {
    "tail": _set_keys(server__average="tail", server__tail=0.5),
    "exponential": _set_keys(server__average="exponential", server__keep=0.9),
}
OPTIONAL = ("server.decay", "server.average", "server.momentum")  # keys that a plan may leave out

#: Everything that is searched, in the order of the search.
KNOBS: tuple[Ladder | Fork, ...] = (
    Fork("model", MODELS, "the model and the features that learn most at this noise"),
    Ladder(ROUNDS, (10, 40, 160), 1, 4096, "more rounds learn longer and share the budget", True),
    Ladder(RATE, (0.5, 2.0, 8.0), 1e-4, 1e4, "the step; its noise grows with it"),
    CUT,
    Fork(SCHEDULE, SCHEDULES, "how the budget is shared among the rounds"),
    Fork("server.weights", WEIGHTS, "what an upload counts by"),
    Fork("server.decay", DECAYS, "how the server's steps get shorter, after the noise"),
    Fork("server.average", AVERAGES, "an average of the iterates handed out, after the noise"),
    Fork("server.momentum", {"0.5": _set_keys(server__momentum=0.5)}, "the server's momentum"),
)

#: Pairs of ladders with opposite effects: one goes up while the other goes down.
TRADES = ((ROUNDS, RATE), (CLIP, RATE))


@dataclass(frozen=True)
class Space:
    """The knobs that are free for this plan, with the options that it allows."""

    plan: Plan
    ladders: tuple[Ladder, ...]
    forks: tuple[Fork, ...]
    auto: float | None = None  # η by the public rule, `Plan.choose_learning_rate`

    def read_plan(self) -> dict[str, Any]:
        """Return the setting that leaves the plan as it is."""
        setting: dict[str, Any] = {fork.key: AS_PLANNED for fork in self.forks}
        for ladder in self.ladders:
            value = _get_value(self.plan, ladder.key)
            setting[ladder.key] = float(self.plan.local.rate if value == "auto" else value)
        return setting

    def list_defaults(self) -> list[dict[str, Any]]:
        """List the plan as it is, and with η by the public rule and a fixed number of rounds."""
        start = self.read_plan()
        if self.auto is None or RATE not in start:
            return [start]
        ruled = {**self.fix_rounds(start), RATE: self.auto}
        return [start] if ruled == start else [start, ruled]

    def fix_rounds(self, setting: Setting) -> dict[str, Any]:
        """Return the setting with a fixed number of rounds, if that is free to choose.

        A schedule that reacts to noisy losses would hide the effect of T and η; it is tried later.
        """
        fork = self.find_fork(SCHEDULE)
        fixed = fork is not None and "fixed" in fork.options
        return {**setting, SCHEDULE: "fixed"} if fixed else {**setting}

    def list_coarse(self, ladder: Ladder) -> list[float]:
        """List the values to try first: around the plan's where its η follows the public rule."""
        value = self.read_plan()[ladder.key]
        if self.plan.local.rate == self.auto:
            return ladder.list_around(value, 4.0)
        return [float(v) for v in ladder.coarse]

    def list_changes(self, setting: Setting) -> Changes:
        """Return the plan's keys that a setting changes, with their values."""
        T = float(setting.get(ROUNDS, self.plan.rounds.rounds))
        changed: Changes = {}
        for ladder in self.ladders:
            changed[ladder.key] = (int if ladder.whole else float)(setting[ladder.key])
        for fork in self.forks:
            if (name := setting[fork.key]) != AS_PLANNED:
                changed |= fork.options[name](T)
        return changed

    def apply_setting(self, setting: Setting) -> Plan:
        """Return the plan with a setting."""
        return self.plan.replace(**self.list_changes(setting))

    def find_fork(self, key: str) -> Fork | None:
        """Return the fork of this key, or None if it is not free."""
        return next((fork for fork in self.forks if fork.key == key), None)


def build_space(
    plan: Plan,
    keep: Sequence[str] = (),
    *,
    shape: tuple[int, ...] | None = None,
    models: bool = True,
    auto: float | None = None,
) -> Space:
    """Build the space of a plan: all knobs but the keys (or whole sections) to keep.

    `shape` is the shape of a row, for features that need pictures; by default the dataset's.
    Without `models` the model stays. `auto` is η by the public rule.

    >>> found = build_space(Plan(), ["model", "local.clip", "server"])
    >>> [ladder.key for ladder in found.ladders], [fork.key for fork in found.forks]
    (['rounds.rounds', 'local.learning_rate'], ['rounds.schedule'])
    """
    if shape is None:
        known = DATASETS.get(str(plan.data.name))
        shape = () if known is None else known.shape
    for key in keep:
        section, dot, name = key.partition(".")
        table = getattr(plan, section, None) if section in type(plan).model_fields else None
        if table is None or (dot and name not in getattr(type(table), "model_fields", ())):
            remedy = "such as local.clip, or model"
            raise PlanError.of("--keep", key, "a key or a section of the plan", remedy)
    fixed = {*keep}  # keys, and whole sections
    if plan.local.clip == "median":
        fixed.add(CLIP)
    if not models or plan.model.name == "custom":
        fixed.add("model")
    lists = (plan.privacy.epsilon, plan.privacy.delta, plan.data.samples)
    if not any(isinstance(values, tuple) and len(set(values)) > 1 for values in lists):
        fixed.add("server.weights")
    free = [knob for knob in KNOBS if not fixed & {knob.key, knob.key.partition(".")[0]}]
    forks = []
    for knob in free:
        if isinstance(knob, Ladder):
            continue
        options = {
            name: option
            for name, option in _list_options(knob, plan)
            if _is_allowed(plan, option(float(plan.rounds.rounds)), keep, shape)
        }
        if options:
            forks.append(Fork(knob.key, options, knob.why))
    ladders = tuple(knob for knob in free if isinstance(knob, Ladder))
    return Space(plan, ladders, tuple(forks), auto)


def _list_options(knob: Fork, plan: Plan) -> Iterator[tuple[str, Option]]:
    """Yield a fork's options; for an optional key that the plan has, also to leave it out."""
    for name, option in knob.options.items():
        if name in PLAIN and plan.model.features is not None:
            yield name, _set_keys(**PLAIN[name], model__features=None)
        else:
            yield name, option
    if knob.key in OPTIONAL and _get_value(plan, knob.key) is not None:
        yield "none", lambda T: {knob.key: None}


def _is_allowed(plan: Plan, changes: Changes, keep: Sequence[str], shape: tuple[int, ...]) -> bool:
    """Return whether an option gives a valid plan that differs and keeps what is to be kept."""
    try:
        changed = plan.replace(**changes)
    except PlanError:
        return False
    if any(_get_value(plan, key) != _get_value(changed, key) for key in keep):
        return False
    steered, is_steered = (one.rounds.schedule == "discounted" for one in (plan, changed))
    if is_steered and not steered and plan.data.validation == 0:
        return False  # the test rows would decide the number of rounds
    cells = min(shape[:2]) / (changed.model.cell or 1) if len(shape) >= 2 else 0
    if changed.model.features == "hog" and not 3 <= cells <= 10:
        return False  # histograms need a picture of so many cells: neither more nor less
    return any(_get_value(plan, key) != value for key, value in changes.items() if key != ROUNDS)


def _get_value(plan: Plan, key: str) -> Any:
    """Return the value of a key, or a whole section."""
    return attrgetter(key)(plan)


def encode_setting(setting: Setting) -> str:
    """Return a setting as a text that is the same for equal settings."""
    return json.dumps(dict(setting), sort_keys=True, ensure_ascii=False)
