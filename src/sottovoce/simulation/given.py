"""A plan and the arrays or the model that Python gives beside it, brought into agreement."""

from __future__ import annotations

from typing import Any

from sottovoce.data.federated import Given, is_pair
from sottovoce.models.names import AnyModel
from sottovoce.plan import Plan


def adapted(plan: Plan, given: Given | None, model: AnyModel | None) -> Plan:
    """The plan with what the arrays and the model given from Python say themselves."""
    changes: dict[str, object] = {}
    if model is not None:
        changes["model.name"] = "custom"
    if given is not None:
        changes |= _of_arrays(plan, given)
    return plan.replace(**changes) if changes else plan


def _of_arrays(plan: Plan, given: Given) -> dict[str, object]:
    changes: dict[str, object] = {}
    if plan.data.name != "arrays":
        changes["data.name"] = "arrays"
        if is_pair(given.train):
            part = max(1, _length(given.train) // 10)
            changes |= {"data.validation": part, "data.test": part}
    for name, pair in (("validation", given.validation), ("test", given.test)):
        if pair is not None:
            changes[f"data.{name}"] = _length(pair)
    if not is_pair(given.train):
        sizes = [_length(pair) for pair in given.train]
        changes |= {"data.clients": len(sizes), "data.split": "sizes", "data.samples": sizes}
    return changes


def _length(pair: Any) -> int:
    try:
        return max(1, len(pair[1]))
    except (TypeError, LookupError):
        return 1  # no pair at all: `build` says so, in its own words
