"""Synthetic rows of a public schema: which columns there are, and nothing of what stands in them.

A row is of one of eight kinds; each kind has its own shares of every category and its own middle of
every number, so that columns go together as they do in real tables. The label follows from a
linear rule drawn at random, with chance (a softmax of its scores): how noisy is set so that the
best possible prediction is right in about 85 of 100 rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from sottovoce.data import census
from sottovoce.data.census import Choice, Number
from sottovoce.data.tables import Spec, is_bounds
from sottovoce.errors import InputError

KINDS = 8
BEST = 0.85  # of the rows, by whoever knows the rule
NUMBERED = {"ipums": 57}  # features of a table of which the columns are not listed here


class Field:
    """One column: `width` features, of which a category sets one and a number the first."""

    def __init__(self, width: int, categories: int) -> None:
        """`categories` is 0 for a number; a category beyond the width is all zeros."""
        self.width, self.categories = width, categories


def fields_of(name: str | None, columns: Mapping[str, Spec], label: str | None) -> list[Field]:
    """The columns of a census table by its name, or those that a plan declares.

    >>> sum(field.width for field in fields_of("acs", {}, None))
    76
    >>> found = fields_of(None, {"age": (0.0, 9.0), "sex": ("f", "m"), "y": ("0", "1")}, "y")
    >>> [(field.width, field.categories) for field in found]
    [(1, 0), (2, 2)]
    """
    known = {"acs": census.ACS, "adult": census.ADULT}
    if name in known:
        return [_census(column) for column in known[name]]
    if name in NUMBERED:
        return [Field(1, 0) for _ in range(NUMBERED[name])]
    own = [spec for column, spec in columns.items() if column != label and spec]
    return [Field(1, 0) if is_bounds(spec) else Field(len(spec), len(spec)) for spec in own]


def _census(column: Choice | Number) -> Field:
    if isinstance(column, Number):
        return Field(column.width, 0)
    return Field(column.width, len(column.categories))


def synthetic(
    fields: Sequence[Field], classes: int, rows: int, rng: np.random.Generator
) -> tuple[NDArray[np.float32], NDArray[np.int32]]:
    """So many rows of these columns and their labels.

    >>> x, y = synthetic(fields_of("adult", {}, None), 2, 500, np.random.default_rng(1))
    >>> x.shape, float(x.min()), float(x.max()) <= 1, 0.3 < y.mean() < 0.7
    ((500, 103), 0.0, True, np.True_)
    """
    if not fields:
        raise InputError(
            "the plan declares no columns to make rows from; list them in data.columns, or give "
            "public rows with --public"
        )
    kind = rng.integers(0, KINDS, rows)
    parts = [_column(field, kind, rng) for field in fields]
    x = np.concatenate(parts, axis=1)
    rule = rng.normal(size=(x.shape[1], classes)) / np.sqrt(len(fields))
    scores = x @ rule
    scores -= np.median(scores, axis=0)
    scores /= max(float(scores.std()), 1e-9)
    chances = _chances(scores)
    draw = rng.random((rows, 1))
    y = np.minimum((np.cumsum(chances, axis=1) < draw).sum(axis=1), classes - 1)
    y[: min(classes, rows)] = np.arange(min(classes, rows))  # every class is shown
    return x.astype(np.float32), y.astype(np.int32)


def _chances(scores: NDArray[np.float64]) -> NDArray[np.float64]:
    """softmax(s·scores) with the s at which the most likely class is right BEST of the time."""
    low, high = 1e-3, 1e3
    for _ in range(40):
        middle = np.sqrt(low * high)
        low, high = (middle, high) if _best(_softmax(middle * scores)) < BEST else (low, middle)
    return _softmax(low * scores)


def _best(chances: NDArray[np.float64]) -> float:
    return float(chances.max(axis=1).mean())


def _softmax(scores: NDArray[np.float64]) -> NDArray[np.float64]:
    raised = np.exp(scores - scores.max(axis=1, keepdims=True))
    return np.asarray(raised / raised.sum(axis=1, keepdims=True))


def _column(field: Field, kind: NDArray[np.int64], rng: np.random.Generator) -> NDArray[np.float64]:
    out = np.zeros((len(kind), field.width))
    if field.categories == 0:
        middle = rng.uniform(0.15, 0.85, KINDS)[kind]
        out[:, 0] = rng.beta(4 * middle, 4 * (1 - middle))
        if field.width > 1:  # the second feature says that there is no number
            absent = rng.random(len(kind)) < rng.uniform(0, 0.5)
            out[absent, 0], out[absent, 1] = 0.0, 1.0
        return out
    shares = rng.dirichlet(np.full(field.categories, 0.7), KINDS)
    draw = rng.random((len(kind), 1))
    code = np.minimum((np.cumsum(shares[kind], axis=1) < draw).sum(axis=1), field.categories - 1)
    (seen,) = np.nonzero(code < field.width)
    out[seen, code[seen]] = 1.0
    return out
