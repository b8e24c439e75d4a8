"""The host's books of several runs side by side are those of each run alone, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest

from sottovoce.data.federated import load_holdings
from sottovoce.plan import Plan
from sottovoce.privacy.tank import FULL
from sottovoce.server import rounds as course
from sottovoce.server.federation import build

SMALL = Plan().replace(**{"data.clients": 6, "data.samples": 12, "rounds.rounds": 9})
KINDS = {
    "budgets and horizons": [
        {"privacy.epsilon": epsilon, "rounds.rounds": rounds}
        for epsilon, rounds in [(1.0, 3), (8.0, 9), (8.0, 5), (20.0, 9)]
    ],
    "schedules": [
        {"rounds.schedule": "fixed"},
        {"rounds.schedule": "discounted"},
        {"rounds.schedule": "decaying", "rounds.slope": 0.5},
        {"rounds.schedule": "decaying", "rounds.slope": 0.2},
    ],
    "cohorts": [{"rounds.per_round": 2, "privacy.epsilon": e} for e in (1.0, 4.0, 8.0)],
    "absent clients pay": [
        {"rounds.per_round": 2, "privacy.calibration": "paper", "privacy.epsilon": e}
        for e in (4.0, 8.0)
    ],
    "steps": [{"local.steps": 3, "privacy.epsilon": e} for e in (1.0, 8.0)],
    "told losses": [
        {"server.signal": "clients", "server.loss_bound": b, "privacy.epsilon": 8.0}
        for b in (2.0, 5.0)
    ],
    "weights": [{"server.weights": w} for w in ("samples", "precision", "samples")],
}
ARRAYS = ("weight", "sigma", "signal_sigma", "mu2", "uploads", "asked")


def runs_of(changes):
    plans = [SMALL.replace(**change) for change in changes]
    held = load_holdings(plans[0], seed=1)
    return [build(plan, seed=1, held=held) for plan in plans]


def told(state, seed):
    """A loss that a run may see: falls for some, jitters for others, so that horizons part."""
    return 2.0 / (1 + state.progress.done) if seed % 2 else 1.0 + 0.1 * (state.progress.done % 2)


@pytest.mark.parametrize("kind", KINDS)
def test_side_by_side_is_each_alone(kind):
    federations = runs_of(KINDS[kind])
    together = [course.make_first_state(own, 2.0, 0.1, 2.0) for own in federations]
    alone = list(together)
    for _ in range(10):
        runs = zip(federations, together, range(1, 1 + len(together)), strict=True)
        asked = [course.WaitingRun(*row) for row in runs]
        paid = course.prepare_rounds(asked)
        for i, (federation, both) in enumerate(zip(federations, paid, strict=True)):
            one = course.prepare_round(federation, alone[i], i + 1)
            assert (one is None) == (both is None)
            if one is None:
                continue
            assert one.round == both.round
            for name in ARRAYS:
                assert np.array_equal(getattr(one, name), getattr(both, name), equal_nan=True)
            for name in ("capacity", "spent", "opened", "debits"):
                assert np.array_equal(getattr(one.tank, name), getattr(both.tank, name))
            assert (one.std, one.signal_std) == pytest.approx(
                (both.std, both.signal_std), rel=0, abs=0, nan_ok=True
            )
            losses = told(alone[i], i)
            scores = (losses, 0.5, losses, losses, ())
            one, both = course.PlayedRound(one, *scores), course.PlayedRound(both, *scores)
            alone[i] = course.close_round(federation, alone[i], one, seconds=0.0)
            together[i] = course.close_round(federation, together[i], both, seconds=0.0)
            assert alone[i].rounds == together[i].rounds
    assert {own.progress.done for own in alone} - {0}
    assert all(np.all(own.tank.spent <= FULL) for own in together)


def test_horizons_part_ways_in_one_batch():
    """Otherwise the test above would not see a horizon that is taken from the neighbour."""
    federations = runs_of([{"rounds.schedule": "discounted"}] * 2)
    states = [course.make_first_state(own, 2.0, 0.1, 2.0) for own in federations]
    seen = set()
    for _ in range(8):
        asked = [course.WaitingRun(*row) for row in zip(federations, states, (1, 2), strict=True)]
        paid = course.prepare_rounds(asked)
        if None in paid:
            break
        seen.add(tuple(float(own.sigma[0, 0]) for own in paid))
        for i, own in enumerate(paid):
            loss = told(states[i], i)
            played = course.PlayedRound(own, loss, 0.5, loss, loss, ())
            states[i] = course.close_round(federations[i], states[i], played, seconds=0.0)
    assert any(left != right for left, right in seen)
