"""The vault keeps its promises: nothing twice, nothing refunded, nothing old is trusted."""

from __future__ import annotations

import json
import math
import os
import shutil
import sqlite3
import subprocess
import sys
import threading
import time
from contextlib import ExitStack, closing, nullcontext, suppress
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sottovoce.client import ledger
from sottovoce.client.vault import (
    Policy,
    Vault,
    VaultReceipt,
    backup,
    chest,
    fingerprint,
    fingerprint_file,
    journal,
    move,
    rebind,
    restore,
    resume,
    witness,
)
from sottovoce.client.vault.chain import GENESIS, encode_canonical, link_line
from sottovoce.client.vault.journal import Records
from sottovoce.errors import (
    DatasetChanged,
    InputError,
    PolicyRefusal,
    RoundAnswered,
    TankEmpty,
    VaultRefusal,
)
from sottovoce.privacy.calibration import capacity
from sottovoce.privacy.tank import FULL
from support.accounts import CLIENT, client_folder, do_apart
from support.vault_damage import damage_and_look, unguarded_file
from support.vault_play import (
    DATASET,
    OTHER,
    POLICY,
    Known,
    counted,
    live,
    make_old,
    play,
    request,
    used,
)
from support.vault_steps import STEPS

SHARE = FULL // 100


@pytest.fixture(autouse=True)
def _machine(tmp_path_factory):
    """Every test here has a machine of its own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SOTTOVOCE_STATE", str(tmp_path_factory.mktemp("state")))
        yield


@pytest.fixture
def place(tmp_path):
    return tmp_path / "ward.vault"


@pytest.fixture
def vault(place):
    with Vault.create(place, POLICY, dataset=DATASET) as made:
        yield made


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    """From the call on, a machine that has never seen these vaults."""
    return lambda: monkeypatch.setenv("SOTTOVOCE_STATE", str(tmp_path / "another-state"))


def book(vault, t, units=(SHARE,), run="run-1"):
    return vault.reserve(run, t, request(run, t), list(units), server="s", facts={"horizon": 9})


# One release a round


def test_a_reserve_books_before_anything_is_stored(vault, place):
    book(vault, 0, [SHARE, SHARE + 1])
    vault.close()
    with Vault.open(place, dataset=DATASET) as again:
        assert again.spent == 2 * SHARE + 1
        assert int(again.tank("run-1").debits) == 2
        assert again.find("run-1", 0).upload is None


def test_the_stored_bytes_come_back_and_no_second_answer_does(vault, place):
    receipt = vault.store(book(vault, 0), b"first")
    with pytest.raises(RoundAnswered):
        book(vault, 0)
    assert vault.spent == SHARE
    vault.close()
    with Vault.open(place, dataset=DATASET) as again:
        entry = again.find("run-1", 0)
        assert (entry.upload, entry.request_hash) == (b"first", request("run-1", 0))
        assert (entry.units, entry.server, entry.facts) == ((SHARE,), "s", {"horizon": 9})
        assert again.contains(receipt)
        with pytest.raises(RoundAnswered):
            book(again, 0)


def test_a_burnt_reserve_stays_spent_and_the_round_may_be_reserved_anew(vault):
    lost = book(vault, 3)
    anew = book(vault, 3)
    vault.store(anew, b"second")
    assert vault.spent == 2 * SHARE
    with pytest.raises(RoundAnswered):
        vault.store(lost, b"first after all")
    assert vault.find("run-1", 3).upload == b"second"


def test_an_upload_is_stored_once_and_only_by_who_reserved_it(vault, place):
    paid = book(vault, 0)
    with pytest.raises(VaultRefusal, match="reserve anew"):
        vault.store(replace(paid, t=1), b"x")
    later = replace(paid.receipt, seq=paid.receipt.seq + 1)
    with pytest.raises(VaultRefusal, match="reserve anew"):
        vault.store(replace(paid, receipt=later), b"x")
    vault.store(paid, b"x")
    with pytest.raises(VaultRefusal, match="reserve anew"):
        vault.store(paid, b"x")
    open_one = book(vault, 1)
    vault.close()
    with Vault.open(place, dataset=DATASET) as again, pytest.raises(VaultRefusal):
        again.store(open_one, b"x")


def test_runs_share_the_tank_and_count_their_own_debits(vault, place):
    book(vault, 0, run="run-1")
    book(vault, 0, run="run-2")
    book(vault, 1, run="run-2")
    vault.close()
    with Vault.open(place, dataset=DATASET) as again:
        for run, opened, debits in (("run-1", 0, 1), ("run-2", SHARE, 2), ("run-3", 3 * SHARE, 0)):
            tank = again.tank(run)
            assert (int(tank.spent), int(tank.opened)) == (3 * SHARE, opened)
            assert int(tank.debits) == debits


# Never more than there is


def test_the_last_unit_can_be_booked_and_not_one_more(place):
    loose = replace(POLICY, floor=1e-3)
    with Vault.create(place, loose, dataset=DATASET) as vault:
        book(vault, 0, [FULL - 5])
        with pytest.raises(TankEmpty):
            book(vault, 1, [3, 3])
        assert vault.spent == FULL - 5
        book(vault, 1, [5])
        with pytest.raises(TankEmpty):
            book(vault, 2, [1])
        assert int(vault.tank("run-1").left) == 0
        assert not vault.tank("run-1").offer(1.0, 3).granted


def test_the_account_of_own_noise_is_checked_for_what_it_books(place):
    """A release is worth at least its price alone, too, whatever is said: nothing is exceeded."""
    policy = replace(POLICY, honest=4, epsilon_alone=8.5)
    with Vault.create(place, policy, dataset=DATASET) as vault:
        terms = {"server": "s", "facts": {}}
        vault.reserve("run", 0, request("run", 0), [1], alone=vault.limit_alone - 5, **terms)
        with pytest.raises(TankEmpty):
            vault.reserve("run", 1, request("run", 1), [10], alone=5, **terms)
        vault.reserve("run", 1, request("run", 1), [5], alone=1, **terms)
        assert vault.alone == vault.limit_alone


def test_no_release_has_less_noise_than_the_floor(vault):
    assert vault.ceiling <= FULL // 4
    book(vault, 0, [vault.ceiling])
    # The ceiling is that of a turn: steps share it, so that no request is worth more than one.
    for units in ([vault.ceiling + 1], [1, vault.ceiling + 1], [1, vault.ceiling], [SHARE] * 26):
        with pytest.raises(PolicyRefusal, match="σ/Δ"):
            book(vault, 1, units)
    assert vault.spent == vault.ceiling


@settings(max_examples=60, deadline=None)
@given(
    st.floats(1e-2, 50), st.floats(1e-12, 0.1), st.floats(1e-3, 1e3) | st.none(),
    st.sampled_from(["exact", "zcdp"]),
)  # fmt: skip
def test_the_ceiling_is_the_floor_in_exact_arithmetic(epsilon, delta, floor, calibration):
    from sottovoce.privacy.tank import most_units

    policy = Policy(epsilon, delta, 10, 1.0, calibration=calibration, floor=floor)
    units = most_units(policy.floor, policy.capacity())
    mu2 = Fraction(units, FULL) * Fraction(policy.capacity())
    assert mu2 * Fraction(policy.floor) ** 2 <= 1
    if floor is None:
        assert FULL // 4 - FULL // 10**5 < units <= FULL // 4


def test_rounds_beyond_the_policy_are_refused(vault):
    book(vault, POLICY.max_rounds - 1)
    with pytest.raises(PolicyRefusal, match="announce fewer rounds"):
        book(vault, POLICY.max_rounds)


BAD = [
    {"run": ""}, {"run": "a b"}, {"run": "a" * 65}, {"run": 3}, {"t": -1}, {"t": 1.0}, {"t": True},
    {"t": "0"}, {"request_hash": "ab"}, {"request_hash": None}, {"units": []}, {"units": [0]},
    {"units": [-1]}, {"units": [1.5]}, {"units": [True]}, {"units": [1] * 10_001},
    {"server": 3}, {"server": "x" * 201}, {"server": "\x1b[2J"},
    {"facts": {"a": math.nan}}, {"facts": {"a": {1, 2}}},
    {"facts": {"a": "x" * 70_000}},
]  # fmt: skip


@pytest.mark.parametrize("change", BAD, ids=[str(b)[:40] for b in BAD])
def test_what_cannot_be_booked_is_one_sentence_and_books_nothing(vault, change):
    asked = {"run": "r", "t": 0, "request_hash": request("r", 0), "units": [1], "server": "s",
             "facts": {}} | change  # fmt: skip
    with pytest.raises(InputError) as caught:
        vault.reserve(**asked)
    assert str(caught.value).count("\n") == 0
    assert vault.spent == 0
    assert vault.receipt().seq == 1


@pytest.mark.parametrize("upload", [b"", "text", bytearray(b"x"), None])
def test_only_bytes_are_stored(vault, upload):
    with pytest.raises(InputError):
        vault.store(book(vault, 0), upload)


# Policy


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"calibration": "paper"}, "paper"), ({"unit": "user"}, "unit"),
        ({"samples": 0}, "samples"), ({"samples": 1.0}, "samples"), ({"samples": True}, "samples"),
        ({"clip": 0}, "clip"),
        ({"clip": math.inf}, "clip"), ({"clip": "1"}, "clip"), ({"epsilon": 0}, "epsilon"),
        ({"epsilon": math.nan}, "epsilon"), ({"delta": 0}, "delta"), ({"delta": 1}, "delta"),
        ({"floor": 0}, "floor"), ({"floor": -1}, "floor"), ({"floor": math.nan}, "floor"),
        ({"floor": 1e12}, "floor"), ({"max_rounds": 0}, "max_rounds"),
        ({"run_share": 0}, "run_share"), ({"run_share": 1.1}, "run_share"),
        ({"server_share": math.nan}, "server_share"), ({"max_work": 0}, "max_work"),
        ({"max_bytes": 1.5}, "max_bytes"), ({"max_steps": 0}, "max_steps"),
        ({"max_steps": 1001}, "max_steps"),
        ({"disclose": 1}, "disclose"),
    ],
)  # fmt: skip
def test_a_policy_that_promises_nothing_is_refused(change, word):
    with pytest.raises(InputError, match=word):
        replace(POLICY, **change)


TIGHTER = [
    {"epsilon": 4.0}, {"delta": 1e-6}, {"clip": 0.5}, {"floor": 3.0}, {"max_rounds": 10},
    {"max_steps": 4}, {"run_share": 0.5}, {"server_share": 0.5}, {"max_work": 10**6},
    {"max_bytes": 10**6}, {"disclose": False}, {"calibration": "zcdp"}, {"unit": "client"},
]  # fmt: skip


@pytest.mark.parametrize("change", TIGHTER, ids=str)
def test_a_policy_may_be_tightened_and_not_loosened_again(vault, place, change):
    vault.tighten(replace(POLICY, **change))
    vault.close()
    with Vault.open(place, dataset=DATASET) as again:
        assert again.policy == replace(POLICY, **change)
        with pytest.raises(PolicyRefusal):
            again.tighten(POLICY)
        assert again.policy == replace(POLICY, **change)


def test_other_samples_and_a_late_change_of_unit_are_refused(vault):
    with pytest.raises(PolicyRefusal, match="rebind"):
        vault.tighten(replace(POLICY, samples=100))
    book(vault, 0)
    with pytest.raises(PolicyRefusal, match="before the first release"):
        vault.tighten(replace(POLICY, unit="client"))


def test_an_equal_policy_writes_nothing(vault):
    before = vault.receipt()
    assert vault.tighten(replace(POLICY)) == before == vault.receipt()


@settings(max_examples=60, deadline=None)
@given(st.floats(0.05, 7.99), st.integers(1, FULL // 4))
def test_a_smaller_budget_caps_the_sum_in_mu2_whatever_was_spent_before(epsilon, first):
    """Σμ² over all releases, before and after, never exceeds the tightened capacity."""

    c0 = Fraction(POLICY.capacity())
    new = replace(POLICY, epsilon=epsilon)
    limit = new.count_parts(float(c0))
    assert Fraction(limit, FULL) * c0 <= Fraction(new.capacity())
    assert Fraction(limit + 1, FULL) * c0 > Fraction(new.capacity())


def test_a_tightened_budget_is_the_end_of_the_tank(vault):
    book(vault, 0, [FULL // 10])
    new = replace(POLICY, epsilon=4.0)
    vault.tighten(new)
    room = vault.limit - vault.spent
    tank = vault.tank("run-1")
    assert int(tank.left) == room
    assert float(tank.capacity) * room / FULL < new.capacity() < POLICY.capacity()
    part = room // 2
    book(vault, 1, [part])
    book(vault, 2, [room - part])
    with pytest.raises(TankEmpty):
        book(vault, 3, [1])
    spent = Fraction(vault.spent, FULL) * Fraction(float(tank.capacity))
    assert spent <= Fraction(new.capacity())


def test_a_budget_below_what_was_released_cannot_be_promised(vault):
    book(vault, 0, [FULL // 5])
    with pytest.raises(PolicyRefusal, match="already released"):
        vault.tighten(replace(POLICY, epsilon=1.0))
    assert vault.policy == POLICY


def test_the_capacity_is_that_of_the_budget():
    assert POLICY.capacity() == pytest.approx(float(capacity(8.0, 1e-5)), rel=1e-9)
    assert POLICY.capacity() <= float(capacity(8.0, 1e-5))


# One vault, one process, one newest state


def test_a_missing_vault_is_refused_and_nothing_is_made(place):
    with pytest.raises(VaultRefusal, match="ledger create"):
        Vault.open(place, dataset=DATASET)
    assert not place.exists()
    place.parent.joinpath("gone").mkdir()
    with pytest.raises(VaultRefusal):
        Vault.open(place.parent / "gone", dataset=DATASET)
    with pytest.raises(VaultRefusal):
        Vault.open(place.parent / "no folder" / "x.vault", dataset=DATASET)


def test_a_vault_is_never_replaced(place):
    used(place)
    with pytest.raises(VaultRefusal, match="exists already"):
        Vault.create(place, POLICY, dataset=DATASET)
    place.unlink()
    with pytest.raises(VaultRefusal, match="witness is there"):
        Vault.create(place, POLICY, dataset=DATASET)


@pytest.mark.parametrize("end", [".lock", ".part", ".room", ".witness", ".secrets", "-journal"])
def test_no_vault_has_the_name_of_a_file_beside_another(tmp_path, end):
    """The other one would overwrite or remove it: its lock, its draft, its room for an upload."""
    with Vault.create(tmp_path / "ward", POLICY, dataset=DATASET):
        pass
    before = sorted(tmp_path.iterdir())
    with pytest.raises(InputError, match="name must be a file's name"):
        Vault.create(tmp_path / f"other{end}", POLICY, dataset=OTHER)
    with pytest.raises(InputError, match="name must be a file's name"):
        backup(tmp_path / "ward", tmp_path / f"other{end}")
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize("path", ["none/ward.vault", "file/ward.vault", "w" * 253])
def test_a_vault_without_a_folder_for_it_says_so(tmp_path, path):
    (tmp_path / "file").touch()
    with pytest.raises(VaultRefusal, match="make its folder first, or correct the path"):
        Vault.create(tmp_path / path, POLICY, dataset=DATASET)
    assert [file.name for file in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("path", ["/", "..", "."])
def test_a_folder_is_no_name_for_a_vault(tmp_path, monkeypatch, path):
    inside = tmp_path / "inside"
    inside.mkdir()
    monkeypatch.chdir(inside)
    with pytest.raises(InputError, match="name must be a file's name"):
        Vault.create(path, POLICY, dataset=DATASET)
    assert list(tmp_path.rglob("*")) == [inside]


def test_a_file_of_somebody_elses_is_not_taken_for_a_lock(tmp_path):
    """A lock's content is overwritten with the number of the process that has it."""
    (tmp_path / "poetry.lock").write_text("# by another program\n")
    with pytest.raises(VaultRefusal, match="is not the lock of a vault"):
        Vault.create(tmp_path / "poetry", POLICY, dataset=DATASET)
    assert (tmp_path / "poetry.lock").read_text() == "# by another program\n"
    assert [path.name for path in tmp_path.iterdir()] == ["poetry.lock"]


def test_a_second_opening_is_refused_at_once(vault, place, monkeypatch):
    monkeypatch.setattr(time, "sleep", lambda seconds: pytest.fail("it waits for the lock"))
    with pytest.raises(VaultRefusal, match=f"in use by process {os.getpid()}"):
        Vault.open(place, dataset=DATASET)
    book(vault, 0)


def test_another_process_is_refused_by_the_lock_and_by_sqlite(vault, place):
    code = (
        "import sys; from pathlib import Path; from sottovoce.errors import VaultRefusal\n"
        "from sottovoce.client.vault import Vault\n"
        "try: Vault.open(Path(sys.argv[1]), dataset=None)\n"
        "except VaultRefusal as no: print(no)"
    )
    for moved_lock in (False, True):
        if moved_lock:  # what is left is SQLite's own lock
            place.with_name(place.name + ".lock").rename(place.with_name("elsewhere"))
        done = subprocess.run(
            [sys.executable, "-c", code, str(place)], capture_output=True, text=True, timeout=900
        )
        assert "is in use" in done.stdout, done.stderr
    book(vault, 0)


def test_many_threads_never_book_more_than_there_is(place):
    """Twenty releases are asked for at once and there is room for ten."""
    done, refused = [], []

    def work(vault, run):
        for t in range(5):
            try:
                vault.store(book(vault, t, [FULL // 10], run=run), run.encode())
                done.append((run, t))
            except TankEmpty:
                refused.append((run, t))

    with Vault.create(place, replace(POLICY, floor=1e-3), dataset=DATASET) as vault:
        threads = [threading.Thread(target=work, args=(vault, f"run-{i}")) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert (len(done), len(refused)) == (10, 10)
        assert vault.spent == 10 * (FULL // 10)
        assert all(vault.find(run, t).upload == run.encode() for run, t in done)


def test_a_closed_vault_and_one_opened_for_reading_book_nothing(vault, place):
    vault.close()
    vault.close()
    for use in (
        lambda: book(vault, 0),
        lambda: vault.tank("run-1"),
        lambda: vault.find_answered_reserve("run-1", 0),
    ):
        with pytest.raises(VaultRefusal, match="closed"):
            use()
    with Vault.open(place, dataset=None) as reading:
        with pytest.raises(VaultRefusal, match="reading only"):
            book(reading, 0)
        with pytest.raises(VaultRefusal, match="reading only"):
            reading.tighten(replace(POLICY, clip=0.5))


def test_other_records_are_refused_until_rebound(place):
    known = used(place)
    with pytest.raises(DatasetChanged, match="rebind"):
        Vault.open(place, dataset=OTHER)
    with pytest.raises(DatasetChanged) as no:  # a log would carry it to who may try out records
        Vault.open(place, dataset=OTHER)
    assert DATASET[:6] not in str(no.value).replace(str(place), "")
    assert OTHER[:6] not in str(no.value).replace(str(place), "")
    with pytest.raises(InputError):
        Vault.open(place, dataset="nonsense")
    with pytest.raises(PolicyRefusal, match="ledger create"):
        rebind(place, dataset=OTHER, samples=150, overlap="none")
    with pytest.raises(InputError, match="overlap"):
        rebind(place, dataset=OTHER, samples=150, overlap="")
    rebind(place, dataset=OTHER, samples=150, overlap="some")
    with pytest.raises(DatasetChanged):
        Vault.open(place, dataset=DATASET)
    with Vault.open(place, dataset=OTHER) as vault:
        known.held_by(vault)
        assert vault.policy == replace(POLICY, samples=150)
    with pytest.raises(PolicyRefusal, match="already"):
        rebind(place, dataset=OTHER, samples=150, overlap="all")


# Copies and older states


def copied(place, to):
    for name in ("", ".witness"):
        shutil.copy2(f"{place}{name}", f"{to}{name}")
    return to


def put_back(place, state):
    """An older content into the same file, so that only what it says can give it away."""
    with place.open("r+b") as file:
        file.write(state)
        file.truncate()


def test_a_copy_is_refused_and_can_be_moved_to(place, tmp_path):
    known = used(place)
    copy = copied(place, tmp_path / "copy.vault")
    with pytest.raises(VaultRefusal, match="is a copy of a vault"):
        Vault.open(copy, dataset=DATASET)
    with pytest.raises(VaultRefusal, match=r"--restored.*--nothing-since"):
        move(copy)  # it may as well be an old copy: the operator has to say
    move(copy, nothing_since=True)
    with Vault.open(copy, dataset=DATASET) as vault:
        known.held_by(vault)
        assert vault.burnt == 0
        assert vault.lines()[-1].facts["stated"] == "nothing was released since"
    with pytest.raises(PolicyRefusal, match="where it was"):
        move(copy, nothing_since=True)


def test_a_second_name_is_refused(place, tmp_path):
    used(place)
    os.link(place, tmp_path / "second.vault")
    with pytest.raises(VaultRefusal, match="hard link"):
        Vault.open(place, dataset=DATASET)
    (tmp_path / "second.vault").unlink()
    (tmp_path / "soft.vault").symlink_to(place)
    with Vault.open(tmp_path / "soft.vault", dataset=DATASET) as vault:
        with pytest.raises(VaultRefusal, match="in use"):
            Vault.open(place, dataset=DATASET)
        assert vault.path == place.resolve()


def test_an_older_state_is_refused_by_witness_and_by_receipt(place, elsewhere):
    known = used(place)
    older, old_witness = place.read_bytes(), place.with_name("ward.vault.witness").read_bytes()
    with Vault.open(place, dataset=DATASET) as vault:
        receipt = vault.store(book(vault, 0, run="run-c"), b"left")
    put_back(place, older)
    with pytest.raises(VaultRefusal, match="older or a parted copy"):
        Vault.open(place, dataset=DATASET)
    with pytest.raises(VaultRefusal, match="older or a parted copy"):
        move(place)
    place.with_name("ward.vault.witness").write_bytes(old_witness)  # both rolled back
    with pytest.raises(VaultRefusal, match="this machine has seen"):
        Vault.open(place, dataset=DATASET)
    elsewhere()  # and the state folder lost
    with pytest.raises(VaultRefusal, match="in this machine's state folder"):
        Vault.open(place, dataset=DATASET)
    move(place, nothing_since=True)  # a lie: only receipts are left to notice
    with Vault.open(place, dataset=DATASET) as vault:
        known.held_by(vault)
        assert not vault.contains(receipt)
        assert vault.contains(vault.receipt())
        book(vault, 0, run="run-c")
        vault.store(book(vault, 1, run="run-c"), b"parted")
        assert vault.receipt().seq > receipt.seq
        assert not vault.contains(receipt)  # the number is there, with another hash


def test_receipts_of_nowhere_are_not_contained(vault):
    here = vault.receipt()
    for change in ({"vault": "00" * 16}, {"hash": "00" * 32}, {"seq": 2}, {"seq": 2**52}):
        assert not vault.contains(replace(here, **change))


def test_a_vault_ahead_of_its_witness_is_the_crash_between_the_two(place):
    known = used(place)
    witness = place.with_name("ward.vault.witness")
    before = witness.read_bytes()
    with Vault.open(place, dataset=DATASET) as vault:
        play(vault, known, "run-c", range(2))
    after = witness.read_bytes()
    witness.write_bytes(before)
    with Vault.open(place, dataset=DATASET) as vault:
        known.held_by(vault)
    assert witness.read_bytes() == after


def test_looking_writes_no_witness(place, tmp_path, monkeypatch):
    """Whoever looks may be another account: a file of its own would lock the client out."""
    known = used(place)
    witness = place.with_name("ward.vault.witness")
    before = witness.read_bytes()
    with Vault.open(place, dataset=DATASET) as vault:
        play(vault, known, "run-c", range(2))
    witness.write_bytes(before)  # as after a crash between commit and witness
    inode = witness.stat().st_ino
    monkeypatch.setenv("SOTTOVOCE_STATE", str(tmp_path / "of-another-account"))
    with Vault.open(place, dataset=None) as vault:
        known.held_by(vault)
    backup(place, tmp_path / "kept.vault")
    assert (witness.read_bytes(), witness.stat().st_ino) == (before, inode)
    assert not (tmp_path / "of-another-account").exists()
    # The next use still catches up, and an older state is still refused to who looks.
    monkeypatch.undo()
    Vault.open(place, dataset=DATASET).close()
    assert VaultReceipt.parse(witness.read_text()).seq > VaultReceipt.parse(before.decode()).seq
    ahead = witness.read_text().replace('"seq":', '"seq":9')
    witness.write_text(ahead)
    for dataset in (None, DATASET):
        with pytest.raises(VaultRefusal, match="older or a parted copy"):
            Vault.open(place, dataset=dataset)


def test_what_root_writes_belongs_to_the_vaults_account(place, monkeypatch):
    """Root may book for a client; witness and lock stay the client's."""
    given = []
    monkeypatch.setattr(os, "fchown", lambda _descriptor, *ids: given.append(ids))
    used(place)
    assert given == []  # its own files need no giving
    plain, lock = os.fstat, place.with_name("ward.vault.lock")
    lock.unlink()  # as after a move, which takes vault and witness only

    def as_root(descriptor):
        found = plain(descriptor)
        return os.stat_result([*found[:4], found.st_uid + 1, *found[5:]])

    monkeypatch.setattr(os, "fstat", as_root)
    owner = (place.stat().st_uid, place.stat().st_gid)
    with Vault.open(place, dataset=DATASET) as vault:
        assert given == [owner] * 2  # the locks, beside it and the machine's
        book(vault, 7, run="run-d")
    assert given == [owner] * 4  # and both witnesses
    kept = Path(os.environ["SOTTOVOCE_STATE"])
    assert kept.stat().st_uid == owner[0]


needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="root alone can act as two accounts")


@needs_root
def test_a_client_goes_on_after_root_has_rebound_its_vault(monkeypatch):
    with client_folder() as folder:
        place, state = folder / "ward.vault", folder / "state"
        monkeypatch.setenv("SOTTOVOCE_STATE", str(state))
        do_apart(place, "used(place)", account=CLIENT)
        place.with_name("ward.vault.lock").unlink()
        rebind(place, dataset=OTHER, samples=150, overlap="some")
        with Vault.open(place, dataset=OTHER) as vault:
            vault.store(book(vault, 0, run="run-r"), b"by root")
        monkeypatch.setenv("SOTTOVOCE_STATE", str(folder / "new" / "state"))
        move(place, nothing_since=True)  # makes a state folder where there is none
        for path in folder.rglob("*"):
            assert (path.lstat().st_uid, path.lstat().st_gid) == (CLIENT, CLIENT), path

        go_on = """
with Vault.open(place, dataset=OTHER) as vault:
    vault.store(book(vault, 1), b"by the client")
rebind(place, dataset=DATASET, samples=9, overlap="some")
"""
        assert do_apart(place, go_on, account=CLIENT) == []


def test_a_witness_keeps_its_mode(place):
    """An operator may have let a group read it, for a monitor."""
    used(place)
    with Vault.open(place, dataset=DATASET) as vault:
        both = place.with_name("ward.vault.witness"), witness.locate_machine_witness(vault.id)
        for path in both:
            assert path.stat().st_mode & 0o777 == 0o600
            path.chmod(0o640)
        book(vault, 7, run="run-d")
    assert [path.stat().st_mode & 0o777 for path in both] == [0o640] * 2


@pytest.mark.parametrize("which", ["beside", "kept"])
def test_a_disk_that_takes_half_a_witness_leaves_the_old_one(place, which):
    """A real short write: the file may have 100 bytes, so that `write` takes these and no more."""
    used(place)

    fill = f"""
def limit():
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, resource.RLIM_INFINITY))
def keep(receipt, plain=witness.write_machine_witness):
    if {which == "kept"}:
        limit()
    plain(receipt)
    limit()
with Vault.open(place, dataset=DATASET) as vault:
    witness.write_machine_witness = keep
    refused(book, vault, 7)
"""
    before = Vault.open(place, dataset=None)
    before.close()
    both = place.with_name("ward.vault.witness"), witness.locate_machine_witness(before.id)
    (said,) = do_apart(place, fill)
    assert "cannot be written (File too large)" in said
    for path in both:
        assert VaultReceipt.parse(path.read_text()).vault == before.id
        assert not path.with_name(path.name + ".part").exists()
    with Vault.open(place, dataset=DATASET) as vault:
        assert vault.spent == before.spent + SHARE  # booked, and nothing was released
        assert [VaultReceipt.parse(path.read_text()) for path in both] == [vault.receipt()] * 2


@pytest.mark.parametrize("which", ["beside", "kept"])
def test_a_witness_that_was_cut_short_is_told_from_an_older_one(place, which):
    used(place)
    with Vault.open(place, dataset=None) as vault:
        kept = witness.locate_machine_witness(vault.id)
    path = place.with_name("ward.vault.witness") if which == "beside" else kept
    for content in (b"", path.read_bytes()[:100]):
        path.write_bytes(content)
        with pytest.raises(VaultRefusal, match="was cut short, as by a full disk"):
            Vault.open(place, dataset=DATASET)


WRONG = ("damaged", "copy", "older or", "remove", "rebind", "burn")  # of a file that is in order


def test_too_many_open_files_are_not_called_damage(place):
    used(place)
    few = """
free = os.open("/dev/null", os.O_RDONLY)
os.close(free)
for dataset in (DATASET, None) * 2:  # the first ones also import
    for most in range(20):
        now, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (free + most, hard))
        try:
            refused(lambda: Vault.open(place, dataset=dataset).close())
        except ImportError:
            pass
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (now, hard))
"""
    said = set(do_apart(place, few))
    assert "" in said  # twenty are enough
    assert len(said) > 3
    for text in said - {""}:
        assert not [word for word in WRONG if word in text], text
        assert "again" in text
    Vault.open(place, dataset=DATASET).close()


def test_a_read_error_of_the_disk_is_not_called_damage(place):
    used(place)

    class Failing:
        """A connection whose disk fails: SQLite's error, as it is raised."""

        def execute(self, *_):
            error = sqlite3.OperationalError("disk I/O error")
            error.sqlite_errorname = "SQLITE_IOERR_READ"
            raise error

    with Vault.open(place, dataset=DATASET) as vault:
        held = vault._chest._journal
        plain, held._db = held._db, Failing()
        for look in (
            lambda: vault.find("run-a", 0),
            lambda: vault.contains(vault.receipt()),
            vault.lines,
            held.check_pages,
        ):
            with pytest.raises(VaultRefusal, match="try again") as no:
                look()
            assert not [word for word in WRONG if word in str(no.value)]
        held._db = plain
        assert vault.find("run-a", 0).upload


@pytest.mark.parametrize("which", ["beside", "kept", "key", "marks"])
def test_a_file_of_another_account_is_not_called_damaged(place, monkeypatch, which):
    with ExitStack() as held:
        account = None
        if os.geteuid() == 0:
            place = held.enter_context(client_folder()) / "ward.vault"
            account = CLIENT
            monkeypatch.setenv("SOTTOVOCE_STATE", str(place.parent / "state"))
        do_apart(place, "used(place)", account=account)
        state = Path(os.environ["SOTTOVOCE_STATE"])
        (marks,), (kept,) = (state / "datasets").iterdir(), (state / "witness").glob("*[!k]")
        files = {"beside": place.with_name("ward.vault.witness"), "kept": kept}
        closed = (files | {"key": state / "key", "marks": marks})[which]
        closed.chmod(0)
        os.chown(closed, os.geteuid(), os.getegid())
        look = "refused(lambda: Vault.open(place, dataset=DATASET))"
        (said,) = do_apart(place, look, account=account)
        closed.chmod(0o700)
    assert "cannot be read (Permission denied)" in said
    assert "chown" in said
    assert not [word for word in WRONG if word in said]


PLANTED = {
    "its lock": lambda vault: vault.path.with_name("ward.vault.lock"),
    "the machine's lock": lambda vault: witness.locate_machine_witness(vault.id + ".lock"),
    "its witness": lambda vault: vault.path.with_name("ward.vault.witness"),
    "the machine's witness": lambda vault: witness.locate_machine_witness(vault.id),
    "the key": lambda vault: witness.locate_state() / "key",
    "a draft": lambda vault: vault.path.with_name("ward.vault.witness.part"),
    "the machine's draft": lambda vault: witness.locate_machine_witness(vault.id + ".part"),
    "room": lambda vault: vault.path.with_name("ward.vault.room"),
}


@pytest.mark.parametrize("link", [os.symlink, os.link], ids=["soft", "hard"])
@pytest.mark.parametrize("which", PLANTED)
def test_what_another_user_links_there_is_not_written(place, tmp_path, which, link):
    """Root would write to a file of the other user's choice, and give it away."""
    used(place)
    with Vault.open(place, dataset=None) as vault:
        planted = PLANTED[which](vault)
    precious = tmp_path / "precious"
    precious.write_bytes(planted.read_bytes() if planted.exists() else b"precious")
    before = precious.read_bytes(), precious.stat().st_ino
    planted.unlink(missing_ok=True)
    link(precious, planted)
    is_draft = which in ("a draft", "the machine's draft", "room")
    is_harmless = is_draft or (link is os.link and "lock" not in which)  # replaced, or only read
    refused = pytest.raises(VaultRefusal, match=r"a link|another file")
    with nullcontext() if is_harmless else refused, Vault.open(place, dataset=DATASET) as vault:
        vault.reserve("run-d", 7, request("run-d", 7), [SHARE], server="s", facts={}, room=99)
    assert (precious.read_bytes(), precious.stat().st_ino) == before


def test_links_of_the_operator_to_folders_work(place, tmp_path, monkeypatch):
    for name in ("real", "state"):
        (tmp_path / f"{name}-folder").mkdir()
        (tmp_path / name).symlink_to(tmp_path / f"{name}-folder")
    monkeypatch.setenv("SOTTOVOCE_STATE", str(tmp_path / "state"))
    known = used(tmp_path / "real" / "ward.vault")
    with Vault.open(tmp_path / "real" / "ward.vault", dataset=DATASET) as vault:
        known.held_by(vault)
    backup(tmp_path / "real" / "ward.vault", tmp_path / "real" / "kept.vault")
    assert (tmp_path / "real-folder" / "kept.vault").exists()
    (tmp_path / "planted.vault").symlink_to(tmp_path / "chosen.vault")
    with pytest.raises(VaultRefusal, match="exists already"):
        backup(tmp_path / "real" / "ward.vault", tmp_path / "planted.vault")
    with pytest.raises(VaultRefusal, match="exists already"):
        Vault.create(tmp_path / "planted.vault", POLICY, dataset=OTHER)
    assert not (tmp_path / "chosen.vault").exists()


@pytest.mark.parametrize(
    "what", ["empty", "table", "other database", "backup", "vault", "vault without a lock"]
)
def test_looking_writes_nothing(place, tmp_path, what):
    used(place)
    folder = tmp_path / "looked-at"
    folder.mkdir()
    file = folder / "a.vault"
    if what == "backup":
        backup(place, file)
    elif what.startswith("vault"):
        file, folder = place, place.parent
        if what.endswith("lock"):
            place.with_name("ward.vault.lock").unlink()
    elif what == "other database":
        with closing(sqlite3.connect(file)) as db:
            db.execute("PRAGMA journal_mode = WAL")
            db.execute("CREATE TABLE t (x)")
    else:
        file.write_text("age,cost\n" if what == "table" else "")

    def see():
        return {
            path: (path.stat().st_mtime_ns, path.stat().st_mode, path.read_bytes())
            for base in (folder, witness.locate_state())
            for path in base.rglob("*")
            if path.is_file() and path.suffix != ".lock"  # which says whose it is
        } | dict.fromkeys(folder.rglob("*.lock"))

    before = see()
    for look in (ledger.read_statement, ledger.verify, lambda file: backup(file, tmp_path / "b")):
        if what.startswith("vault"):
            look(file)
        else:
            with suppress(VaultRefusal):
                look(file)
    (tmp_path / "b").unlink(missing_ok=True)
    assert see() == before


def test_a_lost_witness_is_refused_and_restored_by_receipts_or_by_burning(place):
    known = used(place)
    with Vault.open(place, dataset=DATASET) as vault:
        receipt = vault.receipt()
    place.with_name("ward.vault.witness").unlink()
    with pytest.raises(VaultRefusal, match="no witness"):
        Vault.open(place, dataset=DATASET)
    with pytest.raises(VaultRefusal, match="--burn-rest"):
        restore(place)
    with pytest.raises(InputError, match="of this vault"):
        restore(place, receipts=[replace(receipt, vault="00" * 16)])
    with pytest.raises(VaultRefusal, match="says nothing of later"):
        restore(place, receipts=[receipt])  # the file contains it: no word about what came after
    with pytest.raises(InputError, match="exclude each other"):
        restore(place, burn_rest=True, nothing_since=True)
    _, burnt = restore(place, receipts=[receipt], nothing_since=True)
    assert burnt == 0
    with Vault.open(place, dataset=DATASET) as vault:
        known.held_by(vault)
    place.with_name("ward.vault.witness").unlink()
    _, burnt = restore(place, burn_rest=True)
    assert burnt == FULL - known.spent
    with Vault.open(place, dataset=DATASET) as vault:
        assert int(vault.tank("x").left) == 0
        with pytest.raises(TankEmpty):
            book(vault, 0, [1], run="run-c")


def test_what_is_advised_about_a_wrong_witness_works(place, tmp_path):
    """That of another vault is moved away, and a damaged one removed; no backup of one exists."""
    other = tmp_path / "other.vault"
    Vault.create(other, POLICY, dataset=OTHER).close()
    Vault.create(place, POLICY, dataset=DATASET).close()
    witness_file = place.with_name("ward.vault.witness")
    for content, advice in (
        (Path(f"{other}.witness").read_bytes(), "or move that one away and run `.* --restored`"),
        (b"{}\n", "; remove it and run `.* --restored`"),
    ):
        witness_file.write_bytes(content)
        with pytest.raises(VaultRefusal, match=advice):
            Vault.open(place, dataset=DATASET)
        with pytest.raises((InputError, VaultRefusal), match=r"away|remove it"):
            restore(place, nothing_since=True)
        witness_file.unlink()
        with pytest.raises(VaultRefusal, match="state with `--nothing-since`"):
            restore(place)
        restore(place, nothing_since=True)
        Vault.open(place, dataset=DATASET).close()


def test_a_backup_is_one_file_and_never_served_as_it_is(place, tmp_path, elsewhere):
    known, out = used(place), tmp_path / "kept.vault"
    made = backup(place, out)
    with pytest.raises(VaultRefusal, match="exists already"):
        backup(place, out)
    assert not out.with_name("kept.vault.witness").exists()
    shutil.copy2(f"{place}.witness", f"{out}.witness")  # even with a witness that fits
    for use in (
        lambda: Vault.open(out, dataset=DATASET),
        lambda: move(out, nothing_since=True),
        lambda: rebind(out, dataset=OTHER, samples=9, overlap="all"),
        lambda: backup(out, tmp_path / "again.vault"),
    ):
        with pytest.raises(VaultRefusal, match="is a backup"):
            use()
    state = out.read_bytes()
    with Vault.open(place, dataset=DATASET) as vault:
        play(vault, known, "run-c", range(4))
        assert vault.contains(made)
    put_back(place, state)  # into the old file: its inode does not give it away
    shutil.copy2(f"{out}.witness", f"{place}.witness")
    with pytest.raises(VaultRefusal, match="is a backup"):
        Vault.open(place, dataset=DATASET)
    with pytest.raises(VaultRefusal, match="leave `--nothing-since` out"):
        restore(place, nothing_since=True)  # this machine knows better
    restore(place)
    with Vault.open(place, dataset=DATASET) as vault:
        assert vault.spent == known.spent
    elsewhere()
    with pytest.raises(VaultRefusal, match="--burn-rest"):
        restore(out)
    _, burnt = restore(out, burn_rest=True)
    assert burnt > 0
    with Vault.open(out, dataset=DATASET) as vault:
        assert vault.spent == FULL


@pytest.mark.parametrize("machine", ["the same", "another"])
def test_a_pair_of_vault_and_witness_gives_nothing_back(place, tmp_path, elsewhere, machine):
    """Both files copied early and put back late: a witness that fits proves nothing by itself."""
    known, pair, _ = backup_and_go_on(place, tmp_path)
    early = json.loads(pair.with_name("backup.vault.witness").read_text())
    if machine == "another":
        elsewhere()
        inner = VaultReceipt.parse(json.dumps(early))  # contained in the file
        for attempt in ({}, {"receipts": [inner]}):
            with pytest.raises(VaultRefusal, match="--burn-rest"):
                restore(pair, **attempt)
        with pytest.raises(VaultRefusal, match="--nothing-since"):
            move(pair)
        _, burnt = restore(pair, burn_rest=True)
        assert early["spent"] + burnt == FULL
        return
    put_back(place, pair.read_bytes())  # as cp does: the inode stays
    shutil.copy2(f"{pair}.witness", f"{place}.witness")
    with pytest.raises(VaultRefusal, match="this machine has seen"):
        Vault.open(place, dataset=DATASET)
    with pytest.raises(VaultRefusal, match="this machine has seen"):
        move(pair, nothing_since=True)
    _, burnt = restore(place)
    assert early["spent"] + burnt == known.spent
    with Vault.open(place, dataset=DATASET) as vault:
        assert (vault.spent, vault.burnt) == (known.spent, burnt)


def test_a_machine_that_cannot_remember_books_nothing(place, tmp_path, monkeypatch):
    used(place)
    (tmp_path / "file").touch()
    monkeypatch.setenv("SOTTOVOCE_STATE", str(tmp_path / "file"))
    with pytest.raises(VaultRefusal, match="SOTTOVOCE_STATE"):
        Vault.open(place, dataset=DATASET)
    monkeypatch.setenv("SOTTOVOCE_STATE", str(tmp_path / "new"))
    move(place, nothing_since=True)
    with Vault.open(place, dataset=DATASET) as vault:  # a fresh machine begins to remember
        seen = tmp_path / "new" / "witness" / vault.id
        assert VaultReceipt.parse(seen.read_text()) == vault.receipt()
    seen.write_text("{}")
    with pytest.raises(VaultRefusal, match="is damaged"):
        Vault.open(place, dataset=DATASET)


def backup_and_go_on(place, tmp_path):
    """A copied pair, then more releases; the witness and the receipts that came after it."""
    known = used(place)
    backup = copied(place, tmp_path / "backup.vault")
    with Vault.open(place, dataset=DATASET) as vault:
        play(vault, known, "run-c", range(4))
        return known, backup, vault.receipt()


def test_a_backup_is_restored_with_what_the_witness_proves_burnt(place, tmp_path):
    known, backup, _ = backup_and_go_on(place, tmp_path)
    shutil.copy2(f"{place}.witness", f"{backup}.witness")  # it survived; the vault did not
    with pytest.raises(VaultRefusal, match="--restored"):
        Vault.open(backup, dataset=DATASET)
    _, burnt = restore(backup)
    assert burnt > 0
    with Vault.open(backup, dataset=DATASET) as vault:
        assert (vault.spent, vault.burnt) == (known.spent, burnt)


def test_a_backup_is_restored_with_what_a_receipt_proves_burnt(place, tmp_path, elsewhere):
    known, backup, receipt = backup_and_go_on(place, tmp_path)
    elsewhere()
    silent = VaultReceipt.from_json(receipt.to_json())
    with pytest.raises(VaultRefusal, match="does not say how much"):
        restore(backup, receipts=[silent])
    _, burnt = restore(backup, receipts=[receipt])
    with Vault.open(backup, dataset=DATASET) as vault:
        assert vault.spent == known.spent
        assert vault.burnt == burnt
        # The lost lines are paid for: the server's receipts from among them are no alarm.
        assert vault.contains(receipt)
        assert vault.contains(replace(receipt, seq=receipt.seq - 1, hash="00" * 32))
        assert not vault.contains(replace(receipt, seq=receipt.seq + 5))
        vault.store(book(vault, 0, [3], run="run-d"), b"goes on")
    with Vault.open(backup, dataset=DATASET) as vault:
        assert vault.spent == known.spent + 3


def test_a_backup_is_not_overwritten_by_the_journal_of_the_vault_before_it(place, tmp_path):
    """A crash in a large write left it beside the vault; the backup is put in the vault's place."""
    known, saved, stale = used(place), tmp_path / "saved.vault", tmp_path / "stale"
    backup(place, saved)
    state = saved.read_bytes()
    undo = place.with_name(place.name + "-journal")

    def keep(step):
        if step == "store: inserted":  # more than SQLite holds in memory: old pages are synced
            shutil.copy(undo, stale)

    with Vault.open(place, dataset=DATASET) as vault, pytest.MonkeyPatch.context() as patch:
        patch.setattr("sottovoce.client.vault.chain.pass_step", keep)
        vault.store(book(vault, 0, run="run-z"), bytes(2**23))
    assert int.from_bytes(stale.read_bytes()[8:12]) > 0  # pages that SQLite would roll back
    put_back(place, state)
    shutil.copy(stale, undo)
    for use in (
        lambda: restore(place),
        lambda: Vault.open(place, dataset=DATASET),
        lambda: Vault.open(place, dataset=None),
    ):
        with pytest.raises(VaultRefusal, match=r"is a backup, and .*move ward.vault-journal into"):
            use()
        assert place.read_bytes() == state
    undo.unlink()
    restore(place)
    with Vault.open(place, dataset=DATASET) as vault:
        assert vault.spent == known.spent + SHARE


def test_what_has_parted_can_only_be_burnt(place, tmp_path, elsewhere):
    _, backup, receipt = backup_and_go_on(place, tmp_path)
    elsewhere()
    move(backup, nothing_since=True)  # a lie: the original is still in use
    with Vault.open(backup, dataset=DATASET) as vault:
        play(vault, Known(), "run-d", range(9))
        assert vault.receipt().seq > receipt.seq
        assert not vault.contains(receipt)
    backup.with_name("backup.vault.witness").unlink()
    with pytest.raises(VaultRefusal, match="parted"):
        restore(backup, receipts=[receipt])
    restore(backup, receipts=[receipt], burn_rest=True)
    with Vault.open(backup, dataset=DATASET) as vault:
        assert int(vault.tank("x").left) == 0


def test_receipts_of_two_copies_that_have_parted_are_not_taken_for_one(place, tmp_path, elsewhere):
    """What both released adds up, and no receipt of either knows of the other's."""
    used(place)
    saved, other = tmp_path / "saved.vault", tmp_path / "other.vault"
    backup(place, saved)
    shutil.copy2(saved, other)
    with Vault.open(place, dataset=DATASET) as vault:
        vault.store(book(vault, 0, run="run-c"), b"here")
        vault.store(book(vault, 1, run="run-c"), b"here")
        here = vault.receipt()
    elsewhere()
    restore(other, nothing_since=True)  # a word that was not true
    there = []
    with Vault.open(other, dataset=DATASET) as vault:
        for t in range(3):
            paid = book(vault, t, [2], run="run-d")
            vault.store(paid, b"there")
            there.append(paid.receipt)  # it leaves with the answer
    same = next(receipt for receipt in there if receipt.seq == here.seq)
    later = there[-1]  # with a smaller sum than an earlier line
    assert later.seq > here.seq
    assert later.spent < here.spent
    for receipts in ([here, same], [VaultReceipt.from_json(same.to_json()), here], [later, here]):
        with pytest.raises(VaultRefusal, match="two copies that have parted"):
            restore(saved, receipts=receipts)
    restore(saved, receipts=[here, later], burn_rest=True)
    with Vault.open(saved, dataset=None) as vault:
        assert vault.spent == FULL


def test_a_receipt_of_a_line_beyond_all_lines_is_refused(place):
    """The line of a restore follows on it, and those after that one need numbers, too."""
    used(place)
    before = place.read_bytes()
    with Vault.open(place, dataset=DATASET) as vault:
        far = VaultReceipt(vault.id, 2**53 - 1, "ab" * 32, spent=FULL, alone=FULL)
    for burn_rest in (False, True):
        with pytest.raises(InputError, match=r"receipt\.seq must be at most"):
            restore(place, receipts=[far], burn_rest=burn_rest)
    assert place.read_bytes() == before


def test_a_backup_of_the_largest_budget_can_be_burnt(place, tmp_path):
    """Under the loosest terms of sums that this budget can have, which are fewer than 1,024."""
    Vault.create(place, Policy(1e6, 0.1, 9, 1.0), dataset=DATASET).close()
    saved = tmp_path / "saved.vault"
    backup(place, saved)
    restore(saved, burn_rest=True)
    with Vault.open(saved, dataset=None) as vault:
        assert vault.spent == FULL
        assert 1 < vault.promised.honest == vault.policy.most_honest < 1024


def test_the_newest_state_needs_no_restoring(place):
    used(place)
    with pytest.raises(PolicyRefusal, match="just use it"):
        restore(place)


class Stopped(BaseException):
    """The process ends here."""


CARE = [step for step in STEPS if step.startswith(("tighten:", "rebind:", "move:", "restore:",
                                                  "resume:"))]  # fmt: skip


@pytest.mark.parametrize("step", CARE)
def test_an_operator_s_command_that_stops_anywhere_can_be_given_again(
    place, tmp_path, monkeypatch, step
):
    """Before its commit nothing has happened, after it everything; never a unit less."""
    monkeypatch.setattr(chest, "SUMMARY_EVERY", 1)  # every write makes a summary
    known, backup, receipt = backup_and_go_on(place, tmp_path)
    where, dataset = place, DATASET
    kind = step.partition(":")[0]
    if kind in ("move", "restore"):
        where = backup
        shutil.copy2(f"{place}.witness", f"{backup}.witness")
    if kind == "move":
        shutil.copy2(place, backup)
    new = replace(POLICY, epsilon=7.0)
    if kind == "resume":
        with Vault.open(where, dataset=DATASET) as vault:
            vault.stop("MemoryError")
            receipt = vault.receipt()

    def act():
        if kind == "tighten":
            with Vault.open(where, dataset=DATASET) as vault:
                vault.tighten(new)
        elif kind == "rebind":
            rebind(where, dataset=OTHER, samples=99, overlap="all")
        elif kind == "move":
            move(where, nothing_since=True)
        elif kind == "resume":
            resume(where)
        else:
            restore(where)

    def stop(reached):
        if reached == step:
            raise Stopped

    with monkeypatch.context() as patch:
        patch.setattr("sottovoce.client.vault.chain.pass_step", stop)
        with pytest.raises(Stopped):
            act()
    done = step.endswith(("committed", "witness written", "witnessed"))
    if not done or kind == "tighten":
        act()  # given again it does its work, or finds it done
    else:
        with pytest.raises(PolicyRefusal):
            act()
    dataset = OTHER if kind == "rebind" else DATASET
    with Vault.open(where, dataset=dataset) as vault:
        assert vault.spent == known.spent
        assert vault.contains(receipt)
        assert vault.policy == (
            new if kind == "tighten" else replace(POLICY, samples=vault.policy.samples)
        )
        vault.store(book(vault, 0, [1], run="run-z"), b"goes on")


def test_a_file_replaced_while_in_use_ends_the_use(vault, place, tmp_path):
    book(vault, 0)
    other = tmp_path / "other.vault"
    shutil.copy2(place, other)
    other.replace(place)
    with pytest.raises(VaultRefusal, match="replaced"):
        book(vault, 1)
    with pytest.raises(VaultRefusal, match="open it again"):
        book(vault, 1)


def test_a_write_that_fails_books_nothing_and_closes_the_vault(vault, place, monkeypatch):
    book(vault, 0)

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("sottovoce.client.vault.witness.os.fsync", full)
    with pytest.raises(VaultRefusal, match="No space left"):
        book(vault, 1)
    with pytest.raises(VaultRefusal, match="open it again"):
        vault.find("run-1", 0)
    monkeypatch.undo()
    vault.close()
    with Vault.open(place, dataset=DATASET) as again:
        assert again.spent == 2 * SHARE  # the reserve was durable: it burns


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount a small file system")
def test_a_disk_that_is_almost_full_burns_nothing_and_keeps_no_half_files(tmp_path):
    """Lines and witnesses of the reserve need room, too, besides what is held for its upload."""
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(tmp_path)],
                          capture_output=True, text=True)  # fmt: skip
    if done.returncode:
        pytest.skip(f"no file system can be mounted here: {done.stderr.strip()}")
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("SOTTOVOCE_STATE", str(tmp_path / "state"))
            place, other, size = tmp_path / "ward.vault", tmp_path / "other", 5000
            Vault.create(place, POLICY, dataset=DATASET).close()
            before, stored, t = sorted(tmp_path.iterdir()), 0, 0
            for pages in range(2, 44, 2):
                other.write_bytes(bytes(shutil.disk_usage(tmp_path).free - size - 4096 * pages))
                with suppress(VaultRefusal):
                    backup(place, tmp_path / "backup.vault")
                (tmp_path / "backup.vault").unlink(missing_ok=True)
                with suppress(VaultRefusal), Vault.open(place, dataset=DATASET) as vault:
                    paid = vault.reserve(
                        "run", t, request("run", t), [1], server="s", facts={}, room=size
                    )
                    vault.store(paid, b"x" * size)
                other.unlink()
                assert sorted(tmp_path.iterdir()) == before
                with Vault.open(place, dataset=DATASET) as vault:
                    entry = vault.find("run", t)
                    assert entry is None or entry.upload == b"x" * size
                    stored, t = stored + (entry is not None), t + 1
            assert 0 < stored < t
    finally:
        subprocess.run(["umount", "-l", str(tmp_path)], check=True)


def test_a_fork_shares_no_vault(vault, place):
    code = (
        "import os, sys\nfrom pathlib import Path\n"
        "from support.vault_play import DATASET, request\n"
        "from sottovoce.errors import VaultRefusal\nfrom sottovoce.client.vault import Vault\n"
        "vault = Vault.open(Path(sys.argv[1]), dataset=DATASET)\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    try: vault.reserve('r', 0, request('r', 0), [1], server='s', facts={})\n"
        "    except VaultRefusal as no: os._exit(7 if 'fork' in str(no) else 8)\n"
        "    os._exit(9)\n"
        "print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))\n"
    )
    vault.close()
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", code, str(place)],
        capture_output=True, text=True, timeout=900, env=environment,
    )  # fmt: skip
    assert done.stdout.strip() == "7", done.stderr


# Damage


def test_lines_and_uploads_cannot_be_changed_by_other_tools(place):
    used(place)
    db = sqlite3.connect(place)
    for statement in (
        "UPDATE entries SET payload = '{}' WHERE seq = 3",
        "DELETE FROM entries WHERE seq = 3",
        "INSERT OR REPLACE INTO entries SELECT * FROM entries WHERE seq = 3",
        "UPDATE uploads SET content = x'00'",
        "DELETE FROM uploads",
    ):
        with pytest.raises(sqlite3.IntegrityError, match="only added"):
            db.execute(statement)
    db.close()


@pytest.mark.parametrize("seed", range(4))
def test_damage_older_states_and_copies_are_found_or_do_no_harm(tmp_path, seed):
    """200 in all; trust/test_vault.py has the 1,000."""
    seen = damage_and_look(tmp_path, trials=50, seed=seed)
    assert sum(seen.values()) == 50
    assert seen["refused"] >= 25


# A ledger that lives for years


def answer_once(place, run="new", t=0):
    """What a device asks of the vault for one message."""
    with Vault.open(place, dataset=DATASET) as vault:
        assert vault.find(run, t) is None
        vault.store(book(vault, t, [3], run=run), b"x" * 100)


def test_an_answer_reads_no_more_of_a_long_history_than_of_a_short_one(place, monkeypatch):
    """Work is counted: lines that are checked, and steps of SQLite's machine."""
    Vault.create(place, POLICY, dataset=DATASET).close()
    work, found = counted(monkeypatch), {}
    for rounds in (10, 40, 2_000):
        live(place, rounds, a_run=rounds)
        work.lines = work.steps = 0
        answer_once(place, run=f"new-{rounds}")
        found[rounds] = (work.lines, work.steps)
        with Vault.open(place, dataset=DATASET) as vault:
            vault.close()
        place.unlink()
        place.with_name("ward.vault.witness").unlink()
        Vault.create(place, POLICY, dataset=DATASET, second_ledger=True).close()
    most = chest.SUMMARY_EVERY + 8  # lines of the last write, and those read by their number
    assert all(lines <= most for lines, _ in found.values())
    assert found[2_000][1] < 2 * found[40][1]


@pytest.mark.slow
def test_ten_thousand_rounds_add_up_the_same_from_the_summary_and_from_all_lines(place):
    Vault.create(place, POLICY, dataset=DATASET).close()
    live(place, 10_000)
    seen = []
    for dataset in (DATASET, None):  # for use: the summary; for reading: all lines
        with Vault.open(place, dataset=dataset) as vault:
            assert vault.receipt().seq == 1 + 20 + 2 * 10_000
            books = vault._books
            assert vault.spent == books.spent_by_server("s") == 3 * 10_000
            assert books.spent_by_run("old-7") == 3 * 500
            assert books.spent_by_run("old-77") == books.spent_by_server("t") == 0
            with pytest.raises(RoundAnswered) if dataset else pytest.raises(VaultRefusal):
                book(vault, 17, run="old-3")
            assert vault.find("old-3", 500) is None
            seen.append([vault.find(f"old-{n}", t) for n in (0, 3, 19) for t in (0, 497, 498, 499)])
    assert seen[0] == seen[1]
    assert [entry.dropped for entry in seen[0]] == [True, True, False, False] * 3
    assert all(e.upload == request(e.run, e.t).encode() for e in seen[0] if not e.dropped)


@pytest.fixture
def long(place, monkeypatch):
    """A vault with a summary after every few lines, and what was booked in it."""
    monkeypatch.setattr(chest, "SUMMARY_EVERY", 4)
    return used(place)


def change_table(place, statement, *values):
    with unguarded_file(place) as db:
        assert db.execute(statement, values).rowcount > 0


def test_a_file_that_never_was_a_vault_is_not_called_damaged(tmp_path, place):
    """A vault whose first bytes are lost looks the same, so that its remedy is said, too."""
    Vault.create(place, POLICY, dataset=DATASET).close()
    rest = place.read_bytes()[16:]
    for content in (b"age,cost\n1,2\n", b"1,2\n" * 9_000, bytes(16) + rest):
        other = tmp_path / "visits.csv"
        other.write_bytes(content)
        for dataset in (DATASET, None):
            with pytest.raises(VaultRefusal) as caught:
                Vault.open(other, dataset=dataset)
            assert str(caught.value).startswith(f"{other} is no vault (")
            assert "if it was one, put its backup back" in str(caught.value)
        assert other.read_bytes() == content
    place.write_bytes(place.read_bytes()[:-4096])
    with pytest.raises(VaultRefusal, match="is damaged"):
        Vault.open(place, dataset=DATASET)


@pytest.mark.parametrize(
    "change",
    [{"inode": "∞"}, {"capacity": "∞"}, {"capacity": 10**400}, {"capacity": 0}, {"vault": []},
     {"policy": []}, {"dataset": None}],
    ids=lambda change: str(change)[:25],
)  # fmt: skip
def test_an_impossible_line_is_damage_although_its_hash_fits(place, change):
    Vault.create(place, POLICY, dataset=DATASET).close()
    with unguarded_file(place) as db:
        (time, payload) = db.execute("SELECT time, payload FROM entries").fetchone()
        payload = encode_canonical(json.loads(payload) | change).replace('"\\u221e"', "1e999")
        line = link_line(GENESIS, 1, time, "create", payload)
        db.execute("UPDATE entries SET payload = ?, hash = ?", (payload, line.hash))
    with pytest.raises(VaultRefusal, match="line 1 makes no sense"):
        Vault.open(place, dataset=None)
    assert "line 1 makes no sense" in (ledger.verify(place).broken or "")


def test_a_summary_that_was_edited_is_refused(place, long):
    with unguarded_file(place) as db:
        (content,) = db.execute("SELECT content FROM summary").fetchone()
    facts = json.loads(content)
    for change in (
        {"spent": facts["spent"] // 2}, {"seq": facts["seq"] - 1}, {"hash": "00" * 32},
        {"root": "00" * 32}, {"promised": None}, {"capacity": 2 * facts["capacity"]},
    ):  # fmt: skip
        change_table(place, "UPDATE summary SET content = ?", encode_canonical(facts | change))
        for dataset in (DATASET, None):
            with pytest.raises(VaultRefusal, match="is damaged"):
                Vault.open(place, dataset=dataset)
    for nonsense in ("", "{}", "[]", "null", '{"seq":"x"}', "{" * 2_000):
        change_table(place, "UPDATE summary SET content = ?", nonsense)
        with pytest.raises(VaultRefusal, match="is damaged"):
            Vault.open(place, dataset=DATASET)
    change_table(place, "UPDATE summary SET content = ?", content)
    with Vault.open(place, dataset=DATASET) as vault:
        long.held_by(vault)


def test_a_summary_of_another_version_is_not_used_and_all_lines_are_read(place, long):
    """A key more or less: the chain is what counts, and the next write makes a new summary."""
    with unguarded_file(place) as db:
        facts = json.loads(db.execute("SELECT content FROM summary").fetchone()[0])
    change_table(
        place, "UPDATE summary SET content = ?", encode_canonical(facts | {"spent": 1, "new": 2})
    )
    with Vault.open(place, dataset=DATASET) as vault:
        long.held_by(vault)
        play(vault, long, "run-c", range(4))
    with Vault.open(place, dataset=None) as vault:
        long.held_by(vault)


def test_a_round_that_was_taken_out_of_the_records_is_not_answered_anew(place, long):
    """A record that is missing, a node that is gone or older: refused, never taken for a no."""
    with unguarded_file(place) as db:
        leaves = db.execute("SELECT place, content FROM nodes WHERE content LIKE '{%'").fetchall()
        summary = db.execute("SELECT content FROM summary").fetchone()[0]
    known = {key: (name, content) for name, content in leaves for key in json.loads(content)}
    assert json.loads(summary)["seq"] > 20
    for t in range(6):
        name, content = known[encode_canonical(["turn", "run-a", t])]
        records = json.loads(content)
        del records[encode_canonical(["turn", "run-a", t])]
        for damage in (
            ("UPDATE nodes SET content = ? WHERE place = ?", encode_canonical(records), name),
            ("DELETE FROM nodes WHERE place = ?", name),
        ):
            change_table(place, *damage)
            for use in (
                lambda vault, t=t: vault.find("run-a", t),
                lambda v, t=t: book(v, t, run="run-a"),
            ):
                with (  # at once if the last lines need that node, else when it is asked for
                    pytest.raises(VaultRefusal, match="is damaged"),
                    Vault.open(place, dataset=DATASET) as vault,
                ):
                    use(vault)
            with pytest.raises(VaultRefusal, match="is damaged"):
                Vault.open(place, dataset=None)
            with unguarded_file(place) as db:
                db.execute("INSERT OR REPLACE INTO nodes VALUES (?, ?)", (name, content))
    with Vault.open(place, dataset=DATASET) as vault:
        long.held_by(vault)


def test_an_old_line_that_was_edited_is_not_believed(place, long):
    """Where it is asked for; `verify` and whoever looks find it anyway."""
    with Vault.open(place, dataset=DATASET) as vault:
        old = vault.find("run-a", 1).seq
        mark = VaultReceipt(vault.id, old, vault.lines()[old - 1].hash)
        assert vault.contains(mark)
    with unguarded_file(place) as db:
        payload = db.execute("SELECT payload FROM entries WHERE seq = ?", (old,)).fetchone()[0]
    other = encode_canonical(json.loads(payload) | {"units": [1]})
    change_table(place, "UPDATE entries SET payload = ? WHERE seq = ?", other, old)
    with Vault.open(place, dataset=DATASET) as vault:
        assert vault.spent == long.spent  # the sum does not rest on it
        for use in (lambda: vault.find("run-a", 1), lambda: vault.contains(mark), vault.lines):
            with pytest.raises(VaultRefusal, match="is damaged"):
                use()
    change_table(place, "DELETE FROM entries WHERE seq = ?", old)
    with (
        Vault.open(place, dataset=DATASET) as vault,
        pytest.raises(VaultRefusal, match="is damaged"),
    ):
        vault.contains(mark)  # no gap: no restore follows on it
    with pytest.raises(VaultRefusal, match="is damaged"):
        Vault.open(place, dataset=None)


def test_old_receipts_are_known_and_a_paid_gap_stays_one(place, long, tmp_path, elsewhere):
    with Vault.open(place, dataset=DATASET) as vault:
        early = [VaultReceipt(vault.id, line.seq, line.hash) for line in vault.lines()[:9]]
    copied(place, tmp_path / "copy.vault")
    with Vault.open(place, dataset=DATASET) as vault:
        play(vault, long, "run-c", range(3))
        lost = vault.receipt()
    elsewhere()
    restore(tmp_path / "copy.vault", receipts=[lost])
    with Vault.open(tmp_path / "copy.vault", dataset=DATASET) as vault:
        play(vault, Known(), "run-d", range(4))
    for dataset in (DATASET, None):
        with Vault.open(tmp_path / "copy.vault", dataset=dataset) as vault:
            assert all(vault.contains(receipt) for receipt in early)
            assert not any(vault.contains(replace(r, hash="00" * 32)) for r in early)
            assert vault.contains(lost)
            assert vault.contains(replace(lost, seq=lost.seq - 1, hash="00" * 32))


def test_a_vault_of_the_first_form_opens_and_is_summed_up_once(place, monkeypatch):
    monkeypatch.setattr(chest, "SUMMARY_EVERY", 10**9)
    known = used(place, rounds=8)
    make_old(place)
    monkeypatch.undo()
    old = place.read_bytes()
    with Vault.open(place, dataset=None) as vault:
        known.held_by(vault)
    assert place.read_bytes() == old  # who looks changes nothing
    lines = []
    for run in ("run-c", "run-d"):
        with monkeypatch.context() as patch, Vault.open(place, dataset=DATASET) as vault:
            known.held_by(vault)
            play(vault, known, run, range(1))
            vault.close()
            work = counted(patch)
            Vault.open(place, dataset=DATASET).close()
            lines.append(work.lines)
    assert max(lines) < 10  # 41 without a summary
    with Vault.open(place, dataset=None) as vault:
        known.held_by(vault)


@pytest.mark.parametrize("step", ["begun", "summarised", "inserted", "committed", "witnessed"])
def test_the_first_write_to_an_old_vault_may_stop_anywhere(place, monkeypatch, step):
    with monkeypatch.context() as patch:
        patch.setattr(chest, "SUMMARY_EVERY", 10**9)
        known = used(place, rounds=8)
    make_old(place)

    def stop(reached):
        if reached == f"reserve: {step}":
            raise Stopped

    with monkeypatch.context() as patch:
        patch.setattr("sottovoce.client.vault.chain.pass_step", stop)
        vault = Vault.open(place, dataset=DATASET)
        with pytest.raises(Stopped):
            book(vault, 0, [5], run="run-c")
        vault.close()
    known.spent += 5 * (step in ("committed", "witnessed"))
    for dataset in (None, DATASET):
        with Vault.open(place, dataset=dataset) as vault:
            known.held_by(vault)
    answer_once(place)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 400), st.integers(0, 9)), max_size=300), st.randoms())
def test_records_are_a_dictionary_and_their_tree_is_that_of_their_content(puts, random):
    """Folded whenever: the same root and nodes as of all records at once."""
    nodes, known = {}, {}
    records = Records(nodes.get)
    for key, value in puts:
        assert records.get("k", key) == known.get(key)
        records.put("k", key, value=value)
        known[key] = value
        if random.random() < 0.1:
            nodes.update(records.fold()[1])
    root, more = records.fold()
    nodes.update(more)
    assert all(Records(nodes.get, root).get("k", key) == known.get(key) for key in range(401))
    at_once = Records({}.get)
    for key, value in known.items():
        at_once.put("k", key, value=value)
    assert at_once.fold() == (root, nodes)


# Uploads that nobody can ask for any more


def acknowledge(vault, t, seen, run="run-1", units=3):
    paid = vault.reserve(run, t, request(run, t), [units], server="s", facts={}, acknowledged=seen)
    vault.store(paid, f"{run} {t}".encode() * 50)
    return VaultReceipt.from_json(paid.receipt.to_json())  # as it leaves, with the answer


def uploads_in(place):
    with sqlite3.connect(place) as db:
        return {tuple(row) for row in db.execute("SELECT run, t FROM uploads").fetchall()}


def test_an_upload_is_dropped_when_a_later_answer_was_acknowledged(vault, place):
    seen, last = None, None
    for t in (0, 1, 3, 4, 7):  # a client is not in every cohort
        seen, last = acknowledge(vault, t, seen), seen
    spent, receipt = vault.spent, vault.receipt()
    for t, there in ((0, False), (1, False), (3, False), (4, True), (7, True)):
        entry = vault.find("run-1", t)
        assert (entry.upload is not None, entry.dropped) == (there, not there)
        assert entry.request_hash == request("run-1", t)
        with pytest.raises(RoundAnswered):
            book(vault, t)
    assert (vault.spent, vault.receipt()) == (spent, receipt)
    assert vault.contains(last)
    vault.close()
    assert uploads_in(place) == {("run-1", 4), ("run-1", 7)}
    assert b"run-1 0run-1 0" not in place.read_bytes()  # overwritten, not only unlinked
    with Vault.open(place, dataset=None) as vault:
        assert [vault.find("run-1", t).dropped for t in (0, 1, 3, 4, 7)] == [True] * 3 + [False] * 2


def test_what_no_answer_of_the_run_acknowledges_drops_nothing(vault, place):
    """Receipts of greetings, of other runs, of burnt debits, made up, too old, too early."""
    first = [acknowledge(vault, t, None) for t in range(4)]
    burnt = book(vault, 9, [3]).receipt
    greeting = vault.receipt()
    other = acknowledge(vault, 5, None, run="run-2")
    stored = replace(first[2], seq=first[2].seq + 1, hash=vault.lines()[first[2].seq].hash)
    made_up = replace(first[3], hash="00" * 32)
    for t, seen in enumerate((burnt, greeting, other, stored, made_up, None), 10):
        acknowledge(vault, t, seen)
    # The answer to round 3 is acknowledged by who asks for a round before it, or for that one.
    vault.reserve("run-1", 4, request("run-1", 4), [3], server="s", facts={}, acknowledged=other)
    acknowledge(vault, 2, first[3], run="run-3")
    vault.close()
    kept = {("run-1", t) for t in (*range(4), *range(10, 16))}
    assert uploads_in(place) == kept | {("run-2", 5), ("run-3", 2)}


def test_a_receipt_that_is_older_than_the_last_one_drops_nothing_more(vault, place):
    seen = [acknowledge(vault, t, None) for t in (5, 6, 7)]
    acknowledge(vault, 8, seen[1])  # 5 goes
    late = acknowledge(vault, 3, None)  # asked out of order, and answered after 6 was
    acknowledge(vault, 9, seen[0])
    acknowledge(vault, 10, late)
    assert [vault.find("run-1", t).dropped for t in (3, 5, 6, 7)] == [False, True, False, False]
    acknowledge(vault, 11, seen[2])
    assert [vault.find("run-1", t).dropped for t in (3, 5, 6, 7)] == [False, True, True, False]
    vault.close()
    with Vault.open(place, dataset=None) as again:
        assert again.find("run-1", 3).upload == b"run-1 3" * 50


def test_many_old_uploads_are_dropped_a_few_at_a_write(vault, place):
    seen = [acknowledge(vault, t, None) for t in range(2 * journal.MOST_DROPPED + 3)]
    last = len(seen)
    acknowledge(vault, last, seen[-1])
    assert all(vault.find("run-1", t).dropped for t in range(last - 1))  # said at once
    vault.close()
    assert len(uploads_in(place)) == len(seen) + 1 - journal.MOST_DROPPED
    with Vault.open(place, dataset=DATASET) as vault:
        newest = vault.find("run-1", last)
        mark = VaultReceipt(vault.id, newest.seq, vault.lines()[newest.seq - 1].hash)
        mark = acknowledge(vault, last + 1, mark)
        acknowledge(vault, last + 2, mark)
    assert uploads_in(place) == {("run-1", t) for t in range(last + 1, last + 3)}
    Vault.open(place, dataset=None).close()


def test_the_file_stops_growing_by_uploads(place):
    size, seen = {}, None
    with Vault.create(place, POLICY, dataset=DATASET) as vault:
        for t in range(60):
            paid = vault.reserve("r", t, request("r", t), [3], server="s", facts={},
                                 acknowledged=seen)  # fmt: skip
            seen = paid.receipt
            vault.store(paid, os.urandom(100_000))
            size[t] = place.stat().st_size
    assert size[59] - size[9] < 2 * 100_000  # lines and records: 3 kB a round
    assert size[59] > 2 * 100_000


# Fingerprints


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 20), st.integers(1, 5), st.randoms(use_true_random=False))
def test_a_fingerprint_is_of_the_rows_not_of_their_order(n, d, random):
    rng = np.random.default_rng(random.randrange(2**32))
    x, y = rng.normal(size=(n, d)), rng.integers(0, 2, n)
    mark, order = fingerprint(x, y), rng.permutation(n)
    assert fingerprint(x[order], y[order]) == mark
    assert fingerprint(np.asfortranarray(x), y.astype(">i4")) == mark
    assert fingerprint(x.reshape(n, d, 1), y.astype(bool)) == mark
    assert fingerprint(np.vstack([x, x[:1]]), np.append(y, y[0])) != mark  # duplicates count
    bumped = x.copy()
    bumped[rng.integers(n), rng.integers(d)] += 1e-9
    assert fingerprint(bumped, y) != mark
    assert fingerprint(x.astype(np.float32), y) != mark
    with pytest.raises(InputError):
        fingerprint(x, y[:-1])


def test_a_file_s_fingerprint(tmp_path):
    x, y = np.arange(6.0).reshape(3, 2), np.array([0, 1, 1])
    np.savez(tmp_path / "a.npz", x=x, y=y)
    np.savez_compressed(tmp_path / "b.npz", x=x[::-1], y=y[::-1])
    assert fingerprint_file(tmp_path / "a.npz") == (fingerprint(x, y), 3)
    assert fingerprint_file(tmp_path / "b.npz") == (fingerprint(x, y), 3)
    (tmp_path / "t.csv").write_text("a,b\n1,2\n")
    assert fingerprint_file(tmp_path / "t.csv")[1] is None
    with pytest.raises(InputError):
        fingerprint_file(tmp_path / "none.csv")


def test_receipts_read_back_and_nonsense_is_refused():
    receipt = VaultReceipt("ab" * 16, 7, "cd" * 32, spent=9)
    assert VaultReceipt.from_json(receipt.to_proof()) == receipt
    assert VaultReceipt.from_json(receipt.to_json()) == replace(receipt, spent=None)
    assert "spent" not in receipt.to_json()
    good = receipt.to_proof()
    bad = [
        "[]", "x", json.dumps(good | {"seq": "7"}), json.dumps(good | {"spent": -1}),
        json.dumps(good | {"hash": "zz"}), json.dumps(good | {"more": 1}), "{}",
        json.dumps(good | {"schema": "other"}), json.dumps(good | {"spent": True}),
    ]  # fmt: skip
    for text in bad:
        with pytest.raises(InputError):
            VaultReceipt.parse(text)


def test_a_start_without_anything_heavy():
    code = (
        "import sys, sottovoce.client.vault\n"
        "print([m for m in ('jax', 'scipy', 'pydantic', 'polars', 'flwr') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=900)
    assert done.stdout == "[]\n", done.stderr
