"""A plan's data dealt to nodes on this machine: each gets rows, a node file and a vault of its own.

    OUT/plan.toml                    what will run (written last: a folder without it is unfinished)
    OUT/public.npz                   the server's validation and test rows
    OUT/admitted.csv                 the clients that may take part, and their samples
    OUT/nodes/client-0/rows.npz      one client's rows
    OUT/nodes/client-0/node.toml     what that client has decided: its budget, its clip, its unit
    OUT/nodes/client-0/client.vault  its ledger

In a federation between machines every client makes its own; here one command plays them all.
"""

from __future__ import annotations

import io
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from sottovoce.client.ledger import operate
from sottovoce.data import federated, public
from sottovoce.data.federated import Holdings, Samples
from sottovoce.data.files import make_folder, write_file
from sottovoce.errors import RunError
from sottovoce.models import imported
from sottovoce.plan import Plan
from sottovoce.plan import text as toml
from sottovoce.privacy import seeds
from sottovoce.server.federation import told

PLAN, PUBLIC, NODES, NODE = "plan.toml", "public.npz", "nodes", "node.toml"
ADMITTED = "admitted.csv"
ROUNDS = 1000  # that a node allows in one run, unless the plan needs more
STEPS = 16  # likewise, in one turn


def deal(plan: Plan, out: Path) -> list[Path]:
    """Read the plan's data and deal them below `out`; the node files, client after client.

    Who gets which rows is drawn anew each time; the plan that is written names files absolutely.
    """
    held = federated.dealt(plan, seed=seeds.fresh())  # as read: a node makes features itself
    plan = anchored(told(plan, held))
    make_folder(out)
    (out / NODES).mkdir(mode=0o700, exist_ok=True)
    public.save(out / PUBLIC, replace(held, fresh_vaults=True))  # the record says so
    names = _names(held)
    files = [_node(plan, held, i, out / NODES / name) for i, name in enumerate(names)]
    lines = [f"{name},{n}\n" for name, n in zip(names, held.samples.tolist(), strict=True)]
    write_file(out / ADMITTED, "".join(["client,samples\n", *lines]).encode())
    write_file(out / PLAN, plan.to_toml().encode())
    return files


def dealt(out: Path) -> tuple[Plan, list[Path]]:
    """What `deal` has left in a folder: the plan and the node files."""
    if not (out / PLAN).exists():
        raise RunError(f"{out} holds no federation to go on with; start a new one")
    return Plan.load(out / PLAN), sorted((out / NODES).glob(f"*/{NODE}"))


def anchored(plan: Plan) -> Plan:
    """The plan with absolute paths, to be read from anywhere on this machine."""
    here, changes = Path.cwd(), dict[str, object]()
    if plan.model.own is not None:
        changes["model.own"] = imported.beside(plan.model.own, here)
    for key in ("path", "validation", "test"):
        if isinstance(file := getattr(plan.data, key), str):
            changes[f"data.{key}"] = str(here / file)
    return plan.replace(**changes) if changes else plan


def node_file(plan: Plan, i: int, *, name: str, classes: int) -> str:
    """Client `i`'s own terms as a node file: what the plan promises it, in its own hand."""
    epsilon, delta = (float(values[i]) for values in plan.budgets())
    values: dict[str, Any] = {
        "schema": 1,
        "name": name,
        "vault": "client.vault",
        "answer_every": 0.0,  # server and clients have one owner here: nobody else measures time
        "data": {"path": "rows.npz", "classes": classes},
        "policy": {
            "epsilon": epsilon,
            "delta": delta,
            "clip": plan.recipe().clip,
            "unit": plan.local.unit,
            "calibration": plan.privacy.calibration,
            "max_rounds": max(ROUNDS, plan.rounds.rounds, plan.local.steps),
            "max_steps": max(STEPS, plan.local.steps),
            # The vault is made for this one run, which may take all of it.
            "limits": {"run_share": 1.0, "max_work": 2**62, "max_bytes": 2**62},
        },
    }
    if plan.model.own is not None:
        values["model"] = {"own": plan.model.own}
    return toml.write(values)


def _names(held: Holdings) -> list[str]:
    """Name the clients as their table does where that makes plain folders, else by number."""
    plain = all(re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", name) for name in held.names)
    if held.names and plain and len({name.lower() for name in held.names}) == len(held.names):
        return list(held.names)
    clients = len(held.samples)
    return [f"client-{i:0{len(str(clients - 1))}d}" for i in range(clients)]


def _node(plan: Plan, held: Holdings, i: int, folder: Path) -> Path:
    folder.mkdir(mode=0o700)
    _write(folder / "rows.npz", held.client(i))
    file = folder / NODE
    file.write_text(node_file(plan, i, name=folder.name, classes=held.classes), "utf-8")
    operate.create_for(file, second_ledger=True)  # made for this run; the record says so
    return file


def _write(path: Path, rows: Samples) -> None:
    buffer = io.BytesIO()
    np.savez_compressed(buffer, x=rows.x, y=rows.y)
    write_file(path, buffer.getvalue())
