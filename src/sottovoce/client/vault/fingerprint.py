"""Which dataset a vault belongs to: one hash of its rows."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from sottovoce.data.files import read_npz, why
from sottovoce.errors import DataError, InputError

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
        raise InputError.of(
            "y", len(labels), f"as many labels as x has rows ({len(rows)})", "one for each row"
        )
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


def sha256(content: bytes) -> str:
    """Return SHA-256 of bytes, in hexadecimal.

    >>> sha256(b"")[:8]
    'e3b0c442'
    """
    return hashlib.sha256(content).hexdigest()


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
            return fingerprint(x, y), len(x)
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest(), None
    except FileNotFoundError:
        raise InputError.of("DATA", str(path), "a file that exists", "check its name") from None
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read as the client's rows: {why(error)}") from None


def _numbers(name: str, values: ArrayLike) -> NDArray[Any]:
    given = np.asarray(values)
    if given.dtype.kind not in "biuf" or given.ndim < 1:
        raise InputError.of(name, given.dtype, "an array of numbers", "encode categories first")
    return given
