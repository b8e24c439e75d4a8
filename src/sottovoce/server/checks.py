"""Is this an upload? Schema first, then size, then whether noise of the claimed size is in it.

Rule R8 of docs/protocol.md.

An honest upload is w̃ = w − s + Z with ‖s‖ ≤ E·η·C and Z of d coordinates with standard deviation
σ (over E steps: √Σσ²), rounded to float32. With probability above 1 − 1e-13 (all checks together)

    σ(√d − 8) − E·η·C  ≤  ‖w̃ − w‖  ≤  E·η·C + σ(√d + 8) + 2⁻²³(‖w‖ + that)

(‖Z‖/σ is within 8 of √d but for e⁻³²: it is a 1-Lipschitz function of d normals). Above it a client
is broken or hostile; below it, it forgot its noise, which is worth telling it. The left side is not
positive where d is small; `_require_noise` holds there, too, and needs no E·η·C.

The σ is the client's claim, held between a floor and a ceiling that the registry knows, and worth
no more μ² than the client says it has booked since its last upload: Σ (Δ/σ)² ≤ spent now − spent
before; of a client that says nothing of it, no more than the loosest of all vaults could pay. On
the right side it counts only as far as the client's disclosed budget calls for it in the announced
round (`_called_for`): claiming more noise lets nobody go further. What is refused drops the client
from the round, never the round.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sottovoce.client import messages
from sottovoce.client.messages import ANSWER, CODES, Receipt, is_finite, require_version
from sottovoce.errors import Malformed, OtherSamples
from sottovoce.privacy import calibration, grid
from sottovoce.privacy.sensitivity import Recipe
from sottovoce.privacy.tank import FULL, Tank
from sottovoce.schedules.base import Round
from sottovoce.schedules.pricing import LOSS_SHARE, Terms, offer
from sottovoce.server.members import Account, Member

SLACK = 8.0  # standard deviations of ‖Z‖: e⁻³² = 1.3e-14 on either side
HEAD_BYTES = 1 << 16  # of a head, beside what names its arrays and states its σ
RARE = math.log(1e-14)  # a false alarm of one test of `_require_noise`
LOSS_NOISE = 5.0  # a loss has one part in ten: √9 times the noise, √18 where units are few
_KEYS = {"schema", "kind", "run", "t", "request", "samples", "receipt", "budget", "sigma"}

Arrays = dict[str, NDArray[np.float32]]


@dataclass(frozen=True, eq=False)
class Expected:
    """What the server asked of this client, and what it knows of it."""

    run: str
    t: int
    request: str  # the hash
    params: Arrays  # the model that was sent
    recipe: Recipe
    member: Member
    ceiling: float  # the largest σ/Δ that a client of this run could need
    loss_bound: float | None = None
    turn: Round | None = None  # what was announced; without it the ceiling alone limits the noise
    terms: Terms | None = None
    opened: float = 0.0  # μ² that the client had spent when the run began
    debits: int = 0  # releases of it that counted in this run
    shown: tuple[float, int] = (0.0, 0)  # Σ‖w̃ − w‖²/σ² and Σd of its uploads that counted
    disclosed: bool = False  # whether the plan's weights need its budget

    @property
    def longest(self) -> int:
        """More bytes than an honest answer has."""
        size = sum(leaf.size for leaf in self.params.values())
        return 4 * size + HEAD_BYTES + 512 * len(self.params) + 32 * self.recipe.releases

    @property
    def sensitivity(self) -> float:
        """Δ of one release."""
        return float(self.recipe.sensitivity(self.member.samples))

    @property
    def loss_sensitivity(self) -> float:
        """Δ_V of the mean loss: B/n for a record, B for all of a client's data."""
        share = 1 if self.recipe.unit == "client" else self.member.samples
        return (self.loss_bound or 0.0) / share


@dataclass(frozen=True, eq=False)
class Accepted:
    """An upload that counts."""

    params: Arrays
    sigma: tuple[float, ...]
    receipt: Receipt
    account: Account | None
    loss: float | None = None
    loss_sigma: float | None = None
    shown: tuple[float, int] = (0.0, 0)


@dataclass(frozen=True)
class Declined:
    """The client said no, and why."""

    code: str


def read(blob: bytes, expected: Expected) -> Accepted | Declined:
    """An upload that counts, a client's refusal, or `Malformed` with what is wrong."""
    head, arrays = messages.unpack(blob, limit=expected.longest)
    require_version(head, ANSWER)
    if head.get("kind") == "refusal":
        code = head.get("code")
        return Declined(code if code in CODES else "internal")  # its text is not for our books
    told = set() if expected.loss_bound is None else {"loss", "loss_sigma"}
    if head.get("kind") != "upload" or head.keys() != _KEYS | told:
        raise Malformed("the answer has not the keys of an upload")
    for key in ("run", "t", "request"):
        if type(head[key]) is not type(getattr(expected, key)) or (
            head[key] != getattr(expected, key)
        ):
            raise Malformed(f"the upload is for another {key}")
    member = expected.member
    if type(head["samples"]) is not int or head["samples"] != member.samples:
        raise OtherSamples("the upload claims another number of samples than the client's greeting")
    receipt, account = Receipt.from_json(head["receipt"]), Account.from_json(head["budget"])
    if receipt.vault != member.vault:
        raise Malformed("the upload's receipt is another client's")
    _require_budget(account, expected)
    sigma = _sigma(head["sigma"], expected)
    if {n: a.shape for n, a in arrays.items()} != {n: a.shape for n, a in expected.params.items()}:
        raise Malformed("the upload's arrays are not those of the model")
    if not all(np.all(np.isfinite(leaf)) for leaf in arrays.values()):
        raise Malformed("the upload is not finite")
    loss, loss_sigma = _loss(head, expected)
    released = _released(sigma, loss_sigma, expected)
    most = _called_for(account, released, expected) * expected.sensitivity
    _booked(account, released, expected)
    distance = _distance(arrays, sigma, most, expected)
    shown = _require_noise(arrays, sigma[-1], distance, expected)
    return Accepted(arrays, sigma, receipt, account, loss, loss_sigma, shown)


def _require_budget(account: Account | None, expected: Expected) -> None:
    """Refuse a budget that is not the client's: in mid-run it may only be tightened, or hidden."""
    known = expected.member.account
    if account is None and expected.disclosed:
        raise Malformed("the upload hides the budget that its weight follows from")
    if account is None or (known is not None and replace(account, spent=known.spent) == known):
        return
    account.require_worth(expected.member.calibration)
    if known is not None and (
        account.epsilon > known.epsilon
        or account.delta > known.delta
        or account.capacity > known.capacity
    ):
        raise Malformed("the upload's budget is looser than the one of the client's greeting")


def _sigma(values: Any, expected: Expected) -> tuple[float, ...]:
    if not isinstance(values, list) or len(values) != expected.recipe.releases:
        raise Malformed("the upload does not state one σ a step")
    if not all(is_finite(s) and s > 0 for s in values):
        raise Malformed("the upload's σ is no finite number > 0")
    least, most = _least(expected), expected.ceiling
    if any(not least <= s / expected.sensitivity <= most for s in values):
        raise Malformed("the upload's σ is below the client's own floor or above what it needs")
    return tuple(map(float, values))


def _least(expected: Expected) -> float:
    """The smallest σ/Δ of this client's releases: its own floor, which is a whole turn's."""
    return (expected.member.floor or 0.0) * (1 - 1e-9)


@cache
def _most_worth() -> float:
    """Return the most μ² that a vault's budget can be worth: no honest client releases more."""
    return float(calibration.capacity(*calibration.LOOSEST))


def _released(sigma: tuple[float, ...], loss_sigma: float | None, expected: Expected) -> float:
    """Return the μ² that the claimed noise is worth, of all steps and the loss."""
    ratios = [expected.sensitivity / s for s in sigma]
    if loss_sigma is not None:
        ratios.append(expected.loss_sensitivity / loss_sigma)
    return sum(ratio * ratio for ratio in ratios)


def _booked(account: Account | None, released: float, expected: Expected) -> None:
    """Refuse noise that is worth more than was booked for it, as far as the client says that."""
    known = expected.member.account
    if account is None or known is None:
        if released * (1 - 1e-9) > _most_worth():
            raise Malformed("the upload has less noise than any vault could have paid for")
        return
    slack = 1e-14 * account.capacity  # what differences of floats can lose
    if account.spent - known.spent < released * (1 - 1e-10) - slack:
        raise Malformed("the upload has less noise than its client has booked for")


def _called_for(account: Account | None, released: float, expected: Expected) -> float:
    """Return the most σ/Δ that the client's own budget calls for in this round.

    It is what `release.price` gives for the books that the client shows: what it had spent before
    this upload, of the capacity that it disclosed, over the releases that the horizon leaves. A
    client that discloses no budget is held to the ceiling alone.
    """
    turn, terms, floor = expected.turn, expected.terms, expected.member.floor or 0.0
    share = expected.member.run_share
    if account is None or turn is None or terms is None or share is None:
        return expected.ceiling
    before = min(max(account.spent - released, 0.0), account.capacity)
    opened = min(expected.opened, before) if expected.debits else before
    # Beyond the share of its budget that a run may take a client counts it as spent before.
    kept = account.capacity * (1 - share)
    before = min(max(before, kept + before - opened), account.capacity)
    opened = max(opened, kept)
    tank = Tank(
        capacity=np.array(account.capacity),
        spent=np.array(int(before / account.capacity * FULL)),
        opened=np.array(int(opened / account.capacity * FULL)),
        debits=np.array(expected.debits),
    )
    priced = offer(tank, turn, terms, 1.0)
    model = 1.0 if expected.loss_bound is None else 1 - 1 / LOSS_SHARE
    ratio = max(float(priced.sigma), floor * math.sqrt(terms.releases)) / math.sqrt(model)
    return min(ratio * (1 + 1e-6), expected.ceiling) if priced.granted else expected.ceiling


def _distance(arrays: Arrays, sigma: tuple[float, ...], most: float, expected: Expected) -> float:
    """Return ‖w̃ − w‖ as it was before rounding, at most; refuse what lies too far or too near."""
    squares = [
        float(np.sum((leaf.astype(np.float64) - expected.params[name]) ** 2))
        for name, leaf in arrays.items()
    ]
    start = [float(np.sum(np.square(w, dtype=np.float64))) for w in expected.params.values()]
    moved, norm = math.sqrt(math.fsum(squares)), math.sqrt(math.fsum(start))
    root = math.sqrt(sum(leaf.size for leaf in arrays.values()))
    recipe = expected.recipe
    step = recipe.steps * recipe.learning_rate * recipe.clip
    furthest = step + math.hypot(*(min(s, most) for s in sigma)) * (root + SLACK)
    rounding = 2**-23 * (norm + furthest)
    if not moved <= furthest + rounding:
        raise Malformed("the upload lies further from the model than step and noise can take it")
    if moved + rounding < math.hypot(*sigma) * (root - SLACK) - step:
        raise Malformed("the upload lies nearer to the model than its noise lets it")
    return moved + rounding


def _require_noise(
    arrays: Arrays, sigma: float, distance: float, expected: Expected
) -> tuple[float, int]:
    """Refuse an upload without its noise, whatever d is; each test's false alarm is below 1e-14.

    Given all before it, the noise Z of the last step is d independent normals around a point that
    they do not depend on. So (Anderson) ‖w̃ − w‖/σ is no smaller in distribution than ‖Z‖/σ, and
    S = Σ‖w̃ − w‖²/σ² over a client's uploads no smaller than χ² of D = Σd degrees, of which

        P(χ²_D ≤ xD) ≤ (x·e^{1−x})^{D/2}   for x < 1   (Chernoff).

    And a coordinate comes back as it was with probability p_j ≤ (its float32 spacing + one grid
    unit)/(σ√2π), so that k of them do with probability at most (Σp)^k/k!.
    """
    recipe, count = expected.recipe, sum(leaf.size for leaf in arrays.values())
    total, degrees = expected.shown[0] + (distance / sigma) ** 2, expected.shown[1] + count
    x = total / degrees
    if x < 1 and (x == 0 or degrees / 2 * (math.log(x) + 1 - x) < RARE):
        raise Malformed("the upload lies nearer to the model than its noise lets it")
    same = sum(int(np.sum(leaf == expected.params[name])) for name, leaf in arrays.items())
    if same:
        cells = math.fsum(float(np.sum(np.spacing(np.abs(w)))) for w in expected.params.values())
        unit = recipe.learning_rate / expected.member.samples * grid.grid_unit(recipe.clip)
        chance = (cells + count * unit) / (sigma * math.sqrt(2 * math.pi))
        if same * math.log(chance) - math.lgamma(same + 1) < RARE:
            raise Malformed("the upload has numbers of the model in it that no noise was added to")
    return total, degrees


def _loss(head: Mapping[str, Any], expected: Expected) -> tuple[float | None, float | None]:
    if expected.loss_bound is None:
        return None, None
    loss, sigma = head["loss"], head["loss_sigma"]
    if not all(is_finite(n) for n in (loss, sigma)):
        raise Malformed("the upload's loss is no finite number")
    ratio, most = sigma / expected.loss_sensitivity, LOSS_NOISE * expected.ceiling
    if not _least(expected) <= ratio <= most:
        raise Malformed("the loss's σ is below the client's own floor or above what it needs")
    if not (sigma > 0 and -SLACK * sigma <= loss <= expected.loss_bound + SLACK * sigma):
        raise Malformed("the upload's loss is not one with the noise it claims")
    return float(loss), float(sigma)
