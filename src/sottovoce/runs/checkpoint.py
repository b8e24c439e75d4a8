"""The state of a server after a round: one frozen value, saved whole or not at all.

`train --resume` and every other engine go on from it. A simulation on a CPU is a function of plan,
seed and state, so that going on from any checkpoint ends in the same model.
"""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from sottovoce.data.files import DAMAGE, read_npz, why, write_npz
from sottovoce.errors import InputError, RunError
from sottovoce.models.metrics import restore_metric
from sottovoce.privacy.tank import Tank
from sottovoce.schedules.base import Progress
from sottovoce.schedules.optimizer import NO_MARKS, OPTIMIZER, Marks, Memory

if TYPE_CHECKING:
    from sottovoce.runs.record import RoundEntry
    from sottovoce.server.federation import Federation

# The trace has one line for each round, with a number for each client: σ of the first step, and
# what was booked. Of very many clients one line stands for all rounds, because a line a round would
# fill the memory: releases with σ_1, σ_2, … of the same sensitivity are worth as much as one with
# σ = (Σ 1/σ_t²)^(−1/2), and debits add up.
TraceLine: TypeAlias = NDArray[np.float64]


def extend_trace(
    lines: tuple[TraceLine, ...],
    newest: TraceLine,
    join: Callable[[TraceLine, TraceLine], TraceLine],
) -> tuple[TraceLine, ...]:
    """Return the trace with the newest round: one more line, or of many clients one line for all.

    >>> len(extend_trace((np.zeros(3),), np.ones(3), np.add))
    2
    >>> many = np.ones(MANY_CLIENTS + 1)
    >>> [float(line[0]) for line in extend_trace((many,), many, np.add)]
    [2.0]
    """
    if len(newest) <= MANY_CLIENTS or not lines:
        return (*lines, newest)
    return (join(lines[0], newest),)


def combine_sigma(before: TraceLine, newest: TraceLine) -> TraceLine:
    """Return σ of one release that is worth two, (1/σ₁² + 1/σ₂²)^(−1/2); NaN is no release.

    >>> combine_sigma(np.array([3.0, 5.0, np.nan]), np.array([4.0, np.nan, np.nan])).tolist()
    [2.4, 5.0, nan]
    """
    both = before * newest / np.hypot(before, newest)
    return np.where(np.isnan(newest), before, np.where(np.isnan(before), newest, both))


# What every engine reports of a round when it is over.
OnRound = Callable[["RoundDone"], None]


@dataclass(frozen=True)
class RoundDone:
    """What `on_round` receives after each round."""

    t: int
    horizon: int
    next_horizon: int
    uploads: int
    sigma: float  # the median over those of the cohort that disclose it; NaN if nobody does
    loss: float
    accuracy: float
    fuel: float  # the least any client has left: 1 is full, 0 is empty; NaN if nobody discloses it
    metric: str | None = None  # the plan's, where it is computed in every round
    score: float = math.nan  # its value on the validation rows


def describe_last_round(state: ServerState, federation: Federation) -> RoundDone | None:
    """Return the newest round for `on_round`; None where the last one had no upload."""
    if not state.rounds or state.exhausted:
        return None
    last, plan = state.rounds[-1], federation.plan
    left = state.tank.left_fraction[~np.isnan(federation.capacity)]  # a hidden tank looks full
    found = last["sigma"]["median"], last["validation_loss"], last["validation_accuracy"]
    sigma, loss, accuracy = (math.nan if number is None else number for number in found)
    metric, score = plan.metric if plan.server.signal == "public" else None, math.nan
    if metric is not None and (shortfall := last.get("signal")) is not None:
        target = plan.regression
        unit = 1.0 if target is None else (target.high - target.low) / 2
        score = restore_metric(metric, shortfall, unit)
    return RoundDone(
        t=last["t"],
        horizon=last["horizon"],
        next_horizon=last["next_horizon"],
        uploads=last["uploads"],
        sigma=sigma,
        loss=loss,
        accuracy=accuracy,
        fuel=float(left.min()) if left.size else math.nan,
        metric=metric,
        score=score,
    )


NAME = "checkpoint.npz"
_TANK = ("capacity", "spent", "opened", "debits")
MANY_CLIENTS = 10_000  # above this, what is said of each client goes to npz only


@dataclass(frozen=True, eq=False)
class ServerState:
    """After `progress.done` rounds: the schedule's view, the tanks, and what has happened."""

    progress: Progress
    tank: Tank
    asked: NDArray[np.int64]
    turns: NDArray[np.int64]  # uploads of each client
    rounds: tuple[RoundEntry, ...]
    sigma: tuple[NDArray[np.float64], ...]  # the trace: σ of each charged client, else NaN
    mu2: tuple[NDArray[np.float64], ...]  # the trace: what each client was charged
    initial: tuple[float, float, float | None]  # loss, accuracy and signal of the first model
    seconds: float  # spent so far, in all sessions
    exhausted: bool = False  # nobody could pay the last round that was announced
    marks: Marks = NO_MARKS  # what the server's optimiser counts; its arrays stand beside the model
    weight: tuple[NDArray[np.float64], ...] = ()  # of each upload; of very many clients not kept


Parameters = dict[str, NDArray[Any]]


def require_out(out: Path | None) -> Path:
    """Return the folder that `--resume` goes on in; refuse if none is named."""
    if out is None:
        raise InputError("--resume needs --out DIR, the folder of the run that was stopped")
    return out


def require_stopped(folder: Path) -> None:
    """Refuse a folder that holds no run that can go on."""
    if not (folder / NAME).exists():
        ended = (folder / "record.json").exists()
        found = describe_stop(folder, "") if ended else f"{folder} holds no {NAME}"
        raise RunError(f"{found}; only a run that was stopped on its way can be resumed")


def describe_stop(folder: Path, command: str, what: str = "stopped") -> str:
    """Return what to do with a run that was stopped: go on, or draw its page if it has ended."""
    where = shlex.quote(str(folder))
    if (folder / NAME).exists() or not (folder / "record.json").exists():
        return f"{what}; go on with: sottovoce {command} --resume --out {where}"
    return f"the run in {folder} has ended, `sottovoce report {where}` draws its page"


def save(
    folder: Path,
    state: ServerState,
    params: Parameters,
    header: dict[str, Any],
    memory: Memory | None = None,
) -> None:
    """Write state, model and header (plan, seed, …): all of it, or the old one stays.

    `memory` are the models that the server's optimiser keeps beside the newest.
    """
    traces = ("sigma", state.sigma), ("mu2", state.mu2), ("weight", state.weight)
    arrays = {f"param:{name}": leaf for name, leaf in params.items()}
    for slot, leaves in (memory or {}).items():
        arrays |= {f"{slot}:{name}": leaf for name, leaf in leaves.items()}
    arrays |= {
        **{name: getattr(state.tank, name) for name in _TANK},
        "asked": state.asked,
        "turns": state.turns,
        **{name: np.array(lines).reshape(len(lines), len(state.asked)) for name, lines in traces},
    }
    meta = {
        "header": header,
        "progress": [*vars(state.progress).values()],
        "rounds": state.rounds,
        "initial": state.initial,
        "seconds": state.seconds,
        "exhausted": state.exhausted,
        "marks": [*state.marks],
        "memory": [*(memory or {})],
    }
    arrays["meta"] = np.frombuffer(json.dumps(meta).encode(), dtype=np.uint8)
    write_npz(folder / NAME, arrays, compressed=False)


def load(folder: Path) -> tuple[ServerState, Parameters, dict[str, Any], Memory]:
    """Return state, model, header and the server's memory; refuse a damaged checkpoint."""
    require_stopped(folder)
    try:
        arrays = read_npz(folder / NAME)
        meta = json.loads(arrays["meta"].tobytes())
        header: dict[str, Any] = meta["header"]
        # Up to 0.2 there was a fifth number, of noise that falls.
        done, horizon, recent, *rest = meta["progress"][:4]
        state = ServerState(
            progress=Progress(done, horizon, tuple(recent), *rest),
            tank=Tank(*(arrays[name] for name in _TANK)),
            asked=arrays["asked"],
            turns=arrays["turns"],
            rounds=tuple(meta["rounds"]),
            sigma=tuple(arrays["sigma"]),
            mu2=tuple(arrays["mu2"]),
            initial=tuple(meta["initial"]),
            seconds=meta["seconds"],
            exhausted=meta["exhausted"],
            marks=Marks(*meta.get("marks", ())),
            weight=tuple(arrays.get("weight", ())),
        )
        params = _select_arrays(arrays, "param")
        memory: Memory = {slot: _select_arrays(arrays, slot) for slot in meta.get("memory", ())}
        models = [leaves for slot, leaves in memory.items() if slot != OPTIMIZER]
        if any(leaves.keys() != params.keys() for leaves in models):
            raise ValueError("what the server keeps is not of the model's form")
    except OSError as error:  # of another account, or the disk's: nothing is known to be wrong
        remedy = "check its owner and its disk, and resume again"
        raise RunError(f"{folder / NAME} cannot be read ({why(error)}); {remedy}") from None
    except (*DAMAGE, RecursionError):
        remedy = "start the run anew in another folder"
        raise RunError(f"{folder / NAME} is damaged; {remedy}") from None
    return state, params, header, memory


def read_public_state(folder: Path) -> tuple[dict[str, Any], NDArray[np.float64]]:
    """Return a checkpoint's texts, and each client's budget left (NaN: hidden); no model is read.

    Raises OSError or ValueError where there is no whole checkpoint.
    """
    arrays = read_npz(folder / NAME, "meta", *_TANK)
    meta: dict[str, Any] = json.loads(arrays["meta"].tobytes())
    left = Tank(*(arrays[name] for name in _TANK)).left_fraction
    hidden = [member["budget"] is None for member in meta["header"].get("members", ())]
    return meta, np.where(hidden or False, np.nan, left)


def _select_arrays(arrays: Parameters, slot: str) -> Parameters:
    prefix = f"{slot}:"
    found = {name: array for name, array in arrays.items() if name.startswith(prefix)}
    return {name.removeprefix(prefix): array for name, array in found.items()}
