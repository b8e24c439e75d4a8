"""What `sottovoce federate` does before a process is started: refusals, dealing, files, locks."""

from __future__ import annotations

import fcntl
import json
import multiprocessing
import os
import shlex
import signal
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from sottovoce import Plan
from sottovoce.cli import commands
from sottovoce.client import ledger, sum_protocol
from sottovoce.client.node import Node
from sottovoce.client.vault import Vault, fingerprint_file, witness
from sottovoce.data import datasets, federated
from sottovoce.data.federated import load_holdings
from sottovoce.errors import DataError, FederationError, InputError, RunError, VaultRefusal
from sottovoce.flower import certificates, federate, server_app
from sottovoce.flower.federate import load_plan
from sottovoce.reports import progress
from sottovoce.runs import checkpoint
from sottovoce.server.coordinator import read_admitted

BAD = {
    "--clients 0": "data.clients must be",
    "--clients two": "not a valid int",
    "--clients 2000": "data.clients = 2000 needs",
    "--set privacy.epsilon=-1": "privacy.epsilon must be",
    "--set privacy.calibration=paper": "privacy.calibration must be exact or zcdp",
    "--set local.clip=median": "local.clip must be a number",
    "--set server.signal=raw": "server.signal",
    "--set noise=simulated --set rounds.betta=1": "did you mean rounds.beta",
    "--set data.name=arrays": "are given from Python",
    "--set model.name=custom": "model.own",
    "--set model.name=custom --set model.own=nowhere.py:model": "there is no file nowhere.py",
    "--set model.name=custom --set model.own=json:loads": "model.own must be a model",
    "--deadline 0": "deadline must be seconds above 0",
    "--deadline nan": "deadline must be seconds above 0",
    "--deadline -3": "deadline must be seconds above 0",
    "--minimum 0": "minimum must be a whole number",
    "--minimum 4": "minimum must be at most 3",
    "--resume": "--resume needs --out",
    "--resume --out nowhere": "holds no federation",
    "--resume --out nowhere --clients 3": "leave PLAN, --set, --clients and --insecure out",
    "--resume --out nowhere --insecure": "leave PLAN, --set, --clients and --insecure out",
    "nowhere.toml": "nowhere.toml",
    "--out it's": "out must be a path without '",
    "--out full": "out must be a new or empty folder",
}


@pytest.mark.parametrize("words", BAD)
def test_bad_input_is_one_sentence_and_leaves_nothing(words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "something").touch()
    monkeypatch.setattr("sys.argv", ["sottovoce", "federate", *words.split()])
    with pytest.raises(SystemExit) as ended:
        commands.main()
    said = capsys.readouterr()
    assert ended.value.code in (1, 2)
    assert said.out == ""
    assert BAD[words] in said.err
    assert said.err.count("\n") == 1
    assert [path.name for path in tmp_path.rglob("*")] == ["full", "something"]


def test_a_folder_whose_name_no_node_can_be_given_is_refused(tmp_path):
    """Before a vault is made, which could then neither be used nor made again."""
    with pytest.raises(InputError, match="out must be a path without ' and line breaks"):
        federate.federate(None, [], out=tmp_path / "two\nlines", quiet=True)
    assert not list(tmp_path.iterdir())


def test_the_command_to_go_on_with_can_be_pasted():
    folder = Path("it's a run; rm")
    command = checkpoint.describe_stop(folder, "federate").partition("go on with: ")[2]
    assert shlex.split(command) == ["sottovoce", "federate", "--resume", "--out", str(folder)]


def test_without_a_plan_three_clients_hold_all_rows_but_the_servers(tmp_path):
    plan = load_plan(None, ["privacy.epsilon=[1, 4, 8]", "local.unit=client"], None)
    files = federate.deal(plan, tmp_path / "run")
    again, found = federate.load_dealt(tmp_path / "run")
    assert found == files
    assert again == plan
    held = federated.load_public(tmp_path / "run" / "public.npz")
    nodes = [Node.load(path) for path in files]
    rows = [node.read_rows() for node in nodes]
    dealt = [bytes(x) for part in (*rows, held.validation, held.test) for x in part.x]
    known = Counter(bytes(x) for x in datasets.load("digits").train_x)
    assert not Counter(dealt) - known  # no row is dealt twice, to whomever
    assert [len(part.y) for part in rows] == [476, 476, 476]
    for node, epsilon in zip(nodes, (1, 4, 8), strict=True):
        with Vault.open(node.vault, dataset=node.read_rows().fingerprint) as vault:
            assert (vault.policy.epsilon, vault.policy.delta) == (epsilon, 1e-5)
            assert (vault.policy.clip, vault.policy.unit) == (1.0, "client")
            assert vault.spent == 0
    assert (tmp_path / "run" / "nodes").stat().st_mode & 0o077 == 0


@pytest.mark.parametrize(
    ("rounds", "per_round", "turns"), [(1, 3, 1), (2, 3, 2), (3, 2, 2), (3, 3, 3), (8, 3, 4)]
)
def test_the_turns_of_a_short_run_may_take_the_whole_budget_and_none_more_than_its_part(
    rounds, per_round, turns, tmp_path
):
    """A vault's own floor leaves a turn a quarter, so that one upload had twice its noise."""
    words = [f"rounds.rounds={rounds}", f"rounds.per_round={per_round}", "rounds.schedule=fixed"]
    plan = load_plan(None, words, 3)
    policy = Node.load(federate.deal(plan, tmp_path / "run")[0]).make_policy(samples=400)
    share = 1 / (policy.floor**2 * policy.capacity())
    assert (1 - 1e-5) / turns < share <= 1 / turns


def test_where_the_server_learns_only_sums_every_node_has_its_key_and_one_roster(tmp_path):
    counted = ["privacy.view=sum", "privacy.honest=2", "privacy.corrupt=1"]
    plan = federate.load_plan(None, counted, 4)
    nodes = [Node.load(path) for path in federate.deal(plan, tmp_path / "run")]
    rosters = {sum_protocol.read_roster(node.sum_files[0]) for node in nodes}
    keys = [sum_protocol.read_key(node.sum_files[1]).public_key() for node in nodes]
    assert rosters == {frozenset(map(sum_protocol.name_key, keys))}
    assert len(rosters.pop()) == 4
    for node in nodes:
        policy = node.make_policy(samples=5)
        assert (policy.honest, policy.corrupt) == (2, 1)
        assert node.sum_files[1].stat().st_mode & 0o077 == 0


def test_a_model_of_your_own_is_named_absolutely_in_every_node_file(tmp_path, monkeypatch):
    (tmp_path / "net.py").write_text(
        "import jax.numpy as jnp, sottovoce\n"
        "model = sottovoce.custom(lambda key: {'w': jnp.zeros((64, 10))},\n"
        "    lambda p, x: x @ p['w'], lambda s, y: -s[jnp.arange(len(y)), y])\n"
    )
    (tmp_path / "plan.toml").write_text(
        '[data]\nclients = 2\n[model]\nname = "custom"\nown = "net.py:model"\n'
    )
    monkeypatch.chdir(tmp_path)
    files = federate.deal(load_plan(Path("plan.toml"), [], None), tmp_path / "run")
    monkeypatch.chdir("/")
    assert Plan.load(tmp_path / "run" / "plan.toml").model.own == f"{tmp_path}/net.py:model"
    for path in files:
        assert Node.load(path).own == f"{tmp_path}/net.py:model"
        assert Node.load(path).load_own_model().shapes() == {"w": (64, 10)}


@pytest.mark.parametrize(
    ("sites", "folders"),
    [(("north", "west-2"), ["north", "west-2"]), (("a b", "c/d"), ["client-0", "client-1"])],
)
def test_sites_keep_their_names_and_their_samples_are_declared(sites, folders, tmp_path):
    """The table's own names become folders where they can; the server is told who has how much."""
    rows = [f"{i % 9},{site},{i % 2}" for site in sites for i in range(40)]
    (tmp_path / "t.csv").write_text("\n".join(["a,site,y", *rows, *rows[:40]]) + "\n", "utf-8")
    own = Plan(
        noise="secure",
        data={"path": str(tmp_path / "t.csv"), "label": "y", "client": "site",
              "columns": {"a": [0, 9], "y": ["0", "1"]}},
        model={"name": "softmax"},
    )  # fmt: skip
    files = federate.deal(own, tmp_path / "out")
    assert [file.parent.name for file in files] == folders
    assert [Node.load(file).name for file in files] == folders
    admitted = read_admitted(tmp_path / "out" / "admitted.csv")
    assert admitted == {
        name: len(Node.load(f).read_rows().y) for name, f in zip(folders, files, strict=True)
    }
    assert admitted[folders[0]] > admitted[folders[1]]


def test_clients_that_are_called_by_numbers_find_their_keys_again(tmp_path):
    """10 stands before 9 in a folder: with the key of another a client takes no part in its run."""
    lines = [f"{i % 9},{i % 2},{9 + i % 2}" for i in range(96)]
    (tmp_path / "t.csv").write_text("\n".join(["a,y,ward", *lines]), "utf-8")
    columns = {"a": [0, 9], "y": ["0", "1"]}
    data = {"path": str(tmp_path / "t.csv"), "label": "y", "client": "ward", "columns": columns}
    files = federate.deal(load_plan({"data": data}, [], None), tmp_path / "run")
    assert [file.parent.name for file in files] == ["9", "10"]
    assert federate.load_dealt(tmp_path / "run")[1] == files


def test_rows_that_were_dealt_before_are_dealt_again_only_on_a_recorded_word(tmp_path):
    """A second run makes new vaults, and what is promised to a row adds up over both."""
    table = tmp_path / "t.csv"
    table.write_text("a,y\n" + "".join(f"{i % 9},{i % 2}\n" for i in range(90)), "utf-8")
    plan = load_plan(
        {"data": {"path": str(table), "label": "y", "columns": {"a": [0, 9], "y": ["0", "1"]},
                  "clients": 2}},
        [], None,
    )  # fmt: skip
    first = []
    for file in federate.deal(plan, tmp_path / "one"):
        made = ledger.read_statement(file.parent / "client.vault")
        assert made.notes[0]["text"] == (
            "the vault was made by `federate`, which cannot know of other ledgers over these rows: "
            "budgets add up (earlier ones: none that this machine has seen)"
        )
        assert "other-ledgers" in made.guarantee.not_covered
        first.append(made.vault)
    with pytest.raises(VaultRefusal, match=r"2 vaults already \(.*one\), and a new run"):
        federate.deal(plan, tmp_path / "two")
    assert not (tmp_path / "two").exists()
    for file in federate.deal(plan, tmp_path / "two", second_ledger=True):
        stated = ledger.read_statement(file.parent / "client.vault")
        assert not stated.only_ledger
        assert {*first} <= {*stated.other_ledgers}
        assert "its operator stated that it may be a second ledger" in stated.notes[0]["text"]
    table.write_text(table.read_text("utf-8") + "1,1\n", "utf-8")
    federate.deal(plan, tmp_path / "three")  # other bytes are another table


def deal_and_wait(data, out, state, reached, may_go):
    """Deal in a process of its own, which stops between the check for vaults and their making."""
    os.environ["SOTTOVOCE_STATE"] = state
    deal_rows = federated.deal_rows

    def wait_first(*args, **options):
        reached.set()
        assert may_go.wait(900)
        return deal_rows(*args, **options)

    federated.deal_rows = wait_first
    federate.deal(load_plan({"data": data}, [], None), out)


def make_second(data, out, state, met, found, work):
    """Make vaults in another process: `met` is set when it waits, or has looked for vaults."""
    os.environ["SOTTOVOCE_STATE"] = state
    flock, find_ledgers = fcntl.flock, witness.find_ledgers

    def lock(descriptor, kind):
        try:
            flock(descriptor, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            met.set()
            flock(descriptor, kind)

    def find(dataset):
        earlier = find_ledgers(dataset)
        met.set()
        return earlier

    fcntl.flock, witness.find_ledgers = lock, find
    try:
        if work == "federate":
            federate.deal(load_plan({"data": data}, [], None), out)
        else:
            terms = {"samples": 90, "epsilon": 1.0, "delta": 1e-3, "clip": 1.0}
            ledger.create_from_data(out, data=data["path"], **terms)
    except VaultRefusal as refusal:
        found.put(str(refusal))
    else:
        found.put("dealt")


@pytest.mark.slow
@pytest.mark.parametrize("work", ["federate", "ledger create"])
def test_of_two_runs_that_start_together_over_one_file_the_second_is_refused(tmp_path, work):
    (tmp_path / "t.csv").write_text("a,y\n" + "".join(f"{i % 9},{i % 2}\n" for i in range(90)))
    columns = {"a": [0, 9], "y": ["0", "1"]}
    data = {"path": str(tmp_path / "t.csv"), "label": "y", "columns": columns, "clients": 2}
    state = str(tmp_path / "state")
    spawn = multiprocessing.get_context("spawn")
    reached, may_go, met, found = spawn.Event(), spawn.Event(), spawn.Event(), spawn.Queue()
    one = spawn.Process(target=deal_and_wait, args=(data, tmp_path / "one", state, reached, may_go))
    two = spawn.Process(target=make_second, args=(data, tmp_path / "two", state, met, found, work))
    for process, event in ((one, reached), (two, met)):
        process.start()
        while not event.wait(1):
            assert process.is_alive()
    may_go.set()
    said = found.get(timeout=900)
    one.join(900)
    two.join(900)
    assert one.exitcode == two.exitcode == 0
    assert ("have 2 vaults already" if work == "federate" else "have a ledger") in said
    assert not (tmp_path / "two").exists()


@pytest.mark.parametrize("first", ["federate", "ledger create"])
def test_federate_and_ledger_create_see_each_others_vaults_of_a_file(tmp_path, first):
    rng = np.random.default_rng(len(first))  # other rows each time: a machine remembers
    np.savez(tmp_path / "rows.npz", x=rng.random((90, 3)), y=rng.integers(0, 2, 90))
    plan = load_plan({"data": {"path": str(tmp_path / "rows.npz"), "clients": 2}}, [], None)
    terms = {"data": tmp_path / "rows.npz", "epsilon": 1.0, "delta": 1e-3, "clip": 1.0}
    works = {
        "federate": lambda: federate.deal(plan, tmp_path / "out"),
        "ledger create": lambda: ledger.create_from_data(tmp_path / "a.vault", **terms),
    }
    works.pop(first)()
    (second,) = works.values()
    with pytest.raises(VaultRefusal, match="already"):
        second()


def test_a_file_of_texts_is_dealt(tmp_path):
    texts = np.array([f"note {i % 7} of {i}" for i in range(90)])
    np.savez(tmp_path / "notes.npz", x=texts, y=np.arange(90) % 2)
    assert fingerprint_file(tmp_path / "notes.npz")[1] == 90


def test_a_run_says_how_long_it_may_take_and_how_to_shorten_it():
    short, long = (
        federate.describe_duration(load_plan(None, [f"rounds.rounds={rounds}"], None))
        for rounds in (10, 200)
    )
    assert short.endswith(": about 40 s.")
    assert "about 13 min. Fewer rounds end sooner" in long
    summed = ["privacy.view=sum", "privacy.honest=2", "rounds.rounds=10"]
    assert "of about 20 s" in federate.describe_duration(load_plan(None, summed, 5))


def test_a_plan_that_was_edited_after_its_run_began_is_refused(tmp_path, monkeypatch):
    """The vaults keep the promise of the plan as it was; the folder must not show another."""
    monkeypatch.setattr(federate, "_lead_run", lambda *about: 1 / 0)
    out = tmp_path / "run"
    with pytest.raises(ZeroDivisionError):
        federate.federate(None, ["privacy.epsilon=4"], out=out, quiet=True)
    with pytest.raises(ZeroDivisionError):
        federate.federate(resume=True, out=out, quiet=True)
    text = (out / "plan.toml").read_text("utf-8")
    assert "epsilon = 4.0" in text
    (out / "plan.toml").write_text(text.replace("epsilon = 4.0", "epsilon = 9.0"), "utf-8")
    with pytest.raises(InputError, match=r"^privacy.epsilon in plan.toml must be 4.0 .*got 9.0"):
        federate.federate(resume=True, out=out, quiet=True)
    (out / "plan.toml").write_text(text, "utf-8")
    stored = json.loads((out / "federation.json").read_text("utf-8"))
    del stored["plan"]  # as older versions wrote it
    (out / "federation.json").write_text(json.dumps(stored), "utf-8")
    with pytest.raises(ZeroDivisionError):
        federate.federate(resume=True, out=out, quiet=True)


def test_a_folder_whose_dealing_was_cut_short_is_no_federation(tmp_path):
    federate.deal(load_plan(None, [], 2), tmp_path / "run")
    (tmp_path / "run" / "plan.toml").unlink()  # it is written last
    with pytest.raises(RunError, match="holds no federation to go on with"):
        federate.load_dealt(tmp_path / "run")


def test_the_servers_rows_come_back_as_they_were(tmp_path):
    held = load_holdings(Plan(data={"name": "digits", "clients": 3}), seed=1)
    federated.save_public(tmp_path / "public.npz", held)
    read = federated.load_public(tmp_path / "public.npz")
    for part in ("validation", "test"):
        before, after = getattr(held, part), getattr(read, part)
        assert before.x.tobytes() == after.x.tobytes()
        assert before.y.tobytes() == after.y.tobytes()
    assert (read.shape, read.classes, read.layout) == (held.shape, held.classes, None)
    assert len(read.train.y) == len(read.samples) == 0  # and nobody else's


@pytest.mark.parametrize(
    "change",
    [
        {"test_y": None},
        {"test_y": np.array([0, 9])},
        {"test_y": np.array([0.5, 1.0])},
        {"test_y": np.zeros(3, np.int64)},
        {"test_x": np.full((2, 4), np.nan)},
        {"test_x": np.zeros((2, 5))},
        {"test_x": np.array([["a"] * 4] * 2)},
        {"validation_x": np.zeros((0, 4)), "validation_y": np.zeros(0, np.int64)},
        {"shape": np.array([5])},
        {"test_x": np.array([[None] * 4] * 2, dtype=object)},
    ],
)
def test_public_rows_that_are_none_are_refused(change, tmp_path):
    good = {"shape": np.array([4]), "classes": np.array(3)}
    for part in federated.PUBLIC_SETS:
        good |= {f"{part}_x": np.zeros((2, 4)), f"{part}_y": np.array([0, 2])}
    np.savez(tmp_path / "good.npz", **good)
    assert len(federated.load_public(tmp_path / "good.npz").test.y) == 2
    bad = {key: value for key, value in (good | change).items() if value is not None}
    np.savez(tmp_path / "bad.npz", **bad)
    with pytest.raises(DataError, match="cannot be read as public rows"):
        federated.load_public(tmp_path / "bad.npz")


def _hold(folder, ready):
    with server_app.lock_run(folder):
        ready.set()
        time.sleep(900)


@pytest.mark.slow
def test_one_process_leads_a_run_and_its_lock_dies_with_it(tmp_path):
    context = multiprocessing.get_context("spawn")
    ready = context.Event()
    other = context.Process(target=_hold, args=(tmp_path, ready))
    other.start()
    try:
        assert ready.wait(900)
        assert int((tmp_path / server_app.LOCK).read_text()) == other.pid
        with (
            pytest.raises(RunError, match="goes on in another process"),
            server_app.lock_run(tmp_path, seconds=0.3),
        ):
            pass
        other.kill()
        with server_app.lock_run(tmp_path, seconds=900):
            assert int((tmp_path / server_app.LOCK).read_text()) == os.getpid()
    finally:
        other.kill()
        other.join()


def _again_and_again(look):
    until = time.monotonic() + 900
    while time.monotonic() < until:
        look()
        time.sleep(0.05)


@pytest.mark.slow
def test_a_server_that_is_killed_is_missed_within_seconds(tmp_path, monkeypatch):
    """Flower would say so a minute later. One that has not begun is waited for, however long."""
    clock = [0.0]
    monkeypatch.setattr(federate, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    context = multiprocessing.get_context("spawn")
    ready = context.Event()
    other = context.Process(target=_hold, args=(tmp_path, ready))
    below = SimpleNamespace(processes=SimpleNamespace(pid=os.getpid()))
    show = progress.SilentDisplay(sys.stdout)
    follow = federate._Follower(tmp_path, below, tmp_path / "progress", show)

    def follow_until(last):
        while clock[0] < last:
            follow()
            clock[0] += 1.0

    follow_until(2 * federate.GONE)  # nobody has led yet
    other.start()
    try:
        assert ready.wait(900)
        assert follow.find_server() == other.pid
        follow_until(clock[0] + 2 * federate.GONE)
        other.kill()
        other.join()
        gone = clock[0]
        with pytest.raises(FederationError, match="the server was killed"):
            follow_until(gone + 2 * federate.GONE)
        assert clock[0] > gone + federate.GONE  # not before it is sure
    finally:
        other.kill()
        other.join()


@pytest.mark.parametrize("status", ["finished", "interrupted"])
def test_a_run_has_finished_when_its_record_says_so(tmp_path, monkeypatch, status):
    """Not when Flower says so: a clock that was set back keeps Flower from noticing."""
    monkeypatch.setattr(federate, "GONE", 0.0)
    below, show = (
        SimpleNamespace(processes=SimpleNamespace(pid=1)),
        progress.SilentDisplay(sys.stdout),
    )
    follow = federate._Follower(tmp_path, below, tmp_path / "progress", show)
    follow.seen = True  # it has led, and is gone
    (tmp_path / "record.json").write_text(f'{{"status": "{status}"}}')
    expected = federate._Finished if status == "finished" else FederationError
    with pytest.raises(expected):
        _again_and_again(follow)


def test_two_that_begin_in_one_folder_leave_the_first_ones_vaults_alone(tmp_path, monkeypatch):
    """Both have seen an empty folder; the second must not clear away what the first has made."""
    out, check = tmp_path / "run", federate._check_plan

    def late(plan, *about):
        federate.deal(plan, out)  # the other one, meanwhile
        return check(plan, *about)

    monkeypatch.setattr(federate, "_check_plan", late)
    with pytest.raises(InputError, match=r"out must be a new or empty folder, .*; another run"):
        federate.federate(None, [], out=out, quiet=True)
    for node in federate.load_dealt(out)[1]:
        assert ledger.verify(Node.load(node).vault).broken is None


def test_one_that_is_refused_leaves_the_folder_of_the_other_alone(tmp_path, monkeypatch):
    """The same command twice: the second finds the first one's vaults, in its own folder."""
    (tmp_path / "t.csv").write_text("a,y\n" + "".join(f"{i % 9},{i % 2}\n" for i in range(99)))
    columns = {"a": [0, 9], "y": ["0", "1"]}
    data = {"path": str(tmp_path / "t.csv"), "label": "y", "columns": columns, "clients": 2}
    out, check = tmp_path / "run", federate._check_plan

    def late(plan, *about):
        federate.deal(plan, out)  # the other one, meanwhile
        return check(plan, *about)

    monkeypatch.setattr(federate, "_check_plan", late)
    with pytest.raises(VaultRefusal, match="have 2 vaults already"):
        federate.federate({"data": data}, [], out=out, quiet=True)
    for node in federate.load_dealt(out)[1]:
        assert ledger.verify(Node.load(node).vault).broken is None


def test_sessions_share_the_keys_of_the_first_that_made_any(tmp_path):
    """A run knows its clients by their keys; a folder without them cannot go on."""
    sessions = [federate._make_session_folder(tmp_path) for _ in range(3)]
    assert [path.name for path in sessions] == ["1", "2", "3"]
    assert federate._find_keys(tmp_path) == sessions[0] / "keys"
    for session in sessions[1:]:  # the first was killed before it had made a key
        (session / "keys").mkdir()
        certificates.find_or_make_node_key(session / "keys", "node0")
    keys = federate._find_keys(tmp_path)
    assert keys == sessions[1] / "keys"
    made = (keys / "node0").read_bytes()
    assert certificates.find_or_make_node_key(keys, "node0").private.read_bytes() == made
    (keys / "node0.pub").write_bytes(b"")  # the disk was full: nobody knows this key
    whole = certificates.find_or_make_node_key(keys, "node0")
    assert whole.private.read_bytes() != made
    assert whole.public.read_bytes().startswith(b"ecdsa-sha2-nistp384 ")


def test_a_run_that_its_second_session_began_goes_on_with_the_keys_of_that(tmp_path):
    """An earlier version made new keys in every session; the first of this run had failed."""
    keys = []
    for _ in range(3):
        (folder := federate._make_session_folder(tmp_path) / "keys").mkdir()
        keys.append(certificates.find_or_make_node_key(folder, "node0"))
    known = certificates.fingerprint_ssh(keys[1].public.read_bytes())
    header = {"members": [], "registered": [[known, None]]}
    meta = np.frombuffer(json.dumps({"header": header}).encode(), np.uint8)
    tank = dict.fromkeys(("capacity", "spent", "opened", "debits"), np.zeros(0))
    with (tmp_path / checkpoint.NAME).open("wb") as file:
        np.savez(file, meta=meta, **tank)
    assert federate._find_keys(tmp_path) == keys[1].public.parent


def test_a_run_whose_keys_are_gone_is_not_resumed(tmp_path, monkeypatch):
    monkeypatch.setattr(federate, "_lead_run", lambda *about: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        federate.federate(None, [], out=tmp_path / "run", quiet=True)
    (tmp_path / "run" / checkpoint.NAME).write_bytes(b"")
    with pytest.raises(RunError, match=r"keys is missing.*put it back"):
        federate.federate(resume=True, out=tmp_path / "run", quiet=True)


def test_a_run_goes_on_although_the_table_that_it_was_dealt_from_is_gone(tmp_path, monkeypatch):
    """The nodes have its rows; begun in a thread, which gets no signals."""
    (tmp_path / "t.csv").write_text("a,y\n" + "".join(f"{i % 9},{i % 2}\n" for i in range(98)))
    columns, began = {"a": [0, 9], "y": ["0", "1"]}, []
    data = {"path": str(tmp_path / "t.csv"), "label": "y", "columns": columns, "clients": 2}
    monkeypatch.setattr(federate, "_lead_run", lambda *about: began.append(about) or 1 / 0)

    def begin():
        with pytest.raises(ZeroDivisionError):
            federate.federate({"data": data}, [], out=tmp_path / "run", quiet=True)

    thread = threading.Thread(target=begin)
    thread.start()
    thread.join()
    (tmp_path / "t.csv").rename(tmp_path / "elsewhere.csv")
    with pytest.raises(ZeroDivisionError):
        federate.federate(resume=True, out=tmp_path / "run", quiet=True)
    assert len(began) == 2


def test_a_start_that_fails_leaves_no_folder_behind(tmp_path, monkeypatch):
    """Half of a federation could neither be started again nor resumed."""

    def fails(_file, **_stated):
        raise DataError("no rows")

    monkeypatch.setattr(federate.ledger, "create_from_node", fails)
    with pytest.raises(DataError):
        federate.federate(None, [], out=tmp_path / "run", quiet=True)
    assert not (tmp_path / "run").exists()


def test_a_run_that_is_stopped_gets_to_write_and_flower_gets_its_signal_back():
    heard = []
    before = signal.signal(signal.SIGTERM, lambda *_: heard.append("Flower's"))
    try:
        with pytest.raises(KeyboardInterrupt), server_app.allow_interrupts():
            _conducts(heard)
        assert heard == ["the record", "Flower's"]
        with server_app.allow_interrupts():
            pass
        signal.raise_signal(signal.SIGTERM)
        assert heard[2:] == ["Flower's"]
    finally:
        signal.signal(signal.SIGTERM, before)
    ran = []
    thread = threading.Thread(target=lambda: [ran.append(1) for _ in [0] if _in_a_thread()])
    thread.start()
    thread.join()
    assert ran == [1]


def _conducts(heard):
    try:
        signal.raise_signal(signal.SIGTERM)
    finally:
        signal.raise_signal(signal.SIGTERM)  # impatience changes nothing
        heard.append("the record")


def _in_a_thread():
    with server_app.allow_interrupts():  # signals belong to the main thread: nothing to do
        return True


def test_a_federation_warns_of_its_rows_as_training_does(tmp_path, monkeypatch, capsys):
    """Before anything is dealt: a patient with several rows is protected less than the ε says."""
    rows = "".join(f"p{i // 3},{i % 9},{i % 2}\n" for i in range(90))
    (tmp_path / "t.csv").write_text("patient_id,a,y\n" + rows, "utf-8")
    columns = {"a": [0, 9], "y": ["0", "1"]}
    data = {"path": str(tmp_path / "t.csv"), "label": "y", "columns": columns, "clients": 2}
    monkeypatch.setattr(federate, "deal", lambda *about, **how: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        federate.federate({"data": data}, out=tmp_path / "run")
    assert "warning: patient_id" in capsys.readouterr().err


@pytest.mark.parametrize(("unit", "delta"), [("record", 0.01), ("client", 0.4)])
def test_a_federation_advises_before_a_vault_is_made(tmp_path, monkeypatch, caplog, unit, delta):
    """After the last round the budgets are spent: who reads it then has paid already."""
    plan = load_plan(None, [f"privacy.delta={delta}", f"local.unit={unit}"], None)
    monkeypatch.setattr(federate, "make_folder", lambda *about: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        federate.deal(plan, tmp_path / "run")
    said = [line for line in caplog.messages if line.startswith(f"delta = {delta} should be below")]
    assert len(said) == 1
