"""The models themselves, what they score, and what they refuse."""

from __future__ import annotations

import math
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.signal

from sottovoce.errors import InputError
from sottovoce.models import clipping
from sottovoce.models.base import MODELS, Model, build, sample_losses
from sottovoce.models.clipping import _evaluate, evaluate
from sottovoce.models.cnn import Cnn
from sottovoce.models.custom import custom, require_fitting
from sottovoce.models.mlp import Mlp
from sottovoce.models.softmax import Softmax
from sottovoce.models.svm import Svm
from support.numpy_twin import as_float64

pytestmark = pytest.mark.slow  # left out of the editing loop


def test_every_registered_model_is_built_with_named_parameters():
    names = {
        "svm": {"w", "b"},
        "softmax": {"w", "b"},
        "mlp": {"w1", "b1", "w2", "b2"},
        "cnn": {"kernel", "bias", "w", "b"},
        "least-squares": {"moments"},
    }
    assert set(names) == set(MODELS)
    for name, keys in names.items():
        model = build(name, shape=(8, 8, 1), classes=2)
        assert isinstance(model, Model)
        assert hash(model) == hash(build(name, shape=(8, 8, 1), classes=2))
        params = model.init(jax.random.key(0))
        assert set(params) == keys
        x = jnp.ones((3, 64))
        assert model.loss(params, x, jnp.array([0, 1, 1])).shape == (3,)
        assert model.predict(params, x).shape == (3,)


def test_defaults_are_the_papers_where_it_names_them():
    assert build("mlp", shape=(28, 28, 1), classes=10) == Mlp(784, 256, 10)
    assert build("cnn", shape=(32, 32, 3), classes=10) == Cnn((32, 32, 3), 8, 10)
    assert build("svm", shape=(58,), classes=2, kappa=0.5) == Svm(58, 0.5)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("tree", {}, "model name must be one of svm, softmax, mlp, cnn, least-squares, got 'tree'"),
        ("svm", {"classes": 3}, "classes must be 2 for the model svm, got 3"),
        ("svm", {"hidden": 3}, "hidden must be absent for the model svm, got 3"),
        ("svm", {"kappa": -0.1}, "kappa must be a number ≥ 0, got -0.1"),
        ("svm", {"kappa": math.nan}, "kappa must be a number ≥ 0, got nan"),
        ("softmax", {"hidden": 3}, "hidden must be absent for the model softmax, got 3"),
        ("mlp", {"hidden": 0}, "hidden must be a whole number ≥ 1, got 0"),
        ("mlp", {"shape": (0,)}, "every number of shape must be a whole number ≥ 1, got 0"),
        ("mlp", {"classes": 1}, "classes must be a whole number ≥ 2, got 1"),
        ("cnn", {"channels": 0}, "channels must be a whole number ≥ 1, got 0"),
        ("cnn", {"shape": (64,)}, "shape must be"),
    ],
)
def test_what_cannot_be_built_is_refused(name, options, message):
    with pytest.raises(InputError, match="got") as raised:
        build(name, **({"shape": (8, 8, 1), "classes": 2} | options))
    assert str(raised.value).startswith(message)


@pytest.mark.parametrize(
    ("others", "found"),
    [
        ({"count": jnp.zeros((), int)}, "['float32', 'int32']"),
        ({"mask": jnp.ones(3, bool)}, "['bool', 'float32']"),
        ({"phase": jnp.zeros(3, jnp.complex64)}, "['complex64', 'float32']"),
        (None, "None"),
    ],
)
def test_parameters_that_no_step_can_move_are_refused(others, found):
    """Whole numbers, truth values, complex numbers, and a model without parameters."""

    def init(key):
        return {} if others is None else {"w": jnp.zeros((4, 3)), **others}

    model = custom(init, lambda p, x: x[:, :3], lambda scores, y: scores[:, 0])
    with pytest.raises(InputError) as refused:
        require_fitting(model, 4, 3, is_number=False)
    assert str(refused.value) == (
        "the parameters of your own model must be arrays of floating-point numbers, got "
        f"{found}; keep all else out of init's result"
    )


def test_parameters_of_one_name_are_refused():
    """One of them would be missing in the model that is stored."""
    model = custom(
        lambda key: {"head": {"w": jnp.zeros((4, 3))}, "head/w": jnp.zeros((4, 3))},
        lambda p, x: x @ p["head"]["w"] + x @ p["head/w"],
        lambda scores, y: scores[:, 0],
    )
    with pytest.raises(InputError, match=r"a parameter's name must be .*, got 'head/w'; rename"):
        require_fitting(model, 4, 3, is_number=False)


def test_initial_values_fill_their_interval():
    params = Cnn((16, 16, 2), channels=8, classes=10).init(jax.random.key(1))
    for name, fan_in in {"kernel": 50, "bias": 50, "w": 3200, "b": 3200}.items():
        bound = 1 / math.sqrt(fan_in)
        assert float(jnp.max(jnp.abs(params[name]))) <= bound
    assert float(jnp.std(params["w"])) == pytest.approx(1 / math.sqrt(3 * 3200), rel=0.02)
    other = Cnn((16, 16, 2), channels=8, classes=10).init(jax.random.key(2))
    assert not jnp.any(params["w"] == other["w"])


def test_the_convolution_is_the_one_of_scipy():
    model = Cnn((6, 7, 2), channels=3, classes=4)
    params = jax.tree.map(np.asarray, model.init(jax.random.key(0)))
    picture = np.random.default_rng(0).normal(size=(6, 7, 2)).astype(np.float32)
    maps = np.zeros(model.map_shape)
    for channel in range(3):
        maps[channel] = params["bias"][channel]
        for colour in range(2):
            kernel = params["kernel"][:, :, colour, channel]
            maps[channel] += scipy.signal.correlate2d(picture[..., colour], kernel)
    wanted = np.maximum(maps, 0).reshape(-1) @ params["w"] + params["b"]
    found = model.apply(params, jnp.asarray(picture.reshape(1, -1)))
    np.testing.assert_allclose(found[0], wanted, atol=1e-5)


@pytest.mark.parametrize("budget", [200, 5 << 20])
@pytest.mark.parametrize("kind", ["svm", "softmax", "mlp"])
def test_evaluation_equals_numpy(kind, budget, monkeypatch):
    monkeypatch.setattr(clipping, "CPU_BYTES", budget)
    _evaluate.clear_cache()
    random = np.random.default_rng(0)
    model = {"svm": Svm(5, 0.1), "softmax": Softmax(5, 2), "mlp": Mlp(5, 4, 2)}[kind]
    params = jax.tree.map(
        lambda p: np.asarray(random.normal(size=p.shape), np.float32), model.init(jax.random.key(0))
    )
    x, y = random.normal(size=(23, 5)).astype(np.float32), random.integers(0, 2, 23)
    loss, accuracy = evaluate(model, params, jnp.asarray(x), jnp.asarray(y))
    assert float(loss) == pytest.approx(
        np.mean(sample_losses(model.form(), *as_float64(params, x, y))), 1e-5
    )
    # The class with the smaller loss is the prediction.
    both = [
        sample_losses(model.form(), *as_float64(params, x, np.full(23, label))) for label in (0, 1)
    ]
    if kind == "svm":
        both[1] = -(x @ params["w"] + params["b"])
        both[0] = np.zeros(23)
    assert float(accuracy) == pytest.approx(np.mean((both[1] < both[0]) == y))
    several = jax.tree.map(lambda p: jnp.stack([p, 2 * p]), params)
    run = jax.vmap(evaluate, in_axes=(None, 0, None, None))
    losses, accuracies = run(model, several, jnp.asarray(x), jnp.asarray(y))
    assert float(losses[0]) == pytest.approx(float(loss), rel=1e-6)
    assert float(accuracies[0]) == pytest.approx(float(accuracy))
    _evaluate.clear_cache()


def test_evaluation_of_other_models_and_of_nothing():
    cnn = Cnn((4, 4, 1), channels=2, classes=3)
    params = cnn.init(jax.random.key(0))
    x = jax.random.normal(jax.random.key(1), (9, 16))
    loss, accuracy = evaluate(cnn, params, x, cnn.predict(params, x))
    assert float(accuracy) == 1
    assert 0 < float(loss) < math.log(3)
    two = custom(
        lambda key: jnp.ones(2),
        lambda w, x: x @ w,
        lambda scores, y: (scores - y) ** 2,
        predict=lambda scores: jnp.round(scores),
    )
    assert float(evaluate(two, jnp.ones(2), jnp.ones((5, 2)), jnp.full(5, 2))[1]) == 1
    with pytest.raises(InputError, match="at least one row"):
        evaluate(two, jnp.ones(2), jnp.ones((0, 2)), jnp.ones(0))
    assert math.isnan(float(evaluate(two, jnp.ones(2), jnp.full((5, 2), jnp.nan), jnp.ones(5))[0]))


@pytest.mark.parametrize("kind", ["svm", "softmax", "mlp"])
def test_a_device_computes_in_numpy_without_loading_jax(kind):
    code = f"""
import sys
import numpy as np
import sottovoce.models.custom
from sottovoce.models import base

form = base.build("{kind}", shape=(3,), classes=2).form()
params = {{name: np.zeros(shape) for name, shape in form.shapes().items()}}
x, y = np.ones((2, 3)), np.array([0, 1])
assert len(base.gradient_matrix(form, params, x, y)) == len(base.sample_losses(form, params, x, y))
sys.exit("jax" in sys.modules)
"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
