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
from dataclasses import dataclass
from functools import cache, cached_property
from importlib import resources
from itertools import product
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from sottovoce.errors import InputError
from sottovoce.plan import Plan
from sottovoce.plan.sections import Rounds
from sottovoce.privacy import gaussian

SEARCHED = "rounds.rounds"
REFERENCE = "reference"  # in place of x: the search that a figure refers to
AXES = ("panel", "line", "x")
# The last version that changed what a plan trains: results of versions since then stay valid.
SAME_RUNS_SINCE = "0.1.0"


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
        plan = self.plan.to_dict()
        if plan["privacy"].get("view") == "upload":  # what a plan meant before it could say so
            plan["privacy"] = {k: v for k, v in plan["privacy"].items() if k != "view"}
        text = json.dumps([SAME_RUNS_SINCE, plan], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def list_seeds(figure: Figure, quick: bool) -> list[int]:
    """Return the seeds of a figure: 1, 2, … (η and C were chosen on others)."""
    count = load_setting(figure.setting).quick_seeds if quick else figure.seeds
    return list(range(1, count + 1))


def expand(figure: Figure, quick: bool) -> list[Cell]:
    """Return all cells of a figure.

    >>> cells = expand(load_figure("fig15"), quick=False)
    >>> len(cells), cells[0].plan.rounds.beta
    (50, 0.5)
    """
    return [cell for variant in figure.variants for cell in _expand_variant(figure, variant, quick)]


def _expand_variant(figure: Figure, variant: Variant, quick: bool) -> Iterator[Cell]:
    base, methods = load_setting(figure.setting), load_methods()
    corrections = figure.corrected if variant == "corrected" else {}
    places = list(product(*(list_axis_values(figure, axis, variant, quick) for axis in AXES)))
    if figure.reference:
        places += dict.fromkeys((panel, line, REFERENCE) for panel, line, _ in places)
    for panel, line, x in places:
        swept = {
            axis.key: value
            for name, value in zip(AXES, (panel, line, x), strict=True)
            if (axis := getattr(figure, name)) is not None
        }
        if x == REFERENCE:
            swept = {k: v for k, v in swept.items() if v != x} | {"method": figure.reference}
        changes = {**base.plan, **getattr(base, variant), **figure.plan, **corrections}
        # A method is named by the figure, by its corrected part or by an axis, the last one wins.
        named = swept.pop("method", changes.pop("method", None))
        method = methods[named] if named is not None else Method(name="", plan={})
        changes |= method.plan
        swept = {key: value for key, value in swept.items() if "." in key}
        if quick:
            steered_by_test = changes.get("data.validation") == 0
            changes |= {**base.quick, **figure.quick.plan}
            changes |= {"data.validation": 0} if steered_by_test else {}
        tried = (method.quick if quick else method.search) or (None,)
        for search in tried:
            now = changes | swept | ({} if search is None else {SEARCHED: search})
            yield Cell(variant, panel, line, x, search, _make_plan(now, method, len(tried)))


def list_axis_values(figure: Figure, name: str, variant: Variant, quick: bool) -> tuple[Any, ...]:
    """Return the values of an axis; an absent axis has the one value None."""
    axis: Axis | None = getattr(figure, name)
    if axis is None:
        return (None,)
    if quick:
        values = figure.quick.line_corrected if (name, variant) == ("line", "corrected") else ()
        if values := values or getattr(figure.quick, name):
            return tuple(values)
    return axis.values if variant == "printed" or axis.corrected is None else axis.corrected


def _make_plan(changes: dict[str, Any], method: Method, runs: int) -> Plan:
    tables = nest_keys(changes)
    rounds, privacy = tables["rounds"], tables["privacy"]
    # An axis may sweep β for one method and leave others without it.
    for key, when in Rounds.conditions():
        if rounds.get("schedule", when.value) != when.value:
            rounds.pop(key, None)
    if method.paid:
        privacy["epsilon"] = split_epsilon(privacy["epsilon"], privacy["delta"], runs)
    if method.shares:
        clients, shares = tables["data"]["clients"], method.shares
        privacy["epsilon"] = [privacy["epsilon"] * shares[i % len(shares)] for i in range(clients)]
    return Plan(**tables)


def nest_keys(changes: Changes) -> dict[str, dict[str, Any]]:
    """Return the tables of a plan from its dotted keys.

    >>> nest_keys({"data.name": "digits", "data.clients": 3})
    {'data': {'name': 'digits', 'clients': 3}}
    """
    tables: dict[str, dict[str, Any]] = {}
    for name, value in changes.items():
        table, _, key = name.partition(".")
        tables.setdefault(table, {})[key] = list(value) if isinstance(value, tuple) else value
    return tables


def split_epsilon(epsilon: float, delta: float, runs: int) -> float:
    """Return the ε of each of k runs that together guarantee (ε, δ): μ(ε′) = μ(ε)/√k.

    >>> round(split_epsilon(8.0, 1e-3, 8), 3)
    2.158
    """
    share = float(gaussian.mu(epsilon, delta)) / math.sqrt(runs)
    exact = float(gaussian.epsilon(delta, share))
    # Cut to nine digits, downwards: the plan, and so the name of its runs, is the same everywhere.
    return float(f"{exact * (1 - 1e-9):.9g}")


def compose_epsilon(epsilon: float, delta: float, runs: int) -> float:
    """Return the ε that k runs guarantee together at δ, if each guarantees (ε, δ).

    >>> round(compose_epsilon(8.0, 1e-3, 8), 1)
    34.8
    """
    return float(gaussian.epsilon(delta, float(gaussian.mu(epsilon, delta)) * math.sqrt(runs)))


Kind = Literal["sweep", "moments", "prototypes"]
Variant = Literal["printed", "corrected"]
Measure = Literal["loss", "accuracy", "rounds", "horizon", "distinct"]
Changes = Mapping[str, Any]

LEAST_SEEDS = 5
VARIANTS: tuple[Variant, ...] = get_args(Variant)
_ROOT = resources.files("sottovoce.studies.paper")


class Definition(BaseModel):
    """A table of a TOML file, frozen: unknown, missing and wrong keys are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    @classmethod
    def parse(cls, toml: str, where: str, **more: Any) -> Self:
        """Parse the text of the file `where`; `more` are keys that the text does not have."""
        try:
            return cls(**tomllib.loads(toml), **more)
        except tomllib.TOMLDecodeError as error:
            raise InputError(f"{where} is not valid TOML: {error}; correct it") from None
        except ValidationError as error:
            raise InputError(f"{where} {_describe_problem(error)}") from None


class Axis(Definition):
    """What is swept: a key of the plan (or `method`) and its values."""

    key: str
    values: tuple[Any, ...]
    label: str
    corrected: tuple[Any, ...] | None = None  # other values in the corrected variant
    scale: Literal["linear", "log"] = "linear"


class Claim(Definition):
    """What is claimed, in words and as a check with its options (`outcomes`)."""

    words: str
    check: str
    topic: str = ""  # claims of one topic share a row of the claims table
    where: Changes = {}
    first: Changes = {}
    than: Changes = {}
    measure: str = ""
    along: str = ""
    within: float = 0.0
    at: Any = None
    corrected: Changes = {}  # what the check compares there instead
    variants: tuple[Variant, ...] = VARIANTS
    ours: bool = False  # the paper does not say so, we do


class Quick(Definition):
    """The small version: values of the axes to keep, and keys of the plan."""

    x: tuple[Any, ...] = ()
    line: tuple[Any, ...] = ()
    panel: tuple[Any, ...] = ()
    line_corrected: tuple[Any, ...] = ()
    plan: Changes = {}


class Moments(Definition):
    """The numbers of a figure of moments: σ, η, C and one panel each of (q, n, U)."""

    sigma: float
    learning_rate: float
    clip: float
    other_clips: tuple[float, ...]
    orders: tuple[int, int]
    panels: tuple[Changes, ...]


class Prototypes(Definition):
    """How an input is optimised until the model takes it for a class."""

    steps: int
    rate: float
    penalty: float


class Figure(Definition):
    """One figure of the paper (or of ours), in words and numbers."""

    name: Annotated[str, Field(pattern=r"^[\w-]+$")]  # of its files, too
    kind: Kind
    paper: str
    title: str
    caption: str
    claims: Annotated[tuple[Claim, ...], Field(min_length=1)]
    setting: str = ""
    seeds: Annotated[int, Field(ge=LEAST_SEEDS)] = LEAST_SEEDS
    measure: Measure = "loss"
    plan: Changes = {}
    corrected: Changes = {}
    variants: tuple[Variant, ...] = VARIANTS
    x: Axis | None = None
    line: Axis | None = None
    panel: Axis | None = None
    quick: Quick = Quick()
    notes: tuple[str, ...] = ()
    moments: Moments | None = None
    prototypes: Prototypes | None = None
    reference: str = ""  # a searching method whose best T a claim needs, one for each line
    true_epsilon: bool = False  # drawn against the ε that holds, not the one asked for
    text: str = ""  # the TOML itself


class Setting(Definition):
    """Data, model and what the paper leaves open, with the reasons; the same for all methods."""

    about: str
    reasons: tuple[str, ...]
    plan: Changes
    printed: Changes
    corrected: Changes
    quick: Changes
    quick_seeds: int = 2


class Method(Definition):
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

    >>> load_figure("fig1")
    Traceback (most recent call last):
        ...
    sottovoce.errors.InputError: the figure must be one of fig2, fig3, fig4, fig5, fig6, fig7, \
fig8, fig9, fig10, fig11, fig12, fig13, fig14, fig15, calibrations, weights, \
got 'fig1'; or all, or frontier
    """
    if name not in list_figures():
        remedy = "or all, or frontier"
        raise InputError.of("the figure", name, f"one of {', '.join(list_figures())}", remedy)
    return parse_figure(_ROOT.joinpath("figures", f"{name}.toml").read_text("utf-8"), name)


def load_setting(name: str) -> Setting:
    """Load the setting of that name."""
    known = {file.name.removesuffix(".toml"): file for file in _ROOT.joinpath("settings").iterdir()}
    if name not in known:
        raise InputError.of("setting", name, f"one of {', '.join(sorted(known))}", "correct it")
    return Setting.parse(known[name].read_text("utf-8"), f"the setting {name}")


def load_methods() -> dict[str, Method]:
    """Load the methods that are compared, by name."""
    return {name: Method(**table) for name, table in load_tables("methods").items()}


@cache
def load_tables(name: str) -> dict[str, Any]:
    """Load `NAME.toml` of this folder: looks of lines, methods, or the panels of a study."""
    return tomllib.loads(_ROOT.joinpath(f"{name}.toml").read_text("utf-8"))


def parse_figure(text: str, name: str) -> Figure:
    """Parse a figure from its TOML.

    >>> parse_figure('kind = "sweep"\\nkapton = "no"', "fig0")
    Traceback (most recent call last):
        ...
    sottovoce.errors.InputError: fig0 has an unknown key kapton; did you mean caption?
    """
    figure = Figure.parse(text, name, name=name, text=text)
    if figure.kind != "moments" and not figure.setting:
        raise InputError(f"{name} names no setting; one of those in settings/ is needed")
    if figure.kind != "sweep" and getattr(figure, figure.kind) is None:
        raise InputError(
            f"{name} is of kind {figure.kind} and has no table [{figure.kind}]; add it"
        )
    return figure


def _describe_problem(error: ValidationError) -> str:
    """Say what is wrong with a table; a misspelt key first, since it explains other problems."""
    problems = error.errors(include_url=False)
    first = min(problems, key=lambda problem: problem["type"] != "extra_forbidden")
    key = ".".join(map(str, first["loc"]))
    if first["type"] == "missing":
        return f"lacks {key}; add it"
    if first["type"] != "extra_forbidden":
        return f"has a wrong {key} ({first['msg']}, got {first['input']!r:.60}); correct it"
    known = [name for table in Definition.__subclasses__() for name in table.model_fields]
    near = difflib.get_close_matches(str(first["loc"][-1]), known, 1)
    return f"has an unknown key {key}; " + (f"did you mean {near[0]}?" if near else "remove it")
