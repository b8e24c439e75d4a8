"""One round of the paper's MNIST work against the floor of its arithmetic, on one thread and two.

    python benchmarks/own_round.py

The rotation of `make bench-peers` with one peer, ours, beside the machine's own rates: the compiled
round of a simulation with its noise, held to the float64 reference, the noise looked at in every
round. Peak memory is that of our process alone. Kept in results/bench/cpu.json.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from pathlib import Path

from environments import FOLDER
from kept import keep
from roster import ROSTER
from rotation import Turns, measure, prepare
from work import SHAPES

WORK, THREADS = "mlp", (1, 2)
TURNS = Turns(most=9, least=9)


def main() -> None:
    """Measure, keep and print a line for each number of threads."""
    began, found = time.perf_counter(), {}
    ours = [peer for peer in ROSTER if peer.key == "ours"]
    logs = FOLDER / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="bench-") as away:
        made = prepare(WORK, SHAPES[WORK], Path(away), ours)
        for threads in THREADS:
            if threads > len(os.sched_getaffinity(0)):
                sys.exit(
                    f"own_round wants {threads} cores: {len(os.sched_getaffinity(0))} are here"
                )
            run = measure(made, threads, ours, turns=TURNS, logs=logs)
            row = run["rows"][0]
            if "why" in row:
                sys.exit(f"our own round is not timed: {row['why']}")
            found[str(threads)] = run
            times = ", ".join(f"{seconds:.3f}" for seconds in row["wall_s"])
            print(f"{threads} thread(s): floor {run['floor_s']:.3f} s; rounds {times} s")
    keep("round", ("jax", "numpy"), found, minutes=(time.perf_counter() - began) / 60)


if __name__ == "__main__":
    main()
