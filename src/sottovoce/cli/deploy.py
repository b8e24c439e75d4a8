"""`sottovoce server` and `sottovoce node`: set a machine of a federation up, and look at it."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import click
from typer import Argument, Option

from sottovoce.cli.ledger import AsJson, make_group
from sottovoce.errors import VaultRefusal

if TYPE_CHECKING:
    from sottovoce.flower.deploy import Status

server_app = make_group("The server of a federation between machines: keys, proxy, services.")
node_app = make_group("A client of a federation between machines: key, node file, vault, services.")
Folder = Annotated[Path | None, Option(help="Where keys and configuration go.")]
State = Annotated[Path | None, Option(help="Where the services keep their state.")]
Units = Annotated[Path | None, Option(help="Where systemd finds units.")]
User = Annotated[str | None, Option(help="The user of the services, made if missing.")]
Authority = Annotated[
    Path | None, Option(help="Where ca.crt and the encrypted ca.key are, or are made.")
]
AsMetrics = Annotated[
    bool, Option("--prometheus", help="Numbers for Prometheus's textfile collector.")
]
PassphraseFile = Annotated[
    Path | None,
    Option(help="A file with the passphrase of ca.key (else it is asked for).", exists=True),
]


@server_app.command("init")
def init_server(
    names: Annotated[
        list[str] | None,
        Argument(
            help="Host names and addresses to which clients connect (else asked for).",
            metavar="NAME…",
        ),
    ] = None,
    folder: Folder = None,
    state: State = None,
    runs: Annotated[
        Path | None, Option(help="The folder of plans and runs; nothing else is read.")
    ] = None,
    units: Units = None,
    authority: Authority = None,
    user: User = None,
    port: Annotated[int | None, Option(help="The port to which clients connect.")] = None,
    link_port: Annotated[int | None, Option(help="The SuperLink's own port, on loopback.")] = None,
    parameters: Annotated[
        int | None, Option(help="Parameters of the largest model: bounds every answer.")
    ] = None,
    clients: Annotated[int | None, Option(help="Most clients: bounds the memory.")] = None,
    passphrase_file: PassphraseFile = None,
) -> None:
    """Make the keys, the proxy's configuration and the services of a server.

    \b
    Example (as root):
      sottovoce server init server.example.org 192.0.2.7
    """
    options = _drop_absent(locals(), "names", "passphrase_file")
    if not names and sys.stdin.isatty():
        names = str(click.prompt("Host names to which clients connect", err=True)).split()
    if not names:
        raise click.UsageError("Missing argument NAME…")
    from sottovoce.flower import deploy

    places = deploy.ServerPlaces(**options)
    passphrase = _read_passphrase(passphrase_file, new=not (places.authority / "ca.crt").exists())
    click.echo(deploy.init_server(names, places, passphrase), nl=False)


@server_app.command("renew")
def renew_server(
    folder: Folder = None, authority: Authority = None, passphrase_file: PassphraseFile = None
) -> None:
    """Sign the server's certificates for another year; clients need nothing new.

    \b
    Example (as root, with ca.key back in its place):
      sottovoce server renew
    """
    options = _drop_absent(locals(), "passphrase_file")
    from sottovoce.flower import deploy

    places = deploy.ServerPlaces(**options)
    click.echo(deploy.renew_server(places, _read_passphrase(passphrase_file, new=False)), nl=False)


@server_app.command("status")
def show_server_status(
    folder: Folder = None,
    runs: Annotated[Path | None, Option(help="The folder of plans and runs.")] = None,
    as_json: AsJson = False,
    prometheus: AsMetrics = False,
) -> None:
    """Look at certificates, services and the newest run. Exit code 1 if one is not well.

    \b
    Example (as root):
      sottovoce server status
    """
    options = _drop_absent(locals(), "as_json", "prometheus")
    from sottovoce.flower import deploy

    _print_status(deploy.read_server_status(deploy.ServerPlaces(**options)), as_json, prometheus)


@node_app.command("init")
def init_node(
    name: Annotated[
        str | None,
        Argument(help="The client's name, as the server sees it (else all is asked for)."),
    ] = None,
    server: Annotated[str | None, Option(help="The server's HOST:PORT.")] = None,
    ca: Annotated[Path | None, Option(help="The server's ca.crt, as its operator sent it.")] = None,
    rows: Annotated[
        Path | None,
        Option(help="The rows (.npz, .csv, .parquet): they are copied, and the vault made."),
    ] = None,
    classes: Annotated[int | None, Option(help="With --rows: how many labels.")] = None,
    plan: Annotated[
        Path | None, Option(help="With --rows: the federation's plan, for a table's columns.")
    ] = None,
    epsilon: Annotated[float | None, Option(help="With --rows: the budget ε.")] = None,
    delta: Annotated[float | None, Option(help="With --rows: the budget δ.")] = None,
    folder: Folder = None,
    data: Annotated[
        Path | None, Option(help="The folder of rows, node file and vault (/srv/NAME).")
    ] = None,
    state: State = None,
    units: Units = None,
    user: User = None,
    port: Annotated[int | None, Option(help="The SuperNode's own port, on loopback.")] = None,
) -> None:
    """Make the key, the node file, the vault and the services of a client.

    Without a name it asks six questions. Without rows it leaves node file and vault to you.

    \b
    Examples (as root):
      sottovoce node init
      sottovoce node init ward-3 --server server.example.org:8000 --ca ca.crt
      sottovoce node init ward-3 --server server.example.org:8000 --ca ca.crt \\
        --rows rows.csv --plan plan.toml --epsilon 8 --delta 1e-5
    """
    options = _drop_absent(locals())
    if name is None and sys.stdin.isatty():
        options = {**_ask_questions(options), **options}
    for key in ("name", "server", "ca"):
        if key not in options:
            raise click.UsageError(f"Missing {'argument NAME' if key == 'name' else f'--{key}'}")
    from sottovoce.client import ledger
    from sottovoce.flower import deploy

    keys = ("rows", "classes", "plan", "epsilon", "delta")
    terms_given = {key: options.pop(key) for key in keys if key in options}
    missing = [f"--{key}" for key in ("rows", "epsilon", "delta") if key not in terms_given]
    if terms_given and missing:
        raise click.UsageError(f"Missing {missing[0]}, which goes with --{next(iter(terms_given))}")
    terms = deploy.NodeTerms(**terms_given) if terms_given else None
    places = deploy.NodePlaces(**options)
    click.echo(deploy.init_node(places, terms), nl=False)
    if terms is not None:  # last: it is made as the user of the services
        owner, node = places.owner if os.geteuid() == 0 else None, places.rows / "node.toml"
        ledger.act_as(owner, places.home / "state", beside=places.rows)
        try:
            summary = ledger.create_from_node(node)
        except VaultRefusal as error:
            words = f"--node {node} --state {places.home / 'state'}"
            words += f" --user {owner}" if owner else ""
            raise VaultRefusal(f"{error}; this makes it: sottovoce ledger create {words}") from None
        click.echo(ledger.format_statement(summary))
        for sentence in summary.policy.advise():
            click.echo(f"warning: {sentence}", err=True)


@node_app.command("status")
def show_node_status(
    node: Annotated[Path, Argument(help="The client's node file.", metavar="NODE.toml")],
    folder: Folder = None,
    state: Annotated[
        Path | None, Option(help="The worker's SOTTOVOCE_STATE (/var/lib/USER/state).")
    ] = None,
    as_json: AsJson = False,
    prometheus: AsMetrics = False,
) -> None:
    """Look at node file, vault, certificate and services. Exit code 1 if one is not well.

    Root looks as the owner of the node file's folder. The rows are not read.

    \b
    Examples (as root):
      sottovoce node status /srv/ward-3/node.toml
      sottovoce node status /srv/ward-3/node.toml --prometheus > sottovoce.prom
    """
    from sottovoce.client import ledger
    from sottovoce.flower import deploy

    beside = node.absolute().parent
    owner = ledger.find_owner(beside)
    usual_state = Path(f"/var/lib/{owner}/state")
    if state is None and "SOTTOVOCE_STATE" not in os.environ and usual_state.is_dir():
        state = usual_state
    ledger.act_as(owner if os.geteuid() == 0 else None, state, beside=node)
    status = deploy.read_node_status(node.absolute(), folder or deploy.NodePlaces.folder)
    _print_status(status, as_json, prometheus)


def _print_status(status: Status, as_json: bool, as_metrics: bool) -> None:
    if as_json:
        click.echo(json.dumps(status.to_json(), indent=2, ensure_ascii=False))
    else:
        click.echo(status.to_prometheus() if as_metrics else str(status), nl=not as_metrics)
    status.require()


def _ask_questions(options: Mapping[str, Any]) -> dict[str, Any]:
    """Ask what a client's owner has to decide; what was given is not asked again."""
    file = click.Path(exists=True, dir_okay=False, path_type=Path, resolve_path=True)
    questions: list[tuple[str, str, Any, Any]] = [
        ("name", "1. The client's name, as the server will see it", str, None),
        ("server", "2. The server's address (HOST:PORT)", str, None),
        ("ca", "3. The server's ca.crt, as its operator sent it", file, "ca.crt"),
        ("rows", "4. The file with the rows (.npz, .csv, .parquet)", file, None),
        ("public", "5. The federation's plan.toml, or how many classes the labels have", str, None),
        ("budget", "6. The budget for all that is ever released from them (ε δ)", str, "8 1e-5"),
    ]
    given_as = {"public": {"classes", "plan"}, "budget": {"epsilon", "delta"}}
    answers = {key: click.prompt(text, type=kind, default=default, err=True)
               for key, text, kind, default in questions
               if not given_as.get(key, {key}) & options.keys()}  # fmt: skip
    if (public := answers.pop("public", None)) is not None:
        is_count = public.isascii() and public.isdigit()
        answers |= {"classes": int(public)} if is_count else {"plan": Path(public).absolute()}
    if (budget := answers.pop("budget", None)) is not None:
        try:
            answers["epsilon"], answers["delta"] = map(float, budget.replace(",", " ").split())
        except ValueError:
            raise click.UsageError(f"the budget is two numbers, ε and δ, got {budget}") from None
    return answers


def _drop_absent(options: Mapping[str, Any], *others: str) -> dict[str, Any]:
    """Return the options that were given, with absolute paths, as service files need them."""
    return {
        key: value.absolute() if isinstance(value, Path) else value
        for key, value in options.items()
        if value is not None and key not in others
    }


def _read_passphrase(path: Path | None, *, new: bool) -> bytes:
    if path is not None:
        return path.read_bytes().strip()
    text = click.prompt("Passphrase of ca.key", hide_input=True, confirmation_prompt=new, err=True)
    return str(text).encode()
