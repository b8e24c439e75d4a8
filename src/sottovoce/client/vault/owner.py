"""Whom a file belongs to: what root writes for a client stays readable to that client."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


def give(descriptor: int, like: Path) -> None:
    """Give a file that was just made to the owner of another, where that may be done.

    Root alone may give files away, and root alone opens a vault that belongs to somebody else.
    """
    try:
        wanted = like.stat()
    except OSError:  # nothing there yet: who makes the first file keeps it
        return
    made = os.fstat(descriptor)
    if (made.st_uid, made.st_gid) != (wanted.st_uid, wanted.st_gid):
        with contextlib.suppress(PermissionError):
            os.fchown(descriptor, wanted.st_uid, wanted.st_gid)
