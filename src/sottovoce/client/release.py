"""One client, one round: what a device computes, and the only place where an upload is made.

`price` turns an announced round and the client's tank into debits and noise. `release` makes the
upload: per-sample gradients → clipped on an integer grid → exact sum → exact integer noise from the
operating system's entropy → scaled → float32. The debit must be durable before `release` is called
(`device` does that). `step` is the same without noise: every engine is tested against it, and
nothing may send it.

Nothing here loads JAX unless the model needs it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import InitVar, dataclass
from typing import Any, final

import numpy as np
from numpy.typing import ArrayLike, NDArray

from sottovoce.client import messages
from sottovoce.errors import InputError, PolicyRefusal, TankEmpty
from sottovoce.models.base import Form, OwnModel, gradient_blocks, sample_losses
from sottovoce.privacy import grid, secure_noise
from sottovoce.privacy.sensitivity import Recipe
from sottovoce.privacy.tank import Tank, most_units
from sottovoce.schedules.base import Round
from sottovoce.schedules.pricing import LOSS_SHARE, Terms, price_release

Parameters = dict[str, NDArray[np.float64]]

#: What an answer may say besides the noised model: public numbers, and nothing else (rule R6).
PUBLIC = frozenset({"schema", "kind", "run", "t", "request", "samples", "receipt", "budget"})
MASKED = "masked"  # the array of a masked upload
_MINT = object()


@final
@dataclass(frozen=True)
class Price:
    """What a turn costs: parts of the capacity to book, and noise in grid units, per release."""

    units: tuple[int, ...]
    noise: tuple[int, ...]
    loss_noise: int | None = None  # of the loss, paid out of the first entry

    def __post_init__(self) -> None:
        if not self.units or min(self.units) < 1 or len(self.units) != len(self.noise):
            raise InputError.of("units", self.units, "at least 1 a release", "ask for a price")


@final
@dataclass(frozen=True, eq=False, slots=True)
class Upload:
    """Bytes that may leave the client. Only `release` can make one."""

    mint: InitVar[object]
    blob: bytes
    params: dict[str, NDArray[np.float32]]
    sigma: tuple[float, ...]
    loss: float | None

    def __post_init__(self, mint: object) -> None:
        if mint is not _MINT:
            raise TypeError("an Upload is made by client.release, from noised values only")


def price(
    tank: Tank, round_: Round, terms: Terms, *, change: int, floor: float = 0.0, loss: bool = False
) -> Price:
    """Return what this turn's releases cost, or raise `TankEmpty`; nothing is booked yet.

    σ = Δ·√(r/left) by the client's tank and the announced horizon (Theorem 4), with Δ = `change` in
    grid units. A whole turn is worth at most one release of σ/Δ = `floor`, whatever the server
    announces: each of E releases has σ/Δ ≥ floor·√E. A share that would buy less noise is reduced,
    and the rest stays in the tank. With `loss`, one tenth of the first release pays for the noised
    loss.

    >>> from sottovoce.privacy.tank import FULL
    >>> round_, terms = Round(t=0, horizon=16), Terms(clients=1, per_round=1)
    >>> paid = price(Tank.full(4.0), round_, terms, change=2**31)
    >>> paid.units[0] == FULL // 16, round(paid.noise[0] / 2**31, 6)
    (True, 2.0)
    >>> round(price(Tank.full(4.0), round_, terms, change=2**31, floor=3.0).noise[0] / 2**31, 6)
    3.0
    """
    units, noise, loss_noise = [], [], None
    for step in range(terms.releases):
        units_of_step = int(price_release(tank, round_, terms, float(change)).require().units)
        if floor > 0:  # so that all releases of the turn have Σμ² = capacity·Σu/2⁵⁰ ≤ 1/floor²
            most = most_units(floor, float(tank.capacity)) // terms.releases
            units_of_step = min(units_of_step, most)
        has_loss = loss and step == 0
        if units_of_step < (LOSS_SHARE if has_loss else 1):
            raise TankEmpty(
                "the privacy budget has too little left for this release; "
                "the client takes no further part in this run"
            )
        share = units_of_step // LOSS_SHARE if has_loss else 0
        if has_loss:
            loss_noise = _noise(tank, share, change, floor)
        noise.append(_noise(tank, units_of_step - share, change, floor))
        units.append(units_of_step)
        tank = tank.spend(units_of_step)
    return Price(tuple(units), tuple(noise), loss_noise)


def _noise(tank: Tank, units: int, change: int, floor: float) -> int:
    """σ in whole grid units, rounded up."""
    sigma = math.ceil(max(float(tank.noise(units, float(change))), float(change) * floor))
    if sigma > grid.LARGEST_NOISE:
        raise PolicyRefusal(
            f"the noise of this release, {sigma / change:.3g} times a sensitivity of {change} grid "
            f"units, is more than 2⁵² units, which is where the grid ends; announce fewer rounds, "
            "or protect records where all of a large data set is protected"
        )
    return sigma


def step(
    form: Form,
    params: Mapping[str, ArrayLike],
    x: ArrayLike,
    y: ArrayLike,
    recipe: Recipe,
    own: OwnModel | None = None,
) -> Parameters:
    """Return w_i = w − (η/n)·Σ_m clip(g_m) on the grid, without noise: Algorithm 1, lines 5 to 9.

    With class weights a clipped gradient is multiplied by that of its label, which is at most 1.

    >>> form, recipe = Form("svm", (2,), 2, {"kappa": 0.0}), Recipe(learning_rate=1.0, clip=1.0)
    >>> moved = step(form, {"b": 0.0, "w": [0.0, 0.0]}, [[4.0, 2.0]], [1], recipe)
    >>> moved["w"].round(4).tolist(), moved["b"].round(4).tolist()
    ([0.8729, 0.4364], 0.2182)
    """
    start = _sort_leaves(params)
    return _apply_sum(
        start, _sum_clipped(form, start, x, y, recipe, own), recipe, len(np.asarray(y))
    )


def release(
    form: Form,
    params: Mapping[str, ArrayLike],
    x: ArrayLike,
    y: ArrayLike,
    *,
    recipe: Recipe,
    paid: Price,
    head: Mapping[str, Any],
    loss_bound: float | None = None,
    own: OwnModel | None = None,
) -> Upload:
    """Return the upload w̃ = w − (η·u/n)·(Σ_m q_m + Z), with Z of `paid.noise` grid units.

    With several steps each one is a release: paid and noised, and the next one starts from its
    result. A step's noise, discrete Gaussian, is drawn before the step reads the data, and only one
    step's noise is in memory. `head` is what else the answer says; keys that are not public by name
    are refused.

    >>> form, recipe = Form("svm", (2,), 2, {"kappa": 0.0}), Recipe(learning_rate=1.0, clip=1.0)
    >>> paid = Price(units=(1,), noise=(2**31,))
    >>> out = release(form, {"b": 0.0, "w": [0.0, 0.0]}, [[4.0, 2.0]], [1], recipe=recipe,
    ...               paid=paid, head={"kind": "upload"})
    >>> round(out.sigma[0], 6), out.params["w"].dtype
    (2.0, dtype('float32'))
    """
    _require_public(head)
    if len(paid.noise) != recipe.releases or (paid.loss_noise is None) != (loss_bound is None):
        raise InputError.of("paid", paid, "a price of this recipe", "ask for it with its terms")
    now, samples = _sort_leaves(params), len(np.asarray(y))
    count = sum(leaf.size for leaf in now.values())
    noise = (secure_noise.draw(count, sigma) for sigma in paid.noise)  # each before its own step
    noised_loss: dict[str, float] = {}
    if loss_bound is not None and paid.loss_noise is not None:
        loss_noise = int(secure_noise.draw(1, paid.loss_noise)[0])
        losses = sample_losses(form, now, np.asarray(x, np.float64), np.asarray(y), own)
        total = grid.bounded_sum(losses, loss_bound) + loss_noise
        noised_loss["loss"] = loss_bound * (total / grid.REPLACED) / samples
        noised_loss["loss_sigma"] = loss_bound * (paid.loss_noise / grid.REPLACED) / samples
    for drawn in noise:
        now = _apply_sum(now, _sum_clipped(form, now, x, y, recipe, own) + drawn, recipe, samples)
    scale = recipe.learning_rate / samples * grid.grid_unit(recipe.clip)
    sigma = tuple(scale * units for units in paid.noise)
    with np.errstate(over="ignore"):  # beyond float32 it is ∞, which the server refuses
        sent = {name: leaf.astype(np.float32) for name, leaf in now.items()}
    blob = messages.pack({**head, "sigma": list(sigma), **noised_loss}, sent)
    return Upload(_MINT, blob, sent, sigma, noised_loss.get("loss"))


def release_masked(
    form: Form,
    params: Mapping[str, ArrayLike],
    x: ArrayLike,
    y: ArrayLike,
    *,
    recipe: Recipe,
    noise: int,
    mask: NDArray[np.uint64],
    head: Mapping[str, Any],
    own: OwnModel | None = None,
) -> Upload:
    """Return the masked upload of the sum view: Σ_m q_m + Z + mask, mod 2⁶⁴ (rules S5 and S6).

    Z has `noise` grid units and is drawn before the rows are read. The mask hides the upload until
    the masks of a whole cohort cancel out; it takes no noise's place.
    """
    _require_public(head)
    start = _sort_leaves(params)
    count = sum(leaf.size for leaf in start.values())
    if recipe.releases != 1 or mask.shape != (count,) or mask.dtype != np.uint64:
        remedy = "make it of its size"
        raise InputError.of("mask", mask.shape, f"{count} words for one step", remedy)
    drawn = secure_noise.draw(count, noise)
    noised = _sum_clipped(form, start, x, y, recipe, own) + drawn
    sent = noised.view(np.uint64) + mask  # wraps around at 2⁶⁴
    blob = messages.pack({**head, "noise": noise}, {MASKED: sent})
    sigma = recipe.learning_rate / len(np.asarray(y)) * grid.grid_unit(recipe.clip) * noise
    return Upload(_MINT, blob, {}, (sigma,), None)


def _require_public(head: Mapping[str, Any]) -> None:
    if extra := head.keys() - PUBLIC:
        raise InputError.of("head", sorted(extra), "public numbers only", "leave them out")


def _sum_clipped(
    form: Form, params: Parameters, x: ArrayLike, y: ArrayLike, recipe: Recipe, own: OwnModel | None
) -> NDArray[np.int64]:
    rows, labels = np.asarray(x, dtype=np.float64), np.asarray(y)
    count = sum(leaf.size for leaf in params.values())
    before = {name: leaf.tobytes() for name, leaf in params.items() if own is not None}
    weights = None if recipe.class_weights is None else np.array(recipe.class_weights)[labels]
    blocks = gradient_blocks(form, params, rows, labels, own)
    total = grid.clipped_sum(blocks, recipe.clip, count, weights)
    if any(params[name].tobytes() != held for name, held in before.items()):
        # It was given read-only copies, so its code has reached for the originals.
        raise RuntimeError("a model of the client's own has changed the parameters")
    return total


def _apply_sum(
    params: Parameters, units: NDArray[np.int64], recipe: Recipe, samples: int
) -> Parameters:
    scale, moved, at = recipe.learning_rate / samples * grid.grid_unit(recipe.clip), {}, 0
    for name, leaf in params.items():
        steps = units[at : at + leaf.size].reshape(leaf.shape)
        moved[name] = np.asarray(leaf - scale * steps, dtype=np.float64)
        at += leaf.size
    return moved


def _sort_leaves(params: Mapping[str, ArrayLike]) -> Parameters:
    """Return the parameters sorted by name, the order of a model's gradient blocks."""
    return {name: np.asarray(params[name], dtype=np.float64) for name in sorted(params)}
