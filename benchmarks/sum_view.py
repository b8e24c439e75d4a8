"""What the sum view adds to a round: CPU seconds of a client and of the server, beside their floor.

A client's floor is one stream of AES-256-CTR, eight bytes a parameter, for itself and for every
other client. The server's is one for every client of the set, and one for every pair of a client of
the set and one that dropped out after it dealt its shares. Gradients and noise are left out. Run it
with

    python benchmarks/sum_view.py
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "src"))

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from kept import keep

from sottovoce.client import messages, sum_protocol
from sottovoce.client.sum_protocol import MemoryNotes, Party, SumTerms
from sottovoce.server import sum_round

PARAMETERS = 200_000
RUN, REQUEST = "be9c4a11", "ab" * 32
CASES = ((10, 0), (10, 1), (100, 0), (100, 10))  # clients, and how many of them drop out


class Zeros:
    """A booking that releases masked zeros."""

    request, samples, size = REQUEST, 100, PARAMETERS

    def price(self) -> tuple[int, float]:
        return 2**34, 4.0

    def release(self, noise: int, mask: sum_protocol.Words) -> bytes:
        return messages.pack({"noise": noise}, {"masked": mask})


def measure_round(clients: int, lost: int) -> tuple[float, float]:
    """Return the CPU seconds of the slowest client, and of the server, in one round."""
    keys = [Ed25519PrivateKey.generate() for _ in range(clients)]
    roster = frozenset(sum_protocol.name_key(key.public_key()) for key in keys)
    corrupt = clients // 10
    terms = SumTerms(roster, clients // 2, corrupt)
    parties = {p.member: p for p in (Party(key, terms, MemoryNotes()) for key in keys)}
    gone, spent = set(sorted(parties)[:lost]), dict.fromkeys(parties, 0.0)

    def ask(step: str, heads: dict[str, dict[str, Any]]) -> Mapping[str, sum_round.Answer]:
        answers = {}
        for member, head in heads.items():
            if member in gone and step in ("input", "set", "unmask"):
                continue
            began = time.process_time()
            blob = parties[member].answer(head, RUN, 0, Zeros())
            spent[member] += time.process_time() - began
            answers[member] = messages.unpack(blob, words=step == "input")
        return answers

    began = time.process_time()
    result = sum_round.play_sum_round(
        ask,
        list(parties),
        run=RUN,
        t=0,
        request=REQUEST,
        size=PARAMETERS,
        threshold=sum_protocol.choose_threshold(clients, clients // 2, corrupt),
    )
    assert len(result.keys) == clients - lost
    assert not result.total.any()
    return max(spent.values()), time.process_time() - began - sum(spent.values())


def measure_floor(streams: int) -> float:
    """Return the CPU seconds of so many streams."""
    began = time.process_time()
    for _ in range(streams):
        sum_protocol.expand_mask(bytes(32), PARAMETERS)
    return time.process_time() - began


def main() -> None:
    began, kept = time.perf_counter(), {}
    for clients, lost in CASES:
        client, server = measure_round(clients, lost)
        floors = measure_floor(clients), measure_floor((clients - lost) * (1 + lost))
        name = f"{clients} clients, {lost} dropped out"
        kept[f"{name}: client"], kept[f"{name}: server"] = client, server
        kept[f"{name}: client's floor"], kept[f"{name}: server's floor"] = floors
        print(
            f"{name:32} client {client:.3f} s (floor {floors[0]:.3f}), "
            f"server {server:.2f} s (floor {floors[1]:.2f})"
        )
    minutes = (time.perf_counter() - began) / 60
    keep("sum_view", ("cryptography", "numpy"), kept, minutes=minutes)


if __name__ == "__main__":
    main()
