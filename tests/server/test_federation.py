"""What a record says of a model: measured on test rows, calibrated on validation rows."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from importlib import import_module, resources
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import jsonschema
import numpy as np
import pytest

from sottovoce import reports
from sottovoce.data import federated
from sottovoce.errors import DataError, InputError, PlanError
from sottovoce.models import metrics
from sottovoce.models.clipping import find_shortfall
from sottovoce.models.custom import custom
from sottovoce.plan import Plan
from sottovoce.reports.progress import summarize_run
from sottovoce.server.federation import (
    build,
    build_from_members,
    measure_model,
    put_on_device,
)
from sottovoce.simulation.simulate import simulate
from support.in_process import plan
from support.in_process import public as public_rows
from support.promised import account, member

SCHEMA = json.loads(resources.files("sottovoce").joinpath("schemas/record.json").read_text())
SITES = {"North": 600, "South": 400, "East": 200}


def write_table(folder: Path, *, share: float, slope: float, **data: Any) -> Plan:
    """A table of three sites with few positives, whose rate grows with age by `slope`."""
    rng, lines = np.random.default_rng(4), ["site,age,ill"]
    for site, rows in SITES.items():
        for age in rng.integers(0, 100, rows):
            ill = rng.random() < share * (1 + slope * (age - 50) / 50)
            lines.append(f"{site},{age},{'yes' if ill else 'no'}")
    (folder / "t.csv").write_text("\n".join(lines) + "\n")
    data = {
        "path": str(folder / "t.csv"),
        "label": "ill",
        "client": "site",
        "columns": {"age": [0, 100], "ill": ["no", "yes"]},
        "validation": 0.3,
        "test": 0.3,
    } | data
    return Plan(data=data, model={"name": "softmax"}, rounds={"schedule": "fixed", "rounds": 10})


def test_a_model_that_says_no_to_everybody_is_headed_so(tmp_path: Path) -> None:
    """2.5 % positives that nothing predicts: 97 % right, and worth nothing."""
    run = simulate(write_table(tmp_path, share=0.025, slope=0.0), seed=1, out=tmp_path / "run")
    result = run.record["result"]
    assert result["test_accuracy"] > 0.95
    assert np.array(result["confusion"])[:, 1].sum() == 0
    head = result["headline"]
    assert (head["metric"], head["is_better"], head["baseline"]) == ("auroc", False, 0.5)
    assert head["text"].startswith("no better than always saying 'no'")
    shown = summarize_run(run.record, tmp_path, tmp_path / "page")
    assert shown.strip().startswith("no better than always saying 'no'")
    page = reports.write_report(tmp_path / "run").read_text("utf-8")
    title = page.partition("<title>")[2].partition("</title>")[0]
    assert title.startswith("Finished: no better than always saying &#39;no&#39;")
    tiles = page.partition('class="tiles"')[2].partition("</dl>")[0]
    for text in (shown.partition("Each client")[0], title, tiles):
        # A share, with its sign: a tile also has the milliseconds that the run took.
        assert re.search(r"9[78](\.\d+)?(\s|&\w+;)*%", text) is None
    jsonschema.validate(run.record, SCHEMA)


def test_a_model_that_puts_in_order_is_headed_better_but_its_one_answer_is_named(
    tmp_path: Path,
) -> None:
    federation = build(write_table(tmp_path, share=0.1, slope=1.0), seed=1)
    shape = federation.model.shapes()["w"]
    params = {"w": jnp.zeros(shape).at[0, 1].set(1.0), "b": jnp.array([9.0, 0.0])}
    head = measure_model(federation, params)["headline"]
    assert head["is_better"]
    assert head["text"].startswith("AUROC 0.")
    assert "(always the most frequent class: 0.500)" in head["text"]
    assert "but it says 'no' to every test row" in head["text"]


def test_sites_keep_their_names_and_results_where_rows_are_declared_public(tmp_path: Path) -> None:
    plan = write_table(tmp_path, share=0.2, slope=1.0, evaluation="public")
    run = simulate(plan, seed=1, out=tmp_path / "run")
    sites = sorted(SITES)
    assert [client["name"] for client in run.record["clients"]] == sites
    held = build(plan, seed=1).held
    hits = run.predict(held.test.x) == held.test.y
    by_client = run.record["result"]["fairness"]["by_client"]
    assert [entry["name"] for entry in by_client] == sites
    for i, entry in enumerate(by_client):
        rows = held.test_owner == i
        assert entry["rows"] == rows.sum()
        assert entry["accuracy"] == pytest.approx(hits[rows].mean())
        scores = np.diff(run.model.scores(run.params, jnp.asarray(held.test.x[rows])), axis=1)
        area = metrics.compute_auroc(held.test.y[rows] == 1, scores[:, 0])
        assert entry["value"] == pytest.approx(area)
    page = reports.write_report(tmp_path / "run").read_text("utf-8")
    assert all(page.count(f'<th scope="row">{site}</th>') == 2 for site in sites)
    jsonschema.validate(run.record, SCHEMA)
    silent = simulate(plan.replace(**{"data.evaluation": None}), seed=1).record
    assert "by_client" not in silent["result"]["fairness"]


def test_metrics_are_those_of_the_test_rows(tmp_path: Path) -> None:
    run = simulate(Plan(rounds={"schedule": "fixed", "rounds": 3}), seed=1)
    result, held = run.record["result"], build(Plan(), seed=1).held
    x = jnp.asarray(held.test.x)
    scores = run.model.scores(run.params, x)
    assert scores.shape == (len(held.test.y), 10)
    assert np.allclose(scores, run.model.apply(run.params, x), rtol=1e-5, atol=1e-6)
    assert (scores.argmax(axis=1) == run.predict(held.test.x)).all()
    found = metrics.measure_classes(held.test.y, scores.argmax(axis=1), scores)
    assert result["headline"]["metric"] == "accuracy"
    for name in ("accuracy", "balanced_accuracy", "auroc", "auprc"):
        assert result["metrics"][name] == pytest.approx(found[name]._asdict())
    assert result["test_accuracy"] == pytest.approx(found["accuracy"].value)
    public = run.model.scores(run.params, jnp.asarray(held.validation.x))
    fitted = metrics.fit_calibration(held.validation.y, public)
    calibrated = None if fitted is None else fitted.apply(scores)
    assert ("calibration" in result) == (fitted is not None)
    found = metrics.measure_classes(held.test.y, scores.argmax(axis=1), scores, calibrated)
    for name in ("log_loss", "brier", "calibration_error"):
        assert result["metrics"][name]["value"] == pytest.approx(found[name].value)


def test_test_rows_that_steer_do_not_calibrate() -> None:
    plan = Plan(data={"validation": 0}, rounds={"schedule": "fixed", "rounds": 1})
    assert "calibration" not in simulate(plan, seed=1).record["result"]


def test_a_svm_has_probabilities_of_its_margin(tmp_path: Path) -> None:
    plan = write_table(tmp_path, share=0.4, slope=1.0).replace(**{"model.name": "svm"})
    federation = build(plan, seed=1)
    params = {"w": jnp.array([3.0] * federation.held.test.x.shape[1]), "b": jnp.array(-1.0)}
    scores = federation.model.scores(params, jnp.asarray(federation.held.test.x))
    margins = federation.held.test.x @ np.asarray(params["w"]) - 1
    assert np.allclose(scores, np.stack([np.zeros(len(margins)), margins], axis=1), atol=1e-5)


@pytest.mark.parametrize(("width", "has_scores"), [(10, True), (1, False), (7, False)])
def test_own_scores_that_are_not_of_the_classes_give_the_metrics_of_answers(
    width: int, has_scores: bool
) -> None:
    model = custom(
        init=lambda key: jnp.zeros((64, width)),
        apply=lambda w, x: x @ w,
        loss=lambda scores, y: scores.sum(axis=1),
        predict=lambda scores: jnp.zeros(scores.shape[0], int) + 12,
    )
    plan = Plan(model={"name": "custom"})
    federation = build(plan, seed=1, model=model)
    found = measure_model(federation, model.draw_parameters(1))
    assert ("auroc" in found["metrics"]) == has_scores == ("curves" in found)
    assert np.sum(found["confusion"]) == 0  # no such class as 12
    assert found["headline"]["text"].startswith("no better than always saying")


def _centre(x: Any) -> Any:
    return x - x.mean(0)


def _normalise(x: Any) -> Any:
    return _centre(x) / ((_centre(x) ** 2).mean(0) + 1e-5) ** 0.5


@pytest.mark.parametrize("mix", [_centre, _normalise, lambda x: x + x[:1]])
@pytest.mark.parametrize("kind", ["jax", "torch"])
def test_own_models_whose_rows_influence_each_other_are_refused(kind: str, mix: Any) -> None:
    """Training computes every sample alone: such a model would learn nothing, without a word."""
    model: Any = custom(
        init=lambda key: jnp.zeros((64, 10)),  # hides it in the first model
        apply=lambda w, x: mix(x) @ w,
        loss=lambda scores, y: scores[:, 0],
    )
    if kind == "torch":
        nn = pytest.importorskip("torch").nn
        model = nn.Linear(64, 10)
        model.register_forward_pre_hook(lambda module, given: mix(given[0]))
        nn.init.zeros_(model.weight)
    with pytest.raises(InputError, match="scores of a row must depend on this row alone"):
        build(Plan(model={"name": "custom"}), seed=1, model=model)


@pytest.mark.parametrize(("scores", "classes"), [(5, 2), (2, 3), (1, 3)])
def test_an_own_model_has_a_score_for_each_class(scores: int, classes: int) -> None:
    """Or a function that decides: else its probabilities would be missed after training."""
    x, y = np.zeros((40, 2), np.float32), np.arange(40) % classes
    functions = {
        "init": lambda key: jnp.zeros((2, scores)),
        "apply": lambda w, x: x @ w,
        "loss": lambda scores, y: scores[:, 0],
    }
    models: list[Any] = [custom(**functions)]
    if find_spec("torch") is not None:
        models.append(import_module("torch").nn.Linear(2, scores))
    plan = Plan(data={"clients": 2}, model={"name": "custom"}, rounds={"rounds": 1})
    for model in models:
        with pytest.raises(InputError, match=f"{classes} a row, one for each class"):
            simulate(plan, data=(x, y), model=model, seed=1)
    simulate(plan, data=(x, y), model=custom(**functions, predict=lambda s: s[:, 0] > 0), seed=1)


@pytest.mark.parametrize("metric", metrics.CLASS_METRICS)
@pytest.mark.parametrize("classes", [2, 4])
def test_what_steers_is_what_is_missing_of_the_metric(metric: str, classes: int) -> None:
    """The compiled metric against numpy's, with ties and a class that does not occur."""
    rng = np.random.default_rng(8)
    labels = rng.integers(0, min(classes, 3), 300) * (rng.random(300) < 0.6)
    # With more classes, rounding decides between probabilities that are equal.
    scores = rng.integers(-3, 3, (300, 2)) if classes == 2 else rng.normal(size=(300, classes))
    scores = scores + 2.0 * np.eye(classes)[labels]
    predicted = scores.argmax(axis=1)
    found = metrics.measure_classes(labels, predicted, scores)[metric].value
    expected = found if metric in metrics.LESS_IS_BETTER else 1 - found
    steering = find_shortfall(metric, jnp.asarray(labels), predicted, jnp.asarray(scores))
    assert float(steering) == pytest.approx(expected, abs=1e-5)
    scores[3, 0] = np.nan
    assert np.isnan(find_shortfall(metric, jnp.asarray(labels), predicted, jnp.asarray(scores)))


@pytest.mark.parametrize("metric", metrics.REGRESSION_METRICS)
def test_what_steers_numbers_is_the_error_or_what_is_not_explained(metric: str) -> None:
    rng = np.random.default_rng(8)
    targets, scores = rng.normal(size=100), rng.normal(size=(100, 2))
    found = metrics.measure_regression(targets, scores[:, 1])[metric].value
    steering = find_shortfall(metric, jnp.asarray(targets), jnp.zeros(100), jnp.asarray(scores))
    expected = 1 - found if metric == "r2" else found
    assert float(steering) == pytest.approx(expected, rel=1e-5)


ENGINES = {"compiled": {}, "secure": {"noise": "secure"}, "several": {"local.steps": 2}}


@pytest.mark.slow
@pytest.mark.parametrize("engine", [*ENGINES, "streamed"])
def test_the_metric_of_the_plan_steers_every_engine_and_chooses_the_model(engine: str) -> None:
    rng = np.random.default_rng(3)
    x = rng.normal(size=(900, 3)).astype(np.float32)
    y = (x[:, 0] + 2 * rng.normal(size=900) > 2.5).astype(np.int32)
    plan = Plan(
        metric="auroc",
        data={"clients": 3, "name": "arrays", "split": "order"},
        model={"name": "softmax"},
        privacy={"epsilon": 1},
        rounds={"schedule": "fixed", "rounds": 5},
        server={"choose": "best"},
    ).replace(**ENGINES.get(engine, {}))
    rows: Any = AsFile(x[:600]) if engine == "streamed" else x[:600]
    options = {} if engine == "secure" else {"seed": 1}
    public = {"validation": (x[600:750], y[600:750]), "test": (x[750:], y[750:])}
    seen: list[Any] = []
    run = simulate(plan, data=(rows, y[:600]), **public, **options, on_round=seen.append)
    assert {done.metric for done in seen} == {"auroc"}
    assert [1 - done.score for done in seen] == pytest.approx(
        [entry["signal"] for entry in run.record["rounds"]]
    )
    signals = [run.record["initial"]["signal"]] + [e["signal"] for e in run.record["rounds"]]
    assert signals[0] == 0.5  # the first model gives every row the same score
    margins = np.diff(run.model.scores(run.params, jnp.asarray(x[600:750])), axis=1)[:, 0]
    area = metrics.compute_auroc(y[600:750] == 1, margins)
    assert 1 - area == pytest.approx(min(signals[1:]), abs=1e-5)
    assert run.record["result"]["headline"]["metric"] == "auroc"


class AsFile:
    """Rows by slices, as a memory-mapped file gives them."""

    def __init__(self, rows: Any) -> None:
        self.rows, self.shape, self.dtype = rows, rows.shape, rows.dtype

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, where: Any) -> Any:
        return self.rows[where]


def test_a_metric_that_cannot_be_had_is_refused_before_training() -> None:
    with pytest.raises(PlanError, match=r"metric must be accuracy or .* for classes, got 'r2'"):
        Plan(metric="r2")
    x, y = np.zeros((40, 2), np.float32), np.arange(40) % 2
    public = {"validation": (x, np.zeros(40, int)), "test": (x, y)}
    plan = Plan(metric="auroc", data={"clients": 2}, model={"name": "softmax"})
    with pytest.raises(InputError, match="all validation rows are of one class"):
        simulate(plan, data=(x, y), **public, seed=1)
    strange = custom(
        init=lambda key: jnp.zeros(64),
        apply=lambda w, x: x @ w,
        loss=lambda scores, y: scores,
        predict=lambda scores: scores > 0,
    )
    with pytest.raises(InputError, match="metric must be absent for a model without 10 scores"):
        simulate(Plan(metric="auroc"), model=strange, seed=1)
    assert "metric" not in Plan().to_dict()


def test_a_federation_shows_the_results_of_its_sites_on_rows_that_the_server_holds(tmp_path):
    """By the names of those that take part; a hidden budget is in no group of budgets."""
    rng = np.random.default_rng(4)
    held = public_rows()
    sites = np.array(["client-0", "client-1", "elsewhere"])[rng.integers(0, 3, len(held.test.y))]
    names, owner = np.unique(sites, return_inverse=True)
    given = replace(held, names=tuple(names.tolist()), test_owner=owner.astype(np.int32))
    federated.save_public(tmp_path / "public.npz", given)
    read = federated.load_public(tmp_path / "public.npz")
    members = [member(0, account(8.0)), member(1, None)]
    built = build_from_members(plan(**{"data.clients": 2}), members, read)
    again = build_from_members(built.plan, members, built.held, built.model)
    for found in (built, again):
        shown = measure_model(found, found.model.draw_parameters(1))["fairness"]
        assert [(entry["name"], entry["rows"]) for entry in shown["by_client"]] == [
            ("client-0", int((sites == "client-0").sum())),
            ("client-1", int((sites == "client-1").sum())),
        ]
        assert [group["rows"] for group in shown["by_budget"]] == [int((sites == "client-0").sum())]
    assert federated.load_public(save_sites(tmp_path / "other.npz", held)).test_owner is None
    with pytest.raises(DataError, match="one site for each"):
        federated.load_public(save_sites(tmp_path / "few.npz", held, test_site=sites[1:]))


def save_sites(path, held, **more):
    """The public rows as an operator would write them."""
    federated.save_public(path, held)
    with np.load(path) as stored:
        np.savez(path, **{**stored}, **more)
    return path


def test_a_cpu_holds_rows_once() -> None:
    given = np.arange(12, dtype=np.float32).reshape(4, 3)
    samples = federated.Samples(given.copy(), np.zeros(4, np.int32))
    x, _ = put_on_device(samples)
    assert np.shares_memory(samples.x, np.asarray(x))
    assert np.array_equal(samples.x, given)


@pytest.mark.parametrize("offset", [0, 4])
def test_rows_on_a_device_are_not_the_callers(offset) -> None:
    """JAX takes over an array that begins at 64 bytes, whatever it is asked for."""
    memory = np.zeros(4 * 12 + 128, np.uint8)
    start = -memory.ctypes.data % 64 + offset
    given = memory[start : start + 4 * 12].view(np.float32).reshape(4, 3)
    samples = federated.Samples(given, np.zeros(4, np.int32))
    x, _ = put_on_device(samples)
    given[...] = 7
    assert not np.asarray(x).any()
    assert not samples.x.any()
