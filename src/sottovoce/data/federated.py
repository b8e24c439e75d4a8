"""Who holds what: the rows of each client, of validation and test, read and dealt.

From a named data set, a table, or arrays given from Python. What is told of the clients here (their
number, their sizes, the classes) is public; where it had to be looked up in their rows, the
guarantee says so.
"""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import numpy as np
from numpy.typing import ArrayLike, NDArray

from sottovoce.data import datasets, tables
from sottovoce.data.files import read_npz, why, write_file
from sottovoce.data.partition import Split, sizes_in_order, split
from sottovoce.data.streaming import Stored, is_stored, streams
from sottovoce.data.tables import Layout, split_by_column
from sottovoce.errors import DataError, InputError
from sottovoce.models import features
from sottovoce.models.features import Hog
from sottovoce.plan import Plan
from sottovoce.privacy import seeds
from sottovoce.privacy.seeds import Purpose

if TYPE_CHECKING:
    from sottovoce.runs.record import BudgetGroup, Fairness

# What the server of a real federation holds itself: public rows to validate and to test on.
#
# One `.npz` file: `validation_x`, `validation_y`, `test_x`, `test_y`; `shape` (of one sample) and
# `classes`; of a table also `layout`, how its rows became numbers; `fresh_vaults`, where the
# clients were dealt with them and have vaults for one run only. No pickle, and no training rows.


PARTS = ("validation", "test")


def save(path: Path, held: Holdings) -> None:
    """Write the public part of holdings; what clients hold is not in it."""
    arrays: dict[str, NDArray[np.generic]] = {
        "shape": np.array(held.shape, dtype=np.int64),
        "classes": np.array(held.classes, dtype=np.int64),
    }
    for part in PARTS:
        rows: Samples = getattr(held, part)
        arrays |= {f"{part}_x": rows.x, f"{part}_y": rows.y}
    if held.layout is not None:
        text = json.dumps(held.layout.to_json()).encode()
        arrays["layout"] = np.frombuffer(text, dtype=np.uint8)
    if held.fresh_vaults:
        arrays["fresh_vaults"] = np.array(True)
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **arrays)  # type: ignore[arg-type]
    write_file(path, buffer.getvalue())


def load(path: Path) -> Holdings:
    """Read what `save` wrote, or what an operator made; a sentence if it cannot be used."""
    try:
        arrays = read_npz(path)
        shape = tuple(int(size) for size in arrays["shape"].reshape(-1))
        classes = int(arrays["classes"])
        validation, test = (_samples(arrays, part, shape, classes) for part in PARTS)
        text = arrays["layout"].tobytes() if "layout" in arrays else None
        layout = None if text is None else Layout.from_json(json.loads(text))
        fresh = "fresh_vaults" in arrays
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DataError(
            f"{path} cannot be read as public rows: {why(error)}; it needs validation_x, "
            "validation_y, test_x, test_y, shape and classes"
        ) from None
    nobody = Samples(validation.x[:0], validation.y[:0])
    none = np.zeros(0, dtype=np.int64)
    return Holdings(
        none, nobody, validation, test, None, shape, classes, layout, fresh_vaults=fresh
    )


def _samples(
    arrays: dict[str, NDArray[np.generic]], part: str, shape: tuple[int, ...], classes: int
) -> Samples:
    x, y = arrays[f"{part}_x"], arrays[f"{part}_y"]
    if x.dtype.kind not in "fiu" or y.dtype.kind not in "iu" or y.ndim != 1 or len(y) == 0:
        raise ValueError(f"{part}_x must be numbers and {part}_y whole numbers, one row or more")
    rows = x.astype(np.float32).reshape(len(x), -1)
    if len(rows) != len(y) or rows.shape[1] != int(np.prod(shape, dtype=int)):
        raise ValueError(f"{part}_x and {part}_y are no rows of shape {shape}")
    if y.min() < 0 or y.max() >= classes or not np.isfinite(rows).all():
        raise ValueError(f"{part} has a label beyond {classes - 1}, or a number that is not finite")
    return Samples(rows, y.astype(np.int32))


# Who is served how well: accuracy by client and by budget, where that may be known.
#
# It is computed on test rows only, and only where they are clients' own (a table with a client
# column and rows of it for the test), which the guarantee then names as unprotected. On a client's
# training rows it would be one more release, which nobody paid for; so elsewhere the record says
# why it is not shown.


WHY_NOT = (
    "nothing tells whose the test rows are, if they are any client's: only a simulation of a table "
    "with data.client and no file as data.test does"
)


def fairness(
    right: NDArray[np.bool_],
    owner: NDArray[np.int32] | None,
    epsilon: NDArray[np.float64],
    delta: NDArray[np.float64],
) -> Fairness:
    """Accuracy by client (least, quartiles, most) and by budget, or why there is none.

    `right` says of each test row whether it was predicted right, `owner` whose row it is.

    >>> told = fairness(np.array([True, False, True, True]), np.array([0, 0, 1, 1]),
    ...                 np.array([1.0, 8.0]), np.array([1e-5, 1e-5]))
    >>> told["accuracy"]["min"], [group["accuracy"] for group in told["by_budget"]]
    (0.5, [0.5, 1.0])
    >>> fairness(np.array([True]), None, np.array([1.0]), np.array([1e-5]))["shown"]
    False
    """
    if owner is None or len(owner) == 0:
        return {"shown": False, "why": WHY_NOT}
    rows = np.bincount(owner, minlength=len(epsilon))
    hits = np.bincount(owner, weights=right, minlength=len(epsilon))
    tested = rows > 0
    each = hits[tested] / rows[tested]
    least, low, middle, high, most = np.quantile(each, [0, 0.25, 0.5, 0.75, 1])
    pairs, group = np.unique(np.stack([epsilon, delta], axis=1), axis=0, return_inverse=True)
    group = group.reshape(-1)
    by_budget: list[BudgetGroup] = [
        {
            "epsilon": float(pairs[g, 0]),
            "delta": float(pairs[g, 1]),
            "clients": int((tested & (group == g)).sum()),
            "rows": int(rows[group == g].sum()),
            "accuracy": float(hits[group == g].sum() / rows[group == g].sum()),
        }
        for g in range(len(pairs))
        if rows[group == g].sum() > 0
    ]
    return {
        "shown": True,
        "clients": int(tested.sum()),
        "accuracy": {
            "min": float(least),
            "q1": float(low),
            "median": float(middle),
            "q3": float(high),
            "max": float(most),
        },
        "by_budget": by_budget,
    }


Pair: TypeAlias = tuple[ArrayLike, ArrayLike]  # rows and their labels
NUMBERS = "numbers:"  # begins a fingerprint that is no function of rows


@dataclass(frozen=True, eq=False)
class Samples:
    """Rows and labels: x[n, features] float32, y[n] int32.

    A client's may be `Stored`, which gives the same by slices and is never read whole.
    """

    x: NDArray[np.float32]
    y: NDArray[np.int32]


@dataclass(frozen=True, eq=False)
class Given:
    """Arrays from Python instead of a named data set: one pair to be split, or one per client."""

    train: Pair | Sequence[Pair]
    validation: Pair | None = None
    test: Pair | None = None


@dataclass(frozen=True, eq=False)
class Holdings:
    """Who holds what. `train` has the clients' rows, client after client, `samples` of each."""

    samples: NDArray[np.int64]
    train: Samples
    validation: Samples
    test: Samples
    split: Split | None  # the row numbers, where rows were dealt from one array
    shape: tuple[int, ...]
    classes: int
    layout: tables.Layout | None = None  # how the rows were encoded, where they are a table's
    test_owner: NDArray[np.int32] | None = None  # whose test rows, where clients declared them
    counted: bool = False  # whether the number of classes was counted on clients' labels
    features: Hog | None = None  # what the rows are, where they are no longer pictures
    fresh_vaults: bool = False  # whether the clients' vaults were made for one run, with the deal
    names: tuple[str, ...] = ()  # the clients', where a column of a table names them

    def fingerprint(self, *, rows: bool = True) -> str:
        """Return what tells these holdings from others: who holds which rows, to the last bit.

        Without `rows` it is a function of public numbers alone: how many rows each client,
        validation and test have, and of which shape and type.
        """
        digest = hashlib.blake2b(digest_size=32)
        rest = (part for own in (self.train, self.validation, self.test) for part in (own.x, own.y))
        for part in (self.samples, *rest):
            digest.update(f"{part.dtype.str}{part.shape};".encode())
            if not rows and part is not self.samples:
                continue
            for piece in part.pieces() if is_stored(part) else (part,):
                digest.update(np.ascontiguousarray(piece).data)
        return digest.hexdigest() if rows else NUMBERS + digest.hexdigest()

    @property
    def inputs(self) -> tuple[int, ...]:
        """The shape of a row as the model meets it; `shape` is that of a sample as it was read."""
        return self.shape if self.features is None else (self.features.width,)

    @property
    def owner(self) -> NDArray[np.int32]:
        """The client that each row of `train` belongs to."""
        return np.repeat(np.arange(len(self.samples), dtype=np.int32), self.samples)

    def client(self, i: int) -> Samples:
        """The rows of one client."""
        end = int(self.samples[: i + 1].sum())
        rows = slice(end - int(self.samples[i]), end)
        return Samples(self.train.x[rows], self.train.y[rows])


def hold(plan: Plan, *, seed: int, data: Given | None = None) -> Holdings:
    """Who holds what, as the plan's model sees it."""
    held = dealt(plan, seed=seed, data=data)
    lens = _lens(plan, held)
    if data is not None or lens is None or held.split is None or plan.data.path is not None:
        return seen(plan, held)
    # A row's features do not depend on who holds it: made once, however many seeds deal them.
    train, own_test = _features_of(str(plan.data.name), lens)
    split = held.split
    tested = train if split.test_from == "train" else own_test
    test = Samples(tested[split.test], held.test.y)
    validation = test  # with data.validation = 0, as in `dealt`
    if len(split.validation):
        validation = Samples(train[split.validation], held.validation.y)
    rows = Samples(train[np.concatenate(split.clients)], held.train.y)
    return replace(held, train=rows, validation=validation, test=test, features=lens)


@lru_cache(maxsize=1)
def _features_of(name: str, lens: Hog) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    arrays = datasets.load(name)
    return lens.apply(arrays.train_x), lens.apply(arrays.test_x)


def _lens(plan: Plan, held: Holdings) -> Hog | None:
    own = plan.model
    return features.build(own.features, held.shape, own.cell, own.upright, own.colours)


def dealt(plan: Plan, *, seed: int, data: Given | None = None) -> Holdings:
    """Who holds what: reads the data, and deals it by the seed.

    With `data.validation = 0` the test rows are what the server steers by, as in the paper.
    """
    if data is None:
        held = _named(plan, seed) if plan.data.path is None else _table(plan, seed)
    else:
        if plan.data.public is not None and not is_pair(data.train):
            raise InputError.of(
                "data.public",
                plan.data.public,
                "absent with one array per client",
                "the arrays say themselves who holds what",
            )
        held = _split_arrays(plan, data, seed) if is_pair(data.train) else _client_arrays(data)
    return held if len(held.validation.y) else replace(held, validation=held.test)


def seen(plan: Plan, held: Holdings) -> Holdings:
    """The rows as the plan's model sees them: their features, computed once, each from itself."""
    lens = _lens(plan, held)
    if lens is None or held.features is not None:
        return held

    def of(samples: Samples) -> Samples:
        return Samples(lens.apply(samples.x), samples.y)

    test = of(held.test)
    validation = test if held.validation is held.test else of(held.validation)
    return replace(held, train=of(held.train), validation=validation, test=test, features=lens)


def _named(plan: Plan, seed: int) -> Holdings:
    arrays = datasets.load(str(plan.data.name))
    dealt = _deal(plan, seed, arrays.train_y, own_test=len(arrays.test_y))
    train = Samples(arrays.train_x, arrays.train_y)
    return _dealt(dealt, train, Samples(arrays.test_x, arrays.test_y), arrays.shape, arrays.classes)


def _table(plan: Plan, seed: int) -> Holdings:
    own = plan.data
    table = tables.read_table(tables.Source(**own.table()))
    train, layout = Samples(table.x, table.y), table.layout
    steering, validation = _of_file(own.validation, layout, "data.validation")
    tested, test = _of_file(own.test, layout, "data.test")
    own_test = 0 if tested is None else len(tested.y)
    if table.owner is None:
        dealt = _deal(
            plan,
            seed,
            table.y,
            own_test=own_test,
            validation=_rows(validation, len(table.y)),
            test=_rows(test, len(table.y)),
        )
    else:
        rng = seeds.generator(seed, Purpose.SPLIT)
        dealt = split_by_column(
            table.owner, validation=validation, test=test, rng=rng, own_test=own_test
        )
    held = _dealt(dealt, train, tested, (table.x.shape[1],), len(layout.classes))
    declared = table.owner is not None and dealt.test_from == "train"
    whose = table.owner[dealt.test] if declared and table.owner is not None else None
    held = replace(held, layout=layout, test_owner=whose, names=table.clients)
    return held if steering is None else replace(held, validation=steering)


def _of_file(
    wanted: int | float | str, layout: tables.Layout, key: str
) -> tuple[Samples | None, int | float]:
    """Return the rows of an evaluation file and how many are still to be taken from the table."""
    if not isinstance(wanted, str):
        return None, wanted
    rows = tables.read_rows(wanted, layout, labels=True, key=key)
    return Samples(rows.x, rows.y), 0


def _rows(wanted: int | float, rows: int) -> int:
    """A number of rows, or a part of them: one or more."""
    return wanted if isinstance(wanted, int) else max(1, round(wanted * rows))


def _split_arrays(plan: Plan, data: Given, seed: int) -> Holdings:
    if streams(data.train[0]):
        _require_streamable(plan)
    train, shape = _checked("data", data.train, stream=True)
    validation = _held_out("validation", data.validation, shape)
    test = _held_out("test", data.test, shape)
    public = [part for part in (validation, test) if part is not None]
    if is_stored(train.x) and plan.data.split == "order" and not plan.data.public:
        return _in_order(plan, train, validation, test, shape)
    dealt = _deal(
        plan,
        seed,
        train.y,
        own_test=0 if test is None else len(test.y),
        validation=None if validation is None else 0,
        test=None if test is None else 0,
    )
    classes = _classes(public or [train])
    _require_known(train, classes, "data")
    held = replace(_dealt(dealt, train, test, shape, classes), counted=not public)
    return held if validation is None else replace(held, validation=validation)


def _in_order(
    plan: Plan,
    train: Samples,
    validation: Samples | None,
    test: Samples | None,
    shape: tuple[int, ...],
) -> Holdings:
    """Stored rows dealt as they lie: no row numbers are kept, so that memory stays what it is."""
    own, rows, public = plan.data, len(train.y), [p for p in (validation, test) if p is not None]
    aside = [0 if validation else int(own.validation), 0 if test else int(own.test)]
    sizes = sizes_in_order(own.samples, clients=plan.clients, rows=rows, set_aside=sum(aside))
    classes = _classes(public or [train])
    _require_known(train, classes, "data")
    last = rows - aside[1]
    total = int(sizes.sum())
    return Holdings(
        samples=sizes,
        train=_stretch(train, 0, total),
        validation=validation or _read(_stretch(train, last - aside[0], last)),
        test=test or _read(_stretch(train, last, rows)),
        split=None,
        shape=shape,
        classes=classes,
        counted=not public,
    )


def _stretch(stored: Samples, start: int, stop: int) -> Samples:
    x, y = cast(Stored, stored.x), cast(Stored, stored.y)
    return _kept(x.between(start, stop), y.between(start, stop))


def _kept(x: Stored, y: Stored) -> Samples:
    return Samples(cast(Any, x), cast(Any, y))


def _read(stored: Samples) -> Samples:
    return Samples(np.asarray(stored.x), np.asarray(stored.y))


def _require_streamable(plan: Plan) -> None:
    """One sentence for what a round that goes through the rows once cannot do."""
    secure = plan.noise == "secure"
    for name, value, bound in (
        ("local.steps", 1 if secure else plan.local.steps, 1),
        ("server.signal", "clients" if plan.server.signal != "raw" else "raw", "clients"),
        ("model.features", plan.model.features or "none", "none"),
    ):
        if value != bound:
            words = "public or clients" if name == "server.signal" else bound
            raise InputError.of(
                name,
                value,
                f"{words} where the rows are streamed",
                "or bring them into memory first, with numpy.array",
            )


def _client_arrays(data: Given) -> Holdings:
    clients = [_checked(f"data[{i}]", pair) for i, pair in enumerate(data.train)]
    shape = clients[0][1]
    for i, (_, other) in enumerate(clients):
        if other != shape:
            raise InputError.of(
                f"data[{i}]", other, f"rows of shape {shape} as in data[0]", "make them alike"
            )
    validation = _held_out("validation", data.validation, shape)
    test = _held_out("test", data.test, shape)
    if validation is None or test is None:
        missing = "validation" if validation is None else "test"
        raise InputError(
            f"{missing} must be given with one array per client, got none; pass "
            f"{missing}=(X, y) with rows that belong to no client"
        )
    classes = _classes([validation, test])
    for i, (part, _) in enumerate(clients):
        _require_known(part, classes, f"data[{i}]")
    x = np.concatenate([part.x for part, _ in clients])
    y = np.concatenate([part.y for part, _ in clients])
    return Holdings(
        samples=np.array([len(part.y) for part, _ in clients], dtype=np.int64),
        train=Samples(x, y),
        validation=validation,
        test=test,
        split=None,
        shape=shape,
        classes=classes,
    )


def _classes(parts: Sequence[Samples]) -> int:
    return max(2, max(int(part.y.max()) for part in parts) + 1)


def _require_known(part: Samples, classes: int, name: str) -> None:
    """The model's form must not tell that one client has a label nobody else has."""
    if int(part.y.max()) >= classes:
        raise InputError.of(
            f"{name} labels",
            int(part.y.max()),
            f"below {classes}, as in the public validation and test rows",
            "show every class there, so that the number of classes is public",
        )


def _held_out(name: str, pair: Pair | None, shape: tuple[int, ...]) -> Samples | None:
    return None if pair is None else _checked(name, pair, shape)[0]


def _deal(
    plan: Plan,
    seed: int,
    labels: NDArray[np.int32],
    *,
    own_test: int,
    validation: int | None = None,
    test: int | None = None,
) -> Split:
    own, rng = plan.data, seeds.generator(seed, Purpose.SPLIT)
    validation = int(own.validation) if validation is None else validation
    public = own.public or 0  # the first rows: drawn from for validation, dealt to no client
    steering = rng.permutation(public)[:validation]
    dealt = split(
        labels[public:],
        ids=np.arange(public, len(labels)),
        kind=own.split,
        clients=plan.clients,
        samples=own.samples,
        validation=0 if public else validation,
        test=int(own.test) if test is None else test,
        rng=rng,
        labels_per_client=own.labels_per_client,
        alpha=own.alpha,
        own_test=own_test,
    )
    return replace(dealt, validation=steering) if public else dealt


def _dealt(
    dealt: Split,
    train: Samples,
    own_test: Samples | None,
    shape: tuple[int, ...],
    classes: int,
) -> Holdings:
    def rows(of: Samples, ids: NDArray[np.int64]) -> Samples:
        return Samples(of.x[ids], of.y[ids])

    every = np.concatenate(dealt.clients)
    if is_stored(train.x):
        clients = _kept(train.x.at(every), cast(Stored, train.y).at(every))
    else:
        clients = rows(train, every)
    tested = train if dealt.test_from == "train" or own_test is None else own_test
    return Holdings(
        samples=np.array([len(part) for part in dealt.clients], dtype=np.int64),
        train=clients,
        validation=rows(train, dealt.validation),
        test=rows(tested, dealt.test),
        split=dealt,
        shape=shape,
        classes=classes,
    )


def is_pair(train: Any) -> bool:
    """Whether this is one (X, y), to be split, rather than a list with one (X, y) per client.

    >>> is_pair(([[1.0]], [0])), is_pair([([[1.0]], [0]), ([[2.0]], [1])])
    (True, False)
    """
    return isinstance(train, tuple) and not any(isinstance(part, tuple) for part in train)


def _checked(
    name: str, pair: Any, shape: tuple[int, ...] | None = None, *, stream: bool = False
) -> tuple[Samples, tuple[int, ...]]:
    try:
        rows, labels = pair
        stored = stream and streams(rows)
        x = rows if stored else np.asarray(rows, dtype=np.float32)
        y = labels if stored and streams(labels) else np.asarray(labels)
    except (TypeError, ValueError):
        raise InputError.of(
            name, type(pair).__name__, "a pair (X, y) of arrays", "rows of numbers and their labels"
        ) from None
    if len(x.shape) < 2 or len(y.shape) != 1 or len(x) != len(y) or len(y) == 0:
        raise InputError.of(
            name,
            (x.shape, y.shape),
            "X[n, …] and y[n] with n ≥ 1",
            "one row of X and one label for each sample",
        )
    own_y: Any = y
    if stored and np.issubdtype(y.dtype, np.integer):
        own_y = Stored.of(y, np.int32)
    whole = np.issubdtype(y.dtype, np.integer)
    if not whole or own_y.min() < 0:
        found = int(own_y.min()) if whole else y.dtype.name
        raise InputError.of(
            f"{name} labels", found, "whole numbers from 0", "number the classes 0, 1, …"
        )
    if shape is not None and x.shape[1:] != shape:
        raise InputError.of(name, x.shape[1:], f"rows of shape {shape}", "as in the training data")
    if stored:
        return _kept(Stored.of(x, np.float32), own_y), tuple(x.shape[1:])
    return Samples(x.reshape(len(x), -1), y.astype(np.int32)), x.shape[1:]
