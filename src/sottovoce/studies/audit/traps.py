"""A dishonest server: weights that isolate single samples in an honest client's sum.

All hidden units look at the same brightness m·x, with thresholds that rise from unit to unit. A
sample between the thresholds of units j and j + 1 lights unit j and not unit j + 1: the difference
of their gradients holds the samples of that bin alone, and where there is one, its quotient is that
sample exactly, however many others the client has (Fowl et al. 2022). Clipping scales a sample's
gradient as a whole, and so does not help; noise does. The server needs to know no more than how
bright samples usually are, for which it has its public validation set.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sottovoce.client.release import Parameters
from sottovoce.errors import InputError
from sottovoce.models.form import Form
from sottovoce.studies.audit.ceiling import Rates
from sottovoce.studies.audit.similarity import mse, recognised
from sottovoce.studies.audit.uploads import Level, Rows, Victim

Floats = NDArray[np.float64]

EXACT = 1e-5  # mean squared error below which a sample counts as stolen
_QUIET = 1e-3  # weight of the last layer: scores stay near 0, and so every class near likely


@dataclass(frozen=True, eq=False)
class Loot:
    """What the bins gave: pictures, the client's sample each resembles most, and who was stolen.

    `rates` count a record as found if a picture equals it to EXACT: the client's own records, and
    as negatives records that the client does not have. They are all of one upload and so share its
    noise: the rates are shown, and decide nothing.
    """

    level: Level
    found: Floats
    nearest: NDArray[np.int64]
    rates: Rates


def model(form: Form, public: Rows, samples: int) -> Parameters:
    """The weights that a dishonest server sends, from public samples and the client's n alone.

    Bins are as wide as one sample in n: each of the brightest has its chance to be alone.

    >>> trap = model(Form("mlp", (2,), 2, hidden=3), np.random.default_rng(0).random((99, 2)), 9)
    >>> bool(np.all(np.diff(trap["b1"]) < 0))
    True
    """
    if form.name != "mlp":
        raise InputError.of("model", form.name, "mlp", "the trap is set in the first dense layer")
    look = np.linspace(0.8, 1.2, form.features) / form.features
    width = min(1 / samples, 1 / (form.hidden + 1))
    at = np.quantile(public @ look, 1 - width * np.arange(form.hidden, 0, -1))
    pull = _QUIET * np.cos(np.arange(form.classes))  # differs between any two classes
    return {
        "b1": -at,
        "b2": np.zeros(form.classes),
        "w1": np.tile(look[:, None], (1, form.hidden)),
        "w2": np.tile(pull, (form.hidden, 1)),
    }


def bins(gradient: Parameters) -> Floats:
    """One picture a bin: the quotient of what adjacent units did not have in common."""
    w = np.diff(gradient["w1"], axis=1, append=0.0)
    b = np.diff(gradient["b1"], append=0.0)
    with np.errstate(all="ignore"):
        return np.nan_to_num(np.asarray((w / b).T), posinf=0.0, neginf=0.0)


def attack(victim: Victim, public: Rows, level: Level) -> Loot:
    """One upload of the victim at the trap; it may spend its whole budget on it."""
    told = victim.gradient(level, model(victim.form, public, len(victim.y)))
    found = bins(told)
    mine, others = _stolen(found, victim.x), _stolen(found, public)
    rates = Rates(mine, len(victim.y), others, len(public))
    return Loot(level, found, recognised(found, victim.x), rates)


def _stolen(found: Floats, rows: Rows) -> int:
    nearest = recognised(found, rows)
    return len({int(i) for i, x in zip(nearest, found, strict=True) if mse(x, rows[i]) < EXACT})
