"""The tank: a client's privacy budget as an account that is checked before it is debited.

A tank divides its client's capacity (in μ²) into 2⁵⁰ equal units. A release books u whole units and
then adds noise

    σ = Δ / √(capacity · u / 2⁵⁰),  rounded up,

so that (Δ/σ)² never exceeds what was booked. Sums of integers have no rounding errors. A client
with r releases still to come books u = ⌊left / r⌋ for the next one, which is σ = Δ·√(r / left):
Theorem 4 of the paper, eq. (25), for every calibration. While r falls by one with each release, u
stays the same to one unit, and so σ hardly changes.

The same code serves one client (0-dimensional arrays), a million (1-dimensional ones), and several
runs side by side (2-dimensional ones). Every operation returns a new tank; `spend` is the only one
that lowers what is left.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any, Self, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from sottovoce.errors import InputError, TankEmpty
from sottovoce.privacy.gaussian import Floats

Units: TypeAlias = NDArray[np.int64]

_FIELDS = ("capacity", "spent", "opened", "debits")

FULL = 2**50
# The product, root and quotient of `noise` lose at most 2 ulp; int64 → float64 is exact below 2⁵³.
_ROUND_UP = 1 + 2**-50


def most_units(floor: float, capacity: float) -> int:
    """Return the largest u of a turn for which μ² = capacity·u/2⁵⁰ ≤ 1/floor², computed exactly.

    It exceeds 2⁵⁰ where even a turn that spends the whole tank keeps to the floor.

    >>> most_units(floor=2.0, capacity=1.0) == FULL // 4
    True
    """
    return int(FULL / (Fraction(floor) ** 2 * Fraction(capacity)))


def scaled_units(available: ArrayLike, planned: ArrayLike, scale: float) -> Units:
    """Return the units of one release whose noise is `scale` times that of `planned` equal ones.

    >>> int(scaled_units(FULL, 200, 1.0)) == FULL // 200
    True
    """
    share = np.asarray(available, dtype=np.int64) / (np.asarray(planned) * scale**2)
    return np.floor(np.minimum(share, 2.0 * FULL)).astype(np.int64)


def stack_rows(arrays: Sequence[NDArray[Any]]) -> NDArray[Any]:
    """Stack arrays as rows of one; a single array gives a view, which is ten times faster.

    >>> stack_rows([np.array([1, 2])]).tolist(), stack_rows([np.ones(1), np.zeros(1)]).tolist()
    ([[1, 2]], [[1.0], [0.0]])
    """
    return arrays[0][None] if len(arrays) == 1 else np.stack(arrays)


@dataclass(frozen=True)
class Offer:
    """The cost of the next release of each client, before anything is booked.

    `sigma` is NaN and `units` 0 where the client declines (`granted` is False).
    """

    granted: NDArray[np.bool_]
    units: Units
    sigma: Floats

    def require(self) -> Self:
        """Return this offer; raise TankEmpty if any client declines."""
        if not np.all(self.granted):
            raise TankEmpty(
                "the privacy budget has nothing left for this release; "
                "the client takes no further part, and only a new dataset brings a new budget"
            )
        return self


@dataclass(frozen=True)
class Tank:
    """The budget left of one client or of many. `Tank.full(capacity)` makes a tank.

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
    opened: Units  # spent before this run began, by earlier runs on the same tank
    debits: Units  # number of debits of this run, whether or not the upload arrived

    def __post_init__(self) -> None:
        for name in _FIELDS:  # a tank is a value, so nobody may write to its arrays
            array = getattr(self, name)
            frozen = type(array) is np.ndarray and array.flags.owndata and not array.flags.writeable
            if not frozen:
                array = np.array(array)
                array.setflags(write=False)
                object.__setattr__(self, name, array)

    @classmethod
    def full(cls, capacity: ArrayLike) -> Self:
        """Make a tank from which nothing has been spent."""
        mu2 = np.asarray(capacity)
        if mu2.dtype.kind not in "fiu" or not np.all(np.isfinite(mu2) & (mu2 > 0)):
            remedy = "derive it from a Budget"
            raise InputError.of("capacity", mu2.tolist(), "finite and > 0", remedy)
        zero = np.zeros(mu2.shape, dtype=np.int64)
        return cls(capacity=mu2.astype(np.float64), spent=zero, opened=zero, debits=zero)

    @classmethod
    def stack(cls, tanks: Sequence[Self]) -> Self:
        """Stack the tanks of several runs as rows of one."""
        return cls(*(stack_rows([getattr(tank, name) for tank in tanks]) for name in _FIELDS))

    def start_run(self) -> Self:
        """Return the same tank for a new run, which has booked nothing yet."""
        return replace(self, opened=self.spent, debits=np.zeros_like(self.debits))

    @property
    def left(self) -> Units:
        """Units not yet booked."""
        return np.asarray(FULL - self.spent, dtype=np.int64)

    @property
    def left_fraction(self) -> Floats:
        """The fraction not yet booked: 1 is full, 0 is empty."""
        return np.asarray(self.left / FULL, dtype=np.float64)

    @property
    def spent_mu2(self) -> Floats:
        """The sum that has been booked, as Σ μ²."""
        return np.asarray(self.capacity * (self.spent / FULL), dtype=np.float64)

    def noise(self, units: ArrayLike, sensitivity: ArrayLike) -> Floats:
        """Return σ of a release that books so many units: Δ / √(capacity·u/2⁵⁰), rounded up."""
        mu2 = self.capacity * (np.asarray(units, dtype=np.float64) / FULL)
        return np.asarray(np.asarray(sensitivity, dtype=np.float64) / np.sqrt(mu2) * _ROUND_UP)

    def offer(self, sensitivity: ArrayLike, remaining: ArrayLike) -> Offer:
        """Offer an equal share of what is left: σ = Δ·√(r / left), r releases including this one.

        A client past its planned releases (r < 1) is offered all that is left; one with nothing
        left declines.
        """
        remaining = np.maximum(1, self._read_counts("remaining", remaining))
        return self._make_offer(self.left // remaining, sensitivity)

    def offer_scaled(self, sensitivity: ArrayLike, planned: ArrayLike, scale: float) -> Offer:
        """Offer a share of what was left at the start of the run: σ = scale·Δ·√(R₀ / left then).

        Schedules whose noise falls with the rounds use it. A client that cannot pay declines.

        >>> tank = Tank.full(capacity=4.0)
        >>> float(tank.offer_scaled(1.0, planned=4, scale=0.5).sigma.round(9))
        0.5
        """
        if not 1e-6 <= scale <= 1e6:
            raise InputError.of("scale", scale, "from 1e-06 to 1e+06", "1 is the noise as planned")
        planned = np.maximum(1, self._read_counts("planned", planned))
        units = scaled_units(FULL - self.opened, planned, scale)
        return self._make_offer(np.where(units <= self.left, units, 0), sensitivity)

    def _make_offer(self, units: Units, sensitivity: ArrayLike) -> Offer:
        """Return the offer of these units; clients with none decline."""
        granted = units > 0
        delta = self._broadcast("sensitivity", np.asarray(sensitivity, dtype=np.float64))
        if not ((delta > 0) & (delta < np.inf)).all():
            remedy = "compute it from the recipe"
            raise InputError.of("sensitivity", sensitivity, "finite and > 0", remedy)
        if granted.all():
            return Offer(np.asarray(granted), np.asarray(units), self.noise(units, delta))
        sigma = np.where(granted, self.noise(np.where(granted, units, 1), delta), np.nan)
        return Offer(np.asarray(granted), np.where(granted, units, 0), sigma)

    def spend(self, units: ArrayLike) -> Self:
        """Book units for all clients, or for none if one cannot pay. Zero books nothing."""
        asked = np.asarray(units)
        if asked.dtype.kind not in "iu":  # 0.9 of a unit must not be booked as none
            raise InputError.of("units", asked.tolist(), "whole numbers", "take those of an offer")
        units = self._broadcast("units", np.clip(asked, -FULL, 2 * FULL).astype(np.int64))
        if (units < 0).any():
            raise InputError.of("units", int(units.min()), "≥ 0", "a debit is never taken back")
        if (over := units > self.left).any():
            too_many, units_left = int(units[over].flat[0]), int(self.left[over].flat[0])
            raise TankEmpty(
                f"a release of {too_many} units was asked for with {units_left} left; "
                "nothing was booked, ask for an offer first"
            )
        return self.with_books(spent=self.spent + units, debits=self.debits + (units > 0))

    def with_books(self, spent: Units, debits: Units) -> Self:
        """Return this tank with other books. These arrays are new and need not be copied."""
        for array in (spent, debits):
            array.setflags(write=False)
        return type(self)(self.capacity, spent, self.opened, debits)

    def _read_counts(self, name: str, numbers: ArrayLike) -> Units:
        """Return whole numbers in this tank's shape, cut to ±2⁵⁰: a server may announce any."""
        counts = np.asarray(numbers)
        if counts.dtype == object and all(isinstance(n, int) for n in counts.flat):
            cut = [min(max(n, -FULL), FULL) for n in counts.flat]  # beyond 64 bits
            counts = np.array(cut, dtype=np.int64).reshape(counts.shape)
        if counts.dtype.kind not in "iu":
            raise InputError.of(name, numbers, "whole numbers", "it counts releases")
        if counts.dtype == np.int64:  # a faster way to the same result
            return self._broadcast(name, np.minimum(np.maximum(counts, -FULL), FULL))
        return self._broadcast(name, np.clip(counts, -FULL, FULL).astype(np.int64))

    def _broadcast(self, name: str, values: NDArray[Any]) -> NDArray[Any]:
        """Return values in this tank's shape: one for all clients or one for each.

        Any other shape is refused, since numpy might broadcast it and book too little.
        """
        if values.shape == self.capacity.shape:
            return values
        if values.shape != ():
            bound = f"one number or of shape {self.capacity.shape}"
            remedy = "one for each client of the tank"
            raise InputError.of(name, values.shape, bound, remedy)
        return np.broadcast_to(values, self.capacity.shape)
