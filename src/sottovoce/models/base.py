"""The models: frozen values that hold sizes, never parameters.

A model is hashable, so it is a static argument of compiled code; its parameters are a plain tree of
arrays with stable names, saved as npz. Rows come flattened: x is (n, features).

| name | scores | loss of one sample |
|---|---|---|
| svm | wᵀx + b | max{1 − y(wᵀx + b), 0} + κ/2 ‖(w, b)‖² |
| softmax | x w + b | softmax cross-entropy |
| mlp | relu(x w1 + b1) w2 + b2 | softmax cross-entropy |
| cnn | relu(x ∗ kernel + bias) w + b | softmax cross-entropy |
| custom | yours | yours |
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any, TypeAlias, final

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from numpy.typing import NDArray

from sottovoce.errors import InputError
from sottovoce.models import imported
from sottovoce.models.gradients import ForeignModel

# The first model w⁰ of a run, drawn from a key.


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


Params = Any  # a tree of arrays: JAX has no narrower name for it

KERNEL = 5
PADDING = 4


class Model(ABC):
    """What a model can do; the parameters are always the caller's."""

    @abstractmethod
    def init(self, key: Array) -> Params:
        """Fresh parameters: weights and biases U(±1/√fan_in), for the linear models zeros."""

    @abstractmethod
    def apply(self, params: Params, x: Array) -> Array:
        """The scores of the rows x, (n, features) → (n, …)."""

    @abstractmethod
    def loss(self, params: Params, x: Array, y: Array) -> Array:
        """F(D_m, w) of Algorithm 1 for every row, (n,); never a mean."""

    def predict(self, params: Params, x: Array) -> Array:
        """The most likely class of every row, (n,)."""
        return _decide(self.apply(params, x))

    def correct(self, params: Params, x: Array, y: Array) -> Array:
        """Whether each row is predicted right, (n,) of bool."""
        return self.predict(params, x) == y


@final
@dataclass(frozen=True)
class Svm(Model):
    """A linear classifier of two classes, labels 0 and 1 standing for y = −1 and y = +1.

    The paper prints the loss as max{y − wᵀx, 0}, which is no hinge (for y = −1 it asks for scores
    above −1, whatever the class); this is the hinge, max{1 − y(wᵀx + b), 0} + κ/2 ‖(w, b)‖². The
    bias acts as the weight of a constant feature 1 and is regularised like the others: the loss is
    then κ-strongly convex in everything that is uploaded, as Theorems 2 and 3 assume. The
    regulariser is part of every sample's loss, so it is clipped with it.

    >>> Svm(2).init(jax.random.key(0))["w"].tolist()
    [0.0, 0.0]
    """

    features: int
    kappa: float = 0.01

    def init(self, key: Array) -> Params:
        return {"w": jnp.zeros(self.features), "b": jnp.zeros(())}

    def apply(self, params: Params, x: Array) -> Array:
        scores: Array = x @ params["w"] + params["b"]
        return scores

    def loss(self, params: Params, x: Array, y: Array) -> Array:
        norm_squared = jnp.sum(params["w"] ** 2) + params["b"] ** 2
        # relu, not maximum: at the kink its derivative is 0, where maximum's would be 1/2.
        hinge = jax.nn.relu(1 - signs(y, params["w"].dtype) * self.apply(params, x))
        losses: Array = hinge + self.kappa / 2 * norm_squared
        return losses


@final
@dataclass(frozen=True)
class Softmax(Model):
    """One linear layer, then softmax: the loss is convex, so it starts from zeros.

    Few parameters meet little noise (it grows with √d), so that on good features this is the model
    that learns most from a small budget.

    >>> params = Softmax(4, classes=3).init(jax.random.key(0))
    >>> {name: array.shape for name, array in params.items()}
    {'w': (4, 3), 'b': (3,)}
    """

    features: int
    classes: int

    def init(self, key: Array) -> Params:
        return {"w": jnp.zeros((self.features, self.classes)), "b": jnp.zeros(self.classes)}

    def apply(self, params: Params, x: Array) -> Array:
        scores: Array = x @ params["w"] + params["b"]
        return scores

    def loss(self, params: Params, x: Array, y: Array) -> Array:
        return cross_entropy(self.apply(params, x), y)


@final
@dataclass(frozen=True)
class Mlp(Model):
    """One hidden layer of ReLU units, then softmax.

    >>> params = Mlp(4, hidden=3, classes=2).init(jax.random.key(0))
    >>> {name: array.shape for name, array in params.items()}
    {'w1': (4, 3), 'b1': (3,), 'w2': (3, 2), 'b2': (2,)}
    """

    features: int
    hidden: int
    classes: int

    def init(self, key: Array) -> Params:
        first, second = jax.random.split(key)
        w1, b1 = _uniform(first, (self.features, self.hidden), self.features)
        w2, b2 = _uniform(second, (self.hidden, self.classes), self.hidden)
        return {"w1": w1, "b1": b1, "w2": w2, "b2": b2}

    def apply(self, params: Params, x: Array) -> Array:
        hidden = jax.nn.relu(x @ params["w1"] + params["b1"])
        scores: Array = hidden @ params["w2"] + params["b2"]
        return scores

    def loss(self, params: Params, x: Array, y: Array) -> Array:
        return cross_entropy(self.apply(params, x), y)


@final
@dataclass(frozen=True)
class Cnn(Model):
    """One 5×5 convolution with padding 4, ReLU, then a linear layer and softmax.

    No pooling, as in the paper: an H×W picture becomes channels×(H+4)×(W+4) numbers. Rows are
    pictures of `shape` (H, W, colours), flattened with the colours last.

    >>> params = Cnn((8, 8, 1), channels=2, classes=10).init(jax.random.key(0))
    >>> {name: array.shape for name, array in params.items()}
    {'kernel': (5, 5, 1, 2), 'bias': (2,), 'w': (288, 10), 'b': (10,)}
    """

    shape: tuple[int, int, int]
    channels: int
    classes: int

    @property
    def map_shape(self) -> tuple[int, int, int]:
        """Channels, height and width after the convolution, in the order of the rows of w."""
        grow = 2 * PADDING - KERNEL + 1
        return self.channels, self.shape[0] + grow, self.shape[1] + grow

    def init(self, key: Array) -> Params:
        first, second = jax.random.split(key)
        fan_in, flat = KERNEL * KERNEL * self.shape[2], math.prod(self.map_shape)
        kernel, bias = _uniform(first, (KERNEL, KERNEL, self.shape[2], self.channels), fan_in)
        w, b = _uniform(second, (flat, self.classes), flat)
        return {"kernel": kernel, "bias": bias, "w": w, "b": b}

    def apply(self, params: Params, x: Array) -> Array:
        maps = jax.lax.conv_general_dilated(
            x.reshape(-1, *self.shape).astype(params["kernel"].dtype),
            params["kernel"],
            window_strides=(1, 1),
            padding=[(PADDING, PADDING)] * 2,
            dimension_numbers=("NHWC", "HWIO", "NCHW"),
        )
        hidden = jax.nn.relu(maps + params["bias"][:, None, None]).reshape(x.shape[0], -1)
        scores: Array = hidden @ params["w"] + params["b"]
        return scores

    def loss(self, params: Params, x: Array, y: Array) -> Array:
        return cross_entropy(self.apply(params, x), y)


@final
@dataclass(frozen=True)
class Custom(Model):
    """Your own model; see `custom`."""

    init_with: Callable[[Array], Params]
    apply_with: Callable[[Params, Array], Array]
    loss_of_scores: Callable[[Array, Array], Array]
    decide: Callable[[Array], Array]

    def init(self, key: Array) -> Params:
        return self.init_with(key)

    def apply(self, params: Params, x: Array) -> Array:
        return self.apply_with(params, x)

    def loss(self, params: Params, x: Array, y: Array) -> Array:
        losses = self.loss_of_scores(self.apply(params, x), y)
        if losses.shape != x.shape[:1]:
            # A mean over the batch would make every sample's gradient depend on its neighbours.
            raise InputError.of(
                "the loss of a custom model",
                losses.shape,
                f"an array of shape {x.shape[:1]}",
                "return one loss per row and leave out the mean",
            )
        return losses

    def predict(self, params: Params, x: Array) -> Array:
        return self.decide(self.apply(params, x))


def custom(
    init: Callable[[Array], Params],
    apply: Callable[[Params, Array], Array],
    loss: Callable[[Array, Array], Array],
    predict: Callable[[Array], Array] | None = None,
) -> Custom:
    """Your own model from three JAX functions.

    `init(key)` gives any tree of floating-point arrays, `apply(params, x)` the scores of a batch
    of rows, `loss(scores, y)` one loss per row. `predict(scores)` is the class of each row; without
    it the largest score wins, or the sign where there is one score a row.

    >>> line = custom(
    ...     init=lambda key: jnp.zeros(2),
    ...     apply=lambda w, x: x @ w,
    ...     loss=lambda scores, y: (scores - y) ** 2,
    ... )
    >>> line.loss(jnp.ones(2), jnp.array([[1.0, 2.0]]), jnp.array([5.0])).tolist()
    [4.0]
    """
    return Custom(init, apply, loss, _decide if predict is None else predict)


def build(
    name: str,
    *,
    shape: tuple[int, ...],
    classes: int,
    hidden: int | None = None,
    channels: int | None = None,
    kappa: float | None = None,
) -> Model:
    """The built-in model `name` for rows of `shape`, which is (features,) or (H, W, colours).

    `hidden` (256 if absent) belongs to the mlp, `channels` (8) to the cnn, `kappa` (0.01) to the
    svm, none to softmax; one that the model does not have is refused, not ignored.

    >>> build("mlp", shape=(8, 8, 1), classes=10, hidden=32)
    Mlp(features=64, hidden=32, classes=10)
    """
    if name not in MODELS:
        raise InputError.of("model name", name, f"one of {', '.join(MODELS)}", "choose one")
    given = {"hidden": hidden, "channels": channels, "kappa": kappa}
    for option, value in given.items():
        if value is not None and option != MODELS[name]:
            remedy = f"leave it out: its own option is {MODELS[name] or 'none'}"
            raise InputError.of(option, value, f"absent for the model {name}", remedy)
    for size in shape:
        _at_least("every number of shape", size, 1, "give the sizes of one sample")
    _at_least("classes", classes, 2, "count the kinds of labels")
    if name == "svm":
        if classes != 2:
            raise InputError.of("classes", classes, "2 for the model svm", "use softmax for more")
        if kappa is not None and not 0 <= kappa < math.inf:
            raise InputError.of("kappa", kappa, "a number ≥ 0", "0.01 is the default")
        return Svm(math.prod(shape), 0.01 if kappa is None else float(kappa))
    if name == "softmax":
        return Softmax(math.prod(shape), classes)
    if name == "mlp":
        hidden = 256 if hidden is None else hidden
        _at_least("hidden", hidden, 1, "256 is the paper's")
        return Mlp(math.prod(shape), hidden, classes)
    if len(shape) != 3:
        raise InputError.of("shape", shape, "(height, width, colours) for the cnn", "use mlp else")
    channels = 8 if channels is None else channels
    _at_least("channels", channels, 1, "8 is the default")
    return Cnn((shape[0], shape[1], shape[2]), channels, classes)


#: The built-in models, and the one option that belongs to each.
MODELS = {"svm": "kappa", "softmax": None, "mlp": "hidden", "cnn": "channels"}


def precision(params: Params) -> Any:
    """The floating-point type that the parameters are computed in.

    >>> str(precision({"w": jnp.zeros(2, jnp.float32)}))
    'float32'
    """
    leaves = jax.tree.leaves(params)
    return jnp.result_type(*leaves) if leaves else jnp.zeros(()).dtype


def signs(y: Array, dtype: Any) -> Array:
    """Labels 0 and 1 as −1 and +1.

    >>> signs(jnp.array([0, 1]), jnp.float32).tolist()
    [-1.0, 1.0]
    """
    return 2 * y.astype(dtype) - 1


def cross_entropy(scores: Array, y: Array) -> Array:
    """−log softmax(scores)_y for every row.

    >>> round(float(cross_entropy(jnp.zeros((1, 4)), jnp.array([2]))[0]), 4)
    1.3863
    """
    logs = jax.nn.log_softmax(scores)
    return -jnp.take_along_axis(logs, y[:, None], axis=1)[:, 0]


def _decide(scores: Array) -> Array:
    one_score = scores.ndim == 1 or scores.shape[-1] == 1
    return (scores.reshape(-1) > 0).astype(int) if one_score else jnp.argmax(scores, axis=-1)


def _uniform(key: Array, shape: tuple[int, ...], fan_in: int) -> tuple[Array, Array]:
    for_weight, for_bias = jax.random.split(key)
    bound = 1 / math.sqrt(fan_in)
    weight = jax.random.uniform(for_weight, shape, minval=-bound, maxval=bound)
    return weight, jax.random.uniform(for_bias, shape[-1:], minval=-bound, maxval=bound)


def _at_least(name: str, value: int, least: int, remedy: str) -> None:
    if value < least:
        raise InputError.of(name, value, f"a whole number ≥ {least}", remedy)


# Parameters by name: a tree of arrays as a flat mapping, and back; and models by theirs.


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
