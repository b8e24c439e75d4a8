"""The moments of the sampled Gaussian: Lemma 1 and the paper's bound on them (Fig. 2).

With ν₀ = N(0, σ²), ν₁ = (1−q)·N(0, σ²) + q·N(Δ, σ²) and x = Δ/σ the paper defines (eqs. 7 and 8)

    D₁₀(λ) = E_{ν₀}[(ν₁/ν₀)^{λ+1}] = Σ_l C(λ+1, l) (1−q)^{λ+1−l} q^l e^{l(l−1)x²/2}
    D₀₁(λ) = E_{ν₀}[(ν₁/ν₀)^{−λ}]

and proves Lemma 1, D₁₀ ≥ D₀₁. It then replaces ln D₁₀ by qλ(λ+1)x²/2 (eq. 15), using e^u − 1 ≈ u
in the wrong direction: that is a bound only for small λ. `first_break` says where it ends.

Everything is computed as a logarithm, for one λ or an array of them.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike
from scipy.special import gammaln, logsumexp

from sottovoce.errors import InputError
from sottovoce.privacy.gaussian import Floats


def log_moment(order: ArrayLike, *, sampling: float, ratio: float) -> Floats:
    """Return ln D₁₀(λ), exactly, by the finite sum above. `sampling` is q, `ratio` is Δ/σ.

    >>> float(log_moment(1, sampling=0.5, ratio=1.0).round(6))
    0.357374
    """
    _check_arguments(sampling, ratio, order)
    answers = []
    for lam in np.atleast_1d(np.asarray(order, dtype=np.int64)):
        k = np.arange(lam + 2, dtype=np.float64)
        m = lam + 1.0
        log_choose = gammaln(m + 1) - gammaln(k + 1) - gammaln(m - k + 1)
        # 0·ln 0 = 0: at q = 1 only the last term is left.
        absent = np.where(k < m, (m - k) * np.log1p(-sampling) if sampling < 1 else -np.inf, 0.0)
        answers.append(
            logsumexp(log_choose + absent + k * np.log(sampling) + k * (k - 1) * ratio**2 / 2)
        )
    return np.asarray(answers, dtype=np.float64).reshape(np.shape(order))


def log_reverse_moment(order: ArrayLike, *, sampling: float, ratio: float) -> Floats:
    """Return ln D₀₁(λ) by the trapezoidal rule, which converges geometrically here.

    The integrand φ(z)·(1−q+q·e^{xz−x²/2})^{−λ} has its mass between −λx and 0, and its nearest
    pole π/x away from the real line, so a step of a fraction of min(1, 1/x) gives all digits.

    >>> float(log_reverse_moment(1, sampling=0.5, ratio=1.0).round(6))
    0.185694
    """
    _check_arguments(sampling, ratio, order)
    answers = []
    for lam in np.atleast_1d(np.asarray(order, dtype=np.float64)):
        step = 0.125 * min(1.0, 1 / ratio)
        z = np.arange(-lam * ratio - 12, 12, step)
        log_present = np.log(sampling) + ratio * z - ratio**2 / 2
        log_absent = np.log1p(-sampling) if sampling < 1 else -np.inf
        log_mix = np.logaddexp(log_absent, log_present)
        answers.append(logsumexp(-(z**2) / 2 - lam * log_mix) + np.log(step / np.sqrt(2 * np.pi)))
    return np.asarray(answers, dtype=np.float64).reshape(np.shape(order))


def log_paper_bound(order: ArrayLike, *, sampling: float, ratio: float) -> Floats:
    """Return qλ(λ+1)x²/2, the paper's upper bound on ln D₁₀, eq. (15).

    >>> float(log_paper_bound(1, sampling=0.5, ratio=1.0))
    0.5
    """
    _check_arguments(sampling, ratio, order)
    lam = np.asarray(order, dtype=np.float64)
    return np.asarray(sampling * lam * (lam + 1) * ratio**2 / 2, dtype=np.float64)


def certain_break(*, sampling: float, ratio: float) -> float:
    """Return the λ beyond which the bound is certainly broken: λx²/2 > ln(1/q)/(1−q).

    Keeping only the last term of the sum, ln D₁₀ ≥ (λ+1)·(ln q + λx²/2), which exceeds
    qλ(λ+1)x²/2 exactly then. At q = 1 the bound is an equality and never breaks.

    >>> round(certain_break(sampling=0.5, ratio=1.0), 6)
    2.772589
    """
    _check_arguments(sampling, ratio)
    if sampling == 1:
        return float("inf")
    return float(-np.log(sampling) / (1 - sampling) * 2 / ratio**2)


def first_break(*, sampling: float, ratio: float) -> int | None:
    """Return the smallest integer λ ≥ 1 at which the paper's bound lies below the true moment.

    None at q = 1, where the two are equal.

    >>> first_break(sampling=0.5, ratio=1.0)
    3
    """
    if (end := certain_break(sampling=sampling, ratio=ratio)) == float("inf"):
        return None
    # In every case tried (tests/privacy/test_moments.py) the bound stays broken from the first such
    # λ on, so that bisection finds it.
    low, high = 0, int(end) + 1
    while high - low > 1:
        middle = (low + high) // 2
        if _is_broken(middle, sampling, ratio):
            high = middle
        else:
            low = middle
    return high


def _is_broken(lam: int, sampling: float, ratio: float) -> bool:
    true = float(log_moment(lam, sampling=sampling, ratio=ratio))
    return true > float(log_paper_bound(lam, sampling=sampling, ratio=ratio))


def _check_arguments(sampling: float, ratio: float, order: ArrayLike = 1) -> None:
    if not np.all((np.asarray(order) >= 1) & (np.asarray(order) == np.floor(order))):
        raise InputError.of("order", order, "whole numbers ≥ 1", "it is λ of the moment")
    if not 0 < sampling <= 1:
        raise InputError.of("sampling", sampling, "in (0, 1]", "it is K / U")
    if not 0 < ratio < float("inf"):
        raise InputError.of("ratio", ratio, "a finite number > 0", "it is Δ / σ")
