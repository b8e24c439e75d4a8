"""Cohorts of the sum view in one process: parties with small vectors, and a server that may lie.

`Cohorts.play` is an honest round; `change` may alter what the server sends, `answered` what a
client answers. `secrets_known` is what a server can compute from everything that clients said.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from sottovoce.client import messages
from sottovoce.client.node import Node
from sottovoce.client.release import MASKED
from sottovoce.client.sum_protocol import (
    MemoryNotes,
    Party,
    SumTerms,
    choose_threshold,
    name_key,
    write_keys,
)
from sottovoce.errors import SottovoceError
from sottovoce.schedules.pricing import Terms
from sottovoce.server.sum_round import SumResult, play_sum_round
from support.devices import make_node, make_vault
from support.in_process import draw

RUN, SIZE, REQUEST = "0badc0de", 6, "ab" * 32
SIGMA = 2**33
Head = dict[str, Any]


class Vector:
    """A booking whose input is a vector without noise: what is unmasked can be compared."""

    def __init__(self, values: np.ndarray, *, sigma: int = SIGMA, share: float = 2.0) -> None:
        self.request, self.samples, self.size = REQUEST, 12, len(values)
        self.values, self.sigma, self.share = values, sigma, share
        self.noises: list[int] = []  # what was released
        self.stored: bytes | None = None

    def release(self, noise: int, mask: np.ndarray) -> bytes:
        if self.stored is None:
            self.noises.append(noise)
            sent = self.values.astype(np.int64).view(np.uint64) + mask
            self.stored = messages.pack({"kind": "input", "noise": noise}, {MASKED: sent})
        return self.stored


def sum_nodes(
    folder: Path,
    count: int = 4,
    *,
    honest: int = 2,
    corrupt: int = 1,
    first: int = 40,
    **policy: Any,
) -> dict[str, Node]:
    """So many nodes with rows, vaults, keys and one roster, by route; `first` rows of the first."""
    keys = [Ed25519PrivateKey.generate() for _ in range(count)]
    nodes = {}
    for i, key in enumerate(keys):
        rows = draw(40 if i else first, 100 + i)
        make_node(folder, rows, classes=3, name=f"client-{i}", vault=False, **policy)
        write_keys(folder / f"key-{i}.pem", key, folder / "roster.pem", keys)
        path = folder / f"client-{i}.toml"
        table = (
            f'roster = "roster.pem"\nkey = "key-{i}.pem"\nhonest = {honest}\ncorrupt = {corrupt}'
        )
        path.write_text(f"{path.read_text()}[policy.sum]\n{table}\n")
        nodes[f"route-{i}"] = Node.load(path)
        make_vault(nodes[f"route-{i}"])
    return nodes


class Cohorts:
    """So many clients that know each other, and what passed between them and the server."""

    def __init__(self, count: int = 5, *, honest: int = 2, corrupt: int = 1) -> None:
        keys = [Ed25519PrivateKey.generate() for _ in range(count)]
        roster = frozenset(name_key(key.public_key()) for key in keys)
        self.honest, self.corrupt = honest, corrupt
        self.keys = {name_key(key.public_key()): key for key in keys}
        self.parties, self.bookings = {}, {}
        rng = np.random.default_rng(5)
        for name, key in self.keys.items():
            self.parties[name] = Party(key, SumTerms(roster, honest, corrupt), MemoryNotes())
            self.bookings[name] = Vector(rng.integers(-(2**30), 2**30, SIZE))
        self.names = list(self.parties)
        self.sent: list[tuple[str, str, Head]] = []  # step, member, the server's message
        self.said: list[tuple[str, str, Head]] = []  # step, member, the client's answer
        self.accepted: list[tuple[str, str, Head]] = []  # the server's messages that were answered
        self.refused: list[tuple[str, str, SottovoceError]] = []
        self.change: Callable[[str, str, Head], Head | None] = lambda step, member, head: head
        self.answered: Callable[[str, str, bytes], bytes | None] = lambda step, member, blob: blob

    @property
    def threshold(self) -> int:
        return choose_threshold(len(self.names), self.honest, self.corrupt)

    def tell(self, step: str, member: str, head: Head, t: int = 0) -> Head | None:
        """One message to one client; None where it refuses."""
        self.sent.append((step, member, head))
        try:
            blob = self.parties[member].answer(head, RUN, t, self.bookings[member])
        except SottovoceError as error:
            self.refused.append((step, member, error))
            return None
        self.blob = blob
        self.accepted.append((step, member, head))
        said = messages.unpack(blob, words=step == "input")[0]
        self.said.append((step, member, said))
        return said

    def ask(self, step: str, heads: dict[str, Head]) -> Mapping[str, Any]:
        answers = {}
        for member, head in heads.items():
            changed = self.change(step, member, head)
            if changed is None or self.tell(step, member, changed, self.t) is None:
                continue
            blob = self.answered(step, member, self.blob)
            if blob is not None:
                answers[member] = messages.unpack(blob, words=step == "input")
        return answers

    def play(self, *, t: int = 0, threshold: int | None = None, names: Any = None) -> SumResult:
        self.t = t
        honest = self.honest if threshold is None else threshold - self.corrupt
        return play_sum_round(
            self.ask,
            self.names if names is None else names,
            Terms(clients=9, per_round=9, honest=honest, corrupt=self.corrupt),
            run=RUN,
            t=t,
            request=REQUEST,
            size=SIZE,
        )

    def expect(self, members: Any) -> np.ndarray:
        return sum(self.bookings[m].values for m in members)

    def steps(self, step: str) -> dict[str, Head]:
        """What was said in one step, by member."""
        return {member: head for what, member, head in self.said if what == step}

    def find_exposed(self, corrupt: Any = ()) -> list[set[str]]:
        """The smallest groups of honest clients whose sum the server and these clients can compute.

        A seed or key is known with t shares, counting those that corrupt clients hold. Two honest
        inputs stay together while the stream that both added is unknown.
        """
        known: dict[str, dict[str, set[str]]] = {"seed": {}, "key": {}}
        for member, said in ((m, s) for step, m, s in self.said if step == "unmask"):
            for kind in known:
                for owner in said[kind]:
                    known[kind].setdefault(owner, set()).add(member)
        for owner in self.names:
            for kind in known:
                known[kind].setdefault(owner, set()).update(corrupt)
        least = min(
            [head["threshold"] for step, _, head in self.accepted if step == "unmask"],
            default=len(self.names) + 1,
        )
        opened = {
            k: {m for m, by in owners.items() if len(by) >= least} for k, owners in known.items()
        }
        partners = {
            member: set(head["shares"]) | {member}
            for step, member, head in self.accepted
            if step == "input"
        }
        left = {m for m in opened["seed"] & partners.keys() if m not in corrupt}
        groups = []
        while left:
            group, reached = set(), {min(left)}
            while reached:
                member = reached.pop()
                group.add(member)
                if member not in opened["key"]:
                    near = partners[member] - opened["key"] - set(corrupt)
                    reached |= {m for m in near & left if member in partners[m]} - group
            groups.append(group)
            left -= group
        return groups

    def is_safe(self, corrupt: Any = ()) -> bool:
        """Whether nobody's input is known but in a sum of h honest clients, released once."""
        once = all(len(booking.noises) <= 1 for booking in self.bookings.values())
        return once and all(len(g) >= self.honest for g in self.find_exposed(corrupt))
