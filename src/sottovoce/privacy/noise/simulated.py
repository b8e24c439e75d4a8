"""Gaussian noise from a key, in floating point: fast, repeatable, and for simulation only.

float32 normals take about 2²³ values, so that a server could tell neighbouring datasets apart by
which values are possible; and whoever learns the seed can subtract the noise. A run that uses this
noise says so in its record.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array


def draw(key: Array, like: Any, std: Array | float) -> Any:
    """Draw N(0, std²) for every number of a tree of arrays.

    It is one long draw cut into the leaves: a generator takes about a second to compile.

    >>> noise = draw(jax.random.key(0), {"w": jnp.zeros((1000, 10))}, 2.0)
    >>> bool(abs(noise["w"].std() - 2) < 0.05)
    True
    """
    leaves, tree = jax.tree.flatten(like)
    ends = np.cumsum([leaf.size for leaf in leaves])
    dtype = jnp.result_type(*leaves)
    pieces = jnp.split(jax.random.normal(key, (int(ends[-1]),), dtype), ends[:-1])
    noise = [
        (std * piece).reshape(leaf.shape).astype(leaf.dtype)
        for piece, leaf in zip(pieces, leaves, strict=True)
    ]
    return jax.tree.unflatten(tree, noise)
