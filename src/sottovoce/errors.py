"""Every exception that sottovoce raises on purpose.

    SottovoceError
    ├── InputError          what you gave cannot be used
    │   ├── PlanError       a key or a value of a plan
    │   └── NoSensitivity   a training recipe for which no sensitivity bound is known
    ├── Refusal             what you asked would break a promise, so the answer is no
    │   ├── TankEmpty       the privacy budget has nothing left for this release
    │   ├── PolicyRefusal   the client's own policy does not allow it
    │   ├── RoundAnswered   this round of this run already has its one answer
    │   ├── DatasetChanged  a vault was opened with other records than those of its ledger
    │   └── VaultRefusal    a vault that is missing, in use, damaged, a copy or an older state
    ├── Malformed           a message from another machine is not what it should be
    │   ├── OtherSamples    a client's records are no longer those that it greeted with
    │   └── OtherVersion    a message is written in another version of the protocol
    ├── DataError           a dataset is missing, damaged or not what it should be
    ├── RunError            a run folder is missing, damaged or in the way
    │   └── RoundVoid       too few clients completed a round whose sum alone is unmasked
    └── FederationError     a process or a node of a federation failed or did not answer

The command line turns `InputError` into exit code 2 and the others into exit code 1.
Messages are one sentence: the name, the bound, the value that was given, the remedy.

>>> raise InputError.of("clip", -1, "a number > 0", "choose the norm gradients are cut to")
Traceback (most recent call last):
    ...
sottovoce.errors.InputError: clip must be a number > 0, got -1; choose the norm gradients are cut to
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Self


class SottovoceError(Exception):
    """The root of the tree: catch this to catch everything sottovoce raises on purpose."""


class InputError(SottovoceError, ValueError):
    """What you gave cannot be used: a value, a file of yours, or what they say together."""

    @classmethod
    def of(cls, name: str, value: object, bound: str, remedy: str) -> Self:
        """Make the error of a bad value in the one wording: name, bound, value, remedy."""
        return cls(f"{name} must be {bound}, got {_shorten(value)}; {remedy}")


class PlanError(InputError):
    """A key or a value of a plan."""

    @classmethod
    def of(cls, name: str, value: object, bound: str, remedy: str) -> Self:
        """Make the error of a bad value, or of a key that is missing."""
        missing = cls(f"{name} is missing; it must be {bound}; {remedy}")
        return missing if value is None else super().of(name, value, bound, remedy)

    @classmethod
    def no_effect(cls, key: str, where: str, remedy: str = "remove it") -> Self:
        """Make the error of a key that changes nothing beside the other ones."""
        return cls(f"{key} has no effect {where}; {remedy}")


class NoSensitivity(InputError):
    """A training recipe for which no sensitivity bound is known."""


class Refusal(SottovoceError):
    """What you asked would break a promise, so the answer is no."""


class TankEmpty(Refusal):
    """The privacy budget has nothing left for this release."""


class PolicyRefusal(Refusal):
    """The client's own policy does not allow it."""


class RoundAnswered(Refusal):
    """This round of this run already has its one answer."""


class DatasetChanged(Refusal):
    """A vault was opened with other records than those of its ledger."""


class VaultRefusal(Refusal):
    """A vault that is missing, in use, damaged, a copy or an older state."""


class Malformed(SottovoceError):
    """A message from another machine is not what it should be."""


class OtherSamples(Malformed):
    """A client's records are no longer those that it greeted with."""


class OtherVersion(Malformed):
    """A message is written in another version of the protocol."""


class DataError(SottovoceError):
    """A dataset is missing, damaged or not what it should be."""


class RunError(SottovoceError):
    """A run folder is missing, damaged or in the way."""


class RoundVoid(RunError):
    """Too few clients completed a round whose sum alone is unmasked; `blamed` are the others."""

    def __init__(self, text: str, blamed: Iterable[str] = ()) -> None:
        super().__init__(text)
        self.blamed = frozenset(blamed)


class FederationError(SottovoceError):
    """A process or a node of a federation failed or did not answer."""


def _shorten(value: object) -> str:
    """Return the value as text of at most 60 characters."""
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
