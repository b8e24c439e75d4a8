"""`simulate` and `resume`: play one run on this machine and write its folder."""

from __future__ import annotations

import gc
import importlib
import itertools
import os
import platform
import sys
import time
import traceback
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Executor, Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, nullcontext
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias, cast

import jax
import numpy as np
from numpy.typing import ArrayLike

from sottovoce._version import __version__
from sottovoce.data.federated import NUMBERS, Given, Pair, Partition, is_pair, load_holdings
from sottovoce.data.files import hold_folder, require_empty
from sottovoce.data.streaming import is_stored
from sottovoce.errors import InputError, RunError, SottovoceError
from sottovoce.models.base import JaxModel, Params, flatten_parameters
from sottovoce.models.network import KEYS
from sottovoce.plan import Plan
from sottovoce.privacy import seeds as seeding
from sottovoce.reports.progress import ProgressBar, is_notebook
from sottovoce.runs import checkpoint, record
from sottovoce.runs.checkpoint import OnRound, ServerState, describe_last_round
from sottovoce.runs.integrations import Tracker, require_package
from sottovoce.runs.record import Record, Status
from sottovoce.runs.trained import Trained
from sottovoce.server import forecast, rounds
from sottovoce.server.federation import (
    NO_PARTS,
    Answers,
    Federation,
    Parts,
    UserMetric,
    answer_rows,
    answer_together,
    build,
    judge_model,
    measure_model,
    score_model,
)
from sottovoce.server.rounds import Interrupts, check_interrupts
from sottovoce.simulation import accelerator, compiled, streamed
from sottovoce.simulation.compiled import AfterRound, BatchRun, stack_models

# A plan, the path of its TOML file, or its keys.
PlanLike: TypeAlias = Plan | str | Path | Mapping[str, Any] | None
Job: TypeAlias = tuple[Plan, int]  # a run of a sweep: its plan and seed


class Callbacks:
    """Calls the user's functions: each `on_round` with a `RoundDone`, each `on_end` at the end."""

    def __init__(
        self, on_round: OnRound | None, on_end: OnEnd | None, objects: Sequence[Any] = ()
    ) -> None:
        self.on_round = [on_round] if on_round is not None else []
        self.on_end = [on_end] if on_end is not None else []
        bound = "objects with on_round(done) or on_end(run)"
        if isinstance(objects, str) or not isinstance(objects, Iterable):
            raise InputError.of("callbacks", objects, f"a list of {bound}", "write [callback]")
        objects = list(objects)  # it is gone through twice
        self.trackers = [callback for callback in objects if isinstance(callback, str)]
        for callback in objects:
            if isinstance(callback, str):
                continue
            if isinstance(callback, type):
                remedy = f"make an object of it, as {callback.__name__}()"
                raise InputError.of("callbacks", callback, bound, remedy)
            methods = getattr(callback, "on_round", None), getattr(callback, "on_end", None)
            if methods == (None, None):
                raise InputError.of("callbacks", callback, bound, "or pass on_round=, on_end=")
            self.on_round += [call for call in methods[:1] if call is not None]
            self.on_end += [call for call in methods[1:] if call is not None]
        for call in (*self.on_round, *self.on_end):
            if not callable(call):
                raise InputError.of("callbacks", call, "functions", "give a function of one value")

    def follow(self, plan: Plan, folder: Path | None) -> None:
        """Make the trackers that are named by a word."""
        for name in self.trackers if compiled.is_first_host() else []:
            tracker = Tracker(name, plan.to_dict(), folder, "callbacks")
            self.on_round.append(tracker.on_round)
            self.on_end.append(tracker.on_end)


def adapt_plan(plan: Plan, given: Given | None, model: Any, parts: Parts = NO_PARTS) -> Plan:
    """Return the plan changed to fit what is given from Python: arrays, a model, other parts."""
    plan.data.require_other_rows()
    changes: dict[str, object] = {}
    if plan.parts is None and (names := parts.list_names()):
        changes["parts"] = names
    if parts.schedule is not None:
        changes["rounds.rounds"] = parts.schedule.rounds
    if model is not None:
        changes["model.name"] = "custom"
    if given is not None:
        changes |= _describe_arrays(plan, given)
    return plan.replace(**changes) if changes else plan


def _collect_arrays(data: Any, validation: Any, test: Any, person: Any = None) -> Given | None:
    """Return the arrays that are given from Python; None where there are none."""
    if data is not None:
        if not is_pair(data):
            data = list(data) if isinstance(data, Iterable) else []  # it is gone through twice
            if not data:
                bound = "(X, y), or a list with one for each client"
                raise InputError.of("data", "no arrays", bound, "give rows and their labels")
        return Given(data, validation, test, person)
    others = {"validation": validation, "test": test, "person": person}
    for name in [name for name, value in others.items() if value is not None]:
        raise InputError(f"{name} is given together with data; pass data=(X, y) too")
    return None


def _describe_arrays(plan: Plan, given: Given) -> dict[str, object]:
    changes: dict[str, object] = {}
    if plan.data.name != "arrays":
        changes["data.name"] = "arrays"
        if is_pair(given.train):
            tenth = max(1, _count_rows(given.train, given.person) // 10)
            changes |= {"data.validation": tenth, "data.test": tenth}
    for name, pair in (("validation", given.validation), ("test", given.test)):
        if pair is not None:
            changes[f"data.{name}"] = _count_rows(pair)
    if not is_pair(given.train):
        sizes = [_count_rows(pair) for pair in given.train]
        changes |= {"data.clients": len(sizes), "data.split": "sizes", "data.samples": sizes}
    return changes


def _count_rows(pair: Any, person: Any = None) -> int:
    """Return the number of rows, or of persons, who are dealt whole."""
    try:
        return max(1, len(pair[1] if person is None else np.unique(np.asarray(person))))
    except (TypeError, LookupError):
        return 1  # not a pair: `build` raises the error


CHECKPOINT_SECONDS = 0.5  # between checkpoints; a run can be resumed from any of them


OnEnd: TypeAlias = Callable[[Trained], None]


def simulate(
    plan: PlanLike = None,
    data: Pair | Sequence[Pair] | None = None,
    *,
    validation: Pair | None = None,
    test: Pair | None = None,
    person: ArrayLike | None = None,
    model: Any = None,
    seed: int | None = None,
    schedule: Any = None,
    optimizer: Any = None,
    partition: Partition | None = None,
    metrics: Mapping[str, UserMetric] | None = None,
    on_round: OnRound | None = None,
    on_end: OnEnd | None = None,
    callbacks: Sequence[Any] = (),
    progress: bool | None = None,
    out: str | Path | None = None,
) -> Trained:
    """Run one federation to its end and return the trained model with its record.

    `plan` is a `Plan`, the path of a TOML file or a dictionary; without one it is the embedded
    plan. `data` is (X, y), to be split as the plan says, or a list with one (X, y) per client,
    which needs `validation` and `test` beside it. `person` has the id of each row's person:
    nobody is both trained and tested on, and with `local.unit = "person"` all rows of a person are
    protected together. `model` is one of your own: a PyTorch module, `TorchModel`, or
    `sottovoce.custom`. `out` is a new or empty folder for the run's files.

    Parts of your own get public values only, so that they cost no privacy; the record's plan names
    them, and is refused without them. `schedule` has `rounds`, `round(progress)` and
    `advance(progress, loss)` (`sottovoce.schedules.base`). `optimizer` is an optax transformation;
    its gradient is the model minus the averaged upload. `partition(labels, clients, rng)` returns
    the client of each row. `metrics` are functions of (labels, scores) of the test rows by name;
    scores are probabilities, or predicted numbers.

    `on_round(done)` is called after each round with a `RoundDone`, `on_end(run)` when the run has
    ended or was interrupted; `callbacks` are objects with one of these or both.
    The words mlflow, tensorboard and wandb among them write the numbers there, too.
    `progress` shows a bar; by default in a notebook only. A KeyboardInterrupt leaves a valid record
    and a checkpoint in `out`.

    >>> trained = simulate(Plan(rounds={"schedule": "fixed", "rounds": 2}), seed=1)
    >>> trained.rounds_used, trained.record["status"]
    (2, 'finished')
    """
    if is_notebook() if progress is None else progress:
        callbacks = [*callbacks, ProgressBar()]
    plan, calls = Plan.read(plan), Callbacks(on_round, on_end, callbacks)
    parts = Parts(schedule, optimizer, partition, metrics or {})
    seeding.refuse_seed(plan.noise, seed)
    seed = seeding.draw_seed() if seed is None else seeding.check_seed(seed)
    given = _collect_arrays(data, validation, test, person)
    plan = adapt_plan(plan, given, model, parts)
    folder = None if out is None or not compiled.is_first_host() else require_empty(Path(out))
    calls.follow(plan, folder)
    with Interrupts() as interrupts:
        run = start_run(build(plan, seed=seed, data=given, model=model, parts=parts), seed)
        interrupts.check()
        run.federation.log_advice()
        with hold_folder(folder):
            if folder is not None:
                require_empty(folder)  # another run may have begun there meanwhile
            return play_run(run, calls, folder, interrupts)


def resume(
    out: str | Path,
    *,
    data: Pair | Sequence[Pair] | None = None,
    validation: Pair | None = None,
    test: Pair | None = None,
    person: ArrayLike | None = None,
    model: Any = None,
    schedule: Any = None,
    optimizer: Any = None,
    partition: Partition | None = None,
    metrics: Mapping[str, UserMetric] | None = None,
    on_round: OnRound | None = None,
    on_end: OnEnd | None = None,
    callbacks: Sequence[Any] = (),
) -> Trained:
    """Resume a run that was stopped; on a CPU it ends in the very same model.

    Data, model and parts of your own are passed again, as to `simulate`. With secure noise the
    model is another one: the round that was under way is debited and asked again.
    """
    calls = Callbacks(on_round, on_end, callbacks)
    parts = Parts(schedule, optimizer, partition, metrics or {})
    folder = Path(out)
    checkpoint.require_stopped(folder)
    given = _collect_arrays(data, validation, test, person)
    written = folder if compiled.is_first_host() else None
    with Interrupts() as interrupts, hold_folder(written):
        # Only now, after another process let go of the folder.
        state, arrays, header, memory = checkpoint.load(folder)
        plan, seed = Plan(**header["plan"]), int(header["seed"])
        calls.follow(plan, written)
        if given is None and plan.data.name == "arrays":
            remedy = "arrays are given from Python, as resume(folder, data=(X, y))"
            raise InputError.of("data", None, "the rows that the run was begun with", remedy)
        federation = build(plan, seed=seed, data=given, model=model, parts=parts)
        by_rows = not header["data"].startswith(NUMBERS)
        if federation.held.fingerprint(rows=by_rows) != header["data"]:
            raise RunError(
                f"the data differ from those that {folder} was begun with; a budget belongs to its "
                "data, so resume with the same, or start a new run"
            )
        federation.log_advice()
        run = BatchRun(federation, seed, (state, *stack_models(federation.model, arrays, memory)))
        return play_run(run, calls, written, interrupts, header)


def play_run(
    run: BatchRun,
    calls: Callbacks,
    folder: Path | None,
    interrupts: Interrupts,
    earlier: Mapping[str, Any] = MappingProxyType({}),
) -> Trained:
    """Play a run to its end and write its folder; `earlier` is the header of its last session."""
    compiled.check_hosts(run.federation, run.seed)
    started = earlier.get("started")
    began = datetime.now(UTC) if started is None else datetime.fromisoformat(started)
    # With a hash of the rows, whoever has the folder and all rows but one could test guesses of
    # that one; a salt would lie beside it and not help. So a run with secure noise stores no
    # hash: its debits are in the checkpoint, and hold for whichever rows it is resumed with. A
    # simulation stores it: with the seed beside it anyone can remove its noise anyway.
    secure = run.federation.plan.noise == "secure"
    header: dict[str, Any] = {
        "plan": run.federation.plan.to_dict(),
        "seed": run.seed,
        "data": run.federation.held.fingerprint(rows=not secure) if folder is not None else "",
        "not_covered": list(run.federation.not_covered(*earlier.get("not_covered", ()))),
        "started": began.isoformat(),
    }
    saved = time.monotonic()

    def save_checkpoint(state: ServerState) -> None:
        if folder is not None:
            params, memory = run.name_models()
            checkpoint.save(folder, state, params, header, memory)

    interrupts.check()
    if folder is not None:
        record.write_rounds(folder, run.state)
    save_checkpoint(run.state)

    def after_round(run: BatchRun) -> None:
        nonlocal saved
        done = describe_last_round(run.state, run.federation)
        if done is None:
            return
        if folder is not None:
            record.append_round(folder, run.state)
            if time.monotonic() - saved > CHECKPOINT_SECONDS:
                save_checkpoint(run.state)
                saved = time.monotonic()
        for on_round in calls.on_round:
            on_round(done)
        interrupts.check()

    def write_outcome(status: Status) -> Trained:
        save_checkpoint(run.state)
        params = run.final_model
        result = describe_run(run, status, began, header["not_covered"])
        if folder is not None:
            record.write_run(folder, result, run.federation, run.state, flatten_parameters(params))
            if status == "finished":
                (folder / checkpoint.NAME).unlink()
        trained = Trained(result.to_dict(), run.federation.model, params, folder)
        for on_end in calls.on_end:
            on_end(trained)
        return trained

    # The debits are on disk before anything is released: a crash must not return them.
    played = play_batch([run], after_round, before_release=save_checkpoint)
    return rounds.play_to_end(played, write_outcome)


def play_batch(
    batch: list[BatchRun],
    after_round: AfterRound | None = None,
    *,
    guess: bool = True,
    before_release: Callable[[ServerState], None] = lambda debited: None,
) -> Iterator[None]:
    """Play a batch of runs round by round, with the engine that fits them.

    `guess`: an accelerator may begin rounds before the losses of earlier ones are known.
    """
    first = batch[0].federation
    engine: Callable[[BatchRun], rounds.Engine]
    if first.plan.noise == "secure":
        from sottovoce.simulation import secure  # it loads what a device needs

        engine = partial(secure.SecureEngine, before_release=before_release)
    elif not isinstance(first.model, JaxModel):
        engine = streamed.SummingEngine
    elif is_stored(first.held.train.x):  # the rows stay in their file
        engine = streamed.StreamedEngine
    else:
        # A CPU gains nothing from beginning rounds early.
        guess = guess and jax.default_backend() != "cpu" and accelerator.may_go_ahead(batch)
        play = accelerator.play_ahead if guess else compiled.play_compiled
        yield from play(first.model, batch, after_round)
        return
    for run in batch:
        yield from rounds.play_rounds([run], engine(run), after_round)


class First(NamedTuple):
    """A first model, in numpy, and its scores."""

    params: Params
    loss: float
    accuracy: float
    signal: float | None  # the loss that steers the schedule, if it is known


def start_run(
    federation: Federation, seed: int, scored: dict[tuple[Any, ...], First] | None = None
) -> BatchRun:
    """Return a run before its first round; refuse what cannot run, before anything is written.

    `scored` are first models by model, seed, rows and signal: runs that share these share one.
    """
    plan, scored = federation.plan, {} if scored is None else scored
    needs_jax = plan.noise == "simulated" and plan.rows_per_person
    if needs_jax and not isinstance(federation.model, JaxModel):
        bound = "record or client for a model that is not JAX's"
        raise InputError.of("local.unit", "person", bound, "or set noise = secure")
    key = (federation.model, seed, id(federation.held), plan.server.signal, plan.metric)
    if key not in scored:
        scored[key] = _score_first_model(federation, seed)
    start = scored[key]
    if federation.parts.metrics:  # one that fails must not fail after the last round
        measure_model(federation, start.params)
    tank = federation.tank()
    begun = forecast.start_schedule(federation, start.params, start.signal, tank=tank, seed=seed)
    state = rounds.make_first_state(
        federation, start.loss, start.accuracy, start.signal, tank, *begun
    )
    params = flatten_parameters(start.params)
    models = stack_models(federation.model, params, federation.finish.begin(params))
    return BatchRun(federation, seed, (state, *models))


def _score_first_model(federation: Federation, seed: int) -> First:
    params = federation.model.draw_parameters(seed)
    held, signal = federation.held, federation.plan.server.signal
    loss, accuracy, public = judge_model(federation, params)
    signal_loss = {"public": public, "clients": None}.get(signal, 0.0)
    if signal == "raw":
        signal_loss, _ = score_model(federation.model, params, held.train)
    return First(jax.device_get(params), loss, accuracy, signal_loss)


Final: TypeAlias = tuple[Params, Answers]  # the model that a run returns, and what it says


def describe_run(
    run: BatchRun,
    status: Status,
    began: datetime,
    not_covered: Sequence[str] = (),
    final: Final | None = None,
) -> Record:
    """Return the record of a run as it stands; its model is evaluated here, unless it is known."""
    federation = run.federation
    params, answers = (run.final_model, None) if final is None else final
    return Record.of_run(
        federation,
        run.state,
        flatten_parameters(params),
        seed=None if federation.plan.noise == "secure" else run.seed,
        status=status,
        started=began,
        measured=measure_model(federation, params, answers),
        identities=[{"name": name} for name in federation.held.names],
        not_covered=(*not_covered, *(["unvaulted"] if federation.plan.noise == "secure" else [])),
        ran_on=describe_place(federation),
    )


TOGETHER = 32  # runs in one compiled round: beyond that an accelerator is busy anyway
AT_ONCE = 2  # batches: one is on the accelerator while the host keeps the other's books
DEALERS = 8  # threads that deal rows to the clients of several seeds


def simulate_many(
    plans: Sequence[Plan],
    *,
    seeds: Sequence[int],
    data: Pair | Sequence[Pair] | None = None,
    validation: Pair | None = None,
    test: Pair | None = None,
    person: ArrayLike | None = None,
    model: Any = None,
    together: bool | None = None,
    on: str | Executor | None = None,
) -> list[Trained]:
    """Simulate every plan with every seed, plan after plan.

    On an accelerator runs that share data, model and signal are trained together in one compiled
    round; on a CPU, whose cores one run keeps busy, one after another. `together` overrides that.
    Each run equals the one that `simulate` makes of its plan and seed, up to rounding.

    `on` spreads the runs over other processes: "ray" over this machine (or the cluster that
    RAY_ADDRESS names), "ray:ADDRESS" over a cluster, or an `Executor` of concurrent.futures.

    An error, and a KeyboardInterrupt, has the runs that ended as `finished`, by their index.

    >>> plan = Plan(rounds={"schedule": "fixed", "rounds": 2})
    >>> runs = simulate_many([plan, plan.replace("privacy.epsilon=1")], seeds=[1, 2])
    >>> [run.record["seed"] for run in runs]
    [1, 2, 1, 2]
    """
    given = _collect_arrays(data, validation, test, person)
    how: Any = {"given": given, "model": model, "together": together, "on": on}
    return _gather_runs(simulate_each(plans, seeds=seeds, **how))


def _gather_runs(sweep: Iterator[tuple[int, Trained]]) -> list[Trained]:
    runs: dict[int, Trained] = {}
    try:
        runs.update(sweep)
    except BaseException as error:
        cast(Any, error).finished = runs
        raise
    if not runs:
        raise InputError("plans and seeds must have one entry or more, got none; list them")
    return [runs[i] for i in range(len(runs))]


def simulate_each(
    plans: Sequence[Plan],
    *,
    seeds: Sequence[int],
    given: Given | None = None,
    model: Any = None,
    together: bool | None = None,
    on: str | Executor | None = None,
) -> Iterator[tuple[int, Trained]]:
    """Yield the runs of `simulate_many` with their index in its list, as soon as they are done.

    For long sweeps, which store little of each run and lose nothing of the others if one fails.

    >>> plan = Plan(rounds={"schedule": "fixed", "rounds": 1})
    >>> sorted(i for i, run in simulate_each([plan], seeds=[1, 2]))
    [0, 1]
    """
    plans = [adapt_plan(plan, given, model) for plan in plans]
    jobs = list(itertools.product(plans, [seeding.check_seed(seed) for seed in seeds]))
    with open_executor(on) as executor:
        if executor is None:
            yield from _play_jobs(jobs, given, model, together)
        else:
            yield from _spread_jobs(jobs, given, model, together, executor)


def _play_jobs(
    jobs: Sequence[Job], given: Given | None, model: Any, together: bool | None
) -> Iterator[tuple[int, Trained]]:
    """Play the runs of a sweep in this process."""
    together = jax.default_backend() != "cpu" if together is None else together
    features = [tuple(getattr(plan.model, key) for key in KEYS) for plan, _ in jobs]
    rows_of = [(p.data, p.regression, p.rows_per_person, seed) for p, seed in jobs]
    places = list(zip(features, rows_of, strict=True))  # runs with the same share their holdings
    first: dict[Any, Job] = {}
    for place, job in zip(places, jobs, strict=True):
        first.setdefault(place, job)
    with ThreadPoolExecutor(DEALERS, "rows") as threads:
        # Given rows are copied, which threads do faster; others may need JAX, and its settings.
        spread = threads.map if together and given is not None else map
        rows = spread(lambda job: load_holdings(job[0], seed=job[1], data=given), first.values())
        held = dict(zip(first, rows, strict=True))
    runs = [
        (build(plan, seed=seed, data=given, model=model, held=held[place]), seed)
        for place, (plan, seed) in zip(places, jobs, strict=True)
    ]
    # All batches of a sweep are played in the same way, because each way needs a compilation.
    guess = not together or all(federation.schedule.steady for federation, _ in runs)
    groups = _group_runs(runs, TOGETHER if together else 1)
    waiting = (_play_group(group, runs, guess=guess) for group in groups)
    live = list(itertools.islice(waiting, AT_ONCE if together else 1))
    over: deque[Future[tuple[int, Trained]]] = deque()
    # An accelerator must not wait for records, so another thread makes them. It does not use JAX,
    # whose settings are this thread's.
    with ThreadPoolExecutor(1, "records") as thread:
        freezes = together and not gc.get_freeze_count()
        if freezes:  # Python would look for garbage in all rows and programs again and again
            gc.freeze()
        try:
            while live or over:
                for batch in tuple(live):
                    if ended := next(batch):
                        live.remove(batch)
                        live += itertools.islice(waiting, 1)
                        over.extend(thread.submit(_finish_run, *run) for run in ended)
                while over and (over[0].done() or not (together and live)):
                    yield over.popleft().result()
        except (Exception, KeyboardInterrupt):
            # What is done is not lost.
            yield from (task.result() for task in over if task.exception() is None)
            raise
        finally:
            thread.shutdown(wait=False, cancel_futures=True)
            if freezes:
                gc.unfreeze()


Ended: TypeAlias = tuple[int, BatchRun, datetime, Final]


def _play_group(
    group: list[int], runs: list[tuple[Federation, int]], *, guess: bool
) -> Iterator[list[Ended]]:
    """Play these runs together; yield nothing after each round, and the runs at the end."""
    known: dict[Any, First] = {}
    batch, began = [start_run(*runs[i], known) for i in group], datetime.now(UTC)
    for _ in play_batch(batch, guess=guess):
        yield []
    finals = _answer_batch(batch)
    yield [(i, run, began, final) for i, run, final in zip(group, batch, finals, strict=True)]


def _answer_batch(batch: list[BatchRun]) -> list[Final]:
    """Return the final models of these runs; those on the same rows are evaluated together."""
    finals: dict[int, Final] = {}
    for held in {id(run.federation.held): run.federation.held for run in batch}.values():
        members = [k for k, run in enumerate(batch) if run.federation.held is held]
        first, models = batch[members[0]].federation, [batch[k].final_model for k in members]
        if len(batch) > 1 and isinstance(first.model, JaxModel):
            answers = answer_together(first, models)
        else:
            answers = [answer_rows(first, params) for params in models]
        finals |= zip(members, zip(models, answers, strict=True), strict=True)
    return [finals[k] for k in range(len(batch))]


def _finish_run(i: int, run: BatchRun, began: datetime, final: Final) -> tuple[int, Trained]:
    run_record = describe_run(run, "finished", began, final=final)
    return i, Trained(run_record.to_dict(), run.federation.model, final[0])


def _group_runs(runs: list[tuple[Federation, int]], size: int) -> Iterator[list[int]]:
    """Yield which runs share a compiled round: those alike in data, rows' shape, model and signal.

    Runs on one split read the same rows, which an accelerator then reads once for all: where a
    split has enough runs, they do not share a round with other splits. Long runs come first,
    together.
    """
    groups: dict[Any, dict[int, list[int]]] = {}
    for i, (federation, _) in enumerate(runs):
        plan = federation.plan
        server = plan.server.signal, plan.metric, federation.finish.idle
        local = plan.local.steps, federation.recipe.class_weights is None, plan.noise
        held = federation.held
        shapes = held.train.x.shape, held.validation.x.shape  # of persons, they follow the seed
        alike = (plan.data, federation.model, local, server, federation.finish.memory_names)
        groups.setdefault((alike, shapes), {}).setdefault(id(held), []).append(i)
    for splits in groups.values():
        pools = list(splits.values())
        if min(map(len, pools)) < size // 4:
            pools = [[i for pool in pools for i in pool]]
        for pool in pools:
            if size > 1:
                pool = sorted(pool, key=lambda i: -runs[i][0].schedule.start(None).horizon)
            while pool:
                yield pool[:size]
                pool = pool[size:]


def describe_place(federation: Federation) -> str:
    """Return where a run is computed: the kind and number of devices, and Ray's node."""
    device, mesh = jax.devices()[0], compiled.choose_mesh(federation)
    ray: Any = sys.modules.get("ray")
    name = f"{platform.machine()} CPU" if device.platform == "cpu" else device.device_kind
    name = name if mesh is None else f"{mesh.size} × {name}"
    if ray is None or not ray.is_initialized():
        return name
    return f"{name}, Ray node {ray.get_runtime_context().get_node_id()[:8]}"


def play_portion(
    jobs: Sequence[Job], given: Given | None, model: Any, together: bool | None, version: str
) -> list[Trained] | SottovoceError:
    """Play some runs of a sweep in a worker; an error comes back as a value, however carried."""
    try:
        if version != __version__:
            remedy = "install one version on all machines"
            return InputError.of("sottovoce of a worker", __version__, version, remedy)
        return _gather_runs(_play_jobs(jobs, given, model, together))
    except Exception as error:
        return _name_failure(error)


def _name_failure(error: Exception) -> SottovoceError:
    """Return one of our errors as it is, and another, of an executor or a model of the user's."""
    if isinstance(error, SottovoceError):
        return error
    named = RunError(f"a worker failed ({error!r:.300}); what is stored is kept")
    cast(Any, named).finished = getattr(error, "finished", {})
    named.add_note("".join(traceback.format_exception(error)))  # a worker's cause does not travel
    return named


def _spread_jobs(
    jobs: Sequence[Job], given: Given | None, model: Any, together: bool | None, executor: Executor
) -> Iterator[tuple[int, Trained]]:
    """Yield the runs of a sweep as workers finish them: one by one, or those trained together."""
    failed: SottovoceError | None = None  # is raised after what others still finish
    size = getattr(executor, "together", 1) if together is None else TOGETHER if together else 1
    sent: dict[Future[list[Trained] | SottovoceError], range] = {}
    try:
        for k in range(0, len(jobs), size):
            work = jobs[k : k + size]
            task = executor.submit(play_portion, work, given, model, together, __version__)
            sent[task] = range(k, k + len(work))
        while sent:
            for task in wait(sent, timeout=0.2, return_when=FIRST_COMPLETED).done:
                indices = sent.pop(task)
                try:
                    portion = task.result()
                except Exception as error:
                    portion = _name_failure(error)
                if isinstance(portion, SottovoceError):
                    failed = failed or portion
                    sent = {other: some for other, some in sent.items() if not other.cancel()}
                    for i, trained in getattr(portion, "finished", {}).items():
                        yield indices[i], trained
                else:
                    yield from zip(indices, portion, strict=True)
            check_interrupts()
        if failed is not None:
            raise failed
    finally:
        for task in sent:
            task.cancel()


def open_executor(on: str | Executor | None) -> AbstractContextManager[Executor | None]:
    """Open what `on` names until the end of the context; an executor that is given stays open."""
    return RayExecutor(on) if isinstance(on, str) else nullcontext(on)


class RayExecutor(Executor):
    """Calls functions on a Ray cluster that is named, or on one for this machine alone."""

    def __init__(self, on: str) -> None:
        kind, _, address = on.partition(":")
        if kind != "ray":
            remedy = "leave it out to compute in this process"
            raise InputError.of("on", on, "ray, or ray:ADDRESS of a cluster", remedy)
        require_package("ray", f"on {on}", "ray")
        address = on if address.startswith("//") else address or os.environ.get("RAY_ADDRESS", "")
        if not address and "ray" not in sys.modules:
            # Read when it is imported: without this, Ray on Linux listens on every interface.
            os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        self.ray = ray = importlib.import_module("ray")
        self.is_ours = not ray.is_initialized()
        if self.is_ours:
            if not address and "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER" not in os.environ:
                raise InputError(
                    "ray was imported before it could be kept off the network; call ray.init first"
                )
            how: dict[str, Any] = {} if address else {"include_dashboard": False}
            try:
                with warnings.catch_warnings():  # JAX warns of the processes that Ray starts
                    warnings.simplefilter("ignore", RuntimeWarning)
                    ray.init(address or "local", log_to_driver=False, logging_level="ERROR", **how)
            except (ConnectionError, ValueError, RuntimeError) as error:
                remedy = f"Ray says: {error}"
                raise InputError.of("on", on, "a cluster that answers", remedy) from error
        gpus = ray.cluster_resources().get("GPU", 0)
        self.together = TOGETHER if gpus else 1
        # Ray calls a function again whose worker died.
        self.call = ray.remote(num_cpus=1, num_gpus=1 if gpus else 0, max_retries=3)(_call)
        self.shared: dict[int, tuple[Any, Any]] = {}  # arrays, once for all tasks

    def submit(self, function: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Call a function in a worker."""
        for arg in args:
            if isinstance(arg, Given) and id(arg) not in self.shared:
                self.shared[id(arg)] = (arg, self.ray.put(arg))
        args = tuple(self.shared.get(id(arg), (None, arg))[1] for arg in args)
        task = self.call.remote(function, *args, **kwargs)
        future: Future[Any] = task.future()
        future.add_done_callback(
            lambda done: self.ray.cancel(task, force=True) if done.cancelled() else None
        )
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Leave the cluster, or end the one on this machine."""
        if self.is_ours:
            self.ray.shutdown()


def _call(function: Any, *args: Any, **kwargs: Any) -> Any:
    return function(*args, **kwargs)
