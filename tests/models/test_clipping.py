"""Clipped sums against the slow truth: float64 gradients row by row, each clipped by itself."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sottovoce.errors import InputError
from sottovoce.models import base, clipping
from sottovoce.models.base import sample_losses
from sottovoce.models.clipping import clipped_sum
from sottovoce.models.cnn import Cnn
from sottovoce.models.custom import custom
from sottovoce.models.least_squares import LeastSquares
from sottovoce.models.mlp import Mlp
from sottovoce.models.person import PersonModel
from sottovoce.models.softmax import Softmax
from sottovoce.models.svm import Svm
from support.numpy_twin import NAMES, as_float64, clipped_sum_numpy

pytestmark = pytest.mark.slow  # left out of the editing loop

CLIPS = (1e-6, 0.3, 1e6, math.inf)
SHAPES = st.sampled_from([(1, 1), (7, 3), (10, 5)])  # rows, size
few = settings(derandomize=True, deadline=None, max_examples=25)


@pytest.fixture(scope="module", autouse=True)
def _small_pieces() -> Iterator[None]:
    """Pieces of a few rows, so that small data already come in several, the last one uneven."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(clipping, "CPU_BYTES", 300)
        patch.setattr(clipping, "GENERIC_ROWS", 4)
        clipping._clipped_sum.clear_cache()
        yield
    clipping._clipped_sum.clear_cache()


def odd_tree(features):
    """A custom model whose parameters are a tree with a 0-d, an empty and a nested leaf."""
    return custom(
        init=lambda key: {
            "scale": jnp.ones(()),
            "none": jnp.zeros((0, 2)),
            "deep": (jax.random.normal(key, (features, 3)), [jnp.zeros(3)]),
        },
        apply=lambda p, x: p["scale"] * jnp.tanh(x @ p["deep"][0]) + p["deep"][1][0],
        loss=lambda scores, y: jnp.sum((scores - y[:, None]) ** 2, axis=1),
    )


@cache
def make(kind, size):
    """The model, its number of features and of classes."""
    if kind == "svm":
        return Svm(size, kappa=0.1), size, 2
    if kind == "softmax":
        return Softmax(size, classes=3), size, 3
    if kind == "mlp":
        return Mlp(size, hidden=4, classes=3), size, 3
    if kind == "cnn":
        return Cnn((size, 2, 2), channels=2, classes=3), 4 * size, 3
    if kind == "least-squares":
        return LeastSquares(size, classes=3, norm=2.0), size, 3
    return odd_tree(size), size, 3


def draw(kind, rows, size, seed, spoil):
    random = np.random.default_rng(seed)
    model, features, classes = make(kind, size)
    params = model.init(jax.random.key(seed))
    # Away from the svm's zeros, and the same numbers in both precisions.
    params = jax.tree.map(
        lambda p: np.asarray(p + random.normal(0, 0.5, p.shape), np.float32), params
    )
    x = random.normal(0, 1, (rows, features)).astype(np.float32)
    y = random.integers(0, classes, rows)
    weight = random.uniform(0, 2, rows).astype(np.float32)
    if spoil:
        x[0] = 0
        x[rows // 4, 0] = np.nan
        x[rows // 3, -1] = np.inf
        x[rows // 2] = np.nan
        weight[rows // 2] = 0
        weight[-1] = 0
    return model, params, x, y, weight


@partial(jax.jit, static_argnums=0)
def gradients(model, params, x, y):
    """Row by row, not vmap: XLA's float64 convolution lets a NaN reach its neighbours."""
    gradient = jax.grad(lambda p, row, label: model.loss(p, row[None], label[None])[0])
    return jax.lax.map(lambda row: gradient(params, *row), (x, y))


def oracle(model, params, x, y, weight, clip):
    """The sum, and Σ weight · ‖clipped gradient‖: what an error is measured against."""
    with jax.enable_x64(True):
        params = jax.tree.map(lambda p: jnp.asarray(p, jnp.float64), params)
        own = gradients(model, params, jnp.asarray(x, jnp.float64), jnp.asarray(y))
        leaves, tree = jax.tree.flatten(jax.tree.map(np.asarray, own))
    totals, size = [np.zeros(leaf.shape[1:]) for leaf in leaves], 0.0
    for m, share in enumerate(np.asarray(weight, np.float64)):
        norm = math.sqrt(sum(float(np.sum(leaf[m] ** 2)) for leaf in leaves))
        if share == 0 or not math.isfinite(norm):
            continue
        factor = share * min(1.0, clip / norm if norm else 1.0)
        size += factor * norm
        for total, leaf in zip(totals, leaves, strict=True):
            total += factor * leaf[m]
    return jax.tree.unflatten(tree, totals), size


def distance(found, wanted):
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True)
    return math.sqrt(sum(float(np.sum((np.asarray(a, np.float64) - b) ** 2)) for a, b in pairs))


def in_float64(model, params, x, y, weight, clip):
    with jax.enable_x64(True):
        arrays = (jax.tree.map(lambda p: jnp.asarray(p, jnp.float64), params),)
        arrays += (jnp.asarray(x, jnp.float64), jnp.asarray(y), jnp.asarray(weight, jnp.float64))
        return jax.tree.map(np.asarray, clipped_sum(model, *arrays, clip))


@pytest.mark.parametrize("kind", ["svm", "softmax", "mlp", "cnn", "least-squares", "custom"])
@few
@given(SHAPES, st.sampled_from(CLIPS), st.integers(0, 2**32 - 1), st.booleans())
def test_equals_the_float64_oracle(kind, shape, clip, seed, spoil):
    case = draw(kind, *shape, seed, spoil)
    wanted, size = oracle(*case, clip)
    model, params, x, y, weight = case
    single = clipped_sum(model, params, jnp.asarray(x), jnp.asarray(y), jnp.asarray(weight), clip)
    assert jax.tree.structure(single) == jax.tree.structure(params)
    assert distance(single, wanted) <= 1e-5 * size
    double = in_float64(*case, clip)
    assert distance(double, wanted) <= 1e-10 * size
    if kind in NAMES:
        twin = clipped_sum_numpy(kind, params, x, y, weight, clip, kappa=0.1)
        assert set(twin) == set(params)
        assert distance([twin[name] for name in sorted(twin)], wanted) <= 1e-10 * size


@pytest.mark.parametrize("kind", ["svm", "softmax", "mlp", "cnn", "least-squares", "custom"])
@pytest.mark.parametrize("clip", CLIPS)
def test_no_row_adds_more_than_the_clip(kind, clip):
    model, params, x, y, _ = draw(kind, 10, 5, 3, spoil=True)
    x[1] = 1e30  # its squared norm overflows in float32
    x[2] = 3e38
    one_row_each = jnp.eye(10)
    each = jax.vmap(clipped_sum, in_axes=(None, None, None, None, 0, None))(
        model, params, jnp.asarray(x), jnp.asarray(y), one_row_each, clip
    )
    squares = [np.sum(np.square(g, dtype=np.float64), axis=tuple(range(1, g.ndim))) for g in
               map(np.asarray, jax.tree.leaves(each))]  # fmt: skip
    norms = np.sqrt(sum(squares))
    assert np.all(np.isfinite(norms))
    assert np.all(norms <= clip * (1 + 1e-5))
    not_finite = ~np.all(np.isfinite(x), axis=1)
    assert np.all(norms[not_finite] == 0)
    assert np.all(norms[3:5][~not_finite[3:5]] > 0)


@pytest.mark.exact
@pytest.mark.parametrize("kind", ["svm", "softmax", "mlp", "cnn", "least-squares", "custom"])
def test_weight_zero_adds_exactly_nothing(kind):
    model, params, x, y, weight = draw(kind, 7, 3, 5, spoil=False)
    weight[2:5] = 0
    clean = clipped_sum(model, params, jnp.asarray(x), jnp.asarray(y), jnp.asarray(weight), 0.5)
    x[2], x[3], x[4], y[3] = np.nan, -np.inf, 3e38, 10**6
    dirty = clipped_sum(model, params, jnp.asarray(x), jnp.asarray(y), jnp.asarray(weight), 0.5)
    for a, b in zip(jax.tree.leaves(clean), jax.tree.leaves(dirty), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("kind", ["svm", "softmax", "mlp", "cnn", "custom"])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_parameters_that_are_not_finite_give_zero(kind, bad):
    model, params, x, y, weight = draw(kind, 7, 3, 6, spoil=False)
    broken = jax.tree.map(lambda p: np.full_like(p, bad), params)
    total = clipped_sum(model, broken, jnp.asarray(x), jnp.asarray(y), jnp.asarray(weight), 1.0)
    assert all(np.all(np.asarray(leaf) == 0) for leaf in jax.tree.leaves(total))
    if kind in NAMES:
        twin = clipped_sum_numpy(kind, broken, x, y, weight, 1.0)
        assert all(np.all(array == 0) for array in twin.values())


@pytest.mark.parametrize("kind", ["svm", "softmax", "mlp", "cnn", "least-squares", "custom"])
def test_runs_in_a_batch_equal_runs_one_by_one(kind):
    model, params, x, y, _ = draw(kind, 10, 5, 8, spoil=True)
    random = np.random.default_rng(0)
    runs = 3
    batch = jax.tree.map(lambda p: jnp.stack([p * (r + 1) for r in range(runs)]), params)
    weights = jnp.asarray(random.uniform(size=(runs, 10)), jnp.float32)
    clips = jnp.array([0.1, 1.0, jnp.inf])
    x, y = jnp.asarray(x), jnp.asarray(y)
    together = jax.vmap(clipped_sum, in_axes=(None, 0, None, None, 0, 0))(
        model, batch, x, y, weights, clips
    )
    for r in range(runs):
        one = jax.tree.map(lambda p, r=r: p[r], batch)
        alone = clipped_sum(model, one, x, y, weights[r], clips[r])
        for a, b in zip(jax.tree.leaves(together), jax.tree.leaves(alone), strict=True):
            np.testing.assert_allclose(a[r], b, rtol=1e-5, atol=1e-6)


def test_zero_gradient_and_no_clipping_recover_the_plain_sum():
    model, params, x, y, _ = draw("mlp", 10, 5, 9, spoil=False)
    x, y = jnp.asarray(x), jnp.asarray(y)
    plain = jax.grad(lambda p: jnp.sum(model.loss(p, x, y)))(params)
    for a, b in zip(
        jax.tree.leaves(clipped_sum(model, params, x, y, jnp.ones(10), math.inf)),
        jax.tree.leaves(plain),
        strict=True,
    ):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
    # Rows beyond the margin of an unregularised svm have gradient 0: nothing to clip, no 0/0.
    svm, far = Svm(1, kappa=0.0), {"w": jnp.array([1.0]), "b": jnp.array(0.0)}
    total = clipped_sum(svm, far, jnp.array([[3.0]]), jnp.array([1]), jnp.ones(1), 0.1)
    assert float(total["w"][0]) == 0
    assert float(total["b"]) == 0


def test_an_svm_row_that_its_regulariser_cancels_keeps_its_digits():
    """‖e(x, 1) + κ(w, b)‖² ≈ 1e-6 and its parts near 1: expanded, a tenth of it is rounding."""
    model, w = Svm(2, kappa=2.0), np.array([0.3, 0.1], np.float32)
    params = {"w": w, "b": np.float32(0.5)}
    x = np.stack([2 * w + np.array([1e-3, 2e-4], np.float32), np.ones(2, np.float32) * 0.1])
    y, own = np.ones(2, int), np.eye(2, dtype=np.float32)
    for clip in (1e-4, 1.0):
        for weight in own:
            wanted, size = oracle(model, params, x, y, weight, clip)
            found = clipped_sum(model, params, jnp.asarray(x), jnp.asarray(y), weight, clip)
            assert distance(found, wanted) <= 2e-5 * max(size, 1e-2 * clip)
            assert distance(found, jax.tree.map(jnp.zeros_like, params)) <= clip * (1 + 1e-5)


def test_a_bad_row_does_not_reach_its_neighbours_through_a_convolution():
    cnn = Cnn((3, 2, 2), channels=2, classes=3)
    own = custom(cnn.init, cnn.apply, lambda scores, y: jnp.sum((scores - y[:, None]) ** 2, axis=1))
    random = np.random.default_rng(2)
    x, y, weight = random.normal(size=(7, 12)), random.integers(0, 3, 7), np.ones(7)
    x[2], x[3, -1] = np.nan, np.inf
    params = own.init(jax.random.key(0))
    wanted, size = oracle(own, params, x, y, weight, 1e-3)
    assert size == pytest.approx(5 * 1e-3)
    assert distance(in_float64(own, params, x, y, weight, 1e-3), wanted) <= 1e-10 * size


def test_parameters_without_numbers():
    nothing = custom(lambda key: {}, lambda p, x: x[:, 0], lambda scores, y: scores - y)
    assert clipped_sum(nothing, {}, jnp.ones((3, 1)), jnp.ones(3), jnp.ones(3), 1.0) == {}


def test_rows_may_be_small_integers():
    model, params, _, y, weight = draw("mlp", 7, 3, 4, spoil=False)
    x = np.random.default_rng(1).integers(0, 255, (7, 3), dtype=np.uint8)
    found = clipped_sum(model, params, jnp.asarray(x), jnp.asarray(y), jnp.asarray(weight), 1.0)
    wanted, size = oracle(model, params, x, y, weight, 1.0)
    assert distance(found, wanted) <= 1e-5 * size


@pytest.mark.parametrize("clip", [0, -1.0, math.nan])
def test_a_clip_that_is_not_positive_is_refused(clip):
    model, params, x, y, weight = draw("svm", 7, 3, 4, spoil=False)
    with pytest.raises(InputError, match="clip must be a number > 0"):
        clipped_sum(model, params, jnp.asarray(x), jnp.asarray(y), jnp.asarray(weight), clip)
    with pytest.raises(InputError, match="clip must be a number > 0"):
        clipped_sum_numpy("svm", params, x, y, weight, clip)


def test_a_mean_loss_is_refused():
    mean = custom(
        lambda key: jnp.zeros(2), lambda w, x: x @ w, lambda scores, y: jnp.mean((scores - y) ** 2)
    )
    with pytest.raises(InputError, match="leave out the mean"):
        clipped_sum(mean, jnp.zeros(2), jnp.ones((3, 2)), jnp.ones(3), jnp.ones(3), 1.0)


@pytest.mark.parametrize("kind", NAMES)
@few
@given(SHAPES, st.integers(0, 2**32 - 1))
def test_numpy_losses_equal_the_models(kind, shape, seed):
    model, params, x, y, _ = draw(kind, *shape, seed, spoil=False)
    found = sample_losses(model.form(), *as_float64(params, x, y))
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda p: jnp.asarray(p, jnp.float64), params)
        wanted = model.loss(wide, jnp.asarray(x, jnp.float64), jnp.asarray(y))
        np.testing.assert_allclose(found, np.asarray(wanted), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("n", [1, 2, 3, 5, 8, 9])
@pytest.mark.parametrize("rows", [1, 2, 4, 100])
def test_every_row_is_folded_once(n, rows):
    x = jnp.arange(1.0, n + 1)
    total = clipping.fold(lambda x, y, weight: weight @ (x * y), x, x, jnp.ones(n), rows)
    assert float(total) == sum(i * i for i in range(1, n + 1))


def _apply_mlp(p, x):
    return jax.nn.relu(x @ p["w1"] + p["b1"]) @ p["w2"]


def _apply_transposed(p, x):
    return jnp.einsum("ni,oi->no", jnp.tanh(jnp.einsum("ni,oi->no", x, p["w1"])), p["w2"])


def _apply_left(p, x):
    hidden = jnp.einsum("ot,nti->noi", p["w1"], x.reshape(-1, 3, 2))
    return hidden.reshape(len(x), -1) @ p["w2"]


@jax.jit
def _multiply_and_return(w, x):
    return x @ w, w


def _apply_returned(p, x):
    """The weight comes out of a compiled function, and is used again."""
    hidden, w = _multiply_and_return(p["w"], x)
    return jnp.tanh(hidden @ w) @ p["v"]


def _apply_empty(p, x):
    return x @ p["w"] + (x @ p["u"]) @ p["v"]


#: Shapes of parameters, the function, and how many parameters are those of dense layers.
NETS = {
    "mlp": ({"w1": (6, 5), "b1": (5,), "w2": (5, 3)}, _apply_mlp, 2),
    "transposed": ({"w1": (5, 6), "w2": (3, 5)}, _apply_transposed, 2),
    "jit": (
        {"w1": (6, 5), "w2": (5, 3)},
        lambda p, x: jax.jit(lambda p, x: jnp.tanh(x @ p["w1"]) @ p["w2"])(p, x),
        2,
    ),
    "sequence": (
        {"w1": (2, 7), "w2": (7, 3)},
        lambda p, x: (jnp.tanh(x.reshape(-1, 3, 2) @ p["w1"]) @ p["w2"]).sum(1),
        2,
    ),
    "left": ({"w1": (4, 3), "w2": (8, 3)}, _apply_left, 2),
    "used twice": (
        {"w": (6, 6), "v": (6, 3)},
        lambda p, x: jnp.tanh(jnp.tanh(x @ p["w"]) @ p["w"]) @ p["v"],
        1,
    ),
    "used otherwise": ({"w": (6, 3)}, lambda p, x: x @ p["w"] + jnp.sum(p["w"]), 0),
    "returned by jit": ({"w": (6, 6), "v": (6, 3)}, _apply_returned, 1),
    "returned by jit, used once": (
        {"w": (6, 3)},
        lambda p, x: x @ jax.jit(lambda w: w)(p["w"]),
        1,
    ),
    "without numbers": ({"u": (6, 0), "v": (0, 3), "w": (6, 3)}, _apply_empty, 1),
    "token": ({"w": (6, 3)}, lambda p, x: p["w"][jnp.abs(x).astype(int)[:, 0] % 6], 0),
}


@pytest.mark.parametrize("name", NETS)
def test_dense_layers_of_a_custom_model_are_found_and_clipped_as_if_written_out(name):
    """In simulation and release: rows with weights, one not finite, one without weight."""
    shapes, apply, count = NETS[name]
    rng = np.random.default_rng(0)
    params = {key: rng.standard_normal(shape) for key, shape in shapes.items()}
    x, y = rng.standard_normal((23, 6)) * 2, rng.integers(0, 3, 23)
    weight, x[3] = rng.random(23), 1.0 if name == "token" else np.nan
    weight[5] = 0

    def loss(scores, y):
        return -jnp.take_along_axis(jax.nn.log_softmax(scores), y[:, None], axis=1)[:, 0]

    model = custom(lambda key: params, apply, loss)
    with jax.enable_x64(True):
        rows = jnp.asarray(x), jnp.asarray(y)
        assert len(clipping.find_dense_layers(model, params, *rows).layers) == count
        gradients = model.gradients(params, x, y)
        flat = np.concatenate([gradients[key].reshape(23, -1) for key in sorted(params)], axis=1)
        norms = np.linalg.norm(flat, axis=1)
        for clip in (0.1, 3.0):
            factor = np.where(np.isfinite(norms), weight / np.maximum(1, norms / clip), 0)
            expected = np.where(factor[:, None] != 0, flat, 0).T @ factor
            found = clipping.clipped_sum(model, params, *rows, jnp.asarray(weight), clip)
            ours = np.concatenate([np.asarray(found[key]).reshape(-1) for key in sorted(params)])
            assert np.linalg.norm(ours - expected) <= 1e-12 * np.linalg.norm(expected)
    block = model.factor_gradients(params, x, y)[0].write_out()
    np.testing.assert_allclose(block, flat, atol=1e-14)
    others = [m for m in range(23) if m != 3]
    x[3] = 0.5  # another row changes no bit of these
    again = model.factor_gradients(params, x, y)[0].write_out()
    np.testing.assert_array_equal(again[others], block[others])


@pytest.mark.parametrize("offset", [0.0, 30.0, 1000.0])
def test_products_that_cancel_do_not_make_a_norm_too_small(offset):
    """Inputs that are nearly equal, with errors that add up to nearly nothing, along a sequence."""
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((40, 16 * 32)).astype(np.float32), np.zeros(40, int)
    x += np.float32(offset)
    signs = jnp.tile(jnp.array([1.0, -1.0]), 8)

    def apply(p, x):
        return jnp.einsum("t,nto,o->n", signs, x.reshape(-1, 16, 32) @ p["w"], p["v"])

    params = {"w": np.zeros((32, 32), np.float32), "v": np.ones(32, np.float32)}
    model = custom(lambda key: params, apply, lambda scores, y: scores)
    dense = clipping.find_dense_layers(model, params, jnp.asarray(x), jnp.asarray(y))
    assert len(dense.layers) == 2
    exact = model.gradients(params, x.astype(np.float64), y)
    flat = np.concatenate([leaf.reshape(40, -1) for leaf in exact.values()], axis=1)
    norms = np.linalg.norm(flat, axis=1)
    one = jax.jit(lambda weight: clipping.clipped_sum(model, params, x, y, weight, 1.0))
    for m in range(0, 40, 8):
        found = one(jnp.eye(40)[m])
        added = np.concatenate([np.ravel(found[key]) for key in exact])
        assert np.linalg.norm(added) <= 1 + 1e-3
        assert np.linalg.norm(added - flat[m] / norms[m]) <= 1e-3


@pytest.mark.parametrize("positions", [1, 6])
@pytest.mark.parametrize("tiny", [1e-24, 1e-30, 1e24])
def test_a_factor_whose_square_is_lost_does_not_hide_the_norm(tiny, positions):
    """‖a‖² is 0 in float32 (or ‖δ‖² is): a row of norm 2e-4 was added whole at C = 1e-5."""
    rng = np.random.default_rng(0)
    x = (rng.standard_normal((4, positions * 8)) * tiny).astype(np.float32)
    far = np.float32(1e-4 / tiny)

    def apply(p, x):
        return jnp.sum((x.reshape(-1, positions, 8) @ p["w"]) * far, axis=(1, 2))

    params, y = {"w": np.zeros((8, 5), np.float32)}, np.zeros(4, int)
    model = custom(lambda key: params, apply, lambda scores, y: scores)
    exact = model.gradients(params, x.astype(np.float64), y)["w"].reshape(4, -1)
    norms = np.linalg.norm(exact, axis=1)
    assert (norms > 1e-4).all()
    for m in range(4):
        found = clipping.clipped_sum(model, params, x, y, jnp.eye(4)[m], 1e-5)["w"]
        np.testing.assert_allclose(np.ravel(found), 1e-5 * exact[m] / norms[m], rtol=1e-3)


@pytest.mark.parametrize("clip", [1e-2, 1.0])
def test_a_long_row_of_a_person_does_not_hide_the_norm_of_another(clip):
    """Beside a row of length 10¹⁹ that adds nothing, ‖a‖² of the other one was rounded to 0."""
    model = PersonModel(Mlp(400, 4, 2), 2, 400)
    params = {name: jnp.zeros(shape) for name, shape in model.shapes().items()}
    params["w1"] = params["w1"].at[0].set(-1)  # so that the long row reaches no unit
    params |= {"b1": jnp.ones(4), "w2": params["w2"].at[:, 0].set(1)}
    rows = np.ones((2, 402), np.float32)
    rows[0, :400], rows[1, 0], rows[:, 401] = np.eye(400)[0] * 1.2e19, 0, 0.5
    x, one = jnp.asarray(rows.reshape(1, -1)), jnp.ones(1)
    found = clipped_sum(model, params, x, jnp.zeros(1, int), one, clip)
    norm = distance(found, jax.tree.map(jnp.zeros_like, found))
    np.testing.assert_allclose(norm, clip, rtol=1e-5)


def make_saturated(kind):
    """A model whose errors are about 1e-20, and a row of length 1e19 that leaves them so."""
    far = {"b": jnp.array([0.0, -45.0])}
    if kind == "softmax":
        return Softmax(2, 2), {"w": jnp.zeros((2, 2)), **far}, [[1e19, 0.0]]
    if kind == "number":
        return (
            Softmax(2, 1, "squared"),
            {"w": jnp.zeros((2, 1)), "b": jnp.full(1, 1e-20)},
            [[1e19, 0]],
        )
    if kind == "mlp":
        w2 = jnp.stack([jnp.ones(16), jnp.full(16, 0.9)], axis=1)
        params = {"w1": jnp.zeros((2, 16)), "b1": jnp.ones(16), "w2": w2}
        return Mlp(2, 16, 2), {**params, "b2": jnp.array([0.0, -43.4])}, [[1e19, 0.0]]
    model = Cnn((2, 2, 1), channels=1, classes=2)
    params = {name: jnp.zeros(shape) for name, shape in model.shapes().items()}
    return model, {**params, **far, "kernel": jnp.ones((5, 5, 1, 1))}, [[1e17, 0, 0, 0]]


@pytest.mark.parametrize("kind", ["softmax", "number", "mlp", "cnn"])
def test_an_error_whose_square_is_lost_does_not_hide_the_norm(kind):
    """δ² is 0 in float32, ‖x‖ is 10¹⁹: a row of norm 0.4 was added whole at C = 0.001."""
    model, params, x = make_saturated(kind)
    found = clipped_sum(model, params, jnp.array(x), jnp.zeros(1, int), jnp.ones(1), 1e-3)
    assert distance(found, jax.tree.map(jnp.zeros_like, found)) <= 1e-3 * (1 + 1e-5)


@pytest.mark.parametrize("kind", ["svm", "softmax", "mlp", "least-squares"])
def test_an_accelerator_leaves_room_for_products_of_tf32(kind, monkeypatch):
    """There rows and errors are rounded by a part in 2¹¹ each after the norm was taken."""
    model, params, x, y, _ = draw(kind, 6, 5, 3, spoil=False)
    monkeypatch.setattr(clipping, "product_type", lambda model, dtype: dtype)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    clipping._clipped_sum.clear_cache()
    for m in range(6):
        found = clipped_sum(model, params, jnp.asarray(x), jnp.asarray(y), jnp.eye(6)[m], 1e-3)
        norm = distance(found, jax.tree.map(jnp.zeros_like, found))
        assert norm * (1 + 2**-11) ** 2 <= 1e-3
    clipping._clipped_sum.clear_cache()


@pytest.mark.parametrize(("inputs", "positions"), [(40, 3), (2, 5)])
def test_what_rounding_leaves_of_products_that_vanish_is_at_most_the_clip(inputs, positions):
    """A layer along a sequence, with weights that add up to 0: the gradient is rounding alone."""
    rng = np.random.default_rng(0)
    parts = np.array([1.0, 3.0, -4.0, 7.0, -7.0], np.float32)[:positions]

    def apply(p, x):
        return ((parts[:, None] * x[:, None, :]) @ p["w"] * jnp.linspace(0.1, 1, 30)).sum((1, 2))

    params = {"w": np.zeros((inputs, 30), np.float32)}
    model, y = custom(lambda key: params, apply, lambda scores, y: scores), np.zeros(1, int)
    one = jax.jit(lambda x: clipping.clipped_sum(model, params, x, y, jnp.ones(1), 1.0))
    for scale in np.repeat(2.0 ** np.arange(10, 40, 5), 6):
        added = one((rng.standard_normal((1, inputs)) * scale).astype(np.float32))["w"]
        assert np.linalg.norm(np.asarray(added, np.float64)) <= 1 + 1e-3


def test_a_row_that_the_host_fails_on_counts_as_nothing_and_tells_nobody():
    """An error would be an answer that this row alone causes; the others keep every bit."""

    def read(x):
        if np.max(x) > 50:
            raise ValueError("this row")
        return np.asarray(x)

    def apply(w, x):
        return jax.pure_callback(read, jax.ShapeDtypeStruct(x.shape, x.dtype), x) @ w["a"]

    model = custom(lambda key: {"a": jnp.ones((4, 3))}, apply, lambda s, y: jnp.sum(s, -1) ** 2)
    params = {name: np.asarray(leaf, np.float64) for name, leaf in model.draw_parameters(0).items()}
    x, y = np.random.default_rng(0).standard_normal((11, 4)), np.zeros(11, np.int64)
    form = base.Form("own", (4,), 3)
    clean = base.gradient_matrix(form, params, x, y, model)
    x[[2, 7]] = 99
    dirty, others = base.gradient_matrix(form, params, x, y, model), [0, 1, 3, 4, 5, 6, 8, 9, 10]
    np.testing.assert_array_equal(dirty[others], clean[others])
    assert np.isnan(dirty[[2, 7]]).all()
