"""Clients and server of the sum view, killed with -9; `trust/test_sum_view.py` is longer."""

from __future__ import annotations

import pytest

from support.sum_kills import killed

pytestmark = pytest.mark.slow  # every message is answered by a process of its own


def test_kills_at_random_leave_budgets_and_inputs_safe():
    seen = killed(12, 1)
    assert seen["wrong"] == {}, seen
    assert seen["counted"]["killed"] >= 12


def test_a_client_that_does_not_book_what_holds_alone_is_noticed():
    """The harness can fail: the noise that left is worth more than the vault says."""
    seen = killed(1, 1, "", "forgetful")
    assert "more left than both accounts say" in seen["wrong"], seen
