"""What will run: everything a guarantee depends on, frozen, in one value.

A plan is complete by itself: a key that is absent has its default, which is that of the embedded
plan (`default.toml`); nothing is merged from elsewhere. Unknown keys, unknown names, and keys that
have no effect with the options chosen are refused, each in one sentence and before any data is
read. The tables and their keys stand in `sections`.
"""

from __future__ import annotations

import csv
import json
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import BeforeValidator, Field, model_validator

from sottovoce.errors import InputError, PlanError
from sottovoce.models.custom import resolve_beside
from sottovoce.plan.data import TABLE_KEYS, Data
from sottovoce.plan.section import TABLES, Section, expected, named
from sottovoce.plan.sections import Local, Model, Privacy, Rounds, Server
from sottovoce.privacy.budget import LARGER_UNITS, Budget
from sottovoce.privacy.sensitivity import Recipe
from sottovoce.schedules.base import Schedule

# Plans as text: reading TOML, `--set` and the file of budgets, and writing TOML.
#
# Everything here turns text into plain data or back; what the data must be is checked in `plan`.


BUDGET_COLUMNS = ["id", "epsilon", "delta"]


def read(path: str | Path, what: str) -> str:
    """The text of a file, or a sentence why there is none."""
    try:
        # A byte order mark at the start (Windows) is no part of the text.
        return Path(path).read_bytes().decode("utf-8-sig")
    except FileNotFoundError:
        why = "there is no such file"
    except IsADirectoryError:
        why = "it is a folder, name the file in it"
    except UnicodeDecodeError as error:
        why = f"it is not UTF-8 text (byte {error.start}), save it as UTF-8"
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        why = getattr(error, "strerror", None) or "that is no path"
    raise PlanError(f"{what} {_shown(path)} cannot be read: {why}")


def parse(text: str, source: str = "the plan") -> dict[str, Any]:
    """TOML as plain data.

    >>> parse("[data]\\nclients = ")
    Traceback (most recent call last):
        ...
    sottovoce.errors.PlanError: the plan is not valid TOML: Invalid value (at line 2, the end)
    """
    try:
        values = tomllib.loads(text)
    except RecursionError:
        raise PlanError(f"{source} is not a plan: its values are nested too deeply") from None
    except ValueError as error:  # TOMLDecodeError, or a number with thousands of digits
        why = str(error).replace("end of document", f"line {len(text.splitlines())}, the end")
        if not isinstance(error, tomllib.TOMLDecodeError):
            why = "it has a number or a date that is too large to be one"
        why = re.sub(r"\s+", " ", why)
        # The place stands at the end of the message, so a long one is cut in its middle.
        why = why if len(why) <= 160 else f"{why[:100]}...{why[-50:]}"
        raise PlanError(f"{source} is not valid TOML: {why}") from None
    if not values:
        raise PlanError(f"{source} is empty; sottovoce init writes a plan with every key explained")
    return values


def parse_setting(text: str) -> tuple[str, Any]:
    """`KEY=VALUE`, the value being TOML or else taken as a word.

    >>> parse_setting("privacy.epsilon=4"), parse_setting("model.name=cnn")
    (('privacy.epsilon', 4), ('model.name', 'cnn'))
    >>> parse_setting("epsilon")
    Traceback (most recent call last):
        ...
    sottovoce.errors.PlanError: --set takes KEY=VALUE, got 'epsilon'; for example \
--set privacy.epsilon=4
    """
    key, equals, word = (part.strip() for part in text.partition("="))
    if not (key and equals and word):
        raise PlanError(
            f"--set takes KEY=VALUE, got {_shown(text)}; for example --set privacy.epsilon=4"
        )
    try:
        values = tomllib.loads(f"value = {word}")
    except (ValueError, RecursionError):
        return key, word
    # A line break in the word could have started a second key.
    return key, values["value"] if list(values) == ["value"] else word


def split_key(key: str) -> tuple[str, str]:
    """`section.key` or a key at the top of the plan as ("", key).

    >>> split_key("privacy.epsilon"), split_key("noise")
    (('privacy', 'epsilon'), ('', 'noise'))
    """
    parts = key.split(".")
    if len(parts) > 2 or not all(parts):
        raise PlanError(f"unknown key {_shown(key)}; a key is section.name, as privacy.epsilon")
    return (parts[0], parts[1]) if len(parts) == 2 else ("", key)


def read_budgets(path: str | Path) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """ε and δ of clients 0, 1, 2, … from a CSV file with the columns id, epsilon, delta."""
    where = f"privacy.clients {_shown(path)}"
    rows = csv.reader(read(path, "privacy.clients").splitlines())
    found: dict[int, Budget] = {}
    try:
        header = [name.strip().lower() for name in next(rows, [])]
        if header != BUDGET_COLUMNS:
            raise PlanError(f"{where} line 1 must be id,epsilon,delta; name the columns there")
        for row in rows:
            line = f"{where} line {rows.line_num}"
            if not row:
                continue
            try:
                client, epsilon, delta = int(row[0]), float(row[1]), float(row[2])
            except (ValueError, IndexError):
                raise PlanError(f"{line} must be three numbers: id, epsilon, delta") from None
            if len(row) != 3:
                raise PlanError(f"{line} must be three numbers: id, epsilon, delta")
            if client in found:
                raise PlanError(f"{line} repeats client {client}; each id stands there once")
            try:
                found[client] = Budget(epsilon, delta)
            except InputError as error:
                raise PlanError(f"{line}: {error}") from None
    except csv.Error as error:
        raise PlanError(f"{where} line {rows.line_num} is not CSV: {error}") from None
    if not found:
        raise PlanError(f"{where} has no clients; give each a line id,epsilon,delta")
    missing = next((client for client in range(len(found)) if client not in found), None)
    if missing is not None:
        raise PlanError(
            f"{where} has {len(found)} clients but no id {missing}; ids run from 0 without a gap"
        )
    budgets = [found[client] for client in range(len(found))]
    return tuple(b.epsilon for b in budgets), tuple(b.delta for b in budgets)


def write(values: Mapping[str, Any]) -> str:
    """Plain data of two levels, or three, as TOML.

    >>> print(write({"schema": 1, "data": {"name": "digits", "samples": [3, 4]}}), end="")
    schema = 1
    <BLANKLINE>
    [data]
    name = "digits"
    samples = [3, 4]
    """
    lines = [f"{key} = {value_text(v)}" for key, v in values.items() if not isinstance(v, Mapping)]
    for section, keys in values.items():
        if isinstance(keys, Mapping):
            flat = {key: v for key, v in keys.items() if not isinstance(v, Mapping)}
            lines += ["", f"[{section}]", *(f"{key} = {value_text(v)}" for key, v in flat.items())]
            for key in (key for key in keys if key not in flat):
                lines += ["", f"[{section}.{key}]"]
                lines += [f"{key_text(name)} = {value_text(v)}" for name, v in keys[key].items()]
    return "\n".join(lines) + "\n"


def value_text(value: Any) -> str:
    """One value as TOML: JSON writes strings, numbers and lists the same way.

    >>> value_text(1e-5), value_text("mlp"), value_text({"age": [0, 9], "a b": ["é"]})
    ('1e-05', '"mlp"', '{age = [0, 9], "a b" = ["é"]}')
    """
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key_text(k)} = {value_text(v)}" for k, v in value.items()) + "}"
    # Not ASCII: JSON's escapes beyond the first 65,536 characters are none of TOML's.
    text = json.dumps(value, allow_nan=False, ensure_ascii=False)
    return text.replace("\x7f", "\\u007f")


def key_text(key: str) -> str:
    """A key as TOML, in quotes where it needs them.

    >>> key_text("age"), key_text("marital status")
    ('age', '"marital status"')
    """
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else value_text(key)


def _shown(value: object) -> str:
    text = ascii(str(value))
    return text if len(text) <= 80 else f"{text[:30]}...{text[-47:]}"


def _first_version(value: Any) -> Any:
    if isinstance(value, bool):  # equals 1, and so would pass for a version
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

    schema_version: Annotated[Literal[1], BeforeValidator(_first_version)] = Field(
        default=1, alias="schema", description="the version of this format"
    )
    noise: Literal["simulated", "secure"] = Field(
        default="simulated",
        description="where noise comes from (simulated: a forecast; secure: a real release)",
    )
    rehearsed: Annotated[str, Field(max_length=2000)] | None = Field(
        default=None,
        description="how settings were chosen; sottovoce rehearse writes it, the card shows it",
        examples=["local.clip by sottovoce rehearse on rows.npz"],
    )
    data: Data = Field(default_factory=lambda: Data())
    model: Model = Field(default_factory=lambda: Model())
    local: Local = Field(default_factory=lambda: Local())
    privacy: Privacy = Field(default_factory=lambda: Privacy())
    rounds: Rounds = Field(default_factory=lambda: Rounds())
    server: Server = Field(default_factory=lambda: Server())

    def __init__(self, /, **values: Any) -> None:
        """Sections are given as objects (`Data(...)`) or as mappings, by their names in TOML."""
        super().__init__(**values)

    @classmethod
    def title(cls) -> str:
        """The top of a plan has no name."""
        return ""

    @model_validator(mode="before")
    @classmethod
    def _with_tables(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        return {key: _table(key, value) for key, value in values.items()}

    @model_validator(mode="after")
    def _agrees(self) -> Self:
        self._fits_clients()
        self._fits_model()
        if self.server.signal == "clients" and self.rounds.schedule != "discounted":
            raise PlanError(
                "server.signal = clients pays for losses that rounds.schedule = "
                f"{self.rounds.schedule} never looks at; choose public, or discounted"
            )
        if self.server.choose == "best" and self.data.validation == 0:
            raise PlanError.of(
                "server.choose",
                "best",
                "last with data.validation = 0",
                "the test rows would choose the model that they test",
            )
        if self.noise == "secure":
            self._is_a_release()
        elif self.server.aggregation not in (None, "mean"):
            raise PlanError.of(
                "server.aggregation",
                self.server.aggregation,
                "mean with noise = simulated",
                "simulation computes the mean of all uploads and no single one; set noise = secure",
            )
        if self.local.steps > 1 and self.privacy.calibration == "paper":
            raise PlanError.of(
                "local.steps",
                self.local.steps,
                "1 with privacy.calibration = paper",
                "the paper's theorem knows one step a round",
            )
        return self

    def _is_a_release(self) -> None:
        """What exists in simulation only must not carry the name of a release."""
        if self.data.infer:
            raise PlanError.of(
                "data.infer",
                True,
                "false with noise = secure",
                "bounds taken from the data are a release that nobody pays for; declare columns",
            )
        if self.evaluates_on_unit:
            key = "test" if isinstance(self.data.validation, str) else "validation"
            raise PlanError.of(
                f"data.{key}",
                getattr(self.data, key),
                f"a file with local.unit = {self.local.unit} and noise = secure",
                "a client's own rows would reach the server raw and are part of what is protected; "
                "or declare them public by data.evaluation = public",
            )
        private = self.data.path is not None or self.data.name == "arrays"
        if private and self.data.split in ("labels", "dirichlet"):
            raise PlanError.of(
                "data.split",
                self.data.split,
                "iid, sizes, order or column with noise = secure",
                "dealt by their labels, one person's row moves the rows of every other client",
            )
        for key, value, instead in (
            ("privacy.calibration", self.privacy.calibration, "exact or zcdp"),
            ("server.signal", self.server.signal, "public or clients"),
            ("local.clip", self.local.clip, "a number"),
        ):
            if value in ("paper", "raw", "median"):
                raise PlanError.of(
                    key,
                    value,
                    f"{instead} with noise = secure",
                    "the paper's way looks at data that nobody pays for"
                    if value != "paper"
                    else "the paper's formula does not keep its promise",
                )

    def _fits_model(self) -> None:
        own, classes, name = self.data, self.data.classes, self.model.name
        source = f"data.name = {own.name}" if own.path is None else "data.path"
        most, fitting = self.model.most_classes, self.model.fitting(classes, own.pictures)
        # Without a data section arrays may yet be given from Python.
        is_given = "data" in self.model_fields_set
        if is_given and most is not None and classes is not None and classes > most:
            what = own.name or f"the label {own.label}"
            raise PlanError.of(
                "model.name",
                name,
                f"{fitting} with {source}",
                f"the {name} tells {most} classes apart and {what} has {classes}",
            )
        if self.model.takes_pictures and not own.pictures:
            raise PlanError.of(
                "model.name",
                name,
                f"{fitting} with {source}",
                f"the {name} is for pictures and {own.name or 'this'} is a table",
            )

        if self.model.features is not None and not own.pictures:
            raise PlanError.of(
                "model.features",
                self.model.features,
                f"absent with {source}",
                f"gradient histograms are of pictures and {own.name or 'this'} is a table",
            )

        if self.model.colours and own.name in ("mnist", "digits"):
            raise PlanError.of(
                "model.colours", True, f"absent with {source}", "these pictures are grey"
            )

    def _fits_clients(self) -> None:
        clients = self.data.clients
        if clients is None:  # they follow from the table: checked when it has been read
            return
        if self.per_round > clients:
            raise PlanError.of(
                "rounds.per_round",
                self.per_round,
                f"at most data.clients = {clients}",
                "no more than all clients upload in a round",
            )
        for key in ("epsilon", "delta"):
            values = getattr(self.privacy, key)
            if isinstance(values, tuple) and len(values) != clients:
                raise PlanError(
                    f"privacy.{key} is a list of {len(values)} and data.clients is {clients}; "
                    "give one number for all, or one for each client"
                )

    @classmethod
    def load(cls, path: str | Path | None = None, overrides: Sequence[str] = ()) -> Self:
        """The plan in a TOML file, or the embedded one, with `--set` overrides (KEY=VALUE).

        An override that changes `data.name`, `data.split`, `model.name` or `rounds.schedule` drops
        the keys of the file that the change leaves without effect, and a new `data.name` also drops
        `data.samples`, `data.validation` and `data.test`; what overrides set themselves is kept.
        `data.path`, a file as `data.validation` or `data.test`, `model.own` and `privacy.clients`
        are relative to the plan's folder in a file, to the current one in an override.

        >>> Plan.load(None, ["rounds.schedule=fixed", "rounds.rounds=60"]).schedule()
        FixedRounds(rounds=60)
        """
        if path is None:
            return cls.from_toml(_embedded(), overrides)
        text = read(path, "the plan")
        source = f"the plan {named(Path(path).name)}"
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
        """The plan in a TOML text; `folder` is where the files it names are looked for.

        >>> Plan.from_toml("[privacy]\\nepsilon = -1")
        Traceback (most recent call last):
            ...
        sottovoce.errors.PlanError: privacy.epsilon must be a finite number ≥ 1e-06, got -1.0; \
choose how much may be learnt about one unit, 1 is strong and 8 is usual
        """
        values = parse(text, source)
        changes = dict(parse_setting(override) for override in overrides)
        data, privacy = values.get("data"), values.get("privacy")
        if isinstance(data, dict):
            for key in ("path", "validation", "test"):
                if isinstance(data.get(key), str) and data[key]:
                    data[key] = str(Path(folder, data[key]))
        model = values.get("model")
        if isinstance(model, dict) and isinstance(model.get("own"), str):
            model["own"] = resolve_beside(model["own"], folder)
        if isinstance(privacy, dict) and isinstance(privacy.get("clients"), str):
            privacy["clients"] = str(Path(folder, privacy["clients"]))
            if changes.keys() & {"privacy.epsilon", "privacy.delta"}:
                # Read now, so that an override of one number keeps the other from the file.
                read = Privacy(**privacy)
                values["privacy"] = privacy | {"epsilon": read.epsilon, "delta": read.delta}
                del values["privacy"]["clients"]
        # A file without a data section means the default data, not arrays from Python.
        return cls(**_changed({"data": {}} | values, changes))

    def replace(self, *settings: str, **values: object) -> Self:
        """The same plan but for these keys, given as for `--set` or as dotted names and values.

        Keys that lose their effect are dropped, as in `load`.

        >>> plan = Plan.load().replace("rounds.schedule=fixed", **{"privacy.epsilon": 4})
        >>> plan.rounds.beta is None, plan.privacy.epsilon
        (True, 4.0)
        """
        changes = dict(parse_setting(setting) for setting in settings) | values
        return type(self)(**_changed(self._given(), changes))

    def to_toml(self) -> str:
        """The plan as TOML: loading it gives this plan again.

        >>> plan = Plan.load(None, ["privacy.epsilon=4"])
        >>> Plan.from_toml(plan.to_toml()) == plan
        True
        """
        return write(self._given())

    def to_dict(self) -> dict[str, Any]:
        """The plan as plain data with K filled in: what stands in a record.

        Keys without effect are left out; `data.samples` is absent when it means "all there are".

        >>> Plan().to_dict()["rounds"]["per_round"]
        10
        """
        values = self._given()
        if self.data.clients is not None:
            values["rounds"]["per_round"] = self.per_round
        return values

    def _given(self) -> dict[str, Any]:
        return self.model_dump(mode="json", by_alias=True, exclude_none=True)

    @property
    def per_round(self) -> int:
        """K: how many clients upload in a round."""
        return self.clients if self.rounds.per_round is None else self.rounds.per_round

    @property
    def clients(self) -> int:
        """U: how many clients there are; with `data.client` the table says it first.

        >>> Plan(data={"path": "a.csv", "label": "y", "client": "who", "infer": True}).clients
        Traceback (most recent call last):
            ...
        sottovoce.errors.PlanError: data.clients follows from the column data.client; read the table
        """
        if self.data.clients is None:
            raise PlanError("data.clients follows from the column data.client; read the table")
        return self.data.clients

    @property
    def evaluates_on_unit(self) -> bool:
        """Whether rows that the server evaluates on are part of the protected unit."""
        own = self.data
        return self.local.unit in LARGER_UNITS and own.evaluates_on_clients and not own.evaluation

    def budgets(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """ε and δ of each client.

        >>> Plan(data={"clients": 2}, privacy={"epsilon": [1, 8]}).budgets()
        (array([1., 8.]), array([1.e-05, 1.e-05]))
        """
        epsilon, delta = (
            np.full(self.clients, values, dtype=np.float64)
            for values in (self.privacy.epsilon, self.privacy.delta)
        )
        return epsilon, delta

    def schedule(self) -> Schedule:
        """What decides the rounds.

        >>> Plan().schedule()
        DiscountedRounds(rounds=120, beta=0.8, zeta=0.0, window=3)
        """
        return self.rounds.build()

    def recipe(self, median: float = 1.0) -> Recipe:
        """What a client does, from which the sensitivity follows.

        `median` is the clipping norm C where the plan says "median" instead of a number.

        >>> float(Plan().recipe().sensitivity(143).round(6))
        0.027972
        """
        return self.local.recipe(median)

    @classmethod
    def json_schema(cls) -> dict[str, Any]:
        """The JSON Schema of a plan; schemas/plan.json is this.

        >>> sorted(Plan.json_schema()["properties"])[:3]
        ['data', 'local', 'model']
        """
        dialect = {"$schema": "https://json-schema.org/draft/2020-12/schema"}
        about = {"title": "sottovoce plan", "description": "Everything that will run."}
        return dialect | cls.model_json_schema() | about

    @classmethod
    def template(cls) -> str:
        """The embedded plan with every key explained: what `sottovoce init` writes.

        >>> Plan.from_toml(Plan.template()) == Plan.load()
        True
        """
        values = cls.load()._given()
        lines = [
            "# A plan for sottovoce train. A key that is absent has its default.",
            "# A key behind a # has no effect with the options chosen here, or need not be given.",
        ]
        lines += _explained(cls, {k: v for k, v in values.items() if k not in TABLES})
        for title, table in TABLES.items():
            about = (table.__doc__ or "").strip()
            lines += ["", f"[{title}]  # {about}", *_explained(table, values[title])]
        return "\n".join(lines) + "\n"


def _table(key: str, value: Any) -> Any:
    if key not in TABLES or isinstance(value, TABLES[key]):
        return value
    if not isinstance(value, Mapping) or not all(isinstance(name, str) for name in value):
        kind = type(value).__name__
        raise PlanError(f"{key} must be a table, got {kind}; write [{key}] and its keys below it")
    return TABLES[key](**value)


def _explained(table: type[Section], values: Mapping[str, Any]) -> Iterator[str]:
    when = dict(table.conditions())
    for key, schema in table.model_json_schema()["properties"].items():
        if "$ref" in schema:
            continue
        default = when[key].default if key in when else schema.get("default")
        yield f"# {schema['description']}"
        if "const" not in schema:
            yield f"#   {expected(schema)}" + ("" if default is None else f"; default {default}")
        if key in values:
            yield f"{key} = {value_text(values[key])}"
        else:
            shown = schema["examples"][0] if default is None else default
            yield f"# {key} = {value_text(shown)}"


def _embedded() -> str:
    return resources.files("sottovoce.plan").joinpath("default.toml").read_text("utf-8")


def _changed(values: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """`values` with the changes, without what a change leaves behind meaningless."""
    new = {key: dict(v) if isinstance(v, Mapping) else v for key, v in values.items()}
    for name, value in changes.items():
        section, key = split_key(name)
        if name in TABLES:
            first = next(iter(TABLES[name].model_fields))
            raise PlanError(f"{name} is a section; set one of its keys, as {name}.{first}")
        table = new.get(section)
        if isinstance(table, dict) and section in TABLES:
            for gone in _left_behind(TABLES[section], key, value, table):
                table.pop(gone, None)
    if any(_chosen_anew(values, name, value) for name, value in changes.items()):
        new.pop("rehearsed", None)
    for name, value in changes.items():
        section, key = split_key(name)
        table = new.setdefault(section, {}) if section else new
        if isinstance(table, dict):
            table[key] = value
        elif section not in TABLES:  # a section that is none is refused with the plan itself
            raise PlanError(f"unknown key {named(section, key)}; {section} is no section")
    return new


def _chosen_anew(values: Mapping[str, Any], name: str, value: Any) -> bool:
    """Whether a change is of what a rehearsal chooses: then what it said of the plan is over."""
    section, key = split_key(name)
    own, free = values.get(section), section in ("model", "local", "rounds", "server")
    return free and not (isinstance(own, Mapping) and own.get(key) == value)


def _left_behind(table: type[Section], key: str, value: Any, old: Mapping[str, Any]) -> list[str]:
    if table is Privacy and key == "clients":
        return ["epsilon", "delta"]
    gone = [k for k, when in table.conditions() if when.switch == key and when.value != value]
    return gone + (_other_data(key, value, old) if table is Data else [])


def _other_data(key: str, value: Any, old: Mapping[str, Any]) -> list[str]:
    if key == "name" and value != (None if "path" in old else old.get("name", "digits")):
        own_split = ["split"] if "client" in old else []
        return ["path", *TABLE_KEYS, *own_split, "samples", "validation", "test", "public"]
    if key == "path" and "path" not in old:
        return ["name", "samples", "validation", "test", "public"]
    if key == "client" and "client" not in old:
        return ["clients", "split", "samples", "labels_per_client", "alpha"]
    if key == "split":
        # How many rows fit depends on how they are dealt.
        resized = ["samples"] if value != old.get("split", "iid") else []
        return resized + (["client", "evaluation"] if value != "column" else [])
    return []
