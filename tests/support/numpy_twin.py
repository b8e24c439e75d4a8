"""Clipped sums of svm, softmax and mlp in float64 numpy: what `clipping.clipped_sum` is held to."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import ArrayLike, NDArray

from sottovoce.errors import InputError

Floats = NDArray[np.float64]
NAMES = ("svm", "softmax", "mlp")


def clipped_sum_numpy(
    name: str,
    params: Mapping[str, ArrayLike],
    x: ArrayLike,
    y: ArrayLike,
    weight: ArrayLike,
    clip: float,
    *,
    kappa: float = 0.01,
) -> dict[str, Floats]:
    """Σ_m weight_m · g_m / max(1, ‖g_m‖/C) for svm, softmax or mlp (Algorithm 1).

    As in `clipping.clipped_sum`: the norm is over all parameters together, a row of weight 0 adds
    exactly nothing, a row whose gradient or squared norm is not finite adds the zero vector.
    `kappa` matters to the svm only.

    >>> params = {"w": np.zeros(2), "b": 0.0}
    >>> x, y = [[4.0, 2.0], [0.0, 0.0]], [1, 0]
    >>> total = clipped_sum_numpy("svm", params, x, y, np.ones(2), clip=1.0, kappa=0.0)
    >>> total["w"].round(4).tolist(), total["b"].round(4).tolist()
    ([-0.8729, -0.4364], 0.7818)
    """
    if not clip > 0:
        raise InputError.of("clip", clip, "a number > 0", "inf means no clipping")
    arrays, rows, labels = as_float64(params, x, y)
    weights = np.asarray(weight, np.float64)
    # A row that cannot count is dropped before the products: 0 · NaN would be NaN.
    counts = (weights != 0) & np.all(np.isfinite(rows), axis=1)
    rows, labels, weights = rows[counts], labels[counts], weights[counts]
    with np.errstate(all="ignore"):
        if name == "svm":
            return _svm(arrays, rows, labels, weights, clip, kappa)
        if name == "softmax":
            return _softmax(arrays, rows, labels, weights, clip)
        return _mlp(arrays, rows, labels, weights, clip)


def as_float64(
    params: Mapping[str, ArrayLike], x: ArrayLike, y: ArrayLike
) -> tuple[dict[str, Floats], Floats, NDArray[np.int64]]:
    arrays = {key: np.asarray(value, np.float64) for key, value in params.items()}
    return arrays, np.asarray(x, np.float64), np.asarray(y, np.int64)


def _softmax_error(scores: Floats, y: NDArray[np.int64]) -> Floats:
    error = np.exp(scores - np.max(scores, axis=1, keepdims=True))
    error /= np.sum(error, axis=1, keepdims=True)
    error[np.arange(len(y)), y] = 0
    error[np.arange(len(y)), y] = -np.sum(error, axis=1)
    return error


def _svm(
    params: dict[str, Floats],
    x: Floats,
    y: NDArray[np.int64],
    weight: Floats,
    clip: float,
    kappa: float,
) -> dict[str, Floats]:
    w, b = params["w"], params["b"]
    sign = 2.0 * y - 1
    error = np.where(sign * (x @ w + b) < 1, -sign, 0.0)
    own_w, own_b = error[:, None] * x + kappa * w, error + kappa * b
    factor = _factor(np.sum(own_w**2, axis=1) + own_b**2, weight, clip)
    counts = factor != 0
    factor = factor[counts]
    return {"w": factor @ own_w[counts], "b": np.asarray(factor @ own_b[counts])}


def _softmax(
    params: dict[str, Floats], x: Floats, y: NDArray[np.int64], weight: Floats, clip: float
) -> dict[str, Floats]:
    error = _softmax_error(x @ params["w"] + params["b"], y)
    factor = _factor(_dense_squared(x, error), weight, clip)
    counts = factor != 0
    error = error[counts] * factor[counts, None]
    return {"w": x[counts].T @ error, "b": np.sum(error, axis=0)}


def _mlp(
    params: dict[str, Floats], x: Floats, y: NDArray[np.int64], weight: Floats, clip: float
) -> dict[str, Floats]:
    hidden = np.maximum(x @ params["w1"] + params["b1"], 0)
    error2 = _softmax_error(hidden @ params["w2"] + params["b2"], y)
    error1 = np.where(hidden > 0, error2 @ params["w2"].T, 0.0)
    squared = _dense_squared(x, error1) + _dense_squared(hidden, error2)
    factor = _factor(squared, weight, clip)
    counts = factor != 0
    scale = factor[counts, None]
    x, hidden = x[counts], hidden[counts]
    error1, error2 = error1[counts] * scale, error2[counts] * scale
    return {
        "w1": x.T @ error1,
        "b1": np.sum(error1, axis=0),
        "w2": hidden.T @ error2,
        "b2": np.sum(error2, axis=0),
    }


def _factor(squared: Floats, weight: Floats, clip: float) -> Floats:
    norm = np.sqrt(squared)
    scaled = weight * np.where(norm > clip, clip / norm, 1.0)
    return np.where(np.isfinite(squared), scaled, 0.0)


def _dense_squared(inputs: Floats, errors: Floats) -> Floats:
    return np.asarray(np.sum(errors**2, axis=1) * (np.sum(inputs**2, axis=1) + 1))
