"""kill -9 of a client's machine: debited ≥ released, one answer a round, and it goes on by itself.

The lives and deaths are in `device_kills.py`, a process of its own; `trust/` has more of them.
"""

from __future__ import annotations

import pytest

from support.device_kills import MOMENTS, killed


@pytest.mark.slow
def test_200_kills_at_any_moment_and_at_every_named_step_leave_the_books_right():
    seen = killed(200, seed=2)
    assert seen["wrong"] == {}
    counted = seen["counted"]
    assert min(counted[step] for step in MOMENTS) >= 3
    assert counted["at any moment"] >= 60
    assert counted["answers"] >= 200
    assert counted["vaults"] >= 2  # the others were used up


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mutant", "sign"),
    [
        ("ledger after send", "released more than was debited"),
        ("refund on timeout", "released more than was debited"),
        ("nothing stored", "a round has two answers"),
    ],
)
def test_a_device_in_the_wrong_order_is_caught(mutant, sign):
    seen = killed(25, seed=3, mutant=mutant)
    assert seen["wrong"].get(sign, 0) > 0, seen
