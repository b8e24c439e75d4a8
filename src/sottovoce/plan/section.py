"""What every table of a plan is: frozen, checked by itself, refusing in one sentence."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, TypeAlias

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

from sottovoce.errors import InputError, PlanError

# Why a plan is refused, in one plain sentence.
#
# What a value must be is read off the JSON Schema of the plan and what it is for off the field's
# description, so a new field needs no sentence of its own here.


Keys = Mapping[str, Sequence[str]]  # section → its keys; "" is the top of the plan
Schema = Mapping[str, Any]


def named(*parts: object) -> str:
    """A dotted name that is safe to print: odd or endless parts are quoted and cut.

    >>> named("rounds", "beta"), named("data", "a b")
    ('rounds.beta', "data.'a b'")
    """
    return ".".join(_safe(part) for part in (parts if parts[0] else parts[1:]))


def _safe(part: object) -> str:
    text = str(part)
    if re.fullmatch(r"[A-Za-z0-9_-]{1,40}", text):
        return text
    return ascii(text if len(text) <= 40 else text[:37] + "...")[:60]


def unknown(section: str, key: str, keys: Keys) -> PlanError:
    """A key nobody knows: where it belongs, or the nearest name, or all names.

    >>> keys = {"": ["noise", "rounds"], "rounds": ["beta", "zeta"], "privacy": ["epsilon"]}
    >>> print(unknown("rounds", "betta", keys))
    unknown key rounds.betta; did you mean rounds.beta?
    >>> print(unknown("", "epsilon", keys))
    unknown key epsilon; epsilon belongs to [privacy]
    """
    head = f"unknown key {named(section, key)}"
    homes = [home for home in keys if key in keys[home] and home != section]
    if homes:
        where = " or ".join(f"[{home}]" if home else "the top of the plan" for home in homes)
        return PlanError(f"{head}; {key} belongs to {where}")
    near = difflib.get_close_matches(key, keys.get(section, ()), 1)
    if near:
        return PlanError(f"{head}; did you mean {named(section, near[0])}?")
    # Further away only for a near certainty: a wrong hint is worse than the list.
    everywhere = {other: home for home in keys for other in keys[home]}
    near = difflib.get_close_matches(key, everywhere, 1, 0.8)
    if near:
        return PlanError(f"{head}; did you mean {named(everywhere[near[0]], near[0])}?")
    what = f"the keys of [{section}]" if section else "the sections and keys of a plan"
    return PlanError(f"{head}; {what} are {joined(keys.get(section, ()), 'and')}")


def refused(problems: Sequence[Any], section: str, schema: Schema, keys: Keys) -> PlanError:
    """The sentence for what pydantic found (`ValidationError.errors()`) in one section."""
    # A misspelt key explains most other troubles, so it is told first.
    first = min(problems, key=lambda problem: problem["type"] != "extra_forbidden")
    cause = first.get("ctx", {}).get("error")
    if isinstance(cause, PlanError):
        return cause
    key = str(first["loc"][0])
    if first["type"] == "extra_forbidden":
        return unknown(section, key, keys)
    # Of "neither a number nor a list", tell what is wrong inside the list if it is one.
    same = [problem for problem in problems if problem["loc"][0] == key]
    inside = [problem for problem in same if isinstance(problem["loc"][-1], int)]
    field = schema["properties"][key]
    purpose = f"it is {field['description']}"
    name, value = named(section, key), first["input"]
    if inside:
        name, value = f"{name}[{inside[0]['loc'][-1]}]", inside[0]["input"]
        field = next(kind["items"] for kind in field["anyOf"] if "items" in kind)
    names = [name for kind in (field, *field.get("anyOf", ())) for name in kind.get("enum", ())]
    near = difflib.get_close_matches(str(value)[:60].lower(), names, 1)
    return PlanError.of(
        name, value, expected(field), f"did you mean {near[0]}?" if near else purpose
    )


def expected(schema: Schema) -> str:
    """What a JSON Schema asks for, in words.

    >>> expected({"type": "integer", "minimum": 1, "maximum": 9})
    'a whole number from 1 to 9'
    >>> expected({"anyOf": [{"type": "number"}, {"type": "array"}, {"type": "null"}]})
    'a number or a list of such'
    >>> expected({"enum": ["svm", "mlp", "cnn"]})
    'svm, mlp or cnn'
    """
    if "anyOf" in schema:
        kinds = [kind for kind in schema["anyOf"] if kind.get("type") != "null"]
        return " or ".join(expected(kind) for kind in kinds)
    if "const" in schema or "enum" in schema:
        return joined(schema.get("enum", [schema.get("const")]), "or")
    noun = {
        "integer": "a whole number",
        "number": "a number",
        "array": "a list of such",
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


def joined(names: Sequence[object], last: str) -> str:
    """A list as people write it.

    >>> joined(["svm", "mlp", "cnn"], "or")
    'svm, mlp or cnn'
    """
    texts = [str(name) for name in names]
    return f" {last} ".join([", ".join(texts[:-1]), texts[-1]] if len(texts) > 1 else texts)


MOST = 10**6  # of rounds, clients, samples and units: more is a slip of the keyboard


def _integral(value: Any) -> Any:
    # 10.0 is a whole number to people; True is not, and stays what it is to be refused.
    return int(value) if isinstance(value, float) and value.is_integer() else value


Whole: TypeAlias = Annotated[int, Field(strict=True, ge=1, le=MOST), BeforeValidator(_integral)]
Few: TypeAlias = Annotated[int, Field(strict=True, ge=1, le=1000), BeforeValidator(_integral)]
WholeOrZero: TypeAlias = Annotated[
    int, Field(strict=True, ge=0, le=MOST), BeforeValidator(_integral)
]
Number: TypeAlias = Annotated[float, Field(strict=True), AllowInfNan(False)]


@dataclass(frozen=True)
class When:
    """A key that applies only while another of its section has this value; then its default."""

    switch: str
    value: str
    default: float | None


class Section(BaseModel):
    """A frozen table of a plan. Bad values raise `PlanError`, however the table was made."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    def __init__(self, /, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            problems = error.errors(include_url=False)
            raise refused(problems, self.title(), _schema(type(self)), _keys()) from None

    @classmethod
    def title(cls) -> str:
        """The name of the table in TOML."""
        return cls.__name__.lower()

    @classmethod
    def conditions(cls) -> Iterator[tuple[str, When]]:
        """The keys that apply with one option only."""
        for key, field in cls.model_fields.items():
            for mark in field.metadata:
                if isinstance(mark, When):
                    yield key, mark

    @model_validator(mode="before")
    @classmethod
    def _only_what_applies(cls, values: Any) -> Any:
        if not isinstance(values, dict):  # an object, which was checked when it was made
            return values
        values = {key: _plain(value, named(cls.title(), key)) for key, value in values.items()}
        for key, when in cls.conditions():
            chosen = values.get(when.switch, cls.model_fields[when.switch].default)
            switch = named(cls.title(), when.switch)
            if chosen == when.value:
                if values.get(key) is None:
                    values[key] = when.default
            elif values.get(key) is not None and isinstance(chosen, str):
                raise PlanError(
                    f"{named(cls.title(), key)} has no effect with {switch} = {named(chosen)}; "
                    f"remove it or choose {when.value}"
                )
        return values

    def _borrowed(self, check: Callable[[], object]) -> None:
        """Run a check that another package makes of its own values, and put our names into it."""
        try:
            check()
        except InputError as error:
            raise PlanError(f"{self.title()}.{error}") from None


TABLES: dict[str, type[Section]] = {}  # by their names in TOML; `sections` fills it


@cache  # it takes longer than all the rest of a refusal
def _schema(table: type[Section]) -> dict[str, Any]:
    return table.model_json_schema()


def _keys() -> dict[str, list[str]]:
    tables = {title: list(table.model_fields) for title, table in TABLES.items()}
    return {"": ["schema", "noise", "rehearsed", *tables]} | tables


def _plain(value: Any, name: str) -> Any:
    """numpy's arrays and numbers as Python's, and no integer too long to print."""
    if isinstance(value, np.ndarray | np.generic):
        value = value.tolist()
    todo = [value]  # a list of what is left, because TOML may be nested deeper than Python's stack
    while todo:
        item = todo.pop()
        if isinstance(item, list | tuple):
            todo.extend(item)
        elif isinstance(item, dict) and name not in TABLES:  # a section checks its own values
            todo.extend(item.values())
        elif isinstance(item, int) and item.bit_length() > 63:
            raise PlanError(f"{name} is a number of more than 64 bits; that is no value of a plan")
    return value
