"""The live page: tells how runs stand, reads no file twice, serves nobody without the address."""

from __future__ import annotations

import http.client
import importlib.util
import json
import math
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from sottovoce import calibrate
from sottovoce.data.files import hold_folder
from sottovoce.errors import InputError, RunError
from sottovoce.plan import Plan
from sottovoce.privacy.budget import format_claim
from sottovoce.privacy.tank import FULL, Tank
from sottovoce.reports import watch
from sottovoce.reports.charts import PlotLine, plot
from sottovoce.runs import checkpoint
from sottovoce.runs.record import Record
from sottovoce.schedules.base import Progress
from support.example_record import example

RECORD, _ = example(rounds=20, measured=True)


@pytest.fixture(autouse=True)
def _look_at_once(monkeypatch):
    monkeypatch.setattr(watch, "TICK", 0.0)


def write_run(folder: Path, *, record: dict | None = None, rounds: list | None = None) -> Path:
    """A run folder, its record the newest file."""
    folder.mkdir()
    lines = (RECORD if record is None else record)["rounds"] if rounds is None else rounds
    text = "".join(json.dumps(entry) + "\n" for entry in lines)
    (folder / "rounds.jsonl").write_text(text, "utf-8")
    if record is not None:
        (folder / "record.json").write_text(json.dumps(record), "utf-8")
        os.utime(folder / "rounds.jsonl", ns=(1, 1))
    return folder


def write_checkpoint(folder: Path, *, budgets: list, spent: list[float], **more):
    """A checkpoint after the rounds of the example, of clients that say or hide what is left."""
    clients = len(budgets)
    units = (np.array(spent) * FULL).astype(np.int64)
    zero = np.zeros(clients, dtype=np.int64)
    state = checkpoint.ServerState(
        progress=Progress(3, 20, (), 0),
        tank=Tank(np.ones(clients), units, zero, zero),
        asked=zero,
        turns=zero,
        rounds=(),
        sigma=(),
        mu2=(),
        initial=(2.3, 0.1, None),
        seconds=6.0,
    )
    members = [{"name": f"ward-{i}", "budget": budget} for i, budget in enumerate(budgets)]
    header = {"plan": RECORD["plan"], "seed": 1, "members": members, "not_covered": []} | more
    checkpoint.save(folder, state, {"w": np.zeros(3)}, header)


def statuses(folder: Path) -> dict[str, str]:
    return {run.name: run.status for run in watch.RunsFolder(folder).look()}


def test_a_run_that_goes_on_is_told_from_one_that_was_killed(tmp_path, monkeypatch):
    folder = write_run(tmp_path / "run")
    with hold_folder(folder):
        assert statuses(tmp_path) == {"run": "running"}
    assert statuses(tmp_path) == {"run": "killed"}
    monkeypatch.setattr(watch, "is_held", lambda folder: None)  # a system without locks
    assert statuses(tmp_path) == {"run": "unknown"}


@pytest.mark.parametrize("ended", ["finished", "interrupted", "failed"])
def test_a_record_says_how_its_run_ended_until_the_run_is_resumed(tmp_path, ended):
    folder = write_run(tmp_path / "run", record={**RECORD, "status": ended})
    assert statuses(tmp_path) == {"run": ended}
    os.utime(folder / "rounds.jsonl")  # as a run that is resumed writes it
    os.utime(folder / "record.json", ns=(1, 1))
    if ended != "finished":  # which cannot be resumed
        with hold_folder(folder):
            assert statuses(tmp_path) == {"run": "running"}
        assert statuses(tmp_path) == {"run": "killed"}


def test_a_page_follows_its_run_to_the_end(tmp_path):
    """Seen by one and the same reader, from the first round to the record."""
    folder = tmp_path / "run"
    with hold_folder(folder):
        write_run(tmp_path / "other")
        runs = watch.RunsFolder(tmp_path)
        assert [run.name for run in runs.look()] == ["other"]
        (folder / "rounds.jsonl").touch()
        assert {run.name: run.done for run in runs.look()}["run"] == 0
        with (folder / "rounds.jsonl").open("a") as file:
            for entry in RECORD["rounds"][:2]:
                file.write(json.dumps(entry) + "\n")
            file.write('{"t": 2, "hori')  # half a line is no round yet
        assert {run.name: run.done for run in runs.look()}["run"] == 2
        assert runs.read_whole("run").rounds[1]["t"] == 1
    assert {run.name: run.status for run in runs.look()}["run"] == "killed"
    (folder / "rounds.jsonl").unlink()
    (folder / "record.json").write_text(json.dumps(RECORD), "utf-8")
    found = {run.name: run for run in runs.look()}["run"]
    assert (found.status, found.done) == ("finished", len(RECORD["rounds"]))


def test_a_thousand_runs_are_read_once(tmp_path, monkeypatch):
    read = []
    plain = Record.read.__func__
    monkeypatch.setattr(
        Record, "read", classmethod(lambda cls, folder: read.append(folder) or plain(cls, folder))
    )
    short = {**RECORD, "rounds": RECORD["rounds"][:2]}
    for i in range(1000):
        write_run(tmp_path / f"run-{i:04}", record=short)
    runs = watch.RunsFolder(tmp_path)
    assert len(runs.look()) == len(read) == 1000
    version = runs.version
    assert len(runs.look()) == len(read) == 1000
    assert runs.version == version  # so that no page is rendered again
    os.utime(tmp_path / "run-0007" / "record.json")
    assert runs.look()[0].name == "run-0007"
    assert (len(read), runs.version) == (1001, version + 1)


def test_lines_of_a_growing_file_are_read_once(tmp_path, monkeypatch):
    parsed = []
    plain = watch._ROUND.validate_json

    class Counting:
        @staticmethod
        def validate_json(line: bytes) -> object:
            parsed.append(line)
            return plain(line)

    monkeypatch.setattr(watch, "_ROUND", Counting)
    folder = write_run(tmp_path / "run", rounds=RECORD["rounds"][:5])
    runs = watch.RunsFolder(tmp_path)
    with hold_folder(folder):
        runs.look()
        with (folder / "rounds.jsonl").open("a") as file:
            file.write(json.dumps(RECORD["rounds"][5]) + "\n")
        assert runs.look()[0].done == runs.read_whole("run").done == 6
        assert len(parsed) == 6
        fresh = tmp_path / "fresh"  # a resumed run writes the file anew, perhaps with fewer rounds
        fresh.write_text(json.dumps(RECORD["rounds"][0]) + "\n", "utf-8")
        fresh.replace(folder / "rounds.jsonl")
        assert runs.look()[0].done == 1


def test_a_damaged_run_spoils_no_other(tmp_path):
    write_run(tmp_path / "good", record=RECORD)
    write_run(tmp_path / "bad", record=RECORD)
    (tmp_path / "bad" / "record.json").write_text("{", "utf-8")
    write_run(tmp_path / "lines", rounds=["no round"])
    huge = json.loads(json.dumps(RECORD))
    huge["plan"]["rounds"]["window"] = 10**400
    write_run(tmp_path / "huge", record=huge)
    found = {run.name: run for run in watch.RunsFolder(tmp_path).look()}
    assert {name: run.status for name, run in found.items()} == {
        "good": "finished", "bad": "damaged", "lines": "damaged", "huge": "finished",
    }  # fmt: skip
    assert "damaged" in found["bad"].fault
    page = watch.WatchPages(tmp_path, "t")
    for name in found:
        assert name in page.render("run", {"name": [name]})
        assert name in page.render("compare", {})
    with pytest.raises(RunError, match="has no run"):
        page.render("run", {"name": ["../good"]})


@pytest.mark.parametrize(("inside", "named"), [("run", "."), ("run/audit", "..")])
def test_a_run_has_its_name_wherever_one_stands(tmp_path, monkeypatch, inside, named):
    write_run(tmp_path / "run", record=RECORD)
    (tmp_path / inside).mkdir(exist_ok=True)
    monkeypatch.chdir(tmp_path / inside)
    assert statuses(Path(named)) == {"run": "finished"}


def test_the_budget_left_is_that_of_clients_that_disclose_it(tmp_path):
    """A hidden budget stands in a checkpoint as a full one, which nobody may be told."""
    folder = write_run(tmp_path / "run", rounds=RECORD["rounds"][:3])
    write_checkpoint(folder, budgets=[{"epsilon": 8}, None, {"epsilon": 8}], spent=[0.4, 0.0, 0.7])
    (run,) = watch.RunsFolder(tmp_path).look()
    assert run.left == pytest.approx(0.3)
    assert run.epsilon == "–"  # the clients', not the plan's
    write_checkpoint(folder, budgets=[None, None], spent=[0.0, 0.0])
    (run,) = watch.RunsFolder(tmp_path).look()
    assert math.isnan(run.left)
    page = watch.WatchPages(tmp_path, "t").render("run", {"name": ["run"]})
    assert "– of the budget is left" in page
    assert "100.0" not in page


def test_clients_answer_or_are_silent(tmp_path):
    rounds = [
        {**RECORD["rounds"][0], "cohort": [0, 1, 2]},
        {**RECORD["rounds"][1], "cohort": [0], "asked": [0, 1, 2],
         "missing": {"ward-1": "silent", "ward-2": "floor"}},
    ]  # fmt: skip
    folder = write_run(tmp_path / "run", rounds=rounds)
    write_checkpoint(folder, budgets=[None] * 4, spent=[0.0] * 4)
    (folder / "federation.json").touch()
    runs = watch.RunsFolder(tmp_path)
    assert watch.show_run(runs, {"name": ["run"]})["clients"] == [
        ["ward-0", "2", "2", "answered in round 2"],
        ["ward-1", "2", "1", "silent in round 2"],
        ["ward-2", "2", "1", "floor in round 2"],
        ["ward-3", "0", "0", "not asked yet"],
    ]
    page = watch.WatchPages(tmp_path, "t").render("run", {"name": ["run"]})
    assert "ward-1: silent" in page
    assert "sottovoce federate --resume" in page


def test_the_command_that_continues_a_run_is_one_that_can(tmp_path):
    def read(plan, *, members=False, files=()):
        folder = write_run(tmp_path / f"run-{len([*tmp_path.iterdir()])}")
        more = {} if members else {"members": []}
        write_checkpoint(folder, budgets=[None], spent=[0.0], plan=plan, **more)
        for name in files:
            (folder / name).touch()
        return watch.show_run(watch.RunsFolder(tmp_path), {"name": [folder.name]})["resume"]

    plan = Plan().to_dict()
    arrays = {**plan, "data": {**plan["data"], "name": "arrays"}}
    assert read(plan).startswith("sottovoce train --resume --out ")
    assert read(arrays).startswith("sottovoce.resume('")
    assert read(plan, members=True, files=["federation.json"]).startswith("sottovoce federate --re")
    assert "resume=true" in read(plan, members=True)  # Flower between machines


def test_names_cannot_inject(tmp_path):
    name = "<img src=x onerror=alert(1)>&'\""
    record = json.loads(json.dumps(RECORD))
    record["plan"]["model"]["name"] = "<script>alert(2)</script>"
    record["result"]["headline"]["text"] = "<b>no</b>"
    write_run(tmp_path / name, record=record)
    page = watch.WatchPages(tmp_path, "t")
    for kind in watch.PAGES:
        for text in (
            page.render(kind, {"name": [name], "x": ["model.name"]}),
            json.dumps(page.render_regions(kind, {"name": [name], "x": ["model.name"]})),
        ):
            assert "<img" not in text
            assert "<b>no" not in text
            assert "<script>" not in text
            assert text.count("<script") <= 1


def test_regions_are_the_blocks_of_the_page(tmp_path):
    write_run(tmp_path / "run", record=RECORD)
    page = watch.WatchPages(tmp_path, "t")
    for kind in watch.PAGES:
        whole = page.render(kind, {"name": ["run"]})
        regions = page.render_regions(kind, {"name": ["run"]})
        assert len(regions) >= 2
        for name, html in regions.items():
            assert f'id="{name}"' in whole
            assert html in whole
        assert page.render_regions(kind, {"name": ["run"]}) is regions  # rendered once for all


def test_runs_are_compared_by_any_two_values(tmp_path):
    for epsilon in (2.0, 8.0):
        record, _ = example(rounds=20, measured=True, epsilon=epsilon)
        record["plan"]["privacy"]["epsilon"] = epsilon
        write_run(tmp_path / f"eps-{epsilon:g}", record=record)
    write_run(tmp_path / "killed")
    runs = watch.RunsFolder(tmp_path)
    shown = watch.show_comparison(runs, {})
    assert (shown["x"], shown["missing"]) == ("ε that holds", 1)
    assert [name for *_, name in shown["scatter"].shapes[0].points] == ["eps-8", "eps-2"]
    assert "privacy.epsilon" in shown["columns"]
    chosen = watch.show_comparison(
        runs, {"run": ["eps-2"], "x": ["model.name"], "y": ["privacy.epsilon"]}
    )
    assert [run.name for run in chosen["runs"]] == ["eps-2"]
    assert [text for _, text in chosen["scatter"].x_ticks] == [RECORD["plan"]["model"]["name"]]
    assert watch.show_comparison(runs, {"x": ["nonsense"]})["x"] == "ε that holds"


def test_no_horizon_is_below_the_rounds_done(tmp_path):
    """The schedule's rule is applied after the last round, too, and may then name fewer rounds."""
    record = json.loads(json.dumps({**RECORD, "rounds": RECORD["rounds"][:5]}))
    record["rounds"][-1] |= {"horizon": 5, "next_horizon": 4}
    write_run(tmp_path / "run", record=record)
    shown = watch.show_run(watch.RunsFolder(tmp_path), {"name": ["run"]})
    assert shown["title"] == "run: finished, round 5 of 5"
    assert shown["tiles"][0] == ("rounds done of at most 5", "5")
    assert "T 5" not in shown["events"][0]


def test_no_epsilon_is_shown_smaller_than_it_is(tmp_path):
    record = json.loads(json.dumps(RECORD))
    record["guarantee"]["epsilon"] = 25.3312
    record["plan"]["privacy"]["epsilon"] = 8.00004
    write_run(tmp_path / "over", record=record)
    folder = write_run(tmp_path / "killed")
    write_checkpoint(folder, budgets=[{}], spent=[0.1], plan=record["plan"], members=[])
    runs = watch.RunsFolder(tmp_path)
    assert {run.name: run.epsilon for run in runs.look()} == {"over": "25.34", "killed": "8.001"}
    ((_, cells),) = watch.show_comparison(runs, {"run": ["over"]})["rows"]
    assert cells[0] == "25.34"


def test_the_budget_page_has_the_numbers_of_calibrate(tmp_path):
    page = watch.WatchPages(tmp_path, "t")
    answer = calibrate(epsilon=3.0, rounds=50)
    shown = page.render("budget", {"epsilon": ["3"], "rounds": ["50"]})
    for number in (answer.sigma, answer.mu, answer.paper_sigma):
        assert format_claim(number) in shown
    for query, words in (
        ({"epsilon": ["-1"]}, "epsilon must be"),
        ({"rounds": ["1.5"]}, "rounds must be a whole number, got"),
        ({"unit": ["nobody"]}, "must be"),
        ({"epsilon": ["nan"]}, "epsilon must be"),
    ):
        assert words in page.render("budget", query)


def test_plots_survive_what_losses_can_be():
    drawn = plot("x", [PlotLine("", [0, 1, 2, 3], [1.0, math.nan, 1e300, 2.0])])
    assert drawn is not None
    assert drawn.shapes[0].path.count("M") == 2  # the gap is not bridged
    assert plot("x", [PlotLine("", [0], [math.inf])]) is None
    same = plot("x", [PlotLine("", [0, 1], [2.3744, 2.3744 * (1 + 1e-12)])])
    assert same is not None
    assert len({text for _, text in same.y_ticks}) == len(same.y_ticks)


# The server, as a process.


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """A folder with one run, and where `sottovoce watch` serves it."""
    folder = tmp_path_factory.mktemp("runs")
    (write_run(folder / "run", record=RECORD) / "report.html").write_text("<p>a report", "utf-8")
    command = [sys.executable, "-m", "sottovoce", "watch", str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        address = server.stdout.readline().strip()
        found = re.fullmatch(r"http://127\.0\.0\.1:(\d+)/([\w-]{32})/", address)
        assert found, address
        try:
            yield int(found[1]), found[2]
        finally:
            server.terminate()


def ask(port: int, path: str, **headers: str) -> tuple[int, str, dict[str, str]]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=900)
    connection.request("GET", path, headers=headers)
    answer = connection.getresponse()
    found = answer.status, answer.read().decode(), {k.lower(): v for k, v in answer.getheaders()}
    connection.close()
    return found


def test_only_the_whole_address_is_served(served):
    port, token = served
    assert ask(port, f"/{token}/")[0] == 200
    assert ask(port, f"/{token}/", Host=f"localhost:{port}")[0] == 200
    for host in ("evil.example", f"evil.example:{port}", "127.0.0.1", f"127.0.0.1:{port + 1}"):
        assert ask(port, f"/{token}/", Host=host)[0] == 403  # DNS rebinding
    wrong = token[:-1] + ("y" if token.endswith("x") else "x")
    for path in ("/", f"/{token[:-1]}/", f"/{wrong}/run/run", "/favicon.ico", f"//{token}/"):
        status, text, _ = ask(port, path)
        assert (status, token in text) == (404, False)
    for path in ("run/none", "run/..", "run/%2e%2e%2frun", "run/run/record.json", "../etc/passwd"):
        assert ask(port, f"/{token}/{path}")[0] == 404
    with pytest.raises(OSError, match="refused"), socket.socket() as other:
        other.connect(("127.0.0.2", port))  # on this one address


def test_pages_load_only_what_lies_beside_them(served):
    port, token = served
    for path in ("", "run/run", "compare", "budget"):
        status, text, headers = ask(port, f"/{token}/{path}")
        assert status == 200
        policy = headers["content-security-policy"]
        assert "default-src 'none'; script-src 'self'; style-src 'self'" in policy
        assert "unsafe" not in policy
        assert headers["referrer-policy"] == "no-referrer"
        assert not re.search(r"<style|\sstyle=|\son\w+=|://", text)
        assert re.findall(r'<(?:script|link)[^>]*(?:src|href)="([^"]+)"', text) == [
            "data:,", f"/{token}/watch.css", f"/{token}/watch.js",
        ]  # fmt: skip
    report = ask(port, f"/{token}/run/run/report.html")
    assert (report[0], report[1]) == (200, "<p>a report")
    assert "sandbox" in report[2]["content-security-policy"]


def test_events_bring_the_regions_first_and_then_what_changed(served):
    port, token = served
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=900)
    connection.request("GET", f"/{token}/events/budget?epsilon=3")
    answer = connection.getresponse()
    assert answer.getheader("content-type").startswith("text/event-stream")
    first = json.loads(answer.readline().removeprefix(b"data: "))
    assert format_claim(calibrate(epsilon=3.0).sigma) in first["live_answer"]
    assert [answer.readline() for _ in range(2)] == [b"\n", b":\n"]  # nothing changed
    connection.close()


def test_ctrl_c_ends_it_quietly(tmp_path):
    script = (
        "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); "
        "from sottovoce.cli.commands import main; main()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script, "watch", str(tmp_path)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as server:  # fmt: skip
        try:
            port, token = re.findall(r"[\w-]+", server.stdout.readline())[-2:]
            connection = http.client.HTTPConnection("127.0.0.1", int(port), timeout=900)
            connection.request("GET", f"/{token}/events/")  # a browser that follows the runs
            connection.getresponse().readline()
            server.send_signal(signal.SIGINT)
            assert (server.wait(900), server.stderr.read()) == (0, "")
            connection.close()
        finally:
            server.kill()


def test_bad_input_is_refused_in_one_sentence(tmp_path, monkeypatch):
    with pytest.raises(InputError, match="RUNS must be a folder"):
        watch.serve(tmp_path / "none")
    with pytest.raises(InputError, match="port must be a whole number from 0 to 65535"):
        watch.serve(tmp_path, 70000)
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        with pytest.raises(InputError, match=r"port must be a port that is free, got .* in use"):
            watch.serve(tmp_path, other.getsockname()[1])
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(InputError, match=re.escape("pip install '.[watch]'")):
        watch.serve(tmp_path)
