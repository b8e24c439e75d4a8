"""Membership attacks: was this record in the training data?

Every shadow run trains on a random half of a pool. A record's statistic has one normal distribution
over the runs that had the record and another over those that had not; a run is judged by their
likelihood ratio (LiRA: Carlini et al. 2022). The statistic is the final model's confidence, or the
inner product of the record's clipped gradient with one upload or with all of them, summed over the
rounds. A plain threshold on the loss is shown for comparison.

Distributions and thresholds are fitted on the even runs alone; the odd runs are judged. A half with
a record and a half without it differ in one replaced record, so that every rate obeys
TPR ≤ Φ(Φ⁻¹(FPR) + μ), with μ of the run's whole budget. To tell a member i from another record j of
the same run is a test between two halves in which i and j are swapped: the area under a run's curve
is Φ(μ/2) at most on average.

Records of one run share its noise, and only runs are independent. Therefore a ceiling is
contradicted by a mean over runs (`ceiling.bound_mean`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sottovoce.client.release import Parameters
from sottovoce.data.federated import Given
from sottovoce.models.base import Form, flatten_parameters, sample_losses
from sottovoce.plan import Plan
from sottovoce.privacy.gaussian import cdf
from sottovoce.privacy.sensitivity import Recipe
from sottovoce.server.federation import build
from sottovoce.simulation.simulate import simulate_each
from sottovoce.studies.audit.ceiling import (
    WRONG_PER_COMPARISON,
    Level,
    Rates,
    bound_mean,
    choose_threshold,
    compute_auc,
    compute_mu,
)
from sottovoce.studies.audit.inversion import Labels, Rows, Victim, clip_gradients

Floats = NDArray[np.float64]
Members = NDArray[np.bool_]  # [runs, rows]: which rows each run had
Progress = Callable[[int, int], None]

SILENT = 1e6  # the ε of "no noise" in the simulator: σ is a thousandth of Δ
JUDGED_AT = (0.1, 0.01, 0.001)  # false alarms at which an attacker is judged
_SHRUNK = 8  # the weight of the common variance, in runs


@dataclass(frozen=True, eq=False)
class Attack:
    """The scores of every record in every run (high: "it was there"), and which were there."""

    name: str
    level: Level
    scores: Floats
    members: Members

    @property
    def areas(self) -> Floats:
        """The area under the ROC curve of each judged run."""
        runs = zip(self.scores[1::2], self.members[1::2], strict=True)
        return np.array([compute_auc(scores[there], scores[~there]) for scores, there in runs])

    @property
    def auc(self) -> float:
        """The mean area: how often a member scores above another record of its run."""
        return float(self.areas.mean())

    def _find_alarms(self, fpr: float) -> NDArray[np.bool_]:
        """Return which records of the odd runs exceed a threshold chosen on the even runs."""
        threshold = choose_threshold(self.scores[::2][~self.members[::2]], fpr)
        return np.asarray(self.scores[1::2] > threshold)

    def count_rates(self, fpr: float) -> Rates:
        """Count hits and alarms in the judged runs, for the table only: records are dependent."""
        over, there = self._find_alarms(fpr), self.members[1::2]
        hits, alarms = int(np.sum(over & there)), int(np.sum(over & ~there))
        return Rates(hits, int(there.sum()), alarms, int((~there).sum()))

    def prove_mu(self, fpr: float, wrong: float = WRONG_PER_COMPARISON) -> float:
        """Return the μ that the shares of hits and alarms in each run prove."""
        over, there = self._find_alarms(fpr), self.members[1::2]
        hits = np.sum(over & there, axis=1) / there.sum(axis=1)
        alarms = np.sum(over & ~there, axis=1) / (~there).sum(axis=1)
        return max(0.0, compute_mu(bound_mean(hits, 1 - wrong)[0],
                                      bound_mean(alarms, 1 - wrong)[1]))  # fmt: skip

    def compute_curve(self) -> tuple[Floats, Floats]:
        """Return FPR and TPR at every threshold, over all records of the judged runs."""
        order = np.argsort(-self.scores[1::2], axis=None)
        there = self.members[1::2].ravel()[order]
        alarms, hits = np.cumsum(~there), np.cumsum(there)
        return alarms / float(alarms[-1]), hits / float(hits[-1])

    def exceeds(self, fpr: float) -> bool:
        """Return whether the rates contradict their ceiling.

        Chance alone does so with probability `WRONG_PER_COMPARISON` at most.
        """
        return self.level.epsilon is not None and self.prove_mu(fpr) > self.level.mu

    @property
    def area_exceeds(self) -> bool:
        """Whether the mean area contradicts its ceiling, with the same probability of error."""
        return bound_mean(self.areas, 1 - 2 * WRONG_PER_COMPARISON)[0] > self.auc_ceiling

    @property
    def auc_ceiling(self) -> float:
        """Φ(μ/2), the largest mean area."""
        return 1.0 if self.level.epsilon is None else float(cdf(self.level.mu / 2))


def compute_ratios(statistic: Floats, members: Members) -> Floats:
    """Return ln of the likelihood ratio of each statistic, by distributions of the even runs.

    An even run is left out when it is scored itself. A record that all even runs had, or none,
    gets 0.

    >>> rng = np.random.default_rng(0)
    >>> there = rng.random((200, 50)) < 0.5
    >>> scores = compute_ratios(rng.standard_normal((200, 50)) + 2 * there, there)[1::2]
    >>> bool(abs(compute_auc(scores[there[1::2]], scores[~there[1::2]]) - 0.921) < 0.02)
    True
    """
    taught = np.arange(len(statistic)) % 2 == 0
    middle = statistic[taught].mean(axis=0)
    values = statistic - middle  # centred, so that squares lose no digits
    smallest = 1e-12 * (1 + np.mean(statistic[taught] ** 2, axis=0))

    def fit(runs: Members) -> tuple[Floats, Floats, Floats]:
        teaching = runs & taught[:, None]
        count = teaching.sum(axis=0) - teaching
        total = (values * teaching).sum(axis=0) - values * teaching
        squares = (values**2 * teaching).sum(axis=0) - values**2 * teaching
        mean = total / np.maximum(count, 1)
        return count, mean, np.maximum(squares - count * mean**2, 0.0)

    fits = [fit(members), fit(~members)]
    (had, _, spread), (lacked, _, other_spread) = fits
    common = (spread + other_spread) / np.maximum(had + lacked - 2, 1)
    logs = []
    for count, mean, squares in fits:
        # Few runs give a poor variance, so it is shrunk towards that of both groups.
        variance = np.maximum((squares + _SHRUNK * common) / (count + _SHRUNK), smallest)
        logs.append(-((values - mean) ** 2) / (2 * variance) - np.log(variance) / 2)
    known = (had > 0) & (lacked > 0)
    return np.where(known, logs[0] - logs[1], 0.0)


def attack_models(
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
    """Attack the final models of simulated runs, by a loss threshold and by LiRA."""
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
        privacy={
            "epsilon": level.epsilon or SILENT,
            "delta": level.delta,
            "calibration": level.calibration,
        },
        rounds={"schedule": "fixed", "rounds": rounds},
    )
    pair = (x.astype(np.float32), y.astype(np.int32))
    losses, members = np.empty((runs, len(y))), np.zeros((runs, len(y)), dtype=bool)
    form = Form("mlp", (x.shape[1],), int(y.max()) + 1, {"hidden": hidden})
    shadows = simulate_each([plan], seeds=range(runs), data=pair)
    for done, (seed, trained) in enumerate(shadows, start=1):
        split = build(plan, seed=seed, data=Given(pair)).held.split
        assert split is not None, "arrays are split among clients"
        for rows in split.clients:
            members[seed, rows] = True
        params = {
            name: np.asarray(v, np.float64)
            for name, v in flatten_parameters(trained.params).items()
        }
        losses[seed] = sample_losses(form, params, x, y)
        if progress is not None:
            progress(done, runs)
    confidence = -np.log(np.expm1(np.clip(losses, 1e-8, 50.0)))  # ln p/(1 − p)
    return [
        Attack("loss threshold, final model", level, -losses, members),
        Attack("LiRA, final model", level, compute_ratios(confidence, members), members),
    ]


def attack_uploads(
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
    """Attack the uploads of a client, the first one and all of a run; each is the next model.

    The first upload is compared with the ceiling of the whole run, although its own is lower.
    """
    rng, half = np.random.default_rng(seed), len(y) // 2
    members = np.zeros((runs, len(y)), dtype=bool)
    projections = np.zeros((rounds, runs, len(y)))
    for run in range(runs):
        rows = rng.permutation(len(y))[:half]
        members[run, rows] = True
        victim, models = Victim(form, recipe, x[rows], y[rows]), [start]
        for t, upload in enumerate(victim.send_uploads(level, _yield_newest(models), rounds)):
            projections[t, run] = _project_upload(form, models[-1], upload, x, y, recipe.clip)
            models.append(upload)
        if progress is not None:
            progress(run + 1, runs)
    return [
        Attack("LiRA, one upload", level, compute_ratios(projections[0], members), members),
        Attack(
            "LiRA, whole transcript",
            level,
            compute_ratios(projections.sum(axis=0), members),
            members,
        ),
    ]


def _yield_newest(models: list[Parameters]) -> Iterator[Parameters]:
    while True:
        yield models[-1]


def _project_upload(
    form: Form, before: Parameters, after: Parameters, x: Rows, y: Labels, clip: float
) -> Floats:
    """Return the inner product of an upload's step with each record's clipped gradient."""
    step = np.concatenate([(before[n] - after[n]).ravel() for n in sorted(before)])
    return np.asarray(clip_gradients(form, before, x, y, clip) @ step)
