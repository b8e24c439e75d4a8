"""Gradient histograms and a softmax layer on MNIST: settings from public rows, then the test set.

    python examples/hog_mnist.py choose     which cell and C, then which T and η, on public rows
    python examples/hog_mnist.py measure    the table of docs/frontier.md

`choose` touches no client: 8,000 public rows stand in for the clients' 40,000, dealt to as many
clients, a fifth of the rows each. A step's noise is 2ηC√T/(n·μ), so that with n/5 rows and a budget
that is worth 5μ it is the noise of the real federation. Other public rows say which setting is
best. Its seed is none of those that are reported; the test set plays no part.
"""

from __future__ import annotations

import itertools
import statistics
import sys
from pathlib import Path

import numpy as np

from sottovoce import Plan, simulate_many
from sottovoce.holdings import hold
from sottovoce.privacy import gaussian

PLAN = Plan.load(Path(__file__).with_suffix(".toml"))
EPSILONS, SEEDS, TUNING = (1.0, 2.0, 4.0, 8.0), (1, 2, 3, 4, 5), 99
STAND_IN, JUDGES, FIFTH = 8000, 4000, 5
CELLS, CLIPS, STEPS = (4, 5), (1.0, 2.0), ((20, 1.0), (20, 2.0), (40, 1.5), (40, 3.0))
CELL, CLIP = 4, 2.0  # the best of those at the smallest ε
MORE_STEPS = ((40, 3.0), (40, 6.0), (80, 3.0))

#: What `choose` chose: ε → cell, clip, rounds, learning rate.
CHOSEN: dict[float, tuple[int, float, int, float]] = {
    1.0: (CELL, CLIP, 40, 3.0),
    2.0: (CELL, CLIP, 40, 6.0),
    4.0: (CELL, CLIP, 40, 6.0),
    8.0: (CELL, CLIP, 40, 6.0),
}


def setting(epsilon: float, cell: int, clip: float, rounds: int, rate: float) -> Plan:
    """The plan with these settings."""
    return PLAN.replace(
        **{
            "privacy.epsilon": epsilon,
            "model.cell": cell,
            "local.clip": clip,
            "local.learning_rate": rate,
            "rounds.rounds": rounds,
        }
    )


def choose() -> None:
    """The settings on the public rows: which cell and C, then for every ε which T and η."""
    _try(EPSILONS[0], list(itertools.product(CELLS, CLIPS, STEPS)))
    for epsilon in EPSILONS:
        _try(epsilon, [(CELL, CLIP, steps) for steps in MORE_STEPS])


def _try(epsilon: float, grid: list[tuple[int, float, tuple[int, float]]]) -> None:
    raw = PLAN.replace(**{"model.features": None, "model.cell": None, "model.upright": None})
    public = hold(raw.replace(**{"data.validation": STAND_IN + JUDGES}), seed=TUNING).validation
    pictures = public.x.reshape(-1, 28, 28, 1)
    own = {"data.name": "arrays", "data.samples": STAND_IN // PLAN.clients, "data.validation": 1000}
    delta = float(np.asarray(PLAN.privacy.delta))
    worth = float(gaussian.epsilon(delta, FIFTH * float(gaussian.mu(epsilon, delta))))
    plans = [
        setting(worth, cell, clip, *steps).replace(**own, **{"data.test": JUDGES - 1000})
        for cell, clip, steps in grid
    ]
    runs = simulate_many(plans, seeds=[TUNING], data=(pictures, public.y))
    told = sorted(zip((run.accuracy for run in runs), grid, strict=True), reverse=True)
    for accuracy, (cell, clip, (rounds, rate)) in told[:3]:
        print(f"ε={epsilon:g}: {accuracy:.4f} cell {cell}, C {clip:g}, T {rounds}, η {rate:g}")


def measure() -> None:
    """The 10,000 test pictures, five seeds, one after another: each takes its rows' features once.

    The numbers of each seed are printed as they come, the table at the end.
    """
    plans = [setting(epsilon, *CHOSEN[epsilon]) for epsilon in EPSILONS]
    told: list[list[float]] = []
    for seed in SEEDS:
        told.append([run.accuracy for run in simulate_many(plans, seeds=[seed])])
        print(f"seed {seed}:", *(f"{accuracy:.4f}" for accuracy in told[-1]), flush=True)
    print("| ε | test accuracy | rounds | cell | C | η |\n|---|---|---|---|---|---|")
    for epsilon, own in zip(EPSILONS, zip(*told, strict=True), strict=True):
        cell, clip, rounds, rate = CHOSEN[epsilon]
        mean, spread = statistics.mean(own), statistics.stdev(own)
        score = f"{100 * mean:.2f} ± {100 * spread:.2f} %"
        print(f"| {epsilon:g} | {score} | {rounds} | {cell} | {clip:g} | {rate:g} |")


if __name__ == "__main__":
    {"choose": choose, "measure": measure}[sys.argv[1] if len(sys.argv) > 1 else "measure"]()
