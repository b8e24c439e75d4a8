"""The sum view, the server's side: lead a cohort through the five messages, and unmask its sum.

    keys → shares → masked inputs → signatures on the set → shares of its secrets → Σ (S_i + Z_i)

`play_sum_round` asks through a function, which the simulator gives as calls and the coordinator as
messages. A client that does not answer, or whose answer is wrong, takes no further part in the
round. With fewer than t left the round is void: nothing is unmasked, and what the clients paid is
burnt. The rules are the clients' (`client.sum_protocol`): no server can talk them out of these.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sottovoce.client.sum_protocol import (
    PRIME,
    Cohort,
    RoundKey,
    Words,
    choose_threshold,
    compute_public,
    derive_mask,
    expand_mask,
    is_hex,
    is_signed,
    join_shares,
    lagrange_weights,
    seal_seed,
)
from sottovoce.errors import Malformed, RoundVoid
from sottovoce.privacy import grid
from sottovoce.schedules.pricing import Terms

# Multiplications for other ways to put a secret together where shares are wrong: about a second.
_WORK = 2**22

Answer = tuple[dict[str, Any], dict[str, NDArray[Any]]]
Revealed = dict[str, dict[str, dict[str, int]]]  # by member that reveals, kind, and owner
Ask = Callable[[str, dict[str, dict[str, Any]]], Mapping[str, Answer]]


@dataclass(frozen=True, eq=False)
class SumResult:
    """The sum over a set of clients, in grid units, and their public numbers."""

    total: NDArray[np.int64]
    keys: dict[str, RoundKey]  # of the clients in the set
    noise: dict[str, int]  # the noise that each states, in grid units


def play_sum_round(
    ask: Ask, members: list[str], terms: Terms, *, run: str, t: int, request: str, size: int
) -> SumResult:
    """Lead these clients through one round, and return the sum of their noised uploads.

    `ask(step, messages)` returns the answers of the clients that answered, by member. The threshold
    is that of the clients that sent keys: one that is gone does not keep the others from a sum.
    """

    def ask_all(step: str, heads: Mapping[str, dict[str, Any]]) -> Mapping[str, Answer]:
        common = {"step": step, "run": run, "t": t}
        return ask(step, {member: {**common, **head} for member, head in heads.items()})

    keys, nothing = {}, dict[str, Any]()
    for member, (head, _) in ask_all("keys", dict.fromkeys(members, nothing)).items():
        with suppress(Malformed):
            key = RoundKey.from_json(head.get("key"))
            if (key.member, key.run, key.t, key.request) == (member, run, t, request):
                keys[member] = key
    _require(keys, terms.honest + terms.corrupt, "sent a key", ())
    threshold = choose_threshold(len(keys), terms.honest, terms.corrupt)
    cohort = Cohort(run, t, dict(sorted(keys.items())), threshold)
    common = {"keys": [key.to_json() for key in cohort.keys.values()], "threshold": threshold}

    dealt: dict[str, dict[str, Any]] = {}
    for member, (head, _) in ask_all("shares", dict.fromkeys(cohort.keys, common)).items():
        shares, others = head.get("shares"), cohort.keys.keys() - {member}
        fits = isinstance(shares, dict) and shares.keys() == others and is_hex(head.get("seal"), 32)
        if fits and all(isinstance(text, str) for text in head["shares"].values()):
            dealt[member] = head
    dealers = sorted(dealt)
    _require(dealt, threshold, "dealt shares", keys)
    input_heads = {
        member: common | {"shares": {d: dealt[d]["shares"][member] for d in dealers if d != member}}
        for member in dealers
    }

    inputs, noise = dict[str, Words](), dict[str, int]()
    for member, (head, arrays) in ask_all("input", input_heads).items():
        masked, sigma = arrays.get("masked"), head.get("noise")
        promise = cohort.keys[member].promise
        if type(sigma) is not int or not promise <= sigma <= grid.LARGEST_NOISE:
            continue
        if masked is not None and masked.dtype == np.uint64 and masked.shape == (size,):
            inputs[member], noise[member] = masked, sigma
    _require(inputs, threshold, "sent a masked input", keys)
    members = sorted(inputs)
    bound = cohort.bind_set(dealers, members)

    signatures = {}
    set_head = {**common, "dealers": dealers, "set": members}
    for member, (head, _) in ask_all("set", dict.fromkeys(dealers, set_head)).items():
        if member in inputs and is_signed(member, "set", bound, head.get("signature")):
            signatures[member] = head["signature"]
    _require(signatures, threshold, "signed the set", keys)

    revealed: Revealed = {}
    unmask_heads = {
        member: {**head, "set": members, "signatures": signatures}
        for member, head in input_heads.items()
    }
    for member, (head, _) in ask_all("unmask", unmask_heads).items():
        with suppress(Malformed):
            revealed[member] = _read_revealed(head, dealers, members)
    _require(revealed, threshold, "revealed shares", keys)
    total = _unmask(cohort, inputs, dealt, revealed)
    result = SumResult(total, {member: cohort.keys[member] for member in members}, noise)
    _require_norm(result)
    return result


def _unmask(
    cohort: Cohort, inputs: Mapping[str, Words], dealt: Mapping[str, Any], revealed: Revealed
) -> NDArray[np.int64]:
    """Return Σ y_i less the self-masks of the set and the masks of those who dropped out."""
    total = np.zeros_like(next(iter(inputs.values())))
    for masked in inputs.values():
        total += masked
    size = total.size
    joined = _Joiner(cohort, revealed)
    for member in inputs:
        seed = joined.join("seed", member, seal_seed, dealt[member]["seal"])
        total -= expand_mask(seed, size)
    for lost in sorted(dealt.keys() - inputs.keys()):
        known = cohort.keys[lost]
        secret = joined.join("key", lost, compute_public, known.mask_key)
        for member in inputs:
            seed = derive_mask(secret, cohort.keys[member].mask_key, known.run, known.t)
            # The client in the set has added the stream where its name comes first.
            undo = np.subtract if member < lost else np.add
            undo(total, expand_mask(seed, size), out=total)
    return total.view(np.int64)


class _Joiner:
    """Puts secrets together from shares; tries other subsets where some of them are wrong."""

    def __init__(self, cohort: Cohort, revealed: Revealed) -> None:
        self.cohort, self.revealed = cohort, revealed
        self.all = lagrange_weights([cohort.points[member] for member in revealed])
        self.rng = random.Random(0)  # which shares are tried is no secret
        self.order = sorted(revealed)
        self._weigh()

    def _weigh(self) -> None:
        """Weigh the first t shares: without point e the others' weights grow by (e − x)/e."""
        least, points = self.cohort.threshold, [self.cohort.points[m] for m in self.order]
        unused, self.weights = points[least:], dict[int, int]()
        shrink = pow(math.prod(unused), -1, PRIME)
        for x in points[:least]:
            weight = self.all[x] * shrink % PRIME
            for e in unused:
                weight = weight * (e - x) % PRIME
            self.weights[x] = weight

    def join(self, kind: str, member: str, seal: Callable[[bytes], str], word: str) -> bytes:
        """Return the secret of a member that t shares give and its owner's word confirms."""
        least = self.cohort.threshold
        for _ in range(max(64, _WORK // (least * (len(self.order) - least + 1)))):
            some = self.order[:least]
            points = {self.cohort.points[m]: self.revealed[m][kind][member] for m in some}
            found = join_shares(points, self.weights)
            if found < 2**256 and seal(found.to_bytes(32)) == word:
                return found.to_bytes(32)
            if len(self.order) == least:
                break
            self.rng.shuffle(self.order)
            self._weigh()
        raise RoundVoid(
            f"the shares of client {member[:12]} give none of its secrets; the round is void",
            [member],
        )


def _read_revealed(
    head: Mapping[str, Any], dealers: list[str], members: list[str]
) -> dict[str, dict[str, int]]:
    """Read one client's shares: of the seeds of the set, and of the keys of the others."""
    wanted = {"seed": set(members), "key": set(dealers) - set(members)}
    shares_by_kind = {}
    for kind, whose in wanted.items():
        shares = head.get(kind)
        if not isinstance(shares, dict) or shares.keys() != whose:
            raise Malformed("the shares are not those of the set")
        if not all(is_hex(text, 33) and int(text, 16) < PRIME for text in shares.values()):
            raise Malformed("a share is not a hexadecimal number below the prime")
        shares_by_kind[kind] = {member: int(text, 16) for member, text in shares.items()}
    return shares_by_kind


def _require(found: Mapping[str, Any], least: int, what: str, cohort: Iterable[str]) -> None:
    if len(found) < least:
        raise RoundVoid(
            f"{len(found)} clients {what} and {least} are needed; the round is void, and what its "
            "clients have paid is spent",
            set(cohort) - found.keys(),
        )


def _require_norm(result: SumResult) -> None:
    """Refuse a sum longer than honest clients can send: ‖S + Z‖ ≤ N·2³⁰ + σ(√d + 8).

    It is the only check that is left of R8: single uploads are not seen. σ² = Σ s_i² as stated;
    an honest sum is refused with probability below 10⁻¹³.
    """
    samples = sum(key.samples for key in result.keys.values())
    sigma = math.sqrt(sum(float(noise) ** 2 for noise in result.noise.values()))
    most = samples * grid.NORM + sigma * (math.sqrt(result.total.size) + 8)
    length = float(np.linalg.norm(result.total.astype(np.float64)))
    if not length <= most:
        raise RoundVoid(
            f"the sum's norm is {length:.3g} grid units, and honest clients reach {most:.3g} at "
            "most; the round is void"
        )


def apply_sum(
    params: Mapping[str, NDArray[np.float32]], result: SumResult, unit: float
) -> dict[str, NDArray[np.float32]]:
    """Return w − (η/N)·u·total as float32, with `unit` = η·u, and leaves in the order of names."""
    scale, at, moved = unit / sum(key.samples for key in result.keys.values()), 0, {}
    for name in sorted(params):
        leaf = params[name]
        steps = result.total[at : at + leaf.size].reshape(leaf.shape)
        with np.errstate(over="ignore"):
            moved[name] = (leaf.astype(np.float64) - scale * steps).astype(np.float32)
        at += leaf.size
    return moved
