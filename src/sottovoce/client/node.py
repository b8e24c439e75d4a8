"""The node file: what a client has decided for itself, before any server asks.

It names the client, its vault, its rows ([data]), what was fixed when the vault was made ([policy])
and perhaps a model of its own ([model]); docs/deploy.md has one with every key. Paths are relative
to the file. The server cannot change any of it. No JAX, no pydantic: a device process starts in a
fraction of a second.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from sottovoce.client.vault import Policy, fingerprint
from sottovoce.client.vault.policy import LIMITS, SUM_TERMS
from sottovoce.data.files import read_npz, why
from sottovoce.errors import DataError, InputError
from sottovoce.models import custom
from sottovoce.models.base import WIDEST, OwnModel, Regression
from sottovoce.models.network import FILES, Lens, Network, as_samples, is_network, resolve_network
from sottovoce.models.person import (
    MOST_ROWS_PER_PERSON,
    ROWS_PER_PERSON,
    apply_to_rows,
    has_ids,
    join_persons,
)

TABLES = (".csv", ".parquet")
ANSWER_EVERY = 0.5  # seconds: longer than the difference between two datasets of a client
_NAMES = {
    "": "schema name vault answer_every data policy model",
    "data": "path classes label columns missing text target person rows_per_person",
    "policy": "epsilon delta clip unit calibration floor max_rounds disclose max_steps limits sum",
    "policy.limits": " ".join(LIMITS),
    "policy.sum": " ".join(("roster", "key", *SUM_TERMS)),
    "model": "own features",
}
_KEYS = {section: names.split() for section, names in _NAMES.items()}


@dataclass(frozen=True, eq=False)
class Rows:
    """A client's samples, as numbers: rows, or persons (`models.person`), whose y is 0."""

    x: NDArray[np.floating[Any]]
    y: NDArray[Any]  # classes, or numbers scaled to [−1, 1]
    classes: int
    fingerprint: str  # of the rows as the file has them, in any order, whoever they are about
    rows_per_person: int = 0  # 0: a sample is one row
    target: Regression | None = None  # with its range; the request names the loss
    encoding: str | None = None  # of a table: how its cells became numbers

    @property
    def features(self) -> int:
        """How many numbers a row has."""
        width = int(self.x.shape[1])
        return width // self.rows_per_person - 2 if self.rows_per_person else width

    def apply_features(self, lens: Lens | None, file: Path | None = None) -> NDArray[Any]:
        """Return the samples with these features; a network's are kept beside the rows' `file`."""
        if lens is None:
            return self.x
        apply = lens.apply
        if isinstance(lens, Network):
            apply = partial(lens.load_or_apply, beside=file)
        return apply_to_rows(apply, self.x, self.rows_per_person)


@dataclass(frozen=True, eq=False)
class Node:
    """A node file, read and checked; the data are read when they are needed."""

    name: str
    vault: Path
    data: Path
    classes: int | None
    table: Mapping[str, Any] | None
    terms: Mapping[str, Any]  # the policy as written, without the number of samples
    own: str | None = None  # a model in the client's own code
    features: str | None = None  # this client's copy of a network (`models.network`)
    answer_every: float = ANSWER_EVERY
    person: str | None = None
    rows_per_person: int = 0
    target: Regression | None = None  # the public range of a label that is a number
    sum_files: tuple[Path, Path] | None = None  # roster and key, where sums are released

    @classmethod
    def load(cls, path: str | Path) -> Node:
        """Read and check a node file; an error names key, value, bound and remedy."""
        path = Path(path)
        try:
            values = tomllib.loads(path.read_text("utf-8"))
        except FileNotFoundError:
            raise InputError.of("node", str(path), "a file that exists", "write one") from None
        except (OSError, ValueError, RecursionError) as error:  # also a number of 5,000 digits
            raise InputError(
                f"the node file {path.name} cannot be read as TOML: {why(error)}"
            ) from None
        _require_known_keys("", values)
        for section in ("data", "policy", "model"):
            table = values.get(section, {} if section == "model" else None)
            if not isinstance(table, dict):
                raise InputError(f"the node file {path.name} has no table [{section}]; add it")
            _require_known_keys(section, table)
        if type(values.get("schema")) is not int or values["schema"] != 1:
            raise InputError.of("schema", values.get("schema"), "1", "it is the file's version")
        data, folder = values["data"], path.parent
        limits, sums = (_pop_table(values["policy"], key) for key in ("limits", "sum"))
        sum_files = None
        if sums is not None:
            names = [_require_text(f"policy.sum.{k}", sums.pop(k, None)) for k in ("roster", "key")]
            sum_files = folder / names[0], folder / names[1]
        rows = folder / _require_text("data.path", data.get("path"))
        is_table = rows.suffix.lower() in TABLES
        node = cls(
            name=_require_text("name", values.get("name")),
            vault=folder / _require_text("vault", values.get("vault")),
            data=rows,
            classes=None if is_table else _require_classes(data),
            table=_check_table(data, is_table),
            terms={**values["policy"], **(limits or {}), **(sums or {})},
            sum_files=sum_files,
            answer_every=_require_seconds(values.get("answer_every", ANSWER_EVERY)),
            **_read_model(values.get("model", {}), folder),
            **_read_persons(data, values["policy"]),
            target=_read_target(data),
        )
        node.make_policy(samples=1)  # its errors are raised now, not at the first request
        return node

    def make_policy(self, samples: int, held: Policy | None = None) -> Policy:
        """Return the file's policy for so many samples.

        Limits that the file does not name are those of the vault's policy (`held`): a vault made
        before there were limits has none until its node file names them. So are the terms of sums
        where there is no [policy.sum]: it then takes part in none, and tightens nothing.
        """
        missing = [key for key in ("epsilon", "delta", "clip") if key not in self.terms]
        if missing:
            raise InputError(f"policy.{missing[0]} is missing in the node file; it has no default")
        names = (*LIMITS, *(SUM_TERMS if self.sum_files is None else ()))
        unnamed = {} if held is None else {name: getattr(held, name) for name in names}
        return Policy(samples=samples, **{**unnamed, **self.terms})

    def read_rows(self) -> Rows:
        """Read the client's samples; the server never does."""
        if self.table is not None:
            rows, person = _read_table(self.data, self.table, self.person, self.target)
        else:
            classes = cast(int, self.classes)
            rows, person = _read_arrays(self.data, classes, self.person, self.target)
        if person is None:
            return rows
        x = join_persons(rows.x.astype(np.float64), rows.y, person, self.rows_per_person)
        # The fingerprint stays: rows have one ledger on a machine, whatever unit is protected.
        no_labels = np.zeros(len(x), np.int64)
        return replace(rows, x=x, y=no_labels, rows_per_person=self.rows_per_person)

    def load_own_model(self) -> OwnModel | None:
        """Import the model that `model.own` names; None where the file names none."""
        if self.own is None:
            return None
        model = custom.find_object(self.own)
        if all(hasattr(model, name) for name in ("shapes", "gradients", "losses")):
            return cast(OwnModel, model)
        return custom.adopt_model(model, "model.own", self.own)


def _read_arrays(
    path: Path, classes: int, person: str | None, target: Regression | None = None
) -> tuple[Rows, NDArray[np.int64] | None]:
    names = ("x", "y") if person is None else ("x", "y", person)
    try:
        x, y, *ids = read_npz(path, *names).values()
    except (OSError, ValueError) as bad:
        raise DataError(f"{path} cannot be read as arrays {', '.join(names)}: {why(bad)}") from None
    if x.dtype.kind == "U" and x.ndim == 1:
        x = as_samples(x)
    kinds, words = ("iu", "whole numbers") if target is None else ("fiu", "numbers")
    if x.dtype.kind not in "fiu" or x.ndim < 2 or y.dtype.kind not in kinds or y.ndim != 1:
        raise DataError(f"{path}: x must be numbers with a row a sample, and y {words}")
    if len(x) != len(y) or len(y) == 0:
        raise DataError(f"{path}: x has {len(x)} rows and y {len(y)}; they must be equal, not 0")
    if any(array.shape != y.shape or not has_ids(array) for array in ids):
        raise DataError(f"{path}: {person} must have one id for each of the {len(y)} rows")
    rows = x.reshape(len(x), -1)
    rows = rows if rows.dtype.kind == "f" else rows.astype(np.float64)
    numbered = np.unique(ids[0], return_inverse=True)[1].reshape(-1) if ids else None
    if target is not None:
        if not np.isfinite(y).all():
            raise DataError(f"{path}: a target of y is missing or not finite")
        return Rows(rows, target.scale(y), 1, fingerprint(rows, y), target=target), numbered
    if y.min() < 0 or y.max() >= classes:
        raise DataError(f"{path}: a label of y is not from 0 to {classes - 1} (data.classes)")
    return Rows(rows, y.astype(int), classes, fingerprint(rows, y)), numbered


def _read_table(
    path: Path, table: Mapping[str, Any], person: str | None, target: Regression | None
) -> tuple[Rows, NDArray[np.int64] | None]:
    from sottovoce.data.tables import Layout, Source, move_numbers, read_table

    # Vaults know a table by its numbers in [0, 1], in which version 0.1 trained on them.
    read = read_table(Source(path, **table, person=person, target=target), low=0.0)
    if len(read.y) == 0:
        raise DataError(f"{path} has no rows; a client without samples takes no part")
    y = read.y if target is not None else read.y.astype(np.int64)
    dataset = fingerprint(read.x, y)
    layout = replace(read.layout, low=Layout.low)
    move_numbers(read.x, layout)
    classes = 1 if target is not None else len(layout.classes)
    rows = Rows(read.x, y, classes, dataset, target=target, encoding=layout.encoding)
    return rows, read.person


def _read_persons(data: Mapping[str, Any], policy: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the node file says of persons; `unit = "person"` and `data.person` need both."""
    person = data.get("person")
    if (person is not None) != (policy.get("unit") == "person"):
        bound = 'the column of person ids with policy.unit = "person", and absent with others'
        raise InputError.of("data.person", person, bound, "set both or neither")
    if person is None:
        if "rows_per_person" in data:
            raise InputError("data.rows_per_person has no effect without data.person; remove it")
        return {}
    most = data.get("rows_per_person", ROWS_PER_PERSON)
    if type(most) is not int or not 1 <= most <= MOST_ROWS_PER_PERSON:
        bound = f"a whole number from 1 to {MOST_ROWS_PER_PERSON}"
        remedy = "it is public: the most rows of one person that are used"
        raise InputError.of("data.rows_per_person", most, bound, remedy)
    return {"person": _require_text("data.person", person), "rows_per_person": most}


def _require_known_keys(section: str, values: Mapping[str, Any]) -> None:
    for key in values:
        if key not in _KEYS[section]:
            name, known = f"{section}.{key}".lstrip("."), ", ".join(_KEYS[section])
            raise InputError(f"unknown key {name} in the node file; it may have {known}")


def _pop_table(policy: dict[str, Any], key: str) -> dict[str, Any] | None:
    name, table = f"policy.{key}", policy.pop(key, None)
    if table is not None and not isinstance(table, dict):
        raise InputError.of(name, table, "a table", f"write [{name}]")
    _require_known_keys(name, table or {})
    return table


def _require_text(name: str, value: Any) -> str:
    if not isinstance(value, str) or not 1 <= len(value) <= 200 or not value.isprintable():
        bound = "a text of one line, of 1 to 200 letters"
        raise InputError.of(name, value, bound, "write it in the node file")
    return value


def _require_seconds(value: Any) -> float:
    if type(value) not in (int, float) or not 0 <= value <= 3600:
        remedy = "with 0 the time of an answer shows"
        raise InputError.of("answer_every", value, "seconds from 0 to 3600", remedy)
    return float(value)


def _read_target(data: Mapping[str, Any]) -> Regression | None:
    bounds = data.get("target")
    if bounds is None:
        return None
    is_pair = isinstance(bounds, list) and len(bounds) == 2
    if not is_pair or not all(type(b) in (int, float) and abs(b) <= WIDEST for b in bounds):
        remedy = "it is the public range of the number to be predicted"
        raise InputError.of("data.target", bounds, "[low, high]", remedy)
    if not bounds[0] < bounds[1]:
        raise InputError.of("data.target", bounds, "[low, high] with low < high", "swap them")
    return Regression("", float(bounds[0]), float(bounds[1]))


def _require_classes(data: Mapping[str, Any]) -> int:
    value = data.get("classes")
    if "target" in data:
        if value is not None:
            raise InputError("data.classes has no effect beside data.target; remove one of the two")
        return 1
    if type(value) is not int or not 2 <= value <= 2**30:
        remedy = "it is public: how many labels there are"
        raise InputError.of("data.classes", value, "a whole number ≥ 2", remedy)
    return value


def _check_table(data: Mapping[str, Any], is_table: bool) -> Mapping[str, Any] | None:
    if not is_table:
        for key in ("label", "columns", "missing", "text"):
            if key in data:
                raise InputError(f"data.{key} belongs to a table; data.path names arrays")
        return None
    for key in ("label", "columns"):
        if key not in data:
            raise InputError(f"data.{key} is missing in the node file; a table needs it")
    if "classes" in data:
        raise InputError("data.classes is that of the label's categories; leave it out")
    label = _require_text("data.label", data["label"])
    listed, has_target = data["columns"], "target" in data
    if not isinstance(listed, dict) or not (has_target or label in listed):
        included = "" if has_target else f", {label} included"
        raise InputError(
            f"data.columns must say what is public of every column{included}; "
            "a node infers nothing from its data"
        )
    if has_target and label in listed:
        raise InputError(f"data.columns lists {label}, whose range is data.target; remove one")
    from sottovoce.plan.data import check_columns

    missing = data.get("missing", "middle")
    if missing not in ("middle", "flag"):
        remedy = "it says what a missing number becomes"
        raise InputError.of("data.missing", missing, '"middle" or "flag"', remedy)
    text = None if "text" not in data else _require_text("data.text", data["text"])
    columns = check_columns(listed, label)
    if text is not None and (text == label or text in columns):
        raise InputError(
            f"data.text = {text!a} is a feature or the label, too; a column has one role"
        )
    return {"label": label, "columns": columns, "missing": missing, "text": text}


def _read_model(model: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Return where the client's own model and its copy of a network are, if the file names any."""
    located = {}
    if "own" in model:
        name = _require_text("model.own", model["own"])
        custom.split_name(name, "model.own")
        located["own"] = custom.resolve_beside(name, folder)
    if "features" in model:
        name = _require_text("model.features", model["features"])
        if not is_network(name):
            raise InputError.of("model.features", name, FILES, "other features need no file")
        located["features"] = resolve_network(name, folder)
    return located
