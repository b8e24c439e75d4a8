"""The benchmarks: the reference is right, a wrong peer is not timed, the page is the data."""

from __future__ import annotations

import ast
import dataclasses
import doctest
import re
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from sottovoce.learning import models
from sottovoce.learning.clipping import clipped_sum

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks" / "peers"))

import environments
import peer_process
import peer_table
import reference
import roster
import side_by_side
import work

ROOT = Path(__file__).resolve().parent.parent
PEERS = ROOT / "benchmarks" / "peers"
SMALL = {
    "mlp": work.SHAPES["tiny"],
    "cnn": work.Shape("cnn", 3, 5, 4, 6 * 5 * 2, 3, channels=2, picture=(6, 5, 2)),
    "svm": work.Shape("svm", 3, 20, 10, 7, 2, kappa=0.1),
}
OURS = {
    "mlp": models.Mlp(12, 8, 3),
    "cnn": models.Cnn((6, 5, 2), 2, 3),
    "svm": models.Svm(7, 0.1),
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
        return peer_process.check(running, made, expected)
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
    assert found["wall_s"] > 0
    assert found["cpu_s"] > 0
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


def test_a_peer_that_draws_too_little_noise_is_not_timed(tmp_path):
    made = prepared("mlp")
    expected, _ = reference.clipped_mean(made, made.x, made.y, made.clip)
    work.save(made, tmp_path / "work.npz")
    running = peer_process.Running(named("numpy"), tmp_path / "work.npz", 1, tmp_path)
    try:
        # 131 numbers: six standard errors are 37 %, so half the noise is found out
        with pytest.raises(peer_process.Unfit, match=r"its noise is 0\.[456]"):
            peer_process.check(running, dataclasses.replace(made, std=2 * made.std), expected)
    finally:
        running.stop()


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
    assert len(files) == 5
    for file in files:
        for line in file.read_text("utf-8").splitlines():
            assert re.fullmatch(r"[a-z-]+(\[[a-z]+\])?==[0-9][0-9.]*", line), f"{file.name}: {line}"
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
    "machine": {"cpu": "a processor", "cores": 2, "load": 0.1},
    "shape": dataclasses.asdict(work.SHAPES["tiny"]),
    "gflop": 12.0,
    "mb": 3.0,
    "rates": {"numpy_gflops": 100.0, "xla_gflops": 80.0, "copy_gbs": 10.0},
    "floor_s": 0.12,
    "rows": [
        {
            "peer": "slow",
            "label": "slow",
            "versions": {"jax": "1.2", "jaxlib": "1.2"},
            "wall_s": [2.0, 1.0, 6.0],
            "cpu_s": [3.0, 2.0, 7.0],
            "peak_mb": 1234.4,
            "error": 2.2e-7,
        },
        {
            "peer": "ours",
            "label": "sottovoce",
            "versions": {"jax": "1.3"},
            "wall_s": [0.25],
            "cpu_s": [0.5],
            "peak_mb": 300.0,
            "error": 1e-7,
        },
        {"peer": "gone", "label": "gone", "why": "No matching distribution"},
    ],
}


def test_the_table_is_what_was_measured():
    head, line, first, second, third = peer_table.markdown(RUN).splitlines()
    assert head.count("|") == line.count("|") == first.count("|") == third.count("|")
    assert (
        first
        == "| sottovoce (jax 1.3) | 0.25 | 0.25–0.25 (1) | 0.5 | 1.00 | 1.00 | 2.08 | 300 | 1e-07 |"
    )
    assert (
        second
        == "| slow (jax 1.2) | 2.00 | 1.00–6.00 (3) | 3.00 | 8.00 | 6.00 | 16.7 | 1,234 | 2e-07 |"
    )
    assert third.startswith("| gone | not timed: No matching distribution |")
    assert "12.0 GFLOP" in peer_table.heading(RUN)
    assert "the floor is 0.12 s" in peer_table.heading(RUN)
    assert "load 0.1 when it began" in peer_table.heading(RUN)


def test_a_row_that_joins_later_is_compared_with_its_own_rotation():
    late = {"peer": "slow", "label": "slow", "versions": {"jax": "1.2"}, "wall_s": [9.0]}
    late |= {"cpu_s": [4.0], "peak_mb": 1.0, "error": 0.0}
    ours = RUN["rows"][1] | {"wall_s": [3.0], "cpu_s": [1.0]}
    second = RUN | {"rows": [ours, late], "floor_s": 1.5}
    run = side_by_side.joined(RUN, second)
    assert [row["peer"] for row in run["rows"]] == ["ours", "gone", "slow"]
    assert "| 9.00 | 9.00–9.00 (1) | 4.00 | 3.00 | 4.00 | 6.00 |" in peer_table.markdown(run)


@pytest.mark.parametrize("module", [work, peer_table, peer_process])
def test_the_examples_of_the_harness_are_true(module):
    found = doctest.testmod(module)
    assert found.attempted > 0
    assert found.failed == 0
