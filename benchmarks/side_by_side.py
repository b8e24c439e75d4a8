"""Every peer on the same round, side by side: `make bench-peers`.

    python benchmarks/side_by_side.py [--works mlp cnn svm] [--threads 1 2] [--peers ours numpy …]
    python benchmarks/side_by_side.py --tune [--works …] [--threads 1] [--peers …]

Each peer is a process in an environment of its own (`environments.py`). It is held against a
float64 reference before it is timed. Repetitions go round: every peer once, then every peer again,
ours and the machine's own rates in every turn. What was measured goes to results/bench/peers.json,
where a run replaces the one of the same work and number of threads; the table is printed from it.
With `--peers` it goes to .bench/peers.json instead, or with `--join` into the kept run: a long
table can be measured in pieces, every row beside ours and the floor of its own rotation. Ctrl-C
ends a run and keeps what was measured. `--tune` measures how many rows a peer best takes at once
(`tuning.py`).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent / "peers"))

import environments
import peer_table
import tuning
from environments import FOLDER
from peer_process import variables
from roster import ROSTER
from rotation import Turns, measure, note, prepare
from work import SHAPES

OUT = Path(__file__).resolve().parents[1] / "results" / "bench" / "peers.json"
DEPLOYED = "flower-deployment"


def deployment(path: Path) -> dict[str, Any]:
    """Flower deployed, as a row: nothing is computed, so it is not asked in turn nor pinned."""
    row: dict[str, Any] = {"peer": DEPLOYED, "clips": "nothing", "cpu_s": []}
    script = Path(__file__).resolve().parent / "peers" / "flower_deployment.py"
    threads = len(os.sched_getaffinity(0))
    done = subprocess.run(
        [sys.executable, script, path], env=variables(threads), capture_output=True, text=True
    )
    row["label"] = "Flower deployed, an empty app"
    if done.returncode != 0:
        return row | {"why": done.stderr.strip().splitlines()[-1]}
    told = json.loads(done.stdout)
    row["label"] += (
        f" on {told['nodes']} nodes and all cores: it computes nothing; *Ours alone* has the "
        "federation to compare it with"
    )
    return row | {
        "versions": told["versions"],
        "wall_s": told["wall_s"],
        "rounds": [1] * len(told["wall_s"]),
        "ready_s": told["ready_s"],
    }


def joined(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """The old run with the new one's rows, which say what they were measured beside."""
    ours = next(row for row in new["rows"] if row["peer"] == "ours")
    beside = {key: statistics.median(ours[key]) for key in ("wall_s", "cpu_s")}
    beside |= {key: new.get(key) for key in ("floor_s", "foreign", "command", "source")}
    fresh = [row | {"beside": beside} for row in new["rows"] if row is not ours]
    names = {row["peer"] for row in fresh}
    return old | {"rows": [row for row in old["rows"] if row["peer"] not in names] + fresh}


def keep(run: dict[str, Any], out: Path, *, join: bool) -> dict[str, Any]:
    """Write a run in the place of the one of the same work and threads, or join it."""
    old_file = json.loads(out.read_text()) if out.exists() else {}
    runs = old_file.get("runs", [])
    key = (run["work"], run["threads"])
    same = [old for old in runs if (old["work"], old["threads"]) == key]
    run = joined(same[0], run) if join and same else run
    runs = [old for old in runs if (old["work"], old["threads"]) != key] + [run]
    order = list(SHAPES)
    runs.sort(key=lambda one: (order.index(one["work"]), one["threads"]))
    rooms = old_file.get("environments", {}) | environments.freezes()
    found = {"format": 2, "environments": rooms, "runs": runs}
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(found, indent=1) + "\n")
    return found


def arguments() -> argparse.Namespace:
    """What was asked for."""
    usual = Turns()
    parser = argparse.ArgumentParser(description="One round by every peer.")
    parser.add_argument("--works", nargs="+", default=["mlp", "cnn", "svm"], choices=list(SHAPES))
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 2])
    keys = [*(peer.key for peer in ROSTER), DEPLOYED]
    parser.add_argument(
        "--peers", nargs="*", default=[], choices=keys, metavar="PEER", help=", ".join(keys)
    )
    parser.add_argument("--repeats", type=int, default=usual.most, help="turns of each at most")
    parser.add_argument("--least", type=int, default=usual.least, help="and at least")
    parser.add_argument(
        "--seconds", type=float, default=usual.seconds, help="a peer rests after so many"
    )
    parser.add_argument("--join", action="store_true", help="add rows to the kept run")
    parser.add_argument("--tune", action="store_true", help="try sizes of batches instead")
    parser.add_argument("--out", type=Path, help="where runs are kept")
    return parser.parse_args()


def main() -> None:
    """Measure what was asked for and print the tables."""
    given = arguments()
    logs = FOLDER / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    if given.tune:
        tuning.tune(given.works, given.threads[0], given.peers, out=given.out, logs=logs)
        return
    turns = Turns(max(given.repeats, given.least), given.least, given.seconds)
    every = {*(peer.key for peer in ROSTER), DEPLOYED}
    wanted = {*given.peers, "ours"} if given.peers else every
    peers = [peer for peer in ROSTER if peer.key in wanted]
    cores = len(os.sched_getaffinity(0))
    # a few peers are a look, not the table: they do not replace what the page shows
    look = given.peers and not given.join
    out = given.out or (FOLDER / "peers.json" if look else OUT)
    for name in given.works:
        with tempfile.TemporaryDirectory(prefix="bench-") as away:
            made = prepare(name, SHAPES[name], Path(away), peers)
            for threads in given.threads:
                if threads > cores:
                    note(f"{name} with {threads} threads: left out, there are {cores} cores")
                    continue
                began = time.perf_counter()
                note(f"{name}, {threads} thread(s)")
                run = measure(made, threads, peers, turns=turns, logs=logs)
                # it computes nothing, so one work and the most threads are enough
                if (name, threads) == ("mlp", max(given.threads)) and DEPLOYED in wanted:
                    run["rows"].append(deployment(made.path))
                run["minutes"] = round((time.perf_counter() - began) / 60, 1)
                keep(run, out, join=given.join)
                print(peer_table.heading(run))
                print(peer_table.markdown(run), flush=True)
    print(f"written to {out.name}", file=sys.stderr)


if __name__ == "__main__":
    main()
