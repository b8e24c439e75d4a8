"""One round asked of real clients: who fits, whom to ask, whom to ask again, and what counts.

    cohort → requests → [clients answer or do not] → checks → uploads, or why there are none

Whoever declines for good is replaced within the round; the silent are asked again, as often as the
server's patience says. What comes back is held against what an honest answer looks like.
"""

from __future__ import annotations

import csv
import logging
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sottovoce.client.messages import Request
from sottovoce.data.federated import Holdings
from sottovoce.errors import InputError, Malformed, OtherSamples, OtherVersion, RunError
from sottovoce.models.form import Form
from sottovoce.models.own import as_device
from sottovoce.plan import Plan
from sottovoce.plan import text as plan_text
from sottovoce.privacy import calibration, seeds
from sottovoce.privacy.seeds import Purpose
from sottovoce.privacy.tank import FULL
from sottovoce.runs.checkpoint import ServerState
from sottovoce.schedules.cohort import pick
from sottovoce.schedules.pricing import LOSS_SHARE, Terms
from sottovoce.schedules.schedule import Round
from sottovoce.server import checks
from sottovoce.server.checks import Accepted, Expected
from sottovoce.server.federation import Federation
from sottovoce.server.registry import MOST_SAMPLES, Member
from sottovoce.server.roll import LASTING, SILENT, Patience, Roll, Transport

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
