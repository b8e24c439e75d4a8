"""What a client's machine does with a request: one request in, one answer out, the budget first.

The order is the promise (rules R1–R6, R10, R11 of docs/protocol.md):

    read the request → check it against the policy → asked before? → price
      → reserve, durable → compute and noise → store the upload, durable → answer

A crash after the reserve burns budget; nothing is refunded. Before anything is booked, the disk has
room for the upload and the process memory for the work; if an answer fails all the same, the client
stops until its operator has looked. The same content asked again gets the stored bytes; other
content for the same round is refused. A request can only ask for less than the policy allows.

`answer_request` never raises: a refusal is an answer too, in words that depend on the request, the
policy and the tank alone, which are public. For anything wrong with the client's files, code or
machine there is one constant refusal, `unavailable`; the reason is in the client's log.
"""

from __future__ import annotations

import logging
import math
import mmap
import traceback
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np

from sottovoce._version import __version__
from sottovoce.client import messages, release, sum_protocol
from sottovoce.client.messages import Request, make_refusal
from sottovoce.client.node import Node, Rows
from sottovoce.client.release import Price
from sottovoce.client.sum_protocol import Booking, Party, SumTerms, VaultNotes, Words
from sottovoce.client.vault import Policy, Reservation, Vault
from sottovoce.client.vault.journal import MOST_BYTES
from sottovoce.errors import (
    DataError,
    InputError,
    Malformed,
    OtherVersion,
    PolicyRefusal,
    Refusal,
    RoundAnswered,
    TankEmpty,
    VaultRefusal,
)
from sottovoce.models import base, network
from sottovoce.models.base import OWN, Shapes
from sottovoce.models.network import Network
from sottovoce.privacy import grid
from sottovoce.privacy.budget import UNITS
from sottovoce.privacy.calibration import MOST_PARAMETERS
from sottovoce.privacy.tank import FULL
from sottovoce.schedules.pricing import Terms

log = logging.getLogger("sottovoce.device")

PATIENCE = 20.0  # seconds that an operator's command, or another worker, may have the vault


class RequestDeclined(Refusal):
    """A request that the client's policy does not allow; its text may leave the client."""

    def __init__(self, text: str, code: str = "policy") -> None:
        super().__init__(text)
        self.code = code


def answer_request(blob: bytes, node: Node) -> bytes:
    """Answer one request, both as bytes; a hostile one is answered with a refusal."""
    return _answer_or_refuse(lambda: _answer_blob(blob, node), lambda: _name_request(blob))


def _answer_blob(blob: bytes, node: Node) -> bytes:
    head, arrays = messages.unpack(blob, limit=messages.LARGEST)
    if head.get("schema") != messages.SUM:
        return _answer_or_stop(Request.read(head, arrays), node)
    run, t = head.get("run"), head.get("t")
    if not isinstance(run, str) or not isinstance(t, int) or not 0 <= t < messages.MOST:
        raise Malformed("the message names no round of a run")
    if arrays or not messages.RUN.fullmatch(run):
        raise Malformed("the message is not a step of a round")
    with open_vault(node, node.read_rows()) as vault:
        return _make_party(node, vault, vault.policy).answer(head, run, t, None)


def _make_party(node: Node, vault: Vault, policy: Policy) -> Party:
    """Return this client as a party of the sum view, by its own roster and key."""
    if node.sum_files is None or policy.honest == 1:
        raise RequestDeclined("this client releases no sums ([policy.sum])")
    roster, key = node.sum_files
    terms = SumTerms(sum_protocol.read_roster(roster), policy.honest, policy.corrupt)
    return Party(sum_protocol.read_key(key), terms, VaultNotes(vault))


def make_greeting(node: Node) -> bytes:
    """Return who this client is, in public numbers: what a server needs to plan a run."""
    return _answer_or_refuse(lambda: _make_greeting(node), lambda: "a greeting")


def check_node(node: Node) -> None:
    """Raise what a message would meet in this client's files, in words for its operator.

    Nothing is booked and nothing is tightened.
    """
    rows = node.read_rows()
    node.load_own_model()
    with Vault.open(node.vault, dataset=rows.fingerprint, wait=PATIENCE) as vault:
        _require_samples(node, rows, vault)
        policy = node.make_policy(vault.policy.samples, vault.policy)
        vault.require_tightening(policy)
        vault.require_running()
        if node.sum_files is not None:
            vault.require_paying()
            _make_party(node, vault, policy)


def _name_request(blob: bytes) -> str:
    """Return a name for a request in the client's log, from public words only."""
    try:
        request = Request.from_blob(blob)
    except Malformed:
        return f"a request of {len(blob)} bytes" if isinstance(blob, bytes) else "no bytes"
    round_, server = request.round, request.server or "a server without a name"
    return f"round {round_.t + 1} of {round_.horizon} of run {request.run[:8]} for {server}"


def _answer_or_refuse(say: Callable[[], bytes], what: Callable[[], str]) -> bytes:
    """Return what `say` returns, or a refusal in words that may leave the client.

    The client's log has what was asked and which rule refused it. For the client's own failures it
    has only the kind of error: an error's words may contain a cell of a row, and logs are copied to
    other machines. `check_node` shows the words on the machine itself.
    """

    def log_and_refuse(code: str, text: str) -> bytes:
        log.warning("refused %s (%s): %s", what(), code, text)
        return make_refusal(code, text)

    try:
        return say()
    except RequestDeclined as no:
        return log_and_refuse(no.code, str(no))
    except Malformed as no:
        return log_and_refuse("version" if isinstance(no, OtherVersion) else "malformed", str(no))
    except TankEmpty:
        return log_and_refuse("empty", "the privacy budget has nothing left for this release")
    except PolicyRefusal as error:  # its text may contain what the policy hides
        log.error("refused: %s", _describe_error(error))
        return log_and_refuse("policy", "the client's own terms do not allow this release")
    except RoundAnswered:
        return log_and_refuse("replay", "this round has its answer already")
    except Refusal as error:
        log.error("the ledger cannot be used: %s", _describe_error(error))
    except (DataError, InputError) as error:
        log.error("the client's own files cannot be used: %s", _describe_error(error))
    except Exception as error:  # its text may contain what must not leave
        log.error("%s ended in an error of the client's own: %s", what(), _describe_error(error))
    return refuse_unavailable()


def refuse_unavailable() -> bytes:
    """Return the one refusal for everything that is wrong on the client's side."""
    return make_refusal("unavailable", "the client cannot answer now; its operator has to look")


def _describe_error(error: Exception) -> str:
    """Return an error without its words: its kind, and the file and line that it came from."""
    frames = list(traceback.walk_tb(error.__traceback__))
    if not frames:
        return type(error).__name__
    frame, line = frames[-1]
    return f"{type(error).__name__} ({Path(frame.f_code.co_filename).name}, line {line})"


def _make_greeting(node: Node) -> bytes:
    rows = node.read_rows()
    with open_vault(node, rows) as vault:
        return messages.pack(
            {
                "schema": messages.HELLO if rows.encoding is None else messages.TABLE_HELLO,
                **({} if rows.encoding is None else {"encoding": rows.encoding}),
                "name": node.name,
                "version": __version__,
                "features": rows.features,
                "classes": rows.classes,
                "policy": _disclose_policy(node, vault, rows),
                "budget": _disclose_budget(vault),
                "receipt": vault.receipt().to_json(),
            }
        )


def _answer_or_stop(request: Request, node: Node) -> bytes:
    """Answer a request for a round; if that fails after the debit, stop the vault."""
    rows, debits = node.read_rows(), list[Reservation]()
    try:
        return _answer_in_order(request, node, rows, debits)
    except Exception as error:
        if debits:  # paid for, and not sent
            log.error("an answer failed after it was paid for; see `sottovoce ledger show`")
            _note_failure(node, rows, _describe_error(error))
        raise


def _note_failure(node: Node, rows: Rows, why: str) -> None:
    """Note in the vault that an answer failed: the next request would burn budget again.

    Where even that cannot be written, the vault stops at the next debit without an upload.
    """
    try:
        with Vault.open(node.vault, dataset=rows.fingerprint, wait=PATIENCE) as vault:
            vault.stop(why)
    except Refusal as error:
        log.error("that it failed could not be noted: %s", _describe_error(error))


def _answer_in_order(request: Request, node: Node, rows: Rows, debits: list[Reservation]) -> bytes:
    """Check, look up, price, book, compute and store, in this order; note every debit."""
    with open_vault(node, rows) as vault:
        policy = vault.policy
        _require_samples(node, rows, vault)
        own_model = node.load_own_model() if request.form.name == OWN else None
        if request.form.name == OWN and own_model is None:
            raise RequestDeclined("this client's node file names no model of its own")
        shapes = request.form.shapes() if own_model is None else own_model.shapes()
        _require_fit(request, shapes, rows)
        _require_allowed(request, policy)
        if request.receipt is not None and not vault.contains(request.receipt):
            log.error("the server has a receipt that this vault does not know: it is an older copy")
            raise VaultRefusal("this client's ledger does not contain the receipt it gave")
        request_hash = request.hash()
        is_key_step = request.sum is not None and request.sum.get("step") == "keys"
        if (entry := vault.find(request.run, request.round.t)) is not None:
            if entry.request_hash != request_hash:
                words = "this round was asked with another model or other terms"
                raise RequestDeclined(words, "replay")
            if entry.upload is not None and not is_key_step:
                return entry.upload
            if entry.upload is not None:  # the noted key needs no price: there may be nothing left
                party = _make_party(node, vault, policy)
                return party.answer({"step": "keys"}, request.run, request.round.t, None)
            if entry.dropped:
                words = "this round's answer was received and is kept no longer"
                raise RequestDeclined(words, "replay")
        lens = None
        if isinstance(request.form.lens, Network):  # opened and tried on random numbers
            try:
                lens = network.locate(request.form.lens, node.features)
            except InputError as error:
                log.error("the network cannot be used: %s", error)  # of public files alone
                words = "this client has no network for samples like its own with the SHA-256"
                raise RequestDeclined(f"{words} {request.form.lens.sha256}") from None
        if own_model is not None:  # tried on rows of zeros
            params = {name: leaf.astype(np.float64) for name, leaf in request.params.items()}
            label = np.int64 if rows.target is None else np.float64
            base.require_rows(own_model, params, policy.samples, request.form.features, label)
        vault.require_running()
        if node.vault.stat().st_size + _bound_upload_bytes(request) > policy.max_bytes:
            raise RequestDeclined(f"the client's ledger may have {policy.max_bytes} bytes at most")
        change = grid.grid_sensitivity(request.recipe.unit, policy.samples)
        paid = _price_turn(request, policy, vault, change)
        greeted = dict[str, int]()
        if request.sum is None and request.receipt is not None:  # a sum takes any noise
            greeted["greeted"], terms = vault.find_greeted(request.run, request.receipt)
            if terms != policy:
                _require_expected(paid, _price_turn(request, terms, vault, change))
        if not is_key_step:
            _require_memory(request, rows)

        def make_upload(masked: tuple[int, Words] | None) -> bytes:
            """Reserve, compute, store: the order is the promise (R1).

            `masked` are noise, in grid units, and mask where the server learns only a sum.
            """
            alone, noise = None, list(paid.noise)
            if masked is not None:
                noise = [masked[0]]
                alone = count_units(change, masked[0], vault.capacity)
            reserved = vault.reserve(
                request.run,
                request.round.t,
                request_hash,
                paid.units,
                server=request.server,
                facts={
                    "horizon": request.round.horizon,
                    "learning_rate": request.recipe.learning_rate,
                    "clip": request.recipe.clip,
                    "unit": request.recipe.unit,  # what Δ was taken for: at least the policy's
                    "noise": noise,
                    "loss_bound": request.loss_bound,
                    "loss_noise": paid.loss_noise,
                    **greeted,
                },
                acknowledged=request.receipt,
                room=_bound_upload_bytes(request),
                alone=alone,
            )
            debits.append(reserved)
            head = {
                "schema": messages.ANSWER,
                "kind": "upload" if masked is None else "input",
                "run": request.run,
                "t": request.round.t,
                "request": request_hash,
                "samples": policy.samples,
                "receipt": reserved.receipt.to_json(),
                "budget": _disclose_budget(vault),
            }
            x = rows.apply_features(request.form.lens if lens is None else lens, node.data)
            inputs = request.form, request.params, x, rows.y
            common: Any = {"recipe": request.recipe, "head": head, "own": own_model}
            if masked is None:
                upload = release.release(
                    *inputs, paid=paid, loss_bound=request.loss_bound, **common
                )
            else:
                upload = release.release_masked(*inputs, noise=noise[0], mask=masked[1], **common)
            vault.store(reserved, upload.blob)
            return upload.blob

        if request.sum is None:
            return make_upload(None)
        if request.recipe.releases != 1 or request.loss_bound is not None:
            raise Malformed("a sum is released in one step and without a loss")
        size = sum(leaf.size for leaf in request.params.values())
        booking = Booking(
            request_hash,
            policy.samples,
            size,
            paid.noise[0],
            policy.share,
            release=lambda noise, mask: make_upload((noise, mask)),
        )
        party = _make_party(node, vault, policy)
        return party.answer(request.sum, request.run, request.round.t, booking)


def count_units(change: int, noise: int, capacity: float) -> int:
    """Return the parts of the capacity that (Δ/s)² is, rounded up exactly.

    >>> count_units(2**31, 2**32, 4.0) == FULL // 16
    True
    """
    return math.ceil(FULL * Fraction(change, noise) ** 2 / Fraction(capacity))


def open_vault(node: Node, rows: Rows) -> Vault:
    """Open the client's vault, tightened to the terms of its node file."""
    vault = Vault.open(node.vault, dataset=rows.fingerprint, wait=PATIENCE)
    try:
        wanted = node.make_policy(vault.policy.samples, vault.policy)
        if wanted != vault.policy:
            vault.tighten(wanted)
    except BaseException:
        vault.close()
        raise
    return vault


def _require_samples(node: Node, rows: Rows, vault: Vault) -> None:
    if len(rows.y) != vault.policy.samples:
        raise DataError(f"{node.data} has {len(rows.y)} rows, the vault was made for others")


def _price_turn(request: Request, policy: Policy, vault: Vault, change: int) -> Price:
    terms = Terms(
        clients=request.clients,
        per_round=request.per_round,
        cohort=request.cohort,
        calibration=policy.calibration,
        releases=request.recipe.releases,
    )
    tank = vault.tank(request.run, request.server, policy)
    has_loss = request.loss_bound is not None
    try:
        return release.price(
            tank, request.round, terms, change=change, floor=policy.floor, loss=has_loss
        )
    except PolicyRefusal:  # its words name the noise, and so the budget
        raise RequestDeclined(
            "this round needs more noise than the grid holds; announce fewer rounds, or protect "
            "records where all of a large data set is protected"
        ) from None


def _require_expected(paid: Price, before: Price) -> None:
    """Refuse a turn with more noise than the terms need that the server was greeted with.

    The server would reject its upload, which had been paid for. Its check has room for 1e-4 more,
    which a default floor needs: it is rounded up, and the last turn has the rest of the others.
    """
    if any(now > then * (1 + 1e-4) for now, then in zip(paid.noise, before.noise, strict=True)):
        raise RequestDeclined(
            "the client's terms were tightened in mid-run, and its noise would be more than its "
            "greeting allows; it takes part in the next run"
        )


def _require_fit(request: Request, shapes: Shapes, rows: Rows) -> None:
    """Refuse a model that is incomplete, not finite, too large, or made for other samples."""
    if request.form.numbers != rows.features or request.form.classes != rows.classes:
        raise RequestDeclined(
            f"the model is for {request.form.numbers} features and {request.form.classes} "
            f"classes, and this client has {rows.features} and {rows.classes}",
        )
    if rows.encoding is not None and request.encoding != rows.encoding:
        said = "says nothing of it" if request.encoding is None else "has another"
        raise RequestDeclined(
            f"the encoding of the table must be {rows.encoding[:8]}…, and the request {said}; give "
            "server and clients one version, and the plan's data.columns to every node file",
        )
    if request.form.target is not None and rows.target is not None:
        low, high = rows.target[1:]
        if request.form.target[1:] != (low, high):
            words = f"the target's range must be [{low:g}, {high:g}], as in the node file"
            raise RequestDeclined(words)
    weights = request.recipe.class_weights
    if weights is not None and (len(weights) != rows.classes or rows.classes == 1):
        raise Malformed(f"the request's class_weights are not {rows.classes}, one for each class")
    if request.form.rows_per_person != rows.rows_per_person:
        raise RequestDeclined(
            f"rows_per_person must be {rows.rows_per_person}, got {request.form.rows_per_person} "
            "(0: a sample is one row)",
        )
    if request.recipe.unit == "person" and not rows.rows_per_person:
        raise RequestDeclined("unit must be record or client, this client has no persons")
    if weights is not None and rows.rows_per_person:  # a person has no class
        raise RequestDeclined("class_weights must be absent where samples are persons")
    if {name: leaf.shape for name, leaf in request.params.items()} != dict(shapes):
        raise Malformed("the request's arrays are not those of its model")
    if sum(leaf.size for leaf in request.params.values()) > MOST_PARAMETERS:
        raise RequestDeclined("the model has more than 2³⁰ parameters")
    if _bound_upload_bytes(request) > MOST_BYTES:  # after the reserve it would burn budget
        raise RequestDeclined("the model is larger than an answer this client can keep")
    if not all(np.all(np.isfinite(leaf)) for leaf in request.params.values()):
        raise Malformed("the request's model is not finite")


def _bound_upload_bytes(request: Request) -> int:
    """Return a number of bytes that the answer to a request does not exceed."""
    width = 4 if request.sum is None else 8
    return width * sum(leaf.size for leaf in request.params.values()) + messages.LONGEST_TEXT


def _require_memory(request: Request, rows: Rows) -> None:
    """Raise MemoryError where a release would find too little memory, before it is paid for.

    It holds the rows as float64, blocks of gradients, and the parameters a few times over:
    as they are, summed, noised, moved and written; a cnn also what XLA takes, which is seen on rows
    of zeros. Every page is touched: a kernel that promises more than it has ends this process now,
    and not after the debit. Nothing of the rows is looked at.
    """
    count = sum(leaf.size for leaf in request.params.values())
    width = max(rows.features, request.form.features)
    width = (width + 2) * rows.rows_per_person if rows.rows_per_person else width
    largest = min(base.BLOCK_NUMBERS, max(64, len(rows.y)) * count)  # sums go by 64 rows
    blocks = 4 if request.form.needs_jax else 3  # XLA may free a block only after the next one
    numbers = 2 * len(rows.y) * width + blocks * largest + 10 * count
    if rows.rows_per_person:  # a block has all rows of a person at least
        factors = sum(sum(leaf.shape) for leaf in request.params.values())
        numbers += 4 * rows.rows_per_person * (count if request.form.name == OWN else factors)
    held = np.empty(numbers)
    held[:: mmap.PAGESIZE // 8] = 0
    if request.form.needs_jax:  # while the rest is held, as it is while a release computes
        params = {name: leaf.astype(np.float64) for name, leaf in request.params.items()}
        zeros = np.zeros((len(rows.y), width)), np.zeros(len(rows.y), rows.y.dtype)
        next(base.gradient_blocks(request.form, params, *zeros))
    del held


def _require_allowed(request: Request, policy: Policy) -> None:
    """Refuse a request that asks for more than the client's policy allows (R5)."""
    count = sum(leaf.size for leaf in request.params.values())
    rows = request.form.rows_per_person
    if request.recipe.clip > policy.clip:
        raise RequestDeclined(f"clip must be at most {policy.clip:g}, got {request.recipe.clip:g}")
    unit = request.recipe.unit
    if UNITS.index(unit) < UNITS.index(policy.unit):
        raise RequestDeclined(f"unit must be {policy.unit}, got {unit}")
    for name, value, most in (
        ("rounds", request.round.horizon, policy.max_rounds),
        ("steps", request.recipe.steps, min(policy.max_steps, policy.max_rounds)),
        (
            "parameters × steps × " + (f"persons × {rows} rows" if rows else "samples"),
            count * request.recipe.steps * policy.samples * max(1, rows),
            policy.max_work,
        ),
    ):
        if value > most:
            raise RequestDeclined(f"{name} must be at most {most}, got {value}")


def _disclose_budget(vault: Vault) -> dict[str, Any] | None:
    """Return promised ε and δ, capacity and spent μ², unless the policy hides them (R9)."""
    if not vault.policy.disclose:
        return None
    capacity, spent = vault.compare_with_promise()
    return {
        "epsilon": vault.promised.epsilon,
        "delta": vault.promised.delta,
        "capacity": capacity,
        "spent": spent,
    }


def _disclose_policy(node: Node, vault: Vault, rows: Rows) -> dict[str, Any]:
    policy, promised, terms = vault.policy, vault.promised, (1, 0)
    public = ("samples", "unit", "clip", "calibration", "max_rounds", "max_steps")
    disclosed: dict[str, Any] = {
        **{name: getattr(policy, name) for name in public},
        "floor": policy.floor if policy.disclose else None,
        # With a server share it depends on the server's earlier runs, and is left out.
        "run_share": policy.run_share if policy.server_share == 1 else None,
    }
    if rows.rows_per_person:
        disclosed["rows_per_person"] = rows.rows_per_person
    if node.sum_files is not None:
        member = sum_protocol.name_key(sum_protocol.read_key(node.sum_files[1]).public_key())
        terms = policy.honest, policy.corrupt
        disclosed["sum"] = {"member": member, "honest": terms[0], "corrupt": terms[1]}
    first = promised.honest, promised.corrupt
    if first != terms and (node.sum_files is not None or vault.alone > vault.spent):
        disclosed["promised"] = list(first)  # earlier sums of this budget hold on these terms
    return disclosed
