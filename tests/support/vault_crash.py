"""A client that is killed again and again: a warm process forks it, and plays its server.

    python -m support.vault_crash KILLS SEED FOLDER [careless]   →  what happened, as JSON

First one client dies at each named step; then half of them at a step drawn at random, the others
whenever the signal comes. The server asks for the rounds it has no answer to, and now and then for
an old one. What it has got it acknowledges, and the vault drops what came before: asked again for
such a round, the client says nothing. Summaries are made every few lines, so that deaths meet them.
A careless client sends before it stores, to show that this would be noticed. Nothing is imported
that starts threads, so that forking is safe.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import random
import signal
import sys
import time
from collections import Counter
from pathlib import Path

from sottovoce.client.vault import Entry, Vault, VaultReceipt, chain, chest
from sottovoce.errors import VaultRefusal
from support.vault_play import POLICY, request
from support.vault_steps import STEPS

UNITS = 1_000_003
ROUNDS = 400  # of one run
CREATING = tuple(step for step in STEPS if step.startswith("create:"))
SERVING = tuple(step for step in STEPS if step.startswith(("reserve:", "store:")))
BETWEEN = ("reserved", "stored")  # what a device does between the vault's own steps
# The vault is ahead of its witness after a death between the two, and the next open mends that.
IN_TURN = (*CREATING, *SERVING, *BETWEEN, "reserve: committed", "open: witness written")


def dataset_of(path: Path) -> str:
    """Rows of this place alone: a creation that was killed is repeated without a word."""
    return hashlib.sha256(str(path).encode()).hexdigest()


Moment = tuple[str, int]  # die when this step is reached for the (n+1)-th time


def client(
    path: Path, ask: list[tuple[str, int]], seen: VaultReceipt | None, out: int,
    die_at: Moment | None, careless: bool,
) -> None:  # fmt: skip
    """Open the vault and answer rounds until killed: reserve → compute → store → send."""
    chest.SUMMARY_EVERY = 3
    if die_at is not None:
        left = Counter({die_at[0]: die_at[1]})

        def reached(step: str) -> None:
            if step in left:
                left[step] -= 1
                if left[step] < 0:
                    os.kill(os.getpid(), signal.SIGKILL)

        chain.pass_step = reached
    if not path.exists():
        Vault.create(path, POLICY, dataset=dataset_of(path)).close()
    with Vault.open(path, dataset=dataset_of(path)) as vault:
        for run, t in ask:
            found = vault.find(run, t)
            if found is not None and found.dropped:
                continue
            if found is not None and found.upload is not None:
                upload, place = found.upload, found.seq
                seen = VaultReceipt(vault.id, place, vault._chest._journal.line(place).hash)
            elif careless:
                upload = os.urandom(200)
                os.write(out, _told(run, t, upload, vault.receipt()))
                paid = vault.reserve(run, t, request(run, t), [UNITS], server="s", facts={})
                vault.store(paid, upload)
                continue
            else:
                paid = vault.reserve(
                    run, t, request(run, t), [UNITS], server="s", facts={}, acknowledged=seen
                )
                seen = paid.receipt  # of the answer that leaves next
                chain.pass_step("reserved")
                upload = os.urandom(200)  # fresh noise: never the same twice
                vault.store(paid, upload)
                chain.pass_step("stored")
            os.write(out, _told(run, t, upload, seen))


def _told(run: str, t: int, upload: bytes, receipt: VaultReceipt) -> bytes:
    place = f"{receipt.vault} {receipt.seq} {receipt.hash}"
    return f"{run} {t} {hashlib.sha256(upload).hexdigest()} {place}\n".encode()


def lifetime(
    path: Path, ask: list[tuple[str, int]], seen: VaultReceipt | None, die_at: Moment | None,
    delay: float, careless: bool,
) -> tuple[list[str], str]:  # fmt: skip
    """Fork one client, let it die, and return the lines that left it and how it died."""
    readable, writable = os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.close(readable)
            client(path, ask, seen, writable, die_at, careless)
            code = 0
        except VaultRefusal as no:
            os.write(2, f"{no}\n".encode())
        finally:
            os._exit(code)
    os.close(writable)
    if die_at is None:
        time.sleep(delay)
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
    with os.fdopen(readable) as pipe:
        text = pipe.read()
    status = os.waitpid(child, 0)[1]
    died = "killed" if os.WIFSIGNALED(status) else f"exit {os.waitstatus_to_exitcode(status)}"
    return text[: text.rfind("\n") + 1].splitlines(), died


def kill_and_look(
    folder: Path, *, kills: int, seed: int, careless: bool = False
) -> dict[str, object]:
    """Kill clients until `kills` of them have died; what left, and what the vault says of it."""
    rng = random.Random(seed)
    path = folder / "ward.vault"
    answers: dict[tuple[str, int], set[str]] = {}
    deaths: Counter[str] = Counter()
    left, turn, missed, seen = 0, list(IN_TURN), [], None
    while deaths["killed"] < kills:
        fresh = [divmod(len(answers) + i, ROUNDS) for i in range(6)]
        ask = [(f"run-{run}", t) for run, t in fresh]
        if answers and rng.random() < 0.5:
            ask.insert(0, rng.choice(list(answers)))
        moment = None
        if turn:
            moment = (turn[0], 0)
        elif rng.random() < 0.5:
            moment = (rng.choice((*SERVING, *BETWEEN)), rng.choice((0, 0, 1, 3)))
        lines, died = lifetime(path, ask, seen, moment, rng.uniform(0, 0.04), careless)
        deaths[died] += 1
        if turn and died != "killed":
            missed.append(turn[0])
        turn = turn[1:]
        for line in lines:
            run, t, digest, vault_id, seq, mark = line.split()
            seen = VaultReceipt(vault_id, int(seq), mark)
            answers.setdefault((run, int(t)), set()).add(digest)
            left += 1
        if died == "exit 1":
            break
    with Vault.open(path, dataset=None) as vault:  # the whole chain, and its summary
        stored = {place: vault.find(*place) for place in answers}
        return {
            "deaths": dict(deaths),
            "steps not reached": missed,
            "messages": left,
            "rounds": len(answers),
            "rounds with two answers": sum(len(found) > 1 for found in answers.values()),
            "answers that are not stored": sum(
                {vault._books.turn(*place).sha256} != answers[place]
                or (not entry.dropped and entry.upload is None)
                if entry is not None
                else True
                for place, entry in stored.items()
            ),
            "uploads dropped": sum(e is not None and e.dropped for e in stored.values()),
            "dropped too early": _too_early(stored),
            "released": UNITS * sum(map(len, answers.values())),
            "debited": vault.spent,
            "reserves": sum(1 for _ in vault.entries()),
        }


def _too_early(stored: dict[tuple[str, int], Entry | None]) -> int:
    """Count the runs whose newest answer is gone: nobody has acknowledged it."""
    newest: dict[str, list[int]] = {}
    for run, t in stored:
        newest.setdefault(run, []).append(t)
    return sum(
        entry is not None and entry.dropped and t == max(newest[run])
        for (run, t), entry in stored.items()
    )


if __name__ == "__main__":
    count, number, where, *how = sys.argv[1:]
    told = kill_and_look(Path(where), kills=int(count), seed=int(number), careless=bool(how))
    print(json.dumps(told))
