"""Ours: the compiled round of `sottovoce.simulation.compiled`, as `sottovoce train` calls it."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from protocol import Outcome, Play, serve
from work import Work

from sottovoce.data.federated import Samples
from sottovoce.models.base import JaxModel
from sottovoce.models.cnn import Cnn
from sottovoce.models.mlp import Mlp
from sottovoce.models.svm import Svm
from sottovoce.server.federation import put_on_device
from sottovoce.simulation.compiled import Orders, StackedRows, inspect_rows, play_round


def model_of(work: Work) -> JaxModel:
    """Our model of the work's sizes."""
    shape = work.shape
    if shape.model == "svm":
        return Svm(shape.features, shape.kappa)
    if shape.model == "mlp":
        return Mlp(shape.features, shape.hidden, shape.classes)
    return Cnn(shape.picture, shape.channels, shape.classes)


def build(work: Work, model: JaxModel | None = None) -> Play:
    """A round of our model, or of another one for the same rows."""
    shape, model = work.shape, model_of(work) if model is None else model
    # as a simulation does before its first round: is every number finite, and how long is a row
    samples = Samples(work.x, work.y)
    seen = inspect_rows(model, samples)
    rows = StackedRows(
        x=jax.tree.map(lambda leaf: jax.device_put(np.asarray(leaf)[None]), seen),
        y=put_on_device(samples)[1][None],
        owner=jnp.repeat(jnp.arange(shape.clients), shape.samples)[None],
        samples=jnp.full((1, shape.clients), shape.samples),
        valid_x=jnp.asarray(work.test_x)[None],
        valid_y=jnp.asarray(work.test_y)[None],
    )
    params = jax.tree.map(lambda array: jnp.asarray(array)[None], work.params)
    count, rate, clip = iter(range(2**31)), work.rate, work.clip

    def one(std: float) -> Outcome:
        t = next(count)
        orders = Orders(
            split=np.zeros(1, np.int32),
            weight=np.full((1, shape.clients), 1 / shape.clients, np.float32),
            rate=np.full(1, rate, np.float32),
            clip=np.full(1, clip, np.float32),
            std=np.full(1, std, np.float32),
            sigma=np.zeros((1, 1, shape.clients), np.float32),
            signal_std=np.zeros(1, np.float32),
            bound=np.ones(1, np.float32),
            key=np.array([[0, 1]], np.uint32),
        )
        found = play_round(model, rows, params, orders, t)
        loss, accuracy = np.asarray(found.score)[0, :2]
        new = {name: np.asarray(array)[0] for name, array in found.params.items()}
        return Outcome(new, loss, accuracy)

    return one


if __name__ == "__main__":
    serve(build, "jax", "jaxlib")
