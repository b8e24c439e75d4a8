"""The server of a real federation: whom to ask, what to believe, when to stop. No transport.

    greet → members → schedule → Round → cohort → requests → [clients answer or do not]
      → checks → weights → average → evaluate on public rows → schedule …

What carries the messages is a `Transport`: Flower's in `flower/`, or a function call in the tests.
The state is saved before a round is asked and after it is closed, so that a server that was killed
asks the same clients the same thing again and gets the stored answers: nothing that was stored is
debited twice, and the model is the one that the uploads give (rule R12).
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sottovoce.data.fairness import fairness
from sottovoce.data.federated import Holdings, seen
from sottovoce.data.files import make_folder, write_file
from sottovoce.errors import InputError, RunError
from sottovoce.models.names import named, unnamed
from sottovoce.plan import Plan
from sottovoce.privacy import seeds
from sottovoce.privacy.tank import FULL, Tank
from sottovoce.runs import checkpoint, record
from sottovoce.runs.checkpoint import ServerState
from sottovoce.runs.done import RoundDone, done_of
from sottovoce.runs.trained import Trained
from sottovoce.schedules.aggregate import combine
from sottovoce.schedules.optimizer import Memory, handed
from sottovoce.schedules.schedule import Round
from sottovoce.server import course
from sottovoce.server.asking import Came, ask_round, misfit
from sottovoce.server.checks import Accepted
from sottovoce.server.federation import Federation, of_members
from sottovoce.server.finishing import closed
from sottovoce.server.registry import Member
from sottovoce.server.roll import Patience, Roll, Transport, gather, rejoin
from sottovoce.server.scoring import confused, first_model, scores
from sottovoce.server.weights import limit_noise

UPLOADS = "uploads"

log = logging.getLogger("sottovoce.coordinator")

Arrays = dict[str, NDArray[np.float32]]

__all__ = ["Patience", "Transport", "combined", "conduct"]


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
    admitted: Mapping[str, int] | None = None,
    check: Callable[[], None] = lambda: None,
) -> Trained:
    """Run a federation of real clients to its end; the run folder is that of `simulate`.

    `public` has the server's own validation and test rows, and no training rows. `check` is called
    where the run may be interrupted (between rounds). `insecure` says that the
    transport was not encrypted, and is written into the record, also of a run that goes on later.
    `admitted` are the samples of the clients that may take part, by key fingerprint or name
    (`asking.read_admitted`).
    """
    plan = plan.replace(noise="secure")  # refuses what exists in simulation only (R7, R10)
    rows = public.fingerprint()  # the server's own: its checkpoint may know them
    if resume:
        state, arrays, header, memory = checkpoint.load(out)
        if header.setdefault("public", rows) != rows:
            raise RunError(
                "the public rows are not those that this run began with: its losses could not be "
                "compared; bring the old file back, or start a new run in another folder"
            )
        roll = rejoin(transport, patience, header)
        public = seen(Plan(**header["plan"]), public)
        federation = of_members(Plan(**header["plan"]), roll.members, public)
        params: Arrays = {n: np.asarray(a, np.float32) for n, a in arrays.items()}
        _keep_none_of(out, state.progress.done)
    else:
        _require_unused(out)
        public = seen(plan, public)
        fits = partial(misfit, plan, public, clients=patience.clients)
        roll = gather(transport, patience, fits, admitted)
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
        header = {"run": secrets.token_hex(16), "seed": seed, "server": server, "not_covered": []}
        header |= {"public": rows, "plan": federation.plan.to_dict()} | roll.to_json()
        make_folder(out)
    if patience.minimum > federation.terms.per_round:
        raise InputError.of(
            "minimum",
            patience.minimum,
            f"at most {federation.terms.per_round}, the clients of a round",
            "ask for fewer, or raise rounds.per_round",
        )
    # What one sitting did not cover stays uncovered, whatever the next is like: a listener has seen
    # its uploads. A checkpoint that does not say (of an older version) counts as plaintext.
    before = header.get("not_covered", ["insecure-transport"])
    codes = federation.not_covered(*before, *(["insecure-transport"] if insecure else []))
    header["not_covered"] = list(codes)
    for name, why in limited(federation, roll.members).items():
        log.warning("client %s %s, and counts for fewer", name, why)
    record.write_rounds(out, state)
    status, began, since = "finished", datetime.now(UTC), time.monotonic() - state.seconds
    try:
        while (turn := federation.schedule.round(state.progress)) is not None:
            if state.exhausted:
                break
            header |= {"plan": federation.plan.to_dict()} | roll.to_json()
            checkpoint.save(out, state, params, header, memory)
            check()
            came = ask_round(federation, roll, state, params, turn, header, transport, patience)
            if came.uploads and keep_uploads:
                _keep(out, turn.t, came)
            federation = _with_budgets_of(federation, roll.members)
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
            _keep_none_of(out, state.progress.done)
        final = dict(handed(memory, params))
        made = _record(federation, roll.members, state, final, status, began, codes, versions or {})
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


def _closed(
    federation: Federation,
    roll: Roll,
    state: ServerState,
    params: Arrays,
    memory: Memory,
    turn: Round,
    came: Came,
    since: float,
) -> tuple[ServerState, Arrays, Memory]:
    """Average what counts, make the next model of it, evaluate, tell the schedule, write books."""
    clients = len(roll.members)
    uploads = np.zeros(clients, dtype=bool)
    uploads[list(came.uploads)] = True
    sigma = np.full((federation.terms.releases, clients), np.nan)
    for i, read in came.uploads.items():
        sigma[:, i] = read.sigma
    plain = course.weights(federation, uploads, sigma[0])
    unknown = np.array([member.registered is None for member in roll.members])
    weight = limit_noise(plain, sigma[0], unknown)
    hidden = np.array([member.account is None for member in roll.members])
    sigma[:, hidden] = np.nan  # R9
    asked = state.asked.copy()
    asked[came.asked] += 1
    tank = _tank(roll.members, state.tank, uploads)
    prepared = course.Prepared(
        turn=turn,
        weight=weight,
        sigma=sigma,
        signal_sigma=np.full(clients, np.nan),
        mu2=np.where(hidden, 0.0, np.maximum(tank.spent_mu2 - state.tank.spent_mu2, 0.0)),
        uploads=uploads,
        tank=tank,
        asked=asked,
    )
    loss = accuracy = heard = offered = float("nan")
    if came.uploads:
        averaged = combined(federation.plan, came.uploads, prepared.weight, params)
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
    if state.exhausted:
        return state, params, memory
    last, down = state.rounds[-1], limited(federation, roll.members)
    noisy = weight < plain * (1 - 1e-9)
    down |= {
        own.name: "has more noise than twice the median"
        for own, cut in zip(roll.members, noisy.tolist(), strict=True)
        if cut
    }
    if came.refused:
        missing = {
            roll.members[i].name: why for i, why in came.why.items() if i not in came.uploads
        }
        last = {**last, "asked": sorted(came.asked), "refused": came.refused, "missing": missing}
    if cut := {
        name: down[name] for i in sorted(came.uploads) if (name := roll.members[i].name) in down
    }:
        last = {**last, "limited": cut}
    return replace(state, rounds=(*state.rounds[:-1], last)), params, memory


def _with_budgets_of(federation: Federation, members: Sequence[Member]) -> Federation:
    """Follow budgets that were tightened, hidden or shown since their clients greeted."""
    now = [np.nan if m.account is None else m.account.capacity for m in members]
    if np.array_equal(federation.capacity, now, equal_nan=True):
        return federation
    return of_members(federation.plan, members, federation.held, federation.model)


def limited(federation: Federation, members: Sequence[Member]) -> dict[str, str]:
    """Say of each client that counts for fewer samples than it declares why, by name."""
    assert federation.counted is not None
    return {
        own.name: "declares more samples than "
        + ("twice the median" if own.registered is None else "were registered for it")
        for own, most in zip(members, federation.counted.tolist(), strict=True)
        if own.samples > most
    }


def combined(
    plan: Plan, uploads: Mapping[int, Accepted], weight: NDArray[np.float64], model: Arrays
) -> Arrays:
    """Combine uploads as the plan says, in float64 and in the order of the clients, as float32."""
    order, own = sorted(uploads), plan.server
    each = [uploads[i].params for i in order]
    total = combine(each, weight[order], model, kind=own.aggregation, trim=own.trim)
    with np.errstate(over="ignore"):
        return {name: leaf.astype(np.float32) for name, leaf in total.items()}


def _keep(out: Path, t: int, came: Came) -> None:
    folder = out / UPLOADS
    folder.mkdir(exist_ok=True)
    for i, blob in came.blobs.items():
        write_file(folder / f"{t:05d}-{i:05d}", blob)


def _keep_none_of(out: Path, t: int) -> None:
    """The uploads of a round that was cut short have not counted yet; nor has any after it."""
    for path in (out / UPLOADS).glob("?????-?????"):
        if int(path.name[:5]) >= t:
            path.unlink()


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
    members: Sequence[Member],
    state: ServerState,
    params: Arrays,
    status: str,
    began: datetime,
    not_covered: Sequence[str],
    versions: Mapping[str, str],
) -> dict[str, Any]:
    model = federation.model
    tree, held = unnamed(model, dict(params)), federation.held
    assert federation.counted is not None
    down = limited(federation, members)
    who = [
        {
            "name": own.name,
            "key": own.key,
            "version": own.version,
            "counted": None if own.account is None else most,
            **({"limited": down[own.name]} if own.name in down else {}),
        }
        for own, most in zip(members, federation.counted.tolist(), strict=True)
    ]
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
        not_covered=not_covered,
        versions=versions,
        who=who,
    )
