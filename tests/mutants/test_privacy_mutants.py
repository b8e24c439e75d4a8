"""Every deliberate privacy bug is noticed by the property named for it; the code as it is has all.

A kill counts if the mutated package still trains with finite loss and the killer's own assertion
fails. Here one bug is played for each property, which shows that the property can fail, and all are
held against today's source; `make mutants` plays them all, and asks the whole quick suite where the
named test does not notice.
"""

from __future__ import annotations

import ast
import builtins
import importlib
import os
import shutil
import subprocess
import sys

import pytest

from mutants import privacy_killers
from mutants.privacy_mutants import MUTANTS, PACKAGE, Mutant, Nursery, trial
from support import ROOT, TESTS

slow = pytest.mark.slow  # a process each; left out of the editing loop


@slow
@pytest.mark.parametrize("killer", privacy_killers.KILLERS, ids=lambda killer: killer.__name__)
def test_the_package_as_it_is_keeps(killer):
    killer()


@slow
def test_the_package_as_it_is_trains_and_every_mutated_module_with_it():
    """Training loads nothing that is called beside it: a mutant there need not show it again."""
    modules = sorted({mutant.module for mutant in MUTANTS}, reverse=True)
    code = (
        "import sys; from mutants import privacy_killers as own\n"
        "assert own.trains('simulation.compiled')\n"
        "names = [n[10:] for n in sys.modules if n.startswith('sottovoce.')]\n"
        "loaded = [name for name in names if name.startswith(own.BESIDE)]\n"
        "assert not loaded, loaded\n"
        f"assert all(map(own.trains, {modules}))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=TESTS,
                          capture_output=True, text=True, timeout=900,
                          env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)})  # fmt: skip
    assert done.returncode == 0, done.stderr


ONE_EACH = {mutant.killer: mutant for mutant in reversed(MUTANTS) if "::" not in mutant.killer}


def test_every_bug_fits_the_package_as_it_is():
    """It is there once, and what stands instead names nothing that the module does not have."""
    for mutant in MUTANTS:
        path = PACKAGE.joinpath(*mutant.module.split(".")).with_suffix(".py")
        nodes = list(ast.walk(ast.parse(mutant.mutated(path.read_text("utf-8")))))
        known = {*vars(builtins), *vars(importlib.import_module(f"sottovoce.{mutant.module}"))}
        known |= {node.arg for node in nodes if isinstance(node, ast.arg)}
        known |= {getattr(node, "asname", None) or getattr(node, "name", "") for node in nodes}
        named = [node for node in nodes if isinstance(node, ast.Name)]
        known |= {node.id for node in named if isinstance(node.ctx, ast.Store)}
        assert {node.id for node in named} <= known, mutant.name


@pytest.fixture(scope="module")
def nursery():
    with Nursery() as it:
        yield it


@slow
@pytest.mark.parametrize("mutant", ONE_EACH.values(), ids=lambda mutant: mutant.name)
def test_a_bug_is_noticed(mutant, nursery):
    if "power_cut" in mutant.killer and not any(map(shutil.which, ("cc", "gcc", "clang"))):
        pytest.skip("power cuts are recorded by a shim, and there is no C compiler")
    became, said = trial(mutant, [mutant.killer], nursery)
    assert became == "killed", said


def test_there_are_enough_of_them_and_each_is_one_of_a_kind():
    assert len(MUTANTS) > 200  # as README and docs/audit.md say
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)
    named = {mutant.killer for mutant in MUTANTS}
    tests = {name for name in named if "::" in name}
    assert named - tests <= {killer.__name__ for killer in privacy_killers.KILLERS}
    for name in tests:
        file, _, test = name.partition("::")
        assert f"def {test}(" in (ROOT / file).read_text("utf-8")


@slow
def test_a_harmless_change_is_no_kill(nursery):
    """The harness does not count what breaks nothing, nor what only crashes."""
    same = Mutant(
        "comment", "client.release", "", (("_MINT = object()", "_MINT = object()  # mint"),)
    )
    assert (
        trial(same, ["only_release_makes_uploads", "heads_say_nothing_private"], nursery)[0]
        == "survived"
    )
    dead = Mutant("crash", "client.release", "", (("_MINT = object()", "_MINT = 1 / 0"),))
    assert trial(dead, ["only_release_makes_uploads"], nursery)[0] == "idle"
    test = "tests/hostile/test_uploads.py::test_every_step_of_an_upload_is_paid_for"
    assert trial(same, [test], nursery)[0] == "survived"
    broken = Mutant(
        "no account",
        "server.checks",
        "",
        (("ratios = [", "raise ArithmeticError\n    ratios = ["),),
    )
    assert (
        trial(broken, [test], nursery)[0] == "idle"
    )  # it trains; the test stops, and asserts nothing


@slow
def test_a_bug_that_stops_the_simulator_is_no_kill(nursery):
    """Half the noise, which its killer would notice, in a simulator that trains no network."""
    half = next(m for m in MUTANTS if m.name == "simulated noise of half the σ")
    told = 'if type(model).__name__ == "Mlp":\n        raise ArithmeticError\n    return _stepped('
    start = "def _take_one_step("
    stops = (start, f"{start}model, *rest):\n    {told}model, *rest)\n\n\ndef _stepped(")
    assert (
        trial(Mutant("stops", half.module, "", (*half.changes, stops)), [half.killer], nursery)[0]
        == "idle"
    )
