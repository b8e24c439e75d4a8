"""The study of horizons: the same everything but the rule, regret by hand, panels that merge."""

from __future__ import annotations

import shutil

import numpy as np
import pytest

from sottovoce.errors import DataError, InputError
from sottovoce.studies.paper import horizon, outcomes, reproduce
from sottovoce.studies.paper.outcomes import Outcome, flatten_plan
from support import ROOT

# Accuracy by rule and ε of a stand-in: the best fixed T of ε = 1 is 50, of 16 it is 400.
TOLD = {"25": (0.60, 0.70), "50": (0.64, 0.72), "100": (0.61, 0.74), "200": (0.5, 0.76),
        "400": (0.4, 0.8), "smoothed": (0.62, 0.61), "forecast": (0.65, 0.79)}  # fmt: skip


def stand_in(jobs, folder, count=None):
    """Tell accuracies instead of training; `count` gets the number of jobs."""
    if count is not None:
        count.append(len(jobs))
    for cell, seed, _ in jobs:
        low, high = TOLD[cell.line]
        accuracy = low if cell.x == 1 else high
        told = Outcome(loss=1.0, accuracy=accuracy, validation=1.0, rounds=33,
                       epsilon=float(cell.x), delta=1e-3, made="by hand")  # fmt: skip
        outcomes.append_run(folder, cell.key, seed, told)
    return []


def test_only_rule_steps_and_budget_differ_within_a_panel():
    """The same averaging on all sides, exact noise, public rows that steer, T₀ = 400 for rules."""
    for name, panel in horizon.load_tables("horizon")["panel"].items():
        cells = list(horizon.list_cells(name, quick=False))
        assert len(cells) == len(panel["steps"]) * 5 * 7
        assert len({cell.key for cell in cells}) == len(cells)
        free = ("rounds.", "local.learning_rate", "local.clip", "privacy.epsilon")
        rest = [{k: v for k, v in flatten_plan(cell.plan.to_dict()).items()
                 if not k.startswith(free)} for cell in cells]  # fmt: skip
        assert all(keys == rest[0] for keys in rest)
        assert rest[0]["server.average"] == "exponential"
        assert rest[0]["privacy.calibration"] == "exact"
        assert rest[0]["server.signal"] == "public"
        for cell in cells:
            assert cell.plan.rounds.rounds == (int(cell.line) if cell.line.isdecimal() else 400)


def test_regret_is_the_best_fixed_mean_less_the_rules(tmp_path):
    found = horizon.reproduce(quick=False, only=["digits"], out=tmp_path, train=stand_in)
    cells = horizon.gather_cells(found["digits"])
    first, last = cells[0], cells[4]
    assert (first.epsilon, last.epsilon, first.step) == (1, 16, (2.0, 1.0))
    assert first.rules[horizon.BEST].rule == "50"
    assert last.rules[horizon.BEST].rule == "400"
    assert first.regret("smoothed") == pytest.approx(2.0)
    assert first.regret("forecast") == pytest.approx(-1.0)
    assert horizon.find_falls(cells, "smoothed") == pytest.approx(1.0)
    assert horizon.find_falls(cells, "forecast") == 0
    table = (tmp_path / "horizon" / "horizon.md").read_text("utf-8")
    assert (
        "| digits, mlp, 10 × 143 | forecast | +0.6 ± 0.0 | +1.0 ± 0.0 | +0.6 | +1.0 | +0.0 |"
        in table
    )
    assert "| 2, 1 | 1 | 64.0 (50) | -2.0 (33) | +1.0 (33) |" in table
    assert (tmp_path / "horizon" / "horizon.svg").read_text("utf-8").startswith("<?xml")


def test_the_honest_reference_gains_nothing_from_a_choice_among_equals():
    """Of runs that differ by luck alone the best mean lies above the truth, the other does not."""
    rng, found = np.random.default_rng(0), []
    for _ in range(400):
        luck = rng.normal(0.7, 0.05, (5, 5))
        found.append((100 * luck.mean(axis=1).max(), horizon.choose_on_other_seeds(luck.tolist())))
    best, elsewhere = np.mean(found, axis=0)  # standard errors below 0.15
    assert best > 70 + 2
    assert abs(elsewhere - 70) < 0.6


def test_a_fall_within_the_spread_of_the_seeds_does_not_count():
    def make_cell(epsilon, *accuracy):
        point = horizon.RulePoint((1, 1), epsilon, "25", "", (1, 2), accuracy, (25, 25), ("", ""))
        return horizon.RuleCell((1, 1), epsilon, {"25": point}, 0.0)

    wide, narrow = make_cell(1, 0.5, 0.6), make_cell(2, 0.52, 0.52)
    assert horizon.find_falls([wide, narrow], "25") == 0
    assert horizon.find_falls([make_cell(1, 0.6, 0.6), narrow], "25") == pytest.approx(8)


def test_panels_made_elsewhere_are_merged_by_copying_and_not_run_again(tmp_path):
    for name in ("digits", "labels"):
        horizon.reproduce(quick=False, only=[name], out=tmp_path / name, train=stand_in)
    both = tmp_path / "digits" / "horizon"
    shutil.copy(tmp_path / "labels" / "horizon" / "labels.json", both)
    count: list[int] = []

    def train(jobs, folder):
        return stand_in(jobs, folder, count)

    found = horizon.reproduce(
        quick=False, only=["digits", "labels"], out=tmp_path / "digits", train=train
    )
    assert list(found) == ["digits", "labels"]
    assert count == [0, 0]
    assert "two labels a client" in (both / "horizon.md").read_text("utf-8")


def test_what_is_missing_or_unknown_is_said(tmp_path):
    with pytest.raises(InputError, match="one of digits, adult"):
        horizon.reproduce(quick=False, only=["fig2"], out=tmp_path, train=stand_in)
    with pytest.raises(DataError, match="horizon is not complete: no rows"):
        horizon.reproduce(
            quick=False, only=["mnist"], out=tmp_path, train=lambda jobs, folder: ["no rows"]
        )
    with pytest.raises(InputError, match="horizon is made alone"):
        reproduce.choose_figures(["horizon", "fig2"])


def test_the_page_shows_the_measured_table():
    """What is stored was made by today's plans; the page has the regret of each panel."""
    panels = horizon.read_panels(ROOT / "results" / "horizon")
    assert {"digits", "adult", "acs"} <= panels.keys()
    for name, points in panels.items():
        wanted = {cell.key for cell in horizon.list_cells(name, quick=False)}
        assert {point.key for point in points} == wanted
    table = horizon.format_tables(panels)
    assert (ROOT / "results" / "horizon" / "horizon.md").read_text("utf-8") == table
    assert table.split("\n\n")[0] in (ROOT / "docs" / "horizon.md").read_text("utf-8")


@pytest.mark.slow
def test_the_quick_version_trains(tmp_path):
    folder = reproduce.reproduce_study("horizon", quick=True, out=tmp_path, quiet=True)
    points = horizon.read_panels(folder)["digits"]
    assert {point.rule for point in points} == {"2", "4", "smoothed", "forecast"}
