"""The page of a run: its record and trace, checked and turned into arrays, then rendered.

A damaged record is refused in one sentence before anything is drawn. A loss that is not a finite
number is null in a record, and NaN here.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Self

import numpy as np
from markupsafe import Markup
from numpy.typing import NDArray

from sottovoce.data.files import DAMAGE, read_npz, why
from sottovoce.errors import RunError
from sottovoce.models import metrics
from sottovoce.privacy import calibration as calibrations
from sottovoce.privacy import gaussian
from sottovoce.privacy.budget import (
    LEAKS,
    NOT_COVERED,
    THIS_RUN_ONLY,
    TRAINING_ONLY,
    describe_undisclosed,
    round_up,
)
from sottovoce.privacy.gaussian import Floats
from sottovoce.reports import charts
from sottovoce.reports.pages import (
    format_ceiling,
    format_count,
    format_duration,
    format_number,
    format_percent,
    format_whole,
    render_page,
)
from sottovoce.reports.progress import SIMULATED, find_multiplier
from sottovoce.runs.record import AGAIN, ClientEntry, MetricEntry, Record, RoundEntry
from sottovoce.schemas import GuaranteeEntry

IN_SIMULATION_ONLY = (
    "Simulation of what no deployment does (see what is not covered); "
    "do not publish this model as private."
)
_MOST_LISTED = 200  # clients in the table
_MOST_GROUPS = 12  # budget groups; more distinct budgets are gathered into this many


@dataclass(frozen=True)
class Clients:
    """One number a client in each array; `capacity` and `spent` in μ²."""

    samples: Floats
    epsilon: Floats
    delta: Floats
    sensitivity: Floats
    participations: Floats
    capacity: Floats
    spent: Floats
    used: Floats  # the part of each tank that is spent, from 0 to 1; NaN where a client keeps it


@dataclass(frozen=True)
class CheckedRun:
    """One run. `loss` and `accuracy` have one value more than there are rounds: before the first.

    `clients` is None where there are none.
    """

    record: Record
    guarantee: GuaranteeEntry  # ε and δ are NaN where every client keeps its budget to itself
    disclosed: bool  # whether a client discloses its budget, so that there is an ε to state
    loss: Floats
    accuracy: Floats
    score: Floats  # the plan's metric, NaN where the record does not have it by round
    used: int  # rounds
    planned: int  # T₀: the rounds of the plan, or else the horizon of the first round
    horizon: NDArray[np.int64]
    next_horizon: NDArray[np.int64]
    triggers: NDArray[np.int64]  # rounds done when the horizon shrank
    sigma: Floats  # one row a round: least, median, most
    confusion: NDArray[np.int64] | None  # [true class, class it was taken for]
    clients: Clients | None
    who: list[dict[str, Any]]  # who the clients of a federation are; empty in simulation
    trace: Mapping[str, Any]

    @classmethod
    def of(cls, record: Record | Mapping[str, Any], trace: Mapping[str, Any] | None = None) -> Self:
        """Return the run that a record describes; refuse figures that do not belong together.

        >>> CheckedRun.of({"schema": "something else"})
        Traceback (most recent call last):
            ...
        sottovoce.errors.RunError: record.json must have schema "sottovoce.record/1", got \
'something else'; use the version of sottovoce that wrote it
        """
        record = record if isinstance(record, Record) else Record.parse(record)
        trace = trace or {}
        with _refuse_damage():
            rounds, guarantee = record.rounds, record.guarantee or _replace_guarantee(record)
            if odd := [name for name in trace if np.asarray(trace[name]).dtype.kind not in "fiu"]:
                raise ValueError(f"{odd[0]} of trace.npz holds no numbers")
            epsilon, delta = guarantee["epsilon"], guarantee["delta"]
            if record.guarantee is not None and not (1e-6 <= epsilon <= 1e13 and 0 < delta < 1):
                raise ValueError(f"({epsilon}, {delta}) is no (ε, δ)")
            clients = _convert_clients(record.clients, trace)
            many = None if clients is None else len(clients.samples)
            if many and any(max(e.get("cohort", ()), default=0) >= many for e in rounds):
                raise ValueError(f"a cohort names a client beyond the {many} there are")
            for name in {"sigma", "mu2"} & trace.keys() if many else ():
                if (found := np.shape(trace[name])) != (len(rounds), many):
                    raise ValueError(
                        f"{name} of trace.npz has shape {found}, not {len(rounds), many}"
                    )
            confusion = np.array(record.result.get("confusion", np.zeros((0, 0))), dtype=np.int64)
            if confusion.ndim != 2 or confusion.shape[0] != confusion.shape[1]:
                raise ValueError(f"the confusion matrix has shape {confusion.shape}")
            states, spreads = [record.initial, *rounds], [entry["sigma"] for entry in rounds]
            horizon = np.array([entry["horizon"] for entry in rounds], np.int64)
            # The rule is applied after the last round too, where it may end below the rounds done.
            next_horizon = np.array([max(e["next_horizon"], e["t"] + 1) for e in rounds], np.int64)
            planned = record.plan["rounds"].get("rounds")
            if not isinstance(planned, int):
                planned = int(horizon[0]) if rounds else 0
            return cls(
                record=record,
                guarantee=guarantee,
                disclosed=record.guarantee is not None,
                loss=_column(states, "validation_loss"),
                accuracy=_column(states, "validation_accuracy"),
                score=_restore_scores(record),
                used=len(rounds),
                planned=planned,
                horizon=horizon,
                next_horizon=next_horizon,
                triggers=np.flatnonzero(next_horizon < horizon) + 1,
                sigma=np.stack([_column(spreads, key) for key in ("min", "median", "max")], axis=1),
                confusion=confusion if confusion.size else None,
                clients=clients,
                who=_identify_clients(record.clients, rounds),
                trace=trace,
            )

    def charges(self) -> Iterator[Floats] | None:
        """What every client was charged (μ²), round by round; None without a trace.

        Row by row, because the whole array of a large run would be copied several times over.
        """
        if self.clients is None:
            return None
        if "mu2" in self.trace:  # several releases in a round: σ alone does not tell the charge
            return (np.nan_to_num(row) for row in np.asarray(self.trace["mu2"]))
        if "sigma" not in self.trace:
            return None
        delta = self.clients.sensitivity
        return (np.nan_to_num((delta / row) ** 2) for row in np.asarray(self.trace["sigma"]))

    def list_turns(self) -> list[tuple[float, float]]:
        """Return the turns of every client and their Σμ²; NaN where it hides its budget.

        What a client has spent includes earlier runs of its vault, which the trace does not.
        """
        if self.clients is None:
            return []
        charges, spent = self.charges(), self.clients.spent
        if charges is not None:
            with np.errstate(all="ignore"):  # of damaged figures
                spent = sum(charges, start=np.zeros(len(spent)))
        spent = np.where(np.isfinite(self.clients.capacity), spent, math.nan)
        return list(zip(self.clients.participations.tolist(), spent.tolist(), strict=True))

    def fuel(self) -> Floats | None:
        """The part of the tanks that is left before and after each round: least, median, most.

        Counted back from what is spent in the end, so that fuel used by earlier runs of the same
        clients is seen to be gone from the start.
        """
        forwards, again = self.charges(), self.charges()
        if self.clients is None or forwards is None or again is None:
            return None
        known = np.isfinite(self.clients.capacity)
        if not known.any():
            return None
        nothing = np.zeros(len(self.clients.spent))
        rows = []
        with np.errstate(over="ignore", divide="ignore"):  # σ = 0 empties a tank at once
            spent = np.maximum(self.clients.spent - sum(forwards, start=nothing), 0.0)
            for charge in itertools.chain([nothing], again):
                spent = spent + charge
                left = np.clip(1 - spent[known] / self.clients.capacity[known], 0.0, 1.0)
                rows.append((left.min(), np.median(left), left.max()))
        return np.asarray(rows, dtype=np.float64)

    def attacker_mu(self) -> float:
        """μ of the best attack on the client that is protected least; NaN if no budget is known.

        The capacity is the cap for `exact` and `zcdp`. Under `paper` it is read back from the
        (ε, δ) that holds: what a run happened to release is no bound, since its length and its
        noise were chosen on the way.
        """
        if not self.disclosed:
            return math.nan
        epsilon, delta = self.guarantee["epsilon"], self.guarantee["delta"]
        kind = self.guarantee["calibration"]
        if kind == "paper":
            return float(gaussian.mu(epsilon, delta))
        if self.clients is not None:
            return math.sqrt(float(np.nanmax(self.clients.capacity)))
        return math.sqrt(float(calibrations.capacity(epsilon, delta, calibration=kind)))


@contextmanager
def _refuse_damage() -> Iterator[None]:
    """While the figures of a run are used: say in one sentence what is wrong with them."""
    from jinja2 import UndefinedError

    try:
        with np.errstate(all="ignore"):  # of damaged figures
            yield
    except KeyError as error:
        raise RunError(f"record.json is damaged, it lacks {error}; {AGAIN}") from error
    except (*DAMAGE, UndefinedError) as error:
        raise RunError(f"record.json or trace.npz is damaged ({why(error)}); {AGAIN}") from error


def read_run(folder: Path) -> CheckedRun:
    """Read and check the run in a folder: record.json, and trace.npz if it is there."""
    record, path = Record.read(folder), folder / "trace.npz"
    try:
        trace = read_npz(path) if path.exists() else None
    except (OSError, ValueError) as error:
        raise RunError(
            f"{path} is damaged ({why(error)}); remove it to get the page without the "
            f"course of the fuel, or {AGAIN}"
        ) from error
    return CheckedRun.of(record, trace)


def _convert_clients(entries: list[ClientEntry] | None, trace: Mapping[str, Any]) -> Clients | None:
    names = [field.name for field in fields(Clients) if field.name != "used"]
    if entries is not None:
        columns = {name: _column(entries, name) for name in names}
    elif all(f"clients_{name}" in trace for name in names):
        columns = {name: np.asarray(trace[f"clients_{name}"], np.float64) for name in names}
    else:
        return None
    capacity, spent = columns["capacity"], columns["spent"]
    if len({column.shape for column in columns.values()}) != 1 or not len(capacity):
        raise ValueError("clients must be at least one, each with all of its figures")
    hidden = np.isnan(capacity) & np.isnan(spent) & np.isnan(columns["epsilon"])
    if not np.all(hidden | ((capacity > 0) & (spent >= 0))):
        raise ValueError("every client needs a capacity > 0, of which it has spent ≥ 0")
    with np.errstate(over="ignore"):
        return Clients(**columns, used=np.clip(spent / capacity, 0.0, 1.0))


def _identify_clients(
    entries: list[ClientEntry] | None, rounds: list[RoundEntry]
) -> list[dict[str, Any]]:
    """Return who each client of a federation is, and what the server had to say of it."""
    if not entries or "name" not in entries[0]:
        return []
    absences = Counter(absence for entry in rounds for absence in entry.get("missing", {}).items())
    found = []
    for entry in entries:
        remarks = [f"{reason} in {n} of {len(rounds)} rounds"
                   for (name, reason), n in absences.items() if name == entry["name"]]  # fmt: skip
        if "limited" in entry:
            remarks.append(entry["limited"])
        found.append({**entry, "remarks": "; ".join(remarks)})
    return found


def _replace_guarantee(record: Record) -> GuaranteeEntry:
    """Return what stands for a guarantee where every client keeps its budget to itself."""
    codes = record.not_covered or []
    return {
        "epsilon": math.nan,
        "delta": math.nan,
        "unit": record.plan["local"]["unit"],
        "adjacency": "replace-one",
        "adversary": "server",
        "calibration": record.plan["privacy"]["calibration"],
        "not_covered": codes,
        "text": describe_undisclosed(codes),
    }


def _restore_scores(record: Record) -> Floats:
    """Return the plan's metric before the first and after every round, on the validation rows."""
    metric, states = record.plan.get("metric"), [record.initial, *record.rounds]
    if metric not in metrics.TITLES or record.plan["server"].get("signal") != "public":
        return np.full(len(states), math.nan)
    target = None if record.model is None else record.model.get("target")
    unit = 1.0 if target is None else (target["high"] - target["low"]) / 2
    signals = [_to_float(state.get("signal")) for state in states]
    return np.array([metrics.restore_metric(metric, signal, unit) for signal in signals])


def _column(rows: Sequence[Any], key: str) -> Floats:
    return np.array([_to_float(row[key]) for row in rows], dtype=np.float64)


def _to_float(value: float | None) -> float:
    """Return the number, or NaN for what is absent or not finite."""
    return float(value) if value is not None and math.isfinite(value) else math.nan


# The page.


def write_report(folder: Path) -> Path:
    """Read a run folder, write its report.html, and return the path of the page."""
    folder = Path(folder)
    page = _render(read_run(folder))
    path = folder / "report.html"
    try:
        path.write_text(page, "utf-8")
    except OSError as error:
        raise RunError(
            f"{path} cannot be written ({error.strerror}); check the folder's permissions"
        ) from error
    return path


def render_report(record: Mapping[str, Any], trace: Mapping[str, Any] | None = None) -> str:
    """Return the page of a record, and of its trace.npz if there is one; nothing is read."""
    return _render(CheckedRun.of(record, trace))


def render_card(record: Mapping[str, Any], folder: Path | None = None) -> str:
    """Return headline, guarantee, loss curve and a link to the page, for a notebook."""
    run = CheckedRun.of(record)
    page = None if folder is None else folder / "report.html"
    link = Markup("")
    if page is not None and page.exists():
        link = Markup('<p><a href="{}">{}</a></p>').format(page.resolve().as_uri(), page)
    view = run.record.model_view
    said = [run.guarantee["text"], *([] if view is None else [view["text"]])]
    return Markup(
        '<div style="max-width: 42em"><p><strong>{}</strong></p><p>{}</p>'
        '<div style="max-width: 28em">{}</div>{}</div>'
    ).format(describe_run(run), " ".join(said), charts.draw_loss(run), link)


@_refuse_damage()
def _render(run: CheckedRun) -> str:
    mu, headline, record = run.attacker_mu(), describe_run(run), run.record
    codes, result = run.guarantee["not_covered"], record.result
    found, area = (round_up(float(v), 3) for v in (gaussian.tpr(0.01, mu), gaussian.auc(mu)))
    clients = run.clients if run.disclosed else None
    return render_page(
        "run.html.j2",
        title=headline,
        headline=headline,
        banner=choose_banner(record.noise, codes),
        version=record.versions.get("sottovoce", ""),
        run=run,
        record=record,
        guarantee=run.guarantee,
        tiles=_list_tiles(run),
        asked_epsilon=find_asked_epsilon(run),
        leaks=[NOT_COVERED[code] for code in LEAKS if code in codes],
        tighter=count_tighter_budgets(run),
        kind="training data" if {*TRAINING_ONLY} & {*codes} else "data",
        used=None if clients is None else float(np.nanmax(clients.used)),
        attacker={"found": found, "area": area} if run.disclosed else None,
        this_run_only=bool({*THIS_RUN_ONLY} & {*codes}),
        not_covered=[NOT_COVERED.get(code, code) for code in codes],
        charts=_draw_charts(run, mu),
        metrics=_list_metrics(run),
        unequal=_has_unequal_classes(run),
        curves=_draw_curves(run),
        confusion=_list_confusion(run),
        epsilon_name="ε asked for" if run.guarantee["calibration"] == "paper" else "ε",
        budgets=_list_budgets(run),
        by_client=[
            [
                entry.get("name", f"{entry['client']}"),
                format_whole(entry["rows"]),
                *_format_pair(result["headline"]["metric"], entry),
                format_percent(entry["accuracy"]),
            ]
            for entry in result.get("fairness", {}).get("by_client", ())
        ],
        metric_title=metrics.TITLES[result["headline"]["metric"]] if "headline" in result else "",
        clients=_list_clients(run),
    )


def choose_banner(noise: str, not_covered: Sequence[str]) -> str:
    """Return what a page of a simulation says above everything else; empty for secure noise."""
    if noise != "simulated":
        return ""
    only = any(code in not_covered for code in ("paper-calibration", *LEAKS))
    return IN_SIMULATION_ONLY if only else SIMULATED


def describe_run(run: CheckedRun) -> str:
    """Return status, accuracy, data and model, rounds and ε in one sentence."""
    data, model = run.record.plan["data"], run.record.plan["model"]
    guarantee, result = run.guarantee, run.record.result
    dataset = str(data.get("name") or Path(data.get("path") or "your data").name)
    name = model.get("name")
    if name == "softmax" and "loss" in model:  # a number is predicted
        name = "linear"
    with_model = f"model {name}" if name else "your model"
    after = f"after {run.used:,} of {format_count(run.planned, 'round')}"
    up_to = "up to" if count_tighter_budgets(run) else "="
    holds = f"ε {up_to} {format_ceiling(guarantee['epsilon'])}"
    if not run.disclosed:
        holds = "budgets that the clients keep to themselves"
    asked = find_asked_epsilon(run)
    if asked is not None:
        holds += f" ({format_number(asked)} was asked for)"
    if run.disclosed and "undisclosed-budgets" in guarantee["not_covered"]:
        holds += " for the clients that disclose it"
    if any(code in guarantee["not_covered"] for code in LEAKS):
        holds += ", but for what it does not cover"
    caveat = ""
    if "headline" in result:
        reached, _, but = result["headline"]["text"].replace("%", "\u00a0%").partition(", but ")
        caveat = f" {but[:1].upper()}{but[1:]}." if but else ""
    elif (accuracy := result["test_accuracy"]) is not None:
        reached = f"{format_percent(accuracy)} test accuracy"
    else:
        reached = "no test accuracy"
    status = run.record.status.capitalize()
    return f"{status}: {reached} on {dataset}, {with_model}, {after}, at {holds}.{caveat}"


def _list_tiles(run: CheckedRun) -> list[tuple[str, str]]:
    clients = run.record.plan["data"].get("clients")
    if run.clients is not None:
        clients = len(run.clients.samples)
    result = run.record.result
    head = [("test accuracy", format_percent(result["test_accuracy"]))]
    if "headline" in result:
        name = result["headline"]["metric"]
        value, baseline = _format_pair(name, result["headline"])
        head = [(f"{metrics.TITLES[name]} ({metrics.describe_constant(name)}: {baseline})", value)]
    loss = "test loss" + ", before calibration" * ("calibration" in result)
    return [
        *head,
        (loss, format_number(result["test_loss"], 3)),
        (f"rounds used of at most {run.planned:,}", f"{run.used:,}"),
        ("clients", f"{clients:,}" if isinstance(clients, int) else "–"),
        ("time", format_duration(run.record.timing["seconds"])),
    ]


def count_tighter_budgets(run: CheckedRun) -> int:
    """Return how many clients have another budget than the loosest, whose (ε, δ) the page shows."""
    clients = run.clients
    if clients is None or not run.disclosed:
        return 0
    loosest = (run.guarantee["epsilon"], run.guarantee["delta"])
    if run.guarantee["calibration"] == "paper":  # what holds is not what was asked for
        most = int(np.nanargmax(clients.capacity))
        loosest = (clients.epsilon[most], clients.delta[most])
    known = np.isfinite(clients.epsilon)
    return int((known & ((clients.epsilon != loosest[0]) | (clients.delta != loosest[1]))).sum())


def find_asked_epsilon(run: CheckedRun) -> float | None:
    """Return the largest ε that was asked for, if another one holds (`paper` only)."""
    if run.guarantee["calibration"] != "paper":
        return None
    asked = run.record.plan["privacy"].get("epsilon")
    if run.clients is not None:
        asked = float(np.nanmax(run.clients.epsilon))
    is_number = isinstance(asked, int | float) and not isinstance(asked, bool)
    return asked if is_number and asked != run.guarantee["epsilon"] else None


def _draw_charts(run: CheckedRun, mu: float) -> list[tuple[str, str, str]]:
    """Return title, caption and drawing of each chart."""
    drawn: list[tuple[str, str, str]] = []
    if run.used:
        marked = " Dotted lines: T shrank." if 0 < len(run.triggers) <= 60 else ""
        drawn.append(("Validation loss", _describe_loss(run) + marked, charts.draw_loss(run)))
        sigma = "Standard deviation on one coordinate of one upload."
        if (ratio := find_multiplier(run.record.plan["privacy"], run.list_turns())) is not None:
            sigma += f" Noise multiplier σ/Δ (one turn, median client): {ratio:.3g}."
        drawn += [
            *_draw_accuracy(run, marked),
            ("The horizon", _describe_horizon(run), charts.draw_horizon(run)),
            ("Noise", sigma, charts.draw_noise(run)),
        ]
        left = run.fuel()
        if left is not None:
            caption = "What is left of the clients’ budgets, as Σ μ²."
            drawn.append(("Fuel left", caption, charts.draw_fuel(left, run)))
    if run.disclosed:
        caption = "The most any attacker finds, against its false alarms."
        drawn.append(("The attacker’s view", caption, charts.draw_attacker(mu)))
    return drawn


def _describe_loss(run: CheckedRun) -> str:
    """Say whose validation loss it is, and whether it decides the number of rounds."""
    plan = run.record.plan
    signal, is_tested = plan["server"].get("signal"), plan["data"].get("validation") == 0
    own_schedule = any(part.startswith("schedule:") for part in plan.get("parts") or ())
    is_steered = plan["rounds"].get("schedule") == "discounted" or own_schedule
    rows = "On the test rows" if is_tested else "On unprotected records"
    if is_steered and signal in ("clients", "raw"):
        return f"{rows}. The schedule watches the clients’ own losses instead."
    if is_steered and is_tested:
        return f"{rows}, which steer this run as in the paper: the test is no fresh one."
    if "metric" in plan and signal == "public":
        metric = metrics.TITLES[plan["metric"]].removeprefix("test ")
        return f"The plan is judged by {metric} on the same rows instead."
    return "What the schedule watches." if is_steered else f"{rows}."


def _draw_accuracy(run: CheckedRun, marked: str) -> list[tuple[str, str, str]]:
    metric, caption = "accuracy", f"On unprotected records.{marked}"
    if np.isfinite(run.score).any():
        metric = run.record.plan["metric"]
    elif not np.isfinite(run.accuracy).any():  # a number is predicted
        return []
    elif run.record.result.get("headline", {"metric": metric})["metric"] != metric:
        caption += " The metric of the heading is computed at the end only."
    title = f"Validation {metrics.TITLES[metric].removeprefix('test ')}"
    values = run.accuracy if metric == "accuracy" else run.score
    return [(title, caption, charts.draw_score(run, title, metric, values))]


def _describe_horizon(run: CheckedRun) -> str:
    times, rounds = len(run.triggers), run.record.plan["rounds"]
    if rounds.get("schedule") == "forecast":
        found = run.record.result.get("forecast", {"step": 1.0})  # older records tell no step
        return (
            "T and the length of steps were forecast on public rows before the first round: "
            f"T = {run.next_horizon[-1]:,} of at most {rounds.get('rounds')}, "
            f"steps × {found['step']:g}."
        )
    if not times:
        return "T, the number of rounds planned, did not change."
    often = "once" if times == 1 else f"{times} times"
    return f"Learning stopped paying: T shrank {often}, to {run.next_horizon[-1]:,}."


def _format_pair(name: str, entry: MetricEntry) -> tuple[str, str]:
    """Return a metric and that of the constant answer as they are read."""
    value, baseline = (
        metrics.format_metric(name, _to_float(number)).replace("%", "\u00a0%")
        for number in (entry["value"], entry["baseline"])
    )
    return value, baseline


def _list_metrics(run: CheckedRun) -> list[list[str]]:
    result = run.record.result
    less = metrics.LESS_IS_BETTER
    fitted = {"log_loss", "brier"} if "calibration" in result else set()
    return [
        [
            metrics.TITLES[name]
            + ", calibrated" * (name in fitted)
            + " (less is better)" * (name in less),
            *_format_pair(name, entry),
            _format_pair(name, entry | {"value": entry["error"]})[0].replace("%", "points")
            if name in metrics.SHARES
            else format_number(entry["error"], 2),
        ]
        if name in metrics.TITLES
        else [f"{name} (given from Python)", format_number(entry["value"]), "–", "–"]
        for name, entry in result.get("metrics", {}).items()
    ]


def _has_unequal_classes(run: CheckedRun) -> bool:
    """Return whether test rows are so unequal that accuracy misleads, and weights could help."""
    share = run.record.result.get("metrics", {}).get("accuracy", {"baseline": None})["baseline"]
    classes, plan = 0 if run.confusion is None else len(run.confusion), run.record.plan
    weighted = "class_weights" in plan["model"] or plan["local"].get("unit") == "person"
    return not weighted and classes > 1 and metrics.is_unequal(_to_float(share), classes)


def _draw_curves(run: CheckedRun) -> list[tuple[str, str, str]]:
    """Return title, caption and drawing of what the test rows show of the probabilities."""
    result, names = run.record.result, run.record.class_names
    if "curves" not in result:
        return []
    curves, subject = result["curves"], "the most likely class"
    if run.record.model is not None and run.record.model["classes"] == 2:
        subject = "the class that no test row has"  # unless both have rows
    lines: Mapping[str, Any] = {}
    if "positive" in curves:
        k = curves["positive"]
        subject = f"“{names[k]}”" if k < len(names) else f"class {k}"
        lines, title = {"model": curves}, "ROC curve"
        roc_caption = f"How much of {subject} is found, by threshold."
        pr_caption = f"Of those called {subject}, the share that is."
    elif by_class := curves.get("by_class"):
        named = dict(enumerate(names))
        lines = {named.get(c["positive"], f"class {c['positive']}"): c for c in by_class}
        rarest = "" if len(by_class) == len(names) else f"the rarest {len(by_class)}, "
        title, versus = "ROC curves", f"({rarest}each against all others)"
        roc_caption = f"How much of a class is found {versus}."
        pr_caption = (
            f"Of those called a class, the share that is {versus}; dashed: the mean of a constant "
            "answer, which has the share of the class."
        )
    drawn = []
    if lines:
        share = _to_float(result["metrics"]["auprc"]["baseline"])
        roc = charts.draw_roc({name: curve["roc"] for name, curve in lines.items()})
        pr = charts.draw_precision({name: curve["pr"] for name, curve in lines.items()}, share)
        drawn = [(title, roc_caption, roc), ("Precision and recall", pr_caption, pr)]
    how = "as the scores give them: too few validation rows of a class to calibrate"
    if "calibration" in result:
        how = f"calibrated on {format_count(result['calibration']['rows'], 'validation row')}"
    caption = f"Probabilities of {subject} against what came true; {how}."
    return [*drawn, ("Reliability", caption, charts.draw_reliability(curves["reliability"]))]


def _list_confusion(run: CheckedRun) -> list[tuple[str, list[tuple[int, float]], float]]:
    """Return name, (count, share) of each class it was taken for, and the share that is right."""
    table, names = run.confusion, run.record.class_names
    if table is None or not table.sum():
        return []
    names = names if len(names) == len(table) else [str(i) for i in range(len(table))]
    shares = table / np.maximum(1, table.sum(axis=1, keepdims=True))
    return [
        (name, list(zip(counts.tolist(), row.tolist(), strict=True)), float(row[i]))
        for i, (name, counts, row) in enumerate(zip(names, table, shares, strict=True))
    ]


def _list_budgets(run: CheckedRun) -> list[list[str]]:
    clients = run.clients
    if clients is None or not run.disclosed:
        return []
    groups = group_by_budget(clients)
    if len(groups) < 2:
        return []
    return [
        [
            _format_range(clients.epsilon[group], format_ceiling),
            _format_range(clients.delta[group], format_ceiling),
            f"{len(group):,}",
            _format_range(clients.participations[group]),
            format_percent(float(np.median(clients.used[group]))),  # NaN where a client keeps it
            format_percent(float(clients.used[group].max())),
        ]
        for group in groups
    ]


def group_by_budget(clients: Clients) -> list[np.ndarray[Any, np.dtype[np.int64]]]:
    """Return the clients' indices by budget, tightest first; many budgets are gathered."""
    order = np.lexsort((clients.delta, clients.epsilon))
    pairs = np.stack((clients.epsilon, clients.delta), axis=1)[order]
    pairs = np.nan_to_num(pairs, nan=np.inf)  # who keeps its budget to itself is one group, last
    changes = np.flatnonzero(np.any(pairs[1:] != pairs[:-1], axis=1)) + 1
    if len(changes) < _MOST_GROUPS:
        return np.split(order, changes)
    return np.array_split(order, _MOST_GROUPS)


def _format_range(values: Any, form: Callable[[float], str] = format_number) -> str:
    low, high = form(float(values.min())), form(float(values.max()))
    return low if low == high else f"{low} to {high}"


def _list_clients(run: CheckedRun) -> list[tuple[Any, ...]]:
    """Return one row a client: its name or number, its figures, and the part that is spent."""
    if run.clients is None or len(run.clients.samples) > _MOST_LISTED:
        return []
    names = [who["name"] for who in run.who] or range(len(run.clients.samples))
    return list(zip(names, *vars(run.clients).values(), strict=True))
