"""What a client's ledger costs an answer after 1, 1,000 and 100,000 rounds.

    python benchmarks/vault.py [--rounds 1 1000 100000] [--out results/bench/vault.json]

A history of so many rounds (runs of up to 1,000) is written by the ledger's own code, many lines a
write. Then a process of its own answers 40 rounds of a new run of a tiny model, each asked with the
receipt of the one before: milliseconds of `device.answer_request` as a clock shows them and of CPU,
those inside the vault (open, look up, reserve, store, close), lines read, steps of SQLite's
machine, the size of the file and the peak of resident memory. Last, a full check as `sottovoce
ledger verify` makes it."""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

import foreign
import kept

ROUNDS = (1, 1_000, 100_000)
ANSWERS = 40
NODE = """schema = 1
name = "ward"
vault = "ward.vault"
[data]
path = "ward.npz"
classes = 2
[policy]
epsilon = 8.0
delta = 1e-5
clip = 1.0
"""


def build(folder: Path, rounds: int) -> None:
    """Make a client's files, with a ledger of so many rounds."""
    import numpy as np

    from sottovoce.client import ledger
    from support.vault_play import live

    random = np.random.default_rng(0)
    np.savez(folder / "ward.npz", x=random.normal(size=(100, 4)), y=random.integers(0, 2, 100))
    (folder / "ward.toml").write_text(NODE, "utf-8")
    ledger.create_from_node(folder / "ward.toml")
    live(folder / "ward.vault", rounds, a_run=1_000)


def answer(folder: Path) -> dict[str, float]:
    """Answer some rounds of a new run and measure each."""
    import numpy as np

    from sottovoce.client import device, messages
    from sottovoce.client.messages import Request
    from sottovoce.client.node import Node
    from sottovoce.client.vault import Vault, VaultReceipt
    from sottovoce.models.base import Form
    from sottovoce.privacy.sensitivity import Recipe
    from sottovoce.schedules.base import Round
    from support.vault_play import counted

    inside = [0.0]

    def timed(plain: Callable[..., Any]) -> Callable[..., Any]:
        def call(*words: Any, **named: Any) -> Any:
            began = time.perf_counter()
            try:
                return plain(*words, **named)
            finally:
                inside[0] += time.perf_counter() - began

        return call

    def ask(t: int, seen: VaultReceipt | None) -> VaultReceipt:
        request = Request(
            run="0badc0de", round=Round(t, ANSWERS + 9, 1.0, None), clients=1, per_round=1,
            cohort="balanced", recipe=Recipe(1.0, 1.0), form=form, receipt=seen, server="s",
            params={name: np.zeros(shape, np.float32) for name, shape in form.shapes().items()},
        )  # fmt: skip
        head = messages.unpack(device.answer_request(request.to_blob(), node))[0]
        if head["kind"] != "upload":
            raise SystemExit(f"the client refused: {head}")
        return VaultReceipt.from_json(head["receipt"])

    node, form = Node.load(folder / "ward.toml"), Form("svm", (4,), 2, {"kappa": 0.01})
    for name in ("find", "reserve", "store", "close"):
        setattr(Vault, name, timed(getattr(Vault, name)))
    Vault.open = timed(Vault.open)  # type: ignore[method-assign]
    seen, spans = None, []
    for t in range(ANSWERS + 2):
        inside[0], began, cpu = 0.0, time.perf_counter(), time.process_time()
        seen = ask(t, seen)
        spans.append((time.perf_counter() - began, time.process_time() - cpu, inside[0]))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    work = counted(Patch())
    for t in range(ANSWERS + 2, ANSWERS + 6):
        seen = ask(t, seen)
    whole, cpu_of, vault = ([1e3 * span[i] for span in spans[2:]] for i in range(3))
    return {
        "answer_ms": statistics.median(whole),
        "least_ms": min(whole),
        "most_ms": max(whole),
        "cpu_ms": statistics.median(cpu_of),
        "vault_ms": statistics.median(vault),
        "lines": work.lines / 4,
        "steps": work.steps / 4,
        "file_mb": (folder / "ward.vault").stat().st_size / 1e6,
        "peak_mb": peak,
    }


class Patch:
    """Sets attributes for good, in the place of pytest's monkeypatch."""

    def setattr(self, owner: object, name: str, value: object) -> None:
        """As pytest's."""
        setattr(owner, name, value)


def verify(folder: Path) -> dict[str, float]:
    """Check everything from the first line."""
    from sottovoce.client import ledger

    began = time.perf_counter()
    ledger.verify(folder / "ward.vault").require()
    return {
        "verify_s": time.perf_counter() - began,
        "verify_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }


PARTS: dict[str, Callable[[Path], Any]] = {"answer": answer, "verify": verify}


def apart(words: list[str], folder: Path) -> dict[str, float]:
    """One part in a process of its own."""
    environment = os.environ | {"SOTTOVOCE_STATE": str(folder / "state"), "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, __file__, "--folder", str(folder), *words]
    said = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE).stdout
    found: dict[str, float] = json.loads(said)
    return found


def measure(rounds: int) -> dict[str, float]:
    """All figures of one length."""
    with tempfile.TemporaryDirectory(prefix="sottovoce-vault-") as name:
        folder = Path(name)
        apart(["--part", "build", "--rounds", str(rounds)], folder)
        found = apart(["--part", "answer"], folder) | apart(["--part", "verify"], folder)
        return {"rounds": rounds, **found}


def page(found: dict[str, Any]) -> str:
    """The table of docs/performance.md."""
    about = found["machine"]
    lines = [
        f"{about['cpu']}, {about['cores']} cores, {foreign.words(found)}; {found['date']}.",
        "",
        "| rounds so far | an answer, ms (min–max) | of CPU | in the vault | lines read | "
        "steps of SQLite | file | peak memory | full check |",
        "|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for own in found["cases"]:
        took = f"{own['answer_ms']:.0f} ({own['least_ms']:.0f}–{own['most_ms']:.0f})"
        lines.append(
            f"| {own['rounds']:,} | {took} | {own['cpu_ms']:.1f} | {own['vault_ms']:.0f} | "
            f"{own['lines']:.0f} | {own['steps']:,.0f} | {own['file_mb']:.1f} MB | "
            f"{own['peak_mb']:.0f} MB | {own['verify_s']:.1f} s, {own['verify_mb']:.0f} MB |"
        )
    return "\n".join(lines)


def main() -> None:
    """Print a line for each length, and write the figures down where wanted."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, nargs="+", default=list(ROUNDS))
    parser.add_argument("--out", type=Path, help="write the figures here as JSON")
    parser.add_argument("--part", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.part == "build":
        build(asked.folder, asked.rounds[0])
        print("{}")
        return
    if asked.part:
        print(json.dumps(PARTS[asked.part](asked.folder)))
        return
    began, before, cases = time.perf_counter(), foreign.mark(), []
    for rounds in asked.rounds:
        cases.append(own := measure(rounds))
        print(
            f"{rounds:>8,} rounds  {own['answer_ms']:6.1f} ms an answer ({own['cpu_ms']:.1f} of "
            f"CPU, {own['vault_ms']:.1f} in the vault)  {own['lines']:4.0f} lines  "
            f"{own['steps']:6.0f} steps  {own['file_mb']:7.1f} MB file  {own['peak_mb']:4.0f} MB  "
            f"full check {own['verify_s']:.1f} s, {own['verify_mb']:.0f} MB",
            flush=True,
        )
    if asked.out is not None:
        about = kept.about() | {"cases": cases}
        about |= {"foreign": round(foreign.share(before, foreign.mark()), 4)}
        about |= {"minutes": round((time.perf_counter() - began) / 60, 2)}
        asked.out.write_text(json.dumps(about, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
