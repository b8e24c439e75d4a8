"""Power cuts: what a disk may hold if everything that was not synced can be lost.

A client works on a vault while `vault_power.c` writes down every open, write, truncation, sync,
rename and removal. From this log the disk is rebuilt as it may be after a power cut at any point: a
write survives for certain only if its file was synced after it, a name only if its folder was; of
the rest nothing, everything, the first part or any subset survives, pages torn at 512 bytes. (This
is harsher than a journaling file system.) One recorded run gives thousands of power cuts.

    python -m support.vault_power FOLDER ROUNDS      is the client that is recorded
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from unittest import mock

from sottovoce.client.vault import Vault, VaultReceipt, chest
from sottovoce.errors import VaultRefusal
from support.vault_play import DATASET, POLICY, request

SHIM = Path(__file__).with_name("vault_power.c")
NAME, MARKS = "ward.vault", "marks"
UNITS = 1_000_003
SURVIVAL = ("nothing", "everything", "first", "any", "any", "any")
_SECTOR = 512


def work(folder: Path, rounds: int) -> None:
    """The client: marks in the log say what it was told is durable, as a server would know."""
    marks = os.open(folder / MARKS, os.O_WRONLY | os.O_CREAT, 0o600)

    def told(text: str) -> None:
        os.write(marks, f"{text}\n".encode())

    path, seen = folder / NAME, None
    chest.SUMMARY_EVERY = 3  # so that cuts meet summaries as well
    Vault.create(path, POLICY, dataset=DATASET).close()
    told("made")
    for t in range(rounds):
        with Vault.open(path, dataset=DATASET) as vault:  # as a device does: one request, one open
            if t % 4 == 3:
                vault.reserve("run", t, request("run", t), [UNITS], server="s", facts={})
                told("debit")
            paid = vault.reserve(
                "run", t, request("run", t), [UNITS], server="s", facts={}, acknowledged=seen
            )
            told("debit")
            seen = VaultReceipt.from_json(paid.receipt.to_json())  # leaves with the answer
            upload = hashlib.sha512(f"{t}".encode()).digest() * (1 + 20 * (t % 5))
            vault.store(paid, upload)
            told(f"left {t} {hashlib.sha256(upload).hexdigest()}")
    os.close(marks)


def compiled(folder: Path) -> Path:
    """The shim, compiled; raises FileNotFoundError where there is no C compiler."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        raise FileNotFoundError("no C compiler (cc, gcc, clang) on PATH")
    library = folder / "vault_power.so"
    subprocess.run(
        [compiler, "-shared", "-fPIC", "-O1", "-o", library, SHIM, "-ldl"], check=True, timeout=900
    )
    return library


def record(folder: Path, shim: Path, *, rounds: int, package: Path | None = None) -> list[str]:
    """Run the client on a new folder and return the log of what it did there."""
    folder.mkdir()
    log = folder.with_name(folder.name + ".log")
    sources = [] if package is None else [str(package)]
    environment = {
        **os.environ,
        "LD_PRELOAD": str(shim),
        "POWER_FOLDER": str(folder.resolve()),
        "SOTTOVOCE_STATE": str(_state(folder)),
        "POWER_LOG": str(log),
        "PYTHONPATH": os.pathsep.join([*sources, *sys.path]),
    }
    subprocess.run(
        [sys.executable, "-m", "support.vault_power", str(folder.resolve()), str(rounds)],
        check=True, timeout=900, env=environment,
    )  # fmt: skip
    return log.read_text("ascii").splitlines()


@dataclass
class File:
    """A file's content that is safe, and what was asked of it since its last sync."""

    safe: bytearray = field(default_factory=bytearray)
    pending: list[tuple[int, bytes | None]] = field(default_factory=list)  # None: cut there

    def sync(self) -> None:
        """All of it is on the disk now."""
        for change in self.pending:
            _apply(self.safe, change)
        self.pending.clear()


@dataclass
class Disk:
    """What is on the disk for certain, and what may be."""

    names: dict[str, File] = field(default_factory=dict)  # safe
    renamed: list[tuple[str, File | None]] = field(default_factory=list)  # since the folder's sync
    now: dict[str, File] = field(default_factory=dict)  # as the process sees it
    open: dict[str, File | None] = field(default_factory=dict)  # by descriptor; None: the folder
    made: bool = False
    debits: int = 0
    left: dict[int, str] = field(default_factory=dict)

    def happen(self, event: str) -> None:
        """Take one line of the log."""
        word, *rest = event.split(" ")
        if word == "open":
            self._open(*rest)
        elif word == "write":
            file = self.open[rest[0]]
            assert file is not None
            if file is self.now.get(MARKS):
                self._told(bytes.fromhex(rest[2]).decode())
            file.pending.append((int(rest[1]), bytes.fromhex(rest[2])))
        elif word == "cut":
            file = self.open[rest[0]]
            assert file is not None
            file.pending.append((int(rest[1]), None))
        elif word == "sync":
            self._sync(self.open[rest[0]])
        elif word == "name":
            self._name(rest[1], self.now[rest[0]])
            self._name(rest[0], None)
        elif word == "gone":
            self._name(rest[0], None)
        else:
            assert word == "close", event

    def _open(self, descriptor: str, created: str, truncated: str, path: str) -> None:
        if path == ".":
            self.open[descriptor] = None
            return
        if created == "1":
            self._name(path, File())
        self.open[descriptor] = file = self.now[path]
        if truncated == "1" and created == "0":
            file.pending.append((0, None))

    def _sync(self, file: File | None) -> None:
        if file is not None:
            file.sync()
            return
        for name, named in self.renamed:
            _rename(self.names, name, named)
        self.renamed.clear()

    def _name(self, name: str, file: File | None) -> None:
        self.renamed.append((name, file))
        _rename(self.now, name, file)

    def _told(self, text: str) -> None:
        word, *rest = text.split()
        if word == "made":
            self.made = True
        elif word == "debit":
            self.debits += 1
        else:
            self.left[int(rest[0])] = rest[1]

    def after_a_cut(self, rng: random.Random) -> dict[str, tuple[File, bytes]]:
        """One of the states the disk may be in if the power goes now."""
        how = rng.choice(SURVIVAL)
        names = dict(self.names)
        for name, file in _surviving(self.renamed, how, rng):
            _rename(names, name, file)
        image = {}
        for name, file in names.items():
            content = bytearray(file.safe)
            for change in _surviving(file.pending, how, rng):
                _apply(content, _torn(change, how, rng))
            image[name] = (file, bytes(content))
        return image


def cuts(log: list[str], *, count: int, seed: int) -> Iterator[tuple[Disk, dict[str, bytes], str]]:
    """Power cuts at `count` places of the log: the disk, its content by name, where it was.

    The vault is under the name "vault" in the content if any name of it survived, whichever.
    """
    rng = random.Random(seed)
    often = -(-count // len(log))
    places = sorted(rng.sample(range(1, len(log) + 1), min(count, len(log))))
    disk, done = Disk(), 0
    for place in places:
        while done < place:
            disk.happen(log[done])
            done += 1
        for _ in range(often):
            image = disk.after_a_cut(rng)
            where = f"after event {place} of {len(log)} ({log[place - 1][:40]})"
            yield disk, {name: content for name, (_, content) in image.items()}, where


def look(folder: Path, disk: Disk, image: dict[str, bytes], where: str) -> str:
    """Put the image on the disk and open the vault: what had left is there, with its debit."""
    _lay_out(folder, image)
    # Every image is one past of the same machine: what it saw in another has not happened.
    shutil.rmtree(_state(folder), ignore_errors=True)
    _remember(folder, image)
    if NAME not in image:
        assert not disk.made, f"the vault is gone {where}"
        return "not yet made"
    try:
        with (
            mock.patch.dict(os.environ, SOTTOVOCE_STATE=str(_state(folder))),
            Vault.open(folder / NAME, dataset=DATASET) as vault,
        ):
            assert vault.spent >= UNITS * disk.debits, f"a debit is gone {where}"
            for t, digest in disk.left.items():
                entry = vault.find("run", t)
                assert entry is not None, f"an upload that left is unknown {where}"
                assert vault._books.turn("run", t).sha256 == digest
                if entry.dropped:
                    assert t < max(disk.left), f"an upload that may be asked is gone {where}"
                    continue
                assert entry.upload is not None, f"an upload that left is not stored {where}"
                assert hashlib.sha256(entry.upload).hexdigest() == digest
            # It goes on unattended, and a round that was answered has no second answer.
            t = max(disk.left, default=-1) + 1
            if (found := vault.find("run", t)) is None or found.upload is None:
                paid = vault.reserve("run", t, request("run", t), [UNITS], server="s", facts={})
                vault.store(paid, b"goes on")
    except VaultRefusal as no:
        raise AssertionError(f"not opened {where}: {no}") from no
    return "opened"


def _state(folder: Path) -> Path:
    return folder.with_name(folder.name + ".state")


def _remember(folder: Path, image: dict[str, bytes]) -> None:
    """The machine's own witness: it is durable before the one beside the vault is written."""
    with contextlib.suppress(KeyError, ValueError):  # a torn one is no witness
        beside = image[f"{NAME}.witness"]
        kept = _state(folder) / "witness" / json.loads(beside)["vault"]
        kept.parent.mkdir(parents=True)
        kept.write_bytes(beside)


def _lay_out(folder: Path, image: dict[str, bytes]) -> None:
    """The image as files. The vault's inode must be its own, so it is written in place."""
    vault, part = folder / NAME, folder / f"{NAME}.part"
    keeper = vault if vault.exists() else part
    for path in folder.iterdir():
        if path != keeper:
            path.unlink()
    if NAME in image and keeper != vault:
        keeper.rename(vault)
        keeper = vault
    elif NAME not in image and keeper == vault:
        vault.rename(part)
        keeper = part
    for name, content in image.items():
        with (folder / name).open("r+b" if folder / name == keeper else "wb") as file:
            file.write(content)
            file.truncate()


def _surviving(changes: list, how: str, rng: random.Random) -> list:
    if how in ("nothing", "everything"):
        return changes if how == "everything" else []
    if how == "first":
        return changes[: rng.randint(0, len(changes))]
    return [change for change in changes if rng.random() < 0.5]


def _torn(
    change: tuple[int, bytes | None], how: str, rng: random.Random
) -> tuple[int, bytes | None]:
    offset, content = change
    if how != "any" or content is None or len(content) <= _SECTOR or rng.random() < 0.7:
        return change
    return offset, content[: _SECTOR * rng.randint(1, (len(content) - 1) // _SECTOR)]


def _apply(content: bytearray, change: tuple[int, bytes | None]) -> None:
    offset, new = change
    if new is None:
        del content[offset:]
        content.extend(bytes(offset - len(content)))
        return
    content.extend(bytes(max(0, offset - len(content))))
    content[offset : offset + len(new)] = new


def _rename(names: dict[str, File], name: str, file: File | None) -> None:
    if file is None:
        names.pop(name, None)
    else:
        names[name] = file


if __name__ == "__main__":
    work(Path(sys.argv[1]), int(sys.argv[2]))
