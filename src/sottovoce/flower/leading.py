"""A run led through Flower: the run's configuration in, `coordinator.conduct`, the run folder out.

| run config | what it is |
|---|---|
| `plan` | the plan's file (TOML) |
| `public` | the server's own rows (`sottovoce.public`) |
| `out` | the folder of the run |
| `clients` | how many have to be there before it begins |
| `gathering` | seconds to wait for them |
| `deadline` | seconds for the answers of a round |
| `minimum` | uploads without which a round does not count |
| `resume` | go on with the run that was stopped in `out` |
| `keep-uploads` | keep every upload that counted, in `out`/uploads |
| `insecure` | the transport is not encrypted: the record says so |
| `name` | the server's name, as the clients' ledgers note it |
| `progress` | a file that gets a line of JSON a round; none if empty |

One process leads a run: it holds a lock on `out`/server.lock, which dies with it.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sottovoce.errors import InputError, RunError
from sottovoce.flower.transport import Failure, Roll, Seat

if TYPE_CHECKING:
    from sottovoce.simulation.done import RoundDone

LOCK = "server.lock"
# A server that is being stopped may still write its record.
LOCK_SECONDS = 60.0
STOPS = (signal.SIGINT, signal.SIGTERM)


class Routes:
    """The coordinator's transport on a roll; a route is the id of the client at its end."""

    def __init__(self, roll: Roll) -> None:
        self.roll = roll
        self.rounds = 0
        self._announced: dict[str, Seat | bytes] = {}

    def greet(self, seconds: float) -> dict[str, bytes]:
        """What nodes said that have appeared, or have been greeted anew."""
        seats = self.roll.call(wanted=0, seconds=seconds)
        # What is no greeting is handed on as well: the coordinator has words for it.
        strange = {f"node {node}": words for node, words in self.roll.strange.items()}
        now: dict[str, Seat | bytes] = {**seats, **strange}
        new = {route: it for route, it in now.items() if self._announced.get(route) is not it}
        self._announced = now
        return {route: it.hello if isinstance(it, Seat) else it for route, it in new.items()}

    def ask(self, requests: Mapping[str, bytes], seconds: float) -> dict[str, bytes]:
        """The answers that came in time."""
        self.rounds += 1
        said = self.roll.ask(requests, group=str(self.rounds), seconds=seconds)
        return {route: blob for route, blob in said.items() if not isinstance(blob, Failure)}


def client_of(hello: bytes) -> str:
    """A client's id: that of its vault, as the server's own registry reads it."""
    from sottovoce.server.registry import Member

    return Member.from_hello(hello).vault


def lead(roll: Roll, config: Mapping[str, Any]) -> None:
    """Lead a run from the first greeting to the record."""
    from sottovoce import public
    from sottovoce.coordinator import Patience, conduct
    from sottovoce.plan import Plan

    paths = {key: _path(config, key) for key in ("plan", "public", "out")}
    plan, held = Plan.load(paths["plan"]), public.load(paths["public"])
    patience = Patience(
        clients=int(config["clients"]),
        gathering=float(config["gathering"]),
        round=float(config["deadline"]),
        minimum=int(config["minimum"]),
    )
    with alone(paths["out"]):
        conduct(
            plan,
            held,
            Routes(roll),
            patience,
            out=paths["out"],
            on_round=_teller(str(config["progress"])),
            resume=bool(config["resume"]),
            keep_uploads=bool(config["keep-uploads"]),
            insecure=bool(config["insecure"]),
            server=str(config["name"]),
            versions={"flwr": metadata.version("flwr")},
        )


@contextlib.contextmanager
def alone(out: Path, seconds: float = LOCK_SECONDS) -> Iterator[None]:
    """Be the only process that leads the run of this folder; its number stands in the lock."""
    out.mkdir(parents=True, exist_ok=True)
    until = time.monotonic() + seconds
    with (out / LOCK).open("a+", encoding="ascii") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > until:
                    raise RunError(
                        f"{out} is led by another process; wait for its end or stop it"
                    ) from None
                time.sleep(0.1)
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """While this lasts, SIGINT and SIGTERM are a KeyboardInterrupt, and Flower's again after it.

    Flower would end the process in the middle of whatever it does; a run wants to write its record.
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


def _teller(path: str) -> Callable[[RoundDone], None]:
    def tell(done: RoundDone) -> None:
        if path:
            with Path(path).open("a", encoding="utf-8") as file:
                file.write(json.dumps(asdict(done)) + "\n")

    return tell


def _path(config: Mapping[str, Any], key: str) -> Path:
    value = config[key]
    if not isinstance(value, str) or not value:
        raise InputError.of(key, value, "a path", f"give it as: flwr run --run-config {key}='…'")
    return Path(value)
