"""A client's budget (ε, δ), and the guarantee that says what it promises."""

from __future__ import annotations

import math
import re
import sys
import textwrap
import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from decimal import ROUND_CEILING, Decimal
from importlib import resources
from numbers import Real
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, cast, get_args

from sottovoce.errors import InputError

if TYPE_CHECKING:
    from sottovoce.schemas import GuaranteeEntry

Unit: TypeAlias = Literal["record", "person", "client"]
Calibration: TypeAlias = Literal["exact", "zcdp", "paper"]
View: TypeAlias = Literal["upload", "sum"]  # what the server learns of a round

UNITS: tuple[Unit, ...] = get_args(Unit)
#: Units that hold several rows of a client: rows that are published then belong to the unit.
LARGER_UNITS = frozenset(UNITS) - {"record"}
CALIBRATIONS: tuple[Calibration, ...] = get_args(Calibration)

#: The words for each code of what a promise does not cover.
NOT_COVERED: dict[str, str] = tomllib.loads(
    (resources.files("sottovoce.privacy") / "not_covered.toml").read_text("utf-8")
)

#: Codes of data that left the clients besides their noised uploads: the figures do not hold.
LEAKS = ("raw-signal", "median-clip", "inferred-columns", "counted-classes", "evaluation-in-unit")
#: Codes of client rows that the server holds: the promise covers only the rest of the data.
TRAINING_ONLY = ("evaluation-of-clients", "evaluation-declared")
#: Codes of budgets that no vault keeps after the run: nothing is promised beyond it.
THIS_RUN_ONLY = ("unvaulted", "fresh-vaults", "sums-elsewhere")

#: Stands in place of a guarantee where the server knows no client's budget.
UNDISCLOSED = (
    "Every client keeps its budget to itself: what each is promised stands in its own ledger, "
    "which binds it; this record can state no (ε, δ)."
)

ALWAYS_NOT_COVERED = (
    "side-channels",
    "poisoning",
    "same-person-twice",
    "public-numbers",
    "evaluation-records",
    "entropy",
)


def list_always_not_covered(unit: Unit) -> tuple[str, ...]:
    """Return the codes of what no promise covers; all rows of a person may be protected at once.

    >>> [code for code in list_always_not_covered("person") if "person" in code]
    ['same-person-elsewhere']
    """
    if unit not in LARGER_UNITS:
        return ALWAYS_NOT_COVERED
    return tuple(code.replace("person-twice", "person-elsewhere") for code in ALWAYS_NOT_COVERED)


def describe_undisclosed(codes: Iterable[str]) -> str:
    """Return the paragraph for a run in which no client discloses its budget."""
    all_codes = tuple(dict.fromkeys([*ALWAYS_NOT_COVERED, *codes]))
    if "same-person-elsewhere" in all_codes:  # persons are protected, each with all its rows
        all_codes = tuple(code for code in all_codes if code != "same-person-twice")
    uncovered = "; ".join(NOT_COVERED.get(code, code) for code in all_codes)
    return f"{UNDISCLOSED} {describe_evaluation(all_codes)} Not covered: {uncovered}."


def evaluation_code(unit: Unit, *, declared_public: bool) -> str:
    """Return the code of a run that validates or tests on rows of its clients.

    The server holds these rows as they are. If the plan declares them public, they are not
    protected. Otherwise a record that is *trained* on is still protected, but a unit that also
    holds validation or test rows is not.
    """
    if declared_public:
        return "evaluation-declared"
    return "evaluation-in-unit" if unit in LARGER_UNITS else "evaluation-of-clients"


def describe_evaluation(codes: Iterable[str]) -> str:
    """Return the sentence that says whose the validation and test rows are, and what they show."""
    codes = {*codes}
    whose = "Records that a server validates and tests on"
    if "evaluation-declared" in codes:
        whose = "The clients' own rows that the plan declares public, for validation and test,"
    elif codes & {"evaluation-of-clients", "evaluation-in-unit"}:
        whose = "The clients' own rows that were taken for validation and test"
    by_client = " (by client, too, where shown)" if whose.startswith("The") else ""
    return (
        f"{whose} are not protected: the server has them as they are, and a run's losses, "
        f"metrics{by_client} and all else that its report shows of them are computed without noise."
    )


def describe_model_view(
    colluding: Sequence[int], epsilon: Sequence[float], delta: float, unit: Unit, noise: str
) -> str:
    """Return the sentences on whoever sees the models of all rounds, but no upload.

    >>> describe_model_view([0, 1], [0.3788, 0.3834], 1e-3, "record", "secure").split(". This")[0]
    'Against whoever sees the models of all rounds of this run but no single upload, one record of \
any client (replace-one) is protected by (ε, δ) = (0.3788, 0.001), or (0.3834, 0.001) if 1 other \
client tells what it knows'
    """
    pairs = [format_budget(e, delta, digits=4) for e in epsilon]
    who = ["1 other client tells what it knows" if c == 1 else f"{c} others do" for c in colluding]
    others = "".join(f", or {pair} if {w}" for w, pair in [*zip(who, pairs, strict=True)][1:])
    noun = "all data" if unit == "client" else f"one {unit}"
    verb, condition = "is", ""
    if noise == "simulated":
        verb, condition = "would be", ", with noise drawn securely"
    return (
        f"Against whoever sees the models of all rounds of this run but no single upload, {noun} "
        f"of any client (replace-one) {verb} protected by (ε, δ) = {pairs[0]}{others}{condition}. "
        "This holds as long as the server keeps the uploads to itself, the other clients add their "
        "noise, and who takes part does not depend on the data; the rounding of uploads to float32 "
        "is left out."
    )


#: Above these, advice is given: ε and δ that promise little, and noise in which little is learnt.
WEAK_EPSILON, WEAK_DELTA, LOUD_NOISE = 20.0, 1e-2, 0.25


def weigh_noise(
    sigma: float, *, rounds: int, per_round: float, parameters: int, step: float
) -> float:
    """Return how far a run's noise moves the model, as a share of what clipped gradients can do.

    σ is the noise of one coordinate of one upload and step is η·C. In T rounds the averaged noise
    of K uploads moves d parameters by about σ·√(d·T/K), and gradients of norm C by at most T·η·C.
    Where every client uploads in every round the ratio is 2·√(d/U) / (n·μ): it depends on rows,
    clients, parameters and budget, and not on T. docs/guarantee.md has it beside measured results.
    """
    return sigma * math.sqrt(parameters / (per_round * rounds)) / step


def advise(
    epsilon: float, delta: float, units: int, *, unit: Unit, noise: float, size: float
) -> list[str]:
    """Return advice on a promise and its noise, one sentence each with its number.

    units: of the client for which δ promises least (or the clients); noise: `weigh_noise`; size:
    the rows of a client, or the clients where the unit is all data of one. A mechanism that
    publishes every unit outright with probability δ is (0, δ)-private.

    >>> advise(8, 1e-3, 800, unit="record", noise=0.1, size=800)
    []
    >>> advise(8, 1e-2, 800, unit="record", noise=0.1, size=800)
    ['delta = 0.01 should be below 1 / 800 = 0.00125 for a client of 800 records, it would allow \
one of them to be published outright; choose one well below that']
    """
    advice = []
    if epsilon > WEAK_EPSILON:
        advice.append(
            f"epsilon = {epsilon:g} is above {WEAK_EPSILON:g} and promises little: the odds of a "
            f"guess may change by a factor of e^{epsilon:g}; 1 is strong and 8 is usual"
        )
    if delta * units >= 1:
        group = f"{units:,} clients" if unit == "client" else f"a client of {units:,} {unit}s"
        advice.append(
            f"delta = {delta:g} should be below 1 / {units:,} = {1 / units:.3g} for {group}, it "
            "would allow one of them to be published outright; choose one well below that"
        )
    elif delta > WEAK_DELTA:
        advice.append(
            f"delta = {delta:g} is above {WEAK_DELTA:g}: with that probability the promise may not "
            "hold at all; choose one well below 1 / samples"
        )
    if noise > LOUD_NOISE:
        ratio = noise / LOUD_NOISE
        enough = (
            f"{math.ceil(size * ratio**2):,} clients would do"
            if unit == "client"
            else f"{math.ceil(size * ratio):,} {unit}s per client would do, or more clients"
        )
        advice.append(
            f"the noise moves the model {noise:.2g} times as far as the data can, and little is "
            f"learnt above {LOUD_NOISE:g}; about {enough}, or a smaller model or a larger budget"
        )
    return advice


@dataclass(frozen=True)
class Budget:
    """An (ε, δ) that may never be exceeded.

    >>> Budget(epsilon=8, delta=1e-5)
    Budget(epsilon=8.0, delta=1e-05)
    """

    epsilon: float
    delta: float

    def __post_init__(self) -> None:
        of_epsilon = "choose how much may be learnt about one unit, 1 is strong and 8 is usual"
        of_delta = (
            "choose what may be added to a probability beyond epsilon, well below 1 / samples"
        )
        for name, least, most, bound, remedy in (
            ("epsilon", 1e-6, sys.float_info.max, "a finite number ≥ 1e-06", of_epsilon),
            ("delta", 1e-100, 0.5, "a number from 1e-100 to 0.5", of_delta),
        ):
            value = _to_float(getattr(self, name))  # first: a float16 has no 1e-100
            if not least <= value <= most:
                raise InputError.of(name, getattr(self, name), bound, remedy)
            object.__setattr__(self, name, value)


@dataclass(frozen=True)
class Guarantee:
    """A promise that a lawyer could read: budget, unit, adversary, and what is not covered.

    `budget` is what holds; under `paper` calibration that is not what was asked for.

    >>> g = Guarantee(Budget(8, 1e-5), unit="record", calibration="exact")
    >>> print(g.text.split(". ")[0])
    Each client's uploads are (8, 1e-05)-differentially private for one record of its data
    >>> g.to_json()["adjacency"]
    'replace-one'
    """

    budget: Budget
    unit: Unit
    calibration: Calibration
    not_covered: tuple[str, ...] = ALWAYS_NOT_COVERED
    tightest: Budget | None = None  # where clients' budgets differ; `budget` is the loosest
    others: tuple[Calibration, ...] = ()  # calibrations of vaults that do not use `calibration`
    corrupt: int = 0  # clients that may side with a server that learns only sums
    epsilon_alone: float | None = None  # there, whatever others do; None: it sees every upload
    one_client: bool = False  # whether it is the promise of one vault to its client
    adjacency: Literal["replace-one"] = "replace-one"
    adversary: Literal["server"] = "server"

    def __post_init__(self) -> None:
        if self.unit not in UNITS:
            remedy = "name what one difference is"
            raise InputError.of("unit", self.unit, " or ".join(UNITS), remedy)
        if self.calibration not in CALIBRATIONS:
            remedy = "exact gives the least noise that keeps the promise"
            raise InputError.of("calibration", self.calibration, "exact, zcdp or paper", remedy)
        if unknown := sorted(set(self.not_covered) - NOT_COVERED.keys()):
            remedy = "see sottovoce.privacy.budget"
            raise InputError.of("not_covered", unknown[0], "a code of NOT_COVERED", remedy)
        if self.not_covered == ALWAYS_NOT_COVERED:
            object.__setattr__(self, "not_covered", list_always_not_covered(self.unit))

    @property
    def text(self) -> str:
        """The guarantee as one paragraph."""
        kind = "training " if {*TRAINING_ONLY} & {*self.not_covered} else ""
        subject, any_one = {
            "record": (f"one record of its {kind}data", ", whichever it is,"),
            "person": (f"one person in its {kind}data (all rows together)", ", whoever it is,"),
            "client": (f"its whole {kind}dataset", ""),
        }[self.unit]
        method = {
            "exact": "The noise is calibrated exactly (Gaussian differential privacy)",
            "zcdp": "The noise is calibrated by zero-concentrated differential privacy",
            "paper": "The noise is the paper's (Theorem 1), and the figures are what it really "
            "guarantees",
        }[self.calibration]
        if self.others:
            method += f"; other clients have vaults that calibrate by {' and '.join(self.others)}"
        uncovered = "; ".join(NOT_COVERED[code] for code in self.not_covered)
        epsilon, delta = format_claim(self.budget.epsilon), format_claim(self.budget.delta, 3)
        loosest = ""
        if self.tightest is not None:
            loosest = (
                "This is the loosest of the clients' budgets; each is promised its own, down to "
                f"{format_budget(self.tightest.epsilon, self.tightest.delta)}. "
            )
        verb, changes = ("would be", "would change") if self.conditions else ("are", "changes")
        conditions = f", {', and '.join(self.conditions)}" if self.conditions else ""
        against, view = "", "sees every upload of every round, knows who sent it"
        factor = f"e^{epsilon}"
        if self.epsilon_alone is not None:
            with_whom = f" together with up to {self.corrupt} of the other clients"
            alone = format_claim(self.epsilon_alone)
            against = (
                f" against the server{with_whom if self.corrupt else ''}, as long as the rest "
                "follow the protocol; and whatever anyone does, "
                f"({alone}, {delta})-differentially private"
            )
            factor += f" as long as the rest follow the protocol, e^{alone} whatever anyone does"
            view = "learns the sum of each round's uploads, knows who took part"
            if self.one_client:  # whose vault may answer runs of both kinds
                view = "sees this client's uploads or learns only sums of them and others', "
                view += "knows who took part"
        return (
            f"{self._whose} {verb} ({epsilon}, {delta})-differentially private for "
            f"{subject}{against}{conditions}. {loosest}"
            f"That is: with {subject}{any_one} being replaced by any other, the probability of "
            f"anything that the content of all messages can show {changes} by at most a factor "
            f"{factor}, up to an additional {delta} (adjacency: replace-one). "
            f"The adversary is the server, which {view}, and may choose the models it sends. "
            f"{method}. {describe_evaluation(self.not_covered)} Not covered: {uncovered}."
        )

    @property
    def conditions(self) -> tuple[str, ...]:
        """The conditions under which the figures would hold; empty where they hold."""
        leaks = [f"were it not for {NOT_COVERED[c]}" for c in LEAKS if c in self.not_covered]
        if "simulated-noise" in self.not_covered:
            leaks.insert(0, "if each client drew its noise securely, as a deployment does")
        return tuple(leaks)

    @property
    def _whose(self) -> str:
        """The subject of the first sentence: which uploads of which clients are covered."""
        scope = " under this ledger" if "other-ledgers" in self.not_covered else ""
        scope = " in this run" if {*self.not_covered} & {*THIS_RUN_ONLY} else scope
        if "undisclosed-budgets" in self.not_covered:
            return f"The uploads{scope} of each client that discloses its budget"
        return f"{'This' if self.one_client else 'Each'} client's uploads{scope}"

    def to_json(self) -> GuaranteeEntry:
        """Return the guarantee as plain data, as in run records and `calibrate --json`."""
        summed: dict[str, Any] = {"corrupt": self.corrupt, "epsilon_alone": self.epsilon_alone}
        return {
            **cast("GuaranteeEntry", summed if self.epsilon_alone is not None else {}),
            "epsilon": self.budget.epsilon,
            "delta": self.budget.delta,
            "unit": self.unit,
            "adjacency": self.adjacency,
            "adversary": self.adversary,
            "calibration": self.calibration,
            "not_covered": list(self.not_covered),
            "text": self.text,
        }

    def __str__(self) -> str:
        return format_promise(self.text)


#: How each sentence of a promise begins, and its label on a terminal; the first is the promise.
_LABELS = {
    "This is the loosest ": "budgets",
    "That is: ": "meaning",
    "The adversary is ": "adversary",
    "The noise is ": "noise",
    "Records that ": "test rows",
    "The clients' own rows ": "test rows",
    "Not covered: ": "not covered",
    "Against whoever sees ": "models only",
}


def format_promise(text: str) -> str:
    """Return the paragraph of a promise as labelled lines for a terminal, with all its words.

    >>> print(format_promise("All of it. The noise is exact. Not covered: the time; the host."))
    promise      All of it.
    noise        The noise is exact.
    not covered  - the time
                 - the host
    """
    lines = []
    for sentence in re.split(rf"(?<=\.) (?={'|'.join(map(re.escape, _LABELS))})", text):
        label = next((name for start, name in _LABELS.items() if sentence.startswith(start)), "")
        items, indent = [sentence], 13
        if label == "not covered":
            items = [f"- {item}" for item in sentence[13:].removesuffix(".").split("; ")]
            indent = 15
        for first, item in zip([label or "promise", *[""] * len(items)], items, strict=False):
            wrapper = textwrap.TextWrapper(96, f"{first:<13}", " " * indent, break_on_hyphens=False)
            lines.append(wrapper.fill(item))
    return "\n".join(lines)


def _to_float(value: object) -> float:
    """Return a real number as a float, anything else as NaN, which no bound admits."""
    try:
        return math.nan if isinstance(value, bool) or not isinstance(value, Real) else float(value)
    except OverflowError:
        return math.inf


def format_claim(value: float, digits: int = 6) -> str:
    """Format a claimed figure in a few digits, rounded up, so that what is printed holds.

    >>> format_claim(8.0), format_claim(1e-05), format_claim(30.317442), format_claim(1.0049e-05, 3)
    ('8', '1e-05', '30.3175', '1.01e-05')
    """
    if not 0 < value < math.inf:
        return f"{value:g}"
    exact = Decimal(repr(float(value)))
    step = Decimal(1).scaleb(exact.adjusted() - digits + 1)
    return f"{float(exact.quantize(step, rounding=ROUND_CEILING)):.{digits}g}"


def format_budget(epsilon: float, delta: float, digits: int = 6) -> str:
    """Format a claimed (ε, δ) in a few digits, rounded up."""
    return f"({format_claim(epsilon, digits)}, {format_claim(delta, 3)})"


def round_up(value: float, places: int) -> float:
    """Return an upper bound rounded up to so many decimal places.

    The value is first rounded to 12 digits, so that an error of float64 is not rounded up.
    """
    if not math.isfinite(value):
        return value
    step = Decimal(1).scaleb(-places)
    return float(Decimal(f"{value:.12g}").quantize(step, rounding=ROUND_CEILING))
