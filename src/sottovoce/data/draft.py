"""`sottovoce init --from`: draft a plan for your own table from its header.

The draft does not run as it is. What must be public (which column is the label, bounds, categories)
is left to you: copied from the data, it would be a release that no budget paid for.
"""

from __future__ import annotations

import os
from pathlib import Path

from sottovoce.data.tables import guess_kinds
from sottovoce.errors import InputError
from sottovoce.plan.data import TABLE_FILES
from sottovoce.plan.section import format_key, format_value

HEAD = """\
# A plan for sottovoce train, drafted from the header of {file}.
# It does not run yet. Fill in the label, and what is public about each column you want to use:
# from a codebook, the law or common sense, never by looking at the rows.
# All other keys have their defaults; sottovoce init explains every one.
schema = 1

[data]
path = {path}
# The column to be predicted: {columns}
label = ""
# A column whose values are the clients; with it, remove the line with clients.
# client = ""
clients = 10
# Parts of each client's rows that are never trained on, or other tables with these columns. With
# client they are clients' own rows, which the server has as they are: they are not protected.
validation = 0.1
test = 0.1
# true: what is missing below is taken from the data, which the guarantee does not cover.
infer = false

# Numbers are cut to [low, high]; texts are one of their categories. A column that is not listed is
# not used. The label needs its categories too. The kinds are guesses from the first rows.
# Take the # away and write, for example, age = [0, 120] or sex = ["female", "male"].
[data.columns]
"""

TAIL = """
[model]
name = "mlp"

[privacy]
epsilon = 8.0
delta = 1e-5
"""


def draft_plan(table: Path, plan: Path) -> str:
    """Return the text of a plan for the table, to be saved at `plan`.

    Only the table's header and first rows are read.
    """
    if table.suffix.lower() not in TABLE_FILES:
        raise InputError.of(
            "--from", str(table), "a .csv or .parquet file", "save the table as one of these"
        )
    kinds = guess_kinds(table)
    lines = []
    for column, kind in kinds.items():
        if not column:  # the row number that other programs write
            continue
        # This is not valid TOML, so that it must be filled in.
        public = "[LOW, HIGH]" if kind == "number" else "[TEXT, TEXT]"
        lines.append(f"# {format_key(column)} = {public}")
    # The plan finds the table from its own folder, with slashes on every system.
    path = Path(os.path.relpath(table, plan.parent)).as_posix()
    head = HEAD.format(
        file=" ".join(table.name.split()),
        path=format_value(path),
        columns=_list_columns([column for column in kinds if column]),
    )
    return head + "\n".join(lines) + "\n" + TAIL


def _list_columns(columns: list[str]) -> str:
    """Return as many column names as fit on one line of a comment.

    >>> _list_columns(["age", "marital status"])
    'age, "marital status"'
    """
    text = ", ".join(format_key(column) for column in columns)
    return text if len(text) <= 70 else text[:67].rpartition(",")[0] + ", …"
