"""Measure what features of a public network bring: CIFAR-10, 50 clients with 800 rows each.

    python benchmarks/features.py

A softmax layer on the features of EfficientNet-Lite0 at the defaults (100 fixed rounds, the step by
its public rule, C 1), beside gradient histograms at the same rounds and rule, and beside what the
public validation rows alone reach without privacy; δ 1e-3, one record protected from the server,
five seeds. Nothing is tuned. A second table varies the number of rounds.

Writes results/features.json and prints the tables of docs/models.md. Wants SOTTOVOCE_DATA with
CIFAR-10 and the extra `features`; seconds on an accelerator, an hour on two cores.
"""

from __future__ import annotations

import json
from pathlib import Path

import jax
import numpy as np

from sottovoce import Plan, simulate, simulate_many
from sottovoce.data.federated import load_holdings

ROOT = Path(__file__).parents[1]
NETWORK = {"features": "efficientnet-lite0"}
FEATURES = {
    "network": NETWORK,
    "projected": NETWORK | {"project": 400},
    "histograms": {"name": "softmax", "features": "hog", "colours": True},
}
EPSILON = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0)
ROUNDS = (5, 10, 25, 50, 100, 200)
SEEDS = (1, 2, 3, 4, 5)


def make_plan(name: str, epsilon: float, rounds: int = 100) -> Plan:
    """Return the plan of one cell."""
    return Plan(
        data={"name": "cifar10", "clients": 50, "samples": 800},
        model=FEATURES[name],
        local={"learning_rate": "auto"},
        rounds={"schedule": "fixed", "rounds": rounds},
        privacy={"epsilon": epsilon, "delta": 1e-3},
    )


def measure(plans: list[Plan]) -> list[dict]:
    """Return mean and standard deviation of the test accuracy of each plan."""
    runs = simulate_many(plans, seeds=SEEDS)
    cells = []
    for i, plan in enumerate(plans):
        found = [
            run.record["result"]["test_accuracy"] for run in runs[i * len(SEEDS) :][: len(SEEDS)]
        ]
        cells.append(
            {
                "features": plan.model.features,
                "project": plan.model.project,
                "epsilon": plan.privacy.epsilon,
                "rounds": plan.rounds.rounds,
                "mean": float(np.mean(found)),
                "deviation": float(np.std(found, ddof=1)),
            }
        )
    return cells


def measure_public(plan: Plan) -> float:
    """Return the test accuracy that a softmax layer reaches on public rows alone, without noise."""
    held = load_holdings(plan, seed=SEEDS[0])
    public, test = (held.validation.x, held.validation.y), (held.test.x, held.test.y)
    plain = Plan(
        model={"name": "softmax"},
        local={"learning_rate": 8.0, "clip": 5.0},
        rounds={"schedule": "fixed", "rounds": 200},
        privacy={"epsilon": 1e6, "delta": 0.5},
    )
    run = simulate(plain, data=[public], validation=public, test=test, seed=1)
    return float(run.record["result"]["test_accuracy"])


def main() -> None:
    """Measure all cells, write them and print both tables."""
    table = {n: measure([make_plan(n, e) for e in EPSILON]) for n in FEATURES}
    plans = [make_plan("network", e, t) for e in (1.0, 4.0) for t in ROUNDS]
    values = {
        "device": jax.devices()[0].device_kind,
        "public_rows_alone": {n: measure_public(make_plan(n, 1.0)) for n in FEATURES},
        "table": table,
        "rounds": measure(plans),
    }
    (ROOT / "results" / "features.json").write_text(json.dumps(values, indent=1) + "\n")
    print(format_tables(values))


def format_tables(values: dict) -> str:
    """Return the tables of docs/models.md."""
    head = " | ".join(f"ε = {e:g}" for e in EPSILON)
    lines = [f"| features | {head} | public rows alone |", "|---" * (len(EPSILON) + 2) + "|"]
    for name, cells in values["table"].items():
        shown = " | ".join(f"{c['mean']:.1%} ± {c['deviation']:.1%}" for c in cells)
        lines.append(f"| {name} | {shown} | {values['public_rows_alone'][name]:.1%} |")
    lines += [
        "",
        "| rounds | " + " | ".join(map(str, ROUNDS)) + " |",
        "|---" * (len(ROUNDS) + 1) + "|",
    ]
    for start in (0, len(ROUNDS)):
        cells = values["rounds"][start : start + len(ROUNDS)]
        shown = " | ".join(f"{c['mean']:.1%}" for c in cells)
        lines.append(f"| ε = {cells[0]['epsilon']:g} | {shown} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
