"""Algorithms 1 and 2 for a batch of runs in step: who is asked, the compiled round, the books."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from sottovoce.checkpoint import ServerState
from sottovoce.federation import Federation
from sottovoce.learning.models import Model, Params
from sottovoce.server import finish
from sottovoce.simulation import course
from sottovoce.simulation.batch import Seat, lasting, orders_of, rows_of
from sottovoce.simulation.round import Outcome, play

AHEAD = 8  # rounds of a single run that an accelerator may begin before their losses are known


@dataclass(eq=False)
class Run:
    """One run of the batch: `at` is replaced whole after each round, so that it is never torn."""

    federation: Federation
    seed: int
    # The state, the batch's stacked models, its own seat, and what the server keeps, stacked.
    at: tuple[ServerState, Params, int, dict[str, Params]]

    @property
    def state(self) -> ServerState:
        return self.at[0]

    @property
    def params(self) -> Params:
        _, stacked, seat, _ = self.at
        return jax.tree.map(lambda leaf: leaf[seat], stacked)

    @property
    def memory(self) -> dict[str, Params]:
        """The models that the server keeps beside the newest."""
        _, _, seat, kept = self.at
        return {p: jax.tree.map(lambda leaf: leaf[seat], tree) for p, tree in kept.items()}

    @property
    def handed(self) -> Params:
        """The model that is handed out if the run ends here."""
        return finish.handed(self.memory, self.params)


AfterRound = Callable[[Run], None]


class _Begun(NamedTuple):
    """A round on its way: what its runs asked for, where they sit, and what will come of it."""

    asks: dict[int, course.Prepared]
    seats: list[int]
    outcome: Outcome


def rounds_of(
    model: Model, batch: list[Run], after_round: AfterRound | None = None, *, ahead: int = 1
) -> Iterator[None]:
    """Round by round: yields while the accelerator computes, before its answer is awaited.

    Whoever drives two batches in turn has one on the accelerator while the other keeps its books.
    With `ahead` > 1 the next rounds are begun before the losses of those before are known, on the
    guess that the horizon stays; a wrong guess is thrown away and the round begun again, so that
    the result is the same, bit for bit. Each run is left at its last complete round.
    """
    rows, split = rows_of([run.federation for run in batch], model)
    t, began = batch[0].state.progress.done, time.monotonic()
    before, guess = [run.state.seconds for run in batch], [run.state for run in batch]
    first = batch[0].federation
    signal, longest = first.plan.server.signal, int(max(first.samples))
    params: Params = None
    memory: dict[str, Params] = {}
    seats: list[int] = []
    always: dict[str, NDArray[Any]] = {}
    live, depth = list(range(len(batch))), 1
    begun: deque[_Begun] = deque()
    while True:
        while len(begun) < depth:
            runs = [course.Asked(batch[i].federation, guess[i], batch[i].seed) for i in live]
            asks = zip(live, course.prepare_all(runs), strict=True)
            going = {i: ask for i, ask in asks if ask is not None}
            if not going:
                break
            live = list(going)
            # Seats are a power of two and shrink by halves, so that few sizes are ever compiled.
            if params is None or 2 * len(live) <= len(seats):
                spare = (1 << (len(live) - 1).bit_length()) - len(live)
                seats = live + live[:1] * spare
                params = jax.tree.map(lambda *x: jnp.stack(x), *(batch[i].params for i in seats))
                memory = jax.tree.map(lambda *x: jnp.stack(x), *(batch[i].memory for i in seats))
                always = lasting(
                    [batch[i].federation for i in seats], [batch[i].seed for i in seats]
                )
            places = [Seat(batch[i].federation, split[i], guess[i], going.get(i)) for i in seats]
            orders = orders_of(places, always)
            outcome = play(
                model, rows, params, orders, t, signal=signal, longest=longest, memory=memory
            )
            outcome.score.copy_to_host_async()  # it is on its way before it is asked for
            begun.append(_Begun(going, seats, outcome))
            params, memory, t = outcome.params, outcome.memory, t + 1
            if ahead > 1:  # else the next round waits for what this one finds
                for i, ask in going.items():
                    guess[i] = course.expected(batch[i].federation, guess[i], ask)
        if not begun:
            return
        yield
        done = begun.popleft()
        score = np.asarray(done.outcome.score)
        for i, ask in done.asks.items():
            run, seat = batch[i], done.seats.index(i)
            state = course.finish(
                run.federation,
                run.state,
                ask,
                loss=float(score[seat, 0]),
                accuracy=float(score[seat, 1]),
                signal=float(score[seat, 2]),
                seconds=before[i] + time.monotonic() - began,
                offered=float(score[seat, 3]),
            )
            # Where nothing was uploaded there is nothing to make a step of.
            made = (done.outcome.params, seat, done.outcome.memory)
            run.at = (state, *(run.at[1:] if state.exhausted else made))
        if begun and all(
            course.same_turn(batch[i].federation, batch[i].state, ask)
            for i, ask in begun[0].asks.items()
        ):
            depth = min(2 * depth, ahead)
        else:
            depth = min(2, ahead) if not begun else 1
            t -= len(begun)
            begun.clear()
            params, memory, seats = done.outcome.params, done.outcome.memory, done.seats
            guess, live = [run.state for run in batch], list(done.asks)
        if after_round is not None:
            after_round(batch[0])
