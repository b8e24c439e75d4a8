"""A vault's client killed at any moment or cut from its power, and what must then hold."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from support.vault_power import compiled, cuts, look


def killed(folder: Path, *, kills: int, seed: int, careless: bool = False) -> dict:
    """Run the clients in a process of their own, which may fork."""
    words = [str(kills), str(seed), str(folder), *(["careless"] if careless else [])]
    done = subprocess.run(
        [sys.executable, "-m", "support.vault_crash", *words],
        capture_output=True, text=True, timeout=7200,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout) | {"said": done.stderr}


@pytest.fixture(scope="session")
def shim(tmp_path_factory):
    """The recorder; CI must be able to compile it, elsewhere its absence skips."""
    try:
        return compiled(tmp_path_factory.mktemp("shim"))
    except FileNotFoundError as missing:
        if os.environ.get("CI") == "true":
            pytest.fail(str(missing))
        pytest.skip(f"{missing}: power cuts cannot be recorded")


def outcomes(folder: Path, log: list[str], *, count: int, seed: int) -> Counter[str]:
    """What opening says after each power cut; any breach is an AssertionError."""
    return Counter(look(folder, *cut) for cut in cuts(log, count=count, seed=seed))
