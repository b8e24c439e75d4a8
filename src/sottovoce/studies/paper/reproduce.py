"""`sottovoce reproduce`: run what is missing, judge, draw, and write the page."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from sottovoce.data.files import write_file
from sottovoce.errors import DataError, InputError, RunError
from sottovoce.reports.progress import Line
from sottovoce.studies.paper import definition, draw, frontier, moments, outcomes, page, runner
from sottovoce.studies.paper.claims import Judged, judged
from sottovoce.studies.paper.definition import Figure
from sottovoce.studies.paper.expand import expand, seeds_of
from sottovoce.studies.paper.outcomes import Result

ALL = "all"


def listing() -> str:
    """The figures there are, one a line."""
    lines = []
    for name in definition.names():
        figure = definition.figure(name)
        lines.append(f"{name:<13} {figure.paper:<8} {figure.title}")
    lines.append(f"{ALL:<13} {'':<8} every one of those above")
    return "\n".join([*lines, f"{frontier.NAME:<13} {'ours':<8} What the same budget buys"])


def reproduce(
    names: Sequence[str], *, quick: bool = False, out: Path = Path("results"), quiet: bool = False
) -> list[Judged]:
    """Make the figures that are named in the folder `out`; what is there already is not run again.

    Where a data set is missing its figures are left out, the others are made, and then the error
    says which.
    """
    wanted = chosen(names)
    folder = _folder(out, quick)
    command = " ".join(
        ["sottovoce reproduce", *names, *(["--quick"] if quick else []), f"--out {out.name}"]
    )
    began = time.monotonic()
    show = Line(sys.stderr, quiet=quiet)
    sweeps = [figure for figure in wanted if figure.kind != "moments"]
    absent = runner.complete(sweeps, quick=quick, folder=folder, progress=partial(_told, show))
    show.close()
    runs = outcomes.known(folder)
    skipped = []
    for figure in wanted:
        result = _result(figure, quick, runs, command)
        if result is None:
            skipped.append(figure.name)
            continue
        result.save(folder)
        draw_file(result, folder)
    if not absent:
        outcomes.finish(folder)
    write(folder)
    if not quiet:
        _say(f"{len(wanted) - len(skipped)} figures in {time.monotonic() - began:.0f} s")
    if skipped:
        raise DataError(f"{', '.join(skipped)} could not be made: {' '.join(absent)}")
    return [one for one in judged(folder) if one.figure.name in {f.name for f in wanted}]


def reproduce_frontier(
    *, quick: bool = False, out: Path = Path("results"), quiet: bool = False
) -> Path:
    """Make `out/frontier`: records, picture and table; what is there already is not run again."""
    folder, show = _folder(out, quick), Line(sys.stderr, quiet=quiet)
    try:
        frontier.reproduce(quick=quick, out=folder, progress=partial(_told, show))
    finally:
        show.close()
    return folder / frontier.NAME


def chosen(names: Sequence[str]) -> list[Figure]:
    """The figures named, each once, in their order.

    >>> [figure.name for figure in chosen(["fig9", "fig2"])]
    ['fig2', 'fig9']
    """
    known = definition.names()
    if frontier.NAME in names:
        raise InputError(
            f"{frontier.NAME} is made alone; name it in a command by itself, without figures"
        )
    named = known if ALL in names else [definition.figure(name).name for name in names]
    if not named:
        raise InputError(f"name a figure ({', '.join(known)}) or {ALL}")
    return [definition.figure(name) for name in known if name in named]


def draw_file(result: Result, folder: Path) -> None:
    """NAME.svg: the figure by itself, for print."""
    from sottovoce.studies.paper.table import tables

    drawn = draw.pictures(result.figure, tables(result.figure, result.cells), result.moments)
    write_file(folder / f"{result.figure.name}.svg", draw.file(drawn).encode())


def write(folder: Path) -> Path:
    """index.html from the figures in the folder; nothing is trained."""
    path = folder / "index.html"
    write_file(path, page.render(finished(folder)).encode())
    return path


def finished(folder: Path) -> list[Judged]:
    """The figures of a folder, judged; a folder without any is refused."""
    found = judged(folder)
    if not found:
        raise RunError(
            f"{folder} holds neither a run nor figures; sottovoce train and reproduce make them"
        )
    return found


def _result(figure: Figure, quick: bool, runs: outcomes.Runs, command: str) -> Result | None:
    if figure.moments is not None:
        panels = moments.compute(figure.moments)
        return Result(figure, quick, command=command, moments=panels)
    cells, seeds = expand(figure, quick), seeds_of(figure, quick)
    if runner.missing(cells, seeds, runs, figure):
        return None
    return outcomes.gathered(figure, quick, cells, runs, command)


def _folder(out: Path, quick: bool) -> Path:
    """The folder, made if need be; quick results and full ones never share one."""
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError.of("--out", str(out), "a folder", f"{error.strerror}") from None
    for path in out.glob("*.json"):
        content = outcomes.read(path)
        if content and content["quick"] != quick:
            kind = "quick" if content["quick"] else "full"
            raise InputError.of(
                "--out",
                str(out),
                f"a folder without {kind} results",
                f"{path.name} there is {kind}: name another folder",
            )
    return out


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _told(line: Line, done: int, total: int) -> None:
    """Rounds done and rounds in all; runs that stop early make the estimate one from above."""
    if not line.due() and done != total:
        return
    left = (time.monotonic() - line.began) * (total - done) / max(1, done)
    part = done / max(1, total)
    text = f"{part:4.0%}  {done:,} of {total:,} rounds, at most {left:.0f} s left"
    bar = "█" * round(24 * part) + "·" * (24 - round(24 * part))
    line.say(f"{bar} {text}" if line.live else text)
