"""Gradient histograms and a softmax layer on MNIST: what docs/frontier.md says, run again.

U = K = 50, n = 800, exact calibration, δ = 1e-3, the 10,000 test pictures, plan and settings of
examples/hog_mnist.py. Means of five seeds on an accelerator, of one on a CPU. The allowance of half
a point is for what seeds and machines differ by.
"""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import jax
import numpy as np
import pytest

from sottovoce.simulation.many import simulate_many

EXAMPLE = Path(__file__).parent.parent / "examples" / "hog_mnist.py"
MEASURED = {1.0: 0.9593, 2.0: 0.9666, 4.0: 0.9699, 8.0: 0.9707}
SEEDS = range(1, 2) if jax.default_backend() == "cpu" else range(1, 6)


def example():
    """The script, as a module."""
    made = importlib.util.spec_from_file_location("hog_mnist", EXAMPLE)
    module = importlib.util.module_from_spec(made)
    made.loader.exec_module(module)
    return module


def test_the_accuracy_of_the_frontier_page(record_property):
    if not os.environ.get("SOTTOVOCE_DATA"):
        pytest.skip("SOTTOVOCE_DATA is not set: MNIST is needed")
    script = example()
    record_property("size", f"{len(MEASURED)} budgets, {len(SEEDS)} seeds")
    plans = [script.setting(epsilon, *script.CHOSEN[epsilon]) for epsilon in MEASURED]
    runs = simulate_many(plans, seeds=list(SEEDS))
    for i, (epsilon, wanted) in enumerate(MEASURED.items()):
        own = runs[i * len(SEEDS) : (i + 1) * len(SEEDS)]
        assert np.mean([run.accuracy for run in own]) == pytest.approx(wanted, abs=0.005)
        told = own[0].record["guarantee"]
        assert (told["epsilon"], told["delta"], told["unit"]) == (epsilon, 1e-3, "record")
        assert "median-clip" not in told["not_covered"]
