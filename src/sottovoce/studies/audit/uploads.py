"""What a server receives, with noise and without: the clipped step as it can read it off an upload.

"Without noise" is `client.step`, which nothing may send; with noise it is the real
`client.release`, priced by a tank of the budget that spends all of it in the uploads asked for.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sottovoce.client import release
from sottovoce.client.release import Parameters
from sottovoce.models.form import Form
from sottovoce.privacy import calibration, gaussian, grid
from sottovoce.privacy.budget import Calibration
from sottovoce.privacy.sensitivity import Recipe
from sottovoce.privacy.tank import Tank
from sottovoce.schedules.pricing import Terms
from sottovoce.schedules.schedule import Round

Rows = NDArray[np.float64]
Labels = NDArray[np.int64]


def capacity(epsilon: float, delta: float, by: Calibration) -> float:
    """μ² that a calibration lets a run spend; a vault's where a vault takes it.

    >>> [round(capacity(20.0, 1e-3, by) ** 0.5, 2) for by in ("exact", "paper")]
    [4.05, 5.38]
    """
    if by == "paper":  # with cohorts of q·U clients μ² is 1/q of this, and q of it is released
        return float(calibration.capacity(epsilon, delta, calibration=by))
    return float(calibration.vault_capacity(epsilon, delta, calibration=by))


@dataclass(frozen=True)
class Level:
    """A budget, or none: what stands at the head of a column of the audit.

    >>> Level(None).name, Level(8.0, 1e-5).name, round(Level(8.0, 1e-5).mu, 4)
    ('no noise', 'ε = 8', 1.666)
    """

    epsilon: float | None
    delta: float = 1e-5
    calibration: Calibration = "exact"  # what turns the budget into noise

    @property
    def name(self) -> str:
        """As it is printed."""
        return "no noise" if self.epsilon is None else f"ε = {self.epsilon:g}"

    @property
    def mu(self) -> float:
        """What bounds every attack; infinite without noise."""
        return np.inf if self.epsilon is None else float(gaussian.mu(self.epsilon, self.delta))

    def ceiling(self, fpr: float) -> float:
        """The most any attacker finds at this rate of false alarms."""
        return 1.0 if self.epsilon is None else float(gaussian.tpr(fpr, self.mu))


@dataclass(frozen=True)
class Victim:
    """A client of which the server wants to know more than it should."""

    form: Form
    recipe: Recipe
    x: Rows
    y: Labels

    def answers(
        self, level: Level, models: Iterator[Parameters], count: int
    ) -> Iterator[Parameters]:
        """So many uploads, one for each model that the server sends; together they cost ε."""
        tank = None
        if level.epsilon is not None:
            tank = Tank.full(capacity(level.epsilon, level.delta, level.calibration))
        terms = Terms(clients=1, per_round=1, calibration=level.calibration)
        change = grid.change(self.recipe.unit, len(self.y))
        for t, model in zip(range(count), models, strict=False):
            if tank is None:
                yield release.step(self.form, model, self.x, self.y, self.recipe)
                continue
            paid = release.price(tank, Round(t, count), terms, change=change)
            tank = tank.spend(sum(paid.units))
            sent = release.release(
                self.form, model, self.x, self.y,
                recipe=self.recipe, paid=paid, head={"kind": "upload", "t": t},
            )  # fmt: skip
            yield {name: leaf.astype(np.float64) for name, leaf in sent.params.items()}

    def gradient(self, level: Level, model: Parameters) -> Parameters:
        """Σ clip(g) + noise, as the server reads it off one upload that spends all of ε.

        >>> form, recipe = Form("svm", (1,), 2, kappa=0.0), Recipe(1.0, 1.0)
        >>> victim = Victim(form, recipe, np.ones((1, 1)), np.ones(1, np.int64))
        >>> start = {"b": np.zeros(()), "w": np.zeros(1)}
        >>> victim.gradient(Level(None), start)["w"].round(4).tolist()
        [-0.7071]
        """
        moved = next(self.answers(level, iter([model]), 1))
        scale = len(self.y) / self.recipe.learning_rate
        return {name: scale * (np.asarray(model[name]) - moved[name]) for name in moved}
