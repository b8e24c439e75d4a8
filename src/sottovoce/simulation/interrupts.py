"""Ctrl-C between rounds, never inside one.

An interrupt in the middle of a compilation can bring the interpreter down, and one in the middle
of writing leaves half a file. So while a run is on, Ctrl-C is noted, and raised where the run is
whole: between two rounds. Asked a fourth time, the process ends at once.
"""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType, TracebackType
from typing import Self

PATIENCE = 4


class Interrupts:
    """Notes Ctrl-C while it is entered; `check` raises it. Outside the main thread it does nothing.

    >>> with Interrupts() as interrupts:
    ...     interrupts.check()
    """

    def __init__(self) -> None:
        self.noted = 0
        self._main = threading.current_thread() is threading.main_thread()
        self._before: object = None

    def __enter__(self) -> Self:
        if self._main:
            self._before = signal.getsignal(signal.SIGINT)
            _ENTERED.append(self)
            signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._main:
            _ENTERED.remove(self)
            signal.signal(signal.SIGINT, self._before)  # type: ignore[arg-type]

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.noted += 1
        if self.noted >= PATIENCE:
            os._exit(130)

    def check(self) -> None:
        """Raise KeyboardInterrupt if Ctrl-C was pressed since this was entered."""
        if self.noted:
            raise KeyboardInterrupt


_ENTERED: list[Interrupts] = []


def check() -> None:
    """Raise it in the middle of a long round, where nothing has come of the round yet."""
    for entered in _ENTERED:
        entered.check()
