"""Clipped sums: the weighted sum of per-sample gradients, each cut to norm C.

Steps 6–9 of Algorithm 1 (UDP) and the average over clients in one go: a round is linear in the
clipped gradients, so a row may carry the weight of its client. No samples × parameters array ever
exists. A dense layer's per-sample gradient is an outer product h δᵀ, so its norm is ‖h‖‖δ‖ and the
scaled sum is one matrix product; a convolution's own gradient is small (25 × colours × channels)
and is formed for one piece of the rows at a time, tile by tile; a custom model's gradients are
formed for as many rows as fit in a fixed amount of memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from sottovoce.errors import InputError
from sottovoce.models.base import (
    KERNEL,
    PADDING,
    Cnn,
    Mlp,
    Model,
    Params,
    Softmax,
    Svm,
    precision,
    signs,
)

# Rows in pieces of fixed size: memory follows the piece, not the data, and shapes stay static.


# A CPU wants a piece that stays in its cache between the forward and the backward product
# (the MNIST round is fastest around 1,000 rows of 784+2·256 floats: 5 MB); an accelerator wants
# few, large kernels.
CPU_BYTES = 5 << 20
DEVICE_BYTES = 256 << 20


def rows_per_chunk(numbers_a_row: int, item_bytes: int) -> int:
    """How many rows to take at once when each needs `numbers_a_row` temporary numbers.

    >>> rows_per_chunk(784 + 2 * 256, 4) >= 1000
    True
    """
    budget = CPU_BYTES if jax.default_backend() == "cpu" else DEVICE_BYTES
    return max(1, budget // max(1, numbers_a_row * item_bytes))


def fold(
    step: Callable[[Any, Array, Array], Any], x: Any, y: Array, weight: Array, rows: int
) -> Any:
    """Σ over pieces of `step(x, y, weight)`, each piece at most `rows` rows of the three.

    x may be a tree of arrays that all have a row for each label.

    The last piece is moved back to end with the data, and the rows it shares with the one before
    get weight 0 there: every piece has the same shape and nothing is padded or copied. So `step`
    must give rows of weight 0 no influence at all.

    >>> x = jnp.arange(7.0)
    >>> float(fold(lambda x, y, weight: jnp.sum(x * weight), x, x, jnp.ones(7), rows=3))
    21.0
    """
    n = y.shape[0]
    if n <= rows:
        return step(x, y, weight)
    pieces = -(-n // rows)
    rows = -(-n // pieces)  # even pieces, so that the last one repeats few rows

    def add(total: Any, index: Array) -> tuple[Any, None]:
        start = jnp.minimum(index * rows, n - rows)
        xs, ys, ws = jax.tree.map(
            lambda a: jax.lax.dynamic_slice_in_dim(a, start, rows), (x, y, weight)
        )
        is_new = start + jnp.arange(rows) >= index * rows
        return jax.tree.map(jnp.add, total, step(xs, ys, jnp.where(is_new, ws, 0))), None

    shapes = jax.eval_shape(step, *jax.tree.map(lambda a: a[:rows], (x, y, weight)))
    zero = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
    return jax.lax.scan(add, zero, jnp.arange(pieces))[0]


# The cnn's convolution as one product of a size that processors are good at.
#
# Written as a product with the 25 · colours × channels numbers of a kernel, a convolution is thin
# (8 channels) and its patches are 25 times the picture. Instead the map is covered with tiles of
# a×b places. All places of a tile look at one window of (a+4)×(b+4)×colours numbers of the picture,
# so
#
#     maps = windows · band,
#
# where the band holds the kernel at the a·b shifts of a tile, and zeros elsewhere. For the paper's
# cnn (a×b = 2×4) a picture's windows take a quarter of the memory of its patches; the products do
# (a+4)(b+4)/25 = 1.92 times the multiplications, the band's zeros among them, in a fifth of the
# time.
#
# A row's own gradient by the kernel is the sum, over a tile's places, of the band's gradient at
# their shift. The hidden layer stays in the order of the tiles: the dense weights are put in that
# order once, instead of every row's maps in theirs.


# A tile has at most so many places in each direction, and numbers of the map in all: more makes the
# product wider, but it multiplies by more zeros.
MOST_PLACES = 4
MOST_NUMBERS = 64


class Tiled(NamedTuple):
    """The parameters of a cnn as the products take them; tiles × numbers is one hidden layer."""

    band: Array  # (window, numbers)
    bias: Array  # (numbers,)
    w: Array  # (tiles, numbers, classes)
    back: Array  # (classes, tiles, numbers): w again, so that no piece of the rows turns it round
    b: Array  # (classes,)


def tile(model: Cnn) -> tuple[int, int]:
    """Height and width of a tile: they divide the map's, whatever it is.

    >>> tile(Cnn((32, 32, 3), channels=8, classes=10)), tile(Cnn((9, 1, 1), channels=8, classes=10))
    ((2, 4), (1, 1))
    """
    channels, height, width = model.map_shape
    sides = range(1, MOST_PLACES + 1)
    every = [(a, b) for a in sides for b in sides if height % a == 0 and width % b == 0]
    fitting = [(a, b) for a, b in every if a * b * channels <= MOST_NUMBERS] or [(1, 1)]
    # Many places in a small window, i.e. nearly square; wide ones are copied in longer runs.
    return max(fitting, key=lambda sides: (sides[0] * sides[1], -sum(sides), sides[1]))


def numbers_a_row(model: Cnn) -> int:
    """Temporary numbers of a row whose windows and maps are held: what a piece is sized by."""
    channels, height, width = model.map_shape
    (a, b), colours = tile(model), model.shape[2]
    high, wide = (size + KERNEL - 1 for size in (height, width))
    strips = high * (wide + width // b * (b + KERNEL - 1)) * colours
    window = (a + KERNEL - 1) * (b + KERNEL - 1) * colours
    return strips + height * width // (a * b) * window + channels * height * width


def tiled(model: Cnn, params: Params) -> Tiled:
    """The band, and the dense weights in the order of the tiles."""
    (a, b), kernel, (channels, height, width) = tile(model), params["kernel"], model.map_shape
    shifts = [
        jnp.pad(kernel, [(r, a - 1 - r), (s, b - 1 - s), (0, 0), (0, 0)])
        for r in range(a)
        for s in range(b)
    ]
    w = params["w"].reshape(channels, height // a, a, width // b, b, model.classes)
    w = w.transpose(1, 3, 2, 4, 0, 5).reshape(-1, a * b * channels, model.classes)
    return Tiled(
        jnp.stack(shifts, axis=3).reshape(-1, a * b * channels),
        jnp.tile(params["bias"], a * b),
        w,
        jnp.moveaxis(w, 2, 0),
        params["b"],
    )


def in_order(model: Cnn, values: Array) -> Array:
    """What is in the order of the tiles, (…, tiles, numbers), in that of the map: (…, places)."""
    (a, b), (channels, height, width), first = tile(model), model.map_shape, values.shape[:-2]
    values = values.reshape(math.prod(first), height // a, width // b, a, b, channels)
    return values.transpose(0, 5, 1, 3, 2, 4).reshape(*first, -1)


def windows(model: Cnn, x: Array) -> Array:
    """What each tile looks at, (n, tiles, window)."""
    around = [(0, 0), (PADDING, PADDING), (PADDING, PADDING), (0, 0)]
    seen = jnp.pad(x.reshape(-1, *model.shape), around)
    return _copied(model, seen) if jax.default_backend() == "cpu" else _taken(model, seen)


def _copied(model: Cnn, seen: Array) -> Array:
    """Line by line, as a CPU copies them fastest."""
    (a, b), (_, height, width) = tile(model), model.map_shape
    # Side by side first, then one above the other: the second copies whole lines of a window.
    last = width - b + 1
    strips = [seen[:, :, j : j + last : b] for j in range(b + KERNEL - 1)]
    strip = jnp.concatenate(strips, axis=3)
    last = height - a + 1
    lines = [strip[:, i : i + last : a] for i in range(a + KERNEL - 1)]
    every = jnp.concatenate(lines, axis=3)
    return every.reshape(seen.shape[0], (height // a) * (width // b), every.shape[3])


def _taken(model: Cnn, seen: Array) -> Array:
    """Number by number from where it is, as an accelerator does fastest: one kernel, not many."""
    (a, b), (_, height, width) = tile(model), model.map_shape
    sides = (height // a, width // b, a + KERNEL - 1, b + KERNEL - 1, model.shape[2])
    down, right, i, j, colour = np.ogrid[tuple(slice(side) for side in sides)]
    line, place = down * a + i, right * b + j
    where = (line * seen.shape[2] + place) * model.shape[2] + colour
    flat = seen.reshape(seen.shape[0], -1)
    every = jnp.take(flat, where.reshape(-1).astype(np.int32), axis=1, mode="clip")
    return every.reshape(seen.shape[0], sides[0] * sides[1], -1)


def alike(left: Array, right: Array, kind: jnp.dtype) -> tuple[Array, Array]:
    """Both in the type of `left`; the CPU has few products of bfloat16 and takes them in `kind`."""
    right = right.astype(left.dtype)
    on_cpu = jax.default_backend() == "cpu"
    return (left.astype(kind), right.astype(kind)) if on_cpu else (left, right)


def maps(found: Array, with_params: Tiled) -> Array:
    """Before the relu, (n, tiles, numbers); in the type of the windows, added up in the band's."""
    kind = with_params.band.dtype
    found, band = alike(found, with_params.band, kind)
    return jnp.matmul(found, band, preferred_element_type=kind) + with_params.bias


def dense(hidden: Array, with_params: Tiled) -> Array:
    """The scores, (n, classes)."""
    kind = with_params.w.dtype
    hidden, w = alike(hidden, with_params.w, kind)
    places = ((1, 2), (0, 1))
    return jnp.tensordot(hidden, w, places, preferred_element_type=kind) + with_params.b


def own_kernels(model: Cnn, found: Array, error: Array, kind: jnp.dtype) -> Array:
    """Each row's own gradient by the kernel, (n, channels, 5, 5, colours)."""
    (a, b), colours = tile(model), model.shape[2]
    found, error = alike(found, error, kind)
    # Error first: the longer of the two sides runs along the memory.
    by_band = jnp.einsum("ntm,ntk->nmk", error, found, preferred_element_type=kind)
    high, wide = a + KERNEL - 1, b + KERNEL - 1
    by_band = by_band.reshape(-1, a, b, model.channels, high, wide, colours)
    parts = [
        by_band[:, r, s, :, r : r + KERNEL, s : s + KERNEL] for r in range(a) for s in range(b)
    ]
    return sum(parts[1:], start=parts[0])


def scores(model: Cnn, with_params: Tiled, x: Array) -> Array:
    """`Cnn.apply` for many rows.

    >>> model = Cnn((8, 8, 1), channels=2, classes=3)
    >>> params, x = model.init(jax.random.key(0)), jnp.ones((2, 64))
    >>> found = scores(model, tiled(model, params), x)
    >>> bool(jnp.allclose(found, model.apply(params, x), atol=1e-5))
    True
    """
    return dense(jax.nn.relu(maps(windows(model, x), with_params)), with_params)


# Per-sample gradients of a custom model held at once; the rows are limited too, because what the
# model needs besides its gradients is not known.
GENERIC_BYTES = 64 << 20
GENERIC_ROWS = 1024


class Inspected(NamedTuple):
    """Rows as the products take them: what does not change from round to round, found once."""

    x: Array  # (n, features): 0 where a number was not finite
    is_clean: Array  # (n,): whether every number of the row was finite
    squared: Array  # (n,): ‖x‖² + 1


def inspect(model: Model, x: Array, dtype: Any = jnp.float32) -> Inspected:
    """Rows made ready for `clipped_sum`; a custom model gets its rows as they are.

    On an accelerator the large products of mlp and cnn take bfloat16 and add up in float32: 8 bits
    of a number's mantissa instead of TF32's 11, twice as fast. Norms are those of what was so
    rounded; errors that are multiplied with rows or hidden layers are rounded after they were cut,
    so that a row may exceed C by one part in 2⁹ there.

    >>> from sottovoce.models.base import Svm
    >>> seen = inspect(Svm(2), jnp.array([[3.0, 4.0], [jnp.nan, 1.0]]))
    >>> seen.x.tolist(), seen.is_clean.tolist(), seen.squared.tolist()
    ([[3.0, 4.0], [0.0, 1.0]], [True, False], [26.0, 2.0])
    """
    if not isinstance(model, Svm | Softmax | Mlp | Cnn):
        whole = jnp.ones(x.shape[0], bool)
        return Inspected(x, whole, jnp.ones(x.shape[0], dtype))
    x = x.astype(product_type(model, dtype))  # first: what is finite may round to what is not
    is_finite = jnp.isfinite(x)
    x = jnp.where(is_finite, x, 0)
    squared = jnp.sum(x.astype(dtype) ** 2, axis=1) + 1
    # A finite row whose square is not has no finite gradient's norm either: nothing is lost.
    return Inspected(x, jnp.all(is_finite, axis=1), squared)


def product_type(model: Model, dtype: Any) -> Any:
    """What the large products take: bfloat16 for mlp and cnn on an accelerator, else `dtype`.

    >>> from sottovoce.models.base import Svm
    >>> product_type(Svm(2), jnp.float32) is jnp.float32
    True
    """
    fast = isinstance(model, Mlp | Cnn) and jax.default_backend() != "cpu"
    return jnp.bfloat16 if fast and dtype == jnp.float32 else dtype


def clipped_sum(
    model: Model, params: Params, x: Array | Inspected, y: Array, weight: Array, clip: Array | float
) -> Params:
    """Σ_m weight_m · g_m / max(1, ‖g_m‖/C), the norm taken over all parameters together.

    g_m = ∇F(D_m, w) is the gradient of `model.loss` of row m alone. What each row adds, divided by
    its weight, has norm ≤ C up to rounding (for C ≥ 1e-15), whatever the row holds:

    - a row of weight 0 adds exactly nothing, even if it is garbage;
    - a row whose gradient, or its squared norm, is not finite in the precision at hand adds the
      zero vector: one bad row must neither spoil the sum nor be noticed by an error;
    - clip = inf cuts nothing.

    x are rows, or rows that have been inspected: where many rounds look at the same ones, that
    is done once. Pure, and fit for `jax.jit` and `jax.vmap` (several runs over the same rows:
    params, weight and clip batched, x and y shared). Works in the precision of `params`.

    >>> from sottovoce.models.base import Svm
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
def gradient_norms(model: Model, params: Params, x: Array, y: Array) -> Array:
    """‖g_m‖ of every row over all parameters together, unclipped, in pieces of bounded memory.

    >>> from sottovoce.models.base import Svm
    >>> params = {"w": jnp.zeros(2), "b": jnp.zeros(())}
    >>> gradient_norms(Svm(2, kappa=0.0), params, jnp.array([[4.0, 2.0]]), jnp.array([1])).round(3)
    Array([4.583], dtype=float32)
    """

    def norm(row: tuple[Array, Array]) -> Array:
        own = jax.grad(lambda w: model.loss(w, row[0][None], row[1][None])[0])(params)
        return jnp.sqrt(sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(own)))

    size = sum(leaf.size for leaf in jax.tree.leaves(params))
    rows = max(1, GENERIC_BYTES // max(1, size * precision(params).itemsize))
    every: Array = jax.lax.map(norm, (x, y), batch_size=min(rows, GENERIC_ROWS, x.shape[0]))
    return every


@partial(jax.jit, static_argnums=0)
def _clipped_sum(
    model: Model, params: Params, x: Array | Inspected, y: Array, weight: Array, clip: Array | float
) -> Params:
    dtype = precision(params)
    weight, clip = weight.astype(dtype), jnp.asarray(clip, dtype)
    step: Callable[[Inspected, Array, Array], Params]
    size = sum(leaf.size for leaf in jax.tree.leaves(params))
    rows = min(max(1, GENERIC_BYTES // max(1, size * dtype.itemsize)), GENERIC_ROWS)
    match model:
        case Svm():
            step, numbers = partial(_svm, model, params, clip), model.features + 8
        case Softmax():
            step = partial(_softmax, params, clip)
            numbers = model.features + 2 * model.classes
        case Mlp():
            step, numbers = partial(_mlp, params, clip), model.features + 2 * model.hidden
        case Cnn():
            step = partial(_cnn, model, tiled(model, params), clip)
            numbers = numbers_a_row(model) + 2 * math.prod(model.map_shape)
        case _:
            step, numbers = partial(_generic, model, params, clip), 0
    if numbers:
        rows = rows_per_chunk(numbers, dtype.itemsize)
    if isinstance(x, Inspected):
        total = fold(step, x, y, weight, rows)
    else:  # inspected piece by piece: no copy of all the rows is made
        total = fold(lambda x, y, w: step(inspect(model, x, dtype), y, w), x, y, weight, rows)
    return _in_order(model, total) if isinstance(model, Cnn) else total


def _svm(
    model: Svm, params: Params, clip: Array, rows: Inspected, y: Array, weight: Array
) -> Params:
    w, b = params["w"], params["b"]
    x, is_clean, squared_x = rows
    sign = signs(y, w.dtype)
    score = x @ w + b
    error = jnp.where(sign * score < 1, -sign, 0)
    # ‖e(x, 1) + κ(w, b)‖² from what is known, e being ±1 …
    pull_squared = model.kappa**2 * (jnp.sum(w**2) + b**2)
    parts = jnp.where(error != 0, squared_x, 0) + pull_squared
    squared = parts + 2 * model.kappa * error * score

    def term_by_term() -> Array:
        terms = jnp.sum((error[:, None] * x + model.kappa * w) ** 2, axis=1)
        return jnp.where(is_lost, terms + (error + model.kappa * b) ** 2, squared)

    # … but where hinge and κw cancel, digits are lost: the rare pieces with such rows sum them.
    is_lost = ~(squared >= parts / 8)
    squared = jax.lax.cond(jnp.any(is_lost), term_by_term, lambda: squared)
    factor = _factor(squared, is_clean, weight, clip)
    scaled, pull = _kept(error, factor), jnp.sum(factor) * model.kappa
    # Where no row counts, w itself may be what is not finite.
    return {
        "w": scaled @ x + jnp.where(pull != 0, pull * w, 0),
        "b": jnp.sum(scaled) + jnp.where(pull != 0, pull * b, 0),
    }


def _softmax(params: Params, clip: Array, rows: Inspected, y: Array, weight: Array) -> Params:
    x, is_clean, squared = rows
    error = _softmax_error(x @ params["w"] + params["b"], y)
    error = _kept(error, _factor(_norms(error) * squared, is_clean, weight, clip))
    return {"w": x.T @ error, "b": jnp.sum(error, axis=0)}


def _mlp(params: Params, clip: Array, rows: Inspected, y: Array, weight: Array) -> Params:
    x, is_clean, squared = rows
    hidden = _relu(_product(x, params["w1"]) + params["b1"], params["w1"].dtype)
    error2 = _softmax_error(hidden @ params["w2"] + params["b2"], y)
    error1 = jnp.where(hidden > 0, error2 @ params["w2"].T, 0)
    norms = _norms(error1) * squared + _norms(error2) * (_norms(hidden) + 1)
    factor = _factor(norms, is_clean, weight, clip)
    error1, error2 = _kept(error1, factor), _kept(error2, factor)
    return {
        "w1": _summed(x, error1),
        "b1": jnp.sum(error1, axis=0),
        "w2": hidden.T @ error2,
        "b2": jnp.sum(error2, axis=0),
    }


def _relu(before: Array, kind: Any) -> Array:
    """max(before, 0) in the type `kind`, and the largest number of it for what is not one.

    ‖h‖² is then no number, the row does not count, and 0 · h is 0 where products sum over rows.
    """
    most = float(jnp.finfo(kind).max)  # type: ignore[no-untyped-call]
    return jnp.where(before <= 0, 0, jnp.where(before < most, before, most)).astype(kind)


def _product(left: Array, right: Array) -> Array:
    """left @ right in the type of `left`, added up in that of `right`."""
    taken = right.astype(left.dtype)
    return jnp.matmul(left, taken, preferred_element_type=right.dtype)


PARTS = 8  # of the rows, where an accelerator sums over them for one run alone


@jax.custom_batching.custom_vmap
def _summed(x: Array, error: Array) -> Array:
    """xᵀ·error, the sum over the rows of their outer products.

    For one run the product is small and its sum long: an accelerator has too few pieces of the
    result to keep all its units busy, so it sums parts of the rows side by side.
    """
    rows = x.shape[0]
    if jax.default_backend() == "cpu" or rows % PARTS or rows < 1024 * PARTS:
        return _product(x.T, error)
    parts = (
        x.reshape(PARTS, -1, x.shape[1]),
        error.astype(x.dtype).reshape(PARTS, rows // PARTS, -1),
    )
    each = jnp.einsum("pnf,pnh->pfh", *parts, preferred_element_type=error.dtype)
    return jnp.sum(each, axis=0)


@_summed.def_vmap
def _summed_for_runs(_: int, batched: list[bool], x: Array, error: Array) -> tuple[Array, bool]:
    """Runs side by side keep it busy by themselves."""
    where = tuple(0 if own else None for own in batched)
    return jax.vmap(lambda x, error: _product(x.T, error), in_axes=where)(x, error), True


class CnnParts(NamedTuple):
    """What the gradients of the cnn's rows are made of."""

    is_clean: Array  # (n,): whether the row was finite; the others were computed from zeros
    kernel: Array  # (n, channels, 5, 5, colours): each row's own gradient
    bias: Array  # (n, channels): likewise
    hidden: Array  # (n, tiles, numbers): the largest number where it is none
    error: Array  # (n, classes): the derivative by the scores


def cnn_parts(model: Cnn, params: Tiled, rows: Inspected, y: Array) -> CnnParts:
    """The convolution's own gradient of every row, and the two factors of the dense layer's."""
    found, kind = windows(model, rows.x), params.w.dtype
    hidden = _relu(maps(found, params), found.dtype)
    error2 = _softmax_error(dense(hidden, params), y)
    error1 = jnp.where(hidden > 0, jnp.tensordot(error2, params.back, 1), 0)
    own = own_kernels(model, found, error1, kind)
    by_place = jnp.sum(error1, axis=1).reshape(y.shape[0], -1, model.channels)
    return CnnParts(rows.is_clean, own, jnp.sum(by_place, axis=1), hidden, error2)


def _cnn(
    model: Cnn, params: Tiled, clip: Array, rows: Inspected, y: Array, weight: Array
) -> Params:
    is_clean, own, own_bias, hidden, error2 = cnn_parts(model, params, rows, y)
    squared = jnp.sum(own**2, axis=(1, 2, 3, 4)) + _norms(own_bias)
    # Tiles first: a sum along the memory is added up one by one.
    squared_hidden = jnp.sum(jnp.sum(hidden.astype(error2.dtype) ** 2, axis=1), axis=1)
    squared += _norms(error2) * (squared_hidden + 1)
    factor = _factor(squared, is_clean, weight, clip)
    error2 = _kept(error2, factor)
    left, right = alike(hidden, error2, error2.dtype)
    return {
        "kernel": jnp.tensordot(factor, _only(own, factor), 1),
        "bias": factor @ _only(own_bias, factor),
        "w": jnp.einsum("nc,ntm->ctm", right, left, preferred_element_type=error2.dtype),
        "b": jnp.sum(error2, axis=0),
    }


def _in_order(model: Cnn, total: Params) -> Params:
    """The sum by the parameters as they are: kernel (5, 5, colours, channels), w (places, 10)."""
    kernel, w = jnp.moveaxis(total["kernel"], 0, 3), in_order(model, total["w"]).T
    return total | {"kernel": kernel, "w": w}


def _generic(
    model: Model, params: Params, clip: Array, rows: Inspected, y: Array, weight: Array
) -> Params:
    x = rows.x

    def loss(params: Params, row: Array, label: Array) -> Array:
        return model.loss(params, row[None], label[None])[0]

    gradient = jax.grad(loss)
    own = jax.vmap(gradient, in_axes=(None, 0, 0))(params, x, y)
    # Rows must not touch each other, but a compiler may write "not this row" as 0 · value (XLA does
    # for float64 convolutions), and 0 · NaN spoils the neighbours: then take the rows one by one.
    # A loop, not a condition: under vmap a condition would always compute both sides.
    own, _ = jax.lax.while_loop(
        lambda state: ~state[1],
        lambda state: (jax.lax.map(lambda row: gradient(params, *row), (x, y)), jnp.array(True)),
        (own, _all_finite(own)),
    )
    squares = (jnp.sum(g**2, axis=tuple(range(1, g.ndim))) for g in jax.tree.leaves(own))
    squared = sum(squares, start=jnp.zeros_like(weight))
    factor = _factor(squared, jnp.full(weight.shape, True), weight, clip)
    return jax.tree.map(lambda g: jnp.tensordot(factor.astype(g.dtype), _only(g, factor), 1), own)


def _factor(squared: Array, is_clean: Array, weight: Array, clip: Array) -> Array:
    """weight / max(1, ‖g‖/C), and 0 for the rows that must not count."""
    norm = jnp.sqrt(squared)
    scaled = jnp.where(norm > clip, clip / norm, 1) * weight
    return jnp.where(is_clean & jnp.isfinite(squared), scaled, 0)


def _all_finite(tree: Params) -> Array:
    parts = [jnp.all(jnp.isfinite(leaf)) for leaf in jax.tree.leaves(tree)]
    return jnp.all(jnp.array(parts, bool))


def _only(values: Array, factor: Array) -> Array:
    """The rows that count, zeros for the others."""
    return jnp.where((factor != 0).reshape(-1, *[1] * (values.ndim - 1)), values, 0)


def _kept(values: Array, factor: Array) -> Array:
    """The rows that count, each times its factor."""
    return _only(values, factor) * factor.reshape(-1, *[1] * (values.ndim - 1))


def _softmax_error(scores: Array, y: Array) -> Array:
    """softmax − one-hot, the derivative of the cross-entropy.

    At the label p − 1 is written −Σ of the others: it keeps its digits where p is nearly 1.
    """
    is_label = jnp.arange(scores.shape[-1]) == y[:, None]
    others = jnp.where(is_label, 0, jax.nn.softmax(scores))
    return jnp.where(is_label, -jnp.sum(others, axis=1, keepdims=True), others)


def _norms(values: Array) -> Array:
    """‖v‖² of every row; a dense layer's gradient (h, 1) δᵀ has ‖δ‖²(‖h‖² + 1)."""
    return jnp.sum(values**2, axis=1)
