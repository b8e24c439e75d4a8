"""Loss and accuracy of the census SVM against ε: prints the table and draws the figure.

    SOTTOVOCE_DATA=… python examples/census_epsilon.py [FIGURE.svg]

Runs `census_svm.toml` with five budgets and with one so large that its noise is nothing (ε = 10⁶),
five seeds each: half a minute on one core. A seed decides the split, the rows of the clients and
the noise, so the spread holds all three.
"""

from __future__ import annotations

import sys
from pathlib import Path

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure

from sottovoce import Plan, simulate_many

PLAN = Path(__file__).with_name("census_svm.toml")
EPSILONS = (1, 2, 4, 8, 16)
NOISELESS = 1e6
SEEDS = (1, 2, 3, 4, 5)

Cell = dict[str, np.ndarray]  # loss, accuracy and rounds, one number for each seed


def sweep() -> dict[float, Cell]:
    """Every budget with every seed."""
    base = Plan.load(PLAN)
    budgets = (*EPSILONS, NOISELESS)
    runs = simulate_many(
        [base.replace(f"privacy.epsilon={epsilon}") for epsilon in budgets], seeds=SEEDS
    )
    cells = {}
    for i, epsilon in enumerate(budgets):
        mine = runs[i * len(SEEDS) : (i + 1) * len(SEEDS)]
        cells[epsilon] = {
            "loss": np.array([run.record["result"]["test_loss"] for run in mine]),
            "accuracy": np.array([run.accuracy for run in mine]),
            "rounds": np.array([run.rounds_used for run in mine]),
        }
    return cells


def table(cells: dict[float, Cell]) -> str:
    """Mean ± standard deviation over the seeds, as Markdown."""
    lines = ["| ε | test loss | test accuracy | rounds |", "|---|---|---|---|"]
    for epsilon, cell in cells.items():
        name = "no noise (ε = 10⁶)" if epsilon == NOISELESS else f"{epsilon}"
        loss, accuracy = (f"{c.mean():.4f} ± {c.std(ddof=1):.4f}" for c in list(cell.values())[:2])
        lines.append(f"| {name} | {loss} | {accuracy} | {cell['rounds'].mean():.0f} |")
    return "\n".join(lines)


def draw(cells: dict[float, Cell], path: Path) -> None:
    """Two panels against ε; the grey band is the run without noise, ± one standard deviation."""
    figure = Figure(figsize=(8, 3.2), layout="constrained")
    for axes, key in zip(figure.subplots(1, 2), ("loss", "accuracy"), strict=True):
        means = np.array([cells[e][key].mean() for e in EPSILONS])
        spread = np.array([cells[e][key].std(ddof=1) for e in EPSILONS])
        free = cells[NOISELESS][key]
        low, high = free.mean() - free.std(ddof=1), free.mean() + free.std(ddof=1)
        axes.axhspan(low, high, color="0.88", label="without noise")
        axes.axhline(free.mean(), color="0.5", linewidth=1)
        axes.errorbar(
            EPSILONS, means, spread, color="#1b5e8c", marker="o", capsize=3, label="private"
        )
        axes.set_xscale("log", base=2)
        axes.set_xticks(EPSILONS, [str(e) for e in EPSILONS])
        axes.set_xlabel("ε of each client (δ = 1e-3)")
        axes.set_ylabel(f"test {key}")
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, loc="upper right" if key == "loss" else "lower right")
    # The same numbers give the same file: no date, and ids that do not change.
    with mpl.rc_context({"svg.hashsalt": "sottovoce", "svg.fonttype": "none"}):
        figure.savefig(path, metadata={"Date": None})


if __name__ == "__main__":
    found = sweep()
    print(table(found))
    if len(sys.argv) > 1:
        draw(found, Path(sys.argv[1]))
