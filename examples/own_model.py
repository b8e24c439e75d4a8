"""Train a model of your own: three JAX functions, and clients that bring their own arrays.

Run it with `python examples/own_model.py`; it takes seconds.
"""

import jax
import jax.numpy as jnp
import numpy as np

from sottovoce import Plan, custom, simulate

rng = np.random.default_rng(1)


def sample(n: int) -> tuple[np.ndarray, np.ndarray]:
    """Points in the plane: inside the ring or not. Use your own arrays instead."""
    x = rng.uniform(-1, 1, (n, 2)).astype("float32")
    return x, (np.hypot(*x.T) < 0.7).astype(int)


def init(key: jax.Array) -> dict[str, jax.Array]:
    """Any tree of arrays."""
    one, two = jax.random.split(key)
    return {"in": jax.random.normal(one, (2, 32)), "out": jax.random.normal(two, (32, 2)) / 8}


def apply(params: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    """Scores of a batch of rows."""
    return jnp.cos(x @ params["in"]) @ params["out"]


def loss(scores: jax.Array, y: jax.Array) -> jax.Array:
    """One loss per row: each row's gradient is clipped by itself."""
    return -jax.nn.log_softmax(scores)[jnp.arange(len(y)), y]


run = simulate(
    Plan(privacy={"epsilon": 8, "delta": 1e-5}, local={"learning_rate": 2.0, "clip": 1.0}),
    data=[sample(n) for n in (300, 400, 500, 600)],  # one (X, y) per client
    validation=sample(300),  # public: it decides when to stop
    test=sample(1000),
    model=custom(init, apply, loss),
    seed=1,
)
print(f"test accuracy {run.accuracy:.1%} after {run.rounds_used} rounds")
print(run.guarantee)
