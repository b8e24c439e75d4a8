"""A node's log, plain or as lines of JSON: events and kinds of errors, no data.

An exception's text may hold a value from a client's rows, and whatever collects logs is another
machine: so a line has the exception's kind, and never its words. Words are for who asks on the
machine itself: `python -m sottovoce.flower.worker --check`, `sottovoce ledger`.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from datetime import UTC, datetime


class Json(logging.Formatter):
    """One object a line: time, level, logger, event, and the kind of error where there was one.

    >>> line = logging.LogRecord("sottovoce", 40, "", 0, "no answer: %s", (KeyError("x"),), None)
    >>> line.created = 0.0
    >>> print(Json().format(line))
    {"time": "1970-01-01T00:00:00Z", "level": "ERROR", "logger": "sottovoce", \
"event": "no answer: KeyError"}
    """

    def format(self, record: logging.LogRecord) -> str:
        """The line."""
        words = {
            "time": _time(record),
            "level": record.levelname,
            "logger": record.name,
            "event": _event(record),
        }
        if record.exc_info and record.exc_info[0] is not None:
            words["error"] = record.exc_info[0].__name__
        return json.dumps(words, ensure_ascii=False)


class Plain(logging.Formatter):
    """The same for reading: time, level, event, and the kind of error where there was one.

    >>> line = logging.LogRecord("sottovoce", 40, "", 0, "no answer: %s", (KeyError("x"),), None)
    >>> line.created = 0.0
    >>> print(Plain().format(line))
    1970-01-01T00:00:00Z ERROR no answer: KeyError
    """

    def format(self, record: logging.LogRecord) -> str:
        """The line."""
        line = f"{_time(record)} {record.levelname} {_event(record)}"
        if record.exc_info and record.exc_info[0] is not None:
            line += f" ({record.exc_info[0].__name__})"
        return line


def _time(record: logging.LogRecord) -> str:
    return datetime.fromtimestamp(int(record.created), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _event(record: logging.LogRecord) -> str:
    """What was logged, with the kind of every exception where it was given one."""
    msg, args = _wordless(record.msg), record.args
    if not args:
        return str(msg)
    if isinstance(args, Mapping):
        return str(msg) % {key: _wordless(value) for key, value in args.items()}
    return str(msg) % tuple(map(_wordless, args))


def _wordless(value: object) -> object:
    return type(value).__name__ if isinstance(value, BaseException) else value


def begin(*, as_json: bool) -> None:
    """Log to standard error, as lines of JSON or plainly; events of sottovoce alone, and errors."""
    handler = logging.StreamHandler()
    handler.setFormatter(Json() if as_json else Plain())
    logging.basicConfig(handlers=[handler])
    logging.getLogger("sottovoce").setLevel(logging.INFO)
