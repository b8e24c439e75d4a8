"""Run the parts of `make test` or `make check`, one line each with its minutes.

    python tests/parts.py test | check

A part that fails shows all of its output; the others still run, and the exit code is 1. Only the
standard library is used: this runs before anything is installed.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor, as_completed

BIN = ".venv/bin"
# Three workers on two cores, since a third of the tests wait for processes of their own. A worker
# costs 10 to 20 seconds before its first test.
PYTEST = [f"{BIN}/python", "-m", "pytest", "-q", "--dist", "worksteal", "-n", "3"]
# What tests train is small: most of their time was XLA's optimising. `make trust` repeats them as
# users compile, and so do the parts "docs" and "wheel", which run commands of users; here those do
# whose programs must agree bit for bit.
PLAIN = ["env", "JAX_DISABLE_MOST_OPTIMIZATIONS=1", "XLA_FLAGS=--xla_cpu_use_fusion_emitters=false"]
WHERE_EXACT = ["tests/simulation/test_accelerator.py", "tests/models/test_clipping.py"]
EXACT = [f"{BIN}/python", "-m", "pytest", "-q", "-m", "exact", *WHERE_EXACT]

# Tests start hundreds of interpreters: each would compile JAX's modules again, a second of CPU.
KEEPS_BYTECODE = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}

INSTALL = ("install", ["make", "--no-print-directory", ".venv/.dev"])
LINT = [
    ("style", [f"{BIN}/ruff", "check", "."]),
    ("format", [f"{BIN}/ruff", "format", "--check", "."]),
    ("imports", [f"{BIN}/lint-imports", "--no-cache"]),
    ("types", [f"{BIN}/mypy"]),
    ("trust types", [f"{BIN}/mypy", "--config-file", "trust/mypy.ini"]),
]
BUILD = [
    ("docs", ["make", "--no-print-directory", "docs"]),
    ("wheel", [f"{BIN}/python", "tests/wheel.py"]),
]
# The parts of one list keep one core busy each: two run at a time.
QUICK = ["-n", "2", "-m", "not slow and not trust and not exact"]
CHECK = [[INSTALL], LINT, [("quick tests", [*PLAIN, *PYTEST, *QUICK])]]
TEST = [
    [INSTALL],
    [*LINT, *BUILD, ("exact tests", EXACT)],
    [("tests", [*PLAIN, *PYTEST, "--durations=8", "-m", "not exact and not trust"])],
]


def run(name: str, command: list[str]) -> tuple[bool, str]:
    """Run one part; return whether it passed, and its line with its last line of output."""
    began = time.monotonic()
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    done = subprocess.run(command, env=KEEPS_BYTECODE, **pipes)
    minutes = (time.monotonic() - began) / 60
    lines = [x for x in done.stdout.splitlines() if x.strip() and not x.startswith("WARNING")]
    last, good = lines[-1].strip("= ") if lines else "", done.returncode == 0
    said = f"{name:<12} {minutes:5.1f} min  {'ok' if good else 'FAILED':<7} {last}"
    return good, said if good else f"{said}\n{done.stdout}"


def main() -> int:
    """Run all parts of the set named on the command line."""
    began = time.monotonic()
    groups = {"test": TEST, "check": CHECK}[sys.argv[1]]
    results = []
    for group in groups:
        with ThreadPoolExecutor(max_workers=2) as pool:
            for part in as_completed([pool.submit(run, *part) for part in group]):
                good, said = part.result()
                results.append(good)
                print(said, flush=True)
        if group == [INSTALL] and not all(results):
            break
    print(f"{'all':<12} {(time.monotonic() - began) / 60:5.1f} min")
    good, count = sum(results), sum(map(len, groups))
    print(f"parts: {good} passed, {count - good} failed")
    return 0 if good == count else 1


if __name__ == "__main__":
    sys.exit(main())
