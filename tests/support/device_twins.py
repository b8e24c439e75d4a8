"""Two clients whose samples differ where it must not show, run with the same frozen randomness.

What leaves a client may depend on its samples through the noised sums alone. So: two neighbouring
data sets with equal clipped sums, every source of randomness frozen to the same values, the same
requests; every byte that leaves must be equal.

The hash of a ledger's line leaves as a receipt. It covers the fingerprint of the records, and a
salt that hides it. `frozen` replaces the hash by an ideal one: of a line with a salt it depends on
the salt alone (nobody can tell the two apart without the salt), of one without it on all of it.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import os
import types
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sottovoce.client import device
from sottovoce.client.messages import Request
from sottovoce.client.vault import chain
from sottovoce.models import base
from sottovoce.privacy import grid, secure_noise
from sottovoce.privacy.sensitivity import Recipe
from support import devices
from support.devices import FORMS, Rows, ask, make_node, memory, model, rows

BOUND = 2.0  # of the losses
WAYS = ("order", "useless", "margin")  # in which two data sets differ without showing it


@contextmanager
def frozen(seed: int) -> Iterator[None]:
    """The same noise, salts and ids in the same order, as often as this is entered."""
    _load_code()
    rng = np.random.default_rng(seed)

    def draw(count: int, sigma: int) -> Any:
        return np.rint(rng.normal(size=count) * sigma).astype(np.int64)

    def urandom(count: int) -> bytes:
        return rng.bytes(count)

    def token_hex(count: int) -> str:
        return rng.bytes(count).hex()

    ideal = types.SimpleNamespace(sha256=_ideal, file_digest=hashlib.file_digest)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(secure_noise, "draw", draw)
        patch.setattr(os, "urandom", urandom)
        patch.setattr("secrets.token_hex", token_hex)
        patch.setattr(chain, "hashlib", ideal)
        yield


@functools.cache
def _load_code() -> None:
    """Answer once with nothing frozen: what is imported then may draw from the system's entropy."""
    with memory() as folder:
        node = make_node(folder, rows(0, 2), classes=2)
        device.make_greeting(node)
        device.answer_request(ask("svm", params=model("svm")).to_blob(), node)


def _ideal(text: bytes) -> Any:
    """Hash a line of a ledger so that a salted payload shows nothing, all else as it is."""
    if not text.startswith(chain._VERSION.encode()):
        return hashlib.sha256(text)
    payload = json.loads(text.decode().splitlines()[-1])
    salt = payload.get("salt", "")
    return hashlib.sha256(salt.encode() if len(salt) == 64 else text)


def sums(form: str, x: Any, y: Any, request: Request) -> tuple[bytes, int]:
    """The two noiseless sums that a release is made of."""
    params = {name: leaf.astype(np.float64) for name, leaf in request.params.items()}
    own = devices.LINE if form == "own" else None
    count = sum(leaf.size for leaf in params.values())
    each = base.sample_losses(request.form, params, x, y, own)
    blocks = base.gradient_blocks(request.form, params, x, y, own)
    total = grid.clipped_sum(blocks, request.recipe.clip, count)
    return total.tobytes(), grid.bounded_sum(each, BOUND)


def neighbours(form: str, seed: int, way: str) -> tuple[Rows, Rows, dict[str, Any]]:
    """Data sets that differ in one record, or in order, and a model at which no sum shows it."""
    params = model(form, 0.5, seed=seed)
    asked = ask(form, params=params)
    for attempt in itertools.count():
        one, other = _drawn(form, np.random.default_rng([seed, attempt]), params, way)
        if sums(form, *one, asked) == sums(form, *other, asked):
            return one, other, params
    raise AssertionError


def _drawn(
    form: str, rng: np.random.Generator, params: dict[str, Any], way: str
) -> tuple[Rows, Rows]:
    x, y = rows(int(rng.integers(2**32)), FORMS[form].classes)
    x2, y2, place = x.copy(), y.copy(), int(rng.integers(len(y)))
    if way == "order":
        order = rng.permutation(len(y))
        x2, y2 = x[order], y[order]
    elif way == "useless":  # gradients that are not finite, in different ways
        first, second = rng.permutation([np.nan, np.inf, -np.inf, 1e308])[:2]
        x[place], x2[place] = first, second
        y2[place] = rng.integers(FORMS[form].classes)
    else:  # both right by a wide margin: the hinge has no slope there
        far = params["w"] / np.sum(params["w"] ** 2)
        for data, labels, label in ((x, y, 0), (x2, y2, 1)):
            labels[place] = label
            data[place] = far * (2 * label - 1) * rng.uniform(50, 500)
    return (x, y), (x2, y2)


def conversation(form: str, params: dict[str, Any], seed: int, steps: int) -> list[bytes]:
    """What a server says: some rounds, some nonsense, some of it twice."""
    rng = np.random.default_rng([seed, 2])
    horizon = int(rng.integers(2, 9))
    recipe = Recipe(1.0, float(rng.choice([1.0, 0.3])), steps=steps)
    bound = BOUND if seed % 5 == 0 else None
    said = [
        ask(form, t=t, horizon=horizon, params=params, recipe=recipe, loss_bound=bound)
        for t in (0, 0, 1)
    ]
    said += [ask(form, t=1, horizon=9, params=params), ask(form, t=2, horizon=1001, params=params)]
    blobs = [request.to_blob() for request in said]
    return [*blobs, blobs[0][:-1], ask(form, t=3, spread=1, scale=1e-6).to_blob()]


def spoken(
    folder: Path,
    form: str,
    data: Rows,
    said: list[bytes],
    seed: int,
    own: str = "support.devices:LINE",
) -> list[bytes]:
    """All that leaves one of the two clients: its greeting, and an answer to everything said."""
    with frozen(seed):
        named = own if form == "own" else None
        node = make_node(folder, data, classes=FORMS[form].classes, own=named)
        return [device.make_greeting(node), *(device.answer_request(blob, node) for blob in said)]


def pair(
    folder: Path, form: str, seed: int, own: str = "support.devices:LINE", way: str | None = None
) -> tuple[list[bytes], list[bytes]]:
    """What leaves two clients with equal sums."""
    way = way or WAYS[seed % (3 if form == "svm" else 2)]
    one, other, params = neighbours(form, seed, way)
    # A second step begins at a noised model, where sums of other records need not be equal.
    said = conversation(form, params, seed, steps=2 if way == "order" else 1)
    return (
        spoken(folder / "one", form, one, said, seed, own),
        spoken(folder / "other", form, other, said, seed, own),
    )
