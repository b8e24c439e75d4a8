"""Bytes to nodes, bytes back, before a deadline: all that the federation needs from Flower.

A request is the bytes under `request` in a message's only record, an answer the bytes under
`answer` in its reply's. This module does not know what the bytes mean, but that a node may be
hostile: each reply is awaited by a separate thread (Flower would wait up to two hours for a reply
that was announced and never sent), a reply of another shape is silence of that node and of no
other, and no word that a node wrote reaches a log or a record.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol, cast

from cryptography.hazmat.primitives import serialization
from flwr.app import ConfigRecord, Message, RecordDict

from sottovoce.flower.certificates import fingerprint_ssh

if TYPE_CHECKING:
    from flwr.proto.node_pb2 import NodeInfo

log = logging.getLogger("sottovoce.transport")

RECORD = "sottovoce"
POLL = 0.25
# With many nodes each thread polls less often, so that polling never takes more than a core.
POLL_PER_NODE = 0.005
SLICE = 0.5
# Seconds until a node without a proper greeting is asked again, then twice as many, …
GREET_AGAIN = 5.0
LONGEST_WAIT = 600.0
# Seconds that all wait for greetings; a later one is read when it has come, up to so many seconds.
AT_ONCE, PATIENCE = 5.0, 60.0
# What a greeting may weigh.
GREETING = 1 << 16
# What an answer may weigh: so many times its request, whose numbers have 4 bytes where those of a
# masked input have 8, and what surrounds the numbers.
WIDER = 2
SLACK = 1 << 20
# What Flower adds to the bytes of an answer: names, lengths and hashes.
ENVELOPE = 4096


class Grid(Protocol):
    """The part of `flwr.serverapp.Grid` that is used: it names nodes and carries messages."""

    def get_nodes(self) -> Iterable[NodeInfo]:
        """Return the nodes that are online, with their public keys."""

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Send messages; return their ids, in order."""

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Return the replies that are there."""


class Asking:
    """Messages that were sent to nodes, one each, and the answers as they come.

    They expire after `seconds`: a node that comes online later does not get old work. A reply
    counts once, for the message it replies to; what comes after the deadline is never read.
    """

    def __init__(
        self,
        grid: Grid,
        requests: Mapping[int, bytes],
        *,
        kind: Literal["train", "query"] = "train",
        group: str = "",
        seconds: float,
        limit: int,
    ) -> None:
        self.open, self.until = set(requests), time.monotonic() + seconds
        self._answers: dict[int, bytes | None] = {}
        self._done = threading.Condition()
        messages = [
            Message(
                RecordDict({RECORD: ConfigRecord({"request": blob})}),
                node,
                kind,
                ttl=seconds,
                group_id=group,
            )
            for node, blob in requests.items()
        ]
        ids = list(grid.push_messages(messages)) if messages else []
        poll = max(POLL, POLL_PER_NODE * len(requests))

        def wait_for(node: int, message: str | None) -> None:
            found = None
            if message:  # without an id the SuperLink would not take it
                found = _await_reply(grid, node, message, self.until, poll, limit)
            with self._done:
                self._answers[node] = found
                self._done.notify()

        for node, message in zip(requests, ids, strict=False):
            threading.Thread(target=wait_for, args=(node, message), daemon=True).start()

    def wait(self, seconds: float) -> dict[int, bytes | None]:
        """Return new answers, once all have come or `seconds` are over; None for one that failed.

        At the deadline every remaining node is in the result.
        """
        end = min(self.until, time.monotonic() + seconds)
        with self._done:
            while len(self._answers) < len(self.open) and (left := end - time.monotonic()) > 0:
                # In slices: Flower stops a ServerApp with a signal raised in a thread of its own,
                # which reaches the main thread only when that wakes up.
                self._done.wait(min(left, SLICE))
            over = time.monotonic() >= self.until
            answers = {n: self._answers.pop(n, None)
                    for n in sorted(self.open) if over or n in self._answers}  # fmt: skip
            self.open -= answers.keys()
        return answers


def read_record(message: Message, key: str, limit: int) -> bytes | None:
    """Return the bytes under `key` of a message with one record of one entry, else None."""
    if not message.has_content() or list(message.content) != [RECORD]:
        return None
    record = message.content[RECORD]
    if not isinstance(record, ConfigRecord) or list(record) != [key]:
        return None
    value = record[key]
    return value if type(value) is bytes and len(value) <= limit else None


@dataclass(frozen=True)
class NodeClient:
    """The Flower node that a client uses; `hello` is its greeting."""

    node: int
    hello: bytes
    key: str | None  # the fingerprint of the node's key, where nodes are authenticated


class NodeDirectory:
    """The coordinator's transport: clients by their own ids, each with its Flower node (its seat).

    Flower's node ids change (a node without authentication gets a new one at every start), so every
    node is asked once who it is. A client keeps its seat while its node is online; another node
    that claims the same client meanwhile is left out: it may be the first one, restarted. Where
    nodes are authenticated, a node with another key is another client, whatever it claims. A node
    without a proper greeting (its words are in `strange`) is asked again, less and less often, and
    nobody waits for one that hangs: it must not cost a round a minute. A node has one seat,
    whatever it calls itself from one greeting to the next.
    """

    def __init__(self, grid: Grid, identify: Callable[[bytes], str], *, limit: int) -> None:
        self.grid = grid
        self.identify = identify
        self.limit = limit
        self.seats: dict[str, NodeClient] = {}
        self.strange: dict[int, bytes] = {}
        self._keys: dict[int, str] = {}
        self._owner: dict[str, str] = {}  # client → the key that first spoke for it
        self._known: set[int] = set()
        self._waits: dict[int, tuple[float, float]] = {}  # node → when, and the wait after it
        self._greetings: list[Asking] = []  # those that have not all come
        self._announced: dict[str, NodeClient | bytes] = {}
        self._rounds = 0

    def greet(self, seconds: float) -> dict[str, bytes]:
        """Return the greetings of clients that have appeared, or were greeted again.

        What is no greeting is handed on as well: the coordinator has words for it.
        """
        nodes = list(self.grid.get_nodes())
        online = {node.node_id for node in nodes}
        if getattr(self.grid, "_insecure", True) is False:  # without TLS a key proves nothing
            self._keys = {n.node_id: fingerprint(n.public_key) for n in nodes if n.public_key}
        self._forget_offline(online)
        now = time.monotonic()
        later = {node for node, (due, _) in self._waits.items() if due > now}
        awaited = {node for asking in self._greetings for node in asking.open}
        if new := sorted(online - self._known - later - awaited):
            self._greetings.append(
                Asking(
                    self.grid,
                    dict.fromkeys(new, b""),
                    kind="query",
                    seconds=min(seconds, PATIENCE),
                    limit=min(self.limit, GREETING),
                )
            )
        self._take_greetings(min(seconds, AT_ONCE) if new else 0.0)
        strange = {f"node {node}": words for node, words in self.strange.items()}
        before, self._announced = self._announced, {**self.seats, **strange}
        fresh = {c: it for c, it in self._announced.items() if before.get(c) is not it}
        return {c: it.hello if isinstance(it, NodeClient) else it for c, it in fresh.items()}

    def key(self, client: str) -> str | None:
        """Return the fingerprint of the client's key, where its node is authenticated."""
        return self.seats[client].key if client in self.seats else None

    def ask(self, requests: Mapping[str, bytes], seconds: float) -> dict[str, bytes]:
        """Return the answers of clients, by their own ids, that came in time.

        One that does not answer keeps its seat, and is greeted again: it may have been restarted.
        """
        self._rounds += 1
        seated = {seat.node: client for client, seat in self.seats.items() if client in requests}
        answers = Asking(
            self.grid,
            {node: requests[client] for node, client in seated.items()},
            group=str(self._rounds),
            seconds=seconds,
            limit=min(self.limit, WIDER * max(map(len, requests.values()), default=0) + SLACK),
        ).wait(seconds)
        self._known -= {node for node, answer in answers.items() if answer is None}
        return {seated[node]: answer for node, answer in answers.items() if answer is not None}

    def _forget_offline(self, online: set[int]) -> None:
        self.seats = {c: seat for c, seat in self.seats.items() if seat.node in online}
        self._known &= online
        self.strange = {node: words for node, words in self.strange.items() if node in online}
        self._waits = {node: wait for node, wait in self._waits.items() if node in online}

    def _take_greetings(self, seconds: float) -> None:
        """Give seats to nodes that have greeted; wait at most so long for the newest."""
        greetings: dict[int, bytes | None] = {}
        for asking in self._greetings:
            greetings |= asking.wait(seconds if asking is self._greetings[-1] else 0.0)
        self._greetings = [asking for asking in self._greetings if asking.open]
        for node, hello in greetings.items():
            client = self._find_client(node, hello)
            if client is None:
                wait = self._waits[node][1] if node in self._waits else GREET_AGAIN
                self._waits[node] = time.monotonic() + wait, min(2 * wait, LONGEST_WAIT)
                continue
            self._known.add(node)
            self._waits.pop(node, None)
            self.strange.pop(node, None)
            self.seats = {c: seat for c, seat in self.seats.items() if seat.node != node}
            self.seats[client] = NodeClient(node, cast(bytes, hello), self._keys.get(node))

    def _find_client(self, node: int, hello: bytes | None) -> str | None:
        """Return which client a node is; None if it did not say, or if that client has a seat."""
        if hello is None:
            return None
        try:
            client = self.identify(hello)
        except Exception:  # a node's bad greeting must not end the round for others
            self.strange[node] = hello
            return None
        key = self._keys.get(node)
        if key is not None and self._owner.setdefault(client, key) != key:
            log.warning("node %d (%s) greets as %s, as another key did before", node, key, client)
            client = f"{client} {key}"
        is_free = client not in self.seats or self.seats[client].node == node
        return client if is_free else None


def fingerprint(public_key: bytes) -> str:
    """Return a node's public key (PEM) as `ssh-keygen -l` prints that of its .pub file."""
    key = serialization.load_pem_public_key(public_key)
    ssh = key.public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    return fingerprint_ssh(ssh)


def _await_reply(
    grid: Grid, node: int, message: str, until: float, poll: float, limit: int
) -> bytes | None:
    # A `server_worker.BoundedGrid` refuses a reply by its announced size, before it is read.
    pull_within = getattr(grid, "pull_within", lambda one, _limit: grid.pull_messages([one]))
    while time.monotonic() < until:
        try:
            replies = list(pull_within(message, limit))
        except Exception:
            # A reply that cannot be decoded, or a SuperLink that restarts: the next poll decides.
            replies = []
        for reply in replies:
            if reply is None:
                return None
            if reply.metadata.reply_to_message_id == message:
                failed = reply.has_error() or reply.metadata.src_node_id != node
                return None if failed else read_record(reply, "answer", limit)
        time.sleep(poll)
    return None
