"""Theorems 2 and 3: the bound, its convexity limit, its one minimum."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sottovoce.errors import InputError
from sottovoce.privacy.calibration import capacity
from sottovoce.schedules.algorithms import Bound, Landscape

LOSS = Landscape(smoothness=2.0, curvature=0.1, gap=2.0, learning_rate=0.4, divergence=0.3)


def derived(loss=LOSS, *, per_round=30, clients=50, delta_s=0.01, dimension=500, worth=2.0):
    return Bound.from_derivation(
        loss,
        sensitivity=[delta_s] * clients,
        worth=[worth] * clients,
        per_round=per_round,
        dimension=dimension,
    )


def test_derived_bound_holds_on_a_quadratic_and_is_met_without_sampling():
    """Gradient descent with averaged noise on ½·L·‖w‖² (PL with μ = L): the recursion is exact."""
    loss = Landscape(smoothness=1.0, curvature=1.0, gap=8.0, learning_rate=0.3)
    d, clients, rounds, delta_s, worth = 4, 5, 12, 0.2, 1.5
    bound = Bound.from_derivation(
        loss,
        sensitivity=[delta_s] * clients,
        worth=[worth] * clients,
        per_round=clients,
        dimension=d,
    )
    rng = np.random.default_rng(0)
    w = np.tile(np.array([4.0, 0, 0, 0]), (200_000, 1))  # F = ½‖w‖² = 8 at the start
    sigma = delta_s * np.sqrt(rounds / worth) / np.sqrt(clients)
    for _ in range(rounds):
        w = w - 0.3 * w + sigma * rng.standard_normal(w.shape)
    mean, error = np.mean(w**2) * d / 2, np.std(np.sum(w**2, axis=1) / 2) / np.sqrt(len(w))
    # equality here; 5 standard errors: a false alarm in 1.7 million
    assert abs(mean - float(bound(rounds))) < 5 * error


def test_noise_term_does_not_depend_on_the_cohort():
    assert derived(per_round=30).noise == derived(per_round=50).noise


def test_the_bound_is_the_sum_of_what_fades_grows_and_stays():
    bound, A, T = derived(), 1 - LOSS.progress, 17
    expected = A**T * LOSS.gap + (1 - A**T) * (bound.noise * T + bound.sampling)
    assert float(bound(T)) == pytest.approx(expected)


def test_the_paper_calibration_is_the_derived_bound_with_its_own_worth():
    # THEORY §3.4: L·d·T/(U²(1−A))·Σ Δ²·ln(1/δ)/ε²
    epsilon, delta = np.linspace(2, 20, 50), 1e-3
    worth = capacity(epsilon, delta, calibration="paper", sampling=1.0)
    bound = Bound.from_derivation(LOSS, sensitivity=0.01, worth=worth, per_round=30, dimension=500)
    direct = 2.0 * 500 / (50**2 * LOSS.progress)
    direct *= np.sum(0.01**2 * -np.log(delta) / epsilon**2)
    assert bound.noise == pytest.approx(direct, rel=1e-12)


shapes = st.builds(
    Bound,
    progress=st.floats(0.001, 0.8),
    gap=st.floats(0.1, 10),
    noise=st.floats(-7, -0.5).map(lambda x: 10**x),
    sampling=st.floats(0, 5),
)


@pytest.mark.slow
@settings(derandomize=True, deadline=None, max_examples=200)
@given(shapes)
def test_the_best_number_of_rounds_is_the_best(bound):
    best = bound.best_rounds()
    around = np.arange(1, max(3 * best, 200))
    assert float(bound(best)) <= bound(around).min() * (1 + 1e-12)


@settings(derandomize=True, deadline=None, max_examples=200)
@given(shapes)
def test_convex_until_the_limit_and_rising_beyond(bound):
    limit = (bound.gap - bound.sampling) / bound.noise - 2 / np.log1p(-bound.progress)
    if limit < 3:
        return
    inside = np.linspace(limit * 0.01, limit * 0.99, 200)
    step = inside[1] - inside[0]
    second = np.diff(bound(inside), 2) / step**2
    assert np.all(second >= -1e-7 * np.max(np.abs(bound(inside))) / step**2)
    beyond = np.linspace(limit, limit * 3, 200)
    assert np.all(np.diff(bound(beyond)) > -1e-12)
    # The second derivative, written out, changes sign at the limit and nowhere else.
    A, B, log_a = 1 - bound.progress, bound.noise, np.log1p(-bound.progress)

    def curve(t):
        return A**t * log_a * (log_a * (bound.gap - bound.sampling - B * t) - 2 * B)

    assert curve(limit * 0.999) > 0 > curve(limit * 1.001) or A ** (limit) == 0


def test_a_larger_budget_wants_more_rounds():
    best = [derived(worth=float(capacity(e, 1e-3))).best_rounds() for e in (1, 4, 8, 20)]
    assert best == sorted(best)
    assert best[0] < best[-1]


def test_starting_at_the_bottom_wants_one_round():
    assert Bound(progress=0.1, gap=0.1, noise=0.01, sampling=0.2).best_rounds() == 1


@pytest.mark.parametrize(
    "bad",
    [
        {"smoothness": 0},
        {"curvature": -1},
        {"gap": np.nan},
        {"learning_rate": 0.6},
        {"divergence": -1},
        {"curvature": 3},
    ],
)
def test_nonsense_is_refused(bad):
    good = {"smoothness": 2.0, "curvature": 0.1, "gap": 2.0, "learning_rate": 0.4}
    with pytest.raises(InputError, match=f"^{next(iter(bad))} must be"):
        Landscape(**{**good, **bad})


def test_the_sampling_term_is_the_variance_of_a_cohorts_mean_gradient():
    """c·(1 − A) = η²L/2 · E‖∇F_K − ∇F‖², by drawing K of U gradients again and again."""
    rng = np.random.default_rng(3)
    U, K, d = 12, 5, 3
    gradients = rng.standard_normal((U, d)) * 2
    spread = np.mean(np.sum((gradients - gradients.mean(axis=0)) ** 2, axis=1))
    draws = np.array([gradients[rng.permutation(U)[:K]].mean(axis=0) for _ in range(40_000)])
    squared = np.sum((draws - gradients.mean(axis=0)) ** 2, axis=1)
    loss = Landscape(2.0, 0.1, 2.0, 0.4, divergence=float(spread))
    bound = Bound.from_derivation(
        loss, sensitivity=[0.1] * U, worth=[1.0] * U, per_round=K, dimension=d
    )
    expected = 0.4**2 * 2.0 / 2 * np.mean(squared) / loss.progress
    error = 0.4**2 * 2.0 / 2 * np.std(squared) / np.sqrt(len(squared)) / loss.progress
    assert abs(bound.sampling - expected) < 5 * error  # a false alarm in 1.7 million


def test_a_loss_that_hardly_curves_is_refused_or_computed_without_cancellation():
    with pytest.raises(InputError, match="progress must be"):
        derived(Landscape(smoothness=1.0, curvature=1e-17, gap=2.0, learning_rate=1.0))
    flat = Landscape(smoothness=1.0, curvature=1e-14, gap=2.0, learning_rate=1.0)
    assert derived(flat).noise == pytest.approx(500 / (2 * 50 * 1e-14) * 1e-4 / 2, rel=1e-9)


@pytest.mark.parametrize("bad", [{"worth": 0.0}, {"worth": np.nan}, {"dimension": -10}])
def test_nonsense_in_the_noise_is_refused(bad):
    with np.errstate(all="ignore"), pytest.raises(InputError, match="noise must be"):
        derived(**bad)


def test_a_cohort_larger_than_the_federation_is_refused():
    with pytest.raises(InputError, match="per_round must be from 1 to 50"):
        derived(per_round=51)
