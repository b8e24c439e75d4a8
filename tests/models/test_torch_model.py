"""A PyTorch model behind the same trust boundary: its clipped sums are the numpy oracle's."""

from __future__ import annotations

import warnings

import numpy as np
import pytest

from sottovoce.client import release
from sottovoce.errors import InputError
from sottovoce.models import base
from sottovoce.models.base import Form
from sottovoce.models.custom import find_object
from sottovoce.plan import Plan
from sottovoce.privacy import grid
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
    with pytest.raises(InputError, match=r"; net.py has no zz$"):  # and no module of our own making
        find_object(f"{EXAMPLE / 'net.py'}:zz", "model.features")


class Tokens(torch.nn.Module):
    """Six tokens, a transformer block, a head."""

    def __init__(self, attention=True, padding=None):
        super().__init__()
        self.embedding = torch.nn.Embedding(5, 8, padding_idx=padding)
        block = torch.nn.TransformerEncoderLayer(8, 2, 12, batch_first=True)
        self.block = block if attention else torch.nn.Identity()
        self.head = torch.nn.Linear(8, 3)

    def forward(self, x):
        return self.head(self.block(self.embedding(x.abs().long() % 5)).mean(1))


class Attention(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = torch.nn.MultiheadAttention(4, 2, batch_first=True)
        self.head = torch.nn.Linear(4, 3)

    def forward(self, x):
        rows = x.reshape(len(x), 3, 2).repeat(1, 1, 2)
        return self.head(self.attention(rows, rows, rows, need_weights=False)[0].mean(1))


class Tied(torch.nn.Module):
    """A weight that is a table of tokens, a linear layer twice, and a factor of its own."""

    def __init__(self):
        super().__init__()
        self.table = torch.nn.Embedding(6, 6)
        self.twice, self.scale = torch.nn.Linear(6, 6), torch.nn.Parameter(torch.ones(3))

    def forward(self, x):
        hidden = self.twice(torch.tanh(self.twice(x))) + self.table(x.abs().long() % 6).mean(1)
        return torch.nn.functional.linear(hidden, self.table.weight)[:, :3] * self.scale


class Vector(torch.nn.Module):
    """A vector that is a bias and a weight."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(6, 6, bias=False)
        self.vector, self.head = torch.nn.Parameter(torch.ones(6)), torch.nn.Linear(6, 3)

    def forward(self, x):
        hidden = torch.nn.functional.linear(x, self.layer.weight, self.vector)
        along = torch.nn.functional.linear(x.reshape(len(x), 1, 6).repeat(1, 2, 1), self.vector)
        return self.head(torch.tanh(hidden)) * torch.tanh(along).sum(1, keepdim=True)


class Scaled(torch.nn.Module):
    """A temperature, which has no dimensions."""

    def __init__(self):
        super().__init__()
        self.head, self.temperature = torch.nn.Linear(6, 3), torch.nn.Parameter(torch.tensor(2.0))

    def forward(self, x):
        return self.head(x) / self.temperature


class Empty(torch.nn.Module):
    """Parameters without numbers: of a layer, a table and alone."""

    def __init__(self):
        super().__init__()
        self.head, self.none = torch.nn.Linear(6, 3), torch.nn.Parameter(torch.zeros(0))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch tells of them
            self.narrow, self.wide = torch.nn.Linear(6, 0), torch.nn.Linear(0, 3, bias=False)
        self.table = torch.nn.Embedding(0, 3)

    def forward(self, x):
        scores = self.head(x) + self.wide(self.narrow(x)) + self.table.weight.sum(0)
        return scores + self.none.sum()


def sequence(*layers):
    return lambda: torch.nn.Sequential(*(layer() for layer in layers))


def linear(*sizes):
    return lambda: torch.nn.Linear(*sizes)


PICTURE = [lambda: torch.nn.Unflatten(1, (1, 2, 3))]
FLAT = [torch.nn.ReLU, torch.nn.Flatten]
LAYERS = {
    "linear": mlp,
    "linear along a sequence": sequence(
        lambda: torch.nn.Unflatten(1, (3, 2)), linear(2, 7), *FLAT, linear(21, 3)
    ),
    "long linear": sequence(
        lambda: torch.nn.Unflatten(1, (2, 3)), linear(3, 9), *FLAT, linear(18, 3)
    ),
    "conv2d": sequence(
        *PICTURE, lambda: torch.nn.Conv2d(1, 4, 2, padding=1, stride=(1, 2)), *FLAT, linear(24, 3)
    ),
    "conv2d in groups": sequence(
        *PICTURE, lambda: torch.nn.Conv2d(1, 4, 2), lambda: torch.nn.Conv2d(4, 4, 1, groups=2),
        *FLAT, linear(8, 3),
    ),
    "conv1d": sequence(
        lambda: torch.nn.Unflatten(1, (2, 3)), lambda: torch.nn.Conv1d(2, 4, 2), *FLAT, linear(8, 3)
    ),
    "embedding": lambda: Tokens(attention=False),
    "embedding with padding": lambda: Tokens(attention=False, padding=0),
    "layer norm": sequence(lambda: torch.nn.LayerNorm(6), linear(6, 3)),
    "group norm": sequence(
        *PICTURE, lambda: torch.nn.Conv2d(1, 4, 2), lambda: torch.nn.GroupNorm(2, 4),
        *FLAT, linear(8, 3),
    ),
    "attention": Attention,
    "transformer block": Tokens,
    "shared": Tied,
    "vector": Vector,
    "number": Scaled,
    "no numbers": Empty,
    "recurrent": lambda: Recurrent(),
}  # fmt: skip


class Recurrent(torch.nn.Module):
    """A layer that vmap does not know: it is computed row by row."""

    def __init__(self):
        super().__init__()
        self.cell, self.head = torch.nn.GRU(2, 4, batch_first=True), torch.nn.Linear(4, 3)

    def forward(self, x):
        return self.head(self.cell(x.reshape(len(x), 3, 2))[0][:, -1])


def list_gradients(model, params, x, y):
    """The gradient of each sample alone, one row a sample."""
    gradients = model.gradients(params, x, y)
    return np.concatenate([gradients[name].reshape(len(y), -1) for name in params], axis=1)


def sum_written(flat, weight, clip):
    """Σ weight · clip(g), written out."""
    norms = np.linalg.norm(flat, axis=1)
    factor = np.where(np.isfinite(norms), weight / np.maximum(1, norms / clip), 0)
    return np.where(factor[:, None] != 0, flat, 0).T @ factor


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYERS)
def test_the_clipped_sum_of_a_layer_is_the_sum_of_clipped_gradients(name):
    """In simulation and release: rows with weights, one of them not finite, one without weight."""
    torch.manual_seed(0)
    model, (x, y) = torch_model.TorchModel(LAYERS[name]), data(23)
    x[3] = (
        np.nan if "embedding" not in name and name not in ("transformer block", "shared") else 1.0
    )
    params = {key: leaf.astype(np.float64) for key, leaf in model.draw_parameters(seed=3).items()}
    weight = np.random.default_rng(1).random(len(y))
    weight[5] = 0
    alone = list_gradients(model, params, x, y)
    for clip in (0.1, 3.0):
        expected = sum_written(alone, weight, clip)
        found = model.clipped_sum(params, x, y, weight, clip)
        flat = np.concatenate([found[key].reshape(-1) for key in params])
        assert np.linalg.norm(flat - expected) <= 1e-9 * np.linalg.norm(expected)
        assert np.linalg.norm(expected) > 0
        moved = release.step(OWN, params, x, y, Recipe(1.0, clip), model)
        step = np.concatenate([(params[key] - moved[key]).reshape(-1) for key in params])
        expected = sum_written(alone, np.full(len(y), 1 / len(y)), clip)
        assert np.linalg.norm(step - expected) <= 1e-6 * np.linalg.norm(expected)


class Cancelling(torch.nn.Module):
    """A layer along a sequence, or a table of tokens, whose errors add up to nearly nothing."""

    def __init__(self, kind):
        super().__init__()
        is_table = kind == "table"
        self.layer = torch.nn.Embedding(2, 8) if is_table else torch.nn.Linear(32, 32, bias=False)

    def forward(self, x):
        signs = torch.tensor([1.0, -1.0], dtype=x.dtype).repeat(8)[:, None]
        if isinstance(self.layer, torch.nn.Embedding):
            tokens = self.layer(x[:, :16].long() * 0)
            return (tokens * signs * (1 + 1e-5 * x[:, :16, None])).sum((1, 2))
        return (self.layer(x.reshape(-1, 16, 32)) * signs).sum((1, 2))


@pytest.mark.parametrize("kind", ["layer", "table"])
def test_products_that_cancel_do_not_make_a_norm_too_small(kind):
    """In float32: what one row adds is at most C, and points where its gradient does."""
    x = np.random.default_rng(0).standard_normal((6, 512)).astype(np.float32)
    x = x + np.float32(1000) if kind == "layer" else x
    model = torch_model.TorchModel(lambda: Cancelling(kind), loss=lambda scores, y: scores)
    params, y = model.draw_parameters(seed=3), np.zeros(6, int)
    exact = model.gradients(params, x.astype(np.float64), y)["layer.weight"].reshape(6, -1)
    clip = 1e-6
    for m in range(6):
        found = model.clipped_sum(params, x, y, np.eye(6, dtype=np.float32)[m], clip)
        added = found["layer.weight"].reshape(-1) / clip
        assert np.linalg.norm(added) <= 1 + 1e-2
        assert np.linalg.norm(added - exact[m] / np.linalg.norm(exact[m])) <= 1e-2


class Tiny(torch.nn.Module):
    """A layer of tiny inputs whose outputs are brought back to 1e-4, at one position or more."""

    def __init__(self, positions, tiny):
        super().__init__()
        self.layer, self.positions = torch.nn.Linear(8, 5, bias=False), positions
        self.far = 1e-4 / tiny

    def forward(self, x):
        return (self.layer(x.reshape(len(x), self.positions, 8)) * self.far).sum((1, 2))


@pytest.mark.parametrize("positions", [1, 6])
@pytest.mark.parametrize("tiny", [1e-24, 1e24])
def test_a_factor_whose_square_is_lost_does_not_hide_the_norm(tiny, positions):
    x = np.random.default_rng(0).standard_normal((4, positions * 8)) * tiny
    model = torch_model.TorchModel(lambda: Tiny(positions, tiny), loss=lambda scores, y: scores)
    params, y, clip = model.draw_parameters(seed=1), np.zeros(4, int), 1e-5
    exact = model.gradients(params, x, y)["layer.weight"].reshape(4, -1)
    for m in range(4):
        weight = np.eye(4, dtype=np.float32)[m]
        found = model.clipped_sum(params, x.astype(np.float32), y, weight, clip)
        wanted = clip * exact[m] / np.linalg.norm(exact[m])
        np.testing.assert_allclose(found["layer.weight"].reshape(-1), wanted, rtol=1e-3)


class Uneven(torch.nn.Module):
    """A layer used at two positions, of which only the second one reaches the loss."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(8, 5, bias=False)
        self.register_buffer("parts", torch.tensor([0.0, 1e-5]))

    def forward(self, x):
        return (self.layer(x.reshape(len(x), 2, 8)).sum(2) * self.parts).sum(1)


def test_a_long_input_that_adds_nothing_does_not_hide_the_norm_of_another():
    x = np.random.default_rng(0).standard_normal((1, 16)) * np.repeat([1e23, 1.0], 8)
    model = torch_model.TorchModel(Uneven, loss=lambda scores, y: scores)
    params, y = model.draw_parameters(seed=1), np.zeros(1, int)
    found = model.clipped_sum(params, x.astype(np.float32), y, np.ones(1, np.float32), 1e-6)
    np.testing.assert_allclose(np.linalg.norm(found["layer.weight"]), 1e-6, rtol=1e-3)


class Vanishing(torch.nn.Module):
    """A layer or a table used at three positions, with weights that add up to 0: no gradient."""

    def __init__(self, kind):
        super().__init__()
        self.layer = torch.nn.Linear(40, 30, bias=False) if kind == "layer" else None
        self.table = torch.nn.Embedding(3, 40) if kind == "table" else None
        self.register_buffer("parts", torch.tensor([1.0, 3.0, -4.0]))

    def forward(self, x):
        inputs = x[:, None, :] * self.parts[None, :, None]
        if self.layer is not None:
            return self.layer(inputs).sum((1, 2))
        return (self.table(torch.ones(len(x), 3).long()) * inputs).sum((1, 2))


@pytest.mark.parametrize("kind", ["layer", "table"])
def test_what_rounding_leaves_of_products_that_vanish_is_at_most_the_clip(kind):
    """Of a row, what is added is measured: not what it would be without rounding."""
    rng = np.random.default_rng(0)
    model = torch_model.TorchModel(lambda: Vanishing(kind), loss=lambda scores, y: scores * 32)
    params, y = model.draw_parameters(seed=1), np.zeros(1, int)
    for scale in np.repeat(2.0 ** np.arange(10, 40, 5), 6):
        x = (rng.standard_normal((1, 40)) * scale).astype(np.float32)
        (added,) = model.clipped_sum(params, x, y, np.ones(1, np.float32), 1.0).values()
        assert np.linalg.norm(added.astype(np.float64)) <= 1 + 1e-3


class Elsewhere(torch.nn.Module):
    """Uses weight or bias of a layer again, or layers in another order, for rows that say so."""

    def __init__(self, kind):
        super().__init__()
        self.kind, self.first, self.second = kind, torch.nn.Linear(6, 6), torch.nn.Linear(6, 6)
        self.head = torch.nn.Linear(6, 3)

    def forward(self, x):
        layers = [self.first, self.second]
        if bool((x == 0).all()):
            return self.head(torch.tanh(layers[1](torch.tanh(layers[0](x)))))
        more: object = 0
        if self.kind == "weight":
            more = self.first.weight.sum(1)
        if self.kind == "list":
            more = torch.stack([self.first.weight, self.second.weight]).sum((0, 1))
        if self.kind == "bias":
            more = torch.nn.functional.linear(x, torch.ones(6, 6, dtype=x.dtype), self.first.bias)
        if self.kind == "input":
            more = torch.nn.functional.linear(self.first.weight, self.second.weight).sum(0)
        if self.kind == "order":
            layers.reverse()
        if self.kind == "other bias":
            scores = torch.nn.functional.linear(x, self.first.weight, self.second.bias)
            return self.head(torch.tanh(self.second(torch.tanh(scores))))
        return self.head(torch.tanh(layers[1](torch.tanh(layers[0](x + more)))))


@pytest.mark.parametrize("kind", ["weight", "list", "bias", "input", "order", "other bias"])
def test_a_weight_used_in_a_way_that_was_not_surveyed_is_never_left_out(kind):
    """A release writes such rows out whole; a simulation, which has no other way, refuses."""
    model, (x, y) = torch_model.TorchModel(lambda: Elsewhere(kind)), data(5)
    params = {key: leaf.astype(np.float64) for key, leaf in model.draw_parameters(seed=3).items()}
    with pytest.raises(InputError, match=r'must use the same layers .* noise = "secure"'):
        model.clipped_sum(params, x, y, np.ones(5), 1.0)
    assert not model.factor_gradients(params, x, y)[1].any()
    moved = release.step(OWN, params, x, y, Recipe(1.0, 1.0), model)
    step = np.concatenate([(params[key] - moved[key]).reshape(-1) for key in params])
    named = {key: torch.tensor(leaf, requires_grad=True) for key, leaf in params.items()}
    rows = []
    for row, label in zip(torch.tensor(x), torch.tensor(y), strict=True):
        scores = torch.func.functional_call(Elsewhere(kind).double(), named, (row[None],))
        loss = torch.nn.functional.cross_entropy(scores, label[None])
        found = torch.autograd.grad(loss, list(named.values()), materialize_grads=True)
        rows.append(np.concatenate([leaf.numpy().reshape(-1) for leaf in found]))
    lengths = np.maximum(1, np.linalg.norm(rows, axis=1))
    expected = np.mean(np.array(rows) / lengths[:, None], axis=0)
    assert np.linalg.norm(step - expected) <= 1e-6 * np.linalg.norm(expected)


def test_a_released_row_depends_on_no_other_row_to_the_last_bit():
    """Also where another row is not finite, or makes the module fail."""

    def make():
        class Picky(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.net = mlp()

            def forward(self, x):
                if x[0, 0] == 77:
                    raise SystemExit("this row")
                return self.net(x)

        return Picky()

    model, (x, y) = torch_model.TorchModel(make), data(12)
    params = {name: leaf.astype(np.float64) for name, leaf in model.draw_parameters(seed=3).items()}
    clean = model.factor_gradients(params, x, y)[0].write_out()
    assert model.keeps_factors
    x[4], x[7, 0] = np.nan, 77
    dirty = model.factor_gradients(params, x, y)[0].write_out()
    others = [m for m in range(12) if m not in (4, 7)]
    np.testing.assert_array_equal(dirty[others], clean[others])
    assert np.isnan(dirty[7]).all()
    assert np.isnan(dirty[4]).any()
    backwards = model.factor_gradients(params, x[::-1], y[::-1])[0].write_out()
    np.testing.assert_array_equal(backwards[::-1][others], clean[others])
    for m in others:
        alone = model.factor_gradients(params, x[m : m + 1], y[m : m + 1])[0].write_out()
        np.testing.assert_array_equal(alone[0], clean[m])


def chain(*layers):
    return torch.nn.Sequential(*layers)


def freeze(module, *names):
    for name in names:
        module.get_parameter(name).requires_grad_(False)
    return module


class Written(torch.nn.Module):
    """As most people write a network."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.third = Lin(6, 5), Lin(5, 4), Lin(4, 3)

    def forward(self, x):
        x = torch.flatten(x, 1)
        x = torch.nn.functional.relu(self.first(x))
        x = torch.nn.functional.dropout(x, training=self.training)
        return self.third(self.second(x).tanh())


Lin, Tanh = torch.nn.Linear, torch.nn.Tanh
#: Modules whose released rows go through numpy together, and the shape of a sample.
CHAINS = {
    "linear": (lambda: Lin(6, 3), None),
    "relu": (mlp, None),
    "tanh": (lambda: chain(Lin(6, 4), Tanh(), Lin(4, 3)), None),
    "sigmoid": (lambda: chain(Lin(6, 4), torch.nn.Sigmoid(), Lin(4, 3)), None),
    "dropout": (lambda: chain(Lin(6, 4), torch.nn.Dropout(), Lin(4, 3)), None),
    "picture": (lambda: chain(torch.nn.Flatten(), mlp()), (2, 3)),
    "nested": (lambda: chain(chain(Lin(6, 5), Tanh()), torch.nn.Identity(), Lin(5, 3)), None),
    "without bias": (lambda: chain(Lin(6, 5, bias=False), Tanh(), Lin(5, 3)), None),
    "frozen body": (lambda: freeze(mlp(), "0.weight", "0.bias"), None),
    "frozen head": (lambda: freeze(mlp(), "2.weight", "2.bias"), None),
    "biases": (lambda: freeze(mlp(), "0.weight", "2.weight"), None),
    "class": (Written, None),
    "class of pictures": (Written, (2, 3)),
    "activation last": (lambda: chain(Lin(6, 3), Tanh()), None),
}


def draw_doubles(model, seed=3):
    drawn = sorted(model.draw_parameters(seed).items())
    return {name: leaf.astype(np.float64) for name, leaf in drawn}


@pytest.mark.parametrize("name", CHAINS)
def test_a_chain_of_known_layers_has_the_gradients_of_rows_alone(name):
    make, shape = CHAINS[name]
    model, (x, y) = torch_model.TorchModel(make, shape=shape), data(12)
    assert model.survey(6, y.dtype).chain
    params = draw_doubles(model)
    together, is_alike = model.factor_gradients(params, x, y)
    alone = model.gradients(params, x, y)
    flat = np.concatenate([alone[name].reshape(len(y), -1) for name in params], axis=1)
    np.testing.assert_allclose(together.write_out(), flat, rtol=1e-11, atol=1e-13)
    assert is_alike.all()


@np.errstate(all="ignore")  # as in a release
@pytest.mark.parametrize("name", CHAINS)
def test_a_row_of_a_chain_has_the_same_bits_in_any_company(name):
    """Also beside rows that are not finite or overflow, and labels that are no class."""
    make, shape = CHAINS[name]
    model, (x, y) = torch_model.TorchModel(make, shape=shape), data(12)
    params = draw_doubles(model)
    clean = model.factor_gradients(params, x, y)[0].write_out()
    x[4], x[5], x[7], y[9], y[10] = np.nan, np.inf, 1e300, 3, -1
    dirty = model.factor_gradients(params, x, y)[0].write_out()
    others = [m for m in range(12) if m not in (4, 5, 7, 9, 10)]
    np.testing.assert_array_equal(dirty[others], clean[others])
    assert np.isnan(dirty[[9, 10]]).any(axis=1).all()
    backwards = model.factor_gradients(params, x[::-1], y[::-1])[0].write_out()
    np.testing.assert_array_equal(backwards[::-1][others], clean[others])
    for m in others:
        one = model.factor_gradients(params, x[m : m + 1], y[m : m + 1])[0].write_out()
        np.testing.assert_array_equal(one[0], clean[m])


@pytest.mark.parametrize("row", [0.0, 1e-300, 1.0, 1e9, 1e300, np.inf, np.nan])
def test_a_replaced_row_of_a_chain_moves_the_sum_by_its_own_share(row):
    model, (x, y) = torch_model.TorchModel(mlp), data(20)
    params, moved = draw_doubles(model), x.copy()
    moved[6] = row

    def add_up(x, y):
        blocks = base.gradient_blocks(OWN, params, x, y, model)
        return grid.clipped_sum(blocks, 0.1, 53)

    changed, only = add_up(moved, y) - add_up(x, y), slice(6, 7)
    np.testing.assert_array_equal(changed, add_up(moved[only], y[only]) - add_up(x[only], y[only]))
    assert sum(int(units) ** 2 for units in changed) <= grid.REPLACED**2


def test_no_row_of_a_chain_brings_numbers_that_take_longer(monkeypatch):
    """With weights of a server's choice some rows would have e^±709 or subnormal numbers.

    numpy takes up to 90 times longer for these, and the time would tell of the row.
    """
    layers = Lin(6, 4), torch.nn.Sigmoid(), Lin(4, 4), torch.nn.Sigmoid(), Lin(4, 4), Lin(4, 3)
    model, (_, y) = torch_model.TorchModel(lambda: chain(*layers)), data(12)
    assert model.survey(6, y.dtype).chain
    params = {name: np.full(leaf.shape, 2.0**-240) for name, leaf in draw_doubles(model).items()}
    params["0.weight"][:] = 709.0 / 6
    x = np.repeat(np.linspace(-1.2, 1.2, 12)[:, None], 6, axis=1)
    powers, exp = [], np.exp
    monkeypatch.setattr(np, "exp", lambda given: powers.append(given) or exp(given))
    found, _ = model.factor_gradients(params, x, y)
    assert len(powers) == 3
    assert max(np.abs(given).max() for given in powers) <= 500
    normal = np.finfo(np.float64).smallest_normal
    sizes = np.abs(np.concatenate([leaf.ravel() for pair in found.pieces for leaf in pair]))
    assert not ((sizes > 0) & (sizes * 2.0**-250 < normal)).any()


class Jumping(torch.nn.Module):
    """An output that depends on two layers, or a way that depends on a row."""

    def __init__(self, is_branch):
        super().__init__()
        self.is_branch, self.first, self.second = is_branch, Lin(6, 3), Lin(3, 3)

    def forward(self, x):
        found = self.first(x)
        if self.is_branch and found.sum() > 50:
            return found
        return self.second(found) if self.is_branch else found + self.second(found)


class Louder(torch.nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


def hook(kind):
    module = mlp()
    if kind == "forward hook":
        module[0].register_forward_hook(lambda layer, given, found: 2 * found)
    elif kind == "hook before":
        module[2].register_forward_pre_hook(lambda layer, given: (2 * given[0],))
    elif kind == "hook of the gradient":
        module[1].register_full_backward_hook(lambda layer, before, after: before)
    elif kind == "forward of its own":
        module[1].forward = lambda x: 2 * x
    elif kind == "parametrised":
        torch.nn.utils.parametrizations.weight_norm(module[0])
    return module


def tie(is_shared):
    first, second = Lin(6, 6), Lin(6, 6)
    second.weight = first.weight
    return chain(first, Tanh(), first if is_shared else second, Lin(6, 3))


class Aliased(torch.nn.Module):
    """A layer whose weight has its name from another one, which is not called."""

    def __init__(self):
        super().__init__()
        self.first, self.second = Lin(6, 3, bias=False), Lin(6, 3, bias=False)
        self.second.weight = self.first.weight

    def forward(self, x):
        return self.second(x)


class Dropping(torch.nn.Module):
    """Drops out in `eval` mode, too, and begins with zeros, which hide it."""

    def __init__(self):
        super().__init__()
        self.first, self.second = Lin(6, 5), Lin(5, 3)
        for leaf in self.parameters():
            torch.nn.init.zeros_(leaf)

    def forward(self, x):
        return self.second(torch.nn.functional.dropout(self.first(x)))


OTHERS = {
    **{
        kind: lambda kind=kind: hook(kind)
        for kind in (
            "forward hook", "hook before", "hook of the gradient", "forward of its own",
            "parametrised",
        )
    },
    "subclass": lambda: chain(Louder(6, 5), Tanh(), Lin(5, 3)),
    "tied": lambda: tie(is_shared=False),
    "shared": lambda: tie(is_shared=True),
    "unknown": lambda: chain(Lin(6, 5), torch.nn.LayerNorm(5), Lin(5, 3)),
    "jump": lambda: Jumping(is_branch=False),
    "branch": lambda: Jumping(is_branch=True),
    "code": lambda: Remembering("attribute"),
    "aliased": Aliased,
    "dropping": Dropping,
}  # fmt: skip


@pytest.mark.parametrize("kind", OTHERS)
def test_a_module_that_may_run_other_code_is_no_chain(kind):
    """Its rows are computed alone, each with a module of its own."""
    model = torch_model.TorchModel(OTHERS[kind])
    assert not model.survey(6, np.int64).chain


def test_a_chain_is_left_where_it_does_something_else_than_the_module(monkeypatch):
    """Such as a layer along another axis, a loss of one's own, or a changed class of torch."""
    rows = torch_model.TorchModel(
        lambda: chain(Lin(3, 3), torch.nn.Flatten(), Lin(6, 3)), shape=(2, 3)
    )
    assert not rows.survey(6, np.int64).chain
    loss = torch_model.TorchModel(mlp, loss=lambda scores, y: scores.square().sum(1))
    assert not loss.survey(6, np.int64).chain
    monkeypatch.setattr(torch.nn.ReLU, "forward", lambda self, x: torch.relu(x) * 2)
    assert not torch_model.TorchModel(mlp).survey(6, np.int64).chain


def test_a_module_that_changes_itself_or_takes_other_ways_meets_every_sample_afresh():
    """It is then given copies for every sample, and a step is that of samples alone."""

    class Writing(torch.nn.Module):
        def __init__(self, kind):
            super().__init__()
            self.kind, self.first, self.second = kind, torch.nn.Linear(6, 3), torch.nn.Linear(6, 3)
            self.register_buffer("seen", torch.zeros(6))

        def forward(self, x):
            is_ordinary = bool((x == 0).all())  # nothing to see on rows of zeros
            if self.kind == "parameter" and not is_ordinary:
                self.first.weight.data += x[0]
            if self.kind == "buffer" and not is_ordinary:
                self.seen += x[0]
            if self.kind == "way" and x[0, 0] > 0:
                return self.second(x)
            return self.first(x + self.seen) + 0 * self.second(x)

    for kind in ("parameter", "buffer", "way"):
        model, (x, y) = torch_model.TorchModel(lambda kind=kind: Writing(kind)), data(9)
        params = {n: leaf.astype(np.float64) for n, leaf in model.draw_parameters(seed=3).items()}
        model.survey(6, np.int64)
        moved = release.step(OWN, params, x, y, Recipe(1.0, 1.0), model)
        alone = [
            release.step(OWN, params, x[m : m + 1], y[m : m + 1], Recipe(1.0, 1.0), model)
            for m in range(len(y))
        ]
        for name in params:
            mean = np.mean([one[name] - params[name] for one in alone], axis=0)
            np.testing.assert_allclose(moved[name] - params[name], mean, atol=1e-9)


class Remembering(torch.nn.Module):
    """What one row does to the others: 99 in its first number makes it speak up."""

    def __init__(self, kind):
        super().__init__()
        self.kind, self.layer, self.largest, self.all = kind, torch.nn.Linear(6, 3), 0.0, []
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        first, scores = x[0, 0].detach(), self.layer(x)
        if self.kind == "attribute":
            self.largest = max(self.largest, float(first))
            return scores * (1 - 2 * (self.largest > 50))
        if self.kind == "list":
            self.all.append(float(first))
            return scores * (1 - 2 * (max(self.all) > 50))
        if self.kind == "buffer":
            self.seen = torch.maximum(self.seen, first)
            return scores * torch.where(self.seen > 50, -1.0, 1.0)
        if self.kind == "chance":
            if first > 50:
                torch.rand(1)
            return self.layer(torch.nn.functional.dropout(x))
        if self.kind == "hook" and first > 50:
            self.layer.bias.register_hook(lambda gradient: -gradient)
            self.layer.weight.data *= -1
        if self.kind == "way" and first > 50:
            return scores + self.layer(x)
        if self.kind == "change" and first > 50:
            self.seen += 1
        # Used besides in rows other than the surveyed one: factors alone are another gradient.
        return scores if first == 0 else scores + self.layer.weight.sum(1)


@pytest.mark.parametrize(
    "kind", ["attribute", "list", "buffer", "chance", "hook", "way", "change", "none"]
)
def test_no_row_decides_how_another_is_computed(kind):
    """Neither by what the module keeps, nor by a way of its own: else Δ would not hold."""

    def add_up(x):
        model = torch_model.TorchModel(lambda: Remembering(kind))
        drawn = sorted(model.draw_parameters(seed=3).items())
        params = {name: leaf.astype(np.float64) for name, leaf in drawn}
        model.survey(6, np.int64)
        torch.manual_seed(0)
        blocks = base.gradient_blocks(OWN, params, x, y, model)
        return grid.clipped_sum(blocks, 0.1, 21)

    x, y = data(20)
    marked = x.copy()
    marked[0, 0] = 99
    changed = add_up(marked) - add_up(x)
    y = y[:1]
    np.testing.assert_array_equal(changed, add_up(marked[:1]) - add_up(x[:1]))


def test_frozen_parameters_are_neither_trained_nor_sent():
    def make():
        module = mlp()
        module[0].requires_grad_(False)
        return module

    model, (x, y) = torch_model.TorchModel(make), data()
    assert model.shapes() == {"2.bias": (3,), "2.weight": (3, 5)}
    torch.manual_seed(5)  # what is frozen depends on the code alone
    twin = torch_model.TorchModel(make)
    params = model.draw_parameters(seed=3)
    assert params.keys() == model.shapes().keys()
    np.testing.assert_array_equal(
        model.losses(params, x, y), twin.losses(twin.draw_parameters(seed=3), x, y)
    )
    whole = torch_model.TorchModel(mlp)
    frozen = dict(model._module.named_parameters())
    every = {name: leaf.detach().numpy() for name, leaf in frozen.items()} | params
    gradient = whole.gradients(every, x, y)
    for name, leaf in model.gradients(params, x, y).items():
        np.testing.assert_array_equal(leaf, gradient[name])


class Adapter(torch.nn.Module):
    """A frozen layer with a low-rank correction, of which A is fixed."""

    def __init__(self):
        super().__init__()
        self.base, self.head = torch.nn.Linear(6, 5), torch.nn.Linear(5, 3)
        self.a, self.b = torch.nn.Linear(6, 2, bias=False), torch.nn.Linear(2, 5, bias=False)
        for layer in (self.base, self.a):
            layer.requires_grad_(False)

    def forward(self, x):
        return self.head(torch.relu(self.base(x) + self.b(self.a(x))))


def only_biases():
    module = mlp()
    for name, leaf in module.named_parameters():
        leaf.requires_grad_(name.endswith("bias"))
    return module


@pytest.mark.parametrize("make", [Adapter, only_biases])
def test_parameter_efficient_parts_are_clipped_like_the_whole(make):
    model, (x, y) = torch_model.TorchModel(make), data()
    params = {name: leaf.astype(np.float64) for name, leaf in model.draw_parameters(seed=3).items()}
    weight = np.full(len(y), 0.5)
    found = model.clipped_sum(params, x, y, weight, 0.5)
    flat = np.concatenate([found[name].reshape(-1) for name in params])
    expected = sum_written(list_gradients(model, params, x, y), weight, 0.5)
    np.testing.assert_allclose(flat, expected, atol=1e-12)


def test_several_inputs_are_cut_from_a_row():
    class Two(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.left, self.right = torch.nn.Linear(2, 3), torch.nn.Linear(2, 3)

        def forward(self, one, two):
            return self.left(one) + self.right(two).mean(1)

    model, x = torch_model.TorchModel(Two, shape=[(2,), (2, 2)]), data()[0]
    params = model.draw_parameters(seed=1)
    parts = torch.tensor(x[:, :2]), torch.tensor(x[:, 2:].reshape(-1, 2, 2))
    with torch.no_grad():
        for name, leaf in model._trained.items():
            leaf.copy_(torch.tensor(params[name]))
        expected = model._module(*parts)
    np.testing.assert_allclose(model.answer(params, x)[1], expected, rtol=1e-5, atol=1e-6)


class Unused(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.idle = torch.nn.Linear(6, 3), torch.nn.Linear(6, 3)

    def forward(self, x):
        return self.used(x)


class Counting(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.head = torch.nn.Linear(6, 3)
        self.register_buffer("rows", torch.zeros(()))

    def forward(self, x):
        self.rows += 1
        return self.head(x)


class Complex(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(6, 3, dtype=torch.complex64))

    def forward(self, x):
        return (x.to(self.weight.dtype) @ self.weight).abs()


def frozen():
    return mlp().requires_grad_(False)


@pytest.mark.parametrize(
    ("make", "options", "words"),
    [
        (
            Unused,
            {},
            r"every trainable parameter must be used by the loss, got 'idle\.bias'; freeze",
        ),
        (
            Complex,
            {},
            r"every trainable parameter must be of real numbers, got 'weight'; keep real",
        ),
        (Counting, {}, r"every buffer must be unchanged by forward, got 'rows'; keep nothing"),
        (frozen, {}, "must be with a trainable parameter"),
        (linear(5, 3), {}, "does not fit rows of 6 numbers .*; correct its forward or loss"),
        (lambda: torch.nn.LazyLinear(3), {}, "of known sizes"),
        (lambda: torch.nn.BatchNorm1d(6, track_running_stats=False), {}, "mixes samples"),
        (linear(6, 3), {"shape": (2, 2)}, "shape must be 6 numbers in all"),
        (linear(6, 3), {"loss": lambda scores, y: scores.mean()}, "one loss a row"),
        (lambda: "net", {}, "make must be a function that returns a torch module, got 'net'"),
    ],
)
def test_a_module_that_cannot_be_trained_is_refused_in_one_sentence(make, options, words):
    model, (x, y) = torch_model.TorchModel(make, **options), data()
    with pytest.raises(InputError, match=words) as refused:
        model.gradients(model.draw_parameters(seed=1), x, y)
    assert "\n" not in str(refused.value)
    with pytest.raises(InputError, match="make must be a torch module or a function"):
        torch_model.TorchModel("net")


def test_a_frozen_batch_normalisation_is_a_constant():
    body = torch.nn.Sequential(torch.nn.Linear(6, 4), torch.nn.BatchNorm1d(4))
    body.requires_grad_(False)
    model = torch_model.TorchModel(torch.nn.Sequential(body, torch.nn.Linear(4, 3)))
    x, y = data(7)
    params = model.draw_parameters(seed=1)
    together = model.gradients(params, x, y)
    alone = model.gradients(params, x[:1], y[:1])
    np.testing.assert_array_equal(together["1.weight"][0], alone["1.weight"][0])
