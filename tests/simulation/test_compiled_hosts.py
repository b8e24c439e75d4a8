"""One run over several hosts: real processes that `jax.distributed` joins on this machine."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys

import numpy as np
import pytest

SCRIPT = """
import json, sys
from pathlib import Path
import jax, numpy as np
rank, count, port, folder = *map(int, sys.argv[1:4]), Path(sys.argv[4])
if count > 1:
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"127.0.0.1:{port}", count, rank)
from sottovoce import Plan, resume, simulate
from sottovoce.errors import SottovoceError
from sottovoce.simulation import compiled

compiled.LEAST_ROWS = 200
KEYS = ("t", "horizon", "next_horizon", "cohort", "sigma")
fixed = {"schedule": "fixed", "rounds": 3}
digits = Plan(rounds=fixed)
rows, labels = np.load(folder / "x.npy", mmap_mode="r"), np.load(folder / "y.npy")
table = Plan(data={"clients": 7, "samples": 110}, model={"name": "softmax"}, rounds=fixed)


def stop(done):
    if done.t == 1:
        raise KeyboardInterrupt


def stop_and_resume():
    out = folder / f"stopped-{count}"
    try:
        simulate(digits, seed=1, out=out, on_round=stop)
    except KeyboardInterrupt:
        pass
    return resume(out)


def refuse(**changes):
    try:
        simulate(digits.replace(**changes.pop("plan", {})), **{"seed": 1, **changes})
    except SottovoceError as error:
        return str(error)


cases = {
    "digits": lambda: simulate(digits, seed=1, out=folder / f"run-{count}"),
    "resumed": stop_and_resume,
    "streamed": lambda: simulate(table, data=(rows, labels), seed=1),
    "steps": lambda: simulate(Plan(rounds=fixed, local={"steps": 2}), seed=1),
}
told = {}
for name, play in cases.items():
    run = play()
    record = run.record
    books = [{key: entry[key] for key in KEYS} for entry in record["rounds"]]
    model = [np.ravel(leaf).tolist() for leaf in jax.tree.leaves(run.params)]
    told[name] = [[books, record["clients"]], sum(model, []), record["ran_on"]]
if count > 1:
    told["refused"] = [
        refuse(seed=rank),
        refuse(plan={"privacy.epsilon": 1 + rank}),
        refuse(plan={"noise": "secure"}, seed=None),
    ]
(folder / f"told-{count}-{rank}.json").write_text(json.dumps(told))
"""


def find_free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def play_on_hosts(folder, count):
    """Play all cases in so many processes of two devices, or in one of one device."""
    flags = os.environ.get("XLA_FLAGS", "")
    flags += f" --xla_force_host_platform_device_count={min(count, 2)}"
    words = [str(count), str(find_free_port()), str(folder)]
    started = [
        subprocess.Popen(
            [sys.executable, "-c", SCRIPT, str(rank), *words],
            env=os.environ | {"XLA_FLAGS": flags},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(count)
    ]
    try:
        ended = [(process.communicate(timeout=900)[1], process.returncode) for process in started]
    finally:
        for process in started:
            process.kill()
            process.wait()
    assert [code for _, code in ended] == [0] * count, "\n".join(text for text, _ in ended)
    return [json.loads((folder / f"told-{count}-{rank}.json").read_text()) for rank in range(count)]


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    folder, random = tmp_path_factory.mktemp("hosts"), np.random.default_rng(0)
    np.save(folder / "x.npy", random.normal(size=(1001, 6)).astype(np.float32))
    np.save(folder / "y.npy", random.integers(0, 3, 1001).astype(np.int32))
    return folder, play_on_hosts(folder, 1)[0], play_on_hosts(folder, 2)


@pytest.mark.slow
def test_books_are_equal_and_models_equal_to_rounding(told):
    _, alone, hosts = told
    for name, (books, model, place) in alone.items():
        for host in hosts:
            assert host[name][0] == books, name
            assert host[name][1] == hosts[0][name][1], name  # bit for bit
            assert host[name][1] == pytest.approx(model, abs=1e-6), name
            is_divided = name in ("digits", "resumed")
            assert host[name][2] == (f"4 × {place}" if is_divided else place)


@pytest.mark.slow
def test_the_first_process_alone_writes_the_run(told):
    folder, _, _ = told
    alone, hosts = (
        sorted(path.name for path in (folder / f"run-{count}").iterdir()) for count in (1, 2)
    )
    assert alone == hosts
    lines = (folder / "run-2" / "rounds.jsonl").read_text().splitlines()
    assert len(lines) == len((folder / "run-1" / "rounds.jsonl").read_text().splitlines())


@pytest.mark.slow
def test_processes_that_would_play_different_runs_are_refused(told):
    _, _, hosts = told
    for host in hosts:
        by_seed, by_plan, secure = host["refused"]
        assert "different values of seed and data;" in by_seed  # which deals the rows
        assert "different values of plan;" in by_plan
        assert "noise = secure is drawn by one process, and jax.distributed has 2" in secure
