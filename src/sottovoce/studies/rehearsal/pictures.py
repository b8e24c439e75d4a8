"""Digits drawn anew: the 1,797 embedded pictures shifted, turned, scaled, thicker or thinner.

A few hundred sources become as many rows as a federation has. Everything follows from the seed.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]

TURN = 0.22  # radians, either way
LEAN = 0.15  # x moved by this part of y, either way
SIZE = (0.85, 1.15)
SHIFT = 0.06  # of the side, either way
STROKE = (0.10, 0.40)  # ink below this becomes paper: thick strokes to thin ones
SHARP = (1.5, 3.0)
BOX = 20 / 28  # of the side that a digit fills in larger pictures, as in MNIST
CHUNK = 2048


def drawn(
    sources: Floats, pick: NDArray[np.int64], shape: tuple[int, ...], rng: np.random.Generator
) -> Floats:
    """Row i is sources[pick[i]] drawn anew as a picture of `shape` (height, width, colours).

    >>> rng = np.random.default_rng(1)
    >>> cross = np.zeros((1, 8, 8), np.float32)
    >>> cross[0, 3:5], cross[0, :, 3:5] = 1, 1
    >>> seen = drawn(cross, np.zeros(3, int), (28, 28, 1), rng)
    >>> seen.shape, bool(seen.min() >= 0), bool(seen.max() <= 1), bool((seen[0] != seen[1]).any())
    ((3, 28, 28, 1), True, True, True)
    """
    high, wide, colours = shape[0], shape[1], shape[2] if len(shape) > 2 else 1
    out = np.empty((len(pick), high, wide, colours), np.float32)
    for start in range(0, len(pick), CHUNK):
        own = pick[start : start + CHUNK]
        ink = _strokes(_moved(sources[own], high, wide, rng), rng)
        out[start : start + CHUNK] = _coloured(ink, colours, rng)
    return out


def resized(pictures: Floats, shape: tuple[int, ...]) -> Floats:
    """Pictures (n, height, width, colours) as pictures of `shape`, between pixels linearly.

    Colours become grey as their mean, grey becomes colours by repetition.

    >>> resized(np.ones((1, 28, 28, 1), np.float32), (8, 8, 3)).shape
    (1, 8, 8, 3)
    """
    n, high, wide, colours = pictures.shape
    wanted = shape[2] if len(shape) > 2 else 1
    if colours != wanted:
        grey = pictures.mean(axis=3, keepdims=True)
        pictures = np.repeat(grey, wanted, axis=3)
    if (high, wide) == tuple(shape[:2]):
        return np.ascontiguousarray(pictures, np.float32)
    y = (np.arange(shape[0]) + 0.5) * high / shape[0] - 0.5
    x = (np.arange(shape[1]) + 0.5) * wide / shape[1] - 0.5
    lines = _between(pictures, y, axis=1)
    return np.asarray(_between(lines, x, axis=2), np.float32).reshape(n, *shape[:2], wanted)


def _between(values: Floats, at: NDArray[np.float64], axis: int) -> Floats:
    last = values.shape[axis] - 1
    at = np.clip(at, 0, last)
    low = np.floor(at).astype(int)
    part = (at - low).astype(np.float32)
    form = [1] * values.ndim
    form[axis] = len(at)
    part = part.reshape(form)
    below, above = (np.take(values, i, axis=axis) for i in (low, np.minimum(low + 1, last)))
    return np.asarray((1 - part) * below + part * above)


def _moved(pictures: Floats, high: int, wide: int, rng: np.random.Generator) -> Floats:
    """Each picture enlarged, turned, leant and shifted: every new pixel looks up its old place."""
    n, rows, columns = pictures.shape
    turn = rng.uniform(-TURN, TURN, n)
    lean: NDArray[np.float64] = np.asarray(rng.uniform(-LEAN, LEAN, n))
    box = BOX if min(high, wide) >= 16 else 1.0
    size: NDArray[np.float64] = box * rng.uniform(SIZE[0], SIZE[1], (2, n))
    shift: NDArray[np.float64] = rng.uniform(-SHIFT, SHIFT, (2, n))
    y = ((np.arange(high) + 0.5) / high - 0.5)[None, :, None] - shift[0][:, None, None]
    x = ((np.arange(wide) + 0.5) / wide - 0.5)[None, None, :] - shift[1][:, None, None]
    cosine, sine = np.cos(turn)[:, None, None], np.sin(turn)[:, None, None]
    down = (cosine * y + sine * x) / size[0][:, None, None]
    across = (cosine * x - sine * y) / size[1][:, None, None] + lean[:, None, None] * down
    padded = np.pad(pictures, ((0, 0), (1, 1), (1, 1)))  # beyond the rim there is nothing
    at_y = np.clip((down + 0.5) * rows + 0.5, 0, rows + 1 - 1e-6)
    at_x = np.clip((across + 0.5) * columns + 0.5, 0, columns + 1 - 1e-6)
    top, left = at_y.astype(int), at_x.astype(int)
    part_y, part_x = (at_y - top).astype(np.float32), (at_x - left).astype(np.float32)
    own = np.arange(n)[:, None, None]
    upper = (1 - part_x) * padded[own, top, left] + part_x * padded[own, top, left + 1]
    lower = (1 - part_x) * padded[own, top + 1, left] + part_x * padded[own, top + 1, left + 1]
    return np.asarray((1 - part_y) * upper + part_y * lower, np.float32)


def _strokes(ink: Floats, rng: np.random.Generator) -> Floats:
    n = len(ink)
    paper = rng.uniform(*STROKE, n).astype(np.float32)[:, None, None]
    sharp = rng.uniform(*SHARP, n).astype(np.float32)[:, None, None]
    return np.asarray(np.clip((ink - paper) * sharp, 0, 1), np.float32)


def _coloured(ink: Floats, colours: int, rng: np.random.Generator) -> Floats:
    if colours == 1:
        return ink[..., None]
    pair = rng.uniform(0, 1, (2, len(ink), 1, 1, colours)).astype(np.float32)
    return np.asarray(pair[0] + ink[..., None] * (pair[1] - pair[0]), np.float32)
