"""The named moments of a write, so that tests can stop the process at each of them.

In service `reached` does nothing. A test replaces it by something that kills the process.
"""

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


def reached(step: str) -> None:
    """The process has come so far: nothing to do."""
