"""An ε measured from one run: many canaries at once, each thrown in by a coin of its own.

Every row of the client is a canary whose label a fair coin has chosen; the two labels pull its own
row of the first layer in opposite directions, by all that clipping allows. After the run the server
guesses the coins it is surest of, as many as were fixed beforehand. If the run is (ε, δ)-DP,

    P[at least v of r guesses right] ≤ β + 2mδ·α,   β = P[Binomial(r, e^ε/(1 + e^ε)) ≥ v],

α = max_i (P[Binomial ≥ v − i] − β)/i (Steinke, Nasr & Jagielski 2023): an ε for which that is below
1 − confidence is refuted. Assuming the Gaussian shape, Mahloujifar, Melis & Chaudhuri (2024) refute
more from the same guesses. One run proves less than thousands; it needs no thousands.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from sottovoce.client import release
from sottovoce.client.release import Parameters
from sottovoce.errors import InputError
from sottovoce.models.form import Form
from sottovoce.privacy import gaussian, grid
from sottovoce.privacy.tank import Tank
from sottovoce.schedules.pricing import Terms
from sottovoce.schedules.schedule import Round
from sottovoce.studies.audit.ceiling import CONFIDENCE, WRONG
from sottovoce.studies.audit.messages import Setting

Floats = NDArray[np.float64]

_STEEP, _DIM = 1000.0, 3e-4
_MOST = 60.0  # ε and μ beyond which no one run can see


@dataclass(frozen=True)
class OneRun:
    """What the guesses of one run prove."""

    setting: Setting
    canaries: int
    guesses: int
    right: int
    wrong: float = WRONG  # how often it may accuse a promise that is kept

    @property
    def epsilon(self) -> float:
        """ε refuted without assuming any shape."""
        return free_epsilon(self.canaries, self.guesses, self.right, self.setting.delta)

    @property
    def mu(self) -> float:
        """μ refuted, assuming the Gaussian shape."""
        return gaussian_mu(self.canaries, self.guesses, self.right)

    @property
    def gaussian_epsilon(self) -> float:
        """The ε of that μ at the setting's δ."""
        return float(gaussian.epsilon(self.setting.delta, self.mu))

    @property
    def contradicts(self) -> bool:
        """Whether (ε, δ) or the μ of it is refuted; by chance in `wrong` of audits at most."""
        told, sure = (self.canaries, self.guesses, self.right), 1 - self.wrong / 2
        free = free_epsilon(*told, self.setting.delta, sure)
        return free > self.setting.epsilon or gaussian_mu(*told, sure) > self.setting.promised


def p_value(canaries: int, guesses: int, right: int, epsilon: float, delta: float) -> float:
    """How likely so many right guesses are at most, if the run is (ε, δ)-DP.

    >>> round(p_value(100, 10, 10, 0.0, 0.0), 6)  # ten coins
    0.000977
    """
    from scipy.stats import binom

    chance = 1 / (1 + np.exp(-epsilon))
    beta = float(binom.sf(right - 1, guesses, chance))
    if delta == 0 or right == 0:
        return beta
    i = np.arange(1, right + 1)
    alpha = float(np.max((binom.sf(right - i - 1, guesses, chance) - beta) / i, initial=0.0))
    return min(1.0, beta + 2 * canaries * delta * alpha)


def free_epsilon(
    canaries: int, guesses: int, right: int, delta: float, confidence: float = CONFIDENCE
) -> float:
    """The largest ε that so many right guesses refute with this confidence.

    >>> round(free_epsilon(1000, 100, 98, 1e-5, 0.95), 1)
    2.7
    """
    return _largest(lambda e: p_value(canaries, guesses, right, e, delta) < 1 - confidence)


def gaussian_mu(canaries: int, guesses: int, right: int, confidence: float = CONFIDENCE) -> float:
    """The largest μ that so many right guesses refute, if the trade-off is a Gaussian's."""
    return _largest(lambda mu: _refuted(canaries, guesses, right, mu, 1 - confidence))


def _refuted(canaries: int, guesses: int, right: int, mu: float, wrong: float) -> bool:
    """From the tail inwards: how much probability of being right or wrong μ-GDP leaves room for."""
    from scipy.special import ndtr, ndtri

    hit, miss = wrong * right / canaries, wrong * (guesses - right) / canaries
    for i in range(right - 1, -1, -1):
        least = max(miss, float(ndtr(ndtri(hit) - mu)))
        if least == miss:
            break  # nothing can change any more
        hit, miss = min(1.0, hit + i / (guesses - i) * (least - miss)), least
    return hit + miss > guesses / canaries


def _largest(refuted: object) -> float:
    """The largest number below _MOST that is refuted, where all smaller ones are."""
    assert callable(refuted)
    if not refuted(0.0):
        return 0.0
    low, high = 0.0, _MOST
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if refuted(middle) else (low, middle)
    return low


def guesses_for(canaries: int, mu: float) -> int:
    """How many coins the server guesses: what would prove most if scores were N(±μ/2, 1).

    >>> guesses_for(1000, 0.9), guesses_for(1000, 3.4)
    (300, 600)
    """
    scores = np.random.default_rng(0).normal(mu / 2, size=20_000)  # right where above 0
    surest = scores[np.argsort(-np.abs(scores))] > 0
    counts = [max(10, int(part * canaries)) for part in (0.1, 0.3, 0.6, 0.9)]
    right = [int(np.mean(surest[: 20_000 * n // canaries]) * n) for n in counts]
    proven = [gaussian_mu(canaries, n, v) for n, v in zip(counts, right, strict=True)]
    return counts[int(np.argmax(proven))]


def play(setting: Setting, canaries: int, *, seed: int = 0, wrong: float = WRONG) -> OneRun:
    """One run of a client whose rows are all canaries, through the real release.

    The server answers with models of its own choice: its canaries are seen best there, and the
    promise is made against any. A coin decides one record, so that records are what is protected.

    >>> from sottovoce.privacy.sensitivity import Recipe
    >>> run = play(Setting(8.0, 1e-5, Recipe(1.0, 1.0)), canaries=100)
    >>> run.canaries, run.contradicts
    (100, False)
    """
    if setting.recipe.unit != "record":
        raise InputError.of(
            "unit", setting.recipe.unit, "record", "one run has one client, and so one coin a run"
        )
    recipe = replace(setting.recipe, steps=1)
    coins = np.random.default_rng(seed).integers(0, 2, canaries)
    scores = _scores(replace(setting, recipe=recipe), coins)
    count = guesses_for(canaries, setting.promised)
    surest = np.argsort(-np.abs(scores))[:count]
    right = int(np.sum((scores[surest] > 0) == (coins[surest] == 1)))
    return OneRun(setting, canaries, count, right, wrong)


def _scores(setting: Setting, coins: NDArray[np.int64]) -> Floats:
    recipe, canaries = setting.recipe, len(coins)
    form = Form("mlp", (canaries,), 2, hidden=1)
    x = np.eye(canaries) * 1000.0 * max(1.0, recipe.clip)
    tank, scores = Tank.full(setting.capacity()), np.zeros(canaries)
    terms = Terms(clients=1, per_round=1, calibration=setting.calibration)
    for t in range(setting.rounds):
        change = grid.change("record", canaries)
        paid = release.price(tank, Round(t, setting.rounds), terms, change=change)
        tank, sign = tank.spend(sum(paid.units)), -1.0 if t % 2 else 1.0
        sent = release.release(
            form, _model(form, sign), x, coins, recipe=recipe, paid=paid, head={"kind": "upload"}
        )
        scores -= sign * sent.params["w1"][:, 0].astype(np.float64) / sent.sigma[0]
    return scores


def _model(form: Form, sign: float) -> Parameters:
    params = {name: np.zeros(shape) for name, shape in form.shapes().items()}
    params["b1"][:] = _DIM
    params["w2"][:] = sign * _STEEP, -sign * _STEEP
    return params
