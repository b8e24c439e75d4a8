"""From differences over the seeds to a verdict.

A claim is tested at one or several points. At each there is one number a seed, positive where the
claim is right for that seed (runs of one seed share split, first model and noise: the numbers are
paired), and their mean has a 95 % interval (Student's t).

- *holds*: at every point the interval lies above 0. If the claim is false at any point, this is
  said with probability 2.5 % at most, whatever the number of points.
- *contradicted*: at some point the interval lies below 0, at 95 % for all points together
  (Bonferroni), so that many points do not make a contradiction by chance.
- *undecided*: anything else, a number that is not finite included.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike
from scipy.special import stdtrit

Word = Literal["holds", "contradicted", "undecided"]
LEVEL = 0.95


@dataclass(frozen=True)
class Interval:
    """A mean with its interval."""

    mean: float
    low: float
    high: float

    @property
    def word(self) -> Word:
        """What this point says by itself."""
        if self.low > 0:
            return "holds"
        return "contradicted" if self.high < 0 else "undecided"


@dataclass(frozen=True)
class Tested:
    """One point of a claim: where, and what the seeds say there."""

    at: str
    interval: Interval


@dataclass(frozen=True)
class Verdict:
    """What became of a claim."""

    word: Word
    points: tuple[Tested, ...]

    @property
    def tally(self) -> str:
        """Which points say what, in a few words.

        >>> judge({"ε = 4": [1.0, 1.1, 1.2], "ε = 8": [-1.0, -1.1, -1.2]}).tally
        'holds at 1 of 2, contradicted at 1'
        """
        words = [point.interval.word for point in self.points]
        parts = [f"holds at {words.count('holds')} of {len(words)}"]
        if words.count("contradicted"):
            parts.append(f"contradicted at {words.count('contradicted')}")
        return ", ".join(parts)


def interval(differences: ArrayLike, level: float = LEVEL) -> Interval:
    """The mean and its interval, mean ± t·s/√n; one number is its own interval.

    >>> found = interval([1.0, 2.0, 3.0])
    >>> round(found.low, 3), found.mean, round(found.high, 3)
    (-0.484, 2.0, 4.484)
    """
    values = np.atleast_1d(np.asarray(differences, dtype=np.float64))
    mean, n = float(values.mean()), len(values)
    if n == 1:
        return Interval(mean, mean, mean)
    t = float(stdtrit(n - 1, 0.5 + level / 2))
    half = t * float(values.std(ddof=1)) / float(np.sqrt(n))
    return Interval(mean, mean - half, mean + half)


def judge(differences: Mapping[str, ArrayLike], guards: Sequence[ArrayLike] = ()) -> Verdict:
    """The verdict on a claim from its points; `guards` may contradict it and cannot support it.

    >>> judge({"": [0.2, 0.3, 0.25, 0.2, 0.3]}).word
    'holds'
    >>> judge({"": [-0.2, -0.3, -0.25, -0.2, -0.3]}).word
    'contradicted'
    >>> judge({"": [-0.2, 0.3, 0.1, -0.3, 0.2]}).word
    'undecided'
    """
    points = tuple(Tested(at, interval(values)) for at, values in differences.items())
    every = [*differences.values(), *guards]
    strict = 1 - (1 - LEVEL) / max(1, len(every))
    if any(interval(values, strict).high < 0 for values in every):
        return Verdict("contradicted", points)
    if points and all(point.interval.low > 0 for point in points):
        return Verdict("holds", points)
    return Verdict("undecided", points)
