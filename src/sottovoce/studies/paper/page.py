"""Draw finished figures, and render all of them as one page: the story, then verdicts and data.

A point is the mean over the seeds, its bar the 95 % interval. Lines differ in colour, marker and
stroke; a method looks the same in every figure.
"""

from __future__ import annotations

import base64
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from sottovoce._version import __version__
from sottovoce.plan import Plan
from sottovoce.reports import charts
from sottovoce.reports.pages import format_ceiling, format_number, render_page
from sottovoce.studies.paper.definition import Figure, load_methods, load_setting, load_tables
from sottovoce.studies.paper.outcomes import (
    Judged,
    PointTable,
    Result,
    compute_interval,
    format_label,
    format_verdict,
    list_claims,
)

if TYPE_CHECKING:
    from markupsafe import Markup

_VARIANTS = {"printed": "as printed", "corrected": "corrected"}
_WORDS = ("holds", "contradicted", "undecided")


def render_figures(all_judged: Sequence[Judged]) -> str:
    """Return the page of all figures."""
    headline = describe_tally(all_judged)
    banner = (
        "A quick run: small federations, two seeds. It shows that everything works, and proves "
        "nothing about the paper."
    )
    return render_page(
        "paper.html.j2",
        title=headline,
        headline=headline,
        banner=banner if any(judged.result.quick for judged in all_judged) else "",
        version=__version__,
        corrected=_count_words(all_judged, "corrected"),
        own_claims=_count_words(all_judged, *_VARIANTS, ours=True),
        promise=describe_promise(all_judged),
        broken_orders=_find_broken_orders(all_judged),
        # The paper's claims first, then ours.
        claims=[
            [(words, ours), *cells]
            for words, *cells, ours in sorted(list_claims(all_judged), key=lambda row: row[-1])
        ],
        words=_WORDS,
        variants=_VARIANTS,
        format_verdict=format_verdict,
        signed=_format_signed,
        figures=[_describe_figure(judged) for judged in all_judged],
    )


def describe_tally(all_judged: Sequence[Judged]) -> str:
    """Return how many of the paper's claims hold as printed, in one sentence."""
    printed = _count_words(all_judged, "printed")
    if not printed["total"]:
        return "The figures that are ours."
    return (
        f"Of the paper’s claims, {printed['holds']} of {printed['total']} hold as printed; "
        f"{printed['contradicted']} contradicted, {printed['undecided']} undecided."
    )


def _count_words(
    all_judged: Sequence[Judged], *variants: str, ours: bool = False
) -> dict[str, int]:
    """Count the verdicts on the paper's claims, or on ours, in these variants."""
    words: list[str] = [
        verdict.word
        for judged in all_judged
        for claim, verdicts in judged.verdicts
        for variant, verdict in verdicts.items()
        if variant in variants and claim.ours == ours
    ]
    return {word: words.count(word) for word in _WORDS} | {"total": len(words)}


def describe_promise(all_judged: Sequence[Judged]) -> str:
    """Return what the paper's noise guarantees for what it is asked; "" if no figure shows it."""
    for judged in all_judged:
        table, axis = judged.result.tables.get("printed"), judged.figure.x
        if table is None or axis is None or axis.key != "privacy.epsilon":
            continue
        panel, lines, xs = table.axis("panel")[0], table.axis("line"), table.axis("x")
        if "udp" not in lines:
            continue
        first = judged.result.plan  # of the first panel
        U, K = first["data"]["clients"], first["rounds"].get("per_round")
        who = "all clients" if K in (U, None) else f"{K} of {U} clients"
        true = {x: format_ceiling(table.points[panel, "udp", x].epsilon, 3) for x in xs}
        text = ", ".join(f"{format_number(x)} → {epsilon}" for x, epsilon in true.items())
        story = (
            "The ε on the axes of the printed figures is what the paper’s formula promises, not "
            f"what holds. Asked for → true, original UDP, {who} in every round: {text}."
        )
        for search in [line for line in lines if line.startswith("optimal")][:1]:
            point = table.points[panel, search, xs[0]]
            if point.tried > 1:
                story += (
                    f" And the search behind “optimal UDP” shows the server {point.tried} runs: "
                    f"what guarantees ε = {format_ceiling(point.epsilon, 3)} for one of them "
                    f"guarantees {format_ceiling(point.epsilon_search, 3)} for all."
                )
        return story
    return ""


def _find_broken_orders(all_judged: Sequence[Judged]) -> list[str]:
    """Return the first λ of each panel of Fig. 2 at which the bound is below the true moment."""
    panels = next((judged.result.moments for judged in all_judged if judged.result.moments), [])
    orders = []
    for panel in panels:
        triples = zip(panel["order"], panel["bound"], panel["truth"], strict=True)
        orders.append(next((str(at) for at, bound, truth in triples if bound < truth), "never"))
    return orders if {*orders} - {"never"} else []


def _describe_figure(judged: Judged) -> dict[str, Any]:
    """Return what the template shows of one figure."""
    figure, tables = judged.figure, judged.result.tables
    pictures, both = enumerate(list_pictures(judged.result)), len(tables) > 1
    # Figures of one panel are shown in both variants: they fit beside one another.
    panels = len(figure.panel.values) if figure.panel is not None else 1
    return {
        "judged": judged,
        "paper": figure.paper if figure.paper != "ours" else "",
        "variants": [*((v, _VARIANTS[v]) for v in tables), ("both", "both")] if both else [],
        "shown_first": "printed" if panels > 1 else "both",
        "pictures": [(p, draw_panel(p, f"{figure.name}-{i}")) for i, p in pictures],
        "guarantees": [tabulate_guarantees(table) for table in tables.values()],
        "choices": _list_choices(judged),
        "files": _list_files(judged),
    }


def tabulate_guarantees(table: PointTable) -> dict[str, Any]:
    """Return the table of what each method really guarantees, for every ε asked for."""
    figure = table.figure
    keys = {name: getattr(getattr(figure, name), "key", "") for name in ("x", "line")}
    axis = next((name for name, key in keys.items() if key == "privacy.epsilon"), None)
    asked = table.axis(axis) if axis else [None]
    lines: dict[str, dict[Any, str]] = {}
    for (panel, line, x), point in table.points.items():
        if x not in table.axis("x"):
            continue
        at = {"x": x, "line": line}.get(axis or "")
        names = [format_label(figure, "panel", panel)] if len(table.axis("panel")) > 1 else []
        if axis != "line":
            names.append(format_label(figure, "line", line))
        value = format_ceiling(point.epsilon, 3)
        if point.tried > 1:
            value += f" a run, {format_ceiling(point.epsilon_search, 3)} for all {point.tried}"
        lines.setdefault(", ".join(n for n in names if n) or "every run", {})[at] = value
    delta = format_ceiling(next(iter(table.points.values())).delta)
    return {
        "variant": table.variant,
        "caption": f"ε that holds at δ = {delta} for one record, against the server",
        "head": ["", *("ε that holds" if a is None else f"ε = {a:g} asked" for a in asked)],
        "rows": [[name, *(line.get(a, "–") for a in asked)] for name, line in lines.items()],
    }


def _format_signed(value: float) -> str:
    return format_number(value, 3).replace("-", "−") if abs(value) > 1e-200 else "0"


def _list_choices(judged: Judged) -> list[str]:
    """Return what the paper leaves open, and what was chosen."""
    figure = judged.figure
    texts = list(figure.notes)
    if figure.setting:
        chosen = load_setting(figure.setting)
        texts = [chosen.about, *texts, *chosen.reasons]
    known, used = load_methods(), list[str]()
    if figure.line is not None and figure.line.key == "method":
        used += dict.fromkeys([*figure.line.values, *(figure.line.corrected or ())])
    used += [plan["method"] for plan in (figure.plan, figure.corrected) if "method" in plan]
    texts += [f"{known[name].name}: {known[name].about}" for name in used]
    for name in ("x", "line"):
        axis = getattr(figure, name)
        if axis is not None and axis.key != "method":
            texts.append(f"Swept {axis.key}: {', '.join(f'{v:g}' for v in axis.values)}.")
    points = [point for t in judged.result.tables.values() for point in t.points.values()]
    searched = Counter(point.chosen for point in points if point.chosen is not None)
    if searched:
        best = ", ".join(f"{T} ({n}×)" for T, n in sorted(searched.items()))
        texts.append(f"The searches chose T = {best}.")
    return texts


def _list_files(judged: Judged) -> list[tuple[str, str, str, str]]:
    """Return text, file name, media type and content of what can be downloaded from the page."""
    name = judged.figure.name
    files = [
        ("data (JSON)", f"{name}.json", "application/json", judged.result.text()),
        ("definition (TOML)", f"{name}.toml", "application/toml", judged.figure.text),
    ]
    if judged.result.plan:
        plan = Plan(**judged.result.plan).to_toml()
        files.append(("first plan (TOML)", f"{name}-plan.toml", "application/toml", plan))
    return files


_SIZE, _RASTER = (4.3, 3.15), (4.3, 1.75)
_STROKES: dict[str, Any] = {"solid": "solid", "dashed": (0, (5, 2)), "dotted": (0, (1.5, 1.5))}
Look = tuple[str, str, Any]  # colour, marker, stroke
_NAMES = {
    "loss": "test loss",
    "accuracy": "test accuracy (%)",
    "rounds": "rounds used",
    "horizon": "horizon T",
}


@dataclass(frozen=True)
class Picture:
    """One panel: which variant it belongs to, its title, and how it is painted."""

    variant: str
    title: str
    words: str
    paint: Callable[[Any], None]  # on axes
    raster: bool = False


def list_pictures(result: Result) -> list[Picture]:
    """Return every panel of a figure, variant after variant."""
    figure = result.figure
    if figure.kind == "moments":
        return [_make_moment_picture(i, panel) for i, panel in enumerate(result.moments)]
    drawn = []
    for variant, table in result.tables.items():
        if figure.kind == "prototypes":
            drawn += [_make_digits_picture(table, line) for line in table.axis("line")]
            continue
        panels = table.axis("panel")
        for i, panel in enumerate(panels):
            name = format_label(figure, "panel", panel)
            letter = f"({'abcdefgh'[i]}) " if len(panels) > 1 else ""
            title = f"{letter}{name}".strip()
            paint = _paint_horizons if figure.measure == "horizon" else _paint_lines
            words = f"{figure.title}, {_VARIANTS[variant]}" + (f", {title}" if title else "")
            drawn.append(Picture(variant, title, words, partial(paint, table=table, panel=panel)))
    return drawn


def draw_panel(picture: Picture, name: str) -> Markup:
    """Draw a panel as an element of the page."""
    size = _RASTER if picture.raster else _SIZE
    paint = partial(_paint_picture, picture=picture)
    return charts.draw_svg(name, picture.words, paint, size=size)


def draw_file(pictures: list[Picture]) -> str:
    """Draw all panels of a figure in one file, a row for each variant."""
    rows: dict[str, list[Picture]] = {}
    for picture in pictures:
        rows.setdefault(picture.variant, []).append(picture)
    columns = max(map(len, rows.values()))
    if columns == 4:  # four in a row are too small to print
        only = next(iter(rows.values()))
        rows, columns = {"a": only[:2], "b": only[2:]}, 2
    tall = _RASTER[1] if pictures[0].raster else _SIZE[1]

    def paint(page: Any) -> None:
        parts = page.subfigures(len(rows), columns, squeeze=False)
        for row, panels in zip(parts, rows.values(), strict=True):
            for subfigure, picture in zip(row, panels, strict=False):
                variant = _VARIANTS.get(picture.variant, "")
                titles = [text for text in (picture.title, variant) if text]
                subfigure.suptitle(", ".join(titles), fontsize=9.6, color=charts.INK)
                _paint_picture(subfigure, picture)

    size = (4.3 * columns, (tall + 0.25) * len(rows))
    return charts.draw_svg("figure", "", paint, size=size, inline=False)


def _paint_picture(page: Any, picture: Picture) -> None:
    if picture.raster:
        picture.paint(page)
        return
    picture.paint(ax := page.add_subplot())
    charts.tidy_axes(ax)
    handles, names = ax.get_legend_handles_labels()
    if handles:
        columns = 2 if max(map(len, names)) > 12 else min(5, len(names))
        style = {"fontsize": 8.6, "handlelength": 2.2, "columnspacing": 1.2, "labelspacing": 0.3}
        place = {"loc": "outside lower center", "borderaxespad": 0.1}
        page.legend(handles, names, ncols=columns, **place, **style)


def choose_look(figure: Figure, line: Any, index: int) -> Look:
    """Return colour, marker and stroke of a line."""
    if figure.line is not None and figure.line.key == "method":
        return find_look("method", str(line).removesuffix("-short"))
    return find_look("level", str(index % len(load_tables("looks")["level"])))


def find_look(kind: str, name: str) -> Look:
    """Return colour, marker and stroke of a line of this kind, by its name in `looks.toml`."""
    colour, marker, stroke = load_tables("looks")[kind][name]
    return getattr(charts, colour.upper()), marker, _STROKES[stroke]


def _paint_lines(ax: Any, table: PointTable, panel: Any) -> None:
    figure, xs = table.figure, table.axis("x")
    scale = 100 if figure.measure == "accuracy" else 1
    seen = []
    for i, line in enumerate(table.axis("line")):
        points = [(x, table.points[panel, line, x]) for x in xs]
        intervals = [compute_interval(scale * point.values[figure.measure]) for _, point in points]
        at = [point.epsilon if figure.true_epsilon else x for x, point in points]
        mean, low, high = np.array([(i.mean, i.low, i.high) for i in intervals]).T
        spread = np.abs(np.stack([mean - low, high - mean]))
        name = format_label(figure, "line", line)
        draw_error_bars(ax, at, mean, spread, choose_look(figure, line, i), name)
        seen.append(mean)
    values = np.concatenate(seen)
    finite = values[np.isfinite(values)]
    if figure.measure == "loss" and finite.size and finite.max() > 3 * finite.min() > 0:
        ax.set_yscale("log")
        low, high = float(finite.min()), float(finite.max())
        ticks = [m * 10.0**e for e in range(-4, 5) for m in (1, 2, 3, 5, 7)]
        kept = [t for t in ticks if 0.8 * low <= t <= 1.3 * high]
        ax.set_yticks(kept, [f"{t:g}" for t in kept])
        ax.minorticks_off()
    if figure.x is not None:
        if figure.x.scale == "log":
            ax.set_xscale("log")
        if figure.true_epsilon:
            ax.locator_params(axis="x", nbins=7, integer=True)
        else:
            ax.set_xticks(xs, [f"{x:g}" for x in xs])
        ax.minorticks_off()
        ax.set_xlabel(figure.x.label)
    ax.set_ylabel(_NAMES[figure.measure])


def draw_error_bars(ax: Any, x: Any, y: Any, spread: Any, look: Look, name: str) -> None:
    """Draw a line with a marker and an error bar at every point."""
    colour, marker, stroke = look
    ax.errorbar(
        x, y, yerr=spread, color=colour, marker=marker, markersize=4.5, linestyle=stroke,
        elinewidth=0.8, capsize=1.8, label=name,
    )  # fmt: skip


def _paint_horizons(ax: Any, table: PointTable, panel: Any) -> None:
    """Draw T over the rounds of the first seed's runs, until the rounds done reach it."""
    longest = 1
    for i, line in enumerate(table.axis("line")):
        point = table.points[panel, line, None]
        done = int(point.values["rounds"][0])
        steps = (point.horizon[0] if point.horizon else None) or [(0, done)]
        t = [*(step[0] for step in steps), done]
        T = [*(step[1] for step in steps), steps[-1][1]]
        colour, marker, stroke = choose_look(table.figure, line, i)
        name = format_label(table.figure, "line", line)
        ax.plot(t, T, color=colour, linestyle=stroke, drawstyle="steps-post", label=name)
        ax.plot(done, T[-1], marker=marker, color=colour, markersize=5)
        longest = max(longest, done)
    ends, dotted = (0, longest), _STROKES["dotted"]
    ax.plot(ends, ends, color=charts.MUTED, linewidth=0.9, linestyle=dotted)
    ax.set(xlabel="rounds done", ylabel=_NAMES["horizon"], ylim=(0, None), xlim=(0, None))


def _make_moment_picture(i: int, panel: dict[str, Any]) -> Picture:
    order = np.array(panel["order"])
    bound, truth = np.array(panel["bound"]), np.array(panel["truth"])
    below = order[bound < truth]

    def paint(ax: Any) -> None:
        ax.plot(order, bound, color=charts.BLUE, label="the paper’s bound")
        ax.plot(
            order, truth, color=charts.ORANGE, linestyle=_STROKES["dashed"], label="true log moment"
        )
        if len(below):
            ax.axvspan(below[0] - 0.5, order[-1], color=charts.ORANGE, alpha=0.13, linewidth=0)
            style = {"transform": ax.transAxes, "ha": "right", "color": charts.INK, "fontsize": 8.6}
            ax.text(0.98, 0.06, f"no bound from λ = {below[0]}", **style)
        ax.set(xlabel="order λ", ylabel="log moment", yscale="log", xlim=(order[0], order[-1]))
        ax.minorticks_off()

    q, n, U = panel["sampling"], panel["samples"], panel["clients"]
    title = f"({'abcdefgh'[i]}) q = {q:g}, n = {n}, U = {U}"
    ends = f"The bound lies below the truth from λ = {below[0]} on." if len(below) else "It holds."
    return Picture("", title, f"Bound and true moment, {title}. {ends}", paint)


def _make_digits_picture(table: PointTable, line: Any) -> Picture:
    """Draw the ten pictures of a model in two rows, for the first seed."""
    name = format_label(table.figure, "line", line)

    def paint(page: Any) -> None:
        pixels = base64.b64decode(table.points[None, line, None].pictures[0])
        drawn = np.frombuffer(pixels, dtype=np.uint8).reshape(10, -1) / 255
        side = int(np.sqrt(drawn.shape[1]))
        grid = page.subplots(2, 5, gridspec_kw={"wspace": 0.0, "hspace": 0.0})
        for ax, pixels in zip(grid.flat, drawn, strict=True):
            darkest = max(float(pixels.max()), 1e-9)  # each at full contrast
            ax.imshow(1 - pixels.reshape(side, side) / darkest, cmap="gray", vmin=0, vmax=1)
            ax.axis("off")

    words = f"{table.figure.title}, {_VARIANTS[table.variant]}: {name}, digits 0 to 9"
    return Picture(table.variant, name, words, paint, raster=True)
