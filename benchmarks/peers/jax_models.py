"""The three losses in plain JAX, one sample at a time, for the JAX peers (0.4.30 and newer)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from work import PADDING, Shape


def scores(shape: Shape) -> Callable[[Any, Any], Any]:
    """(params, rows) → scores; one row as a vector will do, and gives one row's scores."""
    if shape.model == "svm":
        return lambda params, x: x @ params["w"] + params["b"]
    if shape.model == "mlp":
        return lambda params, x: (
            jax.nn.relu(x @ params["w1"] + params["b1"]) @ params["w2"] + params["b2"]
        )

    def cnn(params: Any, x: Any) -> Any:
        maps = jax.lax.conv_general_dilated(
            x.reshape(-1, *shape.picture),
            params["kernel"],
            (1, 1),
            [(PADDING, PADDING)] * 2,
            dimension_numbers=("NHWC", "HWIO", "NCHW"),
        )
        hidden = jax.nn.relu(maps + params["bias"][:, None, None])
        return hidden.reshape(*x.shape[:-1], -1) @ params["w"] + params["b"]

    return cnn


def losses(shape: Shape) -> Callable[[Any, Any, Any], Any]:
    """(params, rows, labels) → the loss of every row."""
    apply = scores(shape)

    def hinge(params: Any, x: Any, y: Any) -> Any:
        size = jnp.sum(params["w"] ** 2) + params["b"] ** 2
        return jax.nn.relu(1 - (2.0 * y - 1) * apply(params, x)) + shape.kappa / 2 * size

    def entropy(params: Any, x: Any, y: Any) -> Any:
        logs = jax.nn.log_softmax(apply(params, x))
        return -jnp.take_along_axis(logs, y[:, None], axis=1)[:, 0]

    return hinge if shape.model == "svm" else entropy


def sample_loss(shape: Shape) -> Callable[[Any, Any, Any], Any]:
    """(params, one row, its label) → its loss.

    The row stays a vector: its gradient is an outer product, not a product over an axis of one.
    """
    apply = scores(shape)

    def hinge(params: Any, x: Any, y: Any) -> Any:
        size = jnp.sum(params["w"] ** 2) + params["b"] ** 2
        return jax.nn.relu(1 - (2.0 * y - 1) * apply(params, x)) + shape.kappa / 2 * size

    def entropy(params: Any, x: Any, y: Any) -> Any:
        return -jax.nn.log_softmax(apply(params, x))[y]

    return hinge if shape.model == "svm" else entropy


def evaluation(shape: Shape) -> Callable[[Any, Any, Any], tuple[Any, Any]]:
    """(params, test rows, labels) → mean loss and accuracy."""
    apply, loss = scores(shape), losses(shape)

    def evaluate(params: Any, x: Any, y: Any) -> tuple[Any, Any]:
        found = apply(params, x)
        decided = found > 0 if shape.model == "svm" else jnp.argmax(found, axis=1)
        return jnp.mean(loss(params, x, y)), jnp.mean(decided == y)

    return evaluate
