"""What a rehearsal says of itself: its cost, what it predicts, and of which rows."""

from __future__ import annotations

import html
import json
from importlib import resources

import jsonschema
import numpy as np
import pytest

from sottovoce import Plan
from sottovoce.errors import InputError
from sottovoce.federation import build
from sottovoce.privacy import calibration
from sottovoce.rehearsal import reasons
from sottovoce.rehearsal.cost import cost_of
from sottovoce.rehearsal.page import render
from sottovoce.rehearsal.prediction import predicted, rows_tested
from sottovoce.rehearsal.rehearsing import Rehearsal, summary
from sottovoce.rehearsal.scale import announced, fitted
from sottovoce.rehearsal.space import space_of
from sottovoce.rehearsal.standin import StandIn, stand_in
from sottovoce.rehearsal.trials import Trial

COLUMNS = {"age": [0, 99], "sex": ["f", "m"], "rich": ["no", "yes"]}
TABLE = {"path": "people.csv", "label": "rich", "columns": COLUMNS}
MNIST = {"name": "mnist", "clients": 5, "samples": 60}


def pictures(rows: int = 500) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(1)
    return rng.random((rows, 14, 14)).astype(np.float32), np.arange(rows) % 10


def made(plan: Plan, rows: StandIn, **changes) -> Rehearsal:
    """A rehearsal that kept the plan: five made-up runs beside it, all else as `rehearse` does."""
    space = space_of(plan)
    start = space.start()
    own = [Trial("as planned", start, 1, 0.5, 0.8, 0.8, 30, 0.1)]
    own += [Trial("prediction", start, 51 + i, 0.5, 0.8, 0.8 + i / 99, 30, 0.1) for i in range(5)]
    values = {
        "plan": plan,
        "given": plan,
        "space": space,
        "setting": start,
        "rows": rows,
        "factor": 1.0,
        "prediction": predicted(own[1:], rows.telling, 1000),
        "reasons": reasons.reasons(space, start, own, (1,)),
        "theory": None,
        "trials": tuple(own),
        "seeds": (1,),
        "complete": True,
        "seed": 0,
    }
    return Rehearsal(**values | changes)


def said(result: Rehearsal, folder) -> list[str]:
    """Everywhere that a person reads what a rehearsal says, in one line each."""
    page = html.unescape(render(result))
    told = [summary(result, folder), result.toml().replace("# ", " "), page]
    return [" ".join(text.split()) for text in told]


def valid(result: Rehearsal) -> dict:
    told = json.loads(json.dumps(result.to_json(), allow_nan=False))
    schema = resources.files("sottovoce").joinpath("schemas/rehearsal.json").read_text("utf-8")
    jsonschema.validate(told, json.loads(schema))
    return told


# --- what it cost -----------------------------------------------------------------------------


def test_on_the_plans_own_rows_a_rehearsal_is_a_demonstration_and_claims_nothing(tmp_path):
    plan = Plan()
    result = made(plan, stand_in(plan, announced(plan)))
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
    result = made(plan, stand_in(plan, announced(plan), public))
    name = "rows.npz" if given == "rows.npz" else "what was given from Python"
    for text in said(result, tmp_path):
        assert f"provided that {name} is public: you say so, sottovoce cannot check" in text
        assert "any private row" not in text
    told = valid(result)
    assert told["privacy_cost"]["provided"] == f"{name} is public"
    assert told["stand_in"]["fingerprint"] == result.rows.fingerprint()


def test_rows_that_are_made_up_or_published_cost_nothing(tmp_path):
    plan = Plan(data=MNIST)
    result = made(plan, stand_in(plan, announced(plan)))
    assert cost_of(result.rows).mu2 == 0
    assert valid(result)["privacy_cost"]["provided"] is None
    for text in said(result, tmp_path):
        assert "provided that" not in text
    digits = stand_in(plan, announced(plan), "digits")
    assert cost_of(digits) == cost_of(result.rows)


# --- what it may choose -----------------------------------------------------------------------


def test_no_schedule_is_offered_that_would_be_steered_by_the_test_rows():
    own = MNIST | {"validation": 0}
    fixed = Plan(data=own, rounds={"schedule": "fixed", "rounds": 20})
    options = space_of(fixed).fork("rounds.schedule").options
    assert not [name for name in options if name.startswith("discounted")]
    assert "growing shares, g = 1" in options
    steered = space_of(fixed.replace(**{"data.validation": 100})).fork("rounds.schedule").options
    assert [name for name in steered if name.startswith("discounted")]
    asked = Plan(data=own, rounds={"schedule": "discounted", "rounds": 20, "beta": 0.5})
    assert "discounted, β = 0.9" in space_of(asked).fork("rounds.schedule").options


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
    here = announced(plan, clients=5, samples=100)
    assert here.rows == pytest.approx(int(real.samples.sum()), abs=5)
    for rows in (here.rows, 150):
        small, _ = fitted(plan, here, rows)
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
    assert rows_tested(plan, announced(plan, **given)) == tested


def test_a_test_file_is_left_out_of_the_range_and_that_is_said(tmp_path):
    own = [Trial("", {}, s, 1.0, 0.9, a, 9, 0.1) for s, a in enumerate((0.9, 0.901, 0.899))]
    without, few = predicted(own, 1000, None), predicted(own, 1000, 100)
    assert without.high - without.low < few.high - few.low
    assert without.tested is None
    plan = Plan(data=MNIST)
    rows = stand_in(plan, announced(plan))
    for text in said(made(plan, rows, prediction=without), tmp_path):
        assert "leaves out the chance of its test rows" in text
    for text in said(made(plan, rows, prediction=few), tmp_path):
        assert "leaves out" not in text


# --- pictures ---------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [np.uint8, np.int64])
def test_whole_number_pictures_are_brought_to_the_scale_of_named_ones(kind):
    x, y = pictures()
    plan = Plan(data=MNIST)
    small = stand_in(plan, announced(plan), (x, y))
    large = stand_in(plan, announced(plan), (np.round(x * 255).astype(kind), y))
    np.testing.assert_allclose(large.train[0], small.train[0], atol=0.003)


@pytest.mark.parametrize(
    "scale", [lambda x: x * 255, lambda x: x - 0.5, lambda x: (x * 16).astype(np.uint8)]
)
def test_pictures_on_another_scale_are_refused_in_one_sentence(scale):
    x, y = pictures()
    plan = Plan(data=MNIST)
    with pytest.raises(InputError, match="whole numbers from 0 to 255, or numbers from 0 to 1"):
        stand_in(plan, announced(plan), (scale(x), y))
    arrays = Plan(data={"name": "arrays", "clients": 5, "samples": 60})  # on their own scale
    assert stand_in(arrays, announced(arrays), (scale(x), y)).train[0].std() > 0.2
