"""What README and docs say of the audit is what results/audit holds, and what the tests count."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import jsonschema

import sottovoce
from mutants.privacy_mutants import MUTANTS
from support import ROOT

FOUND = json.loads((ROOT / "results/audit/audit.json").read_text("utf-8"))
PAPER, OURS = FOUND["messages"][-1], FOUND["messages"][-2]


def _text(name):
    return " ".join((ROOT / name).read_text("utf-8").split())


def test_the_proven_epsilon_of_the_papers_noise_is_the_measured_one():
    text = _text("docs/audit.md")
    told = re.findall(r"(?:measures|proves) ε ≥ (\d+)", text)
    assert told == [str(math.floor(PAPER["epsilon_gaussian"][0]))]
    assert "assuming the Gaussian shape" in text
    free = math.floor(10 * PAPER["epsilon_free"]) / 10
    assert re.findall(r"(?:and|assumption) ε ≥ (\d+\.\d)", text) == [f"{free:.1f}"]


def test_the_page_on_the_audit_says_what_was_measured():
    text = _text("docs/audit.md")
    assert f"from {PAPER['messages']:,} messages a side" in text
    assert f"has μ = {PAPER['mu_true']:.2f}" in text
    assert PAPER["calibration"] == "paper"
    assert PAPER["contradicts"]
    # "stays below": not refuted, and as close to its promise as the rates can tell.
    assert (OURS["epsilon"], OURS["delta"]) == (PAPER["epsilon"], PAPER["delta"])
    assert OURS["epsilon_gaussian"][0] <= OURS["epsilon"]
    assert f"it took {FOUND['seconds'] / 60:.0f} minutes" in text


def test_the_committed_audit_is_whole_and_contradicts_nothing():
    schema = Path(str(sottovoce.__file__)).parent / "schemas/audit.json"
    jsonschema.validate(FOUND, json.loads(schema.read_text("utf-8")))
    assert not FOUND["quick"]
    assert FOUND["contradictions"] == []
    assert FOUND["not_measured"] == []
    assert f"$ {FOUND['command']} " in (ROOT / "docs/audit.md").read_text("utf-8")
    assert not any(one["exceeds"] for row in FOUND["attacks"] for one in row["levels"])
    assert not any(one["contradicts"] for one in (*FOUND["messages"][:-1], *FOUND["one_run"]))
    for one in FOUND["messages"]:
        low, _, high = one["mu"]
        assert low <= one["mu_true"] <= high  # 99.9 %; what is committed is a run that held
        if one["mu_true"] < 2 and one["messages"] >= 20_000:  # of whole runs there are fewer
            assert low >= 0.85 * one["mu_true"]
        assert 0 < one["epsilon_free"] <= one["epsilon"]
    clean = {(row["attack"], row["measure"]): row["levels"][0]["value"] for row in FOUND["attacks"]}
    assert clean["first-layer inversion, one sample", "mean squared error"] < 1e-10  # error < 1e-5
    assert clean["LiRA, final model", "AUC"] > 0.9


def test_the_committed_page_shows_the_committed_numbers():
    page = (ROOT / "results/audit/audit.html").read_text("utf-8").replace("\u00a0", " ")
    for sentence in (FOUND["verdict"], FOUND["judgement"]):
        assert sentence in page
    drawn = {path.stem for path in (ROOT / "results/audit").glob("*.svg")}
    assert drawn >= {"claimed", "inversion", "matching", "paper", "traps"}


def test_there_are_as_many_mutants_as_pages_say():
    """That each of them is killed, `test_privacy_mutants` asserts one by one."""
    assert len(MUTANTS) > 200
    for page in ("README.md", "docs/audit.md"):
        assert "writes more than 200 deliberate" in _text(page), page
