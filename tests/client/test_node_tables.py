"""Nodes that read arrays, CSV or Parquet, with features and without: rows do not see each other.

The guarantee rests on this: replacing one row changes what *that row* contributes to the sum, and
nothing else. Everything between a file and an upload could break it (bounds or means taken from the
column, a layout that follows the data), so it is asked of whole nodes: neighbouring files, the same
frozen noise, and what leaves is compared.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

from sottovoce.client import device, messages
from sottovoce.client.node import Node
from sottovoce.client.vault import Vault, fingerprint
from sottovoce.data.tables import Source, declare_layout
from sottovoce.errors import Malformed, OtherVersion
from sottovoce.models.base import Form
from sottovoce.models.features import Hog
from sottovoce.privacy import secure_noise
from sottovoce.privacy.sensitivity import Recipe
from sottovoce.server.members import Member
from support.device_twins import frozen
from support.devices import ask, make_vault, memory, told

pytestmark = pytest.mark.slow  # seconds of CPU in all; left out of the editing loop

KINDS = ("npz", "csv", "parquet")
SAMPLES = 9
PIXELS = [f"p{i}" for i in range(16)]
PEOPLE = {"age": [0, 120], "dose": [-1.0, 5.5], "sex": ["f", "m"], "ill": ["no", "yes"]}
PICTURES = {**{pixel: [0, 255] for pixel in PIXELS}, "ill": ["no", "yes"]}
LENSES = {"people": None, "flagged": None, "pictures": None, "hog": Hog((4, 4, 1), 2)}
OF_PEOPLE = ("people", "flagged")
Row = dict[str, Any]


@pytest.fixture
def ram():
    with memory() as folder:
        yield folder


def columns_of(what: str) -> dict[str, list[Any]]:
    return PEOPLE if what in OF_PEOPLE else PICTURES


def table(what: str, seed: int) -> list[Row]:
    """Rows well within their bounds, two with a gap; `note` is in no node's columns."""
    rng = np.random.default_rng(seed)
    rows = []
    for _ in range(SAMPLES):
        label = {"ill": str(rng.choice(["no", "yes"])), "note": float(rng.normal())}
        if what in OF_PEOPLE:
            own = {"age": int(rng.integers(20, 60)), "dose": float(rng.uniform(0, 2)),
                   "sex": str(rng.choice(["f", "m"]))}  # fmt: skip
        else:
            own = {pixel: int(rng.integers(60, 190)) for pixel in PIXELS}
        rows.append({**own, **label})
    for place, name in ((5, "age"), (7, "dose")) if what in OF_PEOPLE else ((5, "p1"), (7, "p9")):
        rows[place][name] = None
    return rows


def odd_rows(what: str) -> list[Row]:
    """What a replaced row may become."""
    names = [name for name in columns_of(what) if name != "ill"]
    rest: Row = {"ill": "yes", "note": 1e9}
    if what in OF_PEOPLE:
        return [
            {"age": 119, "dose": 5.4, "sex": "m", **rest},
            {"age": 10**6, "dose": -1e30, "sex": "nobody", **rest},
            {"age": None, "dose": None, "sex": None, **rest, "note": None},
        ]
    return [
        {name: 255 * (i % 3 == 0) for i, name in enumerate(names)} | rest,
        dict.fromkeys(names, 10**6) | rest,
        dict.fromkeys(names) | rest,
    ]


def encoded(what: str, row: Row) -> list[float]:
    """One row as numbers, by the formula of docs/data.md: from the row and public bounds alone."""
    numbers: list[float] = []
    for name, spec in columns_of(what).items():
        if name == "ill":
            continue
        if isinstance(spec[0], str):
            numbers += [float(row[name] == category) for category in spec]
            continue
        missing = row[name] is None
        if missing:
            numbers.append(0.0)
        else:
            low, high = spec
            scaled = np.float32((min(max(row[name], low), high) - low) / (high - low))
            numbers.append(float(2 * scaled - 1))
        if what == "flagged":
            numbers.append(float(missing))
    return numbers


def make_table_node(folder: Path, what: str, kind: str, rows: list[Row]) -> Node:
    """A node whose rows lie in a file of this kind, with a vault."""
    folder.mkdir(parents=True)
    columns = columns_of(what)
    path, data = folder / f"rows.{kind}", [f'path = "rows.{kind}"']
    if kind == "npz":
        x = np.array([encoded(what, row) for row in rows], np.float32)
        np.savez(path, x=x, y=np.array([columns["ill"].index(row["ill"]) for row in rows]))
        data.append("classes = 2")
    else:
        frame = pl.DataFrame(rows, infer_schema_length=None)
        if kind == "csv":
            frame.write_csv(path)
        else:
            frame.write_parquet(path)
        listed = ", ".join(f"{name} = {json.dumps(spec)}" for name, spec in columns.items())
        data += ['label = "ill"', f"columns = {{ {listed} }}"]
        if what == "flagged":
            data.append('missing = "flag"')
    policy = ["[policy]", "epsilon = 8.0", "delta = 1e-5", "clip = 1.0"]
    head = ["schema = 1", 'name = "ward"', 'vault = "ward.vault"', "[data]"]
    (folder / "ward.toml").write_text("\n".join([*head, *data, *policy]) + "\n", "utf-8")
    node = Node.load(folder / "ward.toml")
    make_vault(node)
    return node


def form_of(what: str, name: str = "softmax") -> Form:
    lens = LENSES[what]
    shape = (16,) if lens is None else (4, 4, 1)
    if what in OF_PEOPLE:
        shape = (4 if what == "people" else 6,)
    return Form(name, shape, 2, {"hidden": 3} if name == "mlp" else {}, lens=lens)


def encoding_of(what: str, **changes: Any) -> str:
    """What a server with a table of these columns says of its encoding."""
    columns = {name: tuple(spec) for name, spec in columns_of(what).items()}
    missing = "flag" if what == "flagged" else "middle"
    layout = declare_layout(Source("rows.csv", "ill", columns=columns, missing=missing))
    return replace(layout, **changes).encoding


def requests(what: str) -> list[bytes]:
    """Two models, with a loss and without, and one of them asked again."""
    said = []
    for t, name in enumerate(("softmax", "mlp")):
        form, rng = form_of(what, name), np.random.default_rng(t)
        params = {
            k: (0.3 * rng.normal(size=s)).astype(np.float32) for k, s in form.shapes().items()
        }
        bound = 2.0 if name == "mlp" else None
        says = encoding_of(what)
        asked = ask(form=form, params=params, t=t, loss_bound=bound, encoding=says)
        said.append(asked.to_blob())
    return [*said, said[0]]


def replaced(rows: list[Row], place: int, row: Row) -> list[Row]:
    return [*rows[:place], row, *rows[place + 1 :]]


@pytest.mark.parametrize("what", OF_PEOPLE)
def test_a_vault_of_version_0_1_knows_its_table(ram, what):
    """Its fingerprint is that of numbers in [0, 1]; another would hide a second ledger, too."""
    rows = table(what, 3)
    x = np.array([encoded(what, row) for row in rows], np.float32)
    for name, place in (("age", 0), ("dose", 1 if what == "people" else 2)):
        low, high = PEOPLE[name]
        middle = 0.5 if what == "people" else 0.0
        cells = [row[name] for row in rows]
        x[:, place] = [middle if c is None else (c - low) / (high - low) for c in cells]
    y = np.array([PEOPLE["ill"].index(row["ill"]) for row in rows])
    for kind in ("csv", "parquet"):
        node = make_table_node(ram / kind, what, kind, rows)
        assert node.read_rows().fingerprint == fingerprint(x, y)


@pytest.mark.parametrize(
    "changes",
    [
        {"low": 0.0},
        {"missing": "flag"},
        {"classes": ("yes", "no")},
        {"columns": {"age": (0.0, 1.0)}},
    ],
)
def test_a_table_is_never_trained_in_another_encoding(ram, changes):
    """A server of [0, 1], other bounds or classes, or one that says nothing, is refused unpaid."""
    node, form = make_table_node(ram / "a", "people", "csv", table("people", 1)), form_of("people")
    params = {k: np.zeros(s, np.float32) for k, s in form.shapes().items()}
    other = encoding_of("people", **changes)
    for says in (other, None):
        refusal = told(
            device.answer_request(ask(form=form, params=params, encoding=says).to_blob(), node)
        )
        assert refusal["code"] == "policy"
        assert refusal["text"].startswith("the encoding of the table must be ")
    with Vault.open(node.vault, dataset=node.read_rows().fingerprint) as vault:
        assert vault.spent == 0
    greeting = Member.from_hello(device.make_greeting(node))
    assert greeting.encoding == encoding_of("people")
    assert Member.from_head(greeting.to_head()) == replace(greeting, version=greeting.version)
    with_arrays = make_table_node(ram / "b", "people", "npz", table("people", 1))
    assert Member.from_hello(device.make_greeting(with_arrays)).encoding is None
    asked = ask(form=form, params=params, encoding=other).to_blob()
    assert told(device.answer_request(asked, with_arrays))["kind"] == "upload"  # nothing to compare


def test_who_knows_only_the_older_messages_refuses_those_of_a_table():
    """A client or server of before names both versions, instead of training on other numbers."""
    asked = messages.unpack(ask(encoding="0" * 64).to_blob())[0]
    with pytest.raises(OtherVersion, match=r"a request/2 and .* reads request/1"):
        messages.require_version(asked, messages.REQUEST)
    for head in (
        {"schema": messages.TABLE_HELLO},
        {"schema": messages.HELLO, "encoding": "0" * 64},
    ):
        with pytest.raises(Malformed, match="encoding"):
            messages.read_encoding(head, messages.HELLO, messages.TABLE_HELLO)


every_node = pytest.mark.parametrize(
    ("what", "kind"), [(what, kind) for what in LENSES for kind in KINDS]
)


@every_node
def test_replacing_a_row_changes_no_other_row_that_a_node_reads(ram, what, kind):
    """Bit for bit: a node's other rows, their labels and the layout stay what they were."""
    rows = table(what, 1)
    before = make_table_node(ram / "before", what, kind, rows).read_rows()
    oracle = np.array([encoded(what, row) for row in rows], np.float32)
    assert np.array_equal(before.x.astype(np.float32), oracle)
    for place, row in enumerate(odd_rows(what)):
        node = make_table_node(ram / str(place), what, kind, replaced(rows, 3 * place, row))
        after = node.read_rows()
        assert (after.x.dtype, after.x.shape, after.classes) == (
            before.x.dtype, before.x.shape, before.classes,
        )  # fmt: skip
        for one, other in ((before.x, after.x), (before.y, after.y)):
            kept = [np.delete(array, 3 * place, axis=0).tobytes() for array in (one, other)]
            assert kept[0] == kept[1]


def equal_rows(what: str) -> list[tuple[Row, Row]]:
    """Rows that are the same row by what is public of their columns."""
    base = table(what, 5)[0]
    if what in OF_PEOPLE:
        age = 60 if what == "people" else None  # a flag tells a missing number from the middle
        return [
            (base, {**base, "note": 1e9}),  # no node reads it
            ({**base, "age": 121}, {**base, "age": 10**6}),
            ({**base, "dose": -1.5}, {**base, "dose": -1e30}),
            ({**base, "sex": "nobody"}, {**base, "sex": None}),
            ({**base, "age": age}, {**base, "age": None}),
        ]
    return [
        (base, {**base, "note": None}),
        ({**base, "p3": 256}, {**base, "p3": 10**6}),
        ({**base, "p0": -1, "p15": 300}, {**base, "p0": -(10**6), "p15": 256}),
    ]


@every_node
def test_frozen_noise_and_equal_rows_give_equal_bytes(ram, what, kind):
    """Files that differ only where nothing public tells them apart: every byte that leaves."""
    rows, said = table(what, 2), requests(what)
    for number, pair in enumerate(equal_rows(what)):
        heard = []
        for side, row in zip("ab", pair, strict=True):
            with frozen(number):
                node = make_table_node(
                    ram / f"{number}{side}", what, kind, replaced(rows, number, row)
                )
                heard.append(
                    [
                        device.make_greeting(node),
                        *(device.answer_request(blob, node) for blob in said),
                    ]
                )
        assert heard[0] == heard[1]
        assert [told(blob).get("kind") for blob in heard[0][1:]] == ["upload"] * 3


@every_node
def test_a_greeting_does_not_depend_on_any_row(ram, what, kind):
    """Public numbers only: not the last class that one row has, not a cell beyond all others."""
    rows, heard = [{**row, "ill": "no"} for row in table(what, 8)], []
    for number, row in enumerate([rows[4], {**rows[4], "ill": "yes"}, *odd_rows(what)]):
        with frozen(1):
            node = make_table_node(ram / str(number), what, kind, replaced(rows, 4, row))
            heard.append(device.make_greeting(node))
    assert told(heard[0])["classes"] == 2
    assert len(set(heard)) == 1


def released_by(node: Node, blob: bytes) -> np.ndarray:
    """What a node uploads for noise that is zero, in one vector: the clipped mean alone."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(secure_noise, "draw", lambda count, sigma: np.zeros(count, np.int64))
        head, arrays = messages.unpack(device.answer_request(blob, node))
    assert head["kind"] == "upload"
    return np.concatenate([arrays[name].reshape(-1) for name in sorted(arrays)]).astype(float)


def moves(make: Callable[[list[Row]], Node], rows: list[Row], place: int, new: Row, blob: bytes):
    """By how much an upload moves if one row is replaced."""
    other = make(replaced(rows, place, new))
    return released_by(make(rows), blob) - released_by(other, blob)


@every_node
def test_what_a_row_contributes_does_not_depend_on_the_others(ram, what, kind):
    """Replace r by r′ among two different sets of other rows: the upload moves by the same vector.

    It moves by at most 2ηC/n, and so far that the test would notice (float32 rounds to 1e-7).
    """
    made = iter(range(100))

    def make(rows: list[Row]) -> Node:
        return make_table_node(ram / str(next(made)), what, kind, rows)

    form, rng = form_of(what), np.random.default_rng(3)
    params = {k: (0.3 * rng.normal(size=s)).astype(np.float32) for k, s in form.shapes().items()}
    recipe, says = Recipe(1.0, 0.1), encoding_of(what)
    blob = ask(form=form, params=params, recipe=recipe, encoding=says).to_blob()
    old = table(what, 4)[0]
    for new in odd_rows(what)[:2]:
        among = [replaced(table(what, seed), 2, old) for seed in (6, 7)]
        one, other = (moves(make, rows, 2, new, blob) for rows in among)
        assert np.abs(one - other).max() < 1e-6
        assert 1e-3 < np.linalg.norm(one) <= 2 * 0.1 / SAMPLES + 1e-6
