"""What any attacker can do at most against μ-GDP, and what a count of hits and alarms proves.

An attacker says "it was D′" or "it was D". Against a μ-GDP release

    TPR ≤ Φ(Φ⁻¹(FPR) + μ)                               (Dong, Roth & Su 2022)

so that counted rates with Clopper–Pearson bounds (TPR ≥ t, FPR ≤ f) prove μ ≥ Φ⁻¹(t) − Φ⁻¹(f). To
read an ε off that μ assumes that the noise has the Gaussian shape. Without any assumption
ε ≥ ln((t − δ)/f), which so many messages cannot push beyond the logarithm of their number.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sottovoce.errors import InputError
from sottovoce.privacy import gaussian
from sottovoce.privacy.normal import cdf, quantile

CONFIDENCE = 0.999
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
        return _mu(self.tpr, self.fpr)

    def mu_between(self, confidence: float = CONFIDENCE) -> tuple[float, float]:
        """The μ of this attack lies between these with this confidence; the first is proven."""
        t, f = self._ends(confidence)
        return max(0.0, _mu(t[0], f[1])), _mu(t[1], f[0])

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


def _mu(tpr: float, fpr: float) -> float:
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


def far_threshold(mu: float, messages: int) -> float:
    """Where the assumption-free ε is read: about one false alarm in so many messages.

    Scores are N(±μ/2, 1); nothing of them has been seen.

    >>> round(far_threshold(2.0, 1000), 3)
    2.09
    """
    return float(-quantile(1 / messages) - mu / 2)


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


def power(mu: float) -> float:
    """How often the best test with equal errors is right: Φ(μ/2).

    >>> round(power(2.0), 4)
    0.8413
    """
    return float(cdf(mu / 2))
