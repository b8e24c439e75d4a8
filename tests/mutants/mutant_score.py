"""`make mutants`: every deliberate privacy bug against the tests, the score and the survivors.

    make mutants ARGS="[--only NAME] [--jobs N] [--suite] [--fresh] [--out FILE]"

Each mutant meets its named killer first, then the whole quick suite, likely files first, until an
assertion of a privacy property fails (`mutant_plugin`). It counts only if the mutated package still
trains to a finite loss. `--suite` leaves the named killers out and asks the other tests alone: that
takes hours. What was found is kept in build/mutants.json; a run that was stopped goes on there,
unless package or tests have changed since.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
import tempfile
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path

from mutants.privacy_mutants import LIVE, MUTANTS, PACKAGE, Mutant, hunt, seen_in, trial
from support import ROOT, TESTS

LONGEST = 3600  # seconds for one mutant; a bug may make a loop endless
STOPPED = threading.Event()  # nothing new is begun


@dataclass(frozen=True)
class Found:
    """What became of one mutant."""

    became: str  # killed, survived or idle
    by: str  # who killed it, or why it proves nothing
    tests: int  # of the suite, run before that
    noticed: tuple[str, ...]  # tests that failed without stating a privacy property
    seconds: float


def hunted(mutant: Mutant, folder: Path, tests: list[str]) -> Found:
    """The quick suite against one mutant until the first kill."""
    began = time.monotonic()
    mutant.write(folder)
    seen, said = hunt(mutant, folder, ["-m", "not slow", *tests], seconds=LONGEST)
    became, by = ("killed", seen["killer"]) if seen["killer"] else ("survived", "")
    if not seen["killer"] and (seen["ran"] == 0 or seen["ran"] < seen["total"]):
        became = "idle"
        by = f"stopped after {seen['ran']} of {seen['total']}: {said.splitlines()[-1]}"
    return Found(became, by, seen["ran"], tuple(seen["noticed"]), time.monotonic() - began)


def judged(mutant: Mutant, running: dict[str, Path], *, named: bool, tests: list[str]) -> Found:
    """Trains? Then the named killer, then the suite."""
    began = time.monotonic()
    became, said = trial(mutant, [mutant.killer] if named else ["none"])
    if became == "killed":
        return Found("killed", mutant.killer, 0, (), time.monotonic() - began)
    if STOPPED.is_set() or "does not train" in said or (became == "idle" and not named):
        return Found("idle", said[-200:], 0, (), time.monotonic() - began)
    with tempfile.TemporaryDirectory() as folder:
        running[mutant.name] = Path(folder) / "told.json"
        try:
            return hunted(mutant, Path(folder), tests)
        finally:
            del running[mutant.name]


def sources(tests: list[str]) -> str:
    """What a finding rests on: package, tests, and which of them were asked."""
    every = hashlib.sha256(" ".join(tests).encode())
    for path in sorted([*PACKAGE.rglob("*.py"), *TESTS.rglob("*.py")]):
        every.update(path.read_bytes())
    return every.hexdigest()


class Show:
    """One line a mutant; on a terminal also where the running ones are and what is left."""

    def __init__(self, total: int, known: list[Found], jobs: int) -> None:
        self.total, self.jobs, self.done = total, jobs, len(known)
        self.took = [one.seconds for one in known]
        self.running: dict[str, Path] = {}
        self.over = threading.Event()
        if sys.stderr.isatty():
            threading.Thread(target=self._watch, daemon=True).start()

    def left(self) -> str:
        """An estimate from the mutants so far."""
        if not self.took:
            return ""
        minutes = sum(self.took) / len(self.took) * (self.total - self.done) / self.jobs / 60
        return f"{self.done} of {self.total}, about {minutes:.0f} min left"

    def line(self, mutant: Mutant, found: Found) -> None:
        """One mutant is settled."""
        self.done += 1
        self.took.append(found.seconds)
        clear = "\r\033[K" if sys.stderr.isatty() else ""
        print(f"{clear}{mutant.name:<44} {mutant.module:<22} {found.became:<9} {found.by}"
              f"  ({self.left()})", flush=True)  # fmt: skip

    def _watch(self) -> None:
        while not self.over.wait(2):
            told = {name: seen_in(path) for name, path in dict(self.running).items()}
            parts = [f"{name}: {one['ran']} of {one['total']} tests" for name, one in told.items()]
            print(f"\r\033[K{'; '.join([self.left(), *parts])[:150]}", end="", file=sys.stderr)


def main() -> int:
    """0 if every mutant is killed."""
    options = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    options.add_argument("--only", action="append", default=[], metavar="NAME",
                         help="mutants with this in their name; may be repeated")  # fmt: skip
    options.add_argument("--jobs", type=int, default=max(1, (os.cpu_count() or 1) // 2))
    options.add_argument("--suite", action="store_true", help="without the named killers")
    options.add_argument("--fresh", action="store_true", help="forget what an earlier run found")
    options.add_argument("--out", type=Path, default=ROOT / "build" / "mutants.json")
    options.add_argument("--tests", nargs="+", default=["tests"], help="what pytest is given")
    given = options.parse_args()
    chosen = [m for m in MUTANTS if not given.only or any(part in m.name for part in given.only)]
    if not chosen:
        options.error(f"--only: no mutant has {' or '.join(given.only)} in its name")
    mark = sources([*given.tests, str(given.suite)])
    kept = {} if given.fresh or not given.out.exists() else json.loads(given.out.read_text())
    known = {name: Found(**one) for name, one in kept.get("found", {}).items()
             if kept["sources"] == mark}  # fmt: skip
    waiting = [mutant for mutant in chosen if mutant.name not in known]
    show = Show(len(chosen), [known[m.name] for m in chosen if m.name in known], given.jobs)
    if show.done:
        print(f"{show.done} of {len(chosen)} are known from {given.out.name}; --fresh forgets them")
    given.out.parent.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(given.jobs) as pool:
        tasks = {pool.submit(judged, mutant, show.running, named=not given.suite,
                             tests=given.tests): mutant for mutant in waiting}  # fmt: skip
        try:
            for task in as_completed(tasks):
                known[tasks[task].name] = task.result()
                part = given.out.with_suffix(".part")
                plain = {name: asdict(one) for name, one in known.items()}
                part.write_text(json.dumps({"sources": mark, "found": plain}, indent=1), "utf-8")
                part.replace(given.out)
                show.line(tasks[task], known[tasks[task].name])
        except KeyboardInterrupt:
            STOPPED.set()
            pool.shutdown(wait=False, cancel_futures=True)
            for child in tuple(LIVE):
                child.kill()
            print("\nstopped; the same command goes on from here", file=sys.stderr)
            return 130
    show.over.set()
    return report(chosen, known)


def report(chosen: list[Mutant], known: dict[str, Found]) -> int:
    """The score, then who is left."""
    counts = Counter(known[mutant.name].became for mutant in chosen)
    minutes = sum(known[mutant.name].seconds for mutant in chosen) / 60
    print(f"{counts['killed']} of {len(chosen)} privacy mutants killed ({minutes:.1f} minutes); "
          f"{counts['survived']} survived, {counts['idle']} proved nothing")  # fmt: skip
    for mutant in chosen:
        one = known[mutant.name]
        if one.became != "killed":
            also = f"; noticed by {', '.join(one.noticed[:5])}" if one.noticed else ""
            print(f"  {one.became}: {mutant.name} ({mutant.module}) {one.by}{also}")
    return 0 if counts["killed"] == len(chosen) else 1


if __name__ == "__main__":
    sys.exit(main())
