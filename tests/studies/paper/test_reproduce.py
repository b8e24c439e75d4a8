"""The paper's figures: definitions that refuse, verdicts that flip, sweeps that go on, no waste."""

from __future__ import annotations

import ast
import json
import os
import random
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from markupsafe import Markup

import sottovoce.studies.paper
from sottovoce.data import files
from sottovoce.errors import DataError, InputError, RunError
from sottovoce.plan import Plan
from sottovoce.reports import charts
from sottovoce.studies import store
from sottovoce.studies.paper import definition, outcomes, page, reproduce
from sottovoce.studies.paper.definition import (
    LEAST_SEEDS,
    compose_epsilon,
    expand,
    list_figures,
    list_seeds,
    load_figure,
    load_methods,
    load_setting,
    parse_figure,
)
from sottovoce.studies.paper.outcomes import CHECKS, compute_interval, judge
from support import ROOT, claims
from support.command_line import run_command
from support.example_results import DIGITS, fill, result
from support.random_edits import edit_randomly

FIGURES = list_figures()
SWEEPS = tuple(name for name in FIGURES if load_figure(name).kind != "moments")
HOSTILE = "<script>alert(1)</script>\"'><img src=x onerror=alert(1)>"
COMPARISONS = ("fig8", "fig9", "fig11", "fig12", "fig13")

# --- definitions -------------------------------------------------------------------------------


def test_every_figure_of_the_paper_is_there_with_a_claim_and_five_seeds_or_more():
    assert set(FIGURES) >= {f"fig{i}" for i in range(2, 16)} | {"calibrations"}
    for name in FIGURES:
        own = load_figure(name)
        assert own.claims
        assert own.seeds >= LEAST_SEEDS
        assert own.caption
        for claim in own.claims:
            assert claim.check in CHECKS
            assert claim.topic


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (DIGITS.replace("caption", "capton"), "unknown key capton; did you mean caption"),
        (DIGITS.replace('scale = "log"', "") + "oops = 1", r"unknown key claims\.0\.oops"),
        (DIGITS.replace("label =", "lable =", 1), r"unknown key x\.lable; did you mean label"),
        (DIGITS.replace('kind = "sweep"', 'kind = "swep"'), "wrong kind"),
        (DIGITS + "\n[quick]\nxx = [1]", r"unknown key quick\.xx"),
        ("seeds = 2\n" + DIGITS, "wrong seeds .*greater than or equal to 5"),
        (DIGITS.partition("[[claims]]")[0], "lacks claims"),
        (DIGITS.replace('setting = "mnist"', ""), "names no setting"),
        (DIGITS.replace('caption = "Test loss on the digits."', ""), "lacks caption"),
        ("kind = ", "not valid TOML"),
        (DIGITS.replace('"sweep"', '"moments"'), r"no table \[moments\]"),
    ],
)
def test_a_definition_with_a_slip_is_refused_in_one_sentence(text, sentence):
    with pytest.raises(InputError, match=sentence) as caught:
        parse_figure(text, "mine")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", SWEEPS)
@pytest.mark.parametrize("quick", [False, True])
def test_figures_expand_to_plans_that_differ_in_nothing_they_should_not(name, quick):
    own = load_figure(name)
    cells = expand(own, quick)
    assert len({cell.plan.local for cell in cells}) == 1  # η and C are the same for all methods
    assert len({cell.plan.model for cell in cells}) == 1
    for cell in cells:
        if cell.variant == "corrected":
            assert cell.plan.data.validation > 0  # the test set steers nothing
            paper = str(cell.line).endswith("-paper")
            assert cell.plan.privacy.calibration == ("paper" if paper else "exact")
        else:
            assert cell.plan.privacy.calibration == "paper" or cell.line == "plain"
    assert not set(list_seeds(own, quick)) & {11, 12}  # on which the open choices were made


@pytest.mark.slow
@pytest.mark.parametrize("name", COMPARISONS)
def test_a_corrected_comparison_is_at_one_exact_guarantee(name):
    for cell in expand(load_figure(name), quick=False):
        if cell.variant == "corrected":
            own, tried = cell.plan.privacy, load_methods()[cell.line]
            runs = len(tried.search) if tried.paid else 1
            assert compose_epsilon(own.epsilon, own.delta, runs) == pytest.approx(cell.x, rel=1e-6)


def test_methods_and_settings_have_no_key_that_nobody_uses():
    used = {
        name
        for own in map(load_figure, SWEEPS)
        for axis in [own.line]
        if axis is not None and axis.key == "method"
        for name in (*axis.values, *(axis.corrected or ()))
    }
    for own in map(load_figure, SWEEPS):
        used |= {own.plan.get("method"), own.corrected.get("method"), own.reference}
    assert used >= set(load_methods())
    for own in map(load_figure, SWEEPS):
        assert load_setting(own.setting).reasons


def test_the_room_trains_nothing_itself():
    allowed = {"sottovoce.simulation.simulate", "sottovoce.runs.trained", "sottovoce.data"}
    folder = Path(sottovoce.studies.paper.__file__).parent
    for path in folder.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("sottovoce."):
                room = node.module.split(".")[1]
                if room in {"simulation", "learning", "noise", "client", "federation", "trained"}:
                    assert node.module in allowed, (path.name, node.module)


# --- verdicts ----------------------------------------------------------------------------------


@pytest.mark.slow
def test_made_up_results_that_are_right_by_every_claim_hold_and_reversed_ones_do_not():
    """Every claim's check, on numbers that obey it and on the same numbers turned round."""
    reversible = {"lower", "higher", "rises", "falls", "best", "nearer", "convex", "overdrawn"}
    for name in SWEEPS:
        right = judged(result(name))
        wrong = judged(result(name, reverse=True))
        for (claim, yes), (_, no) in zip(right.verdicts, wrong.verdicts, strict=True):
            assert yes, claim
            for variant in yes:
                assert yes[variant].word == "holds", (name, variant, claim, yes[variant])
                if claim.measure == "best" or claim.check == "nearer":
                    assert no[variant].word != "holds", (name, variant, claim)
                elif claim.check in reversible:
                    assert no[variant].word == "contradicted", (name, variant, claim, no[variant])


def judged(made: outcomes.Result) -> outcomes.Judged:
    return outcomes.judge_figure(json.loads(made.text()))


def test_the_moment_bound_is_contradicted_and_a_larger_one_would_hold():
    made = result("fig2")
    assert judged(made).verdicts[0][1]["printed"].word == "contradicted"
    content = json.loads(made.text())
    for panel in content["moments"]:
        panel["bound"] = [value + 1 for value in panel["truth"]]
    assert outcomes.judge_figure(content).verdicts[0][1]["printed"].word == "holds"


@pytest.mark.slow
def test_chance_alone_decides_rarely():
    """No difference, five seeds: P(holds) = 2.5 % at one point; P(contradicted) ≤ 2.5 % at ten.

    4,000 made-up claims each; the bounds are four standard deviations away, a false alarm once in
    10,000 seeds.
    """
    rng, trials = np.random.default_rng(7), 4000
    one = [judge({"": rng.normal(size=5)}).word for _ in range(trials)]
    spread = 4 * np.sqrt(0.025 * 0.975 / trials)
    assert abs(one.count("holds") / trials - 0.025) < spread
    ten = [judge({str(i): rng.normal(size=5) for i in range(10)}).word for _ in range(trials)]
    assert ten.count("contradicted") / trials < 0.025 + spread
    assert ten.count("holds") == 0


def test_a_false_claim_at_one_point_of_many_is_not_held():
    rng = np.random.default_rng(1)
    points = {str(i): 1 + 0.1 * rng.normal(size=5) for i in range(9)}
    assert judge(points).word == "holds"
    assert judge(points | {"bad": -1 + 0.1 * rng.normal(size=5)}).word == "contradicted"
    assert judge(points | {"lost": [np.nan, 1, 1, 1, 1]}).word == "undecided"
    assert judge({}).word == "undecided"


def test_interval_equals_scipys():
    from scipy import stats

    values = np.array([0.3, 0.1, 0.4, 0.1, 0.5])
    low, high = stats.t.interval(0.95, 4, loc=values.mean(), scale=stats.sem(values))
    assert compute_interval(values).low == pytest.approx(low, rel=1e-12)
    assert compute_interval(values).high == pytest.approx(high, rel=1e-12)


# --- running -----------------------------------------------------------------------------------


@pytest.fixture
def digits(monkeypatch):
    """The command knows one more figure, on the embedded digits."""
    own = parse_figure(DIGITS, "digits")
    monkeypatch.setattr(definition, "list_figures", lambda: (*FIGURES, "digits"))
    known = definition.load_figure
    monkeypatch.setattr(definition, "load_figure", lambda n: own if n == "digits" else known(n))
    return own


@pytest.mark.slow
def test_an_interrupted_sweep_goes_on_and_ends_in_the_same_numbers(digits, tmp_path, monkeypatch):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    reproduce.reproduce(["digits"], quick=True, out=whole, quiet=True)
    assert not (whole / store.JOURNAL).exists()

    done = []

    def stop(now: int, total: int) -> None:
        done.append(now)
        if len(done) == 5:
            raise KeyboardInterrupt

    parts.mkdir()
    with pytest.raises(KeyboardInterrupt):
        reproduce.run_missing([digits], quick=True, folder=parts, progress=stop)
    with (parts / store.JOURNAL).open("a") as file:
        file.write('{"key": "torn')  # as a kill leaves it
    trained = []
    real = reproduce._train
    monkeypatch.setattr(
        reproduce, "_train", lambda *job: (trained.append(x) or x for x in real(*job))
    )
    reproduce.reproduce(["digits"], quick=True, out=parts, quiet=True)
    assert len(trained) == 3 * 2 * 2 * 2 - 5  # T × ε × variants × seeds, less what was there
    first, second = (json.loads((f / "digits.json").read_text("utf-8")) for f in (whole, parts))
    assert first["cells"] == second["cells"]


def test_one_process_at_a_time_writes_into_a_folder(tmp_path, monkeypatch):
    """Two that wrote one file at the same time would take it from each other."""
    monkeypatch.setattr(files, "HOLD_SECONDS", 0.0)
    with files.hold_folder(tmp_path), pytest.raises(RunError, match="goes on in another process"):
        reproduce.reproduce(["fig2"], quick=True, out=tmp_path, quiet=True)
    with files.hold_folder(tmp_path), pytest.raises(RunError, match="goes on in another process"):
        reproduce.reproduce_study("horizon", quick=True, out=tmp_path, quiet=True)
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize(
    ("out", "told"), [(".", "."), ("my results", "'my results'"), ("a/b", "b")]
)
def test_the_command_of_a_figure_can_be_typed_again(out, told, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    reproduce.reproduce(["fig2"], quick=True, out=out, quiet=True)
    written = json.loads((tmp_path / out / "fig2.json").read_text("utf-8"))
    assert written["command"] == f"sottovoce reproduce fig2 --quick --out {told}"


@pytest.mark.slow
def test_a_finished_figure_is_drawn_again_without_training_and_without_jax(digits, tmp_path):
    out = tmp_path / "out"
    reproduce.reproduce(["digits"], quick=True, out=out, quiet=True)
    written = json.loads((out / "digits.json").read_text("utf-8"))
    assert written["made"][0].startswith("sottovoce ")
    assert written["command"] == "sottovoce reproduce digits --quick --out out"
    assert Plan(**written["plan"]).data.name == "digits"
    (out / "index.html").unlink()
    blocked = (
        "import sys\nsys.modules['jax'] = None\n"
        f"sys.argv = ['sottovoce', 'report', {str(out)!r}]\n"
        "from sottovoce.cli.commands import main\nmain()"
    )
    done = subprocess.run([sys.executable, "-c", blocked], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "Loss against T" in (out / "index.html").read_text("utf-8")


@pytest.mark.slow
def test_runs_are_shared_by_figures_and_folders_are_merged_by_copying(tmp_path):
    five, nine = expand(load_figure("fig5"), False), expand(load_figure("fig9"), False)
    searched = {cell.key for cell in nine if cell.line == "optimal" and cell.panel == 50}
    assert {cell.key for cell in five} >= searched  # the search of Fig. 9 is the sweep of Fig. 5
    fill(tmp_path / "a", ("fig8",))
    fill(tmp_path / "b", ("fig15",))
    shutil.copy(tmp_path / "b" / "fig15.json", tmp_path / "a")
    both = reproduce.write_page(tmp_path / "a").read_text("utf-8")
    assert 'id="fig8"' in both
    assert 'id="fig15"' in both


@pytest.mark.slow
def test_a_run_with_pictures_keeps_them_whatever_else_shares_it(tmp_path):
    """Figures 3 and 8 share runs, and only the first has pictures of them."""
    for name in ("fig3", "fig8"):
        result(name).save(tmp_path)
    runs, own = outcomes.read_runs(tmp_path), load_figure("fig3")
    cells = expand(own, False)
    assert {cell.key for cell in cells} & {cell.key for cell in expand(load_figure("fig8"), False)}
    assert reproduce.list_missing(own, False, runs) == []


@pytest.mark.slow
def test_missing_data_leave_out_their_figures_only(tmp_path, monkeypatch):
    monkeypatch.setenv("SOTTOVOCE_DATA", str(tmp_path))
    with pytest.raises(DataError, match=r"fig5 could not be made: mnist must be in"):
        reproduce.reproduce(["fig2", "fig5"], quick=True, out=tmp_path / "out", quiet=True)
    assert (tmp_path / "out" / "fig2.json").exists()
    assert (tmp_path / "out" / "index.html").exists()
    assert not (tmp_path / "out" / "fig5.json").exists()


@pytest.mark.slow
def test_quick_and_full_results_never_mix(tmp_path):
    fill(tmp_path / "full", ("fig2",))
    with pytest.raises(InputError, match=r"fig2\.json there is full: name another folder"):
        reproduce.reproduce(["fig2"], quick=True, out=tmp_path / "full", quiet=True)


def test_finished_runs_of_another_figure_stay_until_that_figure_is_finished(tmp_path):
    """An interrupted fig5 has runs in the journal only: making fig2 beside it keeps them."""
    cell, seed = reproduce.list_missing(load_figure("fig5"), True, {})[0]
    run = outcomes.Outcome(loss=0.5, rounds=3, epsilon=1.0, delta=1e-3)
    outcomes.append_run(tmp_path, cell.key, seed, run)
    reproduce.reproduce(["fig2"], quick=True, out=tmp_path, quiet=True)
    assert outcomes.read_runs(tmp_path)[cell.key, seed] == run


@pytest.mark.parametrize("name", ["frontier", "horizon"])
def test_a_quick_study_never_replaces_full_results_nor_ends_their_journal(name, tmp_path):
    shutil.copytree(ROOT / "results" / name, tmp_path / "out" / name)
    kept = {path: path.read_bytes() for path in (tmp_path / "out" / name).iterdir()}
    with pytest.raises(InputError, match=rf"{name}/\w+\.json there is full: name another folder"):
        reproduce.reproduce_study(name, quick=True, out=tmp_path / "out", quiet=True)
    assert {path: path.read_bytes() for path in (tmp_path / "out" / name).iterdir()} == kept
    run = outcomes.Outcome(accuracy=0.5, rounds=3, epsilon=1.0, delta=1e-3)
    stopped = tmp_path / "stopped"
    stopped.mkdir()
    outcomes.append_run(stopped, "another panel's", 1, run)
    outcomes.save_study(stopped, name, "", "", [], {})
    assert outcomes.read_runs(stopped) == {("another panel's", 1): run}


def test_a_folder_of_neither_kind_has_no_page(tmp_path):
    with pytest.raises(RunError, match="neither a run nor figures"):
        reproduce.write_page(tmp_path)


@pytest.mark.slow
def test_random_edits_of_finished_figures_give_a_page_or_one_sentence(tmp_path, monkeypatch):
    monkeypatch.setattr(charts, "draw_svg", lambda *_, **__: Markup("<svg></svg>"))
    figures = {name: json.loads(result(name).text()) for name in ("fig2", "fig8", "fig9")}
    rng, refusals = random.Random(1), []
    for _ in range(150):
        name = rng.choice(list(figures))
        edited, done = edit_randomly(figures[name], rng)
        (tmp_path / f"{name}.json").write_text(json.dumps(edited), "utf-8")
        try:
            reproduce.write_page(tmp_path)
        except RunError as error:
            refusals.append(str(error))
        except Exception as error:
            pytest.fail(f"{done}: {error!r}")
        (tmp_path / f"{name}.json").unlink()
    assert 20 < len(refusals) < 130
    assert not [sentence for sentence in refusals if "\n" in sentence or "; " not in sentence]


@pytest.mark.parametrize("name", [HOSTILE, r"fig2\g<2>", "../fig2", "a b"])
def test_a_hostile_name_of_a_figure_is_refused_and_adds_nothing_to_a_drawing(name, tmp_path):
    content = json.loads(result("fig2").text()) | {"figure": name}
    (tmp_path / "fig2.json").write_text(json.dumps(content), "utf-8")
    with pytest.raises(RunError, match=r"fig2\.json is damaged \(.* has a wrong name"):
        reproduce.write_page(tmp_path)
    drawn = page.draw_panel(page.list_pictures(result("fig2"))[0], name)
    plain = page.draw_panel(page.list_pictures(result("fig2"))[0], "fig2")
    assert re.findall("<[^ >]*", drawn) == re.findall("<[^ >]*", plain)
    assert drawn.count('"') == plain.count('"')


def test_a_setting_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(InputError, match="setting must be one of census, cifar, mnist, got"):
        load_setting("../settings/mnist")


# --- the command and the documents -------------------------------------------------------------


@pytest.mark.slow
def test_the_command_lists_refuses_and_prints_claims(tmp_path):
    listed = run_command("reproduce")
    assert listed.returncode == 0
    names = [line.split()[0] for line in listed.stdout.splitlines()]
    assert names == [*FIGURES, "all", "frontier", "horizon"]
    bad = run_command("reproduce", "fig1", "--out", str(tmp_path / "x"))
    assert bad.returncode == 2
    assert bad.stderr.count("\n") == 1
    assert not (tmp_path / "x").exists()
    fill(tmp_path / "made", ("fig15",))
    table = run_command("reproduce", "--claims", "--out", str(tmp_path / "made"))
    assert "| A larger β leads to more communication rounds. | Fig. 15 | holds" in table.stdout
    empty = run_command("reproduce", "--claims", "--out", str(tmp_path / "nothing"))
    assert (empty.returncode, empty.stdout) == (1, "")


@pytest.mark.slow
def test_the_page_of_the_results_claims_what_holds():
    """Of the results that are kept: every ε that is said to hold, and no smaller one."""
    found = reproduce.load_finished(ROOT / "results")
    one = next(one for one in found if one.figure.name == "fig8")
    table = one.result.tables["printed"]
    panel = table.axis("panel")[0]
    true = [table.points[panel, "udp", x].epsilon for x in table.axis("x")]
    told = re.search(r"all clients in every round: (.*?)\.( |$)", page.describe_promise(found))[1]
    shown = [float(pair.split(" → ")[1]) for pair in told.split(", ")]
    assert all(0 <= a - b <= 0.01 * b for a, b in zip(shown, true, strict=True))
    cells = {cell for row in page.tabulate_guarantees(table)["rows"] for cell in row}
    assert {f"{value:g}" for value in shown} <= cells


@pytest.mark.slow
def test_the_story_says_what_the_results_say():
    right, wrong = ([judged(result(n, reverse=r)) for n in FIGURES] for r in (False, True))
    total = sum(
        not claim.ours and "printed" in claim.variants
        for name in FIGURES
        for claim in load_figure(name).claims
    )
    # All but the moment bound, which is computed, not made up.
    assert f"{total - 1} of {total} hold as printed; 1 contradicted" in page.describe_tally(right)
    assert int(re.search(r"printed; (\d+) contradicted", page.describe_tally(wrong))[1]) > total / 2
    assert "20 → 24" in page.describe_promise(right)  # what the made-up noise guarantees


def test_the_story_names_who_uploads_in_the_figure_that_it_tells_of():
    """Fig. 8 begins with all 50 clients in every round, Fig. 11 has 30 of 50 throughout."""
    assert "original UDP, all clients in every round: " in page.describe_promise(
        [judged(result("fig8"))]
    )
    told = page.describe_promise([judged(result("fig11"))])
    assert "original UDP, 30 of 50 clients in every round: " in told


@pytest.mark.slow
def test_the_page_is_whole_and_asks_for_nothing(tmp_path):
    page = fill(tmp_path, ("fig2", "fig3", "fig8", "fig10", "calibrations")).read_text("utf-8")
    for name in ("fig2", "fig3", "fig8", "fig10", "calibrations"):
        assert f'id="{name}"' in page
    assert "<script" not in page
    assert not re.findall(r"""(?:src|href)=["'](?!#|data:)[^"']*""", page)
    # The true guarantee of the search is printed beside that of one run.
    assert re.search(r"a run, [\d.]+ for all 8", page)


@pytest.mark.slow
def test_the_page_on_the_paper_shows_the_committed_results():
    results = ROOT / "results"
    found = outcomes.judge_folder(results)
    assert [one.figure.name for one in found] == list(FIGURES)
    for one in found:
        assert not one.result.quick
        assert all(len(cell["seeds"]) >= LEAST_SEEDS for cell in one.result.cells)
        assert one.figure == load_figure(one.figure.name)
    page = (ROOT / "docs" / "paper.md").read_text("utf-8")
    assert claims.insert_table(page, outcomes.format_markdown(found)) == page


@pytest.mark.trust
@pytest.mark.slow
def test_every_figure_runs_quickly(tmp_path, monkeypatch):
    """`reproduce all --quick`: every figure's path, on the real data, with one seed of its two."""
    if not os.environ.get("SOTTOVOCE_DATA"):
        pytest.skip("SOTTOVOCE_DATA is not set: MNIST, CIFAR-10 and ACS are needed")
    for module in (outcomes, reproduce):
        monkeypatch.setattr(module, "list_seeds", lambda *_: [1])
    out = tmp_path / "quick"
    words = ("reproduce", "all", "--quick", "--out", str(out))
    done = run_command(*words, draw=True)
    assert done.returncode == 0, done.stderr
    for name in FIGURES:
        assert (out / f"{name}.json").exists()
        assert (out / f"{name}.svg").read_text("utf-8").startswith("<?xml")
    assert "A quick run" in (out / "index.html").read_text("utf-8")

    def refuse(*_):
        raise AssertionError("something was left to train")

    monkeypatch.setattr(reproduce, "_train", refuse)
    again = run_command(*words)
    assert again.returncode == 0, again.stderr


def test_the_claims_table_is_written_between_its_marks(tmp_path):
    figure = definition.load_figure("fig2")
    outcomes.Result(figure, True, moments=reproduce.compute_moments(figure.moments)).save(tmp_path)
    page = tmp_path / "page.md"
    page.write_text(f"{claims.START}\nold\n{claims.END}\n", "utf-8")
    claims.main(str(page), str(tmp_path))
    assert figure.claims[0].words in page.read_text("utf-8")
