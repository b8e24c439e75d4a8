"""`sottovoce audit`: play the curious server, print what it got, write the page."""

from __future__ import annotations

import json
import shlex
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import TextIO

import numpy as np

from sottovoce.data.files import make_folder, require_empty, write_file
from sottovoce.errors import InputError, SottovoceError
from sottovoce.privacy.sensitivity import Recipe
from sottovoce.studies.audit import inversion, membership, messages, page
from sottovoce.studies.audit.ceiling import COMPARISONS, EACH, WRONG
from sottovoce.studies.audit.findings import Findings
from sottovoce.studies.audit.messages import AuditSetting
from sottovoce.studies.audit.target import SEED, Level, Target, Victim, target

Progress = Callable[[int, int], None]

BUDGETS = (4.0, 8.0, 20.0)
PAPER = (20.0, 1e-3, Recipe(learning_rate=1.0, clip=5.0))  # where Theorem 1 is plainly wrong


@dataclass(frozen=True)
class Sizes:
    """How much of everything."""

    runs: int  # a side, of two messages each
    judged: int  # the same where ε = 20 is at stake: rates are small there, and counts must not be
    candidates: int
    shadows: int  # half of them teach the attacker, half are judged
    pool: int
    rounds: int  # of a shadow run in the simulator: enough to overfit the pool
    turns: int  # uploads of a transcript
    together: int  # samples that gradient matching looks for at once
    groups: int
    steps: int
    canaries: int


FULL = Sizes(10_000, 40_000, 100, 128, 64, 120, 20, 3, 10, 2000, 2000)
QUICK = Sizes(1_000, 1_000, 40, 32, 40, 80, 8, 3, 3, 800, 500)


def audit(
    path: Path | None, *, quick: bool = False, out: Path | None = None, as_json: bool = False
) -> int:
    """Audit what PLAN or RUN names; 1 if a measurement contradicts the promise, else 0.

    Exit code 1 says that a promise is contradicted, and nothing else may say it: whatever keeps an
    audit from its end is 2.
    """
    try:
        return _audited(path, quick, out, as_json)
    except BrokenPipeError:
        raise  # the reader has seen enough
    except SottovoceError as error:
        raise InputError(str(error)) from None
    except OSError as error:
        said = error.strerror or error
        raise InputError(f"the system refused: {said}; the audit broke off") from None
    except Exception:
        traceback.print_exc()
        raise InputError("the audit broke off, see above; please report it") from None


def _audited(path: Path | None, quick: bool, out: Path | None, as_json: bool) -> int:
    folder = require_empty(out if out is not None else _fresh(path), resumable=False)
    show = Stages(sys.stderr if as_json else sys.stdout)
    with show.stage("reading the data"):
        on = target(path)
    make_folder(folder)
    with tempfile.TemporaryFile(dir=folder):
        pass  # whether it can be written to is found out before the work
    found = replace(
        play(on, QUICK if quick else FULL, show), command=_command(path, quick, out, as_json)
    )
    text = json.dumps(found.to_json(), ensure_ascii=False, indent=1)
    write_file(folder / "audit.json", f"{text}\n".encode())
    where = page.write_audit(found, folder)
    if as_json:
        print(json.dumps(found.to_json(), ensure_ascii=False))
    else:
        show.say(f"\n{page.format_table(found)}\n\npage   {where}")
    return 1 if found.contradictions() else 0


def _command(path: Path | None, quick: bool, out: Path | None, as_json: bool) -> str:
    """What was typed, as it can be typed again.

    >>> _command(Path("my plan.toml"), True, None, False)
    "sottovoce audit 'my plan.toml' --quick"
    """
    words = ["sottovoce", "audit", *([] if path is None else [str(path)])]
    words += ["--quick"] * quick + ([] if out is None else ["--out", str(out)])
    return shlex.join([*words, *["--json"] * as_json])


def play(on: Target, sizes: Sizes, show: Stages | None = None) -> Findings:
    """Every attack at every level, and what uploads prove."""
    show = Stages(None) if show is None else show
    began = time.monotonic()
    settings, levels = promises(on), promised(on)
    epsilon, delta, recipe = PAPER
    both = [AuditSetting(epsilon, delta, recipe), AuditSetting(epsilon, delta, recipe, "paper")]
    measured = []
    for place, one in enumerate((*settings, *both)):
        beside = place >= len(settings)
        runs = sizes.judged if beside else sizes.runs
        whose = "the paper's noise" if one.calibration == "paper" else "uploads"
        with show.stage(f"{whose} at ε = {one.epsilon:g}, δ = {one.delta:g}") as progress:
            # The paper's promise is not ours: what is said of it is one comparison by itself.
            wrong = WRONG if beside and one.calibration == "paper" else EACH
            measured.append(messages.measure(one, runs, progress, wrong))
    one_runs = []
    if on.recipe.unit == "record":
        with show.stage("one run full of canaries"):
            one_runs = [messages.play(one, sizes.canaries, wrong=EACH) for one in settings]
    x, y = on.pool_x[: sizes.candidates], on.pool_y[: sizes.candidates]
    with show.stage("first-layer inversion"):
        inverted = [
            inversion.invert_first_layer(on.form, on.recipe, on.model, x, y, lv) for lv in levels
        ]
    with show.stage("the likeliest candidate"):
        named = [inversion.name_labels(on.form, on.recipe, on.model, x, y, lv) for lv in levels]
    matched = []
    if inversion.fits(x):
        with show.stage("gradient matching") as progress:
            for place, level in enumerate(levels):
                matched.append(_matched(on, sizes, level))
                progress(place + 1, len(levels))
    with show.stage("trap weights"):
        victim = Victim(on.form, on.recipe, on.x, on.y)
        looted = [inversion.set_trap(victim, on.public, level) for level in levels]
    members = []
    for level in levels:
        with show.stage(f"membership with {level.name}") as progress:
            members += _members(on, sizes, level, progress)
    found = Findings(
        target=on,
        quick=sizes == QUICK,
        levels=levels,
        measured=measured[: len(settings)],
        headline=measured[len(settings) :],
        one_runs=one_runs,
        inverted=inverted,
        named=named,
        matched=matched,
        looted=looted,
        members=members,
        seconds=time.monotonic() - began,
    )
    assert found.comparisons <= COMPARISONS, "each has its part of the error"
    return found


def promises(on: Target) -> list[AuditSetting]:
    """What uploads are held against: the usual budgets and the plan's own, by its calibration."""
    by, server = on.plan.privacy.calibration, on.plan.server
    told = server.loss_bound if server.signal == "clients" else None
    budgets = sorted({*BUDGETS, on.epsilon})
    return [AuditSetting(e, on.delta, on.recipe, by, loss_bound=told) for e in budgets]


def promised(on: Target) -> list[Level]:
    """The columns of the table: without noise, then ever more of it."""
    settings = reversed(promises(on))
    return [Level(None, on.delta), *(Level(s.epsilon, s.delta, s.calibration) for s in settings)]


def _matched(on: Target, sizes: Sizes, level: Level) -> inversion.Reconstructions:
    """Several clients with a few samples each, put together."""
    rng = np.random.default_rng(SEED)
    x, y = on.pool_x[: sizes.candidates], on.pool_y[: sizes.candidates]
    together = min(sizes.together, len(y) - 1)
    return inversion.joined(
        [
            inversion.match_gradients(
                level, on.recipe, on.form, on.model, x, y, rng.permutation(len(y))[:together],
                seed=SEED, steps=sizes.steps,
            )
            for _ in range(sizes.groups)
        ]
    )  # fmt: skip


def _members(on: Target, sizes: Sizes, level: Level, progress: Progress) -> list[membership.Attack]:
    x, y = on.pool_x[: sizes.pool], on.pool_y[: sizes.pool]

    def half(done: int, of: int) -> None:
        progress(done, 2 * of)

    models = membership.of_models(
        x, y, level,
        runs=sizes.shadows, hidden=int(on.form.options["hidden"]), rounds=sizes.rounds,
        recipe=on.recipe, progress=half,
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
