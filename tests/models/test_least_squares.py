"""Least squares in one upload: the solution, the bound on a row, and all the engines."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.linear_model import Ridge

from sottovoce import Plan, simulate
from sottovoce.client import release
from sottovoce.errors import PlanError
from sottovoce.models import least_squares
from sottovoce.models.base import Regression, gradient_matrix
from sottovoce.models.least_squares import PARAMETER, LeastSquares
from sottovoce.privacy import grid
from sottovoce.privacy.sensitivity import Recipe

RNG = np.random.default_rng(7)


def draw_rows(n=400, features=5, classes=3):
    """Rows of norm 1.5 at most, and a class that a linear model finds mostly."""
    x = RNG.normal(size=(n, features))
    x *= 1.5 / np.maximum(np.linalg.norm(x, axis=1, keepdims=True), 1.5)
    y = np.argmax(x[:, :classes] + 0.2 * RNG.normal(size=(n, classes)), axis=1)
    return x, y


@settings(max_examples=100, deadline=None)
@given(
    st.integers(1, 6), st.integers(1, 5), st.floats(1e-3, 1e3),
    st.floats(-300, 300), st.integers(0, 2**32 - 1),
)  # fmt: skip
def test_no_row_has_a_norm_above_one(features, classes, norm, power, seed):
    rng = np.random.default_rng(seed)
    model = LeastSquares(features, classes, norm, "squared" if classes == 1 else None)
    x = rng.normal(size=(20, features)) * 10.0**power
    y = rng.uniform(-9, 9, 20) if classes == 1 else rng.integers(0, classes, 20)
    target = Regression("squared", -1.0, 1.0) if classes == 1 else None
    form = least_squares.base.as_device(model, target=target).form
    found = gradient_matrix(form, {PARAMETER: np.zeros(model.shapes()[PARAMETER])}, x, y)
    norms = np.linalg.norm(found, axis=1)
    assert np.all(norms[np.isfinite(norms)] <= 1)


@pytest.mark.parametrize("clip", [1.0, 0.1])
def test_a_replaced_row_moves_the_sum_by_the_sensitivity_at_most(clip):
    """Beside rows of any length no other row's gradient changes, not even in the last bit."""
    model = LeastSquares(4, 3, norm=2.0)
    form, zeros = model.form(), {PARAMETER: np.zeros(model.shapes()[PARAMETER])}
    x, y = RNG.normal(size=(8, 4)) * 10.0 ** RNG.integers(-3, 4, (8, 1)), RNG.integers(0, 3, 8)
    before = gradient_matrix(form, zeros, x, y)
    total = grid.clipped_sum([before], clip, before.shape[1], None)
    for row in (np.zeros(4), np.full(4, 1e300), np.full(4, np.nan), -x[0], 2 * np.eye(4)[1]):
        changed = x.copy()
        changed[0] = row
        after = gradient_matrix(form, zeros, changed, y)
        assert after[1:].tobytes() == before[1:].tobytes()
        moved = grid.clipped_sum([after], clip, after.shape[1], None) - total
        assert sum(int(step) ** 2 for step in moved) <= grid.REPLACED**2


def test_without_noise_it_is_ridge_regression(monkeypatch):
    """One upload of one client, on the integer grid, against scikit-learn on the same rows."""
    x, y = draw_rows()
    model = LeastSquares(5, 3, norm=1.5)
    form, recipe = model.form(), Recipe(learning_rate=1.0, clip=1.0)
    zeros = {PARAMETER: np.zeros(model.shapes()[PARAMETER])}
    moments = release.step(form, zeros, x, y, recipe)[PARAMETER]
    assert np.allclose(moments[:, :6], moments[:, :6].T, atol=1e-7)
    label = np.eye(3)[y] - 1 / 3
    first, second = model._scales
    design = np.hstack([x, np.ones((len(x), 1))])
    assert np.allclose(moments[:, :6] / first, design.T @ design / len(x), atol=1e-5)
    assert np.allclose(moments[:, 6:] / second, design.T @ label / len(x), atol=1e-5)
    monkeypatch.setattr(least_squares, "LEAST_RIDGE", 0.01)
    largest = np.linalg.eigvalsh(design.T @ design / len(x))[-1]
    penalty = least_squares.RIDGE * 0.01 * largest * len(x)
    wanted = Ridge(penalty, fit_intercept=False).fit(design, label).coef_.T
    assert np.allclose(model.solve(moments, np), wanted, atol=1e-4)
    # η and C are factors of the moments, and do not matter where no row is clipped.
    assert np.allclose(model.solve(7 * moments, np), wanted, atol=1e-4)


def test_the_ridge_follows_from_what_noise_does_to_eigenvalues():
    rng, model = np.random.default_rng(3), LeastSquares(5, 3, norm=1.5)
    first, second = model._scales
    moments = rng.normal(0, 0.1, (6, 9))
    products, right = moments[:, :6] / first, moments[:, 6:] / second
    values, vectors = np.linalg.eigh((products + products.T) / 2)
    assert values[0] < 0
    kept = vectors @ np.diag(np.maximum(values, 0)) @ vectors.T
    ridge = -least_squares.RIDGE * values[0]
    assert np.allclose(model.solve(moments, np), np.linalg.solve(kept + ridge * np.eye(6), right))
    assert np.isfinite(model.solve(np.zeros((6, 9)), np)).all()


def make_plan(**changes):
    values = {"model": {"name": "least-squares", "norm": 1.5}, "privacy": {"epsilon": 8.0}}
    return Plan(**values, **changes)


def test_a_plan_trains_in_one_round_and_every_engine_agrees(tmp_path):
    rows = [draw_rows(n) for n in (800, 1200)]
    public = draw_rows(600)
    given_rows = {"data": rows, "validation": public, "test": public}
    run = simulate(make_plan(), seed=1, out=tmp_path / "run", **given_rows)
    assert run.record["result"]["rounds_used"] == 1
    assert run.record["result"]["test_accuracy"] > 0.7
    secure = simulate(make_plan(noise="secure"), **given_rows)
    assert secure.record["result"]["test_accuracy"] > 0.7
    assert np.mean(run.predict(public[0]) == secure.predict(public[0])) > 0.8
    shares = run.predict_proba(public[0])
    assert shares.shape == (600, 3)
    assert np.allclose(shares.sum(axis=1), 1)


def test_a_number_is_predicted():
    x = RNG.uniform(-1, 1, (3000, 2))
    y = 50 + 20 * x[:, 0] - 10 * x[:, 1]
    plan = Plan(
        model={"name": "least-squares", "norm": 1.5, "loss": "squared"},
        data={"target": [0, 100]}, privacy={"epsilon": 8.0},
    )  # fmt: skip
    run = simulate(plan, data=[(x[:1500], y[:1500]), (x[1500:], y[1500:])],
                   validation=(x[:500], y[:500]), test=(x[:500], y[:500]), seed=1)  # fmt: skip
    assert run.record["result"]["metrics"]["r2"]["value"] > 0.9


@pytest.mark.parametrize(
    ("model", "local", "words"),
    [
        ({}, {}, "model.norm must be a public bound on the norm of a row"),
        ({"norm": 2.0}, {"clip": 2.0}, "local.clip must be at most 1 with least-squares, got 2"),
        ({"norm": 2.0, "loss": "huber"}, {}, "model.loss must be absent with least-squares"),
    ],
)
def test_what_it_cannot_have_is_refused(model, local, words):
    target = {"data": {"target": [0, 1]}} if "loss" in model else {}
    with pytest.raises(PlanError, match=words):
        Plan(model={"name": "least-squares"} | model, local=local, **target)
    assert Plan(model={"name": "least-squares", "features": "hog"}).model.norm is None
