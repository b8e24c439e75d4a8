"""sottovoce: federated learning in which no client has to trust the server.

The names here are the public API. Each is loaded on first use, so that `import sottovoce` is quick.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from sottovoce._version import __version__ as __version__

if TYPE_CHECKING:  # for type checkers, which read no table
    from sottovoce.client.device import answer_request as answer_request
    from sottovoce.client.node import Node as Node
    from sottovoce.client.release import release as release
    from sottovoce.client.vault import Policy as Policy
    from sottovoce.client.vault import Vault as Vault
    from sottovoce.errors import DataError as DataError
    from sottovoce.errors import InputError as InputError
    from sottovoce.errors import PlanError as PlanError
    from sottovoce.errors import Refusal as Refusal
    from sottovoce.errors import RunError as RunError
    from sottovoce.errors import SottovoceError as SottovoceError
    from sottovoce.errors import TankEmpty as TankEmpty
    from sottovoce.flower.federate import federate as federate
    from sottovoce.models.clipping import clipped_sum as clipped_sum
    from sottovoce.models.custom import custom as custom
    from sottovoce.models.torch_model import TorchModel as TorchModel
    from sottovoce.plan import Plan as Plan
    from sottovoce.privacy.budget import Budget as Budget
    from sottovoce.privacy.budget import Guarantee as Guarantee
    from sottovoce.privacy.tank import Tank as Tank
    from sottovoce.runs.checkpoint import RoundDone as RoundDone
    from sottovoce.runs.trained import Trained as Trained
    from sottovoce.runs.trained import load as load
    from sottovoce.schedules.base import Progress as Progress
    from sottovoce.schedules.base import Round as Round
    from sottovoce.schedules.calibrate import calibrate as calibrate
    from sottovoce.server.federation import Federation as Federation
    from sottovoce.simulation.estimators import (
        PrivateFederatedClassifier as PrivateFederatedClassifier,
    )
    from sottovoce.simulation.estimators import (
        PrivateFederatedRegressor as PrivateFederatedRegressor,
    )
    from sottovoce.simulation.simulate import resume as resume
    from sottovoce.simulation.simulate import simulate as simulate
    from sottovoce.simulation.simulate import simulate_many as simulate_many
    from sottovoce.studies.audit.auditing import audit as audit
    from sottovoce.studies.paper.reproduce import reproduce as reproduce
    from sottovoce.studies.rehearsal.rehearsing import rehearse as rehearse

_NAMES = {  # by the module that each stands in
    "client.device": "answer_request",
    "client.node": "Node",
    "client.release": "release",
    "client.vault": "Policy Vault",
    "errors": "DataError InputError PlanError Refusal RunError SottovoceError TankEmpty",
    "flower.federate": "federate",
    "models.clipping": "clipped_sum",
    "models.custom": "custom",
    "models.torch_model": "TorchModel",
    "plan": "Plan",
    "privacy.budget": "Budget Guarantee",
    "privacy.tank": "Tank",
    "runs.checkpoint": "RoundDone",
    "runs.trained": "Trained load",
    "schedules.base": "Progress Round",
    "schedules.calibrate": "calibrate",
    "server.federation": "Federation",
    "simulation.estimators": "PrivateFederatedClassifier PrivateFederatedRegressor",
    "simulation.simulate": "resume simulate simulate_many",
    "studies.audit.auditing": "audit",
    "studies.paper.reproduce": "reproduce",
    "studies.rehearsal.rehearsing": "rehearse",
}
_HOMES = {name: home for home, names in _NAMES.items() for name in names.split()}

# What `help` and `import *` look at; without torch there is nothing of TorchModel to show.
__all__ = [
    name for name in sorted(_HOMES) if name != "TorchModel" or find_spec("torch") is not None
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'sottovoce' has no attribute '{name}'")
    if name == "TorchModel" and find_spec("torch") is None:
        raise ImportError("TorchModel needs torch; run: pip install 'sottovoce[torch]'")
    return getattr(import_module(f"sottovoce.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
