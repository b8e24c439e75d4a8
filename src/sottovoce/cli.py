"""The command line: one library call per command, one plain sentence per error.

Exit codes: 0 ok, 1 failed, 2 bad input, 130 interrupted.
"""

from __future__ import annotations

import json
import os
import sys
from importlib import resources
from typing import Annotated, Any, NoReturn, cast

import click
import typer

from sottovoce import __version__
from sottovoce.errors import InputError, SottovoceError

app = typer.Typer(
    name="sottovoce",
    help="Federated learning in which no client has to trust the server.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)


def main() -> NoReturn:
    """Run the command line and exit; every error becomes one sentence on stderr."""
    try:
        code = app(standalone_mode=False)
        sys.stdout.flush()
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.ctx.get_help() if error.ctx else "")
        code = 2
    except click.UsageError as error:
        command = error.ctx.command_path if error.ctx else "sottovoce"
        message = " ".join(error.format_message().split()).rstrip(".")
        code = _say(f"{message}; see {command} --help", 2)
    except InputError as error:
        code = _say(str(error), 2)
    except SottovoceError as error:
        code = _say(str(error), 1)
    except click.Abort:
        code = _say("interrupted", 130)
    except KeyboardInterrupt:
        code = _say("interrupted", 130)
    except BrokenPipeError:  # the reader (head, less) has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 0
    sys.exit(code or 0)


def _say(sentence: str, code: int) -> int:
    sys.stderr.write(f"sottovoce: {sentence}\n")
    return code


def _version(wanted: bool) -> None:
    if wanted:
        click.echo(f"sottovoce {__version__}")
        raise typer.Exit


@app.callback()
def _top(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


@app.command()
def calibrate(
    epsilon: Annotated[float | None, typer.Option(help="Budget ε of a client.")] = None,
    delta: Annotated[float | None, typer.Option(help="Budget δ of a client.")] = None,
    rounds: Annotated[int | None, typer.Option(help="Number of rounds T.")] = None,
    clients: Annotated[int | None, typer.Option(help="Number of clients U.")] = None,
    per_round: Annotated[
        int | None, typer.Option(help="Clients in a round K (default: all of them).")
    ] = None,
    samples: Annotated[int | None, typer.Option(help="Samples n of a client.")] = None,
    clip: Annotated[
        float | None, typer.Option(help="Norm C that per-sample gradients are cut to.")
    ] = None,
    learning_rate: Annotated[float | None, typer.Option(help="Step size η.")] = None,
    unit: Annotated[
        str | None, typer.Option(help="What is protected: record | client.", metavar="UNIT")
    ] = None,
    calibration: Annotated[
        str | None, typer.Option(help="exact | zcdp | paper.", metavar="NAME")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
) -> None:
    """Numbers only: the noise a budget buys, and what the paper's noise really guarantees.

    What you do not give is taken from the embedded default plan. Nothing is read or written.

    \b
    Examples:
      sottovoce calibrate
      sottovoce calibrate --epsilon 4 --delta 1e-6 --rounds 50 --clients 20 --samples 1000
      sottovoce calibrate --unit client --json
    """
    from sottovoce.calibrator import calibrate, table

    answer = calibrate(
        epsilon=epsilon,
        delta=delta,
        rounds=rounds,
        clients=clients,
        per_round=per_round,
        samples=samples,
        clip=clip,
        learning_rate=learning_rate,
        unit=cast(Any, unit),
        calibration=cast(Any, calibration),
    )
    click.echo(json.dumps(answer.to_json(), ensure_ascii=False) if as_json else table(answer))


@app.command()
def schema(
    name: Annotated[str, typer.Argument(help="calibrate", metavar="NAME")],
) -> None:
    """Print the JSON Schema of something sottovoce writes.

    \b
    Example:
      sottovoce schema calibrate
    """
    folder = resources.files("sottovoce").joinpath("schemas")
    known = sorted(f.name.removesuffix(".json") for f in folder.iterdir() if f.name[0] != "_")
    if name not in known:
        raise InputError.of("schema", name, " or ".join(known), "name what you want described")
    click.echo(folder.joinpath(f"{name}.json").read_text("utf-8").rstrip())


if __name__ == "__main__":
    main()
