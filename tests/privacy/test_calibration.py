"""What a budget is worth, and what the paper's noise really guarantees."""

from __future__ import annotations

import math

import mpmath
import numpy as np
import opendp.prelude as dp
import pytest

from sottovoce.errors import InputError
from sottovoce.privacy import calibration, gaussian
from sottovoce.privacy.budget import CALIBRATIONS
from support.mutated_module import mutated

dp.enable_features("contrib")


def noise(capacity: float) -> float:
    """σ of one release of sensitivity 1 that uses the whole capacity."""
    return 1 / np.sqrt(capacity)


@pytest.mark.parametrize("delta", [1e-3, 1e-6, 1e-10])
@pytest.mark.parametrize("epsilon", [0.1, 1, 4, 8, 20])
def test_zcdp_capacity_against_opendp(epsilon, delta):
    capacity = float(calibration.capacity(epsilon, delta, calibration="zcdp"))
    space = dp.vector_domain(dp.atom_domain(T=float, nan=False)), dp.l2_distance(T=float)
    measurement = dp.m.make_gaussian(*space, scale=noise(capacity))
    rho = measurement.map(1.0)
    assert rho == pytest.approx(capacity / 2, rel=1e-12)
    # The textbook conversion is met to the last digits, on the private side …
    reached = rho + 2 * np.sqrt(rho * -np.log(delta))
    assert epsilon * (1 - 1e-9) < reached <= epsilon
    # … and OpenDP, whose conversion is tighter, agrees that the promise holds.
    assert dp.c.make_zCDP_to_approxDP(measurement).map(1.0).epsilon(delta) <= epsilon


@pytest.mark.parametrize("delta", [1e-3, 1e-6, 1e-10])
def test_exact_is_worth_the_most_of_the_valid_calibrations(delta):
    epsilon = np.geomspace(1e-3, 1e3, 60)
    exact = calibration.capacity(epsilon, delta)
    assert np.all(calibration.capacity(epsilon, delta, calibration="zcdp") < exact)


# THEORY §3.1: what the paper's noise for ε (q = 1) really guarantees at the same δ.
@pytest.mark.parametrize(
    ("delta", "claimed", "true"),
    [
        (1e-3, 4, 3.44),
        (1e-3, 8, 8.35),
        (1e-3, 12, 14.5),
        (1e-3, 16, 21.8),
        (1e-3, 20, 30.3),
        (1e-5, 8, 8.01),
        (1e-5, 20, 25.8),
        (1e-5, 50, 97.9),
    ],
)
def test_what_the_paper_really_guarantees(delta, claimed, true):
    sigma = calibration.paper_sigma(claimed, delta, sensitivity=0.3, rounds=200)
    found = float(gaussian.epsilon(delta, np.sqrt(200) * 0.3 / sigma))
    assert found == pytest.approx(true, abs=0.06 if true > 10 else 0.006)


def test_the_papers_delta_at_its_own_epsilon():
    sigma = calibration.paper_sigma(20, 1e-3, sensitivity=1, rounds=200)
    true = gaussian.delta(20, np.sqrt(200) / sigma)
    assert float(true) == pytest.approx(0.116, abs=5e-4)


@pytest.mark.parametrize(("delta", "edge"), [(1e-3, 6.98), (1e-5, 7.97), (1e-6, 8.34)])
def test_where_the_papers_noise_becomes_too_little(delta, edge):
    epsilon = np.linspace(1, 20, 19_001)
    papers = calibration.capacity(epsilon, delta, calibration="paper")
    exact = calibration.capacity(epsilon, delta)
    too_little = papers > exact
    assert epsilon[np.argmax(too_little)] == pytest.approx(edge, abs=0.006)
    assert np.all(too_little[np.argmax(too_little) :])


def test_theorem_1_is_the_paper_row_of_the_tank():
    # σ = Δ√(T/capacity) with the `paper` capacity is Theorem 1.
    q, rounds = 0.6, 200
    capacity = calibration.capacity(8, 1e-3, calibration="paper", sampling=q)
    expected = calibration.paper_sigma(8, 1e-3, sensitivity=1, rounds=rounds, sampling=q)
    assert float(np.sqrt(rounds / capacity)) == pytest.approx(expected, rel=1e-12)


def test_the_capacity_spent_in_many_rounds_is_the_budget():
    mu2 = calibration.capacity(4, 1e-6)
    per_round = np.full(1000, mu2 / 1000)
    assert float(gaussian.epsilon(1e-6, np.sqrt(per_round.sum()))) == pytest.approx(4, rel=1e-9)


def test_a_bound_without_a_proof_is_infinite():
    """With μ² from 2³⁵ on, discrete noise may cost more than all of δ."""
    found = calibration.bound_epsilon(1e-5, [2.0**34, 2.0**35, 1e12])
    continuous = float(gaussian.epsilon(1e-5, 2.0**17))
    assert continuous < found[0] < continuous * (1 + 1e-4)
    assert found[1:].tolist() == [math.inf, math.inf]


@pytest.mark.parametrize("epsilon", [0.0, 1e7, float("nan")])
def test_an_epsilon_outside_the_checked_range_is_refused(epsilon):
    for kind in CALIBRATIONS:
        with pytest.raises(InputError, match="epsilon must be from"):
            calibration.capacity(epsilon, 1e-5, calibration=kind)


@pytest.mark.parametrize("bad", [{"delta": 0}, {"delta": 1.5}, {"delta": math.nan},
                                 {"sampling": 0}, {"sampling": -1}, {"sampling": 1.5}])  # fmt: skip
def test_other_nonsense_is_refused(bad):
    for kind in CALIBRATIONS:
        with pytest.raises(InputError, match=f"{next(iter(bad))} must be"):
            calibration.capacity(**{"epsilon": 8, "delta": 1e-5, "calibration": kind, **bad})


def test_an_unknown_calibration_is_refused():
    with pytest.raises(InputError, match="calibration must be exact, zcdp or paper"):
        calibration.capacity(1, 1e-5, calibration="rdp")


def exact_delta(epsilon, mu):
    """Φ(μ/2 − ε/μ) − e^ε·Φ(−μ/2 − ε/μ) at the working precision."""
    a, b = mu / 2 - epsilon / mu, -mu / 2 - epsilon / mu
    tail = (mpmath.erfc(-x / mpmath.sqrt(2)) / 2 for x in (a, b))
    return next(tail) - mpmath.exp(epsilon) * next(tail)


@pytest.mark.parametrize("delta", [1e-100, 1e-12, 1e-5, 1e-3, 0.1, 0.5])
@pytest.mark.parametrize("epsilon", [1e-6, 1e-3, 0.1, 1, 8, 20, 100, 1e4])
def test_a_vaults_capacity_pays_for_the_grid(epsilon, delta):
    """docs/proofs.md (c): c ≤ μ(ε − x, δ(1 − x − 1e-9))², x = (2³⁰ + 400)·c/2⁶⁵, to 80 digits."""
    c = float(calibration.vault_capacity(epsilon, delta))
    with mpmath.workdps(80):
        x = (2**30 + 400) * mpmath.mpf(c) / 2**65
        allowed = mpmath.mpf(delta) * (1 - x - mpmath.mpf("1e-9"))
        assert exact_delta(epsilon - x, mpmath.sqrt(c)) <= allowed
    lost = 1 - c / float(calibration.capacity(epsilon, delta))
    assert 0 < lost < (1e-9 if delta <= 1e-3 and 0.1 <= epsilon <= 100 else 2e-8)


def test_zcdp_needs_no_correction():
    with_grid = calibration.vault_capacity([1.0, 8.0], 1e-5, calibration="zcdp")
    assert with_grid.tolist() == calibration.capacity([1, 8], 1e-5, calibration="zcdp").tolist()


def test_a_vault_refuses_the_papers_calibration_and_nonsense():
    with pytest.raises(InputError, match="calibration must be exact or zcdp"):
        calibration.vault_capacity(8, 1e-5, calibration="paper")
    with pytest.raises(InputError, match="calibration must be exact, zcdp or paper"):
        calibration.vault_capacity(8, 1e-5, calibration="rdp")
    with pytest.raises(InputError, match="epsilon must be"):
        calibration.vault_capacity(0, 1e-5)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("(MOST_PARAMETERS + _SPARE_PARAMETERS) * continuous / _GRID", "0.0 * continuous"),
        ("- lost, 0.0)", "+ lost, 0.0)"),
        ("(1 - lost - _SPARE_DELTA)", "(1 - lost)"),
        ("_GRID = 2.0**65", "_GRID = 2.0**66"),
    ],
)
def test_a_forgotten_correction_would_be_noticed(old, new):
    wrong = mutated("sottovoce.privacy.calibration", old, new)
    caught = False
    for epsilon, delta in [(1e-6, 0.1), (8, 1e-5), (100, 1e-5), (1e4, 0.5)]:
        c = float(wrong.vault_capacity(epsilon, delta))
        with mpmath.workdps(80):
            x = (2**30 + 400) * mpmath.mpf(c) / 2**65
            allowed = mpmath.mpf(delta) * (1 - x - mpmath.mpf("1e-9"))
            caught |= exact_delta(epsilon - x, mpmath.sqrt(c)) > allowed
    assert caught
