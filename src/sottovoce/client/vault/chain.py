"""One line of the ledger, the hash that ties it to all lines before it, and the steps of a write.

    hash_k = SHA-256(version ‖ hash_{k−1} ‖ seq ‖ time ‖ kind ‖ payload),  hash_0 = 00…0,

where each field is text that ends in a newline; a payload is canonical JSON and contains none. A
hash is enough to tell whether a ledger still contains everything up to its line.

Hashes leave the client as receipts, and lines contain what must not leave, above all the
fingerprint of the records. So every payload has a salt of 256 random bits that stays in the ledger:
without it, whoever can guess the rest of a line could test datasets against its hash.

`fingerprint` is the hash of a client's rows, which names the dataset that a vault belongs to.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from sottovoce.data.files import read_npz, why
from sottovoce.errors import DataError, InputError

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
    """Return the payload of a new line: canonical, with a random salt."""
    return encode_canonical({**facts, "salt": os.urandom(32).hex()})


def link_line(prev: str, seq: int, time: str, kind: str, payload: str) -> Line:
    """Return the line that follows the one whose hash is `prev`."""
    text = "".join(f"{field}\n" for field in (_VERSION, prev, seq, time, kind, payload))
    return Line(seq, time, kind, payload, prev, sha256(text))


def is_hash(value: object) -> bool:
    """Return whether a value is a SHA-256 in hexadecimal."""
    return isinstance(value, str) and _HEX.fullmatch(value) is not None


def pass_step(step: str) -> None:
    """Do nothing at a named moment of a write: a test replaces this to stop the process there."""


_ROWS_VERSION = b"sottovoce.rows/1\n"
_BLOCK = 4096


def fingerprint(x: ArrayLike, y: ArrayLike) -> str:
    """Return SHA-256 of the rows of (x, y), whatever their order; duplicates count.

    It depends on values, not on types: features as float64, labels as int64 (float64 if they are
    not integers), a sample of several dimensions as one row. Each row is hashed with its label; the
    hashes are sorted and hashed again.

    >>> rows, labels = np.array([[1.0, 2.0], [3.0, 4.0]]), np.array([0, 1])
    >>> fingerprint(rows, labels) == fingerprint(rows[::-1].astype("float32"), labels[::-1])
    True
    >>> fingerprint(rows, labels) == fingerprint(rows, labels[::-1])
    False
    """
    rows, labels = _numbers("x", x), _numbers("y", y)
    if len(rows) != len(labels):
        remedy = "one for each row"
        raise InputError.of("y", len(labels), f"as many labels as x has rows ({len(rows)})", remedy)
    total = hashlib.sha256(_ROWS_VERSION)
    width = rows.size // max(1, len(rows)), labels.size // max(1, len(labels))
    kind = "<f8" if labels.dtype.kind == "f" else "<i8"
    total.update(f"{width} {kind}\n".encode())
    hashes: list[bytes] = []
    for start in range(0, len(rows), _BLOCK):  # a copy in float64 of so many rows at a time
        samples = rows[start : start + _BLOCK].astype("<f8").reshape(-1, width[0])
        marks = labels[start : start + _BLOCK].astype(kind).reshape(-1, width[1])
        for row, mark in zip(samples, marks, strict=True):
            hashes.append(hashlib.sha256(row.tobytes() + mark.tobytes()).digest())
    total.update(b"".join(sorted(hashes)))
    return total.hexdigest()


def sha256(content: bytes | str) -> str:
    """Return SHA-256 of bytes or a text, in hexadecimal."""
    return hashlib.sha256(content.encode() if isinstance(content, str) else content).hexdigest()


def fingerprint_file(path: str | Path) -> tuple[str, int | None]:
    """Return the fingerprint of a file, and its number of rows where the file has it.

    For a .npz with arrays x and y it is that of its rows, so order, types and compression do not
    matter. For any other file (CSV, Parquet) it is SHA-256 of its bytes, so that any edit counts as
    a change; its rows are not counted.
    """
    path = Path(path)
    try:
        if path.suffix.lower() == ".npz":
            x, y = read_npz(path, "x", "y").values()
            if x.dtype.kind == "U" and x.ndim == 1:
                from sottovoce.models.network import as_samples

                x = as_samples(x)
            return fingerprint(x, y), len(x)
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest(), None
    except FileNotFoundError:
        raise InputError.of("DATA", str(path), "a file that exists", "check its name") from None
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read as the client's rows: {why(error)}") from None


def _numbers(name: str, values: ArrayLike) -> NDArray[Any]:
    array = np.asarray(values)
    if array.dtype.kind not in "biuf" or array.ndim < 1:
        raise InputError.of(name, array.dtype, "an array of numbers", "encode categories first")
    return array
