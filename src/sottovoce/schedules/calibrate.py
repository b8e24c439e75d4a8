"""`sottovoce calibrate` as a function: from a budget and a federation to the noise, numbers only.

For a fixed number of rounds T and balanced cohorts: R = ⌈K·T/U⌉ releases of sensitivity Δ, each
with σ = Δ·√(R / capacity). The result also has the noise of the paper's Theorem 1, and what that
noise really guarantees.
"""

from __future__ import annotations

import json
import math
import tomllib
from dataclasses import asdict, dataclass, field
from functools import cache
from importlib import resources
from typing import TYPE_CHECKING, Any, cast

from sottovoce.errors import InputError
from sottovoce.privacy import calibration as calibrations
from sottovoce.privacy import gaussian
from sottovoce.privacy.budget import (
    Budget,
    Calibration,
    Guarantee,
    Unit,
    advise,
    describe_model_view,
    format_claim,
    format_promise,
    list_always_not_covered,
    round_up,
    weigh_noise,
)
from sottovoce.privacy.sensitivity import Recipe
from sottovoce.privacy.tank import Tank
from sottovoce.schedules.pricing import plan_turns

if TYPE_CHECKING:
    from sottovoce.schemas import CalibrationDocument, ExpectedDocument, ModelView, RequestEntry

MOST = 10**9  # rounds, clients or samples: more is taken for a typing error
PARAMETERS = 2410  # of the embedded plan's model


@cache
def default_plan() -> dict[str, Any]:
    """Return the embedded default plan as plain data, without loading the plan checks.

    >>> default_plan()["privacy"]["epsilon"]
    8.0
    """
    text = resources.files("sottovoce.plan").joinpath("default.toml").read_text("utf-8")
    return tomllib.loads(text)


def _default(section: str, key: str) -> Any:
    """Return a field whose default is that of the embedded plan."""
    return field(default_factory=lambda: default_plan()[section][key])


@dataclass(frozen=True)
class CalibrationRequest:
    """A budget and a federation, checked."""

    epsilon: float = _default("privacy", "epsilon")
    delta: float = _default("privacy", "delta")
    rounds: int = _default("rounds", "rounds")
    clients: int = _default("data", "clients")
    per_round: int = cast(int, None)  # None becomes the number of clients
    samples: int = _default("data", "samples")
    clip: float = _default("local", "clip")
    learning_rate: float = _default("local", "learning_rate")
    unit: Unit = _default("local", "unit")  # noqa: RUF009 - a field
    calibration: Calibration = _default("privacy", "calibration")  # noqa: RUF009 - a field
    parameters: int = PARAMETERS
    colluding: int = 0

    def __post_init__(self) -> None:
        if cast(int | None, self.per_round) is None:
            object.__setattr__(self, "per_round", self.clients)
        Budget(self.epsilon, self.delta)  # it checks them
        Recipe(self.learning_rate, self.clip, self.unit)
        for name in ("rounds", "clients", "samples", "parameters"):
            self._check_count(name, 1, MOST, "say how large the federation is")
        self._check_count("per_round", 1, self.clients, "at most all clients upload in a round")
        self._check_count("colluding", 0, self.clients - 1, "they are others")

    def _check_count(self, name: str, least: int, most: int, remedy: str) -> None:
        value = getattr(self, name)
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
            raise InputError.of(name, value, f"a whole number from {least} to {most}", remedy)

    @property
    def sampling(self) -> float:
        """The share of the clients that upload in a round, q = K/U."""
        return self.per_round / self.clients

    @property
    def units(self) -> int:
        """How many units are protected: the records or persons of a client, or the clients."""
        return self.clients if self.unit == "client" else self.samples


@dataclass(frozen=True)
class CalibrationResult:
    """The result. `to_json` is the contract of `sottovoce calibrate --json`."""

    request: CalibrationRequest
    sensitivity: float
    participations: int
    sigma: float
    mu: float
    mu_release: float
    guarantee: Guarantee
    model_view: ModelView
    paper_sigma: float
    paper_true_epsilon: float
    paper_true_delta: float
    tpr_at_fpr_001: float
    auc: float
    noise: float  # how far it moves the model, see `weigh_noise`
    advice: list[str]

    def to_json(self) -> CalibrationDocument:
        """Return one object, as `sottovoce schema calibrate` describes it."""
        return {
            "request": cast("RequestEntry", asdict(self.request)),
            "sensitivity": self.sensitivity,
            "participations": self.participations,
            "sigma": self.sigma,
            "mu": self.mu,
            "mu_release": self.mu_release,
            "guarantee": self.guarantee.to_json(),
            "model_view": self.model_view,
            "paper": {
                "sigma": self.paper_sigma,
                "true_epsilon": self.paper_true_epsilon,
                "true_delta": self.paper_true_delta,
            },
            "attacker": {"tpr_at_fpr_0.01": self.tpr_at_fpr_001, "auc": self.auc},
            "noise": self.noise,
            "advice": self.advice,
        }


def calibrate(
    *,
    epsilon: float | None = None,
    delta: float | None = None,
    rounds: int | None = None,
    clients: int | None = None,
    per_round: int | None = None,
    samples: int | None = None,
    clip: float | None = None,
    learning_rate: float | None = None,
    unit: Unit | None = None,
    calibration: Calibration | None = None,
    parameters: int | None = None,
    colluding: int | None = None,
) -> CalibrationResult:
    """Return the noise a budget buys. Values not given come from the embedded default plan.

    >>> answer = calibrate(epsilon=20, delta=1e-3, rounds=200, clients=50, samples=800)
    >>> round(answer.mu, 6), answer.participations
    (4.053148, 200)
    >>> round(answer.paper_true_epsilon, 1), round(answer.paper_true_delta, 3)
    (30.3, 0.116)
    """
    ask = CalibrationRequest(**{k: v for k, v in locals().items() if v is not None})
    turns = plan_turns("balanced", rounds=ask.rounds, clients=ask.clients, per_round=ask.per_round)
    recipe = Recipe(ask.learning_rate, ask.clip, ask.unit)
    sensitivity = float(recipe.sensitivity(ask.samples))
    sigma = _compute_sigma(ask, sensitivity, turns)
    mu_release = sensitivity / sigma
    mu = math.sqrt(turns) * mu_release

    paper_sigma = calibrations.paper_sigma(
        ask.epsilon, ask.delta, sensitivity=sensitivity, rounds=ask.rounds, sampling=ask.sampling
    )
    paper_mu = math.sqrt(turns) * sensitivity / paper_sigma
    if paper_mu > gaussian.LARGEST_MU:
        remedy = "for so few the paper's formula, which is shown beside it, adds next to no noise"
        raise InputError.of("per_round", ask.per_round, "a larger share of the clients", remedy)
    paper_epsilon = float(gaussian.epsilon(ask.delta, paper_mu))
    is_paper = ask.calibration == "paper"
    promised = Budget(max(paper_epsilon, 1e-6) if is_paper else ask.epsilon, ask.delta)

    noise = weigh_noise(
        sigma,
        rounds=ask.rounds,
        per_round=ask.per_round,
        parameters=ask.parameters,
        step=ask.learning_rate * ask.clip,
    )
    return CalibrationResult(
        request=ask,
        sensitivity=sensitivity,
        participations=turns,
        sigma=sigma,
        mu=mu,
        mu_release=mu_release,
        guarantee=_make_guarantee(ask, promised),
        model_view=_bound_model_view(ask, turns * mu_release**2, promised),
        paper_sigma=paper_sigma,
        paper_true_epsilon=paper_epsilon,
        paper_true_delta=float(gaussian.delta(ask.epsilon, paper_mu)),
        tpr_at_fpr_001=float(gaussian.tpr(0.01, mu)),
        auc=float(gaussian.auc(mu)),
        noise=noise,
        advice=advise(
            ask.epsilon, ask.delta, ask.units, unit=ask.unit, noise=noise, size=ask.units
        ),
    )


def _compute_sigma(ask: CalibrationRequest, sensitivity: float, turns: int) -> float:
    """Return σ = Δ·√(R / capacity), rounded up; under `paper` a client pays for every round."""
    capacity = calibrations.capacity(
        ask.epsilon, ask.delta, calibration=ask.calibration, sampling=ask.sampling
    )
    paid = ask.rounds if calibrations.charges_absent(ask.calibration) else turns
    return float(Tank.full(capacity).offer(sensitivity, paid).require().sigma)


def _make_guarantee(ask: CalibrationRequest, promised: Budget) -> Guarantee:
    codes = list(list_always_not_covered(ask.unit))
    if ask.calibration == "paper":
        codes.append("paper-calibration")
    if ask.delta * ask.units >= 1:
        codes.append("loose-delta")
    return Guarantee(promised, ask.unit, ask.calibration, not_covered=tuple(codes))


def _bound_model_view(ask: CalibrationRequest, mu2: float, promised: Budget) -> ModelView:
    """Return what holds against whoever sees the models of a run, but no upload.

    In a mean of K equal uploads the noise of all others counts, too, except for that of c colluding
    clients: it divides μ² by K − c. What is promised against the server holds in any case.
    """
    colluding = sorted({0, min(1, ask.clients - 1), ask.colluding})
    costs = [mu2 / max(ask.per_round - c, 1) for c in colluding]
    bounds = [float(calibrations.bound_epsilon(ask.delta, cost)) for cost in costs]
    epsilons = [min(bound, promised.epsilon) for bound in bounds]
    return {
        "colluding": colluding,
        "epsilon": epsilons,
        "text": describe_model_view(colluding, epsilons, ask.delta, ask.unit, "secure"),
    }


def list_noise(answer: CalibrationResult) -> list[tuple[str, str, str]]:
    """Return the rows of a table: name, with your calibration, and with the paper's Theorem 1.

    >>> [name for name, _, _ in list_noise(calibrate())][1:3]
    ['noise σ of one upload', 'noise multiplier, σ/Δ']
    """
    ask = answer.request
    delta = float(gaussian.delta(ask.epsilon, answer.mu))
    if ask.calibration != "paper":
        delta = min(delta, ask.delta)
    names = [
        "noise σ of one upload",
        "noise multiplier, σ/Δ",
        "μ of one upload, Δ/σ",
        "μ of the whole run",
        f"ε that holds at δ = {format_claim(ask.delta, 3)}",
        f"δ that holds at ε = {format_claim(ask.epsilon)}",
        "best attacker at 1 % false alarms",
        "best attacker's AUC",
    ]
    ours = _format_noise(answer, answer.sigma, answer.guarantee.budget.epsilon, delta)
    theirs = _format_noise(
        answer, answer.paper_sigma, answer.paper_true_epsilon, answer.paper_true_delta
    )
    heads = "", f"{ask.calibration} (yours)", "Theorem 1 of the paper"
    return [heads, *zip(names, ours, theirs, strict=True)]


def _format_noise(
    answer: CalibrationResult, sigma: float, epsilon: float, delta: float
) -> list[str]:
    """Format a noise and what it is worth, every number rounded up: none promises too much."""
    mu_release = answer.sensitivity / sigma
    mu = math.sqrt(answer.participations) * mu_release
    return [
        *map(format_claim, (sigma, 1 / mu_release, mu_release, mu, epsilon)),
        format_claim(delta, 3),
        f"finds {round_up(float(gaussian.tpr(0.01, mu)), 3):.1%}",
        f"{round_up(float(gaussian.auc(mu)), 4):.4f}",
    ]


def format_table(answer: CalibrationResult) -> str:
    """Format the result for people: the request, one upload, and the paper's noise beside ours.

    >>> print(format_table(calibrate()).splitlines()[0])
    asked for     (ε, δ) = (8, 1e-05) for one record, exact calibration
    """
    ask = answer.request
    cohort = "all" if ask.per_round == ask.clients else f"{ask.per_round}"
    nouns = {"record": "one record", "person": "one person", "client": "a client's whole dataset"}
    formula = "2ηC" if ask.unit == "client" else "2ηC/n"
    warning = []
    if answer.paper_true_epsilon > ask.epsilon:
        promised = f"it promises ε = {format_claim(ask.epsilon)}"
        gives = f"gives {format_claim(answer.paper_true_epsilon, 3)}"
        words = "The paper's formula adds too little noise here"
        warning = [f"{words}: {promised} and {gives}.", ""]
    lines = [
        f"asked for     (ε, δ) = ({format_claim(ask.epsilon)}, {format_claim(ask.delta, 3)}) "
        f"for {nouns[ask.unit]}, {ask.calibration} calibration",
        f"federation    {ask.clients} clients, {cohort} in each of {ask.rounds} rounds: "
        f"{answer.participations} uploads a client (T fixed, cohorts balanced)",
        f"one upload    Δ = {formula} = {answer.sensitivity:.6g} "
        f"(n = {ask.samples}, C = {ask.clip:g}, η = {ask.learning_rate:g})",
        "",
        *(f"{name:<34}  {ours:>16}  {theirs:>24}" for name, ours, theirs in list_noise(answer)),
        "",
        *warning,
        str(answer.guarantee),
        "",
        format_promise(answer.model_view["text"]),
    ]
    return "\n".join(line.rstrip() for line in lines)


NEAREST = 5  # measured federations that are named beside one's own
NO_NOISE = 10_000.0  # the ε that stands for no noise


@cache
def load_expected() -> ExpectedDocument:
    """Return what federations of several sizes have reached, as benchmarks/expect.py measured."""
    file = resources.files("sottovoce.schedules").joinpath("expected.json")
    return cast("ExpectedDocument", json.loads(file.read_text("utf-8")))


def format_expected(answer: CalibrationResult) -> str:
    """Format what measured federations reached, and what those with noise like this one kept."""
    measured, ask = load_expected(), answer.request
    cells = {(c["data"], c["rows"], c["clients"], c["epsilon"]): c for c in measured["cells"]}
    columns = sorted({epsilon for *_, epsilon in cells})
    heads = ["no noise" if e == NO_NOISE else f"ε = {e:g}" for e in columns]
    lines = [
        f"Test accuracy at the settings of the embedded plan (nothing tuned), mean of "
        f"{measured['seeds']} seeds,",
        "for one record and δ = 1e-05; in brackets the share of the most frequent class.",
        "",
        f"{'data':<16}{'rows per client':>16}{'clients':>9}" + "".join(f"{h:>10}" for h in heads),
    ]
    for name, rows, clients in dict.fromkeys(place[:3] for place in cells):
        accuracies = [f"{cells[name, rows, clients, e]['accuracy']:>10.1%}" for e in columns]
        data = f"{name} ({measured['majority'][name]:.0%})"
        lines.append(f"{data:<16}{rows:>16,}{clients:>9,}" + "".join(accuracies))
    private = [cell for cell in measured["cells"] if cell["epsilon"] != NO_NOISE]
    private.sort(key=lambda cell: abs(math.log(cell["noise"] / answer.noise)))
    shares = []
    for cell in private[:NEAREST]:
        base = measured["majority"][cell["data"]]
        best = cells[cell["data"], cell["rows"], cell["clients"], NO_NOISE]["accuracy"]
        shares.append(max(0.0, (cell["accuracy"] - base) / (best - base)))
    near = [cell["noise"] for cell in private[:NEAREST]]
    lines += [
        "",
        f"Your federation (ε = {ask.epsilon:g}, {ask.samples:,} rows, {ask.clients:,} clients, "
        f"{ask.parameters:,} parameters) has the noise ratio {answer.noise:.2g}:",
        f"the {NEAREST} measured ones nearest to it ({min(near):.2g} to {max(near):.2g}) kept "
        f"{min(shares):.0%} to {max(shares):.0%} of what they gain without noise",
        "over always naming the most frequent class. This is about noise, and about classes of",
        "similar size: a rare class, or a number to predict, needs more rows.",
    ]
    return "\n".join(lines)
