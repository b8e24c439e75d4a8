"""What `make test` does with fewer runs, seeds or optimisations: here it is whole."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from sottovoce import Plan, rehearse
from sottovoce.studies.paper.definition import list_figures
from support.command_line import run_command

ROOT = Path(__file__).parent.parent


def tell_without_times(found) -> dict:
    """Return a rehearsal as JSON; the time that its runs took is their own."""
    told = found.to_json()
    for run in told["runs"]:
        del run["seconds"]
    return told


def test_a_rehearsal_stopped_after_one_run_goes_on_to_the_same_plan(tmp_path, record_property):
    """`make test` resumes after 40 runs of a journal that it did not have to run."""
    columns = {"age": [0, 99], "sex": ["f", "m"], "job": ["a", "b", "c"], "rich": ["no", "yes"]}
    table = {"path": "people.csv", "label": "rich", "columns": columns, "clients": 5, "samples": 60}
    plan = Plan(data=table, model={"name": "softmax"}, privacy={"epsilon": 4, "delta": 1e-3})
    settings = {"runs": 45, "keep": ("rounds.schedule", "server")}

    def stop(trials) -> None:
        if trials.ran == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        rehearse(plan, **settings, out=tmp_path / "stopped", on_trial=stop)
    found = rehearse(plan, **settings, out=tmp_path / "stopped", resume=True)
    whole = rehearse(plan, **settings, out=tmp_path / "whole")
    assert tell_without_times(found) == tell_without_times(whole)
    record_property("size", f"{len(whole.trials)} runs, all but one resumed")


def test_every_figure_runs_quickly_with_all_its_seeds(tmp_path, record_property):
    """`reproduce all --quick` as a user runs it; `make test` takes one seed of its two."""
    if not os.environ.get("SOTTOVOCE_DATA"):
        pytest.skip("SOTTOVOCE_DATA is not set: MNIST, CIFAR-10 and ACS are needed")
    out = tmp_path / "quick"
    done = run_command("reproduce", "all", "--quick", "--out", str(out), draw=True)
    assert done.returncode == 0, done.stderr
    for name in list_figures():
        assert (out / f"{name}.json").exists()
    record_property("size", f"{len(list_figures())} figures")


def run_tests(*words: str) -> str:
    """Run tests of the suite, compiled as users compile, and return how many passed."""
    command = [sys.executable, "-m", "pytest", "-q", "-n", "2", "--dist", "worksteal", *words]
    plain = {"JAX_DISABLE_MOST_OPTIMIZATIONS": "0", "XLA_FLAGS": ""}
    done = subprocess.run(command, cwd=ROOT, env=os.environ | plain, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:]
    return done.stdout.splitlines()[-1].partition(" in ")[0]


def test_the_suite_passes_with_what_xla_optimises_and_make_test_leaves_out(record_property):
    """`make test` compiles without most optimisations, and leaves out what is marked `trust`."""
    record_property("size", run_tests("tests"))
