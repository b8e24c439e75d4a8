"""A file that is cut off, edited or something else gives one sentence: never a traceback.

Every reader of arrays is fed the same damage: its own good file cut off, with bytes changed, and
whole files of another kind. What comes out is what was saved or an error of our tree.
"""

from __future__ import annotations

import copy
import io
import json
import random
import warnings
import zipfile
from contextlib import suppress

import numpy as np
import pytest

from sottovoce.cli import commands
from sottovoce.client.node import _read_arrays
from sottovoce.client.vault.chain import fingerprint_file
from sottovoce.data import federated, files
from sottovoce.data.tables import read_samples
from sottovoce.errors import DataError, InputError, RunError, SottovoceError
from sottovoce.models.custom import load_own_model
from sottovoce.plan import Plan
from sottovoce.privacy.tank import Tank
from sottovoce.reports import run as reports
from sottovoce.runs import checkpoint, trained
from sottovoce.runs.record import SECTIONS, model_sha256
from sottovoce.schedules.base import Progress
from sottovoce.studies import store
from sottovoce.studies.paper import outcomes
from sottovoce.studies.paper.reproduce import _open_folder
from sottovoce.studies.rehearsal.standin import announce_federation, make_stand_in
from support.example_record import example
from support.example_results import result

X, Y = np.linspace(0, 1, 96, dtype=np.float32).reshape(24, 4), np.arange(24) % 2
ROWS = Plan(data={"name": "arrays", "clients": 2, "samples": 5})


def as_public(path):
    return make_stand_in(ROWS, announce_federation(ROWS), path)


def save_checkpoint(path):
    state = checkpoint.ServerState(
        Progress(1, 5, (0.5,), None),
        Tank.full(np.ones(3)),
        np.arange(3),
        np.ones(3, np.int64),
        ({"t": 0},),
        (np.ones(3),),
        (np.ones(3),),
        (1.0, 0.5, None),
        1.0,
    )
    checkpoint.save(path.parent, state, {"w": np.zeros(4)}, {"seed": 0})


def save_run(path):
    record, trace = example(clients=3, rounds=4)
    params = {"w": np.zeros((4, 2), np.float32), "b": np.zeros(2, np.float32)}
    record["plan"]["model"] = {"name": "softmax"}
    record["model"] = {"shape": [4], "classes": 2, "parameters": 10}
    record["result"]["model_sha256"] = model_sha256(params)
    (path.parent / "record.json").write_text(json.dumps(record), "utf-8")
    np.savez_compressed(path.parent / "model.npz", **params)
    np.savez_compressed(path.parent / "trace.npz", **trace)


def save_public(path):
    good = {"shape": np.array([4]), "classes": np.array(2)}
    for part in federated.PUBLIC_SETS:
        good |= {f"{part}_x": X, f"{part}_y": Y}
    np.savez(path, **good)


def save_rows(path):
    np.savez(path, x=X, y=Y)


#: file name, how a good one is made, how it is read
READERS = {
    "samples": ("rows.npz", save_rows, read_samples),
    "array": ("rows.npy", lambda path: np.save(path, X), read_samples),
    "node": ("rows.npz", save_rows, lambda path: _read_arrays(path, 2, None)),
    "fingerprint": ("rows.npz", save_rows, fingerprint_file),
    "stand-in": ("rows.npz", save_rows, as_public),
    "public": ("public.npz", save_public, federated.load_public),
    "checkpoint": ("checkpoint.npz", save_checkpoint, lambda path: checkpoint.load(path.parent)),
    "model": ("model.npz", save_run, lambda path: trained.load(path.parent)),
    "trace": ("trace.npz", save_run, lambda path: reports.read_run(path.parent)),
}


def packed(**members: bytes) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        for name, content in members.items():
            archive.writestr(f"{name}.npy", content)
    return out.getvalue()


def as_npy(array: object, **how: object) -> bytes:
    out = io.BytesIO()
    np.save(out, array, **how)
    return out.getvalue()


def header(text: str) -> bytes:
    """An array's file whose header says `text`."""
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text.encode() + bytes(8)


BROKEN = [
    header("{'descr': '<f8', 'fortran_order': False, 'shape': (1" + "0" * 18 + ",), }"),
    header("{'descr': '<f8', 'fortran_order': False, 'shape': (-1,), }"),
    header("{'descr': '<f8', 'shape"),
    header("(" * 300),
    header("'''"),
    as_npy(np.array([{}, []], dtype=object), allow_pickle=True),
    as_npy(np.zeros(2, dtype="M8[s]")),
    as_npy(np.array(["a", "b"])),
    as_npy(np.array(7.0)),
    as_npy(np.zeros((0, 4))),
    as_npy(np.array([[1j, 2j]])),
    b"these are not numbers",
    b"",
]
NAMES = ("x", "y", "meta", "capacity", "w", "shape", "classes", "sigma", "test_x")
OTHERS = [b"", b"PK", b"PK\x03\x04 no zip", b"\x93NUMPY", b"1,2\n3,4\n", b"\0" * 4096, *BROKEN]
OTHERS += [packed(**dict.fromkeys(NAMES, content)) for content in BROKEN]
OTHERS += [packed(x=as_npy(X), y=content) for content in BROKEN] + [packed(), as_npy(X)]


def edits(good: bytes, rng: random.Random):
    """Cut-off and edited versions of a file: heads, headers and tails more often than the rest."""
    for size in {0, 1, 2, 4, 30, 60, 100, len(good) // 2, len(good) - 22, len(good) - 1}:
        yield good[: max(0, size)]
    for _ in range(60):
        changed = bytearray(good)
        for _ in range(rng.choice((1, 1, 2, 8))):
            span = rng.choice((len(good), 120, 12))
            at = rng.randrange(min(span, len(good))) * rng.choice((1, -1))
            changed[at] = rng.randrange(256)
        yield bytes(changed)


@pytest.mark.parametrize("kind", READERS)
def test_damaged_arrays_are_one_sentence(kind, tmp_path):
    name, save, read = READERS[kind]
    path = tmp_path / name
    save(path)
    good = path.read_bytes()
    read(path)
    said = []
    rng = random.Random(3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # as outside the tests, where a warning is no error
        for content in (*OTHERS, *edits(good, rng)):
            path.write_bytes(content)
            try:
                read(path)
            except SottovoceError as error:
                said.append(str(error).replace(str(path), ""))
            except BaseException as error:
                raise AssertionError(f"{kind}: {type(error)} {error} of {content[:80]!r}") from None
    assert len(said) > len(OTHERS) / 2
    assert all("\n" not in sentence and len(sentence) < 400 for sentence in said)


@pytest.mark.parametrize("kind", READERS)
def test_a_folder_or_nothing_in_a_files_place_is_one_sentence(kind, tmp_path):
    name, save, read = READERS[kind]
    path = tmp_path / name
    save(path)
    path.unlink()
    if kind != "trace":  # of which a run may have none
        with pytest.raises(SottovoceError):
            read(path)
    path.mkdir()
    with pytest.raises(SottovoceError):
        read(path)


def test_only_the_systems_own_errors_are_not_called_damage(tmp_path):
    """An archive whose offsets are impossible, or whose bytes are of another kind, is damaged."""
    path, rng = tmp_path / "checkpoint.npz", random.Random(1)
    save_checkpoint(path)
    good = path.read_bytes()
    for _ in range(3000):
        changed = bytearray(good)
        for _ in range(rng.choice((1, 1, 2, 3))):
            changed[-rng.randrange(1, 150)] = rng.choice((0, 255, rng.randrange(256)))
        path.write_bytes(bytes(changed))
        with warnings.catch_warnings(), suppress(ValueError):
            warnings.simplefilter("ignore")
            files.read_npz(path)  # no OSError
    path.unlink()
    path.mkdir()
    with pytest.raises(RunError, match=r"cannot be read \(.*Is a directory.*resume again"):
        checkpoint.load(tmp_path)


def test_what_the_reader_says_names_the_file_and_what_is_missing(tmp_path):
    path = tmp_path / "rows.npz"
    save_rows(path)
    assert files.read_npz(path, "y")["y"].tolist() == Y.tolist()
    assert sorted(files.read_npz(path)) == ["x", "y"]
    with pytest.raises(ValueError, match="there is no array z"):
        files.read_npz(path, "x", "z")
    path.write_bytes(b"x,y\n1,2\n")
    with pytest.raises(ValueError, match=r"it is no \.npz archive"):
        files.read_npz(path)


def test_a_cell_of_a_csv_may_be_longer_than_the_csv_module_takes(tmp_path):
    path = tmp_path / "rows.csv"
    path.write_text('1,"' + "1" * 140_000 + '"\n', "utf-8")
    with pytest.raises(DataError, match="cannot be read as samples"):
        read_samples(path)


def test_an_empty_file_of_samples_is_no_interruption(tmp_path):
    save_run(tmp_path / "model.npz")
    (tmp_path / "rows.npy").write_bytes(b"")
    with pytest.raises(DataError, match="cannot be read as samples"):
        commands.app(["predict", str(tmp_path), str(tmp_path / "rows.npy")], standalone_mode=False)


@pytest.mark.parametrize(
    ("x", "y", "words"),
    [
        (X, np.where(np.arange(24) == 5, 1, 0), "a class of one row"),
        (X, 2 * (np.arange(24) % 2) - 1, "labels from -1 to 1"),
        (X, np.full(24, 2**40), "whole numbers from 0"),
        (X, np.where(np.arange(24) % 2, 2, 0), "the 3 classes 0 to 2"),
        (np.full((24, 4), "a"), Y, "of finite numbers"),
        (X, np.full(24, "a"), "two classes or more"),
        (np.where(X > 0.5, np.nan, X), Y, "a number that is not"),
        (np.full((24, 4), 1e300), Y, "a number that is not"),
        ([[1.0], [2.0, 3.0]], [0, 1], "no arrays"),
        (np.zeros((24, 0)), Y, "one label for each row"),
    ],
)
def test_public_rows_that_cannot_stand_in_are_one_sentence(x, y, words):
    with pytest.raises(InputError, match=words):
        as_public((x, y))


def places(value, path=()):
    """Every place of a JSON value but its root; of lists the first two entries."""
    if isinstance(value, dict):
        keys = list(value)
    else:
        keys = list(range(min(2, len(value)))) if isinstance(value, list) else []
    for key in keys:
        yield (*path, key)
        yield from places(value[key], (*path, key))


def damaged(value, others=(None, "text", [], -1)):
    """The value with one place removed or replaced, place by place."""
    for *path, last in places(value):
        for other in (..., *others):
            changed = copy.deepcopy(value)
            parent = changed
            for key in path:
                parent = parent[key]
            if other is ...:
                del parent[last]
            else:
                parent[last] = other
            yield changed


def test_a_damaged_record_of_a_model_is_one_sentence(tmp_path):
    save_run(tmp_path / "model.npz")
    path = tmp_path / "record.json"
    whole = json.loads(path.read_text("utf-8"))
    kept = whole | {"rounds": [], "clients": whole["clients"][:1]}
    kept["plan"] = {name: {} for name in SECTIONS} | {"model": {"name": "softmax"}}
    table = {"label": "y", "classes": ["a", "b"], "columns": {"x": [0, 9]}, "inferred": []}
    records = [
        *damaged(kept, others=(None, [])),
        *(kept | {"table": one} for one in damaged(table)),
    ]
    for record in (*records, {"schema": kept["schema"]}):
        path.write_text(json.dumps(record), "utf-8")
        try:
            found = trained.load(tmp_path)
            _ = found.guarantee, found.accuracy, found.rounds_used, found.classes
            found.predict(X[:2])
        except SottovoceError:
            continue
        except Exception as error:
            raise AssertionError(f"{error!r} of {json.dumps(record)[:2000]}") from error


@pytest.mark.parametrize("name", ["fig2", "fig5"])
def test_a_damaged_figure_is_one_sentence(name, tmp_path):
    result(name, quick=True).save(tmp_path)
    path = tmp_path / f"{name}.json"
    whole = json.loads(path.read_text("utf-8"))
    assert outcomes.judge_folder(tmp_path)
    whole["plan"] = {}
    for content in damaged(whole, others=(None, "text")):
        path.write_text(json.dumps(content), "utf-8")
        for read in (
            outcomes.read_runs,
            outcomes.judge_folder,
            lambda folder: _open_folder(folder, True).__enter__(),
        ):
            try:
                read(tmp_path)
            except SottovoceError:
                continue
            except Exception as error:
                raise AssertionError(f"{error!r} of {json.dumps(content)[:3000]}") from error
    del whole["quick"]
    path.write_text(json.dumps(whole), "utf-8")
    with pytest.raises(RunError, match=r"is damaged .it lacks 'quick'.; remove it"):
        outcomes.judge_folder(tmp_path)


@pytest.mark.parametrize("line", ['{"seed": 1}', "[]", "5", '{"key": "a", "seed": 1, "no": 2}'])
def test_a_line_of_the_journal_that_is_no_run_is_one_sentence(line, tmp_path):
    (tmp_path / store.JOURNAL).write_text(f'{{"key": "a\n{line}\n', "utf-8")
    with pytest.raises(RunError, match=r"line 2 of .* is no run"):
        outcomes.read_runs(tmp_path)


OWN = {
    "model = (": "SyntaxError in line 1 of net.py",
    "\n\nmodel = nonsense\n": "NameError in line 3 of net.py: name 'nonsense' is not defined",
    "def f():\n    return {}['a']\n\nmodel = f()\n": "KeyError in line 2 of net.py: 'a'",
    "import nowhere_at_all\n": "ModuleNotFoundError in line 1 of net.py: No module named",
    "raise SystemExit(3)\n": "SystemExit in line 1 of net.py: 3",
    "other = 1\n": "net.py has no model",
    "model = 5\n": "model.own must be a model",
    "\x00": "null bytes",
}


@pytest.mark.parametrize("text", OWN)
def test_an_own_model_that_cannot_be_imported_is_one_sentence(text, tmp_path):
    (tmp_path / "net.py").write_text(text, "utf-8")
    with pytest.raises(InputError) as caught:
        load_own_model(f"{tmp_path}/net.py:model")
    assert OWN[text] in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_recorded_model_that_is_none_is_refused(tmp_path):
    save_run(tmp_path / "model.npz")
    path = tmp_path / "record.json"
    record = json.loads(path.read_text("utf-8"))
    record["plan"]["model"] = {"name": "custom", "own": "json:loads"}
    path.write_text(json.dumps(record), "utf-8")
    with pytest.raises(InputError, match=r"model\.own must be a model"):
        trained.load(tmp_path)
