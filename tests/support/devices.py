"""Small nodes for the tests of the device: a client with a few rows, its vault, and requests to it.

`books_hold` is the guarantee that every test of a device asks for at its end.
"""

from __future__ import annotations

import hashlib
import json
import struct
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sottovoce.client import device, messages
from sottovoce.client.messages import Receipt, Request
from sottovoce.client.node import Node
from sottovoce.client.vault import Vault
from sottovoce.client.vault.policy import LIMITS
from sottovoce.models.base import Form
from sottovoce.privacy import grid
from sottovoce.privacy.sensitivity import Recipe
from sottovoce.privacy.tank import FULL
from sottovoce.schedules.base import Round

RUN = "0badc0de"
FEATURES, SAMPLES = 4, 12
FORMS = {
    "svm": Form("svm", (FEATURES,), 2, {"kappa": 0.01}),
    "softmax": Form("softmax", (FEATURES,), 3),
    "mlp": Form("mlp", (FEATURES,), 3, {"hidden": 3}),
    "cnn": Form("cnn", (2, 2, 1), 3, {"channels": 2}),
    "own": Form("own", (FEATURES,), 3),
}
Rows = tuple[NDArray[np.float64], NDArray[np.int64]]


def rows(seed: int, classes: int = 3, samples: int = SAMPLES) -> Rows:
    """A data set of a few samples."""
    rng = np.random.default_rng(seed)
    return rng.normal(size=(samples, FEATURES)), rng.integers(0, classes, samples)


def make_node(
    folder: Path,
    data: Rows | None = None,
    *,
    classes: int = 3,
    name: str = "ward",
    own: str | None = None,
    vault: bool = True,
    target: list[float] | None = None,
    **policy: Any,
) -> Node:
    """A node in a folder: its rows, its file and, if wanted, its vault."""
    folder.mkdir(parents=True, exist_ok=True)
    x, y = rows(0, classes) if data is None else data
    np.savez(folder / f"{name}.npz", x=x, y=y)
    limits = {"run_share": 1.0, **{k: policy.pop(k) for k in LIMITS if k in policy}}
    terms = {"epsilon": 8.0, "delta": 1e-5, "clip": 1.0, **policy}
    lines = [
        "schema = 1",
        f'name = "{name}"',
        f'vault = "{name}.vault"',
        "[data]",
        f'path = "{name}.npz"',
        f"classes = {classes}" if target is None else f"target = {target}",
        "[policy]",
        *(f"{key} = {json.dumps(value)}" for key, value in terms.items()),
        "[policy.limits]",
        *(f"{key} = {json.dumps(value)}" for key, value in limits.items() if value is not None),
    ]
    if own is not None:
        lines += ["[model]", f'own = "{own}"']
    path = folder / f"{name}.toml"
    path.write_text("\n".join(lines) + "\n", "utf-8")
    node = Node.load(path)
    if vault:
        make_vault(node)
    return node


def make_vault(node: Node) -> None:
    """What `sottovoce ledger create --second-ledger` does for a node: tests share their rows."""
    held = node.read_rows()
    policy = node.make_policy(len(held.y))
    Vault.create(node.vault, policy, dataset=held.fingerprint, second_ledger=True).close()


def model(name: str = "mlp", value: float = 0.1, seed: int | None = None) -> dict[str, Any]:
    """A model of the form, all of one value or at random."""
    shapes = OwnLine().shapes() if name == "own" else FORMS[name].shapes()
    if seed is None:
        return {key: np.full(shape, value, np.float32) for key, shape in shapes.items()}
    rng = np.random.default_rng(seed)
    return {k: (rng.normal(size=s) * value).astype(np.float32) for k, s in shapes.items()}


def ask(
    name: str = "mlp",
    *,
    t: int = 0,
    horizon: int = 8,
    scale: float = 1.0,
    spread: int | None = None,
    params: Mapping[str, Any] | None = None,
    recipe: Recipe | None = None,
    **changes: Any,
) -> Request:
    """An honest request, changed as said."""
    given: dict[str, Any] = {
        "run": RUN,
        "round": Round(t, horizon, scale, spread),
        "clients": 3,
        "per_round": 3,
        "cohort": "balanced",
        "recipe": recipe or Recipe(1.0, 1.0),
        "form": FORMS[name],
        "params": dict(model(name) if params is None else params),
        "server": "s",
    }
    return Request(**{**given, **changes})


@contextmanager
def memory() -> Iterator[Path]:
    """A folder that is gone afterwards, in memory where the machine has such a place."""
    home = "/dev/shm" if Path("/dev/shm").is_dir() else None
    with tempfile.TemporaryDirectory(dir=home) as folder:
        yield Path(folder)


def told(blob: bytes) -> dict[str, Any]:
    """The head of an answer."""
    return messages.unpack(blob)[0]


def kind(blob: bytes) -> str:
    """`upload`, or a refusal's code."""
    head = told(blob)
    return str(head["kind"] if head["kind"] == "upload" else head["code"])


def sealed(text: bytes, body: bytes = b"") -> bytes:
    """A message with any text and any bytes for arrays: its checksum is right, nothing else is."""
    whole = messages.MAGIC + struct.pack("<I", len(text)) + text + body
    return whole + hashlib.sha256(whole).digest()


def opened(blob: bytes) -> tuple[dict[str, Any], bytes]:
    """The text of a message as plain data, and the bytes of its arrays."""
    start = len(messages.MAGIC) + 4
    length = int.from_bytes(blob[len(messages.MAGIC) : start], "little")
    return json.loads(blob[start : start + length]), blob[start + length : -32]


def written(text: Mapping[str, Any], body: bytes = b"") -> bytes:
    """A message with this text, in the canonical way."""
    return sealed(json.dumps(text, sort_keys=True, separators=(",", ":")).encode(), body)


def digest(blob: bytes) -> str:
    """SHA-256 of an answer, as the ledger notes it."""
    return hashlib.sha256(blob).hexdigest()


@dataclass(frozen=True)
class Ledger:
    """What a vault has booked and stored, read without its data."""

    spent: int
    limit: int
    receipt: Receipt
    released: Fraction  # Σ μ² of the noise in the stored uploads
    booked: Fraction  # Σ μ² of all reserves
    answers: dict[tuple[str, int], str]  # SHA-256 of what was stored, dropped since or not


def books_hold(node: Node) -> Ledger:
    """Hold the vault against the promise, in exact arithmetic, or fail.

    Every reserve: μ² of the whole turn ≤ 1/floor². Every stored upload: the σ it states is the
    noise booked for it, and worth no more than was booked. All together: within the budget.
    """
    with Vault.open(node.vault, dataset=None) as vault:
        policy, answers = vault.policy, {}
        capacity = Fraction(float(vault.tank("").capacity))
        floor, released, booked = Fraction(policy.floor), Fraction(0), Fraction(0)
        lines = [line.facts for line in vault.lines() if line.kind == "store"]
        stored = {(facts["run"], facts["t"]): facts["sha256"] for facts in lines}
        for entry in vault.entries():
            mu2 = capacity * sum(entry.units) / FULL
            assert mu2 <= 1 / floor**2, f"{entry} is below the floor"
            booked += mu2
            if vault.find_answered_reserve(entry.run, entry.t) != entry.seq:
                continue
            found = vault.find(entry.run, entry.t)
            assert found is not None
            answers[entry.run, entry.t] = stored[entry.run, entry.t]
            if found.dropped:  # its server has it; what was booked for it bounds its worth
                released += mu2
                continue
            assert found.upload is not None
            assert digest(found.upload) == stored[entry.run, entry.t]
            released += worth(found.upload, entry.facts, policy.samples, entry.units, capacity)
        assert vault.spent <= vault.limit
        assert booked == capacity * (vault.spent - vault.burnt) / FULL
        assert released <= booked <= capacity
        place = vault.receipt()
        return Ledger(
            vault.spent,
            vault.limit,
            Receipt(place.vault, place.seq, place.hash),
            released,
            booked,
            answers,
        )


def worth(
    upload: bytes,
    facts: Mapping[str, Any],
    samples: int,
    units: tuple[int, ...],
    capacity: Fraction,
) -> Fraction:
    """μ² of an upload by the noise it states, having checked that this noise was paid for."""
    head = told(upload)
    change = grid.grid_sensitivity(facts["unit"], samples)
    one = facts["learning_rate"] / samples * grid.grid_unit(facts["clip"])
    assert head["sigma"] == [one * noise for noise in facts["noise"]], "σ is not what was booked"
    total = Fraction(0)
    for place, (noise, paid) in enumerate(zip(facts["noise"], units, strict=True)):
        mu2 = Fraction(change, noise) ** 2
        if place == 0 and "loss" in head:
            bound, of_loss = facts["loss_bound"], facts["loss_noise"]
            assert head["loss_sigma"] == bound * (of_loss / grid.REPLACED) / samples
            mu2 += Fraction(change, of_loss) ** 2
        assert mu2 <= capacity * paid / FULL, "more than was paid for"
        total += mu2
    return total


def answered(node: Node, request: Request | bytes) -> bytes:
    """What the device answers; whatever it is, the books hold afterwards."""
    blob = device.answer_request(request if isinstance(request, bytes) else request.to_blob(), node)
    books_hold(node)
    return blob


class OwnLine:
    """A model of a client's own: one linear score a class and the squared error, in numpy."""

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Weights and one number without dimensions."""
        return {"bias": (), "w": (FEATURES, 3)}

    def gradients(
        self, params: Mapping[str, Any], x: NDArray[np.float64], y: NDArray[Any]
    ) -> dict[str, NDArray[np.float64]]:
        """Every sample's own."""
        error = self._error(params, x, y)
        return {"bias": error.sum(axis=1), "w": x[:, :, None] * error[:, None, :]}

    def losses(
        self, params: Mapping[str, Any], x: NDArray[np.float64], y: NDArray[Any]
    ) -> NDArray[np.float64]:
        """Half the squared error of every sample."""
        return np.asarray(0.5 * np.sum(self._error(params, x, y) ** 2, axis=1))

    def _error(
        self, params: Mapping[str, Any], x: NDArray[np.float64], y: NDArray[Any]
    ) -> NDArray[np.float64]:
        return np.asarray(x @ params["w"] + params["bias"] - np.eye(3)[y])


class TurnedLine(OwnLine):
    """Gradients with the samples in the last dimension: as many numbers, in the wrong order."""

    def gradients(
        self, params: Mapping[str, Any], x: NDArray[np.float64], y: NDArray[Any]
    ) -> dict[str, NDArray[np.float64]]:
        """Every sample's own, turned."""
        own = super().gradients(params, x, y)
        return {name: np.moveaxis(leaf, 0, -1) for name, leaf in own.items()}


class ManyLosses(OwnLine):
    """Two losses a sample instead of one."""

    def losses(
        self, params: Mapping[str, Any], x: NDArray[np.float64], y: NDArray[Any]
    ) -> NDArray[np.float64]:
        """Twice as many."""
        return np.concatenate([super().losses(params, x, y)] * 2)


class TouchyLine(OwnLine):
    """A model whose code fails on what some samples hold, and says what."""

    def gradients(
        self, params: Mapping[str, Any], x: NDArray[np.float64], y: NDArray[Any]
    ) -> dict[str, NDArray[np.float64]]:
        """Every sample's own, unless one is not finite."""
        self._look(x)
        return super().gradients(params, x, y)

    def losses(
        self, params: Mapping[str, Any], x: NDArray[np.float64], y: NDArray[Any]
    ) -> NDArray[np.float64]:
        """Of every sample, unless one is not finite."""
        self._look(x)
        return super().losses(params, x, y)

    def _look(self, x: NDArray[np.float64]) -> None:
        if not np.all(np.isfinite(x)):
            raise ValueError(f"cannot use {x[~np.isfinite(x).all(axis=1)]}")


class WritingLine(OwnLine):
    """A model that works in place: what it leaves in its arrays are raw rows."""

    def __init__(self, always: bool) -> None:
        self.always = always

    def gradients(
        self, params: Mapping[str, Any], x: NDArray[np.float64], y: NDArray[Any]
    ) -> dict[str, NDArray[np.float64]]:
        """Every sample's own, and the sample written over the parameters."""
        own = super().gradients(params, x, y)
        if self.always or x.any():
            for array, value in ((params["w"], x[0, 0]), (x, 7.0), (y, 1)):
                for held in (array, array.base):
                    with suppress(ValueError, AttributeError):
                        held.setflags(write=True)
                array[...] = value
        return own


LINE, TURNED, MANY, TOUCHY = OwnLine(), TurnedLine(), ManyLosses(), TouchyLine()
WRITING, SLY = WritingLine(always=True), WritingLine(always=False)
