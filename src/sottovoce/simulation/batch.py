"""A batch of runs as arrays: the rows they look at, and what each asks for in a round."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from sottovoce import seeds as seeding
from sottovoce.checkpoint import ServerState
from sottovoce.federation import Federation
from sottovoce.learning.models import Model
from sottovoce.seeds import Purpose
from sottovoce.simulation import course
from sottovoce.simulation.finishing import numbers
from sottovoce.simulation.round import Orders, Rows
from sottovoce.simulation.scoring import inspected, on_device


def rows_of(federations: Sequence[Federation], model: Model) -> tuple[Rows, list[int]]:
    """The rows of all splits of the batch, stacked, and which of them each run uses."""
    splits = list({id(own.held): own for own in federations}.values())
    places = {id(own.held): i for i, own in enumerate(splits)}
    held = [own.held for own in splits]
    train, valid = [], [on_device(own.validation) for own in held]
    for own in held:
        train.append((inspected(model, own.train), on_device(own.train)[1]))
    rows = Rows(
        x=jax.tree.map(lambda *parts: _stacked(parts), *(x for x, _ in train)),
        y=_stacked([y for _, y in train]),
        owner=_stacked([own.owner for own in held]),
        samples=_stacked([own.samples.astype(np.float32) for own in held]),
        valid_x=_stacked([x for x, _ in valid]),
        valid_y=_stacked([y for _, y in valid]),
    )
    return rows, [places[id(own.held)] for own in federations]


def _stacked(arrays: Sequence[jax.Array | NDArray[Any]]) -> jax.Array:
    return jnp.asarray(arrays[0])[None] if len(arrays) == 1 else jnp.stack(arrays)


class Seat(NamedTuple):
    """One run's place in a batch, and what it asks for in this round."""

    federation: Federation
    seed: int
    split: int
    state: ServerState
    asks: course.Prepared | None  # None: the run is over; its seat computes what nobody reads


def orders_of(seats: Sequence[Seat]) -> Orders:
    """What the runs of a batch ask for, as arrays."""
    plans, asked = [own.federation.plan for own in seats], [own.asks for own in seats]
    idle = np.zeros(len(seats[0].federation.samples))
    still = np.zeros((plans[0].local.steps, len(idle)))
    sigma = [still if p is None else np.nan_to_num(p.sigma) for p in asked]
    return Orders(
        split=np.array([own.split for own in seats], np.int32),
        weight=np.stack([idle if p is None else p.weight for p in asked]).astype(np.float32),
        rate=np.array([plan.local.learning_rate for plan in plans], np.float32),
        clip=np.array([own.federation.recipe.clip for own in seats], np.float32),
        std=np.array([0.0 if p is None else p.std for p in asked], np.float32),
        sigma=np.stack(sigma).astype(np.float32),
        signal_std=np.array([0.0 if p is None else p.signal_std for p in asked], np.float32),
        bound=np.array([plan.server.loss_bound or 0.0 for plan in plans], np.float32),
        key=np.stack([_key(own.seed) for own in seats]),
        finish=numbers(
            [own.federation.finish for own in seats],
            [own.state.marks for own in seats],
            [None if p is None else p.turn for p in asked],
        ),
    )


@lru_cache(maxsize=1024)
def _key(seed: int) -> NDArray[np.uint32]:
    return seeding.words(seed, Purpose.NOISE)
