"""The state of a server after a round: one frozen value, saved whole or not at all.

`train --resume` and every other engine go on from it. A simulation on a CPU is a function of plan,
seed and state, so that going on from any checkpoint ends in the same model.
"""

from __future__ import annotations

import io
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sottovoce.data.files import read_npz, write_file
from sottovoce.errors import InputError, RunError
from sottovoce.privacy.tank import Tank
from sottovoce.schedules.optimizer import NO_MARKS, Marks, Memory
from sottovoce.schedules.schedule import Progress

NAME = "checkpoint.npz"
MANY_CLIENTS = 10_000  # above this, what is said of each client goes to npz only


@dataclass(frozen=True, eq=False)
class ServerState:
    """After `progress.done` rounds: the schedule's view, the tanks, and what has happened."""

    progress: Progress
    tank: Tank
    asked: NDArray[np.int64]
    turns: NDArray[np.int64]  # uploads of each client
    rounds: tuple[dict[str, Any], ...]  # the record's rounds
    sigma: tuple[NDArray[np.float64], ...]  # the trace: σ of each charged client, else NaN
    mu2: tuple[NDArray[np.float64], ...]  # the trace: what each client was charged
    initial: tuple[float, float, float | None]  # loss, accuracy and signal of the first model
    seconds: float  # spent so far, in all sittings
    exhausted: bool = False  # nobody could pay the last round that was announced
    marks: Marks = NO_MARKS  # what `server.finish` counts; its arrays stand beside the model


Parameters = dict[str, NDArray[Any]]


def require_out(out: Path | None) -> Path:
    """The folder that `--resume` goes on in, which must be named."""
    if out is None:
        raise InputError("--resume needs --out DIR, the folder of the run that was stopped")
    return out


def require_stopped(folder: Path) -> None:
    """A sentence if the folder holds no run that can go on."""
    if not (folder / NAME).exists():
        raise RunError(
            f"{folder} holds no {NAME}; only a run that was stopped on its way can be resumed"
        )


def save(
    folder: Path,
    state: ServerState,
    params: Parameters,
    header: dict[str, Any],
    memory: Memory | None = None,
) -> None:
    """Write state, model and header (plan, seed, …): all of it, or the old one stays.

    `memory` are the models that `server.finish` keeps beside the newest.
    """
    tank = state.tank
    arrays = {f"param:{name}": leaf for name, leaf in params.items()}
    for part, leaves in (memory or {}).items():
        arrays |= {f"{part}:{name}": leaf for name, leaf in leaves.items()}
    arrays |= {
        "capacity": tank.capacity,
        "spent": tank.spent,
        "opened": tank.opened,
        "debits": tank.debits,
        "asked": state.asked,
        "turns": state.turns,
        "sigma": np.array(state.sigma).reshape(len(state.sigma), len(state.asked)),
        "mu2": np.array(state.mu2).reshape(len(state.mu2), len(state.asked)),
    }
    meta = {
        "header": header,
        "progress": [
            state.progress.done,
            state.progress.horizon,
            list(state.progress.recent),
            state.progress.last_discount,
        ],
        "rounds": state.rounds,
        "initial": state.initial,
        "seconds": state.seconds,
        "exhausted": state.exhausted,
        "marks": [*state.marks],
        "memory": [*(memory or {})],
    }
    arrays["meta"] = np.frombuffer(json.dumps(meta).encode(), dtype=np.uint8)
    buffer = io.BytesIO()
    np.savez(buffer, **arrays)  # type: ignore[arg-type]
    write_file(folder / NAME, buffer.getvalue())


def load(folder: Path) -> tuple[ServerState, Parameters, dict[str, Any], Memory]:
    """State, model, header and the server's memory, or a sentence why there are none."""
    path = folder / NAME
    require_stopped(folder)
    try:
        arrays = read_npz(path)
        meta = json.loads(arrays["meta"].tobytes())
        header: dict[str, Any] = meta["header"]
        tank = Tank(arrays["capacity"], arrays["spent"], arrays["opened"], arrays["debits"])
        done, horizon, recent, last = meta["progress"]
        state = ServerState(
            progress=Progress(done, horizon, tuple(recent), last),
            tank=tank,
            asked=arrays["asked"],
            turns=arrays["turns"],
            rounds=tuple(meta["rounds"]),
            sigma=tuple(arrays["sigma"]),
            mu2=tuple(arrays["mu2"]),
            initial=tuple(meta["initial"]),
            seconds=meta["seconds"],
            exhausted=meta["exhausted"],
            marks=Marks(*meta.get("marks", ())),
        )
        params = _part(arrays, "param")
        memory: Memory = {part: _part(arrays, part) for part in meta.get("memory", ())}
        if any(leaves.keys() != params.keys() for leaves in memory.values()):
            raise ValueError("what the server keeps is not of the model's form")
    except (KeyError, ValueError, OSError, TypeError, AttributeError, RecursionError):
        raise RunError(f"{path} is damaged; start the run anew in another folder") from None
    return state, params, header, memory


def _part(arrays: Parameters, part: str) -> Parameters:
    own = f"{part}:"
    return {name.removeprefix(own): a for name, a in arrays.items() if name.startswith(own)}
