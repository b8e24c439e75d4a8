"""Models as a device meets them: the form of a built-in one, and a JAX model of your own.

A device computes per-sample gradients itself, so it needs a model's sizes (`Form`) or, for a model
of the client's own, an object with `shapes`, `gradients` and `losses` (`gradients.OwnModel`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from sottovoce.models import clipping
from sottovoce.models.base import AnyModel, Cnn, Mlp, Model, Softmax, Svm, named, precision, unnamed
from sottovoce.models.clipping import cnn_parts, inspect
from sottovoce.models.form import Form, Shapes
from sottovoce.models.gradients import ForeignModel, OwnModel

# Per-sample gradients and losses of the cnn, in float64 JAX, one sample after another.
#
# In a batch a row's rounding may depend on its place, and XLA's float64 convolutions let one row's
# NaN reach its neighbours; a release must not.


Floats = NDArray[np.float64]


def cnn(
    form: Form, params: Mapping[str, Floats], x: Floats, y: NDArray[Any]
) -> dict[str, NDArray[Any]]:
    """Every sample's gradient; a row that is not finite, or overflows, has NaN in it."""
    height, width, colours = form.shape
    model = Cnn((height, width, colours), form.channels, form.classes)
    with jax.enable_x64(True):
        tree = {name: jnp.asarray(leaf) for name, leaf in params.items()}
        own = _cnn_gradients(model, tree, jnp.asarray(x), jnp.asarray(y))
        return {name: np.asarray(leaf) for name, leaf in own.items()}


def cnn_losses(
    form: Form, params: Mapping[str, Floats], x: Floats, y: NDArray[Any]
) -> NDArray[Any]:
    """The loss of every sample."""
    height, width, colours = form.shape
    model = Cnn((height, width, colours), form.channels, form.classes)
    with jax.enable_x64(True):
        tree = {name: jnp.asarray(leaf) for name, leaf in params.items()}
        return np.asarray(_cnn_losses(model, tree, jnp.asarray(x), jnp.asarray(y)))


@partial(jax.jit, static_argnums=0)
def _cnn_gradients(model: Cnn, params: Any, x: Any, y: Any) -> dict[str, Any]:
    taken = clipping.tiled(model, params)

    def one(sample: tuple[Any, Any]) -> dict[str, Any]:
        rows = inspect(model, sample[0][None], precision(params))
        parts = cnn_parts(model, taken, rows, sample[1][None])
        hidden = clipping.in_order(model, parts.hidden)[0]
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
def _cnn_losses(model: Cnn, params: Any, x: Any, y: Any) -> Any:
    return jax.lax.map(lambda s: model.loss(params, s[0][None], s[1][None])[0], (x, y))


def as_device(model: AnyModel, *, shape: tuple[int, ...] = (1,), classes: int = 2) -> Device:
    """How a device sees a model. `shape` and `classes` say what an own model cannot.

    >>> as_device(Mlp(64, 32, 10)).form
    Form(name='mlp', shape=(64,), classes=10, hidden=32, channels=0, kappa=0.0, seen=None)
    """
    match model:
        case Svm():
            return Device(Form("svm", (model.features,), 2, kappa=model.kappa), None)
        case Softmax():
            return Device(Form("softmax", (model.features,), model.classes), None)
        case Mlp():
            return Device(Form("mlp", (model.features,), model.classes, hidden=model.hidden), None)
        case Cnn():
            return Device(Form("cnn", model.shape, model.classes, channels=model.channels), None)
        case ForeignModel():
            return Device(Form("own", shape, classes), model)
        case _:
            return Device(Form("own", shape, classes), JaxModel(model))


@dataclass(frozen=True)
class Device:
    """A form, and the code behind it where the form alone does not say it."""

    form: Form
    own: OwnModel | None


@dataclass(frozen=True)
class JaxModel:
    """A model made with `custom`, worked in float64.

    >>> from sottovoce.models.base import custom
    >>> line = custom(lambda key: {"w": jnp.zeros(2)}, lambda p, x: x @ p["w"], lambda s, y: s * y)
    >>> JaxModel(line).shapes()
    {'w': (2,)}
    """

    model: Model

    def shapes(self) -> Shapes:
        """Names and shapes of the parameters, sorted by name."""
        form = jax.eval_shape(self.model.init, jax.random.key(0))
        zeros = named(jax.tree.map(lambda leaf: np.zeros(leaf.shape, np.float32), form))
        return {name: zeros[name].shape for name in sorted(zeros)}

    def gradients(
        self, params: Mapping[str, Floats], x: Floats, y: NDArray[Any]
    ) -> dict[str, NDArray[Any]]:
        """Every sample's own gradient, each computed alone: in a batch rows may touch."""
        with jax.enable_x64(True):
            tree = unnamed(self.model, dict(params))
            return named(_gradients(self.model, tree, jnp.asarray(x), jnp.asarray(y)))

    def losses(self, params: Mapping[str, Floats], x: Floats, y: NDArray[Any]) -> NDArray[Any]:
        """The loss of every sample, each computed alone."""
        with jax.enable_x64(True):
            tree = unnamed(self.model, dict(params))
            return np.asarray(_losses(self.model, tree, jnp.asarray(x), jnp.asarray(y)))


def _of_one(model: Model, params: Any, row: Any, label: Any) -> Any:
    return model.loss(params, row[None], label[None])[0]


@partial(jax.jit, static_argnums=0)
def _gradients(model: Model, params: Any, x: Any, y: Any) -> Any:
    gradient = jax.grad(partial(_of_one, model))
    return jax.lax.map(lambda row: gradient(params, *row), (x, y))


@partial(jax.jit, static_argnums=0)
def _losses(model: Model, params: Any, x: Any, y: Any) -> Any:
    return jax.lax.map(lambda row: _of_one(model, params, *row), (x, y))
