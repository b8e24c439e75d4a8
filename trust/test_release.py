"""25,000 attempts to move a sum further than its sensitivity (`make trust`)."""

from __future__ import annotations

import numpy as np
import pytest

from support.neighbours import EVERY, falsify

PAIRS = {name: 1000 if name == "torch" else 4000 for name in EVERY}  # 25,000 in all


@pytest.mark.parametrize("name", EVERY)
def test_neighbours_are_never_further_apart_than_the_sensitivity(name, record_property):
    moved = np.array(falsify(name, PAIRS[name]))
    record_property("size", f"{len(moved):,} pairs, {moved.max():.6f} Δ")
    assert len(moved) >= PAIRS[name]
    assert np.mean(moved > 0.1) > 0.05  # and not because nothing ever moved
