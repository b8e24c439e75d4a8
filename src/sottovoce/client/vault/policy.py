"""What a client has fixed for itself: the budget, C, n, the unit, the least noise, and limits.

A policy is written into its vault at creation. Later it may only be tightened, and a server may
only ask for less.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from fractions import Fraction
from functools import cache
from typing import Any, Literal, Self, TypeAlias, cast, get_args

from sottovoce.errors import InputError, PolicyRefusal
from sottovoce.privacy import calibration as calibrations
from sottovoce.privacy.budget import (
    UNITS,
    Budget,
    Guarantee,
    Unit,
    advise,
    format_claim,
    list_always_not_covered,
)
from sottovoce.privacy.tank import FULL

VaultCalibration: TypeAlias = Literal["exact", "zcdp"]
_MOST_ALONE = 3e8  # μ² of a client's noise alone, for which docs/proofs.md (4) holds

MOST_SAMPLES = 2**32  # what an exact sum on the grid has room for
MOST_ROUNDS = 10**9
MOST_STEPS = 1000  # of one turn: each is priced, drawn and noted
_NO_LIMIT = 2**62
LIMITS = ("run_share", "server_share", "max_work", "max_bytes")  # what `[policy.limits]` names
SUM_TERMS = ("honest", "corrupt", "epsilon_alone")  # likewise `[policy.sum]`
# What a vault allowed before its policy had these keys.
_BEFORE = {
    **{"max_steps": MOST_STEPS, "run_share": 1.0, "server_share": 1.0},
    **{"max_work": _NO_LIMIT, "max_bytes": _NO_LIMIT},
    **{"honest": 1, "corrupt": 0, "epsilon_alone": None},
}
MOST_COUNTED = 1024  # honest or corrupt clients
USUAL_TURNS = 4  # at least: by default a turn takes at most a quarter of the budget


@dataclass(frozen=True)
class Policy:
    """A client's own terms, checked.

    `floor` is the smallest σ/Δ of one turn: with E steps each has at least floor·√E, so that the
    turn's μ is at most 1/floor, whatever horizon a server announces. Left out, it is 2/√capacity:
    one turn may take at most a quarter of the budget.

    >>> policy = Policy(epsilon=8, delta=1e-5, samples=143, clip=1)
    >>> round(policy.capacity(), 6), policy.floor
    (2.775658, 1.20046)
    >>> Policy(epsilon=8, delta=1e-5, samples=143, clip=1, calibration="paper")
    Traceback (most recent call last):
        ...
    sottovoce.errors.InputError: calibration must be exact or zcdp, got 'paper'; the paper's \
formula does not keep its promise, so a vault does not take it
    """

    epsilon: float
    delta: float
    samples: int
    clip: float
    unit: Unit = "record"
    calibration: VaultCalibration = "exact"
    floor: float = cast(float, None)  # None becomes the default below
    max_rounds: int = 1000  # of one run
    disclose: bool = True
    max_steps: int = 16  # of one turn
    run_share: float = 0.25  # of the budget, that one run may take
    server_share: float = 1.0  # likewise, all runs of one server, by the name that it gives itself
    max_work: int = 2**40  # parameters × steps × samples of one request
    max_bytes: int = 2**34  # of the vault's file, with the next upload
    honest: int = 1  # clients of a sum whose noise is counted, itself included; 1: none but its own
    corrupt: int = 0  # roster members that may side with a server that learns only sums
    epsilon_alone: float | None = None  # what holds there whatever others do; None: of h noises

    def __post_init__(self) -> None:
        budget = Budget(self.epsilon, self.delta)
        self._set_field("epsilon", budget.epsilon)
        self._set_field("delta", budget.delta)
        if self.calibration not in get_args(VaultCalibration):
            raise InputError.of(
                "calibration",
                self.calibration,
                "exact or zcdp",
                "the paper's formula does not keep its promise, so a vault does not take it",
            )
        if self.unit not in UNITS:
            raise InputError.of("unit", self.unit, " or ".join(UNITS), "name what is protected")
        for key, least, most, remedy in (
            ("samples", 1, MOST_SAMPLES, "it is the number of rows of the client's data"),
            ("max_rounds", 1, MOST_ROUNDS, "it is how many rounds one run may have"),
            ("max_steps", 1, MOST_STEPS, "it is how many steps one turn may have"),
            ("max_work", 1, _NO_LIMIT, "it is parameters × steps × samples of one request"),
            ("max_bytes", 1, _NO_LIMIT, "it is how large the vault's file may become"),
            ("sum.honest", 1, MOST_COUNTED, "it counts clients of the roster"),
            ("sum.corrupt", 0, MOST_COUNTED, "it counts clients of the roster"),
        ):
            value = getattr(self, key.removeprefix("sum."))
            if type(value) is not int or not least <= value <= most:
                raise InputError.of(key, value, f"a whole number from {least} to {most}", remedy)
        alone = self.epsilon_alone
        loosest = calibrations.LOOSEST[0]
        if alone is not None and (
            self.honest == 1
            or type(alone) not in (int, float)
            or not self.epsilon < alone <= loosest
        ):
            bound = (
                f"a number above epsilon = {self.epsilon:g}, to {loosest:g}, with sum.honest ≥ 2"
            )
            raise InputError.of("sum.epsilon_alone", alone, bound, "leave it out for h noises")
        capacity = self.capacity()
        if self.honest > 1 and self.share * capacity > _MOST_ALONE:
            bound = f"at most {self.most_honest} with epsilon = {self.epsilon:g}"
            raise InputError.of("sum.honest", self.honest, bound, "choose a smaller epsilon")
        if type(self.disclose) is not bool:
            raise InputError.of(
                "disclose",
                self.disclose,
                "true or false",
                "false keeps ε, δ and what is spent out of messages; n and σ stay in them",
            )
        self._require_number("clip", 1e-15, 1e15, "choose the norm gradients are cut to")
        self._require_number(
            "run_share", 1e-6, 1.0, "it is the part of the budget that one run may take"
        )
        self._require_number(
            "server_share", 1e-6, 1.0, "it is the part that one server's runs may take"
        )
        if cast(float | None, self.floor) is None:
            # Six digits, rounded up: the same number whatever the last bits of the capacity are.
            self._set_field("floor", float(format_claim(math.sqrt(USUAL_TURNS / capacity))))
        # Above it a turn could not book even one part of the capacity.
        most_floor = math.sqrt(FULL / capacity)
        self._require_number("floor", 1e-9, most_floor, "it is the smallest σ/Δ of one turn")

    def _set_field(self, name: str, value: float) -> None:
        object.__setattr__(self, name, value)

    def _require_number(self, name: str, least: float, most: float, remedy: str) -> None:
        value = getattr(self, name)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not least <= value <= most:
            raise InputError.of(name, value, f"a number from {least:g} to {most:g}", remedy)
        self._set_field(name, float(value))

    def capacity(self) -> float:
        """Return the μ² that the budget is worth."""
        return _compute_capacity(self.epsilon, self.delta, self.calibration)

    @property
    def share(self) -> float:
        """How many times its price a release may be worth by this client's noise alone.

        With `epsilon_alone` a little less than it allows, which pays for rounding up debits.
        """
        if self.epsilon_alone is None:
            return float(self.honest)
        alone = _compute_capacity(self.epsilon_alone, self.delta, self.calibration)
        return min(float(self.honest), alone / self.capacity() * (1 - 2**-20))

    @property
    def most_honest(self) -> int:
        """The most clients whose noise may be counted with this budget."""
        return max(1, min(MOST_COUNTED, int(_MOST_ALONE / self.capacity())))

    def count_parts(self, capacity: float) -> int:
        """Return the parts of a tank of this capacity (μ²) that this budget is worth.

        The parts keep the size that they had when the vault was made; a tightened budget is a cap
        of 2⁵⁰·capacity(now)/capacity(then) of them, rounded down. So past debits need no
        conversion.

        >>> policy = Policy(epsilon=8, delta=1e-5, samples=143, clip=1)
        >>> [FULL // policy.count_parts(k * policy.capacity()) for k in (1, 2)]
        [1, 2]
        """
        now = min(Fraction(self.capacity()), Fraction(capacity))
        return int(FULL * now / Fraction(capacity))

    def count_alone(self, capacity: float) -> int | None:
        """Return the parts of a tank of this capacity that `epsilon_alone` is worth, if set."""
        if self.epsilon_alone is None:
            return None
        alone = _compute_capacity(self.epsilon_alone, self.delta, self.calibration)
        return int(FULL * Fraction(alone) / Fraction(capacity))

    def compute_alone(self) -> float | None:
        """Return the ε that holds whatever others do, where sums are released; else None."""
        if self.honest == 1 or self.epsilon_alone is not None:
            return self.epsilon_alone
        worth = self.share * self.capacity() * (1 + 2e-9)
        return float(calibrations.bound_epsilon(self.delta, worth))

    def guarantee(self, *also: str) -> Guarantee:
        """Return what is promised, in words that a lawyer could read; `also` is not covered."""
        return Guarantee(
            Budget(self.epsilon, self.delta),
            corrupt=self.corrupt,
            epsilon_alone=self.compute_alone(),
            unit=self.unit,
            calibration=self.calibration,
            one_client=True,
            not_covered=(
                *list_always_not_covered(self.unit),
                *(["loose-delta"] if self.delta * self.units >= 1 else []),
                *also,
            ),
        )

    @property
    def units(self) -> int:
        """How many records or persons are protected; 1 where the whole dataset is."""
        return 1 if self.unit == "client" else self.samples

    def advise(self) -> list[str]:
        """Return advice where ε or δ promise too little to the units of this client."""
        units = self.units
        return advise(self.epsilon, self.delta, units, unit=self.unit, noise=0.0, size=units)

    def to_json(self) -> dict[str, Any]:
        """Return plain data."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """Read the policy that `to_json` wrote; refuse unknown or missing keys.

        A term that an older vault does not name has the value that was allowed then; a node file
        may tighten it.
        """
        terms, data = {field.name for field in fields(cls)}, {**_BEFORE, **data}
        if odd := sorted(data.keys() ^ terms):
            bound = f"of {', '.join(sorted(terms))}"
            raise InputError.of("policy", odd[0], bound, "correct the key")
        return cls(**data)


@cache
def _compute_capacity(epsilon: float, delta: float, calibration: VaultCalibration) -> float:
    return float(calibrations.vault_capacity(epsilon, delta, calibration=calibration))


def require_tighter(old: Policy, new: Policy, *, spent: int) -> None:
    """Refuse `new` unless it allows nothing that `old` does not."""
    for name in ("epsilon", "delta", "clip", "max_rounds", "max_steps", *LIMITS):
        if getattr(new, name) > getattr(old, name):
            _refuse_looser(name, f"at most {getattr(old, name)}", getattr(new, name))
    if new.floor < old.floor:
        _refuse_looser("floor", f"at least {old.floor}", new.floor)
    if new.disclose and not old.disclose:
        _refuse_looser("disclose", "false", "true")
    if new.calibration != old.calibration and new.calibration != "zcdp":
        _refuse_looser("calibration", old.calibration, new.calibration)
    looser = new.honest > old.honest or (new.corrupt < old.corrupt and new.honest > 1)
    looser |= (new.compute_alone() or new.epsilon) > (old.compute_alone() or old.epsilon)
    if looser and spent > 0:
        terms = [
            f"honest = {policy.honest}, corrupt = {policy.corrupt}"
            + (f", epsilon_alone = {alone:g}" if (alone := policy.epsilon_alone) else "")
            for policy in (old, new)
        ]
        _refuse_looser("the terms of sums", f"at least as strict as {terms[0]}", terms[1])
    if new.samples != old.samples:
        raise PolicyRefusal(
            f"samples is {old.samples} in this vault and {new.samples} was asked for; "
            "only `sottovoce ledger rebind` changes it, together with the data"
        )
    if new.unit != old.unit and (UNITS.index(new.unit) < UNITS.index(old.unit) or spent > 0):
        # What was released for one record is not (ε, δ) for a person or the whole data set.
        raise PolicyRefusal(
            f"unit is {old.unit} in this vault and {new.unit} was asked for; "
            "it may become larger (record, person, client) only before the first release"
        )


def _refuse_looser(name: str, bound: str, value: object) -> None:
    raise PolicyRefusal(
        f"{name} may only be tightened, to {bound}, and {value} was asked for; "
        "keep it, or make a new vault for other data"
    )
