"""What a hostile party runs on a machine of its own against a server, and prints as JSON.

python hostile_party.py calls HOST:PORT ca.crt [KEY]      every call there is, signed with KEY
python hostile_party.py node HOST:PORT ca.crt KEY SECONDS MODE…   a registered node that replies

A node ends when it is told to (SIGTERM), or after so many seconds, and prints what it met. It
replies in each MODE in turn; `large+half` is one turn, in which a message is replied to twice.
"""

from __future__ import annotations

import base64
import http.client
import json
import signal
import socket
import ssl
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import httpx
from cryptography.hazmat.primitives import serialization
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.app.message import remove_content_from_message
from flwr.common.constant import TIMESTAMP_HEADER
from flwr.common.serde import message_from_proto, message_to_proto
from flwr.proto.fleet_pb2 import (
    ActivateNodeRequest,
    DeactivateNodeRequest,
    PullMessagesRequest,
    PushMessagesRequest,
)
from flwr.proto.heartbeat_pb2 import SendNodeHeartbeatRequest
from flwr.proto.message_pb2 import PushObjectRequest
from flwr.proto.node_pb2 import Node
from flwr.supercore.constant import FLEET_HTTP_PUBLIC_KEY_HEADER, FLEET_HTTP_SIGNATURE_HEADER
from flwr.supercore.date import now
from flwr.supercore.inflatable.inflatable_object import (
    get_all_nested_objects,
    get_object_tree,
    no_object_id_recompute,
)
from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor
from flwr.supercore.primitives.asymmetric import public_key_to_bytes, sign_message
from flwr.supercore.protobuf.translation import PROTOBUF_REQUEST_TYPES
from flwr.supercore.task_identity import TaskIdentity
from flwr.supernode.fleet_http_client import FleetHttpClient
from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor

TRICKS = [
    "/",
    "/docs",
    "/openapi.json",
    "/health",
    "/v1/responses",
    "//v1/control/list-runs",
    "/v1/fleet/../control/list-runs",
    "/v1/fleet/%2e%2e/control/list-runs",
    "/v1/fleet/..%2fcontrol/list-runs",
    "/v1/fleet/pull-messages/../../control/list-runs",
    "/v1/control/list-runs?/v1/fleet/pull-messages",
    "/v1/control/..%2f..%2fv1/fleet/pull-messages",
    "/v1/fleet/pull-messages%00/../../control/list-runs",
    "/V1/FLEET/pull-messages",
    "https://127.0.0.1:8001/v1/control/list-runs",
]


def key_of(path):
    return serialization.load_ssh_private_key(Path(path).read_bytes(), password=None)


def signed(key):
    """The headers that a SuperNode signs with."""
    if key is None:
        return {}
    stamp = now().isoformat()
    return {
        FLEET_HTTP_PUBLIC_KEY_HEADER: base64.b64encode(public_key_to_bytes(key.public_key())),
        TIMESTAMP_HEADER: stamp,
        FLEET_HTTP_SIGNATURE_HEADER: base64.b64encode(sign_message(key, stamp.encode())),
    }


def calls(address, authority, key=None):
    """Try every path of Flower's, and ways around the proxy's names: the status of each."""
    host, _, port = address.rpartition(":")
    trust = ssl.create_default_context(cafile=authority)
    key = None if key is None else key_of(key)
    found = {}
    for method, path in [*PROTOBUF_REQUEST_TYPES, *(("POST", trick) for trick in TRICKS)]:
        for verb in (method, "GET"):
            connection = http.client.HTTPSConnection(host, int(port), timeout=900, context=trust)
            headers = {"Content-Type": "application/protobuf", **signed(key)}
            connection.request(verb, path, body=b"", headers=headers)
            found[f"{verb} {path}"] = connection.getresponse().status
            connection.close()
            time.sleep(0.06)  # below the proxy's rate: what is tried is the path
    return found


def many_records(_):
    return RecordDict({f"r{i}": ConfigRecord({"a": i}) for i in range(20_000)})


def large(_):
    return RecordDict({"sottovoce": ConfigRecord({"answer": bytes(300 << 20)})})


def some_records(_):
    return RecordDict({f"r{i}": ConfigRecord({"a": bytes(1000)}) for i in range(12)})


def nonsense(request):
    """As large as an answer may be, and no answer."""
    return RecordDict({"sottovoce": ConfigRecord({"answer": bytes(max(1000, len(request)))})})


def half(_):
    """An answer that is announced and never sent."""
    return RecordDict({"sottovoce": ConfigRecord({"answer": b"half"})})


def silent(_):
    return None


MODES = {f.__name__: f for f in (many_records, large, some_records, nonsense, half, silent)}
# What a node does besides, all the time: five times the calls, three times the connections that the
# proxy lets one address have.
FLOODERS, CALLS_A_SECOND, CONNECTIONS = 8, 100, 200
BESIDES = ("flood", "slow")


class HostileNode:
    """A registered node that does as a SuperNode does, and replies as it likes."""

    def __init__(self, address, authority, key):
        self.key = private = key_of(key)
        self.address, self.authority = address, authority
        self.client = FleetHttpClient.from_server_address(
            address, False, Path(authority).read_bytes(),
            interceptors=[
                RuntimeVersionHttpInterceptor(component_name="SuperNode"),
                NodeAuthHttpInterceptor(private, private.public_key()),
            ],
        )  # fmt: skip
        public = public_key_to_bytes(private.public_key())
        request = ActivateNodeRequest(public_key=public, heartbeat_interval=30)
        while True:  # one that was killed counts as online for a minute
            try:
                self.node = Node(node_id=self.client.ActivateNode(request).node_id)
                break
            except httpx.HTTPStatusError:
                time.sleep(2)
        TaskIdentity.node_id = self.node.node_id
        TaskIdentity.run_id = TaskIdentity.task_id = 1
        self.seen = Counter()

    def call(self, name, method, request):
        try:
            answer = method(request)
        except httpx.HTTPStatusError as error:
            self.seen[f"{name} {error.response.status_code}"] += 1
            return None
        except httpx.TransportError as error:
            self.seen[f"{name} {type(error).__name__}"] += 1
            return None
        self.seen[f"{name} 200"] += 1
        return answer

    def reply(self, proto, content, *, half=False):
        reply = Message(content, reply_to=message_from_proto(proto))
        reply.metadata.__dict__["_run_id"] = proto.metadata.run_id
        with no_object_id_recompute():
            reply.metadata.__dict__["_message_id"] = reply.object_id
            tree, parts = get_object_tree(reply), get_all_nested_objects(reply)
            pushed = PushMessagesRequest(
                node=self.node,
                messages_list=[message_to_proto(remove_content_from_message(reply))],
                message_object_trees=[tree],
                clientapp_runtime_list=[0.1],
            )
        taken = self.call("announced", self.client.PushMessages, pushed)
        for part in [] if taken is None or half else taken.objects_to_push:
            request = PushObjectRequest(
                node=self.node,
                run_id=proto.metadata.run_id,
                object_id=part,
                object_content=parts[part].deflate(),
                session_id=taken.session_id,
            )
            self.call("sent", self.client.PushObject, request)

    def flood(self, stopped):
        """Call far more often than the proxy allows, signed, without a pause when refused."""
        host, _, port = self.address.rpartition(":")
        trust = ssl.create_default_context(cafile=self.authority)
        body = PullMessagesRequest(node=self.node).SerializeToString()
        connection = http.client.HTTPSConnection(host, int(port), timeout=30, context=trust)
        while not stopped:
            headers = {"Content-Type": "application/protobuf", **signed(self.key)}
            try:
                for _ in range(CALLS_A_SECOND):  # a signature holds for minutes
                    connection.request("POST", "/v1/fleet/pull-messages", body, headers)
                    answer = connection.getresponse()
                    answer.read()
                    self.seen[f"flood {answer.status}"] += 1
                    time.sleep(FLOODERS / CALLS_A_SECOND)
            except (OSError, http.client.HTTPException) as error:
                self.seen[f"flood {type(error).__name__}"] += 1
                connection.close()

    def slow(self, stopped):
        """Hold as many connections as it can get, each with a call that never ends."""
        host, _, port = self.address.rpartition(":")
        trust = ssl.create_default_context(cafile=self.authority)
        held = []
        while not stopped:
            for connection in list(held):
                try:
                    connection.send(b"X-More: 1\r\n")
                except OSError:
                    held.remove(connection)
                    self.seen["slow ended"] += 1
            for _ in range(CONNECTIONS - len(held)):
                try:
                    plain = socket.create_connection((host, int(port)), timeout=5)
                    connection = trust.wrap_socket(plain, server_hostname=host)
                    connection.send(b"POST /v1/fleet/pull-messages HTTP/1.1\r\nHost: x\r\n")
                except OSError:
                    self.seen["slow refused"] += 1
                    break
                held.append(connection)
            self.seen["slow held"] = max(self.seen["slow held"], len(held))
            time.sleep(1)

    def live(self, seconds, modes):
        """Pull what it is asked and reply in the ways given, in turn, until it is told to end."""
        stopped = []
        signal.signal(signal.SIGTERM, lambda number, frame: stopped.append(number))
        replies = [mode for mode in modes if mode not in BESIDES] or ["silent"]
        for mode in BESIDES:
            if mode in modes:
                for _ in range(FLOODERS if mode == "flood" else 1):
                    besides = getattr(self, mode)
                    threading.Thread(target=besides, args=(stopped,), daemon=True).start()
        until, turn, beat = time.monotonic() + seconds, 0, 0.0
        while time.monotonic() < until and not stopped:
            if time.monotonic() > beat:
                life = SendNodeHeartbeatRequest(node=self.node, heartbeat_interval=30)
                self.call("alive", self.client.SendNodeHeartbeat, life)
                beat = time.monotonic() + 10
            pulled = self.call(
                "pulled", self.client.PullMessages, PullMessagesRequest(node=self.node)
            )
            for proto in [] if pulled is None else pulled.messages_list:
                self.seen["asked"] += 1
                together, turn = replies[turn % len(replies)], turn + 1
                for mode in together.split("+"):
                    content = MODES[mode](b"")
                    if content is not None:
                        self.reply(proto, content, half=mode == "half")
            time.sleep(0.5)
        gone = DeactivateNodeRequest(node_id=self.node.node_id)
        self.call("left", self.client.DeactivateNode, gone)
        return dict(self.seen)


def main():
    what, *words = sys.argv[1:]
    if what == "calls":
        print(json.dumps(calls(*words)))
    else:
        node = HostileNode(*words[:3])
        print(json.dumps(node.live(float(words[3]), words[4:])))


if __name__ == "__main__":
    main()
