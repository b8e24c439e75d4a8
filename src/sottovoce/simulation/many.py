"""`simulate_many`: every plan with every seed, on an accelerator many in one compiled round."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from typing import Any, NamedTuple

import jax

from sottovoce.data.federated import Given, Holdings, Pair, load_holdings
from sottovoce.models.base import Model
from sottovoce.plan import Plan
from sottovoce.privacy import seeds as seeding
from sottovoce.runs.trained import Trained
from sottovoce.server.federation import Federation, build
from sottovoce.simulation.simulate import First, adapted, describe_run, rounds_of, started
from sottovoce.simulation.table import BatchRun

TOGETHER = 32  # runs in one compiled round: beyond that an accelerator is busy anyway
AT_ONCE = 2  # batches in turn: one is on the accelerator while the host keeps the other's books


def simulate_many(
    plans: Sequence[Plan],
    *,
    seeds: Sequence[int],
    data: Pair | Sequence[Pair] | None = None,
    validation: Pair | None = None,
    test: Pair | None = None,
    model: Model | None = None,
    together: bool | None = None,
) -> list[Trained]:
    """Every plan with every seed, plan after plan.

    On an accelerator runs that share data, model and signal are trained together in one compiled
    round; on a CPU, whose cores one run keeps busy, after one another. `together` overrides that.
    Each equals the run that `simulate` would make of its plan and seed, up to rounding.

    >>> plan = Plan(rounds={"schedule": "fixed", "rounds": 2})
    >>> runs = simulate_many([plan, plan.replace("privacy.epsilon=1")], seeds=[1, 2])
    >>> [run.record["seed"] for run in runs]
    [1, 2, 1, 2]
    """
    each = simulate_each(
        plans,
        seeds=seeds,
        data=data,
        validation=validation,
        test=test,
        model=model,
        together=together,
    )
    finished = dict(each)
    return [finished[i] for i in range(len(finished))]


def simulate_each(
    plans: Sequence[Plan],
    *,
    seeds: Sequence[int],
    data: Pair | Sequence[Pair] | None = None,
    validation: Pair | None = None,
    test: Pair | None = None,
    model: Model | None = None,
    together: bool | None = None,
) -> Iterator[tuple[int, Trained]]:
    """`simulate_many` as it goes: each run with its place in that list, as soon as it is done.

    For long sweeps, which want to keep little of a run and nothing of the others when one is lost.

    >>> plan = Plan(rounds={"schedule": "fixed", "rounds": 1})
    >>> sorted(i for i, run in simulate_each([plan], seeds=[1, 2]))
    [0, 1]
    """
    given = None if data is None else Given(data, validation, test)
    plans = [adapted(plan, given, model) for plan in plans]
    seeds = [seeding.check_seed(seed) for seed in seeds]
    together = jax.default_backend() != "cpu" if together is None else together
    runs: list[tuple[Federation, int]] = []
    held: dict[Any, Holdings] = {}
    for plan in plans:
        for seed in seeds:
            lens = plan.model
            seen = (lens.features, lens.cell, lens.upright, lens.colours)
            where = (plan.data, seen, seed)
            if where not in held:
                held[where] = load_holdings(plan, seed=seed, data=given)
            runs.append((build(plan, seed=seed, data=given, model=model, held=held[where]), seed))
    # Of a sweep either all batches are played in stretches or none: each way is compiled.
    guess = not together or all(federation.schedule.steady for federation, _ in runs)
    waiting = _batches(runs, TOGETHER if together else 1)
    live = _begun(waiting, runs, AT_ONCE if together else 1, guess=guess)
    over: deque[tuple[int, BatchRun, datetime]] = deque()
    while live or over:
        for own in tuple(live):
            if next(own.rounds, _OVER) is _OVER:
                live.remove(own)
                live += _begun(waiting, runs, 1, guess=guess)
                ended = zip(own.members, own.batch, strict=True)
                over.extend((i, run, own.began) for i, run in ended)
        if over:  # one at a time, while the others' rounds are under way
            i, run, began = over.popleft()
            made = describe_run(run, "finished", began)
            yield i, Trained(made.to_dict(), run.federation.model, run.handed)


_OVER = object()


class _Batch(NamedTuple):
    """A batch on its way."""

    members: list[int]
    batch: list[BatchRun]
    rounds: Iterator[object]
    began: datetime


def _begun(
    waiting: Iterator[list[int]], runs: list[tuple[Federation, int]], count: int, *, guess: bool
) -> list[_Batch]:
    begun = []
    for members in itertools.islice(waiting, count):
        known: dict[Any, First] = {}
        batch = [started(*runs[i], known) for i in members]
        rounds = rounds_of(batch, guess=guess)
        begun.append(_Batch(members, batch, rounds, datetime.now(UTC)))
    return begun


def _batches(runs: list[tuple[Federation, int]], size: int) -> Iterator[list[int]]:
    """Which runs share a compiled round: those alike in data, model and signal.

    Runs on one split read the same rows, so that an accelerator reads them once for all: where
    there are enough of them they are kept apart from other splits. Long ones go first and together.
    """
    groups: dict[Any, dict[int, list[int]]] = {}
    for i, (federation, _) in enumerate(runs):
        own = federation.plan
        server = federation.finish.idle, federation.finish.memory_names  # whose numbers may differ
        alike = (own.data, federation.model, own.server.signal, own.local.steps, own.noise, server)
        groups.setdefault(alike, {}).setdefault(id(federation.held), []).append(i)
    for splits in groups.values():
        parts = list(splits.values())
        if min(map(len, parts)) < size // 4:
            parts = [[i for part in parts for i in part]]
        for part in parts:
            if size > 1:
                part = sorted(part, key=lambda i: -runs[i][0].schedule.start(None).horizon)
            while part:
                count = _seated(len(part), size)
                yield part[:count]
                part = part[count:]


def _seated(waiting: int, size: int) -> int:
    """How many of those who wait make a batch: seats are a power of two, and few stay empty.

    >>> [_seated(20, 32), _seated(4, 32), _seated(30, 32), _seated(40, 32)]
    [16, 4, 30, 32]
    """
    count = min(waiting, size)
    seats = 1 << (count - 1).bit_length()
    # A few seats more cost nothing: an accelerator is not busy with so few runs.
    return seats // 2 if seats >= 16 and 4 * count <= 3 * seats else count
