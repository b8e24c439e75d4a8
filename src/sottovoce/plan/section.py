"""What every table of a plan is: frozen, checked by itself, refusing in one sentence."""

from __future__ import annotations

from collections.abc import Callable, Iterator
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
from sottovoce.plan.refusals import named, refused

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
        """Run a check that another room makes of its own values, and put our names into it."""
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
