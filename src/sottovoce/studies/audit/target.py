"""What is attacked: the plan's data, a model that an honest server would send, the recipe."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from sottovoce.client import release
from sottovoce.client.release import Parameters
from sottovoce.errors import InputError
from sottovoce.models.base import Form, flatten_parameters
from sottovoce.models.mlp import Mlp
from sottovoce.plan import Plan
from sottovoce.privacy import calibration, gaussian, grid
from sottovoce.privacy.budget import ALWAYS_NOT_COVERED, Calibration
from sottovoce.privacy.sensitivity import Recipe
from sottovoce.privacy.tank import Tank
from sottovoce.runs.record import Record
from sottovoce.runs.trained import load
from sottovoce.schedules.base import Round
from sottovoce.schedules.pricing import Terms
from sottovoce.server.federation import Federation, build

# What a server receives, with noise and without: the clipped step that an upload shows.
#
# "Without noise" is `release.step`, which nothing may send; with noise it is the real
# `client.release`, priced by a tank of the budget that spends all of it in the uploads asked for.


Rows = NDArray[np.float64]
Labels = NDArray[np.int64]


def compute_capacity(epsilon: float, delta: float, by: Calibration) -> float:
    """Return the μ² that a calibration lets a run spend; a vault's where a vault accepts it.

    >>> [round(compute_capacity(20.0, 1e-3, by) ** 0.5, 2) for by in ("exact", "paper")]
    [4.05, 5.38]
    """
    if by == "paper":  # with cohorts of q·U clients μ² is 1/q of this, and q of it is released
        return float(calibration.capacity(epsilon, delta, calibration=by))
    return float(calibration.vault_capacity(epsilon, delta, calibration=by))


@dataclass(frozen=True)
class Level:
    """A budget, or none: the head of a column of the audit.

    >>> Level(None).name, Level(8.0, 1e-5).name, round(Level(8.0, 1e-5).mu, 4)
    ('no noise', 'ε = 8', 1.666)
    """

    epsilon: float | None
    delta: float = 1e-5
    calibration: Calibration = "exact"  # what turns the budget into noise

    @property
    def name(self) -> str:
        """The name that is printed."""
        return "no noise" if self.epsilon is None else f"ε = {self.epsilon:g}"

    @property
    def mu(self) -> float:
        """What bounds every attack; infinite without noise."""
        return np.inf if self.epsilon is None else float(gaussian.mu(self.epsilon, self.delta))

    def bound_tpr(self, fpr: float) -> float:
        """Return the most that any attacker finds at this rate of false alarms."""
        return 1.0 if self.epsilon is None else float(gaussian.tpr(fpr, self.mu))


@dataclass(frozen=True)
class Victim:
    """The client that a curious server attacks."""

    form: Form
    recipe: Recipe
    x: Rows
    y: Labels

    def answers(
        self, level: Level, models: Iterator[Parameters], count: int
    ) -> Iterator[Parameters]:
        """Yield an upload for each model that the server sends; together they cost ε."""
        tank = None
        if level.epsilon is not None:
            tank = Tank.full(compute_capacity(level.epsilon, level.delta, level.calibration))
        terms = Terms(clients=1, per_round=1, calibration=level.calibration)
        change = grid.grid_sensitivity(self.recipe.unit, len(self.y))
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
        """Return Σ clip(g) + noise, as one upload that spends all of ε shows it.

        >>> form, recipe = Form("svm", (1,), 2, {"kappa": 0.0}), Recipe(1.0, 1.0)
        >>> victim = Victim(form, recipe, np.ones((1, 1)), np.ones(1, np.int64))
        >>> start = {"b": np.zeros(()), "w": np.zeros(1)}
        >>> victim.gradient(Level(None), start)["w"].round(4).tolist()
        [-0.7071]
        """
        moved = next(self.answers(level, iter([model]), 1))
        scale = len(self.y) / self.recipe.learning_rate
        return {name: scale * (np.asarray(model[name]) - moved[name]) for name in moved}


SEED = 0  # of the split and the first model; nothing that protects anybody comes from it
FEWEST, MOST = 16, 1000  # rows to be guessed at, of all clients together
HIDDEN = 32  # of the mlp that stands for another kind of model


@dataclass(frozen=True, eq=False)
class Target:
    """A federation as a curious server meets it, with the rows that it tries to guess."""

    name: str
    plan: Plan
    is_own_model: bool  # whether `form` is the plan's model; otherwise an mlp stands for it
    form: Form
    model: Parameters
    recipe: Recipe
    epsilon: float
    delta: float
    x: Rows  # one client's
    y: Labels
    pool_x: Rows  # of all clients: candidates, and what shadow runs train on
    pool_y: Labels
    public: Rows
    shape: tuple[int, ...]  # of a row as the model meets it
    uncovered: tuple[str, ...] = ()  # what this plan gives away beside what its budget pays for

    @property
    def pictures(self) -> tuple[int, int] | None:
        """Height and width, where a row is a picture of one colour or three."""
        if len(self.shape) == 3 and min(self.shape[:2]) > 1:
            return self.shape[0], self.shape[1]
        return None


def load_target(path: Path | None) -> Target:
    """Load the target that a plan or a run names; without one the embedded default.

    >>> found = load_target(None)
    >>> found.x.shape, found.form.options["hidden"], found.epsilon
    ((143, 64), 32, 8.0)
    """
    if path is not None and path.is_dir():
        plan, name = Plan(**Record.read(path).plan), path.name
    else:
        plan, name = Plan.load(path, []), "the embedded plan" if path is None else path.name
    if plan.data.name == "arrays":
        raise InputError.of("data.name", "arrays", "data that can be read", "audit a plan or table")
    federation = build(plan, seed=SEED)
    held = federation.held
    is_own_model = isinstance(federation.model, Mlp)
    model = (
        federation.model if is_own_model else Mlp(int(np.prod(held.inputs)), HIDDEN, held.classes)
    )
    assert isinstance(model, Mlp)
    trained = path is not None and path.is_dir() and is_own_model
    params = load(path).params if trained and path is not None else model.draw_parameters(SEED)
    rows = held.client(0)
    if len(held.train.y) < FEWEST:
        raise InputError.of(
            "data",
            len(held.train.y),
            f"at least {FEWEST} training rows",
            "there is too little to guess",
        )
    # Client after client they may have one label first: candidates are drawn from all.
    order = np.random.default_rng(SEED).permutation(len(held.train.y))
    return Target(
        name=name,
        plan=plan,
        is_own_model=is_own_model,
        form=model.form(),
        model={
            name: np.asarray(leaf, np.float64) for name, leaf in flatten_parameters(params).items()
        },
        recipe=Recipe(plan.local.learning_rate, federation.recipe.clip, unit=plan.local.unit),
        epsilon=float(np.max(federation.epsilon)),
        delta=float(np.max(federation.delta)),
        x=rows.x.astype(np.float64),
        y=rows.y.astype(np.int64),
        pool_x=held.train.x[order[:MOST]].astype(np.float64),
        pool_y=held.train.y[order[:MOST]].astype(np.int64),
        public=held.validation.x.astype(np.float64),
        shape=held.inputs,
        uncovered=_list_uncovered(federation),
    )


def _list_uncovered(federation: Federation) -> tuple[str, ...]:
    """Return the codes that are peculiar to this plan's guarantee; noise here is a device's."""
    guarantee = federation.guarantee()
    assert guarantee is not None, "a plan states its budgets"
    usual = {*ALWAYS_NOT_COVERED, "simulated-noise"}
    return tuple(code for code in guarantee.not_covered if code not in usual)
