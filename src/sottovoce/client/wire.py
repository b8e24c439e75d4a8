"""Messages between client and server as bytes: a head in JSON and float32 arrays, and a checksum.

    "sottovoce/1\\n" | length of the text (4 bytes, little-endian) | text | arrays | SHA-256 of it

The text is canonical JSON, {"arrays": [[name, shape], …], "head": {…}}, sorted by name; the arrays
follow in that order, as little-endian float32. There is one encoding of a message: what was read is
encoded again and must give the same bytes. No pickle, no other type, nothing executable.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping
from typing import Any, NoReturn

import numpy as np
from numpy.typing import ArrayLike, NDArray

from sottovoce.errors import InputError, Malformed

MAGIC = b"sottovoce/1\n"
LONGEST_TEXT = 1 << 20
MOST_ARRAYS = 4096
DEEPEST = 8  # dimensions of one array
_NAME = re.compile(r"[A-Za-z0-9_.\[\]'/-]{1,200}")
_SUM = 32

Floats32 = NDArray[np.float32]


def pack(head: Mapping[str, Any], arrays: Mapping[str, ArrayLike] | None = None) -> bytes:
    """The bytes of a message. Arrays must be float32 already: nothing is rounded on the way out.

    >>> blob = pack({"kind": "greeting"}, {"w": np.ones(2, np.float32)})
    >>> head, arrays = unpack(blob)
    >>> head, arrays["w"].tolist()
    ({'kind': 'greeting'}, [1.0, 1.0])
    """
    leaves = {name: np.asarray(leaf) for name, leaf in sorted((arrays or {}).items())}
    for name, leaf in leaves.items():
        if leaf.dtype != np.float32:
            raise InputError.of(f"array {name}", str(leaf.dtype), "float32", "convert it first")
        if not _NAME.fullmatch(name) or leaf.ndim > DEEPEST:
            raise InputError.of("array", name, "a plain name with few dimensions", "rename it")
    text = _text(dict(head), [[name, list(leaf.shape)] for name, leaf in leaves.items()])
    body = b"".join(
        [
            MAGIC,
            len(text).to_bytes(4, "little"),
            text,
            *(np.ascontiguousarray(leaf, dtype="<f4").tobytes() for leaf in leaves.values()),
        ]
    )
    return body + hashlib.sha256(body).digest()


def unpack(blob: bytes, *, limit: int = 1 << 31) -> tuple[dict[str, Any], dict[str, Floats32]]:
    """The head and the arrays of a message; `Malformed` if it is anything but what `pack` makes.

    Sizes are checked before anything is allocated. The arrays may hold any float32 (NaN included):
    what they must be is for the reader to say.

    >>> unpack(pack({})[:-1])
    Traceback (most recent call last):
        ...
    sottovoce.errors.Malformed: the message was cut short or changed on its way
    """
    if not isinstance(blob, bytes):
        _refuse("the message is not bytes")
    if len(blob) > limit:
        _refuse(f"the message has {len(blob)} bytes, and at most {limit} are read")
    start = len(MAGIC) + 4
    if len(blob) < start + _SUM or not blob.startswith(MAGIC):
        _refuse("the message is not one of sottovoce's, version 1")
    if hashlib.sha256(memoryview(blob)[:-_SUM]).digest() != blob[-_SUM:]:
        _refuse("the message was cut short or changed on its way")
    length = int.from_bytes(blob[len(MAGIC) : start], "little")
    if length > min(LONGEST_TEXT, len(blob) - start - _SUM):
        _refuse("the message's head is longer than the message")
    text = blob[start : start + length]
    head, described = _read(text)
    shapes = _shapes(described)
    if _text(head, described) != text:
        _refuse("the message's head is not written in the one canonical way")
    if 4 * sum(math.prod(shape) for shape in shapes.values()) != len(blob) - start - length - _SUM:
        _refuse("the message's arrays do not have the sizes it states")
    arrays, at = {}, start + length
    for name, shape in shapes.items():
        count = math.prod(shape)
        leaf = np.frombuffer(blob, dtype="<f4", count=count, offset=at).reshape(shape)
        arrays[name] = leaf.astype(np.float32)  # a copy in the machine's order, writable
        at += 4 * count
    return head, arrays


def _text(head: dict[str, Any], described: Any) -> bytes:
    try:
        return json.dumps(
            {"arrays": described, "head": head},
            sort_keys=True,
            separators=(",", ":"),
            ensure_ascii=True,
            allow_nan=False,
        ).encode()
    except (TypeError, ValueError, RecursionError):
        raise Malformed("the message's head holds what plain JSON cannot") from None


def _read(text: bytes) -> tuple[dict[str, Any], Any]:
    try:
        read = json.loads(text, parse_constant=_no_constant)
    except (ValueError, RecursionError):
        _refuse("the message's head is not JSON")
    if not isinstance(read, dict) or read.keys() != {"arrays", "head"}:
        _refuse("the message's head has not the two parts of a head")
    if not isinstance(read["head"], dict):
        _refuse("the message's head is no object")
    return read["head"], read["arrays"]


def _shapes(described: Any) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {}
    if not isinstance(described, list) or len(described) > MOST_ARRAYS:
        _refuse("the message does not list its arrays")
    for entry in described:
        if not isinstance(entry, list) or len(entry) != 2:
            _refuse("an array of the message has no name and shape")
        name, shape = entry
        if not isinstance(name, str) or not _NAME.fullmatch(name) or name in shapes:
            _refuse("an array of the message has no name of its own")
        if (
            not isinstance(shape, list)
            or len(shape) > DEEPEST
            or not all(type(size) is int and 0 <= size < 2**40 for size in shape)
            or math.prod(max(1, size) for size in shape)
            >= 2**40  # a 0 would hide what is beside it
        ):
            _refuse("an array of the message has no proper shape")
        shapes[name] = tuple(shape)
    if list(shapes) != sorted(shapes):
        _refuse("the message's arrays are not in order")
    return shapes


def _no_constant(name: str) -> NoReturn:
    raise ValueError(name)


def _refuse(sentence: str) -> NoReturn:
    raise Malformed(sentence)
