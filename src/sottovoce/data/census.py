"""Encode the census tables acs, adult and ipums as features, each with two classes.

A table becomes numbers by **public knowledge only**: the categories and bounds below are copied
from what the publishers print about their files, never computed from the rows. So the encoding is
not a release, and no budget has to pay for it.

Every feature is in [0, 1] and a column contributes a vector of norm ≤ 1: for m columns
**‖x‖ ≤ √m for every possible row** (about 3 for the rows in the files). docs/data.md lists labels,
columns and features, and which columns are left out, and why.

Sources: `data_dictionary.json` of NIST's Diverse Communities Data Excerpts
(doi 10.18434/mds2-2895), `adult.names` of UCI's Adult (doi 10.24432/C5XW20, CC BY 4.0).
"""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
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


def _split_words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


def _number_codes(first: int, last: int) -> tuple[str, ...]:
    return tuple(str(code) for code in range(first, last + 1))


#: The header of the excerpts.
ACS_HEADER = _split_words(
    "PUMA AGEP SEX MSP HISP RAC1P NOC NPF HOUSING_TYPE OWN_RENT DENSITY INDP INDP_CAT EDU PINCP "
    "PINCP_DECILE POVPIP DVET DREM DPHY DEYE DEAR PWGTP WGTP"
)

# N is a category where the dictionary gives it a meaning that an adult can have. In MSP, EDU, DREM
# and DPHY it means "under 15", "under 3" and "under 5", and those rows have no income.
ACS: tuple[Column, ...] = (
    Number("AGEP", 0, 99),
    Choice("SEX", ("1", "2")),
    Choice("MSP", _number_codes(1, 6)),
    Choice("HISP", _number_codes(0, 4)),
    Choice("RAC1P", _number_codes(1, 9)),
    Number("NOC", 0, 19, absent=ABSENT),
    Number("NPF", 2, 20, absent=ABSENT),
    Choice("HOUSING_TYPE", _number_codes(1, 3)),
    Choice("OWN_RENT", _number_codes(0, 2)),
    # people per square mile; the dictionary says 16.3 to 52,864.7, so a round figure above that
    Number("DENSITY", 0, 100_000, log=True),
    Choice("INDP_CAT", (ABSENT, *_number_codes(0, 18))),
    Choice("EDU", _number_codes(1, 12)),
    Choice("DVET", (ABSENT, *_number_codes(1, 6))),
    Choice("DREM", ("1", "2")),
    Choice("DPHY", ("1", "2")),
    Choice("DEYE", ("1", "2")),
    Choice("DEAR", ("1", "2")),
)

INCOME = Number("PINCP", -9_000, 1_341_000)
THRESHOLD = 25_000  # dollars: more is label 1

ADULT_HEADER = _split_words(
    "age workclass fnlwgt education education-num marital-status occupation relationship race sex "
    "capital-gain capital-loss hours-per-week native-country income"
)


def _make_choice(name: str, categories: str) -> Choice:
    return Choice(name, _split_words(categories), unknown="?")


# adult.names calls the numbers "continuous": their bounds are what their digits can hold (two for
# age and hours, five for gains and losses), and the 16 levels of education that it lists.
ADULT: tuple[Column, ...] = (
    Number("age", 0, 99),
    _make_choice(
        "workclass",
        "Private Self-emp-not-inc Self-emp-inc Federal-gov Local-gov State-gov Without-pay "
        "Never-worked",
    ),
    _make_choice(
        "education",
        "Bachelors Some-college 11th HS-grad Prof-school Assoc-acdm Assoc-voc 9th 7th-8th 12th "
        "Masters 1st-4th 10th Doctorate 5th-6th Preschool",
    ),
    Number("education-num", 1, 16),
    _make_choice(
        "marital-status",
        "Married-civ-spouse Divorced Never-married Separated Widowed Married-spouse-absent "
        "Married-AF-spouse",
    ),
    _make_choice(
        "occupation",
        "Tech-support Craft-repair Other-service Sales Exec-managerial Prof-specialty "
        "Handlers-cleaners Machine-op-inspct Adm-clerical Farming-fishing Transport-moving "
        "Priv-house-serv Protective-serv Armed-Forces",
    ),
    _make_choice("relationship", "Wife Own-child Husband Not-in-family Other-relative Unmarried"),
    _make_choice("race", "White Asian-Pac-Islander Amer-Indian-Eskimo Other Black"),
    _make_choice("sex", "Female Male"),
    Number("capital-gain", 0, 99_999, log=True),
    Number("capital-loss", 0, 99_999, log=True),
    Number("hours-per-week", 0, 99),
    _make_choice(
        "native-country",
        "United-States Cambodia England Puerto-Rico Canada Germany Outlying-US(Guam-USVI-etc) "
        "India Japan Greece South China Cuba Iran Honduras Philippines Italy Poland Jamaica "
        "Vietnam Mexico Portugal Ireland France Dominican-Republic Laos Ecuador Taiwan Haiti "
        "Columbia Hungary Guatemala Nicaragua Scotland Thailand Yugoslavia El-Salvador "
        "Trinadad&Tobago Peru Hong Holand-Netherlands",
    ),
)

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
