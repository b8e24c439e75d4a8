"""Per-sample gradients and losses of the cnn, in float64 JAX, one sample after another.

In a batch a row's rounding may depend on its place, and XLA's float64 convolutions let one row's
NaN reach its neighbours; a release must not.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from sottovoce.models import tiles
from sottovoce.models.base import Cnn, precision
from sottovoce.models.clipping import cnn_parts, inspect
from sottovoce.models.form import Form

Floats = NDArray[np.float64]


def cnn(
    form: Form, params: Mapping[str, Floats], x: Floats, y: NDArray[Any]
) -> dict[str, NDArray[Any]]:
    """Every sample's gradient; a row that is not finite, or overflows, has NaN in it."""
    height, width, colours = form.shape
    model = Cnn((height, width, colours), form.channels, form.classes)
    with jax.enable_x64(True):
        tree = {name: jnp.asarray(leaf) for name, leaf in params.items()}
        own = _gradients(model, tree, jnp.asarray(x), jnp.asarray(y))
        return {name: np.asarray(leaf) for name, leaf in own.items()}


def cnn_losses(
    form: Form, params: Mapping[str, Floats], x: Floats, y: NDArray[Any]
) -> NDArray[Any]:
    """The loss of every sample."""
    height, width, colours = form.shape
    model = Cnn((height, width, colours), form.channels, form.classes)
    with jax.enable_x64(True):
        tree = {name: jnp.asarray(leaf) for name, leaf in params.items()}
        return np.asarray(_losses(model, tree, jnp.asarray(x), jnp.asarray(y)))


@partial(jax.jit, static_argnums=0)
def _gradients(model: Cnn, params: Any, x: Any, y: Any) -> dict[str, Any]:
    taken = tiles.tiled(model, params)

    def one(sample: tuple[Any, Any]) -> dict[str, Any]:
        rows = inspect(model, sample[0][None], precision(params))
        parts = cnn_parts(model, taken, rows, sample[1][None])
        hidden = tiles.in_order(model, parts.hidden)[0]
        is_number = parts.is_clean[0] & jnp.all(hidden < np.finfo(hidden.dtype).max)
        poison = jnp.where(is_number, 0.0, jnp.nan)
        return {
            "kernel": jnp.moveaxis(parts.kernel[0], 0, 3),
            "bias": parts.bias[0],
            "w": hidden[:, None] * parts.error[0],
            "b": parts.error[0] + poison,
        }

    own: dict[str, Any] = jax.lax.map(one, (x, y))
    return own


@partial(jax.jit, static_argnums=0)
def _losses(model: Cnn, params: Any, x: Any, y: Any) -> Any:
    return jax.lax.map(lambda s: model.loss(params, s[0][None], s[1][None])[0], (x, y))
