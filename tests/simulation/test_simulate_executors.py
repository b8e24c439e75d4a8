"""Sweeps in other processes: the same runs, whoever computes them, in whatever order they end."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import signal
import subprocess
import sys
from concurrent.futures import Executor, Future
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from sottovoce import Plan, simulate_many
from sottovoce.errors import DataError, InputError, RunError
from sottovoce.simulation import simulate
from sottovoce.simulation.simulate import RayExecutor, play_portion, simulate_each
from support.example_results import DIGITS
from support.processes import lives, until

SHORT = Plan(rounds={"schedule": "fixed", "rounds": 2})
PLANS = [SHORT, SHORT.replace("privacy.epsilon=1")]


class LateExecutor(Executor):
    """Computes when it is asked for the results, the newest task first; counts what it did."""

    def __init__(self, lost: Exception | None = None) -> None:
        self.lost, self.sizes, self.futures = lost, [], []

    def submit(self, function, /, *args, **kwargs):
        future: Future = Future()
        self.futures.insert(0, future)
        self.sizes.append(len(args[0]))
        if self.lost is not None:
            future.set_exception(self.lost)
        else:
            future.set_result(function(*args, **kwargs))
        return future


def list_models(runs):
    return [run.record["result"]["model_sha256"] for run in runs]


def test_an_executor_returns_the_runs_of_one_process_in_their_order():
    here = simulate_many(PLANS, seeds=[1, 2])
    spread = simulate_many(PLANS, seeds=[1, 2], on=LateExecutor())
    assert list_models(spread) == list_models(here)
    assert [run.record["seed"] for run in spread] == [1, 2, 1, 2]
    x, y = np.random.default_rng(0).random((60, 3)), np.arange(60) % 2
    arrays = SHORT.replace("data.clients=3", "data.samples=16", "model.name=softmax")
    given = {"data": (x, y), "seeds": [3]}
    assert list_models(simulate_many([arrays], **given, on=LateExecutor())) == list_models(
        simulate_many([arrays], **given)
    )


def test_a_worker_gets_one_run_or_as_many_as_an_accelerator_trains_together(monkeypatch):
    monkeypatch.setattr(simulate, "play_portion", lambda jobs, *_: jobs)
    for together, size, expected in ((None, 1, [1] * 6), (None, 4, [4, 2]), (True, 1, [6])):
        executor = LateExecutor()
        executor.together = size
        runs = dict(simulate_each(PLANS, seeds=[1, 2, 3], together=together, on=executor))
        assert executor.sizes == expected
        assert [runs[i] for i in range(6)] == [(plan, seed) for plan in PLANS for seed in (1, 2, 3)]


def test_errors_of_a_worker_are_the_errors_of_the_sweep(monkeypatch):
    with pytest.raises(RunError, match="MemoryError"):
        simulate_many([SHORT], seeds=[1], on=LateExecutor(MemoryError("it was killed")))
    missing = play_portion([(SHORT, 1)], None, None, None, "0.0.0")
    assert isinstance(missing, InputError)
    assert "install one version" in str(missing)

    def refuse(*_, **__):
        raise DataError("mnist is not there; fetch it")

    monkeypatch.setattr(simulate, "load_holdings", refuse)
    with pytest.raises(DataError, match="fetch it"):
        simulate_many([SHORT], seeds=[1], on=LateExecutor())


@pytest.mark.parametrize("together", [1, 4], ids=["one by one", "together"])
@pytest.mark.parametrize("where", ["here", "elsewhere"])
def test_a_run_that_fails_loses_none_that_others_finished(where, together, monkeypatch):
    """Nor the name of the error; whichever fails, those that ended come first."""
    ended, finish = set(), simulate._finish_run

    def fail_for_seed_2(i, run, *rest):
        if run.seed == 2:
            raise ValueError("a metric that cannot be")
        ended.add(run.seed)
        return finish(i, run, *rest)

    monkeypatch.setattr(simulate, "_finish_run", fail_for_seed_2)
    executor = LateExecutor() if where == "elsewhere" else None
    if executor is not None:
        executor.together = together
    how = {"seeds": [1, 2, 3, 4], "on": executor, "together": together > 1 or None}
    sort = RunError if executor is not None else ValueError
    yielded = []
    with pytest.raises(sort, match="a metric that cannot be"):
        yielded.extend(run.record["seed"] for _, run in simulate_each([SHORT], **how))
    assert set(yielded) == ended >= {1}
    with pytest.raises(sort, match="a metric that cannot be") as caught:
        simulate_many([SHORT], **how)
    found = {i: run.record["seed"] for i, run in caught.value.finished.items()}
    assert found == {seed - 1: seed for seed in ended}
    if executor is not None:  # the place in the user's code comes with it, also between processes
        assert "fail_for_seed_2" in "".join(pickle.loads(pickle.dumps(caught.value)).__notes__)


def test_a_sweep_that_is_left_cancels_what_has_not_begun():
    class Waiting(Executor):
        futures: list[Future] = []  # noqa: RUF012

        def submit(self, function, /, *args, **kwargs):
            self.futures.append(Future())
            return self.futures[-1]

    executor = Waiting()
    runs = simulate_each([SHORT], seeds=[1, 2, 3], on=executor)
    with pytest.MonkeyPatch.context() as patch:

        def interrupt() -> None:
            raise KeyboardInterrupt

        patch.setattr(simulate, "check_interrupts", interrupt)
        with pytest.raises(KeyboardInterrupt):
            next(runs)
    assert [future.cancelled() for future in executor.futures] == [True] * 3


def test_what_names_no_place_is_refused_in_one_sentence(monkeypatch):
    with pytest.raises(InputError, match="on must be ray, or ray:ADDRESS of a cluster, got 'dask'"):
        RayExecutor("dask")
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.setattr("sottovoce.runs.integrations.find_spec", lambda name: None)
    with pytest.raises(InputError, match=r"pip install 'sottovoce\[ray\]'"):
        RayExecutor("ray")


# A cluster of two workers on this machine

SWEEP = """
import json, sys
from pathlib import Path
from sottovoce import Plan, simulate_many
from sottovoce.simulation.simulate import open_executor
from sottovoce.studies.paper import reproduce
from sottovoce.studies.paper.definition import parse_figure

folder = Path(sys.argv[1])
figure = parse_figure(sys.stdin.read(), "digits")
plan = Plan(rounds={"schedule": "fixed", "rounds": 3})
try:
    with open_executor("ray") as executor:
        how = {"quick": True, "progress": lambda done, total: None}
        reproduce.run_missing([figure], folder=folder, on=executor, **how)
        spread = simulate_many([plan], seeds=[1, 2], on=executor)
except KeyboardInterrupt:
    sys.exit(130)
alone = simulate_many([plan], seeds=[1, 2])
(folder / "alone").mkdir()
reproduce.run_missing([figure], folder=folder / "alone", **how)
models = [[run.record["result"]["model_sha256"] for run in runs] for runs in (spread, alone)]
print(json.dumps([*models, spread[0].record["ran_on"]]))
"""

FIGURE = DIGITS.replace("[1, 2, 3]", "[30, 31, 32]")  # long enough to kill a worker


def list_children(pid):
    """Return every process below this one with its name."""
    children, found, below = {}, {}, [pid]
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            name = (folder / "cmdline").read_bytes().partition(b"\0")[0].decode()
        except OSError:  # it has ended
            continue
        children.setdefault(parent, []).append((int(folder.name), name))
    while below:
        for child, name in children.get(below.pop(), []):
            found[child] = name
            below.append(child)
    return found


def list_listeners(pids):
    """Return the addresses, in hexadecimal, on which these processes listen."""
    sockets = set()
    for pid in pids:
        for file in Path(f"/proc/{pid}/fd").glob("*"):
            with contextlib.suppress(OSError):
                sockets.add(str(file.readlink()))
    text = "".join(Path(f"/proc/net/{kind}").read_text() for kind in ("tcp", "tcp6"))
    lines = [line.split() for line in text.splitlines()]
    return {
        line[1].partition(":")[0]
        for line in lines
        if line[3] == "0A" and f"socket:[{line[9]}]" in sockets
    }


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="processes are found in /proc")
@pytest.mark.skipif(find_spec("ray") is None, reason="ray: pip install 'sottovoce[ray]' (240 MB)")
def test_a_sweep_on_ray_survives_a_killed_worker_and_ctrl_c(tmp_path):
    """Two workers on this machine; a worker is killed, then Ctrl-C, then the sweep is resumed."""

    (tmp_path / "figure.toml").write_text(FIGURE, "utf-8")

    def start():
        with (tmp_path / "figure.toml").open() as file:
            return subprocess.Popen(
                [sys.executable, "-c", SWEEP, str(tmp_path)],
                stdin=file,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                start_new_session=True,
                env=os.environ
                | {"RAY_ADDRESS": "", "JAX_COMPILATION_CACHE_DIR": str(tmp_path / "c")},
            )

    def read_journal(folder=tmp_path):
        text = (folder / "runs.jsonl").read_text("utf-8")
        return [json.loads(line) for line in text.splitlines()]

    def has_runs(count):
        exists = (tmp_path / "runs.jsonl").exists()
        return process.poll() is not None or (exists and len(read_journal()) >= count)

    def list_numbers(runs):
        return sorted(json.dumps(run | {"made": ""}) for run in runs)

    process = start()
    until(lambda: has_runs(1), 900)
    children = list_children(process.pid)
    loopback = {"0100007F", "0000000000000000FFFF00000100007F", "00000000000000000000000001000000"}
    listening = list_listeners(children)
    assert listening, process.poll() is not None and process.communicate()
    assert listening <= loopback
    busy = [pid for pid, name in children.items() if name == "ray::_call"]
    assert busy, children
    os.kill(busy[0], signal.SIGKILL)
    until(lambda: has_runs(6), 900)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does it
    _, errors = process.communicate(timeout=900)
    assert process.returncode == 130, errors
    until(lambda: not any(lives(pid) for pid in children), 900)
    before = read_journal()
    assert 6 <= len(before) < 24

    process = start()
    answer, errors = process.communicate(timeout=900)
    assert process.returncode == 0, errors
    spread, alone, place = json.loads(answer.splitlines()[-1])
    assert spread == alone
    assert "Ray node" in place
    after = read_journal()
    assert len(after) == 24  # each once, the killed worker's too
    assert after[: len(before)] == before
    assert list_numbers(after) == list_numbers(read_journal(tmp_path / "alone"))
