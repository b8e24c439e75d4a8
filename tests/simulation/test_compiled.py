"""The compiled round: gradient descent without noise, the right noise with it, the right weights.

`release.step` (one client at a time, on the grid of a real release) is the oracle.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sottovoce.client import release
from sottovoce.models.base import flatten_parameters
from sottovoce.models.mlp import Mlp
from sottovoce.privacy.sensitivity import Recipe
from sottovoce.schedules.aggregate import average, weigh_by_samples
from sottovoce.simulation.compiled import play_round
from support.samples import MODELS, NUMBERS, SIZES, device_of, orders, rows_of, samples

pytestmark = pytest.mark.slow  # left out of the editing loop


@pytest.mark.parametrize("name", MODELS)
def test_without_noise_and_clipping_it_is_gradient_descent(name):
    """σ = 0, C = ∞, K = U: w − η∇F(w) with F the mean loss over all samples, for 20 rounds."""
    model, rate = MODELS[name], 0.3
    x, y = samples(model)
    with jax.enable_x64(True):
        rows = rows_of(x, y)
        start = jax.tree.map(lambda w: w.astype(jnp.float64), model.init(jax.random.key(1)))
        ours = jax.tree.map(lambda w: w[None], start)
        p = weigh_by_samples(SIZES, np.ones(len(SIZES), bool))
        theirs = start
        # One program; step by step, XLA would compile every piece of the gradient by itself.
        gradient = jax.jit(
            jax.grad(lambda w: jnp.mean(model.loss(w, jnp.asarray(x), jnp.asarray(y))))
        )
        for t in range(20):
            ours = play_round(model, rows, ours, orders(p, rate), t).params
            theirs = jax.tree.map(lambda w, g: w - rate * g, theirs, gradient(theirs))
        for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
            np.testing.assert_allclose(a[0], b, rtol=1e-6, atol=1e-9)


WEIGHTS = (0.03, 1.0, 0.5, 0.2)  # of the classes


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("clip", [0.05, 1.0, np.inf])
@pytest.mark.parametrize("name", [*MODELS, *NUMBERS])
def test_the_noiseless_mean_is_the_mean_of_the_clients_own_steps(name, clip, weighted):
    """Unbalanced clients, some absent: simulation and `release.step` agree to 1e-6 in float64."""
    model = (MODELS | NUMBERS)[name]
    x, y = samples(model, seed=3)
    present = np.array([True, False, True, True, True])
    p = weigh_by_samples(SIZES, present)
    with jax.enable_x64(True):
        start = jax.tree.map(lambda w: w.astype(jnp.float64), model.init(jax.random.key(2)))
        batch = jax.tree.map(lambda w: w[None], start)
        by_class = WEIGHTS if weighted and name in MODELS else None
        asked = orders(p, 0.7, clip=clip, class_weights=by_class)
        ours = play_round(model, rows_of(x, y), batch, asked, 0).params
        ours, start = (
            flatten_parameters(tree) for tree in (jax.tree.map(lambda w: w[0], ours), start)
        )
    numpy_start = start
    # an infinite clip has no sensitivity, so the recipe takes one that never cuts
    recipe = Recipe(0.7, 30.0 if np.isinf(clip) else clip, class_weights=by_class)
    device = device_of(name)
    ends = np.cumsum(SIZES)
    uploads = [
        release.step(
            device.form, numpy_start, x[end - n : end], y[end - n : end], recipe, device.own_model
        )
        for end, n, here in zip(ends, SIZES, present, strict=True)
        if here
    ]
    theirs = average(uploads, p[present])
    assert p[present].sum() == pytest.approx(1)
    assert_same_step(ours, theirs, start)


def assert_same_step(ours, theirs, start):
    """The two steps differ by at most 1e-6 of the step: the grid cuts off 1e-9 of C a number."""
    gap, step = (
        np.sqrt(sum(float(np.sum((a[key] - np.asarray(b[key])) ** 2)) for key in a))
        for a, b in ((ours, theirs), (ours, start))
    )
    assert step > 0
    assert gap <= 1e-6 * step


def noise_is_right(noise: np.ndarray, std: float) -> bool:
    """A z-test of the variance of n normals: |z| < 5, a false alarm in 1.7 million tries.

    z = (s²/σ² − 1)·√(n/2). With n = 100,000 a std that is 3 % off has z ≈ 13.6, so that the chance
    to miss it is below 1e-16; so has a variance that is 6 % off.
    """
    n = noise.size
    z = (np.mean(noise**2) / std**2 - 1) * np.sqrt(n / 2)
    return bool(abs(z) < 5)


WIDE = Mlp(300, 320, 10)  # 99,530 parameters
SIGMA = np.array([0.5, 1.0, 2.0, 0.7, 1.3])


def simulated_noise(std, key=(1, 2), t=0):
    """What the round adds beside a step that is as good as zero."""
    x, y = np.zeros((int(SIZES.sum()), 300), np.float32), np.zeros(int(SIZES.sum()), np.int32)
    zero = jax.tree.map(lambda w: jnp.zeros((1, *w.shape)), WIDE.init(jax.random.key(0)))
    plan = orders(np.zeros(len(SIZES)), 1.0, clip=1.0, std=std, key=key, dtype=np.float32)
    params = play_round(WIDE, rows_of(x, y), zero, plan, t).params
    return np.concatenate([np.asarray(leaf).ravel() for leaf in jax.tree.leaves(params)])


def test_the_averaged_draw_has_the_variance_of_the_clients_draws():
    p = weigh_by_samples(SIZES, np.ones(len(SIZES), bool))
    std = float(np.sqrt(np.sum((p * SIGMA) ** 2)))
    simulated = simulated_noise(std)
    rng = np.random.default_rng(5)
    each = [s * rng.standard_normal(simulated.size) for s in SIGMA]
    drawn = sum(w * z for w, z in zip(p, each, strict=True))
    assert noise_is_right(drawn, std)
    assert noise_is_right(simulated, std)
    # The test can fail: a std 3 % too large, and two clients that share their noise.
    assert not noise_is_right(simulated_noise(std * 1.03), std)
    shared = [*each[:4], SIGMA[4] / SIGMA[1] * each[1]]
    assert not noise_is_right(sum(w * z for w, z in zip(p, shared, strict=True)), std)


def test_the_noise_is_gaussian_and_fresh():
    one = simulated_noise(1.0)
    # Kurtosis and skewness of n normals have sd √(24/n), √(6/n); 5 sd each.
    assert abs(np.mean(one**4) - 3) < 5 * np.sqrt(24 / one.size) * 2
    assert abs(np.mean(one**3)) < 5 * np.sqrt(15 / one.size)
    for other in (simulated_noise(1.0, t=1), simulated_noise(1.0, key=(1, 3))):
        assert abs(np.mean(one * other)) < 5 / np.sqrt(one.size)
    half = one.size // 2  # layers, too
    assert abs(np.mean(one[:half] * one[half : 2 * half])) < 5 / np.sqrt(half)
    np.testing.assert_array_equal(one, simulated_noise(1.0))


@pytest.mark.parametrize("name", MODELS)
def test_several_noiseless_steps_are_the_clients_own(name):
    """E steps at each client, then the mean: equal to `release.step` taken E times."""
    model, steps = MODELS[name], 3
    x, y = samples(model, seed=4)
    present = np.array([True, True, False, True, True])
    p = weigh_by_samples(SIZES, present)
    with jax.enable_x64(True):
        start = jax.tree.map(lambda w: w.astype(jnp.float64), model.init(jax.random.key(2)))
        batch = jax.tree.map(lambda w: w[None], start)
        still = np.zeros((steps, len(SIZES)))
        plan = orders(p, 0.4, clip=0.8, sigma=still, class_weights=WEIGHTS)
        outcome = play_round(model, rows_of(x, y), batch, plan, 0, longest=int(SIZES.max()))
        ours = {k: np.asarray(v[0]) for k, v in outcome.params.items()}
    recipe = Recipe(0.4, 0.8, class_weights=WEIGHTS)
    ends, uploads, device = np.cumsum(SIZES), [], device_of(name)
    for end, n, here in zip(ends, SIZES, present, strict=True):
        own = {k: np.asarray(v) for k, v in start.items()}
        for _ in range(steps):
            own = release.step(
                device.form, own, x[end - n : end], y[end - n : end], recipe, device.own_model
            )
        uploads += [own] if here else []
    theirs = average(uploads, p[present])
    assert_same_step(ours, theirs, start)


def test_several_steps_add_the_noise_of_each():
    """Steps as good as zero: the mean's variance is Σ_i p_i²·Σ_e σ_e,i²."""
    x, y = np.zeros((int(SIZES.sum()), 300), np.float32), np.zeros(int(SIZES.sum()), np.int32)
    zero = jax.tree.map(lambda w: jnp.zeros((1, *w.shape)), WIDE.init(jax.random.key(0)))
    p = weigh_by_samples(SIZES, np.ones(len(SIZES), bool))
    sigma = np.stack([SIGMA, 2 * SIGMA])
    plan = orders(p, 1.0, clip=1e-12, sigma=sigma, dtype=np.float32)
    outcome = play_round(WIDE, rows_of(x, y), zero, plan, 0, longest=int(SIZES.max()))
    noise = np.concatenate([np.asarray(v).ravel() for v in jax.tree.leaves(outcome.params)])
    std = float(np.sqrt(np.sum(p**2 * np.sum(sigma**2, axis=0))))
    assert noise_is_right(noise, std)
    assert not noise_is_right(noise, std * 1.03)
    assert not noise_is_right(noise, float(np.sqrt(np.sum(p**2 * sigma[0] ** 2))))


def test_the_clients_signal_is_the_mean_of_their_cut_losses_of_the_model_received():
    model = MODELS["mlp"]
    x, y = samples(model, seed=6)
    present = np.array([True, False, True, True, False])
    p = weigh_by_samples(SIZES, present)
    with jax.enable_x64(True):
        start = jax.tree.map(lambda w: 3 * w.astype(jnp.float64), model.init(jax.random.key(5)))
        batch = jax.tree.map(lambda w: w[None], start)
        told = []
        for std in (0.0, 0.5):
            plan = orders(p, 0.4, clip=0.8, told=std, bound=1.5)
            told.append(
                float(
                    play_round(model, rows_of(x, y), batch, plan, 0, signal="clients").score[0, 2]
                )
            )
        each = np.clip(np.asarray(model.loss(start, jnp.asarray(x), jnp.asarray(y))), 0, 1.5)
    owner = np.repeat(np.arange(len(SIZES)), SIZES)
    expected = sum(p[i] * each[owner == i].mean() for i in range(len(SIZES)))
    assert told[0] == pytest.approx(expected, rel=1e-9)
    assert told[1] != told[0]
