"""`sottovoce server` and `sottovoce node`: write the files that a machine of a federation needs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import click
import typer

server_app = typer.Typer(
    help="The server of a federation between machines: keys, proxy, services.",
    no_args_is_help=True,
    rich_markup_mode=None,
)
node_app = typer.Typer(
    help="A client of a federation between machines: key, node file, services.",
    no_args_is_help=True,
    rich_markup_mode=None,
)
Folder = Annotated[Path | None, typer.Option(help="Where keys and configuration go.")]
State = Annotated[Path | None, typer.Option(help="Where the services keep their state.")]
Units = Annotated[Path | None, typer.Option(help="Where systemd finds units.")]
User = Annotated[str | None, typer.Option(help="The user of the services, made if missing.")]
Authority = Annotated[
    Path | None, typer.Option(help="Where ca.crt and the encrypted ca.key are, or are made.")
]
PassphraseFile = Annotated[
    Path | None, typer.Option(help="A file with the passphrase of ca.key (else it is asked for).")
]


@server_app.command("init")
def init_server(
    names: Annotated[
        list[str],
        typer.Argument(help="Host names and addresses to which clients connect.", metavar="NAME…"),
    ],
    folder: Folder = None,
    state: State = None,
    runs: Annotated[
        Path | None, typer.Option(help="The folder of plans and runs; nothing else is read.")
    ] = None,
    units: Units = None,
    authority: Authority = None,
    user: User = None,
    port: Annotated[int | None, typer.Option(help="The port to which clients connect.")] = None,
    link_port: Annotated[
        int | None, typer.Option(help="The SuperLink's own port, on loopback.")
    ] = None,
    parameters: Annotated[
        int | None, typer.Option(help="Parameters of the largest model: bounds every answer.")
    ] = None,
    clients: Annotated[int | None, typer.Option(help="Most clients: bounds the memory.")] = None,
    passphrase_file: PassphraseFile = None,
) -> None:
    """Make the keys, the proxy's configuration and the services of a server.

    \b
    Example (as root):
      sottovoce server init server.example.org 192.0.2.7
    """
    given = _drop_absent(locals(), "names", "passphrase_file")
    from sottovoce.flower import deploy

    places = deploy.ServerPlaces(**given)
    passphrase = _read_passphrase(passphrase_file, new=not (places.authority / "ca.crt").exists())
    click.echo(deploy.init_server(names, places, passphrase), nl=False)


@server_app.command("renew")
def renew_server(
    folder: Folder = None,
    authority: Authority = None,
    passphrase_file: PassphraseFile = None,
) -> None:
    """Sign the server's certificates for another year; clients need nothing new.

    \b
    Example (as root, with ca.key back in its place):
      sottovoce server renew
    """
    given = _drop_absent(locals(), "passphrase_file")
    from sottovoce.flower import deploy

    places = deploy.ServerPlaces(**given)
    click.echo(deploy.renew_server(places, _read_passphrase(passphrase_file, new=False)), nl=False)


@node_app.command("init")
def init_node(
    name: Annotated[str, typer.Argument(help="The client's name, as the server sees it.")],
    server: Annotated[str, typer.Option(help="The server's HOST:PORT.")],
    ca: Annotated[Path, typer.Option(help="The server's ca.crt, as its operator sent it.")],
    folder: Folder = None,
    data: Annotated[
        Path | None, typer.Option(help="The folder of rows, node file and vault (/srv/NAME).")
    ] = None,
    state: State = None,
    units: Units = None,
    user: User = None,
    port: Annotated[int | None, typer.Option(help="The SuperNode's own port, on loopback.")] = None,
) -> None:
    """Make the key, the node file and the services of a client.

    \b
    Example (as root):
      sottovoce node init ward-3 --server server.example.org:8000 --ca ca.crt
    """
    given = _drop_absent(locals())
    from sottovoce.flower import deploy

    click.echo(deploy.init_node(deploy.NodePlaces(**given)), nl=False)


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
    said = click.prompt("Passphrase of ca.key", hide_input=True, confirmation_prompt=new, err=True)
    return str(said).encode()
