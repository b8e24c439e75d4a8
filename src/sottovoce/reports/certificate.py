"""Certify a vault: what was promised and what was released, to print, sign and keep.

A certificate is a JSON object and a page of the same content. The vault is checked from end to end
first: a damaged one gets none. `export_description` writes the same two of released statistics.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from sottovoce._version import __version__
from sottovoce.client import ledger
from sottovoce.client.vault import Vault
from sottovoce.data.files import make_folder, require_empty, write_file
from sottovoce.errors import RunError
from sottovoce.privacy.budget import NOT_COVERED, format_claim
from sottovoce.reports.pages import render_page

if TYPE_CHECKING:
    from sottovoce.schemas import DescriptionDocument

_MOST_LISTED = 500  # releases on the page; all of them are in certificate.json


def export_certificate(path: str | Path, out: str | Path) -> tuple[ledger.Statement, Path]:
    """Write certificate.json and certificate.html into a new or empty folder."""
    folder = require_empty(Path(out), resumable=False)
    ledger.verify(path).require()
    with Vault.open(path, dataset=None) as vault:
        statement = ledger.make_statement(vault)
    _write_both(folder, "certificate", statement.to_json(), render_certificate(statement))
    return statement, folder


def export_description(values: DescriptionDocument, folder: Path) -> None:
    """Write description.json and description.html into a new or empty folder."""
    unit = {"person": "persons"}.get(values["unit"], "rows")
    page = render_page(
        "description.html.j2",
        title="Description of a table",
        headline=f"{values['samples']:,} {unit}, {len(values['columns'])} columns and the label",
        banner="",
        version=__version__,
        clients=", ".join(f"{name} {n:,}" for name, n in values["clients"].items()),
        columns=values["columns"],
        label=values["label"],
        error=values["share_error"],
        text=values["text"],
        correlations=[
            (f"{c['first']}, {c['second']}", f"{c['correlation']:+.2f}", f"{2 * c['error']:.2f}")
            for c in sorted(values["correlations"], key=lambda c: -abs(c["correlation"]))
        ],
    )
    _write_both(require_empty(folder, resumable=False), "description", values, page)


def _write_both(folder: Path, name: str, values: object, page: str) -> None:
    make_folder(folder)
    try:
        text = json.dumps(values, ensure_ascii=False, indent=1)
        write_file(folder / f"{name}.html", page.encode())
        write_file(folder / f"{name}.json", f"{text}\n".encode())
    except OSError as error:
        raise RunError(f"{folder} cannot be written ({error.strerror}); name another") from None


def render_certificate(statement: ledger.Statement) -> str:
    """Return the certificate as one page."""
    promised, releases = statement.promised, statement.releases[-_MOST_LISTED:]
    budget = f"({format_claim(promised.epsilon)}, {format_claim(promised.delta, 3)})"
    unit = "the whole data set" if promised.unit == "client" else f"any one {promised.unit}"
    promise = f"{budget}-differential privacy for {unit}"
    others = "" if statement.only_ledger else ledger.describe_other_ledgers(statement)
    scope = "from this data set, to all servers and in all runs together"
    if others:
        scope = f"under this ledger, to all servers and in all runs; {others}"
    return render_page(
        "certificate.html.j2",
        title=f"Privacy certificate: {promise}",
        headline=promise[:1].upper() + promise[1:],
        version=__version__,
        statement=statement,
        scope=scope,
        made=ledger.format_time(statement.made),
        issued=ledger.format_time(statement.issued),
        clip=ledger.describe_term(statement, "clip", "at most {:g}"),
        floor=ledger.describe_term(statement, "floor", "at least {:g}"),
        other_ledgers=others,
        sums=ledger.describe_sums(statement),
        open_terms=ledger.describe_open_terms(statement),
        tightened=ledger.describe_tightening(statement),
        left=ledger.format_left(statement).replace(" ", "\u00a0"),
        turns=ledger.describe_turns(statement),
        guarantee_text=statement.guarantee.text.partition(" Not covered: ")[0],
        not_covered=[NOT_COVERED[code] for code in statement.guarantee.not_covered],
        releases=[(ledger.format_time(release["time"]), release) for release in releases],
        hidden=len(statement.releases) - len(releases),
        notes=[(ledger.format_time(note["time"]), note["text"]) for note in statement.notes],
    )
