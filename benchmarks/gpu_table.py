"""The runs on an accelerator as a table of docs/performance.md."""

from __future__ import annotations

from typing import Any

NAMES = ("one run", "batch of 32", "cnn, one run", "cnn, batch of 8")


def page(found: dict[str, Any]) -> str:
    """The rates, a line for every kind of run, the sweep and the agreement."""
    rate, sweep, same = found["rates"], found["sweep"], found["agreement"]
    lines = [
        f"{found['device']}, JAX {found['versions']['jax']}, {found['date']}. Products of 8192 × "
        f"8192: {rate['tf32_tflops']:.0f} TFLOP/s with TF32, {rate['bfloat16_tflops']:.0f} with "
        f"bfloat16; copy {rate['copy_gbs']:,.0f} GB/s.",
        "",
        "| | ms a run, round | without the start | GFLOP | floor, products | floor, bytes "
        "| × floor | first call, s |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for name in NAMES:
        own = found[name]
        floors = f"{own['products_ms']:.3f} ms | {own['bytes_ms']:.3f} ms"
        lines.append(
            f"| {name} | {own['round_ms']:.2f} | {own['rounds_ms']:.2f} | {own['gflop']:.1f} | "
            f"{floors} | "
            f"{own['ratio']:.1f} | {own['first_s']:.1f} |"
        )
    lines += [
        "",
        f"Sweep of {sweep['runs']} runs (5 ε × 4 schedules × 10 seeds, at most 200 rounds each): "
        f"{sweep['seconds']:.1f} s for {sweep['run_rounds']:,} run-rounds, once the first seed's "
        f"have been compiled and run ({sweep['first_s']:.1f} s).",
        "",
        f"bfloat16 against float32 products on MNIST, ten seeds: accuracy differs by "
        f"{100 * same['mean_difference']:+.3f} points in the mean, where seeds differ by "
        f"{100 * same['seed_spread']:.2f} (standard deviation).",
    ]
    return "\n".join(lines)
