"""Every text of a page is text, in every template; what the code draws is the only markup."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import pytest

import sottovoce
from sottovoce.reports import charts, pages, render_report, watch
from sottovoce.studies.audit import findings
from sottovoce.studies.paper import outcomes, page
from support import example_audit, example_record, example_results
from support.hostile_values import assert_escaped


def test_a_template_that_escapes_nothing_is_noticed(monkeypatch):
    real = pages.load_templates.__wrapped__

    def load_unescaped():
        templates = real()
        templates.autoescape = False
        return templates

    load_unescaped.__wrapped__ = load_unescaped
    monkeypatch.setattr(pages, "load_templates", load_unescaped)
    record = example_record.example(clients=2, stop_after=0)
    with pytest.raises(AssertionError):
        assert_escaped(lambda: render_report(*record))


def test_the_page_of_a_run_shows_texts_as_texts():
    record = example_record.example(clients=2, stop_after=2, measured=True)
    assert_escaped(lambda: render_report(*record))


@pytest.mark.slow
def test_the_page_of_figures_shows_texts_as_texts():
    made = (example_results.result(name) for name in ("fig2", "fig3", "fig11", "calibrations"))
    judged = [outcomes.judge_figure(json.loads(one.text())) for one in made]
    assert_escaped(lambda: page.render_figures(judged))


@pytest.mark.slow
def test_the_page_of_an_audit_shows_texts_as_texts():
    found = example_audit.example()
    drawn = findings.draw_figures(found)
    assert_escaped(lambda: findings.render_audit(found, drawn))


@pytest.mark.parametrize("kind", watch.PAGES)
def test_the_pages_of_watch_show_texts_as_texts(kind, tmp_path):
    record, _ = example_record.example(rounds=3, measured=True)
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "record.json").write_text(json.dumps(record), "utf-8")
        lines = [json.dumps(entry) + "\n" for entry in record["rounds"]]
        (tmp_path / name / "rounds.jsonl").write_text("".join(lines), "utf-8")
    followed, query = watch.WatchPages(tmp_path, "t"), {"name": ["one"]}
    assert_escaped(lambda: followed.render(kind, query))


def test_only_what_the_code_writes_becomes_markup():
    """`Markup(…)` of anything but a literal text is in `charts`, which escapes what it is given."""
    found = set()
    for path in Path(sottovoce.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "Markup":
                (text,) = node.args
                literal = isinstance(text, ast.Constant)
                found |= set() if literal else {path.name}
    assert found == {Path(charts.__file__).name}
