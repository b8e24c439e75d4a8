"""Flower 1.41, simulation on Ray: 50 virtual nodes, our analytic step in numpy in each client.

The step is the fast one of `numpy_blas.py`, so what is measured beyond that row is Flower's own:
messages, Ray's actors, records made of arrays and back. Each client holds its rows in its actor's
memory, draws its own noise and sends its update; the server averages and evaluates. One actor a
thread, and one BLAS thread an actor; the server's process, which evaluates while they wait, has all
of them. The conversation with the harness takes place inside the ServerApp.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

os.environ.update(FLWR_TELEMETRY_ENABLED="0", RAY_USAGE_STATS_ENABLED="0", RAY_DEDUP_LOGS="0")
os.environ["PYTHONPATH"] = str(Path(__file__).parent)  # where Ray's actors find the client

from flower_client import app as client_app
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.serverapp import Grid, ServerApp
from flwr.simulation import run_simulation
from numpy_blas import evaluate
from protocol import Outcome, converse, given, versions
from work import load

BEGAN, PATH = time.perf_counter(), sys.argv[1]
THREADS = int(os.environ.get("OMP_NUM_THREADS", "1"))
ONE_THREAD = {f"{name}_NUM_THREADS": "1" for name in ("OMP", "OPENBLAS", "MKL")}

server_app = ServerApp()


@server_app.main()
def main(grid: Grid, context: Context) -> None:
    """Rounds on demand."""
    work = given()
    names = list(work.params)

    def play(std: float) -> Outcome:
        content = RecordDict(
            {
                "model": ArrayRecord([work.params[name] for name in names]),
                "config": ConfigRecord({"work": PATH, "std": std}),
            }
        )
        nodes = list(grid.get_node_ids())
        replies = list(grid.send_and_receive([Message(content, n, "train") for n in nodes]))
        errors = [str(reply.error) for reply in replies if reply.has_error()]
        if errors or len(replies) != work.shape.clients:
            raise RuntimeError(f"{len(replies)} replies; {errors[:1]}")
        params = {name: array.copy() for name, array in work.params.items()}
        for reply in replies:
            record: Any = reply.content["update"]
            for name, part in zip(names, record.to_numpy_ndarrays(), strict=True):
                params[name] += part / work.shape.clients
        return Outcome(params, *evaluate(work, params))

    using = versions("flwr", "ray", "numpy")
    converse(play, std=work.std, using=using, began=BEGAN)


if __name__ == "__main__":
    # Ray's processes inherit this; numpy's BLAS in this one has started with all threads already
    os.environ.update(ONE_THREAD)
    run_simulation(
        server_app=server_app,
        client_app=client_app,
        num_supernodes=load(Path(PATH)).shape.clients,
        backend_config={
            "init_args": {"num_cpus": THREADS, "include_dashboard": False},
            "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
        },
    )
