"""Least squares in one upload: noised second moments, and ridge regression on the server.

With x̃ = (x, 1), where x is cut to norm B, and the label y, the loss of a sample is −⟨w, s⟩:

    s = x̃ zᵀ,  z = (a·x̃/R², b·y/(RY)),  R² = B² + 1,  a² + b² = 1

y is one-hot minus 1/classes, of norm Y = √(1 − 1/classes) at most, or a number from −1 to 1. So
‖s‖ ≤ 1 for every row, which is where B is needed. The gradient is −s whatever w is: one step from
w = 0 uploads the noised mean of s, which is E[x̃x̃ᵀ] and E[x̃yᵀ]. Everything that protects a gradient
(clip, grid, noise, ledger) protects s. More rounds release the same again, with more noise each.

The server solves (E[x̃x̃ᵀ] + λI) W = E[x̃yᵀ], which only processes what was released. Noise alone
makes eigenvalues of a matrix of moments negative: λ follows from the most negative one, so that
no setting has to be tuned, and no factor of the moments (η) matters.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from sottovoce.models import base
from sottovoce.models.base import Array, Arrays, Floats, Inspected, Option, Params, Shapes, jnp
from sottovoce.models.features import NORM
from sottovoce.privacy.grid import Products

PARAMETER = "moments"
SHARE = 0.35  # a²: the part of ‖s‖² that products of inputs have
RIDGE = 0.6  # λ in units of the most negative eigenvalue
LEAST_RIDGE = 1e-6  # of the largest eigenvalue, where noise makes none negative


@final
@dataclass(frozen=True)
class LeastSquares(base.NamedModel):
    """One linear layer by ridge regression; its parameters are moments, from which it is solved."""

    features: int
    classes: int
    norm: float = NORM  # B, the public bound on the norm of a row: longer ones are cut to it
    number_loss: str | None = None  # where it predicts a number

    name = "least-squares"
    needs_jax = False
    keeps_factors = True
    cleans_rows = True
    predicts_numbers = True
    options = (Option("norm", NORM, "give a public bound on the norm of a row"),)

    def shapes(self) -> Shapes:
        return {PARAMETER: (self.features + 1, self.features + 1 + self.classes)}

    @property
    def _scales(self) -> tuple[float, float]:
        """The factors of x̃ and y in z, a little less than they may be because of rounding."""
        long = math.sqrt(self.norm**2 + 1) * (1 + 1e-6)
        label = 1.0 if self.number_loss is not None else math.sqrt(1 - 1 / self.classes)
        return math.sqrt(SHARE) / long**2, math.sqrt(1 - SHARE) / (long * label)

    def _factor(self, x: Any, y: Any, xp: Any) -> tuple[Any, Any]:
        """Return the factors x̃ and z of s, of every row, in numpy or JAX."""
        first, second = self._scales
        length = xp.sqrt(xp.sum(x**2, axis=1, keepdims=True))
        x = x * (self.norm / xp.maximum(length, self.norm))
        x = xp.concatenate([x, xp.ones_like(x[:, :1])], axis=1)
        if self.number_loss is not None:
            label = xp.clip(y, -1, 1)[:, None]
        else:
            label = (xp.arange(self.classes) == y[:, None]) - 1 / self.classes
        return x, xp.concatenate([first * x, second * label.astype(x.dtype)], axis=1)

    def solve(self, moments: Any, xp: Any) -> Any:
        """Return W of the scores x̃W from noised moments, in numpy or JAX."""
        first, second = self._scales
        products = moments[:, : self.features + 1] / first
        values, vectors = xp.linalg.eigh((products + products.T) / 2)
        ridge = RIDGE * xp.maximum(-values[0], LEAST_RIDGE * xp.abs(values[-1]) + 1e-30)
        right = vectors.T @ (moments[:, self.features + 1 :] / second)
        return vectors @ (right / (xp.maximum(values, 0) + ridge)[:, None])

    # In JAX

    def init(self, key: Array) -> Params:
        return {PARAMETER: jnp.zeros(self.shapes()[PARAMETER])}

    def prepare(self, params: Params) -> Any:
        return self.solve(params[PARAMETER], jnp)

    def apply(self, params: Params, x: Array) -> Array:
        scores: Array = self._score(self.prepare(params), x, jnp)
        return scores

    def _score(self, weights: Any, x: Any, xp: Any) -> Any:
        labels = xp.zeros(len(x), int if self.number_loss is None else x.dtype)
        return self._factor(x, labels, xp)[0] @ weights

    def loss(self, params: Params, x: Array, y: Array) -> Array:
        rows, z = self._factor(x, y, jnp)
        return -jnp.sum((rows @ params[PARAMETER]) * z, axis=1)

    def numbers_per_row(self) -> int:
        return 4 * (self.features + 1) + 2 * self.classes

    def sum_chunk(
        self, prepared: Any, clip: Array, rows: Inspected, y: Array, weight: Array
    ) -> Params:
        x, z = self._factor(rows.x, y, jnp)
        squared = base.squared_norms(x) * base.squared_norms(z)
        is_clean = rows.is_clean & jnp.isfinite(rows.squared)
        factor = base.clip_factors(squared, is_clean, weight, clip)
        return {PARAMETER: -base.keep_counted(x, factor).T @ base.scale_counted(z, factor)}

    def sample_gradient(self, prepared: Any, row: Array, label: Array) -> Params:
        x, z = self._factor(row[None], label[None], jnp)
        return {PARAMETER: -x.T @ z}

    def judge(self, prepared: Any, x: Array, y: Array) -> tuple[Array, Array]:
        """Return half the squared error of every row, and whether it is predicted right."""
        scores = self._score(prepared, x, jnp)
        if self.number_loss is not None:
            return (scores[:, 0] - y) ** 2 / 2, base.decide(scores) == y
        label = (jnp.arange(self.classes) == y[:, None]) - 1 / self.classes
        return jnp.sum((scores - label) ** 2, axis=1) / 2, base.decide(scores) == y

    # In numpy, as a device computes it

    def losses(self, params: Arrays, x: Floats, y: Any) -> Floats:
        rows, z = self._factor(x, y, np)
        return np.asarray(-np.sum(base.multiply_rows(rows, params[PARAMETER]) * z, axis=1))

    def gradient_block(self, params: Arrays, x: Floats, y: Any) -> Products:
        rows, z = self._factor(x, np.asarray(y), np)
        return Products(((rows, -z),))

    def answer(self, params: Params, x: Any) -> tuple[NDArray[np.int64], Floats | None]:
        weights = self.solve(np.asarray(params[PARAMETER], np.float64), np)
        scores = self._score(weights, np.asarray(x, np.float64), np)
        labels = np.argmax(scores, axis=1) if self.classes > 1 else np.zeros(len(scores))
        return labels.astype(np.int64), base.arrange_scores(scores)
