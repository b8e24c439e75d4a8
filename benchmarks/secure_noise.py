"""Secure noise on one core, beside what its random bytes alone would cost.

A draw needs at least one 64-bit word, so the floor is eight bytes of AES-256-CTR a draw, measured
in the same process. Run it with

    python benchmarks/secure_noise.py
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "src"))

from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from kept import keep

from sottovoce.privacy import secure_noise

COUNT = 4_000_000
SIGMAS = (1, 50, 2**20, 2**33, 2**36 + 1, 2**40, 2**52)
REPEATS = 5


def rate(work: Callable[[], object]) -> float:
    """Millions of draws a second, the best of a few: what else the machine does only slows it."""
    work()
    best = float("inf")
    for _ in range(REPEATS):
        start = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - start)
    return COUNT / best / 1e6


def only_bytes() -> None:
    stream = Cipher(algorithms.AES(os.urandom(32)), modes.CTR(os.urandom(16))).encryptor()
    piece = bytes(2**19)
    for _ in range(8 * COUNT // len(piece)):
        stream.update(piece)


def main() -> None:
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    began = time.perf_counter()
    floor = rate(only_bytes)
    print(f"8 bytes of AES-256-CTR: {floor:.0f} million a second ({8 * floor / 1000:.1f} GB/s)")
    kept = {"floor": floor}
    for sigma in SIGMAS:
        kept[f"sigma {sigma}"] = found = rate(lambda sigma=sigma: secure_noise.draw(COUNT, sigma))  # type: ignore[misc]
        times = floor / found
        print(f"σ = {sigma:<21,} {found:6.1f} million draws a second, {times:4.1f} × the floor")
    minutes = (time.perf_counter() - began) / 60
    keep("secure_noise", ("cryptography", "numpy"), kept, minutes=minutes)


if __name__ == "__main__":
    main()
