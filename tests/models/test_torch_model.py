"""A PyTorch model behind the same trust boundary: its clipped sums are the numpy oracle's."""

from __future__ import annotations

import numpy as np
import pytest

from sottovoce.client import release
from sottovoce.errors import InputError
from sottovoce.models import base
from sottovoce.models.base import Form
from sottovoce.models.custom import find_object
from sottovoce.plan import Plan
from sottovoce.privacy.sensitivity import Recipe
from support import ROOT
from support.numpy_twin import clipped_sum_numpy

torch = pytest.importorskip("torch", reason="the extra sottovoce[torch] is not installed")
torch_model = pytest.importorskip("sottovoce.models.torch_model")

EXAMPLE = ROOT / "examples" / "torch_cnn"
OWN = Form("own", (6,), 3)


def mlp():
    return torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.ReLU(), torch.nn.Linear(5, 3))


def data(n=40, seed=0):
    rng = np.random.default_rng(seed)
    return rng.standard_normal((n, 6)) * 3, rng.integers(0, 3, n)


def as_numpy(params):
    """torch's names and orientation as those of our mlp."""
    return {
        "w1": params["0.weight"].T, "b1": params["0.bias"],
        "w2": params["2.weight"].T, "b2": params["2.bias"],
    }  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("clip", [0.05, 1.0, 50.0])
def test_a_torch_step_is_the_step_of_the_numpy_oracle(clip):
    model, (x, y) = torch_model.TorchModel(mlp), data()
    params = {name: leaf.astype(np.float64) for name, leaf in model.draw_parameters(seed=3).items()}
    recipe = Recipe(0.7, clip)
    ours = release.step(OWN, params, x, y, recipe, model)
    weight = np.full(len(y), 0.7 / len(y))
    moved = clipped_sum_numpy("mlp", as_numpy(params), x, y, weight, clip)
    theirs = {name: leaf - moved[name] for name, leaf in as_numpy(params).items()}
    ours = as_numpy(ours)
    gap = np.sqrt(sum(np.sum((ours[k] - theirs[k]) ** 2) for k in ours))
    step = np.sqrt(sum(np.sum(leaf**2) for leaf in moved.values()))
    assert gap <= 1e-6 * step


def test_per_sample_gradients_are_those_of_each_sample_alone():
    net = find_object(f"{EXAMPLE / 'net.py'}:model")
    rng = np.random.default_rng(1)
    x, y = rng.random((9, 64)), rng.integers(0, 10, 9)
    params = net.draw_parameters(seed=1)
    together = net.gradients(params, x, y)
    for m in range(len(y)):
        alone = net.gradients(params, x[m : m + 1], y[m : m + 1])
        for name in together:
            np.testing.assert_array_equal(together[name][m], alone[name][0])


def test_a_row_that_is_not_finite_leaves_its_neighbours_alone():
    net = find_object(f"{EXAMPLE / 'net.py'}:model")
    rng = np.random.default_rng(2)
    x, y = rng.random((6, 64)), rng.integers(0, 10, 6)
    params = net.draw_parameters(seed=1)
    clean = net.gradients(params, x, y)
    spoilt = x.copy()
    spoilt[2, 5] = np.nan
    dirty = net.gradients(params, spoilt, y)
    rows = [0, 1, 3, 4, 5]
    for name in clean:
        np.testing.assert_array_equal(dirty[name][rows], clean[name][rows])  # to the last bit
    one, two = net.losses(params, x, y), net.losses(params, spoilt, y)
    np.testing.assert_array_equal(one[rows], two[rows])


def test_a_module_that_mixes_samples_is_refused():
    bad = torch_model.TorchModel(
        lambda: torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.BatchNorm1d(5))
    )
    with pytest.raises(InputError, match=r"BatchNorm1d.*mixes samples"):
        bad.shapes()


def test_the_first_model_is_a_function_of_the_seed_and_leaves_torch_alone():
    model = torch_model.TorchModel(mlp)
    torch.manual_seed(5)
    before = torch.rand(1)
    torch.manual_seed(5)
    one, two, three = model.draw_parameters(1), model.draw_parameters(1), model.draw_parameters(2)
    assert torch.equal(torch.rand(1), before)
    assert all(np.array_equal(one[name], two[name]) for name in one)
    assert not all(np.array_equal(one[name], three[name]) for name in one)


def test_blocks_do_not_change_the_sum(monkeypatch):
    model, (x, y) = torch_model.TorchModel(mlp), data(17)
    params = {name: leaf.astype(np.float64) for name, leaf in model.draw_parameters(seed=3).items()}
    whole = release.step(OWN, params, x, y, Recipe(1.0, 1.0), model)
    monkeypatch.setattr(base, "BLOCK_NUMBERS", 5 * 53)
    pieces = release.step(OWN, params, x, y, Recipe(1.0, 1.0), model)
    for name in whole:
        np.testing.assert_array_equal(whole[name], pieces[name])


def test_a_plan_names_the_model_in_a_file_beside_it(tmp_path):
    plan = Plan.load(EXAMPLE / "plan.toml")
    assert plan.model.own == f"{EXAMPLE / 'net.py'}:model"
    assert isinstance(find_object(plan.model.own), torch_model.TorchModel)
    with pytest.raises(InputError, match=r"model.own must be .* got .*there is no file net.py"):
        find_object(f"{tmp_path / 'net.py'}:model")
