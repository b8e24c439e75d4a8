"""`sottovoce audit`: what it says, what it writes, and when its exit code is 1."""

from __future__ import annotations

import html
import json
from dataclasses import replace
from importlib import resources
from pathlib import Path

import jsonschema
import numpy as np
import pytest
from markupsafe import Markup

from sottovoce.data import files
from sottovoce.errors import InputError, RunError
from sottovoce.plan import Plan
from sottovoce.reports import charts
from sottovoce.studies.audit import auditing, findings
from sottovoce.studies.audit.auditing import load_target
from sottovoce.studies.audit.findings import format_table
from sottovoce.studies.audit.messages import (
    COMPARISONS,
    WRONG_PER_COMPARISON,
    Level,
    compute_capacity,
)
from support.command_line import run_command
from support.example_audit import TINY, example, refuted

pytestmark = pytest.mark.slow  # JAX compiles; left out of the editing loop


@pytest.fixture
def rendered(monkeypatch):
    """The text of an audit's page, without its drawings."""
    monkeypatch.setattr(charts, "draw_svg", lambda *args, **options: Markup("<svg></svg>"))
    return lambda found: html.unescape(findings.render_audit(found, findings.draw_figures(found)))


def test_a_quick_audit(tmp_path, monkeypatch):
    """The real command: attacks succeed without noise, nothing contradicts us with it.

    Five times fewer uploads are measured than `--quick` does; the attacks have its size.
    """
    monkeypatch.setattr(auditing, "QUICK", replace(auditing.QUICK, runs=200, judged=200))
    done = run_command("audit", "--quick", "--json", "--out", tmp_path / "audit", draw=True)
    assert done.returncode == 0, done.stderr + done.stdout
    told = json.loads(done.stdout)
    assert told == json.loads((tmp_path / "audit" / "audit.json").read_text("utf-8"))
    assert told["contradictions"] == []
    clean = {(row["attack"], row["measure"]): row["levels"][0]["value"] for row in told["attacks"]}
    assert clean["first-layer inversion, one sample", "mean squared error"] < 1e-10
    assert clean["gradient matching, 3 samples", "mean squared error"] < 0.02
    assert clean["trap weights (dishonest server)", "of 143 samples, exact"] > 0.04
    assert clean["LiRA, final model", "AUC"] > 0.9
    assert [one["contradicts"] for one in told["messages"]][:-1] == [False] * 6
    assert told["messages"][-1]["calibration"] == "paper"
    assert (tmp_path / "audit" / "audit.html").stat().st_size > 50_000


def test_the_json_is_what_its_schema_says():
    schema = json.loads((Path(auditing.__file__).parents[2] / "schemas/audit.json").read_text())
    for found in (example(), refuted()):
        jsonschema.validate(json.loads(json.dumps(found.to_json())), schema)


def test_every_attack_stands_at_every_level_with_its_ceiling():
    found = example()
    names = [level.name for level in found.levels]
    assert names == ["no noise", "ε = 20", "ε = 8", "ε = 4"]
    rows = found.rows
    assert {row.attack for row in rows} >= {
        "first-layer inversion, one sample",
        "likeliest candidate, one sample",
        "gradient matching, 2 samples",
        "trap weights (dishonest server)",
        "LiRA, whole transcript",
        "LiRA, all models",
        "LiRA, one upload",
        "LiRA, final model",
        "loss threshold, final model",
    }
    for row in rows:
        assert list(row.cells) == list(found.levels)
        most = [cell.ceiling for cell in row.cells.values() if cell.ceiling is not None]
        if row.measure in ("mean squared error", "PSNR, dB", "SSIM"):
            assert (most, row.decides) == ([], False)
            continue
        assert len(most) == 4
        if "found at" not in row.measure:  # whose alarms differ
            assert most == sorted(most, reverse=True)  # a smaller ε, a lower ceiling
    measures = {row.measure for row in rows if row.attack == "gradient matching, 2 samples"}
    assert measures == {
        "recognised among 19, 2 tries",
        "label right, of 10",
        "mean squared error",
        "PSNR, dB",
        "SSIM",
    }
    assert "found at 10 % false alarms" in {row.measure for row in rows}


def test_a_ceiling_is_contradicted_by_what_was_counted_and_the_file_holds_it():
    """Hits and trials of what decides: one sample of each upload, alarms where there are any."""
    told = example().to_json()
    rows = {(row["attack"], row["measure"]): row for row in told["attacks"]}
    cell = rows["gradient matching, 2 samples", "recognised among 19, 2 tries"]["levels"][1]
    assert (cell["positives"], cell["negatives"]) == (1, None)  # one client of two samples
    cell = rows["LiRA, final model", "found at 10 % false alarms"]["levels"][1]
    assert (cell["positives"], cell["negatives"]) == (60, 60)  # 3 judged runs of 40
    cell = rows["first-layer inversion, one sample", "SSIM"]["levels"][1]
    assert cell["hits"] is None
    one = told["messages"][0]
    assert one["runs"] == 120 >= max(one["hits"], one["alarms"])
    assert told["command"] == "sottovoce audit"
    assert told["comparisons"] == example().comparisons <= COMPARISONS
    assert told["wrong"] == WRONG_PER_COMPARISON * COMPARISONS
    assert {one.wrong for one in (*example().promises, *example().one_runs)} == {
        WRONG_PER_COMPARISON
    }


def test_what_is_promised_is_never_printed_smaller_than_it_is():
    """Ceilings, ε and μ of a promise are rounded up: what is printed holds."""

    def read(text):
        return float(text.strip("()").removesuffix(" %").removeprefix("ε = "))

    found, rng = example(), np.random.default_rng(1)
    for value in rng.uniform(0.5, 1.0, 40):
        for share in (True, False):
            cell = findings.Finding(0.1, ceiling=float(value))
            row = findings.Row("an attack", "a measure", {}, share)
            shown = read(findings.split_finding(row, cell)[1])
            assert value <= shown / (100 if share else 1) <= value + 0.00101
    for epsilon in rng.uniform(1.0, 20.0, 40):
        setting = replace(found.views[1].setting, epsilon=float(epsilon))
        cells = findings.list_upload_cells(replace(found.views[1], setting=setting))
        assert setting.promised <= read(cells[2]) <= setting.promised + 0.00101
        assert setting.claim <= read(cells[3]) <= 1.01 * setting.claim
        assert epsilon <= read(Level(float(epsilon)).name) <= 1.0001 * epsilon
        target = replace(found.target, epsilon=float(epsilon), shared=0.5)
        told = replace(found, target=target).caveats.partition("attacked at ε = ")[2]
        assert epsilon <= read(told.partition(",")[0]) <= 1.01 * epsilon


def test_the_page_counts_the_uploads_of_every_client(rendered):
    """Of the lines of models each run has the uploads of five clients."""
    found, text = example(), " ".join(rendered(example()).split())
    counts = [
        sum(2 * len(m.having) * m.setting.rounds for _ in range(m.setting.clients))
        for m in found.all_measurements
    ]
    assert f"scores {min(counts)} to {max(counts)} real uploads" in text


@pytest.mark.parametrize(
    ("unit", "said"),
    [("record", "one record"), ("person", "one person"), ("client", "all rows of a client")],
)
def test_the_page_names_what_the_two_datasets_differ_in(unit, said, rendered):
    target = example().target
    target = replace(target, recipe=replace(target.recipe, unit=unit))
    text = " ".join(rendered(replace(example(), target=target)).split())
    assert f"A server that knows both candidates for {said}, and may send any model" in text


def test_the_verdict_follows_the_measurements(tmp_path, monkeypatch, capsys, rendered):
    assert example().verdict.startswith("Nothing measured contradicts the promise")
    assert "Theorem 1 of the paper claims ε = 20" in example().judgement
    found = refuted()
    assert found.verdict.startswith("The promise is contradicted: uploads at ε = 4 prove μ ≥ ")
    assert "contradicted" in format_table(found)
    assert '<span class="status failed">contradicted' in rendered(found)
    monkeypatch.setattr(
        findings, "write_audit", lambda found, folder: folder / "audit.html"
    )  # a browser draws it
    monkeypatch.setattr(auditing, "run_attacks", lambda target, sizes, stages: found)
    assert auditing.audit(None, out=tmp_path / "one") == 1
    assert "The promise is contradicted" in capsys.readouterr().out
    monkeypatch.setattr(auditing, "run_attacks", lambda target, sizes, stages: example())
    assert auditing.audit(None, out=tmp_path / "two", as_json=True) == 0
    assert json.loads(capsys.readouterr().out)["schema"] == "sottovoce.audit/1"


def test_two_audits_do_not_write_into_one_folder(tmp_path, monkeypatch):
    """Neither at the same time, nor one over the results of the other."""
    monkeypatch.setattr(files, "HOLD_SECONDS", 0.0)
    monkeypatch.setattr(auditing, "load_target", lambda path: example().target)
    with files.hold_folder(tmp_path / "one"), pytest.raises(InputError, match="another process"):
        auditing.audit(None, out=tmp_path / "one")

    def end_meanwhile(path):
        (tmp_path / "two").mkdir()
        (tmp_path / "two" / "audit.json").touch()
        return example().target

    monkeypatch.setattr(auditing, "load_target", end_meanwhile)
    with pytest.raises(InputError, match="out must be a new or empty folder"):
        auditing.audit(None, out=tmp_path / "two")


def test_a_rate_above_its_ceiling_is_a_contradiction():
    """Scores that know the answer, at every kind of attack."""
    found = example()
    noisy = [attack for attack in found.members if attack.level.epsilon == 4.0]
    there = np.argsort(np.random.default_rng(0).random((128, 40)), axis=1) < 20
    knowing = [replace(attack, scores=there * 1.0, members=there) for attack in noisy]
    said = replace(found, members=knowing, levels=found.levels[-1:]).contradictions
    assert any("AUC" in one for one in said)
    assert any("found at 10 %" in one for one in said)
    clean = found.inversions[0]
    told = replace(found.inversions[-1], recognised=np.ones_like(clean.recognised))
    assert replace(found, inversions=[*found.inversions[:-1], told]).contradictions
    told = replace(found.namings[-1], recognised=np.ones_like(clean.recognised))
    assert replace(found, namings=[*found.namings[:-1], told]).contradictions
    # Samples of one upload share its noise: they are shown, and decide nothing.
    stolen = replace(found.traps[-1].rates, hits=100)
    loot = replace(found.traps[-1], rates=stolen)
    assert not replace(found, traps=[*found.traps[:-1], loot]).contradictions
    run = replace(found.one_runs[0], right=found.one_runs[0].guesses, canaries=10_000,
                  guesses=10_000)  # fmt: skip
    run = replace(run, right=10_000)
    assert replace(found, one_runs=[run]).contradictions


def test_naming_the_most_common_label_is_no_contradiction():
    """Six labels in ten are alike: whoever always says so is right as often, and knows nothing."""
    found = example()
    common = (np.arange(400) % 5 < 2).astype(np.int64)
    blind = [
        replace(
            one,
            truth=common,
            labels=common == 0,
            recognised=np.zeros(400, dtype=bool),
            judged=np.ones(400, dtype=bool),
            candidates=400,
        )
        for one in found.inversions
    ]
    assert not replace(found, inversions=blind).contradictions
    knowing = [replace(one, labels=np.ones(400, dtype=bool)) for one in blind]
    assert replace(found, inversions=knowing).contradictions


def test_our_own_line_beside_the_papers_counts_and_the_papers_does_not():
    found = example()
    told = [
        replace(one, without=np.full(5000, -9.0), having=np.full(5000, 9.0))
        for one in found.headline
    ]
    ours, paper = told
    assert paper.setting.calibration == "paper"
    against = replace(found, headline=[ours, found.headline[1]]).contradictions
    assert len(against) == 1
    assert "uploads at ε = 20 prove μ ≥ " in against[0]
    assert replace(found, headline=[found.headline[0], paper]).contradictions == []


def test_an_epsilon_that_is_refuted_without_an_assumption_is_a_contradiction():
    """A head that only one side writes, in one run of a hundred, at ε = 1."""
    rng, first = np.random.default_rng(1), example().measurements[0]
    without, having = rng.normal(-0.13, size=20_000), rng.normal(0.13, size=20_000)
    having[:200] = np.inf
    setting = replace(first.setting, epsilon=1.0)
    told = replace(first, setting=setting, true=0.26, without=without, having=having)
    found = replace(example(), measurements=[told, *example().measurements[1:]])
    assert [one for one in found.contradictions if "ε = 1 prove ε ≥ " in one]


def test_the_judgement_says_what_it_assumes():
    said = example().judgement
    free = np.floor(10 * example().paper.free_epsilon) / 10  # no more is said than was proven
    assert "assuming the Gaussian shape" in said
    assert said.endswith(f"without that assumption 120 runs a side prove ε ≥ {free:.1f}.")


PLAN = "schema = 1\n"


@pytest.mark.parametrize(
    ("text", "codes", "said"),
    [
        (
            '[privacy]\ncalibration = "paper"\n',
            ("paper-calibration",),
            "promise: the (ε, δ) that was asked for",
        ),
        ('[server]\nsignal = "raw"\n', ("raw-signal",), "the clients' raw losses"),
        ('[local]\nclip = "median"\n', ("median-clip",), "the clipping norm"),
        ("[local]\nsteps = 3\n", (), "the 3 local steps of a round"),
        ('[server]\nsignal = "clients"\n', (), "except in the measurement of uploads"),
        ('[local]\nunit = "client"\n', (), "one run full of canaries"),
    ],
    ids=lambda value: value if isinstance(value, str) and "[" in value else "",
)
def test_the_verdict_names_what_was_not_measured(text, codes, said, tmp_path, rendered):
    (tmp_path / "plan.toml").write_text(PLAN + text, "utf-8")
    on = load_target(tmp_path / "plan.toml")
    assert on.uncovered == codes
    found = replace(example(), target=on)
    assert said in found.verdict
    assert bool(found.to_json()["not_measured"]) == (not codes)
    assert said in rendered(found).partition('id="how"')[2]
    assert "Not measured" not in example().verdict


@pytest.mark.parametrize("calibration", ["exact", "zcdp", "paper"])
def test_the_plans_own_calibration_is_what_is_audited(calibration, tmp_path):
    (tmp_path / "plan.toml").write_text(
        f'{PLAN}[privacy]\nepsilon = 20.0\ncalibration = "{calibration}"\n', "utf-8"
    )
    on = load_target(tmp_path / "plan.toml")
    settings, levels = auditing.list_settings(on), auditing.list_levels(on)
    assert {one.calibration for one in (*settings, *levels[1:])} == {calibration}
    assert {one.loss_bound for one in settings} == {None}
    last = settings[-1]
    worth = compute_capacity(last.epsilon, last.delta, last.calibration) ** 0.5
    assert (worth > settings[-1].promised) == (calibration == "paper")


MINI = replace(
    TINY, runs=20, judged=20, candidates=6, shadows=4, pool=16, rounds=2, turns=1, steps=5,
    canaries=50,
)  # fmt: skip


@pytest.mark.parametrize("model", ["mlp", pytest.param("softmax", marks=pytest.mark.trust)])
def test_rows_of_features_are_attacked_as_they_are(model, tmp_path, rendered):
    """They are no pictures: nothing is drawn of them, and the audit comes to its end."""
    (tmp_path / "plan.toml").write_text(
        f'{PLAN}[model]\nname = "{model}"\nfeatures = "hog"\n', "utf-8"
    )
    on = load_target(tmp_path / "plan.toml")
    assert on.pictures is None
    assert on.form.features == on.x.shape[1] != 64
    found = auditing.run_attacks(on, MINI)
    figures = findings.draw_figures(found)
    assert not {"inversion", "matching", "traps"} & figures.keys()
    assert "What the server sees" not in rendered(found)
    assert "SSIM" not in {row.measure for row in found.rows}
    said = "gradient matching, which needs features from 0 to 1"
    assert (said in found.unmeasured) == (not found.matchings)


def test_a_client_as_the_unit_has_no_run_of_canaries(tmp_path, rendered):
    (tmp_path / "plan.toml").write_text(f'{PLAN}[local]\nunit = "client"\n', "utf-8")
    found = auditing.run_attacks(load_target(tmp_path / "plan.toml"), MINI)
    assert found.one_runs == []
    assert "The same from one run" not in rendered(found)
    assert "The same from one run" in rendered(example())
    assert "canaries  guesses" not in format_table(found)
    assert "canaries  guesses" in format_table(example())


def test_candidates_are_drawn_from_all_clients(tmp_path):
    """With one label a client, the first client's rows alone would have one."""
    (tmp_path / "plan.toml").write_text(
        f'{PLAN}[data]\nsplit = "labels"\nlabels_per_client = 1\n', "utf-8"
    )
    assert len(set(load_target(tmp_path / "plan.toml").pool_y[:40])) > 5


def test_fewer_rows_than_candidates_are_as_many_candidates():
    on, few = load_target(None), replace(load_target(None), pool_x=load_target(None).pool_x[:12],
                                    pool_y=load_target(None).pool_y[:12])  # fmt: skip
    sizes = replace(MINI, candidates=100, groups=3)
    assert auditing._match_groups(few, sizes, Level(4.0)).candidates == 11
    assert auditing._match_groups(on, sizes, Level(4.0)).candidates == 99


@pytest.mark.parametrize(
    "error", [RuntimeError("unforeseen"), OSError(28, "No space left on device"), RunError("gone")]
)
def test_an_audit_that_breaks_off_never_says_that_a_promise_is_contradicted(
    error, tmp_path, monkeypatch
):
    def broken(target, sizes, stages):
        raise error

    monkeypatch.setattr(auditing, "run_attacks", broken)
    with pytest.raises(InputError):  # which the command line turns into 2
        auditing.audit(None, out=tmp_path / "out")


def test_a_folder_that_cannot_be_made_is_found_before_the_work(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("mine", "utf-8")
    monkeypatch.setattr(
        auditing, "run_attacks", lambda target, sizes, stages: pytest.fail("began to work")
    )
    with pytest.raises(InputError, match="cannot be"):
        auditing.audit(None, out=tmp_path / "file" / "out")


def test_a_plan_of_another_model_is_attacked_through_an_mlp(tmp_path):
    path = tmp_path / "plan.toml"
    path.write_text('schema = 1\n[model]\nname = "cnn"\n[privacy]\nepsilon = 3.0\n', "utf-8")
    found = load_target(path)
    assert not found.own_model
    assert found.form.name == "mlp"
    assert found.epsilon == 3.0
    assert found.pictures == (8, 8)


def test_a_run_is_attacked_at_the_model_it_ended_with(tmp_path):
    from sottovoce import simulate

    plan = Plan(rounds={"schedule": "fixed", "rounds": 1})
    done = simulate(plan, seed=1, out=tmp_path / "run")
    found = load_target(tmp_path / "run")
    assert found.own_model
    assert np.array_equal(found.model["w1"], np.asarray(done.params["w1"], np.float64))


@pytest.mark.parametrize(
    ("found", "code"), [pytest.param(example, 0, marks=pytest.mark.trust), (refuted, 1)]
)
def test_the_command_ends_with_1_if_the_promise_is_contradicted(
    found, code, tmp_path, monkeypatch, capsys
):
    from typer.testing import CliRunner

    from sottovoce.cli.commands import app

    ready = found()  # which plays a tiny audit itself
    monkeypatch.setattr(auditing, "run_attacks", lambda target, sizes, stages: ready)
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
    done = run_command("audit", *words, cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    assert said in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1, done.stderr
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    "kind",
    [*(pytest.param(kind, marks=pytest.mark.trust) for kind in ("persons", "numbers")), "both"],
)
def test_persons_and_numbers_are_attacked_by_all_that_applies(tmp_path, kind, rendered):
    """What looks for a single row or a class is named as not measured; the rest has its ceiling."""
    rng = np.random.default_rng(2)
    rows = [(who, rng.uniform(0, 9), rng.uniform(0, 9)) for who in range(60) for _ in range(2)]
    cells = [f"{who},{a:.2f},{b:.2f},{'ny'[a > b]},{a + b:.2f}" for who, a, b in rows]
    (tmp_path / "t.csv").write_text("\n".join(["who,a,b,more,sum", *cells]), "utf-8")
    columns = {"a": [0, 9], "b": [0, 9]}
    columns |= {"more": ["n", "y"]} if kind == "persons" else {"sum": [0, 18]}
    data = {"path": str(tmp_path / "t.csv"), "label": "more" if kind == "persons" else "sum"}
    data |= {"columns": columns, "clients": 2} | ({} if kind == "numbers" else {"person": "who"})
    plan = Plan(
        data=data,
        model={} if kind == "persons" else {"loss": "squared"},
        local={} if kind == "numbers" else {"unit": "person"},
        privacy={"epsilon": 8.0},
    )
    (tmp_path / "plan.toml").write_text(plan.to_toml(), "utf-8")
    target = load_target(tmp_path / "plan.toml")
    found = auditing.run_attacks(target, TINY)
    assert found.contradictions == []
    assert not any("label" in row.measure for row in found.rows)
    assert len(found.one_runs) == len(found.measurements)
    assert {attack.name for attack in found.members} == {
        "loss threshold, final model",
        "LiRA, final model",
        "LiRA, one upload",
        "LiRA, whole transcript",
        "LiRA, all models",
    }
    assert all((attack.members.sum(axis=1) == TINY.pool // 2).all() for attack in found.members)
    (why,) = found.unmeasured
    assert ("a person's gradient" in why) == (kind != "numbers") == (not found.traps)
    naming = next(row for row in found.rows if row.attack.startswith("likeliest"))
    assert naming.cells[found.levels[0]].value == 1.0  # without noise everybody is named
    assert why in rendered(found)
    is_read = "first-layer inversion, one sample" in findings.format_table(found)
    assert is_read == (kind == "numbers")
    schema = resources.files("sottovoce").joinpath("schemas/audit.json").read_text("utf-8")
    jsonschema.validate(json.loads(json.dumps(found.to_json())), json.loads(schema))
