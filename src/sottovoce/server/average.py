"""The weighted mean of the uploads."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Parameters = dict[str, NDArray[np.float64]]


def average(uploads: Sequence[Parameters], weights: NDArray[np.float64]) -> Parameters:
    """w^{t+1} = Σ p_i w̃_i^{t+1}, in float64 and in the order of the uploads.

    >>> uploads = [{"w": np.array([1.0])}, {"w": np.array([3.0])}]
    >>> average(uploads, np.array([0.5, 0.5]))["w"].tolist()
    [2.0]
    """
    names = uploads[0].keys()
    return {
        name: sum(
            (
                p * np.asarray(u[name], dtype=np.float64)
                for p, u in zip(weights, uploads, strict=True)
            ),
            start=np.zeros_like(np.asarray(uploads[0][name], dtype=np.float64)),
        )
        for name in names
    }
