"""`sottovoce reproduce frontier`: what the same budget buys, the paper's way and ours.

`frontier.toml` lists curves. The paper's are points of figures (their plans, and so their runs, are
shared with those figures); ours are plans of their own. Every point is a few plans' worth of
seeds, placed at the ε that really holds. Curves with `fitted` are no federations: a layer fitted in
the open, to public rows alone (no client takes part: ε = 0) or to the clients' (no ε holds).

OUT/frontier/frontier.json   every point, a number for every seed
OUT/frontier/frontier.svg    accuracy against the true ε
OUT/frontier/frontier.md     the table of docs/frontier.md
"""

from __future__ import annotations

import json
import statistics
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from sottovoce._version import __version__
from sottovoce.data.files import make_folder, write_file
from sottovoce.errors import DataError, RunError
from sottovoce.plan import Plan
from sottovoce.studies.paper import fitted, outcomes, runner
from sottovoce.studies.paper.definition import figure
from sottovoce.studies.paper.expand import Cell, expand
from sottovoce.studies.paper.outcomes import Outcome, Runs, flat

NAME, SCHEMA = "frontier", "sottovoce.frontier/1"
#: The ε asked for that stands for a layer fitted to the clients' rows in the open.
OPEN = 1e6
#: The quick version: the first point of every curve, two rounds on the digits of sottovoce itself.
QUICK = {"data.name": "digits", "data.clients": 10, "rounds.rounds": 2, "rounds.per_round": 10}


@dataclass(frozen=True)
class Point:
    """A measured point: the plan's ε, what holds, and one accuracy for every seed."""

    panel: str
    curve: str
    asked: float
    epsilon: float
    delta: float
    key: str
    plan: Mapping[str, Any]
    seeds: tuple[int, ...]
    accuracy: tuple[float, ...]
    rounds: tuple[int, ...]
    made: tuple[str, ...]

    @property
    def mean(self) -> float:
        """The mean accuracy."""
        return statistics.mean(self.accuracy)

    @property
    def spread(self) -> float:
        """The standard deviation over the seeds; 0 of one."""
        return statistics.stdev(self.accuracy) if len(self.accuracy) > 1 else 0.0


@dataclass(frozen=True)
class Panel:
    """One drawing: the same federation, reached by different curves."""

    name: str
    title: str
    curves: tuple[str, ...]
    labels: Mapping[str, str]


def panels() -> list[Panel]:
    """The panels in their order.

    >>> [panel.name for panel in panels()][0]
    'mnist'
    """
    return [
        Panel(
            name=own["name"],
            title=own["title"],
            curves=tuple(curve["name"] for curve in own["curve"]),
            labels={curve["name"]: curve["label"] for curve in own["curve"]},
        )
        for own in _definition()["panel"]
    ]


def seeds(quick: bool, first: int = 1) -> tuple[int, ...]:
    """first, first + 1, …: a curve begins where settings were chosen on other seeds.

    >>> seeds(quick=False, first=11)
    (11, 12, 13, 14, 15)
    """
    return tuple(range(first, first + (1 if quick else _definition()["seeds"])))


def cells(quick: bool) -> list[Cell]:
    """Every plan to train: `panel` and `line` are the panel and the curve, `x` is the ε asked for.

    >>> cells(quick=False)[0].plan.data.name
    'mnist'
    """
    return [cell for cell, _ in _cells(quick)]


def wanted(quick: bool) -> dict[tuple[str, str, str], tuple[int, ...]]:
    """The seeds of every point, by panel, curve and key."""
    trained = {(c.panel, c.line, c.key): own for c, own in _cells(quick)}
    return trained | {(f.cell.panel, f.cell.line, f.key): f.seeds for f in _fits(quick)}


def _cells(quick: bool) -> list[tuple[Cell, tuple[int, ...]]]:
    found = []
    for panel in _definition()["panel"]:
        for curve in panel["curve"]:
            if "fitted" in curve:
                continue
            own = seeds(quick, curve.get("first_seed", 1))
            for epsilon, plan in list(_plans(curve))[: 1 if quick else None]:
                place = (panel["name"], curve["name"], epsilon)
                plan = _quick(plan) if quick else plan
                found.append((Cell("corrected", *place, None, plan), own))
    return found


@dataclass(frozen=True)
class Fit:
    """A layer to be fitted in the open, to whose rows, with which seeds."""

    cell: Cell
    whose: fitted.Whose
    seeds: tuple[int, ...]

    @property
    def key(self) -> str:
        """What names it."""
        return f"{self.whose}-{self.cell.key}"


def _fits(quick: bool) -> list[Fit]:
    found = []
    for panel in _definition()["panel"]:
        for curve in panel["curve"]:
            if "fitted" not in curve:
                continue
            # The public rows are the same whatever the seed.
            one = curve["fitted"] == "public" or quick
            own = seeds(one, curve.get("first_seed", 1))
            for _, plan in list(_plans(curve))[: 1 if quick else None]:
                x = 0.0 if curve["fitted"] == "public" else OPEN
                plan = _quick(plan).replace(**{"data.public": None}) if quick else plan
                cell = Cell("corrected", panel["name"], curve["name"], x, None, plan)
                found.append(Fit(cell, curve["fitted"], own))
    return found


def _plans(curve: Mapping[str, Any]) -> Iterator[tuple[float, Plan]]:
    if "figure" in curve:
        variant, line = curve["variant"], curve["line"]
        own = [c for c in expand(figure(curve["figure"]), quick=False)
               if (c.variant, c.line) == (variant, line)]  # fmt: skip
        for epsilon in curve["epsilon"]:
            yield epsilon, own[0].plan.replace(**{"privacy.epsilon": float(epsilon)})
        return
    tables: dict[str, dict[str, Any]] = {}
    for name, value in curve["plan"].items():
        table, _, key = name.partition(".")
        tables.setdefault(table, {})[key] = value
    base = Plan(**tables)
    for point in curve["point"]:
        yield point.get("privacy.epsilon", 0.0), base.replace(**point)


def _quick(plan: Plan) -> Plan:
    changes: dict[str, Any] = dict(QUICK)
    if plan.model.features is not None:
        changes |= {"model.cell": 4, "model.colours": None}
    if plan.model.name == "cnn":
        changes["model.channels"] = 2
    if plan.model.name == "mlp":
        changes["model.hidden"] = 8
    if plan.model.name == "svm":  # it tells two classes apart
        changes |= {"model.name": "softmax", "model.kappa": None}
    return plan.replace(**changes)


def reproduce(
    *, quick: bool, out: Path, progress: Callable[[int, int], None] = lambda done, total: None
) -> list[Point]:
    """Run what is missing in `out` and `out/frontier`, and write the files; the points."""
    from sottovoce.studies.paper import frontier_page

    folder = out / NAME
    make_folder(folder)
    outcomes.mend(folder)
    listed = _cells(quick)
    runs = _known(folder) | outcomes.known(out) | outcomes.known(folder)
    missing = {
        (cell.key, seed): (cell, seed, None)
        for cell, own in listed
        for seed in own
        if (cell.key, seed) not in runs
    }
    absent = runner.train(list(missing.values()), folder, progress)
    runs |= outcomes.known(folder)
    places = [(cell, cell.key, own) for cell, own in listed]
    for fit in _fits(quick):
        try:
            runs |= _fitted(fit, folder, runs)
            places.append((fit.cell, fit.key, fit.seeds))
        except DataError as error:
            absent += [str(error)] if str(error) not in absent else []
    points = [
        _point(cell, key, [(seed, runs[key, seed]) for seed in own])
        for cell, key, own in places
        if all((key, seed) in runs for seed in own)
    ]
    save(folder, points, quick)
    frontier_page.write(folder, points)
    if absent:
        raise DataError(f"the frontier is not complete: {' '.join(absent)}")
    outcomes.finish(folder)
    return points


def _fitted(fit: Fit, folder: Path, runs: Runs) -> Runs:
    """What is missing of a layer fitted in the open; stored as it comes, like a run."""
    found: Runs = {}
    for seed in fit.seeds:
        if (fit.key, seed) in runs:
            continue
        score = fitted.accuracy(fit.cell.plan, fit.whose, seed)
        found[fit.key, seed] = Outcome(
            loss=float("nan"),
            accuracy=score,
            validation=float("nan"),
            rounds=0,
            epsilon=fit.cell.x,
            delta=0.0,
            made=f"sottovoce {__version__}, scipy's L-BFGS",
        )
        outcomes.append(folder, fit.key, seed, found[fit.key, seed])
    return found


def _point(cell: Cell, key: str, own: list[tuple[int, Outcome]]) -> Point:
    first = own[0][1]
    return Point(
        panel=cell.panel,
        curve=cell.line,
        asked=cell.x,
        epsilon=first.epsilon,
        delta=first.delta,
        key=key,
        plan=flat(cell.plan.to_dict()),
        seeds=tuple(seed for seed, _ in own),
        accuracy=tuple(float(f"{one.accuracy:.6g}") for _, one in own),
        rounds=tuple(one.rounds for _, one in own),
        made=tuple(one.made for _, one in own),
    )


def save(folder: Path, points: list[Point], quick: bool) -> None:
    """Write frontier.json, a line for every point."""
    head = json.dumps({"schema": SCHEMA, "quick": quick})[:-1]
    lines = ",\n".join(json.dumps(vars(point), ensure_ascii=False) for point in points)
    text = f'{head},\n "points": [\n{lines}\n ]\n}}\n'
    write_file(folder / f"{NAME}.json", text.encode())


def load(folder: Path) -> list[Point]:
    """The points of a folder, or a sentence why there are none."""
    path = folder / f"{NAME}.json"
    try:
        content = json.loads(path.read_text("utf-8"))
        if content["schema"] != SCHEMA:
            raise ValueError(content["schema"])
        listed: list[dict[str, Any]] = content["points"]
        return [Point(**{k: _frozen(v) for k, v in one.items()}) for one in listed]
    except FileNotFoundError:
        raise RunError(f"{folder} holds no {NAME}.json; sottovoce reproduce {NAME}") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RunError(f"{path} cannot be read ({error}); remove it and reproduce it") from None


def _frozen(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _known(folder: Path) -> Runs:
    if not (folder / f"{NAME}.json").exists():
        return {}
    return {
        (point.key, seed): Outcome(
            loss=float("nan"),
            accuracy=accuracy,
            validation=float("nan"),
            rounds=rounds,
            epsilon=point.epsilon,
            delta=point.delta,
            made=made,
        )
        for point in load(folder)
        for seed, accuracy, rounds, made in zip(
            point.seeds, point.accuracy, point.rounds, point.made, strict=True
        )
    }


def _definition() -> dict[str, Any]:
    text = resources.files("sottovoce.studies.paper").joinpath("frontier.toml").read_text("utf-8")
    return tomllib.loads(text)
