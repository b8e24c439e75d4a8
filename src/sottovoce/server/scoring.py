"""The first model, and how good a model is: loss, accuracy, confusion, fairness; no noise here."""

from __future__ import annotations

from functools import partial
from typing import Any, cast
from weakref import WeakKeyDictionary

import jax
import jax.numpy as jnp
import numpy as np

from sottovoce.data.fairness import fairness
from sottovoce.data.federated import Samples
from sottovoce.models.base import Custom, Model, Params
from sottovoce.models.chunks import rows_per_chunk
from sottovoce.models.clipping import Inspected, inspect, product_type
from sottovoce.models.evaluate import confusion, evaluate, right
from sottovoce.models.first import first
from sottovoce.models.gradients import ForeignModel
from sottovoce.models.names import AnyModel
from sottovoce.privacy import seeds as seeding
from sottovoce.privacy.seeds import Purpose
from sottovoce.runs import record
from sottovoce.server.federation import Federation

FOREIGN_ROWS = 1024  # evaluated at a time where the model is not JAX's


def first_model(model: AnyModel, seed: int) -> Params:
    """w⁰, which is public: anyone may know the seed of it."""
    if isinstance(model, ForeignModel):
        return model.first(seed)
    key = jax.random.wrap_key_data(jnp.asarray(seeding.words(seed, Purpose.INIT)))
    return first(model, key)


_PLACED: WeakKeyDictionary[Samples, tuple[jax.Array, jax.Array]] = WeakKeyDictionary()


def on_device(samples: Samples) -> tuple[jax.Array, jax.Array]:
    """The rows where JAX computes, brought there once however many runs look at them."""
    if samples not in _PLACED:
        # One copy: `jnp.asarray` makes two of an array that does not begin at 64 bytes.
        x = jax.device_put(samples.x, may_alias=False)
        _PLACED[samples] = x, jnp.asarray(samples.y)
    return _PLACED[samples]


_INSPECTED: WeakKeyDictionary[Samples, dict[tuple[object, bool], Inspected]] = WeakKeyDictionary()


def inspected(model: Model, samples: Samples) -> Inspected:
    """The rows made ready for `clipped_sum`, once for all the runs that train on them."""
    known = _INSPECTED.setdefault(samples, {})
    x, dtype = on_device(samples)[0], jnp.zeros(()).dtype
    taken = product_type(model, dtype)
    kind = (taken, isinstance(model, Custom))
    if kind not in known:
        is_clean, squared = _facts(model, x)
        # Rows that need no change are not copied.
        same = taken == x.dtype and (kind[1] or bool(np.all(np.asarray(is_clean))))
        known[kind] = Inspected(x if same else _inspect(model, x).x, is_clean, squared)
    return known[kind]


@partial(jax.jit, static_argnums=0)
def _inspect(model: Model, x: jax.Array) -> Inspected:
    return inspect(model, x)


@partial(jax.jit, static_argnums=0)
def _facts(model: Model, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """What `inspect` says of the rows, piece by piece: it would hold a copy of all of them."""
    n = x.shape[0]
    rows = min(n, rows_per_chunk(2 * max(1, x.size // n), x.dtype.itemsize))
    first = np.arange(0, n, rows)
    starts = np.minimum(first, n - rows)  # the last piece ends with the data, as in `fold`

    def of(start: jax.Array) -> tuple[jax.Array, jax.Array]:
        return inspect(model, jax.lax.dynamic_slice_in_dim(x, start, rows))[1:]

    def joined(part: jax.Array) -> jax.Array:
        return jnp.concatenate([part[:-1].reshape(-1), part[-1, first[-1] - starts[-1] :]])

    is_clean, squared = jax.lax.map(of, jnp.asarray(starts))
    return joined(is_clean), joined(squared)


def scores(model: AnyModel, params: Params, samples: Samples) -> tuple[float, float]:
    """Mean loss and accuracy."""
    if isinstance(model, ForeignModel):
        pieces = range(0, len(samples.y), FOREIGN_ROWS)
        parts = [(samples.x[i : i + FOREIGN_ROWS], samples.y[i : i + FOREIGN_ROWS]) for i in pieces]
        each = [model.losses(params, x, y) for x, y in parts]
        hits = [model.predict(params, x) == y for x, y in parts]
        return float(np.mean(np.concatenate(each))), float(np.mean(np.concatenate(hits)))
    loss, accuracy = jax.device_get(evaluate(model, params, *on_device(samples)))
    return float(loss), float(accuracy)


def confused(
    model: AnyModel, classes: int, params: Params, samples: Samples
) -> list[list[int]] | None:
    """How many rows of each class are taken for which; None where there are too many classes."""
    if classes > record.MOST_CONFUSED:
        return None
    if isinstance(model, ForeignModel):
        table = np.zeros((classes, classes), int)
        np.add.at(table, (samples.y, model.predict(params, samples.x)), 1)
    else:
        table = np.asarray(_told(model, classes, params, *on_device(samples)))
    return cast(list[list[int]], table.tolist())


@partial(jax.jit, static_argnums=(0, 1))
def _told(model: Model, classes: int, params: Params, x: jax.Array, y: jax.Array) -> jax.Array:
    return confusion(model, params, x, y, classes)


def fairness_of(federation: Federation, params: Params) -> dict[str, Any]:
    """Accuracy by client and by budget, where the test rows have owners."""
    test, owner = federation.held.test, federation.held.test_owner
    hits = np.zeros(0, dtype=bool)
    model = federation.model
    if owner is not None and isinstance(model, ForeignModel):
        hits = model.predict(params, test.x) == test.y
    elif owner is not None and isinstance(model, Model):
        hits = np.asarray(right(model, params, *on_device(test)))
    return fairness(hits, owner, federation.epsilon, federation.delta)
