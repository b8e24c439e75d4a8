"""Measure pictures a second of `features = "onnx:FILE"` beside plain onnxruntime.

    python benchmarks/extraction.py [FILE]

EfficientNet-Lite0 without its last layer, pictures of 64 × 64. Ours is `Network.apply` with a
projection to 400 numbers: batches of one size, what a failing row needs, projection, normalisation;
and once `load_or_apply`, which also hashes the rows and keeps the features in a file. Plain is
`session.run` on the same pictures in the same batches, laid out beforehand, and nothing else. The
calls alternate, and the shortest of each counts: what other work on the machine adds, it adds to
both. (Threads of onnxruntime and BLAS wait by spinning, so that CPU seconds would count waiting.)

Without FILE the ONNX file is exported in an environment of its own. Writes
results/bench/extraction.json.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import environments
import numpy as np
import onnxruntime

from sottovoce.models.network import BATCH, build_network

ROOT = Path(__file__).parents[1]
PICTURES, TIMES = 8 * BATCH, 15


def measure(work: Callable[[], object]) -> float:
    """Return the seconds that a call takes."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def main() -> None:
    """Measure, print and write."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(sys.argv[1] if len(sys.argv) > 1 else f"{folder}/lite0.onnx")
        if not file.exists():
            script = environments.HERE / "peers" / "onnx_file.py"
            subprocess.run([environments.python_of("onnx_file"), script, file], check=True)
        x = np.random.default_rng(1).random((PICTURES, 64 * 64 * 3), dtype=np.float32)
        network = build_network(f"onnx:{file}", (64, 64, 3), project=400)
        session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
        name = session.get_inputs()[0].name
        laid = np.ascontiguousarray(np.moveaxis(x.reshape(-1, 64, 64, 3), -1, 1))

        def run_plain() -> None:
            for start in range(0, PICTURES, BATCH):
                session.run(None, {name: laid[start : start + BATCH]})

        def keep() -> None:
            with tempfile.TemporaryDirectory(dir=folder) as own:
                (beside := Path(own, "rows.npz")).touch()
                network.load_or_apply(x, beside)

        works = {
            "plain onnxruntime": run_plain,
            "Network.apply": lambda: network.apply(x),
            "and kept in a file": keep,
        }
        for work in works.values():
            work()
        found = {name: [] for name in works}
        for _ in range(TIMES):
            for label, work in works.items():
                found[label].append(measure(work))
    rates = {label: PICTURES / min(seconds) for label, seconds in found.items()}
    floor = rates["plain onnxruntime"]
    for label, rate in rates.items():
        print(f"{label:<20} {rate:7.1f} pictures a second  {rate / floor:.3f} × plain")
    settings = {"pictures": PICTURES, "batch": BATCH, "times": TIMES, "project": 400}
    written = {**settings, "pictures_per_second": rates}
    path = ROOT / "results" / "bench" / "extraction.json"
    path.write_text(json.dumps(written, indent=1) + "\n")


if __name__ == "__main__":
    main()
