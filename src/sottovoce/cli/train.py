"""`sottovoce train`: load the plan, show the rounds, write the folder, print the result."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sottovoce.data.files import require_empty
from sottovoce.errors import InputError
from sottovoce.plan import Plan
from sottovoce.privacy import seeds
from sottovoce.reports import progress
from sottovoce.runs import checkpoint
from sottovoce.runs.checkpoint import RoundDone
from sottovoce.runs.integrations import Tracker

IN_SIMULATION_ONLY = (
    "Simulation of what no deployment does ({}); do not publish this model as private."
)

CPU_DEVICES = 4  # for a cnn
SECURE = (
    "Secure noise: every client's uploads are released as a device would release them; "
    "whoever runs this command sees the clients' data, and is trusted with them."
)


def train(
    path: Path | None,
    settings: Sequence[str],
    *,
    out: Path | None = None,
    seed: int | None = None,
    resume: bool = False,
    as_json: bool = False,
    quiet: bool = False,
    log: Sequence[str] = (),
) -> None:
    """Run a plan, or continue a run, and print the result for people or as JSON."""
    stream = sys.stderr if as_json else sys.stdout
    if resume:
        folder = checkpoint.require_out(out)
        if path is not None or settings or seed is not None:
            raise InputError(
                "--resume continues with the plan and the seed of the run; "
                "leave PLAN, --set and --seed out"
            )
        record = checkpoint.load(folder)[2]
        plan = Plan(**record["plan"])
    else:
        plan = Plan.load(path, settings)
        plan.data.require_other_rows()
        if plan.needs_python:
            raise InputError(
                "data.name = arrays, model.name = custom and parts are given from Python; use "
                "sottovoce.simulate, or name a dataset and a model (or where yours is: model.own)"
            )
        if seed is not None:
            seeds.refuse_seed(plan.noise, seed)
            seeds.check_seed(seed)
        folder = out if out is not None else progress.name_new_folder(plan)
        require_empty(folder)
    trackers = [Tracker(name, plan.to_dict(), folder) for name in log]
    if plan.data.path is not None and not resume:
        progress.announce_reading(plan.data.path, quiet=quiet)
        progress.print_findings(plan, path)

    if not resume or str(record.get("ran_on")).startswith(f"{CPU_DEVICES} × "):
        _divide_processor(plan)
    # JAX takes a second to load, so it is loaded only now, after a bad plan was refused.
    from sottovoce.reports.run import write_report
    from sottovoce.simulation import simulate as engine

    waiting = "compiling the round …"
    if plan.rounds.schedule == "forecast" and not resume:
        waiting = "forecasting rounds and steps on public rows …"
    show = progress.choose_display(stream, quiet=quiet, waiting=waiting)
    heading = [_describe_run(plan)]  # printed with the first round, not before a refusal

    def show_round(round_done: RoundDone) -> None:
        while heading:
            show.say(heading.pop())
        show.round(round_done)

    try:
        with show:
            watchers: Any = {"on_round": show_round, "callbacks": trackers}
            if resume:
                run = engine.resume(folder, **watchers)
            else:
                run = engine.simulate(plan, seed=seed, out=folder, **watchers)
        page = write_report(folder)
    except KeyboardInterrupt:
        if (folder / "record.json").exists():
            print(checkpoint.describe_stop(folder, "train"), file=sys.stderr, flush=True)
            write_report(folder)
        raise
    if as_json:
        print(json.dumps(run.record, ensure_ascii=False))
    else:
        show.say("\n".join([*heading, progress.summarize_run(run.record, folder, page)]))


def _divide_processor(plan: Plan) -> None:
    """Have JAX make several devices of the CPU for a cnn; they divide its rows.

    A row's product for the cnn's kernel is too small to be divided among threads. There are as many
    for any number of cores, so that the last bits of the model do not depend on it.
    """
    is_chosen = "host_platform_device_count" in os.environ.get("XLA_FLAGS", "")
    if plan.model.name == "cnn" and not is_chosen and "jax" not in sys.modules:
        os.environ.setdefault("JAX_NUM_CPU_DEVICES", str(CPU_DEVICES))


def _describe_run(plan: Plan) -> str:
    """Return the sentence that says what kind of run this is."""
    if plan.noise == "secure":
        return SECURE
    counts = plan.data.counts_classes and plan.regression is None
    label = plan.data.label or "y"
    why = {
        "the paper's noise is too little": plan.privacy.calibration == "paper",
        "nobody pays for raw losses": plan.server.signal == "raw",
        "nobody pays for the median of raw norms": plan.local.clip == "median",
        "bounds or categories are taken from the rows: list all in data.columns": plan.data.infer,
        f'classes are counted on the rows: list them, as {label} = ["a", "b"] in data.columns, or '
        "name a file of test rows": counts and not plan.data.infer,
        "validation or test rows belong to those protected: name files for them": (
            plan.evaluates_on_unit
        ),
    }
    causes = [cause for cause, holds in why.items() if holds]
    return IN_SIMULATION_ONLY.format("; ".join(causes)) if causes else progress.SIMULATED
