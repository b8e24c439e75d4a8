"""A softmax layer fitted to rows in the open: what no federation, or no noise, would reach.

Two levels that a private curve is to be held against: the layer fitted to the public rows alone,
which no client takes part in, and to all clients' rows at one place, without clipping or noise.
"""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from sottovoce.plan import Plan
from sottovoce.privacy.normal import Floats

Whose: TypeAlias = Literal["public", "clients"]

PENALTY = 1e-4  # λ; fixed beforehand for all data sets, chosen on none
MOST_STEPS = 500


def accuracy(plan: Plan, whose: Whose, seed: int) -> float:
    """Test accuracy of the layer on the plan's features, fitted to these rows of its data set.

    `public` are the first `data.public` rows (without it: the rows that steer), `clients` are
    those that the seed deals to them.
    """
    from sottovoce.data.federated import hold

    if whose == "public" and plan.data.public is not None:  # let all of them steer
        plan = plan.replace(**{"data.validation": plan.data.public})
    held = hold(plan, seed=seed)
    rows = held.validation if whose == "public" else held.train
    layer = fit(np.asarray(rows.x), np.asarray(rows.y), held.classes)
    return float(np.mean(predict(layer, np.asarray(held.test.x)) == held.test.y))


def fit(x: NDArray[Any], y: NDArray[Any], classes: int) -> Floats:
    """The least mean cross-entropy + λ/2·‖w‖² (biases, the last row, go free), by L-BFGS.

    >>> layer = fit(np.array([[-1.0], [-2.0], [1.0], [3.0]]), np.array([0, 0, 1, 1]), 2)
    >>> predict(layer, np.array([[-5.0], [5.0]])).tolist()
    [0, 1]
    """
    from scipy.optimize import minimize

    rows = np.column_stack([x, np.ones(len(x))]).astype(np.float64)
    told = np.zeros((len(y), classes))
    told[np.arange(len(y)), y] = 1

    def objective(flat: Floats) -> tuple[float, Floats]:
        w = flat.reshape(rows.shape[1], classes)
        scores = rows @ w
        scores -= scores.max(axis=1, keepdims=True)
        total = np.log(np.exp(scores).sum(axis=1, keepdims=True))
        held = w.copy()
        held[-1] = 0
        loss = float(np.mean(total[:, 0] - np.sum(told * scores, axis=1)))
        slope = rows.T @ (np.exp(scores - total) - told) / len(rows) + PENALTY * held
        return loss + PENALTY / 2 * float(np.sum(held**2)), slope.ravel()

    start = np.zeros(rows.shape[1] * classes)
    found = minimize(objective, start, jac=True, method="L-BFGS-B", options={"maxiter": MOST_STEPS})
    return np.asarray(found.x).reshape(rows.shape[1], classes)


def predict(layer: Floats, x: NDArray[Any]) -> NDArray[np.int64]:
    """The class of every row."""
    return np.asarray(np.argmax(x @ layer[:-1] + layer[-1], axis=1))
