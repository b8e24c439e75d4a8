"""What the host spends on a round beside the arithmetic: cohort, prices, debits, orders, books.

    python benchmarks/books.py

The loops of the simulator with their compiled rounds taken out: microseconds of CPU a run and
round, for one run (in stretches, as on an accelerator) and for 32 in a batch, 50 clients each,
discounted rounds. An accelerator that is faster than this waits for its host.
"""

from __future__ import annotations

import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "src"))

import numpy as np
from kept import keep

from sottovoce import Plan
from sottovoce.data.federated import load_holdings
from sottovoce.server.federation import build
from sottovoce.simulation import accelerator, compiled, simulate
from sottovoce.simulation.accelerator import Launch
from sottovoce.simulation.compiled import RoundResult, pack

BATCHES = (1, 32)
REPEATS = 5
EPSILONS = (1.0, 2.0, 4.0, 8.0, 20.0)


class Score(np.ndarray):
    """A score that is there already."""

    def copy_to_host_async(self) -> None:
        """Nothing to wait for."""


def at_once(model: Any, rows: Any, params: Any, orders: Any, t: int, **_: Any) -> RoundResult:
    """In the place of the compiled round: orders are packed, and the loss falls a little."""
    pack((orders, np.full(len(orders.std), t, np.uint32)))
    loss = 1 / (t + 1)
    score = np.tile(np.array([loss, 0.5, loss, loss], np.float32), (len(orders.std), 1))
    return RoundResult(params, score.view(Score), {})  # type: ignore[arg-type]


def at_once_in_stretches(*_: Any, **__: Any) -> Launch:
    """In the place of the compiled stretch."""
    played = 0

    def launch(start: RoundResult, words: Any) -> RoundResult:
        nonlocal played
        loss = 1 / (1 + played + np.arange(len(words) - 1, dtype=np.float32))
        played += int(words[-1, 0, 1])
        score = np.stack([loss, np.full_like(loss, 0.5), loss, loss], axis=1)[:, None]
        return RoundResult(start.params, score, {})  # type: ignore[arg-type]

    return launch


def measure(count: int) -> float:
    """Microseconds a run and round in a batch of so many: the median of a few runs."""
    plan = Plan().replace(**{"data.clients": 50, "data.samples": 20, "rounds.rounds": 100})
    held = load_holdings(plan, seed=1)
    plans = [plan.replace(**{"privacy.epsilon": EPSILONS[i % 5]}) for i in range(count)]
    federations = [build(own, seed=1, held=held) for own in plans]
    found = []
    for _ in range(REPEATS + 1):  # the first one compiles
        batch = [simulate.start_run(own, seed) for seed, own in enumerate(federations, 1)]
        began = time.process_time()
        play: Any = accelerator.play_ahead if count == 1 else compiled.play_compiled
        for _ in play(batch[0].federation.model, batch):
            pass
        spent = time.process_time() - began
        found.append(1e6 * spent / sum(one.state.progress.done for one in batch))
    return statistics.median(found[1:])


def main() -> None:
    """Print a line for each batch."""
    compiled.play_round, accelerator.compile_stretch = at_once, at_once_in_stretches  # type: ignore[assignment]
    kept, began = {}, time.perf_counter()
    for count in BATCHES:
        kept[str(count)] = found = measure(count)
        print(f"batch of {count:<3} {found:6.0f} µs of the host a run and round")
    keep("books", ("numpy", "jax"), kept, minutes=(time.perf_counter() - began) / 60)


if __name__ == "__main__":
    main()
