"""Budgets refuse nonsense; guarantees say all they must."""

from __future__ import annotations

import json
import math
import re

import numpy as np
import pytest

from sottovoce.errors import InputError
from sottovoce.privacy.budget import ALWAYS_NOT_COVERED, NOT_COVERED, Budget, Guarantee


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
    for code in ALWAYS_NOT_COVERED:
        assert NOT_COVERED[code] in guarantee.text
    assert json.loads(json.dumps(guarantee.to_json())) == guarantee.to_json()
    assert " ".join(str(guarantee).split()) == guarantee.text


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
    with pytest.raises(InputError, match="unit must be record or client"):
        Guarantee(budget, unit="user", calibration="exact")
    with pytest.raises(InputError, match="calibration must be"):
        Guarantee(budget, unit="record", calibration="rdp")
    with pytest.raises(InputError, match="not_covered must be"):
        Guarantee(budget, unit="record", calibration="exact", not_covered=("weather",))
