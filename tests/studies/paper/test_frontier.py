"""The frontier: what its list promises, that nothing is run twice, and that the page tells it."""

from __future__ import annotations

import json

import numpy as np
import pytest

from sottovoce.data import datasets
from sottovoce.data.federated import load_holdings
from sottovoce.errors import InputError, RunError
from sottovoce.plan import Plan
from sottovoce.studies.paper import frontier, outcomes, reproduce
from support import ROOT

pytestmark = pytest.mark.slow  # seconds of CPU in all; left out of the editing loop

RESULTS = ROOT / "results"


def cells():
    return [job.cell for job in frontier.list_jobs(quick=False) if job.fitted is None]


def list_wanted_seeds():
    jobs = frontier.list_jobs(quick=False)
    return {(job.cell.panel, job.cell.line, job.key): job.seeds for job in jobs}


def ours():
    return [cell for cell in cells() if cell.line.startswith("ours")]


def seeds_of(cell):
    return list_wanted_seeds()[cell.panel, cell.line, cell.key]


def kept(name):
    return json.loads((RESULTS / "bench" / f"{name}.json").read_text("utf-8"))


def test_our_curves_keep_the_promises_of_the_page():
    """Exact noise, the clients' own rows never public, no test row steers, five seeds."""
    assert ours()
    for cell in ours():
        plan, seeds = cell.plan, seeds_of(cell)
        assert len(seeds) >= 5
        chosen = {1, 2, 3, 4} if cell.panel == "census" else {97, 98, 99}
        assert chosen.isdisjoint(seeds)
        assert plan.privacy.calibration == "exact"
        assert plan.local.unit == "record"
        assert plan.server.signal == "public"
        assert plan.rounds.schedule == "fixed" or cell.panel == "census"  # no loss steers
        assert plan.server.choose is None
        assert plan.data.public is not None or cell.panel in ("four", "census")


def test_curves_of_sums_share_the_noise_of_forty_clients():
    """50 clients, h = 40, c = 5, five seeds that chose nothing, and the aims of the page."""
    sums = [cell for cell in cells() if cell.line == "sum"]
    assert {(cell.panel, cell.x) for cell in sums} == {
        (panel, epsilon)
        for panel in ("mnist", "cifar", "census")
        for epsilon in (0.25, 0.5, 1, 2, 4)
    }
    for cell in sums:
        privacy = cell.plan.privacy
        assert (privacy.view, privacy.honest, privacy.corrupt) == ("sum", 40, 5)
        assert (cell.plan.data.clients, cell.plan.rounds.schedule) == (50, "fixed")
        assert len(seeds_of(cell)) == 5
        assert {97, 98, 99}.isdisjoint(seeds_of(cell))
    points = frontier.read_points(RESULTS / "frontier")
    found = {(p.panel, p.asked): p.mean for p in points if p.curve == "sum"}
    assert found["mnist", 1.0] >= 0.978
    assert found["mnist", 0.25] >= 0.955


def test_rehearsed_settings_are_those_that_a_rehearsal_wrote():
    """Key by key, and told with seeds that did not choose."""
    names = {"mnist": "mnist", "cifar": "cifar10", "census": "acs"}
    plans = {(one["data"], one["epsilon"]): one["plan"] for one in kept("regret")}
    found = [cell for cell in cells() if cell.line == "rehearsed"]
    assert {(names[cell.panel], cell.x) for cell in found} == set(plans)
    for cell in found:
        assert cell.plan == Plan(**plans[names[cell.panel], cell.x])
        assert {1, 2, 3, 4}.isdisjoint(seeds_of(cell))
    census = [cell for cell in ours() if cell.panel == "census"]
    others = {one["epsilon"]: one["plan"] for one in kept("other_states")}
    assert {cell.x for cell in census} == set(others)
    assert all(cell.plan == Plan(**others[cell.x]) for cell in census)


def test_a_layer_fitted_in_the_open_is_the_best_there_is():
    """The slope of the objective is nought at what `fit` finds, and scores are its own."""
    random = np.random.default_rng(0)
    x, y = random.normal(size=(300, 4)), random.integers(0, 3, 300)
    layer = frontier.fit_layer(x, y, 3)
    rows = np.column_stack([x, np.ones(300)])
    chance = np.exp(rows @ layer)
    chance /= chance.sum(axis=1, keepdims=True)
    slope = rows.T @ (chance - np.eye(3)[y]) / 300
    slope[:-1] += frontier.PENALTY * layer[:-1]
    assert np.abs(slope).max() < 1e-4
    assert (frontier.predict_classes(layer, x) == np.argmax(chance, axis=1)).all()


def test_public_rows_alone_are_the_first_ones_and_no_clients():
    """Digits: with 500 public rows, those are fitted; without, those that steer are."""
    plan = Plan(data={"clients": 5, "samples": 100, "validation": 50})
    held, few = load_holdings(plan, seed=1), plan.replace("data.public=500")
    rows = held.validation
    wanted = np.mean(
        frontier.predict_classes(frontier.fit_layer(rows.x, rows.y, 10), held.test.x) == held.test.y
    )
    assert frontier.score_layer(plan, "public", 1) == pytest.approx(wanted)
    digits, test = datasets.load("digits"), load_holdings(few, seed=1).test
    layer = frontier.fit_layer(digits.train_x[:500], digits.train_y[:500], 10)
    wanted = np.mean(frontier.predict_classes(layer, test.x) == test.y)
    assert frontier.score_layer(few, "public", 1) == pytest.approx(wanted)
    assert frontier.score_layer(few, "clients", 1) != pytest.approx(wanted)


def test_the_papers_curves_share_the_runs_of_its_figures():
    known = outcomes.read_runs(RESULTS)
    shared = [
        cell for cell in cells() if cell.line in ("paper", "corrected") and cell.panel != "census"
    ]
    found = [cell for cell in shared if (cell.key, 1) in known]
    assert len(found) >= len(shared) / 2 > 0


@pytest.mark.slow
def test_the_quick_version_runs_once(tmp_path, monkeypatch):
    folder = reproduce.reproduce_study("frontier", quick=True, out=tmp_path, quiet=True)
    points = frontier.read_points(folder)
    assert len(points) == len(frontier.list_jobs(quick=True))
    assert all(0 <= point.mean <= 100 and point.spread == 0 for point in points)
    assert (folder / "frontier.md").read_text("utf-8") == frontier.format_table(points)
    assert "<svg" in (folder / "frontier.svg").read_text("utf-8")
    asked = []
    monkeypatch.setattr(reproduce, "train", lambda jobs, *rest, **how: asked.extend(jobs) or [])
    reproduce.reproduce_study("frontier", quick=True, out=tmp_path, quiet=True)
    assert asked == []
    assert frontier.read_points(folder) == points


def test_the_page_shows_the_measured_table():
    points = frontier.read_points(RESULTS / "frontier")
    table = frontier.format_table(points)
    assert (RESULTS / "frontier" / "frontier.md").read_text("utf-8") == table
    assert table in (ROOT / "docs" / "frontier.md").read_text("utf-8")
    found = {(point.panel, point.curve, point.key): point.seeds for point in points}
    assert found == list_wanted_seeds()


def test_an_epsilon_that_holds_is_never_printed_smaller_than_it_is():
    points = frontier.read_points(RESULTS / "frontier")
    for point in points:
        (line,) = frontier.format_table([point]).splitlines()[2:] or [None]
        if line is None or (shown := line.split(" | ")[2]) in ("none", "0, no client"):
            continue
        assert point.epsilon <= float(shown) <= point.epsilon * 1.01


def test_a_folder_without_a_frontier_says_so(tmp_path):
    with pytest.raises(RunError, match="holds no frontier"):
        frontier.read_points(tmp_path)
    (tmp_path / "frontier.json").write_text('{"schema": "other"}')
    with pytest.raises(RunError, match="is damaged"):
        frontier.read_points(tmp_path)


def test_the_example_is_a_point_of_it():
    plan = Plan.load(ROOT / "examples" / "hog_mnist.toml")
    assert plan.to_dict() in [cell.plan.to_dict() for cell in ours()]


def test_the_page_says_what_was_measured():
    part = (ROOT / "docs" / "frontier.md").read_text("utf-8").partition("\n| data |")[0]
    found = {
        (p.panel, p.curve, p.asked): p.mean for p in frontier.read_points(ROOT / "results/frontier")
    }
    told = [("corrected", 1), ("ours", 1), ("ours", 4)]
    means = [f"{found['mnist', curve, epsilon]:.1f} %" for curve, epsilon in told]
    assert [means[0] in part, means[1] in part, means[2] in part] == [True, True, True]


def test_the_frontier_is_named_alone():
    assert reproduce.format_listing().splitlines()[-3].endswith("every one of those above")
    with pytest.raises(InputError, match="frontier is made alone"):
        reproduce.choose_figures(["fig2", "frontier"])
