"""Options that several commands share, so that they read and mean the same everywhere."""

from __future__ import annotations

import select
from pathlib import Path
from typing import Annotated

import typer

# Output that nobody reads any more: no failure if it was ours to a reader that left.


def pipe_of(error: OSError | SystemExit) -> OSError:
    """The error of the system behind an exit: typer turns a broken pipe into exit code 1.

    Any other exit goes on.
    """
    found = error.__context__ if isinstance(error, SystemExit) else error
    if isinstance(found, OSError):
        return found
    raise error


def reader_left(error: OSError) -> bool:
    """Whether it was standard output whose reader left, and not a pipe to another process."""
    if not isinstance(error, BrokenPipeError):
        return False
    poll = select.poll()
    poll.register(1, 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))


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
