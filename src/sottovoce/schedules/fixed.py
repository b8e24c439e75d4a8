"""T rounds, as announced: the paper's UDP (Algorithm 1)."""

from __future__ import annotations

from dataclasses import dataclass, replace

from sottovoce.schedules.base import Progress, Round, require_rounds


@dataclass(frozen=True)
class FixedRounds:
    """Exactly `rounds` rounds, whatever the losses.

    >>> schedule = FixedRounds(rounds=2)
    >>> progress = schedule.advance(schedule.start(2.3), 2.1)
    >>> schedule.round(progress)
    Round(t=1, horizon=2, scale=1.0, spread=None)
    >>> schedule.round(schedule.advance(progress, 2.0)) is None
    True
    """

    rounds: int

    def __post_init__(self) -> None:
        require_rounds(self.rounds)

    @property
    def steady(self) -> bool:
        """Whether no loss changes the horizon: always true."""
        return True

    def start(self, loss: float | None) -> Progress:
        """Start with T = T₀."""
        return Progress(done=0, horizon=self.rounds)

    def round(self, progress: Progress) -> Round | None:
        """Return the next of T rounds."""
        if progress.done >= progress.horizon:
            return None
        return Round(t=progress.done, horizon=progress.horizon)

    def advance(self, progress: Progress, loss: float) -> Progress:
        """Count one more round."""
        return replace(progress, done=progress.done + 1)
