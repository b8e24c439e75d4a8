"""A sample read off the gradient of the first dense layer, and labels off the last one's bias.

With h = relu(x w1 + b1) every sample adds x ⊗ e to the gradient of w1 and e to that of b1, so that
for a single sample column j of the one divided by number j of the other *is* the sample, whatever
it was clipped to. With several samples the quotient is a weighted mean of those that light unit j.
The bias of the last layer gets p − onehot(y): its most negative number is at the label.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sottovoce.client.release import Parameters
from sottovoce.errors import InputError
from sottovoce.models.form import Form
from sottovoce.privacy.sensitivity import Recipe
from sottovoce.studies.audit.similarity import mse, psnr, recognised, ssim
from sottovoce.studies.audit.uploads import Labels, Level, Rows, Victim

Floats = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Reconstructions:
    """Samples, what an attack made of them, and whether it was recognised among candidates."""

    level: Level
    originals: Floats
    truth: Labels
    found: Floats
    names: NDArray[np.bool_]  # whether each was told from the other candidates
    labels: NDArray[np.bool_]  # whether each label was found
    judged: NDArray[np.bool_]  # one of each upload: the others share its noise and decide nothing
    candidates: int
    tries: int = 1  # how many of the candidates were named for each

    @property
    def error(self) -> float:
        """Mean squared error over all."""
        return mse(self.originals, self.found)

    @property
    def psnr(self) -> float:
        """The median over pictures, in decibels."""
        pairs = zip(self.originals, self.found, strict=True)
        return float(np.median([psnr(one, other) for one, other in pairs]))

    @property
    def ssim(self) -> float:
        """The mean over pictures."""
        pairs = zip(self.originals, self.found, strict=True)
        return float(np.mean([ssim(one, other) for one, other in pairs]))

    @property
    def identified(self) -> float:
        """How often the right one of the candidates was named."""
        return float(np.mean(self.names))


def invert(gradient: Parameters) -> Floats:
    """x = ∂w1[:, j] / ∂b1[j] at the unit j whose bias moved most.

    >>> invert({"w1": np.array([[0.0, 6.0], [0.0, 2.0]]), "b1": np.array([0.0, 2.0])}).tolist()
    [3.0, 1.0]
    """
    unit = int(np.argmax(np.abs(gradient["b1"])))
    bottom = float(gradient["b1"][unit])
    return np.asarray(gradient["w1"][:, unit] / (bottom if bottom else 1.0))


def label(gradient: Parameters) -> int:
    """Where the bias of the last layer was pulled up.

    >>> label({"b2": np.array([0.1, -0.8, 0.7])})
    1
    """
    return int(np.argmin(gradient["b2"]))


def attack(
    form: Form, recipe: Recipe, model: Parameters, x: Rows, y: Labels, level: Level
) -> Reconstructions:
    """Every sample as a client of its own, which uploads once and spends its whole budget on it.

    Candidates for recognition are all the samples together.
    """
    if form.name != "mlp":
        raise InputError.of("model", form.name, "mlp", "the attack reads the first dense layer")
    found, labels = [], []
    for row, right in zip(x, y, strict=True):
        victim = Victim(form, recipe, row[None], np.array([right]))
        told = victim.gradient(level, model)
        found.append(invert(told))
        labels.append(label(told) == right)
    pictures = np.array(found)
    names = recognised(pictures, x) == np.arange(len(y))
    every = np.ones(len(y), dtype=bool)
    return Reconstructions(level, x, y, pictures, names, np.array(labels), every, len(y))


def chosen(y: Labels, classes: int) -> list[int]:
    """One sample of each class, the first: what is shown.

    >>> chosen(np.array([1, 1, 0, 2]), 3)
    [2, 0, 3]
    """
    return [int(np.flatnonzero(y == c)[0]) for c in range(classes) if np.any(y == c)]
