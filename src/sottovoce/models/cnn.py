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
        shape = KERNEL, KERNEL, self.shape[2], self.channels
        kernel, bias = base.draw_layer(first, shape, fan_in)
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

    def prepare(self, params: Params) -> Tiled | Filtered:
        arrange = arrange_filters if filters_lines(self, params["w"].dtype) else arrange_tiles
        return arrange(self, params)

    def numbers_per_row(self) -> int:
        hidden, fast = math.prod(self.map_shape), load_kernels(self)
        if filters_lines(self):
            return _numbers_per_filtered_row(self) + 2 * hidden
        if fast is None:
            return _numbers_per_row(self) + 2 * hidden
        # Kernels write slots, a hidden layer and its error, of two bytes each. The hidden layers of
        # 32 runs have at most the 2³¹ numbers that an index of 32 bits tells apart.
        return max(2 * hidden, hidden + fast.slots * fast.width // 2)

    def numbers_per_evaluated_row(self) -> int:
        fast = load_kernels(self)
        if filters_lines(self):
            return _numbers_per_filtered_row(self)
        cut = 0 if fast is None else fast.slots * fast.width + math.prod(self.map_shape)
        return cut or _numbers_per_row(self)

    def sum_chunk(
        self, prepared: Tiled | Filtered, clip: Array, rows: Inspected, y: Array, weight: Array
    ) -> Params:
        found = find_factors(self, prepared, rows, y)
        is_clean, kernels, biases, hidden, squared_hidden, error2 = found
        squared = jnp.sum(kernels**2, axis=(1, 2, 3, 4)) + base.squared_norms(biases)
        squared += base.squared_norms(error2) * (squared_hidden + 1)
        factor = base.clip_factors(squared, is_clean, weight, clip)
        error2 = base.scale_counted(error2, factor)
        if isinstance(prepared, Filtered):
            w: Any = [error2.T @ line for line in hidden]
        else:
            left, right = _align_types(hidden, error2, error2.dtype)
            w = jnp.einsum("nc,ntm->ctm", right, left, preferred_element_type=error2.dtype)
        return {
            "kernel": jnp.tensordot(factor, base.keep_counted(kernels, factor), 1),
            "bias": factor @ base.keep_counted(biases, factor),
            "w": w,
            "b": jnp.sum(error2, axis=0),
        }

    def restore_layout(self, total: Params) -> Params:
        if isinstance(total["w"], list):  # of `Filtered`
            return total | {"w": _restore_line_order(self, jnp.stack(total["w"]))}
        kernel, w = jnp.moveaxis(total["kernel"], 0, 3), restore_map_order(self, total["w"]).T
        return total | {"kernel": kernel, "w": w}

    def judge(self, prepared: Tiled | Filtered, x: Array, y: Array) -> tuple[Array, Array]:
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
    dividing = [(a, b) for a in sides for b in sides if height % a == 0 and width % b == 0]
    fitting = [(a, b) for a, b in dividing if a * b * channels <= MOST_NUMBERS] or [(1, 1)]
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
    (a, b), (channels, height, width) = choose_tile(model), model.map_shape
    shifts = [
        jnp.pad(params["kernel"], [(r, a - 1 - r), (s, b - 1 - s), (0, 0), (0, 0)])
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
    (a, b), (channels, height, width) = choose_tile(model), model.map_shape
    tiles = values.reshape(-1, height // a, width // b, a, b, channels)
    return tiles.transpose(0, 5, 1, 3, 2, 4).reshape(*values.shape[:-2], -1)


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

        compiled = CnnKernels(
            model.shape, KERNEL, PADDING, choose_tile(model), model.map_shape[1:], model.channels
        )
        compiled.compile_all(model.classes)
    except Exception:  # whatever is missing, the other steps do the same
        return None
    return compiled


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


def compute_scores(model: Cnn, with_params: Tiled | Filtered, x: Array) -> Array:
    """Return what `Cnn.apply` does, for many rows."""
    if isinstance(with_params, Filtered):
        maps = _filter_lines(_transform_windows(model, x), with_params)
        return _apply_dense_by_line(jax.nn.relu(maps), with_params)
    if (fast := load_kernels(model)) is not None and x.dtype == jnp.float32:
        hidden = fast.convolve(fast.cut(x), with_params.band, with_params.bias)
        return apply_dense(hidden, with_params)
    return apply_dense(jax.nn.relu(convolve(cut_windows(model, x), with_params)), with_params)


class Factors(NamedTuple):
    """What the gradients of the cnn's rows are made of."""

    is_clean: Array  # (n,): whether the row was finite; the others were computed from zeros
    kernel: Array  # (n, channels, 5, 5, colours): each row's gradient; filtered: channels last
    bias: Array  # (n, channels): likewise
    # (n, tiles, numbers), filtered (LINES, n, …): the largest number where it is not finite
    hidden: Array
    squared_hidden: Array  # (n,)
    error: Array  # (n, classes): the derivative by the scores


def find_factors(model: Cnn, params: Tiled | Filtered, rows: Inspected, y: Array) -> Factors:
    """Return the convolution's gradient of every row, and the two factors of the dense layer's."""
    if isinstance(params, Filtered):
        return _find_filtered_factors(model, params, rows, y)
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


# On a CPU in float32, where products decide, the convolution goes by fewer multiplications: by
# Winograd's minimal filtering F(4, 5) from one line of the map to the next, and by a band along the
# line. Four lines of a map depend on eight of the picture, d, and on the five of a kernel, g; with
# matrices A (8×4), G (8×5) and B (8×8) of small numbers (Toom and Cook's) they are
#
#     y = Aᵀ[(G g) · (B d)],
#
# and the gradient by g, with the derivatives e by y, is Gᵀ[(A e) · (B d)]: eight products where
# twenty are multiplied out. Along the line, four places look at eight columns. Together that is
# 0.64 of a convolution's own multiplications, where tiles have 1.92 times as many. Sums differ from
# theirs by rounding; a row's norm is that of the very gradient that is added. A device, which
# computes in float64, and an accelerator use tiles.

LINES = 4  # of the map, and places of a line: both sides of the map must be multiples
_POINTS = (0, 1, -1, 2, -2, 0.5, -0.5)  # where polynomials are evaluated, and at infinity


class Filtered(NamedTuple):
    """The parameters of a cnn as filtering takes them; tiles × numbers is one of LINES lines."""

    bands: Array  # (points, window, numbers)
    bias: Array  # (tiles · numbers,)
    w: Array  # (LINES, classes, tiles · numbers)
    b: Array  # (classes,)


def filters_lines(model: Cnn, dtype: Any = np.float32) -> bool:
    """Return whether sums of this model filter lines.

    Where that was a fifth faster: in float32 on a CPU, for large pictures with colours.
    """
    is_plain = jax.default_backend() == "cpu" and load_kernels(model) is None
    is_plain = is_plain and clipping.product_type(model, dtype) == dtype == np.float32
    pays = model.shape[2] > 1 and math.prod(_count_tiles(model)) >= 64  # thin products are slow
    return is_plain and pays and all(side % LINES == 0 for side in model.map_shape[1:])


@cache
def find_filters() -> tuple[Any, Any, Any]:
    """Return A, G and B.

    A product of polynomials with LINES and KERNEL coefficients is known by its values at so many
    points as it has coefficients, and a correlation is the transpose of that product. Powers of two
    move from B to G, so that the numbers of both are near 1.

    >>> a, g, b = find_filters()
    >>> lines, kernel = np.arange(8.0), np.array([1.0, 0.0, 2.0, 0.0, 0.0])
    >>> (a.T @ ((g @ kernel) * (b @ lines))).round(6).tolist()  # d_i + 2 d_{i+2}
    [4.0, 7.0, 10.0, 13.0]
    """
    size = LINES + KERNEL - 1

    def evaluate(coefficients: int) -> Any:
        at_infinity = np.arange(coefficients) == coefficients - 1
        return np.vstack([np.vander(_POINTS, coefficients, increasing=True), at_infinity])

    b = np.linalg.inv(evaluate(size)).T
    scale = 2.0 ** np.round(np.log2(np.abs(b).max(axis=1, keepdims=True)))
    return evaluate(LINES), evaluate(KERNEL) * scale, b / scale


def _count_tiles(model: Cnn) -> tuple[int, int]:
    _, height, width = model.map_shape
    return height // LINES, width // LINES


def _numbers_per_filtered_row(model: Cnn) -> int:
    """Return the temporary numbers of a row: windows, their products, and the map."""
    products = (len(_POINTS) + 1) * math.prod(_count_tiles(model)) * LINES
    return products * (2 * model.shape[2] + model.channels) + math.prod(model.map_shape)


def arrange_filters(model: Cnn, params: Params) -> Filtered:
    """Return the bands of the transformed kernel, and the dense weights in the lines' order."""
    _, g, _ = find_filters()
    kernel = jnp.einsum("pi,ijkc->pjkc", jnp.asarray(g, params["kernel"].dtype), params["kernel"])
    shifts = [jnp.pad(kernel, [(0, 0), (s, LINES - 1 - s), (0, 0), (0, 0)]) for s in range(LINES)]
    (down, right), channels = _count_tiles(model), model.channels
    w = params["w"].reshape(channels, down, LINES, right, LINES, model.classes)
    return Filtered(
        jnp.stack(shifts, axis=3).reshape(len(g), -1, LINES * channels),
        jnp.tile(params["bias"], down * right * LINES),
        w.transpose(2, 5, 1, 3, 4, 0).reshape(LINES, model.classes, -1),
        params["b"],
    )


def _restore_line_order(model: Cnn, w: Array) -> Array:
    """Return (LINES, classes, numbers) as the dense weights, (places, classes)."""
    (down, right), channels = _count_tiles(model), model.channels
    w = w.reshape(LINES, model.classes, down, right, LINES, channels)
    return w.transpose(5, 2, 0, 3, 4, 1).reshape(-1, model.classes)


def _transform_windows(model: Cnn, x: Array) -> Array:
    """Return B d of what each tile looks at, (points, n, tiles, window)."""
    (down, right), (high, wide, colours) = _count_tiles(model), model.shape
    _, _, b = find_filters()
    sides = [(0, 0), (PADDING, PADDING), (PADDING * colours, PADDING * colours)]
    padded = jnp.pad(x.reshape(-1, high, wide * colours), sides)
    # Tiles are as high and wide as the padding: a window is a tile of the picture and the next one.
    blocks = padded.reshape(x.shape[0], down + 1, LINES, -1)
    lines = [blocks[:, i // LINES :, i % LINES][:, :down] for i in range(len(b))]
    transformed = jnp.stack(
        [sum(float(v) * line for v, line in zip(row, lines, strict=True) if v) for row in b]
    )
    tiles = transformed.reshape(len(b), x.shape[0], down, right + 1, LINES * colours)
    windows = jnp.concatenate([tiles[:, :, :, :-1], tiles[:, :, :, 1:]], axis=-1)
    return windows.reshape(len(b), x.shape[0], down * right, -1)


def _filter_lines(windows: Array, with_params: Filtered) -> Array:
    """Return the maps before the relu, (LINES, n, tiles · numbers)."""
    points, rows, _, _ = windows.shape
    products = jnp.einsum("pntk,pkm->pntm", windows, with_params.bands).reshape(points, rows, -1)
    a = jnp.asarray(find_filters()[0], windows.dtype)
    return jnp.einsum("pr,pnm->rnm", a, products) + with_params.bias


def _apply_dense_by_line(hidden: Array, with_params: Filtered) -> Array:
    """Return the scores, (n, classes)."""
    scores = [line @ w.T for line, w in zip(hidden, with_params.w, strict=True)]
    return sum(scores, start=with_params.b)


def _find_filtered_factors(model: Cnn, params: Filtered, rows: Inspected, y: Array) -> Factors:
    n, tiles, kind = y.shape[0], math.prod(_count_tiles(model)), params.w.dtype
    windows, (a, g, _) = _transform_windows(model, rows.x), find_filters()
    hidden = base.relu_finite(_filter_lines(windows, params), kind)
    error2 = softmax.score_errors(_apply_dense_by_line(hidden, params), y, model.number_loss)
    error1 = jnp.where(hidden > 0, jnp.stack([error2 @ w for w in params.w]), 0)
    by_point = jnp.einsum("pr,rnm->pnm", jnp.asarray(a, kind), error1)
    by_band = jnp.einsum("pntm,pntk->pnkm", by_point.reshape(len(a), n, tiles, -1), windows)
    by_band = by_band.reshape(len(a), n, 2 * LINES, model.shape[2], LINES, model.channels)
    shifts = [by_band[:, :, s : s + KERNEL, :, s] for s in range(LINES)]
    by_kernel = sum(shifts[1:], start=shifts[0])
    kernels = jnp.einsum("pi,pnm->nim", jnp.asarray(g, kind), by_kernel.reshape(len(a), n, -1))
    # Tiles first: a sum along the memory is added up one by one.
    squared, biases = (
        jnp.sum(numbers.reshape(LINES, n, tiles, -1), axis=(0, 2))
        for numbers in (hidden**2, error1)
    )
    return Factors(
        rows.is_clean,
        kernels.reshape(n, KERNEL, *by_kernel.shape[2:]),
        jnp.sum(biases.reshape(n, LINES, model.channels), axis=1),
        hidden,
        jnp.sum(squared, axis=1),
        error2,
    )
