"""Fork a process for each trial, with what killers load besides the package already loaded.

    python -m mutants.trial_nursery          an order a line (JSON), an exit code a line

Half of a trial's time was importing numpy and scipy. The package itself is never loaded here: each
fork imports its own mutant.
"""

from __future__ import annotations

import atexit
import importlib
import json
import os
import signal
import sys
import traceback
from typing import Any

LOADED = (
    "numpy",
    "scipy.special",
    "cryptography.hazmat.primitives.ciphers",
    "cryptography.hazmat.primitives.serialization",
    "logging",
    "sqlite3",
    "subprocess",
    "tempfile",
)


def play_trial(order: dict[str, Any]) -> int:
    """Become the process that the order describes; return the exit code of its trial."""
    os.environ.clear()
    os.environ.update(order["environment"])
    sys.path[:0] = order["path"]
    os.chdir(order["folder"])
    said = os.open(order["said"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    os.dup2(said, 1)
    os.dup2(said, 2)
    signal.alarm(order["seconds"])  # a bug may make a loop endless
    try:
        from mutants import mutant_trial

        return mutant_trial.main(order["names"])
    except BaseException:
        traceback.print_exc()
        return 1
    finally:
        atexit._run_exitfuncs()  # a fork ends without them: its temporary folders would stay
        sys.stdout.flush()
        sys.stderr.flush()


def main() -> None:
    """Take orders until the input ends."""
    for name in LOADED:
        importlib.import_module(name)
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            os._exit(play_trial(json.loads(line)))
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


if __name__ == "__main__":
    main()
