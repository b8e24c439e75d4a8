"""`sottovoce reproduce horizon`: which rule finds a good number of rounds, by data, steps and ε.

`horizon.toml` lists panels. A cell is a panel, a pair (η, C) and an ε; there, every fixed T of the
list and every rule is trained with the same seeds. The regret of a rule is a fixed T's accuracy
less that of the rule, in points, where T is chosen in one of two ways:

- in hindsight: the best mean on the test rows. A best of five noisy means is above the truth, so
  that a rule which always finds the best T has a regret above 0;
- on the other seeds: for each seed, the T that is best on the rest. Nothing is chosen on what is
  then counted, so that this is what someone who tried every T elsewhere would get.

OUT/horizon/PANEL.json    a panel, a number for every seed; panels made elsewhere may be copied here
OUT/horizon/horizon.md    the table of docs/horizon.md
OUT/horizon/horizon.svg   accuracy against ε
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from sottovoce.data.files import make_folder, write_file
from sottovoce.errors import InputError
from sottovoce.plan import Plan
from sottovoce.reports.charts import INK, draw_svg, tidy_axes
from sottovoce.studies import store
from sottovoce.studies.paper import outcomes
from sottovoce.studies.paper.definition import Cell, load_tables, nest_keys
from sottovoce.studies.paper.page import draw_error_bars, find_look

NAME, SCHEMA = "horizon", "sottovoce.horizon/1"
#: The quick version: one cell of the digits, a few rounds.
QUICK = {"epsilon": [8], "fixed": [2, 4], "rounds": 4}
BEST = "best fixed T"


@dataclass(frozen=True)
class RulePoint(outcomes.ScoredSeeds):
    """What a rule, or a fixed T, made of one cell: a number for every seed."""

    step: Sequence[float]  # η, C
    epsilon: float
    rule: str  # of the file, or the fixed T
    key: str
    seeds: Sequence[int]
    accuracy: Sequence[float]
    rounds: Sequence[int]
    made: Sequence[str]


def list_cells(panel: str, quick: bool) -> Iterator[Cell]:
    """Yield what is to be trained of a panel: `panel` is (η, C), `line` the rule, `x` the ε.

    >>> len(list(list_cells("digits", quick=False)))  # 3 steps, 5 budgets, 5 fixed T and 2 rules
    105
    """
    study = load_tables(NAME)
    federation = study["panel"][panel]
    source = {**study, **QUICK} if quick else study
    lines = {str(T): {"rounds.schedule": "fixed", "rounds.rounds": T} for T in source["fixed"]}
    for name, rule in study["rule"].items():
        lines[name] = rule["plan"] | ({"rounds.rounds": QUICK["rounds"]} if quick else {})
    for eta, clip in federation["steps"][: 1 if quick else None]:
        for epsilon in source["epsilon"]:
            for name, changes in lines.items():
                free = {"local.learning_rate": eta, "local.clip": clip}
                free |= {"privacy.epsilon": float(epsilon), "server.average": "exponential"}
                plan = Plan(**nest_keys(federation["plan"] | changes | free))
                yield Cell("corrected", (eta, clip), name, epsilon, None, plan)


def reproduce(
    *,
    quick: bool,
    only: Sequence[str],
    out: Path,
    train: Callable[[Sequence[tuple[Cell, int, None]], Path], list[str]],
) -> dict[str, list[RulePoint]]:
    """Run what is missing of these panels in `out/horizon`, and write table and picture of all."""
    panels, folder = load_tables(NAME)["panel"], out / NAME
    if unknown := [name for name in only if name not in panels]:
        raise InputError.of("--only", unknown[0], f"one of {', '.join(panels)}", "name panels")
    make_folder(folder)
    absent: list[str] = []
    for name in only or (["digits"] if quick else panels):
        cells = list(list_cells(name, quick))
        seeds = range(1, 2 if quick else panels[name]["seeds"] + 1)
        runs = _list_runs(read_panel(folder, name)) | outcomes.read_runs(folder)
        missing = [(c, seed, None) for c in cells for seed in seeds if (c.key, seed) not in runs]
        if missing_data := train(missing, folder):
            absent += missing_data
            continue
        runs |= outcomes.read_runs(folder)
        points = [
            {"step": c.panel, "epsilon": c.x, "rule": c.line, "key": c.key, "seeds": [*seeds]}
            | outcomes.list_values([runs[c.key, seed] for seed in seeds])
            for c in cells
        ]
        made = list(dict.fromkeys(how for point in points for how in point["made"]))
        for point in points:
            point["made"] = [made.index(how) for how in point["made"]]
        head = {"schema": SCHEMA, "panel": name, "quick": quick, "made": made}
        text = store.format_results(head, {"points": points})
        write_file(folder / f"{name}.json", text.encode())
    found = read_panels(folder)
    done = _list_runs([point for points in found.values() for point in points])
    outcomes.save_study(folder, NAME, format_tables(found), draw_panels(found), absent, done)
    return found


def _list_runs(points: Sequence[RulePoint]) -> outcomes.Runs:
    return outcomes.list_runs([vars(point) | {"delta": 0.0} for point in points])


def read_panel(folder: Path, name: str) -> list[RulePoint]:
    """Return the points of a panel; none where it was not made."""
    path = folder / f"{name}.json"
    if not path.exists():
        return []
    content = store.read_results(path, SCHEMA)
    with store.refuse_damage(path):
        made = content["made"]  # each way once; a point has a number for each seed
        return [
            RulePoint(**row | {"made": [made[i] for i in row["made"]]}) for row in content["points"]
        ]


def read_panels(folder: Path) -> dict[str, list[RulePoint]]:
    """Return the points of every panel that was made, in the order of the file."""
    found = {name: read_panel(folder, name) for name in load_tables(NAME)["panel"]}
    return {name: points for name, points in found.items() if points}


@dataclass(frozen=True)
class RuleCell:
    """The points of one (η, C) and one ε by rule, with the best fixed T in hindsight.

    `elsewhere` is the mean accuracy, in per cent, of the fixed T that is best on the other seeds.
    """

    step: tuple[float, float]
    epsilon: float
    rules: Mapping[str, RulePoint]
    elsewhere: float

    def regret(self, rule: str, *, hindsight: bool = True) -> float:
        """Return the fixed T's mean accuracy less the rule's, in points."""
        best = self.rules[BEST].mean if hindsight else self.elsewhere
        return best - self.rules[rule].mean

    def error(self, rule: str) -> float:
        """Return the standard error of the regret in hindsight, seed by seed; 0 of one seed."""
        pairs = zip(self.rules[BEST].accuracy, self.rules[rule].accuracy, strict=False)
        lost = [100 * (best - found) for best, found in pairs]
        return statistics.stdev(lost) / math.sqrt(len(lost)) if len(lost) > 1 else 0.0


def gather_cells(points: Sequence[RulePoint]) -> list[RuleCell]:
    """Return the cells of a panel, in the order of the file."""
    by_cell: dict[tuple[tuple[float, float], float], dict[str, RulePoint]] = {}
    for point in points:
        step = (point.step[0], point.step[1])
        by_cell.setdefault((step, point.epsilon), {})[point.rule] = point
    cells = []
    for (step, epsilon), rules in by_cell.items():
        fixed = [point for name, point in rules.items() if name.isdecimal()]
        best = max(fixed, key=lambda point: point.mean)
        elsewhere = choose_on_other_seeds([point.accuracy for point in fixed])
        cells.append(RuleCell(step, epsilon, rules | {BEST: best}, elsewhere))
    return cells


def choose_on_other_seeds(accuracy: Sequence[Sequence[float]]) -> float:
    """Return the mean accuracy, in per cent, of choosing a row on all columns but the counted one.

    >>> choose_on_other_seeds([[0.5, 0.5], [0.6, 0.3]])  # the first row, then the second
    40.0
    """
    counted = []
    for seed in range(len(accuracy[0])):
        row = max(accuracy, key=lambda row: sum(row) - row[seed])
        counted.append(row[seed])
    return 100 * statistics.mean(counted)


def find_falls(cells: Sequence[RuleCell], rule: str) -> float:
    """Return by how much more than the seeds' spread accuracy falls when ε grows, in points.

    The spread is the larger standard deviation of the two; 0 where accuracy never falls by more.
    """
    falls = [0.0]
    for before, after in pairwise(cells):
        if before.step == after.step:
            less, more = before.rules[rule], after.rules[rule]
            falls.append(less.mean - more.mean - max(less.spread, more.spread))
    return max(falls)


def format_tables(panels: Mapping[str, Sequence[RulePoint]]) -> str:
    """Return two tables: regret of each rule by panel, and every cell."""
    rules, summary, details = load_tables(NAME)["rule"], [], []
    for name, points in panels.items():
        title, cells = load_tables(NAME)["panel"][name]["title"], gather_cells(points)
        for rule, about in rules.items():
            regrets = [(cell.regret(rule), cell.error(rule)) for cell in cells]
            mean = statistics.mean(regret for regret, _ in regrets)
            error = math.hypot(*(error for _, error in regrets)) / len(cells)
            pairs = (mean, error), max(regrets)
            fair = [cell.regret(rule, hindsight=False) for cell in cells]
            numbers = statistics.mean(fair), max(fair), find_falls(cells, rule)
            texts = [f"{regret:+.1f} ± {error:.1f}" for regret, error in pairs]
            summary.append([title, about["label"], *texts, *(f"{n:+.1f}" for n in numbers)])
        for cell in cells:
            best = cell.rules[BEST]
            texts = [f"{cell.step[0]:g}, {cell.step[1]:g}", f"{cell.epsilon:g}"]
            texts += [f"{best.mean:.1f} ({best.rule})"]
            for rule in rules:
                rounds = statistics.mean(cell.rules[rule].rounds)
                texts.append(f"{-cell.regret(rule):+.1f} ({rounds:.0f})")
            details.append([title, *texts])
    head = ["data", "rule", "mean regret", "worst cell", "T of other seeds: mean", "worst", "fall"]
    labels = [rule["label"] for rule in rules.values()]
    second = outcomes.format_table(["data", "η, C", "ε", "best fixed T", *labels], details)
    return f"{outcomes.format_table(head, summary)}\n{second}"


def draw_panels(panels: Mapping[str, Sequence[RulePoint]]) -> str:
    """Draw a row for each panel and in it a chart for each (η, C): accuracy against ε."""
    labels = {BEST: BEST} | {name: r["label"] for name, r in load_tables(NAME)["rule"].items()}
    widest = max([len({tuple(p.step) for p in points}) for points in panels.values()] or [1])

    def paint(page: Any) -> None:
        axes = page.subplots(max(1, len(panels)), widest, squeeze=False)
        for row, (name, points) in zip(axes, panels.items(), strict=False):
            cells = gather_cells(points)
            steps = list(dict.fromkeys(cell.step for cell in cells))
            for ax in row[len(steps) :]:
                ax.set_visible(False)
            for ax, step in zip(row, steps, strict=False):
                there = [cell for cell in cells if cell.step == step]
                for rule, label in labels.items():
                    drawn = [cell.rules[rule] for cell in there]
                    means, spreads = [p.mean for p in drawn], [p.spread for p in drawn]
                    look = find_look("rule", rule)
                    draw_error_bars(ax, [c.epsilon for c in there], means, spreads, look, label)
                ax.set_xscale("log")
                ax.set_xticks([c.epsilon for c in there], [f"{c.epsilon:g}" for c in there])
                ax.minorticks_off()
                ax.set(xlabel="budget ε", ylabel="test accuracy (%)")
                title = load_tables(NAME)["panel"][name]["title"]
                ax.set_title(f"{title}: η = {step[0]:g}, C = {step[1]:g}", fontsize=7, color=INK)
                tidy_axes(ax)
        handles, names = axes[0][0].get_legend_handles_labels()
        page.legend(handles, names, loc="outside lower center", ncols=3, fontsize=8.6)

    size = (3.6 * widest, 2.7 * max(1, len(panels)) + 0.4)
    return draw_svg(NAME, "", paint, size=size, inline=False)
