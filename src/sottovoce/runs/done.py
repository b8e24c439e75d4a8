"""What is told of a round when it is over, in every engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from sottovoce.runs.checkpoint import ServerState

OnRound = Callable[["RoundDone"], None]


@dataclass(frozen=True)
class RoundDone:
    """What `on_round` is told after each round."""

    t: int
    horizon: int
    next_horizon: int
    uploads: int
    sigma: float  # the median over those of the cohort that disclose it; NaN if nobody does
    loss: float
    accuracy: float
    fuel: float  # the least any client has left: 1 is full, 0 is empty


def done_of(state: ServerState) -> RoundDone | None:
    """The newest round in the words of `on_round`; None where the last one came to nothing."""
    if not state.rounds or state.exhausted:
        return None
    last = state.rounds[-1]
    loss, sigma = last["validation_loss"], last["sigma"]["median"]
    return RoundDone(
        t=last["t"],
        horizon=last["horizon"],
        next_horizon=last["next_horizon"],
        uploads=last["uploads"],
        sigma=float("nan") if sigma is None else sigma,
        loss=float("nan") if loss is None else loss,
        accuracy=last["validation_accuracy"],
        fuel=float(state.tank.left_fraction.min()),
    )
