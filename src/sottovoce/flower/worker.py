"""The process beside a SuperNode that answers its messages with the *installed* app, and fast.

    flower-supernode --isolation process --superexec-auth-secret-file SECRET …
    python -m sottovoce.flower.worker --node 127.0.0.1:PORT --secret SECRET

Flower's own `flower-superexec` unpacks the bundle that the server has shipped and runs it, in a new
python for every message. Here the bundle is never opened: what runs is the app installed on the
node, so that a server cannot ship code that reads the data. A message is answered by a fork of this
process, which has imported everything. The secret proves to the SuperNode that it hands its
messages to this worker and to no other process of the machine.

    python -m sottovoce.flower.worker --check NODE.toml [--server HOST:PORT --authority ca.crt]

looks at what a message would meet (node file, rows, model, vault, the way to a server), says what
is wrong in words, and ends. The log has the kinds of errors only.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")  # read once, when flwr is imported

import httpx
from flwr.app import Context, Error, Message
from flwr.clientapp import ClientApp
from flwr.proto.runtime_pb2 import AcquireTaskRequest
from flwr.supercore.heartbeat import HeartbeatSender, make_task_heartbeat_fn_http
from flwr.supercore.interceptors import (
    RuntimeTokenHttpInterceptor,
    RuntimeVersionHttpInterceptor,
    SuperExecAuthHttpInterceptor,
)
from flwr.supercore.retry import make_simple_http_retry_invoker
from flwr.supercore.runtime import RuntimeHttpClient
from flwr.supernode.runtime.run_clientapp import pull_task_input, push_message, push_task_output

from sottovoce.errors import FederationError, InputError
from sottovoce.flower import keeper, processes, supernode
from sottovoce.flower.client_app import FAILED, SORRY

APP = "sottovoce.flower.client_app:app"
# Seconds between questions for work; Flower's own SuperExec reads the same variable.
POLL = float(os.environ.get("FLWR_SUPEREXEC_TASK_POLL_INTERVAL", "0.1"))
AGAIN = 0.5  # seconds until a SuperNode that does not answer is asked again
BUSY = 0.01  # seconds between two looks at the process that works on a message
PATIENCE = 20.0  # seconds in which a SuperNode has to take an answer
# Seconds in which a message has to arrive as a whole once it has been announced.
INPUT = 180
ACQUIRE = "/flwr.proto.Runtime/AcquireTask"
SHORTEST_SECRET = 32

log = logging.getLogger("sottovoce")


def _import_name(key: str, where: str, what: str, remedy: str) -> Any:
    """Return what `module:name` names; importing it runs code that the operator chose."""
    module, _, name = where.partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        why = " ".join(str(error).split())[:120]
        bound = f"module:name of {what}"
        raise InputError.of(key, where, bound, f"{remedy} ({why})") from None


def serve_messages(node: str, app: ClientApp, secret: bytes) -> None:
    """Take the SuperNode's messages one by one, for ever, each in a separate process.

    The next one is taken when the last is answered: a node has one vault, for one process.
    """
    # Told to end, a fork that still waits for its message gives up; one that works goes on.
    work, runtime = partial(answer_message, node, app), connect(node, None, secret)
    take_tasks(runtime, "flwr-clientapp", work, ask_to_end=signal.SIGTERM)


def connect(address: str, authority: bytes | None, secret: bytes) -> RuntimeHttpClient:
    """Return a client that asks a SuperNode (on loopback) or a SuperLink (over TLS) for tasks."""
    signed = SuperExecAuthHttpInterceptor(master_secret=secret, protected_methods={ACQUIRE})
    return RuntimeHttpClient.from_server_address(
        server_address=address,
        insecure=authority is None,  # loopback: the SuperNode is on this machine
        root_certificates=authority,
        interceptors=[RuntimeVersionHttpInterceptor(component_name="SuperExec"), signed],
    )


def take_tasks(
    client: RuntimeHttpClient, kind: str, work: Callable[[str], None], *, ask_to_end: int
) -> None:
    """Take tasks of one kind one by one until SIGTERM, and do each in a fork of this process.

    The last task is sent the signal `ask_to_end`, and waited for.
    """
    request = AcquireTaskRequest(supported_task_types=[kind])
    parent, stopped = os.getppid(), list[int]()
    signal.signal(signal.SIGTERM, lambda number, _frame: stopped.append(number))
    child, is_heard = 0, True  # the fork that does a task; whether the last question had an answer
    while os.getppid() == parent and not stopped:
        if child and _is_alive(child):
            time.sleep(BUSY)
            continue
        child = 0
        try:
            token = client.AcquireTask(request).token
        except (httpx.TransportError, httpx.HTTPStatusError) as error:
            # It is not up yet, or not up again; or its database is locked.
            if isinstance(error, httpx.HTTPStatusError) and not error.response.is_server_error:
                raise FederationError(
                    f"this worker is turned away ({error.response.status_code}); give it and the "
                    "SuperNode or SuperLink beside it one secret file, and start both again"
                ) from None
            if is_heard:
                log.info("no answer (%s); asked again until there is one", type(error).__name__)
            is_heard = False
            time.sleep(AGAIN)
            continue
        is_heard = True
        if not token:
            time.sleep(POLL)
        elif (child := os.fork()) == 0:
            _run_child(work, token)
    # What has been paid for is stored before the end: asked again, it need not be paid again.
    if child and stopped:
        keeper.send_signal(child, ask_to_end)
        _is_alive(child, 0)


def answer_message(node: str, app: ClientApp, token: str) -> None:
    """Answer the one message that this token stands for."""
    patient = make_simple_http_retry_invoker()
    patient.max_time = PATIENCE  # a SuperNode that was started again does not know the token
    client = RuntimeHttpClient.from_server_address(
        server_address=node,
        insecure=True,
        root_certificates=None,
        interceptors=[
            RuntimeVersionHttpInterceptor(component_name="flwr-clientapp"),
            RuntimeTokenHttpInterceptor(token),
        ],
        retry_invoker=patient,
    )
    heartbeat = HeartbeatSender(make_task_heartbeat_fn_http(client))
    heartbeat.start()
    context: Context | None = None
    outcome, details = "failed", SORRY
    try:
        with _limit_time(INPUT):
            message, context, _run, _bundle = pull_task_input(client)
        # A server that stops its run ends no answer between its debit and its upload.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        push_message(client, _answer(app, message, context), context)
        outcome, details = "completed", ""
        log.info("answered a message (%s)", message.metadata.message_type)
    finally:
        push_task_output(client, context, outcome, details)
        heartbeat.stop()
        client.close()


@contextlib.contextmanager
def _limit_time(seconds: int) -> Iterator[None]:
    """Give up after so long, or at SIGTERM: nothing has been paid for yet.

    A SuperNode that dropped a message (its run was stopped) lets its worker wait for two hours.
    """

    def end(*_: object) -> None:
        raise TimeoutError

    before = {number: signal.signal(number, end) for number in (signal.SIGALRM, signal.SIGTERM)}
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        for number, handler in before.items():
            signal.signal(number, handler)


def _answer(app: ClientApp, message: Message, context: Context) -> Message:
    try:
        return app(message=message, context=context)
    except Exception as error:  # a kind of message that the app does not know
        log.error("no answer: %s", type(error).__name__)
        return Message(Error(code=FAILED, reason=SORRY), reply_to=message)


def _run_child(work: Callable[[str], None], token: str) -> None:
    """Do one task in a fork; this never returns into the loop of the parent."""
    code = 1
    try:
        # It ends with its worker: another one may be asked, and a vault has room for one.
        keeper.find_prctl()(keeper.PR_SET_PDEATHSIG, signal.SIGKILL)
        threading.excepthook = lambda end: log.error("a thread ended: %s", end.exc_type.__name__)
        work(token)
        code = 0
    except Exception as error:
        log.error("a task was not done: %s", type(error).__name__)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _is_alive(child: int, options: int = os.WNOHANG) -> bool:
    """Return whether a fork has not ended; without options it is waited for."""
    try:
        return os.waitpid(child, options)[0] == 0
    except ChildProcessError:
        return False


def check_node(path: Path) -> None:
    """Check what a message would meet, and print that all is well or raise what is not."""
    from sottovoce.client import device
    from sottovoce.client.node import Node
    from sottovoce.data.check import check_node_rows

    node = Node.load(path)
    report = check_node_rows(node)
    if report.findings:  # for the operator's eyes alone: nothing of it leaves the machine
        print("\n".join(report.format_lines()), flush=True)
    device.check_node(node)
    if report.errors:
        raise InputError(report.errors[0])
    print(f"{path} is in order: its rows, its policy and {node.vault} fit each other")


def main(words: Sequence[str] | None = None) -> None:
    """Read the command line, then check or serve."""
    parser = processes.make_parser("worker", __doc__)
    parser.add_argument("--node", help="the SuperNode's --host:--port")
    parser.add_argument("--secret", type=Path, help="the file given to it as well")
    parser.add_argument("--app", default=APP, help="the ClientApp to run (default: %(default)s)")
    parser.add_argument("--warm", metavar="MODULE:FUNCTION", help="called before any message")
    parser.add_argument("--log", choices=["plain", "json"], default="plain")
    parser.add_argument("--check", type=Path, metavar="NODE.toml", help="look, say it, and end")
    parser.add_argument("--server", metavar="HOST:PORT", help="with --check: look at it as well")
    parser.add_argument("--authority", type=Path, metavar="ca.crt", help="who vouches for it")
    options = parser.parse_args(words)
    if options.check is not None:
        if options.server is not None:
            supernode.check_server(options.server, options.authority)
        check_node(options.check)
        return
    if options.node is None or options.secret is None:
        parser.error("--node and --secret are needed, or --check alone")
    processes.start_logging(as_json=options.log == "json")
    secret = read_secret(options.secret)
    importlib.import_module("sottovoce.client.device")  # once, and not in the fork of every message
    if options.warm is not None:
        _import_name("warm", options.warm, "a function", "it is called without arguments")()
    app, remedy = options.app, f"the default is {APP}"
    client_app = _import_name("app", app, "a ClientApp", remedy)
    if not isinstance(client_app, ClientApp):
        raise InputError.of("app", app, "module:name of a ClientApp", remedy)
    serve_messages(options.node, client_app, secret)


def read_secret(path: Path) -> bytes:
    """Return what a worker is known by; refuse a file that is missing or too short."""
    remedy = "write another as its user (openssl rand -hex 32), and start both who share it again"
    try:
        secret = path.read_bytes()
    except OSError as error:
        why = f"a file that can be read ({error.strerror})"
        raise InputError.of("secret", str(path), why, remedy) from None
    if len(secret) < SHORTEST_SECRET:
        raise InputError.of("secret", len(secret), f"at least {SHORTEST_SECRET} bytes long", remedy)
    return secret


if __name__ == "__main__":
    processes.run_command(main)
