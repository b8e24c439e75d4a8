"""sottovoce: federated learning in which no client has to trust the server.

The names here are the public API. Each is loaded on first use, so that `import sottovoce` is quick.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from sottovoce._version import __version__ as __version__

if TYPE_CHECKING:
    from sottovoce.errors import (
        DataError,
        InputError,
        PlanError,
        Refusal,
        RunError,
        SottovoceError,
        TankEmpty,
    )
    from sottovoce.models.custom import custom
    from sottovoce.plan import Plan
    from sottovoce.privacy.budget import Budget, Guarantee
    from sottovoce.runs.checkpoint import RoundDone
    from sottovoce.runs.trained import Trained, load
    from sottovoce.schedules.calibrate import calibrate
    from sottovoce.simulation.simulate import resume, simulate, simulate_many
    from sottovoce.studies.rehearsal.rehearsing import rehearse

_HOMES = {
    "Budget": "privacy.budget",
    "DataError": "errors",
    "Guarantee": "privacy.budget",
    "InputError": "errors",
    "Plan": "plan",
    "PlanError": "errors",
    "Refusal": "errors",
    "RoundDone": "runs.checkpoint",
    "RunError": "errors",
    "SottovoceError": "errors",
    "TankEmpty": "errors",
    "Trained": "runs.trained",
    "calibrate": "schedules.calibrate",
    "custom": "models.custom",
    "load": "runs.trained",
    "rehearse": "studies.rehearsal.rehearsing",
    "resume": "simulation.simulate",
    "simulate": "simulation.simulate",
    "simulate_many": "simulation.simulate",
}

__all__ = [
    "Budget",
    "DataError",
    "Guarantee",
    "InputError",
    "Plan",
    "PlanError",
    "Refusal",
    "RoundDone",
    "RunError",
    "SottovoceError",
    "TankEmpty",
    "Trained",
    "calibrate",
    "custom",
    "load",
    "rehearse",
    "resume",
    "simulate",
    "simulate_many",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'sottovoce' has no attribute '{name}'")
    return getattr(import_module(f"sottovoce.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
