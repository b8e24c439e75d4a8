"""The schedules that a plan can name.

`FixedRounds`        T rounds, as announced: the paper's UDP (Algorithm 1)
`DiscountedRounds`   CRD (Algorithm 2): T shrinks when the loss stops falling
`DecayingNoise`      noise that falls linearly until the budget is spent: the paper's "Lei"
`ForecastRounds`     T is forecast on public rows before the first round
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

import numpy as np

from sottovoce.errors import InputError
from sottovoce.privacy.tank import FULL, scaled_units
from sottovoce.schedules.base import Progress, Round, require_rounds


@dataclass(frozen=True)
class FixedRounds:
    """Exactly `rounds` rounds, whatever the losses.

    >>> schedule = FixedRounds(rounds=2)
    >>> progress = schedule.advance(schedule.start(2.3), 2.1)
    >>> schedule.round(progress)
    Round(t=1, horizon=2, scale=1.0, spread=None)
    >>> schedule.round(schedule.advance(progress, 2.0)) is None
    True
    """

    rounds: int

    def __post_init__(self) -> None:
        require_rounds(self.rounds)

    @property
    def steady(self) -> bool:
        """Whether no loss changes the horizon: always true."""
        return True

    def start(self, loss: float | None) -> Progress:
        """Start with T = T₀."""
        return Progress(done=0, horizon=self.rounds)

    def round(self, progress: Progress) -> Round | None:
        """Return the next of T rounds."""
        if progress.done >= progress.horizon:
            return None
        return Round(t=progress.done, horizon=progress.horizon)

    def advance(self, progress: Progress, loss: float) -> Progress:
        """Count one more round."""
        return replace(progress, done=progress.done + 1)


@dataclass(frozen=True)
class DiscountedRounds:
    """At most `rounds` rounds, discounted by `beta` if `window` losses improve by less than ζ.

    After round t (from 0) the losses V₀ … V_{t+1} are known. As printed (step 8 of the paper):

        if V_t − V_{t+1} < ζ:  T ← ⌊β(T − t)⌋ + t,

    and the run stops once t + 1 ≥ T. The loss of a single round varies with the noise, so the
    printed rule discounts far too early at large ε. The smoothed rule compares means of w losses
    instead, and waits w rounds between two discounts. It applies only if 2w losses are known
    (t + 2 ≥ 2w) and t − t_last ≥ w, and discounts if

        mean(the w losses before) − mean(the last w losses) < ζ·w.

    w = 1 is exactly the printed rule.

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


@dataclass(frozen=True)
class DecayingNoise:
    """σ_t = (1 − s·t)·σ₀, with σ₀ the noise of `rounds` equal rounds; stops before it overspends.

    Round t costs 1 / (T₀·(1 − s·t)²) of the budget, so a run is shorter than T₀. A client that
    takes part in all rounds can pay for all. Where K < U, a client may be asked in other rounds
    than planned, find its tank too low in the last ones, and decline.

    >>> schedule = DecayingNoise(rounds=200, slope=0.004)
    >>> schedule.affordable
    111
    >>> schedule.round(schedule.advance(schedule.start(2.3), 2.1))
    Round(t=1, horizon=111, scale=0.996, spread=200)
    """

    rounds: int
    slope: float = 0.004

    def __post_init__(self) -> None:
        require_rounds(self.rounds)
        if not 0 <= self.slope < 1:
            raise InputError.of(
                "slope", self.slope, "at least 0 and below 1", "0.004 a round is the default"
            )

    @property
    def affordable(self) -> int:
        """The number of rounds for which a client can pay that takes part in all of them."""
        left = FULL
        for t in range(self.rounds):
            scale = 1 - self.slope * t
            if scale < 1e-6:
                return t
            left -= int(scaled_units(FULL, self.rounds, scale))
            if left < 0:
                return t
        return self.rounds

    @property
    def steady(self) -> bool:
        """Whether no loss changes the horizon: always true."""
        return True

    def start(self, loss: float | None) -> Progress:
        """Start with the horizon that the budget affords."""
        return Progress(done=0, horizon=self.affordable)

    def round(self, progress: Progress) -> Round | None:
        """Return the next round, with less noise than the one before."""
        t = progress.done
        if t >= progress.horizon:
            return None
        return Round(t, progress.horizon, scale=1 - self.slope * t, spread=self.rounds)

    def advance(self, progress: Progress, loss: float) -> Progress:
        """Count one more round."""
        return replace(progress, done=progress.done + 1)


FEWEST = 12  # rounds that are forecast, unless T₀ is less
REACH = 4  # candidates on either side that a forecast is smoothed over


@dataclass(frozen=True)
class ForecastRounds:
    """As many of at most `rounds` rounds as a forecast on public rows finds best.

    `server.forecast` trains on the server's public rows alone, once for each of `candidates`, with
    the noise that so many rounds would have, and measures what is missing of the metric. `choose`
    takes the candidate where that is least. From then on the rounds are as many as announced.

    >>> ForecastRounds(rounds=100).candidates
    (12, 18, 25, 35, 50, 71, 100)
    """

    rounds: int

    def __post_init__(self) -> None:
        require_rounds(self.rounds)

    @property
    def candidates(self) -> tuple[int, ...]:
        """T₀, T₀/√2, T₀/2, … down to 12, in ascending order."""
        least, shrunk = min(FEWEST, self.rounds), {self.rounds}
        for k in range(1, 2 * self.rounds.bit_length()):
            shrunk.add(max(least, round(self.rounds / 2 ** (k / 2))))
        return tuple(sorted(shrunk))

    def choose(self, missing: Sequence[float]) -> int:
        """Return the candidate with the least forecast; among equal ones the shortest.

        A forecast is noisy, and nearly a parabola in log T around its least value (Theorem 3 has
        one minimum): each value is replaced by that of a parabola fitted to its neighbours, near
        ones counting more. One that is not finite counts as the worst that is.

        >>> ForecastRounds(rounds=100).choose([0.9, 0.6, 0.4, 0.3, 0.32, 0.25, 0.5])
        50
        """
        values = np.asarray(missing, np.float64)
        finite = values[np.isfinite(values)]
        if not finite.size:
            return self.candidates[0]
        values = np.where(np.isfinite(values), values, finite.max())
        steps = np.arange(len(values))
        smooth = []
        for i in steps:
            near = np.sqrt(np.maximum(0, 1 - ((steps - i) / (REACH + 1)) ** 2))
            parabola = np.stack([near, near * (steps - i), near * (steps - i) ** 2], axis=1)
            smooth.append(float(np.linalg.lstsq(parabola, near * values, rcond=None)[0][0]))
        return self.candidates[int(np.argmin(np.round(smooth, 12)))]

    @property
    def steady(self) -> bool:
        """Whether no loss changes the horizon: always true, for it is chosen before."""
        return True

    def start(self, loss: float | None) -> Progress:
        """Start with T = T₀, which `server.forecast` replaces by what it chooses."""
        return Progress(done=0, horizon=self.rounds)

    def round(self, progress: Progress) -> Round | None:
        """Return the next of T rounds."""
        if progress.done >= progress.horizon:
            return None
        return Round(t=progress.done, horizon=progress.horizon)

    def advance(self, progress: Progress, loss: float) -> Progress:
        """Count one more round."""
        return replace(progress, done=progress.done + 1)
