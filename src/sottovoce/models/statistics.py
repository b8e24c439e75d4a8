"""Statistics of a table as a model: one upload of it releases means, histograms and products.

The loss of a sample is −⟨w, s⟩, where s is a vector of numbers that depends on the sample alone and
has norm 1 at most. Its gradient is −s, so that one step from w = 0 with η = 1 uploads the noised
mean of s. Everything that protects a gradient (clip, grid, noise, ledger) protects s.

s has these parts, in this order, all divided by one number R:

    each column of numbers        u in [−1, 1], its place between its bounds; 0 if it is missing
    each flag of a number         1 where it is missing, and then the number has no bin
    each column of categories     1 for the row's category, 0 for the others
    the label                     the same as a column
    each column of numbers        1 for the bin of u, 0 for the others
    each pair of u and v          w·u·v: with means, correlations; a label of two classes is ±1

w keeps the products from taking more than half of ‖s‖².
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Self, final

import numpy as np
from numpy.typing import NDArray

from sottovoce.errors import InputError
from sottovoce.models.base import Arrays, Floats, NamedCode, Option, Params, Shapes

BINS = 10
PARAMETER = "statistics"


@final
@dataclass(frozen=True)
class Statistics(NamedCode):
    """The vector s of a table's rows; it predicts the most frequent class, or the mean.

    >>> model = Statistics((0, 3), classes=2)
    >>> {name: part.stop - part.start for name, part in model.parts.items()}
    {'numbers': 1, 'missing': 0, 'categories': 2, 'label': 2, 'bins': 10, 'products': 3}
    >>> block = model.gradient_block({}, np.array([[0.5, 0.0, 1.0]]), np.array([1]))
    >>> bool(np.linalg.norm(block) <= 1), (-block * model.divisor).round(3)[0, :5].tolist()
    (True, [0.5, 0.0, 1.0, 0.0, 1.0])
    """

    columns: tuple[int, ...]  # of each: 0 for a number, 1 if a flag follows it, categories + 1
    classes: int
    bins: int = BINS
    norm: float = 1.0  # the norm of a gradient at most
    number_loss: str | None = None  # given where the label is a number

    name = "statistics"
    needs_jax = False
    predicts_numbers = True
    options = (
        Option("columns", (), "give 0 for a number, 1 for one with a flag, or categories + 1"),
        Option("bins", BINS, "choose how many bins a histogram has"),
        Option("norm", 1.0, "give the clipping norm"),
    )

    @classmethod
    def create(cls, shape: tuple[int, ...], classes: int, **options: Any) -> Self:
        model = cls(tuple(options["columns"]), classes, options["bins"], options["norm"])
        if math.prod(shape) != model.features:
            bound = f"one for each column of {math.prod(shape)} numbers"
            raise InputError.of("columns", model.columns, bound, "count the inputs of the table")
        return model

    @property
    def features(self) -> int:  # type: ignore[override]
        """How many inputs the columns have together."""
        return sum({0: 1, 1: 2}.get(code, code - 1) for code in self.columns)

    @cached_property
    def inputs(self) -> str:
        """What each input is: a number, the flag of the number before it, or a category."""
        return "".join({0: "n", 1: "nf"}.get(code, "c" * (code - 1)) for code in self.columns)

    def _find(self, kind: str) -> NDArray[np.int64]:
        return np.flatnonzero(np.array([*self.inputs]) == kind)

    @property
    def numbers(self) -> int:
        """How many columns hold numbers."""
        return self.inputs.count("n")

    @property
    def correlated(self) -> int:
        """How many numbers are multiplied with each other; the last may be the label."""
        return self.numbers + (self.number_loss is not None or self.classes == 2)

    @property
    def parts(self) -> dict[str, slice]:
        """Where each part of s lies."""
        sizes = {
            "numbers": self.numbers,
            "missing": self.inputs.count("f"),
            "categories": self.inputs.count("c"),
            "label": self.classes,
            "bins": self.numbers * self.bins,
            "products": self._pairs,
        }
        ends = np.cumsum([*sizes.values()]).tolist()
        return {name: slice(end - sizes[name], end) for name, end in zip(sizes, ends, strict=True)}

    @property
    def size(self) -> int:
        """How many numbers s has."""
        return int(self.parts["products"].stop)

    @property
    def _pairs(self) -> int:
        return self.correlated * (self.correlated + 1) // 2

    @property
    def _plain(self) -> int:
        """What ‖s‖² without products is at most, undivided: a number has u and a bin, or a flag."""
        return len(self.columns) + self.numbers + 1

    @cached_property
    def weight(self) -> float:
        """The factor w of the products."""
        return min(1.0, math.sqrt(self._plain / max(self._pairs, 1)))

    @cached_property
    def divisor(self) -> float:
        """R, which is at least the norm of any s without it."""
        return math.sqrt(self._plain + self.weight**2 * self._pairs) * (1 + 2**-40)

    def shapes(self) -> Shapes:
        return {PARAMETER: (self.size,)}

    def draw_parameters(self, seed: int) -> Params:
        return {PARAMETER: np.zeros(self.size, np.float32)}

    def gradient_block(self, params: Arrays, x: Floats, y: Any) -> Floats:
        flags, at = np.zeros((len(x), self.numbers)), self._find("f")
        flags[:, np.searchsorted(self._find("n"), at) - 1] = missing = np.clip(x[:, at], 0, 1)
        with np.errstate(invalid="ignore"):
            u = np.clip(x[:, self._find("n")], -1, 1) * (1 - flags)
            # Rows are float32: 0.7 is a little less, and belongs to the bin that begins there.
            bins = np.clip(np.floor((u + 1) / 2 * self.bins + 1e-4), 0, self.bins - 1)
        if self.number_loss is None:
            label = (np.arange(self.classes) == np.asarray(y)[:, None]).astype(np.float64)
            signed = 2 * label[:, 1:2] - 1 if self.classes == 2 else label[:, :0]
        else:
            label = signed = np.clip(np.asarray(y, np.float64)[:, None], -1, 1)
        in_bin = (bins[:, :, None] == np.arange(self.bins)) * (1 - flags[:, :, None])
        correlated = np.concatenate([u, signed], axis=1)
        first, second = np.triu_indices(self.correlated)
        products = self.weight * correlated[:, first] * correlated[:, second]
        categories = np.clip(x[:, self._find("c")], 0, 1)
        parts = [u, missing, categories, label, in_bin.reshape(len(x), -1), products]
        return np.concatenate(parts, axis=1) * (-self.norm / self.divisor)

    def gradients(self, params: Arrays, x: NDArray[Any], y: NDArray[Any]) -> Arrays:
        return {PARAMETER: self.gradient_block(params, np.asarray(x, np.float64), y)}

    def losses(self, params: Arrays, x: NDArray[Any], y: NDArray[Any]) -> Floats:
        block = self.gradient_block(params, np.asarray(x, np.float64), y)
        return np.asarray((block * params[PARAMETER]).sum(axis=1))

    def predict(self, params: Params, x: Any) -> NDArray[np.int64]:
        counts = np.asarray(params[PARAMETER])[self.parts["label"]]
        return np.full(len(x), int(np.argmax(counts)), np.int64)
