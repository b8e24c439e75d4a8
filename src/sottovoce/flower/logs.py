"""A node's log as lines of JSON, for whatever collects logs: events and kinds of errors, no data.

An exception's text may hold a value from a client's rows, and a collector is another machine: so a
line has the exception's kind, and never its words.
"""

from __future__ import annotations

import json
import logging
from datetime import UTC, datetime


class Json(logging.Formatter):
    """One object a line: time, level, logger, event, and the kind of error where there was one.

    >>> line = logging.LogRecord("sottovoce", 40, "", 0, "no answer: %s", ("KeyError",), None)
    >>> line.created = 0.0
    >>> print(Json().format(line))
    {"time": "1970-01-01T00:00:00Z", "level": "ERROR", "logger": "sottovoce", \
"event": "no answer: KeyError"}
    """

    def format(self, record: logging.LogRecord) -> str:
        """The line."""
        words = {
            "time": datetime.fromtimestamp(int(record.created), UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
            "level": record.levelname,
            "logger": record.name,
            "event": record.getMessage(),
        }
        if record.exc_info and record.exc_info[0] is not None:
            words["error"] = record.exc_info[0].__name__
        return json.dumps(words, ensure_ascii=False)


def begin(*, as_json: bool) -> None:
    """Log to standard error, as lines of JSON or plainly; events of sottovoce alone, and errors."""
    handler = logging.StreamHandler()
    plain = logging.Formatter("%(asctime)s %(levelname)s %(message)s")
    handler.setFormatter(Json() if as_json else plain)
    logging.basicConfig(handlers=[handler])
    logging.getLogger("sottovoce").setLevel(logging.INFO)
