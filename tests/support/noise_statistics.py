"""What every test of integer noise asks of a sampler, at any size.

Noise comes from the system's entropy, so that no seed can be fixed: each question is a test whose
false-alarm rate is `FALSE_ALARM`, and the mutants in the test files show that it can fail.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mpmath
import numpy as np
from scipy import stats
from scipy.special import ndtri

FALSE_ALARM = 1e-9  # of one question; a whole run of the suite asks about a hundred

Sampler = Callable[[int, int], Any]


def exact_pmf(sigma: int, reach: int) -> np.ndarray:
    """exp(−k²/2σ²)/Σ for |k| ≤ reach, from 40 digits."""
    with mpmath.workdps(40):
        weight = [mpmath.exp(-mpmath.mpf(k * k) / (2 * sigma * sigma)) for k in range(reach + 1)]
        far, total = reach + 1, weight[0] + 2 * mpmath.fsum(weight[1:])
        while (more := 2 * mpmath.exp(-mpmath.mpf(far * far) / (2 * sigma * sigma))) > 1e-40:
            total, far = total + more, far + 1
        half = [float(w / total) for w in weight]
    return np.array(half[:0:-1] + half)


def fit(draw: Sampler, sigma: int, count: int, pieces: int = 1) -> float:
    """The p-value of `count`·`pieces` draws against the exact probabilities, integer by integer."""
    reach = 6 * sigma + 1
    probability = exact_pmf(sigma, reach)
    rest = max(0.0, 1 - probability.sum())
    expected = np.append(probability, rest) * count * pieces
    observed = np.zeros(expected.size)
    for _ in range(pieces):
        noise = draw(count, sigma)
        places = np.where(np.abs(noise) <= reach, noise + reach, 2 * reach + 1)
        observed += np.bincount(places, minlength=expected.size)
    rare = expected < 10
    groups_expected = np.append(expected[~rare], expected[rare].sum())
    groups_observed = np.append(observed[~rare], observed[rare].sum())
    return chi_square(groups_observed, groups_expected)


def fit_of_large(noise: np.ndarray, sigma: int, groups: int = 400) -> float:
    """The p-value of noise so wide that each of many equally likely stretches holds many integers.

    The probability of a stretch is that of the continuous Gaussian; they differ by less than 1/σ.
    """
    edges = np.ceil(sigma * ndtri(np.arange(1, groups) / groups))
    observed = np.bincount(np.searchsorted(edges, noise, side="right"), minlength=groups)
    return chi_square(observed, np.full(groups, noise.size / groups))


def fit_of_low_bits(noise: np.ndarray, bits: int = 3) -> float:
    """The p-value of the lowest bits being uniform, as they are wherever the bell is wide."""
    observed = np.bincount(noise & (2**bits - 1), minlength=2**bits)
    return chi_square(observed, np.full(2**bits, noise.size / 2**bits))


def chi_square(observed: np.ndarray, expected: np.ndarray) -> float:
    keep = expected > 0
    statistic = ((observed[keep] - expected[keep]) ** 2 / expected[keep]).sum()
    return float(stats.chi2.sf(statistic, keep.sum() - 1))


def spread_is(noise: np.ndarray, sigma: int, within: float) -> bool:
    """Whether the spread is σ to `within`: 0.004 at 10⁶ draws is 5.7 of its own, hence 2e-8."""
    return bool(abs(np.sqrt(np.mean((noise / sigma) ** 2)) - 1) < within)


def beyond(draw: Sampler, sigma: int, distance: float, count: int, pieces: int) -> np.ndarray:
    """Those of `count`·`pieces` draws that lie beyond `distance`·σ."""
    found = []
    for _ in range(pieces):
        noise = draw(count, sigma)
        found.append(noise[np.abs(noise) > distance * sigma])
    return np.concatenate(found)


def float_draw(count: int, sigma: int) -> np.ndarray:
    """What is *not* good enough: a float64 normal by inversion, rounded to the grid."""
    rng = np.random.default_rng()
    return np.rint(sigma * ndtri(rng.random(count) + 2.0**-54)).astype(np.int64)
