"""One round of the paper's MNIST work against the floor of its arithmetic.

The work: 50 clients × 800 rows of 784 features, MLP 784-256-10, every per-sample gradient clipped,
one weighted sum, then loss and accuracy on 10,000 rows: 36.8 GFLOP. The floor is that number over
the rate of a large float32 matrix product measured in the same process, by numpy's BLAS and by
XLA, whichever is faster. Run it with

    python benchmarks/clipped_round.py

It measures one thread and two, each in a process of its own (thread counts are fixed at import).
"""

from __future__ import annotations

import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from kept import keep

ROWS, TESTED, FEATURES, HIDDEN, CLASSES = 50 * 800, 10_000, 784, 256, 10
REPEATS = 9


def flop() -> float:
    """Products only: forward and weight gradients of both layers, the error sent back, the test."""
    first, second = 2 * FEATURES * HIDDEN, 2 * HIDDEN * CLASSES
    return ROWS * (2 * first + 3 * second) + TESTED * (first + second)


def seconds(work: Callable[[], object]) -> list[float]:
    work()
    times = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return times


def measure() -> dict[str, float]:
    """The times of this process; its threads were fixed by whoever started it."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from sottovoce.learning.clipping import Inspected, clipped_sum, inspect
    from sottovoce.learning.evaluate import evaluate
    from sottovoce.learning.models import Mlp

    random = np.random.default_rng(0)
    rows = random.random((ROWS, FEATURES), dtype=np.float32)
    matrix = random.standard_normal((FEATURES, HIDDEN), dtype=np.float32)
    errors = random.standard_normal((ROWS, HIDDEN), dtype=np.float32)
    x, w, e = jnp.asarray(rows), jnp.asarray(matrix), jnp.asarray(errors)
    y = jnp.asarray(random.integers(0, CLASSES, ROWS))
    model = Mlp(FEATURES, HIDDEN, CLASSES)
    params = model.init(jax.random.key(0))
    weight = jnp.full(ROWS, 1 / ROWS)

    @jax.jit
    def one_round(params, x, y, weight, tested, labels):  # type: ignore[no-untyped-def]
        total = clipped_sum(model, params, x, y, weight, 5.0)
        params = jax.tree.map(lambda p, g: p - g, params, total)
        return params, evaluate(model, params, tested, labels)

    # Once for all rounds, as in a run; clean rows are not copied.
    seen = Inspected(x, *jax.jit(lambda x: inspect(model, x)[1:])(x))
    work = (params, seen, y, weight, jnp.array(x[:TESTED]), jnp.array(y[:TESTED]))
    start = time.perf_counter()
    compiled = one_round.lower(*work).compile()
    compilation = time.perf_counter() - start
    forward, backward = jax.jit(lambda a, b: a @ b), jax.jit(lambda a, b: a.T @ b)
    product = 2 * ROWS * FEATURES * HIDDEN / 1e9
    # Interleaved, so that a slow moment of the machine touches all of them.
    best = {"numpy": 0.0, "xla": 0.0}
    times: list[float] = []
    for _ in range(3):
        numpy_times = [seconds(lambda: rows @ matrix), seconds(lambda: rows.T @ errors)]
        xla_times = [
            seconds(lambda: forward(x, w).block_until_ready()),
            seconds(lambda: backward(x, e).block_until_ready()),
        ]
        for name, pair in (("numpy", numpy_times), ("xla", xla_times)):
            rate = 2 * product / sum(statistics.median(part) for part in pair)
            best[name] = max(best[name], rate)
        times += seconds(lambda: jax.block_until_ready(compiled(*work)))
    floor = flop() / 1e9 / max(best.values())
    return {
        "seconds": statistics.median(times),
        "fastest": min(times),
        "compilation": compilation,
        "numpy_gflops": best["numpy"],
        "xla_gflops": best["xla"],
        "floor": floor,
        "ratio": statistics.median(times) / floor,
        "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }


def main() -> None:
    print(f"{flop() / 1e9:.1f} GFLOP a round; rates in GFLOP/s, times in seconds")
    kept = {}
    for threads in (1, 2):
        environment = os.environ | {
            "OMP_NUM_THREADS": str(threads),
            "OPENBLAS_NUM_THREADS": str(threads),
            "JAX_PLATFORMS": "cpu",
            "PYTHONPATH": str(Path(__file__).parents[1] / "src"),
        }
        if threads == 1:
            environment["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false"
        cores = ",".join(str(core) for core in sorted(os.sched_getaffinity(0))[:threads])
        command = ["taskset", "-c", cores, sys.executable, __file__, "--here"]
        answer = subprocess.run(command, env=environment, check=True, capture_output=True).stdout
        kept[f"{threads} threads"] = found = json.loads(answer)
        print(f"{threads} thread(s): " + ", ".join(f"{k} {v:.3g}" for k, v in found.items()))
    keep("clipped_round", "python benchmarks/clipped_round.py", ("jax", "numpy"), kept)


if __name__ == "__main__":
    if "--here" in sys.argv:
        print(json.dumps(measure()))
    else:
        main()
