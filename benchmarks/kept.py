"""What a measurement says of itself: its command, machine, versions and commit.

And where `make bench` keeps its own, one entry a benchmark: results/bench/cpu.json.
"""

from __future__ import annotations

import json
import os
import platform
import shlex
import subprocess
import sys
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from sottovoce._version import __version__

ROOT = Path(__file__).resolve().parents[1]
FILE = ROOT / "results" / "bench" / "cpu.json"


def command(words: list[str] | None = None) -> str:
    """What was typed to measure it, paths below the project's root written from there.

    >>> command([str(ROOT / "benchmarks" / "a.py"), "--out", str(ROOT / "b c.json"), "-n", "3"])
    "python benchmarks/a.py --out 'b c.json' -n 3"
    """
    own = [_from_root(word) for word in (sys.argv if words is None else words)]
    return shlex.join(["python", *own])


def _from_root(word: str) -> str:
    path = Path(word)
    if not path.is_absolute():
        return word
    # elsewhere on this machine: its name is enough, its place is nobody's business
    return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else path.name


def source() -> dict[str, Any]:
    """Our version, and the commit it was run from; `changed` where files differ from it."""
    found: dict[str, Any] = {"sottovoce": __version__}
    # results/ and docs/ are what benchmarks write
    asked = ["rev-parse HEAD", "status --porcelain -- src benchmarks pyproject.toml"]
    told = [
        subprocess.run(["git", "-C", ROOT, *words.split()], capture_output=True, text=True)
        for words in asked
    ]
    if all(one.returncode == 0 for one in told):
        found |= {"commit": told[0].stdout.strip(), "changed": bool(told[1].stdout.strip())}
    return found


def machine() -> dict[str, Any]:
    """What it runs on, in words."""
    text = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    names = [line.split(":")[1].strip() for line in text.splitlines() if "model name" in line]
    return {
        "cpu": names[0] if names else platform.processor(),
        "cores": os.cpu_count(),
        "memory_gb": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30),
        "python": platform.python_version(),
        "system": platform.system(),
    }


def about() -> dict[str, Any]:
    """What every file of results/bench says of a measurement."""
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "command": command(),
        "machine": machine(),
        "source": source(),
    }


def keep(
    name: str,
    packages: tuple[str, ...],
    found: Any,
    *,
    minutes: float,
    file: Path = FILE,
) -> None:
    """Put what one benchmark found beside what the others did."""
    kept = json.loads(file.read_text()) if file.exists() else {"format": 1}
    kept[name] = about() | {
        "versions": {package: metadata.version(package) for package in packages},
        "minutes": round(minutes, 2),
        "found": found,
    }
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(kept, indent=1, sort_keys=True) + "\n")
