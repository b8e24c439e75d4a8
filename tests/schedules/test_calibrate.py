"""What `calibrate` states, from the smallest to the largest budgets and federations."""

from __future__ import annotations

import itertools
import json
import warnings

import mpmath
import pytest

from sottovoce.errors import InputError
from sottovoce.privacy.budget import CALIBRATIONS
from sottovoce.schedules.calibrate import MOST, calibrate, format_table, list_noise

FEDERATIONS = [  # rounds, clients, clients in a round, samples
    (1, 1, 1, 1),
    (7, 3, 2, 5),
    (MOST, MOST, MOST, MOST),
    (MOST, 1000, 1, 1),
]


def exact_delta(epsilon: float, mu2: mpmath.mpf) -> mpmath.mpf:
    """Return δ(ε, μ) in 500 digits."""
    mu, e = mpmath.sqrt(mu2), mpmath.mpf(epsilon)
    return mpmath.ncdf(mu / 2 - e / mu) - mpmath.exp(e) * mpmath.ncdf(-mu / 2 - e / mu)


@pytest.mark.parametrize("calibration", CALIBRATIONS)
@pytest.mark.parametrize("federation", FEDERATIONS)
def test_every_number_is_finite_and_the_guarantee_holds_at_the_extremes(calibration, federation):
    rounds, clients, per_round, samples = federation
    for epsilon, delta in itertools.product((1e-6, 1.0, 1e3, 1e6), (1e-100, 1e-5, 0.5)):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            answer = calibrate(
                epsilon=epsilon,
                delta=delta,
                rounds=rounds,
                clients=clients,
                per_round=per_round,
                samples=samples,
                calibration=calibration,
            )
            json.dumps(answer.to_json(), allow_nan=False)
            format_table(answer)
        promised = answer.guarantee.budget
        assert max(answer.model_view["epsilon"]) <= promised.epsilon
        if max(promised.epsilon, answer.mu) < 1e4:  # beyond it e^ε takes too many digits
            with mpmath.workdps(500):
                mu2 = (
                    answer.participations
                    * (mpmath.mpf(answer.sensitivity) / mpmath.mpf(answer.sigma)) ** 2
                )
                assert exact_delta(promised.epsilon, mu2) <= delta


def test_where_the_papers_noise_cannot_be_judged_the_share_of_clients_is_named():
    with pytest.raises(InputError, match="per_round must be a larger share of the clients, got 1;"):
        calibrate(epsilon=1000, delta=0.5, rounds=1, clients=MOST, per_round=1)


@pytest.mark.parametrize("epsilon", [0.7, 1.0, 3.0, 8.0, 13.3])
def test_whoever_types_the_printed_noise_keeps_the_promise(epsilon):
    """σ and σ/Δ are rounded up in the table, and so is every μ."""
    answer = calibrate(epsilon=epsilon)
    shown = {name: ours for name, ours, _ in list_noise(answer)}
    ratio = mpmath.mpf(answer.sensitivity) / mpmath.mpf(shown["noise σ of one upload"])
    for mu in (ratio, 1 / mpmath.mpf(shown["noise multiplier, σ/Δ"])):
        assert exact_delta(epsilon, answer.participations * mu**2) <= answer.request.delta
    assert float(shown["μ of one upload, Δ/σ"]) >= answer.mu_release
    assert float(shown["μ of the whole run"]) >= answer.mu
