"""Figures filled with made-up numbers, right by every claim or wrong by every one; nothing trains.

The numbers have a small spread over the seeds, of which most is shared by all runs of a seed, as
in real runs.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np

from sottovoce.studies.paper import reproduce
from sottovoce.studies.paper.definition import (
    REFERENCE,
    Cell,
    Figure,
    expand,
    list_figures,
    list_seeds,
    load_figure,
)
from sottovoce.studies.paper.outcomes import Outcome, Result, gather_result

LOSS = {
    "udp": 0.6,
    "lei": 0.55,
    "crd": 0.31,
    "smoothed": 0.27,
    "optimal": 0.3,
    "paid": 0.5,
    "crd-paper": 0.35,
    "smoothed-paper": 0.33,
    "unequal": 0.5,
    "precision": 0.4,
    "plain": 0.2,
}
BETA = {0.5: 0.5, 0.6: 0.45, 0.7: 0.4, 0.8: 0.3, 0.9: 0.31}

# A figure on the embedded digits: small, quick, and in every other way like the paper's.
DIGITS = """
kind = "sweep"
paper = "none"
title = "Loss against T"
caption = "Test loss on the digits."
setting = "mnist"
plan = { "rounds.schedule" = "fixed", "data.name" = "digits" }
[x]
key = "rounds.rounds"
label = "rounds T"
values = [1, 2, 3]
[line]
key = "privacy.epsilon"
label = "ε = {}"
values = [4, 20]
[[claims]]
words = "The loss is convex in T."
check = "convex"
"""


def loss_of(own: Figure, cell: Cell) -> float:
    """The loss that a run would have, were every claim right."""
    if own.line is not None and own.line.key == "method":
        name = str(cell.line).removesuffix("-short")
        base = LOSS[name]
        if name == "crd" and isinstance(cell.x, int) and cell.x >= 16:
            base = 0.29
        return base + (abs(cell.search - 100) / 2000 if cell.search else 0.0)
    epsilon, rounds = float(cell.line or 8), float(cell.plan.rounds.rounds)
    best = 60 + 8 * epsilon
    if own.name == "fig7" and cell.x != REFERENCE:
        return 0.3 + abs(rounds - best) / 500
    if own.x is not None and own.x.key == "rounds.beta":
        return BETA[cell.x]
    return 0.3 + 1 / epsilon + 0.3 * ((rounds - best) / 100) ** 2


def outcome(own: Figure, cell: Cell, seed: int, *, reverse: bool) -> Outcome:
    """One made-up run."""
    shared = np.random.default_rng(seed).normal(0, 0.01)
    noise = np.random.default_rng([seed, int(cell.key, 16) % 2**31]).normal(0, 0.001)
    loss = loss_of(own, cell) + shared + noise
    epsilon = cell.plan.privacy.epsilon
    most = float(max(epsilon) if isinstance(epsilon, tuple) else epsilon)
    rounds = round(20 + 2 * most + 100 * (cell.plan.rounds.beta or 0.5)) + seed % 3
    accuracy, distinct = 1 - loss / 2, 1 - loss
    if cell.plan.privacy.calibration == "paper":
        most = most * (0.5 if reverse else 1.2)
    if reverse:
        loss, accuracy, distinct, rounds = 3 - loss, 1 - accuracy, 1 - distinct, 400 - rounds
    made = Outcome(
        loss=loss,
        accuracy=accuracy,
        validation=loss,
        rounds=rounds,
        epsilon=most,
        delta=1e-3,
        horizon=((0, 200), (5, 150), (20, rounds)),
        made="nothing",
    )
    if own.kind == "prototypes":
        picture = reproduce.encode_pictures(np.full((10, 784), 0.5))
        made = replace(made, pictures=picture, distinct=distinct)
    return made


@cache
def result(name: str, *, reverse: bool = False, quick: bool = False) -> Result:
    """A figure filled with made-up runs."""
    own = load_figure(name)
    if own.moments is not None:
        return Result(own, quick, command="made up", moments=reproduce.compute_moments(own.moments))
    runs = {
        (cell.key, seed): outcome(own, cell, seed, reverse=reverse)
        for cell in expand(own, quick)
        for seed in list_seeds(own, quick)
    }
    return gather_result(own, quick, runs, "made up")


def fill(folder: Path, chosen: tuple[str, ...] = ()) -> Path:
    """A folder of made-up figures with their page; the path of the page."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in chosen or list_figures():
        result(name).save(folder)
    return reproduce.write_page(folder)
