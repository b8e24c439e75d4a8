"""What happened: the run folder and its `record.json` (schema sottovoce.record/1).

record.json   everything below in plain JSON; NaN and infinities are null
model.npz     the parameters, no pickle
trace.npz     sigma[rounds_used, clients], NaN where nothing was charged (of the first of several
              local steps); with several releases a round also mu2, what was booked; of more than
              10,000 clients sigma_all[clients] instead, one release worth those of the first
              steps of all rounds, and mu2_all[clients], what was booked for everything
splits.npz    the rows of each client, of validation and test
rounds.jsonl  one line a round while it runs
report.html   the page
"""

from __future__ import annotations

import hashlib
import io
import json
import math
import platform
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from sottovoce._version import __version__
from sottovoce.data.files import why, write_file
from sottovoce.errors import RunError
from sottovoce.runs.checkpoint import MANY_CLIENTS, ServerState
from sottovoce.schedules.aggregate import describe

if TYPE_CHECKING:
    from sottovoce.server.federation import Federation


# The record of a run folder, read back: one place that says what is missing or damaged in it.


SCHEMA = "sottovoce.record/1"
AGAIN = "restore the file, or run the plan again into a new folder"
#: What every reader of a record relies on; `reports/run.py` asks for more.
_NEEDS: dict[str, tuple[type, ...]] = {
    "initial": (dict,),
    "rounds": (list,),
    "plan": (dict,),
    "plan.model": (dict,),
    "plan.model.name": (str,),
    "result": (dict,),
    "result.test_accuracy": (int, float, NoneType),
    "result.rounds_used": (int,),
    "result.model_sha256": (str, NoneType),
    "guarantee": (dict, NoneType),
}


def read(folder: Path) -> dict[str, Any]:
    """The record of a run folder, or a sentence why there is none."""
    path = Path(folder) / "record.json"
    try:
        record = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        raise RunError(
            f"{path} is missing; name a folder that `sottovoce train` has written"
        ) from None
    except OSError as error:
        raise RunError(
            f"{path} cannot be read ({error.strerror}); check that it is a file you may open"
        ) from error
    except (ValueError, RecursionError) as error:
        raise RunError(f"{path} is damaged ({why(error)}); {AGAIN}") from error
    require_schema(record)
    for name, kinds in _NEEDS.items():
        found: Any = record
        for key in name.split("."):
            if key not in found:
                raise _damaged(f"it lacks {name!r}")
            found = found[key]
        if not isinstance(found, kinds):
            raise _damaged(f"{name} is {found!r:.40}")
    if record["guarantee"] is not None and "text" not in record["guarantee"]:
        raise _damaged("it lacks 'guarantee.text'")
    return dict(record)


def require_schema(record: Any) -> None:
    """Refuse what is no record of this kind."""
    if not isinstance(record, Mapping) or record.get("schema") != SCHEMA:
        found = record.get("schema") if isinstance(record, Mapping) else type(record).__name__
        raise RunError(
            f'record.json must have schema "{SCHEMA}", got {found!r:.60}; '
            "use the version of sottovoce that wrote it"
        )


def _damaged(what: str) -> RunError:
    return RunError(f"record.json is damaged, {what}; {AGAIN}")


ROUNDS = "rounds.jsonl"
MOST_CONFUSED = 20  # classes whose confusion matrix is kept: a larger one nobody reads
Parameters = dict[str, NDArray[Any]]


def model_sha256(params: Parameters) -> str:
    """A fingerprint of a model: names, types, shapes and bytes, in the order of the names.

    >>> model_sha256({"w": np.zeros(2, np.float32)})[:8]
    'cb2c1f5e'
    """
    digest = hashlib.sha256()
    for name in sorted(params):
        leaf = np.ascontiguousarray(params[name])
        leaf = leaf.astype(leaf.dtype.newbyteorder("<"))
        digest.update(f"{name}:{leaf.dtype.str}:{leaf.shape};".encode())
        digest.update(leaf.tobytes())
    return digest.hexdigest()


def make(
    federation: Federation,
    state: ServerState,
    params: Parameters,
    *,
    seed: int | None,
    status: str,
    started: datetime,
    test: tuple[float, float],
    fairness: dict[str, Any],
    confusion: list[list[int]] | None = None,
    engine: str = "simulation",
    not_covered: Sequence[str] = (),
    versions: Mapping[str, str] | None = None,
    who: Sequence[Mapping[str, Any]] = (),
) -> dict[str, Any]:
    """The record of a run as it stands, finished or not.

    `not_covered` are codes that the engine adds to the guarantee's, `versions` those of its parts,
    `who` what it knows of each client beside its numbers.
    """
    done, guarantee = len(state.rounds), federation.guarantee(*not_covered)
    record: dict[str, Any] = {
        "schema": SCHEMA,
        "status": status,
        "engine": engine,
        "noise": federation.plan.noise,
        "seed": seed,
        "plan": federation.plan.to_dict(),
        "model": {
            "shape": list(federation.held.shape),
            "classes": federation.held.classes,
            "parameters": int(sum(leaf.size for leaf in params.values())),
        },
        "initial": {"validation_loss": state.initial[0], "validation_accuracy": state.initial[1]},
        "rounds": list(state.rounds),
        "result": {
            "test_loss": test[0],
            "test_accuracy": test[1],
            "rounds_used": done,
            "model_sha256": model_sha256(params),
            "fairness": fairness,
        },
        "guarantee": None if guarantee is None else guarantee.to_json(),
        "versions": _versions() | dict(versions or {}),
        "timing": {
            "started": started.strftime("%Y-%m-%dT%H:%M:%SZ"),
            "seconds": state.seconds,
            "seconds_per_round": state.seconds / max(1, done),
        },
    }
    if guarantee is None:  # no figure, but what is not covered is told all the same
        record["not_covered"] = list(federation.not_covered(*not_covered))
    if confusion is not None:
        record["result"]["confusion"] = confusion
    if (finish := federation.finish.describe(state.marks)) is not None:
        record["result"]["finish"] = finish
    if (
        words := describe(federation.plan.server.aggregation, federation.plan.server.trim)
    ) is not None:
        record["result"]["aggregation"] = words
    if federation.plan.local.clip == "median":
        record["clip"] = federation.recipe.clip
    if federation.plan.server.signal != "public":
        record["initial"]["signal"] = state.initial[2]
    if federation.held.layout is not None:
        record["table"] = federation.held.layout.to_json()
    if len(state.asked) <= MANY_CLIENTS:
        columns = _columns(federation, state)
        rows = zip(*(column.tolist() for column in columns.values()), strict=True)
        clients = [dict(zip(columns, row, strict=True)) for row in rows]
        known = who or [{}] * len(clients)
        record["clients"] = [{**w, **c} for c, w in zip(clients, known, strict=True)]
    require_private(federation, state)
    return {key: _plain(value) for key, value in record.items()}


def require_private(federation: Federation, state: ServerState) -> None:
    """Refuse to write a record whose noise does not bear out its books.

    Σ (Δ/σ)² over the rounds, recomputed from the trace, must not exceed what the tank booked, nor
    that the capacity: if it does, something beside the tank has gone wrong.
    """
    booked, own = state.tank.spent_mu2, federation.sensitivity
    released = sum(
        (np.where(np.isnan(sigma), 0.0, (own / sigma) ** 2) for sigma in state.sigma),
        start=np.zeros_like(booked),
    )
    capacity, told = state.tank.capacity, ~np.isnan(federation.capacity)
    over = (booked > capacity * (1 + 1e-9)) | (released > booked + 1e-9 * capacity)
    if np.any(over & told):  # who discloses nothing cannot be held to it here
        raise RunError(
            "the noise of this run does not bear out what its tanks booked, which must never be; "
            "no record was written, please report this"
        )


def _columns(federation: Federation, state: ServerState) -> dict[str, NDArray[Any]]:
    """What is told of each client; NaN where it keeps that to itself (rule R9)."""
    told = ~np.isnan(federation.capacity)

    def if_told(values: NDArray[Any]) -> NDArray[Any]:
        return values if told.all() else np.where(told, values, np.nan)

    return {
        "samples": if_told(federation.samples),
        "epsilon": federation.epsilon,
        "delta": federation.delta,
        "sensitivity": if_told(federation.sensitivity),
        "participations": state.turns,
        "capacity": if_told(state.tank.capacity),
        "spent": if_told(state.tank.spent_mu2),
    }


def write(
    folder: Path,
    record: dict[str, Any],
    federation: Federation,
    state: ServerState,
    params: Parameters,
) -> None:
    """All files of the run folder but the page, the record last: it vouches for the others."""
    _save(folder / "model.npz", params)
    clients = len(state.asked)
    trace = {"sigma": np.array(state.sigma).reshape(len(state.sigma), clients)}
    if clients > MANY_CLIENTS:
        booked = np.array(state.mu2).reshape(-1, clients).sum(axis=0)
        trace = {"sigma_all": trace["sigma"].reshape(-1), "mu2_all": booked} | {
            f"clients_{name}": column for name, column in _columns(federation, state).items()
        }
    elif federation.plan.local.steps > 1 or federation.plan.server.signal == "clients":
        # σ alone no longer says what was spent: there are several releases a round.
        trace["mu2"] = np.array(state.mu2).reshape(len(state.mu2), clients)
    _save(folder / "trace.npz", trace)
    # Arrays given client by client have no row numbers, nor have real clients.
    splits = {"samples": _columns(federation, state)["samples"]}
    if (dealt := federation.held.split) is not None:
        splits |= {
            "rows": np.concatenate(dealt.clients),
            "validation": dealt.validation,
            "test": dealt.test,
            "test_from": np.array(dealt.test_from),
        }
    _save(folder / "splits.npz", splits)
    write_rounds(folder, state)
    text = json.dumps(record, ensure_ascii=False, indent=1)
    write_file(folder / "record.json", text.encode())


def _save(path: Path, arrays: dict[str, NDArray[Any]]) -> None:
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **arrays)  # type: ignore[arg-type]
    write_file(path, buffer.getvalue())


def write_rounds(folder: Path, state: ServerState) -> None:
    """All rounds so far into `rounds.jsonl`, one a line."""
    lines = "".join(json.dumps(_plain(entry)) + "\n" for entry in state.rounds)
    write_file(folder / ROUNDS, lines.encode())


def append_round(folder: Path, state: ServerState) -> None:
    """The newest round as one more line, for whoever follows the run."""
    with (folder / ROUNDS).open("a", encoding="utf-8") as file:
        file.write(json.dumps(_plain(state.rounds[-1])) + "\n")


def _versions() -> dict[str, str]:
    import jax

    return {
        "sottovoce": __version__,
        "python": platform.python_version(),
        "numpy": np.__version__,
        "jax": jax.__version__,
    }


_AS_THEY_ARE = {int, str, bool, type(None)}


def _plain(value: Any) -> Any:
    """JSON has no NaN and no infinity: they become null.

    >>> _plain({"a": (1, float("nan")), "b": [1, 2]})
    {'a': [1, None], 'b': [1, 2]}
    """
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        if _AS_THEY_ARE.issuperset(map(type, value)):  # a cohort in every round: no need to look
            return list(value)
        return [_plain(item) for item in value]
    return value
