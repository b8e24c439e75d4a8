"""What a hostile server may send, kind by kind, each with a name of its own."""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from sottovoce.client import messages
from sottovoce.client.messages import Request
from sottovoce.models.base import Form, Regression
from sottovoce.privacy.sensitivity import Recipe
from support.devices import ask, model, opened, sealed, written

TEXT, BODY = opened(ask().to_blob())
GONE = object()


def head(path: str, value: Any, form: str = "mlp") -> bytes:
    """An honest request with one place of its head changed, or taken away."""
    text, body = opened(ask(form).to_blob())
    *way, last = path.split(".")
    place = text["head"]
    for name in way:
        place = place[name]
    if value is GONE:
        del place[last]
    else:
        place[last] = value
    return written(text, body)


def each(path: str, *values: Any, form: str = "mlp") -> dict[str, bytes]:
    """The same with each of these values, by a name of its own."""
    return {f"{path} {value!r}": head(path, value, form) for value in values}


def arrays(**changed: Any) -> bytes:
    """An honest request with other arrays; None takes one away."""
    leaves = {**model(), **changed}
    return ask(params={k: v for k, v in leaves.items() if v is not None}).to_blob()


def shaped(name: str, shape: tuple[int, ...], form: str = "mlp") -> bytes:
    """An honest request, one array of which has another shape."""
    return ask(form, params={**model(form), name: np.zeros(shape, np.float32)}).to_blob()


def filled(name: str, value: float) -> bytes:
    """An honest request, one number of which is another."""
    leaf = model()[name]
    leaf.flat[-1] = value
    return arrays(**{name: leaf})


MALFORMED: dict[str, bytes] = {
    # bytes
    "nothing": b"",
    "one byte": b"s",
    "the magic alone": messages.MAGIC,
    "an answer's magic": b"sottovoce/2\n" + ask().to_blob()[12:],
    "cut by one": ask().to_blob()[:-1],
    "cut in half": ask().to_blob()[: len(ask().to_blob()) // 2],
    "one byte more": ask().to_blob() + b"\0",
    "two requests": ask().to_blob() * 2,
    "a pickle": b"\x80\x04\x95\x0b\x00\x00\x00\x00\x00\x00\x00\x8c\x05posix\x94.",
    "zeros": bytes(4096),
    "no JSON": sealed(b"{"),
    "deep JSON": sealed(b"[" * 200_000),
    "deep JSON in the model": sealed(
        json.dumps(TEXT).encode().replace(b'"svm"', b"[" * 9999 + b"]" * 9999) + b"[" * 99_999
    ),
    "keys twice": sealed(
        json.dumps(TEXT, sort_keys=True, separators=(",", ":"))
        .encode()
        .replace(b'"horizon":8', b'"horizon":8,"horizon":1'),
        BODY,
    ),
    "an answer": messages.make_refusal("empty", "nothing left"),
    # the whole head
    **{f"without {key}": head(key, GONE) for key in TEXT["head"]},
    **{
        f"{key} null": head(key, None)
        for key in TEXT["head"]
        if key not in ("loss_bound", "receipt")
    },
    "one key more": head("seed", 1),
    "σ asked for": head("round.sigma", 0.0),
    "no noise asked for": head("local.noise", "none"),
    "a budget": head("terms.epsilon", 1e9),
    "another schema": head("schema", "sottovoce.request/9"),
    "the schema of an answer": head("schema", messages.ANSWER),
    "a schema that is a list": head("schema", [messages.REQUEST]),
    # run and server
    "a run in capitals": head("run", "0BADC0DE"),
    "a short run": head("run", "abc"),
    "a long run": head("run", "a" * 65),
    "a run that is a path": head("run", "../../etc/passwd"),
    "a run that is SQL": head("run", "0'; DROP TABLE entries; --"),
    "a run with a newline": head("run", "0badc0de\n"),
    "a run with NUL": head("run", "0badc0de\0"),
    "a run in other digits": head("run", "٠١٢٣٤٥٦٧"),
    "a run that is a number": head("run", 12345678),
    "a run that is a list": head("run", ["0badc0de"]),
    "a server with a newline": head("server", "s\nERROR forged line"),
    "a server with an escape": head("server", "\x1b[2J"),
    "a long server": head("server", "s" * 81),
    "a server in surrogates": head("server", "\ud800"),
    "a server that is an object": head("server", {"name": "s"}),
    # numbers of the round
    **each("round.t", -1, 8, 9, True, 0.0, "0", None, [], 2**64),
    **each("round.horizon", 0, -8, True, 8.0, "8", None, 10**9 + 1, 2**63, 10**400),
    **each("round.spread", 0, -1, True, 1.5, "1", 10**10),
    **each("round.scale", True, "1", None, [1], 10**301, -1e301),
    "scale NaN": sealed(
        json.dumps(TEXT, sort_keys=True, separators=(",", ":"))
        .encode()
        .replace(b'"scale":1.0', b'"scale":NaN'),
        BODY,
    ),
    # terms
    **each("terms.clients", 0, -3, True, 3.0, None, 10**10),
    **each("terms.per_round", 0, 4, False, 1.0, "3"),
    **each("terms.cohort", "all", None, [], {}, ["balanced"], 1),
    # the recipe
    **each("local.learning_rate", 0, 0.0, -1.0, 1e16, 1e-16, True, "1", None, [1.0], 10**400),
    **each("local.clip", 0.0, -1.0, 1e16, 1e-16, True, "1", None, "median"),
    **each("local.steps", 0, -1, True, 1.0, "2", None, 10**10),
    **each(
        "local.class_weights",
        [1.0, 1.0, 1.0000001],
        [2, 1, 1],
        [1.0, 0.0, 1.0],
        [1.0, -1.0, 1.0],
        [1.0, 1e-7, 1.0],
        [1.0, 1.0],
        [1.0] * 4,
        [],
        None,
        True,
        "balanced",
        [True, 1.0, 1.0],
        [None, 1.0, 1.0],
        [10**400, 1.0, 1.0],
        [[1.0], 1.0, 1.0],
        {"0": 1.0},
    ),
    **each("local.unit", "user", "", None, [], {}, 1, "Record"),
    # the model
    "a model that is a text": head("model", "mlp"),
    "a model that is a list": head("model", ["mlp"]),
    **each("model.name", "vgg", "", None, [], {}, 1, "MLP"),
    "svm with an mlp's keys": head("model.name", "svm"),
    "a model with code": head("model.code", "import os"),
    "a model without classes": head("model.classes", GONE),
    **each("model.hidden", 0, -3, 3.0, True, "3", None, 2**30, 2**31, 10**30),
    **each(
        "model.shape",
        [],
        [0],
        [-4],
        [4.0],
        [True],
        ["4"],
        4,
        None,
        [[4]],
        [1] * 5,
        [2**30, 2**30],
        [4, 2**31],
    ),
    **each("model.classes", 1, 0, 3.0, True, None, 2**31),
    **each(
        "model.target",
        None,
        True,
        [],
        ["squared", 0.0, 1.0],
        ["own", 0.0, 1.0],
        {"loss": "squared"},
    ),
    **{
        f"a number with target {target!r}": head(
            "model", {"name": "softmax", "shape": [4], "classes": 1, "target": target}
        )
        for target in (
            ["squared", 1.0, 0.0],
            ["squared", 0.0, 0.0],
            ["squared", 0.0],
            ["hinge", 0.0, 1.0],
            [["squared"], 0.0, 1.0],
            ["squared", "0", 1.0],
            ["squared", True, 9.0],
            ["squared", 0.0, 10**400],
        )
    },
    "a number of an svm": head(
        "model",
        {"name": "svm", "shape": [4], "classes": 1, "kappa": 0.0, "target": ["squared", 0, 1]},
    ),
    "an svm of three classes": head("model.classes", 3, "svm"),
    **each("model.kappa", -0.1, 1e7, "0", None, True, [0], 10**400, form="svm"),
    "a flat cnn": head("model", {"name": "cnn", "shape": [4], "classes": 3, "channels": 2}),
    "a deep cnn": head(
        "model", {"name": "cnn", "shape": [1, 2, 2, 1], "classes": 3, "channels": 2}
    ),
    "a cnn as large as the sea": head(
        "model", {"name": "cnn", "shape": [2, 2, 1], "classes": 3, "channels": 2**30}
    ),
    "a cnn with an mlp's arrays": head(
        "model", {"name": "cnn", "shape": [2, 2, 1], "classes": 3, "channels": 2}
    ),
    # the loss
    **each("loss_bound", 0, -1.0, 1e7, 1e-7, True, "1", [], {}, 10**400, 1e300),
    # arrays
    "no arrays": ask(params={}).to_blob(),
    **{f"without {name}": arrays(**{name: None}) for name in model()},
    "one array more": arrays(w3=np.zeros(1, np.float32)),
    "one empty array more": arrays(w3=np.zeros(0, np.float32)),
    "a name in capitals": arrays(w1=None, W1=model()["w1"]),
    "a name that is a path": arrays(**{"w1": None, "../w1": model()["w1"]}),
    "the svm's arrays": ask(params=model("svm")).to_blob(),
    "two arrays swapped": arrays(b1=model()["b2"], w1=model()["w1"].T),
    "an array turned": arrays(w1=model()["w1"].T),
    "an array flattened": arrays(w1=model()["w1"].ravel()),
    "a bias that broadcasts": shaped("b1", (1,)),
    "a bias of two dimensions": shaped("b1", (1, 3)),
    "a bias without dimensions": shaped("b1", ()),
    "weights that broadcast": shaped("w1", (1, 3)),
    "weights without rows": shaped("w1", (0, 3)),
    "more hidden than said": shaped("w2", (4, 3)),
    **{
        f"{value!r} in {name}": filled(name, value)
        for name in model()
        for value in (np.nan, np.inf, -np.inf)
    },
    # receipts
    **each(
        "receipt",
        [],
        "00",
        1,
        True,
        {},
        {"vault": "ab", "seq": 1},
        {"vault": "ab", "seq": True, "hash": "cd"},
        {"vault": "ab", "seq": -1, "hash": "cd"},
        {"vault": "ab", "seq": 2**53, "hash": "cd"},
        {"vault": "ab", "seq": 1.0, "hash": "cd"},
        {"vault": "AB", "seq": 1, "hash": "cd"},
        {"vault": "ab", "seq": 1, "hash": ""},
        {"vault": "ab", "seq": 1, "hash": "cd", "spent": 0},
        {"vault": ["ab"], "seq": 1, "hash": "cd"},
    ),
}

NOT_ALLOWED: dict[str, bytes] = {
    "a larger clip": ask(recipe=Recipe(1.0, 1.0000001)).to_blob(),
    "the largest clip": ask(recipe=Recipe(1.0, 1e14)).to_blob(),
    "a million rounds": ask(horizon=10**6).to_blob(),
    "a late round of a million": ask(t=999_999, horizon=10**6).to_blob(),
    "one round too many": ask(horizon=1001).to_blob(),
    "one step too many": ask(recipe=Recipe(1.0, 1.0, steps=17)).to_blob(),
    "a million steps": ask(recipe=Recipe(1.0, 1.0, steps=10**6)).to_blob(),
    "a billion steps": ask(recipe=Recipe(1.0, 1.0, steps=10**9)).to_blob(),
    "more features": ask(form=Form("mlp", (5,), 3, {"hidden": 3}), params={}).to_blob(),
    "a number where there are classes": ask(
        form=Form("mlp", (4,), 1, {"hidden": 3}, target=Regression("squared", 0.0, 1.0)), params={}
    ).to_blob(),
    "more classes": ask(form=Form("mlp", (4,), 4, {"hidden": 3}), params={}).to_blob(),
    "the features of another shape": ask(form=Form("mlp", (4, 2), 3, {"hidden": 3})).to_blob(),
    "an svm where there are three classes": ask("svm").to_blob(),
    "a model of the client's own": ask("own", params=model("own")).to_blob(),
    "a cnn of odd sizes": ask(
        form=Form("cnn", (3, 5, 7), 3, {"channels": 2}), params=model("cnn")
    ).to_blob(),
}


def trap(form: str, value: float) -> dict[str, Any]:
    """Weights so large that hardly any sample but one moves the model."""
    leaves = model(form, value, seed=5)
    for name in ("b", "b1"):
        if name in leaves:
            leaves[name] = np.full_like(leaves[name], -abs(value))
    return leaves


UNIT_CLIENT = Recipe(1.0, 1.0, unit="client")
# What may be answered, and how: an upload with the client's own noise, or a refusal.
ANSWERED: dict[str, tuple[str, Request]] = {
    "one round only": ("upload", ask(horizon=1)),
    "noise of a millionth": ("empty", ask(scale=1e-6, spread=1)),
    "noise of a tenth": ("empty", ask(scale=0.1, spread=1)),
    "noise of one round": ("upload", ask(spread=1)),
    "scale 0": ("upload", ask(scale=0.0, spread=1)),
    "scale below 0": ("upload", ask(scale=-1.0, spread=1)),
    "scale 1e299": ("upload", ask(scale=1e299, spread=1)),
    "scale 1e6": ("upload", ask(scale=1e6, spread=1)),
    "spread of a billion": ("upload", ask(spread=10**9)),
    "spread of a billion, scale 1e6": ("empty", ask(scale=1e6, spread=10**9)),
    "a billion clients": ("upload", ask(clients=10**9, per_round=1, horizon=1000)),
    "a billion clients at random": (
        "upload",
        ask(clients=10**9, per_round=1, cohort="random", horizon=1000),
    ),
    "the last of a thousand rounds": ("upload", ask(t=999, horizon=1000)),
    "a smaller clip": ("upload", ask(recipe=Recipe(1.0, 0.1))),
    "the smallest clip": ("upload", ask(recipe=Recipe(1.0, 1e-15))),
    "the largest rate": ("upload", ask(recipe=Recipe(1e14, 1.0))),
    "the smallest rate": ("upload", ask(recipe=Recipe(1e-15, 1.0))),
    "a wider unit": ("upload", ask(recipe=UNIT_CLIENT)),
    "class weights": ("upload", ask(recipe=Recipe(1.0, 1.0, class_weights=(1e-6, 0.5, 1.0)))),
    "three steps": ("upload", ask(recipe=Recipe(1.0, 1.0, steps=3))),
    "three steps in one round": ("upload", ask(horizon=1, recipe=Recipe(1.0, 1.0, steps=3))),
    "steps at the largest rate": ("upload", ask(recipe=Recipe(1e14, 1.0, steps=16))),
    "as many steps as allowed": ("upload", ask(horizon=1, recipe=Recipe(1.0, 1.0, steps=16))),
    "the smallest loss bound": ("upload", ask(loss_bound=1e-6)),
    "the largest loss bound": ("upload", ask(loss_bound=1e6)),
    "a loss in one round": ("upload", ask(horizon=1, loss_bound=1.0)),
    "a loss of a client": ("upload", ask(recipe=UNIT_CLIENT, loss_bound=2)),
    "a loss and steps": ("upload", ask(loss_bound=3.0, recipe=Recipe(1.0, 1.0, steps=2))),
    "trap weights": ("upload", ask(params=trap("mlp", 1e4))),
    "the largest weights": ("upload", ask(params=trap("mlp", 1e38), loss_bound=1.0)),
    "denormal weights": ("upload", ask(params=model("mlp", 1e-44))),
    "a zero model": ("upload", ask(params=model("mlp", 0.0))),
    "the samples in another shape": ("upload", ask(form=Form("mlp", (2, 2, 1), 3, {"hidden": 3}))),
}
