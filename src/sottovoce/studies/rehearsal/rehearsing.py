"""`sottovoce rehearse`: choose on a stand-in, say why, predict, and write plan, data and page."""

from __future__ import annotations

import json
import math
import os
import re
import shlex
import statistics
import sys
import textwrap
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, Final, cast

from sottovoce._version import __version__
from sottovoce.data.files import require_empty, write_file
from sottovoce.errors import InputError, RunError
from sottovoce.plan import Plan
from sottovoce.plan.data import DATASETS
from sottovoce.privacy import seeds
from sottovoce.reports.progress import ProgressLine
from sottovoce.schemas.documents import (
    CostEntry,
    PredictionEntry,
    RehearsalDocument,
    TrialEntry,
    WithoutNoiseEntry,
)
from sottovoce.studies.rehearsal.page import render_rehearsal
from sottovoce.studies.rehearsal.search import (
    LEAST,
    NOISE,
    PREDICTION,
    UNNOISED,
    WITHOUT,
    Theory,
    Trial,
    Trials,
    read_trials,
    search,
    seeds_of,
)
from sottovoce.studies.rehearsal.space import (
    AS_PLANNED,
    ROUNDS,
    Fork,
    Ladder,
    Setting,
    Space,
    identity,
    space_of,
)
from sottovoce.studies.rehearsal.standin import (
    Public,
    RealFederation,
    StandIn,
    announce_federation,
    aside,
    fit_plan,
    stand_in,
)
from sottovoce.studies.store import JOURNAL

# Why each value was chosen, and the plan with these reasons as comments: ready to train.


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
                first = [f"{_format_setting(chosen[knob.key])}: {100 * at:.1f} %"]
                rest = [f"{_format_setting(v)}: {100 * a:.1f} %" for v, a in others[:4]]
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


def _format_setting(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def comment_plan(
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


# What a rehearsal costs in privacy, and on whose word that rests.
#
# made        drawn digits, synthetic rows: nothing
# published   a data set that sottovoce knows by name, other than the plan's: nothing
# said        a file or arrays: nothing, provided that they are public, which cannot be checked
# own         the plan's own rows (the embedded digits): a demonstration, nothing is claimed


DEMONSTRATION = "a demonstration: these are the plan's own rows, which are public"
UNCHECKED = "you say so, sottovoce cannot check"
_NOTHING = (
    "every row that was read is public or made up, no client was asked, and no vault or budget was "
    "touched. What depends on no private row tells nothing about one."
)


@dataclass(frozen=True)
class Cost:
    """The same claim, as long as it is told: in a tile, a sentence, a paragraph."""

    mu2: float | None  # None: not counted
    provided: str | None  # what the claim rests on
    tile: str
    short: str  # ends a headline
    told: str
    why: str
    when: str  # how the plan's first comment ends

    def to_json(self) -> CostEntry:
        """Return the part of rehearsal.json."""
        return {"mu2": self.mu2, "provided": self.provided, "why": self.why}


def cost_of(rows: StandIn) -> Cost:
    """What a rehearsal on these rows may claim.

    >>> pair = ([[0.0]], [0])
    >>> rows = StandIn("public", "", "", pair, pair, pair, (1,), 2, origin="said", name="a.csv")
    >>> cost_of(rows).told
    'none, provided that a.csv is public: you say so, sottovoce cannot check'
    """
    if rows.origin == "own":
        return Cost(
            mu2=None,
            provided=None,
            tile="not counted",
            short="a demonstration on the plan's own rows",
            told=f"not counted, {DEMONSTRATION}",
            why=f"Not counted, {DEMONSTRATION}. With your own data, other rows stand in.",
            when="chosen on the plan's own rows",
        )
    if rows.origin == "said":
        name = rows.name
        return Cost(
            mu2=0.0,
            provided=f"{name} is public",
            tile="0, if public",
            short=f"no privacy spent if {name} is public",
            told=f"none, provided that {name} is public: {UNCHECKED}",
            why=f"None, provided that {name} is public: {UNCHECKED}. No client was asked, and no "
            "vault or budget was touched; but rows of a client would have been used unpaid.",
            when="chosen on a stand-in",
        )
    return Cost(
        mu2=0.0,
        provided=None,
        tile="0",
        short="no privacy spent",
        told="none; no private row was read",
        why=f"Nothing: {_NOTHING}",
        when="chosen on a stand-in, before any private row was touched",
    )


RUNS = 120
SCHEMA: Final = "sottovoce.rehearsal/1"


@dataclass(frozen=True, eq=False)
class Rehearsal:
    """What was chosen and why, what it is expected to reach, and every federation that was run."""

    plan: Plan  # as chosen, ready to train
    given: Plan
    space: Space
    setting: Setting
    rows: StandIn
    factor: float  # f: a client of the stand-in holds 1/f of the rows, at the real noise
    prediction: Prediction
    reasons: dict[str, str]
    theory: Theory | None
    trials: tuple[Trial, ...]
    seeds: tuple[int, ...]  # that chose
    complete: bool  # whether the search came to its end before runs or minutes did
    seed: int
    sittings: tuple[dict[str, str], ...] = ()  # version and backend of each, the last one's last

    @property
    def baseline(self) -> Trial:
        """The plan as it was given, with the first seed."""
        return self.trials[0]

    @property
    def cost(self) -> Cost:
        """What it cost in privacy, and on whose word."""
        return cost_of(self.rows)

    @property
    def rounds(self) -> str:
        """T₀ of the plan, and what is done of it where that is less."""
        return rounds_told(self.plan.rounds.rounds, self.prediction.rounds)

    @property
    def mixed(self) -> str | None:
        """A sentence where not all federations were run by the same program on the same kind."""
        if len(self.sittings) < 2:
            return None
        each = ", ".join(f"{sat['version']} on {sat['backend']}" for sat in self.sittings)
        return (
            f"This rehearsal mixes federations run by sottovoce {each}: small gaps may be theirs."
        )

    @property
    def chance(self) -> float:
        """The standard error of one accuracy on the rows that choose: √(p(1−p)/n)."""
        p = self.finalists[0]
        return math.sqrt(p * (1 - p) / self.rows.choosing)

    @property
    def finalists(self) -> list[float]:
        """The mean accuracies of the settings that all seeds tried, the choice first."""
        by: dict[str, dict[int, float]] = {}
        for trial in self.trials:
            by.setdefault(identity(trial.setting), {})[trial.seed] = trial.accuracy
        full = {
            key: statistics.fmean(own[seed] for seed in self.seeds)
            for key, own in by.items()
            if all(seed in own for seed in self.seeds)
        }
        best = full.pop(identity(self.setting))
        return [best, *sorted(full.values(), reverse=True)]

    def doubt(self) -> str:
        """How much the rows that choose can tell apart, and whether it was enough."""
        rows, finalists = self.rows.choosing, self.finalists
        told = f"{rows:,} rows chose: the standard error of an accuracy is {100 * self.chance:.1f} "
        told += "points"
        gap = max(0.0, finalists[0] - finalists[1]) if len(finalists) > 1 else math.inf
        if gap >= self.chance:
            return f"{told}."
        return (
            f"{told}, more than the {100 * gap:.1f} points between the best two settings, so "
            "either may be the better one."
        )

    def toml(self, folder: Path | None = None) -> str:
        """plan.toml; the files that it names are looked for from `folder`, where it will lie."""
        return comment_plan(
            self.plan if folder is None else relocate_plan(self.plan, folder),
            self.space,
            self.setting,
            self.reasons,
            self.prediction,
            self.rows.about,
            self.rows.trust,
            self.cost,
        )

    def to_json(self) -> RehearsalDocument:
        """Return the content of rehearsal.json; `sottovoce schema rehearsal` describes it."""
        x, _ = self.rows.train
        return {
            "schema": SCHEMA,
            "version": __version__,
            "given": self.given.to_dict(),
            "plan": self.plan.to_dict(),
            "seed": self.seed,
            "chosen": {
                "setting": dict(self.setting),
                "reasons": self.reasons,
                "seeds": list(self.seeds),
                "complete": self.complete,
                "standard_error": self.chance,
                "doubt": self.doubt(),
            },
            "sittings": list(self.sittings),
            "stand_in": {
                "kind": self.rows.kind,
                "about": self.rows.about,
                "trust": self.rows.trust,
                "rows": len(x),
                "choosing": len(self.rows.validation[1]),
                "telling": len(self.rows.test[1]),
                "factor": self.factor,
                "fingerprint": self.rows.fingerprint(),
            },
            "privacy_cost": self.cost.to_json(),
            "prediction": self.prediction.to_json(),
            "theory": None if self.theory is None else self.theory.to_json(),
            "runs": [cast(TrialEntry, asdict(trial)) for trial in self.trials],
        }


def rehearse(
    plan: Plan | None = None,
    *,
    public: Public = None,
    keep: Sequence[str] = (),
    runs: int = RUNS,
    minutes: float | None = None,
    clients: int | None = None,
    samples: int | None = None,
    seed: int = 0,
    out: str | Path | None = None,
    resume: bool = False,
    told: Callable[[Trials], None] | None = None,
) -> Rehearsal:
    """Choose T₀, η, C, schedule, weights, model and features for a plan without its data.

    Whole private federations like the plan's are run on a stand-in (`public` rows, or what the
    kind of data allows), at the noise that the plan's budgets buy. `keep` names keys or sections
    that stay as they are. With `out` a folder is written; with `resume` it is gone on with. `told`
    is called before the first federation and after each.
    """
    plan = Plan.load() if plan is None else plan
    seeds.check_seed(seed)
    if isinstance(runs, bool) or not isinstance(runs, int) or not LEAST <= runs <= 100_000:
        raise InputError.of(
            "--runs", runs, f"a whole number from {LEAST} to 100000", f"{RUNS} is the default"
        )
    if minutes is not None and not 0 < minutes < 1e6:
        raise InputError.of("--minutes", minutes, "a number above 0", "how long it may take")
    real = announce_federation(plan, clients, samples)
    folder = None if out is None else _folder(Path(out), resume)
    rows = stand_in(plan, real, public, seed=seed)
    stage, factor = fit_plan(plan, real, len(rows.train[1]))
    space = space_of(plan, keep, shape=rows.shape, bodies=rows.kind != "synthetic")
    if not (space.ladders or space.forks):
        raise InputError("--keep leaves nothing to choose; keep fewer keys")
    import jax

    known: list[Trial] = []
    sitting = {"version": __version__, "backend": jax.default_backend()}
    sittings = [sitting]
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        head = {
            "schema": SCHEMA,
            "plan": plan.to_dict(),
            "stand-in": rows.fingerprint(),
            "seed": seed,
            "keep": sorted(keep),
            "federation": [len(real.sizes), sum(real.sizes), factor],  # --clients, --samples
        }
        known, sittings = read_trials(folder, head, sitting)
    trials = Trials(
        space,
        stage,
        rows,
        limit=runs,
        minutes=minutes,
        folder=folder,
        known=known,
        told=told,
    )
    _, fresh = seeds_of(seed)
    made_up = rows.kind == "synthetic"
    trials.promised = len(fresh) * (1 + made_up)
    if told is not None:
        told(trials)
    found = search(space, trials, seed)
    bare = {**found.setting, NOISE: WITHOUT}
    trials.ask(PREDICTION, [(found.setting, s) for s in fresh], must=True)
    if made_up:  # how well such rows can be learnt was made up with them: what noise costs was not
        trials.ask(UNNOISED, [(bare, s) for s in fresh], must=True)
    prediction = predict_accuracy(
        [trials.done[identity(found.setting), s] for s in fresh],
        rows.telling,
        rows_tested(plan, real),
        [trials.done[identity(bare), s] for s in fresh] if made_up else None,
    )
    done = trials.all()
    told_why = reasons(space, found.setting, done, found.seeds)
    result = Rehearsal(
        plan=space.apply_setting(found.setting).replace(
            rehearsed=provenance(rows, told_why, len(done))
        ),
        given=plan,
        space=space,
        setting=found.setting,
        rows=rows,
        factor=factor,
        prediction=prediction,
        reasons=told_why,
        theory=trials.theory(found.setting, found.seeds[0]),
        trials=tuple(done),
        seeds=found.seeds,
        complete=found.complete,
        seed=seed,
        sittings=tuple(sittings),
    )
    if folder is not None:
        write(result, folder)
    return result


def provenance(rows: StandIn, keys: Iterable[str], federations: int) -> str:
    """How settings were chosen, for the plan and the card of every run of it."""
    made = {"drawn": "digits drawn anew", "synthetic": "synthetic rows of the schema"}
    return (
        f"{', '.join(keys)} by sottovoce rehearse on {made.get(rows.kind, rows.name)} "
        f"({federations} federations; fingerprint of the rows {rows.fingerprint()}); "
        f"cost in privacy: {cost_of(rows).told}"
    )


def write(result: Rehearsal, folder: Path) -> None:
    """plan.toml, rehearsal.json and report.html, each whole or not at all."""
    content = json.dumps(result.to_json(), ensure_ascii=False, allow_nan=False, indent=1) + "\n"
    write_file(folder / "rehearsal.json", content.encode())
    write_file(folder / "report.html", render_rehearsal(result).encode())
    write_file(folder / "plan.toml", result.toml(folder).encode())


def relocate_plan(plan: Plan, folder: Path) -> Plan:
    """Return the plan with the paths of its files relative to a folder."""
    changes: dict[str, Any] = {}
    model = plan.model.own
    for key in ("path", "validation", "test"):
        if isinstance(file := getattr(plan.data, key), str):
            changes[f"data.{key}"] = Path(os.path.relpath(file, folder)).as_posix()
    if model is not None and model.rpartition(":")[0].endswith(".py"):
        file, _, name = model.rpartition(":")
        changes["model.own"] = f"{Path(os.path.relpath(file, folder)).as_posix()}:{name}"
    return plan.replace(rehearsed=plan.rehearsed, **changes) if changes else plan


def _folder(out: Path, resume: bool) -> Path:
    if not resume:
        return require_empty(out)
    if not (out / JOURNAL).is_file():
        raise RunError(f"{out} holds no rehearsal to go on with; leave --resume out to begin one")
    return out


def command(
    path: Path | None,
    settings: Sequence[str],
    *,
    public: str | None,
    keep: Sequence[str],
    runs: int | None,
    minutes: float | None,
    clients: int | None,
    samples: int | None,
    seed: int,
    out: Path | None,
    resume: bool,
    as_json: bool,
    quiet: bool,
) -> None:
    """The command: what a person, or `--json`, wants to see."""
    if resume and out is None:
        raise InputError("--resume goes on with the rehearsal in --out; name its folder")
    plan = Plan.load(path, settings)
    folder = out or Path("runs") / f"rehearsal-{datetime.now():%Y%m%d-%H%M%S}"
    show = ProgressLine(sys.stderr, quiet=quiet, at_once=True)
    wanted = RUNS if runs is None else runs
    try:
        result = rehearse(
            plan,
            public=public,
            keep=keep,
            runs=wanted if runs is not None or minutes is None else 100_000,
            minutes=minutes,
            clients=clients,
            samples=samples,
            seed=seed,
            out=folder,
            resume=resume,
            told=partial(_show_progress, show),
        )
    except KeyboardInterrupt:
        show.close()
        if (folder / JOURNAL).exists():
            text = "stopped; go on with the same command, --resume and --out"
            print(text, shlex.quote(str(folder)), file=sys.stderr, flush=True)
        raise
    show.close()
    print(json.dumps(result.to_json(), ensure_ascii=False) if as_json else summary(result, folder))


def summary(result: Rehearsal, folder: Path) -> str:
    """What a person wants to know at the end."""
    lines = [f"{key:<20} {_value(result, key)}" for key in result.reasons]
    theory = "" if result.theory is None else f"Theorem 2 prefers T = {result.theory.best_rounds}"
    return "\n".join(
        [
            *lines,
            *([] if result.rounds.isdigit() else [f"{'rounds of the plan':<20} {result.rounds}"]),
            "",
            *_wrap_text(result.prediction.words()),
            *_wrap_text(result.doubt()),
            f"as given: {result.baseline.accuracy:.1%} on the rows that chose   {theory}".rstrip(),
            *_wrap_text(f"stand-in: {result.rows.about}"),
            *_wrap_text(result.rows.trust),
            *_wrap_text(result.mixed or ""),
            *_wrap_text(f"cost in privacy: {result.cost.told}"),
            f"federations: {len(result.trials)}",
            "",
            f"plan   {folder / 'plan.toml'}",
            f"page   {folder / 'report.html'}",
            f"train  sottovoce train {folder / 'plan.toml'}",
        ]
    )


def _wrap_text(text: str) -> list[str]:
    return textwrap.wrap(text, 96, break_on_hyphens=False)


def _value(result: Rehearsal, key: str) -> str:
    value = result.setting[key]
    return f"{value:g}" if isinstance(value, float) else str(value)


def _show_progress(line: ProgressLine, trials: Trials) -> None:
    """Show what is going on; after a trial how many are done, the best, and the time left."""
    if not line.due():
        return
    if not trials.ran:
        known = f"{len(trials.done)} federations are done; " if trials.done else ""
        line.say(f"{known}the first federation is compiled and run, which takes longest")
        return
    private = [trial.accuracy for trial in trials.done.values() if NOISE not in trial.setting]
    stage = next(reversed(trials.asked.values()))
    line.say(
        f"{len(trials.done)} federations, {stage}, best {max(private):.1%}, about "
        f"{trials.estimate_seconds_left():.0f} s left at most"
    )
