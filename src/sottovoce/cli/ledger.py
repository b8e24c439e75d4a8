"""`sottovoce ledger`: one library call per command; what each does is in `client.ledger`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import click
import typer
from typer import Argument, Option


def make_group(text: str) -> typer.Typer:
    """Return a group of commands; `text` is its help."""
    return typer.Typer(help=text, no_args_is_help=True, rich_markup_mode=None)


ledger_app = make_group(
    "A client's vault: its privacy budget and everything that was released under it."
)
AsJson = Annotated[bool, Option("--json", help="One JSON object on stdout.")]
VaultFile = Annotated[Path, Argument(help="The vault.", metavar="VAULT")]
NodeFile = Annotated[
    Path | None, Option(help="The client's node file, which names vault and data.")
]
SecondLedger = Annotated[
    bool,
    Option(
        "--second-ledger",
        help="Declare, on record: these rows had a ledger before, and the budgets add up.",
    ),
]


@ledger_app.command()
def create(
    vault: Annotated[
        Path | None, Argument(help="The vault to make.", metavar="VAULT", show_default=False)
    ] = None,
    node: NodeFile = None,
    data: Annotated[
        Path | None, Option(help="The client's rows: .npz (arrays x, y), or any other file.")
    ] = None,
    epsilon: Annotated[float | None, Option(help="Budget ε for all runs together.")] = None,
    delta: Annotated[float | None, Option(help="Budget δ for all runs together.")] = None,
    clip: Annotated[
        float | None, Option(help="Largest clipping norm C that a server may ask for.")
    ] = None,
    samples: Annotated[
        int | None, Option(help="Number of rows n, if the file does not say it.")
    ] = None,
    unit: Annotated[
        str | None,
        Option(
            help="What is protected: record (default) | person (in a node file) | client.",
            metavar="UNIT",
        ),
    ] = None,
    calibration: Annotated[
        str | None, Option(help="exact (default) | zcdp.", metavar="NAME")
    ] = None,
    floor: Annotated[
        float | None,
        Option(help="Smallest σ/Δ of a turn (default: one takes at most a quarter of the budget)."),
    ] = None,
    max_rounds: Annotated[int | None, Option(help="Most rounds of one run (default 1000).")] = None,
    max_steps: Annotated[int | None, Option(help="Most steps of one turn (default 16).")] = None,
    run_share: Annotated[
        float | None, Option(help="Part of the budget one run may take (default 0.25).")
    ] = None,
    disclose: Annotated[
        bool | None,
        Option(
            "--disclose/--no-disclose",
            help="Whether servers learn ε, δ and what is spent (they can compute it from σ).",
        ),
    ] = None,
    user: Annotated[
        str | None, Option(help="As root: make it as this user, who runs the worker.")
    ] = None,
    state: Annotated[
        Path | None, Option(help="The worker's SOTTOVOCE_STATE: the second witness's folder.")
    ] = None,
    second_ledger: SecondLedger = False,
    as_json: AsJson = False,
) -> None:
    """Make the vault of a dataset. Its terms may later be tightened, never loosened.

    A client with a node file takes everything from there. Vault and witnesses must belong to the
    user that answers requests; as root, name that user with --user.

    \b
    Examples:
      sottovoce ledger create --node ward.toml
      sottovoce ledger create --node ward.toml --user ward --state /var/lib/ward/state
      sottovoce ledger create ward.vault --data rows.npz --epsilon 8 --delta 1e-5 --clip 1
      sottovoce ledger create ward.vault --data rows.csv --samples 1200 --epsilon 4 --delta 1e-6 \\
        --clip 1 --unit client --no-disclose
    """
    terms = {name: value for name, value in locals().items() if value is not None}
    from sottovoce.client import ledger
    from sottovoce.client.node import Node

    for name in ("vault", "node", "user", "state", "second_ledger", "as_json"):
        terms.pop(name, None)
    place = vault if node is None or user is not None else Node.load(node).vault
    ledger.act_as(user, state, beside=place)
    summary = ledger.create_vault(vault, node, second_ledger=second_ledger, **terms)
    print_result(summary.to_json() if as_json else ledger.format_statement(summary))
    for sentence in summary.policy.advise():
        click.echo(f"warning: {sentence}", err=True)


@ledger_app.command()
def show(
    vault: VaultFile,
    everything: Annotated[
        bool, Option("--all", help="All releases, not only the last 20.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Show what was released, when and to whom, and what is left.

    \b
    Examples:
      sottovoce ledger show ward.vault
      sottovoce ledger show ward.vault --json
    """
    from sottovoce.client import ledger

    summary, most = ledger.read_statement(vault), None if everything else 20
    print_result(summary.to_json() if as_json else ledger.format_statement(summary, most=most))


@ledger_app.command()
def verify(vault: VaultFile, as_json: AsJson = False) -> None:
    """Check hashes, pages, stored uploads, witnesses and location. Exit code 1 if one is wrong.

    A backup passes the checks of its content, has no witness and says that it is a backup.

    \b
    Example:
      sottovoce ledger verify ward.vault
    """
    from sottovoce.client import ledger

    verification = ledger.verify(vault)
    print_result(verification.to_json() if as_json else str(verification))
    verification.require()


@ledger_app.command()
def export(
    vault: VaultFile,
    out: Annotated[Path, Option(help="A new or empty folder.")],
    as_json: AsJson = False,
) -> None:
    """Write a certificate of what was promised and released: JSON, and a page to print.

    \b
    Example:
      sottovoce ledger export ward.vault --out certificate
    """
    from sottovoce.reports import certificate

    summary, folder = certificate.export_certificate(vault, out)
    message = f"{folder / 'certificate.html'} and certificate.json are written"
    print_result(summary.to_json() if as_json else message)


@ledger_app.command()
def resume(vault: VaultFile, as_json: AsJson = False) -> None:
    """Let a stopped client continue. It stopped after a paid answer failed: find out why first.

    \b
    Example:
      sottovoce ledger resume ward.vault
    """
    from sottovoce.client import vault as vaults

    receipt = vaults.resume(vault)
    message = f"{vault} continues; what was burnt stays spent"
    print_result(receipt.to_proof() if as_json else message)


@ledger_app.command()
def backup(
    vault: VaultFile, out: Annotated[Path, Option(help="A new file.")], as_json: AsJson = False
) -> None:
    """Write a backup: a copy that cannot be used until it is restored. No witness goes with it.

    \b
    Example:
      sottovoce ledger backup ward.vault --out /backup/ward-2026-07-01.vault
    """
    from sottovoce.client import vault as vaults

    receipt = vaults.backup(vault, out)
    message = f"{out} is a backup of {vault} up to line {receipt.seq:,}"
    print_result(receipt.to_proof() if as_json else message)


@ledger_app.command()
def rebind(
    vault: Annotated[
        Path | None, Argument(help="The vault.", metavar="VAULT", show_default=False)
    ] = None,
    data: Annotated[
        Path | None, Argument(help="The changed rows.", metavar="DATA", show_default=False)
    ] = None,
    node: NodeFile = None,
    overlap: Annotated[
        str | None,
        Option(help="Which old records are in DATA: all | some | none.", metavar="WHICH"),
    ] = None,
    samples: Annotated[
        int | None, Option(help="Number of rows of DATA, if the file does not say it.")
    ] = None,
    moved: Annotated[
        bool, Option("--moved", help="The file was moved, or this machine's witness was lost.")
    ] = False,
    restored: Annotated[
        bool, Option("--restored", help="This is a backup, or it may be an older state.")
    ] = False,
    receipt: Annotated[
        list[str] | None,
        Option(help="A newer receipt (JSON or a file); may be repeated.", metavar="RECEIPT"),
    ] = None,
    burn_rest: Annotated[
        bool, Option("--burn-rest", help="Without proof: burn all that is left.")
    ] = False,
    nothing_since: Annotated[
        bool,
        Option(
            "--nothing-since", help="Declare, on record: nothing was released after this state."
        ),
    ] = False,
    second_ledger: SecondLedger = False,
    as_json: AsJson = False,
) -> None:
    """Bind a vault to changed records or to another place, or restore it from a backup.

    Nothing is refunded: changed records keep every debit, and what may have been released since a
    backup counts as spent.

    \b
    Examples:
      sottovoce ledger rebind --node ward.toml --overlap some
      sottovoce ledger rebind ward.vault rows.npz --overlap some
      sottovoce ledger rebind ward.vault --moved --nothing-since
      sottovoce ledger rebind ward.vault --restored --receipt newest.json
    """
    options = dict(locals())
    from sottovoce.client import ledger

    del options["vault"], options["receipt"], options["as_json"]
    rebound = ledger.rebind(vault, receipts=receipt or [], **options)
    print_result(rebound.to_json() if as_json else rebound.text)


def print_result(result: str | Mapping[str, Any]) -> None:
    """Print a text, or an object as JSON."""
    click.echo(result if isinstance(result, str) else json.dumps(result, ensure_ascii=False))
