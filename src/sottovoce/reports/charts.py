"""Draw charts as SVG: those of a run, and the colours and the style of all of them."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from html import escape
from typing import TYPE_CHECKING, Any

import numpy as np

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
        figure.savefig(out, format="svg", transparent=inline, metadata=nothing)
    drawing = _embed(out.getvalue(), name, label) if inline else _strip_metadata(out.getvalue())
    return Markup(drawing)  # matplotlib escapes the texts that it draws, `_embed` the label


def draw_axes(name: str, label: str, paint: Callable[[Any], None], **how: Any) -> Markup:
    """Draw a figure of one pair of axes, which `paint` is given; `how` is that of `draw_svg`."""

    def paint_figure(figure: Any) -> None:
        ax = figure.add_subplot()
        paint(ax)
        tidy_axes(ax)

    return draw_svg(name, label, paint_figure, **how)


def tidy_axes(ax: Any) -> None:
    """Draw axes without ticks and with few numbers."""
    ax.tick_params(length=0)
    if ax.get_yscale() == "linear":
        ax.locator_params(axis="y", nbins=6)


def _strip_metadata(drawing: str) -> str:
    return re.sub(r"<metadata>.*?</metadata>\s*", "", drawing, flags=re.DOTALL)


def _embed(svg: str, name: str, label: str) -> str:
    """Return the drawing without prolog and size, with the page's colours and ids of its own."""
    body = svg[svg.index("<svg") :]
    box = re.search(r'viewBox="[^"]+"', body)
    body = re.sub(r"<metadata>.*?</metadata>|<style[^>]*>.*?</style>", "", body, flags=re.DOTALL)
    body = re.sub(r'( id="|href="#|url\(#)', rf"\g<1>{name}-", body)
    for colour, variable in zip(_COLOURS, _VARIABLES, strict=True):
        body = body.replace(f": {colour}", f": var(--{variable}, {colour})")
    head = (
        '<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" '
        f'{box.group() if box else ""} role="img" aria-label="{escape(label)}">'
    )
    return head + body[body.index(">") + 1 :].strip()


_MOST_POINTS = 600  # of a band, which matplotlib does not thin by itself
_HUGE = 1e100  # beyond this an axis cannot be ruled; such a loss has diverged anyway


def draw_loss(run: CheckedRun) -> Markup:
    """Draw the validation loss before the first and after every round."""

    def paint(ax: Any) -> None:
        values = _drop_huge(run.loss)
        _draw_curve(ax, values, BLUE)
        _mark_triggers(ax, run)
        _set_log_if_wide(ax, values)
        ax.set(xlabel="rounds done", ylabel="validation loss")
        _note_missing_values(ax, values)

    return draw_axes(
        "loss", "Validation loss over the rounds. " + _describe_ends(run.loss, "{:.3g}"), paint
    )


def draw_score(run: CheckedRun, title: str, metric: str, values: Floats) -> Markup:
    """Draw a metric on the validation rows, shares of rows in per cent."""
    in_percent = metric in ("accuracy", "balanced_accuracy")

    def paint(ax: Any) -> None:
        _draw_curve(ax, (100 if in_percent else 1) * _drop_huge(values), BLUE)
        _mark_triggers(ax, run)
        ax.set(xlabel="rounds done", ylabel=title[:1].lower() + title[1:] + " (%)" * in_percent)
        _note_missing_values(ax, values)

    ends = _describe_ends(values, "{:.1%}" if in_percent else "{:.3g}")
    return draw_axes("accuracy", f"{title} over the rounds. {ends}", paint)


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

    def paint(ax: Any) -> None:
        values = _drop_huge(run.sigma)
        _draw_band(ax, np.arange(1.0, run.used + 1), values, ORANGE, step="mid")
        _mark_triggers(ax, run)
        _set_log_if_wide(ax, values)
        known = values[np.isfinite(values)]
        if known.size and np.ptp(known) < 1e-6 * known.max():  # else the axis shows rounding errors
            ax.set_ylim(0, 2 * float(known.max()))
        ax.set(xlabel="round", ylabel="noise σ (model units)")
        _note_missing_values(ax, values)

    median = run.sigma[:, 1]
    return draw_axes(
        "noise", "Noise σ over the rounds, median. " + _describe_ends(median, "{:.3g}"), paint
    )


def draw_fuel(left: Floats, run: CheckedRun) -> Markup:
    """Draw the share of the tanks that is left: a band over the clients, a line at the median."""

    def paint(ax: Any) -> None:
        _draw_band(ax, np.arange(float(len(left))), 100 * left, GREEN)
        _mark_triggers(ax, run)
        ax.set(xlabel="rounds done", ylabel="fuel left (% of capacity)", ylim=(0, 104))

    return draw_axes(
        "fuel", "Fuel left over the rounds, median. " + _describe_ends(left[:, 1], "{:.0%}"), paint
    )


def draw_roc(points: list[list[float]]) -> Markup:
    """Draw what is found against the false alarms."""
    label = f"ROC curve of the test rows, {len(points)} points."
    return _draw_shares("roc", label, points, "false alarms (%)", "found (%)", ((0, 0), (1, 1)))


def draw_precision(points: list[list[float]], share: float) -> Markup:
    """Draw the precision against what is found; a constant answer has the share of the class."""
    label = f"Precision against recall on the test rows; at random {share:.1%}."
    return _draw_shares("pr", label, points, "found (%)", "precision (%)", ((0, share), (1, share)))


def draw_reliability(points: list[list[float]]) -> Markup:
    """Draw how often it is so against the probability that was given, bins of equal counts."""
    label = f"Reliability on the test rows, {len(points)} bins of equal counts."
    pairs = [point[:2] for point in points]
    return _draw_shares("reliability", label, pairs, "probability (%)", "came true (%)", None)


def _draw_shares(
    name: str,
    label: str,
    points: list[list[float]],
    xlabel: str,
    ylabel: str,
    constant: tuple[tuple[float, float], tuple[float, float]] | None,
) -> Markup:
    """Draw shares in per cent; `constant` are the ends of the line of a constant answer."""
    x, y = 100 * np.array(points).reshape(-1, 2).T

    def paint(ax: Any) -> None:
        ends = 100 * np.array(constant or ((0, 0), (1, 1))).T
        dashed = {"color": MUTED, "linewidth": 1.0, "linestyle": (0, (4, 2))}
        ax.plot(*ends, **dashed, label="at random" if constant else "as promised")
        ax.plot(x, y, "-" if constant else "o", color=BLUE, markersize=4, label="model")
        ax.set(xlabel=xlabel, ylabel=ylabel, xlim=(-2, 102), ylim=(-2, 104))
        if not constant:  # few bins may be near 0: show where they are
            top = min(103, max(float(x.max()), float(y.max())) * 1.1 + 1)
            ax.set(xlim=(-top / 50, top), ylim=(-top / 50, top))
        ax.legend(loc="best", handlelength=1.6)

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


def _draw_curve(ax: Any, values: Floats, colour: str) -> None:
    # One value alone has no line to be seen by, nor has a value between two NaN.
    marker = "o" if np.isfinite(values).sum() < 25 else None
    ax.plot(np.arange(len(values)), values, color=colour, marker=marker, markersize=3)


def _draw_band(ax: Any, x: Floats, rows: Floats, colour: str, step: str | None = None) -> None:
    keep = np.unique(np.linspace(0, len(x) - 1, min(len(x), _MOST_POINTS)).astype(int))
    x, (low, middle, high) = x[keep], rows[keep].T
    if np.nanmax(high - low, initial=0.0) > 1e-6 * np.nanmax(high, initial=0.0):
        band = {"color": colour, "alpha": 0.22, "linewidth": 0, "label": "all clients"}
        ax.fill_between(x, low, high, step=step, **band)
    marker = "o" if len(x) < 25 else None
    drawn = f"steps-{step}" if step else "default"
    ax.plot(x, middle, color=colour, drawstyle=drawn, marker=marker, markersize=3, label="median")
    if len(ax.get_legend_handles_labels()[0]) > 1:
        ax.legend(loc="best", handlelength=1.6)


def _mark_triggers(ax: Any, run: CheckedRun) -> None:
    if len(run.triggers) <= 60:
        for x in run.triggers:
            ax.axvline(x, color=ORANGE, linewidth=0.7, linestyle=(0, (1, 2)), alpha=0.8, zorder=0.5)


def _set_log_if_wide(ax: Any, values: Floats) -> None:
    finite = values[np.isfinite(values)]
    if finite.size and finite.min() > 0 and finite.max() / finite.min() > 50:
        ax.set_yscale("log")
        ax.yaxis.set_major_formatter(lambda y, _: f"{y:g}")
        ax.yaxis.set_minor_formatter(lambda *_: "")


def _note_missing_values(ax: Any, values: Floats) -> None:
    if not np.isfinite(values).any():
        ax.set(xticks=(), yticks=())
        style = {"transform": ax.transAxes, "ha": "center", "va": "center", "color": MUTED}
        ax.text(0.5, 0.5, "no finite values", **style)


def _describe_ends(values: Floats, form: str) -> str:
    finite = values[np.isfinite(values)]
    if not finite.size:
        return "No finite values."
    first, last = (form.format(v) for v in (finite[0], finite[-1]))
    return f"First {first}, last {last}."
