"""Softmax regression, and the losses that mlp and cnn end with, too, in JAX and in numpy.

Where the target is a number, scaled to [−1, 1], there is one score s, and the loss of r = s − y is
r²/2 (`squared`), or |r|·h − h²/2 beyond h = 0.2, a tenth of the range (`huber`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from sottovoce.models import base
from sottovoce.models.base import Array, Arrays, Floats, Inspected, Params, Shapes, jax, jnp
from sottovoce.privacy.grid import Products

HUBER = 0.2  # from here on the Huber loss grows linearly
LEAST_SCORE = -500.0  # below the largest of a row: e⁻⁵⁰⁰ is far from subnormal, which takes longer


@final
@dataclass(frozen=True)
class Softmax(base.NamedModel):
    """One linear layer, then softmax: the loss is convex, so it starts from zeros.

    Few parameters meet little noise (it grows with √d), so that on good features this is the model
    that learns most from a small budget.
    """

    features: int
    classes: int
    number_loss: str | None = None  # where it predicts a number: linear regression

    name = "softmax"
    needs_jax = False
    keeps_factors = True
    cleans_rows = True
    predicts_numbers = True

    def shapes(self) -> Shapes:
        return {"b": (self.classes,), "w": (self.features, self.classes)}

    # In JAX

    def init(self, key: Array) -> Params:
        return {"w": jnp.zeros((self.features, self.classes)), "b": jnp.zeros(self.classes)}

    def apply(self, params: Params, x: Array) -> Array:
        scores: Array = x @ params["w"] + params["b"]
        return scores

    def loss(self, params: Params, x: Array, y: Array) -> Array:
        return compute_loss(self.apply(params, x), y, self.number_loss)

    def numbers_per_row(self) -> int:
        return self.features + 2 * self.classes

    def sum_chunk(
        self, prepared: Params, clip: Array, rows: Inspected, y: Array, weight: Array
    ) -> Params:
        x, is_clean, squared = rows
        error = score_errors(x @ prepared["w"] + prepared["b"], y, self.number_loss)
        factor = base.clip_factors(base.squared_norms(error) * squared, is_clean, weight, clip)
        error = base.scale_counted(error, factor)
        return {"w": x.T @ error, "b": jnp.sum(error, axis=0)}

    # In numpy, as a device computes it

    def losses(self, params: Arrays, x: Floats, y: Any) -> Floats:
        scores = base.multiply_rows(x, params["w"]) + params["b"]
        return compute_loss_numpy(scores, y, self.number_loss)

    def gradient_block(self, params: Arrays, x: Floats, y: Any) -> Products:
        scores = base.multiply_rows(x, params["w"]) + params["b"]
        error = score_errors_numpy(scores, y, self.number_loss)
        return Products(((np.ones((len(y), 1)), error), (x, error)))


def compute_loss(scores: Array, y: Array, number_loss: str | None) -> Array:
    """Return the loss of every row: the cross-entropy −log softmax(scores)_y, or a number's."""
    if number_loss is None:
        logs = jax.nn.log_softmax(scores)
        return -jnp.take_along_axis(logs, y[:, None], axis=1)[:, 0]
    missed = scores[:, 0] - y
    if number_loss == "squared":
        return missed**2 / 2
    near = jnp.clip(jnp.abs(missed), 0, HUBER)
    return near * (jnp.abs(missed) - near / 2)


def score_errors(scores: Array, y: Array, number_loss: str | None = None) -> Array:
    """Return the derivative of the loss by every row's scores; of the cross-entropy p − one-hot.

    At the label p − 1 is written −Σ of the others: it keeps its digits where p is nearly 1.
    """
    if number_loss is not None:
        missed = scores - y[:, None]
        most = jnp.inf if number_loss == "squared" else HUBER
        return base.drop_tiny(jnp.clip(missed, -most, most))
    is_label = jnp.arange(scores.shape[-1]) == y[:, None]
    others = base.drop_tiny(jnp.where(is_label, 0, jax.nn.softmax(scores)))
    return jnp.where(is_label, -jnp.sum(others, axis=1, keepdims=True), others)


def compute_loss_numpy(scores: Floats, y: NDArray[Any], number_loss: str | None = None) -> Floats:
    """Return `compute_loss` in numpy."""
    if number_loss is None:
        scores = scores - np.max(scores, axis=1, keepdims=True)
        picked = scores[np.arange(len(y)), y]
        return np.asarray(np.log(np.sum(np.exp(np.maximum(scores, LEAST_SCORE)), axis=1)) - picked)
    missed = np.abs(scores[:, 0] - y)
    near = missed if number_loss == "squared" else np.minimum(missed, HUBER)
    return np.asarray(near * (missed - near / 2))


def score_errors_numpy(scores: Floats, y: NDArray[Any], number_loss: str | None = None) -> Floats:
    """Return `score_errors` in numpy."""
    if number_loss is not None:
        missed = scores - y[:, None]
        most = np.inf if number_loss == "squared" else HUBER
        return np.asarray(np.clip(missed, -most, most))
    error = np.exp(np.maximum(scores - np.max(scores, axis=1, keepdims=True), LEAST_SCORE))
    error /= np.sum(error, axis=1, keepdims=True)
    error[np.arange(len(y)), y] = 0
    error[np.arange(len(y)), y] = -np.sum(error, axis=1)
    return np.asarray(error)
