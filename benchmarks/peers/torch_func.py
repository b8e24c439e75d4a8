"""torch.func: per-sample gradients by `vmap(grad(...))`, clipped and summed chunk by chunk."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import sizes
import torch
import torch_models
from protocol import Outcome, Play, serve
from torch.func import functional_call, grad, vmap
from work import Shape, Work


def clipped_mean(
    shape: Shape, model: torch.nn.Module, clip: float
) -> Callable[[dict[str, Any], Any, Any], dict[str, Any]]:
    """(parameters, rows, labels) → (1/N)Σ_m clip(g_m)."""
    criterion = torch_models.criterion(shape)

    def loss(params: dict[str, Any], row: Any, label: Any) -> Any:
        return criterion(functional_call(model, params, (row[None],)), label[None])

    gradient = vmap(grad(loss), in_dims=(None, 0, 0))

    def mean(params: dict[str, Any], x: Any, y: Any) -> dict[str, Any]:
        total = {name: torch.zeros_like(value) for name, value in params.items()}
        step = sizes.rows("torch-func", shape.model, len(x))
        for start in range(0, len(x), step):
            own = gradient(params, x[start : start + step], y[start : start + step])
            flat = {name: part.reshape(len(part), -1) for name, part in own.items()}
            squared = sum(part.square().sum(dim=1) for part in flat.values())
            factor = 1 / (squared.sqrt() / clip).clamp(min=1) / len(x)
            for name, part in flat.items():
                total[name] += (factor @ part).reshape(total[name].shape)
        return total

    return mean


def build(work: Work) -> Play:
    shape, model = work.shape, torch_models.module(work.shape)
    mean = clipped_mean(shape, model, work.clip)
    x, y, test_x, test_y = torch_models.rows(work)
    torch_models.fill(shape, list(model.parameters()), work.params)
    start = {name: value.detach() for name, value in model.named_parameters()}

    def play(std: float) -> Outcome:
        found, new = mean(start, x, y), {}
        for name, value in start.items():
            new[name] = value - work.rate * found[name] + std * torch.randn_like(value)
        scores = torch_models.evaluate(
            shape, lambda rows: functional_call(model, new, (rows,)), test_x, test_y
        )
        return Outcome(torch_models.read(shape, list(new.values())), *scores)

    return play


if __name__ == "__main__":
    serve(build, "torch")
