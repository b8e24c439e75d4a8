"""The certificate of a vault: what was promised and what was released, to print, sign and keep.

One JSON object and one self-contained page of the same content. The vault is checked from end to
end first: a damaged one gets none.
"""

from __future__ import annotations

import json
from html import escape
from pathlib import Path

from sottovoce._version import __version__
from sottovoce.client.ledger import (
    Release,
    Statement,
    account,
    describe_term,
    other_ledgers,
    percent_left,
    tightened,
    turns,
    verify,
    when,
)
from sottovoce.client.vault import Vault
from sottovoce.data.files import make_folder, require_empty
from sottovoce.errors import RunError
from sottovoce.privacy.budget import NOT_COVERED, format_claim
from sottovoce.reports.document import document, sheet

_MOST_LISTED = 500  # releases on the page; all of them are in certificate.json


def export(path: str | Path, out: str | Path) -> tuple[Statement, Path]:
    """Write certificate.json and certificate.html into a new or empty folder."""
    folder = require_empty(Path(out), resumable=False)
    verify(path).require()
    with Vault.open(path, dataset=None) as vault:
        told = account(vault)
    make_folder(folder)
    try:
        text = json.dumps(told.to_json(), ensure_ascii=False, indent=1)
        (folder / "certificate.json").write_text(text + "\n", "utf-8")
        (folder / "certificate.html").write_text(page(told), "utf-8")
    except OSError as error:
        raise RunError(f"{folder} cannot be written ({error.strerror}); name another") from None
    return told, folder


def page(told: Statement) -> str:
    """The certificate as one HTML page that asks nothing of the network."""
    policy, promised = told.policy, told.promised
    what = "any one record" if promised.unit == "record" else "the whole data set"
    budget = f"({format_claim(promised.epsilon)}, {format_claim(promised.delta, 3)})"
    promise = f"{budget}-differential privacy for {what}"
    facts = [
        ("Vault", f"<code>{escape(told.vault)}</code>", "wide"),
        ("Data set (its fingerprint, sealed)", f"<code>{escape(told.seal)}</code>", "wide"),
        ("Records", f"{policy.samples:,}", ""),
        ("Calibration", escape(promised.calibration), ""),
        ("Vault made", f"{escape(when(told.made))} UTC", ""),
        ("Certificate issued", f"{escape(when(told.issued))} UTC", ""),
        ("Gradients cut to norm", describe_term(told, "clip", "at most {:g}"), ""),
        (
            "Noise of one turn, its steps together, σ/Δ",
            describe_term(told, "floor", "at least {:g}"),
            "",
        ),
    ]
    scope = "from this data set, to all servers and in all runs together"
    if not told.only_ledger:
        facts.append(("Other ledgers", escape(other_ledgers(told)), "wide"))
        scope = f"under this ledger, to all servers and in all runs; {other_ledgers(told)}"
    if told_later := tightened(told):
        facts.append(("Budget", escape(told_later), "wide"))
    rows = "".join(
        f"<div{f' class={kind}' if kind else ''}><dt>{name}</dt><dd>{text}</dd></div>"
        for name, text, kind in facts
    )
    guarantee = told.guarantee.text.partition(" Not covered: ")[0]
    uncovered = "".join(f"<li>{escape(NOT_COVERED[c])}</li>" for c in told.guarantee.not_covered)
    body = f"""<main class="sheet">
<header>
<p class="eyebrow"><span>sottovoce</span> <span>Privacy certificate</span></p>
<h1>{escape(promise[:1].upper() + promise[1:])}</h1>
<p class="lead">Promised by one client for everything it has sent and will send {escape(scope)}. \
The budget is the promise; the gauge below is only \
how much of it is used.</p>
</header>
<dl class="facts">{rows}</dl>
{_fuel(told)}
<section class="promise"><h2>What is guaranteed</h2><p>{escape(guarantee)}</p></section>
<section><h2>What is not</h2><ul>{uncovered}</ul></section>
{_releases(told)}{_notes(told)}
<footer>
<p>Line {told.receipt.seq:,} of the ledger has the hash <code>{escape(told.receipt.hash)}</code>. \
Whoever keeps it can have it checked later: a ledger that has lost or changed anything up to that \
line cannot show it again. <code>sottovoce ledger verify</code> checks the vault itself.</p>
<p>Issued by sottovoce {escape(__version__)}. This page loads nothing from the network.</p>
</footer>
</main>"""
    return document(
        title=f"Privacy certificate: {promise}",
        css=sheet("sottovoce.reports", "certificate.css"),
        body=body,
    )


def _fuel(told: Statement) -> str:
    left = percent_left(told).replace(" ", "\u00a0")
    return f"""<section><h2>Fuel</h2>
<div class="gauge" role="img" aria-label="{left} of the budget is left">\
<span style="width:{100 * told.left:.2f}%"></span></div>
<p><strong>{left}</strong> of the budget is left. Debited so far: {escape(turns(told))}.</p>
</section>"""


def _releases(told: Statement) -> str:
    if not told.releases:
        return "<section><h2>Releases</h2><p>Nothing has been released.</p></section>"
    listed = told.releases[-_MOST_LISTED:]
    hidden = len(told.releases) - len(listed)
    before = (
        f'<p class="small">The last {len(listed):,}; {hidden:,} before these are in '
        "certificate.json.</p>"
        if hidden
        else ""
    )
    return f"""<section><h2>Releases</h2>{before}
<div class="scroll" tabindex="0" role="region" aria-label="Releases"><table>
<thead><tr><th scope="col">when (UTC)</th><th scope="col">server</th><th scope="col">run</th>\
<th scope="col" class="n">round</th><th scope="col" class="n">releases</th>\
<th scope="col" class="n">μ</th><th scope="col" class="n">share</th><th scope="col">upload</th>\
</tr></thead>
<tbody>{"".join(map(_row, listed))}</tbody>
</table></div></section>"""


def _row(release: Release) -> str:
    upload = "made" if release.answered else '<span class="burnt">burnt</span>'
    run = release.run if len(release.run) <= 12 else release.run[:11] + "…"
    return (
        f'<tr><td class="when">{escape(when(release.time))}</td><td>{escape(release.server)}</td>'
        f'<td><code>{escape(run)}</code></td><td class="n">{release.t:,}</td>'
        f'<td class="n">{release.releases:,}</td><td class="n">{release.mu:.4f}</td>'
        f'<td class="n">{100 * release.share:.2f}\u00a0%</td><td>{upload}</td></tr>'
    )


def _notes(told: Statement) -> str:
    if not told.notes:
        return ""
    items = "".join(
        f"<tr><td class='when'>{escape(when(note.time))}</td><td>{escape(note.text)}</td></tr>"
        for note in told.notes
    )
    return f"<section><h2>Also recorded</h2><table><tbody>{items}</tbody></table></section>"
