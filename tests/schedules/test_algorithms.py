"""The contract that every schedule keeps, and the rules of each."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sottovoce.errors import InputError
from sottovoce.privacy.tank import Tank
from sottovoce.schedules.algorithms import (
    SCHEDULES,
    DecayingNoise,
    DiscountedRounds,
    FixedRounds,
    ForecastRounds,
)
from sottovoce.schedules.base import Progress
from sottovoce.schedules.pricing import Terms, price_release

OPTIONS = {
    FixedRounds: {},
    DiscountedRounds: {
        "beta": st.sampled_from([0.05, 0.3, 0.5, 0.6, 0.7, 0.8, 0.9, 0.99]),
        "zeta": st.sampled_from([-1.0, 0.0, 1e-3, 10.0]),
        "window": st.integers(1, 6),
    },
    DecayingNoise: {"slope": st.sampled_from([0.0, 0.004, 0.1, 0.9])},
    ForecastRounds: {},
}
schedules = st.one_of(
    st.builds(kind, st.integers(1, 80), **options) for kind, options in OPTIONS.items()
)
losses = st.lists(
    st.one_of(st.floats(0, 5), st.sampled_from([math.nan, math.inf, -math.inf])),
    min_size=1,
    max_size=40,
)


def test_every_schedule_that_a_plan_can_name_is_checked_here():
    assert {*OPTIONS} == {*SCHEDULES.values()}


def rounds_of(schedule, sequence):
    """All rounds of a run whose losses repeat the sequence."""
    progress, found = schedule.start(sequence[0]), []
    while (turn := schedule.round(progress)) is not None:
        found.append((turn, progress))
        progress = schedule.advance(progress, sequence[(turn.t + 1) % len(sequence)])
        assert len(found) <= schedule.rounds
    return found


@pytest.mark.slow
@settings(derandomize=True, deadline=None, max_examples=500)
@given(schedules, losses)
def test_every_schedule_keeps_the_contract(schedule, sequence):
    found = rounds_of(schedule, sequence)
    assert 1 <= len(found) <= schedule.rounds
    assert [turn.t for turn, _ in found] == list(range(len(found)))
    horizons = [turn.horizon for turn, _ in found]
    assert horizons == sorted(horizons, reverse=True)
    assert all(turn.t < turn.horizon <= schedule.rounds for turn, _ in found)
    assert all(0 < turn.scale <= 1 for turn, _ in found)


@pytest.mark.slow
@settings(derandomize=True, deadline=None, max_examples=300)
@given(schedules, losses)
def test_a_schedule_is_a_value(schedule, sequence):
    for turn, progress in rounds_of(schedule, sequence):
        assert schedule.round(progress) == turn  # asking twice changes nothing


def printed_rule(rounds, beta, zeta, sequence):
    """Algorithm 2 as the paper prints it, with V₀, V₁, …: rounds done and T after each."""
    horizon, t, horizons = rounds, 0, []
    while t < horizon:
        if not sequence[t] - sequence[t + 1] >= zeta:
            horizon = math.floor(Fraction(str(beta)) * (horizon - t)) + t
        horizons.append(horizon)
        t += 1
    return t, horizons


def smoothed_rule(rounds, beta, zeta, w, sequence):
    """THEORY §4, written out a second time on the whole list of losses."""
    horizon, t, last, horizons = rounds, 0, -w, []
    while True:
        known = sequence[: t + 2]
        if t + 2 >= 2 * w and t - last >= w:
            before, newest = known[-2 * w : -w], known[-w:]
            if not np.mean(before) - np.mean(newest) >= zeta * w:
                horizon = math.floor(Fraction(str(beta)) * (horizon - t)) + t
                last = t
        horizons.append(horizon)
        t += 1
        if t >= horizon:
            return t, horizons


@pytest.mark.parametrize("beta", [0.5, 0.7, 0.9])
def test_window_1_is_the_printed_rule(beta):
    rng = np.random.default_rng(2)
    for _ in range(200):
        sequence = (2.3 * 0.97 ** np.arange(202) + 0.05 * rng.standard_normal(202)).tolist()
        schedule = DiscountedRounds(200, beta=beta, zeta=1e-3, window=1)
        done, horizons = printed_rule(200, beta, 1e-3, sequence)
        progress, seen = schedule.start(sequence[0]), []
        while (turn := schedule.round(progress)) is not None:
            progress = schedule.advance(progress, sequence[turn.t + 1])
            seen.append(progress.horizon)
        assert (progress.done, seen) == (done, horizons)


@pytest.mark.parametrize("window", [1, 2, 3, 5])
def test_the_smoothed_rule(window):
    rng = np.random.default_rng(4)
    for _ in range(200):
        zeta = float(rng.choice([0.0, 1e-3]))
        sequence = (2.3 * 0.97 ** np.arange(202) + 0.02 * rng.standard_normal(202)).tolist()
        schedule = DiscountedRounds(120, beta=0.8, zeta=zeta, window=window)
        done, horizons = smoothed_rule(120, 0.8, zeta, window, sequence)
        progress, seen = schedule.start(sequence[0]), []
        while (turn := schedule.round(progress)) is not None:
            progress = schedule.advance(progress, sequence[turn.t + 1])
            seen.append(progress.horizon)
        assert (progress.done, seen) == (done, horizons)


def test_the_discount_is_exact_in_decimals():
    # 0.7·90 is 62.99… in floating point
    schedule = DiscountedRounds(90, beta=0.7, zeta=0.0, window=1)
    assert schedule.advance(schedule.start(1.0), 2.0).horizon == 63


def test_a_diverged_model_does_not_count_as_progress():
    schedule = DiscountedRounds(100, beta=0.5, zeta=0.0, window=1)
    assert schedule.advance(schedule.start(1.0), math.nan).horizon == 50


@pytest.mark.parametrize(
    ("rounds", "slope", "expected"), [(200, 0.004, 111), (200, 0.0, 200), (1, 0.5, 1), (50, 0.9, 1)]
)
def test_decaying_noise_stops_before_the_first_overspend(rounds, slope, expected):
    schedule = DecayingNoise(rounds, slope)
    assert schedule.affordable == expected
    # Through a real tank: every round announced is paid, and one more would not be.
    tank, terms = Tank.full(1.7), Terms(clients=1, per_round=1)
    for t in range(expected):
        price = price_release(tank, schedule.round(Progress(t, expected)), terms, 0.3)
        assert price.granted
        assert float(price.sigma) == pytest.approx(
            (1 - slope * t) * 0.3 * math.sqrt(rounds / 1.7), rel=1e-9
        )
        tank = tank.spend(price.units)
    if expected < rounds and slope * expected < 1:
        scale = 1 - slope * expected
        assert not tank.offer_scaled(0.3, rounds, scale).granted


def test_decaying_noise_over_many_rounds_is_quick_and_exact():
    assert DecayingNoise(100_000, 0.0).affordable == 100_000


@pytest.mark.parametrize(
    "make",
    [
        lambda: FixedRounds(0),
        lambda: FixedRounds(-3),
        lambda: FixedRounds(1.5),
        lambda: FixedRounds(True),
        lambda: DiscountedRounds(10, beta=0),
        lambda: DiscountedRounds(10, beta=1),
        lambda: DiscountedRounds(10, beta=math.nan),
        lambda: DiscountedRounds(10, zeta=math.inf),
        lambda: DiscountedRounds(10, window=0),
        lambda: DecayingNoise(10, slope=-0.1),
        lambda: DecayingNoise(10, slope=1),
        lambda: DecayingNoise(10, slope=math.nan),
    ],
)
def test_nonsense_is_refused(make):
    with pytest.raises(InputError, match=r"must be .*, got .*; \w"):
        make()
