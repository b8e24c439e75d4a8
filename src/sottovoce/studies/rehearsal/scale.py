"""The plan's federation on as many rows as there are, with the noise of the real one.

A step's noise is 2ηC√T/(n·μ). A client with n/f rows and a budget that is worth f·μ therefore adds
what the real client will add: only the gradients are means over fewer rows. Where a client's whole
data is the unit, n plays no part and the budget stays.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sottovoce.errors import InputError
from sottovoce.plan import Plan
from sottovoce.plan.data import DATASETS
from sottovoce.privacy import calibration

Whole = NDArray[np.int64]


@dataclass(frozen=True)
class Federation:
    """U clients that train on `sizes` rows each: what is public of the real federation."""

    sizes: tuple[int, ...]

    @property
    def rows(self) -> int:
        """Of all clients together."""
        return sum(self.sizes)


def announced(plan: Plan, clients: int | None = None, samples: int | None = None) -> Federation:
    """The federation that a plan announces, without a look at its data.

    `samples` are the rows that a client holds; with `data.client` those that name it in the table,
    of which validation and test take theirs (as `data.column.split_by_column` does).

    >>> announced(Plan()).sizes[:2], announced(Plan(data={"name": "mnist", "clients": 50})).rows
    ((143, 143), 50000)
    """
    own = plan.data
    for key, given, told in (("clients", clients, own.clients), ("samples", samples, own.samples)):
        if given is not None and told is not None:
            raise InputError.of(
                f"--{key}", given, f"absent where the plan has data.{key}", f"it says {told}"
            )
        if given is not None and given < 1:
            raise InputError.of(f"--{key}", given, "a whole number ≥ 1", "as announced")
    U = own.clients or clients
    if U is None:
        raise InputError(
            "data.clients follows from the table, which a rehearsal does not open; say how many "
            "clients there will be with --clients"
        )
    _require_budgets(plan, U)
    if isinstance(own.samples, tuple):
        parts = own.samples
        return Federation(tuple(parts[i * len(parts) // U] for i in range(U)))
    each = own.samples if own.samples is not None else samples
    if each is not None:
        return Federation((each if own.client is None else _kept(plan, each, U),) * U)
    if own.name is None or own.name == "arrays":
        raise InputError(
            "data.samples is what a client holds and the plan leaves it to the data, which a "
            "rehearsal does not open; say how many rows with --samples"
        )
    facts = DATASETS[own.name]
    aside = int(own.validation) if own.public is None else own.public
    rest = facts.rows - aside - (0 if own.test == 0 else int(float(own.test)))
    return Federation((max(1, rest // U),) * U)


def _require_budgets(plan: Plan, U: int) -> None:
    """A plan that leaves the clients to its table cannot check its own lists."""
    for key in ("epsilon", "delta"):
        values = getattr(plan.privacy, key)
        if isinstance(values, tuple) and len(values) != U:
            raise InputError(
                f"privacy.{key} is a list of {len(values)} and --clients is {U}; give one number "
                "for all, or one for each client"
            )


def aside(plan: Plan) -> tuple[float, int]:
    """What validation and test take of a table: a part of all rows, and so many rows.

    >>> aside(Plan(data={"path": "a.csv", "label": "y", "infer": True, "test": 50}))
    (0.1, 50)
    """
    taken = [v for v in (plan.data.validation, plan.data.test) if not isinstance(v, str)]
    part = sum(v for v in taken if isinstance(v, float))
    return float(part), sum(v for v in taken if isinstance(v, int))


def _kept(plan: Plan, held: int, U: int) -> int:
    """The rows that a client trains on, of those that name it in the table."""
    part, rows = aside(plan)
    kept = int(round(held * U * (1 - part) - rows, 6) // U)
    if kept < 1:
        raise InputError.of(
            "--samples",
            held,
            f"more than data.validation = {plan.data.validation} and data.test = {plan.data.test} "
            f"take of {U} clients",
            "these are all rows of a client, and one or more must be left to train on",
        )
    return kept


def spare(plan: Plan) -> int:
    """How many times the dealt rows must be there: clients of few classes do not use all alike.

    >>> spare(Plan()), spare(Plan(data={"split": "dirichlet"}))
    (1, 3)
    """
    return 3 if plan.data.split in ("labels", "dirichlet") else 1


def fitted(plan: Plan, real: Federation, rows: int) -> tuple[Plan, float]:
    """The plan for a federation dealt from `rows` rows with the real one's noise, and f.

    >>> plan, f = fitted(Plan(), announced(Plan()), rows=715)
    >>> plan.data.samples, round(f, 2), round(plan.privacy.epsilon, 1)
    (71, 2.01, 19.3)
    """
    least, rows = plan.data.labels_per_client or 1, rows // spare(plan)
    if rows < least * len(real.sizes):
        raise InputError(
            f"the stand-in has {rows} rows to train on and {len(real.sizes)} clients need "
            f"{least * len(real.sizes)} or more; give more public rows"
        )
    f = max(1.0, real.rows / rows)
    sizes = np.maximum(least, np.floor(np.array(real.sizes) / f + 1e-9)).astype(int)
    while sizes.sum() > rows:  # clients that were lifted to the least
        sizes[np.argmax(sizes)] -= 1
    alike = len(set(sizes.tolist())) == 1
    changes: dict[str, object] = {
        "data.name": "arrays",
        "data.clients": len(sizes),
        "data.samples": int(sizes[0]) if alike else sizes.tolist(),
        "noise": "simulated",
    }
    if plan.data.split in ("column", "sizes"):
        changes["data.split"] = "iid" if alike else "sizes"
    elif not alike and plan.data.split == "iid":
        changes["data.split"] = "sizes"
    else:
        changes["data.split"] = plan.data.split
        for key in ("labels_per_client", "alpha"):
            if getattr(plan.data, key) is not None:
                changes[f"data.{key}"] = getattr(plan.data, key)
    scale = np.array(real.sizes) / sizes
    if plan.local.unit == "record" and scale.max() > 1:
        changes["privacy.epsilon"] = _worth_more(plan, scale)
    return plan.replace(**changes), float(scale.max())


def _worth_more(plan: Plan, scale: NDArray[np.float64]) -> float | list[float]:
    """ε_i that is worth f_i²·c_i, c_i what the plan's ε_i is worth: Σμ² grows by f²."""
    epsilon = np.broadcast_to(np.asarray(plan.privacy.epsilon, dtype=float), scale.shape)
    delta = np.broadcast_to(np.asarray(plan.privacy.delta, dtype=float), scale.shape)
    pairs = sorted(set(zip(epsilon.tolist(), delta.tolist(), scale.tolist(), strict=True)))
    found = {pair: _epsilon(*pair, plan) for pair in pairs}
    if len(pairs) == 1:
        return found[pairs[0]]
    return [
        found[pair] for pair in zip(epsilon.tolist(), delta.tolist(), scale.tolist(), strict=True)
    ]


def _epsilon(epsilon: float, delta: float, f: float, plan: Plan) -> float:
    def worth(e: float) -> float:
        return float(calibration.capacity(e, delta, calibration=plan.privacy.calibration))

    wanted = f * f * worth(epsilon)
    low, high = epsilon, 1e6
    if worth(high) < wanted:
        raise InputError.of(
            "the stand-in", f"1/{f:.0f} of the rows", "larger", "its budget would pass all bounds"
        )
    for _ in range(80):
        middle = (low * high) ** 0.5
        low, high = (middle, high) if worth(middle) < wanted else (low, middle)
    return low
