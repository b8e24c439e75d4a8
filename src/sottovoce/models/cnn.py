"""The cnn: one 5×5 convolution, ReLU, a linear layer and softmax, in JAX.

A device computes it in float64 JAX, one sample after another (`JaxModel.gradients`): it has no
numpy version.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple, Self, final

import numpy as np

from sottovoce.models import base, softmax
from sottovoce.models.base import Inspected, NamedModel, Params, Shapes, clipping, jax, jnp

if TYPE_CHECKING:
    from jax import Array

    from sottovoce.models import kernels

KERNEL = 5
PADDING = 4


@final
@dataclass(frozen=True)
class Cnn(NamedModel):
    """One 5×5 convolution with padding 4, ReLU, then a linear layer and softmax.

    No pooling, as in the paper: an H×W picture becomes channels×(H+4)×(W+4) numbers. Rows are
    pictures of `shape` (H, W, colours), flattened with the colours last.
    """

    shape: tuple[int, int, int]
    channels: int
    classes: int
    number_loss: str | None = None  # where it predicts a number, with one output

    name = "cnn"
    options = (base.Option("channels", 8, "8 is the default"),)
    takes_pictures = True
    cleans_rows = True
    uses_bfloat16 = True
    predicts_numbers = True

    @classmethod
    def create(cls, shape: tuple[int, ...], classes: int, **options: Any) -> Self:
        return cls((shape[0], shape[1], shape[2]), options["channels"], classes)

    def form(self, shape: tuple[int, ...] = (), classes: int = 0) -> base.Form:
        return base.Form("cnn", self.shape, self.classes, {"channels": self.channels})

    @property
    def map_shape(self) -> tuple[int, int, int]:
        """Channels, height and width after the convolution, in the order of the rows of w."""
        grow = 2 * PADDING - KERNEL + 1
        return self.channels, self.shape[0] + grow, self.shape[1] + grow

    def shapes(self) -> Shapes:
        c, kernel = self.classes, (KERNEL, KERNEL, self.shape[2], self.channels)
        w = (math.prod(self.map_shape), c)
        return {"b": (c,), "bias": (self.channels,), "kernel": kernel, "w": w}

    def init(self, key: Array) -> Params:
        first, second = jax.random.split(key)
        fan_in, flat = KERNEL * KERNEL * self.shape[2], math.prod(self.map_shape)
        kernel, bias = base.draw_layer(
            first, (KERNEL, KERNEL, self.shape[2], self.channels), fan_in
        )
        w, b = base.draw_layer(second, (flat, self.classes), flat)
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
        return softmax.compute_loss(self.apply(params, x), y, self.number_loss)

    # Sums over many rows, tile by tile

    def prepare(self, params: Params) -> Tiled:
        return arrange_tiles(self, params)

    def numbers_per_row(self) -> int:
        hidden, fast = math.prod(self.map_shape), load_kernels(self)
        if fast is None:
            return _numbers_per_row(self) + 2 * hidden
        # Kernels write slots, a hidden layer and its error, of two bytes each. The hidden layers of
        # 32 runs have at most the 2³¹ numbers that an index of 32 bits tells apart.
        return max(2 * hidden, hidden + fast.slots * fast.width // 2)

    def numbers_per_evaluated_row(self) -> int:
        fast = load_kernels(self)
        cut = 0 if fast is None else fast.slots * fast.width + math.prod(self.map_shape)
        return cut or _numbers_per_row(self)

    def sum_chunk(
        self, prepared: Tiled, clip: Array, rows: Inspected, y: Array, weight: Array
    ) -> Params:
        is_clean, kernels, biases, hidden, squared_hidden, error2 = find_factors(
            self, prepared, rows, y
        )
        squared = jnp.sum(kernels**2, axis=(1, 2, 3, 4)) + base.squared_norms(biases)
        squared += base.squared_norms(error2) * (squared_hidden + 1)
        factor = base.clip_factors(squared, is_clean, weight, clip)
        error2 = base.scale_counted(error2, factor)
        left, right = _align_types(hidden, error2, error2.dtype)
        return {
            "kernel": jnp.tensordot(factor, base.keep_counted(kernels, factor), 1),
            "bias": factor @ base.keep_counted(biases, factor),
            "w": jnp.einsum("nc,ntm->ctm", right, left, preferred_element_type=error2.dtype),
            "b": jnp.sum(error2, axis=0),
        }

    def restore_layout(self, total: Params) -> Params:
        kernel, w = jnp.moveaxis(total["kernel"], 0, 3), restore_map_order(self, total["w"]).T
        return total | {"kernel": kernel, "w": w}

    def judge(self, prepared: Tiled, x: Array, y: Array) -> tuple[Array, Array]:
        scores = compute_scores(self, prepared, x)
        losses = softmax.compute_loss(scores, y, self.number_loss)
        return losses, jnp.argmax(scores, axis=1) == y

    def sample_gradient(self, prepared: Tiled, row: Array, label: Array) -> Params:
        """Return the gradient of one sample; it has NaN where the row or a map is not finite."""
        rows = clipping.inspect(self, row[None], base.precision(prepared))
        factors = find_factors(self, prepared, rows, label[None])
        hidden = restore_map_order(self, factors.hidden)[0]
        is_number = factors.is_clean[0] & jnp.all(hidden < np.finfo(hidden.dtype).max)
        poison = jnp.where(is_number, 0.0, jnp.nan)
        return {
            "kernel": jnp.moveaxis(factors.kernel[0], 0, 3),
            "bias": factors.bias[0],
            "w": hidden[:, None] * factors.error[0],
            "b": factors.error[0] + poison,
        }


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
# A row's gradient by the kernel is the sum, over a tile's places, of the band's gradient at
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
    back: Array  # (classes, tiles, numbers): w again, so that no chunk of rows turns it round
    b: Array  # (classes,)


def choose_tile(model: Cnn) -> tuple[int, int]:
    """Return height and width of a tile: they divide the map's, whatever it is.

    >>> choose_tile(Cnn((32, 32, 3), channels=8, classes=10))
    (2, 4)
    """
    channels, height, width = model.map_shape
    sides = range(1, MOST_PLACES + 1)
    every = [(a, b) for a in sides for b in sides if height % a == 0 and width % b == 0]
    fitting = [(a, b) for a, b in every if a * b * channels <= MOST_NUMBERS] or [(1, 1)]
    # Many places in a small window, i.e. nearly square; wide ones are copied in longer runs.
    return max(fitting, key=lambda sides: (sides[0] * sides[1], -sum(sides), sides[1]))


def _numbers_per_row(model: Cnn) -> int:
    """Return the temporary numbers of a row whose windows and maps are held."""
    channels, height, width = model.map_shape
    (a, b), colours = choose_tile(model), model.shape[2]
    high, wide = (size + KERNEL - 1 for size in (height, width))
    strips = high * (wide + width // b * (b + KERNEL - 1)) * colours
    window = (a + KERNEL - 1) * (b + KERNEL - 1) * colours
    return strips + height * width // (a * b) * window + channels * height * width


def arrange_tiles(model: Cnn, params: Params) -> Tiled:
    """Return the band, and the dense weights in the order of the tiles."""
    (a, b), kernel, (channels, height, width) = (
        choose_tile(model),
        params["kernel"],
        model.map_shape,
    )
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


def restore_map_order(model: Cnn, values: Array) -> Array:
    """Return values (…, tiles, numbers) in the order of the map, (…, places)."""
    (a, b), (channels, height, width), first = (
        choose_tile(model),
        model.map_shape,
        values.shape[:-2],
    )
    values = values.reshape(math.prod(first), height // a, width // b, a, b, channels)
    return values.transpose(0, 5, 1, 3, 2, 4).reshape(*first, -1)


def cut_windows(model: Cnn, x: Array) -> Array:
    """Return what each tile looks at, (n, tiles, window)."""
    cut = _copy_windows if jax.default_backend() == "cpu" else _gather_windows
    return cut(model, x)


@cache
def load_kernels(model: Cnn) -> kernels.CnnKernels | None:
    """Return kernels for this model, or None: not on an NVIDIA GPU, or they do not compile there.

    They are compiled once to find out: Pallas is young, and a GPU has so many registers.
    """
    if jax.default_backend() != "gpu":
        return None
    try:
        from sottovoce.models.kernels import CnnKernels

        found = CnnKernels(
            model.shape, KERNEL, PADDING, choose_tile(model), model.map_shape[1:], model.channels
        )
        found.compile_all(model.classes)
    except Exception:  # whatever is missing, the other steps do the same
        return None
    return found


def _copy_windows(model: Cnn, x: Array) -> Array:
    """Copy windows line by line, as a CPU does fastest."""
    (a, b), (_, height, width) = choose_tile(model), model.map_shape
    around = [(0, 0), (PADDING, PADDING), (PADDING, PADDING), (0, 0)]
    padded = jnp.pad(x.reshape(-1, *model.shape), around)
    # Side by side first, then one above the other: the second copies whole lines of a window.
    last = width - b + 1
    strips = [padded[:, :, j : j + last : b] for j in range(b + KERNEL - 1)]
    strip = jnp.concatenate(strips, axis=3)
    last = height - a + 1
    lines = [strip[:, i : i + last : a] for i in range(a + KERNEL - 1)]
    windows = jnp.concatenate(lines, axis=3)
    return windows.reshape(padded.shape[0], (height // a) * (width // b), windows.shape[3])


def _gather_windows(model: Cnn, x: Array) -> Array:
    """Gather windows number by number, as an accelerator does fastest: one kernel, not many."""
    (a, b), (_, height, width) = choose_tile(model), model.map_shape
    high, wide, colours = model.shape
    sides = (height // a, width // b, a + KERNEL - 1, b + KERNEL - 1, colours)
    down, right, i, j, colour = np.ogrid[tuple(slice(side) for side in sides)]
    line, column = down * a + i - PADDING, right * b + j - PADDING
    is_inside = (line >= 0) & (line < high) & (column >= 0) & (column < wide)
    where = np.where(is_inside, (line * wide + column) * colours + colour, x[0].size)
    flat, where = x.reshape(x.shape[0], -1), where.reshape(-1).astype(np.int32)
    windows = jnp.take(flat, where, axis=1, mode="fill", fill_value=0)
    return windows.reshape(x.shape[0], sides[0] * sides[1], -1)


def _align_types(left: Array, right: Array, kind: jnp.dtype) -> tuple[Array, Array]:
    """Return both in the type of `left`; a CPU, with few products of bfloat16, in `kind`."""
    right = right.astype(left.dtype)
    on_cpu = jax.default_backend() == "cpu"
    return (left.astype(kind), right.astype(kind)) if on_cpu else (left, right)


def convolve(windows: Array, with_params: Tiled) -> Array:
    """Return the maps before the relu, (n, tiles, numbers), added up in the type of the band."""
    kind = with_params.band.dtype
    windows, band = _align_types(windows, with_params.band, kind)
    return jnp.matmul(windows, band, preferred_element_type=kind) + with_params.bias


def apply_dense(hidden: Array, with_params: Tiled) -> Array:
    """Return the scores, (n, classes)."""
    kind = with_params.w.dtype
    hidden, w = _align_types(hidden, with_params.w, kind)
    axes = ((1, 2), (0, 1))
    return jnp.tensordot(hidden, w, axes, preferred_element_type=kind) + with_params.b


def kernel_gradients(model: Cnn, windows: Array, error: Array, kind: jnp.dtype) -> Array:
    """Return each row's gradient by the kernel, (n, channels, 5, 5, colours)."""
    (a, b), colours = choose_tile(model), model.shape[2]
    windows, error = _align_types(windows, error, kind)
    # Error first: the longer of the two sides runs along the memory.
    by_band = jnp.einsum("ntm,ntk->nmk", error, windows, preferred_element_type=kind)
    high, wide = a + KERNEL - 1, b + KERNEL - 1
    by_band = by_band.reshape(-1, a, b, model.channels, high, wide, colours)
    parts = [
        by_band[:, r, s, :, r : r + KERNEL, s : s + KERNEL] for r in range(a) for s in range(b)
    ]
    return sum(parts[1:], start=parts[0])


def compute_scores(model: Cnn, with_params: Tiled, x: Array) -> Array:
    """Return what `Cnn.apply` does, for many rows."""
    if (fast := load_kernels(model)) is not None and x.dtype == jnp.float32:
        hidden = fast.convolve(fast.cut(x), with_params.band, with_params.bias)
        return apply_dense(hidden, with_params)
    return apply_dense(jax.nn.relu(convolve(cut_windows(model, x), with_params)), with_params)


class Factors(NamedTuple):
    """What the gradients of the cnn's rows are made of."""

    is_clean: Array  # (n,): whether the row was finite; the others were computed from zeros
    kernel: Array  # (n, channels, 5, 5, colours): each row's gradient
    bias: Array  # (n, channels): likewise
    hidden: Array  # (n, tiles, numbers): the largest number where it is not finite
    squared_hidden: Array  # (n,)
    error: Array  # (n, classes): the derivative by the scores


def find_factors(model: Cnn, params: Tiled, rows: Inspected, y: Array) -> Factors:
    """Return the convolution's gradient of every row, and the two factors of the dense layer's."""
    if (fast := load_kernels(model)) is not None and rows.x.dtype == jnp.bfloat16:
        slots = fast.cut(rows.x)
        hidden = fast.convolve(slots, params.band, params.bias, finite=True)
        error2 = softmax.score_errors(apply_dense(hidden, params), y, model.number_loss)
        error1, squared = fast.send_back(hidden, error2, params.back)
        kernels, biases = fast.kernel_gradients(slots, error1)
        return Factors(rows.is_clean, kernels, biases, hidden, squared, error2)
    windows, kind = cut_windows(model, rows.x), params.w.dtype
    hidden = base.relu_finite(convolve(windows, params), windows.dtype)
    error2 = softmax.score_errors(apply_dense(hidden, params), y, model.number_loss)
    error1 = jnp.where(hidden > 0, jnp.tensordot(error2, params.back, 1), 0)
    kernels = kernel_gradients(model, windows, error1, kind)
    by_place = jnp.sum(error1, axis=1).reshape(y.shape[0], -1, model.channels)
    # Tiles first: a sum along the memory is added up one by one.
    squared = jnp.sum(jnp.sum(hidden.astype(kind) ** 2, axis=1), axis=1)
    return Factors(rows.is_clean, kernels, jnp.sum(by_place, axis=1), hidden, squared, error2)
