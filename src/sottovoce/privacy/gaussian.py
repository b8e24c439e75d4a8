"""The Gaussian mechanism, exactly: μ ↔ (ε, δ), and what an attacker can still do.

A release `v + N(0, σ²I)` of sensitivity Δ is μ-GDP with μ = Δ/σ, and

    δ(ε, μ) = Φ(μ/2 − ε/μ) − e^ε Φ(−μ/2 − ε/μ)                 (Balle & Wang 2018, Theorem 8)

is the smallest δ for which it is (ε, δ)-DP. `delta`, `epsilon` and `mu` solve that one equation.
Every answer is rounded to the private side: δ and ε up, μ down. All functions take numbers or
arrays, which are broadcast against each other.

The normal distribution is computed here in numpy, to the last digits, because importing
scipy.special takes 0.3 s, more than all the rest of `sottovoce calibrate`, and a client process
starts anew for every round. The tests compare with scipy and mpmath.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
from numpy.polynomial.chebyshev import chebval
from numpy.typing import ArrayLike, NDArray

from sottovoce.errors import InputError

Floats: TypeAlias = NDArray[np.float64]

_SQRT_2PI = float(np.sqrt(2 * np.pi))

# Chebyshev coefficients of (1 + 2y)·e^{y²}·erfc(y) in the variable (y − 3.75)/(y + 3.75), which
# maps y ≥ 0 onto [−1, 1); computed with 40 digits, the first one left out is below 1e-19.
_CENTRE = 3.75
_COEFFICIENTS = np.array([
    1.1775789345674017, -0.004590054580646478, -0.08424913336651792, 0.05920993999819189,
    -0.026658668435305753, 0.009074997670705265, -0.002413163540417608, 0.0004907758365258086,
    -6.916973302501207e-05, 4.13902798607301e-06, 7.74038306619849e-07, -2.1886401049234397e-07,
    1.076499946567091e-08, 4.521959811218287e-09, -7.754400208831351e-10, -6.318088340886684e-11,
    2.86879501093067e-11, 1.9455868545777347e-13, -9.65469674843344e-13, 3.25254814814874e-14,
    3.3478119482868056e-14, -1.864562880419313e-15, -1.2507950530688648e-15, 7.418235256624044e-17,
    5.068148904796111e-17, -2.2370566594359995e-18, -2.187342944303018e-18,
])  # fmt: skip


def mills(x: ArrayLike) -> Floats:
    """Return Mills' ratio of the lower tail, M(x) = Φ(x)/φ(x), without underflow for any x < 0."""
    x = np.asarray(x, dtype=np.float64)
    y = np.minimum(np.abs(x), 1e150) / np.sqrt(2)
    lower = chebval((y - _CENTRE) / (y + _CENTRE), _COEFFICIENTS) / (1 + 2 * y) * (_SQRT_2PI / 2)
    if np.all(x <= 0):
        return np.asarray(lower, dtype=np.float64)
    upper = _SQRT_2PI * np.exp(np.minimum(x**2 / 2, 700.0)) - lower
    return np.asarray(np.where(x > 0, upper, lower), dtype=np.float64)


def cdf(x: ArrayLike) -> Floats:
    """Return Φ(x), with full relative accuracy in the lower tail."""
    x = np.asarray(x, dtype=np.float64)
    tail = np.exp(-(x**2) / 2) / _SQRT_2PI * mills(-np.abs(x))
    return np.where(x > 0, 1 - tail, tail)


def quantile(p: ArrayLike) -> Floats:
    """Return Φ⁻¹(p) for 0 ≤ p ≤ 1, by Newton's method on the logarithm of the smaller tail."""
    p = np.asarray(p, dtype=np.float64)
    tail = np.minimum(p, 1 - p)
    inside = tail > 0
    log_tail = np.log(np.where(inside, tail, 0.5))
    # Start at or left of the root, where ln Φ (concave, rising) lets Newton converge from the left.
    x = -np.sqrt(-2 * log_tail)
    for _ in range(60):
        ratio = mills(x)
        step = (log_tail - (np.log(ratio / _SQRT_2PI) - x**2 / 2)) * ratio
        x = np.minimum(x + step, 0.0)
        if np.all(np.abs(step) <= 1e-15 * (1 + np.abs(x))):
            break
    x = np.where(inside, x, -np.inf)
    return np.where(p > 0.5, -x, x)


# Checked against 50 digits (tests/privacy/test_gaussian.py), μ, δ and ε are right to 1e-12
# relative. This margin keeps every answer on the private side of the exact one.
MARGIN = 1e-11
SMALLEST_MU, LARGEST_MU = 1e-100, 1e7

_LOG_SQRT_2PI = float(np.log(2 * np.pi) / 2)
_NODES, _WEIGHTS = (x / 2 for x in np.polynomial.legendre.leggauss(6))
_STEPS = 60  # Newton takes ten or so; the limit only keeps a NaN from looping


def log_delta(epsilon: ArrayLike, mu: ArrayLike) -> Floats:
    """Return ln δ(ε, μ), without margin.

    Let a = μ/2 − ε/μ, b = a − μ and M(x) = Φ(x)/φ(x) (Mills' ratio).
    Because e^ε φ(b) = φ(a), both terms share a factor,

        δ = φ(a)·(M(a) − M(b)),

    which neither overflows for large ε nor underflows for small δ. For small μ the difference
    cancels, and is computed as ∫ M′ over [b, a] with M′(x) = 1 + x·M(x); for a > 0 (δ near 1)
    M(a) grows, and Φ(a) is used instead. A μ below 1e-100 counts as no release: ln 0 = −∞.

    >>> float(np.exp(log_delta(1.0, 1.0)).round(6))
    0.126937
    """
    epsilon, mu = np.broadcast_arrays(
        np.asarray(epsilon, dtype=np.float64), np.asarray(mu, dtype=np.float64)
    )
    if not np.all((mu >= 0) & (mu <= LARGEST_MU)):
        raise InputError.of("mu", mu.tolist(), f"from 0 to {LARGEST_MU:g}", "it is Δ/σ, summed")
    silent = mu < SMALLEST_MU
    mu = np.where(silent, 1.0, mu)
    a = mu / 2 - epsilon / mu
    b = -mu / 2 - epsilon / mu

    low = np.minimum(a, 0.0)  # each branch is evaluated everywhere, and must not overflow there
    far = mills(low) - mills(b)
    step = np.minimum(mu, 0.5)
    x = np.multiply.outer(_NODES, step) - epsilon / mu
    near = step * np.tensordot(_WEIGHTS, 1 + x * mills(x), axes=1)
    share = np.maximum(np.where(mu < 0.5, near, far), np.finfo(np.float64).tiny)
    tail = -(a**2) / 2 - _LOG_SQRT_2PI + np.log(share)

    high = np.maximum(a, 0.0)
    top = cdf(high) - np.exp(-(high**2) / 2 - _LOG_SQRT_2PI) * mills(b)
    body = np.log(np.maximum(top, np.finfo(np.float64).tiny))

    use_body = (a > 0) & (mu >= 0.5)
    return np.asarray(np.where(silent, -np.inf, np.where(use_body, body, tail)), dtype=np.float64)


def delta(epsilon: ArrayLike, mu: ArrayLike) -> Floats:
    """Return the smallest δ for which a μ-GDP release is (ε, δ)-DP, rounded up."""
    # The exponent a²/2 is a difference of numbers as large as μ²: its rounding grows with them.
    margin = MARGIN + 1e-15 * np.asarray(mu, dtype=np.float64) ** 2
    answer = np.exp(log_delta(epsilon, mu)) * (1 + margin)
    # The δ of a release is never 0, however small, because 0 would claim pure ε-DP.
    least = np.where(np.asarray(mu) > 0, np.finfo(np.float64).tiny, 0.0)
    return np.asarray(np.clip(answer, least, 1.0), dtype=np.float64)


def epsilon(delta: ArrayLike, mu: ArrayLike) -> Floats:
    """Return the smallest ε ≥ 0 for which a μ-GDP release is (ε, δ)-DP, rounded up.

    Newton's method on ln δ, which falls and is concave in ε, from above: ε = μ²/2 − μΦ⁻¹(δ), where
    the first term of δ(ε, μ) alone is δ. Every step stays on the private side.

    >>> float(epsilon(delta=1e-3, mu=4.05314816).round(6))
    20.0
    >>> float(epsilon(delta=0.5, mu=0.1))  # δ alone already covers it
    0.0
    """
    delta, mu = np.broadcast_arrays(
        np.asarray(delta, dtype=np.float64), np.asarray(mu, dtype=np.float64)
    )
    log_target = np.log(delta)
    enough_at_zero = log_delta(np.zeros_like(mu), mu) + MARGIN <= log_target
    answer = np.maximum(mu**2 / 2 - mu * quantile(delta), 0.0)
    for _ in range(_STEPS):
        log_now = log_delta(answer, mu)
        a = mu / 2 - answer / np.where(mu > 0, mu, 1.0)
        slope = np.exp(-(a**2) / 2 - _LOG_SQRT_2PI - log_now) * mills(a - mu)  # −∂ ln δ/∂ε
        slope = np.where(enough_at_zero, 1.0, slope)
        step = np.where(enough_at_zero, 0.0, (log_target - log_now) / slope)
        answer = np.maximum(answer - step, 0.0)
        if np.all(np.abs(step) <= 1e-14 * (answer + mu)):
            break
    # Near ε = 0 a relative margin vanishes, so an absolute one is added.
    return np.where(enough_at_zero, 0.0, answer * (1 + MARGIN) + 1e-13)


def mu(epsilon: ArrayLike, delta: ArrayLike) -> Floats:
    """Return the largest μ for which a μ-GDP release is (ε, δ)-DP, rounded down.

    Newton's method on ln δ, which rises and is concave in μ, from below: μ = z + √(z² + 2ε),
    z = Φ⁻¹(δ), where the first term of δ(ε, μ) alone is δ. Every step stays on the private side.

    >>> mu(epsilon=[1.0, 8.0, 20.0], delta=1e-3).round(8).tolist()
    [0.38840125, 2.08327365, 4.05314816]
    """
    epsilon, delta = np.broadcast_arrays(
        np.asarray(epsilon, dtype=np.float64), np.asarray(delta, dtype=np.float64)
    )
    log_target = np.log(delta)
    z = quantile(delta)
    root = np.sqrt(z**2 + 2 * epsilon)
    answer = np.where(z < 0, 2 * epsilon / (root - np.minimum(z, 0.0)), z + root)
    for _ in range(_STEPS):
        log_now = log_delta(epsilon, answer)
        a = answer / 2 - epsilon / answer
        slope = np.exp(-(a**2) / 2 - _LOG_SQRT_2PI - log_now)  # ∂ ln δ/∂μ = φ(a)/δ
        step = (log_target - log_now) / slope
        answer = answer + step
        if np.all(np.abs(step) <= 1e-14 * answer):
            break
    return np.asarray(answer * (1 - MARGIN), dtype=np.float64)


def tpr(fpr: ArrayLike, mu: ArrayLike) -> Floats:
    """Return an attacker's largest true-positive rate at this rate of false ones: Φ(Φ⁻¹(FPR) + μ).

    It bounds every attack on a μ-GDP transcript (membership, reconstruction of one record, …),
    whatever the attacker knows and computes (Dong, Roth & Su 2022).
    """
    return np.asarray(cdf(quantile(fpr) + np.asarray(mu)), dtype=np.float64)


def auc(mu: ArrayLike) -> Floats:
    """Return the largest area under any attacker's ROC curve: Φ(μ/√2)."""
    return np.asarray(cdf(np.asarray(mu, dtype=np.float64) / np.sqrt(2)), dtype=np.float64)
