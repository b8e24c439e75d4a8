"""What a model is: the protocol, the registry of named models, and a model as a device sees it.

| class | what it adds | who derives from it |
|---|---|---|
| `Model` | parameters, per-sample gradients, losses and predictions in numpy | `TorchModel` |
| `JaxModel` | the same from three JAX functions; clipped sums that compile | `Custom` |
| `NamedCode` | a name and options in messages, without JAX | `Statistics` |
| `NamedModel` | both: a name in plans and messages | the models in `MODELS` |

A model is a frozen value that holds sizes, never parameters. It is hashable, so that it is a static
argument of compiled code; its parameters are a tree of arrays with stable names, saved as npz. Rows
come flattened: x is (n, features).

JAX takes a second to import. Only `clipping` and `kernels` import it at once: a device that trains
svm, softmax, mlp or least-squares never loads it. The lazy modules below load it on first use.
"""

from __future__ import annotations

import importlib
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache, partial
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from sottovoce.errors import InputError, Malformed
from sottovoce.models import features, network
from sottovoce.models.network import Lens
from sottovoce.privacy import seeds
from sottovoce.privacy.grid import Products, flush_tiny
from sottovoce.privacy.seeds import Purpose

if TYPE_CHECKING:
    import jax as jax
    from jax import Array as Array

    from sottovoce.models import clipping as clipping
    from sottovoce.models.person import PersonCode

    jnp = jax.numpy
else:

    class _LazyModule:
        """A module that is imported when one of its names is first used."""

        def __init__(self, name: str) -> None:
            self._name = name

        def __getattr__(self, name: str) -> Any:
            return getattr(importlib.import_module(self._name), name)

    Array = Any  # in annotations alone
    jax, jnp = _LazyModule("jax"), _LazyModule("jax.numpy")
    clipping = _LazyModule("sottovoce.models.clipping")

Floats = NDArray[np.float64]
Params = Any  # a tree of arrays: JAX has no narrower name for it
Arrays = Mapping[str, NDArray[Any]]  # parameters by name
Shapes = dict[str, tuple[int, ...]]

LEAST_SQUARES = "least-squares"
#: The named models and where each is defined. A new model is one file and one line here.
MODELS = {
    "svm": "sottovoce.models.svm:Svm",
    "softmax": "sottovoce.models.softmax:Softmax",
    "mlp": "sottovoce.models.mlp:Mlp",
    "cnn": "sottovoce.models.cnn:Cnn",
    LEAST_SQUARES: "sottovoce.models.least_squares:LeastSquares",
}
#: What a message may name besides: no model to train, but statistics to release.
_OTHERS = {"statistics": "sottovoce.models.statistics:Statistics"}
OWN = "own"  # in a message: the client's own code, which its node file names
EVALUATED_ROWS = 1024  # at a time, where no compiled code chooses


class Model(ABC):
    """A model that a server can start, a device can train, and both can evaluate.

    A sample's gradient and loss must not depend on the other samples, not even in the last bit.
    """

    #: `module:function` that a worker calls early because importing it takes long.
    warm_up: ClassVar[str | None] = None
    #: Whether `gradient_block` gives products of factors instead of written-out gradients.
    keeps_factors: ClassVar[bool] = False

    @property
    def code(self) -> Model:
        """The model that computes the gradient of a row; another one where samples are persons."""
        return self

    @abstractmethod
    def shapes(self) -> Shapes:
        """Return names and shapes of the parameters, sorted by name."""

    @abstractmethod
    def draw_parameters(self, seed: int) -> Params:
        """Return the first model w⁰ of a run, a function of the seed. It is public."""

    @abstractmethod
    def gradients(self, params: Arrays, x: NDArray[Any], y: NDArray[Any]) -> Arrays:
        """Return every sample's gradient in float64, each array (samples, *shape)."""

    @abstractmethod
    def losses(self, params: Arrays, x: NDArray[Any], y: NDArray[Any]) -> NDArray[np.float64]:
        """Return F(D_m, w) of every sample in float64."""

    @abstractmethod
    def predict(self, params: Params, x: Any) -> Any:
        """Return the most likely class of every row, (n,)."""

    def unflatten(self, arrays: Arrays) -> Params:
        """Return the parameters as the model takes them, from arrays by name."""
        _require_names(self.shapes(), arrays)
        return dict(arrays)

    def evaluate(self, params: Params, x: Any, y: Any) -> tuple[float, float]:
        """Return the mean loss and the accuracy over the rows."""
        starts = range(0, len(y), EVALUATED_ROWS)
        chunks = [(x[i : i + EVALUATED_ROWS], y[i : i + EVALUATED_ROWS]) for i in starts]
        losses = np.concatenate([self.losses(params, *chunk) for chunk in chunks])
        correct = np.concatenate([self.predict(params, x) == y for x, y in chunks])
        return float(np.mean(losses)), float(np.mean(correct))

    def answer(self, params: Params, x: Any) -> tuple[NDArray[np.int64], Floats | None]:
        """Return the class of every row, and its scores where the model has them."""
        starts = range(0, len(x), EVALUATED_ROWS)
        chunks = [self.predict(params, x[i : i + EVALUATED_ROWS]) for i in starts]
        return np.concatenate(chunks), None

    def scores(self, params: Params, x: Any) -> Floats | None:
        """Return a logit for every row and class, (n, classes); one score s a row is [0, s].

        Softmax makes them probabilities. None for a model without such scores.
        """
        return self.answer(params, x)[1]

    def clipped_sum(self, params: Arrays, x: Any, y: Any, weight: Any, clip: float) -> Arrays:
        """Return Σ_m weight_m · g_m / max(1, ‖g_m‖/C) for a simulation; in numpy, block by block.

        A row whose gradient is not finite adds nothing.
        """
        total, rows = np.zeros(_count(params)), rows_per_block(_count(params))
        for start in range(0, len(y), rows):
            chunk = slice(start, start + rows)
            with np.errstate(all="ignore"):
                block = Products.of(self.gradient_block(params, x[chunk], y[chunk]))
                norms = np.sqrt(block.squared_norms())
                factor = np.where(np.isfinite(norms), weight[chunk], 0) / np.maximum(
                    1, norms / clip
                )
                total += block.scale_rows(np.nan_to_num(factor)).write_out().sum(axis=0)
        ends = np.cumsum([params[name].size for name in sorted(params)])
        pieces = zip(sorted(params), np.split(total, ends[:-1]), strict=True)
        return {name: piece.reshape(params[name].shape) for name, piece in pieces}

    def form(self, shape: tuple[int, ...], classes: int) -> Form:
        """Return how messages describe the model; a named model knows its shape and classes."""
        return Form(OWN, shape, classes)

    def gradient_block(self, params: Arrays, x: Floats, y: Any) -> Floats | Products:
        """Return the gradients of some samples, (samples, parameters) in the order of the names.

        A row depends on its own sample and the model alone, to the last bit: each is computed by
        itself, never in one product with its neighbours. Otherwise a server could choose weights at
        which another rounding (as a batch with a NaN in it may have) switches a ReLU of every row,
        and the sum would move by more than its sensitivity.
        """
        return _join_gradients(params, self.gradients(params, x, y), len(y))


class Regression(NamedTuple):
    """A target that is a number: its loss, and its public range, which is scaled to [−1, 1].

    The loss is `squared`, `huber`, or `own` where a custom model brings it.
    """

    loss: str
    low: float
    high: float

    def scale(self, values: Any) -> NDArray[np.float32]:
        """Return targets cut to the range and scaled to [−1, 1]; NaN stays NaN.

        >>> Regression("squared", 0.0, 100.0).scale([0.0, 75.0, 999.0]).tolist()
        [-1.0, 0.5, 1.0]
        """
        cut = np.clip(np.asarray(values, np.float64), self.low, self.high)
        return (2 * ((cut - self.low) / (self.high - self.low)) - 1).astype(np.float32)

    def find_cut(self, values: Any) -> NDArray[np.bool_]:
        """Return which targets lie beyond the range, so that `scale` cuts them."""
        return (np.asarray(values) < self.low) | (np.asarray(values) > self.high)

    def restore(self, scaled: Any) -> Floats:
        """Return what was scaled, or predictions of it, in the target's unit and range.

        >>> Regression("squared", 0.0, 100.0).restore([-3.0, 0.5]).tolist()
        [0.0, 75.0]
        """
        share = (np.clip(np.asarray(scaled, np.float64), -1, 1) + 1) / 2
        return np.asarray(self.low + share * (self.high - self.low))


def predict_numbers(model: Model, params: Params, x: Any) -> Floats:
    """Return the one score of every row, a number on the scale of `Regression`."""
    return take_numbers(model.answer(params, x)[1])


def take_numbers(scores: Floats | None) -> Floats:
    """Return the one score of every row, of scores [0, s] that `answer` gave."""
    if scores is None or scores.shape[1] != 2:
        columns = None if scores is None else scores.shape[1]
        remedy = "give the model one output"
        raise InputError.of("scores", columns, "one a row where a number is predicted", remedy)
    return np.asarray(scores[:, 1])


class Inspected(NamedTuple):
    """Rows ready for products, with facts that do not change from round to round."""

    x: Array  # (n, features): 0 where a number was not finite
    is_clean: Array  # (n,): whether every number of the row was finite
    squared: Array  # (n,): ‖x‖² + 1


class JaxModel(Model):
    """A model in JAX: `init`, `apply` and `loss` are enough, the rest follows by differentiation.

    A dense layer's gradient is an outer product, so that a model of dense layers overrides
    `sum_chunk` to clip and add gradients without writing them out, and `gradient_block` and
    `losses` to compute them in numpy, without JAX.
    """

    cleans_rows: ClassVar[bool] = False  # whether rows are inspected: `sum_chunk` gets zeros for ∞
    uses_bfloat16: ClassVar[bool] = False  # whether large products do on an accelerator

    @abstractmethod
    def init(self, key: Array) -> Params:
        """Return fresh parameters: weights and biases U(±1/√fan_in), for linear models zeros."""

    @abstractmethod
    def apply(self, params: Params, x: Array) -> Array:
        """Return the scores of the rows x, (n, features) → (n, …)."""

    @abstractmethod
    def loss(self, params: Params, x: Array, y: Array) -> Array:
        """Return F(D_m, w) of Algorithm 1 for every row, (n,); never a mean."""

    def predict(self, params: Params, x: Array) -> Array:
        """Return the most likely class of every row, (n,)."""
        return decide(self.apply(params, x))

    # What compiled code asks for (`clipping`), chunk by chunk.

    def prepare(self, params: Params) -> Any:
        """Return the parameters in the layout that the methods below take; once per sum."""
        return params

    def numbers_per_row(self) -> int | None:
        """Return the temporary numbers of a row in `sum_chunk`; None: its whole gradient."""
        return None

    def numbers_per_evaluated_row(self) -> int | None:
        """Return the temporary numbers of a row in `judge`; None: those of the row itself."""
        return None

    def sum_chunk(
        self, prepared: Any, clip: Array, rows: Inspected, y: Array, weight: Array
    ) -> Params:
        """Return Σ_m weight_m · g_m / max(1, ‖g_m‖/C) over one chunk of rows."""
        x, dense = rows.x, clipping.find_dense_layers(self, prepared, rows.x, y)
        gradient = dense.compute_row
        gradients = jax.vmap(gradient, in_axes=(None, 0, 0))(prepared, x, y)
        # Rows must not touch each other, but a compiler may write "not this row" as 0 · value (XLA
        # does for float64 convolutions), and 0 · NaN spoils the neighbours: then take the rows one
        # by one. A loop, not a condition: under vmap a condition would always compute both sides.
        gradients, _ = jax.lax.while_loop(
            lambda state: ~state[1],
            lambda _: (jax.lax.map(lambda row: gradient(prepared, *row), (x, y)), jnp.array(True)),
            (gradients, _are_all_finite(gradients)),
        )
        gradients, squared = dense.measure_rows(gradients)
        factor = clip_factors(squared, jnp.full(y.shape, True), weight, clip)
        return dense.add_rows(jax.tree.map(lambda g: keep_counted(g, factor), gradients), factor)

    def restore_layout(self, total: Params) -> Params:
        """Return a sum of `sum_chunk` in the layout of the parameters."""
        return total

    def judge(self, prepared: Any, x: Array, y: Array) -> tuple[Array, Array]:
        """Return the loss of every row, and whether it is predicted right."""
        return self.loss(prepared, x, y), self.predict(prepared, x) == y

    def sample_loss(self, params: Params, row: Array, label: Array) -> Array:
        """Return the loss of one sample."""
        return self.loss(params, row[None], label[None])[0]

    def sample_gradient(self, prepared: Any, row: Array, label: Array) -> Params:
        """Return the gradient of one sample."""
        return jax.grad(self.sample_loss)(prepared, row, label)

    # The protocol, by compiled code.

    def shapes(self) -> Shapes:
        names, _, shapes = _describe_tree(self)
        return dict(sorted(zip(names, shapes, strict=True)))

    def draw_parameters(self, seed: int) -> Params:
        key = jax.random.wrap_key_data(jnp.asarray(seeds.make_key_words(seed, Purpose.INIT)))
        return _compile_init(jax.default_backend())(self, key)

    def unflatten(self, arrays: Arrays) -> Params:
        names, tree, _ = _describe_tree(self)
        _require_names(names, arrays)
        return jax.tree.unflatten(tree, [jnp.asarray(arrays[name]) for name in names])

    def gradients(self, params: Arrays, x: NDArray[Any], y: NDArray[Any]) -> Arrays:
        """Return every sample's gradient in float64, each computed alone.

        In a batch a row's rounding may depend on its position, and XLA's float64 convolutions let
        one row's NaN reach its neighbours; a release must not.
        """
        with jax.enable_x64(True):
            tree = self.unflatten(params)
            gradients = clipping.compute_gradients_alone(self, tree, jnp.asarray(x), jnp.asarray(y))
            return flatten_parameters(gradients)

    def losses(self, params: Arrays, x: NDArray[Any], y: NDArray[Any]) -> NDArray[np.float64]:
        """Return the loss of every sample in float64, each computed alone."""
        with jax.enable_x64(True):
            tree = self.unflatten(params)
            losses = clipping.compute_losses_alone(self, tree, jnp.asarray(x), jnp.asarray(y))
            return np.asarray(losses)

    def evaluate(self, params: Params, x: Any, y: Any) -> tuple[float, float]:
        loss, accuracy = jax.device_get(clipping.evaluate(self, params, x, y))
        return float(loss), float(accuracy)

    def answer(self, params: Params, x: Any) -> tuple[NDArray[np.int64], Floats | None]:
        predicted, scores = jax.device_get(clipping.answer(self, params, x))
        return np.asarray(predicted, np.int64), arrange_scores(scores)


def arrange_scores(scores: NDArray[Any]) -> Floats | None:
    """Return scores as logits (n, classes), where one score s a row stands for [0, s].

    >>> arrange_scores(np.array([2.0])).tolist()
    [[0.0, 2.0]]
    """
    columns = scores[:, None] if scores.ndim == 1 else scores
    if columns.ndim != 2:
        return None
    if columns.shape[1] == 1:
        columns = np.concatenate([np.zeros_like(columns), columns], axis=1)
    return np.asarray(columns, np.float64)


@dataclass(frozen=True)
class Option:
    """A number that belongs to a model, and how a bad one is answered.

    It is a size (a whole number from 1) where its default is whole, a list of whole numbers from 0
    where its default is one, else a weight (from 0).
    """

    name: str
    default: int | float | tuple[int, ...]
    remedy: str

    def choose(self, value: Any) -> Any:
        """Return the value, or the default for None; raise where the model cannot have it."""
        if value is None:
            return self.default
        if isinstance(self.default, tuple):
            return tuple(value)
        if isinstance(self.default, int):
            _require_at_least(self.name, value, 1, self.remedy)
            return value
        if not 0 <= value < math.inf:
            raise InputError.of(self.name, value, "a number ≥ 0", self.remedy)
        return float(value)

    def read(self, value: Any) -> Any:
        """Return the value as it stands in a message; raise `Malformed` for what is none."""
        if isinstance(self.default, tuple):
            if not isinstance(value, list):
                raise Malformed(f"the message's {self.name} is no list")
            return tuple(_read_size(self.name, size, least=0) for size in value)
        if isinstance(self.default, int):
            return _read_size(self.name, value)
        if type(value) not in (int, float) or not 0 <= value <= _LARGEST_WEIGHT:
            raise Malformed(f"the message's {self.name} is no number from 0 to 1e6")
        return value


class NamedCode(Model):
    """What plans and messages call by its name."""

    name: ClassVar[str]
    options: ClassVar[tuple[Option, ...]] = ()
    most_classes: ClassVar[int | None] = None  # the most that it tells apart; None: any number
    takes_pictures: ClassVar[bool] = False  # whether rows must be (height, width, colours)
    #: Whether it can predict a number: it then has a field `number_loss`, and one output.
    predicts_numbers: ClassVar[bool] = False
    #: Whether a device computes it with JAX, whose memory must be tried before a debit.
    needs_jax: ClassVar[bool] = True
    features: int  # the numbers of a row
    classes: int

    @classmethod
    def create(cls, shape: tuple[int, ...], classes: int, **options: Any) -> Self:
        """Return the model for samples of `shape`, with all of its options; all are checked."""
        make: Any = cls
        model: Self = make(features=math.prod(shape), classes=classes, **options)
        return model

    @classmethod
    def fits(cls, classes: int, are_pictures: bool) -> bool:
        """Return whether the model tells so many classes apart, of samples that are pictures."""
        are_few = cls.most_classes is None or classes <= cls.most_classes
        return are_few and (are_pictures or not cls.takes_pictures)

    def form(self, shape: tuple[int, ...] = (), classes: int = 0) -> Form:
        """Return how messages describe the model: name, shape of a sample, classes, options."""
        options = {option.name: getattr(self, option.name) for option in self.options}
        return Form(self.name, (self.features,), self.classes, options)


class NamedModel(NamedCode, JaxModel):
    """A model that plans and messages call by its name in `MODELS`."""


def find_model(name: str) -> type[NamedCode]:
    """Return the class of the model that `MODELS` calls `name`."""
    if name not in (known := MODELS | _OTHERS):
        raise InputError.of("model name", name, f"one of {', '.join(MODELS)}", "choose one")
    module, _, title = known[name].partition(":")
    kind: type[NamedCode] = getattr(importlib.import_module(module), title)
    return kind


def build(
    name: str,
    *,
    shape: tuple[int, ...],
    classes: int,
    number_loss: str | None = None,
    **options: Any,
) -> NamedCode:
    """Return the model `name` for rows of `shape`, which is (features,) or (H, W, colours).

    With `number_loss` (squared or huber) it predicts a number, and `classes` is 1.

    An option that is absent or None has the model's default; one that the model does not have is
    refused, not ignored.

    >>> build("mlp", shape=(8, 8, 1), classes=10, hidden=32)
    Mlp(features=64, hidden=32, classes=10, number_loss=None)
    """
    kind = find_model(name)
    names = [option.name for option in kind.options]
    for key, value in options.items():
        if value is not None and key not in names:
            remedy = f"leave it out: its own option is {', '.join(names) or 'none'}"
            raise InputError.of(key, value, f"absent for the model {name}", remedy)
    for size in shape:
        _require_at_least("every number of shape", size, 1, "give the sizes of one sample")
    if number_loss is not None and not kind.predicts_numbers:
        remedy = "choose softmax, or another that predicts numbers"
        raise InputError.of("model.loss", number_loss, f"absent for the {name}", remedy)
    _require_at_least("classes", classes, 2 - (number_loss is not None), "count the labels")
    if kind.takes_pictures and len(shape) != 3:
        remedy = "add an axis for the colours, X[..., None], or choose another model"
        raise InputError.of("shape", shape, f"(height, width, colours) for the {name}", remedy)
    if kind.most_classes is not None and classes > kind.most_classes:
        bound = f"{kind.most_classes} for the model {name}"
        raise InputError.of("classes", classes, bound, "choose another model")
    chosen = {option.name: option.choose(options.get(option.name)) for option in kind.options}
    model: Any = kind.create(shape, classes, **chosen)
    named: NamedCode = model if number_loss is None else replace(model, number_loss=number_loss)
    return named


def _require_at_least(name: str, value: float, least: int, remedy: str) -> None:
    if value < least:
        raise InputError.of(name, value, f"a whole number ≥ {least}", remedy)


# Parameters by name: a tree of arrays as a flat mapping, and back.


def flatten_parameters(params: Params) -> dict[str, NDArray[Any]]:
    """Return the leaves of a tree of parameters by name, as they stand in `model.npz`.

    >>> sorted(flatten_parameters({"w": jnp.zeros(2), "deep": [jnp.zeros(()), jnp.ones(1)]}))
    ['deep/0', 'deep/1', 'w']
    """
    paths = jax.tree_util.tree_flatten_with_path(params)[0]
    return {_name_leaf(path): np.asarray(leaf) for path, leaf in paths}


@lru_cache(64)
def _describe_tree(model: JaxModel) -> tuple[list[str], Any, list[tuple[int, ...]]]:
    """Return names of a model's leaves, the tree they make, and their shapes; once per model."""
    form = jax.eval_shape(model.init, jax.random.key(0))
    paths, tree = jax.tree_util.tree_flatten_with_path(form)
    names = [_name_leaf(path) for path, _ in paths]
    if repeated := [name for name in names if names.count(name) > 1]:
        bound = "that of one parameter: levels of the tree are joined by /"
        raise InputError.of("a parameter's name", repeated[0], bound, "rename one of the two")
    return names, tree, [leaf.shape for _, leaf in paths]


def _name_leaf(path: tuple[Any, ...]) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="/") or "params"


def _require_names(names: Any, arrays: Arrays) -> None:
    if set(names) != set(arrays):
        remedy = "pass the model that was run"
        raise InputError.of("model", sorted(names), f"the one with {sorted(arrays)}", remedy)


@cache
def _compile_init(backend: str) -> Any:
    """Return `model.init` as one program, with parameters of float32 at least, as uploads are.

    It runs once, so that a CPU compiles it without optimising: that takes a quarter of the time.
    """

    def draw(model: JaxModel, key: Array) -> Params:
        def widen(leaf: Array) -> Array:
            return leaf.astype(jnp.promote_types(leaf.dtype, jnp.float32))

        return jax.tree.map(widen, jax.tree.map(jnp.asarray, model.init(key)))

    options = {"xla_backend_optimization_level": 0} if backend == "cpu" else None
    return jax.jit(draw, static_argnums=0, compiler_options=options)


def precision(params: Params) -> Any:
    """Return the floating-point type that the parameters are computed in."""
    leaves = jax.tree.leaves(params)
    return jnp.result_type(*leaves) if leaves else jnp.zeros(()).dtype


# What several models are made of, in JAX.


def draw_layer(key: Array, shape: tuple[int, ...], fan_in: int) -> tuple[Array, Array]:
    """Return weights of `shape` and a bias for its last axis, all U(±1/√fan_in)."""
    for_weight, for_bias = jax.random.split(key)
    bound = 1 / math.sqrt(fan_in)
    weight = jax.random.uniform(for_weight, shape, minval=-bound, maxval=bound)
    return weight, jax.random.uniform(for_bias, shape[-1:], minval=-bound, maxval=bound)


def decide(scores: Array) -> Array:
    """Return the class with the largest score, or the sign where there is one score a row."""
    one_score = scores.ndim == 1 or scores.shape[-1] == 1
    return (scores.reshape(-1) > 0).astype(int) if one_score else jnp.argmax(scores, axis=-1)


def relu_finite(before: Array, kind: Any) -> Array:
    """Return max(before, 0) in the type `kind`, and its largest number for what is not finite.

    ‖h‖² is then not finite, the row does not count, and 0 · h is 0 where products sum over rows.
    """
    largest = float(jnp.finfo(kind).max)  # type: ignore[no-untyped-call]
    return jnp.where(before <= 0, 0, jnp.where(before < largest, before, largest)).astype(kind)


# ‖Σ_t a_tδ_tᵀ‖² is computed as Σ_{t,s} (a_t·a_s)(δ_t·δ_s), which float32 rounds by about 10⁻⁷ of
# (Σ_t ‖a_t‖‖δ_t‖)². Where it is smaller by more than this factor, the products are replaced.
MOST_CANCELLED = 4096


def squared_norms(values: Array) -> Array:
    """Return ‖v‖² of every row; a dense layer's gradient (h, 1) δᵀ has ‖δ‖²(‖h‖² + 1)."""
    return jnp.sum(values**2, axis=1)


def drop_tiny(errors: Array) -> Array:
    """Return the errors, and 0 for those whose square is rounded to 0.

    Else their norm would be 0, and times a row of length 10¹⁹ they would be added whole.
    """
    least = float(jnp.finfo(errors.dtype).tiny) ** 0.5  # type: ignore[no-untyped-call]
    return jnp.where(jnp.abs(errors) < least, 0, errors)


def clip_factors(squared: Array, is_clean: Array, weight: Array, clip: Array) -> Array:
    """Return weight / max(1, ‖g‖/C), and 0 for the rows that must not count."""
    norm = jnp.sqrt(squared)
    scaled = jnp.where(norm > clip, clip / norm, 1) * weight
    return jnp.where(is_clean & jnp.isfinite(squared), scaled, 0)


def keep_counted(values: Array, factor: Array) -> Array:
    """Return the rows whose factor is not 0, and zeros for the others."""
    return jnp.where((factor != 0).reshape(-1, *[1] * (values.ndim - 1)), values, 0)


def scale_counted(values: Array, factor: Array) -> Array:
    """Return the rows whose factor is not 0, each times its factor, and zeros for the others."""
    return keep_counted(values, factor) * factor.reshape(-1, *[1] * (values.ndim - 1))


def _are_all_finite(tree: Params) -> Array:
    return jnp.all(jnp.array([jnp.all(jnp.isfinite(leaf)) for leaf in jax.tree.leaves(tree)], bool))


# A model as a device sees it: what a message says of it, and its gradients in blocks.
#
# The exact integer sum of `privacy.grid` wants every sample's own gradient. They are formed for as
# many samples as fit in a fixed amount of memory; samples × parameters never exists as a whole.

#: What a message says of features beside their name.
_LENS_KEYS = {
    "hog": ("cell", "upright", "colours"),
    "network": ("sha256", "width", "project", "project_seed"),
}
_PERSON_KEY = "rows_per_person"
_LARGEST_SIZE = 1 << 30
_LARGEST_WEIGHT = 1e6
WIDEST = 1e30  # bounds of a number that are larger may not fit into float32
BLOCK_NUMBERS = 1 << 22  # float64 numbers of one block: 32 MiB
SLAB_NUMBERS = 1 << 16  # of a matrix that all rows are multiplied by before the next


class OwnModel(Protocol):
    """A model of the client's own (PyTorch, JAX, …): those methods of `Model` that a release needs.

    It is not trusted to keep samples apart: see `IsolatedModel`.
    """

    def shapes(self) -> Shapes: ...
    def gradients(self, params: Arrays, x: Floats, y: NDArray[Any]) -> Arrays: ...
    def losses(self, params: Arrays, x: Floats, y: NDArray[Any]) -> Floats: ...


@dataclass(frozen=True)
class Form:
    """A model as a message describes it; `own` is the client's own code, named in its node file.

    >>> Form("mlp", (8, 8, 1), 10, {"hidden": 32}).shapes()
    {'b1': (32,), 'b2': (10,), 'w1': (64, 32), 'w2': (32, 10)}
    """

    name: str
    shape: tuple[int, ...]
    classes: int
    options: Mapping[str, Any] = field(default_factory=dict)
    lens: Lens | None = None  # the features that the client computes of its samples first
    rows_per_person: int = 0  # a sample is at most so many rows of one person; 0: it is one row
    target: Regression | None = None  # the number that is predicted; `classes` is then 1

    @property
    def numbers(self) -> int:
        """How many numbers a sample of the client has."""
        return math.prod(self.shape)

    @property
    def features(self) -> int:
        """How many numbers the model takes."""
        return self.numbers if self.lens is None else self.lens.width

    def model(self) -> NamedCode:
        """Return the named model."""
        shape = self.shape if self.lens is None else (self.lens.width,)
        loss = None if self.target is None else self.target.loss
        return build(self.name, shape=shape, classes=self.classes, number_loss=loss, **self.options)

    def shapes(self) -> Shapes:
        """Return names and shapes of the named model's parameters, sorted by name."""
        return self.model().shapes()

    @property
    def needs_jax(self) -> bool:
        """Whether a device computes the named model with JAX."""
        return self.name != OWN and find_model(self.name).needs_jax

    def to_json(self) -> dict[str, Any]:
        """Return the form as it stands in a message."""
        values: dict[str, Any]
        values = {"name": self.name, "shape": list(self.shape), "classes": self.classes}
        values |= {k: list(v) if isinstance(v, tuple) else v for k, v in self.options.items()}
        if self.target is not None:
            values["target"] = list(self.target)
        if self.lens is not None:
            values["features"] = self.lens.name
            values |= {key: getattr(self.lens, key) for key in _LENS_KEYS[self.lens.name]}
        if self.rows_per_person:
            values[_PERSON_KEY] = self.rows_per_person
        return values

    @classmethod
    def from_json(cls, values: Any) -> Form:
        """Read a form from a message; anything that is not one is `Malformed`."""
        name = values.get("name") if isinstance(values, Mapping) else None
        names = (*MODELS, *_OTHERS, OWN)
        if not isinstance(name, str) or name not in names:
            raise Malformed(f"the message's model is not one of {', '.join(names)}")
        options = () if name == OWN else find_model(name).options
        keys = {"name", "shape", "classes", *(option.name for option in options)}
        keys |= {"target"} & values.keys()  # an older client refuses a key that it does not know
        if isinstance(lens_name := values.get("features"), str) and lens_name in _LENS_KEYS:
            keys |= {"features", *_LENS_KEYS[lens_name]}
        if values.keys() - {_PERSON_KEY} != keys:
            raise Malformed(f"the message's model {name} has other keys than {sorted(keys)}")
        shape = values["shape"]
        if not isinstance(shape, list) or not 1 <= len(shape) <= 4:
            raise Malformed("the message's model has no shape of a sample")
        for size in shape:
            _read_size("shape", size)
        classes, target = _read_size("classes", values["classes"]), _read_target(values)
        least = int(_PERSON_KEY in values)  # absent: a sample is one row
        rows_per_person = _read_size(_PERSON_KEY, values.get(_PERSON_KEY, 0), least)
        if math.prod(shape) > _LARGEST_SIZE:
            raise Malformed("the message's model has samples of more than 2³⁰ numbers")
        if (classes == 1) != (target is not None):
            raise Malformed("the message's model has one class without a target, or more with one")
        try:
            chosen = {option.name: option.read(values[option.name]) for option in options}
            lens = _read_features(values)
            form = cls(name, tuple(shape), classes, chosen, lens, rows_per_person, target)
            if name != OWN:
                form.model()  # it refuses what does not fit together
        except InputError as error:
            raise Malformed(f"the message's {error}") from None
        return form


def _read_size(key: str, size: Any, least: int = 1) -> int:
    if type(size) is not int or not least <= size <= _LARGEST_SIZE:
        raise Malformed(f"the message's {key} is no whole number from {least} to 2³⁰")
    return size


def _read_target(values: Mapping[str, Any]) -> Regression | None:
    if "target" not in values:
        return None
    target, is_own = values["target"], values["name"] == OWN
    losses = ["own"] if is_own else ["squared", "huber"]
    if not isinstance(target, list) or len(target) != 3 or target[0] not in losses:
        raise Malformed("the message's target has no loss that its model knows, and no range")
    if not all(type(bound) in (int, float) and abs(bound) <= WIDEST for bound in target[1:]):
        raise Malformed("the message's target has no range of finite numbers up to 1e30")
    if not target[1] < target[2]:
        raise Malformed("the message's target has a range without a number in it")
    return Regression(target[0], float(target[1]), float(target[2]))


def _read_features(values: Mapping[str, Any]) -> Lens | None:
    if "features" not in values:
        return None
    name, shape = values["features"], tuple(values["shape"])
    if name == "network":
        return network.read_message(shape, values)
    cell, *flags = (values[key] for key in _LENS_KEYS[name])
    if type(cell) is not int or not all(type(flag) is bool for flag in flags):
        raise Malformed("the message's features have no whole number (cell) and two flags")
    lens = features.build(name, shape, cell, *flags)
    if lens is None or lens.shape != shape or lens.width > _LARGEST_SIZE:
        raise Malformed("the message's features are not those of a picture")
    return lens


class DeviceModel(NamedTuple):
    """A form, and the client's own code where the form alone does not say what is computed."""

    form: Form
    own_model: OwnModel | None


def as_device(
    model: Model,
    *,
    shape: tuple[int, ...] = (1,),
    classes: int = 2,
    rows_per_person: int = 0,
    target: Regression | None = None,
) -> DeviceModel:
    """Return how a device sees a model. `shape` and `classes` say what an own model cannot."""
    form = replace(model.form(shape, classes), rows_per_person=rows_per_person, target=target)
    return DeviceModel(form, None if isinstance(model.code, NamedCode) else model.code)


@dataclass(frozen=True)
class IsolatedModel:
    """A client's own model, given one sample at a time and copies that nobody can write to.

    What its code makes of a batch may depend on all of it, in the last bits at least. A sample that
    it fails on counts as nothing (NaN): an error or an exit that only some samples cause would tell
    the server of them. A model that works in place must not put a row into what is sent; some code
    can write through read-only memory (`torch.from_numpy`), so every sample has its own copies.
    """

    own_model: OwnModel

    @property
    def keeps_factors(self) -> bool:
        """Whether `factor_blocks` writes no matrix out."""
        return bool(getattr(self.own_model, "keeps_factors", False))

    def factor_blocks(self, params: Arrays, x: Floats, y: Any) -> Iterator[Floats | Products]:
        """Yield the gradients of some samples, as factors where code of ours has found them.

        The form of a sample depends on this sample alone: the two forms are rounded differently, so
        that one sample could otherwise change the bits of another.
        """
        if not hasattr(self.own_model, "factor_gradients"):
            yield self.gradient_block(params, x, y)
            return
        factor: Any = self.own_model.factor_gradients
        ranges = [(0, len(y))]
        while ranges:
            start, stop = ranges.pop()
            try:
                factors, is_alike = factor(params, *_keep_range(x, y, start, stop))
            except KeyboardInterrupt:
                raise
            except BaseException:  # of a sample that the code fails on: NaN, as in a block
                if (start, stop) == (0, len(y)):
                    factor(params, np.zeros_like(x), np.zeros_like(y))  # or of any: raised again
                middle = (start + stop) // 2
                if middle == start:
                    yield np.full((1, _count(params)), np.nan)
                else:
                    ranges += [(middle, stop), (start, middle)]
                continue
            for i in [*np.flatnonzero(~is_alike[start:stop]) + start, stop]:
                if start < i:
                    yield factors.take_rows(start, i)
                if i < stop:
                    yield self.gradient_block(params, x[i : i + 1], y[i : i + 1])
                start = i + 1

    def gradient_block(self, params: Arrays, x: Floats, y: Any) -> Floats:
        """Return the gradients of some samples, NaN where the code fails."""

        def compute(copies: Arrays, row: Floats, label: Any) -> Floats:
            return _join_gradients(params, self.own_model.gradients(copies, row, label), 1)

        return self._compute_alone(compute, _count(params), params, x, y)

    def losses(self, params: Arrays, x: Floats, y: Any) -> Floats:
        """Return the losses, NaN, which counts as the bound, where the code fails."""
        compute = partial(_check_losses, self.own_model)
        return self._compute_alone(compute, 1, params, x, y)[:, 0]

    @staticmethod
    def _compute_alone(
        compute: Callable[[Arrays, Floats, Any], Floats], width: int, params: Arrays, x: Any, y: Any
    ) -> Floats:
        """Return `width` numbers of each sample, from copies; NaN where the code fails."""
        numbers = np.full((len(y), width), np.nan)
        for i in range(len(y)):
            row = slice(i, i + 1)
            try:
                numbers[i] = compute(_copy_all(params), _copy(x[row]), _copy(y[row]))
            except KeyboardInterrupt:
                raise
            except BaseException:  # an exit that a sample causes would tell of it, too
                continue
        return numbers


def _find_code(form: Form, own_model: OwnModel | None) -> NamedCode | IsolatedModel | PersonCode:
    code: NamedCode | IsolatedModel
    if form.name != OWN:
        code = form.model()
    else:
        assert own_model is not None, "the device has refused such a request before"
        code = IsolatedModel(own_model)
    if not form.rows_per_person:
        return code
    from sottovoce.models.person import PersonCode

    return PersonCode(code, form.rows_per_person, form.target is not None)


def rows_per_block(numbers: int) -> int:
    """Return how many samples are worked on at a time, each of which takes so many numbers."""
    return max(1, BLOCK_NUMBERS // max(1, numbers))


def gradient_blocks(
    form: Form, params: Arrays, x: Floats, y: Any, own_model: OwnModel | None = None
) -> Iterator[Floats | Products]:
    """Yield the per-sample gradients at `params`, block by block, for `grid.clipped_sum`.

    Those of dense layers are not written out. Numbers below 2⁻²⁵⁰ count as 0: products of them
    would be subnormal, and the time that takes would tell of the sample.
    """
    model = _find_code(form, own_model)
    params = {name: flush_tiny(leaf) for name, leaf in params.items()}
    factors = sum(sum(leaf.shape) for leaf in params.values())
    numbers = factors if model.keeps_factors else _count(params)
    rows = rows_per_block(numbers * max(1, form.rows_per_person))
    for start in range(0, len(y), rows):
        chunk, labels = flush_tiny(x[start : start + rows]), y[start : start + rows]
        with np.errstate(all="ignore"):
            if isinstance(model, IsolatedModel):
                yield from model.factor_blocks(params, chunk, labels)
            else:
                yield model.gradient_block(params, chunk, labels)


def gradient_matrix(
    form: Form, params: Arrays, x: Floats, y: Any, own_model: OwnModel | None = None
) -> Floats:
    """Return all per-sample gradients, (samples, parameters): for few samples or a small model."""
    with np.errstate(all="ignore"):
        blocks = gradient_blocks(form, params, x, y, own_model)
        return np.concatenate([Products.of(block).write_out() for block in blocks])


def sample_losses(
    form: Form, params: Arrays, x: Floats, y: Any, own_model: OwnModel | None = None
) -> Floats:
    """Return F(D_m, w) of every sample."""
    model, losses = _find_code(form, own_model), []
    rows = rows_per_block(_count(params) * max(1, form.rows_per_person))
    for start in range(0, len(y), rows):
        chunk, labels = x[start : start + rows], y[start : start + rows]
        with np.errstate(all="ignore"):
            losses.append(model.losses(params, chunk, labels))
    return np.concatenate(losses)


def require_rows(
    own_model: OwnModel, params: Arrays, samples: int, features: int, label: Any = np.int64
) -> None:
    """Raise if a client's own model does not give every row its own gradient and loss.

    It is asked on rows of zeros before anything is booked, so that the answer cannot depend on the
    client's samples.
    """
    count = min(samples, rows_per_block(_count(params)))
    x, y = _copy(np.zeros((count, features))), _copy(np.zeros(count, label))
    copies = _copy_all(params)  # as a release gives them
    with np.errstate(all="ignore"):
        _join_gradients(params, own_model.gradients(copies, x, y), count)
        _check_losses(own_model, copies, x, y)


def multiply_rows(x: Floats, w: Floats) -> Floats:
    """Return x @ w, every row multiplied by itself: it depends neither on position nor on company.

    One product of all rows rounds a row differently at the edge of a block than in the middle. A
    large w is gone through in slabs that stay in the cache for all rows.
    """
    product = np.empty((len(x), w.shape[1]))
    width = max(1, SLAB_NUMBERS // max(1, len(w)))
    for j in range(0, w.shape[1], width):
        product[:, j : j + width] = np.matmul(x[:, None, :], w[:, j : j + width])[:, 0]
    return product


def _count(params: Arrays) -> int:
    return sum(leaf.size for leaf in params.values())


def _keep_range(x: Floats, y: Any, start: int, stop: int) -> tuple[Floats, Any]:
    """Return as many samples as given, zeros but for a range: one program computes all of them."""
    is_kept = (np.arange(len(y)) >= start) & (np.arange(len(y)) < stop)
    return np.where(is_kept[:, None], x, 0), np.where(is_kept, y, 0)


def _copy_all(params: Arrays) -> Arrays:
    return {name: _copy(leaf) for name, leaf in params.items()}


def _copy(array: NDArray[Any]) -> NDArray[Any]:
    """Return a copy over immutable bytes: unlike a flag, that cannot be taken back."""
    return np.frombuffer(array.tobytes(), array.dtype).reshape(array.shape)


def _check_losses(own_model: OwnModel, params: Arrays, x: Floats, y: Any) -> Floats:
    losses = np.asarray(own_model.losses(params, x, y), np.float64)
    if losses.shape != y.shape:
        raise InputError.of("losses", losses.shape, f"{y.shape}, one a sample", "mend model.own")
    return losses


def _join_gradients(params: Arrays, gradients: Mapping[str, Any], samples: int) -> Floats:
    """Return gradients as [samples, parameters] in the order of the names."""
    leaves = []
    for name in sorted(params):
        leaf, wanted = np.asarray(gradients[name], np.float64), (samples, *params[name].shape)
        if leaf.shape != wanted:  # as many numbers in another order would mix the samples
            remedy = "mend model.own"
            raise InputError.of(f"gradient {name}", leaf.shape, f"{wanted}, a row a sample", remedy)
        leaves.append(leaf.reshape(samples, params[name].size))
    return np.concatenate(leaves, axis=1)
