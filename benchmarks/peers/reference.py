"""The round in float64, from the formulas: what every peer is held against before it is timed.

A dense layer's gradient of one row is h δᵀ, so its norm is ‖δ‖·√(‖h‖² + 1) with the bias; a
convolution's own gradient is small and is formed. `tests/benchmarks/test_peers.py` holds this
equal to gradients formed one by one, and to the project's own `clipped_sum`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from work import KERNEL, PADDING, Arrays, Shape, Work

PIECE = 500


def patches(shape: Shape, x: Any) -> Any:
    """What each number of the kernel meets, (n, 25 · colours, places)."""
    height, width, colours = shape.picture
    pictures = np.moveaxis(x.reshape(-1, height, width, colours), 3, 1)
    wide = [(0, 0), (0, 0), (PADDING, PADDING), (PADDING, PADDING)]
    seen = np.lib.stride_tricks.sliding_window_view(
        np.pad(pictures, wide), (KERNEL, KERNEL), (2, 3)
    )
    # (n, colours, places, places, 5, 5) → the order of the kernel's own axes
    return np.moveaxis(seen, (4, 5), (1, 2)).reshape(len(x), KERNEL * KERNEL * colours, -1)


def scores(shape: Shape, params: Arrays, x: Any) -> tuple[Any, Any, Any]:
    """Scores of the rows, the hidden numbers they are made of, and the patches of a picture."""
    if shape.model == "svm":
        return x @ params["w"] + params["b"], x, None
    if shape.model == "mlp":
        hidden = np.maximum(x @ params["w1"] + params["b1"], 0)
        return hidden @ params["w2"] + params["b2"], hidden, None
    seen = patches(shape, x)
    kernel = params["kernel"].reshape(-1, shape.channels)
    maps = kernel.T @ seen + params["bias"][:, None]
    hidden = np.maximum(maps, 0).reshape(len(x), -1)
    return hidden @ params["w"] + params["b"], hidden, seen


def losses(shape: Shape, params: Arrays, found: Any, y: Any) -> Any:
    """The loss of every row from its scores."""
    if shape.model == "svm":
        size = np.sum(params["w"] ** 2) + params["b"] ** 2
        return np.maximum(1 - (2.0 * y - 1) * found, 0) + shape.kappa / 2 * size
    top = np.max(found, axis=1, keepdims=True)
    return np.log(np.sum(np.exp(found - top), axis=1)) + top[:, 0] - found[np.arange(len(y)), y]


def _softmax_error(found: Any, y: Any) -> Any:
    error = np.exp(found - np.max(found, axis=1, keepdims=True))
    error /= np.sum(error, axis=1, keepdims=True)
    error[np.arange(len(y)), y] -= 1
    return error


def _dense(inputs: Any, errors: Any) -> Any:
    return np.sum(errors**2, axis=1) * (np.sum(inputs**2, axis=1) + 1)


def _piece(shape: Shape, params: Arrays, x: Any, y: Any, clip: float) -> tuple[Arrays, Any]:
    """The sum of the clipped gradients of these rows, and their norms before clipping."""
    found, hidden, seen = scores(shape, params, x)
    if shape.model == "svm":
        sign = 2.0 * y - 1
        error = np.where(sign * found < 1, -sign, 0.0)
        own = error[:, None] * x + shape.kappa * params["w"]
        own_b = error + shape.kappa * params["b"]
        norm = np.sqrt(np.sum(own**2, axis=1) + own_b**2)
        factor = 1 / np.maximum(1, norm / clip)
        return {"w": factor @ own, "b": factor @ own_b}, norm
    error = _softmax_error(found, y)
    if shape.model == "mlp":
        back = np.where(hidden > 0, error @ params["w2"].T, 0.0)
        norm = np.sqrt(_dense(x, back) + _dense(hidden, error))
        factor = (1 / np.maximum(1, norm / clip))[:, None]
        back, error = back * factor, error * factor
        return {
            "w1": x.T @ back,
            "b1": back.sum(axis=0),
            "w2": hidden.T @ error,
            "b2": error.sum(axis=0),
        }, norm
    back = np.where(hidden > 0, error @ params["w"].T, 0.0).reshape(len(x), shape.channels, -1)
    own, own_b = seen @ np.swapaxes(back, 1, 2), back.sum(axis=2)
    squared = np.sum(own**2, axis=(1, 2)) + np.sum(own_b**2, axis=1)
    norm = np.sqrt(squared + _dense(hidden, error))
    factor = 1 / np.maximum(1, norm / clip)
    error = error * factor[:, None]
    return {
        "kernel": np.tensordot(factor, own, 1).reshape(params["kernel"].shape),
        "bias": factor @ own_b,
        "w": hidden.T @ error,
        "b": error.sum(axis=0),
    }, norm


def clipped_mean(work: Work, x: Any, y: Any, clip: float) -> tuple[Arrays, Any]:
    """(1/N)Σ_m clip(g_m) over the rows given, in float64, and every row's norm."""
    params = {name: array.astype(np.float64) for name, array in work.params.items()}
    total = {name: np.zeros(array.shape) for name, array in params.items()}
    norms = []
    for start in range(0, len(x), PIECE):
        rows = x[start : start + PIECE].astype(np.float64)
        part, norm = _piece(work.shape, params, rows, y[start : start + PIECE], clip)
        norms.append(norm)
        for name, array in part.items():
            total[name] += array / len(x)
    return total, np.concatenate(norms)


def by_update(work: Work) -> Arrays:
    """(1/U)Σ_i clip(mean gradient of client i): the whole update is cut, not a sample's part."""
    total = {name: np.zeros(array.shape) for name, array in work.params.items()}
    for i in range(work.shape.clients):
        mean, _ = clipped_mean(work, *work.client(i), float("inf"))
        norm = np.sqrt(sum(np.sum(array**2) for array in mean.values()))
        for name, array in mean.items():
            total[name] += array / max(1, norm / work.clip) / work.shape.clients
    return total


def evaluate(work: Work, params: Arrays) -> tuple[float, float]:
    """Mean loss and accuracy on the test rows."""
    loss, right = 0.0, 0
    params = {name: np.asarray(array, np.float64) for name, array in params.items()}
    for start in range(0, len(work.test_x), PIECE):
        x, y = work.test_x[start : start + PIECE], work.test_y[start : start + PIECE]
        found, _, _ = scores(work.shape, params, x.astype(np.float64))
        loss += float(np.sum(losses(work.shape, params, found, y)))
        decided = found > 0 if work.shape.model == "svm" else np.argmax(found, axis=1)
        right += int(np.sum(decided == y))
    return loss / len(work.test_x), right / len(work.test_x)
