"""Who sees what: the guarantee against a server that learns only sums of a round's uploads.

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
from sottovoce.privacy.tank import FULL
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
    return Plan.load().replace(**{"rounds.rounds": 12, **changes})


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


def test_an_audit_of_sums_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "plan.toml"
    path.write_text(plan_of(**SUM).to_toml())
    with pytest.raises(InputError, match=r"privacy\.view must be upload in an audit"):
        load_target(path)
