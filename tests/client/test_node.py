"""Node files: what a client decides for itself, and one sentence for everything that is none."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from sottovoce.client.node import Node
from sottovoce.client.vault.chain import fingerprint_file
from sottovoce.errors import DataError, InputError
from support.devices import rows

HEAD = 'schema = 1\nname = "ward-3"\nvault = "ward-3.vault"\n'
DATA = '[data]\npath = "rows.npz"\nclasses = 3\n'
COLUMNS = 'columns = { age = [0, 120], ill = ["no", "yes"] }'
TABLE = f'[data]\npath = "rows.csv"\nlabel = "ill"\n{COLUMNS}\n'
POLICY = "[policy]\nepsilon = 8.0\ndelta = 1e-5\nclip = 1.0\n"
GOOD = HEAD + DATA + POLICY


def instead(old: str, new: str, base: str = GOOD) -> str:
    """A good file with one place of it changed."""
    assert base.count(old) == 1
    return base.replace(old, new)


# What the sentence must name, and the file.
MALFORMED = {
    "empty": ("data", ""),
    "no TOML": ("TOML", "schema: 1"),
    "a table twice": ("TOML", GOOD + POLICY),
    "a key twice": ("TOML", HEAD + HEAD + DATA + POLICY),
    "a list of nothing": ("TOML", "[[["),
    "without schema": ("schema", instead("schema = 1\n", "")),
    "another schema": ("schema", instead("schema = 1", "schema = 2")),
    "schema as a text": ("schema", instead("schema = 1", 'schema = "1"')),
    "schema true": ("schema", instead("schema = 1", "schema = true")),
    "schema 1.0": ("schema", instead("schema = 1", "schema = 1.0")),
    "without name": ("name", instead('name = "ward-3"\n', "")),
    "name a number": ("name", instead('name = "ward-3"', "name = 3")),
    "an empty name": ("name", instead('name = "ward-3"', 'name = ""')),
    "a long name": ("name", instead('"ward-3"\n', f'"{"w" * 201}"\n')),
    "a name with a newline": ("name", instead('"ward-3"\n', '"ward\\n3"\n')),
    "a name with an escape": ("name", instead('"ward-3"\n', '"ward\\u001b[2J"\n')),
    "without vault": ("vault", instead('vault = "ward-3.vault"\n', "")),
    "vault a list": ("vault", instead('"ward-3.vault"', '["ward-3.vault"]')),
    "vault with NUL": ("vault", instead('"ward-3.vault"', '"ward\\u0000.vault"')),
    "a key nobody knows": ("seed", "seed = 1\n" + GOOD),
    "a misspelt key": ("valut", instead("vault = ", "valut = ")),
    "without data": ("data", HEAD + POLICY),
    "data a text": ("data", 'data = "rows.npz"\n' + HEAD + POLICY),
    "data a list": ("data", HEAD + DATA.replace("[data]", "[[data]]") + POLICY),
    "without path": ("data.path", instead('path = "rows.npz"\n', "")),
    "path a number": ("data.path", instead('path = "rows.npz"', "path = 1")),
    "an unknown key of data": ("data.seed", instead("classes = 3", "classes = 3\nseed = 1")),
    "without classes": ("data.classes", instead("classes = 3\n", "")),
    "one class": ("data.classes", instead("classes = 3", "classes = 1")),
    "classes 3.0": ("data.classes", instead("classes = 3", "classes = 3.0")),
    "classes true": ("data.classes", instead("classes = 3", "classes = true")),
    "classes as a text": ("data.classes", instead("classes = 3", 'classes = "3"')),
    "target a number": ("data.target", instead("classes = 3", "target = 3")),
    "a target that is empty": ("data.target", instead("classes = 3", "target = [9, 9]")),
    "a target of texts": ("data.target", instead("classes = 3", 'target = ["0", "9"]')),
    "a target without end": ("data.target", instead("classes = 3", "target = [0, inf]")),
    "classes and target": ("data.classes", instead("classes = 3", "classes = 3\ntarget = [0, 9]")),
    "a column and target": (
        "data.columns",
        instead('label = "ill"', 'label = "ill"\ntarget = [0, 9]', HEAD + TABLE + POLICY),
    ),
    "far too many classes": ("data.classes", instead("classes = 3", "classes = 9999999999")),
    "a label of arrays": ("data.label", instead("classes = 3", 'classes = 3\nlabel = "ill"')),
    "columns of arrays": ("data.columns", instead("classes = 3", "classes = 3\ncolumns = {}")),
    "a table without label": ("data.label", instead('label = "ill"\n', "", HEAD + TABLE + POLICY)),
    "a table without columns": (
        "data.columns",
        HEAD + TABLE.split("columns")[0] + POLICY,
    ),
    "a table with classes": (
        "data.classes",
        instead('label = "ill"', 'label = "ill"\nclasses = 2', HEAD + TABLE + POLICY),
    ),
    "a label that is no column": (
        "data.columns",
        instead('label = "ill"', 'label = "well"', HEAD + TABLE + POLICY),
    ),
    "bounds the wrong way round": (
        "data.columns.age",
        instead("[0, 120]", "[120, 0]", HEAD + TABLE + POLICY),
    ),
    "bounds that are none": ("data.columns.age", instead("[0, 120]", "7", HEAD + TABLE + POLICY)),
    "without policy": ("policy", HEAD + DATA),
    "policy a number": ("policy", "policy = 8\n" + HEAD + DATA),
    "without epsilon": ("policy.epsilon", instead("epsilon = 8.0\n", "")),
    "without delta": ("policy.delta", instead("delta = 1e-5\n", "")),
    "without clip": ("policy.clip", instead("clip = 1.0\n", "")),
    "epsilon 0": ("epsilon", instead("epsilon = 8.0", "epsilon = 0")),
    "epsilon below 0": ("epsilon", instead("epsilon = 8.0", "epsilon = -8.0")),
    "epsilon nan": ("epsilon", instead("epsilon = 8.0", "epsilon = nan")),
    "epsilon inf": ("epsilon", instead("epsilon = 8.0", "epsilon = inf")),
    "epsilon as a text": ("epsilon", instead("epsilon = 8.0", 'epsilon = "8"')),
    "epsilon true": ("epsilon", instead("epsilon = 8.0", "epsilon = true")),
    "delta 0": ("delta", instead("delta = 1e-5", "delta = 0")),
    "delta 1": ("delta", instead("delta = 1e-5", "delta = 1.0")),
    "delta a list": ("delta", instead("delta = 1e-5", "delta = [1e-5]")),
    "clip 0": ("clip", instead("clip = 1.0", "clip = 0.0")),
    "clip inf": ("clip", instead("clip = 1.0", "clip = inf")),
    "the median as clip": ("clip", instead("clip = 1.0", 'clip = "median"')),
    "the paper's calibration": ("calibration", GOOD + 'calibration = "paper"\n'),
    "another unit": ("unit", GOOD + 'unit = "user"\n'),
    "unit a list": ("unit", GOOD + 'unit = ["record"]\n'),
    "floor 0": ("floor", GOOD + "floor = 0\n"),
    "floor nan": ("floor", GOOD + "floor = nan\n"),
    "floor beyond the budget": ("floor", GOOD + "floor = 1e30\n"),
    "max_rounds 0": ("max_rounds", GOOD + "max_rounds = 0\n"),
    "max_steps 0": ("max_steps", GOOD + "max_steps = 0\n"),
    "max_steps 1001": ("max_steps", GOOD + "max_steps = 1001\n"),
    "answers that never leave": ("answer_every", "answer_every = inf\n" + GOOD),
    "answers before requests": ("answer_every", "answer_every = -0.5\n" + GOOD),
    "answer_every true": ("answer_every", "answer_every = true\n" + GOOD),
    "limits that are none": ("policy.limits", GOOD + "limits = 3\n"),
    "an unknown limit": ("policy.limits.cost", GOOD + "[policy.limits]\ncost = 3\n"),
    "a share above 1": ("run_share", GOOD + "[policy.limits]\nrun_share = 1.5\n"),
    "a limit among the terms": ("policy.run_share", GOOD + "run_share = 0.5\n"),
    "no work": ("max_work", GOOD + "[policy.limits]\nmax_work = 0\n"),
    "max_rounds 1.5": ("max_rounds", GOOD + "max_rounds = 1.5\n"),
    "disclose as a text": ("disclose", GOOD + 'disclose = "no"\n'),
    "disclose 0": ("disclose", GOOD + "disclose = 0\n"),
    "samples of the file's own": ("policy.samples", GOOD + "samples = 5\n"),
    "a seed": ("policy.seed", GOOD + "seed = 5\n"),
    "a model without own": ("model", GOOD + "[model]\nhidden = 3\n"),
    "own a number": ("model.own", GOOD + "[model]\nown = 1\n"),
    "own without a name": ("model.own", GOOD + '[model]\nown = "package.net"\n'),
    "own with an empty name": ("model.own", GOOD + '[model]\nown = "package.net:"\n'),
    "own with an empty module": ("model.own", GOOD + '[model]\nown = ":model"\n'),
    "own from above": ("model.own", GOOD + '[model]\nown = "..net:model"\n'),
    "a number of 5,000 digits": ("node.toml", GOOD + f"max_rounds = {'1' * 5000}\n"),
    "values nested too deeply": ("node.toml", GOOD + f"[model]\nown = {'[' * 5000}{']' * 5000}\n"),
    "columns a number": ("data.columns", instead(COLUMNS, "columns = 3", HEAD + TABLE + POLICY)),
    "columns a number, and target": (
        "data.columns",
        instead(COLUMNS, "columns = 3\ntarget = [0, 9]", HEAD + TABLE + POLICY),
    ),
    "a path of 201 letters": (
        "of 1 to 200 letters",
        instead('path = "rows.npz"', f'path = "{"r" * 201}"'),
    ),
    "all that holds alone": (
        "sum.epsilon_alone",
        GOOD + '[policy.sum]\nroster = "r"\nkey = "k"\nhonest = 3\nepsilon_alone = inf\n',
    ),
    "own as code": ("model.own", GOOD + '[model]\nown = "net:model()"\n'),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_a_malformed_node_file_is_one_sentence_and_nothing_is_touched(tmp_path, name):
    wanted, text = MALFORMED[name]
    path = tmp_path / "node.toml"
    path.write_text(text, "utf-8")
    with pytest.raises(InputError) as told:
        Node.load(path)
    sentence = str(told.value)
    assert wanted in sentence
    assert "\n" not in sentence
    assert len(sentence) < 250
    assert [found.name for found in tmp_path.iterdir()] == ["node.toml"]


def test_a_node_file_that_is_no_text_is_refused(tmp_path):
    path = tmp_path / "node.toml"
    for harm in (b"\xff\xfe\x00", b"schema = 1\xe9"):
        path.write_bytes(harm)
        with pytest.raises(InputError, match=r"node\.toml"):
            Node.load(path)
    for place in (tmp_path, tmp_path / "missing.toml"):
        with pytest.raises(InputError):
            Node.load(place)


@pytest.mark.parametrize("text", [GOOD, HEAD + TABLE + POLICY, GOOD + '[model]\nown = "a.b:c"\n'])
def test_a_good_node_file_is_read_without_its_data(tmp_path, text):
    path = tmp_path / "node.toml"
    path.write_text(text, "utf-8")
    node = Node.load(path)
    assert node.vault == tmp_path / "ward-3.vault"
    assert node.make_policy(143).epsilon == 8.0
    assert [found.name for found in tmp_path.iterdir()] == ["node.toml"]


def test_paths_are_those_of_the_file_not_of_the_process(tmp_path, monkeypatch):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "node.toml").write_text(GOOD, "utf-8")
    x, y = rows(0)
    np.savez(tmp_path / "a" / "rows.npz", x=x, y=y)
    monkeypatch.chdir(tmp_path)
    read = Node.load(Path("a/node.toml")).read_rows()
    assert np.array_equal(read.x, x)
    assert read.classes == 3


def _no_rows() -> dict[str, dict[str, object]]:
    x, y = rows(0)
    return {
        "no y": {"x": x},
        "texts": {"x": x.astype(str), "y": y},
        "objects": {"x": x, "y": np.array([None] * len(y))},
        "labels as floats": {"x": x, "y": y.astype(float)},
        "labels as a matrix": {"x": x, "y": y[:, None]},
        "a row missing": {"x": x[1:], "y": y},
        "no rows": {"x": x[:0], "y": y[:0]},
        "no columns": {"x": x[:, 0], "y": y},
        "a label below 0": {"x": x, "y": y - 1},
        "a label too large": {"x": x, "y": y + 1},
        "complex": {"x": x + 1j, "y": y},
        "dates": {"x": x.astype("datetime64[s]"), "y": y},
    }


@pytest.mark.parametrize("name", _no_rows())
def test_rows_that_are_none_are_one_sentence(tmp_path, name):
    path = tmp_path / "node.toml"
    path.write_text(GOOD, "utf-8")
    np.savez(tmp_path / "rows.npz", **_no_rows()[name])  # type: ignore[arg-type]
    with pytest.raises(DataError) as told:
        Node.load(path).read_rows()
    assert "\n" not in str(told.value)


def test_rows_are_read_as_they_are_and_the_order_does_not_matter(tmp_path):
    path = tmp_path / "node.toml"
    path.write_text(GOOD, "utf-8")
    x, y = rows(0)
    prints = set()
    for order in (slice(None), slice(None, None, -1)):
        np.savez(tmp_path / "rows.npz", x=x[order].reshape(-1, 2, 2), y=y[order])
        prints.add(Node.load(path).read_rows().fingerprint)
    np.savez(tmp_path / "rows.npz", x=np.where(x == x.max(), np.nan, x), y=y)
    prints.add(Node.load(path).read_rows().fingerprint)
    assert len(prints) == 2


def test_targets_are_cut_and_scaled_and_the_fingerprint_is_that_of_the_file(tmp_path):
    path, (x, _) = tmp_path / "node.toml", rows(0)
    y = np.linspace(-5, 25, len(x))
    np.savez(tmp_path / "rows.npz", x=x, y=y)
    prints = set()
    for high in (10, 20):
        path.write_text(instead("classes = 3", f"target = [0, {high}]"), "utf-8")
        read = Node.load(path).read_rows()
        wanted = np.clip(y, 0, high) / high * 2 - 1
        np.testing.assert_allclose(read.y, wanted, atol=1e-6)
        assert read.classes == 1
        prints.add(read.fingerprint)
    assert prints == {fingerprint_file(tmp_path / "rows.npz")[0]}
    np.savez(tmp_path / "rows.npz", x=x, y=np.where(y > 20, np.nan, y))
    with pytest.raises(DataError, match="missing or not finite"):
        Node.load(path).read_rows()
