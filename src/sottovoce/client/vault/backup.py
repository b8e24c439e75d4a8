"""A backup: the vault file alone, marked as what it is, so that it is never served as it is.

No witness goes with it. A witness that was backed up with its vault fits it for ever, and would
vouch for a state that was left long ago.
"""

from __future__ import annotations

import os
from contextlib import closing
from pathlib import Path

from sottovoce.client.vault.chest import Chest, real
from sottovoce.client.vault.witness import Receipt, sync_folder
from sottovoce.errors import VaultRefusal


def backup(path: str | Path, out: str | Path) -> Receipt:
    """Write a backup of the newest state to a new file; how far the vault has come in it."""
    target = real(Path(out))
    with closing(Chest.open(Path(path), whole=True)) as chest:
        chest.require_newest(reading=True)
        if target.exists():
            raise VaultRefusal(f"{target} exists already; name another file for the backup")
        part = target.with_name(target.name + ".part")
        try:
            part.unlink(missing_ok=True)
            part.touch(mode=0o600, exist_ok=False)
            chest.copy_to(part)
            with part.open("rb") as file:
                os.fsync(file.fileno())
            part.rename(target)
            sync_folder(target.parent)
        except OSError as error:
            raise VaultRefusal(
                f"{target} cannot be written ({error.strerror}); check the folder and its room"
            ) from None
        return chest.receipt()
