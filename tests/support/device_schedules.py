"""A server that plays every trick of a schedule at random, and what its client's answers must be.

It asks in any order, again, late and of several runs at once, changes horizon, noise scale, steps,
clip, cohort and signal at will. `play` holds every answer against a second, plain set of books.
"""

from __future__ import annotations

import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from sottovoce.client import device
from sottovoce.client.messages import Receipt, Request
from sottovoce.client.node import Node
from sottovoce.privacy.sensitivity import Recipe
from sottovoce.privacy.tank import FULL
from support.devices import ask, books_hold, digest, kind, make_node, model, rows, told

RUNS = ("0000aaaa", "0000bbbb", "0000cccc")


def play_all(folder: Path, seeds: range) -> Counter[str]:
    """Many schedules, each with clients of its own."""
    said = Counter[str]()
    for seed in seeds:
        said += play(folder / str(seed), seed)
        shutil.rmtree(folder / str(seed))
    return said


def play(folder: Path, seed: int, length: int = 12) -> Counter[str]:
    """One schedule against two clients with other samples and the same terms; what was answered."""
    rng = np.random.default_rng(seed)
    policy = {
        "epsilon": float(rng.choice([1.0, 8.0])),
        "unit": str(rng.choice(["record", "client"])),
        "calibration": str(rng.choice(["exact", "zcdp"])),
        "max_rounds": int(rng.choice([12, 1000, 1000])),
    }
    nodes = [make_node(folder / str(k), rows(seed + k, 3), **policy) for k in (1, 2)]
    server, counted = Server(rng, policy["unit"]), Counter[str]()
    for _ in range(length):
        request = server.next()
        kinds = [server.hold(k, node, request) for k, node in enumerate(nodes)]
        assert kinds[0] == kinds[1], "the kind of an answer depends on the samples"
        counted[kinds[0]] += 1
    assert server.spent[0] == server.spent[1]
    return counted


class Server:
    """What the server remembers, and the books it would keep for its clients."""

    def __init__(self, rng: np.random.Generator, unit: str) -> None:
        self.rng, self.unit = rng, unit
        self.asked: list[Request] = []
        self.first: list[dict[tuple[str, int], tuple[str, bytes]]] = [{}, {}]
        self.spent = [0, 0]

    def next(self) -> Request:
        """A new request, an old one again, or an old round with other content."""
        trick = self.rng.random()
        if self.asked and trick < 0.3:
            return self.asked[int(self.rng.integers(len(self.asked)))]
        request = self._new()
        if self.asked and trick < 0.4:
            old = self.asked[int(self.rng.integers(len(self.asked)))]
            request = self._new(run=old.run, t=old.round.t)
        self.asked.append(request)
        return request

    def _new(self, run: str | None = None, t: int | None = None) -> Request:
        pick: Any = self.rng.choice
        t = int(self.rng.integers(0, 8)) if t is None else t
        unit = "client" if self.unit == "client" else str(pick(["record", "client"]))
        return ask(
            run=str(pick(RUNS)) if run is None else run,
            t=t,
            horizon=t + int(pick([1, 1, 2, 5, 100, 995])),
            scale=float(pick([1.0, 0.5, 0.01, 3.0])),
            spread=pick([None, None, 1, 4, 50]),
            params=model(value=float(self.rng.normal())),
            recipe=Recipe(
                float(pick([1.0, 0.1])),
                float(pick([1.0, 1.0, 1.0, 0.5, 0.5, 1.5])),
                unit=unit,  # type: ignore[arg-type]
                steps=int(pick([1, 1, 2, 5])),
            ),
            clients=int(pick([3, 50])),
            cohort=str(pick(["balanced", "random"])),
            loss_bound=pick([None, None, 2.0]),
        )

    def hold(self, place: int, node: Node, request: Request) -> str:
        """Ask, and hold the answer against what may be answered."""
        blob, key = request.to_blob(), (request.run, request.round.t)
        answer, books = device.answer_request(blob, node), books_hold(node)
        said, known = kind(answer), self.first[place].get(key)
        paid, self.spent[place] = books.spent - self.spent[place], books.spent
        assert paid >= 0, "a debit was taken back"
        allowed = (
            request.recipe.clip <= 1.0
            and request.round.horizon <= int(node.terms["max_rounds"])
            and request.recipe.steps <= int(node.terms["max_rounds"])
        )
        if not allowed:
            assert (said, paid) == ("policy", 0)
        elif known is not None and known[0] != request.hash():
            assert (said, paid) == ("replay", 0), "another content for an answered round"
        elif known is not None:
            assert (answer, paid) == (known[1], 0), "asked again: the same bytes, counted once"
        elif said == "upload":
            assert paid > 0
            head = told(answer)
            assert (head["run"], head["t"], head["request"]) == (*key, request.hash())
            # What left is what is stored, so it will be the same bytes again.
            assert books.answers[key] == digest(answer)
            self.first[place][key] = (request.hash(), answer)
            self._receipt(head["receipt"], node, request)
        else:
            assert (said, paid) == ("empty", 0)
        if books.spent == FULL and known is None and allowed:
            assert said in ("upload", "empty")
        return said

    def _receipt(self, receipt: dict[str, Any], node: Node, request: Request) -> None:
        """Asked again with the receipt that came with the answer: the same bytes."""
        again = Request(**{**vars(request), "receipt": Receipt.from_json(receipt)})
        assert kind(device.answer_request(again.to_blob(), node)) == "upload"
