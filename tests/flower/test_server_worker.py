"""The worker that leads runs, its grid, and what `server init` and `node init` write."""

from __future__ import annotations

import os
import re
import signal
import stat
from datetime import UTC, datetime
from email.utils import format_datetime
from types import SimpleNamespace

import httpx
import numpy as np
import pytest
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.proto.message_pb2 import ObjectTree, PullObjectResponse

from sottovoce.client import ledger, messages
from sottovoce.errors import FederationError, InputError
from sottovoce.flower import certificates, deploy, server_app, server_worker, supernode, worker
from sottovoce.flower.transport import SLACK
from support.devices import make_node

# What a submitter may say


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"serverapp": "evil:app"}, "unknown key serverapp"),
        ({"plan": "/etc/passwd"}, "plan must be a path below"),
        ({"out": "{runs}/../elsewhere"}, "out must be a path below"),
        ({"progress": "/etc/profile"}, "progress must be a path below"),
        ({"public": "{runs}/link/public.npz"}, "public must be a path below"),
    ],
)
def test_a_run_is_led_inside_its_folder_and_by_known_keys(tmp_path, given, words):
    runs = tmp_path / "runs"
    runs.mkdir()
    (runs / "link").symlink_to("/etc")
    given = {key: value.format(runs=runs) for key, value in given.items()}
    with pytest.raises(InputError, match=words):
        server_worker.check_configuration(given, runs)


def test_what_is_not_given_is_the_installed_apps_default(tmp_path):
    plan = str(tmp_path / "study" / "plan.toml")
    config = server_worker.check_configuration({"plan": plan, "clients": 3}, tmp_path)
    assert (config["plan"], config["clients"], config["minimum"]) == (plan, 3, 1)
    assert set(config) == set(server_app.KINDS)


# What is downloaded of a reply


class Link:
    """A SuperLink with one reply, which announces its size and counts what is read of it."""

    def __init__(self, parts, size):
        self.tree = ObjectTree(object_id="0")
        for part in range(1, parts):
            self.tree.children.append(ObjectTree(object_id=str(part)))
        self.size, self.read, self.confirmed = size, 0, 0
        self._base_url, self._client = "http://link", httpx.Client()

    def PullMessages(self, _):  # noqa: N802
        own = SimpleNamespace(message_id="0", reply_to_message_id="asked", src_node_id=7)
        return SimpleNamespace(
            messages_list=[SimpleNamespace(metadata=own)], message_object_trees=[self.tree]
        )

    def ConfirmMessageReceived(self, _):  # noqa: N802
        self.confirmed += 1

    def _send(self, _context, *, stream):
        assert stream

        def body():
            self.read += self.size
            yield PullObjectResponse(
                object_found=True, object_available=True, object_content=bytes(self.size)
            ).SerializeToString()

        return httpx.Response(
            200,
            headers={"content-length": str(self.size)},
            content=body(),
            request=httpx.Request("POST", "http://link"),
        )


@pytest.mark.parametrize(("parts", "size"), [(3, 300 << 20), (20_000, 10), (4, 10)])
def test_a_reply_is_refused_before_it_is_read(monkeypatch, parts, size):
    """By the size that is announced and by the number of its parts; it is not kept either."""
    link, bounded = Link(parts, size), server_worker.BoundedGrid("link", True, token="t")
    monkeypatch.setattr(server_worker.BoundedGrid, "_runtime_client", property(lambda _: link))
    monkeypatch.setattr(
        server_worker.BoundedGrid, "run", property(lambda _: SimpleNamespace(run_id=1))
    )
    assert bounded.pull_within("asked", 1 << 16) == [None]
    assert (link.read, link.confirmed) == (0, 1)


def test_a_reply_that_is_no_message_is_not_read(monkeypatch):
    """A node may send any object of Flower's: as a message it would end the waiting thread."""
    record = ConfigRecord({"answer": b"a"})
    link, bounded = Link(1, 10), server_worker.BoundedGrid("link", True, token="t")
    monkeypatch.setattr(server_worker.BoundedGrid, "_runtime_client", property(lambda _: link))
    monkeypatch.setattr(
        server_worker.BoundedGrid, "run", property(lambda _: SimpleNamespace(run_id=1))
    )
    monkeypatch.setattr(server_worker, "pull_objects", lambda *_, **__: {"0": record.deflate()})
    assert bounded.pull_within("asked", 1 << 16) == [None]
    assert link.confirmed == 1


def test_a_busy_superlink_is_tried_again_but_not_for_a_reply():
    request = httpx.Request("POST", "http://link")
    for method, status in (("PushMessages", 503), ("GetNodes", 503), ("PullTaskInput", 503),
                           ("PullMessages", 500), ("PullObject", 500)):  # fmt: skip
        context = SimpleNamespace(rpc_method=f"/flwr.proto.Runtime/{method}")
        busy = httpx.Response(500, request=request)
        said = server_worker.BusyAsUnavailable().intercept(context, lambda _, busy=busy: busy)
        assert said.status_code == status, method


def test_a_message_that_never_arrives_is_given_up(monkeypatch):
    """A SuperNode that dropped it would let its worker wait for two hours."""
    with pytest.raises(TimeoutError), worker._limit_time(1):
        worker.time.sleep(600)
    with pytest.raises(TimeoutError), worker._limit_time(600):
        signal.raise_signal(signal.SIGTERM)  # the worker is to end, and nothing has been paid for


# Clocks, and a SuperNode that nobody hears


@pytest.mark.parametrize(
    ("ahead", "words"),
    [(0, None), (3, None), (-250, None), (20, "20 s ahead of"), (-3600, "3600 s behind")],
)
def test_a_clock_that_is_off_is_said_to_be(ahead, words, caplog):
    now = 1_700_000_000
    date = format_datetime(datetime.fromtimestamp(now, UTC), usegmt=True)
    said = supernode.describe_clock(date, now + ahead)
    assert (said is None) if words is None else words in said
    for none in ("no date", f"Mon, 01 Jan 2024 00:00:00 +{'9' * 20}"):  # a server may say anything
        assert supernode.describe_clock(none, now) is None


def test_a_node_that_is_turned_away_logs_the_clock(monkeypatch, caplog):
    watch = supernode.Watch()
    monkeypatch.setattr(supernode.time, "time", lambda: 1_700_000_020)
    date = format_datetime(datetime.fromtimestamp(1_700_000_000, UTC), usegmt=True)
    watch.note("/v1/fleet/activate-node", 401, date)
    assert "clock is 20 s ahead" in caplog.text


def test_a_node_whose_signs_of_life_are_refused_ends(monkeypatch):
    """Other calls that succeed do not make it heard."""
    ended = []
    monkeypatch.setattr(supernode.os, "_exit", ended.append)
    watch = supernode.Watch(seconds=0.2)
    watch.heard -= 0.1
    watch.note("/v1/fleet/pull-messages", 200, None)
    watch.note(supernode.HEARTBEAT, 500, None)
    watch.end_when_silent()
    assert ended == [supernode.OFFLINE]


def test_a_server_that_does_not_answer_is_a_sentence(tmp_path):
    key = certificates.make_authority(tmp_path)
    with pytest.raises(FederationError, match="does not answer"):
        supernode.check_server("127.0.0.1:9", key.certificate)
    (tmp_path / "empty").write_text("")
    for bad in (tmp_path / "absent", tmp_path / "empty"):
        with pytest.raises(InputError, match=rf"{bad.name} .*; (name another|put it there)"):
            supernode.check_server("127.0.0.1:9", bad)


# What is written


def test_the_authoritys_key_is_encrypted(tmp_path):
    made = certificates.make_authority(tmp_path, passphrase=b"correct horse")
    assert b"ENCRYPTED" in made.key.read_bytes()
    certificates.make_server_keys(tmp_path, made)
    certificates.renew_certificate(
        tmp_path, signed_by=certificates.find_authority(tmp_path, b"correct horse")
    )
    for wrong in (None, b"another"):
        with pytest.raises(InputError, match="cannot be read as a key"):
            certificates.renew_certificate(
                tmp_path, signed_by=certificates.find_authority(tmp_path, wrong)
            )


@pytest.fixture
def written(tmp_path, monkeypatch):
    """What both commands write, without users of their own."""
    monkeypatch.setattr(deploy.os, "geteuid", lambda: 1000)
    at = {"folder": tmp_path / "server", "state": tmp_path / "state", "runs": tmp_path / "runs",
          "units": tmp_path / "units", "authority": tmp_path / "ca"}  # fmt: skip
    places = deploy.ServerPlaces(**at, parameters=1000, clients=3)
    said = deploy.init_server(["server.example.org"], places, b"correct horse")
    node = deploy.NodePlaces(
        "ward-3", "server.example.org:8000", tmp_path / "ca" / "ca.crt",
        folder=tmp_path / "node", data=tmp_path / "data", state=tmp_path / "own",
        units=tmp_path / "units",
    )  # fmt: skip
    return SimpleNamespace(top=tmp_path, places=places, said=said + deploy.init_node(node))


def test_the_proxy_names_every_call_it_passes_and_bounds_it(written):
    text = (written.top / "server-proxy" / "nginx.conf").read_text()
    passed = set(re.findall(r"proxy_pass https://superlink/(\S+);", text))
    assert passed == {"v1/fleet/$1", "v1/fleet/push-messages", "v1/fleet/push-object"}
    names = re.search(r"\^/v1/fleet/\((\S+)\)\$", text).group(1).split("|")
    assert not {"register-node", "unregister-node"} & set(names)
    assert re.search(r"location / { return 404; }", text)
    assert f"client_max_body_size {written.places.largest};" in text
    assert "client_max_body_size 4k;" in text


def test_the_proxy_takes_a_masked_input_of_the_largest_model():
    places = deploy.ServerPlaces(parameters=300_000)
    masked = messages.pack({"kind": "input"}, {"masked": np.zeros(300_000, np.uint64)})
    assert len(masked) < places.largest < len(masked) + 2 * SLACK


def test_an_answer_of_ours_is_announced_in_less_than_the_proxy_takes(monkeypatch):
    from flwr.common.serde import message_to_proto
    from flwr.proto.fleet_pb2 import PushMessagesRequest
    from flwr.proto.node_pb2 import Node
    from flwr.supercore.inflatable.inflatable_object import get_object_tree

    for name in ("_run_id", "_node_id", "_task_id"):
        monkeypatch.setattr(
            "flwr.supercore.task_identity.TaskIdentity." + name, 2**63, raising=False
        )
    content = RecordDict({"sottovoce": ConfigRecord({"answer": bytes(10_000)})})
    message = Message(content, 2**63, "train", group_id="100000")
    tree = get_object_tree(message)
    assert len(list(server_worker.iterate_object_tree(tree))) == server_worker.PARTS
    bare = Message(RecordDict(), 2**63, "train", group_id="100000")
    request = PushMessagesRequest(
        node=Node(node_id=2**63),
        messages_list=[message_to_proto(bare)],
        message_object_trees=[tree],
    )
    assert request.ByteSize() < deploy.ANNOUNCED / 2


def test_units_and_keys_are_for_their_owner_alone(written):
    units = {path.name: path.read_text() for path in (written.top / "units").iterdir()}
    assert len(units) == 5
    for name, text in units.items():
        assert "{{" not in text
        for line in ("UMask=0077", "NoNewPrivileges=yes", "ProtectSystem=strict", "MemoryMax="):
            assert line in text, name
    link = units["sottovoce-superlink.service"]
    assert "--host 127.0.0.1" in link
    assert "--isolation process" in link
    assert "--enable-supernode-auth" in link
    for folder in ("server", "server-proxy", "node", "ca"):
        for path in (written.top / folder).rglob("*"):
            if path.suffix in (".key", ".secret") or path.name == "ward-3":
                assert stat.S_IMODE(path.stat().st_mode) == 0o600, path
    assert not list((written.top / "server").glob("ca.key"))
    assert "systemctl enable --now" in written.said


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"parameters": 0}, "parameters must be from 1"),
        ({"port": 70000}, "port must be"),
        ({"link_port": 8000}, "link-port must be another"),
        ({"user": "Root!"}, "user must be"),
    ],
)
def test_bad_places_are_refused_before_anything_is_made(changed, words):
    with pytest.raises(InputError, match=words):
        deploy.ServerPlaces(**changed)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, whose mistake it is")
def test_root_makes_no_vault_in_somebody_elses_folder(tmp_path):
    """Its second witness would lie in root's home, where the client's worker never looks."""
    make_node(tmp_path, vault=False)
    os.chown(tmp_path, 1, 1)
    with pytest.raises(InputError, match="add --user daemon"):
        ledger.act_as(None, None, beside=tmp_path / "node.toml")
    with pytest.raises(InputError, match="user must be a user of this machine"):
        ledger.act_as("nobody-of-that-name", None, beside=tmp_path)
