"""Fig. 2: the paper's bound on the moments beside their true values."""

from __future__ import annotations

from typing import Any

import numpy as np

from sottovoce.privacy import moments as exact
from sottovoce.privacy.sensitivity import Recipe
from sottovoce.studies.paper.definition import Moments


def compute(what: Moments) -> list[dict[str, Any]]:
    """One entry a panel: λ, bound, truth, the first λ at which the bound is none, for every C.

    >>> from sottovoce.studies.paper.definition import figure
    >>> panels = compute(figure("fig2").moments)
    >>> [panel["breaks"]["1.0"] for panel in panels]
    [28, 80, 7, 28]
    """
    first, last = what.orders
    orders = np.arange(first, last + 1)
    panels = []
    for place in what.panels:
        own = {"sampling": float(place["sampling"]), "ratio": _ratio(what, place, what.clip)}
        breaks = {}
        for clip in what.other_clips:
            end = exact.first_break(sampling=own["sampling"], ratio=_ratio(what, place, clip))
            breaks[str(clip)] = end
        panels.append(
            {
                **place,
                "ratio": own["ratio"],
                "order": orders.tolist(),
                "bound": _short(exact.log_paper_bound(orders, **own)),
                "truth": _short(exact.log_moment(orders, **own)),
                "breaks": breaks,
            }
        )
    return panels


def _ratio(what: Moments, place: Any, clip: float) -> float:
    """Δ/σ with Δ = 2ηC/n."""
    recipe = Recipe(what.learning_rate, clip)
    return float(recipe.sensitivity([place["samples"]])[0]) / what.sigma


def _short(values: Any) -> list[float]:
    return [float(f"{value:.6g}") for value in values]
