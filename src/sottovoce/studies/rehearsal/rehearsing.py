"""`sottovoce rehearse`: choose settings on a stand-in, explain them, predict, and write the result.

The result is plan.toml (the plan with the reasons as comments), rehearsal.json and report.html:
`render_rehearsal` draws the choice and its reasons, the prediction, and what it cost.
"""

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
from concurrent.futures import Executor
from contextlib import redirect_stdout
from dataclasses import asdict, dataclass
from datetime import datetime
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, cast

import numpy as np

from sottovoce._version import __version__
from sottovoce.data.files import hold_folder, require_empty, write_file
from sottovoce.errors import InputError, RunError
from sottovoce.models.metrics import GAINS
from sottovoce.plan import Plan
from sottovoce.plan.data import DATASETS
from sottovoce.privacy import seeds
from sottovoce.reports.charts import BLUE, INK, ORANGE, draw_svg, tidy_axes
from sottovoce.reports.pages import format_count, format_number, format_whole, render_page
from sottovoce.reports.progress import ProgressLine
from sottovoce.schemas import PredictionEntry, RehearsalDocument, TheoryEntry, TrialEntry
from sottovoce.simulation.simulate import open_executor
from sottovoce.studies.rehearsal.search import (
    LEAST,
    NOISE,
    Trial,
    Trials,
    choose_seeds,
    format_difference,
    format_gain,
    read_trials,
    search_settings,
)
from sottovoce.studies.rehearsal.space import (
    AS_PLANNED,
    RATE,
    ROUNDS,
    Fork,
    Ladder,
    Setting,
    Space,
    build_space,
    encode_setting,
)
from sottovoce.studies.rehearsal.standin import (
    WORDS,
    ClientSizes,
    Public,
    StandIn,
    announce_federation,
    fit_plan,
    make_stand_in,
    sum_held_out,
)
from sottovoce.studies.store import JOURNAL

if TYPE_CHECKING:
    from markupsafe import Markup


def group_trials(trials: Sequence[Trial]) -> dict[str, dict[int, Trial]]:
    """Return the trials by setting (`encode_setting`), then by seed."""
    found: dict[str, dict[int, Trial]] = {}
    for trial in trials:
        found.setdefault(encode_setting(trial.setting), {})[trial.seed] = trial
    return found


def explain_choices(
    space: Space, chosen: Setting, trials: Sequence[Trial], seeds: Sequence[int]
) -> dict[str, str]:
    """Return for each searched key a sentence: why it matters, what else was tried, how it did.

    The mean over all `seeds` that chose is compared among the settings that have it (the
    finalists), and the first seed's metric among all settings.
    """
    show = partial(format_gain, trials[0].metric)
    by_setting, reasons = group_trials(trials), {}
    averages = [(seeds[:1], "first seed")]
    if len(seeds) > 1:
        averages.insert(0, (seeds, f"mean of {len(seeds)} seeds"))
    knobs: list[Ladder | Fork] = [*space.ladders, *space.forks]
    for knob in knobs:
        groups, alone = [], True
        for some, name in averages:
            means = [
                (next(iter(by.values())).setting, statistics.fmean(by[s].value for s in some))
                for by in by_setting.values()
                if all(s in by for s in some)
            ]
            best = next(mean for setting, mean in means if setting == chosen)
            others, is_alike = _list_alternatives(knob.key, chosen, means)
            alone = alone and not others
            name += "" if is_alike else ", beside other changes"
            if others or len(some) > 1:
                pairs = [(chosen[knob.key], best), *others[:4]]
                values = (f"{_format_value(value)}: {show(mean)}" for value, mean in pairs)
                groups.append(f"{name}: {', '.join(values)}")
        groups += ["no other value was tried"] if alone else []
        reasons[knob.key] = f"{knob.why} ({'; '.join(groups)})"
    return reasons


def _list_alternatives(
    key: str, chosen: Setting, known: Sequence[tuple[Setting, float]]
) -> tuple[list[tuple[Any, float]], bool]:
    """List other values of a key with their accuracy, the best first, and whether all else is
    as chosen; where no setting differs in this key alone, it is the best of each other value."""
    rest = {k: v for k, v in chosen.items() if k != key}
    others = [pair for pair in known if pair[0][key] != chosen[key]]
    alike = [pair for pair in others if {k: pair[0][k] for k in rest} == rest]
    best: dict[Any, float] = {}
    for setting, accuracy in alike or others:
        best[setting[key]] = max(best.get(setting[key], -math.inf), accuracy)
    return sorted(best.items(), key=lambda pair: -pair[1]), bool(alike or not others)


def _format_value(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _wrap_comment(text: str) -> list[str]:
    return [f"# {line}" for line in textwrap.wrap(" ".join(text.split()), 96)]


@dataclass(frozen=True)
class Prediction:
    """What one more run of the chosen plan would reach, from fresh seeds on the rows that tell.

    It is of the metric that chose: the plan's, or else by the rule of docs/results.md. If the
    clients' rows are like the stand-in's, it is between `low` and `high` in 95 of 100 cases:
    ±√((t·s)²(1 + 1/m) + 1.96²·v(1/n + 1/n′)), with s the deviation over m seeds, n the rows that
    tell and n′ the plan's test rows, which are left out where they are in a file. v is p(1−p) of an
    accuracy, and n times the squared standard error of another metric.

    For synthetic rows there is no range, because how well they can be learnt was made up with them.
    Instead `unnoised` is what the same seeds reach without noise: it shows what the budget costs.
    """

    values: tuple[float, ...]
    mean: float
    deviation: float
    low: float | None
    high: float | None
    rounds: float
    tested: int | None
    unnoised: tuple[float, ...] | None = None
    metric: str = "accuracy"

    @property
    def lost(self) -> float:
        """What the budget's noise costs in the metric: the mean over the seeds."""
        return statistics.fmean(self.unnoised or ()) - self.mean

    @property
    def lost_deviation(self) -> float:
        """The standard deviation of that cost over the seeds."""
        pairs = zip(self.unnoised or (), self.values, strict=True)
        return statistics.stdev(without - noised for without, noised in pairs)

    @property
    def kind(self) -> Literal["range", "cost", "unknown"]:
        """What can be said: where it will lie, what the budget costs, or neither."""
        if self.low is not None:
            return "range"
        return "cost" if self.lost >= 0 else "unknown"

    def describe(self, length: Literal["text", "short"] = "text") -> str:
        """Describe the prediction in a sentence or two, or shortly for a headline."""
        show, differ = partial(format_gain, self.metric), partial(format_difference, self.metric)
        name = "" if self.metric == "accuracy" else f"{GAINS[self.metric]} "
        words = {"name": name, "in_name": name and f"in {name}", "seeds": len(self.values)}
        words |= {"mean": show(self.mean), "number": show(self.mean).removesuffix(" %")}
        if self.low is not None and self.high is not None:
            words |= {"low": show(self.low), "high": show(self.high)}
            words |= {"deviation": show(self.deviation)}
        else:
            words |= {"lost": differ(self.lost), "deviation": differ(self.lost_deviation)}
            words |= {"lost_number": differ(self.lost).removesuffix(" points")}
            words |= {"noiseless": show(self.mean + self.lost)}
        text = str(WORDS["prediction"][self.kind][length].format(**words))
        is_whole = length == "short" or self.kind != "range" or self.tested
        return text + ("" if is_whole else WORDS["prediction"]["range"]["file"])

    def to_json(self) -> PredictionEntry:
        """Return the part of rehearsal.json."""
        return {
            "of": "the stand-in",
            "metric": self.metric,
            "accuracies": list(self.values),
            "mean": self.mean,
            "deviation": self.deviation,
            "low": self.low,
            "high": self.high,
            "rounds": self.rounds,
            "tested": self.tested,
            "without_noise": None
            if self.unnoised is None
            else {
                "accuracies": list(self.unnoised),
                "lost": self.lost,
                "deviation": self.lost_deviation,
            },
        }


def predict_run(
    trials: Sequence[Trial],
    telling: int,
    tested: int | None,
    unnoised: Sequence[Trial] | None = None,
    rows: int = 0,
) -> Prediction:
    """Predict from the trials with fresh seeds, and from the same trials without noise.

    `telling` of the `rows` that they were tested on are independent.
    """
    from scipy.special import stdtrit

    values = tuple(trial.test_value for trial in trials)
    mean, m = statistics.fmean(values), len(values)
    deviation = statistics.stdev(values) if m > 1 else 0.0
    t = float(stdtrit(max(1, m - 1), 0.975))
    errors = [trial.test_error for trial in trials if trial.test_error is not None]
    variance = rows * statistics.fmean(errors) ** 2 if errors else mean * (1 - mean)
    chance = 1.96**2 * variance * (1 / telling + (1 / tested if tested else 0.0))
    half = math.sqrt((t * deviation) ** 2 * (1 + 1 / m) + chance)
    ranged = unnoised is None
    return Prediction(
        values=values,
        mean=mean,
        deviation=deviation,
        low=max(0.0 if trials[0].metric != "r2" else -math.inf, mean - half) if ranged else None,
        high=min(1.0, mean + half) if ranged else None,
        rounds=statistics.fmean(trial.rounds for trial in trials),
        tested=tested,
        unnoised=None if unnoised is None else tuple(t.test_value for t in unnoised),
        metric=trials[0].metric,
    )


def count_test_rows(plan: Plan, real: ClientSizes) -> int | None:
    """Return how many rows the plan will be tested on, or None if they are in a file.

    A share is one of the whole table, of which `real` has what validation and test leave.

    >>> plans = Plan(), Plan(data={"name": "mnist"})
    >>> [count_test_rows(plan, announce_federation(plan)) for plan in plans]
    [184, 10000]
    """
    name, test = plan.data.name, plan.data.test
    if name is not None and test == 0:
        return DATASETS[name].own_test or None
    if isinstance(test, float):
        share, rows = sum_held_out(plan)
        return max(1, round(test * (sum(real) + rows) / (1 - share)))
    return test if isinstance(test, int) else None


RUNS = 120
SCHEMA: Final = "sottovoce.rehearsal/1"


@dataclass(frozen=True, eq=False)
class Rehearsal:
    """What was chosen and why, what it should reach, and every federation that was run."""

    plan: Plan  # as chosen, ready to train
    given: Plan
    space: Space
    setting: Setting
    rows: StandIn
    factor: float  # f: a client of the stand-in holds 1/f of the rows, at the real noise
    prediction: Prediction
    reasons: dict[str, str]
    theory: TheoryEntry | None
    trials: tuple[Trial, ...]
    seeds: tuple[int, ...]  # that chose
    complete: bool  # whether the search ended before the runs or minutes were used up
    seed: int
    sittings: tuple[dict[str, str], ...] = ()  # version and backend of each session, in order

    @cached_property
    def by_setting(self) -> dict[str, dict[int, Trial]]:
        """The trials by setting and seed."""
        return group_trials(self.trials)

    @property
    def baseline(self) -> Trial:
        """The plan as it was given, with the first seed."""
        return self.trials[0]

    def compare_with_given(self) -> tuple[str, str]:
        """Return the means of the choice and of the plan as given on the same rows and seeds.

        The first is of what, the second has both values.
        """
        keys = (encode_setting(setting) for setting in (self.setting, self.baseline.setting))
        both = [self.by_setting[key] for key in keys]
        seeds = [seed for seed in self.seeds if all(seed in trials for trials in both)]
        means = [statistics.fmean(trials[seed].value for seed in seeds) for trials in both]
        of = f"{self.metric} as chosen and as given, on the rows that chose"
        same = f"{format_count(len(seeds), 'seed')}, the same for both"
        return f"{of} ({same})", " and ".join(map(self.format_value, means))

    @property
    def metric(self) -> str:
        """What the choice made large, in words."""
        name = self.baseline.metric
        return "accuracy" if name == "accuracy" else GAINS[name]

    def format_value(self, value: float, digits: int = 1) -> str:
        """Return a value of that metric as it is read."""
        return format_gain(self.baseline.metric, value, digits)

    @property
    def rounds(self) -> str:
        """T₀ of the plan, and how many rounds are done if that is less."""
        planned, done = self.plan.rounds.rounds, self.prediction.rounds
        fewer = "" if round(done) == planned else f" at most, about {done:,.0f} done"
        return f"{planned:,}{fewer}"

    @property
    def mixed(self) -> str | None:
        """A warning if not all federations were run by the same version on the same backend."""
        if len(self.sittings) < 2:
            return None
        sessions = ", ".join(f"{s['version']} on {s['backend']}" for s in self.sittings)
        return (
            f"This rehearsal mixes federations run by sottovoce {sessions}: small differences may "
            "come from that."
        )

    @property
    def chance(self) -> float:
        """The standard error of the metric on the rows that choose."""
        trial = self.by_setting[encode_setting(self.setting)][self.seeds[0]]
        return trial.estimate_error(self.rows)

    @property
    def finalists(self) -> list[float]:
        """The mean accuracies of the settings that were tried with all seeds, the choice first."""
        full = {
            key: statistics.fmean(trials[seed].value for seed in self.seeds)
            for key, trials in self.by_setting.items()
            if trials.keys() >= {*self.seeds}
        }
        best = full.pop(encode_setting(self.setting))
        return [best, *sorted(full.values(), reverse=True)]

    def describe_doubt(self) -> str:
        """Say how precise the choice is, and whether the best two settings can be told apart."""
        rows, finalists = self.rows.choosing, self.finalists
        show = partial(format_difference, self.baseline.metric)
        what = "an accuracy" if self.metric == "accuracy" else f"the {self.metric}"
        units = "persons" if self.rows.person is not None and self.rows.sources else "rows"
        text = f"{rows:,} {units} chose: the standard error of {what} is {show(self.chance)}"
        gap = finalists[0] - finalists[1] if len(finalists) > 1 else math.inf
        if gap >= self.chance:
            return f"{text}."
        if gap < -1e-9 and self.rows.kind == "synthetic":
            return (
                f"{text}. Another setting reached {show(-gap)} more, which synthetic rows cannot "
                "tell from nothing: the settings that no search chose stay."
            )
        if gap < -1e-9:  # the time was up before the finalists had all seeds
            return (
                f"{text}. A setting that was no finalist reached {show(-gap)} more with the same "
                "seeds: more runs or minutes would tell which of the two is better."
            )
        return (
            f"{text}, more than the {show(max(0.0, gap))} between the best two settings, so "
            "either may be the better one."
        )

    def to_toml(self, folder: Path | None = None) -> str:
        """Return plan.toml, with a comment above every key that was chosen.

        File names are relative to `folder`, where it will lie.
        """
        head = (
            f"Rehearsed: {', '.join(self.reasons) or 'nothing'} {self.rows.cost['when']}.",
            f"Stand-in: {self.rows.about}.",
            f"Cost in privacy: {self.rows.cost['sentence']}.",
            self.prediction.describe(),
            self.rows.trust,
        )
        lines = [line for text in head for line in _wrap_comment(text)]
        plan = self.plan if folder is None else relocate_plan(self.plan, folder)
        comments, section = self._comment_keys(), ""
        for line in plan.to_toml().splitlines():
            if found := re.fullmatch(r"\[(\w+)\]", line):
                section = found[1]
            key, equals, _ = line.partition(" = ")
            if equals and (comment := comments.get(f"{section}.{key}")):
                lines += _wrap_comment(comment)
            lines.append(line)
        return "\n".join(lines) + "\n"

    def _comment_keys(self) -> dict[str, str]:
        """Return the reason for each key of the plan that was chosen."""
        changes = self.space.list_changes(self.setting)
        comments = {key: reason for key, reason in self.reasons.items() if key in changes}
        for fork in self.space.forks:
            name = self.setting[fork.key]
            key = "model.name" if fork.key == "model" else fork.key
            if name != AS_PLANNED:
                key = next(iter(fork.options[name](1.0)))
            comments.setdefault(key, self.reasons[fork.key])
        if ROUNDS in comments and " " in self.rounds:
            comments[ROUNDS] += f"; with the schedule chosen {self.rounds}"
        return comments

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
                "doubt": self.describe_doubt(),
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
            "privacy_cost": {
                "mu2": None if self.rows.origin == "own" else 0.0,
                "provided": self.rows.cost.get("provided"),
                "why": self.rows.cost["why"],
            },
            "prediction": self.prediction.to_json(),
            "theory": self.theory,
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
    on_trial: Callable[[Trials], None] | None = None,
    on: str | Executor | None = None,
) -> Rehearsal:
    """Choose T₀, η, C, schedule, weights, model and features for a plan without its data.

    Whole private federations like the plan's are run on a stand-in (`public` rows, or what the
    kind of data allows), with the noise that the plan's budgets need. `keep` names keys or sections
    that stay as they are. With `out` a folder is written; with `resume` the rehearsal in it is
    continued. `on_trial` is called before the first federation and after each; `on` is that of
    `simulate_many`.
    """
    plan = Plan.load() if plan is None else plan
    seeds.check_seed(seed)
    if isinstance(runs, bool) or not isinstance(runs, int) or not LEAST <= runs <= 100_000:
        remedy = f"{RUNS} is the default"
        raise InputError.of("--runs", runs, f"a whole number from {LEAST} to 100000", remedy)
    if minutes is not None and not 0 < minutes < 1e6:
        raise InputError.of("--minutes", minutes, "a number above 0", "how long it may take")
    real = announce_federation(plan, clients, samples)
    ruled = plan.replace(**{"local.learning_rate": "auto"})
    ruled = ruled.choose_learning_rate(real, plan.recipe().clip)
    plan = ruled if plan.local.learning_rate == "auto" else plan
    folder = None if out is None else Path(out)
    if folder is not None and not resume:
        require_empty(folder)
    elif folder is not None and not (folder / JOURNAL).is_file():
        raise RunError(f"{out} holds no rehearsal to continue; leave --resume out to begin one")
    rows = make_stand_in(plan, real, public, seed=seed)
    stage, factor = fit_plan(plan, real, rows.units)
    models = rows.kind != "synthetic"
    space = build_space(plan, keep, shape=rows.shape, models=models, auto=ruled.local.rate)
    if not (space.ladders or space.forks):
        raise InputError("--keep leaves nothing to choose; keep fewer keys")
    import jax

    with hold_folder(folder):
        if folder is not None and not resume:
            require_empty(folder)  # another rehearsal may have begun there meanwhile
        earlier: list[Trial] = []
        place = (
            jax.default_backend() if on is None else "ray" if isinstance(on, str) else "an executor"
        )
        sittings = [sitting := {"version": __version__, "backend": place}]
        if folder is not None:
            head = {
                "schema": SCHEMA,
                "plan": plan.to_dict(),
                "stand-in": rows.fingerprint(),
                "seed": seed,
                "keep": sorted(keep),
                "federation": [len(real), sum(real), factor],  # --clients, --samples
            }
            earlier, sittings = read_trials(folder, head, sitting)
        trials = Trials(
            space,
            stage,
            rows,
            limit=runs,
            minutes=minutes,
            folder=folder,
            known=earlier,
            on_trial=on_trial,
        )
        if on_trial is not None:
            on_trial(trials)
        # Ray prints of lost workers.
        with open_executor(on) as trials.on, redirect_stdout(sys.stderr):
            choice = search_settings(space, trials, seed)
            fresh, unnoised = trials.run_fresh_seeds(choice.setting, choose_seeds(seed)[1])
        tested = count_test_rows(plan, real)
        prediction = predict_run(fresh, rows.telling, tested, unnoised, len(rows.test[1]))
        done = trials.list_trials()
        reasons = explain_choices(space, choice.setting, done, choice.seeds)
        provenance = describe_provenance(rows, reasons, len(done))
        result = Rehearsal(
            plan=space.apply_setting(choice.setting).replace(rehearsed=provenance),
            given=plan,
            space=space,
            setting=choice.setting,
            rows=rows,
            factor=factor,
            prediction=prediction,
            reasons=reasons,
            theory=trials.estimate_theory(choice.setting, choice.seeds[0]),
            trials=tuple(done),
            seeds=choice.seeds,
            complete=choice.complete,
            seed=seed,
            sittings=tuple(sittings),
        )
        if folder is not None:
            write_rehearsal(result, folder)
        return result


def describe_provenance(rows: StandIn, keys: Iterable[str], federations: int) -> str:
    """Describe how settings were chosen, for the plan and for the report of each of its runs."""
    made = {"drawn": "digits drawn anew", "synthetic": "synthetic rows of the schema"}
    return (
        f"{', '.join(keys)} by sottovoce rehearse on {made.get(rows.kind, rows.name)} "
        f"({federations} federations; fingerprint of the rows {rows.fingerprint()}); "
        f"cost in privacy: {rows.cost['sentence']}"
    )


def write_rehearsal(result: Rehearsal, folder: Path) -> None:
    """Write plan.toml, rehearsal.json and report.html, each whole or not at all."""
    content = json.dumps(result.to_json(), ensure_ascii=False, allow_nan=False, indent=1) + "\n"
    write_file(folder / "rehearsal.json", content.encode())
    write_file(folder / "report.html", render_rehearsal(result).encode())
    write_file(folder / "plan.toml", result.to_toml(folder).encode())


def relocate_plan(plan: Plan, folder: Path) -> Plan:
    """Return the plan with the paths of its table, files and model relative to a folder."""
    changes: dict[str, Any] = {}

    def relocate(file: str) -> str:
        return Path(os.path.relpath(file, folder)).as_posix()

    for key in ("path", "validation", "test"):
        if isinstance(file := getattr(plan.data, key), str):
            changes[f"data.{key}"] = relocate(file)
    own, (kind, _, network) = plan.model.own or "", (plan.model.features or "").partition(":")
    if own.rpartition(":")[0].endswith(".py"):
        changes["model.own"] = relocate(own)  # FILE.py:NAME
    if network:
        changes["model.features"] = f"{kind}:{relocate(network)}"
    return plan.replace(rehearsed=plan.rehearsed, **changes) if changes else plan


def run_command(
    path: Path | None,
    settings: Sequence[str],
    *,
    runs: int | None,
    minutes: float | None,
    out: Path | None,
    resume: bool,
    as_json: bool,
    quiet: bool,
    **options: Any,
) -> None:
    """Run the command with `options` of `rehearse`; print a summary or, if wanted, its JSON."""
    if resume and out is None:
        raise InputError("--resume continues the rehearsal in --out; name its folder")
    plan = Plan.load(path, settings)
    folder = out or Path("runs") / f"rehearsal-{datetime.now():%Y%m%d-%H%M%S}"
    show = ProgressLine(sys.stderr, quiet=quiet, at_once=True)
    if runs is None:
        runs = RUNS if minutes is None else 100_000
    try:
        result = rehearse(
            plan,
            runs=runs,
            minutes=minutes,
            out=folder,
            resume=resume,
            on_trial=partial(_show_progress, show),
            **options,
        )
    except KeyboardInterrupt:
        show.close()
        if (folder / JOURNAL).exists():
            text = "stopped; to continue, use the same command with --resume and --out"
            print(text, shlex.quote(str(folder)), file=sys.stderr, flush=True)
        raise
    show.close()
    if as_json:
        print(json.dumps(result.to_json(), ensure_ascii=False))
    else:
        print(format_summary(result, folder))


def format_summary(result: Rehearsal, folder: Path) -> str:
    """Return what the terminal shows at the end."""
    lines = [f"{key:<20} {_format_value(result.setting[key])}" for key in result.reasons]
    if " " in result.rounds:
        lines.append(f"{'rounds of the plan':<20} {result.rounds}")
    theory = result.theory
    sentences = [
        result.prediction.describe(),
        result.describe_doubt(),
        ": ".join(result.compare_with_given()),
        "" if theory is None else f"Theorem 2 prefers T = {theory['best_rounds']}",
        f"stand-in: {result.rows.about}",
        result.rows.trust,
        result.mixed or "",
        f"cost in privacy: {result.rows.cost['sentence']}",
        f"federations: {len(result.trials)}",
    ]
    wrapped = [textwrap.fill(text, 96, break_on_hyphens=False) for text in sentences if text]
    files = [f"plan   {folder / 'plan.toml'}", f"page   {folder / 'report.html'}"]
    files += [f"train  {_format_command(result.plan, folder / 'plan.toml')}"]
    return "\n".join([*lines, "", *wrapped, "", *files])


def _format_command(plan: Plan, file: Path) -> str:
    """Return the command that trains the plan; arrays are given from Python."""
    if plan.data.name != "arrays":
        return f"sottovoce train {shlex.quote(str(file))}"
    return (
        f"in Python: sottovoce.simulate(sottovoce.Plan.load({str(file)!r}), data=(X, y)), or save "
        f"x and y and name them: sottovoce train {shlex.quote(str(file))} --set data.path=x.npz"
    )


def _show_progress(line: ProgressLine, trials: Trials) -> None:
    """Show what happens before the first trial; afterwards count, best accuracy and time left."""
    if not line.due():
        return
    if not trials.ran:
        known = f"{len(trials.done)} federations are done; " if trials.done else ""
        line.say(f"{known}the first federation is compiled and run, which takes the longest")
        return
    private = [trial.value for trial in trials.done.values() if NOISE not in trial.setting]
    metric = next(iter(trials.done.values())).metric
    stage = next(reversed(trials.asked.values()))
    line.say(
        f"{len(trials.done)} federations, {stage}, best {format_gain(metric, max(private))}, "
        f"about {trials.estimate_seconds_left():.0f} s left at most"
    )


def render_rehearsal(result: Rehearsal) -> str:
    """Return the page of a rehearsal."""
    headline, toml = describe_choice(result), result.to_toml()
    content = json.dumps(result.to_json(), ensure_ascii=False, allow_nan=False)
    surfaces: list[tuple[str, str, Markup]] = []
    if {ROUNDS, RATE} & set(result.setting):
        title = f"{result.metric[0].upper()}{result.metric[1:]} over T and η"
        surfaces = [
            ("Loss over T and η", "loss", draw_surface(result, "loss")),
            (title, f"{result.metric}, per cent", draw_surface(result, "accuracy")),
        ]
    return render_page(
        "rehearsal.html.j2",
        title=headline,
        headline=headline,
        banner=result.rows.trust,
        version=__version__,
        result=result,
        tiles=_list_tiles(result),
        show=_format_value,
        surfaces=surfaces,
        files=[
            ("plan.toml", "plan.toml", "application/toml", toml),
            ("rehearsal.json", "rehearsal.json", "application/json", content),
        ],
        toml=toml,
    )


def describe_choice(result: Rehearsal) -> str:
    """Return the choice and what it should reach in one sentence."""
    plan, prediction = result.plan, result.prediction
    name = plan.data.name or "your table"
    features = f" on {plan.model.features} features" if plan.model.features else ""
    rounds = format_count(round(prediction.rounds), "round")
    model = f"{plan.model.name}{features}, {rounds} of η = {format_number(plan.local.rate)}"
    short = f"{prediction.describe('short')}; {result.rows.cost['short']}"
    return f"Rehearsed for {name}: {model}; {short}."


def _list_tiles(result: Rehearsal) -> list[tuple[str, str]]:
    prediction, theory, planned = result.prediction, result.theory, result.plan.rounds.rounds
    show = result.format_value
    mean = show(prediction.mean)
    if prediction.low is None or prediction.high is None:
        lost = format_difference(prediction.metric, prediction.lost)
        reached = [
            ("the budget costs, on the stand-in", lost if prediction.kind == "cost" else "unknown"),
            ("with and without its noise", f"{mean} / {show(prediction.mean + prediction.lost)}"),
        ]
    else:
        ends = f"{show(prediction.low)} – {show(prediction.high)}"
        reached = [("predicted on the stand-in", mean), ("95 % of runs on the stand-in", ends)]
    rounds = "rounds T, rehearsed"
    if round(prediction.rounds) != planned:
        rounds = f"rounds done, rehearsed (T₀ = {planned:,})"
    return [
        *reached,
        result.compare_with_given(),
        (rounds, format_whole(prediction.rounds)),
        ("rounds T, Theorem 2", "–" if theory is None else f"{theory['best_rounds']:,}"),
        ("cost in privacy", result.rows.cost["tile"]),
    ]


def find_points(result: Rehearsal, measure: str) -> dict[tuple[float, float], float]:
    """Return (T, η) → the best value found there by the first seed with the chosen model."""
    chosen, first = result.setting, result.seeds[0]
    by_point: dict[tuple[float, float], list[float]] = {}
    for trial in result.trials:
        value = trial.loss if measure == "loss" else trial.value
        is_alike = trial.seed == first and trial.setting.get("model") == chosen.get("model")
        if is_alike and value is not None:
            by_point.setdefault(_find_coordinates(trial.setting, result), []).append(value)
    best: Callable[[list[float]], float] = min if measure == "loss" else max
    return {point: best(values) for point, values in by_point.items()}


def _find_coordinates(setting: Any, result: Rehearsal) -> tuple[float, float]:
    return (
        float(setting.get(ROUNDS, result.plan.rounds.rounds)),
        float(setting.get(RATE, result.plan.local.rate)),
    )


def draw_surface(result: Rehearsal, measure: str) -> Markup:
    """Draw the points as numbers on a logarithmic map, darker where they are better."""
    points = find_points(result, measure)
    chosen = _find_coordinates(result.setting, result)
    values = np.array(list(points.values()))
    order = np.argsort(np.argsort(-values if measure == "loss" else values, kind="stable"))
    shade = 0.06 + 0.5 * order / max(1, len(values) - 1)
    best_first = [list(points)[i] for i in np.argsort(-order)]
    labelled = choose_labels([*([chosen] if chosen in points else []), *best_first])

    def paint(figure: Any) -> None:
        ax = figure.add_subplot()
        ax.set_xscale("log", base=2)
        ax.set_yscale("log", base=2)
        for ((T, eta), value), dark in zip(points.items(), shade, strict=True):
            ax.plot(T, eta, "o", markersize=19, color=BLUE, alpha=float(dark))
            if (T, eta) in labelled:
                shown = f"{value:.2f}" if measure == "loss" else f"{100 * value:.1f}"
                ax.text(T, eta, shown, ha="center", va="center", fontsize=8.6, color=INK)
        ax.plot(*chosen, "o", markersize=23, color=ORANGE, fillstyle="none", markeredgewidth=2)
        for axis, at in ((ax.xaxis, 0), (ax.yaxis, 1)):
            seen = sorted({point[at] for point in points})
            ticks = _space_ticks(seen)
            axis.set_ticks(ticks, [f"{tick:g}" for tick in ticks])
            (ax.set_xlim if at == 0 else ax.set_ylim)(seen[0] / 1.6, seen[-1] * 1.6)
        ax.minorticks_off()
        ax.set(xlabel="rounds T₀", ylabel="step η")
        tidy_axes(ax)

    what = "Loss" if measure == "loss" else f"{result.metric[0].upper()}{result.metric[1:]}"
    choice = f"chosen: {chosen[0]:g} rounds of {chosen[1]:g}"
    label = f"{what} at {len(points)} pairs of rounds and step; {choice}"
    return draw_svg(f"surface-{measure}", label, paint, size=(4.3, 3.3))


def choose_labels(points: Sequence[tuple[float, float]]) -> set[tuple[float, float]]:
    """Return the points whose numbers fit on the map without touching; the first ones go first."""
    logs = np.log2(np.array(points))
    # The limits are a factor 1.6 beyond the points; a number takes a tenth of the map's width.
    parts = logs / (np.ptp(logs, axis=0) + 2 * np.log2(1.6)) / (0.1, 0.075)
    labelled: list[int] = []
    for i in range(len(points)):
        if all(np.abs(parts[i] - parts[other]).max() >= 1 for other in labelled):
            labelled.append(i)
    return {points[i] for i in labelled}


def _space_ticks(values: Sequence[float]) -> list[float]:
    """Return values that are a factor 1.9 or more apart, so that their numbers do not touch.

    >>> _space_ticks([10.0, 14.0, 20.0, 40.0])
    [10.0, 20.0, 40.0]
    """
    ticks: list[float] = []
    for value in values:
        if not ticks or value >= 1.9 * ticks[-1]:
            ticks.append(value)
    return ticks
