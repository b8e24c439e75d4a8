"""A batch of runs on an accelerator: the next rounds begin before the losses of these are known.

Rounds go there in stretches (`stretch`), on the guess that the horizon stays; a wrong guess is
thrown away and the run goes on from the round before it, so that the result is the same, bit for
bit. A program whose loop has a length of its own keeps the thread that launched it waiting until
its last round, without Python's lock: so stretches are launched by a thread of their own, while
this one keeps the books of those before and prices those to come.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import jax
import numpy as np

from sottovoce.models.base import Model
from sottovoce.server import course
from sottovoce.simulation.batch import Seat, orders_of
from sottovoce.simulation.packed import Layout, pack
from sottovoce.simulation.round import Outcome
from sottovoce.simulation.stretch import Launch, Place, Words, first, program
from sottovoce.simulation.table import AfterRound, Asks, Run, Seating, Table

AHEAD = 8  # rounds in a stretch
STACK_BYTES = 1 << 30  # of the models in it
SECONDS = 0.1  # of a stretch at most: Ctrl-C and whoever watches the rounds wait for its end
AT_ONCE = 2  # stretches: one is played while the next one waits


def may_go_ahead(batch: list[Run]) -> bool:
    """Whether to guess: for one run always, for a batch where no loss can prove a guess wrong.

    Not where the best of all rounds is kept, which its loss decides, nor with a model of one's own
    whose numbers are not all of one type: theirs may change with the first round.
    """
    each = [run.federation for run in batch]
    _, params, _, memory = batch[0].at
    if any(own.finish.best for own in each):
        return False
    if any(leaf.dtype != np.float32 for leaf in jax.tree.leaves((params, memory))):
        return False
    return len(batch) == 1 or all(own.schedule.steady for own in each)


def rounds_of(
    model: Model, batch: list[Run], after_round: AfterRound | None = None, *, most: int = AHEAD
) -> Iterator[None]:
    """Stretch by stretch: yields while the accelerator computes, before its answer is awaited.

    `after_round` is called after each round, by the caller's thread. Each run is left at its last
    complete round. `most` is the number of rounds in a stretch.
    """
    thread = ThreadPoolExecutor(1, "stretches")
    try:
        yield from _Ahead(model, batch, thread, most).rounds(after_round)
    finally:
        thread.shutdown(cancel_futures=True)  # what is on its way comes to its end first


class _Begun(NamedTuple):
    """A stretch on its way: what the runs ask for in each of its rounds, and what comes of it."""

    asks: list[Asks]
    stack: Future[Outcome]
    began: float


class _Ahead:
    """Where a batch stands: what is known of it, what is guessed, and what is on its way."""

    def __init__(
        self, model: Model, batch: list[Run], thread: ThreadPoolExecutor, most: int
    ) -> None:
        self.table, self.model, self.thread = Table(model, batch), model, thread
        _, params, _, memory = batch[0].at
        size = sum(leaf[0].nbytes for leaf in jax.tree.leaves((params, memory)))
        seats = 1 << (len(batch) - 1).bit_length()
        self.most: int = max(1, min(most, STACK_BYTES // (seats * size)))
        self.steady = all(run.federation.schedule.steady for run in batch)
        self.right = 0  # guesses in a row that were right
        self.pace, self.ended = math.inf, 0.0  # seconds a round, and when the newest one came
        self.begun: deque[_Begun] = deque()
        self.seating = Seating([], {})
        self.launch: Launch | None = None
        self.start: Future[Outcome] = Future()  # where the next stretch starts, and at which round
        self.index = 0
        self.live, self.guess = list(range(len(batch))), [run.state for run in batch]

    def rounds(self, after_round: AfterRound | None) -> Iterator[None]:
        while True:
            while len(self.begun) < AT_ONCE and self._begin():
                pass
            if not self.begun:
                return
            yield
            done = self.begun.popleft()
            stack = done.stack.result()
            scores, made = np.asarray(stack.score), (stack.params, stack.memory)
            waited, self.ended = max(self.ended, done.began), time.monotonic()
            self.pace = (self.ended - waited) / len(done.asks)
            for index, asks in enumerate(done.asks):
                self.table.book(self.seating, asks, scores[index], made, index)
                is_right = self._is_right(done, index)
                if after_round is not None:
                    after_round(self.table.batch[0])
                if not is_right:
                    break

    def _is_right(self, done: _Begun, index: int) -> bool:
        """Whether the round that was begun after this one is the one that is next now.

        If not, or if none was begun, the next stretch starts from what is known.
        """
        later = [*done.asks[index + 1 :], *(own.asks[0] for own in self.begun)]
        batch = self.table.batch
        if later and all(
            course.same_turn(batch[i].federation, batch[i].state, ask)
            for i, ask in later[0].items()
        ):
            self.right += 1
            return True
        self.right = 0 if later else self.right
        for own in self.begun:
            own.stack.cancel()
        self.begun.clear()
        self.start, self.index = done.stack, index
        self.live, self.guess = list(done.asks[index]), [run.state for run in batch]
        return False

    def _begin(self) -> bool:
        """Begin the next stretch; False where there is none, or where seats must change first."""
        asks = self.table.asked(self.live, self.guess)
        if not asks or (self.begun and self._are_few(asks)):
            return False
        if self._are_few(asks):
            self.seating, self.launch = self.table.seated(asks), None
        told: list[Asks] = []
        places: list[Seat] = []
        length = self._length()
        while asks and not self._are_few(asks):
            places += self.table.places(self.seating, self.guess, asks)
            told.append(asks)
            for i, ask in asks.items():
                federation = self.table.batch[i].federation
                self.guess[i] = course.expected(federation, self.guess[i], ask)
            self.live = list(asks)
            if len(told) == length:
                break
            asks = self.table.asked(self.live, self.guess)
        words, layout = self._packed(told, places)
        if self.launch is None:
            place = first(*self.table.models(self.seating), self.most)
            self.start, self.index = Future(), 0
            self.start.set_result(place.stack)
            self.launch = program(
                self.model,
                self.table.rows,
                place,
                words,
                layout,
                signal=self.table.signal,
                longest=self.table.longest,
            )
        stack = self.thread.submit(_played, self.launch, self.start, self.index, words, len(told))
        self.begun.append(_Begun(told, stack, time.monotonic()))
        self.start, self.index = stack, len(told) - 1
        return True

    def _are_few(self, asks: Asks) -> bool:
        """Whether half of the seats are enough."""
        return 2 * len(asks) <= len(self.seating.runs) or not self.seating.runs

    def _length(self) -> int:
        """As many rounds as were guessed right, so that a run whose horizon shrinks wastes few."""
        sure = self.most if self.steady else max(1, self.right)
        return max(1, min(self.most, sure, int(SECONDS / max(self.pace, 1e-6))))

    def _packed(self, told: list[Asks], places: list[Seat]) -> tuple[Words, Layout]:
        """[rounds, runs, …], beyond the last round zeros."""
        seats = len(self.seating.runs)
        now = np.array([next(iter(asks.values())).turn.t for asks in told], np.uint32)
        orders = orders_of(places, self.seating.always)
        rows, layout = pack((orders, np.repeat(now, seats)))
        words = np.zeros((self.most, seats, rows.shape[1]), np.uint32)
        words[: len(told)] = rows.reshape(len(told), seats, -1)
        return words, layout


def _played(
    launch: Launch, start: Future[Outcome], index: int, words: Words, count: int
) -> Outcome:
    """In the other thread: the stretch before was launched by the same, and is there."""
    return launch(Place(start.result(), index), words, count)
