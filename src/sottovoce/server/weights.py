"""How much each upload counts: p_i ≥ 0 over those that came, adding up to 1."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def by_samples(samples: NDArray[np.int64], present: NDArray[np.bool_]) -> NDArray[np.float64]:
    """p_i = n_i / Σ n_j over the uploads that came, eq. (2) of the paper renormalised.

    The paper's Σ_{i∈K} p_i w_i with p_i = n_i/Σ_U n would shrink the model whenever K < U.

    >>> by_samples(np.array([100, 300, 600]), np.array([True, True, False])).tolist()
    [0.25, 0.75, 0.0]
    """
    counted = np.where(present, samples, 0).astype(np.float64)
    total = counted.sum()
    return counted / total if total > 0 else counted
