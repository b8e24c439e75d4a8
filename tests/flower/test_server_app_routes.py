"""Bytes to nodes and back: hostile nodes cost their own answer alone, no word of theirs is kept."""

from __future__ import annotations

import shutil
import signal
import subprocess
import threading
from types import SimpleNamespace

import numpy as np
import pytest
from cryptography.hazmat.primitives import serialization
from flwr.app import ArrayRecord, ConfigRecord, Error, Message, MetricRecord, RecordDict

from sottovoce.client import device as sottovoce_device
from sottovoce.client import messages
from sottovoce.client.vault import Vault
from sottovoce.flower import certificates, client_app, transport
from sottovoce.flower.transport import Asking, NodeDirectory
from sottovoce.models.base import Form
from support.devices import ask as asked
from support.devices import make_node
from support.grids import FakeGrid, call, identity, said  # noqa: F401 - for every test of a grid
from support.imports import modules_after


def echo(message):
    return said(message, transport.read_record(message, "request", 100))


def elsewhere(message):
    reply = echo(message)
    reply.metadata.__dict__["_src_node_id"] = 99
    return reply


def foreign(message):
    reply = echo(message)
    reply.metadata.__dict__["_reply_to_message_id"] = "m-of-another-round"
    return reply


def fails(message):
    raise ValueError("bytes that cannot be decoded")


class Hanging:
    """A node whose reply is announced and comes only when the test says so."""

    def __init__(self):
        self.release, self.gave_up = threading.Event(), False

    def __call__(self, message):
        self.gave_up = not self.release.wait(900)


def error(code):
    return lambda message: Message(Error(code, "secret words of a node"), reply_to=message)


HOSTILE = {
    "another key": (lambda m: said(m, b"x", key="request"), "at once"),
    "another record": (lambda m: said(m, b"x", name="other"), "at once"),
    "text": (lambda m: said(m, "x"), "at once"),
    "a list": (lambda m: said(m, [b"x"]), "at once"),
    "arrays": (lambda m: said(m, record=ArrayRecord()), "at once"),
    "metrics": (lambda m: said(m, record=MetricRecord({"answer": 1.0})), "at once"),
    "too long": (lambda m: said(m, b"x" * 101), "at once"),
    "nothing in it": (lambda m: Message(RecordDict(), reply_to=m), "at once"),
    "another sender": (elsewhere, "at once"),
    "for another message": (foreign, "late"),
    "not decodable": (fails, "late"),
    "announced, never sent": (Hanging(), "late"),
    "silence": (lambda m: None, "late"),
    "offline": (error(5), "at once"),
    "expired": (error(3), "late"),
    "killed": (error(8), "at once"),
    "failed": (error(2), "at once"),
    "a code of the future": (error(77), "at once"),
}


def ask_nodes(grid, requests, *, seconds, limit):
    """Every node asked is in the result, with its answer or None."""
    return Asking(grid, requests, seconds=seconds, limit=limit).wait(seconds)


class TestAsk:
    def test_each_node_gets_its_own_bytes_and_its_own_answer(self):
        grid = FakeGrid({1: echo, 2: echo, 3: echo})
        requests = {1: b"one", 3: b"three"}
        assert ask_nodes(grid, requests, seconds=5, limit=100) == requests
        assert ask_nodes(grid, {}, seconds=5, limit=100) == {}

    @pytest.mark.parametrize("kind", HOSTILE)
    def test_a_hostile_node_costs_its_own_answer_alone(self, kind):
        node, when = HOSTILE[kind]
        grid = FakeGrid({1: echo, 2: node, 3: echo})
        # The deadline is waited for only where nothing comes; the honest ones need far less.
        seconds = 3 if when == "late" else 900
        answers = ask_nodes(grid, {1: b"a", 2: b"b", 3: b"c"}, seconds=seconds, limit=100)
        assert answers == {1: b"a", 2: None, 3: b"c"}
        if isinstance(node, Hanging):  # the others' answers were there while it still hung
            assert not node.gave_up
            node.release.set()

    def test_an_unknown_node_is_offline(self):
        answers = ask_nodes(FakeGrid({1: echo}), {1: b"a", 2: b"b"}, seconds=5, limit=100)
        assert answers == {1: b"a", 2: None}

    def test_work_expires_with_the_deadline(self):
        grid = FakeGrid({1: echo})
        ask_nodes(grid, {1: b"a"}, seconds=7.5, limit=100)
        assert [message.metadata.ttl for message in grid.sent.values()] == [7.5]

    def test_waiting_can_be_ended_by_a_signal_that_a_thread_raises(self):
        """That is how Flower stops a ServerApp; a long wait on a lock would not notice."""

        def stop(*_):
            raise InterruptedError

        before = signal.signal(signal.SIGUSR1, stop)
        try:
            threading.Timer(0.2, signal.raise_signal, [signal.SIGUSR1]).start()
            with pytest.raises(InterruptedError):  # and not the end of the deadline
                ask_nodes(FakeGrid({1: lambda m: None}), {1: b"a"}, seconds=900, limit=100)
        finally:
            signal.signal(signal.SIGUSR1, before)

    def test_many_nodes(self):
        grid = FakeGrid(dict.fromkeys(range(200), echo))
        requests = {node: str(node).encode() for node in range(200)}
        assert ask_nodes(grid, requests, seconds=900, limit=100) == requests


class TestRoll:
    def roll(self, names, **more):
        def greeting(name):
            return lambda m: (
                said(m, name.encode()) if m.metadata.message_type == "query" else echo(m)
            )

        nodes = {node: greeting(name) for node, name in names.items()}
        return NodeDirectory(FakeGrid({**nodes, **more}), self.identify, limit=100)

    @staticmethod
    def identify(hello):
        if hello == b"junk":
            raise ValueError("no client says this")
        return hello.decode()

    def test_clients_are_known_by_their_own_ids(self):
        roll = self.roll({11: "ann", 12: "bob"})
        assert {c: seat.node for c, seat in call(roll, 2, 5).items()} == {
            "ann": 11,
            "bob": 12,
        }
        answers = roll.ask({"ann": b"a", "bob": b"b", "cid": b"c"}, seconds=5)
        assert answers == {"ann": b"a", "bob": b"b"}

    def test_a_client_that_comes_back_under_another_node_id_keeps_its_name(self):
        roll = self.roll({11: "ann", 12: "bob"})
        call(roll, 2, 5)
        roll.grid.nodes = {13: roll.grid.nodes[11], 12: roll.grid.nodes[12]}
        seats = call(roll, 2, 5)
        assert {c: seat.node for c, seat in seats.items()} == {"ann": 13, "bob": 12}

    def test_a_second_node_with_the_same_name_does_not_take_the_seat(self):
        roll = self.roll({11: "ann"})
        call(roll, 1, 5)
        roll.grid.nodes[12] = roll.grid.nodes[11]
        roll.grid.nodes[13] = lambda m: said(m, b"junk")
        assert {seat.node for seat in call(roll, 2, 0.5).values()} == {11}

    def test_a_key_that_greets_as_another_client_is_another_client(self, tmp_path):
        """Before the right one, beside it and after it: nobody is evicted, all are told apart."""
        keys = {}
        for node in (11, 12):
            pub = certificates.make_node_key(tmp_path, f"n{node}").public
            keys[node] = serialization.load_ssh_public_key(pub.read_bytes()).public_bytes(
                serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
            )
            shown = subprocess.run(["ssh-keygen", "-lf", pub], capture_output=True, text=True) \
                if shutil.which("ssh-keygen") else None  # fmt: skip
            assert shown is None or transport.fingerprint(keys[node]) in shown.stdout
        roll = self.roll({12: "ann"})  # who only knows the name comes first
        roll.grid.keys, roll.grid._insecure = keys, False
        assert set(roll.greet(5)) == {"ann"}
        roll.grid.nodes[11] = roll.grid.nodes[12]
        mine = transport.fingerprint(keys[11])
        assert set(roll.greet(5)) == {f"ann {mine}"}
        assert roll.key(f"ann {mine}") == mine
        assert roll.key("ann") == transport.fingerprint(keys[12])
        assert roll.ask({f"ann {mine}": b"a"}, 5) == {f"ann {mine}": b"a"}
        roll.grid.nodes.pop(12)  # gone, and back: it is still the other one
        assert set(call(roll, 1, 5)) == {f"ann {mine}"}

    def test_one_that_came_back_under_another_id_gets_its_seat_when_the_old_one_is_gone(
        self, monkeypatch
    ):
        """Without authentication a restarted node has a new id while the old one counts online."""
        monkeypatch.setattr(transport, "GREET_AGAIN", 0.2)
        roll = self.roll({11: "ann"})
        call(roll, 1, 5)
        roll.grid.nodes[12] = roll.grid.nodes[11]
        call(roll, 0, 5)
        del roll.grid.nodes[11]
        assert {s.node for s in call(roll, 1, 5).values()} == {12}

    @pytest.mark.slow
    def test_a_node_that_hangs_at_the_greeting_is_asked_less_and_less(self, monkeypatch):
        monkeypatch.setattr(transport, "GREET_AGAIN", 0.4)
        roll = self.roll({11: "ann"}, **{"12": lambda m: None})
        roll.grid.nodes[12] = roll.grid.nodes.pop("12")
        monkeypatch.setattr(transport, "PATIENCE", 0.1)
        call(roll, 2, 6)
        asked = [m for m in roll.grid.sent.values() if m.metadata.dst_node_id == 12]
        # At 0, 0.4, 1.2, 2.8 and 6 s at the earliest, and not 60 times.
        assert 2 <= len(asked) <= 5
        assert set(roll.seats) == {"ann"}
        sent = len(roll.grid.sent)
        call(roll, 0, 900)  # nobody new: a round loses no time
        assert len(roll.grid.sent) == sent

    def test_nobody_waits_for_a_node_that_hangs_at_its_greeting(self, monkeypatch):
        """It may say who it is later; until then the others' rounds go on."""
        monkeypatch.setattr(transport, "AT_ONCE", 0.5)
        monkeypatch.setattr(transport, "PATIENCE", 900.0)
        ready = threading.Event()
        roll = self.roll({11: "ann"})
        roll.grid.nodes[12] = lambda m: said(m, b"bob") if ready.is_set() else None
        assert set(call(roll, 0, 900)) == {"ann"}
        assert set(call(roll, 0, 900)) == {"ann"}
        assert len(roll.grid.sent) == 2  # its first greeting is still awaited
        ready.set()
        assert set(call(roll, 2, 900)) == {"ann", "bob"}
        assert len(roll.grid.sent) == 2

    def test_a_node_has_one_seat_whatever_it_calls_itself(self):
        """Else one registered key could be asked, and count, as several clients."""
        roll = self.roll({11: "ann"})
        calls = iter(["bob", "cid", "dan"])

        def changing(m):
            return said(m, next(calls).encode()) if m.metadata.message_type == "query" else None

        roll.grid.nodes[12] = changing
        assert set(roll.greet(5)) == {"ann", "bob"}
        for name in ("cid", "dan"):
            roll.ask({"bob": b"b", "cid": b"c"}, 0.5)  # no answer: it is greeted anew
            assert set(roll.greet(5)) == {name}
            assert {seat.node: c for c, seat in roll.seats.items()} == {11: "ann", 12: name}
            assert len(roll.seats) == 2

    def test_routes_announce_who_is_new_and_whatever_is_no_greeting(self):
        roll = self.roll({11: "ann"}, **{"12": lambda m: said(m, b"junk")})
        roll.grid.nodes[12] = roll.grid.nodes.pop("12")
        assert roll.greet(5) == {"ann": b"ann", "node 12": b"junk"}
        assert roll.greet(5) == {}
        assert roll.ask({"ann": b"a", "node 12": b"b", "bob": b"c"}, 5) == {"ann": b"a"}
        roll.grid.nodes = {13: roll.grid.nodes[11]}  # gone and back, by another node
        assert roll.greet(5) == {"ann": b"ann"}
        roll.grid.nodes = {}
        assert roll.greet(5) == {}
        assert roll.ask({"ann": b"a"}, 5) == {}

    def test_who_does_not_answer_is_greeted_anew_and_keeps_its_seat(self):
        roll = self.roll({11: "ann", 12: "bob"})
        honest = roll.grid.nodes[12]
        assert set(roll.greet(5)) == {"ann", "bob"}
        roll.grid.nodes[12] = lambda m: None
        assert roll.ask({"ann": b"a", "bob": b"b"}, 0.5) == {"ann": b"a"}
        roll.grid.nodes[12] = honest
        assert roll.greet(5) == {"bob": b"bob"}  # so that its silence can be forgiven
        assert roll.ask({"ann": b"a", "bob": b"b"}, 5) == {"ann": b"a", "bob": b"b"}
        assert roll.greet(5) == {}

    def test_a_masked_input_is_read_although_its_numbers_are_wider_than_the_models(self):
        """It is paid for before it is sent: one that is refused burns the budget of the round."""
        form = Form("softmax", (39_999,), 10)
        params = {name: np.zeros(shape, np.float32) for name, shape in form.shapes().items()}
        request = asked(form=form, params=params, sum={"step": "input"}).to_blob()
        head = {"schema": messages.ANSWER, "kind": "input", "noise": 2**40}
        answer = messages.pack(head, {"masked": np.zeros(400_000, np.uint64)})
        assert len(answer) > len(request) + transport.SLACK
        roll = self.roll({11: "ann"})
        assert set(roll.greet(5)) == {"ann"}
        roll.limit, roll.grid.nodes[11] = 2**31, lambda m: said(m, answer)
        assert roll.ask({"ann": request}, 900) == {"ann": answer}
        roll.grid.nodes[11] = lambda m: said(m, bytes(2 * len(request) + 2 * transport.SLACK))
        assert roll.ask({"ann": request}, 900) == {}

    def test_waiting_for_too_many_ends(self):
        assert set(call(self.roll({11: "ann"}), 5, 0.5)) == {"ann"}


class Clock:
    """Time that passes when somebody works or sleeps, and only then."""

    def __init__(self):
        self.now, self.slept = 1000.0, []

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        self.slept.append(seconds)
        self.now += seconds


@pytest.fixture
def clock(monkeypatch):
    """No test waits for a reply to leave."""
    clock = Clock()
    monkeypatch.setattr(client_app, "time", clock)
    return clock


def reply_of(device, message_type="train", content=None, node="n.toml"):
    content = said_request(b"hello") if content is None else content
    message = Message(content, 1, message_type)
    context = SimpleNamespace(node_config={"node": node} if node else {})
    return client_app.build_app(device)(message, context)


@pytest.mark.parametrize("every", [None, 0.5, 2.0])
@pytest.mark.parametrize("took", [1e-4, 0.31, 0.5, 0.9, 3.7, 41.2])
def test_a_reply_leaves_at_a_multiple_of_a_public_time(clock, tmp_path, took, every):
    """Uploads, refusals and failures alike: the work's own time cannot be measured."""
    node = make_node(tmp_path, vault=False)
    path = tmp_path / "ward.toml"
    said = [] if every is None else [f"answer_every = {every}"]
    path.write_text("\n".join([*said, path.read_text("utf-8")]), "utf-8")
    assert node.answer_every == 0.5

    def answer(request, node):
        clock.now += took
        if request == b"fail":
            raise ValueError
        return request

    device = SimpleNamespace(answer=answer, hello=lambda node: answer(b"", node))
    for content in (b"upload", b"fail"):
        for message_type in ("train", "query"):
            began = clock.now
            reply_of(device, message_type, said_request(content), node=str(path))
            quanta = (clock.now - began) / (every or 0.5)
            assert quanta == pytest.approx(round(quanta), abs=1e-9)
            assert clock.now - began >= took


def test_a_reply_waits_with_the_vault_given_back(clock, tmp_path, monkeypatch):
    node, free = make_node(tmp_path), []

    def sleep(seconds):
        Vault.open(node.vault, dataset=None).close()  # a refusal if anybody has it
        free.append(seconds)
        clock.now += seconds

    clock.monotonic = lambda: setattr(clock, "now", clock.now + 0.01) or clock.now
    clock.sleep = sleep
    installed = client_app.Installed()
    for request in (asked().to_blob(), b"no request"):
        reply_of(installed, content=said_request(request), node=str(tmp_path / "ward.toml"))
    assert len(free) == 2


@pytest.mark.usefixtures("clock")
class TestClientApp:
    def test_bytes_in_bytes_out(self):
        device = SimpleNamespace(
            answer=lambda request, node: request + b" " + node.name.encode(),
            hello=lambda node: b"I am " + node.name.encode(),
        )
        assert transport.read_record(reply_of(device), "answer", 100) == b"hello n.toml"
        greeting = reply_of(device, "query")
        assert transport.read_record(greeting, "answer", 100) == b"I am n.toml"

    @pytest.mark.parametrize(
        "case",
        [
            {"answer": lambda request, node: 1 / 0},
            {"answer": lambda request, node: {}["the secret sample"]},
            {"answer": lambda request, node: "text"},
            {"answer": lambda request, node: b"", "node": ""},
            {"answer": lambda request, node: b"", "content": RecordDict()},
        ],
    )
    def test_every_failure_reads_the_same(self, case, caplog):
        answer = case.pop("answer")
        replies = [
            reply_of(SimpleNamespace(answer=answer), **case),
            reply_of(SimpleNamespace(answer=lambda request, node: int("secret")), **case),
        ]
        assert {(r.error.code, r.error.reason) for r in replies if r.has_error()} <= {
            (client_app.FAILED, client_app.SORRY)
        }
        assert replies[-1].has_error()
        assert "secret" not in caplog.text

    def test_a_node_file_that_cannot_be_used_is_refused_like_all_else(self, tmp_path):
        (tmp_path / "ward.toml").write_text("schema = 2\n")
        for message_type in ("train", "query"):
            reply = reply_of(client_app.Installed(), message_type, node=str(tmp_path / "ward.toml"))
            assert (
                transport.read_record(reply, "answer", 1000)
                == sottovoce_device.refuse_unavailable()
            )

    def test_what_a_message_waits_for_is_light(self):
        heavy = {"jax", "matplotlib", "polars", "scipy", "torch", "sottovoce.plan"}
        assert not modules_after("import sottovoce.flower.client_app") & heavy


def said_request(blob):
    return RecordDict({transport.RECORD: ConfigRecord({"request": blob})})
