"""What a person reads in a terminal after an audit."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from math import isinf

from sottovoce.studies.audit.canaries import OneRun
from sottovoce.studies.audit.ceiling import CONFIDENCE, WRONG, least
from sottovoce.studies.audit.findings import Cell, Findings, Row
from sottovoce.studies.audit.messages import Measured


def table(found: Findings) -> str:
    """The attacks, what uploads prove, the paper, and the verdict."""
    head = ["attack", "measure", *(level.name for level in found.levels)]
    rows = [
        [row.attack, row.measure, *(shown(row, row.cells[level]) for level in found.levels)]
        for row in found.rows()
    ]
    proved = [
        "", "δ", "μ promised", "μ measured", "ε measured, Gaussian", "ε measured, free",
    ]  # fmt: skip
    uploads = [message(one) for one in (*found.measured, *found.headline)]
    guessed = [
        "one run",
        "canaries",
        "guesses",
        "right",
        "ε measured, Gaussian",
        "ε measured, free",
    ]
    once = [one_run(run) for run in found.one_runs]
    return "\n".join(
        [
            _filled(brackets(found)),
            *_lines(head, rows),
            "",
            f"Bounds at {100 * CONFIDENCE:g} %, thresholds fixed beforehand; “Gaussian” assumes "
            "the noise's shape.",
            *_lines(proved, uploads),
            *(["", *_lines(guessed, once)] if once else []),
            "",
            _filled(found.judgement()),
            "",
            _filled(found.verdict()),
        ]
    )


def brackets(found: Findings) -> str:
    """What stands in brackets in the table of attacks, and when it is contradicted."""
    return (
        "In brackets: what no attacker exceeds on average, whatever it knows and computes. A count "
        "contradicts it if it is above by more than chance explains; all "
        f"{found.comparisons} comparisons of an audit together do so wrongly once in "
        f"{1 / WRONG:,.0f} audits at most. Records of one run share its noise, so that runs are "
        "counted for membership, and one sample of each upload for matching; trap weights get one "
        "upload and decide nothing."
    )


def shown(row: Row, cell: Cell) -> str:
    """A cell as it is printed, its ceiling in brackets.

    >>> shown(Row("", "", {}), Cell(0.021, 0.09)), shown(Row("", "", {}, False), Cell(1.2e-17))
    ('2.1 % (9.0 %)', '1.2e-17')
    >>> from sottovoce.studies.audit.ceiling import Rates
    >>> shown(Row("", "", {}), Cell(0.5, 0.9, counts=Rates(1, 2, 1, 100)))
    '50.0 % at 1.0 % (90.0 %)'
    """
    value = f"{100 * cell.value:.1f} %" if row.share else f"{cell.value:.3g}"
    if cell.counts is not None and cell.counts.negatives and row.decides:
        value += f" at {100 * cell.counts.fpr:.1f} %"  # alarms as they were counted
    if cell.ceiling is None:
        return value
    most = f"{100 * cell.ceiling:.1f} %" if row.share else f"{cell.ceiling:.3g}"
    return f"{value} ({most})" + ("  exceeds" if cell.exceeds else "")


def message(one: Measured) -> list[str]:
    """What the uploads of one setting prove, as a row of texts."""
    setting, (low, _, high) = one.setting, one.mu
    whose = "the paper's" if setting.calibration == "paper" else setting.calibration
    epsilons = one.epsilon
    return [
        f"{whose}, ε = {setting.epsilon:g}",
        f"{setting.delta:g}",
        f"{setting.promised:.3f}",
        _range(low, high, 3) + ("  contradicted" if one.contradicts else ""),
        _range(*epsilons, 2),
        f"≥ {least(one.free_epsilon, 2)}",
    ]


def one_run(run: OneRun) -> list[str]:
    """What the guesses of one run prove, as a row of texts."""
    return [
        f"{run.setting.calibration}, ε = {run.setting.epsilon:g}",
        f"{run.canaries:,}",
        f"{run.guesses:,}",
        f"{run.right:,}" + ("  contradicted" if run.contradicts else ""),
        f"≥ {least(run.gaussian_epsilon, 2)}",
        f"≥ {least(run.epsilon, 2)}",
    ]


def _range(low: float, high: float, digits: int) -> str:
    if isinf(high):
        return f"{least(low, digits)} or more"
    return f"{least(low, digits)} to {high:.{digits}f}"


def _lines(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[i]) for row in (head, *rows)) for i in range(len(head))]
    lines = []
    for row in (head, *rows):
        cells = [text.ljust(width) for text, width in zip(row, widths, strict=True)]
        lines.append("  ".join(cells).rstrip())
    return lines


def _filled(text: str) -> str:
    return textwrap.fill(text, width=96, break_on_hyphens=False)
