"""Your own table: a CSV or Parquet file as the float32 matrix that models are trained on.

- A number is cut to its public bounds and scaled to [0, 1]; a missing one is 0.5, their middle.
- A text becomes one 0/1 input for each of its public categories; missing or unseen: all are 0.
- The label must be one of its categories in every row, and the client of a row must be named.

Columns that the plan does not list are not read, unless it asks to infer them: then bounds and
categories are taken from all rows, and the guarantee says that this is not covered.

Memory: the encoded matrix and one batch of rows, however large the file is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from sottovoce.data.scan import Scan, as_number, as_text, in_order, scan
from sottovoce.errors import DataError, PlanError

if TYPE_CHECKING:
    import polars as pl

Spec = tuple[float, float] | tuple[str, ...]  # bounds, or categories; () leaves a column out

MOST_INFERRED = 1_000  # categories: a column with more is a name or a number, not a kind


@dataclass(frozen=True)
class Source:
    """Where a table lies and what the plan says about it."""

    path: str | Path
    label: str
    client: str | None = None
    columns: Mapping[str, Spec] = field(default_factory=dict)
    infer: bool = False
    validation: str | Path | None = None  # another table with the same columns
    test: str | Path | None = None  # another one


@dataclass(frozen=True)
class Layout:
    """How rows become numbers: all that is needed to encode another table the same way."""

    label: str
    classes: tuple[str, ...]
    columns: Mapping[str, Spec]  # the features alone, in the order of the inputs
    inferred: tuple[str, ...] = ()  # columns whose bounds or categories were taken from the data

    @property
    def features(self) -> tuple[str, ...]:
        """The name of each input.

        >>> Layout("y", ("0", "1"), {"age": (0.0, 120.0), "sex": ("f", "m")}).features
        ('age', 'sex=f', 'sex=m')
        """
        names = []
        for column, spec in self.columns.items():
            bounded = is_bounds(spec)
            names += [column] if bounded else [f"{column}={category}" for category in spec]
        return tuple(names)

    def to_json(self) -> dict[str, Any]:
        """As it stands in a record."""
        return {
            "label": self.label,
            "classes": list(self.classes),
            "columns": {column: list(spec) for column, spec in self.columns.items()},
            "inferred": list(self.inferred),
        }

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Layout:
        """Back from a record.

        >>> layout = Layout("y", ("0", "1"), {"age": (0.0, 120.0)})
        >>> Layout.from_json(layout.to_json()) == layout
        True
        """
        return cls(
            label=values["label"],
            classes=tuple(values["classes"]),
            columns={column: tuple(spec) for column, spec in values["columns"].items()},
            inferred=tuple(values["inferred"]),
        )


@dataclass(frozen=True, eq=False)
class Table:
    """Encoded rows: x[n, features], the class y[n] of each, and whose it is."""

    x: NDArray[np.float32]
    y: NDArray[np.int32]  # empty where labels were not asked for
    owner: NDArray[np.int32] | None  # a number into `clients`, where a client column was named
    clients: tuple[str, ...]  # in order: as numbers if all of them are, or else by the alphabet
    layout: Layout


def check(source: Source) -> Scan:
    """Open the table and hold the plan against its header and schema; no row is read."""
    opened = scan(source.path)
    used = [column for column, spec in source.columns.items() if spec]
    opened.require(source.label, "data.label")
    if source.client is not None:
        opened.require(source.client, "data.client")
    for column in source.columns:
        if column in used or column not in opened.schema:  # of one left out, the name matters
            opened.require(column, "data.columns")
    for key, file in (("data.validation", source.validation), ("data.test", source.test)):
        if file is not None:
            other = scan(file, key)
            for column in dict.fromkeys([source.label, *used]):
                other.require(column, key)
    return opened


def read_table(source: Source) -> Table:
    """The whole table, encoded; what the plan lacks is inferred first if it asks for that."""
    opened = check(source)
    return _read(opened, _layout(opened, source), client=source.client)


def read_rows(path: str | Path, layout: Layout, *, labels: bool, key: str = "data.test") -> Table:
    """Read another table with the same columns: to evaluate on, or to predict (labels = False)."""
    opened = scan(path, key)
    for column in [layout.label] * labels + list(layout.columns):
        opened.require(column, key)
    return _read(opened, layout, labels=labels)


def is_bounds(spec: Spec) -> bool:
    """Whether a column is a number.

    >>> is_bounds((0.0, 1.0)), is_bounds(("a", "b")), is_bounds(())
    (True, False, False)
    """
    return len(spec) > 0 and not isinstance(spec[0], str)


def _read(opened: Scan, layout: Layout, *, client: str | None = None, labels: bool = True) -> Table:
    rows, wide = opened.rows(), len(layout.features)
    x = np.zeros((rows, wide), np.float32)
    y = np.zeros(rows if labels else 0, np.int32)
    owner = np.zeros(rows if client is not None else 0, np.int32)
    known: dict[str, int] = {}  # clients, in the order in which they appear
    wanted = list(layout.columns) + [layout.label] * labels + ([client] if client else [])
    done = 0
    for batch in opened.batches(wanted):
        here = slice(done, done + len(batch))
        if here.stop > rows:
            break
        place = _Place(opened.path.name, done)
        _encode(batch, layout.columns, x[here], place)
        if labels:
            y[here] = _classes(batch[layout.label], layout, place)
        if client is not None:
            owner[here] = _owners(batch[client], known, place)
        done = here.stop
    if done != rows:
        raise DataError(f"{opened.path.name} changed while it was read; run it again")
    names = in_order(known)
    rank = {name: i for i, name in enumerate(names)}
    order = np.array([rank[name] for name in known], np.int32)
    return Table(x, y, order[owner] if client is not None else None, tuple(names), layout)


@dataclass(frozen=True)
class _Place:
    """Where a batch stands in its file, to name a row in a sentence."""

    file: str
    before: int

    def row(self, mask: pl.Series) -> tuple[int, int]:
        """The first marked row: in the batch from 0, and in the file from 1 below the header."""
        first = int(mask.arg_max() or 0)
        return first, self.before + first + 1


def _encode(
    batch: pl.DataFrame, columns: Mapping[str, Spec], x: NDArray[np.float32], place: _Place
) -> None:
    at = 0
    for column, spec in columns.items():
        if is_bounds(spec):
            x[:, at] = _scaled(batch[column], spec, place)
            at += 1
            continue
        codes = _codes(as_text(batch[column]), spec)
        (seen,) = np.nonzero(codes >= 0)
        x[seen, at + codes[seen]] = 1.0
        at += len(spec)


def _scaled(cells: pl.Series, bounds: Any, place: _Place) -> NDArray[np.float64]:
    low, high = bounds
    numbers = as_number(cells)
    bad = numbers.is_null() & _is_text(cells)
    if bad.any():
        first, row = place.row(bad)
        raise DataError(
            f"column {cells.name[:60]!a} of {place.file} has {str(cells[first])[:60]!a} in row "
            f"{row}, which is no number; correct it, empty the cell, or list the column's "
            "categories"
        )
    if not high > low:  # inferred from a column that is always the same
        return np.full(len(cells), 0.5)
    scaled = (numbers.clip(low, high) - low) / (high - low)
    return np.asarray(scaled.fill_null(0.5), np.float64)


def _is_text(cells: pl.Series) -> pl.Series:
    """Which cells hold something that is not the word for "not a number"."""
    if cells.dtype.is_numeric():
        return cells.is_null() & False
    texts = as_text(cells)
    return (texts.str.to_lowercase().str.strip_chars_start("+-") != "nan").fill_null(False)


def _codes(texts: pl.Series, categories: Any) -> NDArray[np.int32]:
    import polars as pl

    table = {category: i for i, category in enumerate(categories)}
    return texts.replace_strict(table, default=-1, return_dtype=pl.Int32).to_numpy()


def _classes(cells: pl.Series, layout: Layout, place: _Place) -> NDArray[np.int32]:
    import polars as pl

    codes = _codes(as_text(cells), layout.classes)
    if codes.size and codes.min() < 0:
        first, row = place.row(pl.Series(codes < 0))
        value = cells[first]
        shown = "no label" if value is None else f"the label {str(value)[:60]!a}"
        listed = ", ".join(f"{name[:30]!a}" for name in layout.classes[:5])
        listed += ", …" if len(layout.classes) > 5 else ""
        raise DataError(
            f"row {row} of {place.file} has {shown} in column {layout.label[:60]!a}; "
            f"it must be one of {listed}: correct it, remove the row, or list it in data.columns"
        )
    return codes


def _owners(cells: pl.Series, known: dict[str, int], place: _Place) -> NDArray[np.int32]:
    import polars as pl

    texts = as_text(cells)
    if texts.null_count():
        _, row = place.row(texts.is_null())
        raise DataError(
            f"row {row} of {place.file} names no client in column {cells.name[:60]!a}; "
            "every row belongs to one"
        )
    here = texts.unique(maintain_order=True).to_list()
    table = {name: known.setdefault(name, len(known)) for name in here}
    return texts.replace_strict(table, return_dtype=pl.Int32).to_numpy()


def _layout(opened: Scan, source: Source) -> Layout:
    label, file = source.label, opened.path.name
    listed = {c: spec for c, spec in source.columns.items() if spec and c != label}
    classes: Any = source.columns.get(label, ())
    if not source.infer:
        return Layout(label, tuple(classes), listed)
    ours = {label, source.client, *source.columns}
    # The column without a name is the row number that other programs write.
    lacking = [column for column in opened.schema if column not in ours and column]
    for column in lacking:
        opened.require(column, "the column")
    if not (listed or lacking):
        raise PlanError(f"{file} has no column beside the label {label[:60]!a}; add features")
    seen = {c: _Seen(c, file, number=c != label) for c in lacking + [label] * (not classes)}
    for batch in opened.batches(list(seen)) if seen else ():
        for column, found in seen.items():
            found.look(batch[column])
    specs = {column: found.spec() for column, found in seen.items()}
    classes = classes or specs.pop(label)
    if len(classes) < 2:
        raise DataError(
            f"the label {label[:60]!a} of {file} has {len(classes)} different values; "
            "there must be two or more to tell apart"
        )
    return Layout(label, tuple(classes), listed | specs, tuple(seen))


class _Seen:
    """What all rows of one column come to: bounds while they are numbers, or else categories."""

    def __init__(self, column: str, file: str, *, number: bool) -> None:
        self.column, self.file, self.number, self.is_label = column, file, number, not number
        self.low, self.high = np.inf, -np.inf
        self.texts: set[str] = set()

    def look(self, cells: pl.Series) -> None:
        """Take in one batch."""
        if self.number:
            numbers = as_number(cells)
            self.number = not (numbers.is_null() & _is_text(cells)).any()
            finite = numbers.filter(numbers.is_finite().fill_null(False)).to_numpy()
            self.low = min(self.low, finite.min(initial=np.inf))
            self.high = max(self.high, finite.max(initial=-np.inf))
        if len(self.texts) <= MOST_INFERRED:  # beyond, it is a number or refused
            self.texts.update(as_text(cells).drop_nulls().unique().to_list())

    def spec(self) -> Spec:
        """The bounds or the categories."""
        if self.number:
            return (float(self.low), float(self.high)) if self.low <= self.high else (0.0, 0.0)
        if len(self.texts) > MOST_INFERRED:
            remedy = (
                "choose one with a few categories, or list them"
                if self.is_label
                else f"leave it out with {self.column[:30]!a} = [] in data.columns, or list some"
            )
            raise DataError(
                f"column {self.column[:60]!a} of {self.file} has more than {MOST_INFERRED} "
                f"different texts; {remedy}"
            )
        return tuple(in_order(self.texts))
