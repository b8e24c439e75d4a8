"""Hostile parties and faults in a deployment as docs/deploy.md prints it: what became of each.

    python trust/table.py trust/test_hostile.py                       all of it, an hour
    python trust/table.py trust/test_hostile.py -k "not throughout"   the attacks alone
    SOTTOVOCE_MINUTES=5 python trust/table.py trust/test_hostile.py -k throughout

A server, its clients and a stranger have machines of their own (Linux namespaces, so root is
needed): nginx, SuperLink, ServerApp, SuperNodes and workers are real processes, started from the
units that the page makes. Each attack is a run of its own with the honest clients; one clients'
machine, mallory's, is the hostile one. Every test leaves its row in results/trust/hostile.json and
the table of docs/threat-model.md.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import time
from collections import Counter
from contextlib import contextmanager
from pathlib import Path

import pytest

from sottovoce.flower import deploy
from support.deployment import DOOR, NODE, SERVER, deployed, until
from support.devices import books_hold
from support.federate_command import Command, nodes_of, record_of
from support.hostile_device import LIES
from support.machines import forget_peak, missing

ROOT = Path(__file__).resolve().parents[1]
KEPT, PAGE = ROOT / "results" / "trust" / "hostile.json", ROOT / "docs" / "threat-model.md"
MINUTES = float(os.environ.get("SOTTOVOCE_MINUTES", "30"))
# MB that the SuperLink and the ServerApp (with the process it was forked from) stay below here.
BOUNDS = {"sottovoce-superlink": 600, "sottovoce-server": 1200}
BAD, ROUNDS, LONGEST = "mallory", 6, 1000
HONEST = ("ward-3", "ward-5", "ward-7")
TEN = (*HONEST, "ward-8", "ward-9", "ward-10", "ward-11", "ward-12", "ward-13")
PLAN = "/srv/sottovoce/study/longer.toml"
TESTS = Path(__file__).resolve().parents[1] / "tests"

needs_machines = pytest.mark.skipif(missing() is not None, reason=str(missing()))


# What is kept, and the page


def keep(row):
    """Put a row into the file (in the place of the one it had) and make the page's table anew."""
    rows = json.loads(KEPT.read_text("utf-8")) if KEPT.exists() else []
    places = [at for at, old in enumerate(rows) if old["tries"] == row["tries"]]
    rows[places[0] if places else len(rows) :] = [row, *(rows[places[0] + 1 :] if places else [])]
    KEPT.parent.mkdir(parents=True, exist_ok=True)
    KEPT.write_text(json.dumps(rows, indent=1, ensure_ascii=False) + "\n", "utf-8")
    PAGE.write_text(made_anew(PAGE.read_text("utf-8")), "utf-8")


def table(rows):
    """The table of docs/threat-model.md."""
    lines = [
        "| party or fault | does | what became of it | honest rounds closed | most spent | MB |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        rounds = f"{row['closed']} of {row['rounds']}, {row['seconds_a_round']:.1f} s each"
        spent = f"{row['spent']:.3f} of {row['capacity']:.3f}"
        memory = f"{row['superlink_mb']} + {row['server_mb']}" if row["server_mb"] else "—"
        lines.append(f"| {row['who']} | {row['tries']} | {row['became']} | {rounds} | {spent} "
                     f"| {memory} |")  # fmt: skip
    return "\n".join(lines) + "\n"


def made_anew(text):
    """The page with the table of what was measured."""
    begin, end = "<!-- deployment: begin -->\n", "<!-- deployment: end -->"
    before, found, rest = text.partition(begin)
    _, closed, after = rest.partition(end)
    assert found, f"{PAGE.name} has no {begin}"
    assert closed, f"{PAGE.name} has no {end}"
    return before + begin + table(json.loads(KEPT.read_text("utf-8"))) + end + after


# One run, watched


def ledger(ward, name):
    """What a client's vault says of itself: μ² spent, and what it is worth."""
    state = f"/var/lib/{name}/state"
    told = ward.run("sottovoce", "ledger", "show", f"/srv/{name}/{name}.vault", "--json",
                    user=name, SOTTOVOCE_STATE=state).stdout  # fmt: skip
    return json.loads(told)


def honest(it):
    return {name: ward for name, ward in it.wards.items() if name != BAD}


def key_of(ward, name):
    """The fingerprint of a client's key."""
    return ward.run("ssh-keygen", "-lf", f"/etc/sottovoce/node/{name}.pub").stdout.split()[1]


def stop_node(machine):
    for name in reversed(NODE):
        if name in machine.services:
            machine.stop(name)


def watch(it, out, *, who, tries, became, on_look=lambda: None, rounds=ROUNDS, **config):
    """Lead a run of the honest clients beside whatever is going on, and keep its row.

    `became` says it in words, from the record; the row is kept if the honest clients' rounds all
    closed, nothing was overspent and both services stayed below their bounds.
    """
    for name in SERVER[:2]:
        forget_peak(it.server.services[name])
    count = len(honest(it))
    settings = {"clients": count, "minimum": count, "deadline": 120.0, "plan": PLAN} | config
    run = it.run(out, **settings)
    state, most = it.follow_run(run, on_look)
    assert state == "finished:completed", it.flwr("log", run, "federation", "--show")
    record, keys = it.record(out), {key_of(ward, name) for name, ward in honest(it).items()}
    places = {i for i, own in enumerate(record["clients"]) if own["key"] in keys}
    assert len(places) == count
    closed = sum(places <= set(entry["cohort"]) for entry in record["rounds"])
    return close(it, record, closed, most, who, tries, became(record), rounds)


def close(it, record, closed, most, who, tries, became, rounds):
    """Hold a run against the promises, and keep its row."""
    told = {name: ledger(ward, name) for name, ward in honest(it).items()}
    spent = {name: own["budget"]["spent"] for name, own in told.items()}
    capacity = {name: own["budget"]["capacity"] for name, own in told.items()}
    it.verify_books()
    megabytes = {name: round(used / 1e6) for name, used in most.items()}
    row = {
        "who": who,
        "tries": tries,
        "became": became,
        "closed": closed,
        "rounds": rounds,
        "seconds_a_round": record["timing"]["seconds_per_round"],
        "spent": max(spent.values()),
        "capacity": min(capacity.values()),
        "superlink_mb": megabytes["sottovoce-superlink"],
        "server_mb": megabytes["sottovoce-server"],
    }
    print(json.dumps(row, ensure_ascii=False), flush=True)
    assert all(spent[name] <= capacity[name] for name in spent), row
    assert all(megabytes[name] < bound for name, bound in BOUNDS.items()), row
    assert closed == rounds, row
    keep(row)
    return row


def missing_of(record, name):
    """Why a client's uploads did not count, with the number of rounds of each reason."""
    why = Counter(entry.get("missing", {}).get(name) for entry in record["rounds"])
    why.pop(None, None)
    return ", ".join(f"{reason} in {n}" for reason, n in sorted(why.items()))


@contextmanager
def party(it, *words):
    """A hostile party at mallory's machine while this lasts; what it met is in the list."""
    machine, met = it.wards[BAD], []
    process = it.hostile(*words, machine=machine)
    try:
        assert until(lambda: it.online() == len(it.wards))
        yield met
        process.terminate()
        met.append(json.loads(process.communicate(timeout=900)[0]))
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
    assert until(lambda: it.online() < len(it.wards))


@pytest.fixture(scope="module")
def it():
    """Three honest clients and mallory, whose services are stopped."""
    with deployed(*HONEST, BAD, rounds=3, longer=ROUNDS, floor=16.0) as it:
        stop_node(it.wards[BAD])
        assert until(lambda: it.online() == len(HONEST))
        yield it


NODE_WORDS = ("node", DOOR, "/etc/sottovoce/node/ca.crt", f"/etc/sottovoce/node/{BAD}", 7200)


# Attacks


@needs_machines
@pytest.mark.parametrize("who", ["a stranger with ca.crt", "a registered client"])
def test_calls(it, who):
    key = (f"/etc/sottovoce/node/{BAD}",) if who == "a registered client" else ()
    process = it.hostile("calls", DOOR, "/etc/sottovoce/node/ca.crt", *key, machine=it.wards[BAD])
    met = []

    def became(_):
        met.append(json.loads(process.communicate(timeout=900)[0]))
        found = Counter(met[0].values())
        assert not [call for call, status in met[0].items() if status < 400], met
        return ", ".join(f"{n} × {status}" for status, n in sorted(found.items()))

    watch(it, f"calls-{len(key)}", who=who, tries=f"every path of Flower's, and spellings of them"
          f"{', signed with its key' if key else ''}", became=became)  # fmt: skip


REPLIES = {
    "many_records": ("a reply of 20,000 records", "announced 413"),
    "large": ("a reply of 300 MB", "sent 413"),
    "some_records": ("replies of 12 records", ""),
    "nonsense": ("replies that are no answers", ""),
    "half": ("announces replies and never sends them", ""),
    "silent": ("pulls what it is asked and never replies", ""),
    "flood": ("100 calls a second", ""),
    "slow": ("200 connections with calls that never end", ""),
}


@needs_machines
@pytest.mark.parametrize("mode", REPLIES)
def test_replies(it, mode):
    """A node with a registered key and software of its own."""
    tries, refusal = REPLIES[mode]
    began = time.monotonic()
    with party(it, *NODE_WORDS, mode) as met:

        def became(record):
            assert BAD not in {c["name"] for c in record["clients"]}
            return "no member of the run"

        row = watch(it, f"reply-{mode}", who="a registered client", tries=tries, became=became)
    found = met[0]
    assert not refusal or found.get(refusal, 0) > 0, found
    limits = (deploy.HERE / "nginx.conf").read_text("utf-8")
    rate, burst = (
        int(re.search(rf"zone=calls.* {key}=(\d+)", limits)[1]) for key in ("rate", "burst")
    )
    calls = burst + rate * (time.monotonic() - began)
    assert found.get("flood 200", 0) <= calls, found
    shown = {"flood": ("flood",), "slow": ("slow",)}.get(mode, ("asked", "announced", "sent"))
    said = ", ".join(f"{k}: {n}" for k, n in sorted(found.items()) if k.startswith(shown))
    keep({**row, "became": f"{row['became']} ({said})"})


def start_liar(it, mode):
    """Mallory with rows, a vault and a SuperNode as everyone; only its words are other ones."""
    machine = it.wards[BAD]
    machine.start("sottovoce-worker", "--app", "support.hostile_device:app", SOTTOVOCE_HOSTILE=mode,
                  PYTHONPATH=f"{machine.environment()['PYTHONPATH']}:{TESTS}")  # fmt: skip
    machine.start("sottovoce-node")
    assert until(lambda: it.online() == len(it.wards))


HELLO = """
import sys
from pathlib import Path
from sottovoce.client import device
from sottovoce.client.node import Node
sys.stdout.buffer.write(device.make_greeting(Node.load(Path(sys.argv[1]))))
"""
LIES_TRY = {
    "every way": "answers that are none: nothing, texts, halves, 10 MB, NaN",
    "more samples": "greets with 1,000,000 samples, and uploads that fit them",
    "thief": "greets with another client's vault id",
}


@needs_machines
@pytest.mark.parametrize("mode", LIES)
def test_lies(it, mode):
    """A client of the run that lies about its numbers."""
    if mode == "thief":
        victim = it.wards[HONEST[0]]
        hello = subprocess.run(
            victim.inside("python", "-c", HELLO, f"/srv/{HONEST[0]}/node.toml", user=HONEST[0]),
            env=victim.environment({"SOTTOVOCE_STATE": f"/var/lib/{HONEST[0]}/state"}),
            capture_output=True, check=True,
        ).stdout  # fmt: skip
        it.wards[BAD].write("/srv/stolen", hello)

    def became(record):
        own = {c["name"]: c for c in record["clients"]}
        if mode == "thief":
            bad = next(c for c in own.values() if c["key"] == key_of(it.wards[BAD], BAD))
            assert bad["name"].startswith(f"{HONEST[0]} (")
            assert bad["participations"] == 0
            return f"{len(own)} clients, told apart by their keys; it counted in no round"
        bad = own[BAD]
        if mode == "more samples":
            rest = [c["counted"] for name, c in own.items() if name != BAD]
            share = bad["counted"] / (bad["counted"] + sum(rest))
            assert share < 0.5
            return f"counts for {bad['counted']} of them: {share:.0%} of the weight"
        return f"did not count: {missing_of(record, BAD)}; counted in {bad['participations']}"

    start_liar(it, mode)
    try:
        watch(it, f"lie-{mode.replace(' ', '-')}", who="a client of the run",
              tries=LIES_TRY[mode], became=became, clients=len(it.wards))  # fmt: skip
    finally:
        stop_node(it.wards[BAD])
        assert until(lambda: it.online() == len(HONEST))


# Faults


LOCK = """
import sqlite3, time
state = sqlite3.connect("/var/lib/sottovoce/state.db", isolation_level=None)
for _ in range(2):
    state.execute("BEGIN EXCLUSIVE")
    time.sleep(12)
    state.execute("ROLLBACK")
    time.sleep(3)
"""


@needs_machines
def test_a_locked_database(it):
    locks = []

    def look():
        if not locks and closed_rounds(it, "locked") >= 1:
            words = it.server.inside("python", "-c", LOCK, user="sottovoce")
            locks.append(subprocess.Popen(words, env=it.server.environment()))

    watch(it, "locked", who="—", tries="the SuperLink's database is locked for 12 s, twice",
          became=lambda record: f"the run went on, {len(record['rounds'])} rounds",
          on_look=look)  # fmt: skip
    assert locks[0].wait(900) == 0


def closed_rounds(it, out):
    lines = it.server.run("cat", f"/srv/sottovoce/{out}/rounds.jsonl", check=False).stdout
    return lines.count("\n")


@needs_machines
def test_a_superlink_that_is_killed(it):
    kills = []

    def look():
        if len(kills) < 2 and closed_rounds(it, "killed") > 2 * len(kills):
            kills.append(it.server.services["sottovoce-superlink"].pid)
            it.server.stop("sottovoce-superlink", signal.SIGKILL)
            it.server.start("sottovoce-superlink")
        it.revive()

    watch(it, "killed", who="—", tries="kill -9 of the SuperLink in mid-run, twice",
          became=lambda record: f"killed {len(kills)} times, started again, the run went on",
          on_look=look)  # fmt: skip


@needs_machines
def test_a_dead_worker_behind_a_live_supernode(it):
    """Mallory's SuperNode lives, and nobody answers its messages: it is asked, and is silent."""
    machine = it.wards[BAD]
    for name in NODE:
        machine.start(name)
    assert until(lambda: it.online() == len(it.wards))
    dead = []

    def look():
        if not dead and closed_rounds(it, "dead") >= 1:
            dead.append(BAD)
            machine.stop("sottovoce-worker", signal.SIGKILL)

    def became(record):
        return f"it was {missing_of(record, BAD)} of {len(record['rounds'])} rounds, then rested"

    watch(it, "dead", who="—", tries="a client's worker dies, its SuperNode lives (deadline 15 s)",
          became=became, on_look=look, clients=len(it.wards), deadline=15.0)  # fmt: skip
    machine.stop("sottovoce-node")
    assert until(lambda: it.online() == len(HONEST))


@needs_machines
def test_a_supernode_that_is_cut_off(it):
    """Its line is down for longer than the watchdog waits: it ends, is started again, is back."""
    ward, ended = it.wards[HONEST[0]], []
    ward.run("ip", "link", "set", "eth0", "down")
    assert until(lambda: ward.services["sottovoce-node"].poll() is not None)
    ended.append(ward.services["sottovoce-node"].poll())
    ward.run("ip", "link", "set", "eth0", "up")
    it.revive()
    assert until(lambda: it.revive() or it.online() == len(HONEST))
    watch(it, "cut", who="—", tries="a client's line is down until its SuperNode gives up",
          became=lambda record: f"it ended (exit code {ended[0]}), was started again, is back",
          on_look=it.revive)  # fmt: skip


CLOCK = TESTS / "support" / "clock_shift.c"


@needs_machines
def test_a_clock_that_is_ahead(it):
    """20 seconds: Flower turns it away with 401; its log says why; set right, it is back."""
    ward, name = it.wards[HONEST[0]], HONEST[0]
    shift, environment = built_clock(it.folder)
    shift.write_text("20")
    ward.stop("sottovoce-node")
    assert until(lambda: it.online() == len(HONEST) - 1)
    before = ward.log("sottovoce-node")
    ward.start("sottovoce-node", **environment)
    assert until(lambda: "s ahead of the server's" in ward.log("sottovoce-node")[len(before) :])
    done = ward.run("python", "-m", "sottovoce.flower.worker", "--check", f"/srv/{name}/node.toml",
                    "--server", DOOR, "--authority", "/etc/sottovoce/node/ca.crt", user=name,
                    check=False, SOTTOVOCE_STATE=f"/var/lib/{name}/state",
                    **environment)  # fmt: skip
    assert done.returncode != 0
    assert "s ahead of the server's" in done.stderr
    ward.services["sottovoce-node"].kill()
    ward.services["sottovoce-node"].wait()
    shift.write_text("0")
    assert until(lambda: it.revive() or it.online() == len(HONEST))
    watch(it, "clock", who="—", tries="a client's clock is 20 s ahead, then set right",
          became=lambda record: "401; its log and `worker --check` name the clock; it is back",
          on_look=it.revive)  # fmt: skip


def built_clock(folder):
    """The library that makes a clock wrong by what a file says, and that file."""
    shim, shift = folder / "clock_shift.so", folder / "shift"
    subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", shim, CLOCK, "-ldl"], check=True)
    shift.write_text("0")
    shift.chmod(0o644)
    shim.chmod(0o755)
    return shift, {"LD_PRELOAD": str(shim), "CLOCK_SHIFT": str(shift)}


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs cc, which is not installed")
def test_a_clock_that_jumps_back_an_hour(tmp_path, monkeypatch):
    """All processes of `sottovoce federate` see it, in mid-run: it ends with its report."""
    shift, environment = built_clock(tmp_path)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    out = tmp_path / "run"
    command = Command(tmp_path / "log", "--out", out, "--set", f"rounds.rounds={ROUNDS}")
    try:
        command.until_round(2)
        shift.write_text("-3600")
        code = command.end()
    finally:
        command.stop()
    assert code == 0, (tmp_path / "log").read_text()
    record, books = record_of(out), [books_hold(node) for node in nodes_of(out)]
    assert (record["status"], (out / "report.html").exists()) == ("finished", True)
    uploads = [entry["uploads"] for entry in record["rounds"]]
    capacity = min(c["capacity"] for c in record["clients"])
    keep({
        "who": "—",
        "tries": "the clock jumps back an hour in mid-run (`sottovoce federate`)",
        "became": "the run went on to its report",
        "closed": sum(n == len(books) for n in uploads),
        "rounds": ROUNDS,
        "seconds_a_round": record["timing"]["seconds_per_round"],
        "spent": max(float(own.booked) for own in books),
        "capacity": capacity,
        "superlink_mb": None,
        "server_mb": None,
    })  # fmt: skip


@needs_machines
def test_a_disk_that_is_nearly_full(it):
    """Mallory's, this time an honest one: a debit fits onto it, an upload does not."""
    machine = it.wards[BAD]
    for name in NODE:
        machine.start(name)
    assert until(lambda: it.online() == len(it.wards))
    before = ledger(machine, BAD)["budget"]["spent"]
    top = it.folder / f"{BAD}.top"
    used = machine.run("df", "--output=used", "-B1", top).stdout.split()[-1]
    machine.run("mount", "-o", f"remount,size={int(used) + 600_000}", top)

    def became(record):
        after = ledger(machine, BAD)["budget"]["spent"]
        assert after == before
        return f"{missing_of(record, BAD)} of {len(record['rounds'])} rounds; it spent nothing"

    try:
        watch(it, "full", who="—", tries="a client's disk has 600 kB left",
              became=became, clients=len(it.wards))  # fmt: skip
    finally:
        machine.run("mount", "-o", "remount,size=50%", top)
        stop_node(machine)


# Ten clients, one of them hostile throughout


@needs_machines
def test_ten_clients_with_a_hostile_one_throughout(record_property):
    """One run of ten clients for so many minutes, of which one means ill.

    For a third of the time mallory is a client that sends uploads which are none, then a node with
    software of its own that tries every kind of reply, floods and holds connections.
    """
    record_property("size", f"10 clients, {MINUTES:g} minutes")
    modes = ["many_records", "large", "some_records", "nonsense", "half", "silent", "flood", "slow"]
    with deployed(*TEN, BAD, rounds=3, longer=LONGEST) as it:
        stop_node(it.wards[BAD])
        start_liar(it, "every way")
        began, parties, stopped = time.monotonic(), [], []

        def look():
            minutes = (time.monotonic() - began) / 60
            if minutes > MINUTES / 3 and not parties:
                stop_node(it.wards[BAD])
                parties.append(it.hostile(*NODE_WORDS, *modes, machine=it.wards[BAD]))
            if minutes > MINUTES and not stopped:
                stopped.append(it.flwr("stop", run, "federation"))

        config = {"clients": len(it.wards), "minimum": len(TEN) - 1, "deadline": 30.0}
        try:
            run = it.run("long", plan=PLAN, **config)
            state, most = it.follow_run(run, look)
            parties[0].terminate()
            met = json.loads(parties[0].communicate(timeout=900)[0])
        finally:
            for process in parties:
                process.kill()
                process.wait()
        kept = "/srv/sottovoce/long/record.json"
        assert until(lambda: not it.server.run("test", "-e", kept, check=False).returncode)
        record = it.record("long")
        assert record["status"] == "interrupted"
        print(state, json.dumps(met), json.dumps(record["rounds"][-1]), flush=True)
        total, uploads = len(record["rounds"]), [entry["uploads"] for entry in record["rounds"]]
        all_came = sum(n >= len(TEN) for n in uploads)
        said = ", ".join(f"{k}: {n}" for k, n in sorted(met.items()))
        words = f"its uploads: {missing_of(record, BAD)}; {all_came} of {total} rounds had all "
        words += f"honest uploads; as a node of its own it met {said}"
        close(it, record, total, most, "a client of ten",
              f"all of that in turn, for {MINUTES:g} minutes", words, total)  # fmt: skip
