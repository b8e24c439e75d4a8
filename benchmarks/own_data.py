"""Measure what a user reaches on seven tables: the defaults beside central training.

    python benchmarks/own_data.py                         all but the column "rehearsed"
    python benchmarks/own_data.py --rehearse MINUTES      choose settings, `--jobs` at a time
    python benchmarks/own_data.py --rehearsed             the column, of the settings chosen

The tables and the scores of scikit-learn and diffprivlib come from `peers/own_tables.py`, in an
environment of its own. Ours are means over seeds of plans that name the table, its label, its
public columns, five clients (or the sites of the table) and ε, and nothing else; δ is 1e-5, one
record is protected. A rehearsal is given the same plan and how many rows a client has (sites: on
average); it reads no table, so that it can run on another machine. Writes
results/own_data.json and the table in docs/own-data.md; the settings go to .bench/rehearsed.json.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import subprocess
from pathlib import Path
from typing import Any

import environments
import numpy as np

from sottovoce import Plan, simulate_many
from sottovoce.studies.rehearsal.rehearsing import rehearse

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
EPSILON, SEEDS = (1.0, 4.0, 8.0), range(1, 6)
PAGE = ROOT / "docs" / "own-data.md"
BEGIN, END = "<!-- the table of benchmarks/own_data.py -->", "<!-- end -->"
TASKS = {"auroc": "AUROC", "accuracy": "accuracy", "r2": "R²"}


def make_plan(folder: Path, name: str, facts: dict[str, Any], epsilon: float) -> Plan:
    """Return the plan that a user would write for a table: what is public, and a budget."""
    data: dict[str, Any] = {
        "path": str(folder / f"{name}.csv"),
        "test": str(folder / f"{name}_test.csv"),
        "label": "label",
        "columns": facts["columns"],
    }
    data |= {"client": "site", "evaluation": "public"} if facts["sites"] else {"clients": 5}
    model = {"model": {"loss": "squared"}} if facts["task"] == "r2" else {}
    named = {"metric": "auroc"} if facts["sites"] else {}  # a rehearsal cannot see a rare class
    return Plan(data=data, privacy={"epsilon": epsilon}, **model, **named)


def score_plan(plan: Plan, task: str) -> tuple[float, float, int]:
    """Return the mean and deviation of the task's metric over seeds, and how many are headed as
    better than a constant answer."""
    runs = [run.record["result"] for run in simulate_many([plan], seeds=SEEDS)]
    values = [run["metrics"][task]["value"] for run in runs]
    better = sum(run["headline"]["is_better"] for run in runs)
    return float(np.mean(values)), float(np.std(values, ddof=1)), better


def measure_tables(folder: Path) -> list[dict[str, Any]]:
    """Return one entry for each table and ε."""
    found = []
    for file in sorted(folder.glob("*.json")):
        facts = json.loads(file.read_text("utf-8"))
        for epsilon in EPSILON:
            plan = make_plan(folder, file.stem, facts, epsilon)
            mean, deviation, better = score_plan(plan, facts["task"])
            entry = {
                "table": file.stem, "task": facts["task"], "rows": facts["rows"],
                "epsilon": epsilon, "default": mean, "deviation": deviation, "better": better,
                "plain": facts["plain"], "central": facts[f"central {epsilon:g}"],
            }  # fmt: skip
            found.append(entry)
            print(json.dumps(entry), flush=True)
    return found


def rehearse_table(job: tuple[Path, str, float, float]) -> dict[str, Any]:
    """Return what a rehearsal of so many minutes chooses for a table and an ε."""
    folder, name, epsilon, minutes = job
    facts = json.loads((folder / f"{name}.json").read_text("utf-8"))
    plan = make_plan(folder, name, facts, epsilon)
    rows = facts["rows"] if facts["sites"] else int(0.9 * facts["rows"])  # a tenth steers
    sizes = {"samples": rows // 5} | ({"clients": 5} if facts["sites"] else {})
    found = rehearse(plan, runs=100_000, minutes=minutes, **sizes)
    chosen = {"table": name, "epsilon": epsilon, "minutes": minutes}
    chosen |= {"federations": len(found.trials), "setting": dict(found.setting)}
    return chosen | {"changes": found.space.list_changes(found.setting)}


def use_one_thread() -> None:
    """Let JAX compute in one thread: in each of many processes it would take all cores."""
    os.environ["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"


def rehearse_tables(folder: Path, minutes: float, count: int) -> list[dict[str, Any]]:
    """Rehearse every table at every ε, `count` at a time."""
    names = sorted(file.stem for file in folder.glob("*.json"))
    jobs = [(folder, name, epsilon, minutes) for name in names for epsilon in EPSILON]
    found = []
    with multiprocessing.get_context("spawn").Pool(count, use_one_thread) as pool:
        for chosen in pool.imap_unordered(rehearse_table, jobs, chunksize=1):
            found.append(chosen)
            print(json.dumps(chosen), flush=True)
    return found


def score_rehearsed(folder: Path, entry: dict[str, Any], chosen: dict[str, Any]) -> dict[str, Any]:
    """Return the entry with what its plan reaches with the settings chosen."""
    facts = json.loads((folder / f"{entry['table']}.json").read_text("utf-8"))
    plan = make_plan(folder, entry["table"], facts, entry["epsilon"])
    mean, deviation, better = score_plan(plan.replace(**chosen["changes"]), entry["task"])
    added = {"rehearsed": mean, "rehearsed_deviation": deviation, "rehearsed_better": better}
    added |= {key: chosen[key] for key in ("minutes", "federations", "setting")}
    print(entry["table"], entry["epsilon"], json.dumps(added), flush=True)
    return entry | added


def format_table(entries: list[dict[str, Any]]) -> str:
    """Return the entries as a table of the page."""
    lines = [
        "| table | metric | ε | defaults (sd) | rehearsed (sd) | diffprivlib, all rows in one "
        "place | without privacy | headed as better than a constant answer |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for entry in entries:
        rehearsed = "–"
        if "rehearsed" in entry:
            rehearsed = f"{entry['rehearsed']:.3f} ({entry['rehearsed_deviation']:.3f})"
        central = f"{entry['central']:.3f}" if entry["central"] > -10 else "below −10"
        lines.append(
            f"| {entry['table']}, {entry['rows']:,} rows | {TASKS[entry['task']]} | "
            f"{entry['epsilon']:g} | {entry['default']:.3f} ({entry['deviation']:.3f}) | "
            f"{rehearsed} | {central} | {entry['plain']:.3f} | {entry['better']} of {len(SEEDS)} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--rehearse", type=float, metavar="MINUTES")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--rehearsed", action="store_true")
    given = parser.parse_args()
    folder, kept = environments.FOLDER / "own-tables", ROOT / "results" / "own_data.json"
    settings = environments.FOLDER / "rehearsed.json"
    if not folder.exists():
        python = environments.python_of("sklearn")
        subprocess.run([python, HERE / "peers" / "own_tables.py", folder], check=True)
    if given.rehearse is not None:
        found = rehearse_tables(folder, given.rehearse, given.jobs)
        settings.write_text(json.dumps(found, indent=1) + "\n", "utf-8")
        return
    if given.rehearsed:
        chosen = {(c["table"], c["epsilon"]): c for c in json.loads(settings.read_text("utf-8"))}
        entries = [
            score_rehearsed(folder, entry, chosen[entry["table"], entry["epsilon"]])
            for entry in json.loads(kept.read_text("utf-8"))
        ]
    else:
        entries = measure_tables(folder)
    kept.write_text(json.dumps(entries, indent=1) + "\n", "utf-8")
    page = PAGE.read_text("utf-8")
    head, tail = page.split(BEGIN)[0], page.split(END)[1]
    PAGE.write_text(f"{head}{BEGIN}\n{format_table(entries)}\n{END}{tail}", "utf-8")


if __name__ == "__main__":
    main()
