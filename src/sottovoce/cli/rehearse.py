"""`sottovoce rehearse` on the command line."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sottovoce.cli.options import Quiet, Settings


def rehearse(
    plan: Annotated[
        Path | None, typer.Argument(help="A plan (TOML). Without one: the embedded default.")
    ] = None,
    settings: Settings = None,
    public: Annotated[
        str | None,
        typer.Option(help="Public rows: a data set's name, a table, an .npz with x and y."),
    ] = None,
    keep: Annotated[
        list[str] | None,
        typer.Option(help="A key or section that stays as it is; may be repeated."),
    ] = None,
    runs: Annotated[
        int | None,
        typer.Option(help="Private federations at most (default: 120, or what --minutes allows)."),
    ] = None,
    minutes: Annotated[
        float | None,
        typer.Option(help="How long it may take, about; five runs are made in any case."),
    ] = None,
    clients: Annotated[
        int | None, typer.Option(help="Clients there will be, where the table says it.")
    ] = None,
    samples: Annotated[
        int | None,
        typer.Option(
            help="Rows of each client, where the table says it (with data.client: all that name "
            "it, validation and test rows among them; else those it trains on)."
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Another stand-in and other noise.")] = 0,
    out: Annotated[
        Path | None, typer.Option(help="A new or empty folder (default: runs/rehearsal-…).")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with the rehearsal that was stopped in --out.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="rehearsal.json on stdout.")] = False,
    quiet: Quiet = False,
) -> None:
    """Choose rounds, step, clipping, schedule, model and features before any private row is read.

    Runs whole private federations like the plan's on a stand-in: public rows, or what can be made
    up for this kind of data. Costs no privacy, provided that what --public names is public: that
    cannot be checked. Writes plan.toml (ready to train, every choice with its reason),
    rehearsal.json and report.html. Ctrl-C keeps what is done.

    \b
    Examples:
      sottovoce rehearse
      sottovoce rehearse plan.toml --minutes 10 --out rehearsed
      sottovoce rehearse plan.toml --public survey.csv --keep model
      sottovoce rehearse plan.toml --resume --out rehearsed
    """
    from sottovoce.studies.rehearsal.rehearsing import command

    command(
        plan,
        settings or [],
        public=public,
        keep=keep or [],
        runs=runs,
        minutes=minutes,
        clients=clients,
        samples=samples,
        seed=seed,
        out=out,
        resume=resume,
        as_json=as_json,
        quiet=quiet,
    )
