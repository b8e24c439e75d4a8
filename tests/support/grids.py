"""A Flower grid in one process, for what a server sends and hears."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.supercore.task_identity import TaskIdentity

from sottovoce.flower import transport


@pytest.fixture(autouse=True)
def identity(monkeypatch):
    """Who sends: Flower tells a ServerApp before it runs."""
    for name in ("_run_id", "_node_id", "_task_id"):
        monkeypatch.setattr(TaskIdentity, name, 1, raising=False)


def call(roll, wanted, seconds):
    """Greet until so many clients have a seat, or time is up; return the seats."""
    until = time.monotonic() + seconds
    while True:
        roll.greet(max(0.1, until - time.monotonic()))
        if len(roll.seats) >= wanted or time.monotonic() > until:
            return dict(roll.seats)
        time.sleep(0.05)


class FakeGrid:
    """Nodes as functions from a message to a reply (or None: nothing yet)."""

    def __init__(self, nodes):
        self.nodes = nodes
        self.sent = {}

    def get_nodes(self):
        keys = getattr(self, "keys", {})
        return [SimpleNamespace(node_id=n, public_key=keys.get(n, b"")) for n in self.nodes]

    def push_messages(self, messages):
        ids = []
        for message in messages:
            node, ident = message.metadata.dst_node_id, f"m{len(self.sent)}"
            message.metadata.__dict__["_message_id"] = ident
            self.sent[ident] = message
            ids.append(ident if node in self.nodes else None)
        return ids

    def pull_messages(self, message_ids):
        replies = []
        for ident in message_ids:
            message = self.sent[ident]
            replies += filter(None, [self.nodes[message.metadata.dst_node_id](message)])
        return replies


def said(message, value=None, *, record=None, key="answer", name=transport.RECORD):
    record = ConfigRecord({key: value}) if record is None else record
    return Message(RecordDict({name: record}), reply_to=message)
