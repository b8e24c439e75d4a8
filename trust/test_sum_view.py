"""The sum view under kill -9: at every message, at random, and over Flower.

At every message and 200 times at random, each answer is made by a process of its own with a real
vault. Flower adds only the start of its processes; `SUM_KILLS` of them are killed there (40).
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections import Counter
from contextlib import suppress

from sottovoce.client.vault import Vault, resume
from sottovoce.errors import SottovoceError
from support.federate_command import Command, nodes_of, record_of, running
from support.processes import lives, until
from support.sum_kills import MOMENTS, STEPS, WRITING, killed_side_by_side

ROUNDS, HONEST, CORRUPT = 25, 2, 1
VICTIMS = {
    "a worker": ("sottovoce.flower.worker", 0.55),
    "a SuperNode": ("flower-supernode", 0.3),
    "the server's worker": ("sottovoce.flower.server_worker", 0.1),
    "the command": ("", 0.05),
}


def test_clients_and_server_killed_at_every_moment_of_every_message(record_property):
    seen = killed_side_by_side([(0, 1, step) for step in STEPS])
    assert seen["wrong"] == {}, seen
    counted = seen["counted"]
    for who in ("client", "server"):
        for step in STEPS:
            for moment in MOMENTS if step in WRITING or who == "server" else ("before", "after"):
                assert counted.get(f"{who}, {step}, {moment}", 0) >= 1, (who, step, moment)
    record_property("size", f"{counted['killed']} kills")


def test_clients_and_server_killed_at_random(record_property):
    seen = killed_side_by_side([(25, seed) for seed in range(2, 10)])
    assert seen["wrong"] == {}, seen
    assert seen["counted"]["killed"] >= 200
    record_property("size", f"{seen['counted']['killed']} kills")


def test_a_federation_over_flower_killed_at_random(tmp_path, record_property):
    """Whoever is killed, and however often the run is resumed: the books of all clients hold."""
    wanted, rng = int(os.environ.get("SUM_KILLS", "40")), random.Random(3)
    kills, finished, spent = Counter[str](), 0, dict[str, int]()
    while sum(kills.values()) < wanted:
        out = tmp_path / f"run-{finished}"
        words = ["--out", out, "--clients", 5, "--deadline", 60]
        for key in (f"honest={HONEST}", f"corrupt={CORRUPT}", 'view="sum"'):
            words += ["--set", f"privacy.{key}"]
        code, again = 1, 0
        while code != 0:
            if again > 60:
                raise AssertionError((out.name, kills))
            resumed = ["--resume", "--out", out]
            command = Command(
                tmp_path / f"log-{finished}-{again}",
                *(resumed if again else [*words, "--set", f"rounds.rounds={ROUNDS}"]),
            )
            try:
                kills += _kill_some(command, out, rng, wanted - sum(kills.values()))
                code = _await_end(command, out)
            finally:
                command.stop()
            assert until(lambda held=command: not any(map(lives, held.seen)), 900)
            _hold_books(out, spent)
            again += 1
        record = record_of(out)
        assert record["status"] == "finished"
        whole = [entry["uploads"] for entry in record["rounds"] if "uploads" in entry]
        assert all(count == 0 or count >= HONEST + CORRUPT for count in whole)
        finished += 1
    told = ", ".join(f"{count} of {who}" for who, count in sorted(kills.items()))
    print(f"\n{sum(kills.values())} kills ({told}), {finished} runs")
    record_property("size", f"{sum(kills.values())} kills over Flower")


def _kill_some(command, out, rng, most):
    """Kill processes of a federation at random until the command ends, or so often.

    The first kill waits for a round, so that every resumed run comes further.
    """
    kills, names, chances = Counter(), list(VICTIMS), [chance for _, chance in VICTIMS.values()]
    before = _count_rounds(out)
    until(lambda: _count_rounds(out) > before or command.process.poll() is not None, 900.0)
    while command.process.poll() is None and sum(kills.values()) < most:
        time.sleep(rng.uniform(0.2, 4.0))
        who = rng.choices(names, chances)[0]
        word = VICTIMS[who][0]
        found = running(command.below(), word) if word else [command.process.pid]
        if not found or command.process.poll() is not None:
            continue
        with suppress(ProcessLookupError):
            os.kill(rng.choice(found), signal.SIGKILL)
            kills[who] += 1
    return kills


def _count_rounds(out):
    written = out / "rounds.jsonl"
    return written.read_text("utf-8").count("\n") if written.exists() else 0


def _await_end(command, out):
    """The exit code; as long as rounds go on it is waited for, however busy the machine is."""
    while command.process.poll() is None:
        seen = _count_rounds(out)

        def moved(seen=seen):
            command.below()  # notes its processes
            return _count_rounds(out) > seen or command.process.poll() is not None

        assert until(moved, 900), command.log.read_text()
    return command.end()


def _hold_books(out, spent):
    """Nothing is overspent or taken back, and a round has one input, one set, one cohort."""
    for node in nodes_of(out):
        with suppress(SottovoceError):  # two debits in a row were burnt: its operator's word
            resume(node.vault)
        with Vault.open(node.vault, dataset=None, wait=60.0) as vault:
            assert vault.spent <= vault.limit
            assert vault.spent <= vault.alone <= min(HONEST * vault.spent, vault.limit_alone)
            assert vault.spent >= spent.get(str(node.vault), 0)
            spent[str(node.vault)] = vault.spent
            lines = [(line.kind, line.facts) for line in vault.lines()]
        stored = [(f["run"], f["t"]) for kind, f in lines if kind == "store"]
        noted = [(f["run"], f["t"], f["step"]) for kind, f in lines if kind == "note"]
        assert len(set(stored)) == len(stored)
        assert len(set(noted)) == len(noted)
