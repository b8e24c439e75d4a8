"""Write the table of a folder's claims between the marks of a document: `make claims`."""

from __future__ import annotations

import sys
from pathlib import Path

from sottovoce.studies.paper.outcomes import format_markdown, judge_folder

START, END = "<!-- claims -->", "<!-- /claims -->"


def insert_table(text: str, table: str) -> str:
    """Insert the table between the marks of a document.

    >>> print(insert_table("a\\n<!-- claims -->\\nold\\n<!-- /claims -->\\nb", "new"))
    a
    <!-- claims -->
    new
    <!-- /claims -->
    b
    """
    before, _, rest = text.partition(START)
    _, _, after = rest.partition(END)
    return f"{before}{START}\n{table}\n{END}{after}"


def main(document: str, folder: str) -> None:
    """Write the table of a folder's claims between the marks of a document."""
    path = Path(document)
    path.write_text(
        insert_table(path.read_text("utf-8"), format_markdown(judge_folder(Path(folder)))), "utf-8"
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
