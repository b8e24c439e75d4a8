"""The files of a run: one process at a time in a folder, and systems that are not POSIX."""

from __future__ import annotations

import fcntl
import json
import subprocess
import sys

import numpy as np
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


@pytest.mark.parametrize("stop", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_what_cannot_be_written_whole_leaves_nothing_behind(tmp_path, monkeypatch, stop):
    """Half a checkpoint would take the room that the next one needs."""
    path = tmp_path / "checkpoint.npz"
    files.write_file(path, b"old")

    def fail(descriptor):
        raise stop

    monkeypatch.setattr(files.os, "fsync", fail)
    with pytest.raises(type(stop)):
        files.write_file(path, b"new")
    assert [(file.name, file.read_bytes()) for file in tmp_path.iterdir()] == [(path.name, b"old")]


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


# What Windows has not. Other packages are loaded first: they have code for each system.
FOREIGN = """
import os, select, signal, sys
import jax, jinja2, matplotlib.backends.backend_svg, optax, polars, rich.live, typer
for name in ("fcntl", "grp", "pwd", "resource", "termios"):
    sys.modules[name] = None
absent = {
    os: "O_CLOEXEC O_DIRECTORY O_NOFOLLOW O_NONBLOCK chown fchmod fchown fork geteuid getuid "
    "killpg posix_fallocate sched_getaffinity setsid statvfs sysconf",
    select: "epoll poll",
    signal: "SIGALRM SIGCHLD SIGHUP SIGKILL SIGQUIT SIGUSR1 alarm pthread_sigmask setitimer",
}
for module, names in absent.items():
    for name in names.split():
        module.__dict__.pop(name, None)
open_file = os.open
def open_no_folder(path, *more, **options):
    if not isinstance(path, int) and os.path.isdir(path):
        raise PermissionError(13, "Permission denied", path)
    return open_file(path, *more, **options)
os.open = open_no_folder
from sottovoce.cli.commands import main
for words in sys.argv[1].splitlines():
    sys.argv[1:] = words.split()
    try:
        main()
    except SystemExit as end:
        print("code", end.code, flush=True)
"""
COMMANDS = """calibrate
train --seed 1 --quiet --out run --set rounds.rounds=2 --set rounds.schedule=fixed
predict run x.npy
report run
ledger show a.vault
federate --out other
node init a --server here:9000 --ca ca.crt"""


@pytest.mark.slow
def test_train_predict_report_and_calibrate_need_no_call_of_posix(tmp_path):
    np.save(tmp_path / "x.npy", np.zeros((2, 64)))
    done = subprocess.run(
        [sys.executable, "-c", FOREIGN, COMMANDS],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=900,
    )
    codes = [line for line in done.stdout.splitlines() if line.startswith("code ")]
    assert codes == ["code 0"] * 4 + ["code 2"] * 3, done.stderr
    here = simulate(Plan.load(None, ["rounds.schedule=fixed", "rounds.rounds=2"]), seed=1)
    record = json.loads((tmp_path / "run" / "record.json").read_text("utf-8"))
    assert record["result"]["model_sha256"] == here.record["result"]["model_sha256"]
    lines = done.stderr.splitlines()
    assert len(lines) == 3
    assert all("a vault needs the file locks" in line for line in lines)
