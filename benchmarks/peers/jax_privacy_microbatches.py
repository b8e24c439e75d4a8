"""jax-privacy 2.0: `clipped_grad` over all rows in microbatches, `gaussian_privatizer`, one jit.

The clients are one batch (they weigh the same), which spares it a loop over clients. A row comes
to the loss as a batch of one, as jax-privacy does by itself, or as a vector
(`keep_batch_dim=False`); the size of a microbatch and this are chosen by `sizes.py`.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import jax_models
import jax_privacy
import numpy as np
import sizes
from protocol import Outcome, Play, serve
from work import Work


def build(work: Work) -> Play:
    shape = work.shape
    evaluate = jax_models.evaluation(shape)
    as_vector = "vector" in sizes.chosen("jax-privacy", shape.model)
    losses = jax_models.losses(shape)
    gradient = jax_privacy.clipped_grad(
        jax_models.sample_loss(shape)
        if as_vector
        else lambda params, x, y: jnp.mean(losses(params, x, y)),
        l2_clip_norm=work.clip,
        normalize_by=float(shape.rows),
        batch_argnums=(1, 2),
        keep_batch_dim=not as_vector,
        microbatch_size=sizes.rows("jax-privacy", shape.model, shape.rows),
    )
    x, y, test_x, test_y = map(jnp.asarray, (work.x, work.y, work.test_x, work.test_y))
    start = jax.tree.map(jnp.asarray, work.params)

    @jax.jit
    def one_round(params, x, y, test_x, test_y, std, key):  # type: ignore[no-untyped-def]
        privatizer = jax_privacy.noise_addition.gaussian_privatizer(stddev=std, prng_key=key)
        mean = gradient(params, x, y)
        # the work's noise is that of the new weights, so it is divided by the rate here
        noisy, _ = privatizer.update(mean, privatizer.init(params))
        new = jax.tree.map(lambda w, g: w - work.rate * g, params, noisy)
        return new, evaluate(new, test_x, test_y)

    count = iter(range(2**31))

    def play(std: float) -> Outcome:
        key = jax.random.key(next(count))
        found = one_round(start, x, y, test_x, test_y, np.float32(std / work.rate), key)
        new, (loss, accuracy) = jax.device_get(found)
        return Outcome(new, loss, accuracy)

    return play


if __name__ == "__main__":
    serve(build, "jax-privacy", "jax", "jaxlib")
