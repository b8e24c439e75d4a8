"""Requests with anything anywhere in their heads, and a right checksum."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from sottovoce.client import device
from support.devices import ask, books_hold, kind, make_node, opened, written

ANYTHING: list[Any] = [
    *(None, True, False, 0, 1, -1, 2, 3, 4, 8, 2**31, 2**53, 2**63, -(2**63), 10**30, 10**400),
    *(0.0, -0.0, 0.5, 1.0, 1e-300, 5e-324, 1e300, -1e300, 1e-6, 1e6),
    *("", "0badc0de", "mlp", "svm", "cnn", "own", "record", "client", "random", "\0", "x" * 999),
    *([], [[]], [4], [2, 2, 1], [0], {}, {"name": "svm"}, {"": {}}, [None] * 50),
]


def heads_with_anything(folder: Path, count: int, seed: int) -> Counter[str]:
    """One client, so many requests with up to three places changed; the books hold throughout."""
    rng, said, node = np.random.default_rng(seed), Counter[str](), None
    for number in range(count):
        if node is None or said["upload"] % 8 == 7:
            node = make_node(folder / str(number))
        text, body = opened(ask(t=number % 8).to_blob())
        for _ in range(rng.integers(1, 4)):
            place = text["head"]
            while True:
                name = str(rng.choice(sorted(place)))
                if not isinstance(place[name], dict) or not place[name] or rng.random() < 0.1:
                    break
                place = place[name]
            if rng.random() < 0.1:
                del place[name]
                if not place:
                    break
            else:
                place[name] = ANYTHING[rng.integers(len(ANYTHING))]
        before = books_hold(node).spent
        answer = kind(device.answer_request(written(text, body), node))
        assert answer not in ("internal", "data"), text
        paid = books_hold(node).spent - before
        assert (paid > 0) <= (answer == "upload")
        said[answer] += 1
    return said
