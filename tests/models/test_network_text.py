"""Free texts: their bytes are part of a sample, and a client makes features of them."""

from __future__ import annotations

import json
import re
import tomllib
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from sottovoce import Plan, load, simulate
from sottovoce.cli.commands import app
from sottovoce.client import describe, device, ledger, messages
from sottovoce.client.node import Node
from sottovoce.data import tables
from sottovoce.data.check import check_plan
from sottovoce.errors import InputError, PlanError
from sottovoce.models.base import Form
from sottovoce.models.network import TEXT_BYTES, TEXT_NUMBERS, build_network, pack_texts
from sottovoce.models.network import unpack_texts as unpack
from support.devices import ask, kind, told

pytest.importorskip("tokenizers", reason="the extra features is not installed")
pytest.importorskip("wordllama", reason="the extra features is not installed")

WORDS = {
    "ill": [
        "fever",
        "cough",
        "infection",
        "doctor",
        "hospital",
        "patient",
        "drug",
        "treatment",
        "symptoms",
        "disease",
    ],
    "car": [
        "engine",
        "wheel",
        "brake",
        "driver",
        "road",
        "garage",
        "fuel",
        "tyre",
        "gear",
        "highway",
    ],
}


def draw_notes(n, seed=0):
    """Return sentences about illness and cars, and which each is about."""
    rng = np.random.default_rng(seed)
    topics = [("car", "ill")[i % 2] for i in range(n)]
    return [f"the {' and the '.join(rng.choice(WORDS[topic], 4))}" for topic in topics], topics


def write_table(path, n=120):
    notes, topics = draw_notes(n)
    lines = [
        f'{i % 90},"{note}",{topic}\n'
        for i, (note, topic) in enumerate(zip(notes, topics, strict=True))
    ]
    path.write_text("age,note,topic\n" + "".join(lines))
    return path


def plan_for(path, data=None, **changes):
    table = {"path": str(path), "label": "topic", "text": "note", "clients": 2, "test": 0.2}
    table["columns"] = {"age": [0, 90], "topic": ["car", "ill"]}
    values = {
        "data": data or table,
        "model": {"name": "softmax", "features": "wordllama"},
        "rounds": {"schedule": "fixed", "rounds": 10},
        "privacy": {"epsilon": 50.0},
    }
    return Plan(**values).replace(**changes)


@settings(max_examples=30)
@given(st.lists(st.text(max_size=60).map(lambda text: text.rstrip("\0")), max_size=5))
def test_texts_become_numbers_and_texts_again(texts):
    readable = [text.encode("utf-8", "replace").decode() for text in texts]
    assert unpack(pack_texts(texts)) == readable


def test_a_long_text_is_cut_between_letters():
    text = "é" * TEXT_BYTES
    (found,) = unpack(pack_texts([text]))
    assert found == "é" * (TEXT_BYTES // 2)
    (odd,) = unpack(pack_texts(["a" + text]))
    assert odd == "a" + "é" * (TEXT_BYTES // 2 - 1)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -5.0, 1e30, 0.5])
def test_numbers_that_are_no_text_are_read_as_some_text(bad):
    packed = np.full((2, TEXT_NUMBERS), bad, np.float32)
    assert all(isinstance(text, str) for text in unpack(packed))


def test_a_text_has_the_mean_vector_of_its_pieces():
    safetensors = pytest.importorskip("safetensors.numpy")
    tokenizers = pytest.importorskip("tokenizers")
    import wordllama

    (folder,) = wordllama.__path__
    (table,) = safetensors.load_file(f"{folder}/weights/l2_supercat_256.safetensors").values()
    pieces = tokenizers.Tokenizer.from_file(
        f"{folder}/tokenizers/l2_supercat_tokenizer_config.json"
    )
    text = "The patient has a fever."
    mean = table[pieces.encode(text, add_special_tokens=False).ids].astype(np.float64).mean(axis=0)
    mean -= mean.mean()
    found = build_network("wordllama", (TEXT_NUMBERS,)).apply(pack_texts([text]))
    assert np.abs(found[0] - 4 * mean / np.linalg.norm(mean)).max() < 1e-4


def test_a_text_has_its_features_in_any_company_and_near_words_are_near():
    lens, (notes, _) = build_network("wordllama", (TEXT_NUMBERS + 1,)), draw_notes(100)
    x = np.concatenate([np.zeros((100, 1), np.float32), pack_texts(notes)], axis=1)
    whole = lens.apply(x)
    assert whole.shape == (100, 257)
    assert np.array_equal(whole[:9], lens.apply(x[:9]))
    other = x.copy()
    other[::2] = np.nan
    assert np.array_equal(whole[1::2], lens.apply(other)[1::2])
    same = whole @ whole.T
    assert same[::2, ::2].mean() > 1.5 * same[::2, 1::2].mean()


def test_other_columns_stand_beside_a_text(tmp_path):
    source = tables.Source(**plan_for(write_table(tmp_path / "a.csv")).data.table())
    read = tables.read_table(source)
    assert read.x.shape == (120, 1 + TEXT_NUMBERS)
    assert read.x[1, 0] == pytest.approx(2 / 90 - 1)
    assert unpack(read.x[:, 1:]) == draw_notes(120)[0]
    assert tables.Layout.from_json(read.layout.to_json()) == read.layout
    assert replace(read.layout, text="other").encoding != read.layout.encoding
    with_gap = tmp_path / "gap.csv"
    with_gap.write_text('age,note,topic\n1,"",car\n2,b,ill\n')
    read = tables.read_rows(with_gap, read.layout, labels=True)
    assert unpack(read.x[:, 1:]) == ["", "b"]


@pytest.mark.parametrize("model", [{}, {"model.name": "least-squares", "model.project": 30}])
def test_a_table_of_notes_is_trained_on_and_predicted(tmp_path, model):
    plan = plan_for(write_table(tmp_path / "a.csv"), **model)
    run = simulate(plan, seed=1, out=tmp_path / "run")
    record = json.loads((tmp_path / "run" / "record.json").read_text())
    lens = build_network("wordllama", (TEXT_NUMBERS + 1,))
    assert record["plan"]["model"]["features_sha256"] == lens.sha256
    assert record["table"]["text"] == "note"
    assert list(tmp_path.glob(".a.csv.*.features.npy"))
    assert run.accuracy == 1.0
    new = tmp_path / "new.csv"
    new.write_text("note,age\nthe doctor treats a cough,30\nfuel for the engine,30\n")
    assert load(tmp_path / "run").predict_table(new) == ["ill", "car"]
    assert CliRunner().invoke(app, ["predict", str(tmp_path / "run"), str(new)]).stdout == (
        "ill\ncar\n"
    )
    (tmp_path / "other.csv").write_text("age\n30\n")
    with pytest.raises(PlanError, match=r"other\.csv lacks the column 'note'"):
        load(tmp_path / "run").predict_table(tmp_path / "other.csv")


def test_arrays_of_texts_need_no_column(tmp_path):
    notes, topics = draw_notes(120)
    plan = plan_for(None, {"name": "arrays", "clients": 2, "validation": 20, "test": 20})
    run = simulate(plan, data=(np.array(notes), topics), seed=1)
    assert run.accuracy == 1.0
    said = [run.classes[i] for i in run.predict(["a doctor with a fever", "a gear and a brake"])]
    assert said == ["ill", "car"]
    path = tmp_path / "notes.npz"
    np.savez(path, x=np.array(notes), y=np.array(topics))
    stored = {"path": str(path), "clients": 2, "columns": {"y": ["car", "ill"]}}
    assert simulate(plan_for(None, stored), seed=1).accuracy == 1.0
    assert not check_plan(plan_for(None, stored | {"test": 60})).findings
    out = tmp_path / "out.npz"
    arguments = ["features", str(path), "--network", "wordllama", "--out", str(out)]
    assert CliRunner().invoke(app, arguments).exit_code == 0
    with np.load(out) as found:
        assert found["x"].shape == (120, 256)


def make_node(folder, text='text = "note"\n'):
    write_table(folder / "rows.csv", 40)
    (folder / "node.toml").write_text(
        'schema = 1\nname = "ward"\nvault = "ward.vault"\n[data]\npath = "rows.csv"\n'
        f'label = "topic"\n{text}columns = {{ age = [0, 90], topic = ["car", "ill"] }}\n'
        '[policy]\nepsilon = 8.0\ndelta = 1e-5\nclip = 1.0\n[model]\nfeatures = "wordllama"\n'
    )
    return folder / "node.toml"


def test_a_client_makes_features_of_its_own_texts(tmp_path, monkeypatch):
    monkeypatch.setenv("SOTTOVOCE_STATE", str(tmp_path / "state"))
    ledger.create_from_node(make_node(tmp_path), second_ledger=True)
    node = Node.load(tmp_path / "node.toml")
    lens = replace(build_network("wordllama", (TEXT_NUMBERS + 1,)), source=None)
    form = Form("softmax", (TEXT_NUMBERS + 1,), 2, lens=lens)
    params = {name: np.zeros(shape, np.float32) for name, shape in form.shapes().items()}
    says = node.read_rows().encoding
    asked = ask(form=form, params=params, encoding=says)
    assert kind(device.answer_request(asked.to_blob(), node)) == "upload"
    head, _ = messages.unpack(device.make_greeting(node))
    other = replace(form, lens=replace(lens, sha256="0" * 64))
    asked = ask(form=other, params=params, t=1, encoding=says)
    refused = told(device.answer_request(asked.to_blob(), node))
    assert refused["code"] == "policy"
    assert "0" * 64 in refused["text"]
    with pytest.raises(InputError, match=r"data\.text must be absent for a description"):
        describe.describe_node(tmp_path / "node.toml")
    assert messages.unpack(device.make_greeting(node))[0]["budget"] == head["budget"]


def test_a_node_file_from_the_plan_names_the_texts(tmp_path):
    deploy = pytest.importorskip("sottovoce.flower.deploy", reason="the extra flower is absent")
    rows, plan = write_table(tmp_path / "a.csv"), tmp_path / "plan.toml"
    plan.write_text(plan_for("a.csv").to_toml())
    terms = deploy.NodeTerms(rows, epsilon=8.0, delta=1e-5, plan=plan)
    found = tomllib.loads(terms.to_toml("ward"))
    assert (found["data"]["text"], found["model"]) == ("note", {"features": "wordllama"})


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model.features": None}, "model.features is missing; it must be wordllama"),
        ({"data.text": None}, "data.text is missing; it must be the column of texts"),
        ({"data.text": "age"}, "data.text = 'age' is a feature in data.columns too"),
        ({"data.text": "topic"}, "data.text = 'topic' is data.label too"),
        ({"data.text": ""}, "data.text must be the name of a column"),
        ({"data.text": "note", "data.person": "note"}, "a column has one role"),
        ({"data": {"name": "digits", "text": "note"}}, "data.text has no effect without data.path"),
        ({"data": {"path": "a.npz", "text": "note"}}, "data.text has no effect with arrays"),
    ],
)
def test_a_plan_says_what_is_wrong_with_its_text(changes, words):
    with pytest.raises(PlanError, match=re.escape(words)):
        plan_for("a.csv", **changes)


def test_rows_without_a_text_are_refused_before_a_round(tmp_path):
    plan = plan_for(write_table(tmp_path / "a.csv"))
    with pytest.raises(PlanError, match=r"'notes' is no column of a\.csv; did you mean 'note'"):
        simulate(plan.replace(**{"data.text": "notes"}), seed=1)
    digits = Plan(model={"name": "softmax", "features": "wordllama"})
    with pytest.raises(InputError, match=r"name their column in data\.text"):
        simulate(digits, seed=1)
    for text in ('text = "age"\n', "text = 3\n"):
        with pytest.raises(InputError, match=r"data\.text"):
            Node.load(make_node(tmp_path, text))


def test_a_draft_names_the_column_of_free_text(tmp_path):
    path = write_table(tmp_path / "a.csv")
    path.write_text(path.read_text().replace("the ", "the very, very, very long and tedious "))
    draft = tables.draft_plan(path, tmp_path / "plan.toml")
    assert '# note is left out: it looks like free text; text = "note" above' in draft
