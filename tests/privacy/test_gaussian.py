"""μ ↔ (ε, δ) against 50 digits: never on the unsafe side, and tight."""

from __future__ import annotations

import mpmath as mp
import numpy as np
import pytest
from dp_accounting import GaussianDpEvent
from dp_accounting.pld import PLDAccountant
from hypothesis import given, settings
from hypothesis import strategies as st

from sottovoce.errors import InputError
from sottovoce.privacy import gaussian

# THEORY: δ → {ε: μ}, rounded to nine digits by an independent implementation.
GOLDEN = {
    1e-5: {
        0.5: 0.142210559,
        1: 0.268051123,
        2: 0.501551689,
        4: 0.924930898,
        8: 1.66603060,
        10: 2.00044562,
        16: 2.90547816,
    },
    1e-3: {
        1: 0.388401248,
        4: 1.21495215,
        8: 2.08327365,
        12: 2.81650148,
        16: 3.46493364,
        20: 4.05314816,
    },
}


def exact_delta(epsilon: float, mu: float | mp.mpf) -> mp.mpf:
    """δ(ε, μ) by its definition; call it with enough digits."""
    e, m = mp.mpf(epsilon), mp.mpf(mu)
    return mp.ncdf(m / 2 - e / m) - mp.exp(e) * mp.ncdf(-m / 2 - e / m)


def random_budgets(count: int, low: float, high: float, least_delta: float, most_delta: float):
    rng = np.random.default_rng(20210209)
    epsilon = 10 ** rng.uniform(np.log10(low), np.log10(high), count)
    delta = 10 ** rng.uniform(np.log10(least_delta), np.log10(most_delta), count)
    return epsilon, delta


@pytest.mark.parametrize(
    ("epsilon", "delta", "mu"), [(e, d, m) for d, row in GOLDEN.items() for e, m in row.items()]
)
def test_golden_values(epsilon, delta, mu):
    assert float(gaussian.mu(epsilon, delta)) == pytest.approx(mu, rel=1e-8)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("count", "ranges"),
    [
        (5000, (1e-3, 100, 1e-12, 0.1)),  # the range people use
        (600, (1e-3, 1e3, 1e-15, 0.5)),  # the range we promise
        (300, (1e-6, 1e6, 1e-100, 0.5)),  # the range that Budget and capacity accept
    ],
    ids=["usual", "promised", "accepted"],
)
def test_mu_is_never_above_exact_and_within_1e_9(count, ranges):
    epsilon, delta = random_budgets(count, *ranges)
    mu = gaussian.mu(epsilon, delta)
    with mp.workdps(50):
        if ranges[3] == 0.5 and ranges[0] < 1e-3:
            mp.mp.dps = 150  # δ down to 1e-100 is a difference of numbers near 1
        for e, d, m in zip(epsilon, delta, mu, strict=True):
            assert exact_delta(e, float(m)) <= d, (e, d)
            assert exact_delta(e, mp.mpf(float(m)) * (1 + mp.mpf("1e-9"))) > d, (e, d)


def test_delta_and_epsilon_are_never_below_exact_and_tight():
    epsilon, delta = random_budgets(500, 1e-3, 1e3, 1e-15, 0.5)
    rng = np.random.default_rng(1)
    mu = gaussian.mu(epsilon, delta) * rng.uniform(0.5, 2, len(epsilon))
    up, back = gaussian.delta(epsilon, mu), gaussian.epsilon(delta, mu)
    with mp.workdps(60):
        for e, d, m, u, b in zip(epsilon, delta, mu, up, back, strict=True):
            true = exact_delta(e, float(m))
            if true > 1e-280:
                assert true <= u <= true * (1 + mp.mpf("1e-10"))
            # b may be 0 (δ alone covers it): then the exact δ at 0 is already below.
            assert exact_delta(float(b), float(m)) <= d
            if b > 1e-6:
                assert exact_delta(float(b) * (1 - 1e-6), float(m)) > d


@pytest.mark.slow
@settings(derandomize=True, deadline=None, max_examples=300)
@given(
    st.floats(-3, 3).map(lambda x: 10**x),
    st.floats(-15, -0.302).map(lambda x: 10**x),
    st.floats(1.001, 3),
)
def test_more_budget_buys_more_mu(epsilon, delta, factor):
    mu = float(gaussian.mu(epsilon, delta))
    assert float(gaussian.mu(epsilon * factor, delta)) > mu
    assert float(gaussian.mu(epsilon, min(0.5, delta * factor))) >= mu


@pytest.mark.slow
@pytest.mark.parametrize(("sigma", "rounds"), [(0.7, 1), (2.0, 10), (5.0, 100), (20.0, 1000)])
def test_agrees_with_the_pld_accountant_on_fixed_schedules(sigma, rounds):
    accountant = PLDAccountant()
    accountant.compose(GaussianDpEvent(sigma), rounds)
    theirs = accountant.get_epsilon(1e-5)  # an upper bound by discretisation
    ours = float(gaussian.epsilon(1e-5, np.sqrt(rounds) / sigma))
    assert ours <= theirs * (1 + 1e-9)
    assert ours == pytest.approx(theirs, rel=2e-4)


def test_arrays_and_numbers_give_the_same():
    epsilon, delta = np.array([1.0, 8.0]), np.array([[1e-3], [1e-5]])
    table = gaussian.mu(epsilon, delta)
    assert table.shape == (2, 2)
    assert float(table[1, 1]) == pytest.approx(float(gaussian.mu(8.0, 1e-5)), rel=1e-14)


def test_the_edges_are_on_the_private_side():
    # δ(0, μ) a hair above δ: 0 would be a false claim
    with mp.workdps(40):
        d, m = 3.4530699111432995e-11, 8.655562673549377e-11
        assert exact_delta(float(gaussian.epsilon(d, m)), m) <= d
        e, m = 890651804.0675597, 42193.695
        assert exact_delta(e, m) <= float(gaussian.delta(e, m))
    for e, m in ((1.0, 1e-3), (42.0, 9e-22), (5e5, 1e-9)):
        assert 0 < float(gaussian.delta(e, m)) < 1e-300  # 0 would claim pure DP


@pytest.mark.parametrize("mu", [-1.0, np.nan, np.inf, 1e200])
def test_a_mu_that_is_none_is_refused(mu):
    with pytest.raises(InputError, match="mu must be"):
        gaussian.epsilon(1e-5, mu)


def test_no_release_costs_nothing():
    assert float(gaussian.delta(1.0, 0.0)) == 0
    assert float(gaussian.epsilon(1e-5, 0.0)) == 0


def test_the_attackers_view_is_one_curve():
    fpr, mu = np.linspace(0, 1, 101), 1.7
    missed = gaussian.cdf(-gaussian.quantile(fpr) - mu)  # G_μ, the trade-off curve
    np.testing.assert_allclose(gaussian.tpr(fpr, mu), 1 - missed, atol=1e-15)
    # The area under the ROC curve, integrated in the variable z = Φ⁻¹(FPR).
    z = np.linspace(-12, 12, 40_001)
    density = np.exp(-(z**2) / 2) / np.sqrt(2 * np.pi)
    p = gaussian.cdf(z)
    area = float(np.sum(gaussian.tpr(p, mu) * density) * (z[1] - z[0]))
    assert area == pytest.approx(float(gaussian.auc(mu)), abs=1e-9)


def test_the_attackers_view_is_what_epsilon_delta_allow():
    # (ε, δ)-DP says TPR ≤ e^ε·FPR + δ for all pairs (ε, δ(ε)): their envelope is the curve.
    mu, fpr = 1.2, np.array([1e-4, 1e-2, 0.2])
    epsilon = np.linspace(0, 12, 6001)[:, None]
    envelope = np.min(np.exp(epsilon) * fpr + gaussian.delta(epsilon, mu), axis=0)
    np.testing.assert_allclose(gaussian.tpr(fpr, mu), envelope, rtol=1e-5)
