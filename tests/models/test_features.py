"""Fixed features: a function of one sample, the same bits in every engine, and free of charge."""

from __future__ import annotations

import math
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest

from sottovoce import Plan, load, simulate, simulate_many
from sottovoce.client import device, release
from sottovoce.data import federated
from sottovoce.data.federated import Holdings, Samples, add_features
from sottovoce.errors import InputError, Malformed, PlanError
from sottovoce.models import features
from sottovoce.models.base import Form
from sottovoce.models.features import BINS, COLOUR, FLAT, NORM, Hog
from sottovoce.server.coordinator import Patience, conduct
from support.devices import ask, kind, make_node, told
from support.hostile_requests import head
from support.in_process import Direct

SHAPES = [((8, 8, 1), 4), ((8, 8, 1), 2), ((28, 28, 1), 4), ((28, 28, 1), 7), ((5, 7, 3), 3)]
HOG = {"features": "hog", "cell": 4}


def drawn(shape, n=9, seed=0):
    return np.random.default_rng(seed).random((n, math.prod(shape))).astype(np.float32)


def slowly(picture, cell):
    """The same formula for one picture, in float64 and loops."""
    high, wide, colours = picture.shape
    down, across = -(-high // cell), -(-wide // cell)
    cells = np.zeros((down, across, BINS))

    def pixel(i, j, c):
        return float(picture[i, j, c]) if 0 <= i < high and 0 <= j < wide else 0.0

    for i in range(high):
        for j in range(wide):
            for c in range(colours):
                gx = pixel(i, j + 1, c) - pixel(i, j - 1, c)
                gy = pixel(i + 1, j, c) - pixel(i - 1, j, c)
                for b in range(BINS):
                    close = math.cos(math.atan2(gy, gx) - 2 * math.pi * b / BINS)
                    strength = math.hypot(gx, gy) * max(0.0, close) ** 8
                    for p in range(down):
                        for q in range(across):
                            tent = 1.0
                            for at, which in ((i, p), (j, q)):
                                k = at + cell // 2 - which * cell
                                tent *= max(0.0, 1 - abs(k + 0.5 - cell) / cell)
                            cells[p, q, b] += tent * strength
    scaled = np.zeros_like(cells)
    for p in range(down):
        for q in range(across):
            near = cells[max(0, p - 1) : p + 2, max(0, q - 1) : q + 2]
            scaled[p, q] = cells[p, q] / math.sqrt(FLAT**2 + np.sum(near**2))
    scaled -= scaled.mean()
    return NORM * (scaled / np.linalg.norm(scaled)).reshape(-1)


@pytest.mark.slow
@pytest.mark.parametrize(("shape", "cell"), SHAPES)
def test_equals_the_formula(shape, cell):
    hog, x = Hog(shape, cell), drawn(shape, 2)
    found = hog.apply(x)
    assert found.shape == (2, hog.width)
    assert found.dtype == np.float32
    for row, features_of_it in zip(x, found, strict=True):
        np.testing.assert_allclose(features_of_it, slowly(row.reshape(shape), cell), atol=2e-5)


def test_colours_are_the_means_of_the_cells():
    """Beside the gradients, 0.7 as long; with cells that tile the picture against plain means."""
    shape, cell = (8, 12, 3), 4
    hog, plain, x = Hog(shape, cell, colours=True), Hog(shape, cell), drawn(shape, 3)
    found, edges = hog.apply(x), plain.apply(x)
    assert (found.shape, plain.width) == ((3, 2 * 3 * (8 + 3)), 2 * 3 * 8)
    np.testing.assert_allclose(np.linalg.norm(found, axis=1), NORM, rtol=1e-5)
    part = 1 / math.sqrt(1 + COLOUR**2)
    np.testing.assert_allclose(found[:, : plain.width], edges * part, atol=1e-5)
    tent = np.array([1 - abs(k + 0.5 - cell) / cell for k in range(2 * cell)])
    padded = np.pad(x.reshape(3, *shape), ((0, 0), (2, 2), (2, 2), (0, 0)))
    tones = np.stack([
        np.einsum("nijc,i,j->nc", padded[:, 4 * p : 4 * p + 8, 4 * q : 4 * q + 8], tent, tent)
        for p in range(2) for q in range(3)
    ], axis=1).reshape(3, -1)  # fmt: skip
    tones -= tones.mean(axis=1, keepdims=True)
    tones *= NORM * COLOUR * part / np.linalg.norm(tones, axis=1, keepdims=True)
    np.testing.assert_allclose(found[:, plain.width :], tones, atol=1e-5)
    with pytest.raises(InputError, match="they have one colour"):
        features.build("hog", (8, 8, 1), 4, colours=True)


@pytest.mark.parametrize("upright", [False, True])
@pytest.mark.parametrize(("shape", "cell"), SHAPES)
def test_another_row_changes_nothing(shape, cell, upright, monkeypatch):
    hog, x = Hog(shape, cell, upright, colours=shape[2] > 1), drawn(shape, 23)
    alone = np.concatenate([hog.apply(row[None]) for row in x])
    for numbers in (5 * math.prod(shape), 1 << 21):
        monkeypatch.setattr(features, "CHUNK_NUMBERS", numbers)
        for n in (1, 2, 5, 16, 23):
            assert hog.apply(x[:n]).tobytes() == alone[:n].tobytes()
    for bad in (np.nan, np.inf, -np.inf, 1e38, 1e-44):
        spoilt = x.copy()
        spoilt[4, 3], spoilt[11] = bad, bad
        again = hog.apply(spoilt)
        kept = np.delete(np.arange(23), [4, 11])
        assert again[kept].tobytes() == alone[kept].tobytes()
        if not np.isfinite(bad):
            assert not np.isfinite(again[[4, 11]]).all(axis=1).any()


def test_every_picture_has_the_same_length_and_contrast_does_not_count():
    hog, x = Hog((28, 28, 1), 4), drawn((28, 28, 1))
    found = hog.apply(x)
    np.testing.assert_allclose(np.linalg.norm(found, axis=1), NORM, rtol=1e-5)
    assert np.abs(hog.apply(4 * x) - found).max() < 0.02 * NORM
    assert np.all(hog.apply(np.zeros((3, 784))) == 0)


def test_an_upright_picture_no_longer_leans():
    y, x = np.mgrid[:28, :28].astype(float)
    for lean in (-0.6, 0.0, 0.4):
        stroke = np.exp(-0.5 * ((x - 13.5 - lean * (y - 13.5)) / 1.5) ** 2) * (abs(y - 13.5) < 9)
        found = features._shear_upright(stroke[None, :, :, None].astype(np.float32))[0, :, :, 0]
        ink = found / found.sum()
        down, across = y - np.sum(ink * y), x - np.sum(ink * x)
        assert abs(np.sum(ink * down * across) / np.sum(ink * down**2)) < 0.02
        straight = np.exp(-0.5 * ((x - 13.5) / 1.5) ** 2) * (abs(y - 13.5) < 9)
        assert np.abs(found - straight).max() < 0.15
    with np.errstate(all="ignore"):  # as `apply` does
        assert np.all(features._shear_upright(np.zeros((2, 5, 5, 1), np.float32)) == 0)


def as_read(shape, n, seed):
    """Stripes across or down, which a linear model of pixels cannot tell apart at random phases."""
    rng = np.random.default_rng(seed)
    y = rng.integers(0, 2, n)
    across, phase = np.arange(shape[1]) / 2, rng.random((n, 1, 1)) * 7
    stripes = np.sin(across[None, None, :] + phase) * np.ones((n, shape[0], 1))
    pictures = np.where(y[:, None, None] == 1, stripes, stripes.transpose(0, 2, 1))
    return pictures.reshape(n, -1).astype(np.float32), y.astype(np.int32)


def stripes(folder, clients=3):
    """A server's public pictures, and nodes with pictures of their own."""
    shape = (8, 8, 1)
    valid, test = (Samples(*as_read(shape, 60, seed)) for seed in (1, 2))
    none = Samples(valid.x[:0], valid.y[:0])
    public = Holdings(np.zeros(0, np.int64), none, valid, test, None, shape, 2)
    nodes = {
        f"route-{i}": make_node(
            folder, as_read(shape, 40, 10 + i), classes=2, name=f"n{i}", epsilon=50.0, clip=9.0
        )
        for i in range(clients)
    }
    return public, nodes


def softmax(**changes):
    own = {"model": {"name": "softmax", **HOG}, "privacy": {"epsilon": 50.0}}
    rounds = {"schedule": "fixed", "rounds": 4}
    local = {"learning_rate": 0.5, "clip": 4.0}
    return Plan(**{**own, "rounds": rounds, "local": local, **changes})


@pytest.mark.slow
def test_a_federation_of_devices_learns_from_features(tmp_path):
    public, nodes = stripes(tmp_path / "nodes")
    transport = Direct(nodes)
    patience = Patience(clients=3, gathering=1.0, deadline=1.0, minimum=3)
    run = conduct(softmax(), public, transport, patience, out=tmp_path / "run")
    assert run.accuracy > 0.9
    assert run.record["model"]["shape"] == [8, 8, 1]
    assert run.record["model"]["parameters"] == 2 * (32 + 1)
    again = load(tmp_path / "run")
    assert np.mean(again.predict(public.test.x) == public.test.y) == pytest.approx(run.accuracy)
    plain = conduct(
        softmax(model={"name": "softmax"}), public, Direct(stripes(tmp_path / "others")[1]),
        patience, out=tmp_path / "plain",
    )  # fmt: skip
    assert run.record["guarantee"] == plain.record["guarantee"]


@pytest.mark.parametrize("stored", [np.float32, np.float64])
def test_a_device_sees_what_simulation_sees(tmp_path, monkeypatch, stored):
    x, y = as_read((8, 8, 1), 40, 3)
    node = make_node(tmp_path, (x.astype(stored), y), classes=2)
    held = federated.load_holdings(
        softmax(), seed=1,
        data=federated.Given([(x.reshape(-1, 8, 8, 1), y)], *[(x.reshape(-1, 8, 8, 1), y)] * 2),
    )  # fmt: skip
    lens, given = Hog((8, 8, 1), 4), []
    monkeypatch.setattr(
        release, "release", lambda form, params, x, *_, **__: given.append(x) or 1 / 0
    )
    form = Form("softmax", (8, 8, 1), 2, lens=lens)
    params = {name: np.zeros(shape, np.float32) for name, shape in form.shapes().items()}
    device.answer_request(ask(form=form, params=params).to_blob(), node)
    assert given[0].tobytes() == held.client(0).x.tobytes() == held.test.x.tobytes()
    assert held.features == lens
    assert held.fingerprint() == add_features(softmax(), held).fingerprint()  # not applied twice


def test_a_request_says_which_features(tmp_path):
    form = Form("softmax", (2, 2, 1), 3, lens=Hog((2, 2, 1), 2))
    assert Form.from_json(form.to_json()) == form
    assert form.shapes() == {"b": (3,), "w": (8, 3)}
    node = make_node(tmp_path)  # rows of four numbers
    params = {name: np.zeros(shape, np.float32) for name, shape in form.shapes().items()}
    asked = ask(form=form, params=params)
    assert kind(device.answer_request(asked.to_blob(), node)) == "upload"
    other = replace(asked, form=replace(form, lens=Hog((2, 2, 1), 1)))
    assert kind(device.answer_request(other.to_blob(), node)) == "malformed"  # other arrays
    wider = ask(form=Form("softmax", (4, 4, 1), 3, lens=Hog((4, 4, 1), 2)), t=1)
    assert told(device.answer_request(wider.to_blob(), node))["code"] == "policy"


@pytest.mark.parametrize(
    "changes",
    [
        {"cell": 0},
        {"cell": 3},
        {"cell": True},
        {"cell": "2"},
        {"cell": 10**400},
        {"upright": 1},
        {"colours": 0},
        {"colours": True},
        {"features": "sift"},
        {"features": None},
        {"features": ["hog"]},
        {"shape": [4]},
        {"shape": [2, 2]},
        {"shape": [1, 2, 2, 1]},
        {"shape": [2**15, 2**15, 1], "cell": 1},
        {"name": "cnn", "channels": 2},
    ],
)
def test_features_that_are_none_are_malformed(changes):
    good = {"name": "softmax", "shape": [2, 2, 1], "classes": 3, "features": "hog", "cell": 2}
    good |= {"upright": False, "colours": False}
    assert Form.from_json(good).lens == Hog((2, 2, 1), 2)
    with pytest.raises(Malformed):
        Form.from_json({**good, **changes})
    for missing in ("features", "cell", "upright", "colours"):
        with pytest.raises(Malformed):
            Form.from_json({key: value for key, value in good.items() if key != missing})
    assert head("model", {**good, **changes})


@pytest.mark.parametrize(
    ("plan", "says"),
    [
        ({"data": {"name": "adult"}, "model": {"name": "softmax", **HOG}}, "adult is a table"),
        ({"model": {"name": "cnn", **HOG}}, "model.features must be absent for the cnn"),
        ({"model": {"name": "mlp", "cell": 4}}, "model.cell has no effect without model.features"),
        ({"model": {"features": "sift"}}, "model.features must be hog"),
        ({"model": {"colours": True}}, "model.colours has no effect without model.features"),
        ({"model": {**HOG, "colours": True}}, "these pictures are grey"),
        ({"model": {"features": "hog", "cell": 0}}, "model.cell must be"),
    ],
)
def test_plans_that_have_no_use_for_features_are_refused(plan, says):
    with pytest.raises(PlanError, match=says):
        Plan(**plan)


def test_rows_that_are_no_pictures_are_refused():
    x, y = np.zeros((40, 6)), np.arange(40) % 2
    plan = softmax(data={"name": "arrays", "clients": 2, "validation": 8, "test": 8})
    with pytest.raises(InputError, match="gradient histograms are of pictures"):
        simulate(plan, data=(x, y), seed=1)
    with pytest.raises(InputError, match=r"model\.cell must be a whole number from 1 to 3"):
        simulate(plan, data=(np.zeros((40, 3, 5)), y), seed=1)


@pytest.mark.slow
def test_simulated_digits_learn_more_from_features(tmp_path):
    changes = {"rounds": {"schedule": "fixed", "rounds": 20}, "privacy": {"epsilon": 8.0}}
    small = softmax(model={"name": "softmax", "features": "hog", "cell": 2}, **changes)
    plain = softmax(model={"name": "softmax"}, **changes)
    run = simulate(small, seed=1, out=tmp_path / "run")
    held = federated.load_holdings(plain, seed=1)
    again = load(tmp_path / "run")
    assert np.mean(again.predict(held.test.x) == held.test.y) == pytest.approx(run.accuracy)
    one, other = simulate_many([small, plain], seeds=[1])  # same data, other rows to the model
    assert one.accuracy == pytest.approx(run.accuracy, abs=0.02)
    assert other.record["model"]["parameters"] == 650
    assert one.record["guarantee"]["not_covered"] == other.record["guarantee"]["not_covered"]


def test_features_do_not_load_jax():
    code = "import sys, sottovoce.client.device; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("more", [{}, {"data.public": 400, "data.validation": 100}])
def test_features_made_once_for_all_are_those_of_the_dealt_rows(more):
    plan = Plan(model={"name": "softmax", **HOG}).replace(**more)
    for seed in (1, 2):
        one, two = (
            federated.load_holdings(plan, seed=seed),
            add_features(plan, federated.deal_rows(plan, seed=seed)),
        )
        assert one.fingerprint() == two.fingerprint()
        assert one.features == two.features
        for part in ("train", "validation", "test"):
            a, b = getattr(one, part), getattr(two, part)
            assert (a.x.tobytes(), a.y.tobytes()) == (b.x.tobytes(), b.y.tobytes())


@pytest.mark.parametrize("row", [0.0, 2.0, np.inf, np.nan])
def test_scaling_a_row_warns_of_none(row):
    """A warning would tell of a client's row; pytest makes it an error."""
    found = features.centre_and_scale(np.full((2, 3), row, np.float32), 4.0)
    assert np.isnan(found).all() != np.isfinite(row)
