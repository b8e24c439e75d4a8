"""docs/performance.md shows what was measured: its tables are those of results/bench."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

ROOT = Path(__file__).parent.parent


def script(name: str):
    """A script of benchmarks/ as a module."""
    made = importlib.util.spec_from_file_location(name, ROOT / "benchmarks" / f"{name}.py")
    module = importlib.util.module_from_spec(made)
    made.loader.exec_module(module)
    return module


def test_the_page_shows_what_was_measured():
    """`python benchmarks/pages.py` would change nothing."""
    text = (ROOT / "docs" / "performance.md").read_text("utf-8")
    pages = script("pages")
    assert pages.made_anew(text) == text
    assert all(f"<!-- {name}: begin -->" in text for name in pages.TABLES)


def test_bfloat16_products_agree_within_what_seeds_differ_by():
    """What is said of precision is in the file: the mean difference is below a tenth of a seed."""
    kept = json.loads((ROOT / "results" / "bench" / "gpu.json").read_text("utf-8"))
    same = kept["agreement"]
    assert len(same["bfloat16"]) == len(same["float32"]) >= 10
    assert abs(same["mean_difference"]) < 0.1 * same["seed_spread"]


def test_the_page_shows_the_regret_that_was_measured():
    text = (ROOT / "docs" / "rehearsal.md").read_text("utf-8")
    kept = json.loads((ROOT / "results" / "bench" / "regret.json").read_text("utf-8"))
    assert script("regret").table(kept) in text
