"""What is kept of each client round by round, and of very many clients only of all rounds together.

A line a round of a million clients would fill a machine. Releases with σ_1, σ_2, … of the same
sensitivity are worth as much as one with σ = (Σ 1/σ_t²)^(−1/2), so one line says what was
released in the first step of every round; what was booked adds up.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from sottovoce.runs.checkpoint import MANY_CLIENTS

Line: TypeAlias = NDArray[np.float64]


def kept(
    lines: tuple[Line, ...], newest: Line, join: Callable[[Line, Line], Line]
) -> tuple[Line, ...]:
    """The trace with the newest round, as a line more or, of many clients, within the one there is.

    >>> len(kept((np.zeros(3),), np.ones(3), np.add))
    2
    >>> many = np.ones(MANY_CLIENTS + 1)
    >>> [float(line[0]) for line in kept((many,), many, np.add)]
    [2.0]
    """
    if len(newest) <= MANY_CLIENTS or not lines:
        return (*lines, newest)
    return (join(lines[0], newest),)


def together(before: Line, newest: Line) -> Line:
    """σ of one release that is worth two, (1/σ₁² + 1/σ₂²)^(−1/2); NaN is no release.

    >>> together(np.array([3.0, 5.0, np.nan]), np.array([4.0, np.nan, np.nan])).round(6).tolist()
    [2.4, 5.0, nan]
    """
    both = before * newest / np.hypot(before, newest)
    return np.where(np.isnan(newest), before, np.where(np.isnan(before), newest, both))
