"""Who takes part, and for how many turns to plan."""

from __future__ import annotations

import math

import numpy as np
import pytest

from sottovoce.errors import InputError
from sottovoce.schedules.pricing import pick_cohort, plan_turns


def play(kind, clients, per_round, rounds, rng, online=1.0):
    asked = np.zeros(clients, dtype=np.int64)
    for _ in range(rounds):
        present = rng.random(clients) < online
        ids = pick_cohort(kind, asked=asked, size=per_round, rng=rng, online=present)
        assert len(set(ids.tolist())) == len(ids) == min(per_round, int(present.sum()))
        assert np.all(present[ids])
        assert np.all(np.diff(ids) > 0)
        asked[ids] += 1
    return asked


@pytest.mark.parametrize(("clients", "per_round"), [(50, 30), (50, 50), (7, 3), (10, 1), (1, 1)])
@pytest.mark.parametrize("rounds", [1, 13, 200])
def test_balanced_turns_differ_by_one_and_keep_the_plan(clients, per_round, rounds):
    asked = play("balanced", clients, per_round, rounds, np.random.default_rng(0))
    plan = plan_turns("balanced", rounds=rounds, clients=clients, per_round=per_round)
    assert asked.max() - asked.min() <= 1
    assert asked.max() <= plan == math.ceil(per_round * rounds / clients)


@pytest.mark.slow
def test_random_turns_exceed_the_mean_for_many_but_the_plan_for_few():
    # 38–48 % of the clients exceed qT (THEORY §3.2); two standard deviations leave about 2 %.
    rng, over_mean, over_plan = np.random.default_rng(1), [], []
    plan = plan_turns("random", rounds=200, clients=50, per_round=30)
    for _ in range(200):
        asked = play("random", 50, 30, 200, rng)
        over_mean.append(np.mean(asked > 120))
        over_plan.append(np.mean(asked > plan))
    assert 0.38 <= np.mean(over_mean) <= 0.48
    assert np.mean(over_plan) < 0.03


def test_who_was_offline_is_asked_first():
    asked, rng = np.array([5, 5, 0, 5]), np.random.default_rng(2)
    assert 2 in pick_cohort("balanced", asked=asked, size=1, rng=rng).tolist()
    online = np.array([True, True, False, True])
    assert 2 not in pick_cohort("balanced", asked=asked, size=3, rng=rng, online=online).tolist()


def test_offline_clients_are_never_picked():
    for kind in ("balanced", "random"):
        play(kind, 20, 8, 50, np.random.default_rng(3), online=0.3)


def test_ties_are_broken_at_random():
    rng = np.random.default_rng(4)
    asked = np.zeros(10, dtype=np.int64)
    seen = {
        tuple(pick_cohort("balanced", asked=asked, size=3, rng=rng).tolist()) for _ in range(200)
    }
    assert len(seen) > 60  # of 120


def test_plans():
    assert plan_turns("balanced", rounds=3, clients=10, per_round=1) == 1
    # qT + 2√(Tq(1−q)) = 50 + 2·5 = 60 exactly: neither 1.9 nor 2.1 standard deviations
    assert plan_turns("random", rounds=100, clients=2, per_round=1) == 60
    assert plan_turns("random", rounds=5, clients=10, per_round=10) == 5
    assert plan_turns("random", rounds=1, clients=1000, per_round=1) == 1
    assert plan_turns("random", rounds=200, clients=50, per_round=30, charges_absent=True) == 200
    # whole numbers all the way: 3·10^15·7 is beyond what a float can tell apart
    assert plan_turns("balanced", rounds=3 * 10**15, clients=7, per_round=7) == 3 * 10**15


def test_nonsense_is_refused():
    rng = np.random.default_rng(0)
    with pytest.raises(InputError, match="cohort must be"):
        pick_cohort("fair", asked=np.zeros(3, dtype=np.int64), size=1, rng=rng)
    with pytest.raises(InputError, match="cohort must be"):
        plan_turns("fair", rounds=1, clients=1, per_round=1)
    with pytest.raises(InputError, match="per_round must be"):
        pick_cohort("random", asked=np.zeros(3, dtype=np.int64), size=0, rng=rng)
