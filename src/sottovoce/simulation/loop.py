"""Algorithms 1 and 2 for a batch of runs in step: who is asked, the compiled round, the books."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

from sottovoce.models.base import Model, Params
from sottovoce.simulation.batch import orders_of
from sottovoce.simulation.round import play
from sottovoce.simulation.table import AfterRound, Run, Seating, Table


def rounds_of(
    model: Model, batch: list[Run], after_round: AfterRound | None = None
) -> Iterator[None]:
    """Round by round: yields while the accelerator computes, before its answer is awaited.

    Whoever drives two batches in turn has one on the accelerator while the other keeps its books.
    Each run is left at its last complete round.
    """
    table, t = Table(model, batch), batch[0].state.progress.done
    seating = Seating([], {})
    params: Params = None
    memory: dict[str, Params] = {}
    live: Iterable[int] = range(len(batch))
    while asks := table.asked(live, states := [run.state for run in batch]):
        live = asks
        if 2 * len(asks) <= len(seating.runs) or params is None:  # they shrink by halves
            seating = table.seated(asks)
            params, memory = table.models(seating)
        orders = orders_of(table.places(seating, states, asks), seating.always)
        outcome = play(
            model,
            table.rows,
            params,
            orders,
            t,
            signal=table.signal,
            longest=table.longest,
            memory=memory,
        )
        outcome.score.copy_to_host_async()  # it is on its way before it is asked for
        params, memory, t = outcome.params, outcome.memory, t + 1
        yield
        table.book(seating, asks, np.asarray(outcome.score), (params, memory))
        if after_round is not None:
            after_round(batch[0])
