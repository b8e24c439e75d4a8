"""Probabilities and thresholds of a finished run, from Python and on the command line."""

from __future__ import annotations

import csv
import io
import json
import shutil
from dataclasses import replace
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from sottovoce.cli import commands
from sottovoce.errors import InputError, RunError
from sottovoce.models.custom import custom
from sottovoce.plan import Plan
from sottovoce.runs.trained import Trained, load
from sottovoce.simulation.simulate import simulate


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Trained:
    """A table of 10 % 'yes', trained for a few rounds."""
    folder = tmp_path_factory.mktemp("rare")
    rng = np.random.default_rng(2)
    ages = rng.integers(0, 100, 1500)
    ill = rng.random(1500) < 0.2 * ages / 100
    rows = [f"{age},{'yes' if is_ill else 'no'}" for age, is_ill in zip(ages, ill, strict=True)]
    (folder / "t.csv").write_text("\n".join(["age,ill", *rows]) + "\n")
    data = {
        "path": str(folder / "t.csv"),
        "label": "ill",
        "clients": 3,
        "columns": {"age": [0, 100], "ill": ["yes", "no"]},  # the rarer class is 0
        "validation": 0.2,
    }
    plan = Plan(data=data, model={"name": "softmax"}, rounds={"schedule": "fixed", "rounds": 5})
    return simulate(plan, seed=1, out=folder / "run")


X = np.linspace(-1, 1, 50, dtype=np.float32).reshape(50, 1)


def test_probabilities_are_softmax_of_calibrated_scores(run: Trained) -> None:
    fitted = run.record["result"]["calibration"]
    scores = run.model.scores(run.params, jnp.asarray(X))
    logits = scores / fitted["temperature"] + np.array(fitted["bias"])
    expected = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    found = run.predict_proba(X)
    assert np.allclose(found, expected)
    assert np.allclose(found.sum(axis=1), 1)
    assert found[:, 0].mean() == pytest.approx(0.1, abs=0.05)  # rare, and said so
    assert (load(run.folder).predict_proba(X) == found).all()
    raw = replace(run, record=run.record | {"result": {**run.record["result"]}})
    del raw.record["result"]["calibration"]
    assert not np.allclose(raw.predict_proba(X), found)
    assert (raw.predict(X) == run.predict(X)).all()  # classes do not depend on it


def test_a_threshold_is_for_the_rarer_class(run: Trained) -> None:
    p = run.predict_proba(X)[:, 0]
    assert run.positive == 0
    middle = float(np.median(p))
    assert (run.predict(X, threshold=middle) == np.where(p >= middle, 0, 1)).all()
    assert (run.predict(X, threshold=0) == 0).all()
    assert len(run.predict(X[:0], threshold=0.5)) == len(run.predict_proba(X[:0])) == 0
    with pytest.raises(InputError, match="threshold must be a number from 0 to 1"):
        run.predict(X, threshold=1.5)


def test_a_model_of_a_number_says_that_it_has_no_threshold(run: Trained) -> None:
    target = {"loss": "squared", "low": 0.0, "high": 9.0}
    number = replace(run, record=run.record | {"model": {**run.record["model"], "target": target}})
    with pytest.raises(InputError, match="predicts a number and has no threshold; leave it out"):
        number.predict(X, threshold=0.1)


def test_the_command_prints_probabilities_and_obeys_a_threshold(
    run: Trained, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "new.csv").write_text("age\n3\n50\n99\n")

    def ask(*options: str) -> str:
        where = [str(run.folder), str(tmp_path / "new.csv")]
        commands.app(["predict", *where, *options], standalone_mode=False)
        return capsys.readouterr().out

    expected = run.predict_proba(run.read_table(tmp_path / "new.csv"))
    header, *rows = csv.reader(io.StringIO(ask("--proba")))
    assert header == ["prediction", "yes", "no"]
    assert np.allclose([[float(p) for p in row[1:]] for row in rows], expected, rtol=1e-5)
    cut = float(np.sort(expected[:, 0])[1])
    said = ["yes" if p >= cut else "no" for p in expected[:, 0]]
    assert ask("--threshold", repr(cut)).split() == said
    shown = json.loads(ask("--proba", "--json"))
    assert shown["classes"] == ["yes", "no"]
    assert np.allclose(shown["probabilities"], expected)
    assert json.loads(ask("--json")) == {"predictions": shown["predictions"]}


def test_a_file_of_another_kind_is_refused_with_what_the_run_takes(
    run: Trained, tmp_path: Path
) -> None:
    def refuse(folder: Path, file: str) -> str:
        (tmp_path / file).write_text("[model]\n")
        words = ["predict", str(folder), str(tmp_path / file)]
        with pytest.raises(InputError) as caught:
            commands.app(words, standalone_mode=False)
        return str(caught.value)

    table = "FILE must be a .csv or .parquet file, got 'cost.toml'; the run was trained on a table"
    assert refuse(run.folder, "cost.toml").startswith(table)
    plan = Plan(model={"name": "softmax"}, rounds={"schedule": "fixed", "rounds": 1})
    simulate(plan, seed=1, out=tmp_path / "digits")
    for file in ("cost.toml", "cost.parquet"):
        arrays = f"FILE must be a .npy, .npz or .csv file, got '{file}'; save the samples"
        assert refuse(tmp_path / "digits", file).startswith(arrays)


def test_the_answer_is_the_same_with_and_without_probabilities(
    run: Trained, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The fit of probabilities has a bias for each class, so that another may be most probable."""
    shutil.copytree(str(run.folder), tmp_path / "run")
    record = json.loads((tmp_path / "run" / "record.json").read_text("utf-8"))
    record["result"]["calibration"]["bias"] = [8.0, -8.0]
    (tmp_path / "run" / "record.json").write_text(json.dumps(record), "utf-8")
    (tmp_path / "new.csv").write_text("age\n3\n50\n99\n")
    printed = []
    for options in ((), ("--proba",)):
        where = [str(tmp_path / "run"), str(tmp_path / "new.csv")]
        commands.app(["predict", *where, *options], standalone_mode=False)
        printed.append([line.split(",")[0] for line in capsys.readouterr().out.split()])
    assert printed[1] == ["prediction", *printed[0]]
    moved = load(tmp_path / "run")
    rows = moved.read_table(tmp_path / "new.csv")
    assert printed[0] == [moved.classes[k] for k in moved.predict(rows)]  # type: ignore[index]
    assert (moved.predict_proba(rows).argmax(axis=1) != moved.predict(rows)).any()


def test_more_classes_have_no_threshold_and_models_without_scores_no_probabilities() -> None:
    run = simulate(Plan(rounds={"schedule": "fixed", "rounds": 1}), seed=1)
    assert run.predict_proba(np.zeros((2, 64))).shape == (2, 10)
    with pytest.raises(InputError, match="for a model of two classes"):
        run.predict(np.zeros((2, 64)), threshold=0.5)
    strange = custom(lambda key: jnp.zeros(64), lambda w, x: x @ w, lambda scores, y: scores)
    with pytest.raises(InputError, match="no 10 scores a row"):
        replace(run, model=strange, params=jnp.zeros(64)).predict_proba(np.zeros((2, 64)))


def test_a_damaged_calibration_is_refused(run: Trained, tmp_path: Path) -> None:
    for name in ("record.json", "model.npz"):
        (tmp_path / name).write_bytes((run.folder / name).read_bytes())
    record = json.loads((tmp_path / "record.json").read_text())
    record["result"]["calibration"]["bias"].append(1.0)
    (tmp_path / "record.json").write_text(json.dumps(record))
    with pytest.raises(RunError, match="not a bias for every class"):
        load(tmp_path)
