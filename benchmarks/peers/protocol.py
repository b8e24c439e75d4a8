"""How the harness and a peer talk: one line in, one JSON object out, one round a time.

A peer is started as `python <peer>.py WORK.npz`, says that it is ready, and waits. Waiting costs
nothing, so the harness can keep all peers alive and ask them in turn: a slow moment of the machine
then touches everybody.

    check OUT.npz   a round without noise; the new weights and the evaluation go to OUT
    round OUT.npz   a round with noise, timed; likewise
    stop

Only numpy and the standard library, and whatever numpy the peer's environment has.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from work import Arrays, Work, load


class Outcome(NamedTuple):
    """The weights after a round, and how good they are on the test rows."""

    params: Arrays
    loss: float
    accuracy: float


Play = Callable[[float], Outcome]  # the standard deviation of the noise → a round from the start


def descendants(root: int) -> list[int]:
    """The processes below one that are alive."""
    parents = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                stat = (entry / "stat").read_text()
            except OSError:  # it ended while we looked
                continue
            parents[int(entry.name)] = int(stat.rpartition(")")[2].split()[1])
    family = {root}
    while more := {child for child, parent in parents.items() if parent in family} - family:
        family |= more
    return sorted(family - {root})


def cpu_seconds() -> float:
    """CPU time of this process, of its children that ended, and of those that still run."""
    own = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    total = sum(part.ru_utime + part.ru_stime for part in own)
    for process in descendants(os.getpid()):
        try:
            stat = Path(f"/proc/{process}/stat").read_text()
        except OSError:
            continue
        ticks = stat.rpartition(")")[2].split()[11:15]  # its own and its ended children's
        total += sum(map(int, ticks)) / os.sysconf("SC_CLK_TCK")
    return total


def peak_mb() -> float:
    """Peak resident memory, summed over this process and those below it.

    VmHWM and not ru_maxrss, which would remember the size of whoever started us.
    """
    total = 0.0
    for process in ["self", *descendants(os.getpid())]:
        try:
            status = Path(f"/proc/{process}/status").read_text()
        except OSError:
            continue
        for line in status.splitlines():
            if line.startswith("VmHWM:"):
                total += int(line.split()[1]) / 1024
    return total


def versions(*names: str) -> dict[str, str]:
    """The installed versions of some distributions."""
    return {name: metadata.version(name) for name in names}


def converse(play: Play, *, std: float, using: dict[str, str], began: float) -> None:
    """Answer the harness until it says stop."""
    answer = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever a library prints belongs to the log, not to the conversation

    def say(**what: Any) -> None:
        answer.write(json.dumps(what) + "\n")

    say(ready=True, versions=using, start_s=time.perf_counter() - began)
    for line in sys.stdin:
        word, _, out = line.strip().partition(" ")
        if word == "stop":
            return
        start, cpu = time.perf_counter(), cpu_seconds()
        outcome = play(0.0 if word == "check" else std)
        wall, cpu = time.perf_counter() - start, cpu_seconds() - cpu
        np.savez(out, **{name: np.asarray(array) for name, array in outcome.params.items()})
        say(
            wall_s=wall,
            cpu_s=cpu,
            peak_mb=peak_mb(),
            loss=float(outcome.loss),
            accuracy=float(outcome.accuracy),
        )


def given() -> Work:
    """The work named on the command line."""
    return load(Path(sys.argv[1]))


def serve(build: Callable[[Work], Play], *packages: str) -> None:
    """A whole peer: read the work, build what plays a round, answer."""
    began = time.perf_counter()
    work = given()
    play = build(work)
    converse(play, std=work.std, using=versions(*packages), began=began)
