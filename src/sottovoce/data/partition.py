"""Partition rows among clients, the validation set and the test set.

A split is a few lists of row numbers, and no row is in two of them: rows of validation and test
belong to no client, except with `column`. Everything is drawn from the given `rng`, in this order:
one permutation of the rows (validation first, then test, then the clients' share), then what the
kind of split draws.

- `iid`: every client draws from all classes alike.
- `sizes`: iid, with the listed numbers of rows; g sizes are spread over g equal groups of clients.
- `order`: the rows in their order, client after client; validation and test rows are the last.
- `labels`: every client holds k classes, in equal amounts, and different clients different mixes.
- `dirichlet`: every client's class proportions are a draw from Dirichlet(α, …, α).
- `column` (`split_by_column`): a column names the client of each row, and validation and test rows
  are taken from clients.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from sottovoce.errors import InputError

Rows = NDArray[np.int64]
Counts = NDArray[np.int64]  # [client, class]


@dataclass(frozen=True, eq=False)
class Split:
    """Row numbers, pairwise disjoint: `clients` and `validation` count rows of the train arrays.

    `test` counts rows of the train arrays too when `test_from` is "train", and rows of the
    dataset's own test arrays when it is "test".
    """

    clients: tuple[Rows, ...]
    validation: Rows
    test: Rows
    test_from: Literal["train", "test"]


def deal_persons(
    split: Split, person: NDArray[np.int64], owner: NDArray[np.int32] | None = None
) -> Split:
    """Return the split of rows that follows from a split of persons.

    person: the person of each row, from 0; `split` counts persons. All rows of a person are trained
    on, or none is. owner: the client of each row, where a column names it; otherwise a client has
    all rows of its persons.

    >>> split = Split((np.array([0, 2]),), np.array([1]), np.array([3]), "train")
    >>> rows = deal_persons(split, np.array([0, 1, 1, 2, 3, 0]))
    >>> rows.clients[0].tolist(), rows.validation.tolist(), rows.test.tolist()
    ([0, 3, 5], [1, 2], [4])
    """
    client = np.full(int(person.max()) + 1, -1)
    for i, persons in enumerate(split.clients):
        client[persons] = i
    of_row = client[person] if owner is None else np.where(client[person] >= 0, owner, -1)
    counts = np.bincount(of_row + 1, minlength=len(split.clients) + 1)
    by_client = np.argsort(of_row, kind="stable")
    clients = tuple(np.split(by_client, np.cumsum(counts)[:-1])[1:])
    if not all(map(len, clients)):
        raise InputError(
            f"client {next(i for i, rows in enumerate(clients) if not len(rows))} (from 0) has no "
            "row left to train on: all its persons are validated or tested on; lower "
            "data.validation or data.test, or name other files there"
        )
    in_train = split.test_from == "train"
    return Split(
        clients=clients,
        validation=np.flatnonzero(np.isin(person, split.validation)),
        test=np.flatnonzero(np.isin(person, split.test)) if in_train else split.test,
        test_from=split.test_from,
    )


def split_by_column(
    owner: NDArray[np.int32],
    *,
    validation: int | float,
    test: int | float,
    rng: np.random.Generator,
    own_test: int = 0,
) -> Split:
    """Give each client its rows, less those for validation and test.

    owner: the client of each row, from 0, each with at least one row.
    validation, test: a fraction (0 to 1) of *each* client's rows, rounded up for some clients and
    down for others, so that the sum is that fraction of all rows; or a whole number of rows of any
    clients. validation = 0 means that these rows come from another table; so does test = 0 with
    `own_test` > 0.

    Raises `InputError` if validation, test or a client is left without rows.
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
        if wanted < 1:
            at = _take_fraction(sizes, spare, wanted, rng)
        else:
            at = rng.permutation(np.flatnonzero(spare))[: int(wanted)]
        if len(at) == 0 or len(at) < (wanted if wanted >= 1 else 1):
            bound = f"one row or more and at most the {int(spare.sum())} that clients can spare"
            remedy = f"{len(sizes)} clients hold {len(owner)} rows and each keeps one to train on"
            raise InputError.of(f"data.{name}", wanted, bound, remedy)
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


def _take_fraction(
    sizes: NDArray[np.int64], spare: NDArray[np.bool_], fraction: float, rng: np.random.Generator
) -> NDArray[np.int64]:
    """Take a fraction of each client's rows, rounded so that the sum is right to within one.

    If no client that should give a row has one to spare, others give the rows whose fractions were
    rounded down.
    """
    ends = np.floor(np.cumsum(sizes) * fraction + rng.random()).astype(np.int64)
    wanted = np.diff(ends, prepend=0)
    first = np.cumsum(sizes) - sizes
    free = np.cumsum(spare)  # the number of spare rows up to each row
    nth = free - np.repeat(free[first] - spare[first], sizes)  # the same within its client
    taken = spare & (nth <= np.repeat(wanted, sizes))
    if not taken.any():
        most = np.repeat(np.ceil(sizes * fraction), sizes)
        others = np.flatnonzero(spare & (nth <= most))
        taken[rng.permutation(others)[: ends[-1]]] = True
    return np.flatnonzero(taken)


def split_rows(
    labels: ArrayLike,
    *,
    kind: str,
    clients: int,
    samples: int | Sequence[int] | None,
    validation: int,
    test: int,
    rng: np.random.Generator,
    labels_per_client: int | None = None,
    alpha: float | None = None,
    ids: ArrayLike | None = None,
    own_test: int = 0,
) -> Split:
    """Deal the rows with these labels to clients, a validation set and a test set.

    labels: the class of each row; ids: the row numbers they belong to (absent: 0, 1, 2, …).
    samples: rows per client; a list of one number per client (for `sizes` also a list of g numbers,
    where g divides `clients`: the first clients / g clients get the first number, and so on); or
    None, as many as possible, the same for all.
    validation, test: rows taken from these for no client. test = 0 with `own_test` > 0 means that
    the dataset's own test set of that many rows is the test set.
    labels_per_client: k of `labels`; alpha: α > 0 of `dirichlet`, small for one-sided clients.

    The plan has checked each number and the length of a list. Raises `InputError` before anything
    is drawn if Σ samples + validation + test exceeds the rows, and when a class runs out in a
    `labels` split.
    """
    classes = np.asarray(labels, dtype=np.int64)
    rows = np.arange(len(classes)) if ids is None else np.asarray(ids, dtype=np.int64)
    k = (labels_per_client or 1) if kind == "labels" else 1
    wanted = {"clients": clients, "rows": len(rows), "set_aside": validation + test}
    sizes = size_clients(samples, **wanted, at_least=k)

    if kind == "order":
        order = np.roll(np.arange(len(rows)), validation + test)
    else:
        order = rng.permutation(len(rows))
    shared, rest = order[: validation + test], order[validation + test :]
    match kind:
        case "labels":
            counts = _count_by_labels(classes[rest], sizes, k, fill=samples is None, rng=rng)
            dealt = _deal_counts(rows[rest], classes[rest], counts, rng=rng)
        case "dirichlet":
            counts = _draw_counts(classes[rest], sizes, alpha or 1.0, rng=rng)
            dealt = _deal_counts(rows[rest], classes[rest], counts, rng=rng)
        case _:
            ends, left = [0, *np.cumsum(sizes).tolist()], rows[rest]
            dealt = tuple(left[a:b] for a, b in pairwise(ends))
    return Split(
        clients=dealt,
        validation=rows[shared[:validation]],
        test=np.arange(own_test) if test == 0 else rows[shared[validation:]],
        test_from="test" if test == 0 and own_test > 0 else "train",
    )


def choose_class_sets(
    stock: Sequence[int], *, clients: int, k: int, rng: np.random.Generator
) -> list[frozenset[int]]:
    """Choose k classes for each client: every class equally often (±1), few sets repeated.

    With C = len(stock) classes there are N = (C choose k) sets: each is given to ⌊clients / N⌋ or
    one more of the clients, so no two clients share a set while clients ≤ N. Classes with more
    stock are the ones used once more.

    Why it always works: start from any different sets. While class a is used more often than b, the
    sets with a and without b outnumber those with b and without a, so one of them can exchange a
    for b and become a set that nobody has.
    """
    C = len(stock)
    N = math.comb(C, k)
    times, left = divmod(clients, N)
    everything = [frozenset(c) for c in combinations(range(C), k)] if 2 * clients >= N else []
    different: dict[frozenset[int], None] = {}  # a dict, because a set has no order
    if everything:
        different = {everything[i]: None for i in rng.permutation(N)[:left]}
    while len(different) < left:  # at most half of all sets are needed, so few draws are repeats
        different[frozenset(rng.choice(C, k, replace=False).tolist())] = None

    used = Counter(dict.fromkeys(range(C), 0))
    used.update(c for s in different for c in s)
    least, more = divmod(left * k, C)
    by_stock = sorted(range(C), key=lambda c: -stock[c])
    target = {c: least + (rank < more) for rank, c in enumerate(by_stock)}
    while over := [c for c in range(C) if used[c] > target[c]]:
        a = over[0]
        b = next(c for c in range(C) if used[c] < target[c])
        old = next(s for s in different if a in s and b not in s and s - {a} | {b} not in different)
        del different[old]
        different[old - {a} | {b}] = None
        used[a] -= 1
        used[b] += 1
    sets = everything * times + list(different)
    return [sets[i] for i in rng.permutation(clients)]


def _count_by_labels(
    classes: Rows, sizes: Rows, k: int, *, fill: bool, rng: np.random.Generator
) -> Counts:
    """Return the rows of each client and class, k classes a client; refuse what does not fit."""
    names, stock = np.unique(classes, return_counts=True)
    if k > len(names):
        bound = f"at most {len(names)}, the classes left for clients"
        remedy = "lower it, or lower data.validation or data.test"
        raise InputError.of("data.labels_per_client", k, bound, remedy)
    sets = choose_class_sets(stock.tolist(), clients=len(sizes), k=k, rng=rng)
    uses = _mark_held(sets, len(names)).sum(axis=0)
    safe = k * int((stock[uses > 0] // uses[uses > 0]).min())  # these sets can hold this many
    if fill:
        sizes = np.full(len(sizes), max(k, safe))
    else:
        sets = _ease_shortages(sets, sizes / k, stock)
    counts = _share_equally(sets, sizes, stock)
    left = stock - counts.sum(axis=0)
    if left.min() < 0:
        worst = int(left.argmin())
        bound = "small enough for the rows of every class"
        remedy = (
            f"class {names[worst]} runs out, its clients need {counts[:, worst].sum()} rows and "
            f"{stock[worst]} are left: lower data.clients or data.samples"
            + (f" ({safe} each is possible)" if safe > 0 else "")
        )
        raise InputError.of(
            "data.samples", int(sizes[0]) if np.ptp(sizes) == 0 else sizes.tolist(), bound, remedy
        )
    return counts


def _ease_shortages(
    sets: list[frozenset[int]], rows_each: NDArray[np.float64], stock: Rows
) -> list[frozenset[int]]:
    """Move clients from classes that would run out to classes with rows to spare.

    Classes are then used less equally, so it is done only for lack of rows. Sets that are all
    different stay so. With clients of unequal sizes the best choice is a packing problem: this
    takes every move that lowers the shortage, and stops when there is none.
    """
    spare = stock - rows_each @ _mark_held(sets, len(stock))
    held = Counter(sets)
    most = 1 if len(held) == len(sets) else len(sets)
    eased = list(sets)
    moved = True
    while moved and spare.min() < 0:
        moved = False
        for i, rows in enumerate(rows_each.tolist()):
            old = eased[i]
            a = min(old, key=lambda c: spare[c])
            free = [b for b in range(len(stock)) if held[old - {a} | {b}] < most and b not in old]
            if spare[a] >= 0 or not free:
                continue
            b = max(free, key=lambda c: spare[c])
            relief = min(rows, -spare[a])
            harm = max(0.0, rows - max(0.0, spare[b]))
            if relief > harm + 1e-9:
                eased[i] = old - {a} | {b}
                held[old] -= 1
                held[eased[i]] += 1
                spare[a] += rows
                spare[b] -= rows
                moved = True
    return eased


def _share_equally(sets: Sequence[frozenset[int]], sizes: Rows, stock: Rows) -> Counts:
    """Return the rows of each client and class: ⌊n/k⌋ of its k classes, 1 more of n mod k of them.

    The odd rows are taken from the classes with most left. If a class has too few, odd rows are
    passed along a chain of clients (class a gives one to b, b one to c, …) to a class with a spare
    row: an augmenting path, so the result fits the stock whenever some choice of odd rows does.
    """
    k = len(sets[0])
    held = _mark_held(sets, len(stock))
    counts = held * (sizes // k)[:, None]
    spare = stock - counts.sum(axis=0)
    odd = np.zeros(held.shape, bool)
    for i in np.flatnonzero(sizes % k).tolist():
        chosen = sorted(sets[i], key=lambda c: -spare[c])[: sizes[i] % k]
        odd[i, chosen] = True
        spare[chosen] -= 1
    for start in range(len(stock)):
        while spare[start] < 0 and (path := _find_chain(odd, held, spare, start)):
            for i, a, b in path:
                odd[i, a], odd[i, b] = False, True
            spare[start] += 1
            spare[path[-1][2]] -= 1
    return counts + odd


def _mark_held(sets: Sequence[frozenset[int]], classes: int) -> NDArray[np.bool_]:
    """Return which client (first axis) holds which class."""
    held = np.zeros((len(sets), classes), bool)
    np.put_along_axis(held, np.array([sorted(s) for s in sets]), True, axis=1)
    return held


def _find_chain(
    odd: NDArray[np.bool_], held: NDArray[np.bool_], spare: Rows, start: int
) -> list[tuple[int, int, int]]:
    """Return the shortest list of (client, from class, to class) to a class with a spare row."""
    came: dict[int, tuple[int, int, int]] = {}
    queue = deque([start])
    while queue:
        a = queue.popleft()
        if spare[a] > 0:
            path = []
            while a != start:
                path.append(came[a])
                a = came[a][1]
            return path[::-1]
        for b in range(len(spare)):
            movers = np.flatnonzero(odd[:, a] & held[:, b] & ~odd[:, b])
            if b != start and b not in came and len(movers):
                came[b] = (int(movers[0]), a, b)
                queue.append(b)
    return []


def _draw_counts(classes: Rows, sizes: Rows, alpha: float, *, rng: np.random.Generator) -> Counts:
    """Draw each client's classes by its own proportions, from the classes still in stock."""
    stock = np.unique(classes, return_counts=True)[1]
    counts = np.zeros((len(sizes), len(stock)), np.int64)
    for i, n in enumerate(sizes.tolist()):
        wanted = rng.dirichlet(np.full(len(stock), alpha))
        while (missing := n - int(counts[i].sum())) > 0:
            p = np.where(stock > 0, wanted, 0.0)
            # A small α can put all weight on classes that are used up: then draw from the rest.
            p = p / p.sum() if p.sum() > 0 else stock / stock.sum()
            drawn = np.minimum(rng.multinomial(missing, p), stock)
            counts[i] += drawn
            stock = stock - drawn
    return counts


def _deal_counts(
    rows: Rows, classes: Rows, counts: Counts, *, rng: np.random.Generator
) -> tuple[Rows, ...]:
    """Deal `counts[client, class]` rows of each class, shuffled within each client."""
    names, first = np.unique(np.sort(classes), return_index=True)
    by_class = rows[np.argsort(classes, kind="stable")]
    ends = first + np.cumsum(counts, axis=0)
    dealt = []
    for end, count in zip(ends, counts, strict=True):
        pieces = [by_class[end[c] - count[c] : end[c]] for c in range(len(names))]
        dealt.append(rng.permutation(np.concatenate(pieces)))
    return tuple(dealt)


def size_clients(
    samples: int | Sequence[int] | None,
    *,
    clients: int,
    rows: int,
    set_aside: int,
    at_least: int = 1,
) -> Rows:
    """Return one size per client; refuse sizes that exceed the rows that are not set aside.

    `samples` is one number for all, one for each client, or one for each equal group of clients.
    """
    spare = max(0, rows - set_aside)
    if samples is None:
        if spare < clients * at_least:
            raise InputError(
                f"data.validation and data.test must leave {clients * at_least} rows or more for "
                f"data.clients = {clients}, got {spare} of {rows}; lower one of the three"
            )
        return np.full(clients, spare // clients)
    listed = [samples] if isinstance(samples, int) else list(samples)
    total = sum(int(n) for n in listed) * (clients // len(listed))
    if total > spare:
        raise InputError(
            f"data.samples must be at most {spare} rows for all {clients} clients together, which "
            f"is {rows} less {set_aside} for validation and test, got {samples!r:.60}; these are "
            f"{total}: lower data.samples, data.clients, data.validation or data.test"
        )
    return np.repeat(np.asarray(listed, np.int64), clients // len(listed))
