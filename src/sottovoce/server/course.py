"""The host's side of one run: whom to ask, what it costs, and when to stop.

Everything here is a few numbers a client; the arrays are trained in `round`. A round is
`prepare` (cohort, prices, debits: checked and booked before noise is drawn), then the compiled
round, then `finish` (the loss is told to the schedule).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sottovoce.privacy import seeds
from sottovoce.privacy.calibration import charges_absent
from sottovoce.privacy.normal import Floats
from sottovoce.privacy.seeds import Purpose
from sottovoce.privacy.tank import Tank
from sottovoce.runs import trace
from sottovoce.runs.checkpoint import MANY_CLIENTS, ServerState
from sottovoce.schedules.cohort import pick
from sottovoce.schedules.pricing import LOSS_SHARE
from sottovoce.schedules.pricing import offers as price
from sottovoce.schedules.schedule import Round
from sottovoce.server.federation import Federation
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
        return float(root_sum(self.weight, self.sigma[0]))

    @property
    def signal_std(self) -> float:
        """√(Σ p_i²σ_V,i²)."""
        return float(root_sum(self.weight, self.signal_sigma))


def root_sum(weight: Floats, sigma: Floats) -> Floats:
    """√(Σ p_i²σ_i²) over the last axis; who has no part has no noise in it.

    >>> float(root_sum(np.array([0.6, 0.4, 0.0]), np.array([5.0, 10.0, np.nan])))
    5.0
    """
    part = weight * np.where(weight > 0, sigma, 0.0)
    return np.asarray(np.sqrt(np.sum(part**2, axis=-1)))


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


class Asked(NamedTuple):
    """A run that wants its next round."""

    federation: Federation
    state: ServerState
    seed: int


def prepare(federation: Federation, state: ServerState, seed: int) -> Prepared | None:
    """The next round, debited, or None when the run is over."""
    return prepare_all([Asked(federation, state, seed)])[0]


def prepare_all(runs: Sequence[Asked]) -> list[Prepared | None]:
    """The next round of each run; those alike are priced and debited side by side, as one array."""
    alike: dict[tuple[Any, ...], list[tuple[int, Round]]] = {}
    for place, (federation, state, _) in enumerate(runs):
        turn = None if state.exhausted else federation.schedule.round(state.progress)
        if turn is not None:
            kind = federation.terms, federation.plan.server.signal, turn.scale, turn.spread
            alike.setdefault(kind, []).append((place, turn))
    paid: dict[int, Prepared] = {}
    for members in alike.values():
        places, turns = zip(*members, strict=True)
        paid |= zip(places, _prepared([runs[i] for i in places], turns), strict=True)
    return [paid.get(place) for place in range(len(runs))]


def _prepared(runs: Sequence[Asked], turns: Sequence[Round]) -> Iterator[Prepared]:
    """The rounds of runs whose terms and signal are the same.

    Arrays are [runs, clients]; of one run alone [clients], which takes a third less time.
    """
    federations, states, seeded = zip(*runs, strict=True)
    first: Federation = federations[0]
    terms, tells = first.terms, first.plan.server.signal == "clients"
    beside, alone = (np.stack, False) if len(runs) > 1 else (_only, True)
    asked: NDArray[np.int64] = beside([state.asked for state in states])
    in_cohort = np.full(asked.shape, terms.per_round >= terms.clients)
    if terms.per_round < terms.clients:
        each = [(asked, in_cohort)] if alone else zip(asked, in_cohort, strict=True)
        for (before, chosen), seed, turn in zip(each, seeded, turns, strict=True):
            rng = seeds.generator(seed, Purpose.COHORT, turn.t)
            chosen[pick(terms.cohort, asked=before, size=terms.per_round, rng=rng)] = True

    full = states[0].tank if alone else Tank.side_by_side([state.tank for state in states])
    tank, sensitivity = full, beside([own.sensitivity for own in federations])
    signal_sigma, sigmas = np.full(asked.shape, np.nan), []
    uploads = in_cohort
    for step in range(terms.releases):
        offer = price(tank, turns, terms, sensitivity)
        granted = offer.granted & (offer.units >= LOSS_SHARE) if tells else offer.granted
        uploads = uploads & granted
        charged = granted if charges_absent(terms.calibration) else uploads
        units = np.where(charged, offer.units, 0)
        sigma = offer.sigma
        if tells and step == 0:
            part = np.maximum(units // LOSS_SHARE, 1)
            own_loss = beside([own.loss_sensitivity for own in federations])
            signal_sigma = np.where(charged, tank.noise(part, own_loss), np.nan)
            rest = np.maximum(units - part, 1)
            sigma = tank.noise(rest, sensitivity)
        sigmas.append(np.where(charged, sigma, np.nan))
        tank = tank.spend(units)

    sigma = sigmas[0][..., None, :] if len(sigmas) == 1 else np.stack(sigmas, axis=-2)
    mu2 = tank.spent_mu2 - full.spent_mu2
    asked = asked + in_cohort
    if all(own.plan.server.weights == "samples" for own in federations):
        weight = by_samples(beside([own.samples for own in federations]), uploads)
    elif alone:
        weight = weights(first, uploads, sigma[0])
    else:
        rows = zip(federations, uploads, sigma[:, 0], strict=True)
        weight = np.stack([weights(*row) for row in rows])
    if alone:
        yield Prepared(turns[0], weight, sigma, signal_sigma, mu2, uploads, tank, asked)
        return
    for row, (_, state, _) in enumerate(runs):
        yield Prepared(
            turn=turns[row],
            weight=weight[row],
            sigma=sigma[row],
            signal_sigma=signal_sigma[row],
            mu2=mu2[row],
            uploads=uploads[row],
            tank=replace(state.tank, spent=tank.spent[row], debits=tank.debits[row]),
            asked=asked[row],
        )


def _only(arrays: Sequence[NDArray[Any]]) -> NDArray[Any]:
    return arrays[0]


def expected(federation: Federation, state: ServerState, prepared: Prepared) -> ServerState:
    """Where the run will be after this round if its loss does not shorten the horizon.

    An accelerator may begin the next round on this, before the loss is known; `same_turn` says
    whether that was right.
    """
    progress = replace(state.progress, done=state.progress.done + 1)
    marks = federation.finish.marked(state.marks, prepared.turn.t, prepared.turn.horizon, math.inf)
    return replace(
        state,
        progress=progress,
        tank=prepared.tank,
        asked=prepared.asked,
        exhausted=not prepared.uploads.any(),
        marks=marks,
    )


def same_turn(federation: Federation, state: ServerState, prepared: Prepared) -> bool:
    """Whether the round that was begun early is the one that is next now."""
    return not state.exhausted and federation.schedule.round(state.progress) == prepared.turn


def weights(federation: Federation, uploads: NDArray[np.bool_], sigma: Floats) -> Floats:
    """p_i of the uploads that came, as the plan says; public numbers only."""
    plan = federation.plan
    samples = federation.samples if federation.counted is None else federation.counted
    if plan.server.weights == "samples":
        return by_samples(samples, uploads)
    # Who counts for fewer samples than it declares counts with the σ that those would have.
    return by_precision(
        samples,
        uploads,
        sigma=sigma * (federation.samples / samples) * math.sqrt(plan.local.steps),
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
    uploads = np.flatnonzero(prepared.uploads)
    if not len(uploads):  # every client asked has an empty tank: nothing was released
        return replace(state, exhausted=True, asked=prepared.asked)
    progress = federation.schedule.advance(state.progress, signal)
    many = len(state.asked) > MANY_CLIENTS
    entry: dict[str, Any] = {
        "t": prepared.turn.t,
        "horizon": prepared.turn.horizon,
        "next_horizon": progress.horizon,
        **({} if many else {"cohort": uploads.tolist()}),
        "uploads": len(uploads),
        "sigma": _spread(prepared.sigma[:, uploads]),
        "validation_loss": loss if math.isfinite(loss) else None,
        "validation_accuracy": accuracy,
    }
    if federation.plan.server.signal != "public":
        entry["signal"] = signal if math.isfinite(signal) else None
    turn = prepared.turn
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
        marks=federation.finish.marked(state.marks, turn.t, turn.horizon, offered),
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
