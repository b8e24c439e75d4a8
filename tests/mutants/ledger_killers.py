"""Privacy properties of a device and its vault, each a function that fails where one is broken.

They belong to `privacy_killers`: what a killer asserts is a promise to a client. Vaults are played
with as an operator or a thief of backups would: files are copied, put back, moved, restored.
"""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
import tempfile
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import numpy as np
from scipy.special import log_ndtr, ndtr

from sottovoce.client import device, release
from sottovoce.client.vault import Policy, Vault, VaultReceipt, chest, fingerprint, journal
from sottovoce.client.vault.chain import add_salt, encode_canonical
from sottovoce.client.vault.chest import Chest
from sottovoce.client.vault.policy import require_tighter
from sottovoce.client.vault.rebinding import backup, move, rebind, restore, resume
from sottovoce.errors import InputError, PolicyRefusal, SottovoceError
from sottovoce.privacy.sensitivity import Recipe
from sottovoce.privacy.tank import FULL
from support.devices import ask, books_hold, kind, make_node, model, rows, told


def chance(epsilon, mu):
    """δ(ε, μ) of the Gaussian mechanism, by scipy; something must have been released."""
    assert mu > 0
    second = np.exp(epsilon + log_ndtr(-mu / 2 - epsilon / mu))
    return ndtr(mu / 2 - epsilon / mu) - second


FOLDERS = tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None)


def folder():
    """A new folder, which is removed with the others when the process ends."""
    return Path(tempfile.mkdtemp(dir=FOLDERS.name))


def _spent(node):
    with Vault.open(node.vault, dataset=None) as vault:
        return vault.spent


def _go_on(node):
    """The operator's word after a failure; nothing where the client has not stopped."""
    with suppress(PolicyRefusal):
        resume(node.vault)


def the_debit_is_durable_before_anything_is_computed():
    """A client that dies while it computes has paid; asked again, it pays again."""
    node, real = make_node(folder()), release.release
    seen = []

    def dies(*args, **kwargs):
        raise MemoryError

    try:
        release.release = dies
        assert kind(device.answer_request(ask().to_blob(), node)) == "unavailable"
        seen.append(_spent(node))
        _go_on(node)
        assert kind(device.answer_request(ask().to_blob(), node)) == "unavailable"
        seen.append(_spent(node))
    finally:
        release.release = real
    assert 0 < seen[0] < seen[1]
    _go_on(node)
    assert kind(device.answer_request(ask().to_blob(), node)) == "upload"
    books_hold(node)
    assert _spent(node) > seen[1]  # what was burnt is not given back


def a_round_has_one_answer():
    """The same bytes again, at no further cost; a client that cannot store says nothing."""
    node, real = make_node(folder()), Vault.store
    first = device.answer_request(ask().to_blob(), node)
    spent = _spent(node)
    again = device.answer_request(ask().to_blob(), node)
    assert kind(first) == "upload"
    assert again == first
    assert _spent(node) == spent
    other = device.answer_request(ask(params=model(value=0.3)).to_blob(), node)
    assert kind(other) != "upload"
    try:
        Vault.store = lambda *_: (_ for _ in ()).throw(OSError("full"))
        assert kind(device.answer_request(ask(t=1).to_blob(), node)) != "upload"
    finally:
        Vault.store = real


def a_device_stays_within_its_budget():
    """Forty rounds of a greedy server, then another run: the books hold, line by line."""
    node = make_node(folder(), epsilon=2.0)
    for run in ("0badc0de", "0badc0df"):
        for t in range(12):
            device.answer_request(ask(t=t, horizon=t + 1, run=run).to_blob(), node)
            books_hold(node)
    ledger = books_hold(node)
    assert chance(2.0, float(ledger.released) ** 0.5) <= 1e-5 * (1 + 1e-6)


def a_tightened_budget_holds():
    """From ε = 8 to ε = 1 before the first release: what is released is worth ε = 1.

    Runs and servers have shares of their own, so many of both ask.
    """
    home = folder()
    make_node(home, epsilon=8.0)
    node = make_node(home, epsilon=1.0, vault=False)
    for n in range(12):
        asked = ask(horizon=1, run=f"{n:08x}", server=f"s{n % 3}")
        device.answer_request(asked.to_blob(), node)
    ledger = books_hold(node)
    assert chance(1.0, float(ledger.released) ** 0.5) <= 1e-5 * (1 + 1e-6)


def a_server_may_only_tighten():
    """The client's unit and clip are its own; a server cannot choose less protection."""
    node = make_node(folder(), unit="client")
    assert kind(device.answer_request(ask(recipe=Recipe(1.0, 1.0)).to_blob(), node)) == "policy"
    node = make_node(folder())
    assert kind(device.answer_request(ask(recipe=Recipe(1.0, 1.5)).to_blob(), node)) == "policy"
    assert kind(device.answer_request(ask(horizon=10**6).to_blob(), node)) == "policy"


def an_older_ledger_is_not_used():
    """A server's receipt that the vault does not know, or other data: no upload."""
    node = make_node(folder())
    assert kind(device.answer_request(ask().to_blob(), node)) == "upload"
    newest = books_hold(node).receipt
    later = type(newest)(newest.vault, newest.seq + 1, newest.hash)
    assert kind(device.answer_request(ask(t=1, receipt=later).to_blob(), node)) != "upload"
    x, y = rows(9)
    np.savez(node.data.path if hasattr(node.data, "path") else node.data, x=x, y=y)
    assert kind(device.answer_request(ask(t=1).to_blob(), node)) != "upload"


def a_policy_is_only_tightened():
    """Nothing that a vault has promised can be loosened."""
    old = {"epsilon": 4.0, "delta": 1e-6, "samples": 9, "clip": 1.0, "floor": 2.0, "max_rounds": 9,
           "max_steps": 4, "server_share": 0.5, "max_work": 99, "max_bytes": 99}  # fmt: skip
    for key, value in (
        ("epsilon", 5.0), ("delta", 1e-5), ("clip", 2.0), ("floor", 1.0), ("max_rounds", 10),
        ("max_steps", 5), ("run_share", 0.5), ("server_share", 0.6), ("max_work", 100),
        ("max_bytes", 100), ("samples", 8), ("unit", "client"),
    ):  # fmt: skip
        for spent in (5,) if key == "unit" else (0, 5):  # before the first release a unit may grow
            try:
                require_tighter(Policy(**old), Policy(**{**old, key: value}), spent=spent)
            except PolicyRefusal:
                continue
            raise AssertionError(f"{key} was loosened")


def hidden_budgets_stay_hidden():
    """`disclose = false`: neither ε nor what is spent leaves the client."""
    node = make_node(folder(), disclose=False)
    head = told(device.answer_request(ask().to_blob(), node))
    assert head["budget"] is None
    greeting = told(device.make_greeting(node))
    assert greeting["budget"] is None
    assert greeting["policy"]["floor"] is None


def receipts_cannot_be_tried_out():
    """A line's hash leaves the client; its payload has a salt that nobody can guess."""
    one, two = (add_salt({"dataset": "ab" * 32}) for _ in range(2))
    assert one != two
    assert len(one) > len('{"dataset":""}') + 64 + 40


def tightened_caps_are_within_their_budget():
    """Units that a tightened budget leaves are worth no more μ² than it, in exact arithmetic."""
    for old in (8.0, 7.3, 20.0):
        made = Policy(old, 1e-5, 9, 1.0)
        for epsilon in (0.1, 1.0, 3.7, 7.299, old):
            policy = Policy(epsilon, 1e-5, 9, 1.0)
            most = policy.count_parts(made.capacity())
            worth = Fraction(made.capacity()) * most / FULL
            assert worth <= Fraction(policy.capacity())


@contextmanager
def machine(home):
    """As on a machine that keeps its own witnesses in this folder."""
    before = os.environ.get("SOTTOVOCE_STATE")
    os.environ["SOTTOVOCE_STATE"] = str(home)
    try:
        yield
    finally:
        if before is None:
            del os.environ["SOTTOVOCE_STATE"]
        else:
            os.environ["SOTTOVOCE_STATE"] = before


DATA = "ab" * 32


def _vault(home):
    place = home / "ward.vault"
    policy = Policy(8.0, 1e-5, 9, 1.0, run_share=1.0)
    Vault.create(place, policy, dataset=DATA, second_ledger=True).close()
    return place


def _released(place, *rounds):
    """Release so many rounds; the newest receipt, which says what is spent."""
    with Vault.open(place, dataset=DATA) as vault:
        for t in rounds:
            paid = vault.reserve("run", t, "cd" * 32, [FULL // 50], server="s", facts={})
            vault.store(paid, b"noised")
        return vault.receipt()


def _reserve(place, t):
    with Vault.open(place, dataset=DATA) as vault:
        vault.reserve("run", t, "cd" * 32, [FULL // 50], server="s", facts={})


def _spent_in(place):
    with Vault.open(place, dataset=None) as vault:
        return vault.spent


def _files(place):
    return [place, place.with_name(place.name + ".witness")]


def _refused(what, *args, **more):
    try:
        what(*args, **more)
    except (SottovoceError, InputError):
        return True
    return False


def an_older_pair_is_not_taken_for_the_newest():
    """Vault and witness put back together, into the same files: the machine remembers more."""
    home = folder()
    place = _vault(home)
    before = [file.read_bytes() for file in _files(place)]
    spent = _released(place, 0, 1).spent
    for file, content in zip(_files(place), before, strict=True):
        file.write_bytes(content)  # the same inode: this is no copy
    assert spent > 0
    assert _refused(Vault.open, place, dataset=DATA)


def a_machine_without_a_witness_trusts_no_file():
    """An old pair in the same files, and a state folder that is new: nothing is given back.

    However short the ledger is: one of a single line may have been copied when it was made.
    """
    for before in ((), (0, 1)):
        home = folder()
        place = _vault(home)
        _released(place, *before)
        old = [file.read_bytes() for file in _files(place)]
        spent = _released(place, 2, 3).spent
        for file, content in zip(_files(place), old, strict=True):
            file.write_bytes(content)  # the same inode: nothing else tells it from the original
        with machine(home / "new"):
            assert _spent_in(place) < spent
            assert _refused(Vault.open, place, dataset=DATA)
            assert _refused(restore, place)
            assert _refused(move, place)


def a_vault_that_went_on_elsewhere_needs_a_word():
    """Moved away, used there, and an older copy brought back: this machine knows its first lines,
    and no more of what came after them than the copy does."""
    home = folder()
    real = Chest.is_copy
    with machine(home / "here"):
        place = _vault(home)
        _released(place, 0)
    try:
        Chest.is_copy = lambda self: False  # inodes tell nothing
        with machine(home / "there"):
            move(place, nothing_since=True)
            _released(place, 1, 2)
            old = [file.read_bytes() for file in _files(place)]
            spent = _released(place, 3, 4).spent
        for file, content in zip(_files(place), old, strict=True):
            file.write_bytes(content)
        with machine(home / "here"):
            assert _spent_in(place) < spent
            assert _refused(Vault.open, place, dataset=DATA)
            assert _refused(restore, place)
    finally:
        Chest.is_copy = real


def a_word_given_elsewhere_is_not_mistaken_for_a_crash():
    """A copy that is one line ahead of this machine's witness, and that line is a word given with
    another state folder, where much was released after it."""
    for word in (move, lambda place, **more: restore(place, **more)[0]):
        home = folder()
        with machine(home / "here"):
            place = _vault(home)
            _released(place, 0)
        with machine(home / "there"):
            word(place, nothing_since=True)
            old = [file.read_bytes() for file in _files(place)]
            spent = _released(place, 3, 4).spent
        for file, content in zip(_files(place), old, strict=True):
            file.write_bytes(content)
        with machine(home / "here"):
            assert _spent_in(place) < spent
            assert _refused(Vault.open, place, dataset=DATA)
            assert _refused(restore, place)


def a_state_folder_that_was_put_back_vouches_for_nothing_later():
    """It knows the first lines of a copy that is newer than it, but not what came after that."""
    home = folder()
    with machine(home / "state"):
        place = _vault(home)
        _released(place, 0)
        shutil.copytree(home / "state", home / "earlier")
        _released(place, 1, 2)
        old = [file.read_bytes() for file in _files(place)]
        spent = _released(place, 3, 4).spent
    for file, content in zip(_files(place), old, strict=True):
        file.write_bytes(content)
    with machine(home / "earlier"):
        assert _spent_in(place) < spent
        assert _refused(Vault.open, place, dataset=DATA)
        assert _refused(restore, place)


def a_copied_witness_restores_nothing_by_itself():
    """Newer than the file that it lies beside, and older than what was released; the machine that
    wrote it is gone. Named as a receipt it is the operator's word, and recorded."""
    home = folder()
    with machine(home / "here"):
        place = _vault(home)
        _released(place, 0)
        old = place.read_bytes()
        _released(place, 1)
        seen = _files(place)[1].read_bytes()
        _released(place, 2, 3)
    for file, content in zip(_files(place), (old, seen), strict=True):
        file.write_bytes(content)
    with machine(home / "there"):
        assert _refused(restore, place)
        restore(place, receipts=[VaultReceipt.parse(seen.decode())])
        with Vault.open(place, dataset=DATA) as vault:
            assert vault.lines()[-1].facts["stated"]


def two_copies_are_not_in_use_at_once():
    """Each has a lock of its own beside it, and each fits the witness until one of them books."""
    home = folder()
    place = _vault(home)
    (home / "twin").mkdir()
    twin, _ = (Path(shutil.copy(file, home / "twin" / file.name)) for file in _files(place))
    real = Chest.is_copy
    try:
        Chest.is_copy = lambda self: False  # a file system that gave both files one inode
        with Vault.open(place, dataset=DATA):
            assert _refused(Vault.open, twin, dataset=DATA)
        _released(twin, 0)
        assert _refused(Vault.open, place, dataset=DATA)
    finally:
        Chest.is_copy = real


def rows_have_one_ledger_unless_their_operator_says_so():
    """Two ledgers of the same rows are two budgets: made, made anew after a deletion, or bound."""
    home, policy = folder(), Policy(8.0, 1e-5, 9, 1.0)
    place, second, other = (home / name for name in ("ward.vault", "second.vault", "other.vault"))
    with machine(home / "state"):
        Vault.create(place, policy, dataset=DATA).close()
        assert _refused(Vault.create, second, policy, dataset=DATA)
        Vault.create(other, policy, dataset="cd" * 32).close()
        assert _refused(rebind, other, dataset=DATA, samples=9, overlap="some")
        for file in _files(place):
            file.unlink()
        assert _refused(Vault.create, place, policy, dataset=DATA)
        with Vault.create(second, policy, dataset=DATA, second_ledger=True) as vault:
            assert vault.lines()[0].facts.get("second") == list(vault.other_ledgers) != []


def a_second_ledger_is_noticed_wherever_it_was_made():
    """Each was the only one where it was made, or was made before rows were noted; brought
    together they are two budgets."""
    home, policy = folder(), Policy(8.0, 1e-5, 9, 1.0)
    place, second = home / "ward.vault", home / "second.vault"
    with machine(home / "there"):
        Vault.create(second, policy, dataset=DATA).close()
    with machine(home / "here"):
        Vault.create(place, policy, dataset=DATA).close()
        for word in (move, restore):
            assert _refused(word, second, nothing_since=True)
    witness = "witness/" + json.loads(_files(second)[1].read_text())["vault"]
    shutil.copy(home / "there" / witness, home / "here" / witness)
    with machine(home / "here"):
        assert _refused(Vault.open, second, dataset=DATA)
        move(second, nothing_since=True, second_ledger=True)
        with Vault.open(second, dataset=DATA) as vault:
            assert vault.lines()[-1].facts["second"] == list(vault.other_ledgers) != []


def a_ledger_counts_for_all_rows_it_was_bound_to():
    """Bound to other rows it keeps its debits for both: neither gets a fresh budget silently."""
    home, policy, other = folder(), Policy(8.0, 1e-5, 9, 1.0), "cd" * 32
    with machine(home / "state"):
        Vault.create(home / "ward.vault", policy, dataset=DATA).close()
        rebind(home / "ward.vault", dataset=other, samples=9, overlap="all")
        for rows in (DATA, other):
            assert _refused(Vault.create, home / "second.vault", policy, dataset=rows)


def a_parted_vault_is_not_taken_for_the_newest():
    """Two machines went on from one state; neither knows what the other has released."""
    home = folder()
    here, there = home / "here", home / "there"
    with machine(here):
        place = _vault(home)
        _released(place, 0)
        copies = [home / "copy" / file.name for file in _files(place)]
        copies[0].parent.mkdir()
        for file, copy in zip(_files(place), copies, strict=True):
            shutil.copy(file, copy)
        _released(place, 1)
    with machine(there):
        move(copies[0], nothing_since=True)
        _released(copies[0], 2)  # a line more than here: as many as a crash may leave unseen
    with machine(here):
        assert _refused(Vault.open, copies[0], dataset=DATA)


def an_older_vault_is_not_moved_into_service():
    """An older copy with its own witness, and an operator who errs: the machine has seen more."""
    home = folder()
    place = _vault(home)
    _released(place, 0)
    (home / "copy").mkdir()
    copies = [shutil.copy(file, home / "copy" / file.name) for file in _files(place)]
    _released(place, 1, 2)
    assert _refused(move, copies[0], nothing_since=True)


def a_restore_burns_all_that_is_known():
    """A backup and receipts in any order: afterwards at least the most they prove is spent."""
    for order in ((0, 1), (1, 0)):
        home = folder()
        saved = home / "saved" / "ward.vault"
        saved.parent.mkdir()
        with machine(home / "one"):
            place = _vault(home)
            _released(place, 0)
            backup(place, saved)
            proofs = [_released(place, 1), _released(place, 2, 3)]
        with machine(home / "two"):  # which has seen nothing of it
            restore(saved, receipts=[proofs[i] for i in order])
            assert _spent_in(saved) >= max(proof.spent for proof in proofs)


def a_restore_burns_no_less_than_two_copies_have_spent():
    """One backup was in use twice: receipts of both show that neither knows of all releases."""
    home = folder()
    saved, again = home / "saved" / "ward.vault", home / "again" / "ward.vault"
    for place in (saved, again):
        place.parent.mkdir()
    with machine(home / "one"):
        place = _vault(home)
        _released(place, 0)
        backup(place, saved)
        shutil.copy(saved, again)
        before = _spent_in(place)
        here = _released(place, 1, 2)
    with machine(home / "two"):
        restore(again, nothing_since=True)
        _released(again, 3)
        with Vault.open(again, dataset=DATA) as vault:
            there = vault.tighten(replace(vault.policy, clip=0.5))
    assert there.seq == here.seq
    spent = here.spent + there.spent - before
    with machine(home / "three"):
        for receipts in ([here, there], [there, here]):
            if not _refused(restore, saved, receipts=receipts):
                assert _spent_in(saved) >= spent


def a_restore_takes_proofs_of_its_own_vault_only():
    """Another vault's receipt, newer and cheap, says nothing of what this one has released."""
    home = folder()
    place = _vault(home)
    saved, other = home / "saved.vault", home / "other"
    other.mkdir()
    backup(place, saved)
    _released(place, 0, 1, 2)
    foreign = _vault(other)
    with Vault.open(foreign, dataset=DATA) as vault:
        for t in range(9):
            paid = vault.reserve("run", t, "cd" * 32, [1], server="s", facts={})
            vault.store(paid, b"noised")
        cheap = vault.receipt()
    with machine(home / "elsewhere"):
        assert _refused(restore, saved, receipts=[cheap])


def a_gap_is_paid_for_as_far_as_it_is_known():
    """After a restore lost lines that were burnt are known; what came later there is not."""
    home = folder()
    saved = home / "saved" / "ward.vault"
    saved.parent.mkdir()
    with machine(home / "one"):
        place = _vault(home)
        _released(place, 0)
        backup(place, saved)
        paid = _released(place, 1)
    with machine(home / "two"):
        restore(saved, receipts=[paid])
        with Vault.open(saved, dataset=DATA) as vault:
            assert vault.contains(paid)
    with machine(home / "one"), Vault.open(place, dataset=DATA) as vault:  # it was not lost
        later = vault.reserve("run", 2, "cd" * 32, [FULL // 50], server="s", facts={}).receipt
    with machine(home / "two"), Vault.open(saved, dataset=DATA) as vault:
        assert later.seq == paid.seq + 1
        assert not vault.contains(later)


def twins_count_in_a_fingerprint():
    """A record that is there twice: replacing one of the two is another data set."""
    x, y = np.array([[1.0, 2.0], [1.0, 2.0], [3.0, 4.0]]), np.array([0, 0, 1])
    other, labels = x.copy(), y.copy()
    other[1], labels[1] = x[2], y[2]
    assert fingerprint(x, y) != fingerprint(other, labels)
    assert fingerprint(x, y) != fingerprint(x[1:], y[1:])


def refusals_keep_to_public_words():
    """A budget that is not disclosed is in no refusal: not where the operator's file is at odds
    with the vault, and not where the noise would be beyond the grid."""
    home = folder()
    make_node(home, disclose=False, epsilon=4.0371, floor=3.3)
    at_odds = make_node(home, disclose=False, epsilon=5.5123, floor=3.3, vault=False)
    tiny = make_node(folder(), disclose=False, epsilon=1e-5, delta=1e-9, unit="client")
    asked = ask(horizon=1000, recipe=Recipe(1.0, 1.0, unit="client"))
    for node, request in ((at_odds, ask()), (tiny, asked)):
        blob = device.answer_request(request.to_blob(), node)
        assert kind(blob) == "policy"
        text = told(blob)["text"]
        assert not any(letter.isdigit() for letter in text), text


def _run_of(node, rounds, run="0badc0de"):
    """Answer some rounds of a run, each asked with the receipt of the one before."""
    seen, blobs = None, []
    for t in rounds:
        blobs.append(
            device.answer_request(ask(t=t, run=run, horizon=40, receipt=seen).to_blob(), node)
        )
        head = told(blobs[-1])
        seen = VaultReceipt.from_json(head["receipt"])
    return blobs


@contextmanager
def _often():
    """Vaults are summed up every few lines, as if each had a long history."""
    every, chest.SUMMARY_EVERY = chest.SUMMARY_EVERY, 3
    try:
        yield
    finally:
        chest.SUMMARY_EVERY = every


def a_round_that_was_acknowledged_has_no_second_answer():
    """The bytes of an old round are dropped; asked again it gets a refusal, and nothing is paid."""
    node = make_node(folder())
    with _often():
        first = _run_of(node, range(5))
    with Vault.open(node.vault, dataset=node.read_rows().fingerprint) as vault:
        before = vault.spent, vault.receipt()
    for t in (0, 1, 2):
        for params in (model(), model(value=0.3)):
            again = device.answer_request(ask(t=t, horizon=40, params=params).to_blob(), node)
            assert kind(again) == "replay"
    for t in (3, 4):
        assert device.answer_request(ask(t=t, horizon=40).to_blob(), node) == first[t]
    books_hold(node)
    with Vault.open(node.vault, dataset=None) as vault:
        assert (vault.spent, vault.receipt()) == before
        assert [vault.find("0badc0de", t).dropped for t in range(5)] == [True] * 3 + [False] * 2


def what_nobody_acknowledged_is_kept():
    """A server that sends no receipt of an answer, or one of another run, is answered again."""
    node = make_node(folder())
    with _often():
        first = _run_of(node, range(4))
        other = _run_of(node, range(5), run="0badc0df")
    last = VaultReceipt.from_json(told(other[4])["receipt"])
    greeting = VaultReceipt.from_json(told(device.make_greeting(node))["receipt"])
    for t, seen in ((4, last), (5, greeting), (6, None)):
        device.answer_request(ask(t=t, horizon=40, receipt=seen).to_blob(), node)
    for t in (2, 3):  # the answer to 2 was acknowledged, and it is the newest of which that is so
        assert device.answer_request(ask(t=t, horizon=40).to_blob(), node) == first[t]
    for t in (3, 4):
        again = device.answer_request(ask(t=t, run="0badc0df", horizon=40).to_blob(), node)
        assert again == other[t]


@contextmanager
def _summed_up(place):
    """The tables of a vault that has a summary."""
    with closing(Chest.open(place)) as one:
        assert one._summed > 0
    with closing(sqlite3.connect(place)) as db:
        yield db
        db.commit()


def _made_long(home):
    place = _vault(home)
    with _often():
        _released(place, *range(20))
    return place


def a_summary_gives_nothing_back():
    """A summary that says less than its lines was edited or damaged: it is refused."""
    for damage in (
        'UPDATE summary SET content = replace(content, \'"spent":\', \'"spent":0,"burnt":\')',
        "UPDATE summary SET content = json_set(content, '$.spent', 1)",
    ):
        place = _made_long(folder())
        with _summed_up(place) as db:
            db.execute(damage)
        assert _refused(Vault.open, place, dataset=DATA)


def a_round_that_the_records_forgot_is_not_answered_anew():
    """A record that was damaged away does not mean that the round had no answer."""
    for t in (0, 7, 15):
        place = _made_long(folder())
        key = encode_canonical(["turn", "run", t])
        with _summed_up(place) as db:
            for name, content in db.execute("SELECT place, content FROM nodes").fetchall():
                node = json.loads(content)
                if isinstance(node, dict) and key in node:
                    del node[key]
                    db.execute(
                        "UPDATE nodes SET content = ? WHERE place = ?",
                        (encode_canonical(node), name),
                    )
        assert _refused(_reserve, place, t)


def an_old_line_is_known_by_its_content():
    """A receipt names a line that was edited since: it is not taken for the one that was given."""
    place = _made_long(folder())
    with Vault.open(place, dataset=DATA) as vault:
        line = vault.lines()[4]
        receipt = VaultReceipt(vault.id, line.seq, line.hash)
        assert vault.contains(receipt)
    with _summed_up(place) as db:
        db.execute("DROP TRIGGER entries_update")
        db.execute("UPDATE entries SET payload = '{}' WHERE seq = ?", (line.seq,))
        db.execute(journal._OLD_SCHEMA[3])
    with Vault.open(place, dataset=DATA) as vault:
        assert _refused(vault.contains, receipt)


def no_gap_is_opened_by_a_lost_line():
    """A line that is gone was paid for only if a restore says so."""
    place = _made_long(folder())
    with Vault.open(place, dataset=DATA) as vault:
        receipt = VaultReceipt(vault.id, 5, "00" * 32)  # made up: any hash would do in a gap
        assert not vault.contains(receipt)
    with _summed_up(place) as db:
        db.execute("DROP TRIGGER entries_delete")
        db.execute("DELETE FROM entries WHERE seq = 5")
        db.execute(journal._OLD_SCHEMA[4])
    with Vault.open(place, dataset=DATA) as vault:
        assert _refused(vault.contains, receipt)


def a_budget_tightened_later_limits_what_follows():
    """From ε = 8 to ε = 4 after a release: all releases together stay within ε = 4."""
    home = folder()
    node = make_node(home, epsilon=8.0)
    device.answer_request(ask(t=0, horizon=40).to_blob(), node)
    node = make_node(home, epsilon=4.0, vault=False)
    for t in range(1, 40):
        device.answer_request(ask(t=t, horizon=40).to_blob(), node)
    assert chance(4.0, float(books_hold(node).booked) ** 0.5) <= 1e-5 * (1 + 1e-6)


def no_turn_takes_more_than_a_quarter():
    """Where the operator names no floor, one turn is worth at most a quarter of the budget."""
    for epsilon in np.geomspace(0.1, 20, 40):
        for delta in (1e-3, 1e-5, 1e-9):
            policy = Policy(float(epsilon), delta, 9, 1.0)
            assert 4 / Fraction(policy.floor) ** 2 <= Fraction(policy.capacity())


def what_a_restore_burns_was_promised_before():
    """A backup from before the first release, restored: the lost releases had the first budget."""
    home = folder()
    saved = home / "saved" / "ward.vault"
    saved.parent.mkdir()
    with machine(home / "one"):
        place = _vault(home)
        backup(place, saved)
        proof = _released(place, 0, 1)
    with machine(home / "two"):
        restore(saved, receipts=[proof])
        with Vault.open(saved, dataset=DATA) as vault:
            vault.tighten(replace(vault.policy, epsilon=4.0))
            assert vault.promised.epsilon == 8.0


def a_restore_takes_no_promise_that_cannot_be_true():
    """A receipt from anywhere may name any policy: none below what was spent, none looser."""
    true = Policy(epsilon=8.0, delta=1e-5, samples=9, clip=1.0, run_share=1.0)
    for stated in ({"epsilon": 0.5}, {"epsilon": 100.0, "clip": 1e6, "floor": 1e-3}):
        home = folder()
        saved = home / "saved.vault"
        with machine(home / "one"):
            Vault.create(home / "a.vault", true, dataset=DATA).close()
            backup(home / "a.vault", saved)
            with Vault.open(home / "a.vault", dataset=DATA) as vault:
                for t in range(4):
                    paid = vault.reserve("run", t, "cd" * 32, [FULL // 8], server="s", facts={})
                    newest = vault.store(paid, b"x")
        with machine(home / "two"):
            restore(saved, receipts=[replace(newest, promised=replace(true, **stated))])
            with Vault.open(saved, dataset=DATA) as vault:
                assert vault.promised.epsilon == 8.0
                assert (vault.policy.clip, vault.policy.floor) == (true.clip, true.floor)


def a_restore_counts_what_was_spent_alone_at_the_most():
    """A receipt without it, and ε tightened since: the share that holds alone had risen."""
    loose = Policy(epsilon=2.0, delta=1e-5, samples=9, clip=1.0, honest=100, epsilon_alone=4.0)
    loose = replace(loose, run_share=1.0)
    tight = replace(loose, epsilon=0.5)
    home = folder()
    saved = home / "saved.vault"

    def pay(vault, run, units, policy):
        price = {"units": [units], "alone": int(units * policy.share)}
        return vault.store(vault.reserve(run, 0, "cd" * 32, server="s", facts={}, **price), b"x")

    with machine(home / "one"):
        with Vault.create(home / "a.vault", loose, dataset=DATA) as vault:
            pay(vault, "one", FULL // 1000, loose)
        backup(home / "a.vault", saved)
        with Vault.open(home / "a.vault", dataset=DATA) as vault:
            vault.tighten(tight)
            newest, alone = pay(vault, "two", FULL // 200, tight), vault.alone
    with machine(home / "two"):
        restore(saved, receipts=[replace(newest, alone=None, promised=None)])
        with Vault.open(saved, dataset=DATA) as vault:
            assert vault.alone >= alone


def a_vault_whose_share_is_below_one_can_be_restored():
    """ε_alone barely above ε: rounding for safety must not make a restored vault a damaged one."""
    terms = {"epsilon": 1.0, "honest": 2, "epsilon_alone": 1.0000001}
    policy = Policy(delta=1e-5, samples=9, clip=1.0, **terms)
    home = folder()
    saved = home / "saved.vault"
    with machine(home / "one"):
        Vault.create(home / "a.vault", policy, dataset=DATA).close()
        backup(home / "a.vault", saved)
    with machine(home / "two"):
        restore(saved, burn_rest=True)
        with Vault.open(saved, dataset=DATA) as vault:
            assert vault.alone >= vault.spent == FULL


def a_restore_states_the_terms_of_lost_sums():
    """A backup from before `[policy.sum]`, and lost sums: what holds alone is not stated better."""
    for proof in ("machine", "receipt", "old receipt", "none"):
        home = folder()
        saved = home / "saved" / "ward.vault"
        saved.parent.mkdir()
        with machine(home / "one"):
            place = _vault(home)
            backup(place, saved)
            with Vault.open(place, dataset=DATA) as vault:
                vault.tighten(replace(vault.policy, epsilon=4.0, honest=5, corrupt=1))
                price = {"units": [FULL // 50], "alone": 5 * (FULL // 50)}
                paid = vault.reserve("run", 0, "cd" * 32, server="s", facts={}, **price)
                newest = vault.store(paid, b"masked")
                true, alone = vault.promised.compute_alone(), vault.alone
            older = replace(newest, alone=None, promised=None)
            given = {"receipt": [newest], "old receipt": [older]}.get(proof, [])
            if proof == "machine":
                restore(saved)
        if proof != "machine":
            with machine(home / "two"):
                restore(saved, receipts=given, burn_rest=not given)
        here = machine(home / ("one" if proof == "machine" else "two"))
        with here, Vault.open(saved, dataset=DATA) as vault:
            assert (vault.promised.compute_alone() or 0) >= true > 8
            assert vault.promised.corrupt <= 1
            assert vault.alone >= alone
            assert vault.promised.epsilon >= 4.0
            vault.tighten(replace(vault.policy, honest=1, corrupt=0))
            assert (vault.promised.compute_alone() or 0) >= true


def a_restore_asks_the_machine_too():
    """An older file without its witness, and an operator who errs: the machine knows of more."""
    home = folder()
    place = _vault(home)
    before = place.read_bytes()
    spent = _released(place, 0, 1).spent
    place.write_bytes(before)
    _files(place)[1].unlink()
    if not _refused(restore, place, nothing_since=True):
        assert _spent_in(place) >= spent > 0


def a_receipt_that_says_no_sum_restores_nothing():
    """A server's receipt shows that a backup is too old, and not how much was spent since."""
    home = folder()
    saved = home / "saved.vault"
    with machine(home / "one"):
        place = _vault(home)
        backup(place, saved)
        newest = _released(place, 0, 1)
    with machine(home / "two"):
        bare = type(newest)(newest.vault, newest.seq, newest.hash)
        assert _refused(restore, saved, receipts=[bare])


def a_state_before_a_store_is_not_taken_for_the_newest():
    """The answer has left; the files as they were just before would answer the round anew."""
    home = folder()
    place = _vault(home)
    with Vault.open(place, dataset=DATA) as vault:
        paid = vault.reserve("run", 0, "cd" * 32, [FULL // 50], server="s", facts={})
        before = [file.read_bytes() for file in _files(place)]
        vault.store(paid, b"noised")
    for file, content in zip(_files(place), before, strict=True):
        file.write_bytes(content)  # the same inode: this is no copy
    assert _refused(Vault.open, place, dataset=DATA)


def a_receipt_is_a_line_and_not_a_number():
    """A line of the same number in another history is not the one that a receipt names."""
    home = folder()
    place = _vault(home)
    given = _released(place, 0)
    other = type(given)(given.vault, given.seq, "ef" * 32)
    with Vault.open(place, dataset=DATA) as vault:
        assert vault.contains(given)
        assert not vault.contains(other)


LEDGER = [
    the_debit_is_durable_before_anything_is_computed, a_round_has_one_answer,
    a_device_stays_within_its_budget, a_tightened_budget_holds, a_server_may_only_tighten,
    an_older_ledger_is_not_used, a_policy_is_only_tightened, hidden_budgets_stay_hidden,
    receipts_cannot_be_tried_out, tightened_caps_are_within_their_budget,
    an_older_pair_is_not_taken_for_the_newest, a_parted_vault_is_not_taken_for_the_newest,
    an_older_vault_is_not_moved_into_service, a_restore_burns_all_that_is_known,
    a_restore_burns_no_less_than_two_copies_have_spent,
    a_restore_takes_proofs_of_its_own_vault_only, a_gap_is_paid_for_as_far_as_it_is_known,
    a_machine_without_a_witness_trusts_no_file, a_vault_that_went_on_elsewhere_needs_a_word,
    a_word_given_elsewhere_is_not_mistaken_for_a_crash, a_copied_witness_restores_nothing_by_itself,
    a_state_folder_that_was_put_back_vouches_for_nothing_later,
    a_second_ledger_is_noticed_wherever_it_was_made,
    two_copies_are_not_in_use_at_once,
    rows_have_one_ledger_unless_their_operator_says_so,
    a_ledger_counts_for_all_rows_it_was_bound_to,
    twins_count_in_a_fingerprint, refusals_keep_to_public_words,
    a_round_that_was_acknowledged_has_no_second_answer, what_nobody_acknowledged_is_kept,
    a_summary_gives_nothing_back, a_round_that_the_records_forgot_is_not_answered_anew,
    an_old_line_is_known_by_its_content, no_gap_is_opened_by_a_lost_line,
    a_budget_tightened_later_limits_what_follows, no_turn_takes_more_than_a_quarter,
    what_a_restore_burns_was_promised_before, a_restore_asks_the_machine_too,
    a_restore_states_the_terms_of_lost_sums,
    a_restore_takes_no_promise_that_cannot_be_true,
    a_restore_counts_what_was_spent_alone_at_the_most,
    a_vault_whose_share_is_below_one_can_be_restored,
    a_receipt_that_says_no_sum_restores_nothing, a_receipt_is_a_line_and_not_a_number,
    a_state_before_a_store_is_not_taken_for_the_newest,
]  # fmt: skip
