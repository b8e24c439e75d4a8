"""The command line: one file per group of commands, each a thin call of the library.

`commands` holds the app and the short commands; `train`, `ledger` and `deploy` hold one
group each. From outside use `main`, the entry point, and `app`.
"""

from sottovoce.cli.commands import app, main

__all__ = ["app", "main"]
