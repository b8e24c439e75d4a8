"""The svm: a linear classifier of two classes with the hinge loss, in JAX and in numpy."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Self, final

import numpy as np

from sottovoce.models import base
from sottovoce.models.base import Array, Arrays, Floats, Inspected, Params, Shapes, jax, jnp


@final
@dataclass(frozen=True)
class Svm(base.NamedModel):
    """A linear classifier of two classes, labels 0 and 1 standing for y = −1 and y = +1.

    The paper prints the loss as max{y − wᵀx, 0}, which is no hinge (for y = −1 it asks for scores
    above −1, whatever the class); this is the hinge, max{1 − y(wᵀx + b), 0} + κ/2 ‖(w, b)‖². The
    bias acts as the weight of a constant feature 1 and is regularised like the others: the loss is
    then κ-strongly convex in everything that is uploaded, as Theorems 2 and 3 assume. The
    regulariser is part of every sample's loss, so it is clipped with it.
    """

    features: int
    kappa: float = 0.01
    classes: int = field(default=2, init=False, repr=False)

    name = "svm"
    options = (base.Option("kappa", 0.01, "0.01 is the default"),)
    most_classes = 2
    needs_jax = False
    cleans_rows = True

    @classmethod
    def create(cls, shape: tuple[int, ...], classes: int, **options: Any) -> Self:
        return cls(math.prod(shape), options["kappa"])

    def shapes(self) -> Shapes:
        return {"b": (), "w": (self.features,)}

    # In JAX

    def init(self, key: Array) -> Params:
        return {"w": jnp.zeros(self.features), "b": jnp.zeros(())}

    def apply(self, params: Params, x: Array) -> Array:
        scores: Array = x @ params["w"] + params["b"]
        return scores

    def loss(self, params: Params, x: Array, y: Array) -> Array:
        norm_squared = jnp.sum(params["w"] ** 2) + params["b"] ** 2
        # relu, not maximum: at the kink its derivative is 0, where maximum's would be 1/2.
        hinge = jax.nn.relu(1 - _signs(y, params["w"].dtype) * self.apply(params, x))
        losses: Array = hinge + self.kappa / 2 * norm_squared
        return losses

    def numbers_per_row(self) -> int:
        return self.features + 8

    def sum_chunk(
        self, prepared: Params, clip: Array, rows: Inspected, y: Array, weight: Array
    ) -> Params:
        w, b = prepared["w"], prepared["b"]
        x, is_clean, squared_x = rows
        sign = _signs(y, w.dtype)
        score = x @ w + b
        error = jnp.where(sign * score < 1, -sign, 0)
        # ‖e(x, 1) + κ(w, b)‖² from what is known, e being ±1 …
        pull_squared = self.kappa**2 * (jnp.sum(w**2) + b**2)
        parts = jnp.where(error != 0, squared_x, 0) + pull_squared
        squared = parts + 2 * self.kappa * error * score

        def sum_terms() -> Array:
            terms = jnp.sum((error[:, None] * x + self.kappa * w) ** 2, axis=1)
            return jnp.where(is_lost, terms + (error + self.kappa * b) ** 2, squared)

        # … but where hinge and κw cancel, digits are lost: the rare chunks with such rows sum them.
        is_lost = ~(squared >= parts / 8)
        squared = jax.lax.cond(jnp.any(is_lost), sum_terms, lambda: squared)
        factor = base.clip_factors(squared, is_clean, weight, clip)
        scaled, pull = base.scale_counted(error, factor), jnp.sum(factor) * self.kappa
        # Where no row counts, w itself may be what is not finite.
        return {
            "w": scaled @ x + jnp.where(pull != 0, pull * w, 0),
            "b": jnp.sum(scaled) + jnp.where(pull != 0, pull * b, 0),
        }

    # In numpy, as a device computes it

    def losses(self, params: Arrays, x: Floats, y: Any) -> Floats:
        w, b = params["w"], params["b"]
        scores = base.multiply_rows(x, w[:, None])[:, 0] + b
        hinge = np.maximum(1 - (2.0 * y - 1) * scores, 0)
        return np.asarray(hinge + self.kappa / 2 * (np.sum(w**2) + b**2))

    def gradient_block(self, params: Arrays, x: Floats, y: Any) -> Floats:
        w, b = params["w"], params["b"]
        sign = 2.0 * y - 1
        error = np.where(sign * (base.multiply_rows(x, w[:, None])[:, 0] + b) < 1, -sign, 0.0)
        block = np.empty((len(y), 1 + w.size))
        block[:, 0] = error + self.kappa * b
        np.multiply(error[:, None], x, out=block[:, 1:])
        block[:, 1:] += self.kappa * w
        return block


def _signs(y: Array, dtype: Any) -> Array:
    """Return labels 0 and 1 as −1 and +1."""
    return 2 * y.astype(dtype) - 1
