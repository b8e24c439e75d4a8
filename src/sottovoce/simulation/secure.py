"""The engine of secure noise: every client of the cohort makes its own upload, as a device would.

Slower than `compiled`, which draws the cohort's averaged noise at once, but nothing here is
simulated except the network: `client.release` for each client, then their mean. The tanks are those
of the run; a device's would be in its vault.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from sottovoce.client import release
from sottovoce.models.base import as_device, flatten_parameters
from sottovoce.privacy import grid
from sottovoce.privacy.tank import Tank
from sottovoce.runs.checkpoint import ServerState
from sottovoce.schedules import optimizer
from sottovoce.schedules.aggregate import combine
from sottovoce.server import rounds
from sottovoce.server.federation import Federation, score_model
from sottovoce.server.rounds import PreparedRound, apply_optimizer
from sottovoce.simulation.table import BatchRun, models_alone

Arrays = dict[str, NDArray[np.float32]]


def play(
    federation: Federation, before: Tank, prepared: PreparedRound, params: Arrays
) -> tuple[Arrays, PreparedRound, float | None]:
    """The new model, what was paid with the noise that was drawn, and the clients' noised loss."""
    held, plan = federation.held, federation.plan
    device = as_device(federation.model, shape=held.inputs, classes=held.classes)
    bound = plan.server.loss_bound if plan.server.signal == "clients" else None
    uploads, told, sigma = [], [], prepared.sigma.copy()
    present = np.flatnonzero(prepared.uploads)
    for i in present:
        own, rows = _tank(before, int(i)), held.client(int(i))
        paid = release.price(
            own,
            prepared.turn,
            federation.terms,
            change=grid.grid_sensitivity(plan.local.unit, len(rows.y)),
            loss=bound is not None,
        )
        booked = int(prepared.tank.spent[i] - before.spent[i])
        if sum(paid.units) != booked:
            raise AssertionError("a client's price is not what the server booked for it")
        upload = release.release(
            device.form,
            params,
            rows.x,
            rows.y,
            recipe=federation.recipe,
            paid=paid,
            head={"kind": "upload"},
            loss_bound=bound,
            own=device.own,
        )
        uploads.append(upload.params)
        told.append(upload.loss)
        sigma[:, i] = upload.sigma
    weight = prepared.weight[present]
    one = combine(uploads, weight, params, kind=plan.server.aggregation, trim=plan.server.trim)
    with np.errstate(over="ignore"):
        new = {name: leaf.astype(np.float32) for name, leaf in one.items()}
    heard = None if bound is None else float(weight @ np.array(told, dtype=np.float64))
    return new, replace(prepared, sigma=sigma), heard


def _tank(tank: Tank, i: int) -> Tank:
    return Tank(tank.capacity[i], tank.spent[i], tank.opened[i], tank.debits[i])


class Secure:
    """The engine of one run whose clients make their uploads themselves, with secure noise.

    `before_release` is told the state with the round's debits and without the round: what a run
    that was killed in the middle of it goes on from, so that nothing is released for free.
    """

    def __init__(self, run: BatchRun, before_release: Callable[[ServerState], None]) -> None:
        self.run, self.before_release = run, before_release

    def prepare_rounds(self, live: Sequence[int]) -> rounds.RoundsByRun:
        """The next round, priced, or nothing when the run is over."""
        paid = rounds.prepare_round(self.run.federation, self.run.state, self.run.seed)
        return {} if paid is None else {0: paid}

    def begin_rounds(self, asks: rounds.RoundsByRun) -> bool:
        """Book the debits, and have them on the disk, before anything is released."""
        run, paid = self.run, asks[0]
        self.tank = run.state.tank
        if paid.uploads.any():
            run.at = (replace(run.state, tank=paid.tank, asked=paid.asked), *run.at[1:])
            self.before_release(run.state)
        return False

    def end_rounds(self, asks: rounds.RoundsByRun) -> list[tuple[int, rounds.PlayedRound]]:
        """Let every client of the cohort make its upload, and make the next model of their mean."""
        run, paid, federation = self.run, asks[0], self.run.federation
        if not paid.uploads.any():
            return [(0, rounds.PlayedRound(paid, math.nan, math.nan, math.nan, math.nan, ()))]
        params = flatten_parameters(run.params)
        memory: optimizer.Memory = {
            part: flatten_parameters(tree) for part, tree in run.memory.items()
        }
        averaged, paid, heard = play(federation, self.tank, paid, params)
        params, memory, offered = apply_optimizer(
            federation, run.state, paid.turn, memory, params, averaged
        )
        tree = federation.model.unflatten(dict(params))
        loss, accuracy = score_model(federation.model, tree, federation.held.validation)
        models = models_alone(federation.model, params, memory)
        signal = loss if heard is None else heard
        return [(0, rounds.PlayedRound(paid, loss, accuracy, signal, offered, models))]
