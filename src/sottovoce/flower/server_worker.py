"""The process beside a SuperLink that leads runs with the *installed* ServerApp.

    flower-superlink --isolation process --superexec-auth-secret-file SECRET --host 127.0.0.1 …
    python -m sottovoce.flower.server_worker --link 127.0.0.1:8001 --authority ca.crt \\
        --secret SECRET --runs /srv/sottovoce

Whoever reaches a SuperLink's control interface may submit an app, and Flower as it comes unpacks it
and runs it as the server's user. This worker takes the submitted run and never opens the bundle: it
runs the ServerApp of the sottovoce that is installed here. Of the submission it reads the run's
configuration alone, where only known keys are allowed and every path has to lie below `--runs`. One
run is led at a time, each in a process of its own; the next waits for its end.
"""

from __future__ import annotations

import logging
import os
import signal
import time
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from pathlib import Path
from queue import Queue
from typing import Any, cast

os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")  # read once, when flwr is imported

import httpx
from flwr.app import Message
from flwr.common.serde import context_from_proto, run_from_proto
from flwr.proto.message_pb2 import (
    ConfirmMessageReceivedRequest,
    ObjectTree,
    PullObjectRequest,
    PullObjectResponse,
)
from flwr.proto.runtime_pb2 import (
    PullAppMessagesRequest,
    PullTaskInputRequest,
    PushTaskOutputRequest,
)
from flwr.serverapp import ServerApp
from flwr.supercore.heartbeat import HeartbeatSender, make_task_heartbeat_fn_http
from flwr.supercore.inflatable.inflatable_object import iterate_object_tree
from flwr.supercore.inflatable.inflatable_protobuf_utils import make_pull_object_fn_protobuf
from flwr.supercore.inflatable.inflatable_utils import (
    ObjectPushError,
    inflate_object_from_contents,
    pull_objects,
)
from flwr.supercore.logger import (
    flush_logs,
    mirror_output_to_queue,
    start_log_uploader,
    stop_log_uploader,
)
from flwr.supercore.protobuf.client import ProtobufCall, ProtobufRequestContext
from flwr.supercore.protobuf.constants import PROTOBUF_MEDIA_TYPE
from flwr.supercore.task_identity import TaskIdentity
from flwr.superlink.grid import HttpGrid

from sottovoce.errors import InputError
from sottovoce.flower import processes, server_app, worker
from sottovoce.flower.transport import ENVELOPE

# The bundle that `flwr run` ships names the settings of a run and their defaults.
BUNDLE = Path(__file__).parent / "app"
PATHS = ("plan", "public", "out", "progress", "admitted")

log = logging.getLogger("sottovoce")


# A reply of ours has three parts: the message, its one record, and the bytes in it.
PARTS = 3
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

    Calls that pull replies are left alone: they are repeated anyway, and a reply that the SuperLink
    itself cannot handle must not be waited for without end.
    """

    def intercept(self, context: ProtobufRequestContext, call_next: ProtobufCall) -> httpx.Response:
        """Send the request and change the status of a 500."""
        response = call_next(context)
        pulls_reply = context.rpc_method in (f"{PULL}Messages", f"{PULL}Object")
        if response.status_code == httpx.codes.INTERNAL_SERVER_ERROR and not pulls_reply:
            response.status_code = httpx.codes.SERVICE_UNAVAILABLE
        return response


class BoundedGrid(HttpGrid):
    """Flower's connection to the SuperLink, patient with a busy one and careful with replies.

    Flower's own (`HttpGrid`) differs in two ways. It gives up when the SuperLink answers 500, which
    happens whenever its database is locked for more than five seconds; here such an answer is
    treated as 503, which Flower tries again until it succeeds. And it downloads whatever a node has
    sent before anyone can look at its size; here a reply is refused by the number of its parts and
    by the size that the SuperLink announces, before its bytes are read.
    """

    def _connect(self) -> None:
        super()._connect()
        client = self._runtime_client
        client._interceptors = (*client._interceptors, BusyAsUnavailable())

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Send messages, again where a locked database kept the SuperLink from storing some."""
        messages, until = list(messages), time.monotonic() + PATIENCE
        while True:
            try:
                return super().push_messages(messages)
            except ObjectPushError:
                if time.monotonic() > until:
                    raise
                time.sleep(PAUSE)

    def pull_within(self, message_id: str, limit: int) -> list[Message | None]:
        """Return the reply to one message if it is there, with at most `limit` bytes in each part.

        None stands for one that is not read: it is larger, has more parts than an answer of ours,
        or cannot be decoded.
        """
        run = self.run.run_id
        found = self._runtime_client.PullMessages(PullAppMessagesRequest(message_ids=[message_id]))
        replies: list[Message | None] = []
        for proto, tree in zip(found.messages_list, found.message_object_trees, strict=True):
            ident, reply = proto.metadata.message_id, None
            try:
                contents = pull_objects(
                    _list_parts(tree),
                    make_pull_object_fn_protobuf(
                        lambda request: self._pull_object(request, limit + ENVELOPE), self.node, run
                    ),
                    max_time=ARRIVAL + limit / PACE,
                )
                message = cast(Message, inflate_object_from_contents(ident, contents))
                message.metadata.__dict__["_message_id"] = ident
                reply = message  # only now: a node may send a record, which has no metadata
            except httpx.HTTPError:  # of the SuperLink, not of the reply: the next poll decides
                raise
            except Exception as error:  # too large, or nothing that can be decoded, or not there
                log.info("a reply was not read: %s", type(error).__name__)
            # Received or refused, the SuperLink need not keep it.
            self._runtime_client.ConfirmMessageReceived(
                ConfirmMessageReceivedRequest(node=self.node, run_id=run, message_object_id=ident)
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


def _list_parts(tree: ObjectTree) -> list[str]:
    """Return the ids of a reply's parts; refuse a reply with more parts than an answer has."""
    parts = [item.object_id for item in islice(iterate_object_tree(tree), PARTS + 1)]
    if len(parts) > PARTS:
        raise TooLargeError
    return parts


def lead_run(
    link: str, authority: bytes | None, app: ServerApp, token: str, runs: Path | None
) -> None:
    """Lead the one run that this token stands for, and tell the SuperLink how it ended."""
    for number in server_app.STOPS:
        signal.signal(number, signal.default_int_handler)
    lines: Queue[str | None] = Queue()
    mirror_output_to_queue(lines)  # so that `flwr log` shows what the app says
    grid = BoundedGrid(link, authority is None, authority, token=token)
    client = grid._runtime_client
    heartbeat = HeartbeatSender(make_task_heartbeat_fn_http(client))
    outcome, details, uploader = "failed", "the run was not begun", None
    try:
        heartbeat.start()
        task = client.PullTaskInput(PullTaskInputRequest())
        TaskIdentity.task_id, TaskIdentity.run_id = task.task_id, task.run.run_id
        TaskIdentity.node_id = task.context.node_id
        context, run = context_from_proto(task.context), run_from_proto(task.run)
        grid.set_run(run)
        uploader = start_log_uploader(lines, 0, run.run_id, client)
        context.run_config = check_configuration(run.override_config, runs)
        log.info("run %d begins", run.run_id)
        app(grid=grid, context=context)
        outcome, details = "completed", ""
    except KeyboardInterrupt:
        outcome, details = "stopped", "Task stopped by user."
    except Exception as error:
        details = f"ServerApp failed with exception: {error}"
        log.error("the run failed: %s", str(error))
        raise
    finally:
        log.info("the run ended: %s", outcome)
        grid._retry_invoker.max_time = worker.PATIENCE
        if uploader is not None:
            flush_logs(lines)
        try:
            client.PushTaskOutput(PushTaskOutputRequest(sub_status=outcome, details=details))
        except httpx.HTTPError:  # a run that was stopped has ended for the SuperLink already
            log.info("the SuperLink did not take the end of the run")
        if uploader is not None:
            stop_log_uploader(lines, uploader)
        if heartbeat.is_running:
            heartbeat.stop()
        grid.close()


def check_configuration(given: Mapping[str, Any], runs: Path | None) -> dict[str, Any]:
    """Return a run's settings: the defaults of the installed app and what the submitter gave.

    Unknown keys are refused, and so are paths outside `runs` (None: any path).
    """
    app = tomllib.loads((BUNDLE / "pyproject.toml").read_text("utf-8"))["tool"]["flwr"]["app"]
    settings: dict[str, Any] = {**app["config"], **given}
    for key in settings:
        if key not in server_app.KINDS:
            known = ", ".join(server_app.KINDS)
            raise InputError(f"unknown key {key} in the run config; it may have {known}")
    for key in PATHS:
        value = settings[key]
        if runs is None or not isinstance(value, str) or not value:
            continue
        if not Path(value).resolve().is_relative_to(runs.resolve()):
            remedy = "put the run there, or change --runs"
            raise InputError.of(key, value, f"a path below {runs}", remedy)
    return settings


def main(words: Sequence[str] | None = None) -> None:
    """Read the command line, then lead one run after the other, for ever."""
    parser = processes.make_parser("server_worker", __doc__)
    parser.add_argument("--link", required=True, help="the SuperLink's --host:--port")
    parser.add_argument("--authority", type=Path, help="ca.crt; without it nothing is encrypted")
    parser.add_argument("--secret", type=Path, required=True, help="the file given to it as well")
    parser.add_argument("--runs", type=Path, help="the folder that every path of a run lies in")
    parser.add_argument("--log", choices=["plain", "json"], default="plain")
    options = parser.parse_args(words)
    processes.start_logging(as_json=options.log == "json")
    authority = None if options.authority is None else options.authority.read_bytes()
    worker.take_tasks(
        worker.connect(options.link, authority, worker.read_secret(options.secret)),
        "flwr-serverapp",
        lambda token: lead_run(options.link, authority, server_app.app, token, options.runs),
        ask_to_end=signal.SIGINT,
    )


if __name__ == "__main__":
    processes.run_command(main)
