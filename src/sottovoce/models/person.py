"""A person's rows as one sample: what `unit = "person"` protects.

A sample is then all rows of one person at one client, at most `rows_per_person` of them, which is
public. Its gradient is the mean of its rows' gradients, and is clipped as a whole. So replacing a
person with all rows moves an upload as far as replacing one record does otherwise. Everything else
(n, weights, sums, prices, ledgers) counts samples and does not change.

A sample is stored as one row of numbers: `rows_per_person` times the features of a row, its label
and its weight in the mean. A person with fewer rows has the first ones again, with weight 0: shapes
and work must not tell how many rows a person has.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, final

import numpy as np
from numpy.typing import NDArray

from sottovoce.models import base
from sottovoce.models.base import Array, Arrays, Floats, Form, JaxModel, Model, Params, jnp
from sottovoce.privacy.grid import Products

ROWS_PER_PERSON = 8  # where a plan or node file names no other number
MOST_ROWS_PER_PERSON = 10_000


def join_persons(
    x: NDArray[Any], y: NDArray[Any], person: NDArray[np.int64], most: int
) -> NDArray[Any]:
    """Return one sample per person, sorted by the person's number: [persons, most·(features + 2)].

    A person with more than `most` rows keeps those with the least hashes: the choice and the order
    depend on the person's own rows alone, not on their order in a file.

    >>> rows, labels = np.array([[1.0], [1.0], [3.0]]), np.array([0, 0, 1])
    >>> join_persons(rows, labels, np.array([7, 7, 2]), most=2).tolist()
    [[3.0, 1.0, 1.0, 3.0, 1.0, 0.0], [1.0, 0.0, 0.5, 1.0, 0.0, 0.5]]
    """
    x = x.astype(np.result_type(x.dtype, np.float32))  # half a float would merge large labels
    cells = np.concatenate([x, np.asarray(y, x.dtype)[:, None]], axis=1)
    digests = [hashlib.blake2b(row.tobytes(), digest_size=8).digest() for row in cells]
    order = np.lexsort((np.frombuffer(b"".join(digests), np.uint64), person))
    _, first, count = np.unique(person[order], return_index=True, return_counts=True)
    rows_kept, turn = np.minimum(count, most)[:, None], np.arange(most)
    joined = np.empty((len(first), most, cells.shape[1] + 1), x.dtype)
    joined[..., :-1] = cells[order[first[:, None] + turn % rows_kept]]
    joined[..., -1] = np.where(turn < rows_kept, 1 / rows_kept, 0)
    return joined.reshape(len(first), -1)


def has_ids(ids: NDArray[Any]) -> bool:
    """Return whether every entry of an array is an id: a number or a text, and none is missing.

    >>> [has_ids(np.array(ids)) for ids in ([1, 2], ["a", " "], [1.0, np.nan])]
    [True, False, False]
    """
    if ids.dtype.kind in "US":
        return bool((np.char.str_len(np.char.strip(ids)) > 0).all())
    return ids.dtype.kind in "iu" or (ids.dtype.kind == "f" and bool(np.isfinite(ids).all()))


def split_persons(x: Any, rows_per_person: int, is_number: bool = False) -> tuple[Any, Any, Any]:
    """Return the rows of samples, their labels and weights; of numpy's arrays or JAX's.

    Labels are classes, or numbers.
    """
    cells = x.reshape(x.shape[0] * rows_per_person, -1)
    labels = cells[:, -2] if is_number else cells[:, -2].astype(int)
    return cells[:, :-2], labels, cells[:, -1]


def apply_to_rows(
    function: Callable[[Any], NDArray[Any]], x: NDArray[Any], rows_per_person: int
) -> NDArray[Any]:
    """Return samples with `function` applied to the features of their rows.

    Nothing depends on how many rows a person has: those with weight 0 are computed, too.
    """
    if not rows_per_person:
        return function(x)
    cells = x.reshape(len(x) * rows_per_person, -1)
    return np.concatenate([function(cells[:, :-2]), cells[:, -2:]], axis=1).reshape(len(x), -1)


@dataclass(frozen=True)
class PersonCode:
    """A model's numpy code, or a client's own, for samples that are persons."""

    code: Model | base.IsolatedModel
    rows_per_person: int
    is_number: bool = False  # whether a number is predicted

    keeps_factors: ClassVar[bool] = False

    def gradient_block(self, params: Arrays, x: Floats, y: Any) -> Floats:
        """Return the mean gradient of each person's rows; a person's depends on no other's.

        Each person's mean is a product of its own: one product of all would round by position.
        """
        rows, labels, weight = split_persons(x, self.rows_per_person, self.is_number)
        block = Products.of(self.code.gradient_block(params, rows, labels)).flush_tiny()
        means = []
        for left, right in block.pieces:
            left = (left * weight[:, None]).reshape(len(x), self.rows_per_person, -1)
            right = right.reshape(len(x), self.rows_per_person, -1)
            means.append(np.matmul(left.swapaxes(1, 2), right).reshape(len(x), -1))
        return np.concatenate(means, axis=1)

    def losses(self, params: Arrays, x: Floats, y: Any) -> Floats:
        """Return the mean loss of each person's rows."""
        rows, labels, weight = split_persons(x, self.rows_per_person, self.is_number)
        losses = self.code.losses(params, rows, labels) * weight
        return np.asarray(losses.reshape(len(x), self.rows_per_person).sum(axis=1))


@final
@dataclass(frozen=True)
class PersonModel(JaxModel):
    """A JAX model that is trained on persons, and evaluated on rows.

    Which of the two an array holds follows from its width.
    """

    model: JaxModel
    rows_per_person: int
    features: int  # of a row
    is_number: bool = False  # whether a number is predicted

    def init(self, key: Array) -> Params:
        return self.model.init(key)

    def apply(self, params: Params, x: Array) -> Array:
        return self.model.apply(params, x)

    def predict(self, params: Params, x: Array) -> Array:
        return self.model.predict(params, x)

    def loss(self, params: Params, x: Array, y: Array) -> Array:
        if x.shape[-1] == self.features:
            return self.model.loss(params, x, y)
        rows, labels, weight = split_persons(x, self.rows_per_person, self.is_number)
        losses = self.model.loss(params, rows, labels) * weight
        return jnp.sum(losses.reshape(-1, self.rows_per_person), axis=1)

    def judge(self, prepared: Any, x: Array, y: Array) -> tuple[Array, Array]:
        if x.shape[-1] == self.features:
            return self.model.judge(self.model.prepare(prepared), x, y)
        return self.loss(prepared, x, y), jnp.zeros(x.shape[0], bool)

    def form(self, shape: tuple[int, ...], classes: int) -> Form:
        return self.model.form(shape, classes)

    @property
    def code(self) -> Model:
        return self.model
