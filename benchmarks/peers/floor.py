"""The machine itself, in the same rotation as the peers: sgemm and copy rates.

A round's floor is its products over the rate of large float32 products of the mlp's shapes, by
numpy's BLAS or XLA, whichever is faster, or its rows over the rate of a large copy where that takes
longer.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from protocol import given, versions

ROWS, FEATURES, HIDDEN = 20_000, 784, 256
COPIED = 256 << 20


def seconds(work: Callable[[], Any]) -> float:
    """The faster of two: what else the machine does only slows it."""
    times = []
    for _ in range(2):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return min(times)


def main() -> None:
    """Answer like a peer; a `round` is one measurement of every rate."""
    given()
    random = np.random.default_rng(0)
    rows = random.random((ROWS, FEATURES), dtype=np.float32)
    matrix = random.random((FEATURES, HIDDEN), dtype=np.float32)
    errors = random.random((ROWS, HIDDEN), dtype=np.float32)
    x, w, e = map(jnp.asarray, (rows, matrix, errors))
    forward, backward = jax.jit(lambda a, b: a @ b), jax.jit(lambda a, b: a.T @ b)
    source = np.ones(COPIED // 4, np.float32)
    target = np.empty_like(source)
    flop = 2 * 2 * ROWS * FEATURES * HIDDEN

    def measure() -> dict[str, float]:
        by_numpy = seconds(lambda: rows @ matrix) + seconds(lambda: rows.T @ errors)
        by_xla = seconds(lambda: forward(x, w).block_until_ready())
        by_xla += seconds(lambda: backward(x, e).block_until_ready())
        copied = seconds(lambda: np.copyto(target, source))
        return {
            "numpy_gflops": flop / by_numpy / 1e9,
            "xla_gflops": flop / by_xla / 1e9,
            "copy_gbs": 2 * COPIED / copied / 1e9,  # read and written
        }

    answer = os.fdopen(os.dup(1), "w", buffering=1)
    measure()
    answer.write(json.dumps({"ready": True, "versions": versions("numpy", "jax")}) + "\n")
    for line in sys.stdin:
        if line.strip() == "stop":
            return
        answer.write(json.dumps(measure()) + "\n")


if __name__ == "__main__":
    main()
