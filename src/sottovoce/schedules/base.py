"""The interface of a schedule: a value that turns public progress into the next round, or a stop.

    progress = schedule.start(loss of the initial model)
    while (round := schedule.round(progress)) is not None:
        ... train round `round.t`, evaluate the new model ...
        progress = schedule.advance(progress, loss of the new model)

A schedule holds no state. It sees only `Progress`, and all of that is public (losses on a public
set, or noised losses that were paid for). The horizon never grows, and every run ends after at most
`rounds` rounds. What a client does in a `Round` is bounded by its own tank: a schedule can waste
budget, never overspend it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from numbers import Integral, Real
from typing import Any, ClassVar, NoReturn, Protocol

from sottovoce.errors import InputError


@dataclass(frozen=True)
class Round:
    """One round to be done: its number, the horizon T as it stands, and the scale of the noise.

    With `spread` None a client's noise follows from what is left in its tank, σ = Δ·√(r/left).
    Otherwise it is `scale` times the noise of `spread` equal rounds: σ = scale·Δ·√(R₀/left₀), with
    R₀ turns planned in `spread` rounds and left₀ what was left when the run began.
    """

    t: int
    horizon: int
    scale: float = 1.0
    spread: int | None = None


@dataclass(frozen=True)
class Progress:
    """All that a schedule may see.

    `done` rounds are finished, `horizon` is T as it stands, `recent` are the newest losses (as many
    as the schedule needs), `last_discount` is the round after which T last shrank.
    """

    done: int
    horizon: int
    recent: tuple[float, ...] = ()
    last_discount: int = 0


class Schedule(Protocol):
    """What the schedules of `algorithms` have in common."""

    @property
    def rounds(self) -> int:
        """T₀: the horizon at the start, and the most rounds there can be."""

    @property
    def steady(self) -> bool:
        """Whether no loss changes the horizon, so that every round is known in advance."""

    def start(self, loss: float | None) -> Progress:
        """Return the progress before the first round; `loss` is V(w⁰), or None if not known yet."""

    def round(self, progress: Progress) -> Round | None:
        """Return the next round, or None to stop."""

    def advance(self, progress: Progress, loss: float) -> Progress:
        """Return the progress after one more round, whose model has this loss."""


@dataclass(frozen=True)
class CheckedSchedule:
    """A schedule of the user's, with a check of every answer: it cannot lengthen a run.

    `given` has T₀ as `rounds`, and the methods `round(progress)` and `advance(progress, loss)`; a
    method `start(loss)` is optional. They see `Progress` and losses, and nothing else of a run. The
    same arguments must give the same answer, because rounds are also planned ahead and resumed.
    """

    given: Any
    steady: ClassVar[bool] = False  # it is not known of a user's schedule

    def __post_init__(self) -> None:
        missing = [name for name in ("round", "advance") if not hasattr(self.given, name)]
        if missing or isinstance(self.given, type):
            bound = "an object with rounds, round(progress) and advance(progress, loss)"
            raise InputError.of("schedule", self.given, bound, "see sottovoce.schedules.base")
        require_rounds(getattr(self.given, "rounds", None))

    @property
    def rounds(self) -> int:
        """T₀."""
        return int(self.given.rounds)

    def start(self, loss: float | None) -> Progress:
        """Start as the user's schedule does, or with T = T₀ and the first loss."""
        if hasattr(self.given, "start"):
            return self._check_progress("start", 0, self.rounds, loss)
        return Progress(0, self.rounds, recent=() if loss is None else (loss,))

    def round(self, progress: Progress) -> Round | None:
        """Return the next round; refuse one that is not the next, or that lengthens the run."""
        answer = self._ask("round", progress)
        if answer is None:
            return None
        t, horizon = progress.done, progress.horizon
        if (
            not isinstance(answer, Round)
            or not _is_whole(answer.horizon, t + 1, horizon)
            or not _is_whole(answer.t, t, t)
            or not _is_number(answer.scale, 1e-6, 1e6)
            or not (answer.spread is None or _is_whole(answer.spread, 1, self.rounds))
        ):
            self._refuse("round", answer, f"None or a Round with t = {t} and a horizon", horizon)
        return replace(answer, scale=float(answer.scale))

    def advance(self, progress: Progress, loss: float) -> Progress:
        """Return the progress after one more round; refuse one that lengthens the run."""
        return self._check_progress("advance", progress.done + 1, progress.horizon, progress, loss)

    def _ask(self, method: str, *arguments: Any) -> Any:
        answer, again = (getattr(self.given, method)(*arguments) for _ in range(2))
        if repr(answer) != repr(again):  # a NaN does not equal itself, its text does
            name = f"{type(self.given).__name__}.{method}"
            raise InputError(
                f"{name} must give the same answer to the same arguments, got {answer!r:.60} and "
                f"then {again!r:.60}; keep what it needs in Progress.recent, not in the object"
            )
        return answer

    def _check_progress(self, method: str, done: int, horizon: int, *arguments: Any) -> Progress:
        answer = self._ask(method, *arguments)
        if (
            not isinstance(answer, Progress)
            or not _is_whole(answer.done, done, done)
            or not _is_whole(answer.horizon, 0, horizon)
            or not isinstance(answer.recent, tuple)
            or not all(_is_number(loss) for loss in answer.recent)
            or not _is_whole(answer.last_discount, -math.inf, math.inf)
        ):
            self._refuse(method, answer, f"a Progress with done = {done} and a horizon", horizon)
        return replace(answer, recent=tuple(map(float, answer.recent)))

    def _refuse(self, method: str, answer: object, bound: str, horizon: int) -> NoReturn:
        name = f"the answer of {type(self.given).__name__}.{method}"
        text = f"{name} must be {bound} of at most {horizon}, got {answer!r:.90}"
        raise InputError(f"{text}; a horizon never grows")


def _is_whole(value: Any, least: float, most: float) -> bool:
    is_number = isinstance(value, Integral) and not isinstance(value, bool)
    return is_number and bool(least <= value <= most)


def _is_number(value: Any, least: float = -math.inf, most: float = math.inf) -> bool:
    return isinstance(value, Real) and not float(value) < least and not float(value) > most


def require_rounds(rounds: object) -> None:
    """Refuse a T₀ that is not a whole number ≥ 1."""
    if not _is_whole(rounds, 1, math.inf):
        raise InputError.of("rounds", rounds, "a whole number ≥ 1", "say how often clients upload")
