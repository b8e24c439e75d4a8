"""Measure what uploads of the real `client.release` reveal about worst-case neighbours.

**The duel** (`measure`). A server that knows both D and D′ and may send any model is the strongest
attacker that the guarantee covers. It sends a model at which replacing one record turns a clipped
gradient around, so that the upload moves by all of Δ, and scores the upload by its likelihood
ratio. With independent noise as promised, the score is N(±μ/2, 1) with μ = Δ/σ over the whole run,
and no attack is better.

From round to round the model's sign changes, and with it the direction in which D and D′ differ:
noise that two rounds share then cancels out of the score and is detected. The heads of the messages
are compared too: a head that only one of the two datasets produces decides at once. A noised loss,
where clients report it, is one more coordinate of the score.

**One run** (`play_one_run`). Every row of the client is a canary whose label a fair coin has
chosen; the two labels pull the canary's own row of the first layer in opposite directions, as far
as clipping allows. After the run the server guesses the coins that it is surest of, a number fixed
beforehand. If the run is (ε, δ)-DP,

    P[at least v of r guesses right] ≤ β + 2mδ·α,   β = P[Binomial(r, e^ε/(1 + e^ε)) ≥ v],

with α = max_i (P[Binomial ≥ v − i] − β)/i (Steinke, Nasr & Jagielski 2023): an ε for which that is
below 1 − confidence is refuted. Assuming the Gaussian shape, Mahloujifar, Melis & Chaudhuri (2024)
refute more from the same guesses. One run proves less than the thousands of runs of a duel.
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
from sottovoce.studies.audit.ceiling import (
    CONFIDENCE,
    WRONG,
    Rates,
    choose_far_threshold,
    compute_capacity,
    count_rates,
    find_edge,
    price_run,
)

Floats = NDArray[np.float64]
Progress = Callable[[int, int], None]

FORM = Form("mlp", (4,), 2, {"hidden": 1})
SAMPLES = 3  # the canary and two others, which the server knows
PRACTICE_RUNS = 20  # on each side, and a tenth of the runs more: they show which heads there are
_STEEP, _DIM = 1000.0, 3e-4  # weights of the last layer, bias of the first
_MOST = 60.0  # the largest ε and μ that one run is tested for
_CERTAIN = 1e300  # above every score but that of a head which decides
_BEYOND = 1e3  # a μ above which no ε is computed


@dataclass(frozen=True)
class OneRun:
    """The guesses of one run, and what they prove."""

    setting: AuditSetting
    canaries: int
    guesses: int
    right: int
    wrong: float = WRONG  # the probability of contradicting a promise that holds, at most

    @property
    def epsilon(self) -> float:
        """The largest ε that is refuted, whatever the shape of the noise."""
        return refute_epsilon(self.canaries, self.guesses, self.right, self.setting.delta)

    @property
    def mu(self) -> float:
        """The largest μ that is refuted, assuming the Gaussian shape."""
        return refute_mu(self.canaries, self.guesses, self.right)

    @property
    def gaussian_epsilon(self) -> float:
        """The ε of that μ at the setting's δ."""
        return float(gaussian.epsilon(self.setting.delta, self.mu))

    @property
    def contradicts(self) -> bool:
        """Whether (ε, δ) or its μ is refuted; by chance with probability `wrong` at most."""
        counts, sure = (self.canaries, self.guesses, self.right), 1 - self.wrong / 2
        free = refute_epsilon(*counts, self.setting.delta, sure)
        return free > self.setting.epsilon or refute_mu(*counts, sure) > self.setting.promised


def compute_p_value(canaries: int, guesses: int, right: int, epsilon: float, delta: float) -> float:
    """Bound the probability of so many right guesses if the run is (ε, δ)-DP.

    >>> round(compute_p_value(100, 10, 10, 0.0, 0.0), 6)  # ten coins
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


def refute_epsilon(
    canaries: int, guesses: int, right: int, delta: float, confidence: float = CONFIDENCE
) -> float:
    """Return the largest ε that so many right guesses refute with this confidence.

    >>> round(refute_epsilon(1000, 100, 98, 1e-5, 0.95), 1)
    2.7
    """
    return _find_largest(
        lambda e: compute_p_value(canaries, guesses, right, e, delta) < 1 - confidence
    )


def refute_mu(canaries: int, guesses: int, right: int, confidence: float = CONFIDENCE) -> float:
    """Return the largest μ that so many right guesses refute, assuming the Gaussian shape."""
    return _find_largest(lambda mu: _is_refuted(canaries, guesses, right, mu, 1 - confidence))


def _is_refuted(canaries: int, guesses: int, right: int, mu: float, wrong: float) -> bool:
    """Return whether so many right guesses refute μ-GDP (Mahloujifar et al. 2024).

    From the tail inwards it adds up the probability of right and of wrong guesses that μ-GDP
    allows.
    """
    from scipy.special import ndtr, ndtri

    hit, miss = wrong * right / canaries, wrong * (guesses - right) / canaries
    for i in range(right - 1, -1, -1):
        least = max(miss, float(ndtr(ndtri(hit) - mu)))
        if least == miss:
            break  # nothing changes from here on
        hit, miss = min(1.0, hit + i / (guesses - i) * (least - miss)), least
    return hit + miss > guesses / canaries


def _find_largest(is_refuted: Callable[[float], bool]) -> float:
    """Return the largest refuted number below _MOST, by bisection."""
    return find_edge(is_refuted, 0.0, _MOST)[0] if is_refuted(0.0) else 0.0


def choose_guess_count(canaries: int, mu: float) -> int:
    """Return how many coins to guess: the number that proves most if scores are N(±μ/2, 1).

    >>> choose_guess_count(1000, 0.9), choose_guess_count(1000, 3.4)
    (300, 600)
    """
    scores = np.random.default_rng(0).normal(mu / 2, size=20_000)  # right where above 0
    surest = scores[np.argsort(-np.abs(scores))] > 0
    counts = [max(10, int(share * canaries)) for share in (0.1, 0.3, 0.6, 0.9)]
    right = [int(np.mean(surest[: 20_000 * n // canaries]) * n) for n in counts]
    proven = [refute_mu(canaries, n, v) for n, v in zip(counts, right, strict=True)]
    return counts[int(np.argmax(proven))]


def play_one_run(
    setting: AuditSetting, canaries: int, *, seed: int = 0, wrong: float = WRONG
) -> OneRun:
    """Play one run of a client whose rows are all canaries, through the real release.

    The server sends models at which it sees the canaries best: the promise holds for any model. A
    coin decides one record, so the unit must be a record.

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
    count = choose_guess_count(canaries, setting.promised)
    surest = np.argsort(-np.abs(scores))[:count]
    right = int(np.sum((scores[surest] > 0) == (coins[surest] == 1)))
    return OneRun(setting, canaries, count, right, wrong)


def _score_canaries(setting: AuditSetting, coins: NDArray[np.int64]) -> Floats:
    recipe, canaries = setting.recipe, len(coins)
    form = Form("mlp", (canaries,), 2, {"hidden": 1})
    x = np.eye(canaries) * 1000.0 * max(1.0, recipe.clip)
    scores = np.zeros(canaries)
    for t, paid in enumerate(setting.price_rounds(canaries)):
        model = make_model(form, sign := -1.0 if t % 2 else 1.0)
        sent = release.release(
            form, model, x, coins, recipe=recipe, paid=paid, head={"kind": "upload"}
        )
        scores -= sign * sent.params["w1"][:, 0].astype(np.float64) / sent.sigma[0]
    return scores


@dataclass(frozen=True)
class AuditSetting:
    """What is audited: a budget, the calibration that turns it into noise, and the recipe."""

    epsilon: float
    delta: float
    recipe: Recipe
    calibration: Calibration = "exact"
    rounds: int = 2  # uploads that spend the whole budget; even, because the sign alternates
    loss_bound: float | None = None  # B of the losses, where clients report them

    @property
    def promised(self) -> float:
        """μ of (ε, δ), which no attacker may exceed."""
        return float(gaussian.mu(self.epsilon, self.delta))

    def capacity(self) -> float:
        """Return the μ² that the calibration lets the run spend."""
        return compute_capacity(self.epsilon, self.delta, self.calibration)

    def price_rounds(self, samples: int) -> list[Price]:
        """Return what the rounds cost a client with so many samples."""
        unit, loss = self.recipe.unit, self.loss_bound is not None
        return price_run(
            self.capacity(), self.rounds, self.calibration, unit=unit, samples=samples, loss=loss
        )


@dataclass(frozen=True, eq=False)
class Measurement:
    """The scores of a duel, and what they prove."""

    setting: AuditSetting
    true: float  # μ of the noise that the client says it drew
    without: Floats  # scores of runs with D
    having: Floats  # scores of runs with D′
    wrong: float = WRONG  # the probability of contradicting a promise that holds, at most

    @property
    def messages(self) -> int:
        """The number of runs on each side."""
        return self.having.size

    @property
    def rates(self) -> Rates:
        """Hits and alarms at the threshold 0, half-way between the two means."""
        return count_rates(self.having, self.without, 0.0)

    @property
    def mu(self) -> tuple[float, float, float]:
        """The measured μ: its proven lower bound, as counted, and its upper bound."""
        low, high = self.rates.bound_mu()
        return low, self.rates.mu, high

    @property
    def epsilon(self) -> tuple[float, float]:
        """Lower and upper bound of ε at the setting's δ, assuming the Gaussian shape."""
        low, high = (
            float(gaussian.epsilon(self.setting.delta, m)) if m < _BEYOND else np.inf
            for m in self.mu[::2]
        )
        return low, high

    @property
    def free_epsilon(self) -> float:
        """The ε that is proven without any assumption."""
        return self._bound_epsilon(1 - CONFIDENCE)

    def _bound_epsilon(self, wrong: float) -> float:
        """Return the largest ε proven at two thresholds fixed beforehand, read from both sides.

        One is where Gaussian scores prove most; only heads that decide exceed the other. The four
        readings share the error equally.
        """
        far = choose_far_threshold(self.true, self.messages, self.setting.delta)
        sides = ((self.having, self.without), (-self.without, -self.having))
        return max(
            count_rates(*side, at).epsilon(self.setting.delta, 1 - wrong / 4)
            for side in sides
            for at in (far, _CERTAIN)
        )

    @property
    def refutes_mu(self) -> bool:
        """Whether the promised μ is refuted, whatever the shape of the noise.

        That (ε, δ) is refuted too follows only if the noise has the Gaussian shape.
        """
        return self.rates.exceeds(self.setting.promised, 1 - self.wrong / 2)

    @property
    def refutes_epsilon(self) -> bool:
        """Whether (ε, δ) itself is refuted, without any assumption."""
        return self._bound_epsilon(self.wrong / 2) > self.setting.epsilon

    @property
    def contradicts(self) -> bool:
        """Whether the promise is refuted; by chance with probability `wrong` at most."""
        return self.refutes_mu or self.refutes_epsilon


def make_neighbours(recipe: Recipe) -> tuple[Floats, NDArray[np.int64], NDArray[np.int64]]:
    """Return rows, and the labels of D and of D′, which differ in one protected unit.

    >>> x, y, other = make_neighbours(Recipe(1.0, 1.0))
    >>> y.tolist(), other.tolist()
    ([0, 0, 0], [1, 0, 0])
    """
    x = np.full((SAMPLES, FORM.features), 5.0 * max(1.0, recipe.clip))
    y, other = np.zeros(SAMPLES, np.int64), np.zeros(SAMPLES, np.int64)
    other[: SAMPLES if recipe.unit == "client" else 1] = 1
    return x, y, other


def make_model(form: Form, sign: float, loss_bound: float | None = None) -> Parameters:
    """Make a model at which the label decides in which direction the clipped gradient points.

    The last layer is steep, so that nearly all of a gradient is in the first layer; `sign` says
    which label pulls in which direction. Where losses are reported, those of the two labels are
    close to 0 and B, as far as the last layer stays steep enough.
    """
    params = {name: np.zeros(shape) for name, shape in form.shapes().items()}
    params["b1"][:] = _DIM
    params["w2"][:] = sign * _STEEP, -sign * _STEEP
    if loss_bound is not None:
        lean = min(max(loss_bound, 5.0) / 2 + 0.3, 4.0)
        params["b2"][:] = lean, -lean
    return params


@dataclass(frozen=True, eq=False)
class Duel:
    """What the server knows beforehand: the models, the noise, what D and D′ would answer."""

    setting: AuditSetting
    paid: tuple[Price, ...]
    models: tuple[Parameters, ...]
    middle: Floats  # [rounds, parameters and a loss]: half-way between the answers of D and D′
    apart: Floats  # [rounds, the same]: their difference in units of σ²
    mu: float

    @classmethod
    def prepare(cls, setting: AuditSetting) -> Duel:
        """Compute the prices as a client does from its tank, and the answers without noise."""
        recipe = replace(setting.recipe, steps=1)
        x, y, other = make_neighbours(recipe)
        paid, bound = setting.price_rounds(SAMPLES), setting.loss_bound
        signs = (1.0, -1.0) * (setting.rounds // 2 + 1)
        models = tuple(make_model(FORM, sign, bound) for sign in signs[: setting.rounds])
        ends = [
            np.array([_compute_answer(w, x, labels, recipe, bound) for w in models])
            for labels in (y, other)
        ]
        step = recipe.learning_rate / SAMPLES * grid.grid_unit(recipe.clip)
        sigma = np.full(ends[0].shape, [[step * price.noise[0]] for price in paid])
        if bound is not None:
            sigma[:, -1] = [
                bound * (price.loss_noise or 0) / grid.REPLACED / SAMPLES for price in paid
            ]
        difference = (ends[1] - ends[0]) / sigma
        mu = float(np.sqrt(np.sum(difference**2)))
        middle = (ends[0] + ends[1]) / 2
        return cls(setting, tuple(paid), models, middle, difference / sigma / mu, mu)

    def play_run(self, labels: NDArray[np.int64]) -> tuple[float, tuple[str, ...]]:
        """Play a run of the client with these labels; return its score and the uploads' heads."""
        recipe = replace(self.setting.recipe, steps=1)
        x, score, heads = make_neighbours(recipe)[0], 0.0, []
        for t, (paid, sent) in enumerate(zip(self.paid, self.models, strict=True)):
            upload = release.release(
                FORM, sent, x, labels, recipe=recipe, paid=paid, head={"kind": "upload", "t": t},
                loss_bound=self.setting.loss_bound,
            )  # fmt: skip
            head, arrays = unpack(upload.blob)
            answer = flatten(arrays)
            if self.setting.loss_bound is not None:
                answer = np.append(answer, float(head["loss"]))
            score += float((answer - self.middle[t]) @ self.apart[t])
            heads.append(repr(sorted(head.items())))
        return score, tuple(heads)

    def play_runs(self, labels: NDArray[np.int64], messages: int) -> Iterator[tuple[float, str]]:
        """Yield the scores of so many runs, each with the text of its heads."""
        for _ in range(messages):
            score, heads = self.play_run(labels)
            yield score, "|".join(heads)


def measure(
    setting: AuditSetting, messages: int, progress: Progress | None = None, wrong: float = WRONG
) -> Measurement:
    """Play the duel `messages` times on each side, and return the scores.

    >>> found = measure(AuditSetting(4.0, 1e-3, Recipe(1.0, 1.0)), messages=500)
    >>> bool(found.mu[0] <= found.setting.promised), round(found.true, 4)
    (True, 1.215)
    """
    duel = Duel.prepare(setting)
    _, y, other = make_neighbours(setting.recipe)
    practice = PRACTICE_RUNS + messages // 10
    known = [{head for _, head in duel.play_runs(labels, practice)} for labels in (y, other)]
    sides: list[Floats] = []
    for labels in (y, other):
        scores = np.empty(messages)
        for i, (score, head) in enumerate(duel.play_runs(labels, messages)):
            verdict = (head in known[1]) - (head in known[0])  # 0 where heads do not decide
            scores[i] = np.inf * verdict if verdict else score
            if progress is not None and i % 100 == 99:
                progress(len(sides) * messages + i + 1, 2 * messages)
        sides.append(scores)
    return Measurement(setting, duel.mu, sides[0], sides[1], wrong)


def _compute_answer(
    sent: Parameters, x: Floats, labels: NDArray[np.int64], recipe: Recipe, bound: float | None
) -> Floats:
    """Return what a client would upload without noise, and its mean loss if that is reported."""
    answer = flatten(release.step(FORM, sent, x, labels, recipe))
    if bound is None:
        return answer
    losses = sample_losses(FORM, sent, x, labels)
    return np.append(answer, bound * grid.bounded_sum(losses, bound) / grid.REPLACED / len(labels))


def flatten(params: Parameters | dict[str, NDArray[np.float32]]) -> Floats:
    """Return all parameters as one vector, in the order of their names."""
    return np.concatenate([np.asarray(params[name], np.float64).ravel() for name in sorted(params)])
