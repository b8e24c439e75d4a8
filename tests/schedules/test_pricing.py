"""What a round costs: whatever a server announces, never below the floor, never beyond the tank."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sottovoce.client import release
from sottovoce.errors import PolicyRefusal, TankEmpty
from sottovoce.privacy import grid
from sottovoce.privacy.tank import FULL, Tank
from sottovoce.schedules.base import Round
from sottovoce.schedules.pricing import Terms

pytestmark = pytest.mark.slow  # left out of the editing loop


@st.composite
def announcements(draw):
    """Rounds as a hostile server announces them, with terms that change as it likes."""
    horizon = draw(st.sampled_from([1, 2, 3, 10, 100, 10**6, 10**9]))
    odd = st.sampled_from([1e-300, 1e-6, 0.01, 0.5, 1.0, 3.0, 1e6, 1e7])
    clients = draw(st.sampled_from([1, 3, 10**9]))
    terms = Terms(
        clients=clients,
        per_round=draw(st.sampled_from([1, clients])),
        cohort=draw(st.sampled_from(["balanced", "random"])),
        releases=draw(st.sampled_from([1, 2, 5])),
    )
    spread = draw(st.sampled_from([None, 1, 7, 10**9]))
    turn = Round(draw(st.integers(0, horizon - 1)), horizon, draw(odd), spread)
    return turn, terms, draw(st.booleans())


@settings(max_examples=200, deadline=None, derandomize=True, database=None)
@given(
    capacity=st.sampled_from([1e-9, 0.07, 2.775657952902649, 50.0]),
    floor=st.sampled_from([0.0, 1e-9, 0.3, 1.20046, 40.0]),
    unit=st.sampled_from(["record", "client"]),
    asked=st.lists(announcements(), min_size=1, max_size=30),
)
def test_no_announcement_buys_less_noise_than_the_floor_or_more_than_the_tank(
    capacity, floor, unit, asked
):
    """Σ (Δ/σ)² over all that was priced, losses included, in exact fractions."""
    tank, change = Tank.full(capacity), grid.grid_sensitivity(unit, 800)
    told = Fraction(0)
    for turn, terms, loss in asked:
        try:
            paid = release.price(tank, turn, terms, change=change, floor=floor, loss=loss)
        except (TankEmpty, PolicyRefusal):
            continue
        assert len(paid.units) == len(paid.noise) == terms.releases
        noises = [*paid.noise, *([] if paid.loss_noise is None else [paid.loss_noise])]
        assert len(noises) == terms.releases + loss
        for noise in noises:
            assert type(noise) is int
            assert Fraction(noise, change) >= Fraction(floor)
            assert 1 <= noise <= grid.LARGEST_NOISE
        worth = sum(Fraction(change, noise) ** 2 for noise in noises)
        assert worth * Fraction(floor) ** 2 <= 1  # the floor is the whole turn's, steps and loss
        told += worth
        for booked in paid.units:
            tank = tank.spend(booked)
        assert told <= Fraction(capacity) * Fraction(int(tank.spent), FULL)
        assert told <= Fraction(capacity)
    assert int(tank.spent) <= FULL
