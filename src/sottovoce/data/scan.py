"""Opening a CSV or Parquet file: what its header and schema say, and its rows batch by batch.

Only polars reads tables, and it is loaded when the first one is opened. A CSV is read as texts:
what a column is follows from the plan, never from a guess about its first rows.
"""

from __future__ import annotations

import csv
import difflib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeAlias

from sottovoce.errors import DataError, PlanError

if TYPE_CHECKING:
    import polars as pl

Kind: TypeAlias = Literal["number", "text"]

BATCH = 65_536  # rows in memory beside the encoded matrix
SAMPLE = 1_000  # rows that `glance` looks at
LONGEST_HEADER = 1 << 20


@dataclass(frozen=True, eq=False)
class Scan:
    """A table that has been opened and not yet read: its columns and their types."""

    path: Path
    frame: pl.LazyFrame
    schema: dict[str, pl.DataType]

    def rows(self) -> int:
        """How many rows there are; a table without any is refused."""
        import polars as pl

        with reading(self.path):
            count = int(self.frame.select(pl.len()).collect(engine="streaming").item())
        if count == 0:
            raise DataError(
                f"{self.path.name} has no complete row below its header; "
                "add some, or close a quote that is open"
            )
        return count

    def batches(self, columns: Sequence[str]) -> Iterator[pl.DataFrame]:
        """The rows in their order, as the file has them, `BATCH` at a time."""
        with reading(self.path):
            yield from self.frame.select(columns).collect_batches(
                chunk_size=BATCH, maintain_order=True
            )

    def require(self, column: str, key: str) -> None:
        """Refuse a column that is not there, with the nearest that is, or of no usable type."""
        name = self.path.name
        if column not in self.schema:
            raise PlanError(f"{key} {column[:60]!a} is no column of {name}; {self._hint(column)}")
        kind = self.schema[column]
        if kind.is_temporal() or kind.is_nested() or str(kind) in ("Binary", "Object"):
            raise PlanError(
                f"{key} {column[:60]!a} of {name} holds {str(kind)[:40]}, which is neither number "
                "nor text; save it as one of them or leave it out"
            )

    def _hint(self, column: str) -> str:
        known = list(self.schema)
        folded = {other.strip().casefold(): other for other in known}
        near = difflib.get_close_matches(column.strip().casefold(), folded, 1)
        if near:
            return f"did you mean {folded[near[0]][:60]!a}?"
        if len(known) == 1 and any(mark in known[0] for mark in ";\t|"):
            return "its header has no commas: save it with commas between the columns"
        listed = ", ".join(f"{other[:30]!a}" for other in known[:5])
        return f"its columns are {listed}{', …' if len(known) > 5 else ''}"


def scan(path: str | Path, key: str = "data.path") -> Scan:
    """Open a table and check what can be checked from its header and schema."""
    import polars as pl

    path = Path(path)
    head = _first_bytes(path, key)
    if path.suffix.lower() == ".csv":
        _check_header(path, head)
        frame = pl.scan_csv(path, infer_schema=False, glob=False)
    else:
        frame = pl.scan_parquet(path, glob=False)
    with reading(path):
        schema = dict(frame.collect_schema())
    if not schema:
        raise DataError(f"{path.name} has no columns; save it with a header")
    return Scan(path, frame, schema)


def glance(path: str | Path) -> dict[str, Kind]:
    """Every column with a guess of its kind, from the header and the first rows alone."""
    opened = scan(path, "--from")
    with reading(opened.path):
        sample = opened.frame.head(SAMPLE).collect()
    kinds: dict[str, Kind] = {}
    for column in opened.schema:
        cells = sample[column]
        usable = not (cells.dtype.is_temporal() or cells.dtype.is_nested())
        texts = as_text(cells).drop_nulls() if usable else cells.head(0)
        numbers = as_number(cells).drop_nulls() if usable else cells.head(0)
        kinds[column] = "number" if len(texts) and len(numbers) == len(texts) else "text"
    return kinds


def as_text(cells: pl.Series) -> pl.Series:
    """Cells as texts without spaces around them; empty ones and NaN are null.

    >>> import polars as pl
    >>> as_text(pl.Series([1.0, 2.5, float("nan"), None])).to_list()
    ['1', '2.5', None, None]
    >>> as_text(pl.Series([" a", "", None])).to_list()
    ['a', None, None]
    """
    import polars as pl

    if cells.dtype.is_float():
        cells = cells.fill_nan(None)
        # As people write whole numbers, so that the category "1" is found among 1.0 and 2.0.
        whole = cells.cast(pl.Int64, strict=False)
        same = whole.cast(cells.dtype) == cells
        return whole.cast(pl.String).zip_with(same.fill_null(False), cells.cast(pl.String))
    texts = cells.cast(pl.String).str.strip_chars()
    return texts.set(texts == "", None)


def as_number(cells: pl.Series) -> pl.Series:
    """Cells as float64; what is missing, NaN or no number is null.

    >>> import polars as pl
    >>> as_number(pl.Series([" 1", "1e3", "x", "", None, "nan"])).to_list()
    [1.0, 1000.0, None, None, None, None]
    """
    import polars as pl

    if not (cells.dtype.is_numeric() or cells.dtype == pl.Boolean):
        cells = as_text(cells)
    return cells.cast(pl.Float64, strict=False).fill_nan(None)


def in_order(texts: Iterable[str]) -> list[str]:
    """Texts in the order people expect: as numbers if all of them are, or else by the alphabet.

    >>> in_order(["10", "9", "1"]), in_order(["b", "10", "9"])
    (['1', '9', '10'], ['10', '9', 'b'])
    """
    listed = sorted(texts)
    try:
        return sorted(listed, key=float)
    except ValueError:
        return listed


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turn what polars and the system say of a file into one sentence."""
    import polars as pl

    try:
        yield
    except pl.exceptions.PolarsError as error:
        why = str(error).strip().splitlines()[0] if str(error).strip() else "no reason is given"
        kind = "Parquet" if path.suffix.lower() == ".parquet" else "CSV in UTF-8"
        raise DataError(f"{path.name} cannot be read as {kind}: {ascii(why[:120])[1:-1]}") from None
    except OSError as error:
        why = error.strerror or "the system refused"
        raise DataError(f"{path.name} cannot be read: {why}") from None


def _first_bytes(path: Path, key: str) -> bytes:
    try:
        with path.open("rb") as file:
            head = file.read(LONGEST_HEADER)
    except FileNotFoundError:
        why = "there is no such file"
    except IsADirectoryError:
        why = "it is a folder, name the file in it"
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        why = getattr(error, "strerror", None) or "that is no path"
    else:
        if head:
            return head
        raise DataError(f"{path.name} is empty; name a table with a header and rows")
    shown = ascii(str(path))
    shown = shown if len(shown) <= 80 else f"{shown[:30]}...{shown[-47:]}"
    raise PlanError(f"{key} {shown} cannot be read: {why}")


def _check_header(path: Path, head: bytes) -> None:
    line = head.splitlines()[0]
    try:
        names = next(csv.reader([line.decode("utf-8-sig")]), [])
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
