"""`sottovoce reproduce frontier`: what the same budget buys, the paper's way and ours.

`frontier.toml` lists curves. The paper's are points of figures (their plans, and so their runs, are
shared with those figures); ours are plans of their own. Every point is a few plans' worth of
seeds, placed at the ε that really holds. Curves with `fitted` are no federations but levels to
compare with: a softmax layer fitted without clipping or noise, to public rows alone (no client
takes part: ε = 0) or to all clients' rows in one place (no ε holds).

OUT/frontier/frontier.json   every point, a number for every seed
OUT/frontier/frontier.svg    accuracy against the true ε
OUT/frontier/frontier.md     the table of docs/frontier.md
"""

from __future__ import annotations

import statistics
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from sottovoce._version import __version__
from sottovoce.data.files import make_folder, write_file
from sottovoce.errors import DataError, RunError
from sottovoce.plan import Plan
from sottovoce.privacy.budget import format_claim
from sottovoce.privacy.gaussian import Floats
from sottovoce.reports.charts import BLUE, GREEN, INK, MUTED, ORANGE, PURPLE, draw_svg, tidy_axes
from sottovoce.studies import store
from sottovoce.studies.paper import outcomes
from sottovoce.studies.paper.definition import Cell, expand, load_figure
from sottovoce.studies.paper.outcomes import Outcome, Runs, flat

MOST_LISTED = 8  # the largest ε of the paper's curves that the table lists; the picture shows all
_LOOKS: dict[str, tuple[str, str, Any]] = {
    "paper": (ORANGE, "o", (0, (5, 2))),
    "corrected": (MUTED, "s", "solid"),
    "ours": (BLUE, "D", "solid"),
    "ours, fewer": (GREEN, "^", "solid"),
    "adult": (PURPLE, "v", "solid"),
    "rehearsed": (GREEN, "^", "solid"),
}


def write(folder: Path, points: Sequence[FrontierPoint]) -> None:
    """Write frontier.svg and frontier.md."""
    write_file(folder / f"{NAME}.md", table(points).encode())
    write_file(folder / f"{NAME}.svg", picture(points).encode())


def table(points: Sequence[FrontierPoint]) -> str:
    """Return the table of points: panel, curve, true ε, accuracy over the seeds, rounds, settings.

    >>> table([]).splitlines()[1]
    '|---|---|---|---|---|---|'
    """
    lines = [
        "| data | how | ε that holds | test accuracy | rounds | T₀, η, C, after the noise |",
        "|---|---|---|---|---|---|",
    ]
    for panel in panels():
        for curve in panel.curves:
            for point in points:
                theirs = point.curve in ("paper", "corrected")
                listed = point.asked <= MOST_LISTED or not theirs
                if (point.panel, point.curve) == (panel.name, curve) and listed:
                    lines.append(_line(panel, point))
    return "\n".join(lines) + "\n"


def _line(panel: Panel, point: FrontierPoint) -> str:
    plan = point.plan
    if _level(point):
        return _level_line(panel, point)
    score = f"{100 * point.mean:.2f} ± {100 * point.spread:.2f} %"
    ours = point.curve.startswith("ours") or point.curve == "rehearsed"
    score = f"**{score}**" if ours else score
    rounds = f"{min(point.rounds)}" + (
        f"–{max(point.rounds)}" if min(point.rounds) < max(point.rounds) else ""
    )
    after = [str(plan[key]) for key in ("server.decay", "server.average") if key in plan]
    if "server.momentum" in plan:
        after.append(f"momentum {plan['server.momentum']:g}")
    settings = [
        f"{plan['rounds.rounds']}",
        f"{plan['local.learning_rate']:g}",
        f"{plan['local.clip']:g}",
        " + ".join(after) or "–",
    ]
    holds = format_claim(point.epsilon, 3)
    cells = [panel.title, panel.labels[point.curve], holds, score, rounds, ", ".join(settings)]
    return f"| {' | '.join(cells)} |"


def _level_line(panel: Panel, point: FrontierPoint) -> str:
    """Return the row of a fitted layer: no rounds, and an ε of 0 (no client) or none."""
    score = f"{100 * point.mean:.2f}"
    # Where nothing is left over, every seed deals the same rows.
    score += f" ± {100 * point.spread:.2f} %" if len(set(point.accuracy)) > 1 else " %"
    how = panel.labels[point.curve] + _public_rows(point)
    holds = "0, no client" if point.asked == 0 else "none"
    return f"| {panel.title} | {how} | {holds} | {score} | – | – |"


def _public_rows(point: FrontierPoint) -> str:
    """Return the number of public rows, where no client took part."""
    rows = point.plan.get("data.public") if point.asked == 0 else None
    return f" ({rows:,})" if rows else ""


def picture(points: Sequence[FrontierPoint]) -> str:
    """Draw a panel for each federation that was measured at more than one ε."""
    drawn = [
        panel for panel in panels() if len({p.asked for p in points if p.panel == panel.name}) > 1
    ]

    def paint(page: Any) -> None:
        parts = page.subfigures(1, max(1, len(drawn)), squeeze=False)[0]
        for subfigure, panel in zip(parts, drawn, strict=False):
            subfigure.suptitle(panel.title, fontsize=9.6, color=INK)
            ax = subfigure.add_subplot()
            _lines(ax, panel, [p for p in points if p.panel == panel.name])
            tidy_axes(ax)
            handles, names = ax.get_legend_handles_labels()
            subfigure.legend(handles, names, loc="outside lower center", ncols=1, fontsize=8.6)

    return draw_svg(NAME, "", paint, size=(4.3 * max(1, len(drawn)), 4.0), inline=False)


def _level(point: FrontierPoint) -> bool:
    """Return whether it is a fitted layer: a level to compare a curve with, not a point of one."""
    return point.asked in (0.0, OPEN)


def _lines(ax: Any, panel: Panel, points: Sequence[FrontierPoint]) -> None:
    ticks: set[float] = set()
    for curve in panel.curves:
        on_curve = sorted((p for p in points if p.curve == curve), key=lambda p: p.epsilon)
        if not on_curve:
            continue
        if _level(on_curve[0]):
            for level in on_curve:
                rows = _public_rows(level)
                stroke = (0, (1.5, 1.5)) if level.asked else (0, (4, 1.5, 1, 1.5))
                ax.axhline(
                    100 * level.mean,
                    color=MUTED,
                    linewidth=0.9,
                    linestyle=stroke,
                    label=panel.labels[curve] + rows,
                )
            continue
        colour, marker, stroke = _LOOKS[curve]
        ax.errorbar(
            [p.epsilon for p in on_curve],
            [100 * p.mean for p in on_curve],
            yerr=[100 * p.spread for p in on_curve],
            color=colour,
            marker=marker,
            markersize=4.5,
            linestyle=stroke,
            elinewidth=0.8,
            capsize=1.8,
            label=panel.labels[curve],
        )
        ticks |= {p.asked for p in on_curve}
    ax.set_xscale("log")
    ax.set_xticks(sorted(ticks), [f"{tick:g}" for tick in sorted(ticks)])
    ax.minorticks_off()
    ax.set(xlabel="ε that holds", ylabel="test accuracy (%)")


Whose: TypeAlias = Literal["public", "clients"]

PENALTY = 1e-4  # λ of the fitted layer; fixed beforehand for all datasets
MOST_STEPS = 500


def accuracy(plan: Plan, whose: Whose, seed: int) -> float:
    """Return the test accuracy of a layer fitted to these rows, on the plan's features.

    `public` are the first `data.public` rows (without it the validation rows), `clients` are the
    rows that clients hold with this seed.
    """
    from sottovoce.data.federated import load_holdings

    if whose == "public" and plan.data.public is not None:  # let all of them steer
        plan = plan.replace(**{"data.validation": plan.data.public})
    held = load_holdings(plan, seed=seed)
    rows = held.validation if whose == "public" else held.train
    layer = fit(np.asarray(rows.x), np.asarray(rows.y), held.classes)
    return float(np.mean(predict(layer, np.asarray(held.test.x)) == held.test.y))


def fit(x: NDArray[Any], y: NDArray[Any], classes: int) -> Floats:
    """Minimise mean cross-entropy + λ/2·‖w‖² by L-BFGS; biases (the last row) have no penalty.

    >>> layer = fit(np.array([[-1.0], [-2.0], [1.0], [3.0]]), np.array([0, 0, 1, 1]), 2)
    >>> predict(layer, np.array([[-5.0], [5.0]])).tolist()
    [0, 1]
    """
    from scipy.optimize import minimize

    rows = np.column_stack([x, np.ones(len(x))]).astype(np.float64)
    one_hot = np.zeros((len(y), classes))
    one_hot[np.arange(len(y)), y] = 1

    def objective(flat: Floats) -> tuple[float, Floats]:
        w = flat.reshape(rows.shape[1], classes)
        scores = rows @ w
        scores -= scores.max(axis=1, keepdims=True)
        total = np.log(np.exp(scores).sum(axis=1, keepdims=True))
        held = w.copy()
        held[-1] = 0
        loss = float(np.mean(total[:, 0] - np.sum(one_hot * scores, axis=1)))
        slope = rows.T @ (np.exp(scores - total) - one_hot) / len(rows) + PENALTY * held
        return loss + PENALTY / 2 * float(np.sum(held**2)), slope.ravel()

    start = np.zeros(rows.shape[1] * classes)
    found = minimize(objective, start, jac=True, method="L-BFGS-B", options={"maxiter": MOST_STEPS})
    return np.asarray(found.x).reshape(rows.shape[1], classes)


def predict(layer: Floats, x: NDArray[Any]) -> NDArray[np.int64]:
    """Return the class of every row."""
    return np.asarray(np.argmax(x @ layer[:-1] + layer[-1], axis=1))


NAME, SCHEMA = "frontier", "sottovoce.frontier/1"
#: The ε asked for that stands for a layer fitted to the clients' rows in the open.
OPEN = 1e6
#: The quick version: the first point of every curve, two rounds on the digits of sottovoce itself.
QUICK = {"data.name": "digits", "data.clients": 10, "rounds.rounds": 2, "rounds.per_round": 10}


@dataclass(frozen=True)
class FrontierPoint:
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
    """List the panels in order.

    >>> [panel.name for panel in panels()][0]
    'mnist'
    """
    return [
        Panel(
            name=panel["name"],
            title=panel["title"],
            curves=tuple(curve["name"] for curve in panel["curve"]),
            labels={curve["name"]: curve["label"] for curve in panel["curve"]},
        )
        for panel in _definition()["panel"]
    ]


def seeds(quick: bool, first: int = 1) -> tuple[int, ...]:
    """List seeds from `first` on; a curve's first seed is one that chose none of its settings.

    >>> seeds(quick=False, first=11)
    (11, 12, 13, 14, 15)
    """
    return tuple(range(first, first + (1 if quick else _definition()["seeds"])))


def cells(quick: bool) -> list[Cell]:
    """List the plans to train; of a cell, `line` is the curve and `x` the ε asked for.

    >>> cells(quick=False)[0].plan.data.name
    'mnist'
    """
    return [cell for cell, _ in _cells(quick)]


def list_wanted_seeds(quick: bool) -> dict[tuple[str, str, str], tuple[int, ...]]:
    """Return the seeds of every point, by panel, curve and key."""
    trained = {(c.panel, c.line, c.key): cell_seeds for c, cell_seeds in _cells(quick)}
    return trained | {(f.cell.panel, f.cell.line, f.key): f.seeds for f in _fits(quick)}


def _cells(quick: bool) -> list[tuple[Cell, tuple[int, ...]]]:
    found = []
    for panel in _definition()["panel"]:
        for curve in panel["curve"]:
            if "fitted" in curve:
                continue
            curve_seeds = seeds(quick, curve.get("first_seed", 1))
            for epsilon, plan in list(_plans(curve))[: 1 if quick else None]:
                point = (panel["name"], curve["name"], epsilon)
                plan = _quick(plan) if quick else plan
                found.append((Cell("corrected", *point, None, plan), curve_seeds))
    return found


@dataclass(frozen=True)
class Fit:
    """A layer to be fitted in the open, to whose rows, with which seeds."""

    cell: Cell
    whose: Whose
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
            curve_seeds = seeds(one, curve.get("first_seed", 1))
            for _, plan in list(_plans(curve))[: 1 if quick else None]:
                x = 0.0 if curve["fitted"] == "public" else OPEN
                plan = _quick(plan).replace(**{"data.public": None}) if quick else plan
                cell = Cell("corrected", panel["name"], curve["name"], x, None, plan)
                found.append(Fit(cell, curve["fitted"], curve_seeds))
    return found


def _plans(curve: Mapping[str, Any]) -> Iterator[tuple[float, Plan]]:
    if "figure" in curve:
        variant, line = curve["variant"], curve["line"]
        cells = [c for c in expand(load_figure(curve["figure"]), quick=False)
               if (c.variant, c.line) == (variant, line)]  # fmt: skip
        for epsilon in curve["epsilon"]:
            yield epsilon, cells[0].plan.replace(**{"privacy.epsilon": float(epsilon)})
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
    *, quick: bool, out: Path, train: Callable[[Sequence[tuple[Cell, int, None]], Path], list[str]]
) -> list[FrontierPoint]:
    """Run what is missing in `out` and `out/frontier`, write the files, and return the points.

    `train` runs the jobs that it is given, stores their outcomes in a folder, and returns a
    sentence for each data set that is missing.
    """
    folder = out / NAME
    make_folder(folder)
    listed = _cells(quick)
    runs = _read_runs(folder) | outcomes.read_runs(out) | outcomes.read_runs(folder)
    missing = {
        (cell.key, seed): (cell, seed, None)
        for cell, cell_seeds in listed
        for seed in cell_seeds
        if (cell.key, seed) not in runs
    }
    absent = train(list(missing.values()), folder)
    runs |= outcomes.read_runs(folder)
    places = [(cell, cell.key, cell_seeds) for cell, cell_seeds in listed]
    for fit in _fits(quick):
        try:
            runs |= _fit_missing(fit, folder, runs)
            places.append((fit.cell, fit.key, fit.seeds))
        except DataError as error:
            absent += [str(error)] if str(error) not in absent else []
    points = [
        _point(cell, key, [(seed, runs[key, seed]) for seed in cell_seeds])
        for cell, key, cell_seeds in places
        if all((key, seed) in runs for seed in cell_seeds)
    ]
    write_points(folder, points, quick)
    write(folder, points)
    if absent:
        raise DataError(f"the frontier is not complete: {' '.join(absent)}")
    store.remove_journal(folder)
    return points


def _fit_missing(fit: Fit, folder: Path, runs: Runs) -> Runs:
    """Fit a layer with the seeds that are missing, and store each outcome like a run's."""
    found: Runs = {}
    for seed in fit.seeds:
        if (fit.key, seed) in runs:
            continue
        score = accuracy(fit.cell.plan, fit.whose, seed)
        found[fit.key, seed] = Outcome(
            loss=float("nan"),
            accuracy=score,
            validation=float("nan"),
            rounds=0,
            epsilon=fit.cell.x,
            delta=0.0,
            made=f"sottovoce {__version__}, scipy's L-BFGS",
        )
        outcomes.append_run(folder, fit.key, seed, found[fit.key, seed])
    return found


def _point(cell: Cell, key: str, runs: list[tuple[int, Outcome]]) -> FrontierPoint:
    first = runs[0][1]
    return FrontierPoint(
        panel=cell.panel,
        curve=cell.line,
        asked=cell.x,
        epsilon=first.epsilon,
        delta=first.delta,
        key=key,
        plan=flat(cell.plan.to_dict()),
        seeds=tuple(seed for seed, _ in runs),
        accuracy=tuple(float(f"{one.accuracy:.6g}") for _, one in runs),
        rounds=tuple(one.rounds for _, one in runs),
        made=tuple(one.made for _, one in runs),
    )


def write_points(folder: Path, points: list[FrontierPoint], quick: bool) -> None:
    """Write frontier.json, a line for every point."""
    head = {"schema": SCHEMA, "quick": quick}
    text = store.format_results(head, {"points": [vars(point) for point in points]})
    write_file(folder / f"{NAME}.json", text.encode())


def read_points(folder: Path) -> list[FrontierPoint]:
    """Return the points of a folder, or say in a sentence why there are none."""
    path = folder / f"{NAME}.json"
    if not path.exists():
        raise RunError(f"{folder} holds no {NAME}.json; sottovoce reproduce {NAME}")
    content = store.read_results(path, SCHEMA)
    with store.refuse_damage(path):
        rows: list[dict[str, Any]] = content["points"]
        return [FrontierPoint(**{k: _freeze(v) for k, v in row.items()}) for row in rows]


def _freeze(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _read_runs(folder: Path) -> Runs:
    if not (folder / f"{NAME}.json").exists():
        return {}
    return outcomes.list_runs([vars(point) for point in read_points(folder)])


def _definition() -> dict[str, Any]:
    text = resources.files("sottovoce.studies.paper").joinpath("frontier.toml").read_text("utf-8")
    return tomllib.loads(text)
