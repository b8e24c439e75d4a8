"""Damage to a vault's files, one kind at a time, and what opening it says afterwards."""

from __future__ import annotations

import contextlib
import json
import random
import shutil
import sqlite3
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from sottovoce.client.vault import Vault
from sottovoce.client.vault.chain import GENESIS, encode_canonical, link_line
from sottovoce.errors import VaultRefusal
from support.vault_play import DATASET, POLICY, Known, play, used

Damage = Callable[[Path, random.Random], None]


def in_place(path: Path, content: bytes) -> None:
    """Other content in the same file: its inode does not give it away."""
    with path.open("r+b") as file:
        file.write(content)
        file.truncate()


def flip(path: Path, rng: random.Random) -> None:
    content = bytearray(path.read_bytes())
    for _ in range(rng.choice((1, 1, 1, 4))):
        content[rng.randrange(len(content))] ^= rng.randrange(1, 256)
    in_place(path, bytes(content))


def truncate(path: Path, rng: random.Random) -> None:
    content = path.read_bytes()
    in_place(path, content[: rng.choice((0, 100, 4096, rng.randrange(len(content))))])


def blank(path: Path, rng: random.Random) -> None:
    content = bytearray(path.read_bytes())
    at, size = rng.randrange(len(content)), rng.choice((16, 512, 4096))
    content[at : at + size] = rng.choice((b"\0", b"\xff")) * len(content[at : at + size])
    in_place(path, bytes(content))


def shift(path: Path, rng: random.Random) -> None:
    content = path.read_bytes()
    at = rng.randrange(len(content))
    in_place(path, content[:at] + rng.randbytes(rng.choice((1, 512))) + content[at:])


def older(path: Path, rng: random.Random) -> None:
    in_place(path, rng.choice(_states(path)).read_bytes())


def clone(path: Path, rng: random.Random) -> None:
    gone(path, rng)
    shutil.copy2(_kept(path), path)


def old_clone(path: Path, rng: random.Random) -> None:
    gone(path, rng)
    shutil.copy2(rng.choice(_states(path)), path)


def other_vault(path: Path, rng: random.Random) -> None:
    in_place(path, path.with_name("other.vault").read_bytes())


def no_witness(path: Path, rng: random.Random) -> None:
    Path(f"{path}.witness").unlink()


def broken_witness(path: Path, rng: random.Random) -> None:
    flip(Path(f"{path}.witness"), rng)


def empty_witness(path: Path, rng: random.Random) -> None:
    Path(f"{path}.witness").write_bytes(b"")


def lying_witness(path: Path, rng: random.Random) -> None:
    """Claims more lines, or another hash, than there are."""
    file = Path(f"{path}.witness")
    facts = json.loads(file.read_text())
    facts |= rng.choice(({"seq": facts["seq"] + 1}, {"hash": "ab" * 32}, {"vault": "ab" * 16}))
    file.write_text(encode_canonical(facts))


def gone(path: Path, rng: random.Random) -> None:
    path.rename(_kept(path))


def emptied(path: Path, rng: random.Random) -> None:
    in_place(path, b"")


def row(path: Path, rng: random.Random) -> None:
    """One line edited by hand, its hash left as it was."""
    with unguarded_file(path) as db:
        rows = db.execute("SELECT seq, payload FROM entries WHERE kind = 'reserve'").fetchall()
        seq, payload = rng.choice(rows)
        facts = json.loads(payload)
        facts["units"] = [1 for _ in facts["units"]]
        db.execute("UPDATE entries SET payload = ? WHERE seq = ?", (encode_canonical(facts), seq))


def rehashed(path: Path, rng: random.Random) -> None:
    """One debit made smaller, and every hash after it computed anew."""
    with unguarded_file(path) as db:
        rows = db.execute("SELECT seq, time, kind, payload FROM entries ORDER BY seq").fetchall()
        chosen = rng.choice([seq for seq, _, kind, _ in rows if kind == "reserve"])
        _rewrite(db, rows, chosen)


def rehashed_and_cut(path: Path, rng: random.Random) -> None:
    """The last lines removed, with their uploads: the chain itself is whole."""
    with unguarded_file(path) as db:
        (last,) = db.execute("SELECT max(seq) FROM entries").fetchone()
        keep = rng.randrange(1, last)
        db.execute("DELETE FROM entries WHERE seq > ?", (keep,))
        db.execute("DELETE FROM uploads WHERE seq > ?", (keep,))


def deleted(path: Path, rng: random.Random) -> None:
    with unguarded_file(path) as db:
        (last,) = db.execute("SELECT max(seq) FROM entries").fetchone()
        db.execute("DELETE FROM entries WHERE seq = ?", (rng.randrange(1, last + 1),))


def upload_swapped(path: Path, rng: random.Random) -> None:
    with unguarded_file(path) as db:
        db.execute("UPDATE uploads SET content = x'00' WHERE t = ?", (rng.randrange(6),))


def upload_deleted(path: Path, rng: random.Random) -> None:
    with unguarded_file(path) as db:
        db.execute("DELETE FROM uploads WHERE t = ?", (rng.randrange(6),))


def summary_edited(path: Path, rng: random.Random) -> None:
    """A number of the summary made smaller, or the one of an older state put in its place."""
    with unguarded_file(path) as db:
        (content,) = db.execute("SELECT content FROM summary").fetchone()
        facts = json.loads(content)
        older = sqlite3.connect(rng.choice(_states(path)))
        found = older.execute("SELECT content FROM summary").fetchone()
        older.close()
        facts[rng.choice(("spent", "seq", "capacity"))] //= 2
        content = found[0] if found and rng.random() < 0.5 else encode_canonical(facts)
        db.execute("UPDATE summary SET content = ?", (content,))


def summary_deleted(path: Path, rng: random.Random) -> None:
    """No summary: then all lines count."""
    with unguarded_file(path) as db:
        db.execute("DELETE FROM summary")


def record_edited(path: Path, rng: random.Random) -> None:
    """A round or a run forgotten, or a node of an older state."""
    with unguarded_file(path) as db:
        places = db.execute("SELECT place, content FROM nodes WHERE content LIKE '{%'").fetchall()
        place, content = rng.choice(places)
        records = json.loads(content)
        del records[rng.choice(list(records))]
        db.execute(
            "UPDATE nodes SET content = ? WHERE place = ?", (encode_canonical(records), place)
        )


def record_deleted(path: Path, rng: random.Random) -> None:
    with unguarded_file(path) as db:
        places = db.execute("SELECT place FROM nodes").fetchall()
        db.execute("DELETE FROM nodes WHERE place = ?", rng.choice(places))


def unguarded(path: Path, rng: random.Random) -> None:
    """The guards against changes taken away, and nothing else."""
    db = sqlite3.connect(path)
    db.execute("DROP TRIGGER entries_delete")
    db.close()


KINDS: tuple[Damage, ...] = (
    flip, flip, flip, flip, flip, flip, truncate, truncate, blank, blank, shift, older, clone,
    old_clone, other_vault, no_witness, broken_witness, empty_witness, lying_witness, gone,
    emptied, row, rehashed, rehashed_and_cut, deleted, upload_swapped, upload_deleted, unguarded,
    summary_edited, summary_deleted, record_edited, record_deleted,
)  # fmt: skip


def damage_and_look(folder: Path, *, trials: int, seed: int) -> Counter[str]:
    """Damage a vault `trials` times; every time it is refused, or is what it was."""
    rng = random.Random(seed)
    path = folder / "ward.vault"
    known = used(path)
    used(folder / "other.vault")
    for number in range(3):
        shutil.copy2(path, folder / f"state-{number}")
        with Vault.open(path, dataset=DATASET) as vault:
            play(vault, known, f"run-{number}", range(2))
    whole, witness = path.read_bytes(), Path(f"{path}.witness").read_bytes()
    seen: Counter[str] = Counter()
    kinds = list(KINDS)
    for trial in range(trials):
        if trial % len(kinds) == 0:
            rng.shuffle(kinds)
        kind = kinds[trial % len(kinds)]
        kind(path, rng)
        try:
            seen[_look(path, known)] += 1
        except AssertionError as error:
            raise AssertionError(f"{kind.__name__}, trial {trial}, seed {seed}") from error
        if _kept(path).exists():
            _kept(path).replace(path)
        Path(f"{path}-journal").unlink(missing_ok=True)
        in_place(path, whole)
        Path(f"{path}.witness").write_bytes(witness)
    assert _look(path, known) == "same"
    return seen


def _look(path: Path, known: Known) -> str:
    """Open the vault: refused, or with exactly what was booked and stored before."""
    try:
        with Vault.open(path, dataset=DATASET) as vault:
            known.held_by(vault)
        return "same"
    except VaultRefusal:
        pass
    if Path(f"{path}.witness").exists():  # then nothing makes a fresh start of it, either
        try:
            Vault.create(path, POLICY, dataset=DATASET, second_ledger=True).close()
        except VaultRefusal:
            return "refused"
        raise AssertionError("a fresh vault took the place of a damaged one")
    return "refused"


def _states(path: Path) -> list[Path]:
    return sorted(path.parent.glob("state-*"))


def _kept(path: Path) -> Path:
    return path.with_name("kept")


@contextlib.contextmanager
def unguarded_file(path: Path) -> Iterator[sqlite3.Connection]:
    """The file without its guards, which are put back afterwards."""
    db = sqlite3.connect(path)
    guards = db.execute("SELECT name, sql FROM sqlite_master WHERE type = 'trigger'").fetchall()
    for name, _ in guards:
        db.execute(f"DROP TRIGGER {name}")
    yield db
    for _, statement in guards:
        db.execute(statement)
    db.commit()
    db.close()


def _rewrite(db: sqlite3.Connection, rows: list[Any], chosen: int) -> None:
    prev = GENESIS
    for seq, time, kind, payload in rows:
        if seq == chosen:
            facts = json.loads(payload)
            payload = encode_canonical(facts | {"units": [1 for _ in facts["units"]]})
        line = link_line(prev, seq, time, kind, payload)
        db.execute(
            "UPDATE entries SET payload = ?, prev = ?, hash = ? WHERE seq = ?",
            (payload, line.prev, line.hash, seq),
        )
        prev = line.hash
