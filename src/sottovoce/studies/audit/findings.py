"""What an audit found: the table of attacks, contradictions, and the verdict in words."""

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
from sottovoce.studies.audit.ceiling import (
    CONFIDENCE,
    EACH,
    WRONG,
    Rates,
    bound_guessing,
    bound_probability,
    format_lower_bound,
)
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
    """A measured number, the most any attacker can reach, and whether it contradicts that.

    `counts` are the counts behind the number; a share of right answers has no negatives.
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
    """Everything that an audit measured."""

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
        """The measurement of Theorem 1's noise."""
        return next(m for m in self.headline if m.setting.calibration == "paper")

    @property
    def promises(self) -> list[Measured]:
        """Every measured promise of ours: at the levels, and beside the paper's."""
        return [*self.measured, *(one for one in self.headline if one is not self.paper)]

    def rows(self) -> list[Row]:
        """Return the table of attacks."""
        return [*self._list_reconstructions(), *self._list_traps(), *self._list_membership()]

    def _list_reconstructions(self) -> list[Row]:
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
            cells = {one.level: _judge_answers(one.names, one, odds) for one in found}
            rows.append(Row(name, f"recognised among {first.candidates}{tries}", cells))
            odds /= self._most_common
            cells = {one.level: _judge_answers(one.labels, one, odds) for one in found}
            rows.append(Row(name, f"label right, of {self.target.form.classes}", cells))
            if name == NAMING:
                continue  # it names candidates, and reconstructs nothing
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
    def _most_common(self) -> int:
        """Candidates with the most common label: always guessing it is right as often."""
        return int(np.bincount(self.inverted[0].truth).max())

    def _list_traps(self) -> list[Row]:
        cells = {}
        for one in self.looted:
            most = one.level.bound_tpr(1 / one.rates.negatives)
            cells[one.level] = Finding(one.rates.tpr, most, counts=one.rates)
        n = self.looted[0].rates.positives
        return [Row(TRAPS, f"of {n} samples, exact", cells, decides=False)]

    def _list_membership(self) -> list[Row]:
        rows = []
        for name in dict.fromkeys(attack.name for attack in self.members):
            attacks = [attack for attack in self.members if attack.name == name]
            for fpr in JUDGED_AT:
                if attacks[0].count_rates(fpr).negatives * fpr < 1:
                    continue  # too few to see so rare an alarm
                cells = {}
                for attack in attacks:
                    rates, level = attack.count_rates(fpr), attack.level
                    most = level.bound_tpr(min(max(rates.fpr, fpr), 0.5))
                    cells[level] = Finding(rates.tpr, most, attack.exceeds(fpr), rates)
                rows.append(Row(name, f"found at {100 * fpr:g} % false alarms", cells))
            areas = {a.level: Finding(a.auc, a.auc_ceiling, a.area_exceeds) for a in attacks}
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
        """Return a sentence for everything that refutes the promise."""
        found = []
        for one in self.promises:
            setting = one.setting
            where = f"uploads at ε = {setting.epsilon:g}"
            if one.refutes_mu:
                found.append(
                    f"{where} prove μ ≥ {format_lower_bound(one.mu[0], 3)} at δ = "
                    f"{setting.delta:g}, and at most {setting.promised:.3f} was promised"
                )
            elif one.refutes_epsilon:
                found.append(
                    f"{where} prove ε ≥ {format_lower_bound(one.free_epsilon, 2)} at δ = "
                    f"{setting.delta:g} without any assumption"
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

    def list_unmeasured(self) -> list[str]:
        """Return a phrase for everything that the plan does and the audit did not measure."""
        plan, found = self.target.plan, []
        if plan.local.steps > 1:
            found.append(f"the {plan.local.steps} steps of a round: uploads of one were measured")
        if plan.server.signal == "clients":
            found.append("the noised losses that clients tell, but in the duel of uploads")
        if plan.local.unit == "client":
            found.append("one run full of canaries: a client's data are protected, and it has one")
        return found

    def caveats(self) -> str:
        """Return what was not measured and what the guarantee does not cover; often nothing."""
        uncovered = [NOT_COVERED[code] for code in self.target.uncovered]
        parts = (
            ("Not measured", self.list_unmeasured()),
            ("Not covered by the promise", uncovered),
        )
        return "".join(f" {name}: {'; '.join(texts)}." for name, texts in parts if texts)

    def verdict(self) -> str:
        """Return the verdict in one sentence, and the caveats."""
        against = self.contradictions()
        if against:
            more = f" ({len(against)} contradictions in all)" if len(against) > 1 else ""
            return f"The promise is contradicted: {against[0]}{more}.{self.caveats()}"
        nearest = min(self.measured, key=lambda m: abs(m.setting.epsilon - self.target.epsilon))
        return (
            f"Nothing measured contradicts the promise in {self.comparisons} comparisons: no "
            "attack exceeds its ceiling by more than chance explains, and uploads at "
            f"ε = {nearest.setting.epsilon:g} prove μ ≥ {format_lower_bound(nearest.mu[0], 2)} "
            f"where {nearest.setting.promised:.2f} is allowed.{self.caveats()}"
        )

    def judgement(self) -> str:
        """Return what the audit found of the paper's calibration, in one sentence."""
        paper = self.paper
        low, _ = paper.epsilon
        true = float(gaussian.epsilon(paper.setting.delta, paper.true))
        proves = "proves" if paper.contradicts else "is compatible with"
        return (
            f"Theorem 1 of the paper claims ε = {paper.setting.epsilon:g} at δ = "
            f"{paper.setting.delta:g}; the same audit of its noise measures μ ≥ "
            f"{format_lower_bound(paper.mu[0], 2)} (true: {paper.true:.2f}), which, assuming the "
            f"Gaussian shape, {proves} ε ≥ {format_lower_bound(low, 1)} (true: {true:.1f}); "
            f"without that assumption {paper.messages:,} runs a side prove "
            f"ε ≥ {format_lower_bound(paper.free_epsilon, 1)}."
        )

    def to_json(self) -> AuditDocument:
        """Return the content of audit.json."""
        return {
            "schema": SCHEMA,
            "version": __version__,
            "target": self.target.name,
            "own_model": self.target.is_own_model,
            "quick": self.quick,
            "command": self.command,
            "confidence": CONFIDENCE,
            "comparisons": self.comparisons,
            "wrong": WRONG,
            "seconds": round(self.seconds, 1),
            "verdict": self.verdict(),
            "judgement": self.judgement(),
            "contradictions": self.contradictions(),
            "not_measured": self.list_unmeasured(),
            "attacks": [
                {
                    "attack": row.attack,
                    "measure": row.measure,
                    "decides": row.decides,
                    "levels": [_describe_cell(level, cell) for level, cell in row.cells.items()],
                }
                for row in self.rows()
            ],
            "messages": [_describe_uploads(one) for one in (*self.measured, *self.headline)],
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


def _describe_cell(level: Level, cell: Finding) -> LevelEntry:
    counts = cell.counts
    return {
        "epsilon": level.epsilon,
        "value": _drop_infinite(cell.value),
        "ceiling": cell.ceiling,
        "exceeds": cell.exceeds,
        "hits": None if counts is None else counts.hits,
        "positives": None if counts is None else counts.positives,
        "alarms": None if counts is None or not counts.negatives else counts.alarms,
        "negatives": None if counts is None or not counts.negatives else counts.negatives,
    }


def _describe_uploads(one: Measured) -> MessagesEntry:
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
        "mu": [_drop_infinite(value) for value in one.mu],
        "epsilon_gaussian": [_drop_infinite(value) for value in one.epsilon],
        "epsilon_free": one.free_epsilon,
        "contradicts": one.contradicts,
    }


def _judge_answers(right: NDArray[np.bool_], of: Reconstructions, odds: float) -> Finding:
    """Compare a share of right answers with the best guesser's; one of each upload counts."""
    judged = right[of.judged]
    counts, share = Rates(int(judged.sum()), judged.size, 0, 0), float(np.mean(right))
    if of.level.epsilon is None:
        return Finding(share, 1.0, counts=counts)
    most = bound_guessing(max(odds, 1.0), of.level.mu)
    low, _ = bound_probability(counts.hits, counts.positives, 1 - 2 * EACH)
    return Finding(share, most, low > most, counts)


def _drop_infinite(value: float) -> float | None:
    return float(value) if np.isfinite(value) else None
