"""Who takes part in a round, and for how many turns a client should plan.

The server sees who answers, so choosing clients at random does not amplify privacy; it only makes
the number of turns uncertain. With K-of-U at random 38–48 % of the clients exceed the mean qT.
Balanced cohorts (least asked first, ties at random) make it ⌊qT⌋ or ⌈qT⌉ for everyone.
"""

from __future__ import annotations

import math
from typing import Literal, TypeAlias, get_args

import numpy as np
from numpy.typing import NDArray

from sottovoce.errors import InputError

CohortKind: TypeAlias = Literal["balanced", "random"]
MOST_ROUNDS = 2**52  # more than a tank has units, and still exact as a float
COHORTS: tuple[CohortKind, ...] = get_args(CohortKind)


def pick(
    kind: CohortKind,
    *,
    asked: NDArray[np.int64],
    size: int,
    rng: np.random.Generator,
    online: NDArray[np.bool_] | None = None,
) -> NDArray[np.int64]:
    """The ids of at most `size` clients, sorted. `asked` counts how often each was asked before.

    Fewer clients online than `size`: all of them. The caller adds one to `asked` of those picked,
    whether they answer or not.

    >>> rng = np.random.default_rng(0)
    >>> pick("balanced", asked=np.array([3, 2, 3, 2]), size=2, rng=rng).tolist()
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


def planned(
    kind: CohortKind, *, rounds: int, clients: int, per_round: int, charges_absent: bool = False
) -> int:
    """How many turns a client should plan for in a run of `rounds` rounds.

    balanced            ⌈K·T/U⌉, which nobody exceeds
    random              ⌈qT + 2√(Tq(1−q))⌉, at most T: two standard deviations above the mean
    charged when absent T, the paper's way of counting

    >>> planned("balanced", rounds=200, clients=50, per_round=30)
    120
    >>> planned("random", rounds=200, clients=50, per_round=30)
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
