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
from sottovoce.studies.audit.target import SEED, Level, Target, Victim, load_target

Progress = Callable[[int, int], None]

BUDGETS = (4.0, 8.0, 20.0)
PAPER = (20.0, 1e-3, Recipe(learning_rate=1.0, clip=5.0))  # where Theorem 1 is plainly wrong


@dataclass(frozen=True)
class Sizes:
    """How many runs, candidates, steps and canaries an audit uses."""

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
    """Audit a plan or a run; return 1 if a measurement contradicts the promise, else 0.

    Exit code 1 means that a promise is contradicted and nothing else: every error exits with 2.
    """
    try:
        return _run_audit(path, quick, out, as_json)
    except BrokenPipeError:
        raise  # the reader has seen enough
    except SottovoceError as error:
        raise InputError(str(error)) from None
    except OSError as error:
        reason = error.strerror or error
        raise InputError(f"the system refused: {reason}; the audit broke off") from None
    except Exception:
        traceback.print_exc()
        raise InputError("the audit broke off, see above; please report it") from None


def _run_audit(path: Path | None, quick: bool, out: Path | None, as_json: bool) -> int:
    folder = require_empty(out if out is not None else _choose_folder(path), resumable=False)
    show = Stages(sys.stderr if as_json else sys.stdout)
    with show.stage("reading the data"):
        on = load_target(path)
    make_folder(folder)
    with tempfile.TemporaryFile(dir=folder):
        pass  # a folder that cannot be written to is refused before the work begins
    found = replace(
        run_attacks(on, QUICK if quick else FULL, show),
        command=_format_command(path, quick, out, as_json),
    )
    text = json.dumps(found.to_json(), ensure_ascii=False, indent=1)
    write_file(folder / "audit.json", f"{text}\n".encode())
    where = page.write_audit(found, folder)
    if as_json:
        print(json.dumps(found.to_json(), ensure_ascii=False))
    else:
        show.say(f"\n{page.format_table(found)}\n\npage   {where}")
    return 1 if found.contradictions() else 0


def _format_command(path: Path | None, quick: bool, out: Path | None, as_json: bool) -> str:
    """Return the command that repeats this audit.

    >>> _format_command(Path("my plan.toml"), True, None, False)
    "sottovoce audit 'my plan.toml' --quick"
    """
    words = ["sottovoce", "audit", *([] if path is None else [str(path)])]
    words += ["--quick"] * quick + ([] if out is None else ["--out", str(out)])
    return shlex.join([*words, *["--json"] * as_json])


def run_attacks(on: Target, sizes: Sizes, show: Stages | None = None) -> Findings:
    """Run every attack at every level, and measure what uploads prove."""
    show = Stages(None) if show is None else show
    began = time.monotonic()
    settings, levels = list_promises(on), list_levels(on)
    epsilon, delta, recipe = PAPER
    both = [AuditSetting(epsilon, delta, recipe), AuditSetting(epsilon, delta, recipe, "paper")]
    measured = []
    for i, one in enumerate((*settings, *both)):
        beside_paper = i >= len(settings)
        runs = sizes.judged if beside_paper else sizes.runs
        whose = "the paper's noise" if one.calibration == "paper" else "uploads"
        with show.stage(f"{whose} at ε = {one.epsilon:g}, δ = {one.delta:g}") as progress:
            # The paper's promise is not ours, so its one comparison has an error of its own.
            wrong = WRONG if beside_paper and one.calibration == "paper" else EACH
            measured.append(messages.measure(one, runs, progress, wrong))
    one_runs = []
    if on.recipe.unit == "record":
        with show.stage("one run full of canaries"):
            one_runs = [messages.play_one_run(one, sizes.canaries, wrong=EACH) for one in settings]
    x, y = on.pool_x[: sizes.candidates], on.pool_y[: sizes.candidates]
    with show.stage("first-layer inversion"):
        inverted = [
            inversion.invert_first_layer(on.form, on.recipe, on.model, x, y, lv) for lv in levels
        ]
    with show.stage("the likeliest candidate"):
        named = [inversion.name_labels(on.form, on.recipe, on.model, x, y, lv) for lv in levels]
    matched = []
    if inversion.has_pixel_range(x):
        with show.stage("gradient matching") as progress:
            for i, level in enumerate(levels):
                matched.append(_match_groups(on, sizes, level))
                progress(i + 1, len(levels))
    with show.stage("trap weights"):
        victim = Victim(on.form, on.recipe, on.x, on.y)
        looted = [inversion.set_trap(victim, on.public, level) for level in levels]
    members = []
    for level in levels:
        with show.stage(f"membership with {level.name}") as progress:
            members += _attack_membership(on, sizes, level, progress)
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
    assert found.comparisons <= COMPARISONS, "every comparison has its share of the error"
    return found


def list_promises(on: Target) -> list[AuditSetting]:
    """Return the promises that uploads are tested against: usual budgets and the plan's own."""
    calibration, server = on.plan.privacy.calibration, on.plan.server
    bound = server.loss_bound if server.signal == "clients" else None
    return [
        AuditSetting(epsilon, on.delta, on.recipe, calibration, loss_bound=bound)
        for epsilon in sorted({*BUDGETS, on.epsilon})
    ]


def list_levels(on: Target) -> list[Level]:
    """Return the columns of the table: without noise, then with more and more of it."""
    settings = reversed(list_promises(on))
    return [Level(None, on.delta), *(Level(s.epsilon, s.delta, s.calibration) for s in settings)]


def _match_groups(on: Target, sizes: Sizes, level: Level) -> inversion.Reconstructions:
    """Match the gradients of several clients with a few samples each."""
    rng = np.random.default_rng(SEED)
    x, y = on.pool_x[: sizes.candidates], on.pool_y[: sizes.candidates]
    together = min(sizes.together, len(y) - 1)
    return inversion.join_reconstructions(
        [
            inversion.match_gradients(
                level, on.recipe, on.form, on.model, x, y, rng.permutation(len(y))[:together],
                seed=SEED, steps=sizes.steps,
            )
            for _ in range(sizes.groups)
        ]
    )  # fmt: skip


def _attack_membership(
    on: Target, sizes: Sizes, level: Level, progress: Progress
) -> list[membership.Attack]:
    x, y = on.pool_x[: sizes.pool], on.pool_y[: sizes.pool]

    def half(done: int, of: int) -> None:
        progress(done, 2 * of)

    models = membership.attack_models(
        x, y, level,
        runs=sizes.shadows, hidden=int(on.form.options["hidden"]), rounds=sizes.rounds,
        recipe=on.recipe, progress=half,
    )  # fmt: skip
    uploads = membership.attack_uploads(
        x, y, level, on.model,
        runs=sizes.shadows, form=on.form, rounds=sizes.turns, recipe=on.recipe, seed=SEED,
        progress=lambda done, of: progress(done + of, 2 * of),
    )  # fmt: skip
    return [*models, *uploads]


class Stages:
    """Prints a line for each stage with its seconds; on a terminal with a percentage."""

    def __init__(self, stream: TextIO | None) -> None:
        self.stream = stream
        self.live = stream is not None and stream.isatty()
        self.shown = 0.0

    def say(self, text: str, end: str = "\n") -> None:
        """Print a text, if there is a stream."""
        if self.stream is not None:
            print(text, end=end, file=self.stream, flush=True)

    @contextmanager
    def stage(self, name: str) -> Iterator[Progress]:
        """Time a stage, and yield the function that reports its progress."""
        began = time.monotonic()

        def progress(done: int, of: int) -> None:
            if self.live and time.monotonic() - self.shown > 0.1:
                self.shown = time.monotonic()
                self.say(f"\r{name:<44} {done / of:4.0%}", end="")

        yield progress
        start = "\r" if self.live else ""
        self.say(f"{start}{name:<44} {time.monotonic() - began:6.1f} s")


def _choose_folder(path: Path | None) -> Path:
    if path is not None and path.is_dir():
        return path / "audit"
    return Path("runs") / f"audit-{datetime.now():%Y%m%d-%H%M%S}"
