"""A sweep of 40 runs on the digits: this process, one Ray worker, two.

    pip install 'sottovoce[ray]' && python benchmarks/sweep.py [--keep]

With `--keep` it is kept in results/bench/sweep.json. Each case begins with warm workers: a run each
has compiled everything. Wall time says what a user waits, if nothing else runs; CPU seconds of all
processes say what spreading costs, on a busy machine too. With a core for each worker and one
driver whose share is small, the factor that two workers gain is at most 2 × CPU of one ÷ CPU of
two.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path
from typing import Any

os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"  # 127.0.0.1 only
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"

import ray
from kept import FILE, keep

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


def compare(cases: dict[str, dict[str, Any]]) -> dict[str, float]:
    """Return what two workers gain over one: in wall time, and at most, by their CPU seconds.

    >>> one, two = ({"seconds": t, "cpu_s": {"workers": c}} for t, c in ((8.0, 5.0), (5.0, 5.5)))
    >>> compare({"one worker": one, "two workers": two})
    {'wall': 1.6, 'cpu': 1.1, 'most': 1.82}
    """
    one, two = cases["one worker"], cases["two workers"]
    cpu = sum(two["cpu_s"].values()) / sum(one["cpu_s"].values())
    gains = {"wall": one["seconds"] / two["seconds"], "cpu": cpu, "most": 2 / cpu}
    return {name: round(value, 2) for name, value in gains.items()}


def main() -> None:
    """Measure, print, and keep if that was asked for."""
    parser = argparse.ArgumentParser(description="A sweep on one and two workers of Ray.")
    parser.add_argument("--keep", action="store_true", help="write results/bench/sweep.json")
    given, began = parser.parse_args(), time.monotonic()
    found: dict[str, dict[str, Any]] = {}
    print(f"{'':14}{'seconds':>9}{'CPU s':>9}   of which driver, workers, ray")
    for name, workers in {"this process": 0, "one worker": 1, "two workers": 2}.items():
        if workers:
            ray.init("local", num_cpus=workers, include_dashboard=False, logging_level="ERROR")
        seconds, spent = measure("ray" if workers else None)
        ray.shutdown()
        found[name] = {"seconds": seconds, "cpu_s": spent, "load": os.getloadavg()[0]}
        parts = ", ".join(f"{value:.2f}" for value in spent.values())
        print(f"{name:14}{seconds:9.2f}{sum(spent.values()):9.2f}   {parts}", flush=True)
    gain = compare(found)
    print(
        f"Two workers beside one: {gain['wall']:.2f} x in wall time (aim 1.7), {gain['cpu']:.2f} x "
        f"the CPU seconds, which allow {gain['most']:.2f} x; load {os.getloadavg()[0]:.1f}"
    )
    if given.keep:
        minutes = (time.monotonic() - began) / 60
        result = {"runs": RUNS, "cases": found, "gain": gain}
        keep("sweep", ("jax", "ray"), result, minutes=minutes, file=FILE.with_name("sweep.json"))


if __name__ == "__main__":
    main()
