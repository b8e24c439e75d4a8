"""Every peer on the same round, side by side: `make bench-peers`.

    python benchmarks/side_by_side.py [--works mlp cnn svm] [--threads 1 2] [--peers ours numpy …]

Each peer is a process in an environment of its own (`environments.py`). It is held against a
float64 reference before it is timed. Repetitions go round: every peer once, then every peer again,
the machine's own rates among them. What was measured goes to results/bench/peers.json, where a run
replaces the one of the same work and number of threads; the table is printed from it. With
`--peers` it goes to .bench/peers.json instead, or with `--join` into the kept run: a long table can
be measured in pieces, every row beside ours and the floor of its own rotation. Ctrl-C ends a run
and keeps what was measured.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent / "peers"))

import numpy as np
import peer_table
import reference
from environments import FOLDER, NotInstallable
from kept import machine
from peer_process import Running, Unfit, check, variables
from roster import FLOOR, ROSTER, Peer
from work import SHAPES, Arrays, Shape, Work, make, save

OUT = Path(__file__).resolve().parents[1] / "results" / "bench" / "peers.json"
DEPLOYED = "flower-deployment"


def prepare(shape: Shape, folder: Path) -> tuple[Work, Path]:
    """The work with a clip that half of the rows exceed, and its file."""
    work = make(shape)
    _, norms = reference.clipped_mean(work, work.x, work.y, float("inf"))
    work = dataclasses.replace(work, clip=float(np.median(norms)))
    path = folder / f"{shape.model}.npz"
    save(work, path)
    return work, path


def deployment(path: Path, threads: int) -> dict[str, Any]:
    """Flower deployed, as a row: nothing is computed, so it is not asked in turn."""
    row: dict[str, Any] = {"peer": DEPLOYED, "clips": "nothing", "cpu_s": []}
    script = Path(__file__).resolve().parent / "peers" / "flower_deployment.py"
    cores = ",".join(map(str, sorted(os.sched_getaffinity(0))[-threads:]))
    done = subprocess.run(
        ["taskset", "-c", cores, sys.executable, script, path],
        env=variables(threads),
        capture_output=True,
        text=True,
    )
    row["label"] = "Flower deployed, an empty app"
    if done.returncode != 0:
        return row | {"why": done.stderr.strip().splitlines()[-1]}
    told = json.loads(done.stdout)
    row["label"] += f" on {told['nodes']} nodes: nothing is computed"
    return row | {
        "versions": told["versions"],
        "wall_s": told["wall_s"],
        "ready_s": told["ready_s"],
    }


def command(name: str, threads: int, peers: list[Peer], repeats: int, seconds: float) -> str:
    """What measures this run again."""
    some = "" if len(peers) == len(ROSTER) else f" --peers {' '.join(peer.key for peer in peers)}"
    return (
        f"python benchmarks/side_by_side.py --works {name} --threads {threads} "
        f"--repeats {repeats} --seconds {seconds:g}{some}"
    )


def note(text: str) -> None:
    """A line of progress."""
    print(text, file=sys.stderr, flush=True)


def measure(
    name: str,
    threads: int,
    peers: list[Peer],
    *,
    deployed: bool,
    repeats: int,
    seconds: float,
    logs: Path,
) -> dict[str, Any]:
    """One rotation: one work, one number of threads, all these peers."""
    shape = SHAPES[name]
    with tempfile.TemporaryDirectory(prefix="bench-") as away:
        work, path = prepare(shape, Path(away))
        truth = {"samples": reference.clipped_mean(work, work.x, work.y, work.clip)[0]}
        if any(peer.clips == "update" for peer in peers):
            truth["update"] = reference.by_update(work)
        rows: dict[str, dict[str, Any]] = {
            peer.key: {
                "peer": peer.key,
                "label": peer.label,
                "clips": peer.clips,
                "why": "the run was ended before its turn",
            }
            for peer in peers
        }
        running: dict[str, Running] = {}
        rates: list[dict[str, float]] = []
        load = os.getloadavg()[0]
        floor = Running(FLOOR, path, threads, logs)
        try:
            rates.append(floor.ask("round"))
            for peer in peers:
                begin(peer, rows[peer.key], running, path, threads, logs, work, truth)
            rotate(rows, running, floor, rates, repeats, seconds, Path(away) / "out.npz")
        except KeyboardInterrupt:
            note("  stopped: what was measured is kept")
        finally:
            for one in (*running.values(), floor):
                one.stop()
        if deployed:
            rows[DEPLOYED] = deployment(path, threads)
    middle = {key: statistics.median(rate[key] for rate in rates) for key in rates[0]}
    gflops = max(middle["numpy_gflops"], middle["xla_gflops"])
    by_flop, by_bytes = shape.flop() / gflops / 1e9, shape.bytes() / middle["copy_gbs"] / 1e9
    return {
        "work": name,
        "threads": threads,
        "date": datetime.now(UTC).date().isoformat(),
        "command": command(name, threads, peers, repeats, seconds),
        "machine": machine() | {"load": round(load, 2)},
        "shape": dataclasses.asdict(shape),
        "gflop": shape.flop() / 1e9,
        "mb": shape.bytes() / 1e6,
        "rates": middle,
        "floor_s": max(by_flop, by_bytes),
        "rows": list(rows.values()),
    }


def begin(
    peer: Peer,
    row: dict[str, Any],
    running: dict[str, Running],
    path: Path,
    threads: int,
    logs: Path,
    work: Work,
    truth: dict[str, Arrays],
) -> None:
    """Start a peer and hold it to the reference; its row says what came of it."""
    try:
        running[peer.key] = started = Running(peer, path, threads, logs)
        found = check(started, work, truth[peer.clips])
    except (NotInstallable, Unfit) as problem:
        row["why"] = str(problem)
        note(f"  {peer.label}: {problem}")
        return
    del row["why"]
    row |= {"versions": started.ready["versions"], "first_s": found["first_s"]}
    row |= {"error": found["error"], "noise": found["noise"], "peak_mb": found["peak_mb"]}
    # the round whose noise was looked at is the first repetition
    row |= {"wall_s": [found["wall_s"]], "cpu_s": [found["cpu_s"]]}
    note(f"  {peer.label}: right within {found['error']:.1e}, {found['wall_s']:.2f} s")


def rotate(
    rows: dict[str, dict[str, Any]],
    running: dict[str, Running],
    floor: Running,
    rates: list[dict[str, float]],
    repeats: int,
    seconds: float,
    out: Path,
) -> None:
    """Every peer once, then every peer again; slow ones rest when they have had their seconds."""
    for _ in range(repeats - 1):
        for key, row in rows.items():
            if "why" in row or sum(row["wall_s"]) > seconds:
                continue
            told = running[key].ask(f"round {out}")
            row["wall_s"].append(told["wall_s"])
            row["cpu_s"].append(told["cpu_s"])
            row["peak_mb"] = told["peak_mb"]
        rates.append(floor.ask("round"))


def joined(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """The old run with the new one's rows, which say what they were measured beside."""
    ours = next(row for row in new["rows"] if row["peer"] == "ours")
    beside = {key: statistics.median(ours[key]) for key in ("wall_s", "cpu_s")}
    beside |= {"floor_s": new["floor_s"], "load": new["machine"]["load"]}
    fresh = [row | {"beside": beside} for row in new["rows"] if row is not ours]
    names = {row["peer"] for row in fresh}
    return old | {"rows": [row for row in old["rows"] if row["peer"] not in names] + fresh}


def keep(run: dict[str, Any], out: Path, *, join: bool) -> dict[str, Any]:
    """Write a run in the place of the one of the same work and threads, or join it."""
    runs = json.loads(out.read_text())["runs"] if out.exists() else []
    key = (run["work"], run["threads"])
    same = [old for old in runs if (old["work"], old["threads"]) == key]
    run = joined(same[0], run) if join and same else run
    runs = [old for old in runs if (old["work"], old["threads"]) != key] + [run]
    order = list(SHAPES)
    runs.sort(key=lambda one: (order.index(one["work"]), one["threads"]))
    found = {"format": 1, "runs": runs}
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(found, indent=1) + "\n")
    return found


def main() -> None:
    """Measure what was asked for and print the tables."""
    parser = argparse.ArgumentParser(description="One round by every peer.")
    parser.add_argument("--works", nargs="+", default=["mlp", "cnn", "svm"], choices=list(SHAPES))
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 2])
    keys = [*(peer.key for peer in ROSTER), DEPLOYED]
    parser.add_argument(
        "--peers", nargs="*", default=[], choices=keys, metavar="PEER", help=", ".join(keys)
    )
    parser.add_argument("--repeats", type=int, default=7, help="rounds of each")
    parser.add_argument("--seconds", type=float, default=20, help="a peer rests after so many")
    parser.add_argument("--join", action="store_true", help="add rows to the kept run")
    parser.add_argument("--out", type=Path, help="where runs are kept")
    given = parser.parse_args()
    wanted = {*given.peers, "ours"} if given.peers else set(keys)
    peers = [peer for peer in ROSTER if peer.key in wanted]
    cores = len(os.sched_getaffinity(0))
    # a few peers are a look, not the table: they do not replace what the page shows
    look = given.peers and not given.join
    out = given.out or (FOLDER / "peers.json" if look else OUT)
    logs = FOLDER / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    for name in given.works:
        for threads in given.threads:
            if threads > cores:
                note(f"{name} with {threads} threads: left out, there are {cores} cores")
                continue
            began = time.perf_counter()
            note(f"{name}, {threads} thread(s), load {os.getloadavg()[0]:.1f}")
            run = measure(
                name,
                threads,
                peers,
                # it computes nothing, so one work and the most threads are enough
                deployed=(name, threads) == ("mlp", max(given.threads)) and DEPLOYED in wanted,
                repeats=given.repeats,
                seconds=given.seconds,
                logs=logs,
            )
            run["minutes"] = round((time.perf_counter() - began) / 60, 1)
            keep(run, out, join=given.join)
            print(peer_table.heading(run))
            print(peer_table.markdown(run), flush=True)


if __name__ == "__main__":
    main()
