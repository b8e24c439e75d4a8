"""What one or two hostile clients of ten do to a model, by how the server combines uploads.

    python benchmarks/hostile.py --out results/bench/hostile.json     about 20 minutes on two cores
    python benchmarks/hostile.py --page                               docs/threat-model.md from it

Ten clients share the digits (softmax, ε = 8, δ = 1e-5, 25 rounds). Every upload is made by
`client.release` with secure noise, passes `server.checks.check_answer`, is weighed by
`limit_samples` and `limit_noise` and combined by `combine` of `schedules.aggregate`: what a real
server does, but for vaults and network. The hostile ones know the checks and go as far as these let
them:

- label flip    trains on class 9 − y, with honest noise;
- sign flip     sends 2w − its honest upload;
- scaled        goes against its own step as far as the bound on an upload's length allows;
- more noise    the same, claiming 15 times the σ that its budget calls for;
- more samples  the same, declaring a million samples (σ and Δ follow from them);
- little left   the same, with books that show one part in 200 of the budget left (so much noise).

`before` is the mean without these limits: samples and σ as claimed (up to the ceiling of 16).
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from pathlib import Path
from typing import Any

import numpy as np

from sottovoce import Plan
from sottovoce.client import messages, release
from sottovoce.client.messages import ANSWER, Receipt, Request
from sottovoce.models.base import as_device, flatten_parameters
from sottovoce.privacy import grid
from sottovoce.privacy.tank import FULL, Tank
from sottovoce.schedules.aggregate import combine, limit_noise, limit_samples, weigh_by_samples
from sottovoce.schedules.base import Round
from sottovoce.server.checks import SLACK, AcceptedUpload, ExpectedUpload, check_answer
from sottovoce.server.federation import Federation, build, score_model
from sottovoce.server.members import Account, Member

ROOT = Path(__file__).resolve().parents[1]
KEPT, PAGE = ROOT / "results" / "bench" / "hostile.json", ROOT / "docs" / "threat-model.md"
ATTACKS = ("label flip", "sign flip", "scaled", "more noise", "more samples", "little left")
WAYS = ("before", "mean", "trimmed", "bounded")
ROUNDS, CLIENTS, HELD, MILLION, FURTHER = 25, 10, 143, 10**6, 15.0
LEFT = 1 / 200
CEILING = 16 * math.sqrt(ROUNDS / 2.7)

Arrays = dict[str, Any]


def planned() -> Plan:
    """The plan of the federation that is attacked."""
    return Plan().replace(
        **{
            "noise": "secure",
            "model.name": "softmax",
            "data.clients": CLIENTS,
            "rounds.schedule": "fixed",
            "rounds.rounds": ROUNDS,
        }
    )


def run(federation: Federation, hostile: int, attack: str, way: str, seed: int) -> float:
    """Test accuracy after all rounds; the first `hostile` clients are."""
    held, recipe, terms = federation.held, federation.recipe, federation.terms
    device = as_device(federation.model, shape=held.inputs, classes=held.classes)
    rows = [held.client(i) for i in range(CLIENTS)]
    samples = [len(own.y) for own in rows]
    if attack == "more samples":
        samples[:hostile] = [MILLION] * hostile
    counted = np.array(samples) if way == "before" else limit_samples(samples, [None] * CLIENTS)
    params: Arrays = flatten_parameters(federation.model.draw_parameters(seed))
    tanks = [Tank.full(float(capacity)) for capacity in federation.capacity]
    if attack == "little left":
        gone = np.array(int((1 - LEFT) * FULL))
        tanks[:hostile] = [Tank(own.capacity, gone, gone, own.debits) for own in tanks[:hostile]]
    shown = [(0.0, 0)] * CLIENTS
    for t in range(ROUNDS):
        turn, uploads, sigma = Round(t, ROUNDS), [], []
        asked = Request("0badc0de", turn, CLIENTS, CLIENTS, "balanced", recipe, device.form, params)
        for i, own in enumerate(rows):
            tank, bad = tanks[i], i < hostile
            price = release.price(
                tank, turn, terms, change=grid.grid_sensitivity("record", len(own.y))
            )
            y = 9 - own.y if bad and attack == "label flip" else own.y
            before, tanks[i] = tank, tank.spend(np.array(sum(price.units)))
            budget = {
                "epsilon": 8.0,
                "delta": 1e-5,
                "capacity": float(before.capacity),
                "spent": float(tanks[i].spent_mu2),
            }
            head = {
                "schema": ANSWER,
                "kind": "upload",
                "run": "0badc0de",
                "t": t,
                "request": "asked",
                "samples": samples[i],
                "receipt": {"vault": f"{i:x}", "seq": t, "hash": "0"},
                "budget": budget,
            }
            upload = release.release(
                device.form, params, own.x, y, recipe=recipe, paid=price, head=head
            )
            account = Account(8.0, 1e-5, budget["capacity"], float(before.spent_mu2))
            expected = ExpectedUpload(
                asked=asked,
                request="asked",
                member=_member(i, samples[i], account),
                ceiling=CEILING,
                terms=None if way == "before" else terms,
                opened=float(before.capacity * (before.opened / FULL)),
                debits=t,
                shown=shown[i],
            )
            blob = upload.blob
            if bad and attack != "label flip":
                blob = _hostile(attack, way, expected, upload, head)
            counts = check_answer(blob, expected)
            assert isinstance(counts, AcceptedUpload), (
                "a hostile upload was refused: it went too far"
            )
            shown[i] = counts.shown
            uploads.append(counts.params)
            sigma.append(counts.sigma[0])
        everyone = np.ones(CLIENTS, bool)
        weight = weigh_by_samples(counted, everyone)
        if way != "before":
            weight = limit_noise(weight, np.array(sigma), everyone)
        kind: Any = "mean" if way == "before" else way
        total = combine(uploads, weight, params, kind=kind, trim=0.2)
        params = {name: leaf.astype(np.float32) for name, leaf in total.items()}
    return float(
        score_model(federation.model, federation.model.unflatten(dict(params)), held.test)[1]
    )


def _member(i: int, samples: int, account: Account) -> Member:
    known = Receipt(f"{i:x}", 0, "0")
    return Member(
        "ward", known.vault, samples, 64, 10, "record", 1.0, "exact", None, 1000, account, known
    )  # fmt: skip


def _hostile(attack: str, way: str, expected: ExpectedUpload, upload: Any, head: Arrays) -> bytes:
    """The furthest upload against the client's own step that the server would take."""
    start = {k: np.asarray(w, np.float64) for k, w in expected.asked.params.items()}
    moved = {k: np.asarray(upload.params[k], np.float64) - start[k] for k in start}
    honest = upload.sigma[0]
    if attack == "sign flip":
        away = {k: (start[k] - m).astype(np.float32) for k, m in moved.items()}
        return messages.pack({**head, "sigma": [honest]}, away)
    # σ/Δ as it is, with Δ of the samples that it declares; or a larger one.
    claim = honest * HELD / head["samples"]
    claim *= FURTHER if attack == "more noise" and way == "before" else 1.0
    size, length = sum(w.size for w in start.values()), _length(moved)
    furthest = expected.asked.recipe.learning_rate * expected.asked.recipe.clip
    furthest += claim * (math.sqrt(size) + SLACK)
    away = {
        k: (start[k] - m * 0.999 * furthest / length).astype(np.float32) for k, m in moved.items()
    }
    return messages.pack({**head, "sigma": [claim]}, away)


def _length(arrays: Arrays) -> float:
    return math.sqrt(sum(float(np.sum(a**2)) for a in arrays.values()))


def table(found: list[dict[str, Any]]) -> str:
    """The table of docs/threat-model.md."""
    honest = found[0]
    lines = [
        "| hostile of ten | what they do | " + " | ".join(WAYS) + " |",
        "|---|---|" + "---|" * len(WAYS),
        "| none | | " + " | ".join(_cell(honest["accuracy"][way]) for way in WAYS) + " |",
    ]
    for one in found[1:]:
        cells = " | ".join(_cell(one["accuracy"][way]) for way in WAYS)
        lines.append(f"| {one['hostile']} | {one['attack']} | {cells} |")
    return "\n".join(lines) + "\n"


def _cell(values: list[float]) -> str:
    return f"{100 * statistics.fmean(values):.1f} %"


def made_anew(text: str) -> str:
    """The page with the table of what was measured."""
    begin, end = "<!-- hostile: begin -->\n", "<!-- hostile: end -->"
    before, _, rest = text.partition(begin)
    return (
        before + begin + table(json.loads(KEPT.read_text("utf-8"))) + end + rest.partition(end)[2]
    )


def main() -> None:
    """Measure and keep, or write the page."""
    words = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    words.add_argument("--out", type=Path)
    words.add_argument("--seeds", type=int, default=3)
    words.add_argument("--page", action="store_true")
    given = words.parse_args()
    if given.page:
        PAGE.write_text(made_anew(PAGE.read_text("utf-8")), "utf-8")
        return
    federation = build(planned(), seed=1)
    assert set(federation.samples.tolist()) == {HELD}
    cases = [(0, "")] + [(k, attack) for k in (1, 2) for attack in ATTACKS]
    found = []
    for hostile, attack in cases:
        accuracy = {
            way: [run(federation, hostile, attack, way, seed) for seed in range(given.seeds)]
            for way in WAYS
        }
        found.append({"hostile": hostile, "attack": attack, "accuracy": accuracy})
        print(hostile, attack, {way: _cell(a) for way, a in accuracy.items()}, file=sys.stderr)
    if given.out is not None:
        given.out.write_text(json.dumps(found, indent=1) + "\n", "utf-8")
    print(table(found))


if __name__ == "__main__":
    main()
