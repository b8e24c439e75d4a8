"""An audit as one page: the verdict, the paper's, pictures, tables. Nothing from the network."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from pathlib import Path

from sottovoce._version import __version__
from sottovoce.data.files import write_file
from sottovoce.reports.document import document, sheet
from sottovoce.reports.text import duration, escape, number, percent
from sottovoce.studies.audit import pictures
from sottovoce.studies.audit.ceiling import CONFIDENCE
from sottovoce.studies.audit.findings import Findings
from sottovoce.studies.audit.table import brackets, message, one_run, shown

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
        "claimed": pictures.claimed(found, inline=False),
        "paper": pictures.bells(found.paper, inline=False),
    }
    side, classes = found.target.pictures, found.target.form.classes
    if side is not None:
        for name, own in (("inversion", found.inverted), ("matching", found.matched)):
            if own:
                files[name] = pictures.reconstructions(own, side, name, classes, inline=False)
        files["traps"] = pictures.loot(found, side, inline=False)
    for name in _attacks(found):
        words = name.lower().replace(",", "").replace(" ", "-")
        files[f"roc-{words}"] = pictures.roc(found, name, inline=False)
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
        ("recognised from one upload, no noise", percent(clean.identified)),
        (f"the same at {noisy.level.name}", percent(noisy.identified)),
        ("stolen by trap weights, no noise", f"{stolen.hits} of {stolen.positives}"),
        (f"the same at {found.looted[-1].level.name}", f"{found.looted[-1].rates.hits}"),
        ("time", duration(found.seconds)),
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
            pictures.claimed(found),
            f"At {100 * CONFIDENCE:g} % confidence, assuming the noise’s Gaussian shape.",
        )
    }
{
        _card(
            "The paper’s noise",
            pictures.bells(paper),
            f"Scores of uploads at ε = {number(paper.setting.epsilon)}: the two bells are "
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
            pictures.reconstructions(found.inverted, side, "inversion", classes),
            "A client with one sample, one upload. The quotient of two gradients is the sample.",
        )
    ]
    if found.matched:
        cards.append(
            _card(
                "Found by matching gradients",
                pictures.reconstructions(found.matched, side, "matching", classes),
                f"Clients with {found.matched[0].tries} samples each: pictures whose gradients "
                "add up to the upload.",
            )
        )
    cards.append(
        _card(
            "Trap weights",
            pictures.loot(found, side),
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
            pictures.roc(found, name),
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
ln {count:,} = {number(math.log(count), 3)}, however bad the noise.</p>
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
uses.{escape(stands)} Measured at δ = {number(found.target.delta)}. An attack that fails here \
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
