"""`sottovoce …` in the process of the test: same words, same streams, same exit code.

An interpreter costs more than most commands do. Where the process itself is what is tested (its
signals, its pipes, what it imports), tests start one.
"""

from __future__ import annotations

import contextlib
import io
import signal
import subprocess
from pathlib import Path

import pytest

from sottovoce.cli import commands
from support.drawings import leave_drawings_blank, paint_drawings


def run_command(
    *words: object, cwd: Path | None = None, draw: bool = False
) -> subprocess.CompletedProcess[str]:
    """Run the command line to its end; the charts of its pages are left blank unless asked for."""
    line = ["sottovoce", *map(str, words)]
    out, err = (io.TextIOWrapper(io.BytesIO(), "utf-8", write_through=True) for _ in range(2))
    before = signal.getsignal(signal.SIGINT)
    with (
        pytest.MonkeyPatch.context() as patch,
        contextlib.chdir(cwd or Path.cwd()),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        paint_drawings() if draw else leave_drawings_blank(),
    ):
        patch.setattr("sys.argv", line)
        try:
            commands.main()
        except SystemExit as end:
            code = end.code
        finally:
            signal.signal(signal.SIGINT, before)
    said = (stream.buffer.getvalue().decode("utf-8") for stream in (out, err))
    return subprocess.CompletedProcess(line, code, *said)
