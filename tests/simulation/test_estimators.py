"""The estimators of scikit-learn's interface: its own checks, and what they promise."""

from __future__ import annotations

import numpy as np
import polars as pl
import pytest

from sottovoce import Plan, simulate
from sottovoce.errors import InputError
from sottovoce.privacy.budget import LEAKS
from sottovoce.simulation.estimators import PrivateFederatedClassifier, PrivateFederatedRegressor

RNG = np.random.default_rng(1)
X = RNG.normal(size=(900, 3)).astype(np.float32)
Y = np.where(X[:, 0] + X[:, 1] > 0, "yes", "no")

try:
    from sklearn.base import clone
    from sklearn.model_selection import cross_val_score
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import MinMaxScaler
    from sklearn.utils.estimator_checks import check_estimator
except ModuleNotFoundError:
    check_estimator = None

needs_sklearn = pytest.mark.skipif(
    check_estimator is None, reason="scikit-learn, of the extra `test`, is not installed"
)


@pytest.mark.skipif(check_estimator is not None, reason="scikit-learn is installed")
def test_without_scikit_learn_the_error_says_what_to_install():
    with pytest.raises(ImportError, match=r"pip install 'sottovoce\[sklearn\]'"):
        PrivateFederatedClassifier()


@needs_sklearn
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "estimator",
    [
        pytest.param(PrivateFederatedClassifier(rounds=3), id="classifier"),
        pytest.param(
            PrivateFederatedRegressor(target=(-1, 1), rounds=3),
            id="regressor",
            marks=pytest.mark.trust,
        ),
    ],
)
def test_scikit_learns_own_checks(estimator):
    known = {"check_methods_subset_invariance": "scores are sums of float32"}
    check_estimator(estimator, on_skip=None, expected_failed_checks=known)


@needs_sklearn
def test_a_classifier_learns_and_says_what_it_promises():
    model = PrivateFederatedClassifier(clients=3, rounds=20, random_state=1).fit(X, Y)
    assert model.score(X, Y) > 0.8
    assert model.classes_.tolist() == ["no", "yes"]
    assert set(model.predict(X[:9])) <= {"no", "yes"}
    assert np.allclose(model.predict_proba(X[:9]).sum(axis=1), 1)
    record = model.run_.record
    assert "counted-classes" in record["guarantee"]["not_covered"]
    assert "simulated-noise" in record["guarantee"]["not_covered"]
    assert "evaluation-of-clients" not in record["guarantee"]["not_covered"]
    assert (record["guarantee"]["epsilon"], len(record["clients"])) == (8.0, 3)
    again = PrivateFederatedClassifier(clients=3, rounds=20, random_state=1).fit(X, Y)
    assert again.run_.record["result"] == record["result"]


@needs_sklearn
@pytest.mark.parametrize("clients", [0, -3, 2.5, True, "x", None, float("nan"), 10**7])
def test_a_number_of_clients_that_is_none_is_refused(clients):
    with pytest.raises(InputError) as refused:
        PrivateFederatedClassifier(clients=clients).fit(X, Y)
    assert str(refused.value) == (
        f"clients must be a whole number from 1 to 1000000, got {clients!r}; 10 is usual"
    )


@needs_sklearn
@pytest.mark.parametrize("clients", [3.0, np.int64(3)])
def test_a_whole_number_of_clients_is_taken_as_an_integer(clients):
    model = PrivateFederatedClassifier(clients=clients, rounds=3, random_state=1).fit(X, Y)
    assert len(model.run_.record["clients"]) == 3


@needs_sklearn
def test_sites_keep_their_rows_and_their_evaluation_rows_are_named():
    site = np.array(["a", "b", "c"])[np.arange(900) % 3]
    model = PrivateFederatedClassifier(rounds=3, random_state=1).fit(X, Y, client=site)
    record = model.run_.record
    assert [client["name"] for client in record["clients"]] == ["a", "b", "c"]
    assert sum(client["samples"] for client in record["clients"]) == 810
    assert "evaluation-of-clients" in record["guarantee"]["not_covered"]
    with pytest.raises(InputError, match="give one name for each row"):
        PrivateFederatedClassifier(rounds=3).fit(X, Y, client=site[:5])


@needs_sklearn
@pytest.mark.parametrize("unit", ["record", "client"])
@pytest.mark.parametrize(
    ("model", "y"),
    [
        pytest.param(PrivateFederatedClassifier(rounds=3, random_state=1), Y, id="classifier"),
        pytest.param(
            PrivateFederatedRegressor(target=(-5, 5), rounds=3, random_state=1),
            X[:, 0],
            id="number",
        ),
    ],
)
def test_sites_promise_what_a_table_with_a_client_column_promises(tmp_path, unit, model, y):
    """Which rows a server evaluates on, whose they are, and what the models alone show."""
    site = np.arange(900) % 3
    own = clone(model).set_params(settings=(f"local.unit={unit}",)).fit(X, y, client=site)
    pl.DataFrame({"a": X[:, 0], "y": y, "site": site}).write_csv(tmp_path / "rows.csv")
    label = ["no", "yes"] if y.dtype.kind == "U" else [-5, 5]
    table = Plan(
        data={"path": str(tmp_path / "rows.csv"), "label": "y", "client": "site",
              "columns": {"a": [-5, 5], "y": label}},
        model={"name": "softmax"} | ({} if y.dtype.kind == "U" else {"loss": "squared"}),
        local={"unit": unit},
        rounds={"schedule": "fixed", "rounds": 3},
    )  # fmt: skip
    found, expected = own.run_.record, simulate(table, seed=1).record
    counted = {"counted-classes"}  # the table declares its classes
    codes = {*found["guarantee"]["not_covered"]} - counted
    assert codes == {*expected["guarantee"]["not_covered"]}
    assert ("evaluation-in-unit" in codes) == (unit == "client")
    for record in (found, expected):
        has_leak = {*LEAKS} & {*record["guarantee"]["not_covered"]}
        assert ("were it not for" in record["guarantee"]["text"]) == bool(has_leak)
        assert ("epsilon" in record["model_view"]) == (not has_leak)
        assert "by_client" not in record["result"]["fairness"]
        assert "The clients' own rows that were taken" in record["guarantee"]["text"]


@needs_sklearn
@pytest.mark.parametrize("key", ["clients=5", "name=digits", "test=7", "target=[0,1]"])
def test_settings_of_the_data_are_refused(key):
    """The record would describe rows that were not trained on."""
    model = PrivateFederatedRegressor(target=(-5, 5), rounds=3, settings=(f"data.{key}",))
    with pytest.raises(InputError, match=r"settings must be keys outside of \[data\]"):
        model.fit(X, X[:, 0], client=np.arange(900) % 3)


@needs_sklearn
def test_settings_may_name_the_public_shares_of_classes():
    """They are of no rows: it is by them that balanced class weights are chosen."""
    settings = ("data.prevalence=[0.75,0.25]", "model.class_weights=balanced")
    model = PrivateFederatedClassifier(rounds=2, random_state=1, settings=settings)
    data = model.fit(X, Y).run_.record["plan"]["data"]
    assert tuple(data["prevalence"]) == (0.75, 0.25)


@needs_sklearn
@pytest.mark.parametrize("missing", [None, np.nan, ""])
def test_a_row_without_its_site_is_refused(missing):
    """It would be dealt to a site of its own, named nan."""
    site = np.array(["a", "b", "c"], object)[np.arange(900) % 3]
    site[4] = missing
    with pytest.raises(InputError, match="row 5 of client is missing"):
        PrivateFederatedClassifier(rounds=2).fit(X, Y, client=site)


@needs_sklearn
def test_sites_of_a_wrong_kind_are_not_called_classes():
    words = r"^client must be numbers, texts or booleans, got 'bytes8'; convert them$"
    with pytest.raises(InputError, match=words):
        PrivateFederatedClassifier(rounds=2).fit(X, Y, client=np.full(900, b"a"))


@needs_sklearn
def test_a_result_says_that_targets_beyond_the_range_are_cut():
    model = PrivateFederatedRegressor(target=(-0.1, 0.1), rounds=2, random_state=1)
    headline = model.fit(X, X[:, 0]).run_.record["result"]["headline"]["text"]
    assert "test targets lie beyond [-0.1, 0.1] and are cut to it" in headline


@needs_sklearn
def test_a_regressor_predicts_in_the_public_range():
    y = 50 + 20 * X[:, 0]
    model = PrivateFederatedRegressor(target=(0, 100), rounds=40, clients=3, random_state=1)
    assert model.fit(X, y).score(X, y) > 0.5
    assert model.predict(100 * X).min() >= 0
    assert model.predict(100 * X).max() <= 100
    assert "counted-classes" not in model.run_.record["guarantee"]["not_covered"]


@needs_sklearn
@pytest.mark.parametrize("target", [None, 5, (0,), (0, 50, 100)])
def test_a_regressor_without_a_public_range_is_refused(target):
    with pytest.raises(InputError) as refused:
        PrivateFederatedRegressor(target=target).fit(X, X[:, 0])
    assert str(refused.value) == (
        f"target must be two numbers (low, high), got {target}; "
        "give the public range of y, as target=(0, 100)"
    )


@needs_sklearn
def test_labels_beyond_the_public_range_are_cut_to_it():
    beyond, within = 90 * X[:, 0], np.clip(90 * X[:, 0], -5, 5)
    models = [
        PrivateFederatedRegressor(target=(-5, 5), rounds=3, random_state=1).fit(X, y)
        for y in (beyond, within)
    ]
    results = [model.run_.record["result"]["model_sha256"] for model in models]
    assert results[0] == results[1]


@needs_sklearn
@pytest.mark.parametrize(
    ("chosen", "settings"),
    [({"model": "least-squares"}, ()), ({}, ("model.name=least-squares",))],
)
def test_a_model_may_need_a_key_of_the_settings(chosen, settings):
    """Least squares need `model.norm`, for which there is no parameter."""
    settings += ("model.norm=3.0", "rounds.rounds=1")
    model = PrivateFederatedClassifier(clients=3, random_state=1, settings=settings, **chosen)
    assert model.fit(X, Y).score(X, Y) > 0.8


@needs_sklearn
@pytest.mark.slow
def test_pipelines_and_cross_validation_take_them():
    model = PrivateFederatedClassifier(clients=3, rounds=10, random_state=1)
    assert len(cross_val_score(make_pipeline(MinMaxScaler(), model), X, Y, cv=2)) == 2


@needs_sklearn
@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"epsilon": -1}, "privacy.epsilon must be"),
        ({"held_out": 1.0}, "held_out must be above 0"),
        ({"held_out": "0.1"}, "held_out must be above 0 and below 1, got '0.1'"),
        ({"settings": "model.hidden=32"}, "settings must be a tuple of KEY=VALUE, got 'model"),
        ({"settings": None}, "settings must be a tuple of KEY=VALUE, got None"),
        ({"settings": ("local.unit=person",)}, "local.unit must be record or client in an est"),
        ({"model": "least-squares"}, "model.norm must be a public bound"),
        ({"settings": ("noise=secure",)}, "noise must be simulated"),
        ({"model": "svn"}, "model.name must be"),
    ],
)
def test_bad_settings_are_refused_as_in_a_plan(settings, words):
    with pytest.raises(ValueError, match=words):
        PrivateFederatedClassifier(**settings).fit(X, Y)
