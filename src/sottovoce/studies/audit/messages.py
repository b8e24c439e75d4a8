"""Measure what uploads of the real `client.release` reveal about worst-case neighbours.

Against a μ-GDP release TPR ≤ Φ(Φ⁻¹(FPR) + μ) (Dong, Roth & Su 2022), so that counted rates with
Clopper–Pearson bounds (TPR ≥ t, FPR ≤ f) prove μ ≥ Φ⁻¹(t) − Φ⁻¹(f). To turn that μ into an ε
assumes that the noise has the Gaussian shape. Without any assumption ε ≥ ln((t − δ)/f).

**The duel** (`measure`). A server that knows both D and D′ sends a model at which replacing one
record turns a clipped gradient around, so that the upload moves by all of Δ, and scores the upload
by its likelihood ratio: N(±μ/2, 1) with noise as promised, and no attack is better. From round to
round the model's sign changes: noise that two rounds share cancels out of the score and is
detected. The heads of the messages are compared, too; a noised loss is one more coordinate.

**One run** (`play_one_run`). Every row is a canary whose label a fair coin has chosen, and the
server guesses the coins that it is surest of, a number fixed beforehand. If the run is (ε, δ)-DP,

    P[at least v of r guesses right] ≤ β + 2mδ·α,   β = P[Binomial(r, e^ε/(1 + e^ε)) ≥ v],

with α = max_i (P[Binomial ≥ v − i] − β)/i (Steinke, Nasr & Jagielski 2023): an ε for which that is
below 1 − confidence is refuted. Assuming the Gaussian shape, Mahloujifar, Melis & Chaudhuri (2024)
refute more from the same guesses.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sottovoce.client import release
from sottovoce.client.messages import unpack
from sottovoce.client.release import Parameters, Price
from sottovoce.client.sum_protocol import complete_noise, promise_noise
from sottovoce.errors import InputError
from sottovoce.models.base import Form, Regression, sample_losses
from sottovoce.models.person import join_persons
from sottovoce.privacy import calibration, gaussian, grid
from sottovoce.privacy.budget import Calibration, Unit, format_claim
from sottovoce.privacy.gaussian import cdf, quantile
from sottovoce.privacy.sensitivity import Recipe
from sottovoce.privacy.tank import Tank
from sottovoce.schedules.base import Round
from sottovoce.schedules.pricing import Terms

CONFIDENCE = 0.999  # of every bound that is shown
WRONG = 1e-3  # the probability that an audit contradicts a promise that holds, at most
COMPARISONS = 200  # the most that one audit makes; they share WRONG equally
WRONG_PER_COMPARISON = WRONG / COMPARISONS
_TINY = 1e-300


def compute_capacity(epsilon: float, delta: float, by: Calibration) -> float:
    """Return the μ² that a calibration lets a run spend, rounded as in a vault if one takes it.

    >>> [round(compute_capacity(20.0, 1e-3, by) ** 0.5, 2) for by in ("exact", "paper")]
    [4.05, 5.38]
    """
    if by == "paper":  # with cohorts of q·U clients μ² is 1/q of this, and q of it is released
        return float(calibration.capacity(epsilon, delta, calibration=by))
    return float(calibration.vault_capacity(epsilon, delta, calibration=by))


def price_run(
    epsilon: float, delta: float, by: Calibration, rounds: int, unit: Unit, samples: int, *,
    loss: bool = False, honest: int = 1,
) -> list[Price]:  # fmt: skip
    """Return the prices of a run's rounds, as a client computes them from its tank.

    Where only sums are seen, `honest` equal clients share the noise, as their protocol has it.
    """
    tank, prices = Tank.full(compute_capacity(epsilon, delta, by)), []
    terms = Terms(clients=1, per_round=1, calibration=by)
    change = grid.grid_sensitivity(unit, samples)
    for t in range(rounds):
        price = release.price(tank, Round(t, rounds), terms, change=change, loss=loss)
        tank = tank.spend(sum(price.units))
        if honest > 1:
            (sigma,), share = price.noise, float(honest)
            promise = promise_noise(sigma, share)
            noise = complete_noise(sigma, promise, [promise] * honest, honest, share=share)
            price = replace(price, noise=(noise,))
        prices.append(price)
    return prices


@dataclass(frozen=True)
class Level:
    """The budget of one column of the audit's table; without an epsilon, no noise.

    >>> Level(None).name, Level(8.0, 1e-5).name, round(Level(8.0, 1e-5).mu, 4)
    ('no noise', 'ε = 8', 1.666)
    """

    epsilon: float | None
    delta: float = 1e-5
    calibration: Calibration = "exact"  # what turns the budget into noise
    share: float = field(default=1.0, compare=False)  # of μ² that is seen: h/K of models

    @property
    def name(self) -> str:
        """The head of the column."""
        return "no noise" if self.epsilon is None else f"ε = {format_claim(self.epsilon)}"

    @property
    def mu(self) -> float:
        """μ of the promise, which bounds every attack; infinite without noise."""
        if self.epsilon is None:
            return np.inf
        return float(gaussian.mu(self.epsilon, self.delta)) * math.sqrt(self.share)

    def bound_tpr(self, fpr: float) -> float:
        """Return the largest TPR of any attacker at this rate of false alarms."""
        return 1.0 if self.epsilon is None else float(gaussian.tpr(fpr, self.mu))


def bound_rate(hits: int, trials: int, confidence: float = CONFIDENCE) -> tuple[float, float]:
    """Return the Clopper–Pearson interval of a probability from the hits among trials.

    Each end is wrong with probability (1 − confidence)/2 at most.
    """
    from scipy.special import betaincinv

    if not 0 <= hits <= trials or trials < 1 or not 0 < confidence < 1:
        raise InputError.of("hits", (hits, trials), "hits of at least one trial", "count them")
    wrong = (1 - confidence) / 2
    low = 0.0 if hits == 0 else float(betaincinv(hits, trials - hits + 1, wrong))
    high = 1.0 if hits == trials else float(betaincinv(hits + 1, trials - hits, 1 - wrong))
    return low, high


@dataclass(frozen=True)
class Rates:
    """The counts of an attack: hits among the positives, alarms among the negatives.

    >>> rates = Rates(hits=841, positives=1000, alarms=159, negatives=1000)
    >>> round(rates.mu, 2), [round(end, 2) for end in rates.bound_mu()]
    (2.0, [1.66, 2.34])
    """

    hits: int
    positives: int
    alarms: int
    negatives: int

    @property
    def tpr(self) -> float:
        """The share of positives that were found."""
        return self.hits / self.positives

    @property
    def fpr(self) -> float:
        """The share of negatives that were taken for positives."""
        return self.alarms / self.negatives

    @property
    def mu(self) -> float:
        """The μ of the counted rates; infinite where a rate is 0 or 1."""
        return compute_mu(self.tpr, self.fpr)

    def bound_mu(self, confidence: float = CONFIDENCE) -> tuple[float, float]:
        """Return an interval for the μ of this attack; its lower end is proven."""
        t, f = self._ends(confidence)
        return max(0.0, compute_mu(t[0], f[1])), compute_mu(t[1], f[0])

    def epsilon(self, delta: float, confidence: float = CONFIDENCE) -> float:
        """Return the ε that is proven at this δ, whatever the shape of the noise."""
        t, f = self._ends(confidence)
        ratios = ((t[0] - delta) / max(f[1], _TINY), (1 - f[1] - delta) / max(1 - t[0], _TINY))
        return float(np.log(max(1.0, *ratios)))

    def _ends(self, confidence: float) -> tuple[tuple[float, float], tuple[float, float]]:
        # Each rate gets half of the error, so that both hold together with the confidence.
        sure = 1 - (1 - confidence) / 2
        hits = bound_rate(self.hits, self.positives, sure)
        return hits, bound_rate(self.alarms, self.negatives, sure)


def compute_mu(tpr: float, fpr: float) -> float:
    """Return the μ of two rates: Φ⁻¹(TPR) − Φ⁻¹(FPR)."""
    ends = [
        -np.inf if rate <= 0 else np.inf if rate >= 1 else float(quantile(rate))
        for rate in (tpr, fpr)
    ]
    return ends[0] - ends[1] if ends[0] != ends[1] else 0.0


def count_rates(positive: object, negative: object, threshold: float) -> Rates:
    """Count hits and alarms of the rule "score > threshold".

    For a proof the threshold must be fixed before the scores are seen.
    """
    yes, no = np.asarray(positive, dtype=np.float64), np.asarray(negative, dtype=np.float64)
    hits, alarms = int(np.sum(yes > threshold)), int(np.sum(no > threshold))
    return Rates(hits, yes.size, alarms, no.size)


def bound_guess_rate(candidates: float, mu: float) -> float:
    """Return the largest probability of naming the right one of equally likely records.

    To name a record is a test with FPR = 1/candidates between the release with that record and the
    release with another one: P ≤ Φ(Φ⁻¹(1/candidates) + μ). Where records are not equally likely,
    1/candidates is the probability of the likeliest (the bound is concave in it).
    """
    return float(gaussian.tpr(1 / candidates, mu))


def choose_far_threshold(mu: float, messages: int, delta: float = 0.0) -> float:
    """Return the threshold that should prove the largest ε from this many messages on each side.

    It is computed from scores N(±μ/2, 1), not from measured ones. Far out there are too few alarms
    for a good bound; near the middle the ratio of the rates is small.
    """
    from scipy.special import betaincinv

    at = np.linspace(0.0, 4.0 + mu / 2, 161)
    hits, alarms = (messages * np.asarray(cdf(sign * mu / 2 - at)) for sign in (1, -1))
    wrong = (1 - CONFIDENCE) / 16  # shared by four readings with two rates of two ends each
    tpr = betaincinv(np.maximum(hits, _TINY), messages - hits + 1, wrong)
    fpr = betaincinv(alarms + 1, messages - alarms, 1 - wrong)
    return float(at[np.argmax((tpr - delta) / fpr)])


def bound_mean(values: object, confidence: float = CONFIDENCE) -> tuple[float, float]:
    """Bound the mean of independent numbers from 0 to 1, whatever their distribution.

    P[mean of n ≥ x] ≤ exp(−n·KL(x ‖ p)) where p is the true mean (Hoeffding 1963). The numbers are
    shares of a run's records: records of one run share its noise, but runs are independent.
    """
    shares = np.asarray(values, dtype=np.float64)
    if shares.size == 0 or np.min(shares) < 0 or np.max(shares) > 1:
        raise InputError.of("values", shares, "numbers from 0 to 1", "give the share of each run")
    mean, room = float(shares.mean()), float(-np.log((1 - confidence) / 2)) / shares.size

    def is_near(p: float) -> bool:
        """Return whether KL(mean ‖ p), in nats, is small enough."""
        pairs = [(mean, p), (1 - mean, 1 - p)]
        return sum(a * math.log(a / max(b, _TINY)) for a, b in pairs if a > 0) <= room

    return find_edge(is_near, mean, 0.0)[1], find_edge(is_near, mean, 1.0)[1]


def find_edge(holds: Callable[[float], bool], inside: float, outside: float) -> tuple[float, float]:
    """Bisect for where `holds` stops holding; return the last number inside, the first outside."""
    for _ in range(60):
        middle = (inside + outside) / 2
        inside, outside = (middle, outside) if holds(middle) else (inside, middle)
    return inside, outside


def choose_threshold(negative: object, fpr: float) -> float:
    """Return the threshold that at most this share of the negatives exceeds."""
    ordered = np.sort(np.asarray(negative, dtype=np.float64))
    allowed = int(np.floor(fpr * ordered.size))
    return float(ordered[ordered.size - 1 - min(allowed, ordered.size - 1)])


def format_lower_bound(value: float, digits: int) -> str:
    """Format a lower bound, rounded down so that no more is claimed than was proven."""
    return f"{math.floor(value * 10**digits + 1e-9) / 10**digits:.{digits}f}"


Floats = NDArray[np.float64]
Progress = Callable[[int, int], None]

FEATURES, SAMPLES = 4, 3  # samples: the canary and two others, which the server knows
ROWS = 2  # of every person of a duel or a run of canaries
PRACTICE_RUNS = 20  # on each side, and a tenth of the runs more: they show which heads there are
_STEEP, _DIM = 1000.0, 3e-4  # weights of the last layer, bias of the first
_MOST = 60.0  # the largest ε and μ that one run is tested for
_CERTAIN = 1e300  # above every score except ∞, which a run has whose heads give D′ away
_BEYOND = 1e3  # a μ above which no ε is computed


@dataclass(frozen=True)
class OneRun:
    """The guesses of one run, and what they prove."""

    setting: AuditSetting
    canaries: int
    guesses: int
    right: int
    wrong: float = WRONG  # the probability of contradicting a promise that holds, at most

    @property
    def epsilon(self) -> float:
        """The largest ε that is refuted, whatever the shape of the noise."""
        return refute_epsilon(self.canaries, self.guesses, self.right, self.setting.delta)

    @property
    def mu(self) -> float:
        """The largest μ that is refuted, assuming the Gaussian shape."""
        return refute_mu(self.canaries, self.guesses, self.right)

    @property
    def gaussian_epsilon(self) -> float:
        """The ε of that μ at the setting's δ."""
        return float(gaussian.epsilon(self.setting.delta, self.mu))

    @property
    def contradicts(self) -> bool:
        """Whether (ε, δ) or its μ is refuted; by chance with probability `wrong` at most."""
        counts, sure = (self.canaries, self.guesses, self.right), 1 - self.wrong / 2
        free = refute_epsilon(*counts, self.setting.delta, sure)
        return free > self.setting.epsilon or refute_mu(*counts, sure) > self.setting.promised


def compute_p_value(canaries: int, guesses: int, right: int, epsilon: float, delta: float) -> float:
    """Bound the probability of so many right guesses if the run is (ε, δ)-DP."""
    from scipy.stats import binom

    chance = 1 / (1 + np.exp(-epsilon))
    beta = float(binom.sf(right - 1, guesses, chance))
    if delta == 0 or right == 0:
        return beta
    i = np.arange(1, right + 1)
    alpha = float(np.max((binom.sf(right - i - 1, guesses, chance) - beta) / i, initial=0.0))
    return min(1.0, beta + 2 * canaries * delta * alpha)


def refute_epsilon(
    canaries: int, guesses: int, right: int, delta: float, confidence: float = CONFIDENCE
) -> float:
    """Return the largest ε that so many right guesses refute with this confidence."""
    counts = canaries, guesses, right
    return _find_largest(lambda e: compute_p_value(*counts, e, delta) < 1 - confidence)


def refute_mu(canaries: int, guesses: int, right: int, confidence: float = CONFIDENCE) -> float:
    """Return the largest μ that so many right guesses refute, assuming the Gaussian shape."""
    return _find_largest(lambda mu: _is_refuted(canaries, guesses, right, mu, 1 - confidence))


def _is_refuted(canaries: int, guesses: int, right: int, mu: float, wrong: float) -> bool:
    """Return whether so many right guesses refute μ-GDP (Mahloujifar et al. 2024).

    From the tail inwards it adds up the probability of right and of wrong guesses that μ-GDP
    allows.
    """
    from scipy.special import ndtr, ndtri

    hit, miss = wrong * right / canaries, wrong * (guesses - right) / canaries
    for i in range(right - 1, -1, -1):
        least = max(miss, float(ndtr(ndtri(hit) - mu)))
        if least == miss:
            break  # nothing changes from here on
        hit, miss = min(1.0, hit + i / (guesses - i) * (least - miss)), least
    return hit + miss > guesses / canaries


def _find_largest(is_refuted: Callable[[float], bool]) -> float:
    """Return the largest refuted number below _MOST, by bisection."""
    return find_edge(is_refuted, 0.0, _MOST)[0] if is_refuted(0.0) else 0.0


def choose_guess_count(canaries: int, mu: float) -> int:
    """Return how many coins to guess: the number that proves most if scores are N(±μ/2, 1).

    >>> choose_guess_count(1000, 0.9), choose_guess_count(1000, 3.4)
    (300, 600)
    """
    scores = np.random.default_rng(0).normal(mu / 2, size=20_000)  # right where above 0
    surest = scores[np.argsort(-np.abs(scores))] > 0
    counts = [max(10, int(share * canaries)) for share in (0.1, 0.3, 0.6, 0.9)]
    right = [int(np.mean(surest[: 20_000 * n // canaries]) * n) for n in counts]
    proven = [refute_mu(canaries, n, v) for n, v in zip(counts, right, strict=True)]
    return counts[int(np.argmax(proven))]


def play_one_run(
    setting: AuditSetting, canaries: int, *, seed: int = 0, wrong: float = WRONG
) -> OneRun:
    """Play one run of a client whose rows are all canaries, through the real release.

    The server sends models at which it sees the canaries best: the promise holds for any model. A
    coin decides one record, or all rows of a person, so the unit must be one of them.
    """
    if setting.recipe.unit == "client":
        remedy = "one run has one client, and so one coin a run"
        raise InputError.of("unit", "client", "record or person", remedy)
    coins = np.random.default_rng(seed).integers(0, 2, canaries)
    recipe, form = replace(setting.recipe, steps=1), setting.make_form(canaries)
    x, y = setting.make_samples(np.eye(canaries) * 1000.0 * max(1.0, recipe.clip), coins == 1)
    scores = np.zeros(canaries)
    for t, paid in enumerate(setting.price_rounds(canaries)):
        model = make_model(form, sign := -1.0 if t % 2 else 1.0)
        sent = release.release(form, model, x, y, recipe=recipe, paid=paid, head={"kind": "upload"})
        scores -= sign * sent.params["w1"][:, 0].astype(np.float64) / sent.sigma[0]
    count = choose_guess_count(canaries, setting.promised)
    surest = np.argsort(-np.abs(scores))[:count]
    right = int(np.sum((scores[surest] > 0) == (coins[surest] == 1)))
    return OneRun(setting, canaries, count, right, wrong)


@dataclass(frozen=True)
class AuditSetting:
    """What is audited: a budget, the calibration that turns it into noise, and the recipe."""

    epsilon: float
    delta: float
    recipe: Recipe
    calibration: Calibration = "exact"
    rounds: int = 2  # uploads that spend the whole budget; even, because the sign alternates
    loss_bound: float | None = None  # B of the losses, where clients report them
    target: Regression | None = None  # where the label is a number
    clients: int = 1  # above 1 the attacker sees models alone, the means of so many uploads
    honest: int = 1  # clients that share their noise, where a server learns only sums

    def make_form(self, features: int) -> Form:
        """Return the form of a model with one hidden unit, for samples of these features."""
        rows, classes = ROWS * (self.recipe.unit == "person"), 2 if self.target is None else 1
        return Form("mlp", (features,), classes, {"hidden": 1}, None, rows, self.target)

    def make_samples(self, rows: Floats, turned: NDArray[np.bool_]) -> tuple[Floats, NDArray[Any]]:
        """Return samples and labels of one of two opposite kinds; a person has the row twice."""
        y: NDArray[Any] = turned.astype(np.int64) if self.target is None else 2.0 * turned - 1
        if self.recipe.unit != "person":
            return rows, y
        pairs = [np.repeat(array, ROWS, axis=0) for array in (rows, y, np.arange(len(y)))]
        return join_persons(pairs[0], pairs[1], pairs[2], ROWS), np.zeros(len(y), np.int64)

    @property
    def promised(self) -> float:
        """μ that no attacker may exceed: of (ε, δ), and of models √(h/K) times that."""
        share = self.honest / self.clients
        return float(gaussian.mu(self.epsilon, self.delta)) * math.sqrt(share)

    @property
    def claim(self) -> float:
        """ε that this attacker is held to: the plan's, or that of the models."""
        if self.clients == 1:
            return self.epsilon
        return float(gaussian.epsilon(self.delta, self.promised))

    @property
    def name(self) -> str:
        """The noise, whose uploads are averaged, and the plan's ε."""
        by = "the paper's" if self.calibration == "paper" else self.calibration
        seen = "" if self.clients == 1 else f", models of {self.clients} clients"
        shared = "" if self.honest == 1 else f" (sums, h = {self.honest})"
        return f"{by}, ε = {format_claim(self.epsilon)}{seen}{shared}"

    def price_rounds(self, samples: int) -> list[Price]:
        """Return what the rounds cost a client with so many samples."""
        return price_run(
            self.epsilon, self.delta, self.calibration, self.rounds, self.recipe.unit, samples,
            loss=self.loss_bound is not None, honest=self.honest,
        )  # fmt: skip


@dataclass(frozen=True, eq=False)
class Measurement:
    """The scores of a duel, and what they prove."""

    setting: AuditSetting
    true: float  # μ of the noise that the client says it drew
    without: Floats  # scores of runs with D
    having: Floats  # scores of runs with D′
    wrong: float = WRONG  # the probability of contradicting a promise that holds, at most

    @property
    def messages(self) -> int:
        """The number of runs on each side."""
        return self.having.size

    @property
    def rates(self) -> Rates:
        """Hits and alarms at the threshold 0, half-way between the two means."""
        return count_rates(self.having, self.without, 0.0)

    @property
    def mu(self) -> tuple[float, float, float]:
        """The measured μ: its proven lower bound, as counted, and its upper bound."""
        low, high = self.rates.bound_mu()
        return low, self.rates.mu, high

    @property
    def epsilon(self) -> tuple[float, float]:
        """Lower and upper bound of ε at the setting's δ, assuming the Gaussian shape."""
        low, high = (
            float(gaussian.epsilon(self.setting.delta, m)) if m < _BEYOND else np.inf
            for m in self.mu[::2]
        )
        return low, high

    @property
    def free_epsilon(self) -> float:
        """The ε that is proven without any assumption."""
        return self._bound_epsilon(1 - CONFIDENCE)

    def _bound_epsilon(self, wrong: float) -> float:
        """Return the largest ε proven at two thresholds fixed beforehand, read from both sides.

        One is where Gaussian scores prove most; only heads that decide exceed the other. The four
        readings share the error equally.
        """
        far = choose_far_threshold(self.true, self.messages, self.setting.delta)
        sides = ((self.having, self.without), (-self.without, -self.having))
        counted = [count_rates(*side, at) for side in sides for at in (far, _CERTAIN)]
        return max(rates.epsilon(self.setting.delta, 1 - wrong / 4) for rates in counted)

    @property
    def refutes_mu(self) -> bool:
        """Whether the promised μ is refuted, whatever the shape of the noise.

        That (ε, δ) is refuted too follows only if the noise has the Gaussian shape.
        """
        return self.rates.bound_mu(1 - self.wrong / 2)[0] > self.setting.promised

    @property
    def refutes_epsilon(self) -> bool:
        """Whether (ε, δ) itself is refuted, without any assumption."""
        return self._bound_epsilon(self.wrong / 2) > self.setting.claim

    @property
    def contradicts(self) -> bool:
        """Whether the promise is refuted; by chance with probability `wrong` at most."""
        return self.refutes_mu or self.refutes_epsilon


def make_neighbours(setting: AuditSetting) -> list[tuple[Floats, NDArray[Any]]]:
    """Return the samples and labels of D and of D′, which differ in one protected unit."""
    rows = np.full((SAMPLES, FEATURES), 5.0 * max(1.0, setting.recipe.clip))
    replaced = SAMPLES if setting.recipe.unit == "client" else 1
    return [setting.make_samples(rows, np.arange(SAMPLES) < k) for k in (0, replaced)]


def make_model(form: Form, sign: float, loss_bound: float | None = None) -> Parameters:
    """Make a model at which the label decides in which direction the clipped gradient points.

    The last layer is steep, so that nearly all of a gradient is in the first layer; `sign` says
    which label pulls in which direction. Where losses are reported, those of the two labels are
    close to 0 and B, as far as the last layer stays steep enough.
    """
    params = {name: np.zeros(shape) for name, shape in form.shapes().items()}
    params["b1"][:] = _DIM
    # A larger number pulls as the second class does.
    params["w2"][:] = sign * _STEEP * np.array([1.0, -1.0] if form.classes == 2 else [-1.0])
    if loss_bound is not None and form.target is None:
        lean = min(max(loss_bound, 5.0) / 2 + 0.3, 4.0)
        params["b2"][:] = lean, -lean
    return params


@dataclass(frozen=True, eq=False)
class Duel:
    """What the server knows beforehand: the models, the noise, what D and D′ would answer."""

    setting: AuditSetting
    paid: tuple[Price, ...]
    models: tuple[Parameters, ...]
    middle: Floats  # [rounds, parameters and a loss]: half-way between the answers of D and D′
    apart: Floats  # [rounds, the same]: their difference in units of σ²
    mu: float

    @classmethod
    def prepare(cls, setting: AuditSetting) -> Duel:
        """Compute the prices as a client does from its tank, and the answers without noise."""
        recipe, form = replace(setting.recipe, steps=1), setting.make_form(FEATURES)
        paid, bound = setting.price_rounds(SAMPLES), setting.loss_bound
        signs = (1.0, -1.0) * (setting.rounds // 2 + 1)
        models = tuple(make_model(form, sign, bound) for sign in signs[: setting.rounds])
        ends = [
            np.array([_compute_answer(form, w, *samples, recipe, bound) for w in models])
            for samples in make_neighbours(setting)
        ]
        step = recipe.learning_rate / SAMPLES * grid.grid_unit(recipe.clip)
        sigma = np.full(ends[0].shape, [[step * price.noise[0]] for price in paid])
        if bound is not None:
            losses = np.array([price.loss_noise or 0 for price in paid])
            sigma[:, -1] = bound * losses / grid.REPLACED / SAMPLES
        # Models are means: the others hold D's rows, which the attacker knows, and add noise.
        count = setting.clients
        ends, sigma = [ends[0] + (end - ends[0]) / count for end in ends], sigma / math.sqrt(count)
        difference = (ends[1] - ends[0]) / sigma
        mu = float(np.sqrt(np.sum(difference**2)))
        middle = (ends[0] + ends[1]) / 2
        return cls(setting, tuple(paid), models, middle, difference / sigma / mu, mu)

    def play_runs(
        self, samples: tuple[Floats, NDArray[Any]], runs: int
    ) -> Iterator[tuple[float, str]]:
        """Play runs of the client with these samples; yield the score and the heads of each run.

        An attacker that sees models alone sees the mean of all clients' uploads, and no head.
        """
        setting = self.setting
        recipe, form = replace(setting.recipe, steps=1), setting.make_form(FEATURES)
        clients = [samples, *[make_neighbours(setting)[0]] * (setting.clients - 1)]
        for _ in range(runs):
            score, heads = 0.0, []
            for t, (paid, sent) in enumerate(zip(self.paid, self.models, strict=True)):
                answers = []
                for rows in clients:
                    upload = release.release(
                        form, sent, *rows, recipe=recipe, paid=paid,
                        head={"kind": "upload", "t": t}, loss_bound=setting.loss_bound,
                    )  # fmt: skip
                    head, arrays = unpack(upload.blob)
                    answers.append(flatten(arrays))
                if setting.loss_bound is not None:
                    answers[0] = np.append(answers[0], float(head["loss"]))
                score += float((np.mean(answers, axis=0) - self.middle[t]) @ self.apart[t])
                heads.append(repr(sorted(head.items())))
            yield score, "|".join(heads) if setting.clients == 1 else ""


def measure(
    setting: AuditSetting, messages: int, progress: Progress | None = None, wrong: float = WRONG
) -> Measurement:
    """Play the duel `messages` times on each side, and return the scores."""
    duel = Duel.prepare(setting)
    both, practice = make_neighbours(setting), PRACTICE_RUNS + messages // 10
    known_heads = [{head for _, head in duel.play_runs(samples, practice)} for samples in both]
    sides: list[Floats] = []
    for samples in both:
        scores = np.empty(messages)
        for i, (score, head) in enumerate(duel.play_runs(samples, messages)):
            # 0 where heads do not decide.
            verdict = (head in known_heads[1]) - (head in known_heads[0])
            scores[i] = np.inf * verdict if verdict else score
            if progress is not None and i % 100 == 99:
                progress(len(sides) * messages + i + 1, 2 * messages)
        sides.append(scores)
    return Measurement(setting, duel.mu, sides[0], sides[1], wrong)


def _compute_answer(
    form: Form, sent: Parameters, x: Floats, y: NDArray[Any], recipe: Recipe, bound: float | None
) -> Floats:
    """Return what a client would upload without noise, and its mean loss if that is reported."""
    answer = flatten(release.step(form, sent, x, y, recipe))
    if bound is None:
        return answer
    losses = sample_losses(form, sent, x, y)
    return np.append(answer, bound * grid.bounded_sum(losses, bound) / grid.REPLACED / len(y))


def flatten(params: Parameters | dict[str, NDArray[np.float32]]) -> Floats:
    """Return all parameters as one vector, in the order of their names."""
    return np.concatenate([np.asarray(params[name], np.float64).ravel() for name in sorted(params)])
