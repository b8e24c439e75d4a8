"""The server of a real federation: whom to ask, which answers count, when to stop. No transport.

    greet → members → schedule → Round → cohort → requests → [clients answer or do not]
      → checks → weights → average → evaluate on public rows → schedule …

Messages are carried by a `Transport`: Flower's in `flower/`, or a function call in the tests.
Within a round, a client that declines for good is replaced, and silent ones are asked again as
often as the server's patience says. Every answer is checked against what an honest one looks like.

The state is saved before a round is asked, with all rounds before it. A server that was killed and
resumes the run asks the same clients the same thing again, and gets the stored answers: nothing
that was stored is debited twice, and the model is the one that the uploads give (R12 of
docs/protocol.md).
"""

from __future__ import annotations

import csv
import logging
import math
import secrets
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from sottovoce.client.messages import LONGEST_TEXT, SUM, Request, pack, unpack
from sottovoce.client.sum_protocol import RoundKey
from sottovoce.data.federated import Holdings, add_features
from sottovoce.data.files import make_folder, write_file
from sottovoce.data.tables import Source, declare_layout
from sottovoce.errors import InputError, Malformed, OtherSamples, OtherVersion, RoundVoid, RunError
from sottovoce.models.base import flatten_parameters
from sottovoce.plan import Plan
from sottovoce.plan.base import read_text
from sottovoce.privacy import calibration, grid, seeds
from sottovoce.privacy.seeds import Purpose
from sottovoce.privacy.sensitivity import Recipe
from sottovoce.privacy.tank import FULL, Tank
from sottovoce.runs import checkpoint, record
from sottovoce.runs.checkpoint import RoundDone, describe_last_round
from sottovoce.runs.record import Exceptions, Identity, Record, Status
from sottovoce.runs.trained import Trained
from sottovoce.schedules.aggregate import combine, limit_noise, weigh_by_samples
from sottovoce.schedules.base import Round
from sottovoce.schedules.optimizer import choose_model
from sottovoce.schedules.pricing import LOSS_SHARE, Terms, pick_cohort
from sottovoce.server import checks, forecast, rounds, sum_round
from sottovoce.server.checks import AcceptedUpload, ExpectedUpload
from sottovoce.server.federation import Federation, build_from_members, judge_model, measure_model
from sottovoce.server.members import (
    LASTING,
    MOST_SAMPLES,
    SILENT,
    Member,
    Patience,
    Roll,
    Transport,
    gather_members,
    rejoin_members,
)
from sottovoce.server.rounds import apply_optimizer
from sottovoce.server.sum_round import Answer, SumResult

CEILING = 16.0  # times the noise that an equal share of a full tank would need
SLICE = 0.5  # seconds
UPLOADS = "uploads"  # a folder in the run folder

log = logging.getLogger("sottovoce.asking")

Arrays = dict[str, NDArray[np.float32]]
Content = TypeVar("Content")


def find_misfit(plan: Plan, public: Holdings, member: Member, clients: int) -> str | None:
    """Return why a plan for so many clients cannot use this one, in a few words; None if it can.

    What the client would refuse, or the server after the client had paid for it, is found here
    before anything is spent. For a client that hides its budget neither is known.
    """
    features, recipe = int(np.prod(public.shape)), plan.recipe()
    if (member.features, member.classes) != (features, public.classes):
        if 1 in (member.classes, public.classes) and member.classes != public.classes:
            return "predicts classes where the plan predicts a number, or the other way round"
        return (
            f"has {member.features} features and {member.classes} classes, "
            f"the plan's data {features} and {public.classes}"
        )
    if member.encoding is not None and member.encoding != find_encoding(plan, public):
        return (
            "encodes its table in another way than the server's rows; give both one version and "
            "its node file the plan's data.columns"
        )
    if recipe.clip > member.clip:
        return f"allows a clip of {member.clip:g}, and local.clip is {recipe.clip:g}"
    if member.unit != plan.local.unit:  # its vault counts all releases in one unit
        whole = {"client": "all its data", "person": "persons", "record": "single records"}
        return (
            f"protects {whole[member.unit]} (local.unit = {member.unit}), and local.unit is "
            f"{plan.local.unit}"
        )
    if member.rows_per_person != plan.rows_per_person:
        return (
            f"uses {member.rows_per_person} rows of a person, and data.rows_per_person is "
            f"{plan.rows_per_person}"
        )
    if max(plan.rounds.rounds, recipe.steps) > member.max_rounds:
        return f"allows {member.max_rounds} rounds, and rounds.rounds is {plan.rounds.rounds}"
    if member.max_steps is not None and recipe.steps > member.max_steps:
        return f"allows {member.max_steps} steps a turn, and local.steps is {recipe.steps}"
    privacy, sums = plan.privacy, member.sum or {}
    if privacy.view == "sum":
        wanted = {"honest": privacy.honest, "corrupt": privacy.corrupt or 0}
        if any(sums.get(key) != value for key, value in wanted.items()):
            return (
                f"counts on {sums.get('honest', 'no')} honest and {sums.get('corrupt', 'no')} "
                f"corrupt clients of a sum, the plan on {wanted['honest']} and {wanted['corrupt']}"
            )
    account = member.account
    if account is None:
        wants = plan.server.weights == "precision"
        return "keeps its budget to itself, and precision weights need it" if wants else None
    # An upload with more noise than the ceiling would be paid for and then rejected.
    model_share = _compute_model_share(plan)
    left = min(1 - account.spent / account.capacity, member.run_share or 1.0)
    if left * model_share * CEILING**2 < 1:
        return f"has {left:.2%} of its budget left for a run, which is too little"
    most = math.sqrt(model_share / recipe.releases) * _compute_ceiling(plan, member, clients)
    if (member.floor or 0.0) > most:
        return f"has a floor of {member.floor:g}, and {most:g} is the most that this plan can use"
    return None


def find_encoding(plan: Plan, public: Holdings) -> str | None:
    """Return how a table's cells became the public rows' numbers; None where they are arrays.

    Rows that an operator has made without a layout are those of the columns in the plan.
    """
    if public.layout is not None:
        return public.layout.encoding
    if not plan.data.columns or plan.data.infer:
        return None
    return declare_layout(Source(**plan.data.table(), target=plan.regression)).encoding


def read_admitted(path: str | Path) -> dict[str, int]:
    """Read the table of clients that may take part: a CSV file with the columns client, samples.

    A client is its name or, where Flower authenticates it, the fingerprint of its key as
    `ssh-keygen -l` prints it (SHA256:…).
    """
    rows = [[c.strip() for c in r] for r in csv.reader(read_text(path, "admitted").splitlines())]
    samples: dict[str, int] = {}
    remedy = "head the columns so, then name each client once, with its whole number of samples"
    for number, cells in enumerate(rows or [[""]], start=1):
        if number > 1 and not cells:
            continue
        is_entry = len(cells) == 2 and cells[0] not in samples and cells[0] != ""
        is_entry = is_entry and cells[1].isdecimal() and 1 <= int(cells[1]) <= MOST_SAMPLES
        if not (is_entry if number > 1 else cells == ["client", "samples"]):
            where = f"admitted, line {number}"
            raise InputError.of(where, ",".join(cells), "client,samples", remedy)
        if number > 1:
            samples[cells[0]] = int(cells[1])
    return samples


def _compute_model_share(plan: Plan) -> float:
    """Return the share of a debit that pays for the model, where a noised loss is paid for, too."""
    return 1 - 1 / LOSS_SHARE if plan.server.signal == "clients" else 1.0


def _compute_ceiling(plan: Plan, member: Member, clients: int) -> float:
    """Return the largest σ/Δ that counts: 16 times that of an equal share of the client's budget.

    For a client that hides its budget, the tightest budget of the plan is taken.
    """
    if member.account is not None:
        worth = member.account.capacity
    else:
        kind = plan.privacy.calibration
        worth = float(calibration.capacity(*plan.budgets(), calibration=kind).min())
    terms = Terms(
        clients=clients,
        per_round=min(clients, plan.rounds.per_round or clients),
        cohort=plan.rounds.cohort,
        calibration=plan.privacy.calibration,
        releases=plan.recipe().releases,
    )
    return CEILING * math.sqrt(max(1, terms.plan_releases(plan.rounds.rounds)) / worth)


@dataclass(frozen=True, eq=False)
class RoundAnswers:
    """The answers of a round."""

    asked: list[int] = field(default_factory=list)
    uploads: dict[int, AcceptedUpload] = field(default_factory=dict)
    blobs: dict[int, bytes] = field(default_factory=dict)
    sigma: dict[int, tuple[float, ...]] = field(default_factory=dict)  # of whoever counts
    why: dict[int, str] = field(default_factory=dict)  # the last reason for not sending an upload
    total: SumResult | None = None  # where only the sum of the uploads is known
    void: bool = False  # whether too few clients were left for a sum

    def find_missing(self) -> dict[int, str]:
        """Return why each client that was asked does not count."""
        otherwise = "void" if self.void else "malformed"
        return {i: self.why.get(i, otherwise) for i in self.asked if i not in self.sigma}


def _wait_until(when: float) -> None:
    """Sleep in slices: a signal that another thread raises is noticed when this one wakes up."""
    while (left := when - time.monotonic()) > 0:
        time.sleep(min(left, SLICE))


def _make_request(
    federation: Federation, params: Arrays, round_: Round, header: Mapping[str, Any]
) -> Request:
    terms, plan, held = federation.terms, federation.plan, federation.held
    form = replace(
        federation.model.form(held.inputs, held.classes),
        rows_per_person=plan.rows_per_person,
        target=held.target,
    )
    if (lens := held.features) is not None:  # the model's input is the images that clients hold
        form = replace(form, shape=lens.shape, lens=lens)
    return Request(
        run=header["run"],
        round=round_,
        clients=terms.clients,
        per_round=terms.per_round,
        cohort=terms.cohort,
        recipe=federation.recipe,
        form=form,
        params=params,
        loss_bound=plan.server.loss_bound if plan.server.signal == "clients" else None,
        server=header["server"],
        encoding=find_encoding(plan, held),
    )


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
) -> Trained:
    """Run a federation of real clients to its end; the run folder is that of `simulate`.

    The caller holds the folder (`data.files.hold_folder`): no other process may lead the run.

    `public` has the server's validation and test rows, and no training rows. `insecure` says that
    the transport was not encrypted; the record keeps it, also when the run is resumed with
    encryption. `admitted` are the samples of the clients that may take part, by key fingerprint or
    name (`read_admitted`).
    """
    plan = plan.replace(noise="secure")  # refuses what exists in simulation only (R7, R10)
    rows = public.fingerprint()  # of public rows, which a checkpoint may store
    if resume:
        state, arrays, header, memory = checkpoint.load(out)
        if header.setdefault("public", rows) != rows:
            raise RunError(
                "the public rows are not those that this run began with: its losses could not be "
                "compared; bring the old file back, or start a new run in another folder"
            )
        roll = rejoin_members(transport, patience, header)
        plan = Plan(**header["plan"])
        public = add_features(plan, public)
        federation = build_from_members(plan, roll.members, public, is_begun=True)
        params: Arrays = {n: np.asarray(a, np.float32) for n, a in arrays.items()}
        _remove_uploads_since(out, state.progress.done)
    else:
        if any((out / name).exists() for name in (checkpoint.NAME, "record.json")):
            remedy = "name another, or resume the run that lies in it"
            raise InputError.of("out", str(out), "a folder without a run", remedy)
        public = add_features(plan, public)
        fits = partial(find_misfit, plan, public, clients=patience.clients)
        roll = gather_members(transport, patience, fits, admitted)
        federation = build_from_members(plan, roll.members, public)
        seed = seeds.draw_seed()
        params = flatten_parameters(federation.model.draw_parameters(seed))
        tree = federation.model.unflatten(dict(params))
        loss, accuracy, signal = judge_model(federation, tree)
        first_signal = None if plan.server.signal == "clients" else signal
        tank = _build_tank(roll.members, None)
        start = forecast.start_schedule(federation, tree, first_signal, tank=tank, seed=seed)
        state = rounds.make_first_state(federation, loss, accuracy, first_signal, tank, *start)
        memory = federation.finish.begin(params)
        # After a resume a request must be the same to the last byte: the server's name is stored.
        header = {"run": secrets.token_hex(16), "seed": seed, "server": server, "not_covered": []}
        header |= {"public": rows, "plan": federation.plan.to_dict()} | roll.to_json()
    if patience.minimum > federation.terms.per_round:
        bound = f"at most {federation.terms.per_round}, the clients of a round"
        remedy = "ask for fewer, or raise rounds.per_round"
        raise InputError.of("minimum", patience.minimum, bound, remedy)
    # What one session did not cover stays uncovered in the next: a listener has seen its uploads. A
    # checkpoint of an older version, which does not say, counts as plaintext.
    before = header.get("not_covered", ["insecure-transport"])
    codes = federation.not_covered(*before, *(["insecure-transport"] if insecure else []))
    header["not_covered"] = list(codes)
    federation.log_advice()
    for name, why in explain_limits(federation, roll.members).items():
        log.warning("client %s %s, and counts for fewer", name, why)
    header.setdefault("started", datetime.now(UTC).isoformat())
    run = rounds.Run(federation, header["seed"], (state, params, memory))
    engine = RealClients(run, roll, header, transport, patience, out, keep_uploads)

    def after_round(run: rounds.Run) -> None:
        # With receipts and debits of the round that is over, and of no round that is cut short.
        header.update({"plan": run.federation.plan.to_dict()} | roll.to_json())
        if not run.state.exhausted:
            record.append_round(out, run.state)
            done = describe_last_round(run.state, run.federation)
            if on_round is not None and done is not None:
                on_round(done)

    def write_outcome(status: Status) -> Trained:
        state, params, memory = run.at
        if status != "finished":
            checkpoint.save(out, state, params, header, memory)  # first: it must not be lost
            _remove_uploads_since(out, state.progress.done)
        final, model = dict(choose_model(memory, params)), run.federation.model
        run_record = Record.of_run(
            run.federation,
            state,
            final,
            seed=None,
            status=status,
            started=datetime.fromisoformat(header["started"]),
            measured=measure_model(run.federation, model.unflatten(dict(final))),
            engine="flower",
            not_covered=codes,
            versions=versions,
            identities=_identify_members(run.federation, roll.members),
        )
        record.write_run(out, run_record, run.federation, state, final)
        if status == "finished":
            (out / checkpoint.NAME).unlink(missing_ok=True)
        return Trained(run_record.to_dict(), model, model.unflatten(final), out)

    make_folder(out)
    record.write_rounds(out, state)
    return rounds.play_to_end(rounds.play_rounds([run], engine, after_round), write_outcome)


@dataclass(eq=False)
class RealClients:
    """The engine of a run with real clients, who price, pay and compute their uploads."""

    run: rounds.Run
    roll: Roll
    header: dict[str, Any]
    transport: Transport
    patience: Patience
    out: Path
    keep_uploads: bool

    def prepare_rounds(self, live: Sequence[int]) -> rounds.RoundsByRun:
        """Return the next round, unless the run is over; save the state before anybody is asked."""
        run, (state, params, memory) = self.run, self.run.at
        round_ = run.federation.schedule.round(state.progress)
        if round_ is None or state.exhausted:
            return {}
        checkpoint.save(self.out, state, params, self.header, memory)
        return {0: round_}

    def begin_rounds(self, opened: rounds.RoundsByRun) -> bool:
        """Ask the clients, and wait for their uploads."""
        run, round_, members = self.run, opened[0], self.roll.members
        federation = run.federation
        request = _make_request(federation, run.at[1], round_, self.header)
        ask = self.ask_uploads if federation.plan.privacy.view == "upload" else self.ask_sum
        self.answers = ask(request)
        if self.answers.blobs and self.keep_uploads:
            (self.out / UPLOADS).mkdir(exist_ok=True)
            for i, blob in self.answers.blobs.items():
                write_file(self.out / UPLOADS / f"{round_.t:05d}-{i:05d}", blob)
        # Clients may tighten or hide their budgets on the way.
        now = [np.nan if m.account is None else m.account.capacity for m in members]
        if not np.array_equal(federation.capacity, now, equal_nan=True):
            run.federation = build_from_members(
                federation.plan, members, federation.held, federation.model, is_begun=True
            )
        return False

    def end_rounds(self, opened: rounds.RoundsByRun) -> list[tuple[int, rounds.PlayedRound]]:
        """Average the uploads that count, and make the next model of them."""
        return [(0, _play_round(self.run, self.roll, opened[0], self.answers))]

    def ask_uploads(self, request: Request) -> RoundAnswers:
        """Ask a cohort until enough uploads count.

        Silent clients are asked again, and other clients take the places of those that decline.
        """
        roll, patience, answers, tried = self.roll, self.patience, RoundAnswers(), 0
        asked_hash, t = request.hash(), request.round.t
        rng = seeds.generator(self.header["seed"], Purpose.COHORT, t)
        while tried < patience.tries and len(answers.uploads) < patience.minimum:
            roll.greet_returning(self.transport)
            if tried or np.count_nonzero(roll.find_online()) < patience.minimum:
                roll.retry_silent(at_once=True)  # a silent client is better than no round
            waiting = [i for i in answers.asked if i not in answers.uploads and i not in roll.gone]
            room = request.per_round - len(answers.uploads) - len(waiting)
            waiting += self._pick_clients(answers, room, rng)
            if not waiting:
                break
            began = time.monotonic()
            asks = {i: replace(request, receipt=roll.members[i].receipt).to_blob() for i in waiting}
            for i, blob in self._send(answers, asks).items():
                member, expected = roll.members[i], self._expect_upload(request, asked_hash, i)
                read = partial(checks.check_answer, blob, expected)
                if (answer := self._read_answer(answers, i, read)) is not None:
                    answers.uploads[i], answers.blobs[i] = answer, blob
                    answers.sigma[i], roll.shown[i] = answer.sigma, answer.shown
                    new = replace(member, receipt=answer.receipt, account=answer.account)
                    roll.members[i] = new
                    roll.missed.pop(i, None)
                    answers.why.pop(i, None)
            # A client that declines for good is replaced at once; only silence counts as a try.
            if any(i not in answers.uploads and i not in roll.gone for i in waiting):
                tried += 1
                if tried < patience.tries and len(answers.uploads) < patience.minimum:
                    _wait_until(began + patience.compute_pause(tried))  # their reasons may pass
        missing = answers.find_missing()
        if len(answers.uploads) >= patience.minimum:
            roll.close_round(missing)
            return answers
        if roll.find_left() <= answers.uploads.keys():
            return RoundAnswers(answers.asked)  # too few clients are left for a round: the run ends
        reasons = ", ".join(f"{why}: {n}" for why, n in _count_reasons(missing).items())
        raise RunError(
            f"round {t + 1} got {len(answers.uploads)} uploads of {len(answers.asked)} "
            f"asked and needs {patience.minimum} ({reasons or 'nobody to ask'}); "
            "repair the clients and resume the run"
        )

    def ask_sum(self, request: Request) -> RoundAnswers:
        """Lead a cohort through the five messages of the sum view; a void round has no sum.

        Who is silent or wrong in a message takes no further part in the round: another cohort would
        be another round to its clients. One that declines for good is replaced before the cohort is
        known. Whose key it is is known by its signature: a greeting may name that of another.
        """
        roll, terms, t = self.roll, self.run.federation.terms, request.round.t
        request, answers = replace(request, sum={}), RoundAnswers()
        rng = seeds.generator(self.header["seed"], Purpose.COHORT, t)
        least, by_key = terms.honest + terms.corrupt, dict[str, int]()
        roll.greet_returning(self.transport)
        if np.count_nonzero(roll.find_online()) < least:
            roll.retry_silent(at_once=True)  # a silent client is better than no round
        if (online := np.count_nonzero(roll.find_online())) < least:
            if len(roll.find_left()) < least:
                return answers
            raise RunError(
                f"round {t + 1} has {online} clients to ask and needs honest + corrupt = {least}; "
                "bring the clients back and resume the run"
            )
        names = [str((member.sum or {}).get("member")) for member in roll.members]
        size, asked_hash = sum(leaf.size for leaf in request.params.values()), request.hash()
        which = request.run, t, asked_hash

        def send(step: str, heads: Mapping[int, dict[str, Any]]) -> dict[int, Answer]:
            blobs, read = {}, {}
            for i, head in heads.items():
                if step in ("keys", "input"):
                    said = {k: v for k, v in head.items() if k not in ("run", "t")}
                    blobs[i] = replace(request, receipt=roll.members[i].receipt, sum=said).to_blob()
                elif answers.why.get(i) != SILENT:
                    blobs[i] = pack({"schema": SUM, **head})
            for i, blob in self._send(answers, blobs).items():
                if (answer := self._read_step(answers, i, step, blob, size, which)) is not None:
                    read[i] = answer
            return read

        def ask(step: str, heads: dict[str, dict[str, Any]]) -> dict[str, Answer]:
            if step != "keys":
                read = send(step, {by_key[name]: head for name, head in heads.items()})
                return {name: read[i] for name, i in by_key.items() if i in read}
            head, found = next(iter(heads.values())), dict[int, Answer]()
            more = self._pick_clients(answers, terms.per_round, rng)
            while more:
                found |= send(step, dict.fromkeys(more, head))
                more = self._pick_clients(answers, sum(i in roll.gone for i in more), rng)
            signed = Counter(names[i] for i in found)
            by_key.update({names[i]: i for i in found if signed[names[i]] == 1})
            for i in found.keys() - by_key.values():  # one of two repeats what the other signed
                log.warning("client %s has the sum's key of another", roll.members[i].name)
                answers.why[i] = "malformed"
            return {name: found[i] for name, i in by_key.items()}

        try:
            result = sum_round.play_sum_round(
                ask, names, terms, run=request.run, t=t, request=asked_hash, size=size
            )
        except RoundVoid as error:
            log.warning("round %d: %s", t + 1, error)
            for name in error.blamed:
                answers.why.setdefault(by_key[name], "malformed")
            if len(by_key) < least and len(roll.find_left()) < least:
                return answers  # nobody has paid, and too few are left for another round
            answers, missing = replace(answers, void=True), answers.why
        else:
            unit = _compute_grid_step(request.recipe)
            for name, noise in result.noise.items():
                i = by_key[name]
                answers.sigma[i] = (unit / roll.members[i].samples * noise,)
            # One whose input counts may have been silent afterwards, and waited for.
            missing = answers.find_missing() | answers.why
            for i in answers.sigma.keys() - missing.keys():
                roll.missed.pop(i, None)
            answers = replace(answers, total=result)
        roll.close_round(missing)
        return answers

    def _pick_clients(
        self, answers: RoundAnswers, room: int, rng: np.random.Generator
    ) -> list[int]:
        """Return at most so many clients that were not yet asked in this round, and note them."""
        if room < 1:
            return []
        online, kind = self.roll.find_online(), self.run.federation.terms.cohort
        online[answers.asked] = False
        asked = self.run.state.asked
        picked = pick_cohort(kind, asked=asked, size=room, rng=rng, online=online)
        more = [int(i) for i in picked]
        answers.asked.extend(more)
        return more

    def _send(self, answers: RoundAnswers, blobs: Mapping[int, bytes]) -> dict[int, bytes]:
        """Send clients their messages; return what came back in time, and note who is silent."""
        routes = {i: self.roll.routes.get(self.roll.members[i].identity, "") for i in blobs}
        requests = {route: blobs[i] for i, route in routes.items() if route}
        replies = self.transport.ask(requests, self.patience.deadline)
        for i in [i for i, route in routes.items() if route not in replies]:
            log.warning("client %s did not answer in time", self.roll.members[i].name)
            answers.why[i] = SILENT
        return {i: replies[route] for i, route in routes.items() if route in replies}

    def _expect_upload(self, request: Request, asked: str, i: int) -> ExpectedUpload:
        """Return what an honest answer of this client looks like.

        Its floor was not too high when it was admitted, and stays accepted if more clients came
        since.
        """
        federation, state, member = self.run.federation, self.run.state, self.roll.members[i]
        plan, terms = federation.plan, federation.terms
        needs = (member.floor or 0.0) * math.sqrt(terms.releases / _compute_model_share(plan))
        return ExpectedUpload(
            request,
            asked,
            member,
            ceiling=max(_compute_ceiling(plan, member, terms.clients), needs * (1 + 1e-6)),
            disclosed=plan.server.weights == "precision",
            terms=terms,
            opened=float(state.tank.capacity[i] * (state.tank.opened[i] / FULL)),
            debits=int(state.turns[i]) * terms.releases,
            shown=self.roll.shown.get(i, (0.0, 0)),
        )

    def _read_step(
        self, answers: RoundAnswers, i: int, step: str, blob: bytes, size: int, which: object
    ) -> Answer | None:
        """Check one client's answer to a step of the sum view; `which` is (run, t, request)."""

        def read() -> Answer | str:
            member, federation = self.roll.members[i], self.run.federation
            # A refusal has no arrays, and reads the same with words.
            head, arrays = unpack(blob, limit=8 * size + 2 * LONGEST_TEXT, words=True)
            if head.get("kind") == "refusal":
                return checks.read_code(head)
            if step == "keys":
                key, who = RoundKey.from_json(head.get("key")), (member.sum or {}).get("member")
                said = key.member, key.samples, (key.run, key.t, key.request)
                if said != (who, member.samples, which):
                    raise Malformed("the key is not the greeting's, or of another round")
            if step == "input":
                change = grid.grid_sensitivity(federation.recipe.unit, member.samples)
                receipt, account = checks.check_input(head, member, change, federation.terms.honest)
                self.roll.members[i] = replace(member, receipt=receipt, account=account)
            return head, arrays

        # Later steps may be declined because of the others who take part.
        lasting = LASTING if step == "keys" else ("empty",)
        return self._read_answer(answers, i, read, what="step of a round", lasting=lasting)

    def _read_answer(
        self,
        answers: RoundAnswers,
        i: int,
        read: Callable[[], Content | str],
        *,
        what: str = "upload",
        lasting: Sequence[str] = LASTING,
    ) -> Content | None:
        """Return what `read` makes of one client's answer, or note why it does not count.

        `read` returns the code of a refusal. A bad answer affects no other client.
        """
        roll, member = self.roll, self.roll.members[i]
        try:
            answer = read()
        except Malformed as error:
            log.warning("client %s sent no %s: %s", member.name, what, error)
            answers.why[i] = "version" if isinstance(error, OtherVersion) else "malformed"
            if isinstance(error, OtherSamples):  # all further uploads would be rejected, too
                answers.why[i] = roll.gone[i] = "samples"
            return None
        except Exception:  # an error in the checks must not end the run for everyone
            log.exception("the checks failed on what client %s sent", member.name)
            answers.why[i] = "malformed"
            return None
        if isinstance(answer, str):
            version = member.version or "unknown"
            log.warning("client %s (sottovoce %s) declined: %s", member.name, version, answer)
            answers.why[i] = answer
            if answer in lasting:
                roll.gone[i] = answer
            return None
        return answer


def _count_reasons(missing: Mapping[int, str]) -> dict[str, int]:
    """Return how often each reason occurs: clients' codes, `silent`, `malformed`, …"""
    return dict(sorted(Counter(missing.values()).items()))


def _compute_grid_step(recipe: Recipe) -> float:
    """Return how far a grid unit in a sum moves the model, times the number of samples."""
    return recipe.learning_rate * grid.grid_unit(recipe.clip)


def _play_round(
    run: rounds.Run, roll: Roll, round_: Round, answers: RoundAnswers
) -> rounds.PlayedRound:
    """Make the next model of the uploads that count, or of their sum, and evaluate it.

    After a void round of the sum view the model stays, and the round is over: all have paid.
    """
    federation, (state, params, memory) = run.federation, run.at
    members, is_sum = roll.members, federation.plan.privacy.view == "sum"
    uploads = np.zeros(len(members), dtype=bool)
    uploads[answers.asked if answers.void else list(answers.sigma)] = True
    sigma = np.full((federation.terms.releases, len(members)), np.nan)
    for i, values in answers.sigma.items():
        sigma[:, i] = values
    if is_sum:
        weight = plain = weigh_by_samples(federation.samples, uploads)
    else:
        plain = rounds.weigh_uploads(federation, uploads, sigma[0])
        assert federation.unregistered is not None
        weight = limit_noise(plain, sigma[0], federation.unregistered)
    hidden = np.array([member.account is None for member in members])
    sigma[:, hidden] = np.nan  # R9
    asked = state.asked.copy()
    asked[answers.asked] += 1
    tank = _build_tank(members, state.tank, uploads)
    prepared = rounds.PreparedRound(
        round=round_,
        weight=weight,
        sigma=sigma,
        signal_sigma=np.full(len(members), np.nan),
        mu2=np.where(hidden, 0.0, np.maximum(tank.spent_mu2 - state.tank.spent_mu2, 0.0)),
        uploads=uploads,
        tank=tank,
        asked=asked,
    )
    loss = accuracy = signal = offered = float("nan")
    if answers.sigma:
        if answers.total is None:
            averaged = combine_uploads(federation.plan, answers.uploads, weight, params)
        else:
            unit = _compute_grid_step(federation.recipe)
            averaged = sum_round.apply_sum(params, answers.total, unit)
        params, memory, offered = apply_optimizer(
            federation, state, round_, memory, params, averaged
        )
    if uploads.any():
        loss, accuracy, signal = judge_model(federation, federation.model.unflatten(dict(params)))
    if answers.uploads and federation.plan.server.signal == "clients":
        order = sorted(answers.uploads)
        losses = np.array([answers.uploads[i].loss for i in order], np.float64)
        signal = float(weight[order] @ losses)
    exceptions = Exceptions()
    if missing := answers.find_missing():
        exceptions |= {
            "asked": sorted(answers.asked),
            "refused": _count_reasons(missing),
            "missing": {members[i].name: why for i, why in missing.items()},
        }
    reasons = {} if is_sum else explain_limits(federation, members)
    for i in np.flatnonzero((weight < plain * (1 - 1e-9)) & ~hidden).tolist():
        reasons[members[i].name] = "has more noise than twice the median"
    names = [members[i].name for i in sorted(answers.uploads)]
    if limited := {name: reasons[name] for name in names if name in reasons}:
        exceptions["limited"] = limited
    models = params, memory
    return rounds.PlayedRound(prepared, loss, accuracy, signal, offered, models, exceptions)


def explain_limits(federation: Federation, members: Sequence[Member]) -> dict[str, str]:
    """Return why clients count for fewer samples than they declare, by name.

    A client that hides its numbers is left out: its limit would say something about them (R9).
    """
    assert federation.counted is not None
    return {
        member.name: "declares more samples than "
        + ("twice the median" if member.registered is None else "were registered for it")
        for member, most in zip(members, federation.counted.tolist(), strict=True)
        if member.samples > most and member.account is not None
    }


def combine_uploads(
    plan: Plan, uploads: Mapping[int, AcceptedUpload], weight: NDArray[np.float64], model: Arrays
) -> Arrays:
    """Combine uploads as the plan says, in float64 and in the order of the clients, as float32."""
    order, server = sorted(uploads), plan.server
    ordered = [uploads[i].params for i in order]
    total = combine(ordered, weight[order], model, kind=server.aggregation, trim=server.trim)
    with np.errstate(over="ignore"):
        return {name: leaf.astype(np.float32) for name, leaf in total.items()}


def _remove_uploads_since(out: Path, t: int) -> None:
    """Remove the uploads of round t, which was cut short, and of any round after it."""
    for path in (out / UPLOADS).glob("?????-?????"):
        if int(path.name[:5]) >= t:
            path.unlink()


def _build_tank(
    members: list[Member], before: Tank | None, uploads: NDArray[np.bool_] | None = None
) -> Tank:
    """Return the clients' tanks as they disclose them; a hidden one shows as full and untouched."""
    accounts = [m.account for m in members]
    capacity = np.array([1.0 if a is None else a.capacity for a in accounts])
    spent = np.array([0.0 if a is None else a.spent for a in accounts]) / capacity
    units = np.minimum(np.ceil(spent * FULL), FULL).astype(np.int64)
    if before is None:
        zero = np.zeros(len(members), dtype=np.int64)
        return Tank(capacity, units, units, zero)
    units = np.maximum(units, before.spent)
    counted = 0 if uploads is None else uploads.astype(np.int64)
    return Tank(capacity, units, before.opened, before.debits + counted)


def _identify_members(federation: Federation, members: Sequence[Member]) -> list[Identity]:
    """Return what the record says of each client beside its numbers."""
    assert federation.counted is not None
    reasons = explain_limits(federation, members)
    # Twice the median of all clients tells of those that hide their numbers, too (R9).
    hide = {m.name for m in members if m.account is None}
    hide |= reasons.keys() if hide else set()
    return [
        {
            "name": member.name,
            "key": member.key,
            "version": member.version,
            "counted": None if member.name in hide else most,
            **({"limited": reasons[member.name]} if member.name in reasons else {}),
        }
        for member, most in zip(members, federation.counted.tolist(), strict=True)
    ]
