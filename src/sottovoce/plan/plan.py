"""The plan: everything that a run and its guarantee depend on, in one frozen value.

A plan is complete by itself: an absent key has its default, and nothing is merged from elsewhere.
Defaults are the values of the embedded plan (`default.toml`). Its schedule and average are newer
than the defaults, so that older plans keep their meaning. Unknown keys, unknown names, and keys
without effect are refused, each in one sentence and before any data is read.
The tables and their keys are in `data` and `sections`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import BeforeValidator, Field, model_validator

from sottovoce.errors import PlanError
from sottovoce.models.base import LEAST_SQUARES, Regression, find_model
from sottovoce.models.custom import resolve_beside
from sottovoce.models.metrics import CLASS_METRICS, REGRESSION_METRICS
from sottovoce.models.network import TEXT_PRESET, is_network, resolve_network
from sottovoce.models.person import ROWS_PER_PERSON
from sottovoce.plan import base
from sottovoce.plan.base import TABLES, OneOf, Section, format_name, optional, split_key
from sottovoce.plan.data import TABLE_KEYS, Columns, Data, check_bounds
from sottovoce.plan.sections import CUSTOM, Local, ModelSection, Privacy, Rounds, Server
from sottovoce.privacy.budget import LARGER_UNITS
from sottovoce.privacy.sensitivity import LEAST_WEIGHT, Recipe
from sottovoce.schedules.base import Schedule

NUMBER_RATE = 0.2  # η where a number is predicted: the squared loss diverges with larger ones


def _check_version(value: Any) -> Any:
    if isinstance(value, bool):  # True equals 1, and would be taken for a version
        raise PlanError.of("schema", value, "1", "it is the version of this format")
    return value


class Plan(Section):
    """Everything that will run.

    >>> plan = Plan(data={"clients": 5}, privacy={"epsilon": 4})
    >>> plan.privacy.epsilon, plan.data.validation, plan.per_round
    (4.0, 183, 5)
    >>> Plan(rounds={"betta": 0.9})
    Traceback (most recent call last):
        ...
    sottovoce.errors.PlanError: unknown key rounds.betta; did you mean rounds.beta?
    """

    schema_version: Annotated[Literal[1], BeforeValidator(_check_version)] = Field(
        default=1, alias="schema", description="the version of this format"
    )
    noise: Literal["simulated", "secure"] = Field(
        default="simulated",
        description="where noise comes from (simulated: a forecast; secure: a real release)",
    )
    metric: Annotated[str, OneOf(CLASS_METRICS | REGRESSION_METRICS)] | None = optional(
        "what heads the result and steers it (absent: a rule, and the loss steers)", "auroc"
    )
    rehearsed: Annotated[str, Field(max_length=2000)] | None = optional(
        "how settings were chosen; sottovoce rehearse writes it, the card shows it",
        "local.clip by sottovoce rehearse on rows.npz",
    )
    parts: tuple[Annotated[str, Field(max_length=200)], ...] | None = optional(
        "parts given from Python, which a plan cannot hold; simulate writes it",
        ["schedule: study.Patience"],
    )
    data: Data = Field(default_factory=lambda: Data())
    model: ModelSection = Field(default_factory=lambda: ModelSection())
    local: Local = Field(default_factory=lambda: Local())
    privacy: Privacy = Field(default_factory=lambda: Privacy())
    rounds: Rounds = Field(default_factory=lambda: Rounds())
    server: Server = Field(default_factory=lambda: Server())

    def __init__(self, tables: Any = None, /, **values: Any) -> None:
        """Sections are objects (`Data(...)`) or mappings, by their names in TOML, or all in one."""
        if not isinstance(tables, Mapping | None):
            bound = "a dictionary of its keys"
            raise PlanError.of("a plan", tables, bound, "a file is read by Plan.load")
        super().__init__(**{**(tables or {}), **values})

    @model_validator(mode="before")
    @classmethod
    def _make_tables(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        values = _add_defaults(values)
        for key, value in values.items():
            if key not in TABLES or isinstance(value, TABLES[key]):
                continue
            if not isinstance(value, Mapping) or not all(isinstance(name, str) for name in value):
                remedy = f"write [{key}] and its keys below it"
                raise PlanError(f"{key} must be a table, got {type(value).__name__}; {remedy}")
            values[key] = TABLES[key](**value)
        return values

    @model_validator(mode="after")
    def _check_sections(self) -> Self:
        self._check_clients()
        self._check_model()
        self._check_class_weights()
        self._check_regression()
        self._check_least_squares()
        if self.server.signal == "clients" and self.schedule().steady:
            raise PlanError(
                "server.signal = clients pays for losses that rounds.schedule = "
                f"{self.rounds.schedule} never looks at; choose public, or discounted"
            )
        if self.server.choose == "best" and self.data.validation == 0:
            raise PlanError(
                "server.choose must be last with data.validation = 0, got 'best'; the test rows "
                "would choose the model that they test"
            )
        if self.local.unit == "person" and self.data.person is None and self.data.name != "arrays":
            raise PlanError(
                "data.person must be the column of person ids with local.unit = person, got None; "
                "name it, or protect records or clients"
            )
        if self.local.unit != "person" and self.data.rows_per_person is not None:
            raise PlanError.no_effect("data.rows_per_person", "without local.unit = person")
        fitting = CLASS_METRICS if self.model.loss is None else REGRESSION_METRICS
        if self.metric is not None and self.metric not in fitting:
            kind = "classes" if self.model.loss is None else "a number (model.loss)"
            bound = f"{' or '.join(fitting)} for {kind}"
            raise PlanError.of("metric", self.metric, bound, "choose one of them")
        if self.noise == "secure":
            self._check_release()
        elif self.server.aggregation not in (None, "mean"):
            bound = "mean with noise = simulated"
            remedy = (
                "simulation computes the mean of all uploads and no single one; set noise = secure"
            )
            raise PlanError.of("server.aggregation", self.server.aggregation, bound, remedy)
        if self.local.steps > 1 and self.privacy.calibration == "paper":
            bound = "1 with privacy.calibration = paper"
            remedy = "the paper's theorem knows one step a round"
            raise PlanError.of("local.steps", self.local.steps, bound, remedy)
        if self.privacy.view == "sum":
            self._check_sum()
        elif self.data.clients is not None and (self.privacy.corrupt or 0) >= self.data.clients:
            bound = f"below data.clients = {self.data.clients}"
            raise PlanError.of("privacy.corrupt", self.privacy.corrupt, bound, "they are others")
        return self

    def _check_sum(self) -> None:
        """Refuse what a server that learns only the sum of a round's uploads cannot do."""
        privacy = self.privacy
        for key, value, only, remedy in (
            ("privacy.calibration", privacy.calibration, "exact or zcdp", "paper promises nothing"),
            ("server.weights", self.server.weights, "samples", "precision needs single uploads"),
            ("server.signal", self.server.signal, "public", "losses are no part of the sum"),
            ("local.steps", self.local.steps, "1", "a later step shows the noise of one client"),
            ("server.aggregation", self.server.aggregation or "mean", "mean", "it needs uploads"),
        ):
            if str(value) not in only.split(" or "):
                raise PlanError.of(key, value, f"{only} with privacy.view = sum", remedy)
        if privacy.honest is None or privacy.honest < 2:
            remedy = "with less each client needs all its noise alone, which is view = upload"
            bound = "a whole number ≥ 2 with privacy.view = sum"
            raise PlanError.of("privacy.honest", privacy.honest, bound, remedy)
        needed = privacy.honest + (privacy.corrupt or 0)
        if self.data.clients is not None and self.per_round < needed:
            bound = f"at least privacy.honest + privacy.corrupt = {needed}"
            remedy = "let more clients upload in a round, or count on fewer"
            raise PlanError.of("rounds.per_round", self.per_round, bound, remedy)

    @property
    def needs_python(self) -> bool:
        """Whether something of this plan can only be given from Python."""
        own_model = self.model.name == CUSTOM and self.model.own is None
        return self.data.name == "arrays" or own_model or bool(self.parts)

    @property
    def is_steered_otherwise(self) -> bool:
        """Whether something else than the validation loss steers the schedule."""
        return self.server.signal != "public" or self.metric is not None

    def _check_release(self) -> None:
        """Refuse what exists in simulation only."""
        if self.data.infer:
            remedy = (
                "bounds taken from the data are a release that nobody pays for; declare columns"
            )
            raise PlanError.of("data.infer", True, "false with noise = secure", remedy)
        if self.evaluates_on_unit:
            key = "test" if isinstance(self.data.validation, str) else "validation"
            bound = f"a file with local.unit = {self.local.unit} and noise = secure"
            remedy = (
                "a client's own rows would reach the server raw and are part of what is protected; "
                "or declare them public by data.evaluation = public"
            )
            raise PlanError.of(f"data.{key}", getattr(self.data, key), bound, remedy)
        private = self.data.path is not None or self.data.name == "arrays"
        if private and self.data.split in ("labels", "dirichlet"):
            bound = "iid, sizes, order or column with noise = secure"
            remedy = "dealt by their labels, one person's row moves the rows of every other client"
            raise PlanError.of("data.split", self.data.split, bound, remedy)
        formula = "the paper's formula does not keep its promise"
        looks = "the paper's way looks at data that nobody pays for"
        for key, value, refused, instead, remedy in (
            ("privacy.calibration", self.privacy.calibration, "paper", "exact or zcdp", formula),
            ("server.signal", self.server.signal, "raw", "public or clients", looks),
            ("local.clip", self.local.clip, "median", "a number", looks),
        ):
            if value == refused:
                raise PlanError.of(key, value, f"{instead} with noise = secure", remedy)

    def _check_model(self) -> None:
        data, classes, name = self.data, self.data.classes, self.model.name
        source = f"data.name = {data.name}" if data.path is None else "data.path"
        why_not = None
        if "data" in self.model_fields_set:  # else arrays may still be given from Python
            why_not = self.model.explain_excess(classes, data.name or f"the label {data.label}")
        if why_not is None and self.model.takes_pictures and not data.pictures:
            why_not = f"the {name} is for pictures and {data.name or 'this'} is a table"
        if why_not is not None:
            fitting = self.model.list_fitting(classes, data.pictures)
            raise PlanError.of("model.name", name, f"{fitting} with {source}", why_not)
        if self.model.features == "hog" and not data.pictures:
            bound = f"absent with {source}"
            remedy = f"gradient histograms are of pictures and {data.name or 'this'} is a table"
            raise PlanError.of("model.features", self.model.features, bound, remedy)
        if data.text is not None and not self.model.has_network:
            remedy = f"it makes numbers of texts; or remove data.text = {data.text[:30]!a}"
            raise PlanError.of("model.features", self.model.features, TEXT_PRESET, remedy)
        is_table = data.path is not None and not data.is_array_file
        if self.model.features == TEXT_PRESET and is_table and data.text is None:
            bound = f"the column of texts with model.features = {TEXT_PRESET}"
            raise PlanError.of("data.text", None, bound, "name it")
        if self.model.colours and data.name in ("mnist", "digits"):
            remedy = "these pictures are grey"
            raise PlanError.of("model.colours", True, f"absent with {source}", remedy)

    def _check_class_weights(self) -> None:
        weights, shares = self.model.class_weights, self.data.prevalence
        # Arrays from Python may still replace a named dataset.
        classes = None if self.data.path is None else self.data.classes
        is_balanced = weights == "balanced"
        if weights is not None and self.local.unit == "person":
            where = "with local.unit = person, where a sample may have rows of several classes"
            raise PlanError.no_effect("model.class_weights", where)
        if is_balanced and shares is None:
            bound = "the share of each class with model.class_weights = balanced"
            remedy = "give those that are published, as [0.95, 0.05]; clients' rows are not counted"
            raise PlanError.of("data.prevalence", None, bound, remedy)
        if shares is not None and not is_balanced:
            where = "without model.class_weights = balanced"
            raise PlanError.no_effect("data.prevalence", where)
        if shares is not None and abs(sum(shares) - 1) > 0.01:
            remedy = "give the published share of each class"
            raise PlanError.of("data.prevalence", list(shares), "shares that add up to 1", remedy)
        key = "data.prevalence" if is_balanced else "model.class_weights"
        listed = shares if isinstance(weights, str) else weights
        if listed is None:
            return
        if len(listed) < 2 or (classes is not None and len(listed) != classes):
            remedy = "list one for each class, in the order of the classes"
            raise PlanError.of(key, list(listed), f"{classes or 'two or more'} numbers", remedy)
        if min(listed) < LEAST_WEIGHT * max(listed):
            remedy = "raise the smallest"
            raise PlanError.of(key, list(listed), "numbers that differ at most by 1e6", remedy)

    def _check_least_squares(self) -> None:
        if self.model.name != LEAST_SQUARES:
            return
        if self.model.loss == "huber":
            remedy = "choose squared, or softmax"
            raise PlanError.of("model.loss", "huber", f"absent with {LEAST_SQUARES}", remedy)
        if (clip := self.local.clip) == "median" or clip > 1:
            remedy = "no row has a longer gradient, so that more clipping norm is only more noise"
            raise PlanError.of("local.clip", clip, f"at most 1 with {LEAST_SQUARES}", remedy)

    def _check_regression(self) -> None:
        loss, name = self.model.loss, self.model.name
        if loss is None:
            if self.data.target is not None:
                where = "without model.loss = squared or huber"
                remedy = "remove it, or say how the number is predicted"
                raise PlanError.no_effect("data.target", where, remedy)
            return
        is_named = name != CUSTOM
        if is_named == (loss == "own"):
            wanted = "squared or huber with" if is_named else "own with"
            remedy = "a custom model brings its loss, which gets numbers, and no other does"
            raise PlanError.of("model.loss", loss, f"{wanted} model.name = {name}", remedy)
        if is_named and not find_model(name).predicts_numbers:
            remedy = (
                f"the {name} tells classes apart; choose softmax, or another that predicts numbers"
            )
            raise PlanError.of("model.loss", loss, f"absent with model.name = {name}", remedy)
        for key, value, bound in (
            ("model.class_weights", self.model.class_weights, None),
            ("data.split", self.data.split, "iid, sizes, order or column"),
        ):
            if value is not None and (bound is None or value in ("labels", "dirichlet")):
                remedy = "a number has no classes"
                raise PlanError.of(key, value, f"{bound or 'absent'} with model.loss", remedy)
        if self.data.target is not None and self.data.label in (self.data.columns or ()):
            raise PlanError(
                f"data.columns.{self.data.label} and data.target both give the label's range; "
                "remove one of the two"
            )
        if self.regression is None:
            bound = f"[low, high] with model.loss = {loss}"
            remedy = "give the public range of the label, never one taken from the rows"
            raise PlanError.of("data.target", None, bound, remedy)

    @property
    def regression(self) -> Regression | None:
        """The number that is predicted, with its loss and public range; None: classes are.

        The range of a table's label may also stand in `data.columns`.
        """
        if self.model.loss is None:
            return None
        label, columns = str(self.data.label), self.data.columns or Columns()
        where = "data.target" if self.data.target is not None else f"data.columns.{label}"
        try:  # a label's column is read as categories: here they are two numbers
            low, high = map(float, self.data.target or columns.get(label, ()))
        except ValueError:
            return None
        return Regression(self.model.loss, *check_bounds(where, (low, high)))

    def _check_clients(self) -> None:
        clients = self.data.clients
        if clients is None:  # the table says how many there are, and is read later
            return
        if self.per_round > clients:
            bound = f"at most data.clients = {clients}"
            remedy = "no more than all clients upload in a round"
            raise PlanError.of("rounds.per_round", self.per_round, bound, remedy)
        for key in ("epsilon", "delta"):
            values = getattr(self.privacy, key)
            if isinstance(values, tuple) and len(values) != clients:
                raise PlanError(
                    f"privacy.{key} is a list of {len(values)} and data.clients is {clients}; "
                    "give one number for all, or one for each client"
                )

    @classmethod
    def load(cls, path: str | Path | None = None, overrides: Sequence[str] = ()) -> Self:
        """Load the plan of a TOML file, or the embedded one, with `--set` overrides (KEY=VALUE).

        An override drops the keys of its section that it leaves without effect, as another model,
        schedule or split those of the old one, and `privacy.clients` both budgets. Another dataset
        or table also drops how many rows each party has. Keys set by overrides are kept.
        `data.path`, a file as `data.validation` or `data.test`, `model.own`, a file of
        `model.features`, and `privacy.clients` are relative to the plan's folder in a file, to the
        current one in an override.
        """
        if path is None:
            default = resources.files("sottovoce.plan").joinpath("default.toml")
            return cls.from_toml(default.read_text("utf-8"), overrides)
        text = base.read_text(path, "the plan")
        source = f"the plan {format_name(Path(path).name)}"
        return cls.from_toml(text, overrides, folder=Path(path).parent, source=source)

    @classmethod
    def from_toml(
        cls,
        text: str,
        overrides: Sequence[str] = (),
        *,
        folder: str | Path = "",
        source: str = "the plan",
    ) -> Self:
        """Load the plan of a TOML text; the paths in it are relative to `folder`."""
        values = base.parse_toml(text, source)
        changes = dict(base.parse_setting(override) for override in overrides)
        data, privacy = values.get("data"), values.get("privacy")
        if isinstance(data, dict):
            for key in ("path", "validation", "test"):
                if isinstance(data.get(key), str) and data[key]:
                    data[key] = str(Path(folder, data[key]))
        model = values.get("model")
        if isinstance(model, dict) and isinstance(model.get("own"), str):
            model["own"] = resolve_beside(model["own"], folder)
        if isinstance(model, dict) and isinstance(model.get("features"), str):
            model["features"] = resolve_network(model["features"], folder)
        if isinstance(privacy, dict) and isinstance(privacy.get("clients"), str):
            privacy["clients"] = str(Path(folder, privacy["clients"]))
            if changes.keys() & {"privacy.epsilon", "privacy.delta"}:
                # The file is read now, so that an override of ε keeps δ from the file, or reverse.
                budgets = Privacy(**privacy)
                values["privacy"] = privacy | {"epsilon": budgets.epsilon, "delta": budgets.delta}
                del values["privacy"]["clients"]
        # A file without a data section means the default data, not arrays from Python.
        return cls(**_apply_changes({"data": {}} | values, changes))

    @classmethod
    def read(cls, given: Any, overrides: Sequence[str] = ()) -> Self:
        """Return a plan: itself, that of a TOML file or of a dictionary; None is all defaults."""
        if isinstance(given, str | Path):
            return cls.load(given, overrides)
        if given is None or isinstance(given, Mapping):
            given = cls(given)
        if not isinstance(given, cls):
            bound = "a Plan, the path of a TOML file, or a dictionary"
            raise PlanError.of("plan", type(given).__name__, bound, "make one with sottovoce.Plan")
        changes = dict(base.parse_setting(override) for override in overrides)
        return cls(**_apply_changes(given._dump(), changes)) if changes else given

    def replace(self, *settings: str, **values: object) -> Self:
        """Return this plan with other values, given as for `--set` or by dotted names.

        Keys that lose their effect by it are dropped as in `load`.

        >>> plan = Plan.load().replace("rounds.schedule=fixed", **{"privacy.epsilon": 4})
        >>> plan.rounds.beta is None, plan.privacy.epsilon
        (True, 4.0)
        """
        parsed = (base.parse_setting(setting, is_option=False) for setting in settings)
        changes = dict(parsed) | values
        return type(self)(**_apply_changes(self._dump(), changes))

    def to_toml(self) -> str:
        """Write the plan as TOML; loading it gives this plan again."""
        return base.write_toml(self._dump())

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as plain data with K filled in, as in a run record.

        Keys without effect are left out; `data.samples` is absent when it means "all there are".
        """
        values = self._dump()
        if self.data.clients is not None:
            values["rounds"]["per_round"] = self.per_round
        return values

    def _dump(self) -> dict[str, Any]:
        return self.model_dump(mode="json", by_alias=True, exclude_none=True)

    @property
    def per_round(self) -> int:
        """K: the number of clients that upload in a round."""
        return self.clients if self.rounds.per_round is None else self.rounds.per_round

    @property
    def clients(self) -> int:
        """U: the number of clients; with `data.client` only the table knows it.

        >>> Plan(data={"path": "a.csv", "label": "y", "client": "who", "infer": True}).clients
        Traceback (most recent call last):
            ...
        sottovoce.errors.PlanError: data.clients follows from the column data.client; read the table
        """
        if self.data.clients is None:
            raise PlanError("data.clients follows from the column data.client; read the table")
        return self.data.clients

    def choose_learning_rate(self, samples: Sequence[int] | NDArray[np.int64], clip: float) -> Plan:
        """Return the plan with a number for `local.learning_rate = "auto"`, by public numbers.

        The noise of all T rounds adds up in each parameter of the model to about 2ηTC√U/(μN), for U
        clients with N samples in all and budgets worth μ. η makes that a fixed size: a linear
        model of inputs from −1 to 1 starts at 0 and has weights of a few units, a larger model, or
        one of a network's many features, has smaller ones. docs/own-data.md has what this reaches.
        With few rounds such steps would be long. A round moves the model by at most ηCE; where that
        is more than `LARGEST_MOVE`, scores swing and nothing is learnt.
        """
        if self.local.learning_rate != "auto":
            return self
        from sottovoce.privacy.calibration import capacity  # which takes a while to load

        worth = capacity(self.privacy.epsilon, self.privacy.delta, calibration="exact")
        worth = worth * (self.privacy.honest or 1)  # where only sums are seen, noise is shared
        sizes = np.ones(len(samples)) if self.local.unit == "client" else np.asarray(samples)
        is_small = self.model.name in ("softmax", "svm") and not self.model.has_network
        noise = TOTAL_NOISE if is_small else TOTAL_NOISE_DEEP
        moves = clip * self.local.steps  # of a round, for η = 1
        drift = 2 * moves * self.rounds.rounds * math.sqrt(len(sizes))
        rate = noise * math.sqrt(float(np.median(worth))) * float(sizes.sum()) / drift
        return self.replace(**{"local.learning_rate": max(min(rate, LARGEST_MOVE / moves), 1e-6)})

    @property
    def rows_per_person(self) -> int:
        """How many rows a sample has at most where persons are protected; 0: a sample is a row."""
        return (self.data.rows_per_person or ROWS_PER_PERSON) * (self.local.unit == "person")

    @property
    def evaluates_on_unit(self) -> bool:
        """Whether rows that the server evaluates on belong to the protected unit."""
        if self.local.unit not in LARGER_UNITS:
            return False
        return self.data.evaluates_on_clients and not self.data.evaluation

    def budgets(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return ε and δ of each client."""
        epsilon, delta = self.privacy.epsilon, self.privacy.delta
        return np.full(self.clients, epsilon, np.float64), np.full(self.clients, delta, np.float64)

    def schedule(self) -> Schedule:
        """Build the schedule, which decides the rounds."""
        return self.rounds.build()

    def recipe(self, median: float = 1.0) -> Recipe:
        """Return the recipe of a client, from which the sensitivity follows.

        `median` is the clipping norm C where the plan says "median" instead of a number.
        """
        return replace(self.local.recipe(median), class_weights=self.class_weights)

    @property
    def class_weights(self) -> tuple[float, ...] | None:
        """The weights of the classes, the largest of which is 1; None: all classes count alike.

        >>> balanced = {"model.class_weights": "balanced", "data.prevalence": [0.8, 0.2]}
        >>> Plan(data={"name": "adult"}).replace(**balanced).class_weights
        (0.25, 1.0)
        """
        weights = self.model.class_weights
        if weights is None:
            return None
        numbers = [1 / share for share in self.data.prevalence or ()]
        numbers = numbers if isinstance(weights, str) else list(weights)
        return tuple(weight / max(numbers) for weight in numbers)

    @classmethod
    def json_schema(cls) -> dict[str, Any]:
        """Return the JSON Schema of a plan, which is schemas/plan.json."""
        dialect = {"$schema": "https://json-schema.org/draft/2020-12/schema"}
        about = {"title": "sottovoce plan", "description": "Everything that will run."}
        return dialect | cls.model_json_schema() | about

    @classmethod
    def template(cls) -> str:
        """Return the embedded plan with every key explained, as `sottovoce init` writes it."""
        values = cls.load()._dump()
        lines = [
            "# A plan for sottovoce train. A key that is absent has its default.",
            "# A key behind a # has no effect with the options chosen here, or need not be given.",
        ]
        lines += _explain_keys(cls, {k: v for k, v in values.items() if k not in TABLES})
        for title, table in TABLES.items():
            about = (table.__doc__ or "").strip()
            lines += ["", f"[{title}]  # {about}", *_explain_keys(table, values[title])]
        return "\n".join(lines) + "\n"


#: What `choose_learning_rate` lets the noise of a run add up to in a parameter.
TOTAL_NOISE, TOTAL_NOISE_DEEP = 1.2, 0.25
LARGEST_MOVE = 8.0  # of the model in a round, ηCE; measured on tables of 4 to 784 inputs


def _add_defaults(values: dict[str, Any]) -> dict[str, Any]:
    """Return the values of a plan with the defaults that depend on other keys.

    A number to predict has a short step. The user's own rows, and a network's features, have a
    linear model, a fixed number of rounds and a step by a public rule: on tables the loss that
    shortens a run of larger steps says little about a rare class.
    """
    # A section that is given as an object has all its keys.
    tables = {key: value for key, value in values.items() if isinstance(value, Mapping)}
    data, model = tables.get("data", {}), tables.get("model", {})
    defaults: dict[str, dict[str, Any]] = {}
    has_network = is_network(str(model.get("features")))
    if data.get("path") is not None or has_network:
        rounds, signal = tables.get("rounds", {}), tables.get("server", {}).get("signal")
        rounds_of_own = 100 if has_network else 200
        defaults = {"local": {"learning_rate": "auto"}, "rounds": {"rounds": rounds_of_own}}
        # A key that only one model or schedule has chooses it: no default stands in its way.
        if (
            not {key for key, when in ModelSection.conditions() if when.switch == "name"}
            & model.keys()
        ):
            defaults["model"] = {"name": "softmax"}
        if signal != "clients" and not dict(Rounds.conditions()).keys() & rounds.keys():
            defaults["rounds"]["schedule"] = "fixed"
    if model.get("loss") is not None:
        defaults["local"] = {"learning_rate": NUMBER_RATE}
    if model.get("name") == LEAST_SQUARES:  # its uploads are moments, of which η is a mere factor
        defaults["local"] = {"learning_rate": 1.0}
        defaults["rounds"] = {"schedule": "fixed", "rounds": 1}
    absent: dict[str, Any] = {title: {} for title in defaults if title not in values}
    sections = tables | absent
    return values | {
        title: {**keys, **sections[title]} for title, keys in defaults.items() if title in sections
    }


def _explain_keys(table: type[Section], values: Mapping[str, Any]) -> Iterator[str]:
    when = dict(table.conditions())
    for key, schema in table.model_json_schema()["properties"].items():
        if "$ref" in schema:
            continue
        default = when[key].default if key in when else schema.get("default")
        yield f"# {schema['description']}"
        if "const" not in schema:
            usual = "" if default is None else f"; default {default}"
            yield f"#   {base.describe_schema(schema)}{usual}"
        if key in values:
            yield f"{key} = {base.format_value(values[key])}"
        else:
            example = schema["examples"][0] if default is None else default
            yield f"# {key} = {base.format_value(example)}"


def _apply_changes(values: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Apply the changes, and drop the keys that then have no effect."""
    new = {key: dict(v) if isinstance(v, Mapping) else v for key, v in values.items()}
    for name, value in changes.items():
        section, key = split_key(name)
        if name in TABLES:
            first = next(iter(TABLES[name].model_fields))
            raise PlanError(f"{name} is a section; set one of its keys, as {name}.{first}")
        table, old = new.get(section), values.get(section)
        if isinstance(table, dict) and section in TABLES:
            for gone in _find_dropped_keys(section, key, value, table):
                table.pop(gone, None)
        is_same = isinstance(old, Mapping) and old.get(key) == value
        if section in ("model", "local", "rounds", "server") and not is_same:
            new.pop("rehearsed", None)  # the note on what a rehearsal chose is out of date
    # Rounds that are steered by a loss are not forecast.
    is_steered = bool(changes.keys() & {"rounds.beta", "rounds.zeta", "rounds.window"})
    is_steered = is_steered or changes.get("server.signal", "public") != "public"
    rounds = new.get("rounds")
    if is_steered and isinstance(rounds, dict) and rounds.get("schedule") == "forecast":
        rounds["schedule"] = "discounted"
    for name, value in changes.items():
        section, key = split_key(name)
        table = new.setdefault(section, {}) if section else new
        if isinstance(table, dict):
            table[key] = value
        elif section not in TABLES:  # a section that is not a table is refused with the plan
            raise PlanError(f"unknown key {format_name(section, key)}; {section} is no section")
    return new


def _find_dropped_keys(section: str, key: str, value: Any, old: Mapping[str, Any]) -> list[str]:
    """Return the keys of a section that have no effect after this change."""
    conditions = TABLES[section].conditions()
    gone = [k for k, when in conditions if when.switch == key and when.value != value]
    match section, key:
        case "privacy", "clients":  # the file has both
            gone = ["epsilon", "delta"]
        # Another dataset, or a table instead of one, has other rows, and nothing of a table stays.
        case "data", "name" if value != (None if "path" in old else old.get("name", "digits")):
            gone += ["path", *TABLE_KEYS, "samples", "validation", "test", "public"]
            gone += ["split"] if "client" in old else []
        case "data", "path" if "path" not in old:
            gone += ["name", "samples", "validation", "test", "public"]
        case "data", "client" if "client" not in old:  # the column says who holds what
            gone += ["clients", "split", "samples", "labels_per_client", "alpha"]
        case "data", "split":  # how many rows fit depends on how they are dealt
            gone += ["samples"] if value != old.get("split", "iid") else []
            gone += ["client", "evaluation"] if value != "column" else []
    return gone
