"""What one more run of the chosen plan would reach on the stand-in, and how that is told."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from sottovoce.plan import Plan
from sottovoce.plan.data import DATASETS
from sottovoce.schemas.documents import PredictionEntry, WithoutNoiseEntry
from sottovoce.studies.rehearsal.search import Trial
from sottovoce.studies.rehearsal.standin import RealFederation, aside


@dataclass(frozen=True)
class Prediction:
    """What one more run of the chosen plan would reach, from fresh seeds on rows that only tell.

    `low` to `high` holds it in 95 of 100 cases, were the clients' rows like the stand-in's:
    ±√((t·s)²(1 + 1/m) + 1.96²·p(1−p)(1/n + 1/n′)), s the deviation over m seeds, n the rows that
    tell, n′ the plan's test rows; they are left out where a file holds them, which is not opened.
    Of synthetic rows there is no range, for how well they can be learnt was made up with them:
    `unnoised` is what the same seeds reach without noise, and so what the budget costs.
    """

    accuracies: tuple[float, ...]
    mean: float
    deviation: float
    low: float | None
    high: float | None
    rounds: float
    tested: int | None
    unnoised: tuple[float, ...] | None = None

    @property
    def lost(self) -> float:
        """What the noise of the budget costs, seed by seed: its mean."""
        return statistics.fmean(self.unnoised or ()) - self.mean

    @property
    def lost_deviation(self) -> float:
        """Its standard deviation over the seeds."""
        pairs = zip(self.unnoised or (), self.accuracies, strict=True)
        return statistics.stdev(without - own for without, own in pairs)

    def words(self) -> str:
        """In a sentence or two.

        >>> one = Prediction((0.7, 0.8), 0.75, 0.07, 0.6, 0.9, 9.0, None)
        >>> print(one.words())  # doctest: +ELLIPSIS
        Predicted on the stand-in: 75.0 ± 7.0 %, 95 % of runs between 60.0 % and 90.0 % if the ...
        """
        if self.low is None or self.high is None:
            return (
                f"On the stand-in the budget costs {100 * self.lost:.1f} ± "
                f"{100 * self.lost_deviation:.1f} points: {100 * self.mean:.1f} % with its noise, "
                f"{100 * (self.mean + self.lost):.1f} % without, {len(self.accuracies)} seeds "
                "each. How accurate your plan will be, synthetic rows cannot say."
            )
        left_out = (
            ""
            if self.tested
            else " The range leaves out the chance of its test rows, which are in a file."
        )
        return (
            f"Predicted on the stand-in: {100 * self.mean:.1f} ± {100 * self.deviation:.1f} %, "
            f"95 % of runs between {100 * self.low:.1f} % and {100 * self.high:.1f} % if the "
            f"clients' rows are like these.{left_out}"
        )

    def short(self) -> str:
        """As few words as a headline has room for."""
        if self.low is None:
            return f"the budget costs {100 * self.lost:.1f} points on the stand-in"
        return f"{100 * self.mean:.1f} % predicted on the stand-in"

    def to_json(self) -> PredictionEntry:
        """Return the part of rehearsal.json."""
        without: WithoutNoiseEntry | None = None
        if self.unnoised is not None:
            without = {
                "accuracies": list(self.unnoised),
                "lost": self.lost,
                "deviation": self.lost_deviation,
            }
        return {
            "of": "the stand-in",
            "accuracies": list(self.accuracies),
            "mean": self.mean,
            "deviation": self.deviation,
            "low": self.low,
            "high": self.high,
            "rounds": self.rounds,
            "tested": self.tested,
            "without_noise": without,
        }


def predict_accuracy(
    trials: Sequence[Trial],
    telling: int,
    tested: int | None,
    unnoised: Sequence[Trial] | None = None,
) -> Prediction:
    """Predict the accuracy from trials with fresh seeds, and the same trials without noise.

    >>> own = [Trial("", {}, s, 1.0, 0.9, a, 10, 0.1) for s, a in enumerate((0.89, 0.9, 0.91))]
    >>> found = predict_accuracy(own, 1000, 1000)
    >>> round(found.mean, 3), round(found.deviation, 3), round(found.low, 2), round(found.high, 2)
    (0.9, 0.01, 0.84, 0.96)
    """
    from scipy.special import stdtrit

    seen = tuple(trial.test_accuracy for trial in trials)
    mean, m = statistics.fmean(seen), len(seen)
    deviation = statistics.stdev(seen) if m > 1 else 0.0
    t = float(stdtrit(max(1, m - 1), 0.975))
    chance = 1.96**2 * mean * (1 - mean) * (1 / telling + (1 / tested if tested else 0.0))
    half = math.sqrt((t * deviation) ** 2 * (1 + 1 / m) + chance)
    ranged = unnoised is None
    return Prediction(
        accuracies=seen,
        mean=mean,
        deviation=deviation,
        low=max(0.0, mean - half) if ranged else None,
        high=min(1.0, mean + half) if ranged else None,
        rounds=statistics.fmean(trial.rounds for trial in trials),
        tested=tested,
        unnoised=None if unnoised is None else tuple(t.test_accuracy for t in unnoised),
    )


def rows_tested(plan: Plan, real: RealFederation) -> int | None:
    """How many rows the plan will be tested on; None: a file's, which is not opened.

    A part is that of the whole table, of which `real` has what validation and test leave.

    >>> from sottovoce.studies.rehearsal.standin import announce_federation
    >>> plans = (Plan(), Plan(data={"name": "mnist"}))
    >>> [rows_tested(plan, announce_federation(plan)) for plan in plans]
    [184, 10000]
    """
    own = plan.data
    if own.name is not None and own.test == 0:
        return DATASETS[own.name].own_test or None
    if isinstance(own.test, float):
        part, rows = aside(plan)
        return max(1, round(own.test * (real.rows + rows) / (1 - part)))
    return own.test if isinstance(own.test, int) else None
