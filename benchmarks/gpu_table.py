"""The runs on an accelerator as a table of docs/performance.md.

    python benchmarks/gpu_table.py docs/performance.md

writes the table of results/bench/gpu.json between the marks of that page.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

FILE = Path(__file__).resolve().parents[1] / "results" / "bench" / "gpu.json"
BEGIN, END = "<!-- gpu: begin -->", "<!-- gpu: end -->"
NAMES = ("one run", "batch of 32", "cnn, one run", "cnn, batch of 8")


def page(found: dict[str, Any]) -> str:
    """The rates, a line for every kind of run, the sweep and the agreement."""
    rate, sweep, same = found["rates"], found["sweep"], found["agreement"]
    lines = [
        f"{found['device']}, JAX {found['versions']['jax']}, {found['date']}. Products of 8192 × "
        f"8192: {rate['tf32_tflops']:.0f} TFLOP/s with TF32, {rate['bfloat16_tflops']:.0f} with "
        f"bfloat16; copy {rate['copy_gbs']:,.0f} GB/s.",
        "",
        "| | ms a run, round | GFLOP | floor, products | floor, bytes | × floor | first call, s |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for name in NAMES:
        own = found[name]
        floors = f"{own['products_ms']:.3f} ms | {own['bytes_ms']:.3f} ms"
        lines.append(
            f"| {name} | {own['round_ms']:.2f} | {own['gflop']:.1f} | {floors} | "
            f"{own['ratio']:.1f} | {own['first_s']:.1f} |"
        )
    lines += [
        "",
        f"Sweep of {sweep['runs']} runs (5 ε × 4 schedules × 10 seeds, at most 200 rounds each): "
        f"{sweep['seconds']:.1f} s for {sweep['run_rounds']:,} run-rounds.",
        "",
        f"bfloat16 against float32 products on MNIST, ten seeds: accuracy differs by "
        f"{100 * same['mean_difference']:+.3f} points in the mean, where seeds differ by "
        f"{100 * same['seed_spread']:.2f} (standard deviation).",
    ]
    return "\n".join(lines)


def placed(text: str, found: dict[str, Any]) -> str:
    """The document with its table made anew between the marks."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{page(found)}\n\n{END}{after}"


if __name__ == "__main__":
    document = Path(sys.argv[1])
    document.write_text(placed(document.read_text("utf-8"), json.loads(FILE.read_text("utf-8"))))
