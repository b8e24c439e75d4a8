"""Who takes part in a run: the clients as their greetings describe them, and how they are reached.

A client is known by its vault's id and, where nodes are authenticated, by its key, never by a
connection. A *route* is the transport's name for a connection, and carries one client. Weights,
sensitivities and the bounds that uploads are checked against come from here, not from the uploads.

`Member` rejects a greeting whose numbers are missing or not finite, or whose capacity is not what
its (ε, δ) is worth. A client whose greeting is rejected, or that the plan cannot use, is left out,
so that one client cannot keep the others from beginning. Nor can a client that knows another's
vault take its place: with another key it is another client, and without keys the first route that
greets is kept while its client answers.
"""

from __future__ import annotations

import logging
import re
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from sottovoce.client import messages
from sottovoce.client.messages import HELLO, TABLE_HELLO, Receipt, is_finite, read_encoding
from sottovoce.client.vault.policy import MOST_COUNTED
from sottovoce.errors import InputError, Malformed, RunError
from sottovoce.privacy import calibration
from sottovoce.privacy.budget import UNITS, Budget, Calibration, Unit

LASTING = ("empty", "policy", "replay", "samples")  # codes of refusals that are final
SILENT = "silent"
MISSES = 3  # rounds in a row that a client may miss before it has to sit some out
GREETING_SECONDS = 60.0  # for a client that appears in the middle of a run
MOST_SECONDS = 10.0**7

log = logging.getLogger("sottovoce.roll")


class Transport(Protocol):
    """Carries bytes. It names connections by routes; a client is known by its vault."""

    def greet(self, seconds: float) -> Mapping[str, bytes]:
        """Return the greetings of clients that have appeared since the last call, by route."""

    def ask(self, requests: Mapping[str, bytes], seconds: float) -> Mapping[str, bytes]:
        """Send requests and return what came back in time, by route; silence is absent."""

    def key(self, route: str) -> str | None:
        """Return the fingerprint of the key that authenticates this route, if there is one."""


@dataclass(frozen=True)
class Patience:
    """How long the server waits, and for how many clients.

    >>> Patience(clients=3, minimum=0)
    Traceback (most recent call last):
        ...
    sottovoce.errors.InputError: minimum must be a whole number ≥ 1, got 0; a round without \
uploads would teach nothing
    """

    clients: int  # that must greet before the run begins
    gathering: float = 120.0  # seconds for that
    deadline: float = 600.0  # seconds for the answers of a round
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
            ("deadline", "above", "clients need time to answer"),
            ("pause", "of at least", "leave it out for 5 seconds"),
        ):
            seconds = getattr(self, name)
            is_number = type(seconds) in (int, float) and 0 <= seconds <= MOST_SECONDS
            if not is_number or (seconds == 0 and name != "pause"):
                bound = f"seconds {least} 0, up to {MOST_SECONDS:g}"
                raise InputError.of(name, seconds, bound, why)

    def compute_pause(self, tried: int) -> float:
        """Return the seconds until the next try of a round, after `tried` of them.

        >>> [Patience(clients=3).compute_pause(tried) for tried in (1, 2, 9)]
        [5.0, 20.0, 600.0]
        """
        return float(min(self.pause * 4 ** (tried - 1), self.deadline))


@dataclass(eq=False)
class Roll:
    """The members of a run, their routes, and which of them are not asked any more.

    A client that misses three rounds in a row sits out 1 round, then gets one try, sits out 2, 4,
    …: a client that greets and never answers must not cost every round the whole deadline. It is
    tried again only if something was heard of it since: a greeting, or an answer that was no
    upload. An upload clears its misses.
    """

    members: list[Member]
    routes: dict[str, str] = field(default_factory=dict)  # `Member.identity` → route
    gone: dict[int, str] = field(default_factory=dict)  # why a client is not asked any more
    missed: dict[int, int] = field(default_factory=dict)  # rounds in a row without an upload
    rests: dict[int, int] = field(default_factory=dict)  # rounds that it still sits out
    heard: set[int] = field(default_factory=set)  # clients heard of since they were silent
    # Σ‖w̃ − w‖²/σ² and Σd of a client's accepted uploads, with which `checks` tests its noise.
    shown: dict[int, tuple[float, int]] = field(default_factory=dict)

    def find_online(self) -> NDArray[np.bool_]:
        """Return which members may be asked."""
        return np.array([i not in self.gone for i in range(len(self.members))], dtype=bool)

    def set_route(self, member: Member, route: str, *, movable: bool = False) -> bool:
        """Reach a client by this route from now on, and nobody else; False if it has another."""
        if self.routes.get(member.identity, route) != route and not movable:
            log.warning("%s greets as %s, which has another route", route, member.name)
            return False
        others = {who: r for who, r in self.routes.items() if r != route}
        self.routes = others | {member.identity: route}
        return True

    def close_round(self, missing: Mapping[int, str]) -> None:
        """Count a missed round for these clients, unless they have declined for good."""
        self.rests = {i: rounds - 1 for i, rounds in self.rests.items() if rounds > 1}
        for i in missing.keys() - self.gone.keys():
            (self.heard.discard if missing[i] == SILENT else self.heard.add)(i)
            self.missed[i] = self.missed.get(i, 0) + 1
            if self.missed[i] >= MISSES:
                self.gone[i], self.rests[i] = SILENT, 2 ** (self.missed[i] - MISSES)

    def retry_silent(self, *, at_once: bool = False) -> None:
        """Allow silent clients that were heard since one more try, at once or after sitting out."""
        for i in [i for i, why in self.gone.items() if why == SILENT and i in self.heard]:
            if at_once or i not in self.rests:
                del self.gone[i]

    def find_left(self) -> set[int]:
        """Return the members that have not declined for good."""
        return {i for i in range(len(self.members)) if self.gone.get(i) not in LASTING}

    def greet_returning(self, transport: Transport, seconds: float = GREETING_SECONDS) -> None:
        """Find the routes of members that greet again; silent ones may then be tried again."""
        for route, blob in transport.greet(seconds).items():
            try:
                greeting = replace(Member.from_hello(blob), key=transport.key(route))
            except Malformed:
                continue
            for i, member in enumerate(self.members):
                former = self.routes.get(member.identity)
                movable = former is None or i in self.missed or transport.key(former) != member.key
                # A key stays for a run; only a member that had none takes the first that greets.
                is_new = former is None and member.key is None
                if (
                    greeting.vault == member.vault
                    and (is_new or greeting.key == member.key)
                    and self.set_route(member, route, movable=movable)
                ):
                    self.heard.add(i)
                    break
        self.retry_silent()

    def to_json(self) -> dict[str, Any]:
        """Return what a server must remember between sessions, with receipts and spent budgets."""
        return {
            "members": [member.to_head() for member in self.members],
            "gone": {str(i): why for i, why in self.gone.items()},
            "shown": {str(i): list(pair) for i, pair in self.shown.items()},
            "registered": [[member.key, member.registered] for member in self.members],
        }


def gather_members(
    transport: Transport,
    patience: Patience,
    misfit: Callable[[Member], str | None],
    admitted: Mapping[str, int] | None = None,
) -> Roll:
    """Wait for the members of a new run: all that greet in time and fit.

    `misfit` says in a few words why the plan cannot use a client. `admitted` are the samples of the
    clients that may take part, by key fingerprint or name; without it anyone may.
    """
    deadline, members = time.monotonic() + patience.gathering, dict[str, Member]()
    roll, why, taken = Roll([]), "", dict[str, str]()
    while len(members) < patience.clients and time.monotonic() < deadline:
        for route, blob in transport.greet(max(1.0, deadline - time.monotonic())).items():
            try:
                member = replace(Member.from_hello(blob), key=transport.key(route))
                if (wrong := misfit(member)) is not None:
                    raise Malformed(f"client {member.name} {wrong}")
                if admitted is not None:
                    member = _require_admitted(member, admitted, taken, members)
            except Malformed as error:
                log.warning("%s cannot take part: %s", route, error)
                why = f" (another one greeted, but {error})"
                continue
            if roll.set_route(member, route):
                if member.key is not None:  # one key is one client, which has a new vault now
                    members = {who: m for who, m in members.items() if m.key != member.key}
                members[member.identity] = member
                members = {who: m for who, m in members.items() if who in roll.routes}
        if len(members) < patience.clients:
            time.sleep(0.2)
    if len(members) < patience.clients:
        raise RunError(
            f"{len(members)} of {patience.clients} clients that can take part greeted within "
            f"{patience.gathering:g} seconds{why}; start the others, or ask for fewer"
        )
    names = Counter(member.name for member in members.values())
    roll.members = sorted(
        (
            # A name that ends in ")" gets the suffix, too: nobody can imitate another's full name.
            replace(m, name=f"{m.name[:100]} ({m.key or m.vault})")
            if names[m.name] > 1 or m.name.endswith(")")
            else m
            for m in members.values()
        ),
        key=lambda member: (member.name, member.vault),
    )
    return roll


def _require_admitted(
    member: Member, admitted: Mapping[str, int], taken: dict[str, str], known: Mapping[str, Member]
) -> Member:
    """Return a client with its registered samples; reject one without an entry of its own.

    `taken` has the client that holds an entry, until another one has its key or its route.
    """
    entry = str(member.key if member.key in admitted else member.name)
    holder = taken.get(entry, member.identity)
    is_own = entry == member.key or not entry.startswith("SHA256:")
    is_free = holder == member.identity or holder not in known
    if not (entry in admitted and is_own and is_free):
        raise Malformed(
            f"client {member.name} is not in the table of admitted clients, or was admitted before"
        )
    taken[entry] = member.identity
    return replace(member, registered=admitted[entry])


def rejoin_members(transport: Transport, patience: Patience, header: Mapping[str, Any]) -> Roll:
    """Wait for the members of a resumed run, as its checkpoint names them.

    It waits for all that may still answer, and goes on with those that came in time if they are
    enough for a round; the others count as silent.
    """
    gone = {int(i): why for i, why in header["gone"].items() if why != SILENT}
    members = [Member.from_head(head) for head in header["members"]]
    facts = header.get("registered", [(None, None)] * len(members))
    roll = Roll(
        [replace(m, key=key, registered=n) for m, (key, n) in zip(members, facts, strict=True)],
        gone=gone,
    )
    roll.shown = {int(i): (pair[0], pair[1]) for i, pair in header.get("shown", {}).items()}
    awaited = {m.identity for i, m in enumerate(roll.members) if i not in gone}
    deadline = time.monotonic() + patience.gathering
    while awaited - roll.routes.keys() and time.monotonic() < deadline:
        roll.greet_returning(transport, max(1.0, deadline - time.monotonic()))
        if awaited - roll.routes.keys():
            time.sleep(0.2)
    here = len(awaited & roll.routes.keys())
    if awaited and here < min(patience.minimum, len(awaited)):
        raise RunError(
            f"{here} of the run's {len(roll.members)} clients greeted within "
            f"{patience.gathering:g} seconds, and a round needs {patience.minimum}; start them"
        )
    return roll


LARGEST_HELLO = 1 << 16
MOST_SAMPLES = 2**32  # the limit of a vault
_VERSION = re.compile(r"[0-9A-Za-z.+!-]{1,40}")
_POLICY = ("samples", "unit", "clip", "calibration", "floor", "max_rounds")


@dataclass(frozen=True)
class Account:
    """What a client discloses of its tank: budget, capacity and what is spent (μ²)."""

    epsilon: float
    delta: float
    capacity: float
    spent: float

    @classmethod
    def from_json(cls, values: Any) -> Account | None:
        """Read an account from a message; None where the client hides it.

        >>> Account.from_json({"epsilon": 8.0, "delta": 1e-5, "capacity": 2.7, "spent": 0.0}).delta
        1e-05
        """
        if values is None:
            return None
        keys = ("epsilon", "delta", "capacity", "spent")
        if not isinstance(values, Mapping) or values.keys() != set(keys):
            raise Malformed("the client's budget does not have the expected keys")
        numbers = [values[key] for key in keys]
        if not all(is_finite(n) and n >= 0 for n in numbers):
            raise Malformed("the client's budget has a value that is not a finite number ≥ 0")
        account = cls(*map(float, numbers))
        try:
            Budget(account.epsilon, account.delta)
        except InputError as error:
            raise Malformed(f"the client's {error}") from None
        if not account.capacity > 0:
            raise Malformed("the client's budget is worth nothing")
        if account.spent > account.capacity * (1 + 1e-9):
            raise Malformed("the client says it has spent more than its budget is worth")
        return account

    def require_worth(self, kind: Calibration) -> None:
        """Reject a capacity that is not what (ε, δ) is worth.

        A vault that promised with exact calibration may switch to zcdp later and keeps the exact
        capacity, which is the most that any (ε, δ) is worth.
        """
        try:
            least, most = (
                float(calibration.capacity(self.epsilon, self.delta, calibration=rule))
                for rule in (kind, "exact")
            )
        except InputError as error:
            raise Malformed(f"the client's {error}") from None
        if self.capacity < least * (1 - 1e-6):
            raise Malformed("the client's budget is worth less than its (ε, δ)")
        if self.capacity > most * (1 + 1e-6):
            raise Malformed("the client's budget is worth more than its (ε, δ)")


@dataclass(frozen=True)
class Member:
    """One client of the run, as its greeting describes it."""

    name: str
    vault: str
    samples: int
    features: int
    classes: int
    unit: Unit
    clip: float
    calibration: Calibration
    floor: float | None
    max_rounds: int
    account: Account | None
    receipt: Receipt
    max_steps: int | None = None  # None: a client of an older version, which did not say
    version: str | None = None  # of its sottovoce
    key: str | None = None  # fingerprint of the key that its route is authenticated by
    registered: int | None = None  # the samples that the server's operator knows it to have
    run_share: float | None = 1.0  # part of its budget that a run may take; None: hidden
    rows_per_person: int = 0  # 0: its samples are rows
    sum: Mapping[str, Any] | None = None  # its key and terms, where it releases sums
    promised: Sequence[int] | None = None  # h and c of its first sums, where they were others
    encoding: str | None = None  # of its table (`data.tables.Layout.encoding`); None: arrays

    @classmethod
    def from_hello(cls, blob: bytes) -> Member:
        """Read a greeting; raise `Malformed` if it is none, or a refusal."""
        head, arrays = messages.unpack(blob, limit=LARGEST_HELLO)
        if head.get("kind") == "refusal":
            raise Malformed(f"the client declined to greet ({str(head.get('code'))[:20]!a})")
        if arrays:
            raise Malformed("the greeting does not have the expected keys")
        return cls.from_head(head)

    @classmethod
    def from_head(cls, head: Mapping[str, Any]) -> Member:
        """Read the head of a greeting, or what `to_head` stored of one."""
        keys = {"schema", "name", "features", "classes", "policy", "budget", "receipt"}
        encoding = read_encoding(head, HELLO, TABLE_HELLO)
        if head.keys() - {"version", "encoding"} != keys:
            raise Malformed("the greeting does not have the expected keys")
        version = head.get("version")
        if version is not None and not (isinstance(version, str) and _VERSION.fullmatch(version)):
            raise Malformed("the greeting's version is not a version number")
        policy, receipt = head["policy"], Receipt.from_json(head["receipt"])
        newer = {"max_steps", "run_share", "rows_per_person", "sum", "promised"}
        if not isinstance(policy, Mapping) or policy.keys() - newer != set(_POLICY):
            raise Malformed("the greeting's policy does not have the expected keys")
        whole = [head["features"], head["classes"], policy["samples"], policy["max_rounds"]]
        whole += [policy[key] for key in ("max_steps", "rows_per_person") if key in policy]
        if not all(type(n) is int and 1 <= n <= MOST_SAMPLES for n in whole):
            raise Malformed("the greeting has a size that is not a whole number from 1 to 2³²")
        if policy["unit"] not in UNITS or policy["calibration"] not in ("exact", "zcdp"):
            raise Malformed("the greeting's unit or calibration is not one that vaults can have")
        sums, first = policy.get("sum"), policy.get("promised", [1, 0])
        if sums is not None and (
            not isinstance(sums, Mapping)
            or sums.keys() != {"member", "honest", "corrupt"}
            or not re.fullmatch(r"[0-9a-f]{64}", str(sums["member"]))
            or not all(type(sums[key]) is int for key in ("honest", "corrupt"))
        ):
            raise Malformed("the greeting's terms of sums are malformed")
        is_pair = isinstance(first, list) and len(first) == 2
        if not (is_pair and all(type(n) is int and 0 <= n <= MOST_COUNTED for n in first)):
            raise Malformed("the greeting's terms of earlier sums are malformed")
        floor = 0.0 if policy["floor"] is None else policy["floor"]
        share = policy.get("run_share", 1.0)
        if share is not None and not (is_finite(share) and 0 < share <= 1):
            raise Malformed("the greeting's run_share is not a number above 0, up to 1")
        for name, number in (("clip", policy["clip"]), ("floor", floor)):
            if not is_finite(number) or number < 0:
                raise Malformed(f"the greeting's {name} is not a finite number ≥ 0")
        name = head["name"]
        # Names are printed, and must not contain control characters of a terminal.
        if not isinstance(name, str) or not 1 <= len(name) <= 200 or not name.isprintable():
            raise Malformed("the greeting's name is not 1 to 200 printable characters")
        account = Account.from_json(head["budget"])
        if account is not None:
            account.require_worth(policy["calibration"])
        # As floats, whether JSON had them as 1 or as 1.0.
        exact = {k: None if policy[k] is None else float(policy[k]) for k in ("clip", "floor")}
        return cls(
            name=name,
            vault=receipt.vault,
            features=head["features"],
            classes=head["classes"],
            account=account,
            receipt=receipt,
            version=version,
            encoding=encoding,
            **{**policy, **exact},
        )

    @property
    def identity(self) -> str:
        """What tells a client from every other: its vault and, where there is one, its key."""
        return self.vault if self.key is None else f"{self.vault} {self.key}"

    @property
    def sum_promise(self) -> tuple[int, int]:
        """The h and c that hold for all sums of its budget; h is 1 where it releases none."""
        now = self.sum or {"honest": 1, "corrupt": 0}
        honest, corrupt = self.promised or (now["honest"], now["corrupt"])
        return honest, corrupt

    def to_head(self) -> dict[str, Any]:
        """Return the greeting that the client would send now, with its newest receipt."""
        return {
            "schema": HELLO if self.encoding is None else TABLE_HELLO,
            **({} if self.encoding is None else {"encoding": self.encoding}),
            "name": self.name,
            "features": self.features,
            "classes": self.classes,
            "policy": {
                **{key: getattr(self, key) for key in _POLICY},
                **({} if self.max_steps is None else {"max_steps": self.max_steps}),
                "run_share": self.run_share,
                **({"rows_per_person": self.rows_per_person} if self.rows_per_person else {}),
                **({} if self.sum is None else {"sum": dict(self.sum)}),
                **({} if self.promised is None else {"promised": list(self.promised)}),
            },
            "budget": None if self.account is None else asdict(self.account),
            "receipt": self.receipt.to_json(),
            **({} if self.version is None else {"version": self.version}),
        }
