"""One run over several devices: the same books, the same model up to rounding, a share of the work.

All cases run in one process that has four virtual CPU devices.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

SCRIPT = """
import json, sys
from pathlib import Path
import jax, numpy as np
from sottovoce import Plan, simulate, simulate_many
from sottovoce.server.federation import build
from sottovoce.simulation import accelerator, compiled, streamed
from sottovoce.simulation.simulate import start_run

compiled.LEAST_ROWS, streamed.BLOCK_BYTES = 100, 4 * 6 * 100
COUNTS = [int(word) for word in sys.argv[2:]]
real, rng = jax.devices, np.random.default_rng(0)
fixed = {"schedule": "fixed", "rounds": 3}
rows = rng.normal(size=(1001, 6)).astype(np.float32)
labels = rng.integers(0, 3, 1001).astype(np.int32)
np.save(Path(sys.argv[1]) / "x.npy", rows)
mapped = np.load(Path(sys.argv[1]) / "x.npy", mmap_mode="r")
table = Plan(data={"clients": 7, "samples": 110}, model={"name": "softmax"}, rounds=fixed)
signal = table.replace(**{"server.signal": "clients", "server.loss_bound": 3.0,
    "rounds.schedule": "discounted"})
digits, few = Plan(rounds=fixed), Plan(rounds=fixed | {"per_round": 4})
steps = Plan(rounds=fixed, local={"steps": 2})
measured = digits.replace(**{"metric": "auroc", "data.validation": 5, "data.test": 201})
pictures = Plan(rounds=fixed, model={"name": "cnn"})
KEYS = ("t", "horizon", "next_horizon", "cohort", "sigma")
ahead = build(digits, seed=3)


def play_ahead():
    run = start_run(ahead, 3)
    list(accelerator.play_ahead(ahead.model, [run], most=2))
    books = [{key: entry[key] for key in KEYS} for entry in run.state.rounds]
    return [(books, run.params, "")]


def describe(runs):
    found = []
    for run in runs:
        record = run.record
        books = [{key: entry[key] for key in KEYS} for entry in record["rounds"]]
        found.append(([books, record["clients"]], run.params, record["ran_on"]))
    return found


cases = {
    "digits": lambda: describe([simulate(digits, seed=1)]),
    "cohort": lambda: describe([simulate(few, seed=1)]),
    "measured": lambda: describe([simulate(measured, seed=1)]),
    "pictures": lambda: describe([simulate(pictures, seed=1)]),
    "clients": lambda: describe([simulate(signal, data=(rows, labels), seed=2)]),
    "ahead": play_ahead,
    "together": lambda: describe(simulate_many([digits, digits.replace("privacy.epsilon=1")],
        seeds=[1, 2], together=True)),
    "streamed": lambda: describe([simulate(table, data=(mapped, labels), seed=1)]),
    "steps": lambda: describe([simulate(steps, seed=1)]),
}
told = {}
for name, play in cases.items():
    by_count = {}
    for count in (1, *COUNTS):
        jax.devices = lambda *words, count=count: real(*words)[:count]
        by_count[count] = play()
    one = by_count[1]
    for count in COUNTS:
        apart = [
            max(float(np.max(np.abs(np.asarray(a) - np.asarray(b)))) for a, b in
                zip(jax.tree.leaves(first[1]), jax.tree.leaves(other[1]), strict=True))
            for first, other in zip(one, by_count[count], strict=True)]
        same = [first[0] == other[0] for first, other in zip(one, by_count[count], strict=True)]
        told[f"{name} {count}"] = [all(same), max(apart), by_count[count][0][2]]

jax.devices = real
costs = {}
for count in (1, 2, 4):
    jax.devices = lambda *words, count=count: real(*words)[:count]
    run = start_run(build(digits, seed=1), 1)
    engine = compiled.CompiledEngine(run.federation.model, [run])
    opened, launched = engine.prepare_rounds([0]), []
    play = compiled._play_packed

    def note(*words, **how):
        launched.append((words, how))
        return play(*words, **how)

    compiled._play_packed = note
    engine.begin_rounds(opened)
    compiled._play_packed = play
    (words, how), = launched
    program = play.lower(*words, **how).compile()
    costs[count] = [program.cost_analysis()["flops"], program.as_text().count(" all-reduce(")]
print(json.dumps([told, costs]))
"""


def play_cases(folder, *counts):
    """All cases on one device and on so many, in a process that has four."""
    flags = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=4"
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(folder), *map(str, counts)],
        env=os.environ | {"XLA_FLAGS": flags},
        capture_output=True,
        text=True,
        check=False,
        timeout=1200,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    return play_cases(tmp_path_factory.mktemp("rows"), 4)


CASES = ("digits", "cohort", "measured", "pictures", "clients", "ahead", "together", "streamed")


def hold_together(told, count):
    for name in CASES:
        is_same, apart, place = told[0][f"{name} {count}"]
        assert is_same, name
        assert apart < 1e-6, name  # float32, weights of order 1: sums in another order
        assert place in ("", f"{count} × {place.rpartition('× ')[2]}"), name
    # With several local steps a round goes client by client, on one device.
    is_same, apart, place = told[0][f"steps {count}"]
    assert (is_same, apart) == (True, 0.0)
    assert "×" not in place


@pytest.mark.slow
def test_books_are_equal_and_models_equal_to_rounding(told):
    hold_together(told, 4)


@pytest.mark.slow
@pytest.mark.trust
def test_books_are_equal_on_two_devices_too(tmp_path):
    hold_together(play_cases(tmp_path, 2), 2)


@pytest.mark.slow
def test_a_device_does_its_share_of_the_work_and_sums_once_a_round(told):
    """On a CPU there is a second, short sum: of the scores. The noise is every device's own."""
    flops = {int(count): numbers[0] for count, numbers in told[1].items()}
    assert [numbers[1] for numbers in told[1].values()] == [0, 2, 2]  # all-reduces
    shared = flops[1] - 2 * (flops[1] - flops[2])  # what is not divided, from one and two devices
    assert flops[4] == pytest.approx(shared + (flops[1] - shared) / 4, rel=0.02)
    assert shared < 0.06 * flops[1]
