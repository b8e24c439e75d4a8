"""Compute Δ from the training recipe: how far one unit can move one upload.

Sensitivity is computed, never typed in. With gradients clipped to norm C over all parameters
together, rate η and n samples (n is public), replacing one unit moves one release by at most the
following. Where persons are protected, a sample is a person: the mean gradient of its rows is
clipped (`models.person`).

    recipe                                 unit record (g records)    unit client
                                           or person (n persons)
    one full-batch step (the paper)        2ηC·min(g, n)/n            2ηC
    E steps, noise at every step           the same, E releases       the same, E releases
    E steps, noise on the last only        2ηC·(E − 1 + min(g, n)/n)  2ηCE

The first row is eq. (13) of the paper. The last is **not** 2ηCE/n: one different record moves the
iterate, after which every clipped gradient may differ (clipped steps are not non-expansive).
Class weights multiply a clipped gradient by at most 1, so that all these bounds stay as they are.
Recipes outside this table have no bound here and are refused.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from numbers import Real
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import ArrayLike

from sottovoce.errors import InputError, NoSensitivity
from sottovoce.privacy.budget import UNITS, Unit
from sottovoce.privacy.gaussian import Floats

NoiseAt: TypeAlias = Literal["every-step", "last-step"]

_KNOWN = (
    "the recipes with a bound are: full-batch gradient steps with a finite clip, and noise at "
    "every step or on the last one"
)
_SMALLEST, _LARGEST = 1e-15, 1e15  # η and C: far from the ends of float32
LEAST_WEIGHT = 1e-6  # of a class: below it the class would not be learnt
_ROUND_UP = 1 + 2**-50  # more than the rounding errors of the few products below


@dataclass(frozen=True)
class Recipe:
    """What a client does between receiving a model and uploading one.

    >>> float(Recipe(learning_rate=1.0, clip=5.0).sensitivity(800))
    0.01250...
    >>> Recipe(learning_rate=1.0, clip=5.0, batch=32).sensitivity(800)
    Traceback (most recent call last):
        ...
    sottovoce.errors.NoSensitivity: batch must be 'full', got 32; the recipes with a bound are: \
full-batch gradient steps with a finite clip, and noise at every step or on the last one
    """

    learning_rate: float
    clip: float
    unit: Unit = "record"
    steps: int = 1
    noise_at: NoiseAt = "every-step"
    batch: int | Literal["full"] = "full"
    group: int = 1
    class_weights: tuple[float, ...] | None = None  # times a clipped gradient; each at most 1

    def __post_init__(self) -> None:
        for name in ("learning_rate", "clip"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, Real):
                raise InputError.of(name, value, "a number", "give it without quotes")
            object.__setattr__(self, name, float(value))  # with a float32, Δ would be rounded down
        if self.clip == math.inf:
            raise NoSensitivity.of("clip", self.clip, "finite", _KNOWN)
        for name, remedy in (
            ("learning_rate", "choose the step size, 1 is a good start"),
            ("clip", "choose the norm gradients are cut to"),
        ):
            if not _SMALLEST <= (value := getattr(self, name)) <= _LARGEST:
                raise InputError.of(name, value, "a number from 1e-15 to 1e+15", remedy)
        if self.batch != "full":
            raise NoSensitivity.of("batch", self.batch, "'full'", _KNOWN)
        if self.noise_at not in ("every-step", "last-step"):
            raise NoSensitivity.of("noise_at", self.noise_at, "every-step or last-step", _KNOWN)
        if self.unit not in UNITS:
            raise InputError.of("unit", self.unit, " or ".join(UNITS), "name what is protected")
        for name in ("steps", "group"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise InputError.of(name, value, "a whole number ≥ 1", "1 is the paper's recipe")
        for weight in self.class_weights or ():
            if type(weight) not in (int, float) or not LEAST_WEIGHT <= weight <= 1:
                remedy = "divide all by the largest: above 1 a clipped gradient would exceed C"
                raise InputError.of("class_weights", weight, "numbers from 1e-6 to 1", remedy)
        if self.class_weights is not None:
            object.__setattr__(self, "class_weights", tuple(map(float, self.class_weights)))

    @property
    def releases(self) -> int:
        """The number of releases of one participation, each of which is charged."""
        return self.steps if self.noise_at == "every-step" else 1

    def sensitivity(self, samples: ArrayLike) -> Floats:
        """Return Δ of one release of a client with so many samples (a number or array), rounded up.

        >>> Recipe(2.0, 1.0, unit="client").sensitivity([143, 1]).round(9).tolist()
        [4.0, 4.0]
        >>> float(Recipe(0.1, 1.0, steps=20, noise_at="last-step").sensitivity(1000).round(9))
        3.8002
        """
        n = np.asarray(samples, dtype=np.float64)
        if not np.all((n >= 1) & (n == np.floor(n)) & np.isfinite(n)):
            remedy = "a client without samples takes no part"
            raise InputError.of("samples", samples, "whole numbers ≥ 1", remedy)
        one_step = np.ones_like(n) if self.unit == "client" else np.minimum(self.group, n) / n
        moved = one_step + (self.steps - 1 if self.noise_at == "last-step" else 0)
        return np.asarray(2 * self.learning_rate * self.clip * moved * _ROUND_UP)
