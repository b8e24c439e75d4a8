"""What is stored of a run (`studies.store`), finished figures as arrays, and the verdicts on them.

`runs.jsonl`   a line for every run of a sweep that is under way
`NAME.json`    a finished figure: its plan, its cells with one number for every seed, and how made

A run is named by its plan and seed, so that figures share runs, and folders made on different
machines may be merged by copying files.

A claim of a figure names a check, which gives numbers that are positive where the claim is right:

`lower`, `higher`   first against than, wherever else the figure varies
`close`             first exceeds than's loss by a given share at most
`convex`            the curve lies below the chord between its ends, and no point clearly above
                    the chord of its neighbours
`rises`, `falls`    the slope of a measure (or of the best x) along an axis
`best`              one x has the lowest measure, against each other x
`nearer`            loss rises with the distance of x from the reference's best T
`above`             the paper's moment bound is nowhere below the truth
`overdrawn`         the ε that holds is larger than the one asked for

docs/figures.md says how a verdict follows from one number for each seed at each point; `judge`
computes it. A number that is not finite decides nothing.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import stdtrit

from sottovoce.data.files import write_file
from sottovoce.errors import DataError, InputError
from sottovoce.studies import store
from sottovoce.studies.paper import definition
from sottovoce.studies.paper.definition import (
    AXES,
    REFERENCE,
    Claim,
    Figure,
    compose_epsilon,
    expand,
    list_seeds,
    load_methods,
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

    def read_curve(self, measure: str, combo: Mapping[str, Any], axis: str = "x") -> Floats:
        """Return values[place, seed] along an axis, at a value of each other axis."""
        places = [_find_place({**combo, axis: value}) for value in self.axis(axis)]
        return np.stack([self.points[place].values[measure] for place in places])

    def name_place(self, combo: Mapping[str, Any]) -> str:
        """Return the value of each axis in words; axes of one value are left out."""
        named = [axis for axis in AXES if combo.get(axis) is not None and len(self.axis(axis)) > 1]
        return ", ".join(format_label(self.figure, axis, combo[axis]) for axis in named)


def _find_place(values: Mapping[str, Any]) -> Place:
    return values.get("panel"), values.get("line"), values.get("x")


def _choose_point(cells: list[dict[str, Any]]) -> Point:
    # A search is decided by the mean loss on the rows that steer, once for all seeds.
    losses = [np.mean(np.array(cell["validation"], np.float64)) for cell in cells]  # None is nan
    best = cells[int(np.argmin(np.where(np.isfinite(losses), losses, np.inf)))]
    measures = ("loss", "accuracy", "validation", "rounds", "distinct")
    epsilon, delta = best["epsilon"], best["delta"]
    return Point(
        values={name: np.array(best[name], np.float64) for name in measures if name in best},
        epsilon=epsilon,
        epsilon_search=compose_epsilon(epsilon, delta, len(cells)) if len(cells) > 1 else epsilon,
        delta=delta,
        chosen=best.get("search"),
        tried=len(cells),
        horizon=best.get("horizon", []),
        pictures=best.get("pictures", []),
    )


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


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The numbers that figures are made of; `epsilon` is what holds, not what was asked for."""

    loss: float = math.nan
    accuracy: float = math.nan
    validation: float = math.nan
    rounds: int
    epsilon: float
    delta: float
    horizon: tuple[tuple[int, int], ...] = ()  # (t, T) from there on, where T shrank
    made: str = ""  # versions and device
    pictures: str = ""  # of prototypes: ten pictures, as text
    distinct: float = math.nan

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> Outcome:
        """Take the numbers from a run's record."""
        rounds, result = record["rounds"], record["result"]
        changes = [(0, rounds[0]["horizon"])] if rounds else []
        for entry in rounds:
            if entry["next_horizon"] != changes[-1][1]:
                changes.append((entry["t"] + 1, entry["next_horizon"]))
        last = rounds[-1] if rounds else record["initial"]
        names = {"sottovoce": "sottovoce", "python": "Python", "jax": "jax", "numpy": "numpy"}
        versions = [f"{name} {record['versions'][key]}" for key, name in names.items()]
        return cls(
            loss=_read_number(result["test_loss"]),
            accuracy=_read_number(result["test_accuracy"]),
            validation=_read_number(last["validation_loss"]),
            rounds=result["rounds_used"],
            epsilon=record["guarantee"]["epsilon"],
            delta=record["guarantee"]["delta"],
            horizon=tuple(changes) if len(changes) > 1 else (),
            made=", ".join([*versions, f"on {record['ran_on']}"]),
        )


def _read_number(value: float | None) -> float:
    return math.nan if value is None else float(value)


def append_run(folder: Path, key: str, seed: int, outcome: Outcome) -> None:
    """Add a run to the journal."""
    store.append_line(folder, {"key": key, "seed": seed, **_compact(asdict(outcome))})


def read_runs(folder: Path) -> Runs:
    """Return every run that the folder holds, from its figures and its journal."""
    return read_finished(folder) | read_journal(folder)


def read_finished(folder: Path) -> Runs:
    """Return the runs of the folder's figures."""
    runs: Runs = {}
    for path in sorted(folder.glob("*.json")):
        # A figure of pictures knows more of a run than the others that share it.
        with_pictures = {key: run for key, run in runs.items() if run.pictures}
        content = read_figure(path)
        runs |= list_runs(content.get("cells", []), content.get("made", [])) | with_pictures
    return runs


def read_journal(folder: Path) -> Runs:
    """Return the runs of the folder's journal."""

    def parse(line: dict[str, Any]) -> tuple[tuple[str, int], Outcome]:
        return (str(line.pop("key")), int(line.pop("seed"))), _read_outcome(line)

    return dict(store.read_lines(folder, parse, "reproduce again"))


def end_journal(folder: Path, finished: Runs) -> None:
    """Remove the journal if `finished` has every run of it; else another study goes on from it."""
    runs = read_journal(folder)
    if all(
        key in finished and bool(finished[key].pictures) >= bool(runs[key].pictures) for key in runs
    ):
        (folder / store.JOURNAL).unlink(missing_ok=True)


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

    @cached_property
    def tables(self) -> dict[str, PointTable]:
        """A table of points for every variant."""
        searches: dict[str, dict[Place, list[dict[str, Any]]]] = {}
        for cell in self.cells:
            searches.setdefault(cell["variant"], {}).setdefault(_find_place(cell), []).append(cell)
        return {
            variant: PointTable(
                self.figure, variant, {place: _choose_point(group) for place, group in by.items()}
            )
            for variant, by in searches.items()
        }

    def save(self, folder: Path) -> None:
        """Write NAME.json, whole or not at all."""
        write_file(folder / f"{self.figure.name}.json", self.text().encode())


def gather_result(figure: Figure, quick: bool, runs: Runs, command: str) -> Result:
    """Return the result of a sweep, once all of its runs are known."""
    seeds, cells = list_seeds(figure, quick), expand(figure, quick)
    base = flatten_plan(cells[0].plan.to_dict())
    made: dict[str, int] = {}
    rows = []
    for cell in cells:
        cell_runs = [runs[cell.key, seed] for seed in seeds]
        stored = [_compact(asdict(run)) for run in cell_runs]
        plan = flatten_plan(cell.plan.to_dict())
        row: dict[str, Any] = {
            "variant": cell.variant,
            **{axis: getattr(cell, axis) for axis in AXES},
            "search": cell.search,
            "key": cell.key,
            "changes": {k: v for k, v in plan.items() if base.get(k) != v},
            "without": sorted(base.keys() - plan.keys()),
            "epsilon": cell_runs[0].epsilon,
            "delta": cell_runs[0].delta,
            "made": [made.setdefault(run.made, len(made)) for run in cell_runs],
            "seeds": seeds,
        }
        for name in _LISTS if figure.kind == "prototypes" else _LISTS[:-2]:
            values = [run.get(name) for run in stored]
            if any(value is not None for value in values):
                row[name] = values
        rows.append({k: v for k, v in row.items() if v not in (None, [], {})})
    return Result(figure, quick, rows, cells[0].plan.to_dict(), list(made), command)


def read_figure(path: Path) -> dict[str, Any]:
    """Return the content of a figure's file; of another JSON file nothing."""
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


class ScoredSeeds:
    """A point with an accuracy for every seed."""

    accuracy: Sequence[float]

    @property
    def mean(self) -> float:
        """The mean accuracy in per cent."""
        return 100 * statistics.mean(self.accuracy)

    @property
    def spread(self) -> float:
        """The standard deviation over the seeds, in points; 0 of one."""
        return 100 * statistics.stdev(self.accuracy) if len(self.accuracy) > 1 else 0.0


def save_study(
    folder: Path, name: str, table: str, drawing: str, missing_data: Iterable[str], finished: Runs
) -> None:
    """Write the table and the picture of a study that has many curves, and end its journal.

    Where data are missing the journal stays, and the error says which.
    """
    write_file(folder / f"{name}.md", table.encode())
    write_file(folder / f"{name}.svg", drawing.encode())
    if sentences := list(dict.fromkeys(missing_data)):
        raise DataError(f"the {name} is not complete: {' '.join(sentences)}")
    end_journal(folder, finished)


def list_values(runs: Sequence[Outcome]) -> dict[str, Any]:
    """Return what a point has of every run: accuracy, rounds, and how it was made."""
    return {
        "accuracy": [float(f"{run.accuracy:.6g}") for run in runs],
        "rounds": [run.rounds for run in runs],
        "made": [run.made for run in runs],
    }


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
    horizon = tuple((int(t), int(T)) for t, T in entry.get("horizon", ()))
    return Outcome(**{**entry, "horizon": horizon})


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


@dataclass(frozen=True, eq=False)
class Judged:
    """A finished figure with the verdict on each of its claims, variant by variant."""

    figure: Figure
    result: Result
    verdicts: list[tuple[Claim, dict[str, Verdict]]]


def judge_folder(folder: Path) -> list[Judged]:
    """Judge all figures of a folder, in their order, by the claims of their definitions."""
    judged = []
    for path in folder.glob("*.json"):
        content = read_figure(path)
        if content:
            with store.refuse_damage(path):
                judged.append(judge_figure(content))
    known = definition.list_figures()
    order = {name: i for i, name in enumerate(known)}
    return sorted(judged, key=lambda one: order.get(one.figure.name, len(order)))


def judge_figure(content: dict[str, Any]) -> Judged:
    """Judge a figure from the content of its file."""
    figure = definition.parse_figure(content["definition"], content["figure"])
    keys = ("quick", "cells", "plan", "made", "command", "moments")
    result = Result(figure, **{key: content[key] for key in keys})
    verdicts: list[tuple[Claim, dict[str, Verdict]]] = []
    for claim in figure.claims:
        if figure.kind == "moments":
            verdicts.append((claim, {"printed": check_moments(result.moments)}))
            continue
        tables = {v: table for v, table in result.tables.items() if v in claim.variants}
        verdicts.append((claim, {v: check(claim, table) for v, table in tables.items()}))
    return Judged(figure, result, verdicts)


def format_verdict(verdict: Verdict | None) -> str:
    """Return a verdict in a few words, with its numbers.

    >>> format_verdict(judge({"": [0.2, 0.3, 0.25]}))
    'holds (0.25, 0.13 to 0.37)'
    >>> format_verdict(None)
    '–'
    """
    if verdict is None:
        return "–"
    if not (points := list(verdict.points.values())):
        return f"{verdict.word} (no such point here)"
    if len(points) > 1:
        means = [point.mean for point in points]
        span = f"{_format_signed(min(means))} to {_format_signed(max(means))}"
        return f"{verdict.word} ({verdict.tally}; means {span})"
    mean, low, high = (_format_signed(getattr(points[0], end)) for end in ("mean", "low", "high"))
    span = "" if points[0].low == points[0].high else f", {low} to {high}"
    return f"{verdict.word} ({mean}{span})"


def _format_signed(value: float) -> str:
    return (f"{value:.0f}" if 10 <= abs(value) < 1e6 else f"{value:.2g}").replace("-", "−")


def list_claims(all_judged: Iterable[Judged]) -> list[tuple[str, str, str, str, bool]]:
    """Return a row for each claim: words, figure, printed, corrected, and whether it is ours."""
    return [
        (
            claim.words,
            judged.figure.paper if judged.figure.paper != "ours" else judged.figure.name,
            format_verdict(verdicts.get("printed")),
            format_verdict(verdicts.get("corrected")),
            claim.ours,
        )
        for judged in all_judged
        for claim, verdicts in judged.verdicts
    ]


def format_markdown(all_judged: Iterable[Judged]) -> str:
    """Return the table of claims in Markdown."""
    rows = [
        [words + (" *(ours)*" if ours else ""), *cells]
        for words, *cells, ours in list_claims(all_judged)
    ]
    return format_table(["claim", "figure", "as printed", "corrected"], rows).rstrip()


def format_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table in Markdown.

    >>> format_table(["ε", "rounds"], [["8", "60"]])
    '| ε | rounds |\\n|---|---|\\n| 8 | 60 |\\n'
    """
    lines = [f"| {' | '.join(cells)} |\n" for cells in (head, *rows)]
    return "".join([lines[0], "|---" * len(head) + "|\n", *lines[1:]])


Word = Literal["holds", "contradicted", "undecided"]
LEVEL = 0.95


@dataclass(frozen=True)
class Interval:
    """A mean with its interval."""

    mean: float
    low: float
    high: float

    @property
    def word(self) -> Word:
        """What this point says by itself."""
        if self.low > 0:
            return "holds"
        return "contradicted" if self.high < 0 else "undecided"


@dataclass(frozen=True)
class Verdict:
    """The verdict on a claim, with what the seeds say at each point that it rests on."""

    word: Word
    points: Mapping[str, Interval]

    @property
    def tally(self) -> str:
        """How many points support and contradict the claim, in a few words.

        >>> judge({"ε = 4": [1.0, 1.1, 1.2], "ε = 8": [-1.0, -1.1, -1.2]}).tally
        'holds at 1 of 2, contradicted at 1'
        """
        words = [point.word for point in self.points.values()]
        parts = [f"holds at {words.count('holds')} of {len(words)}"]
        if words.count("contradicted"):
            parts.append(f"contradicted at {words.count('contradicted')}")
        return ", ".join(parts)


def compute_interval(differences: ArrayLike, level: float = LEVEL) -> Interval:
    """Return the mean with its interval, mean ± t·s/√n; one number is its own interval.

    >>> found = compute_interval([1.0, 2.0, 3.0])
    >>> round(found.low, 3), found.mean, round(found.high, 3)
    (-0.484, 2.0, 4.484)
    """
    values = np.atleast_1d(np.asarray(differences, dtype=np.float64))
    mean, n = float(values.mean()), len(values)
    if n == 1:
        return Interval(mean, mean, mean)
    t = float(stdtrit(n - 1, 0.5 + level / 2))
    half = t * float(values.std(ddof=1)) / float(np.sqrt(n))
    return Interval(mean, mean - half, mean + half)


def judge(differences: Mapping[str, ArrayLike], guards: Sequence[ArrayLike] = ()) -> Verdict:
    """Judge a claim from its points; `guards` can contradict it and cannot support it.

    >>> judge({"": [0.2, 0.3, 0.25, 0.2, 0.3]}).word
    'holds'
    >>> judge({"": [-0.2, -0.3, -0.25, -0.2, -0.3]}).word
    'contradicted'
    >>> judge({"": [-0.2, 0.3, 0.1, -0.3, 0.2]}).word
    'undecided'
    """
    points = {at: compute_interval(values) for at, values in differences.items()}
    every = [*differences.values(), *guards]
    strict = 1 - (1 - LEVEL) / max(1, len(every))
    if any(compute_interval(values, strict).high < 0 for values in every):
        return Verdict("contradicted", points)
    if points and all(point.low > 0 for point in points.values()):
        return Verdict("holds", points)
    return Verdict("undecided", points)


Points = dict[str, Any]
Check = Callable[[Claim, PointTable], Any]  # points, or points and guards (`judge`)


def check(claim: Claim, table: PointTable) -> Verdict:
    """Judge a claim in one variant of its figure."""
    if table.variant == "corrected":
        claim = claim.model_copy(update=dict(claim.corrected))
    if claim.check not in CHECKS:
        raise InputError.of("check", claim.check, f"one of {', '.join(CHECKS)}", "choose one")
    found = CHECKS[claim.check](claim, table)
    return judge(*found) if isinstance(found, tuple) else judge(found)


def check_moments(panels: list[dict[str, Any]]) -> Verdict:
    """Judge whether the bound is nowhere below the truth, panel by panel."""
    points = {}
    for letter, panel in zip("abcdefgh", panels, strict=False):
        worst = float(np.min(np.subtract(panel["bound"], panel["truth"])))
        # Nothing to spare is fine, below is not: the sign decides.
        points[f"({letter})"] = [worst if worst < 0 else max(worst, 1e-300)]
    return judge(points)


def _combine_axes(claim: Claim, table: PointTable, free: tuple[str, ...]) -> list[dict[str, Any]]:
    """Return all combinations of the axes that are not `free`, as far as `where` allows."""
    values = {axis: table.axis(axis) for axis in AXES if axis not in free}
    for axis, wanted in claim.where.items():
        if axis in values and wanted is not None:
            allowed = wanted if isinstance(wanted, list | tuple) else [wanted]
            values[axis] = [value for value in values[axis] if value in allowed]
    return [dict(zip(values, combo, strict=True)) for combo in product(*values.values())]


def _list_curves(
    claim: Claim, table: PointTable, measure: str, axis: str = "x"
) -> dict[str, Floats]:
    """Return values[place, seed] along an axis for each combination of the others, by its name."""
    combos = _combine_axes(claim, table, (axis,))
    return {table.name_place(c): table.read_curve(measure, c, axis) for c in combos}


def _pair_ends(claim: Claim, table: PointTable) -> list[tuple[str, Floats, Floats]]:
    """Return the places where `first` and `than` can be compared, with the values of both."""
    free = tuple(claim.first.keys() | claim.than.keys())
    rows = []
    for combo in _combine_axes(claim, table, free):
        first, than = (
            table.points.get(_find_place({**combo, **end})) for end in (claim.first, claim.than)
        )
        if first is not None and than is not None:
            pair = first.values[claim.measure], than.values[claim.measure]
            rows.append((table.name_place(combo), *pair))
    return rows


def _higher(claim: Claim, table: PointTable) -> Points:
    return {at: first - than for at, first, than in _pair_ends(claim, table)}


def _convex(claim: Claim, table: PointTable) -> tuple[Points, list[Floats]]:
    points, guards = {}, []
    x = np.array(table.axis("x"), dtype=np.float64)
    share = ((x - x[0]) / (x[-1] - x[0]))[1:-1, None]
    fraction = ((x[1:-1] - x[:-2]) / (x[2:] - x[:-2]))[:, None]
    for place, curve in _list_curves(claim, table, "loss").items():
        chord = curve[0] * (1 - share) + curve[-1] * share
        points[place] = np.mean(chord - curve[1:-1], axis=0)
        guards += list(curve[:-2] * (1 - fraction) + curve[2:] * fraction - curve[1:-1])
    return points, guards


def _rises(claim: Claim, table: PointTable) -> Points:
    axis = claim.along
    at = np.array(table.axis(axis), dtype=np.float64)
    if claim.measure != "best":
        by_place = _list_curves(claim, table, claim.measure, axis)
        return {place: _fit_slopes(at, curve) for place, curve in by_place.items()}
    # T spans decades: its logarithm, so that no single budget decides.
    logs, points = np.log(np.array(table.axis("x"), dtype=np.float64)), {}
    for combo in _combine_axes(claim, table, (axis, "x")):
        curves = [table.read_curve("loss", {**combo, axis: value}) for value in table.axis(axis)]
        best = np.stack([logs[np.argmin(curve, axis=0)] for curve in curves])  # for every seed
        points[table.name_place(combo)] = _fit_slopes(at, best)
    return points


def _fit_slopes(at: Floats, values: Floats) -> Floats:
    """Return the least-squares slope of values[place, seed] along `at`, one for each seed.

    A slope within rounding of 0 is 0: five equal rounding errors would pass for evidence.
    """
    centred = at - at.mean()
    rise = centred @ values
    noise = 1e-12 * np.sum(np.abs(centred)) * np.max(np.abs(values), initial=0.0)
    return np.asarray(np.where(np.abs(rise) <= noise, 0.0, rise) / np.sum(centred**2))


def _reverse(check: Check) -> Check:
    """Return the check of the opposite claim."""
    return lambda claim, table: {at: -values for at, values in check(claim, table).items()}


def _is_best(claim: Claim, table: PointTable) -> Points:
    rows = _combine_axes(claim, table, ("x",))
    rows = [combo for combo in rows if _find_place({**combo, "x": claim.at}) in table.points]
    if not rows:
        return {}
    curves = [table.read_curve(claim.measure, combo) for combo in rows]
    best = table.axis("x").index(claim.at)
    return {
        f"against {x:g}": np.mean([curve[i] - curve[best] for curve in curves], axis=0)
        for i, x in enumerate(table.axis("x"))
        if i != best
    }


def _nearer(claim: Claim, table: PointTable) -> Points:
    points = {}
    x = np.array(table.axis("x"), dtype=np.float64)
    for combo in _combine_axes(claim, table, ("x",)):
        best = table.points[_find_place({**combo, "x": REFERENCE})].chosen
        distance = np.abs(x - float(best or 0))
        if np.ptp(distance) > 0:
            curve = table.read_curve("loss", combo)
            points[table.name_place(combo)] = _fit_slopes(distance, curve)
    return points


CHECKS: dict[str, Check] = {
    "lower": _reverse(_higher),
    "higher": _higher,
    "close": lambda claim, table: {
        at: claim.within - (first - than) / than for at, first, than in _pair_ends(claim, table)
    },
    "convex": _convex,
    "rises": _rises,
    "falls": _reverse(_rises),
    "best": _is_best,
    "nearer": _nearer,
    "overdrawn": lambda claim, table: {
        table.name_place(combo): [table.points[_find_place(combo)].epsilon - float(combo["x"])]
        for combo in _combine_axes(claim, table, ())
    },
    "above": lambda claim, table: {},
}
