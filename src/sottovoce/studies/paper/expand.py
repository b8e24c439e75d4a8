"""A figure → the plans it needs, one cell for every point of every variant.

Later changes win: the setting's plan, its variant, the figure's plan, its corrected part, the
method, the quick version, the axes, and what a search tries.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import Any

from sottovoce._version import __version__
from sottovoce.plan import Plan
from sottovoce.privacy import gaussian
from sottovoce.studies.paper.definition import Axis, Figure, Method, Variant, methods, setting

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
    """The seeds of a figure: 1, 2, … (η and C were chosen on others)."""
    count = setting(figure.setting).quick_seeds if quick else figure.seeds
    return list(range(1, count + 1))


def expand(figure: Figure, quick: bool) -> list[Cell]:
    """All cells of a figure.

    >>> from sottovoce.studies.paper.definition import figure
    >>> cells = expand(figure("fig15"), quick=False)
    >>> len(cells), cells[0].plan.rounds.beta
    (50, 0.5)
    """
    return [cell for variant in figure.variants for cell in _variant(figure, variant, quick)]


def _variant(figure: Figure, variant: Variant, quick: bool) -> Iterator[Cell]:
    base, known = setting(figure.setting), methods()
    own = figure.corrected if variant == "corrected" else {}
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
        changes = {**base.plan, **getattr(base, variant), **figure.plan, **own}
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
    """The values of an axis; an axis that is not there has the one value None."""
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
    """The ε of each of k runs that all together guarantee (ε, δ): μ(ε′) = μ(ε)/√k.

    >>> round(within_budget(8.0, 1e-3, 8), 3)
    2.158
    """
    share = float(gaussian.mu(epsilon, delta)) / math.sqrt(runs)
    exact = float(gaussian.epsilon(delta, share))
    # Cut to nine digits, downwards: the plan, and so the name of its runs, is the same everywhere.
    return float(f"{exact * (1 - 1e-9):.9g}")


def together(epsilon: float, delta: float, runs: int) -> float:
    """What k runs that guarantee (ε, δ) each guarantee together, at the same δ.

    >>> round(together(8.0, 1e-3, 8), 1)
    34.8
    """
    return float(gaussian.epsilon(delta, float(gaussian.mu(epsilon, delta)) * math.sqrt(runs)))
