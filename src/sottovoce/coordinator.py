"""The server of a real federation: whom to ask, what to believe, when to stop. No transport.

    greet → members → schedule → Round → cohort → requests → [clients answer or do not]
      → checks → weights → average → evaluate on public rows → schedule …

What carries the messages is a `Transport`: Flower's in `flower/`, or a function call in the tests.
The state is saved before a round is asked and after it is closed, so that a server that was killed
asks the same clients the same thing again and gets the stored answers: nothing is debited twice,
and the model is the one that the uploads give (rule R12).
"""

from __future__ import annotations

import logging
import math
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sottovoce import checkpoint, record, seeds
from sottovoce.checkpoint import ServerState
from sottovoce.errors import InputError, Malformed, RunError
from sottovoce.fairness import fairness
from sottovoce.federation import Federation, of_members
from sottovoce.holdings import Holdings, seen
from sottovoce.learning.form import Form
from sottovoce.learning.names import named, unnamed
from sottovoce.learning.own import as_device
from sottovoce.plan import Plan
from sottovoce.privacy import calibration
from sottovoce.privacy.tank import FULL, Tank
from sottovoce.protocol import Request
from sottovoce.rounds.cohort import pick
from sottovoce.rounds.schedule import Round
from sottovoce.seeds import Purpose
from sottovoce.server import checks
from sottovoce.server.average import average
from sottovoce.server.checks import Accepted, Expected
from sottovoce.server.finish import Memory, handed
from sottovoce.server.registry import Member
from sottovoce.server.roll import LASTING, Patience, Roll, Transport, gather, rejoin
from sottovoce.simulation import course
from sottovoce.simulation.done import RoundDone, done_of
from sottovoce.simulation.finishing import closed
from sottovoce.simulation.scoring import confused, first_model, scores
from sottovoce.trained import Trained

UPLOADS = "uploads"
CEILING = 16.0  # times the noise that an equal share of a full tank would need

log = logging.getLogger("sottovoce.coordinator")

Arrays = dict[str, NDArray[np.float32]]

__all__ = ["Patience", "Transport", "conduct", "mean"]


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
    if resume:
        state, arrays, header, memory = checkpoint.load(out)
        roll = rejoin(transport, patience, header)
        public = seen(Plan(**header["plan"]), public)
        federation = of_members(Plan(**header["plan"]), roll.members, public)
        params: Arrays = {n: np.asarray(a, np.float32) for n, a in arrays.items()}
    else:
        _require_unused(out)
        public = seen(plan, public)
        roll = gather(transport, patience, lambda member: misfit(plan, public, member))
        federation = of_members(plan, roll.members, public)
        seed = seeds.fresh()
        params = named(first_model(federation.model, seed))
        tree = unnamed(federation.model, dict(params))
        loss, accuracy = scores(federation.model, tree, public.validation)
        signal = None if plan.server.signal == "clients" else loss
        state = course.start(federation, loss, accuracy, signal, _tank(roll.members, None))
        memory = federation.finish.begin(params)
        # Asked again after a resume, a request must be the same to the last byte: so the server's
        # name is kept, too.
        header = {"run": secrets.token_hex(16), "seed": seed, "server": server}
        header |= {"plan": federation.plan.to_dict()} | roll.to_json()
        checkpoint.make(out)
    if patience.minimum > federation.terms.per_round:
        raise InputError.of(
            "minimum",
            patience.minimum,
            f"at most {federation.terms.per_round}, the clients of a round",
            "ask for fewer, or raise rounds.per_round",
        )
    record.write_rounds(out, state)
    status, began, since = "finished", datetime.now(UTC), time.monotonic() - state.seconds
    try:
        while (turn := federation.schedule.round(state.progress)) is not None:
            if state.exhausted:
                break
            header |= roll.to_json()
            checkpoint.save(out, state, params, header, memory)
            check()
            came = _round(federation, roll, state, params, turn, header, transport, patience)
            if came.uploads and keep_uploads:
                _keep(out, turn.t, came)
            state, params, memory = _closed(
                federation, roll, state, params, memory, turn, came, since
            )
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
        if status != "finished":
            checkpoint.save(out, state, params, header, memory)  # first: it must not be lost
        final = dict(handed(memory, params))
        made = _record(federation, state, final, status, began, insecure, versions or {})
        record.write(out, made, federation, state, final)
        if status == "finished":
            (out / checkpoint.NAME).unlink(missing_ok=True)
    return Trained(made, federation.model, unnamed(federation.model, final), out)


def _require_unused(out: Path) -> None:
    """A run must not be written over another, least of all over one that could go on."""
    for name in (checkpoint.NAME, "record.json"):
        if (out / name).exists():
            raise InputError.of(
                "out",
                str(out),
                "a folder without a run",
                "name another, or resume the run that lies in it",
            )


def misfit(plan: Plan, public: Holdings, member: Member) -> str | None:
    """Why a plan has no use for a client, in a few words; None if it has.

    What the client would refuse anyway is found here before anything is spent.
    """
    features, recipe = int(np.prod(public.shape)), plan.recipe()
    if (member.features, member.classes) != (features, public.classes):
        return (
            f"has {member.features} features and {member.classes} classes, "
            f"the plan's data {features} and {public.classes}"
        )
    if recipe.clip > member.clip:
        return f"allows a clip of {member.clip:g}, and local.clip is {recipe.clip:g}"
    if member.unit != plan.local.unit:  # its other releases are for its own unit, not the plan's
        whole = {"client": "all its data", "record": "single records"}[member.unit]
        return f"protects {whole}, which local.unit = {member.unit} does"
    if max(plan.rounds.rounds, recipe.steps) > member.max_rounds:
        return f"allows {member.max_rounds} rounds, and rounds.rounds is {plan.rounds.rounds}"
    own = member.account
    if own is None:
        wants = plan.server.weights == "precision"
        return "keeps its budget to itself, and precision weights need it" if wants else None
    if (own.capacity - own.spent) * CEILING**2 < own.capacity:
        # Its noise would be beyond what an upload may have, and each would be paid for in vain.
        return f"has {1 - own.spent / own.capacity:.2%} of its budget left, which is too little"
    return None


@dataclass(frozen=True, eq=False)
class _Came:
    """What came back in a round."""

    asked: list[int] = field(default_factory=list)
    uploads: dict[int, Accepted] = field(default_factory=dict)
    blobs: dict[int, bytes] = field(default_factory=dict)
    why: dict[int, str] = field(default_factory=dict)  # the last reason of who sent no upload

    @property
    def refused(self) -> dict[str, int]:
        """Reasons, counted: the clients' own codes, `silent` and `malformed`."""
        every = [why for i, why in self.why.items() if i not in self.uploads]
        return {why: every.count(why) for why in sorted(set(every))}


def _round(
    federation: Federation,
    roll: Roll,
    state: ServerState,
    params: Arrays,
    turn: Round,
    header: Mapping[str, Any],
    transport: Transport,
    patience: Patience,
) -> _Came:
    """Ask a cohort until enough uploads count: the silent again, others for those who decline."""
    terms, request = federation.terms, _request(federation, params, turn, header)
    rng = seeds.generator(header["seed"], Purpose.COHORT, turn.t)
    asked_hash, came, tried = request.hash(), _Came(), 0
    while tried < patience.tries and len(came.uploads) < patience.minimum:
        roll.welcome(transport)
        waiting = [i for i in came.asked if i not in came.uploads and i not in roll.gone]
        if (room := terms.per_round - len(came.uploads) - len(waiting)) > 0:
            free = roll.online()
            free[came.asked] = False
            more = pick(terms.cohort, asked=state.asked, size=room, rng=rng, online=free).tolist()
            came.asked.extend(more)
            waiting += more
        if not waiting:
            break
        own = {i: roll.members[i] for i in waiting}
        reached = {i: roll.routes[m.vault] for i, m in own.items() if m.vault in roll.routes}
        answers = transport.ask(
            {r: replace(request, receipt=own[i].receipt).to_blob() for i, r in reached.items()},
            patience.round,
        )
        for i in waiting:
            blob = answers.get(reached[i]) if i in reached else None
            _take(came, roll, i, blob, _expected(federation, request, asked_hash, own[i]))
        # Who declines for good is replaced at once; only waiting for the silent wears patience out.
        tried += any(i not in came.uploads and i not in roll.gone for i in waiting)
    if len(came.uploads) >= patience.minimum:
        for i in set(came.asked) - came.uploads.keys() - roll.gone.keys():
            roll.miss(i)
        return came
    if roll.over(besides=list(came.uploads)):
        return _Came(came.asked)  # nobody is left to make it a round: the run ends here
    reasons = ", ".join(f"{why}: {n}" for why, n in came.refused.items())
    raise RunError(
        f"round {turn.t + 1} got {len(came.uploads)} uploads of {len(came.asked)} asked and needs "
        f"{patience.minimum} ({reasons or 'nobody to ask'}); mend the clients and resume the run"
    )


def _request(
    federation: Federation, params: Arrays, turn: Round, header: Mapping[str, Any]
) -> Request:
    terms, plan = federation.terms, federation.plan
    return Request(
        run=header["run"],
        round=turn,
        clients=terms.clients,
        per_round=terms.per_round,
        cohort=terms.cohort,
        recipe=federation.recipe,
        form=_form(federation),
        params=params,
        loss_bound=plan.server.loss_bound if plan.server.signal == "clients" else None,
        server=header["server"],
    )


def _form(federation: Federation) -> Form:
    """The model as clients are told of it: with features, for the pictures that they hold."""
    held = federation.held
    form = as_device(federation.model, shape=held.inputs, classes=held.classes).form
    lens = held.features
    return form if lens is None else replace(form, shape=lens.shape, seen=lens)


def _take(came: _Came, roll: Roll, i: int, blob: bytes | None, expected: Expected) -> None:
    """Count one answer, once; whatever is in it, the others are not to suffer."""
    came.why[i] = "silent"
    if blob is None:
        return
    try:
        read = checks.read(blob, expected)
    except Malformed as error:
        log.warning("client %d sent no upload: %s", i, error)
        came.why[i] = "malformed"
        return
    except Exception:  # a flaw of the checks must not become everyone's
        log.exception("the checks failed on what client %d sent", i)
        came.why[i] = "malformed"
        return
    if isinstance(read, Accepted):
        came.uploads[i], came.blobs[i] = read, blob
        account = read.account or roll.members[i].account
        roll.members[i] = replace(roll.members[i], receipt=read.receipt, account=account)
        roll.missed.pop(i, None)
        return
    came.why[i] = read.code
    if read.code in LASTING:
        roll.gone[i] = read.code


def _expected(federation: Federation, request: Request, asked: str, member: Member) -> Expected:
    """What an honest answer looks like.

    σ/Δ is at most 16 times that of an equal share of the client's whole budget; of one that keeps
    its budget to itself, of the tightest budget that the plan speaks of.
    """
    if member.account is not None:
        worth = member.account.capacity
    else:
        plan = federation.plan
        kind = plan.privacy.calibration
        worth = float(calibration.capacity(*plan.budgets(), calibration=kind).min())
    planned = max(1, federation.terms.planned(federation.schedule.rounds))
    return Expected(
        run=request.run,
        t=request.round.t,
        request=asked,
        params=request.params,
        recipe=request.recipe,
        member=member,
        ceiling=CEILING * math.sqrt(planned / worth),
        loss_bound=request.loss_bound,
    )


def _closed(
    federation: Federation,
    roll: Roll,
    state: ServerState,
    params: Arrays,
    memory: Memory,
    turn: Round,
    came: _Came,
    since: float,
) -> tuple[ServerState, Arrays, Memory]:
    """Average what counts, make the next model of it, evaluate, tell the schedule, write books."""
    clients = len(roll.members)
    uploads = np.zeros(clients, dtype=bool)
    uploads[list(came.uploads)] = True
    sigma = np.full((federation.terms.releases, clients), np.nan)
    for i, read in came.uploads.items():
        sigma[:, i] = read.sigma
    weight = course.weights(federation, uploads, sigma[0])
    sigma[:, [i for i, member in enumerate(roll.members) if member.account is None]] = np.nan  # R9
    asked = state.asked.copy()
    asked[came.asked] += 1
    tank = _tank(roll.members, state.tank, uploads)
    prepared = course.Prepared(
        turn=turn,
        weight=weight,
        sigma=sigma,
        signal_sigma=np.full(clients, np.nan),
        mu2=np.asarray(tank.spent_mu2 - state.tank.spent_mu2),
        uploads=uploads,
        tank=tank,
        asked=asked,
    )
    loss = accuracy = heard = offered = float("nan")
    if came.uploads:
        averaged = mean(came.uploads, prepared.weight)
        params, memory, offered = closed(federation, state, turn, memory, params, averaged)
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
        offered=offered,
    )
    if came.refused and not state.exhausted:
        last = {**state.rounds[-1], "asked": sorted(came.asked), "refused": came.refused}
        state = replace(state, rounds=(*state.rounds[:-1], last))
    return state, params, memory


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


def _record(
    federation: Federation,
    state: ServerState,
    params: Arrays,
    status: str,
    began: datetime,
    insecure: bool,
    versions: Mapping[str, str],
) -> dict[str, Any]:
    model = federation.model
    tree, held = unnamed(model, dict(params)), federation.held
    return record.make(
        federation,
        state,
        dict(params),
        seed=None,
        status=status,
        started=began,
        test=scores(model, tree, held.test),
        confusion=confused(model, held.classes, tree, held.test),
        fairness=fairness(np.zeros(0, bool), None, federation.epsilon, federation.delta),
        engine="flower",
        not_covered=("insecure-transport",) if insecure else (),
        versions=versions,
    )
