"""Weigh and combine the uploads of a round: their weighted mean, or a robust alternative.

All of it is computed from noised uploads and public numbers, and so costs no privacy. The averaged
noise √(Σ p_i²σ_i²), and Theorem 2 with it, holds for the mean only.

The weights p_i ≥ 0 of the uploads that came add up to 1. `weigh_by_samples` is the paper's rule.
`weigh_by_precision` is for unequal budgets: an upload with much noise counts less, as far as the
clients' data are alike. A client's number of samples is its own claim, so that `limit_samples`
comes first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

TIMES_MEDIAN = 2  # the samples that an unregistered client counts for, in medians of all clients

Floats = NDArray[np.float64]


def limit_samples(
    claimed: Sequence[int], registered: Sequence[int | None], *, planned: int = 0
) -> NDArray[np.int64]:
    """Return how many samples each client counts for, whatever it claims to hold.

    A client that the server's operator has registered counts for at most the registered number.
    Any other counts for at most twice the median of all clients (the lower one, of an even number)
    or `planned`, the largest number in the plan. A larger claim is cut, not refused.

    >>> limit_samples([400, 500, 10**6], [None] * 3).tolist()
    [400, 500, 1000]
    >>> limit_samples([400, 500, 5000], [None, None, 4000]).tolist()
    [400, 500, 4000]
    """
    pairs = list(zip(claimed, registered, strict=True))
    allowed = [n if most is None else min(n, most) for n, most in pairs]
    median = sorted(allowed)[(len(allowed) - 1) // 2]
    largest = max(TIMES_MEDIAN * median, planned)
    pairs = list(zip(allowed, registered, strict=True))
    counted = [n if most is not None else min(n, largest) for n, most in pairs]
    return np.array(counted, dtype=np.int64)


def limit_noise(weight: Floats, sigma: Floats, limited: NDArray[np.bool_]) -> Floats:
    """Return weights with which no upload's noise moves the model more than twice the median does.

    The noise of an upload follows from a budget that its client claims, and a hostile upload can
    hide in noise. Uploads that are not `limited` keep their weight, up to renormalisation.

    >>> everyone = np.ones(3, bool)
    >>> limit_noise(np.full(3, 1 / 3), np.array([1.0, 1.0, 14.0]), everyone).round(3).tolist()
    [0.467, 0.467, 0.067]
    """
    reach = np.where(weight > 0, weight * sigma, 0.0)
    sorted_reach = np.sort(reach[weight > 0])
    if not len(sorted_reach):
        return weight
    most = TIMES_MEDIAN * sorted_reach[(len(sorted_reach) - 1) // 2]
    cut = np.where(limited & (reach > most), weight * most / np.maximum(reach, most), weight)
    return np.asarray(cut / cut.sum())


def weigh_by_samples(samples: NDArray[np.int64], present: NDArray[np.bool_]) -> Floats:
    """Return p_i = n_i / Σ n_j over the uploads that came, eq. (2) of the paper renormalised.

    The paper's Σ_{i∈K} p_i w_i with p_i = n_i/Σ_U n would shrink the model whenever K < U. Clients
    are the last axis, so that several runs can be weighed at once.

    >>> weigh_by_samples(np.array([100, 300, 600]), np.array([True, True, False])).tolist()
    [0.25, 0.75, 0.0]
    """
    counted = np.where(present, samples, 0).astype(np.float64)
    return np.asarray(counted / np.maximum(counted.sum(axis=-1, keepdims=True), 1))


def weigh_by_precision(
    samples: NDArray[np.int64],
    present: NDArray[np.bool_],
    *,
    sigma: Floats,
    dimension: int,
    learning_rate: float,
    clip: float,
    divergence: float,
) -> Floats:
    """Return the weights that balance noise against bias, from public numbers only.

    An upload's error as an estimate of its client's gradient has variance

        s_i = d·σ_i²/η² + C²/n_i   (of the noise, and of the finite sample),

    and the clients' gradients differ by Γ² (`divergence`). Weights other than π_i = n_i/Σn add
    bias, and π_i adds noise. Minimising Σ p_i²·s_i + Γ²·Σ (p_i − π_i)² with Σ p_i = 1 (for a step
    of ηL = 1, the largest that is stable) gives

        p_i = (Γ²π_i + λ) / (Γ² + s_i),   λ = (1 − Σ Γ²π_j/(Γ²+s_j)) / Σ 1/(Γ²+s_j) ≥ 0.

    Γ → ∞ gives p = π. Γ = 0 (clients alike) gives p ∝ 1/s, which would converge to another minimum
    if the clients differ.

    >>> n, present, sigma = np.array([100, 100]), np.array([True, True]), np.array([0.1, 0.2])
    >>> others = {"sigma": sigma, "dimension": 100, "learning_rate": 1.0, "clip": 1.0}
    >>> weigh_by_precision(n, present, divergence=0.0, **others).round(3)
    array([0.799, 0.201])
    >>> weigh_by_precision(n, present, divergence=1e9, **others).round(3)
    array([0.5, 0.5])
    """
    share = weigh_by_samples(samples, present)
    noise = np.where(present, sigma, 0.0)
    spread = dimension * noise**2 / learning_rate**2 + clip**2 / samples
    weight = np.where(present, 1 / (divergence + spread), 0.0)
    if not present.any():
        return weight
    pull = divergence * share * weight
    p = pull + weight * (1 - pull.sum()) / weight.sum()
    return np.asarray(p / p.sum())


Parameters = dict[str, NDArray[np.float64]]
Aggregation: TypeAlias = Literal["mean", "trimmed", "bounded"]
BLOCK = 1 << 16  # numbers of the model that are sorted at once


def average(uploads: Sequence[Mapping[str, Any]], weights: NDArray[np.float64]) -> Parameters:
    """Return w^{t+1} = Σ p_i w̃_i^{t+1}, added in float64 and in the order of the uploads.

    >>> uploads = [{"w": np.array([1.0])}, {"w": np.array([3.0])}]
    >>> average(uploads, np.array([0.5, 0.5]))["w"].tolist()
    [2.0]
    """
    return {
        name: np.asarray(
            sum(p * np.asarray(u[name], np.float64) for p, u in zip(weights, uploads, strict=True))
        )
        for name in uploads[0]
    }


def combine(
    uploads: Sequence[Mapping[str, Any]],
    weights: NDArray[np.float64],
    model: Mapping[str, Any],
    *,
    kind: Aggregation | None = None,
    trim: float | None = None,
) -> Parameters:
    """Combine uploads that answer `model`, as the plan's `server.aggregation` says.

    `trimmed` leaves out, for every parameter, the lowest and the highest uploads, `trim` of the
    weight on either side; hostile uploads of no more weight than that stay within the range of the
    others. `bounded` cuts every update w̃_i − w to the median of their lengths, so that none moves
    the model by more than its weight allows.

    >>> uploads = [{"w": np.array([x])} for x in (1.0, 2.0, 3.0, 4.0, 1e6)]
    >>> equal, zero = np.full(5, 0.2), {"w": np.zeros(1)}
    >>> combine(uploads, equal, zero, kind="trimmed", trim=0.2)["w"].round(9).tolist()
    [3.0]
    >>> combine(uploads, equal, zero, kind="bounded")["w"].round(9).tolist()
    [2.4]
    """
    if kind == "trimmed":
        return {
            name: _trim_uploads([np.asarray(u[name]) for u in uploads], weights, trim or 0.0)
            for name in uploads[0]
        }
    if kind == "bounded":
        uploads = _bound_updates(uploads, model)
    return average(uploads, weights)


def describe(kind: Aggregation | None, trim: float | None) -> str | None:
    """Describe how uploads were combined, for a run record; None for the mean.

    >>> describe("trimmed", 0.2)
    'of every number the lowest and the highest uploads are left out, 20% of the weight each'
    """
    if kind == "trimmed":
        share = f"{trim:.0%} of the weight each"
        return f"of every number the lowest and the highest uploads are left out, {share}"
    return "updates are cut to the median of their lengths" if kind == "bounded" else None


def _trim_uploads(
    leaves: Sequence[NDArray[Any]], weights: NDArray[np.float64], trim: float
) -> NDArray[np.float64]:
    """Return the trimmed mean of one array of the model over the uploads."""
    flat = [leaf.reshape(-1) for leaf in leaves]
    mean = np.empty(flat[0].size)
    for start in range(0, mean.size, BLOCK):
        values = np.stack([leaf[start : start + BLOCK] for leaf in flat]).astype(np.float64)
        order = np.argsort(values, axis=0, kind="stable")
        share = weights[order]
        reached = np.cumsum(share, axis=0)
        weight_kept = np.clip(reached, trim, 1 - trim) - np.clip(reached - share, trim, 1 - trim)
        sums = np.sum(weight_kept * np.take_along_axis(values, order, axis=0), axis=0)
        mean[start : start + BLOCK] = sums / np.sum(weight_kept, axis=0)
    return mean.reshape(leaves[0].shape)


def _bound_updates(
    uploads: Sequence[Mapping[str, Any]], model: Mapping[str, Any]
) -> list[dict[str, NDArray[np.float64]]]:
    """Return the uploads with every update cut to the median length."""
    start = {name: np.asarray(leaf, dtype=np.float64) for name, leaf in model.items()}
    moves = [{name: np.asarray(u[name], np.float64) - start[name] for name in u} for u in uploads]
    lengths = [float(np.sqrt(sum(np.sum(leaf**2) for leaf in move.values()))) for move in moves]
    most = sorted(lengths)[(len(lengths) - 1) // 2]
    cuts = [min(1.0, most / length) if length else 1.0 for length in lengths]
    pairs = zip(moves, cuts, strict=True)
    return [{name: start[name] + cut * leaf for name, leaf in move.items()} for move, cut in pairs]
