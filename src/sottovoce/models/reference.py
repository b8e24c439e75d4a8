"""svm, softmax and mlp in float64 numpy: what a device computes, and what JAX is held against.

No JAX here: a client that trains one of them never loads it. The losses are those of `models`;
only the precision and the library differ.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from sottovoce.errors import InputError

Floats = NDArray[np.float64]

NAMES = ("svm", "softmax", "mlp")
LEAST_SCORE = -500.0  # below the largest of a row: e⁻⁵⁰⁰ is far from subnormal, which takes longer
SLAB = 1 << 16  # numbers of a matrix that all rows are multiplied by before the next


def losses_numpy(
    name: str,
    params: Mapping[str, ArrayLike],
    x: ArrayLike,
    y: ArrayLike,
    *,
    kappa: float = 0.01,
) -> Floats:
    """F(D_m, w) for every row of svm, softmax or mlp; see `models` for the formulas.

    >>> losses_numpy("svm", {"w": [1.0], "b": 0.0}, [[2.0], [-0.5]], [1, 1], kappa=0.0).tolist()
    [0.0, 1.5]
    """
    arrays, rows, labels = _given(name, params, x, y)
    with np.errstate(all="ignore"):
        if name == "svm":
            w, b = arrays["w"], arrays["b"]
            scores = row_by_row(rows, w[:, None])[:, 0] + b
            hinge = np.maximum(1 - (2.0 * labels - 1) * scores, 0)
            return np.asarray(hinge + kappa / 2 * (np.sum(w**2) + b**2))
        scores = _scores(arrays, rows) if name == "softmax" else _hidden(arrays, rows)[1]
        scores = scores - np.max(scores, axis=1, keepdims=True)
        picked = scores[np.arange(len(labels)), labels]
        return np.asarray(np.log(np.sum(np.exp(np.maximum(scores, LEAST_SCORE)), axis=1)) - picked)


def _given(
    name: str, params: Mapping[str, ArrayLike], x: ArrayLike, y: ArrayLike
) -> tuple[dict[str, Floats], Floats, NDArray[np.int64]]:
    if name not in NAMES:
        raise InputError.of("model name", name, "svm, softmax or mlp", "the others need JAX")
    arrays = {key: np.asarray(value, np.float64) for key, value in params.items()}
    return arrays, np.asarray(x, np.float64), np.asarray(y, np.int64)


def row_by_row(x: Floats, w: Floats) -> Floats:
    """x @ w, every row multiplied by itself: what it gives depends neither on place nor on company.

    One product of all rows rounds a row differently at the edge of a block than in the middle. A
    large w is gone through in slabs that stay in the cache for all rows.

    >>> row_by_row(np.array([[1.0, 2.0], [0.0, 1.0]]), np.array([[3.0], [4.0]])).tolist()
    [[11.0], [4.0]]
    """
    product = np.empty((len(x), w.shape[1]))
    width = max(1, SLAB // max(1, len(w)))
    for j in range(0, w.shape[1], width):
        product[:, j : j + width] = np.matmul(x[:, None, :], w[:, j : j + width])[:, 0]
    return product


def softmax_error(scores: Floats, y: NDArray[Any]) -> Floats:
    """softmax − one-hot, the derivative of the cross-entropy by every row's scores.

    At the label p − 1 is written −Σ of the others: it keeps its digits where p is nearly 1.

    >>> softmax_error(np.zeros((1, 2)), np.array([1])).tolist()
    [[0.5, -0.5]]
    """
    error = np.exp(np.maximum(scores - np.max(scores, axis=1, keepdims=True), LEAST_SCORE))
    error /= np.sum(error, axis=1, keepdims=True)
    error[np.arange(len(y)), y] = 0
    error[np.arange(len(y)), y] = -np.sum(error, axis=1)
    return np.asarray(error)


def _scores(params: dict[str, Floats], x: Floats) -> Floats:
    return row_by_row(x, params["w"]) + params["b"]


def _hidden(params: dict[str, Floats], x: Floats) -> tuple[Floats, Floats]:
    hidden = np.maximum(row_by_row(x, params["w1"]) + params["b1"], 0)
    return hidden, row_by_row(hidden, params["w2"]) + params["b2"]
