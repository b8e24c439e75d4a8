"""Trackers get public numbers only; exported models are read back and say the same."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys

import numpy as np
import pytest

from sottovoce.cli import commands
from sottovoce.errors import InputError
from sottovoce.plan import Plan
from sottovoce.runs import integrations
from sottovoce.runs.trained import load
from sottovoce.simulation.simulate import simulate

pytestmark = pytest.mark.slow  # seconds of CPU in all; left out of the editing loop

SHORT = Plan(rounds={"schedule": "fixed", "rounds": 3})


def need(package: str):
    """Skip where an optional package, of no extra that the tests install, is absent."""
    return pytest.mark.skipif(
        importlib.util.find_spec(package) is None, reason=f"{package} is optional and not installed"
    )


def make_run(kind: str, folder):
    rng = np.random.default_rng(1)
    x = rng.normal(size=(600, 4)).astype(np.float32)
    name, _, task = kind.partition(" ")
    # Half of the rows are longer than this norm, which only least squares have.
    more = ["model.norm=2", "privacy.epsilon=50"] if name == "least-squares" else []
    plan = SHORT.replace(f"model.name={name}", "data.name=arrays", "data.clients=2", *more)
    plan = plan.replace("data.validation=100", "data.test=100", "local.learning_rate=0.5")
    y = (x[:, 0] > 0).astype(int)
    if task == "of three":
        y = y + (x[:, 1] > 0)
    if task == "number":
        plan = plan.replace(**{"model.loss": "squared", "data.target": [-50, 100]})
        y = 25 + 20 * x[:, 0]
    return simulate(plan, data=(x, y), seed=1, out=folder)


KINDS = [
    "svm",
    "softmax",
    "softmax of three",
    "mlp",
    "mlp of three",
    "softmax number",
    "mlp number",
    "least-squares of three",
    "least-squares number",
]
X = np.random.default_rng(2).normal(size=(40, 4)).astype(np.float32)


@pytest.fixture(scope="module", params=KINDS)
def run(request, tmp_path_factory):
    return make_run(request.param, tmp_path_factory.mktemp("run"))


def ask(run, x):
    return run.predict(x) if run.target is not None else run.predict_proba(x)


def compare(run, found):
    expected = ask(run, X)
    np.testing.assert_allclose(np.asarray(found).reshape(expected.shape), expected, atol=2e-4)


@pytest.mark.parametrize("name", ["softmax", "least-squares"])
def test_a_run_of_persons_is_exported_before_it_is_read_back_as_after(name, tmp_path):
    rng = np.random.default_rng(1)
    x = rng.normal(size=(600, 4)).astype(np.float32)
    norm = {"norm": 2.0} if name == "least-squares" else {}
    data = {"name": "arrays", "clients": 2, "validation": 20, "test": 20}
    plan = Plan(
        data=data,
        model={"name": name, **norm},
        local={"unit": "person"},
        rounds={"schedule": "fixed", "rounds": 1},
    )
    rows = x, (x[:, 0] > 0).astype(int)
    run = simulate(plan, data=rows, person=np.arange(600) // 3, seed=1, out=tmp_path / "run")
    pair = [integrations.list_layers(found, "torch") for found in (run, load(tmp_path / "run"))]
    np.testing.assert_array_equal(*(layers.weights[0] for layers in pair))


@need("safetensors")
def test_safetensors_hold_the_parameters_and_the_guarantee(run):
    from safetensors import safe_open

    path = run.export("safetensors")
    with safe_open(path, "np") as file:
        arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        assert file.metadata()["guarantee"] == run.guarantee
    with np.load(run.folder / "model.npz") as stored:
        assert arrays.keys() == set(stored.files)
        assert all(np.array_equal(arrays[name], stored[name]) for name in arrays)


@need("onnx")
@need("onnxruntime")
def test_onnx_says_the_same(run):
    import onnx
    import onnxruntime

    path = run.export("onnx")
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    compare(run, session.run(None, {"x": X})[0])
    props = {entry.key: entry.value for entry in onnx.load(path).metadata_props}
    assert props == {"guarantee": run.guarantee, "noise": "simulated"}


@need("torch")
@pytest.mark.filterwarnings("ignore")
def test_torch_says_the_same(run):
    import torch

    path, about = run.export("torch"), {"guarantee": ""}
    module = torch.export.load(path, extra_files=about).module()
    compare(run, module(torch.tensor(X)).detach().numpy())
    assert about["guarantee"] == run.guarantee


@need("sklearn")
@pytest.mark.filterwarnings("ignore")
def test_scikit_learn_says_the_same(run):
    import joblib

    if run.record["plan"]["model"]["name"] == "least-squares":
        with pytest.raises(InputError, match="export it to onnx or torch"):
            run.export("sklearn")
        return
    model = joblib.load(run.export("sklearn"))
    compare(run, model.predict(X) if run.target is not None else model.predict_proba(X))
    if run.target is None:
        assert (model.predict(X) == run.predict_proba(X).argmax(axis=1)).all()
    assert model.sottovoce_["guarantee"] == run.guarantee


@need("sklearn")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["softmax", "mlp"])
@pytest.mark.parametrize("classes", [["well", "ill"], ["mild", "none", "grave"]])
def test_scikit_learn_answers_with_the_names_of_the_classes(tmp_path, name, classes):
    """In the plan's order, which is not the alphabet's."""
    import joblib

    rng = np.random.default_rng(3)
    x = rng.uniform(size=(300, 3))
    y = np.array(classes)[(len(classes) * x[:, 0]).astype(int)]
    np.savez(tmp_path / "rows.npz", x=x, y=y)
    data = {"path": str(tmp_path / "rows.npz"), "clients": 2, "columns": {"y": classes}}
    run = simulate(
        Plan(data=data, model={"name": name}, rounds={"rounds": 5}), seed=1, out=tmp_path / "run"
    )
    model = joblib.load(run.export("sklearn"))
    assert model.classes_.tolist() == classes
    wanted = np.array(classes)[run.predict_proba(x).argmax(axis=1)]
    assert len(set(wanted)) > 1
    assert model.predict(x).tolist() == wanted.tolist()


@need("torch")
def test_what_has_no_such_layers_is_refused(tmp_path, monkeypatch, capsys):
    plan = SHORT.replace("data.samples=8", "rounds.rounds=1", "model.features=hog")
    run = simulate(plan.replace("model.name=softmax"), seed=1, out=tmp_path)
    with pytest.raises(InputError, match=r"model\.features must be absent for an export to torch"):
        run.export("torch")
    with pytest.raises(InputError, match=r"^to must be onnx or safetensors or torch or sklearn"):
        run.export("pickle")
    monkeypatch.setitem(integrations.EXPORTS, "onnx", ("no_such_package", ".onnx", None))
    with pytest.raises(InputError, match=r"^an export to onnx needs no_such_package"):
        run.export("onnx")
    monkeypatch.setattr(sys, "argv", ["sottovoce", "export", str(tmp_path), "--to", "pickle"])
    with pytest.raises(SystemExit):
        commands.main()
    assert "--to must be onnx or safetensors" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["mlflow", "tensorboard", "wandb"])
def test_an_absent_tracker_is_refused_with_the_command_that_installs_it(name, monkeypatch):
    monkeypatch.setattr(integrations, "find_spec", lambda package: None)
    with pytest.raises(
        InputError, match=rf"callbacks {name} needs .*pip install 'sottovoce\[{name}\]'"
    ):
        simulate(SHORT, callbacks=[name])
    with pytest.raises(InputError, match=r"^callbacks must be mlflow or tensorboard or wandb"):
        simulate(SHORT, callbacks=["nowhere"])


def test_the_command_line_refuses_before_it_trains(tmp_path, monkeypatch, capsys):
    out = str(tmp_path / "run")
    monkeypatch.setattr(sys, "argv", ["sottovoce", "train", "--out", out, "--log", "nowhere"])
    with pytest.raises(SystemExit) as ended:
        commands.main()
    assert ended.value.code == 2
    assert "--log must be mlflow or tensorboard or wandb" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


class Tool:
    """Keeps what a tracker is given."""

    def __init__(self, settings, folder):
        self.settings, self.rounds, self.result = settings, [], None
        tools.append(self)

    def write(self, numbers, step):
        self.rounds.append((step, numbers))

    def end(self, numbers, guarantee, is_finished):
        self.result = numbers, guarantee, is_finished


tools: list[Tool] = []


def test_only_public_numbers_leave(tmp_path, monkeypatch):
    rows = [f"{i % 90},{'yes' if i % 90 > 45 else 'no'},ward {i % 2}" for i in range(400)]
    (tmp_path / "secret.csv").write_text("\n".join(["age,ill,ward", *rows]))
    data = {"path": str(tmp_path / "secret.csv"), "label": "ill", "client": "ward"}
    data["columns"] = {"age": [0, 120], "ill": ["no", "yes"]}
    monkeypatch.setitem(integrations.TRACKERS, "mlflow", ("json", Tool))
    plan = Plan(data=data, rounds={"rounds": 3})
    run = simulate(plan, seed=1, callbacks=["mlflow"], out=tmp_path / "run")
    tool = tools.pop()
    assert [step for step, _ in tool.rounds] == [1, 2, 3]
    losses = [numbers["validation_loss"] for _, numbers in tool.rounds]
    assert losses == run.history["validation_loss"].to_list()
    numbers, guarantee, is_finished = tool.result
    assert (guarantee, is_finished) == (run.guarantee, True)
    assert numbers["test_accuracy"] == run.metrics["accuracy"]
    left = json.dumps([tool.settings, tool.rounds, numbers])
    for word in ("secret", "ward", "ill", "age"):
        assert word not in left.replace("average", "")
    assert tool.settings["privacy.epsilon"] == 8.0


def test_an_interrupted_run_is_not_called_finished(monkeypatch):
    monkeypatch.setitem(integrations.TRACKERS, "wandb", ("json", Tool))

    def stop(done):
        if done.t == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        simulate(SHORT, seed=1, callbacks=["wandb"], on_round=stop)
    assert tools.pop().result[2] is False


@need("tensorboard")
@pytest.mark.filterwarnings("ignore")
def test_tensorboard_reads_the_rounds(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = simulate(SHORT, seed=1, callbacks=["tensorboard"], out=tmp_path / "run")
    events = EventAccumulator(str(run.folder / "tensorboard"))
    events.Reload()
    found = [float(e.tensor_proto.float_val[0]) for e in events.Tensors("validation_loss")]
    assert found == pytest.approx(run.history["validation_loss"].to_list())


@need("mlflow")
@pytest.mark.filterwarnings("ignore")
def test_mlflow_reads_the_rounds(tmp_path, monkeypatch):
    import mlflow

    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    mlflow.set_tracking_uri(f"file://{tmp_path}/mlflow")
    run = simulate(SHORT, seed=1, callbacks=["mlflow"], out=tmp_path / "run")
    client = mlflow.MlflowClient()
    [found] = client.search_runs([e.experiment_id for e in client.search_experiments()])
    assert found.info.status == "FINISHED"
    history = client.get_metric_history(found.info.run_id, "validation_loss")
    assert [e.value for e in history] == run.history["validation_loss"].to_list()
    assert found.data.tags["guarantee"] == run.guarantee


@need("wandb")
def test_wandb_takes_the_rounds(tmp_path):
    """In a process of its own: wandb talks to another one, which outlives a test."""
    code = (
        "from sottovoce import simulate; "
        'simulate({"rounds": {"schedule": "fixed", "rounds": 3}}, seed=1, callbacks=["wandb"])'
    )
    more = {"WANDB_MODE": "offline", "WANDB_DIR": str(tmp_path)}
    subprocess.run([sys.executable, "-c", code], check=True, env=os.environ | more, timeout=900)
    [file] = tmp_path.rglob("*.wandb")
    written = file.read_bytes()
    for word in (b"validation_loss", b"test_accuracy", b"Not covered"):
        assert word in written
