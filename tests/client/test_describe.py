"""A description: what it says is true, what it costs is booked, and its promise is not too good."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import replace
from itertools import combinations

import mpmath
import numpy as np
import opendp.prelude as dp
import pytest
from typer.testing import CliRunner

from sottovoce import Plan
from sottovoce.cli.commands import app
from sottovoce.client import describe, ledger
from sottovoce.client.vault import Vault
from sottovoce.data.tables import Layout
from sottovoce.errors import DataError, InputError, Refusal, SottovoceError
from sottovoce.privacy import gaussian, grid
from sottovoce.privacy.sensitivity import Recipe
from sottovoce.privacy.tank import FULL
from sottovoce.reports.certificate import export_description
from sottovoce.simulation.secure import describe_plan
from support.hostile_values import assert_escaped

dp.enable_features("contrib", "honest-but-curious", "idealized-numerics")

COLUMNS = {"age": [0, 100], "weight": [20, 220], "sex": ["f", "m"], "sick": ["no", "yes"]}
ROWS = 600


def draw_rows(seed=0):
    rng = np.random.default_rng(seed)
    age = rng.integers(-20, 130, ROWS)  # some are outside the bounds
    return {
        "age": age,
        "weight": (40 + age + rng.normal(0, 10, ROWS)).round(1),
        "sex": rng.choice(["f", "m", "x"], ROWS),  # x is none of the categories
        "sick": rng.choice(["no", "yes"], ROWS, p=[0.8, 0.2]),
        "site": rng.choice(["north", "south"], ROWS),
        "patient": rng.integers(0, 200, ROWS),
    }


@pytest.fixture
def table(tmp_path, monkeypatch):
    monkeypatch.setenv("SOTTOVOCE_STATE", str(tmp_path / "state"))
    rows = draw_rows()
    lines = [",".join(map(str, row)) for row in zip(*rows.values(), strict=True)]
    (tmp_path / "rows.csv").write_text("\n".join([",".join(rows), *lines]) + "\n")
    return rows, tmp_path


def plan_for(folder, **changes):
    values = {
        "data": {"path": str(folder / "rows.csv"), "label": "sick", "client": "site"}
        | {"columns": COLUMNS, "test": 0.1, "validation": 0.1},
        "privacy": {"epsilon": 8.0, "delta": 1e-5},
    }
    return Plan(**values).replace(**changes)


def make_node(folder, name="ward", **policy):
    columns = ", ".join(f"{column} = {json.dumps(spec)}" for column, spec in COLUMNS.items())
    share = policy.pop("run_share", 0.25)
    terms = {"epsilon": 8.0, "delta": 1e-5, "clip": 0.5} | policy
    person = 'person = "patient"\nrows_per_person = 3\n' if policy.get("unit") == "person" else ""
    path = folder / f"{name}.toml"
    path.write_text(
        f'schema = 1\nname = "{name}"\nvault = "{name}.vault"\n[data]\npath = "rows.csv"\n'
        f'label = "sick"\ncolumns = {{ {columns} }}\n{person}[policy]\n'
        + "".join(f"{key} = {json.dumps(value)}\n" for key, value in terms.items())
        + f"[policy.limits]\nrun_share = {share}\n"
    )
    ledger.create_from_node(path)
    return path


def test_a_description_is_what_opendp_counts(table, monkeypatch):
    rows, folder = table
    path = make_node(folder, epsilon=1e5, clip=3.0, run_share=1.0, floor=1e-9)
    found = describe.describe_node(path, share=1.0)
    columns, label = found.summarise()
    age, weight, sex = columns
    assert found.error < 1e-3
    for entry in (age, weight):
        values, bounds = rows[entry["name"]].astype(float), (entry["low"], entry["high"])
        space = (dp.vector_domain(dp.atom_domain(T=float, nan=False)), dp.symmetric_distance())
        mean = (
            space
            >> dp.t.then_clamp(tuple(map(float, bounds)))
            >> dp.t.then_resize(ROWS, float(bounds[0]))
            >> dp.t.then_mean()
        )
        assert abs(entry["mean"] - mean(values.tolist())) <= 6 * entry["mean_error"]
        edges = np.linspace(*bounds, 11)
        clamped = np.clip(values, *bounds)
        held = np.digitize(clamped, edges[1:-1])
        shares = np.bincount(held, minlength=10) / ROWS
        assert np.abs(np.array(entry["histogram"]) - shares).max() <= 6 * found.error
        assert entry["deviation"] == pytest.approx(clamped.std(), rel=0.05)
    for entry, names in ((sex, ["f", "m"]), (label, ["no", "yes"])):
        space = (dp.vector_domain(dp.atom_domain(T=str)), dp.symmetric_distance())
        count = space >> dp.t.then_count_by_categories(names, null_category=True)
        counts = np.array(count(rows[entry["name"]].tolist())[:2]) / ROWS
        assert np.abs(np.array([*entry["shares"].values()]) - counts).max() <= 6 * found.error
    names = ["age", "weight", "sick=yes"]
    numbers = [
        np.clip(rows["age"], 0, 100),
        np.clip(rows["weight"], 20, 220),
        rows["sick"] == "yes",
    ]
    expected, pairs = np.corrcoef(numbers), found.correlate()
    assert [(pair["first"], pair["second"]) for pair in pairs] == [*combinations(names, 2)]
    for pair in pairs:
        value = expected[names.index(pair["first"]), names.index(pair["second"])]
        assert abs(pair["correlation"] - value) < 0.02


def test_the_promise_is_not_better_than_that_of_opendp(table):
    _, folder = table
    found = describe.describe_node(make_node(folder))
    recipe, divisor = Recipe(1.0, 1.0), found.model.divisor
    change, sigma = float(recipe.sensitivity(ROWS)), found.error / divisor
    space = (
        dp.vector_domain(dp.atom_domain(T=float, nan=False), found.model.size),
        dp.l2_distance(T=float),
    )
    rho = dp.m.make_gaussian(*space, scale=sigma).map(change)
    mu = float(gaussian.mu(found.epsilon, found.delta))
    assert rho <= mu**2 / 2 <= rho * (1 + 1e-4)  # ε is that of this ρ's μ, rounded up
    converted = dp.c.make_zCDP_to_approxDP(dp.m.make_gaussian(*space, scale=sigma))
    assert found.epsilon <= converted.map(change).epsilon(found.delta)  # a looser conversion


def test_what_is_stated_is_never_below_what_is_proven(table):
    """docs/proofs.md, (c): ε must be δ(ε − x, μ) ≤ δ·(1 − x − 1e-9) with the μ of the grid's σ."""
    _, folder = table
    layout = describe_plan(plan_for(folder)).layout
    values = np.zeros(describe.make_model(layout).size)
    rng = np.random.default_rng(0)
    with mpmath.workdps(50):
        for i in range(300):
            delta = float(rng.choice([0.5, 0.1, 1e-3, 1e-5, 1e-12]))
            mu = float(gaussian.mu(10.0 ** rng.uniform(-6.5, 2), delta))
            noise, n = math.ceil(grid.REPLACED / mu), int(10 ** rng.uniform(0, 6))
            norm = (1.0, 0.3)[i % 2]
            recipe = Recipe(1 / norm, norm)
            sigma = recipe.learning_rate / n * grid.grid_unit(norm) * noise  # as `release` says it
            known = {"unit": "record", "delta": delta, "clients": {"ward": n}, "bins": 10}
            found = describe.make_description(layout, values, sigma, recipe=recipe, **known)
            exact = mpmath.mpf(grid.REPLACED) / noise
            x = (2**30 + 400) * exact**2 / 2**65
            epsilon = max(mpmath.mpf(found.epsilon) - x, mpmath.mpf(0))
            real = mpmath.ncdf(exact / 2 - epsilon / exact)
            real -= mpmath.exp(epsilon) * mpmath.ncdf(-exact / 2 - epsilon / exact)
            assert real <= mpmath.mpf(delta) * (1 - x - mpmath.mpf("1e-9")), (delta, mu, found)


def test_the_noise_is_as_large_as_it_says(table):
    """12 descriptions; the mean square of z-scores is outside 4.9 deviations once in a million."""
    _, folder = table
    plan = plan_for(folder)
    truth = describe_plan(plan.replace(**{"privacy.epsilon": 1e5}), share=1.0)
    scale = np.ones(truth.model.size)
    scale[truth.model.parts["products"]] = truth.model.weight
    found = [describe_plan(plan, share=0.1) for _ in range(12)]
    z = np.concatenate([(one.mean - truth.mean) * scale / one.error for one in found])
    spread = math.sqrt(2 / len(z))
    assert abs(np.mean(z**2) - 1) < 4.9 * spread
    assert abs(np.mean(z)) < 4.9 / math.sqrt(len(z))


def test_a_flagged_number_is_described_by_the_rows_that_have_it():
    """60 % of the ages are missing; 400 z-scores are outside 4.9 deviations once in a million."""
    rng, rows, draws, sigma = np.random.default_rng(3), 2000, 400, 2e-4
    columns = {"age": (0.0, 100.0), "weight": (20.0, 220.0)}
    layout = Layout("sick", ("no", "yes"), columns, missing="flag")
    u = np.stack([rng.uniform(0.5, 0.9, rows), rng.uniform(-0.6, 0.8, rows)], axis=1)
    missing = rng.random((rows, 2)) < [0.6, 0.0]
    x = np.stack([np.where(missing, 0, u), missing], axis=2).reshape(rows, 4)
    model = describe.make_model(layout)
    mean = -model.gradient_block({}, x, rng.integers(0, 2, rows)).mean(axis=0)
    known = {"unit": "record", "delta": 1e-5, "clients": {"ward": rows}, "bins": 10}
    found = describe.make_description(layout, mean, sigma, recipe=Recipe(1.0, 1.0), **known)
    weights = np.ones(model.size)
    weights[model.parts["products"]] = model.weight
    noisy = [
        replace(found, mean=found.mean + rng.normal(0, found.error / weights)).summarise()[0]
        for _ in range(draws)
    ]
    for i, (low, high) in enumerate(columns.values()):
        present = low + (high - low) / 2 * (1 + u[~missing[:, i], i])
        entries = [described[i] for described in noisy]
        z = np.array([(one["mean"] - present.mean()) / one["mean_error"] for one in entries])
        assert abs(np.mean(z**2) - 1) < 4.9 * math.sqrt(2 / draws)
        assert abs(np.mean(z)) < 4.9 / math.sqrt(draws)
        exact = found.summarise()[0][i]
        assert exact["mean"] == pytest.approx(present.mean(), rel=1e-6)
        assert exact["deviation"] == pytest.approx(present.std(), rel=1e-3)
        assert exact["missing"] == pytest.approx(missing[:, i].mean(), abs=1e-9)


def test_a_description_takes_its_share_of_the_vault_and_no_more(table):
    _, folder = table
    path = make_node(folder, run_share=1.0, floor=1e-9)
    spent = [0]
    for share in (0.1, 0.25):
        found = describe.describe_node(path, share=share)
        with Vault.open(folder / "ward.vault", dataset=None) as vault:
            spent.append(vault.spent)
            assert found.left == 1 - vault.spent / vault.limit
            assert 0.8 * share < (spent[-1] - spent[-2]) / vault.limit <= share
            assert len(list(vault.entries())) == len(spent) - 1
    mu2 = gaussian.mu(found.epsilon, found.delta) ** 2
    whole = gaussian.mu(8.0, 1e-5) ** 2
    assert mu2 == pytest.approx(whole * (spent[2] - spent[1]) / 2**50, rel=1e-4)
    describe.describe_node(path, share=1.0)
    with pytest.raises(Refusal, match=r"nothing left|refuses"):
        describe.describe_node(path, share=1.0)


@pytest.mark.parametrize(
    ("share", "policy", "tightened"),
    [
        (0.1, {"max_rounds": 1, "run_share": 1.0, "floor": 1e-9}, {}),
        (0.0001, {}, {}),
        (0.3, {"max_rounds": 2, "run_share": 1.0, "floor": 1e-9}, {}),
        (0.2, {}, {"epsilon": 4.0}),
        (1 / 3, {"run_share": 1.0, "floor": 1e-9}, {"max_rounds": 2}),
    ],
)
def test_no_description_takes_more_than_the_share_it_names(table, share, policy, tightened):
    """However few rounds a run may have, and though the node file was tightened meanwhile."""
    _, folder = table
    path, before = make_node(folder, **policy), 0
    if tightened:
        describe.describe_node(path, share=0.01)
        text = path.read_text().replace("epsilon = 8.0\n", "")
        for key, value in ({"epsilon": 8.0} | tightened).items():
            text = text.replace("[policy]\n", f"[policy]\n{key} = {value}\n")
        path.write_text(text)
        with Vault.open(folder / "ward.vault", dataset=None) as vault:
            before = vault.spent
    found = describe.describe_node(path, share=share)
    with Vault.open(folder / "ward.vault", dataset=None) as vault:
        assert 0.5 * share * vault.limit < vault.spent - before <= share * vault.limit
        whole = gaussian.mu(8.0, 1e-5) ** 2 * (vault.spent - before) / FULL
        left = int(found.text.partition("% of the ledger's")[0].split()[-1])
        assert left <= 100 * (vault.limit - vault.spent) / vault.limit
    assert gaussian.mu(found.epsilon, found.delta) ** 2 <= whole * (1 + 1e-6)


def test_a_person_counts_once(table):
    rows, folder = table
    path = make_node(folder, unit="person", epsilon=1e5, clip=3.0, run_share=1.0, floor=1e-9)
    found = describe.describe_node(path, share=1.0)
    patients = np.unique(rows["patient"])
    assert found.samples == len(patients)
    assert found.unit == "person"
    assert "one person" in found.text
    few = [p for p in patients if (rows["patient"] == p).sum() <= 3]
    assert len(few) > 0.3 * len(patients)
    share = found.summarise()[1]["shares"]["yes"]
    means = [np.mean(rows["sick"][rows["patient"] == p] == "yes") for p in patients]
    assert share == pytest.approx(np.mean(means), abs=0.03)  # three rows at most of each


def test_descriptions_are_combined_by_their_samples(table, tmp_path):
    _, folder = table
    plan = plan_for(folder)
    one = describe_plan(plan)
    assert set(one.clients) == {"north", "south"}
    other = replace(one, clients={"west": 3 * one.samples}, mean=one.mean + 1, epsilon=2.0)
    both = describe.combine([one, other])
    assert np.allclose(both.mean, one.mean + 0.75)
    assert both.error == pytest.approx(one.error * math.hypot(0.25, 0.75))
    assert both.samples == 4 * one.samples
    assert both.epsilon == max(one.epsilon, 2.0)
    with pytest.raises(InputError, match="in one description"):
        describe.combine([one, one])
    with pytest.raises(InputError, match="same columns"):
        describe.combine([one, replace(other, bins=5)])
    export_description(one.to_json(), tmp_path / "out")
    read = describe.read_description(tmp_path / "out" / "description.json")
    assert np.array_equal(read.mean, one.mean)
    assert read.to_json() == one.to_json()


def test_nothing_is_taken_from_the_rows_beside_the_release(table):
    _, folder = table
    inferred = {"data.columns": {"sick": ["no", "yes"]}, "data.infer": True}
    with pytest.raises(InputError, match=r"data\.infer must be false"):
        describe_plan(plan_for(folder, **inferred))
    text = describe_plan(plan_for(folder)).text
    assert "kept in no vault" in text
    flagged = describe_plan(plan_for(folder, **{"data.missing": "flag"}))
    assert describe.MISSING not in flagged.format_lines()
    assert "evaluat" not in text


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["ward.toml", "--share", "0"], "share must be from 1e-06 to 1"),
        (["ward.toml", "--share", "nan"], "share must be from 1e-06 to 1"),
        (["ward.toml", "--bins", "1"], "bins must be a whole number from 2"),
        (["ward.toml", "ward.toml"], "description.json if there are several"),
        (["ward.toml", "--out", "full"], "a new or empty folder"),
        (["nothing.json"], "a file that exists"),
        (["damaged.json"], "cannot be read as a description"),
        (["digits.toml"], "a table with declared columns"),
        (["arrays.toml"], "a table whose columns are declared"),
    ],
)
def test_bad_input_costs_nothing(table, monkeypatch, arguments, words):
    _, folder = table
    make_node(folder)
    monkeypatch.chdir(folder)
    (folder / "full").mkdir()
    (folder / "full" / "kept").write_text("")
    (folder / "damaged.json").write_text('{"schema": "sottovoce.description/1"}')
    (folder / "digits.toml").write_text("schema = 1\n")
    np.savez(folder / "rows.npz", x=np.zeros((9, 2)), y=np.arange(9) % 2)
    text = (folder / "ward.toml").read_text()
    start, end = text.index("path"), text.index("[policy]")
    arrays = text[:start] + 'path = "rows.npz"\nclasses = 2\n' + text[end:]
    (folder / "arrays.toml").write_text(arrays)
    result = CliRunner().invoke(app, ["describe", *arguments])
    assert isinstance(result.exception, SottovoceError)
    assert words in str(result.exception)
    with Vault.open(folder / "ward.vault", dataset=None) as vault:
        assert vault.spent == 0


@pytest.mark.parametrize(
    ("keys", "value"),
    [
        (("clients", "ward"), 10**29),
        (("epsilon",), math.inf),
        (("not_covered",), ["a code of a later version"]),
        (("share_error",), math.inf),
        (("share_error",), 1e308),
        (("released", "table", "columns", "age"), [0.0, ""]),
        (("released", "table", "columns", "age"), [-math.inf, 1.0]),
        (("released", "mean"), [1e308] * 18),
        (("released", "mean"), [math.nan] * 18),
    ],
)
def test_a_strange_description_is_refused_in_a_sentence(tmp_path, keys, value):
    layout = Layout("sick", ("no", "yes"), {"age": (0.0, 100.0), "sex": ("f", "m")})
    known = {"unit": "record", "delta": 1e-5, "clients": {"ward": 100}, "bins": 10}
    size = describe.make_model(layout).size
    found = describe.make_description(layout, np.zeros(size), 0.1, recipe=Recipe(1.0, 1.0), **known)
    values = inner = json.loads(json.dumps(found.to_json()))
    for key in keys[:-1]:
        inner = inner[key]
    inner[keys[-1]] = value
    (tmp_path / "strange.json").write_text(json.dumps(values))
    with pytest.raises(DataError, match=r"strange\.json cannot be read as a description"):
        describe.read_description(tmp_path / "strange.json")


def test_names_of_others_do_not_steer_the_terminal():
    bad = "\x1b[2J\n\x9b"
    layout = Layout(f"sick{bad}", ("no", "yes"), {f"age{bad}": (0.0, 100.0), "sex": (bad, "m")})
    known = {"unit": "record", "delta": 1e-5, "clients": {f"ward{bad}": 100}, "bins": 10}
    values = np.zeros(describe.make_model(layout).size)
    found = describe.make_description(layout, values, 0.1, recipe=Recipe(1.0, 1.0), **known)
    assert all(line.isprintable() for line in found.format_lines())


def test_the_command_prints_and_writes(table, monkeypatch):
    _, folder = table
    make_node(folder)
    monkeypatch.chdir(folder)
    result = CliRunner().invoke(app, ["describe", "ward.toml", "--out", "said"])
    assert result.exit_code == 0, result.output
    assert "600 rows of ward" in result.stdout
    assert "age" in result.stdout
    assert describe.MISSING in result.stdout
    page = (folder / "said" / "description.html").read_text("utf-8")
    assert "600 rows, 3 columns and the label" in page
    assert "differentially private" in page
    values = json.loads((folder / "said" / "description.json").read_text("utf-8"))

    def describe_again() -> str:
        export_description(values, folder / "again")
        text = (folder / "again" / "description.html").read_text("utf-8")
        shutil.rmtree(folder / "again")
        return text

    assert_escaped(describe_again)
    values["released"]["mean"].pop()
    (folder / "short.json").write_text(json.dumps(values))
    with pytest.raises(DataError, match="not those of its columns"):
        describe.read_description(folder / "short.json")
