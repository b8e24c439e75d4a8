"""Everything that an audit measured, as plain data, and the sentences that follow from it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from sottovoce._version import __version__
from sottovoce.client.release import Parameters
from sottovoce.models.base import Form
from sottovoce.plan import Plan
from sottovoce.privacy import gaussian
from sottovoce.privacy.budget import NOT_COVERED
from sottovoce.privacy.sensitivity import Recipe
from sottovoce.schemas.documents import AuditDocument, LevelEntry, MessagesEntry
from sottovoce.studies.audit.attacks import (
    JUDGED_AT,
    Attack,
    Labels,
    Reconstructions,
    Rows,
    TrapResult,
)
from sottovoce.studies.audit.ceiling import (
    CONFIDENCE,
    WRONG,
    WRONG_PER_COMPARISON,
    Level,
    Rates,
    bound_guess_rate,
    bound_rate,
    format_lower_bound,
)
from sottovoce.studies.audit.messages import Measurement, OneRun

SCHEMA: Final = "sottovoce.audit/1"

INVERSION = "first-layer inversion, one sample"
NAMING = "likeliest candidate, one sample"
TRAPS = "trap weights (dishonest server)"
ERROR = "mean squared error"
#: Measures of how similar samples and their reconstructions are.
SIMILARITY: tuple[tuple[str, Callable[[Reconstructions], float]], ...] = (
    (ERROR, lambda reconstructions: reconstructions.error),
    ("PSNR, dB", lambda reconstructions: reconstructions.psnr),
    ("SSIM", lambda reconstructions: reconstructions.ssim),
)


@dataclass(frozen=True, eq=False)
class Target:
    """What is attacked: the plan, the model that a server sends, one client's rows, and a pool."""

    name: str
    plan: Plan
    own_model: bool  # whether `form` is the plan's own model; otherwise an mlp replaces it
    form: Form
    model: Parameters
    recipe: Recipe
    epsilon: float
    delta: float
    x: Rows  # of one client
    y: Labels
    pool_x: Rows  # of all clients: candidates, and what shadow runs train on
    pool_y: Labels
    public: Rows
    shape: tuple[int, ...]  # of a row, as the model takes it
    uncovered: tuple[str, ...] = ()  # codes of what this plan's guarantee does not cover

    @property
    def pictures(self) -> tuple[int, int] | None:
        """Height and width if a row is a picture, else None."""
        if len(self.shape) == 3 and min(self.shape[:2]) > 1:
            return self.shape[0], self.shape[1]
        return None


@dataclass(frozen=True)
class Finding:
    """A measured number, its ceiling for any attacker, and whether it contradicts the ceiling.

    `counts` is what the number was counted from; a share of right answers has no negatives.
    """

    value: float
    ceiling: float | None = None
    exceeds: bool = False
    counts: Rates | None = None


@dataclass(frozen=True)
class Row:
    """One attack, judged by one measure at every level."""

    attack: str
    measure: str
    cells: Mapping[Level, Finding]
    share: bool = True  # printed in per cent
    decides: bool = True  # whether it may contradict; numbers that share an upload's noise may not


@dataclass(frozen=True, eq=False)
class Findings:
    """What was measured; verdict, contradictions and tables are computed from it."""

    target: Target
    quick: bool
    levels: Sequence[Level]
    measurements: Sequence[Measurement]  # at the levels, with the plan's calibration
    headline: Sequence[Measurement]  # ours and the paper's at ε = 20, δ = 1e-3
    one_runs: Sequence[OneRun]
    inversions: Sequence[Reconstructions]
    namings: Sequence[Reconstructions]
    matchings: Sequence[Reconstructions]
    traps: Sequence[TrapResult]
    members: Sequence[Attack]
    seconds: float
    command: str = "sottovoce audit"

    @property
    def paper(self) -> Measurement:
        """The measurement of Theorem 1's noise."""
        return next(m for m in self.headline if m.setting.calibration == "paper")

    @property
    def promises(self) -> list[Measurement]:
        """The measurements of promises that are ours: all but the paper's."""
        return [*self.measurements, *(m for m in self.headline if m is not self.paper)]

    @property
    def rows(self) -> list[Row]:
        """The rows of the table of attacks."""
        return [*self._list_reconstructions(), *self._list_traps(), *self._list_memberships()]

    def _list_reconstructions(self) -> list[Row]:
        rows = []
        together = self.matchings[0].tries if self.matchings else 0
        for name, found in (
            (INVERSION, self.inversions),
            (NAMING, self.namings),
            (f"gradient matching, {together} samples", self.matchings),
        ):
            if not found:
                continue
            first = found[0]
            tries = f", {first.tries} tries" if first.tries > 1 else ""
            odds = first.candidates / first.tries
            cells = {r.level: _judge_share(r.recognised, r, odds) for r in found}
            rows.append(Row(name, f"recognised among {first.candidates}{tries}", cells))
            odds /= self._most_common
            cells = {r.level: _judge_share(r.labels, r, odds) for r in found}
            rows.append(Row(name, f"label right, of {self.target.form.classes}", cells))
            if name == NAMING:
                continue  # it names candidates and reconstructs nothing
            for measure, compute in SIMILARITY:
                if measure == ERROR or self.target.pictures is not None:
                    cells = {r.level: Finding(compute(r)) for r in found}
                    rows.append(Row(name, measure, cells, share=False, decides=False))
        return rows

    @property
    def _most_common(self) -> int:
        """How many candidates have the most common label, which a blind guess would name."""
        return int(np.bincount(self.inversions[0].truth).max())

    def _list_traps(self) -> list[Row]:
        cells = {}
        for trap in self.traps:
            most = trap.level.bound_tpr(1 / trap.rates.negatives)
            cells[trap.level] = Finding(trap.rates.tpr, most, counts=trap.rates)
        n = self.traps[0].rates.positives
        return [Row(TRAPS, f"of {n} samples, exact", cells, decides=False)]

    def _list_memberships(self) -> list[Row]:
        rows = []
        for name in dict.fromkeys(attack.name for attack in self.members):
            attacks = [attack for attack in self.members if attack.name == name]
            for fpr in JUDGED_AT:
                if attacks[0].count_rates(fpr).negatives * fpr < 1:
                    continue  # too few records for so rare an alarm
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
        """The number of measurements that could have contradicted a promise."""
        cells = sum(
            cell.ceiling is not None and level.epsilon is not None
            for row in self.rows
            if row.decides
            for level, cell in row.cells.items()
        )
        return cells + len(self.promises) + len(self.one_runs)

    @property
    def contradictions(self) -> list[str]:
        """What refutes the promise, a sentence for each; empty if nothing does."""
        found = []
        for measurement in self.promises:
            setting = measurement.setting
            where = f"uploads at ε = {setting.epsilon:g}"
            if measurement.refutes_mu:
                mu = format_lower_bound(measurement.mu[0], 3)
                found.append(
                    f"{where} prove μ ≥ {mu} at δ = {setting.delta:g}, "
                    f"and at most {setting.promised:.3f} was promised"
                )
            elif measurement.refutes_epsilon:
                epsilon = format_lower_bound(measurement.free_epsilon, 2)
                found.append(
                    f"{where} prove ε ≥ {epsilon} at δ = {setting.delta:g} without any assumption"
                )
        for run in self.one_runs:
            if run.contradicts:
                found.append(
                    f"one run at ε = {run.setting.epsilon:g} has {run.right} of {run.guesses} "
                    "coins guessed right, more than the promise allows"
                )
        for row in self.rows:
            for level, cell in row.cells.items():
                if cell.exceeds:
                    found.append(
                        f"{row.attack} at {level.name}: {row.measure} {cell.value:.3g}, "
                        f"and no attacker should exceed {cell.ceiling:.3g}"
                    )
        return found

    @property
    def unmeasured(self) -> list[str]:
        """What the plan does and the audit did not measure, a phrase for each."""
        plan, found = self.target.plan, []
        if plan.local.steps > 1:
            found.append(
                f"the {plan.local.steps} local steps of a round: uploads of one were measured"
            )
        if plan.server.signal == "clients":
            found.append("the clients' noised losses, except in the measurement of uploads")
        if plan.local.unit == "client":
            found.append("one run full of canaries, which needs records as the unit")
        return found

    @property
    def caveats(self) -> str:
        """What was not measured, and what the plan's guarantee does not cover; often empty."""
        uncovered = [NOT_COVERED[code] for code in self.target.uncovered]
        lists = (("Not measured", self.unmeasured), ("Not covered by the promise", uncovered))
        return "".join(f" {name}: {'; '.join(phrases)}." for name, phrases in lists if phrases)

    @property
    def verdict(self) -> str:
        """Whether the promise holds, in a sentence, with the caveats if there are any."""
        against = self.contradictions
        if against:
            more = f" ({len(against)} contradictions in all)" if len(against) > 1 else ""
            return f"The promise is contradicted: {against[0]}{more}.{self.caveats}"
        plan = min(self.measurements, key=lambda m: abs(m.setting.epsilon - self.target.epsilon))
        return (
            f"Nothing measured contradicts the promise in {self.comparisons} comparisons: no "
            "attack exceeds its ceiling by more than chance explains, and uploads at "
            f"ε = {plan.setting.epsilon:g} prove μ ≥ {format_lower_bound(plan.mu[0], 2)} where "
            f"{plan.setting.promised:.2f} is allowed.{self.caveats}"
        )

    @property
    def judgement(self) -> str:
        """What the audit says about the paper's calibration, in one sentence."""
        paper = self.paper
        mu = format_lower_bound(paper.mu[0], 2)
        epsilon = format_lower_bound(paper.epsilon[0], 1)
        free = format_lower_bound(paper.free_epsilon, 1)
        true = float(gaussian.epsilon(paper.setting.delta, paper.true))
        proves = "proves" if paper.contradicts else "is compatible with"
        return (
            f"Theorem 1 of the paper claims ε = {paper.setting.epsilon:g} at δ = "
            f"{paper.setting.delta:g}; the same audit of its noise measures μ ≥ "
            f"{mu} (true: {paper.true:.2f}), which, assuming the Gaussian shape, {proves} "
            f"ε ≥ {epsilon} (true: {true:.1f}); without that assumption "
            f"{paper.messages:,} runs a side prove ε ≥ {free}."
        )

    def to_json(self) -> AuditDocument:
        """Return the content of `audit.json`."""
        return {
            "schema": SCHEMA,
            "version": __version__,
            "target": self.target.name,
            "own_model": self.target.own_model,
            "quick": self.quick,
            "command": self.command,
            "confidence": CONFIDENCE,
            "comparisons": self.comparisons,
            "wrong": WRONG,
            "seconds": round(self.seconds, 1),
            "verdict": self.verdict,
            "judgement": self.judgement,
            "contradictions": self.contradictions,
            "not_measured": self.unmeasured,
            "attacks": [
                {
                    "attack": row.attack,
                    "measure": row.measure,
                    "decides": row.decides,
                    "levels": [_describe_cell(level, cell) for level, cell in row.cells.items()],
                }
                for row in self.rows
            ],
            "messages": [_describe_measurement(m) for m in (*self.measurements, *self.headline)],
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


def _describe_measurement(measurement: Measurement) -> MessagesEntry:
    setting, rates = measurement.setting, measurement.rates
    return {
        "calibration": setting.calibration,
        "epsilon": setting.epsilon,
        "delta": setting.delta,
        "messages": measurement.messages * setting.rounds,
        "runs": measurement.messages,
        "hits": rates.hits,
        "alarms": rates.alarms,
        "mu_promised": setting.promised,
        "mu_true": measurement.true,
        "mu": [_drop_infinite(value) for value in measurement.mu],
        "epsilon_gaussian": [_drop_infinite(value) for value in measurement.epsilon],
        "epsilon_free": measurement.free_epsilon,
        "contradicts": measurement.contradicts,
    }


def _judge_share(right: NDArray[np.bool_], found: Reconstructions, odds: float) -> Finding:
    """Compare a share of right answers with the best guesser's at 1 in `odds`.

    Only one sample of each upload is counted, because the others share its noise.
    """
    judged = right[found.judged]
    counts, share = Rates(int(judged.sum()), judged.size, 0, 0), float(np.mean(right))
    if found.level.epsilon is None:
        return Finding(share, 1.0, counts=counts)
    most = bound_guess_rate(max(odds, 1.0), found.level.mu)
    low, _ = bound_rate(counts.hits, counts.positives, 1 - 2 * WRONG_PER_COMPARISON)
    return Finding(share, most, low > most, counts)


def _drop_infinite(value: float) -> float | None:
    return float(value) if np.isfinite(value) else None
