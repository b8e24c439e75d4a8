"""What the page reads: a record and its trace, checked once and turned into arrays.

Everything behind this file may rely on what it finds; a damaged record is refused here, in one
sentence. In a record a loss that is no finite number is null; here it is NaN.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from sottovoce.data.files import read_npz, why
from sottovoce.errors import RunError
from sottovoce.privacy import calibration as calibrations
from sottovoce.privacy import gaussian
from sottovoce.privacy.budget import CALIBRATIONS, describe_undisclosed
from sottovoce.privacy.gaussian import Floats
from sottovoce.runs.record import AGAIN, require_schema
from sottovoce.runs.record import read as read_record

STATUSES = ("finished", "interrupted", "failed")


@dataclass(frozen=True)
class Clients:
    """One number a client in each array; `capacity` and `spent` in μ²."""

    samples: Floats
    epsilon: Floats
    delta: Floats
    sensitivity: Floats
    participations: Floats
    capacity: Floats
    spent: Floats

    def __len__(self) -> int:
        return len(self.samples)

    @property
    def used(self) -> Floats:
        """The part of each tank that is spent, from 0 to 1; NaN where a client keeps it."""
        with np.errstate(over="ignore"):
            return np.asarray(np.clip(self.spent / self.capacity, 0.0, 1.0), dtype=np.float64)


@dataclass(frozen=True)
class Who:
    """Who a client of a federation is, and what the server had to say of it."""

    name: str
    key: str
    version: str
    counted: float  # samples that its uploads count for
    remarks: str


@dataclass(frozen=True)
class CheckedRun:
    """One run. `loss` and `accuracy` have one value more than there are rounds: before the first.

    `cohorts` is None where the record leaves them out, `clients` and `trace` where there are none.
    """

    status: str
    engine: str
    noise: str
    seed: int | None
    plan: dict[str, Any]
    loss: Floats
    accuracy: Floats
    horizon: NDArray[np.int64]
    next_horizon: NDArray[np.int64]
    sigma: Floats  # one row a round: least, median, most
    cohorts: list[NDArray[np.int64]] | None
    test_loss: float
    test_accuracy: float
    fairness: dict[str, Any]
    confusion: NDArray[np.int64] | None  # [true class, class it was taken for]
    classes: list[str]  # their names, where the record has them
    model_sha256: str | None
    finish: str | None  # what the server made of the uploads
    clients: Clients | None
    who: list[Who]  # the clients of a federation; empty in simulation
    disclosed: bool  # False: every client keeps its budget to itself, and ε and δ are NaN
    epsilon: float
    delta: float
    unit: str
    adjacency: str
    adversary: str
    calibration: str
    not_covered: list[str]
    text: str
    versions: dict[str, Any]
    started: str
    seconds: float
    seconds_per_round: float
    trace: Mapping[str, Any]

    @classmethod
    def of(cls, record: Mapping[str, Any], trace: Mapping[str, Any] | None = None) -> Self:
        """The run that a record tells of; what does not belong together is refused.

        >>> CheckedRun.of({"schema": "something else"})
        Traceback (most recent call last):
            ...
        sottovoce.errors.RunError: record.json must have schema "sottovoce.record/1", got \
'something else'; use the version of sottovoce that wrote it
        """
        require_schema(record)
        try:
            return cls._parsed(record, dict(trace or {}))
        except KeyError as error:
            raise RunError(f"record.json is damaged, it lacks {error}; {AGAIN}") from error
        except (TypeError, ValueError, AttributeError, OverflowError, IndexError) as error:
            raise RunError(
                f"record.json or trace.npz is damaged ({why(error)}); {AGAIN}"
            ) from error

    @classmethod
    def _parsed(cls, record: Mapping[str, Any], trace: dict[str, Any]) -> Self:
        initial, rounds, result = record["initial"], list(record["rounds"]), record["result"]
        guarantee, timing = record["guarantee"], record["timing"]
        told = _untold(record) if guarantee is None else guarantee
        if record["status"] not in STATUSES:
            raise ValueError(f"status {record['status']!r:.60} is none of {', '.join(STATUSES)}")
        states = [initial, *rounds]
        with_cohorts = all("cohort" in each for each in rounds)
        run = cls(
            status=record["status"],
            engine=str(record["engine"]),
            noise=str(record["noise"]),
            seed=record["seed"],
            plan=dict(record["plan"]),
            loss=_column(states, "validation_loss"),
            accuracy=_column(states, "validation_accuracy"),
            horizon=_whole(each["horizon"] for each in rounds),
            next_horizon=_whole(each["next_horizon"] for each in rounds),
            sigma=np.stack(
                [_column([r["sigma"] for r in rounds], key) for key in ("min", "median", "max")],
                axis=1,
            ),
            cohorts=[_whole(each["cohort"]) for each in rounds] if with_cohorts else None,
            test_loss=_number(result["test_loss"]),
            test_accuracy=_number(result["test_accuracy"]),
            fairness=_fairness(result.get("fairness")),
            confusion=_confusion(result.get("confusion")),
            classes=[str(name) for name in (record.get("table") or {}).get("classes", [])],
            model_sha256=result["model_sha256"],
            finish="; ".join(str(result[k]) for k in ("aggregation", "finish") if k in result)
            or None,
            clients=_clients(record.get("clients"), trace),
            who=_who(record.get("clients"), rounds),
            disclosed=guarantee is not None,
            epsilon=_number(told["epsilon"]),
            delta=_number(told["delta"]),
            unit=str(told["unit"]),
            adjacency=str(told["adjacency"]),
            adversary=str(told["adversary"]),
            calibration=str(told["calibration"]),
            not_covered=[str(code) for code in told["not_covered"]],
            text=str(told["text"]),
            versions=dict(record["versions"]),
            started=str(timing["started"]),
            seconds=_number(timing["seconds"]),
            seconds_per_round=_number(timing["seconds_per_round"]),
            trace=trace,
        )
        run._check()
        return run

    def _check(self) -> None:
        """What the page would stumble over: figures that do not belong together."""
        if self.disclosed and not (1e-6 <= self.epsilon <= 1e13 and 0 < self.delta < 1):
            raise ValueError(f"({self.epsilon}, {self.delta}) is no (ε, δ)")
        if self.calibration not in CALIBRATIONS:
            raise ValueError(f"calibration {self.calibration!r:.60} is unknown")
        if self.clients is None:
            return
        many = len(self.clients)
        if any(cohort.size and cohort.max() >= many for cohort in self.cohorts or ()):
            raise ValueError(f"a cohort names a client beyond the {many} there are")
        for name in ("sigma", "mu2"):
            found = np.shape(self.trace[name]) if name in self.trace else (self.used, many)
            if found != (self.used, many):
                raise ValueError(f"{name} of trace.npz has shape {found}, not {self.used, many}")

    @property
    def used(self) -> int:
        """Rounds used."""
        return len(self.horizon)

    @property
    def planned(self) -> int:
        """T₀: the rounds of the plan, or else the horizon of the first round."""
        rounds = self.section("rounds").get("rounds")
        if isinstance(rounds, int):
            return rounds
        return int(self.horizon[0]) if self.used else 0

    @property
    def triggers(self) -> NDArray[np.int64]:
        """Rounds done when the horizon shrank."""
        return np.flatnonzero(self.next_horizon < self.horizon) + 1

    def section(self, name: str) -> dict[str, Any]:
        """A section of the plan, empty if the plan has none."""
        part = self.plan.get(name)
        return part if isinstance(part, dict) else {}

    def charges(self) -> Iterator[Floats] | None:
        """What every client was charged (μ²), round by round; None without a trace.

        Row by row, because the whole array of a large run would be copied several times over.
        """
        if self.clients is None:
            return None
        if "mu2" in self.trace:  # several releases in a round: σ alone does not tell the charge
            return (np.nan_to_num(row) for row in np.asarray(self.trace["mu2"]))
        if "sigma" not in self.trace:
            return None
        delta = self.clients.sensitivity
        return (np.nan_to_num((delta / row) ** 2) for row in np.asarray(self.trace["sigma"]))

    def fuel(self) -> Floats | None:
        """The part of the tanks that is left before and after each round: least, median, most.

        Counted back from what is spent in the end, so that fuel used by earlier runs of the same
        clients is seen to be gone from the start.
        """
        forwards, again = self.charges(), self.charges()
        if self.clients is None or forwards is None or again is None:
            return None
        known = np.isfinite(self.clients.capacity)
        if not known.any():
            return None
        nothing = np.zeros(len(self.clients))
        rows = []
        with np.errstate(over="ignore", divide="ignore"):  # σ = 0 empties a tank at once
            spent = np.maximum(self.clients.spent - sum(forwards, start=nothing), 0.0)
            for charge in itertools.chain([nothing], again):
                spent = spent + charge
                left = np.clip(1 - spent[known] / self.clients.capacity[known], 0.0, 1.0)
                rows.append((left.min(), np.median(left), left.max()))
        return np.asarray(rows, dtype=np.float64)

    def attacker_mu(self) -> float:
        """μ of the best attack on the client that is protected least; NaN if no budget is known.

        The capacity is the cap for `exact` and `zcdp`. Under `paper` it is read back from the
        (ε, δ) that holds: what a run happened to release is no bound, since its length and its
        noise were chosen on the way.
        """
        if not self.disclosed:
            return math.nan
        if self.calibration == "paper":
            return float(gaussian.mu(self.epsilon, self.delta))
        if self.clients is not None:
            return math.sqrt(float(np.nanmax(self.clients.capacity)))
        kind: Any = self.calibration
        return math.sqrt(float(calibrations.capacity(self.epsilon, self.delta, calibration=kind)))


def read(folder: Path) -> CheckedRun:
    """The run in a folder: record.json, and trace.npz if it is there."""
    return CheckedRun.of(read_record(folder), _trace(folder / "trace.npz"))


def _trace(path: Path) -> dict[str, Any] | None:
    if not path.exists():
        return None
    try:
        return read_npz(path)
    except (OSError, ValueError) as error:
        raise RunError(
            f"{path} is damaged ({why(error)}); remove it to get the page without the "
            f"course of the fuel, or {AGAIN}"
        ) from error


def _confusion(told: Any) -> NDArray[np.int64] | None:
    if told is None:
        return None
    table = np.array(told, dtype=np.int64)
    if table.ndim != 2 or table.shape[0] != table.shape[1] or (table < 0).any():
        raise ValueError(f"the confusion matrix has shape {table.shape} or counts below 0")
    return table


def _fairness(told: Any) -> dict[str, Any]:
    """What the record says of accuracy by client, with its numbers checked; {} if nothing."""
    if told is None:
        return {}
    if not told["shown"]:
        return {"why": str(told["why"])}
    groups = [
        {key: _number(group[key]) for key in ("epsilon", "delta", "clients", "rows", "accuracy")}
        for group in told["by_budget"]
    ]
    spread = {key: _number(told["accuracy"][key]) for key in ("min", "q1", "median", "q3", "max")}
    return {"clients": _number(told["clients"]), "spread": spread, "groups": groups}


def _clients(listed: Any, trace: Mapping[str, Any]) -> Clients | None:
    names = [field.name for field in fields(Clients)]
    if listed is not None:
        columns = [_column(listed, name) for name in names]
    elif all(f"clients_{name}" in trace for name in names):
        columns = [np.asarray(trace[f"clients_{name}"], dtype=np.float64) for name in names]
    else:
        return None
    if len({column.shape for column in columns}) != 1 or not len(columns[0]):
        raise ValueError("clients must be at least one, each with all of its figures")
    clients = Clients(*columns)
    kept = np.isnan(clients.capacity) & np.isnan(clients.spent) & np.isnan(clients.epsilon)
    if not np.all(kept | ((clients.capacity > 0) & (clients.spent >= 0))):
        raise ValueError("every client needs a capacity > 0, of which it has spent ≥ 0")
    return clients


def _who(listed: Any, rounds: list[Any]) -> list[Who]:
    if not listed or "name" not in listed[0]:
        return []
    why = Counter((name, str(w)) for r in rounds for name, w in r.get("missing", {}).items())
    found = []
    for one in listed:
        said = [f"{reason} in {n} of {len(rounds)} rounds" for (name, reason), n in why.items()
                if name == one["name"]]  # fmt: skip
        if "limited" in one:
            said.append(str(one["limited"]))
        found.append(
            Who(
                name=str(one["name"]),
                key="–" if one.get("key") is None else str(one["key"]),
                version="–" if one.get("version") is None else str(one["version"]),
                counted=_number(one.get("counted")),
                remarks="; ".join(said),
            )
        )
    return found


def _untold(record: Mapping[str, Any]) -> dict[str, Any]:
    """What stands in for a guarantee where every client keeps its budget to itself."""
    plan, codes = record["plan"], [str(c) for c in record.get("not_covered", ())]
    return {
        "epsilon": None,
        "delta": None,
        "unit": plan["local"]["unit"],
        "adjacency": "replace-one",
        "adversary": "server",
        "calibration": plan["privacy"]["calibration"],
        "not_covered": codes,
        "text": describe_undisclosed(codes),
    }


def _column(rows: list[Any], key: str) -> Floats:
    return np.array([_number(row[key]) for row in rows], dtype=np.float64)


def _number(value: object) -> float:
    if value is None:
        return math.nan
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{value!r:.60} stands where a number should")
    return float(value) if math.isfinite(value) else math.nan


def _whole(values: Any) -> NDArray[np.int64]:
    listed = list(values)
    for value in listed:
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise TypeError(f"{value!r:.60} stands where a whole number ≥ 0 should")
    return np.array(listed, dtype=np.int64)
