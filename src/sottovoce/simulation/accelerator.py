"""A batch of runs on an accelerator: the next rounds begin before the losses of these are known.

Several rounds go in one launch, on the guess that the horizon stays. A wrong guess is thrown away
and the run goes on from the round before it, so that the result is the same, bit for bit. A
program whose loop has a length of its own keeps the thread that launched it waiting until its last
round, without Python's lock: so a thread of its own launches the rounds, while this one keeps the
books of the rounds before and prices those to come.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import NamedTuple, TypeAlias, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from numpy.typing import NDArray

from sottovoce.models.base import JaxModel, Params
from sottovoce.server import rounds
from sottovoce.simulation.compiled import (
    Packing,
    RoundResult,
    Signal,
    StackedRows,
    pack,
    traced,
    unpack,
)
from sottovoce.simulation.table import (
    AfterRound,
    BatchRun,
    PreparedRounds,
    RunTable,
    Seat,
    Seating,
    orders_of,
)

# Several rounds in one launch: a host that asks an accelerator for each round waits for it.
#
# A launch costs the host about as much as an accelerator needs for the round of a small model. So
# the orders of the next rounds go there together, and a loop on the accelerator plays them. How
# many they are is a number like the others: one compilation serves stretches of every length. Each
# round's models and score are kept, one beside the other, so that a run may go on from any of them.


Words: TypeAlias = NDArray[np.uint32]


class BatchPosition(NamedTuple):
    """A round of a stretch that was played: where the next one starts."""

    stack: RoundResult  # every leaf is [rounds, runs, …]; beyond the last round played it is zero
    at: int


Launch: TypeAlias = Callable[[BatchPosition, Words, int], RoundResult]


def first(params: Params, memory: dict[str, Params], rounds: int) -> BatchPosition:
    """Models [runs, …] as the place where a run's first stretch starts."""
    params, memory, score = _repeated(params, memory, rounds)
    return BatchPosition(RoundResult(params, score, memory), 0)


@partial(jax.jit, static_argnums=2)
def _repeated(
    params: Params, memory: dict[str, Params], rounds: int
) -> tuple[Params, dict[str, Params], Array]:
    params, memory = jax.tree.map(
        lambda leaf: jnp.broadcast_to(leaf, (rounds, *leaf.shape)), (params, memory)
    )
    return params, memory, jnp.zeros((rounds, *jax.tree.leaves(params)[0].shape[1:2], 4))


def program(
    model: JaxModel,
    rows: StackedRows,
    start: BatchPosition,
    words: Words,
    layout: Packing,
    *,
    signal: Signal = "public",
    longest: int = 0,
) -> Launch:
    """(where to start, `words` of some rounds, how many they are) → their outcome, compiled now.

    `words` are the packed orders of each round, [rounds, runs, …]. It is compiled here, where the
    settings of JAX are the caller's, and may be called from any thread.
    """
    options = {"signal": signal, "longest": longest, "layout": layout}
    stack, where = start.stack, np.zeros(2, np.int32)
    lowered = _stretch.lower(model, rows, stack.params, stack.memory, words, where, **options)
    compiled = lowered.compile()  # JAX remembers it: the next run finds it made

    def launch(start: BatchPosition, words: Words, count: int) -> RoundResult:
        stack, where = start.stack, np.array([start.at, count], np.int32)
        made: RoundResult = compiled(rows, stack.params, stack.memory, words, where)
        made.score.copy_to_host_async()  # it is on its way before it is asked for
        return made

    return launch


@partial(jax.jit, static_argnums=0, static_argnames=("signal", "longest", "layout"))
def _stretch(
    model: JaxModel,
    rows: StackedRows,
    params: Params,
    memory: dict[str, Params],
    words: Array,
    where: Array,
    *,
    signal: Signal,
    longest: int,
    layout: Packing,
) -> RoundResult:
    _VERSIONS.append(model)
    start, count = where
    before = RoundResult(params, jnp.zeros((*words.shape[:2], 4)), memory)

    def step(k: Array, carried: tuple[RoundResult, RoundResult]) -> tuple[RoundResult, RoundResult]:
        last, stack = carried
        orders, now = unpack(_round(words, k), layout)
        new = traced(
            model, rows, last.params, last.memory, orders, now, signal=signal, longest=longest
        )
        return new, jax.tree.map(
            lambda kept, leaf: jax.lax.dynamic_update_index_in_dim(kept, leaf, k, 0), stack, new
        )

    last: RoundResult = jax.tree.map(lambda leaf: _round(leaf, start), before)
    stack: RoundResult = jax.tree.map(jnp.zeros_like, before)
    _, played = jax.lax.fori_loop(0, count, step, (last, stack))
    return cast(RoundResult, played)


def _round(leaf: Array, k: Array) -> Array:
    return cast(Array, jax.lax.dynamic_index_in_dim(leaf, k, keepdims=False))


def versions() -> int:
    """How many versions of a stretch have been compiled in this process."""
    return len(_VERSIONS)


_VERSIONS: list[JaxModel] = []  # one each: JAX itself counts only what it called


AHEAD = 8  # rounds in a stretch
STACK_BYTES = 1 << 30  # of the models in it
SECONDS = 0.1  # of a stretch at most: Ctrl-C and whoever watches the rounds wait for its end
AT_ONCE = 2  # stretches: one is played while the next one waits


def may_go_ahead(batch: list[BatchRun]) -> bool:
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
    model: JaxModel,
    batch: list[BatchRun],
    after_round: AfterRound | None = None,
    *,
    most: int = AHEAD,
) -> Iterator[None]:
    """Stretch by stretch; `most` is the number of rounds in a stretch."""
    thread = ThreadPoolExecutor(1, "stretches")
    try:
        yield from rounds.play_rounds(batch, Ahead(model, batch, thread, most), after_round)
    finally:
        thread.shutdown(cancel_futures=True)  # what is on its way comes to its end first


class _Begun(NamedTuple):
    """A stretch on its way: what the runs ask for in each of its rounds, and what comes of it."""

    asks: list[PreparedRounds]
    stack: Future[RoundResult]
    began: float


class Ahead:
    """The engine of an accelerator: what is known of a batch, what is guessed, what is on its way.

    A stretch that has come is gone through round by round: `ask` hands out the next round as it was
    guessed, or prices it anew where the guess was wrong.
    """

    def __init__(
        self, model: JaxModel, batch: list[BatchRun], thread: ThreadPoolExecutor, most: int
    ) -> None:
        self.table, self.model, self.thread = RunTable(model, batch), model, thread
        _, params, _, memory = batch[0].at
        size = sum(leaf[0].nbytes for leaf in jax.tree.leaves((params, memory)))
        seats = 1 << (len(batch) - 1).bit_length()
        self.most: int = max(1, min(most, STACK_BYTES // (seats * size)))
        self.steady = all(run.federation.schedule.steady for run in batch)
        self.right = 0  # guesses in a row that were right
        self.pace, self.ended = math.inf, 0.0  # seconds a round, and when the newest one came
        self.begun: deque[_Begun] = deque()
        self.done: _Begun | None = None  # the stretch that has come, gone through up to `at`
        self.at = -1
        self.seating = Seating([], {})
        self.launch: Launch | None = None
        self.start: Future[RoundResult] = (
            Future()
        )  # where the next stretch starts, and at which round
        self.index = 0
        self.live, self.guess = list(range(len(batch))), [run.state for run in batch]

    def prepare_rounds(self, live: Sequence[int]) -> PreparedRounds:
        """The next round of each run that is not over: the one that was begun, if it was right."""
        asks = self._begun_next()
        batch = self.table.batch
        if asks is not None and all(
            rounds.is_same_round(batch[i].federation, batch[i].state, ask)
            for i, ask in asks.items()
        ):
            self.right += 1
            return asks
        self.right = 0 if asks is not None else self.right
        for begun in self.begun:
            begun.stack.cancel()
        self.begun.clear()
        if self.done is not None:  # the next stretch starts from what is known
            self.start, self.index = self.done.stack, self.at
        self.done = None
        self.live, self.guess = list(live), [run.state for run in batch]
        return self.table.asked(self.live, self.guess)

    def begin_rounds(self, asks: PreparedRounds) -> bool:
        """Begin stretches, as many as may be on their way; this round is the first of the next."""
        if self.done is not None and self.at + 1 < len(self.done.asks):
            return False  # it has been computed
        while len(self.begun) < AT_ONCE and self._begin(None if self.begun else asks):
            pass
        return True

    def end_rounds(self, asks: PreparedRounds) -> Iterator[tuple[int, rounds.PlayedRound]]:
        """Wait for the stretch that holds this round, unless it is there."""
        self.at += 1
        if self.done is None or self.at == len(self.done.asks):
            self.done, self.at = self.begun.popleft(), 0
            stack = self.done.stack.result()
            self.scores, self.made = np.asarray(stack.score), (stack.params, stack.memory)
            waited, self.ended = max(self.ended, self.done.began), time.monotonic()
            self.pace = (self.ended - waited) / len(self.done.asks)
        return self.table.played(self.seating, asks, self.scores[self.at], self.made, self.at)

    def _begun_next(self) -> PreparedRounds | None:
        """What was asked for, on a guess, in the round after the last one; None: none was begun."""
        if self.done is not None and self.at + 1 < len(self.done.asks):
            return self.done.asks[self.at + 1]
        return self.begun[0].asks[0] if self.begun else None

    def _begin(self, known: PreparedRounds | None) -> bool:
        """Begin the next stretch; False where there is none, or where seats must change first.

        `known` is what its first round asks for, where that is not a guess.
        """
        asks = self.table.asked(self.live, self.guess) if known is None else known
        if not asks or (self.begun and self._are_few(asks)):
            return False
        if self._are_few(asks):
            self.seating, self.launch = self.table.seated(asks), None
        told: list[PreparedRounds] = []
        places: list[Seat] = []
        length = self._length()
        while asks and not self._are_few(asks):
            places += self.table.places(self.seating, self.guess, asks)
            told.append(asks)
            for i, ask in asks.items():
                federation = self.table.batch[i].federation
                self.guess[i] = rounds.guess_next_state(federation, self.guess[i], ask)
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

    def _are_few(self, asks: PreparedRounds) -> bool:
        """Whether half of the seats are enough."""
        return 2 * len(asks) <= len(self.seating.runs) or not self.seating.runs

    def _length(self) -> int:
        """As many rounds as were guessed right, so that a run whose horizon shrinks wastes few."""
        sure = self.most if self.steady else max(1, self.right)
        return max(1, min(self.most, sure, int(SECONDS / max(self.pace, 1e-6))))

    def _packed(self, told: list[PreparedRounds], places: list[Seat]) -> tuple[Words, Packing]:
        """[rounds, runs, …], beyond the last round zeros."""
        seats = len(self.seating.runs)
        now = np.array([next(iter(asks.values())).turn.t for asks in told], np.uint32)
        orders = orders_of(places, self.seating.always)
        rows, layout = pack((orders, np.repeat(now, seats)))
        words = np.zeros((self.most, seats, rows.shape[1]), np.uint32)
        words[: len(told)] = rows.reshape(len(told), seats, -1)
        return words, layout


def _played(
    launch: Launch, start: Future[RoundResult], index: int, words: Words, count: int
) -> RoundResult:
    """In the other thread: the stretch before was launched by the same, and is there."""
    return launch(BatchPosition(start.result(), index), words, count)
