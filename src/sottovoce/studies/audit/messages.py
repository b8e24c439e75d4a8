"""Measure what uploads of worst-case neighbours give away, through the real `client.release`.

A server that knows both D and D′ and may send any model is the strongest attacker the guarantee
speaks of. It sends a model at which replacing one record turns a clipped gradient around (the
upload moves by all of Δ), and scores what comes back by its likelihood ratio. With independent
noise as promised the score is N(±μ/2, 1), μ = Δ/σ over the whole run, and nothing beats it.

From one round to the next the model's sign changes, and with it the direction in which D and D′
differ: noise that two rounds share cancels out of the score, and is found out. Whatever else a
message says is compared too: a head that only one of the two data sets writes decides at once. A
noised loss, where clients send it, is one more number of the score.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from sottovoce.client import release
from sottovoce.client.messages import unpack
from sottovoce.client.release import Parameters, Price
from sottovoce.errors import InputError
from sottovoce.models.base import Form, sample_losses
from sottovoce.privacy import gaussian, grid
from sottovoce.privacy.budget import Calibration
from sottovoce.privacy.sensitivity import Recipe
from sottovoce.privacy.tank import Tank
from sottovoce.schedules.base import Round
from sottovoce.schedules.pricing import Terms
from sottovoce.studies.audit.ceiling import (
    CONFIDENCE,
    WRONG,
    Rates,
    count_rates,
    find_far_threshold,
)
from sottovoce.studies.audit.target import compute_capacity

# An ε measured from one run: many canaries at once, each with a coin of its own.
#
# Every row of the client is a canary whose label a fair coin has chosen; the two labels pull its
# own row of the first layer in opposite directions, by all that clipping allows. After the run the
# server guesses the coins it is surest of, as many as were fixed beforehand. If the run is (ε,
# δ)-DP,
#
#     P[at least v of r guesses right] ≤ β + 2mδ·α,   β = P[Binomial(r, e^ε/(1 + e^ε)) ≥ v],
#
# α = max_i (P[Binomial ≥ v − i] − β)/i (Steinke, Nasr & Jagielski 2023): an ε for which that is
# below 1 − confidence is refuted. Assuming the Gaussian shape, Mahloujifar, Melis & Chaudhuri
# (2024) refute more from the same guesses. One run proves less than thousands, and costs less.


Floats = NDArray[np.float64]

_STEEP, _DIM = 1000.0, 3e-4
_MOST = 60.0  # larger ε and μ cannot be refuted by one run


@dataclass(frozen=True)
class OneRun:
    """What the guesses of one run prove."""

    setting: AuditSetting
    canaries: int
    guesses: int
    right: int
    wrong: float = WRONG  # how often it may accuse a promise that is kept

    @property
    def epsilon(self) -> float:
        """The largest ε refuted without assuming any shape of the noise."""
        return free_epsilon(self.canaries, self.guesses, self.right, self.setting.delta)

    @property
    def mu(self) -> float:
        """The largest μ refuted, assuming the Gaussian shape."""
        return gaussian_mu(self.canaries, self.guesses, self.right)

    @property
    def gaussian_epsilon(self) -> float:
        """The ε of that μ at the setting's δ."""
        return float(gaussian.epsilon(self.setting.delta, self.mu))

    @property
    def contradicts(self) -> bool:
        """Whether (ε, δ) or the μ of it is refuted; by chance in `wrong` of audits at most."""
        counts, confidence = (self.canaries, self.guesses, self.right), 1 - self.wrong / 2
        epsilon = free_epsilon(*counts, self.setting.delta, confidence)
        mu = gaussian_mu(*counts, confidence)
        return epsilon > self.setting.epsilon or mu > self.setting.promised


def p_value(canaries: int, guesses: int, right: int, epsilon: float, delta: float) -> float:
    """Bound the probability of so many right guesses, if the run is (ε, δ)-DP.

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
    """Return the largest ε that so many right guesses refute with this confidence.

    >>> round(free_epsilon(1000, 100, 98, 1e-5, 0.95), 1)
    2.7
    """
    return _find_largest(lambda e: p_value(canaries, guesses, right, e, delta) < 1 - confidence)


def gaussian_mu(canaries: int, guesses: int, right: int, confidence: float = CONFIDENCE) -> float:
    """Return the largest μ that so many right guesses refute, for Gaussian noise."""
    return _find_largest(lambda mu: _is_refuted(canaries, guesses, right, mu, 1 - confidence))


def _is_refuted(canaries: int, guesses: int, right: int, mu: float, wrong: float) -> bool:
    """Return whether μ-GDP leaves too little probability for so many right guesses.

    The recursion of Mahloujifar et al. runs from the tail inwards.
    """
    from scipy.special import ndtr, ndtri

    hit, miss = wrong * right / canaries, wrong * (guesses - right) / canaries
    for i in range(right - 1, -1, -1):
        least = max(miss, float(ndtr(ndtri(hit) - mu)))
        if least == miss:
            break  # nothing can change any more
        hit, miss = min(1.0, hit + i / (guesses - i) * (least - miss)), least
    return hit + miss > guesses / canaries


def _find_largest(refuted: object) -> float:
    """Return the largest number below _MOST that is refuted, where all smaller ones are."""
    assert callable(refuted)
    if not refuted(0.0):
        return 0.0
    low, high = 0.0, _MOST
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if refuted(middle) else (low, middle)
    return low


def choose_guesses(canaries: int, mu: float) -> int:
    """Return the number of guesses that would prove most if scores were N(±μ/2, 1).

    >>> choose_guesses(1000, 0.9), choose_guesses(1000, 3.4)
    (300, 600)
    """
    scores = np.random.default_rng(0).normal(mu / 2, size=20_000)  # right where above 0
    surest = scores[np.argsort(-np.abs(scores))] > 0
    counts = [max(10, int(share * canaries)) for share in (0.1, 0.3, 0.6, 0.9)]
    right = [int(np.mean(surest[: 20_000 * n // canaries]) * n) for n in counts]
    proven = [gaussian_mu(canaries, n, v) for n, v in zip(counts, right, strict=True)]
    return counts[int(np.argmax(proven))]


def play_one_run(
    setting: AuditSetting, canaries: int, *, seed: int = 0, wrong: float = WRONG
) -> OneRun:
    """Play one run of a client whose rows are all canaries, through the real release.

    The server sends models of its own choice, at which canaries are seen best; the promise holds
    against any. A coin decides one record, so the unit must be the record.

    >>> from sottovoce.privacy.sensitivity import Recipe
    >>> run = play_one_run(AuditSetting(8.0, 1e-5, Recipe(1.0, 1.0)), canaries=100)
    >>> run.canaries, run.contradicts
    (100, False)
    """
    if setting.recipe.unit != "record":
        raise InputError.of(
            "unit", setting.recipe.unit, "record", "one run has one client, and so one coin a run"
        )
    recipe = replace(setting.recipe, steps=1)
    coins = np.random.default_rng(seed).integers(0, 2, canaries)
    scores = _score_canaries(replace(setting, recipe=recipe), coins)
    count = choose_guesses(canaries, setting.promised)
    surest = np.argsort(-np.abs(scores))[:count]
    right = int(np.sum((scores[surest] > 0) == (coins[surest] == 1)))
    return OneRun(setting, canaries, count, right, wrong)


def _score_canaries(setting: AuditSetting, coins: NDArray[np.int64]) -> Floats:
    recipe, canaries = setting.recipe, len(coins)
    form = Form("mlp", (canaries,), 2, {"hidden": 1})
    x = np.eye(canaries) * 1000.0 * max(1.0, recipe.clip)
    tank, scores = Tank.full(setting.capacity()), np.zeros(canaries)
    terms = Terms(clients=1, per_round=1, calibration=setting.calibration)
    for t in range(setting.rounds):
        change = grid.grid_sensitivity("record", canaries)
        paid = release.price(tank, Round(t, setting.rounds), terms, change=change)
        tank, sign = tank.spend(sum(paid.units)), -1.0 if t % 2 else 1.0
        sent = release.release(
            form,
            _build_canary_model(form, sign),
            x,
            coins,
            recipe=recipe,
            paid=paid,
            head={"kind": "upload"},
        )
        scores -= sign * sent.params["w1"][:, 0].astype(np.float64) / sent.sigma[0]
    return scores


def _build_canary_model(form: Form, sign: float) -> Parameters:
    params = {name: np.zeros(shape) for name, shape in form.shapes().items()}
    params["b1"][:] = _DIM
    params["w2"][:] = sign * _STEEP, -sign * _STEEP
    return params


Progress = Callable[[int, int], None]

FORM = Form("mlp", (4,), 2, {"hidden": 1})
SAMPLES = 3  # the canary and two others, which the server knows
REHEARSED = 20  # runs a side, and one in ten more, that show the server which heads there are
_CERTAIN = 1e300  # beyond every score but that of a head which decides
_BEYOND = 1e3  # a μ whose ε is printed as infinite


@dataclass(frozen=True)
class AuditSetting:
    """What is audited: a budget, the calibration that turns it into noise, and the recipe."""

    epsilon: float
    delta: float
    recipe: Recipe
    calibration: Calibration = "exact"
    rounds: int = 2  # the whole budget is spent in so many uploads; even, see above
    loss_bound: float | None = None  # B of the losses that clients send, where they do

    @property
    def promised(self) -> float:
        """μ of (ε, δ): what the best attacker may reach."""
        return float(gaussian.mu(self.epsilon, self.delta))

    def capacity(self) -> float:
        """Return the μ² that the calibration lets the run spend."""
        return compute_capacity(self.epsilon, self.delta, self.calibration)


@dataclass(frozen=True, eq=False)
class Measured:
    """Scores of the uploads of D and of D′, and what they prove."""

    setting: AuditSetting
    true: float  # μ of the noise that the client says it drew
    without: Floats
    having: Floats
    wrong: float = WRONG  # how often it may accuse a promise that is kept

    @property
    def messages(self) -> int:
        """Transcripts a side."""
        return self.having.size

    @property
    def rates(self) -> Rates:
        """At the threshold 0, half-way between the two."""
        return count_rates(self.having, self.without, 0.0)

    @property
    def mu(self) -> tuple[float, float, float]:
        """Measured μ: proven, as counted, and at most."""
        low, high = self.rates.bound_mu()
        return low, self.rates.mu, high

    @property
    def epsilon(self) -> tuple[float, float]:
        """ε at the setting's δ, assuming the Gaussian shape: proven, and at most."""
        low, high = (
            float(gaussian.epsilon(self.setting.delta, m)) if m < _BEYOND else np.inf
            for m in self.mu[::2]
        )
        return low, high

    @property
    def free_epsilon(self) -> float:
        """ε proven without any assumption."""
        return self._prove_epsilon(1 - CONFIDENCE)

    def _prove_epsilon(self, wrong: float) -> float:
        """Return the ε proven without any assumption; wrong with probability `wrong` at most.

        Two thresholds are fixed beforehand, each is read from both sides, and the four readings
        share the error. One threshold is where Gaussian scores prove most; the other is passed
        only by heads that decide.
        """
        far = find_far_threshold(self.true, self.messages, self.setting.delta)
        sides = ((self.having, self.without), (-self.without, -self.having))
        return max(
            count_rates(*side, at).epsilon(self.setting.delta, 1 - wrong / 4)
            for side in sides
            for at in (far, _CERTAIN)
        )

    @property
    def refutes_mu(self) -> bool:
        """Whether the promised μ is refuted: the run is not μ-GDP, whatever the noise's shape.

        That the run is not (ε, δ)-DP follows only where the noise has the Gaussian shape.
        """
        return self.rates.exceeds(self.setting.promised, 1 - self.wrong / 2)

    @property
    def refutes_epsilon(self) -> bool:
        """Whether (ε, δ) itself is refuted, without any assumption."""
        return self._prove_epsilon(self.wrong / 2) > self.setting.epsilon

    @property
    def contradicts(self) -> bool:
        """Whether the promise is refuted in either way; by chance in `wrong` of audits at most."""
        return self.refutes_mu or self.refutes_epsilon


def make_neighbours(recipe: Recipe) -> tuple[Floats, NDArray[np.int64], NDArray[np.int64]]:
    """Return rows, and the labels of D and D′: one record differs, or all if the unit is a client.

    >>> x, y, other = make_neighbours(Recipe(1.0, 1.0))
    >>> y.tolist(), other.tolist()
    ([0, 0, 0], [1, 0, 0])
    """
    x = np.full((SAMPLES, FORM.features), 5.0 * max(1.0, recipe.clip))
    y, other = np.zeros(SAMPLES, np.int64), np.zeros(SAMPLES, np.int64)
    other[: SAMPLES if recipe.unit == "client" else 1] = 1
    return x, y, other


def build_model(sign: float, loss_bound: float | None = None) -> Parameters:
    """Build a model at which the label decides which way the clipped gradient points.

    The last layer is steep, so that nearly all of a gradient is in the first; its sign says which
    label pulls which way. Where losses are sent, those of the two labels are next to 0 and B, as
    far as the last layer stays steep enough for that.
    """
    params = {name: np.zeros(shape) for name, shape in FORM.shapes().items()}
    params["b1"][:] = _DIM
    params["w2"][:] = sign * _STEEP, -sign * _STEEP
    if loss_bound is not None:
        lean = min(max(loss_bound, 5.0) / 2 + 0.3, 4.0)
        params["b2"][:] = lean, -lean
    return params


@dataclass(frozen=True, eq=False)
class Duel:
    """All that the server knows beforehand: models sent, what D and D′ would answer, the noise."""

    setting: AuditSetting
    paid: tuple[Price, ...]
    models: tuple[Parameters, ...]
    middle: Floats  # [rounds, parameters and a loss]: half-way between the answers of D and D′
    apart: Floats  # [rounds, the same]: their difference in units of σ²
    mu: float

    @classmethod
    def of(cls, setting: AuditSetting) -> Duel:
        """Compute the prices, as a client does from its tank, and the noiseless answers."""
        recipe = replace(setting.recipe, steps=1)
        x, y, other = make_neighbours(recipe)
        tank, paid = Tank.full(setting.capacity()), []
        terms = Terms(clients=1, per_round=1, calibration=setting.calibration)
        change = grid.grid_sensitivity(recipe.unit, SAMPLES)
        for t in range(setting.rounds):
            price = release.price(
                tank, Round(t, setting.rounds), terms, change=change,
                loss=setting.loss_bound is not None,
            )  # fmt: skip
            tank = tank.spend(sum(price.units))
            paid.append(price)
        signs, bound = (1.0, -1.0) * (setting.rounds // 2 + 1), setting.loss_bound
        models = tuple(build_model(sign, bound) for sign in signs[: setting.rounds])
        ends = [
            np.array([_compute_answer(w, x, labels, recipe, bound) for w in models])
            for labels in (y, other)
        ]
        one = recipe.learning_rate / SAMPLES * grid.grid_unit(recipe.clip)
        sigma = np.full(ends[0].shape, [[one * price.noise[0]] for price in paid])
        if bound is not None:
            sigma[:, -1] = [
                bound * (price.loss_noise or 0) / grid.REPLACED / SAMPLES for price in paid
            ]
        difference = (ends[1] - ends[0]) / sigma
        mu = float(np.sqrt(np.sum(difference**2)))
        middle = (ends[0] + ends[1]) / 2
        return cls(setting, tuple(paid), models, middle, difference / sigma / mu, mu)

    def play_run(self, labels: NDArray[np.int64]) -> tuple[float, tuple[str, ...]]:
        """Play one run of a client with these labels; return its uploads' score and heads."""
        recipe = replace(self.setting.recipe, steps=1)
        x, score, heads = make_neighbours(recipe)[0], 0.0, []
        for t, (paid, sent) in enumerate(zip(self.paid, self.models, strict=True)):
            upload = release.release(
                FORM, sent, x, labels, recipe=recipe, paid=paid, head={"kind": "upload", "t": t},
                loss_bound=self.setting.loss_bound,
            )  # fmt: skip
            head, arrays = unpack(upload.blob)
            seen = _flatten(arrays)
            if self.setting.loss_bound is not None:
                seen = np.append(seen, float(head["loss"]))
            score += float((seen - self.middle[t]) @ self.apart[t])
            heads.append(repr(sorted(head.items())))
        return score, tuple(heads)

    def scores(self, labels: NDArray[np.int64], messages: int) -> Iterator[tuple[float, str]]:
        """Yield the scores of so many runs, each with the text of its heads."""
        for _ in range(messages):
            score, heads = self.play_run(labels)
            yield score, "|".join(heads)


def measure(
    setting: AuditSetting, messages: int, progress: Progress | None = None, wrong: float = WRONG
) -> Measured:
    """Play the duel so many times a side, and count; a false alarm has probability `wrong`.

    >>> found = measure(AuditSetting(4.0, 1e-3, Recipe(1.0, 1.0)), messages=500)
    >>> bool(found.mu[0] <= found.setting.promised), round(found.true, 4)
    (True, 1.215)
    """
    duel = Duel.of(setting)
    _, y, other = make_neighbours(setting.recipe)
    rehearsed = REHEARSED + messages // 10
    known = [{head for _, head in duel.scores(labels, rehearsed)} for labels in (y, other)]
    sides: list[Floats] = []
    for side, labels in enumerate((y, other)):
        found = np.empty(messages)
        for i, (score, head) in enumerate(duel.scores(labels, messages)):
            sign = (head in known[1]) - (head in known[0])  # 0 where heads do not decide
            found[i] = np.inf * sign if sign else score
            if progress is not None and i % 100 == 99:
                progress(side * messages + i + 1, 2 * messages)
        sides.append(found)
    return Measured(setting, duel.mu, sides[0], sides[1], wrong)


def _compute_answer(
    sent: Parameters, x: Floats, labels: NDArray[np.int64], recipe: Recipe, bound: float | None
) -> Floats:
    """Return what a client with these labels would upload without noise, and its mean loss."""
    answer = _flatten(release.step(FORM, sent, x, labels, recipe))
    if bound is None:
        return answer
    losses = sample_losses(FORM, sent, x, labels)
    return np.append(answer, bound * grid.bounded_sum(losses, bound) / grid.REPLACED / len(labels))


def _flatten(params: Parameters | dict[str, NDArray[np.float32]]) -> Floats:
    return np.concatenate([np.asarray(params[name], np.float64).ravel() for name in sorted(params)])
