"""How alike a picture and its reconstruction are: MSE, PSNR, SSIM, and whether it is recognised."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]

_C1, _C2 = 0.01**2, 0.03**2  # of SSIM, for pixels from 0 to 1


def mse(one: ArrayLike, other: ArrayLike) -> float:
    """Mean squared error.

    >>> mse([0.0, 1.0], [0.0, 0.5])
    0.125
    """
    return float(np.mean((_array(one) - _array(other)) ** 2))


def psnr(one: ArrayLike, other: ArrayLike) -> float:
    """Peak signal-to-noise ratio in decibels, for pixels from 0 to 1; at most 200.

    >>> round(psnr([0.0, 1.0], [0.0, 0.9]), 2)
    23.01
    """
    return float(-10 * np.log10(max(mse(one, other), 1e-20)))


def ssim(one: ArrayLike, other: ArrayLike) -> float:
    """Structural similarity over the whole picture (one window), for pixels from 0 to 1.

    >>> picture = [0.0, 0.2, 1.0, 0.4]
    >>> round(ssim(picture, picture), 6), ssim(picture, [1.0, 0.8, 0.0, 0.6]) < 0
    (1.0, True)
    """
    x, y = _array(one).ravel(), _array(other).ravel()
    joint = np.cov(x, y, bias=True)
    top = (2 * x.mean() * y.mean() + _C1) * (2 * joint[0, 1] + _C2)
    bottom = (x.mean() ** 2 + y.mean() ** 2 + _C1) * (joint[0, 0] + joint[1, 1] + _C2)
    return float(top / bottom)


def recognised(found: ArrayLike, candidates: ArrayLike) -> NDArray[np.int64]:
    """For every reconstruction the candidate it resembles most (by correlation).

    >>> recognised([[0.1, 0.9]], [[1.0, 0.0], [0.0, 1.0]]).tolist()
    [1]
    """
    return np.asarray(np.argmax(_standard(found) @ _standard(candidates).T, axis=1))


def _standard(rows: ArrayLike) -> Floats:
    values = _array(rows)
    values = values - values.mean(axis=1, keepdims=True)
    length = np.linalg.norm(values, axis=1, keepdims=True)
    return np.asarray(values / np.where(length > 0, length, 1.0))


def _array(values: ArrayLike) -> Floats:
    return np.nan_to_num(np.asarray(values, dtype=np.float64))
