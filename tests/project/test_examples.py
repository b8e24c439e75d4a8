"""The scripts in examples/ that need no other data run as they stand."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from support import ROOT

EXAMPLES = ROOT / "examples"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["own_model", "own_table", "small_transformer", "unequal_budgets"])
def test_an_example_runs(name: str, tmp_path: Path) -> None:
    if name == "small_transformer":
        pytest.importorskip("torch", reason="the extra sottovoce[torch] is not installed")
    path = EXAMPLES / f"{name}.py"
    done = subprocess.run(
        [sys.executable, str(path)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=900,
        env=os.environ | {"PYTHONWARNINGS": "error"},
    )
    assert done.returncode == 0, done.stderr
    assert "differentially private" in done.stdout
