"""The server's side of Flower: a ServerApp around whoever conducts the rounds.

A conductor knows nothing of Flower: it gets the roll of clients, whom it calls and asks by their
own ids in plain bytes, and the run's configuration. The app of this room lets `leading.lead` do it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

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
        with leading.interruptible():
            conduct(Roll(grid, identify, limit=limit), dict(context.run_config))

    return app


app = build(leading.lead, leading.client_of)
