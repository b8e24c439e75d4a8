"""Work with a vault in a process of its own: as another account, or with lowered limits."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

CLIENT = 65534  # the account nobody

_START = """
import fcntl, json, os, resource, sys  # before limits are lowered
from pathlib import Path
from sottovoce.client.vault import Vault, chain, rebind, witness
from sottovoce.errors import VaultRefusal
from support.vault_play import DATASET, OTHER, request, used
place, account, said = Path(sys.argv[1]), json.loads(sys.argv[2]), []
def book(vault, t):
    return vault.reserve("run-x", t, request("run-x", t), [2**50 // 100], server="s", facts={})
def refused(work, *given):
    try:
        work(*given)
        said.append("")
    except VaultRefusal as no:
        said.append(str(no))
if account is not None:
    os.setgroups([])
    os.setgid(account)
    os.setuid(account)
"""


@contextmanager
def client_folder() -> Iterator[Path]:
    """A new folder that the client's account can reach and owns; needs root."""
    with tempfile.TemporaryDirectory() as name:
        os.chown(name, CLIENT, CLIENT)
        yield Path(name)


def do_apart(place: Path, code: str, *, account: int | None = None) -> list[str]:
    """Run code in a new process, as this account if one is named; return what it refused."""
    done = subprocess.run(
        [sys.executable, "-c", f"{_START}\n{code}\nprint(json.dumps(said))", place,
         json.dumps(account)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True, text=True, timeout=900,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)
