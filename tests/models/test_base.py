"""One file and one line in the registry make a model: what this file defines trains everywhere."""

from __future__ import annotations

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sottovoce.client import release
from sottovoce.errors import PlanError
from sottovoce.models import base
from sottovoce.models.base import Form, NamedModel, as_device, build
from sottovoce.plan import Plan
from sottovoce.privacy.sensitivity import Recipe
from sottovoce.simulation.simulate import simulate
from support import ROOT


@dataclass(frozen=True)
class Logistic(NamedModel):
    """Logistic regression of two classes: no clipped sum, gradient or numpy of its own."""

    features: int

    name = "logistic"
    most_classes = 2

    @classmethod
    def create(cls, shape, classes, **options):
        return cls(math.prod(shape))

    def form(self, shape=(), classes=2):
        return Form("logistic", (self.features,), 2)

    def init(self, key):
        return {"w": jnp.zeros(self.features), "b": jnp.zeros(())}

    def apply(self, params, x):
        return x @ params["w"] + params["b"]

    def loss(self, params, x, y):
        return jax.nn.softplus((1 - 2 * y) * self.apply(params, x))


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    monkeypatch.setitem(base.MODELS, "logistic", f"{__name__}:Logistic")


@pytest.fixture(scope="module")
def rows():
    random = np.random.default_rng(3)
    x = random.standard_normal((400, 5)).astype(np.float32)
    return x, (x[:, 0] + 0.3 * random.standard_normal(400) > 0).astype(np.int64)


def plan_of(**others):
    return Plan(
        data={"name": "arrays", "clients": 4, "validation": 60, "test": 60},
        model={"name": "logistic"},
        privacy={"epsilon": 50.0},
        rounds={"schedule": "fixed", "rounds": 10},
    ).replace(**others)


def test_a_plan_knows_the_model_and_what_it_is_for(monkeypatch):
    assert plan_of().model.name == "logistic"
    with pytest.raises(PlanError, match="the logistic tells 2 classes apart and digits has 10"):
        Plan(data={"name": "digits"}, model={"name": "logistic"})
    monkeypatch.delitem(base.MODELS, "logistic")
    with pytest.raises(PlanError, match=r"model\.name must be svm, softmax, mlp, cnn, least"):
        plan_of()


def test_it_trains_in_memory_streamed_and_with_secure_noise(rows, tmp_path):
    near = simulate(plan_of(), data=rows, seed=1, out=tmp_path / "run")
    assert near.record["result"]["test_accuracy"] > 0.8
    np.save(tmp_path / "x.npy", rows[0])
    far = simulate(plan_of(), data=(np.load(tmp_path / "x.npy", mmap_mode="r"), rows[1]), seed=1)
    for name, leaf in near.params.items():
        np.testing.assert_allclose(leaf, far.params[name], atol=3e-6)
    clients, public = (tuple(part[where] for part in rows) for where in (np.s_[:300], np.s_[300:]))
    uploads = simulate(  # every client calls `client.release`
        plan_of(noise="secure"), data=clients, validation=public, test=public
    )
    assert uploads.record["result"]["test_accuracy"] > 0.8


def test_a_step_of_a_device_is_the_clipped_sum_of_the_compiled_round(rows):
    from sottovoce.models.clipping import clipped_sum

    model, (x, y), recipe = build("logistic", shape=(5,), classes=2), rows, Recipe(0.7, 0.5)
    device = as_device(model)
    assert Form.from_json(device.form.to_json()).model() == model
    start = {name: np.full(shape, 0.1) for name, shape in model.shapes().items()}
    step = release.step(device.form, start, x, y, recipe, device.own_model)
    weight = np.full(len(y), 0.7 / len(y), np.float32)
    total = clipped_sum(model, model.unflatten(start), jnp.asarray(x), jnp.asarray(y), weight, 0.5)
    for name, leaf in start.items():
        np.testing.assert_allclose(step[name], leaf - total[name], atol=1e-6)


def test_the_page_of_models_names_every_model(monkeypatch):
    monkeypatch.delitem(base.MODELS, "logistic")
    text = (ROOT / "docs" / "models.md").read_text("utf-8")
    assert [name for name in base.MODELS if f"\n| `{name}` |" not in text] == []
