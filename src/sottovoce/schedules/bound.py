"""Theorems 2 and 3: how far from the optimum T rounds may end, and the best T.

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

import math
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import ArrayLike

from sottovoce.errors import InputError


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
            if not 0 < getattr(self, name) < math.inf:
                raise InputError.of(
                    name, getattr(self, name), "a finite number > 0", "estimate it on public data"
                )
        if not 0 <= self.divergence < math.inf:
            raise InputError.of(
                "divergence", self.divergence, "a finite number ≥ 0", "0 is right for IID clients"
            )
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
                raise InputError.of(
                    name, value, "a finite number ≥ 0", "check sensitivities, budgets and dimension"
                )
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
        L, rest = loss.smoothness, loss.progress
        spread = loss.learning_rate**2 * L * loss.divergence / (2 * rest)
        return cls(
            progress=loss.progress,
            gap=loss.gap,
            noise=float(L * dimension / (2 * U**2 * rest) * np.sum(sensitivity**2 / worth)),
            sampling=spread * (U - K) / (K * (U - 1)) if U > 1 else 0.0,
        )

    def __call__(self, rounds: ArrayLike) -> np.ndarray:
        """Return h(T), for one T or many."""
        T = np.asarray(rounds, dtype=np.float64)
        left = np.exp(self._log_a * T)
        return np.asarray(left * self.gap + (1 - left) * (self.noise * T + self.sampling))

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
            left, rest, B = math.exp(self._log_a * T), self.progress, self.noise
            # The common terms of h(T+1) − h(T) are taken out, so that nothing cancels.
            falls = left * rest * (self.gap - self.sampling - B * T)
            low, high = (low, T) if B * (1 - left * (1 - rest)) >= falls else (T + 1, high)
        return low
