"""Real clients with vaults whose server learns only sums: one process, lost messages, kills."""

from __future__ import annotations

import html
import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from sottovoce.client import device, ledger, messages, sum_protocol
from sottovoce.client.messages import Request
from sottovoce.client.node import Node
from sottovoce.client.vault import Policy, Vault, rebinding
from sottovoce.client.vault.journal import MOST_UNPAID
from sottovoce.client.vault.policy import require_tighter
from sottovoce.errors import (
    InputError,
    PolicyRefusal,
    RoundAnswered,
    RunError,
    TankEmpty,
    VaultRefusal,
)
from sottovoce.models.base import Form
from sottovoce.privacy.budget import format_claim
from sottovoce.privacy.calibration import bound_epsilon
from sottovoce.privacy.tank import FULL
from sottovoce.reports.certificate import render_certificate
from sottovoce.server.coordinator import Patience
from support.devices import ask, kind
from support.federations import RECORD, go
from support.hostile_device import greeting
from support.in_process import CLASSES, FEATURES, Direct, clients, plan
from support.sum_rounds import sum_nodes

pytestmark = pytest.mark.slow  # every round debits real vaults, durably

SUM = {"privacy.view": "sum", "privacy.honest": 2, "privacy.corrupt": 1, "data.clients": 5}
STEPS = ("keys", "shares", "input", "set", "unmask")
PATIENCE = Patience(5, gathering=0.5)


def short(**changes):
    return plan(**{"rounds.rounds": 2, **SUM, **changes})


def step_of(blob):
    """Which of the five messages this is."""
    head = messages.unpack(blob)[0]
    return head["sum"]["step"] if "sum" in head else head["step"]


def t_of(blob):
    """Which round a message is about."""
    head = messages.unpack(blob)[0]
    return head["t"] if "t" in head else head["round"]["t"]


def vaults_hold(transport):
    """Every debit is in its vault in both accounts, and no round has two answers or two sets."""
    for node in transport.nodes.values():
        with Vault.open(node.vault, dataset=None) as vault:
            assert vault.spent <= vault.limit
            assert vault.spent <= vault.alone <= min(2 * vault.spent, vault.limit_alone)
            lines = [(line.kind, line.facts) for line in vault.lines()]
        stored = [(f["run"], f["t"]) for kind, f in lines if kind == "store"]
        noted = [(f["run"], f["t"], f["step"]) for kind, f in lines if kind == "note"]
        assert len(set(stored)) == len(stored)
        assert len(set(noted)) == len(noted)


def test_a_federation_whose_server_learns_only_sums(tmp_path):
    transport = Direct(sum_nodes(tmp_path, 5))
    done = go(transport, tmp_path / "run", own=short(), patience=PATIENCE)
    RECORD.validate(done.record)
    assert done.record["status"] == "finished"
    assert [entry["uploads"] for entry in done.record["rounds"]] == [5, 5]
    assert "whatever anyone does" in str(done.guarantee)
    vaults_hold(transport)
    for client in done.record["clients"]:
        assert 0 < client["spent"] <= client["capacity"]
        assert client["spent_alone"] <= 2 * client["spent"] * (1 + 1e-9)
    (node, *_) = transport.nodes.values()
    secrets = node.vault.with_name(node.vault.name + ".secrets")
    assert secrets.stat().st_mode & 0o077 == 0
    assert [t for t, _ in json.loads(secrets.read_text()).values()] == [1]  # of the newest round


@pytest.mark.parametrize(
    "term",
    [
        ("[policy]", "[policy]\nfloor = 6.0"),
        ("run_share = 1.0", "run_share = 0.4"),
        ("[policy.limits]", "[policy.limits]\nserver_share = 0.4"),
    ],
)
def test_terms_that_are_tightened_in_mid_run_cost_no_sum(tmp_path, term):
    """A sum counts with whatever noise is in it: every debit after it is of a sum that counts."""
    transport = Direct(sum_nodes(tmp_path, 5))

    def tighten(done):
        if done.t == 0:
            path = tmp_path / "client-2.toml"
            text = path.read_text()
            assert term[0] in text
            path.write_text(text.replace(*term))
            transport.nodes["route-2"] = Node.load(path)

    own = short(**{"rounds.rounds": 4})
    done = go(transport, tmp_path / "run", own=own, patience=PATIENCE, on_round=tighten)
    assert [entry["uploads"] for entry in done.record["rounds"]] == [5] * 4
    vaults_hold(transport)


@pytest.mark.parametrize("link", [Path.symlink_to, Path.hardlink_to])
def test_secrets_are_not_written_where_another_user_can_read_them(tmp_path, link):
    """In a shared folder somebody may wait with a file of their own under the draft's name."""
    node, *_ = sum_nodes(tmp_path, 1).values()
    theirs = tmp_path / "theirs"
    theirs.write_text("theirs")
    theirs.chmod(0o666)
    secrets = node.vault.with_name(node.vault.name + ".secrets")
    link(secrets.with_name(secrets.name + ".part"), theirs)
    with Vault.open(node.vault, dataset=None) as vault:
        secret = sum_protocol.VaultNotes(vault).make_secret("run", 0)
        assert sum_protocol.VaultNotes(vault).find_secret("run", 0) == secret
    assert theirs.read_text() == "theirs"
    assert secrets.stat().st_ino != theirs.stat().st_ino
    assert secrets.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_client_killed_at_a_step_costs_no_more_than_its_part(tmp_path, step, when):
    """Its process ends before it answers, or the answer is lost; in the next round it is back."""
    transport = Direct(sum_nodes(tmp_path, 5))
    lost = []

    def answer(blob, node):
        dies = node.name == "client-1" and step_of(blob) == step and not lost
        if not dies:
            return device.answer_request(blob, node)
        lost.append(step)
        if when == "after":
            device.answer_request(blob, node)
        return None

    transport.answer = answer
    done = go(transport, tmp_path / "run", own=short(), patience=PATIENCE)
    assert lost == [step]
    assert done.record["status"] == "finished"
    first = 4 if step in ("keys", "shares", "input") else 5
    assert [entry["uploads"] for entry in done.record["rounds"]] == [first, 5]
    vaults_hold(transport)


@pytest.mark.parametrize("t", [0, 1])
@pytest.mark.parametrize("step", STEPS)
def test_a_killed_server_resumes_and_nothing_is_paid_twice(tmp_path, step, t):
    class Killed(BaseException):
        pass

    transport = Direct(sum_nodes(tmp_path, 5, floor=0.1))
    seen = []

    def answer(blob, node):
        seen.append(step_of(blob))
        if seen.count(step) == 5 * t + 3:  # two clients have answered this message of the round
            raise Killed
        return device.answer_request(blob, node)

    transport.answer = answer
    with pytest.raises(Killed):
        go(transport, tmp_path / "run", own=short(), patience=PATIENCE)
    transport.answer = device.answer_request
    transport.greeted.clear()
    done = go(transport, tmp_path / "run", own=short(), patience=PATIENCE, resume=True)
    assert done.record["status"] == "finished"
    assert [entry["uploads"] for entry in done.record["rounds"]] == [5, 5]
    vaults_hold(transport)
    for node in transport.nodes.values():
        with Vault.open(node.vault, dataset=None) as vault:
            assert len(list(vault.entries())) == 2  # one debit a round


@pytest.mark.parametrize(
    "lie",
    [
        lambda head: {**head, "budget": {**head["budget"], "spent": 0.0}},
        lambda head: {**head, "budget": {**head["budget"], "epsilon": 9.0}},
        lambda head: {**head, "receipt": {**head["receipt"], "vault": "ab" * 16}},
    ],
    ids=["nothing paid", "a looser budget", "the receipt of another"],
)
def test_a_client_with_false_books_is_left_out_of_the_sum_and_the_run_has_its_record(
    tmp_path, lie, caplog
):
    transport = Direct(sum_nodes(tmp_path, 5))

    def answer(blob, node):
        said = device.answer_request(blob, node)
        if node.name != "client-1" or step_of(blob) != "input":
            return said
        head, arrays = messages.unpack(said, words=True)
        return messages.pack(lie(head), arrays)

    transport.answer = answer
    done = go(transport, tmp_path / "run", own=short(), patience=PATIENCE)
    assert done.record["status"] == "finished"
    assert [entry["uploads"] for entry in done.record["rounds"]] == [4, 4]
    assert done.record["rounds"][0]["missing"] == {"client-1": "malformed"}
    assert "client client-1 sent no step of a round: " in caplog.text


@pytest.mark.parametrize("code", ["\ud800", "<b>", ["empty"], None])
def test_a_client_that_refuses_in_words_of_its_own_does_not_cost_the_run_its_record(tmp_path, code):
    """As for uploads, only known codes are recorded: half a letter cannot even be written."""
    transport = Direct(sum_nodes(tmp_path, 5))
    no = {"schema": messages.ANSWER, "kind": "refusal", "code": code, "text": "no"}
    transport.on_answer = lambda route, asked, told: (
        messages.pack(no) if route == "route-1" and step_of(asked) == "keys" else told
    )
    done = go(transport, tmp_path / "run", own=short(), patience=PATIENCE)
    assert done.record["status"] == "finished"
    assert done.record["rounds"][0]["missing"] == {"client-1": "internal"}


def test_a_client_of_a_sum_counts_for_all_samples_that_it_declares(tmp_path):
    """A sum has no single upload that could count for less, and the record must not say so."""
    transport = Direct(sum_nodes(tmp_path, 5, first=200))
    done = go(transport, tmp_path / "run", own=short(), patience=PATIENCE)
    RECORD.validate(done.record)
    assert [client["counted"] for client in done.record["clients"]] == [200, 40, 40, 40, 40]
    assert not any("limited" in client for client in done.record["clients"])


def test_a_void_round_burns_its_budget_and_the_run_goes_on(tmp_path):
    transport = Direct(sum_nodes(tmp_path, 5))
    transport.on_answer = lambda route, asked, told: (
        None if step_of(asked) == "set" and messages.unpack(asked)[0]["t"] == 0 else told
    )
    done = go(transport, tmp_path / "run", own=short(), patience=PATIENCE)
    first, second = done.record["rounds"]
    assert first["refused"] == {"silent": 5}
    assert second["uploads"] == 5
    assert "refused" not in second
    vaults_hold(transport)
    for node in transport.nodes.values():
        with Vault.open(node.vault, dataset=None) as vault:
            assert len(list(vault.entries())) == 2


BAD = "route-1"


@pytest.mark.parametrize("way", ["another key", "an old key", "the same key"])
def test_a_client_that_presents_the_key_of_another_keeps_no_run_from_beginning(tmp_path, way):
    """A key of the sum view is public: it is known by what it signs, not by a greeting.

    Where both give the same signed key, neither is counted, and the others go on.
    """
    transport = Direct(sum_nodes(tmp_path, 5))
    (first, *_) = transport.nodes.values()
    own = messages.unpack(device.make_greeting(first))[0]["policy"]["sum"]["member"]
    transport.on_hello = lambda r, told: (
        greeting(told, "policy.sum.member", own) if r == BAD else told
    )
    old = []

    def answer(blob, node):
        if node.name == "client-1" and step_of(blob) == "keys" and way != "another key":
            asked = replace(Request.from_blob(blob), receipt=None)
            old.append(device.answer_request(asked.to_blob(), first))
            return old[0] if way == "an old key" else old[-1]
        return device.answer_request(blob, node)

    transport.answer = answer
    done = go(transport, tmp_path / "run", own=short(), patience=PATIENCE)
    assert done.record["status"] == "finished"
    cohorts = [entry["cohort"] for entry in done.record["rounds"]]
    # The first of the old keys is the one of its own round.
    both, bad = [2, 3, 4], [0, 2, 3, 4]
    expected = {"another key": [bad] * 2, "an old key": [both, bad], "the same key": [both] * 2}
    assert cohorts == expected[way]
    vaults_hold(transport)


@pytest.mark.parametrize("step", ["keys", "shares", "input", "set", "unmask"])
def test_a_silent_client_that_greets_again_does_not_cost_every_round_a_deadline(tmp_path, step):
    """After three rounds it sits out one, two, … and then gets one try."""
    transport, waited = Direct(sum_nodes(tmp_path, 5)), []
    hello = device.make_greeting(transport.nodes[BAD])
    first = transport.greet
    transport.greet = lambda seconds: first(seconds) | {BAD: hello}

    def lose(route, asked, told):
        if route == BAD and (step_of(asked) == step or t_of(asked) in waited):
            waited.append(t_of(asked))
            return None
        return told

    transport.on_answer = lose
    done = go(transport, tmp_path / "run", own=short(**{"rounds.rounds": 8}), patience=PATIENCE)
    assert waited == [0, 1, 2, 4, 7]
    assert all(entry["uploads"] >= 4 for entry in done.record["rounds"])
    assert not any("void" in entry.get("refused", {}) for entry in done.record["rounds"])


@pytest.mark.parametrize("code", ["empty", "policy"])
def test_a_client_that_declines_for_good_is_asked_once_and_replaced(tmp_path, code):
    transport, asked = Direct(sum_nodes(tmp_path, 5)), []

    def decline(route, blob, told):
        if route != BAD:
            return told
        asked.append(step_of(blob))
        return messages.make_refusal(code, "no")

    transport.on_answer = decline
    own = short(**{"rounds.rounds": 4, "rounds.per_round": 4})
    done = go(transport, tmp_path / "run", own=own, patience=PATIENCE)
    assert asked == ["keys"]
    assert [entry["uploads"] for entry in done.record["rounds"]] == [4] * 4


def test_a_run_whose_clients_have_declined_for_good_is_over(tmp_path):
    """Two of five can make no sum of three: no void round is played, and nothing to mend."""
    transport = Direct(sum_nodes(tmp_path, 5))
    transport.on_answer = lambda r, asked, told: (
        messages.make_refusal("empty", "no") if r < "route-3" and t_of(asked) == 2 else told
    )
    done = go(transport, tmp_path / "run", own=short(**{"rounds.rounds": 4}), patience=PATIENCE)
    assert done.record["status"] == "finished"
    assert [entry["uploads"] for entry in done.record["rounds"]] == [5, 5]


def _break_shares(said):
    head, _ = messages.unpack(said)
    return messages.pack({**head, "shares": {}})


def _break_seal(said):
    head, _ = messages.unpack(said)
    return messages.pack({**head, "seal": "00" * 32})


@pytest.mark.parametrize(
    ("lost", "step", "way"),
    [
        (2, "keys", None),
        (2, "shares", None),
        (2, "shares", _break_shares),
        (2, "input", None),
        (2, "set", None),
        (1, "shares", _break_seal),
    ],
)
def test_rounds_without_a_sum_do_not_go_on_where_enough_clients_answer(tmp_path, lost, step, way):
    """Who sends no key is not counted on; who spoils three rounds is left out of the next."""
    transport = Direct(sum_nodes(tmp_path, 5))

    def answer(route, asked, told):
        if route >= f"route-{lost}":
            return told
        if way is None:
            return told if STEPS.index(step_of(asked)) < STEPS.index(step) else None
        return way(told) if step_of(asked) == step else told

    transport.on_answer = answer
    done = go(transport, tmp_path / "run", own=short(**{"rounds.rounds": 5}), patience=PATIENCE)
    rounds = done.record["rounds"]
    void = 0 if step == "keys" else 3
    assert [entry["uploads"] for entry in rounds[void : void + 1]] == [5 - lost]
    assert all("void" in entry["refused"] for entry in rounds[:void])
    assert len(rounds) == 5
    vaults_hold(transport)


def test_another_model_to_one_client_gives_no_sum_with_it(tmp_path):
    """Its key names another request: all others refuse the cohort, and nobody has paid."""
    transport = Direct(sum_nodes(tmp_path, 5))

    def answer(blob, node):
        if node.name == "client-1" and step_of(blob) == "keys":
            head, arrays = messages.unpack(blob)
            blob = messages.pack(head, {k: v + 1 for k, v in arrays.items()})
        return device.answer_request(blob, node)

    transport.answer = answer
    done = go(transport, tmp_path / "run", own=short(), patience=PATIENCE)
    assert [entry["uploads"] for entry in done.record["rounds"]] == [4, 4]
    vaults_hold(transport)


def test_two_sets_are_refused_by_a_client_that_was_started_anew(tmp_path):
    """S2 is durable: the second set comes to another process with the same vault."""
    transport = Direct(sum_nodes(tmp_path, 5))
    kept = {}

    def answer(blob, node):
        told = device.answer_request(blob, node)
        if step_of(blob) == "set":
            kept.setdefault(node.name, (blob, node, told))
        return told

    transport.answer = answer
    go(transport, tmp_path / "run", own=short(**{"rounds.rounds": 1}), patience=PATIENCE)
    for blob, node, told in kept.values():
        head, _ = messages.unpack(blob)
        assert device.answer_request(blob, node) == told
        other = messages.pack({**head, "set": head["set"][:-1]})
        said = messages.unpack(device.answer_request(other, node))[0]
        assert (said["kind"], said.get("code")) == ("refusal", "replay")


@pytest.mark.parametrize("kept", ["shares", "keys"])
def test_a_restored_vault_takes_no_further_part_in_a_round_it_may_have_forgotten(tmp_path, kept):
    """Two inputs under one mask give the difference of two noises that the others count on."""
    transport = Direct(sum_nodes(tmp_path, 5))
    answered = []

    def answer(blob, node):
        said = device.answer_request(blob, node)
        if node.name != "client-1" or answered:
            return said
        backup = tmp_path / "backup.vault"
        if step_of(blob) == kept:
            rebinding.backup(node.vault, backup)
        if step_of(blob) == "input":
            backup.replace(node.vault)
            rebinding.restore(node.vault)
            answered.append((said, device.answer_request(blob, node)))
        return said

    transport.answer = answer
    go(transport, tmp_path / "run", own=short(**{"rounds.rounds": 1}), patience=PATIENCE)
    ((first, second),) = answered
    assert messages.unpack(first, words=True)[0]["kind"] == "input"
    said = messages.unpack(second, words=True)[0]
    assert (said["kind"], said.get("code")) == ("refusal", "policy")


def test_a_retried_input_is_the_stored_one(tmp_path):
    transport = Direct(sum_nodes(tmp_path, 5))
    told = []

    def answer(blob, node):
        said = device.answer_request(blob, node)
        if step_of(blob) == "input":
            told.append((said, device.answer_request(blob, node)))
        return said

    transport.answer = answer
    go(transport, tmp_path / "run", own=short(), patience=PATIENCE)
    assert len(told) == 10
    assert all(first == again for first, again in told)
    vaults_hold(transport)


def test_rounds_that_nobody_pays_for_do_not_fill_the_ledger(tmp_path):
    """A key costs no budget: a server that only asks for keys gets so many, and no more lines."""
    transport, asked = Direct(sum_nodes(tmp_path, 5)), []

    def answer(blob, node):
        if step_of(blob) == "keys" and node.name == "client-0":
            asked.append((blob, node))
        return device.answer_request(blob, node)

    transport.answer = answer
    go(transport, tmp_path / "run", own=short(), patience=PATIENCE)
    blob, node = asked[-1]
    head, arrays = messages.unpack(blob)

    def open_rounds(first, count):
        said = [
            device.answer_request(messages.pack({**head, "run": f"{i:08x}"}, arrays), node)
            for i in range(first, first + count)
        ]
        with Vault.open(node.vault, dataset=None) as vault:
            return [messages.unpack(text)[0]["kind"] for text in said], vault.receipt().seq

    kinds, lines = open_rounds(0, MOST_UNPAID + 3)
    assert kinds == ["keys"] * MOST_UNPAID + ["refusal"] * 3
    with pytest.raises(VaultRefusal, match="ledger resume"):
        device.check_node(node)
    assert open_rounds(0, 2) == (["keys"] * 2, lines)  # the noted keys, once more
    views = {"privacy.view": "upload", "privacy.honest": None, "privacy.corrupt": None}
    uploads = short(**views, **{"rounds.rounds": 1})  # with one debit, which makes up for two keys
    go(Direct(transport.nodes), tmp_path / "uploads", own=uploads, patience=PATIENCE)
    kinds, _ = open_rounds(1000, 3)
    assert kinds == ["keys"] * 2 + ["refusal"]
    rebinding.resume(node.vault)
    assert open_rounds(2000, 1)[0] == ["keys"]


def test_both_accounts_grow_with_every_sum(tmp_path):
    """With equal clients and h = 2 the noise alone costs twice as much, but for rounding up."""
    transport = Direct(sum_nodes(tmp_path, 5))
    go(transport, tmp_path / "run", own=short(), patience=PATIENCE)
    for node in transport.nodes.values():
        with Vault.open(node.vault, dataset=None) as vault:
            assert 1.999 * vault.spent < vault.alone <= 2 * vault.spent


def test_a_run_that_was_asked_for_uploads_gets_them_from_the_same_budget(tmp_path):
    """A vault is one budget: what a sum has cost is gone for uploads, too."""
    nodes = sum_nodes(tmp_path, 5, run_share=0.3)
    go(Direct(nodes), tmp_path / "sums", own=short(), patience=PATIENCE)
    before = []
    for node in nodes.values():
        with Vault.open(node.vault, dataset=None) as vault:
            before.append((vault.spent, vault.alone))
    views = {"privacy.view": "upload", "privacy.honest": None, "privacy.corrupt": None}
    own = short(**views)
    done = go(Direct(nodes), tmp_path / "uploads", own=own, patience=PATIENCE)
    for (spent, alone), node in zip(before, nodes.values(), strict=True):
        with Vault.open(node.vault, dataset=None) as vault:
            assert vault.spent - spent == vault.alone - alone > 0
    # The budget's sums rest on other clients: what is said of uploads is said of this run's.
    stated = done.record["guarantee"]
    assert "sums-elsewhere" in stated["not_covered"]
    assert " in this run are (8, 1e-05)-" in stated["text"]
    path = tmp_path / "client-0.toml"
    text = path.read_text()
    path.write_text(text[: text.index("[policy.sum]")])
    nodes["route-0"] = Node.load(path)
    one = short(**views, **{"data.clients": 1})
    done = go(Direct({"route-0": nodes["route-0"]}), tmp_path / "one", own=one)
    assert "sums-elsewhere" in done.record["guarantee"]["not_covered"]


def test_clients_without_a_roster_or_with_other_terms_are_left_out(tmp_path):
    with pytest.raises(RunError, match="counts on no honest"):
        go(Direct(clients(tmp_path / "a")), tmp_path / "run", own=short(**{"data.clients": 3}))
    nodes = sum_nodes(tmp_path / "b", 5, honest=3)
    with pytest.raises(RunError, match="counts on 3 honest"):
        go(Direct(nodes), tmp_path / "run", own=short())


def test_both_accounts_are_booked_and_neither_is_exceeded(tmp_path):
    policy = Policy(8, 1e-5, 40, 1.0, run_share=1.0, honest=4, epsilon_alone=12.0, floor=1e-3)
    assert 1 < policy.share < 4
    with Vault.create(tmp_path / "v", policy, dataset="ab" * 32, second_ledger=True) as vault:
        units = FULL // 2
        vault.reserve("r", 0, "cd" * 32, [units], server="", facts={}, alone=units + 7)
        assert (vault.spent, vault.alone) == (units, units + 7)
        more = vault.limit_alone - vault.alone + 1
        with pytest.raises(Exception, match="nothing was booked"):
            vault.reserve("r", 1, "cd" * 32, [5], server="", facts={}, alone=more)
        assert (vault.spent, vault.alone) == (units, units + 7)
        vault.write_note("r", 0, "set", "one")
        with pytest.raises(RoundAnswered):
            vault.write_note("r", 0, "set", "two")
    with Vault.open(tmp_path / "v", dataset="ab" * 32) as vault:
        assert vault.find_note("r", 0, "set") == "one"
        assert vault.find_note("r", 1, "set") is None
        assert vault.alone == units + 7
        promise = " ".join(str(vault.promised.guarantee()).split())
        assert "whatever anyone does, (12, 1e-05)" in promise


def test_a_cap_on_what_holds_alone_that_is_tightened_later_is_kept(tmp_path):
    """As with epsilon: from then on nothing is released beyond it, and no past is denied."""
    policy = Policy(8, 1e-5, 40, 1.0, run_share=1.0, honest=50, epsilon_alone=30.0, floor=1e-3)
    with Vault.create(tmp_path / "v", policy, dataset="ab" * 32, second_ledger=True) as vault:
        units = FULL // 5
        alone = int(policy.share * units)
        vault.reserve("r", 0, "cd" * 32, [units], server="", facts={}, alone=alone)
        with pytest.raises(PolicyRefusal, match="a promise cannot be made for the past"):
            vault.tighten(replace(policy, epsilon_alone=9.0))
        vault.tighten(replace(policy, epsilon_alone=15.0))
        left = vault.policy.count_alone(vault.capacity) - alone
        assert 0 < left < 7 * units
        with pytest.raises(TankEmpty):
            vault.reserve("r", 1, "cd" * 32, [units], server="", facts={}, alone=left + 1)
        vault.reserve("r", 1, "cd" * 32, [units], server="", facts={}, alone=left)


def test_terms_of_sums_are_only_tightened_after_a_release():
    old = Policy(8, 1e-5, 40, 1.0, honest=4, corrupt=1)
    for honest, corrupt in ((5, 1), (4, 0)):
        with pytest.raises(PolicyRefusal, match="terms of sums"):
            require_tighter(old, Policy(8, 1e-5, 40, 1.0, honest=honest, corrupt=corrupt), spent=1)
    alone = replace(old, epsilon_alone=9.0)
    with pytest.raises(PolicyRefusal, match=r"epsilon_alone = 9, and .*epsilon_alone = 11 was"):
        require_tighter(alone, replace(old, epsilon_alone=11.0), spent=1)
    for terms in ({"honest": 3, "corrupt": 1}, {"honest": 4, "corrupt": 2}, {}):
        require_tighter(old, Policy(8, 1e-5, 40, 1.0, **terms), spent=1)
    require_tighter(old, Policy(8, 1e-5, 40, 1.0, honest=9), spent=0)
    for bad in ({"honest": 0}, {"corrupt": -1}, {"honest": 2.0}, {"epsilon_alone": 9.0},
                {"honest": 3, "epsilon_alone": 7.0}):  # fmt: skip
        with pytest.raises(InputError, match="sum"):
            Policy(8, 1e-5, 40, 1.0, **bad)


def test_a_record_states_no_more_than_a_vault_promised_under_its_first_terms(tmp_path):
    """Earlier sums of the same budget counted on more honest clients, and on fewer corrupt ones."""
    nodes = sum_nodes(tmp_path, 5, honest=3)
    terms = {"privacy.honest": 3, "rounds.rounds": 1}
    go(Direct(nodes), tmp_path / "first", own=short(**terms), patience=PATIENCE)
    for i, route in enumerate(nodes):
        path = tmp_path / f"client-{i}.toml"
        text = path.read_text().replace("honest = 3", "honest = 2")
        path.write_text(text.replace("corrupt = 1", "corrupt = 2"))
        nodes[route] = Node.load(path)
    terms = {"privacy.corrupt": 2, "rounds.rounds": 1}
    done = go(Direct(nodes), tmp_path / "second", own=short(**terms), patience=PATIENCE)
    RECORD.validate(done.record)
    assert done.record["rounds"][0]["uploads"] == 5
    stated = done.record["guarantee"]
    for node in nodes.values():
        with Vault.open(node.vault, dataset=None) as vault:
            assert (vault.policy.honest, vault.policy.corrupt) == (2, 2)
            assert stated["epsilon_alone"] >= vault.promised.compute_alone() * (1 - 1e-6)
            assert stated["corrupt"] <= vault.promised.corrupt


def test_a_node_file_with_bad_terms_says_so_in_a_sentence(tmp_path):
    (node, *_) = sum_nodes(tmp_path, 3, corrupt=0).values()
    path = tmp_path / "client-0.toml"
    text = path.read_text()
    for old, new, words in (
        ("honest = 2", "honest = 0", "sum.honest must be a whole number from 1"),
        ("honest = 2", "hones = 2", "unknown key policy.sum.hones"),
        ('roster = "roster.pem"', "", "policy.sum.roster must be a text"),
    ):
        path.write_text(text.replace(old, new))
        with pytest.raises(InputError, match=words):
            Node.load(path)
    path.write_text(text.replace("honest = 2", "honest = 4"))
    with pytest.raises(InputError, match=r"at least honest \+ corrupt = 4 keys, got 3"):
        device.check_node(Node.load(path))  # before a message meets it, by the file's own terms
    for name, words in (("roster.pem", "roster"), ("key-0.pem", "private key")):
        kept = (tmp_path / name).read_bytes()
        (tmp_path / name).write_bytes(b"x")
        with pytest.raises(InputError, match=words):
            sum_protocol.read_roster(tmp_path / name) if "roster" in name else (
                sum_protocol.read_key(tmp_path / name)
            )
        (tmp_path / name).write_bytes(kept)
    assert node.sum_files is not None


def test_a_node_file_without_its_terms_of_sums_tightens_nothing(tmp_path):
    """It takes part in no more sums; what was promised stays, and the terms can come back."""
    (node, *_) = sum_nodes(tmp_path, 3, corrupt=0).values()
    path = tmp_path / "client-0.toml"
    text = path.read_text()
    path.write_text(text[: text.index("[policy.sum]")])
    form = Form("softmax", (FEATURES,), CLASSES)
    params = {name: np.zeros(shape, np.float32) for name, shape in form.shapes().items()}
    answer = device.answer_request(ask(form=form, params=params).to_blob(), Node.load(path))
    assert kind(answer) == "upload"
    path.write_text(text)
    with Vault.open(node.vault, dataset=None) as vault:
        assert vault.spent > 0
        assert (vault.policy.honest, vault.policy) == (2, vault.promised)
        assert Node.load(path).make_policy(vault.policy.samples, vault.policy) == vault.policy


def test_certificate_and_statement_say_both_promises_of_sums(tmp_path):
    """On whom (ε, δ) rests, and what holds alone; a vault that released no sums says neither."""
    for honest, words in ((4, "as long as 4 of their clients are honest"), (1, "")):
        policy = Policy(2, 1e-5, 40, 1.0, honest=honest, corrupt=2 if honest > 1 else 0)
        place = tmp_path / f"{honest}.vault"
        with Vault.create(place, policy, dataset="ab" * 32, second_ledger=True) as vault:
            vault.reserve("r", 0, "cd" * 32, [FULL // 90], server="", facts={},
                          alone=honest * (FULL // 90))  # fmt: skip
            alone = vault.promised.compute_alone()
        statement = ledger.read_statement(place)
        page = html.unescape(render_certificate(statement))
        for text in (ledger.format_statement(statement), page):
            said = " ".join(re.sub("<[^>]+>", " ", text).split())
            assert ("whatever anyone does" in said) is (honest > 1)
            assert words in said
            if alone is not None:
                assert said.count(f"({format_claim(alone)}, 1e-05)") == 2  # above, and in the text
                assert "up to 2 of the other clients" in said
        told = statement.to_json()["guarantee"]
        assert ("epsilon_alone" in told, told.get("corrupt", 0)) == (honest > 1, policy.corrupt)


def test_what_holds_alone_pays_for_discrete_noise():
    """A vault states no smaller ε than docs/proofs.md (c) gives for h times its capacity."""
    for calibration in ("exact", "zcdp"):
        for epsilon, delta, honest in (
            (20, 0.1, 2),
            (1000, 1e-5, 6),
            (1e5, 1e-6, 40),
            (1e5, 0.5, 512),
        ):
            policy = Policy(epsilon, delta, 40, 1.0, honest=honest, calibration=calibration)
            least = bound_epsilon(delta, honest * policy.capacity())
            assert policy.compute_alone() >= least


def test_more_noises_than_the_proof_covers_are_refused():
    """docs/proofs.md (4) holds while h times the capacity is at most 3e8."""
    assert Policy(1e6, 0.5, 40, 1.0, honest=100).share == 100
    with pytest.raises(InputError, match=r"sum\.honest must be at most 149"):
        Policy(1e6, 0.5, 40, 1.0, honest=512)
    assert Policy(5e5, 0.5, 40, 1.0, honest=512, epsilon_alone=1e6).share < 3
