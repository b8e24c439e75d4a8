"""`sottovoce train`: load the plan, show the rounds, write the folder, say what came out."""

from __future__ import annotations

import json
import math
import os
import sys
import textwrap
import time
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from sottovoce import checkpoint, seeds
from sottovoce.data import tables
from sottovoce.errors import InputError
from sottovoce.plan import Plan
from sottovoce.privacy.budget import UNDISCLOSED

if TYPE_CHECKING:
    from rich.table import Table

    from sottovoce.simulation.run import RoundDone

SIMULATION = (
    "Simulation: this is what a deployment of this plan would guarantee; "
    "do not publish this model as private."
)

SECURE = (
    "Secure noise: every client's uploads are released as a device would release them; "
    "whoever runs this command sees the clients' data, and is trusted with them."
)


def train(
    path: Path | None,
    settings: Sequence[str],
    *,
    out: Path | None = None,
    seed: int | None = None,
    resume: bool = False,
    as_json: bool = False,
    quiet: bool = False,
) -> None:
    """Run a plan (or go on with a run) and print what a person, or `--json`, wants to see."""
    stream = sys.stderr if as_json else sys.stdout
    if resume:
        _refuse_with_resume(path, settings, out, seed)
    plan = Plan.load(path, settings)
    if plan.data.name == "arrays" or (plan.model.name == "custom" and plan.model.own is None):
        raise InputError(
            "data.name = arrays and model.name = custom are given from Python; "
            "use sottovoce.simulate, or name a data set and a model (or where yours is: model.own)"
        )
    if seed is not None:
        seeds.require_none_for(plan.noise, seed)
        seeds.check(seed)
    if plan.data.path is not None:
        tables.check(tables.Source(**plan.data.table()))
    folder = out if out is not None else _fresh_folder(plan)
    if resume:
        noise = checkpoint.load(folder)[2]["plan"]["noise"]
    else:
        noise = plan.noise
        checkpoint.require_free(folder)

    # Loaded only now: a bad plan is refused in a fraction of the second that JAX takes to start.
    from sottovoce import report
    from sottovoce.simulation import run as engine

    show = (_Quiet if quiet else _Live if stream.isatty() else _Lines)(stream)
    show.say(SIMULATION if noise == "simulated" else SECURE)
    try:
        with show:
            if resume:
                done = engine.resume(folder, on_round=show.round)
            else:
                done = engine.simulate(plan, seed=seed, out=folder, on_round=show.round)
    except KeyboardInterrupt:
        if (folder / "record.json").exists():
            print(
                f"stopped; the record so far is in {folder}, "
                f"go on with: sottovoce train --resume --out {folder}",
                file=sys.stderr,
                flush=True,
            )
            report.write(folder)
        raise
    page = report.write(folder)
    if as_json:
        print(json.dumps(done.record, ensure_ascii=False))
    else:
        show.say(summary(done.record, folder, page))


def summary(record: dict[str, Any], folder: Path, page: Path) -> str:
    """What a person wants to know at the end of a run."""
    result, first = record["result"], record["plan"]["rounds"]["rounds"]
    known = [c["spent"] / c["capacity"] for c in record.get("clients", ()) if c["capacity"]]
    fuel = f"   fuel used {max(known):.0%}" if known else ""
    told = record["guarantee"]  # null where every client keeps its budget to itself
    text = UNDISCLOSED if told is None else told["text"]
    return "\n".join(
        [
            "",
            f"test accuracy {result['test_accuracy']:.1%}   "
            f"test loss {_number(result['test_loss'])}   "
            f"{result['rounds_used']} rounds of {first}{fuel}",
            *_not_finite(record),
            "",
            textwrap.fill(text, width=96, break_on_hyphens=False),
            "",
            f"files  {folder}",
            f"page   {page}",
        ]
    )


def _not_finite(record: dict[str, Any]) -> list[str]:
    lost = [entry["t"] + 1 for entry in record["rounds"] if entry["validation_loss"] is None]
    if not lost:
        return []
    return [f"the loss is not finite since round {lost[0]}: try a smaller local.learning_rate"]


def _number(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.4f}"


def _sigma(done: RoundDone) -> str:
    return "–" if math.isnan(done.sigma) else f"{done.sigma:.4g}"  # nobody discloses it


def _refuse_with_resume(
    path: Path | None, settings: Sequence[str], out: Path | None, seed: int | None
) -> None:
    if out is None:
        raise InputError("--resume needs --out DIR, the folder of the run that was stopped")
    if path is not None or settings or seed is not None:
        raise InputError(
            "--resume goes on with the plan and the seed of the run; "
            "leave PLAN, --set and --seed out"
        )


def _fresh_folder(plan: Plan) -> Path:
    stamp = f"{datetime.now():%Y%m%d-%H%M%S}"
    base, number = Path("runs") / f"{plan.data.name or 'table'}-{stamp}", 1
    folder = base
    while folder.exists():
        number += 1
        folder = base.with_name(f"{base.name}-{number}")
    return folder


class _Quiet:
    """No progress; only the first word and the last."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream

    def say(self, text: str) -> None:
        """Print, unless the reader has gone (as `head` does): the run goes on without it."""
        try:
            print(text, file=self.stream, flush=True)
        except BrokenPipeError:
            self.stream = Path(os.devnull).open("w")  # noqa: SIM115 - until the process ends
            os.dup2(self.stream.fileno(), sys.stdout.fileno())

    def __enter__(self) -> _Quiet:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def round(self, done: RoundDone) -> None:
        """Hear of a round and say nothing."""


class _Lines(_Quiet):
    """One plain line a round, for logs and pipes."""

    def round(self, done: RoundDone) -> None:
        """Print the round."""
        shrunk = f"  T {done.horizon} → {done.next_horizon}" * (done.next_horizon < done.horizon)
        self.say(
            f"round {done.t + 1} of {done.horizon}  loss {done.loss:.4f}  "
            f"accuracy {done.accuracy:.1%}  σ {_sigma(done)}  fuel {done.fuel:.1%}{shrunk}"
        )


class _Live(_Quiet):
    """A table of the newest rounds that redraws itself, with an estimate of the time left."""

    ROWS = 12

    def __init__(self, stream: TextIO) -> None:
        from rich.console import Console
        from rich.live import Live

        super().__init__(stream)
        self.done: list[RoundDone] = []
        self.began = time.monotonic()
        self.first = 0.0
        self.live = Live(console=Console(file=stream), refresh_per_second=12, transient=False)

    def __enter__(self) -> _Live:
        self.live.__enter__()
        self.live.update("compiling the round …")
        return self

    def __exit__(self, *error: object) -> None:
        self.live.__exit__(None, None, None)

    def round(self, done: RoundDone) -> None:
        """Add the round to the table."""
        if not self.done:
            self.first = time.monotonic()  # compiling is over: from here on rounds take their time
        self.done.append(done)
        self.live.update(self._table())

    def _table(self) -> Table:
        from rich import box
        from rich.table import Table

        last = self.done[-1]
        table = Table(caption=self._caption(last), caption_justify="left", box=box.SIMPLE_HEAD)
        for name in ("round", "of T", "loss", "accuracy", "noise σ", "fuel left"):
            table.add_column(name, justify="right")
        for done in self.done[-self.ROWS :]:
            shrunk = done.next_horizon < done.horizon
            horizon = f"{done.horizon} → {done.next_horizon}" if shrunk else f"{done.horizon}"
            table.add_row(
                f"{done.t + 1}",
                horizon,
                f"{done.loss:.4f}",
                f"{done.accuracy:.1%}",
                _sigma(done),
                f"{done.fuel:.0%}",
                style="yellow" if shrunk else None,
            )
        return table

    def _caption(self, last: RoundDone) -> str:
        count, left = len(self.done), max(0, last.next_horizon - last.t - 1)
        if left == 0:
            return f"{count} rounds in {time.monotonic() - self.began:.1f} s"
        if count == 1:
            return f"at most {left} rounds left"
        pace = (time.monotonic() - self.first) / (count - 1)
        return f"at most {left} rounds left, about {left * pace:.0f} s"
