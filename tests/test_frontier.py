"""The frontier: what its list promises, that nothing is run twice, and that the page tells it."""

from __future__ import annotations

from pathlib import Path

import pytest

from sottovoce.errors import InputError, RunError
from sottovoce.experiments import frontier, frontier_page, outcomes, reproduce, runner
from sottovoce.plan import Plan

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "results"


def ours():
    return [cell for cell in frontier.cells(quick=False) if cell.line.startswith("ours")]


def test_our_curves_keep_the_promises_of_the_page():
    """Exact noise, the clients' own rows never public, no test row steers, five seeds."""
    assert len(frontier.seeds(quick=False)) >= 5
    assert {97, 98, 99}.isdisjoint(frontier.seeds(quick=False))  # where settings were chosen
    assert ours()
    for cell in ours():
        plan = cell.plan
        assert plan.privacy.calibration == "exact"
        assert plan.local.unit == "record"
        assert plan.server.signal == "public"
        assert plan.rounds.schedule == "fixed" or cell.panel == "census"  # no loss steers
        assert plan.server.choose is None
        assert plan.data.public is not None or cell.panel == "four"


def test_the_papers_curves_share_the_runs_of_its_figures():
    known = outcomes.known(RESULTS)
    shared = [cell for cell in frontier.cells(quick=False) if not cell.line.startswith("ours")]
    found = [cell for cell in shared if (cell.key, 1) in known]
    assert len(found) >= len(shared) / 2 > 0


@pytest.mark.slow
def test_the_quick_version_runs_once(tmp_path, monkeypatch):
    folder = reproduce.reproduce_frontier(quick=True, out=tmp_path, quiet=True)
    points = frontier.load(folder)
    assert len(points) == len(frontier.cells(quick=True))
    assert all(0 <= point.mean <= 1 and point.spread == 0 for point in points)
    assert (folder / "frontier.md").read_text("utf-8") == frontier_page.table(points)
    assert "<svg" in (folder / "frontier.svg").read_text("utf-8")
    asked = []
    monkeypatch.setattr(runner, "train", lambda jobs, *rest: asked.extend(jobs) or [])
    reproduce.reproduce_frontier(quick=True, out=tmp_path, quiet=True)
    assert asked == []
    assert frontier.load(folder) == points


def test_the_page_shows_the_measured_table():
    points = frontier.load(RESULTS / "frontier")
    table = frontier_page.table(points)
    assert (RESULTS / "frontier" / "frontier.md").read_text("utf-8") == table
    assert table in (ROOT / "docs" / "frontier.md").read_text("utf-8")
    wanted = {(cell.key, cell.panel, cell.line) for cell in frontier.cells(quick=False)}
    assert {(point.key, point.panel, point.curve) for point in points} == wanted


def test_an_epsilon_that_holds_is_never_printed_smaller_than_it_is():
    points = frontier.load(RESULTS / "frontier")
    for point in points:
        (line,) = frontier_page.table([point]).splitlines()[2:] or [None]
        if line is None or (shown := line.split(" | ")[2]) == "none":
            continue
        assert point.epsilon <= float(shown) <= point.epsilon * 1.01


def test_a_folder_without_a_frontier_says_so(tmp_path):
    with pytest.raises(RunError, match="holds no frontier"):
        frontier.load(tmp_path)
    (tmp_path / "frontier.json").write_text('{"schema": "other"}')
    with pytest.raises(RunError, match="cannot be read"):
        frontier.load(tmp_path)


def test_the_example_is_a_point_of_it():
    plan = Plan.load(ROOT / "examples" / "hog_mnist.toml")
    assert plan.to_dict() in [cell.plan.to_dict() for cell in ours()]


def test_readme_says_what_was_measured():
    readme = (ROOT / "README.md").read_text("utf-8")
    part = readme.partition("## More from the same budget")[2].partition("## What you can")[0]
    found = {(p.panel, p.curve, p.asked): p.mean for p in frontier.load(ROOT / "results/frontier")}
    told = [("corrected", 1), ("ours", 1), ("ours", 4)]
    means = [f"{100 * found['mnist', curve, epsilon]:.1f} %" for curve, epsilon in told]
    assert [means[0] in part, means[1] in part, means[2] in part] == [True, True, True]


def test_the_frontier_is_named_alone():
    assert reproduce.listing().splitlines()[-2].endswith("every one of those above")
    with pytest.raises(InputError, match="frontier is made alone"):
        reproduce.chosen(["fig2", "frontier"])
