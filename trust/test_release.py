"""Twenty thousand attempts to move a sum further than its sensitivity (`make trust`, 3 minutes)."""

from __future__ import annotations

import numpy as np
import pytest
from neighbours import MODELS, falsify

PAIRS = 4000  # a model: 20,000 in all


@pytest.mark.parametrize("name", MODELS)
def test_neighbours_are_never_further_apart_than_the_sensitivity(name, record_property):
    moved = np.array(falsify(name, PAIRS))
    record_property("size", f"{len(moved):,} pairs, {moved.max():.6f} Δ")
    assert len(moved) >= PAIRS
    assert np.mean(moved > 0.1) > 0.05  # and not because nothing ever moved
