# ruff: noqa: E501
"""All figures as one page: the story first, then each figure with its verdicts, data and plan.

One file that asks nothing of the network and runs no script: the two switches (as printed or
corrected, light or dark) are radio buttons that the style sheet looks at.
"""

from __future__ import annotations

import base64
import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

from sottovoce._version import __version__
from sottovoce.plan import Plan
from sottovoce.reports.pages import document, escape, format_ceiling, format_number, sheet
from sottovoce.studies.paper import draw
from sottovoce.studies.paper.checks import Judged, Verdict, rows, shown
from sottovoce.studies.paper.definition import Claim, methods, setting
from sottovoce.studies.paper.outcomes import PointTable, label

# What all figures say together, in a few sentences; every number is counted or computed.


def tally(found: Sequence[Judged]) -> str:
    """How many of the paper's claims hold, as printed and corrected."""
    printed = _count(found, "printed")
    total = sum(printed.values())
    if not total:
        return "The figures that are ours."
    return (
        f"Of the paper’s claims, {printed['holds']} of {total} hold as printed; "
        f"{printed['contradicted']} contradicted, {printed['undecided']} undecided."
    )


def _count(found: Sequence[Judged], variant: str) -> Counter[str]:
    return Counter(
        verdicts[variant].word
        for one in found
        for claim, verdicts in one.verdicts
        if variant in verdicts and not claim.ours
    )


def lead(found: Sequence[Judged]) -> list[str]:
    """The story, paragraph by paragraph, as HTML."""
    corrected = _count(found, "corrected")
    ours = Counter(
        verdict.word
        for one in found
        for claim, verdicts in one.verdicts
        if claim.ours
        for verdict in verdicts.values()
    )
    texts = [
        "Every experiment of Wei et al., <em>User-Level Privacy-Preserving Federated "
        "Learning</em>, twice: <strong>as printed</strong>, with the paper’s noise, its rule for T "
        "and its test set steering; and <strong>corrected</strong>, at an exact guarantee, with "
        "smoothed CRD and a public validation set apart from the test set. A claim "
        "<em>holds</em> only if the 95 % interval of its paired differences over the seeds "
        "excludes zero at every point; it is <em>contradicted</em> if some point excludes zero "
        "on the other side."
    ]
    if sum(corrected.values()):
        texts.append(
            f"Corrected, {corrected['holds']} of {sum(corrected.values())} of them hold; "
            f"{corrected['contradicted']} contradicted, {corrected['undecided']} undecided. Of "
            f"what we claim ourselves {ours['holds']} of {sum(ours.values())} checks hold; "
            f"{ours['contradicted']} contradicted, {ours['undecided']} undecided."
        )
    promised = _promised(found)
    if promised:
        texts.append(promised)
    broken = [one for one in found if one.result.moments]
    if broken:
        orders = [
            next((lam for lam, b, t in zip(p["order"], p["bound"], p["truth"], strict=True)
                  if b < t), None)
            for p in broken[0].result.moments
        ]  # fmt: skip
        if any(orders):
            shown = ", ".join("never" if o is None else str(o) for o in orders)
            texts.append(
                "The moment bound that the noise rests on is no bound: in the four panels of "
                f"Fig. 2 it falls below the true moment from λ = {shown} on."
            )
    return texts


def _promised(found: Sequence[Judged]) -> str:
    """What the paper's noise guarantees for what it is asked, from the printed comparisons."""
    for one in found:
        table = one.tables.get("printed")
        axis = one.figure.x
        if table is None or axis is None or axis.key != "privacy.epsilon":
            continue
        panel = table.axis("panel")[0]
        if "udp" not in table.axis("line"):
            continue
        pairs = [(x, table.points[panel, "udp", x].epsilon) for x in table.axis("x")]
        search = next((line for line in table.axis("line") if line.startswith("optimal")), None)
        text = ", ".join(
            f"{format_number(asked)} → {format_ceiling(true, 3)}" for asked, true in pairs
        )
        story = (
            "The ε on the axes of the printed figures is what the paper’s formula promises, not "
            f"what holds. Asked for → true, original UDP, all clients in every round: {text}."
        )
        if search is not None:
            point = table.points[panel, search, pairs[0][0]]
            if point.tried > 1:
                story += (
                    f" And the search behind “optimal UDP” shows the server {point.tried} runs: "
                    f"what guarantees ε = {format_ceiling(point.epsilon, 3)} for one of them guarantees "
                    f"{format_ceiling(point.epsilon_search, 3)} for all."
                )
        return escape(story)
    return ""


_VARIANTS = {"printed": "as printed", "corrected": "corrected"}


def render(found: Sequence[Judged]) -> str:
    """The page as text."""
    quick = any(one.result.quick for one in found)
    banner = (
        '<p class="banner" role="note">A quick run: small federations, two seeds. It shows that '
        "everything works, and proves nothing about the paper.</p>"
        if quick
        else ""
    )
    links = "".join(
        f'<li><a href="#{one.figure.name}">{escape(_short(one))}</a></li>' for one in found
    )
    body = f"""<header>
<div class="topbar"><p class="eyebrow"><span>sottovoce</span> every figure of the paper, with the \
truth beside the claim</p>
{_switch("theme", "Colours", {"auto": "auto", "light": "light", "dark": "dark"}, "auto")}</div>
<h1>{escape(tally(found))}</h1>
{banner}
</header>
<main>
{"".join(f'<p class="lead">{text}</p>' for text in lead(found))}
<nav aria-label="Figures"><ul>{links}</ul></nav>
<section aria-labelledby="claims">
<h2 id="claims">What was claimed, what is true</h2>
{_claims(found)}
</section>
{"".join(_figure(one) for one in found)}
</main>
<footer><p>Written by sottovoce {escape(__version__)} from the results beside this page. It loads \
nothing from the network.</p></footer>"""
    return document(title=tally(found), css=_css(), body=body)


def _short(one: Judged) -> str:
    return one.figure.paper if one.figure.paper != "ours" else one.figure.name


def _css() -> str:
    """The style of a run's page, ours, and both colour schemes to choose from."""
    base = sheet("sottovoce.reports", "page.css")
    own = sheet("sottovoce.studies.paper", "page.css")
    schemes = re.findall(r":root \{(.*?)\}", base, flags=re.DOTALL)
    chosen = ""
    for name, scheme in zip(("light", "dark"), schemes, strict=True):
        colours = re.sub(r"color-scheme:[^;]*;", "", scheme)
        chosen += (
            f"@media screen {{ :root:has(#theme-{name}:checked) "
            f"{{ color-scheme: {name}; {colours} }} }}\n"
        )
    return base + own + chosen


def _switch(name: str, legend: str, options: dict[str, str], on: str) -> str:
    labels = "".join(
        f'<label><input type="radio" name="{name}" id="{name}-{value}" value="{value}"'
        f"{' checked' if value == on else ''}>{text}</label>"
        for value, text in options.items()
    )
    return f'<fieldset class="choice"><legend>{escape(legend)}</legend>{labels}</fieldset>'


def _word(text: str) -> str:
    """The first word of a shown verdict as a badge."""
    word, _, numbers = text.partition(" ")
    if word not in ("holds", "contradicted", "undecided"):
        return escape(text)
    return f'<span class="word {word}">{word}</span> <small>{escape(numbers)}</small>'


def _claims(found: Sequence[Judged]) -> str:
    every = sorted(rows(found), key=lambda row: row[-1])  # the paper's first, then ours
    body = "".join(
        f'<tr><th scope="row">{escape(words)}{" <span class=ours>(ours)</span>" * ours}</th>'
        f"<td>{escape(figure)}</td><td>{_word(printed)}</td><td>{_word(corrected)}</td></tr>"
        for words, figure, printed, corrected, ours in every
    )
    head = "".join(
        f'<th scope="col">{text}</th>' for text in ("claim", "figure", "as printed", "corrected")
    )
    return (
        '<div class="card scroll" role="region" aria-label="Claims" tabindex="0">'
        '<table class="claimed"><caption class="hidden">Claims and verdicts</caption>'
        f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
        '<p class="made">In brackets: the mean difference and its 95 % interval over the seeds, '
        "positive as claimed; with several points, at how many the claim holds or is contradicted "
        "by itself, and the range of the means.</p>"
    )


def _figure(one: Judged) -> str:
    figure = one.figure
    both = len(one.tables) > 1
    options = {v: _VARIANTS[v] for v in one.tables} | {"both": "both"}
    # One panel each: both fit beside one another.
    first = "printed" if figure.panel is not None and len(figure.panel.values) > 1 else "both"
    switch = _switch(f"{figure.name}-variant", "Variant", options, first) if both else ""
    name = f"{figure.paper}: " if figure.paper != "ours" else ""
    return f"""
<section class="figure" id="{figure.name}" aria-labelledby="{figure.name}-title">
<h2 id="{figure.name}-title">{escape(name + figure.title)}</h2>
<div class="head"><p>{escape(figure.caption)}</p>{switch}</div>
<div class="figures">{_pictures(one)}</div>
<ul class="claims">{"".join(_claim(c, v, both) for c, v in one.verdicts)}</ul>
{_guarantees(one)}{_breaks(one)}{_points(one)}{_choices(one)}
{_made(one)}
</section>"""


def _pictures(one: Judged) -> str:
    drawn = draw.pictures(one.figure, one.tables, one.result.moments)
    cells = []
    for i, picture in enumerate(drawn):
        kind = f" {picture.variant}" if len(one.tables) > 1 else ""
        variant = _VARIANTS[picture.variant] if kind else ""
        title = " <small>".join(escape(text) for text in (picture.title, variant) if text)
        title = f"<h3>{title}{'</small>' if '<small>' in title else ''}</h3>" if title else ""
        cells.append(
            f'<figure class="card{kind}">{title}'
            f"{draw.element(picture, f'{one.figure.name}-{i}')}</figure>\n"
        )
    return "".join(cells)


def _claim(claim: Claim, verdicts: dict[str, Verdict], both: bool) -> str:
    ours = ' <span class="ours">(ours)</span>' if claim.ours else ""
    items = []
    for variant, verdict in verdicts.items():
        where = variant if both else ""
        numbers = shown(verdict).partition(" ")[2]
        items.append(
            f'<li class="{where}"><span class="word {verdict.word}">{verdict.word}</span>'
            f"<span>{escape(claim.words)}{ours}</span>"
            f'<span class="numbers">{_VARIANTS[variant] + " " if both else ""}{escape(numbers)}'
            "</span></li>"
        )
    return "".join(items)


def _guarantees(one: Judged) -> str:
    """What each method really guarantees, for every ε asked for."""
    parts = []
    for variant, table in one.tables.items():
        made = _guaranteed(table)
        kind = f' class="{variant}"' if len(one.tables) > 1 else ""
        parts.append(f"<div{kind}>{made}</div>")
    if not parts:
        return ""
    return (
        '<details class="more"><summary>What each really guarantees</summary>'
        f"{''.join(parts)}</details>"
    )


def _guaranteed(table: PointTable) -> str:
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
    delta = next(iter(table.points.values())).delta
    head = "".join(
        f'<th scope="col" class="n">{"ε that holds" if a is None else f"ε = {a:g} asked"}</th>'
        for a in asked
    )
    body = "".join(
        f'<tr><th scope="row">{escape(name)}</th>'
        + "".join(f'<td class="n">{escape(own.get(a, "–"))}</td>' for a in asked)
        + "</tr>"
        for name, own in lines.items()
    )
    caption = f"ε that holds at δ = {format_ceiling(delta)} for one record, against the server"
    return (
        f'<p>{escape(caption)}, {_VARIANTS[table.variant]}:</p><div class="card scroll" '
        f'role="region" aria-label="{escape(caption)}" tabindex="0"><table>'
        f'<thead><tr><th scope="col"></th>{head}</tr></thead><tbody>{body}</tbody></table></div>'
    )


def _breaks(one: Judged) -> str:
    if not one.result.moments:
        return ""
    clips = list(one.result.moments[0]["breaks"])
    head = "".join(f'<th scope="col" class="n">C = {float(c):g}</th>' for c in clips)
    body = "".join(
        f'<tr><th scope="row">({"abcdefgh"[i]}) q = {panel["sampling"]:g}, n = {panel["samples"]}'
        "</th>"
        + "".join(f'<td class="n">{panel["breaks"][c] or "never"}</td>' for c in clips)
        + "</tr>"
        for i, panel in enumerate(one.result.moments)
    )
    return (
        '<details class="more" open><summary>The first λ at which the bound is none</summary>'
        '<div class="card scroll" role="region" aria-label="First break" tabindex="0"><table>'
        f'<thead><tr><th scope="col"></th>{head}</tr></thead><tbody>{body}</tbody></table></div>'
        "</details>"
    )


def _points(one: Judged) -> str:
    """Every point of every claim with its interval."""
    lines = []
    for claim, verdicts in one.verdicts:
        for variant, verdict in verdicts.items():
            for point in verdict.points:
                found = point.interval
                lines.append(
                    f'<tr><th scope="row">{escape(claim.words)}</th>'
                    f"<td>{_VARIANTS.get(variant, '')}</td><td>{escape(point.at)}</td>"
                    f'<td class="n">{_number(found.mean)}</td>'
                    f'<td class="n">{_number(found.low)} to {_number(found.high)}</td>'
                    f"<td>{found.word}</td></tr>"
                )
    head = "".join(
        f'<th scope="col"{kind}>{text}</th>'
        for text, kind in (
            ("claim", ""),
            ("", ""),
            ("at", ""),
            ("mean", ' class="n"'),
            ("95 % interval", ' class="n"'),
            ("alone", ""),
        )
    )
    return (
        '<details class="more"><summary>Every point of every claim (positive: as claimed)</summary>'
        '<div class="card scroll" role="region" aria-label="Points" tabindex="0"><table>'
        f"<thead><tr>{head}</tr></thead><tbody>{''.join(lines)}</tbody></table></div></details>"
    )


def _number(value: float) -> str:
    return format_number(value, 3).replace("-", "−") if abs(value) > 1e-200 else "0"


def _choices(one: Judged) -> str:
    """What the paper leaves open, and what was chosen."""
    figure = one.figure
    texts = list(figure.notes)
    if figure.setting:
        own = setting(figure.setting)
        texts = [own.about, *texts, *own.reasons]
    known = methods()
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
    items = "".join(f"<li>{escape(text)}</li>" for text in texts)
    return (
        '<details class="more"><summary>What was chosen, and why</summary>'
        f"<ul>{items}</ul></details>"
    )


def _made(one: Judged) -> str:
    result, name = one.result, one.figure.name
    links = [("data (JSON)", f"{name}.json", "application/json", result.text())]
    links.append(("definition (TOML)", f"{name}.toml", "application/toml", one.figure.text))
    if result.plan:
        plan = Plan(**result.plan).to_toml()
        links.append(("first plan (TOML)", f"{name}-plan.toml", "application/toml", plan))
    shown_links = "".join(
        f'<a download="{file}" href="data:{kind};base64,'
        f'{base64.b64encode(content.encode()).decode()}">{text}</a>'
        for text, file, kind, content in links
    )
    by = f" Made by {escape('; '.join(result.made))}." if result.made else ""
    return f'<p class="made">{shown_links}<br>Rerun: <code>{escape(result.command)}</code>.{by}</p>'
