"""Who takes part in a run, by which route, and who is not asked any more. No transport of its own.

A client is known by its vault and its key; a route is the transport's name for a connection, and
carries one client. Whoever greets with something that is no greeting, or that the plan has no use
for, is left out: one client must not keep the others from beginning. Nor must one that knows
another's vault: with another key it is another client, and without keys the first route that greets
is kept while its client answers.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from sottovoce.errors import InputError, Malformed, RunError
from sottovoce.server.registry import Member

LASTING = ("empty", "policy", "replay", "samples")  # reasons for no that will not go away
SILENT = "silent"
MISSES = 3  # rounds in a row that a client may miss before it has to sit some out
GREETING_SECONDS = 60.0  # for a client that appears in the middle of a run
MOST_SECONDS = 10.0**7

log = logging.getLogger("sottovoce.roll")


class Transport(Protocol):
    """Carries bytes. Routes are its own names for connections; a client is its vault."""

    def greet(self, seconds: float) -> Mapping[str, bytes]:
        """The greetings of clients that have appeared since the last call, by route."""
        ...

    def ask(self, requests: Mapping[str, bytes], seconds: float) -> Mapping[str, bytes]:
        """What came back in time, by route; silence and failure are absent."""
        ...

    def key(self, route: str) -> str | None:
        """The fingerprint of the key that this route is authenticated by, if there is one."""
        ...


@dataclass(frozen=True)
class Patience:
    """How long the server waits, and for how many.

    >>> Patience(clients=3, minimum=0)
    Traceback (most recent call last):
        ...
    sottovoce.errors.InputError: minimum must be a whole number ≥ 1, got 0; a round without \
uploads would teach nothing
    """

    clients: int  # that must greet before the run begins
    gathering: float = 120.0  # seconds for that
    round: float = 600.0  # seconds for the answers of a round
    minimum: int = 1  # uploads without which a round does not count
    tries: int = 3  # how often silent clients are asked in one round before the run stops
    pause: float = 5.0  # seconds until the second of these; four times as long until the next, …

    def __post_init__(self) -> None:
        for name, why in (
            ("clients", "somebody has to take part"),
            ("minimum", "a round without uploads would teach nothing"),
            ("tries", "a round is asked at least once"),
        ):
            if type(value := getattr(self, name)) is not int or value < 1:
                raise InputError.of(name, value, "a whole number ≥ 1", why)
        for name, least, why in (
            ("gathering", "above", "clients need time to appear"),
            ("round", "above", "clients need time to answer"),
            ("pause", "of at least", "leave it out for 5 seconds"),
        ):
            seconds = getattr(self, name)
            known = type(seconds) in (int, float) and 0 <= seconds <= MOST_SECONDS
            if not known or (seconds == 0 and name != "pause"):
                bound = f"seconds {least} 0, up to {MOST_SECONDS:g}"
                raise InputError.of(name, seconds, bound, why)

    def before(self, tried: int) -> float:
        """Seconds from one ask of a round to the next, after so many; at most the deadline.

        >>> [Patience(clients=3).before(tried) for tried in (1, 2, 9)]
        [5.0, 20.0, 600.0]
        """
        return float(min(self.pause * 4 ** (tried - 1), self.round))


@dataclass(eq=False)
class Roll:
    """The members of a run, how they are reached, and what became of them.

    Who misses three rounds in a row sits out 1, then gets one try, sits out 2, 4, …: a client that
    greets and never answers must not cost every round the whole deadline. Nobody is tried of whom
    nothing was heard since: a greeting, or an answer that was no upload. An upload ends it all.
    """

    members: list[Member]
    routes: dict[str, str] = field(default_factory=dict)  # `Member.identity` → route
    gone: dict[int, str] = field(default_factory=dict)  # not asked any more, and why
    missed: dict[int, int] = field(default_factory=dict)  # rounds in a row without an upload
    rests: dict[int, int] = field(default_factory=dict)  # rounds that a silent one sits out yet
    heard: set[int] = field(default_factory=set)  # who has said something since it was silent
    # Σ‖w̃ − w‖²/σ² and Σd of a client's uploads that counted: what `checks` holds its noise against.
    shown: dict[int, tuple[float, int]] = field(default_factory=dict)

    def online(self) -> NDArray[np.bool_]:
        """Who is asked."""
        return np.array([i not in self.gone for i in range(len(self.members))], dtype=bool)

    def place(self, member: Member, route: str, *, movable: bool = False) -> bool:
        """Reach a client by this route from now on, and nobody else; False if it has another."""
        if self.routes.get(member.identity, route) != route and not movable:
            log.warning("%s greets as %s, which has another route", route, member.name)
            return False
        others = {who: r for who, r in self.routes.items() if r != route}
        self.routes = others | {member.identity: route}
        return True

    def close(self, missing: Mapping[int, str]) -> None:
        """A round closed without these, for reasons of their own or because of their silence."""
        self.rests = {i: rounds - 1 for i, rounds in self.rests.items() if rounds > 1}
        for i, why in missing.items():
            (self.heard.discard if why == SILENT else self.heard.add)(i)
            self.missed[i] = self.missed.get(i, 0) + 1
            if self.missed[i] >= MISSES:
                self.gone[i], self.rests[i] = SILENT, 2 ** (self.missed[i] - MISSES)

    def recall(self, *, at_once: bool = False) -> None:
        """One more try for the silent that were heard of since, now or when they have sat out."""
        for i in [i for i, why in self.gone.items() if why == SILENT and i in self.heard]:
            if at_once or i not in self.rests:
                del self.gone[i]

    def over(self, besides: Sequence[int] = ()) -> bool:
        """Whether everyone has declined for good, apart from those named."""
        every = range(len(self.members))
        return all(self.gone.get(i) in LASTING for i in every if i not in besides)

    def welcome(self, transport: Transport, seconds: float = GREETING_SECONDS) -> None:
        """Members that have come back, perhaps by another route: the silent may be tried again."""
        for route, blob in transport.greet(seconds).items():
            try:
                greeting = replace(Member.from_hello(blob), key=transport.key(route))
            except Malformed:
                continue
            for i, member in enumerate(self.members):
                here = self.routes.get(member.identity)
                away = here is None or i in self.missed or transport.key(here) != member.key
                # Under another key only one that nobody has spoken for since the server began.
                same = greeting.key == member.key or here is None
                if (
                    greeting.vault == member.vault
                    and same
                    and self.place(member, route, movable=away)
                ):
                    self.heard.add(i)
                    break
        self.recall()

    def to_json(self) -> dict[str, Any]:
        """What a server must not forget: receipts and what was spent, too."""
        return {
            "members": [member.to_head() for member in self.members],
            "gone": {str(i): why for i, why in self.gone.items()},
            "shown": {str(i): list(pair) for i, pair in self.shown.items()},
            "registered": [[member.key, member.registered] for member in self.members],
        }


def gather(
    transport: Transport,
    patience: Patience,
    misfit: Callable[[Member], str | None],
    admitted: Mapping[str, int] | None = None,
) -> Roll:
    """The members of a new run: whoever greets in time and fits, at least so many, by name.

    `misfit` says in a few words why the plan has no use for a client. `admitted` are the samples of
    the clients that may take part, by key fingerprint or name; without it anyone may.
    """
    deadline, found = time.monotonic() + patience.gathering, dict[str, Member]()
    roll, why, taken = Roll([]), "", dict[str, str]()
    while len(found) < patience.clients and time.monotonic() < deadline:
        for route, blob in transport.greet(max(1.0, deadline - time.monotonic())).items():
            try:
                member = replace(Member.from_hello(blob), key=transport.key(route))
                wrong = misfit(member)
                if wrong is None and admitted is not None:
                    entry = str(member.key if member.key in admitted else member.name)
                    holder = taken.get(entry, member.identity)
                    if entry not in admitted or (holder != member.identity and holder in found):
                        wrong = "is not in the table of admitted clients, or was admitted before"
                    else:
                        taken[entry] = member.identity
                    member = replace(member, registered=admitted.get(entry))
                if wrong is not None:
                    raise Malformed(f"client {member.name} {wrong}")
            except Malformed as error:
                log.warning("%s cannot take part: %s", route, error)
                why = f" (and of one that did, {error})"
                continue
            if roll.place(member, route):
                if member.key is not None:  # a key is one client: it has another vault now
                    found = {who: own for who, own in found.items() if own.key != member.key}
                found[member.identity] = member
                found = {who: own for who, own in found.items() if who in roll.routes}
        if len(found) < patience.clients:
            time.sleep(0.2)
    if len(found) < patience.clients:
        raise RunError(
            f"{len(found)} of {patience.clients} clients that can take part greeted within "
            f"{patience.gathering:g} seconds{why}; start the others, or ask for fewer"
        )
    names = Counter(member.name for member in found.values())
    roll.members = sorted(
        (
            # Also of one that ends as if it had been told apart: nobody can choose another's name.
            replace(m, name=f"{m.name[:100]} ({m.key or m.vault})")
            if names[m.name] > 1 or m.name.endswith(")")
            else m
            for m in found.values()
        ),
        key=lambda member: (member.name, member.vault),
    )
    return roll


def rejoin(transport: Transport, patience: Patience, told: Mapping[str, Any]) -> Roll:
    """The members of a run that goes on, as the server knew them; who is not back yet is silent.

    It waits for all that may still answer, and goes on with those that came in time, if they are
    enough for a round.
    """
    gone = {int(i): why for i, why in told["gone"].items() if why != SILENT}
    members = [Member.from_head(head) for head in told["members"]]
    facts = told.get("registered", [(None, None)] * len(members))
    roll = Roll(
        [replace(m, key=key, registered=n) for m, (key, n) in zip(members, facts, strict=True)],
        gone=gone,
    )
    roll.shown = {int(i): (pair[0], pair[1]) for i, pair in told.get("shown", {}).items()}
    awaited = {m.identity for i, m in enumerate(roll.members) if i not in gone}
    deadline = time.monotonic() + patience.gathering
    while awaited - roll.routes.keys() and time.monotonic() < deadline:
        roll.welcome(transport, max(1.0, deadline - time.monotonic()))
        if awaited - roll.routes.keys():
            time.sleep(0.2)
    here = len(awaited & roll.routes.keys())
    if awaited and here < min(patience.minimum, len(awaited)):
        raise RunError(
            f"{here} of the run's {len(roll.members)} clients greeted within "
            f"{patience.gathering:g} seconds, and a round needs {patience.minimum}; start them"
        )
    return roll
