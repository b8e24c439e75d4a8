"""What a notebook shows of a run: a line, a card, a history, a plot, the page, a bar."""

from __future__ import annotations

import html
import io
import re

import matplotlib as mpl
import pytest

from sottovoce import reports
from sottovoce.plan import Plan
from sottovoce.reports import progress
from sottovoce.simulation.simulate import simulate
from support import ROOT

PLAN = Plan(rounds={"rounds": 5})


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return simulate(PLAN, seed=1, out=tmp_path_factory.mktemp("run"))


def test_a_run_prints_as_a_line(run):
    text = repr(run)
    assert len(text) < 400
    assert "\n" not in text
    assert text.startswith("<Trained: finished, ")
    assert "5 rounds of 5, simulated noise" in text
    assert run.record["result"]["headline"]["text"] in text


def test_the_card_has_headline_guarantee_curve_and_page(run):
    card = run._repr_html_()
    assert card.count("<svg") == 1
    assert html.escape(run.guarantee, quote=False) in html.unescape(card).replace("&", "&amp;")
    assert "report.html" not in card
    page = reports.write_report(run.folder)
    assert f'href="{page.resolve().as_uri()}"' in run._repr_html_()


def test_texts_of_a_record_are_escaped_in_the_card(run):
    bad = '<script>alert("x")</script>'
    record = run.record | {"guarantee": run.record["guarantee"] | {"text": bad}}
    assert "<script" not in reports.run.render_card(record)


def test_the_history_is_a_data_frame_of_the_rounds(run):
    history, rounds = run.history, run.record["rounds"]
    assert history.shape[0] == len(rounds)
    assert history["validation_loss"].to_list() == [r["validation_loss"] for r in rounds]
    assert history["sigma_median"].to_list() == [r["sigma"]["median"] for r in rounds]
    columns = history.to_dict(as_series=False)  # what `pandas.DataFrame` takes, without pyarrow
    assert columns["t"] == [r["t"] for r in rounds]
    assert {type(column) for column in columns.values()} == {list}
    documented = (ROOT / "docs" / "python.md").read_text("utf-8")
    assert "pandas.DataFrame(run.history.to_dict(as_series=False))" in documented


def test_the_plot_draws_what_the_record_has(run):
    mpl.use("agg")
    loss, accuracy = run.plot()
    entries = [run.record["initial"], *run.record["rounds"]]
    drawn = loss.lines[0].get_ydata().tolist()
    assert drawn == [entry["validation_loss"] for entry in entries]
    assert accuracy.get_ylabel() == "validation accuracy"
    mpl.pyplot.close("all")


def test_the_report_is_the_page_in_a_frame(run):
    page = run.report()
    assert page == reports.write_report(run.folder).read_text("utf-8")
    frame = page._repr_html_()
    assert html.unescape(re.search('srcdoc="([^"]*)"', frame).group(1)) == page
    assert "<html" in simulate(PLAN.replace("rounds.rounds=1"), seed=1).report()


def test_metrics_by_name(run):
    assert run.metrics["accuracy"] == pytest.approx(run.accuracy)


def test_a_bar_follows_the_rounds_and_ends(monkeypatch):
    from rich import progress as rich_progress
    from rich.console import Console

    out, bars = io.StringIO(), []

    class Bar(rich_progress.Progress):
        def __init__(self):
            super().__init__(console=Console(file=out, force_terminal=True, width=100))
            bars.append(self)

    monkeypatch.setattr(rich_progress, "Progress", Bar)
    simulate(PLAN, seed=1, progress=True)
    [bar] = bars
    assert bar.finished
    assert not bar.live.is_started
    assert "round 5 of 5" in out.getvalue()
    simulate(PLAN.replace("rounds.rounds=1"), seed=1)
    assert len(bars) == 1  # a script shows none unless it is asked for
    assert not progress.is_notebook()
