"""The page of a run: says what holds, injects nothing, loads nothing, survives damaged records."""

from __future__ import annotations

import copy
import io
import itertools
import json
import math
import random
import re
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from html.parser import HTMLParser
from importlib import resources
from statistics import NormalDist
from types import SimpleNamespace

import jsonschema
import numpy as np
import pytest
from markupsafe import Markup

from sottovoce import Plan, simulate
from sottovoce.errors import RunError
from sottovoce.privacy.budget import LEAKS, NOT_COVERED
from sottovoce.reports import charts, render_report, write_report
from sottovoce.reports.progress import LineDisplay
from sottovoce.reports.run import CheckedRun, group_by_budget
from sottovoce.runs.checkpoint import RoundDone
from support.example_record import example
from support.random_edits import edit_randomly

BANNER = (
    "Simulation: this is what a deployment of this plan would guarantee; "
    "do not publish this model as private."
)
VOID = {"meta", "link", "br", "hr", "img", "input"}


class Page(HTMLParser):
    """The page as a strict reader sees it: tags in balance, attributes, visible text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.words: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        assert len(dict(attrs)) == len(attrs), tag
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if "style" not in self.open:
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())

    def all(self, tag):
        return [attrs for name, attrs in self.tags if name == tag]


@pytest.fixture(scope="module")
def default():
    return example()


@pytest.fixture(scope="module")
def default_page(default):
    return render_report(*default)


@pytest.fixture
def no_drawing(monkeypatch):
    monkeypatch.setattr(
        charts, "draw_axes", lambda name, label, paint: Markup("<svg>{}</svg>").format(label)
    )


def schema():
    return json.loads(resources.files("sottovoce").joinpath("schemas/record.json").read_text())


# What the reader is told


@pytest.mark.slow
def test_the_headline_says_all_and_stands_first(default_page):
    sentence = (
        "Finished: 87.5\u00a0% test accuracy on digits, model mlp, after 80 of 120 rounds, "
        "at ε = 8."
    )
    assert f"<h1>{sentence}</h1>" in default_page
    assert f"<title>{sentence}</title>" in default_page


@pytest.mark.parametrize(
    ("metric", "title", "first"),
    [("auroc", "Validation AUROC", "First 0.75"), ("mae", "Validation mean absolute", "First 5")],
)
def test_the_plans_metric_is_drawn_by_round(metric, title, first):
    record, trace = example(stop_after=4)
    for state in (record["initial"], *record["rounds"]):
        state["signal"] = 0.25
    page = render_report(record, trace)
    assert "Validation accuracy" in page
    assert title not in page
    record["plan"]["metric"] = metric
    if metric == "mae":
        record["model"] = {"name": "softmax", "shape": [3], "classes": 1, "parameters": 4}
        record["model"]["target"] = {"loss": "squared", "low": -20.0, "high": 20.0}
    page = render_report(record, trace)
    assert "Validation accuracy" not in page
    assert f"{title}" in page
    assert first in page


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, "What the schedule watches."),
        ({"schedule": "fixed"}, "On unprotected records."),
        ({"schedule": "fixed", "parts": ["schedule: study.Patience"]}, "What the schedule watches"),
        ({"signal": "clients"}, "The schedule watches the clients’ own losses instead."),
        ({"signal": "raw", "validation": 0}, "On the test rows. The schedule watches the clients’"),
        ({"validation": 0}, "On the test rows, which steer this run"),
        ({"schedule": "fixed", "validation": 0}, "On the test rows. "),
        ({"metric": "auroc"}, "The plan is judged by AUROC on the same rows instead."),
        ({"metric": "auroc", "signal": "clients"}, "watches the clients’ own losses instead."),
    ],
)
def test_the_loss_is_said_to_steer_only_where_it_does(changes, said, no_drawing):
    record, trace = example(stop_after=3)
    plan = record["plan"]
    plan["server"]["signal"] = "public"
    sections = {"schedule": "rounds", "signal": "server", "validation": "data"}
    for key, value in changes.items():
        (plan[sections[key]] if key in sections else plan)[key] = value
    assert said in Page(render_report(record, trace)).text


def test_a_line_shows_the_metric_and_no_horizon_below_the_rounds_done(capsys):
    done = RoundDone(45, 46, 45, 3, 0.5, 0.25, 0.75, 0.0)
    show = LineDisplay(sys.stdout)
    show.round(done)
    show.round(replace(done, horizon=50, next_horizon=40))
    show.round(replace(done, t=9, metric="auroc", score=0.8125))
    show.round(replace(done, t=9, horizon=45, accuracy=math.nan))
    show.round(replace(done, sigma=math.nan, fuel=math.nan))
    assert capsys.readouterr().out.splitlines() == [
        "round 46 of 46  loss 0.2500  accuracy 75.0%  σ 0.5  fuel 0.0%",
        "round 46 of 50  loss 0.2500  accuracy 75.0%  σ 0.5  fuel 0.0%  T 50 → 46",
        "round 10 of 46  loss 0.2500  AUROC 0.812  σ 0.5  fuel 0.0%  T 46 → 45",
        "round 10 of 45  loss 0.2500  σ 0.5  fuel 0.0%",
        "round 46 of 46  loss 0.2500  accuracy 75.0%  σ –  fuel –",
    ]


def test_a_long_run_says_how_long_it_still_takes(capsys, monkeypatch):
    clock = iter([100.0, 104.0, 110.0, 112.0])
    monkeypatch.setattr("sottovoce.reports.progress.time.monotonic", lambda: next(clock))
    show = LineDisplay(sys.stdout)
    for t in (0, 1, 2, 199):
        show.round(RoundDone(t, 200, 200, 3, 0.5, 0.25, 0.75, 0.0))
    ends = [line.partition("fuel 0.0%")[2] for line in capsys.readouterr().out.splitlines()]
    assert ends == ["", "  about 13 min left", "  about 16 min left", ""]  # 198 × 4 s, 197 × 5 s


def test_unequal_classes_name_the_remedy_unless_it_is_used(no_drawing):
    record, trace = example(measured=True)
    remedy = "model.class_weights with a public data.prevalence"
    share = record["result"]["metrics"]["accuracy"]["baseline"]
    for largest, weights, shown in ((0.95, {}, True), (0.95, {"class_weights": [1, 1]}, False),
                                    (0.1, {}, False)):  # fmt: skip
        record["result"]["metrics"]["accuracy"]["baseline"] = largest
        record["plan"]["model"] = {"name": "mlp"} | weights
        assert (remedy in Page(render_report(record, trace)).text) == shown
    assert 0 < share < 1


def test_metrics_stand_beside_what_a_constant_answer_scores(no_drawing):
    record, trace = example(measured=True)
    jsonschema.validate(record, schema())
    page = Page(render_report(record, trace))
    head = record["result"]["headline"]
    assert f"Finished: {head['text']} on digits" in page.text
    assert "AUROC (always the most frequent class: 0.500)" in page.text
    assert "ROC curve of the test rows" in page.text
    assert "calibrated on 200 validation rows" in page.text
    assert re.search(r" [0-9.]+\s?points ", page.text)  # beside a metric in per cent
    for words in ("standard error of the difference", "log loss, calibrated", "test loss, before"):
        assert words in page.text
    assert "a site with a name of several words 60" in page.text
    assert "above two standard errors of the difference" in page.text


def test_the_reliability_names_the_class_whose_probabilities_it_has(no_drawing):
    """Of two classes the rarer one, which may have no test row at all; of more the likeliest."""
    record, trace = example(stop_after=2, measured=True)
    record["result"]["curves"] = {"reliability": [[0.25, 0.0, 9.0]]}
    for classes, said in ((2, "the class that no test row has"), (10, "the most likely class")):
        record["model"] = {"shape": [64], "classes": classes, "parameters": 9}
        assert f"Probabilities of {said} against" in Page(render_report(record, trace)).text


def test_a_number_is_not_predicted_by_a_softmax():
    record, trace = example(stop_after=2)
    record["plan"]["model"] = {"name": "softmax", "loss": "squared"}
    assert ", model linear, after" in render_report(record, trace)


def test_the_gauge_shows_what_is_left(no_drawing):
    record, trace = example(stop_after=2)
    (share,) = {1 - client["spent"] / client["capacity"] for client in record["clients"]}
    page = render_report(record, trace)
    assert f'of the fuel is left"><span style="width:{100 * share:.2f}%">' in page


def test_parts_stand_in_their_order(default_page):
    parts = ["<h1>", BANNER, 'id="guarantee"', "<svg", 'id="plan"', 'id="clients"', 'id="origin"']
    places = [default_page.index(part) for part in parts]
    assert places == sorted(places)


def test_only_simulated_noise_has_the_banner(default_page):
    assert default_page.count(BANNER) == 1
    assert BANNER not in render_report(*example(noise="secure", stop_after=0))
    paper = render_report(*example(calibration="paper", stop_after=0))  # a vault would refuse it
    assert BANNER not in paper
    assert "Simulation of what no deployment does" in paper


def test_the_card_names_every_term_of_the_guarantee(default, default_page):
    text = Page(default_page).text
    for term in ("10⁻⁵", "one record", "replace-one", "the server", "exact", "not the gauge"):
        assert term in text
    guarantee = default[0]["guarantee"]
    assert guarantee["text"].partition(" Not covered")[0] in text
    for code in guarantee["not_covered"]:
        assert NOT_COVERED[code] in text


@pytest.mark.parametrize("calibration", ["exact", "zcdp"])
def test_the_attacker_is_the_one_at_the_cap(calibration, no_drawing):
    record, trace = example(calibration=calibration, stop_after=5)
    mu = math.sqrt(record["clients"][0]["capacity"])
    normal = NormalDist()
    text = Page(render_report(record, trace)).text
    found = up(normal.cdf(normal.inv_cdf(0.01) + mu), 1000)
    assert f"{found:.1%}".replace("%", "\u00a0%") in render_report(record)
    assert f"{up(normal.cdf(mu / math.sqrt(2)), 1000):.3f}" in text
    del record["clients"]  # the cap follows from the guarantee just as well
    assert CheckedRun.of(record).attacker_mu() == pytest.approx(mu, rel=1e-9)


def test_the_attackers_view_claims_no_more_than_the_guarantee(no_drawing):
    """Of simulated noise and of vaults for one run the card speaks as its guarantee does."""

    def read(record):
        return Page(render_report(record)).text

    record, _ = example(noise="secure")
    assert "At the cap, once all fuel is spent: no attacker who reads all messages" in read(record)
    record["guarantee"]["not_covered"].append("fresh-vaults")
    assert "no attacker who reads the messages of this run" in read(record)
    record, _ = example(noise="simulated")
    assert "once all fuel is spent, with noise drawn securely: no attacker" in read(record)


def test_under_paper_the_attacker_is_the_one_at_the_cap_too(no_drawing):
    """What a run happened to release is no bound: its length and noise were chosen on the way."""
    record, trace = example(calibration="paper", epsilon=20.0, per_round=6)
    went = max(
        client["sensitivity"] ** 2
        * sum(1 / trace["sigma"][r["t"], i] ** 2 for r in record["rounds"] if i in r["cohort"])
        for i, client in enumerate(record["clients"])
    )
    cap = math.sqrt(record["clients"][0]["capacity"])
    run = CheckedRun.of(record, trace)
    assert math.sqrt(went) < 0.9 * cap
    assert run.attacker_mu() == pytest.approx(cap, rel=1e-9)
    text = Page(render_report(record, trace)).text
    normal = NormalDist()
    assert f"{up(normal.cdf(cap / math.sqrt(2)), 1000):.3f}" in text
    assert "At the cap" in text
    holds = re.search(r"with the paper’s noise ε = ([\d.]+) is what holds", text)[1]
    epsilon = run.guarantee["epsilon"]
    assert epsilon <= float(holds) < epsilon + 0.01
    assert f"at ε = {holds} (20 was asked for)." in text


def up(value, steps):
    return math.ceil(value * steps) / steps


@pytest.mark.parametrize("epsilon", [8.00001, 0.123449, 25.33211, 123.41, 4321.2])
def test_what_the_page_claims_holds(epsilon, no_drawing):
    """ε and δ are never printed smaller than they are, wherever they stand."""
    record, trace = example(epsilon=[epsilon] * 9 + [epsilon / 3], stop_after=0)
    record["guarantee"]["delta"] = 1.00049e-5
    text = Page(render_report(record, trace)).text.replace(",", "")
    head = float(re.search(r"at ε up to ([\d.]+)\.", text)[1])
    card = float(re.search(r"privacy loss\s*([\d.]+)", text)[1])
    for shown in (head, card):
        assert epsilon <= shown <= epsilon * 1.001
    assert "1.001 × 10⁻⁵" in text
    found = re.findall(r"(?<![\d.])\d+(?:\.\d+)?(?![\d.])", text)
    low = [float(n) for n in found if abs(float(n) / (epsilon / 3) - 1) < 1e-3]
    assert low
    assert min(low) >= epsilon / 3


def test_ceilings_of_an_attacker_are_rounded_up(no_drawing):
    normal = NormalDist()
    for epsilon in (1.0, 2.0, 3.0, 5.0, 8.0):
        record, _ = example(epsilon=epsilon, stop_after=0)
        mu = math.sqrt(record["clients"][0]["capacity"])
        text = Page(render_report(record)).text
        found = re.search(r"1\s%\sfalse alarms\s*([\d.]+)\s%", text)[1]
        area = re.search(r"\(AUC\), at most\s*([\d.]+)", text)[1]
        assert 0 <= float(found) / 100 - normal.cdf(normal.inv_cdf(0.01) + mu) <= 0.001
        assert 0 <= float(area) - normal.cdf(mu / math.sqrt(2)) <= 0.001


def test_under_paper_every_table_says_asked_for(no_drawing):
    record, trace = example(calibration="paper", epsilon=[8.0, 20.0] * 5, stop_after=2)
    record["result"]["fairness"] = {
        "shown": True,
        "clients": 10,
        "accuracy": dict.fromkeys(("min", "q1", "median", "q3", "max"), 0.5),
        "by_budget": [
            {"epsilon": e, "delta": 1e-5, "clients": 5, "rows": 50, "accuracy": 0.5}
            for e in (8.0, 20.0)
        ],
    }
    page = render_report(record, trace)
    assert page.count(">ε asked for</th>") == 3
    assert ">ε</th>" not in page
    assert ">ε asked for</th>" not in render_report(*example(epsilon=[8.0, 20.0] * 5, stop_after=2))


def test_a_page_warns_of_every_leak_and_of_hidden_budgets(no_drawing):
    for code in LEAKS:
        record, trace = example(stop_after=0)
        record["guarantee"]["not_covered"].append(code)
        text = Page(render_report(record, trace)).text
        assert f"The budget does not cover {NOT_COVERED[code]}" in text
        assert "at ε = 8, but for what it does not cover." in text
    record, trace = example(stop_after=0)
    record["guarantee"]["not_covered"].append("undisclosed-budgets")
    text = Page(render_report(record, trace)).text
    assert "at ε = 8 for the clients that disclose it." in text
    assert "a record of a client that discloses its budget was this one" in text


@pytest.mark.parametrize("calibration", ["exact", "paper"])
def test_fuel_ends_where_the_record_does(calibration):
    record, trace = example(calibration=calibration, epsilon=[2.0, 4.0, 8.0] * 2, clients=6)
    left = CheckedRun.of(record, trace).fuel()
    assert left.shape == (len(record["rounds"]) + 1, 3)
    assert left[0].tolist() == pytest.approx([1, 1, 1], abs=1e-9)
    ends = [1 - client["spent"] / client["capacity"] for client in record["clients"]]
    assert left[-1].tolist() == pytest.approx([min(ends), np.median(ends), max(ends)], abs=1e-9)
    assert np.all(np.diff(left, axis=0) <= 1e-12)


def test_fuel_that_earlier_runs_used_is_gone_from_the_start():
    record, trace = example(clients=2, stop_after=3)
    for client in record["clients"]:
        client["spent"] += 0.25 * client["capacity"]
    assert CheckedRun.of(record, trace).fuel()[0].tolist() == pytest.approx([0.75] * 3, abs=1e-9)


def test_charges_of_several_releases_come_from_mu2():
    record, trace = example(clients=2, stop_after=3)
    doubled = trace | {"mu2": 2 * np.nan_to_num((4 / 143 / trace["sigma"]) ** 2)}
    once, twice = (sum(CheckedRun.of(record, t).charges()) for t in (trace, doubled))
    assert twice.tolist() == pytest.approx((2 * once).tolist())


def test_budgets_that_differ_have_a_table(no_drawing):
    record, trace = example(epsilon=[2.0] * 5 + [16.0] * 5, stop_after=4)
    text = Page(render_report(record, trace)).text
    assert "at ε up to 16." in text
    assert "5 clients have tighter ones (see “By budget”)" in text
    assert "By budget" in text
    assert "By budget" not in Page(render_report(*example(stop_after=4))).text


def test_many_budgets_are_gathered():
    record, _ = example(epsilon=np.linspace(1, 9, 40), clients=40, stop_after=0)
    groups = group_by_budget(CheckedRun.of(record).clients)
    assert len(groups) == 12
    assert sorted(np.concatenate(groups).tolist()) == list(range(40))


def test_where_the_horizon_shrank_is_marked(default):
    run = CheckedRun.of(*default)
    shrank = [r["t"] + 1 for r in default[0]["rounds"] if r["next_horizon"] < r["horizon"]]
    assert run.triggers.tolist() == shrank
    assert len(shrank) > 2
    assert f"lowered {len(shrank)} times" in charts.draw_horizon(run)


# What the page is


def test_nothing_is_loaded(default_page):
    """No address but the two SVG names, no link but the empty icon, no script at all."""
    bare = re.sub(r' xmlns(:xlink)?="[^"]*"', "", default_page)
    assert "://" not in bare
    page = Page(default_page)
    assert not page.all("script")
    for tag, attrs in page.tags:
        for name, value in attrs.items():
            assert name != "src", tag
            assert not name.startswith("on"), tag
            if name.endswith("href"):
                assert value.startswith("#") or value == "data:,", (tag, value)
    assert not re.findall(r"url\((?!#)|@import|@font-face", default_page)
    assert "default-src 'none'" in default_page


def test_it_can_be_read_by_everyone(default_page):
    page = Page(default_page)
    assert page.all("html") == [{"lang": "en"}]
    assert {"name": "viewport", "content": "width=device-width, initial-scale=1"} in page.all(
        "meta"
    )
    names = Counter(tag for tag, _ in page.tags)
    assert (names["h1"], names["main"], names["header"], names["footer"]) == (1, 1, 1, 1)
    assert names["svg"] == 6
    levels = [int(tag[1]) for tag, _ in page.tags if re.fullmatch(r"h[1-6]", tag)]
    assert all(after - before <= 1 for before, after in itertools.pairwise(levels))
    assert all(a["role"] == "img" and len(a["aria-label"]) > 20 for a in page.all("svg"))
    assert all(a.get("scope") in {"col", "row"} for a in page.all("th"))
    assert names["caption"] == names["table"]
    ids = Counter(attrs["id"] for _, attrs in page.tags if "id" in attrs)
    assert max(ids.values()) == 1
    for _, attrs in page.tags:
        for name, value in attrs.items():
            if name == "aria-labelledby" or (name.endswith("href") and value.startswith("#")):
                assert value.removeprefix("#") in ids


def luminance(colour: str) -> float:
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("scheme", [0, 1], ids=["light", "dark"])
def test_contrast(scheme):
    """WCAG AA: 4.5 for text, 3 for lines that carry meaning."""
    css = (
        resources.files("sottovoce.reports").joinpath("templates/colours.css.j2").read_text("utf-8")
    )
    colours = dict(re.findall(r"--([a-z-]+): (#[0-9a-f]{6})", css.split("endmacro")[scheme]))
    pairs = [("ink", "page", 4.5), ("ink", "card", 4.5), ("muted", "page", 4.5)]
    pairs += [("muted", "card", 4.5), ("warn-ink", "warn", 4.5), ("blue", "page", 4.5)]
    pairs += [(line, "card", 3.0) for line in ("blue", "orange", "green")]
    for front, back, least in pairs:
        a, b = sorted((luminance(colours[front]), luminance(colours[back])))
        assert (b + 0.05) / (a + 0.05) >= least, (front, back)


@pytest.mark.slow
def test_the_page_depends_on_the_record_alone(default, default_page):
    record, trace = copy.deepcopy(default)
    assert render_report(json.loads(json.dumps(record)), trace) == default_page
    assert record == default[0]


@pytest.mark.slow
def test_importing_the_room_is_light_and_drawing_needs_no_pyplot():
    code = (
        "import sys, sottovoce.reports\n"
        "assert not {'matplotlib', 'jinja2'} & set(sys.modules)\n"
        "from sottovoce.reports import charts; charts.draw_attacker(1.0)\n"
        "assert 'matplotlib.pyplot' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr


HOSTILE = "<script>alert(1)</script>\"'><img src=x onerror=alert(1)>&amp;</style></title>"


def write_everywhere(text: str) -> dict:
    """A record with this text wherever a record may have any text."""
    record, _ = example(clients=2, stop_after=2)
    for section in record["plan"].values():
        if isinstance(section, dict):
            for key in list(section):
                if key != "rounds":
                    section[key] = text
            section[text] = [text, {text: text}]
    record["plan"][text] = text
    record["versions"] = dict.fromkeys(["sottovoce", text], text)
    record["guarantee"] |= {"text": text, "not_covered": [text]}
    record["result"] |= {
        "finish": text,
        "aggregation": text,
        "fairness": {"shown": False, "why": text},
        "confusion": [[3, 1], [0, 4]],
    }
    columns = {text: [0, 1], "other": [text]}
    table = {"label": text, "classes": [text, text], "columns": columns, "inferred": [text]}
    record["table"] = table
    names = dict.fromkeys(("name", "key", "version", "limited"), text)
    record["clients"] = [{**names, "counted": 3, **client} for client in record["clients"]]
    for entry in record["rounds"]:
        entry |= {"refused": {text: 1}, "missing": {text: text}, "limited": {text: text}}
    return record


@pytest.mark.slow
def test_a_hostile_record_injects_nothing():
    trace = example(clients=2, stop_after=2)[1]
    plain, hostile = (Page(render_report(write_everywhere(t), trace)) for t in ("plain", HOSTILE))
    assert hostile.text.count(HOSTILE) > 10
    assert Counter(tag for tag, _ in plain.tags) == Counter(tag for tag, _ in hostile.tags)
    assert not any(name.startswith("on") for _, attrs in hostile.tags for name in attrs)


@pytest.mark.parametrize(
    "place",
    ["status", "engine", "noise", "seed", "timing.started", "result.model_sha256",
     "guarantee.unit", "guarantee.adjacency", "guarantee.adversary", "guarantee.calibration"],
)  # fmt: skip
def test_text_where_a_record_has_none_of_its_own_is_refused(place):
    record, _ = example(clients=2, stop_after=2)
    section, _, key = place.rpartition(".")
    (record[section] if section else record)[key] = HOSTILE
    with pytest.raises(RunError, match=f"record.json is damaged, {place} is "):
        render_report(record)


def test_no_template_lets_a_value_through_unescaped():
    templates = resources.files("sottovoce.reports") / "templates"
    files = [file for file in templates.iterdir() if file.name.endswith(".j2")]
    assert {"base.html.j2", "macros.html.j2", "run.html.j2"} <= {file.name for file in files}
    for file in files:
        assert not re.search(r"\bsafe\b|autoescape", file.read_text("utf-8")), file.name
    drawing = charts.draw_svg("x", HOSTILE, lambda figure: figure.text(0, 0, HOSTILE))
    (label,) = [attrs["aria-label"] for attrs in Page(drawing).all("svg")]
    assert label == HOSTILE
    assert not Page(drawing).all("script")


# What it survives


def absent_losses(record):
    for state in (record["initial"], *record["rounds"]):
        state["validation_loss"] = state["validation_accuracy"] = None
    record["result"] |= {"test_loss": None, "test_accuracy": None, "model_sha256": None}


def diverging(record):
    for state, loss in zip(record["rounds"], (1e300, None, 1e12, 3.0, 1e-3), strict=True):
        state["validation_loss"] = loss
    record["status"] = "failed"


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        ({"stop_after": 0}, None),
        ({"stop_after": 0, "calibration": "paper"}, None),
        ({"stop_after": 1, "clients": 1}, None),
        ({"stop_after": 5}, absent_losses),
        ({"stop_after": 5}, diverging),
    ],
    ids=["no round", "no round, paper", "one of each", "null losses", "diverging"],
)
def test_odd_runs_have_a_page(kind, change):
    record, trace = example(**kind)
    if change:
        change(record)
    jsonschema.validate(json.loads(json.dumps(record, allow_nan=False)), schema())
    page = Page(render_report(record, trace))
    assert "nan" not in page.text.lower().split()
    assert record["status"].capitalize() in page.text


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind",
    [{"clients": 10_000, "rounds": 60}, {"rounds": 2000, "beta": 0.999}],
    ids=["10,000 clients", "2,000 rounds"],
)
def test_pages_of_large_runs_stay_small(kind):
    record, trace = example(**kind)
    page = render_report(record, trace)
    assert len(page.encode()) < 1_000_000
    assert ("one by one" in page) == (len(record["clients"]) <= 200)


def test_above_ten_thousand_clients_figures_come_from_the_trace(no_drawing):
    record, trace = example(clients=5, stop_after=3)
    expected = render_report(record, trace)
    for name in record["clients"][0]:
        trace[f"clients_{name}"] = np.array([client[name] for client in record["clients"]])
    del record["clients"]
    assert render_report(record, trace) == expected
    for each in record["rounds"]:
        del each["cohort"]
    assert render_report(record, trace) == expected
    assert "Fuel left" not in render_report(record)


@pytest.mark.slow
def test_write_reads_the_folder(tmp_path, default, default_page):
    record, trace = default
    (tmp_path / "record.json").write_text(json.dumps(record), "utf-8")
    np.savez(tmp_path / "trace.npz", **trace)
    path = write_report(tmp_path)
    assert path == tmp_path / "report.html"
    assert path.read_text("utf-8") == default_page
    (tmp_path / "trace.npz").unlink()
    assert "Fuel left" not in write_report(tmp_path).read_text("utf-8")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "is missing; name a folder"),
        (b"", "is damaged"),
        (b'{"schema": "sottovoce.record/1", "rou', "is damaged"),
        (b"\xff\xfe", "is damaged"),
        (b"[" * 100_000, "is damaged"),
        (b"[]", "must have schema"),
        (b'{"schema": "sottovoce.record/2"}', "must have schema"),
        (b'{"schema": "sottovoce.record/1"}', "lacks 'status'"),
    ],
)
def test_a_damaged_record_is_one_sentence(tmp_path, content, words):
    if content is not None:
        (tmp_path / "record.json").write_bytes(content)
    with pytest.raises(RunError) as caught:
        write_report(tmp_path)
    message = str(caught.value)
    assert words in message
    assert "; " in message  # the remedy
    assert "--resume" not in message  # a finished run has nothing to go on from
    assert "\n" not in message
    assert len(message) < 400
    assert not (tmp_path / "report.html").exists()


def one_array() -> bytes:
    """What np.save writes: numpy reads it, but it is no archive."""
    out = io.BytesIO()
    np.save(out, np.zeros(3))
    return out.getvalue()


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 no zip", b"\x93NUMPY", b"text", one_array()])
def test_a_damaged_trace_is_one_sentence(tmp_path, content, default):
    (tmp_path / "record.json").write_text(json.dumps(default[0]), "utf-8")
    (tmp_path / "trace.npz").write_bytes(content)
    with pytest.raises(RunError, match=r"trace\.npz is damaged .*; remove it.* new folder$"):
        write_report(tmp_path)


def test_a_trace_of_another_run_is_refused(default):
    with pytest.raises(RunError, match="has shape"):
        render_report(default[0], {"sigma": np.ones((3, 3))})


def leaves(thing, path=()):
    items = thing.items() if isinstance(thing, dict) else enumerate(thing)
    for key, value in items:
        yield (*path, key)
        if isinstance(value, dict | list):
            yield from leaves(value, (*path, key))


@pytest.mark.slow
@pytest.mark.parametrize("calibration", ["exact", "paper"])
def test_no_single_damage_escapes_as_another_error(calibration, no_drawing):
    """Every value of a record is removed, and replaced by each of these: a page or a RunError."""
    record, trace = example(clients=2, stop_after=1, calibration=calibration)
    odd = [None, "text", [], {}, -1, True, 1e308, float("nan"), 10**30, [1, "x"]]
    pages, refusals = 0, []
    for path in leaves(record):
        for value in [KeyError, *odd]:
            broken = copy.deepcopy(record)
            place = broken
            for key in path[:-1]:
                place = place[key]
            if value is KeyError:
                del place[path[-1]]
            else:
                place[path[-1]] = value
            try:
                render_report(broken, trace)
                pages += 1
            except RunError as error:
                refusals.append(str(error))
    assert pages > 200
    assert len(refusals) > 200
    assert not [sentence for sentence in refusals if "\n" in sentence or "; " not in sentence]


@pytest.fixture(scope="module")
def real_runs():
    """Records with all that one may have, of classes and of numbers, and their traces."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(600, 4))
    y = x[:, 0] + rng.normal(size=600)
    plan = Plan(rounds={"schedule": "fixed", "rounds": 2}, data={"clients": 4})
    classes = plan.replace("metric=auroc", "model.name=softmax", "local.steps=2")
    numbers = plan.replace("model.name=softmax", "model.loss=squared", "data.target=[-4,4]")
    runs = simulate(classes, (x, (y > 1).astype(int)), seed=1), simulate(numbers, (x, y), seed=1)
    noise = np.ones((2, 4))
    return [(json.loads(json.dumps(run.record)), {"sigma": noise, "mu2": noise}) for run in runs]


@pytest.mark.slow
@pytest.mark.parametrize(("edits", "drawn"), [(1500, False), (25, True)])
def test_random_edits_of_a_real_record_give_a_page_or_one_sentence(
    edits, drawn, real_runs, request, tmp_path
):
    """With drawings for few of them, which take longest; the page can always be written."""
    if not drawn:
        request.getfixturevalue("no_drawing")
    rng, pages, refusals = random.Random(1), 0, []
    while edits:
        record, trace = rng.choice(real_runs)
        edited, done = edit_randomly(record, rng)
        try:
            page = render_report(edited, trace)
        except RunError as error:
            refusals.append(str(error))
            edits -= not drawn
        except Exception as error:
            pytest.fail(f"{done}: {error!r}")
        else:
            (tmp_path / "report.html").write_text(page, "utf-8")
            pages += 1
            edits -= 1
    assert pages >= (25 if drawn else 200)
    assert not [sentence for sentence in refusals if "\n" in sentence or "; " not in sentence]


@pytest.mark.parametrize(
    "odd", [np.ones((1, 2), complex), np.full((1, 2), "x"), np.zeros((1, 2), [("a", float)])]
)
def test_a_trace_without_numbers_is_one_sentence(odd):
    with pytest.raises(RunError, match=r"sigma of trace\.npz holds no numbers.*; "):
        render_report(example(clients=2, stop_after=1)[0], {"sigma": odd})


# The schema


@pytest.mark.parametrize(
    "kind", [{}, {"calibration": "paper", "per_round": 3}, {"stop_after": 0, "noise": "secure"}]
)
def test_records_keep_the_schema(kind):
    record, _ = example(**kind)
    jsonschema.Draft202012Validator.check_schema(schema())
    jsonschema.validate(json.loads(json.dumps(record)), schema())


@pytest.mark.parametrize(
    "change",
    [
        {"extra": 1},
        {"schema": "sottovoce.record/2"},
        {"status": "running"},
        {"seed": "1"},
        {"rounds": [{}]},
        {"clients": []},
        {"timing": {"started": "yesterday", "seconds": 1, "seconds_per_round": 1}},
    ],
)
def test_the_schema_refuses_what_is_not_a_record(change):
    record, _ = example(stop_after=1)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(record | change, schema())


def test_no_row_of_a_chart_loses_its_name():
    def paint(ax):
        ax.set_yticks(range(9), [f"row {i}" for i in range(9)])

    drawing = charts.draw_axes("rows", "nine rows", paint, size=(4, 3), inline=True)
    assert all(f">row {i}<" in drawing for i in range(9))


def test_a_class_may_have_any_name_in_a_curve():
    """matplotlib would read what stands between two dollars as a formula, and refuse it."""
    drawn = charts.draw_roc({r"$\frac{x_$": [[0, 0], [1, 1]], "<a> & b": [[0, 0], [1, 1]]})
    assert r"$\frac{x_$</text>" in drawn
    assert "&lt;a&gt; &amp; b" in drawn

    def paint(ax):  # every other text of every drawing: titles, ticks, labels
        ax.set(title=r"$\bad{$", xlabel=r"a $x$ b", xticks=[0], xticklabels=[r"site $\x$"])

    drawn = charts.draw_axes("any", "", paint)
    assert all(f"{text}</text>" in drawn for text in (r"$\bad{$", "a $x$ b", r"site $\x$"))


def test_a_small_spread_of_noise_does_not_fill_the_picture():
    """Clients of 168 and 171 rows have almost the same σ: the axis begins at 0."""
    sigma = np.tile([0.168, 0.17, 0.171], (5, 1))
    run = SimpleNamespace(sigma=sigma, used=5, triggers=np.zeros(0, int))
    assert re.search(r">0\.0+</text>", charts.draw_noise(run))
    run.sigma = np.outer([1.0, 2, 3, 4, 5], [0.168, 0.17, 0.171])
    assert not re.search(r">0\.0+</text>", charts.draw_noise(run))
