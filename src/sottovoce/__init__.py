"""sottovoce: federated learning in which no client has to trust the server.

What is here is public; everything is loaded on first use, so that `import sottovoce` is quick.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sottovoce.calibrator import calibrate
    from sottovoce.errors import InputError, Refusal, SottovoceError
    from sottovoce.privacy.budget import Budget, Guarantee

__version__ = "0.1.0"

_HOMES = {
    "Budget": "privacy.budget",
    "Guarantee": "privacy.budget",
    "InputError": "errors",
    "Refusal": "errors",
    "SottovoceError": "errors",
    "calibrate": "calibrator",
}

__all__ = ["Budget", "Guarantee", "InputError", "Refusal", "SottovoceError", "calibrate"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'sottovoce' has no attribute '{name}'")
    return getattr(import_module(f"sottovoce.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
