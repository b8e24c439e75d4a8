"""Where what `make bench` measures is kept: results/bench/cpu.json, one entry a benchmark."""

from __future__ import annotations

import json
import os
import platform
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

FILE = Path(__file__).resolve().parents[1] / "results" / "bench" / "cpu.json"


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
        "load": round(os.getloadavg()[0], 2),
    }


def keep(
    name: str, command: str, packages: tuple[str, ...], found: Any, *, file: Path = FILE
) -> None:
    """Put what one benchmark found beside what the others did."""
    kept = json.loads(file.read_text()) if file.exists() else {"format": 1}
    kept[name] = {
        "date": datetime.now(UTC).date().isoformat(),
        "command": command,
        "machine": machine(),
        "versions": {package: metadata.version(package) for package in packages},
        "found": found,
    }
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(kept, indent=1, sort_keys=True) + "\n")
