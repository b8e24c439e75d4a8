"""Processes that end with the one that started them (the parent's side of `keeper`), and logs.

A log is plain or lines of JSON: events and kinds of errors, no data. An exception's text may
contain a value from a client's rows, and logs are collected on other machines; so a line has the
exception's kind, never its words. The words are shown on the machine itself: `python -m
sottovoce.flower.worker --check`, `sottovoce ledger`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any, NoReturn, Self

from sottovoce.errors import FederationError, InputError, SottovoceError
from sottovoce.flower import keeper


def run_command(work: Callable[[], None]) -> NoReturn:
    """Do the work and exit as the command line does: 0 ok, 1 failed, 2 bad input, 130 interrupted.

    >>> run_command(lambda: None)
    Traceback (most recent call last):
        ...
    SystemExit: 0
    """
    try:
        work()
        sys.exit(0)
    except SottovoceError as error:
        sentence, code = str(error), 2 if isinstance(error, InputError) else 1
    except KeyboardInterrupt:
        sentence, code = "interrupted", 130
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        sentence, code = f"{where}the system refused: {error.strerror or error}", 1
    sys.stderr.write(f"sottovoce: {sentence}\n")
    sys.exit(code)


def make_parser(module: str, description: str | None) -> argparse.ArgumentParser:
    """Return the parser of a module's command line, which prints the module's own words."""
    name, form = f"python -m sottovoce.flower.{module}", argparse.RawDescriptionHelpFormatter
    return argparse.ArgumentParser(prog=name, description=description, formatter_class=form)


class EventFormatter(logging.Formatter):
    """A line of time, level, event, and the kind of error where there was one; plain or as JSON.

    >>> line = logging.LogRecord("sottovoce", 40, "", 0, "no answer: %s", (KeyError("x"),), None)
    >>> line.created = 0.0
    >>> print(EventFormatter(as_json=False).format(line))
    1970-01-01T00:00:00Z ERROR no answer: KeyError
    >>> print(EventFormatter(as_json=True).format(line))
    {"time": "1970-01-01T00:00:00Z", "level": "ERROR", "logger": "sottovoce", \
"event": "no answer: KeyError"}
    """

    def __init__(self, *, as_json: bool) -> None:
        super().__init__()
        self.as_json = as_json

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        when = datetime.fromtimestamp(int(record.created), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        words = {"time": when, "level": record.levelname, "logger": record.name}
        words["event"] = _format_event(record)
        if record.exc_info and record.exc_info[0] is not None:
            words["error"] = record.exc_info[0].__name__
        if self.as_json:
            return json.dumps(words, ensure_ascii=False)
        line = f"{when} {record.levelname} {words['event']}"
        return line + (f" ({words['error']})" if "error" in words else "")


def _format_event(record: logging.LogRecord) -> str:
    """Return what was logged, with the kind of every exception in place of its words."""
    msg, args = str(_hide_words(record.msg)), record.args
    if not args:
        return msg
    if isinstance(args, Mapping):
        return msg % {key: _hide_words(value) for key, value in args.items()}
    return msg % tuple(map(_hide_words, args))


def _hide_words(value: object) -> object:
    return type(value).__name__ if isinstance(value, BaseException) else value


def start_logging(*, as_json: bool) -> None:
    """Log events of sottovoce, and errors, to standard error, plainly or as JSON."""
    handler = logging.StreamHandler()
    handler.setFormatter(EventFormatter(as_json=as_json))
    logging.basicConfig(handlers=[handler])
    logging.getLogger("sottovoce").setLevel(logging.INFO)


TAIL = 12  # lines of a log that an error message shows
# Seconds; the keeper answers a start at once, so that a longer silence means it is gone.
ANSWER = 10.0


@dataclass
class Process:
    """One process that the keeper started: alive until `code` is known."""

    name: str
    log: Path
    pid: int = 0
    code: int | None = None
    why: str = ""  # it could not be started
    asked: bool = False  # whether it was told to end
    changed: threading.Condition = field(default_factory=threading.Condition, repr=False)

    @property
    def alive(self) -> bool:
        """Whether it was started and has not ended."""
        return self.pid != 0 and self.code is None

    def wait(self, seconds: float) -> int | None:
        """Return its exit code, or None if it still runs after `seconds`."""
        with self.changed:
            self.changed.wait_for(lambda: self.code is not None, seconds)
        return self.code

    def tail(self, lines: int = TAIL) -> str:
        """Return the last lines of its log, for an error message."""
        try:
            text = self.log.read_text("utf-8", "replace")
        except OSError:
            return ""
        return "\n".join([line for line in text.splitlines() if line.strip()][-lines:])


class Processes:
    """A context in which processes live; when it ends, none of them is left."""

    def __init__(self, grace: float = keeper.GRACE) -> None:
        self.grace = grace
        self.longest = 0.0  # what any process may take before the others are told to end
        self.all: dict[str, Process] = {}
        self._lock = threading.Lock()
        self._keeper: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        self._keeper = subprocess.Popen(
            [sys.executable, "-I", keeper.__file__, str(os.getpid()), str(self.grace)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C reaches only the parent, which then stops it
        )
        threading.Thread(target=self._listen, daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    @property
    def pid(self) -> int:
        """The keeper's pid: every process of this context is below it."""
        return self._require_keeper().pid

    def start(
        self,
        name: str,
        argv: Sequence[str],
        *,
        log: Path,
        env: Mapping[str, str] | None = None,
        grace: float = 0.0,
    ) -> Process:
        """Start `argv`; its output is appended to `log`.

        With a `grace` it is told to end before those without one, and waited for so long.
        """
        process = Process(name=name, log=log)
        self.longest = max(self.longest, grace)
        self.all[name] = process
        self._send_order(
            {
                "start": name,
                "argv": [str(word) for word in argv],
                "env": dict(os.environ if env is None else env),
                "log": str(log),
                "grace": grace,
            }
        )
        with process.changed:
            heard = process.changed.wait_for(
                lambda: process.pid != 0 or process.code is not None, ANSWER
            )
        if not heard or (process.code == 127 and process.pid == 0):
            raise FederationError(f"{argv[0]} could not be started ({process.why or 'no answer'})")
        return process

    def stop(self) -> None:
        """End every process and the keeper; return when none is left."""
        if (running := self._keeper) is None:
            return
        for process in self.all.values():
            process.asked = True
        with contextlib.suppress(FederationError):  # it is gone: the kernel ended what it kept
            self._send_order({"stop": True})
        self._keeper = None
        limit = self.longest + self.grace + keeper.LAST + ANSWER
        try:
            running.wait(limit)
        except subprocess.TimeoutExpired:
            running.kill()
            running.wait()
        for stream in (running.stdin, running.stdout):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()

    def _require_keeper(self) -> subprocess.Popen[bytes]:
        if self._keeper is None:
            raise FederationError("the processes were stopped; start a new context")
        return self._keeper

    def _send_order(self, order: dict[str, Any]) -> None:
        pipe = self._require_keeper().stdin
        assert pipe is not None
        try:
            with self._lock:
                pipe.write(json.dumps(order).encode() + b"\n")
                pipe.flush()
        except OSError:
            raise FederationError(
                "the process that keeps the others has ended; start the federation again"
            ) from None

    def _listen(self) -> None:
        pipe = self._require_keeper().stdout
        assert pipe is not None
        for line in _read_lines(pipe):  # until the pipe is closed, at this end or the other
            words = json.loads(line)
            process = self.all.get(words.get("started") or words.get("ended") or "")
            if process is None:
                continue
            with process.changed:
                if "pid" in words:
                    process.pid = words["pid"]
                else:
                    process.code, process.why = words["code"], words.get("why", "")
                process.changed.notify_all()
        for process in list(self.all.values()):
            with process.changed:  # the keeper is gone, and with it all it kept
                process.code = process.code if process.code is not None else -signal.SIGKILL
                process.changed.notify_all()


def _read_lines(pipe: IO[bytes]) -> Iterator[bytes]:
    with contextlib.suppress(ValueError):  # closed by another thread, perhaps while it was read
        yield from iter(pipe.readline, b"")
