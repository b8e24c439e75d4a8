"""Fuel in integer units: what is left, the noise of the next release, check before spend.

A tank holds 2⁵⁰ units, which together are its client's capacity (in μ²). A release books whole
units u and then adds noise

    σ = Δ / √(capacity · u / 2⁵⁰),  rounded up,

so that (Δ/σ)² never exceeds what was booked. Sums of integers do not drift. The next release of a
client with r releases still to come takes u = ⌊left / r⌋, which is σ = Δ·√(r / left): Theorem 4 of
the paper, eq. (25), for every calibration. While r falls by one with each release, u and hence σ
stay the same to one unit.

The same code serves one client (0-dimensional arrays), a million (1-dimensional ones), and several
runs side by side (2-dimensional ones).
Every operation returns a new tank; `spend` is the only one that lowers what is left.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any, Self, TypeAlias, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from sottovoce.errors import InputError, TankEmpty
from sottovoce.privacy.gaussian import Floats

Units: TypeAlias = NDArray[np.int64]

_Number = TypeVar("_Number", np.int64, np.float64)

_FIELDS = ("capacity", "spent", "opened", "debits")

FULL = 2**50
# int64 → float64 is exact below 2⁵³; the product, root and quotient of `noise` lose at most 2 ulp.
_ROUND_UP = 1 + 2**-50


def most_units(floor: float, capacity: float) -> int:
    """The most units of a turn for which μ² = capacity·u/2⁵⁰ ≤ 1/floor², in exact arithmetic.

    More than a tank has where the floor asks for less noise than all of it buys.

    >>> most_units(floor=2.0, capacity=1.0) == FULL // 4
    True
    """
    return int(FULL / (Fraction(floor) ** 2 * Fraction(capacity)))


def scaled_units(available: ArrayLike, planned: ArrayLike, scale: float) -> Units:
    """Whole units of one release at `scale` times the noise of `planned` equal ones.

    >>> int(scaled_units(FULL, 200, 1.0)) == FULL // 200
    True
    """
    share = np.asarray(available, dtype=np.int64) / (np.asarray(planned) * scale**2)
    return np.floor(np.minimum(share, 2.0 * FULL)).astype(np.int64)


def side_by_side(arrays: Sequence[NDArray[Any]]) -> NDArray[Any]:
    """Arrays as rows of one; a single one is only looked at: `np.stack` takes ten times as long.

    >>> side_by_side([np.array([1, 2])]).tolist(), side_by_side([np.ones(1), np.zeros(1)]).tolist()
    ([[1, 2]], [[1.0], [0.0]])
    """
    return arrays[0][None] if len(arrays) == 1 else np.stack(arrays)


@dataclass(frozen=True)
class Offer:
    """What the next release of each client would cost, before anything is booked.

    `sigma` is NaN and `units` 0 where the client declines (`granted` is False).
    """

    granted: NDArray[np.bool_]
    units: Units
    sigma: Floats

    def require(self) -> Self:
        """This offer, or a refusal if any client declines."""
        if not np.all(self.granted):
            raise TankEmpty(
                "the privacy budget has nothing left for this release; "
                "the client takes no further part, and only a new dataset brings a new budget"
            )
        return self


@dataclass(frozen=True)
class Tank:
    """The fuel of one client or of many. `Tank.full(capacity)` makes one.

    >>> tank = Tank.full(capacity=4.0)
    >>> offer = tank.offer(sensitivity=1.0, remaining=4)
    >>> float(offer.sigma.round(9))  # Δ·√(4/4)
    1.0
    >>> tank = tank.spend(offer.units)
    >>> float(tank.spent_mu2), float(tank.left_fraction), int(tank.debits)
    (1.0, 0.75, 1)
    """

    capacity: Floats
    spent: Units
    opened: Units  # what had been spent when this run began: earlier runs share the tank
    debits: Units  # how often this run has booked, whether or not the upload arrived

    def __post_init__(self) -> None:
        for name in _FIELDS:  # arrays that nobody can write to: a tank is a value
            own = getattr(self, name)
            if not (type(own) is np.ndarray and own.flags.owndata and not own.flags.writeable):
                own = np.array(own)
                own.setflags(write=False)
                object.__setattr__(self, name, own)

    @classmethod
    def full(cls, capacity: ArrayLike) -> Self:
        """A tank from which nothing has been taken.

        >>> Tank.full([1.0, 2.0]).left.tolist() == [FULL, FULL]
        True
        """
        given = np.asarray(capacity)
        if given.dtype.kind not in "fiu" or not np.all(np.isfinite(given) & (given > 0)):
            raise InputError.of(
                "capacity", given.tolist(), "finite and > 0", "derive it from a Budget"
            )
        capacity = given.astype(np.float64)
        zero = np.zeros(capacity.shape, dtype=np.int64)
        return cls(capacity=capacity, spent=zero, opened=zero, debits=zero)

    @classmethod
    def side_by_side(cls, tanks: Sequence[Self]) -> Self:
        """The tanks of several runs as one, each a row: what holds for one holds for every row.

        >>> Tank.side_by_side([Tank.full([1.0, 2.0]), Tank.full([3.0, 4.0])]).capacity.tolist()
        [[1.0, 2.0], [3.0, 4.0]]
        """
        return cls(*(side_by_side([getattr(own, name) for own in tanks]) for name in _FIELDS))

    def new_run(self) -> Self:
        """The same fuel for a run that has booked nothing yet."""
        return replace(self, opened=self.spent, debits=np.zeros_like(self.debits))

    @property
    def left(self) -> Units:
        """Units not yet booked."""
        return np.asarray(FULL - self.spent, dtype=np.int64)

    @property
    def left_fraction(self) -> Floats:
        """The fuel gauge: 1 is full, 0 is empty."""
        return np.asarray(self.left / FULL, dtype=np.float64)

    @property
    def spent_mu2(self) -> Floats:
        """What has been booked, as Σ μ²."""
        return np.asarray(self.capacity * (self.spent / FULL), dtype=np.float64)

    def noise(self, units: ArrayLike, sensitivity: ArrayLike) -> Floats:
        """σ of a release that books so many units: Δ / √(capacity·u/2⁵⁰), rounded up."""
        mu2 = self.capacity * (np.asarray(units, dtype=np.float64) / FULL)
        return np.asarray(np.asarray(sensitivity, dtype=np.float64) / np.sqrt(mu2) * _ROUND_UP)

    def offer(self, sensitivity: ArrayLike, remaining: ArrayLike) -> Offer:
        """An equal share of what is left: σ = Δ·√(r / left), r releases to come, this one included.

        A client past its plan (r < 1) may use what is left; one with nothing left declines.

        >>> tank = Tank.full(capacity=1.0)
        >>> tank = tank.spend(tank.left)
        >>> tank.offer(sensitivity=1.0, remaining=3).require()
        Traceback (most recent call last):
            ...
        sottovoce.errors.TankEmpty: the privacy budget has nothing left for this release; \
the client takes no further part, and only a new dataset brings a new budget
        """
        remaining = np.maximum(1, self._whole("remaining", remaining))
        return self._priced(self.left // remaining, sensitivity)

    def offer_scaled(self, sensitivity: ArrayLike, planned: ArrayLike, scale: float) -> Offer:
        """A share set by the plan, not by what is left: σ = scale·Δ·√(R₀ / left at the start).

        Used by schedules whose noise falls with the rounds; a client that cannot pay declines.

        >>> tank = Tank.full(capacity=4.0)
        >>> float(tank.offer_scaled(1.0, planned=4, scale=0.5).sigma.round(9))
        0.5
        """
        if not 1e-6 <= scale <= 1e6:
            raise InputError.of("scale", scale, "from 1e-06 to 1e+06", "1 is the noise as planned")
        planned = np.maximum(1, self._whole("planned", planned))
        units = scaled_units(FULL - self.opened, planned, scale)
        return self._priced(np.where(units <= self.left, units, 0), sensitivity)

    def _priced(self, units: Units, sensitivity: ArrayLike) -> Offer:
        granted = units > 0
        delta = self._fitting("sensitivity", np.asarray(sensitivity, dtype=np.float64))
        if not ((delta > 0) & (delta < np.inf)).all():
            raise InputError.of(
                "sensitivity", sensitivity, "finite and > 0", "compute it from the recipe"
            )
        sigma = self.noise(np.where(granted, units, 1), delta)
        return Offer(
            granted=np.asarray(granted),
            units=np.where(granted, units, 0),
            sigma=np.where(granted, sigma, np.nan),
        )

    def spend(self, units: ArrayLike) -> Self:
        """Book units: all or nothing, checked before anything changes. Zero books nothing.

        >>> Tank.full(capacity=1.0).spend(FULL + 1)
        Traceback (most recent call last):
            ...
        sottovoce.errors.TankEmpty: a release of 1125899906842625 units was asked for with \
1125899906842624 left; nothing was booked, ask for an offer first
        """
        given = np.asarray(units)
        if given.dtype.kind not in "iu":  # 0.9 of a unit must not be booked as none
            raise InputError.of("units", given.tolist(), "whole numbers", "take those of an offer")
        units = self._fitting("units", np.minimum(given, 2 * FULL).astype(np.int64, copy=False))
        if np.any(units < 0):
            raise InputError.of("units", int(units.min()), "≥ 0", "a debit is never taken back")
        if np.any(over := units > self.left):
            asked, left = int(units[over].flat[0]), int(self.left[over].flat[0])
            raise TankEmpty(
                f"a release of {asked} units was asked for with {left} left; "
                "nothing was booked, ask for an offer first"
            )
        return self._after(spent=self.spent + units, debits=self.debits + (units > 0))

    def _after(self, spent: Units, debits: Units) -> Self:
        """The same tank with these books, which are new arrays: they need not be copied."""
        for own in (spent, debits):
            own.setflags(write=False)
        return type(self)(self.capacity, spent, self.opened, debits)

    def _whole(self, name: str, numbers: ArrayLike) -> Units:
        """Whole numbers of this tank's shape; a server may announce any, so they are cut to 2⁵⁰."""
        given = np.asarray(numbers)
        if given.dtype == object and all(isinstance(n, int) for n in given.flat):
            cut = [min(max(n, -FULL), FULL) for n in given.flat]  # beyond 64 bits
            given = np.array(cut, dtype=np.int64).reshape(given.shape)
        if given.dtype.kind not in "iu":
            raise InputError.of(name, numbers, "whole numbers", "it counts releases")
        if given.dtype == np.int64:  # the same at a third of the time
            return self._fitting(name, np.minimum(np.maximum(given, -FULL), FULL))
        return self._fitting(name, np.clip(given, -FULL, FULL).astype(np.int64))

    def _fitting(self, name: str, values: NDArray[_Number]) -> NDArray[_Number]:
        """One number for all clients or one for each: anything else would book too little."""
        if values.shape == self.capacity.shape:
            return values
        if values.shape != ():
            raise InputError.of(
                name,
                values.shape,
                f"one number or of shape {self.capacity.shape}",
                "one for each client of the tank",
            )
        return np.broadcast_to(values, self.capacity.shape)

    def to_json(self) -> dict[str, Any]:
        """Plain data. Floats are written in full, so that reading them back gives the same tank.

        >>> tank = Tank.full(capacity=[0.1, 2.0]).spend([5, 0])
        >>> Tank.from_json(tank.to_json()).spent.tolist()
        [5, 0]
        """
        return {name: getattr(self, name).tolist() for name in _FIELDS}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Self:
        """The tank that `to_json` wrote; anything that cannot be one is refused."""
        if set(data) != set(_FIELDS):
            raise InputError.of(
                "tank", sorted(data), f"an object with {', '.join(_FIELDS)}", "do not edit it"
            )
        try:
            tank = cls.full(data["capacity"])
            counts = {name: np.asarray(data[name]) for name in _FIELDS[1:]}
        except (ValueError, TypeError):
            raise InputError.of("tank", data, "numbers, one a client", "do not edit it") from None
        for name, value in counts.items():
            if value.dtype != np.int64 or value.shape != tank.capacity.shape:
                raise InputError.of(
                    f"tank.{name}", data[name], "whole numbers, one a client", "do not edit it"
                )
        spent, opened, debits = (counts[name] for name in _FIELDS[1:])
        if np.any((opened < 0) | (spent < opened) | (spent > FULL) | (debits < 0)):
            raise InputError.of(
                "tank", data["spent"], "0 ≤ opened ≤ spent ≤ 2^50", "do not edit it"
            )
        return replace(tank, spent=spent, opened=opened, debits=debits)
