"""Rounds begun in stretches, before the losses of those before are known: the same run."""

from __future__ import annotations

import threading
from dataclasses import replace

import jax
import numpy as np
import pytest

from sottovoce import Plan
from sottovoce.data.federated import load_holdings
from sottovoce.models.base import Inspected
from sottovoce.models.clipping import clipped_sum, inspect
from sottovoce.models.custom import custom
from sottovoce.models.mlp import Mlp
from sottovoce.privacy.tank import FULL
from sottovoce.server.federation import build
from sottovoce.simulation import accelerator, compiled, simulate
from sottovoce.simulation.simulate import start_run

BASE = {
    "data": {"name": "digits", "clients": 6, "samples": 40},
    "model": {"name": "mlp", "hidden": 8},
}
PLANS = {
    "fixed": Plan(**BASE, rounds={"schedule": "fixed", "rounds": 13}),
    "discounted": Plan(**BASE, rounds={"schedule": "discounted", "rounds": 40, "beta": 0.6}),
    "decaying": Plan(**BASE, rounds={"schedule": "decaying", "rounds": 9}),
    "forecast": Plan(**BASE, rounds={"schedule": "forecast", "rounds": 14}),
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


def played(plan: Plan, most: int | None):
    """A run to its end, in stretches or round by round, and what was told after each round."""
    run, told = start_run(build(plan, seed=3), 3), []

    def after(run):
        told.append((run.state.rounds[-1], jax.tree.map(np.asarray, run.final_model)))

    for _ in rounds_of([run], after, most):
        pass
    return run, told


def rounds_of(batch, after, most):
    model = batch[0].federation.model
    return (
        compiled.play_compiled(model, batch, after)
        if most is None
        else accelerator.play_ahead(model, batch, after, most=most)
    )


def assert_same(one, other):
    """Books and models, bit for bit; the time they took is their own."""
    for name in ("progress", "marks", "rounds", "exhausted", "initial"):
        assert getattr(one.state, name) == getattr(other.state, name)
    for name in ("capacity", "spent", "opened", "debits"):
        assert np.array_equal(getattr(one.state.tank, name), getattr(other.state.tank, name))
    for name in ("asked", "turns"):
        assert np.array_equal(getattr(one.state, name), getattr(other.state, name))
    for name in ("sigma", "mu2"):
        pairs = zip(getattr(one.state, name), getattr(other.state, name), strict=True)
        assert all(np.array_equal(*pair, equal_nan=True) for pair in pairs)
    for mine, theirs in ((one.params, other.params), (one.memory, other.memory)):
        assert jax.tree.all(jax.tree.map(np.array_equal, mine, theirs))


@pytest.fixture
def counted(monkeypatch):
    """How many rounds each stretch had that was begun."""
    begun, program = [], accelerator.compile_stretch

    def counting(*args, **options):
        launch = program(*args, **options)
        return lambda start, words: begun.append(int(words[-1, 0, 1])) or launch(start, words)

    monkeypatch.setattr(accelerator, "compile_stretch", counting)
    return begun


@pytest.mark.slow
@pytest.mark.exact
@pytest.mark.parametrize("name", PLANS)
def test_stretches_make_the_same_run(name, counted):
    """A guess that the horizon stays is either right or thrown away; nothing of it is booked."""
    (slow, one), (quick, other) = played(PLANS[name], None), played(PLANS[name], 5)
    assert len(one) == len(other) > 1
    for (entry, model), (again, same) in zip(one, other, strict=True):
        assert entry == again
        assert jax.tree.all(jax.tree.map(np.array_equal, model, same))
    assert_same(slow, quick)
    assert max(counted) > 1


def test_some_guesses_are_wrong(counted):
    """Else the test above would say nothing of guesses thrown away."""
    _, told = played(PLANS["discounted"], 5)
    assert len(told) < sum(counted) < 3 * len(told)
    counted.clear()
    _, told = played(PLANS["fixed"], 5)
    assert sum(counted) == len(told)  # a fixed number of rounds is never guessed wrong
    assert max(counted) == 5


@pytest.mark.slow
def test_a_batch_in_stretches_is_the_batch_round_by_round(counted):
    """Of 1 to 13 rounds, one without a budget for its last: seats shrink, all on the way."""
    changes = [
        {"rounds.rounds": 13},
        {"rounds.rounds": 13, "privacy.epsilon": 1.0},
        {"rounds.rounds": 1},
        {"rounds.schedule": "decaying", "rounds.rounds": 9, "rounds.slope": 0.1},
        {"rounds.rounds": 7},
    ]
    held = load_holdings(PLANS["fixed"], seed=3)
    both = []
    for most in (None, 4):
        plans = [PLANS["fixed"].replace(**change) for change in changes]
        batch = [start_run(build(own, seed=3, held=held), i) for i, own in enumerate(plans)]
        assert accelerator.may_go_ahead(batch)
        for _ in rounds_of(batch, None, most):
            pass
        both.append(batch)
    for one, other in zip(*both, strict=True):
        assert_same(one, other)
    assert len({run.state.progress.done for run in both[0]}) == 4
    assert sum(counted) == 13


def test_a_tank_that_runs_dry_is_no_surprise(counted):
    """Nobody can pay the last rounds: known when they are priced, so that none is begun."""
    plan = PLANS["fixed"].replace(**{"rounds.rounds": 12})
    ends = []
    for most in (None, 5):
        run = start_run(build(plan, seed=3), 3)
        state, *made = run.at
        nearly = np.full_like(state.tank.spent, FULL - 4)
        run.at = (replace(state, tank=replace(state.tank, spent=nearly)), *made)
        for _ in rounds_of([run], None, most):
            pass
        ends.append(run)
    assert_same(*ends)
    assert ends[0].state.exhausted
    assert sum(counted) == ends[0].state.progress.done + 1


@pytest.mark.slow
def test_the_same_program_serves_every_length_and_run():
    plan = PLANS["fixed"].replace("data.samples=41")  # a shape that no other test has
    before, compiled = len(accelerator._VERSIONS), []
    played(plan.replace("rounds.rounds=3"), 4)
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, seconds, **_: compiled.append(event) if "backend" in event else None
    )
    played(plan.replace("rounds.rounds=11"), 4)
    assert len(accelerator._VERSIONS) == before + 1
    assert not compiled
    jax.jit(lambda x: x + 41)(np.ones(43))
    assert compiled  # there is something to hear


@pytest.mark.slow
def test_settings_of_the_caller_count_in_the_other_thread():
    """JAX's settings belong to a thread: a program compiled in the other one would miss them."""
    plan = PLANS["fixed"].replace("data.samples=43")
    before = len(accelerator._VERSIONS)
    with jax.default_matmul_precision("float32"):
        played(plan, 4)
    assert len(accelerator._VERSIONS) == before + 1
    played(plan, 4)
    assert len(accelerator._VERSIONS) == before + 2


def threads():
    return [own for own in threading.enumerate() if own.name.startswith("stretches")]


@pytest.mark.parametrize("error", [KeyboardInterrupt, ZeroDivisionError])
def test_what_stops_a_run_leaves_no_thread_and_a_whole_run(error):
    """Raised after round 6: the books say six rounds, and so does the model."""
    run, whole = start_run(build(PLANS["fixed"], seed=3), 3), played(PLANS["fixed"], None)[1]

    def after(run):
        if run.state.progress.done == 6:
            raise error

    with pytest.raises(error):
        list(rounds_of([run], after, 4))
    assert not threads()
    assert len(run.state.rounds) == 6
    entry, model = whole[5]
    assert run.state.rounds[-1] == entry
    assert jax.tree.all(jax.tree.map(np.array_equal, model, run.final_model))


def test_what_fails_in_the_other_thread_is_raised_in_this_one(monkeypatch):
    program = accelerator.compile_stretch

    def failing(*args, **options):
        launch, left = program(*args, **options), [3]

        def sometimes(*stretch):
            left[0] -= 1
            if not left[0]:
                raise MemoryError("full")
            return launch(*stretch)

        return sometimes

    monkeypatch.setattr(accelerator, "compile_stretch", failing)
    run = start_run(build(PLANS["fixed"], seed=3), 3)
    with pytest.raises(MemoryError, match="full"):
        list(rounds_of([run], None, 4))
    assert not threads()
    assert 0 < len(run.state.rounds) < 13


def test_a_loop_that_is_left_ends_its_thread():
    rounds = rounds_of([start_run(build(PLANS["fixed"], seed=3), 3)], None, 4)
    next(rounds)
    assert threads()
    rounds.close()
    assert not threads()


def test_stretches_are_as_short_as_memory_and_time_ask(counted, monkeypatch):
    run = start_run(build(PLANS["fixed"], seed=3), 3)
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(run.params))
    monkeypatch.setattr(accelerator, "STACK_BYTES", 3 * size)
    played(PLANS["fixed"], 5)
    assert max(counted) == 3
    counted.clear()
    monkeypatch.setattr(accelerator, "SECONDS", 1e-9)
    played(PLANS["fixed"], 5)
    assert counted == [1] * 13


def test_a_batch_has_fewer_rounds_in_a_stretch_than_one_run():
    batch = [start_run(build(PLANS["fixed"], seed=3), 3) for _ in range(2)]
    engines = [accelerator.AheadEngine(run.federation.model, runs, None, accelerator.AHEAD)
               for run, runs in ((batch[0], batch[:1]), (batch[0], batch))]  # fmt: skip
    assert [engine.most for engine in engines] == [accelerator.AHEAD, accelerator.FEWER]
    assert accelerator.FEWER < accelerator.AHEAD


@pytest.mark.slow
@pytest.mark.exact
def test_batches_in_stretches_side_by_side_are_those_round_by_round(monkeypatch, counted):
    """Four batches, two at once, each with a thread: the same records and models."""
    plans = [PLANS["fixed"].replace(f"rounds.rounds={rounds}") for rounds in (13, 6, 9)]
    monkeypatch.setattr(simulate, "TOGETHER", 2)
    plain = simulate.simulate_many(plans, seeds=[1, 2], together=True)
    assert not counted
    monkeypatch.setattr(compiled, "play_compiled", accelerator.play_ahead)
    quick = simulate.simulate_many(plans, seeds=[1, 2], together=True)
    assert sum(counted) == 2 * (13 + 6)
    assert not threads()
    for one, other in zip(plain, quick, strict=True):
        for part in ("rounds", "result", "clients", "initial"):
            assert one.record[part] == other.record[part]
        assert jax.tree.all(jax.tree.map(np.array_equal, one.params, other.params))


def test_runs_that_share_a_first_model_share_it():
    """A sweep draws and scores it once; the runs are those that start alone."""
    plans = [PLANS["averaged"].replace(f"privacy.epsilon={e}") for e in (1, 8)]
    held, known = load_holdings(plans[0], seed=3), {}
    federations = [build(own, seed=3, held=held) for own in plans]
    together = [start_run(own, 3, known) for own in federations]
    assert len(known) == 1
    for one, own in zip(together, federations, strict=True):
        assert_same(one, start_run(own, 3))
    start_run(federations[0], 4, known)
    first, second = (own.params for own in known.values())  # another seed draws another model
    assert not any(np.array_equal(first[name], second[name]) for name in first)


def test_who_goes_ahead():
    """One run; a batch that no loss surprises; nobody whose best round is kept."""

    def may(*changes):
        plans = [PLANS["fixed"].replace(**change) for change in changes]
        return accelerator.may_go_ahead([start_run(build(own, seed=3), 3) for own in plans])

    losses = {"rounds.schedule": "discounted"}
    assert may({})
    assert may(losses)
    assert may({}, {"rounds.schedule": "decaying"})
    assert not may({}, losses)
    assert not may({"server.choose": "best"})


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
    from sottovoce.models import clipping

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


@pytest.mark.slow
@pytest.mark.parametrize("n", [1, 5, 10, 11])  # pieces of five rows
def test_facts_found_in_pieces_are_those_of_all_rows(n, monkeypatch):
    from sottovoce.models import clipping as chunks
    from sottovoce.simulation import compiled

    monkeypatch.setattr(chunks, "CPU_BYTES", 5 * 2 * 3 * 4)
    x = np.random.default_rng(n).standard_normal((n, 3)).astype(np.float32)
    x[n // 2, 1] = np.nan
    model = Mlp(3, hidden=4, classes=3)
    is_clean, squared = compiled._inspect_by_pieces(model, jax.numpy.asarray(x))
    wanted = inspect(model, jax.numpy.asarray(x))
    np.testing.assert_array_equal(is_clean, wanted.is_clean)
    np.testing.assert_allclose(squared, wanted.squared, rtol=1e-6)


def test_the_rows_of_one_split_are_not_copied_to_be_stacked():
    from sottovoce.simulation.compiled import _stack_arrays

    x = jax.numpy.ones((50, 7))
    assert _stack_arrays([x]).shape == (1, 50, 7)
    assert _stack_arrays([x]).unsafe_buffer_pointer() == x.unsafe_buffer_pointer()
