"""Real federations at length: ten nodes, a server killed, clients that drop out, five million.

And the two ways in that no other test goes: a PyTorch model, and `flwr run` with our own app.
"""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from sottovoce.client.vault import Vault
from sottovoce.errors import FederationError
from sottovoce.flower import federate, local
from sottovoce.flower.federate import load_plan
from support.devices import books_hold
from support.federate_command import Command, answers_of, nodes_of, record_of, running
from support.federations import replayed, same
from support.processes import lives, until

EXAMPLE = Path(__file__).parent.parent / "examples" / "torch_cnn"


def federation(top, *words, out="run"):
    return Command(top / f"{out}.log", "--out", top / out, "--keep-uploads", *words)


def settled(command, out, *, rounds):
    """What must hold at the end of any run: the model is its uploads', nothing was overspent."""
    record = record_of(out)
    assert (record["status"], record["result"]["rounds_used"]) == ("finished", rounds)
    models = replayed(out)
    with np.load(out / "model.npz") as stored:
        assert same(models[max(models)], {name: stored[name] for name in stored.files})
    kept = [blob for node in nodes_of(out) for blob in answers_of(node).values()]
    assert all(path.read_bytes() in kept for path in (out / "uploads").iterdir())
    assert [pid for pid in command.seen if lives(pid)] == []
    return record


@pytest.fixture
def started():
    commands = []
    yield commands
    for command in commands:
        command.stop()


def test_ten_nodes_and_a_server_that_is_killed_and_resumed(tmp_path, started, record_property):
    """kill -9 of the ServerApp, then of the whole command: nobody pays twice for what it stored."""
    rounds, out = 6, tmp_path / "run"
    record_property("size", "10 nodes, 2 kills")
    first = federation(tmp_path, "--clients", 10, "--set", f"rounds.rounds={rounds}")
    started.append(first)
    first.until_round(2, 300)
    os.kill(int((out / "server.lock").read_text()), signal.SIGKILL)
    assert first.end(300) == 1
    assert "--resume" in first.log.read_text()
    assert [pid for pid in first.seen if lives(pid)] == []
    before = {node.name: answers_of(node) for node in nodes_of(out)}
    second = Command(tmp_path / "second.log", "--resume", "--out", out)
    started.append(second)
    second.until_round(2, 300)
    second.process.kill()
    assert second.end(120) == -signal.SIGKILL
    assert until(lambda: not any(map(lives, second.seen)), 120)  # the keeper is left to tidy up
    third = Command(tmp_path / "third.log", "--resume", "--out", out)
    started.append(third)
    assert third.end(300) == 0, third.log.read_text()
    record = settled(third, out, rounds=rounds)
    assert len(record["clients"]) == 10
    for node in nodes_of(out):
        held = books_hold(node)
        assert all(held.answers[key] == blob for key, blob in before[node.name].items())
        with Vault.open(node.vault, dataset=None) as vault:
            entries = [(entry.run, entry.t) for entry in vault.entries()]
            lines = [entry.seq for entry in vault.entries()]
            stored = {vault.find_answered_reserve(*key) for key in entries}
        assert len({run for run, _ in entries}) == 1
        assert len(set(entries)) <= rounds
        # Only a step that was cut short is paid for again: at most one a kill, and never stored.
        cut = [line for line in lines if line not in stored]
        assert len(entries) - len(set(entries)) <= len(cut) <= 2


def test_thirty_percent_drop_out(tmp_path, started, record_property):
    """In every round three of ten SuperNodes are killed: each round closes with the others."""
    rounds, out, rng = 6, tmp_path / "run", random.Random(1)
    record_property("size", "10 nodes, 3 killed a round")
    command = federation(
        tmp_path, "--clients", 10, "--minimum", 5, "--set", f"rounds.rounds={rounds}"
    )
    started.append(command)
    for done in range(1, rounds):
        command.until_round(done, 300)
        alive = running(command.below(), "flower-supernode")
        for pid in rng.sample(alive, min(3, len(alive))):
            os.kill(pid, signal.SIGKILL)
        time.sleep(0.5)
    assert command.end(600) == 0, command.log.read_text()
    record = settled(command, out, rounds=rounds)
    uploads = [entry["uploads"] for entry in record["rounds"]]
    assert uploads[0] == 10
    assert min(uploads) >= 5
    assert sum(uploads) < 10 * rounds  # the kills were felt
    lost = [entry["refused"] for entry in record["rounds"] if "refused" in entry]
    assert lost
    assert all(set(why) <= {"silent"} for why in lost), json.dumps(lost)


def test_a_model_of_five_million_parameters(tmp_path, started, record_property):
    rounds, out = 3, tmp_path / "run"
    command = federation(
        tmp_path, "--set", "model.hidden=66666", "--set", f"rounds.rounds={rounds}"
    )
    started.append(command)
    assert command.end(900) == 0, command.log.read_text()
    record = settled(command, out, rounds=rounds)
    assert record["model"]["parameters"] == 75 * 66_666 + 10
    assert [entry["uploads"] for entry in record["rounds"]] == [3] * rounds
    pace = record["timing"]["seconds_per_round"]
    record_property("size", f"4,999,960 parameters, {pace:.0f} s a round")


def test_a_pytorch_model_in_a_federation(tmp_path, started, record_property):
    """The example as it is shipped, for two rounds."""
    rounds, out = 2, tmp_path / "run"
    record_property("size", "the example, 3 nodes, 2 rounds")
    command = federation(tmp_path, EXAMPLE / "plan.toml", "--set", f"rounds.rounds={rounds}")
    started.append(command)
    assert command.end(600) == 0, command.log.read_text()
    record = settled(command, out, rounds=rounds)
    assert record["plan"]["model"]["own"] == f"{EXAMPLE / 'net.py'}:model"
    assert [entry["uploads"] for entry in record["rounds"]] == [3] * rounds


def test_flwr_run_of_our_own_app_stopped_and_resumed(tmp_path, record_property):
    """`flwr run`, `flwr stop` and `flwr run … resume=true`, as between machines."""
    rounds, out = 8, tmp_path / "run"
    record_property("size", "3 nodes, 1 stop")
    files = federate.deal(load_plan(None, [f"rounds.rounds={rounds}"], None), out)
    nodes = [str(path.resolve()) for path in files]
    where = f"plan='{out}/plan.toml' public='{out}/public.npz' out='{out}' clients=3 "
    with local.start_federation(tmp_path / "flower", nodes) as running:

        def flwr(*words):
            tool = str(Path(sys.executable).parent / "flwr")
            return subprocess.run(
                [tool, *map(str, words)],
                env=running.environment("superlink"),
                capture_output=True,
                text=True,
                timeout=900,
            ).stdout

        def run(more):
            said = flwr("run", local.APP, local.CONNECTION, "--run-config", where + more)
            return int(re.search(r"started run (\d+)", said).group(1))

        with pytest.raises(FederationError, match="deadline must be seconds above 0"):
            running.wait(run("deadline=0"), seconds=120)
        assert all(books_hold(node).spent == 0 for node in nodes_of(out))
        first = run("deadline=120 keep-uploads=true")
        assert until(lambda: len(list((out / "uploads").glob("00001-*"))) == 3, 120)
        flwr("stop", first, local.CONNECTION)
        assert until(lambda: (out / "record.json").exists(), 60)
        assert record_of(out)["status"] == "interrupted"
        done = record_of(out)["result"]["rounds_used"]
        assert 1 <= done < rounds
        before = {node.name: answers_of(node) for node in nodes_of(out)}
        running.wait(run("deadline=120 keep-uploads=true resume=true"), seconds=300)
    record = settled(SimpleNamespace(seen=[]), out, rounds=rounds)
    assert "insecure-transport" not in record["guarantee"]["not_covered"]
    for node in nodes_of(out):
        held = books_hold(node)
        assert len(held.answers) == rounds
        assert all(held.answers[key] == blob for key, blob in before[node.name].items())
