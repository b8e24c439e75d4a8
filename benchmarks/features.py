"""Measure what features of a public network bring: CIFAR-10, 50 clients with 800 rows each.

    python benchmarks/features.py [--heads softmax least-squares] [--network onnx:FILE]

A softmax layer on the features of EfficientNet-Lite0 at the defaults (100 fixed rounds, the step by
its public rule, C 1), beside gradient histograms at the same rounds and rule, and beside what the
public validation rows alone reach without privacy; δ 1e-3, one record protected from the server,
five seeds. Nothing is tuned. A second table varies the number of rounds. A third has least squares
on the same features, rows and seeds, in one upload.

Writes results/features.json, where a head replaces only its own cells, and prints the tables of
docs/models.md. Wants SOTTOVOCE_DATA with CIFAR-10 and the extra `features`; seconds on an
accelerator, an hour on two cores. There the same network as an ONNX file (`--network`) is several
times faster than as a PyTorch module; its features differ by rounding.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import jax
import numpy as np

from sottovoce import Plan, simulate, simulate_many
from sottovoce.data.federated import load_holdings

ROOT = Path(__file__).parents[1]
KEPT = ROOT / "results" / "features.json"
NETWORK = "efficientnet-lite0"
FEATURES = {"network": {}, "projected": {"project": 400}, "histograms": {"colours": True}}
HEADS = {
    "softmax": {
        "local": {"learning_rate": "auto"},
        "rounds": {"schedule": "fixed", "rounds": 100},
    },
    "least-squares": {},
}
EPSILON = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0)
ROUNDS = (5, 10, 25, 50, 100, 200)
SEEDS = (1, 2, 3, 4, 5)


def make_plan(name: str, epsilon: float, network: str, head: str = "softmax") -> Plan:
    """Return the plan of one cell."""
    source = "hog" if name == "histograms" else network
    return Plan(
        data={"name": "cifar10", "clients": 50, "samples": 800},
        model={"name": head, "features": source} | FEATURES[name],
        privacy={"epsilon": epsilon, "delta": 1e-3},
        **HEADS[head],
    )


def measure(plans: list[Plan]) -> list[dict]:
    """Return mean and standard deviation of the test accuracy of each plan."""
    runs = [run.record["result"] for run in simulate_many(plans, seeds=SEEDS)]
    cells = []
    for i, plan in enumerate(plans):
        results = runs[i * len(SEEDS) :][: len(SEEDS)]
        found = [result["test_accuracy"] for result in results]
        cells.append(
            {
                "features": Path(plan.model.features).name,
                "project": plan.model.project,
                "epsilon": plan.privacy.epsilon,
                "rounds": results[0]["rounds_used"],
                "mean": float(np.mean(found)),
                "deviation": float(np.std(found, ddof=1)),
            }
        )
        print(json.dumps(cells[-1]), flush=True)
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
    """Measure the cells of the heads, write them and print the tables."""
    parser = argparse.ArgumentParser(description="Features of a public network on CIFAR-10.")
    parser.add_argument("--heads", nargs="+", default=list(HEADS), choices=list(HEADS))
    parser.add_argument("--network", default=NETWORK, help="or onnx:FILE")
    given = parser.parse_args()
    values = json.loads(KEPT.read_text()) if KEPT.exists() else {}
    for head in given.heads:
        table = {
            name: measure([make_plan(name, e, given.network, head) for e in EPSILON])
            for name in (FEATURES if head == "softmax" else ["network"])
        }
        device = jax.devices()[0].device_kind
        if head == "least-squares":
            values["least_squares"] = {"device": device, "table": table}
            continue
        plans = [
            make_plan("network", e, given.network).replace(f"rounds.rounds={t}")
            for e in (1.0, 4.0)
            for t in ROUNDS
        ]
        values |= {
            "device": device,
            "public_rows_alone": {
                n: measure_public(make_plan(n, 1.0, given.network)) for n in FEATURES
            },
            "table": table,
            "rounds": measure(plans),
        }
    KEPT.write_text(json.dumps(values, indent=1) + "\n")
    print(format_tables(values))


def format_tables(values: dict) -> str:
    """Return the tables of docs/models.md."""
    head = " | ".join(f"ε = {e:g}" for e in EPSILON)
    lines = [
        f"| features | model | uploads | {head} | public rows alone |",
        "|---" * (len(EPSILON) + 4) + "|",
    ]
    tables = {"softmax": values["table"]}
    if "least_squares" in values:
        tables["least-squares"] = values["least_squares"]["table"]
    for name in FEATURES:
        alone = f"{values['public_rows_alone'][name]:.1%}"
        for model, table in tables.items():
            if name not in table:
                continue
            shown = " | ".join(f"{c['mean']:.1%} ± {c['deviation']:.1%}" for c in table[name])
            lines.append(f"| {name} | `{model}` | {table[name][0]['rounds']} | {shown} | {alone} |")
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
