"""How the settings of docs/frontier.md were chosen: on public rows, without any client.

    python examples/frontier_settings.py mnist hog-4 1 2 4 8
    python examples/frontier_settings.py cifar10 hog-8-colours 4 8
    python examples/frontier_settings.py mnist hog-4 4 --clients 4 --samples 15000 --delta 1e-5
    python examples/frontier_settings.py mnist hog-4 0.25 0.5 1 2 4 --honest 40
    python examples/frontier_settings.py acs softmax 0.25 0.5 1 2 4 --honest 40

The first 20,000 training pictures of MNIST (10,000 of CIFAR-10) are public (`data.public`): no
client of a reported run holds one of them, whatever its seed. Here four fifths of them stand in for
the clients', dealt to 50 clients, and the others judge, each time anew with three seeds. The
averaged noise is 2ηC√T/(n√U·μ), so that a budget worth more by the part in which n√U is smaller
gives the noise of the real federation. Neither a test picture nor a client's is read. Where the
server sees only sums, h clients share their noise (`--honest`), and longer runs are tried as well.
For ACS the rows of two other states stand in (`other_states.py`), which are no rows of clients.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import time
from pathlib import Path

import numpy as np
from other_states import read_other_states

from sottovoce import Plan, simulate_many
from sottovoce.data import datasets
from sottovoce.privacy import gaussian

PUBLIC = {"mnist": 20_000, "cifar10": 10_000}
STAND_INS, SEEDS = 50, (97, 98, 99)
CLIPS = (0.25, 0.5, 1.0)
ROUNDS = (40, 80, 160, 240)
LONGER = (80, 160, 240, 480)
STRIDES = (6.0, 12.0, 24.0)  # ηC, the longest step
CENSUS_STRIDES = (0.5, 1.0, 2.0, 4.0, 8.0)
FINISHES: tuple[dict[str, object], ...] = (
    {},
    {"server.decay": "linear"},
    {"server.average": "tail"},
)
FEATURES: dict[str, dict[str, object]] = {
    f"hog-{cell}": {"model.features": "hog", "model.cell": cell} for cell in (3, 4, 5, 6, 8)
}
MODELS = {"softmax": {}, "mlp-32": {"model.name": "mlp", "model.hidden": 32}}
FEATURES |= {f"{name}-colours": own | {"model.colours": True} for name, own in FEATURES.items()}


def grid(features: str, data: str, honest: int) -> list[dict[str, object]]:
    """Every setting that is tried."""
    first = (FEATURES | MODELS)[features] | ({"model.upright": True} if data == "mnist" else {})
    rounds, strides = (ROUNDS, STRIDES) if honest == 1 else (LONGER, (*STRIDES, 48.0))
    if data == "acs":
        strides = CENSUS_STRIDES
    return [
        {**first, "local.clip": clip, "local.learning_rate": stride / clip, "rounds.rounds": count}
        | finish
        for clip, count, stride, finish in itertools.product(CLIPS, rounds, strides, FINISHES)
    ]


def read_public(data: str) -> tuple[np.ndarray, np.ndarray]:
    """The rows that choose, and their labels."""
    if data == "acs":
        return read_other_states(Path(os.environ["SOTTOVOCE_DATA"]) / "acs")
    public, arrays = PUBLIC[data], datasets.load(data)
    return arrays.train_x[:public].reshape(-1, *arrays.shape), arrays.train_y[:public]


def choose(
    data: str,
    features: str,
    epsilon: float,
    *,
    delta: float = 1e-3,
    clients: int = 50,
    samples: int = 800,
    honest: int = 1,
    top: int = 5,
) -> dict[str, object]:
    """The best setting for so many clients of `samples` rows each; the best few are printed."""
    began = time.monotonic()
    x, y = read_public(data)
    public = len(y)
    own = public * 4 // 5 // STAND_INS
    fewer = samples * (honest * clients / STAND_INS) ** 0.5 / own
    worth = float(gaussian.epsilon(delta, fewer * float(gaussian.mu(epsilon, delta))))
    base = Plan(
        data={"name": "arrays", "clients": STAND_INS, "samples": own,
              "validation": 500, "test": public - own * STAND_INS - 500},
        model={"name": "softmax"},
        privacy={"epsilon": worth, "delta": delta},
        rounds={"schedule": "fixed", "rounds": 40},
    )  # fmt: skip
    settings = grid(features, data, honest)
    runs = simulate_many([base.replace(**own) for own in settings], seeds=SEEDS, data=(x, y))
    told = []
    for i, setting in enumerate(settings):
        mine = runs[len(SEEDS) * i : len(SEEDS) * (i + 1)]
        told.append((statistics.mean(run.accuracy for run in mine), setting))
    told.sort(key=lambda pair: -pair[0])
    print(
        f"{data}, {features}, ε = {epsilon:g}, δ = {delta:g}, {clients} × {samples}, h = {honest}: "
        f"{len(runs)} runs in {time.monotonic() - began:.0f} s"
    )
    for accuracy, setting in told[:top]:
        shown = {key.partition(".")[2]: v for key, v in setting.items() if "model" not in key}
        print(f"  {accuracy:.4f}", shown, flush=True)
    return told[0][1]


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("data", choices=(*PUBLIC, "acs"))
    parser.add_argument("features", choices=FEATURES | MODELS)
    parser.add_argument("epsilon", type=float, nargs="+")
    parser.add_argument("--clients", type=int, default=50)
    parser.add_argument("--samples", type=int, default=800)
    parser.add_argument("--honest", type=int, default=1)
    parser.add_argument("--delta", type=float, default=1e-3)
    given = vars(parser.parse_args())
    for epsilon in given.pop("epsilon"):
        choose(epsilon=epsilon, **given)


if __name__ == "__main__":
    main()
