"""A real SuperLink and real SuperNodes on loopback, over TLS, with a toy device that echoes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from sottovoce.flower import certificates, keeper, local
from support import TESTS
from support.processes import lives, until

pytestmark = pytest.mark.slow

ECHO = TESTS / "support" / "echo_app"
NAMES = ["ann", "bob", "cid"]


def files_of_nodes(folder):
    """What a node's own file is to the toy device: a name."""
    folder.mkdir()
    for name in NAMES:
        (folder / name).write_text(name)
    return [str(folder / name) for name in NAMES]


@pytest.fixture(scope="module")
def running(tmp_path_factory):
    """One federation for all tests of this file; its end is a test too."""
    folder = tmp_path_factory.mktemp("a federation")  # a path with a space in it
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ECHO), *sys.path])
    try:
        with local.start_federation(
            folder, files_of_nodes(folder / "own"), app="echo_client:app"
        ) as it:
            yield it
            below = [*keeper.list_descendants(it.processes.pid), it.processes.pid]
            assert len(below) >= 1 + 2 + 2 * len(NAMES)
    finally:
        os.environ.pop("PYTHONPATH") if before is None else os.environ.update(PYTHONPATH=before)
    assert [pid for pid in below if lives(pid)] == []


def told(path):
    return json.loads(path.read_text()) if path.exists() else {"rounds": []}


def everything_written(running):
    """All that SuperLink, SuperNodes and workers have logged."""
    return "".join(log.read_text("utf-8", "replace") for log in running.folder.glob("logs/*.log"))


@pytest.fixture(scope="module")
def first_run(running, tmp_path_factory):
    """`flwr run APP NAME --run-config …`: a bundle that is up to no good, two rounds and a failure.

    Its ClientApp would leave a proof that it ran; in its last round it makes the device fail.
    """
    folder = tmp_path_factory.mktemp("evil")
    app, proof, out = folder / "echo", folder / "it-ran", folder / "out.json"
    app.mkdir()
    for file in ("pyproject.toml", "echo_client.py", "echo_server.py"):
        (app / file).write_text((ECHO / file).read_text())
    with (app / "echo_client.py").open("a") as file:
        file.write(f"\nPath({str(proof)!r}).touch()\n")
    flwr = str(Path(sys.executable).parent / "flwr")
    config = f"out='{out}' rounds=3 boom=2"
    done = subprocess.run(
        [flwr, "run", str(app), local.CONNECTION, "--stream", "--run-config", config],
        env=running.environment("superlink"),
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr, out, proof


def test_flwr_run_works_as_flower_users_expect(first_run):
    said, out, _ = first_run
    assert "Successfully started run" in said
    assert [r["right"] for r in told(out)["rounds"][:2]] == [NAMES, NAMES]
    assert told(out)["seats"] == NAMES


def test_a_device_that_fails_tells_the_server_nothing(running, first_run):
    said, out, _ = first_run
    assert told(out)["rounds"][2]["failed"] == NAMES
    written = everything_written(running)
    assert "no answer: RuntimeError" in written  # the kind of error, on the node
    assert "secret" not in said + out.read_text() + written


def test_the_server_cannot_ship_code_to_a_node(first_run):
    """The nodes answered, with the app they had before."""
    _, out, proof = first_run
    assert told(out)["rounds"][0]["right"] == NAMES
    assert not proof.exists()


def test_a_run_that_stops_says_so_in_one_sentence(running, tmp_path):
    """An error of ours in the ServerApp: `flwr run` shows its words, and no lines of our code."""
    (tmp_path / "plan.toml").write_text("[rounds]\nrounds = -3\n", "utf-8")
    paths = {"plan": "plan.toml", "public": "public.npz", "out": "run"}
    config = " ".join(f"{key}='{tmp_path / name}'" for key, name in paths.items())
    flwr = str(Path(sys.executable).parent / "flwr")
    done = subprocess.run(
        [flwr, "run", str(local.APP), local.CONNECTION, "--stream", "--run-config", config],
        env=running.environment("superlink"),
        capture_output=True,
        text=True,
        timeout=900,
    )
    said = done.stdout + done.stderr
    assert "the run stopped: rounds.rounds must be" in said
    assert "Traceback" not in said


def test_a_killed_node_costs_its_answer_and_comes_back(running, tmp_path, monkeypatch):
    """kill -9 with a message in hand: the round closes with the others; the node is back later.

    Another node's worker is killed as well: it had no message in hand, so nobody notices.
    """
    ann, bob = running.nodes[:2]
    starts, first, out = bob.starts, bob.process.pid, tmp_path / "out.json"
    release, released = local.release_session, []

    def note_release(*words):
        released.append(release(*words))
        return released[-1]

    monkeypatch.setattr(local, "release_session", note_release)
    own = running.folder / "own"
    asked, hold = [own / "ann.asked", own / "bob.asked"], own / "bob.hold"
    for path in asked:
        path.unlink(missing_ok=True)
    hold.touch()
    run = running.run(ECHO, {"out": str(out), "rounds": 10_000, "comeback": "bob"})
    assert until(
        lambda: all(p.exists() for p in asked) and not keeper.list_descendants(ann.worker.pid), 900
    )
    os.kill(bob.process.pid, signal.SIGKILL)
    os.kill(ann.worker.pid, signal.SIGKILL)
    hold.unlink()
    running.wait(run, seconds=900)
    rounds = told(out)["rounds"]
    assert all({"ann", "cid"} <= set(r["right"]) for r in rounds)
    without = [r for r in rounds if r["right"] == ["ann", "cid"]]
    assert without
    assert all(r["failed"] in ([], ["bob"]) for r in without)
    assert released == [True]  # we ended its session; Flower waits for 45 to 60 s
    assert rounds[-1]["right"] == NAMES
    assert bob.starts == starts + 1
    assert bob.process.pid != first


STRANGERS = ["unregistered", "keyless", "plaintext", "another authority"]


def test_strangers_are_refused(running, tmp_path):
    """No registered key, no key at all, no TLS, no trust in our authority: nobody gets in."""
    online, tried = local.list_online(running.link), {}
    for kind in STRANGERS:
        folder = tmp_path / kind
        folder.mkdir()
        argv = [local._find_tool("flower-supernode"), "--superlink", running.link.address]
        argv += [
            "--host",
            local.HOST,
            "--port",
            str(local.find_free_ports(1)[0]),
            "--max-retries",
            "0",
        ]
        trust = running.link.authority
        if kind == "another authority":
            trust = certificates.make_authority(folder).certificate
        argv += ["--insecure"] if kind == "plaintext" else ["--root-certificates", str(trust)]
        if kind in ("unregistered", "another authority"):
            key = certificates.make_node_key(folder, "stranger")
            argv += ["--auth-supernode-private-key", str(key.private)]
        env = local.make_environment(folder / "home")
        tried[kind] = running.processes.start(kind, argv, log=folder / "log", env=env)
    for kind, process in tried.items():
        assert process.wait(900) not in (0, None), (kind, process.tail())
        assert "305" in process.log.read_text()  # Flower's code for a connection it was not given
    assert local.list_online(running.link) == online


@pytest.mark.trust
def test_no_process_is_left_when_parent_and_keeper_are_killed(tmp_path):
    """In the middle of a round, without TLS: the server waits, a device is held.

    Each killed alone, with smaller processes below it: tests/flower/test_processes.py.
    """
    code = """
        import sys, time
        from pathlib import Path
        from sottovoce.flower import keeper, local
        echo, folder = Path(sys.argv[1]), Path(sys.argv[2])
        (folder / "ann").write_text("ann")
        (folder / "ann.hold").touch()
        nodes, out = [str(folder / "ann")], folder / "out.json"
        app = "echo_client:app"
        with local.start_federation(folder / "f", nodes, app=app, insecure=True) as running:
            running.run(echo, {"out": str(out), "clients": 1})
            while not out.exists() or len(keeper.list_descendants(running.processes.pid)) < 6:
                time.sleep(0.1)
            pid = running.processes.pid
            print(pid, *keeper.list_descendants(pid), flush=True)
            time.sleep(600)
    """
    parent = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code), str(ECHO), str(tmp_path)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ECHO), *sys.path])},
    )
    with parent:
        pids = [int(word) for word in parent.stdout.readline().split()]
        # keeper, SuperLink, its SuperExec, ServerApp, SuperNode, worker, and the fork that thinks
        assert len(pids) == 7
        os.kill(parent.pid, signal.SIGKILL)
        os.kill(pids[0], signal.SIGKILL)
    assert until(lambda: not any(map(lives, pids)), 900)
