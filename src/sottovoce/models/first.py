"""The first model w⁰ of a run, drawn from a key."""

from __future__ import annotations

from functools import cache
from typing import Any

import jax

from sottovoce.models.base import Model, Params


def first(model: Model, key: jax.Array) -> Params:
    """`model.init(key)` as one program.

    It runs once, so that a CPU compiles it without optimising: that takes a quarter of the time.

    >>> from sottovoce.models.base import Svm
    >>> sorted(first(Svm(2), jax.random.key(0)))
    ['b', 'w']
    """
    own: Params = _drawn(jax.default_backend())(model, key)
    return own


@cache
def _drawn(backend: str) -> Any:
    options = {"xla_backend_optimization_level": 0} if backend == "cpu" else None
    return jax.jit(lambda model, key: model.init(key), static_argnums=0, compiler_options=options)
