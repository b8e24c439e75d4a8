"""Who holds what: read the rows and deal them to clients, validation and test.

The rows come from a named dataset, a table, or arrays given from Python. The number of clients,
their sizes and the classes are public; where they had to be counted on the clients' rows, the
guarantee says so. The server of a real federation holds public rows for validation and test, in one
`.npz` file without pickle and without training rows (`save_public`).

`summarise_fairness` uses test rows only, and only if it is known whose they are: on a client's
training rows it would be one more release, for which no budget paid.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import numpy as np
from numpy.typing import ArrayLike, NDArray

from sottovoce.data import datasets, tables
from sottovoce.data.check import ONE_CLASS, describe_scale
from sottovoce.data.files import read_npy, read_npz, why, write_npz
from sottovoce.data.partition import (
    Split,
    deal_persons,
    size_clients,
    split_by_column,
    split_rows,
)
from sottovoce.data.streaming import Stored, is_stored, is_streamed, require_finite
from sottovoce.data.tables import Layout
from sottovoce.errors import DataError, InputError
from sottovoce.models.base import Regression
from sottovoce.models.network import Lens, Network, as_samples, build_lens, build_network
from sottovoce.models.person import has_ids, join_persons
from sottovoce.plan import Plan
from sottovoce.plan.data import format_category
from sottovoce.plan.sections import CUSTOM
from sottovoce.privacy import seeds
from sottovoce.privacy.seeds import Purpose

if TYPE_CHECKING:
    from sottovoce.runs.record import BudgetGroup, Fairness

log = logging.getLogger("sottovoce.data")

PUBLIC_SETS = ("validation", "test")


def save_public(path: Path, held: Holdings) -> None:
    """Write the public rows of holdings, without the rows of clients."""
    arrays: dict[str, NDArray[np.generic]] = {
        "shape": np.array(held.shape, dtype=np.int64),
        "classes": np.array(held.classes, dtype=np.int64),
    }
    if held.target is not None:
        arrays["target"] = np.array(held.target)
    for name in PUBLIC_SETS:
        rows: Samples = getattr(held, name)
        y = rows.y if held.target is None else held.target.restore(rows.y)
        arrays |= {f"{name}_x": rows.x, f"{name}_y": y}
        arrays |= {} if rows.cut is None else {f"{name}_cut": rows.cut}
    if held.layout is not None:
        text = json.dumps(held.layout.to_json()).encode()
        arrays["layout"] = np.frombuffer(text, dtype=np.uint8)
    if held.class_names:
        arrays["class_names"] = np.array(held.class_names)
    if held.fresh_vaults:
        arrays["fresh_vaults"] = np.array(True)
    if held.test_owner is not None and held.names:
        arrays["test_site"] = np.array(held.names)[held.test_owner]
    write_npz(path, arrays)


def load_public(path: Path) -> Holdings:
    """Read what `save_public` wrote or an operator made; raise DataError if it cannot be used."""
    try:
        arrays = read_npz(path)
        shape = tuple(int(size) for size in arrays["shape"].reshape(-1))
        target = None
        if "target" in arrays:
            loss, low, high = arrays["target"].tolist()
            target = Regression(loss, float(low), float(high))
        classes = int(arrays["classes"]) if target is None else 1
        validation, test = (
            _read_public_samples(arrays, name, shape, classes, target) for name in PUBLIC_SETS
        )
        text = arrays["layout"].tobytes() if "layout" in arrays else None
        layout = None if text is None else Layout.from_json(json.loads(text))
        fresh = "fresh_vaults" in arrays
        names = tuple(map(str, arrays["class_names"].tolist() if "class_names" in arrays else ()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DataError(
            f"{path} cannot be read as public rows: {why(error)}; it needs validation_x, "
            "validation_y, test_x, test_y, shape and classes"
        ) from None
    nobody = Samples(validation.x[:0], validation.y[:0])
    none = np.zeros(0, dtype=np.int64)
    held = Holdings(
        none, nobody, validation, test, None, shape, classes, layout, fresh_vaults=fresh
    )
    if "test_site" in arrays:
        sites, owner = np.unique(arrays["test_site"].astype(str), return_inverse=True)
        if owner.shape != test.y.shape:
            raise DataError(f"{path}: test_site must have one site for each of {len(test.y)} rows")
        held = replace(held, names=tuple(sites.tolist()), test_owner=owner.astype(np.int32))
    return replace(held, class_names=names if len(names) == classes else (), target=target)


def _read_public_samples(
    arrays: dict[str, NDArray[np.generic]],
    name: str,
    shape: tuple[int, ...],
    classes: int,
    target: Regression | None,
) -> Samples:
    x, y = arrays[f"{name}_x"], arrays[f"{name}_y"]
    kinds = "iu" if target is None else "fiu"
    if x.dtype.kind not in "fiu" or y.dtype.kind not in kinds or y.ndim != 1 or len(y) == 0:
        raise ValueError(f"{name}_x must be numbers and {name}_y whole numbers, one row or more")
    rows = x.astype(np.float32).reshape(len(x), -1)
    if len(rows) != len(y) or rows.shape[1] != int(np.prod(shape, dtype=int)):
        raise ValueError(f"{name}_x and {name}_y are no rows of shape {shape}")
    if target is not None:
        scaled = target.scale(y)
        if not np.isfinite(rows).all() or not np.isfinite(scaled).all():
            raise ValueError(f"{name} has a number that is not finite")
        return Samples(rows, scaled, arrays.get(f"{name}_cut", target.find_cut(y)).astype(bool))
    if y.min() < 0 or y.max() >= classes or not np.isfinite(rows).all():
        raise ValueError(f"{name} has a label beyond {classes - 1}, or a number that is not finite")
    return Samples(rows, y.astype(np.int32))


WHY_NOT = (
    "nothing tells whose the test rows are, if they are any client's: a table with data.client and "
    "no file as data.test does, or test_site in the public rows of a server"
)


def summarise_fairness(
    right: NDArray[np.bool_],
    owner: NDArray[np.int32] | None,
    epsilon: NDArray[np.float64],
    delta: NDArray[np.float64],
) -> Fairness:
    """Return the accuracy by client (least, quartiles, most) and by budget, or why there is none.

    `right` says of each test row whether it was predicted right, `owner` whose row it is.
    """
    if owner is None or not (known := owner >= 0).any():  # below 0: of a site that takes no part
        return {"shown": False, "why": WHY_NOT}
    right, owner = right[known], owner[known]
    rows = np.bincount(owner, minlength=len(epsilon))
    hits = np.bincount(owner, weights=right, minlength=len(epsilon))
    tested = rows > 0
    accuracies = hits[tested] / rows[tested]
    quantiles = {"min": 0.0, "q1": 0.25, "median": 0.5, "q3": 0.75, "max": 1.0}
    by_budget: list[BudgetGroup] = []
    for e, d in np.unique(np.stack([epsilon, delta], axis=1), axis=0).tolist():
        group = (epsilon == e) & (delta == d)  # of nobody where a budget is hidden: NaN
        if (count := int(rows[group].sum())) > 0:
            clients, accuracy = int((tested & group).sum()), float(hits[group].sum() / count)
            entry = {"epsilon": e, "delta": d, "clients": clients, "rows": count}
            by_budget.append(cast(Any, entry | {"accuracy": accuracy}))
    return {
        "shown": True,
        "clients": int(tested.sum()),
        "accuracy": cast(
            Any, {name: float(np.quantile(accuracies, q)) for name, q in quantiles.items()}
        ),
        "by_budget": by_budget,
    }


Pair: TypeAlias = tuple[ArrayLike, ArrayLike]  # rows and their labels
NUMBERS = "numbers:"  # the start of a fingerprint that does not depend on rows


@dataclass(frozen=True, eq=False)
class Samples:
    """Rows and labels: x[n, features] float32, y[n] int32; float32 if it is a scaled number.

    Clients' rows may be `Stored` views, which return the same by slices and are never read whole.
    """

    x: NDArray[np.float32]
    y: NDArray[Any]
    cut: NDArray[np.bool_] | None = None  # which numbers y were cut to their range


@dataclass(frozen=True, eq=False)
class Given:
    """Arrays from Python or a file: one pair to be split, or one per client."""

    train: Pair | Sequence[Pair]
    validation: Pair | None = None
    test: Pair | None = None
    person: ArrayLike | None = None  # the person of each row of a pair, by any id
    client: ArrayLike | None = None  # the client of each row, in a file; else rows are dealt
    classes: tuple[str, ...] = ()  # that are declared


@dataclass(frozen=True, eq=False)
class Holdings:
    """Who holds what. `train` has the rows of all clients in order, `samples` of each."""

    samples: NDArray[np.int64]
    train: Samples
    validation: Samples
    test: Samples
    split: Split | None  # the row numbers, if rows were dealt from one array
    shape: tuple[int, ...]
    classes: int
    layout: tables.Layout | None = None  # how the rows of a table were encoded
    test_owner: NDArray[np.int32] | None = None  # the client of each test row, if they have one
    counted: bool = False  # whether the number of classes was counted on clients' labels
    tests_clients: bool = False  # whether evaluation rows are clients', where no plan says so
    features: Lens | None = None  # which features the rows are, if they are no longer pictures
    fresh_vaults: bool = False  # whether the clients' vaults were made for this run only
    names: tuple[str, ...] = ()  # the names of the clients, from a column of a table
    class_names: tuple[str, ...] = ()  # of arrays whose labels are not 0, 1, …
    person: NDArray[np.int64] | None = None  # of each row of `train`; None: samples are not rows
    target: Regression | None = None  # the number that is predicted; `classes` is then 1

    def fingerprint(self, *, rows: bool = True) -> str:
        """Return a digest of who holds which rows, to the last bit.

        Without `rows` it depends on public numbers alone: how many rows each client, validation
        and test have, and of which shape and type.
        """
        digest = hashlib.blake2b(digest_size=32)
        sets = (self.train, self.validation, self.test)
        for array in (self.samples, *(array for held in sets for array in (held.x, held.y))):
            digest.update(f"{array.dtype.str}{array.shape};".encode())
            if not rows and array is not self.samples:
                continue
            for piece in array.pieces() if is_stored(array) else (array,):
                digest.update(np.ascontiguousarray(piece).data)
        return digest.hexdigest() if rows else NUMBERS + digest.hexdigest()

    @property
    def inputs(self) -> tuple[int, ...]:
        """The shape of a row as the model's input; `shape` is that of a sample as it was read."""
        return self.shape if self.features is None else (self.features.width,)

    @property
    def owner(self) -> NDArray[np.int32]:
        """The client that each row of `train` belongs to."""
        return np.repeat(np.arange(len(self.samples), dtype=np.int32), self.samples)

    def client(self, i: int) -> Samples:
        """Return the rows of one client."""
        end = int(self.samples[: i + 1].sum())
        rows = slice(end - int(self.samples[i]), end)
        return Samples(self.train.x[rows], self.train.y[rows])


def load_holdings(plan: Plan, *, seed: int, data: Given | None = None) -> Holdings:
    """Read the data and deal it to clients, as samples of the plan's model."""
    held = deal_rows(plan, seed=seed, data=data)
    lens = build_features(plan, held)
    if data is not None or lens is None or held.split is None or plan.data.path is not None:
        return add_features(plan, held)
    # A row's features do not depend on who holds it, so they are computed once for all seeds.
    train, own_test = _load_features(str(plan.data.name), lens)
    split = held.split
    tested = train if split.test_from == "train" else own_test
    test = Samples(tested[split.test], held.test.y)
    validation = test  # with data.validation = 0, as in `deal_rows`
    if len(split.validation):
        validation = Samples(train[split.validation], held.validation.y)
    rows = Samples(train[np.concatenate(split.clients)], held.train.y)
    return replace(held, train=rows, validation=validation, test=test, features=lens)


@lru_cache(maxsize=1)
def _load_features(name: str, lens: Lens) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    arrays, folder = datasets.load(name), None
    if isinstance(lens, Network) and name != "digits":
        folder = datasets.find(name)
    return _apply_lens(lens, arrays.train_x, folder), _apply_lens(lens, arrays.test_x, folder)


def _apply_lens(lens: Lens, x: Any, beside: Path | None) -> NDArray[np.float32]:
    """Return the features of rows; those of a network are kept beside the rows' own file."""
    if not isinstance(lens, Network):
        return lens.apply(x)
    found = lens.load_or_apply(x, beside)
    if not np.isfinite(found).all():
        row = int((~np.isfinite(found).all(axis=1)).argmax()) + 1
        raise DataError(
            f"model.features gives row {row} numbers that are not finite; mend the row, or take "
            "another network"
        )
    return found


def compute_features(file: Path, network: str, out: Path, *, project: int | None = None) -> str:
    """Write the features of a file's samples to an array file, beside its other arrays."""
    if out.suffix != ".npz" or out.exists() or not out.parent.is_dir():
        bound = "a new .npz file in a folder that exists"
        raise InputError.of("out", str(out), bound, "name another")
    x = tables.read_samples(file)
    if x.ndim < 2:
        raise InputError.of("x", x.shape, "an array with a row a sample", "or texts")
    stored: dict[str, Any] = read_npz(file) if file.suffix.lower() == ".npz" else {}
    arrays = stored if "x" in stored else {}  # else its only array is x
    lens = build_network(network, x.shape[1:], project)
    arrays["x"] = _apply_lens(lens, x.reshape(len(x), -1), None)
    with out.open("xb") as target:
        np.savez(target, **arrays)
    return f"{out}: {len(x):,} samples of {lens.width} features; network SHA-256 {lens.sha256}"


def build_features(plan: Plan, held: Holdings) -> Lens | None:
    """Return what makes the features that the plan's model uses, if it uses any."""
    return build_lens(held.shape, dict(plan.model))


def deal_rows(plan: Plan, *, seed: int, data: Given | None = None) -> Holdings:
    """Read the data and deal it to clients by the seed, as samples without features.

    With `data.validation = 0` the server validates on the test rows, as in the paper.
    """
    if data is not None:
        held = (deal_arrays if is_pair(data.train) else _join_client_arrays)(plan, data, seed)
        rows: Any = data.train[0] if is_pair(data.train) else cast(Any, data.train[0])[0]
        is_read = isinstance(rows, np.ndarray) and not is_stored(held.train.x)
        if is_read and (scale := describe_scale(rows)) is not None:
            log.warning("data: %s", scale)
    elif plan.data.is_array_file:
        held = deal_arrays(plan, read_arrays(plan), seed)
    else:
        held = (_deal_dataset if plan.data.path is None else _deal_table)(plan, seed)
    is_array = data is not None or plan.data.is_array_file
    if is_array and plan.regression is None and held.train.y.min() == held.train.y.max():
        log.warning("data: %s", ONE_CLASS)
    if (target := plan.regression) is not None:
        held = replace(held, target=target, classes=1, class_names=(), counted=False)
    return held if len(held.validation.y) else replace(held, validation=held.test)


def add_features(plan: Plan, held: Holdings) -> Holdings:
    """Replace the rows by the features that the plan's model uses, if it uses any."""
    if is_stored(held.train.x):  # also of rows that were dealt for another plan of a sweep
        _require_streamable(plan)
    lens = build_features(plan, held)
    if lens is None or held.features is not None:
        return _join_persons(plan, held)
    file = None if plan.data.path is None else Path(plan.data.path)

    def apply(samples: Samples) -> Samples:
        return replace(samples, x=_apply_lens(lens, samples.x, file))

    test = apply(held.test)
    validation = test if held.validation is held.test else apply(held.validation)
    held = replace(held, train=apply(held.train), validation=validation, test=test, features=lens)
    return _join_persons(plan, held)


def _join_persons(plan: Plan, held: Holdings) -> Holdings:
    """Make a sample of all rows of a person at a client, where the plan protects persons."""
    if not plan.rows_per_person:
        return held
    if held.person is None:
        if len(held.train.y) and held.train.x.shape[1] == int(np.prod(held.inputs)):
            raise InputError("local.unit = person needs the person of each row; give data.person")
        return held
    persons = int(held.person.max()) + 1
    at_client = held.owner.astype(np.int64) * persons + held.person
    x = join_persons(held.train.x, held.train.y, at_client, plan.rows_per_person)
    samples = np.bincount(np.unique(at_client) // persons, minlength=len(held.samples))
    train = Samples(x, np.zeros(len(x), np.int32))
    return replace(held, train=train, samples=samples.astype(np.int64), person=None)


Partition: TypeAlias = Callable[[NDArray[Any], int, np.random.Generator], ArrayLike]


def deal_anew(held: Holdings, partition: Partition, rng: np.random.Generator) -> Holdings:
    """Deal the clients' rows by a function of the user's, labels × clients × rng → client by row.

    The labels are those of the rows that the plan deals to clients, in the order of the data;
    validation and test rows stay as they are. A row of client −1 is left out.
    """
    are_rows = held.person is None and held.train.x.shape[1:] == (int(np.prod(held.inputs)),)
    if held.split is None or held.names or not are_rows or is_stored(held.train.x):
        raise InputError(
            "partition deals rows that are in memory and belong to nobody yet; leave it out with a "
            "column of clients, persons, one array per client, or streamed rows"
        )
    rows, clients = np.concatenate(held.split.clients), len(held.samples)
    order = np.argsort(rows)
    y = held.train.y[order]
    labels = y if held.target is None else held.target.restore(y)
    owner = np.asarray(partition(labels.copy(), clients, rng))
    bound = f"{len(rows)} whole numbers from -1 to {clients - 1}, the client of each row"
    if owner.shape != (len(rows),) or owner.dtype.kind not in "iu":
        what = f"{owner.dtype} of shape {owner.shape}"
        raise InputError.of("the answer of partition", what, bound, "return such an array")
    if owner.min() < -1 or owner.max() >= clients:
        worst = int(owner.max() if owner.max() >= clients else owner.min())
        raise InputError.of("the answer of partition", worst, bound, "number the clients from 0")
    dealt = [order[owner == i] for i in range(clients)]
    if not all(map(len, dealt)):
        empty = next(i for i, part in enumerate(dealt) if not len(part))
        raise InputError(f"partition leaves client {empty} (from 0) without a row; give it one")
    every = np.concatenate(dealt)
    return replace(
        held,
        train=Samples(held.train.x[every], held.train.y[every]),
        samples=np.array([len(part) for part in dealt], dtype=np.int64),
        split=replace(held.split, clients=tuple(rows[part] for part in dealt)),
    )


def _deal_dataset(plan: Plan, seed: int) -> Holdings:
    if plan.regression is not None:
        remedy = "its labels are classes; give a table or arrays"
        raise InputError.of(
            "model.loss", plan.model.loss, f"absent with data.name = {plan.data.name}", remedy
        )
    arrays = datasets.load(str(plan.data.name))
    train = Samples(arrays.train_x, arrays.train_y)
    own_test = Samples(arrays.test_x, arrays.test_y) if plan.data.test == 0 else None
    shape, classes = arrays.shape, Classes(arrays.classes)
    return _deal_samples(plan, seed, train, shape, classes, None, own_test)


def _deal_table(plan: Plan, seed: int) -> Holdings:
    table = tables.read_table(tables.Source(**plan.data.table(), target=plan.regression))
    layout, public = table.layout, dict[str, Samples]()
    for key in PUBLIC_SETS:
        if isinstance(file := getattr(plan.data, key), str):
            rows = tables.read_rows(file, layout, labels=True, key=f"data.{key}")
            public[key] = Samples(rows.x, rows.y, rows.cut)
    steering, tested = (public.get(key) for key in PUBLIC_SETS)
    train, classes = Samples(table.x, table.y, table.cut), Classes(len(layout.classes))
    who, shape = (table.owner, table.person), train.x.shape[1:]
    held = _deal_samples(plan, seed, train, shape, classes, steering, tested, *who)
    return replace(held, layout=layout, names=table.clients)


def read_arrays(plan: Plan) -> Given:
    """Read the rows of an .npz or .npy file as if they were given from Python."""
    data, label = plan.data, str(plan.data.label)
    arrays = read_array_file(str(data.path), label, data.client, data.person)
    public: dict[str, Any] = {}
    for key in PUBLIC_SETS:
        if isinstance(file := getattr(data, key), str):
            other = read_array_file(file, label, key=f"data.{key}")
            public[key] = other["x"], other["y"]
    declared = data.columns[label] if data.columns and plan.regression is None else ()
    return Given(
        (arrays["x"], arrays["y"]),
        **public,
        person=arrays.get("person"),
        client=arrays.get("client"),
        classes=tuple(map(str, declared)),
    )


def read_array_file(
    path: str | Path,
    label: str,
    client: str | None = None,
    person: str | None = None,
    key: str = "data.path",
) -> dict[str, NDArray[Any]]:
    """Read `x`, `y` and what is named of `client` and `person`; a .npy is x, and `label` its y."""
    roles = {"x": "x", "y": label, "client": client, "person": person}
    path, named = Path(path), {role: name for role, name in roles.items() if name}
    try:
        if path.suffix.lower() == ".npy":
            return {"x": read_npy(path), "y": read_npy(path.parent / label)}
        arrays = read_npz(path, *named.values())
    except FileNotFoundError as error:
        key, name = key if Path(error.filename) == path else "data.label", Path(error.filename).name
        raise InputError.of(key, name, "a file that exists", "check its name") from None
    except (OSError, ValueError) as error:
        listed = " and ".join(named.values())
        raise DataError(f"{path.name} cannot be read as arrays {listed}: {why(error)}") from None
    return {role: arrays[name] for role, name in named.items()}


def _deal_samples(
    plan: Plan,
    seed: int,
    train: Samples,
    shape: tuple[int, ...],
    classes: Classes,
    steering: Samples | None,
    tested: Samples | None,
    owner: NDArray[np.int32] | None = None,
    person: NDArray[Any] | None = None,
) -> Holdings:
    """Deal rows: by their owners, or as the plan says where no column names them."""
    given_sets = (steering, plan.data.validation), (tested, plan.data.test)
    sizes: list[Any] = [0 if given is not None else wanted for given, wanted in given_sets]
    own_test = 0 if tested is None else len(tested.y)
    labels, dealt_to, whose = train.y, owner, None
    if person is not None:  # what is dealt are persons, each with all its rows
        first, whose = _number_persons(person)
        labels, dealt_to = labels[first], None if owner is None else owner[first]
    if dealt_to is None:
        validation, test = (
            size if isinstance(size, int) else max(1, round(size * len(labels))) for size in sizes
        )
        dealt = _split_rows(plan, seed, labels, validation, test, own_test)
    else:
        rng = seeds.generator(seed, Purpose.SPLIT)
        dealt = split_by_column(
            dealt_to, validation=sizes[0], test=sizes[1], rng=rng, own_test=own_test
        )
    if whose is not None:
        dealt = deal_persons(dealt, whose, owner)
    every = np.concatenate(dealt.clients)
    if is_stored(train.x):
        rows = _make_samples(train.x.take_rows(every), cast(Stored, train.y).take_rows(every))
    else:
        rows = _take_rows(train, every)
    from_train = dealt.test_from == "train"
    return Holdings(
        samples=np.array([len(ids) for ids in dealt.clients], dtype=np.int64),
        train=rows,
        validation=steering or _take_rows(train, dealt.validation),
        test=_take_rows(train if tested is None or from_train else tested, dealt.test),
        split=dealt,
        shape=shape,
        classes=classes.count,
        class_names=classes.names,
        person=None if whose is None else whose[every],
        test_owner=owner[dealt.test] if owner is not None and from_train else None,
    )


def deal_classes(plan: Plan, labels: NDArray[Any], owner: NDArray[np.int32], seed: int) -> None:
    """Deal rows of these classes and clients as the plan says; refuse them where that cannot be."""
    other = Samples(np.zeros((1, 1), np.float32), np.zeros(1, np.int32))  # a row of another file
    steering, tested = (
        other if isinstance(size, str) else None for size in (plan.data.validation, plan.data.test)
    )
    train = Samples(np.zeros((len(labels), 1), np.float32), labels)
    named = None if plan.data.client is None else owner
    _deal_samples(plan, seed, train, (1,), Classes(0), steering, tested, named)


def _number_persons(ids: NDArray[Any]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the first row of each person, and the number of each row's person, from 0."""
    _, first, person = np.unique(ids, return_index=True, return_inverse=True)
    # By their first rows: sorted by ids, another id of one person would deal everybody anew.
    order = np.argsort(first)
    rank = np.empty_like(order)
    rank[order] = np.arange(len(order))
    return first[order], rank[person.reshape(-1)]


def deal_arrays(plan: Plan, data: Given, seed: int) -> Holdings:
    """Deal one pair from Python, or that of the plan's file."""
    is_file, target = plan.data.is_array_file, plan.regression
    prefix = "data." if is_file else ""  # of names in errors
    stream = not is_file and is_streamed(data.train[0])
    if stream:
        _require_streamable(plan)
    counted = not (data.classes or data.validation or data.test)
    how: Any = {"target": target, "reads_texts": _reads_texts(plan)}
    train, shape = check_pair("data", data.train, stream=stream, counted=counted, **how)
    validation = _check_evaluation(f"{prefix}validation", data, shape, target)
    test = _check_evaluation(f"{prefix}test", data, shape, target)
    public = [samples for samples in (validation, test) if samples is not None]
    classes = Classes(len(data.classes), data.classes)
    if not data.classes:
        classes = _find_classes(public or [train], target)
    train = _encode_samples(train, classes, "data")
    validation = validation and _encode_samples(validation, classes, f"{prefix}validation")
    test = test and _encode_samples(test, classes, f"{prefix}test")
    owner, names = None, tuple[str, ...]()
    if data.client is not None:
        clients = read_labels("data.client", data.client)
        if clients.shape != train.y.shape:
            raise InputError.of("data.client", clients.shape, f"{len(train.y)} names", "one a row")
        names = tuple(tables.sort_texts(map(str, np.unique(clients).tolist())))
        owner = Classes(len(names), names).encode(clients, "data.client")
    if is_stored(train.x) and data.person is not None:
        raise InputError("person has no effect on streamed rows; bring them into memory first")
    person = _check_persons(plan, data, len(train.y))
    if is_stored(train.x) and plan.data.split == "order" and not plan.data.public:
        return _deal_in_order(plan, train, validation, test, shape, classes)
    held = _deal_samples(plan, seed, train, shape, classes, validation, test, owner, person)
    return replace(held, names=names, counted=counted)


def _reads_texts(plan: Plan) -> bool:
    return plan.model.has_network or plan.model.name == CUSTOM


def _check_persons(plan: Plan, data: Given, rows: int) -> NDArray[Any] | None:
    """Return the ids of persons that were given with arrays; None where there are none."""
    if data.person is None:
        if plan.local.unit == "person":
            raise InputError(
                "person must be given with local.unit = person, got none; pass person=ids with one "
                "id for each row"
            )
        return None
    if plan.data.public is not None:
        raise InputError(
            f"data.public must be absent with person ids, got {plan.data.public!r:.60}; the first "
            "rows may be of persons whom clients hold, too; give validation=(X, y)"
        )
    ids = np.asarray(data.person)
    ids = read_labels("person", ids) if ids.dtype.kind == "O" else ids  # texts, as of pandas
    if ids.shape != (rows,):
        raise InputError.of("person", ids.shape, f"({rows},)", "give one id for each row")
    if not has_ids(ids):
        row = next(i for i in range(rows) if not has_ids(ids[i : i + 1]))
        bound, remedy = "numbers or texts without gaps", f"give row {row + 1} its id"
        raise InputError.of("person", ids[row].item(), bound, remedy)
    return ids


def _deal_in_order(
    plan: Plan,
    train: Samples,
    validation: Samples | None,
    test: Samples | None,
    shape: tuple[int, ...],
    classes: Classes,
) -> Holdings:
    """Deal stored rows in their order, without row numbers, which would take memory."""
    data, rows = plan.data, len(train.y)
    aside = [0 if validation else int(data.validation), 0 if test else int(data.test)]
    sizes = size_clients(data.samples, clients=plan.clients, rows=rows, set_aside=sum(aside))
    total, last = int(sizes.sum()), rows - aside[1]
    x, y = (cast(Stored, view).slice_rows(0, total) for view in (train.x, train.y))
    cut = None if train.cut is None else train.cut[:total]
    return Holdings(
        samples=sizes,
        train=_make_samples(x, y, cut),
        validation=validation or _take_rows(train, slice(last - aside[0], last)),
        test=test or _take_rows(train, slice(last, rows)),
        split=None,
        shape=shape,
        classes=classes.count,
        counted=validation is None and test is None,
        class_names=classes.names,
    )


def _make_samples(x: Stored, y: Stored, cut: NDArray[np.bool_] | None = None) -> Samples:
    return Samples(cast(Any, x), cast(Any, y), cut)


def _take_rows(samples: Samples, where: slice | NDArray[np.int64]) -> Samples:
    cut = None if samples.cut is None else samples.cut[where]
    return Samples(samples.x[where], samples.y[where], cut)


def _require_streamable(plan: Plan) -> None:
    """Refuse settings that a round cannot honour if it reads the rows only once."""
    secure = plan.noise == "secure"
    for name, value, bound in (
        ("local.steps", 1 if secure else plan.local.steps, 1),
        ("server.signal", "clients" if plan.server.signal != "raw" else "raw", "clients"),
        ("model.features", plan.model.features or "none", "none"),
    ):
        if value != bound:
            words = "public or clients" if name == "server.signal" else bound
            remedy = "or bring them into memory first, with numpy.array"
            raise InputError.of(name, value, f"{words} where the rows are streamed", remedy)


def _join_client_arrays(plan: Plan, data: Given, seed: int) -> Holdings:
    """Join one pair for each client; nothing is dealt, so that the seed is not used."""
    if plan.data.public is not None:
        raise InputError(
            "data.public must be absent with one array per client, got "
            f"{plan.data.public!r:.60}; the arrays say themselves who holds what"
        )
    if plan.local.unit == "person" or data.person is not None:
        what = "person" if data.person is not None else "local.unit = person"
        raise InputError(
            f"{what} must be absent with one array per client; give one (X, y) and person=ids"
        )
    target = plan.regression
    how: Any = {"target": target, "counted": False, "reads_texts": _reads_texts(plan)}
    clients = [check_pair(f"data[{i}]", pair, **how) for i, pair in enumerate(data.train)]
    shape = clients[0][1]
    for i, (_, other) in enumerate(clients):
        if other != shape:
            remedy = "make them alike"
            raise InputError.of(f"data[{i}]", other, f"rows of shape {shape} as in data[0]", remedy)
    validation = _check_evaluation("validation", data, shape, target)
    test = _check_evaluation("test", data, shape, target)
    if validation is None or test is None:
        missing = "validation" if validation is None else "test"
        raise InputError(
            f"{missing} must be given with one array per client, got none; pass "
            f"{missing}=(X, y) with rows that belong to no client"
        )
    classes = _find_classes([validation, test], target)
    dealt = [_encode_samples(rows, classes, f"data[{i}]") for i, (rows, _) in enumerate(clients)]
    return Holdings(
        samples=np.array([len(samples.y) for samples in dealt], dtype=np.int64),
        train=Samples(
            np.concatenate([samples.x for samples in dealt]),
            np.concatenate([samples.y for samples in dealt]),
        ),
        validation=_encode_samples(validation, classes, "validation"),
        test=_encode_samples(test, classes, "test"),
        split=None,
        shape=shape,
        classes=classes.count,
        class_names=classes.names,
    )


FEW_CLASSES = 1000  # as many a model may have whose labels do not show them all


@dataclass(frozen=True)
class Classes:
    """The classes of labels: 0, 1, …, count − 1, or names in their order."""

    count: int
    names: tuple[str, ...] = ()

    def encode(self, labels: Any, name: str) -> Any:
        """Return the class of each label as int32; refuse a label that is not among the classes.

        A class that only one client has is refused, because the model's shape would reveal it.
        """
        if not self.names and labels.dtype.kind in "iu":
            least, most = int(labels.min()), int(labels.max())
            if least >= 0 and most < self.count:
                kind = np.dtype(np.int32)
                return replace(labels, dtype=kind) if is_stored(labels) else labels.astype(kind)
            bad, bound = (
                (most, f"below {self.count}") if least >= 0 else (least, "whole numbers from 0")
            )
            bound += ", as in the public validation and test rows"
            remedy = "show every class there, so that the number of classes is public"
            raise InputError.of(f"{name} labels", bad, bound, remedy)
        found, where = np.unique(np.asarray(labels), return_inverse=True)
        known = self.names or tuple(map(str, range(self.count)))
        codes = {text: i for i, text in enumerate(known)}
        encoded = np.array([codes.get(str(value), -1) for value in found.tolist()], np.int32)
        if encoded.min() < 0:
            listed = ", ".join(known[:5]) + (", …" if len(known) > 5 else "")
            raise InputError(
                f"{name} labels must be one of {listed}, as in the public validation and test rows "
                f"or the plan, got {str(found[encoded.argmin()])[:60]!r:.60}; show every class "
                "there, so that the classes are public"
            )
        return encoded[where.reshape(-1)]


def find_classes(sets: Sequence[Any]) -> Classes:
    """Return the classes of labels that `read_labels` returned.

    Whole numbers from 0 are the numbers of their classes, as far as the largest, unless it is 1000
    or more and labels are fewer than classes. Others are names, sorted as numbers if all are.

    >>> find_classes([np.array([0, 2, 2])]), find_classes([np.array([1, 3]), np.array([2])])
    (Classes(count=3, names=()), Classes(count=3, names=('1', '2', '3')))
    >>> find_classes([np.array([0, 10**9])])
    Classes(count=2, names=('0', '1000000000'))
    >>> find_classes([np.array(["yes", "no"])])
    Classes(count=2, names=('no', 'yes'))
    """
    whole = all(labels.dtype.kind in "iu" for labels in sets)
    if whole and min(int(labels.min()) for labels in sets) == 0:
        count = max(int(labels.max()) for labels in sets) + 1
        if count <= min(tables.MOST_CLASSES, max(FEW_CLASSES, sum(map(len, sets)))):
            return Classes(max(2, count))
    names = {str(name) for labels in sets for name in np.unique(np.asarray(labels)).tolist()}
    if names <= {"false", "true"}:
        names = {"false", "true"}
    if len(names) < 2:
        remedy = "show every class"
        raise InputError.of("labels", f"{names.pop()[:60]} alone", "two classes or more", remedy)
    return Classes(len(names), tuple(tables.sort_texts(names)))


def _find_classes(sets: Sequence[Samples], target: Regression | None) -> Classes:
    return Classes(1) if target is not None else find_classes([samples.y for samples in sets])


def _encode_samples(samples: Samples, classes: Classes, name: str) -> Samples:
    y = classes.encode(samples.y, name) if classes.count > 1 else samples.y
    if is_stored(samples.x) and not is_stored(y):
        return _make_samples(samples.x, Stored.of(y, y.dtype), samples.cut)
    return replace(samples, y=y)


def read_labels(name: str, labels: Any) -> NDArray[Any]:
    """Return labels as numbers or texts; refuse missing ones."""
    y = np.asarray(labels)
    kind, missing = y.dtype.kind, np.zeros(len(y), bool)
    if kind == "b":
        y = np.where(y, "true", "false")
    elif kind in "OU":
        items = (item.item() if isinstance(item, np.generic) else item for item in y.tolist())
        y = np.array([format_category(item) for item in items])
        missing = y == ""
    elif kind == "f":
        missing = ~np.isfinite(y)
    elif kind not in "iu":
        raise InputError.of(name, y.dtype.name, "numbers, texts or booleans", "convert them")
    if missing.any():
        row = int(missing.argmax()) + 1
        raise InputError(f"row {row} of {name} is missing; give it one or leave the row out")
    is_whole = kind == "f" and bool(((y % 1 == 0) & (np.abs(y) < 2**63)).all())
    return y.astype(np.int64) if is_whole else y


def _check_evaluation(
    name: str, data: Given, shape: tuple[int, ...], target: Regression | None
) -> Samples | None:
    if (pair := getattr(data, name.removeprefix("data."))) is None:
        return None
    return check_pair(name, pair, shape, target=target, counted=not data.classes)[0]


def _split_rows(
    plan: Plan, seed: int, labels: NDArray[Any], validation: int, test: int, own_test: int
) -> Split:
    data, rng = plan.data, seeds.generator(seed, Purpose.SPLIT)
    public = data.public or 0  # the first rows: validation is drawn from them, no client gets any
    steering = rng.permutation(public)[:validation]
    if plan.regression is not None:  # its splits look at no label
        labels = np.zeros(len(labels), np.int32)
    dealt = split_rows(
        labels[public:],
        ids=np.arange(public, len(labels)),
        kind=data.split,
        clients=plan.clients,
        samples=data.samples,
        validation=0 if public else validation,
        test=test,
        rng=rng,
        labels_per_client=data.labels_per_client,
        alpha=data.alpha,
        own_test=own_test,
    )
    return replace(dealt, validation=steering) if public else dealt


def is_pair(train: Any) -> bool:
    """Return whether this is one (X, y), to be split, and not a list with one (X, y) per client.

    >>> is_pair(([[1.0]], [0])), is_pair([([[1.0]], [0]), ([[2.0]], [1])])
    (True, False)
    """
    return isinstance(train, tuple) and not any(isinstance(item, tuple) for item in train)


def check_pair(
    name: str,
    pair: Any,
    shape: tuple[int, ...] | None = None,
    *,
    stream: bool = False,
    target: Regression | None = None,
    counted: bool = True,
    finite: bool = True,
    reads_texts: bool = True,
) -> tuple[Samples, tuple[int, ...]]:
    """Return rows and labels as they are trained on; refuse what cannot be.

    `counted`: the classes are those of these labels. `finite`: every number of a row must be.
    `reads_texts`: a sample may be a text.
    """
    try:
        rows, labels = pair
        dtype = (rows if stream else np.asarray(rows)).dtype
        if getattr(dtype, "kind", "f") in "cmMS" or getattr(dtype, "type", float) is np.void:
            raise TypeError  # numpy would make numbers
        with np.errstate(over="ignore"):  # of a number that float32 does not hold: not finite
            x = rows if stream else as_samples(rows)
        y = labels if stream and is_streamed(labels) else np.asarray(labels)
    except (TypeError, ValueError, OverflowError):
        bound, remedy = "a pair (X, y) of arrays", "rows of numbers and their labels"
        what: Any = type(pair).__name__
        if isinstance(pair, tuple) and len(pair) == 2:
            what = tuple(str(getattr(half, "dtype", type(half).__name__)) for half in pair)
        raise InputError.of(name, what, bound, remedy) from None
    if not (stream or reads_texts) and np.ndim(rows) < len(x.shape):
        remedy = 'choose one that reads texts, as model.features = "wordllama"'
        raise InputError.of(name, "texts", "numbers without a network in model.features", remedy)
    if len(x.shape) < 2 or len(y.shape) != 1 or len(x) != len(y) or 0 in x.shape:
        remedy = "one row of X and one label for each sample"
        raise InputError.of(name, (x.shape, y.shape), "X[n, …] and y[n] with n ≥ 1", remedy)
    if shape is not None and x.shape[1:] != shape:
        raise InputError.of(name, x.shape[1:], f"rows of shape {shape}", "as in the training data")
    # Stored whole numbers from 0 need no table in memory: they are their classes.
    whole, cut = np.issubdtype(y.dtype, np.integer), None
    if target is not None:
        y_rows: Any = _read_numbers(f"{name} targets", y, target)
        cut = target.find_cut(y)
    elif stream and whole and (codes := Stored.of(y, np.int64)).min() == 0:
        y_rows = codes
    else:
        y_rows = read_labels(f"{name} labels", y)
        if counted and y.dtype.kind in "fiu":
            tables.refuse_measurement(f"{name} labels", y)
    if stream:
        return _make_samples(Stored.of(x, np.float32), y_rows, cut), tuple(x.shape[1:])
    if finite:
        require_finite(x, 0, name)
    return Samples(x.reshape(len(x), -1), y_rows, cut), x.shape[1:]


def _read_numbers(name: str, labels: Any, target: Regression) -> NDArray[np.float32]:
    """Return targets scaled to [−1, 1]; refuse missing ones."""
    y = np.asarray(labels)
    if y.dtype.kind not in "fiub":
        raise InputError.of(name, y.dtype.name, "numbers", "or leave model.loss out")
    scaled = target.scale(y)
    if not np.isfinite(scaled).all():
        row = int((~np.isfinite(scaled)).argmax()) + 1
        raise InputError(f"row {row} of {name} is no number; give it one or leave the row out")
    return scaled
