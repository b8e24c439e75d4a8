"""`sottovoce ledger` as an operator meets it: statements, checks, certificates, refusals."""

from __future__ import annotations

import json
import math
import os
import pwd
import shutil
import sqlite3
import subprocess
import sys
from dataclasses import replace
from html.parser import HTMLParser
from importlib import resources

import jsonschema
import numpy as np
import pytest

from sottovoce.client import device, ledger
from sottovoce.client import vault as vaults
from sottovoce.client.node import Node
from sottovoce.client.vault import Policy, Vault, fingerprint, fingerprint_file
from sottovoce.errors import DatasetChanged, InputError, PolicyRefusal, RunError, VaultRefusal
from sottovoce.privacy.tank import FULL
from sottovoce.reports.certificate import export_certificate, render_certificate
from support.command_line import run_command
from support.hostile_values import assert_escaped
from support.vault_damage import unguarded_file
from support.vault_play import request

SCHEMA = json.loads(
    resources.files("sottovoce").joinpath("schemas/certificate.json").read_text("utf-8")
)
SHARE = FULL // 90


@pytest.fixture(autouse=True)
def _machine(tmp_path_factory, monkeypatch):
    """Every test here has a machine of its own."""
    monkeypatch.setenv("SOTTOVOCE_STATE", str(tmp_path_factory.mktemp("state")))


@pytest.fixture
def rows(tmp_path):
    path = tmp_path / "rows.npz"
    rng = np.random.default_rng(1)
    np.savez(path, x=rng.normal(size=(143, 5)), y=rng.integers(0, 2, 143))
    return path


@pytest.fixture
def place(tmp_path, rows):
    """A vault with two runs, burnt debits, a hostile server's name and a tightened policy."""
    path = tmp_path / "ward.vault"
    ledger.create_from_data(path, data=rows, epsilon=8, delta=1e-5, clip=1.0)
    with Vault.open(path, dataset=fingerprint_file(rows)[0]) as vault:
        for run, rounds, server in (("run-a", 4, "hospital"), ("run-b", 3, "<script>x</script>")):
            for t in range(rounds):
                if t == 2:
                    vault.reserve(run, t, request(run, t), [SHARE], server=server, facts={})
                paid = vault.reserve(
                    run, t, request(run, t), [SHARE, SHARE], server=server, facts={"horizon": 9}
                )
                vault.store(paid, f"{run} {t}".encode())
        vault.tighten(replace(vault.policy, epsilon=6.0))
    return path


def command(*words: object) -> subprocess.CompletedProcess[str]:
    return run_command("ledger", *words)


# The statement


def test_the_statement_adds_up_and_keeps_its_schema(place):
    told = ledger.read_statement(place)
    jsonschema.validate(told.to_json(), SCHEMA)
    policy = Policy(6, 1e-5, 143, 1.0)
    assert told.capacity <= policy.capacity()
    assert told.capacity == pytest.approx(policy.capacity(), rel=1e-12)
    assert (told.answered, told.runs, len(told.releases)) == (7, 2, 9)
    assert told.spent == pytest.approx(math.fsum(r["mu"] ** 2 for r in told.releases), rel=1e-9)
    assert told.left == pytest.approx(1 - sum(r["share"] for r in told.releases), rel=1e-9)
    burnt = [(r["run"], r["t"]) for r in told.releases if not r["answered"]]
    assert burnt == [("run-a", 2), ("run-b", 2)]
    assert (told.guarantee.budget.epsilon, told.policy.epsilon) == (8, 6)
    assert [note["kind"] for note in told.notes] == ["tighten"]


def test_a_delta_that_would_allow_a_record_to_be_published_is_warned_of_and_certified(
    tmp_path, rows
):
    """At δ ≥ 1/n, publishing one record of n outright keeps the promise: 143 records here."""
    terms = ("--data", rows, "--epsilon", 8, "--clip", 1, "--second-ledger")
    fine = command("create", tmp_path / "fine.vault", *terms, "--delta", 0.0069)
    assert (fine.returncode, fine.stderr) == (0, "")
    loose = command("create", tmp_path / "loose.vault", *terms, "--delta", 0.007)
    assert loose.returncode == 0
    assert loose.stderr == (
        "warning: delta = 0.007 should be below 1 / 143 = 0.00699 for a client of 143 records, it "
        "would allow one of them to be published outright; choose one well below that\n"
    )
    whole = command(
        "create", tmp_path / "whole.vault", *terms, "--delta", 0.007, "--unit", "client"
    )
    assert (whole.returncode, whole.stderr) == (
        0,
        "",
    )  # how many other clients there are is unknown
    for name in ("fine", "loose"):
        told = ledger.read_statement(tmp_path / f"{name}.vault")
        export_certificate(tmp_path / f"{name}.vault", tmp_path / name)
        page = (tmp_path / name / "certificate.html").read_text("utf-8")
        certificate = json.loads((tmp_path / name / "certificate.json").read_text("utf-8"))
        for words in (
            ledger.format_statement(told).replace("\n", " "),
            page,
            certificate["guarantee"]["text"],
        ):
            assert ("would allow one of them to be published outright" in words) == (
                name == "loose"
            )


def test_the_text_says_what_the_numbers_say(place):
    text = ledger.format_statement(ledger.read_statement(place))
    told = ledger.read_statement(place)
    for words in ("7 uploads in 2 runs", "2 debits burnt", "hospital", "(8, 1e-05) for one record",
                  "(6, 1e-05) by exact", "replace-one",
                  f"{math.floor(1e4 * told.left) / 100:.2f} % left", told.vault):  # fmt: skip
        assert words in text
    assert text.count("burnt, no upload") == 2
    few = ledger.format_statement(told, most=2)
    assert "and 7 before these" in few
    assert len(few.splitlines()) < len(text.splitlines())


def test_tightening_after_a_release_is_no_promise_for_the_past(tmp_path, rows):
    """Only the cap that stood at the first release holds: later ones may depend on releases."""
    path, data = tmp_path / "late.vault", fingerprint_file(rows)[0]
    ledger.create_from_data(path, data=rows, epsilon=8, delta=1e-5, clip=1.0)
    with Vault.open(path, dataset=data) as vault:
        vault.tighten(replace(vault.policy, epsilon=7.0))  # nothing is released: a new promise
    assert ledger.read_statement(path).guarantee.budget.epsilon == 7
    with Vault.open(path, dataset=data) as vault:
        vault.reserve("run", 0, request("run", 0), [SHARE], server="s", facts={})
        vault.tighten(replace(vault.policy, epsilon=3.0, delta=1e-6, calibration="zcdp"))
        assert (vault.policy.epsilon, vault.promised.epsilon) == (3.0, 7.0)
    told = ledger.read_statement(path)
    assert (told.guarantee.budget.epsilon, told.guarantee.budget.delta) == (7.0, 1e-5)
    assert told.guarantee.calibration == "exact"
    assert told.to_json()["guarantee"]["epsilon"] == 7
    assert told.capacity <= Policy(3, 1e-6, 143, 1.0, calibration="zcdp").capacity()
    text = ledger.format_statement(told)
    assert "(7, 1e-05) for one record" in text
    assert "nothing is released beyond (3, 1e-06)" in text
    jsonschema.validate(told.to_json(), SCHEMA)


def test_terms_tightened_after_a_release_are_not_told_of_the_past(tmp_path, rows):
    """A statement speaks of everything released: it names the loosest terms, and since when not."""
    path, data = tmp_path / "late.vault", fingerprint_file(rows)[0]
    ledger.create_from_data(path, data=rows, epsilon=8, delta=1e-5, clip=5.0, floor=1.3)
    with Vault.open(path, dataset=data) as vault:
        vault.tighten(replace(vault.policy, clip=4.0))  # nothing is released: a new promise
        reserved = vault.reserve("run", 0, request("run", 0), [vault.ceiling], server="s", facts={})
        vault.store(reserved, b"x")
        for tighter in (
            {"clip": 0.5, "max_rounds": 20},
            {"clip": 0.1, "floor": 20.0, "disclose": False},
            {"epsilon": 7.0},
        ):
            vault.tighten(replace(vault.policy, **tighter))
    told, folder = export_certificate(path, tmp_path / "out")
    assert 1 / told.releases[0]["mu"] < 1.4  # far less noise than the floor of today
    lines = {note["text"]: note["seq"] for note in told.notes}
    cut, hid = sorted(lines.values())[1:3]
    page = " ".join(Page((folder / "certificate.html").read_text("utf-8")).words)
    for text in (page, ledger.format_statement(told)):
        assert f"at most 4 (at most 0.1 since line {hid})" in text
        assert f"at least 1.3 (at least 20 since line {hid})" in text
    text = ledger.format_statement(told)
    assert f"at most 1,000 (at most 20 since line {cut}) rounds a run" in text
    assert f"disclosed to servers (not disclosed since line {hid})" in text
    assert lines["the policy was tightened: clip 4.0 → 0.5, max_rounds 1000 → 20"] == cut
    stored = json.loads((folder / "certificate.json").read_text("utf-8"))
    jsonschema.validate(stored, SCHEMA)
    held = {name: (stored["promised"][name], stored["policy"][name]) for name in stored["policy"]}
    assert (held["clip"], held["floor"], held["disclose"]) == ((4, 0.1), (1.3, 20), (True, False))
    assert held["epsilon"][0] == stored["guarantee"]["epsilon"]


def test_other_records_are_told_with_their_number(tmp_path, rows):
    path, other = tmp_path / "ward.vault", tmp_path / "other.npz"
    ledger.create_from_data(path, data=rows, epsilon=8, delta=1e-5, clip=1.0)
    np.savez(other, x=np.ones((50, 5)), y=np.zeros(50, int))
    ledger.rebind(path, data=other, overlap="some")
    told = ledger.read_statement(path)
    assert [n["text"] for n in told.notes] == [
        "the records changed; all debits stayed: samples 143 → 50"
    ]


def test_before_the_first_release_the_terms_of_sums_are_not_certified_as_final(tmp_path, rows):
    """They are free until then: what an early certificate says of sums may not be the promise."""
    path, words = tmp_path / "ward.vault", "terms of sums ([policy.sum]) may still change until"
    ledger.create_from_data(path, data=rows, epsilon=8, delta=1e-5, clip=1.0)
    for terms in ({}, {"honest": 5, "corrupt": 1}):
        with Vault.open(path, dataset=fingerprint_file(rows)[0]) as vault:
            vault.tighten(replace(vault.policy, **terms))
        told = ledger.read_statement(path)
        assert words in render_certificate(told)
        assert words in ledger.format_statement(told)
    with Vault.open(path, dataset=fingerprint_file(rows)[0]) as vault:
        vault.reserve("run", 0, request("run", 0), [SHARE], server="s", facts={})
    told = ledger.read_statement(path)
    assert words not in render_certificate(told)
    assert words not in ledger.format_statement(told)


def test_more_records_can_make_delta_too_large(tmp_path, rows):
    """δ below 1/143 at the first release, and not below 1/400 of the records that came later."""
    path, more = tmp_path / "ward.vault", tmp_path / "more.npz"
    ledger.create_from_data(path, data=rows, epsilon=8, delta=5e-3, clip=1.0)
    with Vault.open(path, dataset=fingerprint_file(rows)[0]) as vault:
        vault.reserve("run", 0, request("run", 0), [SHARE], server="s", facts={})
    assert "loose-delta" not in ledger.read_statement(path).guarantee.not_covered
    np.savez(more, x=np.ones((400, 5)), y=np.zeros(400, int))
    ledger.rebind(path, data=more, overlap="some")
    assert "loose-delta" in ledger.read_statement(path).guarantee.not_covered
    ledger.rebind(path, data=rows, overlap="some")  # what was released from the 400 stays released
    assert "loose-delta" in ledger.read_statement(path).guarantee.not_covered


def test_an_empty_vault_has_a_full_tank(tmp_path, rows):
    told = ledger.create_from_data(tmp_path / "new.vault", data=rows, epsilon=1, delta=1e-6, clip=2)
    assert (told.left, told.spent, told.releases) == (1.0, 0.0, ())
    assert told.policy.samples == 143
    assert "100.00 % left" in ledger.format_statement(told)
    with np.load(rows) as stored, Vault.open(tmp_path / "new.vault", dataset=None) as vault:
        assert vault.dataset == fingerprint(stored["x"], stored["y"])


def test_a_budget_that_was_tightened_to_nothing_has_an_empty_tank(tmp_path, rows):
    """It is worth less than one of the 2⁵⁰ parts that the vault was made with."""
    path = tmp_path / "ward.vault"
    ledger.create_from_data(path, data=rows, epsilon=1e6, delta=0.1, clip=1)
    with Vault.open(path, dataset=fingerprint_file(rows)[0]) as vault:
        vault.tighten(replace(vault.policy, epsilon=1e-6, delta=1e-100))
        assert vault.limit == 0
    told, _ = export_certificate(path, tmp_path / "out")
    assert (told.left, told.spent) == (0.0, 0.0)
    assert " 0.00 % left" in ledger.format_statement(told)
    vaults.backup(path, tmp_path / "backup.vault")
    ledger.rebind(tmp_path / "backup.vault", restored=True, burn_rest=True)
    told = ledger.read_statement(tmp_path / "backup.vault")
    assert "100.00 % burnt by restoring a backup" in ledger.format_statement(told)


def test_no_more_than_all_of_a_tightened_budget_is_said_to_be_burnt(tmp_path, rows):
    path, backup = tmp_path / "ward.vault", tmp_path / "backup.vault"
    ledger.create_from_data(path, data=rows, epsilon=8, delta=1e-5, clip=1)
    with Vault.open(path, dataset=fingerprint_file(rows)[0]) as vault:
        vault.tighten(replace(vault.policy, epsilon=4.0))
    vaults.backup(path, backup)
    ledger.rebind(backup, restored=True, burn_rest=True)
    told = ledger.read_statement(backup)
    assert told.left == 0
    assert "100.00 % burnt by restoring a backup" in ledger.format_statement(told)


def test_a_file_that_does_not_count_its_rows_needs_their_number(tmp_path, rows):
    table = tmp_path / "rows.csv"
    table.write_text("a,b\n1,2\n")
    terms = {"epsilon": 1, "delta": 1e-6, "clip": 1.0}
    with pytest.raises(InputError, match="--samples is missing"):
        ledger.create_from_data(tmp_path / "c.vault", data=table, **terms)
    assert (
        ledger.create_from_data(tmp_path / "c.vault", data=table, samples=1, **terms).policy.samples
        == 1
    )
    with pytest.raises(InputError, match="143"):
        ledger.create_from_data(tmp_path / "d.vault", data=rows, samples=3, **terms)
    assert not (tmp_path / "d.vault").exists()


def test_a_node_file_is_enough(tmp_path, rows):
    """The device opens what `create --node` made, for rows read the device's own way."""
    np.savez(tmp_path / "own.npz", x=np.arange(8, dtype="int16").reshape(2, 2, 2), y=[1, 0])
    node = tmp_path / "ward.toml"
    node.write_text(
        'schema = 1\nname = "ward"\nvault = "ward.vault"\n[data]\npath = "own.npz"\n'
        "classes = 2\n[policy]\nepsilon = 4.0\ndelta = 1e-6\nclip = 1.0\n"
    )
    told = ledger.create_vault(None, node)
    assert told.policy == Policy(4, 1e-6, 2, 1.0)
    client = Node.load(node)
    with Vault.open(client.vault, dataset=client.read_rows().fingerprint) as vault:
        assert vault.policy == client.make_policy(2)
        assert vault.dataset == fingerprint_file(tmp_path / "own.npz")[0]
    np.savez(tmp_path / "own.npz", x=np.zeros((3, 2, 2)), y=[1, 0, 0])
    with pytest.raises(DatasetChanged):
        Vault.open(client.vault, dataset=client.read_rows().fingerprint)
    ledger.rebind(node=node, overlap="all")
    with Vault.open(client.vault, dataset=client.read_rows().fingerprint) as vault:
        assert vault.policy.samples == 3


@pytest.mark.parametrize(
    ("path", "node", "terms", "words"),
    [
        (None, None, {}, "needs a VAULT"),
        ("x.vault", "n.toml", {}, "VAULT stands in the node file"),
        (None, "n.toml", {"max_rounds": 3}, "--max-rounds stands in the node file"),
        ("x.vault", None, {"data": "rows.npz"}, "--epsilon is missing"),
        (None, "n.toml", {}, "a file that exists"),
    ],
)
def test_half_a_wish_makes_no_vault(tmp_path, monkeypatch, path, node, terms, words):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match=words):
        ledger.create_vault(path, node, **terms)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, whose mistake it is")
def test_root_is_asked_for_the_user_to_whom_the_vaults_folder_belongs(tmp_path, rows):
    """The folder of the vault counts, wherever its node file lies."""
    home = tmp_path / "srv"
    home.mkdir()
    node = tmp_path / "ward.toml"
    node.write_text(
        'schema = 1\nname = "ward"\nvault = "srv/ward.vault"\n[data]\npath = "rows.npz"\n'
        "classes = 2\n[policy]\nepsilon = 4.0\ndelta = 1e-6\nclip = 1.0\n"
    )
    for owner, remedy in ((1, "add --user daemon"), (54321, "make a user with the id 54321")):
        os.chown(home, owner, owner)
        refused = command("create", "--node", node)
        assert (refused.returncode, refused.stdout) == (2, "")
        assert refused.stderr.count("\n") == 1
        assert remedy in refused.stderr
        assert list(home.iterdir()) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="only root becomes another user")
def test_who_becomes_another_user_looks_into_that_users_state_folder(tmp_path):
    code = (
        "from sottovoce.client import ledger; from sottovoce.client.vault import witness; "
        "ledger.act_as('daemon', None, beside=None); print(witness.locate_state())"
    )
    env = {**os.environ, "XDG_STATE_HOME": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}
    del env["SOTTOVOCE_STATE"]
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    home = pwd.getpwnam("daemon").pw_dir
    assert (done.stdout, done.stderr) == (f"{home}/.local/state/sottovoce\n", "")


# Checks


def test_a_whole_vault_passes_every_check(place):
    found = ledger.verify(place)
    assert found.broken is None
    assert [check.name for check in found.checks] == [
        "chain", "pages", "uploads", "witness", "place",
    ]  # fmt: skip
    found.require()


def test_a_backup_is_whole_inside_and_a_copy(place, tmp_path):
    backup = tmp_path / "backup.vault"
    for name in ("", ".witness"):
        shutil.copy2(f"{place}{name}", f"{backup}{name}")
    wrong = [check.name for check in ledger.verify(backup).checks if check.wrong]
    assert wrong == ["place"]


def test_stored_bytes_that_changed_are_found(place):
    with unguarded_file(place) as db:
        db.execute("UPDATE uploads SET content = x'00' WHERE t = 1")
    found = ledger.verify(place)
    assert [check.name for check in found.checks if check.wrong] == ["uploads"]
    with pytest.raises(VaultRefusal, match="not the one that was stored"):
        found.require()


def test_a_broken_chain_is_one_check_and_one_sentence(place):
    with unguarded_file(place) as db:
        db.execute("UPDATE entries SET time = 'then' WHERE seq = 4")
    found = ledger.verify(place)
    assert len(found.checks) == 1
    assert "line 4 does not fit" in (found.broken or "")
    with pytest.raises(VaultRefusal):
        ledger.read_statement(place)
    assert sqlite3.connect(place).execute("SELECT count(*) FROM entries").fetchone()[0] > 4


# Certificates


class Page(HTMLParser):
    """Tags in balance, and the visible text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.words: list[str] = []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        for name, value in attrs:
            assert name not in ("src", "onclick")
            assert name != "href" or value == "data:,"
        if tag not in ("meta", "link"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] != "style":
            self.words.append(data)


def test_a_certificate_says_everything_and_loads_nothing(place, tmp_path):
    told, folder = export_certificate(place, tmp_path / "out")
    stored = json.loads((folder / "certificate.json").read_text("utf-8"))
    jsonschema.validate(stored, SCHEMA)
    assert stored == told.to_json()
    text = (folder / "certificate.html").read_text("utf-8")
    page = Page(text)
    words = " ".join(page.words)
    assert "script" not in page.tags
    assert "<script>x</script>" in words  # the server's name, as text
    for part in (told.vault, told.seal, told.receipt.hash, "(8, 1e-05)-diff", "(6, 1e-05) by exact",
                 "replaced by any other",
                 "7 uploads in 2 runs", "the policy was tightened"):  # fmt: skip
        assert part in words, part
    assert words.count("burnt") >= 2
    assert_escaped(lambda: render_certificate(told))
    # Who knows all records but one could try that one against it, without any noise in the way.
    with Vault.open(place, dataset=None) as vault:
        assert vault.dataset not in text + json.dumps(stored)
    assert "http" not in text.replace("http-equiv", "")


def test_a_certificate_counts_persons_where_they_are_protected(tmp_path):
    rng = np.random.default_rng(1)
    x, y, who = rng.normal(size=(12, 3)), rng.integers(0, 2, 12), np.arange(12) // 4
    np.savez(tmp_path / "rows.npz", x=x, y=y, who=who)
    node = tmp_path / "ward.toml"
    for unit, person, counted in (("record", "", "Records 12"), ("person", "who", "Persons 3")):
        node.write_text(
            f'schema = 1\nname = "ward"\nvault = "{unit}.vault"\n[data]\npath = "rows.npz"\n'
            + (f'person = "{person}"\n' if person else "")
            + f'classes = 2\n[policy]\nepsilon = 4.0\ndelta = 1e-6\nclip = 1.0\nunit = "{unit}"\n'
        )
        ledger.create_vault(None, node, second_ledger=True)
        _, folder = export_certificate(tmp_path / f"{unit}.vault", tmp_path / unit)
        page = " ".join(Page((folder / "certificate.html").read_text("utf-8")).words)
        assert counted in " ".join(page.split())


def test_a_certificate_of_nothing_and_of_thousands(place, tmp_path, rows):
    from sottovoce.reports import certificate

    terms = {"epsilon": 1, "delta": 1e-6, "clip": 2}
    told = ledger.create_from_data(tmp_path / "new.vault", data=rows, second_ledger=True, **terms)
    assert "Nothing has been released" in certificate.render_certificate(told)
    many = ledger.read_statement(place)
    many = replace(many, releases=many.releases * 1000)
    assert "8,500 before these" in certificate.render_certificate(many)


def test_no_certificate_for_a_damaged_vault_nor_over_an_old_one(place, tmp_path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    with pytest.raises(InputError, match="empty folder"):
        export_certificate(place, tmp_path / "full")
    with pytest.raises((RunError, InputError)):
        export_certificate(place, place)
    with unguarded_file(place) as db:
        db.execute("UPDATE uploads SET content = x'00' WHERE t = 1")
    with pytest.raises(VaultRefusal):
        export_certificate(place, tmp_path / "out")
    assert not (tmp_path / "out").exists()


# Binding anew


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({}, "needs one of"),
        ({"node": "n.toml"}, "one of the two"),
        ({"moved": True, "restored": True}, "needs one of"),
        ({"moved": True, "burn_rest": True}, "belong to --restored"),
        ({"moved": True, "receipts": ["{}"]}, "belong to --restored"),
        ({"moved": True, "overlap": "all"}, "belong to changed DATA"),
        ({"restored": True, "receipts": ["no such file"]}, "a receipt as JSON"),
        ({"restored": True, "receipts": ["{}"]}, "receipt"),
        ({"data": "rows.npz"}, "--overlap must be"),
        ({"data": "rows.npz", "nothing_since": True}, "belongs to --moved"),
    ],
)
def test_unclear_wishes_are_refused_and_change_nothing(place, rows, given, words):
    if "data" in given:
        given = {**given, "data": rows}
    before = place.read_bytes()
    with pytest.raises(InputError, match=words):
        ledger.rebind(place, **given)
    assert place.read_bytes() == before


def test_changed_records_keep_every_debit(place, tmp_path):
    rng = np.random.default_rng(2)
    np.savez(tmp_path / "new.npz", x=rng.normal(size=(150, 5)), y=rng.integers(0, 2, 150))
    before = ledger.read_statement(place)
    with pytest.raises(PolicyRefusal, match="ledger create"):
        ledger.rebind(place, data=tmp_path / "new.npz", overlap="none")
    ledger.rebind(place, data=tmp_path / "new.npz", overlap="some")
    after = ledger.read_statement(place)
    assert (after.spent, after.releases) == (before.spent, before.releases)
    assert after.policy == replace(before.policy, samples=150)
    assert "all debits stayed" in ledger.format_statement(after)


@pytest.mark.parametrize("kind", ["persons", "table"])
def test_a_client_with_a_node_file_is_told_how_to_rebind(tmp_path, kind):
    """A file alone tells neither how many persons it is about nor how a node reads a table."""

    def write(rows):
        who = np.arange(rows) // 2
        np.savez(tmp_path / "rows.npz", x=np.ones((rows, 2)), y=who % 2, who=who)
        lines = ["a,y", *(f"{row % 5},{'pq'[row % 2]}" for row in range(rows))]
        (tmp_path / "rows.csv").write_text("\n".join(lines) + "\n")

    data, unit = {
        "persons": ('path = "rows.npz"\nclasses = 2\nperson = "who"', 'unit = "person"'),
        "table": (
            'path = "rows.csv"\nlabel = "y"\n[data.columns]\na = [0.0, 5.0]\ny = ["p", "q"]',
            "",
        ),
    }[kind]
    node = tmp_path / "ward.toml"
    node.write_text(
        f'schema = 1\nname = "ward"\nvault = "ward.vault"\n[data]\n{data}\n[policy]\n'
        f"epsilon = 4.0\ndelta = 1e-6\nclip = 1.0\n{unit}\n"
    )
    write(20)
    ledger.create_vault(None, node)
    write(30)
    with pytest.raises(DatasetChanged, match=r"--node NODE\.toml --overlap all"):
        device.check_node(Node.load(node))
    if kind == "persons":
        before = (tmp_path / "ward.vault").read_bytes()
        with pytest.raises(PolicyRefusal, match=r"rebind --node NODE\.toml --overlap some"):
            ledger.rebind(tmp_path / "ward.vault", data=tmp_path / "rows.npz", overlap="some")
        assert (tmp_path / "ward.vault").read_bytes() == before
    ledger.rebind(node=node, overlap="all")
    device.check_node(Node.load(node))
    assert ledger.read_statement(tmp_path / "ward.vault").policy.samples == (
        15 if kind == "persons" else 30
    )


@pytest.mark.parametrize("held", ["statement", "certificate", "receipt"])
def test_a_backup_is_restored_by_any_file_that_has_the_newest_receipt(
    place, rows, tmp_path, monkeypatch, held
):
    """`ledger show --json`, a certificate, or the receipt alone: as docs/ledger.md says."""
    kept = tmp_path / "kept.vault"
    vaults.backup(place, kept)
    with Vault.open(place, dataset=fingerprint_file(rows)[0]) as vault:
        vault.reserve("run-c", 0, request("run-c", 0), [SHARE], server="s", facts={})
    told, newest = ledger.read_statement(place), tmp_path / "newest.json"
    if held == "certificate":
        export_certificate(place, tmp_path / "cert")
        newest = tmp_path / "cert" / "certificate.json"
    else:
        whole = told.to_json()
        newest.write_text(json.dumps(whole if held == "statement" else whole["receipt"]))
    monkeypatch.setenv("SOTTOVOCE_STATE", str(tmp_path / "another machine"))
    done = ledger.rebind(kept, restored=True, receipts=[str(newest)])
    assert done.burnt == SHARE / FULL
    with Vault.open(kept, dataset=None) as vault:
        assert vault.spent == told.receipt.spent


def test_a_restored_backup_says_what_it_burnt(place, tmp_path, rows):
    backup = tmp_path / "backup.vault"
    shutil.copy2(place, backup)
    with Vault.open(place, dataset=fingerprint_file(rows)[0]) as vault:
        vault.store(vault.reserve("run-c", 0, request("c", 0), [SHARE], server="s", facts={}), b"x")
        receipt = vault.receipt()
    newest = tmp_path / "receipt.json"
    newest.write_text(json.dumps(receipt.to_proof()))
    spent = ledger.read_statement(place).spent
    done = ledger.rebind(backup, restored=True, receipts=[str(newest)])
    assert done.burnt == SHARE / FULL
    told = ledger.read_statement(backup)
    assert told.spent == pytest.approx(spent)
    assert told.burnt > 0
    assert "burnt by restoring a backup" in ledger.format_statement(told)
    jsonschema.validate(told.to_json(), SCHEMA)


def test_a_certificate_does_not_deny_what_was_released_after_a_backup(tmp_path, rows):
    """The restored ledger has no line of it, whether or not it has earlier releases."""
    path, backup = tmp_path / "ward.vault", tmp_path / "backup.vault"
    ledger.create_from_data(path, data=rows, epsilon=8, delta=1e-5, clip=1.0)
    for t in range(2):
        _, folder = export_certificate(path, tmp_path / f"before-{t}")
        before = " ".join(Page((folder / "certificate.html").read_text("utf-8")).words)
        assert ("Nothing has been released." in before) is (t == 0)
        assert "A backup was restored" not in before
        vaults.backup(path, backup)
        with Vault.open(path, dataset=fingerprint_file(rows)[0]) as vault:
            vault.store(
                vault.reserve("run", t, request("run", t), [SHARE], server="s", facts={}), b"x"
            )
        copy = tmp_path / f"copy-{t}.vault"
        shutil.copy2(backup, copy)
        backup.unlink()
        machine = os.environ["SOTTOVOCE_STATE"]
        with pytest.MonkeyPatch.context() as patch:
            other = tmp_path / f"state-{t}"
            shutil.copytree(machine, other)
            patch.setenv("SOTTOVOCE_STATE", str(other))
            assert ledger.rebind(copy, restored=True).burnt == SHARE / FULL
            told, folder = export_certificate(copy, tmp_path / f"after-{t}")
        assert len(told.releases) == t
        page = " ".join(Page((folder / "certificate.html").read_text("utf-8")).words)
        assert "Nothing has been released." not in page
        assert "What was released after it was made is not listed here" in page


def test_an_operator_s_word_stands_on_the_certificate(place, tmp_path):
    backup = tmp_path / "backup.vault"
    made = vaults.backup(place, backup)
    wrong = [check.name for check in ledger.verify(backup).checks if check.wrong]
    assert wrong == ["witness", "place"]
    ledger.rebind(backup, restored=True, nothing_since=True)
    told = ledger.read_statement(backup)
    assert told.burnt == 0
    word = f"its operator stated that nothing was released since (after line {made.seq})"
    assert word in told.notes[-1]["text"]
    assert word in ledger.format_statement(told)


# The command line


@pytest.mark.slow
def test_the_commands_one_after_another(tmp_path, rows):
    vault = tmp_path / "ward.vault"
    terms = ("--data", rows, "--epsilon", 8, "--delta", "1e-5", "--clip", 1)
    made = command("create", vault, *terms, "--json")
    assert (made.returncode, made.stderr) == (0, "")
    jsonschema.validate(json.loads(made.stdout), SCHEMA)
    again = command("create", vault, *terms)
    assert again.returncode == 1
    assert "exists already" in again.stderr
    assert len(again.stderr.splitlines()) == 1
    shown = command("show", vault, "--json")
    assert json.loads(shown.stdout)["vault"] == json.loads(made.stdout)["vault"]
    assert command("show", vault).stdout.startswith("vault ")
    assert command("verify", vault).returncode == 0
    out = command("export", vault, "--out", tmp_path / "out")
    assert out.returncode == 0
    assert (tmp_path / "out" / "certificate.html").exists()
    shutil.copy2(vault, tmp_path / "copy.vault")
    shutil.copy2(f"{vault}.witness", tmp_path / "copy.vault.witness")
    broken = command("verify", tmp_path / "copy.vault", "--json")
    assert broken.returncode == 1
    assert json.loads(broken.stdout)["whole"] is False
    assert "is a copy of a vault" in broken.stderr
    moved = command("rebind", tmp_path / "copy.vault", "--moved", "--nothing-since", "--json")
    assert (moved.returncode, moved.stderr) == (0, "")
    assert json.loads(moved.stdout)["burnt"] == 0
    kept = command("backup", tmp_path / "copy.vault", "--out", tmp_path / "kept.vault")
    assert (kept.returncode, kept.stderr) == (0, "")
    assert "is a backup" in command("show", tmp_path / "kept.vault").stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["show", "none.vault"], 1, "does not exist"),
        (["verify", "none.vault"], 1, "does not exist"),
        (["show"], 2, "VAULT"),
        (["create", "x.vault"], 2, "--data is missing"),
        (["create"], 2, "needs a VAULT"),
        (["create", "x.vault", "--data", "none.npz", "--epsilon", "8", "--delta", "1e-5", "--clip",
          "1"], 2, "a file that exists"),
        (["rebind", "x.vault"], 2, "needs one of"),
        (["nonsense"], 2, "nonsense"),
    ],
)  # fmt: skip
def test_mistakes_are_one_sentence(tmp_path, words, code, said):
    done = command(*(str(tmp_path / w) if w.endswith((".vault", ".npz")) else w for w in words))
    assert done.returncode == code
    assert said in done.stderr
    assert done.stderr.count("\n") == 1
    assert done.stdout == ""
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize("name", ["create", "show", "verify", "export", "backup", "rebind"])
def test_every_command_shows_examples(name):
    done = command(name, "--help")
    assert done.returncode == 0
    assert f"sottovoce ledger {name}" in done.stdout
