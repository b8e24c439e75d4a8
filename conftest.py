"""What every test stands on: the machine's own witnesses lie in a folder of the test session."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator

import pytest

MEMORY = "/dev/shm"  # thousands of small writes, each synced: no test is about this folder's disk


@pytest.fixture(autouse=True, scope="session")
def _no_witness_in_the_home() -> Iterator[None]:
    with (
        pytest.MonkeyPatch.context() as patch,
        tempfile.TemporaryDirectory(dir=MEMORY if os.access(MEMORY, os.W_OK) else None) as state,
    ):
        patch.setenv("SOTTOVOCE_STATE", state)
        yield
