"""Budgets refuse nonsense; guarantees say all they must."""

from __future__ import annotations

import json
import math
import re

import numpy as np
import pytest

from sottovoce import Plan, simulate
from sottovoce.client.vault import Policy
from sottovoce.errors import InputError
from sottovoce.privacy.budget import (
    LOUD_NOISE,
    NOT_COVERED,
    Budget,
    Guarantee,
    advise,
    list_always_not_covered,
    weigh_noise,
)
from sottovoce.schedules.calibrate import (
    NO_NOISE,
    PARAMETERS,
    calibrate,
    format_expected,
    load_expected,
)
from sottovoce.server.federation import build
from support import ROOT


@pytest.mark.parametrize(
    "epsilon", [0, -1, math.nan, math.inf, -math.inf, "8", None, True, 1e-9, 10**400]
)
def test_a_bad_epsilon_is_refused_in_one_sentence(epsilon):
    with pytest.raises(InputError, match=r"^epsilon must be .*, got .*; \w") as caught:
        Budget(epsilon, 1e-5)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("delta", [0, -1e-5, 1, 1.5, 0.51, math.nan, math.inf, "x", None, False])
def test_a_bad_delta_is_refused_in_one_sentence(delta):
    with pytest.raises(InputError, match=r"^delta must be .*, got .*; \w"):
        Budget(8, delta)


@pytest.mark.parametrize("unit", ["record", "client"])
@pytest.mark.parametrize("calibration", ["exact", "zcdp", "paper"])
def test_a_guarantee_names_unit_adjacency_adversary_and_what_is_not_covered(unit, calibration):
    guarantee = Guarantee(Budget(3.5, 1e-6), unit=unit, calibration=calibration)
    for word in ("3.5", "1e-06", "replace-one", "server", "Not covered"):
        assert word in guarantee.text
    assert {"record": "one record", "client": "whole dataset"}[unit] in guarantee.text
    for code in list_always_not_covered(unit):
        assert NOT_COVERED[code] in guarantee.text
    assert json.loads(json.dumps(guarantee.to_json())) == guarantee.to_json()


@pytest.mark.parametrize(
    "guarantee",
    [
        Guarantee(Budget(3.5, 1e-6), unit="record", calibration="exact"),
        Guarantee(Budget(3.5, 1e-6), unit="client", calibration="paper", one_client=True),
        Guarantee(
            Budget(8, 1e-5),
            unit="person",
            calibration="zcdp",
            not_covered=tuple(NOT_COVERED),
            tightest=Budget(1, 1e-6),
            others=("exact",),
            corrupt=2,
            epsilon_alone=9.5,
        ),
    ],
)
def test_a_terminal_shows_every_word_of_a_promise_in_short_labelled_lines(guarantee):
    lines = str(guarantee).splitlines()
    assert max(map(len, lines)) <= 96
    labels = [line[:13].strip() for line in lines]
    names = ["promise", "budgets", "meaning", "adversary", "noise", "test rows", "not covered"]
    if guarantee.tightest is None:
        names.remove("budgets")
    assert [label for label in labels if label] == names
    promise, _, uncovered = guarantee.text.partition(" Not covered: ")
    start = labels.index("not covered")
    assert " ".join(" ".join(line[13:] for line in lines[:start]).split()) == promise
    listed = " ".join(" ".join(line[13:] for line in lines[start:]).split())
    assert listed == "- " + uncovered.removesuffix(".").replace("; ", " - ")


def test_the_promise_of_a_vault_speaks_of_its_client():
    promise = Policy(epsilon=8, delta=1e-5, clip=1.0, samples=100).guarantee()
    assert promise.text.startswith("This client's uploads are (8, 1e-05)-")


def test_what_is_printed_holds():
    rng = np.random.default_rng(0)
    for _ in range(500):
        budget = Budget(10 ** rng.uniform(-3, 3), 10 ** rng.uniform(-12, -0.31))
        text = Guarantee(budget, unit="record", calibration="exact").text
        epsilon, delta = re.search(r"\(([^,]+), ([^)]+)\)-differentially", text).groups()
        assert budget.epsilon <= float(epsilon) <= budget.epsilon * (1 + 1e-4)
        assert budget.delta <= float(delta) <= budget.delta * 1.02


@pytest.mark.parametrize("number", [np.int64(8), np.float32(8), np.float64(8), 8])
def test_numbers_of_any_kind_are_numbers(number):
    assert Budget(number, 1e-5).epsilon == 8.0
    assert type(Budget(number, 1e-5).epsilon) is float


def test_unknown_words_are_refused():
    budget = Budget(1, 1e-5)
    with pytest.raises(InputError, match="unit must be record or person or client"):
        Guarantee(budget, unit="user", calibration="exact")
    with pytest.raises(InputError, match="calibration must be"):
        Guarantee(budget, unit="record", calibration="rdp")
    with pytest.raises(InputError, match="not_covered must be"):
        Guarantee(budget, unit="record", calibration="exact", not_covered=("weather",))


# --- advice on a promise


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, []),
        ({"epsilon": 20.0}, []),
        ({"epsilon": 20.01}, ["epsilon = 20.01 is above 20"]),
        ({"delta": 1e-2}, []),
        ({"delta": 1.1e-2}, ["delta = 0.011 is above 0.01"]),
        ({"delta": 0.02}, ["delta = 0.02 should be below 1 / 50"]),
        ({"noise": 0.25}, []),
        ({"noise": 0.5}, ["the noise moves the model 0.5 times as far"]),
        (
            {"epsilon": 500.0, "delta": 0.1, "noise": 9.0},
            ["epsilon = 500", "delta = 0.1", "the noise"],
        ),
    ],
)
def test_advice_is_one_sentence_for_each_number_that_is_out_of_bounds(changes, said):
    asked = {"epsilon": 8.0, "delta": 1e-5, "units": 50, "noise": 0.1} | changes
    found = advise(
        asked["epsilon"], asked["delta"], asked["units"], unit="record", noise=asked["noise"],
        size=50,
    )  # fmt: skip
    assert len(found) == len(said)
    for line, words in zip(found, said, strict=True):
        assert line.startswith(words)
    assert all("\n" not in line and ";" in line for line in found)


def test_as_many_rows_or_clients_as_advised_need_no_advice():
    """Noise falls with 1/n for a record, and with 1/√U for a client's whole dataset."""
    for unit, power in (("record", 1.0), ("client", 0.5)):
        for size in (3, 50, 811):
            (line,) = advise(8.0, 1e-5, 1, unit=unit, noise=1.7, size=size)
            more = int(re.search(r"about ([\d,]+) ", line)[1].replace(",", ""))
            assert 1.7 * (size / more) ** power <= LOUD_NOISE < 1.7 * (size / (more - 1)) ** power


def test_the_weight_of_noise_is_how_far_it_moves_a_model():
    """Reference: the noise itself, drawn round by round; the norm of 400 draws is within 10 %."""
    rng = np.random.default_rng(1)
    sigma, rounds, per_round, parameters, step = 0.03, 20, 5, 400, 0.7
    drawn = rng.standard_normal((rounds, per_round, parameters)) * sigma
    moved = np.linalg.norm(drawn.mean(axis=1).sum(axis=0)) / (rounds * step)
    weight = weigh_noise(
        sigma, rounds=rounds, per_round=per_round, parameters=parameters, step=step
    )
    assert moved == pytest.approx(weight, rel=0.1)


def test_the_weight_of_noise_follows_from_rows_clients_parameters_and_budget():
    for rounds in (10, 120):
        answer = calibrate(
            epsilon=4, samples=200, clients=20, rounds=rounds, parameters=154, learning_rate=0.3
        )
        assert answer.noise == pytest.approx(2 * math.sqrt(154 / 20) / (200 * answer.mu), rel=1e-6)


def test_the_embedded_model_has_the_parameters_that_calibrate_assumes():
    run = simulate(Plan(rounds={"schedule": "fixed", "rounds": 1}), seed=1)
    assert run.record["model"]["parameters"] == PARAMETERS


def test_a_run_and_calibrate_weigh_the_noise_alike():
    plan = Plan(privacy={"epsilon": 1.0})
    (line,) = build(plan, seed=1).advise()
    assert line == calibrate(epsilon=1.0).advice[0]
    assert build(Plan(), seed=1).advise() == []


def test_where_noise_is_called_loud_the_measured_federations_learnt_little():
    """The bound is taken from results/expect.json: above it no census model kept half its gain."""
    measured = json.loads((ROOT / "results" / "expect.json").read_text("utf-8"))
    cells = {(c["data"], c["rows"], c["clients"], c["epsilon"]): c for c in measured["cells"]}
    loud = 0
    for place, cell in cells.items():
        best, base = cells[*place[:3], NO_NOISE]["accuracy"], measured["majority"][place[0]]
        kept = (cell["accuracy"] - base) / (best - base)
        if cell["noise"] > LOUD_NOISE and place[0] != "digits":
            assert kept < 0.5, cell
            loud += 1
        if cell["noise"] > 2 * LOUD_NOISE:
            assert kept < 0.6, cell
        if cell["noise"] < LOUD_NOISE / 10:
            assert kept > 0.8, cell
    assert loud >= 4
    packed = load_expected()
    kept_keys = packed["cells"][0]
    assert packed["cells"] == [{k: cell[k] for k in kept_keys} for cell in measured["cells"]]


def test_what_to_expect_names_the_nearest_federations():
    text = format_expected(calibrate(epsilon=4, samples=400, clients=5, parameters=120))
    assert "acs (51%)" in text
    assert (
        "Your federation (ε = 4, 400 rows, 5 clients, 120 parameters) has the noise ratio" in text
    )
    assert max(map(len, text.splitlines())) <= 100
