"""Certify a vault: what was promised and what was released, to print, sign and keep.

A certificate is a JSON object and a page of the same content. The vault is checked from end to end
first: a damaged one gets none.
"""

from __future__ import annotations

import json
from pathlib import Path

from sottovoce._version import __version__
from sottovoce.client.ledger import (
    Statement,
    describe_other_ledgers,
    describe_term,
    describe_tightening,
    describe_turns,
    format_left,
    format_time,
    make_statement,
    verify,
)
from sottovoce.client.vault import Vault
from sottovoce.data.files import make_folder, require_empty
from sottovoce.errors import RunError
from sottovoce.privacy.budget import NOT_COVERED, format_claim
from sottovoce.reports.pages import render_page

_MOST_LISTED = 500  # releases on the page; all of them are in certificate.json


def export_certificate(path: str | Path, out: str | Path) -> tuple[Statement, Path]:
    """Write certificate.json and certificate.html into a new or empty folder."""
    folder = require_empty(Path(out), resumable=False)
    verify(path).require()
    with Vault.open(path, dataset=None) as vault:
        statement = make_statement(vault)
    make_folder(folder)
    try:
        text = json.dumps(statement.to_json(), ensure_ascii=False, indent=1)
        (folder / "certificate.json").write_text(text + "\n", "utf-8")
        (folder / "certificate.html").write_text(render_certificate(statement), "utf-8")
    except OSError as error:
        raise RunError(f"{folder} cannot be written ({error.strerror}); name another") from None
    return statement, folder


def render_certificate(statement: Statement) -> str:
    """Return the certificate as one page."""
    promised, releases = statement.promised, statement.releases[-_MOST_LISTED:]
    budget = f"({format_claim(promised.epsilon)}, {format_claim(promised.delta, 3)})"
    unit = "the whole data set" if promised.unit == "client" else f"any one {promised.unit}"
    promise = f"{budget}-differential privacy for {unit}"
    others = "" if statement.only_ledger else describe_other_ledgers(statement)
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
        made=format_time(statement.made),
        issued=format_time(statement.issued),
        clip=describe_term(statement, "clip", "at most {:g}"),
        floor=describe_term(statement, "floor", "at least {:g}"),
        other_ledgers=others,
        tightened=describe_tightening(statement),
        left=format_left(statement).replace(" ", "\u00a0"),
        turns=describe_turns(statement),
        guarantee_text=statement.guarantee.text.partition(" Not covered: ")[0],
        not_covered=[NOT_COVERED[code] for code in statement.guarantee.not_covered],
        releases=[(format_time(release["time"]), release) for release in releases],
        hidden=len(statement.releases) - len(releases),
        notes=[(format_time(note["time"]), note["text"]) for note in statement.notes],
    )
