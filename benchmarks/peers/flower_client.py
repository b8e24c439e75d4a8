"""The client of `flower_simulation.py`, a module of its own because Ray's actors import it."""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from numpy_blas import clipped_mean
from work import Work, load

app = ClientApp()


@functools.cache
def held(path: str) -> Work:
    """The rows, read once an actor."""
    return load(Path(path))


@app.train()
def train(message: Message, context: Context) -> Message:
    """The clipped mean of this client's rows and its own noise, as an update."""
    if os.environ.get("OPENBLAS_NUM_THREADS") != "1":
        raise RuntimeError("an actor has one core, so its BLAS must have one thread")
    config: Any = message.content["config"]
    model: Any = message.content["model"]
    work = held(str(config["work"]))
    params = dict(zip(work.params, model.to_numpy_ndarrays(), strict=True))
    i = int(context.node_config["partition-id"])
    mean = clipped_mean(work.shape, params, *work.client(i), work.clip)
    # U clients are averaged, so each draws √U times the noise of the mean
    std = np.float32(float(config["std"]) * work.shape.clients**0.5)
    random = np.random.default_rng()
    update = []
    for name, start in params.items():
        noise = std * random.standard_normal(start.shape, np.float32)
        update.append(np.asarray(noise - np.float32(work.rate) * mean[name]))
    return Message(RecordDict({"update": ArrayRecord(update)}), reply_to=message)
