"""Run the long checks, print one table (test, size, result, minutes), write it as JSON.

    python trust/table.py [--out FILE] [what pytest takes: files, -k …]

A test says how large it was with `record_property("size", "10,000 kills")`.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from datetime import UTC, datetime
from pathlib import Path

import pytest

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "tests"))  # the long checks share parts with the quick ones


class Table:
    """Collects one row a test while pytest runs."""

    def __init__(self) -> None:
        self.rows: list[dict[str, object]] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note a test when it has run, or when it could not."""
        if report.when != "call" and report.outcome == "passed":
            return
        size = dict(report.user_properties).get("size", "")
        name = report.nodeid.split("::", 1)[-1].removeprefix("test_").replace("_", " ")
        why = str(report.longrepr[-1]) if isinstance(report.longrepr, tuple) else ""
        row = {
            "test": name,
            "file": Path(report.nodeid.split("::")[0]).name,
            "size": size,
            "result": report.outcome,
            "minutes": round(report.duration / 60, 2),
        }
        self.rows.append(row | ({"why": why} if why else {}))
        print(_line(row), flush=True)
        if report.outcome == "failed":
            print(report.longreprtext, flush=True)


def _line(row: dict[str, object]) -> str:
    return f"{row['test']!s:<78.78} {row['size']!s:<26.26} {row['result']!s:<8} {row['minutes']:>7}"


def main() -> int:
    """Run what the command line names, or everything in this folder."""
    options = argparse.ArgumentParser(description=__doc__, add_help=True)
    options.add_argument("--out", type=Path, default=Path("trust.json"))
    known, others = options.parse_known_args()
    for name in ("OMP", "OPENBLAS"):  # as many as users have; the quick tests have one
        os.environ.setdefault(f"{name}_NUM_THREADS", str(os.cpu_count()))
    table, began = Table(), time.monotonic()
    print(_line({"test": "test", "size": "size", "result": "result", "minutes": "minutes"}))
    files = [other for other in others if not other.startswith("-") and Path(other).exists()]
    quiet = ["-p", "no:terminal", "-p", "no:cacheprovider"]
    code = pytest.main([*quiet, *([] if files else [str(HERE)]), *others], plugins=[table])
    minutes = round((time.monotonic() - began) / 60, 1)
    failed = sum(row["result"] == "failed" for row in table.rows)
    skipped = sum(row["result"] == "skipped" for row in table.rows)
    print(f"{len(table.rows)} checks, {failed} failed, {skipped} skipped, {minutes} minutes")
    told = {
        "made": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "command": " ".join(["python", "trust/table.py", *sys.argv[1:]]),
        "python": platform.python_version(),
        "machine": platform.machine(),
        "minutes": minutes,
        "checks": table.rows,
    }
    known.out.write_text(json.dumps(told, indent=1) + "\n", "utf-8")
    print(f"written to {known.out}")
    return int(code)


if __name__ == "__main__":
    sys.exit(main())
