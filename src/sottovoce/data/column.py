"""The split a table brings itself: a column says whose each row is.

Validation and test rows are taken from the clients' own rows before training, and a client always
keeps one row or more to train on.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from sottovoce.data.partition import Split
from sottovoce.errors import InputError


def split_by_column(
    owner: NDArray[np.int32],
    *,
    validation: int | float,
    test: int | float,
    rng: np.random.Generator,
    own_test: int = 0,
) -> Split:
    """Each client its rows, less those for validation and test.

    owner: the client of each row, from 0, each with a row or more.
    validation, test: a part (0 to 1) is that part of *each* client's rows, rounded up for some
    clients and down for others, so that all together come to that part of all rows; a whole number
    is so many rows of any clients. validation = 0: these rows are another table's; test = 0 with
    `own_test` > 0: likewise.

    Raises `InputError` if that leaves no row to steer by, none to test on, or a client with none.

    >>> rng = np.random.default_rng(1)
    >>> s = split_by_column(np.repeat([0, 1, 2], [10, 20, 1]), validation=0.2, test=0.2, rng=rng)
    >>> [len(rows) for rows in s.clients], len(s.validation), len(s.test)
    ([6, 12, 1], 6, 6)
    """
    sizes = np.bincount(owner)
    order = rng.permutation(len(owner))
    order = order[np.argsort(owner[order], kind="stable")]  # by client, shuffled within each
    first = np.cumsum(sizes) - sizes
    rank = np.arange(len(owner)) - np.repeat(first, sizes)
    spare = rank > 0  # the first row of each client is never taken
    taken = []
    for name, wanted in (("validation", validation), ("test", test)):
        if wanted == 0 and (name == "validation" or own_test > 0):
            taken.append(order[:0])
            continue
        at = _part(sizes, spare, wanted, rng) if wanted < 1 else _count(spare, wanted, rng)
        if len(at) == 0 or len(at) < (wanted if wanted >= 1 else 1):
            raise InputError.of(
                f"data.{name}",
                wanted,
                f"one row or more and at most the {int(spare.sum())} that clients can spare",
                f"{len(sizes)} clients hold {len(owner)} rows and each keeps one to train on",
            )
        spare[at] = False
        taken.append(np.sort(order[at]))
    used = np.zeros(len(owner), bool)
    used[np.concatenate(taken)] = True
    kept = ~used[order]
    left = np.split(order[kept], np.cumsum(np.bincount(owner[order[kept]]))[:-1])
    return Split(
        clients=tuple(np.sort(rows) for rows in left),
        validation=taken[0],
        test=np.arange(own_test) if len(taken[1]) == 0 else taken[1],
        test_from="test" if len(taken[1]) == 0 else "train",
    )


def _part(
    sizes: NDArray[np.int64], spare: NDArray[np.bool_], part: float, rng: np.random.Generator
) -> NDArray[np.int64]:
    """So many of each client's rows, by systematic rounding: the sum is right to within one."""
    ends = np.floor(np.cumsum(sizes) * part + rng.random()).astype(np.int64)
    wanted = np.diff(ends, prepend=0)
    first = np.cumsum(sizes) - sizes
    free = np.cumsum(spare)  # how many spare rows there are up to each
    nth = free - np.repeat(free[first] - spare[first], sizes)  # within its client, from 1
    return np.flatnonzero(spare & (nth <= np.repeat(wanted, sizes)))


def _count(
    spare: NDArray[np.bool_], wanted: int | float, rng: np.random.Generator
) -> NDArray[np.int64]:
    return rng.permutation(np.flatnonzero(spare))[: int(wanted)]
