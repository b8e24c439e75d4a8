"""A federation in one process: real nodes with real vaults; the transport is a function call.

`Direct` carries every message faithfully; `on_hello` and `on_answer` let a test lose, delay, repeat
or change what passes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from sottovoce import Plan
from sottovoce.client import device
from sottovoce.client.node import Node
from sottovoce.data.federated import Holdings, Samples
from support.devices import make_node

FEATURES, CLASSES, HIDDEN = 30, 3, 8
CENTRES = np.random.default_rng(0).normal(size=(CLASSES, FEATURES))


def draw(n: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows around three centres, which an mlp learns in a few rounds."""
    rng = np.random.default_rng(seed)
    y = rng.integers(0, CLASSES, n)
    return CENTRES[y] + rng.normal(size=(n, FEATURES)), y


def plan(**changes: Any) -> Plan:
    """A plan for these clients: few rounds, all of them asked."""
    own = {
        "data.name": "arrays",
        "data.clients": 3,
        "data.validation": 60,
        "data.test": 60,
        "model.hidden": HIDDEN,
        "local.learning_rate": 1.0,
        "rounds.schedule": "fixed",
        "rounds.rounds": 4,
    }
    return Plan().replace(**{**own, **changes})


def public() -> Holdings:
    """What the server holds: validation and test rows, and no client's."""
    valid, test = (
        Samples(x.astype(np.float32), y.astype(np.int32)) for x, y in (draw(60, 1), draw(60, 2))
    )
    none = Samples(valid.x[:0], valid.y[:0])
    return Holdings(np.zeros(0, np.int64), none, valid, test, None, (FEATURES,), CLASSES)


def clients(folder: Path, count: int = 3, samples: int = 40, **policy: Any) -> dict[str, Node]:
    """So many nodes, each with rows and a vault of its own, by route."""
    return {
        f"route-{i}": make_node(
            folder, draw(samples, 100 + i), classes=CLASSES, name=f"client-{i}", **policy
        )
        for i in range(count)
    }


class Direct:
    """A transport within one process; every route is announced once."""

    def __init__(self, nodes: Mapping[str, Node]) -> None:
        self.nodes, self.greeted, self.keys = dict(nodes), set[str](), dict[str, str]()
        self.asked: list[list[str]] = []  # routes, ask by ask
        self.requests: list[dict[str, bytes]] = []
        self.seconds: list[float] = []  # what each ask was given
        self.on_answer: Callable[[str, bytes, bytes], bytes | None] = lambda r, q, a: a
        self.answer = device.answer_request
        self.on_hello: Callable[[str, bytes], bytes | None] = lambda r, h: h

    def greet(self, seconds: float) -> dict[str, bytes]:
        """Everyone that has not greeted yet."""
        new = [route for route in self.nodes if route not in self.greeted]
        self.greeted |= set(new)
        told = {
            route: self.on_hello(route, device.make_greeting(self.nodes[route])) for route in new
        }
        return {route: blob for route, blob in told.items() if blob is not None}

    def key(self, route: str) -> str | None:
        """Nobody is authenticated, unless a test says so."""
        return self.keys.get(route)

    def ask(self, requests: Mapping[str, bytes], seconds: float) -> dict[str, bytes]:
        """Every node answers, and `on_answer` has the last word."""
        self.asked.append(sorted(requests))
        self.requests.append(dict(requests))
        self.seconds.append(seconds)
        told = {
            route: self.on_answer(route, blob, self.answer(blob, self.nodes[route]))
            for route, blob in requests.items()
        }
        return {route: blob for route, blob in told.items() if blob is not None}


class Six:
    """A model of a client's own, with six arrays of up to four dimensions."""

    def shapes(self):
        return {"b": (3,), "c": (5,), "d": (2, 3), "e": (2, 2, 3), "f": (2, 1, 4, 2), "w": (30, 3)}

    def gradients(self, params, x, y):
        error = x @ params["w"] + params["b"] - np.eye(CLASSES)[y]
        none = {n: np.zeros((len(y), *s)) for n, s in self.shapes().items()}
        return {**none, "b": error, "w": x[:, :, None] * error[:, None, :]}

    def losses(self, params, x, y):
        return np.zeros(len(y))


SIX = Six()
