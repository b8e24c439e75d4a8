"""The picture that a model takes for a class most surely (Fig. 3), by gradient ascent on the input.

x ← x + rate · ∇ₓ(log p(class | x) − penalty·‖x‖²), from an empty picture, pixels kept in [0, 1].
Pictures travel as text: one byte a pixel, base64.
"""

from __future__ import annotations

import base64
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from numpy.typing import NDArray

from sottovoce.studies.paper.definition import Prototypes

if TYPE_CHECKING:
    from sottovoce.runs.trained import Trained

Pictures = NDArray[np.float64]  # [classes, pixels]


def pictures(trained: Trained, how: Prototypes) -> Pictures:
    """One picture for every class, pixels in [0, 1]."""
    import jax
    import jax.numpy as jnp

    shape, classes = trained.record["model"]["shape"], trained.record["model"]["classes"]
    y, model = (
        jnp.arange(classes),
        cast(Any, trained.model),
    )  # a JAX model: figures train those of plans

    def unsure(x: Any) -> Any:
        losses = model.loss(trained.params, x, y)
        return jnp.sum(losses) + how.penalty * jnp.sum(x**2)

    def step(_: int, x: Any) -> Any:
        return jnp.clip(x - how.rate * jax.grad(unsure)(x), 0, 1)

    start = jnp.zeros((classes, int(np.prod(shape))))
    return np.asarray(jax.lax.fori_loop(0, how.steps, step, start), dtype=np.float64)


def distinct(drawn: Pictures, x: NDArray[Any], y: NDArray[Any]) -> float:
    """The mean correlation of each picture with the mean image of its class.

    >>> x = np.array([[0.0, 1.0, 0.0], [1.0, 0.0, 0.0]])
    >>> distinct(x, x, np.array([0, 1])), distinct(np.zeros((2, 3)), x, np.array([0, 1]))
    (1.0, 0.0)
    """
    values = []
    for c, picture in enumerate(drawn):
        a, b = picture - picture.mean(), x[y == c].mean(axis=0)
        b = b - b.mean()
        size = float(np.linalg.norm(a) * np.linalg.norm(b))
        values.append(float(a @ b) / size if size > 0 else 0.0)
    return round(float(np.mean(values)), 12)


def to_text(drawn: Pictures) -> str:
    """Pictures as text.

    >>> to_text(np.array([[0.0, 1.0]]))
    'AP8='
    """
    return base64.b64encode(np.round(255 * drawn).astype(np.uint8).tobytes()).decode()


def from_text(text: str, classes: int = 10) -> Pictures:
    """The pictures that `to_text` wrote.

    >>> from_text("AP8=", classes=1)
    array([[0., 1.]])
    """
    pixels = np.frombuffer(base64.b64decode(text), dtype=np.uint8)
    return pixels.reshape(classes, -1) / 255
