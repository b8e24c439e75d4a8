"""The base of a plan's tables, a plan as text, and the sentences that refuse one.

A table is frozen and checks itself. A refusal says what a value must be, from the JSON Schema of
the plan, and what it is for, from the field's description: a new field needs no sentence here.

The functions for text read TOML, `--set` and the file of budgets, and write TOML. They turn text
into plain data or back; the tables check what the data must be.
"""

from __future__ import annotations

import csv
import difflib
import json
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any, ClassVar, NoReturn, TypeAlias

import numpy as np
from pydantic import (
    AllowInfNan,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)
from pydantic_core.core_schema import CoreSchema, no_info_after_validator_function, str_schema

from sottovoce.errors import InputError, PlanError
from sottovoce.privacy.budget import Budget

Keys = Mapping[str, Sequence[str]]  # section → its keys; "" is the top of the plan
Schema = Mapping[str, Any]


def format_name(*words: object) -> str:
    """Format a dotted name so that it is safe to print: odd or long words are quoted and cut.

    >>> format_name("rounds", "beta"), format_name("data", "a b")
    ('rounds.beta', "data.'a b'")
    """
    return ".".join(_quote_odd(word) for word in (words if words[0] else words[1:]))


def _quote_odd(word: object) -> str:
    text = str(word)
    if re.fullmatch(r"[A-Za-z0-9_-]{1,40}", text):
        return text
    return ascii(text if len(text) <= 40 else text[:37] + "...")[:60]


def make_unknown_key_error(section: str, key: str, keys: Keys) -> PlanError:
    """Return the error for an unknown key: where it belongs, the nearest name, or all names.

    >>> keys = {"": ["noise", "rounds"], "rounds": ["beta", "zeta"], "privacy": ["epsilon"]}
    >>> print(make_unknown_key_error("rounds", "betta", keys))
    unknown key rounds.betta; did you mean rounds.beta?
    >>> print(make_unknown_key_error("", "epsilon", keys))
    unknown key epsilon; epsilon belongs to [privacy]
    """
    head = f"unknown key {format_name(section, key)}"
    if key == "batch_size":
        return PlanError(f"{head}; all rows of a client are one batch, remove it")
    homes = [home for home in keys if key in keys[home] and home != section]
    if homes:
        where = " or ".join(f"[{home}]" if home else "the top of the plan" for home in homes)
        return PlanError(f"{head}; {key} belongs to {where}")
    near = difflib.get_close_matches(key, keys.get(section, ()), 1)
    if near:
        return PlanError(f"{head}; did you mean {format_name(section, near[0])}?")
    # In other sections only a very close name is suggested: a wrong hint is worse than the list.
    everywhere = {other: home for home in keys for other in keys[home]}
    near = difflib.get_close_matches(key, everywhere, 1, 0.8)
    if near:
        return PlanError(f"{head}; did you mean {format_name(everywhere[near[0]], near[0])}?")
    listed = f"the keys of [{section}]" if section else "the sections and keys of a plan"
    return PlanError(f"{head}; {listed} are {join_names(keys.get(section, ()), 'and')}")


def make_error(problems: Sequence[Any], section: str, schema: Schema, keys: Keys) -> PlanError:
    """Return the error for what pydantic found (`ValidationError.errors()`) in one section."""
    # A misspelt key explains most other problems, so it comes first.
    first = min(problems, key=lambda problem: problem["type"] != "extra_forbidden")
    cause = first.get("ctx", {}).get("error")
    if isinstance(cause, PlanError):
        return cause
    key = str(first["loc"][0])
    if first["type"] == "extra_forbidden":
        return make_unknown_key_error(section, key, keys)
    # If a value is neither a valid number nor a valid list, say what is wrong inside the list.
    same = [problem for problem in problems if problem["loc"][0] == key]
    inside = [problem for problem in same if isinstance(problem["loc"][-1], int)]
    field = schema["properties"][key]
    purpose = f"it is {field['description']}"
    name, value = format_name(section, key), first["input"]
    if inside:
        name, value = f"{name}[{inside[0]['loc'][-1]}]", inside[0]["input"]
        field = next(kind["items"] for kind in field["anyOf"] if "items" in kind)
    names = [name for kind in (field, *field.get("anyOf", ())) for name in kind.get("enum", ())]
    near = difflib.get_close_matches(str(value)[:60].lower(), names, 1)
    return PlanError.of(
        name, value, describe_schema(field), f"did you mean {near[0]}?" if near else purpose
    )


def describe_schema(schema: Schema) -> str:
    """Describe in words what a JSON Schema asks for.

    >>> describe_schema({"type": "integer", "minimum": 1, "maximum": 9})
    'a whole number from 1 to 9'
    >>> numbers = {"type": "array", "items": {"type": "number"}}
    >>> describe_schema({"anyOf": [{"type": "number"}, numbers, {"type": "null"}]})
    'a number or a list of such'
    >>> describe_schema({"enum": ["svm", "mlp", "cnn"]})
    'svm, mlp or cnn'
    """
    if "anyOf" in schema:
        kinds = [kind for kind in schema["anyOf"] if kind.get("type") != "null"]
        text = " or ".join(describe_schema(kind) for kind in kinds)
        if any(kind.get("type") in ("number", "integer") for kind in kinds):
            text = text.replace("a list of numbers", "a list of such")
        return text
    if "const" in schema or "enum" in schema:
        return join_names(schema.get("enum", [schema.get("const")]), "or")
    items = schema.get("items", {}).get("type")
    noun = {
        "integer": "a whole number",
        "number": "a number",
        "array": "a list of texts" if items == "string" else "a list of numbers",
        "string": "text",
        "boolean": "true or false",
        "object": "a table of lists",
    }[schema["type"]]
    if "exclusiveMinimum" in schema:
        return f"{noun} between {schema['exclusiveMinimum']:g} and {schema['exclusiveMaximum']:g}"
    low, high = schema.get("minimum"), schema.get("maximum")
    if low is not None and high is not None:
        # %.10g: 1000000 rather than 1e+06.
        return f"{noun} from {low:.10g} to {high:.10g}"
    return noun if high is None else f"{noun} up to {high:.10g}"


def join_names(names: Sequence[object], last: str) -> str:
    """Join names as people write a list.

    >>> join_names(["svm", "mlp", "cnn"], "or")
    'svm, mlp or cnn'
    """
    texts = [str(name) for name in names]
    return f" {last} ".join([", ".join(texts[:-1]), texts[-1]] if len(texts) > 1 else texts)


BUDGET_COLUMNS = ["id", "epsilon", "delta"]


def read_text(path: str | Path, what: str) -> str:
    """Return the text of a file, or raise PlanError with the reason."""
    try:
        # A byte order mark at the start (Windows) does not belong to the text.
        return Path(path).read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        why = f"it is not UTF-8 text (byte {error.start}), save it as UTF-8"
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        why = explain_unreadable(path, error)
    raise PlanError(f"{what} {quote_value(path)} cannot be read: {why}")


def explain_unreadable(path: str | Path, error: Exception) -> str:
    """Return why a file cannot be read; of one that is absent, the nearest name beside it."""
    if not isinstance(error, FileNotFoundError):
        is_folder = isinstance(error, IsADirectoryError)
        why = getattr(error, "strerror", None) or "that is no path"
        return "it is a folder, name the file in it" if is_folder else why
    with suppress(OSError):
        names = [entry.name for entry in Path(path).parent.iterdir()]
        if near := difflib.get_close_matches(Path(path).name, names, 1, 0.8):
            return f"there is no such file; did you mean {near[0][:60]!a}?"
    return "there is no such file"


def parse_toml(text: str, source: str = "the plan") -> dict[str, Any]:
    """Parse TOML into plain data.

    >>> parse_toml("[data]\\nclients = ")
    Traceback (most recent call last):
        ...
    sottovoce.errors.PlanError: the plan is not valid TOML: Invalid value (at line 2, the end)
    """
    try:
        values = tomllib.loads(text)
    except RecursionError:
        raise PlanError(f"{source} is not a plan: its values are nested too deeply") from None
    except ValueError as error:  # TOMLDecodeError, or a number with thousands of digits
        end = f"(at line {len(text.splitlines())}, the end)"
        why = str(error).replace("(at end of document)", end)
        if not isinstance(error, tomllib.TOMLDecodeError):
            why = "it has a number or a date that is too large to be one"
        why = re.sub(r"\s+", " ", why)
        why = re.sub(r"Cannot declare \('(.*)',\) twice", r"[\1] is there twice", why)
        if at := re.fullmatch(r"Cannot overwrite a value (\(at line (\d+).*)", why):
            key, sign, _ = text.splitlines()[int(at[2]) - 1].partition("=")
            why = f"{_quote_odd(key.strip())} has a value already {at[1]}" if sign else why
        # The message ends with the line and column, so a long one is cut in its middle.
        why = why if len(why) <= 160 else f"{why[:100]}...{why[-50:]}"
        raise PlanError(f"{source} is not valid TOML: {why}") from None
    if not values:
        raise PlanError(f"{source} is empty; sottovoce init writes a plan with every key explained")
    return values


def parse_setting(text: str, *, is_option: bool = True) -> tuple[str, Any]:
    """Parse `KEY=VALUE`, of `--set` or from Python; a value that is not TOML is taken as a word.

    >>> parse_setting("privacy.epsilon=4"), parse_setting("model.name=cnn")
    (('privacy.epsilon', 4), ('model.name', 'cnn'))
    >>> parse_setting("epsilon")
    Traceback (most recent call last):
        ...
    sottovoce.errors.PlanError: --set takes KEY=VALUE, got 'epsilon'; for example \
--set privacy.epsilon=4
    """
    key, equals, word = (piece.strip() for piece in text.partition("="))
    if not (key and equals and word):
        rule, option = ("--set takes", "--set ") if is_option else ("settings are", "")
        example = f"{option}privacy.epsilon=4"
        raise PlanError(f"{rule} KEY=VALUE, got {quote_value(text)}; for example {example}")
    try:
        values = tomllib.loads(f"value = {word}")
    except (ValueError, RecursionError):
        return key, word
    # A line break in the word could have started a second key.
    return key, values["value"] if list(values) == ["value"] else word


def split_key(key: str) -> tuple[str, str]:
    """Split `section.key`; a key at the top of the plan becomes ("", key).

    >>> split_key("privacy.epsilon"), split_key("noise")
    (('privacy', 'epsilon'), ('', 'noise'))
    """
    names = key.split(".")
    if len(names) > 2 or not all(names):
        raise PlanError(
            f"unknown key {quote_value(key)}; a key is section.name, as privacy.epsilon"
        )
    return (names[0], names[1]) if len(names) == 2 else ("", key)


def read_budgets(path: str | Path) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Read ε and δ of clients 0, 1, 2, … from a CSV file with the columns id, epsilon, delta."""
    where = f"privacy.clients {quote_value(path)}"
    rows = csv.reader(read_text(path, "privacy.clients").splitlines())
    budgets: dict[int, Budget] = {}
    try:
        header = [name.strip().lower() for name in next(rows, [])]
        if header != BUDGET_COLUMNS:
            raise PlanError(f"{where} line 1 must be id,epsilon,delta; name the columns there")
        for row in rows:
            line = f"{where} line {rows.line_num}"
            if not row:
                continue
            try:
                name, *numbers = row
                client, (epsilon, delta) = int(name), map(float, numbers)
            except ValueError:
                raise PlanError(f"{line} must be three numbers: id, epsilon, delta") from None
            if client in budgets:
                raise PlanError(f"{line} repeats client {client}; each id stands there once")
            try:
                budgets[client] = Budget(epsilon, delta)
            except InputError as error:
                raise PlanError(f"{line}: {error}") from None
    except csv.Error as error:
        raise PlanError(f"{where} line {rows.line_num} is not CSV: {error}") from None
    if not budgets:
        raise PlanError(f"{where} has no clients; give each a line id,epsilon,delta")
    missing = next((client for client in range(len(budgets)) if client not in budgets), None)
    if missing is not None:
        raise PlanError(
            f"{where} has {len(budgets)} clients but no id {missing}; ids run from 0 without a gap"
        )
    in_order = [budgets[client] for client in range(len(budgets))]
    return tuple(b.epsilon for b in in_order), tuple(b.delta for b in in_order)


def write_toml(values: Mapping[str, Any], above: str = "") -> str:
    """Write plain data as TOML; mappings in it are tables, whose names begin with `above`.

    >>> print(write_toml({"schema": 1, "data": {"name": "digits", "samples": [3, 4]}}), end="")
    schema = 1
    <BLANKLINE>
    [data]
    name = "digits"
    samples = [3, 4]
    """
    tables = {key: table for key, table in values.items() if isinstance(table, Mapping)}
    flat = {key: value for key, value in values.items() if key not in tables}
    text = "".join(f"{format_key(key)} = {format_value(value)}\n" for key, value in flat.items())
    for key, table in tables.items():
        text += f"\n[{above}{format_key(key)}]\n" + write_toml(table, f"{above}{format_key(key)}.")
    return text


def format_value(value: Any) -> str:
    """Format one value as TOML; JSON writes strings, numbers and lists the same way.

    >>> format_value(1e-5), format_value("mlp"), format_value({"age": [0, 9], "a b": ["é"]})
    ('1e-05', '"mlp"', '{age = [0, 9], "a b" = ["é"]}')
    """
    if isinstance(value, Mapping):
        pairs = [f"{format_key(key)} = {format_value(item)}" for key, item in value.items()]
        return "{" + ", ".join(pairs) + "}"
    # Not ASCII, because TOML does not know JSON's escapes beyond the first 65,536 characters.
    text = json.dumps(value, allow_nan=False, ensure_ascii=False)
    return text.replace("\x7f", "\\u007f")


def format_key(key: str) -> str:
    """Format a key as TOML, in quotes where it needs them.

    >>> format_key("age"), format_key("marital status")
    ('age', '"marital status"')
    """
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else format_value(key)


def quote_value(value: object) -> str:
    """Return a value in quotes and on one line; a long one is cut in its middle."""
    text = ascii(str(value))
    return text if len(text) <= 80 else f"{text[:30]}...{text[-47:]}"


MOST = 10**6  # rounds, clients, samples or units: more is taken for a typing error


def to_whole(value: Any) -> Any:
    """Return 10 for 10.0, which people take for a whole number; True is left, and refused."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


Whole: TypeAlias = Annotated[int, Field(strict=True, ge=1, le=MOST), BeforeValidator(to_whole)]
Few: TypeAlias = Annotated[int, Field(strict=True, ge=1, le=1000), BeforeValidator(to_whole)]
WholeOrZero: TypeAlias = Annotated[
    int, Field(strict=True, ge=0, le=MOST), BeforeValidator(to_whole)
]
Number: TypeAlias = Annotated[float, Field(strict=True), AllowInfNan(False)]


class OneOf:
    """The names in a registry, one of which a text must be: `Annotated[str, OneOf(REGISTRY)]`."""

    def __init__(self, registry: Mapping[str, Any], *others: str) -> None:
        self.registry, self.others = registry, others

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> CoreSchema:
        return no_info_after_validator_function(self._require_name, str_schema(strict=True))

    def __get_pydantic_json_schema__(self, schema: Any, handler: Any) -> dict[str, Any]:
        return {"enum": [*self.registry, *self.others], "type": "string"}

    def _require_name(self, name: str) -> str:
        if name not in self.registry and name not in self.others:
            raise ValueError(name)  # `Section` says what it must be
        return name


def optional(description: str, example: Any = None) -> Any:
    """Return the field of a key that may be absent, with an example where it has no default."""
    return Field(None, description=description, examples=None if example is None else [example])


@dataclass(frozen=True)
class When:
    """The condition of a key that applies only if `switch` has this value, and its default."""

    switch: str
    value: str
    default: float | None


class Section(BaseModel):
    """A frozen table of a plan. Bad values raise `PlanError`, however the table was made."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    title: ClassVar[str] = ""  # its name in TOML; the top of a plan has none

    def __init__(self, /, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            problems = error.errors(include_url=False)
            schema = _make_schema(type(self))
            raise make_error(problems, self.title, schema, _list_keys()) from None

    def __setattr__(self, key: str, value: object = None) -> NoReturn:
        raise PlanError(
            f"{format_name(self.title, key)} cannot be set, because a plan is frozen; make "
            'another plan, as plan.replace("privacy.epsilon=3")'
        )

    __delattr__ = __setattr__

    def __dir__(self) -> list[str]:  # for Tab: keys and verbs of a plan, none of pydantic's
        return [key for key in super().__dir__() if key[0] == "_" or not hasattr(BaseModel, key)]

    @classmethod
    def conditions(cls) -> Iterator[tuple[str, When]]:
        """Yield the keys that apply with one option only, and their conditions."""
        for key, field in cls.model_fields.items():
            for mark in field.metadata:
                if isinstance(mark, When):
                    yield key, mark

    @model_validator(mode="before")
    @classmethod
    def _check_conditions(cls, values: Any) -> Any:
        if not isinstance(values, dict):  # an object was checked when it was made
            return values
        values = {key: _to_plain(value, cls.title, key) for key, value in values.items()}
        for key, when in cls.conditions():
            chosen = values.get(when.switch, cls.model_fields[when.switch].default)
            if chosen == when.value:
                if values.get(key) is None:
                    values[key] = when.default
            elif values.get(key) is not None and isinstance(chosen, str | None):
                switch = format_name(cls.title, when.switch)
                where = f"with {switch} = {format_name(chosen)}" if chosen else f"without {switch}"
                remedy = f"remove it or choose {when.value}"
                raise PlanError.no_effect(format_name(cls.title, key), where, remedy)
        return values

    def _check_with(self, check: Callable[[], object]) -> None:
        """Run a check of another package, and name this section in its error."""
        try:
            check()
        except InputError as error:
            raise PlanError(f"{self.title}.{error}") from None


TABLES: dict[str, type[Section]] = {}  # by their names in TOML; `sections` fills it


@cache  # it takes longer than all the rest of an error
def _make_schema(table: type[Section]) -> dict[str, Any]:
    return table.model_json_schema()


def _list_keys() -> dict[str, list[str]]:
    tables = {title: list(table.model_fields) for title, table in TABLES.items()}
    return {"": ["schema", "noise", "metric", "rehearsed", "parts", *tables]} | tables


def _to_plain(value: Any, title: str, key: str) -> Any:
    """Return numpy's arrays and numbers as Python's; refuse integers too long to print."""
    if isinstance(value, np.ndarray | np.generic):
        value = value.tolist()
    todo = [value]  # no recursion, because TOML may be nested deeper than Python's stack
    while todo:
        item = todo.pop()
        if isinstance(item, list | tuple):
            todo.extend(item)
        elif isinstance(item, dict) and (title or key not in TABLES):  # a section checks its own
            todo.extend(item.values())
        elif isinstance(item, int) and item.bit_length() > 63:
            name = format_name(title, key)
            raise PlanError(f"{name} is a number of more than 64 bits; that is no value of a plan")
    return value
