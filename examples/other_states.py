"""Settings for the American Community Survey, rehearsed on its rows of two other states.

    SOTTOVOCE_DATA=… python examples/other_states.py 1 4 8 20

The survey's national excerpt (`data.name = "acs"`) plays the private data. What NIST published of
Massachusetts and Texas, the same questions asked in other places, stands in for it: real rows
predict better than made-up ones. Prints the plan that each ε asked for leads to, as TOML.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import numpy as np

from sottovoce import Plan, rehearse
from sottovoce.data.datasets import parse_acs

FILES = ("ma2018.csv", "ma2019.csv", "tx2018.csv", "tx2019.csv")

PLAN = Plan(
    data={"name": "acs", "clients": 50, "samples": 800, "validation": 1000, "test": 4780},
    model={"name": "svm", "kappa": 0.001},
    local={"learning_rate": 2.0, "clip": 1.0},
    privacy={"delta": 1e-3},
    rounds={"schedule": "discounted", "rounds": 200, "beta": 0.9, "zeta": 1e-3, "window": 1},
)


def read_other_states(folder: Path) -> tuple[np.ndarray, np.ndarray]:
    """Read the rows of the two states, and their labels."""
    parts = [parse_acs((folder / name).read_bytes(), file=name) for name in FILES]
    return np.concatenate([x for x, _ in parts]), np.concatenate([y for _, y in parts])


def main() -> None:
    """Rehearse for each ε named."""
    rows = read_other_states(Path(os.environ["SOTTOVOCE_DATA"]) / "acs")
    for epsilon in map(float, sys.argv[1:] or ["1"]):
        found = rehearse(PLAN.replace(**{"privacy.epsilon": epsilon}), public=rows, runs=110)
        print(found.plan.to_toml())


if __name__ == "__main__":
    main()
