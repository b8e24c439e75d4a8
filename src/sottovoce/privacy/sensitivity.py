"""Compute Δ from the training recipe: how far one unit can move one upload.

Sensitivity is computed, never typed in. With gradients clipped to norm C over all parameters
together, rate η and n samples (n is public), replacing one unit moves one release by at most

    2ηC/n    where the unit is one record, or one person (then a sample is a person, n counts
             persons, and the mean gradient of a person's rows is clipped: `models.person`)
    2ηC      where it is all data of the client.

This is eq. (13) of the paper. Each of E local steps is a release of its own, with its own noise.
Without noise in between they would have 2ηC·(E − 1 + 1/n), and **not** 2ηCE/n: one different record
moves the iterate, after which every clipped gradient may differ (clipped steps are not
non-expansive). No such recipe is offered, nor one of minibatches.
Class weights multiply a clipped gradient by at most 1, so that both bounds stay as they are.
"""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Real

import numpy as np
from numpy.typing import ArrayLike

from sottovoce.errors import InputError
from sottovoce.privacy.budget import UNITS, Unit
from sottovoce.privacy.gaussian import Floats

_SMALLEST, _LARGEST = 1e-15, 1e15  # η and C: far from the ends of float32
LEAST_WEIGHT = 1e-6  # of a class: below it the class would not be learnt
_ROUND_UP = 1 + 2**-50  # more than the rounding errors of the few products below


@dataclass(frozen=True)
class Recipe:
    """What a client does between receiving a model and uploading one.

    >>> float(Recipe(learning_rate=1.0, clip=5.0).sensitivity(800))
    0.01250...
    """

    learning_rate: float
    clip: float
    unit: Unit = "record"
    steps: int = 1
    class_weights: tuple[float, ...] | None = None  # times a clipped gradient; each at most 1

    def __post_init__(self) -> None:
        for name, remedy in (
            ("learning_rate", "choose the step size, 1 is a good start"),
            ("clip", "choose the norm gradients are cut to"),
        ):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, Real):
                raise InputError.of(name, value, "a number", "give it without quotes")
            value = float(value)  # with a float32, Δ would be rounded down
            if not _SMALLEST <= value <= _LARGEST:
                raise InputError.of(name, value, "a number from 1e-15 to 1e+15", remedy)
            object.__setattr__(self, name, value)
        if self.unit not in UNITS:
            raise InputError.of("unit", self.unit, " or ".join(UNITS), "name what is protected")
        if not isinstance(self.steps, int) or isinstance(self.steps, bool) or self.steps < 1:
            raise InputError.of(
                "steps", self.steps, "a whole number ≥ 1", "1 is the paper's recipe"
            )
        for weight in self.class_weights or ():
            if type(weight) not in (int, float) or not LEAST_WEIGHT <= weight <= 1:
                remedy = "divide all by the largest: above 1 a clipped gradient would exceed C"
                raise InputError.of("class_weights", weight, "numbers from 1e-6 to 1", remedy)
        if self.class_weights is not None:
            object.__setattr__(self, "class_weights", tuple(map(float, self.class_weights)))

    @property
    def releases(self) -> int:
        """The number of releases of one participation, each of which is charged."""
        return self.steps

    def sensitivity(self, samples: ArrayLike) -> Floats:
        """Return Δ of one release of a client with so many samples (a number or array), rounded up.

        >>> Recipe(2.0, 1.0, unit="client").sensitivity([143, 1]).round(9).tolist()
        [4.0, 4.0]
        """
        n = np.asarray(samples, dtype=np.float64)
        if not np.all((n >= 1) & (n == np.floor(n)) & np.isfinite(n)):
            remedy = "a client without samples takes no part"
            raise InputError.of("samples", samples, "whole numbers ≥ 1", remedy)
        moved = np.ones_like(n) if self.unit == "client" else 1 / n
        return np.asarray(2 * self.learning_rate * self.clip * moved * _ROUND_UP)
