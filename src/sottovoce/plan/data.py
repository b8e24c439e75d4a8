"""`[data]`: which data, and who holds what.

`columns` says what is public about a table's columns: bounds of numbers, categories of texts. The
model's inputs are scaled by them, so that everybody learns them. They come from the plan (a
codebook, the law, common sense), and from the data only if the plan asks for it.
"""

from __future__ import annotations

import difflib
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, NoReturn, Self, TypeAlias

from pydantic import (
    BeforeValidator,
    Field,
    PlainSerializer,
    PlainValidator,
    WithJsonSchema,
    model_validator,
)

from sottovoce.errors import PlanError
from sottovoce.models.base import WIDEST
from sottovoce.models.person import MOST_ROWS_PER_PERSON, ROWS_PER_PERSON
from sottovoce.plan import base
from sottovoce.plan.base import MOST, Number, OneOf, Section, When, Whole, optional, to_whole

Spec: TypeAlias = tuple[float, float] | tuple[str, ...]  # bounds, or categories; (): not used

MOST_CATEGORIES = 10_000


class Columns(dict[str, Spec]):
    """What is public about each column, in the order of the model's inputs. It is frozen.

    >>> len({Columns(age=(0.0, 120.0)), Columns(age=(0.0, 120.0))})
    1
    """

    def __hash__(self) -> int:  # type: ignore[override]  # plans are frozen and can be hashed
        return hash(tuple(self.items()))

    def __eq__(self, other: object) -> bool:
        # The order counts, because it is the order of the model's inputs.
        return isinstance(other, dict) and list(self.items()) == list(other.items())

    def __ne__(self, other: object) -> bool:
        return not self == other

    def _refuse_change(self, *_: Any, **__: Any) -> NoReturn:
        raise TypeError("the columns of a plan are frozen; make another plan with replace")

    __setitem__ = __delitem__ = update = pop = clear = _refuse_change
    setdefault = popitem = __ior__ = _refuse_change


def check_columns(value: Any, label: str | None = None) -> Columns:
    """Check `data.columns` as it was written; the label's list is always of categories.

    >>> check_columns({"age": [0, 120], "sex": ["f", "m"], "rich": [0, 1]}, label="rich")
    {'age': (0.0, 120.0), 'sex': ('f', 'm'), 'rich': ('0', '1')}
    >>> check_columns({"age": [120, 0]})
    Traceback (most recent call last):
        ...
    sottovoce.errors.PlanError: data.columns.age must be [low, high] with low < high, \
got [120, 0]; swap them
    """
    if not isinstance(value, Mapping) or not all(isinstance(name, str) for name in value):
        raise PlanError(
            f"data.columns must be a table of columns, got {value!r:.60}; write [data.columns] and "
            "below it age = [0, 120] or sex = ['f', 'm']"
        )
    return Columns({name: _check_spec(name, items, name == label) for name, items in value.items()})


def _check_spec(column: str, value: Any, is_label: bool) -> Spec:
    where = base.format_name("data", "columns", column)
    items = value.tolist() if hasattr(value, "tolist") else value
    if not isinstance(items, list | tuple):
        bound = "a list of categories" if is_label else "[low, high] or a list of categories"
        remedy = "say what is public about the column"
        raise PlanError.of(where, value, bound, remedy)
    numbers = [x for x in items if isinstance(x, int | float) and not isinstance(x, bool)]
    if is_label or not numbers:
        return _check_categories(where, items, is_label)
    if len(numbers) != 2 or len(items) != 2:
        bound = "[low, high] for a number or a list of texts for categories"
        remedy = "put categories that are numbers into quotes"
        raise PlanError.of(where, list(items), bound, remedy)
    return check_bounds(where, items)


def check_bounds(where: str, items: Any) -> tuple[float, float]:
    """Check public bounds [low, high] of a number."""
    low, high = float(items[0]), float(items[1])
    if not (math.isfinite(low) and math.isfinite(high) and max(abs(low), abs(high)) <= WIDEST):
        remedy = "give those that are public"
        raise PlanError.of(where, list(items), f"finite bounds up to {WIDEST:g}", remedy)
    if not low < high:
        remedy = "swap them" if low > high else "leave out a column that is always the same"
        raise PlanError.of(where, list(items), "[low, high] with low < high", remedy)
    return low, high


def _check_categories(
    where: str, items: list[Any] | tuple[Any, ...], is_label: bool
) -> tuple[str, ...]:
    texts = tuple(format_category(item) for item in items)
    for item, text in zip(items, texts, strict=True):
        if not text:
            remedy = "list texts; a missing value needs no category"
            raise PlanError.of(where, item, "a list of categories that are texts", remedy)
    if len(set(texts)) != len(texts):
        twice = next(text for text in texts if texts.count(text) > 1)
        raise PlanError(f"{where} lists {twice[:60]!a} twice; list each category once")
    if len(texts) > MOST_CATEGORIES:
        raise PlanError(
            f"{where} lists {len(texts)} categories and {MOST_CATEGORIES} is the most; "
            "make them coarser or leave the column out"
        )
    if is_label and len(texts) < 2:
        remedy = "they are the classes of the label"
        raise PlanError.of(where, list(items), "two categories or more", remedy)
    return texts


def format_category(value: object) -> str:
    """Format a category as cells are compared with it, without spaces; "" if it cannot be one.

    >>> [format_category(value) for value in (" Private", 1.0, True, None)]
    ['Private', '1', 'true', '']
    """
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, float) and not math.isfinite(value):
        return ""
    return str(value).strip() if isinstance(value, str | int | float) else ""


SplitKind: TypeAlias = Literal["iid", "labels", "sizes", "dirichlet", "order", "column"]
Fraction: TypeAlias = Annotated[Number, Field(gt=0, lt=1)]
Rows: TypeAlias = Annotated[int, Field(strict=True, ge=1, le=10**9), BeforeValidator(to_whole)]
RowsOrZero: TypeAlias = Annotated[
    int, Field(strict=True, ge=0, le=10**9), BeforeValidator(to_whole)
]
PersonRows: TypeAlias = Annotated[
    int, Field(strict=True, ge=1, le=MOST_ROWS_PER_PERSON), BeforeValidator(to_whole)
]

# Keys that apply only with data.path.
TABLE_KEYS = ("label", "client", "person", "text", "columns", "infer", "missing", "evaluation")
TABLE_FILES = (".csv", ".parquet")
ARRAY_FILES = (".npz", ".npy")  # x.npz with x and y, or x.npy with data.label = "y.npy"


class Facts(NamedTuple):
    """What a plan must know about a dataset, with the defaults of its keys `validation`, `test`."""

    rows: int  # rows that can be dealt to clients, validation and test
    own_test: int  # rows of the test set that comes with it
    classes: int
    validation: int
    test: int
    pictures: bool = True


DATASETS: dict[str, Facts] = {
    "digits": Facts(rows=1797, own_test=0, classes=10, validation=183, test=184),
    "mnist": Facts(rows=60_000, own_test=10_000, classes=10, validation=10_000, test=0),
    "cifar10": Facts(rows=50_000, own_test=10_000, classes=10, validation=10_000, test=0),
    "acs": Facts(45_780, own_test=0, classes=2, validation=5_000, test=10_000, pictures=False),
    "adult": Facts(32_561, own_test=16_281, classes=2, validation=5_000, test=0, pictures=False),
    "ipums": Facts(40_000, own_test=0, classes=2, validation=5_000, test=10_000, pictures=False),
    # Arrays are given from Python, and checked then.
    "arrays": Facts(rows=10**12, own_test=0, classes=10**6, validation=100, test=100),
}


PublicColumns: TypeAlias = Annotated[
    Columns,
    PlainValidator(lambda value, info: check_columns(value, info.data.get("label"))),
    PlainSerializer(lambda columns: {name: list(spec) for name, spec in columns.items()}),
    WithJsonSchema(
        {
            "type": "object",
            "additionalProperties": {
                "type": "array",
                "items": {"type": ["number", "string", "boolean"]},
            },
        }
    ),
]


class Data(Section):
    """Which data, and who holds what."""

    title = "data"
    name: Annotated[str, OneOf(DATASETS)] | None = Field(
        default="digits", description="the dataset (arrays: given from Python)"
    )
    path: str | None = optional(
        "your own table (CSV, Parquet, .npz) instead of name, relative to the plan", "people.csv"
    )
    label: str | None = optional(
        "the column (of an .npz the array, y) that is to be predicted", "income"
    )
    client: str | None = optional(
        "the column that names the client of each row (clients then follows from it)", "hospital"
    )
    person: str | None = optional(
        "the column of person ids: a person is never both trained on and tested on", "patient_id"
    )
    rows_per_person: PersonRows | None = optional(
        "the most rows of a person that are trained on, public (unit = person; else 8)",
        ROWS_PER_PERSON,
    )
    text: str | None = optional(
        "the column of free texts, of which model.features makes numbers", "note"
    )
    columns: PublicColumns | None = optional(
        "the columns used, with what is public: [low, high] or a list of categories",
        {"age": [0, 120], "sex": ["f", "m"], "income": ["low", "high"]},
    )
    infer: Annotated[bool, Field(strict=True)] | None = optional(
        "whether what columns lacks is taken from the data, which is not covered", False
    )
    missing: Literal["middle", "flag"] | None = optional(
        "a missing number: the middle of its bounds, or 0 and an input that says so", "flag"
    )
    clients: Whole | None = Field(default=10, description="how many clients share the data (U)")
    samples: Rows | tuple[Rows, ...] | None = optional(
        "the rows of each client, or a list of them (absent: all rows, shared equally)", 143
    )
    split: SplitKind = Field(
        default="iid",
        description="who holds what: alike, by class, in listed sizes, by α, in order, by column",
    )
    labels_per_client: Annotated[Whole | None, When("split", "labels", 2)] = optional(
        "how many classes a client holds with split = labels"
    )
    alpha: Annotated[
        Annotated[Number, Field(ge=1e-3, le=MOST)] | None, When("split", "dirichlet", 0.5)
    ] = optional("how even the classes are with split = dirichlet, small is uneven")
    validation: RowsOrZero | Fraction | str = Field(
        default=DATASETS["digits"].validation,
        description="rows to validate on (0: the test rows; a table: also a fraction, a file)",
    )
    test: RowsOrZero | Fraction | str = Field(
        default=DATASETS["digits"].test,
        description="rows to test on (0: the dataset's own; a table: also a fraction, a file)",
    )
    evaluation: Literal["public"] | None = optional(
        "your declaration that the clients' own validation and test rows are public", "public"
    )
    target: Annotated[tuple[Number, ...], Field(min_length=2, max_length=2)] | None = optional(
        "the public range [low, high] of a label that is a number, with model.loss", [0.0, 100.0]
    )
    prevalence: tuple[Annotated[Number, Field(ge=1e-6, le=1)], ...] | None = optional(
        "the public share of each class, for model.class_weights = balanced", [0.95, 0.05]
    )
    public: Rows | None = optional(
        "the first rows, which no client holds; validation is drawn from them", 20000
    )

    @model_validator(mode="before")
    @classmethod
    def _apply_defaults(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        values = {key: str(v) if isinstance(v, Path) else v for key, v in values.items()}
        absent = [key for key in ("name", "clients") if key in values and values[key] is None]
        for key in absent:
            del values[key]
        return _complete_dataset(values) if values.get("path") is None else _complete_table(values)

    @model_validator(mode="after")
    def _check_rows(self) -> Self:
        k, classes = self.labels_per_client or 1, self.classes
        if classes is not None and k > classes:
            remedy = f"{self.name or self.label} has {classes} classes"
            raise PlanError.of("data.labels_per_client", k, f"at most {classes}", remedy)
        if self.path is not None:
            self._check_table()
            return self
        assert self.name is not None  # only a path clears it
        facts = DATASETS[self.name]
        for key, value in (("validation", self.validation), ("test", self.test)):
            if not isinstance(value, int):
                raise PlanError(
                    f"data.{key} must be a whole number with data.name = {self.name}, got "
                    f"{value!r:.60}; parts and files are for tables, which data.path names"
                )
        validation, test = int(self.validation), int(self.test)
        clients = self.clients or 0
        if self.split == "column":
            raise PlanError(
                "data.split must be iid, labels, sizes, dirichlet or order with data.name = "
                f"{self.name}, got 'column'; a client column is for tables, which data.path names"
            )
        if test == 0 and facts.own_test == 0:
            remedy = f"{self.name} comes without a test set of its own"
            raise PlanError.of("data.test", 0, "≥ 1", remedy)
        if self.public is not None and not 1 <= validation <= self.public:
            bound = f"from 1 to data.public = {self.public}"
            remedy = "the rows the server steers by are drawn from the public ones"
            raise PlanError.of("data.validation", validation, bound, remedy)
        held_out = validation if self.public is None else self.public
        rows_left = facts.rows - held_out - test
        if rows_left < clients * k:
            raise PlanError(
                f"data.clients = {clients} needs {clients * k} rows or more, and "
                f"{self.name} has {max(0, rows_left)} of {facts.rows} left beside "
                f"data.{'validation' if self.public is None else 'public'} = {held_out} and "
                f"data.test = {test}; lower one of them"
            )
        self._check_samples(rows_left, k)
        return self

    @property
    def classes(self) -> int | None:
        """The number of classes, if it is known before the data are read."""
        if self.name is not None:
            return None if self.name == "arrays" else DATASETS[self.name].classes
        return len(self.columns.get(str(self.label), ())) or None if self.columns else None

    @property
    def evaluates_on_clients(self) -> bool:
        """Whether the server validates or tests on rows of clients, as with a client column.

        Rows of a dataset, of arrays or of a table without `client` are dealt: a row that is set
        aside belongs to no client. A file is another table.
        """
        files = isinstance(self.validation, str) and isinstance(self.test, str)
        return self.client is not None and not files

    @property
    def keys_of_table(self) -> list[str]:
        """The keys of evaluation rows that name the table itself, all of whose rows are held."""
        if self.path is None:
            return []
        pairs = (("validation", self.validation), ("test", self.test))
        table = os.path.realpath(self.path)
        return [k for k, v in pairs if isinstance(v, str) and os.path.realpath(v) == table]

    def require_other_rows(self) -> None:
        """Refuse to begin a run whose server would hold the table itself.

        A run that an earlier version began so may end: its guarantee says what is held.
        """
        for key in self.keys_of_table:
            remedy = (
                "the server would hold all rows that clients train on; name other rows, or a "
                "fraction of these"
            )
            bound = "another file than data.path"
            raise PlanError.of(f"data.{key}", getattr(self, key), bound, remedy)

    @property
    def pictures(self) -> bool:
        """Whether a row may be a picture, which the cnn needs."""
        return self.is_array_file if self.name is None else DATASETS[self.name].pictures

    @property
    def counts_classes(self) -> bool:
        """Whether the classes of arrays in a file are counted on the clients' labels."""
        files = isinstance(self.validation, str) or isinstance(self.test, str)
        return self.is_array_file and not files and not self.columns

    @property
    def is_array_file(self) -> bool:
        """Whether the rows are arrays of a file."""
        return self.path is not None and self.path.lower().endswith(ARRAY_FILES)

    def table(self) -> dict[str, Any]:
        """Return the arguments of `data.tables.Source`."""
        return {
            "path": self.path,
            "label": self.label,
            "client": self.client,
            "person": self.person,
            "text": self.text,
            "columns": dict(self.columns or {}),
            "infer": bool(self.infer),
            "missing": self.missing or "middle",
            "validation": self.validation if isinstance(self.validation, str) else None,
            "test": self.test if isinstance(self.test, str) else None,
        }

    def _check_table(self) -> None:
        self._check_column_names()
        fitting: tuple[str, ...]
        for key in ("path", "validation", "test"):
            file, fitting, bound = getattr(self, key), TABLE_FILES, "a .csv or .parquet file"
            if key == "path":
                fitting, bound = TABLE_FILES + ARRAY_FILES, f"{bound}, or arrays in an .npz or .npy"
            elif self.is_array_file:
                fitting, bound = (".npz",), "an .npz file beside arrays"
            if isinstance(file, str) and not file.lower().endswith(fitting):
                raise PlanError.of(f"data.{key}", file, bound, "save the table as one of these")
        if self.test == 0:
            raise PlanError.of("data.test", 0, "≥ 1, a part or a file", "a table has no test set")
        if self.validation == 0:
            raise PlanError(
                "data.validation must be ≥ 1, a part or a file, got 0; a table's test rows are "
                "kept for the test"
            )
        if self.evaluation is not None and not self.evaluates_on_clients:
            raise PlanError(
                f"data.evaluation = {self.evaluation} has no effect where no client's own rows are "
                "validated or tested on (data.client, without files for both); remove it"
            )
        fractions = [value for value in (self.validation, self.test) if isinstance(value, float)]
        if sum(fractions) >= 1:
            raise PlanError(
                f"data.validation = {self.validation} and data.test = {self.test} leave no rows to "
                "train on; lower one of them"
            )
        if self.client is None:
            self._check_samples(10**12, self.labels_per_client or 1)

    def _check_column_names(self) -> None:
        for key in ("label", "client", "person", "text"):
            column = getattr(self, key)
            if column == "" or (key == "label" and column is None):
                remedy = "name the one to be predicted" if key == "label" else "or remove it"
                raise PlanError.of(f"data.{key}", column, "the name of a column", remedy)
        columns, label = self.columns or Columns(), str(self.label)
        roles = {"data.client": self.client, "data.person": self.person, "data.text": self.text}
        for key, column in roles.items():
            if column is None:
                continue
            others = [other for other, name in roles.items() if name == column and other != key]
            if column == label or columns.get(column) or (others and key == "data.text"):
                other = "data.label" if column == label else "a feature in data.columns"
                raise PlanError(
                    f"{key} = {column[:60]!a} is {others[0] if others else other} too; a column "
                    "has one role"
                )
        if columns.get(label) == ():
            raise PlanError.of(
                "data.columns", f"{label} = []", "two categories or more for the label", "list them"
            )
        if self.is_array_file:
            self._check_arrays(columns, label)
        if self.infer or self.is_array_file:
            return
        if label not in columns and self.target is None:
            folded = {name.casefold(): name for name in columns}
            if near := difflib.get_close_matches(label.casefold(), folded, 1, 0.8):
                hint = f"data.columns lacks the label {label[:60]!a}"
                raise PlanError(f"{hint}; did you mean {folded[near[0]][:60]!a}?")
            names = ", ".join(f"{name[:30]!a}" for name in [*columns][:8])
            hint = f"name one of {names} in data.label, or list" if names else "list"
            raise PlanError(
                f"data.columns lacks the label {label[:60]!a}; {hint} its categories there, which "
                "are public, or give data.target = [low, high], the public range of a number to "
                "predict (with model.loss), or choose data.infer = true"
            )
        if not (self.text or any(spec for name, spec in columns.items() if name != label)):
            raise PlanError(
                "data.columns lists no feature; give each column its [low, high] or its "
                "categories, or choose data.infer = true"
            )

    def _check_arrays(self, columns: Columns, label: str) -> None:
        keys = [f"data.{key}" for key in ("infer", "missing", "text") if getattr(self, key)]
        keys += [f"data.columns.{name}" for name in sorted(columns.keys() - {label})]
        if keys:
            raise PlanError(
                f"{keys[0]} has no effect with arrays, which are used as they are; remove it "
                "(the label's classes may be listed, and x may be texts)"
            )
        if str(self.path).lower().endswith(".npy"):
            if not label.lower().endswith(".npy"):
                remedy = "name the file of the labels, or save x and y together in an .npz"
                raise PlanError.of("data.label", label, "a .npy file beside data.path", remedy)
            for key in ("client", "person"):
                if getattr(self, key) is not None:
                    raise PlanError(f"data.{key} needs an .npz, which holds the array it names")

    def _check_samples(self, rows_left: int, at_least: int) -> None:
        sizes, clients = self.samples, self.clients or 0
        if isinstance(sizes, tuple):
            groups = len(sizes)
            divides = self.split == "sizes" and groups and clients % groups == 0
            if groups != clients and not divides:
                raise PlanError(
                    f"data.samples is a list of {groups} and data.clients is {clients}; "
                    "list one for each client"
                    + (", or as many as divide them evenly" if self.split == "sizes" else "")
                )
        elif self.split == "sizes":
            raise PlanError(
                f"data.samples must be a list with data.split = sizes, got {sizes!r:.60}; list the "
                "rows of each client, or choose iid"
            )
        if sizes is None:
            return
        listed = sizes if isinstance(sizes, tuple) else (sizes,)
        if min(listed) < at_least:
            remedy = "it is one row of each class or more"
            raise PlanError.of("data.samples", min(listed), f"≥ {at_least}", remedy)
        total = sum(listed) * clients // len(listed)
        if total > rows_left:
            raise PlanError(
                f"data.samples must be at most {rows_left} for all {clients} clients together, got "
                f"{list(listed) if len(listed) > 1 else listed[0]!r:.60}; these are {total}: lower "
                "it, data.clients, data.validation or data.test"
            )


def _complete_dataset(values: dict[str, Any]) -> dict[str, Any]:
    for key in TABLE_KEYS:
        if values.get(key) is not None:
            remedy = "name your table there, or remove it"
            raise PlanError.no_effect(f"data.{key}", "without data.path", remedy)
    name = values.get("name")
    if not isinstance(name, str) or name not in DATASETS:
        return values
    facts = DATASETS[name]
    return {"validation": facts.validation, "test": facts.test} | values


def _complete_table(values: dict[str, Any]) -> dict[str, Any]:
    if values.get("public") is not None:
        remedy = "keep public rows in a file of their own"
        raise PlanError.no_effect("data.public", "beside data.path", remedy)
    if "name" in values:
        raise PlanError.no_effect("data.name", "beside data.path", "remove one of the two")
    values = {"validation": 0.1, "test": 0.1} | values | {"name": None}
    if str(values["path"]).lower().endswith(".npz"):
        values["label"] = values.get("label") or "y"
    if values.get("infer") is None:
        values["infer"] = False
    if values.get("client") is None:
        if values.get("split") == "column":
            remedy = "name the clients' column"
            raise PlanError.of("data.client", None, "a column with data.split = column", remedy)
        return values
    if values.get("samples") is not None:
        remedy = "a client holds the rows that name it"
        raise PlanError.no_effect("data.samples", "beside data.client", remedy)
    split = values.setdefault("split", "column")
    if split != "column" and isinstance(split, str):
        remedy = "or remove data.client"
        raise PlanError.of("data.split", split, "column beside data.client", remedy)
    return {"clients": None} | values
