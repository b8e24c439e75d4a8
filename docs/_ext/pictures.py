"""Draw the pictures of the documentation as SVG, from text and from the code itself.

They stand inside the page, so that they take the colours of its theme (docs/_static/sottovoce.css),
and are 440 units wide, so that their words can be read on a phone.
"""

from __future__ import annotations

import math
import tomllib
from html import escape
from pathlib import Path

from sottovoce.privacy.calibration import capacity
from sottovoce.privacy.sensitivity import Recipe
from sottovoce.privacy.tank import Tank
from sottovoce.schedules.algorithms import DiscountedRounds, FixedRounds

WIDTH = 440


def draw(height: float, label: str, *parts: str) -> str:
    """Return one picture; Markdown ends a block of HTML at an empty line, so there is none."""
    body = "\n".join(parts)
    return (
        f'<figure class="picture"><svg viewBox="0 0 {WIDTH} {height:g}" role="img" '
        f'aria-label="{escape(label, quote=True)}">\n{body}\n</svg></figure>\n'
    )


def write(x: float, y: float, text: str, style: str = "", anchor: str = "start") -> str:
    """Return a line of text."""
    return f'<text x="{x:g}" y="{y:g}" class="{style}" text-anchor="{anchor}">{escape(text)}</text>'


def box(x: float, y: float, width: float, height: float, style: str) -> str:
    """Return a rectangle with round corners."""
    return (
        f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="7" class="{style}"/>'
    )


def arrow(x: float, top: float, bottom: float, text: str, style: str = "") -> str:
    """Return an arrow downwards with words beside it."""
    path = f"M{x:g} {top:g}V{bottom - 6:g}m-5 -2l5 8l5 -8"
    return f'<path d="{path}" class="line"/>' + write(x + 12, (top + bottom) / 2 + 4, text, style)


#: Who, how far trusted, and what each sees; a client of the same federation is an observer, too.
PARTIES = (
    (
        "A client's own machine",
        "trusted by its owner",
        "private",
        (
            "its rows, their gradients, the clipped sum",
            "the noise that it draws, and the vault with its budget",
        ),
        "the upload: its model plus its noise",
    ),
    (
        "The server, and whoever runs it",
        "trusted with nothing about a record",
        "seen",
        (
            "every upload of every client, already noised, by name",
            "public numbers: n, C, σ, ε, δ; who answered, and when",
            "its own validation and test rows (they should be public)",
        ),
        "models: to clients, and at the end to anybody",
    ),
    (
        "Other clients",
        "may work together with the server",
        "seen",
        ("the model of every round; at worst, all that the server sees",),
        "",
    ),
    (
        "Whoever gets the model",
        "may be anybody",
        "seen",
        ("a function of noised uploads: it tells no more than they do",),
        "",
    ),
)


def who_sees_what() -> str:
    """Draw the parties of a federation, what each sees, and what goes from one to the next."""
    parts, y = [], 4.0
    for name, trust, style, seen, leaves in PARTIES:
        height = 54 + 19 * len(seen)
        parts += [box(4, y, WIDTH - 8, height, style), write(18, y + 22, name, "head")]
        parts.append(write(18, y + 39, trust, "small"))
        parts += [write(18, y + 60 + 19 * i, f"• {line}", "body") for i, line in enumerate(seen)]
        y += height
        if leaves:
            parts.append(arrow(60, y + 3, y + 37, leaves, "strong"))
            y += 40
        else:
            y += 10
    label = "Rows stay on the client's machine; all others see noised values and public numbers"
    return draw(y + 4, label, *parts)


def house() -> str:
    """Draw the packages in the layers that import-linter checks (pyproject.toml)."""
    root = Path(__file__).parents[2]
    table = tomllib.loads((root / "pyproject.toml").read_text("utf-8"))
    layers = table["tool"]["importlinter"]["contracts"][0]["layers"]
    parts, step = [], 44
    for row, layer in enumerate(layers):
        rooms = [room.strip() for room in layer.split(":")]
        width = (WIDTH - 50 - 8 * (len(rooms) - 1)) / len(rooms)
        for i, room in enumerate(rooms):
            x = 46 + i * (width + 8)
            parts += [box(x, 4 + row * step, width, 34, "seen")]
            parts.append(write(x + width / 2, 26 + row * step, room, "head", "middle"))
    parts.append(arrow(20, 8, 4 + len(layers) * step - 12, ""))
    middle = len(layers) * step / 2
    word = write(12, middle, "imports", "small", "middle")
    turned = f'<g transform="rotate(-90 12 {middle:g})">{word}</g>'
    return draw(len(layers) * step, "A package imports only packages below it", *parts, turned)


def spend_budget(losses: list[float], schedule: FixedRounds | DiscountedRounds, epsilon: float):
    """Return round, budget left, noise and horizon of one client, by the package's own code."""
    tank = Tank.full(capacity(epsilon, 1e-5, calibration="exact"))
    sensitivity = float(Recipe(learning_rate=2.0, clip=1.0).sensitivity(143))
    progress = schedule.start(losses[0])
    rows = []
    while (turn := schedule.round(progress)) is not None:
        offer = tank.offer(sensitivity=sensitivity, remaining=turn.horizon - turn.t)
        rows.append((turn.t, float(tank.left_fraction), float(offer.sigma), turn.horizon))
        tank = tank.spend(offer.units)
        progress = schedule.advance(progress, losses[turn.t + 1])
    return [*rows, (len(rows), float(tank.left_fraction), rows[-1][2], rows[-1][3])]


def plot(rows: list, column: int, top: float, most: float, rounds: int, style: str) -> str:
    """Return one curve, as steps, over the rounds."""
    x = [46 + (WIDTH - 66) * row[0] / rounds for row in rows]
    y = [top + 120 * (1 - row[column] / most) for row in rows]
    path = f"M{x[0]:.1f} {y[0]:.1f}" + "".join(
        f"H{b:.1f}V{c:.1f}" for b, c in zip(x[1:], y[1:], strict=True)
    )
    return f'<path d="{path}" class="curve {style}"/>'


def budget_to_noise() -> str:
    """Draw budget left and noise of one client, with a fixed horizon and with one that shrinks."""
    rounds = 120
    losses = [0.35 + 1.95 * math.exp(-t / 9) for t in range(rounds + 2)]
    fixed = spend_budget(losses, FixedRounds(rounds), 8.0)
    shrinking = spend_budget(losses, DiscountedRounds(rounds, zeta=2e-3), 8.0)
    most = 1.08 * fixed[0][2]
    end = shrinking[-1][0]
    parts = []
    for top, column, limit, title, ticks in (
        (
            30,
            1,
            1.0,
            "budget left of ε = 8, in % of its capacity",
            ((0, "0"), (0.5, "50"), (1, "100")),
        ),
        (
            200,
            2,
            most,
            "noise σ of one upload",
            tuple((s, f"{s:.3f}") for s in (0, fixed[0][2], shrinking[-2][2])),
        ),
    ):
        parts.append(write(46, top - 12, title, "head"))
        parts.append(f'<path d="M46 {top}V{top + 120}H{WIDTH - 20}" class="line"/>')
        parts += [
            write(40, top + 120 * (1 - value / limit) + 4, text, "small", "end")
            for value, text in ticks
        ]
        for rows, style in ((fixed, "fixed"), (shrinking, "shrinking")):
            parts.append(plot(rows, column, top, limit, rounds, style))
    for t in (0, 30, 60, 90, 120):
        parts.append(write(46 + (WIDTH - 66) * t / rounds, 336, str(t), "small", "middle"))
    parts.append(write(WIDTH - 20, 352, "round", "small", "end"))
    words = f"T = {rounds} rounds, fixed"
    parts.append(f'<path d="M46 362h24" class="curve fixed"/>{write(76, 366, words, "body")}')
    words = f"T discounted when the loss stalls: the run ends after {end}"
    parts.append(f'<path d="M46 382h24" class="curve shrinking"/>{write(76, 386, words, "body")}')
    label = "The budget left is shared by the rounds that remain: fewer rounds, less noise in each"
    return draw(394, label, *parts)
