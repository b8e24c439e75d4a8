"""Who is served how well: accuracy by client and by budget, where that may be known.

It is computed on test rows only, and only where they are clients' own (a table with a client column
and rows of it for the test), which the guarantee then names as unprotected. On a client's training
rows it would be one more release, which nobody paid for; so elsewhere the record says why it is not
shown.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

WHY_NOT = (
    "nothing tells whose the test rows are, if they are any client's: only a simulation of a table "
    "with data.client and no file as data.test does"
)


def fairness(
    right: NDArray[np.bool_],
    owner: NDArray[np.int32] | None,
    epsilon: NDArray[np.float64],
    delta: NDArray[np.float64],
) -> dict[str, Any]:
    """Accuracy by client (least, quartiles, most) and by budget, or why there is none.

    `right` says of each test row whether it was predicted right, `owner` whose row it is.

    >>> told = fairness(np.array([True, False, True, True]), np.array([0, 0, 1, 1]),
    ...                 np.array([1.0, 8.0]), np.array([1e-5, 1e-5]))
    >>> told["accuracy"]["min"], [group["accuracy"] for group in told["by_budget"]]
    (0.5, [0.5, 1.0])
    >>> fairness(np.array([True]), None, np.array([1.0]), np.array([1e-5]))["shown"]
    False
    """
    if owner is None or len(owner) == 0:
        return {"shown": False, "why": WHY_NOT}
    rows = np.bincount(owner, minlength=len(epsilon))
    hits = np.bincount(owner, weights=right, minlength=len(epsilon))
    tested = rows > 0
    each = hits[tested] / rows[tested]
    least, low, middle, high, most = np.quantile(each, [0, 0.25, 0.5, 0.75, 1])
    pairs, group = np.unique(np.stack([epsilon, delta], axis=1), axis=0, return_inverse=True)
    group = group.reshape(-1)
    by_budget = [
        {
            "epsilon": float(pairs[g, 0]),
            "delta": float(pairs[g, 1]),
            "clients": int((tested & (group == g)).sum()),
            "rows": int(rows[group == g].sum()),
            "accuracy": float(hits[group == g].sum() / rows[group == g].sum()),
        }
        for g in range(len(pairs))
        if rows[group == g].sum() > 0
    ]
    return {
        "shown": True,
        "clients": int(tested.sum()),
        "accuracy": {
            "min": float(least),
            "q1": float(low),
            "median": float(middle),
            "q3": float(high),
            "max": float(most),
        },
        "by_budget": by_budget,
    }
