"""How busy the machine was with others while we measured: CPU time that was not ours, as a share.

All CPU time of the machine (/proc/stat: user, nice, system, interrupts, stolen by a hypervisor)
less that of this process and of all below it, over all CPU time there was, idle included. A load
average would count our own processes as well.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent / "peers"))

from protocol import cpu_seconds


@dataclass(frozen=True)
class Mark:
    """CPU seconds of the machine, busy and altogether, and ours, since they began."""

    busy: float
    total: float
    ours: float


def read(stat: str, ours: float) -> Mark:
    """From the text of /proc/stat, whose numbers are hundredths of seconds as a rule.

    >>> stat = "cpu  300 0 100 500 50 0 0 50 0 0"
    >>> tick = os.sysconf("SC_CLK_TCK")
    >>> mark = read(stat, 1.0)
    >>> mark.busy * tick, mark.total * tick
    (450.0, 1000.0)
    """
    ticks = [int(part) / os.sysconf("SC_CLK_TCK") for part in stat.splitlines()[0].split()[1:9]]
    user, nice, system, idle, waiting, irq, soft, stolen = ticks
    busy = user + nice + system + irq + soft + stolen
    return Mark(busy, busy + idle + waiting, ours)


def mark() -> Mark:
    """The machine now."""
    return read(Path("/proc/stat").read_text(), cpu_seconds())


def share(before: Mark, after: Mark) -> float:
    """The part of the machine's CPU time between two marks that others used, from 0 to 1.

    >>> share(Mark(10, 100, 5), Mark(60, 200, 35))
    0.2
    """
    others = (after.busy - before.busy) - (after.ours - before.ours)
    return max(0.0, others / (after.total - before.total))


def words(found: dict[str, Any]) -> str:
    """For the head of a table.

    >>> words({"foreign": 0.0312})
    'others used 3.1 % of the CPU time meanwhile'
    """
    if found.get("foreign") is None:  # ended early, or measured before shares were kept
        return "other processes not watched"
    return f"others used {100 * found['foreign']:.1f} % of the CPU time meanwhile"
