"""A finished figure as arrays: for every variant and place one number a seed, searches decided."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sottovoce.studies.paper.definition import Figure, methods
from sottovoce.studies.paper.expand import AXES, REFERENCE, together

Floats = NDArray[np.float64]
Place = tuple[Any, Any, Any]  # panel, line, x


@dataclass(frozen=True, eq=False)
class Point:
    """What stands at one place of a figure: a number for every seed, and what is guaranteed."""

    values: Mapping[str, Floats]
    epsilon: float  # that holds for one run
    epsilon_search: float  # that holds for all runs of the search, where there was one
    delta: float
    chosen: int | None  # the T of the search that was best on the rows that steer
    tried: int
    horizon: list[Any]
    pictures: list[str]


@dataclass(frozen=True, eq=False)
class Table:
    """All points of one variant of a figure."""

    figure: Figure
    variant: str
    points: Mapping[Place, Point]

    def axis(self, name: str) -> list[Any]:
        """The values of an axis, in the order of the file."""
        at = AXES.index(name)
        return list(dict.fromkeys(p[at] for p in self.points if REFERENCE not in p))

    def values(self, measure: str, place: Place) -> Floats:
        """One number a seed."""
        return self.points[place].values[measure]


def tables(figure: Figure, cells: list[dict[str, Any]]) -> dict[str, Table]:
    """Every variant of a figure, from the cells of its file."""
    found: dict[str, dict[Place, list[dict[str, Any]]]] = {}
    for cell in cells:
        place = (cell.get("panel"), cell.get("line"), cell.get("x"))
        found.setdefault(cell["variant"], {}).setdefault(place, []).append(cell)
    return {
        variant: Table(figure, variant, {place: _point(own) for place, own in places.items()})
        for variant, places in found.items()
    }


def _point(cells: list[dict[str, Any]]) -> Point:
    # A search is decided by the mean loss on the rows that steer, once for all seeds.
    losses = [float(np.mean(_floats(cell, "validation"))) for cell in cells]
    known = [loss if np.isfinite(loss) else np.inf for loss in losses]
    best = cells[int(np.argmin(known))]
    measures = ("loss", "accuracy", "validation", "rounds", "distinct")
    epsilon, delta = best["epsilon"], best["delta"]
    return Point(
        values={name: _floats(best, name) for name in measures if name in best},
        epsilon=epsilon,
        epsilon_search=together(epsilon, delta, len(cells)) if len(cells) > 1 else epsilon,
        delta=delta,
        chosen=best.get("search"),
        tried=len(cells),
        horizon=best.get("horizon", []),
        pictures=best.get("pictures", []),
    )


def _floats(cell: Mapping[str, Any], name: str) -> Floats:
    return np.array([np.nan if v is None else v for v in cell[name]], dtype=np.float64)


def label(figure: Figure, axis: str, value: Any) -> str:
    """A value of an axis as a reader sees it.

    >>> from sottovoce.studies.paper.definition import figure
    >>> label(figure("fig5"), "line", 4), label(figure("fig8"), "line", "lei")
    ('ε = 4', 'Lei')
    """
    own = getattr(figure, axis)
    if own is None or value is None:
        return ""
    shown = methods()[value].name if own.key == "method" else f"{value:g}"
    return str(own.label.format(shown)) if "{}" in own.label else f"{own.label} {shown}"
