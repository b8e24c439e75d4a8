"""Write seven tables with what is public about them, and what central training reaches on each.

    python own_tables.py FOLDER

In an environment of its own: scikit-learn has five of the tables and the regressions without
privacy, diffprivlib the central private ones. A table is NAME.csv and NAME_test.csv; NAME.json has
its columns, its task, and the scores of the others. Bounds are the smallest and largest values
of the published tables (scikit-learn), or chosen as a codebook would (the two of hospitals).
"""

from __future__ import annotations

import csv
import json
import sys
import warnings
from pathlib import Path

import numpy as np
from diffprivlib import models as private
from sklearn import datasets
from sklearn.linear_model import LogisticRegression, Ridge
from sklearn.metrics import accuracy_score, r2_score, roc_auc_score

EPSILON = (1.0, 4.0, 8.0)
HOSPITAL = {
    "age": [18, 100], "bmi": [15, 50], "sex": ["f", "m"], "smoker": ["no", "yes"],
    "creatinine": [0.3, 4.0], "systolic": [80, 200], "crp": [0, 60], "prior": [0, 6],
}  # fmt: skip
SITES, SHARES = ("north", "south", "east", "west", "port"), (0.40, 0.25, 0.20, 0.10, 0.05)


def draw_hospital(rows: int, share: float, seed: int) -> tuple[list[dict[str, str]], list[str]]:
    """Draw visits of patients at five sites of unequal size; `share` of them end in readmission."""
    rng, visits, risks = np.random.default_rng(seed), [], []
    while len(visits) < rows:
        site, patient = int(rng.choice(5, p=SHARES)), f"p{len(visits):06d}"
        age, bmi, own_risk = rng.normal(62, 14), rng.normal(27, 5), rng.normal(0, 0.4)
        sex, smoker = rng.integers(2), int(rng.random() < 0.25)
        for visit in range(rng.geometric(0.6)):
            creatinine, crp = np.exp(rng.normal(0, 0.35)), np.exp(rng.normal(1.2, 0.9))
            prior, systolic = rng.poisson(0.6), rng.normal(132, 18) + 6 * smoker
            risk = own_risk + 0.045 * (age - 62) + 0.05 * (bmi - 27) + 0.5 * smoker + 0.35 * prior
            risk += 0.9 * np.log(creatinine) + 0.5 * np.log(crp / 3.3) + 0.15 * (site - 1.5)
            cells = {
                "patient": patient, "site": SITES[site], "age": f"{age + visit:.0f}",
                "bmi": f"{bmi:.1f}", "sex": "fm"[sex], "smoker": ("no", "yes")[smoker],
                "creatinine": f"{creatinine:.2f}", "systolic": f"{systolic:.0f}",
                "crp": f"{crp:.1f}", "prior": str(prior),
            }  # fmt: skip
            for gap in ("bmi", "creatinine", "crp"):
                if rng.random() < 0.08:
                    cells[gap] = ""
            visits.append(cells)
            risks.append(1.3 * risk)
    low, high = -30.0, 30.0
    for _ in range(60):  # the intercept that gives the share
        middle = (low + high) / 2
        mean = float(np.mean(1 / (1 + np.exp(-np.array(risks) - middle))))
        low, high = (middle, high) if mean < share else (low, middle)
    chance = 1 / (1 + np.exp(-np.array(risks) - low))
    labels = ["yes" if ill else "no" for ill in rng.random(len(risks)) < chance]
    return visits[:rows], labels[:rows]


def encode(rows: list[dict[str, str]], columns: dict[str, list]) -> np.ndarray:
    """Return rows as numbers: those of a column scaled to [0, 1] by its bounds, texts as 0/1."""
    found = []
    for row in rows:
        numbers: list[float] = []
        for column, public in columns.items():
            if isinstance(public[0], str):
                numbers += [float(row[column] == category) for category in public]
            elif row[column] == "":
                numbers.append(0.5)
            else:
                low, high = public
                numbers.append((min(max(float(row[column]), low), high) - low) / (high - low))
        found.append(numbers)
    return np.array(found)


def score(task: str, y: np.ndarray, fitted: object, x: np.ndarray) -> float:
    """Return AUROC of two classes, accuracy of more, R² of numbers."""
    if task == "r2":
        return float(r2_score(y, fitted.predict(x)))
    if task == "accuracy":
        return float(accuracy_score(y, fitted.predict(x)))
    return float(roc_auc_score(y, fitted.predict_proba(x)[:, 1]))


def compare(task: str, train: tuple, test: tuple, target: list[float] | None) -> dict[str, object]:
    """Return the scores without privacy, and of diffprivlib with all rows in one place, by ε."""
    x, y = train
    plain = Ridge(1e-3) if task == "r2" else LogisticRegression(C=10.0, max_iter=5000)
    found: dict[str, object] = {"plain": score(task, test[1], plain.fit(x, y), test[0])}
    for epsilon in EPSILON:
        scores = []
        for seed in range(5):
            if task == "r2":
                model = private.LinearRegression(
                    epsilon=epsilon, bounds_X=(0, 1), bounds_y=tuple(target), random_state=seed
                )
            else:
                model = private.LogisticRegression(
                    epsilon=epsilon, data_norm=float(np.sqrt(x.shape[1])), max_iter=2000,
                    random_state=seed,
                )  # fmt: skip
            scores.append(score(task, test[1], model.fit(x, y), test[0]))
        found[f"central {epsilon:g}"] = float(np.mean(scores))
    return found


def write(folder: Path, name: str, task: str, rows: tuple, tests: tuple, columns: dict) -> None:
    """Write a table, its test table, and what is known of it."""
    for suffix, (cells, labels) in (("", rows), ("_test", tests)):
        with (folder / f"{name}{suffix}.csv").open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, [*cells[0], "label"])
            writer.writeheader()
            writer.writerows(
                {**row, "label": label} for row, label in zip(cells, labels, strict=True)
            )
    target = None
    if task == "r2":
        target = [25.0, 346.0]  # of the table's description
        y, z = (np.array(labels, float) for labels in (rows[1], tests[1]))
    else:
        classes = sorted({*rows[1]})
        y, z = (
            np.array([classes.index(label) for label in labels]) for labels in (rows[1], tests[1])
        )
    train, test = (encode(rows[0], columns), y), (encode(tests[0], columns), z)
    public = columns | {"label": target if task == "r2" else sorted({*rows[1]})}
    facts = {"task": task, "rows": len(y), "tested": len(z), "columns": public,
             "sites": "site" in rows[0][0], **compare(task, train, test, target)}  # fmt: skip
    (folder / f"{name}.json").write_text(json.dumps(facts, indent=1) + "\n")
    print(name, {key: value for key, value in facts.items() if key != "columns"}, flush=True)


def main(folder: Path) -> None:
    """Write all tables."""
    warnings.simplefilter("ignore")
    folder.mkdir(parents=True, exist_ok=True)
    for name, load, task in (
        ("cancer", datasets.load_breast_cancer, "auroc"),
        ("wine", datasets.load_wine, "accuracy"),
        ("iris", datasets.load_iris, "accuracy"),
        ("diabetes", lambda: datasets.load_diabetes(scaled=False), "r2"),
        ("digits", datasets.load_digits, "accuracy"),
    ):
        found = load()
        order = np.random.default_rng(1).permutation(len(found.target))
        if name == "digits":
            order = order[:900]  # a subset
        names = [f"x{i}" for i in range(found.data.shape[1])]
        low, high = found.data.min(axis=0), found.data.max(axis=0)
        used = high > low
        columns = {
            n: [float(a), float(b)] for n, a, b, u in zip(names, low, high, used, strict=True) if u
        }
        cells = [{n: f"{row[i]:g}" for i, n in enumerate(names) if used[i]} for row in found.data]
        labels = [f"{v:g}" if task == "r2" else str(found.target_names[v]) for v in found.target]
        cut = len(order) // 4
        parts = [([cells[i] for i in ids], [labels[i] for i in ids])
                 for ids in (order[cut:], order[:cut])]  # fmt: skip
        write(folder, name, task, *parts, columns)
    for name, rows, share in (("rare", 12_000, 0.026), ("tenth", 8_000, 0.10)):
        write(folder, name, "auroc", draw_hospital(rows, share, 1),
              draw_hospital(20_000, share, 2), HOSPITAL)  # fmt: skip


if __name__ == "__main__":
    main(Path(sys.argv[1]))
