"""What a federation says of itself holds for each of its clients, and says no more than that."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest

from sottovoce import Plan, reports, simulate
from sottovoce.data import federated
from sottovoce.data.tables import Source, declare_layout
from sottovoce.errors import InputError, PlanError
from sottovoce.flower import federate
from sottovoce.flower.federate import load_plan
from sottovoce.models.base import Model
from sottovoce.privacy import gaussian
from sottovoce.privacy.budget import (
    ALWAYS_NOT_COVERED,
    LARGER_UNITS,
    LEAKS,
    NOT_COVERED,
    UNITS,
    Budget,
    Guarantee,
    describe_undisclosed,
    evaluation_code,
)
from sottovoce.privacy.calibration import bound_epsilon
from sottovoce.server.coordinator import find_misfit
from sottovoce.server.federation import build, build_from_members
from sottovoce.simulation.simulate import adapt_plan
from support.in_process import plan
from support.in_process import public as public_rows
from support.promised import account, member


def told(*members):
    own = plan(**{"data.clients": len(members)})
    return build_from_members(own, members, public_rows()).guarantee()


def spoken(guarantee):
    """The (ε, δ) that are printed: the loosest, and the tightest if there is one."""
    pairs = re.findall(r"(?:are|would be|down to) \(([^,]+), ([^)]+)\)", guarantee.text)
    return [(float(epsilon), float(delta)) for epsilon, delta in pairs]


def test_the_loosest_client_is_the_one_with_the_loosest_promise():
    """A vault tightened before its first release has a larger tank than its promise is worth."""
    found = told(member(0, account(1.0, first=8.0)), member(1, account(4.0)))
    assert found.budget == Budget(4, 1e-5)
    assert spoken(found) == [(4.0, 1e-5), (1.0, 1e-5)]


@pytest.mark.parametrize("seed", range(5))
def test_every_client_has_the_stated_epsilon_and_delta(seed):
    """On the exact curve no client's promise is worth more than the one that stands for all."""
    rng = np.random.default_rng(seed)
    kinds = rng.choice(["exact", "zcdp"], 6).tolist()
    members = [
        member(i, account(float(rng.uniform(0.5, 9)), float(10 ** rng.uniform(-7, -3)), kind=kind),
               kind)
        for i, kind in enumerate(kinds)
    ]  # fmt: skip
    found = told(*members)
    most = gaussian.mu(found.budget.epsilon, found.budget.delta)
    least = gaussian.mu(found.tightest.epsilon, found.tightest.delta)
    for one in members:
        worth = gaussian.mu(one.account.epsilon, one.account.delta)
        assert least <= worth <= most
        assert one.account.capacity <= most**2


@pytest.mark.parametrize(
    "budgets",
    [
        [(8.0, 1e-5, "zcdp"), *[(7.9, 1e-5, "exact")] * 3],
        [(2.0, 1e-3, "zcdp"), (2.5, 1e-5, "exact"), (0.5, 1e-3, "exact")],
    ],
)
def test_what_holds_alone_is_stated_for_the_client_with_the_most_capacity(budgets):
    """A vault by zcdp promises more than it can release: another may release more alone."""
    members = [member(i, account(e, d, kind=k), k) for i, (e, d, k) in enumerate(budgets)]
    sums = {"privacy.view": "sum", "privacy.honest": 3, "data.clients": len(members)}
    found = build_from_members(plan(**sums), members, public_rows()).guarantee()
    for one in members:
        alone = bound_epsilon(found.budget.delta, 3 * one.account.capacity)
        assert alone <= found.epsilon_alone


@pytest.mark.parametrize("calibration", ["exact", "zcdp"])
def test_a_simulated_sum_states_what_holds_alone_for_every_client(calibration):
    """On the curve of zcdp the loosest promise is not always the largest capacity."""
    loose, rng = {"privacy.view": "sum", "privacy.honest": 3}, np.random.default_rng(2)
    for _ in range(20):
        epsilon, delta = rng.uniform(0.5, 9, 10).tolist(), (10 ** rng.uniform(-7, -3, 10)).tolist()
        own = Plan(privacy={"epsilon": epsilon, "delta": delta, "calibration": calibration})
        federation = build(own.replace(**loose), seed=1)
        found = federation.guarantee()
        alone = bound_epsilon(found.budget.delta, 3 * federation.capacity)
        assert alone.max() <= found.epsilon_alone


def test_the_calibration_named_is_that_of_the_vaults():
    """The plan says exact; what the clients' vaults do is what counts."""
    found = told(*(member(i, account(8.0, kind="zcdp"), "zcdp") for i in range(2)))
    assert found.calibration == "zcdp"
    assert "zero-concentrated" in found.text
    mixed = told(member(0, account(8.0)), member(1, account(4.0, kind="zcdp"), "zcdp"))
    assert mixed.calibration == "exact"
    assert "other clients have vaults that calibrate by zcdp" in mixed.text


def test_a_calibration_that_the_plan_alone_has_is_named_nowhere():
    own = plan(**{"data.clients": 1, "privacy.calibration": "zcdp"})
    federation = build_from_members(own, [member(0, account(8.0))], public_rows())
    assert federation.guarantee().calibration == "exact"
    assert federation.plan.privacy.calibration == "exact"  # and so it stands in the record


@pytest.mark.parametrize("rounds", [{"schedule": "fixed", "rounds": 20}, {}])
def test_under_paper_the_tightest_client_has_what_holds_and_not_what_it_asked_for(rounds):
    own = Plan(
        privacy={"epsilon": [8, 20] * 5, "delta": 1e-3, "calibration": "paper"}, rounds=rounds
    )
    federation = build(own, seed=1)
    found = federation.guarantee()
    true = [float(gaussian.epsilon(1e-3, np.sqrt(c))) for c in federation.capacity[:2]]
    assert true[0] > 8.3
    assert true[1] > 30
    assert [pair[0] for pair in spoken(found)] == pytest.approx(true[::-1], rel=1e-5)
    assert all(a >= b for (a, _), b in zip(spoken(found), true[::-1], strict=True))


def test_a_hidden_budget_is_not_spoken_for():
    found = told(member(0, None), member(1, account(2.0)))
    start = "The uploads of each client that discloses its budget are (2, 1e-05)-"
    assert found.text.startswith(start)
    assert told(member(0, None)) is None


@pytest.mark.parametrize("code", ["simulated-noise", *LEAKS])
def test_a_figure_that_does_not_hold_is_put_as_what_would_be(code):
    found = Guarantee(
        Budget(8, 1e-5),
        unit="record",
        calibration="exact",
        not_covered=(*ALWAYS_NOT_COVERED, code),
    )
    claim, meaning = found.text.split(". ")[:2]
    assert " would be (8, 1e-05)-differentially private" in claim
    assert " are (8" not in found.text
    assert " would change by at most" in meaning
    why = "drew its noise securely" if code == "simulated-noise" else NOT_COVERED[code]
    assert why in claim


def test_a_budget_that_no_vault_keeps_is_for_this_run():
    for code in ("unvaulted", "fresh-vaults", "sums-elsewhere"):
        found = Guarantee(
            Budget(8, 1e-5),
            unit="record",
            calibration="exact",
            not_covered=(*ALWAYS_NOT_COVERED, code),
        )
        assert found.text.startswith("Each client's uploads in this run are (8, 1e-05)-")


def test_every_code_that_is_not_always_there_changes_the_claim_or_is_known_not_to():
    """A new code has to be thought about: does the first sentence still hold with it?"""
    harmless = {
        "insecure-transport",  # a listener sees what the server sees, which is noised
        "paper-calibration",  # the figures are what that noise really gives
        "loose-delta",  # the figures hold; they promise little
        "same-person-elsewhere",  # in place of a code that is always there
    }
    plain = Guarantee(Budget(8, 1e-5), unit="record", calibration="exact").text.split(". ")[0]
    for code in NOT_COVERED.keys() - {*ALWAYS_NOT_COVERED}:
        own = Guarantee(
            Budget(8, 1e-5),
            unit="record",
            calibration="exact",
            not_covered=(*ALWAYS_NOT_COVERED, code),
        )
        assert (own.text.split(". ")[0] == plain) == (code in harmless), code


@pytest.mark.parametrize("own", UNITS)
@pytest.mark.parametrize("asked", ["record", "client"])
def test_a_client_takes_part_for_the_unit_of_its_vault_only(own, asked):
    """A vault of single records has other releases, which no promise for all its data covers."""
    found = find_misfit(
        plan(**{"local.unit": asked}), public_rows(), member(0, account(8.0), unit=own), clients=1
    )
    if own == asked:
        assert found is None
    else:
        assert found is not None
        assert f"(local.unit = {own}), and local.unit is " in found


def test_a_client_whose_table_becomes_other_numbers_takes_no_part():
    """Whether the public rows have a layout, or only the plan says what their columns are."""
    columns = {"age": [0, 120], "ill": ["no", "yes"]}
    table = {"path": "t.csv", "label": "ill", "columns": columns}
    asked = Plan(data={**table, "clients": 1}, privacy={"epsilon": 8.0, "delta": 1e-5})
    layout = declare_layout(Source("t.csv", "ill", columns=asked.data.columns))
    held = replace(public_rows(), shape=(1,), classes=2)
    for public, low, fits in (
        (held, -1.0, True),
        (held, 0.0, False),
        (replace(held, layout=layout), -1.0, True),
        (replace(held, layout=replace(layout, low=0.0)), -1.0, False),
    ):
        own = replace(layout, low=low).encoding
        client = replace(member(0, account(8.0)), features=1, classes=2, encoding=own)
        found = find_misfit(asked, public, client, clients=1)
        assert ("encodes its table" not in str(found)) == fits, found
        arrays = find_misfit(asked, public, replace(client, encoding=None), clients=1)
        assert "encodes" not in str(arrays)


def test_the_record_of_a_dealt_federation_says_that_its_vaults_are_new(tmp_path):
    federate.deal(load_plan(None, [], 2), tmp_path / "run")
    held = federated.load_public(tmp_path / "run" / "public.npz")
    asked = plan(**{"data.clients": 1})
    found = build_from_members(asked, [member(0, account(8.0))], held).guarantee()
    assert "fresh-vaults" in found.not_covered
    assert found.text.startswith("Each client's uploads in this run are")
    assert not public_rows().fresh_vaults


def test_a_model_without_jax_has_the_guarantee_of_any_other():
    class Foreign(Model):
        def shapes(self):
            return {"w": (64, 10)}

        def draw_parameters(self, seed):
            return {"w": np.zeros((64, 10), np.float32)}

        def gradients(self, params, x, y):
            return {"w": np.zeros((len(y), 64, 10))}

        def losses(self, params, x, y):
            return np.zeros(len(y))

        def predict(self, params, x):
            return np.zeros(len(x), np.int64)

    short = Plan().replace(**{"rounds.schedule": "fixed", "rounds.rounds": 2})
    found, known = (simulate(asked, seed=1, **more).record["guarantee"] for asked, more in (
        (short, {"model": Foreign()}), (short, {})))  # fmt: skip
    assert (found["epsilon"], found["delta"]) == (known["epsilon"], known["delta"])


def test_labels_below_zero_are_shown_as_they_are():
    rows, public = (np.zeros((20, 2)), np.tile([-1, 1], 10)), (np.zeros((4, 2)), [0, 1, 0, 1])
    with pytest.raises(InputError, match=r"data labels must be whole numbers from 0.*got -1; "):
        simulate(Plan(), data=rows, validation=public, test=public)


# --- rows that the server evaluates on ---------------------------------------------------------

OWN_ROWS = "The clients' own rows that were taken for validation and test are not protected"
NOBODYS_ROWS = "Records that a server validates and tests on are not protected"
WARDS, EACH = 4, 30


def hospital(folder, *, last):
    """A table of wards; `last` are the labels of all rows of the last one."""
    rng = np.random.default_rng(5)
    lines = ["ward,age,ill,patient"]
    for ward in range(WARDS):
        for age in rng.integers(0, 100, EACH):
            ill = last if ward == WARDS - 1 else ("yes" if age > 50 else "no")
            lines.append(f"ward {ward},{age},{ill},{len(lines) // 2}")
    folder.mkdir(exist_ok=True)
    for name in ("wards.csv", "elsewhere.csv"):
        rows = lines if name == "wards.csv" else lines[: 1 + EACH]  # no row of the last ward
        (folder / name).write_text("\n".join(rows) + "\n")
    return folder / "wards.csv"


def of_wards(path, *, unit="client", noise="simulated", **data):
    own = {"path": str(path), "label": "ill", "client": "ward", "validation": 0.2, "test": 0.2,
           "columns": {"age": [0, 100], "ill": ["no", "yes"]}}  # fmt: skip
    if unit == "person":
        own["person"] = "patient"
    return Plan(
        noise=noise,
        data={**own, **data},
        model={"name": "softmax"},
        local={"unit": unit},
        rounds={"schedule": "fixed", "rounds": 2},
    )


def elsewhere(path):
    file = str(path.with_name("elsewhere.csv"))
    return {"validation": file, "test": file}


def classes_tested(record):
    """How many test rows each class has, which no noise hides: the rows of the confusion matrix."""
    return [sum(row) for row in record["result"]["confusion"]]


@pytest.mark.parametrize("unit", sorted(LARGER_UNITS))
def test_tables_that_differ_in_one_client_are_told_apart_only_where_the_leak_is_named(
    tmp_path, unit
):
    """The attack: count the classes in record.json. With certainty it finds which table it was."""
    paths = [hospital(tmp_path / last, last=last) for last in ("no", "yes")]
    runs = [simulate(of_wards(path, unit=unit), seed=1) for path in paths]
    assert classes_tested(runs[0].record) != classes_tested(runs[1].record)
    for run in runs:
        claim = run.record["guarantee"]["text"].split(". ")[0]
        assert "evaluation-in-unit" in run.record["guarantee"]["not_covered"]
        assert " would be " in claim
        assert f"were it not for {NOT_COVERED['evaluation-in-unit']}" in claim
        assert OWN_ROWS in run.record["guarantee"]["text"]


@pytest.mark.parametrize("unit", sorted(LARGER_UNITS))
def test_a_release_does_not_evaluate_on_what_it_protects(tmp_path, unit):
    path = hospital(tmp_path, last="yes")
    away = elsewhere(path)
    for data in ({}, {"validation": 9, "test": 9}, {"test": away["test"]},
                 {"validation": away["validation"]}):  # fmt: skip
        simulated = of_wards(path, unit=unit, **data)
        (tmp_path / "plan.toml").write_text(simulated.to_toml())
        for ask in (
            lambda data=data: of_wards(path, unit=unit, noise="secure", **data),
            lambda plan=simulated: plan.replace(noise="secure"),  # as the server of a federation
            lambda: load_plan(tmp_path / "plan.toml", [], None),  # as sottovoce federate
        ):
            with pytest.raises(PlanError, match=r"a file with local.unit = .* are part of what is"):
                ask()


def test_a_release_may_evaluate_on_rows_from_elsewhere(tmp_path):
    """And then the last client leaves no trace but its uploads."""
    paths = [hospital(tmp_path / last, last=last) for last in ("no", "yes")]
    runs = [simulate(of_wards(path, noise="secure", **elsewhere(path))) for path in paths]
    assert classes_tested(runs[0].record) == classes_tested(runs[1].record)
    assert sum(classes_tested(runs[0].record)) == EACH
    for run in runs:
        assert not {code for code in run.record["guarantee"]["not_covered"] if "evaluation-" in code
                    } - {"evaluation-records"}  # fmt: skip
        assert " in this run are (8, 1e-05)-" in run.record["guarantee"]["text"]
        assert run.record["clients"][-1]["samples"] == EACH  # all its rows are trained on


@pytest.mark.parametrize("unit", UNITS)
def test_rows_that_the_plan_declares_public_are_no_part_of_the_promise(tmp_path, unit):
    plan = of_wards(hospital(tmp_path, last="no"), unit=unit, noise="secure", evaluation="public")
    text = simulate(plan).record["guarantee"]["text"]
    about = {"record": "one record of its training data", "client": "its whole training dataset",
             "person": "one person in its training data (all rows together)"}  # fmt: skip
    assert f" are (8, 1e-05)-differentially private for {about[unit]}. " in text
    assert f"with {about[unit]}" in text
    assert "The clients' own rows that the plan declares public, for validation and test," in text


def test_the_card_of_single_records_names_the_clients_own_rows(tmp_path):
    """In its sentence: the promise is for training rows, and what shows the others is said."""
    out = tmp_path / "run"
    run = simulate(of_wards(hospital(tmp_path, last="no"), unit="record"), seed=1, out=out)
    text = run.record["guarantee"]["text"]
    for words in ("for one record of its training data,", OWN_ROWS, "losses", "all else that",
                  "(by client, too"):  # fmt: skip
        assert words in text.partition(" Not covered: ")[0]
    card = reports.write_report(out).read_text("utf-8").partition("Not covered")[0]
    assert OWN_ROWS.replace("'", "&#39;") in card
    assert "one record of a client’s training data" in card


def test_a_federation_dealt_from_a_table_with_clients_names_their_rows(tmp_path):
    own = of_wards(hospital(tmp_path, last="no"), unit="record", noise="secure")
    federate.deal(own, tmp_path / "run")
    plan, _ = federate.load_dealt(tmp_path / "run")
    held = federated.load_public(tmp_path / "run" / "public.npz")
    found = build_from_members(plan, [member(0, account(8.0))], held)
    assert OWN_ROWS in found.guarantee().text
    with pytest.raises(InputError, match=r"local\.learning_rate must be a number where no client"):
        build_from_members(plan, [member(0, None)], held)  # it would tell how many rows it has
    fixed = plan.replace(**{"local.learning_rate": 1.0})
    hidden = build_from_members(fixed, [member(0, None)], held)
    assert hidden.guarantee() is None
    assert OWN_ROWS in describe_undisclosed(hidden.not_covered())


@pytest.mark.parametrize("unit", UNITS)
def test_rows_of_nobody_are_not_called_the_clients(tmp_path, unit):
    """A data set, arrays, one array a client, a table without a client column; every signal."""

    def promise(plan, *given, **more):
        arrays = federated.Given(*given, **more) if given else None
        plan = adapt_plan(plan, arrays, None)
        return build(plan, seed=1, data=arrays).guarantee().to_json()

    path = hospital(tmp_path, last="no")
    dealt = {"client": None, "split": "iid", "clients": 3}
    rows = np.zeros((60, 2), np.float32), np.tile([0, 1], 30)
    few = {"local": {"unit": unit}, "rounds": {"rounds": 1}}
    noised = few | {"server": {"signal": "clients"}}
    table = simulate(of_wards(path, unit=unit, **dealt), seed=1).record["guarantee"]
    found = [table, promise(of_wards(path, unit=unit, **dealt))]
    if unit == "person":  # which a data set does not have
        arrays = Plan(**few, data={"name": "arrays", "clients": 3, "validation": 5, "test": 5})
        found += [promise(arrays, rows, person=np.arange(60) // 2)]
    else:
        found += [
            promise(Plan(**few)),
            promise(Plan(**noised)),
            promise(Plan(**few), rows),
            promise(Plan(**few), [rows, rows], rows, rows),
        ]
    for guarantee in found:
        assert NOBODYS_ROWS in guarantee["text"].partition(" Not covered: ")[0]
        assert "clients' own rows" not in guarantee["text"]
        assert not {*LEAKS, "evaluation-of-clients"} & {*guarantee["not_covered"]} - {
            "counted-classes"
        }


def test_every_unit_that_holds_several_rows_holds_its_evaluation_rows():
    for unit in UNITS:
        code = evaluation_code(unit, declared_public=False)
        assert (code in LEAKS) == (unit != "record")
        assert evaluation_code(unit, declared_public=True) not in LEAKS


def test_messages_are_promised_and_their_time_is_not():
    for unit in UNITS:
        text = Guarantee(Budget(8, 1e-5), unit=unit, calibration="exact").text
        assert "the probability of anything that the content of all messages can show" in text
        assert "server can see" not in text
        assert "the time at which a message leaves" in text.partition(" Not covered: ")[2]
        twice = "with several clients or several times with one" in text
        assert twice == (unit == "record")  # else all rows of a person are protected together
        assert "whose records lie with several clients" in text


def test_a_run_of_an_earlier_version_has_one_code_about_persons():
    """Its checkpoint may name the one that is false where all rows of a client are protected."""
    for unit in ("record", "client"):
        federation = build(Plan(local={"unit": unit}), seed=1)
        codes = federation.not_covered("same-person-twice", "insecure-transport")
        assert ("same-person-twice" in codes) == (unit != "client")
        assert "insecure-transport" in codes


def test_no_sentence_on_sums_leaves_out_what_it_depends_on():
    """ε holds while the others follow the protocol; with one ε alone no factor e^ε is promised."""
    for one_client in (False, True):
        found = Guarantee(
            Budget(8, 1e-5),
            unit="record",
            calibration="exact",
            corrupt=2,
            epsilon_alone=30.4,
            one_client=one_client,
        )
        sentences = found.text.split(". ")
        named = [one for one in sentences if "(8, 1e-05)" in one or "e^8" in one]
        assert len(named) == 2
        for one in named:
            assert "as long as the rest follow the protocol" in one
            assert (
                "30.4"
                in one.partition("whatever anyone does")[0][-12:]
                + one.partition("whatever anyone does")[2]
            )
        (adversary,) = [one for one in sentences if one.startswith("The adversary")]
        assert ("sees this client's uploads" in adversary) == one_client


@pytest.mark.parametrize(("unit", "delta"), [("record", 0.007), ("client", 0.1)])
def test_a_run_says_where_its_delta_would_allow_a_unit_to_be_published(caplog, unit, delta):
    """143 records a client, ten clients: 1/143 and 1/10. It is said before the first round."""
    said: list[list[str]] = []
    for own, loose in ((delta, True), (0.98 * delta, False)):
        plan = Plan(local={"unit": unit}, privacy={"delta": own}, rounds={"rounds": 1})
        caplog.clear()
        said.clear()
        record = simulate(plan, seed=1, on_round=lambda done: said.append(caplog.messages)).record
        assert (NOT_COVERED["loose-delta"] in record["guarantee"]["text"]) == loose
        assert ("loose-delta" in record["guarantee"]["not_covered"]) == loose
        start = f"delta = {own:g} should be below 1 / "
        assert [line.startswith(start) for line in said[0]].count(True) == loose
        assert said[0] == record.get("advice", [])


def test_advice_stands_in_record_and_page(tmp_path):
    asked = Plan(privacy={"epsilon": 500.0}, rounds={"schedule": "fixed", "rounds": 1})
    run = simulate(asked, seed=1, out=tmp_path / "run")
    (sentence,) = run.record["advice"]
    assert sentence.startswith("epsilon = 500 is above 20")
    page = reports.write_report(tmp_path / "run").read_text("utf-8")
    assert f"Advice: {sentence}." in page
    assert "advice" not in simulate(asked.replace("privacy.epsilon=8"), seed=1).record
