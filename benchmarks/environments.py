"""One virtual environment a peer, made once from its pinned requirements.

`.bench/<name>` is made from `benchmarks/peers/<name>.txt`; a mark inside remembers the
requirements it was made from, so that a changed file makes it anew. Where packages come from is
pip's own configuration; no address is written here.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import venv
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
FOLDER = HERE.parent / ".bench"


class NotInstallable(Exception):
    """One sentence: why an environment could not be made."""


def python_of(name: str) -> Path:
    """The interpreter of a peer's environment, which is made if it is not there.

    Raises `NotInstallable` with pip's own last words.
    """
    wanted = (HERE / "peers" / f"{name}.txt").read_text()
    folder = FOLDER / name
    mark, python = folder / "made-from.txt", folder / "bin" / "python"
    if mark.exists() and mark.read_text() == wanted and python.exists():
        return python
    print(f"installing {', '.join(wanted.split())} into .bench/{name} (once)", file=sys.stderr)
    shutil.rmtree(folder, ignore_errors=True)
    venv.create(folder, with_pip=True)
    words = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    done = subprocess.run(
        [*words, "--requirement", HERE / "peers" / f"{name}.txt"], capture_output=True, text=True
    )
    if done.returncode != 0:
        said = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
        raise NotInstallable(said[-1].removeprefix("ERROR: ") if said else "pip failed")
    mark.write_text(wanted)
    return python


_LIST = """
import json, platform
from importlib import metadata
found = {f"{one.name}=={one.version}" for one in metadata.distributions()}
print(json.dumps({"python": platform.python_version(), "packages": sorted(found)}))
"""


def freezes() -> dict[str, Any]:
    """Python and every package, exactly, of the environments that are there, and of our own."""
    found = {"ours": sys.executable}
    for file in sorted((HERE / "peers").glob("*.txt")):
        python = FOLDER / file.stem / "bin" / "python"
        if python.exists():
            found[file.stem] = str(python)
    return {
        name: json.loads(
            subprocess.run([python, "-c", _LIST], capture_output=True, text=True, check=True).stdout
        )
        for name, python in found.items()
    }
