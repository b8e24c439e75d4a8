"""Everything that an audit measured: as data with its sentences, in the terminal, on its page."""

from __future__ import annotations

import math
import re
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import isinf
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from sottovoce._version import __version__
from sottovoce.client.release import Parameters
from sottovoce.data.files import write_file
from sottovoce.models.base import Form
from sottovoce.plan import Plan
from sottovoce.privacy import gaussian
from sottovoce.privacy.budget import NOT_COVERED, format_claim, round_up
from sottovoce.privacy.sensitivity import Recipe
from sottovoce.reports.charts import BLUE, GREEN, INK, MUTED, ORANGE, PURPLE, draw_axes, embed_svg
from sottovoce.reports.pages import format_number, render_page
from sottovoce.schemas import AuditDocument, LevelEntry, MessagesEntry
from sottovoce.studies.audit.attacks import (
    JUDGED_AT,
    Attack,
    Labels,
    Reconstructions,
    Rows,
    TrapResult,
    Victim,
    choose_one_per_class,
)
from sottovoce.studies.audit.messages import (
    CONFIDENCE,
    WRONG,
    WRONG_PER_COMPARISON,
    Level,
    Measurement,
    OneRun,
    Rates,
    bound_guess_rate,
    bound_rate,
    format_lower_bound,
)

if TYPE_CHECKING:
    from markupsafe import Markup

SCHEMA: Final = "sottovoce.audit/1"
QUICK_AUDIT = (
    "A quick audit: few messages, few shadow runs. It shows that everything works; the full one "
    "proves more."
)

INVERSION = "first-layer inversion, one sample"
NAMING = "likeliest candidate, one sample"
TRAPS = "trap weights (dishonest server)"


@dataclass(frozen=True, eq=False)
class Target:
    """What is attacked: the plan, the model that a server sends, one client's rows, and a pool."""

    name: str
    plan: Plan
    own_model: bool  # whether `form` is the plan's own model; otherwise an mlp replaces it
    form: Form
    model: Parameters
    recipe: Recipe
    epsilon: float  # of single uploads: in the sum view, what holds whatever the others do
    shared: float  # of the plan: in the sum view, with the noise of the others
    delta: float
    x: Rows  # of one client
    y: Labels
    pool_x: Rows  # of all clients: candidates, and what shadow runs train on
    pool_y: Labels
    public: Rows
    shape: tuple[int, ...]  # of a row, as the model takes it
    uncovered: tuple[str, ...] = ()  # codes of what this plan's guarantee does not cover

    @property
    def client(self) -> Victim:
        """The client that holds the rows `x`."""
        return Victim(self.form, self.recipe, self.x, self.y)

    def take_pool(self, count: int) -> Victim:
        """Return the first rows of the pool, as if one client held them."""
        return Victim(self.form, self.recipe, self.pool_x[:count], self.pool_y[:count])

    @property
    def has_classes(self) -> bool:
        """Whether a sample is one row with a class, which some attacks look for."""
        return self.form.target is None and not self.form.rows_per_person

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
    views: Sequence[Measurement]  # at the plan's ε, of whoever sees models and no upload
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
        return [m for m in self.all_measurements if m is not self.paper]

    @property
    def all_measurements(self) -> list[Measurement]:
        """Every measurement, in the order of the table."""
        return [*self.measurements, *self.views, *self.headline]

    @property
    def memberships(self) -> list[str]:
        """The names of the attacks that tell members from others."""
        return list(dict.fromkeys(attack.name for attack in self.members))

    @cached_property
    def rows(self) -> list[Row]:
        """The rows of the table of attacks."""
        return [*self._list_reconstructions(), *self._list_traps(), *self._list_memberships()]

    def _list_reconstructions(self) -> list[Row]:
        rows = []
        together = self.matchings[0].tries if self.matchings else 0
        matching = f"gradient matching, {together} samples"
        attacks = {INVERSION: self.inversions, NAMING: self.namings, matching: self.matchings}
        for name, results in attacks.items():
            if not results:
                continue
            first = results[0]
            tries = f", {first.tries} tries" if first.tries > 1 else ""
            odds = first.candidates / first.tries
            cells = {r.level: _judge_share(r.recognised, r, odds) for r in results}
            rows.append(Row(name, f"recognised among {first.candidates}{tries}", cells))
            if self.target.has_classes:
                odds /= int(np.bincount(self.inversions[0].truth).max())  # what a blind guess names
                cells = {r.level: _judge_share(r.labels, r, odds) for r in results}
                rows.append(Row(name, f"label right, of {self.target.form.classes}", cells))
            if name == NAMING:
                continue  # it names candidates and reconstructs nothing
            similarity = {"mean squared error": "error"}
            if self.target.pictures is not None:
                similarity |= {"PSNR, dB": "psnr", "SSIM": "ssim"}
            for measure, key in similarity.items():
                cells = {r.level: Finding(getattr(r, key)) for r in results}
                rows.append(Row(name, measure, cells, share=False, decides=False))
        return rows

    def _list_traps(self) -> list[Row]:
        if not self.traps:
            return []
        cells = {}
        for trap in self.traps:
            most = trap.level.bound_tpr(1 / trap.rates.negatives)
            cells[trap.level] = Finding(trap.rates.tpr, most, counts=trap.rates)
        n = self.traps[0].rates.positives
        return [Row(TRAPS, f"of {n} samples, exact", cells, decides=False)]

    def _list_memberships(self) -> list[Row]:
        rows = []
        for name in self.memberships:
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
        cells = [pair for row in self.rows if row.decides for pair in row.cells.items()]
        bounded = [c for level, c in cells if c.ceiling is not None and level.epsilon is not None]
        return len(bounded) + len(self.promises) + len(self.one_runs)

    @cached_property
    def contradictions(self) -> list[str]:
        """What refutes the promise, a sentence for each; empty if nothing does."""
        sentences = []
        for measurement in self.promises:
            setting = measurement.setting
            what = "uploads" if setting.clients == 1 else f"models of {setting.clients} clients"
            where = f"{what} at ε = {setting.epsilon:g}"
            if measurement.refutes_mu:
                mu = format_lower_bound(measurement.mu[0], 3)
                sentences.append(
                    f"{where} prove μ ≥ {mu} at δ = {setting.delta:g}, "
                    f"and at most {round_up(setting.promised, 3):.3f} was promised"
                )
            elif measurement.refutes_epsilon:
                epsilon = format_lower_bound(measurement.free_epsilon, 2)
                sentences.append(
                    f"{where} prove ε ≥ {epsilon} at δ = {setting.delta:g} without any assumption"
                )
        sentences += [
            f"one run at ε = {run.setting.epsilon:g} has {run.right} of {run.guesses} coins "
            "guessed right, more than the promise allows"
            for run in self.one_runs
            if run.contradicts
        ]
        sentences += [
            f"{row.attack} at {level.name}: {row.measure} {cell.value:.3g}, "
            f"and no attacker should exceed {round_up(cell.ceiling, 3):.3g}"
            for row in self.rows
            for level, cell in row.cells.items()
            if cell.exceeds and cell.ceiling is not None
        ]
        return sentences

    @property
    def unmeasured(self) -> list[str]:
        """What the plan does and the audit did not measure, a phrase for each."""
        plan, phrases = self.target.plan, []
        if plan.local.steps > 1:
            phrases.append(
                f"the {plan.local.steps} local steps of a round: uploads of one were measured"
            )
        if plan.server.signal == "clients":
            phrases.append("the clients' noised losses, except in the measurement of uploads")
        if plan.local.unit == "client":
            phrases.append("one run full of canaries, which needs records or persons as the unit")
        if self.target.form.rows_per_person:
            phrases.append(
                "first-layer inversion, gradient matching and trap weights, which look for one "
                "row: a person's gradient is the mean of several"
            )
        elif self.target.form.target is not None:
            phrases.append("gradient matching and labels read off a gradient, which need classes")
        elif not self.matchings:
            phrases.append("gradient matching, which needs features from 0 to 1")
        return phrases

    @property
    def caveats(self) -> str:
        """What was not measured, and what the plan's guarantee does not cover; often empty."""
        uncovered = [NOT_COVERED[code] for code in self.target.uncovered]
        lists = (("Not measured", self.unmeasured), ("Not covered by the promise", uncovered))
        text = "".join(f" {name}: {'; '.join(phrases)}." for name, phrases in lists if phrases)
        if (alone := self.target.epsilon) != self.target.shared:
            text += (
                f" Single uploads were attacked at ε = {format_claim(alone, 3)}, what holds "
                "whatever others do: as if all other clients sided with the server."
            )
        return text

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
            f"{round_up(plan.setting.promised, 2):.2f} is allowed.{self.caveats}"
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
            "messages": [_describe_measurement(m) for m in self.all_measurements],
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
        "clients": setting.clients,
        "honest": setting.honest,
        "epsilon": setting.epsilon,
        "epsilon_promised": setting.claim,
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


def _judge_share(right: NDArray[np.bool_], attack: Reconstructions, odds: float) -> Finding:
    """Compare a share of right answers with the best guesser's at 1 in `odds`.

    Only one sample of each upload is counted, because the others share its noise.
    """
    judged = right[attack.judged]
    counts, share = Rates(int(judged.sum()), judged.size, 0, 0), float(np.mean(right))
    if attack.level.epsilon is None:
        return Finding(share, 1.0, counts=counts)
    most = bound_guess_rate(max(odds, 1.0), attack.level.mu)
    low, _ = bound_rate(counts.hits, counts.positives, 1 - 2 * WRONG_PER_COMPARISON)
    return Finding(share, most, low > most, counts)


def _drop_infinite(value: float) -> float | None:
    return float(value) if np.isfinite(value) else None


Floats = NDArray[np.float64]

_TALL = (4.3, 2.9)
_FURTHEST = 45.0  # the largest ε that is drawn
_MOST_PICTURES = 8  # pictures in a line: more would be too small on a phone
_COLOURS = (INK, ORANGE, PURPLE, BLUE, GREEN)


def draw_figures(findings: Findings) -> dict[str, Markup]:
    """Draw every figure, as a file by itself."""
    drawn = {"claimed": _draw_claims(findings), "paper": _draw_scores(findings.paper)}
    if (side := findings.target.pictures) is not None and findings.traps:
        for name, rows in _list_pictures(findings).items():
            drawn[name] = _draw_grid(name, rows, side)
    return drawn | {_name_roc(name): _draw_roc(findings, name) for name in findings.memberships}


def _draw_claims(findings: Findings) -> Markup:
    """Draw ε as claimed, and the interval that uploads prove, for every setting."""
    measured = findings.all_measurements

    def paint(ax: Any) -> None:
        for height, measurement in enumerate(reversed(measured)):
            low, high = measurement.epsilon
            colour = ORANGE if measurement.contradicts else BLUE
            ends, heights = (low, min(high, _FURTHEST)), (height, height)
            ax.plot(ends, heights, color=colour, linewidth=5, alpha=0.45)
            ax.plot(low, height, "|", color=colour, markersize=13, markeredgewidth=2.5)
            ax.plot(measurement.setting.claim, height, "D", color=INK, markersize=4.5)
        ax.plot([], [], "D", color=INK, markersize=4.5, label="claimed")
        ax.plot([], [], color=BLUE, linewidth=5, alpha=0.45, label="measured")
        ax.plot([], [], color=ORANGE, linewidth=5, alpha=0.45, label="measured, claim refuted")
        ax.set_yticks(range(len(measured)), [_name_noise(m) for m in reversed(measured)])
        ax.set(xlabel="ε", xlim=(0, _FURTHEST), ylim=(-0.6, len(measured) - 0.4))
        ax.legend(loc="upper right", handlelength=1.2)
        ax.grid(visible=False, axis="y")

    label = " ".join(
        f"{_name_noise(m)}, ε = {m.setting.claim:.3g}: measured {m.epsilon[0]:.1f} or more."
        for m in measured
    )
    return draw_axes("claimed", label, paint, size=_TALL, inline=False)


def _name_noise(measurement: Measurement) -> str:
    setting = measurement.setting
    name = "Theorem 1" if setting.calibration == "paper" else "ours"
    if setting.clients > 1:
        name = "models" if setting.honest == 1 else "models, sums"
    return f"{name}, δ = {format_number(setting.delta)}"


def _draw_scores(measurement: Measurement) -> Markup:
    """Draw the scores of uploads for both neighbours, and where the claim would put them."""

    def paint(ax: Any) -> None:
        ends = np.linspace(-3 - measurement.true / 2, 3 + measurement.true / 2, 70)
        for scores, colour, name in (
            (measurement.without, BLUE, "record is D’s"),
            (measurement.having, ORANGE, "record is D′’s"),
        ):
            ax.hist(scores, bins=ends, density=True, color=colour, alpha=0.45, label=name)
        for sign in (-1, 1):
            middle = sign * measurement.setting.promised / 2
            bell = np.exp(-((ends - middle) ** 2) / 2) / np.sqrt(2 * np.pi)
            name = f"as ε = {measurement.setting.epsilon:g} promises" if sign > 0 else "_"
            ax.plot(ends, bell, color=MUTED, linestyle=(0, (4, 2)), linewidth=1.1, label=name)
        ax.set(xlabel="score of a run’s uploads (σ)", ylabel="density", ylim=(0, 0.62))
        ax.legend(loc="upper center", ncols=2, handlelength=1.2, columnspacing=1.0)

    promised = measurement.setting.promised
    label = f"Two bells {measurement.true:.2f} σ apart, where {promised:.2f} was promised."
    return draw_axes("paper", label, paint, size=_TALL, inline=False)


def _name_roc(attack: str) -> str:
    return re.sub("[^a-z]+", "-", f"roc {attack}".lower())


def _draw_roc(findings: Findings, name: str) -> Markup:
    """Draw an attack's ROC curves on logarithmic axes, each with its ceiling."""
    attacks = [attack for attack in findings.members if attack.name == name]
    lowest = 1 / int(np.sum(~attacks[0].members))
    fpr = np.logspace(np.log10(lowest), 0, 80)

    def paint(ax: Any) -> None:
        for attack, colour in zip(attacks, _COLOURS, strict=False):
            alarms, hits = attack.compute_curve()
            seen = alarms > 0
            ax.plot(alarms[seen], hits[seen], color=colour, label=attack.level.name)
            if attack.level.epsilon is not None:
                ceiling = gaussian.tpr(fpr[:-1], attack.level.mu)
                ax.plot(fpr[:-1], ceiling, color=colour, linestyle=(0, (1.5, 2)), linewidth=1.2)
        ax.plot(fpr, fpr, color=MUTED, linewidth=0.8, linestyle=(0, (4, 2)))
        ax.set(xscale="log", yscale="log", xlim=(lowest, 1), ylim=(lowest, 1.15))
        ax.set(xlabel="false alarms", ylabel="found")
        for axis in (ax.xaxis, ax.yaxis):
            axis.set_major_formatter(lambda v, _: f"{100 * v:g} %")
        ax.legend(loc="lower right", handlelength=1.4)

    areas = ", ".join(f"{attack.level.name}: {attack.auc:.2f}" for attack in attacks)
    return draw_axes(_name_roc(name), f"Area under the curve {areas}.", paint, inline=False)


def _list_pictures(findings: Findings) -> dict[str, list[tuple[str, Floats]]]:
    """Return originals above what each attack made of them at every level: (label, pictures)."""
    rows: dict[str, list[tuple[str, Floats]]] = {}
    for name, attack in (("inversion", findings.inversions), ("matching", findings.matchings)):
        if attack:
            truth = attack[0].truth
            few = list(range(len(truth)))
            if len(few) > _MOST_PICTURES + 1:
                few = choose_one_per_class(truth, findings.target.form.classes)
            few = few[:_MOST_PICTURES]
            rows[name] = [("original", attack[0].originals[few])]
            rows[name] += [(result.level.name, result.found[few]) for result in attack]
    # The trap's bins that worked best without noise, and the same bins with noise.
    clean = findings.traps[0]
    originals = findings.target.x[clean.nearest]
    best = np.argsort(np.mean((clean.found - originals) ** 2, axis=1))[:_MOST_PICTURES]
    traps = [(trap.level.name, trap.found[best]) for trap in findings.traps]
    return rows | {"traps": [("original", originals[best]), *traps]}


def _draw_grid(name: str, rows: Sequence[tuple[str, Floats]], side: tuple[int, int]) -> Markup:
    """Draw rows of pictures as one mosaic with clear gaps: axes for each would cost seconds."""
    high, wide = (length + max(1, length // 8) for length in side)
    columns = len(rows[0][1])
    mosaic = np.zeros((len(rows) * high, columns * wide, 4))
    for i, (_, pictures) in enumerate(rows):
        for j, picture in enumerate(pictures):
            cell = mosaic[i * high : i * high + side[0], j * wide : j * wide + side[1]]
            cell[..., :3] = np.clip(np.nan_to_num(picture), 0, 1).reshape(*side, -1)
            cell[..., 3] = 1.0

    def paint(ax: Any) -> None:
        ax.imshow(mosaic, interpolation="nearest")
        middles = [i * high + (side[0] - 1) / 2 for i in range(len(rows))]
        ax.set_yticks(middles, [text for text, _ in rows])
        ax.set_xticks(())
        ax.grid(visible=False)
        ax.spines[:].set_visible(False)

    label = "Pictures, row by row: " + ", ".join(text for text, _ in rows) + "."
    size = (0.4 * columns + 0.8, 0.4 * len(rows) + 0.1)
    return draw_axes(name, label, paint, size=size, inline=False)


def format_table(findings: Findings) -> str:
    """Return what the terminal shows: attacks, what uploads prove, the paper, the verdict."""
    head = ["attack", "measure", *(level.name for level in findings.levels)]
    rows = [
        [row.attack, row.measure]
        + [" ".join(split_finding(row, row.cells[level])).rstrip() for level in findings.levels]
        for row in findings.rows
    ]
    proved = [
        "", "δ", "μ promised", "ε promised", "μ measured", "ε measured, Gaussian",
        "ε measured, free",
    ]  # fmt: skip
    uploads = [list_upload_cells(m) for m in findings.all_measurements]
    guessed = [
        "one run", "canaries", "guesses", "right", "ε measured, Gaussian", "ε measured, free",
    ]  # fmt: skip
    one_runs = [list_guess_cells(run) for run in findings.one_runs]
    bounds = (
        f"Bounds at {100 * CONFIDENCE:g} %, thresholds fixed beforehand; “Gaussian” assumes the "
        "noise's shape."
    )
    lines = [_fill(explain_brackets(findings)), *_align_columns(head, rows), "", bounds]
    lines += _align_columns(proved, uploads)
    lines += ["", *_align_columns(guessed, one_runs)] if one_runs else []
    return "\n".join([*lines, "", _fill(findings.judgement), "", _fill(findings.verdict)])


def explain_brackets(findings: Findings) -> str:
    """Explain the brackets in the table of attacks, and when a count contradicts them."""
    return (
        "In brackets: what no attacker exceeds on average, whatever it knows and computes. A count "
        "contradicts it if it is above by more than chance explains; all "
        f"{findings.comparisons} comparisons of an audit together do so wrongly once in "
        f"{1 / WRONG:,.0f} audits at most. Records of one run share its noise, so that runs are "
        "counted for membership, and one sample of each upload for matching; trap weights get one "
        "upload and decide nothing."
    )


def split_finding(row: Row, cell: Finding) -> tuple[str, str]:
    """Return a cell's value, and as a hint its false alarms and its ceiling in brackets."""

    def show(value: float) -> str:
        return f"{100 * value:.1f} %" if row.share else f"{value:.3g}"

    hints = []
    if cell.counts is not None and cell.counts.negatives and row.decides:
        hints.append(f"at {100 * cell.counts.fpr:.1f} %")  # alarms as they were counted
    if cell.ceiling is not None:
        ceiling = round_up(cell.ceiling, 3)  # no attacker exceeds what is printed
        hints.append(f"({show(ceiling)})" + ("  exceeds" if cell.exceeds else ""))
    return show(cell.value), " ".join(hints)


def list_upload_cells(measurement: Measurement) -> list[str]:
    """Return what the uploads of one setting prove, as a row of texts."""
    setting, (low, _, high) = measurement.setting, measurement.mu
    epsilons = measurement.epsilon
    return [
        setting.name,
        f"{setting.delta:g}",
        f"{round_up(setting.promised, 3):.3f}",
        format_claim(setting.claim, 3),
        _format_range(low, high, 3) + ("  contradicted" if measurement.contradicts else ""),
        _format_range(*epsilons, 2),
        f"≥ {format_lower_bound(measurement.free_epsilon, 2)}",
    ]


def list_guess_cells(run: OneRun) -> list[str]:
    """Return what the guesses of one run prove, as a row of texts."""
    return [
        f"{run.setting.calibration}, ε = {run.setting.epsilon:g}",
        f"{run.canaries:,}",
        f"{run.guesses:,}",
        f"{run.right:,}" + ("  contradicted" if run.contradicts else ""),
        f"≥ {format_lower_bound(run.gaussian_epsilon, 2)}",
        f"≥ {format_lower_bound(run.epsilon, 2)}",
    ]


def _format_range(low: float, high: float, digits: int) -> str:
    if isinf(high):
        return f"{format_lower_bound(low, digits)} or more"
    return f"{format_lower_bound(low, digits)} to {high:.{digits}f}"


def _align_columns(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[i]) for row in (head, *rows)) for i in range(len(head))]
    lines = []
    for row in (head, *rows):
        cells = [text.ljust(width) for text, width in zip(row, widths, strict=True)]
        lines.append("  ".join(cells).rstrip())
    return lines


def _fill(text: str) -> str:
    return textwrap.fill(text, width=96, break_on_hyphens=False)


def write_audit(findings: Findings, folder: Path) -> Path:
    """Write audit.html and its drawings into a folder, and return the path of the page."""
    figures = draw_figures(findings)
    write_file(folder / "audit.html", render_audit(findings, figures).encode())
    for name, drawing in figures.items():
        write_file(folder / f"{name}.svg", drawing.encode())
    return folder / "audit.html"


def render_audit(findings: Findings, drawn: Mapping[str, Markup]) -> str:
    """Return the page of an audit with the figures that `draw_figures` drew."""
    figures = {name: embed_svg(drawing, name) for name, drawing in drawn.items()}
    measured = findings.all_measurements
    uploads = sorted({2 * m.messages * m.setting.rounds * m.setting.clients for m in measured})
    return render_page(
        "audit.html.j2",
        title=findings.verdict,
        headline=_join_comparisons(findings.verdict),
        banner=QUICK_AUDIT if findings.quick else "",
        version=__version__,
        found=findings,
        contradicted=bool(findings.contradictions),
        judgement=_join_comparisons(findings.judgement),
        uploads=" to ".join(f"{n:,}" for n in dict.fromkeys((uploads[0], uploads[-1]))),
        confidence=f"{100 * CONFIDENCE:g}",
        figures=figures,
        roc_charts=[
            (name[0].upper() + name[1:], figures[_name_roc(name)]) for name in findings.memberships
        ],
        brackets=explain_brackets(findings),
        attacks=[
            [row.attack, row.measure]
            + [(*split_finding(row, cell), cell.exceeds) for cell in row.cells.values()]
            for row in findings.rows
        ],
        messages=[list_upload_cells(m) for m in measured],
        most_provable=math.log(findings.paper.messages),
        one_runs=[list_guess_cells(run) for run in findings.one_runs],
    )


def _join_comparisons(text: str) -> str:
    """Keep “ε ≥ 4” on one line."""
    return re.sub(" ([≥=]) ", "\u00a0\\1\u00a0", text)
