"""How the harness and a peer talk: one line in, one JSON object out.

A peer is started as `python <peer>.py WORK.npz`, says that it is ready, and waits. Waiting costs
nothing, so the harness can keep all peers alive and ask them in turn: a slow moment of the machine
then touches everybody.

    check OUT.npz           a round without noise; the new weights go to OUT
    rounds SECONDS OUT.npz  rounds with noise until they took so long together, at least one, each
                            timed by itself; the weights after each go to OUT, stacked
    stop

The first of several short rounds is not timed: a process that was stopped has cold caches.

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

#: A round shorter than this is played once untimed when a peer is asked again, and then repeated.
SHORT = 1.0


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


def own_cpu_seconds() -> float:
    """CPU time of this process and of its children that ended."""
    own = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(part.ru_utime + part.ru_stime for part in own)


def cpu_seconds_below() -> float:
    """CPU time of the processes below this one that still run; in hundredths of a second."""
    total = 0.0
    for process in descendants(os.getpid()):
        try:
            stat = Path(f"/proc/{process}/stat").read_text()
        except OSError:
            continue
        ticks = stat.rpartition(")")[2].split()[11:15]  # its own and its ended children's
        total += sum(map(int, ticks)) / os.sysconf("SC_CLK_TCK")
    return total


def cpu_seconds() -> float:
    """Both."""
    return own_cpu_seconds() + cpu_seconds_below()


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


def turn(play: Play, std: float, seconds: float, out: str) -> dict[str, Any]:
    """Rounds until they took so many seconds together; the weights of each go to a file.

    Walking through /proc takes milliseconds: neither clock runs meanwhile.
    """
    wall: list[float] = []
    outcomes: list[Outcome] = []
    below, own = cpu_seconds_below(), own_cpu_seconds()
    while sum(wall) < seconds or not wall:
        start = time.perf_counter()
        outcomes.append(play(std))
        wall.append(time.perf_counter() - start)
    own = own_cpu_seconds() - own
    below = cpu_seconds_below() - below
    rounds = [one.params for one in outcomes]
    np.savez(out, **{name: np.stack([np.asarray(p[name]) for p in rounds]) for name in rounds[0]})
    return {
        "wall_s": wall,
        "cpu_s": (own + below) / len(wall),
        "peak_mb": peak_mb(),
        "loss": float(outcomes[-1].loss),
        "accuracy": float(outcomes[-1].accuracy),
    }


def converse(play: Play, *, std: float, using: dict[str, str], began: float) -> None:
    """Answer the harness until it says stop."""
    answer = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever a library prints belongs to the log, not to the conversation

    def say(what: dict[str, Any]) -> None:
        answer.write(json.dumps(what) + "\n")

    say({"ready": True, "versions": using, "start_s": time.perf_counter() - began})
    before = float("inf")  # seconds of the round before
    for line in sys.stdin:
        word, _, rest = line.strip().partition(" ")
        if word == "stop":
            return
        if word == "check":
            told = turn(play, 0.0, 0.0, rest)
        else:
            seconds, _, out = rest.partition(" ")
            if before < SHORT:
                play(std)
            told = turn(play, std, float(seconds), out)
        before = told["wall_s"][-1]
        say(told)


def given() -> Work:
    """The work named on the command line."""
    return load(Path(sys.argv[1]))


def serve(build: Callable[[Work], Play], *packages: str) -> None:
    """A whole peer: read the work, build what plays a round, answer."""
    began = time.perf_counter()
    work = given()
    std, play = work.std, build(work)
    del work  # a peer that has its own copy of the rows need not hold ours
    converse(play, std=std, using=versions(*packages), began=began)
