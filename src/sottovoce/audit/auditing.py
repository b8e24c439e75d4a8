"""`sottovoce audit`: play the curious server, print what it got, write the page."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TextIO

import numpy as np

from sottovoce import checkpoint
from sottovoce.audit import canaries, inversion, matching, membership, messages, traps
from sottovoce.audit.findings import Findings
from sottovoce.audit.messages import Setting
from sottovoce.audit.table import table
from sottovoce.audit.target import SEED, Target, target
from sottovoce.audit.uploads import Level, Victim
from sottovoce.errors import InputError, SottovoceError
from sottovoce.privacy.sensitivity import Recipe

Progress = Callable[[int, int], None]

BUDGETS = (4.0, 8.0, 20.0)
PAPER = (20.0, 1e-3, Recipe(learning_rate=1.0, clip=5.0))  # where Theorem 1 is plainly wrong


@dataclass(frozen=True)
class Sizes:
    """How much of everything."""

    runs: int  # a side, of two messages each
    judged: int  # the same where ε = 20 is at stake: rates are small there, and counts must not be
    candidates: int
    shadows: int
    pool: int
    rounds: int  # of a shadow run in the simulator: enough to overfit the pool
    turns: int  # uploads of a transcript
    together: int  # samples that gradient matching looks for at once
    groups: int
    steps: int
    canaries: int


FULL = Sizes(10_000, 40_000, 100, 64, 64, 120, 20, 3, 10, 2000, 2000)
QUICK = Sizes(1_000, 1_000, 40, 16, 40, 80, 8, 3, 3, 800, 500)


def audit(
    path: Path | None, *, quick: bool = False, out: Path | None = None, as_json: bool = False
) -> int:
    """Audit what PLAN or RUN names; 1 if a measurement contradicts the promise, else 0."""
    folder = checkpoint.require_free(out if out is not None else _fresh(path), resumable=False)
    show = Stages(sys.stderr if as_json else sys.stdout)
    with show.stage("reading the data"):
        found_target = _target(path)
    found = play(found_target, QUICK if quick else FULL, show)
    from sottovoce.audit import page  # matplotlib is not loaded for what may still be refused

    checkpoint.make(folder)
    text = json.dumps(found.to_json(), ensure_ascii=False, indent=1)
    checkpoint.replace(folder / "audit.json", f"{text}\n".encode())
    where = page.write(found, folder)
    if as_json:
        print(json.dumps(found.to_json(), ensure_ascii=False))
    else:
        show.say(f"\n{table(found)}\n\npage   {where}")
    return 1 if found.contradictions() else 0


def _target(path: Path | None) -> Target:
    """What is audited; whatever keeps an audit from beginning is bad input.

    Exit code 1 says that a promise is contradicted, and nothing else may say it.
    """
    try:
        return target(path)
    except SottovoceError as error:
        raise InputError(str(error)) from None


def play(on: Target, sizes: Sizes, show: Stages | None = None) -> Findings:
    """Every attack at every level, and what uploads prove."""
    show = Stages(None) if show is None else show
    began = time.monotonic()
    budgets = sorted({*BUDGETS, on.epsilon})
    levels = [Level(None, on.delta), *(Level(e, on.delta) for e in reversed(budgets))]
    calibration = "zcdp" if on.plan.privacy.calibration == "zcdp" else "exact"
    settings = [Setting(e, on.delta, on.recipe, calibration) for e in budgets]  # type: ignore[arg-type]
    epsilon, delta, recipe = PAPER
    both = [Setting(epsilon, delta, recipe), Setting(epsilon, delta, recipe, "paper")]
    measured = []
    for one in (*settings, *both):
        runs = sizes.judged if one in both else sizes.runs
        whose = "the paper's noise" if one.calibration == "paper" else "uploads"
        with show.stage(f"{whose} at ε = {one.epsilon:g}, δ = {one.delta:g}") as progress:
            measured.append(messages.measure(one, runs, progress))
    with show.stage("one run full of canaries"):
        one_runs = [canaries.play(one, sizes.canaries) for one in settings]
    x, y = on.pool_x[: sizes.candidates], on.pool_y[: sizes.candidates]
    with show.stage("first-layer inversion"):
        inverted = [inversion.attack(on.form, on.recipe, on.model, x, y, lv) for lv in levels]
    matched = []
    if matching.fits(x):
        with show.stage("gradient matching") as progress:
            for place, level in enumerate(levels):
                matched.append(_matched(on, sizes, level))
                progress(place + 1, len(levels))
    with show.stage("trap weights"):
        victim = Victim(on.form, on.recipe, on.x, on.y)
        looted = [traps.attack(victim, on.public, level) for level in levels]
    members = []
    for level in levels:
        with show.stage(f"membership with {level.name}") as progress:
            members += _members(on, sizes, level, progress)
    return Findings(
        target=on,
        quick=sizes == QUICK,
        levels=levels,
        measured=measured[: len(settings)],
        headline=measured[len(settings) :],
        one_runs=one_runs,
        inverted=inverted,
        matched=matched,
        looted=looted,
        members=members,
        seconds=time.monotonic() - began,
    )


def _matched(on: Target, sizes: Sizes, level: Level) -> inversion.Reconstructions:
    """Several clients with a few samples each, put together."""
    each = []
    for group in range(sizes.groups):
        order = np.roll(np.arange(sizes.candidates), -group * sizes.together)
        x, y = on.pool_x[order], on.pool_y[order]
        few = Victim(on.form, on.recipe, x[: sizes.together], y[: sizes.together])
        each.append(matching.attack(few, on.model, level, x, seed=SEED, steps=sizes.steps))
    return matching.joined(each)


def _members(on: Target, sizes: Sizes, level: Level, progress: Progress) -> list[membership.Attack]:
    x, y = on.pool_x[: sizes.pool], on.pool_y[: sizes.pool]

    def half(done: int, of: int) -> None:
        progress(done, 2 * of)

    models = membership.of_models(
        x, y, level,
        runs=sizes.shadows, hidden=on.form.hidden, rounds=sizes.rounds, recipe=on.recipe,
        progress=half,
    )  # fmt: skip
    uploads = membership.of_uploads(
        x, y, level, on.model,
        runs=sizes.shadows, form=on.form, rounds=sizes.turns, recipe=on.recipe, seed=SEED,
        progress=lambda done, of: progress(done + of, 2 * of),
    )  # fmt: skip
    return [*models, *uploads]


class Stages:
    """One line a stage with its seconds; on a terminal with a percentage that counts up."""

    def __init__(self, stream: TextIO | None) -> None:
        self.stream = stream
        self.live = stream is not None and stream.isatty()
        self.shown = 0.0

    def say(self, text: str, end: str = "\n") -> None:
        """Print, where there is somebody to read."""
        if self.stream is not None:
            print(text, end=end, file=self.stream, flush=True)

    @contextmanager
    def stage(self, name: str) -> Iterator[Progress]:
        """A stage from its beginning to its end."""
        began = time.monotonic()

        def progress(done: int, of: int) -> None:
            if self.live and time.monotonic() - self.shown > 0.1:
                self.shown = time.monotonic()
                self.say(f"\r{name:<44} {done / of:4.0%}", end="")

        yield progress
        start = "\r" if self.live else ""
        self.say(f"{start}{name:<44} {time.monotonic() - began:6.1f} s")


def _fresh(path: Path | None) -> Path:
    if path is not None and path.is_dir():
        return path / "audit"
    return Path("runs") / f"audit-{datetime.now():%Y%m%d-%H%M%S}"
