"""With K < U only the cohort's rows are looked at, and the result is that of looking at all."""

from __future__ import annotations

import jax
import numpy as np
import polars as pl
import pytest

from sottovoce.data.federated import Given
from sottovoce.plan import Plan
from sottovoce.server.federation import build
from sottovoce.simulation import compiled
from sottovoce.simulation.simulate import simulate, simulate_many

RANDOM = np.random.default_rng(7)
SIZES = (300, 20, 256, 299, 40, 270, 300)  # the first and the last are the longest


def pair(rows):
    return RANDOM.random((rows, 6), dtype=np.float32), RANDOM.integers(0, 3, rows)


CLIENTS = [pair(rows) for rows in SIZES]
PUBLIC = {"validation": pair(60), "test": pair(60)}
PLAN = Plan(
    data={"name": "arrays", "clients": 7},
    model={"name": "softmax"},
    rounds={"schedule": "fixed", "rounds": 6, "per_round": 3},
)


def flat(trained):
    return np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(trained.params)])


@pytest.fixture
def asked(monkeypatch):
    """Who was named in each round, or None where all rows were looked at."""
    seen, real = [], compiled.choose_members
    monkeypatch.setattr(
        compiled, "choose_members", lambda *own: seen.append(real(*own)) or seen[-1]
    )
    return seen


@pytest.mark.slow
@pytest.mark.parametrize("steps", [1, 2])
def test_the_cohort_alone_gives_what_all_rows_give(steps, asked, monkeypatch):
    plan = PLAN.replace(f"local.steps={steps}")
    one = simulate(plan, data=CLIENTS, **PUBLIC, seed=3)
    assert len(asked) == 6
    assert all(own.shape == (1, 3) and len(set(own[0].tolist())) == 3 for own in asked)
    monkeypatch.setattr(compiled, "choose_members", lambda *own: None)
    other = simulate(plan, data=CLIENTS, **PUBLIC, seed=3)
    np.testing.assert_allclose(flat(one), flat(other), rtol=1e-5, atol=1e-6)
    wanted = [entry["cohort"] for entry in other.record["rounds"]]
    assert [own[0].tolist() for own in asked] == wanted


def deal_table(path, **data):
    """A plan for a table of six unequal sites, whose clients' sizes depend on the seed."""
    rng = np.random.default_rng(1)
    columns = {"a": rng.random(240), "b": rng.random(240), "y": rng.integers(0, 3, 240)}
    site, person = np.repeat(np.arange(6), [10, 20, 30, 50, 60, 70]), rng.integers(0, 60, 240)
    pl.DataFrame({**columns, "site": site, "person": person}).write_csv(path / "rows.csv")
    labels = {"a": [0, 1], "b": [0, 1], "y": ["0", "1", "2"]}
    table = {"path": str(path / "rows.csv"), "label": "y", "columns": labels}
    return Plan(
        data={**table, "validation": 15, "test": 15, **data},
        model={"name": "softmax"},
        rounds={"schedule": "fixed", "rounds": 2},
    )


SITES, DEALT = {"client": "site"}, {"clients": 6}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("data", "changes"),
    [
        pytest.param(SITES, ("rounds.per_round=3",), id="some-of-the-sites"),
        pytest.param(SITES, ("local.steps=3",), id="steps"),
        pytest.param(SITES, ("local.steps=2", "rounds.per_round=2"), id="steps-of-some"),
        pytest.param(SITES | {"validation": 0.1, "test": 0.2}, ("local.steps=2",), id="shares"),
        pytest.param(SITES | {"person": "person"}, ("local.steps=2",), id="rows-of-persons"),
        pytest.param(SITES | {"person": "person"}, ("local.unit=person",), id="persons"),
        pytest.param(
            DEALT | {"person": "person", "test": 0.2}, ("rounds.per_round=4",), id="dealt-persons"
        ),
        pytest.param(
            DEALT | {"split": "dirichlet", "alpha": 0.5},
            ("local.steps=2", "server.signal=raw"),
            id="dirichlet",
            marks=pytest.mark.trust,
        ),
    ],
)
def test_runs_together_train_on_all_rows_of_every_seed(tmp_path, data, changes):
    """The sizes of the clients, and of validation and test, may differ from seed to seed."""
    plan = deal_table(tmp_path, **data).replace("local.learning_rate=1.0", *changes)
    largest = {seed: max(build(plan, seed=seed).samples) for seed in range(1, 6)}
    seeds = sorted(largest, key=largest.__getitem__)[::2]  # the first has the smallest of them
    together = simulate_many([plan], seeds=seeds, together=True)
    for seed, run in zip(seeds, together, strict=True):
        alone = simulate(plan, seed=seed)
        np.testing.assert_allclose(flat(run), flat(alone), rtol=1e-5, atol=1e-6)
        assert run.record["clients"] == alone.record["clients"]


def test_rows_of_a_client_are_found_beyond_those_that_float32_counts():
    size = 2**24 + 1
    y = np.zeros(size + 3, np.int8)
    y[size : size + 2] = 1
    federation = build(PLAN, seed=1, data=Given(CLIENTS, **PUBLIC))
    kind = compiled.stack_splits([federation], federation.model)[0].samples.dtype
    samples = jax.numpy.asarray([size, 2, 1], kind)
    rows = compiled.StackedRows(y[:, None], y, None, samples, None, None)
    _, labels, mine = compiled._slice_client(rows, jax.numpy.asarray(1), 3)
    assert labels[mine].tolist() == [1, 1]


def test_everyone_who_counts_is_named_once_and_the_rest_weighs_nothing():
    for _ in range(200):
        clients, size = int(RANDOM.integers(2, 12)), int(RANDOM.integers(1, 12))
        size = min(size, clients)
        weight = np.zeros((3, clients))
        for row in weight:
            row[RANDOM.permutation(clients)[: RANDOM.integers(0, size + 1)]] = 0.125
        for row, named in zip(weight, compiled.fill_cohort(weight, size), strict=True):
            assert len(set(named.tolist())) == size
            assert row[named].sum() == row.sum()


@pytest.mark.slow
def test_all_rows_are_looked_at_where_that_is_cheaper(asked):
    """Everyone takes part, clients are small, or one is so large that little would be saved."""
    few = [pair(30) for _ in range(7)]
    simulate(PLAN, data=few, **PUBLIC, seed=1)
    simulate(PLAN.replace("rounds.per_round=7"), data=CLIENTS, **PUBLIC, seed=1)
    uneven = [pair(900), *(pair(40) for _ in range(6))]
    simulate(PLAN, data=uneven, **PUBLIC, seed=1)
    assert asked == [None] * 18


@pytest.mark.slow
def test_runs_of_a_batch_with_several_steps_go_through_their_own_cohorts(asked, monkeypatch):
    plans = [PLAN.replace("local.steps=2"), PLAN.replace("local.steps=2", "rounds.per_round=2")]
    given = {"data": CLIENTS, **PUBLIC}
    runs = simulate_many(plans, seeds=[1], **given, together=True)
    assert {own.shape for own in asked} == {(2, 3)}
    alone = [simulate(plan, seed=1, **given) for plan in plans]
    for one, other in zip(runs, alone, strict=True):
        np.testing.assert_allclose(flat(one), flat(other), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("together", [False, True])
def test_an_accelerator_copies_the_rows_of_each_cohort_and_computes_the_same(
    together, asked, monkeypatch
):
    plans = [PLAN.replace("rounds.per_round=2"), PLAN.replace("rounds.per_round=1")]
    given = {"data": [pair(40) for _ in range(7)], **PUBLIC, "seeds": [1], "together": together}
    usual = simulate_many(plans, **given)
    monkeypatch.setattr(compiled, "_has_accelerator", lambda: True)
    jax.clear_caches()
    asked.clear()
    copied = simulate_many(plans, **given)
    jax.clear_caches()
    assert asked
    assert all(own is not None for own in asked)
    for one, other in zip(copied, usual, strict=True):
        np.testing.assert_allclose(flat(one), flat(other), rtol=1e-5, atol=1e-6)


def test_an_accelerator_copies_no_more_than_it_should(monkeypatch):
    """Neither where the cohorts have most of the rows, nor where their copies would be large."""
    monkeypatch.setattr(compiled, "_has_accelerator", lambda: True)
    given = Given([pair(40) for _ in range(7)], **PUBLIC)
    weight = np.ones((1, 7))
    for size, copies in ((3, True), (5, True), (6, False), (7, False)):
        one = build(PLAN.replace(f"rounds.per_round={size}"), seed=1, data=given)
        assert (compiled.choose_members([one], weight) is not None) == copies
    most = build(PLAN.replace("rounds.per_round=5"), seed=1, data=given)
    assert compiled.choose_members([most] * 2, np.ones((2, 7))) is None
    few = build(PLAN, seed=1, data=given)
    monkeypatch.setattr(compiled, "COPIED_BYTES", 2 * 3 * 40 * 4 * 6)
    assert compiled.choose_members([few] * 2, np.ones((2, 7))) is not None
    assert compiled.choose_members([few] * 3, np.ones((3, 7))) is None
