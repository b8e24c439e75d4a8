"""A round's orders as one array of bits: a transfer to an accelerator costs more than its bytes."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from numpy.typing import NDArray

Shape = tuple[int, ...]


class Layout(NamedTuple):
    """How to read it: the tree's structure, and of each leaf its shape without runs and type."""

    structure: Any
    leaves: tuple[tuple[Shape, str], ...]


def pack(orders: Any) -> tuple[NDArray[np.uint32], Layout]:
    """A tree of arrays [runs, …] of four- or eight-byte numbers → [runs, words], how to read it.

    >>> words, layout = pack({"a": np.array([1.5], np.float32), "b": np.array([[7, 8]], np.uint32)})
    >>> jax.tree.map(lambda leaf: leaf.tolist(), unpack(jnp.asarray(words), layout))
    {'a': [1.5], 'b': [[7, 8]]}
    """
    leaves, structure = jax.tree.flatten(orders)
    leaves = [np.asarray(leaf, jax.dtypes.canonicalize_dtype(leaf.dtype)) for leaf in leaves]
    runs = len(leaves[0])
    words = [np.ascontiguousarray(leaf).view(np.uint32).reshape(runs, -1) for leaf in leaves]
    kinds = tuple((leaf.shape[1:], leaf.dtype.str) for leaf in leaves)
    return np.concatenate(words, axis=1), Layout(structure, kinds)


def unpack(words: Array, layout: Layout) -> Any:
    """The tree again, where JAX computes."""
    leaves, at = [], 0
    for shape, kind in layout.leaves:
        dtype = jnp.dtype(kind)
        whole = (words.shape[0], *shape) + (() if dtype.itemsize == 4 else (2,))
        size = math.prod(whole[1:])
        part = words[:, at : at + size].reshape(whole)
        leaves.append(jax.lax.bitcast_convert_type(part, dtype))
        at += size
    return jax.tree.unflatten(layout.structure, leaves)
