"""The sum view under kill -9: at every message, at random, and over Flower.

At every message and 200 times at random, each answer is made by a process of its own with a real
vault. Flower adds only the start of its processes; `SUM_KILLS` of them are killed there (40), in
batches that each leave a row in results/trust/sum_view.json.
"""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

import pytest

from sottovoce.client.sum_protocol import choose_threshold
from sottovoce.client.vault import Vault, resume
from sottovoce.errors import SottovoceError
from sottovoce.runs import checkpoint
from support.federate_command import Command, nodes_of, record_of, running
from support.processes import lives, until
from support.sum_kills import MOMENTS, STEPS, WRITING, killed_side_by_side

CLIENTS, HONEST, CORRUPT, ROUNDS = 5, 2, 1, 10
THRESHOLD = choose_threshold(CLIENTS, HONEST, CORRUPT)
KILLS, BATCH = int(os.environ.get("SUM_KILLS", "40")), 20  # a batch has federations of its own
KEPT = Path(__file__).resolve().parents[1] / "results" / "trust" / "sum_view.json"
DEADLINE = 30  # seconds that a message waits for a client that was killed
VICTIMS = {
    "a worker": ("sottovoce.flower.worker", 0.6),
    "a SuperNode": ("flower-supernode", 0.25),
    "the server's worker": ("sottovoce.flower.server_worker", 0.08),
    "the SuperLink": ("flower-superlink", 0.03),
    "the command": ("", 0.04),
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


@pytest.mark.parametrize("batch", range(-(-KILLS // BATCH)))
def test_a_federation_over_flower_killed_at_random(tmp_path, record_property, batch):
    """Whoever is killed, and however often the run is resumed: the books of all clients hold."""
    wanted, rng = min(BATCH, KILLS - batch * BATCH), random.Random(batch)
    kills, runs, lives_led, void = Counter[str](), 0, 0, 0
    while sum(kills.values()) < wanted:
        out, spent, code = tmp_path / f"run-{runs}", dict[str, int](), 1
        words = ["--out", out, "--clients", CLIENTS, "--deadline", DEADLINE]
        for word in (f"privacy.honest={HONEST}", f"privacy.corrupt={CORRUPT}"):
            words += ["--set", word]
        words += ["--set", 'privacy.view="sum"', "--set", f"rounds.rounds={ROUNDS}"]
        for life in range(3 * wanted):
            log = tmp_path / f"log-{runs}-{life}"
            command = Command(log, *words) if life == 0 else Command(log, "--resume", "--out", out)
            try:
                kills += _kill_some(command, out, rng, wanted - sum(kills.values()), life)
                code = _await_end(command, out)
            finally:
                command.stop()
            assert until(lambda held=command: not any(map(lives, held.seen)), 900)
            _hold_books(out, spent)
            lives_led += 1
            print(f"batch {batch}, run {runs}, life {life}: code {code}, {dict(kills)}", flush=True)
            if code == 0 or _has_finished(out):  # the command may be killed after the run's end
                break
        record = record_of(out)
        assert record["status"] == "finished"
        uploads = [entry["uploads"] for entry in record["rounds"] if "uploads" in entry]
        assert all(count == 0 or count >= HONEST + CORRUPT for count in uploads)
        void += uploads.count(0)
        runs += 1
    _keep({"batch": batch, "kills": dict(sorted(kills.items())), "lives": lives_led,
           "runs": runs, "void_rounds": void})  # fmt: skip
    record_property("size", f"{sum(kills.values())} kills, {lives_led} lives")


def _keep(row):
    """Leave what a batch was in results/trust, whatever becomes of the next one."""
    rows = json.loads(KEPT.read_text("utf-8")) if KEPT.exists() else []
    rows = [*(earlier for earlier in rows if earlier["batch"] != row["batch"]), row]
    KEPT.write_text(json.dumps(sorted(rows, key=lambda r: r["batch"]), indent=1) + "\n", "utf-8")


def _kill_some(command, out, rng, most, life):
    """Kill processes of a federation at random until the command ends, or so often.

    Most lives are spared until they have closed a round, so that kills meet rounds and not starts.
    """
    kills, names, chances = Counter(), list(VICTIMS), [chance for _, chance in VICTIMS.values()]
    before = _count_rounds(out)
    if life == 0 or rng.random() < 0.7:  # before a run's first round there is nothing to resume
        until(lambda: _count_rounds(out) > before or command.process.poll() is not None, 900.0)
    while command.process.poll() is None and sum(kills.values()) < most:
        time.sleep(rng.choice((0.3, 10.0, 40.0)) * rng.random())  # together, or messages apart
        who = rng.choices(names, chances)[0]
        word = VICTIMS[who][0]
        found = running(command.below(), word) if word else [command.process.pid]
        if not found or command.process.poll() is not None:
            continue
        with suppress(ProcessLookupError):
            os.kill(rng.choice(found), signal.SIGKILL)
            kills[who] += 1
    return kills


def _has_finished(out):
    return (out / "record.json").exists() and not (out / checkpoint.NAME).exists()


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
    """Nothing is overspent or taken back; a round has one input and one note of each client a step.

    Of one round no two sets are signed by as many clients as an unmasking needs.
    """
    signed = Counter()
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
        signed.update(
            (f["run"], f["t"], f["content"])
            for kind, f in lines
            if kind == "note" and f["step"] == "set"
        )
    unmasked = [key[:2] for key, count in signed.items() if count >= THRESHOLD]
    assert len(set(unmasked)) == len(unmasked)
