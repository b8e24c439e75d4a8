"""The host's side of one run: whom to ask, what it costs, and when to stop.

Everything here is a few numbers a client; the arrays are trained in `round`. A round is
`prepare` (cohort, prices, debits: checked and booked before noise is drawn), then the compiled
round, then `finish` (the loss is told to the schedule).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sottovoce import seeds
from sottovoce.checkpoint import MANY_CLIENTS, ServerState
from sottovoce.federation import Federation
from sottovoce.privacy.calibration import charges_absent
from sottovoce.privacy.tank import Tank
from sottovoce.rounds.cohort import pick
from sottovoce.rounds.schedule import Round
from sottovoce.rounds.turn import offer as price
from sottovoce.seeds import Purpose
from sottovoce.server.weights import by_samples


@dataclass(frozen=True, eq=False)
class Prepared:
    """A round that is paid for: what the compiled round needs, and what the books will say."""

    turn: Round
    coefficient: NDArray[np.float64]  # [clients]: p_i·η/n_i
    std: float  # √(Σ p_i²σ_i²)
    uploads: NDArray[np.bool_]
    sigma: NDArray[np.float64]  # of each charged client, else NaN
    tank: Tank
    asked: NDArray[np.int64]


def start(federation: Federation, loss: float, accuracy: float) -> ServerState:
    """The state before the first round."""
    zero = np.zeros(len(federation.samples), dtype=np.int64)
    return ServerState(
        progress=federation.schedule.start(loss),
        tank=federation.tank(),
        asked=zero,
        turns=zero,
        rounds=(),
        sigma=(),
        initial=(loss, accuracy),
        seconds=0.0,
    )


def prepare(federation: Federation, state: ServerState, seed: int) -> Prepared | None:
    """The next round, debited, or None when the run is over."""
    turn = federation.schedule.round(state.progress)
    if turn is None or state.exhausted:
        return None
    rng = seeds.generator(seed, Purpose.COHORT, turn.t)
    terms = federation.terms
    ids = pick(terms.cohort, asked=state.asked, size=terms.per_round, rng=rng)
    in_cohort = np.zeros(len(state.asked), dtype=bool)
    in_cohort[ids] = True

    offer = price(state.tank, turn, terms, federation.sensitivity)
    uploads = in_cohort & offer.granted
    charged = offer.granted if charges_absent(terms.calibration) else uploads
    tank = state.tank.spend(np.where(charged, offer.units, 0))
    sigma = np.where(charged, offer.sigma, np.nan)

    p = by_samples(federation.samples, uploads)
    rate = federation.plan.local.learning_rate
    return Prepared(
        turn=turn,
        coefficient=p * rate / federation.samples,
        std=math.sqrt(float(np.sum((p * np.where(uploads, offer.sigma, 0.0)) ** 2))),
        uploads=uploads,
        sigma=sigma,
        tank=tank,
        asked=state.asked + in_cohort,
    )


def finish(
    federation: Federation,
    state: ServerState,
    prepared: Prepared,
    *,
    loss: float,
    accuracy: float,
    seconds: float,
) -> ServerState:
    """The state after the round: the schedule hears the loss, the books are written."""
    if not prepared.uploads.any():  # every client asked has an empty tank: nothing was released
        return replace(state, exhausted=True, asked=prepared.asked)
    progress = federation.schedule.advance(state.progress, loss)
    used = prepared.sigma[prepared.uploads]
    entry: dict[str, Any] = {
        "t": prepared.turn.t,
        "horizon": prepared.turn.horizon,
        "next_horizon": progress.horizon,
        "cohort": np.flatnonzero(prepared.uploads).tolist(),
        "uploads": int(prepared.uploads.sum()),
        "sigma": {
            "min": float(used.min()),
            "median": float(np.median(used)),
            "max": float(used.max()),
        },
        "validation_loss": loss if math.isfinite(loss) else None,
        "validation_accuracy": accuracy,
    }
    if len(state.asked) > MANY_CLIENTS:
        del entry["cohort"]
    return replace(
        state,
        progress=progress,
        tank=prepared.tank,
        asked=prepared.asked,
        turns=state.turns + prepared.uploads,
        rounds=(*state.rounds, entry),
        sigma=(*state.sigma, prepared.sigma),
        seconds=seconds,
    )
