"""The server's side of Flower: a ServerApp around whoever conducts the rounds.

A conductor knows nothing of Flower: it gets the roll of clients, whom it calls and asks by their
own ids in plain bytes, and the run's configuration.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from sottovoce.errors import FederationError
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
        conduct(Roll(grid, identify, limit=limit), dict(context.run_config))

    return app


def roll_call(roll: Roll, config: Mapping[str, Scalar]) -> None:
    """Say which clients are there; fewer than `clients` after `patience` seconds is an error."""
    wanted, patience = int(config["clients"]), float(config["patience"])
    seats = roll.call(wanted=wanted, seconds=patience)
    print(f"{len(seats)} of {wanted} clients are there: {', '.join(sorted(seats))}")
    if len(seats) < wanted:
        raise FederationError(
            f"clients must be at most {len(seats)}, got {wanted}; "
            f"no other answered in {patience:g} s: start their SuperNodes or wait longer (patience)"
        )


def name_of(hello: bytes) -> str:
    """A client's id: the name in its own node file."""
    head, _ = importlib.import_module("sottovoce.wire").unpack(hello)
    name = head.get("name")
    if not isinstance(name, str):
        raise ValueError("a hello without a name")
    return name


app = build(roll_call, name_of)
