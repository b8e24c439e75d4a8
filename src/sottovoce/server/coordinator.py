"""The server of a real federation: whom to ask, what to believe, when to stop. No transport.

    greet → members → schedule → Round → cohort → requests → [clients answer or do not]
      → checks → weights → average → evaluate on public rows → schedule …

What carries the messages is a `Transport`: Flower's in `flower/`, or a function call in the tests.
The state is saved before a round is asked, with all rounds before it, so that a server that was
killed asks the same clients the same thing again and gets the stored answers: nothing that was
stored is debited twice, and the model is the one that the uploads give (R12 of docs/protocol.md).
"""

from __future__ import annotations

import csv
import logging
import math
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sottovoce.client.messages import Request
from sottovoce.data.federated import Holdings, fairness, seen
from sottovoce.data.files import make_folder, write_file
from sottovoce.errors import InputError, Malformed, OtherSamples, OtherVersion, RunError
from sottovoce.models.base import named, unnamed
from sottovoce.models.custom import as_device
from sottovoce.models.form import Form
from sottovoce.plan import Plan
from sottovoce.plan import plan as plan_text
from sottovoce.privacy import calibration, seeds
from sottovoce.privacy.seeds import Purpose
from sottovoce.privacy.tank import FULL, Tank
from sottovoce.runs import checkpoint, record
from sottovoce.runs.checkpoint import RoundDone, ServerState, done_of
from sottovoce.runs.trained import Trained
from sottovoce.schedules.aggregate import combine, limit_noise
from sottovoce.schedules.base import Round
from sottovoce.schedules.cohort import pick
from sottovoce.schedules.optimizer import handed
from sottovoce.schedules.pricing import LOSS_SHARE, Terms
from sottovoce.server import checks, rounds
from sottovoce.server.checks import Accepted, Expected
from sottovoce.server.federation import Federation, of_members
from sottovoce.server.members import (
    LASTING,
    MOST_SAMPLES,
    SILENT,
    Member,
    Patience,
    Roll,
    Transport,
    gather,
    rejoin,
)
from sottovoce.server.rounds import closed, confused, first_model, scores

# One round asked of real clients: who fits, whom to ask, whom to ask again, and what counts.
#
#     cohort → requests → [clients answer or do not] → checks → uploads, or why there are none
#
# Whoever declines for good is replaced within the round; the silent are asked again, as often as
# the server's patience says. What comes back is held against what an honest answer looks like.


CEILING = 16.0  # times the noise that an equal share of a full tank would need
SLICE = 0.5

log = logging.getLogger("sottovoce.asking")

Arrays = dict[str, NDArray[np.float32]]


def misfit(plan: Plan, public: Holdings, member: Member, clients: int) -> str | None:
    """Why a plan for so many clients has no use for this one, in a few words; None if it has.

    What the client would refuse, or the server after it was paid for, is found here before anything
    is spent. Of one that keeps its budget to itself neither is known.
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
    if member.max_steps is not None and recipe.steps > member.max_steps:
        return f"allows {member.max_steps} steps a turn, and local.steps is {recipe.steps}"
    own = member.account
    if own is None:
        wants = plan.server.weights == "precision"
        return "keeps its budget to itself, and precision weights need it" if wants else None
    # Beyond the noise that an upload may have each would be paid for in vain.
    told = _share_of_model(plan)
    left = min(1 - own.spent / own.capacity, member.run_share or 1.0)
    if left * told * CEILING**2 < 1:
        return f"has {left:.2%} of its budget left for a run, which is too little"
    most = math.sqrt(told / recipe.releases) * _ceiling(plan, member, clients)
    if (member.floor or 0.0) > most:
        return f"has a floor of {member.floor:g}, and {most:g} is the most that this plan can use"
    return None


def read_admitted(path: str | Path) -> dict[str, int]:
    """Read the table of clients that may take part: a CSV file with the columns client, samples.

    A client is its name or, where Flower authenticates it, the fingerprint of its key as
    `ssh-keygen -l` prints it (SHA256:…).
    """
    rows = [
        [c.strip() for c in row]
        for row in csv.reader(plan_text.read(path, "admitted").splitlines())
    ]
    found: dict[str, int] = {}
    for number, cells in enumerate(rows or [[""]], start=1):
        if number == 1:
            good = cells == ["client", "samples"]
        else:
            good = len(cells) == 2 and cells[0] not in found and cells[0] != ""
            good = not cells or (
                good and cells[1].isdecimal() and 1 <= int(cells[1]) <= MOST_SAMPLES
            )
        if not good:
            raise InputError.of(
                f"admitted, line {number}",
                ",".join(cells),
                "client,samples",
                "head the columns so, then name each client once, with its whole number of samples",
            )
        if number > 1 and cells:
            found[cells[0]] = int(cells[1])
    return found


def _share_of_model(plan: Plan) -> float:
    """What is left for the model of a release that pays for a noised loss as well."""
    return 1 - 1 / LOSS_SHARE if plan.server.signal == "clients" else 1.0


def _ceiling(plan: Plan, member: Member, clients: int) -> float:
    """The most σ/Δ that counts: 16 times that of an equal share of the client's whole budget.

    Of one that keeps its budget to itself, of the tightest budget that the plan speaks of.
    """
    if member.account is not None:
        worth = member.account.capacity
    else:
        kind = plan.privacy.calibration
        worth = float(calibration.capacity(*plan.budgets(), calibration=kind).min())
    turns = Terms(
        clients=clients,
        per_round=min(clients, plan.rounds.per_round or clients),
        cohort=plan.rounds.cohort,
        calibration=plan.privacy.calibration,
        releases=plan.recipe().releases,
    )
    return CEILING * math.sqrt(max(1, turns.planned(plan.rounds.rounds)) / worth)


@dataclass(frozen=True, eq=False)
class Came:
    """What came back in a round."""

    asked: list[int] = field(default_factory=list)
    uploads: dict[int, Accepted] = field(default_factory=dict)
    blobs: dict[int, bytes] = field(default_factory=dict)
    why: dict[int, str] = field(default_factory=dict)  # the last reason of who sent no upload

    @property
    def refused(self) -> dict[str, int]:
        """Reasons, counted: the clients' own codes, `silent`, `malformed` and `version`."""
        every = [why for i, why in self.why.items() if i not in self.uploads]
        return {why: every.count(why) for why in sorted(set(every))}


def ask_round(
    federation: Federation,
    roll: Roll,
    state: ServerState,
    params: Arrays,
    turn: Round,
    header: Mapping[str, Any],
    transport: Transport,
    patience: Patience,
) -> Came:
    """Ask a cohort until enough uploads count: the silent again, others for those who decline."""
    terms, request = federation.terms, _request(federation, params, turn, header)
    rng = seeds.generator(header["seed"], Purpose.COHORT, turn.t)
    asked_hash, came, tried = request.hash(), Came(), 0
    while tried < patience.tries and len(came.uploads) < patience.minimum:
        roll.welcome(transport)
        if tried or np.count_nonzero(roll.online()) < patience.minimum:
            roll.recall(at_once=True)  # better one that was silent than no round
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
        began = time.monotonic()
        reached = {i: roll.routes[m.identity] for i, m in own.items() if m.identity in roll.routes}
        answers = transport.ask(
            {r: replace(request, receipt=own[i].receipt).to_blob() for i, r in reached.items()},
            patience.round,
        )
        for i in waiting:
            blob = answers.get(reached[i]) if i in reached else None
            expected = replace(
                _expected(federation, request, asked_hash, own[i]),
                opened=float(state.tank.capacity[i] * (state.tank.opened[i] / FULL)),
                debits=int(state.turns[i]) * terms.releases,
                shown=roll.shown.get(i, (0.0, 0)),
            )
            _take(came, roll, i, blob, expected)
        # Who declines for good is replaced at once; only waiting for the silent wears patience out.
        if any(i not in came.uploads and i not in roll.gone for i in waiting):
            tried += 1
            if tried < patience.tries and len(came.uploads) < patience.minimum:
                _wait_until(began + patience.before(tried))  # what they said no for may pass
    if len(came.uploads) >= patience.minimum:
        roll.close({i: why for i, why in came.why.items() if i not in (came.uploads | roll.gone)})
        return came
    if roll.over(besides=list(came.uploads)):
        return Came(came.asked)  # nobody is left to make it a round: the run ends here
    reasons = ", ".join(f"{why}: {n}" for why, n in came.refused.items())
    raise RunError(
        f"round {turn.t + 1} got {len(came.uploads)} uploads of {len(came.asked)} asked and needs "
        f"{patience.minimum} ({reasons or 'nobody to ask'}); mend the clients and resume the run"
    )


def _wait_until(when: float) -> None:
    """In slices: a signal that another thread raises is heard when this one wakes up."""
    while (left := when - time.monotonic()) > 0:
        time.sleep(min(left, SLICE))


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


def _take(came: Came, roll: Roll, i: int, blob: bytes | None, expected: Expected) -> None:
    """Count one answer, once; whatever is in it, the others are not to suffer."""
    came.why[i], own = SILENT, roll.members[i]
    if blob is None:
        log.warning("client %s did not answer in time", own.name)
        return
    try:
        read = checks.read(blob, expected)
    except Malformed as error:
        log.warning("client %s sent no upload: %s", own.name, error)
        came.why[i] = "version" if isinstance(error, OtherVersion) else "malformed"
        if isinstance(error, OtherSamples):  # every further upload would be paid for in vain
            came.why[i] = roll.gone[i] = "samples"
        return
    except Exception:  # a flaw of the checks must not become everyone's
        log.exception("the checks failed on what client %s sent", own.name)
        came.why[i] = "malformed"
        return
    if isinstance(read, Accepted):
        came.uploads[i], came.blobs[i] = read, blob
        roll.shown[i] = read.shown
        roll.members[i] = replace(own, receipt=read.receipt, account=read.account)
        roll.missed.pop(i, None)
        return
    log.warning(
        "client %s (sottovoce %s) declined: %s", own.name, own.version or "unknown", read.code
    )
    came.why[i] = read.code
    if read.code in LASTING:
        roll.gone[i] = read.code


def _expected(federation: Federation, request: Request, asked: str, member: Member) -> Expected:
    """What an honest answer looks like.

    A client's own floor was not too high when it was taken in, and is kept if more have come since.
    """
    plan, recipe = federation.plan, request.recipe
    needs = (member.floor or 0.0) * math.sqrt(recipe.releases / _share_of_model(plan))
    return Expected(
        run=request.run,
        t=request.round.t,
        request=asked,
        params=request.params,
        recipe=recipe,
        member=member,
        ceiling=max(_ceiling(plan, member, federation.terms.clients), needs * (1 + 1e-6)),
        loss_bound=request.loss_bound,
        disclosed=plan.server.weights == "precision",
        turn=request.round,
        terms=federation.terms,
    )


UPLOADS = "uploads"


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
    (`read_admitted`).
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
        seed = seeds.draw_seed()
        params = named(first_model(federation.model, seed))
        tree = unnamed(federation.model, dict(params))
        loss, accuracy = scores(federation.model, tree, public.validation)
        signal = None if plan.server.signal == "clients" else loss
        state = rounds.start(federation, loss, accuracy, signal, _tank(roll.members, None))
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
    status, began = "finished", datetime.now(UTC)
    run = rounds.Run(federation, header["seed"], (state, params, memory))
    engine = RealClients(run, roll, header, transport, patience, out, keep_uploads, check)

    def after_round(run: rounds.Run) -> None:
        if not run.state.exhausted:
            record.append_round(out, run.state)
            if on_round is not None and (done := done_of(run.state)) is not None:
                on_round(done)

    try:
        for _ in rounds.play_rounds([run], engine, after_round):
            pass
    except KeyboardInterrupt:
        status = "interrupted"
        raise
    except BaseException:
        status = "failed"
        raise
    finally:
        state, params, memory = run.at
        if status != "finished":
            checkpoint.save(out, state, params, header, memory)  # first: it must not be lost
            _keep_none_of(out, state.progress.done)
        final = dict(handed(memory, params))
        made = _record(
            run.federation, roll.members, state, final, status, began, codes, versions or {}
        )
        record.write(out, made, run.federation, state, final)
        if status == "finished":
            (out / checkpoint.NAME).unlink(missing_ok=True)
    return Trained(made, run.federation.model, unnamed(run.federation.model, final), out)


@dataclass(eq=False)
class RealClients:
    """The engine of a run whose clients are real: they are asked, and price and pay themselves."""

    run: rounds.Run
    roll: Roll
    header: dict[str, Any]
    transport: Transport
    patience: Patience
    out: Path
    keep_uploads: bool
    check: Callable[[], None]

    def ask(self, live: Sequence[int]) -> rounds.Asks:
        """The next turn, with the state saved before anybody is asked; nothing when it is over."""
        run, (state, params, memory) = self.run, self.run.at
        turn = run.federation.schedule.round(state.progress)
        if turn is None or state.exhausted:
            return {}
        self.header |= {"plan": run.federation.plan.to_dict()} | self.roll.to_json()
        checkpoint.save(self.out, state, params, self.header, memory)
        self.check()
        return {0: turn}

    def begin(self, asks: rounds.Asks) -> bool:
        """Ask the clients, and wait for their uploads."""
        run, (state, params, _), turn = self.run, self.run.at, asks[0]
        federation = run.federation
        self.came = ask_round(
            federation, self.roll, state, params, turn, self.header, self.transport, self.patience
        )
        if self.came.uploads and self.keep_uploads:
            _keep(self.out, turn.t, self.came)
        run.federation = _with_budgets_of(federation, self.roll.members)
        return False

    def end(self, asks: rounds.Asks) -> list[tuple[int, rounds.Played]]:
        """Average what counts and make the next model of it."""
        return [(0, _played(self.run, self.roll, asks[0], self.came))]


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


def _played(run: rounds.Run, roll: Roll, turn: Round, came: Came) -> rounds.Played:
    """Average what counts, make the next model of it and evaluate it."""
    federation, (state, params, memory) = run.federation, run.at
    clients = len(roll.members)
    uploads = np.zeros(clients, dtype=bool)
    uploads[list(came.uploads)] = True
    sigma = np.full((federation.terms.releases, clients), np.nan)
    for i, read in came.uploads.items():
        sigma[:, i] = read.sigma
    plain = rounds.weights(federation, uploads, sigma[0])
    unknown = np.array([member.registered is None for member in roll.members])
    weight = limit_noise(plain, sigma[0], unknown)
    hidden = np.array([member.account is None for member in roll.members])
    sigma[:, hidden] = np.nan  # R9
    asked = state.asked.copy()
    asked[came.asked] += 1
    tank = _tank(roll.members, state.tank, uploads)
    prepared = rounds.Prepared(
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
    down, entry = limited(federation, roll.members), dict[str, Any]()
    noisy = (weight < plain * (1 - 1e-9)) & ~hidden
    down |= {
        own.name: "has more noise than twice the median"
        for own, cut in zip(roll.members, noisy.tolist(), strict=True)
        if cut
    }
    if came.refused:
        missing = {
            roll.members[i].name: why for i, why in came.why.items() if i not in came.uploads
        }
        entry |= {"asked": sorted(came.asked), "refused": came.refused, "missing": missing}
    if cut := {
        name: down[name] for i in sorted(came.uploads) if (name := roll.members[i].name) in down
    }:
        entry["limited"] = cut
    return rounds.Played(prepared, loss, accuracy, heard, offered, (params, memory), entry)


def _with_budgets_of(federation: Federation, members: Sequence[Member]) -> Federation:
    """Follow budgets that were tightened, hidden or shown since their clients greeted."""
    now = [np.nan if m.account is None else m.account.capacity for m in members]
    if np.array_equal(federation.capacity, now, equal_nan=True):
        return federation
    return of_members(federation.plan, members, federation.held, federation.model)


def limited(federation: Federation, members: Sequence[Member]) -> dict[str, str]:
    """Say of each client that counts for fewer samples than it declares why, by name.

    Not of one that keeps its numbers to itself: it would say something of them (R9).
    """
    assert federation.counted is not None
    return {
        own.name: "declares more samples than "
        + ("twice the median" if own.registered is None else "were registered for it")
        for own, most in zip(members, federation.counted.tolist(), strict=True)
        if own.samples > most and own.account is not None
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
