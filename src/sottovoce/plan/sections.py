"""The tables of a plan, each frozen and checked by itself.

To add a key: add a field. Its description is its line in `sottovoce init`, in the JSON Schema and
in the sentence that refuses a bad value; `When` says with which option it applies. Bounds that
another room knows (a budget, a recipe, a schedule) are checked by making that room's value.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Self, TypeAlias

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
from sottovoce.plan import text as plan_text
from sottovoce.plan.refusals import named, refused
from sottovoce.privacy.budget import Budget, Calibration, Unit
from sottovoce.privacy.sensitivity import Recipe
from sottovoce.rounds.cohort import CohortKind
from sottovoce.rounds.decaying import DecayingNoise
from sottovoce.rounds.discounted import DiscountedRounds
from sottovoce.rounds.fixed import FixedRounds
from sottovoce.rounds.schedule import Schedule

DatasetName: TypeAlias = Literal["digits", "mnist", "cifar10", "acs", "adult", "ipums", "arrays"]
SplitKind: TypeAlias = Literal["iid", "labels", "sizes", "dirichlet"]
ModelName: TypeAlias = Literal["svm", "mlp", "cnn", "custom"]
ScheduleKind: TypeAlias = Literal["fixed", "discounted", "decaying"]

MOST = 10**6  # of rounds, clients, samples and units: more is a slip of the keyboard


class Facts(NamedTuple):
    """What a plan must know of a data set; `validation` and `test` are what absent keys mean."""

    rows: int  # that can be dealt to clients, validation and test
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
    # Given from Python: what they hold is checked when they are there.
    "arrays": Facts(rows=10**12, own_test=0, classes=10**6, validation=100, test=100),
}


def _integral(value: Any) -> Any:
    # 10.0 is a whole number to people; True is not, and stays what it is to be refused.
    return int(value) if isinstance(value, float) and value.is_integer() else value


Whole: TypeAlias = Annotated[int, Field(strict=True, ge=1, le=MOST), BeforeValidator(_integral)]
WholeOrZero: TypeAlias = Annotated[
    int, Field(strict=True, ge=0, le=MOST), BeforeValidator(_integral)
]
Number: TypeAlias = Annotated[float, Field(strict=True), AllowInfNan(False)]


@dataclass(frozen=True)
class When:
    """A key that applies only while another of its section has this value; then its default."""

    switch: str
    value: str
    default: float


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


class Data(Section):
    """Which data, and who holds what."""

    name: DatasetName = Field(
        default="digits", description="the data set (arrays: given from Python)"
    )
    clients: Whole = Field(default=10, description="how many clients share the data (U)")
    samples: Whole | tuple[Whole, ...] | None = Field(
        default=None,
        description="the rows of each client, or a list of them (absent: all there are, equally)",
        examples=[143],
    )
    split: SplitKind = Field(
        default="iid",
        description="who holds what: alike, few classes each, sizes as listed, or mixed by α",
    )
    labels_per_client: Annotated[Whole | None, When("split", "labels", 2)] = Field(
        default=None, description="how many classes a client holds with split = labels"
    )
    alpha: Annotated[
        Annotated[Number, Field(ge=1e-3, le=MOST)] | None, When("split", "dirichlet", 0.5)
    ] = Field(
        default=None, description="how even the classes are with split = dirichlet, small is uneven"
    )
    validation: Whole = Field(
        default=DATASETS["digits"].validation,
        description="rows the server steers by, no client's (its default depends on the data set)",
    )
    test: WholeOrZero = Field(
        default=DATASETS["digits"].test,
        description="rows for the final test, no client's (0: the data set's own, if it has any)",
    )

    @model_validator(mode="before")
    @classmethod
    def _by_data_set(cls, values: Any) -> Any:
        name = values.get("name") if isinstance(values, dict) else None
        if not isinstance(name, str) or name not in DATASETS:
            return values
        facts = DATASETS[name]
        return {"validation": facts.validation, "test": facts.test} | values

    @model_validator(mode="after")
    def _fits(self) -> Self:
        facts = DATASETS[self.name]
        if self.test == 0 and facts.own_test == 0:
            raise PlanError.of(
                "data.test", 0, "≥ 1", f"{self.name} comes without a test set of its own"
            )
        k = self.labels_per_client or 1
        if k > facts.classes:
            raise PlanError.of(
                "data.labels_per_client",
                k,
                f"at most {facts.classes}",
                f"{self.name} has {facts.classes} classes",
            )
        kept = facts.rows - self.validation - self.test
        if kept < self.clients * k:
            raise PlanError(
                f"data.clients = {self.clients} needs {self.clients * k} rows or more, and "
                f"{self.name} has {max(0, kept)} of {facts.rows} left beside data.validation = "
                f"{self.validation} and data.test = {self.test}; lower one of them"
            )
        self._check_samples(kept, k)
        return self

    def _check_samples(self, kept: int, at_least: int) -> None:
        sizes = self.samples
        if isinstance(sizes, tuple):
            parts = len(sizes)
            by_parts = self.split == "sizes" and parts and self.clients % parts == 0
            if parts != self.clients and not by_parts:
                raise PlanError(
                    f"data.samples is a list of {parts} and data.clients is {self.clients}; "
                    "list one for each client"
                    + (", or as many as divide them evenly" if self.split == "sizes" else "")
                )
        elif self.split == "sizes":
            raise PlanError.of(
                "data.samples",
                sizes,
                "a list with data.split = sizes",
                "list the rows of each client, or choose iid",
            )
        if sizes is None:
            return
        listed = sizes if isinstance(sizes, tuple) else (sizes,)
        if min(listed) < at_least:
            raise PlanError.of(
                "data.samples", min(listed), f"≥ {at_least}", "it is one row of each class or more"
            )
        total = sum(listed) * self.clients // len(listed)
        if total > kept:
            raise PlanError.of(
                "data.samples",
                list(listed) if len(listed) > 1 else listed[0],
                f"at most {kept} for all {self.clients} clients together",
                f"these are {total}: lower it, data.clients, data.validation or data.test",
            )


class Model(Section):
    """What is trained."""

    name: ModelName = Field(default="mlp", description="the model (custom: given from Python)")
    hidden: Annotated[Whole | None, When("name", "mlp", 32)] = Field(
        default=None, description="the hidden units of the mlp"
    )
    channels: Annotated[Whole | None, When("name", "cnn", 8)] = Field(
        default=None, description="the channels of the cnn's convolution"
    )
    kappa: Annotated[Annotated[Number, Field(ge=0, le=MOST)] | None, When("name", "svm", 0.01)] = (
        Field(default=None, description="the weight κ of the svm's penalty κ/2‖w‖²")
    )


class Local(Section):
    """What a client does with a model before it uploads it."""

    learning_rate: Number = Field(default=2.0, description="the length η of a step, above 0")
    clip: Number = Field(
        default=1.0, description="the norm C that the gradient of a record is cut to, above 0"
    )
    unit: Unit = Field(
        default="record", description="what is protected: one record, or a client's data"
    )
    steps: Annotated[Whole, Field(le=1000)] = Field(
        default=1,
        description="the gradient steps of a round, each with noise and each charged (E)",
    )

    @model_validator(mode="after")
    def _has_a_recipe(self) -> Self:
        self._borrowed(lambda: self.recipe().sensitivity([1, MOST]))
        return self

    def recipe(self) -> Recipe:
        """The recipe that the sensitivity follows from."""
        return Recipe(self.learning_rate, self.clip, unit=self.unit, steps=self.steps)


class Privacy(Section):
    """What each client is promised."""

    epsilon: Annotated[Number, Field(le=1e6)] | tuple[Annotated[Number, Field(le=1e6)], ...] = (
        Field(
            default=8.0,
            description="the budget ε of every client, or a list (1 is strong, 8 is usual)",
        )
    )
    delta: Number | tuple[Number, ...] = Field(
        default=1e-5,
        description="the chance δ that ε does not hold, well below 1 / samples, or a list of them",
    )
    clients: str | None = Field(
        default=None,
        description="a CSV file with id, epsilon and delta of each client instead of the two above",
        examples=["budgets.csv"],
    )
    calibration: Calibration = Field(
        default="exact",
        description="how noise follows from the budget (paper: too little, to compare)",
    )

    @model_validator(mode="before")
    @classmethod
    def _from_file(cls, values: Any) -> Any:
        # Read once and kept as lists, so that a plan and its record need no second file.
        path = values.get("clients") if isinstance(values, dict) else None
        if not isinstance(path, str | Path):
            return values
        for key in ("epsilon", "delta"):
            if values.get(key) is not None:
                raise PlanError(
                    f"privacy.{key} has no effect beside privacy.clients; remove one of the two"
                )
        epsilon, delta = plan_text.read_budgets(path)
        return {**values, "clients": None, "epsilon": epsilon, "delta": delta}

    @model_validator(mode="after")
    def _are_budgets(self) -> Self:
        checks: dict[str, Callable[[float], Budget]] = {
            "epsilon": lambda epsilon: Budget(epsilon, 0.1),
            "delta": lambda delta: Budget(1, delta),
        }
        for key, check in checks.items():
            values = getattr(self, key)
            for i, value in enumerate(values if isinstance(values, tuple) else (values,)):
                try:
                    check(value)
                except InputError as error:
                    place = f"{key}[{i}]" if isinstance(values, tuple) else key
                    sentence = str(error).removeprefix(key)
                    raise PlanError(f"privacy.{place}{sentence}") from None
        return self


class Rounds(Section):
    """What happens when."""

    schedule: ScheduleKind = Field(
        default="discounted", description="how the number of rounds is decided"
    )
    rounds: Whole = Field(
        default=120, description="the number of rounds T₀ at the start, the most there are"
    )
    beta: Annotated[Number | None, When("schedule", "discounted", 0.8)] = Field(
        default=None,
        description="what part of the rounds left is kept when the loss stops falling, below 1",
    )
    zeta: Annotated[
        Annotated[Number, Field(ge=-MOST, le=MOST)] | None, When("schedule", "discounted", 0.0)
    ] = Field(default=None, description="the fall ζ of the loss a round must bring")
    window: Annotated[Whole | None, When("schedule", "discounted", 3)] = Field(
        default=None, description="how many losses are averaged (1: the paper's rule)"
    )
    slope: Annotated[Number | None, When("schedule", "decaying", 0.004)] = Field(
        default=None, description="how much smaller the noise gets a round with schedule = decaying"
    )
    per_round: Whole | None = Field(
        default=None,
        description="how many clients upload in a round (K; absent: every client)",
        examples=[10],
    )
    cohort: CohortKind = Field(
        default="balanced", description="who uploads: the least asked first, or anyone"
    )

    @model_validator(mode="after")
    def _is_a_schedule(self) -> Self:
        self._borrowed(self.build)
        return self

    def build(self) -> Schedule:
        """The schedule that these keys describe."""
        kinds: dict[str, Callable[..., Schedule]] = {
            "fixed": FixedRounds,
            "discounted": DiscountedRounds,
            "decaying": DecayingNoise,
        }
        own = {k: getattr(self, k) for k, when in self.conditions() if when.value == self.schedule}
        return kinds[self.schedule](rounds=self.rounds, **own)


class Server(Section):
    """What the server makes of the uploads."""

    weights: Literal["samples", "precision"] = Field(
        default="samples",
        description="what an upload counts by: rows, or (for unequal budgets) precision",
    )
    divergence: Annotated[Number, Field(ge=0, le=1e12)] | None = Field(
        default=None,
        description="how much clients' gradients differ, Γ², for precision (absent: 0 iid, or C²)",
        examples=[0.0],
    )
    signal: Literal["public", "clients", "raw"] = Field(
        default="public",
        description="whose loss steers: the validation set's, the clients' (noised), or raw ones",
    )
    loss_bound: Annotated[
        Annotated[Number, Field(ge=1e-6, le=1e6)] | None, When("signal", "clients", 5.0)
    ] = Field(default=None, description="what a client's losses are cut to with signal = clients")

    @model_validator(mode="after")
    def _divergence_has_a_use(self) -> Self:
        if self.divergence is not None and self.weights != "precision":
            raise PlanError(
                "server.divergence has no effect with server.weights = samples; "
                "remove it or choose precision"
            )
        return self


TABLES: dict[str, type[Section]] = {
    table.title(): table for table in (Data, Model, Local, Privacy, Rounds, Server)
}


@cache  # it takes longer than all the rest of a refusal
def _schema(table: type[Section]) -> dict[str, Any]:
    return table.model_json_schema()


def _keys() -> dict[str, list[str]]:
    tables = {title: list(table.model_fields) for title, table in TABLES.items()}
    return {"": ["schema", "noise", *tables]} | tables


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
