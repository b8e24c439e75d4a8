"""The forecast of rounds and steps: what it may read, and that it finds good ones."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import jax
import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sottovoce import Plan, resume, simulate
from sottovoce.client.messages import Request
from sottovoce.client.node import Node
from sottovoce.data.federated import Given, Samples
from sottovoce.errors import InputError, PlanError
from sottovoce.privacy.tank import Tank
from sottovoce.schedules.algorithms import FEWEST, FIRST_STEPS, STEPS, ForecastRounds
from sottovoce.schedules.base import Progress
from sottovoce.server import forecast, rounds
from sottovoce.server.federation import build, build_from_members
from support.federations import go, replayed
from support.in_process import Direct, clients, draw, plan
from support.in_process import public as public_rows
from support.promised import account, member

ROUNDS = 24
FORECAST = {
    "rounds.schedule": "forecast",
    "rounds.rounds": ROUNDS,
    "server.average": "exponential",
}


def make_federation(seed=1, rows=5, **changes):
    return build(plan(**{**FORECAST, **changes}), data=Given(draw(240, rows)), seed=seed)


def look_ahead(federation, seed=1):
    params = jax.tree.map(np.asarray, federation.model.draw_parameters(seed))
    start = forecast.start_schedule(federation, params, 1.0, tank=federation.tank(), seed=seed)
    public = federation.held.validation
    measure, most = forecast.prepare_forecast(
        federation, params, public, tank=federation.tank(), seed=seed
    )
    assert most == forecast.MOST_PAIRS  # a small model
    return start, [measure((T, 1.0), 0) for T in federation.schedule.lengths]


def check_horizons(record):
    """All rounds are as announced, and the record says what was."""
    found, horizons = record["result"]["forecast"], [r["horizon"] for r in record["rounds"]]
    assert horizons == [found["rounds"]] * record["result"]["rounds_used"]
    assert len(horizons) == found["rounds"] in ForecastRounds(ROUNDS).lengths
    assert found["step"] in STEPS


class Untouchable(Samples):
    """Rows that nobody may look at."""

    def __getattribute__(self, name):
        raise AssertionError(f"a client's rows were read ({name})")


def test_no_row_of_a_client_is_read():
    """The horizon is a function of public values: clients' rows may be anything at all."""
    federation = make_federation()
    told = look_ahead(federation)
    x, y = federation.held.train.x, federation.held.train.y
    other = Samples(np.full_like(x, 1e6), np.zeros_like(y))
    for rows in (other, Untouchable(x, y)):
        assert look_ahead(replace(federation, held=replace(federation.held, train=rows))) == told


def test_the_numbers_of_clients_that_hide_them_do_not_show():
    """R9: the horizon is published, so that neither samples nor budget of such a client enter."""
    federation = make_federation()
    capacity = federation.capacity.copy()
    capacity[0] = np.nan
    hidden = replace(federation, capacity=capacity)
    tank, noises = federation.tank(), set()
    for samples in ([40, 40, 40], [4000, 40, 40]):
        held = replace(federation.held, samples=np.array(samples))
        shown = replace(hidden, held=held)
        noises.add(forecast.compute_noise(shown, tank, ROUNDS))
    assert len(noises) == 1
    nobody = replace(federation, capacity=np.full(3, np.nan))
    with pytest.raises(InputError, match="where no client discloses a budget"):
        forecast.compute_noise(nobody, tank, ROUNDS)


def test_one_client_with_a_small_budget_does_not_drown_the_forecast():
    """In a round its noise is limited to twice the median, and its forecast is that of a round."""
    noises = {}
    for weak in (8.0, 0.01):
        members = [member(i, account(epsilon)) for i, epsilon in enumerate([8.0] * 4 + [weak])]
        for registered in (None, 40):
            own = plan(**FORECAST, **{"data.clients": 5})
            members[4] = replace(members[4], registered=registered)
            federation = build_from_members(own, members, public_rows())
            noises[weak, registered] = forecast.compute_noise(federation, federation.tank(), ROUNDS)
    assert noises[8.0, None] == noises[8.0, 40]
    # Four uploads and one with twice their noise, and four fifths of the weight at least.
    assert noises[0.01, None] <= noises[8.0, None] * np.sqrt(4 + 2**2) / np.sqrt(5) * 5 / 4
    assert noises[0.01, 40] > 100 * noises[8.0, 40]  # the operator vouches for it


def test_samples_that_are_hidden_do_not_limit_what_others_count_for():
    """R9: the median of all clients, beyond whose double nobody counts, would tell of them."""
    noises = set()
    for hidden in (10, 30, 90):
        shown = [replace(member(i, account(8.0)), samples=n) for i, n in enumerate((20, 40, 100))]
        others = [replace(member(i, None), samples=hidden) for i in (3, 4)]
        own = plan(**FORECAST, **{"data.clients": 5})
        federation = build_from_members(own, [*shown, *others], public_rows())
        tank = Tank.full(np.nan_to_num(federation.capacity, nan=1.0))
        noises.add(forecast.compute_noise(federation, tank, ROUNDS))
    assert len(noises) == 1


@pytest.mark.parametrize(("public", "used"), [(60, 60), (1500, 1500), (2400, 2000)])
def test_it_trains_on_all_public_rows_up_to_a_limit(monkeypatch, public, used):
    """Of few rows it memorises more than a run does of its clients' rows: paths get too long."""
    seen = []

    def lower(model, steps, metric, structure, count, *_):
        def keep(start, rows, which, *numbers):
            assert {len(set(split)) for split in which[1]} == {len(rows[1])}  # each row once
            seen.append((count, len(rows[1])))
            return np.zeros((forecast.PAIR, 2))

        return SimpleNamespace(compile=lambda: keep)

    monkeypatch.setattr(forecast, "_train_pair", SimpleNamespace(lower=lower))
    data = Given(draw(public + 180, 5))
    look_ahead(build(plan(**FORECAST, **{"data.validation": public}), data=data, seed=1))
    assert set(seen) == {(4 * used // 5, used)}


@pytest.mark.parametrize(
    "changes",
    [{}, {"server.weights": "precision", "privacy.epsilon": [1.0, 8.0, 8.0]},
     {"data.split": "sizes", "data.samples": [20, 40, 60]},
     {"privacy.view": "sum", "privacy.honest": 2}],
)  # fmt: skip
def test_its_noise_is_that_of_the_run(changes):
    """Of a cohort of all clients exactly; of two in three on average, where clients are alike."""
    federation = make_federation(**changes)
    state = rounds.make_first_state(federation, 1.0, 0.5, 1.0)
    paid = rounds.prepare_round(federation, state, 1)
    assert forecast.compute_noise(federation, federation.tank(), ROUNDS) == pytest.approx(paid.std)
    if not changes:
        some = make_federation(**{"rounds.per_round": 2})
        paid = rounds.prepare_round(some, rounds.make_first_state(some, 1.0, 0.5, 1.0), 1)
        assert forecast.compute_noise(some, some.tank(), ROUNDS) == pytest.approx(paid.std)


def test_it_is_a_function_of_the_seed_and_foresees_what_noise_does():
    """Of two budgets, the one with more noise gets a shorter path, at a higher cost."""
    timid = {"local.learning_rate": 0.3}
    tight, loose, again = (
        look_ahead(make_federation(**timid, **{"privacy.epsilon": epsilon}))
        for epsilon in (1.0, 1e4, 1e4)
    )
    assert loose == again
    paths = [start.horizon * marks.step for start, marks in (tight[0], loose[0])]
    assert paths[0] < paths[1]
    assert np.mean(tight[1]) > np.mean(loose[1])


def test_steps_are_as_long_as_the_path_needs_whatever_the_learning_rate():
    """η and r act as r·η: of an η that is 16 times as large, r is 16 times as small."""
    found = []
    for eta in (0.25, 4.0):
        federation = make_federation(**{"local.learning_rate": eta})
        params = jax.tree.map(np.asarray, federation.model.draw_parameters(1))
        tank = federation.tank()
        measure, _ = forecast.prepare_forecast(
            federation, params, federation.held.validation, tank=tank, seed=1
        )
        found.append([measure((12, r / eta), 0) for r in (0.25, 1.0, 4.0)])
        (start, marks), _ = look_ahead(federation)
        found[-1].append(marks.step * eta * start.horizon)
    np.testing.assert_allclose(found[0], found[1], rtol=1e-5)


@pytest.mark.parametrize("metric", ["auroc", "auprc", None])
@pytest.mark.parametrize("rare", [1, 4])
def test_a_split_without_a_class_spoils_no_forecast(metric, rare):
    """An area that is not defined on a part of few rows is no sign that a candidate diverges."""
    x, _ = draw(240, 5)
    validation = x[:60], (np.arange(60) < rare).astype(int)
    rest = Given((x[120:], np.arange(120) % 2), validation, (x[60:120], np.zeros(60, int)))
    federation = build(plan(**FORECAST, metric=metric), data=rest, seed=1)
    assert federation.metric == (metric or "auroc")
    params = jax.tree.map(np.asarray, federation.model.draw_parameters(1))
    measure, most = forecast.prepare_forecast(
        federation, params, federation.held.validation, tank=federation.tank(), seed=1
    )
    assert np.isfinite([measure((12, 1.0), i) for i in range(most)]).all()


def test_a_run_keeps_the_horizon_and_resumes_with_it(tmp_path):
    """The horizon is in the checkpoint: a resumed run ends in the same model."""
    own, data = plan(**FORECAST), draw(240, 5)
    whole = simulate(own, data=data, seed=3)
    check_horizons(whole.record)

    def stop(done):
        if done.t == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        simulate(own, data=data, seed=3, out=tmp_path / "run", on_round=stop)
    again = resume(tmp_path / "run", data=data)
    assert again.rounds_used == whole.rounds_used
    assert again.record["result"]["forecast"] == whole.record["result"]["forecast"]
    for name, leaf in whole.params.items():
        np.testing.assert_array_equal(leaf, again.params[name])


def force_step(monkeypatch, step):
    monkeypatch.setattr(ForecastRounds, "choose", lambda *_, **__: (12, step))


@pytest.mark.parametrize("noise", ["simulated", "secure"])
def test_the_books_do_not_depend_on_the_step(monkeypatch, noise):
    """r multiplies what the server has received: σ, Δ and what is booked are the same."""
    told = []
    for step in (2.0, 8.0):
        force_step(monkeypatch, step)
        seed = 3 if noise == "simulated" else None
        own = plan(**FORECAST, **{"data.name": "digits", "data.samples": 40, "noise": noise})
        record = simulate(own, seed=seed).record
        assert record["result"]["forecast"] == {"rounds": 12, "step": step}
        assert f"steps are {step:g} times as long" in record["result"]["finish"]
        told.append(
            (record["guarantee"], record["clients"], [r["sigma"] for r in record["rounds"]])
        )
    assert told[0] == told[1]


@pytest.mark.parametrize("server", [{}, {"server.momentum": 0.5, "server.decay": "linear"}])
def test_a_step_acts_as_the_learning_rate(monkeypatch, server):
    """With η·r the same, runs end in the same model up to rounding, without an average too."""
    models = []
    for eta, step in ((0.5, 4.0), (2.0, 1.0), (8.0, 0.25)):
        force_step(monkeypatch, step)
        changes = FORECAST | {"server.average": None, "local.learning_rate": eta} | server
        models.append(simulate(plan(**changes), data=draw(240, 5), seed=3).params)
    for other in models[1:]:
        for name, leaf in models[0].items():
            np.testing.assert_allclose(leaf, other[name], rtol=2e-4, atol=2e-5)


def test_steps_of_the_users_are_not_scaled():
    """A transformation from Python has its own steps: T alone is forecast."""
    done = simulate(plan(**FORECAST), data=draw(240, 5), seed=3, optimizer=optax.adam(0.1))
    assert done.record["result"]["forecast"]["step"] == 1


@pytest.mark.slow
def test_a_federation_of_real_clients_forecasts_alike(tmp_path):
    done = go(Direct(clients(tmp_path)), tmp_path / "run", own=plan(**FORECAST))
    check_horizons(done.record)


@pytest.mark.parametrize("is_resumed", [False, True])
def test_it_holds_to_the_end_though_all_clients_hide_their_budgets(
    tmp_path, monkeypatch, is_resumed
):
    """T and r were announced: steps that change on the way would be another run's."""
    monkeypatch.setattr(ForecastRounds, "choose", lambda *_, **__: (6, 0.25))
    transport, out = Direct(clients(tmp_path)), tmp_path / "run"

    def hide(done):
        if done.t != 2:
            return
        for i, route in enumerate(transport.nodes):
            path = tmp_path / f"client-{i}.toml"
            told = path.read_text("utf-8").replace("[policy]", "[policy]\ndisclose = false")
            path.write_text(told, "utf-8")
            transport.nodes[route] = Node.load(path)

    def stop(done):
        hide(done)
        if done.t == 4:
            raise KeyboardInterrupt

    own = plan(**FORECAST | {"server.average": None})
    if is_resumed:
        with pytest.raises(KeyboardInterrupt):
            go(transport, out, own=own, on_round=stop)
        asked, transport = transport.requests, Direct(transport.nodes)
        transport.requests = asked
        done = go(transport, out, resume=True)
    else:
        done = go(transport, out, own=own, on_round=hide)
    assert done.record["plan"]["rounds"]["schedule"] == "forecast"
    assert done.record["result"]["forecast"] == {"rounds": 6, "step": 0.25}
    assert done.rounds_used == 6
    means, models = replayed(out), {}
    for requests in transport.requests:
        asked = Request.from_blob(next(iter(requests.values())))
        models[asked.round.t] = asked.params
    for t in range(5):
        for name, before in models[t].items():
            moved = before + 0.25 * (means[t][name] - before)
            np.testing.assert_allclose(models[t + 1][name], moved, atol=1e-5)


def test_test_rows_choose_no_rounds():
    """Without validation rows the test rows would choose T and r, and then praise the choice."""
    own = plan(**FORECAST, **{"data.validation": 0, "data.test": 60})
    assert build(own, data=Given(draw(240, 5)), seed=1).plan.rounds.schedule == "discounted"


def test_labels_of_test_rows_do_not_choose_what_is_forecast(monkeypatch):
    """The metric that heads the result may follow from them, the choice of T and r may not."""
    asked, compile_pair = set(), forecast._train_pair.lower
    found = SimpleNamespace(lower=lambda *all: asked.add(all[2]) or compile_pair(*all))
    monkeypatch.setattr(forecast, "_train_pair", found)
    x, y = draw(200, 7)
    headed = set()
    for labels in (y, np.zeros_like(y)):
        pairs = Given(draw(240, 5), draw(60, 6), (x, labels))
        federation = build(plan(**FORECAST), data=pairs, seed=1)
        headed.add(federation.metric)
        tank, params = federation.tank(), federation.model.draw_parameters(1)
        public = federation.held.validation
        forecast.prepare_forecast(federation, params, public, tank=tank, seed=1)
    assert asked == {"accuracy"}
    assert headed == {"accuracy", "balanced_accuracy"}


def test_what_it_cannot_do_is_refused_or_discounted_in_a_sentence(caplog):
    with pytest.raises(PlanError, match="never looks at; choose public, or discounted"):
        plan(**FORECAST, **{"server.signal": "clients"})
    few = plan(**FORECAST, **{"data.validation": 20})
    done = simulate(few, data=draw(240, 5), seed=1)
    assert done.record["plan"]["rounds"]["schedule"] == "discounted"
    assert "forecast" not in done.record["result"]
    (said,) = {record.getMessage() for record in caplog.records}
    assert "becomes discounted: it needs 40 public rows" in said


def test_the_noise_of_every_round_is_that_of_the_run():
    """For a cohort of all clients; and the budget is spent to the end."""
    federation = make_federation()
    schedule = federation.schedule
    state = rounds.make_first_state(federation, 1.0, 0.5, 1.0, progress=Progress(0, 12))
    paid = []
    while schedule.round(state.progress) is not None:
        prepared = rounds.prepare_round(federation, state, 1)
        paid.append(prepared.std)
        progress = schedule.advance(state.progress, 0.0)
        state = replace(state, tank=prepared.tank, progress=progress)
    assert paid == pytest.approx([forecast.compute_noise(federation, federation.tank(), 12)] * 12)
    assert np.all(state.tank.left_fraction < 1e-9)


def test_choose_finds_the_least_mean_in_spite_of_noise():
    """Most forecasts go to the best: a lead that one of them would miss is found by many.

    Candidates differ by their path alone, log₂ of which the forecasts tell up to noise of 0.5.
    """
    schedule, missed = ForecastRounds(400), []
    for seed in range(100):
        rng = np.random.default_rng(seed)
        best, asked = rng.uniform(2, 9), []

        def measure(candidate, i, best=best, rng=rng, asked=asked):
            asked.append((candidate, i))
            return abs(np.log2(candidate[0] * candidate[1]) - best) + rng.normal(0, 0.5)

        T, r = schedule.choose(measure, 8)
        missed.append(abs(np.log2(T * r) - best))
        near = [known for known in asked if known not in [(200, first) for first in FIRST_STEPS]]
        assert len(set(near)) >= len(near) - 7  # none is measured twice, but for the first seven
        assert len(asked) <= 7 + 18 + 9 + 2 * 5 + 4 * 3  # instead of 7 · 15 · 8
    assert np.median(missed) < 0.3
    assert np.mean(missed) < 0.5


@given(path=st.floats(1, 5000), rounds=st.integers(13, 500))
def test_choose_finds_a_path_wherever_it_is(path, rounds):
    schedule = ForecastRounds(rounds)

    def measure(candidate, _):
        return abs(np.log2(candidate[0] * candidate[1] / path))

    T, r = schedule.choose(measure, 4)
    assert measure((T, r), 0) <= 0.51 or not rounds / 2 / 128 <= path <= rounds / 2 * 128
    every = schedule.choose(measure, 4, is_step_free=False)
    assert every == min(((T, 1.0) for T in schedule.lengths), key=lambda one: measure(one, 0))


@given(rounds=st.integers(1, 500), path=st.floats(0.01, 1e4))
def test_no_candidate_lengthens_a_run(rounds, path):
    """T never exceeds T₀, which any client's policy can bound."""
    schedule = ForecastRounds(rounds)
    assert min(FEWEST, rounds) == schedule.lengths[0]
    assert schedule.lengths[-1] == rounds
    assert all(T in schedule.lengths for T, _ in schedule.list_near(path))


def test_choose_takes_a_diverged_forecast_for_the_worst():
    schedule = ForecastRounds(100)
    assert schedule.choose(lambda *_: np.nan, 8) in schedule.list_near(50 / 64)
    told = {(50, 1.0): 0.5, (35, 2.0): 0.4, (71, 1.0): np.inf}
    assert schedule.choose(lambda candidate, _: told.get(candidate, np.nan), 8) == (35, 2.0)
    assert ForecastRounds(5).lengths == (5,)
    alone = ForecastRounds(5).choose(lambda *_: pytest.fail("no choice"), 8, is_step_free=False)
    assert alone == (5, 1.0)
    assert Plan(rounds={"schedule": "forecast"}).rounds.build() == ForecastRounds(120)
