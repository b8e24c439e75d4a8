"""The check of rows before training: every count against one by hand, and what is said of it."""

import json
import re
import warnings

import numpy as np
import polars as pl
import pytest
from typer.testing import CliRunner

from sottovoce import Plan, simulate
from sottovoce.cli.commands import app
from sottovoce.data import tables
from sottovoce.data.check import check_arrays, check_plan, check_table
from sottovoce.data.federated import Given, load_holdings
from sottovoce.data.tables import Source
from sottovoce.errors import DataError, InputError, SottovoceError
from sottovoce.flower import worker
from sottovoce.server.federation import build

ROWS = 900
SPECS = {"age": (0.0, 100.0), "smoker": ("Y", "N"), "bmi": (10.0, 60.0), "ill": ("no", "yes")}
PLAN = """\
[data]
path = "people.csv"
label = "ill"
client = "site"
[data.columns]
age = [0, 100]
smoker = ["Y", "N"]
bmi = [10, 60]
ill = ["no", "yes"]
[model]
name = "softmax"
[rounds]
rounds = 2
schedule = "fixed"
"""


def make_rows(seed=0):
    """Return rows as lists of texts, with every fault that the check counts."""
    rng = np.random.default_rng(seed)
    rows = []
    for _ in range(ROWS):
        site = str(rng.choice(["east", "west", "north"]))
        lost = rng.random() < (0.5 if site == "north" else 0.02)
        rows.append(
            {
                "patient_id": str(rng.integers(300)),
                "site": site,
                "age": str(rng.integers(0, 130)),
                "smoker": str(rng.choice(["Y", "N", "?"], p=[0.3, 0.6, 0.1])),
                "bmi": "" if lost else f"{rng.normal(25, 4):.2f}",
                "ill": "yes" if rng.random() < 0.03 else "no",
            }
        )
    return rows


def write_csv(path, rows, separator=","):
    lines = [separator.join(rows[0]), *(separator.join(row.values()) for row in rows)]
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_csv(tmp_path / "people.csv", make_rows())
    (tmp_path / "plan.toml").write_text(PLAN)
    return tmp_path


def run(*words):
    return CliRunner().invoke(app, list(words))


@pytest.mark.parametrize("batch", [7, 65_536])
def test_every_count_is_that_of_a_count_by_hand(folder, monkeypatch, batch):
    monkeypatch.setattr(tables, "BATCH", batch)
    rows, report = make_rows(), check_plan(Plan.load(folder / "plan.toml"))
    assert report.rows == ROWS
    for site in ("east", "west", "north"):
        here = [row for row in rows if row["site"] == site]
        assert report.clients[site] == len(here)
        assert report.columns["age"]["outside"][site] == sum(int(r["age"]) > 100 for r in here)
        assert report.columns["smoker"]["unknown"][site] == sum(r["smoker"] == "?" for r in here)
        assert report.columns["bmi"]["missing"][site] == sum(not r["bmi"] for r in here)
        assert report.labels[site]["yes"] == sum(r["ill"] == "yes" for r in here)
    persons = {}
    for row in rows:
        key = row["patient_id"], row["site"]
        persons[key] = persons.get(key, 0) + 1
    text = "\n".join(report.format_lines())
    assert (
        f"patient_id repeats: one person has up to {max(persons.values())} rows at a client" in text
    )


def test_the_command_prints_findings_and_ends_in_zero(folder):
    done = run("check", "plan.toml")
    assert done.exit_code == 0, done.output
    for words in (
        "people.csv: 900 rows, 3 clients (",
        "age: ",
        "outside [0, 100] and are clipped to it",
        "empty in this column and are read as the middle of [10, 60] (most at north: ",
        "not among the categories Y, N and become none of them",
        "judge by AUROC or balanced accuracy, and see model.class_weights",
    ):
        assert words in done.output
    found = json.loads(run("check", "plan.toml", "--json").output)
    assert found["rows"] == ROWS
    assert {finding["level"] for finding in found["findings"]} == {"warning"}


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ("age = [0, 100]", "age = [1000, 2000]", "age: every value is outside [1000, 2000]"),
        ('smoker = ["Y", "N"]', 'smoker = ["yes", "no"]', "none of its categories yes, no"),
        ('ill = ["no", "yes"]', 'ill = ["no", "maybe"]', "a label that is no class"),
        ("bmi = [10, 60]", "smoker_ = []\npatient_id = [0, 9]\nsite_ = []", None),
    ],
)
def test_a_column_that_cannot_be_used_is_an_error_before_training(folder, before, after, said):
    (folder / "plan.toml").write_text(PLAN.replace(before, after))
    checked, trained = run("check", "plan.toml"), run("train", "plan.toml", "--out", "run")
    assert checked.exit_code == 2 or said is None
    if said is not None:
        assert said in checked.output
        assert isinstance(trained.exception, InputError)
        assert said in str(trained.exception)
    assert not (folder / "run").exists()


def test_train_says_it_first_and_its_record_holds_none_of_it(folder):
    done = run("train", "plan.toml", "--quiet", "--seed", "1", "--out", "run")
    assert done.exit_code == 0, done.output
    assert "warning: age: " in done.stderr
    for name in ("record.json", "report.html", "rounds.jsonl"):
        content = (folder / "run" / name).read_text("utf-8")
        assert "clipped to it" not in content
        assert "repeats" not in content


def test_rows_without_fault_have_nothing_to_warn_of(tmp_path):
    rng = np.random.default_rng(1)
    rows = [
        {"age": f"{rng.uniform(0, 100):.4f}", "bmi": f"{rng.uniform(10, 60):.4f}", "ill": label}
        for label in ["no", "yes"] * 50
    ]
    specs = {key: SPECS[key] for key in rows[0]}
    report = check_table(Source(write_csv(tmp_path / "a.csv", rows), "ill", columns=specs))
    assert report.findings == []
    assert report.format_lines()[-1] == "nothing to warn of"


def test_a_missing_number_that_is_flagged_needs_no_warning(folder):
    said = run("check", "plan.toml").output
    assert re.search(r'the middle of .*%\); data.missing = "flag" gives the model an input', said)
    said = run("check", "plan.toml", "--set", "data.missing=flag").output
    assert "bmi: " not in said
    assert re.search(r"^bmi +\d\d\.\d%", said, re.MULTILINE)


def test_a_few_rows_are_no_reason_for_a_warning(tmp_path):
    rows = [
        {"age": "50" if i > 3 else "700", "bmi": str(20 + i % 9), "ill": "no"} for i in range(60)
    ]
    rows[1]["ill"] = "yes"
    specs = {key: SPECS[key] for key in rows[0]}
    path = write_csv(tmp_path / "a.csv", rows)
    texts = [text for _, _, text in check_table(Source(path, "ill", columns=specs)).findings]
    assert any(text.startswith("age: 6.7% of the rows are outside") for text in texts)
    rows[3]["age"] = "50"
    write_csv(path, rows)
    texts = [text for _, _, text in check_table(Source(path, "ill", columns=specs)).findings]
    assert not any(text.startswith("age") for text in texts)


def warn_of(tmp_path, values, bounds):
    rows = [
        {"age": f"{value:g}", "ill": "no" if i % 2 else "yes"} for i, value in enumerate(values)
    ]
    specs = {"age": bounds, "ill": SPECS["ill"]}
    path = write_csv(tmp_path / "a.csv", rows)
    return [text for _, _, text in check_table(Source(path, "ill", columns=specs)).findings]


@pytest.mark.parametrize(
    ("values", "bounds", "narrow"),
    [
        (np.linspace(20, 90, 500), (0.0, 100.0), False),
        (np.linspace(20, 90, 500), (0.0, 1000.0), "98% of the values fill 7.0% of [0, 1000]"),
        ([*np.linspace(20, 90, 500), 1000.0], (0.0, 1000.0), "98% of the values fill 7.0%"),
        ([0.0] * 997 + [1.0] * 3, (0.0, 1.0), False),  # a rare flag
        ([1.0, 2.0, 3.0] * 99, (0.0, 1e6), "100% of the values fill 0.5%"),
        (np.exp(np.linspace(0, 10, 500)), (0.0, np.exp(10.0)), False),
    ],
)
def test_bounds_that_are_far_too_wide_are_said(tmp_path, values, bounds, narrow):
    texts = warn_of(tmp_path, values, bounds)
    found = [text for text in texts if "which costs accuracy" in text]
    assert len(found) == bool(narrow)
    if narrow:
        assert narrow in found[0]
        assert "not bounds of these rows, which are private" in found[0]


@pytest.mark.parametrize(("outside", "level"), [(94, "warning"), (96, "error"), (100, "error")])
def test_a_column_almost_entirely_outside_its_bounds_is_an_error(tmp_path, outside, level):
    rows = [
        {"age": f"{i % 100 + 1000 * (i % 100 < outside)}", "ill": "no" if i % 2 else "yes"}
        for i in range(1000)
    ]
    rows += [{"age": "", "ill": "no"}] * 1000  # missing cells are not counted
    specs = {"age": (0.0, 100.0), "ill": SPECS["ill"]}
    path = write_csv(tmp_path / "a.csv", rows)
    found = check_table(Source(path, "ill", columns=specs)).findings
    levels = {level for level, _, text in found if "outside [0, 100]" in text}
    assert levels == {level}


def test_ids_that_infer_makes_features_of_are_named(folder):
    plan = PLAN.split("[data.columns]")[0] + 'infer = true\n[model]\nname = "softmax"\n'
    (folder / "plan.toml").write_text(plan)
    said = run("check", "plan.toml").output
    assert "patient_id: it looks like an id, and data.infer makes a feature of it" in said
    assert "patient_id repeats: one person has up to" in said
    left = run("check", "plan.toml", "--set", "data.columns.patient_id=[]").output
    assert "looks like an id" not in left


def test_evaluation_files_are_checked_too(folder):
    rows = [row for row in make_rows(1) if int(row["age"]) <= 100 and row["bmi"]]
    for row in rows:
        row["smoker"] = "Y"
    write_csv(folder / "steer.csv", rows)
    rows = [row | {"age": "4000"} for row in rows]
    rows[3]["ill"] = "perhaps"
    write_csv(folder / "later.csv", rows)
    files = 'label = "ill"\nvalidation = "steer.csv"\ntest = "later.csv"\n'
    (folder / "plan.toml").write_text(PLAN.replace('label = "ill"\n', files))
    done = run("check", "plan.toml")
    assert done.exit_code == 2
    assert f"later.csv: {len(rows)} rows to evaluate on" in done.output
    assert "error: later.csv: age: every value is outside [0, 100]" in done.output
    assert "error: later.csv: ill: rows with a label that is no class: 1, the first is row 4" in (
        done.output
    )
    assert "error: steer.csv" not in done.output
    np.savez("x.npz", x=np.zeros((40, 6)), y=np.arange(40) % 2)
    np.savez("t.npz", x=np.full((9, 6), np.nan), y=np.arange(9) % 2)
    (folder / "arrays.toml").write_text('[data]\npath = "x.npz"\ntest = "t.npz"\n')
    assert (
        "error: t.npz: x: 9 rows hold a number that is missing"
        in run("check", "arrays.toml").output
    )


def test_categories_that_differ_in_case_only_are_hinted_at(folder):
    for before, said in (
        ('smoker = ["Y", "N"]', "(did you mean 'y'? upper and lower case differ); correct"),
        ('ill = ["no", "yes"]', "(did you mean 'No'? upper and lower case differ); correct"),
    ):
        after = before.replace('"Y", "N"', '"y", "n", "-"').replace('"no"', '"No"')
        (folder / "plan.toml").write_text(PLAN.replace(before, after))
        found = run("check", "plan.toml").output
        assert said in found or said.replace("'y'", "'n'") in found


def test_labels_that_differ_in_case_only_are_said_where_all_are_listed(tmp_path):
    rows = [{"age": str(20 + i % 60), "ill": ("no", "No", "yes")[i % 3]} for i in range(90)]
    path = write_csv(tmp_path / "a.csv", rows)
    specs = {"age": SPECS["age"], "ill": ("no", "No", "yes")}
    texts = [text for _, _, text in check_table(Source(path, "ill", columns=specs)).findings]
    assert any(text.startswith("the labels No, no differ in upper and lower") for text in texts)


def test_one_file_to_steer_by_and_to_test_on_is_said_to_flatter(folder):
    write_csv(folder / "later.csv", make_rows()[:300])
    files = 'validation = "later.csv"\ntest = "later.csv"\n[data.columns]'
    (folder / "plan.toml").write_text(PLAN.replace("[data.columns]", files))
    assert "data.validation and data.test are one file" in run("check", "plan.toml").output
    (folder / "plan.toml").write_text(PLAN)
    assert "are one file" not in run("check", "plan.toml").output


def test_evaluation_files_of_one_name_are_both_checked(folder):
    for year, rows in (("2019", 300), ("2020", 200)):
        (folder / year).mkdir()
        write_csv(folder / year / "rows.csv", make_rows()[:rows])
    files = 'validation = "2019/rows.csv"\ntest = "2020/rows.csv"\n[data.columns]'
    (folder / "plan.toml").write_text(PLAN.replace("[data.columns]", files))
    found = check_plan(Plan.load(folder / "plan.toml"))
    assert found.evaluation == {"rows.csv": 300, str(folder / "2020" / "rows.csv"): 200}


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ('client = "site"', "clients = 900", "must leave 900 rows or more for data.clients = 900"),
        ('client = "site"', "clients = 3\nsamples = 300", "data.samples must be at most 720"),
        (
            'client = "site"',
            'clients = 30\nsamples = 20\nsplit = "labels"\nlabels_per_client = 2',
            "runs out, its clients need",
        ),
        ('client = "site"', 'client = "site"\nvalidation = 898', "at most the 897 that clients"),
        (
            'client = "site"',
            'client = "gap"',
            "gap: rows that name no client: 2, the first is row 4",
        ),
        ('client = "site"', 'person = "gap"', "gap: rows that name no person: 2, the first is row"),
    ],
)
def test_the_check_refuses_rows_that_training_cannot_deal(folder, before, after, said):
    rows = [row | {"gap": "" if i in (3, 8) else str(i % 9)} for i, row in enumerate(make_rows())]
    write_csv(folder / "people.csv", rows)
    (folder / "plan.toml").write_text(PLAN.replace(before, after))
    checked, trained = run("check", "plan.toml"), run("train", "plan.toml", "--out", "run")
    assert checked.exit_code == 2, checked.output
    assert said in checked.output
    assert said in str(trained.exception)
    with pytest.raises(SottovoceError):
        build(Plan.load(folder / "plan.toml"), seed=1)
    assert not (folder / "run").exists()


@pytest.mark.parametrize("value", [2**64 - 1, 10**18])
def test_large_numbers_that_are_all_but_equal_are_checked(tmp_path, value):
    rows = {"n": pl.Series([value] * 60, dtype=pl.UInt64), "age": range(60), "ill": ["y", "n"] * 30}
    pl.DataFrame(rows).write_parquet(tmp_path / "a.parquet")
    found = check_table(Source(tmp_path / "a.parquet", "ill", infer=True))
    assert any(column == "n" and "same value" in text for _, column, text in found.findings)


def test_few_test_rows_are_said_with_their_standard_error(folder):
    said = "about 20 rows to test on: a share measured on them has a standard error of up to 0.11"
    words = ("check", "plan.toml", "--set")
    assert said in run(*words, "data.test=20").output
    assert "rows to test on" not in run(*words, "data.test=60").output


def test_copies_and_constant_columns_are_said(tmp_path):
    rows = make_rows()[:200]
    for row in rows:
        row["bmi"] = "20"
    path = write_csv(tmp_path / "a.csv", rows + rows[:50])
    texts = [text for _, _, text in check_table(Source(path, "ill", columns=SPECS)).findings]
    assert "bmi: all rows have the same value; it can be left out" in texts
    assert any(text.startswith("20.0% of the rows are copies of another row") for text in texts)


def test_a_client_with_one_class_is_named(tmp_path):
    rows = make_rows()
    for row in rows:
        row["ill"] = "no" if row["site"] == "west" else row["ill"]
    source = Source(write_csv(tmp_path / "a.csv", rows), "ill", client="site", columns=SPECS)
    texts = [text for _, _, text in check_table(source).findings]
    assert "clients with rows of one class only: west" in texts


def test_a_declared_class_without_rows_is_said_in_the_file_and_at_clients(folder):
    rows = [row | {"ill": ("no", "yes", "later")[i % 3]} for i, row in enumerate(make_rows())]
    for row in rows:
        row["ill"] = "no" if row["site"] == "west" and row["ill"] == "later" else row["ill"]
    write_csv(folder / "people.csv", rows)
    declared = PLAN.replace('["no", "yes"]', '["no", "yes", "later", "never"]')
    (folder / "plan.toml").write_text(declared)
    said = run("check", "plan.toml").output
    assert "no row has the class never, which data.columns declares" in said
    assert "clients without rows of a class: west (later)" in said
    (folder / "plan.toml").write_text(declared.replace(', "never"', ""))
    said = run("check", "plan.toml").output
    assert "no row has the class" not in said
    np.savez("x.npz", x=np.zeros((40, 2)), y=np.arange(40) % 2)
    (folder / "arrays.toml").write_text(
        '[data]\npath = "x.npz"\n[data.columns]\ny = ["0", "1", "2"]\n'
    )
    assert "no row has the class 2" in run("check", "arrays.toml").output


FLATTERS = "one person can be in training and test rows, which flatters the result"


def test_a_person_in_training_and_test_rows_is_said_to_flatter_the_test(folder):
    said = run("check", "plan.toml").output
    assert "patient_id repeats" in said
    assert f"{FLATTERS}, unless data.person = 'patient_id' keeps it on one side" in said
    assert FLATTERS not in run("check", "plan.toml", "--set", "data.person=patient_id").output
    # One row at each of two clients is enough; nothing else is then wrong with the promise.
    rows = make_rows()[:400]
    for i, row in enumerate(rows):
        row |= {"patient_id": str(i // 2), "site": ("east", "west")[i % 2]}
    write_csv(folder / "people.csv", rows)
    said = run("check", "plan.toml").output
    assert f"patient_id repeats: one person has up to 2 rows; {FLATTERS}" in said
    assert "protected k times less" not in said
    for i, row in enumerate(rows):
        row["patient_id"] = str(i)
    write_csv(folder / "people.csv", rows)
    assert "patient_id" not in run("check", "plan.toml").output


def test_persons_of_a_test_file_who_are_trained_on_are_counted(folder):
    rows = make_rows()[:400]
    for i, row in enumerate(rows):
        row["patient_id"] = str(i)
    write_csv(folder / "people.csv", rows)
    write_csv(
        folder / "later.csv", [row | {"patient_id": str(393 + i)} for i, row in enumerate(rows)]
    )
    (folder / "plan.toml").write_text(PLAN.replace("label =", 'test = "later.csv"\nlabel =', 1))
    said = run("check", "plan.toml").output
    assert "later.csv: patient_id: 7 rows are of a person who has rows in people.csv too" in said
    assert FLATTERS not in said


# --- files that are no plain CSV


@pytest.mark.parametrize("separator", [";", "\t", "|"])
def test_other_separators_are_read(tmp_path, separator):
    rows = make_rows()
    plain = Source(write_csv(tmp_path / "a.csv", rows), "ill", client="site", columns=SPECS)
    other = Source(
        write_csv(tmp_path / "b.csv", rows, separator), "ill", client="site", columns=SPECS
    )
    assert np.array_equal(tables.read_table(plain).x, tables.read_table(other).x)
    assert check_table(plain).columns == check_table(other).columns


def test_dates_other_categories_and_lists_of_budgets_are_named(tmp_path):
    """To the holder of the rows: what there is to correct, and nothing about cells of a date."""
    rows = [
        {"site": "ab"[i % 2], "born": f"2023-01-{1 + i % 28:02d}", "kind": kind, "ill": "01"[i < 2]}
        for i, kind in enumerate(["x"] * 50 + ["pro"] * 40 + ["max"] * 30 + ["min"] * 20 + ["z"])
    ]
    write_csv(tmp_path / "people.csv", rows)
    columns = {"born": [2023, 2025], "kind": ["x", "y"], "ill": ["0", "1"]}
    data = {"path": str(tmp_path / "people.csv"), "label": "ill", "client": "site"}
    plan = Plan(data=data | {"columns": columns}, privacy={"epsilon": [1, 2, 3]})
    found = "\n".join(check_plan(plan).format_lines())
    assert "in row 1; it is a date: make a number of it" in found
    assert "of [2023, 2025]" not in found
    assert "the most frequent others: 'pro', 'max', 'min'\n" in found
    assert "error: privacy.epsilon is a list of 3 and data.clients is 2; give one" in found
    assert "model.class_weights" in found
    with pytest.raises(DataError, match="which is no number; it is a date"):
        simulate(plan.replace(**{"privacy.epsilon": 8}), seed=1)
    persons = data | {"columns": {"kind": ["x", "y"], "ill": ["0", "1"]}, "person": "born"}
    said = check_plan(Plan(data=persons, local={"unit": "person"})).format_lines()
    assert any("balanced accuracy" in line for line in said)
    assert not any("class_weights" in line for line in said)  # which persons cannot have


def test_a_draft_names_all_columns_and_numbers_with_other_cells(tmp_path):
    names = [f"measure_{i:02d}" for i in range(15)]
    cells = [["NA" if i % 10 == 0 else f"{i * 1.37:.2f}" for i in range(200)] for _ in names]
    lines = [",".join(names), *map(",".join, zip(*cells, strict=True))]
    (tmp_path / "people.csv").write_text("\n".join(lines) + "\n")
    text = tables.draft_plan(tmp_path / "people.csv", tmp_path / "plan.toml")
    assert set(names) <= set(re.findall(r"measure_\d\d", text.partition("[data.columns]")[0]))
    assert "# measure_00 is left out: it has mostly numbers; empty the cells that are none" in text
    assert max(map(len, text.splitlines())) <= 110


def test_a_decimal_comma_is_named(tmp_path):
    rows = make_rows()
    rows[4]["bmi"] = "23,5"
    source = Source(write_csv(tmp_path / "a.csv", rows, ";"), "ill", columns=SPECS)
    report = check_table(source)
    assert any("the first is '23,5' in row 5; correct it (3.5" in text for text in report.errors)
    with pytest.raises(DataError, match=r"'23,5' in row 5.*3\.5 and not 3,5"):
        tables.read_table(source)


def test_a_row_with_more_cells_is_named_with_its_number(folder):
    lines = (folder / "people.csv").read_text().splitlines()
    lines[17] += ",extra"
    (folder / "people.csv").write_text("\n".join(lines) + "\n")
    done = run("check", "plan.toml")
    assert done.exit_code == 2
    assert "rows with more than 6 cells: 1, the first is row 17" in done.output
    trained = run("train", "plan.toml", "--out", "run")
    assert isinstance(trained.exception, InputError)
    assert not (folder / "run").exists()


def test_a_row_with_fewer_cells_is_a_warning(tmp_path):
    path = write_csv(tmp_path / "a.csv", [{k: r[k] for k in ("ill", "age")} for r in make_rows()])
    path.write_text(path.read_text() + "no\nno\n\n")
    specs = {key: SPECS[key] for key in ("ill", "age")}
    texts = [text for _, _, text in check_table(Source(path, "ill", columns=specs)).findings]
    assert any(f"rows with fewer than 2 cells: 2, the first is row {ROWS + 1}" in t for t in texts)


# --- arrays


def test_arrays_are_checked_for_numbers_that_are_missing_and_for_their_scale():
    rng = np.random.default_rng(2)
    x, y = rng.integers(0, 256, (90, 8, 8), dtype=np.uint8), np.arange(90) % 3
    (finding,) = check_arrays("x.npz", x, y).findings
    assert finding[::2] == (
        "warning",
        "x: whole numbers from 0 to 255 are used as they are; divide pixels by 255",
    )
    assert check_arrays("x.npz", x / 255, y).findings == []
    broken = x / 255
    broken[[4, 40], 0, 0] = np.nan
    (error,) = check_arrays("x.npz", broken, y).errors
    assert re.match(r"x: 2 rows hold a number that is missing .* the first is row 5;", error)


MANY, HALF = 40, np.arange(40) % 2
FLAT = np.random.default_rng(4).random((MANY, 3))
ODD_ROWS = {
    "float16": FLAT.astype(np.float16),
    "booleans": FLAT > 0.5,
    "bytes of pictures": (FLAT * 255).astype(np.uint8),
    "pictures": FLAT.reshape(MANY, 3, 1),
    "beyond float32": FLAT * 1e300,
    "not a number": np.where(FLAT > 0.9, np.nan, FLAT),
    "complex": FLAT + 1j,
    "days": np.zeros((MANY, 3), "M8[D]"),
    "structured": np.zeros((MANY, 3), [("a", "f4")]),
    "numbers as texts": FLAT.astype(str),
    "texts": np.full((MANY, 3), "a"),
    "a text each": np.full(MANY, "some words"),
    "one dimension": FLAT[:, 0],
    "no dimension": np.float64(3),
    "too few": FLAT[:7],
    "none": FLAT[:0],
    "no column": FLAT[:, :0],
    "objects": FLAT.astype(object),
    "objects and a text": np.where(FLAT > 0.9, "a", FLAT.astype(object)),
    "huge objects": np.full((MANY, 3), 10**400, object),
}
ODD_LABELS = {
    "booleans": HALF > 0,
    "floats": HALF * 1.0,
    "measured": FLAT[:, 0],
    "halves": HALF * 0.5,
    "not a number": np.where(HALF, np.nan, 0.0),
    "infinite": np.where(HALF, np.inf, 0.0),
    "texts": np.array(["a", "b"])[HALF],
    "a gap": np.where(np.arange(MANY) == 3, "", np.array(["a", "b"])[HALF]),
    "from minus one": HALF - 1,
    "a billion": HALF * 10**9,
    "all zero": HALF * 0,
    "all one": HALF * 0 + 1,
    "all alike": np.full(MANY, "a"),
    "many numbers": np.arange(MANY) * 7 + 3,
    "bytes": np.array(["a", "b"])[HALF].astype("S"),
    "complex": HALF + 1j,
    "days": HALF.astype("M8[D]"),
    "two dimensions": HALF[:, None],
    "no dimension": np.int64(1),
    "too few": HALF[:8],
    "none": HALF[:0],
    "objects": np.array(["a", 1], object)[HALF],
    "objects with none": np.array(["a", None], object)[HALF],
}
ODD_IDS = {
    "numbers": np.arange(MANY) % 3,
    "floats": np.arange(MANY) % 3 * 1.0,
    "texts": np.array(list("abc"))[np.arange(MANY) % 3],
    "pairs": np.arange(MANY) // 2,
    "one": np.zeros(MANY),
    "too few": np.arange(5),
    "two dimensions": (np.arange(MANY) % 3)[:, None],
    "not a number": np.where(np.arange(MANY) == 4, np.nan, 1.0),
    "a gap": np.where(np.arange(MANY) == 4, "", "a"),
    "bytes": np.arange(MANY).astype("S"),
    "booleans": np.arange(MANY) > 4,
    "objects": np.array(["a", 1], object)[HALF],
    "objects with none": np.array(["a", None], object)[HALF],
}
ODD = [
    *(pytest.param({"x": x}, id=f"x: {name}") for name, x in ODD_ROWS.items()),
    *(pytest.param({"y": y}, id=f"y: {name}") for name, y in ODD_LABELS.items()),
    *(
        pytest.param({key: ids}, id=f"{key}: {name}")
        for key in ("client", "person")
        for name, ids in ODD_IDS.items()
        if (key, ids.dtype.kind) != ("person", "O")  # `check_arrays` does not look at persons
    ),
    *(
        pytest.param({"x": x, "y": y}, id=f"x: {name}, y: {other}")
        for (name, x), (other, y) in zip(ODD_ROWS.items(), ODD_LABELS.items(), strict=False)
    ),
]


@pytest.mark.parametrize("odd", ODD)
def test_the_check_of_arrays_passes_what_training_takes_and_nothing_else(tmp_path, odd):
    arrays = {"x": FLAT, "y": HALF, **odd}
    clients = {} if "client" in arrays else {"clients": 3}
    if any(array.dtype == object for array in arrays.values()):  # which no file holds
        plan = Plan(data={"name": "arrays", "clients": 3, "validation": 4, "test": 4})
        x, y = arrays.pop("x"), arrays.pop("y")
        given = Given((x, y), **arrays)
        errors = check_arrays("x.npz", x, y, arrays.get("client")).errors
    else:
        np.savez(tmp_path / "rows.npz", **arrays)
        roles = {name: name for name in arrays if name not in ("x", "y")}
        data = {"path": str(tmp_path / "rows.npz"), "validation": 4, "test": 4, **roles, **clients}
        plan, given = Plan(data=data), None
        errors = check_plan(plan).errors
    refused = ""
    try:
        load_holdings(plan, seed=1, data=given)
    except SottovoceError as error:
        refused = str(error)
    assert bool(errors) == bool(refused), (errors, refused)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ({"test": 50}, "must leave 3 rows or more"),
        ({"columns": {"y": ["0", "2"]}}, "data labels must be one of 0, 2"),
        ({"test": "narrow.npz"}, r"data\.test must be rows of shape \(3,\)"),
        ({"test": "one.npz"}, "data labels must be below 2"),
        ({"client": "site", "clients": 5}, "data.clients must be 2, the clients of column site"),
    ],
)
def test_the_check_of_arrays_knows_what_the_plan_asks_of_them(folder, data, words):
    np.savez("narrow.npz", x=FLAT[:, :2], y=HALF)
    np.savez("one.npz", x=FLAT, y=HALF * 0)
    np.savez("rows.npz", x=FLAT, y=HALF if data.get("test") != "one.npz" else 2 * HALF, site=HALF)
    plan = Plan(data={"path": "rows.npz", "clients": 3, "validation": 4, "test": 4, **data})
    assert re.search(words, "\n".join(check_plan(plan).errors))
    with pytest.raises(InputError, match=words):
        build(plan, seed=1)


@pytest.mark.parametrize("labels", [HALF * 0, HALF > 1])
def test_labels_of_one_class_are_said(folder, caplog, labels):
    np.savez("rows.npz", x=FLAT, y=labels)
    plan = Plan(data={"path": "rows.npz", "clients": 2, "validation": 4, "test": 4})
    assert any("all labels are of one class" in text for *_, text in check_plan(plan).findings)
    load_holdings(plan, seed=1)
    assert "all labels are of one class" in caplog.text
    caplog.clear()
    arrays = Plan(data={"name": "arrays", "clients": 2, "validation": 4, "test": 4})
    load_holdings(arrays, seed=1, data=Given((FLAT, labels)))
    assert "all labels are of one class" in caplog.text
    caplog.clear()
    load_holdings(arrays, seed=1, data=Given((FLAT, HALF)))
    assert caplog.text == ""


def test_classes_that_public_rows_show_may_be_many_numbers_at_a_client():
    """Labels of one client, from 5 to 64, are no measurement where others say what classes are."""
    rows = np.random.default_rng(5).random((100, 3))
    public, client = (rows, np.arange(100)), (rows, np.arange(100) % 60 + 5)
    plan = Plan(data={"name": "arrays", "clients": 2, "samples": [100, 100], "split": "sizes"})
    held = load_holdings(plan, seed=1, data=Given([client, client], public, public))
    assert (held.classes, int(held.train.y.max())) == (100, 64)


def test_bytes_given_from_python_are_said(caplog):
    rng = np.random.default_rng(2)
    x, y = rng.integers(0, 256, (90, 6), dtype=np.uint8), np.arange(90) % 2
    plan = Plan(
        data={"clients": 2}, model={"name": "softmax"}, rounds={"schedule": "fixed", "rounds": 1}
    )
    simulate(plan, data=(x, y), seed=1)
    assert "to 255 are used as they are" in caplog.text
    caplog.clear()
    simulate(plan, data=(x / 255, y), seed=1)
    assert caplog.text == ""


def test_the_check_of_a_plan_with_arrays_and_of_a_dataset(folder):
    np.savez("x.npz", x=np.full((40, 6), np.inf), y=np.arange(40) % 2)
    (folder / "plan.toml").write_text('[data]\npath = "x.npz"\n')
    assert run("check", "plan.toml").exit_code == 2
    with pytest.raises(InputError, match=r"data\.path must be your own table"):
        check_plan(Plan())


# --- a client's own side


def write_node(folder, columns, vault="w.vault"):
    (folder / "node.toml").write_text(
        f'schema = 1\nname = "ward"\nvault = "{vault}"\n[data]\npath = "people.csv"\n'
        f'label = "ill"\n{columns}\n[policy]\nepsilon = 8.0\ndelta = 1e-5\nclip = 1.0\n'
    )
    return folder / "node.toml"


def test_a_client_checks_its_rows_on_its_own_machine(folder, capsys):
    listed = 'columns = { age = [0, 100], bmi = [10, 60], ill = ["no", "yes"] }'
    path = write_node(folder, listed)
    from sottovoce.client import ledger

    ledger.create_from_node(path, second_ledger=True)
    worker.main(["--check", str(path)])
    said = capsys.readouterr().out
    assert "warning: age: " in said
    assert "patient_id repeats" in said
    assert "is in order" in said
    wrong = write_node(folder, listed.replace("[0, 100]", "[1000, 2000]"), "other.vault")
    ledger.create_from_node(wrong, second_ledger=True)
    with pytest.raises(InputError, match=r"every value is outside \[1000, 2000\]"):
        worker.main(["--check", str(wrong)])


# --- drafts


def test_a_draft_says_which_columns_are_no_features(folder):
    rows = [
        {
            "patient_id": str(i % 150),
            "visit": f"{1 + i % 28:02d}.{1 + i % 12:02d}.{2000 + i % 20}",
            "age": str(i % 90),
            "notes": f"came with a cough and a fever, number {i}, sent home",
            "ward": "ABC"[i % 3],
            "diagnosis": f"code {i % 99}",
            "reference": f"R-{i}",
            "number": str(1 + i),
            "laboratory": str(4 * i),
            "ill": "yn"[i % 2],
        }
        for i in range(300)
    ]
    write_csv(folder / "mess.csv", rows, ";")
    assert run("init", "--from", "mess.csv", "mess.toml").exit_code == 0
    text = (folder / "mess.toml").read_text()
    for column, words in {
        "patient_id": "is left out: it looks like an id",
        "visit": "is left out: dates are no categories",
        "notes": "is left out: it looks like free text",
        "diagnosis": "is left out: it has very many different texts",
        "reference": "is left out: it looks like an id",
        "number": "is left out: it looks like an id",
        "laboratory": "= [LOW, HIGH]",
        "age": "= [LOW, HIGH]",
        "ward": "= [TEXT, TEXT]",
        "ill": "= [TEXT, TEXT]",
    }.items():
        assert re.search(rf"^# {column} {re.escape(words)}", text, re.MULTILINE), column


def test_columns_of_bytes_and_lists_are_left_out_of_draft_and_check(folder):
    rows = pl.DataFrame(make_rows()).with_columns(pl.col("bmi").replace("", "25").cast(float))
    ids = [bytes([255, i % 200]) for i in range(ROWS)]  # no UTF-8
    tags = pl.Series([["a", "b"]] * ROWS)
    rows.with_columns(patient_id=pl.Series(ids), tags=tags).write_parquet("people.parquet")
    assert run("init", "--from", "people.parquet", "draft.toml").exit_code == 0
    text = (folder / "draft.toml").read_text()
    for column in ("patient_id", "tags"):
        assert f"# {column} is left out: it has lists or bytes; save it as" in text
    (folder / "plan.toml").write_text(PLAN.replace("people.csv", "people.parquet"))
    done = run("check", "plan.toml")
    assert done.exit_code == 0, done.output
    assert "people.parquet: 900 rows, 3 clients" in done.output


def test_numbers_that_are_infinite_are_drafted_without_a_warning_of_numpy(tmp_path):
    pl.DataFrame({"dose": [1.0, float("inf"), *range(98)], "ill": ["y", "n"] * 50}).write_parquet(
        tmp_path / "a.parquet"
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert tables.guess_kinds(tmp_path / "a.parquet") == {"dose": "number", "ill": "text"}


def test_a_draft_has_the_lines_of_a_label_that_is_a_measurement(folder):
    write_csv(folder / "people.csv", [row | {"grade": "1"} for row in make_rows()])
    done = run("init", "--from", "people.csv", "draft.toml")
    assert "of a measurement also target and loss" in done.output
    text = (folder / "draft.toml").read_text()
    assert "# Only if the label is a measurement, one of age, bmi:" in text  # a grade is classes
    assert "# grade = [LOW, HIGH]" in text
    for before, after in (
        ('label = ""', 'label = "bmi"'),
        ("# target = [LOW, HIGH]", "target = [10, 60]"),
        ('# loss = "squared"', 'loss = "squared"'),
        ("# age = [LOW, HIGH]", "age = [0, 130]"),
    ):
        assert text.count(before) == 1
        text = text.replace(before, after)
    (folder / "draft.toml").write_text(text)
    plan = Plan.load(folder / "draft.toml")
    assert plan.regression == ("squared", 10.0, 60.0)
    assert "rows with no label" in run("check", "draft.toml").output  # some are empty


def test_repeats_of_persons_who_are_protected_are_said_only_beyond_their_rows(folder):
    named = PLAN.replace('client = "site"', 'client = "site"\nperson = "patient_id"')
    (folder / "plan.toml").write_text(named)
    assert "protected k times less" in run("check", "plan.toml").output
    (folder / "plan.toml").write_text(named + '[local]\nunit = "person"\n')
    plain = run("check", "plan.toml", "--set", "data.rows_per_person=50")
    assert "repeats" not in plain.output
    few = run("check", "plan.toml", "--set", "data.rows_per_person=2")
    assert "2 of them are used (data.rows_per_person)" in few.output


def test_no_rows_and_misshapen_arrays_are_refused_in_words(tmp_path):
    (tmp_path / "a.csv").write_text("age,bmi,ill\n")
    with pytest.raises(DataError, match="no complete row below its header"):
        check_table(
            Source(tmp_path / "a.csv", "ill", columns={k: SPECS[k] for k in ("age", "ill")})
        )
    for x, y in ((np.zeros((0, 3)), np.zeros(0)), (np.zeros((4, 3)), np.zeros(5))):
        (error,) = check_arrays("x.npz", x, y).errors
        assert "must be X[n, …] and y[n] with n ≥ 1" in error


def test_a_label_that_is_infinite_is_refused_by_check_and_training(tmp_path):
    rows = "".join(f"{i % 50},{'inf' if i == 7 else i % 10}\n" for i in range(100))
    (tmp_path / "a.csv").write_text("x,y\n" + rows)
    data = {"path": tmp_path / "a.csv", "label": "y", "columns": {"x": [0, 50]}, "target": [0, 9]}
    plan = Plan(data=data, model={"loss": "squared"})
    assert "a label that is no number: 1, the first is row 8 ('inf')" in check_plan(plan).errors[0]
    with pytest.raises(DataError, match=r"row 8 of a\.csv has the label 'inf', which is no number"):
        build(plan, seed=1)


def test_a_label_that_is_a_number_is_held_to_its_range(tmp_path):
    y = np.linspace(0, 100, 200)
    lines = ["age,y", *(f"{i % 90},{value}" for i, value in enumerate(y)), "7,", "8,high"]
    (tmp_path / "rows.csv").write_text("\n".join(lines))
    np.savez(tmp_path / "rows.npz", x=np.zeros((200, 1)), y=y)
    number = {"label": "y", "target": [0, 80], "clients": 2}
    of_table = number | {"path": str(tmp_path / "rows.csv"), "columns": {"age": [0, 90]}}
    report = check_plan(Plan(data=of_table, model={"loss": "squared"}))
    assert sum(report.columns["y"]["outside"].values()) == int((y > 80).sum())
    assert any("outside [0, 80] and are clipped" in text for _, _, text in report.findings)
    assert [text.split(":")[1] for text in report.errors] == [
        " rows with no label",
        " rows with a label that is no number",
    ]
    assert "the first is row 201 (the cell is empty); correct" in report.errors[0]
    assert not report.labels
    with pytest.raises(DataError, match=r"^row 201 of rows\.csv has an empty cell in column 'y'; "):
        simulate(Plan(data=of_table, model={"loss": "squared"}), seed=1)
    of_arrays = number | {"path": str(tmp_path / "rows.npz")}
    report = check_plan(Plan(data=of_arrays, model={"loss": "squared"}))
    assert any("20.0% of the rows are outside [0, 80]" in text for _, _, text in report.findings)
    assert not any(report.labels.values())
