"""What a rehearsal loses: rehearsed settings beside the best in hindsight and the paper's defaults.

    python benchmarks/regret.py --out regret.json            MNIST, ACS, CIFAR-10 at ε 1, 4, 8, 20
    python benchmarks/regret.py --only mnist --epsilon 4     one of them

For each data set and ε: the paper's federation (its settings in `experiments/settings`, CRD as
printed, exact noise, so that all ε are true) is rehearsed without its data; then, on the real data,

- rehearsed   the setting that the rehearsal chose, five seeds;
- hindsight   every setting that the rehearsal tried with its first seed, tried on the real data by
              test accuracy; the best three with five seeds, the best mean of them. It looks at the
              test set on purpose: nobody could have chosen it, it only says what was to be had;
- paper       the paper's model, step, clipping and rounds, five seeds.

Regret is hindsight − rehearsed. One process a data set; each writes what it has after every ε.
Wants SOTTOVOCE_DATA with mnist/, acs/ and cifar-10-batches-bin/, and an accelerator.
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
BEST_OF = 3


def planned(name: str, epsilon: float) -> Any:
    """The paper's plan for this data set: CRD as printed, exact noise."""
    from sottovoce import Plan
    from sottovoce.studies.paper.definition import load_methods, load_setting

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

    from sottovoce.data import datasets
    from sottovoce.studies.rehearsal.standin import StandIn

    arrays = datasets.load(plan.data.name)
    order = np.random.default_rng(0).permutation(len(arrays.train_y))
    steer, rest = order[: plan.data.validation], order[plan.data.validation :]
    test = (arrays.test_x, arrays.test_y)
    if not len(arrays.test_y):
        tested, rest = rest[: plan.data.test], rest[plan.data.test :]
        test = (arrays.train_x[tested], arrays.train_y[tested])
    return StandIn(
        kind="real",
        about=plan.data.name,
        trust="",
        train=(arrays.train_x[rest], arrays.train_y[rest]),
        validation=(arrays.train_x[steer], arrays.train_y[steer]),
        test=test,
        shape=arrays.shape,
        classes=arrays.classes,
    )


def summary(trials: list[Any]) -> dict[str, Any]:
    """The test accuracies of one setting over the seeds."""
    seen = [trial.test_accuracy for trial in trials]
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
        return trials.done[key, SEEDS[0]].test_accuracy

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
        "rehearsed": rehearsed,
        "hindsight": hindsight,
        "paper": paper,
        "regret": hindsight["mean"] - rehearsed["mean"],
        "predicted": found.prediction.to_json(),
        "theorem_rounds": None if theory is None else theory.best_rounds,
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
    parser.add_argument("--only", nargs="*", default=list(SETTINGS), choices=list(SETTINGS))
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
    given.out.write_text(json.dumps(cases, indent=1) + "\n", "utf-8")
    print(table(cases))
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


def table(cases: list[dict[str, Any]]) -> str:
    """The table of docs/rehearsal.md.

    >>> print(table([]))
    | data | ε | rehearsed | hindsight | regret | paper | predicted |
    |---|---|---|---|---|---|---|
    """
    lines = ["| data | ε | rehearsed | hindsight | regret | paper | predicted |"]
    lines.append("|---|---|---|---|---|---|---|")
    for one in cases:
        cells = [
            f"{100 * one[key]['mean']:.2f} ± {100 * one[key]['deviation']:.2f} %"
            for key in ("rehearsed", "hindsight", "paper", "predicted")
        ]
        cells.insert(2, f"{100 * one['regret']:.2f}")
        lines.append(f"| {one['data']} | {one['epsilon']:g} | {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
