"""How the settings of docs/frontier.md were chosen: on public rows, without any client.

    python examples/frontier_settings.py mnist hog-4 1 4      which data, which features, which ε

The first 20,000 training pictures are public (`data.public`): no client of a reported run holds one
of them, whatever its seed. Here 16,000 of them stand in for the clients' 40,000, dealt to as many
clients, and the other 4,000 judge, each time anew with three seeds. A step's noise is 2ηC√T/(n·μ),
so that clients of 320 pictures with a budget worth 2.5μ have the noise of clients of 800 with μ.
Neither a test picture nor a client's is read.
"""

from __future__ import annotations

import itertools
import statistics
import sys
import time

from sottovoce import Plan, simulate_many
from sottovoce.data import datasets
from sottovoce.privacy import gaussian

PUBLIC, STAND_IN, CLIENTS, SAMPLES, SEEDS = 20_000, 16_000, 50, 800, (97, 98, 99)
CLIPS = (0.25, 0.5, 1.0)
ROUNDS = (30, 60, 120, 240)
STRIDES = (3.0, 6.0, 12.0, 24.0)  # ηC, the longest step
FINISHES: tuple[dict[str, object], ...] = (
    {},
    {"server.decay": "cosine"},
    {"server.decay": "linear"},
    {"server.average": "tail"},
)
FEATURES: dict[str, dict[str, object]] = {
    f"hog-{cell}": {"model.features": "hog", "model.cell": cell} for cell in (3, 4, 5, 6, 8)
}


def grid(features: str, data: str) -> list[dict[str, object]]:
    """Every setting that is tried."""
    first = FEATURES[features] | ({"model.upright": True} if data == "mnist" else {})
    return [
        {**first, "local.clip": clip, "local.learning_rate": stride / clip, "rounds.rounds": rounds}
        | finish
        for clip, rounds, stride, finish in itertools.product(CLIPS, ROUNDS, STRIDES, FINISHES)
    ]


def choose(
    data: str, features: str, epsilon: float, delta: float = 1e-3, clients: int = CLIENTS,
    samples: int = SAMPLES, top: int = 6,
) -> None:  # fmt: skip
    """The best settings for clients of `samples` rows each, printed best first."""
    began = time.monotonic()
    arrays = datasets.load(data)
    x, y = arrays.train_x[:PUBLIC].reshape(-1, *arrays.shape), arrays.train_y[:PUBLIC]
    # Fewer clients, or more rows at each, count by Σn·√U: what the averaged noise depends on.
    fewer = samples * (clients / CLIENTS) ** 0.5 / (STAND_IN // CLIENTS)
    worth = float(gaussian.epsilon(delta, fewer * float(gaussian.mu(epsilon, delta))))
    base = Plan(
        data={"name": "arrays", "clients": CLIENTS, "samples": STAND_IN // CLIENTS,
              "validation": 500, "test": PUBLIC - STAND_IN - 500},
        model={"name": "softmax"},
        privacy={"epsilon": worth, "delta": delta},
        rounds={"schedule": "fixed", "rounds": 40},
    )  # fmt: skip
    settings = grid(features, data)
    runs = simulate_many([base.replace(**own) for own in settings], seeds=SEEDS, data=(x, y))
    told = []
    for i, own in enumerate(settings):
        mine = runs[len(SEEDS) * i : len(SEEDS) * (i + 1)]
        told.append((statistics.mean(run.accuracy for run in mine), own))
    told.sort(key=lambda pair: -pair[0])
    print(f"{data}, {features}, ε = {epsilon:g}, δ = {delta:g}, {clients} × {samples}: "
          f"{len(runs)} runs in {time.monotonic() - began:.0f} s")  # fmt: skip
    for accuracy, own in told[:top]:
        print(f"  {accuracy:.4f}", {key: v for key, v in own.items() if "features" not in key})
    sys.stdout.flush()


if __name__ == "__main__":
    for budget in sys.argv[3:]:
        choose(sys.argv[1], sys.argv[2], float(budget))
