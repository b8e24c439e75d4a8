"""sottovoce: federated learning in which no client has to trust the server.

The names here are the public API. Each is loaded on first use, so that `import sottovoce` is quick.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from sottovoce._version import __version__ as __version__

if TYPE_CHECKING:  # for type checkers, which read no table
    from sottovoce.errors import DataError as DataError
    from sottovoce.errors import InputError as InputError
    from sottovoce.errors import PlanError as PlanError
    from sottovoce.errors import Refusal as Refusal
    from sottovoce.errors import RunError as RunError
    from sottovoce.errors import SottovoceError as SottovoceError
    from sottovoce.errors import TankEmpty as TankEmpty
    from sottovoce.models.custom import custom as custom
    from sottovoce.plan import Plan as Plan
    from sottovoce.privacy.budget import Budget as Budget
    from sottovoce.privacy.budget import Guarantee as Guarantee
    from sottovoce.runs.checkpoint import RoundDone as RoundDone
    from sottovoce.runs.trained import Trained as Trained
    from sottovoce.runs.trained import load as load
    from sottovoce.schedules.calibrate import calibrate as calibrate
    from sottovoce.simulation.simulate import resume as resume
    from sottovoce.simulation.simulate import simulate as simulate
    from sottovoce.simulation.simulate import simulate_many as simulate_many
    from sottovoce.studies.rehearsal.rehearsing import rehearse as rehearse

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

__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'sottovoce' has no attribute '{name}'")
    return getattr(import_module(f"sottovoce.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
