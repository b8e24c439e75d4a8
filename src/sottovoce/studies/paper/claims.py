"""Every claim with what became of it, and the table of them."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from sottovoce.studies.paper import definition, outcomes
from sottovoce.studies.paper.checks import check, check_moments
from sottovoce.studies.paper.definition import Claim, Figure
from sottovoce.studies.paper.outcomes import Result
from sottovoce.studies.paper.table import Table, tables
from sottovoce.studies.paper.verdict import Verdict

START, END = "<!-- claims -->", "<!-- /claims -->"


@dataclass(frozen=True, eq=False)
class Judged:
    """A finished figure with the verdict on each of its claims, variant by variant."""

    figure: Figure
    result: Result
    tables: dict[str, Table]
    verdicts: list[tuple[Claim, dict[str, Verdict]]]


def judged(folder: Path) -> list[Judged]:
    """All figures of a folder, in their order, judged by the claims of their own definitions."""
    found = []
    for path in folder.glob("*.json"):
        content = outcomes.read(path)
        if content:
            with outcomes.intact(path):
                found.append(of(content))
    known = definition.names()
    place = {name: i for i, name in enumerate(known)}
    return sorted(found, key=lambda one: place.get(one.figure.name, len(place)))


def of(content: dict[str, object]) -> Judged:
    """A figure from the content of its file."""
    figure = definition.parse(str(content["definition"]), str(content["figure"]))
    result = Result(
        figure=figure,
        quick=bool(content["quick"]),
        cells=list(content["cells"]),  # type: ignore[call-overload]
        plan=dict(content["plan"]),  # type: ignore[call-overload]
        made=list(content["made"]),  # type: ignore[call-overload]
        command=str(content["command"]),
        moments=list(content["moments"]),  # type: ignore[call-overload]
    )
    by_variant = tables(figure, result.cells)
    verdicts: list[tuple[Claim, dict[str, Verdict]]] = []
    for claim in figure.claims:
        if figure.kind == "moments":
            verdicts.append((claim, {"printed": check_moments(result.moments)}))
            continue
        kept = {v: t for v, t in by_variant.items() if v in claim.variants}
        verdicts.append((claim, {v: check(claim, table) for v, table in kept.items()}))
    return Judged(figure, result, by_variant, verdicts)


def shown(verdict: Verdict | None) -> str:
    """A verdict in a few words, with its number.

    >>> from sottovoce.studies.paper.verdict import judge
    >>> shown(judge({"": [0.2, 0.3, 0.25]}))
    'holds (0.25, 0.13 to 0.37)'
    >>> shown(None)
    '–'
    """
    if verdict is None:
        return "–"
    if not verdict.points:
        return f"{verdict.word} (no such point here)"
    if len(verdict.points) == 1:
        one = verdict.points[0].interval
        if one.low == one.high:
            return f"{verdict.word} ({_signed(one.mean)})"
        numbers = ", ".join((_signed(one.mean), f"{_signed(one.low)} to {_signed(one.high)}"))
        return f"{verdict.word} ({numbers})"
    means = [point.interval.mean for point in verdict.points]
    span = f"{_signed(min(means))} to {_signed(max(means))}"
    return f"{verdict.word} ({verdict.tally}; means {span})"


def _signed(value: float) -> str:
    return (f"{value:.0f}" if 10 <= abs(value) < 1e6 else f"{value:.2g}").replace("-", "−")


def rows(found: Iterable[Judged]) -> list[tuple[str, str, str, str, bool]]:
    """One row a claim: what is said, where, as printed, corrected, and whether it is ours."""
    return [
        (
            claim.words,
            one.figure.paper if one.figure.paper != "ours" else one.figure.name,
            shown(verdicts.get("printed")),
            shown(verdicts.get("corrected")),
            claim.ours,
        )
        for one in found
        for claim, verdicts in one.verdicts
    ]


def markdown(found: Iterable[Judged]) -> str:
    """The table of claims, for the README."""
    lines = ["| claim | figure | as printed | corrected |", "|---|---|---|---|"]
    for words, figure, printed, corrected, ours in rows(found):
        words = words + (" *(ours)*" if ours else "")
        lines.append(f"| {words} | {figure} | {printed} | {corrected} |")
    return "\n".join(lines)


def insert(text: str, table: str) -> str:
    """A document with the table between its marks.

    >>> print(insert("a\\n<!-- claims -->\\nold\\n<!-- /claims -->\\nb", "new"))
    a
    <!-- claims -->
    new
    <!-- /claims -->
    b
    """
    before, _, rest = text.partition(START)
    _, _, after = rest.partition(END)
    return f"{before}{START}\n{table}\n{END}{after}"


def main(document: str, folder: str) -> None:
    """Write the table of a folder's claims between the marks of a document."""
    path = Path(document)
    path.write_text(insert(path.read_text("utf-8"), markdown(judged(Path(folder)))), "utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
