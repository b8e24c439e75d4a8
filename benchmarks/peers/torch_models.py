"""The three models as PyTorch modules, for Opacus, torch.func and pfl.

PyTorch keeps a dense layer's weights transposed and a kernel's colours first; `fill` and `read`
translate, outside of what is timed as training (a round ends with `read`, 0.8 MB).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import nn
from work import KERNEL, PADDING, Arrays, Shape, Work


class Hinge(nn.Module):
    """max{1 − y·score, 0} for labels 0 and 1; `reduction` as PyTorch's own losses have it."""

    def __init__(self, reduction: str = "mean") -> None:
        super().__init__()
        self.reduction = reduction

    def forward(self, scores: Any, y: Any) -> Any:
        each = torch.relu(1 - (2.0 * y - 1) * scores[:, 0])
        return each if self.reduction == "none" else each.mean()


def criterion(shape: Shape, reduction: str = "mean") -> nn.Module:
    """The loss of the work's model."""
    if shape.model == "svm":
        return Hinge(reduction)
    return nn.CrossEntropyLoss(reduction=reduction)


def module(shape: Shape) -> nn.Sequential:
    """The work's model, with whatever weights PyTorch starts it with."""
    if shape.model == "svm":
        return nn.Sequential(nn.Linear(shape.features, 1))
    if shape.model == "mlp":
        first = nn.Linear(shape.features, shape.hidden)
        return nn.Sequential(first, nn.ReLU(), nn.Linear(shape.hidden, shape.classes))
    return nn.Sequential(
        nn.Conv2d(shape.picture[2], shape.channels, KERNEL, padding=PADDING),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(shape.channels * shape.places, shape.classes),
    )


def _names(shape: Shape) -> list[str]:
    return list(shape.parameters())  # weight, bias, weight, bias: the order of PyTorch's too


def _turned(array: Any, *, back: bool) -> Any:
    if array.ndim == 4:
        return array.transpose(2, 3, 1, 0) if back else array.transpose(3, 2, 0, 1)
    return array.T if array.ndim == 2 else array


def fill(shape: Shape, parameters: list[Any], params: Arrays) -> None:
    """Write the work's weights into PyTorch parameters."""
    with torch.no_grad():
        for name, parameter in zip(_names(shape), parameters, strict=True):
            array = _turned(np.asarray(params[name]), back=False)
            parameter.copy_(torch.from_numpy(np.array(array)).reshape(parameter.shape))


def read(shape: Shape, parameters: list[Any]) -> Arrays:
    """PyTorch parameters as the work's weights."""
    sizes, found = shape.parameters(), {}
    for name, parameter in zip(_names(shape), parameters, strict=True):
        array = _turned(parameter.detach().numpy(), back=True)
        found[name] = np.array(array).reshape(sizes[name])
    return found


def rows(work: Work) -> tuple[Any, Any, Any, Any]:
    """Training and test rows as tensors; pictures with their colours first, as PyTorch wants."""

    def tensor(x: Any) -> Any:
        if work.shape.model != "cnn":
            return torch.from_numpy(x)
        pictures = torch.from_numpy(x).reshape(-1, *work.shape.picture)
        return pictures.permute(0, 3, 1, 2).contiguous()

    labels = [torch.from_numpy(y.astype(np.int64)) for y in (work.y, work.test_y)]
    return tensor(work.x), labels[0], tensor(work.test_x), labels[1]


@torch.no_grad()
def evaluate(shape: Shape, apply: Any, x: Any, y: Any) -> tuple[float, float]:
    """Mean loss and accuracy."""
    scores = apply(x)
    decided = scores[:, 0] > 0 if shape.model == "svm" else scores.argmax(dim=1)
    return float(criterion(shape)(scores, y)), float((decided == y).float().mean())
