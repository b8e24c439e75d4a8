"""Everything an audit measured, as plain data: rows of a table, contradictions, one sentence."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from sottovoce._version import __version__
from sottovoce.privacy import gaussian
from sottovoce.privacy.budget import NOT_COVERED
from sottovoce.schemas.documents import AuditDocument, LevelEntry, MessagesEntry
from sottovoce.studies.audit.ceiling import CONFIDENCE, EACH, WRONG, Rates, between, guess, least
from sottovoce.studies.audit.inversion import Loot, Reconstructions
from sottovoce.studies.audit.membership import JUDGED_AT, Attack
from sottovoce.studies.audit.messages import Measured, OneRun
from sottovoce.studies.audit.target import Level, Target

SCHEMA: Final = "sottovoce.audit/1"

INVERSION = "first-layer inversion, one sample"
NAMING = "likeliest candidate, one sample"
TRAPS = "trap weights (dishonest server)"
ERROR = "mean squared error"
#: How alike samples and reconstructions are, and whether that is a share.
LIKENESS: tuple[tuple[str, Callable[[Reconstructions], float], bool], ...] = (
    (ERROR, lambda one: one.error, False),
    ("PSNR, dB", lambda one: one.psnr, False),
    ("SSIM", lambda one: one.ssim, False),
)


@dataclass(frozen=True)
class Finding:
    """A measured number with what any attacker can reach, and whether it contradicts that.

    `counts` are what it was counted from; a share of right answers has no negatives.
    """

    value: float
    ceiling: float | None = None
    exceeds: bool = False
    counts: Rates | None = None


@dataclass(frozen=True)
class Row:
    """One attack by one measure, at every level."""

    attack: str
    measure: str
    cells: Mapping[Level, Finding]
    share: bool = True  # a share of 1, printed in per cent
    decides: bool = True  # whether it may contradict; what shares one upload's noise may not


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
    named: Sequence[Reconstructions]
    matched: Sequence[Reconstructions]
    looted: Sequence[Loot]
    members: Sequence[Attack]
    seconds: float
    command: str = "sottovoce audit"

    @property
    def paper(self) -> Measured:
        """The audit of Theorem 1's noise."""
        return next(m for m in self.headline if m.setting.calibration == "paper")

    @property
    def promises(self) -> list[Measured]:
        """Every measured promise that is ours: at the levels, and beside the paper's."""
        return [*self.measured, *(one for one in self.headline if one is not self.paper)]

    def rows(self) -> list[Row]:
        """The table of attacks."""
        return [*self._reconstructed(), *self._traps(), *self._membership()]

    def _reconstructed(self) -> list[Row]:
        rows = []
        together = self.matched[0].tries if self.matched else 0
        for name, found in (
            (INVERSION, self.inverted),
            (NAMING, self.named),
            (f"gradient matching, {together} samples", self.matched),
        ):
            if not found:
                continue
            first = found[0]
            tries = f", {first.tries} tries" if first.tries > 1 else ""
            odds = first.candidates / first.tries
            told = {one.level: _counted(one.names, one, odds) for one in found}
            rows.append(Row(name, f"recognised among {first.candidates}{tries}", told))
            told = {one.level: _counted(one.labels, one, odds / self._alike) for one in found}
            rows.append(Row(name, f"label right, of {self.target.form.classes}", told))
            if name == NAMING:
                continue  # what it shows are other candidates, and no reconstructions
            rows += [
                Row(
                    name,
                    measure,
                    {one.level: Finding(of(one)) for one in found},
                    share,
                    decides=False,
                )
                for measure, of, share in LIKENESS
                if measure == ERROR or self.target.pictures is not None
            ]
        return rows

    @property
    def _alike(self) -> int:
        """Candidates that have the most common label: whoever always names it is as often right."""
        return int(np.bincount(self.inverted[0].truth).max())

    def _traps(self) -> list[Row]:
        cells = {}
        for one in self.looted:
            most = one.level.ceiling(1 / one.rates.negatives)
            cells[one.level] = Finding(one.rates.tpr, most, counts=one.rates)
        n = self.looted[0].rates.positives
        return [Row(TRAPS, f"of {n} samples, exact", cells, decides=False)]

    def _membership(self) -> list[Row]:
        rows = []
        for name in dict.fromkeys(attack.name for attack in self.members):
            own = [attack for attack in self.members if attack.name == name]
            for fpr in JUDGED_AT:
                if own[0].at(fpr).negatives * fpr < 1:
                    continue  # too few to see so rare an alarm
                cells = {}
                for attack in own:
                    rates, level = attack.at(fpr), attack.level
                    most = level.ceiling(min(max(rates.fpr, fpr), 0.5))
                    cells[level] = Finding(rates.tpr, most, attack.exceeds(fpr), rates)
                rows.append(Row(name, f"found at {100 * fpr:g} % false alarms", cells))
            areas = {a.level: Finding(a.auc, a.auc_ceiling, a.area_exceeds) for a in own}
            rows.append(Row(name, "AUC", areas, share=False))
        return rows

    @property
    def comparisons(self) -> int:
        """How many measurements could have contradicted a promise."""
        cells = sum(
            cell.ceiling is not None and level.epsilon is not None
            for row in self.rows()
            if row.decides
            for level, cell in row.cells.items()
        )
        return cells + len(self.promises) + len(self.one_runs)

    def contradictions(self) -> list[str]:
        """What refutes the promise, one sentence each; empty if nothing does."""
        found = []
        for one in self.promises:
            setting = one.setting
            where = f"uploads at ε = {setting.epsilon:g}"
            if one.refutes_mu:
                found.append(
                    f"{where} prove μ ≥ {least(one.mu[0], 3)} at δ = {setting.delta:g}, "
                    f"and at most {setting.promised:.3f} was promised"
                )
            elif one.refutes_epsilon:
                found.append(
                    f"{where} prove ε ≥ {least(one.free_epsilon, 2)} at δ = {setting.delta:g} "
                    "without any assumption"
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

    def left_out(self) -> list[str]:
        """What the plan does and the audit did not measure, one phrase each."""
        plan, found = self.target.plan, []
        if plan.local.steps > 1:
            found.append(f"the {plan.local.steps} steps of a round: uploads of one were measured")
        if plan.server.signal == "clients":
            found.append("the noised losses that clients tell, but in the duel of uploads")
        if plan.local.unit == "client":
            found.append("one run full of canaries: a client's data are protected, and it has one")
        return found

    def caveats(self) -> str:
        """What was left out, and what the plan's own guarantee does not cover; often nothing."""
        uncovered = [NOT_COVERED[code] for code in self.target.uncovered]
        parts = (("Not measured", self.left_out()), ("Not covered by the promise", uncovered))
        return "".join(f" {name}: {'; '.join(each)}." for name, each in parts if each)

    def verdict(self) -> str:
        """One sentence, and another where something was left out."""
        against = self.contradictions()
        if against:
            more = f" ({len(against)} contradictions in all)" if len(against) > 1 else ""
            return f"The promise is contradicted: {against[0]}{more}.{self.caveats()}"
        own = min(self.measured, key=lambda m: abs(m.setting.epsilon - self.target.epsilon))
        return (
            f"Nothing measured contradicts the promise in {self.comparisons} comparisons: no "
            "attack exceeds its ceiling by more than chance explains, and uploads at "
            f"ε = {own.setting.epsilon:g} prove μ ≥ {least(own.mu[0], 2)} where "
            f"{own.setting.promised:.2f} is allowed.{self.caveats()}"
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
            f"{least(paper.mu[0], 2)} (true: {paper.true:.2f}), which, assuming the Gaussian "
            f"shape, {proves} ε ≥ {least(low, 1)} (true: {true:.1f}); without that assumption "
            f"{paper.messages:,} runs a side prove ε ≥ {least(paper.free_epsilon, 1)}."
        )

    def to_json(self) -> AuditDocument:
        """Return the content of `audit.json`."""
        return {
            "schema": SCHEMA,
            "version": __version__,
            "target": self.target.name,
            "own_model": self.target.own,
            "quick": self.quick,
            "command": self.command,
            "confidence": CONFIDENCE,
            "comparisons": self.comparisons,
            "wrong": WRONG,
            "seconds": round(self.seconds, 1),
            "verdict": self.verdict(),
            "judgement": self.judgement(),
            "contradictions": self.contradictions(),
            "not_measured": self.left_out(),
            "attacks": [
                {
                    "attack": row.attack,
                    "measure": row.measure,
                    "decides": row.decides,
                    "levels": [_level(level, cell) for level, cell in row.cells.items()],
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


def _level(level: Level, cell: Finding) -> LevelEntry:
    counts = cell.counts
    return {
        "epsilon": level.epsilon,
        "value": _plain(cell.value),
        "ceiling": cell.ceiling,
        "exceeds": cell.exceeds,
        "hits": None if counts is None else counts.hits,
        "positives": None if counts is None else counts.positives,
        "alarms": None if counts is None or not counts.negatives else counts.alarms,
        "negatives": None if counts is None or not counts.negatives else counts.negatives,
    }


def _message(one: Measured) -> MessagesEntry:
    rates = one.rates
    return {
        "calibration": one.setting.calibration,
        "epsilon": one.setting.epsilon,
        "delta": one.setting.delta,
        "messages": one.messages * one.setting.rounds,
        "runs": one.messages,
        "hits": rates.hits,
        "alarms": rates.alarms,
        "mu_promised": one.setting.promised,
        "mu_true": one.true,
        "mu": [_plain(value) for value in one.mu],
        "epsilon_gaussian": [_plain(value) for value in one.epsilon],
        "epsilon_free": one.free_epsilon,
        "contradicts": one.contradicts,
    }


def _counted(right: NDArray[np.bool_], of: Reconstructions, odds: float) -> Finding:
    """A share of right answers, held against the best guesser at such odds; one of each upload."""
    judged = right[of.judged]
    counts, share = Rates(int(judged.sum()), judged.size, 0, 0), float(np.mean(right))
    if of.level.epsilon is None:
        return Finding(share, 1.0, counts=counts)
    most = guess(max(odds, 1.0), of.level.mu)
    low, _ = between(counts.hits, counts.positives, 1 - 2 * EACH)
    return Finding(share, most, low > most, counts)


def _plain(value: float) -> float | None:
    return float(value) if np.isfinite(value) else None
