"""Render all figures as one page: the story first, then each figure with its verdicts and data."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from sottovoce._version import __version__
from sottovoce.plan import Plan
from sottovoce.reports.pages import format_ceiling, format_number, render_page
from sottovoce.studies.paper import draw
from sottovoce.studies.paper.checks import Judged, format_verdict, list_claims
from sottovoce.studies.paper.definition import load_methods, load_setting
from sottovoce.studies.paper.outcomes import PointTable, label

_VARIANTS = {"printed": "as printed", "corrected": "corrected"}
_WORDS = ("holds", "contradicted", "undecided")


def render_figures(found: Sequence[Judged]) -> str:
    """Return the page of all figures."""
    headline = describe_tally(found)
    banner = (
        "A quick run: small federations, two seeds. It shows that everything works, and proves "
        "nothing about the paper."
    )
    own_claims = (
        verdict.word
        for one in found
        for claim, verdicts in one.verdicts
        if claim.ours
        for verdict in verdicts.values()
    )
    return render_page(
        "paper.html.j2",
        title=headline,
        headline=headline,
        banner=banner if any(one.result.quick for one in found) else "",
        version=__version__,
        corrected=_count_words(_list_words(found, "corrected")),
        own_claims=_count_words(list(own_claims)),
        promise=describe_promise(found),
        broken_orders=_find_broken_orders(found),
        claims=[
            [
                {"words": words, "ours": ours},
                figure,
                _split_verdict(printed),
                _split_verdict(corrected),
            ]
            # The paper's claims first, then ours.
            for words, figure, printed, corrected, ours in sorted(
                list_claims(found), key=lambda r: r[-1]
            )
        ],
        figures=[_describe_figure(one) for one in found],
    )


def describe_tally(found: Sequence[Judged]) -> str:
    """Return how many of the paper's claims hold as printed, in one sentence."""
    printed = _count_words(_list_words(found, "printed"))
    if not printed["total"]:
        return "The figures that are ours."
    return (
        f"Of the paper’s claims, {printed['holds']} of {printed['total']} hold as printed; "
        f"{printed['contradicted']} contradicted, {printed['undecided']} undecided."
    )


def _list_words(found: Sequence[Judged], variant: str) -> list[str]:
    """Return the verdicts on the paper's claims in one variant."""
    return [
        verdicts[variant].word
        for one in found
        for claim, verdicts in one.verdicts
        if variant in verdicts and not claim.ours
    ]


def _count_words(words: Sequence[str]) -> dict[str, int]:
    counted = Counter(words)
    return {word: counted[word] for word in _WORDS} | {"total": len(words)}


def describe_promise(found: Sequence[Judged]) -> str:
    """Return what the paper's noise guarantees for what it is asked; "" if no figure shows it."""
    for one in found:
        table, axis = one.tables.get("printed"), one.figure.x
        if table is None or axis is None or axis.key != "privacy.epsilon":
            continue
        panel = table.axis("panel")[0]
        if "udp" not in table.axis("line"):
            continue
        pairs = [(x, table.points[panel, "udp", x].epsilon) for x in table.axis("x")]
        search = next((line for line in table.axis("line") if line.startswith("optimal")), None)
        text = ", ".join(f"{format_number(x)} → {format_ceiling(true, 3)}" for x, true in pairs)
        story = (
            "The ε on the axes of the printed figures is what the paper’s formula promises, not "
            f"what holds. Asked for → true, original UDP, all clients in every round: {text}."
        )
        if search is not None:
            point = table.points[panel, search, pairs[0][0]]
            if point.tried > 1:
                story += (
                    f" And the search behind “optimal UDP” shows the server {point.tried} runs: "
                    f"what guarantees ε = {format_ceiling(point.epsilon, 3)} for one of them "
                    f"guarantees {format_ceiling(point.epsilon_search, 3)} for all."
                )
        return story
    return ""


def _find_broken_orders(found: Sequence[Judged]) -> list[str]:
    """Return the first λ of each panel of Fig. 2 at which the bound is below the true moment."""
    panels = next((one.result.moments for one in found if one.result.moments), [])
    orders = []
    for panel in panels:
        pairs = zip(panel["order"], panel["bound"], panel["truth"], strict=True)
        orders.append(next((order for order, bound, truth in pairs if bound < truth), None))
    if not any(orders):
        return []
    return ["never" if order is None else str(order) for order in orders]


def _split_verdict(text: str) -> dict[str, str]:
    """Return the word and the numbers of a formatted verdict."""
    word, _, numbers = text.partition(" ")
    return {"text": text, "word": word if word in _WORDS else "", "numbers": numbers}


def _describe_figure(one: Judged) -> dict[str, Any]:
    """Return what the template shows of one figure."""
    figure, result = one.figure, one.result
    both = len(one.tables) > 1
    # Figures of one panel are shown in both variants: they fit beside one another.
    panels = len(figure.panel.values) if figure.panel is not None else 1
    paper = figure.paper if figure.paper != "ours" else ""
    return {
        "name": figure.name,
        "link": paper or figure.name,
        "title": f"{paper}: {figure.title}" if paper else figure.title,
        "caption": figure.caption,
        "variants": [*((v, _VARIANTS[v]) for v in one.tables), ("both", "both")] if both else [],
        "shown_first": "printed" if panels > 1 else "both",
        "pictures": _draw_pictures(one),
        "claims": [
            {
                "variant": variant,
                "variant_name": _VARIANTS[variant],
                "word": verdict.word,
                "words": claim.words,
                "ours": claim.ours,
                "numbers": format_verdict(verdict).partition(" ")[2],
            }
            for claim, verdicts in one.verdicts
            for variant, verdict in verdicts.items()
        ],
        "guarantees": [tabulate_guarantees(table) for table in one.tables.values()],
        "breaks": _tabulate_breaks(result.moments),
        "points": _list_points(one),
        "choices": _list_choices(one),
        "files": _list_files(one),
        "command": result.command,
        "made": result.made,
    }


def _draw_pictures(one: Judged) -> list[dict[str, str]]:
    both = len(one.tables) > 1
    pictures = []
    for i, picture in enumerate(draw.pictures(one.figure, one.tables, one.result.moments)):
        variant = _VARIANTS[picture.variant] if both else ""
        pictures.append(
            {
                "variant": picture.variant if both else "",
                "title": picture.title or variant,
                "hint": variant if picture.title else "",
                "drawing": draw.draw_panel(picture, f"{one.figure.name}-{i}"),
            }
        )
    return pictures


def tabulate_guarantees(table: PointTable) -> dict[str, Any]:
    """Return the table of what each method really guarantees, for every ε asked for."""
    figure = table.figure
    axis = next(
        (
            name
            for name in ("x", "line")
            if getattr(figure, name) is not None and getattr(figure, name).key == "privacy.epsilon"
        ),
        None,
    )
    asked = table.axis(axis) if axis else [None]
    lines: dict[str, dict[Any, str]] = {}
    for (panel, line, x), point in table.points.items():
        if x not in table.axis("x"):
            continue
        at = {"x": x, "line": line}.get(axis or "")
        names = [label(figure, "panel", panel)] if len(table.axis("panel")) > 1 else []
        if axis != "line":
            names.append(label(figure, "line", line))
        value = format_ceiling(point.epsilon, 3)
        if point.tried > 1:
            value += f" a run, {format_ceiling(point.epsilon_search, 3)} for all {point.tried}"
        lines.setdefault(", ".join(n for n in names if n) or "every run", {})[at] = value
    delta = format_ceiling(next(iter(table.points.values())).delta)
    return {
        "variant": table.variant,
        "variant_name": _VARIANTS[table.variant],
        "caption": f"ε that holds at δ = {delta} for one record, against the server",
        "head": ["", *("ε that holds" if a is None else f"ε = {a:g} asked" for a in asked)],
        "rows": [[name, *(line.get(a, "–") for a in asked)] for name, line in lines.items()],
    }


def _tabulate_breaks(moments: list[dict[str, Any]]) -> dict[str, Any] | None:
    """Return the first λ at which the paper's bound is below the truth, for every panel and C."""
    if not moments:
        return None
    clips = list(moments[0]["breaks"])
    return {
        "head": ["", *(f"C = {float(clip):g}" for clip in clips)],
        "rows": [
            [
                f"({'abcdefgh'[i]}) q = {panel['sampling']:g}, n = {panel['samples']}",
                *(panel["breaks"][clip] or "never" for clip in clips),
            ]
            for i, panel in enumerate(moments)
        ],
    }


def _list_points(one: Judged) -> list[list[str]]:
    """Return every point of every claim with its interval."""
    return [
        [
            claim.words,
            _VARIANTS.get(variant, ""),
            point.at,
            _format_signed(point.interval.mean),
            f"{_format_signed(point.interval.low)} to {_format_signed(point.interval.high)}",
            point.interval.word,
        ]
        for claim, verdicts in one.verdicts
        for variant, verdict in verdicts.items()
        for point in verdict.points
    ]


def _format_signed(value: float) -> str:
    return format_number(value, 3).replace("-", "−") if abs(value) > 1e-200 else "0"


def _list_choices(one: Judged) -> list[str]:
    """Return what the paper leaves open, and what was chosen."""
    figure = one.figure
    texts = list(figure.notes)
    if figure.setting:
        chosen = load_setting(figure.setting)
        texts = [chosen.about, *texts, *chosen.reasons]
    known = load_methods()
    if figure.line is not None and figure.line.key == "method":
        used = dict.fromkeys([*figure.line.values, *(figure.line.corrected or ())])
        texts += [f"{known[name].name}: {known[name].about}" for name in used]
    for table in (figure.plan, figure.corrected):
        if "method" in table:
            method = known[table["method"]]
            texts.append(f"{method.name}: {method.about}")
    for name in ("x", "line"):
        axis = getattr(figure, name)
        if axis is not None and axis.key != "method":
            texts.append(f"Swept {axis.key}: {', '.join(f'{v:g}' for v in axis.values)}.")
    searched = Counter(
        point.chosen
        for table in one.tables.values()
        for point in table.points.values()
        if point.chosen is not None
    )
    if searched:
        best = ", ".join(f"{T} ({n}×)" for T, n in sorted(searched.items()))
        texts.append(f"The searches chose T = {best}.")
    return texts


def _list_files(one: Judged) -> list[tuple[str, str, str, str]]:
    """Return text, file name, media type and content of what can be downloaded from the page."""
    name = one.figure.name
    files = [
        ("data (JSON)", f"{name}.json", "application/json", one.result.text()),
        ("definition (TOML)", f"{name}.toml", "application/toml", one.figure.text),
    ]
    if one.result.plan:
        plan = Plan(**one.result.plan).to_toml()
        files.append(("first plan (TOML)", f"{name}-plan.toml", "application/toml", plan))
    return files
