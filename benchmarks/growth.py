"""How a round grows: seconds a sample, peak memory, and what is spent outside the gradients.

    python benchmarks/growth.py            50 to 50,000 clients × 800, and 1,000,000 × 20
    python benchmarks/growth.py --short    the same shapes, smaller: under a minute

Every case is a run of `simulate` in a process of its own, over rows that are streamed: a file of
40,000 random rows, one byte a number, read through a memory map again and again as if it were as
long as the case wants (a file of the largest would take 31 GB). The model is that of the paper's
MNIST work, 784-256-10, and 64-32-10 for a million clients. Of 50,000 clients one in a hundred is
asked in a round: the rows of the others are not read, but they have their books as everyone.

Printed, after a small round that compiles: seconds a round, microseconds a sample, the part of the
time that was not spent waiting for the compiled sum over a block (choosing and charging clients,
reading that was not done meanwhile, noise, evaluation, books, checkpoints), and the peak of
resident memory, with that of the same process before it read a row.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import foreign
import kept

ROOT = Path(__file__).parents[1]
BASE = 40_000  # rows in the file
CLASSES = 10
PUBLIC = 10_000  # rows the server evaluates on


@dataclass(frozen=True)
class Case:
    clients: int
    samples: int
    features: int = 784
    hidden: int = 256
    per_round: int | None = None  # None: all of them
    rounds: int = 1
    folder: bool = False  # whether the run is written down: checkpoints, rounds, record

    @property
    def rows(self) -> int:
        """Rows that a round computes."""
        return self.samples * (self.per_round or self.clients)


MILLION = Case(1_000_000, 20, features=64, hidden=32, folder=True)
FULL = (
    Case(50, 800, rounds=5),
    Case(500, 800),
    Case(5_000, 800),
    Case(50_000, 800, per_round=500),
    MILLION,
)
SHORT = (
    Case(50, 800, rounds=3),
    Case(500, 800, per_round=100),
    Case(5_000, 800, per_round=100),
    Case(50_000, 800, per_round=100),
    Case(100_000, 20, features=64, hidden=32, folder=True),
)


class Repeated:
    """As many rows as wanted, those of an array again and again: shape, dtype and slices."""

    def __init__(self, base: Any, rows: int) -> None:
        self.base, self.shape, self.dtype = base, (rows, *base.shape[1:]), base.dtype

    def __len__(self) -> int:
        return int(self.shape[0])

    def __getitem__(self, where: slice) -> Any:
        import numpy as np

        first, count = where.start % len(self.base), where.stop - where.start
        if first + count <= len(self.base):
            return self.base[first : first + count]
        places = np.arange(first, first + count) % len(self.base)
        return np.take(self.base, places, axis=0)


def measure(case: Case, folder: Path) -> dict[str, float]:
    """One run in this process."""
    import jax
    import numpy as np

    from sottovoce import Plan, simulate
    from sottovoce.server import rounds as course
    from sottovoce.simulation import streamed

    random = np.random.default_rng(0)
    shape = (BASE, case.features)
    np.save(folder / "x.npy", random.integers(0, 2, shape, dtype=np.uint8))
    x = np.load(folder / "x.npy", mmap_mode="r")
    y = random.integers(0, CLASSES, BASE, dtype=np.uint8)
    public = x[:PUBLIC].astype(np.float32), y[:PUBLIC].astype(np.int64)
    total = case.clients * case.samples
    plan = Plan(
        data={"name": "arrays", "clients": case.clients, "samples": case.samples, "split": "order"}
        | {"validation": PUBLIC, "test": PUBLIC},
        model={"name": "mlp", "hidden": case.hidden},
        rounds={"schedule": "fixed", "rounds": case.rounds}
        | ({} if case.per_round is None else {"per_round": case.per_round}),
    )
    spent, at = [0.0], []
    real, real_prepare = streamed.add_block, course.prepare_round

    def timed(*args: Any, **named: Any) -> Any:
        began = time.perf_counter()
        done = jax.block_until_ready(real(*args, **named))
        spent[0] += time.perf_counter() - began
        return done

    def mark(done: object) -> None:
        used = resource.getrusage(resource.RUSAGE_SELF)
        at.append((time.perf_counter(), spent[0], used.ru_utime + used.ru_stime))

    def prepare(*args: Any) -> Any:
        if not at:
            mark(None)
        return real_prepare(*args)

    jax.numpy.zeros(1).block_until_ready()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    rows = (Repeated(x, total), Repeated(y, total))
    given: Any = {"data": rows, "validation": public, "test": public, "seed": 1}
    simulate(plan.replace(**{"rounds.per_round": 1, "rounds.rounds": 1}), **given)
    streamed.add_block, course.prepare_round = timed, prepare
    began = time.perf_counter()
    simulate(plan, **given, on_round=mark, out=folder / "run" if case.folder else None)
    whole = time.perf_counter() - began
    rounds = len(at) - 1
    wall, inside, cpu = (after - first for first, after in zip(at[0], at[-1], strict=True))
    return {
        "seconds": wall / rounds,
        "cpu_seconds": cpu / rounds,
        "us_a_sample": 1e6 * wall / rounds / case.rows,
        "cpu_us_a_sample": 1e6 * cpu / rounds / case.rows,
        "outside": 1 - inside / wall,
        "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "before_mb": before,
        "whole_seconds": whole,
    }


def apart(case: Case) -> dict[str, float]:
    """`measure` in a process of its own."""
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT / "src")}
    command = [sys.executable, __file__, "--here", json.dumps(asdict(case))]
    answer = subprocess.run(command, env=environment, check=True, capture_output=True).stdout
    found: dict[str, float] = json.loads(answer)
    return found


def line(case: Case, found: dict[str, float]) -> str:
    asked = "" if case.per_round is None else f", {case.per_round:,} asked"
    return (
        f"{case.clients:>9,} × {case.samples:<3} {asked:<14} {case.rows:>10,} rows  "
        f"{found['seconds']:8.3f} s  {found['us_a_sample']:7.2f} µs "
        f"({found['cpu_us_a_sample']:.2f} of CPUs)  {found['outside']:6.1%} outside  "
        f"{found['peak_mb']:6.0f} MB (before {found['before_mb']:.0f})"
    )


def page(found: dict[str, Any]) -> str:
    """The table of docs/performance.md."""
    about = found["machine"]
    lines = [
        f"{about['cpu']}, {about['cores']} cores, jax {found['versions']['jax']}; "
        f"{foreign.words(found)}; {found['date']}.",
        "",
        "| clients × samples | asked | rows a round | seconds | µs a sample | µs of CPUs | "
        "outside the gradients | peak memory | the whole run |",
        "|---|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for own in found["cases"]:
        asked = "all" if own["per_round"] is None else f"{own['per_round']:,}"
        lines.append(
            f"| {own['clients']:,} × {own['samples']} | {asked} | {own['rows']:,} | "
            f"{own['seconds']:.1f} | {own['us_a_sample']:.1f} | {own['cpu_us_a_sample']:.2f} | "
            f"{own['outside']:.1%} | {own['peak_mb']:.0f} MB | {own['whole_seconds']:.1f} s, "
            f"{own['rounds']} round{'s' if own['rounds'] > 1 else ''} |"
        )
    return "\n".join(lines)


def versions() -> dict[str, str]:
    from importlib.metadata import version

    return {"python": platform.python_version()} | {n: version(n) for n in ("numpy", "jax")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--short", action="store_true", help="smaller, under a minute")
    parser.add_argument("--out", type=Path, help="write the figures here as JSON")
    parser.add_argument("--only", type=int, nargs="+", help="cases by their number, from 0")
    parser.add_argument("--here", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.here:
        with tempfile.TemporaryDirectory(prefix="sottovoce-growth-") as folder:
            print(json.dumps(measure(Case(**json.loads(asked.here)), Path(folder))))
        return
    cores = len(os.sched_getaffinity(0))
    print(f"streamed rounds on {cores} core(s): time of a round and a sample")
    chosen, cases = SHORT if asked.short else FULL, []
    began, before = time.perf_counter(), foreign.mark()
    for case in [chosen[i] for i in asked.only or range(len(chosen))]:
        found = apart(case)
        print(line(case, found), flush=True)
        cases.append(asdict(case) | {"rows": case.rows} | found)
    if asked.out is not None:
        about = kept.about() | {"versions": versions(), "cases": cases}
        about |= {"foreign": round(foreign.share(before, foreign.mark()), 4)}
        about |= {"minutes": round((time.perf_counter() - began) / 60, 2)}
        asked.out.parent.mkdir(parents=True, exist_ok=True)
        asked.out.write_text(json.dumps(about, ensure_ascii=False, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
