"""What a terminal shows of a run: its rounds while they are played, and a summary at the end."""

from __future__ import annotations

import math
import os
import re
import shlex
import statistics
import sys
import textwrap
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from sottovoce.errors import InputError
from sottovoce.models.metrics import TITLES, format_metric
from sottovoce.plan import Plan
from sottovoce.privacy.budget import describe_undisclosed, format_promise

if TYPE_CHECKING:
    from sottovoce.runs.checkpoint import RoundDone


def choose_display(stream: TextIO, *, quiet: bool, waiting: str) -> SilentDisplay:
    """Return what shows rounds on this stream: nothing, a table that redraws itself, or lines."""
    kind = SilentDisplay if quiet else TableDisplay if stream.isatty() else LineDisplay
    return kind(stream, waiting)


SIMULATED = (
    "Simulation: this is what a deployment of this plan would guarantee; "
    "do not publish this model as private."
)
MOST_FINDINGS = 5  # warnings about the rows that are printed before a run
SOON = 10.0  # seconds: what ends sooner needs no estimate
LARGE = 64 * 2**20  # bytes: a file that takes seconds to read


def print_findings(plan: Plan, path: object) -> None:
    """Print the first warnings about the rows on stderr; refuse rows that cannot be used."""
    from sottovoce.data.check import check_plan

    report = check_plan(plan)
    file = path if isinstance(path, str | Path) else "plan.toml"
    more = f"sottovoce check {shlex.quote(str(file))} shows all"
    if report.errors:
        raise InputError(f"{report.errors[0]} ({more})")
    for _, _, text in report.findings[:MOST_FINDINGS]:
        print(f"warning: {text}", file=sys.stderr, flush=True)
    if len(report.findings) > MOST_FINDINGS:
        left = len(report.findings) - MOST_FINDINGS
        print(f"warning: {left} more about these rows; {more}", file=sys.stderr, flush=True)


def announce_reading(path: str | None, *, quiet: bool = False) -> None:
    """Print on stderr that a large file is read, which is silent for seconds or minutes."""
    with suppress(OSError):  # the reader says what is wrong
        if path and not quiet and (size := Path(path).stat().st_size) >= LARGE:
            text = f"reading {Path(path).name} ({size / 2**20:,.0f} MiB) …"
            print(text, file=sys.stderr, flush=True)


class ProgressLine:
    """One line of progress: rewritten on a terminal, written now and then elsewhere.

    >>> line = ProgressLine(sys.stdout, quiet=False, at_once=True)
    >>> if line.due():
    ...     line.say("3 of 9")
    3 of 9
    >>> line.due()
    False
    """

    EVERY_S = 10.0

    def __init__(self, stream: TextIO, *, quiet: bool, at_once: bool = False) -> None:
        """Write nothing if `quiet`; the first line waits like the others unless `at_once`."""
        self.stream, self.quiet, self.live = stream, quiet, stream.isatty()
        self.began = time.monotonic()
        self.last = -math.inf if at_once else self.began
        self.open = False  # whether a line of a terminal waits for its end

    def due(self) -> bool:
        """Return whether it is time for another line."""
        waited = time.monotonic() - self.last
        return not self.quiet and waited > (0.2 if self.live else self.EVERY_S)

    def say(self, text: str) -> None:
        """Write the text now, unless the line is quiet."""
        if self.quiet:
            return
        self.last = time.monotonic()
        self.open = self.live
        self.stream.write(f"\r{text:<78}" if self.live else text + "\n")
        self.stream.flush()

    def close(self) -> None:
        """End the line."""
        if self.open:
            self.stream.write("\n")
            self.open = False


def summarize_run(record: dict[str, Any], folder: Path, page: Path) -> str:
    """Return what a person wants to know at the end of a run."""
    from sottovoce.reports.run import CheckedRun, read_run  # which imports this module

    result, first = record["result"], record["plan"]["rounds"]["rounds"]
    known = [c["spent"] / c["capacity"] for c in record.get("clients", ()) if c["capacity"]]
    fuel = f"   fuel used {max(known):.0%}" if known else ""
    if (guarantee := record["guarantee"]) is None:  # every client keeps its budget to itself
        text = describe_undisclosed(record.get("not_covered", ()))
    else:
        text = guarantee["text"]
    loss = "not finite" if result["test_loss"] is None else f"{result['test_loss']:.4f}"
    lines = ["", result["headline"]["text"]]
    loss += " (before calibration)" * ("calibration" in result)
    lines.append(f"test loss {loss}   {result['rounds_used']} rounds of at most {first}{fuel}")
    found = re.search("(?<=the model is ).*|of all rounds the best.*", result.get("finish", ""))
    model = found[0] if found else "the newest iterate"
    steering = "validation rows" if record["plan"]["data"]["validation"] else "test rows, too"
    lines.append(f"on test rows: {model}; in the rounds, on {steering}: the newest iterate")
    if (found := result.get("forecast")) is not None:
        lines.append(f"forecast: T = {found['rounds']}, steps × {found['step']:g}")
    checked = read_run(folder) if (folder / "trace.npz").exists() else CheckedRun.of(record)
    if (ratio := find_multiplier(record["plan"]["privacy"], checked.list_turns())) is not None:
        what = "σ/Δ of one turn, median client; σ also depends on step, clipping norm and rows"
        lines.append(f"noise multiplier {ratio:.3g} ({what})")
    lost = [entry["t"] + 1 for entry in record["rounds"] if entry["validation_loss"] is None]
    if lost:
        remedy = "try a smaller local.learning_rate"
        lines.append(f"the loss is not finite since round {lost[0]}: {remedy}")
    lines += ["", format_promise(text)]
    if (view := record.get("model_view")) is not None:
        lines.append(format_promise(view["text"]))
    if (rehearsed := record["plan"].get("rehearsed")) is not None:
        text = f"Settings were chosen, as the plan says: {rehearsed}."
        lines += ["", textwrap.fill(text, width=96, break_on_hyphens=False)]
    return "\n".join([*lines, "", f"files  {folder}", f"page   {page}"])


def find_multiplier(
    privacy: Mapping[str, Any], turns: Iterable[tuple[float, float | None]]
) -> float | None:
    """Return σ/Δ of one turn of the median client from (turns, Σμ²); None if nobody discloses it.

    It is None, too, where Σμ² is not that of a client's own noise in its own turns: for sums, and
    for the paper's noise, which charges who is absent.

    >>> find_multiplier({"calibration": "exact"}, [(4, 1.0), (0, 0.0)])
    2.0
    """
    if privacy.get("view") == "sum" or privacy.get("calibration") == "paper":
        return None
    known = [count / spent for count, spent in turns if spent and spent > 0]
    return math.sqrt(statistics.median(known)) if known else None


def _format_known(value: float, form: str) -> str:
    """Return a number that clients disclose; a dash where nobody does."""
    return "–" if math.isnan(value) else format(value, form)


def _score_round(done: RoundDone) -> tuple[str, str]:
    """Return name and value of what is shown beside the loss: the plan's metric, or accuracy."""
    if done.metric is not None and done.metric != "accuracy":
        return TITLES[done.metric], format_metric(done.metric, done.score)
    return "accuracy", format_metric("accuracy", done.accuracy)  # NaN where a number is predicted


def _find_shrunk(done: RoundDone) -> int | None:
    """Return the new horizon if the round shortened it, never below the rounds done."""
    horizon = max(done.next_horizon, done.t + 1)
    return horizon if horizon < done.horizon else None


def name_new_folder(plan: Plan) -> Path:
    """Return a new folder below runs/ for a run that names none."""
    stamp = f"{datetime.now():%Y%m%d-%H%M%S}"
    base, number = Path("runs") / f"{plan.data.name or 'table'}-{stamp}", 1
    folder = base
    while folder.exists():
        number += 1
        folder = base.with_name(f"{base.name}-{number}")
    return folder


def format_seconds(seconds: float) -> str:
    """Return a duration as people say it.

    >>> format_seconds(4.2), format_seconds(100), format_seconds(800), format_seconds(9000)
    ('4 s', '100 s', '13 min', '2.5 h')
    """
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


class SilentDisplay:
    """Shows no rounds; prints only what it is told to say."""

    def __init__(self, stream: TextIO, waiting: str = "") -> None:
        self.stream = stream
        self.waiting = waiting  # what is going on before the first round
        self.rounds, self.first = 0, 0.0  # shown, and when the first of them was

    def estimate_left(self, done: RoundDone) -> str:
        """Count a round, and return how long the rounds left may take; empty if not for long.

        The pace is counted from the first round on, when compiling and starting are over.
        """
        now, left = time.monotonic(), max(0, done.next_horizon - done.t - 1)
        self.rounds, self.first = self.rounds + 1, self.first or now
        seconds = left * (now - self.first) / max(1, self.rounds - 1)
        return f"about {format_seconds(seconds)}" if seconds >= SOON else ""

    def say(self, text: str) -> None:
        """Print, unless the reader has gone (as `head` does): the run goes on without it."""
        try:
            print(text, file=self.stream, flush=True)
        except BrokenPipeError:
            self.stream = Path(os.devnull).open("w")  # noqa: SIM115 - until the process ends
            os.dup2(self.stream.fileno(), sys.stdout.fileno())

    def __enter__(self) -> SilentDisplay:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def note(self, text: str) -> None:
        """Ignore what happens before the first round."""

    def round(self, done: RoundDone) -> None:
        """Ignore a round."""


class ProgressBar:
    """A bar of the rounds, for scripts and notebooks: a callback of `simulate`."""

    def __init__(self) -> None:
        self.bar: Any = None

    def on_round(self, done: RoundDone) -> None:
        """Move the bar on; its end is the horizon, which may shrink."""
        if self.bar is None:
            from rich.progress import Progress

            self.bar = Progress()
            self.task = self.bar.add_task("")
            self.bar.start()
        score = "" if math.isnan(done.accuracy) else f"  accuracy {done.accuracy:.1%}"
        text = f"round {done.t + 1} of {done.horizon}  loss {done.loss:.4f}{score}"
        total = max(done.t + 1, done.next_horizon)
        self.bar.update(self.task, completed=done.t + 1, total=total, description=text)

    def on_end(self, run: object) -> None:
        """End the bar."""
        if self.bar is not None:
            self.bar.stop()


def is_notebook() -> bool:
    """Return whether this runs in a notebook, where nobody sees a terminal."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return hasattr(shell, "kernel")


class LineDisplay(SilentDisplay):
    """Prints one plain line a round, for logs and pipes."""

    def note(self, text: str) -> None:
        """Print what happens before the first round."""
        self.say(text)

    def round(self, done: RoundDone) -> None:
        """Print the round."""
        horizon, (name, score) = _find_shrunk(done), _score_round(done)
        left = self.estimate_left(done)
        self.say(
            f"round {done.t + 1} of {done.horizon}  loss {done.loss:.4f}  "
            + (f"{name} {score}  " if score != "–" else "")
            + f"σ {_format_known(done.sigma, '.4g')}  fuel {_format_known(done.fuel, '.1%')}"
            + ("" if horizon is None else f"  T {done.horizon} → {horizon}")
            + (f"  {left} left" if left else "")
        )


class TableDisplay(SilentDisplay):
    """Redraws a table of the newest rounds, with an estimate of the time left."""

    ROWS = 12

    def __init__(self, stream: TextIO, waiting: str = "") -> None:
        from rich.console import Console
        from rich.live import Live

        super().__init__(stream, waiting)
        self.done: list[RoundDone] = []
        self.began = time.monotonic()
        self.live = Live(console=Console(file=stream), refresh_per_second=12, transient=False)

    def __enter__(self) -> TableDisplay:
        self.live.__enter__()
        self.live.update(self.waiting)
        return self

    def __exit__(self, *error: object) -> None:
        self.live.__exit__(None, None, None)

    def say(self, text: str) -> None:
        """Print, above the table while it is shown."""
        if self.live.is_started:
            self.live.console.print(text, markup=False, highlight=False)
        else:
            super().say(text)

    def note(self, text: str) -> None:
        """Show what happens before the first round in the place of the table."""
        self.live.update(text)

    def round(self, done: RoundDone) -> None:
        """Add the round to the table."""
        from rich import box
        from rich.table import Table

        self.done.append(done)
        left = max(0, done.next_horizon - done.t - 1)
        caption = f"{len(self.done)} rounds in {time.monotonic() - self.began:.1f} s"
        if left > 0:
            estimate = self.estimate_left(done)
            caption = f"at most {left} rounds left" + (f", {estimate}" if estimate else "")
        table = Table(caption=caption, caption_justify="left", box=box.SIMPLE_HEAD)
        for name in ("round", "of T", "loss", _score_round(done)[0], "noise σ", "fuel left"):
            table.add_column(name, justify="right")
        for shown in self.done[-self.ROWS :]:
            horizon = _find_shrunk(shown)
            table.add_row(
                f"{shown.t + 1}",
                f"{shown.horizon}" + ("" if horizon is None else f" → {horizon}"),
                f"{shown.loss:.4f}",
                _score_round(shown)[1],
                _format_known(shown.sigma, ".4g"),
                _format_known(shown.fuel, ".0%"),
                style=None if horizon is None else "yellow",
            )
        self.live.update(table)
