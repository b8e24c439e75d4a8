"""Who the clients are, as they have said themselves: public facts, kept for the length of a run.

A client is known by its vault's id and the key that it is authenticated by, if there is one, never
by a connection. Weights, sensitivities and the bounds
that uploads are held against come from here, not from the uploads. What a client says of itself is
checked as far as it can be: a number that is none, or a budget that is worth less or more than its
own (ε, δ), is no greeting.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sottovoce.client import wire
from sottovoce.client.messages import HELLO, Receipt, is_finite, require_version
from sottovoce.errors import InputError, Malformed
from sottovoce.privacy import calibration
from sottovoce.privacy.budget import UNITS, Budget, Calibration, Unit

LARGEST_HELLO = 1 << 16
MOST_SAMPLES = 2**32  # what a vault takes
_VERSION = re.compile(r"[0-9A-Za-z.+!-]{1,40}")


@dataclass(frozen=True)
class Account:
    """What a client discloses of its tank: its budget, its worth and what is spent (μ²)."""

    epsilon: float
    delta: float
    capacity: float
    spent: float

    @classmethod
    def from_json(cls, values: Any) -> Account | None:
        """Read from a message; None where the client keeps it to itself.

        >>> Account.from_json({"epsilon": 8.0, "delta": 1e-5, "capacity": 2.7, "spent": 0.0}).delta
        1e-05
        """
        if values is None:
            return None
        keys = ("epsilon", "delta", "capacity", "spent")
        if not isinstance(values, Mapping) or values.keys() != set(keys):
            raise Malformed("the client's budget has not the keys of one")
        numbers = [values[key] for key in keys]
        if not all(is_finite(n) and n >= 0 for n in numbers):
            raise Malformed("the client's budget holds what is no finite number ≥ 0")
        own = cls(*map(float, numbers))
        try:
            Budget(own.epsilon, own.delta)
        except InputError as error:
            raise Malformed(f"the client's {error}") from None
        if not own.capacity > 0:
            raise Malformed("the client's budget is worth nothing")
        if own.spent > own.capacity * (1 + 1e-9):
            raise Malformed("the client says it has spent more than its budget is worth")
        return own

    def to_json(self) -> dict[str, float]:
        """As it stands in a message."""
        return {
            "epsilon": self.epsilon,
            "delta": self.delta,
            "capacity": self.capacity,
            "spent": self.spent,
        }

    def require_worth(self, kind: Calibration) -> None:
        """Refuse a capacity that is not what (ε, δ) is worth.

        A promise made by exact calibration may be kept by zcdp from some release on: its capacity
        then is the exact one. That is the most that any (ε, δ) is worth.
        """
        try:
            least, most = (
                float(calibration.capacity(self.epsilon, self.delta, calibration=each))
                for each in (kind, "exact")
            )
        except InputError as error:
            raise Malformed(f"the client's {error}") from None
        if self.capacity < least * (1 - 1e-6):
            raise Malformed("the client's budget is worth less than its (ε, δ)")
        if self.capacity > most * (1 + 1e-6):
            raise Malformed("the client's budget is worth more than its (ε, δ)")


@dataclass(frozen=True)
class Member:
    """One client of the run."""

    name: str
    vault: str
    samples: int
    features: int
    classes: int
    unit: Unit
    clip: float
    calibration: Calibration
    floor: float | None
    max_rounds: int
    account: Account | None
    receipt: Receipt
    max_steps: int | None = None  # None: a client of an older version, which did not say
    version: str | None = None  # of its sottovoce
    key: str | None = None  # fingerprint of the key that its route is authenticated by
    registered: int | None = None  # the samples that the server's operator knows it to have
    run_share: float | None = 1.0  # part of its budget that a run may take; None: not told

    @classmethod
    def from_hello(cls, blob: bytes) -> Member:
        """Read a greeting, schema first; `Malformed` if it is none (a refusal is none either)."""
        head, arrays = wire.unpack(blob, limit=LARGEST_HELLO)
        if head.get("kind") == "refusal":
            raise Malformed(f"the client declined to greet ({str(head.get('code'))[:20]!a})")
        if arrays:
            raise Malformed("the greeting has not the keys of one")
        return cls.from_head(head)

    @classmethod
    def from_head(cls, head: Mapping[str, Any]) -> Member:
        """Read what a greeting says, or what `to_head` has kept of one."""
        keys = {"schema", "name", "features", "classes", "policy", "budget", "receipt"}
        require_version(head, HELLO)
        if head.keys() - {"version"} != keys:
            raise Malformed("the greeting has not the keys of one")
        version = head.get("version")
        if version is not None and not (isinstance(version, str) and _VERSION.fullmatch(version)):
            raise Malformed("the greeting's version is none")
        policy, receipt = head["policy"], Receipt.from_json(head["receipt"])
        expected = {"samples", "unit", "clip", "calibration", "floor", "max_rounds"}
        if (
            not isinstance(policy, Mapping)
            or policy.keys() - {"max_steps", "run_share"} != expected
        ):
            raise Malformed("the greeting's policy has not the keys of one")
        whole = [head["features"], head["classes"], policy["samples"], policy["max_rounds"]]
        whole += [policy["max_steps"]] if "max_steps" in policy else []
        if not all(type(n) is int and 1 <= n <= MOST_SAMPLES for n in whole):
            raise Malformed("the greeting has a size that is no whole number from 1 to 2³²")
        if policy["unit"] not in UNITS or policy["calibration"] not in ("exact", "zcdp"):
            raise Malformed("the greeting's unit or calibration is not one that a vault has")
        floor = 0.0 if policy["floor"] is None else policy["floor"]
        share = policy.get("run_share", 1.0)
        if share is not None and not (is_finite(share) and 0 < share <= 1):
            raise Malformed("the greeting's run_share is no number above 0, up to 1")
        for name, number in (("clip", policy["clip"]), ("floor", floor)):
            if not is_finite(number) or number < 0:
                raise Malformed(f"the greeting's {name} is no finite number ≥ 0")
        name = head["name"]
        # Printable, because it is printed: a name must not steer a terminal.
        if not isinstance(name, str) or not 1 <= len(name) <= 200 or not name.isprintable():
            raise Malformed("the greeting has no plain name")
        account = Account.from_json(head["budget"])
        if account is not None:
            account.require_worth(policy["calibration"])
        return cls(
            name=name,
            vault=receipt.vault,
            samples=policy["samples"],
            features=head["features"],
            classes=head["classes"],
            unit=policy["unit"],
            clip=float(policy["clip"]),
            calibration=policy["calibration"],
            floor=None if policy["floor"] is None else float(policy["floor"]),
            max_rounds=policy["max_rounds"],
            account=account,
            receipt=receipt,
            max_steps=policy.get("max_steps"),
            version=version,
            run_share=share,
        )

    @property
    def identity(self) -> str:
        """What tells it from every other client: its vault and, where there is one, its key."""
        return self.vault if self.key is None else f"{self.vault} {self.key}"

    def to_head(self) -> dict[str, Any]:
        """What a greeting would say now: the newest receipt and account included."""
        return {
            "schema": HELLO,
            "name": self.name,
            "features": self.features,
            "classes": self.classes,
            "policy": {
                "samples": self.samples,
                "unit": self.unit,
                "clip": self.clip,
                "calibration": self.calibration,
                "floor": self.floor,
                "max_rounds": self.max_rounds,
                **({} if self.max_steps is None else {"max_steps": self.max_steps}),
                "run_share": self.run_share,
            },
            "budget": None if self.account is None else self.account.to_json(),
            "receipt": self.receipt.to_json(),
            **({} if self.version is None else {"version": self.version}),
        }
