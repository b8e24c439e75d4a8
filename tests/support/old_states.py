"""Ways to bring back an older state of a vault, and a client that must refuse each."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from sottovoce.client.vault import Vault, restore
from sottovoce.errors import VaultRefusal
from sottovoce.privacy.tank import FULL
from support.vault_play import DATASET, play, used


def pair(place: Path) -> list[Path]:
    return [place, place.with_name(place.name + ".witness")]


def saved(place: Path, folder: Path) -> Path:
    """Vault and witness as they are now, kept in a folder."""
    folder.mkdir()
    for file in pair(place):
        shutil.copy2(file, folder / file.name)
    return folder / place.name


def spent_in(place: Path) -> int:
    with Vault.open(place, dataset=None) as vault:
        return vault.spent


def written_over(old: Path, new: Path) -> None:
    """As `cp` does: the file stays, its content is another, the inode is the same."""
    with new.open("r+b") as file:
        file.write(old.read_bytes())
        file.truncate()


def removed_and_copied(old: Path, new: Path) -> None:
    """`rm v; cp old v`: ext4 gives the new file the inode of the old one."""
    new.unlink()
    shutil.copy(old, new)


def copied_with_all(old: Path, new: Path) -> None:
    """`cp -a --remove-destination`: times, mode and owner stay, as in a backup that is put back."""
    subprocess.run(["cp", "-a", "--remove-destination", old, new], check=True, timeout=900)


def synchronised(old: Path, new: Path) -> None:
    """As `rsync -a` does: a file with another name, and a rename over the old one."""
    part = new.with_name(f".{new.name}.Ab3xYz")
    shutil.copy2(old, part)
    part.replace(new)


WAYS = (written_over, removed_and_copied, copied_with_all, synchronised)


def refuse_old_states(folder: Path) -> dict[str, bool]:
    """Put an old pair back in every way, with the state folder kept and lost; all are refused.

    Return, by way, whether the file system gave the file the inode that it had before.
    """
    same = {}
    for way in WAYS:
        for lost in (False, True):
            home = folder / f"{way.__name__}-{lost}"
            os.environ["SOTTOVOCE_STATE"] = str(home / "state")
            home.mkdir()
            place = home / "ward.vault"
            known = used(place, rounds=2)
            old, inode = saved(place, home / "old"), place.stat().st_ino
            with Vault.open(place, dataset=DATASET) as vault:
                play(vault, known, "run-c", range(2))
            for source, target in zip(pair(old), pair(place), strict=True):
                way(source, target)
            same[way.__name__] = place.stat().st_ino == inode
            if lost:
                os.environ["SOTTOVOCE_STATE"] = str(home / "new-state")
            with pytest.raises(VaultRefusal) as no:
                Vault.open(place, dataset=DATASET)
            words = "lines in this machine's state folder" if lost else "machine has seen"
            assert words in str(no.value)
            with pytest.raises(VaultRefusal):
                restore(place, nothing_since=True) if not lost else restore(place)
            _, burnt = restore(place, burn_rest=True) if lost else restore(place)
            assert burnt > 0
            assert spent_in(place) == (FULL if lost else known.spent)
    return same
