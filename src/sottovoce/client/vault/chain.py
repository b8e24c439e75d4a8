"""One line of the ledger, and the hash that ties it to all lines before it.

    hash_k = SHA-256(version ‖ hash_{k−1} ‖ seq ‖ time ‖ kind ‖ payload),  hash_0 = 00…0,

the fields as text, each ending in a newline; a payload is canonical JSON and holds none. Whoever
knows a hash can tell whether a ledger still contains everything up to it.

Hashes leave the client as receipts, and lines hold what must not leave, above all the fingerprint
of its records. Every payload therefore has a salt of 256 random bits that stays in the ledger:
without it, whoever can guess the rest of a line could try out data sets against its hash.
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
    """One entry of the chain, as it is stored."""

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


def canonical(data: Any) -> str:
    """The one text of a JSON value: sorted keys, no spaces, ASCII, no NaN.

    >>> canonical({"b": 1.5, "a": ["ε", None]})
    '{"a":["\\\\u03b5",null],"b":1.5}'
    """
    return json.dumps(data, sort_keys=True, separators=(",", ":"), allow_nan=False)


def salted(facts: Mapping[str, Any]) -> str:
    """The payload of a new line: canonical, and with a salt of its own.

    >>> salted({"a": 1}) == salted({"a": 1})
    False
    """
    return canonical({**facts, "salt": os.urandom(32).hex()})


def chained(prev: str, seq: int, time: str, kind: str, payload: str) -> Line:
    """The next line after the one whose hash is `prev`.

    >>> first = chained(GENESIS, 1, "2026-01-01T00:00:00+00:00", "create", "{}")
    >>> chained(first.hash, 2, first.time, "reserve", "{}").prev == first.hash
    True
    """
    text = "".join(f"{part}\n" for part in (_VERSION, prev, seq, time, kind, payload))
    return Line(seq, time, kind, payload, prev, hashlib.sha256(text.encode()).hexdigest())


def is_hash(value: object) -> bool:
    """Whether a value is a SHA-256 in hexadecimal.

    >>> is_hash(GENESIS), is_hash("0" * 63), is_hash(None)
    (True, False, False)
    """
    return isinstance(value, str) and _HEX.fullmatch(value) is not None
