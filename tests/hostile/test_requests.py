"""What a hostile server may send: every kind is answered, none gets more than the client's terms.

Each request goes to two clients with the same public numbers and entirely different samples. A
refusal must be the same bytes from both (nothing in it comes from samples) and book nothing. What
is answered with an upload must keep the books: `devices.books_hold`.
"""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sottovoce.client import device, messages
from sottovoce.client.messages import Receipt
from sottovoce.client.node import Node
from sottovoce.privacy.sensitivity import Recipe
from support.device_fuzz import heads_with_anything
from support.devices import (
    FORMS,
    SAMPLES,
    ask,
    books_hold,
    digest,
    kind,
    make_node,
    memory,
    rows,
    told,
)
from support.hostile_requests import ANSWERED, MALFORMED, NOT_ALLOWED, shaped, trap


@dataclass(frozen=True)
class Twin:
    """Two clients that differ in their samples only."""

    one: Node
    other: Node


def _twin(folder: Path, classes: int = 3, **policy: Any) -> Twin:
    return Twin(
        make_node(folder / "one", rows(1, classes), classes=classes, **policy),
        make_node(folder / "other", rows(2, classes), classes=classes, **policy),
    )


@pytest.fixture(scope="module")
def twins(tmp_path_factory: pytest.TempPathFactory) -> Twin:
    """Shared by all that must be refused; both have answered one round."""
    made = _twin(tmp_path_factory.mktemp("twins"))
    for node in (made.one, made.other):
        assert kind(device.answer_request(ask(run="feedface").to_blob(), node)) == "upload"
    return made


def _refused(twins: Twin, blob: bytes, code: str) -> None:
    before = [books_hold(node) for node in (twins.one, twins.other)]
    answers = [device.answer_request(blob, node) for node in (twins.one, twins.other)]
    assert kind(answers[0]) == code
    assert answers[0] == answers[1], "a refusal that depends on the samples"
    assert set(told(answers[0])) == {"schema", "kind", "code", "text"}
    text = told(answers[0])["text"]
    assert len(text) < 200
    assert "/" not in re.sub(r"\brequest/\d+", "", text)  # no path
    assert [books_hold(node) for node in (twins.one, twins.other)] == before


@pytest.mark.parametrize("name", MALFORMED)
def test_what_is_no_request_is_called_malformed(twins, name):
    # Another version of a request is named as one, with both versions, and refused all the same.
    _refused(twins, MALFORMED[name], "version" if name == "another schema" else "malformed")


@pytest.mark.parametrize("name", NOT_ALLOWED)
def test_what_the_policy_does_not_allow_is_refused(twins, name):
    _refused(twins, NOT_ALLOWED[name], "policy")


@pytest.mark.parametrize("what", [None, 1, "text", bytearray(b"x"), [b""], object()])
def test_what_is_not_even_bytes_is_answered(twins, what):
    _refused(twins, what, "malformed")


def test_a_bias_of_one_number_is_not_a_number(tmp_path):
    _refused(_twin(tmp_path, classes=2), shaped("b", (1,), "svm"), "malformed")


def test_a_record_for_a_client_is_refused(tmp_path):
    strict = _twin(tmp_path, unit="client")
    _refused(strict, ask().to_blob(), "policy")
    assert kind(
        device.answer_request(ask(recipe=Recipe(1.0, 1.0, unit="client")).to_blob(), strict.one)
    ) == ("upload")
    books_hold(strict.one)


def _foreign(twins: Twin) -> dict[str, Receipt]:
    own = books_hold(twins.one).receipt
    return {
        "of another vault": Receipt("ab" * 16, own.seq, own.hash),
        "of the future": Receipt(own.vault, own.seq + 1, own.hash),
        "of line 0": Receipt(own.vault, 0, "0" * 64),
        "of the far future": Receipt(own.vault, 2**53 - 1, own.hash),
        "with another hash": Receipt(own.vault, own.seq, own.hash[::-1]),
        "with half a hash": Receipt(own.vault, own.seq, own.hash[:32]),
        "of another line": Receipt(own.vault, own.seq - 1, own.hash),
    }


def test_a_receipt_that_the_vault_did_not_give_is_refused(twins):
    for receipt in _foreign(twins).values():
        _refused(twins, ask(receipt=receipt).to_blob(), "unavailable")


def test_oversized_messages_are_refused_unread(twins, monkeypatch):
    monkeypatch.setattr(messages, "LARGEST", 100)
    _refused(twins, ask().to_blob(), "malformed")


def test_every_edit_of_a_byte_of_a_request_is_refused(tmp_path):
    node = make_node(tmp_path)
    before, honest = books_hold(node), ask().to_blob()
    rng = np.random.default_rng(20)
    for _ in range(2000):
        edited = bytearray(honest)
        edited[rng.integers(len(edited))] ^= 1 << int(rng.integers(8))
        assert kind(device.answer_request(bytes(edited), node)) == "malformed"
    assert books_hold(node) == before
    assert kind(device.answer_request(honest, node)) == "upload"


@pytest.mark.slow
def test_300_heads_with_anything_anywhere_are_answered():
    with memory() as folder:
        said = heads_with_anything(folder, 300, seed=1)
    assert said.keys() >= {"malformed", "upload"}


@pytest.mark.slow
@pytest.mark.parametrize("name", ANSWERED)
def test_what_is_answered_has_the_clients_own_noise(tmp_path, name):
    expected, request = ANSWERED[name]
    twin = _twin(tmp_path)
    answers = [device.answer_request(request.to_blob(), node) for node in (twin.one, twin.other)]
    books = [books_hold(node) for node in (twin.one, twin.other)]
    assert [kind(blob) for blob in answers] == [expected] * 2
    assert books[0].spent == books[1].spent
    if request.loss_bound is None:  # a noised loss has as many digits as it has
        assert len(answers[0]) == len(answers[1])
    if expected == "upload":
        assert [mark for book in books for mark in book.answers.values()] == [*map(digest, answers)]
        assert all(np.isfinite(told(answers[0])["sigma"]))
    else:
        assert answers[0] == answers[1]
        assert books[0].spent == 0


@pytest.mark.slow
@pytest.mark.parametrize("form", ["softmax", "mlp", "svm", "own", "cnn"])
def test_a_trap_for_one_sample_moves_an_upload_by_no_more_than_the_sensitivity(
    tmp_path, monkeypatch, form
):
    classes = FORMS[form].classes
    monkeypatch.setattr("sottovoce.privacy.secure_noise.draw", _no_noise)
    own = "support.devices:LINE" if form == "own" else None
    params = trap(form, 1e3)
    x, y = rows(3, classes)
    uploads = []
    flat = replace(FORMS[form], options={"kappa": 0.0}) if form == "svm" else FORMS[form]
    asked = ask(form, params=params, form=flat)
    for value, label in itertools.product((1e4, -1e4, 0.0), (0, 1)):
        x[0], y[0] = value, label
        node = make_node(tmp_path / f"{value} {label}", (x, y), classes=classes, own=own)
        head, arrays = messages.unpack(device.answer_request(asked.to_blob(), node))
        assert head["kind"] == "upload"
        uploads.append(np.concatenate([arrays[k].astype(float).ravel() for k in sorted(arrays)]))
    start = np.concatenate([params[k].astype(float).ravel() for k in sorted(params)])
    rounding = 2.0**-22 * np.linalg.norm(start)
    moved = [np.linalg.norm(a - b) for a in uploads for b in uploads]
    assert 0.9 / SAMPLES < max(moved) <= 2 / SAMPLES + rounding  # 2ηC/n; and the trap does catch


def _no_noise(count: int, sigma: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    return np.zeros(count, np.int64)


def test_there_are_enough_kinds():
    assert len(MALFORMED) + len(NOT_ALLOWED) + len(ANSWERED) >= 60


def test_all_kinds_on_one_client_leave_it_as_it_was(tmp_path):
    # In one process and one after the other, as a server would: nothing adds up to anything.
    node, rng = make_node(tmp_path), np.random.default_rng(3)
    before = books_hold(node)
    blobs: list[bytes] = [*MALFORMED.values(), *NOT_ALLOWED.values()]
    for place in rng.permutation(len(blobs)):
        assert kind(device.answer_request(blobs[place], node)) in ("malformed", "policy", "version")
    assert books_hold(node) == before
