"""Check an answer: its schema, then its size, then whether the claimed noise is in it (rule R8).

The rules are in docs/protocol.md. An honest upload is w̃ = w − s + Z with ‖s‖ ≤ E·η·C, and Z has
d coordinates with standard deviation σ (over E steps: √Σσ²), rounded to float32. With probability
above 1 − 1e-13 (all checks together)

    σ(√d − 8) − E·η·C  ≤  ‖w̃ − w‖  ≤  E·η·C + σ(√d + 8) + 2⁻²³(‖w‖ + that)

because ‖Z‖/σ is a 1-Lipschitz function of d normals, and so within 8 of √d except with probability
e⁻³². Above the upper bound a client is broken or hostile; below the lower bound it has forgotten
its noise, and should hear so. For small d the lower bound is not positive; `_require_noise` works
there, too, and does not need E·η·C.

The σ is the client's claim. It must lie between a floor and a ceiling that the server knows, and
be worth no more μ² than the client says it has booked since its last upload: Σ (Δ/σ)² ≤ spent now
− spent before. For a client that hides what it spent, the limit is the loosest budget that any
vault may have. In the upper bound the σ counts only as far as the client's disclosed budget needs
it in the announced round (`_limit_noise_ratio`): claiming more noise lets nobody go further. A
rejected upload drops its client from the round, never the round.
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
from sottovoce.client.messages import ANSWER, CODES, Receipt, Request, is_finite, require_version
from sottovoce.errors import Malformed, OtherSamples
from sottovoce.privacy import calibration, grid
from sottovoce.privacy.tank import FULL, Tank
from sottovoce.schedules.pricing import LOSS_SHARE, Terms, price_release
from sottovoce.server.members import Account, Member

SLACK = 8.0  # standard deviations of ‖Z‖: e⁻³² = 1.3e-14 on either side
HEAD_BYTES = 1 << 16  # of a head, without the names of its arrays and its values of σ
RARE = math.log(1e-14)  # log of the false alarm rate of one test of `_require_noise`
# A loss is paid with one tenth of a debit, and so has √9 times the noise of the model; √18 times
# where a debit is only a few parts of the capacity.
LOSS_NOISE = 5.0
ROUNDING = 1e-14  # relative, of a difference of what a client has spent
_KEYS = {"schema", "kind", "run", "t", "request", "samples", "receipt", "budget", "sigma"}

Arrays = dict[str, NDArray[np.float32]]


@dataclass(frozen=True, eq=False)
class ExpectedUpload:
    """What the server asked of a client, and what it knows of the client."""

    asked: Request
    request: str  # its hash
    member: Member
    ceiling: float  # the largest σ/Δ that a client of this run could need
    terms: Terms | None = None  # without them the ceiling alone limits the noise
    opened: float = 0.0  # μ² that the client had spent when the run began
    debits: int = 0  # its releases in this run's accepted uploads
    shown: tuple[float, int] = (0.0, 0)  # Σ‖w̃ − w‖²/σ² and Σd of its accepted uploads
    disclosed: bool = False  # whether the plan's weights need its budget

    @property
    def longest(self) -> int:
        """A number of bytes that no honest answer exceeds."""
        arrays = sum(4 * leaf.size + 512 for leaf in self.asked.params.values())
        return arrays + HEAD_BYTES + 32 * self.asked.recipe.releases

    @property
    def sensitivity(self) -> float:
        """Δ of one release."""
        return float(self.asked.recipe.sensitivity(self.member.samples))

    @property
    def loss_sensitivity(self) -> float:
        """Δ_V of the mean loss: B/n for a record, B for all of a client's data."""
        share = 1 if self.asked.recipe.unit == "client" else self.member.samples
        return (self.asked.loss_bound or 0.0) / share


@dataclass(frozen=True, eq=False)
class AcceptedUpload:
    """An upload that passed all checks."""

    params: Arrays
    sigma: tuple[float, ...]
    receipt: Receipt
    account: Account | None
    loss: float | None = None
    shown: tuple[float, int] = (0.0, 0)


def check_answer(blob: bytes, expected: ExpectedUpload) -> AcceptedUpload | str:
    """Return an upload that passed all checks, or a refusal's code; else raise `Malformed`."""
    head, arrays = messages.unpack(blob, limit=expected.longest)
    require_version(head, ANSWER)
    if head.get("kind") == "refusal":
        return read_code(head)
    loss_keys = set() if expected.asked.loss_bound is None else {"loss", "loss_sigma"}
    if head.get("kind") != "upload" or head.keys() != _KEYS | loss_keys:
        raise Malformed("the answer does not have the keys of an upload")
    asked, member = expected.asked, expected.member
    wanted = {"run": asked.run, "t": asked.round.t, "request": expected.request}
    for key, value in wanted.items():
        if type(head[key]) is not type(value) or head[key] != value:
            raise Malformed(f"the upload is for another {key}")
    if type(head["samples"]) is not int or head["samples"] != member.samples:
        raise OtherSamples("the upload's number of samples is not that of the client's greeting")
    receipt, account = Receipt.from_json(head["receipt"]), Account.from_json(head["budget"])
    if receipt.vault != member.vault:
        raise Malformed("the upload's receipt belongs to another client")
    if account is None and expected.disclosed:
        raise Malformed("the upload hides its budget, which its weight is computed from")
    _require_budget(account, member)
    sigma = _check_sigma(head["sigma"], expected)
    if {n: a.shape for n, a in arrays.items()} != {n: a.shape for n, a in asked.params.items()}:
        raise Malformed("the upload's arrays do not have the names and shapes of the model's")
    if not all(np.all(np.isfinite(leaf)) for leaf in arrays.values()):
        raise Malformed("the upload is not finite")
    loss, loss_sigma = _check_loss(head, expected)
    released = _sum_released(sigma, loss_sigma, expected)
    most = _limit_noise_ratio(account, released, expected) * expected.sensitivity
    if account is not None and member.account is not None:
        _require_booked(member.account.spent, account.spent, released)
    elif released * (1 - 1e-9) > _largest_capacity():
        raise Malformed("the upload has less noise than any vault could have paid for")
    distance = _check_distance(arrays, sigma, most, expected)
    shown = _require_noise(arrays, sigma[-1], distance, expected)
    return AcceptedUpload(arrays, sigma, receipt, account, loss, shown)


def read_code(head: Mapping[str, Any]) -> str:
    """Return a refusal's code; a record can hold no others, and not every text can be written."""
    return str(head["code"]) if head.get("code") in CODES else "internal"


def check_input(
    head: Mapping[str, Any], member: Member, change: int, honest: int
) -> tuple[Receipt, Account | None]:
    """Return receipt and budget of a masked input; reject what an honest client would not say.

    Of h noises that are counted together none is worth more than h times what was booked for it:
    (Δ/s)² ≤ h·μ², with Δ = `change` and s in grid units.
    """
    receipt, account = Receipt.from_json(head.get("receipt")), Account.from_json(head.get("budget"))
    noise, before = head.get("noise"), member.account
    if receipt.vault != member.vault:
        raise Malformed("the input's receipt belongs to another client")
    if type(noise) is not int or not 1 <= noise <= grid.LARGEST_NOISE:
        raise Malformed("the input's noise is no whole number of grid units")
    _require_budget(account, member)
    if account is not None and before is not None:
        _require_booked(before.spent, account.spent, (change / noise) ** 2 / honest)
    return receipt, account


def _require_budget(account: Account | None, member: Member) -> None:
    """Reject a budget that is not the client's: in a run it may only be tightened, or hidden.

    One that was hidden stays hidden, as in a vault: what was booked meanwhile is not known, so that
    no later figure could bear out the record.
    """
    before = member.account
    if account is None:
        return
    if before is None:
        raise Malformed("the upload shows a budget that its client has hidden before")
    if replace(account, spent=before.spent) == before:
        return
    account.require_worth(member.calibration)
    if (
        account.epsilon > before.epsilon
        or account.delta > before.delta
        or account.capacity > before.capacity
    ):
        raise Malformed("the upload's budget is looser than the budget of the client's greeting")


def _check_sigma(values: Any, expected: ExpectedUpload) -> tuple[float, ...]:
    if not isinstance(values, list) or len(values) != expected.asked.recipe.releases:
        raise Malformed("the upload does not state one σ per step")
    if not all(is_finite(s) and s > 0 for s in values):
        raise Malformed("the upload's σ is not a finite number > 0")
    # The floor is that of a whole turn, and so the least of each of its releases.
    least, most = (expected.member.floor or 0.0) * (1 - 1e-9), expected.ceiling
    if any(not least <= s / expected.sensitivity <= most for s in values):
        raise Malformed("the upload's σ is below the client's floor or above what it needs")
    return tuple(map(float, values))


@cache
def _largest_capacity() -> float:
    """Return the largest capacity (μ²) that a vault's budget can have."""
    return float(calibration.capacity(*calibration.LOOSEST))


def _sum_released(
    sigma: tuple[float, ...], loss_sigma: float | None, expected: ExpectedUpload
) -> float:
    """Return the μ² that the claimed noise is worth, of all steps and the loss."""
    ratios = [expected.sensitivity / s for s in sigma]
    if loss_sigma is not None:
        ratios.append(expected.loss_sensitivity / loss_sigma)
    return sum(ratio * ratio for ratio in ratios)


def _require_booked(before: float, spent: float, released: float) -> None:
    """Reject noise that is worth more μ² than its client has booked for it since `before`."""
    if spent - before < released * (1 - 1e-10) - ROUNDING * spent:
        raise Malformed("the upload has less noise than its client has paid for")


def _limit_noise_ratio(account: Account | None, released: float, expected: ExpectedUpload) -> float:
    """Return the largest σ/Δ that the client's budget needs in this round.

    It is what `release.price` gives for the books that the client shows: what it had spent before
    this upload, of the capacity that it disclosed, over the releases that the horizon leaves. A
    client that hides its budget is held to the ceiling alone.
    """
    terms, floor, share = expected.terms, expected.member.floor or 0.0, expected.member.run_share
    if account is None or terms is None or share is None:
        return expected.ceiling
    before = min(max(account.spent - released, 0.0), account.capacity)
    opened = min(expected.opened, before) if expected.debits else before
    # A client counts what a run may not take of its budget as spent before the run.
    kept = account.capacity * (1 - share)
    before = min(max(before, kept + before - opened), account.capacity)
    opened = max(opened, kept)
    tank = Tank(
        capacity=np.array(account.capacity),
        spent=np.array(int(before / account.capacity * FULL)),
        opened=np.array(int(opened / account.capacity * FULL)),
        debits=np.array(expected.debits),
    )
    priced = price_release(tank, expected.asked.round, terms, 1.0)
    model = 1.0 if expected.asked.loss_bound is None else 1 - 1 / LOSS_SHARE
    ratio = max(float(priced.sigma), floor * math.sqrt(terms.releases)) / math.sqrt(model)
    return min(ratio * (1 + 1e-6), expected.ceiling) if priced.granted else expected.ceiling


def _check_distance(
    arrays: Arrays, sigma: tuple[float, ...], most: float, expected: ExpectedUpload
) -> float:
    """Return an upper bound of ‖w̃ − w‖ before rounding; reject what lies too far or too near."""
    squares = [
        float(np.sum((leaf.astype(np.float64) - expected.asked.params[name]) ** 2))
        for name, leaf in arrays.items()
    ]
    start = [float(np.sum(np.square(w, dtype=np.float64))) for w in expected.asked.params.values()]
    moved, norm = math.sqrt(math.fsum(squares)), math.sqrt(math.fsum(start))
    root = math.sqrt(sum(leaf.size for leaf in arrays.values()))
    recipe = expected.asked.recipe
    step = recipe.steps * recipe.learning_rate * recipe.clip
    furthest = step + math.hypot(*(min(s, most) for s in sigma)) * (root + SLACK)
    rounding = 2**-23 * (norm + furthest)
    if not moved <= furthest + rounding:
        raise Malformed("the upload lies further from the model than its step and noise allow")
    if moved + rounding < math.hypot(*sigma) * (root - SLACK) - step:
        raise Malformed("the upload lies nearer to the model than its noise allows")
    return moved + rounding


def _require_noise(
    arrays: Arrays, sigma: float, distance: float, expected: ExpectedUpload
) -> tuple[float, int]:
    """Reject an upload without its noise, whatever d is; a test's false alarm rate is below 1e-14.

    Given everything before it, the noise Z of the last step is d independent normals around a point
    that they do not depend on. So (Anderson) ‖w̃ − w‖/σ is no smaller in distribution than ‖Z‖/σ,
    and S = Σ‖w̃ − w‖²/σ² over a client's uploads no smaller than χ² with D = Σd degrees of freedom:

        P(χ²_D ≤ xD) ≤ (x·e^{1−x})^{D/2}   for x < 1   (Chernoff).

    Also, coordinate j is unchanged with probability p_j ≤ (its float32 spacing + one grid
    unit)/(σ√2π), so that k coordinates are with probability at most (Σp)^k/k!.
    """
    recipe, count = expected.asked.recipe, sum(leaf.size for leaf in arrays.values())
    total, degrees = expected.shown[0] + (distance / sigma) ** 2, expected.shown[1] + count
    x = total / degrees
    if x < 1 and (x == 0 or degrees / 2 * (math.log(x) + 1 - x) < RARE):
        raise Malformed("the upload lies nearer to the model than its noise allows")
    same = sum(int(np.sum(leaf == expected.asked.params[name])) for name, leaf in arrays.items())
    if same:
        cells = math.fsum(
            float(np.sum(np.spacing(np.abs(w)))) for w in expected.asked.params.values()
        )
        unit = recipe.learning_rate / expected.member.samples * grid.grid_unit(recipe.clip)
        chance = (cells + count * unit) / (sigma * math.sqrt(2 * math.pi))
        if same * math.log(chance) - math.lgamma(same + 1) < RARE:
            raise Malformed("the upload repeats numbers of the model without any noise")
    return total, degrees


def _check_loss(
    head: Mapping[str, Any], expected: ExpectedUpload
) -> tuple[float | None, float | None]:
    if expected.asked.loss_bound is None:
        return None, None
    loss, sigma = head["loss"], head["loss_sigma"]
    if not all(is_finite(n) for n in (loss, sigma)):
        raise Malformed("the upload's loss is not a finite number")
    ratio, most = sigma / expected.loss_sensitivity, LOSS_NOISE * expected.ceiling
    if not (expected.member.floor or 0.0) * (1 - 1e-9) <= ratio <= most:
        raise Malformed("the loss's σ is below the client's floor or above what it needs")
    if not (sigma > 0 and -SLACK * sigma <= loss <= expected.asked.loss_bound + SLACK * sigma):
        raise Malformed("the upload's loss is outside [0, B] by more than its noise allows")
    return float(loss), float(sigma)
