"""Everything an audit measured, as plain data: rows of a table, contradictions, one sentence."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from sottovoce._version import __version__
from sottovoce.audit.canaries import OneRun
from sottovoce.audit.ceiling import CONFIDENCE, between, guess
from sottovoce.audit.inversion import Reconstructions
from sottovoce.audit.membership import OFTEN, SELDOM, Attack
from sottovoce.audit.messages import Measured
from sottovoce.audit.target import Target
from sottovoce.audit.traps import Loot
from sottovoce.audit.uploads import Level
from sottovoce.privacy import gaussian

SCHEMA = "sottovoce.audit/1"


@dataclass(frozen=True)
class Cell:
    """A measured rate with what any attacker can reach, and whether it contradicts that."""

    value: float
    ceiling: float | None = None
    exceeds: bool = False


@dataclass(frozen=True)
class Row:
    """One attack by one measure, at every level."""

    attack: str
    measure: str
    cells: Mapping[Level, Cell]
    share: bool = True  # a share of 1, printed in per cent


@dataclass(frozen=True, eq=False)
class Findings:
    """What was measured; what it says is computed from it."""

    target: Target
    quick: bool
    levels: Sequence[Level]
    measured: Sequence[Measured]  # at the levels, through the plan's own calibration
    headline: Sequence[Measured]  # ours and the paper's at ε = 20, δ = 1e-3
    one_runs: Sequence[OneRun]
    inverted: Sequence[Reconstructions]
    matched: Sequence[Reconstructions]
    looted: Sequence[Loot]
    members: Sequence[Attack]
    seconds: float

    @property
    def paper(self) -> Measured:
        """The audit of Theorem 1's noise."""
        return next(m for m in self.headline if m.setting.calibration == "paper")

    def rows(self) -> list[Row]:
        """The table of attacks."""
        return [*self._pictures(), *self._traps(), *self._membership()]

    def _pictures(self) -> list[Row]:
        rows = []
        for name, found in (
            ("first-layer inversion, one sample", self.inverted),
            (f"gradient matching, {self._together} samples", self.matched),
        ):
            if not found:
                continue
            first = found[0]
            odds = first.candidates / first.tries
            named = {one.level: _counted(one.names, odds, one.level) for one in found}
            tries = f", {first.tries} tries" if first.tries > 1 else ""
            rows.append(Row(name, f"recognised among {first.candidates}{tries}", named))
            errors = {one.level: Cell(one.error) for one in found}
            rows.append(Row(name, "mean squared error", errors, share=False))
        classes, truth = self.target.form.classes, self.inverted[0].truth
        # Whoever always names the most common label is as often right as it is common.
        odds = len(truth) / int(np.bincount(truth).max())
        labels = {one.level: _counted(one.labels, odds, one.level) for one in self.inverted}
        return [*rows, Row("label from the last bias", f"right, of {classes}", labels)]

    @property
    def _together(self) -> int:
        return self.matched[0].tries if self.matched else 0

    def _traps(self) -> list[Row]:
        cells = {}
        for one in self.looted:
            most = one.level.ceiling(1 / one.rates.negatives)
            cells[one.level] = Cell(one.rates.tpr, most, one.rates.exceeds(one.level.mu))
        n = self.looted[0].rates.positives
        return [Row("trap weights (dishonest server)", f"of {n} samples, exact", cells)]

    def _membership(self) -> list[Row]:
        rows = []
        for name in dict.fromkeys(attack.name for attack in self.members):
            own = [attack for attack in self.members if attack.name == name]
            for fpr in (OFTEN, SELDOM):
                if own[0].at(fpr).negatives * fpr < 1:
                    continue  # too few to see so rare an alarm
                cells = {}
                for attack in own:
                    rates, level = attack.at(fpr), attack.level
                    over = level.epsilon is not None and rates.exceeds(level.mu)
                    _, most = between(rates.alarms, rates.negatives)
                    cells[level] = Cell(rates.tpr, level.ceiling(min(most, 0.5)), over)
                rows.append(Row(name, f"found at {100 * fpr:g} % false alarms", cells))
            areas = {a.level: Cell(a.auc, a.auc_ceiling, a.exceeds) for a in own}
            rows.append(Row(name, "AUC", areas, share=False))
        return rows

    def contradictions(self) -> list[str]:
        """What refutes the promise, one sentence each; empty if nothing does."""
        found = []
        for one in self.measured:
            if one.contradicts:
                found.append(
                    f"uploads at ε = {one.setting.epsilon:g} prove μ ≥ {one.mu[0]:.3f}, "
                    f"and at most {one.setting.promised:.3f} was promised"
                )
        for run in self.one_runs:
            if run.contradicts:
                found.append(
                    f"one run at ε = {run.setting.epsilon:g} has {run.right} of {run.guesses} "
                    "coins guessed right, more than it may"
                )
        for row in self.rows():
            for level, cell in row.cells.items():
                if cell.exceeds:
                    found.append(
                        f"{row.attack} at {level.name}: {row.measure} {cell.value:.3g}, "
                        f"and no attacker should exceed {cell.ceiling:.3g}"
                    )
        return found

    def verdict(self) -> str:
        """One sentence."""
        against = self.contradictions()
        if against:
            more = f" ({len(against)} contradictions in all)" if len(against) > 1 else ""
            return f"The promise is contradicted: {against[0]}{more}."
        rates = sum(
            cell.ceiling is not None and level.epsilon is not None
            for row in self.rows()
            for level, cell in row.cells.items()
        )
        own = min(self.measured, key=lambda m: abs(m.setting.epsilon - self.target.epsilon))
        return (
            f"Nothing measured contradicts the promise: {rates} rates of attacks are under their "
            f"ceilings, and uploads at ε = {own.setting.epsilon:g} prove μ ≥ {own.mu[0]:.2f} where "
            f"{own.setting.promised:.2f} is allowed."
        )

    def judgement(self) -> str:
        """What the audit says of the paper's calibration, in one sentence."""
        paper = self.paper
        low, _ = paper.epsilon
        true = float(gaussian.epsilon(paper.setting.delta, paper.true))
        proves = "proves" if paper.contradicts else "is compatible with"
        return (
            f"Theorem 1 of the paper claims ε = {paper.setting.epsilon:g} at δ = "
            f"{paper.setting.delta:g}; the same audit of its noise measures μ ≥ "
            f"{paper.mu[0]:.2f} (true: {paper.true:.2f}), which {proves} "
            f"ε ≥ {low:.1f} (true: {true:.1f})."
        )

    def to_json(self) -> dict[str, Any]:
        """As `audit.json` holds it."""
        return {
            "schema": SCHEMA,
            "version": __version__,
            "target": self.target.name,
            "own_model": self.target.own,
            "quick": self.quick,
            "confidence": CONFIDENCE,
            "seconds": round(self.seconds, 1),
            "verdict": self.verdict(),
            "judgement": self.judgement(),
            "contradictions": self.contradictions(),
            "attacks": [
                {
                    "attack": row.attack,
                    "measure": row.measure,
                    "levels": [
                        {
                            "epsilon": level.epsilon,
                            "value": _plain(cell.value),
                            "ceiling": cell.ceiling,
                            "exceeds": cell.exceeds,
                        }
                        for level, cell in row.cells.items()
                    ],
                }
                for row in self.rows()
            ],
            "messages": [_message(one) for one in (*self.measured, *self.headline)],
            "one_run": [
                {
                    "epsilon": run.setting.epsilon,
                    "delta": run.setting.delta,
                    "canaries": run.canaries,
                    "guesses": run.guesses,
                    "right": run.right,
                    "epsilon_free": run.epsilon,
                    "mu_gaussian": run.mu,
                    "epsilon_gaussian": run.gaussian_epsilon,
                    "contradicts": run.contradicts,
                }
                for run in self.one_runs
            ],
        }


def _message(one: Measured) -> dict[str, Any]:
    return {
        "calibration": one.setting.calibration,
        "epsilon": one.setting.epsilon,
        "delta": one.setting.delta,
        "messages": one.messages * one.setting.rounds,
        "mu_promised": one.setting.promised,
        "mu_true": one.true,
        "mu": [_plain(value) for value in one.mu],
        "epsilon_gaussian": [_plain(value) for value in one.epsilon],
        "epsilon_free": one.free_epsilon,
        "contradicts": one.contradicts,
    }


def _counted(right: Any, candidates: float, level: Level) -> Cell:
    """A share of right answers, held against the best guesser among so many candidates."""
    if level.epsilon is None:
        return Cell(float(np.mean(right)), 1.0)
    most = guess(candidates, level.mu)
    low, _ = between(int(np.sum(right)), len(right), 2 * CONFIDENCE - 1)
    return Cell(float(np.mean(right)), most, low > most)


def _plain(value: float) -> float | None:
    return float(value) if np.isfinite(value) else None
