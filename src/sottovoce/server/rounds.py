"""The rounds of Algorithms 1 and 2: one loop over an `Engine`, and the server's side of a round.

`play_rounds` is the loop. `prepare_rounds` opens a round: the schedule's next round, the cohort,
and each client's price, booked before any noise is drawn. The engine computes the clipped and
noised updates, their mean and the server's optimiser. `close_round` gives the loss to the schedule
and writes the books. Everything here is a few numbers a client; arrays are trained by the engines.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from signal import SIGINT
from signal import signal as set_handler
from types import FrameType
from typing import Any, NamedTuple, Protocol, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from sottovoce.privacy import seeds
from sottovoce.privacy.calibration import charges_absent
from sottovoce.privacy.gaussian import Floats
from sottovoce.privacy.seeds import Purpose
from sottovoce.privacy.tank import Tank, stack_rows
from sottovoce.runs import checkpoint
from sottovoce.runs.checkpoint import MANY_CLIENTS, ServerState
from sottovoce.runs.record import Exceptions, RoundNumbers, SigmaSpread, Status
from sottovoce.schedules.aggregate import weigh_by_precision, weigh_by_samples
from sottovoce.schedules.base import Progress, Round
from sottovoce.schedules.optimizer import NO_MARKS, Leaves, Marks, Memory, StepResult
from sottovoce.schedules.pricing import LOSS_SHARE, pick_cohort, price_release, share_noise
from sottovoce.server.federation import Federation, judge_model

Outcome = TypeVar("Outcome")
RunOf = TypeVar("RunOf", bound="Run")
RoundsByRun = dict[int, Any]  # the next round of each run of a batch, by the run's index


def play_rounds(
    runs: Sequence[RunOf], engine: Engine, after_round: Callable[[RunOf], None] | None = None
) -> Iterator[None]:
    """Run Algorithms 1 and 2 for a batch of runs side by side; each stops after a complete round.

    Yields while the engine computes, before its result is awaited. So a caller that drives two
    batches alternately computes one on the accelerator while it writes the books of the other.
    """
    began, before = time.monotonic(), [run.state.seconds for run in runs]
    live = list(range(len(runs)))
    while opened := engine.prepare_rounds(live):  # schedule, cohort, prices, debits
        if engine.begin_rounds(opened):  # clipped and noised updates
            yield
        results = engine.end_rounds(opened)  # their mean, the server's optimiser, evaluation
        seconds = time.monotonic() - began
        for i, played in results:
            run = runs[i]
            state = close_round(run.federation, run.state, played, seconds=before[i] + seconds)
            # Without an upload there is no step to take: the model stays as it is.
            run.at = (state, *(run.at[1:] if state.exhausted else played.models))
        if after_round is not None:
            after_round(runs[0])
        live = list(opened)


def play_to_end(rounds: Iterator[None], write_outcome: Callable[[Status], Outcome]) -> Outcome:
    """Play all rounds, and write the outcome with its status: finished, interrupted or failed.

    >>> play_to_end(iter([None, None]), lambda status: status)
    'finished'
    """
    status: Status = "failed"
    try:
        for _ in rounds:
            pass
        status = "finished"
    except KeyboardInterrupt:
        status = "interrupted"
        raise
    finally:
        outcome = write_outcome(status)
    return outcome


class Engine(Protocol):
    """Computes the rounds of a batch of runs: each cohort's mean update, and the next model.

    `simulation.compiled`, `simulation.accelerator` (rounds begun ahead),
    `simulation.streamed`, `simulation.secure` and `server.coordinator` are engines.
    """

    def prepare_rounds(self, live: Sequence[int]) -> RoundsByRun:
        """Return the next round of each of these runs that is not over, priced and booked."""

    def begin_rounds(self, opened: RoundsByRun) -> bool:
        """Begin to compute these rounds; return whether the host may do other work meanwhile."""

    def end_rounds(self, opened: RoundsByRun) -> Iterable[tuple[int, PlayedRound]]:
        """Wait for these rounds, and return each run's result."""


@dataclass(eq=False)
class Run:
    """A run in progress. `at` is replaced as a whole: the models are always those of the state."""

    federation: Federation
    seed: int
    at: tuple[Any, ...]  # the state, then the models as the engine keeps them

    @property
    def state(self) -> ServerState:
        """The state after the last complete round."""
        state: ServerState = self.at[0]
        return state


class PlayedRound(NamedTuple):
    """One run's round as an engine computed it."""

    paid: PreparedRound  # what was booked, with the noise that was drawn
    loss: float  # of the new model on the public validation rows
    accuracy: float
    signal: float  # the loss that steers the schedule, or what is missing of the plan's metric
    offered: float  # the same on public rows of the model that the run would return now
    models: tuple[Any, ...]  # as the engine keeps them; ignored where nothing was uploaded
    exceptions: Exceptions = Exceptions()  # clients that did not count in full


def apply_optimizer(
    federation: Federation,
    state: ServerState,
    round_: Round,
    memory: Memory,
    previous: Leaves,
    averaged: Leaves,
) -> StepResult:
    """Apply the server's optimiser to the averaged upload, in numpy.

    For engines without a compiled round: secure noise, and real clients.
    """
    return federation.finish.close(
        state.marks,
        round_.t,
        round_.horizon,
        memory,
        previous,
        averaged,
        loss=lambda leaves: judge_model(federation, federation.model.unflatten(leaves))[2],
    )


@dataclass(frozen=True, eq=False)
class PreparedRound:
    """A round that is paid for: the inputs of its computation, and the entries of its books."""

    round: Round
    weight: Floats  # [clients]: p_i
    sigma: Floats  # [steps, clients]: of each charged client, else NaN
    signal_sigma: Floats  # [clients]: of its loss, where it uploads one, else NaN
    mu2: Floats  # [clients]: what was booked
    uploads: NDArray[np.bool_]
    tank: Tank
    asked: NDArray[np.int64]

    @property
    def std(self) -> float:
        """√(Σ p_i²σ_i²) of one step."""
        return float(average_noise(self.weight, self.sigma[0]))

    @property
    def signal_std(self) -> float:
        """√(Σ p_i²σ_V,i²)."""
        return float(average_noise(self.weight, self.signal_sigma))


def average_noise(weight: Floats, sigma: Floats) -> Floats:
    """Return √(Σ p_i²σ_i²) over the last axis: the noise of a mean. A weight of 0 adds none.

    >>> float(average_noise(np.array([0.6, 0.4, 0.0]), np.array([5.0, 10.0, np.nan])))
    5.0
    """
    weighted_sigma = weight * np.where(weight > 0, sigma, 0.0)
    return np.asarray(np.sqrt(np.sum(weighted_sigma**2, axis=-1)))


def make_first_state(
    federation: Federation,
    loss: float,
    accuracy: float,
    signal: float | None,
    tank: Tank | None = None,
    progress: Progress | None = None,
    marks: Marks = NO_MARKS,
) -> ServerState:
    """Return the state before the first round; `signal` is the loss that steers, if it is known.

    `tank` is what real clients disclose; without it all tanks are full. `progress` and `marks` are
    the first ones (`server.forecast.start_schedule`), where they depend on more than `signal`.
    """
    zero = np.zeros(len(federation.held.samples), dtype=np.int64)
    return ServerState(
        progress=federation.schedule.start(signal) if progress is None else progress,
        tank=federation.tank() if tank is None else tank,
        asked=zero,
        turns=zero,
        rounds=(),
        sigma=(),
        mu2=(),
        initial=(loss, accuracy, signal),
        seconds=0.0,
        marks=marks,
    )


class WaitingRun(NamedTuple):
    """A run whose next round is to be prepared."""

    federation: Federation
    state: ServerState
    seed: int


def prepare_round(federation: Federation, state: ServerState, seed: int) -> PreparedRound | None:
    """Price and debit a run's next round; return None when the run is over."""
    return prepare_rounds([WaitingRun(federation, state, seed)])[0]


def prepare_rounds(runs: Sequence[WaitingRun]) -> list[PreparedRound | None]:
    """Price and debit the next round of each run; None for a run that is over.

    Runs with the same terms, signal and kind of round are computed together, as one array.
    """
    groups: dict[tuple[Any, ...], list[tuple[int, Round]]] = {}
    for i, (federation, state, _) in enumerate(runs):
        round_ = None if state.exhausted else federation.schedule.round(state.progress)
        if round_ is not None:
            kind = federation.terms, federation.plan.server.signal, round_.scale, round_.spread
            groups.setdefault(kind, []).append((i, round_))
    prepared: dict[int, PreparedRound] = {}
    for group in groups.values():
        indices, rounds = zip(*group, strict=True)
        prepared |= zip(indices, _prepare_together([runs[i] for i in indices], rounds), strict=True)
    return [prepared.get(i) for i in range(len(runs))]


def _prepare_together(
    runs: Sequence[WaitingRun], rounds: Sequence[Round]
) -> Iterator[PreparedRound]:
    """Prepare the rounds of runs with the same terms and signal; arrays are [runs, clients]."""
    federations, states, all_seeds = zip(*runs, strict=True)
    terms, has_loss = federations[0].terms, federations[0].plan.server.signal == "clients"
    asked = stack_rows([state.asked for state in states])
    in_cohort = np.full(asked.shape, terms.per_round >= terms.clients)
    if terms.per_round < terms.clients:
        for i, (seed, round_) in enumerate(zip(all_seeds, rounds, strict=True)):
            rng = seeds.generator(seed, Purpose.COHORT, round_.t)
            chosen = pick_cohort(terms.cohort, asked=asked[i], size=terms.per_round, rng=rng)
            in_cohort[i, chosen] = True

    tank_before = tank = Tank.stack([state.tank for state in states])
    sensitivity = stack_rows([federation.sensitivity for federation in federations])
    samples = stack_rows([federation.held.samples for federation in federations])
    signal_sigma, sigmas = np.full(asked.shape, np.nan), []
    uploads = in_cohort
    horizons = [round_.horizon for round_ in rounds]
    for step in range(terms.releases):
        offer = price_release(tank, rounds[0], terms, sensitivity, horizons=horizons)
        granted = offer.granted & (offer.units >= LOSS_SHARE) if has_loss else offer.granted
        uploads = uploads & granted
        if terms.honest > 1:  # fewer than h + c clients would not unmask a sum: nobody uploads
            uploads &= uploads.sum(axis=-1, keepdims=True) >= terms.honest + terms.corrupt
        charged = granted if charges_absent(terms.calibration) else uploads
        units = np.where(charged, offer.units, 0)
        sigma = offer.sigma
        if has_loss and step == 0:
            loss_units = np.maximum(units // LOSS_SHARE, 1)
            loss_sensitivity = stack_rows([f.loss_sensitivity for f in federations])
            signal_sigma = np.where(charged, tank.noise(loss_units, loss_sensitivity), np.nan)
            gradient_units = np.maximum(units - loss_units, 1)
            sigma = tank.noise(gradient_units, sensitivity)
        if terms.honest > 1 and uploads.any():
            sigma = share_noise(sigma, samples, uploads, honest=terms.honest)
        sigmas.append(np.where(charged, sigma, np.nan))
        tank = tank.spend(units)

    sigma, mu2 = np.stack(sigmas, axis=1), tank.spent_mu2 - tank_before.spent_mu2
    asked = asked + in_cohort
    if all(federation.plan.server.weights == "samples" for federation in federations):
        weight = weigh_by_samples(samples, uploads)
    else:
        weight = np.stack(list(map(weigh_uploads, federations, uploads, sigma[:, 0])))
    for i, state in enumerate(states):
        tank_after = state.tank.with_books(tank.spent[i], tank.debits[i])
        entries = signal_sigma[i], mu2[i], uploads[i], tank_after, asked[i]
        yield PreparedRound(rounds[i], weight[i], sigma[i], *entries)


def guess_next_state(
    federation: Federation, state: ServerState, prepared: PreparedRound
) -> ServerState:
    """Return the state after this round if its loss does not shorten the horizon.

    An accelerator begins the next round on this guess, before the loss is known; `is_same_round`
    says later whether the guess was right.
    """
    round_ = prepared.round
    return replace(
        state,
        progress=replace(state.progress, done=state.progress.done + 1),
        tank=prepared.tank,
        asked=prepared.asked,
        exhausted=not prepared.uploads.any(),
        marks=federation.finish.update_marks(state.marks, round_.t, round_.horizon, math.inf),
    )


def is_same_round(federation: Federation, state: ServerState, prepared: PreparedRound) -> bool:
    """Return whether the round that was begun early is the one that is next now."""
    return not state.exhausted and federation.schedule.round(state.progress) == prepared.round


def weigh_uploads(federation: Federation, uploads: NDArray[np.bool_], sigma: Floats) -> Floats:
    """Return the weight p_i of each upload as the plan says, from public numbers only."""
    plan = federation.plan
    samples = federation.held.samples if federation.counted is None else federation.counted
    if plan.server.weights == "samples":
        return weigh_by_samples(samples, uploads)
    # A client that counts for fewer samples than it declares counts with the σ of that number.
    return weigh_by_precision(
        samples,
        uploads,
        sigma=sigma * (federation.held.samples / samples) * math.sqrt(plan.local.steps),
        dimension=federation.dimension,
        learning_rate=plan.local.rate,
        clip=federation.recipe.clip,
        divergence=federation.divergence,
    )


def close_round(
    federation: Federation, state: ServerState, played: PlayedRound, *, seconds: float
) -> ServerState:
    """Return the state after the round: give the signal to the schedule, and write the books."""
    prepared, round_, signal = played.paid, played.paid.round, played.signal
    uploads = np.flatnonzero(prepared.uploads)
    if not len(uploads):  # every client asked has an empty tank: nothing was released
        return replace(state, exhausted=True, asked=prepared.asked)
    progress = federation.schedule.advance(state.progress, signal)
    is_large = len(state.asked) > MANY_CLIENTS
    entry: RoundNumbers = {
        "t": round_.t,
        "horizon": round_.horizon,
        "next_horizon": progress.horizon,
        "cohort": [] if is_large else uploads.tolist(),
        "uploads": len(uploads),
        "sigma": _summarize_sigma(prepared.sigma[:, uploads]),
        "validation_loss": played.loss if math.isfinite(played.loss) else None,
        "validation_accuracy": played.accuracy if federation.held.target is None else None,
    }
    if is_large:
        del entry["cohort"]
    if federation.plan.is_steered_otherwise:
        entry["signal"] = signal if math.isfinite(signal) else None
    return replace(
        state,
        progress=progress,
        tank=prepared.tank,
        asked=prepared.asked,
        turns=state.turns + prepared.uploads,
        rounds=(*state.rounds, {**entry, **played.exceptions}),
        sigma=checkpoint.extend_trace(state.sigma, prepared.sigma[0], checkpoint.combine_sigma),
        mu2=checkpoint.extend_trace(state.mu2, prepared.mu2, np.add),
        weight=() if is_large else (*state.weight, prepared.weight),
        seconds=seconds,
        marks=federation.finish.update_marks(state.marks, round_.t, round_.horizon, played.offered),
    )


def _summarize_sigma(sigma: Floats) -> SigmaSpread:
    """Return the smallest, median and largest σ that is known; a real client may hide its σ."""
    known = sigma[~np.isnan(sigma)]
    if not known.size:
        return {"min": None, "median": None, "max": None}
    return {"min": float(known.min()), "median": float(np.median(known)), "max": float(known.max())}


PATIENCE = 4  # the Ctrl-C that ends the process at once


class Interrupts:
    """Holds Ctrl-C back while it is entered, until `check` raises it between two rounds.

    An interrupt in the middle of a compilation can crash the interpreter, and one in the middle of
    writing leaves half a file. The fourth Ctrl-C ends the process at once. Outside the main thread
    this does nothing.

    >>> with Interrupts() as interrupts:
    ...     interrupts.check()
    """

    def __init__(self) -> None:
        self.noted = 0
        self._before: Any = None

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            _ENTERED.append(self)
            self._before = set_handler(SIGINT, self._note)
        return self

    def __exit__(self, *error: object) -> None:
        if self in _ENTERED:
            _ENTERED.remove(self)
            set_handler(SIGINT, self._before)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.noted += 1
        if self.noted >= PATIENCE:
            os._exit(130)

    def check(self) -> None:
        """Raise KeyboardInterrupt if Ctrl-C was pressed since this was entered."""
        if self.noted:
            raise KeyboardInterrupt


_ENTERED: list[Interrupts] = []


def check_interrupts() -> None:
    """Raise KeyboardInterrupt in the middle of a long round that has had no effect yet."""
    for entered in _ENTERED:
        entered.check()
