"""`sottovoce audit`: what it says, what it writes, and when its exit code is 1."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import jsonschema
import numpy as np
import pytest
from example_audit import example, refuted

from sottovoce.audit import auditing, page
from sottovoce.audit.table import table
from sottovoce.audit.target import target
from sottovoce.plan import Plan

pytestmark = pytest.mark.slow  # JAX compiles; left out of the editing loop


def test_a_quick_audit_in_two_minutes(tmp_path):
    """The real command: attacks succeed without noise, nothing contradicts us with it."""
    began = time.monotonic()
    words = [sys.executable, "-m", "sottovoce", "audit", "--quick", "--json"]
    done = subprocess.run(
        [*words, "--out", str(tmp_path / "audit")], capture_output=True, text=True, timeout=600
    )
    took = time.monotonic() - began
    assert done.returncode == 0, done.stderr + done.stdout
    told = json.loads(done.stdout)
    assert told == json.loads((tmp_path / "audit" / "audit.json").read_text("utf-8"))
    assert told["contradictions"] == []
    clean = {(row["attack"], row["measure"]): row["levels"][0]["value"] for row in told["attacks"]}
    assert clean["first-layer inversion, one sample", "mean squared error"] < 1e-10
    assert clean["gradient matching, 3 samples", "mean squared error"] < 0.02
    assert clean["trap weights (dishonest server)", "of 143 samples, exact"] > 0.04
    assert clean["LiRA, final model", "AUC"] > 0.9
    assert [one["contradicts"] for one in told["messages"]][:-1] == [False] * 4
    assert told["messages"][-1]["calibration"] == "paper"
    assert (tmp_path / "audit" / "audit.html").stat().st_size > 50_000
    assert took < 120 or told["seconds"] < 120  # a busy machine may start slowly


def test_the_json_is_what_its_schema_says():
    schema = json.loads((Path(auditing.__file__).parents[1] / "schemas/audit.json").read_text())
    for found in (example(), refuted()):
        jsonschema.validate(json.loads(json.dumps(found.to_json())), schema)


def test_every_attack_stands_at_every_level_with_its_ceiling():
    found = example()
    names = [level.name for level in found.levels]
    assert names == ["no noise", "ε = 20", "ε = 8", "ε = 4"]
    rows = found.rows()
    assert {row.attack for row in rows} >= {
        "first-layer inversion, one sample",
        "gradient matching, 2 samples",
        "label from the last bias",
        "trap weights (dishonest server)",
        "LiRA, whole transcript",
        "LiRA, one upload",
        "LiRA, final model",
        "loss threshold, final model",
    }
    for row in rows:
        assert list(row.cells) == list(found.levels)
        most = [cell.ceiling for cell in row.cells.values() if cell.ceiling is not None]
        if row.measure != "mean squared error" and "found at" not in row.measure:
            assert most == sorted(most, reverse=True)  # a smaller ε, a lower ceiling
            assert len(most) == 4


def test_the_verdict_follows_the_measurements(tmp_path, monkeypatch, capsys):
    assert example().verdict().startswith("Nothing measured contradicts the promise")
    assert "Theorem 1 of the paper claims ε = 20" in example().judgement()
    found = refuted()
    assert found.verdict().startswith("The promise is contradicted: uploads at ε = 4 prove μ ≥ ")
    assert "contradicted" in table(found)
    assert '<span class="status failed">contradicted' in page.render(found)
    monkeypatch.setattr(auditing, "play", lambda on, sizes, show: found)
    assert auditing.audit(None, out=tmp_path / "one") == 1
    assert "The promise is contradicted" in capsys.readouterr().out
    monkeypatch.setattr(auditing, "play", lambda on, sizes, show: example())
    assert auditing.audit(None, out=tmp_path / "two", as_json=True) == 0
    assert json.loads(capsys.readouterr().out)["schema"] == "sottovoce.audit/1"


def test_a_rate_above_its_ceiling_is_a_contradiction():
    """Scores that know the answer, at every kind of attack."""
    found = example()
    noisy = [attack for attack in found.members if attack.level.epsilon == 4.0]
    knowing = [replace(attack, scores=attack.members * 1.0) for attack in noisy]
    assert replace(found, members=knowing, levels=found.levels[-1:]).contradictions()
    clean = found.inverted[0]
    told = replace(found.inverted[-1], names=np.ones_like(clean.names))
    assert replace(found, inverted=[*found.inverted[:-1], told]).contradictions()
    stolen = replace(found.looted[-1].rates, hits=100)
    loot = replace(found.looted[-1], rates=stolen)
    assert replace(found, looted=[*found.looted[:-1], loot]).contradictions()
    run = replace(found.one_runs[0], right=found.one_runs[0].guesses, canaries=10_000,
                  guesses=10_000)  # fmt: skip
    run = replace(run, right=10_000)
    assert replace(found, one_runs=[run]).contradictions()


def test_naming_the_most_common_label_is_no_contradiction():
    """Six labels in ten are alike: whoever always says so is right as often, and knows nothing."""
    found = example()
    common = (np.arange(400) % 5 < 2).astype(np.int64)
    blind = [
        replace(one, truth=common, labels=common == 0, names=np.zeros(400, dtype=bool))
        for one in found.inverted
    ]
    assert not replace(found, inverted=blind).contradictions()
    knowing = [replace(one, labels=np.ones(400, dtype=bool)) for one in blind]
    assert replace(found, inverted=knowing).contradictions()


def test_a_plan_of_another_model_is_attacked_through_an_mlp(tmp_path):
    path = tmp_path / "plan.toml"
    path.write_text('schema = 1\n[model]\nname = "cnn"\n[privacy]\nepsilon = 3.0\n', "utf-8")
    found = target(path)
    assert not found.own
    assert found.form.name == "mlp"
    assert found.epsilon == 3.0
    assert found.pictures == (8, 8)


def test_a_run_is_attacked_at_the_model_it_ended_with(tmp_path):
    from sottovoce import simulate

    plan = Plan(rounds={"schedule": "fixed", "rounds": 1})
    done = simulate(plan, seed=1, out=tmp_path / "run")
    found = target(tmp_path / "run")
    assert found.own
    assert np.array_equal(found.model["w1"], np.asarray(done.params["w1"], np.float64))


@pytest.mark.parametrize(("found", "code"), [(example, 0), (refuted, 1)])
def test_the_command_ends_with_1_if_the_promise_is_contradicted(
    found, code, tmp_path, monkeypatch, capsys
):
    from typer.testing import CliRunner

    from sottovoce.cli import app

    ready = found()  # which plays a tiny audit itself
    monkeypatch.setattr(auditing, "play", lambda on, sizes, show: ready)
    done = CliRunner().invoke(app, ["audit", "--out", str(tmp_path / "out")])
    assert done.exit_code == code, done.output
    written = json.loads((tmp_path / "out" / "audit.json").read_text("utf-8"))
    assert bool(written["contradictions"]) == bool(code)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["missing.toml"], "missing.toml"),
        (["broken.toml"], "epsilon must be"),
        (["empty"], "record.json"),
        (["--out", "full"], "new or empty folder"),
    ],
    ids=str,
)
def test_what_cannot_be_audited_is_refused_in_a_sentence(words, said, tmp_path):
    """The real command: exit code 2, one sentence, nothing written."""
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").write_text("mine", "utf-8")
    (tmp_path / "empty").mkdir()
    broken = "schema = 1\n[privacy]\nepsilon = -3.0\n"
    (tmp_path / "broken.toml").write_text(broken, "utf-8")
    before = sorted(tmp_path.rglob("*"))
    done = subprocess.run(
        [sys.executable, "-m", "sottovoce", "audit", *words],
        capture_output=True, text=True, timeout=120, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 2, done.stderr
    assert said in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1, done.stderr
    assert sorted(tmp_path.rglob("*")) == before
