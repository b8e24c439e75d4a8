"""docs/performance.md shows what was measured: its tables are those of results/bench."""

from __future__ import annotations

import importlib.util
import json
import sys

import numpy as np
import pytest

from support import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))


def script(name: str, folder: str = "benchmarks"):
    """A script of benchmarks/ or trust/ as a module."""
    made = importlib.util.spec_from_file_location(name, ROOT / folder / f"{name}.py")
    module = importlib.util.module_from_spec(made)
    made.loader.exec_module(module)
    return module


def test_the_page_shows_what_was_measured():
    """`python benchmarks/pages.py` would change nothing."""
    text = (ROOT / "docs" / "performance.md").read_text("utf-8")
    pages = script("pages")
    assert pages.made_anew(text) == text
    assert all(f"<!-- {name}: begin -->" in text for name in pages.TABLES)


def test_the_threat_model_shows_what_hostile_clients_did():
    """`python benchmarks/hostile.py --page` would change nothing."""
    text = (ROOT / "docs" / "threat-model.md").read_text("utf-8")
    assert script("hostile").made_anew(text) == text


def test_the_threat_model_shows_what_became_of_hostile_parties():
    """`make trust` writes this table; nobody else does."""
    text = (ROOT / "docs" / "threat-model.md").read_text("utf-8")
    assert script("test_hostile", "trust").made_anew(text) == text


def test_the_accelerator_benchmark_refuses_what_it_cannot_measure(monkeypatch, tmp_path):
    """Before it measures: a CPU, and a file that would lack the comparison on MNIST."""
    gpu, out = script("gpu"), tmp_path / "gpu.json"
    monkeypatch.setattr("sys.argv", ["gpu.py", "--out", str(out)])
    monkeypatch.setattr(gpu, "rates", lambda: pytest.fail("it began to measure"))
    with pytest.raises(SystemExit, match="JAX sees no accelerator here"):
        gpu.main()
    monkeypatch.setattr(gpu.jax, "default_backend", lambda: "gpu")
    monkeypatch.delenv("SOTTOVOCE_DATA", raising=False)
    with pytest.raises(SystemExit, match="SOTTOVOCE_DATA is not set"):
        gpu.main()
    assert not out.exists()


def test_the_accelerator_benchmark_keeps_what_its_table_needs_and_only_when_all_is_there(
    monkeypatch, tmp_path
):
    """The measurements themselves are taken out; the last of them clears the compiled rounds."""
    gpu, out = script("gpu"), tmp_path / "gpu.json"
    old = json.loads((ROOT / "results" / "bench" / "gpu.json").read_text("utf-8"))
    compiled = [7]
    monkeypatch.setattr("sys.argv", ["gpu.py", "--out", str(out)])
    monkeypatch.setenv("SOTTOVOCE_DATA", str(tmp_path))
    monkeypatch.setattr(gpu.jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(gpu, "rates", lambda: old["rates"])
    monkeypatch.setattr(gpu, "rows", lambda shape: (None, None))
    times = {"run_s": 1.0, "round_ms": 2.0, "rounds_ms": 1.5, "first_s": 3.0}
    monkeypatch.setattr(gpu, "engine", lambda *_: dict(times))
    monkeypatch.setattr(gpu, "sweep", lambda: old["sweep"])
    monkeypatch.setattr(gpu, "count_compilations", lambda: compiled[0])

    def compared():
        assert not out.exists()
        compiled[0] = 0
        return old["agreement"]

    monkeypatch.setattr(gpu, "agreement", compared)
    gpu.main()
    found = json.loads(out.read_text("utf-8"))
    assert found["compilations"] == 7
    assert found["command"] == "python gpu.py --out gpu.json"
    assert "bfloat16 against float32" in script("gpu_table").page(found)


def test_bfloat16_products_agree_within_what_seeds_differ_by():
    """What is said of precision is in the file: no mean difference above a tenth of a seed's is
    proven by ten seeds (two standard errors: a difference of 0.2 of a seed's would be).
    """
    kept = json.loads((ROOT / "results" / "bench" / "gpu.json").read_text("utf-8"))
    same = kept["agreement"]
    apart = np.subtract(same["bfloat16"], same["float32"])
    assert len(apart) >= 10
    assert apart.mean() == pytest.approx(same["mean_difference"])
    error = apart.std(ddof=1) / np.sqrt(len(apart))
    assert abs(apart.mean()) - 2 * error < 0.1 * same["seed_spread"]


def test_the_page_shows_the_regret_that_was_measured():
    text = (ROOT / "docs" / "rehearsal.md").read_text("utf-8")
    kept = json.loads((ROOT / "results" / "bench" / "regret.json").read_text("utf-8"))
    assert script("regret").table(kept) in text
    tables = json.loads((ROOT / "results" / "bench" / "regret_tables.json").read_text("utf-8"))
    assert script("regret").table(tables) in text


def test_the_page_shows_what_own_tables_reached():
    text = (ROOT / "docs" / "own-data.md").read_text("utf-8")
    kept = json.loads((ROOT / "results" / "own_data.json").read_text("utf-8"))
    assert script("own_data").format_table(kept) in text
