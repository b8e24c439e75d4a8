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

from sottovoce import seeds, trace
from sottovoce.checkpoint import MANY_CLIENTS, ServerState
from sottovoce.federation import Federation
from sottovoce.privacy.calibration import charges_absent
from sottovoce.privacy.normal import Floats
from sottovoce.privacy.tank import Tank
from sottovoce.rounds.cohort import pick
from sottovoce.rounds.schedule import Round
from sottovoce.rounds.turn import LOSS_SHARE
from sottovoce.rounds.turn import offer as price
from sottovoce.seeds import Purpose
from sottovoce.server.weights import by_precision, by_samples


@dataclass(frozen=True, eq=False)
class Prepared:
    """A round that is paid for: what the compiled round needs, and what the books will say."""

    turn: Round
    weight: Floats  # [clients]: p_i
    sigma: Floats  # [steps, clients]: of each charged client, else NaN
    signal_sigma: Floats  # [clients]: of its loss, where it tells one, else NaN
    mu2: Floats  # [clients]: what was booked
    uploads: NDArray[np.bool_]
    tank: Tank
    asked: NDArray[np.int64]

    @property
    def std(self) -> float:
        """√(Σ p_i²σ_i²) of one step."""
        return _root_sum(self.weight, self.sigma[0])

    @property
    def signal_std(self) -> float:
        """√(Σ p_i²σ_V,i²)."""
        return _root_sum(self.weight, self.signal_sigma)


def _root_sum(weight: Floats, sigma: Floats) -> float:
    return math.sqrt(float(np.sum((weight * np.where(weight > 0, sigma, 0.0)) ** 2)))


def start(
    federation: Federation,
    loss: float,
    accuracy: float,
    signal: float | None,
    tank: Tank | None = None,
) -> ServerState:
    """The state before the first round; `signal` is the loss that steers, if it is known.

    `tank` is what real clients say of theirs; left out, all are full.
    """
    zero = np.zeros(len(federation.samples), dtype=np.int64)
    return ServerState(
        progress=federation.schedule.start(signal),
        tank=federation.tank() if tank is None else tank,
        asked=zero,
        turns=zero,
        rounds=(),
        sigma=(),
        mu2=(),
        initial=(loss, accuracy, signal),
        seconds=0.0,
    )


def prepare(federation: Federation, state: ServerState, seed: int) -> Prepared | None:
    """The next round, debited, or None when the run is over."""
    turn = federation.schedule.round(state.progress)
    if turn is None or state.exhausted:
        return None
    terms = federation.terms
    in_cohort = np.full(len(state.asked), terms.per_round >= len(state.asked))
    if not in_cohort[0]:
        rng = seeds.generator(seed, Purpose.COHORT, turn.t)
        in_cohort[pick(terms.cohort, asked=state.asked, size=terms.per_round, rng=rng)] = True

    tank, sigmas = state.tank, []
    signal_sigma = np.full(len(in_cohort), np.nan)
    tells = federation.plan.server.signal == "clients"
    uploads = in_cohort
    for step in range(terms.releases):
        offer = price(tank, turn, terms, federation.sensitivity)
        granted = offer.granted & (offer.units >= (LOSS_SHARE if tells else 1))
        uploads = uploads & granted
        charged = granted if charges_absent(terms.calibration) else uploads
        units = np.where(charged, offer.units, 0)
        sigma = offer.sigma
        if tells and step == 0:
            part = np.maximum(units // LOSS_SHARE, 1)
            own = federation.loss_sensitivity
            signal_sigma = np.where(charged, tank.noise(part, own), np.nan)
            rest = np.maximum(units - part, 1)
            sigma = tank.noise(rest, federation.sensitivity)
        sigmas.append(np.where(charged, sigma, np.nan))
        tank = tank.spend(units)

    return Prepared(
        turn=turn,
        weight=weights(federation, uploads, sigmas[0]),
        sigma=np.stack(sigmas),
        signal_sigma=signal_sigma,
        mu2=np.asarray(tank.spent_mu2 - state.tank.spent_mu2),
        uploads=uploads,
        tank=tank,
        asked=state.asked + in_cohort,
    )


def expected(federation: Federation, state: ServerState, prepared: Prepared) -> ServerState:
    """Where the run will be after this round if its loss does not shorten the horizon.

    An accelerator may begin the next round on this, before the loss is known; `same_turn` says
    whether that was right.
    """
    progress = replace(state.progress, done=state.progress.done + 1)
    marks = federation.finish.marked(state.marks, prepared.turn.t, prepared.turn.horizon, math.inf)
    return replace(state, progress=progress, tank=prepared.tank, asked=prepared.asked, marks=marks)


def same_turn(federation: Federation, state: ServerState, prepared: Prepared) -> bool:
    """Whether the round that was begun early is the one that is next now."""
    return not state.exhausted and federation.schedule.round(state.progress) == prepared.turn


def weights(federation: Federation, uploads: NDArray[np.bool_], sigma: Floats) -> Floats:
    """p_i of the uploads that came, as the plan says; public numbers only."""
    plan = federation.plan
    if plan.server.weights == "samples":
        return by_samples(federation.samples, uploads)
    return by_precision(
        federation.samples,
        uploads,
        sigma=sigma * math.sqrt(plan.local.steps),
        dimension=federation.dimension,
        learning_rate=plan.local.learning_rate,
        clip=federation.recipe.clip,
        divergence=federation.divergence,
    )


def finish(
    federation: Federation,
    state: ServerState,
    prepared: Prepared,
    *,
    loss: float,
    accuracy: float,
    signal: float,
    seconds: float,
    offered: float = math.nan,
) -> ServerState:
    """The state after the round: the schedule hears the signal, the books are written.

    `offered` is the public loss of the model that could be handed out now (`server.finish`).
    """
    if not prepared.uploads.any():  # every client asked has an empty tank: nothing was released
        return replace(state, exhausted=True, asked=prepared.asked)
    progress = federation.schedule.advance(state.progress, signal)
    many = len(state.asked) > MANY_CLIENTS
    cohort = {} if many else {"cohort": np.flatnonzero(prepared.uploads).tolist()}
    entry: dict[str, Any] = {
        "t": prepared.turn.t,
        "horizon": prepared.turn.horizon,
        "next_horizon": progress.horizon,
        **cohort,
        "uploads": int(prepared.uploads.sum()),
        "sigma": _spread(prepared.sigma[:, prepared.uploads]),
        "validation_loss": loss if math.isfinite(loss) else None,
        "validation_accuracy": accuracy,
    }
    if federation.plan.server.signal != "public":
        entry["signal"] = signal if math.isfinite(signal) else None
    return replace(
        state,
        progress=progress,
        tank=prepared.tank,
        asked=prepared.asked,
        turns=state.turns + prepared.uploads,
        rounds=(*state.rounds, entry),
        sigma=trace.kept(state.sigma, prepared.sigma[0], trace.together),
        mu2=trace.kept(state.mu2, prepared.mu2, np.add),
        seconds=seconds,
        marks=federation.finish.marked(
            state.marks, prepared.turn.t, prepared.turn.horizon, offered
        ),
    )


def _spread(sigma: Floats) -> dict[str, float | None]:
    """Least, median and most of those that are told; a real client may keep its σ to itself."""
    least, most = float(sigma.min()), float(sigma.max())
    if math.isnan(least):
        sigma = sigma[~np.isnan(sigma)]
        if not sigma.size:
            return {"min": None, "median": None, "max": None}
        least, most = float(sigma.min()), float(sigma.max())
    median = least if least == most else float(np.median(sigma))
    return {"min": least, "median": median, "max": most}
