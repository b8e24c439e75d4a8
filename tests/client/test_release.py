"""The release path: nobody's record moves the sum by more than Δ, and the noise paid for is there.

Sums are compared in exact integers. `trust/test_release.py` draws twenty times as many neighbours.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sottovoce.client import release
from sottovoce.client.release import Price, Upload
from sottovoce.errors import InputError
from sottovoce.models import base
from sottovoce.models.base import Form
from sottovoce.models.custom import custom
from sottovoce.privacy import grid
from sottovoce.privacy.sensitivity import Recipe
from support.mutated_module import mutated
from support.neighbours import (
    EVERY,
    MODELS,
    WEIGHTS,
    classes_of,
    falsify,
    form_of,
    furthest,
    labels,
    own_of,
    reach,
    rows,
    units,
    weights,
    work,
)
from support.support_attack import attack_upload, flat, unit_of_uploads, upload_possible

PAIRS = {name: 60 if name == "torch" else 200 for name in EVERY}  # torch takes its time

pytestmark = pytest.mark.slow  # JAX compiles each model; left out of the editing loop


@pytest.mark.parametrize("name", EVERY)
def test_neighbours_are_never_further_apart_than_the_sensitivity(name):
    moved = falsify(name, PAIRS[name])
    assert len(moved) >= PAIRS[name]
    assert np.mean(np.array(moved) > 0.1) > 0.05  # and not because nothing ever moved


@pytest.mark.parametrize("unit", ["record", "client"])
@pytest.mark.parametrize("n", [1, 6])
@pytest.mark.parametrize("name", EVERY)
def test_a_worst_case_pair_reaches_the_sensitivity(name, n, unit):
    difference, change = furthest(name, n, unit)
    # Products of inputs have no negative diagonal: no two rows of least squares are opposites.
    least = 0.7 if name.startswith("least-squares") else 0.999
    assert least <= reach(difference, change) <= 1


@pytest.mark.parametrize("kind", ["normal", "trap", "huge"])
@pytest.mark.parametrize("name", MODELS)
def test_the_sum_knows_neither_order_nor_blocks(name, kind, monkeypatch):
    rng = np.random.default_rng(3)
    params, n = weights(name, kind, rng), 23
    x, y = rows("normal", n, rng), labels(name, n, rng)
    x[5], x[11, 2], x[17] = np.nan, np.inf, 1e300
    whole = units(name, params, x, y, 0.3)
    count = whole.size
    for numbers in (1, 2 * count, 7 * count, 10**6):
        monkeypatch.setattr(base, "BLOCK_NUMBERS", numbers)
        order = rng.permutation(n)
        assert units(name, params, x, y, 0.3).tolist() == whole.tolist()
        assert units(name, params, x[order], y[order], 0.3).tolist() == whole.tolist()


@pytest.mark.parametrize("name", MODELS)
def test_losses_know_neither_order_nor_neighbours(name):
    rng = np.random.default_rng(4)
    params, n = weights(name, "normal", rng), 9
    x, y = rows("normal", n, rng), labels(name, n, rng)
    form, own, order = form_of(name), own_of(name), rng.permutation(n)
    told = base.sample_losses(form, params, x, y, own)
    assert (
        base.sample_losses(form, params, x[order], y[order], own).tolist() == told[order].tolist()
    )
    spoilt = x.copy()
    spoilt[2], spoilt[5, 1] = np.nan, np.inf
    again = base.sample_losses(form, params, spoilt, y, own)
    assert np.delete(again, [2, 5]).tolist() == np.delete(told, [2, 5]).tolist()
    assert abs(grid.bounded_sum(told, 2.0) - grid.bounded_sum(again, 2.0)) <= 2 * grid.REPLACED


def oracle(name):
    """jax.grad of one row's loss in float64, flat in the order of the names."""
    model = form_of(name).model() if own_of(name) is None else own_of(name)
    gradient = jax.jit(jax.grad(lambda p, row, label: model.loss(p, row[None], label[None])[0]))

    def one(params, row, label):
        with jax.enable_x64(True):
            tree = {leaf: jnp.asarray(array) for leaf, array in params.items()}
            own = gradient(tree, jnp.asarray(row), jnp.asarray(label))
            return np.concatenate([np.asarray(own[leaf]).reshape(-1) for leaf in sorted(own)])

    return one


@pytest.mark.parametrize("name", MODELS)
def test_every_row_is_the_gradient_of_its_own_loss(name):
    """To 1e-12 of the gradient, or to the digits that the oracle's softmax − 1 leaves of it."""
    rng, slow, n = np.random.default_rng(5), oracle(name), 12
    for kind, scale in (("normal", 1.0), ("normal", 1e3), ("zero", 1.0)):
        params = weights(name, kind, rng)
        x, y = scale * rng.standard_normal((n, 6)), labels(name, n, rng)
        block = base.gradient_matrix(form_of(name), params, x, y, own_of(name))
        for i in range(n):
            wanted = slow(params, x[i], y[i])
            lost = 1e-14 * scale * max(1.0, *(np.abs(leaf).max() for leaf in params.values()))
            assert np.abs(block[i] - wanted).max() <= 1e-12 * np.abs(wanted).max() + lost


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 1e300])
@pytest.mark.parametrize("name", MODELS)
def test_a_bad_row_changes_no_bit_of_another(name, bad):
    rng = np.random.default_rng(6)
    n = 7
    x, y = rng.standard_normal((n, 6)), labels(name, n, rng)
    for kind in WEIGHTS:
        params = weights(name, kind, rng)
        clean = base.gradient_matrix(form_of(name), params, x, y, own_of(name))
        spoilt = x.copy()
        spoilt[3, :2] = bad
        found = base.gradient_matrix(form_of(name), params, spoilt, y, own_of(name))
        np.testing.assert_array_equal(np.delete(found, 3, axis=0), np.delete(clean, 3, axis=0))


RELU = custom(
    init=lambda key: {"a": jnp.zeros(16), "b": jnp.zeros(())},
    apply=lambda p, x: jax.nn.relu(x @ p["a"] + p["b"]),
    loss=lambda scores, y: 1e3 * scores,
)


class Touchy:
    """The same in numpy, one product for all rows; it fails on what is not finite."""

    def shapes(self):
        return {"a": (16,), "b": ()}

    def gradients(self, params, x, y):
        if not np.all(np.isfinite(x)):
            raise ValueError("not finite")
        on = 1e3 * (x @ params["a"] + params["b"] > 0)
        return {"a": on[:, None] * x, "b": on}

    def losses(self, params, x, y):
        return 1e3 * np.maximum(x @ params["a"] + params["b"], 0)


@pytest.mark.parametrize("own", [RELU, Touchy()], ids=["jax", "numpy"])
def test_no_rounding_switches_the_other_rows(own):
    """Equal rows and weights at which a hidden number is zero but for rounding; one row goes bad.

    Another order of adding would switch that ReLU for all rows at once: computed in one batch, the
    nine rows moved the sum by 4.5 Δ when one of them became NaN.
    """
    form, y, most = Form("own", (16,), 2), np.zeros(9, dtype=int), 0.0
    for seed in range(60):
        rng = np.random.default_rng(seed)
        row, column = rng.standard_normal(16), rng.standard_normal(16).astype(np.float32)
        row[-1] = 0.0
        params = {"a": column.astype(float), "b": np.array(float(-np.float32(row @ column)))}
        row[-1] = -(row @ params["a"] + params["b"]) / params["a"][-1]
        x = np.tile(row, (9, 1))
        spoilt = x.copy()
        spoilt[4] = np.nan
        one, two = (
            grid.clipped_sum(base.gradient_blocks(form, params, rows, y, own), 1.0, 17)
            for rows in (x, spoilt)
        )
        most = max(most, reach(one - two, grid.grid_sensitivity("record", 9)))
    assert 0.49 <= most <= 0.5  # one row's own part, which is half of Δ


# The noise.

WIDE = Form("mlp", (300,), 10, {"hidden": 320})  # 99,530 parameters


def noise_is_right(noise, std):
    """A z-test of the variance of n normals: |z| < 5, a false alarm in 1.7 million tries.

    z = (s²/σ² − 1)·√(n/2). With n = 100,000 a std that is 3 % off has z ≈ 13.6, so that the chance
    to miss it is below 1e-16.
    """
    return bool(abs((np.mean(noise**2) / std**2 - 1) * np.sqrt(noise.size / 2)) < 5)


def released(form, params, samples, recipe, paid, **more):
    """An upload from rows that are not numbers: their clipped sum is zero, whatever the model."""
    x, y = np.full((samples, form.features), np.nan), np.zeros(samples, dtype=int)
    head = {"kind": "upload"}
    return release.release(form, params, x, y, recipe=recipe, paid=paid, head=head, **more)


@pytest.mark.parametrize("steps", [1, 3])
def test_the_noise_that_was_paid_for_is_in_the_upload(steps):
    start = {name: np.zeros(shape) for name, shape in WIDE.shapes().items()}
    recipe = Recipe(learning_rate=0.7, clip=2.0, steps=steps)
    paid = Price(units=(1,) * steps, noise=tuple(2**33 + 2**32 * e for e in range(steps)))
    upload = released(WIDE, start, 5, recipe, paid)
    one = 0.7 / 5 * grid.grid_unit(2.0)
    assert upload.sigma == tuple(one * units for units in paid.noise)
    std = float(np.sqrt(sum(s**2 for s in upload.sigma)))
    noise = flat(upload.params)
    assert noise_is_right(noise, std)
    # The test can fail: 3 % more or less, and one step's noise alone.
    assert not noise_is_right(noise, 1.03 * std)
    assert not noise_is_right(noise, 0.97 * std)
    if steps > 1:
        assert not noise_is_right(noise, upload.sigma[-1])
    # Neither layers nor messages share their noise (each |mean| < 5 sd of a product of normals).
    half, again = noise.size // 2, flat(released(WIDE, start, 5, recipe, paid).params)
    for one, two in ((noise[:half], noise[half : 2 * half]), (noise, again)):
        assert abs(np.mean(one * two)) < 5 * std**2 / np.sqrt(one.size)


def test_the_noise_is_added_to_the_step_and_not_instead_of_it():
    """Two releases of the same rows: their mean is the noiseless step (5 sd of the mean)."""
    rng = np.random.default_rng(8)
    start = {k: 0.1 * rng.standard_normal(s) for k, s in WIDE.shapes().items()}
    x, y = rng.standard_normal((4, 300)), rng.integers(0, 10, 4)
    recipe, paid = Recipe(1.0, 1.0), Price(units=(1,), noise=(2**22,))
    step = flat(release.step(WIDE, start, x, y, recipe)) - flat(start)
    head = {"kind": "upload"}
    upload = release.release(WIDE, start, x, y, recipe=recipe, paid=paid, head=head)
    moved = flat(upload.params) - flat({k: v.astype(np.float32) for k, v in start.items()})
    along = step / np.linalg.norm(step)
    assert moved @ along == pytest.approx(np.linalg.norm(step), rel=0.01)
    assert np.linalg.norm(step) > 0.5


def test_the_loss_that_is_told_has_its_noise():
    """3,000 losses: |z| < 5 rejects a std 15 % off (z ≈ 12.5); rows that are no numbers count B."""
    form = Form("svm", (2,), 2, {"kappa": 0.0})
    start, told = {"b": np.zeros(()), "w": np.zeros(2)}, []
    paid = Price(units=(1,), noise=(2**33,), loss_noise=3 * 2**32)
    for _ in range(3000):
        upload = released(form, start, 4, Recipe(1.0, 1.0), paid, loss_bound=2.5)
        told.append(upload.loss)
    std = 2.5 * (3 * 2**32 / grid.REPLACED) / 4
    noise = np.array(told) - 2.5
    assert noise_is_right(noise, std)
    assert not noise_is_right(noise, 1.15 * std)
    assert not noise_is_right(noise, 0.85 * std)
    assert abs(noise.mean()) < 5 * std / np.sqrt(len(noise))


# The support: which uploads can come from which data at all.

ROUNDED = (  # w − step in float32 before the noise: a point that only some data sets lead to
    "now = _apply_sum(now, _sum_clipped(form, now, x, y, recipe, own) + drawn, recipe, samples)",
    "now = _apply_sum(now, _sum_clipped(form, now, x, y, recipe, own), recipe, samples)\n"
    "        now = {k: leaf.astype(np.float32).astype(np.float64) for k, leaf in now.items()}\n"
    "        now = _apply_sum(now, drawn, recipe, samples)",
)


@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("name", EVERY)
def test_every_uploaded_value_lies_on_a_grid_that_no_data_set_moves(name, steps):
    """No value of an upload rules out a data set: each is float32(w − one·k) for a whole k.

    Where n/(η·C) is a whole number, float32 itself lies on the grid and the attack would be blind.
    """
    rng, rounded, found = (
        np.random.default_rng(9),
        mutated("sottovoce.client.release", *ROUNDED),
        [],
    )
    for n, recipe in ((5, Recipe(0.7, 1.3, steps=steps)), (7, Recipe(0.3, 2.5, steps=steps))):
        params = weights(name, "normal", rng)
        x, y = rows("normal", n, rng), labels(name, n, rng)
        around = (form_of(name), params, x, y, recipe, own_of(name))
        assert attack_upload(release, *around).all()
        found.append(attack_upload(rounded, *around))
    assert np.mean(np.concatenate(found)) < 0.7  # it can fail; one such value is a proof


def test_uploads_with_real_noise_rule_out_no_data_set():
    """99,530 values at μ = ¼, 20 uploads: each possible from any data.

    Rounded before the noise, more than half of them would each prove that the data were not others.
    """
    rng = np.random.default_rng(10)
    start = {k: rng.standard_normal(s) for k, s in WIDE.shapes().items()}
    x, y = rng.standard_normal((5, 300)), rng.integers(0, 10, 5)
    recipe, paid = Recipe(0.7, 1.3), Price(units=(1,), noise=(4 * grid.REPLACED,))
    rounded, proved = mutated("sottovoce.client.release", *ROUNDED), 0
    for which in (release, rounded):
        proved = 0
        for _ in range(20):
            upload = which.release(
                WIDE, start, x, y, recipe=recipe, paid=paid, head={"kind": "upload"}
            )
            possible = upload_possible(
                flat(upload.params), flat(start), unit_of_uploads(recipe, len(y))
            )
            proved += not possible.all()
        assert proved == 0 if which is release else proved > 10


def test_the_loss_that_is_told_lies_on_a_grid_that_no_data_set_moves():
    """B·k/(2³¹·n) for a whole k, whatever the losses were."""
    rng = np.random.default_rng(11)
    form, paid = form_of("mlp"), Price(units=(1,), noise=(2**33,), loss_noise=2**33)
    for n, bound in ((5, 2.0), (7, 0.3)):
        x, y = rows("normal", n, rng), rng.integers(0, classes_of("mlp"), n)
        upload = release.release(form, weights("mlp", "normal", rng), x, y, recipe=Recipe(1.0, 1.0),
                                paid=paid, head={"kind": "upload"}, loss_bound=bound)  # fmt: skip
        k = round(upload.loss * n / bound * grid.REPLACED)
        assert upload.loss == bound * (k / grid.REPLACED) / n


def test_only_a_release_makes_an_upload():
    with pytest.raises(TypeError, match="made by client"):
        Upload(object(), b"raw", {}, (1.0,), None)
    with pytest.raises(TypeError):
        Upload(b"raw", {}, (1.0,), None)  # type: ignore[call-arg]


@pytest.mark.parametrize("key", ["loss", "norm", "sigma", "loss_sigma", "gradient", "accuracy", ""])
def test_what_is_not_public_by_name_does_not_leave(key):
    form, paid = Form("svm", (2,), 2), Price(units=(1,), noise=(2**31,))
    start = {"b": np.zeros(()), "w": np.zeros(2)}
    with pytest.raises(InputError, match="head must be public numbers only"):
        release.release(form, start, [[1.0, 2.0]], [1], recipe=Recipe(1.0, 1.0), paid=paid,
                       head={"kind": "upload", key: 1.0})  # fmt: skip


@pytest.mark.parametrize(
    ("paid", "steps", "bound"),
    [
        (Price((1,), (2**31,)), 2, None),  # a step nobody paid for
        (Price((1, 1), (2**31, 2**31)), 1, None),
        (Price((1,), (2**31,)), 1, 1.0),  # a loss nobody paid for
        (Price((1,), (2**31,), 2**31), 1, None),
    ],
)
def test_what_was_not_paid_for_is_not_released(paid, steps, bound):
    form, start = Form("svm", (2,), 2), {"b": np.zeros(()), "w": np.zeros(2)}
    with pytest.raises(InputError, match="paid must be a price of this recipe"):
        release.release(form, start, [[1.0, 2.0]], [1], recipe=Recipe(1.0, 1.0, steps=steps),
                       paid=paid, head={"kind": "upload"}, loss_bound=bound)  # fmt: skip


@pytest.mark.parametrize("kind", WEIGHTS)
@pytest.mark.parametrize("name", ["svm", "softmax", "mlp"])
def test_the_work_of_a_release_does_not_depend_on_a_record(name, kind):
    """Line by line and array by array the same, whatever a record is and the server has sent."""
    rng = np.random.default_rng(5)
    params, n = weights(name, kind, rng), 70  # two groups of rows
    x, y = rows("normal", n, rng), labels(name, n, rng)
    recipe = Recipe(learning_rate=1e-15, clip=1e3, steps=2)
    paid = Price(units=(1, 1), noise=(2**31, 2**31), loss_noise=2**31)

    def spent(record):
        data = x.copy()
        data[3] = record
        return work(lambda: release.release(form_of(name), params, data, y, recipe=recipe,
                                           paid=paid, head={}, loss_bound=1.0))  # fmt: skip

    usual = spent(x[3])
    for record in (1e9 * x[3], 1e300 * x[3], 5e-324, 1e-160 * x[3], np.nan, np.inf, 0.0):
        assert spent(record) == usual
