"""docs/deploy.md as printed, on machines of their own; then what hostile parties try there."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from sottovoce.flower import local
from support.deployment import DOOR, NODE, PAGE, deployed, until
from support.machines import missing

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(missing() is not None, reason=str(missing())),
]
WARDS = ("ward-3", "ward-5")
ROUNDS, LONGER = 3, 6
# The calls that a SuperNode makes: all that the open port passes on.
FLEET = {"activate-node", "deactivate-node", "send-node-heartbeat", "pull-messages",
         "push-messages", "get-run", "get-fab", "push-object", "pull-object",
         "confirm-message-received"}  # fmt: skip
EVIL = """
from pathlib import Path
Path("/srv/sottovoce/proof").write_text("ran")
from flwr.serverapp import ServerApp
app = ServerApp()
@app.main()
def main(grid, context):
    Path("/srv/sottovoce/proof").write_text("ran")
"""


@pytest.fixture(scope="module")
def deployment():
    """The page, followed; everything that it started ends with the tests of this file."""
    with deployed(*WARDS, rounds=ROUNDS, longer=LONGER) as it:
        yield it


def test_the_page_as_printed_ends_with_a_report(deployment):
    record = deployment.record()
    assert (record["status"], record["result"]["rounds_used"]) == ("finished", ROUNDS)
    assert [entry["uploads"] for entry in record["rounds"]] == [2] * ROUNDS
    assert "insecure-transport" not in record["guarantee"]["not_covered"]
    page = deployment.server.read("/srv/sottovoce/study/run/report.html")
    assert b"<html" in page


def test_every_file_belongs_to_the_one_who_needs_it(deployment):
    """No service's user reads the authority's key or the proxy's; nobody else reads the state."""
    server, ward = deployment.server, deployment.wards["ward-3"]
    key = server.read("/etc/sottovoce/authority/ca.key")
    assert b"ENCRYPTED" in key
    for machine, user, path in (
        (server, "sottovoce", "/etc/sottovoce/authority/ca.key"),
        (server, "sottovoce", "/etc/sottovoce/server-proxy/server.key"),
        (server, "sottovoce-proxy", "/etc/sottovoce/server/link.key"),
        (server, "sottovoce-proxy", "/etc/sottovoce/server/worker.secret"),
        (server, "nobody", "/var/lib/sottovoce/state.db"),
        (ward, "nobody", "/etc/sottovoce/node/ward-3"),
        (ward, "nobody", "/srv/ward-3/rows.npz"),
        (ward, "nobody", "/srv/ward-3/ward-3.vault"),
    ):
        machine.run("test", "-e", path)
        user = "daemon" if user == "nobody" else user
        assert machine.run("cat", path, user=user, check=False).returncode != 0, path
    owned = ward.run("find", "/srv/ward-3", "/var/lib/ward-3", "!", "-user", "ward-3").stdout
    assert owned == ""  # the vault, both witnesses and the lock
    assert "witness" in ward.run("find", "/var/lib/ward-3").stdout
    assert "witness" not in ward.run("find", "/srv/admin").stdout


def test_a_second_client_gets_nothing_of_the_first(deployment):
    """Neither its key, which a change of owner would give away, nor its units and certificate."""
    ward, keys = deployment.wards["ward-3"], "/etc/sottovoce/node"
    look = ("find", keys, "/etc/systemd/system/", "-name", "*", "-printf", "%p %u %m %T@ %s\n")
    before = ward.run(*look).stdout
    words = ("node", "init", "ward-9", "--server", DOOR, "--ca", f"{keys}/ca.crt")
    done = ward.run("sottovoce", *words, check=False)
    assert (done.returncode, "a machine has one client" in done.stderr) == (2, True)
    assert ward.run(*look).stdout == before
    assert ward.run("id", "ward-9", check=False).returncode != 0
    words = (*words[:2], "daemon", *words[3:], "--folder", "/srv/x", "--units", "/srv/y")
    done = ward.run("sottovoce", *words, check=False)
    assert (done.returncode, "--user" in done.stderr) == (2, True)
    assert ward.run("test", "-e", "/srv/x", check=False).returncode != 0


@pytest.mark.parametrize("unit", ["superlink", "server", "proxy", "worker", "node"])
def test_units_are_hardened(deployment, unit):
    if shutil.which("systemd-analyze") is None:
        pytest.skip("needs systemd-analyze, which is not installed")
    on = deployment.wards["ward-3"] if f"sottovoce-{unit}" in NODE else deployment.server
    name = f"sottovoce-{unit}.service"
    path = deployment.folder / name
    path.write_bytes(on.read(f"/etc/systemd/system/{name}"))
    done = subprocess.run(
        ["systemd-analyze", "security", "--offline=true", str(path)],
        capture_output=True, text=True,
    )  # fmt: skip
    level = re.search(r"Overall exposure level for \S+: ([0-9.]+)", done.stdout)
    if level is None:
        pytest.skip(f"systemd-analyze cannot look at a file: {done.stderr[:80]}")
    assert float(level.group(1)) < 4
    assert "MemoryMax" in path.read_text()


STOP = """
import sys
from sottovoce.client.node import Node
from sottovoce.client.vault import Vault
node = Node.load(sys.argv[1])
with Vault.open(node.vault, dataset=node.read_rows().fingerprint, wait=900.0) as vault:
    vault.stop("a disk was full")
"""


def test_a_client_that_has_stopped_goes_on_as_the_page_says(deployment):
    """As root of the machine: the status says that it has stopped, and one command ends that."""
    ward, status = deployment.wards["ward-5"], ("sottovoce", "node", "status")
    state = {"SOTTOVOCE_STATE": "/var/lib/ward-5/state"}
    ward.run("python", "-c", STOP, "/srv/ward-5/node.toml", user="ward-5", **state)
    done = ward.run(*status, "/srv/ward-5/node.toml", check=False)
    assert (done.returncode, "ledger resume" in done.stderr) == (1, True)
    (line,) = re.findall(r"`(runuser .* ledger resume .*)`", PAGE.read_text("utf-8"))
    ward.shell(line.replace("ward-3", "ward-5"))
    assert ward.run(*status, "/srv/ward-5/node.toml").returncode == 0
    owned = ward.run("find", "/srv/ward-5", "/var/lib/ward-5", "!", "-user", "ward-5").stdout
    assert owned == ""


# Whoever reaches the open port


def evil_app(machine):
    """An app of a submitter's own, in /srv/admin/evil of a machine."""
    machine.run("mkdir", "-p", "/srv/admin/evil/evil")
    machine.write("/srv/admin/evil/evil/app.py", EVIL.encode())
    machine.write("/srv/admin/evil/evil/__init__.py", b"")
    text = (Path(local.APP) / "pyproject.toml").read_text("utf-8")
    text = re.sub(r'"sottovoce.flower.(server|client)_app:app"', '"evil.app:app"', text)
    machine.write("/srv/admin/evil/pyproject.toml", text.encode())


@pytest.mark.parametrize("who", ["stranger", "registered"])
def test_the_open_port_passes_on_no_call_but_a_supernodes(deployment, who):
    """With ca.crt alone, and with the key of a registered client."""
    machine = deployment.stranger if who == "stranger" else deployment.wards["ward-5"]
    machine.write("/srv/admin/ca.crt", deployment.server.read("/etc/sottovoce/authority/ca.crt"))
    known = deployment.runs_and_nodes()
    key = () if who == "stranger" else ("/etc/sottovoce/node/ward-5",)
    process = deployment.hostile("calls", DOOR, "/srv/admin/ca.crt", *key, machine=machine)
    found = json.loads(process.communicate(timeout=900)[0])
    assert len(found) > 150
    for call, status in found.items():
        verb, _, path = call.partition(" ")
        if verb == "POST" and path.startswith("/v1/fleet/") and path[10:] in FLEET:
            assert status in (400, 401, 500, 503), (call, status)  # without its words it is nothing
        elif path.endswith("%2fv1/fleet/pull-messages"):
            assert status in (401, 403), (call, status)  # another spelling of a SuperNode's call
        else:
            assert status in (400, 403, 404), (call, status)
    assert deployment.runs_and_nodes() == known


def test_flowers_own_commands_run_register_list_and_stop_nothing_there(deployment):
    """They take ca.crt and no key: a registered client has nothing that a stranger has not."""
    machine, known = deployment.stranger, deployment.runs_and_nodes()
    machine.write("/srv/admin/ca.crt", deployment.server.read("/etc/sottovoce/authority/ca.crt"))
    machine.write(
        "/srv/admin/config.toml",
        f"[superlink]\ndefault='f'\n[superlink.f]\naddress='{DOOR}'\n"
        "root-certificates='/srv/admin/ca.crt'\n".encode(),
    )
    evil_app(machine)
    machine.run("ssh-keygen", "-q", "-t", "ecdsa", "-b", "384", "-N", "", "-f", "/srv/admin/own")
    for words in (
        ("run", "/srv/admin/evil", "f"),
        ("list", "f"),
        ("stop", "1", "f"),
        ("supernode", "register", "/srv/admin/own.pub", "f"),
        ("supernode", "list", "f"),
    ):
        done = machine.run("flwr", *words, check=False, FLWR_HOME="/srv/admin")
        assert done.returncode != 0, words
    machine.run("rm", "/srv/admin/own", "/srv/admin/own.pub")
    assert deployment.runs_and_nodes() == known
    assert deployment.server.run("test", "-e", "/srv/sottovoce/proof", check=False).returncode


def test_a_submitted_app_is_not_run_even_where_runs_are_started(deployment):
    """On the server's own loopback: the installed app leads, and refuses what it does not know."""
    server = deployment.server
    evil_app(server)
    for words, said in (
        ("out='/srv/sottovoce/evil'", "plan"),
        ("out='/srv/sottovoce/evil' plan='/etc/passwd'", "plan must be a path below /srv"),
    ):
        text = deployment.flwr("run", "/srv/admin/evil", "federation", "--run-config", words)
        run = int(re.search(r"started run (\d+)", text).group(1))
        assert until(lambda run=run: deployment.state(run).startswith("finished"))
        assert deployment.state(run) == "finished:failed"
        assert said in deployment.flwr("log", run, "federation", "--show")
    for path in ("/srv/sottovoce/proof", "/srv/sottovoce/evil"):
        assert server.run("test", "-e", path, check=False).returncode, path
    assert "evil" not in server.run("find", "/var/lib/sottovoce").stdout  # it was not unpacked


# Locks the SuperLink's database in the middle of a run, until it is told to let go.
LOCK = """
import sqlite3, sys, time
from pathlib import Path
rounds = Path("/srv/sottovoce/locked/rounds.jsonl")
while not rounds.exists() or rounds.read_bytes().count(b"\\n") < 2:
    time.sleep(0.02)
state = sqlite3.connect("/var/lib/sottovoce/state.db", isolation_level=None, timeout=900)
state.execute("BEGIN EXCLUSIVE")
print("locked", flush=True)
sys.stdin.readline()
state.execute("ROLLBACK")
"""


def test_a_locked_database_is_waited_for(deployment):
    """Flower gives up after 5 seconds, with 500; here everybody tries again until it is over."""
    server, link = deployment.server, "sottovoce-superlink"
    holder = server.open("python", "-c", LOCK, user="sottovoce")
    try:
        run = deployment.run("locked", plan="/srv/sottovoce/study/longer.toml", deadline=900.0)
        assert holder.stdout.readline() == "locked\n"
        assert until(lambda: "database is locked" in server.log(link))
        holder.communicate("\n", timeout=900)
    finally:
        holder.kill()
        holder.wait()
    assert until(lambda: deployment.state(run).startswith("finished"))
    assert deployment.state(run) == "finished:completed"
    record = deployment.record("locked")
    assert (record["status"], record["result"]["rounds_used"]) == ("finished", LONGER)
    assert deployment.all_online()
    assert all(process.poll() is None for process in server.services.values())
    deployment.verify_books()


# A hostile client whose key is registered


@pytest.fixture(scope="module")
def mallory(deployment):
    """The stranger, registered: what it is, and how it is started."""
    stranger, server = deployment.stranger, deployment.server
    stranger.write("/srv/admin/ca.crt", server.read("/etc/sottovoce/authority/ca.crt"))
    make = "from pathlib import Path; from sottovoce.flower import certificates as c; "
    make += "c.make_node_key(Path('/srv/admin/keys'), 'mallory')"
    stranger.run("mkdir", "-p", "/srv/admin/keys")
    stranger.run("python", "-c", make)
    server.write("/srv/admin/mallory.pub", stranger.read("/srv/admin/keys/mallory.pub"))
    deployment.flwr("supernode", "register", "/srv/admin/mallory.pub", "federation")
    return ("node", DOOR, "/srv/admin/ca.crt", "/srv/admin/keys/mallory")


def play_beside(deployment, mallory, out, *modes):
    """A run of two honest clients with a hostile one beside them; what it found, peak memory."""
    process = deployment.hostile(*mallory, 7200, *modes)
    try:
        assert until(lambda: deployment.online() == len(WARDS) + 1)
        run = deployment.run(out, plan="/srv/sottovoce/study/longer.toml")
        state, most = deployment.follow_run(run)
        process.terminate()  # it lives as long as the run
        found = json.loads(process.communicate(timeout=900)[0])
    finally:
        process.kill()
        process.wait()
    log = deployment.flwr("log", run, "federation", "--show")
    assert state == "finished:completed", log
    return found, most


def test_a_hostile_client_harms_nobody_else(deployment, mallory):
    """Replies of 20,000 records and of 300 MB are refused by the proxy; the run ends well.

    The two services stay below half of the memory that their units allow, and the honest clients'
    books are in order.
    """
    modes = ("large+many_records", "many_records", "many_records")  # in turn: 300 MB take seconds
    found, most = play_beside(deployment, mallory, "beside", *modes)
    assert found["announced 413"] >= 1  # too many records
    assert found["sent 413"] >= 1  # too large
    record = deployment.record("beside")
    assert [entry["uploads"] for entry in record["rounds"]] == [2] * LONGER
    for name, used in most.items():
        assert 0 < used < int(deployment.server.unit(name)["MemoryMax"][0]) / 2, (name, used)
    deployment.verify_books()
