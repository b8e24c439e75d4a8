"""Communication-rounds discounting (CRD, Algorithm 2): T shrinks when the loss stops falling.

After round t (from 0) the losses V₀ … V_{t+1} are known. As printed (step 8 of the paper):

    if V_t − V_{t+1} < ζ:  T ← ⌊β(T − t)⌋ + t,

and the run stops once t + 1 ≥ T. The loss of a single round varies with the noise, so the printed
rule discounts far too early at large ε. The smoothed rule compares means of w losses instead, and
waits w rounds between two discounts. It applies only if 2w losses are known (t + 2 ≥ 2w) and
t − t_last ≥ w, and discounts if

    mean(the w losses before) − mean(the last w losses) < ζ·w.

w = 1 is exactly the printed rule.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from fractions import Fraction

from sottovoce.errors import InputError
from sottovoce.schedules.base import Progress, Round, require_rounds


@dataclass(frozen=True)
class DiscountedRounds:
    """At most `rounds` rounds, discounted by `beta` if `window` losses improve by less than ζ.

    >>> schedule = DiscountedRounds(rounds=100, beta=0.9, zeta=1e-3, window=1)  # as printed
    >>> progress = schedule.advance(schedule.start(2.3), 2.1)  # improving: T stays
    >>> progress = schedule.advance(progress, 2.2)  # not improving: ⌊0.9·(100 − 1)⌋ + 1
    >>> schedule.round(progress)
    Round(t=2, horizon=90, scale=1.0, spread=None)
    """

    rounds: int
    beta: float = 0.8
    zeta: float = 0.0
    window: int = 3

    def __post_init__(self) -> None:
        require_rounds(self.rounds)
        if not 0 < self.beta < 1:
            raise InputError.of("beta", self.beta, "between 0 and 1", "0.8 is the default")
        if not math.isfinite(self.zeta):
            raise InputError.of("zeta", self.zeta, "a finite number", "0 is the default")
        if not isinstance(self.window, int) or isinstance(self.window, bool) or self.window < 1:
            raise InputError.of(
                "window", self.window, "a whole number ≥ 1", "1 is the paper's rule, 3 the default"
            )

    @property
    def steady(self) -> bool:
        """Whether no loss changes the horizon: always false."""
        return False

    def start(self, loss: float | None) -> Progress:
        """Start with T = T₀; a discount is allowed as soon as there are 2w losses."""
        known = () if loss is None else (loss,)
        return Progress(0, self.rounds, recent=known, last_discount=-self.window)

    def round(self, progress: Progress) -> Round | None:
        """Return the next round while t < T."""
        if progress.done >= progress.horizon:
            return None
        return Round(t=progress.done, horizon=progress.horizon)

    def advance(self, progress: Progress, loss: float) -> Progress:
        """Apply the rule after round t = `progress.done` (after the last round too)."""
        t = progress.done
        recent = (*progress.recent, loss)[-2 * self.window :]
        progress = replace(progress, done=t + 1, recent=recent)
        if self._keeps_horizon(t, recent, progress.last_discount):
            return progress
        # β is taken from its decimal text, because 0.7·90 is 62.99… in binary and loses a round.
        kept = math.floor(Fraction(str(self.beta)) * (progress.horizon - t))
        return replace(progress, horizon=kept + t, last_discount=t)

    def _keeps_horizon(self, t: int, recent: tuple[float, ...], last_discount: int) -> bool:
        w = self.window
        if len(recent) < 2 * w or t - last_discount < w:
            return True
        gain = sum(recent[:w]) / w - sum(recent[w:]) / w
        # Written so that a NaN (a diverged model, ∞ − ∞) counts as no improvement.
        return gain >= self.zeta * w
