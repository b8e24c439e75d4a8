"""Compare the two linear models on features: softmax by many rounds, least squares by one upload.

    python benchmarks/least_squares.py

Gradient histograms of MNIST and CIFAR-10 (norm 4), 20 clients with 800 rows each, δ 1e-3, one
record protected from the server, three seeds. Softmax has 100 fixed rounds and the step of the
public rule; least squares has one round. Writes results/least_squares.json and the table of
docs/models.md. Wants SOTTOVOCE_DATA with both; minutes on two cores.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from sottovoce import Plan, simulate_many

ROOT = Path(__file__).parents[1]
EPSILON = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0)
SEEDS = (1, 2, 3)
DATA = {"mnist": {"cell": 4}, "cifar10": {"cell": 8, "colours": True}}
HEADS: dict[str, dict[str, Any]] = {
    "softmax": {
        "local": {"learning_rate": "auto"},
        "rounds": {"schedule": "fixed", "rounds": 100},
    },
    "least-squares": {},
}
PAGE = ROOT / "docs" / "models.md"
BEGIN, END = "<!-- the table of benchmarks/least_squares.py -->", "<!-- end -->"


def measure(data: str, head: str) -> dict[str, Any]:
    """Return mean and deviation of the test accuracy at every ε."""
    plans = [
        Plan(
            data={"name": data, "clients": 20, "samples": 800, "validation": 1000, "test": 5000},
            model={"name": head, "features": "hog"} | DATA[data],
            privacy={"epsilon": epsilon, "delta": 1e-3},
            **HEADS[head],
        )
        for epsilon in EPSILON
    ]
    runs = [run.record["result"] for run in simulate_many(plans, seeds=SEEDS)]
    found = np.array([run["test_accuracy"] for run in runs]).reshape(len(EPSILON), len(SEEDS))
    rounds = runs[0]["rounds_used"]
    entry = {"data": data, "model": head, "rounds": rounds, "epsilon": list(EPSILON)}
    entry |= {"mean": found.mean(axis=1).tolist(), "deviation": found.std(axis=1, ddof=1).tolist()}
    print(json.dumps(entry), flush=True)
    return entry


def format_table(entries: list[dict[str, Any]]) -> str:
    """Return the table of docs/models.md."""
    head = " | ".join(f"ε = {e:g}" for e in EPSILON)
    lines = [f"| histograms of | model | uploads | {head} |", "|---" * (len(EPSILON) + 3) + "|"]
    for entry in entries:
        pairs = zip(entry["mean"], entry["deviation"], strict=True)
        cells = " | ".join(f"{mean:.1%} ± {deviation:.1%}" for mean, deviation in pairs)
        lines.append(f"| {entry['data']} | `{entry['model']}` | {entry['rounds']} | {cells} |")
    return "\n".join(lines)


def main() -> None:
    """Measure all cells, write them and the table."""
    entries = [measure(data, head) for data in DATA for head in HEADS]
    kept = ROOT / "results" / "least_squares.json"
    kept.write_text(json.dumps(entries, indent=1) + "\n", "utf-8")
    page = PAGE.read_text("utf-8")
    head, tail = page.split(BEGIN)[0], page.split(BEGIN)[1].split(END, 1)[1]
    PAGE.write_text(f"{head}{BEGIN}\n{format_table(entries)}\n{END}{tail}", "utf-8")


if __name__ == "__main__":
    main()
