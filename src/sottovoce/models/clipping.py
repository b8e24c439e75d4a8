"""Compiled sums over many samples: clipped gradients, losses, correct predictions.

A clipped sum is steps 6–9 of Algorithm 1 (UDP) and the average over clients in one go: a round is
linear in the clipped gradients, so a row may carry the weight of its client. No samples ×
parameters array ever exists. A dense layer's per-sample gradient is an outer product h δᵀ, so its
norm is ‖h‖‖δ‖ and the scaled sum is one matrix product; a convolution's gradient is small (25 ×
colours × channels) and is formed for one chunk of rows at a time, tile by tile; a custom model's
gradients are formed for as many rows as fit in a fixed amount of memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.extend.core import Literal
from jax.sharding import Mesh

from sottovoce.errors import InputError
from sottovoce.models.base import MOST_CANCELLED, Inspected, JaxModel, Params, precision
from sottovoce.models.metrics import REGRESSION_METRICS, compute_auprc, compute_auroc

# Rows in chunks of fixed size: memory follows the chunk, not the data, and shapes stay static.

# A CPU wants a chunk that stays in its cache between the forward and the backward product
# (the MNIST round is fastest around 1,000 rows of 784+2·256 floats: 5 MB); an accelerator wants
# few, large kernels.
CPU_BYTES = 5 << 20
DEVICE_BYTES = 512 << 20
EVEN_ROWS = 256  # of an accelerator's chunk: a multiple


def rows_per_chunk(numbers_a_row: int, item_bytes: int) -> int:
    """Return how many rows to take at once when each needs `numbers_a_row` temporary numbers."""
    budget = CPU_BYTES if jax.default_backend() == "cpu" else DEVICE_BYTES
    return max(1, budget // max(1, numbers_a_row * item_bytes))


def fold(
    step: Callable[[Any, Array, Array], Any], x: Any, y: Array, weight: Array, rows: int
) -> Any:
    """Return Σ over chunks of `step(x, y, weight)`, each at most `rows` rows of the three.

    x may be a tree of arrays that all have a row for each label.

    The last chunk is moved back to end with the data, and the rows it shares with the one before
    get weight 0 there: every chunk has the same shape and nothing is padded or copied. So `step`
    must give rows of weight 0 no influence at all.

    >>> x = jnp.arange(7.0)
    >>> float(fold(lambda x, y, weight: jnp.sum(x * weight), x, x, jnp.ones(7), rows=3))
    21.0
    """
    n = y.shape[0]
    if n <= rows:
        return step(x, y, weight)
    chunks = -(-n // rows)
    rows = -(-n // chunks)  # even chunks, so that the last one repeats few rows
    if jax.default_backend() != "cpu":  # which sums over parts of the rows, and would pad others
        rows = min(n, -(-rows // EVEN_ROWS) * EVEN_ROWS)
        chunks = -(-n // rows)

    def add(total: Any, index: Array) -> tuple[Any, None]:
        start = jnp.minimum(index * rows, n - rows)
        cut = partial(jax.lax.dynamic_slice_in_dim, start_index=start, slice_size=rows)
        xs, ys, ws = jax.tree.map(cut, (x, y, weight))
        is_new = start + jnp.arange(rows) >= index * rows
        return jax.tree.map(jnp.add, total, step(xs, ys, jnp.where(is_new, ws, 0))), None

    shapes = jax.eval_shape(step, *jax.tree.map(lambda a: a[:rows], (x, y, weight)))
    zero = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
    return jax.lax.scan(add, zero, jnp.arange(chunks))[0]


# Per-sample gradients of a custom model held at once; the rows are limited too, because what the
# model needs besides its gradients is not known.
GENERIC_BYTES = 64 << 20
GENERIC_ROWS = 1024


def inspect(model: JaxModel, x: Array, dtype: Any = jnp.float32) -> Inspected:
    """Return rows ready for `clipped_sum`; a custom model gets its rows as they are.

    On an accelerator the large products of mlp and cnn take bfloat16 and add up in float32: 8 bits
    of a number's mantissa instead of TF32's 11, twice as fast. Norms are those of what was so
    rounded. Errors that are multiplied with rows or hidden layers are rounded after they were cut,
    each by at most one part in 2⁸: so they are cut to C·(1 − 2⁻⁸) there, and no row exceeds C.

    >>> from sottovoce.models.svm import Svm
    >>> rows = inspect(Svm(2), jnp.array([[3.0, 4.0], [jnp.nan, 1.0]]))
    >>> rows.x.tolist(), rows.is_clean.tolist(), rows.squared.tolist()
    ([[3.0, 4.0], [0.0, 1.0]], [True, False], [26.0, 2.0])
    """
    if not model.cleans_rows:
        return Inspected(x, jnp.ones(x.shape[0], bool), jnp.ones(x.shape[0], dtype))
    x = x.astype(product_type(model, dtype))  # first: what is finite may round to what is not
    is_finite = jnp.isfinite(x)
    x = jnp.where(is_finite, x, 0)
    squared = jnp.sum(x.astype(dtype) ** 2, axis=1) + 1
    # A finite row whose square is not has no finite gradient's norm either: nothing is lost.
    return Inspected(x, jnp.all(is_finite, axis=1), squared)


def product_type(model: JaxModel, dtype: Any) -> Any:
    """Return the type of large products: bfloat16 for mlp and cnn on an accelerator."""
    fast = model.uses_bfloat16 and jax.default_backend() != "cpu"
    return jnp.bfloat16 if fast and dtype == jnp.float32 else dtype


def clipped_sum(
    model: JaxModel,
    params: Params,
    x: Array | Inspected,
    y: Array,
    weight: Array,
    clip: Array | float,
) -> Params:
    """Return Σ_m weight_m · g_m / max(1, ‖g_m‖/C), the norm taken over all parameters together.

    g_m = ∇F(D_m, w) is the gradient of `model.loss` of row m alone. What each row adds, divided by
    its weight, has norm ≤ C up to rounding (for C ≥ 1e-15), whatever the row holds:

    - a row of weight 0 adds exactly nothing, even if it is garbage;
    - a row whose gradient, or its squared norm, is not finite in the precision at hand adds the
      zero vector: one bad row must neither spoil the sum nor be noticed by an error;
    - clip = inf cuts nothing.

    x are rows, or rows that have been inspected: where many rounds look at the same ones, that
    is done once. Pure, and fit for `jax.jit` and `jax.vmap` (several runs over the same rows:
    params, weight and clip batched, x and y shared). Works in the precision of `params`.

    >>> from sottovoce.models.svm import Svm
    >>> params = {"w": jnp.zeros(2), "b": jnp.zeros(())}
    >>> x, y = jnp.array([[4.0, 2.0], [0.0, 0.0]]), jnp.array([1, 0])
    >>> total = clipped_sum(Svm(2, kappa=0.0), params, x, y, jnp.ones(2), clip=1.0)
    >>> [round(float(number), 4) for number in (*total["w"], total["b"])]
    [-0.8729, -0.4364, 0.7818]
    """
    if isinstance(clip, int | float) and not clip > 0:
        raise InputError.of("clip", clip, "a number > 0", "inf means no clipping")
    return _clipped_sum(model, params, x, y, weight, clip)


@partial(jax.jit, static_argnums=0)
def gradient_norms(model: JaxModel, params: Params, x: Array, y: Array) -> Array:
    """Return ‖g_m‖ of every row over all parameters together, unclipped, in bounded memory."""

    def norm(row: tuple[Array, Array]) -> Array:
        gradient = jax.grad(model.sample_loss)(params, *row)
        return jnp.sqrt(sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(gradient)))

    size = sum(leaf.size for leaf in jax.tree.leaves(params))
    rows = min(_rows_per_generic_chunk(size, precision(params)), x.shape[0])
    norms: Array = jax.lax.map(norm, (x, y), batch_size=rows)
    return norms


@partial(jax.jit, static_argnums=0)
def _clipped_sum(
    model: JaxModel,
    params: Params,
    x: Array | Inspected,
    y: Array,
    weight: Array,
    clip: Array | float,
) -> Params:
    dtype = precision(params)
    weight, clip = weight.astype(dtype), jnp.asarray(clip, dtype)
    on_cpu = jax.default_backend() == "cpu"
    if product_type(model, dtype) != dtype or (dtype == jnp.float32 and not on_cpu):
        clip = clip * (1 - 2.0**-8)  # what is rounded to bfloat16 or TF32 after it was cut is ≤ C
    numbers = model.numbers_per_row()
    if numbers is None:
        plain = x.x if isinstance(x, Inspected) else x
        rows = find_dense_layers(model, model.prepare(params), plain, y).rows_per_chunk(dtype)
    else:
        rows = rows_per_chunk(numbers, dtype.itemsize)
    step: Callable[[Inspected, Array, Array], Params]
    step = partial(model.sum_chunk, model.prepare(params), clip)
    if isinstance(x, Inspected):
        total = fold(step, x, y, weight, rows)
    else:  # inspected chunk by chunk: no copy of all the rows is made
        total = fold(lambda x, y, w: step(inspect(model, x, dtype), y, w), x, y, weight, rows)
    return model.restore_layout(total)


def _rows_per_generic_chunk(numbers: int, dtype: Any) -> int:
    """Return how many rows to take at once where each gradient has so many numbers."""
    return int(min(max(1, GENERIC_BYTES // max(1, numbers * dtype.itemsize)), GENERIC_ROWS))


# Per-sample gradients of a custom model. Its functions are traced for one row; where a parameter is
# used once, in a product x @ w, its gradient is a sum of outer products aᵀδ of the layer's inputs a
# and the loss's derivatives δ by its outputs. A zero that is added to the outputs has the
# derivative δ. Gradients of all other parameters are written out.


class DenseLayer(NamedTuple):
    """A product with a parameter: which axes of both are summed over, and shapes for one row."""

    side: int  # of the parameter in the product
    axes: tuple[tuple[int, ...], tuple[int, ...]]  # of the inputs and of the parameter
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]

    def arrange_inputs(self, inputs: Array) -> Array:
        """Return the inputs of one row as [T, in]."""
        summed = self.axes[0]
        free = [axis for axis in range(len(self.inputs)) if axis not in summed]
        width = math.prod(self.inputs[axis] for axis in summed)
        return jnp.transpose(inputs, (*free, *summed)).reshape(-1, width)

    def arrange_errors(self, errors: Array, vectors: int) -> Array:
        """Return the derivatives by the outputs of one row as [T, out]."""
        return errors.reshape(-1, vectors).T if self.side == 0 else errors.reshape(vectors, -1)

    def restore_shape(self, matrix: Array, shape: tuple[int, ...]) -> Array:
        """Return a gradient [in, out] in the shape of the parameter."""
        order = (*self.axes[1], *(a for a in range(len(shape)) if a not in self.axes[1]))
        return matrix.reshape([shape[axis] for axis in order]).transpose(np.argsort(order))


@dataclass(frozen=True)
class _Marked:
    """A parameter on its way through a traced function."""

    value: Any
    index: int


class DenseLayers(NamedTuple):
    """How the gradients of rows are computed: which parameters are those of dense layers."""

    traced: Any  # the loss of one row
    layers: dict[int, DenseLayer]  # by the position of their parameter among all leaves
    tree: Any
    shapes: tuple[tuple[int, ...], ...]

    def compute_row(self, params: Params, row: Array, label: Array) -> list[Any]:
        """Return the gradient of one row by each leaf: written out, or its inputs and errors."""
        leaves, dtype = jax.tree.leaves(params), precision(params)
        zeros = {i: jnp.zeros(layer.outputs, dtype) for i, layer in self.layers.items()}
        written = {i: leaf for i, leaf in enumerate(leaves) if i not in self.layers}

        def loss(zeros: Any, written: Any) -> tuple[Array, Any]:
            inputs: dict[int, Array] = {}

            def multiply(equation: Any, values: list[Any], side: int) -> Array:
                index = values[side].index
                if index in zeros:
                    inputs[index] = self.layers[index].arrange_inputs(values[1 - side])
                output: Array = _bind(equation, values)[0]
                return output + zeros[index] if index in zeros else output

            marked = [_Marked(written.get(i, leaf), i) for i, leaf in enumerate(leaves)]
            traced = self.traced
            (value,) = _replay(traced.jaxpr, traced.consts, [*marked, row, label], multiply)
            return _unmark(value), inputs

        (errors, gradients), inputs = jax.grad(loss, argnums=(0, 1), has_aux=True)(zeros, written)
        for i, layer in self.layers.items():
            gradients[i] = inputs[i], layer.arrange_errors(errors[i], len(inputs[i]))
        return [gradients[i] for i in range(len(leaves))]

    def measure_rows(self, gradients: list[Any]) -> tuple[list[Any], Array]:
        """Return gradients to add, those given up to rounding, and ‖g‖² of every row.

        Rows with so many outer products that a sum of them is less work get the sum.
        """
        measured, squared = [], cast(Any, 0.0)
        for leaf in gradients:
            vectors = leaf[0].shape[1] if isinstance(leaf, tuple) else 0
            if vectors > 1 and 2 * vectors**2 > leaf[0].shape[2] * leaf[1].shape[2]:
                leaf, vectors = jnp.einsum("nti,nto->nio", *leaf), 0
            if vectors == 0:
                square = jnp.sum(leaf**2, axis=tuple(range(1, leaf.ndim)))
            elif vectors == 1:
                inputs, errors = leaf = _balance_products(*leaf)
                square = jnp.sum(inputs**2, axis=(1, 2)) * jnp.sum(errors**2, axis=(1, 2))
            else:
                leaf, square = _measure_products(*_balance_products(*leaf))
            measured.append(leaf)
            squared += square
        return measured, squared

    def add_rows(self, gradients: list[Any], factor: Array) -> Params:
        """Return Σ_m factor_m · g_m in the tree of the parameters."""
        summed = []
        for i, (leaf, shape) in enumerate(zip(gradients, self.shapes, strict=True)):
            if isinstance(leaf, tuple):
                inputs, errors = leaf[0], leaf[1] * factor[:, None, None].astype(leaf[1].dtype)
                exact = "highest" if inputs.shape[1] > 1 else None  # the sum of one row may cancel
                total = jnp.einsum("nti,nto->io", inputs, errors, precision=exact)
            else:
                total = jnp.tensordot(factor.astype(leaf.dtype), leaf, 1)
            restore = self.layers[i].restore_shape if i in self.layers else jnp.reshape
            summed.append(restore(total, shape))
        return jax.tree.unflatten(self.tree, summed)

    def rows_per_chunk(self, dtype: Any) -> int:
        """Return how many rows to take at once."""
        layers = self.layers
        numbers = sum(math.prod(s) for i, s in enumerate(self.shapes) if i not in layers)
        numbers += sum(math.prod(d.inputs) + 2 * math.prod(d.outputs) for d in layers.values())
        return _rows_per_generic_chunk(numbers, dtype)


def _balance_products(inputs: Array, errors: Array) -> tuple[Array, Array]:
    """Return (a/s, sδ) for every product, with a power of two s that brings a to about 1.

    The products are the same bit for bit, and no square of a factor is rounded to 0 or to inf where
    that of the gradient is not: such a row would be added whole. One s for all products of a row
    would lose the short ones beside a long one that adds nothing.
    """
    largest = jnp.max(jnp.abs(inputs), axis=2, keepdims=True)
    scale = jnp.ldexp(jnp.ones_like(largest), jnp.frexp(largest)[1])
    return inputs / scale, errors * scale.astype(errors.dtype)


def _measure_products(inputs: Array, errors: Array) -> tuple[tuple[Array, Array], Array]:
    """Return (a, δ) and ‖Σ_t a_tδ_tᵀ‖² = Σ_{t,s} (a_t·a_s)(δ_t·δ_s) of every row.

    Where products cancel, rounding may make the norm too small, or leave more than C of a gradient
    that is 0: such rows get orthonormal a, with which ‖g‖ = ‖δ‖ (in a loop, as in `sum_chunk`).
    """
    multiply, pair = partial(jnp.einsum, precision="highest"), (inputs.astype(errors.dtype), errors)
    terms = multiply("nti,nsi->nts", inputs, inputs) * multiply("nto,nso->nts", errors, errors)
    lengths = jnp.sum(jnp.sqrt(jnp.diagonal(terms, axis1=1, axis2=2)), axis=1)
    squared = jnp.sum(terms, axis=(1, 2))
    is_lost = squared < lengths**2 / MOST_CANCELLED

    def separate(_: Any) -> tuple[Any, Array]:
        basis, triangle = jnp.linalg.qr(pair[0].mT)
        factors, vectors = (basis.mT, multiply("nkt,nto->nko", triangle, errors)), inputs.shape[1]
        padded = [jnp.pad(part, ((0, 0), (0, vectors - part.shape[1]), (0, 0))) for part in factors]
        return tuple(map(partial(jnp.where, is_lost[:, None, None]), padded, pair)), jnp.array(True)

    pair, _ = jax.lax.while_loop(lambda state: ~state[1], separate, (pair, ~jnp.any(is_lost)))
    return pair, jnp.where(is_lost, jnp.sum(pair[1] ** 2, axis=(1, 2)), squared)


def find_dense_layers(model: JaxModel, params: Params, x: Array, y: Array) -> DenseLayers:
    """Trace the loss of one row, and find the parameters that are used once, in a product."""
    leaves, tree = jax.tree.flatten(params)
    struct: Any = jax.ShapeDtypeStruct
    row, label = (struct(array.shape[1:], array.dtype) for array in (x, y))
    traced = jax.make_jaxpr(model.sample_loss)(params, row, label)
    products: dict[int, list[DenseLayer]] = {}
    others: set[int] = set()

    def record(equation: Any, values: list[Any], side: int) -> Array:
        summed, _ = equation.params["dimension_numbers"]
        shapes = values[1 - side].shape, equation.outvars[0].aval.shape
        layer = DenseLayer(side, (summed[1 - side], summed[side]), *shapes)
        products.setdefault(values[side].index, []).append(layer)
        return cast(Array, _bind(equation, values)[0])

    def trace(*values: Any) -> Any:
        arguments = [_Marked(leaf, i) for i, leaf in enumerate(values[: len(leaves)])]
        arguments += values[len(leaves) :]
        outputs = _replay(traced.jaxpr, traced.consts, arguments, record, others)
        return [_unmark(output) for output in outputs]

    jax.eval_shape(trace, *leaves, row, label)
    layers = {i: d[0] for i, d in products.items() if len(d) == 1 and i not in others}
    layers = {i: layer for i, layer in layers.items() if math.prod(layer.inputs + layer.outputs)}
    return DenseLayers(traced, layers, tree, tuple(leaf.shape for leaf in leaves))


def _replay(
    jaxpr: Any, consts: Any, values: Any, multiply: Any, others: set[int] | None = None
) -> list[Any]:
    """Evaluate a traced function; `multiply` computes products with a parameter.

    `others` collects the parameters that are used in any other way. A parameter that an inner
    function returns stays marked: its next use counts, too.
    """
    values_of = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *values], strict=True))

    def read(name: Any) -> Any:
        return name.val if isinstance(name, Literal) else values_of[name]

    for equation in jaxpr.eqns:
        arguments = [read(name) for name in equation.invars]
        marked = [side for side, value in enumerate(arguments) if isinstance(value, _Marked)]
        name = equation.primitive.name
        is_product = name == "dot_general" and not equation.params["dimension_numbers"][1][0]
        if name in ("jit", "pjit"):  # the second before JAX 0.7
            inner = equation.params["jaxpr"]
            outputs = _replay(inner.jaxpr, inner.consts, arguments, multiply, others)
        elif is_product and len(marked) == 1:
            outputs = [multiply(equation, arguments, marked[0])]
        else:
            if others is not None:
                others.update(arguments[side].index for side in marked)
            outputs = _bind(equation, arguments)
        values_of.update(zip(equation.outvars, outputs, strict=True))
    return [read(name) for name in jaxpr.outvars]


def _unmark(value: Any) -> Any:
    return value.value if isinstance(value, _Marked) else value


def _bind(equation: Any, values: list[Any]) -> list[Any]:
    primitive = equation.primitive
    options, functions = primitive.get_bind_params(equation.params), ()
    if isinstance(options, tuple):  # before JAX 0.10
        functions, options = options
    with equation.ctx.manager:
        outputs = primitive.bind(*functions, *map(_unmark, values), **options)
    return list(outputs) if primitive.multiple_results else [outputs]


# Per-sample gradients and losses for a device, one sample after another.


@partial(jax.jit, static_argnums=0)
def compute_factors_alone(model: JaxModel, params: Params, x: Array, y: Array) -> list[Any]:
    """Return the gradient of every row by each leaf, each row alone, as the factors of products.

    They are [rows, a] and [rows, b] of a·b numbers in the order of the parameter.
    """
    dense = find_dense_layers(model, params, x, y)

    def factor(i: int, leaf: Any) -> tuple[Array, Array]:
        shape, ones = dense.shapes[i], jnp.ones(1, precision(params))
        if not isinstance(leaf, tuple):
            return ones, leaf.reshape(-1)
        inputs, errors = leaf
        if len(inputs) > 1 or len(shape) != 2:
            matrix = jnp.einsum("ti,to->io", inputs, errors)
            return ones, dense.layers[i].restore_shape(matrix, shape).reshape(-1)
        is_first = dense.layers[i].axes[1] == (0,)  # whether the parameter is [in, out]
        return (inputs[0], errors[0]) if is_first else (errors[0], inputs[0])

    def compute(row: tuple[Array, Array]) -> list[tuple[Array, Array]]:
        return [factor(i, leaf) for i, leaf in enumerate(dense.compute_row(params, *row))]

    factors: list[Any] = jax.lax.map(compute, (x, y))
    return factors


@partial(jax.jit, static_argnums=0)
def compute_gradients_alone(model: JaxModel, params: Params, x: Array, y: Array) -> Params:
    """Return the gradient of every row, each computed alone."""
    prepared = model.prepare(params)
    return jax.lax.map(lambda row: model.sample_gradient(prepared, *row), (x, y))


@partial(jax.jit, static_argnums=0)
def compute_losses_alone(model: JaxModel, params: Params, x: Array, y: Array) -> Array:
    """Return the loss of every row, each computed alone."""
    losses: Array = jax.lax.map(lambda row: model.sample_loss(params, *row), (x, y))
    return losses


# How good a model is on a set of rows.


def evaluate(model: JaxModel, params: Params, x: Array, y: Array) -> tuple[Array, Array]:
    """Return V(w) = (1/n) Σ_m F(D_m, w), and the share of the rows that is predicted right.

    Compiled, in chunks of fixed size, and fit for `jax.vmap` over params. A row whose loss is not
    finite makes the mean so: unlike a training row, a row of a public set may be complained of.
    """
    if x.shape[0] == 0:
        raise InputError.of("x", x.shape, "at least one row", "evaluate on rows that exist")
    return cast(tuple[Array, Array], _evaluate(model, params, x, y))


@partial(jax.jit, static_argnums=0, static_argnames="rows")
def _evaluate(
    model: JaxModel,
    params: Params,
    x: Array,
    y: Array,
    weight: Array | None = None,
    rows: int | None = None,
) -> tuple[Array, Array]:
    """Return the sums of loss and correct answers over rows of weight > 0, divided by `rows`."""
    dtype, rows = precision(params), x.shape[0] if rows is None else rows
    numbers = model.numbers_per_evaluated_row() or max(1, x.size // x.shape[0])
    prepared = model.prepare(params)

    def step(x: Array, y: Array, weight: Array) -> tuple[Array, Array]:
        losses, correct = model.judge(prepared, x.astype(dtype), y)
        is_counted = weight > 0
        return jnp.sum(jnp.where(is_counted, losses, 0)), jnp.sum(is_counted & correct, dtype=dtype)

    weight = jnp.ones(x.shape[0], dtype) if weight is None else weight.astype(dtype)
    loss, correct = fold(step, x, y, weight, rows_per_chunk(numbers, dtype.itemsize))
    return loss / rows, correct / rows


@partial(jax.jit, static_argnums=0)
def answer(model: JaxModel, params: Params, x: Array) -> tuple[Array, Array]:
    """Return the class and the scores of every row, in chunks of fixed size."""

    def answer_row(row: Array) -> tuple[Array, Array]:
        return model.predict(params, row[None])[0], model.apply(params, row[None])[0]

    answers: tuple[Array, Array] = jax.lax.map(
        answer_row, x.astype(precision(params)), batch_size=min(x.shape[0], 1024)
    )
    return answers


@partial(jax.jit, static_argnums=0)
def answer_models(
    model: JaxModel, models: tuple[Params, ...], x: Array, y: Array, others: Array | None
) -> tuple[Array, Array, Array, Array, Array | None]:
    """Return loss, accuracy, classes and scores of the rows, and scores of others, of each model.

    Models that share their rows are asked together: an accelerator then waits once for all.
    """

    def answer_all(params: Params) -> Any:
        other_scores = None if others is None else answer(model, params, others)[1]
        return *evaluate(model, params, x, y), *answer(model, params, x), other_scores

    answers: tuple[Array, Array, Array, Array, Array | None]
    answers = jax.vmap(answer_all)(jax.tree.map(lambda *leaves: jnp.stack(leaves), *models))
    return answers


def judge_public(
    model: JaxModel,
    params: Params,
    x: Array,
    y: Array,
    metric: str | None,
    mesh: Mesh | None = None,
) -> tuple[Array, Array, Array]:
    """Return loss and accuracy on public rows, and what schedules and `server.choose` make small.

    That is the loss, or with a metric of the plan what is missing of it. With `mesh` each of its
    devices looks at a part of the rows.
    """
    if mesh is None:
        loss, accuracy = evaluate(model, params, x, y)
        answers = answer(model, params, x) if metric is not None else None
    else:
        loss, accuracy, answers = _judge_part(model, params, x, y, mesh, metric is not None)
    if metric is None or answers is None:
        return loss, accuracy, loss
    predicted, scores = answers
    scores = scores.reshape(scores.shape[0], -1)
    if scores.shape[1] == 1:
        scores = jnp.concatenate([jnp.zeros_like(scores), scores], axis=1)
    return loss, accuracy, find_shortfall(metric, y, predicted, scores)


def _judge_part(
    model: JaxModel, params: Params, x: Array, y: Array, mesh: Mesh, has_metric: bool
) -> tuple[Array, Array, tuple[Array, Array] | None]:
    """Return `evaluate` and, with a metric, `answer` of all rows; this device computes its part."""
    rows, size, axis = len(y), -(-len(y) // mesh.size), mesh.axis_names[0]
    first = size * jax.lax.axis_index(axis)
    start = jnp.minimum(first, rows - size)  # the last parts are moved back to end with the rows
    x, y = (jax.lax.dynamic_slice_in_dim(leaf, start, size) for leaf in (x, y))
    where = start + jnp.arange(size)
    is_new = where >= first
    sums: Any = _evaluate(model, params, x, y, is_new, rows=rows)
    if has_metric:
        for part in answer(model, params, x):
            part = jnp.where(is_new.reshape(-1, *[1] * (part.ndim - 1)), part, 0)
            sums += (jnp.zeros((rows, *part.shape[1:]), part.dtype).at[where].add(part),)
    loss, accuracy, *answers = cast(Any, jax.lax).psum(sums, axis)
    return loss, accuracy, (answers[0], answers[1]) if has_metric else None


@partial(jax.jit, static_argnums=0)
def find_shortfall(metric: str, y: Array, predicted: Array, scores: Array) -> Array:
    """Return 1 − metric, or the metric where less is better; NaN if a score is not finite.

    >>> scores = jnp.array([[0.0, -1.0], [0.0, 1.0], [0.0, 2.0]])
    >>> float(find_shortfall("auroc", jnp.array([0, 1, 0]), jnp.array([0, 1, 1]), scores))
    0.5
    """
    rows, classes = scores.shape
    if metric in REGRESSION_METRICS:
        missed = y - scores[:, -1]
        kinds = {"mae": jnp.abs(missed), "rmse": missed**2, "r2": missed**2 / jnp.var(y)}
        shortfall = jnp.mean(kinds[metric])
        return jnp.sqrt(shortfall) if metric == "rmse" else shortfall
    counts = jnp.zeros(classes).at[y].add(1)
    logs, is_label = jax.nn.log_softmax(scores), jnp.arange(classes) == y[:, None]
    if metric == "log_loss":
        shortfall = -jnp.mean(jnp.sum(jnp.where(is_label, logs, 0), axis=1))
    elif metric == "brier":
        half = 0.5 if classes == 2 else 1.0
        shortfall = half * jnp.mean(jnp.sum((jnp.exp(logs) - is_label) ** 2, axis=1))
    elif metric == "accuracy":
        shortfall = 1 - jnp.mean(predicted == y)
    elif metric == "balanced_accuracy":
        recalls = jnp.zeros(classes).at[y].add(predicted == y) / counts
        shortfall = 1 - jnp.mean(recalls, where=counts > 0)
    else:
        area = {"auroc": compute_auroc, "auprc": compute_auprc}[metric]
        ordered = scores - scores[:, ::-1] if classes == 2 else logs
        areas = jax.vmap(lambda k: area(y == k, ordered[:, k], jnp))(jnp.arange(classes))
        rarer = jnp.where(counts[1] <= counts[0], 1, 0)  # of two classes
        is_judged = jnp.arange(classes) == rarer if classes == 2 else (counts > 0) & (counts < rows)
        shortfall = 1 - jnp.mean(areas, where=is_judged)
    return jnp.where(jnp.all(jnp.isfinite(scores)), shortfall, jnp.nan)


def compute_losses(model: JaxModel, params: Params, x: Array, y: Array) -> Array:
    """Return F(D_m, w) of every row, in chunks of fixed size."""
    losses: Array = jax.lax.map(
        lambda row: model.sample_loss(params, *row),
        (x.astype(precision(params)), y),
        batch_size=min(x.shape[0], 1024),
    )
    return losses
