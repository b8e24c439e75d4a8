"""The page of a rehearsal in a real browser: surfaces drawn, nothing fetched, nothing overflowing.

The accuracies are a formula: the page is what is tested here, and it is whole.
"""

from __future__ import annotations

import math

import pytest

from sottovoce import Plan
from sottovoce.studies.rehearsal import rehearsing
from sottovoce.studies.rehearsal.rehearsing import Rehearsal, predict_run, render_rehearsal
from sottovoce.studies.rehearsal.search import Trial, Trials, choose_seeds, search_settings
from sottovoce.studies.rehearsal.space import RATE, ROUNDS, build_space
from sottovoce.studies.rehearsal.standin import announce_federation, make_stand_in
from support.browser import WIDTHS, browser, legible, measured, requests, self_contained

__all__ = ["browser"]  # the fixture
pytestmark = pytest.mark.slow  # left out of the editing loop


class Formula(Trials):
    """Trials of which the accuracy is a formula: no federation is run."""

    def _run_missing(self, stage, missing, must) -> None:
        for where, own in missing.items():
            away = math.log2(own[ROUNDS] / 50) ** 2 + math.log2(own[RATE] / 3) ** 2
            accuracy = 0.9 * math.exp(-away / 60) + 0.001 * (where[1] % 3)
            trial = Trial(stage, dict(own), where[1], 1 - accuracy, accuracy, accuracy, 9, 0.1)
            self._store_trial(trial)


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """The page of a made-up rehearsal of MNIST, with a name that would be markup."""
    plan = Plan(data={"name": "mnist", "clients": 50, "samples": 800})
    rows = make_stand_in(plan, announce_federation(plan))
    space = build_space(plan)
    trials = Formula(space, plan, rows, limit=120)
    found = search_settings(space, trials)
    trials.run_fresh_seeds(found.setting, choose_seeds(0)[1])
    done = trials.list_trials()
    result = Rehearsal(
        plan=space.apply_setting(found.setting),
        given=plan,
        space=space,
        setting=found.setting,
        rows=rows,
        factor=4.0,
        prediction=predict_run(done[-5:], 4000, 10_000),
        reasons=rehearsing.explain_choices(space, found.setting, done, found.seeds)
        | {"local.clip": "<script>alert(1)</script>"},
        theory={
            "smoothness": 1.0,
            "curvature": 0.01,
            "gap": 2.3,
            "divergence": 0.0,
            "learning_rate": 1.0,
            "dimension": 3930,
            "best_rounds": 12,
        },
        trials=tuple(done),
        seeds=found.seeds,
        complete=found.complete,
        seed=0,
    )
    path = tmp_path_factory.mktemp("page") / "report.html"
    path.write_text(render_rehearsal(result), "utf-8")
    return path


def test_the_browser_shows_surfaces_and_choice_without_complaint(browser, page, tmp_path):
    self_contained(browser, page, tmp_path / "profile", drawings=2)
    assert "<script" not in page.read_text("utf-8")
    assert requests(browser, page, tmp_path / "other") == ["/report.html"]


def test_nothing_overflows_and_letters_stay_legible(browser, page, tmp_path):
    legible(browser, page, tmp_path / "profile", narrow=7, wide=8.5)
    opened = [width for _, _, width, _, _ in measured(browser, page, tmp_path / "other")]
    assert all(o <= width for o, width in zip(opened, WIDTHS, strict=True))  # tables unfolded
