"""Fixed features: gradient histograms of a picture, a function of that one sample alone.

They are computed once, when rows are read, and cost no privacy: a record's features change only if
the record does, so the sensitivity of a release stays the same. No number here is taken from data.
The code uses numpy and only operations that IEEE rounds correctly (+ − × ÷ √ max), always in the
same order: simulation, server and device get the same bits, whichever rows are computed together.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from sottovoce.errors import InputError

Floats = NDArray[np.float32]

BINS = 8  # directions of a gradient, all around: a stroke has two sides
SHARPNESS = 3  # squarings: a pixel counts in the bins near its direction by cos⁸ of the angle
NORM = 4.0  # of a sample: the bias, whose feature is 1, takes little of a clipped gradient
COLOUR = 0.7  # how much the colours count beside the gradients
FLAT = 0.1  # a cell's strength is measured against this, so that noise in a flat cell stays small
CHUNK_NUMBERS = 1 << 21  # of one array: 8 MiB


@dataclass(frozen=True)
class Hog:
    """Histograms of gradients over cells of a picture of `shape` (height, width, colours).

    0. with `upright`: each line shifted along itself until the picture no longer leans;
    1. g, the differences of a pixel's neighbours, right − left and lower − upper, 0 beyond the rim;
    2. for each of 8 directions u_b: ‖g‖·max(0, cos∠(g, u_b))⁸, summed over the colours;
    3. of each direction the sum over a cell, with weights that fall linearly into its neighbours;
    4. a cell divided by √(0.1² + squares of its 3×3 neighbourhood): contrast no longer counts;
    5. less the sample's mean, and brought to norm 4: every picture counts alike;
    6. with `colours`: beside them the mean of each colour over each cell, less the sample's mean,
       0.7 times as long as the gradients', and both together brought to norm 4.

    A picture with a number that is not finite has features that are none; such a row counts for
    nothing when gradients are clipped.

    >>> hog = Hog((28, 28, 1), cell=4)
    >>> hog.width
    392
    >>> edge = np.zeros((1, 28, 28), np.float32)
    >>> edge[0, :, 14:] = 1
    >>> seen = hog.apply(edge.reshape(1, -1)).reshape(7, 7, 8)
    >>> int(seen[3, 3].argmax()), round(float(np.linalg.norm(seen)), 4)
    (0, 4.0)
    """

    shape: tuple[int, int, int]
    cell: int
    upright: bool = False
    colours: bool = False

    name: ClassVar[str] = "hog"  # in plans and messages

    @property
    def cells(self) -> tuple[int, int]:
        """How many cells there are, down and across; the last may reach beyond the rim."""
        return -(-self.shape[0] // self.cell), -(-self.shape[1] // self.cell)

    @property
    def width(self) -> int:
        """How many features a sample has."""
        return math.prod(self.cells) * (BINS + (self.shape[2] if self.colours else 0))

    def apply(self, x: NDArray[np.floating]) -> Floats:
        """Return the features of every row, (n, numbers of a picture) → (n, width) of float32."""
        rows = max(1, CHUNK_NUMBERS // (math.prod(self.shape) + self.width))
        features = np.empty((len(x), self.width), np.float32)
        with np.errstate(all="ignore"):
            for start in range(0, len(x), rows):
                chunk = np.asarray(x[start : start + rows], np.float32)
                pictures = chunk.reshape(len(chunk), *self.shape)
                features[start : start + rows] = self._compute(pictures)
        return features

    def _compute(self, pictures: Floats) -> Floats:
        n, (down, across) = len(pictures), self.cells
        pictures = _shear_upright(pictures) if self.upright else pictures
        padded = np.pad(pictures, ((0, 0), (1, 1), (1, 1), (0, 0)))
        right = padded[:, 1:-1, 2:] - padded[:, 1:-1, :-2]
        lower = padded[:, 2:, 1:-1] - padded[:, :-2, 1:-1]
        length = np.sqrt(right * right + lower * lower)
        histograms = np.empty((n, down, across, BINS), np.float32)
        for b, (cosine, sine) in enumerate(_directions()):
            along = np.maximum(right * cosine + lower * sine, np.float32(0))
            along = np.where(length == 0, length, along / length)
            for _ in range(SHARPNESS):
                along = along * along
            strength = _sum_axis(along * length, 3)
            histograms[..., b] = self._pool_cells(strength)
        around = np.pad(_sum_axis(histograms * histograms, 3), ((0, 0), (1, 1), (1, 1)))
        near = [around[:, i : i + down, j : j + across] for i in range(3) for j in range(3)]
        strength = np.sqrt(sum(near, start=np.float32(FLAT * FLAT)))
        edges: Floats = np.asarray(histograms / strength[..., None], np.float32).reshape(n, -1)
        if not self.colours:
            return centre_and_scale(edges, NORM)
        tones = self._pool_cells(pictures)
        norm = NORM / math.sqrt(1 + COLOUR * COLOUR)
        colours = centre_and_scale(np.asarray(tones.reshape(n, -1), np.float32), COLOUR * norm)
        return np.concatenate([centre_and_scale(edges, norm), colours], axis=1)

    def _pool_cells(self, values: Floats) -> Floats:
        down, across = self.cells
        return _pool_axis(_pool_axis(values, 1, down, self.cell), 2, across, self.cell)


def centre_and_scale(values: Floats, norm: float) -> Floats:
    """Return every row less its mean, scaled to this norm; a constant row becomes 0."""
    with np.errstate(all="ignore"):  # a warning would tell of a row
        values = values - np.mean(values, axis=1, keepdims=True)
        length = np.sqrt(np.sum(values * values, axis=1, keepdims=True))
        scaled = np.where(length == 0, values, values / length * np.float32(norm))
    return np.asarray(scaled, np.float32)


def build(
    name: str | None,
    shape: tuple[int, ...],
    cell: int | None,
    upright: bool | None = None,
    colours: bool | None = None,
) -> Hog | None:
    """Return the features `name` of rows of `shape`, (height, width[, colours])."""
    if name is None:
        return None
    if name != Hog.name:
        raise InputError.of("features", name, Hog.name, "or leave it out")
    if len(shape) not in (2, 3):
        raise InputError(
            f"model.features must be absent for rows of shape {shape}, got {name!r:.60}; gradient "
            "histograms are of pictures (height, width, colours)"
        )
    most = min(shape[:2])
    if cell is None or not 1 <= cell <= most:
        remedy = "the pixels of a cell's side"
        raise InputError.of("model.cell", cell, f"a whole number from 1 to {most}", remedy)
    full = (shape[0], shape[1], shape[2] if len(shape) == 3 else 1)
    if colours and full[2] == 1:
        remedy = "they have one colour"
        raise InputError.of("model.colours", True, f"absent for rows of shape {shape}", remedy)
    return Hog(full, cell, bool(upright), bool(colours))


def _shear_upright(pictures: Floats) -> Floats:
    """Shear every picture by its own moments, so that x and y are no longer correlated in it.

    A line y is read from x + s·(y − ȳ), s = cov(x, y)/var(y) of the picture's ink, |s| ≤ 1.
    """
    n, high, wide, _ = pictures.shape
    ink = _sum_axis(pictures, 3)
    y, x = np.arange(high, dtype=np.float32)[:, None], np.arange(wide, dtype=np.float32)

    def mean(values: Floats) -> Floats:
        return np.asarray(np.sum((ink * values).reshape(n, -1), axis=1)[:, None, None] / total)

    total = np.sum(ink.reshape(n, -1), axis=1)[:, None, None]
    total = np.where(total > 0, total, np.float32(1))  # a picture without ink leans nowhere
    down, across = y - mean(y * np.ones_like(x)), x - mean(x * np.ones_like(y))
    spread = mean(down * down)
    lean = np.where(spread > 0, mean(down * across) / spread, np.float32(0))
    source = x + np.clip(lean, np.float32(-1), np.float32(1)) * down
    left = np.floor(source)
    share = (source - left)[..., None]  # of the pixel to the right
    # Beyond the rim are zeros. A position that is not finite is read there; its result is not
    # finite anyway.
    index = np.clip(np.nan_to_num(left, nan=-1), -1, wide).astype(np.int64)[..., None] + 1
    padded = np.pad(pictures, ((0, 0), (0, 0), (1, 2), (0, 0)))
    near = np.take_along_axis(padded, index, axis=2)
    next_to_it = np.take_along_axis(padded, index + 1, axis=2)
    return np.asarray((1 - share) * near + share * next_to_it, np.float32)


def _directions() -> list[tuple[np.float32, np.float32]]:
    """Return cos and sin of the middle of every bin, rounded to be equal on every machine."""
    turns = [2 * math.pi * b / BINS for b in range(BINS)]
    return [(np.float32(round(math.cos(a), 9)), np.float32(round(math.sin(a), 9))) for a in turns]


def _sum_axis(values: Floats, axis: int) -> Floats:
    """Return the sum along an axis, added in its order."""
    slices = np.moveaxis(values, axis, 0)
    total = np.zeros(slices.shape[1:], np.float32)
    for values in slices:
        total = total + values
    return total


def _pool_axis(values: Floats, axis: int, cells: int, cell: int) -> Floats:
    """Return sums over windows of two cells, one cell apart, with weights like a tent."""
    values = np.moveaxis(values, axis, 0)
    before = cell // 2
    after = (cells + 1) * cell - len(values) - before
    padded = np.pad(values, ((before, after), *[(0, 0)] * (values.ndim - 1)))
    total = np.zeros((cells, *values.shape[1:]), np.float32)
    for k in range(2 * cell):
        tent = np.float32(1 - abs(k + 0.5 - cell) / cell)
        total = total + tent * padded[k : k + cells * cell : cell][:cells]
    return np.asarray(np.moveaxis(total, 0, axis))
