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

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
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
from sottovoce.reports.charts import INK, MUTED, draw_svg, tidy_axes
from sottovoce.studies import store
from sottovoce.studies.paper import outcomes
from sottovoce.studies.paper.definition import Cell, expand, load_figure, load_tables, nest_keys
from sottovoce.studies.paper.outcomes import Outcome, flatten_plan
from sottovoce.studies.paper.page import draw_error_bars, find_look

NAME, SCHEMA = "frontier", "sottovoce.frontier/1"
MOST_LISTED = 8  # the largest ε of the paper's curves that the table lists; the picture shows all
#: The ε asked for that stands for a layer fitted to the clients' rows in the open.
OPEN = 1e6
#: The quick version: the first point of every curve, two rounds on the digits of sottovoce itself.
QUICK = {"data.name": "digits", "data.clients": 10, "rounds.rounds": 2, "rounds.per_round": 10}
_QUICK_MODELS: Mapping[str, Mapping[str, Any]] = {
    "cnn": {"model.channels": 2},
    "mlp": {"model.hidden": 8},
    "svm": {"model.name": "softmax", "model.kappa": None},  # an svm tells two classes apart
}
Whose: TypeAlias = Literal["public", "clients"]
PENALTY = 1e-4  # λ of the fitted layer; fixed beforehand for all datasets
MOST_STEPS = 500


@dataclass(frozen=True)
class FrontierPoint(outcomes.ScoredSeeds):
    """A measured point: the plan's ε, what holds, and one accuracy for every seed."""

    panel: str
    curve: str
    asked: float
    epsilon: float
    delta: float
    key: str
    plan: Mapping[str, Any]
    seeds: Sequence[int]
    accuracy: Sequence[float]
    rounds: Sequence[int]
    made: Sequence[str]

    @property
    def is_level(self) -> bool:
        """Whether it is a fitted layer: a level to compare a curve with, not a point of one."""
        return self.asked in (0.0, OPEN)

    @property
    def public_rows(self) -> str:
        """The number of public rows in brackets, where no client took part; else nothing."""
        rows = self.plan.get("data.public") if self.asked == 0 else None
        return f" ({rows:,})" if rows else ""


@dataclass(frozen=True)
class Job:
    """A point to be measured: of its cell, `line` is the curve and `x` the ε asked for."""

    cell: Cell
    seeds: Sequence[int]
    fitted: Whose | None  # whose rows a layer is fitted to; None: a federation is trained

    @property
    def key(self) -> str:
        """What names its runs."""
        return self.cell.key if self.fitted is None else f"{self.fitted}-{self.cell.key}"


def list_jobs(quick: bool) -> list[Job]:
    """List the points of all curves; a curve's first seed is one that chose none of its settings.

    >>> first = list_jobs(quick=False)[0]
    >>> first.cell.plan.data.name, first.seeds
    ('mnist', [1, 2, 3, 4, 5])
    """
    jobs = []
    for panel in load_tables(NAME)["panel"]:
        for curve in panel["curve"]:
            fitted, first = curve.get("fitted"), curve.get("first_seed", 1)
            # The public rows are the same whatever the seed.
            count = 1 if quick or fitted == "public" else load_tables(NAME)["seeds"]
            for epsilon, plan in list(_list_plans(curve))[: 1 if quick else None]:
                asked = {None: epsilon, "public": 0.0, "clients": OPEN}[fitted]
                if quick:
                    small: dict[str, Any] = {"data.public": None} if fitted else {}
                    if plan.model.features is not None:
                        small |= {"model.cell": 4, "model.colours": None}
                    if plan.privacy.view == "sum":
                        small |= {"privacy.honest": 8, "privacy.corrupt": 1}
                    plan = plan.replace(**QUICK, **_QUICK_MODELS.get(plan.model.name, {}), **small)
                cell = Cell("corrected", panel["name"], curve["name"], asked, None, plan)
                jobs.append(Job(cell, list(range(first, first + count)), fitted))
    return jobs


def _list_plans(curve: Mapping[str, Any]) -> Iterator[tuple[float, Plan]]:
    """Yield the ε asked for and the plan of every point of a curve."""
    if "figure" in curve:
        cells = expand(load_figure(curve["figure"]), quick=False)
        at = curve["variant"], curve["line"]
        base = next(cell.plan for cell in cells if (cell.variant, cell.line) == at)
        points = [{"privacy.epsilon": float(epsilon)} for epsilon in curve["epsilon"]]
    else:
        base, points = Plan(**nest_keys(curve["plan"])), curve["point"]
    for point in points:
        yield point.get("privacy.epsilon", 0.0), base.replace(**point)


def reproduce(
    *, quick: bool, out: Path, train: Callable[[Sequence[tuple[Cell, int, None]], Path], list[str]]
) -> list[FrontierPoint]:
    """Run what is missing in `out` and `out/frontier`, write the files, and return the points.

    `train` runs the jobs that it is given, stores their outcomes in a folder, and returns a
    sentence for each data set that is missing.
    """
    folder, jobs = out / NAME, list_jobs(quick)
    make_folder(folder)
    measured = read_points(folder) if (folder / f"{NAME}.json").exists() else []
    runs = outcomes.list_runs([vars(point) for point in measured])
    runs |= outcomes.read_runs(out) | outcomes.read_runs(folder)
    wanted = {(job.key, seed): (job, seed) for job in jobs for seed in job.seeds}
    missing = {key: pair for key, pair in wanted.items() if key not in runs}
    absent = train([(j.cell, seed, None) for j, seed in missing.values() if not j.fitted], folder)
    for job, seed in missing.values():
        if job.fitted is not None:
            try:
                accuracy = score_layer(job.cell.plan, job.fitted, seed)
                made = f"sottovoce {__version__}, scipy's L-BFGS"  # stored as if it were a run
                run = Outcome(accuracy=accuracy, rounds=0, epsilon=job.cell.x, delta=0.0, made=made)
                outcomes.append_run(folder, job.key, seed, run)
            except DataError as error:
                absent.append(str(error))
    runs |= outcomes.read_runs(folder)
    points = []
    for job in jobs:
        found = [runs[job.key, seed] for seed in job.seeds if (job.key, seed) in runs]
        if len(found) == len(job.seeds):
            budget, plan = (found[0].epsilon, found[0].delta), flatten_plan(job.cell.plan.to_dict())
            values = outcomes.list_values(found)
            name = job.cell.panel, job.cell.line, job.cell.x
            points.append(FrontierPoint(*name, *budget, job.key, plan, job.seeds, **values))
    rows = [vars(point) for point in points]
    text = store.format_results({"schema": SCHEMA, "quick": quick}, {"points": rows})
    write_file(folder / f"{NAME}.json", text.encode())
    done = outcomes.list_runs(rows)
    outcomes.save_study(folder, NAME, format_table(points), draw_curves(points), absent, done)
    return points


def read_points(folder: Path) -> list[FrontierPoint]:
    """Return the points of a folder, or say in a sentence why there are none."""
    path = folder / f"{NAME}.json"
    if not path.exists():
        raise RunError(f"{folder} holds no {NAME}.json; sottovoce reproduce {NAME}")
    content = store.read_results(path, SCHEMA)
    with store.refuse_damage(path):
        return [FrontierPoint(**row) for row in content["points"]]


def format_table(points: Sequence[FrontierPoint]) -> str:
    """Return the table of points, in the order of the file."""
    head = ["data", "how", "ε that holds", "test accuracy", "rounds", "T₀, η, C, after the noise"]
    rows = []
    listed = [p for p in points if p.asked <= MOST_LISTED or p.curve not in ("paper", "corrected")]
    for panel in load_tables(NAME)["panel"]:
        for curve in panel["curve"]:
            name = panel["name"], curve["name"]
            for point in (p for p in listed if (p.panel, p.curve) == name):
                how = curve["label"] + point.public_rows
                rows.append([panel["title"], how, *_format_point(point)])
    return outcomes.format_table(head, rows)


def _format_point(point: FrontierPoint) -> list[str]:
    """Return the cells of a federation: ε that holds, accuracy, rounds, settings.

    A fitted layer has no rounds, and an ε of 0 (no client) or none.
    """
    if point.is_level:
        # Where nothing is left over, every seed deals the same rows.
        spread = f" ± {point.spread:.2f}" if len(set(point.accuracy)) > 1 else ""
        holds = "0, no client" if point.asked == 0 else "none"
        return [holds, f"{point.mean:.2f}{spread} %", "–", "–"]
    plan = point.plan
    score = f"{point.mean:.2f} ± {point.spread:.2f} %"
    ours = point.curve.startswith("ours") or point.curve == "rehearsed"
    least, most = min(point.rounds), max(point.rounds)
    after = [str(plan[key]) for key in ("server.decay", "server.average") if key in plan]
    if "server.momentum" in plan:
        after.append(f"momentum {plan['server.momentum']:g}")
    numbers = plan["rounds.rounds"], plan["local.learning_rate"], plan["local.clip"]
    settings = [*(f"{number:g}" for number in numbers), " + ".join(after) or "–"]
    return [
        format_claim(point.epsilon, 3),
        f"**{score}**" if ours else score,
        f"{least}–{most}" if least < most else f"{least}",
        ", ".join(settings),
    ]


def draw_curves(points: Sequence[FrontierPoint]) -> str:
    """Draw a panel for each federation that was measured at more than one ε."""
    by_panel = [
        (panel, [point for point in points if point.panel == panel["name"]])
        for panel in load_tables(NAME)["panel"]
    ]
    drawn = [(panel, there) for panel, there in by_panel if len({p.asked for p in there}) > 1]

    def paint(page: Any) -> None:
        parts = page.subfigures(1, max(1, len(drawn)), squeeze=False)[0]
        for subfigure, (panel, there) in zip(parts, drawn, strict=False):
            subfigure.suptitle(panel["title"], fontsize=9.6, color=INK)
            ax = subfigure.add_subplot()
            _paint_panel(ax, panel, there)
            tidy_axes(ax)
            handles, names = ax.get_legend_handles_labels()
            subfigure.legend(handles, names, loc="outside lower center", ncols=1, fontsize=8.6)

    return draw_svg(NAME, "", paint, size=(4.3 * max(1, len(drawn)), 4.0), inline=False)


def _paint_panel(ax: Any, panel: Mapping[str, Any], points: Sequence[FrontierPoint]) -> None:
    ticks: set[float] = set()
    for curve in panel["curve"]:
        on_curve = [point for point in points if point.curve == curve["name"]]
        for level in (point for point in on_curve if point.is_level):
            stroke = (0, (1.5, 1.5)) if level.asked else (0, (4, 1.5, 1, 1.5))
            name = curve["label"] + level.public_rows
            ax.axhline(level.mean, color=MUTED, linewidth=0.9, linestyle=stroke, label=name)
        private = [point for point in on_curve if not point.is_level]
        if private:
            private.sort(key=lambda point: point.epsilon)
            at, means, spreads = zip(*((p.epsilon, p.mean, p.spread) for p in private), strict=True)
            look = find_look("curve", curve["name"])
            draw_error_bars(ax, at, means, spreads, look, curve["label"])
            ticks |= {p.asked for p in private}
    ax.set_xscale("log")
    ax.set_xticks(sorted(ticks), [f"{tick:g}" for tick in sorted(ticks)])
    ax.minorticks_off()
    ax.set(xlabel="ε that holds", ylabel="test accuracy (%)")


def score_layer(plan: Plan, whose: Whose, seed: int) -> float:
    """Return the test accuracy of a layer fitted to these rows, on the plan's features.

    `public` are the first `data.public` rows (without it the validation rows), `clients` are the
    rows that clients hold with this seed.
    """
    from sottovoce.data.federated import load_holdings

    if whose == "public" and plan.data.public is not None:  # let all of them steer
        plan = plan.replace(**{"data.validation": plan.data.public})
    held = load_holdings(plan, seed=seed)
    rows = held.validation if whose == "public" else held.train
    layer = fit_layer(np.asarray(rows.x), np.asarray(rows.y), held.classes)
    return float(np.mean(predict_classes(layer, np.asarray(held.test.x)) == held.test.y))


def fit_layer(x: NDArray[Any], y: NDArray[Any], classes: int) -> Floats:
    """Minimise mean cross-entropy + λ/2·‖w‖² by L-BFGS; biases (the last row) have no penalty.

    >>> layer = fit_layer(np.array([[-1.0], [-2.0], [1.0], [3.0]]), np.array([0, 0, 1, 1]), 2)
    >>> predict_classes(layer, np.array([[-5.0], [5.0]])).tolist()
    [0, 1]
    """
    from scipy.optimize import minimize

    from sottovoce.models.softmax import compute_loss_numpy, score_errors_numpy

    rows = np.column_stack([x, np.ones(len(x))]).astype(np.float64)

    def objective(flat: Floats) -> tuple[float, Floats]:
        w = flat.reshape(rows.shape[1], classes)
        scores, held = rows @ w, w.copy()
        held[-1] = 0
        loss = float(np.mean(compute_loss_numpy(scores, y)))
        slope = rows.T @ score_errors_numpy(scores, y) / len(rows) + PENALTY * held
        return loss + PENALTY / 2 * float(np.sum(held**2)), slope.ravel()

    start = np.zeros(rows.shape[1] * classes)
    found = minimize(objective, start, jac=True, method="L-BFGS-B", options={"maxiter": MOST_STEPS})
    return np.asarray(found.x).reshape(rows.shape[1], classes)


def predict_classes(layer: Floats, x: NDArray[Any]) -> NDArray[np.int64]:
    """Return the class of every row."""
    return np.asarray(np.argmax(x @ layer[:-1] + layer[-1], axis=1))
