"""What is printed, written down and handed on beside the uploads: each is a promise to a client.

An ε that is shown holds; what left beside the noise is in the claim; files with rows, keys or
fingerprints are for their owner alone; nobody is said to be protected by what was not there.
Oracles are written out here, from the formulas.
"""

from __future__ import annotations

import inspect
import math
import os
import re
import stat
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock

import numpy as np
import pytest
from scipy.optimize import brentq
from scipy.stats import norm

from sottovoce import Plan, calibrate
from sottovoce.client import ledger
from sottovoce.client.ledger import make_statement
from sottovoce.client.vault import Policy, Vault
from sottovoce.client.vault.rebinding import backup, move
from sottovoce.data import federated
from sottovoce.data.federated import Given, load_holdings
from sottovoce.errors import InputError, Malformed, VaultRefusal
from sottovoce.flower import certificates, federate, local, server_app, worker
from sottovoce.flower.federate import load_plan
from sottovoce.flower.transport import NodeDirectory
from sottovoce.models import base
from sottovoce.models.base import Form
from sottovoce.privacy.budget import NOT_COVERED, describe_undisclosed, format_claim, round_up
from sottovoce.privacy.sensitivity import Recipe
from sottovoce.privacy.tank import FULL
from sottovoce.reports import certificate
from sottovoce.reports.pages import format_ceiling
from sottovoce.reports.run import CheckedRun
from sottovoce.server import coordinator
from sottovoce.server.federation import build, build_from_members
from sottovoce.server.members import Member
from sottovoce.studies.audit.findings import Findings
from sottovoce.studies.audit.messages import AuditSetting, Measurement
from sottovoce.studies.rehearsal.standin import announce_federation, make_stand_in
from support.example_record import example
from support.in_process import draw, plan
from support.promised import account as promised
from support.promised import member

DATA = "ab" * 32


def exact_epsilon(delta: float, mu: float) -> float:
    """ε(δ) of μ-GDP, solved from δ = Φ(μ/2 − ε/μ) − e^ε·Φ(−μ/2 − ε/μ)."""

    def beyond(epsilon: float) -> float:
        second = np.exp(epsilon + norm.logcdf(-mu / 2 - epsilon / mu))
        return float(norm.cdf(mu / 2 - epsilon / mu) - second - delta)

    return float(brentq(beyond, 0.0, 500.0, xtol=1e-12))


# Figures that are claims.


def number_of(text: str) -> float:
    """A figure as it is read: 25.34, 12,346 or 1.001 × 10⁻⁵."""
    plain = text.replace(",", "").translate(str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻", "0123456789-"))
    found = re.fullmatch(r"(?:([\d.]+) × )?10(-?\d+)", plain)
    if found and ("⁻" in text or "×" in text):
        return float(found[1] or 1) * 10.0 ** int(found[2])
    return float(plain)


def test_a_printed_epsilon_is_never_smaller_than_the_one_that_holds():
    rng = np.random.default_rng(0)
    for value in [*10 ** rng.uniform(-9, 5, 500), 30.3142, 8.00001, 1e-5, 1.0004e-5]:
        for digits in (2, 3, 4, 6):
            assert float(format_claim(value, digits)) >= value
        assert number_of(format_ceiling(value)) >= value * (1 - 1e-15)


def test_what_no_attacker_exceeds_is_never_rounded_down():
    rng = np.random.default_rng(1)
    for value in rng.uniform(0, 1, 500):
        for places in (1, 2, 3, 4):
            assert round_up(value, places) >= value - 1e-12
    for epsilon in (0.5, 1.0, 2.0, 3.0, 5.0, 8.0, 20.0):
        for kind in ("exact", "zcdp", "paper"):
            told = calibrate(epsilon=epsilon, delta=1e-5, calibration=kind)
            assert told.tpr_at_fpr_001 >= norm.cdf(norm.ppf(0.01) + told.mu) - 1e-9
            assert told.auc >= norm.cdf(told.mu / math.sqrt(2)) - 1e-9


@pytest.mark.parametrize("kind", ["exact", "zcdp", "paper"])
def test_calibrate_promises_what_its_noise_keeps(kind):
    """σ, Δ and the turns alone say what holds; the sentence must not say less."""
    for epsilon, delta in ((1.0, 1e-5), (8.0, 1e-5), (20.0, 1e-3)):
        told = calibrate(epsilon=epsilon, delta=delta, calibration=kind, per_round=5)
        mu = math.sqrt(told.participations) * told.sensitivity / told.sigma
        budget = told.guarantee.budget
        assert exact_epsilon(budget.delta, mu) <= budget.epsilon * (1 + 1e-9)


def test_the_attacker_on_the_card_is_the_one_at_the_cap():
    """A run may have stopped early because of what it released: its sum is no bound."""
    for kind in ("exact", "zcdp"):
        record, trace = example(calibration=kind, stop_after=5)
        cap = math.sqrt(max(client["capacity"] for client in record["clients"]))
        assert min(client["spent"] for client in record["clients"]) < 0.9 * cap**2
        assert CheckedRun.of(record, trace).attacker_mu() >= cap * (1 - 1e-9)


@pytest.mark.parametrize("cohort", ["balanced", "random"])
def test_under_paper_the_epsilon_told_covers_the_client_that_is_asked_most(cohort):
    """Random cohorts may ask one client every time; balanced ones ⌈KT/U⌉ times."""
    rounds = {"schedule": "fixed", "rounds": 20, "per_round": 3, "cohort": cohort}
    own = Plan(privacy={"epsilon": 8, "delta": 1e-3, "calibration": "paper"}, rounds=rounds)
    federation = build(own, seed=1)
    turns = 20 if cohort == "random" else math.ceil(3 * 20 / len(federation.samples))
    mu = math.sqrt(float(federation.capacity[0]) * turns / 20)
    assert federation.guarantee().budget.epsilon >= exact_epsilon(1e-3, mu) * (1 - 1e-6)


# What left beside the noise is in the claim.


@pytest.mark.parametrize(
    "code", ["raw-signal", "median-clip", "inferred-columns", "counted-classes"]
)
def test_what_was_taken_raw_is_a_condition_of_the_claim(code, tmp_path):
    """«are (ε, δ)-private» is not said where something left the clients without noise."""
    data = Given(draw(200, 3))
    if code == "raw-signal":
        own = plan(**{"server.signal": "raw", "rounds.schedule": "discounted"})
    elif code == "median-clip":
        own = plan(**{"local.clip": "median"})
    elif code == "counted-classes":
        own = plan()
    else:
        table = tmp_path / "people.csv"
        table.write_text("age,rich\n" + "".join(f"{20 + i},{'ny'[i % 2]}\n" for i in range(60)))
        own, data = (
            Plan(data={"path": str(table), "label": "rich", "infer": True, "clients": 2}),
            None,
        )
    text = build(own, data=data, seed=1).guarantee().text
    assert " would be (" in text
    assert f"were it not for {NOT_COVERED[code]}" in text.split(". ")[0]


@pytest.mark.parametrize("code", sorted(NOT_COVERED))
def test_where_no_budget_is_told_what_is_not_covered_is(code):
    """A client that keeps its budget still has to hear of a listener, or of a vault of one run."""
    assert NOT_COVERED[code] in describe_undisclosed([code])


def test_the_number_of_classes_of_clients_arrays_comes_from_public_rows():
    """One client's label that nobody else has must not change the shape of the model."""
    rng = np.random.default_rng(4)
    clients = [(rng.standard_normal((40, 3)), rng.integers(0, 2, 40)) for _ in range(3)]
    held_out = (rng.standard_normal((40, 3)), np.arange(40) % 2)
    before = load_holdings(plan(), data=Given(clients, held_out, held_out), seed=1)
    assert before.classes == 2
    clients[1][1][7] = 2
    with pytest.raises(InputError):
        load_holdings(plan(), data=Given(clients, held_out, held_out), seed=1)


@pytest.mark.parametrize("split", ["iid", "labels", "dirichlet", "order", "sizes"])
def test_no_row_that_the_server_holds_is_a_clients(split):
    """Validation and test rows are read in the clear; what a client holds is in neither."""
    rng = np.random.default_rng(5)
    x, y = rng.standard_normal((300, 4)), np.arange(300) % 3
    more = {"data.samples": [60, 50, 70]} if split in ("order", "sizes") else {}
    own = plan(**{"data.split": split, **more})
    held = load_holdings(own, data=Given((x, y)), seed=2)
    parts = [held.validation.x, held.test.x, *(held.client(i).x for i in range(3))]
    seen = [{row.tobytes() for row in np.asarray(part, np.float32)} for part in parts]
    assert min(map(len, seen)) > 0
    assert len(set.union(*seen)) == sum(map(len, seen))  # all rows differ: no two parts share one


# Whose promise it is.


def test_a_client_whose_budget_is_worth_more_than_its_epsilon_is_not_taken_in():
    """Its (ε, δ) would stand in the record, and its noise would not keep it."""
    told = promised(8.0)
    head = member(0, told).to_head()
    assert Member.from_head(head).account == told
    for more in (1.01, 2.0):
        worth = {**head["budget"], "capacity": head["budget"]["capacity"] * more}
        with pytest.raises(Malformed):
            Member.from_head({**head, "budget": worth})


def test_public_rows_that_are_read_back_keep_the_mark_of_fresh_vaults(tmp_path):
    """Vaults of one run promise nothing about other runs, and the record must say so."""
    federate.deal(load_plan(None, [], 2), tmp_path / "run")
    held = federated.load_public(tmp_path / "run" / "public.npz")
    found = build_from_members(
        plan(**{"data.clients": 1}), [member(0, promised(8.0))], held
    ).guarantee()
    assert found.text.startswith("Each client's uploads in this run are")


def test_the_file_of_public_rows_holds_no_clients_row(tmp_path):
    """The server reads it: neither a row of a client nor its label is in it, by any name."""
    own = plan(**{"data.clients": 3})
    held = load_holdings(own, data=Given(draw(200, 3)), seed=1)
    federated.save_public(tmp_path / "public.npz", held)
    private = {row.tobytes() for i in range(3) for row in np.asarray(held.client(i).x, np.float32)}
    with np.load(tmp_path / "public.npz") as file:
        for name in file.files:
            array = file[name]
            rows = np.asarray(array, np.float32) if array.ndim == 2 else np.zeros((0, 1))
            assert not any(row.tobytes() in private for row in rows), name
            assert len(array) != len(held.train.y) if array.ndim else True, name


# Files for their owner alone.


@contextmanager
def careless():
    """As an account whose new files everybody may read and write."""
    before = os.umask(0)
    try:
        yield
    finally:
        os.umask(before)


def others_may(path: Path) -> bool:
    return bool(stat.S_IMODE(path.stat().st_mode) & 0o077)


def test_dealt_rows_are_in_folders_for_their_owner_alone(tmp_path):
    with careless():
        files = federate.deal(load_plan(None, [], 2), tmp_path / "run")
    for file in files:
        assert not others_may(file.parent)
        assert not others_may(file.parent.parent)


def test_backups_and_keys_are_for_their_owner_alone(tmp_path):
    for name in ("authority", "server", "keys"):
        (tmp_path / name).mkdir()
    with careless():
        Vault.create(
            tmp_path / "a.vault", Policy(8.0, 1e-5, 9, 1.0), dataset=DATA, second_ledger=True
        ).close()
        backup(tmp_path / "a.vault", tmp_path / "saved.vault")
        made = certificates.make_authority(tmp_path / "authority")
        own = certificates.make_server_keys(tmp_path / "server", made)
        key = certificates.make_node_key(tmp_path / "keys", "ward")
        secret = certificates.make_worker_secret(tmp_path / "keys", "ward")
    private = [tmp_path / "saved.vault", own.key, key.private, secret]
    for path in [*private, *tmp_path.rglob("*.key")]:
        assert not others_may(path), path


# Ledgers and certificates.


def released_vault(folder: Path) -> Path:
    place = folder / "a.vault"
    with Vault.create(place, Policy(8.0, 1e-5, 9, 1.0), dataset=DATA, second_ledger=True) as vault:
        paid = vault.reserve("run", 0, "cd" * 32, [FULL // 50], server="s", facts={})
        vault.store(paid, b"noised")
    return place


def test_a_certificate_says_what_rests_on_the_operators_word(tmp_path):
    place = released_vault(tmp_path)
    place.rename(tmp_path / "hold")
    (tmp_path / "a.vault").write_bytes((tmp_path / "hold").read_bytes())  # another file
    (tmp_path / "hold").unlink()
    move(place, nothing_since=True)
    with Vault.open(place, dataset=None) as vault:
        told = make_statement(vault)
    (note,) = [note for note in told.notes if note["kind"] == "move"]
    assert "nothing was released since" in note["text"]
    assert "nothing was released since" in certificate.render_certificate(told)


def test_a_vault_that_is_not_the_newest_is_not_called_whole(tmp_path):
    """An older state written back into the same files: `verify` says so, nobody certifies it."""
    place = released_vault(tmp_path)
    files = [place, place.with_name("a.vault.witness")]
    before = [file.read_bytes() for file in files]
    with Vault.open(place, dataset=DATA) as vault:
        vault.reserve("run", 1, "cd" * 32, [FULL // 50], server="s", facts={})
    for file, content in zip(files, before, strict=True):
        file.write_bytes(content)
    assert ledger.verify(place).broken is not None
    with pytest.raises(VaultRefusal):
        certificate.export_certificate(place, tmp_path / "out")


def test_a_damaged_vault_gets_no_certificate(tmp_path):
    """Bytes of an upload that were exchanged on the disk are not certified as those that left."""
    place = released_vault(tmp_path)
    whole = place.read_bytes()
    assert whole.count(b"noised") == 1
    with place.open("r+b") as file:
        file.seek(whole.index(b"noised"))
        file.write(b"spoilt")
    assert ledger.verify(place).broken is not None
    with pytest.raises(VaultRefusal):
        certificate.export_certificate(place, tmp_path / "out")
    assert not (tmp_path / "out" / "certificate.json").exists()


def test_a_certificates_head_has_the_budget_of_the_first_release(tmp_path):
    """A budget that was tightened later says nothing about uploads that had left before."""
    place = released_vault(tmp_path)
    with Vault.open(place, dataset=DATA) as vault:
        vault.tighten(Policy(2.0, 1e-6, 9, 1.0))
        told = make_statement(vault)
    title = re.search(r"<h1>\(([^,]+), ([^)]+)\)", certificate.render_certificate(told))
    assert (float(title[1]), float(title[2])) == (8.0, 1e-5)


# What stands between a node and others.


class NobodyIsAsked:
    """A transport that is encrypted, is not, or does not say."""

    def __init__(self, **says):
        self.__dict__.update(says)


def test_plaintext_is_refused_unless_it_was_allowed_and_then_it_is_told(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "plan.toml").write_text("[rounds]\nrounds = 3\n")
    monkeypatch.setattr(federated, "load_public", lambda path: path)
    calls = []
    monkeypatch.setattr(coordinator, "conduct", lambda *one, **more: calls.append(more["insecure"]))
    config = {key: kinds[0][-1]() for key, kinds in server_app.KINDS.items()}
    config |= {"plan": "plan.toml", "public": "p", "out": "run", "clients": 2, "minimum": 1,
               "gathering": 1.0, "deadline": 1.0, "name": "s", "progress": ""}  # fmt: skip
    for resume in (False, True):
        for plain in (NobodyIsAsked(_insecure=True), NobodyIsAsked()):
            asked = {**config, "resume": resume}
            with pytest.raises(InputError):
                server_app.lead_run(
                    NodeDirectory(plain, str, limit=1), {**asked, "insecure": False}
                )
            server_app.lead_run(NodeDirectory(plain, str, limit=1), {**asked, "insecure": True})
        server_app.lead_run(
            NodeDirectory(NobodyIsAsked(_insecure=False), str, limit=1), asked | {"insecure": False}
        )
    assert calls == [True, True, False] * 2


def test_nodes_authenticate_themselves_and_run_what_is_installed(tmp_path, monkeypatch):
    """A SuperLink with a certificate asks for keys; a node's app is the operator's, by default."""
    lines = []

    def start(name, argv, **_):
        lines.append(argv)
        return SimpleNamespace(alive=True)

    link = SimpleNamespace(address="127.0.0.1:9", authority=tmp_path / "ca")
    processes = SimpleNamespace(start=start)
    default = inspect.signature(local.start_federation).parameters["app"].default
    running = local.LocalFederation(tmp_path, processes, link, app=default, warm=None)
    own = SimpleNamespace(authority=Path("ca"), certificate=Path("crt"), key=Path("key"))
    running.start_link(own)
    assert "--insecure" not in lines[0]
    assert "--enable-supernode-auth" in lines[0]
    (tmp_path / "keys").mkdir()
    key = certificates.make_node_key(tmp_path / "keys", "node0")
    node = local.SuperNodeProcess("node0", "file", key, 1, 9094)
    running.nodes.append(node)
    running.start_node(node)
    running.start_worker(node)
    assert "--isolation process" in " ".join(map(str, lines[1]))  # somebody else runs its tasks
    assert len(lines) == 3  # and that is a worker
    words = list(map(str, lines[2]))
    assert "sottovoce.flower.worker" in words
    assert worker.APP in words or "--app" not in words


@pytest.mark.parametrize("insecure", [False, True])
def test_a_demonstration_in_plaintext_does_not_call_itself_encrypted(
    insecure, tmp_path, monkeypatch
):
    class Stop(Exception):
        pass

    show = MagicMock()
    monkeypatch.setattr(federate.progress, "choose_display", lambda *_, **__: show)
    monkeypatch.setattr(federate, "deal", lambda _, folder, **__: folder.mkdir() or [])
    monkeypatch.setattr(federate, "load_dealt", lambda _: (Plan(), []))
    monkeypatch.setattr(federate, "_lead_run", MagicMock(side_effect=Stop))
    with pytest.raises(Stop):
        federate.federate(None, [], clients=2, out=tmp_path / "run", insecure=insecure, quiet=True)
    words, duration = (call.args[0] for call in show.say.call_args_list)
    assert duration.startswith("At most ")
    assert ("not encrypted" in words or "plaintext" in words) is insecure, words


# What is chosen before a run, and what is found after it.


def test_settings_are_not_chosen_on_the_plans_own_table_by_any_name(tmp_path, monkeypatch):
    """A link, another spelling, a hard link: it is the same private table."""
    table = tmp_path / "people.csv"
    table.write_text("age,rich\n" + "".join(f"{20 + i % 60},{'ny'[i % 2]}\n" for i in range(200)))
    own = Plan(data={"path": str(table), "label": "rich", "clients": 2, "samples": 50,
                     "columns": {"age": [0, 99], "rich": ["n", "y"]}})  # fmt: skip
    (tmp_path / "link.csv").symlink_to(table)
    (tmp_path / "hard.csv").hardlink_to(table)
    (tmp_path / "sub").mkdir()
    monkeypatch.chdir(tmp_path)
    for name in (table, "people.csv", "sub/../people.csv", "link.csv", "hard.csv"):
        with pytest.raises(InputError, match="another file than data"):
            make_stand_in(own, announce_federation(own), str(name))


def test_what_a_rehearsal_cost_rests_on_the_operators_word_where_a_file_was_given(tmp_path):
    rng = np.random.default_rng(6)
    np.savez(tmp_path / "rows.npz", x=rng.random((400, 8, 8, 1)), y=np.arange(400) % 10)
    own = Plan(data={"name": "digits", "clients": 5, "samples": 20})
    told = make_stand_in(own, announce_federation(own), str(tmp_path / "rows.npz")).cost
    assert "provided" in told
    assert "cannot check" in told["sentence"]
    assert "no private row was read" not in told["sentence"]


def test_an_audit_that_refutes_mu_says_so():
    """Half the noise: μ is refuted long before ε without assumptions is, and that is enough."""
    setting = AuditSetting(8.0, 1e-5, Recipe(2.0, 1.0))
    rng, mu = np.random.default_rng(3), setting.promised
    sides = [rng.normal(sign * 0.55 * mu, size=10_000) for sign in (-1, 1)]
    found = Measurement(setting, 1.1 * mu, *sides)
    assert found.refutes_mu
    assert not found.refutes_epsilon
    findings = SimpleNamespace(promises=[found], one_runs=[], rows=[])
    assert len(Findings.contradictions.func(findings)) == 1


# A model of a client's own.


class Exiting:
    """A model whose code ends the process on one kind of sample."""

    def shapes(self):
        return {"w": (2,)}

    def gradients(self, params, x, y):
        for row in x:
            if row[0] > 5:
                raise self.error
        return {"w": np.asarray(x, np.float64)}

    def losses(self, params, x, y):
        self.gradients(params, x, y)
        return np.zeros(len(y))


@pytest.mark.parametrize("error", [SystemExit(3), GeneratorExit(), ValueError()])
def test_a_sample_on_which_own_code_exits_counts_as_nothing_and_ends_nothing(error):
    """Silence would tell of it: the sample has no gradient, and the others keep theirs."""
    own, form = Exiting(), Form("own", (2,), 2)
    own.error = error
    x, y = np.array([[1.0, 2.0], [9.0, 0.0], [3.0, 4.0]]), np.zeros(3, int)
    try:
        found = base.gradient_matrix(form, {"w": np.zeros(2)}, x, y, own)
        told = base.sample_losses(form, {"w": np.zeros(2)}, x, y, own)
    except BaseException as raised_by:
        raise AssertionError("one sample ended the answer") from raised_by
    assert np.array_equal(found[[0, 2]], x[[0, 2]])
    assert not np.any(np.isfinite(found[1]) & (found[1] != 0))
    assert np.isfinite(told[[0, 2]]).all()
