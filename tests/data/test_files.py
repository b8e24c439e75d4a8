"""The hold on a run's folder: one process at a time, ended by the system with its process."""

from __future__ import annotations

import fcntl
import subprocess
import sys

import pytest

from sottovoce.data import files
from sottovoce.errors import RunError
from sottovoce.plan import Plan
from sottovoce.simulation.simulate import resume, simulate

HOLDER = """
import sys, time
from pathlib import Path
from sottovoce.data.files import hold_folder
with hold_folder(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(900)
"""


def test_a_hold_ends_with_its_process(tmp_path, monkeypatch):
    folder = tmp_path / "run"
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(folder)], stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        assert files.is_held(folder) is True
        monkeypatch.setattr(files, "HOLD_SECONDS", 0.1)
        with pytest.raises(RunError, match="goes on in another process"), files.hold_folder(folder):
            pass
        other.kill()
    assert files.is_held(folder) is False
    with files.hold_folder(folder):
        assert files.is_held(folder) is True
    assert not any(folder.iterdir())


def test_where_the_system_has_no_lock_a_run_goes_on_and_nobody_knows(tmp_path, monkeypatch):
    def fail(*_: object) -> None:
        raise OSError("no locks available")

    monkeypatch.setattr(fcntl, "flock", fail)
    with files.hold_folder(tmp_path):
        assert files.is_held(tmp_path) is None
    monkeypatch.setitem(sys.modules, "fcntl", None)
    with files.hold_folder(tmp_path):
        assert files.is_held(tmp_path) is None


def test_a_run_is_held_while_it_is_played_and_refused_to_a_second_process(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "HOLD_SECONDS", 0.1)
    held = []

    def stop(done: object) -> None:
        held.append(files.is_held(tmp_path / "run"))
        with pytest.raises(RunError, match="goes on in another process"):
            resume(tmp_path / "run")
        raise KeyboardInterrupt

    plan = Plan(rounds={"schedule": "fixed", "rounds": 2})
    with pytest.raises(KeyboardInterrupt):
        simulate(plan, seed=1, out=tmp_path / "run", on_round=stop)
    assert held == [True]
    assert files.is_held(tmp_path / "run") is False
    assert resume(tmp_path / "run").rounds_used == 2
