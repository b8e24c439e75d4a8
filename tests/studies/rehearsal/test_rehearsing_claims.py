"""What a rehearsal says of itself: its cost, what it predicts, and of which rows."""

from __future__ import annotations

import hashlib
import html
import json
from dataclasses import replace
from importlib import resources
from types import SimpleNamespace

import jsonschema
import numpy as np
import pytest

from sottovoce import Plan, rehearse
from sottovoce.errors import InputError
from sottovoce.privacy import calibration
from sottovoce.server.federation import build
from sottovoce.studies.paper import definition as experiments
from sottovoce.studies.rehearsal import rehearsing, search
from sottovoce.studies.rehearsal.rehearsing import (
    Prediction,
    Rehearsal,
    count_test_rows,
    format_summary,
    predict_run,
    render_rehearsal,
)
from sottovoce.studies.rehearsal.search import NOISE, WITHOUT, Trial, Trials
from sottovoce.studies.rehearsal.space import RATE, ROUNDS, build_space
from sottovoce.studies.rehearsal.standin import (
    StandIn,
    announce_federation,
    fit_plan,
    make_stand_in,
)

COLUMNS = {"age": [0, 99], "sex": ["f", "m"], "rich": ["no", "yes"]}
TABLE = {"path": "people.csv", "label": "rich", "columns": COLUMNS}
MNIST = {"name": "mnist", "clients": 5, "samples": 60}


def pictures(rows: int = 500) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(1)
    return rng.random((rows, 14, 14)).astype(np.float32), np.arange(rows) % 10


def made(plan: Plan, rows: StandIn, **changes) -> Rehearsal:
    """A rehearsal that kept the plan: five made-up runs beside it, all else as `rehearse` does."""
    space = build_space(plan)
    start = space.read_plan()
    own = [Trial("as planned", start, 1, 0.5, 0.8, 0.8, 30, 0.1)]
    own += [Trial("prediction", start, 51 + i, 0.5, 0.8, 0.8 + i / 99, 30, 0.1) for i in range(5)]
    values = {
        "plan": plan,
        "given": plan,
        "space": space,
        "setting": start,
        "rows": rows,
        "factor": 1.0,
        "prediction": predict_run(own[1:], rows.telling, 1000),
        "reasons": rehearsing.explain_choices(space, start, own, (1,)),
        "theory": None,
        "trials": tuple(own),
        "seeds": (1,),
        "complete": True,
        "seed": 0,
    }
    return Rehearsal(**values | changes)


def said(result: Rehearsal, folder) -> list[str]:
    """Everywhere that a person reads what a rehearsal says, in one line each."""
    page = html.unescape(render_rehearsal(result))
    told = [format_summary(result, folder), result.to_toml().replace("# ", " "), page]
    return [" ".join(text.split()) for text in told]


def valid(result: Rehearsal) -> dict:
    told = json.loads(json.dumps(result.to_json(), allow_nan=False))
    schema = resources.files("sottovoce").joinpath("schemas/rehearsal.json").read_text("utf-8")
    jsonschema.validate(told, json.loads(schema))
    return told


# --- what it cost -----------------------------------------------------------------------------


def test_on_the_plans_own_rows_a_rehearsal_is_a_demonstration_and_claims_nothing(tmp_path):
    plan = Plan()
    result = made(plan, make_stand_in(plan, announce_federation(plan)))
    for text in said(result, tmp_path):
        assert "a demonstration: these are the plan's own rows, which are public" in text
        for claim in ("no private row", "any private row", "no row of a client", "privacy spent"):
            assert claim not in text, claim
    assert valid(result)["privacy_cost"]["mu2"] is None


@pytest.mark.parametrize("given", ["rows.npz", "arrays"])
def test_that_rows_are_public_is_the_users_word(given, tmp_path):
    """A copy of private rows cannot be told from public ones: the claim says on what it rests."""
    x, y = pictures()
    np.savez(tmp_path / "rows.npz", x=x, y=y)
    plan = Plan(data=MNIST)
    public = (x, y) if given == "arrays" else str(tmp_path / "rows.npz")
    result = made(plan, make_stand_in(plan, announce_federation(plan), public))
    name = "rows.npz" if given == "rows.npz" else "what was given from Python"
    for text in said(result, tmp_path):
        assert f"provided that {name} is public: you say so, sottovoce cannot check" in text
        assert "any private row" not in text
    told = valid(result)
    assert told["privacy_cost"]["provided"] == f"{name} is public"
    assert told["stand_in"]["fingerprint"] == result.rows.fingerprint()


def test_rows_that_are_made_up_or_published_cost_nothing(tmp_path):
    plan = Plan(data=MNIST)
    result = made(plan, make_stand_in(plan, announce_federation(plan)))
    assert valid(result)["privacy_cost"]["mu2"] == 0
    assert valid(result)["privacy_cost"]["provided"] is None
    for text in said(result, tmp_path):
        assert "provided that" not in text
    digits = make_stand_in(plan, announce_federation(plan), "digits")
    assert digits.cost == result.rows.cost


# --- what it may choose -----------------------------------------------------------------------


def test_no_schedule_is_offered_that_would_be_steered_by_the_test_rows():
    own = MNIST | {"validation": 0}
    fixed = Plan(data=own, rounds={"schedule": "fixed", "rounds": 20})
    options = build_space(fixed).find_fork("rounds.schedule").options
    assert not [name for name in options if name.startswith("discounted")]
    assert "growing shares, g = 1" in options
    steered = (
        build_space(fixed.replace(**{"data.validation": 100})).find_fork("rounds.schedule").options
    )
    assert [name for name in steered if name.startswith("discounted")]
    asked = Plan(data=own, rounds={"schedule": "discounted", "rounds": 20, "beta": 0.5})
    assert "discounted, β = 0.9" in build_space(asked).find_fork("rounds.schedule").options


# --- the noise and the rows of the real federation --------------------------------------------


@pytest.mark.parametrize("parts", [{}, {"validation": 50, "test": 0.2}, {"test": "other.csv"}])
def test_clients_of_a_column_train_on_what_validation_and_test_leave(parts, tmp_path, monkeypatch):
    """σ of the rehearsed federation is that of the real one, built from a table."""
    monkeypatch.chdir(tmp_path)
    lines = [
        f"{i % 90},{'fm'[i % 2]},{('no', 'yes')[i // 2 % 2]},{'abcde'[i % 5]}" for i in range(500)
    ]
    for name in ("people.csv", "other.csv"):
        (tmp_path / name).write_text("age,sex,rich,who\n" + "\n".join(lines), "utf-8")
    plan = Plan(data=TABLE | {"client": "who"} | parts, privacy={"epsilon": 4, "delta": 1e-3})
    real = build(plan, seed=1)
    here = announce_federation(plan, clients=5, samples=100)
    assert sum(here) == pytest.approx(int(real.samples.sum()), abs=5)
    for rows in (sum(here), 150):
        small, _ = fit_plan(plan, here, rows)
        worth = small.budgets()[0]
        own = small.recipe().sensitivity(np.array(small.data.samples))
        noise = own / np.sqrt(calibration.capacity(worth, 1e-3, calibration="exact"))
        wanted = real.sensitivity / np.sqrt(real.capacity)
        np.testing.assert_allclose(noise.mean(), wanted.mean(), rtol=0.015)


@pytest.mark.parametrize(
    ("data", "given", "tested"),
    [
        ({"clients": 5, "samples": 80}, {}, 50),  # 400 rows are what 0.1 and 0.1 leave of 500
        ({"client": "who"}, {"clients": 5, "samples": 100}, 50),
        ({"clients": 5, "samples": 80, "test": 70}, {}, 70),
        ({"clients": 5, "samples": 80, "test": "other.csv"}, {}, None),
    ],
)
def test_the_range_counts_the_plans_own_test_rows(data, given, tested):
    plan = Plan(data=TABLE | data)
    assert count_test_rows(plan, announce_federation(plan, **given)) == tested


def test_a_test_file_is_left_out_of_the_range_and_that_is_said(tmp_path):
    own = [Trial("", {}, s, 1.0, 0.9, a, 9, 0.1) for s, a in enumerate((0.9, 0.901, 0.899))]
    without, few = predict_run(own, 1000, None), predict_run(own, 1000, 100)
    assert without.high - without.low < few.high - few.low
    assert without.tested is None
    plan = Plan(data=MNIST)
    rows = make_stand_in(plan, announce_federation(plan))
    for text in said(made(plan, rows, prediction=without), tmp_path):
        assert "does not include the chance of its test rows" in text
    for text in said(made(plan, rows, prediction=few), tmp_path):
        assert "leaves out" not in text


# --- pictures ---------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [np.uint8, np.int64])
def test_whole_number_pictures_are_brought_to_the_scale_of_named_ones(kind):
    x, y = pictures()
    plan = Plan(data=MNIST)
    small = make_stand_in(plan, announce_federation(plan), (x, y))
    large = make_stand_in(plan, announce_federation(plan), (np.round(x * 255).astype(kind), y))
    np.testing.assert_allclose(large.train[0], small.train[0], atol=0.003)


@pytest.mark.parametrize(
    "scale", [lambda x: x * 255, lambda x: x - 0.5, lambda x: (x * 16).astype(np.uint8)]
)
def test_pictures_on_another_scale_are_refused_in_one_sentence(scale):
    x, y = pictures()
    plan = Plan(data=MNIST)
    with pytest.raises(InputError, match="whole numbers from 0 to 255, or numbers from 0 to 1"):
        make_stand_in(plan, announce_federation(plan), (scale(x), y))
    arrays = Plan(data={"name": "arrays", "clients": 5, "samples": 60})  # on their own scale
    assert make_stand_in(arrays, announce_federation(arrays), (scale(x), y)).train[0].std() > 0.2


# --- what is told of the choice ---------------------------------------------------------------


def test_of_synthetic_rows_the_budgets_cost_is_told_and_no_range(tmp_path):
    plan = Plan(data=TABLE | {"clients": 5, "samples": 60}, model={"name": "softmax"})
    start = build_space(plan).read_plan()
    pairs = [(51 + i, 0.80 + i / 100, 0.83 + i / 100) for i in range(5)]
    own = [Trial("prediction", start, s, 0.5, a, a, 30, 0.1) for s, a, _ in pairs]
    bare = [Trial("without noise", start, s, 0.5, b, b, 30, 0.1) for s, _, b in pairs]
    found = predict_run(own, 400, 75, bare)
    assert found.lost == pytest.approx(0.03)
    assert found.lost_deviation == pytest.approx(0.0, abs=1e-12)
    result = made(plan, make_stand_in(plan, announce_federation(plan)), prediction=found)
    for text in said(result, tmp_path):
        assert "budget costs 3.0" in text
        assert "on the stand-in" in text.lower()
        assert "95 % of runs" not in text
        assert "redicted" not in text
    told = valid(result)["prediction"]
    assert told["low"] is None
    assert told["without_noise"]["lost"] == pytest.approx(0.03)


def test_a_federation_without_noise_is_the_same_but_for_the_noise(tmp_path):
    plan = Plan(data=TABLE | {"clients": 5, "samples": 60}, model={"name": "softmax"})
    rows = make_stand_in(plan, announce_federation(plan))
    stage, _ = fit_plan(plan, announce_federation(plan), len(rows.train[1]))
    trials = Trials(build_space(plan), stage, rows, limit=10)
    start = build_space(plan).read_plan()
    one, other = (trials._apply_setting(s) for s in (start, {**start, NOISE: WITHOUT}))
    assert other.replace(**{"privacy.epsilon": one.privacy.epsilon}) == one
    noise = calibration.capacity(other.privacy.epsilon, 1e-5, calibration="exact") ** -0.5
    assert noise < 1e-3  # of Δ√T: less than the gradients' own chance


def test_means_of_all_seeds_are_compared_with_means_and_the_first_seed_with_the_first():
    plan = Plan()
    space = build_space(plan, ["model", "server", "rounds.schedule", "local"])
    chosen, final, other = ({ROUNDS: T} for T in (160.0, 80.0, 40.0))
    seen = [(chosen, (0.70, 0.90)), (final, (0.84, 0.74)), (other, (0.75,))]
    own = [
        Trial("", s, seed, 0.5, a, a, 9, 0.1)
        for s, accuracies in seen
        for seed, a in enumerate(accuracies, 1)
    ]
    told = rehearsing.explain_choices(space, chosen, own, (1, 2))[ROUNDS]
    assert "mean of 2 seeds: 160: 80.0 %, 80: 79.0 %" in told
    assert "first seed: 160: 70.0 %, 80: 84.0 %, 40: 75.0 %" in told
    for seeds in ((1,), (1, 2)):
        alone = rehearsing.explain_choices(space, chosen, own[:2], seeds)[ROUNDS]
        assert "no other value was tried" in alone


def test_values_that_were_tried_with_other_keys_changed_too_are_told():
    """A short search changes T and η together: both were compared, and the reasons say so."""
    space = build_space(Plan(), ["model", "server", "rounds.schedule", "local.clip"])
    seen = [((160.0, 2.0), 0.70), ((40.0, 8.0), 0.60), ((10.0, 8.0), 0.65)]
    own = [Trial("", {ROUNDS: T, RATE: eta}, 1, 0.5, a, a, 9, 0.1) for (T, eta), a in seen]
    told = rehearsing.explain_choices(space, own[0].setting, own, (1,))
    assert "first seed, beside other changes" in told[ROUNDS]
    assert "1 seeds" not in told[ROUNDS]
    assert "160: 70.0 %, 10: 65.0 %, 40: 60.0 %" in told[ROUNDS]
    assert "2: 70.0 %, 8: 65.0 %)" in told[RATE]
    assert "no other value" not in told[ROUNDS] + told[RATE]


def test_the_choice_and_the_plan_as_given_are_compared_on_the_same_rows_and_seeds(tmp_path):
    plan = Plan(data=MNIST)
    result = made(plan, make_stand_in(plan, announce_federation(plan)))
    given, other = result.setting, result.setting | {ROUNDS: 7.0}
    trials = [
        Trial("", setting, seed, 0.5, value, 0.99, 30, 0.1)
        for setting, values in ((given, (0.60, 0.80)), (other, (0.70, 0.84, 0.20)))
        for seed, value in enumerate(values, 1)
    ]
    result = replace(result, setting=other, seeds=(1, 2, 3), trials=tuple(trials))
    for text in said(result, tmp_path)[::2]:
        of = "as chosen and as given, on the rows that chose (2 seeds, the same for both)"
        assert of in text
        assert "77.0 % and 70.0 %" in text


def test_rounds_that_are_done_are_told_where_the_schedule_plans_more(tmp_path):
    plan = Plan(data=MNIST, rounds={"schedule": "decaying", "rounds": 60, "slope": 0.01})
    result = made(plan, make_stand_in(plan, announce_federation(plan)))  # its runs did 30 rounds
    short, plan_toml, page = said(result, tmp_path)
    assert "60 at most, about 30 done" in short
    assert "60 at most, about 30 done" in plan_toml
    assert "<dt>rounds done, rehearsed (T₀ = 60)</dt><dd>30</dd>" in page


def test_the_rows_that_choose_say_what_they_cannot_tell_apart(tmp_path):
    plan = Plan(data=MNIST)
    rows = make_stand_in(plan, announce_federation(plan))
    result = made(plan, rows)
    beside = [
        replace(result.trials[0], setting=result.setting | {ROUNDS: T}, accuracy=accuracy)
        for T, accuracy in ((7.0, 0.79), (9.0, 0.60))
    ]
    near = replace(result, trials=(*result.trials, *beside))
    assert near.chance == pytest.approx((0.8 * 0.2 / rows.choosing) ** 0.5)
    for text in said(near, tmp_path)[::2]:
        assert "more than the 1.0 points between the best two settings" in text
    far = replace(result, trials=(*result.trials, beside[1]))
    for text in said(far, tmp_path)[::2]:
        assert "either may be the better one" not in text
        assert f"{rows.choosing} rows chose" in text
    assert valid(far)["chosen"]["standard_error"] == far.chance
    better = replace(result.trials[0], setting=result.setting | {ROUNDS: 5.0}, accuracy=0.82)
    stopped = replace(result, trials=(*result.trials, better))
    assert "synthetic" not in stopped.describe_doubt()
    assert "no finalist reached 2.0 points more with the same seeds" in stopped.describe_doubt()


def test_of_few_public_rows_a_fifth_chooses():
    plan = Plan(data=MNIST)
    for rows, judges in ((500, 100), (1990, 398), (3000, 300)):
        found = make_stand_in(plan, announce_federation(plan), pictures(rows))
        assert len(found.validation[1]) == len(found.test[1]) == judges


# --- the clock, and who ran it ----------------------------------------------------------------


@pytest.fixture
def clock(monkeypatch):
    """Federations that take a second each of a clock that only they move, and learn nothing."""
    now = [0.0]

    def each(plans, *, seeds, **_):
        for i in range(len(plans) * len(seeds)):
            now[0] += 1.0
            result = {"headline": {"metric": "accuracy"}}
            record = {"seed": seeds[i % len(seeds)], "result": result}
            yield (
                i,
                SimpleNamespace(
                    record=record, accuracy=0.8, rounds_used=9, model=None, params=None
                ),
            )

    monkeypatch.setattr(search, "simulate_each", each)
    monkeypatch.setattr(search, "score_model", lambda *_: (0.5, 0.8))
    monkeypatch.setattr(search, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(Trials, "estimate_theory", lambda *_: now.__setitem__(0, now[0] + 6.0))
    return now


def test_the_minutes_hold_with_what_is_promised_at_the_end(clock):
    plan = Plan(data=TABLE | {"clients": 5, "samples": 60}, model={"name": "softmax"})
    left = []
    found = rehearse(
        plan,
        minutes=1,
        runs=1000,
        on_trial=lambda t: left.append(t.estimate_seconds_left() + clock[0]),
    )
    assert 55 <= clock[0] <= 60
    assert {t.stage for t in found.trials} >= {"finalists", "prediction", "without noise"}
    assert all(ends >= clock[0] - 1 for ends in left[1:])  # "at most" is that, to one federation


def test_something_is_told_before_the_first_federation(clock):
    ran = []
    rehearse(Plan(), minutes=1e-6, on_trial=lambda t: ran.append((t.ran, clock[0])))
    assert ran[:2] == [(0, 0.0), (1, 1.0)]


def test_sittings_of_another_version_are_told(clock, tmp_path, monkeypatch):
    plan = Plan(data=TABLE | {"clients": 5, "samples": 60}, model={"name": "softmax"})
    alone = rehearse(plan, runs=40, out=tmp_path / "out")
    assert alone.mixed is None
    again = rehearse(plan, runs=40, out=tmp_path / "out", resume=True)
    assert again.mixed is None
    monkeypatch.setattr(rehearsing, "__version__", "9.9")
    for _ in range(2):  # also when the last sitting is no longer the first one to differ
        mixed = rehearse(plan, runs=40, out=tmp_path / "out", resume=True)
        assert "mixes federations run by sottovoce" in mixed.mixed
        assert "9.9 on cpu" in mixed.mixed
    for text in said(mixed, tmp_path)[::2]:
        assert mixed.mixed in text
    assert len(valid(mixed)["sittings"]) == 2
    lines = (tmp_path / "out" / "runs.jsonl").read_text("utf-8").splitlines()
    assert sum("9.9" in line for line in lines) == 1


@pytest.mark.parametrize("key", ["epsilon", "delta"])
def test_a_list_of_budgets_for_other_clients_is_refused_in_one_sentence(key):
    plan = Plan(data=TABLE | {"client": "who"}, privacy={key: [0.1, 0.2, 0.3]})
    with pytest.raises(InputError, match=f"privacy.{key} is a list of 3 and --clients is 5"):
        announce_federation(plan, clients=5, samples=20)


# --- the space --------------------------------------------------------------------------------


def test_what_the_server_does_can_also_be_left_out():
    own = {"average": "tail", "decay": "cosine", "momentum": 0.9}
    space = build_space(Plan(data=MNIST, server=own))
    for key in own:
        assert "none" in space.find_fork(f"server.{key}").options
        bare = space.apply_setting({**space.read_plan(), f"server.{key}": "none"})
        assert getattr(bare.server, key) is None
    assert "none" not in build_space(Plan(data=MNIST)).find_fork("server.average").options


def test_a_plain_model_is_plain_also_where_the_plan_has_features():
    own = {"name": "softmax", "features": "hog", "cell": 4, "upright": True}
    space = build_space(Plan(data=MNIST, model=own))
    for name in ("softmax", "mlp"):
        plain = space.apply_setting({**space.read_plan(), "model": name}).model
        assert (plain.name, plain.features, plain.cell) == (name, None, None)
    assert "softmax on histograms" in space.find_fork("model").options


@pytest.mark.parametrize(
    ("setting", "digest"),
    [("mnist", "f21f566548ff0b7f"), ("census", "dee67edbc06f7dde"), ("cifar", "f21f566548ff0b7f")],
)
def test_the_papers_plans_are_searched_as_when_their_regret_was_measured(setting, digest):
    own = experiments.load_setting(setting)
    values = {**own.plan, **own.corrected, **experiments.load_methods()["crd"].plan}
    plan = Plan().replace(**values)
    space = build_space(plan, models=setting != "census")
    told = [[one.key, one.coarse, one.low, one.high] for one in space.ladders]
    told += [[f.key, [[name, o(120.0)] for name, o in f.options.items()]] for f in space.forks]
    text = json.dumps(told, sort_keys=True)
    assert hashlib.sha256(text.encode()).hexdigest().startswith(digest), text


def test_runs_without_noise_that_collapsed_are_no_negative_price():
    """Settings chosen for noise may suit no run without it: then nothing is said of a price."""
    told = Prediction((0.7, 0.8), 0.75, 0.07, None, None, 9.0, None, unnoised=(0.5, 0.6))
    assert told.lost < 0
    for words in (told.describe(), told.describe("short")):
        assert "-" not in words.replace("stand-in", "").replace("stand-in's", "")
        assert "cannot" in words
    assert "55.0 %, less than the 75.0 % with it" in told.describe()


@pytest.mark.parametrize("metric", ["accuracy", "auroc", "brier"])
@pytest.mark.parametrize("made_up", [False, True])
def test_what_is_predicted_is_the_metric_that_chose(metric, made_up, tmp_path):
    """Not the accuracy of the same runs, nowhere that a person or a program reads it."""
    gain = {} if metric == "accuracy" else {"metric": metric, "gain": 0.6}
    told = {} if metric == "accuracy" else {"test_gain": 0.625, "test_error": 0.01}
    plan = Plan(data=MNIST)
    space = build_space(plan)
    runs = [
        Trial("prediction", space.read_plan(), seed, 0.5, 0.9, 0.9, 30, 0.1, **gain, **told)
        for seed in (1, 51, 52, 53)
    ]
    prediction = predict_run(runs[1:], 1000, 1000, runs[1:] if made_up else None, 1000)
    result = made(
        plan,
        make_stand_in(plan, announce_federation(plan)),
        trials=tuple(runs),
        prediction=prediction,
        reasons=rehearsing.explain_choices(space, space.read_plan(), runs, (1,)),
    )
    wanted = {"accuracy": "90.0", "auroc": "AUROC 0.625", "brier": "1 − Brier score 0.625"}[metric]
    for text in said(result, tmp_path):
        assert wanted in text
        assert metric == "accuracy" or "90.0 %" not in text
    entry = valid(result)["prediction"]
    assert (entry["metric"], entry["mean"]) == (metric, 0.9 if metric == "accuracy" else 0.625)
    if not made_up:
        error = np.sqrt(0.9 * 0.1 / 1000) if metric == "accuracy" else 0.01
        assert entry["high"] - entry["mean"] == pytest.approx(1.96 * np.sqrt(2) * error)
