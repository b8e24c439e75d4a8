"""`sottovoce watch`: a local page that follows the runs of a folder.

`RunsFolder` reads what runs write: record.json, rounds.jsonl, and of checkpoint.npz everything but
the model. A run whose folder nobody holds (`data.files.hold_folder`) and whose record does not say
how it ended was killed. A page is a template; its blocks named `live_…` are rendered again while
the run goes on, and those that changed are sent to the browser as server-sent events.

The server listens on 127.0.0.1 only. Every address begins with a random token, the Host header must
name this server (against DNS rebinding), and pages load only the style and the script beside them.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import math
import secrets
import shlex
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from pydantic import TypeAdapter, ValidationError

from sottovoce._version import __version__
from sottovoce.data.files import DAMAGE, is_held
from sottovoce.errors import InputError, RunError, SottovoceError
from sottovoce.models.metrics import TITLES, format_metric
from sottovoce.plan import Plan
from sottovoce.reports import charts
from sottovoce.reports.pages import (
    format_ceiling,
    format_count,
    format_duration,
    format_number,
    format_percent,
    format_value,
    format_whole,
    load_templates,
    render_page,
)
from sottovoce.reports.run import choose_banner
from sottovoce.runs import checkpoint
from sottovoce.runs.record import MOST_NAMED, ROUNDS, Headline, Record, RoundEntry
from sottovoce.schedules.calibrate import calibrate, default_plan, list_noise

if TYPE_CHECKING:
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response

TICK = 1.0  # seconds between two looks at the folder
MOST_DRAWN = 6  # runs whose curves are drawn in one picture: as many as there are colours
MOST_EVENTS = 15
MOST_PAGES = 16  # whose live blocks are kept
LOCAL_FEDERATION = "federation.json"  # what `sottovoce federate` writes, and no other command
HELD = "ε that holds"  # the name of a result
_FILES = ("record.json", ROUNDS, checkpoint.NAME, "report.html")
_ROUND: TypeAdapter[RoundEntry] = TypeAdapter(RoundEntry)
Query = Mapping[str, list[str]]


# What runs write.


@dataclass(frozen=True)
class FollowedRun:
    """What the pages show of a run; the list keeps only its last round."""

    folder: Path
    status: str  # of its record, or running, killed, unknown (no lock here), damaged
    written: float  # seconds since 1970
    plan: dict[str, Any] = field(default_factory=dict)
    initial: tuple[float | None, float | None] = (None, None)  # validation loss and accuracy
    rounds: list[RoundEntry] = field(default_factory=list)
    left: float = math.nan  # the least budget left, of the clients that disclose it
    seconds: float = math.nan
    names: list[str] = field(default_factory=list)  # of the clients of a federation
    not_covered: Sequence[str] | None = None
    record: Record | None = None
    fault: str = ""

    @property
    def name(self) -> str:
        """The name of its folder."""
        return self.folder.name

    @property
    def done(self) -> int:
        """How many rounds are over."""
        return self.rounds[-1]["t"] + 1 if self.rounds else 0

    @property
    def horizon(self) -> float:
        """T as it stands; NaN where it is not known yet."""
        planned = self.plan.get("rounds", {}).get("rounds")
        planned = planned if isinstance(planned, int) else math.nan
        # The rule is applied after the last round too, where it may end below the rounds done.
        return max(self.rounds[-1]["next_horizon"], self.done) if self.rounds else planned

    @property
    def epsilon(self) -> str:
        """The ε that holds, or else that of the plan, where it is what will hold."""
        if self.record is not None:
            guarantee = self.record.guarantee
            return "hidden" if guarantee is None else format_ceiling(guarantee["epsilon"])
        privacy = self.plan.get("privacy", {})
        asked = privacy.get("epsilon")
        if self.names or privacy.get("calibration") == "paper":
            return "–"  # clients have budgets of their own, or what is asked for does not hold
        asked = max(asked, default=None) if isinstance(asked, list) else asked
        return format_ceiling(asked) if isinstance(asked, int | float) else "–"

    @property
    def headline(self) -> Headline | None:
        """The metric that fits the task, once there is a record."""
        return None if self.record is None else self.record.result.get("headline")

    @property
    def score(self) -> str:
        """The metric that fits the task on test rows, or so far the accuracy on validation rows."""
        headline = self.headline
        if headline is not None and headline["metric"] in TITLES:
            value = headline["value"]
            shown = "–" if value is None else format_metric(headline["metric"], value)
            return f"{TITLES[headline['metric']]} {shown}"
        accuracy = self.rounds[-1]["validation_accuracy"] if self.rounds else self.initial[1]
        return "–" if accuracy is None else f"validation accuracy {format_percent(accuracy)}"

    @property
    def results(self) -> dict[str, float | str]:
        """What it has reached, by the names that a comparison has for its axes."""
        values: dict[str, float | str] = {}
        if self.record is not None:
            if self.record.guarantee is not None:
                values[HELD] = self.record.guarantee["epsilon"]
            for name, entry in self.record.result.get("metrics", {}).items():
                if name in TITLES and entry["value"] is not None:
                    values[TITLES[name]] = entry["value"]
        if self.rounds and (loss := self.rounds[-1]["validation_loss"]) is not None:
            values["validation loss"] = loss
        values["rounds done"] = float(self.done)
        return values if math.isnan(self.left) else {**values, "budget left": self.left}

    @property
    def settings(self) -> dict[str, float | str]:
        """The numbers and words of its plan, by section.key."""
        values: dict[str, float | str] = {}
        for section, content in self.plan.items():
            entries = content.items() if isinstance(content, dict) else [("", content)]
            for key, value in entries:
                name = f"{section}.{key}".rstrip(".")
                if isinstance(value, bool | str):
                    values[name] = format_value(value)
                elif isinstance(value, int | float) and abs(value) < 1e300:  # a damaged one
                    values[name] = float(value)
        return values


@dataclass
class _RoundsFile:
    """The lines of a growing rounds.jsonl, each read once."""

    node: int = -1
    offset: int = 0
    entries: list[RoundEntry] = field(default_factory=list)

    def read_more(self, path: Path) -> list[RoundEntry]:
        with suppress(FileNotFoundError), path.open("rb") as file:
            node = path.stat().st_ino
            if node != self.node or path.stat().st_size < self.offset:  # written anew, by a resume
                self.node, self.offset, self.entries = node, 0, []
            file.seek(self.offset)
            whole, newline, _ = file.read().rpartition(b"\n")
            self.offset += len(whole) + len(newline)
            for line in whole.splitlines():
                entry = _ROUND.validate_json(line)
                if len(entry.get("cohort", ())) > MOST_NAMED:
                    del entry["cohort"]  # of very many clients nobody reads who took part
                self.entries.append(entry)
        return self.entries


class RunsFolder:
    """The runs of a folder, each read again only when one of its files has changed."""

    def __init__(self, folder: Path) -> None:
        # A run is known by the name of its folder, which "." and ".." do not have.
        self.folder = folder.resolve() if folder.name in ("", "..") else folder
        self.version = 0  # grows with every change that a page could show
        self._runs: dict[str, tuple[tuple[Any, ...], FollowedRun]] = {}
        self._whole: dict[str, tuple[tuple[Any, ...], FollowedRun]] = {}  # with all rounds
        self._growing: dict[str, _RoundsFile] = {}
        self._looked = -math.inf
        self._lock = threading.Lock()

    def look(self) -> list[FollowedRun]:
        """Return all runs, those that go on first, then the newest; at most one look a tick."""
        with self._lock:
            if time.monotonic() - self._looked > 0.8 * TICK:
                found = {folder.name: self._check(folder) for folder in self._list_folders()}
                if found.keys() != self._runs.keys() or any(
                    known[0] != self._runs[name][0] for name, known in found.items()
                ):
                    self.version += 1
                self._runs, self._looked = found, time.monotonic()
            runs = [run for _, run in self._runs.values()]
        return sorted(runs, key=lambda run: (run.status != "running", -run.written, run.name))

    def read_whole(self, name: str) -> FollowedRun:
        """Return a run with all its rounds; raise RunError where there is none of this name."""
        with self._lock:
            if name not in self._runs:
                raise RunError(f"{self.folder} has no run {name!r}; go back to the list of runs")
            key, run = self._runs[name]
            if self._whole.get(name, ((),))[0] != key:
                while len(self._whole) >= MOST_DRAWN:
                    del self._whole[next(iter(self._whole))]
                self._whole[name] = key, self._read(run.folder, run.status, run.written)
            return self._whole[name][1]

    def _list_folders(self) -> Iterator[Path]:
        if _is_run(self.folder):
            yield self.folder
            return
        with suppress(OSError):  # the folder was removed: there are no runs
            for path in sorted(self.folder.iterdir()):
                if path.name.isprintable() and _is_run(path):
                    yield path

    def _check(self, folder: Path) -> tuple[tuple[Any, ...], FollowedRun]:
        """Return a run and what its files looked like; known files are not read again."""
        known = self._runs.get(folder.name)
        if known is not None and known[1].status == "finished":
            held: bool | None = False  # it has let go, or is about to
        else:
            held = is_held(folder)  # before its files: they are final if nobody holds it
        files = [_look_at(folder / name) for name in _FILES]
        key = (held, *files)
        if known is not None and known[0] == key:
            return known
        record, rounds, saved, _ = files
        status = "running"
        if not held:
            status = "killed" if held is False else "unknown"
            if record is not None and (rounds is None or rounds[0] <= record[0]):
                status = ""  # as the record says
        written = max(file[0] for file in (record, rounds, saved, (0, 0)) if file) / 1e9
        run = self._read(folder, status, written)
        if run.status == "finished":
            key = (False, *files)
        if run.status != "running":
            self._growing.pop(folder.name, None)
        return key, replace(run, rounds=run.rounds[-1:], record=_shorten(run.record))

    def _read(self, folder: Path, status: str, written: float) -> FollowedRun:
        """Read a run; `status` is empty where its record has it."""
        run = FollowedRun(folder, status or "damaged", written)
        try:
            if status in ("running", "killed", "unknown"):
                return self._read_unfinished(run)
            record = Record.read(folder)
        except SottovoceError as error:
            return replace(run, status="damaged", fault=str(error))
        left = [1 - c["spent"] / c["capacity"] for c in record.clients or () if c["capacity"]
                and c["spent"] is not None]  # fmt: skip
        first = record.initial
        return replace(
            run,
            status=record.status,
            plan=record.plan,
            initial=(first["validation_loss"], first["validation_accuracy"]),
            rounds=record.rounds,
            left=max(0.0, min(left)) if left else math.nan,
            seconds=record.timing["seconds"],
            names=[c.get("name", "") for c in record.clients or () if record.engine == "flower"],
            not_covered=record.guarantee["not_covered"] if record.guarantee else record.not_covered,
            record=record,
        )

    def _read_unfinished(self, run: FollowedRun) -> FollowedRun:
        growing = self._growing.setdefault(run.name, _RoundsFile())
        try:
            rounds = growing.read_more(run.folder / ROUNDS)
        except ValidationError:
            raise RunError(f"{run.folder / ROUNDS} is damaged; start the run anew") from None
        run = replace(run, rounds=list(rounds))
        try:
            meta, left = checkpoint.read_public_state(run.folder)
        except (OSError, ValueError, KeyError, TypeError):
            return run  # there is none yet, or a finished run has just removed it
        known = left[~np.isnan(left)]
        return replace(
            run,
            plan=meta["header"]["plan"],
            initial=tuple(meta["initial"][:2]),
            left=float(known.min()) if known.size else math.nan,
            seconds=meta["seconds"],
            names=[member["name"] for member in meta["header"].get("members", ())],
            not_covered=meta["header"].get("not_covered", ()),
        )


def _is_run(folder: Path) -> bool:
    return any((folder / name).exists() for name in (ROUNDS, "record.json"))


def _look_at(path: Path) -> tuple[int, int] | None:
    with suppress(OSError):
        found = path.stat()
        return found.st_mtime_ns, found.st_size
    return None


def _shorten(record: Record | None) -> Record | None:
    """Return the record without what only the page of its run needs."""
    if record is None:
        return None
    kept = {key: value for key, value in record.result.items() if key in ("headline", "metrics")}
    return record.model_copy(update={"rounds": [], "clients": None, "result": kept})


# The pages: a template each, and what it is given.


def show_runs(runs: RunsFolder, query: Query) -> dict[str, Any]:
    """Return the list of runs."""
    found = runs.look()
    live = [run for run in found if run.status == "running"]
    over = [run for run in found if run.status != "running"]
    count = format_count(len(found), "run")
    headline = f"{count}, {len(live) or 'none'} going on" if found else "No runs yet"
    return {"title": headline, "live": live, "over": over, "folder": str(runs.folder)}


def show_run(runs: RunsFolder, query: Query) -> dict[str, Any]:
    """Return one run: its numbers, curves, clients and last rounds."""
    runs.look()
    run = runs.read_whole(query["name"][0])
    last = run.rounds[-1] if run.rounds else None
    loss = run.initial[0] if last is None else last["validation_loss"]
    accuracy = run.initial[1] if last is None else last["validation_accuracy"]
    pace = run.seconds / run.done if run.done else math.nan
    sigma = None if last is None else last["sigma"]["median"]
    tiles = [
        (f"rounds done of at most {format_whole(run.horizon)}", f"{run.done:,}"),
        ("validation loss", _format(loss)),
        *([] if accuracy is None else [("validation accuracy", format_percent(accuracy))]),
        ("ε" if run.record is not None else "ε of the plan", run.epsilon),
        ("noise σ, median", _format(sigma)),
        ("time of a round", format_duration(pace)),
    ]
    if run.status == "running" and run.done:
        left = format_duration(pace * max(0, run.horizon - run.done))
        tiles.append(("time left at most, about", left))
    reached = "" if run.headline is None else run.headline["text"]
    return {
        "title": f"{run.name}: {run.status}, round {run.done} of {format_whole(run.horizon)}",
        "run": run,
        "tiles": tiles,
        "resume": _describe_resume(run),
        "reached": reached[:1].upper() + reached[1:],
        "banner": choose_banner(run.plan.get("noise", ""), run.not_covered or ()),
        "has_report": (run.folder / "report.html").exists() and run.status != "running",
        "what_if": _list_settings(run.plan),
        "charts": _draw_rounds(run),
        "clients": _list_clients(run),
        "events": [_describe_round(entry) for entry in run.rounds[: -MOST_EVENTS - 1 : -1]],
        "plan": {key: value for key, value in run.plan.items() if isinstance(value, dict)},
    }


def _describe_resume(run: FollowedRun) -> str:
    """Return the command that continues a run; empty where it cannot be continued."""
    is_stopped = run.status in ("killed", "interrupted", "failed")
    if not is_stopped or not (run.folder / checkpoint.NAME).exists():
        return ""
    if not run.names:
        with suppress(SottovoceError, *DAMAGE):  # of a damaged plan
            if Plan(**run.plan).needs_python:
                return f"sottovoce.resume({str(run.folder)!r}, …), given what it was begun with"
    elif not (run.folder / LOCAL_FEDERATION).exists():  # between machines
        return 'flwr run … --run-config "… resume=true", else as it was begun'
    command = "federate" if run.names else "train"
    return f"sottovoce {command} --resume --out {shlex.quote(str(run.folder))}"


def _draw_rounds(run: FollowedRun) -> list[tuple[str, str, charts.Plot]]:
    if not run.rounds:
        return []
    done = [entry["t"] + 1 for entry in run.rounds]
    after: list[Any] = [0, *done]
    loss = [run.initial[0], *(entry["validation_loss"] for entry in run.rounds)]
    accuracy = [run.initial[1], *(entry["validation_accuracy"] for entry in run.rounds)]
    horizon = [*(entry["horizon"] for entry in run.rounds), run.horizon]
    sigma = [entry["sigma"]["median"] for entry in run.rounds]
    signal = [entry.get("signal") for entry in run.rounds]
    line = charts.PlotLine
    found = [
        ("Validation loss", "On public rows.", [line("", after, loss)]),
        ("Validation accuracy", "On public rows, in per cent.",
         [line("", after, [a and 100 * a for a in accuracy])]),
        ("Horizon", "The rounds announced; where both lines meet, the run is over.",
         [line("horizon T", after, horizon, "steps"), line("rounds done", after, after)]),
        ("Noise σ", "Of one coordinate of one upload, median of those that disclose it.",
         [line("", done, sigma, "steps")]),
        ("Signal", "What the schedule is given after a round.", [line("", done, signal)]),
    ]  # fmt: skip
    plots = [(title, caption, charts.plot("rounds done", lines)) for title, caption, lines in found]
    return [(title, caption, plot) for title, caption, plot in plots if plot is not None]


def _list_clients(run: FollowedRun) -> list[list[str]]:
    """Return for each client of a federation how often it was asked and answered, and the last."""
    if not 0 < len(run.names) <= MOST_NAMED:
        return []
    asked, answered = ([0] * len(run.names) for _ in range(2))
    state = ["not asked yet"] * len(run.names)
    for entry in run.rounds:
        counted = {i for i in entry.get("cohort", ()) if i < len(run.names)}
        missing = entry.get("missing", {})
        for i in {i for i in entry.get("asked", ()) if i < len(run.names)} | counted:
            asked[i] += 1
            answered[i] += i in counted
            said = "answered" if i in counted else missing.get(run.names[i], "silent")
            state[i] = f"{said} in round {entry['t'] + 1}"
    rows = zip(run.names, asked, answered, state, strict=True)
    return [[name, f"{n:,}", f"{m:,}", said] for name, n, m, said in rows]


def _describe_round(entry: RoundEntry) -> str:
    uploads = entry.get("uploads", len(entry.get("cohort", ())))
    parts = [f"round {entry['t'] + 1} of {entry['horizon']}: {format_count(uploads, 'upload')}"]
    if entry["validation_loss"] is not None:
        parts.append(f"loss {entry['validation_loss']:.4f}")
    if entry["validation_accuracy"] is not None:
        parts.append(f"accuracy {entry['validation_accuracy']:.1%}")
    horizon = max(entry["next_horizon"], entry["t"] + 1)
    if horizon < entry["horizon"]:
        parts.append(f"T {entry['horizon']} → {horizon}")
    parts += [f"{name}: {why}" for name, why in entry.get("missing", {}).items()]
    return ", ".join(parts)


def show_comparison(runs: RunsFolder, query: Query) -> dict[str, Any]:
    """Return the chosen runs, or all, with two of their values as axes."""
    every = runs.look()
    wanted = {*query.get("run", ())}
    chosen = [run for run in every if run.name in wanted] if wanted else every
    values = {run.name: {**run.results, **run.settings} for run in chosen}
    keys = list(dict.fromkeys(key for run in chosen for key in (*run.results, *run.settings)))
    headlines = (run.headline for run in chosen if run.headline is not None)
    metric = next((TITLES.get(found["metric"], "") for found in headlines), "")
    x = _choose(query, "x", keys, HELD)
    y = _choose(query, "y", keys, metric or "rounds done")
    both = [run for run in chosen if x in values[run.name] and y in values[run.name]]
    points = charts.PlotLine("", [values[run.name][x] for run in both],
        [values[run.name][y] for run in both], "points", [run.name for run in both])  # fmt: skip
    settings = [run.settings for run in chosen if run.plan]
    differing = [key for key in keys if len({found.get(key) for found in settings}) > 1]
    columns = list(dict.fromkeys([x, y, *differing[:8]]))
    forms: Any = {HELD: format_ceiling}  # no ε is shown smaller than it is
    curves = []
    for run in chosen[:MOST_DRAWN]:
        rounds = runs.read_whole(run.name).rounds
        curves.append(charts.PlotLine(run.name, [entry["t"] + 1 for entry in rounds],
            [entry["validation_loss"] for entry in rounds]))  # fmt: skip
    return {
        "title": f"{format_count(len(chosen), 'run')} compared",
        "runs": chosen,
        "wanted": [run.name for run in chosen] if wanted else [],
        "keys": keys,
        "x": x,
        "y": y,
        "scatter": charts.plot(x, [points], log_x=True) if both else None,
        "missing": len(chosen) - len(both),
        "columns": columns,
        "rows": [
            (run, [forms.get(key, _format)(values[run.name].get(key)) for key in columns])
            for run in chosen
        ],
        "curves": charts.plot("rounds done", curves),
        "drawn": len(curves),
    }


def _choose(query: Query, name: str, known: Sequence[str], default: str) -> str:
    found = query.get(name, [default])[0]
    return found if found in known else default


def _format(value: float | str | None) -> str:
    return value if isinstance(value, str) else format_number(value)


class BudgetField(NamedTuple):
    """A number of the budget page: its name and section in a plan, and the ends of its slider."""

    name: str
    section: str
    title: str
    low: float
    high: float
    is_whole: bool


FIELDS = (
    BudgetField("epsilon", "privacy", "budget ε of a client", 0.1, 100, False),
    BudgetField("delta", "privacy", "budget δ of a client", 1e-10, 1e-2, False),
    BudgetField("rounds", "rounds", "rounds T", 1, 10_000, True),
    BudgetField("clients", "data", "clients U", 1, 10_000, True),
    BudgetField("per_round", "rounds", "clients in a round K", 1, 10_000, True),
    BudgetField("samples", "data", "samples n of a client", 1, 1_000_000, True),
    BudgetField("clip", "local", "clipping norm C", 0.01, 100, False),
    BudgetField("learning_rate", "local", "step size η", 0.001, 100, False),
    BudgetField("parameters", "model", "parameters of the model", 1, 10_000_000, True),
)
CHOICES = {"unit": ("record", "person", "client"), "calibration": ("exact", "zcdp", "paper")}


def _list_settings(plan: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a plan says of the settings of the budget page."""
    found = {field.name: plan.get(field.section, {}).get(field.name) for field in FIELDS}
    known = {name: value for name, value in found.items() if isinstance(value, int | float)}
    words = {"unit": plan.get("local", {}), "calibration": plan.get("privacy", {})}
    return known | {name: words[name][name] for name in CHOICES if name in words[name]}


def show_budget(runs: RunsFolder, query: Query) -> dict[str, Any]:
    """Return what `sottovoce calibrate` says of the settings in the query."""
    given: dict[str, Any] = {name: query[name][0] for name in CHOICES if any(query.get(name, ()))}
    context = {"title": "What a budget buys", "fields": FIELDS, "choices": CHOICES, "fault": ""}
    try:
        for field in FIELDS:
            if text := query.get(field.name, [""])[0].strip():
                given[field.name] = _read_number(field, text)
        answer = calibrate(**given)
        epsilons = [float(f"{epsilon:.3g}") for epsilon in np.geomspace(0.1, 100, 13)]
        sigmas = [calibrate(**given | {"epsilon": epsilon}).sigma for epsilon in epsilons]
    except InputError as error:
        return {**context, "values": _list_settings(default_plan()) | given, "fault": str(error)}
    values = asdict(answer.request)
    values["per_round"] = given.get("per_round")  # else all clients, however many
    yours = charts.PlotLine("yours", [values["epsilon"]], [answer.sigma], "points")
    lines = [charts.PlotLine("noise σ", epsilons, sigmas), yours]
    noise = charts.plot("budget ε", lines, log_x=True)
    return {
        **context, "values": values, "answer": answer, "rows": list_noise(answer), "noise": noise,
    }  # fmt: skip


def _read_number(field: BudgetField, text: str) -> float:
    try:
        return int(text) if field.is_whole else float(text)
    except ValueError:
        bound = "a whole number" if field.is_whole else "a number"
        raise InputError.of(field.name, text, bound, f"it is the {field.title}") from None


PAGES: dict[str, Callable[[RunsFolder, Query], dict[str, Any]]] = {
    "runs": show_runs,
    "run": show_run,
    "compare": show_comparison,
    "budget": show_budget,
}


class WatchPages:
    """Renders the pages of a folder of runs; a page that nothing changed is rendered once."""

    def __init__(self, folder: Path, token: str) -> None:
        self.runs = RunsFolder(folder)
        self.token = token
        self._rendered: dict[Any, tuple[int, dict[str, str]]] = {}

    def render(self, page: str, query: Query) -> str:
        """Return a whole page."""
        return render_page(f"watch_{page}.html.j2", **self._describe(page, query))

    def render_regions(self, page: str, query: Query) -> dict[str, str]:
        """Return the live blocks of a page by their names."""
        self.runs.look()
        version = 0 if page == "budget" else self.runs.version  # no run changes that page
        key = page, json.dumps(dict(query))
        known = self._rendered.get(key)
        if known is None or known[0] != version:
            template = load_templates().get_template(f"watch_{page}.html.j2")
            context = template.new_context(self._describe(page, query))
            live = {name: block for name, block in template.blocks.items() if name[:5] == "live_"}
            known = version, {name: "".join(block(context)) for name, block in live.items()}
            if len(self._rendered) > MOST_PAGES:
                self._rendered = {}
            self._rendered[key] = known
        return known[1]

    def read_report(self, name: str) -> str | None:
        """Return the report in a run's folder; None where there is none."""
        self.runs.look()
        try:
            return (self.runs.read_whole(name).folder / "report.html").read_text("utf-8")
        except (RunError, OSError, UnicodeDecodeError):
            return None

    def _describe(self, page: str, query: Query) -> dict[str, Any]:
        return {
            **PAGES[page](self.runs, query),
            "m": load_templates().get_template("macros.html.j2").module,
            "parts": load_templates().get_template("watch_parts.html.j2").module,
            "root": f"/{self.token}",
            "page": page,
            "version": __version__,
            "format_time": lambda when: f"{datetime.fromtimestamp(when, UTC):%Y-%m-%d %H:%M:%S}",
        }


# The server.


_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; "
    "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
_REPORT_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; sandbox"
_HEADERS = {
    "Cache-Control": "no-store",
    "Referrer-Policy": "no-referrer",  # the address has the token
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
}


def build_app(
    watch: WatchPages, hosts: Sequence[str], is_over: Callable[[], bool] = lambda: False
) -> Starlette:
    """Build the web application; `hosts` are the Host headers that it answers."""
    from starlette.applications import Starlette
    from starlette.concurrency import run_in_threadpool
    from starlette.responses import Response, StreamingResponse
    from starlette.routing import Route

    def say(text: str, status: int, kind: str = "text/plain", policy: str = _POLICY) -> Response:
        headers = {**_HEADERS, "Content-Security-Policy": policy}
        return Response(text, status, headers, f"{kind}; charset=utf-8")

    async def send_changes(page: str, query: Query) -> AsyncIterator[str]:
        sent: dict[str, str] = {}
        while not is_over():
            try:
                found = await run_in_threadpool(watch.render_regions, page, query)
            except RunError as error:  # the run's folder was removed
                found = {"gone": str(error)}
            changed = {name: html for name, html in found.items() if sent.get(name) != html}
            sent |= changed
            # A comment shows the server whether the browser is still there.
            yield f"data: {json.dumps(changed)}\n\n" if changed else ":\n\n"
            await asyncio.sleep(TICK)

    async def answer(request: Request) -> Response:
        if request.headers.get("host") not in hosts:
            return say("This address is not served here.", 403)
        token, _, path = request.path_params["path"].partition("/")
        if not secrets.compare_digest(token.encode(), watch.token.encode()):
            return say("Open the address that sottovoce watch printed: its token is another.", 404)
        query = {key: request.query_params.getlist(key) for key in request.query_params}
        match path.split("/"):
            case ["watch.css"]:
                return say(render_page("watch.css.j2"), 200, "text/css")
            case ["watch.js"]:
                script = resources.files("sottovoce.reports").joinpath("templates", "watch.js")
                return say(script.read_text("utf-8"), 200, "text/javascript")
            case ["run", name, "report.html"]:
                report = await run_in_threadpool(watch.read_report, name)
                if report is not None:
                    return say(report, 200, "text/html", _REPORT_POLICY)
            case ["events", *page]:
                if (found := _find_page(page, query)) is not None:
                    stream = send_changes(*found)
                    return StreamingResponse(stream, 200, _HEADERS, "text/event-stream")
            case page if (found := _find_page(page, query)) is not None:
                try:
                    html = await run_in_threadpool(watch.render, *found)
                    return say(html, 200, "text/html")
                except RunError as error:
                    return say(f"{error}.", 404)
        return say("There is no such page; go back to the list of runs.", 404)

    return Starlette(routes=[Route("/{path:path}", answer)])


def _find_page(parts: list[str], query: Query) -> tuple[str, Query] | None:
    match parts:
        case [""]:
            return "runs", query
        case ["run", name]:
            return "run", {**query, "name": [name]}
        case [("compare" | "budget") as page]:
            return page, query
    return None


def serve(folder: Path, port: int = 0, say: Callable[[str], None] = print) -> None:
    """Serve the pages of a folder of runs until Ctrl-C; `say` is given the address."""
    if not folder.is_dir():
        remedy = "name the folder that the runs are in"
        raise InputError.of("RUNS", str(folder), "a folder", remedy)
    if not 0 <= port <= 65535:
        raise InputError.of("port", port, "a whole number from 0 to 65535", "0 takes a free one")
    for package in ("starlette", "uvicorn"):
        if importlib.util.find_spec(package) is None:
            raise InputError(
                f"watch needs {package}, which is not installed; "
                "install sottovoce with its extra: pip install '.[watch]'"
            )
    import uvicorn

    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("127.0.0.1", port))
            listener.listen()  # a browser may come as soon as the address is printed
        except OSError as error:
            remedy = f"{error.strerror}: name another, or leave --port out"
            raise InputError.of("port", port, "a port that is free", remedy) from None
        port = listener.getsockname()[1]
        watch = WatchPages(folder, secrets.token_urlsafe(24))
        hosts = [f"{host}:{port}" for host in ("127.0.0.1", "localhost")]
        app = build_app(watch, hosts, lambda: server.should_exit)
        off: Any = dict.fromkeys(("access_log", "server_header", "proxy_headers"), False)
        off |= {"lifespan": "off", "log_config": None, "ws": "none"}
        server = uvicorn.Server(uvicorn.Config(app, **off, timeout_graceful_shutdown=2))
        say(f"http://127.0.0.1:{port}/{watch.token}/")
        with suppress(KeyboardInterrupt):  # the only way to end it
            server.run(sockets=[listener])
