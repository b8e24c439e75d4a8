"""The server of a real federation: whom to ask, what to believe, when to stop. No transport.

    greet → members → schedule → Round → cohort → requests → [clients answer or do not]
      → checks → weights → average → evaluate on public rows → schedule …

What carries the messages is a `Transport`: Flower's in `flower/`, or a function call in the tests.
The state is saved before a round is asked and after it is closed, so that a server that was killed
asks the same clients the same thing again and gets the stored answers: nothing is debited twice,
and the model is the one that the uploads give (rule R12).
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from sottovoce import checkpoint, record, seeds
from sottovoce.checkpoint import ServerState
from sottovoce.errors import Malformed, RunError
from sottovoce.fairness import fairness
from sottovoce.federation import Federation, of_members
from sottovoce.holdings import Holdings
from sottovoce.learning.names import named, unnamed
from sottovoce.learning.own import as_device
from sottovoce.plan import Plan
from sottovoce.privacy.tank import FULL, Tank
from sottovoce.protocol import Request
from sottovoce.rounds.cohort import pick
from sottovoce.rounds.schedule import Round
from sottovoce.seeds import Purpose
from sottovoce.server import checks
from sottovoce.server.average import average
from sottovoce.server.checks import Accepted, Declined, Expected
from sottovoce.server.registry import Member
from sottovoce.simulation import course
from sottovoce.simulation.run import RoundDone, done_of, first_model, scores
from sottovoce.trained import Trained

UPLOADS = "uploads"
LASTING = ("empty", "policy", "replay")  # reasons to say no that will not go away
PATIENCE = 3  # rounds in a row that a client may miss before it is not asked any more
GREETING_SECONDS = 60.0  # for a client that appears in the middle of a run
CEILING = 16.0  # times the noise that an equal share of a full tank would need

Arrays = dict[str, NDArray[np.float32]]


class Transport(Protocol):
    """Carries bytes. Routes are its own names for connections; a client is its vault."""

    def greet(self, seconds: float) -> Mapping[str, bytes]:
        """The greetings of clients that have appeared since the last call, by route."""
        ...

    def ask(self, requests: Mapping[str, bytes], seconds: float) -> Mapping[str, bytes]:
        """What came back in time, by route; silence and failure are absent."""
        ...


@dataclass(frozen=True)
class Patience:
    """How long the server waits, and for how many."""

    clients: int  # that must greet before the run begins
    gathering: float = 120.0  # seconds for that
    round: float = 600.0  # seconds for the answers of a round
    minimum: int = 1  # uploads without which a round does not count
    tries: int = 3  # how often a round is asked before the run stops


@dataclass(eq=False)
class _Desk:
    """What the server knows of its clients beside the state: replaced as they answer."""

    members: list[Member]
    routes: dict[str, str] = field(default_factory=dict)  # vault → route
    gone: dict[int, str] = field(default_factory=dict)  # not asked any more, and why
    missed: dict[int, int] = field(default_factory=dict)  # rounds in a row without an upload

    def online(self) -> NDArray[np.bool_]:
        return np.array([i not in self.gone for i in range(len(self.members))])


def conduct(
    plan: Plan,
    public: Holdings,
    transport: Transport,
    patience: Patience,
    *,
    out: Path,
    on_round: Callable[[RoundDone], None] | None = None,
    resume: bool = False,
    keep_uploads: bool = False,
    insecure: bool = False,
    server: str = "",
    versions: Mapping[str, str] | None = None,
    check: Callable[[], None] = lambda: None,
) -> Trained:
    """Run a federation of real clients to its end; the run folder is that of `simulate`.

    `public` has the server's own validation and test rows, and no training rows. `check` is called
    where the run may be interrupted (between rounds). `insecure` says that the
    transport was not encrypted, and is written into the record.
    """
    plan = plan.replace(noise="secure")  # refuses what exists in simulation only (R7, R10)
    desk = _gather(transport, patience)
    _require_fit(plan, public, desk.members)
    began = datetime.now(UTC)
    if resume:
        state, arrays, header = checkpoint.load(out)
        desk.members = _same_members(desk.members, header["members"])
        desk.gone = {int(i): why for i, why in header["gone"].items()}
        federation = of_members(Plan(**header["plan"]), desk.members, public)
        params: Arrays = {n: np.asarray(a, np.float32) for n, a in arrays.items()}
    else:
        federation = of_members(plan, desk.members, public)
        seed = seeds.fresh()
        params = named(first_model(federation.model, seed))
        tree = unnamed(federation.model, dict(params))
        loss, accuracy = scores(federation.model, tree, public.validation)
        signal = None if plan.server.signal == "clients" else loss
        state = replace(
            course.start(federation, loss, accuracy, signal), tank=_tank(desk.members, None)
        )
        header = {"run": secrets.token_hex(16), "seed": seed, "plan": federation.plan.to_dict()}
        checkpoint.make(out)
        record.write_rounds(out, state)
    status, since = "finished", time.monotonic() - state.seconds
    try:
        while (turn := federation.schedule.round(state.progress)) is not None:
            if state.exhausted or not desk.online().any():
                break
            header |= {
                "members": [m.vault for m in desk.members],
                "gone": {str(i): why for i, why in desk.gone.items()},
            }
            checkpoint.save(out, state, params, header)
            check()
            came = _round(
                federation, desk, state, params, turn, header, transport, patience, server
            )
            if came.uploads and keep_uploads:
                _keep(out, turn.t, came)
            state, params = _closed(federation, desk, state, params, turn, came, since)
            if state.exhausted:
                break
            record.append_round(out, state)
            if on_round is not None and (done := done_of(state)) is not None:
                on_round(done)
    except KeyboardInterrupt:
        status = "interrupted"
        raise
    except BaseException:
        status = "failed"
        raise
    finally:
        made = _record(federation, desk, state, params, status, began, insecure, versions or {})
        record.write(out, made, federation, state, dict(params))
        if status == "finished":
            (out / checkpoint.NAME).unlink(missing_ok=True)
        else:
            checkpoint.save(out, state, params, header)
    return Trained(made, federation.model, unnamed(federation.model, dict(params)), out)


def _require_fit(plan: Plan, public: Holdings, members: list[Member]) -> None:
    """Refuse before anything is spent what the clients would refuse anyway."""
    features = int(np.prod(public.shape))
    for member in members:
        if (member.features, member.classes) != (features, public.classes):
            raise RunError(
                f"client {member.name} has {member.features} features and {member.classes} "
                f"classes, and the plan's data {features} and {public.classes}; they must agree"
            )
        if plan.recipe().clip > member.clip:
            raise RunError(
                f"local.clip is {plan.recipe().clip:g} and client {member.name} allows "
                f"{member.clip:g}; lower it"
            )
        if member.unit == "client" and plan.local.unit == "record":
            raise RunError(f"client {member.name} protects all its data; set local.unit = client")
        if plan.rounds.rounds > member.max_rounds:
            raise RunError(
                f"rounds.rounds is {plan.rounds.rounds} and client {member.name} allows "
                f"{member.max_rounds}; lower it"
            )


@dataclass(frozen=True, eq=False)
class _Came:
    """What came back in a round."""

    asked: NDArray[np.int64]
    uploads: dict[int, Accepted]
    blobs: dict[int, bytes]
    refused: dict[str, int]  # reasons, counted: the clients' own, `silent` and `malformed`


def _round(
    federation: Federation,
    desk: _Desk,
    state: ServerState,
    params: Arrays,
    turn: Round,
    header: Mapping[str, Any],
    transport: Transport,
    patience: Patience,
    server: str,
) -> _Came:
    """Ask the cohort, again where too few answered, until enough uploads count."""
    terms, plan = federation.terms, federation.plan
    rng = seeds.generator(header["seed"], Purpose.COHORT, turn.t)
    ids = pick(terms.cohort, asked=state.asked, size=terms.per_round, rng=rng, online=desk.online())
    device = as_device(
        federation.model, shape=federation.held.shape, classes=federation.held.classes
    )
    request = Request(
        run=header["run"],
        round=turn,
        clients=terms.clients,
        per_round=terms.per_round,
        cohort=terms.cohort,
        recipe=federation.recipe,
        form=device.form,
        params=params,
        loss_bound=plan.server.loss_bound if plan.server.signal == "clients" else None,
        server=server,
    )
    came = _Came(ids, {}, {}, {})
    for attempt in range(patience.tries):
        waiting = [int(i) for i in ids if i not in came.uploads and int(i) not in desk.gone]
        if not waiting or (attempt and len(came.uploads) >= patience.minimum):
            break
        desk.routes |= _new_routes(transport, desk)
        blobs = {
            desk.routes[desk.members[i].vault]: replace(
                request, receipt=desk.members[i].receipt
            ).to_blob()
            for i in waiting
            if desk.members[i].vault in desk.routes
        }
        answers = transport.ask(blobs, patience.round)
        for i in waiting:
            blob = answers.get(desk.routes.get(desk.members[i].vault, ""))
            _take(came, desk, i, blob, _expected(federation, request, desk.members[i]))
    if len(came.uploads) < patience.minimum and not all(int(i) in desk.gone for i in ids):
        reasons = ", ".join(f"{why}: {n}" for why, n in sorted(came.refused.items()))
        raise RunError(
            f"round {turn.t + 1} got {len(came.uploads)} uploads of {len(ids)} asked and needs "
            f"{patience.minimum} ({reasons or 'no answer'}); mend the clients and resume the run"
        )
    return came


def _take(came: _Came, desk: _Desk, i: int, blob: bytes | None, expected: Expected) -> None:
    """Count one answer, once."""
    why = "silent"
    if blob is not None:
        try:
            read = checks.read(blob, expected)
        except Malformed:
            why = "malformed"
        else:
            if isinstance(read, Accepted):
                came.uploads[i], came.blobs[i] = read, blob
                account = read.account or desk.members[i].account
                desk.members[i] = replace(desk.members[i], receipt=read.receipt, account=account)
                desk.missed.pop(i, None)
                return
            assert isinstance(read, Declined)
            why = read.code
    came.refused[why] = came.refused.get(why, 0) + 1
    desk.missed[i] = desk.missed.get(i, 0) + 1
    if why in LASTING:
        desk.gone[i] = why
    elif desk.missed[i] >= PATIENCE:
        desk.gone[i] = "silent"


def _expected(federation: Federation, request: Request, member: Member) -> Expected:
    terms, ceiling = federation.terms, 1e6
    if member.account is not None:
        planned = terms.planned(federation.schedule.rounds)
        ceiling = CEILING * float(np.sqrt(max(1, planned) / member.account.capacity))
    return Expected(
        run=request.run,
        t=request.round.t,
        request=request.hash(),
        params=request.params,
        recipe=request.recipe,
        member=member,
        ceiling=ceiling,
        loss_bound=request.loss_bound,
    )


def _closed(
    federation: Federation,
    desk: _Desk,
    state: ServerState,
    params: Arrays,
    turn: Round,
    came: _Came,
    since: float,
) -> tuple[ServerState, Arrays]:
    """Average what counts, evaluate, tell the schedule, write the books."""
    clients = len(desk.members)
    uploads = np.zeros(clients, dtype=bool)
    uploads[list(came.uploads)] = True
    sigma = np.full((federation.terms.releases, clients), np.nan)
    for i, read in came.uploads.items():
        sigma[:, i] = read.sigma
    asked = state.asked.copy()
    asked[came.asked] += 1
    tank = _tank(desk.members, state.tank, uploads)
    prepared = course.Prepared(
        turn=turn,
        weight=course.weights(federation, uploads, sigma[0]),
        sigma=sigma,
        signal_sigma=np.full(clients, np.nan),
        mu2=np.asarray(tank.spent_mu2 - state.tank.spent_mu2),
        uploads=uploads,
        tank=tank,
        asked=asked,
    )
    loss, accuracy, heard = float("nan"), float("nan"), float("nan")
    if came.uploads:
        params = mean(came.uploads, prepared.weight)
        tree = unnamed(federation.model, dict(params))
        loss, accuracy = heard, _ = scores(federation.model, tree, federation.held.validation)
        if federation.plan.server.signal == "clients":
            told = np.array([came.uploads[i].loss for i in sorted(came.uploads)], np.float64)
            heard = float(prepared.weight[sorted(came.uploads)] @ told)
    state = course.finish(
        federation,
        state,
        prepared,
        loss=loss,
        accuracy=accuracy,
        signal=heard,
        seconds=time.monotonic() - since,
    )
    if came.refused and not state.exhausted:
        last = {**state.rounds[-1], "asked": came.asked.tolist(), "refused": dict(came.refused)}
        state = replace(state, rounds=(*state.rounds[:-1], last))
    return state, params


def mean(uploads: Mapping[int, Accepted], weight: NDArray[np.float64]) -> Arrays:
    """The new model: Σ p_i w̃_i in float64, in the order of the clients, as float32."""
    order = sorted(uploads)
    total = average([dict(uploads[i].params) for i in order], weight[order])  # type: ignore[arg-type]
    with np.errstate(over="ignore"):
        return {name: leaf.astype(np.float32) for name, leaf in total.items()}


def _keep(out: Path, t: int, came: _Came) -> None:
    folder = out / UPLOADS
    folder.mkdir(exist_ok=True)
    for i, blob in came.blobs.items():
        checkpoint.replace(folder / f"{t:05d}-{i:05d}", blob)


def _tank(
    members: list[Member], before: Tank | None, uploads: NDArray[np.bool_] | None = None
) -> Tank:
    """The clients' tanks as they disclose them; an undisclosed one shows as full and untouched."""
    known = [m.account for m in members]
    capacity = np.array([1.0 if a is None else a.capacity for a in known])
    spent = np.array([0.0 if a is None else a.spent for a in known]) / capacity
    units = np.minimum(np.ceil(spent * FULL), FULL).astype(np.int64)
    if before is None:
        zero = np.zeros(len(members), dtype=np.int64)
        return Tank(capacity, units, units, zero)
    units = np.maximum(units, before.spent)
    counted = 0 if uploads is None else uploads.astype(np.int64)
    return Tank(capacity, units, before.opened, before.debits + counted)


def _gather(transport: Transport, patience: Patience) -> _Desk:
    """The members of the run: whoever greets in time, at least so many, in the order of names."""
    deadline, found = time.monotonic() + patience.gathering, dict[str, Member]()
    routes: dict[str, str] = {}
    why = ""
    while len(found) < patience.clients and time.monotonic() < deadline:
        for route, blob in transport.greet(max(1.0, deadline - time.monotonic())).items():
            try:
                member = Member.from_hello(blob)
            except Malformed as error:
                why = f"; one that did: {error}"
                continue
            found[member.vault], routes[member.vault] = member, route
        if len(found) < patience.clients:
            time.sleep(0.2)
    if len(found) < patience.clients:
        raise RunError(
            f"{len(found)} of {patience.clients} clients greeted within "
            f"{patience.gathering:g} seconds{why}; start the others, or ask for fewer"
        )
    return _Desk(sorted(found.values(), key=lambda m: (m.name, m.vault)), routes)


def _new_routes(transport: Transport, desk: _Desk) -> dict[str, str]:
    """Clients of this run that have come back by another route."""
    known, routes = {member.vault for member in desk.members}, {}
    for route, blob in transport.greet(GREETING_SECONDS).items():
        try:
            vault = Member.from_hello(blob).vault
        except Malformed:
            continue
        if vault in known:
            routes[vault] = route
    return routes


def _same_members(now: list[Member], then: list[str]) -> list[Member]:
    """The members in the order of the run that is resumed; one that is missing is refused."""
    found = {member.vault: member for member in now}
    missing = [vault for vault in then if vault not in found]
    if missing:
        raise RunError(
            f"{len(missing)} of the run's {len(then)} clients have not greeted; start them first"
        )
    return [found[vault] for vault in then]


def _record(
    federation: Federation,
    desk: _Desk,
    state: ServerState,
    params: Arrays,
    status: str,
    began: datetime,
    insecure: bool,
    versions: Mapping[str, str],
) -> dict[str, Any]:
    model = federation.model
    test = scores(model, unnamed(model, dict(params)), federation.held.test)
    return record.make(
        federation,
        state,
        dict(params),
        seed=None,
        status=status,
        started=began,
        test=test,
        fairness=fairness(np.zeros(0, bool), None, federation.epsilon, federation.delta),
        engine="flower",
        not_covered=("insecure-transport",) if insecure else (),
        versions=versions,
    )
