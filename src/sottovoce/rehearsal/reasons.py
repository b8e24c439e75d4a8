"""Why each value was chosen, and the plan with these reasons as comments: ready to train."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sottovoce.plan import Plan
from sottovoce.plan.data import DATASETS
from sottovoce.rehearsal.space import AS_PLANNED, Fork, Ladder, Setting, Space, identity
from sottovoce.rehearsal.trials import Trial

HEAD = """\
# Rehearsed: {choices} chosen on a stand-in, before any private row was touched.
# Stand-in: {about}.
# Cost in privacy: none. The rehearsal read no row of a client, and nothing was debited.
# Predicted on the stand-in: {accuracy} (95 % of runs of this plan between {low} and {high}).
# {trust}
"""


@dataclass(frozen=True)
class Prediction:
    """What one more run of the chosen plan would reach, from fresh seeds on rows that only tell.

    `low` to `high` holds it in 95 of 100 cases, were the clients' rows like the stand-in's:
    ±√((t·s)²(1 + 1/m) + 1.96²·p(1−p)(1/n + 1/n′)), s the deviation over m seeds, n the rows that
    tell, n′ the plan's test rows.
    """

    accuracies: tuple[float, ...]
    mean: float
    deviation: float
    low: float
    high: float
    rounds: float

    def to_json(self) -> dict[str, Any]:
        """As it stands in rehearsal.json."""
        return {
            "accuracies": list(self.accuracies),
            "mean": self.mean,
            "deviation": self.deviation,
            "low": self.low,
            "high": self.high,
            "rounds": self.rounds,
        }


def predicted(trials: Sequence[Trial], telling: int, tested: int) -> Prediction:
    """The prediction from the trials with fresh seeds.

    >>> own = [Trial("", {}, s, 1.0, 0.9, a, 10, 0.1) for s, a in enumerate((0.89, 0.9, 0.91))]
    >>> found = predicted(own, 1000, 1000)
    >>> round(found.mean, 3), round(found.deviation, 3), round(found.low, 2), round(found.high, 2)
    (0.9, 0.01, 0.84, 0.96)
    """
    from scipy.special import stdtrit

    seen = tuple(trial.test_accuracy for trial in trials)
    mean, m = statistics.fmean(seen), len(seen)
    deviation = statistics.stdev(seen) if m > 1 else 0.0
    t = float(stdtrit(max(1, m - 1), 0.975))
    chance = 1.96**2 * mean * (1 - mean) * (1 / telling + 1 / tested)
    half = math.sqrt((t * deviation) ** 2 * (1 + 1 / m) + chance)
    return Prediction(
        accuracies=seen,
        mean=mean,
        deviation=deviation,
        low=max(0.0, mean - half),
        high=min(1.0, mean + half),
        rounds=statistics.fmean(trial.rounds for trial in trials),
    )


def rows_tested(plan: Plan, otherwise: int) -> int:
    """How many rows the plan will be tested on, where that is known before they are read.

    >>> rows_tested(Plan(), 100), rows_tested(Plan(data={"name": "mnist"}), 100)
    (184, 10000)
    """
    own = plan.data
    if own.name is not None and own.test == 0:
        return DATASETS[own.name].own_test or otherwise
    return own.test if isinstance(own.test, int) and own.test > 0 else otherwise


def reasons(space: Space, chosen: Setting, trials: Sequence[Trial], seed: int) -> dict[str, str]:
    """For each key that was searched: what was tried beside the choice, and how it did."""
    first = {identity(trial.setting): trial for trial in trials if trial.seed == seed}
    at = first[identity(chosen)].accuracy
    told: dict[str, str] = {}
    knobs: list[Ladder | Fork] = [*space.ladders, *space.forks]
    for knob in knobs:
        key = knob.key
        others = [
            (trial.setting[key], trial.accuracy)
            for trial in first.values()
            if trial.setting[key] != chosen[key]
            and all(trial.setting[k] == v for k, v in chosen.items() if k != key)
        ]
        if not others and key == "model":  # compared at other T and η: the best of each
            best: dict[str, float] = {}
            for trial in first.values():
                name = trial.setting[key]
                best[name] = max(best.get(name, 0.0), trial.accuracy)
            best.pop(chosen[key], None)
            others = list(best.items())
        others.sort(key=lambda pair: -pair[1])
        shown = ", ".join(f"{_shown(v)}: {100 * a:.1f} %" for v, a in others[:4])
        beside = f"; beside it {shown}" if shown else "; nothing else was tried beside it"
        told[key] = f"{knob.why} ({_shown(chosen[key])}: {100 * at:.1f} %{beside})"
    return told


def _shown(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def commented(
    plan: Plan,
    space: Space,
    chosen: Setting,
    why: dict[str, str],
    prediction: Prediction,
    about: str,
    trust: str,
) -> str:
    """plan.toml: the plan as TOML, a comment above every key that was chosen.

    Loading it gives the plan that was chosen.
    """
    changes = space.changes(chosen)
    by_key = {key: why[key] for key in why if key in changes}
    for fork in space.forks:
        name = chosen[fork.key]
        own = list(fork.options[name](1.0)) if name != AS_PLANNED else _own_keys(fork.key)
        for key in own[:1]:
            by_key.setdefault(key, why[fork.key])
    lines, section = [], ""
    for line in plan.to_toml().splitlines():
        if found := re.fullmatch(r"\[(\w+)\]", line):
            section = found[1]
        key = f"{section}.{line.partition(' = ')[0]}"
        if " = " in line and key in by_key:
            lines += _comment(by_key[key])
        lines.append(line)
    head = HEAD.format(
        choices=", ".join(why) or "nothing",
        about=about,
        accuracy=f"{100 * prediction.mean:.2f} ± {100 * prediction.deviation:.2f} %",
        low=f"{100 * prediction.low:.1f} %",
        high=f"{100 * prediction.high:.1f} %",
        trust=trust,
    )
    head_lines = [wrapped for line in head.splitlines() for wrapped in _comment(line[2:])]
    return "\n".join([*head_lines, *lines]) + "\n"


def _own_keys(key: str) -> list[str]:
    return ["model.name"] if key == "model" else [key]


def _comment(text: str) -> list[str]:
    import textwrap

    return [f"# {line}" for line in textwrap.wrap(" ".join(text.split()), 96)]
