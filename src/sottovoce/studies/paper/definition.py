"""The definitions of figures, read from TOML: settings, methods, axes and claims.

A figure names a setting (which data, which model, what the paper leaves open) and what is swept:
up to three axes, `x` along the figure, `line` one curve each, `panel` one picture each. An axis
sweeps a key of the plan, or `method`, which stands for several keys (`methods.toml`). Figures come
in two variants: `printed`, as the paper does it, and `corrected`, at an exact guarantee.

A figure becomes one cell with a plan for every point of every variant. Of several changes to the
same key the last one counts, in this order: the setting's plan, its variant, the figure's plan, its
corrected version, the method, the quick version, the axes, and what a search tries.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import math
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, dataclass, field, fields
from functools import cached_property
from importlib import resources
from itertools import product
from typing import Any, Literal, TypeVar, get_args

from sottovoce._version import __version__
from sottovoce.errors import InputError
from sottovoce.plan import Plan
from sottovoce.privacy import gaussian

SEARCHED = "rounds.rounds"
REFERENCE = "reference"  # in place of x: the search that a figure refers to
AXES = ("panel", "line", "x")


@dataclass(frozen=True)
class Cell:
    """One point of a figure: where it stands and the plan that is run there with every seed."""

    variant: Variant
    panel: Any
    line: Any
    x: Any
    search: int | None  # which T, where the method tries several
    plan: Plan

    @cached_property
    def key(self) -> str:
        """What names the plan: figures that need the same run share it."""
        text = json.dumps([__version__, self.plan.to_dict()], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    @property
    def place(self) -> tuple[Any, Any, Any]:
        """Panel, line and x."""
        return self.panel, self.line, self.x


def seeds_of(figure: Figure, quick: bool) -> list[int]:
    """Return the seeds of a figure: 1, 2, … (η and C were chosen on others)."""
    count = load_setting(figure.setting).quick_seeds if quick else figure.seeds
    return list(range(1, count + 1))


def expand(figure: Figure, quick: bool) -> list[Cell]:
    """Return all cells of a figure.

    >>> from sottovoce.studies.paper.definition import load_figure
    >>> cells = expand(load_figure("fig15"), quick=False)
    >>> len(cells), cells[0].plan.rounds.beta
    (50, 0.5)
    """
    return [cell for variant in figure.variants for cell in _variant(figure, variant, quick)]


def _variant(figure: Figure, variant: Variant, quick: bool) -> Iterator[Cell]:
    base, known = load_setting(figure.setting), load_methods()
    corrections = figure.corrected if variant == "corrected" else {}
    places = list(product(*(values_of(figure, axis, variant, quick) for axis in AXES)))
    if figure.reference:
        places += dict.fromkeys((panel, line, REFERENCE) for panel, line, _ in places)
    for panel, line, x in places:
        swept = {
            axis.key: value
            for axis, value in zip(_axes(figure), (panel, line, x), strict=True)
            if axis is not None
        }
        if x == REFERENCE:
            swept = {k: v for k, v in swept.items() if v != REFERENCE} | {
                "method": figure.reference
            }
        changes = {**base.plan, **getattr(base, variant), **figure.plan, **corrections}
        # A method is named by the figure, by its corrected part or by an axis, the last one wins.
        named = swept.pop("method", changes.pop("method", None))
        method = known[named] if named is not None else Method(name="", plan={})
        changes |= method.plan
        if quick:
            steered_by_test = changes.get("data.validation") == 0
            changes |= {**base.quick, **figure.quick.plan}
            changes |= {"data.validation": 0} if steered_by_test else {}
        tried = (method.quick if quick else method.search) or (None,)
        for search in tried:
            now = changes | _plain_keys(swept) | ({} if search is None else {SEARCHED: search})
            yield Cell(variant, panel, line, x, search, _plan(now, method, len(tried)))


def _axes(figure: Figure) -> tuple[Axis | None, Axis | None, Axis | None]:
    return figure.panel, figure.line, figure.x


def values_of(figure: Figure, name: str, variant: Variant, quick: bool) -> tuple[Any, ...]:
    """Return the values of an axis; an absent axis has the one value None."""
    axis: Axis | None = getattr(figure, name)
    if axis is None:
        return (None,)
    if quick:
        kept = figure.quick.line_corrected if (name, variant) == ("line", "corrected") else ()
        kept = kept or getattr(figure.quick, name)
        if kept:
            return tuple(kept)
    return axis.of(variant)


def _plain_keys(swept: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in swept.items() if "." in key}


def _plan(changes: dict[str, Any], method: Method, runs: int) -> Plan:
    tables: dict[str, dict[str, Any]] = {}
    for name, value in changes.items():
        table, _, key = name.partition(".")
        tables.setdefault(table, {})[key] = list(value) if isinstance(value, tuple) else value
    if tables["rounds"].get("schedule") is not None:
        _drop_what_has_no_effect(tables["rounds"])
    privacy = tables["privacy"]
    if method.paid:
        privacy["epsilon"] = within_budget(privacy["epsilon"], privacy["delta"], runs)
    if method.shares:
        clients, shares = tables["data"]["clients"], method.shares
        privacy["epsilon"] = [privacy["epsilon"] * shares[i % len(shares)] for i in range(clients)]
    return Plan(**tables)


def _drop_what_has_no_effect(rounds: dict[str, Any]) -> None:
    # An axis may sweep β for one method and leave others without it.
    kept = {"discounted": {"beta", "zeta", "window"}, "decaying": {"slope"}}
    for key in ("beta", "zeta", "window", "slope"):
        if key not in kept.get(rounds["schedule"], set()):
            rounds.pop(key, None)


def within_budget(epsilon: float, delta: float, runs: int) -> float:
    """Return the ε of each of k runs that together guarantee (ε, δ): μ(ε′) = μ(ε)/√k.

    >>> round(within_budget(8.0, 1e-3, 8), 3)
    2.158
    """
    share = float(gaussian.mu(epsilon, delta)) / math.sqrt(runs)
    exact = float(gaussian.epsilon(delta, share))
    # Cut to nine digits, downwards: the plan, and so the name of its runs, is the same everywhere.
    return float(f"{exact * (1 - 1e-9):.9g}")


def together(epsilon: float, delta: float, runs: int) -> float:
    """Return the ε that k runs guarantee together at δ, if each guarantees (ε, δ).

    >>> round(together(8.0, 1e-3, 8), 1)
    34.8
    """
    return float(gaussian.epsilon(delta, float(gaussian.mu(epsilon, delta)) * math.sqrt(runs)))


Kind = Literal["sweep", "moments", "prototypes"]
Variant = Literal["printed", "corrected"]
Changes = Mapping[str, Any]

LEAST_SEEDS = 5
VARIANTS: tuple[Variant, ...] = get_args(Variant)
MEASURES = ("loss", "accuracy", "rounds", "horizon", "distinct")
_ROOT = resources.files("sottovoce.studies.paper")
T = TypeVar("T")


@dataclass(frozen=True)
class Axis:
    """What is swept: a key of the plan (or `method`) and its values."""

    key: str
    values: tuple[Any, ...]
    label: str
    corrected: tuple[Any, ...] | None = None  # other values in the corrected variant
    scale: Literal["linear", "log"] = "linear"

    def of(self, variant: Variant) -> tuple[Any, ...]:
        """Return the values in one variant."""
        if variant == "corrected" and self.corrected is not None:
            return self.corrected
        return self.values


@dataclass(frozen=True)
class Claim:
    """What is claimed, in words and as a check with its options (`checks`)."""

    words: str
    check: str
    topic: str = ""  # claims of one topic share a row of the claims table
    where: Changes = field(default_factory=dict)
    first: Changes = field(default_factory=dict)
    than: Changes = field(default_factory=dict)
    measure: str = ""
    along: str = ""
    within: float = 0.0
    at: Any = None
    corrected: Changes = field(default_factory=dict)  # what the check compares there instead
    variants: tuple[Variant, ...] = VARIANTS
    ours: bool = False  # the paper does not say so, we do


@dataclass(frozen=True)
class Quick:
    """The small version: values of the axes to keep, and keys of the plan."""

    x: tuple[Any, ...] = ()
    line: tuple[Any, ...] = ()
    panel: tuple[Any, ...] = ()
    line_corrected: tuple[Any, ...] = ()
    plan: Changes = field(default_factory=dict)


@dataclass(frozen=True)
class Moments:
    """The numbers of a figure of moments: σ, η, C and one panel each of (q, n, U)."""

    sigma: float
    learning_rate: float
    clip: float
    other_clips: tuple[float, ...]
    orders: tuple[int, int]
    panels: tuple[Changes, ...]


@dataclass(frozen=True)
class Prototypes:
    """How an input is optimised until the model takes it for a class."""

    steps: int
    rate: float
    penalty: float


@dataclass(frozen=True)
class Figure:
    """One figure of the paper (or of ours), in words and numbers."""

    name: str
    kind: Kind
    paper: str
    title: str
    caption: str
    claims: tuple[Claim, ...]
    setting: str = ""
    seeds: int = LEAST_SEEDS
    measure: str = "loss"
    plan: Changes = field(default_factory=dict)
    corrected: Changes = field(default_factory=dict)
    variants: tuple[Variant, ...] = VARIANTS
    x: Axis | None = None
    line: Axis | None = None
    panel: Axis | None = None
    quick: Quick = field(default_factory=Quick)
    notes: tuple[str, ...] = ()
    moments: Moments | None = None
    prototypes: Prototypes | None = None
    reference: str = ""  # a searching method whose best T a claim needs, one for each line
    true_epsilon: bool = False  # drawn against the ε that holds, not the one asked for
    text: str = ""  # the TOML itself


@dataclass(frozen=True)
class Setting:
    """Data, model and what the paper leaves open, with the reasons; the same for all methods."""

    about: str
    reasons: tuple[str, ...]
    plan: Changes
    printed: Changes
    corrected: Changes
    quick: Changes
    quick_seeds: int = 2


@dataclass(frozen=True)
class Method:
    """A way to train: keys of the plan, and what it searches, if it does."""

    name: str
    plan: Changes
    about: str = ""
    search: tuple[int, ...] = ()  # over rounds.rounds, by the loss on the validation rows
    quick: tuple[int, ...] = ()
    paid: bool = False  # the budget pays for all runs of the search: each gets μ²/k
    shares: tuple[float, ...] = ()  # of ε, client after client in turn, where budgets are unequal


def list_figures() -> tuple[str, ...]:
    """Return the names of all figures, in their order.

    >>> list_figures()[0], list_figures()[-1]
    ('fig2', 'weights')
    """
    found = [f.name.removesuffix(".toml") for f in _ROOT.joinpath("figures").iterdir()]
    numbered = [name for name in found if name.removeprefix("fig").isdigit()]
    return (*sorted(numbered, key=lambda name: int(name[3:])), *sorted(set(found) - set(numbered)))


def load_figure(name: str) -> Figure:
    """Load the figure of that name.

    >>> load_figure("fig5").setting
    'mnist'
    >>> load_figure("fig1")
    Traceback (most recent call last):
        ...
    sottovoce.errors.InputError: the figure must be one of fig2, fig3, fig4, fig5, fig6, fig7, \
fig8, fig9, fig10, fig11, fig12, fig13, fig14, fig15, calibrations, weights, \
got 'fig1'; or all, or frontier
    """
    if name not in list_figures():
        raise InputError.of(
            "the figure", name, f"one of {', '.join(list_figures())}", "or all, or frontier"
        )
    return parse_figure(_ROOT.joinpath("figures", f"{name}.toml").read_text("utf-8"), name)


def load_setting(name: str) -> Setting:
    """Load the setting of that name.

    >>> load_setting("mnist").plan["local.clip"]
    5.0
    """
    text = _ROOT.joinpath("settings", f"{name}.toml").read_text("utf-8")
    return _build(Setting, tomllib.loads(text), f"the setting {name}")


def load_methods() -> dict[str, Method]:
    """Load the methods that are compared, by name.

    >>> load_methods()["udp"].plan["rounds.schedule"]
    'fixed'
    """
    tables = tomllib.loads(_ROOT.joinpath("methods.toml").read_text("utf-8"))
    return {name: _build(Method, table, f"the method {name}") for name, table in tables.items()}


def parse_figure(text: str, name: str) -> Figure:
    """Parse a figure from its TOML.

    >>> parse_figure('kind = "sweep"\\nkapton = "no"', "fig0")
    Traceback (most recent call last):
        ...
    sottovoce.errors.InputError: fig0 has an unknown key kapton; did you mean caption?
    """
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise InputError(f"{name} is not valid TOML: {error}; correct it") from None
    parts: dict[str, Any] = {}
    for key, kind in {
        **dict.fromkeys(("x", "line", "panel"), Axis),
        "quick": Quick,
        "moments": Moments,
        "prototypes": Prototypes,
    }.items():
        if key in table:
            parts[key] = _build(kind, table[key], f"{name}.{key}")
    claims = [_build(Claim, one, f"{name}.claims") for one in table.get("claims", [])]
    made = _build(Figure, table | parts | {"claims": claims, "name": name, "text": text}, name)
    _check(made)
    return made


def _check(made: Figure) -> None:
    name = made.name
    _one_of(f"{name}.kind", made.kind, get_args(Kind))
    _one_of(f"{name}.measure", made.measure, MEASURES)
    for variant in made.variants:
        _one_of(f"{name}.variants", variant, VARIANTS)
    if made.seeds < LEAST_SEEDS:
        raise InputError.of(f"{name}.seeds", made.seeds, f"≥ {LEAST_SEEDS}", "fewer decide nothing")
    if made.kind != "moments" and not made.setting:
        raise InputError(f"{name} names no setting; one of those in settings/ is needed")
    if made.kind != "sweep" and getattr(made, made.kind) is None:
        raise InputError(f"{name} is of kind {made.kind} and has no table [{made.kind}]; add it")
    if not made.claims:
        raise InputError(f"{name} states no claim; every figure is there to check one")


def _one_of(name: str, value: object, known: tuple[str, ...]) -> None:
    if value not in known:
        raise InputError.of(name, value, f"one of {', '.join(known)}", "choose one")


def _build(kind: type[T], table: Any, where: str) -> T:
    """Build a frozen value from a TOML table; refuse unknown keys, turn lists into tuples."""
    if not isinstance(table, Mapping):
        raise InputError.of(where, table, "a table", "write its keys below a [heading]")
    known = {f.name: f for f in fields(kind)}  # type: ignore[arg-type]
    for key in table:
        if key not in known:
            near = difflib.get_close_matches(key, known, 1)
            hint = f"did you mean {near[0]}?" if near else f"its keys are {', '.join(known)}"
            raise InputError(f"{where} has an unknown key {key}; {hint}")
    missing = [
        f.name
        for f in known.values()
        if f.default is MISSING and f.default_factory is MISSING and f.name not in table
    ]
    if missing:
        raise InputError(f"{where} lacks {', '.join(missing)}; every figure and setting says so")
    frozen = {key: tuple(v) if isinstance(v, list) else v for key, v in table.items()}
    return kind(**frozen)
