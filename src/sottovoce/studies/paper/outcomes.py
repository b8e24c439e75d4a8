"""What is stored of a run (`studies.store`), and finished figures as arrays.

`runs.jsonl`   a line for every run of a sweep that is under way
`NAME.json`    a finished figure: its plan, its cells with one number for every seed, and how made

A run is named by its plan and seed, so that figures share runs, and folders made on different
machines may be merged by copying files.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sottovoce.data.files import write_file
from sottovoce.studies import store
from sottovoce.studies.paper.definition import (
    AXES,
    REFERENCE,
    Cell,
    Figure,
    load_methods,
    seeds_of,
    together,
)

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
class PointTable:
    """All points of one variant of a figure."""

    figure: Figure
    variant: str
    points: Mapping[Place, Point]

    def axis(self, name: str) -> list[Any]:
        """List the values of an axis, in the order of the file."""
        at = AXES.index(name)
        return list(dict.fromkeys(p[at] for p in self.points if REFERENCE not in p))

    def values(self, measure: str, position: Place) -> Floats:
        """Return one number for each seed."""
        return self.points[position].values[measure]


def build_tables(figure: Figure, cells: list[dict[str, Any]]) -> dict[str, PointTable]:
    """Return a table of points for every variant, from the cells of a figure's file."""
    found: dict[str, dict[Place, list[dict[str, Any]]]] = {}
    for cell in cells:
        position = (cell.get("panel"), cell.get("line"), cell.get("x"))
        found.setdefault(cell["variant"], {}).setdefault(position, []).append(cell)
    return {
        variant: PointTable(
            figure, variant, {position: _choose_point(cells) for position, cells in places.items()}
        )
        for variant, places in found.items()
    }


def _choose_point(cells: list[dict[str, Any]]) -> Point:
    # A search is decided by the mean loss on the rows that steer, once for all seeds.
    losses = [float(np.mean(_read_floats(cell, "validation"))) for cell in cells]
    known = [loss if np.isfinite(loss) else np.inf for loss in losses]
    best = cells[int(np.argmin(known))]
    measures = ("loss", "accuracy", "validation", "rounds", "distinct")
    epsilon, delta = best["epsilon"], best["delta"]
    return Point(
        values={name: _read_floats(best, name) for name in measures if name in best},
        epsilon=epsilon,
        epsilon_search=together(epsilon, delta, len(cells)) if len(cells) > 1 else epsilon,
        delta=delta,
        chosen=best.get("search"),
        tried=len(cells),
        horizon=best.get("horizon", []),
        pictures=best.get("pictures", []),
    )


def _read_floats(cell: Mapping[str, Any], name: str) -> Floats:
    return np.array([np.nan if v is None else v for v in cell[name]], dtype=np.float64)


def format_label(figure: Figure, axis: str, value: Any) -> str:
    """Format a value of an axis for a reader.

    >>> from sottovoce.studies.paper.definition import load_figure
    >>> format_label(load_figure("fig8"), "line", "lei")
    'Lei'
    """
    axis_definition = getattr(figure, axis)
    if axis_definition is None or value is None:
        return ""
    shown = load_methods()[value].name if axis_definition.key == "method" else f"{value:g}"
    label = str(axis_definition.label)
    return label.format(shown) if "{}" in label else f"{label} {shown}"


SCHEMA = "sottovoce.figure/1"
_KINDS: dict[str, type] = {
    **dict.fromkeys(("figure", "command", "definition"), str),
    **dict.fromkeys(("made", "cells", "moments"), list),
    "quick": bool,
    "plan": dict,
}
_LISTS = ("loss", "accuracy", "validation", "rounds", "horizon", "pictures", "distinct")
Runs = dict[tuple[str, int], "Outcome"]


@dataclass(frozen=True)
class Outcome:
    """The numbers that figures are made of; `epsilon` is what holds, not what was asked for."""

    loss: float
    accuracy: float
    validation: float
    rounds: int
    epsilon: float
    delta: float
    horizon: tuple[tuple[int, int], ...] = ()  # (t, T) from there on, where T shrank
    made: str = ""  # versions and device
    pictures: str = ""  # of prototypes: ten pictures, as text
    distinct: float = math.nan

    @classmethod
    def of(cls, record: Mapping[str, Any], made: str) -> Outcome:
        """Take the numbers from a run's record."""
        rounds, result = record["rounds"], record["result"]
        changes = [(0, rounds[0]["horizon"])] if rounds else []
        for entry in rounds:
            if entry["next_horizon"] != changes[-1][1]:
                changes.append((entry["t"] + 1, entry["next_horizon"]))
        last = rounds[-1] if rounds else record["initial"]
        return cls(
            loss=_read_number(result["test_loss"]),
            accuracy=_read_number(result["test_accuracy"]),
            validation=_read_number(last["validation_loss"]),
            rounds=result["rounds_used"],
            epsilon=record["guarantee"]["epsilon"],
            delta=record["guarantee"]["delta"],
            horizon=tuple(changes) if len(changes) > 1 else (),
            made=made,
        )


def _read_number(value: float | None) -> float:
    return math.nan if value is None else float(value)


def append_run(folder: Path, key: str, seed: int, outcome: Outcome) -> None:
    """Add a run to the journal."""
    store.append_line(folder, {"key": key, "seed": seed, **_compact(asdict(outcome))})


def read_runs(folder: Path) -> Runs:
    """Return every run that the folder holds, from its figures and its journal."""
    runs: Runs = {}
    for path in sorted(folder.glob("*.json")):
        # A figure of pictures knows more of a run than the others that share it.
        with_pictures = {key: run for key, run in runs.items() if run.pictures}
        content = read_figure(path)
        runs |= list_runs(content.get("cells", []), content.get("made", [])) | with_pictures

    def parse(line: dict[str, Any]) -> tuple[tuple[str, int], Outcome]:
        return (str(line.pop("key")), int(line.pop("seed"))), _read_outcome(line)

    return runs | dict(store.read_lines(folder, parse, "reproduce again"))


@dataclass(frozen=True, eq=False)
class Result:
    """A finished figure as it stands in its file."""

    figure: Figure
    quick: bool
    cells: list[dict[str, Any]] = field(default_factory=list)
    plan: dict[str, Any] = field(default_factory=dict)
    made: list[str] = field(default_factory=list)
    command: str = ""
    moments: list[dict[str, Any]] = field(default_factory=list)

    def text(self) -> str:
        """Return the content of NAME.json."""
        head = {
            "schema": SCHEMA,
            "figure": self.figure.name,
            "quick": self.quick,
            "command": self.command,
            "made": self.made,
            "definition": self.figure.text,
            "plan": self.plan,
        }
        return store.format_results(head, {"cells": self.cells, "moments": self.moments})

    def save(self, folder: Path) -> Path:
        """Write NAME.json, whole or not at all."""
        path = folder / f"{self.figure.name}.json"
        write_file(path, self.text().encode())
        return path


def gather_result(
    figure: Figure, quick: bool, cells: list[Cell], runs: Runs, command: str
) -> Result:
    """Return the result of a sweep, once all of its runs are known."""
    seeds = seeds_of(figure, quick)
    base = flatten_plan(cells[0].plan.to_dict())
    made: dict[str, int] = {}
    rows = []
    for cell in cells:
        cell_runs = [runs[cell.key, seed] for seed in seeds]
        for one in cell_runs:
            made.setdefault(one.made, len(made))
        plan = flatten_plan(cell.plan.to_dict())
        changes = {k: v for k, v in plan.items() if base.get(k) != v}
        row: dict[str, Any] = {
            "variant": cell.variant,
            **dict(zip(AXES, cell.place, strict=True)),
            "search": cell.search,
            "key": cell.key,
            "changes": changes,
            "without": sorted(base.keys() - plan.keys()),
            "epsilon": cell_runs[0].epsilon,
            "delta": cell_runs[0].delta,
            "made": [made[one.made] for one in cell_runs],
            "seeds": seeds,
        }
        for name in _LISTS if figure.kind == "prototypes" else _LISTS[:-2]:
            values = [_compact(asdict(one)).get(name) for one in cell_runs]
            if any(value is not None for value in values):
                row[name] = values
        rows.append({k: v for k, v in row.items() if v not in (None, [], {})})
    return Result(
        figure=figure,
        quick=quick,
        cells=rows,
        plan=cells[0].plan.to_dict(),
        made=list(made),
        command=command,
    )


def read_figure(path: Path) -> dict[str, Any]:
    """Return the content of a figure's file; other JSON files are none and give nothing."""
    content = store.read_results(path, SCHEMA)
    if content:
        with store.refuse_damage(path):
            for key, kind in _KINDS.items():
                if not isinstance(content[key], kind):
                    raise ValueError(f"{key} is no {kind.__name__}")
            list_runs(content["cells"], content["made"])
    return content


def flatten_plan(plan: Mapping[str, Any]) -> dict[str, Any]:
    """Return a plan with dotted keys.

    >>> flatten_plan({"noise": "simulated", "data": {"name": "digits"}})
    {'noise': 'simulated', 'data.name': 'digits'}
    """
    out: dict[str, Any] = {}
    for key, value in plan.items():
        if isinstance(value, Mapping):
            out |= {f"{key}.{name}": item for name, item in value.items()}
        else:
            out[key] = value
    return out


def list_runs(rows: Sequence[Mapping[str, Any]], made: Sequence[str] = ()) -> Runs:
    """Return the runs of rows that have a list with one value for every seed.

    A row says how each run was made, or where in the list `made` that stands.
    """
    runs: Runs = {}
    for row in rows:
        names = [name for name in _LISTS if name in row]
        for i, seed in enumerate(row["seeds"]):
            values = {name: row[name][i] for name in names if row[name][i] is not None}
            values |= {"epsilon": row["epsilon"], "delta": row["delta"]}
            if row.get("made"):
                maker = row["made"][i]
                values["made"] = maker if isinstance(maker, str) else made[maker]
            runs[row["key"], seed] = _read_outcome(values)
    return runs


def _read_outcome(entry: Mapping[str, Any]) -> Outcome:
    blank = {"loss": math.nan, "accuracy": math.nan, "validation": math.nan}
    horizon = tuple((int(t), int(T)) for t, T in entry.get("horizon", ()))
    return Outcome(**{**blank, **entry, "horizon": horizon})


def _compact(values: Mapping[str, Any]) -> dict[str, Any]:
    """Round numbers to six digits, and leave out what is empty or not finite."""
    out: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, float):
            if math.isfinite(value):
                out[key] = float(f"{value:.6g}") if key in _LISTS else value
        elif value not in ("", ()):
            out[key] = value
    return out
