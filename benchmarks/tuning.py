"""How many rows a peer best takes at once, tried on a part of the rows: `side_by_side.py --tune`.

Every size of `peers/sizes.py` is a process of its own, one after another and not side by side, so
what is kept is CPU seconds of a round, which others on the machine disturb less; the median of its
turns, after a round without a clock. What is right is checked as it is for the table.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent / "peers"))

import foreign
import kept
import sizes
from noise_check import Unfit
from peer_process import Running, check, turn
from peer_table import TITLES, number
from roster import ROSTER
from rotation import note, prepare
from work import SHAPES, Shape

OUT = Path(__file__).resolve().parents[1] / "results" / "bench" / "tuning.json"
#: Clients of the smaller work: each has as many rows as in the table.
CLIENTS = {"mlp": 2, "cnn": 10, "svm": 50}
TESTED = 1000
#: It takes 1,600 rows in a fraction of a second, too little to tell its sizes apart.
MORE = {("mlp", "jax-privacy"): 10}
#: Fast enough for all the rows, which matter to it: it forms no gradients, so a batch can be large.
WHOLE = ("opacus-ghost",)
TURNS = 2


def part(name: str, key: str) -> Shape:
    """The work with fewer clients and test rows."""
    whole = SHAPES[name]
    if key in WHOLE:
        return whole
    clients = MORE.get((name, key), CLIENTS[name])
    few = {"clients": clients, "tested": min(TESTED, whole.tested)}
    return dataclasses.replace(whole, **few)


def tune(works: list[str], threads: int, peers: list[str], *, out: Path | None, logs: Path) -> None:
    """Try all sizes of the peers named (all that have any), and keep what each took."""
    file = out or OUT
    for name in works:
        began, before = time.perf_counter(), foreign.mark()
        found = {
            key: tried(name, key, threads, logs) for key in sizes.TRIED if not peers or key in peers
        }
        entry = kept.about() | {
            "work": name,
            "threads": threads,
            "foreign": round(foreign.share(before, foreign.mark()), 4),
            "minutes": round((time.perf_counter() - began) / 60, 2),
            "peers": found,
        }
        runs = json.loads(file.read_text())["runs"] if file.exists() else []
        same = [one for one in runs if (one["work"], one["threads"]) == (name, threads)]
        if same:
            entry["peers"] = same[0]["peers"] | found
        runs = [one for one in runs if one not in same] + [entry]
        runs.sort(key=lambda one: (list(SHAPES).index(one["work"]), one["threads"]))
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps({"format": 1, "runs": runs}, indent=1) + "\n")


def tried(name: str, key: str, threads: int, logs: Path) -> dict[str, Any]:
    """CPU seconds of a round by size, or why there are none, and of how many rows."""
    peer = next(one for one in ROSTER if one.key == key)
    found: dict[str, Any] = {}
    shape = part(name, key)
    with tempfile.TemporaryDirectory(prefix="bench-") as away:
        made = prepare(name, shape, Path(away), [peer])
        for size in sizes.TRIED[key][name]:
            running = None
            try:
                more = {sizes.VARIABLE: size}
                running = Running(peer, made.path, threads, logs, more=more)
                _, noise = check(running, made.work, made.truth[peer.clips])
                turns = [
                    turn(running, made.work, noise, 1.0, Path(away) / "o.npz") for _ in range(TURNS)
                ]
                found[size] = statistics.median(one["cpu_s"] for one in turns)
            except Unfit as problem:
                found[size] = str(problem)
            finally:
                if running is not None:
                    running.stop()
            note(f"  {name}, {peer.label}, {size}: {found[size]}")
    return {"rows": shape.rows, "seconds": found}


def page(found: dict[str, Any]) -> str:
    """A line for every peer and work; the size that the tables above use is bold."""
    labels = {peer.key: peer.label for peer in ROSTER}
    lines = ["| | work, threads, rows | CPU seconds by rows at once |", "|---|---|---|"]
    for run in found["runs"]:
        for key, own in run["peers"].items():
            used = sizes.USED[key][run["work"]]
            cells = [
                f"**{size}: {shown(took)}**" if size == used else f"{size}: {shown(took)}"
                for size, took in own["seconds"].items()
            ]
            about = f"{TITLES[run['work']]}, {run['threads']}, {own['rows']:,}"
            lines.append(f"| {labels[key]} | {about} | {', '.join(cells)} |")
    return "\n".join(lines)


def shown(took: float | str) -> str:
    """A number of seconds, or why there is none."""
    return took if isinstance(took, str) else number(took)
