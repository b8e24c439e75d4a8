"""What a figure is: read from its TOML, every key known, frozen.

A figure names a setting (which data, which model, what the paper leaves open) and what is swept:
up to three axes, `x` along the figure, `line` one curve each, `panel` one picture each. An axis
sweeps a key of the plan, or `method`, which stands for several keys (`methods.toml`). Figures come
in two variants: `printed`, as the paper does it, and `corrected`, at an exact guarantee.
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields
from importlib import resources
from typing import Any, Literal, TypeVar, get_args

from sottovoce.errors import InputError

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
        """The values in one variant."""
        own = self.corrected if variant == "corrected" else None
        return self.values if own is None else own


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


def names() -> tuple[str, ...]:
    """The figures there are, in their order.

    >>> names()[0], names()[-1]
    ('fig2', 'weights')
    """
    found = [f.name.removesuffix(".toml") for f in _ROOT.joinpath("figures").iterdir()]
    numbered = [name for name in found if name.removeprefix("fig").isdigit()]
    return (*sorted(numbered, key=lambda name: int(name[3:])), *sorted(set(found) - set(numbered)))


def figure(name: str) -> Figure:
    """The figure of that name.

    >>> figure("fig5").setting
    'mnist'
    >>> figure("fig1")
    Traceback (most recent call last):
        ...
    sottovoce.errors.InputError: the figure must be one of fig2, fig3, fig4, fig5, fig6, fig7, \
fig8, fig9, fig10, fig11, fig12, fig13, fig14, fig15, calibrations, weights, \
got 'fig1'; or all, or frontier
    """
    if name not in names():
        raise InputError.of(
            "the figure", name, f"one of {', '.join(names())}", "or all, or frontier"
        )
    return parse(_ROOT.joinpath("figures", f"{name}.toml").read_text("utf-8"), name)


def setting(name: str) -> Setting:
    """The setting of that name.

    >>> setting("mnist").plan["local.clip"]
    5.0
    """
    text = _ROOT.joinpath("settings", f"{name}.toml").read_text("utf-8")
    return _made(Setting, tomllib.loads(text), f"the setting {name}")


def methods() -> dict[str, Method]:
    """The ways to train that are compared.

    >>> methods()["udp"].plan["rounds.schedule"]
    'fixed'
    """
    tables = tomllib.loads(_ROOT.joinpath("methods.toml").read_text("utf-8"))
    return {name: _made(Method, table, f"the method {name}") for name, table in tables.items()}


def parse(text: str, name: str) -> Figure:
    """A figure from its TOML.

    >>> parse('kind = "sweep"\\nkapton = "no"', "fig0")
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
            parts[key] = _made(kind, table[key], f"{name}.{key}")
    claims = [_made(Claim, one, f"{name}.claims") for one in table.get("claims", [])]
    made = _made(Figure, table | parts | {"claims": claims, "name": name, "text": text}, name)
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


def _made(kind: type[T], table: Any, where: str) -> T:
    """A frozen value from a TOML table: unknown keys refused, lists as tuples."""
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
