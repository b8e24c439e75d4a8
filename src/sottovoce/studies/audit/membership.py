"""Membership attacks: was this record in the training data?

Every shadow run trains on a random half of the pool. A record's statistic over the runs that had it
and the runs that had not gives two bells, and a run is judged by their likelihood ratio (LiRA:
Carlini et al. 2022). Statistics are of the final model (its confidence), of one upload, or of the
whole transcript (how far the uploads lean towards the record's clipped gradient, summed over the
rounds). The plain loss threshold stands beside them.

Bells and thresholds come from the even runs alone. The odd runs are judged, and nothing of them is
known beforehand. A pool's half with a record differs from one without it by one record
replaced, so that every rate obeys TPR ≤ Φ(Φ⁻¹(FPR) + μ), the ceiling of the run's whole budget. A
member i and another record j of one run are told apart by one test between two halves, in which i
and j have changed places: the area under a run's own curve is Φ(μ/2) at most on average.

A run's records share its noise. Runs are independent and their records are not, so that what
contradicts a ceiling is a mean over runs (`ceiling.mean_between`).
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
from sottovoce.simulation.many import simulate_each
from sottovoce.studies.audit.ceiling import (
    EACH,
    Rates,
    bound_mean,
    compute_auc,
    compute_mu,
    find_threshold,
)
from sottovoce.studies.audit.inversion import clip_gradients
from sottovoce.studies.audit.target import Labels, Level, Rows, Victim

Floats = NDArray[np.float64]
Members = NDArray[np.bool_]  # [runs, rows]: which rows each run had
Progress = Callable[[int, int], None]

SILENT = 1e6  # the ε that stands for "no noise" in the simulator: σ is a thousandth of Δ
JUDGED_AT = (0.1, 0.01, 0.001)  # false alarms at which an attacker is judged
_SHRUNK = 8  # runs that the common variance counts for


@dataclass(frozen=True, eq=False)
class Attack:
    """Scores of every record in every run (high: "it was there"), and the true members."""

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
        """Their mean: how often a member scores above another record of its run; a coin has 1/2."""
        return float(self.areas.mean())

    def _find_alarms(self, fpr: float) -> NDArray[np.bool_]:
        """Return which records of the odd runs score above a threshold set by the even runs."""
        threshold = find_threshold(self.scores[::2][~self.members[::2]], fpr)
        return np.asarray(self.scores[1::2] > threshold)

    def count_rates(self, fpr: float) -> Rates:
        """Count hits and alarms in the judged runs; records of a run are not independent."""
        over, there = self._find_alarms(fpr), self.members[1::2]
        hits, alarms = int(np.sum(over & there)), int(np.sum(over & ~there))
        return Rates(hits, int(there.sum()), alarms, int((~there).sum()))

    def prove_mu(self, fpr: float, wrong: float = EACH) -> float:
        """Return the μ that the rates of whole runs prove."""
        over, there = self._find_alarms(fpr), self.members[1::2]
        hits = np.sum(over & there, axis=1) / there.sum(axis=1)
        alarms = np.sum(over & ~there, axis=1) / (~there).sum(axis=1)
        return max(0.0, compute_mu(bound_mean(hits, 1 - wrong)[0],
                                      bound_mean(alarms, 1 - wrong)[1]))  # fmt: skip

    def curve(self) -> tuple[Floats, Floats]:
        """Return FPR and TPR at every threshold, over all records of the judged runs."""
        order = np.argsort(-self.scores[1::2], axis=None)
        there = self.members[1::2].ravel()[order]
        alarms, hits = np.cumsum(~there), np.cumsum(there)
        return alarms / float(alarms[-1]), hits / float(hits[-1])

    def exceeds(self, fpr: float) -> bool:
        """Return whether the rates contradict their ceiling; by chance in `EACH` at most."""
        return self.level.epsilon is not None and self.prove_mu(fpr) > self.level.mu

    @property
    def area_exceeds(self) -> bool:
        """Whether the area contradicts its ceiling; by chance in `EACH` at most."""
        return bound_mean(self.areas, 1 - 2 * EACH)[0] > self.auc_ceiling

    @property
    def auc_ceiling(self) -> float:
        """Φ(μ/2), the bound for a record against another of the same run."""
        return 1.0 if self.level.epsilon is None else float(cdf(self.level.mu / 2))


def compute_ratios(statistic: Floats, members: Members) -> Floats:
    """Return the log likelihood ratio of each run's statistic under the bells of the even runs.

    An even run is left out of its own bells, their spread included. A record that was in all even
    runs or in none has 0.

    >>> rng = np.random.default_rng(0)
    >>> there = rng.random((200, 50)) < 0.5
    >>> scores = compute_ratios(rng.standard_normal((200, 50)) + 2 * there, there)[1::2]
    >>> bool(abs(compute_auc(scores[there[1::2]], scores[~there[1::2]]) - 0.921) < 0.02)
    True
    """
    taught = np.arange(len(statistic)) % 2 == 0
    middle = statistic[taught].mean(axis=0)
    values = statistic - middle  # small numbers: squares lose nothing
    least = 1e-12 * (1 + np.mean(statistic[taught] ** 2, axis=0))

    def bell(among: Members) -> tuple[Floats, Floats, Floats]:
        teaching = among & taught[:, None]
        count = teaching.sum(axis=0) - teaching
        total = (values * teaching).sum(axis=0) - values * teaching
        squares = (values**2 * teaching).sum(axis=0) - values**2 * teaching
        mean = total / np.maximum(count, 1)
        return count, mean, np.maximum(squares - count * mean**2, 0.0)

    bells = [bell(members), bell(~members)]
    (here, _, spread), (gone, _, apart) = bells
    common = (spread + apart) / np.maximum(here + gone - 2, 1)
    found = []
    for count, mean, squares in bells:
        # Few runs make poor variances: half of it is what both bells have in common.
        variance = np.maximum((squares + _SHRUNK * common) / (count + _SHRUNK), least)
        found.append(-((values - mean) ** 2) / (2 * variance) - np.log(variance) / 2)
    known = (here > 0) & (gone > 0)
    return np.where(known, found[0] - found[1], 0.0)


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
    """Attack the final models of simulated runs by loss threshold and LiRA."""
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
        assert split is not None, "arrays are split"
        for rows in split.clients:
            members[seed, rows] = True
        params = {
            name: np.asarray(v, np.float64)
            for name, v in flatten_parameters(trained.params).items()
        }
        losses[seed] = sample_losses(form, params, x, y)
        if progress is not None:
            progress(done, runs)
    sure = -np.log(np.expm1(np.clip(losses, 1e-8, 50.0)))  # ln p/(1 − p)
    return [
        Attack("loss threshold, final model", level, -losses, members),
        Attack("LiRA, final model", level, compute_ratios(sure, members), members),
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
    """Attack one upload and the whole transcript of a client whose uploads steer the model.

    The single upload is the first of the run. It is compared with the ceiling of the whole run,
    which is higher than its own.
    """
    rng, half = np.random.default_rng(seed), len(y) // 2
    members = np.zeros((runs, len(y)), dtype=bool)
    leaning = np.zeros((rounds, runs, len(y)))
    for run in range(runs):
        rows = rng.permutation(len(y))[:half]
        members[run, rows] = True
        victim, models = Victim(form, recipe, x[rows], y[rows]), [start]
        for t, sent in enumerate(victim.answers(level, _repeat_newest(models), rounds)):
            leaning[t, run] = _project_upload(form, models[-1], sent, x, y, recipe.clip)
            models.append(sent)
        if progress is not None:
            progress(run + 1, runs)
    return [
        Attack("LiRA, one upload", level, compute_ratios(leaning[0], members), members),
        Attack(
            "LiRA, whole transcript", level, compute_ratios(leaning.sum(axis=0), members), members
        ),
    ]


def _repeat_newest(models: list[Parameters]) -> Iterator[Parameters]:
    while True:
        yield models[-1]


def _project_upload(
    form: Form, before: Parameters, after: Parameters, x: Rows, y: Labels, clip: float
) -> Floats:
    """Return how far an upload moved along each record's clipped gradient."""
    moved = np.concatenate([(before[n] - after[n]).ravel() for n in sorted(before)])
    return np.asarray(clip_gradients(form, before, x, y, clip) @ moved)
