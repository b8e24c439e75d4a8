# ruff: noqa: E501
"""An audit as one page: the verdict, the paper's, pictures, tables. Nothing from the network."""

from __future__ import annotations

import math
import re
import textwrap
from collections.abc import Sequence
from math import isinf
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sottovoce._version import __version__
from sottovoce.data.files import write_file
from sottovoce.privacy import gaussian
from sottovoce.reports.charts import BLUE, GREEN, INK, MUTED, ORANGE, PURPLE, draw_svg, tidy_axes
from sottovoce.reports.pages import (
    document,
    escape,
    format_duration,
    format_number,
    format_percent,
    sheet,
)
from sottovoce.studies.audit.ceiling import CONFIDENCE, WRONG, least
from sottovoce.studies.audit.findings import Finding, Findings, Row
from sottovoce.studies.audit.inversion import Reconstructions, chosen
from sottovoce.studies.audit.messages import Measured, OneRun

# What an audit looks like: claimed against measured ε, reconstructions, ROC curves, scores.


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
        tidy_axes(ax)

    label = " ".join(
        f"{_whose(one)}, ε = {one.setting.epsilon:g}: measured {one.epsilon[0]:.1f} or more."
        for one in every
    )
    return draw_svg("claimed", label, paint, size=_TALL, inline=inline)


def _whose(one: Measured) -> str:
    name = "Theorem 1" if one.setting.calibration == "paper" else "ours"
    return f"{name}, δ = {format_number(one.setting.delta)}"


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
        tidy_axes(ax)

    label = f"Two bells {one.true:.2f} σ apart, where {one.setting.promised:.2f} was promised."
    return draw_svg("bells", label, paint, size=_TALL, inline=inline)


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
        tidy_axes(ax)

    said = ", ".join(f"{attack.level.name}: {attack.auc:.2f}" for attack in own)
    return draw_svg(
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
    return draw_svg(name, label, paint, size=size, inline=inline)


# What a person reads in a terminal after an audit.


def table(found: Findings) -> str:
    """The attacks, what uploads prove, the paper, and the verdict."""
    head = ["attack", "measure", *(level.name for level in found.levels)]
    rows = [
        [row.attack, row.measure, *(shown(row, row.cells[level]) for level in found.levels)]
        for row in found.rows()
    ]
    proved = [
        "", "δ", "μ promised", "μ measured", "ε measured, Gaussian", "ε measured, free",
    ]  # fmt: skip
    uploads = [message(one) for one in (*found.measured, *found.headline)]
    guessed = [
        "one run",
        "canaries",
        "guesses",
        "right",
        "ε measured, Gaussian",
        "ε measured, free",
    ]
    once = [one_run(run) for run in found.one_runs]
    return "\n".join(
        [
            _filled(brackets(found)),
            *_lines(head, rows),
            "",
            f"Bounds at {100 * CONFIDENCE:g} %, thresholds fixed beforehand; “Gaussian” assumes "
            "the noise's shape.",
            *_lines(proved, uploads),
            *(["", *_lines(guessed, once)] if once else []),
            "",
            _filled(found.judgement()),
            "",
            _filled(found.verdict()),
        ]
    )


def brackets(found: Findings) -> str:
    """What stands in brackets in the table of attacks, and when it is contradicted."""
    return (
        "In brackets: what no attacker exceeds on average, whatever it knows and computes. A count "
        "contradicts it if it is above by more than chance explains; all "
        f"{found.comparisons} comparisons of an audit together do so wrongly once in "
        f"{1 / WRONG:,.0f} audits at most. Records of one run share its noise, so that runs are "
        "counted for membership, and one sample of each upload for matching; trap weights get one "
        "upload and decide nothing."
    )


def shown(row: Row, cell: Finding) -> str:
    """A cell as it is printed, its ceiling in brackets.

    >>> shown(Row("", "", {}), Finding(0.021, 0.09))
    '2.1 % (9.0 %)'
    >>> shown(Row("", "", {}, False), Finding(1.2e-17))
    '1.2e-17'
    >>> from sottovoce.studies.audit.ceiling import Rates
    >>> shown(Row("", "", {}), Finding(0.5, 0.9, counts=Rates(1, 2, 1, 100)))
    '50.0 % at 1.0 % (90.0 %)'
    """
    value = f"{100 * cell.value:.1f} %" if row.share else f"{cell.value:.3g}"
    if cell.counts is not None and cell.counts.negatives and row.decides:
        value += f" at {100 * cell.counts.fpr:.1f} %"  # alarms as they were counted
    if cell.ceiling is None:
        return value
    most = f"{100 * cell.ceiling:.1f} %" if row.share else f"{cell.ceiling:.3g}"
    return f"{value} ({most})" + ("  exceeds" if cell.exceeds else "")


def message(one: Measured) -> list[str]:
    """What the uploads of one setting prove, as a row of texts."""
    setting, (low, _, high) = one.setting, one.mu
    whose = "the paper's" if setting.calibration == "paper" else setting.calibration
    epsilons = one.epsilon
    return [
        f"{whose}, ε = {setting.epsilon:g}",
        f"{setting.delta:g}",
        f"{setting.promised:.3f}",
        _range(low, high, 3) + ("  contradicted" if one.contradicts else ""),
        _range(*epsilons, 2),
        f"≥ {least(one.free_epsilon, 2)}",
    ]


def one_run(run: OneRun) -> list[str]:
    """What the guesses of one run prove, as a row of texts."""
    return [
        f"{run.setting.calibration}, ε = {run.setting.epsilon:g}",
        f"{run.canaries:,}",
        f"{run.guesses:,}",
        f"{run.right:,}" + ("  contradicted" if run.contradicts else ""),
        f"≥ {least(run.gaussian_epsilon, 2)}",
        f"≥ {least(run.epsilon, 2)}",
    ]


def _range(low: float, high: float, digits: int) -> str:
    if isinf(high):
        return f"{least(low, digits)} or more"
    return f"{least(low, digits)} to {high:.{digits}f}"


def _lines(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[i]) for row in (head, *rows)) for i in range(len(head))]
    lines = []
    for row in (head, *rows):
        cells = [text.ljust(width) for text, width in zip(row, widths, strict=True)]
        lines.append("  ".join(cells).rstrip())
    return lines


def _filled(text: str) -> str:
    return textwrap.fill(text, width=96, break_on_hyphens=False)


_STYLE = """
.verdict { font-size: 1.1rem; max-width: 46rem; margin-top: 1rem; }
.wide { grid-column: 1 / -1; }
.bad { color: var(--orange); font-weight: 650; }
td small { white-space: nowrap; }
.attacks tbody th { min-width: 9rem; color: var(--ink); }
.attacks td { min-width: 5.5rem; }
.attacks td:nth-child(2) { min-width: 7.5rem; }
.proved th, .proved td { white-space: nowrap; }
.intro { max-width: 46rem; margin-bottom: 1rem; }
.card + .intro { margin-top: 0.9rem; }
"""


def write(found: Findings, folder: Path) -> Path:
    """Write audit.html and its drawings into a folder; the path of the page."""
    write_file(folder / "audit.html", render(found).encode())
    for name, drawing in drawings(found).items():
        write_file(folder / f"{name}.svg", drawing.encode())
    return folder / "audit.html"


def drawings(found: Findings) -> dict[str, str]:
    """Every figure of the page as a file by itself."""
    files = {
        "claimed": claimed(found, inline=False),
        "paper": bells(found.paper, inline=False),
    }
    side, classes = found.target.pictures, found.target.form.classes
    if side is not None:
        for name, own in (("inversion", found.inverted), ("matching", found.matched)):
            if own:
                files[name] = reconstructions(own, side, name, classes, inline=False)
        files["traps"] = loot(found, side, inline=False)
    for name in _attacks(found):
        words = name.lower().replace(",", "").replace(" ", "-")
        files[f"roc-{words}"] = roc(found, name, inline=False)
    return files


def render(found: Findings) -> str:
    """The page as text."""
    verdict, against = _together(found.verdict()), found.contradictions()
    banner = (
        '<p class="banner" role="note">A quick audit: few messages, few shadow runs. '
        "It shows that everything works; the full one proves more.</p>"
        if found.quick
        else ""
    )
    status = "failed" if against else "finished"
    word = "contradicted" if against else "not contradicted"
    parts = [
        _tiles(found), _headline(found), _pictures(found), _membership(found),
        _attack_table(found), _message_table(found), _one_run(found), _how(found),
    ]  # fmt: skip
    body = f"""<header>
<p class="eyebrow"><span>sottovoce</span> audit of {escape(found.target.name)} \
<span class="status {status}">{word}</span></p>
<h1>{verdict}</h1>
<p class="verdict">{_together(found.judgement())}</p>
{banner}
</header>
<main>
{"".join(part for part in parts if part)}
</main>
<footer><p>Written by sottovoce {escape(__version__)}. This page loads nothing from the network.\
</p></footer>"""
    return document(
        title=found.verdict(), css=sheet("sottovoce.reports", "page.css") + _STYLE, body=body
    )


def _tiles(found: Findings) -> str:
    clean, noisy = found.inverted[0], found.inverted[-1]
    stolen = found.looted[0].rates
    tiles = [
        ("recognised from one upload, no noise", format_percent(clean.identified)),
        (f"the same at {noisy.level.name}", format_percent(noisy.identified)),
        ("stolen by trap weights, no noise", f"{stolen.hits} of {stolen.positives}"),
        (f"the same at {found.looted[-1].level.name}", f"{found.looted[-1].rates.hits}"),
        ("time", format_duration(found.seconds)),
    ]
    rows = "".join(f"<div><dt>{escape(k)}</dt><dd>{escape(v)}</dd></div>" for k, v in tiles)
    return f'\n<dl class="tiles">{rows}</dl>'


def _headline(found: Findings) -> str:
    paper, lines = found.paper, (*found.measured, *found.headline)
    uploads = sorted({2 * one.messages * one.setting.rounds for one in lines})
    many = " to ".join(f"{count:,}" for count in (uploads[0], uploads[-1])[-len(uploads) :])
    return f"""
<section aria-labelledby="claimed">
<h2 id="claimed">Claimed and measured</h2>
<p class="intro">A server that knows both candidates for one record, and may send any model, \
scores {many} real uploads for each line. Nothing beats it; \
what it measures is what the noise is worth.</p>
<div class="figures">
{
        _card(
            "ε, claimed and measured",
            claimed(found),
            f"At {100 * CONFIDENCE:g} % confidence, assuming the noise’s Gaussian shape.",
        )
    }
{
        _card(
            "The paper’s noise",
            bells(paper),
            f"Scores of uploads at ε = {format_number(paper.setting.epsilon)}: the two bells are "
            "further apart than the claim allows.",
        )
    }
</div>
</section>"""


def _pictures(found: Findings) -> str:
    side, classes = found.target.pictures, found.target.form.classes
    if side is None:
        return ""
    cards = [
        _card(
            "Read off the first layer",
            reconstructions(found.inverted, side, "inversion", classes),
            "A client with one sample, one upload. The quotient of two gradients is the sample.",
        )
    ]
    if found.matched:
        cards.append(
            _card(
                "Found by matching gradients",
                reconstructions(found.matched, side, "matching", classes),
                f"Clients with {found.matched[0].tries} samples each: pictures whose gradients "
                "add up to the upload.",
            )
        )
    cards.append(
        _card(
            "Trap weights",
            loot(found, side),
            f"A dishonest server isolates single samples of a client that has {len(found.target.y)}"
            "; the bins that worked best without noise.",
        )
    )
    return f"""
<section aria-labelledby="pictures">
<h2 id="pictures">What the server sees</h2>
<div class="figures">
{"".join(cards)}</div>
</section>"""


def _membership(found: Findings) -> str:
    cards = [
        _card(
            escape(name[0].upper() + name[1:]),
            roc(found, name),
            "Dotted: what no attacker exceeds. Dashed: a coin. At the left single alarms decide.",
        )
        for name in _attacks(found)
    ]
    runs = len(found.members[0].members)
    return f"""
<section aria-labelledby="members">
<h2 id="members">Was this record there?</h2>
<p class="intro">From {runs} shadow runs on random halves of a pool of \
{found.members[0].members.shape[1]} records, small enough to be learnt by heart: half of the runs \
teach the attacker, the other half are judged.</p>
<div class="figures">
{"".join(cards)}</div>
</section>"""


def _attack_table(found: Findings) -> str:
    head = ["attack", "measure", *(level.name for level in found.levels)]
    rows = []
    for row in found.rows():
        cells = []
        for level in found.levels:
            text, _, most = shown(row, row.cells[level]).partition(" (")
            text, _, alarms = text.partition(" at ")
            most = f"at {alarms} ({most}" if alarms and most else f"({most}" if most else ""
            most = f" <small>{escape(most)}</small>" if most else ""
            bad = ' class="bad"' if row.cells[level].exceeds else ""
            cells.append(f"<span{bad}>{escape(text)}</span>{most}")
        rows.append([escape(row.attack), escape(row.measure), *cells])
    return f"""
<section aria-labelledby="attacks">
<h2 id="attacks">Every attack</h2>
<p class="intro">{escape(brackets(found))}</p>
{_table("Attacks", head, rows, "attacks")}
</section>"""


def _message_table(found: Findings) -> str:
    head = ["noise", "δ", "μ promised", "μ measured", "ε, Gaussian shape", "ε, no assumption"]
    rows = [[escape(text) for text in message(one)] for one in (*found.measured, *found.headline)]
    count = found.paper.messages
    return f"""
<section aria-labelledby="proved">
<h2 id="proved">What uploads prove</h2>
{_table("What uploads prove", head, rows, "proved")}
<p class="intro">Clopper–Pearson bounds at {100 * CONFIDENCE:g} %, thresholds fixed beforehand. \
Without an assumption {count:,} runs a side cannot prove much more than \
ln {count:,} = {format_number(math.log(count), 3)}, however bad the noise.</p>
</section>"""


def _one_run(found: Findings) -> str:
    if not found.one_runs:
        return ""
    head = ["one run", "canaries", "guesses", "right", "ε, Gaussian shape", "ε, no assumption"]
    rows = [[escape(text) for text in one_run(run)] for run in found.one_runs]
    return f"""
<section aria-labelledby="onerun">
<h2 id="onerun">The same from one run</h2>
<p class="intro">A run of {found.one_runs[0].setting.rounds} uploads of a client whose rows are \
all canaries; the server answers with models of its own choice and guesses the coins it is \
surest of ({100 * CONFIDENCE:g} %).</p>
{_table("One run", head, rows, "proved")}
</section>"""


def _how(found: Findings) -> str:
    stands = (
        ""
        if found.target.own
        else " The attacks read dense layers, so an mlp stands for the plan’s own model."
    )
    return f"""
<section aria-labelledby="how">
<h2 id="how">How it was made</h2>
<p class="intro">“No noise” is the client’s step before noise, which nothing may send; in shadow \
runs of the simulator it is ε = 10⁶. Everything else went through the release that a device \
uses.{escape(stands)} Measured at δ = {format_number(found.target.delta)}. An attack that fails here \
proves nothing by itself; the ceilings do, and a measurement above one would refute us.\
{escape(found.caveats())}</p>
<p class="intro">Pictures and rates were computed on the clients’ rows, without noise too. The \
guarantee does not cover them: do not publish an audit of private data.</p>
<p class="intro"><code>{escape(found.command)}</code></p>
</section>"""


def _together(text: str) -> str:
    """No line ends within “ε ≥ 4”."""
    return escape(re.sub(" ([≥=]) ", "\u00a0\\1\u00a0", text))


def _attacks(found: Findings) -> list[str]:
    return list(dict.fromkeys(attack.name for attack in found.members))


def _card(title: str, drawing: str, text: str, kind: str = "") -> str:
    return (
        f'<figure class="card {kind}"><h3>{title}</h3>{drawing}'
        f"<figcaption>{text}</figcaption></figure>\n"
    )


def _table(caption: str, head: Sequence[str], rows: Sequence[Sequence[str]], kind: str = "") -> str:
    """Cells are escaped already."""
    top = "".join(f'<th scope="col">{escape(text)}</th>' for text in head)
    body = "".join(
        f'<tr><th scope="row">{row[0]}</th>' + "".join(f"<td>{c}</td>" for c in row[1:]) + "</tr>"
        for row in rows
    )
    return (
        f'<div class="card scroll" role="region" aria-label="{escape(caption)}" tabindex="0">'
        f'<table class="{kind}"><caption class="hidden">{escape(caption)}</caption>'
        f"<thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>"
    )
