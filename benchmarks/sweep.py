"""A sweep of 40 runs on the digits: this process, one Ray worker, two.

    pip install 'sottovoce[ray]' && python benchmarks/sweep.py

Each case begins with warm workers: a run each has compiled everything. Wall time says what a user
waits, if nothing else runs; CPU seconds of all processes say what spreading costs, on a busy
machine too. With a core for each worker and one driver whose share is small, the factor that two
workers gain is at most 2 × CPU of one ÷ CPU of two.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"  # 127.0.0.1 only
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"

import ray

from sottovoce import Plan, simulate_many

RUNS, TICKS = 40, os.sysconf("SC_CLK_TCK")


def count_cpu_seconds() -> dict[str, float]:
    """Return the CPU seconds of this process, of Ray's workers, and of the rest of Ray."""
    spent = {"driver": time.process_time(), "workers": 0.0, "ray": 0.0}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            name = (folder / "cmdline").read_bytes()
        except OSError:
            continue
        if int(fields[3]) != os.getsid(0) or int(folder.name) == os.getpid() or b"ray" not in name:
            continue
        is_worker = name.startswith((b"ray::_call", b"ray::IDLE"))
        spent["workers" if is_worker else "ray"] += (int(fields[11]) + int(fields[12])) / TICKS
    return spent


def measure(on: str | None) -> tuple[float, dict[str, float]]:
    """Return seconds and CPU seconds of the sweep."""
    simulate_many([Plan()], seeds=range(900, 904), on=on)
    before, began = count_cpu_seconds(), time.monotonic()
    simulate_many([Plan()], seeds=range(RUNS), on=on)
    seconds, after = time.monotonic() - began, count_cpu_seconds()
    return seconds, {key: after[key] - before[key] for key in after}


def main() -> None:
    """Measure and print."""
    cases = {"this process": 0, "one worker": 1, "two workers": 2}
    print(f"{'':14}{'seconds':>9}{'CPU s':>9}   of which driver, workers, ray")
    for name, workers in cases.items():
        if workers:
            ray.init("local", num_cpus=workers, include_dashboard=False, logging_level="ERROR")
        seconds, spent = measure("ray" if workers else None)
        ray.shutdown()
        parts = ", ".join(f"{value:.2f}" for value in spent.values())
        print(f"{name:14}{seconds:9.2f}{sum(spent.values()):9.2f}   {parts}", flush=True)


if __name__ == "__main__":
    main()
