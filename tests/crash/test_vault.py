"""Clients that die and disks that forget: debited ≥ released, one answer a round, it goes on.

Sizes here are those of every push; trust/test_vault.py has the long ones. A kill never tests a sync
(the system's cache survives it), so power cuts are rebuilt from a log of what the client asked of
the disk. Mutants of the vault with one precaution removed must be caught by the same checks.
"""

from __future__ import annotations

import shutil
from collections import Counter
from pathlib import Path

import pytest

import sottovoce
from sottovoce.client.vault.chest import Chest
from support.vault_kills import killed, outcomes
from support.vault_power import cuts, look, record

pytestmark = pytest.mark.slow  # left out of the editing loop


def test_killed_at_every_step_and_at_random_a_client_debits_what_it_releases(tmp_path):
    told = killed(tmp_path, kills=200, seed=1)
    assert told["said"] == ""
    assert told["steps not reached"] == []
    assert told["deaths"]["killed"] == 200
    assert set(told["deaths"]) <= {"killed", "exit 0"}  # nobody had to help it
    assert told["messages"] >= told["rounds"] >= 50
    assert told["rounds with two answers"] == 0
    assert told["answers that are not stored"] == 0
    assert told["uploads dropped"] > told["rounds"] // 2
    assert told["dropped too early"] == 0
    assert told["debited"] >= told["released"] > 0
    assert told["reserves"] > told["rounds"]  # some were burnt, none refunded


def test_a_client_that_sends_before_it_books_would_be_noticed(tmp_path):
    told = killed(tmp_path, kills=60, seed=1, careless=True)
    assert told["answers that are not stored"] > 0
    assert told["debited"] < told["released"]


def test_a_power_cut_forgets_nothing_that_was_promised(tmp_path, shim):
    log = record(tmp_path / "disk", shim, rounds=6)
    seen = outcomes(tmp_path / "disk", log, count=100, seed=1)
    assert sum(seen.values()) == 100
    assert seen["opened"] >= 80


def test_the_recorded_run_is_the_one_that_happened(tmp_path, shim):
    """Replayed to its end with everything surviving, the log gives the files as they are."""
    from support.vault_power import Disk

    log = record(tmp_path / "disk", shim, rounds=3)
    disk = Disk()
    for event in log:
        disk.happen(event)
    for file in disk.now.values():
        file.sync()
    there = {path.name: path.read_bytes() for path in (tmp_path / "disk").iterdir()}
    assert {name: bytes(file.safe) for name, file in disk.now.items()} == there
    assert set(there) == {"ward.vault", "ward.vault.witness", "ward.vault.lock", "marks"}


MUTANTS = {
    "no sync of the vault": (
        "journal.py",
        '"synchronous = EXTRA"',
        '"synchronous = OFF"',
    ),
    "no sync of the witness": (
        "witness.py",
        "content[os.write(descriptor, content) :]\n        os.fsync(descriptor)\n",
        "content[os.write(descriptor, content) :]\n",
    ),
    "no sync of the folder": (
        "witness.py",
        "os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)\n    try:\n        os.fsync(descriptor)",
        "os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)\n    try:\n        pass",
    ),
    "the witness before the vault": (
        "chest.py",
        "                self._journal.append(lines, kind, upload, summary=summary, drop=drop)\n",
        "                witness.write_witness(self.path, VaultReceipt(self.books.id, "
        "lines[-1].seq, lines[-1].hash, 0), kind)\n"
        "                self._journal.append(lines, kind, upload, summary=summary, drop=drop)\n",
    ),
}


def mutated_log(folder: Path, shim: Path, name: str) -> list[str]:
    """What a client does on the disk whose vault has one line changed."""
    file, old, new = MUTANTS[name]
    package = folder / "package"
    original = Path(sottovoce.__file__).parent
    shutil.copytree(original, package / "sottovoce", ignore=shutil.ignore_patterns("__pycache__"))
    path = package / "sottovoce" / "client" / "vault" / file
    source = path.read_text("utf-8")
    assert source.count(old) == 1
    path.write_text(source.replace(old, new), "utf-8")
    return record(folder / "disk", shim, rounds=4, package=package)


@pytest.mark.parametrize("name", MUTANTS)
def test_a_vault_with_one_precaution_less_is_caught(tmp_path, shim, name):
    log = mutated_log(tmp_path, shim, name)
    with pytest.raises(AssertionError, match=r"not opened|is gone"):
        outcomes(tmp_path / "disk", log, count=300, seed=1)


def test_without_syncs_only_the_witness_stands_between_a_power_cut_and_a_refund(
    tmp_path, shim, monkeypatch
):
    """`synchronous = OFF` is refused as older than its witness; without one, debits vanish."""
    log = mutated_log(tmp_path, shim, "no sync of the vault")
    monkeypatch.setattr(Chest, "require_witnessed", lambda self: False)
    breaches: Counter[str] = Counter()
    for cut in cuts(log, count=100, seed=1):
        try:
            look(tmp_path / "disk", *cut)
        except AssertionError as error:
            breaches[str(error).partition(" after")[0]] += 1
    assert breaches["a debit is gone"] >= 5
