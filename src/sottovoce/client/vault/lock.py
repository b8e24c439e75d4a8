"""One process at a time: an operating system's lock that dies with its holder."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

from sottovoce.client.vault import owner
from sottovoce.errors import VaultRefusal

_AGAIN = 0.05


def take(vault: Path, wait: float = 0.0, *, at: Path | None = None, what: str = "") -> int:
    """Lock the vault or refuse; the descriptor holds the lock until it is closed.

    Who comes second is told at once, or waits so many seconds for the first to end.
    The lock lies on a file beside the vault, because closing any descriptor of a SQLite file drops
    SQLite's own locks on it. SQLite's lock on the vault itself is the second line. `at` names
    another file to lock, and `what` says in the refusal what that lock protects.
    """
    try:
        import fcntl
    except ImportError:  # pragma: no cover
        raise VaultRefusal(
            "a vault needs POSIX file locks, which this system has not; keep it on Linux or macOS"
        ) from None
    file = at or vault.with_name(vault.name + ".lock")
    try:
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        owner.give(descriptor, vault)
    except OSError as error:
        raise VaultRefusal(
            f"{vault} cannot be locked ({error.strerror}); check the folder and its permissions, "
            "and run this as the account that the vault belongs to"
        ) from None
    until = time.monotonic() + wait
    try:
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= until:
                    raise
                time.sleep(_AGAIN)
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
    except BlockingIOError:
        holder = _holder(descriptor)
        os.close(descriptor)
        raise VaultRefusal(
            f"{what or vault} is in use{holder}; wait until it has ended, then try again"
        ) from None
    except OSError as error:
        os.close(descriptor)
        raise VaultRefusal(
            f"{vault} cannot be locked ({error.strerror}); keep it on a local disk with room left"
        ) from None
    return descriptor


def _holder(descriptor: int) -> str:
    with contextlib.suppress(OSError, ValueError):
        return f" by process {int(os.pread(descriptor, 20, 0))}"
    return ""
