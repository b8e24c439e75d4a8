"""Who the clients are, as they have said themselves: public facts, kept for the length of a run.

A client is known by its vault's id, never by a connection. Weights, sensitivities and the bounds
that uploads are held against come from here, not from the uploads.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sottovoce import wire
from sottovoce.errors import Malformed
from sottovoce.privacy.budget import CALIBRATIONS, UNITS, Calibration, Unit
from sottovoce.protocol import HELLO, Receipt

LARGEST_HELLO = 1 << 16


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
        if not all(type(n) in (int, float) and math.isfinite(n) and n >= 0 for n in numbers):
            raise Malformed("the client's budget holds what is no finite number ≥ 0")
        own = cls(*map(float, numbers))
        if not (own.epsilon > 0 and 0 < own.delta < 1 and own.capacity > 0):
            raise Malformed("the client's budget is none")
        if own.spent > own.capacity * (1 + 1e-9):
            raise Malformed("the client says it has spent more than its budget is worth")
        return own


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

    @classmethod
    def from_hello(cls, blob: bytes) -> Member:
        """Read a greeting, schema first; `Malformed` if it is none (a refusal is none either)."""
        head, arrays = wire.unpack(blob, limit=LARGEST_HELLO)
        if head.get("kind") == "refusal":
            raise Malformed(f"the client declined to greet ({str(head.get('code'))[:20]})")
        keys = {"schema", "name", "features", "classes", "policy", "budget", "receipt"}
        if head.get("schema") != HELLO or head.keys() != keys or arrays:
            raise Malformed("the greeting has not the keys of one")
        policy, receipt = head["policy"], Receipt.from_json(head["receipt"])
        expected = {"samples", "unit", "clip", "calibration", "floor", "max_rounds"}
        if not isinstance(policy, Mapping) or policy.keys() != expected:
            raise Malformed("the greeting's policy has not the keys of one")
        whole = (head["features"], head["classes"], policy["samples"], policy["max_rounds"])
        if not all(type(n) is int and 1 <= n <= 2**40 for n in whole):
            raise Malformed("the greeting has a size that is no whole number ≥ 1")
        if policy["unit"] not in UNITS or policy["calibration"] not in CALIBRATIONS:
            raise Malformed("the greeting's unit or calibration is unknown")
        for key in ("clip", "floor"):
            number = policy[key]
            if key == "floor" and number is None:
                continue
            if type(number) not in (int, float) or not 0 <= number < 1e300:
                raise Malformed(f"the greeting's {key} is no finite number ≥ 0")
        if not isinstance(head["name"], str) or not 1 <= len(head["name"]) <= 200:
            raise Malformed("the greeting has no name")
        return cls(
            name=head["name"],
            vault=receipt.vault,
            samples=policy["samples"],
            features=head["features"],
            classes=head["classes"],
            unit=policy["unit"],
            clip=float(policy["clip"]),
            calibration=policy["calibration"],
            floor=policy["floor"],
            max_rounds=policy["max_rounds"],
            account=Account.from_json(head["budget"]),
            receipt=receipt,
        )
