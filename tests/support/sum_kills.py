"""A federation of the sum view whose clients and server are killed over and over.

    python -m support.sum_kills FOLDER KILLS SEED [STEP] [forgetful]

The parent forks a server for every life, which leads a run of five clients with vaults. Each answer
is made in a process of its own, which may be killed with SIGKILL: before the message is looked at,
at any named moment of a write of its vault, or when the answer is made and not yet sent. At some
message the server is killed as well, and the next life resumes the run. What may have left a client
is written down before it is sent, and held against the vaults after every life:

    neither account is exceeded, and both are worth what left · a round has one input of a client,
    one set, and no client's two shares · no set is smaller than honest + corrupt

With KILLS = 0 every moment comes at least once: a client's and the server's, at each of the five
messages, or at one STEP. A forgetful client does not book what a sum costs alone, which must be
noticed. Prints one JSON object. A process of its own because a fork of a test's would take threads.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from sottovoce.client import device, messages
from sottovoce.client.node import Node
from sottovoce.client.vault import Vault, chain, resume
from sottovoce.errors import PolicyRefusal
from sottovoce.privacy.tank import FULL
from sottovoce.server.coordinator import Patience
from support.devices import digest, memory
from support.federations import go
from support.in_process import Direct, plan
from support.sum_rounds import sum_nodes

CLIENTS, HONEST, CORRUPT, ROUNDS = 5, 2, 1, 6
STEPS = ("keys", "shares", "input", "set", "unmask")
WRITING = ("keys", "shares", "input", "set")  # messages for which a vault notes something
MOMENTS = ("before", "begun", "inserted", "committed", "witness written", "witnessed", "after")
SENSITIVITY = 2**31
TERMS = {
    **{"privacy.view": "sum", "privacy.honest": HONEST, "privacy.corrupt": CORRUPT},
    **{"data.clients": CLIENTS, "rounds.rounds": ROUNDS},
}


@dataclass(frozen=True)
class Kill:
    """Who is killed, at which message and moment.

    A message is the `number`-th of a life; or of its `step` in a round in which nobody was killed,
    so that one life has many kills, and each of them meets a whole cohort.
    """

    server: bool
    moment: str
    number: int
    step: str = ""


class Killer:
    """Answers a server's messages, in a process that forks safely: it never loads JAX."""

    def __init__(self, kills: list[Kill], log: Path) -> None:
        self.kills, self.log, self.seen = kills, log, Counter[Any]()
        self.struck: int | None = None  # the round of the last kill by name

    def serve(self, server: Connection, nodes: dict[str, Node]) -> None:
        """Answer until the server is gone; with each answer, whether the server is to die."""
        by_name = {node.name: node for node in nodes.values()}
        with suppress(EOFError):
            while True:
                blob, name = server.recv()
                server.send(self.answer(blob, by_name[name]))

    def answer(self, blob: bytes, node: Node) -> tuple[bytes | None, bool]:
        """One answer, None of a client that was killed, and whether the server is killed now."""
        head = messages.unpack(blob)[0]
        step = head["sum"]["step"] if "sum" in head else head["step"]
        kill = self._find_kill(step, _round_of(head))
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            with suppress(BaseException):
                os.close(reading)
                self._answer(blob, node, head, step, writing, kill)
            os._exit(1)
        os.close(writing)
        with os.fdopen(reading, "rb") as pipe:
            said = pipe.read()
        ended = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if kill is not None and (kill.server or ended == -signal.SIGKILL):
            who = "server" if kill.server else "client"
            self._note({"kill": who, "at": kill.moment, "step": step})
        if ended > 0:
            self._note({"error": f"a client ended in an error at {step}"})
        return (said if ended == 0 else None), kill is not None and kill.server

    def _find_kill(self, step: str, t: int) -> Kill | None:
        """Count a message; return the kill that it meets, once."""
        self.seen["", 0] += 1
        self.seen[step, t] += 1
        for kill in self.kills:
            at = self.seen[(kill.step, t) if kill.step else ("", 0)]
            if kill.step in ("", step) and at == kill.number:
                if kill.step:
                    if self.struck == t:
                        return None
                    self.struck = t
                self.kills.remove(kill)
                return kill
        return None

    def _answer(
        self, blob: bytes, node: Node, head: Any, step: str, pipe: int, kill: Kill | None
    ) -> None:
        at = kill.moment if kill is not None else ""
        if at == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        chain.pass_step = lambda moment: (
            os.kill(os.getpid(), signal.SIGKILL) if moment.endswith(f": {at}") else None
        )
        said = device.answer_request(blob, node)
        self._note({"client": node.name, "step": step, **_describe(head, step, said)})
        if at == "after" and kill is not None and not kill.server:
            os.kill(os.getpid(), signal.SIGKILL)
        with os.fdopen(pipe, "wb") as out:
            out.write(said)
        os._exit(0)

    def _note(self, line: dict[str, Any]) -> None:
        with self.log.open("ab") as file:
            file.write(json.dumps(line).encode() + b"\n")


def _describe(head: Any, step: str, said: bytes) -> dict[str, Any]:
    """What an answer tells the server, as far as the promises are about it."""
    told = messages.unpack(said, words=step == "input")[0]
    line = {"kind": told["kind"], "run": head["run"], "t": _round_of(head), "sha": digest(said)}
    if told["kind"] == "input":
        line["noise"] = told["noise"]
    if told["kind"] == "unmask":
        line |= {"set": sorted(head["set"]), "seed": list(told["seed"]), "key": list(told["key"])}
    return line


def _round_of(head: Any) -> int:
    return int(head["t"] if "t" in head else head["round"]["t"])


def hold(nodes: dict[str, Node], log: Path, spent: dict[str, int]) -> Counter[str]:
    """What is wrong with the clients, after all that ever left them."""
    wrong, sets, inputs = Counter[str](), dict[Any, set[str]](), dict[Any, dict[str, int]]()
    shares: dict[Any, dict[str, set[str]]] = {}
    for line in map(json.loads, log.read_text("utf-8").splitlines()):
        if "error" in line:
            wrong[line["error"]] += 1
        if line.get("kind") == "input":
            inputs.setdefault((line["client"], line["run"], line["t"]), {})[line["sha"]] = line[
                "noise"
            ]
        if line.get("kind") == "unmask":
            sets.setdefault((line["run"], line["t"]), set()).add(json.dumps(line["set"]))
            known = shares.setdefault((line["client"], line["run"], line["t"]), {})
            for share in ("seed", "key"):
                known.setdefault(share, set()).update(line[share])
            wrong["a set is too small"] += len(line["set"]) < HONEST + CORRUPT
    wrong["a round has two sets"] += sum(len(found) > 1 for found in sets.values())
    wrong["a round has two inputs of a client"] += sum(len(sent) > 1 for sent in inputs.values())
    wrong["both shares of a client"] += sum(bool(k["seed"] & k["key"]) for k in shares.values())
    for node in nodes.values():
        left = [noise for key, sent in inputs.items() if key[0] == node.name
                for noise in sent.values()]  # fmt: skip
        with Vault.open(node.vault, dataset=None) as vault:
            worth = sum(Fraction(SENSITIVITY, noise) ** 2 for noise in left)
            booked = Fraction(vault.alone, FULL) * Fraction(vault.capacity)
            wrong["more left than both accounts say"] += worth > booked
            wrong["an account is exceeded"] += (
                vault.spent > vault.limit or vault.alone > vault.limit_alone
            )
            wrong["a debit was taken back"] += vault.spent < spent.get(node.name, 0)
            spent[node.name] = vault.spent
            lines = [(at.kind, at.facts) for at in vault.lines()]
        stored = [(f["run"], f["t"]) for kind, f in lines if kind == "store"]
        wrong["a round is stored twice"] += len(set(stored)) < len(stored)
    return +wrong


def play(folder: Path, kills: int, seed: int, step: str = "", mutant: str = "") -> dict[str, Any]:
    """Kill so often, or once at every moment, and say what was seen."""
    if mutant:
        book: Any = Vault.reserve
        Vault.reserve = lambda *a, alone=None, **k: book(*a, **k)  # type: ignore[method-assign]
    rng, counted, wrong = np.random.default_rng(seed), Counter[str](), Counter[str]()
    every = [
        Kill(server, moment, 1 + at % CLIENTS, name)
        for at, (server, name, moment) in enumerate(
            (server, name, moment)
            for server, name in itertools.product((False, True), STEPS)
            for moment in (MOMENTS if server or name in WRITING else ("before", "after"))
        )
        if step in ("", name)
    ]
    missing = {(kill.server, kill.step, kill.moment): kill for kill in every}
    nodes: dict[str, Node] | None = None
    while missing if kills == 0 else counted["killed"] < kills:
        if nodes is None:
            counted["federations"] += 1
            home = folder / str(counted["federations"])
            nodes, log, spent = sum_nodes(home, CLIENTS), home / "left.jsonl", dict[str, int]()
            log.touch()
        for node in nodes.values():
            with suppress(PolicyRefusal):  # two debits in a row were burnt: its operator's word
                resume(node.vault)
                counted["resumed"] += 1
        if kills == 0:
            wanted = [kill for kill in missing.values() if not kill.server]
            wanted = wanted or list(missing.values())[:1]
        else:
            wanted = [
                Kill(False, str(rng.choice(MOMENTS)), number=int(n))
                for n in np.flatnonzero(rng.random(150) < 0.05) + 1
            ]
            wanted += [Kill(True, str(rng.choice(MOMENTS)), number=int(rng.integers(1, 150)))]
        before = log.read_text("utf-8").count('"kill"')
        ended = _lead(nodes, home / "run", wanted, log)
        for line in log.read_text("utf-8").splitlines():
            if '"kill"' in line and before <= 0:
                told = json.loads(line)
                counted["killed"] += 1
                missing.pop((told["kill"] == "server", told["step"], told["at"]), None)
                counted[f"{told['kill']}, {told['step']}, {told['at']}"] += 1
            before -= '"kill"' in line
        wrong.update(hold(nodes, log, spent))
        counted["lives"] += 1
        if ended not in (0, -signal.SIGKILL):
            wrong[f"a server ended with {ended}"] += 1
        if ended != -signal.SIGKILL:
            nodes = None
        if kills == 0 and counted["lives"] > 3 * len(every):
            wrong["moments that never came"] += len(missing)
            break
    return {"counted": counted, "wrong": +wrong}


def _ask(clients: Connection, blob: bytes, node: Node) -> bytes | None:
    """Ask a client, and die with it if that is to be."""
    clients.send((blob, node.name))
    said, dies = clients.recv()
    if dies:
        os.kill(os.getpid(), signal.SIGKILL)
    return said  # type: ignore[no-any-return]


def _lead(nodes: dict[str, Node], out: Path, kills: list[Kill], log: Path) -> int:
    """One life of a server; how it ended (−9: killed)."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            here, there = Pipe()
            if os.fork() == 0:
                here.close()
                Killer(kills, log).serve(there, nodes)
                os._exit(0)
            there.close()
            transport = Direct(nodes)
            transport.answer = partial(_ask, here)  # type: ignore[assignment]
            patience = Patience(CLIENTS, gathering=0.5)
            resumed = (out / "checkpoint.npz").exists()
            done = go(transport, out, own=plan(**TERMS), patience=patience, resume=resumed)
            code = 0 if done.record["status"] == "finished" else 3
        except BaseException as error:
            print(f"{type(error).__name__}: {error}", file=sys.stderr)
        os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def killed(kills: int, seed: int, *more: str) -> dict[str, Any]:
    """What so many kills brought to light, in a process of its own."""
    with memory() as folder:  # a kill loses no page of a file, so a disk would only be slower
        words = [str(folder), str(kills), str(seed), *more]
        done = subprocess.run(
            [sys.executable, "-m", "support.sum_kills", *words],
            capture_output=True,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
        )
    assert done.returncode == 0, done.stderr
    seen: dict[str, Any] = json.loads(done.stdout)
    return {**seen, "said": done.stderr}


def killed_side_by_side(each: Iterable[tuple[Any, ...]]) -> dict[str, Any]:
    """The same of several `killed`, at once: most of a life is waiting for the next process."""
    with ThreadPoolExecutor() as pool:
        seen = list(pool.map(lambda words: killed(*words), each))
    counted = sum((Counter(part["counted"]) for part in seen), Counter[str]())
    wrong = sum((Counter(part["wrong"]) for part in seen), Counter[str]())
    return {"counted": counted, "wrong": dict(wrong), "said": [part["said"] for part in seen]}


if __name__ == "__main__":
    where, number, start, *rest = sys.argv[1:]
    print(json.dumps(play(Path(where), int(number), int(start), *rest)))
