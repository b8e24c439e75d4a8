"""One line of the ledger, the hash that ties it to all lines before it, and the steps of a write.

    hash_k = SHA-256(version ‖ hash_{k−1} ‖ seq ‖ time ‖ kind ‖ payload),  hash_0 = 00…0,

where each field is text that ends in a newline; a payload is canonical JSON and contains none. A
hash is enough to tell whether a ledger still contains everything up to its line.

Hashes leave the client as receipts, and lines contain what must not leave, above all the
fingerprint of the records. So every payload has a salt of 256 random bits that stays in the ledger:
without it, whoever can guess the rest of a line could test datasets against its hash.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

GENESIS = "0" * 64
_VERSION = "sottovoce.vault/1"
_HEX = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class Line:
    """One line of the ledger, as it is stored."""

    seq: int
    time: str
    kind: str
    payload: str
    prev: str
    hash: str

    @property
    def facts(self) -> dict[str, Any]:
        """The payload as plain data."""
        facts: dict[str, Any] = json.loads(self.payload)
        return facts


def encode_canonical(data: Any) -> str:
    """Return the canonical text of a JSON value: sorted keys, no spaces, ASCII, no NaN.

    >>> encode_canonical({"b": 1.5, "a": ["ε", None]})
    '{"a":["\\\\u03b5",null],"b":1.5}'
    """
    return json.dumps(data, sort_keys=True, separators=(",", ":"), allow_nan=False)


def add_salt(facts: Mapping[str, Any]) -> str:
    """Return the payload of a new line: canonical, with a random salt.

    >>> add_salt({"a": 1}) == add_salt({"a": 1})
    False
    """
    return encode_canonical({**facts, "salt": os.urandom(32).hex()})


def link_line(prev: str, seq: int, time: str, kind: str, payload: str) -> Line:
    """Return the line that follows the one whose hash is `prev`.

    >>> first = link_line(GENESIS, 1, "2026-01-01T00:00:00+00:00", "create", "{}")
    >>> link_line(first.hash, 2, first.time, "reserve", "{}").prev == first.hash
    True
    """
    text = "".join(f"{field}\n" for field in (_VERSION, prev, seq, time, kind, payload))
    return Line(seq, time, kind, payload, prev, hashlib.sha256(text.encode()).hexdigest())


def is_hash(value: object) -> bool:
    """Return whether a value is a SHA-256 in hexadecimal.

    >>> is_hash(GENESIS), is_hash("0" * 63), is_hash(None)
    (True, False, False)
    """
    return isinstance(value, str) and _HEX.fullmatch(value) is not None


# The named moments of a write: a test stops the process at each of them.
WRITES = ("reserve", "store", "tighten", "rebind", "move", "restore", "stop", "resume")
STEPS = (
    "create: begun",
    "create: committed",
    "create: witness written",
    "create: witnessed",
    "create: named",
    "open: witness written",
    *(
        f"{kind}: {moment}"
        for kind in WRITES
        for moment in (
            "begun",
            "summarised",
            "inserted",
            "committed",
            "witness written",
            "witnessed",
        )
    ),
    "reserve: dropped",
)


def pass_step(step: str) -> None:
    """Do nothing: a test replaces this to stop the process at a step."""
