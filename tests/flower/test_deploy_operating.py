"""What an operator does with one machine: set it up by answering questions, and ask how it is."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import stat
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from typer.testing import CliRunner

from sottovoce.cli import commands
from sottovoce.cli import deploy as words
from sottovoce.client import ledger
from sottovoce.client.node import Node
from sottovoce.client.vault import Vault
from sottovoce.errors import SottovoceError
from sottovoce.flower import certificates, deploy, server_app
from support import ROOT
from support.accounts import client_folder
from support.example_record import example

PLAN = """schema = 1
[data]
path = "all.csv"
label = "ill"
client = "ward"
missing = "flag"
columns = { age = [0, 120], ill = ["no", "yes"] }
[local]
clip = 0.5
"""


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A folder with what a client has received, and the options that keep all files in it."""
    monkeypatch.setattr(deploy.os, "geteuid", lambda: 1000)
    monkeypatch.setenv("SOTTOVOCE_STATE", str(tmp_path / "own" / "state"))
    monkeypatch.chdir(tmp_path)
    certificates.make_authority(tmp_path)
    rng = np.random.default_rng(5)
    np.savez(tmp_path / "some.npz", x=rng.normal(size=(60, 4)), y=rng.integers(0, 3, 60))
    lines = [f"{age},{'yes' if age > 50 else 'no'},a" for age in range(20, 90)]
    (tmp_path / "some.csv").write_text("\n".join(["age,ill,ward", *lines]))
    (tmp_path / "plan.toml").write_text(PLAN)
    return SimpleNamespace(
        top=tmp_path,
        node=tmp_path / "data" / "node.toml",
        places=[
            "--folder",
            "keys",
            "--data",
            "data",
            "--state",
            "own",
            "--units",
            "units",
            "--user",
            "ward",
        ],
        typed=["ward-3", "--server", "server.example.org:8000", "--ca", "ca.crt"],
    )


def call(*line, typed=None, monkeypatch=None):
    """Run a command; an error counts as the exit code that `main` gives it."""
    if monkeypatch is not None:
        terminal = SimpleNamespace(stdin=SimpleNamespace(isatty=lambda: True))
        monkeypatch.setattr(words, "sys", terminal)
    done = CliRunner().invoke(commands.app, [str(word) for word in line], input=typed)
    code = done.exit_code
    if isinstance(done.exception, SottovoceError):
        code = 2 if isinstance(done.exception, ValueError) else 1
    return code, done.output, str(done.exception or "")


def test_six_answers_make_a_client(machine, monkeypatch):
    answers = "ward-3\nserver.example.org:8000\n\nsome.npz\n3\n4 1e-6\n"
    code, said, error = call(
        "node", "init", *machine.places, typed=answers, monkeypatch=monkeypatch
    )
    assert code == 0, error
    assert re.findall(r"^(\d)\. ", said, re.MULTILINE)[:6] == list("123456")
    node = Node.load(machine.node)
    with Vault.open(node.vault, dataset=None) as vault:
        policy = vault.policy
    assert (policy.epsilon, policy.delta, policy.samples) == (4.0, 1e-6, 60)
    assert {path.name for path in (machine.top / "units").iterdir()} == {
        "sottovoce-node.service",
        "sottovoce-worker.service",
    }
    assert stat.S_IMODE((machine.top / "data" / "rows.npz").stat().st_mode) == 0o600
    assert "ledger create" not in said  # the vault is made
    assert " 1. Send " in said
    assert call("node", "status", machine.node, "--folder", "keys")[0] == 0


def test_what_was_given_is_not_asked_again(machine, monkeypatch):
    """An answer would count for nothing beside the option."""
    given = ["--server", "server.example.org:8000", "--classes", 3, "--epsilon", 2, "--delta", 1e-7]
    code, said, error = call(
        "node", "init", *given, *machine.places, typed="ward-3\n\nsome.npz\n",
        monkeypatch=monkeypatch,
    )  # fmt: skip
    assert code == 0, error
    assert re.findall(r"^(\d)\. ", said, re.MULTILINE)[:3] == list("134")
    with Vault.open(Node.load(machine.node).vault, dataset=None) as vault:
        assert (vault.policy.epsilon, vault.policy.delta) == (2.0, 1e-7)


def test_without_a_terminal_nothing_is_asked(machine):
    code, said, _ = call("node", "init", *machine.places, typed="ward-3\n")
    assert code == 2
    assert "Missing argument NAME" in said
    assert not machine.node.parent.exists()


def test_a_tables_columns_clip_and_unit_are_those_of_the_plan(machine):
    terms = ["--rows", "some.csv", "--plan", "plan.toml", "--epsilon", 8, "--delta", "1e-5"]
    code, _, error = call("node", "init", *machine.typed, *machine.places, *terms)
    assert code == 0, error
    node = Node.load(machine.node)
    assert node.table["columns"] == {"age": (0.0, 120.0), "ill": ("no", "yes")}
    assert node.table["missing"] == "flag"
    assert node.make_policy(70).clip == 0.5


@pytest.mark.parametrize(
    ("terms", "why"),
    [
        (["--rows", "some.npz", "--epsilon", 8, "--delta", "1e-5"], "classes is missing"),
        (["--rows", "some.csv", "--epsilon", 8, "--delta", "1e-5"], "plan must be a plan whose"),
        (["--rows", "no.npz", "--classes", 3, "--epsilon", 8, "--delta", "1e-5"], "rows must be"),
        (["--rows", "some.npz", "--classes", 3, "--epsilon", -1, "--delta", "1e-5"], "epsilon"),
        (["--rows", "some.npz", "--classes", 3, "--epsilon", 8], "Missing --delta"),
    ],
)
def test_bad_terms_are_refused_before_anything_is_made(machine, terms, why):
    code, said, error = call("node", "init", *machine.typed, *machine.places, *terms)
    assert code == 2
    assert why in said + error
    assert not (machine.top / "keys").exists()


def test_rows_that_a_worker_would_refuse_are_refused_before_anything_is_made(machine):
    terms = ["--rows", "some.npz", "--classes", 2, "--epsilon", 8, "--delta", "1e-5"]
    code, _, error = call("node", "init", *machine.typed, *machine.places, *terms)
    assert (code, "a label of y is not from 0 to 1" in error) == (1, True)
    assert not (machine.top / "keys").exists()


@pytest.fixture
def client(machine):
    """A client with a vault, as `node init` makes it."""
    terms = ["--rows", "some.npz", "--classes", 3, "--epsilon", 8, "--delta", "1e-5"]
    assert call("node", "init", *machine.typed, *machine.places, *terms)[0] == 0
    return machine


def read_status(client, *options):
    return call("node", "status", client.node, "--folder", "keys", *options)


def test_a_new_client_is_warned_of_a_delta_that_promises_nothing(machine):
    terms = ["--rows", "some.npz", "--classes", 3, "--epsilon", 8, "--delta", "0.5"]
    code, said, _ = call("node", "init", *machine.typed, *machine.places, *terms)
    assert (code, "warning: delta = 0.5 should be below 1 / 60 = " in said) == (0, True)


def test_rows_that_have_a_ledger_get_another_by_the_command_that_is_named(machine):
    """`node init` itself takes no word that a second ledger is wanted."""
    terms = ["--rows", "some.npz", "--classes", 3, "--epsilon", 8, "--delta", "1e-5"]
    assert call("node", "init", *machine.typed, *machine.places, *terms)[0] == 0
    for name in ("keys", "units", "data"):
        (machine.top / name).rename(machine.top / f"{name}.old")
    code, _, error = call("node", "init", *machine.typed, *machine.places, *terms)
    assert (code, "--second-ledger" in error) == (1, True)
    words = shlex.split(error.partition("this makes it: sottovoce ")[2])
    assert call(*words)[0] == 1  # without the operator's word
    assert call(*words, "--second-ledger")[0] == 0
    assert read_status(machine)[0] == 0


def test_rows_that_are_there_already_are_not_taken_for_those_that_were_named(machine):
    (machine.top / "data").mkdir()
    (machine.top / "data" / "rows.npz").write_bytes(b"other rows")
    terms = ["--rows", "some.npz", "--classes", 3, "--epsilon", 8, "--delta", "1e-5"]
    code, _, error = call("node", "init", *machine.typed, *machine.places, *terms)
    assert (code, "is there already" in error) == (2, True)
    assert not (machine.top / "keys").exists()


def test_a_status_has_an_exit_code_a_sentence_and_numbers(client):
    code, said, _ = read_status(client, "--json")
    assert code == 0
    status = json.loads(said)
    assert status["healthy"]
    assert status["numbers"]["budget_left_ratio"] == 1.0
    with Vault.open(
        Node.load(client.node).vault, dataset=Node.load(client.node).read_rows().fingerprint
    ) as vault:
        vault.stop("a disk was full")
    code, said, error = read_status(client)
    assert code == 1
    assert "WRONG  vault" in said
    assert "ledger resume" in error
    assert f"SOTTOVOCE_STATE={client.top}" in error  # without it the command is refused
    assert read_status(client, "--prometheus")[0] == 1
    client.node.write_text("schema = 1\n")
    assert read_status(client)[0] == 2


def test_a_missing_vault_and_a_certificate_that_ends_are_not_well(client):
    Node.load(client.node).vault.rename(client.top / "elsewhere")
    assert read_status(client)[0] == 1
    (client.top / "elsewhere").rename(Node.load(client.node).vault)
    assert read_status(client)[0] == 0
    (client.top / "keys" / "ca.crt").unlink()
    assert read_status(client)[0] == 1


SAMPLE = re.compile(r'sottovoce_[a-z_]+\{role="\w+",name="[\w-]+"(,check="[\w -]+")?\} [-+.e\d]+')


def test_what_prometheus_reads_is_public_and_well_formed(client):
    text = read_status(client, "--prometheus")[1]
    assert text.endswith("\n")
    for line in text.splitlines():
        assert line.startswith("# TYPE sottovoce_") or SAMPLE.fullmatch(line), line
    assert 'sottovoce_healthy{role="node",name="ward-3"} 1' in text
    assert "budget_left_ratio" in text
    assert "60" not in re.findall(r"\} (\S+)", text)  # not how many rows there are


def test_a_client_that_does_not_disclose_shows_no_budget(machine):
    (machine.top / "data").mkdir()
    text = 'schema = 1\nname = "w"\nvault = "w.vault"\n[data]\npath = "../some.npz"\nclasses = 3\n'
    text += "[policy]\nepsilon = 8.0\ndelta = 1e-5\nclip = 1.0\ndisclose = false\n"
    machine.node.write_text(text)
    ledger.create_from_node(machine.node)
    said = call("node", "status", machine.node, "--folder", ".", "--prometheus")[1]
    assert "sottovoce_turns" in said
    assert "budget" not in said


@pytest.fixture
def server(machine):
    """A server as `server init` makes it; without runs."""
    places = deploy.ServerPlaces(
        folder=machine.top / "server", state=machine.top / "s", runs=machine.top / "runs",
        units=machine.top / "units", authority=machine.top / "authority",
    )  # fmt: skip
    deploy.init_server(["server.example.org"], places, b"correct horse")
    return places


@pytest.mark.parametrize(
    ("names", "passphrase", "why"),
    [
        (["https://server.example.org"], b"correct horse", "names must be host names"),
        (["server.example.org", "a b"], b"correct horse", "names must be host names"),
        (["server.example.org"], b"short", "passphrase must be at least 8"),
        (["server.example.org"], b"wrong horse", "cannot be read as a key with this passphrase"),
    ],
)
def test_a_server_that_is_refused_can_be_set_up_by_the_next_command(
    machine, root, names, passphrase, why
):
    places = deploy.ServerPlaces(
        machine.top / "server", *(machine.top / key for key in ("s", "runs", "units", "authority"))
    )
    if why.startswith("cannot"):
        places.authority.mkdir()
        certificates.make_authority(places.authority, passphrase=b"correct horse")
    before, accounts = read_tree(machine.top), {**root.accounts}
    with pytest.raises(SottovoceError, match=why):
        deploy.init_server(names, places, passphrase)
    assert (read_tree(machine.top), root.accounts) == (before, accounts)
    deploy.init_server(["server.example.org"], places, b"correct horse")


def read_server_status(server):
    return call("server", "status", "--folder", server.folder, "--runs", server.runs, "--json")


def write_run(folder, status):
    """The folder of a run whose record says how it ended."""
    record, _ = example(rounds=3)
    folder.mkdir(parents=True)
    (folder / "server.lock").write_text("1")
    lines = [json.dumps(entry) + "\n" for entry in record["rounds"]]
    (folder / "rounds.jsonl").write_text("".join(lines))
    (folder / "record.json").write_text(json.dumps({**record, "status": status}))


@pytest.mark.parametrize("status", ["finished", "failed", "interrupted"])
def test_a_run_that_did_not_finish_is_not_well(server, status):
    write_run(server.runs / "study" / "run", status)
    code, said, error = read_server_status(server)
    assert (code, json.loads(said)["healthy"]) == (
        (0, True) if status == "finished" else (1, False)
    )
    assert json.loads(said)["checks"][-1]["looks"].split(": ")[1].startswith(f"{status}, 3 rounds")
    if status != "finished":
        assert f"is {status}" in error
        assert "in another folder" in error  # there is no checkpoint to go on from
        (server.runs / "study" / "run" / "checkpoint.npz").write_bytes(b"")
        assert "resume=true" in read_server_status(server)[2]


def test_a_run_that_ended_before_its_first_round_is_not_well(server):
    """Nobody greeted, say: it has neither rounds nor a record, and an older run had finished."""
    write_run(server.runs / "old", "finished")
    for name in ("rounds.jsonl", "record.json", "server.lock"):
        os.utime(server.runs / "old" / name, ns=(1, 1))
    with server_app.lock_run(server.runs / "new"):
        code, said, _ = read_server_status(server)  # it waits for its clients
    assert (code, "new: running, no round" in said) == (0, True)
    code, said, error = read_server_status(server)
    assert (code, json.loads(said)["healthy"], "new is failed" in error) == (1, False, True)


def test_a_client_whose_rows_are_gone_is_not_well(client):
    rows = Node.load(client.node).data
    rows.rename(client.top / "elsewhere")
    code, _, error = read_status(client)
    assert (code, f"{rows} is missing or cannot be read" in error) == (1, True)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become a client's account")
@pytest.mark.parametrize("mode", [0o600, 0o700])  # of root's file, or of root's folder
def test_rows_that_the_clients_account_cannot_read_are_not_well(tmp_path, mode):
    with client_folder() as folder:
        rows = folder / "roots" / "rows.npz"
        rows.parent.mkdir(mode=0o755 if mode == 0o600 else mode)
        rows.touch(mode=0o600)
        text = f'schema = 1\nname = "ward"\nvault = "v"\n[data]\npath = "{rows}"\nclasses = 3\n'
        (folder / "node.toml").write_text(f"{text}[policy]\nepsilon = 8\ndelta = 1e-5\nclip = 1\n")
        words = ["node", "status", folder / "node.toml", "--folder", folder, "--state", folder]
        done = subprocess.run(
            [sys.executable, "-m", "sottovoce", *words],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            capture_output=True, text=True, timeout=100, cwd=folder,
        )  # fmt: skip
    assert (done.returncode, "WRONG  node" in done.stdout) == (1, True), done.stderr
    assert f"{rows} is missing or cannot be read" in done.stderr


YEARS = 0.98 * timedelta(days=365)


def test_a_server_says_when_a_certificate_or_a_run_is_not_well(machine, server, monkeypatch):
    places = server
    options = ["server", "status", "--folder", places.folder, "--runs", places.runs]
    code, said, error = call(*options)
    assert code == 0, error
    assert "no run in" in said
    (places.runs / "study" / "run").mkdir(parents=True)
    (places.runs / "study" / "run" / "rounds.jsonl").write_text("not a round\n")
    code, _, error = call(*options)
    assert (code, "damaged" in error) == (1, True)
    shutil.rmtree(places.runs / "study")
    now = datetime.now(UTC)
    monkeypatch.setattr(certificates, "datetime", SimpleNamespace(now=lambda _: now + YEARS))
    monkeypatch.setattr(deploy, "datetime", certificates.datetime)
    code, said, error = call(*options, "--json")
    assert code == 1
    assert not json.loads(said)["healthy"]
    assert "server renew" in error  # and what it says to do does help
    words = shlex.split(re.search(r"`sottovoce (.*)`", error).group(1))
    (machine.top / "passphrase").write_text("correct horse")
    more = ("--authority", places.authority, "--passphrase-file", machine.top / "passphrase")
    assert call(*words, *more)[0] == 0
    assert call(*options)[0] == 0
    monkeypatch.setattr(certificates.datetime, "now", lambda _: now + 5.1 * YEARS)
    code, said, error = call(*options, "--json")  # the authority itself has almost ended
    assert (code, "server renew" in error, "sottovoce server init" in error) == (1, False, True)


def read_tree(folder):
    """Every file and folder below this one, with mode, owner and content."""
    return {
        path: (path.stat().st_mode, path.stat().st_uid, path.is_file() and path.read_bytes())
        for path in folder.rglob("*")
    }


@pytest.mark.parametrize("other", [(), ("--folder", "other/keys"), ("--units", "other/units")])
def test_a_second_client_is_refused_before_anything_is_written(client, other):
    """It would take over the first one's units, certificate and keys."""
    before = read_tree(client.top)
    places = ["--folder", "keys", "--units", "units", "--data", "other/rows", "--state", "other/s"]
    second = ["ward-5", "--server", "b.example.org:8000", "--ca", "ca.crt", "--user", "ward-5"]
    code, _, error = call("node", "init", *second, *places, *other)
    assert (code, "a machine has one client" in error) == (2, True)
    assert "\n" not in error
    assert read_tree(client.top) == before


def test_a_server_takes_over_no_folder_that_has_files(machine):
    """What lay in it, another's keys perhaps, would belong to the services' user."""
    (machine.top / "etc" / "authority").mkdir(parents=True)
    certificates.make_authority(machine.top / "etc" / "authority")
    before = read_tree(machine.top)
    at = {key: machine.top / key for key in ("state", "runs", "units")}
    places = deploy.ServerPlaces(folder=machine.top / "etc", authority=machine.top / "ca", **at)
    with pytest.raises(SottovoceError, match="folder must be new or empty"):
        deploy.init_server(["server.example.org"], places, b"correct horse")
    assert read_tree(machine.top) == before


@pytest.fixture
def root(monkeypatch):
    """Root, with accounts of its own; every change of an owner is noted, with what it was of."""
    accounts, given = {"backup": 34}, []

    def find(name):
        return SimpleNamespace(pw_uid=accounts[name], pw_gid=accounts[name] + 1)

    def give(file, uid, gid, **_):
        if isinstance(file, int):
            file = Path(f"/proc/self/fd/{file}").readlink()
        given.append((file, file.stat(), (uid, gid)))

    def add(words, **_):
        accounts[words[-1]] = 4242
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr(deploy.os, "geteuid", lambda: 0)
    monkeypatch.setattr(deploy.os, "fchown", give)
    monkeypatch.setattr(deploy.os, "chown", give)
    monkeypatch.setattr(deploy.pwd, "getpwnam", find)
    monkeypatch.setattr(deploy.subprocess, "run", add)
    monkeypatch.setattr(deploy.Path, "chmod", lambda path, mode: modes.append(path))
    modes = []
    return SimpleNamespace(accounts=accounts, given=given, modes=modes)


def test_keys_have_mode_and_owner_before_they_have_content(machine, root):
    at = {key: machine.top / key for key in ("folder", "data", "state", "units")}
    node = deploy.NodePlaces("ward-3", "server.example.org:8000", machine.top / "ca.crt", **at)
    terms = deploy.NodeTerms(machine.top / "some.npz", 8.0, 1e-5, classes=3)
    deploy.init_node(node, terms)
    server = deploy.ServerPlaces(
        machine.top / "server", *(machine.top / key for key in ("s", "runs", "units", "authority"))
    )
    deploy.init_server(["server.example.org"], server, b"correct horse")
    files = {path: (found, owner) for path, found, owner in root.given if path.is_file()}
    names = {path.name for path in files}
    assert names >= {"ward-3", "ward-3.secret", "server.key", "link.key", "worker.secret"}
    assert names >= {"rows.npz", "node.toml", "config.toml", "nginx.conf"}
    for path, (found, owner) in files.items():
        assert (found.st_size, stat.S_IMODE(found.st_mode), owner) == (0, 0o600, (4242, 4243)), path
        assert path.stat().st_size > 0
    assert not names & {path.name for path in root.modes}
    assert "ca.key" not in names  # it stays root's


@pytest.mark.parametrize("user", [None, "ward-3"])
def test_a_key_is_given_to_no_account_that_others_use(machine, root, user):
    at = {key: machine.top / key for key in ("folder", "data", "state", "units")}
    node = deploy.NodePlaces("backup", "a.example:1", machine.top / "ca.crt", user=user, **at)
    if user is None:
        before = read_tree(machine.top)
        with pytest.raises(SottovoceError, match="backup is a user of this machine already"):
            deploy.init_node(node)
        assert read_tree(machine.top) == before
    else:
        deploy.init_node(node)
        assert {owner for _, _, owner in root.given} == {(4242, 4243)}


def test_a_printed_step_runs_none_of_a_clients_code_as_root(machine, root):
    at = {key: machine.top / key for key in ("folder", "data", "state", "units")}
    node = deploy.NodePlaces("ward-3", "a.example:1", machine.top / "ca.crt", **at)
    (line,) = [line for line in deploy.init_node(node).splitlines() if "--check" in line]
    assert line.split()[:5] == ["runuser", "-u", "ward-3", "--", "env"]


def test_a_name_that_no_account_can_have_says_which_option_to_give(machine):
    code, _, error = call("node", "init", "3.ward", *machine.typed[1:], "--folder", "keys")
    assert (code, "--user" in error) == (2, True)
    assert call("node", "init", "3.ward", *machine.typed[1:], *machine.places)[0] == 0


@pytest.mark.parametrize(("said", "kept"), [("true", "old\n"), ("echo new; false", "new\n")])
def test_the_page_keeps_old_numbers_where_there_are_no_new_ones(tmp_path, said, kept):
    """An empty file would be young, and no alarm would ring where the node file is broken."""
    page = (ROOT / "docs" / "deploy.md").read_text("utf-8")
    line = re.search(r"`\* \* \* \* \* root (cd \S+ && .*)`", page).group(1)
    line = re.sub(r"(?<=cd )\S+", str(tmp_path), line)
    line = re.sub(r"/opt/\S+ node status \S+ --prometheus", f"sh -c '{said}'", line)
    (tmp_path / "ward-3.prom").write_text("old\n")
    subprocess.run(["sh", "-c", line], check=False)
    assert (tmp_path / "ward-3.prom").read_text() == kept
