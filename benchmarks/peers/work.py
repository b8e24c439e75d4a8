"""The work every peer is given: one round of a federation, as one npz file.

U clients hold n rows each. A round is w − η·(1/U)Σ_i(1/n)Σ_m clip(g_im) + N(0, s²) in every number
of w, then mean loss and accuracy on the test rows. Names and shapes of the parameters are those of
`sottovoce.models.base`. Numpy only, and old numpy too: every peer's environment reads this.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

Arrays = dict[str, Any]

KERNEL, PADDING = 5, 4


@dataclass(frozen=True)
class Shape:
    """The sizes of a work; `hidden` is the mlp's, `channels` the cnn's, `picture` its rows'."""

    model: str
    clients: int
    samples: int
    tested: int
    features: int
    classes: int
    hidden: int = 0
    channels: int = 0
    picture: tuple[int, int, int] = (0, 0, 0)
    kappa: float = 0.0

    @property
    def rows(self) -> int:
        """How many training rows a round goes through.

        >>> SHAPES["mlp"].rows
        40000
        """
        return self.clients * self.samples

    @property
    def places(self) -> int:
        """How many places a convolution's kernel is laid at in one picture."""
        grow = 2 * PADDING - KERNEL + 1
        return (self.picture[0] + grow) * (self.picture[1] + grow)

    def parameters(self) -> dict[str, tuple[int, ...]]:
        """Name and shape of every parameter.

        >>> SHAPES["mlp"].parameters()
        {'w1': (784, 256), 'b1': (256,), 'w2': (256, 10), 'b2': (10,)}
        """
        if self.model == "svm":
            return {"w": (self.features,), "b": ()}
        if self.model == "mlp":
            first, second = (self.features, self.hidden), (self.hidden, self.classes)
            return {"w1": first, "b1": first[1:], "w2": second, "b2": second[1:]}
        kernel = (KERNEL, KERNEL, self.picture[2], self.channels)
        dense = (self.channels * self.places, self.classes)
        return {"kernel": kernel, "bias": kernel[3:], "w": dense, "b": dense[1:]}

    def flop(self) -> float:
        """Products of a round: forward and weight gradients, the error sent back, the test.

        The first layer sends nothing back. 36.8 GFLOP for the mlp of the paper:

        >>> round(SHAPES["mlp"].flop() / 1e9, 1)
        36.8
        """
        if self.model == "svm":
            first, second = 2 * self.features, 0
        elif self.model == "mlp":
            first, second = 2 * self.features * self.hidden, 2 * self.hidden * self.classes
        else:
            patch = KERNEL * KERNEL * self.picture[2]
            first = 2 * patch * self.channels * self.places
            second = 2 * self.channels * self.places * self.classes
        return float(self.rows * (2 * first + 3 * second) + self.tested * (first + second))

    def bytes(self) -> float:
        """What a round must read at least: every row once, in float32."""
        return 4.0 * (self.rows + self.tested) * self.features


SHAPES = {
    # the paper's MNIST setting
    "mlp": Shape("mlp", 50, 800, 10_000, 784, 10, hidden=256),
    # CIFAR-10's pictures; few rows, so that the slow ones end
    "cnn": Shape("cnn", 50, 80, 1_000, 3072, 10, channels=8, picture=(32, 32, 3)),
    # the Adult census as this project encodes it; no κ, because Opacus sees only what goes through
    # a layer and cannot clip a regulariser with its sample
    "svm": Shape("svm", 50, 600, 10_000, 103, 2),
    # for the tests of the harness
    "tiny": Shape("mlp", 4, 30, 40, 12, 3, hidden=8),
}


@dataclass(frozen=True)
class Work:
    """One work with its numbers. Rows are client after client: x is (U·n, features)."""

    shape: Shape
    params: Arrays
    x: Any
    y: Any
    test_x: Any
    test_y: Any
    clip: float
    rate: float
    std: float

    def client(self, i: int) -> tuple[Any, Any]:
        """The rows of client i and their labels."""
        own = slice(i * self.shape.samples, (i + 1) * self.shape.samples)
        return self.x[own], self.y[own]


def make(shape: Shape, *, seed: int = 0) -> Work:
    """Rows, labels and weights from a seed; the clip is left at infinity.

    Their values do not matter to the time: products are dense. Only the census' rows are made of
    zeros and ones, as one-hot columns are.
    """
    random = np.random.default_rng(seed)

    def rows(count: int) -> Any:
        x = random.random((count, shape.features), dtype=np.float32)
        return (x < 0.13).astype(np.float32) if shape.model == "svm" else x

    params = {}
    for name, size in shape.parameters().items():
        bound = 1 / np.sqrt(np.prod(size[:-1]) if len(size) > 1 else shape.features)
        params[name] = random.uniform(-bound, bound, size).astype(np.float32)
    return Work(
        shape,
        params,
        rows(shape.rows),
        random.integers(0, shape.classes, shape.rows).astype(np.int32),
        rows(shape.tested),
        random.integers(0, shape.classes, shape.tested).astype(np.int32),
        clip=float("inf"),
        rate=1.0,
        std=1e-3,
    )


def save(work: Work, path: Path) -> None:
    """Write it as npz."""
    shape = {f"shape.{key}": value for key, value in asdict(work.shape).items()}
    params = {f"params.{name}": array for name, array in work.params.items()}
    rest = {key: getattr(work, key) for key in ("x", "y", "test_x", "test_y")}
    numbers = {key: getattr(work, key) for key in ("clip", "rate", "std")}
    np.savez(path, **shape, **params, **rest, **numbers)


def load(path: Path) -> Work:
    """Read it back."""
    with np.load(path) as file:
        shape, params, rest = {}, {}, {}
        for key in file.files:
            group, _, name = key.rpartition(".")
            value = file[key]
            if group == "params":
                params[name] = value
            elif group == "shape":
                shape[name] = tuple(value.tolist()) if value.ndim else value.item()
            else:
                rest[name] = value if value.ndim else value.item()
    return Work(Shape(**shape), params, **rest)
