"""From a plan to everything that runs: clients, validation and test sets, model, schedule, tanks.

`build(plan)` is used by every engine. Data are read here, after the whole plan has been checked.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from sottovoce.data.federated import Given, Holdings, hold, seen
from sottovoce.errors import InputError
from sottovoce.models.base import AnyModel, first, own_model
from sottovoce.models.base import build as build_model
from sottovoce.models.clipping import gradient_norms
from sottovoce.models.gradients import ForeignModel
from sottovoce.plan import Plan
from sottovoce.privacy import calibration, gaussian, seeds
from sottovoce.privacy.budget import (
    ALWAYS_NOT_COVERED,
    Budget,
    Calibration,
    Guarantee,
    evaluation_code,
)
from sottovoce.privacy.gaussian import Floats
from sottovoce.privacy.seeds import Purpose
from sottovoce.privacy.sensitivity import Recipe
from sottovoce.privacy.tank import Tank
from sottovoce.schedules.aggregate import limit_samples
from sottovoce.schedules.base import Schedule
from sottovoce.schedules.fixed import FixedRounds
from sottovoce.schedules.optimizer import Finish
from sottovoce.schedules.pricing import Terms
from sottovoce.server.members import Account, Member

FEW_BUDGETS = 16  # different ones among the clients of a run
MEDIAN_OF = 4096  # rows that a median clip looks at


@dataclass(frozen=True, eq=False)
class Federation:
    """All that a run needs: the plan, who holds what, the model, and what each client may spend."""

    plan: Plan
    held: Holdings
    model: AnyModel
    recipe: Recipe
    epsilon: Floats
    delta: Floats
    sensitivity: Floats
    capacity: Floats
    schedule: Schedule
    terms: Terms
    calibrations: tuple[Calibration, ...] = ()  # of real clients' vaults; else the plan's
    counted: NDArray[np.int64] | None = None  # rows that an upload counts for; None: all it has

    @property
    def samples(self) -> NDArray[np.int64]:
        """How many rows each client holds."""
        return self.held.samples

    @cached_property
    def loss_sensitivity(self) -> Floats:
        """Δ_V of a client's mean loss, each cut to [0, B]: B/n for a record, B for all its data."""
        bound = self.plan.server.loss_bound or 0.0
        whole = self.plan.local.unit == "client"
        return np.full(len(self.samples), bound) if whole else bound / self.samples * (1 + 2**-50)

    @cached_property
    def dimension(self) -> int:
        """How many numbers the model has."""
        if isinstance(self.model, ForeignModel):
            return sum(math.prod(shape) for shape in self.model.shapes().values())
        form = jax.eval_shape(self.model.init, jax.random.key(0))
        return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(form))

    @property
    def divergence(self) -> float:
        """Γ²: as the plan says, or 0 where clients are alike and C² (its bound) elsewhere."""
        if self.plan.server.divergence is not None:
            return self.plan.server.divergence
        alike = self.held.split is not None and self.plan.data.split in ("iid", "sizes")
        return 0.0 if alike else self.recipe.clip**2

    @cached_property
    def finish(self) -> Finish:
        """What the server makes of the averaged uploads."""
        return self.plan.server.finish()

    def tank(self) -> Tank:
        """Every client's fuel, untouched."""
        return Tank.full(self.capacity)

    def _worth(self) -> Floats:
        """The μ² by which promises are compared; NaN where a client keeps its own to itself.

        Of what is promised, not of the tank: a vault tightened before its first release keeps the
        capacity of its first policy. On the exact curve, where whoever is worth less has every
        (ε, δ) of whoever is worth more, whichever calibration its vault has.
        """
        if self.plan.privacy.calibration == "paper":  # no vault has it: the tank is the promise
            return self.capacity
        told, worth = ~np.isnan(self.capacity), np.full(len(self.capacity), np.nan)
        pairs = np.stack([self.epsilon, self.delta], axis=1)[told]
        pairs, where = np.unique(pairs, axis=0, return_inverse=True)
        worth[told] = _worth_of(pairs, "exact", 1.0)[where.reshape(-1)]
        return worth

    def _holds(self, client: int) -> Budget:
        """The (ε, δ) that a client really has: what was asked for, unless the paper's noise is it.

        Under `paper` a client is charged in every round and so never releases more than its
        capacity; with a fixed number of rounds and balanced cohorts it takes part in ⌈qT⌉ of T
        only.
        """
        epsilon, delta = float(self.epsilon[client]), float(self.delta[client])
        if self.plan.privacy.calibration == "paper":
            mu2 = float(self.capacity[client])
            if isinstance(self.schedule, FixedRounds) and self.terms.cohort == "balanced":
                rounds, clients = self.schedule.rounds, self.terms.clients
                mu2 *= -(-self.terms.per_round * rounds // clients) / rounds
            epsilon = max(float(gaussian.epsilon(delta, np.sqrt(mu2))), 1e-6)
        return Budget(epsilon, delta)

    def not_covered(self, *also: str) -> tuple[str, ...]:
        """Codes of what no promise of this federation covers; `also` the engine alone knows."""
        plan, hidden = self.plan, np.isnan(self.capacity)
        missing = [*ALWAYS_NOT_COVERED, *also]
        if self.held.fresh_vaults:
            missing.append("fresh-vaults")
        if hidden.any() and not hidden.all():  # of all there is no figure to be beyond
            missing.append("undisclosed-budgets")
        if plan.noise == "simulated":
            missing.append("simulated-noise")
        if plan.server.signal == "raw":
            missing.append("raw-signal")
        if plan.local.clip == "median":
            missing.append("median-clip")
        if self.held.counted:
            missing.append("counted-classes")
        if self.held.layout is not None and self.held.layout.inferred:
            missing.append("inferred-columns")
        if plan.privacy.calibration == "paper":
            missing.append("paper-calibration")
        if plan.data.evaluates_on_clients:
            declared = plan.data.evaluation == "public"
            missing.append(evaluation_code(plan.local.unit, declared_public=declared))
        if np.any(self.delta * (self.samples if plan.local.unit == "record" else hidden.size) >= 1):
            missing.append("loose-delta")
        return tuple(dict.fromkeys(missing))

    def guarantee(self, *also: str) -> Guarantee | None:
        """What the loosest client is promised; None where every client keeps its budget to itself.

        `also` are codes of what else is not covered, known to the engine alone.
        """
        hidden = np.isnan(self.capacity)
        if hidden.all():
            return None
        plan, worth = self.plan, self._worth()
        loosest, tightest = int(np.nanargmax(worth)), None
        if np.ptp(self.epsilon[~hidden]) > 0 or np.ptp(self.delta[~hidden]) > 0:
            tightest = self._holds(int(np.nanargmin(worth)))
        kinds = self.calibrations
        own = kinds[loosest] if kinds else plan.privacy.calibration
        return Guarantee(
            self._holds(loosest),
            unit=plan.local.unit,
            calibration=own,
            not_covered=self.not_covered(*also),
            tightest=tightest,
            others=tuple(sorted(set(kinds) - {own})),
        )


def build(
    plan: Plan,
    *,
    seed: int,
    data: Given | None = None,
    model: AnyModel | None = None,
    held: Holdings | None = None,
) -> Federation:
    """The federation of a plan. The seed decides who holds what, unless that is given (`held`).

    >>> federation = build(Plan(), seed=1)
    >>> federation.samples.tolist()[:3], len(federation.held.test.y)
    ([143, 143, 143], 184)
    """
    _refuse_what_only_python_can_give(plan, data, model)
    held = hold(plan, seed=seed, data=data) if held is None else seen(plan, held)
    plan = told(plan, held)
    if plan.noise == "secure" and held.counted:
        raise InputError.of(
            "noise",
            "secure",
            "simulated where the classes are counted on the clients' labels",
            "give validation and test rows, which are public, beside the data",
        )
    model = _model(plan, held) if model is None else model
    median = _median_norm(model, held, seed) if plan.local.clip == "median" else 1.0
    recipe, (epsilon, delta) = plan.recipe(median), plan.budgets()
    return Federation(
        plan=plan,
        held=held,
        model=model,
        recipe=recipe,
        epsilon=epsilon,
        delta=delta,
        sensitivity=recipe.sensitivity(held.samples),
        capacity=_capacity(epsilon, delta, plan),
        schedule=plan.schedule(),
        terms=_terms(plan, recipe),
    )


def of_members(
    plan: Plan, members: Sequence[Member], held: Holdings, model: AnyModel | None = None
) -> Federation:
    """The federation of real clients: who they are and what they may spend, they say themselves.

    `held` has the server's public rows and no training rows. A client that keeps its budget to
    itself has NaN for it.
    """
    known = [member.account for member in members]
    kinds = tuple(member.calibration for member in members)
    own: dict[str, object] = {"noise": "secure", "data.clients": len(members)}
    if len(set(kinds)) == 1:
        own["privacy.calibration"] = kinds[0]  # theirs, whatever the plan says of it
    plan = plan.replace(**own | _budgets_of(plan, known))
    recipe, held = plan.recipe(), seen(plan, held)
    model = _model(plan, held) if model is None else model
    samples = np.array([member.samples for member in members], dtype=np.int64)
    sizes = plan.data.samples
    counted = limit_samples(
        [member.samples for member in members],
        [member.registered for member in members],
        planned=max(sizes) if isinstance(sizes, tuple) else sizes or 0,
    )
    return Federation(
        plan=plan,
        held=replace(held, samples=samples),
        model=model,
        recipe=recipe,
        epsilon=np.array([np.nan if a is None else a.epsilon for a in known]),
        delta=np.array([np.nan if a is None else a.delta for a in known]),
        sensitivity=recipe.sensitivity(samples),
        capacity=np.array([np.nan if a is None else a.capacity for a in known]),
        schedule=plan.schedule(),
        terms=_terms(plan, recipe),
        calibrations=kinds,
        counted=counted,
    )


def _budgets_of(plan: Plan, known: Sequence[Account | None]) -> dict[str, object]:
    told = [account for account in known if account is not None]
    if len(told) < len(known):
        if plan.server.weights == "precision":
            raise InputError.of(
                "server.weights",
                "precision",
                "samples where a client keeps its budget to itself",
                "precision weighs by what clients disclose",
            )
        return {}
    return {
        "privacy.epsilon": [account.epsilon for account in told],
        "privacy.delta": [account.delta for account in told],
    }


def _terms(plan: Plan, recipe: Recipe) -> Terms:
    return Terms(
        clients=plan.clients,
        per_round=plan.per_round,
        cohort=plan.rounds.cohort,
        calibration=plan.privacy.calibration,
        releases=recipe.releases,
    )


def _model(plan: Plan, held: Holdings) -> AnyModel:
    own = plan.model
    if own.own is not None:
        return own_model(own.own)
    options = {"hidden": own.hidden, "channels": own.channels, "kappa": own.kappa}
    return build_model(own.name, shape=held.inputs, classes=held.classes, **options)  # type: ignore[arg-type]


def _median_norm(model: AnyModel, held: Holdings, seed: int) -> float:
    """C as the paper chooses it: the median of raw gradient norms, here of the first model.

    It looks at the clients' rows without paying, so that the guarantee does not cover it.
    """
    if isinstance(model, ForeignModel):
        raise InputError.of("local.clip", "median", "a number with this model", "choose C")
    rng = seeds.generator(seed, Purpose.SPLIT, 1)
    rows = rng.permutation(len(held.train.y))[:MEDIAN_OF]
    key = jax.random.wrap_key_data(jnp.asarray(seeds.make_key_words(seed, Purpose.INIT)))
    norms = gradient_norms(
        model, first(model, key), jnp.asarray(held.train.x[rows]), jnp.asarray(held.train.y[rows])
    )
    clip = float(np.nanmedian(np.asarray(norms)))
    if not 1e-15 <= clip <= 1e15:
        raise InputError.of(
            "local.clip",
            clip,
            "a median of gradient norms from 1e-15 to 1e+15",
            "give a number instead, 1 is a good start",
        )
    return clip


def _capacity(epsilon: Floats, delta: Floats, plan: Plan) -> Floats:
    # A million clients have a handful of different budgets.
    pairs, where = np.unique(np.stack([epsilon, delta], axis=1), axis=0, return_inverse=True)
    if plan.noise == "secure":
        own = plan.privacy.calibration
        each = [calibration.vault_capacity(e, d, calibration=own) for e, d in pairs.tolist()]
        return np.array(each)[where.reshape(-1)]
    worth = _worth_of(pairs, plan.privacy.calibration, plan.per_round / plan.clients)
    return worth[where.reshape(-1)]


def _worth_of(pairs: Floats, own: Calibration, sampling: float) -> Floats:
    """The μ² of each (ε, δ); where they are few, the next run of a sweep finds them known."""
    if len(pairs) <= FEW_BUDGETS:
        return _remembered(tuple(map(tuple, pairs.tolist())), own, sampling)
    return calibration.capacity(pairs[:, 0], pairs[:, 1], calibration=own, sampling=sampling)


@lru_cache(256)
def _remembered(pairs: tuple[tuple[float, ...], ...], own: Calibration, sampling: float) -> Floats:
    each = np.array(pairs).reshape(-1, 2)
    return calibration.capacity(each[:, 0], each[:, 1], calibration=own, sampling=sampling)


def told(plan: Plan, held: Holdings) -> Plan:
    """The plan with what only the table could tell: the number of clients."""
    clients, classes = len(held.samples), held.classes
    if plan.data.path is None:
        return plan
    if plan.model.name == "svm" and classes != 2:
        raise InputError.of(
            "model.name",
            "svm",
            "softmax or mlp with data.path",
            f"the svm tells two classes apart and the label {plan.data.label} has {classes}",
        )
    if plan.data.clients not in (None, clients):
        raise InputError.of(
            "data.clients",
            plan.data.clients,
            f"{clients}, the clients of column {plan.data.client}",
            "leave it out, it follows from the table",
        )
    return plan.replace(**{"data.clients": clients})


def _refuse_what_only_python_can_give(
    plan: Plan, data: Given | None, model: AnyModel | None
) -> None:
    if data is None and plan.data.name == "arrays":
        raise InputError.of(
            "data.name",
            "arrays",
            "the name of a data set here",
            "arrays are given from Python, as simulate(plan, data=(X, y))",
        )
    if model is None and plan.model.name == "custom" and plan.model.own is None:
        raise InputError.of(
            "model.name",
            "custom",
            "svm, softmax, mlp or cnn here",
            "a model of your own is given from Python, as simulate(plan, model=…), or by model.own",
        )
