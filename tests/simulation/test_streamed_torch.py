"""PyTorch models in simulation: the same run as the same functions in JAX, and clients' means."""

from __future__ import annotations

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sottovoce
from sottovoce.client import release
from sottovoce.errors import InputError
from sottovoce.models.base import Model, as_device
from sottovoce.plan import Plan
from sottovoce.server.federation import build
from sottovoce.simulation.simulate import Given, adapt_plan, simulate
from sottovoce.simulation.streamed import SummingEngine

torch = pytest.importorskip("torch", reason="the extra sottovoce[torch] is not installed")

PLAN = Plan(
    data={"name": "arrays", "clients": 4, "validation": 40, "test": 40},
    model={"name": "custom"},
    local={"learning_rate": 1.0, "clip": 0.5},
    privacy={"epsilon": 50.0},
    rounds={"schedule": "fixed", "rounds": 3},
)


@pytest.fixture(scope="module")
def rows():
    rng = np.random.default_rng(0)
    x = rng.standard_normal((400, 6)).astype(np.float32)
    return x, (x[:, 0] > 0).astype(np.int64) + (x[:, 1] > 0.5)


@pytest.fixture(scope="module")
def module():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.ReLU(), torch.nn.Linear(5, 3))


@pytest.fixture(scope="module")
def twin(module):
    """The module in JAX, with the same names and first parameters: the noise is the same draw."""
    first = {name: leaf.detach().numpy().copy() for name, leaf in module.named_parameters()}

    def apply(p, x):
        hidden = jax.nn.relu(x @ p["0.weight"].T + p["0.bias"])
        return hidden @ p["2.weight"].T + p["2.bias"]

    def loss(scores, y):
        return -jnp.take_along_axis(jax.nn.log_softmax(scores), y[:, None], axis=1)[:, 0]

    return sottovoce.custom(lambda key: jax.tree.map(jnp.asarray, first), apply, loss)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"local.steps": 2, "rounds.per_round": 2},
        {"server.signal": "clients", "server.loss_bound": 4.0, "rounds.schedule": "discounted"},
        pytest.param({"server.signal": "raw", "server.momentum": 0.5}, marks=pytest.mark.trust),
        {"model.class_weights": (1.0, 0.5, 0.25), "server.choose": "best"},
        pytest.param({"metric": "balanced_accuracy"}, marks=pytest.mark.trust),
    ],
    ids=lambda changes: ", ".join(changes) or "plain",
)
def test_a_module_makes_the_run_that_the_same_functions_in_jax_make(rows, module, twin, changes):
    plan = PLAN.replace(**changes)
    ours = simulate(plan, data=rows, model=module, seed=3)
    theirs = simulate(plan, data=rows, model=twin, seed=3)
    assert ours.record["guarantee"] == theirs.record["guarantee"]
    for name, leaf in ours.params.items():
        np.testing.assert_allclose(leaf, theirs.params[name], rtol=2e-4, atol=2e-5)
        assert not np.allclose(leaf, module.get_parameter(name).detach())  # it is not written to
    assert ours.metrics == pytest.approx(theirs.metrics, abs=0.02)


def test_the_mean_without_noise_is_that_of_the_clients_uploads(rows, module):
    plan = adapt_plan(PLAN, Given(rows, None, None, None), module)
    federation = build(plan, seed=1, data=Given(rows, None, None, None), model=module)
    model, held = federation.model, federation.held
    params = {name: leaf.astype(np.float64) for name, leaf in model.draw_parameters(1).items()}
    weight = np.array([0.5, 0.0, 0.2, 0.3])
    engine = SummingEngine(SimpleNamespace(federation=federation, seed=1))
    coefficient = weight * plan.local.rate / federation.samples
    with jax.enable_x64(True):
        ours = engine._move(params, coefficient, jax.random.key(0), 0.0)
    device = as_device(model, shape=held.inputs, classes=held.classes)
    uploads = [
        release.step(device.form, params, mine.x, mine.y, federation.recipe, device.own_model)
        for mine in map(held.client, range(4))
    ]
    for name in params:
        mean = sum(p * upload[name] for p, upload in zip(weight, uploads, strict=True))
        gap = np.linalg.norm(ours[name] - mean)
        assert gap <= 1e-6 * np.linalg.norm(mean - params[name])


def test_a_model_without_sums_of_its_own_is_simulated_from_its_gradients(rows):
    class Centre(Model):
        def shapes(self):
            return {"w": (6,)}

        def draw_parameters(self, seed):
            return {"w": np.zeros(6, np.float32)}

        def gradients(self, params, x, y):
            return {"w": params["w"] - np.asarray(x, np.float64)}

        def losses(self, params, x, y):
            return np.sum((params["w"] - np.asarray(x, np.float64)) ** 2, axis=1) / 2

        def predict(self, params, x):
            return np.zeros(len(x), np.int64)

    x, y = rows[0] + 3, rows[1]
    run = simulate(PLAN.replace(**{"rounds.rounds": 20}), data=(x, y), model=Centre(), seed=1)
    assert np.all(np.abs(run.params["w"] - 3) < 0.7)


class Stop(KeyboardInterrupt):
    pass


def test_a_stopped_run_of_a_module_is_resumed_to_the_same_model(rows, module, tmp_path):
    whole = simulate(PLAN, data=rows, model=module, seed=3)

    def stop(done):
        if done.t == 1:
            raise Stop

    with pytest.raises(Stop):
        simulate(PLAN, data=rows, model=module, seed=3, out=tmp_path / "run", on_round=stop)
    resumed = sottovoce.resume(tmp_path / "run", data=rows, model=module)
    for name, leaf in whole.params.items():
        np.testing.assert_array_equal(leaf, resumed.params[name])
    loaded = sottovoce.load(tmp_path / "run", model=module)
    np.testing.assert_array_equal(loaded.predict(rows[0]), resumed.predict(rows[0]))


def test_what_is_no_model_is_refused_in_one_sentence(rows):
    with pytest.raises(InputError, match="model must be a model or a torch module, got 'mlp'"):
        simulate(PLAN, data=rows, model="mlp")
    idle = torch.nn.ModuleDict({"head": torch.nn.Linear(6, 3)})
    with pytest.raises(InputError, match="does not fit rows of 6 numbers"):
        simulate(PLAN, data=rows, model=idle)
    person = np.arange(len(rows[1])) // 2
    plan = PLAN.replace(**{"local.unit": "person"})
    with pytest.raises(InputError, match=r"local\.unit must be record or client"):
        simulate(plan, data=rows, model=torch.nn.Linear(6, 3), person=person)


def test_data_may_follow_the_plan_without_its_name(rows, module):
    assert simulate(PLAN, rows, model=module, seed=1) is not None
