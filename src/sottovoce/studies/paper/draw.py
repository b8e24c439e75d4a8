"""Draw a finished figure as SVG: a picture for each panel of the page, and one file for print.

A point is the mean over the seeds, its bar the 95 % interval. Lines differ in colour, marker and
stroke; a method looks the same in every figure.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from numpy.typing import NDArray

from sottovoce.reports.charts import (
    AMBER,
    BLUE,
    GREEN,
    INK,
    MUTED,
    ORANGE,
    PURPLE,
    SKY,
    draw_svg,
    tidy_axes,
)
from sottovoce.studies.paper.checks import interval
from sottovoce.studies.paper.definition import Figure, Prototypes
from sottovoce.studies.paper.outcomes import PointTable, label

if TYPE_CHECKING:
    from markupsafe import Markup

    from sottovoce.runs.trained import Trained


Pictures = NDArray[np.float64]  # [classes, pixels]


def draw_prototypes(trained: Trained, how: Prototypes) -> Pictures:
    """Draw for every class the picture that a model assigns to it most surely (Fig. 3).

    Gradient ascent on the input, x ← x + rate · ∇ₓ(log p(class | x) − penalty·‖x‖²), from an empty
    picture, with pixels kept in [0, 1].
    """
    import jax
    import jax.numpy as jnp

    shape, classes = trained.record["model"]["shape"], trained.record["model"]["classes"]
    y, model = (
        jnp.arange(classes),
        cast(Any, trained.model),
    )  # a JAX model: figures train those of plans

    def uncertainty(x: Any) -> Any:
        losses = model.loss(trained.params, x, y)
        return jnp.sum(losses) + how.penalty * jnp.sum(x**2)

    def step(_: int, x: Any) -> Any:
        return jnp.clip(x - how.rate * jax.grad(uncertainty)(x), 0, 1)

    start = jnp.zeros((classes, int(np.prod(shape))))
    return np.asarray(jax.lax.fori_loop(0, how.steps, step, start), dtype=np.float64)


def distinct(drawn: Pictures, x: NDArray[Any], y: NDArray[Any]) -> float:
    """Return the mean correlation of each picture with the mean image of its class.

    >>> x = np.array([[0.0, 1.0, 0.0], [1.0, 0.0, 0.0]])
    >>> distinct(x, x, np.array([0, 1])), distinct(np.zeros((2, 3)), x, np.array([0, 1]))
    (1.0, 0.0)
    """
    values = []
    for c, picture in enumerate(drawn):
        a, b = picture - picture.mean(), x[y == c].mean(axis=0)
        b = b - b.mean()
        size = float(np.linalg.norm(a) * np.linalg.norm(b))
        values.append(float(a @ b) / size if size > 0 else 0.0)
    return round(float(np.mean(values)), 12)


def to_text(drawn: Pictures) -> str:
    """Encode pictures as text: one byte for each pixel, in base64.

    >>> to_text(np.array([[0.0, 1.0]]))
    'AP8='
    """
    return base64.b64encode(np.round(255 * drawn).astype(np.uint8).tobytes()).decode()


def from_text(text: str, classes: int = 10) -> Pictures:
    """Decode the pictures that `to_text` encoded.

    >>> from_text("AP8=", classes=1)
    array([[0., 1.]])
    """
    pixels = np.frombuffer(base64.b64decode(text), dtype=np.uint8)
    return pixels.reshape(classes, -1) / 255


_SIZE, _RASTER = (4.3, 3.15), (4.3, 1.75)
_DASHED, _DOTTED = (0, (5, 2)), (0, (1.5, 1.5))
_SOLID = "solid"
Look = tuple[str, str, Any]  # colour, marker, stroke
_METHODS: dict[str, Look] = {
    "udp": (MUTED, "s", _SOLID),
    "lei": (GREEN, "^", _SOLID),
    "crd": (ORANGE, "o", _SOLID),
    "smoothed": (BLUE, "D", _SOLID),
    "optimal": (INK, "x", _DASHED),
    "paid": (PURPLE, "v", _DOTTED),
    "crd-paper": (ORANGE, "o", _DASHED),
    "smoothed-paper": (BLUE, "D", _DASHED),
    "unequal": (ORANGE, "o", _SOLID),
    "precision": (BLUE, "D", _SOLID),
}
_LEVELS: tuple[Look, ...] = (
    (ORANGE, "o", _SOLID),
    (AMBER, "s", _DASHED),
    (GREEN, "^", _SOLID),
    (SKY, "D", _DASHED),
    (BLUE, "v", _SOLID),
    (PURPLE, "x", _DASHED),
)
_NAMES = {
    "loss": "test loss",
    "accuracy": "test accuracy (%)",
    "rounds": "rounds used",
    "horizon": "horizon T",
}
_VARIANTS = {"printed": "as printed", "corrected": "corrected"}


@dataclass(frozen=True)
class Picture:
    """One panel: which variant it belongs to, its title, and how it is painted."""

    variant: str
    title: str
    words: str
    paint: Callable[[Any], None]  # on axes
    raster: bool = False


def pictures(
    figure: Figure, tables: Mapping[str, PointTable], moments: list[dict[str, Any]]
) -> list[Picture]:
    """Return every panel of a figure, variant after variant."""
    if figure.kind == "moments":
        return [_moment_panel(i, panel) for i, panel in enumerate(moments)]
    drawn = []
    for variant, table in tables.items():
        if figure.kind == "prototypes":
            drawn += [_digits(table, line) for line in table.axis("line")]
            continue
        panels = table.axis("panel")
        for i, panel in enumerate(panels):
            name = label(figure, "panel", panel)
            letter = f"({'abcdefgh'[i]}) " if len(panels) > 1 else ""
            title = f"{letter}{name}".strip()
            paint = _horizons if figure.measure == "horizon" else _lines
            words = f"{figure.title}, {_VARIANTS[variant]}" + (f", {title}" if title else "")

            def paint_panel(
                ax: Any, table: PointTable = table, panel: Any = panel, how: Any = paint
            ) -> None:
                how(ax, table, panel)

            drawn.append(Picture(variant, title, words, paint_panel))
    return drawn


def draw_panel(picture: Picture, name: str) -> Markup:
    """Draw a panel as an element of the page."""

    def paint(page: Any) -> None:
        if picture.raster:
            picture.paint(page)
            return
        ax = page.add_subplot()
        picture.paint(ax)
        tidy_axes(ax)
        _legend(page, ax)

    size = _RASTER if picture.raster else _SIZE
    return draw_svg(name, picture.words, paint, size=size)


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
                subfigure.suptitle(", ".join(titles), fontsize=9.6, color=INK)
                if picture.raster:
                    picture.paint(subfigure)
                    continue
                ax = subfigure.add_subplot()
                picture.paint(ax)
                tidy_axes(ax)
                _legend(subfigure, ax)

    size = (4.3 * columns, (tall + 0.25) * len(rows))
    return draw_svg("figure", "", paint, size=size, inline=False)


def _legend(page: Any, ax: Any) -> None:
    handles, names = ax.get_legend_handles_labels()
    if handles:
        columns = 2 if max(map(len, names)) > 12 else min(5, len(names))
        page.legend(
            handles,
            names,
            loc="outside lower center",
            ncols=columns,
            fontsize=8.6,
            handlelength=2.2,
            columnspacing=1.2,
            labelspacing=0.3,
            borderaxespad=0.1,
        )


def look(figure: Figure, line: Any, index: int) -> Look:
    """Return colour, marker and stroke of a line."""
    if figure.line is not None and figure.line.key == "method":
        return _METHODS[str(line).removesuffix("-short")]
    return _LEVELS[index % len(_LEVELS)]


def _lines(ax: Any, table: PointTable, panel: Any) -> None:
    figure, xs = table.figure, table.axis("x")
    scale = 100 if figure.measure == "accuracy" else 1
    seen = []
    for i, line in enumerate(table.axis("line")):
        points = [(x, table.points[panel, line, x]) for x in xs]
        found = [interval(scale * point.values[figure.measure]) for _, point in points]
        at = [point.epsilon if figure.true_epsilon else x for x, point in points]
        mean = np.array([one.mean for one in found])
        low, high = (np.array([getattr(one, end) for one in found]) for end in ("low", "high"))
        colour, marker, stroke = look(figure, line, i)
        ax.errorbar(
            at,
            mean,
            yerr=np.abs(np.stack([mean - low, high - mean])),
            color=colour,
            marker=marker,
            markersize=4.5,
            linestyle=stroke,
            elinewidth=0.8,
            capsize=1.8,
            label=label(figure, "line", line),
        )
        seen.append(mean)
    values = np.concatenate(seen)
    finite = values[np.isfinite(values)]
    if figure.measure == "loss" and finite.size and finite.max() > 3 * finite.min() > 0:
        _logarithmic(ax, finite)
    if figure.x is not None:
        name = figure.x.label
        if figure.x.scale == "log":
            ax.set_xscale("log")
        if figure.true_epsilon:
            ax.locator_params(axis="x", nbins=7, integer=True)
        else:
            ax.set_xticks(xs, [f"{x:g}" for x in xs])
        ax.minorticks_off()
        ax.set_xlabel(name)
    ax.set_ylabel(_NAMES[figure.measure])


def _logarithmic(ax: Any, finite: Any) -> None:
    ax.set_yscale("log")
    low, high = float(finite.min()), float(finite.max())
    ticks = [m * 10.0**e for e in range(-4, 5) for m in (1, 2, 3, 5, 7)]
    kept = [t for t in ticks if 0.8 * low <= t <= 1.3 * high]
    ax.set_yticks(kept, [f"{t:g}" for t in kept])
    ax.minorticks_off()


def _horizons(ax: Any, table: PointTable, panel: Any) -> None:
    """Draw T over the rounds of the first seed's runs, until the rounds done reach it."""
    longest = 1
    for i, line in enumerate(table.axis("line")):
        point = table.points[panel, line, None]
        done = int(point.values["rounds"][0])
        steps = (point.horizon[0] if point.horizon else None) or [(0, done)]
        t = [*(step[0] for step in steps), done]
        T = [*(step[1] for step in steps), steps[-1][1]]
        colour, marker, stroke = look(table.figure, line, i)
        name = label(table.figure, "line", line)
        ax.plot(t, T, color=colour, linestyle=stroke, drawstyle="steps-post", label=name)
        ax.plot(done, T[-1], marker=marker, color=colour, markersize=5)
        longest = max(longest, done)
    ax.plot((0, longest), (0, longest), color=MUTED, linewidth=0.9, linestyle=_DOTTED)
    ax.set(xlabel="rounds done", ylabel=_NAMES["horizon"], ylim=(0, None), xlim=(0, None))


def _moment_panel(i: int, panel: dict[str, Any]) -> Picture:
    order = np.array(panel["order"])
    bound, truth = np.array(panel["bound"]), np.array(panel["truth"])
    below = order[bound < truth]

    def paint(ax: Any) -> None:
        ax.plot(order, bound, color=BLUE, label="the paper’s bound")
        ax.plot(order, truth, color=ORANGE, linestyle=_DASHED, label="true log moment")
        if len(below):
            ax.axvspan(below[0] - 0.5, order[-1], color=ORANGE, alpha=0.13, linewidth=0)
            ax.text(
                0.98,
                0.06,
                f"no bound from λ = {below[0]}",
                transform=ax.transAxes,
                ha="right",
                color=INK,
                fontsize=8.6,
            )
        ax.set(xlabel="order λ", ylabel="log moment", yscale="log", xlim=(order[0], order[-1]))
        ax.minorticks_off()

    title = (
        f"({'abcdefgh'[i]}) q = {panel['sampling']:g}, n = {panel['samples']}, "
        f"U = {panel['clients']}"
    )
    ends = f"The bound lies below the truth from λ = {below[0]} on." if len(below) else "It holds."
    return Picture("", title, f"Bound and true moment, {title}. {ends}", paint)


def _digits(table: PointTable, line: Any) -> Picture:
    """Draw the ten pictures of a model in two rows, for the first seed."""
    name = label(table.figure, "line", line)

    def paint(page: Any) -> None:
        drawn = from_text(table.points[None, line, None].pictures[0])
        side = int(np.sqrt(drawn.shape[1]))
        grid = page.subplots(2, 5, gridspec_kw={"wspace": 0.0, "hspace": 0.0})
        for ax, pixels in zip(grid.flat, drawn, strict=True):
            darkest = max(float(pixels.max()), 1e-9)  # each at full contrast
            ax.imshow(1 - pixels.reshape(side, side) / darkest, cmap="gray", vmin=0, vmax=1)
            ax.axis("off")

    words = f"{table.figure.title}, {_VARIANTS[table.variant]}: {name}, digits 0 to 9"
    return Picture(table.variant, name, words, paint, raster=True)
