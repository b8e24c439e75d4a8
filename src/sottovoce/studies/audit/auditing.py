"""`sottovoce audit`: play a curious server, print what it found out, and write the page."""

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
from sottovoce.models.base import flatten_parameters
from sottovoce.models.mlp import Mlp
from sottovoce.plan import Plan
from sottovoce.privacy.budget import list_always_not_covered
from sottovoce.privacy.sensitivity import Recipe
from sottovoce.runs.record import Record
from sottovoce.runs.trained import load
from sottovoce.server.federation import build
from sottovoce.studies.audit import attacks, findings, messages
from sottovoce.studies.audit.findings import Findings, Target
from sottovoce.studies.audit.messages import (
    COMPARISONS,
    WRONG,
    WRONG_PER_COMPARISON,
    AuditSetting,
    Level,
)

Progress = Callable[[int, int], None]

SEED = 0  # of the split and the first model; the noise that protects a client has no seed
FEWEST, MOST = 16, 1000  # rows of all clients together that are attacked
HIDDEN = 32  # units of the mlp that replaces a model of another kind
BUDGETS = (4.0, 8.0, 20.0)
WATCHED, SHARING = 5, 4  # clients of a model that is watched; those that share noise in its sums
PAPER = (20.0, 1e-3, Recipe(learning_rate=1.0, clip=5.0))  # where Theorem 1 is plainly wrong


@dataclass(frozen=True)
class Sizes:
    """How large each part of an audit is."""

    runs: int  # on each side of a duel; a run has two uploads
    judged: int  # runs on each side at ε = 20, where rates are so small that more are needed
    candidates: int
    shadows: int  # shadow runs: half of them teach the attacker, half are judged
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
    path: str | Path | None = None,
    *,
    quick: bool = False,
    out: str | Path | None = None,
    as_json: bool = False,
) -> int:
    """Audit a plan or a run folder; return 1 if a measurement contradicts the promise, else 0.

    `audit("plan.toml", quick=True, out="audit")` writes the numbers into audit/audit.json.
    Exit code 1 means only that a promise is contradicted. Whatever stops an audit before its end
    raises `InputError`, which is exit code 2.
    """
    try:
        path, out = (None if place is None else Path(place) for place in (path, out))
        return _run_audit(path, quick, out, as_json)
    except BrokenPipeError:
        raise  # whoever reads our output has closed it
    except SottovoceError as error:
        raise InputError(str(error)) from None
    except OSError as error:
        reason = error.strerror or error
        raise InputError(f"the system refused: {reason}; the audit stopped") from None
    except Exception:
        traceback.print_exc()
        raise InputError("the audit stopped, see above; please report it") from None


def _run_audit(path: Path | None, quick: bool, out: Path | None, as_json: bool) -> int:
    folder = require_empty(out if out is not None else _choose_folder(path), resumable=False)
    stages = Stages(sys.stderr if as_json else sys.stdout)
    with stages.time_stage("reading the data"):
        target = load_target(path)
    make_folder(folder)
    with tempfile.TemporaryFile(dir=folder):
        pass  # a folder that cannot be written to is found before the work
    found = replace(
        run_attacks(target, QUICK if quick else FULL, stages),
        command=_format_command(path, quick, out, as_json),
    )
    text = json.dumps(found.to_json(), ensure_ascii=False, indent=1)
    write_file(folder / "audit.json", f"{text}\n".encode())
    page_path = findings.write_audit(found, folder)
    if as_json:
        print(json.dumps(found.to_json(), ensure_ascii=False))
    else:
        stages.print_text(f"\n{findings.format_table(found)}\n\npage   {page_path}")
    return 1 if found.contradictions else 0


def _format_command(path: Path | None, quick: bool, out: Path | None, as_json: bool) -> str:
    """Return the command as it can be typed again.

    >>> _format_command(Path("my plan.toml"), True, None, False)
    "sottovoce audit 'my plan.toml' --quick"
    """
    words = ["sottovoce", "audit", *([] if path is None else [str(path)])]
    words += ["--quick"] * quick + ([] if out is None else ["--out", str(out)])
    return shlex.join([*words, *["--json"] * as_json])


def run_attacks(target: Target, sizes: Sizes, stages: Stages | None = None) -> Findings:
    """Run every attack at every level, and measure what uploads prove."""
    stages = Stages(None) if stages is None else stages
    began = time.monotonic()
    settings, levels = list_settings(target), list_levels(target)
    epsilon, delta, recipe = PAPER
    headline = [AuditSetting(epsilon, delta, recipe), AuditSetting(epsilon, delta, recipe, "paper")]
    measurements = []
    for i, setting in enumerate((*settings, *headline)):
        runs = sizes.runs if i < len(settings) else sizes.judged
        by_paper = setting.calibration == "paper"
        noise = "the paper's noise" if by_paper else "uploads"
        name = f"{noise} at ε = {setting.epsilon:g}, δ = {setting.delta:g}"
        with stages.time_stage(name) as progress:
            # The paper's promise is not ours: its refutation is a single comparison by itself.
            wrong = WRONG if by_paper and i >= len(settings) else WRONG_PER_COMPARISON
            measurements.append(messages.measure(setting, runs, progress, wrong))
    views = []
    with stages.time_stage("sequences of models"):
        plan = replace(settings[0], epsilon=target.shared, loss_bound=None, clients=WATCHED)
        for honest in (1, SHARING):  # a run has five times as many uploads
            watched = replace(plan, honest=honest)
            views.append(messages.measure(watched, sizes.runs // 4, wrong=WRONG_PER_COMPARISON))
    one_runs = []
    if target.recipe.unit != "client":
        with stages.time_stage("one run full of canaries"):
            one_runs = [
                messages.play_one_run(setting, sizes.canaries, wrong=WRONG_PER_COMPARISON)
                for setting in settings
            ]
    form, model = target.form, target.model
    x, y = target.pool_x[: sizes.candidates], target.pool_y[: sizes.candidates]
    attacked = form, target.recipe, model, x, y
    inversions, matchings, traps = [], [], []
    if not form.rows_per_person:
        with stages.time_stage("first-layer inversion"):
            inversions = [attacks.invert_first_layer(*attacked, level) for level in levels]
    with stages.time_stage("the likeliest candidate"):
        namings = [attacks.name_candidates(*attacked, level) for level in levels]
    if target.has_classes and attacks.has_pixels(x):
        with stages.time_stage("gradient matching") as progress:
            for done, level in enumerate(levels, start=1):
                matchings.append(_match_groups(target, sizes, level))
                progress(done, len(levels))
    if not form.rows_per_person:
        with stages.time_stage("trap weights"):
            victim = attacks.Victim(form, target.recipe, target.x, target.y)
            traps = [attacks.set_trap(victim, target.public, level) for level in levels]
    members = []
    for level in levels:
        with stages.time_stage(f"membership with {level.name}") as progress:
            members += _attack_members(target, sizes, level, progress)
    found = Findings(
        target=target,
        quick=sizes == QUICK,
        levels=levels,
        measurements=measurements[: len(settings)],
        views=views,
        headline=measurements[len(settings) :],
        one_runs=one_runs,
        inversions=inversions,
        namings=namings,
        matchings=matchings,
        traps=traps,
        members=members,
        seconds=time.monotonic() - began,
    )
    assert found.comparisons <= COMPARISONS, "the allowed error is shared among so many"
    return found


def list_settings(target: Target) -> list[AuditSetting]:
    """List the promises to measure: the usual budgets and the plan's, by its calibration."""
    by, server = target.plan.privacy.calibration, target.plan.server
    bound = server.loss_bound if server.signal == "clients" else None
    budgets = sorted({*BUDGETS, target.epsilon})
    return [
        AuditSetting(
            epsilon, target.delta, target.recipe, by, loss_bound=bound, target=target.form.target
        )
        for epsilon in budgets
    ]


def list_levels(target: Target) -> list[Level]:
    """List the columns of the table: no noise first, then from the least noise to the most."""
    settings = reversed(list_settings(target))
    noisy = (Level(s.epsilon, s.delta, s.calibration) for s in settings)
    return [Level(None, target.delta), *noisy]


def _match_groups(target: Target, sizes: Sizes, level: Level) -> attacks.Reconstructions:
    """Attack several clients with a few samples each, and join the results."""
    rng = np.random.default_rng(SEED)
    x, y = target.pool_x[: sizes.candidates], target.pool_y[: sizes.candidates]
    together = min(sizes.together, len(y) - 1)
    return attacks.join_reconstructions(
        [
            attacks.match_gradients(
                level, target.recipe, target.form, target.model, x, y,
                rng.permutation(len(y))[:together], seed=SEED, steps=sizes.steps,
            )
            for _ in range(sizes.groups)
        ]
    )  # fmt: skip


def _attack_members(
    target: Target, sizes: Sizes, level: Level, progress: Progress
) -> list[attacks.Attack]:
    x, y = target.pool_x[: sizes.pool], target.pool_y[: sizes.pool]
    models = attacks.attack_models(
        x, y, level,
        runs=sizes.shadows, form=target.form, rounds=sizes.rounds,
        recipe=target.recipe, progress=lambda done, count: progress(done, 3 * count),
    )  # fmt: skip
    seen, honest = [], SHARING if target.plan.privacy.view == "sum" else 1
    for i, (clients, shared) in enumerate([(1, 1), (WATCHED, honest)], start=1):
        seen += attacks.attack_uploads(
            x, y, level, target.model, runs=sizes.shadows, form=target.form, rounds=sizes.turns,
            recipe=target.recipe, seed=SEED, clients=clients, honest=shared,
            progress=lambda done, count: progress(done + i * count, 3 * count),  # noqa: B023
        )  # fmt: skip
    return [*models, *seen]


class Stages:
    """Print one line for each stage with its seconds; on a terminal also a percentage."""

    def __init__(self, stream: TextIO | None) -> None:
        self.stream = stream
        self.live = stream is not None and stream.isatty()
        self.shown = 0.0

    def print_text(self, text: str, end: str = "\n") -> None:
        """Print a text, unless there is no stream."""
        if self.stream is not None:
            print(text, end=end, file=self.stream, flush=True)

    @contextmanager
    def time_stage(self, name: str) -> Iterator[Progress]:
        """Time what runs inside, and print its line at the end."""
        began = time.monotonic()

        def progress(done: int, count: int) -> None:
            if self.live and time.monotonic() - self.shown > 0.1:
                self.shown = time.monotonic()
                self.print_text(f"\r{name:<44} {done / count:4.0%}", end="")

        yield progress
        start = "\r" if self.live else ""
        self.print_text(f"{start}{name:<44} {time.monotonic() - began:6.1f} s")


def _choose_folder(path: Path | None) -> Path:
    if path is not None and path.is_dir():
        return path / "audit"
    return Path("runs") / f"audit-{datetime.now():%Y%m%d-%H%M%S}"


def load_target(path: Path | None) -> Target:
    """Return what a plan or a run folder describes; without a path, the embedded plan.

    >>> found = load_target(None)
    >>> found.x.shape, found.form.options["hidden"], found.epsilon
    ((143, 64), 32, 8.0)
    """
    if path is not None and path.is_dir():
        plan, name = Plan(**Record.read(path).plan), path.name
    else:
        plan, name = Plan.load(path, []), "the embedded plan" if path is None else path.name
    if plan.data.name == "arrays":
        raise InputError.of("data.name", "arrays", "data that can be read", "audit a plan or table")
    federation = build(plan, seed=SEED)
    held = federation.held
    model = getattr(federation.model, "model", federation.model)  # that of a person's rows
    own_model = isinstance(model, Mlp)
    if not isinstance(model, Mlp):
        loss = None if held.target is None else held.target.loss
        model = Mlp(int(np.prod(held.inputs)), HIDDEN, held.classes, loss)
    if own_model and path is not None and path.is_dir():
        params = load(path).params
    else:
        params = model.draw_parameters(SEED)
    rows = held.client(0)
    if len(held.train.y) < FEWEST:
        remedy = "there is too little to guess"
        raise InputError.of("data", len(held.train.y), f"at least {FEWEST} training rows", remedy)
    label = np.int64 if held.target is None or plan.rows_per_person else np.float64
    # The first client may hold a single label, so candidates are drawn from all clients.
    order = np.random.default_rng(SEED).permutation(len(held.train.y))
    # Of sums, attacks on single uploads are those of a server that all other clients side with.
    promise = federation.guarantee()
    assert promise is not None, "a plan has budgets"
    # An audit releases with secure noise, whatever the plan does.
    usual = {*list_always_not_covered(plan.local.unit), "simulated-noise"}
    return Target(
        name=name,
        plan=plan,
        own_model=own_model,
        form=replace(model.form(), rows_per_person=plan.rows_per_person, target=held.target),
        model={
            name: np.asarray(leaf, np.float64) for name, leaf in flatten_parameters(params).items()
        },
        recipe=Recipe(
            federation.recipe.learning_rate, federation.recipe.clip, unit=plan.local.unit
        ),
        epsilon=promise.epsilon_alone or float(np.max(federation.epsilon)),
        shared=float(np.max(federation.epsilon)),
        delta=float(np.max(federation.delta)),
        x=rows.x.astype(np.float64),
        y=rows.y.astype(label),
        pool_x=held.train.x[order[:MOST]].astype(np.float64),
        pool_y=held.train.y[order[:MOST]].astype(label),
        public=held.validation.x.astype(np.float64),
        shape=held.inputs,
        uncovered=tuple(code for code in promise.not_covered if code not in usual),
    )
