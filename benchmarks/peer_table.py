"""The measured runs of every peer as tables, for the terminal and for docs/performance.md."""

from __future__ import annotations

import statistics
from typing import Any

import foreign

TITLES = {
    "mlp": "784-256-10",
    "cnn": "one 5×5 convolution on 32×32×3 pictures",
    "svm": "linear svm on 103 census columns",
    "tiny": "a tiny network",
}


def number(value: float) -> str:
    """Three digits that matter, without an exponent.

    >>> [number(value) for value in (38.81, 0.4963, 123.4, 0.00123)]
    ['38.8', '0.496', '123', '0.00123']
    """
    if value >= 100:
        return f"{value:,.0f}"
    if value >= 10:
        return f"{value:.1f}"
    return f"{value:.3g}" if value < 1 else f"{value:.2f}"


def heading(run: dict[str, Any]) -> str:
    """The work and the machine's own rates, in a paragraph."""
    shape, rates, machine = run["shape"], run["rates"], run["machine"]
    threads = f"{run['threads']} thread" + ("s" if run["threads"] > 1 else "")
    return (
        f"**{TITLES[run['work']]}, {threads}.** {shape['clients']} clients × {shape['samples']} "
        f"rows, {shape['tested']:,} test rows: {number(run['gflop'])} GFLOP, "
        f"{number(run['mb'])} MB. sgemm {number(rates['numpy_gflops'])} (numpy) and "
        f"{number(rates['xla_gflops'])} (XLA) GFLOP/s, copy {number(rates['copy_gbs'])} GB/s: "
        f"the floor is "
        f"{number(run['floor_s'])} s. {machine['cpu']}, {machine['cores']} cores; "
        f"{foreign.words(run)}; {run['date']}."
    )


def markdown(run: dict[str, Any]) -> str:
    """One run as a table, fastest first; then what computes nothing, then who was not timed."""
    timed = [row for row in run["rows"] if "why" not in row]
    timed.sort(key=lambda row: (row["clips"] == "nothing", statistics.median(row["wall_s"])))
    ours = next((row for row in timed if row["peer"] == "ours"), None)
    lines = [
        "| | seconds | min–max (of) | CPU s | × ours | × our CPU | × floor | peak MB | off by |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for row in timed:
        wall = statistics.median(row["wall_s"])
        spread = f"{number(min(row['wall_s']))}–{number(max(row['wall_s']))} ({len(row['wall_s'])})"
        computes = row["clips"] != "nothing"  # a ratio to work that was not done would mean nothing
        cells = [
            f"{row['label']} {versions(row)}".strip(),
            number(wall),
            spread,
            number(statistics.median(row["cpu_s"])) if row["cpu_s"] else "–",
            times(row, ours, "wall_s") if computes else "–",
            times(row, ours, "cpu_s") if computes else "–",
            number(wall / row.get("beside", run)["floor_s"]) if computes else "–",
            f"{row['peak_mb']:,.0f}" if "peak_mb" in row else "–",
            f"{row['error']:.0e}" if "error" in row else "–",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    for row in run["rows"]:
        if "why" in row:
            lines.append(f"| {row['label']} | not timed: {row['why']} |" + " |" * 7)
    return "\n".join(lines)


def times(row: dict[str, Any], ours: dict[str, Any] | None, what: str) -> str:
    """How many times ours of the same rotation, by the medians."""
    if not row[what] or (ours is None and "beside" not in row):
        return "–"
    base = row["beside"][what] if "beside" in row else statistics.median(ours[what])
    return number(statistics.median(row[what]) / base)


def versions(row: dict[str, Any]) -> str:
    """The library's own version and what it computes with.

    >>> versions({"versions": {"opacus": "1.6.0", "torch": "2.13.0+cpu"}})
    '(opacus 1.6.0, torch 2.13.0+cpu)'
    """
    parts = [f"{k} {v}" for k, v in row["versions"].items() if k != "jaxlib"]
    return f"({', '.join(parts)})"


def page(found: dict[str, Any]) -> str:
    """All runs as they stand in the document: a table for each work, its threads side by side."""
    works = list(dict.fromkeys(run["work"] for run in found["runs"]))
    tables = [compare([run for run in found["runs"] if run["work"] == work]) for work in works]
    used = {f"{name} {version}" for run in found["runs"] for row in run["rows"]
            for name, version in row.get("versions", {}).items() if name != "jaxlib"}  # fmt: skip
    note = f"–: not timed, or it computes nothing. Versions: {', '.join(sorted(used))}."
    return "\n\n".join([*tables, note])


def compare(runs: list[dict[str, Any]]) -> str:
    """One work on different numbers of threads as a table, in the order of the first."""
    head = "| | " + " | ".join(
        f"{run['threads']} thread{'s' * (run['threads'] > 1)}, s | × ours | × floor" for run in runs
    )
    lines = [f"{head} | peak MB |", "|---|" + "---:|" * (3 * len(runs) + 1)]
    cells: dict[str, list[list[str]]] = {}
    for place, run in enumerate(runs):
        timed = [row for row in run["rows"] if "why" not in row]
        timed.sort(key=lambda row: (row["clips"] == "nothing", statistics.median(row["wall_s"])))
        ours = next((row for row in timed if row["peer"] == "ours"), None)
        for row in timed:
            wall = statistics.median(row["wall_s"])
            ratio = number(wall / row.get("beside", run)["floor_s"])
            found = [number(wall), times(row, ours, "wall_s"), ratio]
            if row["clips"] == "nothing":
                found = [number(wall), "–", "–"]
            memory = f"{row['peak_mb']:,.0f}" if "peak_mb" in row else "–"
            blank = [["–"] * 3 for _ in runs]
            entry = cells.setdefault(row["label"], [*blank, [memory]])
            entry[place] = found
    for label, parts in cells.items():
        lines.append(f"| {label} | " + " | ".join(cell for part in parts for cell in part) + " |")
    return "\n\n".join([*map(heading, runs), "\n".join(lines)])
