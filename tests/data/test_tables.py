"""Your own table: encoded as documented, split by its clients, refused before a file is written."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sottovoce import Plan, load, reports, resume, simulate, simulate_many
from sottovoce.data import tables as scanning
from sottovoce.data.check import check_plan
from sottovoce.data.tables import (
    Layout,
    Source,
    Table,
    guess_kinds,
    read_rows,
    read_samples,
    read_table,
)
from sottovoce.errors import DataError, InputError, PlanError, SottovoceError
from sottovoce.flower.federate import deal
from sottovoce.server.federation import build
from support.command_line import run_command as sottovoce

COLUMNS = {"age": [0, 100], "sex": ["f", "m"], "rich": ["no", "yes"]}
FIXED = {"schedule": "fixed", "rounds": 2}


def people(rows: int = 240, clients: int = 6, seed: int = 0) -> pl.DataFrame:
    rng = np.random.default_rng(seed)
    age = rng.integers(18, 95, rows)
    return pl.DataFrame(
        {
            "id": np.arange(rows),
            "town": rng.choice([f"town {i}" for i in range(clients)], rows),
            "age": age,
            "sex": rng.choice(["f", "m"], rows),
            "rich": np.where(age + rng.normal(0, 9, rows) > 50, "yes", "no"),
        }
    )


@pytest.fixture
def table(tmp_path: Path) -> Path:
    people().write_csv(tmp_path / "people.csv")
    return tmp_path / "people.csv"


def plan_of(table: Path, **data: Any) -> Plan:
    own = {"path": table, "label": "rich", "columns": COLUMNS} | data
    return Plan(data=own, rounds=FIXED)


def source(path: Path, **own: Any) -> Source:
    columns = {"age": (0.0, 100.0), "sex": ("f", "m"), "rich": ("no", "yes")}
    return Source(**({"path": path, "label": "rich", "columns": columns} | own))


# --- malformed ---------------------------------------------------------------------------------

# (the [data] section of a plan beside people.csv, what its refusal must say)
GOOD = {"path": "people.csv", "label": "rich", "columns": COLUMNS}
MALFORMED_PLANS: list[tuple[dict[str, Any], str]] = [
    ({"label": "rich"}, "data.label has no effect without data.path"),
    ({"client": "town"}, "data.client has no effect without data.path"),
    ({"infer": True}, "data.infer has no effect without data.path"),
    ({"missing": "flag"}, "data.missing has no effect without data.path"),
    (GOOD | {"missing": "mean"}, "data.missing must be middle or flag"),
    ({"path": "x.npz", "missing": "flag"}, "data.missing has no effect with arrays"),
    ({"columns": {"age": [0, 1]}}, "data.columns has no effect without data.path"),
    ({"validation": 0.1}, "data.validation must be a whole number with data.name = digits"),
    ({"test": "t.csv"}, "data.test must be a whole number with data.name = digits"),
    ({"split": "column"}, "data.split must be iid, labels, sizes, dirichlet or order with"),
    (GOOD | {"name": "digits"}, "data.name has no effect beside data.path"),
    (GOOD | {"name": "arrays"}, "remove one of the two"),
    (GOOD | {"path": 3}, "data.path must be text, got 3"),
    (GOOD | {"path": "people.xlsx"}, "data.path must be a .csv or .parquet file"),
    (GOOD | {"path": "people"}, "data.path must be a .csv or .parquet file"),
    (GOOD | {"path": "folder.csv"}, "it is a folder"),
    (GOOD | {"path": ""}, "data.path must be a .csv"),
    ({"path": "people.csv"}, "data.label is missing; it must be the name of a column"),
    (GOOD | {"label": ""}, "data.label must be the name of a column, got ''"),
    (GOOD | {"label": 3}, "data.label must be text"),
    (GOOD | {"label": "richh"}, "data.columns lacks the label 'richh'"),
    (GOOD | {"label": "wealthy"}, "name one of 'age', 'sex', 'rich' in data.label"),
    (GOOD | {"path": "peple.csv"}, "there is no such file; did you mean 'people.csv'?"),
    (GOOD | {"label": "Rich"}, "data.columns lacks the label 'Rich'; did you mean 'rich'?"),
    (GOOD | {"label": "Rich", "infer": True}, "did you mean 'rich'?"),
    (GOOD | {"label": "zzz", "infer": True}, "its columns are 'id', 'town', 'age', 'sex', 'rich'"),
    (GOOD | {"client": ""}, "data.client must be the name of a column"),
    (GOOD | {"client": "twn"}, "data.client 'twn' is no column of people.csv; did you mean 'town'"),
    (GOOD | {"client": "rich"}, "data.client = 'rich' is data.label too"),
    (GOOD | {"client": "sex"}, "data.client = 'sex' is a feature in data.columns too"),
    (GOOD | {"client": "town", "samples": 9}, "data.samples has no effect beside data.client"),
    (GOOD | {"client": "town", "split": "iid"}, "data.split must be column beside data.client"),
    (GOOD | {"client": "town", "alpha": 0.5}, "data.alpha has no effect"),
    (GOOD | {"client": "town", "clients": 9}, "data.clients must be 6, the clients of column town"),
    (GOOD | {"client": "town", "clients": 0}, "data.clients must be a whole number from 1"),
    (GOOD | {"split": "column"}, "data.client is missing; it must be a column with data.split"),
    (GOOD | {"infer": "yes"}, "data.infer must be true or false"),
    (GOOD | {"infer": 1}, "data.infer must be true or false"),
    (GOOD | {"columns": 3}, "data.columns must be a table of columns, got 3"),
    (GOOD | {"columns": []}, "data.columns must be a table of columns"),
    (GOOD | {"columns": {}}, "data.columns lacks the label 'rich'"),
    (GOOD | {"columns": {"rich": ["no", "yes"]}}, "data.columns lists no feature"),
    (GOOD | {"columns": {"age": [0, 99]}}, "data.columns lacks the label 'rich'"),
    (GOOD | {"columns": {"age": [0, 99]}}, "or give data.target = [low, high], the public range"),
    (GOOD | {"columns": COLUMNS | {"age": 3}}, "data.columns.age must be [low, high] or a list"),
    (GOOD | {"columns": COLUMNS | {"age": "x"}}, "data.columns.age must be [low, high] or a list"),
    (GOOD | {"columns": COLUMNS | {"age": {"a": 1}}}, "data.columns.age must be [low, high]"),
    (GOOD | {"columns": COLUMNS | {"age": [9, 1]}}, "with low < high, got [9, 1]; swap them"),
    (GOOD | {"columns": COLUMNS | {"age": [1, 1]}}, "leave out a column that is always the same"),
    (GOOD | {"columns": COLUMNS | {"age": [0]}}, "data.columns.age must be [low, high] for a"),
    (GOOD | {"columns": COLUMNS | {"age": [0, 1, 2]}}, "put categories that are numbers into"),
    (GOOD | {"columns": COLUMNS | {"age": [0, "x"]}}, "data.columns.age must be [low, high] for"),
    (GOOD | {"columns": COLUMNS | {"age": [0, math.inf]}}, "data.columns.age must be finite"),
    (GOOD | {"columns": COLUMNS | {"age": [math.nan, 1]}}, "data.columns.age must be finite"),
    (GOOD | {"columns": COLUMNS | {"age": [0, 1e31]}}, "finite bounds up to 1e+30"),
    (GOOD | {"columns": COLUMNS | {"age": [0, 2**70]}}, "more than 64 bits"),
    (GOOD | {"columns": COLUMNS | {"sex": ["f", "f"]}}, "data.columns.sex lists 'f' twice"),
    (GOOD | {"columns": COLUMNS | {"sex": ["f", " f"]}}, "lists 'f' twice"),
    (GOOD | {"columns": COLUMNS | {"sex": ["f", ""]}}, "a missing value needs no category"),
    (GOOD | {"columns": COLUMNS | {"sex": [["f"]]}}, "data.columns.sex must be a list of cat"),
    (GOOD | {"columns": COLUMNS | {"rich": ["no"]}}, "data.columns.rich must be two categories"),
    (GOOD | {"columns": COLUMNS | {"rich": []}}, "data.columns.rich must be two categories"),
    (GOOD | {"columns": COLUMNS | {"rich": 3}}, "data.columns.rich must be a list of categories"),
    (GOOD | {"columns": COLUMNS | {"agee": [0, 9]}}, "'agee' is no column of people.csv; did you"),
    (GOOD | {"columns": COLUMNS | {"SEX ": ["f"]}}, "did you mean 'sex'?"),
    (GOOD | {"columns": COLUMNS | {"idd": []}}, "'idd' is no column of people.csv; did you"),
    (GOOD | {"columns": COLUMNS | {"sex": [0, 1]}}, "column 'sex' of people.csv has '"),
    (GOOD | {"columns": COLUMNS | {"rich": ["a", "b"]}}, "row 1 of people.csv has the label"),
    (GOOD | {"validation": 0.0}, "data.validation must be ≥ 1, a part or a file"),
    (GOOD | {"validation": 1.5}, "data.validation must be"),
    (GOOD | {"validation": -0.1}, "data.validation must be"),
    (GOOD | {"validation": "a.csv"}, "data.validation '"),
    (GOOD | {"validation": "a.txt"}, "data.validation must be a .csv or .parquet file"),
    (GOOD | {"validation": "other.csv"}, "'age' is no column of other.csv"),
    ({"evaluation": "public"}, "data.evaluation has no effect without data.path"),
    (GOOD | {"evaluation": "public"}, "data.evaluation = public has no effect where no client"),
    (GOOD | {"client": "town", "evaluation": "private"}, "data.evaluation must be"),
    (
        GOOD | {"client": "town", "evaluation": "public", "validation": "v.csv", "test": "t.csv"},
        "data.evaluation = public has no effect where no client",
    ),
    (GOOD | {"validation": 0.5, "test": 0.5}, "leave no rows to train on"),
    (GOOD | {"validation": 240}, "data.validation and data.test must leave 10 rows"),
    (GOOD | {"test": 0}, "data.test must be ≥ 1, a part or a file"),
    (GOOD | {"test": "t.txt"}, "data.test must be a .csv or .parquet file"),
    (GOOD | {"test": "./people.csv"}, "data.test must be another file than data.path"),
    (
        GOOD | {"client": "town", "validation": "people.csv"},
        "would hold all rows that clients train",
    ),
    (GOOD | {"test": "t.csv"}, "there is no such file"),
    (GOOD | {"test": "other.csv"}, "data.test 'age' is no column of other.csv"),
    (GOOD | {"clients": 200}, "must leave 200 rows or more for data.clients = 200, got 192 of 240"),
    (GOOD | {"samples": 999}, "data.samples must be"),
    (GOOD | {"split": "labels", "labels_per_client": 3}, "rich has 2 classes"),
    (GOOD | {"client": "town", "validation": 235}, "data.validation must be one row or more and"),
    (GOOD | {"client": "town", "test": 0.0001}, "data.test must be one row or more"),
    (GOOD | {"client": "id", "infer": True, "validation": 1}, "data.validation must be one row"),
]

# (the bytes of people.csv, what the refusal must say)
MALFORMED_TABLES: list[tuple[bytes, str]] = [
    (b"", "people.csv is empty"),
    (b"\n", "the first line of people.csv names no columns"),
    (b",,\n1,2,3\n", "the first line of people.csv names no columns"),
    (b"\0\0\0", "the first line of people.csv names no columns"),
    (b"age,sex,rich\n", "people.csv has no complete row below its header"),
    (b'age,sex,rich\n"1,f,no\n', "has no complete row below its header"),
    (b"age,sex\n1,f\n", "data.label 'rich' is no column of people.csv"),
    (b"age,rich\n1,no\n", "data.columns 'sex' is no column of people.csv"),
    (b"Age,sex,rich\n1,f,no\n", "'age' is no column of people.csv; did you mean 'Age'?"),
    (b"age,age,sex,rich\n1,2,f,no\n", "has the column 'age' twice"),
    (b"age,sex,rich\n1,f,no,7\n", "row 1 of people.csv has more than 3 cells; correct it"),
    (b"age,sex,rich\n1,\xff,no\n", "people.csv cannot be read as CSV in UTF-8"),
    (b"age,\xff,rich\n1,f,no\n", "the header of people.csv is not CSV in UTF-8"),
    ("age,sex,rich\n1,f,no\n".encode("utf-16"), "the header of people.csv is not CSV in UTF-8"),
    (b"age,sex,rich\n1,f,no\nold,m,yes\n", "column 'age' of people.csv has 'old' in row 2"),
    (b"age,sex,rich\nNA,f,no\n", "has 'NA' in row 1, which is no number; correct it, empty"),
    (b'age,sex,rich\n"1,5",f,no\n', "has '1,5' in row 1, which is no number"),
    (b"age,sex,rich\n1,f,no\n2,m,\n", "row 2 of people.csv has no label in column 'rich'"),
    (b"age,sex,rich\n1,f,no\n2\n", "row 2 of people.csv has no label"),
    (b"age,sex,rich\n1,f,maybe\n", "has the label 'maybe' in column 'rich'; it must be one of"),
    (b"age,sex,rich\n1,f,No\n", "has the label 'No'"),
    (b"age,sex,rich\n1,f,no\n2,m,yes\n", "data.validation and data.test must leave 10 rows"),
    (b"age,sex,rich\r1,f,no\r2,m,yes\r", "has the line ends of old Macintoshes; save it as CSV"),
    (b'age,sex,rich\n1,"f" or m,no\n2,m,yes\n', "a quote stands within a text or is not closed"),
    (b'age,sex,rich\n1,f,no\n2,"m,yes\n', "a quote stands within a text or is not closed"),
]  # fmt: skip


def refusal(folder: Path, plan: dict[str, Any]) -> str:
    """What is said, in one sentence, and that nothing was written."""
    before = sorted(folder.iterdir())
    text = "[data]\n" + "".join(f"{key} = {_toml(value)}\n" for key, value in plan.items())
    with pytest.raises(SottovoceError) as caught:
        simulate(Plan.from_toml(text, folder=folder), seed=1, out=folder / "run")
    message = str(caught.value)
    assert message.isprintable(), "one line"
    assert 0 < len(message) <= 300
    for word in ("polars", "pydantic", "Traceback", "Error"):
        assert word not in message
    assert sorted(folder.iterdir()) == before, "nothing is written"
    return message


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"'{k}' = {_toml(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_toml, value)) + "]"
    if isinstance(value, float):
        return repr(value)
    return json.dumps(value)


@pytest.mark.parametrize(("data", "says"), MALFORMED_PLANS, ids=range(len(MALFORMED_PLANS)))
def test_a_malformed_plan_for_a_table(table: Path, data: dict[str, Any], says: str) -> None:
    (table.parent / "folder.csv").mkdir()
    (table.parent / "other.csv").write_text("sex,rich\nf,no\n")
    assert says in refusal(table.parent, data)


@pytest.mark.parametrize(("raw", "says"), MALFORMED_TABLES, ids=range(len(MALFORMED_TABLES)))
def test_a_malformed_table(tmp_path: Path, raw: bytes, says: str) -> None:
    (tmp_path / "people.csv").write_bytes(raw)
    assert says in refusal(tmp_path, GOOD)


def test_a_row_with_too_many_cells_is_refused_whatever_columns_are_used(tmp_path: Path) -> None:
    """Else its cells are read as those of the next column: here a zip code would be an age."""
    rows = [f"{'no' if i % 2 else 'yes'},{'fm'[i % 2]},a note,10,{40 + i}\n" for i in range(60)]
    rows[6] = rows[6].replace("a note", "a note, and more")
    (tmp_path / "people.csv").write_text("rich,sex,note,zip,age\n" + "".join(rows))
    assert "row 7 of people.csv has more than 5 cells; correct it" in refusal(tmp_path, GOOD)


def test_malformed_clients_and_labels(tmp_path: Path) -> None:
    (tmp_path / "people.csv").write_text("town,age,sex,rich\na,1,f,no\n ,2,m,yes\n")
    assert "row 2 of people.csv names no client" in refusal(tmp_path, GOOD | {"client": "town"})
    guess = {"path": "people.csv", "label": "rich", "infer": True}
    (tmp_path / "people.csv").write_text("age,rich\n1,no\n2,no\n")
    assert "has 1 different values" in refusal(tmp_path, guess)
    (tmp_path / "people.csv").write_text("rich\nno\nyes\n")
    assert "has no column beside the label" in refusal(tmp_path, guess)
    names = "".join(f"n{i},{'no' if i % 2 else 'yes'}\n" for i in range(1500))
    (tmp_path / "people.csv").write_text("name,rich\n" + names)
    assert "leave it out with 'name' = []" in refusal(tmp_path, guess)


def test_a_malformed_parquet_file(tmp_path: Path) -> None:
    own = GOOD | {"path": "people.parquet"}
    (tmp_path / "people.parquet").write_bytes(b"PAR1 and no more")
    assert "people.parquet cannot be read as Parquet" in refusal(tmp_path, own)
    from datetime import date

    odd = people(20).with_columns(age=pl.lit(date(2000, 1, 1)))
    odd.write_parquet(tmp_path / "people.parquet")
    assert "'age' of people.parquet holds Date, which is neither" in refusal(tmp_path, own)
    people(20).with_columns(age=pl.lit([1, 2])).write_parquet(tmp_path / "people.parquet")
    assert "holds List(Int64)" in refusal(tmp_path, own)
    people(20).with_columns(sex=pl.lit(b"x")).write_parquet(tmp_path / "people.parquet")
    assert "holds Binary" in refusal(tmp_path, own)


def test_models_that_do_not_go_with_a_table(table: Path) -> None:
    with pytest.raises(PlanError, match="the cnn is for pictures and this is a table"):
        Plan(data=GOOD, model={"name": "cnn"})
    three = GOOD | {"columns": COLUMNS | {"rich": ["a", "b", "c"]}}
    with pytest.raises(PlanError, match="the label rich has 3"):
        Plan(data=three, model={"name": "svm"})
    plan = Plan(
        data={"path": table, "label": "town", "infer": True, "columns": {"rich": []}},
        model={"name": "svm"},
    )
    with pytest.raises(InputError, match="the label town has 6"):
        build(plan, seed=1)


def test_budgets_must_fit_the_clients_that_the_table_names(table: Path) -> None:
    plan = plan_of(table, client="town").replace(**{"privacy.epsilon": [1, 2]})
    with pytest.raises(PlanError, match=r"privacy\.epsilon is a list of 2 and data\.clients is 6"):
        build(plan, seed=1)
    six = plan.replace(**{"privacy.epsilon": [1, 2, 3, 4, 5, 6]})
    assert build(six, seed=1).epsilon.tolist() == [1, 2, 3, 4, 5, 6]


def test_there_are_enough_malformed_inputs() -> None:
    assert len(MALFORMED_PLANS) + len(MALFORMED_TABLES) >= 100


# --- encoding ----------------------------------------------------------------------------------

BOUNDS, KINDS = (-5.0, 20.0), ("a", "b c", "é,x", "7")
cells = st.none() | st.floats(-1e9, 1e9) | st.integers(-50, 50)
texts = st.none() | st.sampled_from([*KINDS, "unseen", " a ", "A"])
rows_of_cells = st.lists(st.tuples(cells, texts, st.sampled_from(["no", "yes"])), min_size=1)


def naive(rows: list[tuple[Any, Any, str]]) -> list[list[float]]:
    """The encoding as the documentation says it, one cell at a time."""
    encoded = []
    for number, text, _ in rows:
        scaled = 0.0
        if number is not None:
            scaled = (min(max(float(number), BOUNDS[0]), BOUNDS[1]) - 7.5) / 12.5
        encoded.append([scaled] + [float((text or "").strip() == kind) for kind in KINDS])
    return encoded


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(rows_of_cells, st.sampled_from([1, 3, 1000]))
def test_encoding_equals_a_naive_loop(
    tmp_path_factory: pytest.TempPathFactory, rows: list[tuple[Any, Any, str]], batch: int
) -> None:
    folder = tmp_path_factory.mktemp("encode")
    frame = pl.DataFrame(
        {
            "y": [row[2] for row in rows],
            "kind": pl.Series([row[1] for row in rows], dtype=pl.String),
            "n": pl.Series([None if r[0] is None else float(r[0]) for r in rows], dtype=pl.Float64),
        }
    )
    frame.write_csv(folder / "t.csv")
    frame.write_parquet(folder / "t.parquet")
    own = {"n": BOUNDS, "kind": KINDS, "y": ("no", "yes")}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scanning, "BATCH", batch)
        csv, parquet = (
            read_table(Source(folder / name, "y", columns=own)) for name in ("t.csv", "t.parquet")
        )
    np.testing.assert_allclose(csv.x, np.array(naive(rows), np.float32), rtol=1e-6, atol=1e-6)
    assert csv.x.dtype == np.float32
    assert csv.y.tolist() == [int(row[2] == "yes") for row in rows]
    assert csv.layout.features == ("n", "kind=a", "kind=b c", "kind=é,x", "kind=7")
    np.testing.assert_array_equal(csv.x, parquet.x)
    np.testing.assert_array_equal(csv.y, parquet.y)
    flagged = read_table(Source(folder / "t.csv", "y", columns=own, missing="flag"))
    assert flagged.layout.features == ("n", "n missing", *csv.layout.features[1:])
    missing = np.array([row[0] is None for row in rows])
    np.testing.assert_array_equal(flagged.x[:, 1], missing)
    np.testing.assert_array_equal(flagged.x[:, 0], np.where(missing, 0, csv.x[:, 0]))
    np.testing.assert_array_equal(flagged.x[:, 2:], csv.x[:, 1:])


def test_odd_but_valid_tables(tmp_path: Path) -> None:
    path = tmp_path / "people.csv"

    def read(text: str) -> Table:
        path.write_bytes(text.encode())
        return read_table(source(path))

    same = [[0.0, 1.0, 0.0], [1.0, 0.0, 1.0]]
    for text in (
        "age,sex,rich\n50,f,no\n100,m,yes\n",
        "\ufeffage,sex,rich\r\n50,f,no\r\n100,m,yes",
        '"rich","age","sex"\n"no","50","f"\nyes, 1e2 , m \n',
        ',id,age,sex,rich\n0,"x\ny",50.0,f,no\n1,z,250,m,yes\n',
        "age,sex,rich,\nnan,f,no,\ninf,m,yes,\n",
    ):
        assert read(text).x.tolist() == same, text
    assert read("age,sex,rich\n,,no\n,x,no\n").x.tolist() == [[0, 0, 0]] * 2


def test_a_run_from_before_keeps_its_scale(table: Path) -> None:
    """Numbers once became [0, 1]; the layout of such a run has no key `scale`."""
    layout = read_table(source(table)).layout
    entry = layout.to_json()
    assert Layout.from_json(entry).low == -1
    del entry["scale"]
    old = Layout.from_json(entry)
    new, before = (read_rows(table, each, labels=False).x for each in (layout, old))
    np.testing.assert_allclose(before[:, 0], (new[:, 0] + 1) / 2, atol=1e-6)
    assert "scale" not in old.to_json()


def test_a_table_to_predict_that_lacks_columns_is_told_all_of_them(table: Path) -> None:
    layout = read_table(source(table)).layout
    other = table.with_name("other.csv")
    for header, said in (
        ("age", "the column 'sex', which the run was trained with: add it; its columns are 'age'"),
        ("town", "the columns 'age', 'sex', which the run was trained with: add them; its columns"),
        ("SEX,town", "the columns 'age', 'sex', which the run was trained with: add them"),
        ("age,Sex", "the column 'sex', which the run was trained with: add it; did you mean 'Sex'"),
    ):
        other.write_text(f"{header}\n1,f\n")
        with pytest.raises(PlanError, match=rf"^other\.csv lacks {said}"):
            read_rows(other, layout, labels=False, key="FILE")


def test_a_text_in_a_number_column_is_corrected_where_no_plan_can_list_categories(
    table: Path,
) -> None:
    layout = read_table(source(table)).layout
    other = table.with_name("other.csv")
    for cell, remedy in (("old", "correct it"), ('"3,5"', "correct it (3.5 and not 3,5)")):
        other.write_text(f"age,sex\n{cell},f\n")
        with pytest.raises(DataError) as caught:
            read_rows(other, layout, labels=False)
        assert str(caught.value).endswith(f"is no number; {remedy} or empty the cell")


def test_parquet_types(tmp_path: Path) -> None:
    frame = pl.DataFrame(
        {
            "age": pl.Series([True, False, None]),
            "sex": pl.Series(["f", None, "m"], dtype=pl.Categorical),
            "rich": pl.Series([1.0, 0.0, 1.0]),
        }
    )
    frame.write_parquet(tmp_path / "p.parquet")
    columns = {"age": (0.0, 1.0), "sex": ("f", "m"), "rich": ("0", "1")}
    read = read_table(source(tmp_path / "p.parquet", columns=columns))
    assert read.x.tolist() == [[1, 1, 0], [-1, 0, 0], [0, 0, 1]]
    assert read.y.tolist() == [1, 0, 1]


def test_a_label_is_shown_as_it_is_compared_with_the_classes(tmp_path: Path) -> None:
    path = tmp_path / "p.parquet"
    pl.DataFrame({"age": [50.0, 60.0], "rich": [True, False]}).write_parquet(path)
    with pytest.raises(DataError, match="the label 'true' in column"):
        read_table(source(path, columns={"age": (0.0, 100.0), "rich": ("no", "yes")}))
    listed = source(path, columns={"age": (0.0, 100.0), "rich": ("false", "true")})
    assert read_table(listed).y.tolist() == [1, 0]


def test_a_column_that_is_left_out_may_name_the_clients(table: Path) -> None:
    """Its list is empty, so that it is no feature."""
    held = build(plan_of(table, client="town", columns=COLUMNS | {"town": []}), seed=1).held
    assert len(held.names) == 6
    assert held.layout is not None
    assert list(held.layout.columns) == ["age", "sex"]


def test_columns_without_a_name_are_not_read(tmp_path: Path) -> None:
    (tmp_path / "people.csv").write_text("age,sex,rich,,\n1,f,no,7,\n2,m,yes,8,\n")
    assert list(guess_kinds(tmp_path / "people.csv")) == ["age", "sex", "rich", ""]
    read = read_table(Source(tmp_path / "people.csv", "rich", infer=True))
    assert list(read.layout.columns) == ["age", "sex"]


def test_a_separator_in_the_quotes_of_a_header_is_none(tmp_path: Path) -> None:
    (tmp_path / "people.csv").write_text('"weight, kg";rich\n1,5;no\n')
    assert list(guess_kinds(tmp_path / "people.csv")) == ["weight, kg", "rich"]


def test_a_csv_to_predict_with_a_byte_order_mark_keeps_its_first_row(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_bytes("\ufeff1,2\n3,4\n".encode())
    assert read_samples(tmp_path / "rows.csv").tolist() == [[1, 2], [3, 4]]


def test_columns_that_are_always_the_same(tmp_path: Path) -> None:
    people(30).with_columns(age=pl.lit(40)).write_csv(tmp_path / "people.csv")
    assert set(read_table(source(tmp_path / "people.csv")).x[:, 0]) == {2 * np.float32(0.4) - 1}
    read = read_table(Source(tmp_path / "people.csv", "rich", infer=True))
    assert read.layout.columns["age"] == (40.0, 40.0)
    assert set(read.x[:, read.layout.features.index("age")]) == {0.0}


def test_many_rows_are_read_in_batches(tmp_path: Path) -> None:
    frame = people(200_000, clients=50)
    frame.write_csv(tmp_path / "people.csv")
    read = read_table(source(tmp_path / "people.csv", client="town"))
    np.testing.assert_allclose(read.x[:, 0], frame["age"].to_numpy() / 50 - 1, atol=1e-6)
    np.testing.assert_array_equal(read.y, frame["rich"].to_numpy() == "yes")
    np.testing.assert_array_equal(np.array(read.clients)[read.owner], frame["town"].to_numpy())
    bad = frame[:150_000].with_columns(pl.col("age").cast(pl.String)).to_dict(as_series=False)
    bad["age"][123_456] = "old"
    pl.DataFrame(bad).write_csv(tmp_path / "people.csv")
    with pytest.raises(DataError, match="has 'old' in row 123457"):
        read_table(source(tmp_path / "people.csv"))


# --- clients -----------------------------------------------------------------------------------


def test_clients_are_those_of_the_column(table: Path) -> None:
    federation = build(plan_of(table, client="town"), seed=1)
    held, frame = federation.held, people()
    assert federation.plan.data.clients == 6
    assert federation.plan.data.split == "column"
    assert held.split is not None
    towns = frame["town"].to_numpy()
    groups = {name: np.flatnonzero(towns == name) for name in sorted(set(towns))}
    aside = {*held.split.validation.tolist(), *held.split.test.tolist()}
    for rows, (_, all_rows) in zip(held.split.clients, groups.items(), strict=True):
        assert rows.tolist() == [row for row in all_rows.tolist() if row not in aside]
    assert abs(len(held.split.validation) - 24) <= 1
    assert not set(held.split.validation.tolist()) & set(held.split.test.tolist())
    ages = frame["age"].to_numpy()[np.concatenate(held.split.clients)]
    np.testing.assert_allclose(held.train.x[:, 0], ages / 50 - 1, atol=1e-6)
    again = build(plan_of(table, client="town"), seed=1).held.split
    assert again is not None
    np.testing.assert_array_equal(again.test, held.split.test)


@pytest.mark.parametrize("key", ["validation", "test"])
@pytest.mark.parametrize(
    "spelling", ["people.csv", "./people.csv", "../{}/people.csv", "{}", "link.csv"]
)
def test_no_promise_is_made_where_the_server_holds_the_table_itself(
    table: Path, monkeypatch: pytest.MonkeyPatch, key: str, spelling: str
) -> None:
    """Its rows would count as those of others, and unit = client would be said to cover them."""
    monkeypatch.chdir(table.parent)
    (table.parent / "link.csv").symlink_to(table)
    file = str(table) if spelling == "{}" else spelling.format(table.parent.name)
    other = {"validation": "other.csv", "test": "other.csv"}
    plan = Plan(
        noise="secure",
        data=GOOD | other | {"client": "town", key: file},
        local={"unit": "client"},
    )
    starts = (
        check_plan,
        lambda plan: simulate(plan, seed=None),
        lambda plan: deal(plan, table.parent / "run"),
    )
    for begin in starts:
        with pytest.raises(PlanError, match=rf"data\.{key} must be another file than data\.path"):
            begin(plan)
    assert not (table.parent / "run").exists()


def test_a_run_that_was_begun_on_its_own_table_says_what_the_server_holds(table: Path) -> None:
    """An earlier version began such runs; they may end, and their guarantee is not the old one."""
    for unit, code in (("record", "evaluation-of-clients"), ("client", "evaluation-in-unit")):
        plan = plan_of(table, clients=4, validation=40, test=table).replace(f"local.unit={unit}")
        codes = build(plan, seed=1).guarantee().not_covered
        assert code in codes


def test_other_splits_and_a_test_file(table: Path) -> None:
    other = table.with_name("later.parquet")
    people(50, seed=9).select("sex", "rich", "age").write_parquet(other)
    held = build(plan_of(table, clients=4, validation=40, test=other), seed=1).held
    assert held.samples.tolist() == [50] * 4
    assert (len(held.validation.y), len(held.test.y)) == (40, 50)
    assert held.split is not None
    assert held.split.test_from == "test"
    by_label = plan_of(table, clients=4, split="labels", labels_per_client=1, samples=10)
    assert {len(set(build(by_label, seed=1).held.client(i).y)) for i in range(4)} == {1}
    whole = build(plan_of(table, client="town", test=other), seed=1).held
    assert len(whole.test.y) == 50
    assert len(whole.train.y) + len(whole.validation.y) == 240


def test_clients_with_numbers_for_names_are_in_their_order(tmp_path: Path) -> None:
    names = [str(i) for i in range(12)] * 5
    people(60).with_columns(town=pl.Series(names)).write_csv(tmp_path / "people.csv")
    read = read_table(source(tmp_path / "people.csv", client="town"))
    assert read.clients == tuple(str(i) for i in range(12))


# --- inference and the guarantee ---------------------------------------------------------------


def test_what_is_inferred_is_listed_as_not_covered(table: Path) -> None:
    told = build(plan_of(table, client="town"), seed=1)
    assert "inferred-columns" not in told.guarantee().not_covered
    all_told = plan_of(table, client="town", columns=COLUMNS | {"id": []}, infer=True)
    assert "inferred-columns" not in build(all_told, seed=1).guarantee().not_covered
    some = plan_of(table, client="town", columns={"age": [0, 100], "id": []}, infer=True)
    federation = build(some, seed=1)
    assert "inferred-columns" in federation.guarantee().not_covered
    layout = federation.held.layout
    assert layout == Layout(
        "rich", ("no", "yes"), {"age": (0.0, 100.0), "sex": ("f", "m")}, ("sex", "rich")
    )
    with_id = build(plan_of(table, client="town", infer=True), seed=1).held.layout
    assert with_id is not None
    assert with_id.columns["id"] == (0.0, 239.0)


# --- the whole way -----------------------------------------------------------------------------


@pytest.mark.slow
def test_a_run_is_loaded_and_predicts_a_table(table: Path, tmp_path: Path) -> None:
    plan = plan_of(table, client="town", columns={"age": [0, 100], "id": []}, infer=True)
    trained = simulate(plan, seed=1, out=tmp_path / "run")
    record = json.loads((tmp_path / "run" / "record.json").read_text())
    assert record["plan"]["data"]["clients"] == 6
    assert "inferred-columns" in record["guarantee"]["not_covered"]
    assert Plan(**record["plan"]).data.client == "town"
    from importlib import resources

    import jsonschema

    schema = json.loads(
        resources.files("sottovoce").joinpath("schemas/record.json").read_text("utf-8")
    )
    jsonschema.Draft202012Validator(schema).validate(record)
    again = load(tmp_path / "run")
    frame = people()
    frame.select("sex", "age").write_parquet(tmp_path / "new.parquet")
    answer = again.predict_table(tmp_path / "new.parquet")
    layout = Layout.from_json(record["table"])
    x = read_rows(tmp_path / "new.parquet", layout, labels=False).x
    assert answer == [layout.classes[i] for i in trained.predict(x)]
    assert set(answer) <= {"no", "yes"}
    frame.select("age").write_csv(tmp_path / "few.csv")
    with pytest.raises(PlanError, match=r"few\.csv lacks the column 'sex', which the run"):
        again.predict_table(tmp_path / "few.csv")
    words = ["predict", str(tmp_path / "run"), str(table)]
    done = sottovoce(*words)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == again.predict_table(table)
    assert done.stderr == ""


def test_predictions_count_the_cells_that_do_not_fit(
    table: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    simulate(plan_of(table), seed=1, out=tmp_path / "run")
    age, sex = [*[150] * 7, None, *[50] * 12], [*["?"] * 3, None, *["f"] * 16]
    pl.DataFrame({"age": age, "sex": sex}).write_csv(tmp_path / "new.csv")
    model = load(tmp_path / "run")
    assert len(model.predict_table(tmp_path / "new.csv")) == 20
    said = "of 20 rows, numbers outside their bounds were clipped"
    assert f"new.csv: {said}" in caplog.text
    assert (
        "age 7, sex 3; empty numbers were read as the middle of their bounds: age 1" in caplog.text
    )
    caplog.clear()
    model.predict_table(table)
    assert caplog.text == ""
    # In a process of its own: pytest takes what is logged in this one.
    words = [sys.executable, "-m", "sottovoce", "predict", tmp_path / "run", tmp_path / "new.csv"]
    done = subprocess.run(words, capture_output=True, text=True)
    assert len(done.stdout.split()) == 20
    assert len(done.stderr.splitlines()) == 1
    assert said in done.stderr


def test_flags_of_missing_numbers_reach_the_model_and_its_predictions(tmp_path: Path) -> None:
    """Where only a missing age tells the label, a model with flags learns it, another cannot."""
    rng, rows = np.random.default_rng(4), 1200
    ill = rng.random(rows) < 0.5
    seen = rng.integers(0, 100, rows)
    frame = pl.DataFrame(
        {
            "age": [None if out else int(age) for out, age in zip(ill, seen, strict=True)],
            "ill": np.where(ill, "yes", "no"),
        }
    )
    frame.write_csv(tmp_path / "a.csv")
    own = {"path": tmp_path / "a.csv", "label": "ill", "clients": 2, "missing": "flag"}
    own |= {"columns": {"age": [0, 100], "ill": ["no", "yes"]}}
    rounds = {"schedule": "fixed", "rounds": 20}
    found = {}
    for missing in ("middle", "flag"):
        out = tmp_path / missing
        simulate(Plan(data=own | {"missing": missing}, rounds=rounds), seed=1, out=out)
        model = load(out)
        assert model.record["model"]["shape"] == [1 + (missing == "flag")]
        assert model.record["table"].get("missing", "middle") == missing
        answers = model.predict_table(tmp_path / "a.csv")
        found[missing] = np.mean(np.array(answers) == frame["ill"].to_numpy())
    assert found["flag"] > 0.95 > 0.8 > found["middle"]


@pytest.mark.slow
def test_a_stopped_run_on_a_table_goes_on(table: Path, tmp_path: Path) -> None:
    plan = plan_of(table, client="town").replace(**{"rounds.rounds": 4})

    def stop(done: Any) -> None:
        if done.t == 1:
            raise KeyboardInterrupt

    whole = simulate(plan, seed=3)
    with pytest.raises(KeyboardInterrupt):
        simulate(plan, seed=3, out=tmp_path / "run", on_round=stop)
    assert resume(tmp_path / "run").record["result"] == whole.record["result"]


@pytest.mark.slow
def test_many_runs_share_a_table(table: Path) -> None:
    plan = plan_of(table, client="town")
    runs = simulate_many([plan, plan.replace("privacy.epsilon=1")], seeds=[1, 2])
    assert [run.record["plan"]["data"]["clients"] for run in runs] == [6] * 4
    assert runs[0].record["result"] == simulate(plan, seed=1).record["result"]


def test_arrays_have_no_table(table: Path) -> None:
    trained = simulate(Plan(rounds=FIXED), seed=1)
    assert trained.classes is None
    with pytest.raises(InputError, match="was not trained on a table"):
        trained.predict_table(table)


# --- the command line --------------------------------------------------------------------------


@pytest.mark.slow
def test_init_from_drafts_a_plan_that_asks_for_what_is_public(tmp_path: Path) -> None:
    people(50).rename({"town": "home town"}).write_csv(tmp_path / "people.csv")
    (tmp_path / "plans").mkdir()
    done = sottovoce("init", "--from", "people.csv", "plans/p.toml", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    path = tmp_path / "plans" / "p.toml"
    text = path.read_text()
    assert 'path = "../people.csv"' in text
    for line in ("# age = [LOW, HIGH]", "# sex = [TEXT, TEXT]", '# "home town" = [TEXT, TEXT]'):
        assert line in text.splitlines()
    for value in ("town 1", "yes", '"f"', "94"):
        assert value not in text, "nothing of the rows"
    assert max(map(len, text.splitlines())) <= 100

    def edited(*changes: tuple[str, str]) -> str:
        new = text
        for old, filled in changes:
            new = new.replace(old, filled)
        return new

    label = ('label = ""', 'label = "rich"')
    rich = ("# rich = [TEXT, TEXT]", 'rich = ["no", "yes"]')
    age = ("# age = [LOW, HIGH]", "age = [0, 100]")
    for changes, says in (
        ((), "data.label must be the name of a column"),
        ((label,), "data.columns lacks the label"),
        ((label, rich), "data.columns lists no feature"),
        ((label, rich, ("# age", "age")), "is not valid TOML"),
    ):
        with pytest.raises(PlanError, match=says):
            Plan.from_toml(edited(*changes), folder=path.parent)
    path.write_text(edited(label, rich, age))
    assert build(Plan.load(path), seed=1).held.shape == (1,)
    again = sottovoce("init", "--from", "people.csv", "plans/p.toml", cwd=tmp_path)
    assert again.returncode == 2
    assert "PATH must be a new file" in again.stderr
    for table, says in (("nope.csv", "no such file"), ("p.toml", "--from must be a .csv")):
        done = sottovoce("init", "--from", table, "new.toml", cwd=tmp_path)
        assert done.returncode == 2
        assert says in done.stderr
        assert not (tmp_path / "new.toml").exists()


def test_train_refuses_a_wrong_column_before_it_starts(table: Path) -> None:
    plan = plan_of(table, client="town").to_toml().replace('"town"', '"twon"')
    (table.parent / "plan.toml").write_text(plan)
    done = sottovoce("train", "plan.toml", cwd=table.parent)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.endswith("did you mean 'town'?\n")
    assert not (table.parent / "runs").exists()


def test_overrides_of_tables() -> None:
    plan = Plan(data=GOOD | {"client": "town"})
    assert Plan.from_toml(plan.to_toml()) == plan
    assert plan.replace(**{"privacy.epsilon": 4}).data == plan.data
    digits = plan.replace("data.name=digits")
    assert (digits.data.path, digits.data.split, digits.data.clients) == (None, "iid", 10)
    iid = plan.replace("data.split=iid", "data.clients=5")
    assert (iid.data.client, iid.data.clients) == (None, 5)
    declared = plan.replace("data.evaluation=public")
    for other in ("data.split=iid", "data.name=digits"):
        assert declared.replace(other, "data.clients=5").data.evaluation is None
    back = iid.replace("data.client=town")
    assert (back.data.clients, back.data.split) == (None, "column")
    mine = Plan.load(None, ["data.path=a.csv", "data.label=y", "data.infer=true"])
    assert (mine.data.name, mine.data.validation, mine.data.test) == (None, 0.1, 0.1)
    assert mine.data.samples is None
    other = plan.replace("data.path=b.csv")
    assert other.data.columns == plan.data.columns
    assert hash(other.data.columns) == hash(plan.data.columns)
    with pytest.raises(TypeError, match="frozen"):
        plan.data.columns["age"] = (0.0, 1.0)  # type: ignore[index]


@pytest.mark.slow
def test_accuracy_by_client_and_budget_on_declared_rows(tmp_path: Path) -> None:
    """A part of each client's rows is public for the test: recomputed with the loaded model."""
    rng = np.random.default_rng(0)
    lines = ["town,age,sick"]
    for town, n in (("a", 80), ("b", 120), ("c", 200)):
        ages = rng.integers(0, 100, n)
        lines += [f"{town},{age},{'yes' if age > 50 else 'no'}" for age in ages]
    (tmp_path / "t.csv").write_text("\n".join(lines) + "\n")
    data = {
        "path": str(tmp_path / "t.csv"),
        "label": "sick",
        "client": "town",
        "columns": {"age": [0, 100], "sick": ["no", "yes"]},
        "test": 0.3,
    }
    plan = Plan(data=data, model={"name": "svm"}, privacy={"epsilon": [2, 2, 9]},
                rounds={"rounds": 5})  # fmt: skip
    run = simulate(plan, seed=1, out=tmp_path / "run")
    told = run.record["result"]["fairness"]
    held = build(plan, seed=1).held
    hits = run.predict(held.test.x) == held.test.y
    each = [hits[held.test_owner == i].mean() for i in range(3)]
    assert told["accuracy"]["min"] == pytest.approx(min(each))
    assert told["accuracy"]["median"] == pytest.approx(sorted(each)[1])
    assert [g["epsilon"] for g in told["by_budget"]] == [2, 9]
    assert told["by_budget"][1]["accuracy"] == pytest.approx(each[2])
    assert told["by_budget"][0]["rows"] == int((held.test_owner < 2).sum())
    page = reports.write_report(tmp_path / "run").read_text("utf-8")
    assert "Who is served how well" in page
    assert "Accuracy by budget" in page


def test_accuracy_by_client_is_not_shown_without_declared_rows(tmp_path: Path) -> None:
    run = simulate(Plan(rounds={"rounds": 1}), seed=1, out=tmp_path / "run")
    assert run.record["result"]["fairness"]["shown"] is False
    page = reports.write_report(tmp_path / "run").read_text("utf-8")
    assert "Accuracy by client is not shown: nothing tells whose the test rows are" in page
