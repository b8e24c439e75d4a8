"""How much each upload counts: p_i ≥ 0 over those that came, adding up to 1.

How many samples a client has is its own word, so that `limit_samples` comes first.

`by_samples` is the paper's. `by_precision` is for unequal budgets: an upload with much noise counts
less, as far as the clients' data are alike. Both use public numbers only.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

TIMES_MEDIAN = 2  # the samples that an unregistered client counts for, in medians of all clients

Floats = NDArray[np.float64]


def limit_samples(
    claimed: Sequence[int], registered: Sequence[int | None], *, planned: int = 0
) -> NDArray[np.int64]:
    """Return how many samples each client counts for, whatever it claims to hold.

    A client that the server's operator has registered counts for no more than was registered;
    another for at most twice the median of all clients (of an even number the lower one), or for
    `planned`, the most that the plan itself speaks of. A claim of more is cut, not refused.

    >>> limit_samples([400, 500, 10**6], [None] * 3).tolist()
    [400, 500, 1000]
    >>> limit_samples([400, 500, 5000], [None, None, 4000]).tolist()
    [400, 500, 4000]
    """
    pairs = list(zip(claimed, registered, strict=True))
    allowed = [n if most is None else min(n, most) for n, most in pairs]
    median = sorted(allowed)[(len(allowed) - 1) // 2]
    largest = max(TIMES_MEDIAN * median, planned)
    counted = [
        n if most is not None else min(n, largest)
        for n, (_, most) in zip(allowed, pairs, strict=True)
    ]
    return np.array(counted, dtype=np.int64)


def limit_noise(weight: Floats, sigma: Floats, limited: NDArray[np.bool_]) -> Floats:
    """Return weights with which no upload's noise moves the model more than twice the median does.

    How much noise an upload may have follows from a budget that is its client's own word, and noise
    is what a hostile upload hides in. Those that are not `limited` keep what they have.

    >>> everyone = np.ones(3, bool)
    >>> limit_noise(np.full(3, 1 / 3), np.array([1.0, 1.0, 14.0]), everyone).round(3).tolist()
    [0.467, 0.467, 0.067]
    """
    reach = np.where(weight > 0, weight * sigma, 0.0)
    known = np.sort(reach[weight > 0])
    if not len(known):
        return weight
    most = TIMES_MEDIAN * known[(len(known) - 1) // 2]
    cut = np.where(limited & (reach > most), weight * most / np.maximum(reach, most), weight)
    return np.asarray(cut / cut.sum())


def by_samples(samples: NDArray[np.int64], present: NDArray[np.bool_]) -> Floats:
    """p_i = n_i / Σ n_j over the uploads that came, eq. (2) of the paper renormalised.

    The paper's Σ_{i∈K} p_i w_i with p_i = n_i/Σ_U n would shrink the model whenever K < U. Several
    runs may stand side by side, clients along the last axis.

    >>> by_samples(np.array([100, 300, 600]), np.array([True, True, False])).tolist()
    [0.25, 0.75, 0.0]
    """
    counted = np.where(present, samples, 0).astype(np.float64)
    return np.asarray(counted / np.maximum(counted.sum(axis=-1, keepdims=True), 1))


def by_precision(
    samples: NDArray[np.int64],
    present: NDArray[np.bool_],
    *,
    sigma: Floats,
    dimension: int,
    learning_rate: float,
    clip: float,
    divergence: float,
) -> Floats:
    """The weights that balance noise against bias, from public numbers only.

    An upload's error as an estimate of its client's gradient has variance

        s_i = d·σ_i²/η² + C²/n_i   (noise, and the sample's own),

    and the clients' gradients differ by Γ² (`divergence`). Leaving π_i = n_i/Σn costs bias, staying
    there costs noise; minimising Σ p_i²·s_i + Γ²·Σ (p_i − π_i)² with Σ p_i = 1 (a step of ηL = 1,
    the largest that is stable) gives

        p_i = (Γ²π_i + λ) / (Γ² + s_i),   λ = (1 − Σ Γ²π_j/(Γ²+s_j)) / Σ 1/(Γ²+s_j) ≥ 0.

    Γ → ∞ is p = π; Γ = 0 (clients alike) is p ∝ 1/s, which on unlike clients would converge to
    another minimum.

    >>> alike = {"dimension": 100, "learning_rate": 1.0, "clip": 1.0}
    >>> n, all_there = np.array([100, 100]), np.array([True, True])
    >>> by_precision(n, all_there, sigma=np.array([0.1, 0.2]), divergence=0.0, **alike).round(3)
    array([0.799, 0.201])
    >>> by_precision(n, all_there, sigma=np.array([0.1, 0.2]), divergence=1e9, **alike).round(3)
    array([0.5, 0.5])
    """
    share = by_samples(samples, present)
    noise = np.where(present, sigma, 0.0)
    spread = dimension * noise**2 / learning_rate**2 + clip**2 / samples
    weight = np.where(present, 1 / (divergence + spread), 0.0)
    if not present.any():
        return weight
    pull = divergence * share * weight
    p = pull + weight * (1 - pull.sum()) / weight.sum()
    return np.asarray(p / p.sum())
