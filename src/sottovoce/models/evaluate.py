"""How good a model is: mean loss and accuracy over a set of rows."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax import Array

from sottovoce.errors import InputError
from sottovoce.models import clipping
from sottovoce.models.base import Cnn, Mlp, Model, Params, cross_entropy, precision
from sottovoce.models.clipping import fold, rows_per_chunk


def evaluate(model: Model, params: Params, x: Array, y: Array) -> tuple[Array, Array]:
    """V(w) = (1/n) Σ_m F(D_m, w), and the part of the rows that is predicted right.

    Compiled, in pieces of fixed size, and fit for `jax.vmap` over params. A row whose loss is not
    finite makes the mean so: unlike a training row, a row of a public set may be complained of.

    >>> from sottovoce.models.base import Svm
    >>> params = {"w": jnp.array([1.0]), "b": jnp.array(0.0)}
    >>> x, y = jnp.array([[2.0], [-0.5]]), jnp.array([1, 1])
    >>> [float(part) for part in evaluate(Svm(1, kappa=0.0), params, x, y)]
    [0.75, 0.5]
    """
    if x.shape[0] == 0:
        raise InputError.of("x", x.shape, "at least one row", "evaluate on rows that exist")
    loss, accuracy = _evaluate(model, params, x, y)
    return loss, accuracy


@partial(jax.jit, static_argnums=0)
def _evaluate(model: Model, params: Params, x: Array, y: Array) -> tuple[Array, Array]:
    dtype = precision(params)
    judge: Callable[[Array, Array], tuple[Array, Array]] = partial(_judged, model, params)
    match model:
        case Mlp():
            numbers = model.features + model.hidden
        case Cnn():
            numbers = clipping.numbers_a_row(model)
            judge = partial(_judged_cnn, model, clipping.tiled(model, params))
        case _:
            numbers = max(1, x.size // x.shape[0])

    def step(x: Array, y: Array, weight: Array) -> tuple[Array, Array]:
        losses, right = judge(x.astype(dtype), y)
        is_counted = weight > 0
        return jnp.sum(jnp.where(is_counted, losses, 0)), jnp.sum(is_counted & right, dtype=dtype)

    weight = jnp.ones(x.shape[0], dtype)
    loss, right = fold(step, x, y, weight, rows_per_chunk(numbers, dtype.itemsize))
    return loss / x.shape[0], right / x.shape[0]


def _judged(model: Model, params: Params, x: Array, y: Array) -> tuple[Array, Array]:
    """Loss of every row, and whether it is predicted right."""
    return model.loss(params, x, y), model.correct(params, x, y)


def _judged_cnn(model: Cnn, params: clipping.Tiled, x: Array, y: Array) -> tuple[Array, Array]:
    """The same, by the products of the training."""
    scores = clipping.scores(model, params, x)
    return cross_entropy(scores, y), jnp.argmax(scores, axis=1) == y


def right(model: Model, params: Params, x: Array, y: Array) -> Array:
    """Whether each row is predicted right, in pieces of fixed size.

    >>> from sottovoce.models.base import Svm
    >>> params = {"w": jnp.array([1.0]), "b": jnp.array(0.0)}
    >>> right(Svm(1, kappa=0.0), params, jnp.array([[2.0], [-0.5]]), jnp.array([1, 1])).tolist()
    [True, False]
    """
    every: Array = jax.lax.map(
        lambda row: model.correct(params, row[0][None], row[1][None])[0],
        (x.astype(precision(params)), y),
        batch_size=min(x.shape[0], 1024),
    )
    return every


def confusion(model: Model, params: Params, x: Array, y: Array, classes: int) -> Array:
    """How many rows of class i (row of the answer) are taken for class j (column).

    >>> from sottovoce.models.base import Svm
    >>> params = {"w": jnp.array([1.0]), "b": jnp.array(0.0)}
    >>> x, y = jnp.array([[2.0], [-0.5], [-1.0]]), jnp.array([1, 1, 0])
    >>> confusion(Svm(1, kappa=0.0), params, x, y, classes=2).tolist()
    [[1, 0], [1, 1]]
    """
    told: Array = jax.lax.map(
        lambda row: model.predict(params, row[None])[0],
        x.astype(precision(params)),
        batch_size=min(x.shape[0], 1024),
    )
    return jnp.zeros((classes, classes), int).at[y, told].add(1)


def losses(model: Model, params: Params, x: Array, y: Array) -> Array:
    """F(D_m, w) of every row, in pieces of fixed size.

    >>> from sottovoce.models.base import Svm
    >>> params = {"w": jnp.array([1.0]), "b": jnp.array(0.0)}
    >>> losses(Svm(1, kappa=0.0), params, jnp.array([[2.0], [-0.5]]), jnp.array([1, 1])).tolist()
    [0.0, 1.5]
    """
    every: Array = jax.lax.map(
        lambda row: model.loss(params, row[0][None], row[1][None])[0],
        (x.astype(precision(params)), y),
        batch_size=min(x.shape[0], 1024),
    )
    return every
