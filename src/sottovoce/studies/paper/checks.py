"""The checks that claims name: each gives numbers that are positive where a claim is right.

`lower`, `higher`   first against than, wherever else the figure varies
`close`             first within a part of than's loss
`convex`            the curve lies below the chord between its ends, and no point clearly above
                    the chord of its neighbours
`rises`, `falls`    the slope of a measure (or of the best x) along an axis
`best`              one x has the lowest measure, against each other x
`nearer`            loss rises with the distance of x from the reference's best T
`above`             the paper's moment bound is nowhere below the truth
`overdrawn`         the ε that holds is larger than the one asked for
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from sottovoce.errors import InputError
from sottovoce.studies.paper.definition import Claim
from sottovoce.studies.paper.expand import AXES, REFERENCE
from sottovoce.studies.paper.table import Floats, Place, Table, label
from sottovoce.studies.paper.verdict import Verdict, judge

Points = dict[str, Any]


def check(claim: Claim, table: Table) -> Verdict:
    """The verdict on a claim in one variant of its figure."""
    own = replace(claim, **claim.corrected) if table.variant == "corrected" else claim
    if own.check not in CHECKS:
        raise InputError.of("check", own.check, f"one of {', '.join(CHECKS)}", "choose one")
    if own.check == "convex":
        return judge(*_convex(own, table))
    return judge(CHECKS[own.check](own, table))


def check_moments(panels: list[dict[str, Any]]) -> Verdict:
    """Whether the bound is nowhere below the truth, panel by panel; no chance is in it."""
    points = {}
    for i, panel in enumerate(panels):
        gap = np.asarray(panel["bound"]) - np.asarray(panel["truth"])
        # Nothing to spare is fine, below is not: the sign decides.
        worst = float(gap.min())
        points[f"({'abcdefgh'[i]})"] = [worst if worst < 0 else max(worst, 1e-300)]
    return judge(points)


def _kept(claim: Claim, table: Table, free: tuple[str, ...]) -> list[dict[str, Any]]:
    """All combinations of the axes that the check leaves alone, as far as `where` allows."""
    combos: list[dict[str, Any]] = [{}]
    for axis in AXES:
        if axis in free:
            continue
        wanted = claim.where.get(axis)
        allowed = wanted if isinstance(wanted, list | tuple) else [wanted]
        values = [v for v in table.axis(axis) if wanted is None or v in allowed]
        combos = [{**combo, axis: value} for combo in combos for value in values]
    return combos


def _place(combo: Mapping[str, Any]) -> Place:
    return combo.get("panel"), combo.get("line"), combo.get("x")


def _at(table: Table, combo: Mapping[str, Any]) -> str:
    """Where, in words; an axis of one value says nothing."""
    named = [
        label(table.figure, axis, combo[axis])
        for axis in AXES
        if combo.get(axis) is not None and len(table.axis(axis)) > 1
    ]
    return ", ".join(named)


def _differences(claim: Claim, table: Table) -> list[tuple[str, Floats, Floats]]:
    """The places where `first` can be set against `than`, with both."""
    free = tuple(claim.first.keys() | claim.than.keys())
    rows = []
    for combo in _kept(claim, table, free):
        first, than = (_place({**combo, **end}) for end in (claim.first, claim.than))
        if first in table.points and than in table.points:
            values = (table.values(claim.measure, place) for place in (first, than))
            rows.append((_at(table, combo), *values))
    return rows  # type: ignore[return-value]


def _lower(claim: Claim, table: Table) -> Points:
    return {at: than - first for at, first, than in _differences(claim, table)}


def _higher(claim: Claim, table: Table) -> Points:
    return {at: first - than for at, first, than in _differences(claim, table)}


def _close(claim: Claim, table: Table) -> Points:
    rows = _differences(claim, table)
    return {at: claim.within - (first - than) / than for at, first, than in rows}


def _convex(claim: Claim, table: Table) -> tuple[Points, list[Floats]]:
    points, guards = {}, []
    x = np.array(table.axis("x"), dtype=np.float64)
    for combo in _kept(claim, table, ("x",)):
        curve = np.stack([table.values("loss", _place({**combo, "x": v})) for v in table.axis("x")])
        share = ((x - x[0]) / (x[-1] - x[0]))[1:-1, None]
        chord = curve[0] * (1 - share) + curve[-1] * share
        points[_at(table, combo)] = np.mean(chord - curve[1:-1], axis=0)
        for i in range(1, len(x) - 1):
            part = (x[i] - x[i - 1]) / (x[i + 1] - x[i - 1])
            guards.append(curve[i - 1] * (1 - part) + curve[i + 1] * part - curve[i])
    return points, guards


def _rises(claim: Claim, table: Table) -> Points:
    axis = claim.along
    at = np.array(table.axis(axis), dtype=np.float64)
    if claim.measure == "best":
        # T spans decades: its logarithm, so that no single budget decides.
        rows = _kept(claim, table, (axis, "x"))
        return {
            _at(table, combo): _slope(at, np.stack([_best(table, combo, axis, v) for v in at]))
            for combo in rows
        }
    points = {}
    for combo in _kept(claim, table, (axis,)):
        values = [table.values(claim.measure, _place({**combo, axis: v})) for v in table.axis(axis)]
        points[_at(table, combo)] = _slope(at, np.stack(values))
    return points


def _best(table: Table, combo: Mapping[str, Any], axis: str, value: float) -> Floats:
    """ln of the x with the lowest loss, for every seed."""
    xs = table.axis("x")
    named = next(v for v in table.axis(axis) if v == value)
    curve = [table.values("loss", _place({**combo, axis: named, "x": x})) for x in xs]
    return np.asarray(np.log(np.array(xs, dtype=np.float64))[np.argmin(np.stack(curve), axis=0)])


def _slope(at: Floats, values: Floats) -> Floats:
    """The least-squares slope of values[place, seed] along `at`, one a seed.

    A slope within rounding of none is none: five equal roundings would pass for evidence.
    """
    centred = at - at.mean()
    rise = centred @ values
    noise = 1e-12 * np.sum(np.abs(centred)) * np.max(np.abs(values), initial=0.0)
    return np.asarray(np.where(np.abs(rise) <= noise, 0.0, rise) / np.sum(centred**2))


def _falls(claim: Claim, table: Table) -> Points:
    return {at: -np.asarray(values) for at, values in _rises(claim, table).items()}


def _is_best(claim: Claim, table: Table) -> Points:
    points = {}
    for x in table.axis("x"):
        if x == claim.at:
            continue
        rows = [
            table.values(claim.measure, _place({**combo, "x": x}))
            - table.values(claim.measure, _place({**combo, "x": claim.at}))
            for combo in _kept(claim, table, ("x",))
            if _place({**combo, "x": claim.at}) in table.points
        ]
        if rows:
            points[f"against {x:g}"] = np.mean(rows, axis=0)
    return points


def _nearer(claim: Claim, table: Table) -> Points:
    points = {}
    x = np.array(table.axis("x"), dtype=np.float64)
    for combo in _kept(claim, table, ("x",)):
        best = table.points[_place({**combo, "x": REFERENCE})].chosen
        far = np.abs(x - float(best or 0))
        if np.ptp(far) == 0:
            continue
        values = [table.values("loss", _place({**combo, "x": v})) for v in table.axis("x")]
        points[_at(table, combo)] = _slope(far, np.stack(values))
    return points


def _overdrawn(claim: Claim, table: Table) -> Points:
    points = {}
    for combo in _kept(claim, table, ()):
        point = table.points[_place(combo)]
        points[_at(table, combo)] = [point.epsilon - float(combo["x"])]
    return points


CHECKS: dict[str, Callable[[Claim, Table], Points]] = {
    "lower": _lower,
    "higher": _higher,
    "close": _close,
    "convex": lambda claim, table: _convex(claim, table)[0],
    "rises": _rises,
    "falls": _falls,
    "best": _is_best,
    "nearer": _nearer,
    "overdrawn": _overdrawn,
    "above": lambda claim, table: {},
}
