"""Trains what is missing and stores it as it comes; nothing here knows what a figure shows."""

from __future__ import annotations

import platform
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from sottovoce._version import __version__
from sottovoce.errors import DataError
from sottovoce.studies.paper import outcomes, prototypes
from sottovoce.studies.paper.definition import Figure, Prototypes
from sottovoce.studies.paper.expand import Cell, expand, seeds_of
from sottovoce.studies.paper.outcomes import Outcome, Runs

Progress = Callable[[int, int], None]  # rounds done at most, rounds in all at most
Job = tuple[Cell, int, Prototypes | None]


def complete(
    figures: Sequence[Figure], *, quick: bool, folder: Path, progress: Progress
) -> list[str]:
    """Run whatever the figures still lack; where data are missing, the sentences that say so."""
    outcomes.mend(folder)
    runs = outcomes.known(folder)
    cells = {figure.name: expand(figure, quick) for figure in figures}
    todo: dict[tuple[str, int], tuple[Cell, int, Prototypes | None]] = {}
    for figure in figures:
        for cell, seed in missing(cells[figure.name], seeds_of(figure, quick), runs, figure):
            # Pictures are made beside the run, so the figure that wants them goes first.
            known = todo.get((cell.key, seed))
            if known is None or known[2] is None:
                todo[cell.key, seed] = (cell, seed, figure.prototypes)
    return train(list(todo.values()), folder, progress)


def train(jobs: list[Job], folder: Path, progress: Progress) -> list[str]:
    """Run these and store each as it comes; where data are missing, the sentences that say so."""
    total = sum(cell.plan.rounds.rounds for cell, _, _ in jobs)
    done, absent = 0, []
    for batch in _portions(jobs):
        try:
            for cell, seed, outcome in _train(batch):
                outcomes.append(folder, cell.key, seed, outcome)
                done += cell.plan.rounds.rounds
                progress(done, total)
        except DataError as error:
            absent.append(str(error))
            done += sum(cell.plan.rounds.rounds for cell, _, _ in batch)
    return list(dict.fromkeys(absent))


def missing(
    cells: Sequence[Cell], seeds: Sequence[int], runs: Runs, figure: Figure
) -> list[tuple[Cell, int]]:
    """The runs that are still to be made, each once."""
    wanted = {(cell.key, seed): (cell, seed) for cell in cells for seed in seeds}
    drawn = figure.kind == "prototypes"
    return [
        pair
        for place, pair in wanted.items()
        if place not in runs or (drawn and not runs[place].pictures)
    ]


def _portions(jobs: list[Job]) -> list[list[Job]]:
    """Jobs on the same data with the same seeds: one call of the simulator each, read once."""
    by_plan: dict[str, list[Job]] = {}
    for job in jobs:
        by_plan.setdefault(job[0].key, []).append(job)
    portions: dict[Any, list[Job]] = {}
    for own in by_plan.values():
        seeds = tuple(seed for _, seed, _ in own)
        portions.setdefault((own[0][0].plan.data, seeds), []).extend(own)
    return list(portions.values())


def _train(jobs: list[Job]) -> Any:
    # Loaded only now: what is there already is drawn without JAX.
    from sottovoce.simulation.many import simulate_each

    cells = {cell.key: cell for cell, _, _ in jobs}
    seeds = list(dict.fromkeys(seed for _, seed, _ in jobs))
    how = {cell.key: own for cell, _, own in jobs}
    made = _made()
    plans = list(cells.values())
    for i, trained in simulate_each([cell.plan for cell in plans], seeds=seeds):
        cell, seed = plans[i // len(seeds)], seeds[i % len(seeds)]
        outcome = Outcome.of(trained.record, made)
        own = how[cell.key]
        if own is not None:
            outcome = _pictured(outcome, trained, own)
        yield cell, seed, outcome


def _pictured(outcome: Outcome, trained: Any, how: Prototypes) -> Outcome:
    from dataclasses import replace

    from sottovoce.data import datasets

    drawn = prototypes.pictures(trained, how)
    images = datasets.load(str(trained.record["plan"]["data"]["name"]))
    score = prototypes.distinct(drawn, images.test_x, images.test_y)
    return replace(outcome, pictures=prototypes.to_text(drawn), distinct=score)


def _made() -> str:
    """The versions and the device that make a run, in words."""
    import jax
    import numpy as np

    device = jax.devices()[0]
    name = f"{platform.machine()} CPU" if device.platform == "cpu" else device.device_kind
    return (
        f"sottovoce {__version__}, Python {platform.python_version()}, jax {jax.__version__}, "
        f"numpy {np.__version__}, on {name}"
    )
