"""How settings were chosen goes with the plan: into the record, onto the card, off when changed."""

from __future__ import annotations

import html
import os

import pytest

from sottovoce import Plan, simulate
from sottovoce.reports import render_report
from sottovoce.reports.progress import summarize_run
from sottovoce.studies.rehearsal.rehearsing import describe_provenance, relocate_plan
from sottovoce.studies.rehearsal.standin import announce_federation, make_stand_in
from support.example_record import example

TEXT = 'local.clip by sottovoce rehearse on "rows.npz" <b>; cost in privacy: none'


def test_a_record_keeps_it_and_card_and_summary_show_it(tmp_path):
    plan = Plan(rehearsed=TEXT, rounds={"schedule": "fixed", "rounds": 1})
    done = simulate(plan, seed=1)
    assert done.record["plan"]["rehearsed"] == TEXT
    shown = render_report(done.record)
    assert "<b>" not in shown
    assert f"as the plan says: {TEXT}" in html.unescape(shown)
    assert TEXT in " ".join(summarize_run(done.record, tmp_path, tmp_path / "p").split())


def test_plans_and_records_without_it_are_as_before(tmp_path):
    assert "rehearsed" not in Plan().to_dict()
    assert "rehearsed" not in Plan().to_toml()
    assert "as the plan says" not in render_report(example()[0])


def test_a_plan_keeps_it_on_disk_and_loses_it_when_a_setting_is_changed():
    text = Plan(rehearsed=TEXT).to_toml()
    assert Plan.from_toml(text).rehearsed == TEXT
    for change, kept in (
        ("privacy.epsilon=1", True),
        ("data.clients=7", True),
        ("local.clip=1.0", True),  # as it was
        ("local.clip=3", False),
        ("rounds.rounds=7", False),
        ("model.name=softmax", False),
        ("server.decay=linear", False),
    ):
        assert (Plan.from_toml(text, [change]).rehearsed == TEXT) is kept, change
    assert Plan(rehearsed=TEXT).replace(rehearsed=None) == Plan()


@pytest.mark.parametrize("public", [None, "digits"])
def test_it_says_what_stood_in_and_what_that_cost(public):
    plan = Plan(data={"name": "mnist", "clients": 5, "samples": 60})
    rows = make_stand_in(plan, announce_federation(plan), public)
    told = describe_provenance(rows, ["model", "local.clip"], 45)
    assert told.startswith("model, local.clip")
    for part in (rows.fingerprint(), "45 federations", "cost in privacy: none"):
        assert part in told
    assert ("drawn anew" in told) is (public is None)
    assert Plan(rehearsed=told).rehearsed == told


def test_a_plan_that_is_written_elsewhere_keeps_it(tmp_path):
    """Files are named anew from where the plan will lie: no setting has changed."""
    plan = Plan(rehearsed=TEXT, model={"name": "custom", "own": "net.py:model"})
    there = relocate_plan(plan, tmp_path)
    assert there.model.own != plan.model.own
    assert there.rehearsed == TEXT
    for network in ("onnx:net.onnx", "torch:net.py:net"):
        plan = Plan(rehearsed=TEXT, model={"name": "softmax", "features": network})
        (tmp_path / "plan.toml").write_text(relocate_plan(plan, tmp_path).to_toml(), "utf-8")
        there = Plan.load(tmp_path / "plan.toml")
        kind, _, file = there.model.features.partition(":")
        assert f"{kind}:{os.path.relpath(file)}" == network
        assert there.rehearsed == TEXT
