"""What an audit looks like: claimed against measured ε, reconstructions, ROC curves, scores."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sottovoce.privacy import gaussian
from sottovoce.reports.svg import BLUE, GREEN, INK, MUTED, ORANGE, PURPLE, svg, tidy
from sottovoce.reports.text import number
from sottovoce.studies.audit.findings import Findings
from sottovoce.studies.audit.inversion import Reconstructions, chosen
from sottovoce.studies.audit.messages import Measured

Floats = NDArray[np.float64]

_TALL = (4.3, 2.9)
_FURTHEST = 45.0  # ε up to which is drawn
_MOST = 8  # pictures in a line: more would be too small on a phone
_COLOURS = (INK, ORANGE, PURPLE, BLUE, GREEN)


def claimed(found: Findings, *, inline: bool = True) -> str:
    """ε as claimed, and the interval that uploads prove, for every setting."""
    every = [*found.measured, *found.headline]

    def paint(figure: Any) -> None:
        ax = figure.add_subplot()
        for place, one in enumerate(reversed(every)):
            low, high = one.epsilon
            colour = ORANGE if one.contradicts else BLUE
            ax.plot(
                (low, min(high, _FURTHEST)), (place, place), color=colour, linewidth=5, alpha=0.45
            )
            ax.plot(low, place, "|", color=colour, markersize=13, markeredgewidth=2.5)
            ax.plot(one.setting.epsilon, place, "D", color=INK, markersize=4.5)
        ax.plot([], [], "D", color=INK, markersize=4.5, label="claimed")
        ax.plot([], [], color=BLUE, linewidth=5, alpha=0.45, label="measured")
        ax.plot([], [], color=ORANGE, linewidth=5, alpha=0.45, label="measured, claim refuted")
        ax.set_yticks(range(len(every)), [_whose(one) for one in reversed(every)])
        ax.set(xlabel="ε", xlim=(0, _FURTHEST), ylim=(-0.6, len(every) - 0.4))
        ax.legend(loc="upper right", handlelength=1.2)
        ax.grid(visible=False, axis="y")
        tidy(ax)

    label = " ".join(
        f"{_whose(one)}, ε = {one.setting.epsilon:g}: measured {one.epsilon[0]:.1f} or more."
        for one in every
    )
    return svg("claimed", label, paint, size=_TALL, inline=inline)


def _whose(one: Measured) -> str:
    name = "Theorem 1" if one.setting.calibration == "paper" else "ours"
    return f"{name}, δ = {number(one.setting.delta)}"


def bells(one: Measured, *, inline: bool = True) -> str:
    """The scores of the paper's uploads for both neighbours, and where the claim would put them."""

    def paint(figure: Any) -> None:
        ax = figure.add_subplot()
        ends = np.linspace(-3 - one.true / 2, 3 + one.true / 2, 70)
        for scores, colour, name in (
            (one.without, BLUE, "record is D’s"),
            (one.having, ORANGE, "record is D′’s"),
        ):
            ax.hist(scores, bins=ends, density=True, color=colour, alpha=0.45, label=name)
        for sign in (-1, 1):
            middle = sign * one.setting.promised / 2
            bell = np.exp(-((ends - middle) ** 2) / 2) / np.sqrt(2 * np.pi)
            name = f"as ε = {one.setting.epsilon:g} promises" if sign > 0 else "_"
            ax.plot(ends, bell, color=MUTED, linestyle=(0, (4, 2)), linewidth=1.1, label=name)
        ax.set(xlabel="score of a run’s uploads (σ)", ylabel="density", ylim=(0, 0.62))
        ax.legend(loc="upper center", ncols=2, handlelength=1.2, columnspacing=1.0)
        tidy(ax)

    label = f"Two bells {one.true:.2f} σ apart, where {one.setting.promised:.2f} was promised."
    return svg("bells", label, paint, size=_TALL, inline=inline)


def roc(found: Findings, name: str, *, inline: bool = True) -> str:
    """An attack's ROC curves on logarithmic axes, each with its ceiling."""
    own = [attack for attack in found.members if attack.name == name]
    least = 1 / int(np.sum(~own[0].members))
    fpr = np.logspace(np.log10(least), 0, 80)

    def paint(figure: Any) -> None:
        ax = figure.add_subplot()
        for attack, colour in zip(own, _COLOURS, strict=False):
            alarms, hits = attack.curve()
            seen = alarms > 0
            ax.plot(alarms[seen], hits[seen], color=colour, label=attack.level.name)
            if attack.level.epsilon is not None:
                ceiling = gaussian.tpr(fpr[:-1], attack.level.mu)
                ax.plot(fpr[:-1], ceiling, color=colour, linestyle=(0, (1.5, 2)), linewidth=1.2)
        ax.plot(fpr, fpr, color=MUTED, linewidth=0.8, linestyle=(0, (4, 2)))
        ax.set(xscale="log", yscale="log", xlim=(least, 1), ylim=(least, 1.15))
        ax.set(xlabel="false alarms", ylabel="found")
        for axis in (ax.xaxis, ax.yaxis):
            axis.set_major_formatter(lambda v, _: f"{100 * v:g} %")
        ax.legend(loc="lower right", handlelength=1.4)
        tidy(ax)

    said = ", ".join(f"{attack.level.name}: {attack.auc:.2f}" for attack in own)
    return svg(
        re.sub("[^a-z]+", "-", f"roc {name}".lower()),
        f"Area under the curve {said}.",
        paint,
        inline=inline,
    )


def reconstructions(
    found: Sequence[Reconstructions], side: tuple[int, int], name: str, classes: int,
    *, inline: bool = True,
) -> str:  # fmt: skip
    """Originals above what the attack made of them at every level."""
    first = found[0]
    every = list(range(len(first.truth)))
    few = every if len(every) <= _MOST + 1 else chosen(first.truth, classes)
    few = few[:_MOST]
    rows = [("original", first.originals[few])]
    rows += [(one.level.name, one.found[few]) for one in found]
    return _grid(name, rows, side, inline=inline)


def loot(found: Findings, side: tuple[int, int], *, inline: bool = True) -> str:
    """What the trap's bins hold without noise, and the same bins with it."""
    clean = found.looted[0]
    x = found.target.x
    error = np.mean((clean.found - x[clean.nearest]) ** 2, axis=1)
    best = np.argsort(error)[:_MOST]
    rows = [("original", x[clean.nearest[best]])]
    rows += [(one.level.name, one.found[best]) for one in found.looted]
    return _grid("loot", rows, side, inline=inline)


def _grid(
    name: str, rows: Sequence[tuple[str, Floats]], side: tuple[int, int], *, inline: bool
) -> str:
    columns = len(rows[0][1])

    def paint(figure: Any) -> None:
        axes = figure.subplots(len(rows), columns, squeeze=False)
        for line, (label, pictures) in zip(axes, rows, strict=True):
            for ax, picture in zip(line, pictures, strict=True):
                shaped = np.clip(np.nan_to_num(picture), 0, 1).reshape(*side, -1)
                shaped = shaped[..., 0] if shaped.shape[2] == 1 else shaped
                ax.imshow(shaped, cmap="gray", vmin=0, vmax=1, interpolation="nearest")
                ax.set(xticks=(), yticks=())
                ax.grid(visible=False)
            line[0].set_ylabel(label, rotation=0, ha="right", va="center")

    label = "Pictures, row by row: " + ", ".join(text for text, _ in rows) + "."
    size = (0.4 * columns + 0.8, 0.4 * len(rows) + 0.1)
    return svg(name, label, paint, size=size, inline=inline)
