"""Is the noise of a peer's rounds what was asked for, in every array of its weights, every round?

A round's weights less those of the round without noise are its noise. Over n numbers of N(0, s²)
the root of the mean square is s within a relative standard error of 1/√(2n). Six of them are
allowed: a false alarm in 10⁷ for 24 numbers and more. An array is judged as often as it is looked
at, and once over all rounds together; of one that has fewer than `ENOUGH` numbers by then nothing
could be said, not even that there is no noise, so the peer is not timed.
"""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
from work import Arrays

ENOUGH = 24
ERRORS = 6.0
#: No two rounds may give the same array; where it is smaller than this they can by chance.
TELLING = 8


class Unfit(Exception):
    """One sentence: why a peer's times would mean nothing."""


class Noise:
    """What was seen of one peer's noise so far."""

    def __init__(self, silent: Arrays, std: float) -> None:
        self.silent, self.std = silent, std
        self.squares = dict.fromkeys(silent, 0.0)
        self.numbers = dict.fromkeys(silent, 0)
        self.seen: set[tuple[str, bytes]] = set()

    def is_enough(self, *, after: int = 0) -> bool:
        """Whether every array can be judged, after so many rounds more."""
        sizes = {name: np.size(array) for name, array in self.silent.items()}
        return all(self.numbers[name] + after * sizes[name] >= ENOUGH for name in sizes)

    def look(self, rounds: Arrays) -> None:
        """At the weights after some rounds, stacked; raises `Unfit`."""
        for name, silent in self.silent.items():
            own = np.asarray(rounds[name])
            if np.size(silent) >= TELLING:
                self._compare(name, own)
            noise = own.astype(np.float64) - np.asarray(silent, np.float64)
            squares = float(np.sum(noise**2))
            self._judge(name, squares, noise.size)
            self.squares[name] += squares
            self.numbers[name] += noise.size

    def _compare(self, name: str, rounds: Any) -> None:
        for one in rounds:
            mark = name, hashlib.blake2b(one.tobytes()).digest()
            if mark in self.seen:
                raise Unfit(f"two rounds gave the same {name}: it does not draw noise anew")
            self.seen.add(mark)

    def ratios(self) -> dict[str, float]:
        """Of every array over all rounds, noise over what was asked for; raises `Unfit`."""
        for name, numbers in self.numbers.items():
            if numbers < ENOUGH:
                raise Unfit(f"{numbers} numbers of noise in {name} are too few to judge it by")
            self._judge(name, self.squares[name], numbers)
        return {
            name: (self.squares[name] / numbers) ** 0.5 / self.std
            for name, numbers in self.numbers.items()
        }

    def _judge(self, name: str, squares: float, numbers: int) -> None:
        ratio: Any = (squares / numbers) ** 0.5 / self.std
        if not abs(ratio - 1) <= ERRORS / (2 * numbers) ** 0.5:
            raise Unfit(f"its noise in {name} is {ratio:.3f} times what was asked for")
