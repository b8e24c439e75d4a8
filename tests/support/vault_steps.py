"""The named moments of a write of a vault, at each of which tests stop the process."""

from __future__ import annotations

WRITES = ("reserve", "store", "tighten", "rebind", "move", "restore", "stop", "resume")
STEPS = (
    "create: begun",
    "create: committed",
    "create: witness written",
    "create: witnessed",
    "create: named",
    "open: witness written",
    *(
        f"{kind}: {moment}"
        for kind in WRITES
        for moment in (
            "begun",
            "summarised",
            "inserted",
            "committed",
            "witness written",
            "witnessed",
        )
    ),
    "reserve: dropped",
)
