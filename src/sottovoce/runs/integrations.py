"""Other tools: trackers that follow a run, and files that hold its model.

All of their libraries are optional and imported where they are used. A tracker gets the public
numbers of rounds and results and the numbers of the plan: no row, no client's name, no path.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from sottovoce.errors import InputError
from sottovoce.models.base import Floats, flatten_parameters
from sottovoce.models.least_squares import PARAMETER, LeastSquares
from sottovoce.models.metrics import Calibration
from sottovoce.runs.checkpoint import RoundDone

if TYPE_CHECKING:
    from sottovoce.runs.trained import Trained

NOT_NUMBERS = ("privacy.clients", "model.own")  # names of files


def require_package(package: str, purpose: str, extra: str) -> None:
    """Refuse in one sentence what needs a package that is not installed.

    >>> require_package("no_such_package", "--log none", "none")
    Traceback (most recent call last):
        ...
    sottovoce.errors.InputError: --log none needs no_such_package, which is not installed; run: \
pip install 'sottovoce[none]'
    """
    if find_spec(package) is None:
        raise InputError(
            f"{purpose} needs {package}, which is not installed; "
            f"run: pip install 'sottovoce[{extra}]'"
        )


# Trackers


def list_settings(plan: Mapping[str, Any]) -> dict[str, Any]:
    """Return the numbers and words of a plan that a tracker gets.

    >>> plan = {"noise": "secure", "data": {"path": "/x.csv"}, "privacy": {"epsilon": 4.0}}
    >>> list_settings(plan | {"model": {"name": "softmax", "features": "onnx:/home/net.onnx"}})
    {'noise': 'secure', 'model.name': 'softmax', 'model.features': 'onnx', 'privacy.epsilon': 4.0}
    """
    kept = {"noise": plan["noise"]}
    for section in ("model", "local", "privacy", "rounds", "server"):
        for key, value in plan.get(section, {}).items():
            name = f"{section}.{key}"
            if isinstance(value, int | float | str) and name not in NOT_NUMBERS:
                kept[name] = value.partition(":")[0] if isinstance(value, str) else value
    return kept


class Tracker:
    """Writes a run's public numbers into a tool: a callback of `simulate`.

    It begins with the first round, so that a run that is refused leaves nothing behind.
    """

    def __init__(
        self, name: str, plan: Mapping[str, Any], folder: Path | None = None, option: str = "--log"
    ) -> None:
        if name not in TRACKERS:
            bound = " or ".join(TRACKERS)
            raise InputError.of(option, name, bound, "choose where the numbers go")
        package, self._start = TRACKERS[name]
        require_package(package, f"{option} {name}", name)
        self.settings, self.folder = list_settings(plan), folder
        self.tool: Any = None

    def on_round(self, done: RoundDone) -> None:
        """Write the numbers of a round."""
        numbers = {
            "validation_loss": done.loss,
            "validation_accuracy": done.accuracy,
            "sigma": done.sigma,
            "horizon": done.next_horizon,
            "uploads": done.uploads,
            "budget_left": done.fuel,
        }
        if self.tool is None:
            self.tool = self._start(self.settings, self.folder)
        self.tool.write(_drop_nan(numbers), done.t + 1)

    def on_end(self, run: Trained) -> None:
        """Write results and guarantee, and end."""
        record, result = run.record, run.record["result"]
        numbers = {f"test_{name}": value for name, value in run.metrics.items()}
        numbers |= {"test_loss": result["test_loss"], "rounds_used": result["rounds_used"]}
        if self.tool is not None:
            self.tool.end(_drop_nan(numbers), run.guarantee, record["status"] == "finished")


def _drop_nan(numbers: Mapping[str, float | None]) -> dict[str, float]:
    return {k: float(v) for k, v in numbers.items() if v is not None and math.isfinite(v)}


class _Mlflow:
    def __init__(self, settings: dict[str, Any], folder: Path | None) -> None:
        import mlflow

        self.mlflow, self.is_ours = mlflow, mlflow.active_run() is None
        if self.is_ours:
            mlflow.start_run(run_name=None if folder is None else folder.name)
        mlflow.log_params(settings)

    def write(self, numbers: dict[str, float], step: int) -> None:
        self.mlflow.log_metrics(numbers, step=step)

    def end(self, numbers: dict[str, float], guarantee: str, is_finished: bool) -> None:
        self.mlflow.log_metrics(numbers)
        self.mlflow.set_tag("guarantee", guarantee)
        if self.is_ours:
            self.mlflow.end_run("FINISHED" if is_finished else "KILLED")


class _Tensorboard:
    def __init__(self, settings: dict[str, Any], folder: Path | None) -> None:
        from tensorboard.summary import Writer

        self.writer, self.step = Writer(str(folder or Path("runs")) + "/tensorboard"), 0

    def write(self, numbers: dict[str, float], step: int) -> None:
        self.step = step
        for name, value in numbers.items():
            self.writer.add_scalar(name, value, step)

    def end(self, numbers: dict[str, float], guarantee: str, is_finished: bool) -> None:
        self.write(numbers, self.step)
        self.writer.close()


class _Wandb:
    def __init__(self, settings: dict[str, Any], folder: Path | None) -> None:
        import wandb

        name = None if folder is None else folder.name
        self.run = wandb.init(project="sottovoce", name=name, config=settings)

    def write(self, numbers: dict[str, float], step: int) -> None:
        self.run.log(numbers, step=step)

    def end(self, numbers: dict[str, float], guarantee: str, is_finished: bool) -> None:
        self.run.summary.update({**numbers, "guarantee": guarantee})
        self.run.finish(exit_code=0 if is_finished else 1)


#: The package that each tracker needs, and what writes into it.
TRACKERS: dict[str, tuple[str, Callable[[dict[str, Any], Path | None], Any]]] = {
    "mlflow": ("mlflow", _Mlflow),
    "tensorboard": ("tensorboard", _Tensorboard),
    "wandb": ("wandb", _Wandb),
}


# Exports


class Layers(NamedTuple):
    """A model as dense layers with ReLU between them, which end in logits or in a number.

    The softmax of the logits are the calibrated probabilities; the number is in its unit, and is
    cut to `bounds`.
    """

    weights: list[Floats]  # [inputs, outputs] each
    biases: list[Floats]
    bounds: tuple[float, float] | None
    norm: float | None = None  # longer rows are first cut to it


def list_layers(run: Trained, to: str) -> Layers:
    """Return the layers of a built-in model; refuse a model that has other parts."""
    plan, arrays = run.record["plan"]["model"], flatten_parameters(run.params)
    params = {name: np.asarray(leaf, np.float64) for name, leaf in arrays.items()}
    linear, norm = ("svm", "softmax", "mlp", LeastSquares.name), plan.get("norm")
    if plan["name"] not in linear or plan.get("features") is not None:
        what = "features" if plan.get("features") is not None else "name"
        bound = f"{', '.join(linear[:-1])} or {linear[-1]}" if what == "name" else "absent"
        remedy = "export it to safetensors, which holds every model's arrays"
        raise InputError.of(f"model.{what}", plan[what], f"{bound} for an export to {to}", remedy)
    if plan["name"] == "svm":  # one score s stands for the logits 0 and s
        params = {"w": np.stack([0 * params["w"], params["w"]], 1), "b": np.stack([0, params["b"]])}
    if isinstance(model := run.model.code, LeastSquares):  # its parameters are moments
        solved = model.solve(params[PARAMETER], np)
        params = {"w": solved[:-1], "b": solved[-1]}
    names = ("1", "2") if plan["name"] == "mlp" else ("",)
    weights, biases = [params[f"w{n}"] for n in names], [params[f"b{n}"] for n in names]
    if (target := run.target) is not None:
        half, bounds = (target.high - target.low) / 2, (target.low, target.high)
        weights[-1], biases[-1] = half * weights[-1], half * biases[-1] + sum(bounds) / 2
        return Layers(weights, biases, bounds, norm)
    if (fitted := run.record["result"].get("calibration")) is not None:
        calibration = Calibration(fitted["temperature"], tuple(fitted["bias"]))
        weights[-1] = weights[-1] / calibration.temperature
        biases[-1] = calibration.apply(biases[-1][None])[0]
    return Layers(weights, biases, None, norm)


def export_run(run: Trained, to: str, path: str | Path | None = None, option: str = "to") -> Path:
    """Write the model of a run for another tool, and return the file's path.

    onnx, torch and sklearn give calibrated probabilities, as `predict_proba` does; safetensors
    holds the parameters by name. The guarantee goes with the model where the format has room.
    """
    if to not in EXPORTS:
        raise InputError.of(option, to, " or ".join(EXPORTS), "choose a format")
    package, suffix, write = EXPORTS[to]
    require_package(package, f"an export to {to}", to)
    path = Path(path or (run.folder or Path()) / f"model{suffix}")
    write(run, path, {"guarantee": run.guarantee, "noise": run.record["noise"]})
    return path


def _write_safetensors(run: Trained, path: Path, about: dict[str, str]) -> None:
    from safetensors.numpy import save_file

    arrays = {name: np.array(leaf) for name, leaf in flatten_parameters(run.params).items()}
    save_file(arrays, path, metadata=about)


def _write_onnx(run: Trained, path: Path, about: dict[str, str]) -> None:
    import onnx
    from onnx import helper, numpy_helper

    layers, nodes, constants, last = list_layers(run, "onnx"), [], [], "x"
    if layers.norm is not None:
        constants.append(numpy_helper.from_array(np.float32(layers.norm), "norm"))
        nodes.append(helper.make_node("ReduceL2", ["x"], ["length"], axes=[1], keepdims=1))
        nodes.append(helper.make_node("Max", ["length", "norm"], ["longest"]))
        nodes.append(helper.make_node("Div", ["norm", "longest"], ["share"]))
        nodes.append(helper.make_node("Mul", ["x", "share"], ["cut"]))
        last = "cut"
    for i, arrays in enumerate(zip(layers.weights, layers.biases, strict=True)):
        names = f"weight{i}", f"bias{i}"
        for name, array in zip(names, arrays, strict=True):
            constants.append(numpy_helper.from_array(array.astype(np.float32), name))
        nodes.append(helper.make_node("Gemm", [last, *names], [f"sum{i}"]))
        last = f"sum{i}"
        if i + 1 < len(layers.weights):
            nodes.append(helper.make_node("Relu", [last], [f"hidden{i}"]))
            last = f"hidden{i}"
    answer = "probabilities" if layers.bounds is None else "number"
    if layers.bounds is None:
        nodes.append(helper.make_node("Softmax", [last], [answer], axis=1))
    else:
        for name, bound in zip(("low", "high"), layers.bounds, strict=True):
            constants.append(numpy_helper.from_array(np.float32(bound), name))
        nodes.append(helper.make_node("Clip", [last, "low", "high"], [answer]))
    kind, sizes = onnx.TensorProto.FLOAT, (layers.weights[0].shape[0], layers.weights[-1].shape[1])
    ends = (
        [helper.make_tensor_value_info(name, kind, ["rows", size])]
        for name, size in zip(("x", answer), sizes, strict=True)
    )
    graph = helper.make_graph(nodes, "sottovoce", *ends, initializer=constants)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    helper.set_model_props(model, about)
    onnx.checker.check_model(model)
    path.write_bytes(model.SerializeToString())


def _write_torch(run: Trained, path: Path, about: dict[str, str]) -> None:
    import torch

    layers, parts = list_layers(run, "torch"), list[Any]()

    class CutRows(torch.nn.Module):
        def forward(self, x: Any) -> Any:
            return x * (layers.norm / x.norm(dim=1, keepdim=True).clamp_min(layers.norm))

    if layers.norm is not None:
        parts.append(CutRows())
    for w, b in zip(layers.weights, layers.biases, strict=True):
        linear = torch.nn.Linear(*w.shape)
        linear.load_state_dict({"weight": torch.tensor(w.T), "bias": torch.tensor(b)})
        parts += [linear, torch.nn.ReLU()]
    bounds = layers.bounds
    parts[-1] = torch.nn.Softmax(dim=1) if bounds is None else torch.nn.Hardtanh(*bounds)
    rows = torch.export.Dim("rows")
    example = torch.zeros(2, layers.weights[0].shape[0])
    module = torch.nn.Sequential(*parts).eval()
    program = torch.export.export(module, (example,), dynamic_shapes=({0: rows},))
    torch.export.save(program, path, extra_files=about)


def _write_sklearn(run: Trained, path: Path, about: dict[str, str]) -> None:
    import joblib
    from sklearn.linear_model import LinearRegression, LogisticRegression
    from sklearn.neural_network import MLPClassifier, MLPRegressor

    layers = list_layers(run, "sklearn")
    if layers.norm is not None:
        bound, remedy = "softmax, svm or mlp for an export to sklearn", "export it to onnx or torch"
        raise InputError.of("model.name", LeastSquares.name, bound, remedy)
    weights, biases, bounds, _ = layers
    is_binary = bounds is None and biases[-1].size == 2
    if is_binary:  # scikit-learn has one logit for two classes
        weights = [*weights[:-1], weights[-1][:, 1:] - weights[-1][:, :1]]
        biases = [*biases[:-1], biases[-1][1:] - biases[-1][:1]]
    if len(weights) == 1:
        model = LogisticRegression() if bounds is None else LinearRegression()
        model.coef_, model.intercept_ = weights[0].T, biases[0]
    else:
        model = MLPClassifier() if bounds is None else MLPRegressor()
        model.coefs_, model.intercepts_ = weights, biases
        model.n_layers_, model.n_outputs_ = len(weights) + 1, biases[-1].size
        kind = "identity" if bounds is not None else "logistic" if is_binary else "softmax"
        model.out_activation_ = kind
    model.n_features_in_ = weights[0].shape[0]
    if bounds is None:
        model.classes_ = np.array(run.classes or range(layers.biases[-1].size))
        if hasattr(model, "coefs_"):
            from sklearn.preprocessing import LabelBinarizer

            model._label_binarizer = LabelBinarizer().fit(model.classes_)
            model._label_binarizer.classes_ = model.classes_  # it sorts them
    model.sottovoce_ = about
    joblib.dump(model, path)


#: The package that each format needs, the file's ending, and what writes it.
EXPORTS: dict[str, tuple[str, str, Callable[[Trained, Path, dict[str, str]], None]]] = {
    "onnx": ("onnx", ".onnx", _write_onnx),
    "safetensors": ("safetensors", ".safetensors", _write_safetensors),
    "torch": ("torch", ".pt2", _write_torch),
    "sklearn": ("sklearn", ".joblib", _write_sklearn),
}
