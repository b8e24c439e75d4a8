"""`make mutants` goes on where it was stopped, tells the score, and takes likely killers first."""

from __future__ import annotations

import json
import sys
import threading
from pathlib import Path

from mutants import mutant_score
from mutants.mutant_plugin import PRIVACY, rank
from mutants.mutant_score import Found
from mutants.privacy_mutants import MUTANTS
from support import TESTS


def test_privacy_files_near_the_bug_come_first():
    files = sorted(TESTS.rglob("test_*.py"), key=lambda file: rank(file, "vault.rebinding"))
    names = [file.relative_to(TESTS).as_posix() for file in files]
    assert {"client/vault/test_vault.py", "crash/test_vault.py"} <= set(names[:5])
    assert set(names[: len(PRIVACY)]) == PRIVACY  # and so every one of them exists
    first = min(files, key=lambda file: rank(file, "privacy.tank"))
    assert first.name == "test_tank.py"


def _main(monkeypatch, out: Path, *words: str) -> int:
    monkeypatch.setattr(mutant_score, "STOPPED", threading.Event())
    monkeypatch.setattr(sys, "argv", ["mutant_score.py", "--out", str(out), "--jobs", "1", *words])
    return mutant_score.main()


def test_a_run_that_was_stopped_goes_on(tmp_path, monkeypatch, capsys):
    """Each mutant is judged once; a change of the sources begins anew."""
    out, judged, most = tmp_path / "found.json", [], [2]

    def judge(mutant, running, *, named, tests):
        if len(judged) == most[0]:
            raise KeyboardInterrupt
        judged.append(mutant.name)
        return Found("killed", mutant.killer, 0, (), 1.0)

    monkeypatch.setattr(mutant_score, "judged", judge)
    assert _main(monkeypatch, out) == 130
    known = set(json.loads(out.read_text("utf-8"))["found"]) if out.exists() else set()
    assert known <= set(judged)
    judged.clear()
    most[0] = len(MUTANTS)
    assert _main(monkeypatch, out) == 0
    assert set(judged) == {mutant.name for mutant in MUTANTS} - known
    said = capsys.readouterr().out
    assert f"{len(MUTANTS)} of {len(MUTANTS)} privacy mutants killed" in said
    assert "about 0 min left" in said
    judged.clear()
    assert _main(monkeypatch, out) == 0
    assert judged == []
    assert f"{len(MUTANTS)} of {len(MUTANTS)} are known" in capsys.readouterr().out
    assert _main(monkeypatch, out, "--suite", "--only", "restore") == 0  # another question
    assert len(judged) > 1


def test_survivors_are_named_with_what_noticed_them(tmp_path, monkeypatch, capsys):
    found = Found("survived", "", 9, ("tests/reports/test_run.py::test_a_figure",), 1.0)
    monkeypatch.setattr(mutant_score, "judged", lambda *_, **__: found)
    assert _main(monkeypatch, tmp_path / "found.json", "--only", "twins") == 1
    said = capsys.readouterr().out
    assert "0 of 1 privacy mutants killed" in said
    assert "survived: a fingerprint that forgets twins (client.vault.chain)" in said
    assert "noticed by tests/reports/test_run.py::test_a_figure" in said
