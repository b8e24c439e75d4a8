"""Encode the census tables acs, adult and ipums as features, each with two classes.

A table becomes numbers by **public knowledge only**: the categories and bounds of `census.toml` are
copied from what the publishers print about their files, never computed from the rows. So the
encoding is not a release, and no budget has to pay for it.

Every feature is in [0, 1] and a column contributes a vector of norm ≤ 1: for m columns
**‖x‖ ≤ √m for every possible row** (about 3 for the rows in the files). docs/data.md lists labels,
columns and features, and which columns are left out, and why.
"""

from __future__ import annotations

import csv
import io
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import TypeAlias, final

import numpy as np
from numpy.typing import NDArray

from sottovoce.errors import DataError

Features: TypeAlias = NDArray[np.float32]
Labels: TypeAlias = NDArray[np.uint8]
Read: TypeAlias = Callable[[str], bytes]
Table: TypeAlias = Mapping[str, Sequence[str]]  # the cells of each column, as written

ABSENT = "N"  # how NIST writes a value that does not apply


@final
@dataclass(frozen=True)
class Choice:
    """A column with a public list of categories; `unknown` is the value that becomes zeros.

    One feature for each category; of two categories one feature, which is 1 for the first.
    """

    name: str
    categories: tuple[str, ...]
    unknown: str | None = None

    @property
    def width(self) -> int:
        """The number of its features."""
        return 1 if len(self.categories) == 2 else len(self.categories)

    def encode(self, cells: Sequence[str], *, file: str) -> Features:
        """Return one row of 0 and 1 for each cell.

        >>> Choice("EDU", ("low", "high", "none")).encode(["high", "low"], file="f").tolist()
        [[0.0, 1.0, 0.0], [1.0, 0.0, 0.0]]
        >>> Choice("SEX", ("1", "2"), unknown="?").encode(["1", "2", "?"], file="f").tolist()
        [[1.0], [0.0], [0.0]]
        """
        rows = np.eye(len(self.categories) + 1, len(self.categories), dtype=np.float32)
        index = {category: i for i, category in enumerate(self.categories)}
        if self.unknown is not None:
            index[self.unknown] = len(self.categories)
        try:
            indices = [index[cell] for cell in cells]
        except KeyError as error:
            raise _make_error(
                file, self.name, error.args[0], _list_values(self.categories)
            ) from None
        return rows[indices, : self.width]


@final
@dataclass(frozen=True)
class Number:
    """A column of numbers from `low` to `high`, both public; `absent` is the cell without one.

    Where a value may be absent, a second feature says so, and the first is then 0.
    """

    name: str
    low: float
    high: float
    log: bool = False
    absent: str | None = None

    @property
    def width(self) -> int:
        """The number of its features."""
        return 1 if self.absent is None else 2

    def encode(self, cells: Sequence[str], *, file: str) -> Features:
        """Return (x − low) / (high − low), or with `log` the same of ln(1 + x − low).

        >>> Number("AGEP", 0, 99).encode(["0", "99"], file="f").tolist()
        [[0.0], [1.0]]
        >>> Number("NPF", 2, 20, absent="N").encode(["11", "N"], file="f").tolist()
        [[0.5, 0.0], [0.0, 1.0]]
        """
        shifted = self.values(cells, file=file) - self.low
        span = self.high - self.low
        scaled = np.log1p(shifted) / np.log1p(span) if self.log else shifted / span
        absent = [cell == self.absent for cell in cells]
        return np.stack([scaled, absent], axis=1).astype(np.float32)[:, : self.width]

    def values(self, cells: Sequence[str], *, file: str) -> NDArray[np.float64]:
        """Return the numbers as they stand, `low` where there is none.

        >>> Number("PINCP", -9000, 1341000).values(["17000.0"], file="f").tolist()
        [17000.0]
        """
        return np.array([self._value(cell, file) for cell in cells], dtype=np.float64)

    def _value(self, cell: str, file: str) -> float:
        if cell == self.absent:
            return self.low
        try:
            value = float(cell)
        except ValueError:
            value = np.nan
        if not self.low <= value <= self.high:
            bounds = f"a number from {self.low:g} to {self.high:g}"
            raise _make_error(file, self.name, cell, bounds)
        return value


Column: TypeAlias = Choice | Number


def encode_table(table: Table, columns: Sequence[Column], *, file: str) -> Features:
    """Encode the rows of a table as x[rows, Σ width] in [0, 1], in the order of the columns.

    >>> two = [Choice("SEX", ("1", "2")), Number("AGEP", 0, 99)]
    >>> encode_table({"SEX": ["1"], "AGEP": ["99"], "PINCP": ["7"]}, two, file="f").tolist()
    [[1.0, 1.0]]
    """
    return np.concatenate([c.encode(table[c.name], file=file) for c in columns], axis=1)


def _load_columns(table: str, unknown: str | None = None) -> tuple[Column, ...]:
    """Return the columns of a table that are used, in the order of `census.toml`."""
    return tuple(
        Choice(name, tuple(public.split()), unknown)
        if isinstance(public, str)
        else Number(name, **public)
        for name, public in _PUBLIC[table].items()
    )


_PUBLIC = tomllib.loads((resources.files("sottovoce.data") / "census.toml").read_text("utf-8"))
ACS, ADULT = _load_columns("acs"), _load_columns("adult", unknown="?")
ACS_HEADER, ADULT_HEADER = (_PUBLIC["header"][table].split() for table in ("acs", "adult"))

INCOME = Number("PINCP", -9_000, 1_341_000)
THRESHOLD = 25_000  # dollars: more is label 1

IPUMS_FILE = "IPUMS-US.dat"
IPUMS_ROWS = 40_000
IPUMS_LARGEST = 1e6  # larger numbers are cut to it


def parse_acs(content: bytes, *, file: str) -> tuple[Features, Labels]:
    """Parse one of NIST's excerpts of the American Community Survey into features and labels.

    Label 1: a total income (PINCP) above 25,000 dollars. Rows without an income (PINCP = N: people
    under 15) are dropped. Raises `DataError` for a file of another form.

    >>> cells = "01-01301,20,1,6,0,1,N,N,3,0,2731.2,8680,14,7,17000.0,4,N,N,2,2,2,2,53,0"
    >>> x, y = parse_acs((",".join(ACS_HEADER) + "\\n" + cells).encode(), file="f")
    >>> x.shape, y.tolist()
    ((1, 76), [0])
    """
    table = _parse_table(_decode_text(content, file), ACS_HEADER, file=file, header=True)
    kept = [i for i, income in enumerate(table["PINCP"]) if income != ABSENT]
    if not kept:
        raise DataError(f"{file} must hold rows with an income, got none; put the whole file there")
    known = {name: [cells[i] for i in kept] for name, cells in table.items()}
    income = INCOME.values(known["PINCP"], file=file)
    return encode_table(known, ACS, file=file), (income > THRESHOLD).astype(np.uint8)


def parse_adult(content: bytes, *, file: str) -> tuple[Features, Labels]:
    """Parse `adult.data` or `adult.test`; label 1 is an income above 50,000.

    `fnlwgt` is left out (a weight of the sample); "?" becomes zeros. The test file begins with a
    remark and writes a full stop after each label. Raises `DataError` for a file of another form.

    >>> line = "50, ?, 83311, Masters, 14, Divorced, Sales, Wife, White, Male, 0, 0, 13, ?, >50K."
    >>> x, y = parse_adult(line.encode(), file="f")
    >>> x.shape, y.tolist(), int((x > 0).sum())
    ((1, 103), [1], 8)
    """
    lines = [line for line in _decode_text(content, file).splitlines() if line and line[0] != "|"]
    table = _parse_table("\n".join(lines), ADULT_HEADER, file=file, header=False)
    answers = {"<=50K": 0, ">50K": 1}
    labels = [answers.get(cell.removesuffix("."), -1) for cell in table["income"]]
    if min(labels) < 0:
        wrong = table["income"][labels.index(-1)]
        raise _make_error(file, "income", wrong, _list_values(tuple(answers)))
    return encode_table(table, ADULT, file=file), np.array(labels, dtype=np.uint8)


def parse_ipums(content: bytes, *, file: str, rows: int = IPUMS_ROWS) -> tuple[Features, Labels]:
    """Parse the authors' extract of IPUMS-US: lines of 58 numbers, the label last.

    (Lines of 59, which "58 attributes" could mean, are read too.) The meaning of the columns is not
    published, so that no bounds are known, and none are measured: x in [−1, 1] stays, a larger |x|
    becomes ±(1 + ln |x|), with |x| cut to 10⁶, so that no feature exceeds 15. Raises `DataError`
    for a file of another form.

    >>> x, y = parse_ipums(b"0.5 " * 57 + b"1\\n", file="f", rows=1)
    >>> x.shape, float(x.max()), y.tolist()
    ((1, 57), 0.5, [1])
    """
    lines = [line.split() for line in _decode_text(content, file).splitlines() if line.strip()]
    widths = {len(line) for line in lines}
    if len(lines) != rows or widths not in ({58}, {59}):
        found = " or ".join(str(n) for n in sorted(widths)[:3]) or "no"
        raise DataError(
            f"{file} must be {rows} lines of 58 numbers, got {len(lines)} lines of {found}; put "
            "the authors' file there"
        )
    try:
        values = np.array(lines, dtype=np.float64)
    except ValueError as error:
        raise DataError(
            f"{file} must hold numbers only ({error}); put the authors' file there"
        ) from None
    labels = values[:, -1]
    if not np.isfinite(values).all() or not np.isin(labels, (0, 1)).all():
        raise DataError(
            f"{file} must hold finite numbers, and 0 or 1 last in each line, but does not; put the "
            "authors' file there"
        )
    x = values[:, :-1]
    size = np.abs(x).clip(1, IPUMS_LARGEST)  # 1, whose logarithm is 0, where x stays as it is
    squashed = np.where(np.abs(x) <= 1, x, np.sign(x) * (1 + np.log(size)))
    return squashed.astype(np.float32), labels.astype(np.uint8)


def decode_acs(read: Read) -> tuple[Features, Labels, Features, Labels]:
    """Decode both years of the national excerpt; the plan takes test rows from them."""
    years = [parse_acs(read(file), file=file) for file in ("national2018.csv", "national2019.csv")]
    x = np.concatenate([x for x, _ in years])
    y = np.concatenate([y for _, y in years])
    return x, y, x[:0], y[:0]


def decode_adult(read: Read) -> tuple[Features, Labels, Features, Labels]:
    """Decode `adult.data`, and `adult.test` as the test set."""
    x, y = parse_adult(read("adult.data"), file="adult.data")
    test_x, test_y = parse_adult(read("adult.test"), file="adult.test")
    return x, y, test_x, test_y


def decode_ipums(read: Read) -> tuple[Features, Labels, Features, Labels]:
    """Decode the authors' one file; the plan takes test rows from it."""
    x, y = parse_ipums(read(IPUMS_FILE), file=IPUMS_FILE)
    return x, y, x[:0], y[:0]


def _decode_text(content: bytes, file: str) -> str:
    try:
        return content.decode("ascii")
    except UnicodeDecodeError:
        raise DataError(
            f"{file} must be plain ASCII text, but is not; replace it with the published file"
        ) from None


def _parse_table(
    text: str, names: Sequence[str], *, file: str, header: bool
) -> dict[str, list[str]]:
    """Parse comma-separated text into columns by name; every line must have all of them."""
    lines = list(csv.reader(io.StringIO(text), skipinitialspace=True))
    first = lines.pop(0) if header and lines else names
    if tuple(first) != tuple(names) or not lines:
        raise DataError(
            f"{file} must have rows with the {len(names)} columns {names[0]}, {names[1]}, … "
            f"{names[-1]}, but has not; replace it with the published file"
        )
    for number, line in enumerate(lines, start=2 if header else 1):
        if len(line) != len(names):
            raise DataError(
                f"{file} must have {len(names)} cells in row {number}, got {len(line)}; replace it "
                "with the published file"
            )
    return {name: list(cells) for name, cells in zip(names, zip(*lines, strict=True), strict=True)}


def _list_values(values: Sequence[str]) -> str:
    return "one of " + ", ".join(values[:6]) + (", …" if len(values) > 6 else "")


def _make_error(file: str, column: str, cell: str, wanted: str) -> DataError:
    return DataError(
        f"{file} must hold {column} as {wanted}, got {cell[:40]!r}; replace it with the published "
        "file"
    )
