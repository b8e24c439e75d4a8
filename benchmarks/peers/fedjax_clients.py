"""FedJAX 0.0.17 on JAX 0.4.30: `for_each_client`, per-sample gradients by vmap in its client step.

FedJAX has no per-sample clipping of its own; the step added here is the usual one. Every
client draws its own noise, as a client would.
"""

from __future__ import annotations

import fedjax
import jax
import jax.numpy as jnp
import jax_models
import numpy as np
import sizes
from protocol import Outcome, Play, serve
from work import Work


def build(work: Work) -> Play:
    shape = work.shape
    evaluate = jax.jit(jax_models.evaluation(shape))
    per_sample = jax.vmap(jax.grad(jax_models.sample_loss(shape)), in_axes=(None, 0, 0))
    batch = sizes.rows("fedjax", shape.model, shape.samples)

    def client_init(shared, given):  # type: ignore[no-untyped-def]
        params, std = shared
        zero = jax.tree_util.tree_map(jnp.zeros_like, params)
        return {"params": params, "total": zero, "std": std, "key": given}

    def client_step(state, rows):  # type: ignore[no-untyped-def]
        gradients = per_sample(state["params"], rows["x"], rows["y"])
        leaves = jax.tree_util.tree_leaves(gradients)
        squared = sum(jnp.sum(leaf**2, axis=tuple(range(1, leaf.ndim))) for leaf in leaves)
        factor = 1 / jnp.maximum(1, jnp.sqrt(squared) / work.clip) / shape.samples
        total = jax.tree_util.tree_map(
            lambda sum_, leaf: sum_ + jnp.tensordot(factor, leaf, 1), state["total"], gradients
        )
        return {**state, "total": total}

    def client_final(shared, state):  # type: ignore[no-untyped-def]
        # U clients are averaged, so each draws √U times the noise of the mean
        std, leaves = state["std"] * shape.clients**0.5, jax.tree_util.tree_leaves(state["total"])
        keys = iter(jax.random.split(state["key"], len(leaves)))
        return jax.tree_util.tree_map(
            lambda mean: -work.rate * mean + std * jax.random.normal(next(keys), mean.shape),
            state["total"],
        )

    each = fedjax.for_each_client(client_init, client_step, client_final)
    held = {}
    for i in range(shape.clients):
        x, y = work.client(i)
        held[str(i).encode()] = {"x": x, "y": y}
    data = fedjax.InMemoryFederatedData(held)
    count = iter(range(2**31))
    start = jax.tree_util.tree_map(jnp.asarray, work.params)
    test = jnp.asarray(work.test_x), jnp.asarray(work.test_y)

    def play(std: float) -> Outcome:
        keys = jax.random.split(jax.random.PRNGKey(next(count)), shape.clients)
        clients = [
            (name, own.batch(batch_size=batch), key)
            for (name, own), key in zip(data.clients(), keys, strict=True)
        ]
        updates = ((update, 1.0) for _, update in each((start, np.float32(std)), clients))
        mean = fedjax.tree_util.tree_mean(updates)
        new = jax.tree_util.tree_map(jnp.add, start, mean)
        loss, accuracy = evaluate(new, *test)
        return Outcome(jax.device_get(new), loss, accuracy)

    return play


if __name__ == "__main__":
    serve(build, "fedjax", "jax", "jaxlib")
