"""What any attacker can do at most against μ-GDP, and what a count of hits and alarms proves.

An attacker says "it was D′" or "it was D". Against a μ-GDP release

    TPR ≤ Φ(Φ⁻¹(FPR) + μ)                               (Dong, Roth & Su 2022)

so that counted rates with Clopper–Pearson bounds (TPR ≥ t, FPR ≤ f) prove μ ≥ Φ⁻¹(t) − Φ⁻¹(f). To
read an ε off that μ assumes that the noise has the Gaussian shape. Without any assumption
ε ≥ ln((t − δ)/f), which so many messages cannot push beyond the logarithm of their number.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from sottovoce.errors import InputError
from sottovoce.privacy import gaussian
from sottovoce.privacy.gaussian import cdf, quantile

CONFIDENCE = 0.999  # of every bound that is shown
WRONG = 1e-3  # how often a whole audit accuses a promise that is kept, at most
COMPARISONS = 200  # that one audit may make, at most: each has its part of WRONG
EACH = WRONG / COMPARISONS
_TINY = 1e-300


def between(hits: int, trials: int, confidence: float = CONFIDENCE) -> tuple[float, float]:
    """The Clopper–Pearson interval of a probability: each end is wrong in (1 − confidence)/2.

    >>> [round(end, 4) for end in between(0, 1000, 0.95)]
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
    """What an attacker did: hits among the positives, alarms among the negatives.

    >>> rates = Rates(hits=841, positives=1000, alarms=159, negatives=1000)
    >>> round(rates.mu, 2), [round(end, 2) for end in rates.mu_between()]
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
        """Φ⁻¹(TPR) − Φ⁻¹(FPR), as counted; infinite where a rate is 0 or 1."""
        return between_rates(self.tpr, self.fpr)

    def mu_between(self, confidence: float = CONFIDENCE) -> tuple[float, float]:
        """The μ of this attack lies between these with this confidence; the first is proven."""
        t, f = self._ends(confidence)
        return max(0.0, between_rates(t[0], f[1])), between_rates(t[1], f[0])

    def epsilon(self, delta: float, confidence: float = CONFIDENCE) -> float:
        """The ε proven without assuming any shape of the noise, at this δ.

        >>> round(Rates(1000, 1000, 0, 1000).epsilon(1e-5), 2)  # perfect, and yet no more
        4.79
        """
        t, f = self._ends(confidence)
        ratios = ((t[0] - delta) / max(f[1], _TINY), (1 - f[1] - delta) / max(1 - t[0], _TINY))
        return float(np.log(max(1.0, *ratios)))

    def exceeds(self, mu: float, confidence: float = CONFIDENCE) -> bool:
        """Whether the counts contradict μ: above Φ(Φ⁻¹(FPR) + μ) by more than chance explains.

        >>> Rates(841, 1000, 159, 1000).exceeds(2.0), Rates(990, 1000, 10, 1000).exceeds(2.0)
        (False, True)
        """
        return self.mu_between(confidence)[0] > mu

    def _ends(self, confidence: float) -> tuple[tuple[float, float], tuple[float, float]]:
        # Half of the error for each rate, so that together they hold with the confidence.
        each = 1 - (1 - confidence) / 2
        return between(self.hits, self.positives, each), between(self.alarms, self.negatives, each)


def between_rates(tpr: float, fpr: float) -> float:
    """Φ⁻¹(TPR) − Φ⁻¹(FPR): the μ of these two rates.

    >>> round(between_rates(0.8413, 0.1587), 2)
    2.0
    """
    with np.errstate(divide="ignore"):
        ends = [
            -np.inf if rate <= 0 else np.inf if rate >= 1 else float(quantile(rate))
            for rate in (tpr, fpr)
        ]
    return float(ends[0] - ends[1]) if ends[0] != ends[1] else 0.0


def counted(positive: object, negative: object, threshold: float) -> Rates:
    """Rates of the rule "score > threshold", the threshold fixed before the scores were seen.

    >>> counted([1.0, 2.0], [-1.0, 1.5], 0.0)
    Rates(hits=2, positives=2, alarms=1, negatives=2)
    """
    yes, no = np.asarray(positive, dtype=np.float64), np.asarray(negative, dtype=np.float64)
    hits, alarms = int(np.sum(yes > threshold)), int(np.sum(no > threshold))
    return Rates(hits, yes.size, alarms, no.size)


def guess(candidates: float, mu: float) -> float:
    """The most often any attacker names the right one of so many equally likely records.

    Naming one is a test with FPR = 1/candidates against the release without that record, of which
    the record's own is μ-GDP away: P ≤ Φ(Φ⁻¹(1/candidates) + μ). Where they are not equally likely,
    1/candidates is the share of the likeliest (the bound is concave in it).

    >>> round(guess(100, 0.0), 3), round(guess(100, 1.0), 3)
    (0.01, 0.092)
    """
    return float(gaussian.tpr(1 / candidates, mu))


def far_threshold(mu: float, messages: int, delta: float = 0.0) -> float:
    """Where the assumption-free ε is read: where so many messages a side should prove most.

    Scores are N(±μ/2, 1); nothing of them has been seen. Far out alarms are too few to be bounded
    well, near the middle the ratio of the rates is small.

    >>> round(far_threshold(0.925, 10_000, 1e-5), 1), round(far_threshold(4.0, 10_000, 1e-5), 1)
    (2.1, 1.8)
    """
    from scipy.special import betaincinv

    at = np.linspace(0.0, 4.0 + mu / 2, 161)
    hits, alarms = (messages * np.asarray(cdf(sign * mu / 2 - at)) for sign in (1, -1))
    wrong = (1 - CONFIDENCE) / 16  # four readings share it, and each has two rates of two ends
    least = betaincinv(np.maximum(hits, _TINY), messages - hits + 1, wrong)
    most = betaincinv(alarms + 1, messages - alarms, 1 - wrong)
    return float(at[np.argmax((least - delta) / most)])


def mean_between(values: object, confidence: float = CONFIDENCE) -> tuple[float, float]:
    """Bounds on the mean of independent numbers from 0 to 1, whatever their distribution.

    P[mean of n ≥ x] ≤ exp(−n·KL(x ‖ p)) where p is the true mean (Hoeffding 1963). For shares of a
    run's records: they share one draw of noise, so that runs are counted and not records.

    >>> [round(end, 3) for end in mean_between([1.0] * 32)]
    [0.789, 1.0]
    >>> [round(end, 3) for end in mean_between([0.4, 0.6] * 16)]
    [0.193, 0.807]
    """
    each = np.asarray(values, dtype=np.float64)
    if each.size == 0 or np.min(each) < 0 or np.max(each) > 1:
        raise InputError.of("values", each, "numbers from 0 to 1", "give the share of each run")
    mean, room = float(each.mean()), float(-np.log((1 - confidence) / 2)) / each.size

    def end(furthest: float) -> float:
        near, far = mean, furthest
        for _ in range(60):
            middle = (near + far) / 2
            near, far = (middle, far) if _divergence(mean, middle) <= room else (near, middle)
        return far

    return end(0.0), end(1.0)


def _divergence(x: float, p: float) -> float:
    """KL of two coins, in nats."""
    parts = [(x, p), (1 - x, 1 - p)]
    return float(sum(a * np.log(a / max(b, _TINY)) for a, b in parts if a > 0))


def area(positive: object, negative: object) -> float:
    """The area under the ROC curve: how often a positive scores above a negative.

    >>> area([2.0, 3.0], [1.0, 2.0])
    0.875
    """
    from scipy.stats import rankdata

    yes, no = np.asarray(positive, dtype=np.float64), np.asarray(negative, dtype=np.float64)
    ranks = rankdata(np.concatenate([yes, no]))
    return float((ranks[: yes.size].mean() - (yes.size + 1) / 2) / no.size)


def threshold_at(negative: object, fpr: float) -> float:
    """The threshold that lets at most this share of these negatives pass.

    >>> threshold_at([0.0, 1.0, 2.0, 3.0], 0.25)
    2.0
    """
    ordered = np.sort(np.asarray(negative, dtype=np.float64))
    allowed = int(np.floor(fpr * ordered.size))
    return float(ordered[ordered.size - 1 - min(allowed, ordered.size - 1)])


def least(value: float, digits: int) -> str:
    """A lower bound as it is printed: rounded down, so that no more is said than was proven.

    >>> least(28.4516, 1), least(8.1, 1)
    ('28.4', '8.1')
    """
    return f"{math.floor(value * 10**digits + 1e-9) / 10**digits:.{digits}f}"
