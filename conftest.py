"""What every test stands on: a state folder of the session, and programs that are compiled once."""

from __future__ import annotations

import contextlib
import gc
import hashlib
import os
import platform
import shutil
import signal
import tempfile
from collections.abc import Iterable, Iterator
from importlib.metadata import version
from pathlib import Path

import pytest

# Threads of one product of matrices wait for each other without sleeping: beside other processes a
# product of 400 × 400 took six times the CPU seconds of one thread. `make trust` has as many as a
# user has.
for name in ("OMP", "OPENBLAS"):
    os.environ.setdefault(f"{name}_NUM_THREADS", "1")
# Thousands of small writes, each synced: no test is about the disk below these folders. A container
# may have a few megabytes of such memory only.
ROOMY = os.access("/dev/shm", os.W_OK) and shutil.disk_usage("/dev/shm").free > 2**30
MEMORY = "/dev/shm" if ROOMY else None
COMPILED = "SOTTOVOCE_TEST_COMPILED"  # the folder with one folder of compiled programs a worker
WRITE_ABOVE = "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"
SHARED = "shared"  # among the workers' folders: what goes to the next run
MOST = 8000  # programs; the whole suite has some 1,500
WAITING = (
    "tests/hostile/test_deploy.py",
    "tests/flower/test_local_federation.py",
    "tests/flower/test_local_sum_view.py",
    "tests/flower/test_transport.py",
)
# Whose tests look at charts; elsewhere matplotlib paints none, which costs half a second a page.
DRAWN = (
    "src",
    "tests/benchmarks",
    "tests/browser",
    "tests/reports",
    "tests/studies/paper",
    "trust",
)


def find_kept() -> Path:
    """Return where compiled programs stay between runs: for this processor and this JAX alone.

    JAX names a program by a hash of all that it was compiled from.
    """
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text("utf-8").splitlines() if cpuinfo.exists() else []
    flags = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    mark = f"{platform.machine()} {flags} {version('jax')} {version('jaxlib')}"
    name = hashlib.sha256(mark.encode()).hexdigest()[:16]
    return Path(__file__).parent / "build" / "compiled" / name


def list_programs(folder: Path) -> set[str]:
    """Return the names of the programs in a folder."""
    return {path.name for path in folder.iterdir()}


def link_programs(names: Iterable[str], source: Path, target: Path) -> None:
    """Link programs, each whole, into another folder; one that is there was compiled there, too."""
    for name in names:
        with contextlib.suppress(FileExistsError):
            os.link(source / name, target / name)


class Linker:
    """Gives the programs that a process compiles to the other workers."""

    def __init__(self, folder: Path, known: set[str]) -> None:
        self.folder, self.known, self.changed = folder, known, 0

    def pytest_runtest_logfinish(self) -> None:
        """Link the programs of the test that has ended into the other workers' folders.

        To list thousands of programs takes longer than most tests; the folder's time says whether
        there is a new one.
        """
        changed = self.folder.stat().st_mtime_ns
        if changed == self.changed:
            return
        self.changed = changed
        new = list_programs(self.folder) - self.known
        self.known |= new
        for other in self.folder.parent.iterdir() if new else ():
            if other != self.folder:
                link_programs(new, self.folder, other)


def pytest_configure(config: pytest.Config) -> None:
    """Give this worker a folder for what XLA compiles; most of the suite's time was compiling.

    The folders of the tests lie in memory: a vault syncs every line, 9 ms each on a busy disk.
    A shell that starts a command in the background lets it ignore Ctrl-C, and so would every
    program that a test starts and interrupts.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    # Users wait for their federations; tests need not ask ten times a second whether there is work.
    os.environ.setdefault("FLWR_SUPEREXEC_TASK_POLL_INTERVAL", "0.5")
    if not hasattr(config, "workerinput"):
        os.environ[COMPILED] = tempfile.mkdtemp(dir=MEMORY)
        shared = Path(os.environ[COMPILED]) / SHARED
        shutil.copytree(find_kept(), shared) if find_kept().is_dir() else shared.mkdir()
        if MEMORY is not None:
            os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", MEMORY)
    shared = Path(os.environ[COMPILED]) / SHARED
    folder = shared.with_name(str(os.getpid()))
    folder.mkdir()
    link_programs(known := list_programs(shared), shared, folder)
    # The process that hands tests to workers is told of every end, too, and compiles nothing.
    if hasattr(config, "workerinput") or not config.getoption("numprocesses", None):
        config.pluginmanager.register(Linker(folder, known))
        gc.disable()  # until all is imported: what is imported stays, and looking at it takes time
    os.environ["JAX_COMPILATION_CACHE_DIR"] = str(folder)
    os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"
    # Else the folder's path is a part of every program's name, and no other worker finds it.
    os.environ["JAX_PERSISTENT_CACHE_ENABLE_XLA_CACHES"] = "none"
    os.environ[WRITE_ABOVE] = "0"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put what mostly waits for processes first: one worker waits, and the others compute.

    Workers take each other's last tests, so no second worker deploys a federation of its own.
    """
    items.sort(key=lambda item: not item.nodeid.startswith(WAITING))


def pytest_collection_finish() -> None:
    """Let the processes that tests start read only: one that is killed would leave half a file."""
    os.environ[WRITE_ABOVE] = "1e9"
    gc.freeze()
    gc.enable()


def pytest_unconfigure(config: pytest.Config) -> None:
    """Keep what was compiled and remove the folders when the last worker has ended."""
    if hasattr(config, "workerinput"):
        return
    shared, kept = Path(os.environ[COMPILED]) / SHARED, find_kept()
    kept.mkdir(parents=True, exist_ok=True)
    if len(list_programs(kept)) > MOST:  # of code that is no more
        shutil.rmtree(kept)
        kept.mkdir()
    for name in list_programs(shared) - list_programs(kept):
        part = shutil.copy(shared / name, kept.with_name(f"{name}.{os.getpid()}"))
        Path(part).replace(kept / name)
    shutil.rmtree(os.environ[COMPILED], ignore_errors=True)


@pytest.fixture(autouse=True, scope="session")
def _no_witness_in_the_home() -> Iterator[None]:
    with (
        pytest.MonkeyPatch.context() as patch,
        tempfile.TemporaryDirectory(dir=MEMORY) as state,
    ):
        patch.setenv("SOTTOVOCE_STATE", state)
        yield


@pytest.fixture(autouse=True, scope="module")
def _charts_are_blank(request: pytest.FixtureRequest) -> Iterator[None]:
    from support.drawings import leave_drawings_blank

    drawn = request.node.nodeid.startswith(DRAWN)
    with contextlib.nullcontext() if drawn else leave_drawings_blank():
        yield
