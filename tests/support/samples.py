"""Small models and rows of clients of unequal size, for every engine."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from sottovoce.models.base import Regression, as_device
from sottovoce.models.cnn import Cnn
from sottovoce.models.custom import custom
from sottovoce.models.least_squares import LeastSquares
from sottovoce.models.mlp import Mlp
from sottovoce.models.softmax import Softmax
from sottovoce.models.svm import Svm
from sottovoce.simulation.compiled import Orders, StackedRows

SIZES = np.array([3, 11, 6, 1, 9])


MODELS = {
    "svm": Svm(12, kappa=0.05),
    "softmax": Softmax(12, 4),
    "mlp": Mlp(12, 7, 4),
    "cnn": Cnn((2, 3, 2), 3, 4),
    "least-squares": LeastSquares(12, 4, norm=3.0),
    "custom": custom(
        init=lambda key: {"a": jax.random.normal(key, (12, 4)), "b": jnp.zeros(())},
        apply=lambda p, x: jnp.tanh(x @ p["a"]) + p["b"],
        loss=lambda scores, y: (scores[jnp.arange(len(y)), y] - 1) ** 2,
    ),
}


#: Models that predict a number in [−1, 1], and how a device sees their target.
NUMBERS = {
    "line": Softmax(12, 1, "squared"),
    "least squares of a number": LeastSquares(12, 1, 3.0, "squared"),
    "mlp of a number": Mlp(12, 7, 1, "huber"),
    "cnn of a number": Cnn((2, 3, 2), 3, 1, "squared"),
    "custom of a number": custom(
        init=lambda key: jax.random.normal(key, (12,)),
        apply=lambda w, x: jnp.tanh(x @ w),
        loss=lambda scores, y: jnp.abs(scores - y) ** 1.5,
    ),
}


def device_of(name):
    """How a device sees one of these models."""
    if name in MODELS:
        return as_device(MODELS[name])
    model = NUMBERS[name]
    target = Regression(getattr(model, "number_loss", "own"), -1.0, 1.0)
    return as_device(model, shape=(12,), classes=1, target=target)


def samples(model, seed=0):
    rng = np.random.default_rng(seed)
    n = int(SIZES.sum())
    if model in NUMBERS.values():
        return rng.standard_normal((n, 12)), rng.uniform(-1, 1, n)
    classes = 2 if isinstance(model, Svm) else 4
    return rng.standard_normal((n, 12)), rng.integers(0, classes, n)


def orders(weight, rate, *, clip=np.inf, std=0.0, sigma=None, told=0.0, bound=1.0, key=(0, 0),
           dtype=np.float64, class_weights=None):  # fmt: skip
    return Orders(
        split=np.zeros(1, np.int32),
        weight=np.asarray(weight, dtype)[None],
        rate=np.array([rate], dtype),
        clip=np.array([clip], dtype),
        std=np.array([std], dtype),
        sigma=np.asarray(np.zeros((1, len(SIZES))) if sigma is None else sigma, dtype)[None],
        signal_std=np.array([told], dtype),
        bound=np.array([bound], dtype),
        key=np.array([key], np.uint32),
        class_weights=None if class_weights is None else np.array([class_weights], dtype),
    )


def rows_of(x, y):
    owner = np.repeat(np.arange(len(SIZES)), SIZES)
    samples = SIZES.astype(x.dtype)
    return StackedRows(*(jnp.asarray(part)[None] for part in (x, y, owner, samples, x, y)))
