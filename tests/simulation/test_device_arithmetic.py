"""What an accelerator computes in another way than a CPU, computed here both ways."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sottovoce.models import clipping, cnn, mlp
from sottovoce.models.cnn import Cnn

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
