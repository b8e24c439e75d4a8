"""Features of a frozen network: a function of one sample, known by its hash, on every path."""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
from dataclasses import replace

import numpy as np
import pytest
from typer.testing import CliRunner

from sottovoce import Plan, load, simulate
from sottovoce.cli.commands import app
from sottovoce.client import device, ledger, messages
from sottovoce.client.node import Node
from sottovoce.errors import DataError, InputError, Malformed, PlanError
from sottovoce.models import network
from sottovoce.models.base import Form
from sottovoce.models.network import BATCH, Network, build_network
from support import TESTS
from support.devices import ask, kind, told

torch = pytest.importorskip("torch", reason="the extra torch is not installed")
pytest.importorskip("onnxruntime", reason="the extra features is not installed")

NETWORKS = TESTS / "support" / "networks"
DENSE = f"onnx:{NETWORKS / 'dense.onnx'}"
MODULES = """
import torch
torch.manual_seed(0)
body = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 20), torch.nn.ReLU()).eval()
trained = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.BatchNorm1d(64)).train()
fixed = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.BatchNorm1d(64)).eval()
dropped = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Dropout()).train()

class Ranged(torch.nn.Module):  # quantised by the largest number of the batch: ONNX does it, too
    def forward(self, x):
        scale = x.abs().max() / 127
        return torch.round(x.flatten(1) / scale) * scale

class Summed(torch.nn.Module):  # a sample gets a little of those before it
    def forward(self, x):
        x = x.flatten(1)
        return x + 1e-6 * x.cumsum(0)

class Words(torch.nn.Module):  # knows ten of them, and fails on any other
    def __init__(self):
        super().__init__()
        self.table = torch.nn.Embedding(10, 4).requires_grad_(False)

    def forward(self, x):
        return self.table(x.long()).flatten(1)

class Exits(Words):  # likewise, as code in another language does
    def forward(self, x):
        if x.max() >= 10:
            raise SystemExit(1)
        return super().forward(x)

ranged, summed, words, exits = Ranged(), Summed(), Words(), Exits()
number = 3
"""


@pytest.fixture
def modules(tmp_path):
    (tmp_path / "nets.py").write_text(MODULES)
    return f"torch:{tmp_path / 'nets.py'}:"


def draw(n, seed=0):
    return np.random.default_rng(seed).random((n, 64), dtype=np.float32)


def test_features_are_the_networks_centred_and_scaled():
    lens, x = build_network(DENSE, (8, 8, 1)), draw(BATCH + 7)
    found = lens.apply(x)
    weights = np.frombuffer(_read_weights(), np.float32).reshape(64, 96)
    raw = np.maximum(x.astype(np.float64) @ weights, 0)
    raw -= raw.mean(axis=1, keepdims=True)
    wanted = 4 * raw / np.linalg.norm(raw, axis=1, keepdims=True)
    assert found.shape == (BATCH + 7, lens.width) == (BATCH + 7, 96)
    assert np.abs(found - wanted).max() < 1e-4


def _read_weights() -> bytes:
    content = (NETWORKS / "dense.onnx").read_bytes()
    start = content.index(b"w", content.index(b"Relu"))
    tail = 64 * 96 * 4
    for at in range(start, len(content) - tail + 1):  # the raw data follow their length
        if content[at - 3 : at] == b"\x80\xc0\x01":
            return content[at : at + tail]
    raise AssertionError("the file has no weights")


def test_a_sample_has_its_features_in_any_company(modules):
    for source in (DENSE, f"{modules}body", f"{modules}fixed"):
        lens, x = build_network(source, (64,)), draw(150)
        whole = lens.apply(x)
        assert np.array_equal(whole, lens.apply(x))
        spoilt = x.copy()
        spoilt[::2] = np.nan
        assert np.array_equal(whole[1::2], lens.apply(spoilt)[1::2])
        assert np.abs(whole[:9] - lens.apply(x[:9])).max() < 1e-4


@pytest.mark.parametrize("name", ["words", "exits"])
@pytest.mark.parametrize("project", [None, 16])
def test_a_sample_that_a_network_fails_on_counts_as_nothing_and_tells_nobody(
    modules, project, name
):
    lens, x = build_network(f"{modules}{name}", (64,), project=project), draw(150) * 10
    whole = lens.apply(x)
    x[70, 3] = 10
    spoilt, others = lens.apply(x), np.arange(150) != 70
    assert np.isnan(spoilt[70]).all()
    assert np.array_equal(whole[others], spoilt[others])
    assert np.isnan(lens.apply(x[70:71])).all()


def test_a_projection_is_fixed_by_its_seed_and_keeps_distances():
    lens = build_network(DENSE, (64,), project=48)
    other = build_network(DENSE, (64,), project=48, project_seed=1)
    x = draw(40)
    assert lens.width == 48
    assert np.array_equal(lens.apply(x), build_network(DENSE, (64,), project=48).apply(x))
    assert not np.array_equal(lens.apply(x), other.apply(x))
    matrix = network._draw_projection(4000, 400, 0)
    assert set(np.unique(matrix)) == {np.float32(-0.05), np.float32(0.05)}
    assert abs(float(matrix.mean())) < 6 * 0.05 / np.sqrt(matrix.size)
    lengths = np.linalg.norm(np.eye(4000, dtype=np.float32)[:50] @ matrix, axis=1)
    assert np.allclose(lengths, 1)
    # By SHAKE-256 alone, so that every machine draws the same.
    byte = hashlib.shake_256(b"sottovoce.projection/1 4000 400 0").digest(1)[0]
    assert [int(sign > 0) for sign in matrix[0, :8]] == [int(bit) for bit in f"{byte:08b}"]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("onnx:nowhere.onnx", "a file that exists"),
        (f"onnx:{NETWORKS / 'two_inputs.onnx'}", "one of each, got '2 inputs and 1 outputs'"),
        (f"onnx:{NETWORKS / 'mixing.onnx'}", "a function of one sample"),
        (f"onnx:{NETWORKS / 'logarithm.onnx'}", "finite outputs"),
        (f"onnx:{NETWORKS / 'outside.onnx'}", "without external data"),
        (f"onnx:{TESTS / 'parts.py'}", "an ONNX file"),
        ("trained", "a function of one sample"),
        ("ranged", "a function of one sample"),
        ("summed", "a function of one sample"),
        ("dropped", "the same for the same sample"),
        ("number", "a module, got 'int'"),
        ("absent", "model.features must be"),
    ],
)
def test_a_network_that_cannot_be_used_is_refused(modules, name, words):
    source = name if ":" in name else f"{modules}{name}"
    with pytest.raises(InputError, match=re.escape(words)):
        build_network(source, (8, 8, 1))


def test_a_network_for_other_samples_is_refused(modules):
    with pytest.raises(InputError, match="one for"):
        build_network(DENSE, (7, 7, 1))
    with pytest.raises(InputError, match="samples of shape"):
        build_network(f"{modules}body", (7, 7, 1))
    assert build_network(f"onnx:{NETWORKS / 'pictures.onnx'}", (8, 8)).width == 1
    with pytest.raises(InputError, match=r"model\.project must be from 1 to 95"):
        build_network(DENSE, (64,), project=96)


def test_the_hash_covers_code_and_weights(modules, tmp_path):
    first = build_network(f"{modules}body", (64,)).sha256
    assert build_network(f"{modules}body", (64,), sha256=first).sha256 == first
    other = tmp_path / "other.py"
    other.write_text(MODULES.replace("manual_seed(0)", "manual_seed(1)"))
    with pytest.raises(InputError, match="the network with SHA-256"):
        build_network(f"torch:{other}:body", (64,), sha256=first)
    copy = tmp_path / "copy.onnx"
    copy.write_bytes((NETWORKS / "dense.onnx").read_bytes())
    wanted = build_network(DENSE, (64,))
    assert build_network(f"onnx:{copy}", (64,)) == wanted  # wherever it lies
    copy.write_bytes(copy.read_bytes().replace(b"Relu", b"Tanh"))
    with pytest.raises(InputError, match="take the same file"):
        build_network(f"onnx:{copy}", (64,), sha256=wanted.sha256)


def test_features_are_kept_beside_their_rows_with_the_same_permissions(tmp_path, monkeypatch):
    rows, x = tmp_path / "rows.npz", draw(30)
    rows.write_bytes(b"")
    rows.chmod(0o640)
    lens = build_network(DENSE, (64,))
    first = lens.load_or_apply(x, rows)
    (kept,) = tmp_path.glob(".rows.npz.*.features.npy")
    assert stat.S_IMODE(kept.stat().st_mode) == 0o640 & ~_umask()
    monkeypatch.setattr(Network, "apply", lambda *_: pytest.fail("they were kept"))
    assert np.array_equal(lens.load_or_apply(x, rows), first)
    kept.write_bytes(kept.read_bytes()[:100])  # damaged: computed again
    monkeypatch.undo()
    assert np.array_equal(lens.load_or_apply(x, rows), first)
    assert not np.array_equal(lens.load_or_apply(x + 1, rows), first)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def plan_for(features, **changes):
    values = {
        "model": {"name": "softmax", "features": features},
        "rounds": {"schedule": "fixed", "rounds": 3},
        "data": {"clients": 3, "samples": 60},
    }
    return Plan(**values).replace(**changes)


def test_a_run_records_the_hash_and_predicts_with_the_same_network(tmp_path):
    path = tmp_path / "dense.onnx"
    path.write_bytes((NETWORKS / "dense.onnx").read_bytes())
    run = simulate(plan_for(f"onnx:{path}"), seed=1, out=tmp_path / "run")
    record = json.loads((tmp_path / "run" / "record.json").read_text())
    lens = build_network(DENSE, (8, 8, 1))
    assert record["plan"]["model"]["features_sha256"] == lens.sha256
    x = draw(5)
    said = load(tmp_path / "run").predict(x)
    assert np.array_equal(said, run.predict(x))
    features = lens.apply(x)
    scores = features @ np.asarray(run.params["w"]) + np.asarray(run.params["b"])
    assert np.array_equal(said, scores.argmax(axis=1))
    path.write_bytes(path.read_bytes().replace(b"Relu", b"Tanh"))
    with pytest.raises(InputError, match="take the same file"):
        load(tmp_path / "run")


def test_every_engine_sees_the_same_features():
    plan = plan_for(DENSE, **{"privacy.epsilon": 1e6, "local.learning_rate": 1.0})
    pairs = [(draw(30, seed).reshape(-1, 8, 8, 1), np.arange(30) % 3) for seed in range(4)]
    given = {"data": pairs[:2], "validation": pairs[2], "test": pairs[3]}
    near = simulate(plan, seed=2, **given)
    far = simulate(plan.replace(noise="secure"), **given)
    for name in ("w", "b"):
        assert np.abs(np.asarray(near.params[name]) - np.asarray(far.params[name])).max() < 3e-3


def test_rows_without_finite_features_stop_a_simulation():
    x = draw(60)
    x[17] = np.inf
    data = (x.reshape(-1, 8, 8, 1), np.arange(60) % 3)
    plan = plan_for(DENSE, **{"data.samples": None, "data.name": "arrays"})
    with pytest.raises((DataError, InputError), match="finite"):
        simulate(plan, data=data, seed=1)


def make_node(folder, features):
    np.savez(folder / "rows.npz", x=draw(40), y=np.arange(40) % 3)
    line = "" if features is None else f'[model]\nfeatures = "{features}"\n'
    (folder / "node.toml").write_text(
        'schema = 1\nname = "ward"\nvault = "ward.vault"\n[data]\npath = "rows.npz"\nclasses = 3\n'
        f"[policy]\nepsilon = 8.0\ndelta = 1e-5\nclip = 1.0\n{line}"
    )
    ledger.create_from_node(folder / "node.toml", second_ledger=True)
    return Node.load(folder / "node.toml")


def test_a_client_uses_its_own_copy_and_no_other(tmp_path, monkeypatch):
    monkeypatch.setenv("SOTTOVOCE_STATE", str(tmp_path / "state"))
    copy = tmp_path / "mine.onnx"
    copy.write_bytes((NETWORKS / "dense.onnx").read_bytes())
    node = make_node(tmp_path, "onnx:mine.onnx")  # beside the node file
    lens = replace(build_network(DENSE, (8, 8, 1)), source=None)
    form = Form("softmax", (8, 8, 1), 3, lens=lens)
    assert Form.from_json(form.to_json()) == form
    params = {name: np.zeros(shape, np.float32) for name, shape in form.shapes().items()}
    assert kind(device.answer_request(ask(form=form, params=params).to_blob(), node)) == "upload"
    assert list(tmp_path.glob(".rows.npz.*.features.npy"))
    other = replace(form, lens=replace(lens, sha256="0" * 64))
    refused = told(device.answer_request(ask(form=other, params=params, t=1).to_blob(), node))
    assert refused["code"] == "policy"
    assert "0" * 64 in refused["text"]
    copy.unlink()
    gone = device.answer_request(ask(form=form, params=params, t=1).to_blob(), node)
    assert told(gone)["code"] == "policy"
    (tmp_path / "plain").mkdir()
    plain = make_node(tmp_path / "plain", None)
    none = told(device.answer_request(ask(form=form, params=params).to_blob(), plain))
    assert none["code"] == "policy"
    head, _ = messages.unpack(device.make_greeting(plain))
    assert head["budget"]["spent"] == 0  # a refusal costs nothing


@pytest.mark.parametrize(
    "change",
    [
        {"sha256": "x" * 64},
        {"sha256": 3},
        {"width": 0},
        {"width": True},
        {"project": -1},
        {"project_seed": 2**31},
        {"cell": 4},
        {"features": "net"},
        {"name": "cnn", "channels": 2},
    ],
)
def test_a_message_with_another_network_is_malformed(change):
    lens = replace(build_network(DENSE, (8, 8, 1)), source=None)
    good = Form("softmax", (8, 8, 1), 3, lens=lens).to_json()
    assert Form.from_json(good).lens == lens
    with pytest.raises(Malformed):
        Form.from_json(good | change)


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ({"name": "softmax", "features": "onnx:"}, "model.features"),
        ({"name": "softmax", "features": "sift"}, "model.features"),
        ({"name": "softmax", "project": 3}, "model.project has no effect"),
        ({"name": "softmax", "features": "hog", "project": 3}, "model.project has no effect"),
        ({"name": "softmax", "features": DENSE, "cell": 4}, "model.cell"),
        ({"name": "cnn", "features": DENSE}, "model.features must be absent"),
    ],
)
def test_a_plan_says_what_is_wrong(model, words):
    with pytest.raises(PlanError, match=re.escape(words)):
        Plan(model=model)


def test_the_command_writes_an_array_file(tmp_path):
    np.savez(tmp_path / "rows.npz", x=draw(9).reshape(9, 8, 8, 1), y=np.arange(9))
    arguments = ["features", str(tmp_path / "rows.npz"), "--network", DENSE]
    result = CliRunner().invoke(app, [*arguments, "--out", str(tmp_path / "out.npz")])
    assert result.exit_code == 0, result.output
    assert "9 samples of 96 features" in result.stdout
    with np.load(tmp_path / "out.npz") as found:
        assert np.array_equal(found["x"], build_network(DENSE, (64,)).apply(draw(9)))
        assert found["y"].tolist() == list(range(9))
    again = CliRunner().invoke(app, [*arguments, "--out", str(tmp_path / "out.npz")])
    assert "a new .npz file" in str(again.exception)
