"""The best T by Theorem 2, derived anew (`rounds.bound`), with constants estimated on the stand-in.

    F*   the least mean loss of full gradient descent without noise or clipping, STEPS steps
    Θ    F(w⁰) − F*
    L    the largest eigenvalue of ∇²F, by power iteration at w⁰ and where the descent ends
    μ    the least ½‖∇F‖²/(F − F*) along the first half of the descent (the PL inequality)
    ε̄²   the mean ‖∇F_i − ∇F‖² over clients at w⁰, where not all take part in a round

The theorem knows neither clipping nor a step beyond 1/L, so it is told η = min(η chosen, 1/L) and
Δ_i = 2ηC/n_i of that η: an orientation beside the rehearsed T, not a recommendation.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from sottovoce.errors import InputError
from sottovoce.models.base import Model, Params
from sottovoce.models.gradients import ForeignModel
from sottovoce.schedules.bound import Bound, Landscape
from sottovoce.server.federation import Federation
from sottovoce.server.scoring import first_model

STEPS, ROWS, POWERS = 300, 2048, 20


@dataclass(frozen=True)
class Theory:
    """What was estimated, and the T that Theorem 2 prefers with it."""

    smoothness: float
    curvature: float
    gap: float
    divergence: float
    learning_rate: float
    dimension: int
    best_rounds: int

    def to_json(self) -> dict[str, Any]:
        """As it stands in rehearsal.json."""
        return asdict(self)


def theory(federation: Federation, seed: int) -> Theory | None:
    """Theorem 2 for the federation on the stand-in; None where its assumptions cannot be met."""
    model = federation.model
    if isinstance(model, ForeignModel):
        return None
    held = federation.held
    pick = np.random.default_rng(seed).permutation(len(held.train.y))[:ROWS]
    x, y = jnp.asarray(held.train.x[pick]), jnp.asarray(held.train.y[pick])
    first = first_model(model, seed)
    try:
        smoothness = _smoothness(model, first, x, y)
        losses, squares, last = _descent(model, first, x, y, 1 / smoothness)
        smoothness = max(smoothness, _smoothness(model, last, x, y))
        least = float(losses.min())
        gap = float(losses[0]) - least
        head = len(losses) // 2
        slopes = squares[:head] / (2 * np.maximum(losses[:head] - least, 1e-12))
        eta = min(federation.plan.local.learning_rate, 1 / smoothness * (1 - 1e-6))
        loss = Landscape(
            smoothness=smoothness,
            curvature=min(float(slopes.min()), smoothness),
            gap=gap,
            learning_rate=eta,
            divergence=_divergence(federation, first),
        )
        share = eta / federation.plan.local.learning_rate
        bound = Bound.derived(
            loss,
            sensitivity=federation.sensitivity * share,
            worth=federation.capacity,
            per_round=federation.plan.per_round,
            dimension=federation.dimension,
        )
    except InputError:  # a loss that does not fall, or is not finite
        return None
    return Theory(
        smoothness=loss.smoothness,
        curvature=loss.curvature,
        gap=loss.gap,
        divergence=loss.divergence,
        learning_rate=eta,
        dimension=federation.dimension,
        best_rounds=bound.best_rounds(),
    )


def _mean_loss(model: Model, x: jax.Array, y: jax.Array) -> Any:
    return lambda w: jnp.mean(model.loss(w, x, y))


def _square(tree: Params) -> jax.Array:
    return jnp.asarray(sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(tree)))


def _descent(
    model: Model, first: Params, x: jax.Array, y: jax.Array, rate: float
) -> tuple[Any, Any, Params]:
    """Losses and squared gradient norms of full gradient descent, and where it ends."""
    value = jax.value_and_grad(_mean_loss(model, x, y))

    def step(w: Params, _: None) -> tuple[Params, tuple[jax.Array, jax.Array]]:
        loss, slope = value(w)
        square = _square(slope)
        return jax.tree.map(lambda a, g: a - rate * g, w, slope), (loss, square)

    last, (losses, squares) = jax.jit(lambda w: jax.lax.scan(step, w, None, STEPS))(first)
    return np.asarray(losses, float), np.asarray(squares, float), last


def _smoothness(model: Model, at: Params, x: jax.Array, y: jax.Array) -> float:
    slope = jax.grad(_mean_loss(model, x, y))
    keys = jax.random.split(jax.random.key(0), len(jax.tree.leaves(at)))
    form = jax.tree.structure(at)
    leaves = [
        jax.random.normal(key, leaf.shape)
        for key, leaf in zip(keys, jax.tree.leaves(at), strict=True)
    ]

    def power(v: Params, _: None) -> tuple[Params, jax.Array]:
        curved = jax.jvp(slope, (at,), (v,))[1]
        norm = jnp.sqrt(_square(curved))
        return jax.tree.map(lambda leaf: leaf / jnp.maximum(norm, 1e-30), curved), norm

    start = jax.tree.unflatten(form, leaves)
    _, norms = jax.jit(lambda v: jax.lax.scan(power, v, None, POWERS))(start)
    return float(norms[-1])


def _divergence(federation: Federation, at: Params) -> float:
    model, held = federation.model, federation.held
    if federation.plan.per_round == federation.plan.clients or isinstance(model, ForeignModel):
        return 0.0

    def flat(x: Any, y: Any) -> Any:
        slope = jax.grad(_mean_loss(model, jnp.asarray(x), jnp.asarray(y)))(at)
        return np.concatenate([np.asarray(leaf).reshape(-1) for leaf in jax.tree.leaves(slope)])

    clients = range(min(len(held.samples), 50))
    each = np.stack([flat(held.client(i).x, held.client(i).y) for i in clients])
    return float(np.mean(np.sum((each - each.mean(axis=0)) ** 2, axis=1)))
