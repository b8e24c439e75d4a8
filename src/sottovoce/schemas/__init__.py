"""The keys of the JSON documents that sottovoce writes, with their types and bounds.

The functions that make a document name its class here as what they return, so that mypy holds
them to its keys. The JSON Schemas beside it are generated: `make schemas` writes them,
`tests/project/test_schemas.py` compares. A comment `#:` above or beside a key is its description.
Only the code that validates a document imports this file at run time: `sottovoce calibrate` and a
device start without pydantic.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, NotRequired

from pydantic import ConfigDict, Field, WithJsonSchema
from typing_extensions import TypedDict

from sottovoce.privacy.budget import NOT_COVERED, Calibration, Unit

#: Text is no number. Unknown keys are left out when a document is read; its schema refuses them.
STRICT = ConfigDict(strict=True)

Positive = Annotated[float, Field(gt=0)]
NotNegative = Annotated[float, Field(ge=0)]
Share = Annotated[float, Field(ge=0, le=1)]
Gain = Annotated[float, Field(le=1)]  # a metric of which more is better; only R² may be below 0
Delta = Annotated[float, Field(gt=0, le=0.5)]
Count = Annotated[int, Field(ge=0)]
AtLeastOne = Annotated[int, Field(ge=1)]
Sha256 = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
#: A code of a later version is no damage, so that only the schema lists the codes.
NotCovered = Annotated[
    list[Annotated[str, WithJsonSchema({"enum": [*NOT_COVERED]})]],
    Field(json_schema_extra={"uniqueItems": True}),
]


class GuaranteeEntry(TypedDict):
    """What holds; under `paper` calibration epsilon differs from what was asked."""

    epsilon: Positive
    delta: Delta
    unit: Unit
    adjacency: Literal["replace-one"]
    adversary: Literal["server"]
    calibration: Calibration
    not_covered: NotCovered
    text: str
    #: Where the server learns only sums: how many other clients may side with it. epsilon holds as
    #: long as the rest follow the protocol.
    corrupt: NotRequired[Count]
    epsilon_alone: NotRequired[NotNegative]  #: There, what holds at delta whatever anyone does.


class ModelView(TypedDict):
    """What holds against whoever sees the models of all rounds, but no upload."""

    colluding: list[Count]  #: Numbers of other clients that tell the observer what they know.
    #: By these numbers, the largest of any client, at the largest delta; absent: nothing can be
    #: stated beyond the guarantee.
    epsilon: NotRequired[list[NotNegative]]
    text: str  #: The sentence, or why there is no figure.


class TableEntry(TypedDict):
    """How the user's own table was encoded: what predictions need."""

    label: str
    #: The label's categories, in the order of the classes; empty where it is a number.
    classes: list[str]
    #: Features in the order of the inputs: [low, high], or categories.
    columns: dict[str, list[int | float | str]]
    inferred: list[str]  #: Columns whose bounds or categories were taken from the data.
    #: Every number has a second input, which is 1 (and the first 0) where the cell is missing.
    missing: NotRequired[Literal["flag"]]
    #: Numbers are scaled to [-1, 1]; a run without the key has them from 0 to 1.
    scale: NotRequired[Literal["signed"]]
    text: NotRequired[str]  #: The column of free texts, which follow the other features as bytes.


# sottovoce describe


class StatisticsEntry(TypedDict):
    """What was released about one column: of a number or of categories."""

    name: str
    low: NotRequired[float]
    high: NotRequired[float]  #: Public bounds.
    missing: NotRequired[Share]  #: The share of missing cells, where the table has a flag for them.
    mean: NotRequired[float]
    mean_error: NotRequired[NotNegative]  #: The standard deviation of the mean's noise.
    #: The standard deviation of the rows, with noise; absent where the noise hides it.
    deviation: NotRequired[NotNegative]
    histogram: NotRequired[list[Share]]  #: The shares of equal bins between the bounds.
    shares: NotRequired[dict[str, Share]]  #: Of each category.


class CorrelationEntry(TypedDict):
    """The correlation of two columns of numbers."""

    first: str
    second: str
    correlation: Annotated[float, Field(ge=-1, le=1)]
    error: NotNegative  #: The standard deviation of its noise, about.


class ReleasedEntry(TypedDict):
    """What the client uploaded; all else is computed from it."""

    table: TableEntry
    target: Annotated[list[float], Field(min_length=2, max_length=2)] | None
    bins: AtLeastOne
    mean: list[float]


class DescriptionDocument(TypedDict):
    """Statistics of a table, released by its clients with noise."""

    schema: Literal["sottovoce.description/1"]
    clients: Annotated[dict[str, AtLeastOne], Field(min_length=1)]  #: The samples of each client.
    samples: AtLeastOne
    unit: Unit
    epsilon: Positive  #: Of this release alone.
    delta: Delta
    not_covered: NotCovered
    text: str
    columns: list[StatisticsEntry]
    label: StatisticsEntry
    share_error: NotNegative  #: The standard deviation of the noise in each share.
    correlations: list[CorrelationEntry]
    released: ReleasedEntry


# sottovoce calibrate --json


class RequestEntry(TypedDict):
    """All options, resolved."""

    epsilon: Positive
    delta: Delta
    rounds: AtLeastOne
    clients: AtLeastOne
    per_round: AtLeastOne
    samples: AtLeastOne
    clip: Positive
    learning_rate: Positive
    unit: Unit
    calibration: Calibration
    parameters: AtLeastOne
    colluding: Count


class PaperEntry(TypedDict):
    """The noise of the paper's Theorem 1 and what it really guarantees over `participations`
    uploads."""

    sigma: Positive
    true_epsilon: NotNegative  #: At the δ asked for.
    true_delta: Share  #: At the ε asked for.


AttackerEntry = TypedDict(
    "AttackerEntry", {"tpr_at_fpr_0.01": Share, "auc": Annotated[float, Field(ge=0.5, le=1)]}
)


class ExpectedCell(TypedDict):
    """What one federation reached."""

    data: str
    rows: AtLeastOne  #: Of each client.
    clients: AtLeastOne
    epsilon: Positive  #: 10,000 stands for no noise.
    accuracy: Share
    noise: NotNegative  #: As in the document.


class ExpectedDocument(TypedDict):
    """What federations of several sizes have reached, as benchmarks/expect.py measured it."""

    seeds: AtLeastOne
    majority: dict[str, Share]  #: The share of the most frequent class.
    cells: list[ExpectedCell]


class CalibrationDocument(TypedDict):
    """The noise a budget buys in a federation with a fixed number of rounds, and what the noise of
    the paper's Theorem 1 really guarantees there."""

    request: RequestEntry
    sensitivity: Positive  #: Δ of one upload.
    participations: AtLeastOne  #: Uploads of one client in the run, ⌈K·T/U⌉.
    sigma: Positive  #: Standard deviation of the noise on one coordinate of one upload.
    mu: Positive  #: μ-GDP of the whole run, √participations·Δ/σ.
    mu_release: Positive  #: μ-GDP of one upload, Δ/σ.
    guarantee: GuaranteeEntry
    model_view: ModelView
    paper: PaperEntry
    attacker: AttackerEntry  #: The best any attacker can do against the whole run.
    #: How far the run's noise moves the model, as a share of what clipped gradients can do.
    noise: NotNegative
    advice: list[str]  #: What to reconsider about budget and noise, a sentence each.
    expected: NotRequired[ExpectedDocument]  #: With --expect.


# sottovoce ledger show --json, and certificate.json


class PolicyEntry(TypedDict):
    """The client's terms as they stand; a budget tightened after the first release limits what
    follows."""

    epsilon: NotNegative
    delta: NotNegative
    samples: AtLeastOne
    clip: NotNegative
    unit: Unit
    calibration: Literal["exact", "zcdp"]
    floor: NotNegative  #: Smallest σ/Δ of one turn: with E steps, each has √E times this.
    max_rounds: AtLeastOne
    disclose: bool
    max_steps: NotRequired[Annotated[int, Field(ge=1, le=1000)]]
    #: The part of the budget that one run may take.
    run_share: NotRequired[Annotated[float, Field(gt=0, le=1)]]
    server_share: NotRequired[Annotated[float, Field(gt=0, le=1)]]
    max_work: NotRequired[AtLeastOne]
    max_bytes: NotRequired[AtLeastOne]
    #: Clients of a sum whose noise is counted, this one included; 1: it releases no sums.
    honest: NotRequired[AtLeastOne]
    #: Clients of its roster that may side with a server that learns only sums.
    corrupt: NotRequired[Count]
    #: The cap on what holds there whatever others do; null: what h times the budget is worth.
    epsilon_alone: NotRequired[NotNegative | None]


class VaultGuaranteeEntry(TypedDict):
    """What holds for everything released from this dataset: the budget that stood at the first
    release."""

    epsilon: NotNegative
    delta: NotNegative
    unit: Unit
    adjacency: Literal["replace-one"]
    adversary: Literal["server"]
    calibration: Literal["exact", "zcdp"]
    not_covered: list[str]
    text: str
    #: Where it releases sums: how many other clients may side with the server.
    corrupt: NotRequired[Count]
    epsilon_alone: NotRequired[NotNegative]  #: There, what holds at delta whatever anyone does.


class BudgetEntry(TypedDict):
    """How much of the budget is spent."""

    capacity: NotNegative  #: μ² that may be spent in all.
    spent: NotNegative  #: μ² booked so far, what was burnt included.
    burnt: NotNegative  #: μ² that restores have booked for what they could not know.
    left: Share  #: Share of the budget.


class ReceiptEntry(TypedDict):
    """How far the ledger had come."""

    schema: Literal["sottovoce.receipt/1"]
    vault: str
    seq: AtLeastOne
    hash: Sha256
    spent: Count  #: In units of the first capacity / 2^50.
    alone: NotRequired[Count]  #: The same by this client's own noise alone, whatever others do.
    promised: NotRequired[PolicyEntry]  #: The terms at the first release, where there was one.


class ReleaseEntry(TypedDict):
    """One debit."""

    seq: Count
    time: str
    server: str
    run: str
    t: Count  #: Round, from 0.
    releases: AtLeastOne  #: Noised values booked in this turn.
    units: AtLeastOne
    mu: NotNegative  #: √(Σ μ²) of the turn.
    share: Share  #: Of the budget.
    answered: bool  #: False: no upload was stored; the debit burnt.
    #: What the client noted: horizon, clip, … `noise` is σ of each release, in whole steps of the
    #: grid on which noise is drawn.
    facts: dict[str, Any]


class NoteEntry(TypedDict):
    """Something else that happened to the vault."""

    seq: Count
    time: str
    kind: Literal["create", "tighten", "rebind", "move", "restore", "stop", "resume"]
    text: str


class CertificateDocument(TypedDict):
    """What `sottovoce ledger show --json`, `ledger create --json` and certificate.json say of a
    vault."""

    schema: Literal["sottovoce.certificate/1"]
    vault: str  #: The vault's id.
    made: str  #: When the vault was made (ISO 8601, UTC).
    issued: str  #: When this was written (ISO 8601, UTC).
    #: Seal of the client's records: SHA-256 of their fingerprint and a salt that stays in the
    #: vault.
    dataset: Sha256
    policy: PolicyEntry
    #: The terms at the first release. Later ones are only tighter, so these hold of everything
    #: released; only samples may have changed with the records.
    promised: NotRequired[PolicyEntry]
    guarantee: VaultGuaranteeEntry
    budget: BudgetEntry
    receipt: ReceiptEntry
    releases: list[ReleaseEntry]  #: Every debit in order.
    notes: list[NoteEntry]
    only_ledger: NotRequired[bool]
    other_ledgers: NotRequired[list[str]]
    software: str


# audit.json


class LevelEntry(TypedDict):
    """An attack against one budget."""

    epsilon: float | None  #: null: without noise.
    value: float | None
    ceiling: float | None  #: What no attacker exceeds on average.
    exceeds: bool  #: Above its ceiling by more than chance explains.
    hits: int | None  #: Of the positives; of what decides, where the value is a mean over more.
    positives: int | None  #: Trials.
    alarms: int | None  #: Of the negatives.
    negatives: int | None  #: null where there are none.


class AttackEntry(TypedDict):
    """One attack by one measure."""

    attack: str
    measure: str
    #: Whether it may contradict a promise: errors and what shares one upload's noise may not.
    decides: bool
    levels: list[LevelEntry]


class MessagesEntry(TypedDict):
    """What many uploads prove of their noise."""

    calibration: Calibration
    #: Above 1 the attacker sees models alone, the means of so many clients' uploads.
    clients: NotRequired[int]
    #: Above 1 so many clients share their noise: a server learns only sums.
    honest: NotRequired[int]
    epsilon: float  #: Of a client's budget.
    epsilon_promised: NotRequired[float]  #: Against this attacker.
    delta: float
    messages: int  #: A side.
    runs: int  #: A side: trials of hits and alarms.
    hits: int  #: Runs of D′ above the threshold.
    alarms: int  #: Runs of D above the threshold.
    mu_promised: float  #: Against this attacker.
    mu_true: float  #: Of the noise that the client says it drew.
    #: Proven, as counted, at most.
    mu: Annotated[list[float | None], Field(min_length=3, max_length=3)]
    #: Proven and at most, assuming the Gaussian shape.
    epsilon_gaussian: Annotated[list[float | None], Field(min_length=2, max_length=2)]
    epsilon_free: float  #: Proven without an assumption.
    contradicts: bool


class OneRunEntry(TypedDict):
    """What one run full of canaries proves."""

    epsilon: float
    delta: float
    canaries: int
    guesses: int
    right: int
    epsilon_free: float
    mu_gaussian: float
    epsilon_gaussian: float
    contradicts: bool


class AuditDocument(TypedDict):
    """Rates of attacks beside what no attacker exceeds, and mu and epsilon measured beside the
    promised ones. null where a number is not finite."""

    schema: Literal["sottovoce.audit/1"]
    version: str
    target: str  #: The plan or run that was audited.
    own_model: bool  #: false: an mlp stood for the plan's model.
    quick: bool
    command: str  #: What was typed.
    confidence: float  #: Of every bound that is shown.
    comparisons: int  #: Measurements that could have contradicted a promise.
    wrong: float  #: How often all comparisons together accuse a promise that is kept, at most.
    seconds: float
    verdict: str
    judgement: str  #: What the audit says of the paper's calibration.
    #: Empty if nothing measured contradicts the promise; otherwise the exit code is 1.
    contradictions: list[str]
    not_measured: list[str]  #: What the plan does and the audit did not measure.
    attacks: list[AttackEntry]
    messages: list[MessagesEntry]
    one_run: list[OneRunEntry]


# rehearsal.json


#: Knob to value: a number, or the name of an alternative.
SettingEntry = dict[str, int | float | str]


class ChosenEntry(TypedDict):
    """What was chosen, and why."""

    setting: SettingEntry  #: Knob to value: a number, or the name of an alternative.
    reasons: dict[str, str]  #: For every key that was searched: what it was compared with.
    seeds: Annotated[list[int], Field(min_length=1)]  #: The seeds that chose.
    complete: bool  #: false: the runs or minutes were used up before the search came to its end.
    standard_error: NotNegative  #: Of the metric on the rows that choose.
    doubt: str  #: Whether these rows can tell the best two settings apart.


class StandInEntry(TypedDict):
    """The rows that stood in for the clients'."""

    kind: Literal["public", "drawn", "synthetic"]
    about: str
    trust: str  #: How far it can be trusted.
    rows: int
    choosing: int  #: Rows that choose.
    telling: int  #: Rows that only tell what came out.
    #: f: a client holds 1/f of its rows with a budget worth f in mu, so that the noise of a step is
    #: the real one.
    factor: Annotated[float, Field(ge=1)]
    fingerprint: str


class CostEntry(TypedDict):
    """What the rehearsal cost in privacy."""

    #: null: not counted, since the plan's own rows stood in.
    mu2: Annotated[float | None, WithJsonSchema({"enum": [0.0, None]})]
    #: What the claim rests on: sottovoce cannot check whether a file is public.
    provided: str | None
    why: str


class WithoutNoiseEntry(TypedDict):
    """Synthetic rows only: the same seeds without noise, and what the budget costs."""

    accuracies: list[Gain]
    lost: float
    deviation: NotNegative


class PredictionEntry(TypedDict):
    """Of one run more on the stand-in, from fresh seeds on rows that chose nothing; low to high
    holds it in 95 of 100 cases (null for synthetic rows)."""

    of: Literal["the stand-in"]
    #: What all numbers here are of: the metric that chose; "accuracy" where it is absent.
    metric: NotRequired[str]
    accuracies: list[Gain]
    mean: Gain
    deviation: NotNegative
    low: float | None
    high: Gain | None
    rounds: float
    #: Test rows of the plan that the range counts; null: they are in a file, and left out.
    tested: int | None
    without_noise: WithoutNoiseEntry | None


class TheoryEntry(TypedDict):
    """Theorem 2 as derived, its constants estimated on the stand-in."""

    smoothness: float
    curvature: float
    gap: float
    divergence: float
    learning_rate: float
    dimension: int
    best_rounds: int


class TrialEntry(TypedDict):
    """One federation."""

    stage: str
    setting: SettingEntry  #: Knob to value: a number, or the name of an alternative.
    seed: int
    loss: float | None  #: On the rows that choose; null where it is not finite.
    accuracy: Share | None  #: Null where a number is predicted, which has none.
    test_accuracy: Share | None
    rounds: int
    seconds: float
    metric: NotRequired[str]  #: That chose: the plan's, or else by the rule of docs/results.md.
    #: Of a metric other than accuracy on the rows that choose; more is better.
    gain: NotRequired[Gain | None]
    error: NotRequired[float | None]  #: Its standard error.
    test_gain: NotRequired[Gain | None]  #: The same metric on the rows that tell.
    test_error: NotRequired[float | None]


class RehearsalDocument(TypedDict):
    """Settings chosen on a stand-in for the clients' rows. Accuracies are parts of 1."""

    schema: Literal["sottovoce.rehearsal/1"]
    version: str
    given: dict[str, Any]  #: The plan that was rehearsed.
    plan: dict[str, Any]  #: The plan that was chosen: what plan.toml holds.
    seed: Count
    chosen: ChosenEntry
    #: Version and backend of every sitting; more than one where a rehearsal was resumed elsewhere.
    sittings: list[dict[str, str]]
    stand_in: StandInEntry
    privacy_cost: CostEntry
    prediction: PredictionEntry
    theory: TheoryEntry | None
    runs: list[TrialEntry]
