"""A finished run: its record and its model, ready to predict, and how both are read."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from numpy.typing import ArrayLike, NDArray

from sottovoce.data import tables
from sottovoce.data.check import describe_unfit_cells
from sottovoce.data.files import read_npz, why
from sottovoce.errors import InputError, RunError, SottovoceError
from sottovoce.models.base import JaxModel, Model, Params, Regression, find_model, predict_numbers
from sottovoce.models.base import build as build_model
from sottovoce.models.custom import adopt_model, load_own_model
from sottovoce.models.metrics import Calibration, compute_probabilities
from sottovoce.models.network import Lens, as_samples, build_lens
from sottovoce.privacy.budget import describe_undisclosed
from sottovoce.runs.integrations import export_run
from sottovoce.runs.record import Record, model_sha256


class Page(str):
    """A page of HTML; a notebook shows it in a frame."""

    def _repr_html_(self) -> str:
        frame = 'style="width: 100%; height: 42em; border: 0"'
        return f'<iframe {frame} srcdoc="{escape(self)}"></iframe>'


@dataclass(frozen=True, eq=False, repr=False)
class Trained:
    """A model with the record of how it was trained.

    `record` is the content of `record.json`; `folder` is where it lies, if it was written. A
    notebook shows headline, guarantee and curve.
    """

    record: dict[str, Any]
    model: Model
    params: Params
    folder: Path | None = None

    def __repr__(self) -> str:
        """Return status, result and where the run lies, in a line."""
        record, result = self.record, self.record["result"]
        said = result.get("headline", {}).get("text") or f"test loss {result['test_loss']}"
        rounds = f"{self.rounds_used} rounds of {record['plan']['rounds']['rounds']}"
        where = "" if self.folder is None else f", in {self.folder}"
        return f"<Trained: {record['status']}, {said}, {rounds}, {record['noise']} noise{where}>"

    def _repr_html_(self) -> str:
        from sottovoce.reports.run import render_card

        return render_card(self.record, self.folder)

    def report(self) -> Page:
        """Return the page of the run, as `sottovoce report` writes it; a notebook shows it."""
        from sottovoce.reports.run import render_report

        path = None if self.folder is None else self.folder / "trace.npz"
        trace = read_npz(path) if path is not None and path.exists() else None
        return Page(render_report(self.record, trace))

    def export(self, to: str, path: str | Path | None = None) -> Path:
        """Write the model for another tool (onnx, safetensors, torch, sklearn); return the path."""
        return export_run(self, to, path)

    @property
    def history(self) -> Any:
        """The rounds as a polars DataFrame, a row each.

        Its columns are those of `rounds` in the record, with the three numbers of σ side by side.
        `pandas.DataFrame(run.history.to_dict(as_series=False))` makes it one of pandas.
        """
        import polars

        rows = [
            {key: value for key, value in entry.items() if not isinstance(value, dict | list)}
            | {f"sigma_{name}": value for name, value in entry["sigma"].items()}
            for entry in self.record["rounds"]
        ]
        return polars.DataFrame(rows, infer_schema_length=None)

    def plot(self) -> Any:
        """Draw loss and accuracy on the validation rows with pyplot, and return the axes."""
        import matplotlib.pyplot as plt

        names = ["loss"] if self.target is not None else ["loss", "accuracy"]
        _, axes = plt.subplots(
            1, len(names), figsize=(4.5 * len(names), 3), layout="constrained", squeeze=False
        )
        entries = [self.record["initial"], *self.record["rounds"]]
        for ax, name in zip(axes[0], names, strict=True):
            values = [np.nan if (v := e[f"validation_{name}"]) is None else v for e in entries]
            ax.plot(range(len(values)), values)
            ax.set(xlabel="rounds done", ylabel=f"validation {name}")
            ax.grid(alpha=0.3)
        return axes[0]

    @property
    def metrics(self) -> dict[str, float | None]:
        """Every metric on the test rows by name; None where it is not known."""
        entries = self.record["result"].get("metrics", {})
        return {name: entry["value"] for name, entry in entries.items()}

    @property
    def accuracy(self) -> float:
        """The share of the test rows that is predicted right; NaN if it is not known."""
        accuracy = self.record["result"]["test_accuracy"]
        return float("nan" if accuracy is None else accuracy)

    @property
    def rounds_used(self) -> int:
        """The number of rounds played."""
        return int(self.record["result"]["rounds_used"])

    @property
    def guarantee(self) -> str:
        """What the loosest client is promised, as a paragraph."""
        if (guarantee := self.record["guarantee"]) is None:
            return describe_undisclosed(self.record.get("not_covered", ()))
        return str(guarantee["text"])

    def predict(self, x: ArrayLike, threshold: float | None = None) -> NDArray[Any]:
        """Return the class of each row of x[n, …], scaled as the training data were; or its number.

        Rows are samples as they were read: features (`model.features`) are made here. With a
        threshold it is the rarer of two classes, `positive`, where its probability is at least so.
        """
        if threshold is not None:
            if self.target is not None:
                raise InputError("this model predicts a number and has no threshold; leave it out")
            if self.record["model"]["classes"] != 2 or not 0 <= threshold <= 1:
                bound = "a number from 0 to 1, for a model of two classes"
                raise InputError.of("threshold", threshold, bound, "leave it out")
            is_positive = self.predict_proba(x)[:, self.positive] >= threshold
            return np.where(is_positive, self.positive, 1 - self.positive)
        if len(rows := self._prepare_rows(x)) == 0:
            return np.zeros(0, dtype=np.int64 if self.target is None else np.float64)
        if self.target is not None:
            return self.target.restore(predict_numbers(self.model, self.params, rows))
        return np.asarray(self.model.predict(self.params, rows), dtype=np.int64)

    def predict_proba(self, x: ArrayLike) -> NDArray[np.float64]:
        """Return the probability of every class for each row of x, (n, classes).

        It is calibrated where `result.calibration` of the record says how; the most probable class
        may then be another than that of `predict`, which the record's accuracy counts.
        """
        if self.target is not None:
            raise InputError(
                "this model predicts a number, which has no probabilities; use predict"
            )
        classes, rows = self.record["model"]["classes"], self._prepare_rows(x)
        if len(rows) == 0:
            return np.zeros((0, classes))
        scores = self.model.scores(self.params, rows)
        if scores is None or scores.shape[1] != classes:
            raise InputError(
                f"this model has no {classes} scores a row, so that there are no probabilities; "
                "use predict"
            )
        return compute_probabilities(scores, _read_calibration(self.record))

    @property
    def positive(self) -> int:
        """Of two classes the one that a threshold is for: the rarer among the test rows."""
        return int(self.record["result"].get("curves", {}).get("positive", 1))

    def _prepare_rows(self, x: ArrayLike) -> Any:
        """Return rows as the model takes them; refuse those that it was not trained on."""
        shape = tuple(self.record["model"]["shape"])
        numbers = int(np.prod(shape, dtype=int))
        bound = f"rows of {numbers} numbers (shape {shape})"
        remedy = "give samples as the model was trained on"
        try:
            rows = as_samples(x)
        except (TypeError, ValueError, OverflowError) as error:
            said = why(error).split(". ")[0]
            raise InputError(f"x must be {bound}, but NumPy says: {said}; {remedy}") from None
        if len(rows.shape) < 2 or int(np.prod(rows.shape[1:], dtype=int)) != numbers:
            raise InputError.of("x", rows.shape, bound, remedy)
        flat = rows.reshape(len(rows), numbers)
        bad = np.flatnonzero(~np.isfinite(flat).all(axis=1))
        if len(bad):
            raise InputError(
                f"row {bad[0] + 1} of x holds a number that is not finite; leave such rows out"
            )
        if len(rows) and (extractor := _build_features(self.record)) is not None:
            flat = extractor.apply(flat)
        return jnp.asarray(flat) if isinstance(self.model, JaxModel) else flat

    @property
    def target(self) -> Regression | None:
        """The loss and the public range of the number that is predicted; None: a class is."""
        target = self.record["model"].get("target")
        return None if target is None else Regression(**target)

    @property
    def classes(self) -> tuple[str, ...] | None:
        """The names of the classes: a table's categories, or labels of arrays other than 0, 1, …

        `predict` returns places in this list.
        """
        if (table := self.record.get("table")) is not None:
            return tuple(table["classes"]) or None
        labels = (self.record.get("model") or {}).get("labels")
        return None if labels is None else tuple(labels)

    def predict_table(self, path: str | Path) -> list[Any]:
        """Return the label of each row of a CSV or Parquet file; see `read_table`."""
        labels: list[Any] = self.predict(self.read_table(path)).tolist()
        names = self.record["table"]["classes"]
        return labels if self.target is not None else [names[label] for label in labels]

    def read_table(self, path: str | Path) -> NDArray[np.float32]:
        """Return the rows of a CSV or Parquet file, encoded as the training table was.

        The file needs the columns that the model uses, in any order; a label column is not read.
        Cells outside the bounds and unknown categories are logged as a warning, with their number.
        """
        table = self.record.get("table")
        if table is None:
            raise InputError(
                "this model was not trained on a table; use predict with an array of samples"
            )
        layout = tables.Layout.from_json(table)
        rows = tables.read_rows(path, layout, labels=False, key="FILE").x
        if (sentence := describe_unfit_cells(path, layout)) is not None:
            logging.getLogger("sottovoce").warning("%s", sentence)
        return rows


def load(folder: str | Path, model: Any = None) -> Trained:
    """Return the trained model of a run folder; `model` is needed if it was one of your own."""
    folder = Path(folder)
    record = Record.read(folder).to_dict()
    try:
        model = _rebuild_model(record, folder) if model is None else adopt_model(model)
        _build_features(record)
        _read_calibration(record)
        if (table := record.get("table")) is not None:
            tables.Layout.from_json(table)
    except SottovoceError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise RunError(
            f"record.json of {folder} does not say which model it is of ({why(error)}); restore it"
        ) from None
    path = folder / "model.npz"
    try:
        arrays = read_npz(path)
    except (OSError, ValueError):
        raise RunError(f"{path} is missing or damaged; run it again or restore it") from None
    if model_sha256(arrays) != record["result"]["model_sha256"]:
        raise RunError(f"{path} is not the model of record.json (its hash differs); restore it")
    return Trained(record, model, model.unflatten(arrays), folder)


def _rebuild_model(record: dict[str, Any], folder: Path) -> Model:
    options, form = dict(record["plan"]["model"]), record["model"]
    name = options.pop("name")
    if name == "custom" and "own" in options:
        return load_own_model(options["own"])
    if name == "custom":
        raise InputError(
            f"the model of {folder} is one of your own; pass it as load(folder, model=…)"
        )
    extractor = _build_features(record)
    known = [option.name for option in find_model(name).options]
    options = {key: value for key, value in options.items() if key in known}
    shape = tuple(form["shape"]) if extractor is None else (extractor.width,)
    loss = (form.get("target") or {}).get("loss")
    return build_model(name, shape=shape, classes=form["classes"], number_loss=loss, **options)


def _read_calibration(record: dict[str, Any]) -> Calibration | None:
    if (fitted := record["result"].get("calibration")) is None:
        return None
    if len(fitted["bias"]) != record["model"]["classes"]:
        raise ValueError("its calibration has not a bias for every class")
    return Calibration(fitted["temperature"], tuple(fitted["bias"]))


def _build_features(record: dict[str, Any]) -> Lens | None:
    options = record["plan"]["model"]
    return build_lens(tuple(record["model"]["shape"]), options)
