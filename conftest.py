"""What every test stands on: a state folder of the session, and programs that are compiled once."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

# Thousands of small writes, each synced: no test is about the disk below these folders. A container
# may have a few megabytes of such memory only.
ROOMY = os.access("/dev/shm", os.W_OK) and shutil.disk_usage("/dev/shm").free > 2**30
MEMORY = "/dev/shm" if ROOMY else None
COMPILED = "SOTTOVOCE_TEST_COMPILED"  # the folder with one folder of compiled programs a worker
WRITE_ABOVE = "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"


def pytest_configure(config: pytest.Config) -> None:
    """Give this worker a folder for what XLA compiles; most of the suite's time was compiling.

    The folders of the tests lie in memory: a vault syncs every line, 9 ms each on a busy disk.
    A shell that starts a command in the background lets it ignore Ctrl-C, and so would every
    program that a test starts and interrupts.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if not hasattr(config, "workerinput"):
        os.environ[COMPILED] = tempfile.mkdtemp(dir=MEMORY)
        if MEMORY is not None:
            os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", MEMORY)
    folder = Path(os.environ[COMPILED]) / str(os.getpid())
    folder.mkdir()
    os.environ["JAX_COMPILATION_CACHE_DIR"] = str(folder)
    os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"
    os.environ[WRITE_ABOVE] = "0"


def pytest_collection_finish() -> None:
    """Let the processes that tests start read only: one that is killed would leave half a file."""
    os.environ[WRITE_ABOVE] = "1e9"


def pytest_runtest_logfinish() -> None:
    """Link the programs of the test that has ended into the other workers' folders, each whole."""
    own = Path(os.environ["JAX_COMPILATION_CACHE_DIR"])
    others = [folder for folder in own.parent.iterdir() if folder != own]
    for program in own.iterdir():
        if program.stat().st_nlink == 1:
            for folder in others:
                with contextlib.suppress(FileExistsError):  # it was compiled there, too
                    os.link(program, folder / program.name)


def pytest_unconfigure(config: pytest.Config) -> None:
    """Remove the folders when the last worker has ended."""
    if not hasattr(config, "workerinput"):
        shutil.rmtree(os.environ[COMPILED], ignore_errors=True)


@pytest.fixture(autouse=True, scope="session")
def _no_witness_in_the_home() -> Iterator[None]:
    with (
        pytest.MonkeyPatch.context() as patch,
        tempfile.TemporaryDirectory(dir=MEMORY) as state,
    ):
        patch.setenv("SOTTOVOCE_STATE", state)
        yield
