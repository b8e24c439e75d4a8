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
from functools import partial
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from sottovoce.data.files import hold_folder, require_empty, write_file
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
from sottovoce.studies.audit.attacks import SEED
from sottovoce.studies.audit.findings import Findings, Target
from sottovoce.studies.audit.messages import (
    COMPARISONS,
    WRONG,
    WRONG_PER_COMPARISON,
    AuditSetting,
    Level,
)

Progress = Callable[[int, int], None]

FEWEST, MOST = 16, 1000  # rows of all clients that an audit needs, and that it attacks
HIDDEN = 32  # units of the mlp that replaces a model of another kind
BUDGETS = (4.0, 8.0, 20.0)
WATCHED, SHARING = 5, 4  # clients of a model that is watched; those that share noise in its sums
PAPER = AuditSetting(20.0, 1e-3, Recipe(1.0, 5.0), "paper")  # where Theorem 1 is plainly wrong


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
        raise  # whatever reads our output has closed it
    except SottovoceError as error:
        raise InputError(str(error)) from None
    except OSError as error:
        raise InputError(
            f"the system refused: {error.strerror or error}; the audit stopped"
        ) from None
    except Exception:
        traceback.print_exc()
        raise InputError("the audit stopped, see above; please report it") from None


def _run_audit(path: Path | None, quick: bool, out: Path | None, as_json: bool) -> int:
    usual = Path("runs") / f"audit-{datetime.now():%Y%m%d-%H%M%S}"
    usual = path / "audit" if path is not None and path.is_dir() else usual
    folder = require_empty(usual if out is None else out, resumable=False)
    stream = sys.stderr if as_json else sys.stdout
    with time_stage(stream, "reading the data"):
        target = load_target(path)
    with hold_folder(folder):
        require_empty(folder, resumable=False)  # another audit may have ended there meanwhile
        with tempfile.TemporaryFile(dir=folder):
            pass  # refuse a folder that cannot be written to before the work, not after it
        result = run_attacks(target, QUICK if quick else FULL, stream)
        result = replace(result, command=_format_command(path, quick, out, as_json))
        text = json.dumps(result.to_json(), ensure_ascii=False, indent=1)
        write_file(folder / "audit.json", f"{text}\n".encode())
        page_path = findings.write_audit(result, folder)
    if as_json:
        print(json.dumps(result.to_json(), ensure_ascii=False))
    else:
        print(f"\n{findings.format_table(result)}\n\npage   {page_path}", flush=True)
    return 1 if result.contradictions else 0


def _format_command(path: Path | None, quick: bool, out: Path | None, as_json: bool) -> str:
    """Return the command as it can be typed again.

    >>> _format_command(Path("my plan.toml"), True, None, False)
    "sottovoce audit 'my plan.toml' --quick"
    """
    words = ["sottovoce", "audit", *([] if path is None else [str(path)])]
    words += ["--quick"] * quick + ([] if out is None else ["--out", str(out)])
    return shlex.join([*words, *["--json"] * as_json])


def run_attacks(target: Target, sizes: Sizes, stream: TextIO | None = None) -> Findings:
    """Run every attack at every level, and measure what uploads prove; print stages to `stream`."""
    time_each, began = partial(time_stage, stream), time.monotonic()
    settings, levels = list_settings(target), list_levels(target)
    jobs = [(setting, sizes.runs, WRONG_PER_COMPARISON) for setting in settings]
    # The paper's promise is not ours: its refutation is a single comparison by itself.
    jobs += [(replace(PAPER, calibration="exact"), sizes.judged, WRONG_PER_COMPARISON)]
    jobs += [(PAPER, sizes.judged, WRONG)]
    measurements = []
    for setting, runs, wrong in jobs:
        noise = "the paper's noise" if setting.calibration == "paper" else "uploads"
        with time_each(f"{noise} at ε = {setting.epsilon:g}, δ = {setting.delta:g}") as progress:
            measurements.append(messages.measure(setting, runs, progress, wrong))
    views = []
    with time_each("sequences of models"):
        plan = replace(settings[0], epsilon=target.shared, loss_bound=None, clients=WATCHED)
        for honest in (1, SHARING):  # a run has five times as many uploads
            watched = replace(plan, honest=honest)
            views.append(messages.measure(watched, sizes.runs // 4, wrong=WRONG_PER_COMPARISON))
    one_runs = []
    if target.recipe.unit != "client":
        with time_each("one run full of canaries"):
            one_runs = [
                messages.play_one_run(setting, sizes.canaries, wrong=WRONG_PER_COMPARISON)
                for setting in settings
            ]
    pool, model = target.take_pool(sizes.candidates), target.model
    inversions, matchings, traps = [], [], []
    if not target.form.rows_per_person:
        with time_each("first-layer inversion"):
            inversions = [attacks.invert_first_layer(pool, model, level) for level in levels]
    with time_each("the likeliest candidate"):
        namings = [attacks.name_candidates(pool, model, level) for level in levels]
    if target.has_classes and attacks.has_pixels(pool.x):
        with time_each("gradient matching") as progress:
            for done, level in enumerate(levels, start=1):
                matchings.append(_match_groups(target, sizes, level))
                progress(done, len(levels))
    if not target.form.rows_per_person:
        with time_each("trap weights"):
            traps = [attacks.set_trap(target.client, target.public, level) for level in levels]
    members = []
    for level in levels:
        with time_each(f"membership with {level.name}") as progress:
            members += _attack_members(target, sizes, level, progress)
    result = Findings(
        target=target,
        quick=sizes == QUICK,
        levels=levels,
        measurements=measurements[:-2],
        views=views,
        headline=measurements[-2:],
        one_runs=one_runs,
        inversions=inversions,
        namings=namings,
        matchings=matchings,
        traps=traps,
        members=members,
        seconds=time.monotonic() - began,
    )
    assert result.comparisons <= COMPARISONS, "the allowed error is shared among so many"
    return result


def list_settings(target: Target) -> list[AuditSetting]:
    """List the promises to measure: the usual budgets and the plan's, by its calibration."""
    by, server = target.plan.privacy.calibration, target.plan.server
    bound = server.loss_bound if server.signal == "clients" else None
    same: Any = {"loss_bound": bound, "target": target.form.target}
    budgets = sorted({*BUDGETS, target.epsilon})
    return [AuditSetting(e, target.delta, target.recipe, by, **same) for e in budgets]


def list_levels(target: Target) -> list[Level]:
    """List the columns of the table: no noise first, then from the least noise to the most."""
    settings = reversed(list_settings(target))
    noisy = (Level(s.epsilon, s.delta, s.calibration) for s in settings)
    return [Level(None, target.delta), *noisy]


def _match_groups(target: Target, sizes: Sizes, level: Level) -> attacks.Reconstructions:
    """Attack several clients with a few samples each, and join the results."""
    rng, pool = np.random.default_rng(SEED), target.take_pool(sizes.candidates)
    count = len(pool.y)
    together = min(sizes.together, count - 1)
    groups = [rng.permutation(count)[:together] for _ in range(sizes.groups)]
    how = target.model, level, sizes.steps
    found = [attacks.match_gradients(pool, rows, *how) for rows in groups]
    joined: dict[str, Any] = {}
    for name in ("originals", "truth", "found", "recognised", "labels", "judged"):
        joined[name] = np.concatenate([getattr(one, name) for one in found])
    return replace(found[0], **joined)


def _attack_members(
    target: Target, sizes: Sizes, level: Level, progress: Progress
) -> list[attacks.Attack]:
    pool, runs = target.take_pool(sizes.pool), sizes.shadows
    members = attacks.attack_models(
        pool, level, runs=runs, rounds=sizes.rounds,
        progress=lambda done, count: progress(done, 3 * count),
    )  # fmt: skip
    honest = SHARING if target.plan.privacy.view == "sum" else 1
    for i, (clients, shared) in enumerate([(1, 1), (WATCHED, honest)], start=1):
        members += attacks.attack_uploads(
            pool, level, target.model, runs=runs, rounds=sizes.turns, clients=clients,
            honest=shared,
            progress=lambda done, count: progress(done + i * count, 3 * count),  # noqa: B023
        )  # fmt: skip
    return members


@contextmanager
def time_stage(stream: TextIO | None, name: str) -> Iterator[Progress]:
    """Print a line with the seconds of what runs inside; on a terminal a percentage before."""
    began = shown = time.monotonic()
    is_live = stream is not None and stream.isatty()

    def progress(done: int, count: int) -> None:
        nonlocal shown
        if is_live and time.monotonic() - shown > 0.1:
            shown = time.monotonic()
            print(f"\r{name:<44} {done / count:4.0%}", end="", file=stream, flush=True)

    yield progress
    if stream is not None:
        start = "\r" if is_live else ""
        print(f"{start}{name:<44} {time.monotonic() - began:6.1f} s", file=stream, flush=True)


def load_target(path: Path | None) -> Target:
    """Return what a plan or a run folder describes; without a path, the embedded plan.

    >>> found = load_target(None)
    >>> found.x.shape, found.form.options["hidden"], found.epsilon
    ((143, 64), 32, 8.0)
    """
    if path is not None and path.is_dir():
        plan, name = Plan(**Record.read(path).plan), path.resolve().name
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
    recipe, arrays = federation.recipe, flatten_parameters(params)
    # An audit releases with secure noise, whatever the plan does.
    usual = {*list_always_not_covered(plan.local.unit), "simulated-noise"}
    return Target(
        name=name,
        plan=plan,
        own_model=own_model,
        form=replace(model.form(), rows_per_person=plan.rows_per_person, target=held.target),
        model={name: np.asarray(leaf, np.float64) for name, leaf in arrays.items()},
        recipe=Recipe(recipe.learning_rate, recipe.clip, unit=plan.local.unit),
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
