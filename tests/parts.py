"""Run the parts of `make test` or `make check`, one line each with its minutes.

    python tests/parts.py test | check

A part that fails shows all of its output; the others still run, and the exit code is 1. Only the
standard library is used: this runs before anything is installed.
"""

from __future__ import annotations

import subprocess
import sys
import time

BIN = ".venv/bin"
# Three workers on two cores: a third of the tests wait for processes of their own.
PYTEST = [f"{BIN}/python", "-m", "pytest", "-q", "-n", "3", "--dist", "worksteal"]

INSTALL = ("install", ["make", "--no-print-directory", ".venv/.dev"])
CHECK = [
    INSTALL,
    ("style", [f"{BIN}/ruff", "check", "."]),
    ("format", [f"{BIN}/ruff", "format", "--check", "."]),
    ("imports", [f"{BIN}/lint-imports", "--no-cache"]),
    ("types", [f"{BIN}/mypy"]),
    ("quick tests", [*PYTEST, "-m", "not slow"]),
]
TEST = [
    *CHECK[:-1],
    ("tests", [*PYTEST, "--durations=8"]),
    ("docs", ["make", "--no-print-directory", "docs"]),
    ("wheel", [f"{BIN}/python", "tests/wheel.py"]),
]


def run(name: str, command: list[str]) -> bool:
    """Run one part and print its line; its last line of output stands beside it."""
    began = time.monotonic()
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    minutes = (time.monotonic() - began) / 60
    lines = [x for x in done.stdout.splitlines() if x.strip() and not x.startswith("WARNING")]
    last = lines[-1].strip("= ") if lines else ""
    print(f"{name:<12} {minutes:5.1f} min  {'ok' if done.returncode == 0 else 'FAILED':<7} {last}")
    if done.returncode != 0:
        print(done.stdout)
    sys.stdout.flush()
    return done.returncode == 0


def main() -> int:
    """Run all parts of the set named on the command line."""
    began = time.monotonic()
    parts = {"test": TEST, "check": CHECK}[sys.argv[1]]
    results = []
    for part in parts:
        results.append(run(*part))
        if part is INSTALL and not results[-1]:
            break
    print(f"{'all':<12} {(time.monotonic() - began) / 60:5.1f} min")
    good = sum(results)
    print(f"parts: {good} passed, {len(parts) - good} failed")
    return 0 if good == len(parts) else 1


if __name__ == "__main__":
    sys.exit(main())
