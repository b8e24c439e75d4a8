"""No samples × parameters array: read from what is compiled, not from a stopwatch."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import pytest

from sottovoce.models import clipping
from sottovoce.models.clipping import clipped_sum
from sottovoce.models.cnn import Cnn
from sottovoce.models.custom import custom
from sottovoce.models.mlp import Mlp
from sottovoce.models.softmax import Softmax

pytestmark = pytest.mark.slow  # left out of the editing loop


def wide(key):
    return jax.random.normal(key, (500, 200))


CASES = {
    "softmax": (Softmax(64, classes=10), 64, 4000),
    "mlp": (Mlp(64, hidden=32, classes=10), 64, 4000),
    "cnn": (Cnn((8, 8, 1), channels=4, classes=10), 64, 4000),
    "custom": (
        custom(wide, lambda w, x: x @ w, lambda scores, y: jnp.sum(scores**2, axis=1)),
        500,
        2000,
    ),
}


def abstract(model, features, n):
    params = jax.eval_shape(model.init, jax.random.key(0))
    rows, labels = jax.ShapeDtypeStruct((n, features), jnp.float32), jax.ShapeDtypeStruct((n,), int)
    return params, rows, labels, jax.ShapeDtypeStruct((n,), jnp.float32)


def intermediates(jaxpr):
    """The size of everything that is computed, inside loops and inner functions too."""
    for equation in jaxpr.eqns:
        yield from (math.prod(out.aval.shape) for out in equation.outvars)
        for value in jax.tree.leaves(list(equation.params.values()), is_leaf=is_jaxpr):
            if is_jaxpr(value):
                yield from intermediates(getattr(value, "jaxpr", value))


def is_jaxpr(value):
    return hasattr(value, "jaxpr") or hasattr(value, "eqns")


@pytest.mark.parametrize("kind", CASES)
def test_nothing_as_large_as_samples_times_parameters(kind):
    model, features, n = CASES[kind]
    params, *rest = abstract(model, features, n)
    d = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(params))
    traced = jax.make_jaxpr(lambda *a: clipped_sum(model, *a, 1.0))(params, *rest)
    sizes = list(intermediates(traced.jaxpr))
    assert len(sizes) > 20
    assert max(sizes) < n * d / 4
    if kind == "custom":
        assert 4 * max(sizes) <= clipping.GENERIC_BYTES


def test_the_reader_of_the_memory_test_sees_a_naive_sum():
    model, features, n = CASES["mlp"]
    params, x, y, _ = abstract(model, features, n)
    d = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(params))

    def naive(params, x, y):
        def loss(p, row, label):
            return model.loss(p, row[None], label[None])[0]

        return jax.jit(jax.vmap(jax.grad(loss), in_axes=(None, 0, 0)))(params, x, y)

    largest = max(intermediates(jax.make_jaxpr(naive)(params, x, y).jaxpr))
    assert largest > n * d / 4


@pytest.mark.parametrize("kind", ["mlp", "cnn"])
def test_temporaries_do_not_grow_with_the_rows(kind):
    model, features, _ = CASES[kind]

    def temporaries(n):
        compiled = jax.jit(lambda *a: clipped_sum(model, *a, 1.0))
        analysis = compiled.lower(*abstract(model, features, n)).compile().memory_analysis()
        return analysis.temp_size_in_bytes

    # Besides the pieces only numbers a row, never features a row.
    assert temporaries(200_000) <= temporaries(100_000) + 100_000 * 8
