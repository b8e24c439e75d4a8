"""One client, one round: what a device computes, and the only place where an upload is made.

`price` turns an announced round and the client's own tank into debits and noise. `release` is the
release path: per-sample gradients → clipped on an integer grid → exact sum → exact integer noise
from the operating system's entropy → scaled → float32. The debit must be durable before `release`
is called (`device` sees to that). `step` is the same without noise: the oracle of every engine,
which nothing may send.

Nothing here loads JAX unless the model needs it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, final

import numpy as np
from numpy.typing import ArrayLike, NDArray

from sottovoce.client import messages
from sottovoce.errors import InputError, PolicyRefusal, TankEmpty
from sottovoce.models.base import Form, OwnModel, gradient_blocks, sample_losses
from sottovoce.privacy import grid
from sottovoce.privacy.noise import secure
from sottovoce.privacy.sensitivity import Recipe
from sottovoce.privacy.tank import Tank, most_units
from sottovoce.schedules.base import Round
from sottovoce.schedules.pricing import LOSS_SHARE, Terms, price_release

Parameters = dict[str, NDArray[np.float64]]

#: What an answer may say besides the noised model: public numbers, and nothing else (rule R6).
PUBLIC = frozenset({"schema", "kind", "run", "t", "request", "samples", "receipt", "budget"})
_MINT = object()


@final
@dataclass(frozen=True)
class Price:
    """What a turn costs: units to book and noise in grid units, one entry a release."""

    units: tuple[int, ...]
    noise: tuple[int, ...]
    loss_noise: int | None = None  # of the loss, paid out of the first entry

    def __post_init__(self) -> None:
        if not self.units or min(self.units) < 1 or len(self.units) != len(self.noise):
            raise InputError.of("units", self.units, "at least 1 a release", "ask for a price")


@final
class Upload:
    """Bytes that may leave the client. Only `release` can make one."""

    __slots__ = ("blob", "loss", "params", "sigma")

    blob: bytes
    params: dict[str, NDArray[np.float32]]
    sigma: tuple[float, ...]
    loss: float | None

    def __init__(
        self,
        mint: object,
        blob: bytes,
        params: dict[str, NDArray[np.float32]],
        sigma: tuple[float, ...],
        loss: float | None,
    ) -> None:
        if mint is not _MINT:
            raise TypeError("an Upload is made by client.release, from noised values only")
        self.blob, self.params, self.sigma, self.loss = blob, params, sigma, loss


def price(
    tank: Tank,
    turn: Round,
    terms: Terms,
    *,
    change: int,
    floor: float = 0.0,
    loss: bool = False,
) -> Price:
    """What this turn's releases cost, or `TankEmpty`; nothing is booked yet.

    σ = Δ·√(r/left) by the client's own tank and the horizon announced (Theorem 4), Δ = `change` in
    grid units. A whole turn is worth no more than one release of σ/Δ = `floor`, whatever the server
    announces: of E releases each has σ/Δ ≥ floor·√E, a share that would buy less noise is cut, and
    what is cut stays in the tank. With `loss` one part in ten of the first release pays for the
    noised loss.

    >>> from sottovoce.privacy.tank import FULL
    >>> turn, terms = Round(t=0, horizon=16), Terms(clients=1, per_round=1)
    >>> paid = price(Tank.full(4.0), turn, terms, change=2**31)
    >>> paid.units[0] == FULL // 16, round(paid.noise[0] / 2**31, 6)
    (True, 2.0)
    >>> round(price(Tank.full(4.0), turn, terms, change=2**31, floor=3.0).noise[0] / 2**31, 6)
    3.0
    """
    units, noise, loss_noise = [], [], None
    for place in range(terms.releases):
        asked = int(price_release(tank, turn, terms, float(change)).require().units)
        part = _cut(asked, tank, floor, terms.releases)
        tells = loss and place == 0
        if part < (LOSS_SHARE if tells else 1):
            raise TankEmpty(
                "the privacy budget has too little left for this release; "
                "the client takes no further part in this run"
            )
        share = part // LOSS_SHARE if tells else 0
        if tells:
            loss_noise = _noise(tank, share, change, floor)
        noise.append(_noise(tank, part - share, change, floor))
        units.append(part)
        tank = tank.spend(part)
    return Price(tuple(units), tuple(noise), loss_noise)


def _cut(units: int, tank: Tank, floor: float, releases: int) -> int:
    """At most so many units that all releases of the turn have Σμ² = capacity·Σu/2⁵⁰ ≤ 1/floor²."""
    if floor == 0:
        return units
    return min(units, most_units(floor, float(tank.capacity)) // releases)


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
    """w_i = w − (η/n)·Σ_m clip(g_m) on the grid, without noise: Algorithm 1, lines 5 to 9.

    >>> form, recipe = Form("svm", (2,), 2, {"kappa": 0.0}), Recipe(learning_rate=1.0, clip=1.0)
    >>> moved = step(form, {"b": 0.0, "w": [0.0, 0.0]}, [[4.0, 2.0]], [1], recipe)
    >>> moved["w"].round(4).tolist(), moved["b"].round(4).tolist()
    ([0.8729, 0.4364], 0.2182)
    """
    start = _floats(params)
    return _moved(start, _sum(form, start, x, y, recipe, own), recipe, len(np.asarray(y)))


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
    """The upload w̃ = w − (η·u/n)·(Σ_m q_m + Z), Z discrete Gaussian of `paid.noise` grid units.

    With several steps each is a release of its own: paid, noised, and the next begins where it
    ended. A step's noise is drawn before that step touches the data, and one step's alone is in
    memory. `head` is what the answer says besides;
    anything that is not public by name is refused.

    >>> form, recipe = Form("svm", (2,), 2, {"kappa": 0.0}), Recipe(learning_rate=1.0, clip=1.0)
    >>> paid = Price(units=(1,), noise=(2**31,))
    >>> out = release(form, {"b": 0.0, "w": [0.0, 0.0]}, [[4.0, 2.0]], [1], recipe=recipe,
    ...               paid=paid, head={"kind": "upload"})
    >>> round(out.sigma[0], 6), out.params["w"].dtype
    (2.0, dtype('float32'))
    """
    if extra := head.keys() - PUBLIC:
        raise InputError.of("head", sorted(extra), "public numbers only", "leave them out")
    if len(paid.noise) != recipe.releases or (paid.loss_noise is None) != (loss_bound is None):
        raise InputError.of("paid", paid, "a price of this recipe", "ask for it with its terms")
    now, samples = _floats(params), len(np.asarray(y))
    count = sum(leaf.size for leaf in now.values())
    noise = (secure.draw(count, sigma) for sigma in paid.noise)  # each before its own step
    loss_noise = None if paid.loss_noise is None else int(secure.draw(1, paid.loss_noise)[0])
    told: dict[str, float] = {}
    if loss_noise is not None and loss_bound is not None and paid.loss_noise is not None:
        each = sample_losses(form, now, np.asarray(x, np.float64), np.asarray(y), own)
        total = grid.bounded_sum(each, loss_bound) + loss_noise
        told["loss"] = loss_bound * (total / grid.REPLACED) / samples
        told["loss_sigma"] = loss_bound * (paid.loss_noise / grid.REPLACED) / samples
    for drawn in noise:
        now = _moved(now, _sum(form, now, x, y, recipe, own) + drawn, recipe, samples)
    one = recipe.learning_rate / samples * grid.grid_unit(recipe.clip)
    sigma = tuple(one * units for units in paid.noise)
    with np.errstate(over="ignore"):  # a step beyond float32 is ∞, which the server refuses
        sent = {name: leaf.astype(np.float32) for name, leaf in now.items()}
    blob = messages.pack({**head, "sigma": list(sigma), **told}, sent)
    return Upload(_MINT, blob, sent, sigma, told.get("loss"))


def _sum(
    form: Form,
    params: Parameters,
    x: ArrayLike,
    y: ArrayLike,
    recipe: Recipe,
    own: OwnModel | None,
) -> NDArray[np.int64]:
    rows, labels = np.asarray(x, dtype=np.float64), np.asarray(y)
    count = sum(leaf.size for leaf in params.values())
    before = {name: leaf.tobytes() for name, leaf in params.items() if own is not None}
    total = grid.clipped_sum(gradient_blocks(form, params, rows, labels, own), recipe.clip, count)
    if any(params[name].tobytes() != held for name, held in before.items()):
        # Not with what it was given, which are read-only copies: the code has reached for them.
        raise RuntimeError("a model of the client's own has changed the parameters")
    return total


def _moved(
    params: Parameters, units: NDArray[np.int64], recipe: Recipe, samples: int
) -> Parameters:
    one, moved, at = recipe.learning_rate / samples * grid.grid_unit(recipe.clip), {}, 0
    for name, leaf in params.items():
        part = units[at : at + leaf.size].reshape(leaf.shape)
        moved[name] = np.asarray(leaf - one * part, dtype=np.float64)
        at += leaf.size
    return moved


def _floats(params: Mapping[str, ArrayLike]) -> Parameters:
    """In the order of the names, as `gradient_blocks` lays them out."""
    return {name: np.asarray(params[name], dtype=np.float64) for name in sorted(params)}
