"""Compiled sums over many samples: clipped gradients, losses, correct predictions.

A clipped sum is steps 6–9 of Algorithm 1 (UDP) and the average over clients in one go: a round is
linear in the clipped gradients, so a row may carry the weight of its client. No samples ×
parameters array ever exists. A dense layer's per-sample gradient is an outer product h δᵀ, so its
norm is ‖h‖‖δ‖ and the scaled sum is one matrix product; a convolution's gradient is small (25 ×
colours × channels) and is formed for one chunk of rows at a time, tile by tile; a custom model's
gradients are formed for as many rows as fit in a fixed amount of memory.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from sottovoce.errors import InputError
from sottovoce.models.base import Inspected, JaxModel, Params, precision
from sottovoce.models.metrics import REGRESSION_METRICS, compute_auprc, compute_auroc

# Rows in chunks of fixed size: memory follows the chunk, not the data, and shapes stay static.

# A CPU wants a chunk that stays in its cache between the forward and the backward product
# (the MNIST round is fastest around 1,000 rows of 784+2·256 floats: 5 MB); an accelerator wants
# few, large kernels.
CPU_BYTES = 5 << 20
DEVICE_BYTES = 256 << 20


def rows_per_chunk(numbers_a_row: int, item_bytes: int) -> int:
    """Return how many rows to take at once when each needs `numbers_a_row` temporary numbers.

    >>> rows_per_chunk(784 + 2 * 256, 4) >= 1000
    True
    """
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

    def add(total: Any, index: Array) -> tuple[Any, None]:
        start = jnp.minimum(index * rows, n - rows)
        xs, ys, ws = jax.tree.map(
            lambda a: jax.lax.dynamic_slice_in_dim(a, start, rows), (x, y, weight)
        )
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
    rounded; errors that are multiplied with rows or hidden layers are rounded after they were cut,
    so that a row may exceed C by one part in 2⁹ there.

    >>> from sottovoce.models.svm import Svm
    >>> rows = inspect(Svm(2), jnp.array([[3.0, 4.0], [jnp.nan, 1.0]]))
    >>> rows.x.tolist(), rows.is_clean.tolist(), rows.squared.tolist()
    ([[3.0, 4.0], [0.0, 1.0]], [True, False], [26.0, 2.0])
    """
    if not model.cleans_rows:
        whole = jnp.ones(x.shape[0], bool)
        return Inspected(x, whole, jnp.ones(x.shape[0], dtype))
    x = x.astype(product_type(model, dtype))  # first: what is finite may round to what is not
    is_finite = jnp.isfinite(x)
    x = jnp.where(is_finite, x, 0)
    squared = jnp.sum(x.astype(dtype) ** 2, axis=1) + 1
    # A finite row whose square is not has no finite gradient's norm either: nothing is lost.
    return Inspected(x, jnp.all(is_finite, axis=1), squared)


def product_type(model: JaxModel, dtype: Any) -> Any:
    """Return the type of large products: bfloat16 for mlp and cnn on an accelerator, else `dtype`.

    >>> from sottovoce.models.svm import Svm
    >>> product_type(Svm(2), jnp.float32) is jnp.float32
    True
    """
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
    """Return ‖g_m‖ of every row over all parameters together, unclipped, in bounded memory.

    >>> from sottovoce.models.svm import Svm
    >>> params = {"w": jnp.zeros(2), "b": jnp.zeros(())}
    >>> gradient_norms(Svm(2, kappa=0.0), params, jnp.array([[4.0, 2.0]]), jnp.array([1])).round(3)
    Array([4.583], dtype=float32)
    """

    def norm(row: tuple[Array, Array]) -> Array:
        gradient = jax.grad(lambda w: model.loss(w, row[0][None], row[1][None])[0])(params)
        return jnp.sqrt(sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(gradient)))

    rows = min(_rows_per_written_chunk(params), x.shape[0])
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
    numbers = model.numbers_per_row()
    if numbers is None:
        rows = _rows_per_written_chunk(params)
    else:
        rows = rows_per_chunk(numbers, dtype.itemsize)
    step: Callable[[Inspected, Array, Array], Params]
    step = partial(model.sum_chunk, model.prepare(params), clip)
    if isinstance(x, Inspected):
        total = fold(step, x, y, weight, rows)
    else:  # inspected chunk by chunk: no copy of all the rows is made
        total = fold(lambda x, y, w: step(inspect(model, x, dtype), y, w), x, y, weight, rows)
    return model.restore_layout(total)


def _rows_per_written_chunk(params: Params) -> int:
    """Return how many rows to take at once where the gradient of each is written out."""
    size = sum(leaf.size for leaf in jax.tree.leaves(params))
    rows = max(1, GENERIC_BYTES // max(1, size * precision(params).itemsize))
    return int(min(rows, GENERIC_ROWS))


# Per-sample gradients and losses for a device, one sample after another.


@partial(jax.jit, static_argnums=0)
def compute_gradients_alone(model: JaxModel, params: Params, x: Array, y: Array) -> Params:
    """Return the gradient of every row, each computed alone."""
    prepared = model.prepare(params)
    return jax.lax.map(lambda row: model.sample_gradient(prepared, *row), (x, y))


@partial(jax.jit, static_argnums=0)
def compute_losses_alone(model: JaxModel, params: Params, x: Array, y: Array) -> Array:
    """Return the loss of every row, each computed alone."""
    found: Array = jax.lax.map(
        lambda row: model.loss(params, row[0][None], row[1][None])[0], (x, y)
    )
    return found


# How good a model is on a set of rows.


def evaluate(model: JaxModel, params: Params, x: Array, y: Array) -> tuple[Array, Array]:
    """Return V(w) = (1/n) Σ_m F(D_m, w), and the share of the rows that is predicted right.

    Compiled, in chunks of fixed size, and fit for `jax.vmap` over params. A row whose loss is not
    finite makes the mean so: unlike a training row, a row of a public set may be complained of.

    >>> from sottovoce.models.svm import Svm
    >>> params = {"w": jnp.array([1.0]), "b": jnp.array(0.0)}
    >>> x, y = jnp.array([[2.0], [-0.5]]), jnp.array([1, 1])
    >>> [float(mean) for mean in evaluate(Svm(1, kappa=0.0), params, x, y)]
    [0.75, 0.5]
    """
    if x.shape[0] == 0:
        raise InputError.of("x", x.shape, "at least one row", "evaluate on rows that exist")
    loss, accuracy = _evaluate(model, params, x, y)
    return loss, accuracy


@partial(jax.jit, static_argnums=0)
def _evaluate(model: JaxModel, params: Params, x: Array, y: Array) -> tuple[Array, Array]:
    dtype = precision(params)
    numbers = model.numbers_per_evaluated_row() or max(1, x.size // x.shape[0])
    prepared = model.prepare(params)

    def step(x: Array, y: Array, weight: Array) -> tuple[Array, Array]:
        losses, correct = model.judge(prepared, x.astype(dtype), y)
        is_counted = weight > 0
        return jnp.sum(jnp.where(is_counted, losses, 0)), jnp.sum(is_counted & correct, dtype=dtype)

    weight = jnp.ones(x.shape[0], dtype)
    loss, correct = fold(step, x, y, weight, rows_per_chunk(numbers, dtype.itemsize))
    return loss / x.shape[0], correct / x.shape[0]


@partial(jax.jit, static_argnums=0)
def answer(model: JaxModel, params: Params, x: Array) -> tuple[Array, Array]:
    """Return the class and the scores of every row, in chunks of fixed size.

    >>> from sottovoce.models.svm import Svm
    >>> params = {"w": jnp.array([1.0]), "b": jnp.array(0.0)}
    >>> [found.tolist() for found in answer(Svm(1), params, jnp.array([[2.0], [-0.5]]))]
    [[1, 0], [2.0, -0.5]]
    """

    def answer_row(row: Array) -> tuple[Array, Array]:
        return model.predict(params, row[None])[0], model.apply(params, row[None])[0]

    found: tuple[Array, Array] = jax.lax.map(
        answer_row, x.astype(precision(params)), batch_size=min(x.shape[0], 1024)
    )
    return found


def judge_public(
    model: JaxModel, params: Params, x: Array, y: Array, metric: str | None
) -> tuple[Array, Array, Array]:
    """Return loss and accuracy on public rows, and what schedules and `server.choose` make small.

    That is the loss, or with a metric of the plan what is missing of it.
    """
    loss, accuracy = evaluate(model, params, x, y)
    if metric is None:
        return loss, accuracy, loss
    predicted, scores = answer(model, params, x)
    scores = scores.reshape(scores.shape[0], -1)
    if scores.shape[1] == 1:
        scores = jnp.concatenate([jnp.zeros_like(scores), scores], axis=1)
    return loss, accuracy, find_shortfall(metric, y, predicted, scores)


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
        found = jnp.mean(kinds[metric])
        return jnp.sqrt(found) if metric == "rmse" else found
    counts = jnp.zeros(classes).at[y].add(1)
    logs, is_label = jax.nn.log_softmax(scores), jnp.arange(classes) == y[:, None]
    if metric == "log_loss":
        found = -jnp.mean(jnp.sum(jnp.where(is_label, logs, 0), axis=1))
    elif metric == "brier":
        half = 0.5 if classes == 2 else 1.0
        found = half * jnp.mean(jnp.sum((jnp.exp(logs) - is_label) ** 2, axis=1))
    elif metric == "accuracy":
        found = 1 - jnp.mean(predicted == y)
    elif metric == "balanced_accuracy":
        recalls = jnp.zeros(classes).at[y].add(predicted == y) / counts
        found = 1 - jnp.mean(recalls, where=counts > 0)
    else:
        area = {"auroc": compute_auroc, "auprc": compute_auprc}[metric]
        ordered = scores - scores[:, ::-1] if classes == 2 else logs
        areas = jax.vmap(lambda k: area(y == k, ordered[:, k], jnp))(jnp.arange(classes))
        rarer = jnp.where(counts[1] <= counts[0], 1, 0)  # of two classes
        is_judged = jnp.arange(classes) == rarer if classes == 2 else (counts > 0) & (counts < rows)
        found = 1 - jnp.mean(areas, where=is_judged)
    return jnp.where(jnp.all(jnp.isfinite(scores)), found, jnp.nan)


def compute_losses(model: JaxModel, params: Params, x: Array, y: Array) -> Array:
    """Return F(D_m, w) of every row, in chunks of fixed size.

    >>> from sottovoce.models.svm import Svm
    >>> params = {"w": jnp.array([1.0]), "b": jnp.array(0.0)}
    >>> x, y = jnp.array([[2.0], [-0.5]]), jnp.array([1, 1])
    >>> compute_losses(Svm(1, kappa=0.0), params, x, y).tolist()
    [0.0, 1.5]
    """
    found: Array = jax.lax.map(
        lambda row: model.loss(params, row[0][None], row[1][None])[0],
        (x.astype(precision(params)), y),
        batch_size=min(x.shape[0], 1024),
    )
    return found
