"""The vault at length: 10,000 kills, 2,000 power cuts, 1,000 kinds of damage (`make trust`)."""

from __future__ import annotations

from collections import Counter

import pytest

from support.vault_damage import damage_and_look
from support.vault_kills import killed, outcomes, shim  # noqa: F401
from support.vault_power import record


@pytest.mark.parametrize("seed", range(10))
def test_ten_thousand_kills(tmp_path, seed):
    told = killed(tmp_path, kills=1_000, seed=100 + seed)
    print(f"\n{told}")
    assert told["said"] == ""
    assert told["steps not reached"] == []
    assert set(told["deaths"]) <= {"killed", "exit 0"}
    assert told["rounds with two answers"] == 0
    assert told["answers that are not stored"] == 0
    assert told["uploads dropped"] > 0
    assert told["dropped too early"] == 0
    assert told["debited"] >= told["released"] > 0


def test_two_thousand_power_cuts(tmp_path, shim):  # noqa: F811
    seen: Counter[str] = Counter()
    for seed in range(4):
        log = record(tmp_path / f"disk-{seed}", shim, rounds=8)
        seen += outcomes(tmp_path / f"disk-{seed}", log, count=500, seed=seed)
    print(f"\n{dict(seen)}")
    assert sum(seen.values()) == 2_000


def test_a_thousand_damages(tmp_path):
    seen = damage_and_look(tmp_path, trials=1_000, seed=7)
    print(f"\n{dict(seen)}")
    assert sum(seen.values()) == 1_000
