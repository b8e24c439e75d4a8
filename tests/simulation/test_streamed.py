"""Rows that do not fit in memory: a streamed run is the run, whatever the size of its blocks."""

from __future__ import annotations

import json

import jax
import numpy as np
import pytest

from sottovoce.data.federated import Given
from sottovoce.data.streaming import Stored, is_streamed
from sottovoce.errors import InputError
from sottovoce.models.custom import custom
from sottovoce.plan import Plan
from sottovoce.server import rounds
from sottovoce.server.federation import build
from sottovoce.simulation import streamed
from sottovoce.simulation.simulate import resume, simulate, simulate_many

ROWS, FEATURES, CLIENTS = 700, 20, 6


class Shelf:
    """A source with shape, dtype and slices and nothing else; it notes what is read."""

    def __init__(self, rows):
        self.rows, self.shape, self.dtype, self.read = rows, rows.shape, rows.dtype, []

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, where):
        assert isinstance(where, slice)
        self.read.append((where.start, where.stop))
        return self.rows[where]


@pytest.fixture
def rows():
    random = np.random.default_rng(3)
    x = random.standard_normal((ROWS, FEATURES)).astype(np.float32)
    return x, (x[:, 0] + 0.3 * random.standard_normal(ROWS) > 0).astype(np.int64)


@pytest.fixture
def mapped(rows, tmp_path):
    x, y = rows
    np.save(tmp_path / "x.npy", x)
    np.save(tmp_path / "y.npy", y.astype(np.uint8))
    return tuple(np.load(tmp_path / f"{name}.npy", mmap_mode="r") for name in "xy")


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(streamed, "BLOCK_BYTES", 4 * FEATURES * 64)  # 64 rows


def plan_of(name="mlp", split="iid", **others):
    """Six clients of unlike sizes where the split lets them be so."""
    model = {"name": name, "hidden": 8} if name == "mlp" else {"name": name}
    samples = {"samples": [120, 40, 90, 61, 100, 89]} if split in ("order", "sizes") else {}
    return Plan(
        data={"name": "arrays", "clients": CLIENTS, "split": split, "validation": 70, "test": 60}
        | samples,
        model=model,
        local={"clip": 0.5},
        rounds={"schedule": "fixed", "rounds": 3},
    ).replace(**others)


def apart(a, b):
    """The largest difference between two models, and the size of what they learned."""
    leaves = zip(jax.tree.leaves(a.params), jax.tree.leaves(b.params), strict=True)
    return max(float(np.abs(np.asarray(p) - np.asarray(q)).max()) for p, q in leaves)


TOLD = {
    "rounds.schedule": "discounted",
    "server.signal": "clients",
    "server.loss_bound": 4.0,
    "rounds.per_round": 4,
}
FINISHED = {"server.momentum": 0.5, "server.average": "exponential", "server.choose": "best"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "others"),
    [
        ("svm", {"rounds.per_round": 3}),
        ("softmax", {"split": "labels", "data.labels_per_client": 1} | FINISHED),
        ("mlp", {"split": "order", "rounds.per_round": 2}),
        ("softmax", TOLD),
        ("softmax", TOLD | {"model.class_weights": [1.0, 0.1]}),
    ],
)
def test_a_streamed_run_is_the_run_in_memory(rows, mapped, name, others):
    plan = plan_of(name, **others)
    near, compiled = simulate(plan, data=rows, seed=2), streamed.add_block._cache_size()
    far = simulate(plan, data=mapped, seed=2)
    assert streamed.add_block._cache_size() <= compiled + 1  # whatever the blocks and cohorts
    assert apart(near, far) < 3e-6  # the order of summation in float32
    told, same = far.record, near.record
    for mine, theirs in zip(told["rounds"], same["rounds"], strict=True):
        assert mine["cohort"] == theirs["cohort"]
        assert mine["sigma"] == theirs["sigma"]
        assert mine["validation_loss"] == pytest.approx(theirs["validation_loss"], rel=1e-5)
        if "signal" in theirs:
            assert mine["signal"] == pytest.approx(theirs["signal"], rel=1e-5)
    assert told["guarantee"] == same["guarantee"]
    assert told["result"]["test_accuracy"] == pytest.approx(same["result"]["test_accuracy"])


def whole_plan(plan, rows):
    return build(plan, seed=1, data=Given(rows))


@pytest.mark.slow
def test_rows_outside_the_cohort_are_not_even_read(rows):
    plan = plan_of("softmax", "order", **{"rounds.per_round": 2, "rounds.rounds": 1})
    shelf, labels = Shelf(rows[0]), rows[1]
    public = tuple(part[500:] for part in rows)
    run = simulate(plan, data=(shelf, labels), validation=public, test=public, seed=4)
    sizes = np.array(plan.data.samples)
    end = np.cumsum(sizes)
    theirs = {
        m for i in run.record["rounds"][0]["cohort"] for m in range(end[i] - sizes[i], end[i])
    }
    assert {m for a, b in shelf.read for m in range(a, b)} == theirs
    assert sum(b - a for a, b in shelf.read) == len(theirs)  # each once


@pytest.mark.parametrize("seed", range(20))
def test_every_row_of_the_cohort_once_with_its_client_s_weight(seed):
    random = np.random.default_rng(seed)
    samples = random.integers(1, 12, random.integers(1, 30))
    weight = np.where(random.random(len(samples)) < 0.5, random.random(len(samples)), 0.0)
    weight[random.integers(len(samples))] = 0.5
    owner = np.repeat(np.arange(len(samples)), samples)
    seen, every = [], np.arange(len(owner))
    for where, own in streamed.plan_blocks(samples, weight, int(random.integers(1, 40))):
        mine = every[where]
        assert np.array_equal(own, weight[owner[mine]].astype(np.float32))
        seen.append(mine)
    assert np.array_equal(np.concatenate(seen), every[weight[owner] > 0])


def test_a_stored_view_gives_what_an_array_would(rows, mapped, tmp_path):
    x, random = rows[0], np.random.default_rng(0)
    ids = random.permutation(ROWS)[:300]
    for source in (mapped[0], Shelf(x)):
        assert is_streamed(source)
        view = Stored.of(source, np.float32)
        assert np.array_equal(view[5:50], x[5:50])
        assert np.array_equal(view[np.array([7, 8, 3])], x[[7, 8, 3]])
        dealt = view.take_rows(ids)
        assert dealt.shape == (300, FEATURES)
        assert np.array_equal(dealt[10:200], x[ids][10:200])
        assert np.array_equal(dealt.take_rows(np.array([3, 1]))[0:2], x[ids][[3, 1]])
        assert np.array_equal(view.slice_rows(10, 40)[5:8], x[15:18])
        assert np.array_equal(np.concatenate(list(dealt.pieces())), x[ids])
    labels = Stored.of(mapped[1], np.int32)
    assert (labels.min(), labels.max()) == (0, 1)
    assert not is_streamed(x)


def test_the_fingerprint_is_that_of_the_rows_in_memory(rows, mapped):
    plan = plan_of()
    assert whole_plan(plan, rows).held.fingerprint() == whole_plan(plan, mapped).held.fingerprint()


@pytest.mark.slow
def test_a_stopped_run_goes_on_to_the_same_model(rows, mapped, tmp_path):
    plan = plan_of("softmax")

    def stop(done):
        if done.t == 1:
            raise KeyboardInterrupt

    whole = simulate(plan, data=mapped, seed=8)
    with pytest.raises(KeyboardInterrupt):
        simulate(plan, data=mapped, seed=8, on_round=stop, out=tmp_path / "run")
    record = json.loads((tmp_path / "run" / "record.json").read_text("utf-8"))
    assert record["status"] == "interrupted"
    assert len(record["rounds"]) == 2
    again = resume(tmp_path / "run", data=mapped)
    assert again.record["result"]["model_sha256"] == whole.record["result"]["model_sha256"]


@pytest.mark.slow
def test_ctrl_c_is_heard_within_a_round(rows, monkeypatch, tmp_path):
    plan = plan_of("softmax", "order")
    shelf, public = Shelf(rows[0]), tuple(part[500:] for part in rows)
    real, asked = streamed.add_block, []

    def add(*args, **named):
        asked.append(1)
        if len(asked) == 11:  # the second block of the second round of 500 rows
            rounds._ENTERED[0]._note(2, None)
        return real(*args, **named)

    monkeypatch.setattr(streamed, "add_block", add)
    with pytest.raises(KeyboardInterrupt):
        simulate(plan, data=(shelf, rows[1]), validation=public, test=public, out=tmp_path / "run")
    assert len(asked) == 11
    record = json.loads((tmp_path / "run" / "record.json").read_text("utf-8"))
    assert len(record["rounds"]) == 1
    assert not rounds._ENTERED


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"local.steps": 2}, "local.steps"),
        ({"server.signal": "raw", "rounds.schedule": "discounted"}, "server.signal"),
        ({"model.name": "softmax", "model.features": "hog"}, "model.features"),
    ],
)
def test_what_cannot_be_streamed_is_refused_before_a_row_is_read(rows, change, name):
    shelf = Shelf(rows[0].reshape(ROWS, 4, 5))
    with pytest.raises(InputError, match=rf"{name}.*where the rows are streamed"):
        simulate(plan_of(**change), data=(shelf, rows[1]), seed=1)
    assert not shelf.read
    # Nor in a sweep, whose first run deals the rows.
    plans = [plan_of(), plan_of(**change)]
    with pytest.raises(InputError, match=rf"{name}.*where the rows are streamed"):
        simulate_many(plans, data=(shelf, rows[1]), seeds=[1])


@pytest.mark.slow
def test_many_runs_and_own_models_stream_too(rows, mapped):
    line = custom(
        init=lambda key: jax.numpy.zeros(FEATURES),
        apply=lambda w, x: x @ w,
        loss=lambda scores, y: (scores - y) ** 2,
    )
    plan = plan_of("softmax")
    both = simulate_many([plan], seeds=[1, 2], data=mapped, model=line)
    for seed, run in zip((1, 2), both, strict=True):
        assert apart(run, simulate(plan, data=rows, model=line, seed=seed)) < 3e-6
