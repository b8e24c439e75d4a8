"""`sottovoce federate` in the sum view: five real clients over Flower, one killed in the middle."""

from __future__ import annotations

import os
import signal
from types import SimpleNamespace

import pytest

from sottovoce.client.vault import Vault
from support.federate_command import Command, nodes_of, record_of, running
from support.processes import lives

pytestmark = pytest.mark.slow

ROUNDS, HONEST, CORRUPT = 3, 2, 1
WORDS = (
    *("--clients", 5, "--set", 'privacy.view="sum"', "--set", f"privacy.honest={HONEST}"),
    *("--set", f"privacy.corrupt={CORRUPT}", "--set", f"rounds.rounds={ROUNDS}"),
)


@pytest.fixture(scope="module")
def story(tmp_path_factory):
    """A federation whose first worker is killed with -9 after the first round."""
    top = tmp_path_factory.mktemp("sums")
    command = Command(top / "log", "--out", top / "run", "--deadline", 120, *WORDS)
    try:
        command.until_round(1)
        workers = running(command.below(), "sottovoce.flower.worker")
        os.kill(workers[0], signal.SIGKILL)
        code = command.end()
    finally:
        command.stop()
    said = command.log.read_text()
    return SimpleNamespace(out=top / "run", workers=workers, code=code, said=said, command=command)


def it_ends_well_and_states_both_promises(story):
    assert story.code == 0, story.said
    record = record_of(story.out)
    assert (record["status"], record["result"]["rounds_used"]) == ("finished", ROUNDS)
    assert record["plan"]["privacy"]["view"] == "sum"
    told = record["guarantee"]
    assert told["epsilon_alone"] > told["epsilon"]
    words = " ".join(story.said.split())
    assert "whatever anyone does" in words
    assert f"up to {CORRUPT} of the other clients" in words


def the_killed_client_missed_little(story):
    """Its worker comes back; the sum needs honest + corrupt of the five, and a round has them."""
    assert len(story.workers) >= 5  # a worker forks for a moment
    uploads = [entry["uploads"] for entry in record_of(story.out)["rounds"]]
    assert uploads[0] == 5
    assert min(uploads) >= HONEST + CORRUPT
    assert [pid for pid in story.command.seen if lives(pid)] == []


def vaults_and_record_agree(story):
    """Both accounts of every vault; one stored input, one set and one cohort a round."""
    record = record_of(story.out)
    for client, node in zip(record["clients"], nodes_of(story.out), strict=True):
        with Vault.open(node.vault, dataset=None) as vault:
            unit = vault.capacity / 2**50
            assert vault.spent <= vault.limit
            assert vault.spent < vault.alone <= min(HONEST * vault.spent, vault.limit_alone)
            assert client["spent"] <= unit * vault.spent * (1 + 1e-9)
            assert client["spent_alone"] <= unit * vault.alone * (1 + 1e-9)
            lines = [(line.kind, line.facts) for line in vault.lines()]
        stored = [(f["run"], f["t"]) for kind, f in lines if kind == "store"]
        noted = [(f["run"], f["t"], f["step"]) for kind, f in lines if kind == "note"]
        assert len(set(stored)) == len(stored) <= ROUNDS
        assert len(set(noted)) == len(noted)


def no_single_upload_is_kept_or_logged(story):
    assert not list(story.out.glob("uploads/*"))
    for log in story.out.glob("flower/*/logs/*.worker.log"):
        assert "Traceback" not in log.read_text()
    secrets = [*story.out.glob("nodes/*/*.secrets"), *story.out.glob("nodes/*/sum-key.pem")]
    assert len(secrets) == 10
    assert all(path.stat().st_mode & 0o077 == 0 for path in secrets)


def test_a_federation_over_flower_whose_server_learns_only_sums(story):
    """One test: its federation takes minutes, and workers that share tests would each run one."""
    for check in (
        it_ends_well_and_states_both_promises,
        the_killed_client_missed_little,
        vaults_and_record_agree,
        no_single_upload_is_kept_or_logged,
    ):
        check(story)
