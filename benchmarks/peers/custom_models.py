"""The same work as a model of a user's own: `python custom_models.py WORK.npz jax|torch`.

`jax` is `sottovoce.custom` in the compiled round, `torch` a PyTorch module in a `TorchModel`, with
the sum, noise and evaluation of `sottovoce.simulation.streamed.SummingEngine`.
"""

from __future__ import annotations

import sys

import jax
import jax.numpy as jnp
import jax_models
import numpy as np
import ours
from protocol import Outcome, Play, serve
from work import Work

from sottovoce.models.custom import Custom, custom
from sottovoce.simulation.compiled import draw_simulated_noise


def make_custom(work: Work) -> Custom:
    """The work's functions as `sottovoce.custom` takes them; the svm has no weight decay here."""

    def loss(scores, y):  # type: ignore[no-untyped-def]
        if work.shape.model == "svm":
            return jax.nn.relu(1 - (2.0 * y - 1) * scores)
        return -jnp.take_along_axis(jax.nn.log_softmax(scores), y[:, None], axis=1)[:, 0]

    return custom(lambda key: work.params, jax_models.scores(work.shape), loss)


def build_torch(work: Work) -> Play:
    """A round of a PyTorch module."""
    import torch
    import torch_models

    from sottovoce.models.torch_model import TorchModel

    shape, module = work.shape, torch_models.module(work.shape)
    torch_models.fill(shape, list(module.parameters()), work.params)
    x, y, test_x, test_y = (array.numpy() for array in torch_models.rows(work))
    loss = torch_models.criterion(shape, "none")
    model = TorchModel(module, shape=x.shape[1:], loss=loss)
    start, names = model.draw_parameters(0), [name for name, _ in module.named_parameters()]
    weight = np.full(len(y), work.rate / len(y), np.float32)
    x, test_x = x.reshape(len(x), -1), test_x.reshape(len(test_x), -1)
    count = iter(range(2**31))

    def play(std: float) -> Outcome:
        step = model.clipped_sum(start, x, y, weight, work.clip)
        noise = draw_simulated_noise(jax.random.key(next(count)), start, jnp.float32(std))
        new = {name: start[name] - step[name] + np.asarray(noise[name]) for name in start}
        scores = model.evaluate(new, test_x, test_y)
        return Outcome(
            torch_models.read(shape, [torch.from_numpy(new[name]) for name in names]), *scores
        )

    return play


def build(work: Work) -> Play:
    """A round of the kind that the command line names."""
    return build_torch(work) if sys.argv[2] == "torch" else ours.build(work, make_custom(work))


if __name__ == "__main__":
    serve(build, "jax", *(["torch"] if sys.argv[2] == "torch" else []))
