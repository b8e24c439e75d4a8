"""The server's side of Flower: a ServerApp around whatever conducts the rounds.

A conductor knows nothing of Flower: it gets the directory of clients, which it calls and asks by
their own ids in plain bytes, and the run's configuration. Here it is `lead_run`, which calls
`coordinator.conduct`.

docs/deploy.md lists the keys of the run config; one more, `progress`, names a file that gets a line
of JSON a round. All of them are checked before anyone is greeted. One process leads a run: it holds
`out`, as everyone who plays a run, and `out`/server.lock has its pid.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from sottovoce.data.files import hold_folder
from sottovoce.errors import InputError, RunError, SottovoceError
from sottovoce.flower.transport import NodeDirectory

if TYPE_CHECKING:
    from sottovoce.runs.checkpoint import RoundDone

LOCK = "server.lock"
# A server that is being stopped may still write its record.
LOCK_SECONDS = 60.0
STOPS = (signal.SIGINT, signal.SIGTERM)


def _is_server_name(value: str) -> bool:
    from sottovoce.client.messages import SERVER

    return SERVER.fullmatch(value) is not None


# Each key of the run config: its types, what it must be, how it is given, and the check of that.
KINDS: dict[str, tuple[tuple[type, ...], str, str, Callable[[Any], bool]]] = {
    **dict.fromkeys(("plan", "public", "out"), ((str,), "a path", "'…'", bool)),
    **dict.fromkeys(("clients", "minimum"), ((int,), "a whole number ≥ 1", "3", lambda n: n >= 1)),
    **dict.fromkeys(
        ("gathering", "deadline"),
        ((int, float), "seconds above 0, up to 1e+07", "60", lambda s: 0 < s <= 10.0**7),
    ),
    **dict.fromkeys(
        ("resume", "keep-uploads", "insecure"), ((bool,), "true or false", "true", lambda _: True)
    ),
    "name": ((str,), "at most 80 letters, digits and . _ : - or spaces", "'…'", _is_server_name),
    "progress": (
        (str,), "a file in a folder that exists", "'…'", lambda f: not f or Path(f).parent.is_dir()
    ),
    "admitted": (
        (str,), "a file that exists, or empty", "'…'", lambda f: not f or Path(f).is_file()
    ),
}  # fmt: skip


def read_client_id(hello: bytes) -> str:
    """Return a client's id from its greeting: that of its vault."""
    from sottovoce.server.members import Member

    return Member.from_hello(hello).vault


def lead_run(directory: NodeDirectory, config: Mapping[str, Any]) -> None:
    """Lead a run from the first greeting to the record."""
    from sottovoce.data import federated
    from sottovoce.plan import Plan
    from sottovoce.server.coordinator import conduct, read_admitted
    from sottovoce.server.members import Patience

    for key, (types, bound, example, is_good) in KINDS.items():
        value = config.get(key)
        # A run would spend budget with it and then fail.
        if type(value) not in types or not is_good(value):
            remedy = f'give it as: flwr run APP federation --run-config "{key}={example}"'
            raise InputError.of(key, value, bound, remedy)
    secure = is_encrypted(directory.grid)
    if not secure and not config["insecure"]:
        remedy = (
            "start the SuperLink with its certificate, or allow it with: "
            'flwr run APP federation --run-config "insecure=true"'
        )
        raise InputError.of("insecure", "false", "true where nothing is encrypted", remedy)
    paths = {key: Path(config[key]) for key in ("plan", "public", "out")}
    plan, held = Plan.load(paths["plan"]), federated.load_public(paths["public"])
    admitted = read_admitted(config["admitted"]) if config["admitted"] else None
    waits = {key: config[key] for key in ("clients", "gathering", "deadline", "minimum")}

    def report(done: RoundDone) -> None:
        if config["progress"]:
            with Path(config["progress"]).open("a", encoding="utf-8") as file:
                file.write(json.dumps(asdict(done)) + "\n")

    with lock_run(paths["out"]):
        conduct(
            plan,
            held,
            directory,
            Patience(**waits),
            out=paths["out"],
            on_round=report,
            resume=config["resume"],
            keep_uploads=config["keep-uploads"],
            insecure=not secure,
            server=config["name"],
            versions={"flwr": metadata.version("flwr")},
            admitted=admitted,
        )


@contextlib.contextmanager
def lock_run(out: Path, seconds: float = LOCK_SECONDS) -> Iterator[None]:
    """Be the only process that leads the run of this folder; a file in it has the pid."""
    with hold_folder(out, seconds), (out / LOCK).open("a+", encoding="ascii") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # NFS locks files, but no folders
        except BlockingIOError:
            raise RunError(
                f"{out} is led by another process; wait for its end or stop it"
            ) from None
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield


@contextlib.contextmanager
def allow_interrupts() -> Iterator[None]:
    """Turn SIGINT and SIGTERM into KeyboardInterrupt meanwhile; give them back to Flower after.

    Flower would end the process in the middle of its work; a run has to write its record first.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in STOPS}

    def stop(*_: object) -> None:
        for number in STOPS:
            signal.signal(number, signal.SIG_IGN)  # once is enough: the record is being written
        raise KeyboardInterrupt

    for number in STOPS:
        signal.signal(number, stop)
    interrupted = False
    try:
        yield
    except KeyboardInterrupt:
        interrupted = True
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if interrupted:
        signal.raise_signal(signal.SIGTERM)  # Flower's own end of a run that was stopped
        raise KeyboardInterrupt


def is_encrypted(grid: object) -> bool:
    """Return whether the SuperLink uses TLS, as this app's connection to it: it has one port.

    A grid that does not know counts as plaintext: a record must not promise what is not known.
    """
    return getattr(grid, "_insecure", True) is False


Scalar = str | int | float | bool
Conductor = Callable[[NodeDirectory, Mapping[str, Scalar]], None]
# What an answer may weigh: 2 GiB is where protobuf ends.
LIMIT = 2**31 - 2**20


def build_app(conduct: Conductor, identify: Callable[[bytes], str]) -> ServerApp:
    """Build a ServerApp that lets `conduct` lead; `identify` reads a client's id from its hello."""
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        if _say_in_one_sentence not in logging.getLogger("flwr").filters:
            logging.getLogger("flwr").addFilter(_say_in_one_sentence)
        with allow_interrupts():
            conduct(NodeDirectory(grid, identify, limit=LIMIT), dict(context.run_config))

    return app


def _say_in_one_sentence(record: logging.LogRecord) -> bool:
    """Log an error of ours by its words: Flower would print where in our code it was raised."""
    error = record.exc_info[1] if record.exc_info else None
    if isinstance(error, SottovoceError):
        record.msg, record.args, record.exc_info = f"the run stopped: {error}", (), None
    return True


app = build_app(lead_run, read_client_id)
