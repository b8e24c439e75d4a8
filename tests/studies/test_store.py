"""The results of many runs: a journal that survives a kill, and files of rows."""

from __future__ import annotations

import json

import pytest

from sottovoce.errors import RunError
from sottovoce.studies import store


def read(folder):
    return store.read_lines(folder, lambda line: line["seed"], "run it again")


@pytest.mark.parametrize("torn", ['{"se', '{"seed": 2, "key": "\u2028', "\ufffd"])
def test_a_line_that_a_kill_left_open_is_no_run_and_spoils_no_other(torn, tmp_path):
    assert read(tmp_path) == []
    store.append_line(tmp_path, {"seed": 1})
    with (tmp_path / store.JOURNAL).open("ab") as file:
        file.write(torn.encode()[:-1] if torn == "\ufffd" else torn.encode())
    assert read(tmp_path) == [1]
    for seed in (3, 4):
        store.append_line(tmp_path, {"seed": seed, "name": "a\u2028b"})
    assert read(tmp_path) == [1, 3, 4]


def test_a_line_that_is_no_run_is_refused_with_its_number(tmp_path):
    store.append_line(tmp_path, {"seed": 1})
    store.append_line(tmp_path, {})
    with pytest.raises(RunError, match=r"line 2 of .*runs.jsonl is no run; remove it and run it"):
        read(tmp_path)


def test_results_have_a_line_for_every_row(tmp_path):
    head, rows = {"schema": "a/1", "quick": True}, [{"x": 1.5}, {"x": "é"}]
    text = store.format_results(head, {"rows": rows, "more": []})
    assert json.loads(text) == {**head, "rows": rows, "more": []}
    assert '{"x": "é"}' in text.splitlines()
    path = tmp_path / "some.json"
    path.write_text(text, "utf-8")
    assert store.read_results(path, "a/1")["rows"] == rows
    assert store.read_results(path, "a/2") == {}
    path.write_text("[", "utf-8")
    with pytest.raises(RunError, match="cannot be read"):
        store.read_results(path, "a/1")
