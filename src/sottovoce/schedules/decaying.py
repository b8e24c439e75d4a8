"""Noise that falls linearly with the rounds until the budget is spent: the paper's "Lei"."""

from __future__ import annotations

from dataclasses import dataclass, replace

from sottovoce.errors import InputError
from sottovoce.privacy.tank import FULL, scaled_units
from sottovoce.schedules.base import Progress, Round, require_rounds


@dataclass(frozen=True)
class DecayingNoise:
    """σ_t = (1 − s·t)·σ₀, with σ₀ the noise of `rounds` equal rounds; stops before it overspends.

    Round t costs 1 / (T₀·(1 − s·t)²) of the budget, so a run is shorter than T₀. A client that
    takes part in all rounds can pay for all. Where K < U, a client may be asked in other rounds
    than planned, find its tank too low in the last ones, and decline.

    >>> schedule = DecayingNoise(rounds=200, slope=0.004)
    >>> schedule.affordable
    111
    >>> schedule.round(schedule.advance(schedule.start(2.3), 2.1))
    Round(t=1, horizon=111, scale=0.996, spread=200)
    """

    rounds: int
    slope: float = 0.004

    def __post_init__(self) -> None:
        require_rounds(self.rounds)
        if not 0 <= self.slope < 1:
            raise InputError.of(
                "slope", self.slope, "at least 0 and below 1", "0.004 a round is the default"
            )

    @property
    def affordable(self) -> int:
        """The number of rounds for which a client can pay that takes part in all of them."""
        left = FULL
        for t in range(self.rounds):
            scale = 1 - self.slope * t
            if scale < 1e-6:
                return t
            left -= int(scaled_units(FULL, self.rounds, scale))
            if left < 0:
                return t
        return self.rounds

    @property
    def steady(self) -> bool:
        """Whether no loss changes the horizon: always true."""
        return True

    def start(self, loss: float | None) -> Progress:
        """Start with the horizon that the budget affords."""
        return Progress(done=0, horizon=self.affordable)

    def round(self, progress: Progress) -> Round | None:
        """Return the next round, with less noise than the one before."""
        t = progress.done
        if t >= progress.horizon:
            return None
        return Round(t, progress.horizon, scale=1 - self.slope * t, spread=self.rounds)

    def advance(self, progress: Progress, loss: float) -> Progress:
        """Count one more round."""
        return replace(progress, done=progress.done + 1)
