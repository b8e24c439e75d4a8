"""The tables of docs/performance.md, made anew from results/bench: python benchmarks/pages.py."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import cpu_table
import gpu_table
import growth
import peer_table
import tuning
import vault

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "performance.md"
TABLES: dict[str, Callable[[Any], str]] = {
    "cpu": cpu_table.page,
    "peers": peer_table.page,
    "gpu": gpu_table.page,
    "growth": growth.page,
    "tuning": tuning.page,
    "vault": vault.page,
}


def placed(text: str, name: str, table: str) -> str:
    """The text with a table between the marks of that name.

    >>> placed("a <!-- x: begin --> old <!-- x: end --> b", "x", "new").split()
    ['a', '<!--', 'x:', 'begin', '-->', 'new', '<!--', 'x:', 'end', '-->', 'b']
    """
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    before, found, rest = text.partition(begin)
    _, closed, after = rest.partition(end)
    if not (found and closed):
        raise ValueError(f"no place for {name}: the page needs {begin} and {end}")
    return f"{before}{begin}\n\n{table}\n\n{end}{after}"


def made_anew(text: str) -> str:
    """The page with every table as its file has it."""
    for name, table in TABLES.items():
        kept = json.loads((ROOT / "results" / "bench" / f"{name}.json").read_text("utf-8"))
        text = placed(text, name, table(kept))
    return text


if __name__ == "__main__":
    before = PAGE.read_text("utf-8")
    after = made_anew(before)
    PAGE.write_text(after, "utf-8")
    place = PAGE.relative_to(ROOT)
    print(f"{place} {'has new tables' if after != before else 'is as it was'}; its prose is yours")
