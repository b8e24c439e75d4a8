"""A round with secure noise: every client of the cohort makes its own upload, as a device would.

Slower than `round`, which draws the cohort's averaged noise at once, but nothing here is simulated
except the network: `client.release` for each client, then `server.average`. The tanks are those of
the run; a device's would be in its vault.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from sottovoce.client import release
from sottovoce.models.own import as_device
from sottovoce.privacy import grid
from sottovoce.privacy.tank import Tank
from sottovoce.schedules.aggregate import combine
from sottovoce.server.course import Prepared
from sottovoce.server.federation import Federation

Arrays = dict[str, NDArray[np.float32]]


def play(
    federation: Federation, before: Tank, prepared: Prepared, params: Arrays
) -> tuple[Arrays, Prepared, float | None]:
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
            change=grid.change(plan.local.unit, len(rows.y)),
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
