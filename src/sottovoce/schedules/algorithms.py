"""The schedules that a plan can name.

`FixedRounds`        T rounds, as announced: the paper's UDP (Algorithm 1)
`DiscountedRounds`   CRD (Algorithm 2): T shrinks when the loss stops falling
`DecayingNoise`      noise that falls linearly until the budget is spent: the paper's "Lei"
`ForecastRounds`     T and the length of steps are forecast on public rows before the first round

`Bound` has Theorems 2 and 3: how far from the optimum T rounds may end, and the best T.

The bound is h(T) = A^T·Θ + (1 − A^T)·(B·T + c). The error of the first model fades with T; that of
the noise grows with T, because a fixed budget is shared by more rounds, and that of sampling
clients stays. A = 1 − 2μη + μη²L, Θ = F(w⁰) − F(w*).

As printed (eq. 22) it lacks the model's dimension d and a factor 1/K, and holds for η = 1/L only.
Derived again, with 1 − A = μη(2 − ηL), E‖n‖² = d/(KU)·Σσ_i² and σ_i² = Δ_i²·qT/c_i, where c_i is
the capacity of client i if it takes part in every round (μ(ε_i, δ_i)² for `exact`,
ε²/(2 ln 1/δ) for the paper's formula):

    B = L·d/(2U²(1−A))·Σ_i Δ_i²/c_i,   c = η²L·ε̄²(U−K)/(2(1−A)K(U−1)),

whose noise term does not depend on K. ε̄² is the mean *squared* divergence of the clients'
gradients. The bias of clipping is not included.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import ClassVar, Self, TypeAlias

import numpy as np
from numpy.typing import ArrayLike

from sottovoce.errors import InputError
from sottovoce.privacy.tank import FULL, scaled_units
from sottovoce.schedules.base import Progress, Round, require_rounds


@dataclass(frozen=True)
class _Rounds:
    """The base of the schedules below: `rounds` rounds, a horizon that no loss changes."""

    rounds: int
    steady: ClassVar[bool] = True

    def __post_init__(self) -> None:
        require_rounds(self.rounds)

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
class FixedRounds(_Rounds):
    """Exactly `rounds` rounds, whatever the losses."""


@dataclass(frozen=True)
class DiscountedRounds(_Rounds):
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

    beta: float = 0.8
    zeta: float = 0.0
    window: int = 3
    steady = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.beta < 1:
            raise InputError.of("beta", self.beta, "between 0 and 1", "0.8 is the default")
        if not math.isfinite(self.zeta):
            raise InputError.of("zeta", self.zeta, "a finite number", "0 is the default")
        if not isinstance(self.window, int) or isinstance(self.window, bool) or self.window < 1:
            remedy = "1 is the paper's rule, 3 the default"
            raise InputError.of("window", self.window, "a whole number ≥ 1", remedy)

    def start(self, loss: float | None) -> Progress:
        """Start with T = T₀; a discount is allowed as soon as there are 2w losses."""
        losses = () if loss is None else (loss,)
        return Progress(0, self.rounds, recent=losses, last_discount=-self.window)

    def advance(self, progress: Progress, loss: float) -> Progress:
        """Apply the rule after round t = `progress.done` (after the last round too)."""
        t = progress.done
        recent = (*progress.recent, loss)[-2 * self.window :]
        progress = replace(progress, done=t + 1, recent=recent)
        w = self.window
        if len(recent) < 2 * w or t - progress.last_discount < w:
            return progress
        # Written so that a NaN (a diverged model, ∞ − ∞) counts as no improvement.
        if sum(recent[:w]) / w - sum(recent[w:]) / w >= self.zeta * w:
            return progress
        # β is taken from its decimal text, because 0.7·90 is 62.99… in binary and loses a round.
        rounds_left = math.floor(Fraction(str(self.beta)) * (progress.horizon - t))
        return replace(progress, horizon=rounds_left + t, last_discount=t)


@dataclass(frozen=True)
class DecayingNoise(_Rounds):
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

    slope: float = 0.004

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.slope < 1:
            remedy = "0.004 a round is the default"
            raise InputError.of("slope", self.slope, "at least 0 and below 1", remedy)

    @property
    def affordable(self) -> int:
        """The number of rounds for which a client can pay that takes part in all of them."""
        units_left = FULL
        for t in range(self.rounds):
            scale = 1 - self.slope * t
            if scale < 1e-6:
                return t
            units_left -= int(scaled_units(FULL, self.rounds, scale))
            if units_left < 0:
                return t
        return self.rounds

    def start(self, loss: float | None) -> Progress:
        """Start with the horizon that the budget affords."""
        return Progress(done=0, horizon=self.affordable)

    def round(self, progress: Progress) -> Round | None:
        """Return the next round, with less noise than the one before."""
        round_ = super().round(progress)
        if round_ is None:
            return None
        return replace(round_, scale=1 - self.slope * round_.t, spread=self.rounds)


Candidate: TypeAlias = tuple[int, float]  # T, and the factor r of the server's steps

FEWEST = 12  # rounds that are forecast, unless T₀ is less
FIRST_STEPS = tuple(4.0**k for k in range(-3, 4))  # r, before T is known
STEPS = tuple(2.0**k for k in range(-7, 8))  # r, when the path is known


@dataclass(frozen=True)
class ForecastRounds(_Rounds):
    """As many rounds, at most `rounds`, and steps as long as a forecast on public rows finds best.

    `server.forecast` trains on the server's public rows alone, for candidates (T, r), with the
    noise of T rounds and with steps of the server that are r times as long as the averaged update,
    and measures what is missing of the metric. `choose` takes the candidate where that is least.
    From then on all rounds are as announced.

    The noise of a client is proportional to its learning rate, and r scales update and noise alike:
    η and r act as the learning rate r·η. So r corrects a plan's η, and clients need not know it.
    What a run reaches depends mostly on its path r·T: drift and noise both grow with it.

    >>> ForecastRounds(rounds=50).lengths
    (12, 18, 25, 35, 50)
    """

    @property
    def lengths(self) -> tuple[int, ...]:
        """T = T₀, T₀/√2, T₀/2, … down to 12, ascending."""
        halved = (round(self.rounds / 2 ** (k / 2)) for k in range(2 * self.rounds.bit_length()))
        return tuple(sorted({max(min(FEWEST, self.rounds), T) for T in halved}))

    def list_near(self, path: float) -> list[Candidate]:
        """Return the candidates with a path r·T from half of this one to its double, T ≥ T₀/8.

        >>> ForecastRounds(rounds=40).list_near(20.0)
        [(12, 1.0), (12, 2.0), (14, 1.0), (14, 2.0), (20, 0.5), (20, 1.0), (20, 2.0), (28, 0.5), \
(28, 1.0), (40, 0.25), (40, 0.5), (40, 1.0)]
        """
        lengths = [T for T in self.lengths if self.rounds <= 8.1 * T]  # T was rounded
        return [(T, r) for T in lengths for r in STEPS if 0.48 * path <= r * T <= 2.1 * path]

    def choose(
        self,
        measure: Callable[[Candidate, int], float],
        most: int,
        *,
        is_step_free: bool = True,
        spread: Callable[..., Iterable[float]] = map,
    ) -> Candidate:
        """Return the candidate whose forecasts have the least mean; among equal ones the first.

        `measure(candidate, i)` is its i-th forecast. First r is varied with T₀/2 rounds, by factors
        of 4, then all candidates whose path is near the best. A forecast is noisy: each of them
        gets one, the better half as many again, and so on up to `most`. One that is not finite
        counts as infinitely bad. Where steps are not free, r is 1 and every T is tried. `spread` is
        `map`, or one that measures several at once.

        >>> schedule = ForecastRounds(50)
        >>> schedule.choose(lambda candidate, i: abs(candidate[0] * candidate[1] - 9), most=4)
        (18, 0.5)
        """
        if not is_step_free:
            return _halve([(T, 1.0) for T in self.lengths], measure, most, spread)
        T = self.lengths[max(0, len(self.lengths) - 3)]
        T, r = _halve([(T, r) for r in FIRST_STEPS], measure, 1, spread)
        return _halve(self.list_near(r * T), measure, most, spread)


#: The schedules that a plan can name. A new schedule is one class and one line here.
SCHEDULES: dict[str, type[_Rounds]] = {
    "fixed": FixedRounds,
    "discounted": DiscountedRounds,
    "decaying": DecayingNoise,
    "forecast": ForecastRounds,
}


def _halve(
    candidates: list[Candidate],
    measure: Callable[[Candidate, int], float],
    most: int,
    spread: Callable[..., Iterable[float]],
) -> Candidate:
    """Return the best by the mean of `most` forecasts; drop the worse half after 1, 2, 4, … ."""
    totals, measured, wanted = dict.fromkeys(candidates, 0.0), 0, 1
    while len(candidates) > 1:
        targets, indices = zip(*itertools.product(candidates, range(measured, wanted)), strict=True)
        for candidate, value in zip(targets, spread(measure, targets, indices), strict=True):
            totals[candidate] += value if math.isfinite(value) else math.inf
        candidates.sort(key=lambda candidate: round(totals[candidate], 12))
        if wanted >= most:
            break
        candidates = candidates[: -(-len(candidates) // 2)]
        measured, wanted = wanted, min(2 * wanted, most)
    return candidates[0]


@dataclass(frozen=True)
class Landscape:
    """What the theorems assume: an L-smooth loss, PL with μ, that starts Θ above its minimum.

    `divergence` is the mean over clients of ‖∇F_i − ∇F‖².
    """

    smoothness: float
    curvature: float
    gap: float
    learning_rate: float
    divergence: float = 0.0

    def __post_init__(self) -> None:
        for name in ("smoothness", "curvature", "gap", "learning_rate"):
            if not 0 < (value := getattr(self, name)) < math.inf:
                remedy = "estimate it on public data"
                raise InputError.of(name, value, "a finite number > 0", remedy)
        if not 0 <= (value := self.divergence) < math.inf:
            remedy = "0 is right for IID clients"
            raise InputError.of("divergence", value, "a finite number ≥ 0", remedy)
        if self.curvature > self.smoothness:
            bound = f"at most the smoothness {self.smoothness:g}"
            remedy = "a loss cannot curve more than it is smooth"
            raise InputError.of("curvature", self.curvature, bound, remedy)
        if self.learning_rate * self.smoothness > 1:
            bound = f"at most 1/L = {1 / self.smoothness:g}"
            remedy = "the theorem covers no larger step"
            raise InputError.of("learning_rate", self.learning_rate, bound, remedy)

    @property
    def progress(self) -> float:
        """1 − A = μη(2 − ηL), the part of the gap that one noiseless round closes."""
        step = self.learning_rate
        return self.curvature * step * (2 - step * self.smoothness)


@dataclass(frozen=True)
class Bound:
    """h(T) = A^T·Θ + (1 − A^T)·(B·T + c), made by `from_derivation`.

    `progress` is 1 − A, `gap` Θ, `noise` B and `sampling` c.

    >>> loss = Landscape(smoothness=1.0, curvature=0.05, gap=2.0, learning_rate=1.0)
    >>> h = Bound.from_derivation(loss, sensitivity=[0.01] * 50, worth=[2.0] * 50, per_round=50,
    ...                   dimension=10_000)
    >>> h.best_rounds()
    9
    """

    progress: float
    gap: float
    noise: float
    sampling: float

    def __post_init__(self) -> None:
        for name in ("noise", "sampling"):
            if not 0 <= (value := getattr(self, name)) < math.inf:
                remedy = "check sensitivities, budgets and dimension"
                raise InputError.of(name, value, "a finite number ≥ 0", remedy)
        if not 1e-15 <= self.progress <= 1:
            remedy = "curvature × learning rate is too small to learn anything"
            raise InputError.of("progress", self.progress, "from 1e-15 to 1", remedy)

    @classmethod
    def from_derivation(
        cls,
        loss: Landscape,
        *,
        sensitivity: ArrayLike,
        worth: ArrayLike,
        per_round: int,
        dimension: int,
    ) -> Self:
        """Return the bound derived again: any η ≤ 1/L, d parameters, Δ_i and c_i of each client."""
        sensitivity, worth = np.broadcast_arrays(np.atleast_1d(sensitivity), np.atleast_1d(worth))
        U, K = len(worth), per_round
        if not 1 <= K <= U:
            raise InputError.of("per_round", K, f"from 1 to {U}", "it is K of U clients")
        L, progress = loss.smoothness, loss.progress
        drift = loss.learning_rate**2 * L * loss.divergence / (2 * progress)
        return cls(
            progress=loss.progress,
            gap=loss.gap,
            noise=float(L * dimension / (2 * U**2 * progress) * np.sum(sensitivity**2 / worth)),
            sampling=drift * (U - K) / (K * (U - 1)) if U > 1 else 0.0,
        )

    def __call__(self, rounds: ArrayLike) -> np.ndarray:
        """Return h(T), for one T or many."""
        T = np.asarray(rounds, dtype=np.float64)
        decay = np.exp(self._log_a * T)
        return np.asarray(decay * self.gap + (1 - decay) * (self.noise * T + self.sampling))

    @property
    def _log_a(self) -> float:
        return math.log1p(-self.progress) if self.progress < 1 else -math.inf

    def best_rounds(self) -> int:
        """Return the T from 1 to 10⁹ with the smallest h(T).

        h has one minimum: it is convex up to (Θ − c)/B + 2/|ln A| and rises beyond (Theorem 3).
        """
        low, high = 1, 10**9
        while low < high:  # the sign of h(T+1) − h(T) changes once, from falling to rising
            T = (low + high) // 2
            decay, progress, B = math.exp(self._log_a * T), self.progress, self.noise
            # The common terms of h(T+1) − h(T) are taken out, so that nothing cancels.
            falls = decay * progress * (self.gap - self.sampling - B * T)
            low, high = (low, T) if B * (1 - decay * (1 - progress)) >= falls else (T + 1, high)
        return low
