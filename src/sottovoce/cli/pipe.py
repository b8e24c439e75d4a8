"""Output that nobody reads any more: no failure if it was ours to a reader that left."""

from __future__ import annotations

import select


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
