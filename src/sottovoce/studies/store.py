"""Results of many runs on disk, in one format for figures, frontier and rehearsals.

`runs.jsonl`   a line for every run as soon as it is done: a study that was stopped goes on from it
`NAME.json`    finished results: a few keys, then lists with a line for every row
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from jinja2 import UndefinedError

from sottovoce.data import files
from sottovoce.errors import RunError

JOURNAL = "runs.jsonl"
Run = TypeVar("Run")
#: What parsing raises where a file does not hold what it should.
DAMAGE = (*files.DAMAGE, UndefinedError)


def append_line(folder: Path, content: Mapping[str, Any]) -> None:
    """Append a line to the journal; it is on the disk when this returns.

    A line that a killed process left open is ended first, and is no run.
    """
    line = json.dumps(content, ensure_ascii=False, allow_nan=False).encode() + b"\n"
    with (folder / JOURNAL).open("a+b") as file:
        if size := file.seek(0, os.SEEK_END):
            file.seek(size - 1)
            line = line if file.read(1) == b"\n" else b"\n" + line
        file.write(line)
        file.flush()
        os.fsync(file.fileno())


def read_lines(folder: Path, parse: Callable[[Any], Run], remedy: str) -> list[Run]:
    """Return what `parse` makes of each line of the journal; nothing if there is no journal.

    What is not JSON was being written when a process was killed, and is left out.
    """
    path = folder / JOURNAL
    if not path.exists():
        return []
    runs = []
    lines = path.read_text("utf-8", errors="replace").split("\n")
    for number, line in enumerate(lines, start=1):
        try:
            content = json.loads(line)
        except (ValueError, RecursionError):
            continue
        try:
            runs.append(parse(content))
        except DAMAGE:
            raise RunError(f"line {number} of {path} is no run; remove it and {remedy}") from None
    return runs


def format_results(
    head: Mapping[str, Any], lists: Mapping[str, Sequence[Mapping[str, Any]]]
) -> str:
    """Return the text of finished results; a row is a line: readable, and small."""
    text = json.dumps(head, ensure_ascii=False, indent=1)[:-2]
    for key, rows in lists.items():
        lines = ",\n".join(json.dumps(row, ensure_ascii=False) for row in rows)
        text += f',\n "{key}": [\n{lines}\n ]'
    return text + "\n}\n"


def read_results(path: Path, schema: str) -> dict[str, Any]:
    """Return the content of finished results; nothing if the file has another schema."""
    try:
        content = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise RunError(f"{path} cannot be read ({error}); remove it and reproduce it") from None
    is_ours = isinstance(content, dict) and content.get("schema") == schema
    return content if is_ours else {}


@contextmanager
def refuse_damage(path: Path) -> Iterator[None]:
    """While the content of a file is used: say what it lacks in one sentence with its name."""
    try:
        yield
    except DAMAGE as error:
        lacks = f"it lacks {error}" if isinstance(error, KeyError) else files.why(error)
        raise RunError(f"{path} is damaged ({lacks}); remove it and reproduce it") from error
