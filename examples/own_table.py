"""Train on your own table: a CSV with one row per person, and a column that says whose it is.

Run it with `python examples/own_table.py`; it takes seconds, and leaves all it makes in the folder
own-table-example where you are.
"""

import csv
import random
from pathlib import Path

from sottovoce import Plan, load, simulate

# A table for the example: use your own file instead.
folder = Path("own-table-example")
folder.mkdir(exist_ok=True)
chance = random.Random(1)
with (folder / "people.csv").open("w", newline="", encoding="utf-8") as file:
    rows = csv.writer(file)
    rows.writerow(["hospital", "age", "smoker", "pressure", "ill"])
    for _ in range(4000):
        age, smoker = chance.randint(18, 90), chance.choice(["yes", "no", ""])  # "": not known
        pressure = round(chance.gauss(100 + age / 2, 12))
        ill = age / 100 + (smoker == "yes") / 3 + chance.gauss(0, 0.15) > 0.65
        rows.writerow([chance.choice("ABCDEFGH"), age, smoker, pressure, "yes" if ill else "no"])

plan = Plan(
    data={
        "path": str(folder / "people.csv"),
        "label": "ill",
        "client": "hospital",  # every hospital is a client
        # Public knowledge, not looked up in the rows: bounds of numbers, categories of texts.
        "columns": {
            "age": [0, 120],
            "smoker": ["yes", "no"],
            "pressure": [60, 220],
            "ill": ["no", "yes"],
        },
        "validation": 0.1,  # of each hospital's rows: to decide when to stop
        "test": 0.2,
    },
    model={"name": "mlp", "hidden": 16},
    privacy={"epsilon": 4, "delta": 1e-6},
    rounds={"rounds": 60},
)
run = simulate(plan, seed=1, out=folder / "run")
print(f"test accuracy {run.accuracy:.1%} after {run.rounds_used} rounds")
print(run.guarantee)

# New people: the same columns in any order, without the label.
(folder / "new.csv").write_text("age,pressure,smoker\n25,110,no\n88,150,yes\n")
print(load(folder / "run").predict_table(folder / "new.csv"))
