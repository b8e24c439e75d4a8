"""Δ from the recipe: no pair of neighbours exceeds it, and some pair reaches it."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sottovoce.errors import InputError, NoSensitivity
from sottovoce.privacy.sensitivity import Recipe


def clipped(g: np.ndarray, clip: float) -> np.ndarray:
    norm = np.linalg.norm(g, axis=1, keepdims=True)
    return g / np.maximum(1, norm / clip)


def train(x: np.ndarray, recipe: Recipe, steps: int) -> np.ndarray:
    """Full-batch clipped steps on Σ ½‖w − x_m‖² from 0: gradients w − x_m, any sample you like."""
    w = np.zeros(x.shape[1])
    for _ in range(steps):
        w = w - recipe.learning_rate * clipped(w - x, recipe.clip).mean(axis=0)
    return w


@settings(derandomize=True, deadline=None, max_examples=300)
@given(
    st.integers(1, 12),
    st.integers(1, 3),
    st.integers(0, 2**32 - 1),
    st.floats(0.01, 3),
    st.floats(0.1, 5),
    st.sampled_from([1, 2, 7]),
    st.sampled_from([("record", 1), ("record", 3), ("client", 1)]),
)
def test_no_neighbours_lie_further_apart(n, dim, seed, rate, clip, steps, unit_group):
    unit, group = unit_group
    recipe = Recipe(rate, clip, unit=unit, steps=steps, noise_at="last-step", group=group)
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((n, dim)) * 10 ** rng.uniform(-2, 2, (n, 1))
    other = x.copy()
    changed = n if unit == "client" else min(group, n)
    other[:changed] = -x[:changed] * 10 ** rng.uniform(-2, 4)
    apart = np.linalg.norm(train(x, recipe, steps) - train(other, recipe, steps))
    assert apart <= recipe.sensitivity(n) * (1 + 1e-12)


@pytest.mark.parametrize("unit", ["record", "client"])
def test_a_worst_case_reaches_it(unit):
    recipe = Recipe(0.7, 2.0, unit=unit)
    x = np.zeros((10, 3))
    x[:, 0] = 1e6
    other = x.copy()
    other[: 10 if unit == "client" else 1] *= -1
    apart = np.linalg.norm(train(x, recipe, 1) - train(other, recipe, 1))
    assert apart >= 0.999 * recipe.sensitivity(10)


def test_noiseless_steps_exceed_the_tempting_formula():
    # 2ηCE/n would hold if clipped steps did not drive iterates apart; they can.
    n, steps, rate, clip = 1000, 20, 1.0, 1.0
    recipe = Recipe(rate, clip, steps=steps, noise_at="last-step")

    # Gradient of each of n − 1 samples: a steep wall around 0, so that the side is decided once.
    def gradient(w: float) -> float:
        return -math.copysign(min(clip, 1e9 * abs(w)), w)

    def run(first: float) -> float:
        w = 0.0
        for _ in range(steps):
            w = w - rate * (first + (n - 1) * gradient(w)) / n
        return w

    apart = abs(run(clip) - run(-clip))
    tempting = 2 * rate * clip * steps / n
    assert apart > 100 * tempting
    assert apart <= recipe.sensitivity(n)


@pytest.mark.parametrize(
    ("recipe", "n", "expected"),
    [
        (Recipe(1.0, 5.0), 800, 2 * 5 / 800),
        (Recipe(1.0, 5.0, group=3), 800, 6 * 5 / 800),
        (Recipe(1.0, 5.0, group=9), 4, 10.0),
        (Recipe(1.0, 5.0, unit="client"), 800, 10.0),
        (Recipe(0.1, 1.0, steps=20), 1000, 0.2 / 1000),
        (Recipe(0.1, 1.0, steps=20, noise_at="last-step"), 1000, 0.2 * (19 + 1e-3)),
        (Recipe(0.1, 1.0, steps=20, noise_at="last-step", unit="client"), 1000, 4.0),
    ],
)
def test_the_table(recipe, n, expected):
    found = float(recipe.sensitivity(n))
    assert expected <= found <= expected * (1 + 1e-14)


def test_float32_numbers_do_not_round_it_down():
    rng = np.random.default_rng(0)
    for rate in rng.uniform(0.001, 10, 200).astype(np.float32):
        exact = 2 * Fraction(float(rate)) * Fraction(float(np.float32(0.3))) / 7
        assert Fraction(float(Recipe(rate, np.float32(0.3)).sensitivity(7))) >= exact


def test_arrays_of_clients():
    sizes = np.array([1, 400, 1200])
    np.testing.assert_allclose(Recipe(1, 5).sensitivity(sizes), 10 / sizes, rtol=1e-14)


@pytest.mark.parametrize(
    "bad",
    [{"clip": math.inf}, {"batch": 32}, {"noise_at": "never"}],
)
def test_recipes_without_a_bound_are_refused_and_name_those_with_one(bad):
    with pytest.raises(NoSensitivity, match="the recipes with a bound are"):
        Recipe(**{"learning_rate": 1.0, "clip": 1.0, **bad})


@pytest.mark.parametrize(
    "bad",
    [
        {"learning_rate": 0.0},
        {"learning_rate": math.nan},
        {"learning_rate": math.inf},
        {"clip": 0.0},
        {"clip": -1.0},
        {"clip": math.nan},
        {"clip": "5"},
        {"unit": "user"},
        {"steps": 0},
        {"steps": 1.5},
        {"group": True},
    ],
)
def test_nonsense_is_refused(bad):
    with pytest.raises(InputError, match=f"^{next(iter(bad))} must be"):
        Recipe(**{"learning_rate": 1.0, "clip": 1.0, **bad})


def test_the_smallest_and_largest_numbers_are_taken():
    assert float(Recipe(1e-15, 1e15).sensitivity(1)) == pytest.approx(2.0)
    assert float(Recipe(1e15, 1e-15).sensitivity(1)) == pytest.approx(2.0)


@pytest.mark.parametrize("samples", [0, -3, 1.5, math.nan, [10, 0]])
def test_bad_sample_counts_are_refused(samples):
    with pytest.raises(InputError, match="samples must be"):
        Recipe(1.0, 1.0).sensitivity(samples)
