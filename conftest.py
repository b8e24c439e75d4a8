"""What every test stands on: the machine's own witnesses lie in a folder of the test session."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True, scope="session")
def _no_witness_in_the_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SOTTOVOCE_STATE", str(tmp_path_factory.mktemp("state")))
        yield
