"""A program of this folder as a command: every error is one sentence, as `sottovoce` says it.

Exit codes are those of the command line: 0 ok, 1 failed, 2 bad input, 130 interrupted.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import NoReturn

from sottovoce.errors import InputError, SottovoceError


def run(work: Callable[[], None]) -> NoReturn:
    """Do the work and exit.

    >>> run(lambda: None)
    Traceback (most recent call last):
        ...
    SystemExit: 0
    """
    try:
        work()
    except InputError as error:
        _end(str(error), 2)
    except SottovoceError as error:
        _end(str(error), 1)
    except KeyboardInterrupt:
        _end("interrupted", 130)
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        _end(f"{where}the system refused: {error.strerror or error}", 1)
    sys.exit(0)


def _end(sentence: str, code: int) -> NoReturn:
    sys.stderr.write(f"sottovoce: {sentence}\n")
    sys.exit(code)
