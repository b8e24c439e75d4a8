"""The cnn's convolution as one product of a size that processors are good at.

Written as a product with the 25 · colours × channels numbers of a kernel, a convolution is thin (8
channels) and its patches are 25 times the picture. Instead the map is covered with tiles of a×b
places. All places of a tile look at one window of (a+4)×(b+4)×colours numbers of the picture, so

    maps = windows · band,

where the band holds the kernel at the a·b shifts of a tile, and zeros elsewhere. For the paper's
cnn (a×b = 2×4) a picture's windows take a quarter of the memory of its patches; the products do
(a+4)(b+4)/25 = 1.92 times the multiplications, the band's zeros among them, in a fifth of the time.

A row's own gradient by the kernel is the sum, over a tile's places, of the band's gradient at their
shift. The hidden layer stays in the order of the tiles: the dense weights are put in that order
once, instead of every row's maps in theirs.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from sottovoce.models.base import KERNEL, PADDING, Cnn, Params

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
