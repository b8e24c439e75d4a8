"""Draw charts as SVG: those of a run, and the colours and the style of all of them."""

from __future__ import annotations

import io
import math
import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from importlib import resources
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias
from urllib.parse import quote

import numpy as np
from numpy.typing import NDArray

from sottovoce.models.metrics import SHARES
from sottovoce.privacy import gaussian
from sottovoce.privacy.budget import round_up
from sottovoce.privacy.gaussian import Floats

if TYPE_CHECKING:
    from markupsafe import Markup

    from sottovoce.reports.run import CheckedRun

# Colours are matplotlib's only on the way out: each becomes a CSS variable of the page (with the
# drawn colour as its fallback), so that one drawing serves light, dark and print. The colours are
# Okabe and Ito's, which every kind of colour vision tells apart (the light ones darkened for white
# paper); no figure relies on colour alone. The output depends on nothing but the data: no dates,
# salted ids, no pyplot and its state.


INK, MUTED, LINE = "#24292f", "#59626c", "#d5d9de"
BLUE, ORANGE, GREEN = "#0072b2", "#d55e00", "#009e73"
PURPLE, SKY, AMBER = "#a64d79", "#3a9ad9", "#b8860b"
_COLOURS = (INK, MUTED, LINE, BLUE, ORANGE, GREEN, PURPLE, SKY, AMBER)
_VARIABLES = ("ink", "muted", "line", "blue", "orange", "green", "purple", "sky", "amber")
SIZE = (4.3, 2.65)  # inches; narrow, so that the letters stay legible on a phone
_NAMED = dict(zip(_VARIABLES, _COLOURS, strict=True))
_STYLE: Any = {  # matplotlib's settings, in which a colour is one of the names above
    key: _NAMED.get(value, value)
    for key, value in tomllib.loads(
        (resources.files("sottovoce.reports") / "charts.toml").read_text("utf-8")
    ).items()
}


def draw_svg(
    name: str,
    label: str,
    paint: Callable[[Any], None],
    *,
    size: tuple[float, float] = SIZE,
    inline: bool = True,
) -> Markup:
    """Draw a figure with `paint` and return it as an element of a page, or as a file by itself.

    `paint` is given matplotlib's figure. `name` keeps the ids of one page's pictures apart, and
    `label` tells those who cannot see the picture what it shows.
    """
    # Imported here: whoever imports sottovoce.reports need not wait for matplotlib.
    import matplotlib
    from markupsafe import Markup
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=size, layout="constrained")
        FigureCanvasSVG(figure)
        paint(figure)
        out = io.StringIO()
        nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        figure.savefig(out, format="svg", metadata=nothing)
    drawing = re.sub(r"<metadata>.*?</metadata>\s*", "", out.getvalue(), flags=re.DOTALL)
    words = f'<svg role="img" aria-label="{escape(label)}" ' if label else "<svg "
    whole = Markup(drawing.replace("<svg ", words, 1))  # matplotlib escapes what it draws
    return embed_svg(whole, name) if inline else whole


def draw_axes(name: str, label: str, paint: Callable[[Any], None], **how: Any) -> Markup:
    """Draw a figure of one pair of axes, which `paint` is given; `how` is that of `draw_svg`."""

    def paint_figure(figure: Any) -> None:
        ax = figure.add_subplot()
        paint(ax)
        tidy_axes(ax)
        if ax.get_xlabel() in ("round", "rounds done") and len(ax.get_xticks()):
            ax.locator_params(axis="x", integer=True)

    return draw_svg(name, label, paint_figure, **how)


def tidy_axes(ax: Any) -> None:
    """Draw axes without ticks and with few numbers."""
    from matplotlib.ticker import FixedLocator

    ax.tick_params(length=0)
    # Of ticks at fixed places, the names of rows, none may be left out.
    if ax.get_yscale() == "linear" and not isinstance(ax.yaxis.get_major_locator(), FixedLocator):
        ax.locator_params(axis="y", nbins=6)


def embed_svg(drawing: Markup, name: str) -> Markup:
    """Return a file's drawing as an element of a page: the page's colours, ids of its own.

    Its white background and its size are left out.
    """
    head, body = re.split(r"(?<=>)", drawing[drawing.index("<svg") :], maxsplit=1)
    kept = re.findall(r'(?:viewBox|role|aria-label)="[^"]*"', head)
    body = re.sub(r"<style[^>]*>.*?</style>", "", body, flags=re.DOTALL)
    body = re.sub(r'<g id="patch_1">.*?</g>', "", body, count=1, flags=re.DOTALL)
    prefix = quote(name, safe="").replace("%", "_")  # of any name, an id that ends nothing
    body = re.sub(r'( id="|href="#|url\(#)', rf"\g<1>{prefix}-", body)
    for colour, variable in zip(_COLOURS, _VARIABLES, strict=True):
        body = body.replace(f": {colour}", f": var(--{variable}, {colour})")
    spaces = 'xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink"'
    return type(drawing)(f"<svg {spaces} {' '.join(kept)}>{body.strip()}")


_MOST_POINTS = 600  # of a band, which matplotlib does not thin by itself
_HUGE = 1e100  # beyond this an axis cannot be ruled; such a loss has diverged anyway


def draw_loss(run: CheckedRun) -> Markup:
    """Draw the validation loss before the first and after every round."""
    label = "Validation loss over the rounds. " + _describe_ends(run.loss, "{:.3g}")
    values = _drop_huge(run.loss)
    return _draw_course("loss", label, run, values, "validation loss", may_be_log=True)


def draw_score(run: CheckedRun, title: str, metric: str, values: Floats) -> Markup:
    """Draw a metric on the validation rows, shares of rows in per cent."""
    in_percent = metric in SHARES
    ends = _describe_ends(values, "{:.1%}" if in_percent else "{:.3g}")
    shown = (100 if in_percent else 1) * _drop_huge(values)
    axis = title[:1].lower() + title[1:] + " (%)" * in_percent
    return _draw_course("accuracy", f"{title} over the rounds. {ends}", run, shown, axis)


def draw_horizon(run: CheckedRun) -> Markup:
    """Draw the horizon T as steps, down to where the rounds done meet it."""
    done = np.arange(run.used + 1)
    steps = np.append(run.horizon, run.next_horizon[-1])
    at = run.triggers

    def paint(ax: Any) -> None:
        ax.plot(done, steps, color=BLUE, drawstyle="steps-post", label="horizon T")
        ax.plot(done, done, color=MUTED, linewidth=1.0, linestyle=(0, (4, 2)), label="rounds done")
        if len(at):
            ax.plot(at, run.next_horizon[at - 1], "v", color=ORANGE, markersize=5, label="T shrank")
        ax.set(xlabel="rounds done", ylabel="rounds", ylim=(0, 1.25 * float(steps.max()) + 1))
        ax.legend(loc="upper left", ncols=3, borderaxespad=0.2, handlelength=1.6, columnspacing=1.2)

    label = (
        f"Horizon T over the rounds: from {steps[0]} to {steps[-1]}, lowered {len(at)} times; "
        f"{run.used} rounds were done."
    )
    return draw_axes("horizon", label, paint)


def draw_noise(run: CheckedRun) -> Markup:
    """Draw σ of one coordinate of one upload: a band over the clients, a line at the median."""
    label = "Noise σ over the rounds, median. " + _describe_ends(run.sigma[:, 1], "{:.3g}")
    values, axis = _drop_huge(run.sigma), "noise σ (model units)"
    finite, top = values[np.isfinite(values)], None
    if finite.size and np.ptp(finite) < 0.25 * finite.max():  # else little fills the picture
        top = 2 * float(finite.max())
    how: Any = {"may_be_log": True, "colour": ORANGE, "step": "mid", "top": top}
    return _draw_course("noise", label, run, values, axis, **how)


def draw_fuel(left: Floats, run: CheckedRun) -> Markup:
    """Draw the share of the tanks that is left: a band over the clients, a line at the median."""
    label = "Fuel left over the rounds, median. " + _describe_ends(left[:, 1], "{:.0%}")
    axis = "fuel left (% of capacity)"
    return _draw_course("fuel", label, run, 100 * left, axis, colour=GREEN, top=104)


def _draw_course(
    name: str,
    label: str,
    run: CheckedRun,
    values: Floats,
    axis: str,
    *,
    may_be_log: bool = False,
    colour: str = BLUE,
    step: str | None = None,
    top: float | None = None,
) -> Markup:
    """Draw values of all rounds: a line, or a band where there are least, median and most.

    With `step` they are those of the rounds, otherwise those before the first and after each.
    """
    finite = values[np.isfinite(values)]

    def paint(ax: Any) -> None:
        if values.ndim == 2:
            _draw_band(ax, np.arange(float(len(values))) + (step is not None), values, colour, step)
        else:
            # One value alone has no line to be seen by, nor has a value between two NaN.
            marker = "o" if finite.size < 25 else None
            ax.plot(np.arange(len(values)), values, color=colour, marker=marker, markersize=3)
        if len(run.triggers) <= 60:
            dotted = {"linewidth": 0.7, "linestyle": (0, (1, 2)), "alpha": 0.8, "zorder": 0.5}
            for x in run.triggers:
                ax.axvline(x, color=ORANGE, **dotted)
        if may_be_log and finite.size and finite.min() > 0 and finite.max() / finite.min() > 50:
            ax.set_yscale("log")
            ax.yaxis.set_major_formatter(lambda y, _: f"{y:g}")
            ax.yaxis.set_minor_formatter(lambda *_: "")
        if top is not None:
            ax.set_ylim(0, top)
        ax.set(xlabel="rounds done" if step is None else "round", ylabel=axis)
        if not finite.size:
            ax.set(xticks=(), yticks=())
            style = {"transform": ax.transAxes, "ha": "center", "va": "center", "color": MUTED}
            ax.text(0.5, 0.5, "no finite values", **style)

    return draw_axes(name, label, paint)


Points: TypeAlias = list[list[float]]


def draw_roc(lines: Mapping[str, Points]) -> Markup:
    """Draw what is found of each class against the false alarms."""
    label = f"ROC curve of the test rows, {sum(map(len, lines.values()))} points."
    return _draw_shares("roc", label, lines, "false alarms (%)", "found (%)", ((0, 0), (1, 1)))


def draw_precision(lines: Mapping[str, Points], share: float) -> Markup:
    """Draw the precision against what is found; a constant answer has the share of the class."""
    label = f"Precision against recall on the test rows; at random {share:.1%}."
    return _draw_shares("pr", label, lines, "found (%)", "precision (%)", ((0, share), (1, share)))


def draw_reliability(points: list[list[float]]) -> Markup:
    """Draw how often it is so against the probability that was given, bins of equal counts."""
    label = f"Reliability on the test rows, {len(points)} bins of equal counts."
    lines = {"model": [point[:2] for point in points]}
    return _draw_shares("reliability", label, lines, "probability (%)", "came true (%)", None)


def _draw_shares(
    name: str,
    label: str,
    lines: Mapping[str, Points],
    xlabel: str,
    ylabel: str,
    constant: tuple[tuple[float, float], tuple[float, float]] | None,
) -> Markup:
    """Draw shares in per cent; `constant` are the ends of the line of a constant answer."""
    drawn = {key: 100 * np.array(points).reshape(-1, 2).T for key, points in lines.items()}

    def paint(ax: Any) -> None:
        ends = 100 * np.array(constant or ((0, 0), (1, 1))).T
        dashed = {"color": MUTED, "linewidth": 1.0, "linestyle": (0, (4, 2))}
        ax.plot(*ends, **dashed, label="at random" if constant else "as promised")
        for (key, (x, y)), colour in zip(drawn.items(), _COLOURS[3:], strict=False):
            ax.plot(x, y, "-" if constant else "o", color=colour, markersize=4, label=key)
        ax.set(xlabel=xlabel, ylabel=ylabel, xlim=(-2, 102), ylim=(-2, 104))
        if not constant:  # few bins may be near 0: show where they are
            top = min(103, max(float(points.max()) for points in drawn.values()) * 1.1 + 1)
            ax.set(xlim=(-top / 50, top), ylim=(-top / 50, top))
        # Above the axes: a curve may pass anywhere within them.
        above = {"loc": "lower left", "bbox_to_anchor": (-0.02, 1.0), "borderaxespad": 0.2}
        ax.legend(**above, ncols=3, handlelength=1.6, columnspacing=1.2)

    return draw_axes(name, label, paint)


def draw_attacker(mu: float) -> Markup:
    """Draw the best ROC curve that any attacker can have: TPR ≤ Φ(Φ⁻¹(FPR) + μ)."""
    # Dense at both ends, where the curve bends.
    rate = 0.5 - 0.5 * np.cos(np.linspace(0, np.pi, 121)[1:-1])
    fpr = np.concatenate(([0.0], rate, [1.0]))
    tpr = np.concatenate(([0.0], gaussian.tpr(rate, mu), [1.0]))

    def paint(ax: Any) -> None:
        ax.fill_between(100 * fpr, 100 * fpr, 100 * tpr, color=BLUE, alpha=0.12, linewidth=0)
        ax.plot(100 * fpr, 100 * tpr, color=BLUE, label="best attacker")
        ax.plot((0, 100), (0, 100), color=MUTED, linewidth=1.0, linestyle=(0, (4, 2)), label="coin")
        ax.plot(1, 100 * float(gaussian.tpr(0.01, mu)), "o", color=ORANGE, label="at 1 %")
        ax.set(xlabel="false alarms (%)", ylabel="found (%)", xlim=(-2, 102), ylim=(-2, 104))
        ax.legend(loc="lower right", handlelength=1.6)

    label = (
        "Share an attacker finds against its share of false alarms: at most "
        f"{round_up(float(gaussian.tpr(0.01, mu)), 3):.1%} at 1 % false alarms; a coin finds 1 %."
    )
    return draw_axes("attacker", label, paint)


def _drop_huge(values: Floats) -> Floats:
    return np.where(np.abs(values) < _HUGE, values, np.nan)


def _thin(count: int) -> NDArray[np.int64]:
    """Return the indices of at most so many points, evenly spread."""
    return np.unique(np.linspace(0, count - 1, min(count, _MOST_POINTS)).astype(int))


def _draw_band(ax: Any, x: Floats, rows: Floats, colour: str, step: str | None = None) -> None:
    keep = _thin(len(x))
    x, (low, middle, high) = x[keep], rows[keep].T
    if np.nanmax(high - low, initial=0.0) > 1e-6 * np.nanmax(high, initial=0.0):
        band = {"color": colour, "alpha": 0.22, "linewidth": 0, "label": "all clients"}
        ax.fill_between(x, low, high, step=step, **band)
    marker = "o" if len(x) < 25 else None
    drawn = f"steps-{step}" if step else "default"
    ax.plot(x, middle, color=colour, drawstyle=drawn, marker=marker, markersize=3, label="median")
    if len(ax.get_legend_handles_labels()[0]) > 1:
        ax.legend(loc="best", handlelength=1.6)


def _describe_ends(values: Floats, form: str) -> str:
    finite = values[np.isfinite(values)]
    if not finite.size:
        return "No finite values."
    first, last = (form.format(v) for v in (finite[0], finite[-1]))
    return f"First {first}, last {last}."


# Plots of a page that changes every second: matplotlib would take longer than a round. A template
# draws them; here is where their points and ticks lie.


PLOT_SIZE = (430, 265)
_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 14, 10, 42  # margins, in the units of PLOT_SIZE
PlotValue = float | str | None


@dataclass(frozen=True)
class PlotLine:
    """Values to draw: a line, steps, or points with a name each; None is a gap."""

    label: str
    x: Sequence[PlotValue]
    y: Sequence[PlotValue]
    kind: Literal["line", "steps", "points"] = "line"
    names: Sequence[str] = ()


class PlotShape(NamedTuple):
    """A line as it is drawn: its SVG path, or its points with their names."""

    label: str
    path: str
    points: list[tuple[float, float, str]]


class Plot(NamedTuple):
    """Shapes and ticks (where they are, and their text) in the units of PLOT_SIZE."""

    x_label: str
    x_ticks: list[tuple[float, str]]
    y_ticks: list[tuple[float, str]]
    shapes: list[PlotShape]


class _Axis:
    """Maps values to 0 … 1: numbers, their logarithms where they are spread widely, or words."""

    def __init__(self, values: Sequence[PlotValue], *, may_be_log: bool) -> None:
        known = [value for value in values if value is not None]
        has_words = any(isinstance(v, str) for v in known)
        self.words = sorted({str(v) for v in known}) if has_words else []
        numbers = [] if self.words else [float(v) for v in known if abs(float(v)) < _HUGE]
        low, high = (min(numbers), max(numbers)) if numbers else (0.0, 1.0)
        if high - low <= 1e-6 * abs(high):  # else the axis shows rounding errors
            low, high = sorted((0.0, 2 * high or 1.0))
        self.is_log = may_be_log and low > 0 and high / low > 50
        low, high = self._scale(low), self._scale(high)
        pad = (high - low) * 0.05
        self.low, self.high = low - pad, high + pad
        self.is_empty = not known or not (numbers or self.words)

    def _scale(self, value: float) -> float:
        return math.log10(value) if self.is_log else value

    def place(self, value: PlotValue) -> float | None:
        """Return where a value lies; None where it cannot be drawn."""
        if value is None:
            return None
        if self.words:
            return (self.words.index(str(value)) + 0.5) / len(self.words)
        number = float(value)
        if not abs(number) < _HUGE:  # NaN, too
            return None
        return (self._scale(number) - self.low) / (self.high - self.low)

    def list_ticks(self) -> list[tuple[float, str]]:
        """Return about five round values."""
        if self.words:
            return [((i + 0.5) / len(self.words), word) for i, word in enumerate(self.words)]
        span = self.high - self.low
        if self.is_log and span > 2.5:
            powers = range(math.ceil(self.low), math.floor(self.high) + 1, math.ceil(span / 6))
            values = [10.0**k for k in powers]
        elif self.is_log:
            decades = range(math.floor(self.low), math.ceil(self.high) + 1)
            values = [m * 10.0**k for k in decades for m in (1, 2, 5)]
        else:
            size = 10.0 ** math.floor(math.log10(span / 4))
            step = next(size * m for m in (1, 2, 5, 10) if span / (size * m) <= 6)
            first = math.ceil(self.low / step)
            values = [step * k for k in range(first, math.floor(self.high / step) + 1)]
        places = [(self.place(value), f"{value:.6g}") for value in values]
        return [(at, text) for at, text in places if at is not None and 0 <= at <= 1]


def plot(x_label: str, lines: Sequence[PlotLine], *, log_x: bool = False) -> Plot | None:
    """Return where lines, points and ticks lie; None where there is nothing to draw.

    Values that are spread widely are drawn by their logarithms, across only with `log_x`.

    >>> drawn = plot("ε", [PlotLine("", [1, 2, 4], [0.5, None, 0.7], "points", ["a", "b", "c"])])
    >>> [name for _, _, name in drawn.shapes[0].points], [text for _, text in drawn.y_ticks]
    (['a', 'c'], ['0.5', '0.55', '0.6', '0.65', '0.7'])
    >>> plot("ε", [PlotLine("", [1.0], [None])]) is None
    True
    """
    x_axis = _Axis([value for line in lines for value in line.x], may_be_log=log_x)
    y_axis = _Axis([value for line in lines for value in line.y], may_be_log=True)
    if x_axis.is_empty or y_axis.is_empty:
        return None
    width, height = PLOT_SIZE

    def to_x(at: float) -> float:
        return round(_LEFT + at * (width - _LEFT - _RIGHT), 1)

    def to_y(at: float) -> float:
        return round(height - _BOTTOM - at * (height - _TOP - _BOTTOM), 1)

    shapes = []
    for line in lines:
        names = line.names or [""] * len(line.x)
        path, points, pen_down = [], [], False
        for i in _thin(len(line.x)) if line.kind != "points" else range(len(line.x)):
            x, y = x_axis.place(line.x[i]), y_axis.place(line.y[i])
            if x is None or y is None:
                pen_down = False
                continue
            points.append((to_x(x), to_y(y), names[i]))
            across = f"H{to_x(x)}V{to_y(y)}" if line.kind == "steps" else f"L{to_x(x)} {to_y(y)}"
            path.append(across if pen_down else f"M{to_x(x)} {to_y(y)}")
            pen_down = True
        few = line.kind == "points" or len(points) < 25
        path = [] if line.kind == "points" else path
        shapes.append(PlotShape(line.label, "".join(path), points * few))
    x_ticks = [(to_x(at), text) for at, text in x_axis.list_ticks()]
    y_ticks = [(to_y(at), text) for at, text in y_axis.list_ticks()]
    return Plot(x_label, x_ticks, y_ticks, shapes)
