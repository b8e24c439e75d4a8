"""Rounds begun before the losses of those before are known: the same run, bit for bit."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from sottovoce import Plan
from sottovoce.federation import build
from sottovoce.learning.clipping import Inspected, clipped_sum, inspect
from sottovoce.learning.models import Mlp, custom
from sottovoce.simulation import loop
from sottovoce.simulation.run import started

BASE = {
    "data": {"name": "digits", "clients": 6, "samples": 40},
    "model": {"name": "mlp", "hidden": 8},
}
PLANS = {
    "fixed": Plan(**BASE, rounds={"schedule": "fixed", "rounds": 13}),
    "discounted": Plan(**BASE, rounds={"schedule": "discounted", "rounds": 40, "beta": 0.6}),
    "decaying": Plan(**BASE, rounds={"schedule": "decaying", "rounds": 9}),
    "few": Plan(**BASE, rounds={"schedule": "fixed", "rounds": 7, "per_round": 2}),
    "told": Plan(
        **BASE,
        rounds={"schedule": "discounted", "rounds": 20},
        server={"signal": "clients", "loss_bound": 4.0},
    ),
    "averaged": Plan(
        **BASE,
        rounds={"schedule": "discounted", "rounds": 20},
        server={"average": "tail", "momentum": 0.5, "decay": "linear"},
    ),
}


def played(plan: Plan, ahead: int):
    """A run to its end, and what was told after each round."""
    run, told = started(build(plan, seed=3), 3), []

    def after(run):
        told.append((run.state.rounds[-1], jax.tree.map(np.asarray, run.handed)))

    for _ in loop.rounds_of(run.federation.model, [run], after, ahead=ahead):
        pass
    return run, told


@pytest.mark.slow
@pytest.mark.parametrize("name", PLANS)
def test_rounds_begun_ahead_make_the_same_run(name):
    """A guess that the horizon stays is either right or thrown away; nothing of it is booked."""
    (slow, one), (quick, other) = played(PLANS[name], 1), played(PLANS[name], 5)
    assert len(one) == len(other) > 1
    for (entry, model), (again, same) in zip(one, other, strict=True):
        assert entry == again
        assert jax.tree.all(jax.tree.map(np.array_equal, model, same))
    np.testing.assert_array_equal(slow.state.tank.spent, quick.state.tank.spent)
    np.testing.assert_array_equal(slow.state.asked, quick.state.asked)
    assert slow.state.progress == quick.state.progress
    assert slow.state.marks == quick.state.marks


def test_some_guesses_are_wrong(monkeypatch):
    """Else the test above would say nothing of guesses thrown away."""
    begun = []
    play = loop.play

    def counted(*args, **options):
        begun.append(args[4])
        return play(*args, **options)

    monkeypatch.setattr(loop, "play", counted)
    _, told = played(PLANS["discounted"], 5)
    assert len(begun) > len(told)
    begun.clear()
    _, told = played(PLANS["fixed"], 5)
    assert begun == list(range(len(told)))  # a fixed number of rounds is never guessed wrong


@pytest.mark.slow
@pytest.mark.parametrize("bad", [np.nan, np.inf, 3e38])
def test_inspected_rows_count_as_the_rows_themselves(bad):
    """What is found once is what would be found each time, also of rows that must not count."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((30, 5)).astype(np.float32)
    x[3, 1] = x[7, 4] = bad
    y, weight = rng.integers(0, 3, 30), np.ones(30, np.float32)
    model = Mlp(5, hidden=4, classes=3)
    params = model.init(jax.random.key(1))
    plain = clipped_sum(model, params, x, y, weight, 0.7)
    seen = inspect(model, jax.numpy.asarray(x))
    assert isinstance(seen, Inspected)
    known = clipped_sum(model, params, seen, y, weight, 0.7)
    good = np.delete(np.arange(30), [3, 7])
    alone = clipped_sum(model, params, x[good], y[good], weight[good], 0.7)
    for name in params:
        np.testing.assert_array_equal(plain[name], known[name])
        np.testing.assert_allclose(plain[name], alone[name], rtol=1e-4, atol=1e-6)


def test_a_custom_model_is_given_its_rows_as_they_are():
    """It may not look at the number that is not one; then its row counts."""
    model = custom(
        init=lambda key: jax.numpy.zeros(1),
        apply=lambda w, x: x[:, :1] @ w,
        loss=lambda scores, y: (scores - y) ** 2,
    )
    x = np.array([[1.0, np.nan]], np.float32)
    seen = inspect(model, jax.numpy.asarray(x))
    total = clipped_sum(model, jax.numpy.zeros(1), seen, np.ones(1), np.ones(1), 10.0)
    np.testing.assert_allclose(total, [-2.0])


@pytest.mark.slow
def test_a_row_that_rounds_to_infinity_spoils_nothing(monkeypatch):
    """The largest float32, a common mark of what is missing, is infinite in bfloat16."""
    from sottovoce.learning import clipping

    monkeypatch.setattr(clipping, "product_type", lambda model, dtype: jax.numpy.bfloat16)
    rng = np.random.default_rng(0)
    x = rng.standard_normal((9, 5)).astype(np.float32)
    x[4, 2] = np.finfo(np.float32).max
    model, y = Mlp(5, hidden=4, classes=3), rng.integers(0, 3, 9)
    params = model.init(jax.random.key(1))
    seen = inspect(model, jax.numpy.asarray(x))
    assert seen.is_clean.tolist() == [True] * 4 + [False] + [True] * 4
    total = clipped_sum(model, params, seen, y, np.ones(9, np.float32), 0.7)
    alone = np.delete(np.arange(9), 4)
    rest = inspect(model, jax.numpy.asarray(x[alone]))
    kept = clipped_sum(model, params, rest, y[alone], np.ones(8, np.float32), 0.7)
    for name in params:
        np.testing.assert_allclose(total[name], kept[name], rtol=1e-2, atol=1e-4)
    one = clipped_sum(model, params, seen, y, np.eye(9, dtype=np.float32)[0], 1e-3)
    length = np.sqrt(sum(float((leaf**2).sum()) for leaf in jax.tree.leaves(one)))
    assert length <= 1e-3 * (1 + 2**-8)  # errors are rounded after they were cut
