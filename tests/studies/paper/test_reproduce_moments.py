"""The moments of the sampled Gaussian, Lemma 1, and where the paper's bound holds and breaks."""

from __future__ import annotations

import mpmath as mp
import numpy as np
import pytest
from scipy.special import logsumexp

from sottovoce.studies.paper.reproduce import (
    compute_certain_break,
    compute_log_bound,
    compute_log_moment,
    find_first_break,
)

CASES = [(0.9, 0.25), (0.1, 0.25), (0.5, 1.0), (0.02, 2.0), (0.99, 0.5), (1.0, 0.7), (0.3, 0.05)]


def log_reverse_moment(order, *, sampling, ratio):
    """Return ln D₀₁(λ) = ln E_{ν₀}[(ν₁/ν₀)^{−λ}] (eq. 8) by the trapezoidal rule.

    The integrand φ(z)·(1−q+q·e^{xz−x²/2})^{−λ} has its mass between −λx and 0, and its nearest
    pole π/x away from the real line, so a step of a fraction of min(1, 1/x) gives all digits.
    """
    step = 0.125 * min(1.0, 1 / ratio)
    z = np.arange(-order * ratio - 12, 12, step)
    absent = np.log1p(-sampling) if sampling < 1 else -np.inf
    log_mix = np.logaddexp(absent, np.log(sampling) + ratio * z - ratio**2 / 2)
    return logsumexp(-(z**2) / 2 - order * log_mix) + np.log(step / np.sqrt(2 * np.pi))


@pytest.mark.parametrize(("q", "x"), CASES)
@pytest.mark.parametrize("order", [1, 2, 7])
def test_both_directions_against_numerical_integration(q, x, order):
    with mp.workdps(30):

        def mixture(z):
            return 1 - mp.mpf(q) + mp.mpf(q) * mp.exp(x * z - mp.mpf(x) ** 2 / 2)

        ends = [-order * x - 14, -order * x, 0, order * x, (order + 1) * x + 14]
        forth = mp.quad(lambda z: mp.npdf(z) * mixture(z) ** (order + 1), ends)
        back = mp.quad(lambda z: mp.npdf(z) * mixture(z) ** -order, ends)
    assert float(compute_log_moment(order, sampling=q, ratio=x)) == pytest.approx(
        float(mp.log(forth)), rel=1e-9, abs=1e-13
    )
    assert float(log_reverse_moment(order, sampling=q, ratio=x)) == pytest.approx(
        float(mp.log(back)), rel=1e-9, abs=1e-13
    )


def test_lemma_1_in_every_case_tried():
    rng = np.random.default_rng(7)
    for _ in range(400):
        q, x = rng.uniform(0.001, 1), 10 ** rng.uniform(-2, 0.7)
        order = int(rng.integers(1, 60))
        forth = float(compute_log_moment(order, sampling=q, ratio=x))
        back = float(log_reverse_moment(order, sampling=q, ratio=x))
        assert forth >= back - 1e-11 * max(1, abs(back)), (q, x, order)


def test_the_bound_breaks_once_and_where_theory_says():
    rng = np.random.default_rng(8)
    for _ in range(60):
        q, x = rng.uniform(0.02, 0.97), 10 ** rng.uniform(-0.7, 0.3)
        end = compute_certain_break(sampling=q, ratio=x)
        orders = np.arange(1, int(end) + 3)
        true = compute_log_moment(orders, sampling=q, ratio=x)
        bound = compute_log_bound(orders, sampling=q, ratio=x)
        broken = true > bound
        found = find_first_break(sampling=q, ratio=x)
        assert found == orders[np.argmax(broken)]
        assert np.all(broken[found - 1 :])
        assert np.all(broken[orders > end])
        assert found <= end + 1
        assert found >= 0.7 * end - 1


def test_without_sampling_the_bound_is_an_equality():
    orders = np.arange(1, 101)
    np.testing.assert_allclose(
        compute_log_moment(orders, sampling=1.0, ratio=0.3),
        compute_log_bound(orders, sampling=1.0, ratio=0.3),
        rtol=1e-12,
    )
    assert find_first_break(sampling=1.0, ratio=0.3) is None
    assert compute_certain_break(sampling=1.0, ratio=0.3) == np.inf


def test_the_reverse_moment_far_from_zero():
    # q = 1 has a closed form, and λx = 40 puts all the mass far left of 0.
    assert float(log_reverse_moment(20, sampling=1.0, ratio=2.0)) == pytest.approx(
        20 * 21 * 2.0**2 / 2, rel=1e-12
    )
