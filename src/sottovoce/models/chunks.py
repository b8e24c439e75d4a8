"""Rows in pieces of fixed size: memory follows the piece, not the data, and shapes stay static."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

# A CPU wants a piece that stays in its cache between the forward and the backward product
# (the MNIST round is fastest around 1,000 rows of 784+2·256 floats: 5 MB); an accelerator wants
# few, large kernels.
CPU_BYTES = 5 << 20
DEVICE_BYTES = 256 << 20


def rows_per_chunk(numbers_a_row: int, item_bytes: int) -> int:
    """How many rows to take at once when each needs `numbers_a_row` temporary numbers.

    >>> rows_per_chunk(784 + 2 * 256, 4) >= 1000
    True
    """
    budget = CPU_BYTES if jax.default_backend() == "cpu" else DEVICE_BYTES
    return max(1, budget // max(1, numbers_a_row * item_bytes))


def fold(
    step: Callable[[Any, Array, Array], Any], x: Any, y: Array, weight: Array, rows: int
) -> Any:
    """Σ over pieces of `step(x, y, weight)`, each piece at most `rows` rows of the three.

    x may be a tree of arrays that all have a row for each label.

    The last piece is moved back to end with the data, and the rows it shares with the one before
    get weight 0 there: every piece has the same shape and nothing is padded or copied. So `step`
    must give rows of weight 0 no influence at all.

    >>> x = jnp.arange(7.0)
    >>> float(fold(lambda x, y, weight: jnp.sum(x * weight), x, x, jnp.ones(7), rows=3))
    21.0
    """
    n = y.shape[0]
    if n <= rows:
        return step(x, y, weight)
    pieces = -(-n // rows)
    rows = -(-n // pieces)  # even pieces, so that the last one repeats few rows

    def add(total: Any, index: Array) -> tuple[Any, None]:
        start = jnp.minimum(index * rows, n - rows)
        xs, ys, ws = jax.tree.map(
            lambda a: jax.lax.dynamic_slice_in_dim(a, start, rows), (x, y, weight)
        )
        is_new = start + jnp.arange(rows) >= index * rows
        return jax.tree.map(jnp.add, total, step(xs, ys, jnp.where(is_new, ws, 0))), None

    shapes = jax.eval_shape(step, *jax.tree.map(lambda a: a[:rows], (x, y, weight)))
    zero = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
    return jax.lax.scan(add, zero, jnp.arange(pieces))[0]
