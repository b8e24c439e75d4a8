"""One client, one round, in float64: the oracle that every engine is tested against.

`step` is what a client computes from its samples (Algorithm 1: clip every sample's gradient over
all parameters together, one full-batch step). `release` is the order in which it may do so: the
price is checked and booked first, then the noise is drawn, then the upload exists.

The noise here is simulated (see `noise.simulated`): what `release` returns must not leave a real
device.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from sottovoce.learning.models import Mlp, Model, Svm
from sottovoce.learning.reference import clipped_sum_numpy
from sottovoce.noise.simulated import draw_numpy
from sottovoce.privacy.sensitivity import Recipe
from sottovoce.privacy.tank import Tank
from sottovoce.rounds.schedule import Round
from sottovoce.rounds.turn import Terms, offer

Parameters = dict[str, NDArray[np.float64]]


@dataclass(frozen=True, eq=False)
class Upload:
    """What leaves the client: its noised parameters, and the noise it claims."""

    params: Parameters
    sigma: float


def step(
    model: Model, params: Parameters, x: ArrayLike, y: ArrayLike, recipe: Recipe
) -> Parameters:
    """w_i = w − (η/n)·Σ_m clip(g_m), without noise: Algorithm 1, lines 5 to 9."""
    rows, labels = np.asarray(x, dtype=np.float64), np.asarray(y)
    weight = np.full(len(labels), recipe.learning_rate / len(labels))
    match model:
        case Mlp():
            moved = clipped_sum_numpy("mlp", params, rows, labels, weight, recipe.clip)
        case Svm():
            moved = clipped_sum_numpy(
                "svm", params, rows, labels, weight, recipe.clip, kappa=model.kappa
            )
        case _:
            moved = _by_jax(model, params, rows, labels, weight, recipe.clip)
    return {name: params[name] - moved[name] for name in params}


def release(
    model: Model,
    params: Parameters,
    x: ArrayLike,
    y: ArrayLike,
    *,
    recipe: Recipe,
    tank: Tank,
    turn: Round,
    terms: Terms,
    rng: np.random.Generator,
) -> tuple[Upload, Tank]:
    """One upload and the tank after it; raises `TankEmpty`, with nothing computed, if it is dry.

    σ = Δ·√(r/left) by the client's own tank and the horizon announced (Theorem 4). With several
    steps every one of them is a release: paid, noised, and the next begins where it ended.
    """
    sensitivity = recipe.sensitivity(len(np.asarray(y)))
    for _ in range(recipe.releases):
        price = offer(tank, turn, terms, sensitivity).require()
        tank = tank.spend(price.units)
        sigma = float(price.sigma)
        noise = draw_numpy(rng, params, sigma)
        moved = step(model, params, x, y, recipe)
        params = {name: moved[name] + noise[name] for name in moved}
    return Upload(params, sigma), tank


def _by_jax(
    model: Model,
    params: Parameters,
    x: NDArray[np.float64],
    y: NDArray[Any],
    weight: NDArray[np.float64],
    clip: float,
) -> Parameters:
    import jax
    import jax.numpy as jnp

    from sottovoce.learning.clipping import clipped_sum

    with jax.enable_x64(True):
        tree = {name: jnp.asarray(leaf) for name, leaf in params.items()}
        moved = clipped_sum(model, tree, jnp.asarray(x), jnp.asarray(y), jnp.asarray(weight), clip)
        return {name: np.asarray(leaf, dtype=np.float64) for name, leaf in moved.items()}
