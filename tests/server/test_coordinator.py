"""The server of a federation, with real devices and vaults in one process, whatever they do.

`settled` is what every run must leave behind: a valid record and page, a model that is the mean of
the uploads bit for bit, and vaults that have debited what they released, and nothing twice.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from datetime import datetime
from pathlib import Path

import jsonschema
import numpy as np
import pytest
from scipy.stats import trim_mean

from sottovoce import Plan, reports, simulate
from sottovoce.client import device, ledger, messages
from sottovoce.client.messages import Request, make_refusal
from sottovoce.client.node import Node
from sottovoce.client.vault import Vault
from sottovoce.data.federated import Samples
from sottovoce.errors import InputError, RunError
from sottovoce.models.base import Form, Regression
from sottovoce.privacy.budget import NOT_COVERED
from sottovoce.privacy.tank import FULL
from sottovoce.reports.progress import summarize_run
from sottovoce.runs import checkpoint
from sottovoce.server import coordinator
from sottovoce.server.coordinator import Patience, conduct
from support.devices import ask, books_hold, digest, kind, make_node
from support.federations import SCHEMA, go, replayed, same, settled
from support.in_process import FEATURES, HIDDEN, Direct, clients, draw, plan, public

pytestmark = pytest.mark.slow  # every round debits real vaults, durably


RUNS = {
    "fixed": {},
    "discounted": {"rounds.schedule": "discounted", "rounds.rounds": 6, "rounds.beta": 0.5,
                   "rounds.window": 1, "rounds.zeta": 10.0},
    "decaying": {"rounds.schedule": "decaying", "rounds.rounds": 12, "rounds.slope": 0.05},
    "two steps": {"local.steps": 2},
    "whole clients": {"local.unit": "client"},
    "two of three": {"rounds.per_round": 2, "rounds.rounds": 6},
    "at random": {"rounds.per_round": 2, "rounds.cohort": "random"},
    "precision": {"server.weights": "precision"},
    "losses": {"server.signal": "clients", "server.loss_bound": 3.0,
               "rounds.schedule": "discounted", "rounds.rounds": 6},
    "class weights": {"model.class_weights": [1.0, 0.2, 0.5]},
}  # fmt: skip


@pytest.mark.parametrize("name", RUNS)
def test_a_run_is_what_its_uploads_make_of_it(name, tmp_path):
    own = plan(**RUNS[name])
    transport = Direct(clients(tmp_path, unit=own.local.unit))
    done = go(transport, tmp_path / "run", own=own)
    ledgers = settled(done, transport, precision=name == "precision")
    record = done.record
    assert (record["status"], record["engine"], record["seed"]) == ("finished", "flower", None)
    assert record["guarantee"]["epsilon"] == 8.0
    for held, client in zip(ledgers.values(), record["clients"], strict=True):
        assert client["spent"] == pytest.approx(float(held.booked), rel=1e-9)
        # Drawn at random, a client may never be in a cohort.
        assert (client["spent"] > 0) == (client["participations"] > 0)
        assert client["spent"] <= client["capacity"]
    used = record["result"]["rounds_used"]
    assert used == len(transport.asked) <= own.rounds.rounds
    if name == "discounted":
        assert used < own.rounds.rounds
    if name == "losses":
        assert all(entry["signal"] is not None for entry in record["rounds"])


def test_the_noise_that_is_printed_is_that_of_this_run_alone(tmp_path):
    """What a vault has spent is of all runs: the second one seemed to have less noise."""
    nodes, own = clients(tmp_path, 3, run_share=0.25), plan(**{"rounds.rounds": 2})
    for name in ("first", "second"):
        done = go(Direct(nodes), tmp_path / name, own=own)
        (entry, _), client = done.record["rounds"], done.record["clients"][0]
        shown = f"{entry['sigma']['median'] / client['sensitivity']:.3g}"
        page = reports.write_report(tmp_path / name)
        assert f"(one turn, median client): {shown}." in page.read_text("utf-8")
        assert f"noise multiplier {shown} (" in summarize_run(done.record, tmp_path / name, page)


def test_a_server_logs_its_advice_before_anybody_is_asked(tmp_path, caplog):
    """40 records a client and δ = 1/40: whoever reads it after the last round has paid already."""
    transport = Direct(clients(tmp_path, delta=1 / 40))
    logged = []
    transport.on_answer = lambda route, blob, answer: logged.append(caplog.text) or answer
    done = go(transport, tmp_path / "run")
    sentence = "delta = 0.025 should be below 1 / 40"
    assert any(line.startswith(sentence) for line in done.record["advice"])
    assert sentence in logged[0]
    assert caplog.text.count(sentence) == 1


def test_clients_that_predict_a_number_make_a_run(tmp_path):
    """Of its range alone: a client with another one declines, and one with classes is left out."""
    target, nodes = Regression("squared", -3.0, 3.0), dict(clients(tmp_path / "classes", 1))
    for i, high in enumerate((3.0, 3.0, 9.0)):
        x, _ = draw(200, 50 + i)
        rows = x, x[:, 0] - x[:, 1]
        name = f"number-{i}"
        nodes[name] = make_node(tmp_path / name, rows, name=name, target=[-3.0, high], epsilon=50.0)
    held = [
        Samples(rows.x, target.scale(rows.x[:, 0] - rows.x[:, 1]))
        for rows in (public().validation, public().test)
    ]
    server = replace(public(), classes=1, target=target, validation=held[0], test=held[1])
    own = plan(**{"model.loss": "squared", "data.target": [-3, 3], "model.hidden": HIDDEN,
                  "local.learning_rate": 0.15, "rounds.rounds": 8})  # fmt: skip
    patience = Patience(3, gathering=0.5, minimum=2)
    with pytest.raises(InputError, match="public rows, which hold"):  # before anything is spent
        conduct(plan(), server, Direct(nodes), patience, out=tmp_path / "other")
    done = conduct(own, server, Direct(nodes), patience, out=tmp_path / "run")
    record = done.record
    jsonschema.validate(record, SCHEMA)
    assert [client["participations"] for client in record["clients"]] == [8, 8, 0]
    assert record["result"]["test_accuracy"] is None
    assert record["result"]["metrics"].keys() == {"mae", "rmse", "r2"}
    last, first = record["rounds"][-1], record["initial"]
    assert last["validation_loss"] < 0.95 * first["validation_loss"]


@pytest.mark.parametrize("kind", ["trimmed", "bounded"])
def test_uploads_are_combined_as_the_plan_says(kind, tmp_path):
    """Five clients, one of which goes the wrong way: the model is what an oracle makes of them."""
    transport, sent = Direct(clients(tmp_path, 5)), {}

    def away(route, asked, told):
        request = Request.from_blob(asked)
        sent[request.round.t] = request.params
        if route != "route-3":
            return told
        head, own = messages.unpack(told)
        return messages.pack(head, {k: 2 * w - own[k] for k, w in request.params.items()})

    transport.on_answer = away
    own = plan(**{"noise": "secure", "server.aggregation": kind, "rounds.rounds": 2})
    done = go(transport, tmp_path / "run", own=own)
    jsonschema.validate(done.record, SCHEMA)
    words = {"trimmed": "20% of the weight each", "bounded": "cut to the median of their lengths"}
    assert words[kind] in done.record["result"]["aggregation"]
    assert words[kind] in reports.write_report(tmp_path / "run").read_text("utf-8")
    blobs = [p.read_bytes() for p in sorted((tmp_path / "run" / "uploads").glob("00001-*"))]
    uploads = [messages.unpack(blob)[1] for blob in blobs]
    assert len(uploads) == 5
    with np.load(tmp_path / "run" / "model.npz") as final:
        moved = [np.concatenate([(u[k] - sent[1][k].astype(float)).ravel() for k in sorted(u)])
                 for u in uploads]  # fmt: skip
        most = np.median([np.linalg.norm(m) for m in moved])
        cut = [min(1.0, most / np.linalg.norm(m)) for m in moved]
        for k in uploads[0]:
            each = np.stack([u[k].astype(np.float64) for u in uploads])
            if kind == "trimmed":
                right = trim_mean(each, 0.2, axis=0)
            else:
                w = sent[1][k].astype(np.float64)
                right = np.mean([w + c * (u - w) for c, u in zip(cut, each, strict=True)], axis=0)
            assert np.allclose(final[k], right, rtol=1e-6, atol=1e-7)


def test_simulation_combines_uploads_in_the_same_way():
    """With secure noise every client makes an upload; without noise to speak of all ways agree."""
    own = {"noise": "secure", "data.clients": 4, "privacy.epsilon": 1e5, "model.name": "softmax",
           "rounds.schedule": "fixed", "rounds.rounds": 3}  # fmt: skip
    kinds = ("mean", "trimmed", "bounded")
    losses = {
        kind: simulate(Plan().replace(**own, **{"server.aggregation": kind})).record["rounds"][-1][
            "validation_loss"
        ]
        for kind in kinds
    }
    assert losses["trimmed"] == pytest.approx(losses["mean"], rel=0.2)
    assert losses["bounded"] == pytest.approx(losses["mean"], rel=0.2)


@pytest.mark.parametrize("share", [0.25, 0.01])
def test_clients_that_give_a_run_a_part_of_their_budget_are_not_taken_for_hostile(tmp_path, share):
    """Their noise is larger than their whole budget calls for: the server is told why."""
    nodes = clients(tmp_path, 3, run_share=share)
    done = go(Direct(nodes), tmp_path / "run", own=plan(**{"rounds.rounds": 4}))
    assert len(done.record["rounds"]) == 4
    assert not any(entry.get("refused") for entry in done.record["rounds"])
    for node in nodes.values():
        assert 0.99 * share < books_hold(node).spent / FULL <= share


def tighten(path, old, new):
    """A node whose file has another term from now on."""
    text = path.read_text("utf-8")
    assert old in text
    path.write_text(text.replace(old, new), "utf-8")
    return Node.load(path)


TIGHTER = {
    "floor": ("[policy]", "[policy]\nfloor = 6.0"),
    "run_share": ("run_share = 0.5", "run_share = 0.13"),
    "server_share": ("[policy.limits]", "[policy.limits]\nserver_share = 0.13"),
    "budget": ("epsilon = 8.0", "epsilon = 6.0"),
}


def require_nothing_burnt(transport, *runs):
    """Every debit of every client has an upload that its server has accepted."""
    kept = {digest(path.read_bytes()) for out in runs for path in (out / "uploads").iterdir()}
    for node in transport.nodes.values():
        with Vault.open(node.vault, dataset=None) as vault:
            lines = list(vault.lines())
        stored = [line.facts["sha256"] for line in lines if line.kind == "store"]
        assert set(stored) <= kept
        assert len(stored) == sum(line.kind == "reserve" for line in lines)


@pytest.mark.parametrize("when", ["before its first turn", "after its first turn"])
@pytest.mark.parametrize("key", TIGHTER)
def test_terms_that_are_tightened_in_mid_run_burn_no_budget(key, when, tmp_path):
    """What a server would reject, because it does not know why there is more noise, is not paid."""
    transport, out = Direct(clients(tmp_path, 3, run_share=0.5)), tmp_path / "run"
    greet = transport.greet

    def tighten_now(now):
        if now == when:
            transport.nodes["route-2"] = tighten(tmp_path / "client-2.toml", *TIGHTER[key])

    def greet_and_tighten(seconds):
        if told := greet(seconds):
            tighten_now("before its first turn")
        return told

    transport.greet = greet_and_tighten  # type: ignore[method-assign]

    def after(done):
        if done.t == 0:
            tighten_now("after its first turn")

    done = go(transport, out, server="one", on_round=after)
    require_nothing_burnt(transport, out)
    declined = [entry.get("refused", {}) for entry in done.record["rounds"]]
    assert all(why in ({}, {"policy": 1}) for why in declined)
    assert key != "budget" or not any(declined)  # the server knows what it needs
    again = go(Direct(transport.nodes), tmp_path / "again", server="another")
    assert [entry["uploads"] for entry in again.record["rounds"]] == [3] * 4
    require_nothing_burnt(transport, out, tmp_path / "again")


def test_clients_with_budgets_of_their_own_are_told_apart(tmp_path):
    nodes = clients(tmp_path, 2) | {
        "loose": next(iter(clients(tmp_path / "b", 1, epsilon=16.0).values()))
    }
    done = go(Direct(nodes), tmp_path / "run")
    assert sorted(c["epsilon"] for c in done.record["clients"]) == [8.0, 8.0, 16.0]
    assert done.record["guarantee"]["epsilon"] == 16.0
    settled(done, Direct(nodes))


def test_no_budget_is_shown_of_clients_that_hid_theirs_in_mid_run(tmp_path):
    transport, left = Direct(clients(tmp_path, 3)), []

    def hide(done):
        left.append(done.fuel)
        for i in range(3) if done.t == 0 else ():
            path = tmp_path / f"client-{i}.toml"
            transport.nodes[f"route-{i}"] = tighten(path, "[policy]", "[policy]\ndisclose = false")

    done = go(transport, tmp_path / "run", on_round=hide)
    assert [c["epsilon"] for c in done.record["clients"]] == [None] * 3
    assert np.isnan(left).tolist() == [False, True, True, True]


@pytest.mark.parametrize("told", [0, 1])
def test_what_clients_keep_to_themselves_is_in_no_record(told, tmp_path):
    nodes = clients(tmp_path, 3 - told, disclose=False)
    if told:
        nodes["open"] = next(iter(clients(tmp_path / "b", 1).values()))
    transport, left = Direct(nodes), []
    done = go(transport, tmp_path / "run", insecure=True, on_round=lambda r: left.append(r.fuel))
    settled(done, transport)
    assert np.isnan(left).tolist() == [told == 0] * 4  # a hidden tank is not shown as a full one
    record = done.record
    jsonschema.validate(record, SCHEMA)
    hidden = [c for c in record["clients"] if c["epsilon"] is None]
    assert len(hidden) == 3 - told
    for client in hidden:
        kept = ("samples", "epsilon", "delta", "sensitivity", "capacity", "spent")
        assert all(client[key] is None for key in kept)
    assert (record["guarantee"] is None) == (told == 0)
    assert all((entry["sigma"]["max"] is None) == (told == 0) for entry in record["rounds"])
    if told:
        assert "undisclosed-budgets" in record["guarantee"]["not_covered"]
    else:
        assert "keeps its budget to itself" in done.guarantee
        assert "insecure-transport" in record["not_covered"]
    for said in (
        done.guarantee,
        summarize_run(record, Path(), Path()).replace("\n", " "),
        reports.render_report(record),
    ):
        assert NOT_COVERED["insecure-transport"] in said
    with np.load(tmp_path / "run" / "trace.npz") as trace:
        assert np.isnan(trace["sigma"]).sum() == 4 * (3 - told)
    with np.load(tmp_path / "run" / "splits.npz") as splits:
        assert np.isnan(splits["samples"]).sum() == 3 - told
    with pytest.raises(RunError, match="keeps its budget to itself, and precision"):
        go(Direct(clients(tmp_path / "c", disclose=False)), tmp_path / "other",
           own=plan(**RUNS["precision"]))  # fmt: skip


def test_silence_is_waited_out_forgiven_and_remembered(tmp_path):
    """Silent for three rounds: not asked any more, until it greets by another route."""
    transport = Direct(clients(tmp_path))
    lost = "route-1"
    transport.on_answer = lambda route, asked, told: None if route == lost else told

    def after(round_done):
        if round_done.t == 4:
            transport.nodes["new"] = transport.nodes.pop(lost)

    done = go(transport, tmp_path / "run", own=plan(**{"rounds.rounds": 8}), on_round=after,
              patience=Patience(3, gathering=0.5, deadline=17.0))  # fmt: skip
    assert [lost in routes for routes in transport.asked] == [True] * 3 + [False] * 5
    assert ["new" in routes for routes in transport.asked] == [False] * 5 + [True] * 3
    assert set(transport.seconds) == {17.0}
    rounds = done.record["rounds"]
    assert rounds[0]["refused"] == {"silent": 1}
    assert rounds[0]["asked"] == [0, 1, 2]
    assert [entry["uploads"] for entry in rounds] == [2] * 5 + [3] * 3
    settled(done, transport)


def test_late_and_repeated_answers_count_once(tmp_path):
    transport, old = Direct(clients(tmp_path)), {}

    def late(route, asked, told):
        before = old.get(route)
        old[route] = told
        return before if route == "route-0" and before is not None else told

    transport.on_answer = late
    done = go(transport, tmp_path / "run")
    settled(done, transport)
    assert [entry["uploads"] for entry in done.record["rounds"]] == [3, 2, 2, 2]
    assert done.record["rounds"][1]["refused"] == {"malformed": 1}


def drain(node):
    """Another run takes all that is left of a client's budget."""
    form = Form("mlp", (FEATURES,), 3, {"hidden": HIDDEN})
    params = {name: np.zeros(shape, np.float32) for name, shape in form.shapes().items()}
    for t in range(300):
        asked = ask(form=form, params=params, run="feedbeef", t=t, horizon=max(t + 1, 4))
        if kind(device.answer_request(asked.to_blob(), node)) == "empty":
            return
    raise AssertionError("the tank did not run dry")


def test_a_client_whose_tank_ran_dry_declines_and_is_not_asked_again(tmp_path):
    transport = Direct(clients(tmp_path))
    own = plan(**{"rounds.rounds": 6})

    def after(round_done):
        if round_done.t == 1:
            drain(transport.nodes["route-2"])

    done = go(transport, tmp_path / "run", own=own, on_round=after)
    assert ["route-2" in routes for routes in transport.asked] == [True] * 3 + [False] * 3
    assert done.record["rounds"][2]["refused"] == {"empty": 1}
    assert "refused" not in done.record["rounds"][3]
    settled(done, transport)
    assert done.record["clients"][2]["participations"] == 2


def test_one_that_declines_is_replaced_and_does_not_end_the_run(tmp_path):
    """One client a round: whoever says no is replaced within the round."""
    transport = Direct(clients(tmp_path, 4))
    transport.on_answer = lambda route, asked, told: (
        make_refusal("empty", "") if route in ("route-0", "route-3") else told
    )
    own = plan(**{"rounds.per_round": 1, "rounds.rounds": 8})
    done = go(transport, tmp_path / "run", own=own)
    assert done.record["result"]["rounds_used"] == 8
    assert {i for entry in done.record["rounds"] for i in entry["cohort"]} == {1, 2}
    settled(done, transport)


def test_the_run_ends_when_everyone_has_declined_for_good(tmp_path):
    transport = Direct(clients(tmp_path))
    transport.on_answer = lambda route, asked, told: (
        make_refusal("empty", "") if Request.from_blob(asked).round.t == 2 else told
    )
    done = go(transport, tmp_path / "run", patience=Patience(3, gathering=0.5, minimum=2))
    assert (done.record["status"], done.record["result"]["rounds_used"]) == ("finished", 2)
    settled(done, transport)


@pytest.mark.parametrize("minimum", [1, 2])
def test_an_outage_stops_the_run_and_loses_nothing(tmp_path, minimum):
    """Too few answer in round 2, though all have debited: resumed, the stored answers come back."""
    transport, out = Direct(clients(tmp_path)), tmp_path / "run"
    patience = Patience(3, gathering=0.5, minimum=minimum, tries=2, pause=0.0)
    heard = ["route-0"] if minimum == 2 else []
    transport.on_answer = lambda route, asked, told: (
        told if Request.from_blob(asked).round.t < 2 or route in heard else None
    )
    with pytest.raises(RunError, match=r"round 3 got \d uploads of 3 asked .* resume the run"):
        go(transport, out, patience=patience)
    assert json.loads((out / "record.json").read_text())["status"] == "failed"
    before = {route: books_hold(node) for route, node in transport.nodes.items()}
    assert all(len(held.answers) == 3 for held in before.values())
    again = Direct(transport.nodes)
    done = go(again, out, patience=patience, resume=True)
    after = settled(done, again)
    assert done.record["result"]["rounds_used"] == 4
    for route, held in after.items():  # round 3 was answered from the store, round 4 anew
        assert len(held.answers) == 4
        assert all(held.answers[key] == blob for key, blob in before[route].answers.items())
        assert held.spent == sum(map(sum, units_of(again.nodes[route])))
        assert len(units_of(again.nodes[route])) == 4


def units_of(node):
    """What was booked, reserve by reserve."""
    with Vault.open(node.vault, dataset=None) as vault:
        return [entry.units for entry in vault.entries()]


def test_killed_and_resumed_from_an_old_checkpoint_it_ends_in_the_same_models(tmp_path):
    """The server loses two whole rounds: every client sends the same bytes again."""
    out = tmp_path / "run"

    class Keeping(Direct):
        def ask(self, requests, seconds):  # what a kill -9 would leave behind, round by round
            shutil.copytree(out, tmp_path / f"saved-{len(self.asked)}")
            return super().ask(requests, seconds)

    def at(t):
        if t == 2:
            raise KeyboardInterrupt

    transport = Keeping(clients(tmp_path))
    with pytest.raises(KeyboardInterrupt):
        go(transport, out, on_round=lambda done: at(done.t), server="a name")
    assert json.loads((out / "record.json").read_text())["status"] == "interrupted"
    first = replayed(out)
    spent = {route: books_hold(node).spent for route, node in transport.nodes.items()}
    again = Direct(transport.nodes)
    done = go(again, tmp_path / "saved-1", resume=True, server="another")
    settled(done, again)
    last = replayed(tmp_path / "saved-1")
    assert all(same(first[t], last[t]) for t in (0, 1, 2))
    assert [entry["t"] for entry in done.record["rounds"]] == [0, 1, 2, 3]
    for route, node in transport.nodes.items():  # only the fourth round was debited since
        assert len(units_of(node)) == 4
        assert books_hold(node).spent - spent[route] == sum(units_of(node)[-1])


def test_what_one_sitting_did_not_cover_the_whole_run_does_not_cover(tmp_path):
    """A listener saw the first round, and its vaults were new: later sittings cannot undo that."""
    transport, out = Direct(clients(tmp_path)), tmp_path / "run"

    def leave(done):
        raise KeyboardInterrupt

    def sit(**more):
        return conduct(plan(), more.pop("held", public()), Direct(transport.nodes),
                       Patience(3, gathering=0.5), out=out, **more)  # fmt: skip

    with pytest.raises(KeyboardInterrupt):
        sit(insecure=True, held=replace(public(), fresh_vaults=True), on_round=leave)
    codes = {"insecure-transport", "fresh-vaults"}
    assert codes <= {*json.loads((out / "record.json").read_text())["guarantee"]["not_covered"]}
    with pytest.raises(KeyboardInterrupt):  # by TLS, with another file of public rows
        sit(resume=True, on_round=leave)
    done = sit(resume=True)
    listed = done.record["guarantee"]["not_covered"]
    assert codes <= {*listed}
    assert len(listed) == len({*listed})
    jsonschema.validate(done.record, SCHEMA)


def test_a_client_whose_records_changed_pays_once_in_vain(tmp_path):
    """Its uploads count no more in this run, so it is not asked for others; the record says why."""
    transport, node = Direct(clients(tmp_path)), tmp_path / "client-1.toml"

    def grow(done):
        if done.t == 0:
            x, y = draw(50, 9)
            np.savez(tmp_path / "client-1.npz", x=x, y=y)
            ledger.rebind(node=node, overlap="some")

    done = go(transport, tmp_path / "run", on_round=grow, own=plan(**{"rounds.rounds": 5}))
    jsonschema.validate(done.record, SCHEMA)
    assert [entry["cohort"] for entry in done.record["rounds"]] == [[0, 1, 2], *[[0, 2]] * 4]
    assert [entry.get("refused") for entry in done.record["rounds"]] == [
        None, {"samples": 1}, *[None] * 3]  # fmt: skip
    assert [len(units_of(transport.nodes[route])) for route in sorted(transport.nodes)] == [5, 2, 5]


def test_a_checkpoint_that_does_not_say_how_it_was_carried_counts_as_plaintext(tmp_path):
    """Older versions did not write it down: a record must not promise what is not known."""
    transport, out = Direct(clients(tmp_path)), tmp_path / "run"

    def leave(done):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        go(transport, out, on_round=leave)
    state, params, header, memory = checkpoint.load(out)
    del header["not_covered"]
    checkpoint.save(out, state, params, header, memory)
    done = go(Direct(transport.nodes), out, resume=True)
    assert "insecure-transport" in done.record["guarantee"]["not_covered"]


def test_only_uploads_that_counted_are_kept(tmp_path, monkeypatch):
    """Killed when a round's uploads were kept and its checkpoint was not: one comes no more."""
    transport, out, killed = Direct(clients(tmp_path)), tmp_path / "run", tmp_path / "killed"
    played = coordinator._play_round

    def copied(run, *more):
        if run.state.progress.done == 1:
            shutil.copytree(out, killed)  # what kill -9 would leave
            raise KeyboardInterrupt
        return played(run, *more)

    monkeypatch.setattr(coordinator, "_play_round", copied)
    with pytest.raises(KeyboardInterrupt):
        go(transport, out)
    assert sorted(replayed(out)) == [0]  # the second round has not counted
    monkeypatch.undo()
    assert (killed / "uploads" / "00001-00001").exists()
    again = Direct(transport.nodes)
    again.on_answer = lambda route, asked, told: None if route == "route-1" else told
    done = go(again, killed, resume=True)
    kept = {(int(p.name[:5]), int(p.name[6:])) for p in (killed / "uploads").iterdir()}
    assert kept == {(e["t"], i) for e in done.record["rounds"] for i in e["cohort"]}
    settled(done, again)


def test_a_resumed_run_began_when_its_first_session_did(tmp_path, monkeypatch):
    """Its seconds are those of all sessions, too."""
    transport, out, hour = Direct(clients(tmp_path)), tmp_path / "run", iter((9, 17))

    class Clock(datetime):
        @classmethod
        def now(cls, zone):
            return cls(2026, 11, 1, next(hour), tzinfo=zone)

    def stop(done):
        raise KeyboardInterrupt

    monkeypatch.setattr(coordinator, "datetime", Clock)
    with pytest.raises(KeyboardInterrupt):
        go(transport, out, on_round=stop)
    done = go(Direct(transport.nodes), out, resume=True)
    assert done.record["timing"]["started"] == "2026-11-01T09:00:00Z"


def test_a_resumed_run_does_without_those_that_stay_away(tmp_path):
    transport, out = Direct(clients(tmp_path)), tmp_path / "run"

    def stop(done):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        go(transport, out, on_round=stop)
    fewer = Direct({r: n for r, n in transport.nodes.items() if r != "route-1"})
    done = go(fewer, out, resume=True)
    assert [entry["uploads"] for entry in done.record["rounds"]] == [3, 2, 2, 2]
    assert len(done.record["clients"]) == 3
    settled(done, transport)


def test_every_client_is_asked_with_the_newest_receipt_it_gave(tmp_path):
    """Only so can a vault that was set back, witnesses and all, find out that it was."""
    transport, newest = Direct(clients(tmp_path)), {}

    def asked(route, request, answer):
        receipt = Request.from_blob(request).receipt
        assert receipt is not None
        assert newest.get(route) in (None, receipt.to_json())
        newest[route] = messages.unpack(answer)[0]["receipt"]
        return answer

    transport.on_answer = asked
    go(transport, tmp_path / "run")
    assert len(newest) == 3
    assert min(receipt["seq"] for receipt in newest.values()) > 4  # four rounds, each a line or two


@pytest.mark.parametrize("rounds", [0, 1])
def test_a_resumed_server_still_knows_a_vault_that_was_set_back(tmp_path, monkeypatch, rounds):
    """A whole machine set back: only the server's receipt can tell, so it must keep it.

    It was stopped after the second round, and the vault knows of none, or of the first alone.
    """
    monkeypatch.setenv("SOTTOVOCE_STATE", str(tmp_path / "state"))
    transport, out = Direct(clients(tmp_path)), tmp_path / "run"
    files = [p for p in tmp_path.iterdir() if p.name.startswith("client-1.vault")]
    with Vault.open(tmp_path / "client-1.vault", dataset=None) as vault:
        files.append(tmp_path / "state" / "witness" / vault.id)
    old = {path: path.read_bytes() for path in files}
    spent = 0

    def stop(done):
        nonlocal spent
        if done.t + 1 == rounds:
            old.update({path: path.read_bytes() for path in files})
            spent = books_hold(transport.nodes["route-1"]).spent
        if done.t == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        go(transport, out, on_round=stop)
    for path, content in old.items():
        path.write_bytes(content)
    again = Direct(transport.nodes)
    done = go(again, out, resume=True)
    assert done.record["rounds"][2]["refused"] == {"unavailable": 1}
    assert done.record["rounds"][2]["cohort"] == [0, 2]
    assert books_hold(transport.nodes["route-1"]).spent == spent


@pytest.mark.parametrize("name", ["record.json", "checkpoint.npz"])
def test_a_run_is_not_written_over_another(tmp_path, name):
    (tmp_path / name).write_text("{}")
    with pytest.raises(InputError, match="out must be a folder without a run"):
        go(Direct(clients(tmp_path / "c")), tmp_path)
    with pytest.raises(InputError, match="minimum must be at most 3"):
        go(Direct(clients(tmp_path / "d")), tmp_path / "run",
           patience=Patience(3, gathering=0.5, minimum=4))  # fmt: skip


def test_a_run_goes_on_with_the_public_rows_that_it_began_with(tmp_path):
    """Other rows would give losses that the schedule compares with those of before."""
    transport, out = Direct(clients(tmp_path)), tmp_path / "run"

    def stop(done):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        go(transport, out, on_round=stop)
    spent = [books_hold(node).spent for node in transport.nodes.values()]
    held = public()
    other = replace(held, test=replace(held.test, y=held.test.y[::-1].copy()))
    again = Direct(transport.nodes)
    with pytest.raises(RunError, match="the public rows are not those that this run began with"):
        conduct(plan(), other, again, Patience(3, gathering=0.5), out=out, resume=True)
    assert again.asked == []
    assert [books_hold(node).spent for node in transport.nodes.values()] == spent
    assert go(again, out, resume=True).record["status"] == "finished"


def test_only_a_stopped_run_is_resumed(tmp_path):
    with pytest.raises(RunError, match=r"holds no checkpoint.npz"):
        go(Direct({}), tmp_path, resume=True, patience=Patience(1, gathering=0.1))
