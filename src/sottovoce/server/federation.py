"""Build everything that a run needs from a plan: clients, public rows, model, schedule, guarantee.

`build(plan)` is used by every engine; it reads data after the whole plan has been checked.
`score_model`, `judge_model` and `measure_model` say how good a model is.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from numbers import Real
from typing import Any, NamedTuple, TypeAlias, cast
from weakref import WeakKeyDictionary

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from sottovoce.data.federated import (
    Given,
    Holdings,
    Samples,
    add_features,
    deal_anew,
    load_holdings,
    summarise_fairness,
)
from sottovoce.errors import InputError
from sottovoce.models import metrics
from sottovoce.models.base import JaxModel, Model, Params, arrange_scores, find_model, take_numbers
from sottovoce.models.base import build as build_model
from sottovoce.models.clipping import answer_models, find_shortfall, gradient_norms
from sottovoce.models.custom import adopt_model, load_own_model, require_fitting
from sottovoce.models.network import Network
from sottovoce.models.person import PersonModel
from sottovoce.plan import Plan
from sottovoce.privacy import budget, calibration, gaussian, seeds
from sottovoce.privacy.gaussian import Floats
from sottovoce.privacy.seeds import Purpose
from sottovoce.privacy.sensitivity import Recipe
from sottovoce.privacy.tank import Tank
from sottovoce.runs.checkpoint import ServerState
from sottovoce.runs.record import MOST_CONFUSED, MOST_NAMED, ClientResult
from sottovoce.schedules.aggregate import limit_samples
from sottovoce.schedules.algorithms import SCHEDULES, FixedRounds, ForecastRounds
from sottovoce.schedules.base import CheckedSchedule, Schedule
from sottovoce.schedules.optimizer import Finish, Leaves
from sottovoce.schedules.pricing import Terms, plan_turns
from sottovoce.schemas import ModelView
from sottovoce.server.members import Member

FEW_BUDGETS = 16  # different budgets of a run's clients, whose capacities are cached
MEDIAN_ROWS = 4096  # whose gradient norms give a median clip


UserMetric: TypeAlias = Callable[[NDArray[Any], NDArray[Any]], float]  # labels × scores


@dataclass(frozen=True, eq=False)
class Parts:
    """The parts of a run that are objects from Python instead of names in a plan.

    They get public values only: a schedule gets losses, an optimiser averaged uploads, a metric
    public rows. A partition deals rows before anything is promised about them.
    """

    schedule: Schedule | None = None
    optimizer: Any = None  # an optax.GradientTransformation
    partition: Any = None  # a `Partition`
    metrics: Mapping[str, UserMetric] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.schedule is not None and type(self.schedule) not in SCHEDULES.values():
            object.__setattr__(self, "schedule", CheckedSchedule(self.schedule))
        if self.partition is not None and not callable(self.partition):
            bound, remedy = "a function of (labels, clients, rng)", "it returns each row's client"
            raise InputError.of("partition", self.partition, bound, remedy)
        fit = isinstance(self.metrics, Mapping) and all(map(callable, self.metrics.values()))
        if not fit or {*self.metrics} & {*metrics.TITLES} or not all(map(str, self.metrics)):
            bound = "functions of (labels, scores) by names that are not those of a plan's metrics"
            raise InputError.of("metrics", self.metrics, bound, "give {name: function}")

    def list_names(self) -> tuple[str, ...]:
        """Return the qualified names, as the record's plan has them.

        >>> Parts(metrics={"worst": np.min}).list_names()
        ('metrics: worst = numpy.min',)
        """
        schedule = getattr(self.schedule, "given", self.schedule)
        parts = {
            "schedule": None if schedule is None else type(schedule),
            "optimizer": getattr(self.optimizer, "update", self.optimizer),
            "partition": self.partition,
        }
        named = [f"{kind}: {_name_part(part)}" for kind, part in parts.items() if part is not None]
        named += [f"metrics: {name} = {_name_part(part)}" for name, part in self.metrics.items()]
        return tuple(text[:200] for text in named)


def _name_part(part: Any) -> str:
    named = part if hasattr(part, "__qualname__") or hasattr(part, "__name__") else type(part)
    return f"{named.__module__}.{getattr(named, '__qualname__', named.__name__)}"


log = logging.getLogger("sottovoce.federation")
FEWEST_ROWS = 40  # public rows that a forecast needs
NO_PARTS = Parts()


def _widen_state(leaf: Any) -> jax.Array:
    """Return an array of an optimiser's state as a checkpoint can hold it: no bfloat16."""
    return jnp.asarray(leaf, jnp.float32 if leaf.dtype == jnp.bfloat16 else leaf.dtype)


@jax.tree_util.register_static
@dataclass(frozen=True)
class OptaxStep:
    """The server's step by an optax transformation, whose gradient is w − w̄.

    The transformation sees the parameters as a tuple of arrays. `optax.sgd(1.0)` gives w̄.
    """

    transformation: Any

    @property
    def name(self) -> str:
        """The qualified name of its update."""
        return _name_part(self.transformation.update)

    def begin(self, first: Leaves) -> Leaves:
        """Return the state before the first round, its leaves by number."""
        state = self.transformation.init(tuple(jnp.asarray(leaf) for leaf in first.values()))
        leaves = enumerate(jax.tree.leaves(state))
        return {f"{i:06d}": np.asarray(_widen_state(leaf)) for i, leaf in leaves}

    def step(
        self, state: Leaves, previous: Leaves, averaged: Leaves
    ) -> tuple[dict[Any, Any], Leaves]:
        """Return the next model and state; numpy's arrays where the models are numpy's."""
        is_numpy = isinstance(next(iter(previous.values())), np.ndarray)
        params = tuple(jnp.asarray(leaf) for leaf in previous.values())
        gradient = tuple(w - averaged[name] for name, w in zip(previous, params, strict=True))
        form = jax.eval_shape(self.transformation.init, params)
        leaves = iter(state.values())
        before = jax.tree.map(lambda leaf: jnp.asarray(next(leaves), leaf.dtype), form)
        updates, after = self.transformation.update(gradient, before, params)
        model = dict(zip(previous, jax.tree.map(jnp.add, params, updates), strict=True))
        memory = dict(zip(state, map(_widen_state, jax.tree.leaves(after)), strict=True))
        return jax.tree.map(np.asarray, (model, memory)) if is_numpy else (model, memory)

    def require_fit(self, model: Model) -> None:
        """Refuse what is no transformation, or changes the form of the model or of its state."""
        try:
            first = {name: np.zeros(form, np.float32) for name, form in model.shapes().items()}
            state = self.begin(first)
            forms = jax.eval_shape(self.step, state, first, first)
            fits = [leaf.shape for leaf in jax.tree.leaves(forms)] == [
                leaf.shape for leaf in jax.tree.leaves((first, state))
            ]
        except Exception as error:  # the user's code may raise anything
            fits, why = False, f"{type(error).__name__}: {error}".splitlines()[0][:120]
        else:
            why = "its update changes the shape of the parameters or of its state"
        if not fits:
            raise InputError.of(
                "optimizer", self.transformation, "an optax.GradientTransformation", why
            )


@dataclass(frozen=True, eq=False)
class Federation:
    """All that a run needs: plan, rows, model, schedule, and what each client may spend.

    >>> federation = Federation.of(Plan(), seed=1)
    >>> federation.dimension, federation.guarantee().budget
    (2410, Budget(epsilon=8.0, delta=1e-05))
    """

    plan: Plan
    held: Holdings
    model: Model
    epsilon: Floats
    delta: Floats
    capacity: Floats
    median: float = 1.0  # the clipping norm, where the plan says median
    calibrations: tuple[budget.Calibration, ...] = ()  # of real clients' vaults; empty: the plan's
    sum_promises: tuple[tuple[int, int], ...] = ()  # likewise (`Member.sum_promise`)
    counted: NDArray[np.int64] | None = None  # samples that an upload counts for; None: all
    unregistered: NDArray[np.bool_] | None = None  # clients whose noise is limited; None: nobody's
    parts: Parts = NO_PARTS

    @staticmethod
    def of(plan: Plan, *, seed: int, data: Given | None = None) -> Federation:
        """Return the federation of a plan before its first round; the seed deals the rows."""
        return build(plan, seed=seed, data=data)

    @property
    def samples(self) -> NDArray[np.int64]:
        """How many samples each client holds."""
        return self.held.samples

    @property
    def evaluates_on_clients(self) -> bool:
        """Whether the server validates or tests on rows of clients."""
        data = self.plan.data
        return data.evaluates_on_clients or bool(data.keys_of_table) or self.held.tests_clients

    @cached_property
    def recipe(self) -> Recipe:
        """What a client computes in a round."""
        return self.plan.recipe(self.median)

    @cached_property
    def schedule(self) -> Schedule:
        """The schedule from Python, or else the plan's."""
        return self.plan.schedule() if self.parts.schedule is None else self.parts.schedule

    @cached_property
    def terms(self) -> Terms:
        """The public numbers that each client's noise depends on."""
        return Terms(
            clients=self.plan.clients,
            per_round=self.plan.per_round,
            cohort=self.plan.rounds.cohort,
            calibration=self.plan.privacy.calibration,
            releases=self.recipe.releases,
            honest=self.plan.privacy.honest or 1,
            corrupt=self.plan.privacy.corrupt or 0,
        )

    @cached_property
    def sensitivity(self) -> Floats:
        """Δ of one release of each client."""
        return self.recipe.sensitivity(self.samples)

    @cached_property
    def loss_sensitivity(self) -> Floats:
        """Δ_V of a client's mean loss, clipped to [0, B]: B/n for a record, B for all its data."""
        bound = self.plan.server.loss_bound or 0.0
        whole = self.plan.local.unit == "client"
        return np.full(len(self.samples), bound) if whole else bound / self.samples * (1 + 2**-50)

    @cached_property
    def dimension(self) -> int:
        """How many parameters the model has."""
        return sum(math.prod(shape) for shape in self.model.shapes().values())

    @property
    def divergence(self) -> float:
        """Γ²: the plan's, or else 0 where the split makes clients alike, and C² elsewhere."""
        if self.plan.server.divergence is not None:
            return self.plan.server.divergence
        are_alike = self.held.split is not None and self.plan.data.split in ("iid", "sizes")
        are_alike = are_alike and self.parts.partition is None
        return 0.0 if are_alike else self.recipe.clip**2

    @cached_property
    def finish(self) -> Finish:
        """The server's optimiser."""
        finish, optimizer = self.plan.server.finish(), self.parts.optimizer
        if optimizer is not None:  # whose steps are the user's, so that no forecast scales them
            return replace(finish, transformation=OptaxStep(optimizer))
        return replace(finish, is_step_free=isinstance(self.schedule, ForecastRounds))

    @cached_property
    def metric(self) -> str:
        """The metric that heads the result; where the plan names none, public labels decide."""
        if self.plan.metric is not None:
            return self.plan.metric
        if self.held.target is not None:
            return "mae"
        labels = np.concatenate([self.held.validation.y, self.held.test.y])
        return metrics.choose_metric(labels, self.held.classes)

    def tank(self) -> Tank:
        """Return every client's tank, full."""
        return Tank.full(self.capacity)

    def _compute_worth(self) -> Floats:
        """Return the μ² by which promises are compared; NaN for a client that hides its budget.

        It is computed from the promised (ε, δ), not from the tank: a vault that is tightened before
        its first release keeps the capacity of its first policy. The exact curve is used whatever a
        vault's calibration is, because on it a smaller μ² is a stronger promise at every (ε, δ).
        """
        if self.plan.privacy.calibration == "paper":  # not for vaults: the tank is the promise
            return self.capacity
        disclosed, worth = ~np.isnan(self.capacity), np.full(len(self.capacity), np.nan)
        epsilon, delta = self.epsilon[disclosed], self.delta[disclosed]
        worth[disclosed] = _compute_capacity(epsilon, delta, "exact")
        return worth

    def _find_true_epsilon(self, clients: int | slice) -> Floats:
        """Return the ε that holds for clients: what was asked for, except under `paper`.

        Under `paper` a client is charged in every round, and so never releases more than its
        capacity. With a fixed number of rounds and balanced cohorts it takes part in only ⌈qT⌉ of T
        rounds.
        """
        if self.plan.privacy.calibration != "paper":
            return self.epsilon[clients]
        mu2 = self.capacity[clients]
        if isinstance(self.schedule, FixedRounds) and self.terms.cohort == "balanced":
            rounds = self.schedule.rounds
            mu2 = mu2 * (-(-self.terms.per_round * rounds // self.terms.clients) / rounds)
        return np.maximum(gaussian.epsilon(self.delta[clients], np.sqrt(mu2)), 1e-6)

    def _find_true_budget(self, client: int) -> budget.Budget:
        """Return the (ε, δ) that holds for a client."""
        epsilon = float(self._find_true_epsilon(client))
        return budget.Budget(epsilon, float(self.delta[client]))

    def not_covered(self, *also: str) -> tuple[str, ...]:
        """Return codes of what the promise does not cover; `also` are those of the engine."""
        plan, held, hidden = self.plan, self.held, np.isnan(self.capacity)
        unit, declared = plan.local.unit, plan.data.evaluation == "public"
        units = hidden.size if unit == "client" else self.samples
        conditions = {
            "fresh-vaults": held.fresh_vaults,
            # If all are hidden, no figure is stated.
            "sums-elsewhere": plan.privacy.view == "upload"
            and any(honest > 1 for honest, _ in self.sum_promises),
            "undisclosed-budgets": hidden.any() and not hidden.all(),
            "simulated-noise": plan.noise == "simulated",
            "raw-signal": plan.server.signal == "raw",
            "median-clip": plan.local.clip == "median",
            "counted-classes": held.counted,
            "inferred-columns": held.layout is not None and held.layout.inferred,
            "paper-calibration": plan.privacy.calibration == "paper",
            budget.evaluation_code(unit, declared_public=declared): self.evaluates_on_clients,
            "loose-delta": np.any(self.delta * units >= 1),
        }
        codes = (code for code, holds in conditions.items() if holds)
        always = budget.list_always_not_covered(unit)
        also = tuple(c for c in also if c in always or c not in budget.ALWAYS_NOT_COVERED)
        return tuple(dict.fromkeys([*always, *also, *codes]))

    def advise(self) -> list[str]:
        """Return advice on the promise and its noise, from public numbers alone.

        The noise is that of the planned number of rounds, averaged with the weights of the samples.
        """
        disclosed = ~np.isnan(self.capacity)
        if not disclosed.any():
            return []
        plan, samples = self.plan, self.samples[disclosed]
        is_client, rounds = plan.local.unit == "client", plan.rounds.rounds
        units = np.full(len(samples), len(disclosed)) if is_client else samples
        loosest = int(np.argmax(self.delta[disclosed] * units))
        turns = plan_turns(
            plan.rounds.cohort, rounds=rounds, clients=len(disclosed), per_round=plan.per_round
        )
        steps = self.recipe.releases
        worth = self.capacity[disclosed] * self.terms.honest  # the others' noise counts, too
        sigma2 = self.sensitivity[disclosed] ** 2 * turns * steps / worth
        share = samples / samples.sum()
        noise = budget.weigh_noise(
            math.sqrt(float((share**2 * sigma2).sum()) * len(disclosed)),
            rounds=rounds * steps,
            per_round=plan.per_round,
            parameters=self.dimension,
            step=self.recipe.learning_rate * self.recipe.clip,
        )
        return budget.advise(
            float(self.epsilon[disclosed].max()),
            float(self.delta[disclosed][loosest]),
            int(units[loosest]),
            unit=plan.local.unit,
            noise=noise,
            size=len(disclosed) if is_client else float(samples.mean()),
        )

    def log_advice(self) -> None:
        """Log the advice; call it before the first round, when nobody has paid yet."""
        for sentence in self.advise():
            log.warning("%s", sentence)

    def guarantee(self, *also: str) -> budget.Guarantee | None:
        """Return what the loosest client is promised; None where every client hides its budget.

        `also` are codes of what else is not covered, which only the engine knows.
        """
        hidden = np.isnan(self.capacity)
        if hidden.all():
            return None
        plan, worth = self.plan, self._compute_worth()
        loosest, tightest = int(np.nanargmax(worth)), None
        if np.ptp(self.epsilon[~hidden]) > 0 or np.ptp(self.delta[~hidden]) > 0:
            tightest = self._find_true_budget(int(np.nanargmin(worth)))
        kinds, epsilon_alone, corrupt = self.calibrations, None, self.terms.corrupt
        if plan.privacy.view == "sum":
            # By its own noise a release costs at most h times what is booked (`share_noise`): most
            # for the largest capacity, which a client with a tighter promise may have. Sums of
            # earlier runs may have had a larger h, or a smaller c.
            honest, others = zip(*self.sum_promises or [(1, corrupt)], strict=True)
            most_alone = np.nanmax(np.maximum(self.terms.honest, honest) * self.capacity)
            corrupt = min(corrupt, *others)
            epsilon_alone = float(calibration.bound_epsilon(self.delta[loosest], most_alone))
        kind = kinds[loosest] if kinds else plan.privacy.calibration
        return budget.Guarantee(
            self._find_true_budget(loosest),
            unit=plan.local.unit,
            calibration=kind,
            not_covered=self.not_covered(*also),
            tightest=tightest,
            others=tuple(sorted(set(kinds) - {kind})),
            corrupt=corrupt,
            epsilon_alone=epsilon_alone,
        )

    def observe_models(
        self, state: ServerState, *, finished: bool
    ) -> tuple[ModelView, Floats | None] | None:
        """Return what holds against whoever sees the models of all rounds, but no upload.

        The entry of the record, and ε[clients, colluding] or None where nothing can be stated. None
        if the server itself sees no more than sums, or every client hides its budget.
        """
        disclosed = ~np.isnan(self.capacity)
        if self.plan.privacy.view == "sum" or not disclosed.any():
            return None
        clients = len(disclosed)
        colluding = sorted({0, min(1, clients - 1), self.plan.privacy.corrupt or 0})
        mu2, why = self._sum_model_views(state, colluding, finished)
        if mu2 is None:
            text = f"Against whoever sees only the models no smaller ε is stated: {why}."
            return {"colluding": colluding, "text": text}, None
        rows = slice(mu2.shape[1])  # one stands for all where they are equal
        epsilon = calibration.bound_epsilon(self.delta[rows], mu2)
        epsilon = np.minimum(epsilon, self._find_true_epsilon(rows))
        largest, delta, unit = epsilon.max(axis=1).tolist(), self.delta.max(), self.plan.local.unit
        text = budget.describe_model_view(colluding, largest, float(delta), unit, self.plan.noise)
        by_client = np.broadcast_to(epsilon.T, (clients, len(colluding)))
        return {"colluding": colluding, "epsilon": largest, "text": text}, by_client

    def _sum_model_views(
        self, state: ServerState, colluding: Sequence[int], finished: bool
    ) -> tuple[Floats | None, str]:
        """Return μ²[colluding, clients] of the models, or None and why (docs/proofs.md, (e))."""
        if {*self.not_covered()} & {*budget.LEAKS}:
            return None, "values that nobody paid for left the clients"
        hidden = "some clients do not disclose their budgets"
        if np.isnan(self.capacity).any():
            return None, hidden
        if self.recipe.releases > 1:
            return None, "between the steps of a round a client has only its own noise"
        if self.plan.server.aggregation not in (None, "mean"):
            return None, "the uploads are not averaged with weights that are known in advance"
        if self.schedule.steady and finished and len(state.weight) == len(state.rounds):
            weight, sigma = np.array([state.weight, state.sigma]).reshape(2, -1, len(self.capacity))
            views = [
                calibration.sum_model_mu2(weight, sigma, self.sensitivity, c) for c in colluding
            ]
            # One that hid its noise for a while: figures of others would tell of it, too (R9).
            return (None, hidden) if np.isnan(views).any() else (np.array(views), "")
        values_of_clients = [self.samples, self.epsilon, self.delta, self.capacity]
        if self.calibrations or any(np.ptp(values) > 0 for values in values_of_clients):
            return None, "rounds and noise were not fixed in advance, or not all were played"
        if self.terms.per_round < self.terms.clients:
            return None, "rounds were not fixed in advance, and other clients take part in each"
        # Equal clients that are all in every round: the ratio to what is booked is 1/(K − c).
        return np.array([self.capacity[:1] / (len(self.capacity) - c) for c in colluding]), ""


def build(
    plan: Plan,
    *,
    seed: int,
    data: Given | None = None,
    model: Any = None,
    held: Holdings | None = None,
    parts: Parts = NO_PARTS,
) -> Federation:
    """Build the federation of a plan. The seed decides who holds what, unless `held` is given.

    A plan that names `parts` is built with the same parts only.

    >>> federation = build(Plan(), seed=1)
    >>> federation.samples.tolist()[:3], len(federation.held.test.y)
    ([143, 143, 143], 184)
    """
    if data is None and plan.data.name == "arrays":
        remedy = "arrays are given from Python, as simulate(plan, data=(X, y))"
        raise InputError.of("data.name", "arrays", "the name of a data set here", remedy)
    if model is None and plan.model.name == "custom" and plan.model.own is None:
        bound = f"{plan.model.list_fitting(None, are_pictures=True)} here"
        remedy = (
            "a model of your own is given from Python, as simulate(plan, model=…), or by model.own"
        )
        raise InputError.of("model.name", "custom", bound, remedy)
    _require_same_parts(plan, parts)
    held = load_holdings(plan, seed=seed, data=data) if held is None else add_features(plan, held)
    plan = _note_network(plan, held)
    if parts.partition is not None:
        held = deal_anew(held, parts.partition, seeds.generator(seed, Purpose.SPLIT, 2))
    plan = add_client_count(plan, held)
    if plan.noise == "secure" and held.counted:
        bound = "simulated where the classes are counted on the clients' labels"
        remedy = "give public validation and test rows, or list the classes in data.columns"
        raise InputError.of("noise", "secure", bound, remedy)
    model = _choose_model(plan, held, model)
    if plan.rows_per_person and isinstance(model, JaxModel):
        is_number = held.target is not None
        model = PersonModel(model, plan.rows_per_person, math.prod(held.inputs), is_number)
    median = _measure_median_norm(model, held, seed) if plan.local.clip == "median" else 1.0
    plan = plan.choose_learning_rate(held.samples, plan.recipe(median).clip)
    epsilon, delta = plan.budgets()
    if parts.optimizer is not None:
        OptaxStep(parts.optimizer).require_fit(model)
    sampling = None if plan.noise == "secure" else plan.per_round / plan.clients
    capacity = _compute_capacity(epsilon, delta, plan.privacy.calibration, sampling)
    obstacle = _explain_no_forecast(plan, held, model, capacity)
    if obstacle is not None and isinstance(parts.schedule, ForecastRounds):
        raise InputError.of("schedule", parts.schedule, "one without a forecast here", obstacle)
    if parts.schedule is None:
        plan = _settle_schedule(plan, obstacle)
    elif plan.rounds.schedule == "forecast":  # a schedule from Python stands instead
        plan = plan.replace(**{"rounds.schedule": "discounted"})
    return Federation(plan, held, model, epsilon, delta, capacity, median, parts=parts)


def _settle_schedule(plan: Plan, obstacle: str | None) -> Plan:
    """Return the plan, discounted where its rounds cannot be forecast; log the obstacle once."""
    if plan.rounds.schedule != "forecast" or obstacle is None:
        return plan
    _warn_once(f"rounds.schedule = forecast becomes discounted: {obstacle}")
    return plan.replace(**{"rounds.schedule": "discounted"})


def _explain_no_forecast(plan: Plan, held: Holdings, model: Model, capacity: Floats) -> str | None:
    rows = 0 if plan.data.validation == 0 else len(held.validation.y)  # test rows choose nothing
    if rows < FEWEST_ROWS:
        return f"it needs {FEWEST_ROWS} public rows (data.validation), and there are {rows}"
    if not isinstance(model.code, JaxModel):
        return "only steps of a model in JAX can be compiled for it"
    return "no client discloses a budget" if np.isnan(capacity).all() else None


@lru_cache(maxsize=64)
def _warn_once(sentence: str) -> None:
    log.warning("%s", sentence)


def _note_network(plan: Plan, held: Holdings) -> Plan:
    """Return the plan with the hash of the network whose features the rows are."""
    if not isinstance(held.features, Network):
        return plan
    return plan.replace(**{"model.features_sha256": held.features.sha256})


def build_from_members(
    plan: Plan,
    members: Sequence[Member],
    held: Holdings,
    model: Model | None = None,
    *,
    is_begun: bool = False,
) -> Federation:
    """Build the federation of real clients, who declare themselves what they hold and may spend.

    `held` has the server's public rows and no training rows. A client that hides its budget has NaN
    for it. The schedule of a run that `is_begun` stays, whoever hides a budget by then.
    """
    accounts = [member.account for member in members]
    kinds = tuple(member.calibration for member in members)
    changes: dict[str, object] = {"noise": "secure", "data.clients": len(members)}
    # A plan lists what it expects of each client, and others may have come: the most samples, and
    # the tightest budget, are what a client that hides its numbers is held to.
    for key, values, choose in (
        ("data.samples", plan.data.samples, max),
        ("privacy.epsilon", plan.privacy.epsilon, min),
        ("privacy.delta", plan.privacy.delta, min),
    ):
        if isinstance(values, tuple) and len(values) != len(members):
            changes[key] = choose(values)
    if len(set(kinds)) == 1:
        changes["privacy.calibration"] = kinds[0]  # the vaults', whatever the plan says
    disclosing = [member for member in members if member.account is not None]
    disclosed = [account for account in accounts if account is not None]
    if len(disclosed) == len(accounts):
        changes["privacy.epsilon"] = [account.epsilon for account in disclosed]
        changes["privacy.delta"] = [account.delta for account in disclosed]
    elif plan.server.weights == "precision":
        bound = "samples where a client keeps its budget to itself"
        remedy = "precision weighs by what clients disclose"
        raise InputError.of("server.weights", "precision", bound, remedy)
    plan = plan.replace(**changes)
    sizes = plan.data.samples
    samples = np.array([member.samples for member in members], dtype=np.int64)
    counted = limit_samples(
        samples.tolist(),
        [member.registered for member in members],
        planned=max(sizes) if isinstance(sizes, tuple) else sizes or 0,
    )
    unregistered: NDArray[np.bool_] | None = None
    if plan.privacy.view == "sum":  # no upload is seen that could count for less
        counted = samples
    else:
        unregistered = np.array([member.registered is None for member in members])
    if plan.local.learning_rate == "auto":
        # The step stands in the record: it must not tell the samples of a client that hides.
        if not disclosing:
            raise InputError.of(
                "local.learning_rate", "auto", "a number where no client discloses", "choose η"
            )
        claims = limit_samples([m.samples for m in disclosing], [m.registered for m in disclosing])
        plan = plan.choose_learning_rate(np.resize(claims, len(members)), plan.recipe().clip)
    held = add_features(plan, held)
    plan = _note_network(plan, held)
    _require_same_parts(plan, NO_PARTS)
    if plan.regression != held.target:
        kind = (
            "classes" if held.target is None else "a number in another range or with another loss"
        )
        bound = f"that of the public rows, which hold {kind}"
        raise InputError.of("model.loss", plan.model.loss, bound, "mend it")
    model = _choose_model(plan, held, model)
    hidden = (np.nan, np.nan, np.nan)
    budgets = [hidden if a is None else (a.epsilon, a.delta, a.capacity) for a in accounts]
    epsilon, delta, capacity = np.array(budgets).T.copy()
    if not is_begun:
        plan = _settle_schedule(plan, _explain_no_forecast(plan, held, model, capacity))
    if held.test_owner is not None:  # from sites, by the names of those that take part
        positions = {member.name: i for i, member in enumerate(members)}
        order = np.array([*(positions.get(name, -1) for name in held.names), -1], np.int32)
        names = tuple(member.name for member in members)
        held = replace(held, names=names, test_owner=order[held.test_owner])
    return Federation(
        plan,
        replace(held, samples=samples),
        model,
        epsilon,
        delta,
        capacity,
        calibrations=kinds,
        sum_promises=tuple(member.sum_promise for member in members),
        counted=counted,
        unregistered=unregistered,
    )


def _choose_model(plan: Plan, held: Holdings, model_from_python: Any) -> Model:
    """Return the plan's model, or the one given from Python; refuse one that does not fit."""
    weights, section = plan.class_weights, plan.model
    if weights is not None and len(weights) != held.classes:
        remedy = f"list {held.classes}, one for each class, in the order of the classes"
        raise InputError.of("model.class_weights", list(weights), f"{held.classes} numbers", remedy)
    if model_from_python is not None:
        model = adopt_model(model_from_python)
    elif section.own is not None:
        model = load_own_model(section.own)
    else:
        names = [option.name for option in find_model(section.name).options]
        model = build_model(
            section.name,
            shape=held.inputs,
            classes=held.classes,
            number_loss=section.loss,
            **{name: getattr(section, name, None) for name in names},
        )
    require_fitting(model, math.prod(held.inputs), held.classes, held.target is not None)
    return model


def _measure_median_norm(model: Model, held: Holdings, seed: int) -> float:
    """Return C as the paper chooses it: the median of raw gradient norms, here of the first model.

    It looks at the clients' rows without paying, so that the guarantee does not cover it.
    """
    if not isinstance(model, JaxModel):
        raise InputError.of("local.clip", "median", "a number with this model", "choose C")
    rng = seeds.generator(seed, Purpose.SPLIT, 1)
    rows = rng.permutation(len(held.train.y))[:MEDIAN_ROWS]
    x, y = jnp.asarray(held.train.x[rows]), jnp.asarray(held.train.y[rows])
    norms = gradient_norms(model, model.draw_parameters(seed), x, y)
    clip = float(np.nanmedian(np.asarray(norms)))
    if not 1e-15 <= clip <= 1e15:
        bound = "a median of gradient norms from 1e-15 to 1e+15"
        remedy = "give a number instead, 1 is a good start"
        raise InputError.of("local.clip", clip, bound, remedy)
    return clip


def _compute_capacity(
    epsilon: Floats, delta: Floats, kind: budget.Calibration, sampling: float | None = 1.0
) -> Floats:
    """Return the μ² of each client's (ε, δ); without a `sampling` rate, that of a vault.

    A few budgets are cached for the next run of a sweep.
    """
    # A million clients have a handful of different budgets.
    pairs, inverse = np.unique(np.stack([epsilon, delta], axis=1), axis=0, return_inverse=True)
    if sampling is None:
        capacities = [
            calibration.vault_capacity(*pair, calibration=kind) for pair in pairs.tolist()
        ]
        worth = np.array(capacities)
    elif len(pairs) <= FEW_BUDGETS:
        worth = _compute_cached(tuple(map(tuple, pairs.tolist())), kind, sampling)
    else:
        worth = calibration.capacity(*pairs.T, calibration=kind, sampling=sampling)
    return worth[inverse.reshape(-1)]


@lru_cache(256)
def _compute_cached(
    pairs: tuple[tuple[float, ...], ...], kind: budget.Calibration, sampling: float
) -> Floats:
    budgets = np.array(pairs).reshape(-1, 2)
    return calibration.capacity(budgets[:, 0], budgets[:, 1], calibration=kind, sampling=sampling)


def add_client_count(plan: Plan, held: Holdings) -> Plan:
    """Return the plan with the number of clients that its table has."""
    clients, classes = len(held.samples), held.classes
    if plan.data.path is None:
        return plan
    why_not = plan.model.explain_excess(classes, f"the label {plan.data.label}")
    if why_not is not None:
        fitting = plan.model.list_fitting(classes, are_pictures=plan.data.pictures)
        raise InputError.of("model.name", plan.model.name, f"{fitting} with data.path", why_not)
    if plan.data.clients not in (None, clients):
        bound = f"{clients}, the clients of column {plan.data.client}"
        remedy = "leave it out, it follows from the table"
        raise InputError.of("data.clients", plan.data.clients, bound, remedy)
    return plan.replace(**{"data.clients": clients})


def _require_same_parts(plan: Plan, parts: Parts) -> None:
    """Refuse parts that are not those which the plan names."""
    if (plan.parts or ()) != (names := parts.list_names()):
        expected = " and ".join(names) or "absent, because none is given from Python here"
        raise InputError(
            f"the parts of the plan must be {expected}, got {' and '.join(plan.parts or ())}; pass "
            "the same schedule, optimizer, partition and metrics as at the start of the run"
        )
    if parts.partition is None:
        return
    if plan.data.split != "iid":
        bound = "iid with a partition from Python"
        raise InputError.of("data.split", plan.data.split, bound, "it deals the rows instead")
    if plan.noise == "secure" and (plan.data.path is not None or plan.data.name == "arrays"):
        bound = "absent with noise = secure and your own rows"
        remedy = "dealt by their labels, one person's row moves the rows of every other client"
        raise InputError.of("partition", parts.partition, bound, remedy)


_PLACED: WeakKeyDictionary[Samples, tuple[jax.Array, jax.Array]] = WeakKeyDictionary()


def put_on_device(samples: Samples) -> tuple[jax.Array, jax.Array]:
    """Return the rows where JAX computes; they are copied once, however many runs use them.

    On a CPU the samples then show JAX's copy, so that the rows are held once.
    """
    if samples not in _PLACED:
        # One copy: `jnp.asarray` makes two of an array that does not begin at 64 bytes.
        x = jax.device_put(samples.x, may_alias=False)
        is_shown = jax.default_backend() == "cpu" and x.dtype == samples.x.dtype
        if is_shown and np.may_share_memory(np.asarray(x), samples.x):
            # It did alias one that does, and the caller may change it. numpy compiles no program.
            x = jax.device_put(samples.x.copy())
        _PLACED[samples] = x, jnp.asarray(samples.y)
        if is_shown:
            object.__setattr__(samples, "x", np.asarray(x))
    return _PLACED[samples]


def score_model(model: Model, params: Params, samples: Samples) -> tuple[float, float]:
    """Return mean loss and accuracy on these samples."""
    return model.evaluate(params, *_rows_for(model, samples))


def judge_model(federation: Federation, params: Params) -> tuple[float, float, float]:
    """Return loss and accuracy on the validation rows, and the number that steers the schedule.

    That is the loss, or what is missing of the plan's metric.
    """
    public, metric = federation.held.validation, federation.plan.metric
    loss, accuracy = score_model(federation.model, params, public)
    if metric is None:
        return loss, accuracy, loss
    predicted, scores = _answer(federation, params, public)
    if scores is None:
        classes = federation.held.classes
        raise InputError.of(
            "metric", metric, f"absent for a model without {classes} scores a row", "remove it"
        )
    missing = float(find_shortfall(metric, jnp.asarray(public.y), predicted, scores))
    if math.isnan(missing) and np.isfinite(scores).all():
        bound = "accuracy where all validation rows are of one class"
        raise InputError.of("metric", metric, bound, "give rows of every class, or remove it")
    return loss, accuracy, missing


def _rows_for(model: Model, samples: Samples) -> tuple[Any, Any]:
    """Return the rows where the model computes: on JAX's device, or as they are."""
    return put_on_device(samples) if isinstance(model, JaxModel) else (samples.x, samples.y)


class Answers(NamedTuple):
    """A model's answers on public rows, in numpy: all that `measure_model` needs of the model."""

    loss: float  # on the test rows
    accuracy: float
    predicted: NDArray[np.int64]
    scores: Floats | None
    fit_scores: Floats | None  # of the rows that a calibration is fitted on


def answer_rows(federation: Federation, params: Params) -> Answers:
    """Return a model's answers on the test rows, and on the rows to calibrate on."""
    test = federation.held.test
    loss, accuracy = score_model(federation.model, params, test)
    predicted, scores = _answer(federation, params, test)
    fit_rows, fit_scores = _choose_fitted(federation), None
    if scores is not None and fit_rows is not None:
        _, fit_scores = _answer(federation, params, federation.held.validation, fit_rows)
    return Answers(loss, accuracy, predicted, scores, fit_scores)


def answer_together(federation: Federation, models: Sequence[Params]) -> list[Answers]:
    """Return `answer_rows` of several JAX models on the same rows, from one launch.

    The models are copied to the host as well, where their hashes are computed. They are filled up
    to a power of two, so that few numbers of them are ever compiled.
    """
    model, held, fit_rows = federation.model, federation.held, _choose_fitted(federation)
    assert isinstance(model, JaxModel)
    fit_x = None if fit_rows is None else put_on_device(held.validation)[0][fit_rows]
    spare = (1 << (len(models) - 1).bit_length()) - len(models)
    padded = (*models, *[models[0]] * spare)
    answers = answer_models(model, padded, *put_on_device(held.test), fit_x)
    (losses, accuracies, predicted, scores, fit_scores), _ = jax.device_get((answers, models))
    return [
        Answers(
            float(losses[k]),
            float(accuracies[k]),
            predicted[k].astype(np.int64),
            _drop_unfit(federation, arrange_scores(scores[k])),
            None if fit_scores is None else _drop_unfit(federation, arrange_scores(fit_scores[k])),
        )
        for k in range(len(models))
    ]


def _choose_fitted(federation: Federation) -> slice | None:
    """Return the validation rows that a calibration is fitted on; None where there is none."""
    held = federation.held
    is_separate = held.validation is not held.test and federation.plan.data.validation != 0
    if held.target is not None or not is_separate:
        return None
    return metrics.choose_calibration_rows(held.validation.y, held.classes)


def measure_model(
    federation: Federation, params: Params, answers: Answers | None = None
) -> dict[str, Any]:
    """Return a model's entries of a record: metrics and curves on the test rows, calibration.

    The calibration is fitted on validation rows; where these are the test rows, there is none.
    `answers` are those of `answer_rows`, where they are known.
    """
    held, plan = federation.held, federation.plan
    loss, accuracy, predicted, scores, fit_scores = answers or answer_rows(federation, params)
    if held.target is not None:
        return _measure_numbers(federation, loss, scores)
    names = held.class_names if held.layout is None else held.layout.classes
    names = names or tuple(map(str, range(held.classes)))
    result: dict[str, Any] = {"test_loss": loss, "test_accuracy": accuracy}
    labels = held.test.y
    if held.classes <= MOST_CONFUSED:
        confusion = np.zeros((held.classes, held.classes), int)
        is_class = (predicted >= 0) & (predicted < held.classes)  # a custom model may say anything
        np.add.at(confusion, (labels[is_class], predicted[is_class]), 1)
        result["confusion"] = confusion.tolist()
    fit, fit_rows = None, _choose_fitted(federation)
    if fit_scores is not None:
        fit = metrics.fit_calibration(held.validation.y[fit_rows], fit_scores)
    calibrated = scores if scores is None or fit is None else fit.apply(scores)
    by_metric = metrics.measure_classes(labels, predicted, scores, calibrated)
    counts = np.bincount(labels, minlength=held.classes)
    metric = federation.metric if federation.metric in by_metric else "balanced_accuracy"
    constant = [name for k, name in enumerate(names) if (predicted == k).all()]
    result |= metrics.describe_metrics(
        metric,
        by_metric,
        rows=len(labels),
        most_frequent=names[int(np.argmax(counts))],
        only=constant[0] if constant else None,
    )
    if federation.parts.metrics:
        probabilities = None if calibrated is None else metrics.compute_probabilities(calibrated)
        result["metrics"] |= measure_by_user(federation.parts, labels, probabilities)
    if fit is not None and fit_scores is not None:
        result["calibration"] = {**fit._asdict(), "rows": len(fit_scores)}
    if calibrated is not None and np.isfinite(calibrated).all():
        result["curves"] = metrics.draw_curves(labels, calibrated)
    owner = held.test_owner
    fairness = summarise_fairness(predicted == labels, owner, federation.epsilon, federation.delta)
    is_public = plan.data.evaluation == "public" or not federation.evaluates_on_clients
    if owner is not None and is_public and plan.clients <= MOST_NAMED:
        fairness["by_client"] = [
            _measure_client(i, held.names, metric, owner, labels, predicted, scores, calibrated)
            for i in np.unique(owner[owner >= 0]).tolist()
        ]
    result["fairness"] = fairness
    return result


def _measure_numbers(federation: Federation, loss: float, scores: Floats | None) -> dict[str, Any]:
    """Return the record's entries of a model that predicts a number, in the target's unit."""
    test, target = federation.held.test, federation.held.target
    assert target is not None
    predicted = target.restore(take_numbers(scores))
    truth = target.restore(test.y)
    measured = metrics.measure_regression(truth, predicted)
    described = metrics.describe_metrics(federation.metric, measured, rows=len(truth))
    if test.cut is not None and (cut := int(test.cut.sum())):
        described["headline"]["text"] += (
            f", but {cut:,} of {len(truth):,} test targets lie beyond [{target.low:g}, "
            f"{target.high:g}] and are cut to it: errors beyond it are not counted"
        )
    result = {
        "test_loss": loss,
        "test_accuracy": None,
        "fairness": {"shown": False, "why": "a number is predicted, which has no accuracy"},
        **described,
    }
    result["metrics"] |= measure_by_user(federation.parts, truth, predicted)
    return result


def measure_by_user(
    parts: Parts, labels: NDArray[Any], scores: NDArray[Any] | None
) -> dict[str, dict[str, float | None]]:
    """Return the user's metrics on test rows, from labels and probabilities or numbers.

    >>> parts = Parts(metrics={"mean": lambda labels, scores: scores.mean()})
    >>> measure_by_user(parts, np.zeros(2), np.ones(2))
    {'mean': {'value': 1.0, 'baseline': None, 'error': None}}
    """
    entries: dict[str, dict[str, float | None]] = {}
    for name, metric in parts.metrics.items():
        is_known = scores is None or np.isfinite(scores).all()  # else the model has diverged
        value = metric(labels, scores) if scores is not None and is_known else None
        if is_known and not isinstance(value, Real):
            bound = "one number, from labels and scores of public rows"
            raise InputError.of(f"metrics[{name!r}]", value, bound, "return float(…)")
        number = float(value) if isinstance(value, Real) else None
        entries[name] = {"value": number, "baseline": None, "error": None}
    return entries


def _measure_client(
    i: int, names: Sequence[str], metric: str, owner: NDArray[np.int32], *arrays: Any
) -> ClientResult:
    """Return the metrics of the test rows of client i."""
    rows = owner == i
    of_client: Any = [None if array is None else array[rows] for array in arrays]
    measured = metrics.measure_classes(*of_client)
    name = {"name": names[i]} if names else {}
    entry = {"client": i, **name, "rows": int(rows.sum()), "accuracy": measured["accuracy"].value}
    return cast(ClientResult, entry | measured[metric]._asdict())


def _answer(
    federation: Federation, params: Params, samples: Samples, chosen: slice | None = None
) -> tuple[NDArray[np.int64], Floats | None]:
    """Return classes and scores of all or the chosen rows; no scores if they fit no classes."""
    rows, _ = _rows_for(federation.model, samples)
    predicted, scores = federation.model.answer(params, rows if chosen is None else rows[chosen])
    return predicted, _drop_unfit(federation, scores)


def _drop_unfit(federation: Federation, scores: Floats | None) -> Floats | None:
    # One score a row stands for two classes, and is a number where that is predicted.
    is_fit = scores is not None and scores.shape[1] == max(2, federation.held.classes)
    return scores if is_fit else None
