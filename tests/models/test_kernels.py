"""What an accelerator computes in another way than a CPU, computed here both ways."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sottovoce.models import clipping, cnn, kernels, mlp
from sottovoce.models.base import Inspected
from sottovoce.models.cnn import Cnn
from sottovoce.models.mlp import Mlp

pytestmark = pytest.mark.slow  # seconds of CPU in all; left out of the editing loop

RANDOM = np.random.default_rng(5)


@pytest.mark.parametrize("shape", [(32, 32, 3), (28, 28, 1), (9, 6, 2)])
def test_windows_are_the_same_numbers_however_they_are_copied(shape):
    model = Cnn(shape, channels=8, classes=10)
    seen = jnp.asarray(RANDOM.random((3, math.prod(shape))), jnp.float32)
    np.testing.assert_array_equal(cnn._copy_windows(model, seen), cnn._gather_windows(model, seen))


@pytest.mark.parametrize("shape", [(8, 8, 3), (9, 6, 2)])
def test_the_cnn_computes_the_same_however_its_products_are_typed(shape):
    """With rows of float32 the program of an accelerator differs from a CPU's in rounding only."""
    model = Cnn(shape, channels=8, classes=10)
    params, x = model.init(jax.random.key(0)), jnp.asarray(RANDOM.random((12, math.prod(shape))))
    y, weight = jnp.asarray(RANDOM.integers(0, 10, 12)), jnp.asarray(RANDOM.random(12))
    rows, prepared = clipping.inspect(model, x), model.prepare(params)

    def compute():
        total = model.sum_chunk(prepared, jnp.float32(0.5), rows, y, weight)
        return [*jax.tree.leaves(total), *model.judge(prepared, x, y)]

    usual = compute()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax, "default_backend", lambda: "gpu")
        patch.setattr(clipping, "product_type", lambda model, dtype: dtype)
        found = compute()
    for one, other in zip(found, usual, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


def products(x, error):
    """The sum over the rows as it is, and as an accelerator takes it."""
    there = jnp.asarray(x), jnp.asarray(error)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax, "default_backend", lambda: "gpu")
        return mlp.multiply(there[0].T, there[1]), mlp.compile_row_sum()(*there)


@pytest.mark.parametrize("rows", [8 * 1024, 8 * 1024 + 1, 40])
def test_a_sum_in_parts_is_the_sum(rows):
    x, error = (RANDOM.normal(size=(rows, n)).astype(np.float32) for n in (5, 3))
    plain, summed = products(x, error)
    np.testing.assert_allclose(summed, plain, rtol=1e-4, atol=1e-3)
    np.testing.assert_allclose(summed, x.astype(np.float64).T @ error, rtol=1e-4, atol=1e-3)


def test_runs_side_by_side_share_the_rows():
    """Errors of four runs, the rows once: as each by itself."""
    x = jnp.asarray(RANDOM.normal(size=(64, 5)), jnp.float32)
    errors = jnp.asarray(RANDOM.normal(size=(4, 64, 3)), jnp.float32)
    together = jax.vmap(mlp.compile_row_sum(), in_axes=(None, 0))(x, errors)
    for one, error in zip(together, errors, strict=True):
        np.testing.assert_allclose(one, x.T @ error, rtol=1e-5, atol=1e-5)


# The mlp's kernel, interpreted on a CPU


def draw_rows(model, n=150, runs=3):
    """Models of several runs on the same rows, of which two have garbage and one weighs nothing."""
    params = jax.vmap(model.init)(jax.random.split(jax.random.key(0), runs))
    x = RANDOM.normal(size=(n, model.features)).astype(np.float32)
    x[3, 1], x[7] = np.nan, 1e30
    y = jnp.asarray(RANDOM.integers(0, model.classes, n), jnp.int32)
    weight = jnp.asarray(RANDOM.random((runs, n)), jnp.float32).at[:, 5].set(0)
    return params, clipping.inspect(model, jnp.asarray(x)), y, weight


def sum_with_kernel(model):
    return mlp.compile_sum(model, kernels.MlpKernel(interpret=True))


@pytest.mark.slow
@pytest.mark.parametrize("model", [Mlp(12, 48, 3), Mlp(5, 20, 18)], ids=str)
def test_the_kernel_of_the_mlp_sums_as_the_plain_steps_do(model, monkeypatch):
    """Up to the rounding of bfloat16: runs side by side, one alone, each on rows of its own."""
    monkeypatch.setattr(kernels, "CLIPPED_PROGRAMS", 6)  # of which each has several steps
    params, rows, y, weight = draw_rows(model)
    clips = jnp.array([0.3, 2.0, np.inf], jnp.float32)
    fast, shared = sum_with_kernel(model), (0, 0, None, None, 0)
    wanted = jax.vmap(model.sum_plainly, in_axes=shared)(params, clips, rows, y, weight)
    found = jax.vmap(fast, in_axes=shared)(params, clips, rows, y, weight)
    alone = fast(*jax.tree.map(lambda leaf: leaf[1], (params, clips)), rows, y, weight[1])
    own = jax.tree.map(lambda leaf: jnp.stack([leaf] * 3), (rows, y))
    apart = jax.vmap(fast)(params, clips, *own, weight)
    for name, total in wanted.items():
        for k in range(3):
            near = {"rtol": 0, "atol": 0.01 * float(jnp.linalg.norm(total[k]))}
            np.testing.assert_allclose(found[name][k], total[k], **near)
        np.testing.assert_allclose(alone[name], found[name][1], rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(apart[name], total, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_no_row_adds_more_than_the_clip_in_the_kernel_of_the_mlp():
    """Though its errors are rounded after they were cut; bad rows add nothing."""
    model, n, clip = Mlp(6, 32, 4), 20, 1e-2
    params, rows, y, _ = draw_rows(model, n, runs=1)
    params = jax.tree.map(lambda leaf: jnp.concatenate([leaf] * n), params)
    each = jax.vmap(sum_with_kernel(model), in_axes=(0, 0, None, None, 0))(
        params, jnp.full(n, clip * (1 - 2.0**-8)), rows, y, jnp.eye(n)
    )
    squares = [np.square(leaf).reshape(n, -1).sum(axis=1) for leaf in jax.tree.leaves(each)]
    lengths = np.sqrt(sum(squares))
    np.testing.assert_array_equal(lengths > 0, ~np.isin(np.arange(n), [3, 7]))
    assert np.all(lengths <= clip * (1 + 1e-5))
    assert lengths.max() > 0.99 * clip


@pytest.mark.slow
def test_the_kernel_of_the_mlp_adds_no_row_whose_norm_it_lost():
    """Errors of 1e-20 times a row of 1e19, of which float32 has no squares; and models of NaN."""
    model = Mlp(2, 16, 2)
    w2 = jnp.stack([jnp.ones(16), jnp.full(16, 0.9)], axis=1)
    params = {"w1": jnp.zeros((2, 16)), "b1": jnp.ones(16), "w2": w2, "b2": jnp.array([0.0, -43.4])}
    rows = Inspected(jnp.array([[1e19, 0.0]], jnp.bfloat16), jnp.ones(1, bool), jnp.array([1e38]))
    given = jnp.float32(1e-3), rows, jnp.zeros(1, jnp.int32), jnp.ones(1)
    found = sum_with_kernel(model)(params, *given)
    assert math.sqrt(sum(float(jnp.sum(leaf**2)) for leaf in jax.tree.leaves(found))) <= 1e-3
    for name in params:
        spoiled = sum_with_kernel(model)(params | {name: params[name] * jnp.nan}, *given)
        assert not any(np.any(leaf) for leaf in jax.tree.leaves(spoiled))


def test_no_more_numbers_than_a_kernel_can_address_go_through_it(monkeypatch):
    """An index has 32 bits; with 495 units, one feature and 1.4 million rows 32 runs had more."""
    model, runs, n, of = Mlp(3, 4, 2), 3, 5, jax.ShapeDtypeStruct
    params = {name: of((runs, *shape), "float32") for name, shape in model.shapes().items()}
    rows = Inspected(of((n, 3), "bfloat16"), of((n,), "bool"), of((n,), "float32"))
    given = params, of((runs,), "float32"), rows, of((n,), "int32"), of((runs, n), "float32")
    for most, used in ((runs * n * 4 + 1, 1), (runs * n * 4, 0)):
        monkeypatch.setattr(mlp, "MOST_NUMBERS", most)
        compute = jax.vmap(
            mlp.compile_sum.__wrapped__(model, kernels.MlpKernel()), (0, 0, None, None, 0)
        )
        assert str(jax.make_jaxpr(compute)(*given)).count("pallas_call[") == used


@pytest.mark.parametrize("runs", [1, 20])
def test_the_mlp_of_a_gpu_reads_its_hidden_layer_once(runs):
    """Two products and one kernel for all runs, translated here; nothing is as large in float32."""
    model, n = Mlp(784, 256, 10), 8192
    kernel = mlp.compile_sum(model, kernels.MlpKernel())

    def of(*shape, dtype=jnp.float32):
        return jax.ShapeDtypeStruct(shape, dtype)

    params = {name: of(runs, *shape) for name, shape in model.shapes().items()}
    rows = Inspected(of(n, 784, dtype=jnp.bfloat16), of(n, dtype=bool), of(n))
    compute = jax.vmap(kernel, in_axes=(0, 0, None, None, 0))
    given = params, of(runs), rows, of(n, dtype=jnp.int32), of(runs, n)
    text = jax.jit(compute).trace(*given).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("xla.gpu.triton") == 1
    assert text.count("stablehlo.dot_general") == 2
    assert f"{n}x{runs}x256xbf16" in text
    assert f"{n}x{runs}x256xf32" not in text


@pytest.mark.parametrize(
    ("rows", "kind", "used"), [(4096, "bfloat16", 1), (4095, "bfloat16", 0), (4096, "float32", 0)]
)
def test_many_rows_of_bfloat16_go_through_the_kernel(rows, kind, used, monkeypatch):
    model, of = Mlp(12, 48, 3), jax.ShapeDtypeStruct
    monkeypatch.setattr(mlp, "load_kernel", lambda model: kernels.MlpKernel())
    params = {name: of(shape, "float32") for name, shape in model.shapes().items()}
    one = of((rows,), "float32")
    seen = Inspected(of((rows, 12), kind), of((rows,), "bool"), one)
    given = params, of((), "float32"), seen, of((rows,), "int32"), one
    traced = str(jax.make_jaxpr(model.sum_chunk)(*given))
    assert traced.count("pallas_call[") == used


def test_without_a_gpu_the_plain_steps_of_the_mlp_remain(monkeypatch):
    assert mlp.load_kernel(Mlp(12, 48, 3)) is None
    mlp.load_kernel.cache_clear()
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")  # one that Triton does not know
    for model in (Mlp(12, 48, 3), Mlp(12, 2048, 3), Mlp(12, 48, 1, "squared")):
        assert mlp.load_kernel(model) is None
    mlp.load_kernel.cache_clear()
