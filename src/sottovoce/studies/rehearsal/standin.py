"""The rows that stand for the clients' own: public ones, digits drawn anew, or synthetic ones.

Nothing of the plan's own data is opened here; a rehearsal on them would be a release that nobody
pays for. Three parts: rows to train on, rows that choose, and rows that only tell what came out.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from sottovoce.data import datasets, tables
from sottovoce.data.files import read_npz
from sottovoce.errors import InputError
from sottovoce.plan import Plan
from sottovoce.privacy import seeds
from sottovoce.privacy.seeds import Purpose
from sottovoce.studies.rehearsal import pictures, rows
from sottovoce.studies.rehearsal.scale import Federation, spare

MOST_ROWS = 10_000  # to train on: beyond, clients hold fewer rows and the noise stays the real one
MOST_JUDGES = 4_000  # that choose, and as many that tell
FEW = 2_000  # public rows below which a fifth of them chooses and a fifth tells: a tenth is luck

Public: TypeAlias = "str | Path | tuple[ArrayLike, ArrayLike] | None"
Pair: TypeAlias = tuple[NDArray[np.float32], NDArray[np.int32]]


@dataclass(frozen=True, eq=False)
class StandIn:
    """Rows of `shape`, and in words what they are and how far they can be trusted."""

    kind: str  # public | drawn | synthetic
    about: str
    trust: str
    train: Pair
    validation: Pair
    test: Pair
    shape: tuple[int, ...]
    classes: int
    sources: int | None = None  # of how many different pictures those that tell are variations
    origin: str = "made"  # made | published | said (to be public) | own (the plan's); see `cost`
    name: str = ""  # of public rows, as they were given

    @property
    def telling(self) -> int:
        """How many rows tell independently of each other what a setting reaches."""
        return min(len(self.test[1]), self.sources or len(self.test[1]))

    @property
    def choosing(self) -> int:
        """How many rows choose independently of each other."""
        return min(len(self.validation[1]), self.sources or len(self.validation[1]))

    def fingerprint(self) -> str:
        """What tells these rows from others."""
        digest = hashlib.blake2b(digest_size=16)
        for x, y in (self.train, self.validation, self.test):
            digest.update(np.ascontiguousarray(x).data)
            digest.update(np.ascontiguousarray(y).data)
        return digest.hexdigest()


def stand_in(
    plan: Plan, real: Federation, public: Public = None, *, seed: int = 0, most: int = MOST_ROWS
) -> StandIn:
    """The stand-in for a plan: `public` rows if they are given, else what its kind of data allows.

    >>> from sottovoce.studies.rehearsal.scale import announced
    >>> plan = Plan(data={"name": "mnist", "clients": 5, "samples": 20})
    >>> found = stand_in(plan, announced(plan))
    >>> found.kind, found.train[0].shape, found.shape
    ('drawn', (100, 784), (28, 28, 1))
    """
    rng = seeds.generator(seed, Purpose.SPLIT, 10)
    wanted = min(real.rows, most) * spare(plan)
    if public is None and plan.data.name == "digits":
        public = "digits"
    if public is not None:
        return _public(plan, public, wanted, rng)
    if plan.data.pictures and plan.data.name != "arrays":
        return _drawn(plan, wanted, rng)
    if plan.data.name == "arrays":
        raise InputError(
            "data.name = arrays says nothing of the rows, so nothing can stand in for them; give "
            "public rows, as rehearse(plan, public=(X, y)) or --public rows.npz"
        )
    return _synthetic(plan, wanted, rng)


def _judges(wanted: int) -> int:
    """How many rows choose, and how many tell."""
    return int(np.clip(2 * wanted // 5, 400, MOST_JUDGES))


def _drawn(plan: Plan, wanted: int, rng: np.random.Generator) -> StandIn:
    known = datasets.DATASETS[str(plan.data.name)]
    digits = datasets.load("digits")
    order = rng.permutation(len(digits.train_y))
    first, second = int(0.6 * len(order)), int(0.8 * len(order))
    sources = digits.train_x.reshape(-1, 8, 8)

    def part(own: NDArray[np.int64], count: int) -> Pair:
        pick = own[rng.integers(0, len(own), count)]
        x = pictures.drawn(sources, pick, known.shape, rng)
        return x.reshape(count, -1), digits.train_y[pick]

    return StandIn(
        kind="drawn",
        sources=len(order) - second,
        about=(
            f"the {len(order):,} embedded handwritten digits (UCI), enlarged to "
            f"{known.shape[0]} × {known.shape[1]} pixels and drawn anew: shifted, turned, scaled, "
            "with thicker and thinner strokes; rows that choose and rows that tell come from "
            "digits that no client holds"
        ),
        trust=(
            "Digits are not your pictures. Rounds, step and clipping depend mostly on the "
            "federation (clients, rows, budgets) and on the model, which are the real ones; the "
            "predicted accuracy is that of drawn digits, and yours may lie elsewhere."
        ),
        train=part(order[:first], wanted),
        validation=part(order[first:second], _judges(wanted)),
        test=part(order[second:], _judges(wanted)),
        shape=known.shape,
        classes=known.classes,
    )


def _synthetic(plan: Plan, wanted: int, rng: np.random.Generator) -> StandIn:
    own = plan.data
    if own.infer:
        raise InputError(
            "data.infer = true leaves the columns to the table, which a rehearsal does not open; "
            "declare them in data.columns, or give public rows with --public"
        )
    fields = rows.fields_of(own.name, own.columns or {}, own.label)
    classes = own.classes or 2
    judges = _judges(wanted)
    x, y = rows.synthetic(fields, classes, wanted + 2 * judges, rng)
    x, y = np.roll(x, -wanted, axis=0), np.roll(y, -wanted)  # each class once among the judges
    y[judges : judges + classes] = np.arange(classes)
    return StandIn(
        kind="synthetic",
        about=(
            f"synthetic rows of the public schema ({len(fields)} columns, {x.shape[1]} features, "
            f"{classes} classes): eight kinds of rows, a random linear rule with chance, of which "
            f"the best prediction is right in about {rows.BEST:.0%}"
        ),
        trust=(
            "Only the form of the rows is yours. Rounds, step and clipping follow mostly from the "
            "federation; the model is kept as planned, because a linear rule cannot say which "
            "model suits your data, and what accuracy it will reach cannot be told from them."
        ),
        validation=(x[:judges], y[:judges]),
        test=(x[judges : 2 * judges], y[judges : 2 * judges]),
        train=(x[2 * judges :], y[2 * judges :]),
        shape=(x.shape[1],),
        classes=classes,
    )


def _public(plan: Plan, public: Public, wanted: int, rng: np.random.Generator) -> StandIn:
    known = _shape(plan)
    pictured = known is not None and len(known) == 3
    name, x, y, shape = _rows_of(plan, public, pictured)
    if pictured and len(shape) in (2, 3) and known is not None:
        x = pictures.resized(x.reshape(len(x), *shape[:2], -1), known)
        x, shape = x.reshape(len(x), -1), known
    elif known is not None and shape != known:
        raise InputError.of(
            "--public", shape, f"rows of shape {known} as the plan's", "give rows of the same kind"
        )
    classes = plan.data.classes
    classes = int(y.max()) + 1 if classes is None else classes
    seen = np.unique(y)
    if not np.array_equal(seen, np.arange(classes)):
        raise InputError.of(
            "--public labels",
            f"{len(seen)} classes from {int(seen[0])} to {int(seen[-1])}",
            f"the {classes} classes 0 to {classes - 1} of the plan",
            "show every class, and no other",
        )
    judges = min(_judges(wanted), max(1, len(y) // (5 if len(y) < FEW else 10)))
    if len(y) < 10 * classes:
        raise InputError.of(
            "--public", f"{len(y)} rows", f"{10 * classes} rows or more", "give more of them"
        )
    order = rng.permutation(len(y))
    # One row of each class goes where the number of classes is read.
    if np.bincount(y).min() < 2:
        raise InputError("--public has a class of one row; show two or more of every class")
    first = np.array([np.flatnonzero(y[order] == k)[:2] for k in range(classes)])
    front = np.concatenate([order[first[:, 0]], order[first[:, 1]]])
    rest = np.setdiff1d(order, front, assume_unique=True)
    rest = rest[rng.permutation(len(rest))]
    choose = np.concatenate([front[:classes], rest[: max(0, judges - classes)]])
    rest = rest[max(0, judges - classes) :]
    tell = np.concatenate([front[classes:], rest[: max(0, judges - classes)]])
    train = rest[max(0, judges - classes) :][:wanted]
    same = name == plan.data.name
    published = isinstance(public, str) and name in datasets.DATASETS
    return StandIn(
        kind="public",
        origin="own" if same else "published" if published else "said",
        name=name,
        about=(
            f"{len(y):,} public rows of {name}"
            if same or published
            else f"{len(y):,} rows of {name}, said to be public"
        ),
        trust=(
            "The plan trains on the embedded digits and these are the same public pictures, some "
            "of which the plan is tested on: with your own data, others stand in."
            if same
            else "As far as these rows are like the clients'; they must be nobody's secret."
        ),
        train=(x[train], y[train]),
        validation=(x[choose], y[choose]),
        test=(x[tell], y[tell]),
        shape=shape,
        classes=classes,
    )


def _shape(plan: Plan) -> tuple[int, ...] | None:
    """The shape of a row, where the plan alone says it."""
    own = plan.data
    if own.name is not None:
        return None if own.name == "arrays" else datasets.DATASETS[own.name].shape
    if own.infer:
        return None
    fields = rows.fields_of(None, own.columns or {}, own.label)
    return (sum(field.width for field in fields),)


def _rows_of(
    plan: Plan, public: Public, pictured: bool
) -> tuple[str, NDArray[np.float32], NDArray[np.int32], tuple[int, ...]]:
    if isinstance(public, tuple):
        return "what was given from Python", *_checked("public", *public, pictured)
    text = str(public)
    if text in datasets.DATASETS:
        if text == plan.data.name and text != "digits":
            raise InputError.of(
                "--public",
                text,
                "other rows than the plan's own",
                "settings chosen on the clients' rows would cost privacy that nobody pays",
            )
        arrays = datasets.load(text)
        x = np.concatenate([arrays.train_x, arrays.test_x.reshape(-1, arrays.train_x.shape[1])])
        return text, x, np.concatenate([arrays.train_y, arrays.test_y]), arrays.shape
    path = Path(text)
    if not path.is_file():
        raise InputError.of(
            "--public",
            text,
            f"a file, or one of {', '.join(datasets.DATASETS)}",
            "name public rows",
        )
    for key in ("path", "validation", "test"):
        own = getattr(plan.data, key)
        if isinstance(own, str | Path) and Path(own).exists() and path.samefile(own):
            raise InputError.of(
                "--public",
                text,
                f"another file than data.{key}",
                "settings chosen on these rows would cost privacy that nobody pays, or be tested "
                "on what chose them",
            )
    if path.suffix.lower() == ".npz":
        return path.name, *_npz(path, pictured)
    if path.suffix.lower() not in (".csv", ".parquet") or plan.data.path is None:
        raise InputError.of(
            "--public",
            text,
            "an .npz with x and y, or a .csv or .parquet for a plan with data.path",
            "save the rows as one of these",
        )
    source = plan.data.table() | {"path": path, "client": None, "validation": None, "test": None}
    table = tables.read_table(tables.Source(**source))
    return path.name, table.x, table.y, (table.x.shape[1],)


def _npz(
    path: Path, pictured: bool
) -> tuple[NDArray[np.float32], NDArray[np.int32], tuple[int, ...]]:
    try:
        x, y = read_npz(path, "x", "y").values()
    except (OSError, ValueError):
        raise InputError.of(
            "--public", str(path), "an .npz with the arrays x and y", "save it with numpy.savez"
        ) from None
    return _checked(path.name, x, y, pictured)


def _checked(
    name: str, x: ArrayLike, y: ArrayLike, pictured: bool
) -> tuple[NDArray[np.float32], NDArray[np.int32], tuple[int, ...]]:
    bound = "x[n, …] of finite numbers and y[n] of whole numbers from 0"
    given = f"the rows of {name}"
    try:
        rows_, labels = np.asarray(x), np.asarray(y)
    except ValueError:  # lists of unequal length
        raise InputError.of(given, "no arrays", bound, "one label for each row") from None
    if rows_.dtype.kind not in "fiub" or labels.dtype.kind not in "iu":
        kinds = f"x of {rows_.dtype} and y of {labels.dtype}"
        raise InputError.of(given, kinds, bound, "encode categories first")
    if rows_.ndim < 2 or labels.shape != rows_.shape[:1] or not rows_.size:
        raise InputError.of(given, (rows_.shape, labels.shape), bound, "one label for each row")
    with np.errstate(over="ignore"):
        flat = rows_.astype(np.float32).reshape(len(rows_), -1)
    if not np.isfinite(flat).all():
        raise InputError.of(given, "a number that is not", bound, "leave such rows out")
    least, most = int(labels.min()), int(labels.max())
    if least < 0 or most >= len(labels):  # as many classes as rows: the number of them is wrong
        found = f"labels from {least} to {most}"
        raise InputError.of(given, found, bound, "number the classes 0, 1, 2, …")
    if pictured:
        flat = _as_named(given, flat, whole=rows_.dtype.kind in "iu")
    return flat, labels.astype(np.int32), rows_.shape[1:]


def _as_named(given: str, x: NDArray[np.float32], *, whole: bool) -> NDArray[np.float32]:
    """Pictures on the scale of the named data sets, 0 to 1: clipping and step depend on it.

    >>> _as_named("x", np.array([[0, 51, 255]], np.float32), whole=True).tolist()
    [[0.0, 0.20000000298023224, 1.0]]
    """
    low, high = float(x.min()), float(x.max())
    bytes_ = whole and 127 < high <= 255  # less than half of the light there is: another scale
    if low < 0 or (high > 1 and not bytes_):
        raise InputError.of(
            given,
            f"from {low:g} to {high:g}",
            "whole numbers from 0 to 255, or numbers from 0 to 1",
            "bring the pictures to one of these scales",
        )
    return x / np.float32(255) if bytes_ else x
