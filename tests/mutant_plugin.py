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

HERE = Path(__file__).parent
# What these files hold against the package are promises to a client, and the noise they rest on.
PRIVACY = frozenset(
    f"test_{name}.py" for name in (
        "audit_attacks", "audit_messages", "budget", "calibration", "cohort", "coordinator",
        "device", "device_crash", "discrete_gaussian", "features", "filter", "flower_messages",
        "gaussian", "grid", "guarantee", "hostile_clients", "hostile_requests", "hostile_uploads",
        "learning_clipping", "ledger", "node", "noise_secure", "price", "privacy_mutants",
        "promises", "release", "round", "secure_run", "sensitivity", "server_worker", "table_nodes",
        "tables", "tank", "vault", "vault_crash", "vault_identity", "worker",
    )
)  # fmt: skip


def rank(file: Path, module: str) -> tuple[bool, int, str]:
    """Which files come first: those of privacy, named like the module, that import it."""
    text, name = file.read_text("utf-8"), module.rpartition(".")[2]
    room = module.partition(".")[0]
    if name in file.stem:
        near = 0
    elif room in file.stem or re.search(
        rf"sottovoce\.{re.escape(module)}\b|import .*\b{name}\b", text
    ):
        near = 1
    else:
        near = 2 if f"sottovoce.{room}" in text else 3
    return file.name not in PRIVACY, near, file.name


def is_kill(call: pytest.CallInfo[None], file: str) -> bool:
    """Whether this failure is an assertion of a test that states a privacy property."""
    if call.excinfo is None or Path(file).name not in PRIVACY:
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
            if asked or (Path(where).parent == HERE and Path(where) != Path(__file__)):
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
