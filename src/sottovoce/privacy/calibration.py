"""Convert a budget into capacity, and what releases have cost into the ε that holds.

Gaussian releases add up as squares: a run is safe while Σ μ_t² ≤ capacity, even when σ_t and the
number of rounds are chosen from earlier releases (a Gaussian-DP filter: Smith & Thakurta 2022).
The three calibrations differ in the capacity they read from (ε, δ) and in who pays:

    exact   μ(ε, δ)²                         only clients that took part
    zcdp    2ρ, ρ = (√(ln 1/δ + ε) − √ln 1/δ)²      only clients that took part
    paper   ε² / (2 q ln 1/δ), q = K/U       every client in every round (Theorems 1 and 4)

`paper` is here to be reproduced and judged. For ε above about 7 (δ = 1e-3) it adds too little
noise, because its proof drops a term in the wrong direction. Its q assumes amplification by
sampling, which does not hold against a server that sees who answers.

A vault's capacity is a little smaller under `exact`, because a device adds discrete Gaussian noise,
which is not quite the continuous one.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from sottovoce.errors import InputError
from sottovoce.privacy import gaussian
from sottovoce.privacy.budget import CALIBRATIONS, Calibration
from sottovoce.privacy.gaussian import Floats

LOOSEST = (1e6, 0.5)  # the largest ε and δ that are calibrated, and that any vault can have


def capacity(
    epsilon: ArrayLike,
    delta: ArrayLike,
    *,
    calibration: Calibration = "exact",
    sampling: float = 1.0,
) -> Floats:
    """Return the capacity of the budget (ε, δ), in μ². Only `paper` uses `sampling`, q = K/U.

    >>> float(capacity(8.0, 1e-5).round(6))
    2.775658
    >>> float(capacity(8.0, 1e-5, calibration="zcdp").round(6))
    2.098272
    >>> float(capacity(8.0, 1e-5, calibration="paper").round(6))
    2.779485
    """
    if calibration not in CALIBRATIONS:
        remedy = "exact is the default"
        raise InputError.of("calibration", calibration, "exact, zcdp or paper", remedy)
    if not np.all((np.asarray(epsilon) >= 1e-6) & (np.asarray(epsilon) <= LOOSEST[0])):
        remedy = "outside this range the calibration is not checked against 50 digits"
        raise InputError.of("epsilon", np.asarray(epsilon).tolist(), "from 1e-06 to 1e+06", remedy)
    if not np.all((np.asarray(delta) >= 1e-100) & (np.asarray(delta) <= LOOSEST[1])):
        remedy = "well below 1 / samples"
        raise InputError.of("delta", np.asarray(delta).tolist(), "from 1e-100 to 0.5", remedy)
    if not 0 < sampling <= 1:
        raise InputError.of("sampling", sampling, "above 0 and at most 1", "it is K / U")
    if calibration == "exact":
        return gaussian.mu(epsilon, delta) ** 2
    epsilon, log_inverse = np.asarray(epsilon, dtype=np.float64), -np.log(delta)
    if calibration == "zcdp":
        # √(a+ε) − √a = ε / (√(a+ε) + √a): the same number without cancellation.
        root_rho = epsilon / (np.sqrt(log_inverse + epsilon) + np.sqrt(log_inverse))
        return np.asarray(2 * root_rho**2 * (1 - gaussian.MARGIN), dtype=np.float64)
    return np.asarray(epsilon**2 / (2 * sampling * log_inverse), dtype=np.float64)


# The largest model that a vault accepts. A vault's capacity is computed once, for this size.
MOST_PARAMETERS = 2**30
_SPARE_PARAMETERS = 400  # docs/proofs.md, (c): pays for the chance of unusually large noise
_GRID = 2.0**65  # 8·Δ², Δ = 2³¹ grid units
_SPARE_DELTA = 1e-9


def vault_capacity(
    epsilon: ArrayLike, delta: ArrayLike, *, calibration: Calibration = "exact"
) -> Floats:
    """Return the capacity of (ε, δ) for discrete Gaussian noise on the release grid, in μ².

    exact: a c with c ≤ μ(ε − x, δ·(1 − x − 1e-9))², x = (2³⁰ + 400)·c/2⁶⁵. The right-hand side is
    such a c if x has the capacity of the continuous Gaussian, which is larger.
    zcdp: unchanged, since the discrete Gaussian has the same ρ (Canonne, Kamath & Steinke 2020).
    docs/proofs.md has the proof; it requires Δ ≥ 2³¹ grid units in every release.

    >>> float(vault_capacity(8.0, 1e-5).round(6))
    2.775658
    >>> bool(0 < 1 - vault_capacity(8.0, 1e-5) / capacity(8.0, 1e-5) < 1e-9)
    True
    >>> vault_capacity(8.0, 1e-5, calibration="paper")
    Traceback (most recent call last):
        ...
    sottovoce.errors.InputError: calibration must be exact or zcdp, got 'paper'; \
a vault keeps promises, and the paper's formula does not always
    """
    if calibration == "paper":
        remedy = "a vault keeps promises, and the paper's formula does not always"
        raise InputError.of("calibration", calibration, "exact or zcdp", remedy)
    continuous = capacity(epsilon, delta, calibration=calibration)
    if calibration == "zcdp":
        return continuous
    lost = (MOST_PARAMETERS + _SPARE_PARAMETERS) * continuous / _GRID
    # A loss smaller than one rounding step of float64 would vanish, so go one step further down.
    less_epsilon = np.nextafter(np.asarray(epsilon, dtype=np.float64) - lost, 0.0)
    less_delta = np.asarray(delta, dtype=np.float64) * (1 - lost - _SPARE_DELTA)
    return np.minimum(gaussian.mu(less_epsilon, less_delta) ** 2, continuous)


def add_smallest(values: ArrayLike, count: int) -> Floats:
    """Return each value plus the `count` smallest of the others, over the last axis.

    Of variances: the least noise that a client and `count` honest others add together.

    >>> add_smallest([1.0, 2.0, 4.0], 1).tolist()
    [3.0, 3.0, 5.0]
    """
    values = np.asarray(values, dtype=np.float64)
    ordered = np.sort(values, axis=-1)
    sums = np.cumsum(ordered, axis=-1)
    others = sums[..., count - 1 : count] if count else 0.0
    among = values <= ordered[..., count : count + 1]
    return np.where(among, sums[..., count : count + 1], others + values)


_UP = 1 + 1e-9  # pays for the rounding of a sum over a million rounds and clients


def sum_model_mu2(
    weight: ArrayLike, sigma: ArrayLike, sensitivity: ArrayLike, colluding: int
) -> Floats:
    """Return the μ² of each client against whoever sees the model of every round, and no upload.

        Σ_t (p_iΔ_i)² / Σ_j p_j²σ_j²,    j: client i and all but the c others that add most noise

    Arrays are [rounds, clients]; p is 0 where a client had no part. A client whose σ is NaN hides
    it: it counts as adding none, and its own answer is NaN. Rounded up.

    >>> sum_model_mu2([[0.5, 0.5]], [[2.0, 2.0]], 1.0, colluding=0).round(6).tolist()
    [0.125, 0.125]
    >>> sum_model_mu2([[0.5, 0.5]], [[2.0, 2.0]], 1.0, colluding=1).round(6).tolist()
    [0.25, 0.25]
    """
    weight, sigma = np.asarray(weight, dtype=np.float64), np.asarray(sigma, dtype=np.float64)
    hidden = np.isnan(sigma) & (weight > 0)
    noise = np.where((weight > 0) & ~hidden, (weight * sigma) ** 2, 0.0)
    honest = add_smallest(noise, max(noise.shape[-1] - 1 - colluding, 0))
    released = np.where(hidden, np.nan, (weight * sensitivity) ** 2)
    terms = np.divide(released, honest, out=np.zeros_like(weight), where=weight > 0)
    return np.asarray(terms.sum(axis=0) * _UP)


def bound_epsilon(delta: ArrayLike, mu2: ArrayLike) -> Floats:
    """Return the ε at δ of releases worth μ² with sums of discrete Gaussian noise, rounded up.

    docs/proofs.md, (c) and (e): ε(δ·(1 − x − 1e-9), μ) + x, x = (2³⁰ + 400)·μ²/2⁶⁵. The proof ends
    where no δ is left; beyond that the answer is ∞.

    >>> bound_epsilon(1e-5, [1.0, 1e11]).round(4).tolist()
    [4.3772, inf]
    """
    mu2 = np.asarray(mu2, dtype=np.float64)
    lost = (MOST_PARAMETERS + _SPARE_PARAMETERS) * mu2 / _GRID
    kept = 1 - (lost + _SPARE_DELTA)
    less_delta = np.asarray(delta, dtype=np.float64) * np.where(kept > 0, kept, 1.0)
    epsilon = (gaussian.epsilon(less_delta, np.sqrt(mu2)) + lost) * (1 + gaussian.MARGIN)
    return np.where(kept > 0, epsilon, np.inf)


def charges_absent(calibration: Calibration) -> bool:
    """Return whether a client pays for rounds in which it took no part (paper's Theorem 4)."""
    return calibration == "paper"


def paper_sigma(
    epsilon: float, delta: float, *, sensitivity: float, rounds: int, sampling: float = 1.0
) -> float:
    """Return the noise of the paper's Theorem 1: σ = Δ √(2 q T ln(1/δ)) / ε, eq. (10).

    What it really guarantees, for (ε = 20, δ = 1e-3) over 200 rounds:

    >>> sigma = paper_sigma(20, 1e-3, sensitivity=1.0, rounds=200)
    >>> float(gaussian.epsilon(1e-3, np.sqrt(200) / sigma).round(1))
    30.3
    """
    return float(sensitivity * np.sqrt(2 * sampling * rounds * -np.log(delta)) / epsilon)
