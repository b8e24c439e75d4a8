"""Wait for an event, and ask whether a process lives."""

from __future__ import annotations

import time
from pathlib import Path


def until(question, seconds, pause=0.1):
    end = time.monotonic() + seconds
    while not question():
        if time.monotonic() > end:
            return False
        time.sleep(pause)
    return True


def lives(pid):
    """Whether this very process lives: a zombie does not."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return False
    return stat.rpartition(b")")[2].split()[0] != b"Z"
