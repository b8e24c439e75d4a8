"""Opacus 1.6 in its two modes: `python opacus_modes.py WORK.npz hooks|ghost`.

Hooks form every sample's gradient; ghost clipping takes norms from activations and backprops and
goes backward a second time. `PrivacyEngine.make_private` as its documents show it. All clients
weigh the same, so the round is one logical batch in physical ones (`signal_skip_step`), and noise
is drawn once.
"""

from __future__ import annotations

import sys
import warnings
from typing import Any

import sizes
import torch
import torch_models
from opacus import PrivacyEngine
from protocol import Outcome, Play, serve
from torch.utils.data import DataLoader, TensorDataset
from work import Work


def build_mode(work: Work, mode: str) -> Play:
    """A round by Opacus in one of its modes."""
    warnings.simplefilter("ignore")
    shape = work.shape
    model = torch_models.module(shape)
    x, y, test_x, test_y = torch_models.rows(work)
    found: Any = PrivacyEngine().make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=work.rate),
        criterion=torch_models.criterion(shape),
        data_loader=DataLoader(TensorDataset(x, y), batch_size=shape.rows),
        noise_multiplier=1.0,
        max_grad_norm=work.clip,
        poisson_sampling=False,
        grad_sample_mode=mode,
    )
    wrapped, optimizer = found[0], found[1]
    criterion = found[2] if mode == "ghost" else torch_models.criterion(shape)
    parameters = list(model.parameters())
    step = sizes.rows(f"opacus-{mode}", shape.model, shape.rows)

    def play(std: float) -> Outcome:
        torch_models.fill(shape, parameters, work.params)
        # Opacus draws s·C for the sum of the rows and divides by their number
        optimizer.noise_multiplier = std * shape.rows / (work.clip * work.rate)
        wrapped.train()
        for start in range(0, shape.rows, step):
            optimizer.signal_skip_step(do_skip=start + step < shape.rows)
            loss = criterion(wrapped(x[start : start + step]), y[start : start + step])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        wrapped.eval()
        scores = torch_models.evaluate(shape, model, test_x, test_y)
        return Outcome(torch_models.read(shape, parameters), *scores)

    return play


if __name__ == "__main__":
    serve(lambda work: build_mode(work, sys.argv[2]), "opacus", "torch")
