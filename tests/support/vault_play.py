"""A vault to play with: made, used, closed; and what must be found in it afterwards."""

from __future__ import annotations

import hashlib
import sqlite3
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

from sottovoce.client.vault import Policy, Vault
from sottovoce.client.vault import journal as journals
from sottovoce.client.vault.chest import Chest
from sottovoce.errors import VaultRefusal
from sottovoce.privacy.tank import FULL

DATASET = "ab" * 32
OTHER = "cd" * 32
POLICY = Policy(epsilon=8, delta=1e-5, samples=143, clip=1.0, run_share=1.0)


def request(run: str, t: int) -> str:
    """The hash of what a server might ask in a round."""
    return hashlib.sha256(f"{run} {t}".encode()).hexdigest()


@dataclass
class Known:
    """What has left a vault, and what was booked for it, as an outsider noted it down."""

    spent: int = 0
    uploads: dict[tuple[str, int], bytes] = field(default_factory=dict)

    def held_by(self, vault: Vault) -> None:
        """No unit and no byte differs; a damaged upload may be refused, never be another one."""
        assert vault.spent == self.spent
        assert int(vault.tank("x").left) == FULL - self.spent
        for (run, t), content in self.uploads.items():
            try:
                entry = vault.find(run, t)
            except VaultRefusal:
                continue
            assert entry is not None
            assert entry.upload == content


def play(vault: Vault, known: Known, run: str, rounds: range, units: int = FULL // 500) -> None:
    """Answer some rounds; every third is burnt once before."""
    for t in rounds:
        if t % 3 == 2:
            vault.reserve(run, t, request(run, t), [units], server="s", facts={})
            known.spent += units
        paid = vault.reserve(run, t, request(run, t), [units, units], server="s", facts={"t": t})
        content = hashlib.sha512(f"{run} {t}".encode()).digest() * (1 + t % 40)
        vault.store(paid, content)
        known.spent += 2 * units
        known.uploads[run, t] = content


def used(path: Path, rounds: int = 6) -> Known:
    """Make a vault, use it in two runs and close it."""
    known = Known()
    with Vault.create(path, POLICY, dataset=DATASET, second_ledger=True) as vault:
        play(vault, known, "run-a", range(rounds))
        play(vault, known, "run-b", range(rounds))
    return known


def live(path: Path, rounds: int, *, a_run: int = 500) -> None:
    """Give a vault a long history in few writes: runs whose server acknowledges every answer.

    What is written are the lines, the records and the last two uploads of each run, as `reserve`
    and `store` would have left them.
    """
    with closing(Chest.open(path)) as chest:
        entries: list[tuple[str, dict]] = []

        def write(kind: str, **more) -> None:
            if entries:
                chest.append(kind, entries, **more)
                entries.clear()

        before = 0
        for number in range(rounds):
            run, t = f"old-{number // a_run}", number % a_run
            if t == 0:
                entries.append(("run", {"run": run, "server": "s"}))
            booking = {"run": run, "t": t, "request": request(run, t), "units": [3], "server": "s",
                       "facts": {"noise": [2**33]}}  # fmt: skip
            if t >= 2:
                booking["acknowledged"] = [t - 1, before]
            entries.append(("reserve", booking))
            before = chest.books.seq + len(entries)
            content = request(run, t).encode()
            stored = {"reserve": before, "run": run, "t": t, "size": len(content),
                      "sha256": hashlib.sha256(content).hexdigest()}  # fmt: skip
            entries.append(("store", stored))
            if t >= a_run - 2 or number >= rounds - 2:
                write("store", upload=(run, t, content))
            elif len(entries) >= 400:
                write("store")


def make_old(path: Path) -> None:
    """Turn a vault into one of the first form: lines and uploads, and no summary of them."""
    with closing(sqlite3.connect(path)) as db:
        db.executescript(
            "DROP TABLE summary; DROP TABLE nodes; DROP TRIGGER uploads_delete;"
            f"{journals._OLD_GUARD}; PRAGMA user_version = 1;"
        )


@dataclass
class Work:
    """What openings of vaults have done: lines read and checked, and steps of SQLite's machine."""

    lines: int = 0
    steps: int = 0


def counted(monkeypatch) -> Work:
    """Count the work of every journal that is opened from now on."""
    work, plain, connect = Work(), journals.link_line, journals._connect

    def chained(*parts):
        work.lines += 1
        return plain(*parts)

    def step() -> int:
        work.steps += 1
        return 0

    def connected(*words):
        connection = connect(*words)
        connection.set_progress_handler(step, 1)
        return connection

    monkeypatch.setattr(journals, "link_line", chained)
    monkeypatch.setattr(journals, "_connect", connected)
    return work
