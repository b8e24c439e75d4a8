"""A PyTorch model behind the same trust boundary: per-sample gradients by torch.func.

    from sottovoce.models.torch_model import TorchModel
    model = TorchModel(lambda: nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10)))

The client's release path asks for every sample's gradient in float64 and does the rest itself
(clipping, grid, exact sum, noise), so that nothing here can weaken the guarantee except gradients
that mix samples. A module that would (batch normalisation keeps buffers over the batch) is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.func import functional_call, grad

from sottovoce.errors import InputError
from sottovoce.models.base import EVALUATED_ROWS, Arrays, Model, Shapes, arrange_scores


def warm() -> None:
    """Import what torch imports at its first gradient, which takes seconds; starts no thread."""
    grad(lambda weight: (weight * weight).sum())(torch.zeros(1, dtype=torch.float64))


class TorchModel(Model):
    """`make` builds the module; `shape` is that of one sample (rows come flattened).

    `loss(scores, y)` gives one loss a row; the default is the cross-entropy.

    >>> model = TorchModel(lambda: torch.nn.Linear(2, 3))
    >>> model.shapes()
    {'bias': (3,), 'weight': (3, 2)}
    >>> params, x, y = model.draw_parameters(seed=1), np.ones((4, 2)), np.array([0, 1, 2, 0])
    >>> model.gradients(params, x, y)["bias"].shape
    (4, 3)
    """

    warm_up = "sottovoce.models.torch_model:warm"

    def __init__(
        self,
        make: Callable[[], torch.nn.Module],
        *,
        shape: tuple[int, ...] | None = None,
        loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None = None,
    ) -> None:
        self._make, self._shape = make, shape
        self._loss = loss or _cross_entropy

    @cached_property
    def _module(self) -> torch.nn.Module:
        module = self._make().double().eval()
        for name, layer in module.named_modules():
            if list(layer.buffers(recurse=False)):
                raise InputError.of(
                    "the torch module",
                    f"{name or 'itself'}: {type(layer).__name__}",
                    "without buffers",
                    "batch normalisation mixes samples; use GroupNorm or LayerNorm",
                )
        return module

    def shapes(self) -> Shapes:
        """Return names and shapes of the parameters, sorted by name."""
        shapes = {name: tuple(leaf.shape) for name, leaf in self._module.named_parameters()}
        return dict(sorted(shapes.items()))

    def draw_parameters(self, seed: int) -> dict[str, NDArray[np.float32]]:
        """Return fresh parameters, a function of the seed; torch's own state stays as it was."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed % 2**63)
            drawn = dict(self._make().named_parameters())
        return {name: drawn[name].detach().numpy().astype(np.float32) for name in sorted(drawn)}

    def gradients(self, params: Arrays, x: NDArray[Any], y: NDArray[Any]) -> Arrays:
        """Return every sample's gradient in float64, each computed alone.

        In one batch a row's last bits may depend on the others, and its NaN may reach them.
        """
        weights, rows, labels = self._tensors(params, x, y)
        gradient = grad(self._loss_of_sample)
        samples = [gradient(weights, *row) for row in zip(rows, labels, strict=True)]
        return {name: torch.stack([found[name] for found in samples]).numpy() for name in weights}

    def losses(self, params: Arrays, x: NDArray[Any], y: NDArray[Any]) -> NDArray[np.float64]:
        """Return the loss of every sample, each computed alone."""
        weights, rows, labels = self._tensors(params, x, y)
        with torch.no_grad():
            losses = [self._loss_of_sample(weights, *row) for row in zip(rows, labels, strict=True)]
        return np.asarray(torch.stack(losses).numpy(), dtype=np.float64)

    def predict(self, params: Arrays, x: NDArray[Any]) -> NDArray[np.int64]:
        """Return the class with the largest score."""
        return np.asarray(self._apply(params, x).argmax(axis=-1), dtype=np.int64)

    def answer(
        self, params: Arrays, x: NDArray[Any]
    ) -> tuple[NDArray[np.int64], NDArray[np.float64] | None]:
        starts = range(0, len(x), EVALUATED_ROWS)
        scores = np.concatenate([self._apply(params, x[i : i + EVALUATED_ROWS]) for i in starts])
        return np.asarray(scores.argmax(axis=-1), np.int64), arrange_scores(scores)

    def _apply(self, params: Arrays, x: NDArray[Any]) -> NDArray[Any]:
        weights, rows, _ = self._tensors(params, x, np.zeros(len(x), np.int64))
        with torch.no_grad():
            return np.asarray(functional_call(self._module, weights, (rows,)).numpy())

    def _loss_of_sample(
        self, weights: dict[str, torch.Tensor], row: torch.Tensor, label: torch.Tensor
    ) -> torch.Tensor:
        scores = functional_call(self._module, weights, (row[None],))
        return self._loss(scores, label[None])[0]

    def _tensors(
        self, params: Arrays, x: NDArray[Any], y: NDArray[Any]
    ) -> tuple[dict[str, torch.Tensor], torch.Tensor, torch.Tensor]:
        weights = {
            name: torch.tensor(np.asarray(leaf, np.float64)) for name, leaf in params.items()
        }
        _ = self._module  # made here: inside grad nothing may draw its first weights
        rows = torch.tensor(np.asarray(x, np.float64))
        if self._shape is not None:
            rows = rows.reshape(len(rows), *self._shape)
        kind = np.float64 if np.asarray(y).dtype.kind == "f" else np.int64
        return weights, rows, torch.tensor(np.asarray(y, kind))


def _cross_entropy(scores: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(scores, y, reduction="none")
