"""What the server makes of averaged uploads (`server.finish`): a batch of them, or one in numpy."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from sottovoce.models.names import unnamed
from sottovoce.runs.checkpoint import ServerState
from sottovoce.schedules.optimizer import Closed, Finish, Leaves, Marks, Memory, Numbers
from sottovoce.schedules.schedule import Round
from sottovoce.server.federation import Federation
from sottovoce.server.scoring import scores


def numbers(
    each: Sequence[Finish], marks: Sequence[Marks], turns: Sequence[Round | None]
) -> Numbers | None:
    """A round's numbers for a batch, an array each; None where every upload is left as it is.

    A run that is over has no turn: whatever its seat computes is thrown away.

    >>> own = Finish(best=True)
    >>> numbers([own, own], [Marks(), Marks(best=0.5)], [Round(0, 4), None]).best.tolist()
    [inf, 0.5]
    """
    if each[0].idle:
        return None
    told = [
        own.numbers(mark, 0, 1) if turn is None else own.numbers(mark, turn.t, turn.horizon)
        for own, mark, turn in zip(each, marks, turns, strict=True)
    ]
    return Numbers(*(np.array(column, np.float32) for column in zip(*told, strict=True)))


def closed(
    federation: Federation,
    state: ServerState,
    turn: Round,
    memory: Memory,
    previous: Leaves,
    averaged: Leaves,
) -> Closed:
    """The averaged upload made into the next model, in numpy: secure noise, real federations."""
    model, public = federation.model, federation.held.validation
    return federation.finish.close(
        state.marks,
        turn.t,
        turn.horizon,
        memory,
        previous,
        averaged,
        loss=lambda leaves: scores(model, unnamed(model, leaves), public)[0],
    )
