"""Was this record in the training data? Shadow runs on random halves of a pool say how it looks.

Every shadow run trains on a random half of the pool. A record's statistic over the runs that had it
and the runs that had not gives two bells, and a run is judged by their likelihood ratio, itself
left out of both (LiRA: Carlini et al. 2022). Statistics are of the final model (its confidence), of
one upload, or of the whole transcript (how far the uploads lean towards the record's clipped
gradient, summed over the rounds). The plain loss threshold stands beside them.

A pool's half with a record differs from one without it by one record replaced, so that every rate
obeys TPR ≤ Φ(Φ⁻¹(FPR) + μ), the ceiling of the run's whole budget.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sottovoce.audit.ceiling import Rates, area, counted, threshold_at
from sottovoce.audit.uploads import Labels, Level, Rows, Victim
from sottovoce.client import Parameters
from sottovoce.federation import build
from sottovoce.holdings import Given
from sottovoce.learning import gradients
from sottovoce.learning.form import Form
from sottovoce.learning.names import named
from sottovoce.plan import Plan
from sottovoce.privacy import gaussian
from sottovoce.privacy.sensitivity import Recipe
from sottovoce.simulation.many import simulate_each

Floats = NDArray[np.float64]
Members = NDArray[np.bool_]  # [runs, rows]: which rows each run had
Progress = Callable[[int, int], None]

SILENT = 1e6  # the ε that stands for "no noise" in the simulator: σ is a thousandth of Δ
OFTEN, SELDOM = 0.01, 0.001  # false alarms at which an attacker is judged


@dataclass(frozen=True, eq=False)
class Attack:
    """Scores of every record in every run (high: "it was there"), and who was there."""

    name: str
    level: Level
    scores: Floats
    members: Members

    @property
    def auc(self) -> float:
        """The area under its ROC curve; a coin has 1/2."""
        return area(self.scores[self.members], self.scores[~self.members])

    def at(self, fpr: float) -> Rates:
        """Hits and alarms in the odd runs at a threshold that the even runs set."""
        fixed = threshold_at(self.scores[::2][~self.members[::2]], fpr)
        scores, members = self.scores[1::2], self.members[1::2]
        return counted(scores[members], scores[~members], fixed)

    def curve(self) -> tuple[Floats, Floats]:
        """FPR and TPR at every threshold."""
        order = np.argsort(-self.scores, axis=None)
        there = self.members.ravel()[order]
        alarms, hits = np.cumsum(~there), np.cumsum(there)
        return alarms / float(alarms[-1]), hits / float(hits[-1])

    @property
    def exceeds(self) -> bool:
        """Whether a rate is above its ceiling by more than chance explains (1e-3 each)."""
        if self.level.epsilon is None:
            return False
        return any(self.at(fpr).exceeds(self.level.mu) for fpr in (0.1, OFTEN, SELDOM))

    @property
    def auc_ceiling(self) -> float:
        """Φ(μ/√2)."""
        return 1.0 if self.level.epsilon is None else float(gaussian.auc(self.level.mu))


def ratios(statistic: Floats, members: Members) -> Floats:
    """ln of the likelihood ratio of each run's statistic under the bells of the other runs.

    >>> rng = np.random.default_rng(0)
    >>> there = rng.random((200, 50)) < 0.5
    >>> scores = ratios(rng.standard_normal((200, 50)) + 2 * there, there)
    >>> bool(abs(area(scores[there], scores[~there]) - 0.921) < 0.02)
    True
    """

    def log_density(among: Members) -> Floats:
        others = among.sum(axis=0) - among  # itself left out
        total = (statistic * among).sum(axis=0) - statistic * among
        mean = total / np.maximum(others, 1)
        square = (statistic**2 * among).sum(axis=0) - statistic**2 * among
        spread = square / np.maximum(others, 1) - mean**2
        pooled = np.mean(spread, axis=0)  # one number a row: few runs make poor variances
        variance = np.maximum(pooled, 1e-12 * (1 + np.mean(statistic**2, axis=0)))
        return np.asarray(-((statistic - mean) ** 2) / (2 * variance) - np.log(variance) / 2)

    return np.asarray(log_density(members) - log_density(~members))


def of_models(
    x: Rows,
    y: Labels,
    level: Level,
    *,
    runs: int,
    hidden: int,
    rounds: int,
    recipe: Recipe,
    progress: Progress | None = None,
) -> list[Attack]:
    """Attacks on the final models of so many simulated runs: loss threshold and LiRA."""
    half = len(y) // 2
    plan = Plan(
        data={
            "name": "arrays",
            "clients": 1,
            "samples": half,
            "validation": (len(y) - half) // 2,
            "test": len(y) - half - (len(y) - half) // 2,
        },
        model={"name": "mlp", "hidden": hidden},
        local={"learning_rate": recipe.learning_rate, "clip": recipe.clip, "unit": recipe.unit},
        privacy={"epsilon": level.epsilon or SILENT, "delta": level.delta},
        rounds={"schedule": "fixed", "rounds": rounds},
    )
    pair = (x.astype(np.float32), y.astype(np.int32))
    losses, members = np.empty((runs, len(y))), np.zeros((runs, len(y)), dtype=bool)
    form = Form("mlp", (x.shape[1],), int(y.max()) + 1, hidden=hidden)
    shadows = simulate_each([plan], seeds=range(runs), data=pair)
    for done, (seed, trained) in enumerate(shadows, start=1):
        dealt = build(plan, seed=seed, data=Given(pair)).held.split
        assert dealt is not None, "arrays are dealt"
        for own in dealt.clients:
            members[seed, own] = True
        params = {name: np.asarray(v, np.float64) for name, v in named(trained.params).items()}
        losses[seed] = gradients.losses(form, params, x, y)
        if progress is not None:
            progress(done, runs)
    sure = -np.log(np.expm1(np.clip(losses, 1e-8, 50.0)))  # ln p/(1 − p)
    return [
        Attack("loss threshold, final model", level, -losses, members),
        Attack("LiRA, final model", level, ratios(sure, members), members),
    ]


def of_uploads(
    x: Rows,
    y: Labels,
    level: Level,
    start: Parameters,
    *,
    runs: int,
    form: Form,
    rounds: int,
    recipe: Recipe,
    seed: int = 0,
    progress: Progress | None = None,
) -> list[Attack]:
    """Attacks on what one client uploads, once and in a whole run; its uploads steer the model.

    The single upload is the first of the run; its own ceiling is lower than the run's, which is
    what it is held against.
    """
    rng, half = np.random.default_rng(seed), len(y) // 2
    members = np.zeros((runs, len(y)), dtype=bool)
    leaning = np.zeros((rounds, runs, len(y)))
    for run in range(runs):
        own = rng.permutation(len(y))[:half]
        members[run, own] = True
        victim, now = Victim(form, recipe, x[own], y[own]), [start]
        for t, sent in enumerate(victim.answers(level, _newest(now), rounds)):
            leaning[t, run] = _leaning(form, now[-1], sent, x, y, recipe.clip)
            now.append(sent)
        if progress is not None:
            progress(run + 1, runs)
    return [
        Attack("LiRA, one upload", level, ratios(leaning[0], members), members),
        Attack("LiRA, whole transcript", level, ratios(leaning.sum(axis=0), members), members),
    ]


def _newest(models: list[Parameters]) -> Iterator[Parameters]:
    while True:
        yield models[-1]


def _leaning(
    form: Form, before: Parameters, after: Parameters, x: Rows, y: Labels, clip: float
) -> Floats:
    """How far an upload moved along each record's clipped gradient."""
    moved = np.concatenate([(before[n] - after[n]).ravel() for n in sorted(before)])
    own = gradients.written(form, before, x, y)
    own /= np.maximum(1.0, np.linalg.norm(own, axis=1, keepdims=True) / clip)
    return np.asarray(own @ moved)
