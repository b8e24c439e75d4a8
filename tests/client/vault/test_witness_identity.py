"""One ledger, one history: old files, copies, lost state folders, second ledgers of the same rows.

What a vault is told by is its newest line, which the machine's state folder (SOTTOVOCE_STATE)
knows. Files here are put back, copied and moved as an operator or a thief of backups would.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import stat
import subprocess
import sys
import tempfile
import threading
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from sottovoce.client import ledger
from sottovoce.client.vault import Vault, VaultReceipt, backup, move, rebind, restore, witness
from sottovoce.client.vault.chest import Chest
from sottovoce.errors import InputError, PolicyRefusal, VaultRefusal
from sottovoce.privacy.budget import NOT_COVERED
from support import TESTS
from support.old_states import (
    pair,
    refuse_old_states,
    saved,
    spent_in,
    written_over,
)
from support.vault_play import DATASET, OTHER, POLICY, play, request, used
from support.vault_steps import STEPS


@pytest.fixture
def state(tmp_path, monkeypatch):
    """The state folder of the machine that a test runs on."""
    folder = tmp_path / "state"
    monkeypatch.setenv("SOTTOVOCE_STATE", str(folder))
    return folder


@pytest.fixture
def place(tmp_path, state):
    return tmp_path / "ward.vault"


@pytest.fixture
def forget(tmp_path, monkeypatch):
    """From the call on, a machine (or a container) whose state folder is new."""
    return lambda: monkeypatch.setenv("SOTTOVOCE_STATE", str(tmp_path / "new-state"))


def id_of(place: Path) -> str:
    with Vault.open(place, dataset=None) as vault:
        return vault.id


# An old file under its name.


@pytest.mark.parametrize("where", ["the disk", "/dev/shm"])
def test_an_old_state_is_refused_whatever_its_inode(monkeypatch, where):
    monkeypatch.setenv("SOTTOVOCE_STATE", "")  # put back afterwards
    if where == "/dev/shm" and not os.access(where, os.W_OK):
        pytest.skip("this machine has no /dev/shm")
    home = tempfile.mkdtemp(dir=where if where == "/dev/shm" else None)
    try:
        assert refuse_old_states(Path(home))["written_over"]  # at least one way keeps the inode
    finally:
        shutil.rmtree(home)


@pytest.fixture
def disk():
    """A folder on the machine's disk; `tmp_path` may lie in memory."""
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


def test_an_old_state_is_refused_on_an_overlay(disk):
    """As in a container. In a mount namespace of its own, where the system allows one."""
    if shutil.which("unshare") is None:
        pytest.skip("this machine has no unshare")
    for name in ("lower", "upper", "work", "merged"):
        (disk / name).mkdir()
    code = (
        "import sys; sys.path.insert(0, sys.argv[1])\nfrom pathlib import Path\n"
        "from support.old_states import refuse_old_states\n"
        "print(refuse_old_states(Path('merged')))"
    )
    mount = "mount -t overlay overlay -o lowerdir=lower,upperdir=upper,workdir=work merged"
    script = f'{mount} || exit 77; exec "$0" -c "$1" "$2"'
    done = subprocess.run(
        ["unshare", "-rm", "sh", "-c", script, sys.executable, code, str(TESTS)],
        cwd=disk, capture_output=True, text=True, timeout=900,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip
    if done.returncode == 77 or "unshare" in done.stderr:
        pytest.skip(f"no overlay can be mounted here: {done.stderr.strip()}")
    assert done.returncode == 0, done.stderr
    assert "'written_over': True" in done.stdout


# A machine that has no witness of a ledger


@pytest.mark.parametrize("rounds", [0, 3])
def test_a_machine_without_a_witness_takes_nothing_without_a_word(place, forget, rounds):
    """A ledger of one line, too: it may have been copied on the day that it was made."""
    known = used(place, rounds)
    forget()
    with pytest.raises(VaultRefusal) as no:
        Vault.open(place, dataset=DATASET)
    for words in ("new-state", "SOTTOVOCE_STATE", "volume that lasts", "--moved --nothing-since",
                  "burns nothing", "--restored", "burns what newer receipts prove"):  # fmt: skip
        assert words in str(no.value)
    assert "\n" not in str(no.value)
    with Vault.open(place, dataset=None) as vault:  # who looks releases nothing
        known.held_by(vault)
    wrong = {check.name: check.wrong for check in ledger.verify(place).checks if check.wrong}
    assert list(wrong) == ["witness"]  # and cannot vouch for it either
    with pytest.raises(VaultRefusal, match="in this machine's state folder"):
        rebind(place, dataset=OTHER, samples=9, overlap="all")
    with pytest.raises(VaultRefusal, match=r"--restored.*--nothing-since"):
        move(place)
    with pytest.raises(VaultRefusal, match="--burn-rest"):
        restore(place)
    move(place, nothing_since=True)
    with Vault.open(place, dataset=DATASET) as vault:
        known.held_by(vault)
        assert vault.lines()[-1].facts["stated"] == "nothing was released since"
    with pytest.raises(PolicyRefusal, match="where it was"):
        move(place, nothing_since=True)
    with pytest.raises(PolicyRefusal, match="just use it"):
        restore(place)


def test_a_vault_that_comes_back_from_another_machine_needs_a_word(place, state, monkeypatch):
    """What this machine has seen of it says nothing of what came after, here or there."""
    known = used(place, rounds=1)
    monkeypatch.setenv("SOTTOVOCE_STATE", f"{state}-there")
    move(place, nothing_since=True)
    with Vault.open(place, dataset=DATASET) as vault:
        play(vault, known, "run-c", range(2))
        lines = vault.receipt().seq
    monkeypatch.setenv("SOTTOVOCE_STATE", str(state))
    with pytest.raises(VaultRefusal, match=f"of its {lines} lines.*which has seen 7"):
        Vault.open(place, dataset=DATASET)
    move(place, nothing_since=True)
    with Vault.open(place, dataset=DATASET) as vault:
        known.held_by(vault)


def test_an_older_state_folder_takes_no_copy_made_just_after_a_word(place, state, monkeypatch):
    """One line ahead of this folder, as after a crash; but that line is a word given elsewhere."""
    known = used(place, rounds=1)
    monkeypatch.setenv("SOTTOVOCE_STATE", f"{state}-there")
    move(place, nothing_since=True)
    old = saved(place, place.parent / "old")
    with Vault.open(place, dataset=DATASET) as vault:
        play(vault, known, "run-c", range(2))
    for source, target in zip(pair(old), pair(place), strict=True):
        written_over(source, target)
    monkeypatch.setenv("SOTTOVOCE_STATE", str(state))
    with pytest.raises(VaultRefusal, match="in this machine's state folder"):
        Vault.open(place, dataset=DATASET)
    with pytest.raises(VaultRefusal, match="--burn-rest"):
        restore(place)


def test_a_container_without_a_kept_state_folder_is_refused_at_its_second_start(
    place, tmp_path, monkeypatch
):
    """The vault lies on a volume; the first container made it, the second has forgotten it."""
    known = used(place)
    for start in ("second", "third"):
        monkeypatch.setenv("SOTTOVOCE_STATE", str(tmp_path / start))
        with pytest.raises(VaultRefusal, match="volume that lasts"):
            Vault.open(place, dataset=DATASET)
    monkeypatch.setenv("SOTTOVOCE_STATE", str(tmp_path / "state"))  # kept, as the message says
    with Vault.open(place, dataset=DATASET) as vault:
        known.held_by(vault)


@pytest.mark.parametrize("step", [step for step in STEPS if step.startswith("move:")])
def test_a_word_that_was_cut_short_is_given_again(place, forget, monkeypatch, step):
    monkeypatch.setattr("sottovoce.client.vault.chest.SUMMARY_EVERY", 1)  # with every write
    known = used(place)
    forget()

    def stop(reached):
        if reached == step:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("sottovoce.client.vault.chain.pass_step", stop)
        with pytest.raises(KeyboardInterrupt):
            move(place, nothing_since=True)
    if step.endswith(("witness written", "witnessed")):  # the machine has its witness by then
        with pytest.raises(PolicyRefusal, match="where it was"):
            move(place, nothing_since=True)
    else:
        move(place, nothing_since=True)
    with Vault.open(place, dataset=DATASET) as vault:
        known.held_by(vault)


def test_a_vault_of_an_earlier_version_opens_where_its_witness_is(place, state):
    """Earlier versions noted no data sets: the first opening does."""
    known = used(place)
    shutil.rmtree(state / "datasets")
    (state / "key").unlink()
    with Vault.open(place, dataset=DATASET) as vault:
        known.held_by(vault)
        number = vault.id
    with pytest.raises(VaultRefusal, match=f"have a ledger on this machine already.*{number}"):
        Vault.create(place.with_name("second.vault"), POLICY, dataset=DATASET)


# Copies


def test_only_one_of_two_equal_files_goes_on(place, tmp_path):
    """`cp -a` of the newest state: whichever is used first, the other is an older copy then."""
    known = used(place)
    twin = saved(place, tmp_path / "twin")
    move(twin, nothing_since=True)
    with Vault.open(twin, dataset=DATASET) as vault:
        play(vault, known, "run-c", range(2))
    with pytest.raises(VaultRefusal, match="this machine has seen"):
        Vault.open(place, dataset=DATASET)
    with pytest.raises(VaultRefusal, match="this machine has seen"):
        move(place, nothing_since=True)
    assert spent_in(twin) == known.spent


def test_two_copies_are_never_in_use_at_once(place, tmp_path, monkeypatch):
    """Their locks are two files, and a file system may give both one inode; the machine's lock is
    one."""
    known = used(place)
    twin = saved(place, tmp_path / "twin")
    monkeypatch.setattr(Chest, "is_copy", lambda self: False)
    with Vault.open(place, dataset=DATASET) as vault:
        with pytest.raises(VaultRefusal, match=f"is in use by process {os.getpid()}"):
            Vault.open(twin, dataset=DATASET)
        for word in (move, restore):
            with pytest.raises(VaultRefusal, match="is in use"):
                word(twin, nothing_since=True)
        play(vault, known, "run-c", range(2))
    with pytest.raises(VaultRefusal, match="this machine has seen"):
        Vault.open(twin, dataset=DATASET)
    with Vault.open(place, dataset=DATASET) as vault:
        known.held_by(vault)


def test_moved_to_another_file_system_it_goes_on_after_a_word(place):
    if not os.access("/dev/shm", os.W_OK):
        pytest.skip("this machine has no /dev/shm")
    known, home = used(place), Path(tempfile.mkdtemp(dir="/dev/shm"))
    try:
        for file in pair(place):
            shutil.move(file, home / file.name)
        moved = home / place.name
        with closing(Chest.open(moved)) as chest:
            copy = chest.is_copy()
        if copy:  # else, by chance, the inode is the same: it is the newest state, and goes on
            move(moved, nothing_since=True)
        with Vault.open(moved, dataset=DATASET) as vault:
            known.held_by(vault)
    finally:
        shutil.rmtree(home)


def test_a_snapshot_of_the_whole_machine_is_told_by_receipts_alone(place, state, tmp_path):
    """Vault, witness and state folder put back together: nothing here can tell, and docs say so."""
    known = used(place)
    old, old_state = saved(place, tmp_path / "old"), tmp_path / "old-state"
    shutil.copytree(state, old_state)
    with Vault.open(place, dataset=DATASET) as vault:
        receipt = vault.store(
            vault.reserve("c", 0, request("c", 0), [5], server="s", facts={}), b"left"
        )
    shutil.rmtree(state)
    shutil.copytree(old_state, state)
    for source, target in zip(pair(old), pair(place), strict=True):
        written_over(source, target)
    with Vault.open(place, dataset=DATASET) as vault:
        known.held_by(vault)
        assert not vault.contains(receipt)  # an honest server hands it back


def test_a_backup_and_a_lost_state_folder_burn_what_is_unknown(place, tmp_path, forget):
    known, out = used(place), tmp_path / "backup.vault"
    backup(place, out)
    with Vault.open(place, dataset=DATASET) as vault:
        play(vault, known, "run-c", range(3))
        newest = vault.receipt()
    forget()
    with pytest.raises(VaultRefusal, match="--burn-rest"):
        restore(out)
    restore(out, receipts=[newest])
    assert spent_in(out) == known.spent
    with Vault.open(out, dataset=DATASET) as vault:  # that it is the newest is the operator's word
        assert vault.lines()[-1].facts["stated"] == "nothing was released since"


def test_a_copied_witness_is_no_word_where_the_state_folder_is_new(place, tmp_path, forget):
    """Newer than the backup it lies beside, and older than what was released."""
    known, out = used(place), tmp_path / "backup.vault"
    backup(place, out)
    with Vault.open(place, dataset=DATASET) as vault:
        play(vault, known, "run-c", range(1))
    beside = tmp_path / "backup.vault.witness"
    shutil.copy(pair(place)[1], beside)
    with Vault.open(place, dataset=DATASET) as vault:
        play(vault, known, "run-d", range(3))
    forget()
    with pytest.raises(VaultRefusal, match=r"`--receipt backup.vault.witness`.*--burn-rest"):
        restore(out)
    with pytest.raises(VaultRefusal, match="cannot be restored without loss"):
        restore(out, nothing_since=True)
    restore(out, receipts=[VaultReceipt.parse(beside.read_text())])  # a word, and recorded as one
    with Vault.open(out, dataset=DATASET) as vault:
        assert vault.lines()[-1].facts["stated"] == "nothing was released since"


# Second ledgers for one data set


def test_the_same_rows_get_a_second_ledger_only_on_a_word(place, tmp_path):
    Vault.create(place, POLICY, dataset=DATASET).close()
    second = tmp_path / "second.vault"
    with pytest.raises(VaultRefusal, match=r"add up.*--second-ledger"):
        Vault.create(second, POLICY, dataset=DATASET)
    assert not second.exists()
    Vault.create(tmp_path / "other.vault", POLICY, dataset=OTHER).close()
    first = id_of(place)
    with Vault.create(second, POLICY, dataset=DATASET, second_ledger=True) as vault:
        assert vault.lines()[0].facts["second"] == [first]
        assert vault.other_ledgers == (first,)
    with Vault.open(place, dataset=None) as vault:
        assert "second" not in vault.lines()[0].facts
        assert len(vault.other_ledgers) == 1  # the first one's statement says so as well


def test_a_deleted_ledger_gives_nothing_back(place):
    used(place)
    for file in (*pair(place), place.with_name("ward.vault.lock")):
        file.unlink()
    with pytest.raises(VaultRefusal, match="have a ledger on this machine already"):
        Vault.create(place, POLICY, dataset=DATASET)


def test_a_ledger_that_was_bound_to_rows_counts_for_them(place, tmp_path):
    """Made for some rows and bound to others: it has a budget for both."""
    second = tmp_path / "second.vault"
    used(place)
    Vault.create(second, POLICY, dataset=OTHER).close()
    with pytest.raises(VaultRefusal, match="--second-ledger"):
        rebind(second, dataset=DATASET, samples=143, overlap="some")
    rebind(second, dataset=DATASET, samples=143, overlap="some", second_ledger=True)
    with Vault.open(second, dataset=DATASET) as vault:
        assert vault.lines()[-1].facts["second"] == [id_of(place)]
    with pytest.raises(VaultRefusal, match="--second-ledger"):
        Vault.create(tmp_path / "third.vault", POLICY, dataset=OTHER)
    rebind(second, dataset=OTHER, samples=143, overlap="all")  # its own old rows need no word


@pytest.mark.parametrize("word", [move, restore])
def test_a_ledger_from_elsewhere_is_a_second_one_where_its_rows_have_one(
    tmp_path, state, forget, word
):
    """Each was the only one where it was made; together they are two budgets."""
    first, second = tmp_path / "first.vault", tmp_path / "second.vault"
    Vault.create(first, POLICY, dataset=DATASET).close()
    forget()
    Vault.create(second, POLICY, dataset=DATASET).close()
    with pytest.raises(VaultRefusal, match=r"add up.*--second-ledger"):
        word(first, nothing_since=True)
    word(first, nothing_since=True, second_ledger=True)
    with Vault.open(first, dataset=DATASET) as vault:
        assert vault.lines()[-1].facts["second"] == [id_of(second)]
    Vault.open(second, dataset=DATASET).close()  # both have a word now, or had one to give


def test_two_ledgers_that_nobody_noted_are_noticed_at_the_second_ones_opening(tmp_path, state):
    """Made by an earlier version, or one by a creation that was killed before its last step."""
    first, second = tmp_path / "first.vault", tmp_path / "second.vault"
    for place in (first, second):
        Vault.create(place, POLICY, dataset=DATASET).close()
        shutil.rmtree(state / "datasets")
    Vault.open(first, dataset=DATASET).close()
    with pytest.raises(VaultRefusal, match=r"add up.*--moved --nothing-since"):
        Vault.open(second, dataset=DATASET)
    ledger.rebind(second, moved=True, nothing_since=True, second_ledger=True)
    for place in (first, second):
        Vault.open(place, dataset=DATASET).close()
    assert ledger.read_statement(second).notes[-1]["text"].count("stated") == 2


@pytest.mark.parametrize("work", ["rebind", "move", "restore", "open"])
def test_an_operators_word_waits_for_a_ledger_that_is_being_made(
    tmp_path, state, forget, monkeypatch, work
):
    """Between the look for other ledgers and the note of its own nobody else may make one."""
    place = tmp_path / "first.vault"
    Vault.create(place, POLICY, dataset=OTHER if work == "rebind" else DATASET).close()
    if work == "open":
        shutil.rmtree(state / "datasets")  # as after a creation that was killed before its note
    elif work != "rebind":
        forget()
    words = {
        "rebind": lambda: rebind(place, dataset=DATASET, samples=143, overlap="some"),
        "move": lambda: move(place, nothing_since=True),
        "restore": lambda: restore(place, nothing_since=True),
        "open": lambda: Vault.open(place, dataset=DATASET).close(),
    }
    flock, met, said = fcntl.flock, threading.Event(), list[str]()

    def lock(descriptor, kind):
        try:
            flock(descriptor, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            met.set()
            flock(descriptor, kind)

    def speak():
        try:
            words[work]()
        except VaultRefusal as refusal:
            said.append(str(refusal))
        met.set()

    with witness.hold_ledgers(DATASET):
        monkeypatch.setattr(fcntl, "flock", lock)
        speaker = threading.Thread(target=speak)
        speaker.start()
        assert met.wait(900)
        witness.note_ledger(DATASET, "ab" * 16)
    speaker.join(900)
    assert ["--second-ledger" in text for text in said] == [True]


def test_of_many_creations_at_once_one_succeeds(tmp_path, state):
    code = (
        "import sys; from pathlib import Path\nfrom support.vault_play import DATASET, POLICY\n"
        "from sottovoce.client.vault import Vault\n"
        "Vault.create(Path(sys.argv[1]), POLICY, dataset=DATASET).close()"
    )
    makers = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(tmp_path / f"{number}.vault")],
            stderr=subprocess.PIPE, text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS), *sys.path])},
        )
        for number in range(4)
    ]  # fmt: skip
    said = [maker.communicate(timeout=900)[1] for maker in makers]
    assert sorted(maker.returncode for maker in makers) == [0, 1, 1, 1]
    assert sum("have a ledger on this machine already" in text for text in said) == 3


def test_the_state_folder_holds_no_fingerprint_and_is_for_its_owner_only(place, state, forget):
    used(place)
    files = [path for path in state.rglob("*") if path.is_file()]
    assert state / "key" in files
    for path in files:
        assert DATASET not in str(path) + path.read_bytes().hex() + path.read_text("latin-1")
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    marks = {path.name for path in (state / "datasets").iterdir()}
    forget()
    used(place.with_name("elsewhere.vault"))
    other = {path.name for path in (state.parent / "new-state" / "datasets").iterdir()}
    assert len(marks) == len(other) == 1
    assert marks != other  # another key: marks of two machines cannot be compared


def test_a_lost_key_is_no_fresh_start(place, state):
    used(place)
    for content in (None, b"short"):
        (state / "key").unlink() if content is None else (state / "key").write_bytes(content)
        with pytest.raises(VaultRefusal, match="missing or damaged"):
            Vault.create(place.with_name("second.vault"), POLICY, dataset=DATASET)


def test_statement_and_certificate_name_a_second_ledger(tmp_path, state, forget):
    import jsonschema
    import numpy as np

    from sottovoce.reports import certificate

    rng = np.random.default_rng(3)
    x, y = rng.normal(size=(20, 3)), rng.integers(0, 2, 20)
    np.savez(tmp_path / "rows.npz", x=x, y=y)
    np.savez(tmp_path / "turned.npz", x=x[::-1], y=y[::-1])  # the same rows in another order
    terms = {"epsilon": 1, "delta": 1e-6, "clip": 1.0}
    alone = ledger.create_vault(tmp_path / "first.vault", None, data=tmp_path / "rows.npz", **terms)
    assert (alone.only_ledger, alone.other_ledgers) == (True, ())
    assert "other-ledgers" not in alone.guarantee.not_covered
    assert "budgets add up" not in ledger.format_statement(alone) + certificate.render_certificate(
        alone
    )
    second, turned = tmp_path / "second.vault", tmp_path / "turned.npz"
    with pytest.raises(VaultRefusal, match="--second-ledger"):
        ledger.create_vault(second, None, data=turned, **terms)
    told = ledger.create_vault(second, None, data=turned, second_ledger=True, **terms)
    schema = json.loads(
        (Path(ledger.__file__).parents[1] / "schemas" / "certificate.json").read_text("utf-8")
    )
    for account in (told, ledger.read_statement(tmp_path / "first.vault")):
        assert not account.only_ledger
        assert len(account.other_ledgers) == 1
        for text in (ledger.format_statement(account), certificate.render_certificate(account)):
            assert "these rows may have other ledgers (1 known), and budgets add up" in text
            assert NOT_COVERED["other-ledgers"] in " ".join(text.split())
        assert "other-ledgers" in account.guarantee.not_covered
        assert NOT_COVERED["other-ledgers"] in account.to_json()["guarantee"]["text"]
        assert "will send from this data set" not in certificate.render_certificate(account)
        jsonschema.validate(account.to_json(), schema)
    assert "a second ledger for the same rows: budgets add up" in told.notes[0]["text"]
    forget()  # who looks from another account finds the word in the chain
    assert ledger.read_statement(second).other_ledgers == (alone.vault,)
    with pytest.raises(InputError, match="--overlap and --samples belong to changed DATA"):
        ledger.rebind(second, moved=True, samples=20)


def test_receipts_of_the_state_folder_stay_plain(place, state):
    """The machine's witness is a receipt as before: an earlier version can still read it."""
    used(place)
    with Vault.open(place, dataset=DATASET) as vault:
        kept = state / "witness" / vault.id
        assert VaultReceipt.parse(kept.read_text()) == vault.receipt()
        assert not vault.contains(replace(vault.receipt(), seq=1))
