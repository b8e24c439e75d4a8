"""The client's side of Flower: bytes in, `device.answer_request`, bytes out.

Flower starts a new process for every message, so nothing heavy is imported here: the device imports
what it needs when it is asked. Whatever goes wrong, the server reads one constant sentence: Flower
would send it the text of the exception, which may contain a sample.

Every reply, also a refusal, leaves at a multiple of the node's `answer_every` after its message
came, so that the server cannot measure how long the work took. Nothing is locked meanwhile.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flwr.app import ConfigRecord, Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp

from sottovoce.errors import InputError
from sottovoce.flower.transport import RECORD, read_record

if TYPE_CHECKING:
    from sottovoce.client.node import Node

# Flower's code for a ClientApp that failed.
FAILED = 2
SORRY = "the node could not answer; its own log says why"
# What a request may weigh: 2 GiB is where protobuf ends.
LIMIT = 2**31 - 2**20

log = logging.getLogger("sottovoce")


class Installed:
    """The device of the sottovoce that is installed on the node, whatever the server ships.

    `node` is the path of the node file; where the file is wrong, the log says why in words. They
    are about the file alone: no rows have been read.
    """

    def hello(self, node: Path) -> bytes:
        """Return who this is and what it discloses."""
        return self._reply_with(node, lambda device, read: device.make_greeting(read))

    def answer(self, request: bytes, node: Path) -> bytes:
        """Answer one request."""
        return self._reply_with(node, lambda device, read: device.answer_request(request, read))

    def _reply_with(self, path: Path, work: Callable[[Any, Node], bytes]) -> bytes:
        from sottovoce.client import device
        from sottovoce.client.node import Node

        try:
            node = Node.load(path)
        except InputError as error:
            log.error("the node file cannot be used: %s", str(error))
            return device.refuse_unavailable()
        return work(device, node)


def build_app(device: Installed) -> ClientApp:
    """Build a ClientApp that lets `device` answer `train` and `query` messages."""
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        return _reply(message, context, device.answer)

    @app.query()
    def query(message: Message, context: Context) -> Message:
        return _reply(message, context, lambda _request, node: device.hello(node))

    return app


def wait_until_multiple(began: float, seconds: float) -> None:
    """Return at the next multiple of so many seconds since `began`, on time's monotonic clock."""
    if seconds > 0:
        leaves = began + seconds * math.ceil((time.monotonic() - began) / seconds)
        while (left := leaves - time.monotonic()) > 0:
            time.sleep(left)


def _read_answer_every(context: Context) -> float:
    """Return the node file's `answer_every`; the default where the file cannot be used."""
    from sottovoce.client.node import ANSWER_EVERY, Node

    try:
        return Node.load(str(context.node_config.get("node"))).answer_every
    except InputError:  # `_node` logs it
        return ANSWER_EVERY


def _reply(message: Message, context: Context, answer: Callable[[bytes, Path], bytes]) -> Message:
    began = time.monotonic()
    try:
        request = read_record(message, "request", LIMIT)
        if request is None:
            raise ValueError("no request")
        node = context.node_config.get("node")
        if not isinstance(node, str):
            log.error("no node file: start flower-supernode with --node-config \"node='FILE'\"")
            raise TypeError("node")
        answer_record = ConfigRecord({"answer": answer(request, Path(node))})
        return Message(RecordDict({RECORD: answer_record}), reply_to=message)
    except Exception as error:
        # The kind of error alone: even here its text might hold a value from the data.
        log.error("no answer: %s", type(error).__name__)
        return Message(Error(code=FAILED, reason=SORRY), reply_to=message)
    finally:
        wait_until_multiple(began, _read_answer_every(context))


app = build_app(Installed())
