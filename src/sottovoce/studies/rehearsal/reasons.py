"""Why each value was chosen, and the plan with these reasons as comments: ready to train."""

from __future__ import annotations

import re
import statistics
from collections.abc import Sequence
from typing import Any

from sottovoce.plan import Plan
from sottovoce.studies.rehearsal.cost import Cost
from sottovoce.studies.rehearsal.prediction import Prediction
from sottovoce.studies.rehearsal.space import (
    AS_PLANNED,
    ROUNDS,
    Fork,
    Ladder,
    Setting,
    Space,
    identity,
)
from sottovoce.studies.rehearsal.trials import Trial

HEAD = """\
# Rehearsed: {choices} {when}.
# Stand-in: {about}.
# Cost in privacy: {cost}.
# {predicted}
# {trust}
"""


def reasons(
    space: Space, chosen: Setting, trials: Sequence[Trial], seeds: Sequence[int]
) -> dict[str, str]:
    """For each key that was searched: what was tried beside the choice, and how it did.

    Like is compared with like: means over all `seeds` that chose among those that have them (the
    finalists), and the first seed's accuracies among all.
    """
    found: dict[str, dict[int, Trial]] = {}
    for trial in trials:
        found.setdefault(identity(trial.setting), {})[trial.seed] = trial
    told: dict[str, str] = {}
    knobs: list[Ladder | Fork] = [*space.ladders, *space.forks]
    for knob in knobs:
        groups, alone = [], True
        for own, name in ((tuple(seeds), f"mean of {len(seeds)} seeds"), (seeds[:1], "first seed")):
            known = [
                (next(iter(by.values())).setting, statistics.fmean(by[s].accuracy for s in own))
                for by in found.values()
                if all(s in by for s in own)
            ]
            at = next(mean for setting, mean in known if setting == chosen)
            others = _beside(knob.key, chosen, known)
            alone = alone and not others
            if others or len(own) > 1:
                first = [f"{_shown(chosen[knob.key])}: {100 * at:.1f} %"]
                rest = [f"{_shown(v)}: {100 * a:.1f} %" for v, a in others[:4]]
                groups.append(f"{name}: {', '.join(first + rest)}")
            if len(seeds) == 1:
                break
        groups += ["nothing else was tried beside it"] if alone else []
        told[knob.key] = f"{knob.why} ({'; '.join(groups)})"
    return told


def _beside(
    key: str, chosen: Setting, known: Sequence[tuple[Setting, float]]
) -> list[tuple[Any, float]]:
    """Other values of a key and their accuracy, the rest as chosen; the best first."""
    others = [
        (setting[key], accuracy)
        for setting, accuracy in known
        if setting[key] != chosen[key]
        and all(setting[k] == v for k, v in chosen.items() if k != key)
    ]
    if not others and key == "model":  # compared at other T and η: the best of each
        best: dict[str, float] = {}
        for setting, accuracy in known:
            best[setting[key]] = max(best.get(setting[key], 0.0), accuracy)
        best.pop(chosen[key], None)
        others = list(best.items())
    return sorted(others, key=lambda pair: -pair[1])


def rounds_told(planned: int, used: float) -> str:
    """The rounds of a plan, and of the runs that predict where those are others.

    >>> rounds_told(160, 160.0), rounds_told(320, 160.2)
    ('160', '320 at most, about 160 done')
    """
    return f"{planned:,}" + ("" if round(used) == planned else f" at most, about {used:,.0f} done")


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
    cost: Cost,
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
    if ROUNDS in by_key and round(prediction.rounds) != plan.rounds.rounds:
        told = rounds_told(plan.rounds.rounds, prediction.rounds)
        by_key[ROUNDS] += f"; with the schedule chosen {told}"
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
        when=cost.when,
        about=about,
        cost=cost.told,
        predicted=prediction.words(),
        trust=trust,
    )
    head_lines = [wrapped for line in head.splitlines() for wrapped in _comment(line[2:])]
    return "\n".join([*head_lines, *lines]) + "\n"


def _own_keys(key: str) -> list[str]:
    return ["model.name"] if key == "model" else [key]


def _comment(text: str) -> list[str]:
    import textwrap

    return [f"# {line}" for line in textwrap.wrap(" ".join(text.split()), 96)]
