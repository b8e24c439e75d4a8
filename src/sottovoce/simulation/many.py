"""`simulate_many`: every plan with every seed, many runs in one compiled round."""

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
from sottovoce.simulation.compiled import BatchRun
from sottovoce.simulation.simulate import First, adapt_plan, describe_run, play_batch, start_run

TOGETHER = 32  # runs in one compiled round: beyond that an accelerator is busy anyway
AT_ONCE = 2  # batches: one is on the accelerator while the host keeps the other's books


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
    """Simulate every plan with every seed, plan after plan.

    On an accelerator runs that share data, model and signal are trained together in one compiled
    round; on a CPU, whose cores one run keeps busy, one after another. `together` overrides that.
    Each run equals the one that `simulate` makes of its plan and seed, up to rounding.

    >>> plan = Plan(rounds={"schedule": "fixed", "rounds": 2})
    >>> runs = simulate_many([plan, plan.replace("privacy.epsilon=1")], seeds=[1, 2])
    >>> [run.record["seed"] for run in runs]
    [1, 2, 1, 2]
    """
    results = simulate_each(
        plans,
        seeds=seeds,
        data=data,
        validation=validation,
        test=test,
        model=model,
        together=together,
    )
    runs = dict(results)
    return [runs[i] for i in range(len(runs))]


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
    """Yield the runs of `simulate_many` with their index in its list, as soon as they are done.

    For long sweeps, which store little of each run and lose nothing of the others if one fails.

    >>> plan = Plan(rounds={"schedule": "fixed", "rounds": 1})
    >>> sorted(i for i, run in simulate_each([plan], seeds=[1, 2]))
    [0, 1]
    """
    given = None if data is None else Given(data, validation, test)
    plans = [adapt_plan(plan, given, model) for plan in plans]
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
    # All batches of a sweep are played in the same way, because each way needs a compilation.
    guess = not together or all(federation.schedule.steady for federation, _ in runs)
    waiting = _group_runs(runs, TOGETHER if together else 1)
    live = _begin_batches(waiting, runs, AT_ONCE if together else 1, guess=guess)
    over: deque[tuple[int, BatchRun, datetime]] = deque()
    while live or over:
        for batch in tuple(live):
            if next(batch.rounds, _OVER) is _OVER:
                live.remove(batch)
                live += _begin_batches(waiting, runs, 1, guess=guess)
                ended = zip(batch.members, batch.batch, strict=True)
                over.extend((i, run, batch.began) for i, run in ended)
        if over:  # one at a time, while the others' rounds are under way
            i, run, began = over.popleft()
            made = describe_run(run, "finished", began)
            yield i, Trained(made.to_dict(), run.federation.model, run.final_model)


_OVER = object()


class _Batch(NamedTuple):
    """A batch that is being played."""

    members: list[int]
    batch: list[BatchRun]
    rounds: Iterator[object]
    began: datetime


def _begin_batches(
    waiting: Iterator[list[int]], runs: list[tuple[Federation, int]], count: int, *, guess: bool
) -> list[_Batch]:
    begun = []
    for members in itertools.islice(waiting, count):
        known: dict[Any, First] = {}
        batch = [start_run(*runs[i], known) for i in members]
        rounds = play_batch(batch, guess=guess)
        begun.append(_Batch(members, batch, rounds, datetime.now(UTC)))
    return begun


def _group_runs(runs: list[tuple[Federation, int]], size: int) -> Iterator[list[int]]:
    """Yield which runs share a compiled round: those alike in data, model and signal.

    Runs on one split read the same rows, which an accelerator then reads once for all: where a
    split has enough runs, they do not share a round with other splits. Long runs come first,
    together.
    """
    groups: dict[Any, dict[int, list[int]]] = {}
    for i, (federation, _) in enumerate(runs):
        plan = federation.plan
        server = federation.finish.idle, federation.finish.memory_names
        alike = (
            plan.data,
            federation.model,
            plan.server.signal,
            plan.local.steps,
            plan.noise,
            server,
        )
        groups.setdefault(alike, {}).setdefault(id(federation.held), []).append(i)
    for splits in groups.values():
        pools = list(splits.values())
        if min(map(len, pools)) < size // 4:
            pools = [[i for pool in pools for i in pool]]
        for pool in pools:
            if size > 1:
                pool = sorted(pool, key=lambda i: -runs[i][0].schedule.start(None).horizon)
            while pool:
                count = _choose_batch_size(len(pool), size)
                yield pool[:count]
                pool = pool[count:]


def _choose_batch_size(waiting: int, size: int) -> int:
    """Return how many waiting runs make a batch: seats are a power of two, and few stay empty.

    >>> [_choose_batch_size(waiting, 32) for waiting in (20, 4, 30, 40)]
    [16, 4, 30, 32]
    """
    count = min(waiting, size)
    seats = 1 << (count - 1).bit_length()
    # A few empty seats cost nothing: an accelerator is not busy with so few runs.
    return seats // 2 if seats >= 16 and 4 * count <= 3 * seats else count
