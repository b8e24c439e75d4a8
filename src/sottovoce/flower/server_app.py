"""The server's side of Flower: a ServerApp around whoever conducts the rounds.

A conductor knows nothing of Flower: it gets the roll of clients, whom it calls and asks by their
own ids in plain bytes, and the run's configuration. The app of this room lets `leading.lead` do it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from sottovoce.errors import SottovoceError
from sottovoce.flower import leading
from sottovoce.flower.transport import Roll

Scalar = str | int | float | bool
Conductor = Callable[[Roll, Mapping[str, Scalar]], None]
# What an answer may weigh: 2 GiB is where protobuf ends.
LIMIT = 2**31 - 2**20


def build(conduct: Conductor, identify: Callable[[bytes], str], *, limit: int = LIMIT) -> ServerApp:
    """A ServerApp that lets `conduct` lead; `identify` reads a client's id from its hello."""
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        if _say_in_one_sentence not in logging.getLogger("flwr").filters:
            logging.getLogger("flwr").addFilter(_say_in_one_sentence)
        with leading.interruptible():
            conduct(Roll(grid, identify, limit=limit), dict(context.run_config))

    return app


def _say_in_one_sentence(record: logging.LogRecord) -> bool:
    """Log an error of ours by its words: Flower would print where in our code it was raised."""
    error = record.exc_info[1] if record.exc_info else None
    if isinstance(error, SottovoceError):
        record.msg, record.args, record.exc_info = f"the run stopped: {error}", (), None
    return True


app = build(leading.lead, leading.client_of)
