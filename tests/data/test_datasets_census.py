"""Census tables: the encoding against a naive second one, no leaks, bounds, and damaged files."""

from __future__ import annotations

import csv
import hashlib
import json
import math
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from sottovoce.data import datasets
from sottovoce.data.datasets import DATASETS, Arrays, fetch, load
from sottovoce.errors import DataError, PlanError
from sottovoce.plan import Plan
from sottovoce.plan.data import DATASETS as FACTS
from support import ROOT

GIVEN = os.environ.get("SOTTOVOCE_DATA", "")
FOLDERS = {"acs": Path(GIVEN) / "acs", "adult": Path(GIVEN) / "adult"}
LEAKS = {"PINCP", "PINCP_DECILE", "POVPIP"}
WEIGHTS = {"PWGTP", "WGTP", "fnlwgt"}


def real(name: str) -> Arrays:
    if not GIVEN or not FOLDERS[name].is_dir():
        pytest.skip(f"SOTTOVOCE_DATA is not set, or has no {name}/")
    return load(name)


@pytest.mark.parametrize(("name", "columns"), [("acs", datasets.ACS), ("adult", datasets.ADULT)])
def test_the_shape_that_is_known_beforehand_is_that_of_the_columns(name, columns):
    assert DATASETS[name].shape == (sum(column.width for column in columns),)


def naive_acs(row: dict[str, str]) -> list[float]:
    """The encoding once more, cell by cell, as docs/data.md words it."""

    def kinds(name: str, codes: str) -> list[float]:
        return [float(row[name] == code) for code in codes.split()]

    def count(name: str, low: int, high: int) -> list[float]:
        if row[name] == "N":
            return [0.0, 1.0]
        return [(int(row[name]) - low) / (high - low), 0.0]

    return [
        int(row["AGEP"]) / 99,
        float(row["SEX"] == "1"),
        *kinds("MSP", "1 2 3 4 5 6"),
        *kinds("HISP", "0 1 2 3 4"),
        *kinds("RAC1P", "1 2 3 4 5 6 7 8 9"),
        *count("NOC", 0, 19),
        *count("NPF", 2, 20),
        *kinds("HOUSING_TYPE", "1 2 3"),
        *kinds("OWN_RENT", "0 1 2"),
        math.log(1 + float(row["DENSITY"])) / math.log(100_001),
        *kinds("INDP_CAT", "N 0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18"),
        *kinds("EDU", "1 2 3 4 5 6 7 8 9 10 11 12"),
        *kinds("DVET", "N 1 2 3 4 5 6"),
        *(float(row[name] == "1") for name in ("DREM", "DPHY", "DEYE", "DEAR")),
    ]


def adult_names() -> dict[str, list[str]]:
    """What adult.names says of each column."""
    lines = (FOLDERS["adult"] / "adult.names").read_text("ascii").splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("age:"))
    pairs = (line.rstrip(".").split(":") for line in lines[start:] if line)
    return {name: [word.strip() for word in words.split(",")] for name, words in pairs}


def naive_adult(cells: list[str], names: dict[str, list[str]]) -> list[float]:
    features = []
    for (name, words), cell in zip(names.items(), cells, strict=True):
        if name == "fnlwgt":
            continue
        if words != ["continuous"]:
            known = words[:1] if len(words) == 2 else words
            features += [float(cell == word) for word in known]
        elif name.startswith("capital"):
            features.append(math.log(1 + int(cell)) / math.log(100_000))
        elif name == "education-num":
            features.append((int(cell) - 1) / 15)
        else:
            features.append(int(cell) / 99)
    return features


@pytest.mark.slow
def test_real_acs_row_by_row() -> None:
    acs = real("acs")
    rows = []
    for year in (2018, 2019):
        with (FOLDERS["acs"] / f"national{year}.csv").open(encoding="ascii", newline="") as file:
            rows += [row for row in csv.DictReader(file) if row["PINCP"] != "N"]
    assert acs.train_x.shape == (len(rows), 76) == (45_780, 76)
    assert np.bincount(acs.train_y).tolist() == [22_275, 23_505]
    assert (acs.test_x.shape, acs.classes, acs.shape) == ((0, 76), 2, (76,))
    assert acs.train_x.dtype == np.float32
    for i in np.random.default_rng(0).choice(len(rows), 2000, replace=False):
        np.testing.assert_allclose(acs.train_x[i], naive_acs(rows[i]), atol=1e-6)
        assert acs.train_y[i] == (float(rows[i]["PINCP"]) > 25_000)
    assert all(int(row["AGEP"]) >= 15 for row in rows)  # those dropped are the children


@pytest.mark.slow
def test_real_adult_row_by_row() -> None:
    adult = real("adult")
    names = adult_names()
    assert adult.train_x.shape == (32_561, 103)
    assert adult.test_x.shape == (16_281, 103)
    assert np.bincount(adult.train_y).tolist() == [24_720, 7_841]  # as adult.names tells them
    assert np.bincount(adult.test_y).tolist() == [12_435, 3_846]
    rng = np.random.default_rng(0)
    parts = (
        ("adult.data", adult.train_x, adult.train_y),
        ("adult.test", adult.test_x, adult.test_y),
    )
    for file, x, y in parts:
        lines = (FOLDERS["adult"] / file).read_text("ascii").splitlines()
        rows = [line.split(", ") for line in lines if line.count(",") == 14]
        assert len(rows) == len(x)
        for i in rng.choice(len(rows), 1000, replace=False):
            np.testing.assert_allclose(x[i], naive_adult(rows[i][:-1], names), atol=1e-6)
            assert y[i] == rows[i][-1].startswith(">")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["acs", "adult"])
def test_real_features_are_bounded_and_rows_match_the_plan(name: str) -> None:
    arrays = real(name)
    columns = {"acs": datasets.ACS, "adult": datasets.ADULT}[name]
    for x in (arrays.train_x, arrays.test_x):
        assert np.isfinite(x).all()
        assert x.size == 0 or (x.min() >= 0 and x.max() <= 1)
        assert (np.linalg.norm(x, axis=1) <= math.sqrt(len(columns))).all()
    facts = FACTS[name]
    assert (facts.rows, facts.own_test) == (len(arrays.train_y), len(arrays.test_y))


@pytest.mark.slow
def test_the_categories_are_those_of_the_data_dictionary() -> None:
    real("acs")
    path = FOLDERS["acs"] / "data_dictionary.json"
    if not path.is_file():
        pytest.skip("data_dictionary.json is not beside the files")
    dictionary = json.loads(path.read_text("utf-8"))
    for column in datasets.ACS:
        values = dictionary[column.name]["values"]
        if isinstance(column, datasets.Choice):
            absent = {"N"} if column.name in ("MSP", "EDU", "DREM", "DPHY") else set()
            assert set(column.categories) == set(values) - absent
        elif column.name == "DENSITY":
            assert column.low < values["min"]
            assert values["max"] < column.high
        else:
            assert column.low == (0 if "0" in values else values["min"])
            assert column.high == values["max"]


# without the files


ACS_CELLS = "01-01301,40,1,1,0,1,2,4,1,1,2731.2,8680,14,9,30000.0,4,200,N,2,2,2,2,53,7"


def acs_row(**changes: str) -> bytes:
    row = dict(zip(datasets.ACS_HEADER, ACS_CELLS.split(","), strict=True)) | changes
    return (",".join(row) + "\n" + ",".join(row.values()) + "\n").encode()


ADULT_CELLS = (
    "50, Private, 9, Masters, 14, Divorced, Sales, Wife, White, Male, 7, 0, 13, Cuba, >50K"
)


@pytest.mark.parametrize("leak", sorted({*LEAKS, "PWGTP", "WGTP", "PUMA", "INDP"}))
def test_a_column_left_out_has_no_effect(leak: str) -> None:
    assert leak not in {column.name for column in datasets.ACS}
    x, _ = datasets.parse_acs(acs_row())
    changed, y = datasets.parse_acs(acs_row(**{leak: "1"}))
    np.testing.assert_array_equal(changed, x)
    assert y.tolist() == [leak != "PINCP"]


def test_every_column_of_acs_and_adult_is_used_or_left_out_on_purpose() -> None:
    left = {"acs": {*LEAKS, "PWGTP", "WGTP", "PUMA", "INDP"}, "adult": {"fnlwgt", "income"}}
    assert set(datasets.ACS_HEADER) - {c.name for c in datasets.ACS} == left["acs"]
    assert set(datasets.ADULT_HEADER) - {c.name for c in datasets.ADULT} == left["adult"]
    assert not {c.name for c in (*datasets.ACS, *datasets.ADULT)} & (LEAKS | WEIGHTS)


@pytest.mark.parametrize(("income", "label"), [("25000.0", 0), ("25000.5", 1), ("-9000.0", 0)])
def test_the_threshold(income: str, label: int) -> None:
    assert datasets.parse_acs(acs_row(PINCP=income))[1].tolist() == [label]


def test_rows_without_an_income_are_dropped() -> None:
    child = acs_row(PINCP="N", MSP="N", EDU="N", AGEP="3", DREM="N", DPHY="N")
    both = acs_row() + child.splitlines()[1]
    assert len(datasets.parse_acs(both)[1]) == 1


def test_unknown_cells_of_adult_are_zeros() -> None:
    x, _ = datasets.parse_adult(ADULT_CELLS.encode())
    unknown, _ = datasets.parse_adult(ADULT_CELLS.replace("Cuba", "?").encode())
    assert (x.sum() - unknown.sum(), unknown[0, -41:].sum()) == (1.0, 0.0)


@pytest.mark.parametrize("name", ["acs", "adult"])
def test_a_file_that_is_not_the_published_one(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SOTTOVOCE_DATA", str(tmp_path))
    published = DATASETS[name].published
    assert published is not None
    with pytest.raises(DataError, match=rf"must be in \$SOTTOVOCE_DATA/{name}/"):
        load(name)
    (tmp_path / name).mkdir()
    for file in published.files:
        (tmp_path / name / file).write_bytes(acs_row())
    with pytest.raises(DataError, match="must have the SHA-256"):
        load(name)


# ipums, which only its owners have


def ipums(numbers: int = 58, rows: int = datasets.IPUMS_ROWS) -> bytes:
    line = " ".join(["0.25", "-3", *["1"] * (numbers - 3)])
    return "".join(f"{line} {i % 2}\n" for i in range(rows)).encode()


def owned(content: bytes, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if this were the authors' file."""
    blob = hashlib.sha1(f"blob {len(content)}\0".encode() + content).hexdigest()
    published = DATASETS["ipums"].published
    assert published is not None
    known = replace(published, files={datasets.IPUMS_FILE: f"git:{blob}"})
    monkeypatch.setitem(DATASETS, "ipums", replace(DATASETS["ipums"], published=known))
    monkeypatch.setenv("SOTTOVOCE_DATA", str(folder))
    (folder / "ipums").mkdir(exist_ok=True)
    (folder / "ipums" / datasets.IPUMS_FILE).write_bytes(content)


@pytest.mark.parametrize("numbers", [58, 59])
def test_ipums(numbers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    owned(ipums(numbers), tmp_path, monkeypatch)
    arrays = load("ipums")
    assert arrays.train_x.shape == (FACTS["ipums"].rows, numbers - 1)
    assert (arrays.shape, arrays.classes, len(arrays.test_y)) == ((numbers - 1,), 2, 0)
    assert arrays.train_y[:4].tolist() == [0, 1, 0, 1]
    np.testing.assert_allclose(arrays.train_x[7, :3], [0.25, -1 - math.log(3), 1], rtol=1e-6)


def test_ipums_is_known_by_its_blob_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    published = DATASETS["ipums"].published
    assert published is not None
    assert published.files == {"IPUMS-US.dat": "git:4dc4b720b45f718a7dd09af2d5be36d91e891c99"}
    owned(b"the authors' file", tmp_path, monkeypatch)
    (tmp_path / "ipums" / datasets.IPUMS_FILE).write_bytes(ipums(rows=2))
    with pytest.raises(DataError, match=r"IPUMS-US\.dat .* must have the git blob id .*…, but has"):
        load("ipums")


@pytest.mark.parametrize(
    "content",
    [
        b"",
        ipums(rows=2),
        ipums(57, rows=3),
        ipums(58, rows=2) + ipums(59, rows=1),
        ipums(rows=3).replace(b"-3", b"x"),
        ipums(rows=3).replace(b"-3", b"inf"),
        ipums(rows=3).replace(b" 0\n", b" 2\n"),
        b"\xff" + ipums(rows=3),
    ],
)
def test_ipums_of_another_form_is_refused(content: bytes) -> None:
    with pytest.raises(
        DataError, match=r"^IPUMS-US\.dat must be 3 lines of 58 finite numbers, 0 or"
    ):
        datasets.parse_ipums(content, rows=3)


def test_ipums_has_bounded_features_whatever_the_numbers() -> None:
    line = " ".join(["1e300", "-1e300", "1e-300", "0", *["12"] * 53, "1"]).encode()
    x, _ = datasets.parse_ipums(line, rows=1)
    assert np.abs(x).max() < 15
    assert x[0, 0] == -x[0, 1]


def test_ipums_cannot_be_downloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SOTTOVOCE_DATA", raising=False)
    for ask in (load, fetch):
        with pytest.raises(DataError) as caught:
            ask("ipums")
        assert str(caught.value) == (
            "ipums is not freely available and cannot be downloaded; if you own it, put "
            "IPUMS-US.dat in ipums/ of the folder that SOTTOVOCE_DATA names"
        )
    monkeypatch.setenv("SOTTOVOCE_DATA", str(tmp_path))
    with pytest.raises(DataError, match=r"put the files there$"):
        load("ipums")


# plans


@pytest.mark.parametrize("name", ["acs", "adult", "ipums"])
def test_plans_for_census_data(name: str) -> None:
    for model in ("svm", "softmax", "mlp"):
        plan = Plan(data={"name": name, "clients": 50, "samples": 128}, model={"name": model})
        assert plan.data.validation == FACTS[name].validation
    models = "svm, softmax, mlp or least-squares"
    says = f"must be {models} with data.name = {name}, got 'cnn'; the cnn is for pictures"
    with pytest.raises(PlanError, match=says):
        Plan(data={"name": name}, model={"name": "cnn"})


def test_the_example_is_the_papers_setting() -> None:
    path = ROOT / "examples" / "census_svm.toml"
    plan = Plan.load(path)
    assert (plan.data.name, plan.data.clients, plan.data.samples) == ("acs", 50, 128)
    assert (plan.model.name, plan.privacy.delta, plan.per_round) == ("svm", 1e-3, 50)
    assert (plan.privacy.calibration, plan.rounds.window, plan.rounds.zeta) == ("exact", 3, 0.0)
