"""The engine of secure noise: every client of the cohort makes its own upload, as a device would.

It is slower than `compiled`, which draws the cohort's averaged noise at once, but it simulates
nothing except the network: `client.release` for each client, then their mean. With
`privacy.view = "sum"` the clients mask their uploads and the server unmasks only their sum
(`client.sum_protocol`, `server.sum_round`). The tanks belong to the run; a device's tank is in its
vault.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from sottovoce.client import describe, messages, release, sum_protocol
from sottovoce.client.sum_protocol import Booking, MemoryNotes, Party, SumTerms
from sottovoce.errors import InputError
from sottovoce.models.base import DeviceModel, as_device
from sottovoce.models.statistics import BINS, PARAMETER
from sottovoce.plan import Plan
from sottovoce.privacy import grid
from sottovoce.privacy.sensitivity import Recipe
from sottovoce.privacy.tank import FULL, Tank
from sottovoce.runs.checkpoint import ServerState
from sottovoce.schedules.aggregate import combine
from sottovoce.schedules.pricing import Terms
from sottovoce.server import rounds, sum_round
from sottovoce.server.federation import Federation, build
from sottovoce.server.rounds import PreparedRound
from sottovoce.simulation.compiled import BatchRun
from sottovoce.simulation.streamed import Arrays, AveragingEngine


def average_uploads(
    federation: Federation, before: Tank, prepared: PreparedRound, params: Arrays
) -> tuple[Arrays, PreparedRound, float | None]:
    """Return the mean upload, the round with the noise drawn, and the clients' noised loss."""
    held, plan, device = federation.held, federation.plan, _describe_device(federation)
    bound = plan.server.loss_bound if plan.server.signal == "clients" else None
    uploads, losses, sigma = [], [], prepared.sigma.copy()
    how: Any = {"recipe": federation.recipe, "loss_bound": bound, "own": device.own_model}
    present = np.flatnonzero(prepared.uploads)
    for i in present:
        rows = held.client(int(i))
        given = device.form, params, rows.x, rows.y
        paid = _price_turn(federation, before, prepared, int(i))
        upload = release.release(*given, paid=paid, head={"kind": "upload"}, **how)
        uploads.append(upload.params)
        losses.append(upload.loss)
        sigma[:, i] = upload.sigma
    weight = prepared.weight[present]
    mean = combine(uploads, weight, params, kind=plan.server.aggregation, trim=plan.server.trim)
    with np.errstate(over="ignore"):
        new = {name: leaf.astype(np.float32) for name, leaf in mean.items()}
    signal = None if bound is None else float(weight @ np.array(losses, dtype=np.float64))
    return new, replace(prepared, sigma=sigma), signal


def _describe_device(federation: Federation) -> DeviceModel:
    held = federation.held
    return as_device(
        federation.model,
        shape=held.inputs,
        classes=held.classes,
        rows_per_person=federation.plan.rows_per_person,
        target=held.target,
    )


def _price_turn(
    federation: Federation, before: Tank, prepared: PreparedRound, i: int
) -> release.Price:
    plan = federation.plan
    paid = release.price(
        Tank(before.capacity[i], before.spent[i], before.opened[i], before.debits[i]),
        prepared.round,
        federation.terms,
        change=grid.grid_sensitivity(plan.local.unit, len(federation.held.client(i).y)),
        loss=plan.server.signal == "clients",
    )
    if sum(paid.units) != int(prepared.tank.spent[i] - before.spent[i]):
        raise AssertionError("a client's price is not what the server booked for it")
    return paid


def make_parties(federation: Federation) -> list[Party]:
    """Return the clients as parties of the sum view, each with a long-term key of its own.

    Every client's roster has all clients of the run: what the plan counts on holds for each.
    """
    terms, samples = federation.terms, np.sort(federation.samples)[-federation.terms.per_round :]
    if not sum_protocol.has_room(int(samples.sum()), grid.LARGEST_NOISE, terms.per_round):
        raise InputError.of(
            "privacy.view",
            "sum",
            f"upload for {samples.sum()} samples in a round, whose sum may leave ±2⁶³ grid units",
            "ask fewer clients in a round",
        )
    sum_protocol.choose_threshold(terms.per_round, terms.honest, terms.corrupt)
    keys = [Ed25519PrivateKey.generate() for _ in federation.samples]
    roster = frozenset(sum_protocol.name_key(key.public_key()) for key in keys)
    sum_terms = SumTerms(roster, terms.honest, terms.corrupt)
    return [Party(key, sum_terms, MemoryNotes()) for key in keys]


def sum_uploads(
    federation: Federation,
    before: Tank,
    prepared: PreparedRound,
    params: Arrays,
    parties: Sequence[Party],
    run: str,
) -> tuple[Arrays, PreparedRound]:
    """Return the mean upload made of the unmasked sum, and the round with the noise drawn.

    w − (η/N)·u·(Σ S_i + Σ Z_i): with weights by samples the mean needs no single upload.
    """
    held, device = federation.held, _describe_device(federation)
    present = np.flatnonzero(prepared.uploads).tolist()
    by_name = {parties[i].member: i for i in present}
    size, t = sum(leaf.size for leaf in params.values()), prepared.round.t
    model = hashlib.sha256(b"".join(params[name].tobytes() for name in sorted(params)))
    request = sum_protocol.digest("request", [prepared.round.horizon, model.hexdigest()])
    how: Any = {"recipe": federation.recipe, "head": {"kind": "input"}, "own": device.own_model}
    bookings = {}
    for i in present:
        paid, rows = _price_turn(federation, before, prepared, i), held.client(i)

        def make(noise: int, mask: sum_protocol.Words, rows: Any = rows) -> bytes:
            given = device.form, params, rows.x, rows.y
            return release.release_masked(*given, noise=noise, mask=mask, **how).blob

        bookings[i] = Booking(
            request, len(rows.y), size, paid.noise[0], float(federation.terms.honest), make
        )

    def ask(step: str, heads: dict[str, dict[str, Any]]) -> Mapping[str, sum_round.Answer]:
        return {
            member: messages.unpack(
                parties[by_name[member]].answer(head, run, t, bookings[by_name[member]]),
                words=step == "input",
            )
            for member, head in heads.items()
        }

    result = sum_round.play_sum_round(
        ask, list(by_name), federation.terms, run=run, t=t, request=request, size=size
    )
    unit = federation.recipe.learning_rate * grid.grid_unit(federation.recipe.clip)
    sigma = prepared.sigma.copy()
    for member, noise in result.noise.items():
        sigma[:, by_name[member]] = unit / result.keys[member].samples * noise
    return sum_round.apply_sum(params, result, unit), replace(prepared, sigma=sigma)


class SecureEngine(AveragingEngine):
    """The engine of one run whose clients make their uploads themselves, with secure noise.

    `before_release` receives the state with the round's debits but without the round. A run that is
    killed in the middle of the round resumes from it, so that nothing is released without a debit.
    """

    def __init__(self, run: BatchRun, before_release: Callable[[ServerState], None]) -> None:
        super().__init__(run)
        self.before_release = before_release
        is_sum = run.federation.plan.privacy.view == "sum"
        self.parties = make_parties(run.federation) if is_sum else None
        self.name = secrets.token_hex(8)  # of this process's part of the run: keys are never reused

    def begin_rounds(self, opened: rounds.RoundsByRun) -> bool:
        """Book the debits, and write them to disk, before anything is released."""
        run, paid = self.run, opened[0]
        self.tank = run.state.tank
        if paid.uploads.any():
            run.at = (replace(run.state, tank=paid.tank, asked=paid.asked), *run.at[1:])
            self.before_release(run.state)
        return False

    def average(
        self, paid: PreparedRound, params: Arrays
    ) -> tuple[Arrays, PreparedRound, float | None]:
        """Let every client of the cohort make its upload."""
        federation = self.run.federation
        if self.parties is None:
            return average_uploads(federation, self.tank, paid, params)
        return *sum_uploads(federation, self.tank, paid, params, self.parties, self.name), None


def describe_plan(
    plan: Plan, *, seed: int = 0, share: float = describe.SHARE, bins: int = BINS
) -> describe.Description:
    """Let every client of a plan's table release statistics, with secure noise, and combine them.

    Each pays with this share of its budget in the plan; no vault keeps the debit.
    """
    describe.require_share(share)
    if plan.data.path is None or plan.data.is_array_file:
        remedy = "describe a table: .csv or .parquet"
        raise InputError.of("data.path", plan.data.path, "a table with declared columns", remedy)
    if plan.model.features is not None and plan.data.text is None:
        remedy = "a description is of the columns themselves"
        raise InputError.of("model.features", plan.model.features, "absent", remedy)
    federation = build(plan.replace(noise="secure"), seed=seed)
    plan, held = federation.plan, federation.held
    assert held.layout is not None
    model = describe.make_model(held.layout, bins=bins)
    recipe = Recipe(1.0, 1.0, unit=plan.local.unit)
    turn = describe.plan_release(Tank.full(1.0), FULL, share)
    terms, zeros = Terms(1, 1, calibration=plan.privacy.calibration), np.zeros(model.size)
    form = replace(model.form(), rows_per_person=plan.rows_per_person, target=held.target)
    codes = describe.list_uncovered(plan.local.unit, *federation.not_covered("unvaulted"))
    same: Any = {"recipe": recipe, "unit": plan.local.unit, "bins": bins, "not_covered": codes}
    descriptions = []
    for i, samples in enumerate(held.samples.tolist()):
        rows, change = held.client(i), grid.grid_sensitivity(plan.local.unit, samples)
        paid = release.price(Tank.full(federation.capacity[i]), turn, terms, change=change)
        given = form, {PARAMETER: zeros}, rows.x, rows.y
        upload = release.release(*given, recipe=recipe, paid=paid, head={"kind": "upload"})
        name = held.names[i] if held.names else f"client {i}"
        description = describe.make_description(
            held.layout,
            upload.params[PARAMETER],
            upload.sigma[0],
            delta=float(federation.delta[i]),
            clients={name: samples},
            **same,
        )
        descriptions.append(description)
    return describe.combine(descriptions)
