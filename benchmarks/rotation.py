"""One work by several peers in turn: each is checked, then all are asked once, then all again."""

from __future__ import annotations

import dataclasses
import statistics
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent / "peers"))

import foreign
import kept
import numpy as np
import reference
from environments import NotInstallable
from noise_check import Noise, Unfit
from peer_process import LEAST, Running, check, turn
from roster import FLOOR, LEFT_OUT, Peer
from work import Arrays, Shape, Work, make, save


@dataclass(frozen=True)
class Turns:
    """How often a peer is asked.

    Everyone `least` times; then, up to `most` times, those that have not used up their `seconds`.
    Short rounds are repeated to about `each` seconds a turn, and the turn counts as their median.
    """

    most: int = 5
    least: int = LEAST
    seconds: float = 8.0
    each: float = 1.0

    def is_due(self, wall: list[float], rounds: list[int]) -> bool:
        """Whether a peer with these turns (medians, numbers of rounds) is asked again.

        >>> Turns().is_due([45.0, 45.0], [1, 1]), Turns().is_due([45.0] * 3, [1] * 3)
        (True, False)
        """
        spent = sum(seconds * count for seconds, count in zip(wall, rounds, strict=True))
        return len(wall) < self.least or (len(wall) < self.most and spent < self.seconds)


@dataclass(frozen=True)
class Prepared:
    """A work with a clip that half of the rows exceed, its file, and what is right."""

    name: str
    work: Work
    path: Path
    truth: dict[str, Arrays]


def prepare(name: str, shape: Shape, folder: Path, peers: list[Peer]) -> Prepared:
    """Once for all numbers of threads; the reference takes a few seconds."""
    work = make(shape)
    _, norms = reference.clipped_mean(work, work.x, work.y, float("inf"))
    work = dataclasses.replace(work, clip=float(np.median(norms)))
    path = folder / f"{name}.npz"
    save(work, path)
    truth = {"samples": reference.clipped_mean(work, work.x, work.y, work.clip)[0]}
    if any(peer.clips == "update" for peer in peers):
        truth["update"] = reference.by_update(work)
    return Prepared(name, work, path, truth)


def note(text: str) -> None:
    """A line of progress."""
    print(text, file=sys.stderr, flush=True)


@dataclass
class Entry:
    """A peer of the rotation: its row, and its process while it may be asked."""

    row: dict[str, Any]
    running: Running | None = None
    noise: Noise | None = None

    def refuse(self, why: object) -> None:
        """No times for it; its row says why."""
        for name in ("wall_s", "cpu_s", "rounds"):
            self.row.pop(name, None)
        self.row["why"] = str(why)
        note(f"  {self.row['label']}: {why}")


def measure(
    given: Prepared, threads: int, peers: list[Peer], *, turns: Turns, logs: Path
) -> dict[str, Any]:
    """One rotation: one work, one number of threads, all these peers."""
    shape = given.work.shape
    entries = {peer.key: Entry({"peer": peer.key, "label": peer.label}) for peer in peers}
    for entry, peer in zip(entries.values(), peers, strict=True):
        entry.row |= {"clips": peer.clips, "why": "the run was ended before its turn"}
    rates: list[dict[str, float]] = []
    floor = Running(FLOOR, given.path, threads, logs)
    share = None
    try:
        rates.append(floor.ask("round"))  # a rate at least, should the run be ended early
        for peer in peers:
            why = LEFT_OUT.get((given.name, threads, peer.key))
            if why is None:
                begin(entries[peer.key], peer, given, threads, logs)
            else:
                entries[peer.key].refuse(why)
        before = foreign.mark()
        rotate(list(entries.values()), floor, rates, given.work, turns)
        share = foreign.share(before, foreign.mark())
    except KeyboardInterrupt:
        note("  stopped: what was measured is kept")
    finally:
        for one in (*(entry.running for entry in entries.values()), floor):
            if one is not None:
                one.stop()
    for entry in entries.values():
        judge(entry)
    middle = {key: statistics.median(rate[key] for rate in rates) for key in rates[0]}
    gflops = max(middle["numpy_gflops"], middle["xla_gflops"])
    by_flop, by_bytes = shape.flop() / gflops / 1e9, shape.bytes() / middle["copy_gbs"] / 1e9
    return kept.about() | {
        "work": given.name,
        "threads": threads,
        "turns": dataclasses.asdict(turns),
        "foreign": share,
        "shape": dataclasses.asdict(shape),
        "gflop": shape.flop() / 1e9,
        "mb": shape.bytes() / 1e6,
        "rates": middle,
        "floor_s": max(by_flop, by_bytes),
        "rows": [entry.row for entry in entries.values()],
    }


def begin(entry: Entry, peer: Peer, given: Prepared, threads: int, logs: Path) -> None:
    """Start a peer and hold it to the reference; its row says what came of it."""
    try:
        entry.running = Running(peer, given.path, threads, logs)
        found, entry.noise = check(entry.running, given.work, given.truth[peer.clips])
    except (NotInstallable, Unfit) as problem:
        entry.refuse(problem)
        return
    del entry.row["why"]
    entry.row |= {"versions": entry.running.ready["versions"], **found}
    entry.row |= {"wall_s": [], "cpu_s": [], "rounds": []}
    note(f"  {peer.label}: right within {found['error']:.1e}, first {found['first_s']:.2f} s")


def rotate(
    entries: list[Entry],
    floor: Running,
    rates: list[dict[str, float]],
    work: Work,
    turns: Turns,
) -> None:
    """Every peer once, then every peer again, ours and the machine's own rates in every turn."""
    with tempfile.TemporaryDirectory(prefix="bench-") as away:
        for number in range(turns.most):
            for entry in entries:
                row = entry.row
                if "why" in row or entry.running is None or entry.noise is None:
                    continue
                if row["peer"] != "ours" and not turns.is_due(row["wall_s"], row["rounds"]):
                    continue
                try:
                    told = turn(
                        entry.running, work, entry.noise, turns.each, Path(away) / "out.npz"
                    )
                except Unfit as problem:
                    entry.refuse(problem)
                    continue
                row["wall_s"].append(statistics.median(told["wall_s"]))
                row["cpu_s"].append(told["cpu_s"])
                row["rounds"].append(len(told["wall_s"]))
                row["peak_mb"] = told["peak_mb"]
            rates.append(floor.ask("round"))
            note(f"  turn {number + 1} of {turns.most}")


def judge(entry: Entry) -> None:
    """The noise of all rounds together, array by array."""
    if "why" in entry.row or entry.noise is None:
        return
    if not entry.row["wall_s"]:
        entry.refuse("the run was ended before its turn")
        return
    try:
        entry.row["noise"] = entry.noise.ratios()
    except Unfit as problem:
        entry.refuse(problem)
