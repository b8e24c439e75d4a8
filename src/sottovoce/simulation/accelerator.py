"""Play a batch of runs on an accelerator: rounds begin before the losses of earlier ones are known.

A launch costs the host about as much as an accelerator needs for a round of a small model. So
several rounds, a *stretch*, go in one launch, on the guess that the horizon stays. A wrong guess is
thrown away and the run continues from the round before it, so that the result is the same, bit for
bit. The number of rounds is an input of the program: one compilation serves stretches of every
length. The models and scores of all rounds are kept, so that a run may continue from any of them.

A program whose loop has a variable length blocks the thread that launched it until its last round,
without holding Python's lock. So another thread launches the stretches, while this one keeps the
books of the rounds before and prices those to come.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple, TypeAlias, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from numpy.typing import NDArray

from sottovoce.models.base import JaxModel, Params
from sottovoce.server import rounds
from sottovoce.simulation.compiled import (
    AfterRound,
    BatchRound,
    BatchRun,
    Packing,
    PreparedRounds,
    RoundOptions,
    RoundResult,
    RunTable,
    Seating,
    StackedRows,
    compute_round,
    count_seats,
    pack,
    unpack,
)

Words: TypeAlias = NDArray[np.uint32]


# From a stretch's results, each leaf [rounds, runs, …], and the next one's inputs to its results.
Launch: TypeAlias = Callable[[RoundResult, Any], RoundResult]


@partial(jax.jit, static_argnums=2)
def repeat_models(params: Params, memory: dict[str, Params], rounds: int) -> RoundResult:
    """Return models [runs, …] as the results of the rounds from which a first stretch starts."""
    params, memory = jax.tree.map(
        lambda leaf: jnp.broadcast_to(leaf, (rounds, *leaf.shape)), (params, memory)
    )
    score = jnp.zeros((rounds, *jax.tree.leaves(params)[0].shape[1:2], 4))
    return RoundResult(params, score, memory)


def compile_stretch(
    model: JaxModel,
    rows: StackedRows,
    stack: RoundResult,
    words: Words,
    layout: Packing,
    options: RoundOptions,
) -> Launch:
    """Compile the function that plays a stretch.

    `words` are the packed inputs of each round, [rounds + 1, runs, …]; the last line has the round
    to start from, and how many there are. It is compiled here, with the caller's JAX settings, and
    may be called from any thread.
    """
    inputs = rows, stack.params, stack.memory, words
    lowered = _play_stretch.lower(model, *inputs, layout=layout, options=options)
    compiled = lowered.compile()  # JAX caches it for the next run

    def launch(stack: RoundResult, words: Any) -> RoundResult:
        results: RoundResult = compiled(rows, stack.params, stack.memory, words)
        results.score.copy_to_host_async()  # begun early, so that reading it does not wait
        return results

    return launch


@partial(jax.jit, static_argnums=0, static_argnames=("layout", "options"))
def _play_stretch(
    model: JaxModel,
    rows: StackedRows,
    params: Params,
    memory: dict[str, Params],
    words: Array,
    *,
    layout: Packing,
    options: RoundOptions,
) -> RoundResult:
    _VERSIONS.append(model)
    start, count = words[-1, 0, :2].astype(jnp.int32)
    before = RoundResult(params, jnp.zeros((*words[:-1].shape[:2], 4)), memory)

    def step(k: Array, carried: tuple[RoundResult, RoundResult]) -> tuple[RoundResult, RoundResult]:
        last, stack = carried
        orders, now = unpack(_take_round(words, k), layout)
        new = compute_round(model, rows, last.params, last.memory, orders, now, options)
        return new, jax.tree.map(
            lambda kept, leaf: jax.lax.dynamic_update_index_in_dim(kept, leaf, k, 0), stack, new
        )

    last: RoundResult = jax.tree.map(lambda leaf: _take_round(leaf, start), before)
    stack: RoundResult = jax.tree.map(jnp.zeros_like, before)
    _, played = jax.lax.fori_loop(0, count, step, (last, stack))
    return cast(RoundResult, played)


def _take_round(leaf: Array, k: Array) -> Array:
    return cast(Array, jax.lax.dynamic_index_in_dim(leaf, k, keepdims=False))


_VERSIONS: list[JaxModel] = []  # one entry per compilation: JAX counts only calls


AHEAD = 16  # rounds in a stretch of one run
FEWER = 8  # of a batch, whose models fill more memory, or where a loss may prove the guess wrong
STACK_BYTES = 1 << 30  # of the models in a stretch
SECONDS = 0.1  # of a stretch at most: Ctrl-C and `on_round` wait for its end
AT_ONCE = 2  # stretches: one is played while the next one waits


def may_go_ahead(batch: list[BatchRun]) -> bool:
    """Return whether rounds may begin on a guess: of a single run, or where no loss can be wrong.

    No guess is made where the optimiser keeps the best round, because a loss decides which one it
    is; with a schedule from Python, which answers about real rounds only; and with a custom model
    whose parameters are not all float32, because their types may change in the first round.
    """
    federations = [run.federation for run in batch]
    _, params, _, memory = batch[0].at
    if any(fed.finish.best or fed.parts.schedule is not None for fed in federations):
        return False
    if any(leaf.dtype != np.float32 for leaf in jax.tree.leaves((params, memory))):
        return False
    return len(batch) == 1 or all(federation.schedule.steady for federation in federations)


def play_ahead(
    model: JaxModel,
    batch: list[BatchRun],
    after_round: AfterRound | None = None,
    *,
    most: int = AHEAD,
) -> Iterator[None]:
    """Play a batch stretch by stretch; `most` is the number of rounds in a stretch."""
    thread = ThreadPoolExecutor(1, "stretches")
    try:
        yield from rounds.play_rounds(batch, AheadEngine(model, batch, thread, most), after_round)
    finally:
        thread.shutdown(cancel_futures=True)  # waits for the stretch that is being played


class _Stretch(NamedTuple):
    """A stretch on its way: the rounds of its runs, and their results."""

    opened: list[PreparedRounds]
    stack: Future[RoundResult]
    began: float


class AheadEngine:
    """The engine of an accelerator, which begins rounds on a guess.

    The rounds of a stretch that has ended are closed one by one: `prepare_rounds` returns the next
    one as it was guessed, or prices another one if the guess was wrong.
    """

    def __init__(
        self, model: JaxModel, batch: list[BatchRun], thread: ThreadPoolExecutor, most: int
    ) -> None:
        self.table, self.model, self.thread = RunTable(model, batch), model, thread
        most = most if len(batch) == 1 else min(most, FEWER)
        _, params, _, memory = batch[0].at
        size = sum(leaf[0].nbytes for leaf in jax.tree.leaves((params, memory)))
        self.most: int = max(1, min(most, STACK_BYTES // (count_seats(len(batch)) * size)))
        self.steady = all(run.federation.schedule.steady for run in batch)
        self.right_guesses = 0  # in a row
        self.pace, self.ended = math.inf, 0.0  # seconds per round, and when the newest one ended
        self.begun: deque[_Stretch] = deque()
        self.done: _Stretch | None = None  # the stretch that was read last, up to round `at`
        self.at = -1
        self.seating = Seating([], {})
        self.launch: Launch | None = None
        self.start: Future[RoundResult] = Future()  # the models that the next stretch starts from,
        self.index = 0  # and their round in that stretch
        self.live, self.guess = list(range(len(batch))), [run.state for run in batch]

    def prepare_rounds(self, live: Sequence[int]) -> PreparedRounds:
        """Return the next round of each run that is not over, begun early or priced now."""
        opened = self._find_guessed_round()
        batch = self.table.batch
        if opened is not None and all(
            rounds.is_same_round(batch[i].federation, batch[i].state, prepared)
            for i, prepared in opened.items()
        ):
            self.right_guesses += 1
            return opened
        self.right_guesses = 0 if opened is not None else self.right_guesses
        for begun in self.begun:
            begun.stack.cancel()
        self.begun.clear()
        if self.done is not None:  # the next stretch starts from the last complete round
            self.start, self.index = self.done.stack, self.at
        self.done = None
        self.live, self.guess = list(live), [run.state for run in batch]
        return self.table.prepare_runs(self.live, self.guess)

    def begin_rounds(self, opened: PreparedRounds) -> bool:
        """Begin as many stretches as may be under way; this round is the first of the next one."""
        if self.done is not None and self.at + 1 < len(self.done.opened):
            return False  # this round has been computed already
        while len(self.begun) < AT_ONCE and self._begin_stretch(None if self.begun else opened):
            pass
        return True

    def end_rounds(self, opened: PreparedRounds) -> Iterator[tuple[int, rounds.PlayedRound]]:
        """Wait for the stretch that holds this round, unless it has ended."""
        self.at += 1
        if self.done is None or self.at == len(self.done.opened):
            self.done, self.at = self.begun.popleft(), 0
            stack = self.done.stack.result()
            self.scores, self.models = np.asarray(stack.score), (stack.params, stack.memory)
            waited, self.ended = max(self.ended, self.done.began), time.monotonic()
            self.pace = (self.ended - waited) / len(self.done.opened)
        return self.table.split_results(
            self.seating, opened, self.scores[self.at], self.models, self.at
        )

    def _find_guessed_round(self) -> PreparedRounds | None:
        """Return the round after the last one as it was begun early, or None."""
        if self.done is not None and self.at + 1 < len(self.done.opened):
            return self.done.opened[self.at + 1]
        return self.begun[0].opened[0] if self.begun else None

    def _begin_stretch(self, known: PreparedRounds | None) -> bool:
        """Begin the next stretch; return False where there is none, or seats must change first.

        `known` is its first round, where that is not a guess.
        """
        opened = self.table.prepare_runs(self.live, self.guess) if known is None else known
        if not opened or (self.begun and self.seating.is_too_large(opened)):
            return False
        if self.seating.is_too_large(opened):
            self.seating, self.launch = self.table.assign_seats(opened), None
        stretch: list[BatchRound] = []
        length = self._choose_length()
        while opened and not self.seating.is_too_large(opened):
            stretch.append((opened, list(self.guess)))
            for i, prepared in opened.items():
                federation = self.table.batch[i].federation
                self.guess[i] = rounds.guess_next_state(federation, self.guess[i], prepared)
            self.live = list(opened)
            if len(stretch) == length:
                break
            opened = self.table.prepare_runs(self.live, self.guess)
        words, layout = self._pack_stretch(stretch)
        if self.launch is None:
            first = repeat_models(*self.table.gather_models(self.seating), self.most)
            self.start, self.index = Future(), 0
            self.start.set_result(first)
            self.launch = compile_stretch(
                self.model, self.table.rows, first, words, layout, self.table.options
            )
        launch, start = self.launch, self.start
        # Copied now, so that the other thread has nothing to wait for between two stretches.
        words[-1, 0, :2] = self.index, len(stretch)
        given = jax.device_put(words)  # one array: each has its own cost
        # That thread has launched the stretch before.
        stack = self.thread.submit(lambda: launch(start.result(), given))
        self.begun.append(_Stretch([opened for opened, _ in stretch], stack, time.monotonic()))
        self.start, self.index = stack, len(stretch) - 1
        return True

    def _choose_length(self) -> int:
        """Return as many rounds as were guessed right in a row, so that few are wasted."""
        sure = self.most if self.steady else max(1, min(self.right_guesses, FEWER))
        return max(1, min(self.most, sure, int(SECONDS / max(self.pace, 1e-6))))

    def _pack_stretch(self, stretch: list[BatchRound]) -> tuple[Words, Packing]:
        """Return the packed inputs [rounds + 1, runs, …]; beyond the last round zeros."""
        count = len(self.seating.runs)
        now = np.array([next(iter(opened.values())).round.t for opened, _ in stretch], np.uint32)
        orders = self.table.make_orders(self.seating, stretch)
        rows, layout = pack((orders, np.repeat(now, count)))
        words = np.zeros((self.most + 1, count, rows.shape[1]), np.uint32)
        words[: len(stretch)] = rows.reshape(len(stretch), count, -1)
        return words, layout
