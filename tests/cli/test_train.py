"""`sottovoce train` and its companions as a user meets them: streams, folders, and processes
that are interrupted or killed."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from sottovoce.cli.train import IN_SIMULATION_ONLY, SECURE, _describe_run, train
from sottovoce.data import datasets
from sottovoce.plan import Plan
from sottovoce.plan.data import DATASETS
from sottovoce.plan.sections import ModelSection
from sottovoce.reports import progress, run
from sottovoce.reports.progress import SIMULATED
from sottovoce.simulation.simulate import simulate
from support.command_line import run_command as sottovoce

pytestmark = pytest.mark.slow  # left out of the editing loop

COMMAND = [sys.executable, "-m", "sottovoce"]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The default plan with a seed, run once."""
    top = tmp_path_factory.mktemp("cli")
    done = sottovoce("train", "--seed", 3, "--out", top / "run")
    assert (done.returncode, done.stderr) == (0, "")
    return top / "run", done.stdout


def test_train_shows_rounds_result_guarantee_and_files(finished):
    folder, shown = finished
    record = json.loads((folder / "record.json").read_text())
    lines = shown.splitlines()
    assert lines[0] == SIMULATED
    rounds = [line for line in lines if line.startswith("round ")]
    assert len(rounds) == record["result"]["rounds_used"] <= 120
    found = record["result"]["forecast"]
    assert f"forecast: T = {found['rounds']}, steps × {found['step']:g}" in shown
    assert f"test accuracy {record['result']['test_accuracy']:.1%}" in shown
    assert f"{record['result']['rounds_used']} rounds of at most 120" in shown
    assert "on test rows: a running average of the iterates (0.9); in the rounds, on valid" in shown
    assert "(8, 1e-05)-differentially private" in shown
    assert str(folder / "report.html") in shown
    assert {path.name for path in folder.iterdir()} == {
        "record.json", "model.npz", "trace.npz", "splits.npz", "rounds.jsonl", "report.html",
    }  # fmt: skip


def test_without_validation_rows_the_rounds_are_said_to_be_of_test_rows(tmp_path):
    words = ("data.validation=0", "rounds.schedule=fixed", "rounds.rounds=1")
    settings = (word for setting in words for word in ("--set", setting))
    done = sottovoce("train", *settings, "--quiet", "--out", tmp_path / "run")
    assert "in the rounds, on test rows, too: the newest iterate" in done.stdout


def test_what_no_client_would_take_part_in_is_not_called_a_forecast_of_a_deployment():
    assert _describe_run(Plan()) == SIMULATED
    assert _describe_run(Plan(noise="secure")) == SECURE
    for setting, cause in (
        ("privacy.calibration=paper", "the paper's noise is too little"),
        ("server.signal=raw", "nobody pays for raw losses"),
        ("local.clip=median", "nobody pays for the median of raw norms"),
    ):
        assert _describe_run(Plan().replace(setting)) == IN_SIMULATION_ONLY.format(cause)
    said = _describe_run(Plan(data={"path": "x.npz", "clients": 4}))
    assert 'classes are counted on the rows: list them, as y = ["a", "b"]' in said
    assert "paper" not in said


def test_an_option_that_is_a_key_of_the_plan_is_answered_with_set():
    for command, option, said in (
        ("train", "--epsilon", "no such option --epsilon: write --set privacy.epsilon=…; see "),
        ("rehearse", "--per-round", "write --set rounds.per_round=…; see "),
        ("train", "--colour", "No such option: --colour"),
        ("predict", "--epsilon", "No such option: --epsilon"),
    ):
        done = sottovoce(command, option, "4")
        assert done.returncode == 2
        assert said in done.stderr


def write_table(folder, label="yes"):
    rows = "".join(f"{i % 90},{'no' if i % 3 else label}\n" for i in range(300))
    (folder / "people.csv").write_text("age,ill\n" + rows)
    (folder / "plan.toml").write_text(
        '[data]\npath = "people.csv"\nlabel = "ill"\nclients = 2\n[data.columns]\n'
        'age = [0, 90]\nill = ["no", "yes"]\n[rounds]\nrounds = 2\n'
    )


def test_a_refusal_says_nothing_of_the_run_before(tmp_path):
    """Neither that it is a simulation, nor a traceback; a label's case is hinted at."""
    write_table(tmp_path, label="YES")
    done = sottovoce("train", "plan.toml", "--out", "run", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    hint = "row 1 ('YES') (did you mean 'yes'? upper and lower case differ); correct or remove"
    assert hint in done.stderr
    write_table(tmp_path)
    done = sottovoce(
        "train", "plan.toml", "--out", "run", "--set", "privacy.epsilon=[1,2,3]", cwd=tmp_path
    )
    assert (done.returncode, done.stdout) == (2, "")
    done = sottovoce("train", "plan.toml", "--out", "run", "--seed", 1, cwd=tmp_path)
    assert done.stdout.splitlines()[0] == SIMULATED


@pytest.mark.parametrize("option", [("--out", "taken"), ("--log", "paper")])
def test_a_bad_option_is_refused_before_a_table_is_read(tmp_path, monkeypatch, option):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "notes.txt").write_text("mine")
    (tmp_path / "plan.toml").write_text('[data]\npath = "none.csv"\nlabel = "y"\ninfer = true\n')
    done = sottovoce("train", "plan.toml", *option)
    assert done.returncode == 2
    assert option[0].strip("-") in done.stderr
    assert "none.csv" not in done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["plan.toml", "taken"]


def test_a_large_table_is_announced(tmp_path, monkeypatch):
    write_table(tmp_path)
    monkeypatch.setattr(progress, "LARGE", 1000)
    for words in (("check", "plan.toml"), ("train", "plan.toml", "--out", "run")):
        assert "reading people.csv (0 MiB) …" in sottovoce(*words, cwd=tmp_path).stderr
    quiet = sottovoce("train", "plan.toml", "--out", "other", "--quiet", cwd=tmp_path)
    assert "reading" not in quiet.stderr


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ("custom(init, apply, loss)", "(TypeError in line 5 of net.py: dot_general requires"),
        ("custom(init, loss, apply)", "does not fit rows of 64 numbers, scores and labels"),
        ("custom(init, lambda w, x: x[:, :10, None], lambda s, y: s[:, 0, 0])", "got (20,)"),
    ],
)
def test_a_model_of_the_wrong_shape_is_refused_in_one_sentence(tmp_path, model, said):
    code = (
        "import jax.numpy as jnp\nfrom sottovoce import custom\n"
        "def init(key): return jnp.zeros((10, 10))\n"
        "def loss(scores, y): return scores[:, 0]\ndef apply(w, x): return x @ w\n"
        f"model = {model}\n"
    )
    (tmp_path / "net.py").write_text(code)
    (tmp_path / "plan.toml").write_text('[model]\nname = "custom"\nown = "net.py:model"\n')
    done = sottovoce("train", "plan.toml", "--out", "run", cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    assert said in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_json_is_one_object_on_stdout_and_progress_on_stderr(tmp_path):
    done = sottovoce(
        "train", "--json", "--seed", 3, "--out", tmp_path / "run", "--set", "rounds.rounds=3"
    )
    assert done.returncode == 0
    record = json.loads(done.stdout)
    assert record["result"]["rounds_used"] == 3
    assert done.stderr.count("round ") == 3
    # What a promise is worth is said before its first round.
    words = ["--set", "rounds.rounds=1", "--set", "privacy.delta=0.01", "--out", tmp_path / "loose"]
    command = [*COMMAND, "train", "--json", *map(str, words)]
    loose = subprocess.run(command, capture_output=True, text=True, check=True)
    lines = loose.stderr.splitlines()
    (sentence,) = json.loads(loose.stdout)["advice"]
    first = next(i for i, line in enumerate(lines) if line.startswith("round 1 "))
    assert lines.count(f"warning: {sentence}") == 1
    assert lines.index(f"warning: {sentence}") < first
    assert json.loads((tmp_path / "run" / "record.json").read_text()) == record


def test_quiet_shows_no_rounds_and_the_default_folder_is_new_each_time(tmp_path):
    for count in (1, 2):
        done = sottovoce("train", "--quiet", "--set", "rounds.rounds=1", cwd=tmp_path)
        assert (done.returncode, done.stderr) == (0, "")
        assert "round 1" not in done.stdout
        assert done.stdout.startswith(SIMULATED)
        assert "files  runs/digits-" in done.stdout
        assert len(list((tmp_path / "runs").iterdir())) == count


def test_predict_and_report(finished, tmp_path):
    folder, _ = finished
    digits = datasets.load("digits")
    rows = digits.train_x[:50]
    np.save(tmp_path / "x.npy", rows)
    np.savez(tmp_path / "x.npz", x=rows)
    np.savetxt(tmp_path / "x.csv", rows, delimiter=",")
    answers = [
        sottovoce("predict", folder, tmp_path / f"x.{kind}") for kind in ("npy", "npz", "csv")
    ]
    classes = [int(line) for line in answers[0].stdout.split()]
    assert np.mean(np.array(classes) == digits.train_y[:50]) > 0.6
    assert answers[0].stdout == answers[1].stdout == answers[2].stdout
    as_json = sottovoce("predict", folder, tmp_path / "x.npy", "--json")
    assert json.loads(as_json.stdout) == {"predictions": classes}
    page = (folder / "report.html").read_text()
    assert sottovoce("report", folder).returncode == 0
    assert (folder / "report.html").read_text() == page


def test_init_names_a_command_that_takes_what_it_wrote(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert sottovoce("init").stdout.endswith("then run: sottovoce train plan.toml\n")
    Path("people.csv").write_text("age,ill\n1,no\n")
    said = sottovoce("init", "--from", "people.csv", "people.toml").stdout
    assert said.endswith("then run: sottovoce check people.toml, and train\n")


def test_init_writes_a_plan_that_is_the_default(tmp_path):
    done = sottovoce("init", cwd=tmp_path)
    assert done.returncode == 0
    assert Plan.load(tmp_path / "plan.toml") == Plan.load()
    again = sottovoce("init", cwd=tmp_path)
    assert again.returncode == 2
    assert "plan.toml" in again.stderr


@pytest.mark.parametrize("name", ["plan", "record", "calibrate"])
def test_schemas(name):
    done = sottovoce("schema", name)
    assert json.loads(done.stdout)["$schema"].startswith("https://json-schema.org/")


BAD = {
    "typo": ["--set", "rounds.betta=0.9"],
    "value": ["--set", "privacy.epsilon=-4"],
    "no value": ["--set", "privacy.epsilon"],
    "name": ["--set", "model.name=mpl"],
    "no file": ["nowhere.toml"],
    "seed": ["--seed", "-1"],
    "seed text": ["--seed", "x"],
    "resume alone": ["--resume"],
    "resume and set": ["--resume", "--out", "x", "--set", "rounds.rounds=3"],
    "arrays": ["--set", "data.name=arrays"],
    "K > U": ["--set", "rounds.per_round=11"],
    "two plans": ["a.toml", "b.toml"],
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_sentence_and_leaves_nothing(tmp_path, name):
    done = sottovoce("train", *BAD[name], cwd=tmp_path)
    assert done.returncode == 2
    last = done.stderr.strip().splitlines()
    assert len(last) == 1
    assert last[0].startswith("sottovoce: ")
    assert "Traceback" not in done.stderr
    assert list(tmp_path.rglob("record.json")) == []
    assert not (tmp_path / "runs").exists()


def test_other_refusals(tmp_path, finished):
    folder, _ = finished
    full = sottovoce("train", "--out", folder)
    assert full.returncode == 2
    assert "out must be a new or empty folder" in full.stderr
    assert sottovoce("train", "--resume", "--out", folder).returncode == 1
    assert sottovoce("predict", folder, "nothing.npy").returncode == 2
    assert sottovoce("predict", folder, "record.json").returncode == 2
    assert sottovoce("predict", tmp_path, "nothing.npy").returncode == 2
    assert sottovoce("report", tmp_path).returncode == 1
    (tmp_path / "odd.csv").write_text("1,2\n3\n")
    odd = sottovoce("predict", folder, tmp_path / "odd.csv")
    assert odd.returncode == 1
    assert odd.stderr.count("\n") == 1
    assert sottovoce("data", "fetch", "nonsense").returncode == 2


def begun(folder: Path, rounds: int, *arguments: str) -> subprocess.Popen[str]:
    """Start a run and hold it after some rounds: its output goes to a pipe that is then full."""
    process = subprocess.Popen(
        [*COMMAND, "train", "--out", str(folder), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        pipesize=4096,  # bytes: some 60 rounds after the last one that was read it waits
    )
    log = folder / "rounds.jsonl"
    while not log.exists() or log.read_text().count("\n") < rounds:
        if not process.stdout.readline():
            _, said = process.communicate()
            pytest.fail(f"the run did not get to round {rounds}: {said}")
    return process


LONG = ["--seed", "7", "--set", "rounds.rounds=800", "--set", "rounds.schedule=fixed"]


def test_interrupted_leaves_a_valid_record_and_says_how_to_go_on(tmp_path):
    """In a folder whose name a shell would take apart: the command can be pasted as it is."""
    folder = tmp_path / "it's a run"
    process = begun(folder, 5, *LONG)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=900)
    assert process.returncode == 130
    command = said.partition("go on with: ")[2].splitlines()[0]
    assert shlex.split(command) == ["sottovoce", "train", "--resume", "--out", str(folder)]
    assert "Traceback" not in said
    record = json.loads((folder / "record.json").read_text())
    assert record["status"] == "interrupted"
    assert 5 <= record["result"]["rounds_used"] < 800
    assert (folder / "report.html").exists()


def test_interrupted_after_its_last_round_it_says_how_to_see_the_page(
    tmp_path, monkeypatch, capsys
):
    drawn = []

    def draw(folder):
        drawn.append(folder)
        if len(drawn) == 1:
            raise KeyboardInterrupt

    monkeypatch.setattr(run, "write_report", draw)
    folder = tmp_path / "a run"
    with pytest.raises(KeyboardInterrupt):
        train(None, ["rounds.rounds=1", "rounds.schedule=fixed"], out=folder, quiet=True)
    said = capsys.readouterr().err
    assert f"has ended, `sottovoce report '{folder}'` draws its page" in said
    assert "--resume" not in said
    assert json.loads((folder / "record.json").read_text())["status"] == "finished"


@pytest.mark.parametrize("delay", [0.0, pytest.param(1.5, marks=pytest.mark.trust), 3.0])
def test_interrupted_while_it_starts_or_compiles_it_ends_in_order(tmp_path, delay):
    """No crash, no traceback: code 130, and either nothing was written or it can go on."""
    process = subprocess.Popen(
        [*COMMAND, "train", "--out", str(tmp_path / "run"), *LONG],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        pipesize=4096,
        env={k: v for k, v in os.environ.items() if k != "JAX_COMPILATION_CACHE_DIR"}
        | {"SOTTOVOCE_CACHE": "off"},
    )
    process.stdout.readline()  # the first word: from here on Ctrl-C is minded
    # Its output is not read, so that it cannot come to its end before Ctrl-C does.
    time.sleep(delay)
    for _ in range(2):  # people press it twice
        process.send_signal(signal.SIGINT)
        time.sleep(0.2)
    _, said = process.communicate(timeout=900)
    assert process.returncode == 130
    assert "Traceback" not in said
    if (tmp_path / "run").exists():
        record = json.loads((tmp_path / "run" / "record.json").read_text())
        assert record["status"] == "interrupted"
        assert (tmp_path / "run" / "checkpoint.npz").exists()


def test_ctrl_c_once_more_while_the_interpreter_closes_is_no_crash():
    """Python takes its handlers down before its modules: from there on SIGINT used to kill."""
    late = """if 1:
        import os, signal, sys
        from sottovoce.cli import commands as cli

        class Late:
            def __del__(self, kill=os.kill, pid=os.getpid(), number=signal.SIGINT):
                kill(pid, number)

        @cli.app.command()
        def late():
            raise KeyboardInterrupt

        kept, sys.argv = Late(), ["sottovoce", "late"]
        cli.main()
        """
    done = subprocess.run([sys.executable, "-c", late], capture_output=True, text=True, timeout=900)
    assert done.returncode == 130
    assert done.stderr == "sottovoce: interrupted\n"


def test_a_reader_that_leaves_does_not_stop_the_run(tmp_path):
    command = f"{sys.executable} -m sottovoce train --seed 1 --out {tmp_path / 'run'} | head -2"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=900)
    assert done.stderr == ""
    end = time.monotonic() + 900
    while not (tmp_path / "run" / "report.html").exists() and time.monotonic() < end:
        time.sleep(0.1)
    record = json.loads((tmp_path / "run" / "record.json").read_text())
    assert record["status"] == "finished"


def test_what_cannot_be_run_leaves_no_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("SOTTOVOCE_DATA", str(tmp_path))
    done = sottovoce("train", "--set", "data.name=mnist", "--out", tmp_path / "run")
    assert done.returncode == 1
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_killed_at_random_rounds_it_resumes_to_the_same_model(tmp_path):
    whole = sottovoce("train", "--quiet", *LONG, "--out", tmp_path / "whole")
    assert whole.returncode == 0
    wanted = json.loads((tmp_path / "whole" / "record.json").read_text())["result"]
    rng = np.random.default_rng(1)
    first = begun(tmp_path / "run", int(rng.integers(1, 300)), *LONG)
    os.kill(first.pid, signal.SIGKILL)
    first.communicate()
    assert not (tmp_path / "run" / "record.json").exists()
    for _ in range(2):  # and killed again on its way
        target = int(rng.integers(310, 700))
        again = begun(tmp_path / "run", target, "--resume")
        os.kill(again.pid, signal.SIGKILL)
        again.communicate()
    done = sottovoce("train", "--resume", "--quiet", "--out", tmp_path / "run")
    assert done.returncode == 0, done.stderr
    record = json.loads((tmp_path / "run" / "record.json").read_text())
    assert record["result"] == wanted
    lines = (tmp_path / "run" / "rounds.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == record["rounds"]


def test_a_cnn_divides_its_rows_alike_on_any_number_of_cores(tmp_path):
    """The model's last bits depend on the number of devices, and not on that of the cores."""
    plan = ["--set", "model.name=cnn", "--set", "rounds.schedule=fixed", "--set", "rounds.rounds=2"]
    digests = set()
    for cores in (1, None):
        here = sorted(os.sched_getaffinity(0))[:cores]
        limit = f"import os; os.sched_setaffinity(0, {here}); import sottovoce.cli as c; c.main()"
        words = ["train", *plan, "--seed", "3", "--quiet", "--out", str(tmp_path / str(cores))]
        command = [sys.executable, "-c", limit, *words]
        subprocess.run(command, check=True, timeout=900, stdout=subprocess.DEVNULL)
        record = json.loads((tmp_path / str(cores) / "record.json").read_text())
        assert record["ran_on"].startswith("4 × ")
        digests.add(record["result"]["model_sha256"])
    assert len(digests) == 1


def test_a_cnn_that_began_on_one_device_goes_on_with_one(tmp_path):
    """Resumed, a run ends in the model that it would have had without the interruption."""
    how = {"data": {"name": "digits"}, "model": {"name": "cnn"}}
    plan = Plan(**how, rounds={"schedule": "fixed", "rounds": 3})

    def stop(done):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        simulate(plan, seed=3, out=tmp_path / "run", on_round=stop)
    command = [*COMMAND, "train", "--resume", "--quiet", "--out", str(tmp_path / "run")]
    subprocess.run(command, check=True, timeout=900, stdout=subprocess.DEVNULL)
    record = json.loads((tmp_path / "run" / "record.json").read_text())
    whole = simulate(plan, seed=3).record
    assert record["ran_on"] == whole["ran_on"]
    assert record["result"]["model_sha256"] == whole["result"]["model_sha256"]


def test_plans_name_the_datasets_and_model_options_that_there_are():
    assert set(DATASETS) == {*datasets.DATASETS, "arrays"}
    for name, own in datasets.DATASETS.items():
        assert DATASETS[name].classes == own.classes
    from sottovoce.models.base import MODELS, find_model

    for name in MODELS:
        section = ModelSection(name=name, **({"norm": 4.0} if name == "least-squares" else {}))
        assert all(getattr(section, option.name) is not None for option in find_model(name).options)
