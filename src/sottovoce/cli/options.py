"""Options that several commands share, so that they read and mean the same everywhere."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Settings = Annotated[
    list[str] | None,
    typer.Option("--set", help="Change one key, as privacy.epsilon=4; may be repeated."),
]
RunFolder = Annotated[
    Path | None, typer.Option(help="A new or empty folder for the run (default: runs/…).")
]
Resume = Annotated[
    bool, typer.Option("--resume", help="Go on with the run that was stopped in --out.")
]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")]
RecordAsJson = Annotated[bool, typer.Option("--json", help="The record on stdout.")]
Quiet = Annotated[bool, typer.Option("--quiet", help="No progress, only what came out.")]
Quick = Annotated[bool, typer.Option("--quick", help="A small version of it, in less time.")]
