"""A round on an accelerator against its floor: one run, a batch of 32, a sweep, the cnn.

    python benchmarks/gpu.py [--out results/bench/gpu.json]

The work: U = K = 50, n = 800, 784-256-10, every per-sample gradient clipped, noise, evaluation on
10,000 rows. What is timed is the product itself, host included: rounds are announced, priced,
computed, scored and booked. Rates of a large matrix product (TF32 and bfloat16) and of a copy are
measured in the same process; a round's floor is the larger of its products at the bfloat16 rate
and its bytes at the copy rate. Rows are random numbers: the time does not depend on what they say.
With MNIST at hand (SOTTOVOCE_DATA) the accuracy of bfloat16 products is held against float32 ones.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import kept
import numpy as np

from sottovoce import Plan, __version__, simulate_many
from sottovoce.data.federated import Given, load_holdings
from sottovoce.models import clipping
from sottovoce.server.federation import build
from sottovoce.simulation import accelerator, compiled
from sottovoce.simulation.simulate import play_batch, start_run

CLIENTS, SAMPLES, TESTED, REPEATS = 50, 800, 10_000, 5
ROWS, FEATURES, HIDDEN, CLASSES = CLIENTS * SAMPLES, 784, 256, 10


def count_compilations() -> int:
    """How many versions of rounds and stretches this process has compiled."""
    packed: Any = compiled._play_packed
    return packed._cache_size() + len(accelerator._VERSIONS)


def timed(work: Callable[[], object], repeats: int = REPEATS) -> float:
    """The median of so many seconds, after once for compilation."""
    work()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def rates() -> dict[str, float]:
    """TFLOP/s of a product of 8192 × 8192 matrices, and GB/s of a copy; twenty in one launch.

    Alone each would take 0.1 to 0.4 ms longer, in which the device waits for the host.
    """
    found = {}

    def measure(step: Callable[[Any], Any], of: Any) -> float:
        repeat = jax.jit(lambda of: jax.lax.fori_loop(0, 20, lambda _, value: step(value), of))
        return timed(lambda: jax.block_until_ready(repeat(of))) / 20

    for name, kind in (("tf32", jnp.float32), ("bfloat16", jnp.bfloat16)):
        matrix = jnp.full((8192, 8192), 1 / 8192, kind)
        found[f"{name}_tflops"] = 2 * 8192**3 / measure(lambda a: a @ a, matrix) / 1e12
    many = jnp.ones(1 << 28, jnp.float32)
    found["copy_gbs"] = 2 * many.size * 4 / measure(lambda a: a + 1, many) / 1e9
    return found


def floor(rate: dict[str, float], runs: int) -> dict[str, float]:
    """Products and bytes of one run's round in a batch of so many on the same rows.

    Bytes that cannot be saved: the rows (bfloat16) twice, once for all runs; each run's hidden
    layer written once and read twice, its error written and read once, in float32.
    """
    first, second = 2 * FEATURES * HIDDEN, 2 * HIDDEN * CLASSES
    flop = ROWS * (2 * first + 3 * second) + TESTED * (first + second)
    size = 2 * ROWS * FEATURES * 2 / runs + 5 * ROWS * HIDDEN * 4 + TESTED * FEATURES * 4 / runs
    by_flop, by_bytes = flop / rate["bfloat16_tflops"] / 1e9, size / rate["copy_gbs"] / 1e6
    return {"gflop": flop / 1e9, "mbytes": size / 1e6, "products_ms": by_flop, "bytes_ms": by_bytes}


def plan(rounds: int = 200, model: dict[str, Any] | None = None) -> Plan:
    """The paper's federation on rows of one's own."""
    return Plan(
        data={"name": "arrays", "clients": CLIENTS, "samples": SAMPLES, "validation": TESTED,
              "test": 1000},
        model=model or {"name": "mlp", "hidden": HIDDEN},
        rounds={"schedule": "fixed", "rounds": rounds},
    )  # fmt: skip


def rows(shape: tuple[int, ...]) -> tuple[Any, Any]:
    random = np.random.default_rng(0)
    count = ROWS + TESTED + 1000
    return random.random((count, *shape), dtype=np.float32), random.integers(0, CLASSES, count)


def engine(own: Plan, pair: tuple[Any, Any], runs: int) -> dict[str, float]:
    """Seconds of a whole run in a batch of so many, on one split, host included.

    `round_ms` is a whole run's time over its rounds; `rounds_ms` leaves out what comes before the
    first: the first model and its score.
    """
    given = Given(pair, None, None)
    held = load_holdings(own, seed=1, data=given)
    federation = build(own, seed=1, data=given, held=held)

    spent: list[float] = []

    def whole() -> None:
        batch = [start_run(federation, seed) for seed in range(1, runs + 1)]
        start = time.perf_counter()
        for _ in play_batch(batch):
            pass
        jax.block_until_ready(batch[0].params)
        spent.append(time.perf_counter() - start)

    start = time.perf_counter()
    whole()
    first = time.perf_counter() - start
    spent.clear()
    seconds = timed(whole, 5)
    each, rounds = 1e3 / own.rounds.rounds / runs, statistics.median(spent[1:])
    return {"run_s": seconds / runs, "round_ms": seconds * each, "rounds_ms": rounds * each,
            "first_s": first}  # fmt: skip


def sweep() -> dict[str, float]:
    """5 ε × 4 schedules × 10 seeds × 200 rounds, after compilation.

    One seed's runs go through the same sizes of batches as those of each seed of all.
    """
    base = plan()
    schedules: list[dict[str, object]] = [
        {"rounds.schedule": "fixed"},
        {"rounds.schedule": "discounted", "rounds.beta": 0.9},
        {"rounds.schedule": "discounted", "rounds.beta": 0.8},
        {"rounds.schedule": "decaying"},
    ]
    plans = []
    for epsilon in (1.0, 2.0, 4.0, 8.0, 16.0):
        for schedule in schedules:
            plans.append(base.replace(**{"privacy.epsilon": epsilon}, **schedule))
    pair = rows((FEATURES,))
    start = time.perf_counter()
    simulate_many(plans, seeds=[1], data=pair)
    first = time.perf_counter() - start
    start = time.perf_counter()
    runs = simulate_many(plans, seeds=range(1, 11), data=pair)
    seconds = time.perf_counter() - start
    used = sum(run.rounds_used for run in runs)
    return {"seconds": seconds, "runs": len(runs), "run_rounds": used,
            "run_round_ms": 1e3 * seconds / used, "first_s": first}  # fmt: skip


def agreement() -> dict[str, Any] | None:
    """Test accuracy on MNIST by seed, with products of bfloat16 and of float32 throughout."""
    if not os.environ.get("SOTTOVOCE_DATA"):
        return None
    own = Plan(data={"name": "mnist", "clients": CLIENTS, "samples": SAMPLES},
               model={"name": "mlp", "hidden": HIDDEN}, privacy={"epsilon": 8.0, "delta": 1e-3},
               rounds={"schedule": "fixed", "rounds": 60})  # fmt: skip
    found: dict[str, Any] = {}
    usual = clipping.product_type
    for name in ("bfloat16", "float32"):
        if name == "float32":
            clipping.product_type = lambda model, dtype: dtype
            jax.clear_caches()
        with jax.default_matmul_precision("float32" if name == "float32" else "default"):
            found[name] = [run.accuracy for run in simulate_many([own], seeds=range(1, 11))]
    clipping.product_type = usual
    jax.clear_caches()
    pairs = np.array(found["bfloat16"]) - np.array(found["float32"])
    found["mean_difference"] = float(pairs.mean())
    found["seed_spread"] = float(np.std(found["float32"], ddof=1))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--out", type=Path)
    out = parser.parse_args().out
    if jax.default_backend() == "cpu":
        sys.exit(
            "JAX sees no accelerator here, only a CPU: install the cuda extra on a machine that "
            "has one, or run `make bench`."
        )
    if out is not None and not os.environ.get("SOTTOVOCE_DATA"):
        sys.exit(
            "SOTTOVOCE_DATA is not set: what is kept compares bfloat16 with float32 on MNIST, so "
            "name the folder that has it, or leave --out away to look at the times."
        )
    began, rate = time.perf_counter(), rates()
    found: dict[str, Any] = kept.about() | {
        "schema": "sottovoce.bench-gpu/1",
        "versions": {"sottovoce": __version__, "jax": jax.__version__,
                     "python": platform.python_version()},
        "device": jax.devices()[0].device_kind,
        "rates": rate,
    }  # fmt: skip
    print(found["device"], {key: round(value) for key, value in rate.items()}, flush=True)
    for name, runs in (("one run", 1), ("batch of 32", 32)):
        least, told = floor(rate, runs), engine(plan(), rows((FEATURES,)), runs)
        told |= least | {"floor_ms": max(least["products_ms"], least["bytes_ms"])}
        found[name] = told | {"ratio": told["round_ms"] / told["floor_ms"]}
        print(name, json.dumps(found[name]), flush=True)
    found["sweep"] = sweep()
    print("sweep", json.dumps(found["sweep"]), flush=True)
    shape, model = (32, 32, 3), {"name": "cnn", "channels": 8}
    for name, runs in (("cnn, one run", 1), ("cnn, batch of 8", 8)):
        places = 36 * 36
        flop = ROWS * 2 * places * 8 * (2 * 75 + 3 * 10) + TESTED * 2 * places * 8 * (75 + 10)
        least = flop / rate["bfloat16_tflops"] / 1e9
        # As above: the hidden layer written once and read twice, its error written and read once,
        # both in bfloat16; the rows twice, once for all runs.
        moved = (5 * ROWS * places * 8 * 2 + 2 * ROWS * 3072 * 2 / runs) / rate["copy_gbs"] / 1e6
        told = engine(plan(20, model), rows(shape), runs)
        told |= {"gflop": flop / 1e9, "products_ms": least, "bytes_ms": moved}
        told["floor_ms"] = max(least, moved)
        found[name] = told | {"ratio": told["round_ms"] / told["floor_ms"]}
        print(name, json.dumps(found[name]), flush=True)
    found["compilations"] = count_compilations()  # before agreement, which clears the cache
    found["agreement"] = agreement()
    print("agreement", json.dumps(found["agreement"]), flush=True)
    found["minutes"] = round((time.perf_counter() - began) / 60, 2)
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(found, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
