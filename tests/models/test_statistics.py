"""The vector of statistics: what it holds, how long it is, and that a message cannot bend it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sottovoce.errors import Malformed
from sottovoce.models.base import Form, gradient_matrix
from sottovoce.models.statistics import PARAMETER, Statistics

CODES = st.lists(st.integers(0, 5), min_size=1, max_size=6).map(tuple)


@settings(max_examples=200, deadline=None)
@given(codes=CODES, classes=st.integers(1, 4), bins=st.integers(2, 7), seed=st.integers(0, 2**32))
def test_no_row_is_longer_than_the_norm(codes, classes, bins, seed):
    model = Statistics(codes, classes, bins, 0.25, "squared" if classes == 1 else None)
    rng = np.random.default_rng(seed)
    x = rng.choice([-np.inf, -9.0, -0.5, 0.0, 0.3, 0.5, 1.0, 9.0, np.inf], (50, model.features))
    one_hot = rng.random((50, model.features)) < 0.5
    x = np.where(rng.random((50, 1)) < 0.5, x, one_hot)  # also rows that no table has
    for i in np.flatnonzero(np.array([*model.inputs]) == "c"):
        x[:, i] = 0
    y = rng.uniform(-3, 3, 50) if classes == 1 else rng.integers(0, classes, 50)
    block = model.gradient_block({}, x, y)
    assert block.shape == (50, model.size)
    assert np.all(np.linalg.norm(block, axis=1) <= 0.25)


def test_the_parts_are_those_of_the_rows():
    model = Statistics((1, 3, 0), classes=3, bins=4)
    assert model.inputs == "nfccn"
    x = np.array([[0.0, 1.0, 0.0, 1.0, 1.0], [-0.5, 0.0, 1.0, 0.0, 0.2]])
    block = -model.gradient_block({}, x, np.array([2, 0])) * model.divisor
    found = {name: block[:, part].round(9).tolist() for name, part in model.parts.items()}
    assert found["numbers"] == [[0.0, 1.0], [-0.5, 0.2]]  # a missing number is 0 and has no bin
    assert found["missing"] == [[1.0], [0.0]]
    assert found["categories"] == [[0.0, 1.0], [1.0, 0.0]]
    assert found["label"] == [[0.0, 0.0, 1.0], [1.0, 0.0, 0.0]]
    assert found["bins"] == [[0.0] * 4 + [0, 0, 0, 1], [0, 1, 0, 0, 0, 0, 1, 0]]
    assert found["products"] == [[0.0, 0.0, 1.0], [0.25, -0.1, 0.04]]


def test_a_row_does_not_depend_on_its_neighbours():
    model = Statistics((0, 3, 1, 0), classes=2)
    rng = np.random.default_rng(5)
    x, y = rng.random((30, model.features)), rng.integers(0, 2, 30)
    form, params = model.form(), {PARAMETER: np.zeros(model.size)}
    whole = gradient_matrix(form, params, x, y)
    spoilt = x.copy()
    spoilt[0] = np.nan
    others = gradient_matrix(form, params, spoilt, y)
    assert np.array_equal(whole[1:], others[1:])
    alone = [gradient_matrix(form, params, x[i : i + 1], y[i : i + 1])[0] for i in range(30)]
    assert np.array_equal(whole, np.stack(alone))


@pytest.mark.parametrize(
    "change",
    [
        {"columns": 3},
        {"columns": [0, "1"]},
        {"columns": [0, -1]},
        {"columns": [0, True]},
        {"columns": [0, 2.0]},
        {"columns": [0, 0]},  # two inputs, the shape has three
        {"columns": [2**31]},
        {"bins": 0},
        {"norm": -1.0},
        {"norm": float("inf")},
        {"extra": 1},
    ],
)
def test_a_message_with_other_statistics_is_malformed(change):
    good = Statistics((0, 3), classes=2).form().to_json()
    assert Form.from_json(good).shapes() == {PARAMETER: (1 + 2 + 2 + 10 + 3,)}
    with pytest.raises(Malformed):
        Form.from_json(good | change)
