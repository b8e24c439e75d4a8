"""Read your own table: a CSV or Parquet file as the float32 matrix that models are trained on.

docs/data.md says what becomes of a cell. Columns that the plan does not list are not read, unless
it asks to infer them. Only polars reads tables, and it is loaded when the first one is opened. A
CSV is read as texts: the plan says what a column is, never a guess from its first rows. Memory
holds the encoded matrix and one batch of rows, however large the file is.
"""

from __future__ import annotations

import csv
import difflib
import hashlib
import json
import os
import re
import textwrap
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from sottovoce.data import files
from sottovoce.errors import DataError, InputError, PlanError
from sottovoce.models.base import Regression
from sottovoce.models.network import TEXT_NUMBERS, as_samples, pack_texts

if TYPE_CHECKING:
    import polars as pl

    from sottovoce.schemas import TableEntry


def read_samples(path: Path) -> NDArray[np.float32]:
    """Read samples to predict: a .npy, the array `x` (or the only one) of a .npz, or a .csv.

    A .csv holds numbers; a first line that does not is taken as its header.
    """
    readers = {".npy": files.read_npy, ".npz": _read_npz, ".csv": _read_csv}
    if path.suffix.lower() not in readers:
        remedy = "save the samples as one of these"
        raise InputError.of("FILE", path.name, "a .npy, .npz or .csv file", remedy)
    try:
        rows = readers[path.suffix.lower()](path)
        return as_samples(rows)
    except FileNotFoundError:
        raise InputError.of("FILE", str(path), "a file that exists", "check its name") from None
    except (OSError, ValueError, TypeError, csv.Error) as error:
        raise DataError(f"{path} cannot be read as samples: {files.why(error)}") from None


def _read_npz(path: Path) -> Any:
    stored = files.read_npz(path)
    if "x" not in stored and len(stored) != 1:
        raise ValueError(f"it holds the arrays {', '.join(stored)} and none is called x")
    return stored.get("x", next(iter(stored.values())))


def _read_csv(path: Path) -> Any:
    with path.open(newline="", encoding="utf-8-sig") as file:
        lines = [row for row in csv.reader(file) if row]
    if lines and not _are_numbers(lines[0]):
        lines = lines[1:]
    for number, row in enumerate(lines, start=1):
        if not _are_numbers(row) or len(row) != len(lines[0]):
            raise ValueError(f"row {number} is not {len(lines[0])} numbers")
    return [[float(cell) for cell in row] for row in lines]


def _are_numbers(row: list[str]) -> bool:
    try:
        [float(cell) for cell in row]
    except ValueError:
        return False
    return True


Missing: TypeAlias = Literal["middle", "flag"]  # what becomes of a number that is missing
Kind: TypeAlias = Literal[
    "number", "code", "text", "id", "date", "prose", "levels", "mixed", "unreadable"
]

#: Why the draft of a plan leaves a column out, by its kind.
LEFT_OUT: dict[str, str] = {
    "id": "it looks like an id (if it names clients or persons, write client or person above)",
    "date": "dates are no categories; make a number of it, such as a year or days since an event",
    "prose": 'it looks like free text; text = "{}" above and features = "wordllama" below use it',
    "mixed": "it has mostly numbers; empty the cells that are none, such as NA, and draft again",
    "levels": "it has very many different texts; group them into a few categories first",
    "unreadable": "it has lists or bytes; save it as numbers or texts",
}
MOST_LEVELS = 50  # different texts among the first rows, above which a column is no category
LONG_TEXT = 40  # characters, on average, above which a text is prose
_DATE = r"^\d{4}[-/.]\d{1,2}[-/.]\d{1,2}|^\d{1,2}[-/.]\d{1,2}[-/.]\d{2,4}"

BATCH = 65_536  # rows in memory besides the encoded matrix
SAMPLE = 1_000  # rows that `guess_kinds` reads
LONGEST_HEADER = 1 << 20


@dataclass(frozen=True, eq=False)
class Scan:
    """A table that has been opened and not yet read: its columns and their types."""

    path: Path
    frame: pl.LazyFrame
    schema: dict[str, pl.DataType]

    def count_rows(self) -> int:
        """Return the number of rows; refuse a table without any."""
        import polars as pl

        with translate_errors(self.path):
            count = int(self.frame.select(pl.len()).collect(engine="streaming").item())
        if count == 0:
            raise DataError(
                f"{self.path.name} has no complete row below its header; "
                "add some, or close a quote that is open"
            )
        return count

    def batches(self, columns: Sequence[str]) -> Iterator[pl.DataFrame]:
        """Yield the rows in their order, as the file has them, `BATCH` at a time."""
        # Only if polars reads all columns of a CSV does it refuse a row with too many cells, in
        # which those of one column stand in another.
        is_csv = self.path.suffix.lower() == ".csv"
        frame = self.frame if is_csv else self.frame.select(columns)
        with translate_errors(self.path):
            for batch in frame.collect_batches(chunk_size=BATCH, maintain_order=True):
                yield batch.select(columns)

    def require_column(self, column: str, key: str) -> None:
        """Refuse a column that does not exist, with a suggestion, or whose type is not usable."""
        name = self.path.name
        if column not in self.schema:
            hint = self.suggest_column(column)
            raise PlanError(f"{key} {column[:60]!a} is no column of {name}; {hint}")
        if not has_cells_to_read(kind := self.schema[column]):
            raise PlanError(
                f"{key} {column[:60]!a} of {name} holds {str(kind)[:40]}, which is neither number "
                "nor text; save it as one of them or leave it out"
            )

    def suggest_column(self, column: str) -> str:
        """Return the column with a similar name, as a question, or which columns there are."""
        folded = {other.strip().casefold(): other for other in self.schema}
        near = difflib.get_close_matches(column.strip().casefold(), folded, 1)
        listed = f"its columns are {_shorten(self.schema)}"
        return f"did you mean {folded[near[0]][:60]!a}?" if near else listed


def has_cells_to_read(kind: pl.DataType) -> bool:
    """Return whether the cells of a column of this type are numbers or texts."""
    return not (kind.is_temporal() or kind.is_nested() or str(kind) in ("Binary", "Object"))


def _shorten(names: Iterable[str], most: int = 5) -> str:
    listed = [f"{name[:30]!a}" for name in names]
    return ", ".join(listed[:most]) + (", …" if len(listed) > most else "")


def open_table(path: str | Path, key: str = "data.path") -> Scan:
    """Open a table and check what can be checked from its header and schema."""
    import polars as pl

    path = Path(path)
    head, names = _read_first_bytes(path, key), list[str]()
    if path.suffix.lower() == ".csv":
        separator = _find_separator(head)
        names = _read_header(path, head, separator)
        frame = pl.scan_csv(path, infer_schema=False, glob=False, separator=separator)
    else:
        frame = pl.scan_parquet(path, glob=False)
    with translate_errors(path):
        schema = dict(frame.collect_schema())
    for name, column in zip(names, [*schema], strict=False):
        if column and not name:  # polars names further columns that have no name; they are not read
            del schema[column]
    if not schema:
        raise DataError(f"{path.name} has no columns; save it with a header")
    return Scan(path, frame, schema)


def guess_kinds(path: str | Path) -> dict[str, Kind]:
    """Guess the kind of every column from the header and the first rows."""
    opened = open_table(path, "--from")
    with translate_errors(opened.path):
        sample = opened.frame.head(SAMPLE).collect()
    return {column: _guess_kind(column, sample[column]) for column in opened.schema}


def _guess_kind(column: str, cells: pl.Series) -> Kind:
    if not has_cells_to_read(cells.dtype):
        return "date" if cells.dtype.is_temporal() else "unreadable"
    texts = as_text(cells).drop_nulls()
    if not len(texts):
        return "text"
    different, is_number = texts.n_unique(), len(as_number(cells).drop_nulls()) == len(texts)
    if looks_like_id(column) and different > MOST_NUMBERS:
        return "id"
    if is_number:
        numbers = as_number(cells).drop_nulls()
        if different <= MOST_NUMBERS and bool((numbers % 1 == 0).all()):
            return "code"  # 0 and 1, a grade: as a label it is classes
        return "id" if _are_running(numbers) else "number"
    if texts.str.contains(_DATE).mean() > 0.9:  # type: ignore[operator]  # of booleans
        return "date"
    if len(as_number(cells).drop_nulls()) > len(texts) / 2:
        return "mixed"
    if float(np.mean(texts.str.len_chars().to_numpy())) > LONG_TEXT:
        return "prose"
    if different == len(texts) > MOST_NUMBERS:
        return "id"
    return "levels" if different > MOST_LEVELS else "text"


def _are_running(numbers: pl.Series) -> bool:
    """Return whether whole numbers grow from row to row by one or two on average, as row numbers.

    >>> import polars as pl
    >>> [_are_running(pl.Series(rows)) for rows in (range(7, 90), [1, 3, 4] * 9, [0.5, 1.5])]
    [True, False, False]
    """
    values = numbers.to_numpy()
    if len(values) <= MOST_NUMBERS or not np.isfinite(values).all() or (values % 1 != 0).any():
        return False
    steps = np.diff(values)
    return bool(steps.min() > 0 and steps.mean() <= 2)


_ID_NAME = re.compile(
    r"(^|[^a-z])(id|uuid|guid|mrn|ssn|pid)$|patient|person|subject|participant|customer|user",
    re.IGNORECASE,
)


def looks_like_id(column: str) -> bool:
    """Return whether a column's name is that of an id.

    >>> [looks_like_id(name) for name in ("patient_id", "caseID", "age", "paid", "user")]
    [True, True, False, False, True]
    """
    return _ID_NAME.search(re.sub(r"(?<=[a-z])(?=[A-Z])", "_", column)) is not None


def as_text(cells: pl.Series) -> pl.Series:
    """Return cells as texts without spaces around them; empty ones and NaN are null.

    >>> import polars as pl
    >>> as_text(pl.Series([1.0, 2.5, float("nan"), None])).to_list()
    ['1', '2.5', None, None]
    >>> as_text(pl.Series([" a", "", None])).to_list()
    ['a', None, None]
    """
    import polars as pl

    if cells.dtype.is_float():
        cells = cells.fill_nan(None)
        # Whole numbers are written without a point, so that the category "1" matches 1.0.
        whole = cells.cast(pl.Int64, strict=False)
        same = whole.cast(cells.dtype) == cells
        return whole.cast(pl.String).zip_with(same.fill_null(False), cells.cast(pl.String))
    texts = cells.cast(pl.String).str.strip_chars()
    return texts.set(texts == "", None)


def as_number(cells: pl.Series) -> pl.Series:
    """Return cells as float64; missing ones, NaN and texts are null."""
    import polars as pl

    if not (cells.dtype.is_numeric() or cells.dtype == pl.Boolean):
        cells = as_text(cells)
    return cells.cast(pl.Float64, strict=False).fill_nan(None)


def sort_texts(texts: Iterable[str]) -> list[str]:
    """Sort texts as numbers if all of them are numbers, else by the alphabet."""
    listed = sorted(texts)
    try:
        return sorted(listed, key=float)
    except ValueError:
        return listed


@contextmanager
def translate_errors(path: Path) -> Iterator[None]:
    """Turn errors of polars and of the system into a DataError of one sentence."""
    import polars as pl

    try:
        yield
    except pl.exceptions.PolarsError as error:
        why = str(error).strip().splitlines()[0] if str(error).strip() else "no reason is given"
        if path.suffix.lower() == ".csv" and (found := find_ragged_rows(path)).longer:
            raise DataError(
                f"row {found.longer[0]} of {path.name} has more than {found.cells} cells; "
                "correct it (a text with a separator needs quotes)"
            ) from None
        if re.match("CSV malformed|could not parse", why):  # a CSV is read as texts
            why = 'a quote stands within a text or is not closed; write 5" as "5""" (in quotes)'
        kind = "Parquet" if path.suffix.lower() == ".parquet" else "CSV in UTF-8"
        raise DataError(f"{path.name} cannot be read as {kind}: {ascii(why[:120])[1:-1]}") from None
    except OSError as error:
        why = error.strerror or "the system refused"
        raise DataError(f"{path.name} cannot be read: {why}") from None


class RaggedRows(NamedTuple):
    """Rows of a CSV, from 1, with more or fewer cells than its header."""

    cells: int  # of the header
    longer: array[int]
    shorter: array[int]  # the cells that they lack are read as missing


def find_ragged_rows(path: Path) -> RaggedRows:
    """Return which rows of a CSV have other cells than its header; empty lines are not counted."""
    with path.open("rb") as head:
        separator = _find_separator(head.read(LONGEST_HEADER))
    longer, shorter = array("q"), array("q")
    with path.open(newline="", encoding="utf-8-sig", errors="replace") as file:
        lines = csv.reader(file, delimiter=separator)
        wide = len(next(lines, []))
        with suppress(csv.Error):  # an open quote: polars says so
            for row, cells in enumerate(lines, start=1):
                if cells and len(cells) != wide:
                    (longer if len(cells) > wide else shorter).append(row)
    return RaggedRows(wide, longer, shorter)


def _read_first_bytes(path: Path, key: str) -> bytes:
    try:
        with path.open("rb") as file:
            head = file.read(LONGEST_HEADER)
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        from sottovoce.plan.base import explain_unreadable, quote_value

        why = explain_unreadable(path, error)
        raise PlanError(f"{key} {quote_value(path)} cannot be read: {why}") from None
    if not head:
        raise DataError(f"{path.name} is empty; name a table with a header and rows")
    return head


def _find_separator(head: bytes) -> str:
    """Return what separates the columns of a header: a comma, or else ;, a tab or |.

    >>> [_find_separator(head) for head in (b"a,b;c\\n1,2", b"a;b\\n1,5;2", b"a\\n1;2")]
    [',', ';', ',']
    >>> _find_separator(b'"weight, kg";age\\n70;31')
    ';'
    """
    line = re.sub(rb'"[^"]*"', b"", head.splitlines()[0])
    others = [mark for mark in (";", "\t", "|") if mark.encode() in line]
    return "," if b"," in line or not others else others[0]


def _read_header(path: Path, head: bytes, separator: str) -> list[str]:
    """Return the names in the first line of a CSV; refuse a line that is no header."""
    line = head.splitlines()[0]
    if b"\r" in head and b"\n" not in head:
        raise DataError(
            f"{path.name} has the line ends of old Macintoshes; save it as CSV in UTF-8"
        )
    try:
        names = next(csv.reader([line.decode("utf-8-sig")], delimiter=separator), [])
    except (UnicodeDecodeError, csv.Error):
        raise DataError(
            f"the header of {path.name} is not CSV in UTF-8; save the table as that"
        ) from None
    if not any(name.strip() for name in names) or b"\0" in line:
        raise DataError(f"the first line of {path.name} names no columns; give it a header")
    twice = [name for name, times in Counter(names).items() if times > 1 and name]
    if twice:
        raise DataError(
            f"the header of {path.name} has the column {twice[0][:60]!a} twice; rename one"
        )
    return names


Spec = tuple[float, float] | tuple[str, ...]  # bounds, or categories; () leaves a column out

MOST_INFERRED = 1_000  # categories: a column with more holds names or numbers, not categories
MOST_CLASSES = 10**6
MOST_NUMBERS = 20  # different numbers that are classes where nothing declares them
CONTINUOUS = "a continuous target needs model.loss = squared or huber and data.target = [low, high]"


def refuse_measurement(name: str, numbers: NDArray[Any]) -> None:
    """Refuse a label that is a measurement: numbers that are not whole, or too many of them.

    Whole numbers from 0 or 1 may be many: they number their classes.

    >>> refuse_measurement("y", np.array([0.0, 1.0])), refuse_measurement("y", np.arange(1, 27))
    (None, None)
    >>> refuse_measurement("y", np.array([0.5, 1.0]))
    Traceback (most recent call last):
        ...
    sottovoce.errors.InputError: y must be classes, got 0.5; a continuous target needs \
model.loss = squared or huber and data.target = [low, high]
    """
    broken = numbers[numbers % 1 != 0]
    if len(broken):
        raise InputError.of(name, float(broken[0]), "classes", CONTINUOUS)
    numbered = numbers.dtype.kind in "iu" and int(numbers.min()) in (0, 1)
    values = np.unique(numbers)
    if len(values) > MOST_NUMBERS and not (numbered and values[-1] < MOST_CLASSES):
        raise InputError.of(
            name,
            f"{len(values)} different numbers from {values[0]:g} to {values[-1]:g}",
            f"classes: at most {MOST_NUMBERS} numbers, or whole numbers from 0 or 1",
            CONTINUOUS,
        )


@dataclass(frozen=True)
class Source:
    """The path of a table and what the plan says about it."""

    path: str | Path
    label: str
    client: str | None = None
    columns: Mapping[str, Spec] = field(default_factory=dict)
    infer: bool = False
    person: str | None = None  # the column of person ids
    validation: str | Path | None = None  # another table with the same columns
    test: str | Path | None = None  # another one
    target: Regression | None = None  # how the label is a number
    missing: Missing = "middle"
    text: str | None = None  # the column of free texts


@dataclass(frozen=True)
class Layout:
    """How rows become numbers: all that is needed to encode another table the same way."""

    label: str
    classes: tuple[str, ...]
    columns: Mapping[str, Spec]  # the features alone, in the order of the inputs
    inferred: tuple[str, ...] = ()  # columns whose bounds or categories were taken from the data
    target: Regression | None = None  # how the label is a number; it then has no classes
    missing: Missing = "middle"
    low: float = field(default=-1.0, compare=False)  # what a lower bound becomes; once it was 0
    text: str | None = None  # the column of free texts, whose bytes are the last inputs

    @property
    def used(self) -> list[str]:
        """The columns that inputs are made of."""
        return [*self.columns, *([] if self.text is None else [self.text])]

    @property
    def features(self) -> tuple[str, ...]:
        """The name of each input but the bytes of a text.

        >>> Layout("y", ("0", "1"), {"age": (0.0, 120.0), "sex": ("f", "m")}).features
        ('age', 'sex=f', 'sex=m')
        >>> Layout("y", ("0", "1"), {"age": (0.0, 120.0)}, missing="flag").features
        ('age', 'age missing')
        """
        names = []
        for column, spec in self.columns.items():
            if is_bounds(spec):
                names += [column, f"{column} missing"][: 1 + (self.missing == "flag")]
            else:
                names += [f"{column}={category}" for category in spec]
        return tuple(names)

    @property
    def encoding(self) -> str:
        """A digest of how cells become numbers: the same on two machines, or their rows differ."""
        columns = [
            [name, *(map(float, spec) if is_bounds(spec) else spec)]
            for name, spec in self.columns.items()
        ]
        about = [columns, self.classes, self.missing, self.low, *self.used[len(columns) :]]
        text = json.dumps(about)
        return hashlib.sha256(text.encode()).hexdigest()

    def to_json(self) -> TableEntry:
        """Return the layout as it stands in a run record."""
        entry: TableEntry = {
            "label": self.label,
            "classes": list(self.classes),
            "columns": {column: list(spec) for column, spec in self.columns.items()},
            "inferred": list(self.inferred),
        }
        if self.low == -1:
            entry["scale"] = "signed"
        if self.text is not None:
            entry["text"] = self.text
        return entry if self.missing == "middle" else {**entry, "missing": self.missing}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Layout:
        """Read a layout from a run record."""
        return cls(
            label=values["label"],
            classes=tuple(values["classes"]),
            columns={column: tuple(spec) for column, spec in values["columns"].items()},
            inferred=tuple(values["inferred"]),
            missing=values.get("missing", "middle"),
            low=-1.0 if "scale" in values else 0.0,
            text=values.get("text"),
        )


@dataclass(frozen=True, eq=False)
class Table:
    """Encoded rows: x[n, features], class or scaled number y[n] of each, the client of each."""

    x: NDArray[np.float32]
    y: NDArray[Any]  # int32 or float32; empty if labels were not asked for
    owner: NDArray[np.int32] | None  # an index into `clients`, if a client column was named
    clients: tuple[str, ...]  # as `sort_texts` sorts them
    layout: Layout
    person: NDArray[np.int64] | None = None  # a number for the person of each row
    cut: NDArray[np.bool_] | None = None  # which numbers y were cut to their range


def check_source(source: Source) -> Scan:
    """Open the table and check the plan against its header and schema; no row is read."""
    opened = open_table(source.path)
    opened.require_column(source.label, "data.label")
    for key in ("client", "person", "text"):
        if (name := getattr(source, key)) is not None:
            opened.require_column(name, f"data.{key}")
    for column, spec in source.columns.items():
        if spec or column not in opened.schema:  # an unused column must exist, too
            opened.require_column(column, "data.columns")
    for key, file in (("data.validation", source.validation), ("data.test", source.test)):
        if file is not None:
            other = open_table(file, key)
            for column in [source.label, *declare_layout(source).used]:
                other.require_column(column, key)
    return opened


def read_table(source: Source, *, low: float = -1.0) -> Table:
    """Read and encode the whole table; first infer what the plan lacks, if it asks for that.

    Numbers lie between `low` and 1.
    """
    opened = check_source(source)
    layout = replace(make_layout(opened, source), low=low)
    return _read_rows(opened, layout, client=source.client, person=source.person)


def read_rows(path: str | Path, layout: Layout, *, labels: bool, key: str = "data.test") -> Table:
    """Read another table with the same columns: to evaluate on, or to predict (labels = False)."""
    opened = open_table(path, key)
    lacking = [column for column in layout.used if column not in opened.schema]
    if lacking and not labels:
        what, add = ("columns", "add them") if len(lacking) > 1 else ("column", "add it")
        raise PlanError(
            f"{opened.path.name} lacks the {what} {_shorten(lacking, most=20)}, which the run was "
            f"trained with: {add}; {opened.suggest_column(lacking[0])}"
        )
    for column in [layout.label] * labels + layout.used:
        opened.require_column(column, key)
    return _read_rows(opened, layout, labels=labels)


def is_bounds(spec: Spec) -> bool:
    """Return whether a column's specification is bounds, so that it holds numbers."""
    return len(spec) > 0 and not isinstance(spec[0], str)


def _read_rows(
    opened: Scan,
    layout: Layout,
    *,
    client: str | None = None,
    labels: bool = True,
    person: str | None = None,
) -> Table:
    rows, wide = opened.count_rows(), len(layout.features)
    x = np.zeros((rows, wide + (layout.text is not None) * TEXT_NUMBERS), np.float32)
    y = np.zeros(rows if labels else 0, np.int32 if layout.target is None else np.float64)
    roles = {"client": client, "person": person}
    named = {what: column for what, column in roles.items() if column is not None}
    numbers = {what: np.zeros(rows, np.int64) for what in named}
    known: dict[str, dict[str, int]] = {what: {} for what in roles}  # in order of appearance
    wanted = list(dict.fromkeys([*layout.used, *[layout.label] * labels, *named.values()]))
    done = 0
    for batch in opened.batches(wanted):
        span = slice(done, done + len(batch))
        if span.stop > rows:
            break
        start = _BatchStart(opened.path.name, done, has_plan=labels)
        _encode_batch(batch, layout, x[span], start)
        if labels:
            y[span] = _encode_labels(batch[layout.label], layout, start)
        for what, column in named.items():
            numbers[what][span] = _encode_names(batch[column], known[what], start, what)
        done = span.stop
    if done != rows:
        raise DataError(f"{opened.path.name} changed while it was read; run it again")
    names, cut = sort_texts(known["client"]), None
    rank = {name: i for i, name in enumerate(names)}
    order = np.array([rank[name] for name in known["client"]], np.int32)
    owners = order[numbers["client"]] if client is not None else None
    if layout.target is not None:
        y, cut = layout.target.scale(y), layout.target.find_cut(y)
    return Table(x, y, owners, tuple(names), layout, numbers.get("person"), cut)


@dataclass(frozen=True)
class _BatchStart:
    """Where a batch starts in its file, for error messages that name a row."""

    file: str
    before: int
    has_plan: bool  # which may still list a column's categories; else the rows are to predict

    def find_row(self, mask: pl.Series) -> tuple[int, int]:
        """Return the first marked row: in the batch from 0, in the file from 1 below the header."""
        first = int(mask.arg_max() or 0)
        return first, self.before + first + 1


def _encode_batch(
    batch: pl.DataFrame, layout: Layout, x: NDArray[np.float32], start: _BatchStart
) -> None:
    at = 0
    for column, spec in layout.columns.items():
        if is_bounds(spec):
            scaled = _scale_column(batch[column], spec, start)
            x[:, at] = np.nan_to_num(scaled, nan=0.5 if layout.missing == "middle" else 0.0)
            at += 1
            if layout.missing == "flag":
                x[:, at] = np.isnan(scaled)
                at += 1
            continue
        codes = _encode_categories(as_text(batch[column]), spec)
        (seen,) = np.nonzero(codes >= 0)
        x[seen, at + codes[seen]] = 1.0
        at += len(spec)
    if layout.text is not None:
        x[:, at:] = pack_texts(as_text(batch[layout.text]).fill_null(""))
    move_numbers(x, layout)


def move_numbers(x: NDArray[np.float32], layout: Layout) -> None:
    """Move the numbers of encoded rows from [0, 1] to [low, 1], in place.

    A missing number that has a flag stays 0.

    >>> layout = Layout("y", ("a", "b"), {"age": (0.0, 80.0)})
    >>> move_numbers(rows := np.array([[0.0], [0.75]], np.float32), layout)
    >>> rows.tolist()
    [[-1.0], [0.5]]
    """
    at, low = 0, np.float32(layout.low)
    for spec in layout.columns.values():
        if not is_bounds(spec):
            at += len(spec)
            continue
        moved = low + (1 - low) * x[:, at]
        if layout.missing == "flag":
            x[:, at] = np.where(x[:, at + 1] == 1, 0, moved)
            at += 2
        else:
            x[:, at] = moved
            at += 1


def _scale_column(cells: pl.Series, bounds: Any, start: _BatchStart) -> NDArray[np.float64]:
    """Return numbers scaled to [0, 1]; missing ones are NaN."""
    low, high = bounds
    numbers = as_number(cells)
    bad = numbers.is_null() & is_text(cells)
    if bad.any():
        first, row = start.find_row(bad)
        cell = str(cells[first])[:60]
        raise DataError(
            f"column {cells.name[:60]!a} of {start.file} has {cell!a} in row {row}, which is no "
            f"number; {suggest_number(cell, has_plan=start.has_plan)}"
        )
    if not high > low:  # inferred from a column that is always the same
        scaled = numbers * 0 + 0.5
    else:
        scaled = (numbers.clip(low, high) - low) / (high - low)
    return np.asarray(scaled.fill_null(np.nan), np.float64)


def is_text(cells: pl.Series) -> pl.Series:
    """Return which cells hold a text other than "nan"."""
    if cells.dtype.is_numeric():
        return cells.is_null() & False
    texts = as_text(cells)
    return (texts.str.to_lowercase().str.strip_chars_start("+-") != "nan").fill_null(False)


def _encode_categories(texts: pl.Series, categories: Any) -> NDArray[np.int32]:
    import polars as pl

    table = {category: i for i, category in enumerate(categories)}
    return texts.replace_strict(table, default=-1, return_dtype=pl.Int32).to_numpy()


def _encode_labels(cells: pl.Series, layout: Layout, start: _BatchStart) -> NDArray[Any]:
    import polars as pl

    if layout.target is not None:
        numbers = as_number(cells)
        bad = ~numbers.is_finite().fill_null(False)
        if bad.any():
            first, row = start.find_row(bad)
            empty = as_text(cells)[first] is None
            label = f"the label {str(cells[first])[:60]!a}, which is no number,"
            raise DataError(
                f"row {row} of {start.file} has {'an empty cell' if empty else label} in column "
                f"{layout.label[:60]!a}; correct it or remove the row"
            )
        return numbers.to_numpy()
    codes = _encode_categories(as_text(cells), layout.classes)
    if codes.size and codes.min() < 0:
        first, row = start.find_row(pl.Series(codes < 0))
        value = as_text(cells)[first]  # as classes are compared with it: true, and not True
        shown = "no label" if value is None else f"the label {value[:60]!a}"
        raise DataError(
            f"row {row} of {start.file} has {shown} in column {layout.label[:60]!a}; "
            f"it must be one of {_shorten(layout.classes)}"
            f"{suggest_case(str(value), layout.classes)}: correct it, "
            "remove the row, or list it in data.columns"
        )
    return codes


def suggest_number(cell: str, *, has_plan: bool = True) -> str:
    """Return what to do with a cell that is no number where one is needed."""
    if re.match(_DATE, cell):
        return "it is a date: make a number of it, such as a year or days since an event"
    comma = " (3.5 and not 3,5)" if "," in cell else ""
    listed = ", empty the cell, or list the column's categories"
    return f"correct it{comma}{listed if has_plan else ' or empty the cell'}"


def suggest_case(text: str, categories: Iterable[Any]) -> str:
    """Return a hint at the category that differs in upper and lower case only, else "".

    >>> suggest_case("YES", ("no", "yes")), suggest_case("maybe", ("no", "yes"))
    (" (did you mean 'yes'? upper and lower case differ)", '')
    """
    folded = {str(category).casefold(): str(category) for category in categories}
    near = folded.get(text.strip().casefold())
    return "" if near is None else f" (did you mean {near[:60]!a}? upper and lower case differ)"


def _encode_names(
    cells: pl.Series, known: dict[str, int], start: _BatchStart, what: str
) -> NDArray[np.int32]:
    import polars as pl

    texts = as_text(cells)
    if texts.null_count():
        _, row = start.find_row(texts.is_null())
        raise DataError(
            f"row {row} of {start.file} names no {what} in column {cells.name[:60]!a}; "
            "every row belongs to one"
        )
    here = texts.unique(maintain_order=True).to_list()
    table = {name: known.setdefault(name, len(known)) for name in here}
    return texts.replace_strict(table, return_dtype=pl.Int32).to_numpy()


def declare_layout(source: Source) -> Layout:
    """Return how rows become numbers by what is declared alone."""
    label, columns = source.label, source.columns
    classes: Any = () if source.target is not None else columns.get(label, ())
    listed = {c: spec for c, spec in columns.items() if spec and c != label}
    target, missing = source.target, source.missing
    return Layout(label, tuple(classes), listed, (), target, missing, text=source.text)


def make_layout(opened: Scan, source: Source) -> Layout:
    """Return how the rows become numbers; what the plan leaves to the data is taken from them."""
    declared, label, file = declare_layout(source), source.label, opened.path.name
    if not source.infer:
        return declared
    listed = dict(declared.columns)
    classes: Any = declared.classes
    ours = {label, source.client, source.person, source.text, *source.columns}
    # The column without a name is the row number that other programs write.
    lacking = [column for column in opened.schema if column not in ours and column]
    for column in lacking:
        opened.require_column(column, "the column")
    if not (listed or lacking or source.text):
        raise PlanError(f"{file} has no column beside the label {label[:60]!a}; add features")
    summaries = {
        c: _ColumnSummary(c, file, number=c != label)
        for c in lacking + [label] * (not classes and source.target is None)
    }
    for batch in opened.batches(list(summaries)) if summaries else ():
        for column, summary in summaries.items():
            summary.add_batch(batch[column])
    specs = {column: summary.spec() for column, summary in summaries.items()}
    if source.target is not None:
        return replace(declared, columns=listed | specs, inferred=tuple(summaries))
    classes = classes or specs.pop(label)
    if label in summaries and len(classes) > MOST_NUMBERS and _are_numbers(list(classes)):
        raise InputError.of(
            f"the label {label[:60]!a} of {file}",
            len(classes),
            f"at most {MOST_NUMBERS} different numbers if data.columns does not list its classes",
            f"list them, or, if it is a measurement: {CONTINUOUS}",
        )
    if len(classes) < 2:
        raise DataError(
            f"the label {label[:60]!a} of {file} has {len(classes)} different values; "
            "there must be two or more to tell apart"
        )
    columns = listed | specs
    return replace(declared, classes=tuple(classes), columns=columns, inferred=tuple(summaries))


class _ColumnSummary:
    """The bounds of a column while all cells are numbers, else its categories."""

    def __init__(self, column: str, file: str, *, number: bool) -> None:
        self.column, self.file, self.number, self.is_label = column, file, number, not number
        self.low, self.high = np.inf, -np.inf
        self.texts: set[str] = set()

    def add_batch(self, cells: pl.Series) -> None:
        """Add the cells of one batch."""
        if self.number:
            numbers = as_number(cells)
            self.number = not (numbers.is_null() & is_text(cells)).any()
            finite = numbers.filter(numbers.is_finite().fill_null(False)).to_numpy()
            self.low = min(self.low, finite.min(initial=np.inf))
            self.high = max(self.high, finite.max(initial=-np.inf))
        if len(self.texts) <= MOST_INFERRED:  # with more, it is a number or refused
            self.texts.update(as_text(cells).drop_nulls().unique().to_list())

    def spec(self) -> Spec:
        """Return the bounds or the categories."""
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
        return tuple(sort_texts(self.texts))


def draft_plan(table: Path, plan: Path) -> str:
    """Return the text of a plan for the table, to be saved at `plan`.

    Only the table's header and first rows are read. The draft does not run as it is: what must be
    public (which column is the label, bounds, categories) is left to the user. Copied from the
    data, it would be a release that no budget paid for.
    """
    from sottovoce.plan.base import format_key, format_value
    from sottovoce.plan.data import ARRAY_FILES, TABLE_FILES  # a device does not load pydantic

    if table.suffix.lower() not in TABLE_FILES:
        remedy = "save the table as one of these"
        if table.suffix.lower() in ARRAY_FILES:
            remedy = f"arrays need no draft: a plan has path = {str(table)!a} and clients in [data]"
        raise InputError.of("--from", str(table), "a .csv or .parquet file", remedy)
    kinds, lines = guess_kinds(table), []
    for column, kind in kinds.items():
        if not column:  # the row number that other programs write
            continue
        # This is not valid TOML, so that it must be filled in.
        bounds = "[LOW, HIGH]"
        public = {"number": bounds, "code": bounds, "text": "[TEXT, TEXT]"}.get(kind)
        key = format_key(column)
        why = LEFT_OUT.get(kind, "").format(column)
        lines.append(f"# {key} = {public}" if public else f"# {key} is left out: {why}")
    # The plan finds the table from its own folder, with slashes on every system.
    path = Path(os.path.relpath(table, plan.parent)).as_posix()
    return (
        (resources.files("sottovoce.data") / "draft.txt")
        .read_text("utf-8")
        .format(
            file=" ".join(table.name.split()),
            path=format_value(path),
            columns=_list_names([format_key(column) for column in kinds if column]),
            numbers=_list_names([format_key(c) for c, kind in kinds.items() if kind == "number"]),
            listed="\n".join(lines),
        )
    )


def _list_names(names: list[str]) -> str:
    """Return all names, on as many lines of a comment as they need."""
    text = ", ".join(names) or "(no column)"
    return textwrap.fill(text, 70, subsequent_indent="#   ", break_long_words=False)
