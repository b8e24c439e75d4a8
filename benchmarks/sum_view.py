"""What the sum view adds to a round: CPU seconds of a client and of the server, beside their floor.

A client's floor is one stream of AES-256-CTR, eight bytes a parameter, for itself and for every
other client. The server's is one for every client of the set, and one for every pair of a client of
the set and one that dropped out after it dealt its shares. Gradients and noise are left out. Run it
with

    python benchmarks/sum_view.py

Beside it: Flower's SecAgg+ in process. Its server workflow belongs to an API that our transport
does not have, so the four stages of its client mod are called one after the other, every client a
neighbour of every other one, and then what the server computes where nobody drops out: ten seeds
put together from shares, and their masks taken from the sum. It masks 32 bits a parameter and
quantises floats itself; it has no signatures and no roster. Measured is the CPU of each client and
of the server, without messages.
"""

from __future__ import annotations

import importlib
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "src"))

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from flwr.common import bytes_to_ndarray, ndarrays_to_parameters
from flwr.common.secure_aggregation.crypto.shamir import combine_shares
from flwr.common.secure_aggregation.ndarrays_arithmetic import (
    parameters_addition,
    parameters_mod,
    parameters_subtraction,
)
from flwr.common.secure_aggregation.secaggplus_constants import Key
from flwr.common.secure_aggregation.secaggplus_utils import pseudo_rand_gen
from kept import keep

from sottovoce.client import messages, sum_protocol
from sottovoce.client.sum_protocol import MemoryNotes, Party, SumTerms
from sottovoce.schedules.pricing import Terms
from sottovoce.server import sum_round

# The package has a function of the module's name.
secagg = importlib.import_module("flwr.client.mod.secure_aggregation.secaggplus_mod")
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


def measure_round(clients: int, lost: int) -> tuple[float, float, int]:
    """Return the CPU seconds of the slowest client, and of the server, in one round.

    And the most bytes of a client's messages, both ways, without the model and the masked input.
    """
    keys = [Ed25519PrivateKey.generate() for _ in range(clients)]
    roster = frozenset(sum_protocol.name_key(key.public_key()) for key in keys)
    corrupt = clients // 10
    terms = SumTerms(roster, clients // 2, corrupt)
    parties = {p.member: p for p in (Party(key, terms, MemoryNotes()) for key in keys)}
    gone, spent = set(sorted(parties)[:lost]), dict.fromkeys(parties, 0.0)
    size = dict.fromkeys(parties, 0)

    def ask(step: str, heads: dict[str, dict[str, Any]]) -> Mapping[str, sum_round.Answer]:
        answers = {}
        for member, head in heads.items():
            if member in gone and step in ("input", "set", "unmask"):
                continue
            began = time.process_time()
            blob = parties[member].answer(head, RUN, 0, Zeros())
            spent[member] += time.process_time() - began
            answers[member] = messages.unpack(blob, words=step == "input")
            size[member] += len(messages.pack(head)) + len(blob)
        return answers

    began = time.process_time()
    result = sum_round.play_sum_round(
        ask,
        list(parties),
        Terms(clients=clients, per_round=clients, honest=clients // 2, corrupt=corrupt),
        run=RUN,
        t=0,
        request=REQUEST,
        size=PARAMETERS,
    )
    assert len(result.keys) == clients - lost
    assert not result.total.any()
    server = time.process_time() - began - sum(spent.values())
    return max(spent.values()), server, max(size.values()) - 8 * PARAMETERS


def measure_floor(streams: int) -> float:
    """Return the CPU seconds of so many streams."""
    began = time.process_time()
    for _ in range(streams):
        sum_protocol.expand_mask(bytes(32), PARAMETERS)
    return time.process_time() - began


def measure_secagg(clients: int) -> tuple[float, float]:
    """Return the same of one round of Flower's SecAgg+, in which nobody drops out."""
    nodes, spent = range(1, clients + 1), dict.fromkeys(range(1, clients + 1), 0.0)
    states = {nid: secagg.SecAggPlusState(nid=nid) for nid in nodes}
    threshold = sum_protocol.choose_threshold(clients, clients // 2, clients // 10)

    def play(nid: int, stage: Any, configs: dict[str, Any], *more: Any) -> Any:
        began = time.process_time()
        answer = stage(states[nid], configs, *more)
        spent[nid] += time.process_time() - began
        return answer

    ranges = {Key.CLIPPING_RANGE: 8.0, Key.TARGET_RANGE: 2**22, Key.MOD_RANGE: 2**32}
    terms = {Key.SAMPLE_NUMBER: clients, Key.SHARE_NUMBER: clients, Key.THRESHOLD: threshold}
    start = {**terms, **ranges, Key.MAX_WEIGHT: 1000.0}
    keys = {nid: play(nid, secagg._setup, start) for nid in nodes}
    public = {str(nid): (k[Key.PUBLIC_KEY_1], k[Key.PUBLIC_KEY_2]) for nid, k in keys.items()}
    dealt = {nid: play(nid, secagg._share_keys, public) for nid in nodes}
    update = ndarrays_to_parameters([np.zeros(PARAMETERS, np.float32)])
    masked = {}
    for nid in nodes:
        sent = [
            (other, text)
            for other, told in dealt.items()
            for to, text in zip(told[Key.DESTINATION_LIST], told[Key.CIPHERTEXT_LIST], strict=True)
            if to == nid
        ]
        sealed = {Key.SOURCE_LIST: [s for s, _ in sent], Key.CIPHERTEXT_LIST: [c for _, c in sent]}
        masked[nid] = play(nid, secagg._collect_masked_vectors, sealed, 100, update)
    alive = {Key.ACTIVE_NODE_ID_LIST: list(nodes), Key.DEAD_NODE_ID_LIST: []}
    shares = {nid: play(nid, secagg._unmask, alive)[Key.SHARE_LIST] for nid in nodes}
    began = time.process_time()
    arrays = [[bytes_to_ndarray(a) for a in m[Key.MASKED_PARAMETERS]] for m in masked.values()]
    total = arrays[0]
    for array in arrays[1:]:
        total = parameters_addition(total, array)
    shapes = [array.shape for array in total]
    for i in range(clients):
        seed = combine_shares([held[i] for held in shares.values()])
        total = parameters_subtraction(total, pseudo_rand_gen(seed, 2**32, shapes))
    total = parameters_mod(total, 2**32)
    server = time.process_time() - began
    assert np.ptp(total[1]) <= clients  # zeros, but for its random rounding
    return max(spent.values()), server


def main() -> None:
    began, kept = time.perf_counter(), {}
    for clients, lost in CASES:
        client, server, size = measure_round(clients, lost)
        floors = measure_floor(clients), measure_floor((clients - lost) * (1 + lost))
        name = f"{clients} clients, {lost} dropped out"
        kept[f"{name}: client"], kept[f"{name}: server"] = client, server
        kept[f"{name}: client's bytes"] = float(size)
        kept[f"{name}: client's floor"], kept[f"{name}: server's floor"] = floors
        print(
            f"{name:32} client {client:.3f} s (floor {floors[0]:.3f}), "
            f"server {server:.2f} s (floor {floors[1]:.2f}), {size / 1000:.0f} kB a client"
        )
    client, server = measure_secagg(10)
    kept["SecAgg+, 10 clients: client"], kept["SecAgg+, 10 clients: server"] = client, server
    print(f"{'SecAgg+ of Flower, 10 clients':32} client {client:.3f} s, server {server:.2f} s")
    minutes = (time.perf_counter() - began) / 60
    keep("sum_view", ("cryptography", "flwr", "numpy"), kept, minutes=minutes)


if __name__ == "__main__":
    main()
