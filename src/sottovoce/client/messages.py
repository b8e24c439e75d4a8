"""What server and client say to each other: a request for one round, an answer, a greeting.

All of it is public. A request is what the server announces; what it costs and how much noise it
takes is decided by the client alone. `Request.hash` is the request's content without the receipt: a
client answers one content a round, whatever message brings it.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sottovoce._version import __version__
from sottovoce.client import wire
from sottovoce.errors import InputError, Malformed, OtherVersion
from sottovoce.models.form import Form
from sottovoce.privacy.budget import UNITS, Unit
from sottovoce.privacy.sensitivity import Recipe
from sottovoce.schedules.cohort import COHORTS, CohortKind
from sottovoce.schedules.schedule import Round

REQUEST = "sottovoce.request/1"
ANSWER = "sottovoce.answer/1"
HELLO = "sottovoce.hello/1"
LARGEST = 1 << 31  # bytes of one message
MOST = 10**9  # clients, rounds, steps: beyond it a number is nonsense
_OLD_CODES = ("vault", "data", "internal")  # which older clients send for `unavailable`
CODES = ("empty", "policy", "replay", "malformed", "version", "unavailable", *_OLD_CODES)

_RUN = re.compile(r"[0-9a-f]{8,64}")
SERVER = re.compile(r"[A-Za-z0-9 ._:-]{0,80}")

Arrays = dict[str, NDArray[np.float32]]


@dataclass(frozen=True)
class Receipt:
    """Proof of a debit: the vault's journal had this hash at this place.

    >>> Receipt.from_json({"vault": "ab", "seq": 3, "hash": "cd"}).seq
    3
    """

    vault: str
    seq: int
    hash: str

    def to_json(self) -> dict[str, Any]:
        """As it stands in a message."""
        return {"vault": self.vault, "seq": self.seq, "hash": self.hash}

    @classmethod
    def from_json(cls, values: Any) -> Receipt:
        """Read from a message, or `Malformed`."""
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
            raise Malformed("the message's receipt is none")
        return cls(values["vault"], values["seq"], values["hash"])


@dataclass(frozen=True, eq=False)
class Request:
    """One round asked of one client.

    >>> form = Form("svm", (2,), 2, kappa=0.01)
    >>> w = {"b": np.zeros((), np.float32), "w": np.zeros(2, np.float32)}
    >>> ask = Request("0badc0de", Round(0, 8), 3, 3, "balanced", Recipe(1.0, 1.0), form, w)
    >>> Request.from_blob(ask.to_blob()).hash() == ask.hash()
    True
    """

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

    def to_blob(self) -> bytes:
        """The bytes of the message."""
        head = {
            "schema": REQUEST,
            "run": self.run,
            "round": {
                "t": self.round.t,
                "horizon": self.round.horizon,
                "scale": float(self.round.scale),
                "spread": self.round.spread,
            },
            "terms": {
                "clients": self.clients,
                "per_round": self.per_round,
                "cohort": self.cohort,
            },
            "local": {
                "learning_rate": self.recipe.learning_rate,
                "clip": self.recipe.clip,
                "steps": self.recipe.steps,
                "unit": self.recipe.unit,
            },
            "model": self.form.to_json(),
            "loss_bound": self.loss_bound,
            "receipt": None if self.receipt is None else self.receipt.to_json(),
            "server": self.server,
        }
        return wire.pack(head, self.params)

    def hash(self) -> str:
        """Of everything but the receipt, the only part that may differ when asked again."""
        return hashlib.sha256(replace(self, receipt=None).to_blob()).hexdigest()

    @classmethod
    def from_blob(cls, blob: bytes) -> Request:
        """Read a request, schema first; anything that is not one is `Malformed`."""
        head, params = wire.unpack(blob, limit=LARGEST)
        require_version(head, REQUEST)
        _keys(
            head,
            "request",
            (
                "schema",
                "run",
                "round",
                "terms",
                "local",
                "model",
                "loss_bound",
                "receipt",
                "server",
            ),
        )
        turn, terms, local = head["round"], head["terms"], head["local"]
        _keys(turn, "round", ("t", "horizon", "scale", "spread"))
        _keys(terms, "terms", ("clients", "per_round", "cohort"))
        _keys(local, "local", ("learning_rate", "clip", "steps", "unit"))
        for name, value, least in (
            ("round.t", turn["t"], 0),
            ("round.horizon", turn["horizon"], 1),
            ("terms.clients", terms["clients"], 1),
            ("terms.per_round", terms["per_round"], 1),
            ("local.steps", local["steps"], 1),
            ("round.spread", 1 if turn["spread"] is None else turn["spread"], 1),
        ):
            if type(value) is not int or not least <= value <= MOST:
                raise Malformed(f"the request's {name} is no whole number from {least} to 1e9")
        if turn["t"] >= turn["horizon"] or terms["per_round"] > terms["clients"]:
            raise Malformed("the request's round is beyond its horizon, or its cohort too large")
        if terms["cohort"] not in COHORTS or local["unit"] not in UNITS:
            raise Malformed("the request's cohort or unit is unknown")
        if not isinstance(head["run"], str) or not _RUN.fullmatch(head["run"]):
            raise Malformed("the request's run is no id of 8 to 64 hexadecimal digits")
        if not isinstance(head["server"], str) or not SERVER.fullmatch(head["server"]):
            raise Malformed("the request's server has no plain name")
        scale, bound = _number(turn["scale"], "scale"), head["loss_bound"]
        if bound is not None and not 1e-6 <= _number(bound, "loss_bound") <= 1e6:
            raise Malformed("the request's loss_bound is no number from 1e-6 to 1e6")
        unit: Unit = local["unit"]
        try:
            recipe = Recipe(
                _number(local["learning_rate"], "learning_rate"),
                _number(local["clip"], "clip"),
                unit=unit,
                steps=local["steps"],
            )
        except InputError as error:
            raise Malformed(f"the request's {error}") from None
        return cls(
            run=head["run"],
            round=Round(turn["t"], turn["horizon"], scale, turn["spread"]),
            clients=terms["clients"],
            per_round=terms["per_round"],
            cohort=terms["cohort"],
            recipe=recipe,
            form=Form.from_json(head["model"]),
            params=params,
            loss_bound=bound,
            receipt=None if head["receipt"] is None else Receipt.from_json(head["receipt"]),
            server=head["server"],
        )


def refusal(code: str, text: str) -> bytes:
    """The bytes of a "no", which says why in words that depend on public state only.

    >>> wire.unpack(refusal("empty", "nothing left"))[0]["code"]
    'empty'
    """
    return wire.pack({"schema": ANSWER, "kind": "refusal", "code": code, "text": text})


def require_version(head: Mapping[str, Any], schema: str) -> None:
    """Refuse a message that is not of this schema, with both versions if only that differs.

    >>> require_version({"schema": "sottovoce.hello/2"}, HELLO)
    Traceback (most recent call last):
        ...
    sottovoce.errors.OtherVersion: the message is a hello/2 and sottovoce 0.1.0 reads hello/1; \
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
    raise Malformed(f"the message is no {kind} ({schema})")


def _keys(values: Any, name: str, keys: tuple[str, ...]) -> None:
    if not isinstance(values, Mapping) or values.keys() != set(keys):
        raise Malformed(f"the request's {name} has not the keys {', '.join(keys)}")


def is_finite(value: Any) -> bool:
    """Whether a message's value is a plain number that floats have room for; 10⁴⁰⁰ is none.

    >>> is_finite(2.5), is_finite(10**400), is_finite(float("nan")), is_finite(True)
    (True, False, False, False)
    """
    return type(value) in (int, float) and abs(value) < 1e300


def _number(value: Any, name: str) -> float:
    if not is_finite(value):
        raise Malformed(f"the request's {name} is no finite number")
    return float(value)
