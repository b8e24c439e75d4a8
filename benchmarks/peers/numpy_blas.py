"""numpy and its BLAS: the analytic design of ours by hand, in float32 and in pieces.

No samples × parameters array: norms from factors, one product a piece. Also the step of a client
in the Flower simulation.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from protocol import Outcome, Play, serve
from reference import losses, patches, scores
from work import Arrays, Shape, Work

PIECE_BYTES = 5 << 20


def _squares(a: Any) -> Any:
    return np.einsum("ij,ij->i", a, a)


def _error(found: Any, y: Any) -> Any:
    found -= found.max(axis=1, keepdims=True)
    np.exp(found, out=found)
    found /= found.sum(axis=1, keepdims=True)
    found[np.arange(len(y)), y] -= 1
    return found


def _rows(shape: Shape) -> int:
    numbers = shape.features + 2 * shape.hidden
    if shape.model == "cnn":
        numbers = shape.places * (25 * shape.picture[2] + 2 * shape.channels)
    return max(1, PIECE_BYTES // (4 * numbers))


def add_piece(
    shape: Shape, params: Arrays, x: Any, y: Any, clip: float, scale: float, total: Arrays
) -> None:
    """total += scale · Σ_m clip(g_m) over these rows."""
    if shape.model == "svm":
        sign = 2 * y.astype(np.float32) - 1
        error = np.where(sign * (x @ params["w"] + params["b"]) < 1, -sign, np.float32(0))
        pull = shape.kappa * params["w"]
        # ‖e x + κw‖² = e²‖x‖² + 2e κ xᵀw + ‖κw‖²
        squared = error**2 * _squares(x) + 2 * error * (x @ pull) + pull @ pull
        own_b = error + shape.kappa * params["b"]
        factor = scale / np.maximum(1, np.sqrt(squared + own_b**2) / clip)
        total["w"] += (factor * error) @ x + factor.sum() * pull
        total["b"] += factor @ own_b
        return
    if shape.model == "mlp":
        hidden = x @ params["w1"]
        hidden += params["b1"]
        np.maximum(hidden, 0, out=hidden)
        error = _error(hidden @ params["w2"] + params["b2"], y)
        back = error @ params["w2"].T
        back *= hidden > 0
        squared = _squares(back) * (_squares(x) + 1) + _squares(error) * (_squares(hidden) + 1)
        factor = (scale / np.maximum(1, np.sqrt(squared) / clip))[:, None]
        back *= factor
        error *= factor
        total["w1"] += x.T @ back
        total["b1"] += back.sum(axis=0)
        total["w2"] += hidden.T @ error
        total["b2"] += error.sum(axis=0)
        return
    seen = patches(shape, x)
    maps = params["kernel"].reshape(-1, shape.channels).T @ seen
    maps += params["bias"][:, None]
    hidden = np.maximum(maps, 0, out=maps).reshape(len(x), -1)
    error = _error(hidden @ params["w"] + params["b"], y)
    back = error @ params["w"].T
    back *= hidden > 0
    back = back.reshape(len(x), shape.channels, -1)
    own, own_b = seen @ back.swapaxes(1, 2), back.sum(axis=2)
    squared = _squares(own.reshape(len(x), -1)) + _squares(own_b)
    squared += _squares(error) * (_squares(hidden) + 1)
    factor = scale / np.maximum(1, np.sqrt(squared) / clip)
    error *= factor[:, None]
    total["kernel"] += np.tensordot(factor, own, 1).reshape(params["kernel"].shape)
    total["bias"] += factor @ own_b
    total["w"] += hidden.T @ error
    total["b"] += error.sum(axis=0)


def clipped_mean(shape: Shape, params: Arrays, x: Any, y: Any, clip: float) -> Arrays:
    """(1/N)Σ_m clip(g_m) over the rows given."""
    total = {name: np.zeros_like(array) for name, array in params.items()}
    step, scale = _rows(shape), np.float32(1 / len(x))
    for start in range(0, len(x), step):
        piece = slice(start, start + step)
        add_piece(shape, params, x[piece], y[piece], clip, scale, total)
    return total


def evaluate(work: Work, params: Arrays) -> tuple[float, float]:
    """Mean loss and accuracy on the test rows."""
    loss, right, step = 0.0, 0, _rows(work.shape)
    for start in range(0, len(work.test_x), step):
        x, y = work.test_x[start : start + step], work.test_y[start : start + step]
        found, _, _ = scores(work.shape, params, x)
        loss += float(np.sum(losses(work.shape, params, found, y), dtype=np.float64))
        decided = found > 0 if work.shape.model == "svm" else np.argmax(found, axis=1)
        right += int(np.sum(decided == y))
    return loss / len(work.test_x), right / len(work.test_x)


def build(work: Work) -> Play:
    random = np.random.default_rng()

    def play(std: float) -> Outcome:
        mean = clipped_mean(work.shape, work.params, work.x, work.y, work.clip)
        params = {}
        for name, array in work.params.items():
            noise = np.float32(std) * random.standard_normal(array.shape, dtype=np.float32)
            params[name] = array - np.float32(work.rate) * mean[name] + noise
        return Outcome(params, *evaluate(work, params))

    return play


if __name__ == "__main__":
    serve(build, "numpy")
