"""The most that any attacker can do against μ-GDP, and what counts of hits and alarms prove.

An attacker says "it was D′" or "it was D". Against a μ-GDP release

    TPR ≤ Φ(Φ⁻¹(FPR) + μ)                               (Dong, Roth & Su 2022)

so that counted rates with Clopper–Pearson bounds (TPR ≥ t, FPR ≤ f) prove μ ≥ Φ⁻¹(t) − Φ⁻¹(f). To
turn that μ into an ε assumes that the noise has the Gaussian shape. Without any assumption
ε ≥ ln((t − δ)/f), which with n messages cannot be much more than ln n.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from sottovoce.client import release
from sottovoce.client.release import Price
from sottovoce.errors import InputError
from sottovoce.privacy import calibration, gaussian, grid
from sottovoce.privacy.budget import Calibration, Unit
from sottovoce.privacy.gaussian import cdf, quantile
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
    capacity: float, rounds: int, by: Calibration, *, unit: Unit, samples: int, loss: bool = False
) -> list[Price]:
    """Return the prices of a run's rounds, as a client computes them from its tank."""
    tank, prices = Tank.full(capacity), []
    terms = Terms(clients=1, per_round=1, calibration=by)
    change = grid.grid_sensitivity(unit, samples)
    for t in range(rounds):
        prices.append(release.price(tank, Round(t, rounds), terms, change=change, loss=loss))
        tank = tank.spend(sum(prices[-1].units))
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

    @property
    def name(self) -> str:
        """The head of the column."""
        return "no noise" if self.epsilon is None else f"ε = {self.epsilon:g}"

    @property
    def mu(self) -> float:
        """μ of the promise, which bounds every attack; infinite without noise."""
        return np.inf if self.epsilon is None else float(gaussian.mu(self.epsilon, self.delta))

    def bound_tpr(self, fpr: float) -> float:
        """Return the largest TPR of any attacker at this rate of false alarms."""
        return 1.0 if self.epsilon is None else float(gaussian.tpr(fpr, self.mu))


def bound_rate(hits: int, trials: int, confidence: float = CONFIDENCE) -> tuple[float, float]:
    """Return the Clopper–Pearson interval of a probability from the hits among trials.

    Each end is wrong with probability (1 − confidence)/2 at most.

    >>> [round(end, 4) for end in bound_rate(0, 1000, 0.95)]
    [0.0, 0.0037]
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
        """Return the ε that is proven at this δ, whatever the shape of the noise.

        >>> round(Rates(1000, 1000, 0, 1000).epsilon(1e-5), 2)  # a perfect attack proves no more
        4.79
        """
        t, f = self._ends(confidence)
        ratios = ((t[0] - delta) / max(f[1], _TINY), (1 - f[1] - delta) / max(1 - t[0], _TINY))
        return float(np.log(max(1.0, *ratios)))

    def exceeds(self, mu: float, confidence: float = CONFIDENCE) -> bool:
        """Return whether the counts contradict μ: TPR > Φ(Φ⁻¹(FPR) + μ) beyond chance.

        >>> Rates(841, 1000, 159, 1000).exceeds(2.0), Rates(990, 1000, 10, 1000).exceeds(2.0)
        (False, True)
        """
        return self.bound_mu(confidence)[0] > mu

    def _ends(self, confidence: float) -> tuple[tuple[float, float], tuple[float, float]]:
        # Each rate gets half of the error, so that both hold together with the confidence.
        sure = 1 - (1 - confidence) / 2
        hits = bound_rate(self.hits, self.positives, sure)
        return hits, bound_rate(self.alarms, self.negatives, sure)


def compute_mu(tpr: float, fpr: float) -> float:
    """Return the μ of two rates: Φ⁻¹(TPR) − Φ⁻¹(FPR).

    >>> round(compute_mu(0.8413, 0.1587), 2)
    2.0
    """
    with np.errstate(divide="ignore"):
        ends = [
            -np.inf if rate <= 0 else np.inf if rate >= 1 else float(quantile(rate))
            for rate in (tpr, fpr)
        ]
    return float(ends[0] - ends[1]) if ends[0] != ends[1] else 0.0


def count_rates(positive: object, negative: object, threshold: float) -> Rates:
    """Count hits and alarms of the rule "score > threshold".

    For a proof the threshold must be fixed before the scores are seen.

    >>> count_rates([1.0, 2.0], [-1.0, 1.5], 0.0)
    Rates(hits=2, positives=2, alarms=1, negatives=2)
    """
    yes, no = np.asarray(positive, dtype=np.float64), np.asarray(negative, dtype=np.float64)
    hits, alarms = int(np.sum(yes > threshold)), int(np.sum(no > threshold))
    return Rates(hits, yes.size, alarms, no.size)


def bound_guess_rate(candidates: float, mu: float) -> float:
    """Return the largest probability of naming the right one of equally likely records.

    To name a record is a test with FPR = 1/candidates between the release with that record and the
    release with another one: P ≤ Φ(Φ⁻¹(1/candidates) + μ). Where records are not equally likely,
    1/candidates is the probability of the likeliest (the bound is concave in it).

    >>> round(bound_guess_rate(100, 0.0), 3), round(bound_guess_rate(100, 1.0), 3)
    (0.01, 0.092)
    """
    return float(gaussian.tpr(1 / candidates, mu))


def choose_far_threshold(mu: float, messages: int, delta: float = 0.0) -> float:
    """Return the threshold at which so many messages on each side should prove the largest ε.

    It is computed from scores N(±μ/2, 1), not from measured ones. Far out there are too few alarms
    for a good bound; near the middle the ratio of the rates is small.

    >>> [round(choose_far_threshold(mu, 10_000, 1e-5), 1) for mu in (0.925, 4.0)]
    [2.1, 1.8]
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

    >>> [round(end, 3) for end in bound_mean([1.0] * 32)]
    [0.789, 1.0]
    >>> [round(end, 3) for end in bound_mean([0.4, 0.6] * 16)]
    [0.193, 0.807]
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
    """Bisect for the edge of where something holds; return its neighbours, inside and outside."""
    for _ in range(60):
        middle = (inside + outside) / 2
        inside, outside = (middle, outside) if holds(middle) else (inside, middle)
    return inside, outside


def choose_threshold(negative: object, fpr: float) -> float:
    """Return the threshold that at most this share of the negatives exceeds.

    >>> choose_threshold([0.0, 1.0, 2.0, 3.0], 0.25)
    2.0
    """
    ordered = np.sort(np.asarray(negative, dtype=np.float64))
    allowed = int(np.floor(fpr * ordered.size))
    return float(ordered[ordered.size - 1 - min(allowed, ordered.size - 1)])


def format_lower_bound(value: float, digits: int) -> str:
    """Format a lower bound, rounded down so that no more is claimed than was proven.

    >>> format_lower_bound(28.4516, 1), format_lower_bound(8.1, 1)
    ('28.4', '8.1')
    """
    return f"{math.floor(value * 10**digits + 1e-9) / 10**digits:.{digits}f}"
