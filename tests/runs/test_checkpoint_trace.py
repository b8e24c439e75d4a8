"""Of very many clients one line of trace is kept, and it is worth all the rounds."""

from __future__ import annotations

import numpy as np
import pytest

from sottovoce import reports
from sottovoce.data.federated import Given
from sottovoce.plan import Plan
from sottovoce.runs.checkpoint import MANY_CLIENTS, combine_sigma
from sottovoce.server import rounds
from sottovoce.server.federation import build
from sottovoce.simulation.simulate import simulate

CLIENTS = MANY_CLIENTS + 1
PLAN = Plan(
    data={"name": "arrays", "clients": CLIENTS, "samples": 1, "validation": 20, "test": 20},
    model={"name": "svm"},
    rounds={"schedule": "fixed", "rounds": 4, "per_round": 6000},
)


def rows():
    random = np.random.default_rng(0)
    x = random.random((CLIENTS + 40, 3), dtype=np.float32)
    return x, (x[:, 0] > 0.5).astype(int)


def test_one_release_is_worth_many():
    random = np.random.default_rng(1)
    lines = np.where(random.random((9, 200)) < 0.4, np.nan, random.lognormal(0, 3, (9, 200)))
    lines[:, 0] = np.nan
    one = lines[0]
    for line in lines[1:]:
        one = combine_sigma(one, line)
    apart = np.nansum(lines**-2.0, axis=0)
    assert np.isnan(one[0])
    assert np.allclose(one[1:] ** -2.0, apart[1:], rtol=1e-12)


def test_memory_of_the_books_does_not_grow_with_the_rounds():
    federation = build(PLAN, seed=1, data=Given(rows()))
    state, sigmas = rounds.make_first_state(federation, 1.0, 0.5, 1.0), []
    while (paid := rounds.prepare_round(federation, state, 1)) is not None:
        sigmas.append(paid.sigma[0])
        played = rounds.PlayedRound(paid, 1.0, 0.5, 1.0, 1.0, ())
        state = rounds.close_round(federation, state, played, seconds=1.0)
    assert len(state.rounds) == len(sigmas) == 4
    assert len(state.sigma) == len(state.mu2) == 1
    told = np.nansum(np.array(sigmas) ** -2.0, axis=0)
    assert np.allclose(np.nan_to_num(state.sigma[0] ** -2.0), told, rtol=1e-12)
    assert np.allclose(state.mu2[0], state.tank.spent_mu2, rtol=1e-12)


@pytest.mark.slow
def test_the_folder_of_such_a_run_says_what_was_spent(tmp_path):
    run = simulate(PLAN, data=rows(), seed=1, out=tmp_path / "run")
    with np.load(tmp_path / "run" / "trace.npz") as trace:
        spent = np.nan_to_num((trace["clients_sensitivity"] / trace["sigma_all"]) ** 2)
        assert np.allclose(spent, trace["clients_spent"], rtol=1e-9)
        assert (trace["clients_spent"] <= trace["clients_capacity"] * (1 + 1e-9)).all()
    assert "cohort" not in run.record["rounds"][0]
    assert "10,001" in reports.render_report(run.record) or "10001" in reports.render_report(
        run.record
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "more",
    [
        {"local.steps": 3},
        {
            "rounds.schedule": "discounted",
            "server.signal": "clients",
            "server.loss_bound": 2.0,
        },
    ],
)
def test_several_releases_a_round_are_all_in_the_trace(more, tmp_path):
    """σ of the first step is not all that was released: what was booked stands beside it."""
    simulate(PLAN.replace(**more), data=rows(), seed=1, out=tmp_path / "run")
    with np.load(tmp_path / "run" / "trace.npz") as trace:
        assert np.allclose(trace["mu2_all"], trace["clients_spent"], rtol=1e-9)
        first = np.nan_to_num((trace["clients_sensitivity"] / trace["sigma_all"]) ** 2)
        assert first.max() < 0.99 * trace["mu2_all"].max()
