"""What comes out of a run: the record and the model, ready to predict; and how it is read back."""

from __future__ import annotations

import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import ArrayLike, NDArray

from sottovoce import record as records
from sottovoce.data import tables
from sottovoce.errors import InputError, RunError
from sottovoce.learning.models import Model, Params
from sottovoce.learning.models import build as build_model


@dataclass(frozen=True, eq=False)
class Trained:
    """A model with the record of how it was trained.

    `record` is the content of `record.json`; `folder` is where it lies, if it was written.
    """

    record: dict[str, Any]
    model: Model
    params: Params
    folder: Path | None = None

    @property
    def accuracy(self) -> float:
        """The part of the test rows that is predicted right."""
        return float(self.record["result"]["test_accuracy"])

    @property
    def rounds_used(self) -> int:
        """Rounds done."""
        return int(self.record["result"]["rounds_used"])

    @property
    def guarantee(self) -> str:
        """What the loosest client is promised, as a paragraph."""
        return str(self.record["guarantee"]["text"])

    def predict(self, x: ArrayLike) -> NDArray[np.int64]:
        """The class of each row of x[n, …], scaled as the training data were."""
        rows = np.asarray(x, dtype=np.float32)
        shape = tuple(self.record["model"]["shape"])
        numbers = int(np.prod(shape, dtype=int))
        if len(rows.shape) < 2 or int(np.prod(rows.shape[1:], dtype=int)) != numbers:
            raise InputError.of(
                "x",
                rows.shape,
                f"rows of {numbers} numbers (shape {shape})",
                "give samples as the model was trained on",
            )
        flat = rows.reshape(len(rows), numbers)
        bad = np.flatnonzero(~np.isfinite(flat).all(axis=1))
        if len(bad):
            raise InputError(
                f"row {bad[0]} of x holds a number that is not finite; leave such rows out"
            )
        if len(rows) == 0:
            return np.zeros(0, dtype=np.int64)
        return np.asarray(self.model.predict(self.params, jnp.asarray(flat)), dtype=np.int64)

    @property
    def classes(self) -> tuple[str, ...] | None:
        """The categories of the label, where the model was trained on a table."""
        table = self.record.get("table")
        return None if table is None else tuple(table["classes"])

    def predict_table(self, path: str | Path) -> list[str]:
        """The label of each row of a CSV or Parquet file, encoded as the training table was.

        The file needs the columns that the model uses, in any order; a label column is not read.
        """
        table = self.record.get("table")
        if table is None:
            raise InputError(
                "this model was not trained on a table; use predict with an array of samples"
            )
        layout = tables.Layout.from_json(table)
        rows = tables.read_rows(path, layout, labels=False, key="FILE")
        return [layout.classes[label] for label in self.predict(rows.x).tolist()]


def load(folder: str | Path, model: Model | None = None) -> Trained:
    """The trained model of a run folder; `model` is needed if it was one of your own."""
    folder = Path(folder)
    record = records.read(folder)
    if model is None:
        model = _recorded_model(record, folder)
    path = folder / "model.npz"
    try:
        with np.load(path, allow_pickle=False) as stored:
            arrays = {name: stored[name] for name in stored.files}
    except (OSError, ValueError, zipfile.BadZipFile):
        raise RunError(f"{path} is missing or damaged; run it again or restore it") from None
    if records.model_sha256(arrays) != record["result"]["model_sha256"]:
        raise RunError(f"{path} is not the model of record.json (its hash differs); restore it")
    return Trained(record, model, unnamed(model, arrays), folder)


def named(params: Params) -> dict[str, NDArray[Any]]:
    """The leaves of a tree of parameters by name, as they stand in `model.npz`.

    >>> sorted(named({"w": jnp.zeros(2), "deep": [jnp.zeros(()), jnp.ones(1)]}))
    ['deep/0', 'deep/1', 'w']
    """
    paths = jax.tree_util.tree_flatten_with_path(params)[0]
    return {_name(path): np.asarray(leaf) for path, leaf in paths}


def unnamed(model: Model, arrays: dict[str, NDArray[Any]]) -> Params:
    """The tree of parameters that `named` took apart; the model knows its form."""
    form = jax.eval_shape(model.init, jax.random.key(0))
    paths, tree = jax.tree_util.tree_flatten_with_path(form)
    names = [_name(path) for path, _ in paths]
    if set(names) != set(arrays):
        raise InputError.of(
            "model", sorted(names), f"the one with {sorted(arrays)}", "pass the model that was run"
        )
    return jax.tree.unflatten(tree, [jnp.asarray(arrays[name]) for name in names])


def _name(path: tuple[Any, ...]) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="/") or "params"


def _recorded_model(record: dict[str, Any], folder: Path) -> Model:
    own, form = dict(record["plan"]["model"]), record["model"]
    name = own.pop("name")
    if name == "custom":
        raise InputError(
            f"the model of {folder} is one of your own; pass it as load(folder, model=…)"
        )
    return build_model(name, shape=tuple(form["shape"]), classes=form["classes"], **own)
