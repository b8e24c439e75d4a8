"""What happened in a run: its folder, and `Record`, the content of its `record.json`.

record.json   everything below in plain JSON; NaN and infinities are null
model.npz     the parameters, no pickle
trace.npz     sigma[rounds_used, clients], NaN where nothing was charged (of the first of several
              local steps); with several releases a round also mu2, what was booked; of more than
              10,000 clients sigma_all[clients] instead, one release worth those of the first
              steps of all rounds, and mu2_all[clients], what was booked for everything
splits.npz    the rows of each client, of validation and test
rounds.jsonl  one line a round while it runs
report.html   the page
"""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NotRequired, Self, cast

import numpy as np
from numpy.typing import NDArray
from pydantic import AfterValidator, BaseModel, BeforeValidator, Field, ValidationError
from typing_extensions import TypedDict

from sottovoce._version import __version__
from sottovoce.data.files import why, write_file, write_npz
from sottovoce.errors import RunError
from sottovoce.plan.base import to_whole
from sottovoce.privacy.calibration import add_smallest
from sottovoce.runs.checkpoint import MANY_CLIENTS, ServerState
from sottovoce.schedules.aggregate import describe
from sottovoce.schedules.algorithms import ForecastRounds
from sottovoce.schemas import (
    STRICT,
    AtLeastOne,
    Count,
    Delta,
    GuaranteeEntry,
    ModelView,
    NotCovered,
    NotNegative,
    Positive,
    Sha256,
    Share,
    TableEntry,
)

if TYPE_CHECKING:
    from sottovoce.server.federation import Federation

SCHEMA: Literal["sottovoce.record/1"] = "sottovoce.record/1"
AGAIN = "restore the file, or run the plan again into a new folder"
ROUNDS = "rounds.jsonl"
MOST_NAMED = 200  # clients whose results are listed
MOST_CONFUSED = 20  # classes whose confusion matrix is kept: a larger one nobody reads
SECTIONS = ("data", "model", "local", "privacy", "rounds", "server")  # of every plan
Parameters = dict[str, NDArray[Any]]
Status = Literal["finished", "interrupted", "failed"]


# The parts of a record are plain dictionaries while a run goes on: a round has no time for more.


#: 143 for 143.0: where a client keeps its numbers to itself, they are floats.
Whole = Annotated[Count, BeforeValidator(to_whole)]


class NumberTarget(TypedDict):
    """A number that is predicted: its loss, and its public range."""

    loss: str  #: squared, huber, or own: that of a custom model.
    low: float
    high: float


class ModelEntry(TypedDict):
    """The form of the model, needed to load it."""

    shape: list[AtLeastOne]  #: Of one sample.
    classes: AtLeastOne
    parameters: Count  #: How many numbers are trained.
    target: NotRequired[NumberTarget]  #: What is predicted, where it is a number and not a class.
    #: The names of the classes, in their order, where the labels of arrays were not 0, 1, …
    labels: NotRequired[list[str]]


class Initial(TypedDict):
    """The model before the first round."""

    validation_loss: float | None  #: Null where it is not finite, as in every round.
    validation_accuracy: Share | None
    signal: NotRequired[float | None]


class SigmaSpread(TypedDict):
    """Noise of one coordinate of one upload, over the clients charged that disclose it."""

    min: NotNegative | None
    median: NotNegative | None
    max: NotNegative | None


class RoundNumbers(TypedDict):
    """What every engine says of a round."""

    t: Count  #: From 0.
    horizon: Count  #: T while the round ran.
    next_horizon: Count  #: T after the round.
    #: The clients that took part, sorted, from 0; absent above 10,000 clients.
    cohort: NotRequired[list[Count]]
    uploads: NotRequired[AtLeastOne]  #: How many clients took part.
    sigma: SigmaSpread
    validation_loss: float | None
    validation_accuracy: Share | None
    #: What steered, where it is not the validation loss: the clients' own losses, noised (of the
    #: model received) or raw; or on the validation rows what is missing of the plan's metric.
    signal: NotRequired[float | None]


class Exceptions(TypedDict, total=False):
    """What a federation says of a round in which not every client counted in full."""

    asked: list[Count]  #: Whom the server asked, where not everyone answered with an upload.
    #: Why answers did not count, and how many: a client's own code, silent, malformed, or samples
    #: (its records changed since it greeted: it paid for this upload, and is not asked again).
    refused: dict[str, AtLeastOne]
    missing: dict[str, str]  #: The same by the names of the clients.
    #: Clients of this round, by name, whose uploads count for fewer samples than they declare, and
    #: why.
    limited: dict[str, str]


class RoundEntry(RoundNumbers, Exceptions):
    """One round."""


class Quartiles(TypedDict):
    """Accuracy by client."""

    min: Share | None
    q1: Share | None
    median: Share | None
    q3: Share | None
    max: Share | None


class BudgetGroup(TypedDict):
    """The clients that have the same budget."""

    epsilon: Positive
    delta: Positive
    clients: AtLeastOne
    rows: AtLeastOne
    accuracy: Share | None


class MetricEntry(TypedDict):
    """One metric on the test rows; null where it is not known."""

    value: float | None
    #: Of a constant answer on the same rows: the most frequent class (for probabilities the shares
    #: of the classes), or the mean.
    baseline: float | None
    error: float | None  #: The standard error of the difference between the two on so many rows.


class ClientResult(MetricEntry):
    """The metric of the headline on a client's test rows, which the plan declares public."""

    client: Count
    name: NotRequired[str]
    rows: AtLeastOne
    accuracy: Share | None


class Fairness(TypedDict):
    """Accuracy on test rows that clients declared public, or why it is not shown."""

    shown: bool
    why: NotRequired[str]
    clients: NotRequired[AtLeastOne]
    accuracy: NotRequired[Quartiles]
    by_budget: NotRequired[list[BudgetGroup]]
    #: Only where data.evaluation = "public", and for at most 200 clients.
    by_client: NotRequired[list[ClientResult]]


class Headline(MetricEntry):
    """The metric that fits the task: the plan's, or else by the rule of docs/results.md."""

    metric: str
    #: Whether it is better than the constant answer by more than two standard errors.
    is_better: bool
    text: str  #: What heads terminal and page.


class CalibrationEntry(TypedDict):
    """How scores become logits, s/T + b, fitted on the validation rows."""

    temperature: Positive
    bias: list[float]
    rows: AtLeastOne


class ClassCurves(TypedDict):
    """The curves of one class against all others."""

    positive: Count
    roc: list[list[float]]
    pr: list[list[float]]


class Curves(TypedDict):
    """What the page draws of the test rows."""

    #: Mean probability, share that is so, rows: by bins of equal counts.
    reliability: list[list[float]]
    #: Of two classes the rarer, of which probability and curves are; else of the most likely.
    positive: NotRequired[Count]
    roc: NotRequired[list[list[float]]]  #: False alarms, found; two classes only.
    pr: NotRequired[list[list[float]]]  #: Found, precision.
    #: Of more than two classes the rarest six, each against all others.
    by_class: NotRequired[list[ClassCurves]]


class ForecastEntry(TypedDict):
    """What was announced before the first round, from public rows."""

    rounds: Whole  #: T.
    #: r: the server's steps are so many times as long as the averaged update.
    step: Positive


class ResultEntry(TypedDict):
    """The final model, or the model so far."""

    test_loss: float | None
    test_accuracy: Share | None
    rounds_used: Count  #: The number of rounds listed.
    model_sha256: Sha256 | None
    fairness: NotRequired[Fairness]
    #: How many test rows of class i (list) are taken for class j (place in it); absent with many
    #: classes.
    confusion: NotRequired[list[list[Count]]]
    headline: NotRequired[Headline]
    metrics: NotRequired[dict[str, MetricEntry]]
    #: Absent where a class has fewer than 10 validation rows, or there are only test rows.
    calibration: NotRequired[CalibrationEntry]
    curves: NotRequired[Curves]
    #: What the server made of the averaged uploads, which costs no privacy; absent: nothing.
    finish: NotRequired[str]
    forecast: NotRequired[ForecastEntry]  #: With rounds.schedule = forecast only.
    aggregation: NotRequired[str]  #: How uploads were combined; absent: by their weighted mean.


class Identity(TypedDict, total=False):
    """Who a client of a federation is."""

    #: As the client greets; told apart by key or vault where two greet alike. In a simulation of a
    #: table its site in the column data.client. The four below are of federations only.
    name: str
    #: Fingerprint of the key that its node is authenticated by, as ssh-keygen -l prints it.
    key: str | None
    version: str | None  #: Of its sottovoce.
    counted: Whole | None  #: The samples that its uploads count for: those it declares, or fewer.
    limited: str  #: Why they are fewer.


class ClientEntry(Identity):
    """One client; null is what it keeps to itself."""

    samples: Whole | None
    epsilon: Positive | None  #: Its own budget.
    delta: Delta | None
    sensitivity: Positive | None  #: Δ of one upload.
    participations: Count
    capacity: Positive | None  #: In μ².
    #: In μ², as the client said with its last upload that counted; its own ledger also has what was
    #: refused or lost since.
    spent: NotNegative | None
    #: Where the server learns only sums: Σ (Δ/s)² of its own noise s, whatever others do.
    spent_alone: NotRequired[NotNegative | None]
    #: Against whoever sees only the models, in the order of model_view.colluding.
    epsilon_models: NotRequired[list[NotNegative | None]]


class Timing(TypedDict):
    """When the run began, and how long it took."""

    #: ISO 8601, UTC.
    started: Annotated[str, Field(pattern=r"^[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9:.]+(Z|\+00:00)$")]
    seconds: NotNegative
    seconds_per_round: NotNegative | None  #: Null if no round was finished.


def _require_sections(plan: dict[str, Any]) -> dict[str, Any]:
    """Refuse a plan without its sections or without the name of its model."""
    for section in SECTIONS:
        if not isinstance(plan.get(section), dict):
            raise ValueError(f"it lacks the section {section}")
    if not isinstance(plan["model"].get("name"), str):
        raise ValueError("it lacks the name of the model")
    return plan


ResolvedPlan = Annotated[
    dict[str, Any],
    AfterValidator(_require_sections),
    Field(
        json_schema_extra={
            "required": [*SECTIONS],
            "properties": {
                "rehearsed": {
                    "description": "How settings were chosen, as the plan says.",
                    "type": "string",
                },
                **{section: {"type": "object"} for section in SECTIONS},
            },
        }
    ),
]
Versions = Annotated[
    dict[str, str], Field(json_schema_extra={"required": ["sottovoce", "python", "numpy", "jax"]})
]


class Record(BaseModel):
    """What happened in one run: the plan as it was resolved, every round, every client, the
    guarantee.

    Numbers that are not finite are null. Above 10,000 clients, cohorts and clients are
    left out here, and trace.npz holds clients_samples, clients_epsilon and so on.
    """

    model_config = STRICT | {"frozen": True}

    schema_name: Literal["sottovoce.record/1"] = Field(alias="schema")
    status: Status
    engine: Literal["simulation", "flower"]
    noise: Literal["simulated", "secure"]
    seed: int | None  #: Null under secure noise, which takes none.
    plan: ResolvedPlan  #: The plan with every default filled in, by section.
    model: ModelEntry | None = None
    initial: Initial
    rounds: list[RoundEntry]  #: In order; an interrupted run has those that were finished.
    result: ResultEntry
    #: What holds for the client with the loosest budget. Null where every client keeps its budget
    #: to itself.
    guarantee: GuaranteeEntry | None
    versions: Versions
    timing: Timing
    #: Where a simulation was computed: the kind of device, and its node in a Ray cluster.
    ran_on: str | None = None
    model_view: ModelView | None = None
    not_covered: NotCovered | None = None  #: The codes, where guarantee is null.
    clip: Positive | None = None  #: The clipping norm C, where the plan says median.
    #: What to reconsider about budgets and noise, a sentence each; absent: nothing.
    advice: list[str] | None = None
    table: TableEntry | None = None
    #: In the order of their ids.
    clients: Annotated[list[ClientEntry], Field(min_length=1, max_length=MANY_CLIENTS)] | None = (
        None
    )

    @classmethod
    def parse(cls, values: object) -> Self:
        """Return the record with this content; refuse other content in one sentence.

        Unknown keys are left out: a later version may write more.

        >>> Record.parse({"schema": "something else"})
        Traceback (most recent call last):
            ...
        sottovoce.errors.RunError: record.json must have schema "sottovoce.record/1", got \
'something else'; use the version of sottovoce that wrote it
        """
        found = values.get("schema") if isinstance(values, Mapping) else type(values).__name__
        if not isinstance(values, Mapping) or found != SCHEMA:
            raise RunError(
                f'record.json must have schema "{SCHEMA}", got {found!r:.60}; '
                "use the version of sottovoce that wrote it"
            )
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            raise RunError(f"record.json is damaged, {_find_fault(error)}; {AGAIN}") from error

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Return the record of a run folder."""
        path = Path(folder) / "record.json"
        try:
            values = json.loads(path.read_text("utf-8"))
        except FileNotFoundError:
            raise RunError(
                f"{path} is missing; name a folder that `sottovoce train` has written"
            ) from None
        except OSError as error:
            raise RunError(
                f"{path} cannot be read ({error.strerror}); check that it is a file you may open"
            ) from error
        except (ValueError, RecursionError) as error:
            raise RunError(f"{path} is damaged ({why(error)}); {AGAIN}") from error
        return cls.parse(values)

    def write(self, folder: Path) -> None:
        """Write `record.json`, whole or not at all."""
        text = json.dumps(self.to_dict(), ensure_ascii=False, indent=1)
        write_file(folder / "record.json", text.encode())

    @property
    def class_names(self) -> list[str]:
        """The names of the classes; empty where labels are 0, 1, …"""
        if self.table is not None:
            return self.table["classes"]
        return [] if self.model is None else self.model.get("labels", [])

    def to_dict(self) -> dict[str, Any]:
        """Return the content of `record.json`."""
        return {
            field.alias or name: value
            for name, field in type(self).model_fields.items()
            if (value := getattr(self, name)) is not None or field.is_required()
        }

    @classmethod
    def of_run(
        cls,
        federation: Federation,
        state: ServerState,
        params: Parameters,
        *,
        seed: int | None,
        status: Status,
        started: datetime,
        measured: Mapping[str, Any],
        engine: Literal["simulation", "flower"] = "simulation",
        not_covered: Sequence[str] = (),
        versions: Mapping[str, str] | None = None,
        identities: Sequence[Identity] = (),
        ran_on: str | None = None,
    ) -> Self:
        """Return the record of a run as it stands, finished or not.

        `measured` is what `server.federation.measure_model` says of its model,
        `not_covered` are codes that the engine adds to the guarantee's, `versions` those of its
        parts, `identities` what it knows of each client beside its numbers.
        """
        import jax  # whoever has trained has loaded it

        require_private(federation, state)
        plan, done = federation.plan, len(state.rounds)
        codes = list(federation.not_covered(*not_covered))
        guarantee = federation.guarantee(*not_covered)
        loss, accuracy, signal = state.initial
        known = accuracy if federation.held.target is None else None
        initial: Initial = {"validation_loss": loss, "validation_accuracy": known}
        if plan.is_steered_otherwise:
            initial["signal"] = signal
        result = dict(measured) | {"rounds_used": done, "model_sha256": model_sha256(params)}
        if (finish := federation.finish.describe(state.marks)) is not None:
            result["finish"] = finish
        if isinstance(federation.schedule, ForecastRounds):
            result["forecast"] = {"rounds": state.progress.horizon, "step": state.marks.step}
        if (words := describe(plan.server.aggregation, plan.server.trim)) is not None:
            result["aggregation"] = words
        views = federation.observe_models(state, finished=status == "finished")
        layout, few = federation.held.layout, len(state.asked) <= MANY_CLIENTS
        form: ModelEntry = {
            "shape": list(federation.held.shape),
            "classes": federation.held.classes,
            "parameters": int(sum(leaf.size for leaf in params.values())),
        }
        if (target := federation.held.target) is not None:
            form["target"] = {"loss": target.loss, "low": target.low, "high": target.high}
        if federation.held.class_names:
            form["labels"] = list(federation.held.class_names)
        try:
            return cls(
                schema=SCHEMA,
                status=status,
                engine=engine,
                noise=plan.noise,
                seed=seed,
                plan=plan.to_dict(),
                model=form,
                initial=_without_nan(initial),
                rounds=_without_nan(state.rounds),
                result=_without_nan(result),
                guarantee=None if guarantee is None else guarantee.to_json(),
                versions={
                    "sottovoce": __version__,
                    "python": platform.python_version(),
                    "numpy": np.__version__,
                    "jax": jax.__version__,
                    **(versions or {}),
                },
                timing={
                    "started": started.strftime("%Y-%m-%dT%H:%M:%SZ"),
                    "seconds": state.seconds,
                    "seconds_per_round": state.seconds / done if done else None,
                },
                ran_on=ran_on,
                model_view=None if views is None else views[0],
                # Without a figure, what is not covered is said all the same.
                not_covered=None if guarantee is not None else codes,
                clip=federation.recipe.clip if plan.local.clip == "median" else None,
                advice=federation.advise() or None,
                table=None if layout is None else layout.to_json(),
                clients=_list_clients(federation, state, identities, views) if few else None,
            )
        except ValidationError as error:
            raise RunError(
                f"the record of this run does not fit its schema, {_find_fault(error)}; no record "
                "was written, please report this"
            ) from error


def _find_fault(error: ValidationError) -> str:
    """Return what is wrong with a record, in a few words."""
    fault = error.errors(include_url=False)[0]
    key_path = ".".join(str(key) for key in fault["loc"])
    if fault["type"] == "missing":
        return f"it lacks {key_path!r:.80}"
    if fault["type"] == "value_error":
        return f"of {key_path} {fault['ctx']['error']}"
    return f"{key_path:.80} is {fault['input']!r:.40}"


def model_sha256(params: Parameters) -> str:
    """Return the fingerprint of a model: names, types, shapes and bytes, ordered by name.

    >>> model_sha256({"w": np.zeros(2, np.float32)})[:8]
    'cb2c1f5e'
    """
    digest = hashlib.sha256()
    for name in sorted(params):
        leaf = np.ascontiguousarray(params[name])
        leaf = leaf.astype(leaf.dtype.newbyteorder("<"))
        digest.update(f"{name}:{leaf.dtype.str}:{leaf.shape};".encode())
        digest.update(leaf.tobytes())
    return digest.hexdigest()


def _list_clients(
    federation: Federation,
    state: ServerState,
    identities: Sequence[Identity],
    views: tuple[ModelView, NDArray[np.float64] | None] | None,
) -> list[ClientEntry]:
    columns = _columns(federation, state)
    if views is not None and views[1] is not None:
        columns["epsilon_models"] = views[1]
    rows = zip(*(column.tolist() for column in columns.values()), strict=True)
    pairs = zip(identities or [{}] * len(state.asked), rows, strict=True)
    listed = [{**known, **dict(zip(columns, row, strict=True))} for known, row in pairs]
    return cast(list[ClientEntry], _without_nan(listed))


def require_private(federation: Federation, state: ServerState) -> None:
    """Refuse to write the record of a run whose noise was too small for its debits.

    Σ (Δ/σ)² over the rounds, recomputed from the trace, must not exceed the debits of the tank, and
    these must not exceed its capacity: otherwise something beside the tank has gone wrong.
    """
    booked, alone = state.tank.spent_mu2, sum_alone(federation, state)
    honest, released = federation.terms.honest, alone
    if honest > 1:  # each client's noise is as large as what h of the sum's noises make together
        samples = federation.samples.astype(np.float64)
        released = alone / honest
        # Of many clients the rounds' noises are one line. Real ones state theirs, and a false one
        # tells nothing of the others' books.
        if len(booked) <= MANY_CLIENTS and state.sigma and not federation.calibrations:
            noise = np.nan_to_num((samples * np.array(state.sigma)) ** 2, nan=np.inf)
            counted = add_smallest(noise, honest - 1)
            released = ((samples * federation.sensitivity) ** 2 / counted).sum(axis=0)
    capacity, disclosed = state.tank.capacity, ~np.isnan(federation.capacity)
    over = (booked > capacity * (1 + 1e-9)) | (released > booked + 1e-9 * capacity)
    if np.any(over & disclosed):  # what a client hides cannot be checked here
        raise RunError(
            "the noise of this run does not bear out what its tanks booked, which must never be; "
            "no record was written, please report this"
        )


def sum_alone(federation: Federation, state: ServerState) -> NDArray[np.float64]:
    """Return Σ (Δ/σ)² of each client's own noise, from the trace."""
    sigma = np.array(state.sigma).reshape(-1, len(state.asked))
    squares = (federation.sensitivity / sigma) ** 2
    return np.asarray(np.where(np.isnan(squares), 0.0, squares).sum(axis=0))


def _columns(federation: Federation, state: ServerState) -> dict[str, NDArray[Any]]:
    """Return what the record says of each client; NaN where a client hides it (rule R9)."""
    disclosed = ~np.isnan(federation.capacity)

    def if_disclosed(values: NDArray[Any]) -> NDArray[Any]:
        return values if disclosed.all() else np.where(disclosed, values, np.nan)

    summed = federation.plan.privacy.view == "sum"
    return {
        "samples": if_disclosed(federation.samples),
        "epsilon": federation.epsilon,
        "delta": federation.delta,
        "sensitivity": if_disclosed(federation.sensitivity),
        "participations": state.turns,
        "capacity": if_disclosed(state.tank.capacity),
        "spent": if_disclosed(state.tank.spent_mu2),
    } | ({"spent_alone": if_disclosed(sum_alone(federation, state))} if summed else {})


def write_run(
    folder: Path, record: Record, federation: Federation, state: ServerState, params: Parameters
) -> None:
    """Write all files of a run folder but the page; the record last: it vouches for the others."""
    write_npz(folder / "model.npz", params)
    clients, plan = len(state.asked), federation.plan
    trace = {"sigma": np.array(state.sigma).reshape(len(state.sigma), clients)}
    if clients > MANY_CLIENTS:
        booked = np.array(state.mu2).reshape(-1, clients).sum(axis=0)
        trace = {"sigma_all": trace["sigma"].reshape(-1), "mu2_all": booked} | {
            f"clients_{name}": column for name, column in _columns(federation, state).items()
        }
    elif plan.local.steps > 1 or plan.server.signal == "clients" or plan.privacy.view == "sum":
        # σ alone no longer says what was spent: of several releases a round, or of a sum.
        trace["mu2"] = np.array(state.mu2).reshape(len(state.mu2), clients)
    write_npz(folder / "trace.npz", trace)
    # Arrays given client by client have no row numbers, nor have real clients.
    splits = {"samples": _columns(federation, state)["samples"]}
    if (split := federation.held.split) is not None:
        splits |= {
            "rows": np.concatenate(split.clients),
            "validation": split.validation,
            "test": split.test,
            "test_from": np.array(split.test_from),
        }
        if federation.plan.rows_per_person:  # how many rows a person has is not public
            del splits["rows"]
    write_npz(folder / "splits.npz", splits)
    write_rounds(folder, state)
    record.write(folder)


def write_rounds(folder: Path, state: ServerState) -> None:
    """Write all rounds so far into `rounds.jsonl`, one a line."""
    lines = "".join(json.dumps(_without_nan(entry)) + "\n" for entry in state.rounds)
    write_file(folder / ROUNDS, lines.encode())


def append_round(folder: Path, state: ServerState) -> None:
    """Append the newest round as one more line, for whoever follows the run."""
    with (folder / ROUNDS).open("a", encoding="utf-8") as file:
        file.write(json.dumps(_without_nan(state.rounds[-1])) + "\n")


def _without_nan(value: Any) -> Any:
    """Return the value as JSON has it, with None for NaN and infinities, which it does not have.

    >>> _without_nan({"a": (1, float("nan")), "b": [1, 2]})
    {'a': [1, None], 'b': [1, 2]}
    """
    return json.loads(json.dumps(value), parse_constant=lambda name: None)
