"""Who sees what: guarantees against a server that learns only sums, and against models alone.

Statistical tests say their false-alarm rate; seeds are fixed.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import dp_accounting
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

import sottovoce
from sottovoce.data.files import read_npz
from sottovoce.errors import InputError
from sottovoce.plan import Plan
from sottovoce.privacy.calibration import sum_model_mu2
from sottovoce.privacy.tank import FULL
from sottovoce.reports.progress import summarize_run
from sottovoce.reports.run import render_report
from sottovoce.schedules.calibrate import calibrate
from sottovoce.schedules.pricing import share_noise
from sottovoce.server import rounds
from sottovoce.server.federation import build
from sottovoce.simulation.simulate import simulate_many
from sottovoce.studies.audit.auditing import load_target

SUM = {"privacy.view": "sum", "privacy.honest": 4, "privacy.corrupt": 2}
UNEQUAL = {
    "privacy.epsilon": [0.5, 1, 1, 2, 4, 4, 8, 8, 8, 16],
    "data.samples": [40, 60, 80, 100, 120, 140, 160, 180, 200, 220],
    "data.split": "sizes",
}


def plan_of(**changes: Any) -> Plan:
    return Plan(data={"samples": 143}).replace(**{"rounds.rounds": 12, **changes})


def exact_epsilon(delta: float, mu2: float) -> float:
    """ε of Gaussian releases worth μ², by dp-accounting."""
    return float(dp_accounting.get_epsilon_gaussian(1 / mu2**0.5, delta))


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_the_noise_of_any_h_honest_clients_is_enough(data: st.DataObject) -> None:
    """Whoever the h - 1 other honest clients are, their noise and its own make up σ."""
    many = data.draw(st.integers(2, 6))
    numbers = st.lists(st.floats(1e-3, 1e3), min_size=many, max_size=many)
    sigma, samples = np.array(data.draw(numbers)), np.array(data.draw(numbers))
    present = np.array(data.draw(st.lists(st.booleans(), min_size=many, max_size=many)))
    present[:2] = True
    honest = data.draw(st.integers(2, int(present.sum())))
    shared = share_noise(sigma, samples, present, honest=honest)
    variance = (samples * shared) ** 2
    for i in np.flatnonzero(present):
        others = [j for j in np.flatnonzero(present) if j != i]
        for chosen in itertools.combinations(others, honest - 1):
            counted = variance[[i, *chosen]].sum()
            assert counted >= (samples[i] * sigma[i]) ** 2 * (1 - 1e-12)
        # Alone, a release costs at most h times what is booked, and never less than that.
        assert 1 - 1e-9 <= (sigma[i] / shared[i]) ** 2 <= honest * (1 + 1e-12)
    assert np.array_equal(shared[~present], sigma[~present])


def test_equal_clients_need_less_by_the_root_of_h() -> None:
    shared = share_noise(np.full(50, 3.0), 800, np.ones(50, bool), honest=40)
    assert shared == pytest.approx(3 / 40**0.5, rel=1e-8)


@pytest.mark.parametrize(
    "changes",
    [{}, UNEQUAL, {"rounds.schedule": "fixed"}, {"rounds.schedule": "decaying"},
     {"rounds.per_round": 7}, {**UNEQUAL, "rounds.per_round": 6, "rounds.cohort": "random"},
     {"local.unit": "client", "privacy.epsilon": 50}, {"privacy.calibration": "zcdp"}],
)  # fmt: skip
def test_both_books_of_a_run_hold(changes: dict[str, Any], tmp_path: Path) -> None:
    """Σ over rounds, recomputed from the noise of each upload, for the sum and for one alone."""
    run = sottovoce.simulate(plan_of(**SUM, **changes), seed=3, out=tmp_path / "run")
    record, trace = run.record, read_npz(tmp_path / "run" / "trace.npz")["sigma"]
    clients = record["clients"]
    for i, client in enumerate(clients):
        summed = alone = 0.0
        for line in trace:
            if np.isnan(line[i]):
                continue
            there = [j for j in np.flatnonzero(~np.isnan(line)) if j != i]
            assert len(there) + 1 >= 6  # h + c
            noise = {j: (clients[j]["samples"] * line[j]) ** 2 for j in [i, *there]}
            least = noise[i] + sum(sorted(noise[j] for j in there)[:3])
            summed += (client["samples"] * client["sensitivity"]) ** 2 / least
            alone += (client["sensitivity"] / line[i]) ** 2
        assert summed <= client["spent"] * (1 + 1e-9) <= client["capacity"] * (1 + 2e-9)
        assert alone == pytest.approx(client["spent_alone"], rel=1e-9)
        assert alone <= 4 * client["capacity"] * (1 + 1e-9)
        said = record["guarantee"]
        assert exact_epsilon(client["delta"], alone) <= said["epsilon_alone"] * (1 + 1e-9)
        assert exact_epsilon(client["delta"], summed) <= said["epsilon"] * (1 + 1e-9)
    assert "together with up to 2 of the other clients, as long as the rest follow" in run.guarantee
    assert "and whatever anyone does, (" in run.guarantee


def test_fewer_than_h_and_c_clients_upload_nothing_and_pay_nothing() -> None:
    federation = build(plan_of(**SUM), seed=1)
    first = rounds.make_first_state(federation, 1.0, 0.1, 1.0)
    for empty, uploads in ((4, 6), (5, 0)):
        spent = np.where(np.arange(10) < empty, FULL, 0)
        state = replace(first, tank=first.tank.spend(spent))
        prepared = rounds.prepare_round(federation, state, 1)
        assert prepared is not None
        assert prepared.uploads.sum() == uploads
        assert (prepared.tank.spent > spent).sum() == uploads


def test_the_noise_of_a_sum_has_the_variance_that_is_booked() -> None:
    """χ² over the 2,410 parameters after one round; false alarms: 1e-6 (seeds are fixed)."""
    one = {"rounds.rounds": 1, "rounds.schedule": "fixed", "local.learning_rate": 1e-3}
    quiet = sottovoce.simulate(plan_of(**one, **{"privacy.epsilon": 1e6}), seed=5)
    run = sottovoce.simulate(plan_of(**one, **SUM, **{"privacy.epsilon": 0.5}), seed=5)
    drawn = np.concatenate(
        [(run.params[name] - quiet.params[name]).ravel() for name in sorted(run.params)]
    ).astype(np.float64)
    client = run.record["clients"][0]
    # Ten equal clients: the mean has 10/h of the variance that one client books, over 10².
    booked = client["sensitivity"] ** 2 / client["spent"]
    sigma2 = booked / 4 / 10
    found = float((drawn**2).sum()) / sigma2
    low, high = stats.chi2.interval(1 - 1e-6, len(drawn))
    assert low < found < high


def test_runs_side_by_side_are_each_alone() -> None:
    plan = plan_of(**SUM, **UNEQUAL)
    for alone, one in zip(
        [sottovoce.simulate(plan, seed=seed) for seed in (1, 2)],
        simulate_many([plan], seeds=[1, 2], together=True),
        strict=True,
    ):
        assert alone.record["clients"] == one.record["clients"]
        assert alone.record["guarantee"] == one.record["guarantee"]


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_no_set_of_colluding_clients_learns_more_than_the_model_view_says(
    data: st.DataObject,
) -> None:
    """Every set of c others, by hand: their noise is left out, and one round reaches the bound."""
    many, played = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 3))
    numbers = st.lists(st.floats(0.05, 20), min_size=many, max_size=many)
    weight = np.array([data.draw(numbers) for _ in range(played)])
    weight *= [data.draw(st.lists(st.sampled_from([0, 1]), min_size=many, max_size=many))
               for _ in range(played)]  # fmt: skip
    sigma = np.array([data.draw(numbers) for _ in range(played)])
    delta, c = np.array(data.draw(numbers)), data.draw(st.integers(0, many - 1))
    found = sum_model_mu2(weight, sigma, delta, c)
    for i in range(many):
        costs = []
        for told in itertools.combinations([j for j in range(many) if j != i], c):
            rest = [j for j in range(many) if j not in told]
            noise = ((weight * sigma) ** 2)[:, rest].sum(axis=1)
            cost = [(w * delta[i]) ** 2 / v for w, v in zip(weight[:, i], noise, strict=True) if w]
            costs.append(sum(cost))
        assert max(costs) <= found[i] * (1 + 1e-12)
        if played == 1:
            assert found[i] == pytest.approx(max(costs), rel=1e-8)


@pytest.mark.parametrize(("epsilon", "about"), [(1, 0.0946), (4, 0.3788), (8, 0.7197)])
def test_fifty_equal_clients_against_an_oracle(epsilon: float, about: float) -> None:
    answer = calibrate(
        epsilon=epsilon, delta=1e-3, rounds=200, clients=50, samples=800, colluding=49
    )
    found = answer.model_view["epsilon"]
    exact = [exact_epsilon(1e-3, answer.mu**2 / (50 - c)) for c in (0, 1, 49)]
    assert found == pytest.approx(exact, rel=1e-6)
    assert found[0] == pytest.approx(about, abs=1e-4)
    assert found[0] < found[1] < found[2] == epsilon
    assert all(f >= e * (1 - 1e-12) for f, e in zip(found[:2], exact[:2], strict=True))


def test_the_largest_budget_of_the_paper_leaves_a_record() -> None:
    """Nothing is proven of so little noise but what holds against the server itself."""
    plan = Plan(
        data={"clients": 2},
        rounds={"schedule": "fixed", "rounds": 1},
        privacy={"epsilon": 1e6, "delta": 1e-5, "calibration": "paper"},
    )
    record = sottovoce.simulate(plan, seed=1).record
    alone, with_other = record["model_view"]["epsilon"]
    assert alone < with_other == record["guarantee"]["epsilon"]


def test_one_client_alone_is_seen_by_its_models() -> None:
    for colluding, found in ((0, [8.0]), (None, [8.0])):
        view = calibrate(epsilon=8, clients=1, colluding=colluding).model_view
        assert view["colluding"] == [0]
        assert view["epsilon"] == found
    with pytest.raises(InputError, match="colluding must be a whole number from 0 to 9"):
        calibrate(clients=10, colluding=10)


@pytest.mark.parametrize(
    "changes",
    [{}, {"rounds.per_round": 4}, {"rounds.schedule": "decaying", "rounds.slope": 0.05},
     {**UNEQUAL, "rounds.per_round": 6}, {**UNEQUAL, "server.weights": "precision"},
     {"privacy.calibration": "paper", "rounds.per_round": 4, "privacy.epsilon": 20}],
)  # fmt: skip
def test_the_model_view_of_a_schedule_fixed_in_advance(
    changes: dict[str, Any], tmp_path: Path
) -> None:
    """Recomputed from the noise of each upload: never less than an oracle's ε, never above ε."""
    plan = plan_of(**{"rounds.schedule": "fixed", "privacy.corrupt": 3, **changes})
    run = sottovoce.simulate(plan, seed=4, out=tmp_path / "run")
    record, trace = run.record, read_npz(tmp_path / "run" / "trace.npz")["sigma"]
    assert record["model_view"]["colluding"] == [0, 1, 3]
    samples = np.array([client["samples"] for client in record["clients"]])
    if plan.server.weights == "precision":
        federation = build(plan, seed=4)
        sums = [rounds.weigh_uploads(federation, ~np.isnan(line), line) for line in trace]
    else:
        cohorts = [np.isin(np.arange(10), entry["cohort"]) for entry in record["rounds"]]
        sums = [here * samples / (here * samples).sum() for here in cohorts]
    largest = [0.0, 0.0, 0.0]
    for i, client in enumerate(record["clients"]):
        for at, c in enumerate((0, 1, 3)):
            mu2 = 0.0
            for weight, sigma in zip(sums, trace, strict=True):
                noise = np.nan_to_num((weight * sigma) ** 2)
                others = sorted(np.delete(noise, i))[: 9 - c]
                if weight[i] > 0:
                    mu2 += (weight[i] * client["sensitivity"]) ** 2 / (noise[i] + sum(others))
            exact = exact_epsilon(client["delta"], mu2) if mu2 else 0.0
            said = client["epsilon_models"][at]
            holds = min(exact, record["guarantee"]["epsilon"])
            assert holds * (1 - 1e-9) <= said <= exact * (1 + 1e-6) + 1e-9
            if plan.privacy.calibration != "paper":
                assert said <= client["epsilon"]
            largest[at] = max(largest[at], said)
    assert record["model_view"]["epsilon"] == largest
    assert largest == sorted(largest)


def test_an_adaptive_schedule_is_bounded_for_equal_clients_only() -> None:
    """The cap is the capacity over K - c, however early the run stops; else nothing is stated."""
    run = sottovoce.simulate(plan_of(**{"privacy.corrupt": 4}), seed=1)
    capacity = run.record["clients"][0]["capacity"]
    exact = [exact_epsilon(1e-5, capacity / (10 - c)) for c in (0, 1, 4)]
    found = run.record["model_view"]["epsilon"]
    assert found == pytest.approx(exact, rel=1e-6)
    assert all(f >= e for f, e in zip(found, exact, strict=True))
    for changes in (
        UNEQUAL,
        {"rounds.per_round": 5},
        {"local.steps": 2},
        {"server.signal": "raw"},
        {"rounds.schedule": "fixed", "local.steps": 2},
        {"rounds.schedule": "fixed", "local.clip": "median"},
    ):
        view = sottovoce.simulate(plan_of(**changes), seed=1).record["model_view"]
        assert "epsilon" not in view
        assert "no smaller ε is stated: " in view["text"]


def test_a_fixed_schedule_that_did_not_end_states_nothing() -> None:
    """Whoever stops a run may have looked at it: the sum so far is no bound."""
    plan = plan_of(**{"rounds.schedule": "fixed", "rounds.rounds": 3}, **UNEQUAL)
    federation = build(plan, seed=1)
    state = rounds.make_first_state(federation, 1.0, 0.1, 1.0)
    for done in range(3):
        prepared = rounds.prepare_round(federation, state, 1)
        assert prepared is not None
        played = rounds.PlayedRound(prepared, 1.0, 0.1, 1.0, 1.0, ())
        state = rounds.close_round(federation, state, played, seconds=float(done))
    assert len(state.weight) == 3
    for finished, kept, stated in ((True, 3, True), (False, 3, False), (True, 2, False)):
        lines = replace(state, weight=state.weight[:kept])  # a checkpoint of an older version
        views = federation.observe_models(lines, finished=finished)
        assert views is not None
        assert ("epsilon" in views[0]) is stated


def test_where_a_client_hides_its_budget_nothing_is_stated() -> None:
    """Weights may depend on the noise that it hides, and so would the figures of others (R9)."""
    federation = build(plan_of(**{"rounds.schedule": "fixed", "rounds.rounds": 1}), seed=1)
    state = rounds.make_first_state(federation, 1.0, 0.1, 1.0)
    prepared = rounds.prepare_round(federation, state, 1)
    assert prepared is not None
    played = rounds.PlayedRound(prepared, 1.0, 0.1, 1.0, 1.0, ())
    state = rounds.close_round(federation, state, played, seconds=1.0)
    hides = np.arange(10) == 3
    numbers = {
        name: np.where(hides, np.nan, getattr(federation, name))
        for name in ("capacity", "epsilon", "delta")
    }
    quiet = replace(state, sigma=(np.where(hides, np.nan, state.sigma[0]),))
    for whose, lines in ((replace(federation, **numbers), quiet), (federation, quiet)):
        views = whose.observe_models(lines, finished=True)
        assert views is not None
        assert views[1] is None
        assert "some clients do not disclose their budgets" in views[0]["text"]
    plain = federation.observe_models(state, finished=True)
    assert plain is not None
    assert plain[1] is not None


def test_a_client_that_hides_its_noise_counts_as_adding_none() -> None:
    weight, sigma = np.full((1, 3), 1 / 3), np.array([[2.0, 2.0, np.nan]])
    found = sum_model_mu2(weight, sigma, 1.0, 0)
    assert found[:2] == pytest.approx([1 / 8, 1 / 8], rel=1e-8)
    assert np.isnan(found[2])


def test_page_card_and_terminal_say_both(tmp_path: Path) -> None:
    for changes, words in (({}, "no single upload"), (SUM, "and whatever anyone does")):
        folder = tmp_path / words
        run = sottovoce.simulate(plan_of(**changes), seed=1, out=folder)
        page = render_report(run.record)
        for text in (page, run._repr_html_(), summarize_run(run.record, folder, folder)):
            assert words in " ".join(text.split())
        assert ("model_view" in run.record) is not bool(changes)
        assert ("ε alone" in page) is bool(changes)
        # Of sums an attacker is bounded only while it lacks the noise that others have added.
        assert ("does not know the noise of the clients" in page) is bool(changes)


def test_an_audit_of_sums_attacks_uploads_at_what_holds_alone(tmp_path: Path) -> None:
    path = tmp_path / "plan.toml"
    plan = plan_of(**SUM)
    path.write_text(plan.to_toml())
    target = load_target(path)
    assert target.shared == plan.privacy.epsilon
    guarantee = build(plan, seed=1).guarantee()
    assert guarantee is not None
    assert target.epsilon == guarantee.epsilon_alone
    assert target.epsilon > target.shared
