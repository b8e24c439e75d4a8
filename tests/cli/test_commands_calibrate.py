"""`sottovoce calibrate` and `schema` as a user meets them: exit codes, sentences, pipes."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
from statistics import NormalDist

import jsonschema
import pytest

from sottovoce.schedules.calibrate import calibrate, format_table
from support import ROOT
from support.command_line import run_command as sottovoce

pytestmark = pytest.mark.slow  # left out of the editing loop


SETTING = [
    *("--epsilon", "20", "--delta", "1e-3", "--rounds", "200", "--clients", "50"),
    *("--samples", "800", "--clip", "5", "--learning-rate", "1"),
]


def test_json_is_one_object_that_keeps_its_schema():
    done = sottovoce("calibrate", "--json", *SETTING)
    assert (done.returncode, done.stderr) == (0, "")
    answer = json.loads(done.stdout)
    jsonschema.validate(answer, json.loads(sottovoce("schema", "calibrate").stdout))
    assert answer["mu"] == pytest.approx(4.05314816, rel=1e-8)
    assert answer["sensitivity"] == pytest.approx(0.0125)
    assert answer["participations"] == 200
    assert answer["paper"]["true_epsilon"] == pytest.approx(30.3, abs=0.05)
    assert answer["paper"]["true_delta"] == pytest.approx(0.116, abs=5e-4)
    assert answer["guarantee"]["epsilon"] == 20
    assert answer["request"]["per_round"] == 50


def test_the_table_shows_both_noises_and_the_guarantee():
    done = sottovoce("calibrate", *SETTING)
    assert (done.returncode, done.stderr) == (0, "")
    for figure in ("0.0436147", "0.0328533", "30.3175", "0.117", "replace-one", "too little noise"):
        assert figure in done.stdout


def test_the_page_on_epsilon_shows_what_is_printed_and_its_delta_is_well_below_one_in_n():
    text = (ROOT / "docs" / "how-to" / "choose-epsilon.md").read_text("utf-8")
    line, _, block = text.partition("$ sottovoce calibrate ")[2].partition("\n")
    shown = block.partition("\n…\n")[0]
    assert len(shown.splitlines()) > 10
    done = sottovoce("calibrate", *line.split())
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(shown)
    ask = json.loads(sottovoce("calibrate", "--json", *line.split()).stdout)["request"]
    assert ask["delta"] * ask["samples"] < 0.01


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--delta", "0.007"), "1 / 143 = 0.00699 for a client of 143 records"),
        (("--delta", "0.1", "--unit", "client"), "1 / 10 = 0.1 for 10 clients"),
        (("--delta", "0.09", "--unit", "client"), None),
        (("--delta", "0.0069"), None),
    ],
)
def test_a_delta_of_one_in_n_is_warned_of(words, said):
    done = sottovoce("calibrate", "--json", *words)
    codes = json.loads(done.stdout)["guarantee"]["not_covered"]
    assert done.returncode == 0
    assert ("loose-delta" in codes) == (said is not None)
    assert (said or "") in done.stderr
    assert done.stderr.count("should be below 1 / ") == (said is not None)


@pytest.mark.parametrize("epsilon", [0.7, 1.0, 3.0, 8.000001, 13.3])
def test_what_bounds_an_attacker_is_rounded_up(epsilon):
    answer = calibrate(epsilon=epsilon, delta=1.23456e-5)
    mu = (answer.mu, math.sqrt(answer.participations) * answer.sensitivity / answer.paper_sigma)
    text, normal = format_table(answer), NormalDist()
    found = [float(n) / 100 for n in re.findall(r"finds ([\d.]+)%", text)]
    area = [float(n) for n in re.search(r"AUC +([\d.]+) +([\d.]+)", text).groups()]
    for own, rate, curve in zip(mu, found, area, strict=True):
        assert 0 <= rate - normal.cdf(normal.inv_cdf(0.01) + own) <= 0.001
        assert 0 <= curve - normal.cdf(own / math.sqrt(2)) <= 0.0001
    assert "ε that holds at δ = 1.24e-05" in text
    assert float(re.search(r"δ that holds at ε = ([\d.]+)", text)[1]) >= epsilon


def test_defaults_are_the_embedded_plan():
    ask = calibrate().request
    assert (ask.epsilon, ask.delta, ask.rounds, ask.clients, ask.samples) == (8, 1e-5, 120, 10, 143)
    assert (ask.clip, ask.learning_rate, ask.unit, ask.calibration) == (1, 2, "record", "exact")


@pytest.mark.parametrize("calibration", ["exact", "zcdp", "paper"])
@pytest.mark.parametrize("per_round", [50, 30, 7])
@pytest.mark.parametrize("unit", ["record", "client"])
def test_numbers_belong_together(calibration, per_round, unit):
    answer = calibrate(
        epsilon=12, delta=1e-3, rounds=200, clients=50, samples=800, per_round=per_round,
        calibration=calibration, unit=unit,
    )  # fmt: skip
    assert answer.participations == math.ceil(per_round * 200 / 50)
    assert answer.mu_release == pytest.approx(answer.sensitivity / answer.sigma)
    assert answer.mu == pytest.approx(math.sqrt(answer.participations) * answer.mu_release)
    if calibration == "paper":
        assert answer.sigma == pytest.approx(answer.paper_sigma, rel=1e-11)
        assert answer.guarantee.budget.epsilon == answer.paper_true_epsilon
        assert "paper-calibration" in answer.guarantee.not_covered
    else:
        assert answer.guarantee.budget.epsilon == 12


BAD = [
    ("--epsilon", "0"),
    ("--epsilon", "-1"),
    ("--epsilon", "nan"),
    ("--epsilon", "inf"),
    ("--epsilon", "-inf"),
    ("--epsilon", "1e9"),
    ("--epsilon", "many"),
    ("--epsilon", ""),
    ("--delta", "0"),
    ("--delta", "1"),
    ("--delta", "1.5"),
    ("--delta", "-1e-5"),
    ("--delta", "nan"),
    ("--delta", "tiny"),
    ("--rounds", "0"),
    ("--rounds", "-5"),
    ("--rounds", "1.5"),
    ("--rounds", "ten"),
    ("--rounds", "99999999999999999999"),
    ("--clients", "0"),
    ("--clients", "x"),
    ("--per-round", "0"),
    ("--per-round", "11"),
    ("--per-round", "-1"),
    ("--samples", "0"),
    ("--samples", "-7"),
    ("--samples", "1e3"),
    ("--clip", "0"),
    ("--clip", "-1"),
    ("--clip", "nan"),
    ("--clip", "inf"),
    ("--clip", "1e300"),
    ("--learning-rate", "0"),
    ("--learning-rate", "inf"),
    ("--learning-rate", "nan"),
    ("--learning-rate", "fast"),
    ("--unit", "user"),
    ("--unit", ""),
    ("--calibration", "rdp"),
    ("--calibration", "Exact"),
]


@pytest.mark.parametrize(("option", "value"), BAD, ids=lambda text: text or "empty")
def test_nonsense_gets_one_sentence_and_exit_code_2(option, value):
    done = sottovoce("calibrate", option, value, "--json")
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert "Traceback" not in done.stderr
    assert option.strip("-").split("-")[0] in done.stderr
    assert value[:12] in done.stderr or float(value) == float(
        done.stderr.split("got ")[1].split(";")[0]
    )


@pytest.mark.parametrize(
    "arguments",
    [
        ["calibrat"],
        ["calibrate", "--epsilom", "3"],
        ["calibrate", "8"],
        ["calibrate", "--epsilon"],
        ["schema"],
        ["schema", "weather"],
    ],
)
def test_bad_commands_get_one_sentence(arguments):
    done = sottovoce(*arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("sottovoce: ")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("arguments", [["--help"], ["calibrate", "--help"], ["schema", "-h"]])
def test_help(arguments):
    done = sottovoce(*arguments)
    assert (done.returncode, done.stderr) == (0, "")
    assert "Usage:" in done.stdout
    if len(arguments) == 2:
        assert "Example" in done.stdout


def test_version_and_a_closed_pipe():
    assert sottovoce("--version").stdout.startswith("sottovoce 0.")
    command = f"{sys.executable} -W error -m sottovoce calibrate | head -1"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=900)
    assert done.stderr == ""


@pytest.mark.parametrize("arguments", [["schema", "plan"], ["calibrate", "--help"]])
def test_a_reader_that_has_left_is_no_failure(arguments):
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [sys.executable, "-m", "sottovoce", *arguments],
        stdout=writer, stderr=subprocess.PIPE, text=True, timeout=900,
    )  # fmt: skip
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, "")


def test_another_broken_pipe_is_one():
    code = (
        "import os, sys\n"
        "from sottovoce.cli import commands as cli\n"
        "def broken(**options):\n"
        "    reader, writer = os.pipe()\n"
        "    os.close(reader)\n"
        "    try:\n"
        "        os.write(writer, b'to another process')\n"
        "    except BrokenPipeError:\n"
        "        sys.exit(1)  # as typer does\n"
        "cli.app = broken\n"
        "cli.main()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=900)
    assert done.returncode == 1
    assert "the system refused: Broken pipe" in done.stderr


def test_advice_stands_in_the_json_and_on_the_terminal():
    done = sottovoce("calibrate", "--json", "--expect", "--epsilon", "500", "--samples", "3")
    answer = json.loads(done.stdout)
    jsonschema.validate(answer, json.loads(sottovoce("schema", "calibrate").stdout))
    assert len(answer["advice"]) == 2
    assert done.stderr.splitlines() == [f"warning: {line}" for line in answer["advice"]]
    assert answer["expected"]["majority"].keys() == {"digits", "acs", "adult"}
