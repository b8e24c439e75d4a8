"""One request, one answer: what a client's machine says, to whom, and how often.

Hostile requests have a file of their own, and so have crashes. `trust/test_device.py` is longer.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import shutil
import subprocess
import sys
import types
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sottovoce.client import device, messages, release
from sottovoce.client.ledger import read_statement
from sottovoce.client.messages import Receipt
from sottovoce.client.node import Node, Rows
from sottovoce.client.vault import Policy, Vault, chain, chest, resume
from sottovoce.client.vault.policy import LIMITS
from sottovoce.errors import PolicyRefusal, VaultRefusal
from sottovoce.models import base, features
from sottovoce.models.base import Form, Regression
from sottovoce.privacy.sensitivity import Recipe
from sottovoce.privacy.tank import FULL
from sottovoce.server.members import Account, Member
from support import TESTS, devices
from support.device_schedules import play_all
from support.device_twins import WAYS, conversation, pair, spoken
from support.devices import (
    FEATURES,
    FORMS,
    ask,
    books_hold,
    kind,
    make_node,
    make_vault,
    memory,
    model,
    rows,
    told,
)
from support.mutated_module import mutated

UPLOAD = {"schema", "kind", "run", "t", "request", "samples", "receipt", "budget", "sigma"}


@pytest.fixture
def ram() -> Iterator[Path]:
    """A folder in memory where there is one: these tests are about bytes, not about disks."""
    with memory() as folder:
        yield folder


@pytest.mark.slow
@pytest.mark.parametrize("form", ["svm", "softmax", "mlp", "cnn", "own"])
def test_an_honest_request_is_answered_with_public_numbers_and_a_noised_model(ram, form):
    classes = FORMS[form].classes
    node = make_node(ram, rows(4, classes), classes=classes, own="support.devices:LINE")
    request = ask(form, params=model(form, seed=1))
    head, arrays = messages.unpack(device.answer_request(request.to_blob(), node))
    assert head.keys() == UPLOAD
    assert (head["kind"], head["t"], head["samples"]) == ("upload", 0, devices.SAMPLES)
    assert head["request"] == request.hash()
    assert {k: v.shape for k, v in arrays.items()} == {
        k: v.shape for k, v in request.params.items()
    }
    for name, leaf in arrays.items():  # every coordinate moved: nothing is left without noise
        assert np.all(leaf != request.params[name])
    # The receipt that left is one that the vault knows again.
    again = ask(form, t=1, params=request.params, receipt=Receipt.from_json(head["receipt"]))
    assert kind(device.answer_request(again.to_blob(), node)) == "upload"
    books_hold(node)


def test_the_loss_leaves_noised_and_only_if_asked_for(ram):
    node = make_node(ram)
    head = told(device.answer_request(ask(loss_bound=3.0).to_blob(), node))
    assert head.keys() == UPLOAD | {"loss", "loss_sigma"}
    # One part in ten of the release's μ² pays for it: σ_V = (B/n)·√(1/(0.1·μ²)).
    paid = books_hold(node).booked
    assert head["loss_sigma"] == pytest.approx(3.0 / 12 / float(0.1 * paid) ** 0.5, rel=1e-9)


def test_a_greeting_says_what_a_plan_needs_and_nothing_else(ram):
    head = told(device.make_greeting(make_node(ram)))
    assert head.keys() == {
        *("schema", "name", "version", "features", "classes", "policy", "budget", "receipt"),
    }
    assert head["budget"]["spent"] == 0
    assert head["policy"]["samples"] == devices.SAMPLES


def test_a_late_tightening_is_not_told_as_the_promise(ram):
    node = make_node(ram)
    first = told(device.answer_request(ask().to_blob(), node))
    tight = make_node(ram, vault=False, epsilon=4.0)
    after = [
        told(device.make_greeting(tight)),
        told(device.answer_request(ask(t=1).to_blob(), tight)),
    ]
    assert [head["budget"]["epsilon"] for head in (first, *after)] == [8.0] * 3
    assert after[1]["budget"]["capacity"] == first["budget"]["capacity"]


@pytest.mark.parametrize("late", [False, True], ids=["before the first release", "after it"])
@pytest.mark.parametrize("tight", [{"epsilon": 1.0}, {"calibration": "zcdp"}])
def test_what_is_disclosed_is_the_promise_and_never_less_than_what_was_released(ram, tight, late):
    """Capacity and what is spent are those of the (ε, δ) that is told with them."""
    node, released, asked = make_node(ram), 0.0, 0
    if late:
        asked, released = 1, _worth(device.answer_request(ask(horizon=200).to_blob(), node))
    node = make_node(ram, vault=False, **tight)
    promised = (
        Policy(8.0, 1e-5, devices.SAMPLES, 1.0) if late else node.make_policy(devices.SAMPLES)
    )
    member = Member.from_hello(device.make_greeting(node))  # a server takes it for a greeting
    own = member.account
    assert (own.epsilon, own.capacity) == (promised.epsilon, promised.capacity())
    assert own.spent == 0 or late
    for t in range(asked, 40):
        blob = device.answer_request(ask(t=t, horizon=t + 1).to_blob(), node)
        if kind(blob) == "empty":
            break
        before, own = own, Account.from_json(told(blob)["budget"])
        assert own.spent - before.spent >= _worth(blob) * (1 - 1e-9)
        released += _worth(blob)
        assert released <= own.spent <= own.capacity == promised.capacity()
    assert kind(blob) == "empty"
    assert own.spent >= 0.999 * own.capacity  # and a server sees that nothing is left
    assert released <= node.make_policy(devices.SAMPLES).capacity()
    books_hold(node)


def _worth(blob: bytes) -> float:
    """μ² of an upload by the σ it states: Δ = 2ηC/n."""
    return sum((2.0 / devices.SAMPLES / sigma) ** 2 for sigma in told(blob)["sigma"])


def test_terms_that_cannot_be_kept_are_the_policys_in_a_greeting_too(ram):
    """A node file with less budget than was already released; no number of it leaves."""
    device.answer_request(ask().to_blob(), make_node(ram))
    less = make_node(ram, vault=False, epsilon=0.001)
    for said in (device.make_greeting(less), device.answer_request(ask(t=1).to_blob(), less)):
        assert told(said)["code"] == "policy"
        assert "0.001" not in told(said)["text"]


def test_a_client_that_keeps_its_budget_to_itself_says_no_budget(ram):
    node = make_node(ram, disclose=False)
    answers = [device.make_greeting(node), device.answer_request(ask().to_blob(), node)]
    assert [told(blob)["budget"] for blob in answers] == [None, None]
    assert told(answers[0])["policy"]["floor"] is None
    assert "epsilon" not in str(told(answers[0])) + str(told(answers[1]))
    # As docs/ledger.md says it hides nothing from a server that looks: σ = Δ·√(r/left), r = 8.
    head, delta = told(answers[1]), 2.0 * 1.0 / devices.SAMPLES
    left = 8 * (delta / head["sigma"][0]) ** 2
    assert left == pytest.approx(node.make_policy(devices.SAMPLES).capacity(), rel=1e-6)


def test_asked_again_the_stored_bytes_come_back_and_nothing_is_booked(ram):
    node = make_node(ram)
    first = device.answer_request(ask().to_blob(), node)
    before = books_hold(node)
    assert [device.answer_request(ask().to_blob(), node) for _ in range(3)] == [first] * 3
    assert books_hold(node) == before


@pytest.mark.parametrize(
    "other",
    [
        ask(params=model(value=0.1000001)),
        ask(horizon=9),
        ask(scale=2.0),
        ask(spread=4),
        ask(clients=4),
        ask(per_round=2),
        ask(cohort="random"),
        ask(recipe=Recipe(1.0000001, 1.0)),
        ask(recipe=Recipe(1.0, 0.5)),
        ask(recipe=Recipe(1.0, 1.0, steps=2)),
        ask(recipe=Recipe(1.0, 1.0, unit="client")),
        ask(loss_bound=1.0),
        ask(server="another"),
    ],
)
def test_the_same_round_with_any_other_content_is_refused(ram, other):
    node = make_node(ram)
    device.answer_request(ask().to_blob(), node)
    before = books_hold(node)
    assert kind(device.answer_request(other.to_blob(), node)) == "replay"
    assert books_hold(node) == before


def test_what_is_wrong_with_the_clients_files_is_not_told_apart(ram, monkeypatch, caplog):
    """Rows, ledger, code and disk: one constant refusal, and what it was in the client's log."""
    node, said = make_node(ram), []

    def fails(*_, **__):
        raise OSError("no space left")

    with monkeypatch.context() as broken:
        broken.setattr(release, "release", fails)
        said.append(device.answer_request(ask().to_blob(), node))
    newest = books_hold(node).receipt
    later = type(newest)(newest.vault, newest.seq + 1, newest.hash)
    said.append(device.answer_request(ask(receipt=later).to_blob(), node))
    rows_before = node.data.read_bytes()
    for content in (b"", rows_before[:-9]):
        node.data.write_bytes(content)
        said.append(device.answer_request(ask().to_blob(), node))
    np.savez(node.data, **dict(zip("xy", rows(9), strict=True)))  # not those of the ledger
    said.append(device.answer_request(ask().to_blob(), node))
    node.data.write_bytes(rows_before)
    node.vault.rename(ram / "elsewhere")
    said.append(device.answer_request(ask().to_blob(), node))
    assert set(said) == {device.refuse_unavailable()}
    for word in ("OSError", "VaultRefusal", "DataError", "DatasetChanged"):
        assert word in caplog.text


@pytest.mark.parametrize("steps", [1, 10, 16])
def test_no_single_request_can_empty_the_vault(ram, steps):
    """One round announced, many steps asked for: a quarter of the budget and not a unit more."""
    greedy = ask("svm", horizon=1, recipe=Recipe(1.0, 1.0, steps=steps))
    node = make_node(ram / "svm", rows(0, 2), classes=2)
    assert kind(device.answer_request(greedy.to_blob(), node)) == "upload"
    books = books_hold(node)
    assert FULL // 5 < books.spent <= FULL // 4
    assert kind(device.answer_request(ask("svm", t=1, horizon=2).to_blob(), node)) == "upload"


def test_two_runs_share_one_tank_and_an_empty_one_stays_empty(ram):
    node, said = make_node(ram), Counter[str]()
    for t in range(30):
        for run in ("0000aaaa", "0000bbbb"):
            said[kind(device.answer_request(ask(run=run, t=t, horizon=t + 1).to_blob(), node))] += 1
    # One release takes a quarter at most (a little less: floor is rounded up), whatever its run.
    assert said == {"upload": 5, "empty": 55}
    books = books_hold(node)
    assert books.spent <= FULL
    for run in ("0000aaaa", "0badcafe"):
        for request in (ask(run=run, t=40, horizon=41), ask(run=run, t=41, horizon=1000, spread=1)):
            assert kind(device.answer_request(request.to_blob(), node)) == "empty"
    assert books_hold(node) == books


def test_a_release_that_fails_stays_booked_and_is_booked_anew(ram, monkeypatch):
    node, whole = make_node(ram), release.release
    monkeypatch.setattr(release, "release", _failing)
    failed = device.answer_request(ask().to_blob(), node)
    assert kind(failed) == "unavailable"
    assert "secret" not in str(told(failed))
    once = books_hold(node)
    assert once.spent > 0
    assert once.answers == {}
    monkeypatch.setattr(release, "release", whole)
    # Another content for that round would be a second try: refused although nothing was sent.
    assert kind(device.answer_request(ask(horizon=9).to_blob(), node)) == "replay"
    resume(node.vault)
    assert kind(device.answer_request(ask().to_blob(), node)) == "upload"
    assert books_hold(node).spent > once.spent


def _failing(*_: Any, **__: Any) -> Any:
    raise RuntimeError("secret: 0.123456")


def test_a_vault_that_cannot_be_used_is_refused_in_constant_words(ram, monkeypatch):
    node = make_node(ram / "missing", vault=False)
    answers = [device.answer_request(ask().to_blob(), node), device.make_greeting(node)]
    assert not node.vault.exists()
    busy = make_node(ram / "busy")
    monkeypatch.setattr(device, "PATIENCE", 0.1)
    with Vault.open(busy.vault, dataset=busy.read_rows().fingerprint):
        answers += [device.answer_request(ask().to_blob(), busy), device.make_greeting(busy)]
    changed = make_node(ram / "changed")
    x, y = rows(99)
    np.savez(changed.data, x=x, y=y)
    answers += [device.answer_request(ask().to_blob(), changed), device.make_greeting(changed)]
    older = make_node(ram / "older")
    shutil.copy(older.vault, ram / "old")
    device.answer_request(ask().to_blob(), older)
    shutil.copy(ram / "old", older.vault)
    answers += [device.answer_request(ask().to_blob(), older), device.make_greeting(older)]
    assert {kind(blob) for blob in answers} == {"unavailable"}
    assert len(set(answers)) == 1


@pytest.mark.parametrize("harm", ["gone", "no arrays", "other names", "a label too large", "text"])
def test_data_that_cannot_be_read_are_refused_in_constant_words(ram, harm):
    node = make_node(ram)
    x, y = rows(0)
    match harm:
        case "gone":
            node.data.unlink()
        case "no arrays":
            node.data.write_bytes(b"PK\x03\x04 0.123456")
        case "other names":
            np.savez(node.data, rows=x, labels=y)
        case "a label too large":
            np.savez(node.data, x=x, y=y + 3)
        case _:
            np.savez(node.data, x=x.astype(str), y=y)
    for blob in (device.answer_request(ask().to_blob(), node), device.make_greeting(node)):
        assert kind(blob) == "unavailable"
        assert blob == device.refuse_unavailable()
    node.data.unlink(missing_ok=True)
    np.savez(node.data, x=x, y=y)
    assert books_hold(node).spent == 0


def test_a_node_file_may_tighten_its_vault_and_not_loosen_it(ram):
    node = make_node(ram, epsilon=8.0)
    tighter = make_node(ram, epsilon=4.0, vault=False)
    assert kind(device.answer_request(ask().to_blob(), tighter)) == "upload"
    assert books_hold(node).limit < FULL
    assert (
        kind(device.answer_request(ask(t=1).to_blob(), node)) == "policy"
    )  # back to 8 is loosening
    stricter = make_node(ram, epsilon=4.0, clip=0.5, vault=False)
    assert kind(device.answer_request(ask(t=1).to_blob(), stricter)) == "policy"


def test_an_answer_too_large_for_the_vault_is_refused_before_it_is_paid_for(ram, monkeypatch):
    # Found after the reserve it would burn a share of the budget at every request.
    node, size = make_node(ram), 4 * sum(leaf.size for leaf in model().values())
    for place in ("sottovoce.client.device.MOST_BYTES", "sottovoce.client.vault.vault.MOST_BYTES"):
        monkeypatch.setattr(place, size + messages.LONGEST_TEXT - 1)
    assert kind(device.answer_request(ask().to_blob(), node)) == "policy"
    assert books_hold(node).spent == 0


def test_steps_are_bounded_before_they_are_priced(ram, monkeypatch):
    node = make_node(ram, max_rounds=10**9)
    for steps in (17, 1001, 10**6, 10**9):
        many = ask(horizon=10**9, recipe=Recipe(1.0, 1.0, steps=steps))
        assert kind(device.answer_request(many.to_blob(), node)) == "policy"
    size = sum(v.size for v in model().values())
    work = make_node(ram / "work", max_work=5 * size * devices.SAMPLES)
    for steps, said in ((5, "upload"), (6, "policy")):
        some = ask(t=steps, recipe=Recipe(1.0, 1.0, steps=steps))
        assert kind(device.answer_request(some.to_blob(), work)) == said
    monkeypatch.setattr(device, "MOST_PARAMETERS", size - 1)
    assert kind(device.answer_request(ask().to_blob(), node)) == "policy"
    assert books_hold(node).spent == 0


def test_more_noise_than_the_grid_holds_is_refused_with_the_remedy(ram):
    node = make_node(ram, unit="client", epsilon=1e-4, max_rounds=10**4)
    whole = ask(horizon=10**4, recipe=Recipe(1.0, 1.0, unit="client"))
    said = told(device.answer_request(whole.to_blob(), node))
    assert said["code"] == "policy"
    assert "more noise than the grid holds; announce fewer rounds, or protect" in said["text"]
    assert books_hold(node).spent == 0


@pytest.mark.parametrize("own", ["TURNED", "MANY", "WRITING"])
def test_an_own_model_that_mixes_its_samples_is_refused_before_anything_is_booked(ram, own):
    node = make_node(ram, own=f"support.devices:{own}")
    request = ask("own", params=model("own"), loss_bound=1.0)
    assert kind(device.answer_request(request.to_blob(), node)) == "unavailable"
    assert books_hold(node).spent == 0


def test_an_own_model_cannot_write_into_what_is_sent():
    """One that writes in place where it meets a real row: the row is left out, nothing is sent."""
    x, y = rows(0)
    start = {name: np.zeros(shape) for name, shape in devices.LINE.shapes().items()}
    kept = x.copy(), y.copy()
    honest = release.step(FORMS["own"], start, x, y, Recipe(1.0, 1.0), devices.LINE)
    moved = release.step(FORMS["own"], start, 1e6 * x, y, Recipe(1.0, 1.0), devices.SLY)
    assert honest["w"].any()
    assert not any(leaf.any() for leaf in (*moved.values(), *start.values()))
    assert np.array_equal(x, kept[0])
    assert np.array_equal(y, kept[1])


def test_an_own_model_that_writes_through_read_only_memory_mixes_no_samples():
    """As `torch.from_numpy` lets it: what it leaves there is not what the next sample meets."""

    class Forcing(devices.OwnLine):
        def gradients(self, params, x, y):
            told = super().gradients(params, x, y)
            for array in (*params.values(), x):
                ctypes.memset(array.ctypes.data, 0x3F, array.nbytes)
            return told

        def losses(self, params, x, y):
            told = super().losses(params, x, y)
            ctypes.memset(params["w"].ctypes.data, 0x3F, params["w"].nbytes)
            return told

    x, y = rows(0)
    start = {name: np.zeros(shape) for name, shape in devices.LINE.shapes().items()}
    for compute in (base.gradient_matrix, base.sample_losses):
        honest = compute(FORMS["own"], start, x, y, devices.LINE)
        assert np.array_equal(compute(FORMS["own"], start, x, y, Forcing()), honest)


class Guarded:
    """Rows whose number and width are public, and every look at their values noted."""

    def __init__(self, values, noted):
        self._values, self._noted = values, noted
        self.shape, self.dtype = values.shape, values.dtype

    def __len__(self):
        return self.shape[0]

    def __getitem__(self, place):
        self._noted.append("rows")
        return self._values[place]

    def __array__(self, dtype=None, copy=None):
        self._noted.append("rows")
        return np.array(self._values, dtype)


LENS = features.build("hog", (2, 2, 1), 1)
SEEN = Form("softmax", (2, 2, 1), 3, lens=LENS)


@pytest.mark.parametrize("form", ["softmax", "mlp", "own", "seen"])
def test_no_row_is_looked_at_before_its_debit_is_durable(ram, form, monkeypatch):
    """After they were read and held against the ledger's fingerprint, not before the reserve."""
    node, noted = make_node(ram, own="support.devices:LINE"), []
    held, real = node.read_rows(), Vault.reserve

    x, y = Guarded(held.x, noted), Guarded(held.y, noted)
    guarded = Rows(x, y, held.classes, held.fingerprint)

    def reserve(*args, **options):
        done = real(*args, **options)
        noted.append("reserve")
        return done

    monkeypatch.setattr(Node, "read_rows", lambda self: guarded)
    monkeypatch.setattr(Vault, "reserve", reserve)
    shapes = SEEN.shapes() if form == "seen" else None
    params = model(form) if shapes is None else {k: np.zeros(s, "f") for k, s in shapes.items()}
    told = {"form": SEEN if form == "seen" else FORMS[form], "params": params, "horizon": 1}
    for t in range(40):
        noted.clear()
        said = kind(device.answer_request(ask(t=t, **{**told, "horizon": t + 1}).to_blob(), node))
        assert noted[:1] == (["reserve"] if said == "upload" else [])
        if said == "empty":
            break
        assert "rows" in noted
    assert said == "empty"  # and however often it is asked
    assert noted == []


def test_an_own_model_that_is_none_is_refused(ram):
    for place in ("support.devices:missing", "no_such_module:LINE", "support.devices:FORMS"):
        node = make_node(ram / place.replace(":", "-"), own=place)
        assert (
            kind(device.answer_request(ask("own", params=model("own")).to_blob(), node))
            == "unavailable"
        )
        assert books_hold(node).spent == 0


@pytest.mark.slow
@pytest.mark.parametrize("form", ["svm", "softmax", "mlp", "own"])
@pytest.mark.parametrize("block", range(3))
def test_frozen_noise_and_equal_sums_give_equal_bytes(ram, form, block):
    # With test_an_own_models_errors… 102 pairs; a pair has 8 messages.
    for seed in range(11 * block, 11 * block + 11):
        one, other = pair(ram / str(seed), form, seed)
        assert one == other
        assert {"upload", "replay", "policy", "malformed", "empty"} == set(map(kind, one[1:]))


def test_an_own_models_errors_do_not_tell_the_server_of_the_samples(ram):
    for seed in range(3):
        one, other = pair(ram / str(seed), "own", seed, "support.devices:TOUCHY", "useless")
        assert one == other
        assert kind(one[1]) == "upload"


@pytest.mark.slow
@pytest.mark.parametrize("form", ["svm", "softmax", "mlp"])
def test_other_samples_change_noised_numbers_and_nothing_else(ram, form):
    for seed in range(8):
        classes = FORMS[form].classes
        params, steps = model(form, 0.5, seed=seed), 1 + seed % 2
        said = conversation(form, params, 5 * seed + 1, steps)  # without a loss
        heard = [
            spoken(ram / f"{seed} {k}", form, rows(50 + seed + k, classes), said, seed)
            for k in (0, 100)
        ]
        for one, other in zip(*heard, strict=True):
            assert told(one) == told(other)
            assert len(one) == len(other)
            assert (one != other) == (told(one).get("kind") == "upload")


def _leaky_client() -> types.ModuleType:
    return mutated(
        "sottovoce.client.release",
        "    noised_loss: dict[str, float] = {}\n",
        "    noised_loss: dict[str, float] = {}\n"
        "    noised_loss['mean'] = "
        "float(np.nan_to_num(np.asarray(x, np.float64)).clip(-9, 9).mean())\n",
    )


def _fussy_client() -> types.ModuleType:
    return mutated(
        "sottovoce.client.release",
        "    now, samples = _sort_leaves(params), len(np.asarray(y))\n",
        "    now, samples = _sort_leaves(params), len(np.asarray(y))\n"
        "    if np.isnan(np.asarray(x, np.float64)).any(): raise ValueError(x)\n",
    )


def _first_loss() -> types.ModuleType:
    return mutated(
        "sottovoce.client.release",
        'noised_loss["loss_sigma"] = loss_bound',
        'noised_loss["raw"] = float(np.asarray(y)[0]); noised_loss["loss_sigma"] = loss_bound',
    )


def _talkative() -> types.ModuleType:
    return mutated(
        "sottovoce.client.device",
        "_describe_error(error))\n    return refuse_unavailable()",
        '_describe_error(error))\n        return make_refusal("x", str(error))\n'
        "    return refuse_unavailable()",
    )


def _replayed(folder: Path) -> bool:
    """Whether the frozen-noise replay sees no difference."""
    for way, seed in itertools.product(WAYS, range(0, 30, 5)):  # all with a loss
        one, other = pair(folder / f"{way} {seed}", "svm", seed, way=way)
        if one != other:
            return False
    return True


@pytest.mark.parametrize(
    "mutant",
    ["statistic in the head", "error on NaN", "label in the head", "error's text", "no salt"],
)
def test_the_replay_sees_a_device_that_leaks(ram, monkeypatch, mutant):
    match mutant:
        case "statistic in the head":
            monkeypatch.setattr(device, "release", _leaky_client())
        case "error on NaN":
            monkeypatch.setattr(device, "release", _fussy_client())
        case "label in the head":
            monkeypatch.setattr(device, "release", _first_loss())
        case "error's text":
            whole, talkative = device.answer_request, _talkative()
            talkative.release = _fussy_client()  # type: ignore[attr-defined]
            monkeypatch.setattr(device, "answer_request", talkative.answer_request)
            assert device.answer_request is not whole
        case _:
            monkeypatch.setattr(
                chest, "add_salt", lambda facts: chain.encode_canonical({**facts, "salt": ""})
            )
    assert not _replayed(ram)


@pytest.mark.slow
def test_the_replay_accepts_the_device_as_it_is(ram):
    assert _replayed(ram)


def test_no_salt_comes_twice(ram):
    salts = []
    for name in ("a", "b"):
        node = make_node(ram / name)
        for t in range(3):
            device.answer_request(ask(t=t).to_blob(), node)
        with Vault.open(node.vault, dataset=None) as vault:
            salts += [line.facts["salt"] for line in vault.lines()]
    assert len(set(salts)) == len(salts) >= 14
    assert all(len(bytes.fromhex(salt)) == 32 for salt in salts)


@pytest.mark.slow
def test_random_schedules_never_exceed_the_budget(ram):
    said = play_all(ram, range(10))
    assert min(said[kind] for kind in ("upload", "replay", "empty", "policy")) > 0


@pytest.mark.slow
def test_48_schedules_never_exceed_the_budget(ram):
    """With the ten above, a bug that shows in one schedule of ten is missed with 0.9⁴⁸ = 0.6 %.

    `make trust` plays 2,000 others.
    """
    play_all(ram, range(10, 48))


def test_the_device_and_its_node_make_no_files_of_their_own(ram):
    node = make_node(ram, vault=False)
    before = sorted(path.name for path in ram.iterdir())
    assert before == ["ward.npz", "ward.toml"]
    make_vault(Node.load(ram / "ward.toml"))
    device.answer_request(ask().to_blob(), node)
    made = {path.name for path in ram.iterdir()} - set(before)
    assert made == {"ward.vault", "ward.vault.lock", "ward.vault.witness"}


def test_a_vault_of_before_opens_and_its_node_file_tightens_what_it_did_not_name(
    tmp_path, monkeypatch
):
    """What a policy did not name yet was allowed: an absent key is that, and may be tightened."""
    new = ("max_steps", *LIMITS)
    with monkeypatch.context() as before:
        old = Policy.to_json
        before.setattr(
            Policy, "to_json", lambda own: {k: v for k, v in old(own).items() if k not in new}
        )
        node = make_node(tmp_path, run_share=None)
    with Vault.open(node.vault, dataset=None) as vault:
        assert vault.policy.max_steps == 1000
    wider = make_node(tmp_path, vault=False, run_share=None, max_steps=50)
    assert (
        kind(device.answer_request(ask(recipe=Recipe(1.0, 1.0, steps=50)).to_blob(), wider))
        == "upload"
    )
    assert kind(device.answer_request(ask(t=1).to_blob(), node)) == "upload"
    with Vault.open(node.vault, dataset=None) as vault:
        assert vault.policy.max_steps == 16
        assert vault.policy.run_share == 1.0  # no limit until the node file names one
    assert kind(device.answer_request(ask(t=2).to_blob(), wider)) == "policy"
    half = make_node(tmp_path, vault=False, run_share=0.5)
    assert kind(device.answer_request(ask(t=2).to_blob(), half)) == "upload"
    with Vault.open(node.vault, dataset=None) as vault:
        assert vault.policy.run_share == 0.5


def spent_after(node, requests):
    """What each request was answered with, and the units spent after it."""
    said = []
    for request in requests:
        answer = kind(device.answer_request(request.to_blob(), node))
        with Vault.open(node.vault, dataset=None) as vault:
            said.append((answer, vault.spent))
    return said


@pytest.mark.parametrize("error", [MemoryError, OSError, RuntimeError])
def test_an_answer_that_fails_stops_the_client_until_its_operator_says_so(
    ram, monkeypatch, caplog, error
):
    """One debit is burnt, and not one more, however often a server asks."""
    node = make_node(ram)
    assert kind(device.answer_request(ask().to_blob(), node)) == "upload"

    def fails(*_, **__):
        raise error

    with monkeypatch.context() as broken:
        broken.setattr(release, "release", fails)
        said = spent_after(node, [ask(t=t) for t in (1, 1, 2, 3, 4)])
    assert {answer for answer, _ in said} == {"unavailable"}
    assert len({spent for _, spent in said}) == 1
    assert spent_after(node, [ask(t=1), ask(t=5)])[-1] == said[-1]  # mended, and nobody has looked
    assert (
        kind(device.answer_request(ask().to_blob(), node)) == "upload"
    )  # what is stored is sent again
    with pytest.raises(VaultRefusal, match="sottovoce ledger resume"):
        device.check_node(node)
    assert "paid for" in caplog.text
    notes = [note["text"] for note in read_statement(node.vault).notes]
    assert any("an answer failed" in note for note in notes)
    resume(node.vault)
    device.check_node(node)
    assert kind(device.answer_request(ask(t=1).to_blob(), node)) == "upload"
    with pytest.raises(PolicyRefusal, match="just use it"):
        resume(node.vault)


def test_one_killed_process_is_forgiven_and_a_second_in_a_row_is_not(ram, monkeypatch):
    """kill -9 after the reserve leaves a debit alone: the round is paid again, once."""
    node = make_node(ram)

    class Killed(BaseException):
        """The process ends here: nothing is noted any more."""

    def killed(*_, **__):
        raise Killed

    def kill(t):
        with monkeypatch.context() as broken:
            broken.setattr(release, "release", killed)
            with pytest.raises(Killed):
                device.answer_request(ask(t=t).to_blob(), node)

    kill(0)
    assert kind(device.answer_request(ask().to_blob(), node)) == "upload"
    kill(1)
    kill(1)
    (first, before), (second, after) = spent_after(node, [ask(t=1), ask(t=2)])
    assert first == second == "unavailable"
    assert before == after
    resume(node.vault)
    assert kind(device.answer_request(ask(t=1).to_blob(), node)) == "upload"


BIG = Form("mlp", (FEATURES,), 3, {"hidden": 100_000})


def big(t):
    return ask(t=t, form=BIG, params={k: np.zeros(s, "f") for k, s in BIG.shapes().items()})


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount a small file system")
@pytest.mark.parametrize("room", [100, 300, 1500, 3000])
def test_a_full_disk_burns_no_budget(tmp_path, room):
    """So many KiB are left for an upload of 3 MiB: nothing is booked, whatever would still fit."""
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(tmp_path)],
                          capture_output=True, text=True)  # fmt: skip
    if done.returncode:
        pytest.skip(f"no file system can be mounted here: {done.stderr.strip()}")
    try:
        node = make_node(tmp_path)
        free = shutil.disk_usage(tmp_path).free
        (tmp_path / "other").write_bytes(bytes(free - 1024 * room))
        said = spent_after(node, [big(t) for t in range(6)])
        assert set(said) == {("unavailable", 0)}
        (tmp_path / "other").unlink()
        assert kind(device.answer_request(big(0).to_blob(), node)) == "upload"
        assert not list(tmp_path.glob("*.room"))
        books_hold(node)
    finally:
        subprocess.run(["umount", "-l", str(tmp_path)], check=True)


ULIMITS = {
    "memory": "RLIMIT_AS, (int(open('/proc/self/statm').read().split()[0]) * 4096 + 2**26,) * 2",
    "the size of a file": "RLIMIT_FSIZE, (2**20 + 2**19,) * 2",
}


@pytest.mark.parametrize("limit", ULIMITS)
def test_a_limit_that_an_answer_would_meet_burns_no_budget(ram, limit):
    """An upload of 3 MiB, and a process without room for its work or its file: nothing is spent."""
    node = make_node(ram)
    code = f"""if True:
        import resource, signal
        from support.devices import kind
        from sottovoce.client import device
        from sottovoce.client.node import Node, Rows
        request = open({str(ram / "request")!r}, "rb").read()
        node = Node.load({str(ram / "ward.toml")!r})
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.{ULIMITS[limit]})
        print([kind(device.answer_request(request, node)) for _ in range(4)])
    """
    (ram / "request").write_bytes(big(0).to_blob())
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True,
                          cwd=TESTS,
                          env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
                               "OPENBLAS_NUM_THREADS": "1"})  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "upload" not in done.stdout
    assert books_hold(node).spent == 0
    assert kind(device.answer_request(big(0).to_blob(), node)) == "upload"


def test_a_run_takes_its_share_of_the_budget_and_is_planned_within_it(ram):
    """A quarter by default: every round of the run is paid for, with more noise, and none more."""
    node, spent = make_node(ram, run_share=None), []
    for number in range(6):
        run, before = f"{number:08x}", books_hold(node).spent
        said = [kind(device.answer_request(ask(run=run, t=t).to_blob(), node)) for t in range(8)]
        spent.append(books_hold(node).spent - before)
        assert said == (["upload"] * 8 if number < 4 else ["empty"] * 8)
    assert all(FULL // 4 - 100 < units <= FULL // 4 for units in spent[:4])
    with Vault.open(node.vault, dataset=None) as vault:
        turns = [sum(entry.units) for entry in vault.entries()]
    assert max(turns) <= 1.001 * min(turns)  # as planned, from the first round to the last
    late = [ask(run="0000000a", t=8, horizon=9), ask(run="00000001", t=8, horizon=9)]
    assert {kind(device.answer_request(request.to_blob(), node)) for request in late} == {"empty"}


def test_a_server_takes_its_share_of_the_budget(ram):
    """Whatever runs it begins, by the name that it gives; another one may have the rest."""
    node = make_node(ram, server_share=0.5)
    for number in range(8):
        greedy = ask(run=f"{number:08x}", horizon=1, server="greedy")
        device.answer_request(greedy.to_blob(), node)
    assert FULL // 2 - FULL // 100 < books_hold(node).spent <= FULL // 2
    assert kind(device.answer_request(ask(server="another").to_blob(), node)) == "upload"


def test_a_run_goes_on_under_the_terms_of_its_greeting_or_not_at_all(ram):
    """A floor that was raised after the greeting may bind only later: that round is not paid."""
    node = make_node(ram, floor=0.1)

    def newest(blob):
        return Receipt.from_json(told(blob)["receipt"])

    def play(t, scale, receipt, run="000000a1"):
        request = ask(t=t, run=run, scale=scale, spread=8, receipt=receipt)
        return device.answer_request(request.to_blob(), node)

    greeted = newest(device.make_greeting(node))
    path = node.vault.with_suffix(".toml")
    path.write_text(path.read_text().replace("floor = 0.1", "floor = 1.5"))
    node = Node.load(path)
    first = play(0, 1.0, greeted)  # the horizon asks for more noise than either floor
    second = play(1, 1.0, newest(first))
    booked = books_hold(node).booked
    for receipt in (greeted, newest(first), newest(second)):
        assert kind(play(2, 0.5, receipt)) == "policy"
    assert books_hold(node).booked == booked
    greeted = newest(device.make_greeting(node))
    assert kind(play(0, 0.5, greeted, run="000000a2")) == "upload"


def test_a_ledger_keeps_to_its_quota(ram):
    node = make_node(ram, max_bytes=2**21)
    said = [kind(device.answer_request(ask(t=t, form=MIDDLE, params=MIDDLE_MODEL).to_blob(), node))
            for t in range(8)]  # fmt: skip
    assert said[0] == "upload"
    assert said[-1] == "policy"
    assert node.vault.stat().st_size <= 2**21
    assert len(books_hold(node).answers) == said.count("upload")


MIDDLE = Form("mlp", (FEATURES,), 3, {"hidden": 10_000})
MIDDLE_MODEL = {name: np.zeros(shape, "f") for name, shape in MIDDLE.shapes().items()}


def test_the_noise_of_a_step_is_drawn_before_its_data_and_alone(monkeypatch):
    """In pieces: of many steps the noise of one is in memory, and none waits for the rows."""
    noted, real = [], release.secure_noise.draw
    monkeypatch.setattr(release.secure_noise, "draw", lambda *a: noted.append("draw") or real(*a))
    x, y = rows(0)
    guarded = Guarded(x, noted)
    start = {name: leaf.astype(float) for name, leaf in model().items()}
    paid = release.Price(units=(1, 1, 1), noise=(2**31,) * 3)
    release.release(FORMS["mlp"], start, guarded, y, recipe=Recipe(1.0, 1.0, steps=3), paid=paid,
                   head={})  # fmt: skip
    assert noted == ["draw", "rows"] * 3


PEAKS = """
import resource, sys
from pathlib import Path
import numpy as np
from support.devices import ask, kind, make_node
from sottovoce.client import device
from sottovoce.models.base import Form
from sottovoce.client.vault import Vault

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10  # MB

form = Form("cnn", (28, 28, 1), 10, {"channels": 16})
form = Form("mlp", (64,), 10, {"hidden": 60_000}) if sys.argv[2] == "mlp" else form
rng = np.random.default_rng(0)
rows = rng.normal(size=(100, form.numbers)), rng.integers(0, 10, 100)
node = make_node(Path(sys.argv[1]), rows, classes=10)
params = {n: (0.1 * rng.normal(size=s)).astype(np.float32) for n, s in form.shapes().items()}
before, reserve = [], Vault.reserve
Vault.reserve = lambda self, *a, **k: before.append(peak()) or reserve(self, *a, **k)
assert kind(device.answer_request(ask(form=form, params=params).to_blob(), node)) == "upload"
print(before[0], peak())
"""


@pytest.mark.slow
@pytest.mark.parametrize("form", ["mlp", "cnn"])
def test_the_memory_of_a_release_is_taken_before_it_is_paid_for(tmp_path, form):
    """A kernel promises what it has not: killed for memory, a process must not have paid yet."""
    words = [sys.executable, "-c", PEAKS, str(tmp_path), form]
    here = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, sys.path))}
    said = subprocess.run(words, env=here, capture_output=True, text=True, check=True).stdout
    at_debit, at_end = map(int, said.split())
    assert at_end <= at_debit + 16  # MB: interpreter, vault and message


@pytest.mark.parametrize("name", ["softmax", "mlp", "cnn"])
def test_a_number_is_answered_in_its_range_alone(ram, name):
    """The client's own range holds: targets that are scaled otherwise would be other data."""
    x, _ = rows(0)
    node = make_node(ram, (x, np.linspace(0, 50, len(x))), target=[0.0, 40.0])

    def send(high=40.0, **more):
        form = replace(FORMS[name], classes=1, target=Regression("huber", 0.0, high))
        params = {leaf: np.full(shape, 0.1, np.float32) for leaf, shape in form.shapes().items()}
        return device.answer_request(ask(form=form, params=params, **more).to_blob(), node)

    assert told(device.make_greeting(node))["classes"] == 1
    before = books_hold(node).spent
    for answer in (
        send(high=41.0),
        send(recipe=Recipe(1.0, 1.0, class_weights=(1.0,))),
        device.answer_request(ask(name).to_blob(), node),
    ):
        assert kind(answer) in ("policy", "malformed")
    assert books_hold(node).spent == before
    assert kind(send(loss_bound=2.0)) == "upload"
    assert books_hold(node).spent > before
