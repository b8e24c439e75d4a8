"""Time a client's release of the paper's network: built in, and as models of one's own.

    OMP_NUM_THREADS=1 python benchmarks/release.py [--rows 400] [--repeats 5]

Each is `client.release` of the same 784-256-10 network in float64 with secure noise, on one thread;
the models take turns, and the least CPU seconds count. `torch, row by row` has a layer that is no
part of a chain (`LayerNorm`), so that each row has a module of its own. Written to
results/bench/release.json.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import torch
from torch import nn

import sottovoce
from sottovoce import TorchModel
from sottovoce.client.release import Price, release
from sottovoce.models import base
from sottovoce.models.softmax import compute_loss
from sottovoce.privacy.sensitivity import Recipe

KEPT = Path(__file__).parents[1] / "results" / "bench" / "release.json"
FEATURES, HIDDEN, CLASSES = 784, 256, 10


class Net(nn.Module):
    """The network as most people write it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(FEATURES, HIDDEN), nn.Linear(HIDDEN, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the scores."""
        return self.second(torch.relu(self.first(x)))


def list_models() -> dict[str, base.Model]:
    """Return the models to compare."""
    mlp: Any = base.build("mlp", shape=(FEATURES,), classes=CLASSES, hidden=HIDDEN)
    layers = [nn.Linear(FEATURES, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, CLASSES)]
    return {
        "built in": mlp,
        "custom JAX": sottovoce.custom(mlp.init, mlp.apply, lambda s, y: compute_loss(s, y, None)),
        "torch, nn.Sequential": TorchModel(nn.Sequential(*layers)),
        "torch, a class": TorchModel(Net()),
        "torch, row by row": TorchModel(
            nn.Sequential(*layers[:2], nn.LayerNorm(HIDDEN), layers[2])
        ),
    }


def prepare(model: base.Model, rows: int) -> Callable[[], object]:
    """Return a function that releases once."""
    rng = np.random.default_rng(0)
    x, y = rng.random((rows, FEATURES)), rng.integers(0, CLASSES, rows)
    device = base.as_device(model, shape=(FEATURES,), classes=CLASSES)
    params = base.flatten_parameters(model.draw_parameters(1))
    options = {"recipe": Recipe(learning_rate=1.0, clip=1.0), "head": {"kind": "upload"}}
    paid = Price(units=(1,), noise=(2**31,))
    return lambda: release(device.form, params, x, y, paid=paid, own=device.own_model, **options)


def main() -> None:
    """Measure, write and print a line for each model."""
    parser = argparse.ArgumentParser(description="CPU seconds of a release.")
    parser.add_argument("--rows", type=int, default=400)
    parser.add_argument("--repeats", type=int, default=5)
    given = parser.parse_args()
    torch.set_num_threads(1)
    calls = {name: prepare(model, given.rows) for name, model in list_models().items()}
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(given.repeats + 1):  # the first compiles and surveys
        for name, call in calls.items():
            began = time.process_time()
            call()
            if turn:
                seconds[name].append(time.process_time() - began)
    least = {name: min(times) for name, times in seconds.items()}
    for name, found in least.items():
        print(f"{name}: {found:.3f} s, {found / least['built in']:.2f} × built in")
    versions = {"jax": jax.__version__, "numpy": np.__version__, "torch": torch.__version__}
    values = {"rows": given.rows, "versions": versions, "cpu_s": seconds}
    KEPT.write_text(json.dumps(values, indent=1) + "\n")


if __name__ == "__main__":
    main()
