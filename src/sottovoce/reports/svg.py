"""One way to draw: matplotlib's lines as inline SVG, coloured by the page.

Colours are matplotlib's only on the way out: each becomes a CSS variable of the page (with the
drawn colour as its fallback), so that one drawing serves light, dark and print. The colours are
Okabe and Ito's, which every kind of colour vision tells apart (the light ones darkened for white
paper); no figure relies on colour alone. The output depends on nothing but the data: no dates,
salted ids, no pyplot and its state.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from typing import Any

INK, MUTED, LINE = "#24292f", "#59626c", "#d5d9de"
BLUE, ORANGE, GREEN = "#0072b2", "#d55e00", "#009e73"
PURPLE, SKY, AMBER = "#a64d79", "#3a9ad9", "#b8860b"
_VARIABLES = {
    INK: "ink",
    MUTED: "muted",
    LINE: "line",
    BLUE: "blue",
    ORANGE: "orange",
    GREEN: "green",
    PURPLE: "purple",
    SKY: "sky",
    AMBER: "amber",
}
SIZE = (4.3, 2.65)  # inches; narrow, so that the letters stay legible on a phone
_STYLE: Any = {  # which names there are differs between versions of matplotlib
    "svg.fonttype": "none",
    "svg.hashsalt": "sottovoce",
    "font.size": 9.6,
    "text.color": INK,
    "axes.edgecolor": LINE,
    "axes.labelcolor": MUTED,
    "axes.linewidth": 0.8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.formatter.use_mathtext": False,
    "axes.formatter.useoffset": False,
    "axes.unicode_minus": True,
    "grid.color": LINE,
    "grid.linewidth": 0.5,
    "xtick.color": LINE,
    "ytick.color": LINE,
    "xtick.labelcolor": MUTED,
    "ytick.labelcolor": MUTED,
    "legend.frameon": False,
    "legend.fontsize": 9.6,
    "lines.linewidth": 1.6,
    "lines.solid_capstyle": "round",
}


def svg(
    name: str,
    label: str,
    paint: Callable[[Any], None],
    *,
    size: tuple[float, float] = SIZE,
    inline: bool = True,
) -> str:
    """What `paint` paints on a figure, as an SVG element of a page, or as a file by itself.

    `paint` is given matplotlib's figure. `name` keeps the ids of one page's pictures apart.
    """
    # Imported here: whoever imports sottovoce.reports need not wait for matplotlib.
    import matplotlib
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=size, layout="constrained")
        FigureCanvasSVG(figure)
        paint(figure)
        out = io.StringIO()
        nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        figure.savefig(out, format="svg", transparent=inline, metadata=nothing)
    return _inline(out.getvalue(), name, label) if inline else _lean(out.getvalue())


def tidy(ax: Any) -> None:
    """Axes as this house likes them: no ticks, few numbers."""
    ax.tick_params(length=0)
    if ax.get_yscale() == "linear":
        ax.locator_params(axis="y", nbins=6)


def _lean(drawing: str) -> str:
    """A file by itself, without lines that only editors read."""
    return re.sub(r"<metadata>.*?</metadata>\s*", "", drawing, flags=re.DOTALL)


def _inline(svg: str, name: str, label: str) -> str:
    """Only the drawing: no prolog, own ids, the page's colours, as wide as the page allows."""
    body = svg[svg.index("<svg") :]
    box = re.search(r'viewBox="[^"]+"', body)
    body = re.sub(r"<metadata>.*?</metadata>|<style[^>]*>.*?</style>", "", body, flags=re.DOTALL)
    body = re.sub(r'( id="|href="#|url\(#)', rf"\g<1>{name}-", body)
    for colour, variable in _VARIABLES.items():
        body = body.replace(f": {colour}", f": var(--{variable}, {colour})")
    head = (
        '<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" '
        f'{box.group() if box else ""} role="img" aria-label="{label}">'
    )
    return head + body[body.index(">") + 1 :].strip()
