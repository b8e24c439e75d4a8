"""Neighbouring data sets for every model, as hostile as they come; distances in exact integers.

A case is a model with weights of some kind, rows of some kind, a clipping norm, and the rows that
are replaced. Sizes are few, so that JAX compiles little.
"""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import dataclass, replace
from functools import cache
from importlib.util import find_spec
from math import isqrt

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from sottovoce.client import release
from sottovoce.models import base, mlp, person, softmax, svm
from sottovoce.models.base import Form, Regression, as_device
from sottovoce.models.cnn import Cnn
from sottovoce.models.custom import custom
from sottovoce.models.person import join_persons
from sottovoce.privacy import grid

SAMPLES = (1, 2, 6)
PIXELS = (3, 2, 1)  # of a picture; every model takes rows of six numbers

_CNN = Cnn(PIXELS, channels=2, classes=3)

#: A scale without dimensions beside arrays, and a convolution, as clients might write them.
OWN = {
    "own": custom(
        init=lambda key: {"a": jnp.zeros((6, 4)), "c": jnp.zeros((4,)), "s": jnp.zeros(())},
        apply=lambda p, x: jax.nn.relu(x @ p["a"]) @ p["c"] + p["s"],
        loss=lambda scores, y: (scores - y) ** 2,
    ),
    "own-conv": custom(_CNN.init, _CNN.apply, lambda s, y: jnp.sum((s - y[:, None]) ** 2, axis=1)),
}
FORMS = {
    "svm": Form("svm", (6,), 2, {"kappa": 0.05}),
    "softmax": Form("softmax", (6,), 4),
    "mlp": Form("mlp", (6,), 4, {"hidden": 5}),
    "cnn": Form("cnn", PIXELS, 3, {"channels": 2}),
    "least-squares": Form("least-squares", (6,), 3, {"norm": 2.0}),
    "least-squares-number": Form(
        "least-squares", (6,), 1, {"norm": 2.0}, target=Regression("squared", -1.0, 1.0)
    ),
    "line": Form("softmax", (6,), 1, target=Regression("squared", -1.0, 1.0)),
    "mlp-number": Form("mlp", (6,), 1, {"hidden": 5}, target=Regression("huber", -1.0, 1.0)),
}
MODELS = (*FORMS, *OWN)
EVERY = (*MODELS, *(["torch"] if find_spec("torch") else []))  # torch is an extra

WEIGHTS = ("normal", "zero", "tiny", "huge", "largest", "trap", "mixed")
ROWS = ("normal", "equal", "zero", "large", "vast", "denormal", "mixed", "not finite")


@cache
def device_of(name):
    """A model of a client's own as its device sees it; torch is loaded for its own only."""
    if name != "torch":
        return as_device(OWN[name], shape=(6,), classes=2)
    import torch

    from sottovoce.models.torch_model import TorchModel

    def net():
        return torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.ReLU(), torch.nn.Linear(5, 3))

    return as_device(TorchModel(net), shape=(6,), classes=3)


def form_of(name):
    return FORMS[name] if name in FORMS else device_of(name).form


def own_of(name):
    return None if name in FORMS else device_of(name).own_model


def shapes_of(name):
    return FORMS[name].shapes() if name in FORMS else device_of(name).own_model.shapes()


def classes_of(name):
    return form_of(name).classes


def labels(name, n, rng, odd=0.0):
    """Labels of a model: classes, or numbers, of which a share is odd."""
    if form_of(name).target is None:
        return rng.integers(0, classes_of(name), n)
    factor = np.where(rng.random(n) < odd, rng.choice([np.nan, np.inf, -1e300, 1e30], n), 1.0)
    return rng.uniform(-1, 1, n) * factor


def weights(name, kind, rng):
    """A model as a hostile server might send it: float32 values, as float64."""
    scales = {"normal": 1, "tiny": 1e-30, "huge": 1e20, "largest": 3e38, "zero": 0, "trap": 1}
    arrays = {}
    for leaf, shape in shapes_of(name).items():
        drawn = rng.standard_normal(shape)
        if kind == "mixed":
            values = drawn * 10.0 ** rng.integers(-38, 38, shape)
        elif kind == "trap" and drawn.ndim >= 2:  # a layer that lets one number through, amplified
            values = np.zeros(shape)
            values.reshape(-1)[rng.integers(values.size)] = 1e6
        elif kind == "largest":
            values = np.sign(drawn) * scales[kind]
        else:
            values = drawn * scales[kind]
        with np.errstate(over="ignore"):
            cut = np.clip(values, -3.4e38, 3.4e38).astype(np.float32)
        arrays[leaf] = np.asarray(cut, np.float64)
    return arrays


def rows(kind, n, rng):
    """Samples of a kind; a data set may hold anything that float64 can."""
    x = rng.standard_normal((n, 6))
    match kind:
        case "equal":
            return np.tile(x[:1], (n, 1))
        case "zero":
            return np.zeros((n, 6))
        case "large":
            return x * 1e6
        case "vast":
            return np.sign(x) * 1e300
        case "denormal":
            return np.sign(x) * 5e-324 * rng.integers(0, 3, (n, 6))
        case "mixed":
            return x * 10.0 ** rng.integers(-300, 300, (n, 6))
        case "not finite":
            odd = rng.choice([np.nan, np.inf, -np.inf, 1e308, 0.0], (n, 6))
            return np.where(rng.random((n, 6)) < 0.5, odd, x)
    return x


def units(name, params, x, y, clip, class_weights=None, rows_per_person=0):
    """Σ q_m in grid units."""
    count = sum(leaf.size for leaf in params.values())
    form = replace(form_of(name), rows_per_person=rows_per_person)
    return grid.clipped_sum(
        base.gradient_blocks(form, params, x, y, own_of(name)),
        clip,
        count,
        None if class_weights is None else class_weights[y],
    )


def people(kind, n, classes, rng, most=3):
    """Persons with one to five rows of a kind, as samples of at most three; 0 classes: numbers."""
    person = np.repeat(np.arange(n), rng.integers(1, 6, n))
    y = rng.integers(0, classes, len(person)) if classes else rng.uniform(-1, 1, len(person))
    return join_persons(rows(kind, len(person), rng), y, person, most)


def squared(difference):
    """‖·‖² in Python's integers: nothing is rounded."""
    return sum(int(number) ** 2 for number in np.asarray(difference).reshape(-1))


def reach(difference, change):
    """‖·‖/Δ for reading, from exact integers."""
    return isqrt(squared(difference) << 64) / 2**32 / change


@dataclass(frozen=True)
class Case:
    """What is drawn for one pair of neighbours."""

    name: str
    seed: int
    samples: int
    weights: str
    rows: tuple[str, str]
    clip: float
    unit: str

    def play(self):
        """The change of the sum between neighbours, and the Δ that bounds it."""
        rng = np.random.default_rng(self.seed)
        params = weights(self.name, self.weights, rng)
        n, classes = self.samples, classes_of(self.name)
        if self.unit == "person":
            number = form_of(self.name).target is not None
            x, other = (people(kind, n, 0 if number else classes, rng) for kind in self.rows)
            who = int(rng.integers(n))
            other[np.arange(n) != who] = x[np.arange(n) != who]
            sums = [
                units(self.name, params, people_of, np.zeros(n, int), self.clip, rows_per_person=3)
                for people_of in (x, other)
            ]
            return sums[0] - sums[1], grid.grid_sensitivity("person", n)
        x, y = rows(self.rows[0], n, rng), labels(self.name, n, rng, odd=0.1)
        other_x, other_y = x.copy(), y.copy()
        which = slice(None) if self.unit == "client" else slice(int(rng.integers(n)), None)
        if self.unit == "record":
            which = slice(which.start, which.start + 1)
        drawn = rows(self.rows[1], n, rng)
        if self.rows[1] != "normal" and rng.random() < 0.2:
            drawn = -x  # opposite gradients, where the model is odd
        other_x[which], other_y[which] = drawn[which], labels(self.name, n, rng, odd=0.1)[which]
        weighted = classes > 1 and rng.random() < 0.5
        by_class = 10.0 ** -rng.uniform(0, 6, classes) if weighted else None
        if by_class is not None:
            by_class[rng.integers(classes)] = 1.0
        one = units(self.name, params, x, y, self.clip, by_class)
        other = units(self.name, params, other_x, other_y, self.clip, by_class)
        return one - other, grid.grid_sensitivity(self.unit, n)


def furthest(name, n, unit):
    """A pair made to reach Δ: two classes told apart by nothing, and their labels exchanged."""
    rng = np.random.default_rng(7)
    params = {leaf: np.zeros(shape) for leaf, shape in shapes_of(name).items()}
    if name == "softmax":
        params["b"][2:] = -1e4
    if name in ("mlp", "mlp-number"):
        params["b2"][2:], params["b1"][:] = -1e4, 1.0
    if name == "cnn":
        params["b"][2:], params["bias"][:] = -1e4, 1.0
    if name == "own":
        params["s"], params["c"][:] = np.array(0.5), 1e-3
        params["a"] += 0.1
    if name == "torch":
        params["2.bias"][2:], params["0.bias"][:] = -1e4, 1.0
    if name == "own-conv":
        params["b"][:], params["bias"][:] = 0.5, 1.0
    x, y = np.tile(np.abs(rng.standard_normal(6)), (n, 1)), np.zeros(n, dtype=int)
    if classes_of(name) == 1:
        y = np.full(n, -1.0)
    other = y.copy()
    other[: n if unit == "client" else 1] = 1
    one, two = (units(name, params, x, answers, 0.01) for answers in (y, other))
    return one - two, grid.grid_sensitivity(unit, n)


@st.composite
def cases(draw, name):
    """One pair of neighbours of a model."""
    return Case(
        name=name,
        seed=draw(st.integers(0, 2**32 - 1)),
        samples=draw(st.sampled_from(SAMPLES)),
        weights=draw(st.sampled_from(WEIGHTS)),
        rows=(draw(st.sampled_from(ROWS)), draw(st.sampled_from(ROWS))),
        clip=10.0 ** draw(st.floats(-15, 15)),
        unit=draw(st.sampled_from(["record", "person", "client"])),
    )


def falsify(name, pairs):
    """Try to exceed Δ so many times; how far each pair went, as a part of Δ."""
    moved = []

    @settings(max_examples=pairs, deadline=None, derandomize=True, database=None)
    @given(cases(name))
    def holds(case):
        difference, change = case.play()
        assert squared(difference) <= change**2, case
        moved.append(reach(difference, change))

    holds()
    return moved


class _Counted:
    """numpy as a module sees it; every call of a function is noted with its arrays' shapes."""

    def __init__(self, noted):
        self._noted = noted

    def __getattr__(self, name):
        thing = getattr(np, name)
        if isinstance(thing, type) or not callable(thing):
            return thing

        def call(*args, **options):
            self._noted[name, *(a.shape for a in args if isinstance(a, np.ndarray))] += 1
            return thing(*args, **options)

        return call


def work(call, modules=(grid, base, svm, softmax, mlp, person, release)):
    """What a call does, counted: lines of these modules, numpy's functions and their arrays.

    Two data sets of one size must cost the same; seconds are not looked at.
    """
    noted, before = Counter(), sys.gettrace()
    files = {module.__file__ for module in modules}

    def lines(frame, event, _argument):
        if frame.f_code.co_filename not in files:
            return None
        noted[frame.f_code.co_filename, frame.f_lineno, event] += 1
        return lines

    for module in modules:
        module.np = _Counted(noted)
    sys.settrace(lines)
    try:
        call()
    finally:
        sys.settrace(before)
        for module in modules:
            module.np = np
    return noted
