"""pytest's side of `make mutants`: likely killers first, and an end at the first kill.

A failure is a kill if an assertion of the test itself failed (not one of the package, no crash) in
a file that states privacy properties. Other failures are noted and the tests go on: a golden number
that moved or an error says nothing about what a client was promised.

The environment names the mutated module (MUTANT_MODULE) and the file to write to (MUTANT_TOLD).
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest

from mutants.privacy_mutants import MUTANTS
from support import TESTS

# What these files hold against the package are promises to a client, and the noise they rest on;
# so do those that a mutant names its killer in.
NAMED = {m.killer.partition("::")[0].removeprefix("tests/") for m in MUTANTS if "::" in m.killer}
PRIVACY = NAMED | frozenset(
    [
        "client/test_node.py", "client/test_release.py", "client/vault/test_witness_identity.py",
        "client/vault/test_vault.py", "crash/test_device.py", "models/test_features.py",
        "mutants/test_privacy_mutants.py", "privacy/test_budget.py", "privacy/test_calibration.py",
        "privacy/test_tank_filter.py", "privacy/test_sensitivity.py", "privacy/test_tank.py",
        "schedules/test_pricing_cohort.py", "schedules/test_pricing.py",
        "simulation/test_compiled.py",
        "statistics/test_discrete_gaussian.py", "studies/audit/test_attacks.py",
        "studies/audit/test_messages.py",
    ]
)  # fmt: skip


def within(file: Path) -> str:
    """Return the path below the folder of the tests."""
    return file.relative_to(TESTS).as_posix() if TESTS in file.parents else ""


def rank(file: Path, module: str) -> tuple[bool, int, str]:
    """Which files come first: those of privacy, named like the module, that import it."""
    text, name = file.read_text("utf-8"), module.rpartition(".")[2]
    room = module.partition(".")[0]
    if name in within(file):
        near = 0
    elif room in within(file) or re.search(
        rf"sottovoce\.{re.escape(module)}\b|import .*\b{name}\b", text
    ):
        near = 1
    else:
        near = 2 if f"sottovoce.{room}" in text else 3
    path = within(file)
    return path not in PRIVACY, near, path


def is_kill(call: pytest.CallInfo[None], file: str) -> bool:
    """Whether this failure is an assertion of a test that states a privacy property."""
    if call.excinfo is None or within(Path(file)) not in PRIVACY:
        return False
    errors: list[BaseException] = [call.excinfo.value]
    while errors:
        error = errors.pop()
        if isinstance(error, BaseExceptionGroup):  # hypothesis found several at once
            errors.extend(error.exceptions)
        elif isinstance(error, AssertionError | pytest.fail.Exception):
            trace = error.__traceback__
            while trace is not None and trace.tb_next is not None:
                trace = trace.tb_next
            where = "" if trace is None else trace.tb_frame.f_code.co_filename
            asked = isinstance(error, pytest.fail.Exception)  # pytest.raises: nothing was refused
            if asked or (TESTS in Path(where).parents and where != __file__):
                return True
    return False


class Hunt:
    """Orders the tests, counts them, and writes down what became of the mutant."""

    def __init__(self, module: str, told: Path) -> None:
        self.module, self.told = module, told
        self.ran, self.total = 0, 0
        self.killer, self.noticed = "", list[str]()

    def write(self) -> None:
        """What is known so far, for who waits outside."""
        part = self.told.with_suffix(".part")
        part.write_text(json.dumps({key: getattr(self, key) for key in
                                    ("ran", "total", "killer", "noticed")}), "utf-8")  # fmt: skip
        part.replace(self.told)

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Likely killers first."""
        order = {path: rank(path, self.module) for path in {item.path for item in items}}
        items.sort(key=lambda item: order[item.path])  # stable: a file keeps its own order

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """How much there is to do."""
        self.total = len(session.items)
        self.write()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item, call):
        """After every test: a kill ends the hunt."""
        report = yield
        if report.when == "call" or (report.when == "setup" and not report.passed):
            self.ran += 1
        if report.failed:
            if report.when == "call" and is_kill(call, str(item.path)):
                self.killer = item.nodeid
                item.session.shouldstop = "killed"
            else:
                self.noticed.append(item.nodeid)
        self.write()
        return report


def pytest_configure(config: pytest.Config) -> None:
    """Begin the hunt."""
    told = os.environ.get("MUTANT_TOLD")
    if told:
        config.pluginmanager.register(Hunt(os.environ["MUTANT_MODULE"], Path(told)), "hunt")
