"""Parameters by name: a tree of arrays as a flat mapping, and back; and models by theirs."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from sottovoce.errors import InputError
from sottovoce.models import imported
from sottovoce.models.base import Model, Params
from sottovoce.models.gradients import ForeignModel

AnyModel: TypeAlias = Model | ForeignModel


def named(params: Params) -> dict[str, NDArray[Any]]:
    """The leaves of a tree of parameters by name, as they stand in `model.npz`.

    >>> sorted(named({"w": jnp.zeros(2), "deep": [jnp.zeros(()), jnp.ones(1)]}))
    ['deep/0', 'deep/1', 'w']
    """
    paths = jax.tree_util.tree_flatten_with_path(params)[0]
    return {_name(path): np.asarray(leaf) for path, leaf in paths}


def unnamed(model: AnyModel, arrays: dict[str, NDArray[Any]]) -> Params:
    """The tree of parameters that `named` took apart; the model knows its form."""
    if isinstance(model, ForeignModel):
        _require_names(list(model.shapes()), arrays)
        return dict(arrays)
    names, tree = _form(model)
    _require_names(names, arrays)
    return jax.tree.unflatten(tree, [jnp.asarray(arrays[name]) for name in names])


@lru_cache(64)
def _form(model: Model) -> tuple[list[str], Any]:
    """The names of a model's leaves, and the tree they make; of many runs of it once."""
    form = jax.eval_shape(model.init, jax.random.key(0))
    paths, tree = jax.tree_util.tree_flatten_with_path(form)
    return [_name(path) for path, _ in paths], tree


def own_model(where: str) -> AnyModel:
    """The model that `model.own` names; importing it runs its code."""
    found = imported.find(where)
    if not isinstance(found, Model | ForeignModel):
        raise InputError.of(
            "model.own", where, "a model", "make it with sottovoce.custom or TorchModel"
        )
    return found


def _require_names(names: list[str], arrays: dict[str, NDArray[Any]]) -> None:
    if set(names) != set(arrays):
        raise InputError.of(
            "model", sorted(names), f"the one with {sorted(arrays)}", "pass the model that was run"
        )


def _name(path: tuple[Any, ...]) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="/") or "params"
