"""docs/proofs.md (c) in numbers: how far the discrete Gaussian is from the continuous one."""

from __future__ import annotations

import mpmath
import numpy as np
import pytest

from sottovoce.privacy import calibration


def log_total(sigma):
    """ln Σ exp(−k²/2σ²), by whichever sum converges faster."""
    if sigma < 5:
        terms = (mpmath.exp(-mpmath.mpf(k * k) / (2 * sigma**2)) for k in range(1, 40 * sigma))
        return mpmath.log(1 + 2 * mpmath.fsum(terms))
    theta = 1 + 2 * mpmath.exp(-2 * mpmath.pi**2 * sigma**2)  # Poisson: the next term is < 1e-800
    return mpmath.log(mpmath.sqrt(2 * mpmath.pi) * sigma * theta)


def discrete(k, sigma, log_of_total):
    """ln p(k)."""
    return -(mpmath.mpf(k) ** 2) / (2 * sigma**2) - log_of_total


def rounded(k, sigma):
    """ln r(k) = ln of the continuous Gaussian's mass on [k − ½, k + ½]."""
    near, far = (abs(k) - mpmath.mpf(1) / 2) / sigma, (abs(k) + mpmath.mpf(1) / 2) / sigma
    root = mpmath.sqrt(2)
    return mpmath.log((mpmath.erfc(near / root) - mpmath.erfc(far / root)) / 2)


def places(sigma):
    if sigma <= 16:
        return range(12 * sigma + 1)
    rng = np.random.default_rng(3)
    return [0, 1, sigma, *(int(x * sigma) for x in rng.uniform(0, 12, 60)), 12 * sigma]


@pytest.mark.parametrize(("one", "two"), [(0.6, 0.6), (0.7, 1.0), (0.8, 2.0), (1.0, 1.0)])
def test_the_sum_of_two_is_as_close_to_one_as_the_proofs_say(one, two):
    """On grids so coarse that the difference can be seen: docs/proofs.md, (e)."""
    reach = range(-40, 41)
    with mpmath.workdps(60):
        laws = []
        for variance in (one**2, two**2, one**2 + two**2):
            weights = {k: mpmath.exp(-(mpmath.mpf(k) ** 2) / (2 * variance)) for k in reach}
            total = mpmath.fsum(weights.values())
            laws.append({k: w / total for k, w in weights.items()})
        bound = 10 * mpmath.exp(-2 * mpmath.pi**2 / (1 / one**2 + 1 / two**2))
        seen = 0
        for y in range(-8, 9):
            summed = mpmath.fsum(laws[0][k] * laws[1][y - k] for k in range(-30, 31))
            seen = max(seen, abs(mpmath.log(summed / laws[2][y])))
    assert 1e-12 < seen <= bound


@pytest.mark.parametrize("sigma", [1, 2, 3, 7, 16, 100, 2**20, 2**33 + 1, 2**40])
def test_the_lemma(sigma):
    least = mpmath.inf
    with mpmath.workdps(160):
        total = log_total(sigma)
        for k in places(sigma):
            difference = discrete(k, sigma, total) - rounded(k, sigma)
            assert difference <= mpmath.mpf(1) / (24 * sigma**2)
            assert -difference <= mpmath.mpf(k) ** 2 / (24 * mpmath.mpf(sigma) ** 4)
            least = min(least, mpmath.mpf(1) / (24 * sigma**2) - difference)
        # The bound is not slack: at k = 0 it is met to a small part of itself.
        assert least < mpmath.mpf(1) / (24 * sigma**2) * 0.05


@pytest.mark.parametrize("sigma", [1, 2, 7])
@pytest.mark.parametrize("shift", [0, 1, 5])
@pytest.mark.parametrize("s", ["0.05", "0.25", "0.4"])
def test_the_moment_bound(sigma, shift, s):
    with mpmath.workdps(60):
        s = mpmath.mpf(s)
        reach = range(-120 * sigma, 120 * sigma + 1)
        bell = [mpmath.exp(-mpmath.mpf(k * k) / (2 * sigma**2)) for k in reach]
        weighed = [
            b * mpmath.exp(s * (k + shift) ** 2 / sigma**2)
            for k, b in zip(reach, bell, strict=True)
        ]
        found = mpmath.fsum(weighed) / mpmath.fsum(bell)
        bound = mpmath.exp(s * shift**2 / (sigma**2 * (1 - 2 * s))) / mpmath.sqrt(1 - 2 * s)
        assert found <= bound * (1 + mpmath.mpf(10) ** -40)


def continuous_delta(epsilon, mu):
    return mpmath.ncdf(mu / 2 - epsilon / mu) - mpmath.exp(epsilon) * mpmath.ncdf(
        -mu / 2 - epsilon / mu
    )


def pmf(sigma):
    total = log_total(sigma)
    reach = range(-16 * sigma, 16 * sigma + 1)
    return {k: mpmath.exp(discrete(k, sigma, total)) for k in reach}


def discrete_delta(epsilon, p, shift):
    """Σ (p(k) − e^ε·p(k + shift))₊: the δ of one discrete release in one dimension, from below."""
    e = mpmath.exp(epsilon)
    return mpmath.fsum(max(0, p[k] - e * p[k + shift]) for k in p if k + shift in p)


@pytest.mark.parametrize(("sigma", "shift"), [(1, 1), (2, 3), (4, 4), (8, 4)])
def test_the_theorem_on_a_grid_coarse_enough_to_see(sigma, shift):
    """P(O) ≤ e^(ε₀+A+B)·P′(O) + e^A·δ₀ + P(not G): one coordinate, one release, several cuts."""
    with mpmath.workdps(40):
        p, mu, a = pmf(sigma), mpmath.mpf(shift) / sigma, mpmath.mpf(1) / (24 * sigma**2)
        for epsilon in (mpmath.mpf(1) / 2, 1, 2, 4):
            for cut in (4, 9, 16, 36):
                b = mpmath.mpf(cut) / (24 * sigma**2)
                far = (p[k] for k in p if (k + shift) ** 2 > cut * sigma**2)
                outside = mpmath.fsum(far)
                bound = mpmath.exp(a) * continuous_delta(epsilon, mu) + outside
                assert discrete_delta(epsilon + a + b, p, shift) <= bound


def test_without_a_correction_the_continuous_formula_would_be_wrong():
    with mpmath.workdps(40):
        p = pmf(2)
        excess = [
            discrete_delta(mpmath.mpf(e) / 8, p, 3) - continuous_delta(mpmath.mpf(e) / 8, 1.5)
            for e in range(1, 40)
        ]
    assert max(excess) > 1e-3


@pytest.mark.parametrize("epsilon", [1e-6, 0.1, 8, 100, 1e6])
@pytest.mark.parametrize("delta", [1e-100, 1e-5, 0.5])
def test_the_noise_is_hardly_ever_larger_than_the_correction_pays_for(epsilon, delta):
    """(4) of the proof, and e^A·δ₀ + P(not G) ≤ δ, with a vault's own constants."""
    c = float(calibration.vault_capacity(epsilon, delta))
    d = calibration.MOST_PARAMETERS
    x = (d + 400) * mpmath.mpf(c) / 2**65
    a, b = d * mpmath.mpf(c) / (3 * 2**65), (2 * d + 1200) * mpmath.mpf(c) / (3 * 2**65)
    assert mpmath.almosteq(a + b, x, 1e-12)
    log_outside = -(2 * d + 1200) / 4 + d * mpmath.log(2) / 2 + mpmath.mpf(c) / 2
    assert log_outside < mpmath.log(1e-9 * delta)
    with mpmath.workdps(40):
        assert mpmath.exp(a) * (1 - x - mpmath.mpf("1e-9")) + mpmath.mpf("1e-9") <= 1
