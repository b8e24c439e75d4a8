"""What is attacked: the plan's data, a model that an honest server would send, the recipe."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from sottovoce.client.release import Parameters
from sottovoce.errors import InputError
from sottovoce.models.base import Mlp
from sottovoce.models.form import Form
from sottovoce.models.names import named
from sottovoce.plan import Plan
from sottovoce.privacy.budget import ALWAYS_NOT_COVERED
from sottovoce.privacy.sensitivity import Recipe
from sottovoce.runs import record as records
from sottovoce.runs.trained import load
from sottovoce.server.federation import Federation, build
from sottovoce.server.scoring import first_model
from sottovoce.studies.audit.uploads import Labels, Rows

SEED = 0  # of the split and the first model; nothing that protects anybody comes from it
FEWEST, MOST = 16, 1000  # rows to be guessed at, of all clients together
HIDDEN = 32  # of the mlp that stands for another kind of model


@dataclass(frozen=True, eq=False)
class Target:
    """A federation as a curious server meets it, with one client's rows to be guessed."""

    name: str
    plan: Plan
    own: bool  # whether `form` is the plan's own model; otherwise an mlp stands for it
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


def target(path: Path | None) -> Target:
    """The target that PLAN or RUN names; without one the embedded default.

    >>> found = target(None)
    >>> found.x.shape, found.form.hidden, found.epsilon
    ((143, 64), 32, 8.0)
    """
    if path is not None and path.is_dir():
        plan, name = Plan(**records.read(path)["plan"]), path.name
    else:
        plan, name = Plan.load(path, []), "the embedded plan" if path is None else path.name
    if plan.data.name == "arrays":
        raise InputError.of("data.name", "arrays", "data that can be read", "audit a plan or table")
    federation = build(plan, seed=SEED)
    held = federation.held
    own = isinstance(federation.model, Mlp)
    model = federation.model if own else Mlp(int(np.prod(held.inputs)), HIDDEN, held.classes)
    assert isinstance(model, Mlp)
    trained = path is not None and path.is_dir() and own
    params = load(path).params if trained and path is not None else first_model(model, SEED)
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
        own=own,
        form=Form("mlp", (model.features,), model.classes, hidden=model.hidden),
        model={name: np.asarray(leaf, np.float64) for name, leaf in named(params).items()},
        recipe=Recipe(plan.local.learning_rate, federation.recipe.clip, unit=plan.local.unit),
        epsilon=float(np.max(federation.epsilon)),
        delta=float(np.max(federation.delta)),
        x=rows.x.astype(np.float64),
        y=rows.y.astype(np.int64),
        pool_x=held.train.x[order[:MOST]].astype(np.float64),
        pool_y=held.train.y[order[:MOST]].astype(np.int64),
        public=held.validation.x.astype(np.float64),
        shape=held.inputs,
        uncovered=_uncovered(federation),
    )


def _uncovered(federation: Federation) -> tuple[str, ...]:
    """Codes of what the plan's own guarantee leaves out; noise is a device's here, always."""
    told = federation.guarantee()
    assert told is not None, "a plan tells its budgets"
    usual = {*ALWAYS_NOT_COVERED, "simulated-noise"}
    return tuple(code for code in told.not_covered if code not in usual)
