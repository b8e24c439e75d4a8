"""What `make bench` measured, as tables of docs/performance.md."""

from __future__ import annotations

import statistics
from typing import Any

import foreign

PARTS = ("round", "books", "secure_noise", "flower_floor")


def page(kept: dict[str, Any]) -> str:
    """A round beside its floor, the exact noise, and a federation beside Flower's own."""
    own = kept["round"]
    parts = [kept[name].get("minutes") for name in PARTS]
    whole = "" if None in parts else f", {sum(parts):.1f} minutes in all"
    watched = "; ".join(
        f"{threads} thread(s): {foreign.words(run)}" for threads, run in own["found"].items()
    )
    lines = [
        f"{own['machine']['cpu']}, {own['machine']['cores']} cores, sottovoce "
        f"{own['source']['sottovoce']}, jax {own['versions']['jax']}, numpy "
        f"{own['versions']['numpy']}, {own['date']}{whole}. {watched}.",
        "",
        "| a round of 784-256-10 | seconds | min–max (of) | CPU s | sgemm numpy, XLA (GFLOP/s) | "
        "floor | × floor | peak MB |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for threads, run in own["found"].items():
        row, rates = run["rows"][0], run["rates"]
        wall = statistics.median(row["wall_s"])
        lines.append(
            f"| {threads} thread{'s' if threads != '1' else ''} | {wall:.3f} | "
            f"{min(row['wall_s']):.3f}–{max(row['wall_s']):.3f} ({len(row['wall_s'])}) | "
            f"{statistics.median(row['cpu_s']):.3f} | {rates['numpy_gflops']:.0f}, "
            f"{rates['xla_gflops']:.0f} | {run['floor_s']:.3f} s | {wall / run['floor_s']:.2f} | "
            f"{row['peak_mb']:,.0f} |"
        )
    books = kept["books"]["found"]
    each = ", ".join(
        f"{found:.0f} {'alone' if size == '1' else f'in a batch of {size}'}"
        for size, found in books.items()
    )
    lines += [
        "",
        "The host's books (cohort, prices, debits, orders, record; 50 clients), µs of CPU a run "
        f"and round: {each}.",
    ]
    noise = dict(kept["secure_noise"]["found"])
    floor = noise.pop("floor")
    rates = ", ".join(
        f"{rate:.0f} at σ = {power(sigma)}"
        for sigma, rate in sorted((int(name.split()[1]), rate) for name, rate in noise.items())
    )
    lines += [
        "",
        f"Exact discrete Gaussians, million a second on one core: {rates}; 8 bytes of "
        f"AES-256-CTR each, the floor, {floor:.0f}.",
        "",
        *federation(kept["flower_floor"]["found"]),
    ]
    return "\n".join(lines)


def power(sigma: int) -> str:
    """2⁴⁰ rather than 1,099,511,627,776.

    >>> power(50), power(2**40), power(2**36 + 1)
    ('50', '2^40', '2^36 + 1')
    """
    if sigma < 2**20:
        return f"{sigma:,}"
    exponent = sigma.bit_length() - 1
    rest = sigma - 2**exponent
    return f"2^{exponent}" + (f" + {rest:,}" if rest else "")


def federation(found: dict[str, Any]) -> list[str]:
    """Seconds a round of an empty app and of ours, for each number of parameters."""
    sizes = list(next(iter(found.values()))["seconds"])
    heads = " | ".join(f"{int(size):,} parameters" for size in sizes)
    lines = [f"| seconds a round | ready after | {heads} |", "|---|---:|" + "---:|" * len(sizes)]
    for kind, own in found.items():
        cells = [f"{statistics.median(own['seconds'][size]):.2f}" for size in sizes]
        lines.append(f"| {kind} | {own['ready_s']:.1f} s | {' | '.join(cells)} |")
    return lines
