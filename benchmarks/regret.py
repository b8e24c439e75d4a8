"""What a rehearsal loses: rehearsed settings beside the best in hindsight and the plan as given.

    python benchmarks/regret.py --out regret.json            MNIST, ACS, CIFAR-10 at ε 1, 4, 8, 20
    python benchmarks/regret.py --only mnist --epsilon 4     one of them
    python benchmarks/regret.py --only acs adult rare tenth --epsilon 1 8       tables

For each data set and ε: the paper's federation (its settings in `experiments/settings`, CRD as
printed, exact noise, so that all ε are true) is rehearsed without its data; then, on the real data,

- rehearsed   the setting that the rehearsal chose, five seeds;
- hindsight   every setting that the rehearsal tried with its first seed, tried on the real data by
              the metric of the test rows; the best three with five seeds, the best mean of them. It
              looks at the test set on purpose: nobody could have chosen it, it only says what was
              to be had;
- paper       the paper's model, step, clipping and rounds, five seeds.

`rare` and `tenth` are the tables of hospitals of `own_data.py`, which must have drawn them, with
2.6 % and 10 % positives, dealt to five clients of equal size. Their plan names AUROC as its metric
and is else as the defaults have it, which then is what `paper` measures; so is `adult`, with 20
clients of 1,300 rows.

Regret is hindsight − rehearsed. One process a data set; each writes what it has after every ε. What
--out has of other data sets and ε is kept.
Wants SOTTOVOCE_DATA with mnist/, acs/, adult/ and cifar-10-batches-bin/, and an accelerator.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

EPSILONS = (1.0, 4.0, 8.0, 20.0)
SEEDS = (1, 2, 3, 4, 5)
SETTINGS = {"mnist": "mnist", "acs": "census", "cifar10": "cifar"}
TABLES = ("adult", "rare", "tenth")
DRAWN = Path(__file__).resolve().parent.parent / ".bench" / "own-tables"
BEST_OF = 3


def planned(name: str, epsilon: float) -> Any:
    """The paper's plan for this data set: CRD as printed, exact noise; of a table the defaults."""
    from sottovoce import Plan
    from sottovoce.studies.paper.definition import load_methods, load_setting

    if name == "adult":
        data: dict[str, Any] = {"name": name, "clients": 20, "samples": 1300, "test": 4000}
        return Plan(
            data=data | {"validation": 1000},
            model={"name": "softmax"},
            local={"learning_rate": "auto"},
            rounds={"schedule": "fixed", "rounds": 200},
            privacy={"epsilon": epsilon},
        )
    if name in TABLES:
        facts = json.loads((DRAWN / f"{name}.json").read_text("utf-8"))
        data = {"path": str(DRAWN / f"{name}.csv"), "test": str(DRAWN / f"{name}_test.csv")}
        data |= {"label": "label", "columns": facts["columns"], "clients": 5}
        data["samples"] = int(0.9 * facts["rows"]) // 5  # a tenth of the rows steers
        return Plan(data=data, privacy={"epsilon": epsilon}, metric="auroc")
    own = load_setting(SETTINGS[name])
    values = {**own.plan, **own.corrected, **load_methods()["crd"].plan, "privacy.epsilon": epsilon}
    if name == "acs":
        values |= {"data.name": "acs", "data.samples": 800, "data.clients": 50}
        values |= {"data.validation": 1000, "data.test": 4780}
    values["data.validation"] = min(int(values.get("data.validation", 2000)), 10_000)
    return Plan.load().replace(**values)


def real_rows(plan: Any) -> Any:
    """The data set itself as rows to train on, rows that steer and the test rows."""
    import numpy as np

    from sottovoce.data import datasets, tables
    from sottovoce.studies.rehearsal.standin import StandIn

    if plan.data.path is not None:
        x, y, test_x, test_y = (
            values
            for file in (plan.data.path, plan.data.test)
            for table in [tables.read_table(tables.Source(**plan.data.table() | {"path": file}))]
            for values in (table.x, table.y)
        )
        shape, classes, test, steering = x.shape[1:], 2, (test_x, test_y), len(y) // 10
    else:
        arrays = datasets.load(plan.data.name)
        x, y, shape, classes = arrays.train_x, arrays.train_y, arrays.shape, arrays.classes
        test, steering = (arrays.test_x, arrays.test_y), plan.data.validation
    order = np.random.default_rng(0).permutation(len(y))
    steer, rest = order[:steering], order[steering:]
    if not len(test[1]):
        tested, rest = rest[: plan.data.test], rest[plan.data.test :]
        test = (x[tested], y[tested])
    return StandIn(
        kind="real",
        about=plan.data.name or str(plan.data.path),
        trust="",
        train=(x[rest], y[rest]),
        validation=(x[steer], y[steer]),
        test=test,
        shape=shape,
        classes=classes,
    )


def summary(trials: list[Any]) -> dict[str, Any]:
    """The metric of the plan on the test rows of one setting over the seeds."""
    seen = [trial.test_value for trial in trials]
    return {
        "setting": trials[0].setting,
        "accuracies": seen,
        "mean": statistics.fmean(seen),
        "deviation": statistics.stdev(seen) if len(seen) > 1 else 0.0,
        "rounds": statistics.fmean(trial.rounds for trial in trials),
    }


def case(name: str, epsilon: float, rows: Any, runs: int) -> dict[str, Any]:
    """One data set at one ε."""
    from sottovoce import rehearse
    from sottovoce.studies.rehearsal.search import Trials
    from sottovoce.studies.rehearsal.space import encode_setting
    from sottovoce.studies.rehearsal.standin import announce_federation, fit_plan

    began = time.monotonic()
    plan = planned(name, epsilon)
    found = rehearse(plan, runs=runs)
    rehearsed_s = time.monotonic() - began
    stage, factor = fit_plan(plan, announce_federation(plan), len(rows.train[1]))
    assert factor == 1.0, "the real rows must be as many as the federation's"
    trials = Trials(found.space, stage, rows, limit=10**6)
    first = found.seeds[0]
    tried = {encode_setting(t.setting): t.setting for t in found.trials if t.seed == first}
    start, chosen = found.space.read_plan(), found.setting
    trials.run_jobs("paper", [(start, seed) for seed in SEEDS])
    trials.run_jobs("rehearsed", [(chosen, seed) for seed in SEEDS])
    trials.run_jobs("hindsight", [(setting, SEEDS[0]) for setting in tried.values()])

    def score(key: str) -> float:
        return trials.done[key, SEEDS[0]].test_value

    best = sorted(tried, key=score, reverse=True)[:BEST_OF]
    trials.run_jobs("hindsight", [(tried[key], seed) for seed in SEEDS for key in best])
    each = [summary([trials.done[key, seed] for seed in SEEDS]) for key in best]
    hindsight = max(each, key=lambda one: one["mean"])

    def of(setting: Any) -> dict[str, Any]:
        return summary([trials.done[encode_setting(setting), seed] for seed in SEEDS])

    rehearsed, paper = of(chosen), of(start)
    hindsight = max(hindsight, rehearsed, paper, key=lambda one: one["mean"])
    theory = found.theory
    return {
        "data": name,
        "epsilon": epsilon,
        "delta": plan.privacy.delta,
        "metric": trials.done[encode_setting(start), SEEDS[0]].metric,
        "rehearsed": rehearsed,
        "hindsight": hindsight,
        "paper": paper,
        "regret": hindsight["mean"] - rehearsed["mean"],
        "predicted": found.prediction.to_json(),
        "theorem_rounds": None if theory is None else theory["best_rounds"],
        "stand_in": found.rows.about,
        "complete": found.complete,
        "tried": len(tried),
        "plan": found.plan.to_dict(),
        "seconds": {"rehearsal": rehearsed_s, "all": time.monotonic() - began},
    }


def one_data_set(name: str, epsilons: list[float], runs: int, out: Path, until: float) -> None:
    """Every ε of one data set, written after each."""
    rows = real_rows(planned(name, 1.0))
    done = []
    for epsilon in epsilons:
        if time.time() > until:
            break
        done.append(case(name, epsilon, rows, runs))
        out.write_text(json.dumps(done, indent=1) + "\n", "utf-8")
        one = done[-1]
        print(
            f"{name} ε={epsilon:g}: rehearsed {one['rehearsed']['mean']:.4f}, hindsight "
            f"{one['hindsight']['mean']:.4f}, paper {one['paper']['mean']:.4f}, predicted "
            f"{one['predicted']['mean']:.4f}, {one['seconds']['all']:.0f} s",
            flush=True,
        )


def main() -> None:
    """One process a data set, then one file."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", nargs="*", default=list(SETTINGS), choices=[*SETTINGS, *TABLES])
    parser.add_argument("--epsilon", nargs="*", type=float, default=list(EPSILONS))
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--minutes", type=float, default=8.0, help="no new ε is begun beyond")
    parser.add_argument("--out", type=Path, default=Path("regret.json"))
    parser.add_argument("--part", help=argparse.SUPPRESS)
    parser.add_argument("--until", type=float, default=0.0, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.part:
        one_data_set(given.part, given.epsilon, given.runs, given.out, given.until)
        return
    until = time.time() + 60 * given.minutes
    share = f"{0.9 / len(given.only):.2f}"
    running = []
    for name in given.only:
        part = given.out.with_name(f"{given.out.stem}-{name}.json")
        words = [sys.executable, __file__, "--part", name, "--out", str(part)]
        words += ["--runs", str(given.runs), "--until", str(until)]
        words += ["--epsilon", *map(str, given.epsilon)]
        environment = os.environ | {"XLA_PYTHON_CLIENT_MEM_FRACTION": share}
        running.append((part, subprocess.Popen(words, env=environment)))
    failed = [part.name for part, process in running if process.wait() != 0]
    cases: list[dict[str, Any]] = []
    for part, _ in running:
        cases += json.loads(part.read_text("utf-8")) if part.exists() else []
        part.unlink(missing_ok=True)
    measured = {(one["data"], one["epsilon"]) for one in cases}
    for one in json.loads(given.out.read_text("utf-8")) if given.out.exists() else []:
        cases += [one] if (one["data"], one["epsilon"]) not in measured else []
    order = [*SETTINGS, *TABLES]
    cases.sort(key=lambda one: (order.index(one["data"]), one["epsilon"]))
    given.out.write_text(json.dumps(cases, indent=1) + "\n", "utf-8")
    print(table(cases))
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


def format_scores(metric: str, mean: float, deviation: float) -> str:
    """Return a mean and a deviation over seeds.

    >>> format_scores("auroc", 0.75, 0.01)
    'AUROC 0.750 ± 0.010'
    """
    if metric == "accuracy":
        return f"{100 * mean:.2f} ± {100 * deviation:.2f} %"
    return f"{metric.upper()} {mean:.3f} ± {deviation:.3f}"


def table(cases: list[dict[str, Any]]) -> str:
    """A table of docs/rehearsal.md.

    >>> print(table([]))
    | data | ε | rehearsed | hindsight | regret | paper | predicted |
    |---|---|---|---|---|---|---|
    """
    lines = ["| data | ε | rehearsed | hindsight | regret | paper | predicted |"]
    lines.append("|---|---|---|---|---|---|---|")
    for one in cases:
        metric = one.get("metric", "accuracy")
        cells = [
            format_scores(one[key].get("metric", metric), one[key]["mean"], one[key]["deviation"])
            for key in ("rehearsed", "hindsight", "paper", "predicted")
        ]
        regret = one["regret"]
        cells.insert(2, f"{100 * regret:.2f}" if metric == "accuracy" else f"{regret:.3f}")
        lines.append(f"| {one['data']} | {one['epsilon']:g} | {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
