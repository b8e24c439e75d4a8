"""Measure what a federation reaches by rows per client, clients and ε: the table of --expect.

    python benchmarks/expect.py

Every cell is the mean over seeds of the test accuracy at the settings of the embedded plan (η 2,
C 1, at most 120 rounds, discounted schedule, every client in every round, one record protected,
δ 1e-5): the MLP of 32 units for digits, a softmax layer for the census tables. Nothing is tuned,
so that a rehearsal can do better. ε = 10,000 stands for no noise. `noise` is the ratio by which
`calibrate` advises (`privacy.budget.weigh_noise`).

Writes results/expect.json and, with what the command needs, src/sottovoce/schedules/expected.json.
Wants SOTTOVOCE_DATA with acs/ and adult/; takes some minutes on two cores.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from sottovoce import Plan
from sottovoce.data import datasets
from sottovoce.schedules.calibrate import calibrate
from sottovoce.simulation.simulate import simulate_many

ROOT = Path(__file__).parents[1]

GRID = {
    "digits": {"model": {"name": "mlp", "hidden": 32}, "rows": (35, 140), "clients": (5, 10)},
    "acs": {"model": {"name": "softmax"}, "rows": (50, 200, 800), "clients": (5, 20)},
    "adult": {"model": {"name": "softmax"}, "rows": (50, 200, 800), "clients": (5, 20)},
}
EPSILON = (1.0, 4.0, 8.0, 10_000.0)
SEEDS = (1, 2, 3)


def measure_cells(name: str, grid: dict) -> list[dict]:
    """Return the mean test accuracy of each cell of a dataset's grid."""
    cells = []
    for rows in grid["rows"]:
        for clients in grid["clients"]:
            data = {"name": name, "samples": rows, "clients": clients}
            base = Plan.load().replace(
                **{f"data.{key}": value for key, value in data.items()},
                **{f"model.{key}": value for key, value in grid["model"].items()},
            )
            plans = [base.replace(**{"privacy.epsilon": epsilon}) for epsilon in EPSILON]
            runs = simulate_many(plans, seeds=SEEDS)
            for i, epsilon in enumerate(EPSILON):
                found = runs[i * len(SEEDS) : (i + 1) * len(SEEDS)]
                scores = [run.accuracy for run in found]
                parameters = found[0].record["model"]["parameters"]
                answer = calibrate(
                    epsilon=epsilon, samples=rows, clients=clients, parameters=parameters
                )
                cells.append(
                    {
                        "data": name,
                        "rows": rows,
                        "clients": clients,
                        "epsilon": epsilon,
                        "accuracy": round(float(np.mean(scores)), 4),
                        "deviation": round(float(np.std(scores, ddof=1)), 4),
                        "parameters": parameters,
                        "noise": float(f"{answer.noise:.3g}"),
                    }
                )
                print(json.dumps(cells[-1]), flush=True)
    return cells


def main() -> None:
    """Measure all cells and write them with the share of the most frequent class."""
    cells, majority = [], {}
    for name, grid in GRID.items():
        labels = datasets.load(name).train_y
        majority[name] = round(float(np.bincount(labels).max() / len(labels)), 4)
        cells += measure_cells(name, grid)
    content = {"seeds": len(SEEDS), "majority": majority, "cells": cells}
    text = json.dumps(content, indent=1) + "\n"
    (ROOT / "results" / "expect.json").write_text(text, "utf-8")
    for cell in cells:
        del cell["deviation"], cell["parameters"]
    lines = ",\n  ".join(json.dumps(cell) for cell in cells)
    head = json.dumps({"seeds": len(SEEDS), "majority": majority})[:-1]
    target = ROOT / "src" / "sottovoce" / "schedules" / "expected.json"
    target.write_text(f'{head}, "cells": [\n  {lines}\n]}}\n', "utf-8")


if __name__ == "__main__":
    main()
