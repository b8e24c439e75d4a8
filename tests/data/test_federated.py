"""Labels of arrays: classes with names, and what is no class; arrays in files."""

import re
import shutil

import jax.numpy as jnp
import numpy as np
import pytest
from typer.testing import CliRunner

from sottovoce import Plan, load, simulate
from sottovoce.cli.commands import app
from sottovoce.data.check import check_plan
from sottovoce.data.federated import (
    Given,
    compute_features,
    load_holdings,
    load_public,
    save_public,
)
from sottovoce.errors import DataError, InputError, PlanError
from sottovoce.simulation.simulate import adapt_plan

SHORT = Plan(
    data={"clients": 2}, model={"name": "softmax"}, rounds={"schedule": "fixed", "rounds": 2}
)
RNG = np.random.default_rng(3)
X = RNG.standard_normal((120, 3)).astype(np.float32)
BIT = (X[:, 0] > 0).astype(int)
PUBLIC = slice(0, 40)


def hold(labels, *, public=True, x=X):
    """Return the holdings of arrays whose first rows are public."""
    labels = np.asarray(labels)
    pair = (x[PUBLIC], labels[PUBLIC])
    sets = {"validation": pair, "test": pair} if public else {}
    plan = SHORT.replace(**{"data.name": "arrays", "data.validation": 40, "data.test": 40})
    return load_holdings(plan, seed=1, data=Given((x, labels), **sets))


@pytest.mark.parametrize("public", [True, False])
@pytest.mark.parametrize(
    ("labels", "names"),
    [
        (np.array(["no", "yes"])[BIT], ("no", "yes")),
        (np.array(["no", "yes"], object)[BIT], ("no", "yes")),
        (BIT.astype(bool), ("false", "true")),
        (BIT.astype(float), ()),
        (BIT + 1, ("1", "2")),
        (2.0 * BIT - 1, ("-1", "1")),
        (np.array(["10", "9"])[BIT], ("9", "10")),
        (BIT.astype(np.uint8), ()),
    ],
)
def test_labels_of_any_kind_are_classes_that_keep_their_names(labels, names, public):
    held = hold(labels, public=public)
    assert (held.classes, held.class_names, held.counted) == (2, names, not public)
    assert held.train.y.dtype == np.int32
    shown = names or ("0", "1")
    order = np.arange(len(X)) if held.split is None else np.concatenate(held.split.clients)
    for found, label in zip(held.train.y.tolist(), labels[order].tolist(), strict=True):
        text = str(label).lower() if isinstance(label, bool | str) else f"{label:g}"
        assert shown[found] == text


def test_whole_numbers_from_zero_are_what_they_were():
    """Labels 0, 1, … give the classes, the rows and the model that they always gave."""
    gaps = np.where(BIT == 1, 3, 0)
    assert (hold(gaps).classes, hold(gaps).class_names) == (4, ())


@pytest.mark.parametrize(
    "labels",
    [
        X[:, 1],
        np.arange(120.0),  # a float with many values, though they are whole
        RNG.integers(25, 346, 120),  # whole numbers that number nothing
        np.where(BIT == 1, 0.5, 1.0),
    ],
)
def test_a_continuous_label_is_refused_with_the_remedy(labels):
    with pytest.raises(InputError, match=r"model\.loss = squared or huber and data\.target"):
        hold(labels)


def test_many_classes_numbered_from_one_are_classes():
    assert hold(np.arange(120) % 26 + 1).classes == 26


@pytest.mark.parametrize("stored", [False, True])
@pytest.mark.parametrize("largest", [1000, 10**9, 2**32, 2**40 + 1])
def test_numbers_that_are_too_large_for_classes_are_names(tmp_path, largest, stored):
    """A model of 10⁹ classes is never allocated, and 2³² is not the class 0."""
    x = X
    if stored:
        np.save(tmp_path / "x.npy", X)
        x = np.load(tmp_path / "x.npy", mmap_mode="r")
    np.save(tmp_path / "y.npy", BIT * largest)
    labels = np.load(tmp_path / "y.npy", mmap_mode="r" if stored else None)
    plan = SHORT.replace("data.name=arrays", "data.validation=5", "data.test=5")
    held = load_holdings(plan, seed=1, data=Given((x, labels)))
    assert held.class_names == ("0", str(largest))
    y = np.concatenate([np.asarray(rows.y) for rows in (held.train, held.validation, held.test)])
    assert sorted(y.tolist()) == sorted(BIT.tolist())


def test_labels_number_their_classes_where_some_may_be_absent():
    assert hold(BIT * 998).classes == 999


@pytest.mark.parametrize("rows", [10**6 + 1, 11 * 10**6, 10**8])
def test_any_number_of_rows_may_be_given(rows):
    """No key of the plan that nobody set stands in the way; nothing is allocated here."""
    x, y = np.broadcast_to(np.float32(0), (rows, 2)), np.broadcast_to(np.int8(0), rows)
    assert adapt_plan(Plan(), Given((x, y)), None).data.test == rows // 10
    several = adapt_plan(Plan(), Given([(x, y)] * 2, (x, y), (x, y)), None).data
    assert (several.samples, several.validation, several.test) == ((rows, rows), rows, rows)


@pytest.mark.parametrize("library", ["torch", "jax"])
def test_rows_of_other_libraries_are_read_as_their_numbers(library, monkeypatch):
    """A tensor's dtype is no numpy dtype, and numpy calls bfloat16 by the kind of raw bytes."""
    if library == "torch":
        torch = pytest.importorskip("torch", reason="the extra sottovoce[torch] is not installed")
        x = torch.from_numpy(X)
    else:
        x = jnp.asarray(X, jnp.bfloat16)
    expected = hold(BIT, x=np.asarray(x, np.float32)).train.x
    np.testing.assert_array_equal(hold(BIT, x=x).train.x, expected)
    monkeypatch.setattr("sottovoce.data.federated.is_streamed", lambda rows: rows is x)
    np.testing.assert_array_equal(np.asarray(hold(BIT, x=x).train.x), expected)


@pytest.mark.parametrize(
    "x",
    [
        pytest.param((X + 1j).tolist(), id="complex"),
        pytest.param(np.zeros((120, 3), "M8[D]").tolist(), id="days"),
        pytest.param(np.zeros((120, 3), "M8[D]"), id="array-of-days"),
        pytest.param(np.zeros((120, 3), [("a", "f4")]), id="structured"),
    ],
)
def test_rows_that_are_no_numbers_are_refused(x):
    plan = SHORT.replace("data.name=arrays", "data.validation=40", "data.test=40")
    kind = getattr(x, "dtype", "list")
    said = f"data must be a pair (X, y) of arrays, got {(str(kind), str(BIT.dtype))!r:.20}"
    with pytest.raises(InputError, match=f"^{re.escape(said)}"):
        load_holdings(plan, seed=1, data=Given((x, BIT)))


def test_texts_need_a_network_that_reads_them(tmp_path):
    texts = np.array([f"note {i}" for i in range(120)])
    with pytest.raises(InputError, match=r"data must be numbers without a network in model\.feat"):
        hold(BIT, x=texts)
    np.savez(tmp_path / "notes.npz", x=texts, y=BIT)
    plan = Plan(data={"path": tmp_path / "notes.npz", "clients": 3})
    assert "without a network in model.features, got 'texts'" in check_plan(plan).errors[0]


@pytest.mark.parametrize(
    ("content", "out", "said"),
    [
        (b"hello", "out.npz", "rows.npy cannot be read as samples: it is no .npy file"),
        (None, "out.npz", "FILE must be a file that exists"),
        (X[:, 0], "out.npz", "x must be an array with a row a sample, got (120,)"),
        (np.full((3, 2), "a"), "out.npz", "rows.npy cannot be read as samples: could not convert"),
        (X, "none/out.npz", "out must be a new .npz file in a folder that exists"),
    ],
)
def test_what_has_no_features_is_refused_before_they_are_computed(tmp_path, content, out, said):
    rows = tmp_path / "rows.npy"
    if isinstance(content, bytes):
        rows.write_bytes(content)
    elif content is not None:
        np.save(rows, content)
    with pytest.raises((InputError, DataError)) as caught:
        compute_features(rows, "wordllama", tmp_path / out)
    assert said in str(caught.value)


def test_a_file_of_labels_that_is_absent_is_named_by_its_key(tmp_path):
    np.save(tmp_path / "x.npy", X)
    plan = Plan(data={"path": tmp_path / "x.npy", "label": "y.npy", "clients": 3})
    with pytest.raises(InputError, match=r"data\.label must be a file that exists, got 'y\.npy'"):
        load_holdings(plan, seed=1)


@pytest.mark.parametrize("labels", [["a", ""] * 60, ["a", None] * 60, [0.0, np.nan] * 60])
def test_a_missing_label_is_refused_with_its_row(labels):
    with pytest.raises(InputError, match="row 2 of data labels is missing"):
        hold(np.array(labels, object if None in labels else None))


def test_a_class_that_is_not_public_is_refused_by_its_name():
    labels = np.array(["no", "yes"])[BIT]
    labels = np.where(np.arange(120) == 77, "rare", labels)
    with pytest.raises(InputError, match=r"data labels must be one of no, yes.*got 'rare'"):
        hold(labels)
    assert hold(labels, public=False).class_names == ("no", "rare", "yes")


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_number_that_is_not_finite_is_refused_with_its_row(bad):
    x = X.copy()
    x[70, 2] = bad
    with pytest.raises(InputError, match="row 71 of data holds a number that is missing"):
        hold(BIT, x=x)


def test_streamed_rows_are_looked_through_and_their_labels_named(tmp_path):
    np.save(tmp_path / "x.npy", X)
    x = np.load(tmp_path / "x.npy", mmap_mode="r")
    assert hold(BIT + 1, x=x).class_names == ("1", "2")
    broken = X.copy()
    broken[99, 0] = np.nan
    np.save(tmp_path / "y.npy", broken)
    held = hold(BIT, x=np.load(tmp_path / "y.npy", mmap_mode="r"))
    with pytest.raises(
        InputError, match="row 100 of data holds"
    ):  # when it is read, and not before
        np.asarray(held.train.x)
    run = {"data": (np.load(tmp_path / "y.npy", mmap_mode="r"), BIT)}
    with pytest.raises(InputError, match="row 100 of data holds"):
        simulate(SHORT.replace("data.validation=5", "data.test=5"), **run, seed=1)


def test_names_are_kept_in_record_page_prediction_and_public_rows(tmp_path):
    labels = np.array(["ill", "well"])[BIT]
    run = simulate(SHORT, data=(X, labels), seed=1, out=tmp_path / "run")
    assert run.record["model"]["labels"] == ["ill", "well"]
    again = load(tmp_path / "run")
    assert again.classes == ("ill", "well")
    np.save(tmp_path / "new.npy", X[:5])
    printed = CliRunner().invoke(app, ["predict", str(tmp_path / "run"), str(tmp_path / "new.npy")])
    assert printed.output.split() == [again.classes[i] for i in again.predict(X[:5])]
    CliRunner().invoke(app, ["report", str(tmp_path / "run")])
    assert "well" in (tmp_path / "run" / "report.html").read_text("utf-8")
    save_public(tmp_path / "public.npz", hold(labels))
    assert load_public(tmp_path / "public.npz").class_names == ("ill", "well")


def test_arrays_with_and_without_names_give_the_same_model():
    numbered, named = (
        simulate(SHORT, data=(X, labels), seed=1) for labels in (BIT, np.array(["a", "b"])[BIT])
    )
    hashes = [run.record["result"]["model_sha256"] for run in (numbered, named)]
    assert hashes[0] == hashes[1]


# --- arrays in files


def write_npz(folder, **arrays):
    np.savez(folder / "x.npz", **({"x": X, "y": np.array(["no", "yes"])[BIT]} | arrays))
    return folder / "x.npz"


def plan_of(path, **data):
    return SHORT.replace(**{"data.path": str(path)} | {f"data.{k}": v for k, v in data.items()})


def test_an_npz_is_read_like_arrays(tmp_path):
    held = load_holdings(plan_of(write_npz(tmp_path)), seed=1)
    assert (held.classes, held.class_names, held.counted) == (2, ("no", "yes"), True)
    assert len(held.validation.y) == len(held.test.y) == 12
    np.save(tmp_path / "x.npy", X)
    np.save(tmp_path / "y.npy", BIT)
    other = load_holdings(plan_of(tmp_path / "x.npy", label="y.npy"), seed=1)
    assert np.array_equal(other.train.x, held.train.x)
    assert np.array_equal(other.train.y, held.train.y)


def test_clients_whose_numbers_are_no_int64_are_not_taken_for_one(tmp_path):
    sites = np.array([1e19, 2e19, 3.0])[np.arange(120) % 3]
    held = load_holdings(plan_of(write_npz(tmp_path, site=sites), client="site"), seed=1)
    assert (len(held.samples), held.samples.min() > 0) == (3, True)


def test_an_npz_may_name_the_client_of_each_row(tmp_path):
    sites = np.array(["west", "east", "north"])[np.arange(120) % 3]
    path = write_npz(tmp_path, site=sites)
    held = load_holdings(plan_of(path, client="site"), seed=1)
    assert held.names == ("east", "north", "west")
    rows = {row.tobytes(): site for row, site in zip(X, sites, strict=True)}
    for i, name in enumerate(held.names):
        assert {rows[row.tobytes()] for row in held.client(i).x} == {name}


def test_the_classes_of_an_npz_are_public_where_a_file_or_the_plan_lists_them(tmp_path):
    path = write_npz(tmp_path)
    public = shutil.copy(path, tmp_path / "public.npz")
    assert not load_holdings(plan_of(path, validation=str(public)), seed=1).counted
    declared = plan_of(path, columns={"y": ["yes", "no"]})
    held = load_holdings(declared, seed=1)
    assert (held.class_names, held.counted) == (("yes", "no"), False)
    secure = load_holdings(declared.replace("noise=secure"), seed=1)
    assert secure.class_names == ("yes", "no")


def test_pictures_in_an_npz_keep_their_shape(tmp_path):
    path = write_npz(tmp_path, x=np.zeros((120, 8, 8, 1), np.float32))
    plan = plan_of(path).replace("model.name=cnn")
    assert load_holdings(plan, seed=1).shape == (8, 8, 1)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"path": "x.npy"}, "data.label is missing; it must be the name of a column"),
        ({"path": "x.npy", "label": "y"}, "data.label must be a .npy file beside data.path"),
        ({"path": "x.npz", "infer": True}, "data.infer has no effect with arrays"),
        ({"path": "x.npz", "columns": {"age": [0, 1]}}, "data.columns.age has no effect"),
        ({"path": "x.npz", "test": "t.csv"}, "data.test must be an .npz file beside arrays"),
    ],
)
def test_what_does_not_fit_arrays_in_a_file_is_refused_by_the_plan(data, message):
    with pytest.raises(PlanError, match=message):
        Plan(data=data)


def test_a_file_without_its_arrays_is_refused(tmp_path):
    with pytest.raises(DataError, match="there is no array target"):
        load_holdings(plan_of(write_npz(tmp_path), label="target"), seed=1)
    with pytest.raises(InputError, match=r"data\.path must be a file that exists"):
        load_holdings(plan_of(tmp_path / "none.npz"), seed=1)


def test_a_numeric_label_with_many_values_is_no_class_of_a_table(tmp_path):
    rows = "".join(f"{i % 50},{i % 7}\n" for i in range(120))
    (tmp_path / "people.csv").write_text("pressure,age\n" + rows)
    data = {"path": str(tmp_path / "people.csv"), "label": "pressure", "infer": True}
    with pytest.raises(InputError, match=r"got 50; list them, or.*squared or huber"):
        load_holdings(Plan(data=data), seed=1)
    listed = data | {"columns": {"pressure": [str(i) for i in range(50)]}}
    assert load_holdings(Plan(data=listed), seed=1).classes == 50


@pytest.mark.slow
def test_the_command_after_a_rehearsal_of_arrays_works(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_npz(tmp_path)
    public = str(tmp_path / "public.npz")
    np.savez(public, x=X + 0.1, y=np.array(["no", "yes"])[BIT])
    (tmp_path / "plan.toml").write_text(
        '[data]\npath = "x.npz"\nclients = 2\nsamples = 40\n[model]\nname = "softmax"\n'
        '[rounds]\nrounds = 3\nschedule = "fixed"\n'
    )
    said = CliRunner().invoke(
        app, ["rehearse", "plan.toml", "--public", public, "--minutes", "0.02", "--out", "r"]
    )
    assert said.exit_code == 0, said.output
    command = said.output.split("train  sottovoce ")[1].split()
    trained = CliRunner().invoke(app, [*command, "--quiet", "--out", "run"])
    assert trained.exit_code == 0, trained.output


NUMBER = SHORT.replace(**{"model.loss": "squared", "data.target": [0, 50], "data.name": "arrays"})


@pytest.mark.parametrize("kind", ["pair", "clients", "npz", "table", "stored"])
def test_numbers_are_cut_to_their_range_and_scaled_alike_wherever_they_come_from(tmp_path, kind):
    y = RNG.uniform(-10, 70, len(X))
    wanted = np.sort((np.clip(y, 0, 50) / 25 - 1).astype(np.float32))
    plan, given = (
        NUMBER.replace(**{"data.validation": 20, "data.test": 20, "data.clients": 4}),
        None,
    )
    if kind == "pair":
        given = Given((X, y))
    if kind == "stored":
        np.save(tmp_path / "x.npy", X)
        given = Given((np.load(tmp_path / "x.npy", mmap_mode="r"), y))
    if kind == "clients":
        parts = [(X[i::6], y[i::6]) for i in range(4)]
        given = Given(parts, validation=(X[4::6], y[4::6]), test=(X[5::6], y[5::6]))
    if kind in ("npz", "table"):
        np.savez(tmp_path / "rows.npz", x=X, y=y)
        cells = [f"{a},{b},{c}" for (a, b), c in zip(X[:, :2], y, strict=True)]
        (tmp_path / "rows.csv").write_text("\n".join(["a,b,y", *cells]))
        file = "rows.npz" if kind == "npz" else "rows.csv"
        data = {"path": str(tmp_path / file), "label": "y", "target": [0, 50], "clients": 4}
        columns = {"columns": {"a": [-9, 9], "b": [-9, 9]}} if kind == "table" else {}
        plan = Plan(data=data | columns | {"validation": 20, "test": 20}, model={"loss": "huber"})
    held = load_holdings(plan, seed=1, data=given)
    assert (held.classes, held.counted, held.class_names) == (1, False, ())
    assert held.target == plan.regression
    sets = (held.train, held.validation, held.test)
    dealt = np.concatenate([np.asarray(rows.y) for rows in sets])
    assert dealt.dtype == np.float32
    np.testing.assert_allclose(np.sort(dealt), wanted, atol=1e-6)
    save_public(tmp_path / "public.npz", held)
    public = load_public(tmp_path / "public.npz")
    assert public.target == held.target
    np.testing.assert_allclose(public.test.y, np.asarray(held.test.y), atol=1e-6)


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        (np.where(np.arange(120) == 3, np.nan, 1.0), "row 4 of data targets is no number"),
        (np.array(["low", "high"])[BIT], "data targets must be numbers"),
    ],
)
def test_what_is_no_number_is_refused_with_its_row(labels, message):
    with pytest.raises(InputError, match=message):
        load_holdings(NUMBER, seed=1, data=Given((X, labels)))
    with pytest.raises(InputError, match=r"absent with data\.name = digits"):
        load_holdings(NUMBER.replace(**{"data.name": "digits"}), seed=1)


def test_a_table_with_a_missing_number_is_refused_with_its_row(tmp_path):
    (tmp_path / "rows.csv").write_text("a,y\n1,2\n2,\n3,high\n")
    data = {"path": str(tmp_path / "rows.csv"), "label": "y", "columns": {"a": [0, 9], "y": [0, 9]}}
    with pytest.raises(DataError, match=r"row 2 of rows\.csv has an empty cell in column 'y'"):
        load_holdings(Plan(data=data, model={"loss": "squared"}), seed=1)
