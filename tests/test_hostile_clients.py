"""Clients that mean ill, inside a federation: the others begin, go on and finish without them."""

from __future__ import annotations

import math

import numpy as np
import pytest
from devices import ask, books_hold, opened, written
from in_process import Direct, clients, plan
from test_coordinator import go, settled

from sottovoce import device, protocol, wire
from sottovoce.coordinator import Patience
from sottovoce.errors import InputError, Malformed, RunError
from sottovoce.protocol import Request
from sottovoce.server import checks
from sottovoce.server.registry import Member
from sottovoce.vault import Policy

pytestmark = pytest.mark.slow  # every round debits real vaults, durably

BAD = "route-1"


def changed(blob, arrays=lambda a: a, **head):
    """An honest upload with other arrays or another head, sealed again."""
    said, own = wire.unpack(blob)
    budget = {**said["budget"], **head.pop("budget", {})}
    return wire.pack({**said, "budget": budget, **head}, arrays(own))


def every(number):
    return lambda arrays: {k: np.full_like(v, number) for k, v in arrays.items()}


WAYS = {
    "nothing at all": lambda asked, told: b"",
    "a text": lambda asked, told: "upload",
    "the request": lambda asked, told: asked,
    "half": lambda asked, told: told[: len(told) // 2],
    "ten million bytes": lambda asked, told: told + b"\0" * 10**7,
    "no numbers": lambda asked, told: changed(told, every(np.nan)),
    "infinities": lambda asked, told: changed(told, every(-np.inf)),
    "large numbers": lambda asked, told: changed(told, every(1e38)),
    "one number for all": lambda asked, told: changed(
        told, lambda a: {k: v.reshape(-1)[:1] for k, v in a.items()}
    ),
    "another round": lambda asked, told: changed(told, t=1000),
    "huge σ": lambda asked, told: changed(told, every(1e30), sigma=[1e30]),
    "no σ": lambda asked, told: changed(told, sigma=[0.0]),
    "free of charge": lambda asked, told: changed(told, budget={"spent": 0.0}),
    "beyond floats": lambda asked, told: changed(told, sigma=[10**400]),
    "spent beyond floats": lambda asked, told: changed(told, budget={"spent": 10**400}),
    "samples for weight": lambda asked, told: changed(told, samples=2**32),
    "a refusal of its own making": lambda asked, told: wire.pack(
        {"schema": protocol.ANSWER, "kind": "refusal", "code": ["\x1b"], "text": 7}
    ),
    "silence": lambda asked, told: None,
    **{
        f"a refusal: {code}": lambda asked, told, code=code: protocol.refusal(code, "\x1b[2J")
        for code in protocol.CODES
    },
}


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
    transport, read = Direct(clients(tmp_path)), checks.read

    def flawed(blob, expected):
        if expected.member.name == "client-1":
            raise ZeroDivisionError
        return read(blob, expected)

    monkeypatch.setattr(checks, "read", flawed)
    done = go(transport, tmp_path / "run", own=plan(**{"rounds.rounds": 2}))
    assert done.record["rounds"][0]["refused"] == {"malformed": 1}
    settled(done, transport)


def test_what_is_accepted_moves_the_model_by_no_more_than_its_weight(tmp_path):
    """As far as step and noise may go, all in one direction: p·(ηC + σ(√d + 8)) and no further."""
    transport, kept = Direct(clients(tmp_path)), []

    def push(route, asked, told):
        if route != BAD:
            return told
        said, own = wire.unpack(told)
        start = Request.from_blob(asked).params
        count = sum(v.size for v in own.values())
        most = 1.0 + said["sigma"][0] * (math.sqrt(count) + 8)
        kept.append((most, start))
        far = {k: (v + 0.999 * most / math.sqrt(count)).astype(np.float32)
               for k, v in start.items()}  # fmt: skip
        return wire.pack(said, far)

    transport.on_answer = push
    done = go(transport, tmp_path / "run", own=plan(**{"rounds.rounds": 2}))
    assert [entry["uploads"] for entry in done.record["rounds"]] == [3, 3]
    settled(done, transport, honest=False)
    (most, start), (_, after) = kept
    moved = math.sqrt(sum(float(np.sum((after[k] - start[k]) ** 2)) for k in start))
    assert 0.3 * most < moved <= most  # the mean of three that each went at most so far


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


def greeting(blob, key, value):
    text, _ = opened(blob)
    *way, last = key.split(".")
    place = text["head"]
    for step in way:
        place = place[step]
    place[last] = value
    return written(text)


@pytest.fixture(scope="module")
def hello(tmp_path_factory):
    (node,) = clients(tmp_path_factory.mktemp("hello"), 1).values()
    return device.hello(node)


@pytest.mark.parametrize("key", HELLO)
def test_greetings_that_are_none(hello, key):
    for value in HELLO[key]:
        blob = greeting(hello, key, value)
        with pytest.raises(Malformed):
            Member.from_hello(blob)
    assert Member.from_hello(hello).to_head() == wire.unpack(hello)[0]


def test_bytes_that_are_no_greeting(hello):
    upload = wire.pack({**wire.unpack(hello)[0]}, {"w": np.ones(1, np.float32)})
    for blob in (b"", hello[:-1], hello + b"\0", upload, ask().to_blob(), b"\0" * (1 << 17), None,
                 protocol.refusal("vault", "no")):  # fmt: skip
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
    with pytest.raises(RunError, match=r"[03] of 4 clients .* of one that did, "):
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


def test_a_route_carries_one_client(tmp_path):
    """One that greets again as somebody else does not become two."""
    transport = Direct(clients(tmp_path, 3))
    first = transport.greet

    def twice(seconds):
        told = first(seconds)
        if BAD in told and "route-2" in told:
            transport.greeted.discard("route-2")
            other = device.hello(transport.nodes.pop("route-2"))
            transport.nodes[BAD + "-gone"] = transport.nodes[BAD]
            transport.greeted.add(BAD + "-gone")
            return {"route-0": told["route-0"], BAD: told[BAD]} | {BAD: other}
        return told

    transport.greet = twice  # type: ignore[method-assign]
    with pytest.raises(RunError, match="2 of 3 clients"):
        go(transport, tmp_path / "run", patience=Patience(3, gathering=0.3))


def test_patience_is_checked():
    for wrong in ({"clients": 0}, {"minimum": 0}, {"tries": 0}, {"minimum": 1.5}):
        with pytest.raises(InputError, match="must be a whole number ≥ 1"):
            Patience(**{"clients": 3, **wrong})
    for name in ("gathering", "round", "pause"):
        for wrong in (-1.0, float("nan"), float("inf"), "60", None, True, 1e8, 10**400):
            with pytest.raises(InputError, match=f"{name} must be seconds"):
                Patience(clients=3, **{name: wrong})
    for name in ("gathering", "round"):
        with pytest.raises(InputError, match=f"{name} must be seconds above 0"):
            Patience(clients=3, **{name: 0})
    assert Patience(clients=3, pause=0).before(2) == 0
