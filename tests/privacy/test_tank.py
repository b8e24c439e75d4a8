"""The tank: exact, never overspent, the same for one client and a million.

Each guarantee is a function of the module under test, so that the same function also runs against
mutants of `tank.py` with one guard removed, and must fail there.
"""

from __future__ import annotations

import contextlib
from fractions import Fraction
from types import ModuleType

import numpy as np
import pytest

from sottovoce.errors import InputError, TankEmpty
from sottovoce.privacy import tank as real
from sottovoce.privacy.tank import FULL, Tank
from support.mutated_module import mutated


def booked_covers_the_release(module: ModuleType) -> None:
    """(Δ/σ)² ≤ what was booked, in exact rational arithmetic."""
    rng = np.random.default_rng(3)
    for _ in range(3000):
        capacity, delta = 10 ** rng.uniform(-8, 8), 10 ** rng.uniform(-8, 3)
        tank = module.Tank.full(capacity)
        remaining = int(10 ** rng.uniform(0, 6))
        if rng.random() < 0.5:
            offer = tank.offer(delta, remaining)
        else:
            offer = tank.offer_scaled(delta, planned=remaining, scale=float(rng.uniform(0.2, 1)))
        if offer.granted:
            mu2 = (Fraction(delta) / Fraction(float(offer.sigma))) ** 2
            assert mu2 <= Fraction(int(offer.units), FULL) * Fraction(capacity)


def nothing_left_is_declined(module: ModuleType) -> None:
    """With nothing left there is no offer: not a free one, not one with infinite noise."""
    tank = module.Tank.full(1.0)
    tank = tank.spend(tank.left)
    offer = tank.offer(1.0, remaining=5)
    assert not offer.granted
    assert np.isnan(offer.sigma)


def past_the_plan_uses_what_is_left(module: ModuleType) -> None:
    """r < 1 (the horizon shrank below the turns taken) counts as 1: finite noise, no overspend."""
    tank = module.Tank.full(4.0).spend(FULL // 4)
    for remaining in (1, 0, -1, -(10**6)):
        offer = tank.offer(1.0, remaining)
        assert offer.granted
        assert int(offer.units) == 3 * FULL // 4
        assert float(offer.sigma) == pytest.approx(1 / np.sqrt(3), rel=1e-12)


def never_more_than_the_capacity(module: ModuleType) -> None:
    """Stale offers, doubled offers, two runs on one tank: the sum stays below the capacity."""
    rng = np.random.default_rng(5)
    for _ in range(300):
        tank, stale = module.Tank.full(1.0), []
        for _ in range(30):
            stale.append(int(tank.offer(1.0, int(rng.integers(-2, 6))).units))
            with contextlib.suppress(TankEmpty):
                tank = tank.spend(int(rng.choice(stale)) * int(rng.integers(1, 3)))
            assert 0 <= int(tank.spent) <= FULL


def debits_are_never_taken_back(module: ModuleType) -> None:
    """Negative units are refused."""
    with pytest.raises(InputError):
        module.Tank.full(1.0).spend(10).spend(-5)


def debits_count_even_if_the_upload_is_lost(module: ModuleType) -> None:
    """While T is unchanged σ is unchanged, because r counts debits, whatever became of them."""
    tank, sigmas = module.Tank.full(3.0), []
    for _ in range(120):
        offer = tank.offer(1.0, remaining=120 - int(tank.debits))
        tank = tank.spend(offer.units)  # nobody tells the tank whether the upload arrived
        sigmas.append(float(offer.sigma))
    np.testing.assert_allclose(sigmas, np.sqrt(120 / 3.0), rtol=1e-12)
    assert int(tank.left) < 120


GUARANTEES = [
    booked_covers_the_release,
    nothing_left_is_declined,
    past_the_plan_uses_what_is_left,
    never_more_than_the_capacity,
    debits_are_never_taken_back,
    debits_count_even_if_the_upload_is_lost,
]

# The guard, what it becomes, and the guarantee that must notice.
MUTANTS = [
    ("np.sqrt(mu2) * _ROUND_UP)", "np.sqrt(mu2))", booked_covers_the_release),
    ("granted = units > 0", "granted = units > -1", nothing_left_is_declined),
    (
        'remaining = np.maximum(1, self._read_counts("remaining", remaining))',
        'remaining = self._read_counts("remaining", remaining)',
        past_the_plan_uses_what_is_left,
    ),
    ("over := units > self.left", "over := units > FULL", never_more_than_the_capacity),
    ("if (units < 0).any()", "if (units < -FULL).any()", debits_are_never_taken_back),
    (
        "debits=self.debits + (units > 0)",
        "debits=self.debits",
        debits_count_even_if_the_upload_is_lost,
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize("guarantee", GUARANTEES, ids=lambda g: g.__name__)
def test_guarantee(guarantee):
    guarantee(real)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # a mutant may divide by zero
@pytest.mark.parametrize(("old", "new", "guarantee"), MUTANTS, ids=[m[1] for m in MUTANTS])
def test_without_the_guard_the_guarantee_fails(old, new, guarantee):
    module = mutated("sottovoce.privacy.tank", old, new)
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        guarantee(module)


@pytest.mark.slow
def test_a_hundred_thousand_entries_do_not_drift():
    # Every entry is rounded to whole units; together they book the capacity to 1e-9, never more,
    # and the exact sum of (Δ/σ)² stays below it. (A million entries lose ten times as little each:
    # one unit of 2⁵⁰ an entry is below 1e-9 in all.)
    count, tank, released = 100_000, Tank.full(2.0), Fraction(0)
    last = None
    for i in range(count):
        offer = tank.offer(1.0, remaining=count - i)
        tank = tank.spend(offer.units)
        if float(offer.sigma) != last:
            last, mu2 = float(offer.sigma), 1 / Fraction(float(offer.sigma)) ** 2
        released += mu2
    assert int(tank.debits) == count
    assert int(tank.left) == 0
    assert Fraction(2) * (1 - Fraction(1, 10**9)) < released <= Fraction(2)


@pytest.mark.parametrize(
    "sensitivity", [0.0, -1.0, float("nan"), float("inf"), [1.0, 1.0], [[1.0]], []]
)
def test_a_sensitivity_that_is_none_is_refused(sensitivity):
    with pytest.raises(InputError, match="sensitivity must be"):
        Tank.full(1.0).offer(sensitivity, 1)


@pytest.mark.parametrize("shape", [(3,), (1, 2), (2, 2)])
def test_one_debit_pays_for_one_release(shape):
    # Broadcasting would hand out several noises for one booking.
    for call in (
        lambda tank: tank.offer(np.ones(shape), 1),
        lambda tank: tank.offer(1.0, np.ones(shape, int)),
        lambda tank: tank.offer_scaled(1.0, np.ones(shape, int), 1.0),
        lambda tank: tank.spend(np.ones(shape, int)),
    ):
        with pytest.raises(InputError, match="one number or of shape"):
            call(Tank.full([1.0, 1.0]))


@pytest.mark.parametrize("units", [0.9, 5.9, float("nan"), "7", 1e19])
def test_units_are_whole(units):
    with pytest.raises(InputError, match="units must be whole numbers"):
        Tank.full(1.0).spend(units)


@pytest.mark.parametrize("kind", [np.uint8, np.int8, np.int32, np.uint64])
def test_units_of_any_width_are_booked(kind):
    assert int(Tank.full(1.0).spend(kind(5)).spent) == 5


@pytest.mark.parametrize("units", [2**63 - 1, np.uint64(2**64 - 1)])
def test_units_beyond_the_tank_are_refused(units):
    with pytest.raises(TankEmpty):
        Tank.full(1.0).spend(units)


@pytest.mark.parametrize("remaining", [10**20, -(10**20), 2**62, 0])
def test_a_server_may_announce_anything(remaining):
    offer = Tank.full(1.0).offer(1.0, remaining)
    assert int(offer.units) in (1, FULL)
    with pytest.raises(InputError, match="scale must be"):
        Tank.full(1.0).offer_scaled(1.0, 5, 0.0)


def test_a_tank_is_a_value():
    capacity = np.array([1.0, 1.0])
    tank = Tank.full(capacity)
    capacity *= 100
    assert tank.capacity.tolist() == [1, 1]
    with pytest.raises(ValueError, match="read-only"):
        tank.spent[0] += 5


def test_a_million_clients_by_the_same_code():
    rng = np.random.default_rng(11)
    capacity = rng.uniform(0.1, 10, 10**6)
    tank = Tank.full(capacity)
    for _ in range(3):
        offer = tank.offer(0.01, remaining=2 - tank.debits)
        present = rng.random(10**6) < 0.7
        tank = tank.spend(np.where(present, offer.units, 0))
    assert np.all(tank.spent <= FULL)
    for i in range(0, 10**6, 99_991):
        one = Tank.full(capacity[i])
        assert float(one.offer(0.01, 2).sigma) == float(Tank.full(capacity).offer(0.01, 2).sigma[i])


def test_a_new_run_shares_the_fuel():
    tank = Tank.full(1.0).spend(FULL // 2).start_run()
    assert int(tank.debits) == 0
    # half is left, for 2 releases: a quarter each
    assert int(tank.offer(1.0, 2).units) == FULL // 4
    assert int(tank.offer_scaled(1.0, 2, 1.0).units) == FULL // 4


def test_a_declining_client_does_not_hold_up_the_others():
    tank = Tank.full([1.0, 1.0]).spend([FULL, 0])
    offer = tank.offer(1.0, 4)
    assert offer.granted.tolist() == [False, True]
    with pytest.raises(TankEmpty):
        offer.require()
    assert tank.spend(offer.units).debits.tolist() == [1, 1]
