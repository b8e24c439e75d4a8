"""Who takes part in a round, and the noise that a client derives from it.

The server sees who answers, so choosing clients at random does not amplify privacy; it only makes
the number of a client's turns uncertain: with K of U at random, 38–48 % of the clients exceed the
mean qT. Balanced cohorts (least asked first, ties at random) give everyone ⌊qT⌋ or ⌈qT⌉ turns.

The server announces `Round(t, horizon, …)`. A client computes for itself how many turns that leaves
and what each may cost. A lying server can waste a client's budget, never exceed it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray

from sottovoce.errors import InputError
from sottovoce.privacy.budget import Calibration
from sottovoce.privacy.calibration import add_smallest, charges_absent
from sottovoce.privacy.gaussian import Floats
from sottovoce.privacy.tank import Offer, Tank
from sottovoce.schedules.base import Round

CohortKind: TypeAlias = Literal["balanced", "random"]
COHORTS: tuple[CohortKind, ...] = get_args(CohortKind)
MOST_ROUNDS = 2**52  # more than a tank has units, and still exact as a float
LOSS_SHARE = 10  # a tenth of a turn's first release pays for the loss, where clients send it


def pick_cohort(
    kind: CohortKind,
    *,
    asked: NDArray[np.int64],
    size: int,
    rng: np.random.Generator,
    online: NDArray[np.bool_] | None = None,
) -> NDArray[np.int64]:
    """Return the sorted ids of at most `size` clients. `asked` counts how often each was asked.

    If fewer clients than `size` are online, all of them are picked. The caller adds one to `asked`
    of those picked, whether they answer or not.

    >>> rng = np.random.default_rng(0)
    >>> pick_cohort("balanced", asked=np.array([3, 2, 3, 2]), size=2, rng=rng).tolist()
    [1, 3]
    """
    if kind not in COHORTS:
        raise InputError.of("cohort", kind, "balanced or random", "balanced is the default")
    if size < 1:
        raise InputError.of("per_round", size, "≥ 1", "say how many clients upload in a round")
    present = np.arange(len(asked)) if online is None else np.flatnonzero(online)
    shuffled = rng.permutation(present)
    if kind == "balanced":
        shuffled = shuffled[np.argsort(asked[shuffled], kind="stable")]
    return np.sort(shuffled[:size]).astype(np.int64)


def plan_turns(
    kind: CohortKind, *, rounds: int, clients: int, per_round: int, charges_absent: bool = False
) -> int:
    """Return the number of turns a client should plan for in a run of `rounds` rounds.

    balanced            ⌈K·T/U⌉, which nobody exceeds
    random              ⌈qT + 2√(Tq(1−q))⌉, at most T: two standard deviations above the mean
    charged when absent T, the paper's way of counting

    >>> plan_turns("balanced", rounds=200, clients=50, per_round=30)
    120
    >>> plan_turns("random", rounds=200, clients=50, per_round=30)
    134
    """
    if kind not in COHORTS:
        raise InputError.of("cohort", kind, "balanced or random", "balanced is the default")
    rounds = min(max(rounds, 0), MOST_ROUNDS)  # a server may announce anything
    if charges_absent:
        return rounds
    if kind == "balanced":
        return -(-per_round * rounds // clients)
    q = per_round / clients
    return min(rounds, math.ceil(q * rounds + 2 * math.sqrt(rounds * q * (1 - q))))


@dataclass(frozen=True)
class Terms:
    """The public numbers of a federation that a client's noise depends on."""

    clients: int
    per_round: int
    cohort: CohortKind = "balanced"
    calibration: Calibration = "exact"
    releases: int = 1  # of one participation
    honest: int = 1  # clients whose noise counts, where the server learns only sums (h)
    corrupt: int = 0  # clients that may side with it (c)

    def plan_releases(self, rounds: int) -> int:
        """Return the number of releases a client should plan for in a run of so many rounds.

        >>> Terms(clients=50, per_round=30).plan_releases(200)
        120
        """
        size = {"clients": self.clients, "per_round": self.per_round}
        absent = charges_absent(self.calibration)
        return self.releases * plan_turns(self.cohort, rounds=rounds, **size, charges_absent=absent)


def price_release(
    tank: Tank,
    round_: Round,
    terms: Terms,
    sensitivity: ArrayLike,
    *,
    horizons: Sequence[int] | None = None,
) -> Offer:
    """Offer every client a price for its next release; it is declined where the tank is too low.

    r = planned(T) − debits releases are to come, this one included: σ = Δ·√(r/left). A scale that
    no schedule announces is ignored. Several runs may be priced together: they are the first axis
    of the tank, and their rounds differ only in the `horizons`.

    >>> tank = Tank.full(capacity=2.0)
    >>> price_release(tank, Round(t=0, horizon=200), Terms(50, 30), sensitivity=1.0).sigma.round(4)
    np.float64(7.746)
    """
    if round_.spread is None or not 1e-6 <= round_.scale <= 1e6:
        planned = np.asarray(terms.plan_releases(round_.horizon))
        if horizons is not None:
            planned = np.array([[terms.plan_releases(horizon)] for horizon in horizons])
        return tank.offer(sensitivity, planned - tank.debits)
    return tank.offer_scaled(sensitivity, terms.plan_releases(round_.spread), round_.scale)


_SLACK = 1 + 2.0**-32  # pays for rounding in sums of up to 2²⁰ variances


def share_noise(sigma: ArrayLike, samples: ArrayLike, present: ArrayLike, *, honest: int) -> Floats:
    """Return the noise s of each client where the server learns only the sum of their uploads.

    In the sum an upload has the weight n, and only the noise of h honest clients counts, itself
    included. A client promises to add at least a variance of v = (nσ)²/h. It adds what is missing
    of its own (nσ)² when the h − 1 smallest promises of the others are counted, and at least v:

        (n·s)² = max(v, (nσ)² − Σ of the h − 1 smallest v of others)       (equal clients: σ/√h)

    Whoever is honest, (n·s)² and the noises of h − 1 others add up to (nσ)² or more; and (Δ/s)² is
    at most h·(Δ/σ)². The last axis has the clients; σ stays where a client is not present.

    >>> share_noise([2.0, 2.0, 2.0, 2.0], 100, [True] * 4, honest=4).round(6).tolist()
    [1.0, 1.0, 1.0, 1.0]
    >>> share_noise([3.0, 5.0], 100, [True, True], honest=2).round(4).tolist()
    [2.1213, 4.5277]
    """
    sigma, samples = np.asarray(sigma, dtype=np.float64), np.asarray(samples, dtype=np.float64)
    needed = np.where(present, (samples * sigma) ** 2, np.inf)
    promised = needed / honest
    with np.errstate(invalid="ignore"):  # ∞ − ∞ of clients that are not present
        others = add_smallest(promised, honest - 1) - promised
        variance = np.maximum(promised, needed * _SLACK - others)
    return np.where(present, np.sqrt(variance) / samples, sigma)
