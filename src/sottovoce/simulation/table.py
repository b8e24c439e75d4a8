"""A batch of runs at one table: who wants a round, who sits where, and the books after it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from sottovoce.models.base import Model, Params
from sottovoce.runs.checkpoint import ServerState
from sottovoce.schedules import optimizer
from sottovoce.server import course
from sottovoce.server.federation import Federation
from sottovoce.simulation.batch import Seat, lasting, rows_of

Asks = dict[int, course.Prepared]  # what each run of the batch asks for in a round


@dataclass(eq=False)
class Run:
    """One run of the batch: `at` is replaced whole after each round, so that it is never torn."""

    federation: Federation
    seed: int
    # The state, stacked models, its own place among them, and what the server keeps, stacked. The
    # place is a seat of the batch, or a round of a stretch and a seat.
    at: tuple[ServerState, Params, int | tuple[int, int], dict[str, Params]]

    @property
    def state(self) -> ServerState:
        return self.at[0]

    @property
    def params(self) -> Params:
        _, stacked, place, _ = self.at
        return jax.tree.map(lambda leaf: leaf[place], stacked)

    @property
    def memory(self) -> dict[str, Params]:
        """The models that the server keeps beside the newest."""
        _, _, place, kept = self.at
        return {p: jax.tree.map(lambda leaf: leaf[place], tree) for p, tree in kept.items()}

    @property
    def handed(self) -> Params:
        """The model that is handed out if the run ends here."""
        return optimizer.handed(self.memory, self.params)


AfterRound = Callable[[Run], None]


Models = tuple[Params, dict[str, Params]]  # of a batch, stacked, and what the server keeps


class Seating(NamedTuple):
    """Which run sits where: as many seats as a compiled round has."""

    runs: list[int]
    always: dict[str, NDArray[Any]]  # what they ask for in every round


class Table:
    """The batch with its rows where JAX computes, and the time it has taken."""

    def __init__(self, model: Model, batch: list[Run]) -> None:
        first = batch[0].federation
        self.batch = batch
        self.rows, self.split = rows_of([run.federation for run in batch], model)
        self.signal = first.plan.server.signal
        self.longest = int(max(first.samples))
        self._began, self._before = time.monotonic(), [run.state.seconds for run in batch]

    def asked(self, live: Iterable[int], states: list[ServerState]) -> Asks:
        """The next round of each run that is not over, from its state, paid for."""
        live = list(live)
        runs = [course.Asked(self.batch[i].federation, states[i], self.batch[i].seed) for i in live]
        each = zip(live, course.prepare_all(runs), strict=True)
        return {i: ask for i, ask in each if ask is not None}

    def seated(self, live: Iterable[int]) -> Seating:
        """Seats for these runs. They are a power of two, so that few sizes are ever compiled."""
        live = list(live)
        spare = (1 << (len(live) - 1).bit_length()) - len(live)
        runs = live + live[:1] * spare
        own = [self.batch[i] for i in runs]
        return Seating(runs, lasting([run.federation for run in own], [run.seed for run in own]))

    def models(self, seating: Seating) -> Models:
        """The models of the runs as they sit, and what the server keeps beside them."""
        at = [self.batch[i].at for i in seating.runs]
        _, params, _, memory = at[0]
        if all(own[1] is params for own in at):  # they played the same round: one launch
            return cast(Models, _taken((params, memory), np.array([own[2] for own in at])))
        runs = [self.batch[i] for i in seating.runs]
        each = [jax.tree.map(np.asarray, (run.params, run.memory)) for run in runs]
        # JAX's from the first round on: numpy's would be compiled for once more.
        return cast(Models, jax.tree.map(lambda *leaves: jnp.asarray(np.stack(leaves)), *each))

    def places(self, seating: Seating, states: list[ServerState], asks: Asks) -> list[Seat]:
        """What they ask for by seat; one whose run is over computes what nobody reads."""
        return [
            Seat(self.batch[i].federation, self.split[i], states[i], asks.get(i))
            for i in seating.runs
        ]

    def book(
        self,
        seating: Seating,
        asks: Asks,
        score: NDArray[Any],
        made: Models,
        index: int | None = None,
    ) -> None:
        """Each run after its round: the score by seat, the models by (index of the round and) seat.

        Where nothing was uploaded there is nothing to make a step of: the model stays.
        """
        seconds = time.monotonic() - self._began
        seats = {i: seat for seat, i in reversed([*enumerate(seating.runs)])}
        for i, ask in asks.items():
            run, seat = self.batch[i], seats[i]
            loss, accuracy, signal, offered = score[seat].tolist()
            state = course.finish(
                run.federation,
                run.state,
                ask,
                loss=loss,
                accuracy=accuracy,
                signal=signal,
                seconds=self._before[i] + seconds,
                offered=offered,
            )
            place = seat if index is None else (index, seat)
            run.at = (state, *(run.at[1:] if state.exhausted else (made[0], place, made[1])))


@jax.jit
def _taken(stacked: Any, places: jax.Array) -> Any:
    """The models at these places, [runs] or [runs, 2], of a stack."""
    where = tuple(places.T) if places.ndim == 2 else places
    return jax.tree.map(lambda leaf: leaf[where], stacked)
