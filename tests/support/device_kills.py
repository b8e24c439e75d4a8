"""A device that is killed over and over while a server asks it; run as a process of its own.

    python device_kills.py FOLDER KILLS SEED [MUTANT]

The parent has everything loaded and forks a child for every life. A child answers requests in a
loop and writes every answer into a pipe: what is in the pipe has left the machine. The child is
killed with SIGKILL, half of the time at a random moment and half of the time at one of the vault's
named steps; the parent reads the pipe and holds the vault against all answers that ever left:

    debited ≥ released · no round has two different answers · the next life goes on by itself,
    or after its operator's word if two lives in a row were killed between a debit and its upload.

Prints one JSON object. A process of its own because a fork of a test's process would take threads.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import struct
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np

from sottovoce.client import device
from sottovoce.client.node import Node
from sottovoce.client.vault import Reservation, Vault, VaultReceipt, chain, chest, resume
from sottovoce.privacy import grid
from support.devices import (
    RUN,
    SAMPLES,
    ask,
    books_hold,
    digest,
    kind,
    make_node,
    memory,
    model,
    rows,
    told,
)
from support.mutated_module import mutated
from support.vault_steps import STEPS

HORIZON = 40  # rounds of one vault; then a new one begins
MOMENTS = [step for step in STEPS if step.startswith(("reserve", "store"))]
STORE = "vault.store(reserved, upload.blob)\n            return upload.blob\n"
RESERVE = "reserved = vault.reserve(\n"
LATER = "SENT(upload.blob)\n            vault.store({}, upload.blob)\n            return b''\n"


def ledger_after_send() -> ModuleType:
    """A device that sends first and books afterwards."""
    module = mutated(
        "sottovoce.client.device",
        RESERVE,
        "reserved = Later(receipt=vault.receipt())\n            book = lambda: vault.reserve(\n",
        (STORE, LATER.format("book()")),
    )
    module.Later = SimpleNamespace  # type: ignore[attr-defined]
    return module


def refund_on_timeout() -> ModuleType:
    """A device that takes a debit back when it is asked again: the upload cannot have arrived."""
    module = mutated(
        "sottovoce.client.device",
        RESERVE,
        "reserved = TAKEN_BACK(vault, entry) if entry else vault.reserve(\n",
        (STORE, LATER.format("reserved")),
    )

    def taken_back(vault: Vault, before: Any) -> Reservation:
        line = vault._chest._journal.line(before.seq)
        assert line is not None
        receipt = VaultReceipt(vault.id, line.seq, line.hash)
        vault._live[line.seq] = Reservation(before.run, before.t, receipt)
        return vault._live[line.seq]

    module.TAKEN_BACK = taken_back  # type: ignore[attr-defined]
    return module


def not_stored() -> ModuleType:
    """A device that sends without keeping what it sent."""
    return mutated("sottovoce.client.device", STORE, "return upload.blob\n")


MUTANTS = {
    "ledger after send": ledger_after_send,
    "refund on timeout": refund_on_timeout,
    "nothing stored": not_stored,
}


def live(node: Node, pipe: int, answer: Any, life: Life) -> None:
    """One life: answer what the server asks until the parent, or the step, kills it."""
    left = life.times

    def reached(step: str) -> None:
        nonlocal left
        left -= step == life.at
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    if life.at is not None:
        chain.pass_step = reached
    chest.SUMMARY_EVERY, seen = 3, life.seen
    for t in range(life.first, HORIZON):
        sent = answer(_request(t, seen), node)
        if sent:
            _send(pipe, sent)
            seen = _receipt(sent)


@dataclass(frozen=True)
class Life:
    """How one life goes: the round it begins with, and where it ends."""

    first: int
    at: str | None  # the named step; None: at any moment
    times: int  # it is killed when it comes there so often
    seconds: float
    seen: VaultReceipt | None = None  # the newest that the server has


def lived(node: Node, module: ModuleType, life: Life) -> tuple[list[bytes], int]:
    """Fork, live, kill; the answers that left, and how it ended (−9: killed)."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        with contextlib.suppress(BaseException):
            os.close(reading)
            module.SENT = lambda blob: _send(writing, blob)  # type: ignore[attr-defined]
            live(node, writing, module.answer_request, life)
            code = 0
        os._exit(code)
    os.close(writing)
    if life.at is None:
        time.sleep(life.seconds)
        os.kill(child, signal.SIGKILL)
    answers = left(reading)
    os.close(reading)
    return answers, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def _request(t: int, seen: VaultReceipt | None = None) -> bytes:
    params = model("svm", 0.1 + t)
    return ask("svm", t=t, horizon=HORIZON, params=params, receipt=seen).to_blob()


def _receipt(blob: bytes) -> VaultReceipt | None:
    return VaultReceipt.from_json(told(blob)["receipt"]) if kind(blob) == "upload" else None


def _send(pipe: int, blob: bytes) -> None:
    frame = struct.pack("<I", len(blob)) + blob
    assert len(frame) < 4096, "a pipe takes it whole or not at all"
    os.write(pipe, frame)


def left(pipe: int) -> list[bytes]:
    """The answers in the pipe of a life that has ended."""
    data = b""
    while part := os.read(pipe, 1 << 20):
        data += part
    out = []
    while data:
        size = struct.unpack("<I", data[:4])[0]
        out.append(data[4 : 4 + size])
        data = data[4 + size :]
    return out


def mu2(blob: bytes, samples: int) -> Fraction:
    """What an answer that left is worth, by the σ it states (Δ = 2ηC/n, η = C = 1)."""
    one = grid.grid_unit(1.0) / samples
    noise = [round(sigma / one) for sigma in told(blob)["sigma"]]
    return sum(
        (Fraction(grid.grid_sensitivity("record", samples), n) ** 2 for n in noise), Fraction(0)
    )


class Client:
    """One client, and all that ever left it."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.node = make_node(folder, rows(seed, 2), classes=2)
        self.seen: dict[int, bytes] = {}
        self.worth, self.spent, self.is_empty = Fraction(0), 0, False

    def hold(self, answers: list[bytes]) -> list[str]:
        """What is wrong with the client after these answers have left it."""
        wrong = []
        for blob in answers:
            if kind(blob) != "upload":
                self.is_empty = True
                if kind(blob) != "empty":
                    wrong.append(f"an honest request was refused: {kind(blob)}")
                continue
            t = told(blob)["t"]
            if t in self.seen and self.seen[t] != blob:
                wrong.append("a round has two answers")
            if self.seen.get(t) != blob:
                self.worth += mu2(blob, SAMPLES)
            self.seen[t] = blob
        books = books_hold(self.node)
        if self.worth > books.booked:
            wrong.append("released more than was debited")
        if books.spent < self.spent:
            wrong.append("a debit was taken back")
        if any(books.answers.get((RUN, t)) != digest(blob) for t, blob in self.seen.items()):
            wrong.append("an answer left and is not stored")
        self.spent = books.spent
        return wrong


def play(folder: Path, kills: int, seed: int, mutant: str | None) -> dict[str, Any]:
    """Kill so often, and say what was seen."""
    rng, counted, wrong = np.random.default_rng(seed), Counter[str](), Counter[str]()
    module = MUTANTS[mutant]() if mutant else device
    client: Client | None = None
    moments = itertools.cycle(rng.permutation(MOMENTS))
    while counted["killed"] < kills and counted["ended"] < 10 * kills:
        if client is None:
            counted["vaults"] += 1
            client = Client(folder / str(counted["vaults"]), counted["vaults"])
            began = time.perf_counter()
            wrong.update(client.hold([device.answer_request(_request(0), client.node)]))
            typical = time.perf_counter() - began  # of an answer
        with Vault.open(client.node.vault, dataset=None) as vault:
            stopped = vault.is_stopped
        if stopped:  # two debits in a row were burnt: a word of its operator
            counted["resumed"] += 1
            resume(client.node.vault)
        newest = max(client.seen, default=0)  # those before it are dropped
        life = Life(
            first=newest,
            seen=_receipt(client.seen[newest - 1]) if newest - 1 in client.seen else None,
            at=str(next(moments)) if rng.integers(2) else None,
            times=int(rng.integers(1, 5)),
            seconds=float(rng.uniform(0, 6 * typical)),
        )
        answers, ended = lived(client.node, module, life)
        counted["killed" if ended == -signal.SIGKILL else "ended"] += 1
        counted[life.at or "at any moment"] += ended == -signal.SIGKILL
        counted["answers"] += len(answers)
        if ended > 0:
            wrong["a life ended in an error"] += 1
        try:
            wrong.update(client.hold(answers))
        except AssertionError as error:
            wrong[f"the books do not hold: {error}"] += 1
        if client.is_empty or ended == 0:
            client = None
    return {"counted": counted, "wrong": wrong}


def killed(kills: int, seed: int, mutant: str | None = None) -> dict[str, dict[str, int]]:
    """What so many kills brought to light, in a process of its own."""
    with memory() as folder:  # a kill loses no page of a file, so a disk would only be slower
        done = subprocess.run(
            [
                *(sys.executable, "-W", "error", "-m", "support.device_kills", str(folder)),
                *(str(kills), str(seed), *([mutant] if mutant else [])),
            ],
            capture_output=True,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
        )
    assert done.returncode == 0, done.stderr
    seen: dict[str, Any] = json.loads(done.stdout)
    return seen


if __name__ == "__main__":
    where, number, start, *kinds = sys.argv[1:]
    print(json.dumps(play(Path(where), int(number), int(start), kinds[0] if kinds else None)))
