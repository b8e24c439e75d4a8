"""The ServerApp's connection to the SuperLink: patient with a busy one, careful with replies.

Flower's own (`HttpGrid`) differs in two ways. It gives up when the SuperLink answers 500, which it
does whenever its database is locked for more than five seconds; here such an answer is treated as
503, which Flower tries again until it succeeds. And it downloads whatever a node has sent before
anyone can look at its size; here a reply is refused by the number of its parts and by the size that
the SuperLink announces, before its bytes are read.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import cast

import httpx
from flwr.app import Error, Message, Metadata
from flwr.app.message import make_message
from flwr.proto.message_pb2 import (
    ConfirmMessageReceivedRequest,
    ObjectTree,
    PullObjectRequest,
    PullObjectResponse,
)
from flwr.proto.runtime_pb2 import PullAppMessagesRequest
from flwr.supercore.constant import SYSTEM_MESSAGE_TYPE
from flwr.supercore.date import now
from flwr.supercore.inflatable.inflatable_object import iterate_object_tree
from flwr.supercore.inflatable.inflatable_protobuf_utils import make_pull_object_fn_protobuf
from flwr.supercore.inflatable.inflatable_utils import (
    ObjectPullError,
    ObjectPushError,
    inflate_object_from_contents,
    pull_objects,
)
from flwr.supercore.protobuf.client import ProtobufCall, ProtobufRequestContext
from flwr.supercore.protobuf.constants import PROTOBUF_MEDIA_TYPE
from flwr.superlink.grid import HttpGrid

from sottovoce.flower.transport import REFUSED

# A reply of ours has three parts: the message, its one record, and the bytes in it.
PARTS = 3
# What Flower adds to the bytes of an answer: names, lengths and hashes.
ENVELOPE = 4096
# Flower's code for a reply that is not there.
UNAVAILABLE = 4
# Seconds in which a message that the SuperLink could not store is sent again.
PATIENCE, PAUSE = 120.0, 2.0
# How long a reply that was announced may take to arrive: this, and its size at 100 kB a second. One
# whose node gave up is not waited for until the deadline (Flower would wait for two hours).
ARRIVAL, PACE = 60.0, 100_000.0
PULL = "/flwr.proto.Runtime/Pull"
PULL_OBJECT = "/v1/runtime/pull-object"


class TooLargeError(Exception):
    """A reply announces more bytes than are read."""


class BusyAsUnavailable:
    """Treat a 500 of the SuperLink as 503: its database was locked, so the call is tried again.

    Calls that pull replies are left alone: whoever pulls looks again anyway, and a reply that the
    SuperLink itself cannot handle must not be waited for without end.
    """

    def intercept(self, context: ProtobufRequestContext, call_next: ProtobufCall) -> httpx.Response:
        """Send the request and change the status of a 500."""
        response = call_next(context)
        pulls_reply = context.rpc_method in (f"{PULL}Messages", f"{PULL}Object")
        if response.status_code == httpx.codes.INTERNAL_SERVER_ERROR and not pulls_reply:
            response.status_code = httpx.codes.SERVICE_UNAVAILABLE
        return response


class BoundedGrid(HttpGrid):
    """Flower's grid with bounds on what is downloaded of a reply."""

    def _connect(self) -> None:
        super()._connect()
        client = self._runtime_client
        client._interceptors = (*client._interceptors, BusyAsUnavailable())

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Send messages, again where a locked database kept the SuperLink from storing a part."""
        messages, until = list(messages), time.monotonic() + PATIENCE
        while True:
            try:
                return super().push_messages(messages)
            except ObjectPushError:
                if time.monotonic() > until:
                    raise
                time.sleep(PAUSE)

    def pull_within(self, message_id: str, limit: int) -> list[Message]:
        """Return the reply to one message if it is there, with at most `limit` bytes in each part.

        A reply that is larger, or has more parts than an answer of ours, comes back as an error.
        """
        run = self.run.run_id
        found = self._runtime_client.PullMessages(PullAppMessagesRequest(message_ids=[message_id]))
        replies = []
        for proto, tree in zip(found.messages_list, found.message_object_trees, strict=True):
            own = proto.metadata
            try:
                contents = pull_objects(
                    _parts(tree),
                    make_pull_object_fn_protobuf(
                        lambda request: self._pull_object(request, limit + ENVELOPE),
                        self.node,
                        run,
                    ),
                    max_time=ARRIVAL + limit / PACE,
                )
                reply = cast(Message, inflate_object_from_contents(own.message_id, contents))
                reply.metadata.__dict__["_message_id"] = own.message_id
            except httpx.HTTPError:  # of the SuperLink, not of the reply: the next look tells
                raise
            except ObjectPullError:
                reply = _failed(run, own.reply_to_message_id, own.src_node_id, UNAVAILABLE)
            except Exception:  # too large, or nothing that can be decoded
                reply = _failed(run, own.reply_to_message_id, own.src_node_id, REFUSED)
            # Received or refused, the SuperLink need not keep it.
            self._runtime_client.ConfirmMessageReceived(
                ConfirmMessageReceivedRequest(
                    node=self.node, run_id=run, message_object_id=own.message_id
                )
            )
            replies.append(reply)
        return replies

    def _pull_object(self, request: PullObjectRequest, limit: int) -> PullObjectResponse:
        """Pull one part as Flower does, and refuse by the announced size before it is read."""
        client = self._runtime_client
        http = client._client.build_request(
            "POST",
            f"{client._base_url}{PULL_OBJECT}",
            content=request.SerializeToString(deterministic=True),
            headers={"content-type": PROTOBUF_MEDIA_TYPE, "accept-encoding": "identity"},
        )
        context = ProtobufRequestContext(f"{PULL}Object", request, http)
        response = client._send(context, stream=True)
        try:
            response.raise_for_status()
            if int(response.headers.get("content-length", limit + 1)) > limit:
                raise TooLargeError
            found = PullObjectResponse()
            found.ParseFromString(response.read())
            return found
        finally:
            response.close()


def _parts(tree: ObjectTree) -> list[str]:
    """Return the ids of a reply's parts; refuse one that has more than an answer of ours."""
    parts = []
    for part in iterate_object_tree(tree):
        parts.append(part.object_id)
        if len(parts) > PARTS:
            raise TooLargeError
    return parts


def _failed(run: int, reply_to: str, node: int, code: int) -> Message:
    metadata = Metadata(
        run_id=run,
        message_id="",
        src_node_id=node,
        dst_node_id=node,
        message_type=SYSTEM_MESSAGE_TYPE,
        group_id="",
        ttl=0,
        reply_to_message_id=reply_to,
        created_at=now().timestamp(),
    )
    return make_message(metadata=metadata, error=Error(code=code, reason=""))
