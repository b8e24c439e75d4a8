"""The interface of a schedule: a value that turns public progress into the next round, or a stop.

    progress = schedule.start(loss of the initial model)
    while (round := schedule.round(progress)) is not None:
        ... train round `round.t`, evaluate the new model ...
        progress = schedule.advance(progress, loss of the new model)

A schedule holds no state. It sees only `Progress`, and all of that is public (losses on a public
set, or noised losses that were paid for). The horizon never grows, and every run ends after at most
`rounds` rounds. What a client does in a `Round` is bounded by its own tank: a schedule can waste
budget, never overspend it.
"""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Integral
from typing import Protocol

from sottovoce.errors import InputError


@dataclass(frozen=True)
class Round:
    """One round to be done: its number, the horizon T as it stands, and the scale of the noise.

    With `spread` None a client's noise follows from what is left in its tank, σ = Δ·√(r/left).
    Otherwise it is `scale` times the noise of `spread` equal rounds: σ = scale·Δ·√(R₀/left₀), with
    R₀ turns planned in `spread` rounds and left₀ what was left when the run began.
    """

    t: int
    horizon: int
    scale: float = 1.0
    spread: int | None = None


@dataclass(frozen=True)
class Progress:
    """All that a schedule may see.

    `done` rounds are finished, `horizon` is T as it stands, `recent` are the newest losses (as many
    as the schedule needs), `last_discount` is the round after which T last shrank.
    """

    done: int
    horizon: int
    recent: tuple[float, ...] = ()
    last_discount: int = 0


class Schedule(Protocol):
    """What `FixedRounds`, `DiscountedRounds` and `DecayingNoise` have in common."""

    @property
    def rounds(self) -> int:
        """T₀: the horizon at the start, and the most rounds there can be."""
        ...

    @property
    def steady(self) -> bool:
        """Whether no loss changes the horizon, so that every round is known in advance."""
        ...

    def start(self, loss: float | None) -> Progress:
        """Return the progress before the first round; `loss` is V(w⁰), or None if not known yet."""
        ...

    def round(self, progress: Progress) -> Round | None:
        """Return the next round, or None to stop."""
        ...

    def advance(self, progress: Progress, loss: float) -> Progress:
        """Return the progress after one more round, whose model has this loss."""
        ...


def require_rounds(rounds: object) -> None:
    """Refuse a T₀ that is not a whole number ≥ 1."""
    if isinstance(rounds, bool) or not isinstance(rounds, Integral) or rounds < 1:
        raise InputError.of("rounds", rounds, "a whole number ≥ 1", "say how often clients upload")
