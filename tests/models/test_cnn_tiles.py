"""The cnn by tiles against the convolution of JAX, for maps that tiles of every kind divide."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sottovoce.models import clipping, cnn, kernels
from sottovoce.models.base import Form
from sottovoce.models.clipping import clipped_sum, evaluate, inspect
from sottovoce.models.cnn import Cnn

# Height and width of the map are four more than the picture's.
TILES = {
    (2, 4): Cnn((8, 4, 3), channels=8, classes=3),
    (4, 2): Cnn((4, 6, 1), channels=8, classes=3),
    (4, 4): Cnn((8, 4, 2), channels=1, classes=2),
    (3, 3): Cnn((5, 2, 2), channels=2, classes=3),
    (1, 1): Cnn((3, 7, 1), channels=2, classes=3),  # 7 × 11 places
    (2, 2): Cnn((4, 4, 2), channels=16, classes=3),
    (1, 2): Cnn((1, 2, 2), channels=30, classes=3),
}
WIDE = Cnn((4, 4, 1), channels=65, classes=3)
MODELS = [*TILES.values(), WIDE]
LARGE = Cnn((28, 28, 2), channels=3, classes=3)  # a CPU filters its lines


def draw(model, rows=6):
    random = np.random.default_rng(0)
    params = jax.tree.map(
        lambda p: jnp.asarray(random.normal(0, 0.3, p.shape), jnp.float32),
        jax.eval_shape(model.init, jax.random.key(0)),
    )
    x = jnp.asarray(random.normal(size=(rows, math.prod(model.shape))), jnp.float32)
    return params, x, jnp.asarray(random.integers(0, model.classes, rows))


def length(tree):
    return math.sqrt(sum(float(jnp.sum(jnp.square(leaf))) for leaf in jax.tree.leaves(tree)))


def test_tiles_divide_the_map_and_are_no_larger_than_they_may():
    assert {cnn.choose_tile(model): model for model in TILES.values()} == TILES
    assert cnn.choose_tile(WIDE) == (1, 1)
    for side in range(1, 40):
        model = Cnn((side, 40 - side, 1), channels=8, classes=2)
        (a, b), (_, height, width) = cnn.choose_tile(model), model.map_shape
        assert (height % a, width % b) == (0, 0)
        assert 8 * a * b <= cnn.MOST_NUMBERS


@pytest.mark.parametrize("model", MODELS, ids=str)
def test_the_order_of_the_tiles_is_undone(model):
    params, _, _ = draw(model)
    found = cnn.arrange_tiles(model, params)
    np.testing.assert_array_equal(cnn.restore_map_order(model, found.back).T, params["w"])
    np.testing.assert_array_equal(np.moveaxis(found.back, 0, 2), found.w)


@pytest.mark.slow
@pytest.mark.parametrize("model", [*MODELS, LARGE], ids=str)
def test_scores_and_gradients_are_those_of_the_convolution(model):
    params, x, y = draw(model)
    assert isinstance(model.prepare(params), cnn.Filtered) == (model is LARGE)
    found = jax.jit(lambda p: cnn.compute_scores(model, model.prepare(p), x))(params)

    @jax.jit  # else XLA compiles every operation by itself
    def convolve(p):
        gradient = jax.grad(lambda q: jnp.sum(model.loss(q, x, y)))(p)
        shares = jnp.mean(model.loss(p, x, y)), jnp.mean(model.predict(p, x) == y)
        return model.apply(p, x), gradient, *shares

    scores, wanted, mean_loss, share = convolve(params)
    np.testing.assert_allclose(found, scores, rtol=1e-4, atol=1e-4)
    total = clipped_sum(model, params, x, y, jnp.ones(len(y)), math.inf)
    for name, leaf in wanted.items():
        np.testing.assert_allclose(total[name], leaf, rtol=1e-3, atol=1e-4 * length(wanted))
    loss, accuracy = evaluate(model, params, x, y)
    assert float(loss) == pytest.approx(float(mean_loss), rel=1e-5)
    assert float(accuracy) == pytest.approx(float(share))


@pytest.mark.slow
def test_filtered_lines_keep_the_promises_of_the_clip():
    """Near the float64 sum by tiles, each row within C, and what must not count adds nothing."""
    params, x, y = draw(LARGE, rows=9)
    params["w"] *= 0.01  # so that every row has a long gradient
    x = x.at[4, 5].set(np.nan).at[5].set(1e38).at[6, 7].set(3e38)
    is_good = jnp.ones(9).at[4:7].set(0)
    norms = clipping.gradient_norms(LARGE, params, x, y)
    assert all(float(norm) > 0.7 for norm, good in zip(norms, is_good, strict=True) if good)
    total = clipped_sum(LARGE, params, x, y, jnp.ones(9), 0.7)
    without = clipped_sum(LARGE, params, x, y, is_good, 0.7)
    jax.tree.map(np.testing.assert_array_equal, total, without)
    each = jax.vmap(clipped_sum, in_axes=(None, None, None, None, 0, None))(
        LARGE, params, x, y, jnp.eye(9), 0.7
    )
    squares = [np.square(leaf).reshape(9, -1).sum(axis=1) for leaf in jax.tree.leaves(each)]
    lengths = np.sqrt(sum(squares))
    np.testing.assert_allclose(lengths, 0.7 * is_good, rtol=1e-5)
    with jax.enable_x64(True):  # by tiles
        wide = [jax.tree.map(lambda leaf: jnp.asarray(leaf, "float64"), v) for v in (params, x)]
        exact = clipped_sum(LARGE, *wide, y, is_good.astype("float64"), 0.7)
        exact = jax.tree.map(lambda leaf: np.asarray(leaf, np.float32), exact)
    for name, leaf in exact.items():
        np.testing.assert_allclose(total[name], leaf, atol=1e-4 * length(exact))


@pytest.mark.slow
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("model", [TILES[2, 4], LARGE], ids=str)
def test_a_test_row_that_is_not_finite_is_told(bad, model):
    params, x, y = draw(model)
    loss, _ = evaluate(model, params, x.at[2, 5].set(bad), y)
    assert not math.isfinite(float(loss))


@pytest.mark.slow
@pytest.mark.parametrize("with_kernels", [False, True])
def test_products_of_bfloat16_keep_the_promises_of_the_clip(monkeypatch, with_kernels):
    """As an accelerator computes: near the float32 sum, each row within C, bad rows nothing."""
    model = TILES[2, 4]
    params, x, y = draw(model, rows=9)
    is_good = jnp.ones(9).at[4:6].set(0)
    exact = clipped_sum(model, params, x, y, is_good, 0.7)
    x = x.at[4, 5].set(np.finfo(np.float32).max)  # finite, and infinite in bfloat16
    x = x.at[5].set(1e38)  # finite there, too, and its maps are not
    monkeypatch.setattr(clipping, "product_type", lambda model, dtype: jnp.bfloat16)
    if with_kernels:
        use_kernels(monkeypatch)
    clipping._clipped_sum.clear_cache()
    seen = inspect(model, x)
    assert seen.x.dtype == jnp.bfloat16
    assert seen.is_clean.tolist() == [True] * 4 + [False] + [True] * 4
    total = clipped_sum(model, params, seen, y, jnp.ones(9), 0.7)
    assert length(jax.tree.map(jnp.subtract, total, exact)) <= 0.02 * length(exact)
    each = jax.vmap(clipped_sum, in_axes=(None, None, None, None, 0, None))(
        model, params, seen, y, jnp.eye(9), 1e-3
    )
    squares = [np.square(leaf).reshape(9, -1).sum(axis=1) for leaf in jax.tree.leaves(each)]
    lengths = np.sqrt(sum(squares))
    np.testing.assert_array_equal(lengths > 0, is_good > 0)
    assert np.all(lengths <= 1e-3 * (1 + 1e-5))  # though errors are rounded after they were cut


# Kernels of a GPU, interpreted on a CPU


def make_kernels(model, interpret=True):
    sizes = cnn.choose_tile(model), model.map_shape[1:], model.channels
    return kernels.CnnKernels(model.shape, cnn.KERNEL, cnn.PADDING, *sizes, interpret)


def use_kernels(monkeypatch):
    monkeypatch.setattr(cnn, "load_kernels", make_kernels)


@pytest.mark.slow
@pytest.mark.parametrize("model", [TILES[2, 4], TILES[3, 3], TILES[1, 1], TILES[4, 2]], ids=str)
def test_kernels_compute_the_steps_of_the_plain_sum(model, monkeypatch):
    monkeypatch.setattr(kernels, "PROGRAMS", 2)  # of which each has several rows
    monkeypatch.setattr(kernels, "SLOTS", 16)
    params, x, y = draw(model)
    tiled, fast = cnn.arrange_tiles(model, params), make_kernels(model)
    wanted = cnn.find_factors(model, tiled, inspect(model, x), y)
    slots = fast.cut(x)
    hidden = fast.convolve(slots, tiled.band, tiled.bias, finite=True)
    near = {"rtol": 1e-4, "atol": 1e-4}
    np.testing.assert_allclose(hidden, wanted.hidden, **near)
    error1, squared = fast.send_back(wanted.hidden, wanted.error, tiled.back)
    sent = jnp.tensordot(wanted.error, tiled.back, 1)
    np.testing.assert_allclose(error1, jnp.where(wanted.hidden > 0, sent, 0), **near)
    np.testing.assert_allclose(squared, wanted.squared_hidden, **near)
    by_kernel, by_bias = fast.kernel_gradients(slots, error1)
    np.testing.assert_allclose(by_kernel, wanted.kernel, **near)
    np.testing.assert_allclose(by_bias, wanted.bias, **near)


@pytest.mark.slow
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_kernels_evaluate_as_the_plain_steps_do(bad, monkeypatch):
    model = TILES[2, 4]
    params, x, y = draw(model)
    wanted = evaluate(model, params, x, y)
    use_kernels(monkeypatch)
    clipping._evaluate.clear_cache()
    np.testing.assert_allclose(evaluate(model, params, x, y), wanted, rtol=1e-5)
    assert not math.isfinite(float(evaluate(model, params, x.at[2, 5].set(bad), y)[0]))
    clipping._evaluate.clear_cache()


@pytest.mark.parametrize("model", [TILES[2, 4], TILES[3, 3], WIDE], ids=str)
def test_kernels_translate_to_the_language_of_a_gpu(model):
    """Which needs no GPU: sizes are powers of two, and nothing is used that Triton lacks."""
    params, x, y = draw(model)
    fast = make_kernels(model, interpret=False)

    def compute(params, x, error):
        tiled, slots = cnn.arrange_tiles(model, params), fast.cut(x.astype(jnp.bfloat16))
        hidden = fast.convolve(slots, tiled.band, tiled.bias, finite=True)
        return fast.kernel_gradients(slots, fast.send_back(hidden, error, tiled.back)[0])

    error = jnp.zeros((len(y), model.classes))
    text = jax.jit(compute).trace(params, x, error).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("xla.gpu.triton") == 4


def test_kernels_write_no_windows(monkeypatch):
    """No array has more than 1.12 times the numbers of the hidden layer; windows have 2.25."""
    model, n = Cnn((32, 32, 3), channels=8, classes=10), 5000
    use_kernels(monkeypatch)
    params = jax.eval_shape(model.init, jax.random.key(0))
    x, y = jax.ShapeDtypeStruct((n, 3072), jnp.bfloat16), jax.ShapeDtypeStruct((n,), jnp.int32)

    def compute(params, x, y, weight):
        rows = clipping.Inspected(x, weight > 0, weight)
        return model.sum_chunk(model.prepare(params), jnp.float32(1), rows, y, weight)

    traced = jax.make_jaxpr(compute)(params, x, y, jax.ShapeDtypeStruct((n,), jnp.float32))
    sizes = [variable.aval.size for step in traced.eqns for variable in step.outvars]
    assert [step.primitive.name for step in traced.eqns].count("pallas_call") == 4
    assert max(sizes) <= 1.12 * n * math.prod(model.map_shape)


def test_where_kernels_do_not_compile_the_plain_steps_remain(monkeypatch):
    assert cnn.load_kernels(MODELS[0]) is None
    cnn.load_kernels.cache_clear()
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")  # one that Triton does not know
    assert cnn.load_kernels(MODELS[0]) is None
    cnn.load_kernels.cache_clear()


@pytest.mark.slow
def test_a_row_whose_maps_overflow_has_no_gradient_in_a_release():
    """Dense weights of 0 would hide it from the scores."""
    form = Form("cnn", (4, 4, 1), 3, {"channels": 2})
    params = {name: np.zeros(shape) for name, shape in form.shapes().items()}
    params["kernel"][:] = 1e200
    x = np.stack([np.full(16, 1e-200), np.full(16, 1e200), np.full(16, 2e-200)])
    found = form.model().gradients(params, x, np.zeros(3, int))
    is_number = [all(np.all(np.isfinite(leaf[row])) for leaf in found.values()) for row in range(3)]
    assert is_number == [True, False, True]
