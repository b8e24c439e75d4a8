"""Compiled programs stay in the user's cache folder: what is counted is work, never time."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from sottovoce.cli import commands

NAMES = ("JAX_COMPILATION_CACHE_DIR", "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES",
         "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS",
         "JAX_PERSISTENT_CACHE_ENABLE_XLA_CACHES")  # fmt: skip


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A process of a user with this home, which has not loaded JAX."""
    for name in NAMES:  # set first, so that they are restored afterwards
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("SOTTOVOCE_CACHE", raising=False)
    monkeypatch.delitem(sys.modules, "jax", raising=False)
    return tmp_path


def find_folder() -> Path | None:
    """Return where programs will be kept, after asking for it."""
    commands.keep_compiled_programs()
    named = os.environ.pop(NAMES[0], None)
    return None if named is None else Path(named)


def test_the_folder_is_private_and_named_by_version(home):
    folder = find_folder()
    assert folder.parent == home / "sottovoce" / "compiled"
    assert folder.name.startswith(f"{commands.__version__}-")
    assert folder.stat().st_mode & 0o777 == 0o700
    assert find_folder() == folder


def test_a_folder_that_others_can_enter_is_not_used(home):
    find_folder().chmod(0o755)
    assert find_folder() is None


def test_it_can_be_elsewhere_or_off_and_leaves_jaxs_own_setting_alone(home, monkeypatch):
    monkeypatch.setenv("SOTTOVOCE_CACHE", str(home / "here"))
    assert find_folder().parent == home / "here" / "compiled"
    monkeypatch.setenv("SOTTOVOCE_CACHE", "off")
    assert find_folder() is None
    monkeypatch.delenv("SOTTOVOCE_CACHE")
    monkeypatch.setenv(NAMES[0], "mine")
    assert find_folder() == Path("mine")


def test_without_a_place_to_write_everything_goes_on(home, monkeypatch):
    (home / "file").touch()
    monkeypatch.setenv("SOTTOVOCE_CACHE", str(home / "file"))
    assert find_folder() is None


def test_too_many_programs_and_those_of_another_month_are_removed(home, monkeypatch):
    folder = find_folder()
    old, recent = (folder.with_name(f"{name}-0123456789ab") for name in ("0.0.1", "0.0.2"))
    (folder / "program").touch()
    for path in (old, recent):
        path.mkdir()
    os.utime(old, (0, 0))
    monkeypatch.setattr(commands, "MOST_PROGRAMS", 0)
    assert find_folder() == folder
    assert sorted(path.name for path in folder.parent.iterdir()) == sorted(
        [folder.name, "0.0.2-0123456789ab"]
    )
    assert not list(folder.iterdir())


COUNTED = """if 1:
    import json, sys
    from collections import Counter
    from sottovoce.cli import commands
    commands.keep_compiled_programs()
    import jax.monitoring
    seen = Counter()
    jax.monitoring.register_event_listener(lambda name, **_: seen.update([name.rpartition("/")[2]]))
    sys.argv = ["sottovoce", "train", "--quiet", "--seed", "4", "--out", sys.argv[1],
                "--set", "rounds.schedule=fixed", "--set", "rounds.rounds=3"]
    try:
        commands.main()
    except SystemExit as end:
        print(json.dumps({"code": end.code, **seen}))
"""


def train(home: Path, run: str, **environment: str) -> dict[str, int]:
    """Train in a new process; return its exit code and how often JAX found a program."""
    clean = {name: value for name, value in os.environ.items() if name not in NAMES}
    done = subprocess.run(
        [sys.executable, "-c", COUNTED, str(home / run)],
        capture_output=True, text=True, timeout=900,
        env=clean | {"XDG_CACHE_HOME": str(home), "SOTTOVOCE_CACHE": ""} | environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
def test_a_second_start_compiles_nothing_and_ends_in_the_same_model(tmp_path):
    first, second = train(tmp_path, "first"), train(tmp_path, "second")
    assert first["cache_misses"] > 0
    assert second.get("cache_misses", 0) == 0
    assert second["cache_hits"] >= first["cache_misses"]
    programs = sorted((tmp_path / "sottovoce" / "compiled").glob("*/*"))
    for program in programs:  # as after a kill while they were written
        program.write_bytes(program.read_bytes()[: program.stat().st_size // 2])
    damaged, without = train(tmp_path, "damaged"), train(tmp_path, "off", SOTTOVOCE_CACHE="off")
    assert damaged["code"] == without["code"] == 0
    assert without.get("cache_hits", 0) == 0
    models = {
        (tmp_path / run / "model.npz").read_bytes() for run in ("first", "second", "damaged", "off")
    }
    assert len(models) == 1
