"""The frontier as a picture, accuracy against the ε that holds, and as a table."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sottovoce.data.files import write_file
from sottovoce.privacy.budget import shown
from sottovoce.reports.svg import BLUE, GREEN, INK, MUTED, ORANGE, PURPLE, svg, tidy
from sottovoce.studies.paper.frontier import NAME, OPEN, Panel, Point, panels

MOST_LISTED = 8  # the largest ε of the paper's curves that the table lists; the picture shows all
_LOOKS: dict[str, tuple[str, str, Any]] = {
    "paper": (ORANGE, "o", (0, (5, 2))),
    "corrected": (MUTED, "s", "solid"),
    "ours": (BLUE, "D", "solid"),
    "ours, fewer": (GREEN, "^", "solid"),
    "adult": (PURPLE, "v", "solid"),
    "rehearsed": (GREEN, "^", "solid"),
}


def write(folder: Path, points: Sequence[Point]) -> None:
    """frontier.svg and frontier.md."""
    write_file(folder / f"{NAME}.md", table(points).encode())
    write_file(folder / f"{NAME}.svg", picture(points).encode())


def table(points: Sequence[Point]) -> str:
    """One line for each point: panel, curve, true ε, accuracy over the seeds, rounds, what is set.

    >>> table([]).splitlines()[1]
    '|---|---|---|---|---|---|'
    """
    lines = [
        "| data | how | ε that holds | test accuracy | rounds | T₀, η, C, after the noise |",
        "|---|---|---|---|---|---|",
    ]
    for panel in panels():
        for curve in panel.curves:
            for point in points:
                theirs = point.curve in ("paper", "corrected")
                listed = point.asked <= MOST_LISTED or not theirs
                if (point.panel, point.curve) == (panel.name, curve) and listed:
                    lines.append(_line(panel, point))
    return "\n".join(lines) + "\n"


def _line(panel: Panel, point: Point) -> str:
    own = point.plan
    if _level(point):
        return _level_line(panel, point)
    score = f"{100 * point.mean:.2f} ± {100 * point.spread:.2f} %"
    ours = point.curve.startswith("ours") or point.curve == "rehearsed"
    score = f"**{score}**" if ours else score
    rounds = f"{min(point.rounds)}" + (
        f"–{max(point.rounds)}" if min(point.rounds) < max(point.rounds) else ""
    )
    after = [str(own[key]) for key in ("server.decay", "server.average") if key in own]
    if "server.momentum" in own:
        after.append(f"momentum {own['server.momentum']:g}")
    settings = [
        f"{own['rounds.rounds']}",
        f"{own['local.learning_rate']:g}",
        f"{own['local.clip']:g}",
        " + ".join(after) or "–",
    ]
    holds = shown(point.epsilon, 3)
    cells = [panel.title, panel.labels[point.curve], holds, score, rounds, ", ".join(settings)]
    return f"| {' | '.join(cells)} |"


def _level_line(panel: Panel, point: Point) -> str:
    """A layer fitted in the open: no rounds, and an ε of 0 (no client) or none."""
    score = f"{100 * point.mean:.2f}"
    # Where nothing is left over, every seed deals the same rows.
    score += f" ± {100 * point.spread:.2f} %" if len(set(point.accuracy)) > 1 else " %"
    how = panel.labels[point.curve] + _public_rows(point)
    holds = "0, no client" if point.asked == 0 else "none"
    return f"| {panel.title} | {how} | {holds} | {score} | – | – |"


def _public_rows(point: Point) -> str:
    """How many they were, where no client took part."""
    rows = point.plan.get("data.public") if point.asked == 0 else None
    return f" ({rows:,})" if rows else ""


def picture(points: Sequence[Point]) -> str:
    """A panel for each federation that was measured at more than one ε; a file by itself."""
    drawn = [
        panel for panel in panels() if len({p.asked for p in points if p.panel == panel.name}) > 1
    ]

    def paint(page: Any) -> None:
        parts = page.subfigures(1, max(1, len(drawn)), squeeze=False)[0]
        for part, panel in zip(parts, drawn, strict=False):
            part.suptitle(panel.title, fontsize=9.6, color=INK)
            ax = part.add_subplot()
            _lines(ax, panel, [p for p in points if p.panel == panel.name])
            tidy(ax)
            handles, names = ax.get_legend_handles_labels()
            part.legend(handles, names, loc="outside lower center", ncols=1, fontsize=8.6)

    return svg(NAME, "", paint, size=(4.3 * max(1, len(drawn)), 4.0), inline=False)


def _level(point: Point) -> bool:
    """Whether it was fitted in the open: a level to hold a curve against, not a point of one."""
    return point.asked in (0.0, OPEN)


def _lines(ax: Any, panel: Panel, points: Sequence[Point]) -> None:
    ticks: set[float] = set()
    for curve in panel.curves:
        own = sorted((p for p in points if p.curve == curve), key=lambda p: p.epsilon)
        if not own:
            continue
        if _level(own[0]):
            for level in own:
                rows = _public_rows(level)
                stroke = (0, (1.5, 1.5)) if level.asked else (0, (4, 1.5, 1, 1.5))
                ax.axhline(
                    100 * level.mean,
                    color=MUTED,
                    linewidth=0.9,
                    linestyle=stroke,
                    label=panel.labels[curve] + rows,
                )
            continue
        colour, marker, stroke = _LOOKS[curve]
        ax.errorbar(
            [p.epsilon for p in own],
            [100 * p.mean for p in own],
            yerr=[100 * p.spread for p in own],
            color=colour,
            marker=marker,
            markersize=4.5,
            linestyle=stroke,
            elinewidth=0.8,
            capsize=1.8,
            label=panel.labels[curve],
        )
        ticks |= {p.asked for p in own}
    ax.set_xscale("log")
    ax.set_xticks(sorted(ticks), [f"{tick:g}" for tick in sorted(ticks)])
    ax.minorticks_off()
    ax.set(xlabel="ε that holds", ylabel="test accuracy (%)")
