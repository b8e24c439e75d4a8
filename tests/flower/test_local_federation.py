"""`sottovoce federate` as a user meets it: real processes, real vaults, TLS, kills and Ctrl-C.

One federation lives through it all: a SuperNode is killed with -9, the command is interrupted, and
the run is resumed to its end. What it leaves behind is held against the promises.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import tomllib
from importlib import resources
from pathlib import Path
from types import SimpleNamespace

import jsonschema
import numpy as np
import pytest
from cryptography.hazmat.primitives import serialization

from sottovoce.client import messages
from sottovoce.client.vault import Vault
from sottovoce.flower import local
from sottovoce.flower.local import Link
from sottovoce.flower.transport import fingerprint
from sottovoce.reports.watch import RunsFolder
from support.devices import digest
from support.federate_command import Command, answers_of, nodes_of, record_of, running
from support.federations import replayed, same
from support.processes import lives, until

pytestmark = pytest.mark.slow

ROUNDS = 10
SCHEMA = json.loads(
    resources.files("sottovoce").joinpath("schemas", "record.json").read_text("utf-8")
)


@pytest.fixture(scope="module")
def story(tmp_path_factory):
    """A federation through a killed node, Ctrl-C and a resume."""
    top = tmp_path_factory.mktemp("a federation")  # a path with a space in it
    out = top / "run"
    settings = ("--set", f"rounds.rounds={ROUNDS}", "--keep-uploads", "--deadline", 120)
    first = Command(top / "first.log", "--out", out, *settings)
    again = None
    try:
        first.until_round(1)
        nodes = running(first.below(), "flower-supernode")
        assert len(nodes) == 3
        answers = tuple(local.is_answering(link) for link in links(out / "flower" / "1"))
        os.kill(nodes[0], signal.SIGKILL)
        done = out / "rounds.jsonl"  # rounds may be shown late, several at once
        assert until(lambda: done.read_text("utf-8").count("\n") >= 4, 900.0)
        back = running(first.below(), "flower-supernode")
        (live,) = RunsFolder(out).look()  # as the page of `sottovoce watch` sees it
        # A vault that the test holds keeps the run in the middle of a round until it is stopped.
        with Vault.open(nodes_of(out)[0].vault, dataset=None, wait=900.0):
            first.process.send_signal(signal.SIGINT)
            assert until(lambda: (out / "record.json").exists(), 900.0), first.log.read_text()
        code = first.end()
        left = [pid for pid in first.seen if lives(pid)]
        stopped = json.loads((out / "record.json").read_text("utf-8"))
        files = {path.name for path in out.iterdir()}
        spent = {node.name: answers_of(node) for node in nodes_of(out)}
        again = Command(top / "again.log", "--resume", "--out", out, "--json")
        resumed = again.end()
    finally:
        first.stop()
        if again is not None:
            again.stop()
    return SimpleNamespace(
        out=out, nodes=nodes, answers=answers, back=back, code=code, left=left, live=live,
        stopped=stopped, files=files, spent=spent, resumed=resumed, first=first, again=again,
        said=(top / "first.log").read_text(), last=(top / "again.log").read_text(),
    )  # fmt: skip


def links(sitting):
    """The SuperLink of a sitting, with TLS and without."""
    known = tomllib.loads((sitting / "home" / "superlink" / "config.toml").read_text())
    own = known["superlink"][local.CONNECTION]
    return Link(own["address"], Path(own["root-certificates"])), Link(own["address"], None)


def it_ends_well_and_its_record_says_what_it_was(story):
    assert story.resumed == 0, story.last
    record = record_of(story.out)
    jsonschema.validate(record, SCHEMA)
    assert (record["engine"], record["noise"], record["seed"]) == ("flower", "secure", None)
    assert (record["status"], record["result"]["rounds_used"]) == ("finished", ROUNDS)
    assert record["versions"]["flwr"]
    assert "insecure-transport" not in record["guarantee"]["not_covered"]
    assert "fresh-vaults" in record["guarantee"]["not_covered"]  # made for this run alone
    assert [entry["t"] for entry in record["rounds"]] == list(range(ROUNDS))
    assert json.loads(story.last.splitlines()[-1]) == record
    assert (story.out / "report.html").stat().st_size > 10_000
    assert not (story.out / "checkpoint.npz").exists()


def it_can_be_watched(story):
    assert story.live.status == "running"
    assert 4 <= story.live.done <= story.live.horizon == ROUNDS
    assert len(story.live.names) == 3
    assert 0 < story.live.left < 1
    (over,) = RunsFolder(story.out).look()
    assert (over.status, over.done) == ("finished", ROUNDS)


def it_learns(story):
    """Chance is 10 %; 30 of 30 simulations of this plan reach 48 % or more, and a lower loss."""
    record = record_of(story.out)
    first, last = record["rounds"][0]["validation_loss"], record["rounds"][-1]["validation_loss"]
    assert last < first
    assert record["result"]["test_accuracy"] > 0.25


def it_was_encrypted_and_its_nodes_authenticated(story):
    """In plain words the SuperLink does not answer; a node's key is that of the run."""
    assert story.answers == (True, False)
    keys = [p.read_bytes() for p in story.out.glob("flower/*/keys/node?.pub")]
    assert len(set(keys)) == len(keys) == 3
    known = {client["key"] for client in record_of(story.out)["clients"]}
    pem = serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    loaded = [serialization.load_ssh_public_key(key).public_bytes(*pem) for key in keys]
    assert {fingerprint(key) for key in loaded} == known
    authorities = [p.read_bytes() for p in story.out.glob("flower/*/certificates/ca.crt")]
    assert len(set(authorities)) == 2


def a_killed_supernode_came_back_and_missed_little(story):
    assert len(story.back) == 3
    assert story.nodes[0] not in story.back
    uploads = [entry["uploads"] for entry in record_of(story.out)["rounds"]]
    assert uploads[0] == 3
    assert min(uploads) >= 2
    assert uploads[-1] == 3


def ctrl_c_leaves_no_process_and_a_run_that_can_go_on(story):
    assert story.code == 130, story.said
    assert len(story.first.seen) >= 1 + 2 + 6
    assert story.left == []
    assert [pid for pid in story.again.seen if lives(pid)] == []
    assert story.stopped["status"] == "interrupted"
    assert story.stopped["result"]["rounds_used"] >= 4
    assert {"checkpoint.npz", "model.npz", "report.html"} <= story.files
    assert f"sottovoce federate --resume --out {shlex.quote(str(story.out))}" in story.said
    assert "Traceback" not in story.said


def nothing_is_debited_twice(story):
    """One reserve a round at most, and what was sent before the stop was sent again, not anew."""
    asked = dict.fromkeys(range(3), 0)
    for entry in record_of(story.out)["rounds"]:
        for i in entry["cohort"]:
            asked[i] += 1
    for i, node in enumerate(nodes_of(story.out)):
        with Vault.open(node.vault, dataset=None) as vault:
            reserves = [(entry.run, entry.t) for entry in vault.entries()]
        assert len(set(reserves)) == len(reserves) <= ROUNDS
        assert len({run for run, _ in reserves}) == 1
        answers = answers_of(node)
        assert len(answers) >= asked[i]
        before = story.spent[node.name]
        assert all(answers[key] == blob for key, blob in before.items())


def the_uploads_give_the_model_bit_for_bit(story):
    models = replayed(story.out)
    assert sorted(models) == list(range(ROUNDS))
    with np.load(story.out / "model.npz") as stored:
        assert same(models[ROUNDS - 1], {name: stored[name] for name in stored.files})
    kept = [blob for node in nodes_of(story.out) for blob in answers_of(node).values()]
    for path in (story.out / "uploads").iterdir():  # what was averaged, a vault has stored
        assert digest(path.read_bytes()) in kept
        assert messages.unpack(path.read_bytes())[0]["kind"] == "upload"


def no_log_holds_more_than_kinds_of_errors(story):
    for log in story.out.glob("flower/*/logs/*.worker.log"):
        for line in log.read_text().splitlines():
            assert "Traceback" not in line, log
    secrets = [p for p in story.out.glob("flower/*/keys/*") if p.suffix != ".pub"]
    assert secrets
    assert all(p.stat().st_mode & 0o077 == 0 for p in secrets)


def test_a_federation_lives_through_it_all(story):
    """One test: its federation takes minutes, and workers that share tests would each run one."""
    for check in (
        it_ends_well_and_its_record_says_what_it_was,
        it_can_be_watched,
        it_learns,
        it_was_encrypted_and_its_nodes_authenticated,
        a_killed_supernode_came_back_and_missed_little,
        ctrl_c_leaves_no_process_and_a_run_that_can_go_on,
        nothing_is_debited_twice,
        the_uploads_give_the_model_bit_for_bit,
        no_log_holds_more_than_kinds_of_errors,
    ):
        check(story)
