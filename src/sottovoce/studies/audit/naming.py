"""The best guess of a server that knows the candidates: the one most likely under the noise.

Before noise a client with one sample uploads that sample's clipped gradient g, and the server knows
the g of every candidate; noise is Gaussian, so that the likeliest candidate is the one with the
largest ⟨told, g⟩ − |g|²/2. Nothing names more often where all are equally likely, at a model that
an honest server sends. Other samples of the client change nothing if the server knows them: it
takes their gradients out of the sum, and the noise is the same.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from sottovoce.client.release import Parameters
from sottovoce.models import gradients
from sottovoce.models.form import Form
from sottovoce.privacy.sensitivity import Recipe
from sottovoce.studies.audit.inversion import Reconstructions
from sottovoce.studies.audit.uploads import Labels, Level, Rows, Victim

Floats = NDArray[np.float64]


def clipped(form: Form, model: Parameters, x: Rows, y: Labels, clip: float) -> Floats:
    """[rows, parameters]: each record's gradient, cut to the norm C.

    >>> form = Form("svm", (1,), 2, kappa=0.0)
    >>> start = {"b": np.zeros(()), "w": np.zeros(1)}
    >>> clipped(form, start, np.full((1, 1), 3.0), np.ones(1, np.int64), 1.0).round(3).tolist()
    [[-0.316, -0.949]]
    """
    own = gradients.written(form, model, x, y)
    own /= np.maximum(1.0, np.linalg.norm(own, axis=1, keepdims=True) / clip)
    return np.asarray(own)


def attack(
    form: Form, recipe: Recipe, model: Parameters, x: Rows, y: Labels, level: Level
) -> Reconstructions:
    """Every sample as a client of its own, which uploads once and spends its whole budget on it."""
    candidates = clipped(form, model, x, y, recipe.clip)
    lengths = np.sum(candidates**2, axis=1) / 2
    named = np.empty(len(y), dtype=np.int64)
    for i in range(len(y)):
        told = Victim(form, recipe, x[i : i + 1], y[i : i + 1]).gradient(level, model)
        flat = np.concatenate([told[name].ravel() for name in sorted(told)])
        named[i] = np.argmax(candidates @ flat - lengths)
    right, every = named == np.arange(len(y)), np.ones(len(y), dtype=bool)
    return Reconstructions(level, x, y, x[named], right, y[named] == y, every, len(y))
