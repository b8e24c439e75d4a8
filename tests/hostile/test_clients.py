"""Clients that mean ill, inside a federation: the others begin, go on and finish without them."""

from __future__ import annotations

import math
import re
import shutil
from dataclasses import replace

import jsonschema
import numpy as np
import pytest

import sottovoce
from sottovoce import reports
from sottovoce.client import device, messages
from sottovoce.client.messages import Request
from sottovoce.client.node import Node
from sottovoce.client.vault import Policy
from sottovoce.errors import InputError, Malformed, OtherVersion, RunError
from sottovoce.models.base import Form
from sottovoce.privacy.calibration import capacity
from sottovoce.privacy.sensitivity import Recipe
from sottovoce.schedules.aggregate import average
from sottovoce.server import checks, coordinator
from sottovoce.server.coordinator import Patience, combine_uploads
from sottovoce.server.members import Member
from support.devices import ask, books_hold, opened, written
from support.federations import SCHEMA, go, settled
from support.hostile_device import WAYS, claim_samples, greeting
from support.in_process import Direct, clients, plan

pytestmark = pytest.mark.slow  # every round debits real vaults, durably

BAD = "route-1"


@pytest.mark.parametrize("way", WAYS)
def test_a_round_closes_with_the_honest(way, tmp_path):
    transport = Direct(clients(tmp_path))
    transport.on_answer = lambda route, asked, told: (
        WAYS[way](asked, told) if route == BAD else told
    )
    done = go(transport, tmp_path / "run", own=plan(**{"rounds.rounds": 2}))
    settled(done, transport)
    assert done.record["status"] == "finished"
    assert [entry["cohort"] for entry in done.record["rounds"]] == [[0, 2], [0, 2]]
    assert sum(done.record["rounds"][0]["refused"].values()) == 1
    assert done.record["clients"][1]["participations"] == 0


def test_a_flaw_of_the_checks_drops_one_client_only(tmp_path, monkeypatch):
    transport, read = Direct(clients(tmp_path)), checks.check_answer

    def flawed(blob, expected):
        if expected.member.name == "client-1":
            raise ZeroDivisionError
        return read(blob, expected)

    monkeypatch.setattr(checks, "check_answer", flawed)
    done = go(transport, tmp_path / "run", own=plan(**{"rounds.rounds": 2}))
    assert done.record["rounds"][0]["refused"] == {"malformed": 1}
    settled(done, transport)


def test_what_is_accepted_moves_the_model_by_no_more_than_its_weight(tmp_path):
    """As far as step and noise may go, all in one direction: p·(ηC + σ(√d + 8)) and no further."""
    transport, kept = Direct(clients(tmp_path)), []

    def push(route, asked, told):
        if route != BAD:
            return told
        said, own = messages.unpack(told)
        start = Request.from_blob(asked).params
        count = sum(v.size for v in own.values())
        most = 1.0 + said["sigma"][0] * (math.sqrt(count) + 8)
        kept.append((most, start))
        far = {k: (v + 0.999 * most / math.sqrt(count)).astype(np.float32)
               for k, v in start.items()}  # fmt: skip
        return messages.pack(said, far)

    transport.on_answer = push
    done = go(transport, tmp_path / "run", own=plan(**{"rounds.rounds": 2}))
    assert [entry["uploads"] for entry in done.record["rounds"]] == [3, 3]
    settled(done, transport, honest=False)
    (most, start), (_, after) = kept
    moved = math.sqrt(sum(float(np.sum((after[k] - start[k]) ** 2)) for k in start))
    assert 0.3 * most < moved <= most  # the mean of three that each went at most so far


@pytest.mark.parametrize("share", [1e-12, 0.001, 0.005, None])
def test_a_small_share_of_a_budget_is_no_way_to_go_further(tmp_path, share):
    """A client may say that a run gets next to nothing of its budget: its noise would be vast.

    It is left out before anything is spent, or its upload goes no further than 16 equal shares.
    """
    transport, far = Direct(clients(tmp_path, 4)), []
    transport.on_hello = lambda r, told: (
        greeting(told, "policy.run_share", share) if r == BAD else told
    )

    def push(route, asked, told):
        if route != BAD:
            return told
        said, own = messages.unpack(told)
        start, sigma = Request.from_blob(asked).params, 40 * said["sigma"][0]
        size = sum(v.size for v in own.values())
        far.append(sigma)
        return messages.pack(
            {**said, "sigma": [sigma]},
            {k: (w + sigma * 0.99).astype(np.float32) for k, w in start.items()} if size else own,
        )

    transport.on_answer = push
    own = plan(**{"rounds.rounds": 2})
    done = go(transport, tmp_path / "run", own=own, patience=Patience(3, gathering=0.5))
    assert "client-1" not in {c["name"] for c in done.record["clients"] if c["participations"]}
    assert len(far) == (0 if share is not None and share < 1 / 256 else 2)


HELLO = {
    "name": ["", "x" * 201, 7, None, "\x1b[2J", "a\nb", "\ud800", ["x"]],
    "features": [0, -1, 1.0, True, 2**33, None, 10**400, "30"],
    "classes": [0, 1.5, None, 10**400],
    "policy": [None, [], {}, "x"],
    "policy.samples": [0, -40, 40.0, 2**32 + 1, 10**400, None],
    "policy.unit": ["user", None, [], 1],
    "policy.clip": [-1.0, 10**400, "1", None, True],
    "policy.calibration": ["paper", "none", None, []],
    "policy.floor": [-1.0, 10**400, "1", True],
    "policy.max_rounds": [0, 1.0, None],
    "policy.run_share": [0, -0.5, 1.5, True, "1", 10**400],
    "policy.promised": [None, 3, [3], [3, -1], [3, 1.0], [True, 0], [3, 1, 0], [2000, 1]],
    "policy.max_steps": [0, 1.0, None, "16", 10**400],
    "budget": [[], {}, "x", 1],
    "budget.epsilon": [0, -1, 1e-9, 1.0, 7.99, 10**400, 1e299, None, "8"],
    "budget.delta": [0, 1, 0.9, 1e-200, None],
    "budget.capacity": [0, -1, 1e-300, 0.1, 2.776, 3.0, 1e9, 10**400, None],
    "budget.spent": [-1, 1e9, 10**400, None],
    "receipt": [None, [], {}],
    "receipt.vault": ["", "zz", None, 7],
    "receipt.seq": [-1, 2**53, 1.0, 10**400],
    "schema": ["sottovoce.hello/2", None, 1],
    "more": [1],
}


@pytest.fixture(scope="module")
def hello(tmp_path_factory):
    (node,) = clients(tmp_path_factory.mktemp("hello"), 1).values()
    return device.make_greeting(node)


@pytest.mark.parametrize("key", HELLO)
def test_greetings_that_are_none(hello, key):
    for value in HELLO[key]:
        blob = greeting(hello, key, value)
        with pytest.raises(Malformed):
            Member.from_hello(blob)
    assert Member.from_hello(hello).to_head() == messages.unpack(hello)[0]


def test_bytes_that_are_no_greeting(hello):
    upload = messages.pack({**messages.unpack(hello)[0]}, {"w": np.ones(1, np.float32)})
    for blob in (b"", hello[:-1], hello + b"\0", upload, ask().to_blob(), b"\0" * (1 << 17), None,
                 messages.make_refusal("vault", "no")):  # fmt: skip
        with pytest.raises(Malformed):
            Member.from_hello(blob)


MISFITS = {
    "features": ("features", 7),
    "classes": ("classes", 4),
    "clip": ("policy.clip", 0.5),
    "unit": ("policy.unit", "client"),
    "rounds": ("policy.max_rounds", 1),
    "steps": ("policy.max_steps", 1),
    "fuel": ("budget.spent", 2.775),
    "no greeting": ("schema", "x"),
}


@pytest.mark.parametrize("why", MISFITS)
def test_one_that_does_not_fit_keeps_nobody_from_beginning(why, tmp_path):
    transport = Direct(clients(tmp_path, 4))
    transport.on_hello = lambda route, told: greeting(told, *MISFITS[why]) if route == BAD else told
    own = plan(**{"rounds.rounds": 2, "local.steps": 2})
    done = go(transport, tmp_path / "run", own=own, patience=Patience(3, gathering=0.5))
    assert len(done.record["clients"]) == 3
    assert all(BAD not in routes for routes in transport.asked)
    short = Direct(transport.nodes)
    short.on_hello = transport.on_hello
    with pytest.raises(RunError, match=r"[03] of 4 clients .* \(another one greeted, but "):
        go(short, tmp_path / "other", own=own, patience=Patience(4, gathering=0.3))
    assert not (tmp_path / "other").exists()


LOSS = {"server.signal": "clients", "server.loss_bound": 3.0, "rounds.schedule": "discounted"}


@pytest.mark.parametrize("more", [{}, LOSS, {"local.steps": 2}, {"rounds.per_round": 2}], ids=str)
def test_a_floor_is_kept_or_its_client_left_out_but_never_paid_for_in_vain(more, tmp_path):
    """A floor up to 16 times an equal share's noise: every upload counts; above it: no request."""
    own = plan(**{"rounds.rounds": 2, **more})
    turns = 2 if own.rounds.per_round is None else 1  # 2 · 2/4: how often one is asked
    most = 16 * math.sqrt(turns / Policy(8.0, 1e-5, 40, 1.0).capacity())
    most *= math.sqrt(0.9) if more is LOSS else 1.0  # a part in ten pays for the loss
    near, far = (clients(tmp_path / name, 4, floor=most * by)
                 for name, by in (("near", 0.999), ("far", 1.001)))  # fmt: skip
    transport = Direct({r: (far if r == BAD else near)[r] for r in near})
    done = go(transport, tmp_path / "run", own=own, patience=Patience(3, gathering=0.5))
    if own.rounds.per_round is None:
        assert len(done.record["clients"]) == 3
    assert not any("refused" in entry for entry in done.record["rounds"])
    settled(done, transport)
    if own.rounds.per_round is None:
        with pytest.raises(RunError, match=r"client-1 has a floor of \S+, and \S+ is the most"):
            go(Direct({BAD: far[BAD]}), tmp_path / "other", own=own,
               patience=Patience(1, gathering=0.3))  # fmt: skip
        assert books_hold(far[BAD]).spent == 0


@pytest.mark.parametrize("hides", [False, True])
def test_one_client_more_than_the_plan_lists_ends_no_run(tmp_path, hides):
    """The plan says what it expects of three; a fourth that greets with them takes part, too."""
    nodes = clients(tmp_path, 3)
    policy = {"disclose": False} if hides else {}
    nodes["route-3"] = clients(tmp_path / "d", 1, **policy)["route-0"]
    lists = {"data.samples": [40, 40, 50], "privacy.epsilon": [8.0, 8.0, 4.0]}
    own = plan(**lists, **{"rounds.rounds": 1})
    done = go(Direct(nodes), tmp_path / "run", own=own, patience=Patience(3, gathering=0.5))
    assert [entry["uploads"] for entry in done.record["rounds"]] == [4]
    assert done.record["plan"]["data"]["samples"] == 50
    assert done.record["plan"]["privacy"]["epsilon"] == (4.0 if hides else [8.0] * 4)


def test_a_route_carries_one_client(tmp_path):
    """One that greets again as somebody else does not become two."""
    transport = Direct(clients(tmp_path, 3))
    first = transport.greet

    def twice(seconds):
        told = first(seconds)
        if BAD in told and "route-2" in told:
            transport.greeted.discard("route-2")
            other = device.make_greeting(transport.nodes.pop("route-2"))
            transport.nodes[BAD + "-gone"] = transport.nodes[BAD]
            transport.greeted.add(BAD + "-gone")
            return {"route-0": told["route-0"], BAD: told[BAD]} | {BAD: other}
        return told

    transport.greet = twice  # type: ignore[method-assign]
    with pytest.raises(RunError, match="2 of 3 clients"):
        go(transport, tmp_path / "run", patience=Patience(3, gathering=0.3))


OWNS = 10**6


def claiming(samples, route=BAD):
    """A client that greets with another number of samples, and repeats it in every upload."""
    hello, answer = claim_samples(samples)
    return (
        lambda r, told: hello(told) if r == route else told,
        lambda r, asked, told: answer(asked, told) if r == route else told,
    )


def weights_of(done):
    """How much each client's upload counts, if all come."""
    counted = np.array([c["counted"] for c in done.record["clients"]], dtype=float)
    return counted / counted.sum()


def test_a_client_counts_for_at_most_twice_the_median_whatever_it_declares(tmp_path):
    """It greets with a million samples among clients with 40, and would own the model."""
    transport = Direct(clients(tmp_path, 4))
    transport.on_hello, transport.on_answer = claiming(OWNS)
    done = go(transport, tmp_path / "run", own=plan(**{"rounds.rounds": 2}))
    jsonschema.validate(done.record, SCHEMA)
    bad = done.record["clients"][1]
    why = "declares more samples than twice the median"
    assert (bad["name"], bad["samples"], bad["counted"], bad.get("limited")) == (
        "client-1", OWNS, 80, why)  # fmt: skip
    assert weights_of(done)[1] == pytest.approx(0.4)
    assert not any("limited" in c for i, c in enumerate(done.record["clients"]) if i != 1)
    for entry in done.record["rounds"]:
        assert entry["uploads"] == 4
        assert entry["limited"] == {"client-1": why}
    page = reports.write_report(tmp_path / "run").read_text("utf-8")
    assert why in page
    assert "1,000,000" in page
    with np.load(tmp_path / "run" / "model.npz") as final:  # and the model is the mean by these
        blobs = [p.read_bytes() for p in sorted((tmp_path / "run" / "uploads").glob("00001-*"))]
        total = average([messages.unpack(b)[1] for b in blobs], weights_of(done))
        assert all(np.array_equal(final[k], total[k].astype(np.float32)) for k in total)


def test_precision_weights_follow_from_the_samples_that_count(tmp_path, monkeypatch):
    """A million samples make Δ, and with it the σ of an honest upload, as small as one likes."""
    transport, seen = Direct(clients(tmp_path, 4)), []
    transport.on_hello, transport.on_answer = claiming(OWNS)
    monkeypatch.setattr(
        coordinator,
        "combine_uploads",
        lambda plan, uploads, weight, model: (
            seen.append(weight) or combine_uploads(plan, uploads, weight, model)
        ),
    )
    own = plan(**{"rounds.rounds": 1, "server.weights": "precision", "server.divergence": 0.0})
    done = go(transport, tmp_path / "run", own=own)
    assert done.record["rounds"][0]["uploads"] == 4
    # σ of twice the samples is half of the others': four times as much at most, as one of 80.
    assert seen[0][1] <= 4 / 7 + 1e-6


@pytest.mark.parametrize("known", [False, True])
def test_an_upload_with_much_noise_moves_the_model_no_more_than_twice_the_median(
    tmp_path, monkeypatch, known
):
    """A client may say that it has little budget, and hide in its noise what it likes."""
    few = clients(tmp_path / "few", 2, epsilon=0.8)
    transport, seen = Direct({**clients(tmp_path, 4), BAD: few[BAD]}), []

    def spy(plan, uploads, weight, model):
        seen.append((weight, np.array([uploads[i].sigma[0] for i in sorted(uploads)])))
        return combine_uploads(plan, uploads, weight, model)

    monkeypatch.setattr(coordinator, "combine_uploads", spy)
    admitted = {f"client-{i}": 40 for i in range(4)} if known else None
    done = go(transport, tmp_path / "run", own=plan(**{"rounds.rounds": 1}), admitted=admitted)
    weight, sigma = seen[0]
    reach = np.sort(weight * sigma)
    assert sigma[1] > 5 * sigma[0]
    assert weight.sum() == pytest.approx(1)
    if known:  # the operator has written it down
        assert reach[-1] > 5 * reach[1]
        assert "limited" not in done.record["rounds"][0]
    else:
        assert reach[-1] == pytest.approx(2 * reach[1])
        why = {"client-1": "has more noise than twice the median"}
        assert done.record["rounds"][0]["limited"] == why


def test_a_client_that_keeps_its_numbers_is_not_told_by_what_it_counts_for(tmp_path):
    """That it declares more than twice the median, or has more noise, says something of n and σ."""
    for name, many in (("many samples", {"samples": 200}), ("much noise", {"epsilon": 0.8})):
        hidden = clients(tmp_path / name / "b", 2, disclose=False, **many)[BAD]
        nodes = clients(tmp_path / name, 4) | {BAD: hidden}
        done = go(Direct(nodes), tmp_path / name / "run", own=plan(**{"rounds.rounds": 1}))
        assert done.record["rounds"][0]["uploads"] == 4
        assert "limited" not in done.record["rounds"][0]
        assert not any("limited" in own for own in done.record["clients"])


def test_what_a_cut_client_counts_for_does_not_tell_of_one_that_hides(tmp_path):
    """It would be twice the median of all, and with few others that is the hidden number."""
    hidden = clients(tmp_path / "b", 3, 30, disclose=False)
    nodes = clients(tmp_path / "a", 2) | {"route-2": hidden["route-2"]}
    transport = Direct(nodes)
    transport.on_hello, transport.on_answer = claiming(OWNS, "route-0")
    done = go(transport, tmp_path / "run", own=plan(**{"rounds.rounds": 1}))
    jsonschema.validate(done.record, SCHEMA)
    for client in done.record["clients"]:
        assert client["counted"] in (None, client["samples"])


@pytest.mark.parametrize("n", [60, 80])
def test_an_honest_larger_client_counts_whole(tmp_path, n):
    """The paper's clients hold 400 to 1200, at most one and a half times the median."""
    nodes = clients(tmp_path, 3) | {"large": next(iter(clients(tmp_path / "b", 1, n).values()))}
    done = go(Direct(nodes), tmp_path / "run", own=plan(**{"rounds.rounds": 1}))
    settled(done, Direct(nodes))
    assert sorted(c["counted"] for c in done.record["clients"]) == [40, 40, 40, n]
    assert "limited" not in done.record["rounds"][0]


def test_a_large_client_counts_whole_where_its_samples_are_declared(tmp_path):
    """By the table of admitted clients (names, keys), or by the plan's own numbers."""

    def nodes(where):
        large = next(iter(clients(tmp_path / where / "b", 1, 400).values()))
        return clients(tmp_path / where, 3) | {"large": replace(large, name="large")}

    names = {f"client-{i}": 40 for i in range(3)}
    plain = go(Direct(nodes("1")), tmp_path / "run-1", own=plan(**{"rounds.rounds": 1}))
    assert plain.record["clients"][3]["counted"] == 80
    transport = Direct(nodes("2"))
    transport.keys["large"] = "SHA256:abc"
    for admitted, counted in ((names | {"large": 400}, 400), (names | {"SHA256:abc": 300}, 300)):
        out = tmp_path / f"run-{counted}"
        transport.greeted.clear()
        done = go(transport, out, own=plan(**{"rounds.rounds": 1}), admitted=admitted)
        assert done.record["clients"][3]["counted"] == counted
        assert done.record["clients"][3]["key"] == "SHA256:abc"
    assert (
        done.record["clients"][3]["limited"] == "declares more samples than were registered for it"
    )
    own = plan(**{"rounds.rounds": 1, "data.samples": [40, 40, 40, 400], "data.clients": 4})
    done = go(Direct(nodes("4")), tmp_path / "run-4", own=own)
    assert done.record["clients"][3]["counted"] == 400


def test_who_is_not_in_the_table_of_admitted_clients_takes_no_part(tmp_path):
    transport = Direct(clients(tmp_path, 4))
    admitted = {f"client-{i}": 40 for i in (0, 2, 3)}
    done = go(transport, tmp_path / "run", own=plan(**{"rounds.rounds": 1}),
              patience=Patience(3, gathering=0.5), admitted=admitted)  # fmt: skip
    assert [c["name"] for c in done.record["clients"]] == ["client-0", "client-2", "client-3"]
    with pytest.raises(RunError, match="client-1 is not in the table of admitted clients"):
        go(Direct(transport.nodes), tmp_path / "other", admitted=admitted)


def test_who_is_admitted_by_its_key_takes_no_name_from_another(tmp_path):
    """It calls itself as one that is admitted by name, and comes first."""
    transport = Direct(clients(tmp_path, 3))
    transport.keys = {route: f"SHA256:{route}" for route in transport.nodes}
    transport.on_hello = lambda r, told: (
        greeting(told, "name", "client-1") if r == "route-0" else told
    )
    admitted = {"SHA256:route-0": 40, "client-1": 40, "client-2": 40}
    done = go(transport, tmp_path / "run", own=plan(**{"rounds.rounds": 1}), admitted=admitted)
    assert {c["key"] for c in done.record["clients"]} == set(transport.keys.values())
    assert done.record["rounds"][0]["uploads"] == 3


@pytest.mark.parametrize("key", ["SHA256:stranger", "SHA256:route-2", None])
def test_who_calls_itself_by_the_key_of_another_is_not_admitted_in_its_place(tmp_path, key):
    """A name is chosen freely, and a key in the table stands for nobody but who has it."""
    transport = Direct(clients(tmp_path, 4))
    transport.keys = {route: f"SHA256:{route}" for route in transport.nodes if route != BAD}
    if key is not None:
        transport.keys[BAD] = key
    transport.on_hello = lambda r, told: (
        greeting(told, "name", "SHA256:route-3") if r == BAD else told
    )
    admitted = {"SHA256:route-0": 40, "SHA256:route-3": 10**6}
    if key == "SHA256:route-2":  # a key of its own that is in the table lets it in, as that key
        admitted["SHA256:route-2"] = 7
        transport.nodes.pop("route-2")
    done = go(transport, tmp_path / "run", own=plan(**{"rounds.rounds": 1}), admitted=admitted,
              patience=Patience(len(admitted), gathering=0.5))  # fmt: skip
    known = {c["key"]: c["counted"] for c in done.record["clients"]}
    assert known == {held: min(40, most) for held, most in admitted.items()}
    for node in ("route-0", "route-3"):
        assert books_hold(transport.nodes[node]).spent > 0


def test_two_clients_cannot_carry_one_name(tmp_path):
    """Both are told apart by key or vault; where names are admitted the second is turned away."""
    transport = Direct(clients(tmp_path))
    transport.on_hello = lambda r, told: greeting(told, "name", "ward") if r != "route-0" else told
    transport.keys["route-2"] = "SHA256:key"
    vault = Member.from_hello(device.make_greeting(transport.nodes[BAD])).vault
    done = go(transport, tmp_path / "run", own=plan(**{"rounds.rounds": 1}))
    names = [c["name"] for c in done.record["clients"]]
    assert sorted(names) == sorted(["client-0", "ward (SHA256:key)", f"ward ({vault})"])
    page = reports.write_report(tmp_path / "run").read_text("utf-8")
    assert all(name in page for name in names)
    one = {"client-0": 40, "ward": 40}
    again = Direct(transport.nodes)
    again.on_hello = transport.on_hello
    with pytest.raises(RunError, match=r"2 of 3 clients .* ward is not in .*, or was admitted bef"):
        go(again, tmp_path / "other", admitted=one)


def test_a_key_is_one_client_however_many_vaults_it_greets_with(tmp_path):
    """One may go and come back under another vault's id until there are enough clients."""
    transport = Direct(clients(tmp_path, 4))
    transport.keys = {"route-2": "SHA256:one", "route-3": "SHA256:one"}  # of one node
    with pytest.raises(RunError, match="3 of 4 clients"):
        go(transport, tmp_path / "run", patience=Patience(4, gathering=0.5))
    assert all(books_hold(node).spent == 0 for node in transport.nodes.values())
    again = Direct(transport.nodes)
    again.keys = transport.keys
    done = go(again, tmp_path / "other", own=plan(**{"rounds.rounds": 1}), patience=Patience(3))
    assert [c["name"] for c in done.record["clients"]] == ["client-0", "client-1", "client-3"]


def test_a_name_that_looks_told_apart_is_told_apart_again(tmp_path):
    transport = Direct(clients(tmp_path))
    vault = Member.from_hello(device.make_greeting(transport.nodes[BAD])).vault
    mine = f"client-1 ({vault})"
    transport.on_hello = lambda r, told: greeting(
        told, "name", mine if r == "route-2" else "client-1"
    )
    done = go(transport, tmp_path / "run", own=plan(**{"rounds.rounds": 1}))
    names = [c["name"] for c in done.record["clients"]]
    assert len(set(names)) == 3
    assert mine in names  # it is route-1's


@pytest.mark.parametrize("keys", [False, True])
def test_whoever_knows_a_vault_id_cannot_evict_its_client(tmp_path, keys):
    """A greeting with another client's vault, before it or in mid-run, by a route of its own."""
    transport = Direct(clients(tmp_path, 3))
    victim = device.make_greeting(transport.nodes[BAD])
    if keys:
        transport.keys = {route: f"SHA256:{route}" for route in (*transport.nodes, "thief")}
    first, seen = transport.greet, []

    def greet(seconds):
        told = first(seconds)
        seen.append(told)
        if keys and len(seen) == 1:  # it is even first
            return {"thief": victim, **told}
        return told if len(seen) < 3 else {**told, "thief": victim}

    transport.greet = greet  # type: ignore[method-assign]
    transport.nodes_of = transport.nodes
    asked = transport.ask
    transport.ask = lambda requests, seconds: asked(  # type: ignore[method-assign]
        {r: b for r, b in requests.items() if r != "thief"}, seconds
    )
    done = go(transport, tmp_path / "run", own=plan(**{"rounds.rounds": 4}),
              patience=Patience(4 if keys else 3, gathering=0.5))  # fmt: skip
    assert all(BAD in routes for routes in transport.asked)
    assert [entry["uploads"] for entry in done.record["rounds"]] == [3] * 4
    who = {c["name"]: c for c in done.record["clients"]}
    if keys:
        assert who[f"client-1 (SHA256:{BAD})"]["participations"] == 4
        assert who["client-1 (SHA256:thief)"]["participations"] == 0
    else:
        assert len(who) == 3


def test_a_resumed_run_takes_no_key_but_those_it_knows(tmp_path):
    """Who greets first with a known vault and a strange key does not become its client."""
    transport, out = Direct(clients(tmp_path, 3)), tmp_path / "run"
    transport.keys = {route: f"SHA256:{route}" for route in transport.nodes}

    def stop(done):
        if done.t == 0:
            raise KeyboardInterrupt

    own = plan(**{"rounds.rounds": 3})
    with pytest.raises(KeyboardInterrupt):
        go(transport, out, own=own, on_round=stop)
    again = Direct(transport.nodes)
    again.keys = transport.keys | {"thief": "SHA256:thief"}
    first, victim = again.greet, device.make_greeting(transport.nodes[BAD])
    again.greet = lambda seconds: {"thief": victim, **first(seconds)}  # type: ignore[method-assign]
    done = go(again, out, resume=True)
    assert [entry["uploads"] for entry in done.record["rounds"]] == [3] * 3
    assert all(BAD in routes for routes in again.asked)
    shutil.rmtree(out)
    fresh = Direct(clients(tmp_path / "b", 3))
    fresh.keys = transport.keys
    with pytest.raises(KeyboardInterrupt):
        go(fresh, out, own=own, on_round=stop)
    alone = Direct({route: node for route, node in fresh.nodes.items() if route != BAD})
    alone.keys = again.keys
    victim, others = device.make_greeting(fresh.nodes[BAD]), alone.greet
    alone.greet = lambda seconds: {"thief": victim, **others(seconds)}  # type: ignore[method-assign]
    done = go(alone, out, resume=True, patience=Patience(3, gathering=0.5))  # its client stays away
    assert all("thief" not in routes for routes in alone.asked)
    assert [entry["uploads"] for entry in done.record["rounds"]] == [3, 2, 2]


def test_a_run_that_knew_no_keys_takes_the_first_that_greet(tmp_path):
    """It began without encryption, or with a version that did not store them."""
    transport, out = Direct(clients(tmp_path, 3)), tmp_path / "run"

    def stop(done):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        go(transport, out, own=plan(**{"rounds.rounds": 2}), on_round=stop)
    again = Direct(transport.nodes)
    again.keys = {route: f"SHA256:{route}" for route in transport.nodes}
    done = go(again, out, resume=True)
    assert [entry["uploads"] for entry in done.record["rounds"]] == [3] * 2


def test_a_budget_may_be_hidden_or_tightened_in_mid_run(tmp_path):
    """Both are the client's right, and neither costs it the run; what was hidden stays hidden."""
    transport, out = Direct(clients(tmp_path, 3)), tmp_path / "run"

    def change(path, old, new):
        path.write_text(path.read_text("utf-8").replace(old, new), "utf-8")
        return Node.load(path)

    def after(done):
        if done.t == 0:
            nodes = transport.nodes
            nodes[BAD] = change(
                tmp_path / "client-1.toml", "[policy]", "[policy]\ndisclose = false"
            )
            nodes["route-2"] = change(tmp_path / "client-2.toml", "epsilon = 8.0", "epsilon = 6.0")

    tight = Direct(clients(tmp_path / "b", 1))
    transport.nodes["late"] = tight.nodes["route-0"]
    first = transport.greet

    def greet(seconds):  # tightened between its greeting and its first upload
        told = first(seconds)
        if "late" in told:
            transport.nodes["late"] = change(
                tmp_path / "b" / "client-0.toml", "epsilon = 8.0", "epsilon = 4.0"
            )
        return told

    transport.greet = greet  # type: ignore[method-assign]
    transport.on_hello = lambda r, told: greeting(told, "name", "late") if r == "late" else told
    done = go(transport, out, on_round=after)
    jsonschema.validate(done.record, SCHEMA)
    assert reports.write_report(out).exists()
    assert [entry["uploads"] for entry in done.record["rounds"]] == [4] * 4
    who = {c["name"]: c for c in done.record["clients"]}
    assert who["late"]["epsilon"] == 4.0
    assert who["client-2"]["epsilon"] == 8.0  # what was promised to what is released already
    hidden = who["client-1"]
    assert all(hidden[key] is None for key in ("samples", "counted", "epsilon", "spent"))
    with np.load(out / "trace.npz") as trace:
        place = list(who).index("client-1")
        assert np.isnan(trace["sigma"][1:, place]).all()
    assert "undisclosed-budgets" in done.record["guarantee"]["not_covered"]


def test_who_shows_a_budget_again_does_not_cost_the_others_their_record(tmp_path):
    """Hidden for a round, and then a budget so small that the first round exceeded it."""
    transport = Direct(clients(tmp_path))
    worth = float(capacity(1e-3, 1e-5))
    small = {"epsilon": 1e-3, "delta": 1e-5, "capacity": worth, "spent": worth}

    def change(route, asked, told):
        if route != BAD:
            return told
        said, own = messages.unpack(told)
        return messages.pack({**said, "budget": (said["budget"], None, small)[said["t"]]}, own)

    transport.on_answer = change
    done = go(transport, tmp_path / "run", own=plan(**{"rounds.rounds": 3}))
    assert done.record["status"] == "finished"
    assert [entry["cohort"] for entry in done.record["rounds"]] == [[0, 1, 2], [0, 1, 2], [0, 2]]
    assert done.record["rounds"][2]["missing"] == {"client-1": "malformed"}
    assert done.record["clients"][1]["epsilon"] is None


def test_records_and_logs_say_who_and_why(tmp_path, caplog):
    transport = Direct(clients(tmp_path))
    transport.on_answer = lambda route, asked, told: b"junk" if route == BAD else told
    done = go(transport, tmp_path / "run", own=plan(**{"rounds.rounds": 2}))
    assert [entry["missing"] for entry in done.record["rounds"]] == [{"client-1": "malformed"}] * 2
    assert all(c["version"] == sottovoce.__version__ for c in done.record["clients"])
    assert "client client-1 sent no upload" in caplog.text
    page = reports.write_report(tmp_path / "run").read_text("utf-8")
    assert "malformed in 2 of 2 rounds" in page


def test_another_version_is_a_refusal_with_both_versions(tmp_path, caplog):
    """A client that is asked in the next protocol says so, logs it, and is no broken client."""
    transport = Direct(clients(tmp_path))
    ask_them = device.answer_request

    def newer(blob, node):
        if node.name != "client-1":
            return ask_them(blob, node)
        text, body = opened(blob)
        text["head"]["schema"] = "sottovoce.request/3"
        return ask_them(written(text, body), node)

    transport.answer = newer
    done = go(transport, tmp_path / "run", own=plan(**{"rounds.rounds": 1}))
    assert done.record["rounds"][0]["refused"] == {"version": 1}
    both = rf"request/3 and sottovoce {re.escape(sottovoce.__version__)} reads request/1"
    assert re.search(rf"refused a request of \d+ bytes \(version\): the message is a {both}",
                     caplog.text)  # fmt: skip
    head, _ = opened(device.make_greeting(transport.nodes[BAD]))
    head["head"]["schema"] = "sottovoce.hello/3"
    with pytest.raises(OtherVersion, match="hello/3 and sottovoce"):
        Member.from_hello(written(head))


def test_another_version_of_the_package_takes_part_and_is_named(tmp_path, monkeypatch):
    """The form of the messages decides, not the version: a client of 0.0.9 is asked and counts."""
    transport = Direct(clients(tmp_path))
    greet = device.make_greeting

    def older(node):
        if node.name != "client-1":
            return greet(node)
        text, body = opened(greet(node))
        text["head"]["version"] = "0.0.9"
        return written(text, body)

    monkeypatch.setattr(device, "make_greeting", older)
    done = go(transport, tmp_path / "run", own=plan(**{"rounds.rounds": 1}))
    assert "missing" not in done.record["rounds"][0]
    versions = {client["name"]: client["version"] for client in done.record["clients"]}
    assert versions.pop("client-1") == "0.0.9"
    assert set(versions.values()) == {sottovoce.__version__}


def test_a_client_logs_what_it_refused_and_by_which_rule(tmp_path, caplog):
    (node,) = clients(tmp_path, 1, samples=40).values()
    form = Form("mlp", (30,), 3, {"hidden": 8})
    params = {n: np.zeros(s, np.float32) for n, s in form.shapes().items()}
    blob = ask(form=form, params=params, recipe=Recipe(1.0, 5.0), server="study").to_blob()
    device.answer_request(blob, node)
    assert "refused round 1 of 8 of run 0badc0de for study (policy): clip must be" in caplog.text
    with np.load(tmp_path / "client-0.npz") as rows:
        assert str(rows["x"][0, 0])[:8] not in caplog.text


def test_patience_is_checked():
    for wrong in ({"clients": 0}, {"minimum": 0}, {"tries": 0}, {"minimum": 1.5}):
        with pytest.raises(InputError, match="must be a whole number ≥ 1"):
            Patience(**{"clients": 3, **wrong})
    for name in ("gathering", "deadline", "pause"):
        for wrong in (-1.0, float("nan"), float("inf"), "60", None, True, 1e8, 10**400):
            with pytest.raises(InputError, match=f"{name} must be seconds"):
                Patience(clients=3, **{name: wrong})
    for name in ("gathering", "deadline"):
        with pytest.raises(InputError, match=f"{name} must be seconds above 0"):
            Patience(clients=3, **{name: 0})
    assert Patience(clients=3, pause=0).compute_pause(2) == 0
