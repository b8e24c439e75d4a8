"""What a person reads: the page of a run, the certificate of a vault, and a run's live table.

`run` renders a run folder, `certificate` a vault; `pages` holds the templates' environment and how
numbers are formatted, `charts` draws SVG; both serve the pages of `studies` too. `progress` is the
table in the terminal, `watch` the local page that follows runs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sottovoce.reports.run import render_report, write_report

__all__ = ["render_report", "write_report"]


def __getattr__(name: str) -> Any:  # loaded on first use: a training needs `progress` alone
    if name not in __all__:
        raise AttributeError(f"module 'sottovoce.reports' has no attribute '{name}'")
    from sottovoce.reports import run

    return getattr(run, name)
