"""Messages as bytes: one encoding each, and everything else refused before it is believed."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays

from sottovoce.client import messages
from sottovoce.client.messages import Request
from sottovoce.errors import InputError, Malformed
from sottovoce.privacy.sensitivity import Recipe
from support.devices import ask, opened, sealed, written

GOOD = messages.pack(
    {"kind": "greeting", "n": 3, "x": [0.5, None, True, "ε"]},
    {"b": np.float32(1.5), "w": np.arange(6, dtype=np.float32).reshape(2, 3)},
)
NAMES = st.text("abcXYZ019_.[]'/-", min_size=1, max_size=12)
PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=8,
)
LEAVES = arrays(np.float32, array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=3))


@pytest.mark.slow
@given(st.dictionaries(st.text(max_size=6), PLAIN), st.dictionaries(NAMES, LEAVES, max_size=4))
@settings(max_examples=200, deadline=None)
def test_what_is_packed_comes_back_bit_for_bit_and_packs_to_the_same_bytes(head, leaves):
    blob = messages.pack(head, leaves)
    read, got = messages.unpack(blob)
    assert read == json.loads(json.dumps(head))
    assert got.keys() == leaves.keys()
    for name, leaf in leaves.items():
        assert got[name].shape == leaf.shape
        assert got[name].dtype == np.float32
        assert got[name].tobytes() == leaf.tobytes()  # NaNs with their bits
        assert got[name].flags.writeable
    assert messages.pack(read, got) == blob


def _edits(seed: int, count: int) -> list[bytes]:
    rng = np.random.default_rng(seed)
    out = []
    for _ in range(count):
        blob, place = bytearray(GOOD), int(rng.integers(len(GOOD)))
        match rng.integers(4):
            case 0:
                blob[place] ^= 1 << int(rng.integers(8))
            case 1:
                del blob[place]
            case 2:
                blob.insert(place, int(rng.integers(256)))
            case _:
                other = int(rng.integers(len(GOOD)))
                blob[place], blob[other] = blob[other], blob[place]
        out.append(bytes(blob))
    return out


def test_every_edit_of_a_byte_is_refused():
    for edited in _edits(7, 2000):
        if edited != GOOD:
            with pytest.raises(Malformed):
                messages.unpack(edited)


@pytest.mark.parametrize("length", range(0, len(GOOD), 7))
def test_a_message_that_was_cut_is_refused(length):
    with pytest.raises(Malformed):
        messages.unpack(GOOD[:length])


TEXT, BODY = opened(GOOD)


def _arrays(*described: object) -> bytes:
    return written({"head": {}, "arrays": list(described)})


def _claiming(length: int) -> bytes:
    whole = messages.MAGIC + length.to_bytes(4, "little") + b"{}"
    return whole + hashlib.sha256(whole).digest()


# Each has a right checksum, so that it is the reader's own checks that must say no.
NO_MESSAGE = {
    "text longer than the message": _claiming(2**32 - 1),
    "text as long as the checksum": _claiming(34),
    "no text": sealed(b""),
    "not JSON": sealed(b"{arrays:[]}"),
    "JSON and more": sealed(b'{"arrays":[],"head":{}}{}'),
    "not UTF-8": sealed(b'{"arrays":[],"head":{"a":"\xff"}}'),
    "UTF-16": sealed('{"arrays":[],"head":{}}'.encode("utf-16")),
    "with a byte-order mark": sealed('\ufeff{"arrays":[],"head":{}}'.encode()),
    "a list": sealed(b"[]"),
    "null": sealed(b"null"),
    "no arrays": sealed(b'{"head":{}}'),
    "one part more": sealed(b'{"arrays":[],"head":{},"more":1}'),
    "head is a list": sealed(b'{"arrays":[],"head":[]}'),
    "head is null": sealed(b'{"arrays":[],"head":null}'),
    "keys twice": sealed(b'{"arrays":[],"head":{"a":1,"a":2}}'),
    "parts twice": sealed(b'{"arrays":[],"head":{"a":1},"head":{}}'),
    "spaces": sealed(b'{"arrays": [], "head": {}}'),
    "unsorted": sealed(b'{"head":{},"arrays":[]}'),
    "unescaped": sealed('{"arrays":[],"head":{"a":"ε"}}'.encode()),
    "NaN": sealed(b'{"arrays":[],"head":{"a":NaN}}'),
    "Infinity": sealed(b'{"arrays":[],"head":{"a":-Infinity}}'),
    "beyond float64": sealed(b'{"arrays":[],"head":{"a":1e999}}'),
    "minus zero": sealed(b'{"arrays":[],"head":{"a":-0}}'),
    "another way to write a number": sealed(b'{"arrays":[],"head":{"a":1.50}}'),
    "5,000 digits": sealed(b'{"arrays":[],"head":{"a":' + b"9" * 5000 + b"}}"),
    "deep lists": sealed(b'{"arrays":[],"head":{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}}"),
    "deep objects": sealed(b'{"arrays":[],"head":' + b'{"a":' * 50_000 + b"1" + b"}" * 50_001),
    "arrays are an object": sealed(b'{"arrays":{},"head":{}}'),
    "an array without shape": _arrays(["w"]),
    "an array that is a text": _arrays("w"),
    "a name that is a number": _arrays([1, [0]]),
    "an empty name": _arrays(["", [0]]),
    "a long name": _arrays(["w" * 201, [0]]),
    "a name with a newline": _arrays(["w\n", [0]]),
    "a name with NUL": _arrays(["w\0", [0]]),
    "a name in another script": _arrays(["ｗ", [0]]),
    "a name twice": _arrays(["w", [0]], ["w", [0]]),
    "names out of order": _arrays(["w", [0]], ["b", [0]]),
    "a shape that is a number": _arrays(["w", 0]),
    "a negative size": _arrays(["w", [-1]]),
    "a size that is true": written({"head": {}, "arrays": [["w", [True]]]}, b"\0\0\0\0"),
    "a size that is 1.0": written({"head": {}, "arrays": [["w", [1.0]]]}, b"\0\0\0\0"),
    "a size that is a text": _arrays(["w", ["0"]]),
    "a size of 2⁴⁰": _arrays(["w", [2**40]]),
    "terabytes": _arrays(["w", [2**39, 2**39]]),
    "terabytes times nothing": _arrays(["w", [0, 2**39, 2**39]]),
    "nothing times terabytes": _arrays(["w", [2**39, 2**39, 0]]),
    "nine dimensions": _arrays(["w", [1] * 8 + [0]]),
    "5,000 arrays": _arrays(*([f"w{i:04}", [0]] for i in range(5000))),
    "too few bytes": written(TEXT, BODY[:-4]),
    "too many bytes": written(TEXT, BODY + b"\0\0\0\0"),
    "half a number": written(TEXT, BODY[:-2]),
    "float64 for float32": written(TEXT, np.frombuffer(BODY, "<f4").astype("<f8").tobytes()),
}


@pytest.mark.parametrize("name", NO_MESSAGE)
def test_a_message_that_is_none_is_refused_in_one_sentence(name):
    with pytest.raises(Malformed) as told:
        messages.unpack(NO_MESSAGE[name])
    assert len(str(told.value)) < 120
    assert "\n" not in str(told.value)


def test_class_weights_are_a_key_of_their_own_and_absent_without_them():
    """A client of before knows four keys of `local` and refuses any other."""
    plain = opened(ask().to_blob())[0]["head"]["local"]
    assert plain.keys() == {"learning_rate", "clip", "steps", "unit"}
    weighted = ask(recipe=Recipe(1.0, 1.0, class_weights=(0.1, 1, 0.3)))
    assert opened(weighted.to_blob())[0]["head"]["local"].keys() == plain.keys() | {"class_weights"}
    read = Request.from_blob(weighted.to_blob())
    assert read.recipe == weighted.recipe
    assert read.hash() == weighted.hash() != ask().hash()


@pytest.mark.parametrize("what", [None, "text", bytearray(GOOD), memoryview(GOOD), 3, [GOOD]])
def test_what_is_not_bytes_is_refused(what):
    with pytest.raises(Malformed):
        messages.unpack(what)


def test_a_message_above_the_limit_is_refused_unread():
    assert messages.unpack(GOOD, limit=len(GOOD))[0]["n"] == 3
    with pytest.raises(Malformed, match="at most"):
        messages.unpack(GOOD, limit=len(GOOD) - 1)


@pytest.mark.parametrize(
    "dtype", [np.float64, np.float16, np.int64, np.int8, np.bool_, np.complex64, object]
)
def test_nothing_but_float32_is_packed(dtype):
    with pytest.raises(InputError):
        messages.pack({}, {"w": np.zeros(2).astype(dtype)})


@pytest.mark.parametrize("head", [{"a": np.nan}, {"a": np.inf}, {"a": b"x"}, {"a": {1, 2}}])
def test_a_head_holds_plain_json_only(head):
    with pytest.raises(Malformed):
        messages.pack(head)


def test_big_endian_and_strided_arrays_are_sent_as_the_same_bytes():
    leaf = np.arange(12, dtype=np.float32).reshape(3, 4)
    want = messages.pack({}, {"w": leaf.T.copy()})
    assert messages.pack({}, {"w": leaf.T}) == want


def test_the_device_starts_without_the_heavy_libraries():
    # What is loaded, not how long it takes: the machine may be busy.
    heavy = ("jax", "pydantic", "polars", "flwr", "scipy", "matplotlib", "pooch", "typer")
    code = f"import sottovoce.client.device, sys; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=os.environ
    )
    assert done.stdout.strip() == "[]"
