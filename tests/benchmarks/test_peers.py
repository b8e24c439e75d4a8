"""The benchmarks: the reference is right, a wrong peer is not timed, the page is the data."""

from __future__ import annotations

import ast
import dataclasses
import doctest
import json
import re
import subprocess
import sys
import textwrap
import time
import types
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from sottovoce.models.clipping import clipped_sum
from sottovoce.models.cnn import Cnn
from sottovoce.models.mlp import Mlp
from sottovoce.models.svm import Svm
from support import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))
sys.path.insert(0, str(ROOT / "benchmarks" / "peers"))

import environments
import foreign
import kept
import noise_check
import peer_process
import peer_table
import protocol
import reference
import roster
import rotation
import side_by_side
import sizes
import work

PEERS = ROOT / "benchmarks" / "peers"
SMALL = {
    "mlp": work.SHAPES["tiny"],
    "cnn": work.Shape("cnn", 3, 5, 4, 6 * 5 * 2, 3, channels=2, picture=(6, 5, 2)),
    "svm": work.Shape("svm", 3, 20, 10, 7, 2, kappa=0.1),
}
OURS = {
    "mlp": Mlp(12, 8, 3),
    "cnn": Cnn((6, 5, 2), 2, 3),
    "svm": Svm(7, 0.1),
}


def prepared(name: str) -> work.Work:
    made = work.make(SMALL[name])
    _, norms = reference.clipped_mean(made, made.x, made.y, float("inf"))
    return dataclasses.replace(made, clip=float(np.median(norms)))


@pytest.mark.slow
@pytest.mark.parametrize("name", SMALL)
def test_the_reference_is_our_clipped_sum(name):
    made = prepared(name)
    found, norms = reference.clipped_mean(made, made.x, made.y, made.clip)
    assert (norms > made.clip).any()
    assert (norms <= made.clip).any()
    weight = jnp.full(len(made.x), 1 / len(made.x))
    params = {key: jnp.asarray(array) for key, array in made.params.items()}
    ours = clipped_sum(OURS[name], params, made.x, jnp.asarray(made.y), weight, made.clip)
    for key, array in found.items():
        np.testing.assert_allclose(ours[key], array, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", SMALL)
def test_the_reference_is_the_gradient_of_its_own_losses(name):
    """Central differences of the losses, one row: what `clipped_mean` adds up is their gradient."""
    made = prepared(name)
    params = {key: array.astype(np.float64) for key, array in made.params.items()}
    x, y = made.x[:1].astype(np.float64), made.y[:1]
    found, _ = reference.clipped_mean(made, x, y, float("inf"))

    def loss() -> float:
        scores, _, _ = reference.scores(made.shape, params, x)
        return float(reference.losses(made.shape, params, scores, y)[0])

    random = np.random.default_rng(0)
    for key, array in params.items():
        for _ in range(5):
            place = tuple(int(random.integers(size)) for size in array.shape)
            kept = array[place]
            params[key][place] = kept + 1e-6
            above = loss()
            params[key][place] = kept - 1e-6
            below = loss()
            params[key][place] = kept
            assert found[key][place] == pytest.approx((above - below) / 2e-6, abs=1e-6)


def test_a_whole_update_is_cut_client_by_client():
    made = prepared("mlp")
    made = dataclasses.replace(made, clip=made.clip / 5)
    total = {key: np.zeros(array.shape) for key, array in made.params.items()}
    lengths = []
    for i in range(made.shape.clients):
        mean, _ = reference.clipped_mean(made, *made.client(i), float("inf"))
        lengths.append(sum(np.sum(array**2) for array in mean.values()) ** 0.5)
        for key, array in mean.items():
            total[key] += array * min(1, made.clip / lengths[-1]) / made.shape.clients
    assert max(lengths) > made.clip
    for key, array in reference.by_update(made).items():
        np.testing.assert_allclose(array, total[key], rtol=1e-12)


def test_what_is_written_is_read_back(tmp_path):
    made = prepared("cnn")
    work.save(made, tmp_path / "work.npz")
    again = work.load(tmp_path / "work.npz")
    assert again.shape == made.shape
    assert (again.clip, again.rate, again.std) == (made.clip, made.rate, made.std)
    np.testing.assert_array_equal(again.x, made.x)
    assert {key: value.shape for key, value in again.params.items()} == made.shape.parameters()


def play(peer: roster.Peer, made: work.Work, folder: Path, expected: work.Arrays) -> dict:
    work.save(made, folder / "work.npz")
    running = peer_process.Running(peer, folder / "work.npz", 1, folder)
    try:
        found, noise = peer_process.check(running, made, expected)
        told = peer_process.turn(running, made, noise, 0.0, folder / "out.npz")
        return found | told | {"noise": noise.ratios()}
    finally:
        running.stop()
        assert running.process.poll() is not None


def named(key: str) -> roster.Peer:
    return next(peer for peer in roster.ROSTER if peer.key == key)


def test_a_peer_is_asked_checked_and_stopped(tmp_path):
    made = prepared("mlp")
    expected, _ = reference.clipped_mean(made, made.x, made.y, made.clip)
    found = play(named("numpy"), made, tmp_path, expected)
    assert found["error"] < 1e-5
    assert len(found["wall_s"]) == 1
    assert min(found["wall_s"]) > 0
    assert found["cpu_s"] > 0
    assert set(found["noise"]) == {"w1", "b1", "w2", "b2"}
    assert found["peak_mb"] > 10


@pytest.mark.slow
@pytest.mark.parametrize("name", SMALL)
def test_ours_is_right_by_the_harness(name, tmp_path):
    made = prepared(name)
    expected, _ = reference.clipped_mean(made, made.x, made.y, made.clip)
    assert play(named("ours"), made, tmp_path, expected)["error"] < 1e-5


def test_a_peer_that_clips_something_else_is_not_timed(tmp_path):
    made = prepared("mlp")
    unclipped, _ = reference.clipped_mean(made, made.x, made.y, float("inf"))
    with pytest.raises(peer_process.Unfit, match="its average is off by"):
        play(named("numpy"), made, tmp_path, unclipped)


#: Peers with one fault each, made of the numpy one: what is done with a round's weights.
FAULTS = {
    "b2 has no noise": (
        """
        quiet = play(0.0).params
        return Outcome(dict(found.params, b2=quiet["b2"]), found.loss, found.accuracy)
        """,
        "its noise in b2 is 0.000 times",
    ),
    "w2 has twice the noise": (
        """
        quiet = play(0.0).params["w2"]
        return Outcome(dict(found.params, w2=2 * found.params["w2"] - quiet), *found[1:])
        """,
        r"its noise in w2 is [12]\.[0-9]+ times",
    ),
    "all rounds have the noise of the first": (
        """
        kept.append(found)
        return kept[0]
        """,
        "two rounds gave the same w1",
    ),
}


def faulty(fault: str, folder: Path) -> roster.Peer:
    """The numpy peer with this done in rounds with noise."""
    body = textwrap.indent(textwrap.dedent(FAULTS[fault][0]).strip(), " " * 8)
    lines = [
        "import sys",
        f"sys.path.insert(0, {str(PEERS)!r})",
        "import numpy_blas",
        "from protocol import Outcome, serve",
        "kept = []",
        "def build(work):",
        "    play = numpy_blas.build(work)",
        "    def wrong(std):",
        "        found = play(std)",
        "        if std == 0:",
        "            return found",
        body,
        "    return wrong",
        "serve(build, 'numpy')",
    ]
    (folder / "faulty.py").write_text("\n".join(lines))
    return roster.Peer("faulty", fault, str(folder / "faulty"))


@pytest.mark.parametrize("fault", FAULTS)
def test_a_peer_without_the_right_noise_in_every_array_is_not_timed(fault, tmp_path):
    """Twice the noise in w2 (24 numbers) is 6 errors off with 18 numbers; it has 3 rounds of 24."""
    made = prepared("mlp")
    expected, _ = reference.clipped_mean(made, made.x, made.y, made.clip)
    with pytest.raises(noise_check.Unfit, match=FAULTS[fault][1]):
        play(faulty(fault, tmp_path), made, tmp_path, expected)


def rounds(random: np.random.Generator, silent: work.Arrays, count: int) -> work.Arrays:
    return {
        key: array + random.standard_normal((count, *array.shape)) for key, array in silent.items()
    }


def test_noise_is_judged_array_by_array_and_over_all_rounds():
    """A false alarm has 3 arrays × 60 looks × 10⁻⁷."""
    silent = {"w": np.zeros((40, 5)), "v": np.zeros(9), "b": np.zeros(())}
    seen = noise_check.Noise(silent, 1.0)
    random = np.random.default_rng(1)
    with pytest.raises(noise_check.Unfit, match="0 numbers of noise in w are too few"):
        seen.ratios()
    for _ in range(23):
        seen.look(rounds(random, silent, 1))
    assert not seen.is_enough()
    assert seen.is_enough(after=1)
    with pytest.raises(noise_check.Unfit, match="23 numbers of noise in b are too few"):
        seen.ratios()
    seen.look(rounds(random, silent, 30))
    assert seen.is_enough()
    assert all(0.4 < ratio < 1.6 for ratio in seen.ratios().values())
    # one scalar without noise among thousands that have it
    lacking = noise_check.Noise(silent, 1.0)
    with pytest.raises(noise_check.Unfit, match=r"its noise in b is 0\.000 times"):
        lacking.look(rounds(random, silent, 30) | {"b": np.zeros(30)})
    # the same answer in the next turn
    last = rounds(random, silent, 2)
    seen.look(last)
    with pytest.raises(noise_check.Unfit, match="two rounds gave the same w"):
        seen.look({key: array[-1:] for key, array in last.items()})


class Scripted:
    """A peer of the rotation in this process: its rounds take what they are said to take."""

    def __init__(self, made: work.Work, seconds: float, *, stuck_after: int = 10**9) -> None:
        self.made, self.seconds, self.left = made, seconds, stuck_after
        self.random, self.asked, self.last = np.random.default_rng(2), 0, None

    def ask(self, line: str) -> dict:
        _, _, out = line.split(" ")
        self.asked += 1
        self.left -= 1
        if self.left >= 0:
            self.last = {
                key: array + self.made.std * self.random.standard_normal((4, *array.shape))
                for key, array in self.made.params.items()
            }
        np.savez(out, **self.last)
        return {"wall_s": [self.seconds] * 4, "cpu_s": self.seconds, "peak_mb": 1.0}


def test_everyone_has_three_turns_ours_all_of_them_and_whoever_sticks_is_taken_out():
    made = prepared("mlp")
    peers = {
        "ours": Scripted(made, 9.0),
        "fast": Scripted(made, 0.1),
        "slow": Scripted(made, 45.0),
        "stuck": Scripted(made, 0.1, stuck_after=2),
    }
    entries = []
    for key, peer in peers.items():
        row = {"peer": key, "label": key, "wall_s": [], "cpu_s": [], "rounds": []}
        noise = noise_check.Noise(made.params, made.std)
        entries.append(rotation.Entry(row, peer, noise))
    floor, rates = types.SimpleNamespace(ask=lambda _: {"copy_gbs": 1.0}), []
    rotation.rotate(entries, floor, rates, made, rotation.Turns())
    for entry in entries:
        rotation.judge(entry)
    assert [peer.asked for peer in peers.values()] == [5, 5, 3, 3]
    assert len(rates) == 5
    ours, fast, slow, stuck = (entry.row for entry in entries)
    assert (len(ours["wall_s"]), len(fast["wall_s"]), slow["wall_s"]) == (5, 5, [45.0] * 3)
    assert fast["rounds"] == [4] * 5
    assert set(slow["noise"]) == set(made.params)
    assert "wall_s" not in stuck
    assert "the same w1" in stuck["why"]


def test_looking_through_processes_is_not_charged_to_a_round(tmp_path, monkeypatch):
    """Both clocks stand still while the harness adds up the processes below a peer."""

    def slowly() -> float:
        end = time.process_time() + 0.05
        while time.process_time() < end:
            pass
        return 0.0

    monkeypatch.setattr(protocol, "cpu_seconds_below", slowly)
    told = protocol.turn(
        lambda std: protocol.Outcome({"w": np.zeros(3)}, 0.0, 0.0),
        1.0,
        0.0,
        str(tmp_path / "o.npz"),
    )
    assert max(told["wall_s"]) < 0.03
    assert told["cpu_s"] < 0.03


def test_cpu_time_of_our_own_processes_is_not_that_of_others():
    before = foreign.mark()
    burn = "import time\nwhile time.process_time() < 0.5: pass"
    subprocess.run([sys.executable, "-c", burn], check=True)
    after = foreign.mark()
    assert after.ours - before.ours >= 0.45
    assert 0 <= foreign.share(before, after) <= 1


def test_a_measurement_says_what_it_was_made_from(tmp_path):
    found = kept.source()
    assert set(found) in ({"sottovoce"}, {"sottovoce", "commit", "changed"})
    assert kept.command([str(tmp_path / "a.py"), "--out", "x y"]) == "python a.py --out 'x y'"
    kept.keep("one", ("numpy",), {"a": 1}, minutes=0.5, file=tmp_path / "cpu.json")
    told = json.loads((tmp_path / "cpu.json").read_text())["one"]
    assert told["minutes"] == 0.5
    assert set(told) >= {"command", "date", "machine", "source", "versions", "found"}
    assert str(ROOT) not in (tmp_path / "cpu.json").read_text()


def test_every_size_that_is_used_is_the_fastest_that_was_tried():
    """Within a tenth: sizes that are closer than the machine's own spread cannot be told apart."""
    for peer, by_model in sizes.USED.items():
        for model, used in by_model.items():
            assert used in sizes.TRIED[peer][model]
    measured = json.loads((ROOT / "results" / "bench" / "tuning.json").read_text("utf-8"))["runs"]
    assert {run["work"] for run in measured} == {"mlp", "cnn", "svm"}
    for run in measured:
        assert set(run["peers"]) == set(sizes.TRIED)
        for peer, own in run["peers"].items():
            by_size = own["seconds"]
            assert set(by_size) == set(sizes.TRIED[peer][run["work"]])
            fastest = min(took for took in by_size.values() if not isinstance(took, str))
            assert by_size[sizes.USED[peer][run["work"]]] <= 1.1 * fastest


def test_a_peer_that_is_left_out_is_one_of_the_roster_and_has_a_reason():
    for (name, threads, key), why in roster.LEFT_OUT.items():
        assert name in work.SHAPES
        assert threads > 1  # one thread has everyone
        assert key in {peer.key for peer in roster.ROSTER} - {"ours"}
        assert len(why) > 10


def test_a_peer_that_breaks_says_why(tmp_path):
    made = prepared("mlp")
    work.save(made, tmp_path / "work.npz")
    (tmp_path / "broken.npz").write_bytes((tmp_path / "work.npz").read_bytes()[:100])
    with pytest.raises(peer_process.Unfit, match="it ended: "):
        peer_process.Running(named("numpy"), tmp_path / "broken.npz", 1, tmp_path)


@pytest.mark.parametrize("peer", [*roster.ROSTER, roster.FLOOR], ids=lambda peer: peer.key)
def test_every_peer_has_a_script_that_speaks_the_protocol(peer):
    tree = ast.parse((PEERS / f"{peer.script}.py").read_text("utf-8"))
    imported = {
        alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module == "protocol"
        for alias in node.names
    }
    assert imported & {"serve", "converse", "given"}
    if peer.environment is not None:
        assert (PEERS / f"{peer.environment}.txt").exists()


def test_requirements_are_pinned_and_name_no_address():
    files = list(PEERS.glob("*.txt"))
    assert len(files) == 7
    for file in files:
        for line in file.read_text("utf-8").splitlines():
            assert re.fullmatch(r"[a-z0-9-]+(\[[a-z]+\])?==[0-9][0-9.]*", line), (
                f"{file.name}: {line}"
            )
    for file in PEERS.glob("*.txt"):
        if "torch" in file.read_text("utf-8"):
            assert "torch==2.13.0\n" in file.read_text("utf-8")


def test_an_environment_that_cannot_be_made_says_why(tmp_path, monkeypatch):
    said = "ERROR: one\nERROR: No matching distribution found for opacus==1.6.0\n"
    monkeypatch.setattr(environments, "FOLDER", tmp_path)
    monkeypatch.setattr(environments.venv, "create", lambda *_, **__: None)
    monkeypatch.setattr(
        environments.subprocess,
        "run",
        lambda *_, **__: subprocess.CompletedProcess([], 1, "", said),
    )
    with pytest.raises(environments.NotInstallable, match=r"^No matching .* opacus==1\.6\.0$"):
        environments.python_of("opacus")


RUN = {
    "work": "tiny",
    "threads": 2,
    "date": "2026-01-02",
    "machine": {"cpu": "a processor", "cores": 2},
    "foreign": 0.021,
    "shape": dataclasses.asdict(work.SHAPES["tiny"]),
    "gflop": 12.0,
    "mb": 3.0,
    "rates": {"numpy_gflops": 100.0, "xla_gflops": 80.0, "copy_gbs": 10.0},
    "floor_s": 0.12,
    "rows": [
        {
            "peer": "slow",
            "label": "slow",
            "clips": "samples",
            "versions": {"jax": "1.2", "jaxlib": "1.2"},
            "wall_s": [2.0, 1.0, 6.0],
            "cpu_s": [3.0, 2.0, 7.0],
            "peak_mb": 1234.4,
            "error": 2.2e-7,
        },
        {
            "peer": "ours",
            "label": "sottovoce",
            "clips": "samples",
            "versions": {"jax": "1.3"},
            "wall_s": [0.25],
            "cpu_s": [0.5],
            "peak_mb": 300.0,
            "error": 1e-7,
        },
        {
            "peer": "empty",
            "label": "empty",
            "clips": "nothing",
            "versions": {"flwr": "1.0"},
            "wall_s": [0.1],
            "cpu_s": [],
        },
        {"peer": "gone", "label": "gone", "why": "No matching distribution"},
    ],
}


def test_the_table_is_what_was_measured():
    head, line, first, second, empty, third = peer_table.markdown(RUN).splitlines()
    assert head.count("|") == line.count("|") == first.count("|") == third.count("|")
    assert (
        first
        == "| sottovoce (jax 1.3) | 0.25 | 0.25–0.25 (1) | 0.5 | 1.00 | 1.00 | 2.08 | 300 | 1e-07 |"
    )
    assert (
        second
        == "| slow (jax 1.2) | 2.00 | 1.00–6.00 (3) | 3.00 | 8.00 | 6.00 | 16.7 | 1,234 | 2e-07 |"
    )
    # what computes nothing is not sorted in and has no ratio to work that was done
    assert empty == "| empty (flwr 1.0) | 0.1 | 0.1–0.1 (1) | – | – | – | – | – | – |"
    assert third.startswith("| gone | not timed: No matching distribution |")
    assert "12.0 GFLOP" in peer_table.heading(RUN)
    assert "the floor is 0.12 s" in peer_table.heading(RUN)
    assert "others used 2.1 % of the CPU time" in peer_table.heading(RUN)


def test_a_row_that_joins_later_is_compared_with_its_own_rotation():
    late = {
        "peer": "slow",
        "label": "slow",
        "clips": "samples",
        "versions": {"jax": "1.2"},
        "wall_s": [9.0],
    }
    late |= {"cpu_s": [4.0], "peak_mb": 1.0, "error": 0.0}
    ours = RUN["rows"][1] | {"wall_s": [3.0], "cpu_s": [1.0]}
    second = RUN | {"rows": [ours, late], "floor_s": 1.5}
    run = side_by_side.joined(RUN, second)
    assert [row["peer"] for row in run["rows"]] == ["ours", "empty", "gone", "slow"]
    assert "| 9.00 | 9.00–9.00 (1) | 4.00 | 3.00 | 4.00 | 6.00 |" in peer_table.markdown(run)


@pytest.mark.parametrize("module", [work, peer_table, peer_process, rotation, sizes, kept, foreign])
def test_the_examples_of_the_harness_are_true(module):
    found = doctest.testmod(module)
    assert found.attempted > 0
    assert found.failed == 0
