r"""What server and client say to each other: a request for one round, an answer, a greeting.

All of it is public. A request is what the server announces; the client alone decides what it costs
and how much noise it takes. `Request.hash` covers the request without its receipt: a client answers
one content per round, whichever message brings it. As bytes a message is

    "sottovoce/1\n" | length of the text (4 bytes, little-endian) | text | arrays | SHA-256 of it

where the text is canonical JSON, {"arrays": [[name, shape], …], "head": {…}}, sorted by name; the
arrays follow in that order, as little-endian float32. The masked inputs of `client.sum_protocol`
are uint64 instead, [name, shape, "u8"]. A message has exactly one encoding: what was read is
encoded again and must give the same bytes. No pickle, no other type, nothing executable.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from sottovoce._version import __version__
from sottovoce.errors import InputError, Malformed, OtherVersion
from sottovoce.models.base import Form
from sottovoce.privacy.budget import UNITS, Unit
from sottovoce.privacy.sensitivity import Recipe
from sottovoce.schedules.base import Round
from sottovoce.schedules.pricing import COHORTS, CohortKind

MAGIC = b"sottovoce/1\n"
LONGEST_TEXT = 1 << 20
MOST_ARRAYS = 4096
DEEPEST = 8  # dimensions of one array
_NAME = re.compile(r"[A-Za-z0-9_.\[\]'/-]{1,200}")
_SUM = 32
_TYPES = (np.dtype(np.float32), np.dtype(np.uint64))


def pack(head: Mapping[str, Any], arrays: Mapping[str, ArrayLike] | None = None) -> bytes:
    """Encode a message. Arrays must already be float32 or uint64: nothing is rounded on the way.

    >>> blob = pack({"kind": "greeting"}, {"w": np.ones(2, np.float32)})
    >>> head, arrays = unpack(blob)
    >>> head, arrays["w"].tolist()
    ({'kind': 'greeting'}, [1.0, 1.0])
    """
    leaves = {name: np.asarray(leaf) for name, leaf in sorted((arrays or {}).items())}
    for name, leaf in leaves.items():
        if leaf.dtype not in _TYPES:
            bound = "float32 or uint64"
            raise InputError.of(f"array {name}", str(leaf.dtype), bound, "convert it first")
        if not _NAME.fullmatch(name) or leaf.ndim > DEEPEST:
            raise InputError.of("array", name, "a plain name with few dimensions", "rename it")
    described = [
        [name, list(leaf.shape), *(["u8"] if leaf.dtype == np.uint64 else [])]
        for name, leaf in leaves.items()
    ]
    text = _encode_head(dict(head), described)
    content = (
        np.ascontiguousarray(leaf, dtype=leaf.dtype.newbyteorder("<")).tobytes()
        for leaf in leaves.values()
    )
    body = b"".join([MAGIC, len(text).to_bytes(4, "little"), text, *content])
    return body + hashlib.sha256(body).digest()


def unpack(
    blob: bytes, *, limit: int = 1 << 31, words: bool = False
) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
    """Decode a message; raise `Malformed` for anything that `pack` does not make.

    Sizes are checked before anything is allocated. The arrays may contain any float32, also NaN:
    the reader has to check them. With `words` they are uint64, and without float32.

    >>> unpack(pack({})[:-1])
    Traceback (most recent call last):
        ...
    sottovoce.errors.Malformed: the message was cut short or changed on its way
    """
    if not isinstance(blob, bytes):
        raise Malformed("the message is not bytes")
    if len(blob) > limit:
        raise Malformed(f"the message has {len(blob)} bytes, and at most {limit} are read")
    start = len(MAGIC) + 4
    if len(blob) < start + _SUM or not blob.startswith(MAGIC):
        raise Malformed("the message is not one of sottovoce's, version 1")
    if hashlib.sha256(memoryview(blob)[:-_SUM]).digest() != blob[-_SUM:]:
        raise Malformed("the message was cut short or changed on its way")
    length = int.from_bytes(blob[len(MAGIC) : start], "little")
    if length > min(LONGEST_TEXT, len(blob) - start - _SUM):
        raise Malformed("the message's head is longer than the message")
    text = blob[start : start + length]
    head, described = _decode_head(text)
    shapes = _read_shapes(described, words)
    if _encode_head(head, described) != text:
        raise Malformed("the message's head is not written in the one canonical way")
    kind = np.dtype("<u8" if words else "<f4")
    total = kind.itemsize * sum(math.prod(shape) for shape in shapes.values())
    if total != len(blob) - start - length - _SUM:
        raise Malformed("the message's arrays do not have the sizes it states")
    arrays, at = {}, start + length
    for name, shape in shapes.items():
        count = math.prod(shape)
        leaf = np.frombuffer(blob, dtype=kind, count=count, offset=at).reshape(shape)
        arrays[name] = leaf.astype(kind.newbyteorder("="))  # a copy in the machine's order
        at += leaf.nbytes
    return head, arrays


def _encode_head(head: dict[str, Any], described: Any) -> bytes:
    try:
        return json.dumps(
            {"arrays": described, "head": head},
            sort_keys=True,
            separators=(",", ":"),
            ensure_ascii=True,
            allow_nan=False,
        ).encode()
    except (TypeError, ValueError, RecursionError):
        raise Malformed("the message's head has values that JSON does not have") from None


def _decode_head(text: bytes) -> tuple[dict[str, Any], Any]:
    try:
        read = json.loads(text, parse_constant=int)  # which refuses NaN and infinities
    except (ValueError, RecursionError):
        raise Malformed("the message's head is not JSON") from None
    if not isinstance(read, dict) or read.keys() != {"arrays", "head"}:
        raise Malformed("the message's head must have two parts, arrays and head")
    if not isinstance(read["head"], dict):
        raise Malformed("the message's head must be an object")
    return read["head"], read["arrays"]


def _read_shapes(described: Any, words: bool) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {}
    if not isinstance(described, list) or len(described) > MOST_ARRAYS:
        raise Malformed("the message does not list its arrays")
    for entry in described:
        kind = ["u8"] if words else []
        if not isinstance(entry, list) or len(entry) < 2 or entry[2:] != kind:
            raise Malformed("an array of the message must have a name, a shape and the right type")
        name, shape = entry[:2]
        if not isinstance(name, str) or not _NAME.fullmatch(name) or name in shapes:
            raise Malformed("an array of the message has a bad name, or that of another")
        if (
            not isinstance(shape, list)
            or len(shape) > DEEPEST
            or not all(type(size) is int and 0 <= size < 2**40 for size in shape)
            or math.prod(max(1, size) for size in shape)
            >= 2**40  # a 0 would hide what is beside it
        ):
            raise Malformed("an array of the message has a shape that is bad or too large")
        shapes[name] = tuple(shape)
    if list(shapes) != sorted(shapes):
        raise Malformed("the message's arrays are not in order")
    return shapes


REQUEST = "sottovoce.request/1"
ANSWER = "sottovoce.answer/1"
HELLO = "sottovoce.hello/1"
# With the encoding of a table. One that knows only /1 refuses them, instead of other numbers.
TABLE_REQUEST = "sottovoce.request/2"
TABLE_HELLO = "sottovoce.hello/2"
SUM = "sottovoce.sum/1"  # a step of the sum view that needs no model
LARGEST = 1 << 31  # bytes of one message
MOST = 10**9  # clients, rounds, steps: beyond it a number is nonsense
_OLD_CODES = ("vault", "data", "internal")  # which older clients send for `unavailable`
CODES = ("empty", "policy", "replay", "malformed", "version", "unavailable", *_OLD_CODES)

_KEYS = ("schema", "run", "round", "terms", "local", "model", "loss_bound", "receipt", "server")
_TERMS = ("clients", "per_round", "cohort")
_LOCAL = ("learning_rate", "clip", "steps", "unit")
RUN = re.compile(r"[0-9a-f]{8,64}")
SERVER = re.compile(r"[A-Za-z0-9 ._:-]{0,80}")

Arrays = dict[str, NDArray[np.float32]]


@dataclass(frozen=True)
class Receipt:
    """Proof of a debit: line `seq` of the vault's ledger has this hash."""

    vault: str
    seq: int
    hash: str

    def to_json(self) -> dict[str, Any]:
        """Return the receipt as a message holds it."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: Any) -> Receipt:
        """Read a receipt from a message, or raise `Malformed`."""
        if (
            not isinstance(values, Mapping)
            or values.keys() != {"vault", "seq", "hash"}
            or type(values["seq"]) is not int
            or not 0 <= values["seq"] < 2**53
            or not all(
                isinstance(values[key], str) and re.fullmatch(r"[0-9a-f]{1,64}", values[key])
                for key in ("vault", "hash")
            )
        ):
            raise Malformed("the message's receipt must have vault, seq and hash")
        return cls(values["vault"], values["seq"], values["hash"])


@dataclass(frozen=True, eq=False)
class Request:
    """A request for one round to one client."""

    run: str
    round: Round
    clients: int
    per_round: int
    cohort: CohortKind
    recipe: Recipe
    form: Form
    params: Arrays
    loss_bound: float | None = None  # B: tell the noised loss of the model received
    receipt: Receipt | None = None  # the newest one the server has from this client
    server: str = ""
    sum: Mapping[str, Any] | None = None  # a step of the sum view: `keys` or `input`
    encoding: str | None = None  # `data.tables.Layout.encoding` of the server's rows, if a table

    def to_blob(self) -> bytes:
        """Return the bytes of the message."""
        local = {key: getattr(self.recipe, key) for key in _LOCAL}
        if self.recipe.class_weights is not None:
            local["class_weights"] = list(self.recipe.class_weights)
        head = {
            "schema": REQUEST if self.encoding is None else TABLE_REQUEST,
            "run": self.run,
            "round": {**asdict(self.round), "scale": float(self.round.scale)},
            "terms": {key: getattr(self, key) for key in _TERMS},
            "local": local,
            "model": self.form.to_json(),
            "loss_bound": self.loss_bound,
            "receipt": None if self.receipt is None else self.receipt.to_json(),
            "server": self.server,
            **({} if self.sum is None else {"sum": dict(self.sum)}),
            **({} if self.encoding is None else {"encoding": self.encoding}),
        }
        return pack(head, self.params)

    def hash(self) -> str:
        """Return the hash of everything but receipt and step, which may differ when asked again."""
        asked = replace(self, receipt=None, sum=None if self.sum is None else {})
        return hashlib.sha256(asked.to_blob()).hexdigest()

    @classmethod
    def from_blob(cls, blob: bytes) -> Request:
        """Read a request; raise `Malformed` for anything else."""
        return cls.read(*unpack(blob, limit=LARGEST))

    @classmethod
    def read(cls, head: Mapping[str, Any], params: Arrays) -> Request:
        """Read a request that is unpacked."""
        encoding = read_encoding(head, REQUEST, TABLE_REQUEST)
        newer = [key for key in ("sum", "encoding") if key in head]
        _require_keys(head, "request", (*_KEYS, *newer))
        if "sum" in head and not isinstance(head["sum"], Mapping):
            raise Malformed("the request's sum must be an object")
        round_, terms, local = head["round"], head["terms"], head["local"]
        _require_keys(round_, "round", ("t", "horizon", "scale", "spread"))
        _require_keys(terms, "terms", _TERMS)
        # Absent without weights: a client of before refuses a key that it does not know.
        weighted = isinstance(local, Mapping) and "class_weights" in local
        _require_keys(local, "local", (*_LOCAL, "class_weights") if weighted else _LOCAL)
        for name, value, least in (
            ("round.t", round_["t"], 0),
            ("round.horizon", round_["horizon"], 1),
            ("terms.clients", terms["clients"], 1),
            ("terms.per_round", terms["per_round"], 1),
            ("local.steps", local["steps"], 1),
            ("round.spread", 1 if round_["spread"] is None else round_["spread"], 1),
        ):
            if type(value) is not int or not least <= value <= MOST:
                raise Malformed(f"the request's {name} must be a whole number from {least} to 1e9")
        if round_["t"] >= round_["horizon"] or terms["per_round"] > terms["clients"]:
            raise Malformed("the request's round is beyond its horizon, or its cohort too large")
        if terms["cohort"] not in COHORTS or local["unit"] not in UNITS:
            raise Malformed("the request's cohort or unit is unknown")
        if not isinstance(head["run"], str) or not RUN.fullmatch(head["run"]):
            raise Malformed("the request's run must be an id of 8 to 64 hexadecimal digits")
        if not isinstance(head["server"], str) or not SERVER.fullmatch(head["server"]):
            raise Malformed("the request's server must be a plain name of up to 80 characters")
        scale, bound = _require_number(round_["scale"], "scale"), head["loss_bound"]
        if bound is not None and not 1e-6 <= _require_number(bound, "loss_bound") <= 1e6:
            raise Malformed("the request's loss_bound must be a number from 1e-6 to 1e6")
        unit: Unit = local["unit"]
        weights = local["class_weights"] if weighted else None
        if weighted and not (isinstance(weights, list) and weights):
            raise Malformed("the request's class_weights must be a list of numbers")
        try:
            recipe = Recipe(
                _require_number(local["learning_rate"], "learning_rate"),
                _require_number(local["clip"], "clip"),
                unit=unit,
                steps=local["steps"],
                class_weights=None if weights is None else tuple(weights),
            )
        except InputError as error:
            raise Malformed(f"the request's {error}") from None
        return cls(
            run=head["run"],
            round=Round(round_["t"], round_["horizon"], scale, round_["spread"]),
            clients=terms["clients"],
            per_round=terms["per_round"],
            cohort=terms["cohort"],
            recipe=recipe,
            form=Form.from_json(head["model"]),
            params=params,
            loss_bound=bound,
            receipt=None if head["receipt"] is None else Receipt.from_json(head["receipt"]),
            server=head["server"],
            sum=head.get("sum"),
            encoding=encoding,
        )


def make_refusal(code: str, text: str) -> bytes:
    """Return the bytes of a refusal, whose words depend on public state only."""
    return pack({"schema": ANSWER, "kind": "refusal", "code": code, "text": text})


def require_version(head: Mapping[str, Any], schema: str) -> None:
    """Refuse a message of another schema; name both versions if only these differ.

    >>> require_version({"schema": "sottovoce.hello/2"}, HELLO)
    Traceback (most recent call last):
        ...
    sottovoce.errors.OtherVersion: the message is a hello/2 and sottovoce 0.2.0 reads hello/1; \
bring both sides to one version
    """
    said, (kind, _, number) = head.get("schema"), schema.removeprefix("sottovoce.").partition("/")
    if said == schema:
        return
    if isinstance(said, str) and re.fullmatch(rf"sottovoce\.{kind}/[0-9]{{1,6}}", said):
        raise OtherVersion(
            f"the message is a {said.removeprefix('sottovoce.')} and sottovoce {__version__} reads "
            f"{kind}/{number}; bring both sides to one version"
        )
    raise Malformed(f"the message is not a {kind} ({schema})")


def read_encoding(head: Mapping[str, Any], schema: str, of_table: str) -> str | None:
    """Refuse a message of another schema; return the encoding, which one of a table must have."""
    if head.get("schema") != of_table:
        require_version(head, schema)
    encoding = head.get("encoding")
    if ("encoding" in head) != (head["schema"] == of_table) or (
        "encoding" in head and not re.fullmatch(r"[0-9a-f]{64}", str(encoding))
    ):
        raise Malformed("the message's encoding must be the SHA-256 of a table's columns")
    return encoding


def _require_keys(values: Any, name: str, keys: tuple[str, ...]) -> None:
    if not isinstance(values, Mapping) or values.keys() != set(keys):
        raise Malformed(f"the request's {name} must have the keys {', '.join(keys)}")


def is_finite(value: Any) -> bool:
    """Return whether a value is a plain number below 1e300; 10⁴⁰⁰ has no float.

    >>> is_finite(2.5), is_finite(10**400), is_finite(float("nan")), is_finite(True)
    (True, False, False, False)
    """
    return type(value) in (int, float) and abs(value) < 1e300


def _require_number(value: Any, name: str) -> float:
    if not is_finite(value):
        raise Malformed(f"the request's {name} must be a finite number")
    return float(value)
