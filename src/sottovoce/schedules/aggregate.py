"""How the uploads of a round become one: their weighted mean, or one that few cannot pull away.

All of it is computed from noised uploads and public numbers, and so costs no privacy. What is said
elsewhere of the averaged noise, √(Σ p_i²σ_i²), and Theorem 2 with it, holds for the mean alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

Parameters = dict[str, NDArray[np.float64]]
Aggregation: TypeAlias = Literal["mean", "trimmed", "bounded"]
BLOCK = 1 << 16  # numbers of the model that are sorted at once


def average(uploads: Sequence[Mapping[str, Any]], weights: NDArray[np.float64]) -> Parameters:
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


def combine(
    uploads: Sequence[Mapping[str, Any]],
    weights: NDArray[np.float64],
    model: Mapping[str, Any],
    *,
    kind: Aggregation | None = None,
    trim: float | None = None,
) -> Parameters:
    """Combine uploads that answer `model`, as `server.aggregation` says.

    `trimmed` leaves out, number by number, the lowest and the highest uploads, `trim` of the weight
    on either side; hostile uploads of together no more weight stay within the others' range.
    `bounded` cuts every update w̃_i − w to the median of their lengths, so that none counts for more
    than its weight.

    >>> uploads = [{"w": np.array([x])} for x in (1.0, 2.0, 3.0, 4.0, 1e6)]
    >>> equal, zero = np.full(5, 0.2), {"w": np.zeros(1)}
    >>> combine(uploads, equal, zero, kind="trimmed", trim=0.2)["w"].round(9).tolist()
    [3.0]
    >>> combine(uploads, equal, zero, kind="bounded")["w"].round(9).tolist()
    [2.4]
    """
    if kind == "trimmed":
        return {
            name: _trimmed([np.asarray(u[name]) for u in uploads], weights, trim or 0.0)
            for name in uploads[0]
        }
    if kind == "bounded":
        uploads = _bounded(uploads, model)
    return average(uploads, weights)


def describe(kind: Aggregation | None, trim: float | None) -> str | None:
    """Say how uploads were combined, for a record and its reader; None for the mean.

    >>> describe("trimmed", 0.2)
    'of every number the lowest and the highest uploads are left out, 20% of the weight each'
    """
    if kind == "trimmed":
        part = f"{trim:.0%} of the weight each"
        return f"of every number the lowest and the highest uploads are left out, {part}"
    return "updates are cut to the median of their lengths" if kind == "bounded" else None


def _trimmed(
    leaves: Sequence[NDArray[Any]], weights: NDArray[np.float64], trim: float
) -> NDArray[np.float64]:
    flat = [leaf.reshape(-1) for leaf in leaves]
    out = np.empty(flat[0].size)
    for at in range(0, out.size, BLOCK):
        values = np.stack([leaf[at : at + BLOCK] for leaf in flat]).astype(np.float64)
        order = np.argsort(values, axis=0, kind="stable")
        share = weights[order]
        top = np.cumsum(share, axis=0)
        kept = np.clip(top, trim, 1 - trim) - np.clip(top - share, trim, 1 - trim)
        sums = np.sum(kept * np.take_along_axis(values, order, axis=0), axis=0)
        out[at : at + BLOCK] = sums / np.sum(kept, axis=0)
    return out.reshape(leaves[0].shape)


def _bounded(
    uploads: Sequence[Mapping[str, Any]], model: Mapping[str, Any]
) -> list[dict[str, NDArray[np.float64]]]:
    start = {name: np.asarray(leaf, dtype=np.float64) for name, leaf in model.items()}
    moved = [{name: np.asarray(u[name], np.float64) - start[name] for name in u} for u in uploads]
    lengths = [float(np.sqrt(sum(np.sum(leaf**2) for leaf in own.values()))) for own in moved]
    most = sorted(lengths)[(len(lengths) - 1) // 2]
    cuts = [min(1.0, most / length) if length else 1.0 for length in lengths]
    return [
        {name: start[name] + cut * leaf for name, leaf in own.items()}
        for own, cut in zip(moved, cuts, strict=True)
    ]
