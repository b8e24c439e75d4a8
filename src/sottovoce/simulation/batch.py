"""A batch of runs as arrays: the rows they look at, and what each asks for in a round."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import ArrayLike, NDArray

from sottovoce.models.base import Model
from sottovoce.privacy import seeds as seeding
from sottovoce.privacy.seeds import Purpose
from sottovoce.privacy.tank import side_by_side
from sottovoce.runs.checkpoint import ServerState
from sottovoce.server import course
from sottovoce.server.federation import Federation
from sottovoce.server.finishing import numbers
from sottovoce.server.scoring import inspected, on_device
from sottovoce.simulation.round import Orders, Rows


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
    if len(arrays) > 1:
        return jnp.stack(arrays)
    if jax.default_backend() == "cpu":  # the same memory under another shape, not a copy of it
        alone: jax.Array = jax.device_put(np.asarray(arrays[0])[None])
        return alone
    return jnp.asarray(arrays[0])[None]


class Seat(NamedTuple):
    """One run's place in a batch, and what it asks for in this round."""

    federation: Federation
    split: int
    state: ServerState
    asks: course.Prepared | None  # None: the run is over; its seat computes what nobody reads


def orders_of(seats: Sequence[Seat], always: dict[str, NDArray[Any]]) -> Orders:
    """What the runs of a batch ask for, as arrays; `always` is what they ask for in every round.

    The seats may be those of several rounds, one after the other.
    """
    rounds = len(seats) // len(always["rate"])
    if rounds > 1:
        always = {name: np.concatenate([own] * rounds) for name, own in always.items()}
    asked = [own.asks for own in seats]
    weight, sigma = _column(asked, "weight"), _column(asked, "sigma")
    return Orders(
        **always,
        split=np.array([own.split for own in seats], np.int32),
        weight=weight.astype(np.float32),
        std=course.root_sum(weight, sigma[:, 0]).astype(np.float32),
        sigma=np.nan_to_num(sigma).astype(np.float32),
        signal_std=course.root_sum(weight, _column(asked, "signal_sigma")).astype(np.float32),
        finish=numbers(
            [own.federation.finish for own in seats],
            [own.state.marks for own in seats],
            [None if p is None else p.turn for p in asked],
        ),
        members=members_of([own.federation for own in seats], weight),
    )


FEW_ROWS = 256  # a client's; with fewer, going client by client costs more than it saves


def members_of(
    federations: Sequence[Federation], weight: NDArray[np.float64]
) -> NDArray[np.int32] | None:
    """The K clients that a round goes through, of each run, or None: all rows at once.

    Where K < U the rows of the others need not be looked at. With several local steps clients are
    gone through one by one anyway. With one step that pays where a client has enough rows to keep a
    CPU busy; runs of a batch on an accelerator look at the same rows, whoever of them counts.
    """
    size = max(own.terms.per_round for own in federations)
    first = federations[0]
    samples, longest = first.samples, int(max(first.samples))
    if size >= len(samples):
        return None
    alone = len(federations) == 1 and jax.default_backend() == "cpu" and longest >= FEW_ROWS
    if first.plan.local.steps == 1 and not (alone and size * longest <= 0.9 * samples.sum()):
        return None
    return cohort(weight, size)


def cohort(weight: ArrayLike, size: int) -> NDArray[np.int32]:
    """Those who count, filled up with others, whose weight is 0, to `size` of each run.

    >>> cohort([[0.5, 0.0, 0.5, 0.0], [0.0, 1.0, 0.0, 0.0]], 2).tolist()
    [[0, 2], [0, 1]]
    """
    order = np.argsort(-np.asarray(weight), axis=1, kind="stable")[:, :size]
    return np.sort(order, axis=1).astype(np.int32)


def _column(asked: Sequence[course.Prepared | None], name: str) -> NDArray[np.float64]:
    """One array of each run, zeros for a run that is over."""
    told = {i: getattr(own, name) for i, own in enumerate(asked) if own is not None}
    idle = np.zeros_like(next(iter(told.values())))
    return side_by_side([told.get(i, idle) for i in range(len(asked))])


def lasting(federations: Sequence[Federation], seeds: Sequence[int]) -> dict[str, NDArray[Any]]:
    """What runs ask for in every round alike."""
    plans = [own.plan for own in federations]
    return {
        "rate": np.array([plan.local.learning_rate for plan in plans], np.float32),
        "clip": np.array([own.recipe.clip for own in federations], np.float32),
        "bound": np.array([plan.server.loss_bound or 0.0 for plan in plans], np.float32),
        "key": np.stack([seeding.words(seed, Purpose.NOISE) for seed in seeds]),
    }
