"""A federation of real devices in one process: settle it, lead it, replay what it wrote."""

from __future__ import annotations

import json
from importlib import resources

import jsonschema
import numpy as np

from sottovoce import reports
from sottovoce.client import messages
from sottovoce.client.messages import Request
from sottovoce.reports.progress import summarize_run
from sottovoce.schedules.aggregate import average, weigh_by_samples
from sottovoce.server.coordinator import Patience, conduct
from support.devices import books_hold, digest
from support.drawings import leave_drawings_blank
from support.in_process import plan, public

SCHEMA = json.loads(
    resources.files("sottovoce").joinpath("schemas", "record.json").read_text("utf-8")
)
RECORD = jsonschema.Draft202012Validator(SCHEMA)  # which is checked once, in project/test_schemas


def go(transport, out, *, patience=None, own=None, **more):
    """One run; nobody is waited for longer than a moment."""
    patience = Patience(len(transport.nodes), gathering=0.5) if patience is None else patience
    return conduct(plan() if own is None else own, public(), transport, patience, out=out,
                   keep_uploads=True, **more)  # fmt: skip


def replayed(out):
    """Every round's model again, from the uploads that were kept (weights by samples)."""
    rounds = {}
    for path in sorted((out / "uploads").iterdir()):
        head, arrays = messages.unpack(path.read_bytes())
        rounds.setdefault(int(path.name[:5]), []).append((head["samples"], arrays))
    models = {}
    for t, uploads in rounds.items():
        n = np.array([samples for samples, _ in uploads])
        weight = weigh_by_samples(n, np.ones(len(n), bool))
        total = average([arrays for _, arrays in uploads], weight)
        models[t] = {name: leaf.astype(np.float32) for name, leaf in total.items()}
    return models


def same(one, two):
    return {k: v.tobytes() for k, v in one.items()} == {k: v.tobytes() for k, v in two.items()}


def settled(done, transport, *, precision=False, honest=True):
    """What must hold after any run."""
    record, out = done.record, done.folder
    RECORD.validate(record)
    assert json.loads((out / "record.json").read_text("utf-8")) == record
    with leave_drawings_blank():
        assert reports.write_report(out).exists()
    assert "test accuracy" in summarize_run(record, out, out)
    ledgers = {route: books_hold(node) for route, node in transport.nodes.items()}
    with np.load(out / "model.npz") as stored:
        final = {name: stored[name] for name in stored.files}
    if not precision:
        models = replayed(out)
        assert sorted(models) == [entry["t"] for entry in record["rounds"]]
        assert same(models[max(models)], final)
        for requests in transport.requests:  # and every model that was sent is the mean before it
            for blob in requests.values():
                asked = Request.from_blob(blob)
                if asked.round.t > 0:
                    assert same(asked.params, models[asked.round.t - 1])
    for path in (
        (out / "uploads").iterdir() if honest else ()
    ):  # what was averaged is what a vault has stored
        mark = digest(path.read_bytes())
        assert any(mark in held.answers.values() for held in ledgers.values())
    return ledgers
