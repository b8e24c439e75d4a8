"""A person's rows as one sample: what is protected, and that every engine computes the same."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from sottovoce import Plan, simulate
from sottovoce.client import device, ledger, messages, release
from sottovoce.client.node import Node
from sottovoce.data.federated import Given, deal_rows, load_holdings
from sottovoce.errors import InputError, PlanError, VaultRefusal
from sottovoce.models import base
from sottovoce.models.base import Form, build
from sottovoce.models.clipping import clipped_sum, evaluate
from sottovoce.models.person import PersonModel, join_persons, split_persons
from sottovoce.privacy import grid
from sottovoce.privacy.sensitivity import Recipe
from sottovoce.reports.run import write_report
from sottovoce.schedules.base import Round
from sottovoce.server.federation import build as build_federation
from sottovoce.simulation.simulate import play_batch, start_run
from support import neighbours
from support.drawings import paint_drawings

MODELS = {"svm": 2, "softmax": 4, "mlp": 4, "cnn": 3}
MOST = 3


def draw_rows(classes, seed=0, persons=7):
    """Rows of six numbers, one to five for each person, in no order."""
    rng = np.random.default_rng(seed)
    person = rng.permutation(np.repeat(np.arange(persons), rng.integers(1, 6, persons)))
    x = rng.standard_normal((len(person), 6))
    return x, rng.integers(0, classes, len(person)), person


def draw_weights(name, seed=3):
    rng = np.random.default_rng(seed)
    shapes = neighbours.FORMS[name].shapes()
    return {leaf: rng.standard_normal(shape) for leaf, shape in shapes.items()}


def test_a_sample_is_a_person_whatever_the_order_of_rows():
    x, y, person = draw_rows(3)
    joined = join_persons(x, y, person, MOST)
    mixed = np.random.default_rng(1).permutation(len(x))
    assert np.array_equal(joined, join_persons(x[mixed], y[mixed], person[mixed] + 10, MOST))
    rows, labels, weight = split_persons(joined, MOST)
    weight = weight.reshape(-1, MOST)
    counts = np.minimum(np.bincount(person), MOST)
    assert np.allclose(weight.sum(axis=1), 1)
    assert np.array_equal((weight > 0).sum(axis=1), counts)
    for i in range(len(joined)):
        mine = {(*row, label) for row, label in zip(x[person == i], y[person == i], strict=True)}
        kept = [(*r, c) for r, c in zip(rows[i * MOST :][:MOST], labels[i * MOST :], strict=False)]
        assert set(kept) <= mine
        assert len(set(kept)) == counts[i]


@pytest.mark.parametrize("name", MODELS)
def test_the_mean_gradient_of_a_person_is_clipped(name):
    """Against the definition: the mean of the rows' gradients, cut to C, summed over persons."""
    classes, form, params = MODELS[name], neighbours.FORMS[name], draw_weights(name)
    x, y, person = draw_rows(classes)
    x, y, person = x[person < 5], y[person < 5], person[person < 5]
    most = int(np.bincount(person).max())  # nobody's rows are left out
    joined = join_persons(x, y, person, most)
    gradients = base.gradient_matrix(form, params, x, y)
    means = np.stack([gradients[person == i].mean(axis=0) for i in range(len(joined))])
    clip = float(np.median(np.linalg.norm(means, axis=1)))
    wanted = sum(mean / max(1, np.linalg.norm(mean) / clip) for mean in means)
    form = replace(form, rows_per_person=most)
    nobody = np.zeros(len(joined), int)
    moved = release.step(form, params, joined, nobody, Recipe(1.0, clip, unit="person"))
    got = np.concatenate([(params[leaf] - moved[leaf]).reshape(-1) for leaf in sorted(params)])
    assert np.allclose(got * len(joined), wanted, atol=1e-6)
    losses = base.sample_losses(neighbours.FORMS[name], params, x, y)
    by_person = [losses[person == i].mean() for i in range(len(joined))]
    assert np.allclose(base.sample_losses(form, params, joined, nobody), by_person)


@pytest.mark.parametrize("name", MODELS)
def test_compiled_sums_are_those_of_a_device(name):
    classes, params = MODELS[name], draw_weights(name)
    form = replace(neighbours.FORMS[name], rows_per_person=MOST)
    model = PersonModel(form.model(), MOST, 6)
    joined = join_persons(*draw_rows(classes), MOST).astype(np.float32)
    nobody = np.zeros(len(joined), int)
    clip = 0.7
    tree = model.unflatten({leaf: array.astype(np.float32) for leaf, array in params.items()})
    ones = jnp.ones(len(joined))
    total = clipped_sum(model, tree, jnp.asarray(joined), jnp.asarray(nobody), ones, clip)
    exact = grid.clipped_sum(
        base.gradient_blocks(form, params, joined.astype(float), nobody),
        clip,
        sum(leaf.size for leaf in params.values()),
    ) * grid.grid_unit(clip)
    got = base.flatten_parameters(total)
    flat = np.concatenate([got[leaf].reshape(-1) for leaf in sorted(got)])
    assert np.allclose(flat, exact, atol=2e-4)


def test_it_is_evaluated_on_rows():
    inner = build("softmax", shape=(6,), classes=4)
    params = {leaf: jnp.asarray(array) for leaf, array in draw_weights("softmax").items()}
    x, y, _ = draw_rows(4)
    rows = jnp.asarray(x, jnp.float32), jnp.asarray(y)
    wanted = evaluate(inner, params, *rows)
    assert [*map(float, evaluate(PersonModel(inner, MOST, 6), params, *rows))] == [
        *map(float, wanted)
    ]


@pytest.mark.parametrize("name", neighbours.MODELS)
def test_a_person_adds_what_it_adds_alone(name):
    """To the last bit: what the others hold, and where they stand, does not matter."""
    rng = np.random.default_rng(5)
    params = neighbours.weights(name, "normal", rng)
    joined = neighbours.people("mixed", 6, neighbours.classes_of(name), rng)
    nobody = np.zeros(len(joined), int)
    alone = sum(
        neighbours.units(name, params, joined[i : i + 1], nobody[:1], 0.5, rows_per_person=3)
        for i in range(6)
    )
    assert np.array_equal(
        neighbours.units(name, params, joined, nobody, 0.5, rows_per_person=3), alone
    )


def test_work_does_not_tell_how_many_rows_a_person_has():
    form = replace(neighbours.FORMS["mlp"], rows_per_person=4)
    params, noted = draw_weights("mlp"), []
    for counts in ([1, 1, 1], [4, 9, 2]):
        rng = np.random.default_rng(0)
        person = np.repeat(np.arange(3), counts)
        x = join_persons(rng.random((len(person), 6)), np.zeros(len(person), int), person, 4)

        def call(x=x):
            release.step(form, params, x, np.zeros(3, int), Recipe(1.0, 1.0, unit="person"))

        noted.append(neighbours.work(call))
    assert noted[0] == noted[1]


# From a plan to a record.


def table(folder: Path, seed: int = 0) -> Path:
    """A table of 120 patients at three sites with one to six visits; some are seen at two sites."""
    rng, lines = np.random.default_rng(seed), ["patient,site,a,b,ill"]
    for patient in range(120):
        for _ in range(rng.integers(1, 7)):
            site = "ABC"[(patient + (patient % 10 == 0) * int(rng.integers(2))) % 3]
            a, b = rng.random(2)
            lines.append(f"p{patient},{site},{a:.3f},{b:.3f},{['no', 'yes'][int(a > b)]}")
    order = rng.permutation(len(lines) - 1)
    path = folder / "visits.csv"
    path.write_text("\n".join([lines[0], *(lines[1 + i] for i in order)]) + "\n")
    return path


def plan_for(path: Path, **changes) -> Plan:
    columns = {"a": [0, 1], "b": [0, 1], "ill": ["no", "yes"]}
    data = {"path": str(path), "label": "ill", "client": "site", "person": "patient",
            "columns": columns, "evaluation": "public", "rows_per_person": 4}  # fmt: skip
    plan = Plan(
        data=data,
        model={"name": "softmax"},
        local={"unit": "person", "learning_rate": 4.0},
        privacy={"epsilon": 8.0, "delta": 1e-3},
        rounds={"schedule": "fixed", "rounds": 5},
    )
    return plan.replace(**changes) if changes else plan


def read_patients(path):
    return np.array([line.split(",")[0] for line in path.read_text().splitlines()[1:]])


@pytest.mark.parametrize("by_column", [True, False])
@pytest.mark.parametrize("unit", ["person", "record"])
def test_nobody_is_both_trained_and_tested_on(tmp_path, by_column, unit):
    path = table(tmp_path)
    plan = plan_for(path)
    if unit == "record":
        plan = plan.replace(**{"data.rows_per_person": None, "local.unit": "record"})
    if not by_column:
        plan = plan.replace(
            **{"data.evaluation": None, "data.client": None, "data.split": "iid",
               "data.clients": 3}
        )  # fmt: skip
    held = deal_rows(plan, seed=3)
    patients = read_patients(path)
    sets = [{*patients[np.concatenate(held.split.clients)]}, {*patients[held.split.validation]},
            {*patients[held.split.test]}]  # fmt: skip
    assert all(sets)
    assert len(set.union(*sets)) == sum(map(len, sets))
    joined = load_holdings(plan, seed=3)
    pairs = [{*patients[rows]} for rows in held.split.clients]
    wanted = [len(names) for names in pairs] if unit == "person" else held.samples.tolist()
    assert joined.samples.tolist() == wanted


def test_the_record_promises_persons(tmp_path):
    done = simulate(plan_for(table(tmp_path)), seed=1, out=tmp_path / "run")
    guarantee = done.record["guarantee"]
    assert guarantee["unit"] == "person"
    assert "one person" in guarantee["text"]
    assert "same-person-elsewhere" in guarantee["not_covered"]
    assert "same-person-twice" not in guarantee["not_covered"]
    for client in done.record["clients"]:  # Δ = 2ηC/P
        assert client["sensitivity"] == pytest.approx(2 * 4.0 / client["samples"], rel=1e-9)
    assert sum(client["samples"] for client in done.record["clients"]) < 120
    assert done.predict(np.array([[0.9, 0.1], [0.1, 0.9]])).shape == (2,)
    page = write_report(tmp_path / "run").read_text("utf-8")
    assert "all rows of one person in a client" in page


def test_secure_noise_computes_what_is_simulated(tmp_path):
    """At an ε so large that hardly any noise is left, both engines end in the same model."""
    plan, models = plan_for(table(tmp_path), **{"privacy.epsilon": 1e6}), []
    for noise in ("simulated", "secure"):
        run = start_run(build_federation(plan.replace(noise=noise), seed=1), seed=1)
        for _ in play_batch([run]):
            pass
        models.append(base.flatten_parameters(run.params))
    for name, leaf in models[0].items():
        assert np.abs(leaf).max() > 0.01
        assert np.allclose(leaf, models[1][name], atol=1e-2)


def test_persons_of_one_row_are_records(tmp_path):
    """Then both units give the same model, to the bit of the compiled sums."""
    rng = np.random.default_rng(2)
    x, y = rng.random((90, 3)).astype(np.float32), rng.integers(0, 2, 90)
    settings = {
        "data": {"name": "arrays", "clients": 3, "validation": 15, "test": 15},
        "model": {"name": "softmax"},
        "rounds": {"schedule": "fixed", "rounds": 4},
    }
    record = simulate(Plan(**settings), data=(x, y), seed=1)
    local = {"unit": "person"}
    person = simulate(Plan(**settings, local=local), data=(x, y), person=np.arange(90), seed=1)
    for name, leaf in record.params.items():
        assert np.allclose(leaf, person.params[name], atol=1e-5)


def test_what_has_no_persons_is_refused(tmp_path):
    with pytest.raises(PlanError, match=r"data\.person must be the column of person ids"):
        Plan(local={"unit": "person"})
    with pytest.raises(PlanError, match=r"data\.rows_per_person has no effect"):
        Plan(data={"name": "arrays", "rows_per_person": 3})
    plan = Plan(data={"name": "arrays", "clients": 2, "validation": 2, "test": 2},
                local={"unit": "person"})  # fmt: skip
    x, y = np.zeros((20, 2)), np.arange(20) % 2
    with pytest.raises(InputError, match="person must be given"):
        simulate(plan, data=(x, y), seed=1)
    with pytest.raises(InputError, match=r"person must be \(20,\)"):
        simulate(plan, data=(x, y), person=np.arange(19), seed=1)
    with pytest.raises(InputError, match=r"local\.unit = person must be absent"):
        deal_rows(plan, seed=1, data=Given([(x, y), (x, y)], (x, y), (x, y)))
    with pytest.raises(PlanError, match=r"data\.validation must be a file with local\.unit"):
        plan_for(table(tmp_path), **{"data.evaluation": None, "noise": "secure"})


# A device.


def make_node(
    folder: Path, unit: str = "person", most: int = 4, seed: int = 0, limits: str = ""
) -> Node:
    path = table(folder, seed)
    persons = f'person = "patient"\nrows_per_person = {most}\n' if unit == "person" else ""
    (folder / "node.toml").write_text(
        f'''schema = 1
name = "A"
vault = "A.vault"
answer_every = 0
[data]
path = "{path.name}"
label = "ill"
columns = {{ a = [0, 1], b = [0, 1], ill = ["no", "yes"] }}
{persons}[policy]
epsilon = 8.0
delta = 1e-3
clip = 1.0
unit = "{unit}"
limits = {{ run_share = 1.0{limits} }}
'''
    )
    ledger.create_from_node(folder / "node.toml", second_ledger=True)
    return Node.load(folder / "node.toml")


def ask(node, unit="person", rows_per_person=4, t=0):
    form = Form("softmax", (2,), 2, rows_per_person=rows_per_person)
    params = {name: np.zeros(shape, np.float32) for name, shape in form.shapes().items()}
    request = messages.Request(
        "0badc0de", Round(t, 8), 1, 1, "balanced", Recipe(1.0, 1.0, unit=unit), form, params,
        encoding=node.read_rows().encoding,
    )  # fmt: skip
    return messages.unpack(device.answer_request(request.to_blob(), node))[0]


def test_a_node_releases_for_persons(tmp_path):
    node = make_node(tmp_path)
    answer = ask(node)
    assert answer["kind"] == "upload"
    assert answer["samples"] == 120
    hello = messages.unpack(device.make_greeting(node))[0]
    assert hello["features"] == 2
    assert hello["policy"]["unit"] == "person"
    assert hello["policy"]["rows_per_person"] == 4
    # σ/Δ is what the budget buys, with Δ = 2ηC/P.
    capacity = hello["budget"]["capacity"]
    ratio = answer["sigma"][0] / (2 * 1.0 / 120)
    assert ratio == pytest.approx((8 / capacity) ** 0.5, rel=1e-6)
    assert "one person" in ledger.format_statement(ledger.read_statement(node.vault))


@pytest.mark.parametrize(
    ("unit", "most", "why"),
    [("record", 4, "unit must be person"), ("person", 3, "rows_per_person must be 4"),
     ("record", 0, "rows_per_person must be 4"), ("person", 0, "rows_per_person must be 4")],
)  # fmt: skip
def test_a_server_cannot_have_less_protected(tmp_path, unit, most, why):
    node = make_node(tmp_path)
    answer = ask(node, unit, most)
    assert answer["kind"] == "refusal"
    assert why in answer["text"]
    assert messages.unpack(device.make_greeting(node))[0]["budget"]["spent"] == 0


def test_a_limit_of_work_counts_the_rows_of_a_person(tmp_path):
    node = make_node(tmp_path, limits=", max_work = 6")
    text = ask(node)["text"]
    assert "parameters × steps × persons × 4 rows must be at most 6, got 2880" in text


def test_a_node_of_records_answers_for_no_persons(tmp_path):
    node = make_node(tmp_path, "record")
    for most in (0, 4):
        assert ask(node, "person", most)["kind"] == "refusal"
    assert ask(node, "record", 0)["kind"] == "upload"


def test_a_node_file_names_persons_and_their_unit_together(tmp_path):
    make_node(tmp_path)
    text = (tmp_path / "node.toml").read_text()
    for bad, why in (
        (text.replace('unit = "person"', 'unit = "record"'), "data.person must be"),
        (text.replace('person = "patient"\nrows_per_person = 4\n', ""), "data.person must be"),
        (text.replace("rows_per_person = 4", "rows_per_person = 0"), "rows_per_person must be"),
    ):
        (tmp_path / "node.toml").write_text(bad)
        with pytest.raises(InputError, match=why):
            Node.load(tmp_path / "node.toml")


def test_rows_have_one_ledger_whatever_is_protected(tmp_path):
    """Records in one vault and persons in another would add up unseen."""
    node = make_node(tmp_path, "record", seed=77)
    text = (tmp_path / "node.toml").read_text().replace("A.vault", "B.vault")
    text = text.replace('unit = "record"', 'unit = "person"')
    (tmp_path / "two.toml").write_text(text.replace("[policy]", 'person = "patient"\n[policy]'))
    assert Node.load(tmp_path / "two.toml").read_rows().fingerprint == node.read_rows().fingerprint
    with pytest.raises(VaultRefusal, match="have a ledger on this machine already"):
        ledger.create_from_node(tmp_path / "two.toml")


# Found by a reviewer who tried to break the promise.


ARRAYS = {"name": "arrays", "clients": 3, "validation": 6, "test": 6}


def draw_arrays(persons=40, rows_each=5):
    rng = np.random.default_rng(4)
    n = persons * rows_each
    return rng.random((n, 3)).astype(np.float32), rng.integers(0, 2, n)


def test_streamed_rows_and_single_arrays_promise_no_persons(tmp_path):
    """Rows that are dealt without their persons must not be called persons."""
    x, y = draw_arrays()
    np.save(tmp_path / "x.npy", x)
    np.save(tmp_path / "y.npy", y)
    stored = np.load(tmp_path / "x.npy", mmap_mode="r")
    plan = Plan(
        data=ARRAYS | {"split": "order"}, local={"unit": "person"}, model={"name": "softmax"}
    )
    with pytest.raises(InputError, match="person must be given"):
        simulate(plan, data=(stored, y), seed=1)
    with pytest.raises(InputError, match="no effect on streamed rows"):
        simulate(plan, data=(stored, y), person=np.arange(len(y)) // 5, seed=1)
    with pytest.raises(PlanError, match=r"data\.person needs an \.npz"):
        Plan(data={"path": "x.npy", "label": "y.npy", "person": "who", "clients": 2})


def test_first_rows_are_not_public_where_persons_are_named():
    x, y = draw_arrays()
    plan = Plan(data=ARRAYS | {"public": 20}, model={"name": "softmax"})
    with pytest.raises(InputError, match=r"data\.public must be absent with person ids"):
        simulate(plan, data=(x, y), person=np.arange(len(y)) // 5, seed=1)


def test_another_id_of_one_person_deals_nobody_else_anew():
    x, y = draw_arrays()
    ids = np.arange(len(y)) // 5
    plan = Plan(data=ARRAYS, local={"unit": "person"}, model={"name": "softmax"})
    other = np.where(ids == 3, 10**6, ids)
    found = [deal_rows(plan, seed=2, data=Given((x, y), person=who)) for who in (ids, other)]
    for before, after in zip(found[0].split.clients, found[1].split.clients, strict=True):
        assert np.array_equal(before, after)


@pytest.mark.parametrize("gap", [np.nan, "", " "])
def test_a_row_without_a_person_is_refused(gap):
    x, y = draw_arrays()
    ids = [gap if i == 7 else (f"p{i // 5}" if isinstance(gap, str) else i // 5)
           for i in range(len(y))]  # fmt: skip
    plan = Plan(data=ARRAYS, local={"unit": "person"}, model={"name": "softmax"})
    with pytest.raises(InputError, match=r"person must be .* without gaps.*; give row 8 its id"):
        simulate(plan, data=(x, y), person=np.array(ids), seed=1)


def test_labels_of_short_floats_are_kept():
    y = np.array([4093, 4095])
    joined = join_persons(np.zeros((2, 1), np.float16), y, np.arange(2), 1)
    assert split_persons(joined, 1)[1].tolist() == [4093, 4095]


def test_the_run_folder_does_not_tell_how_many_rows_a_person_has(tmp_path):
    x, y = draw_arrays()
    plan = Plan(
        noise="secure", data=ARRAYS | {"validation": 20, "test": 20}, local={"unit": "person"},
        model={"name": "softmax"}, rounds={"schedule": "fixed", "rounds": 1},
    )  # fmt: skip
    test = draw_arrays(8, 3)
    simulate(plan, data=(x, y), validation=test, test=test, person=np.arange(len(y)) // 5,
             out=tmp_path / "run")  # fmt: skip
    with np.load(tmp_path / "run" / "splits.npz") as stored:
        assert "rows" not in stored.files
        assert stored["samples"].tolist() == [13] * 3


def test_a_vault_for_persons_needs_a_node_file(tmp_path):
    x, y = draw_arrays()
    np.savez(tmp_path / "rows.npz", x=x, y=y)
    with pytest.raises(InputError, match="unit must be record or client without a node file"):
        ledger.create_from_data(tmp_path / "a.vault", data=tmp_path / "rows.npz", epsilon=1.0,
                                delta=1e-5, clip=1.0, unit="person")  # fmt: skip


def test_memory_for_all_rows_of_a_person_is_tried_before_the_debit(tmp_path, monkeypatch):
    """A wide model on a person of many rows takes more than a block of rows would."""
    node, tried = make_node(tmp_path, most=1000), []
    empty = np.empty

    def note(shape, *args, **options):
        tried.append(int(np.prod(shape)))
        return empty(shape, *args, **options)

    monkeypatch.setattr(device.np, "empty", note)
    assert ask(node, rows_per_person=1000)["kind"] == "upload"
    assert max(tried) >= 4 * 1000 * (2 + 2 + 2)


def test_the_page_speaks_of_persons_and_shows_no_rounding_errors(tmp_path):
    simulate(plan_for(table(tmp_path)), seed=1, out=tmp_path / "run")
    with paint_drawings():  # axes have numbers, too
        page = write_report(tmp_path / "run").read_text("utf-8")
    asked = " ".join(page.split()).partition("asks whether a ")[2]
    assert asked.startswith("person was this one")
    assert not re.search(r"0\.\d{12,}", page)  # σ is the same in every round, but for rounding
