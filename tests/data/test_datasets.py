"""Data sets are what their authors published, or a sentence says why not."""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import numpy as np
import pooch
import pytest

from sottovoce.data.datasets import DATASETS, Dataset, fetch, load, parse_cifar10, parse_idx
from sottovoce.errors import DataError, InputError

DEAD = "http://127.0.0.1:9/"  # the discard port: nothing listens there


def idx(values: np.ndarray) -> bytes:
    head = bytes([0, 0, 8, values.ndim]) + b"".join(n.to_bytes(4, "big") for n in values.shape)
    return gzip.compress(head + values.tobytes(), mtime=0)


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def small_mnist() -> dict[str, bytes]:
    rng = np.random.default_rng(0)
    return {
        "train-images-idx3-ubyte.gz": idx(rng.integers(0, 256, (20, 28, 28), np.uint8)),
        "train-labels-idx1-ubyte.gz": idx(rng.integers(0, 10, 20, np.uint8)),
        "t10k-images-idx3-ubyte.gz": idx(rng.integers(0, 256, (5, 28, 28), np.uint8)),
        "t10k-labels-idx1-ubyte.gz": idx(rng.integers(0, 10, 5, np.uint8)),
    }


def small_cifar10() -> dict[str, bytes]:
    rng = np.random.default_rng(0)
    names = [*(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin"]
    images = rng.integers(0, 256, (len(names), 2, 3072), np.uint8)
    return {n: b"".join(b"\3" + i.tobytes() for i in x) for n, x in zip(names, images, strict=True)}


def with_files(name: str, files: dict[str, bytes], archive: bytes = b"") -> Dataset:
    """The data set of that name, if its authors had published these files."""
    published = DATASETS[name].published
    assert published is not None
    known = published.archive and (published.archive[0], sha256(archive))
    hashes = {file: sha256(content) for file, content in files.items()}
    return replace(DATASETS[name], published=replace(published, files=hashes, archive=known))


class Handler(SimpleHTTPRequestHandler):
    def do_GET(self) -> None:
        self.server.asked.append(self.path)  # type: ignore[attr-defined]
        super().do_GET()

    def log_message(self, *_: object) -> None:
        pass


class Mirror:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=folder))
        self.server.asked = []  # type: ignore[attr-defined]
        self.asked: list[str] = self.server.asked  # type: ignore[attr-defined]
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}/"

    def hold(self, files: dict[str, bytes]) -> None:
        for name, content in files.items():
            (self.folder / name).write_bytes(content)


@pytest.fixture
def mirror(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Mirror]:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    (tmp_path / "mirror").mkdir()
    mirror = Mirror(tmp_path / "mirror")
    thread = Thread(target=mirror.server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield mirror
    mirror.server.shutdown()
    thread.join()
    mirror.server.server_close()


# digits


def test_digits_are_the_1797_of_uci() -> None:
    digits = load("digits")
    assert digits.train_x.shape == (1797, 64)
    assert digits.train_x.dtype == np.float32
    assert (digits.train_x.min(), digits.train_x.max()) == (0.0, 1.0)
    assert digits.train_y.dtype == np.int32
    counts = np.bincount(digits.train_y).tolist()
    assert counts == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]  # as UCI lists them
    assert digits.test_x.shape == (0, 64)
    assert digits.test_y.shape == (0,)
    assert (digits.classes, digits.shape) == (10, (8, 8, 1))
    np.testing.assert_array_equal(digits.train_x * 16, np.round(digits.train_x * 16))
    first_row = (digits.train_x[0, :8] * 16).tolist()
    assert (digits.train_y[0], first_row) == (0, [0, 0, 5, 13, 9, 1, 0, 0])


def test_digits_load_without_heavy_imports() -> None:
    code = (
        "import sys; from sottovoce.data.datasets import load; load('digits');"
        "print([m for m in ('pooch', 'requests', 'polars', 'jax', 'scipy') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=900, check=True
    )
    assert done.stdout == "[]\n"


def test_the_licence_of_digits_travels_with_them() -> None:
    import sottovoce.data

    text = (Path(sottovoce.data.__file__).parent / "digits.LICENSE.txt").read_text("utf-8")
    assert "CC BY 4.0" in text
    assert "10.24432/C50P49" in text


def test_unknown_name() -> None:
    with pytest.raises(InputError, match=r"data\.name must be one of digits, mnist, cifar10"):
        load("fashion")


def test_every_published_file_has_addresses_and_a_checksum() -> None:
    addresses = {"mnist": 2, "cifar10": 2, "acs": 2, "adult": 1, "ipums": 0}
    published = {name: own.published for name, own in DATASETS.items() if own.published}
    assert {name: len(set(own.mirrors)) for name, own in published.items()} == addresses
    for name, own in published.items():
        assert all(url.startswith("https://") and url.endswith("/") for url in own.mirrors)
        assert {len(known) for known in own.files.values()} == {44 if name == "ipums" else 64}


# the real files


@pytest.fixture
def real() -> None:
    if not os.environ.get("SOTTOVOCE_DATA"):
        pytest.skip("SOTTOVOCE_DATA is not set")


@pytest.mark.slow
@pytest.mark.usefixtures("real")
def test_real_mnist() -> None:
    mnist = load("mnist")
    assert mnist.train_x.shape == (60_000, 784)
    assert mnist.test_x.shape == (10_000, 784)
    assert (mnist.train_y.shape, mnist.test_y.shape) == ((60_000,), (10_000,))
    assert mnist.train_x.dtype == np.float32
    assert mnist.train_x.max() == 1.0
    assert mnist.train_x.mean(dtype=np.float64) == pytest.approx(0.1307, abs=5e-5)
    assert mnist.train_y[:5].tolist() == [5, 0, 4, 1, 9]
    assert np.bincount(mnist.test_y).min() == 892
    assert mnist.shape == (28, 28, 1)


@pytest.mark.slow
@pytest.mark.usefixtures("real")
def test_real_cifar10() -> None:
    cifar10 = load("cifar10")
    assert cifar10.train_x.shape == (50_000, 3072)
    assert cifar10.test_x.shape == (10_000, 3072)
    assert np.bincount(cifar10.train_y).tolist() == [5000] * 10
    assert np.bincount(cifar10.test_y).tolist() == [1000] * 10
    assert cifar10.shape == (32, 32, 3)
    means = cifar10.train_x.reshape(-1, 3).mean(axis=0, dtype=np.float64)
    np.testing.assert_allclose(means, [0.4914, 0.4822, 0.4465], atol=1e-4)
    images = cifar10.train_x[:500].reshape(-1, *cifar10.shape)
    # neighbouring pixels resemble each other, which a wrong order of the axes would undo
    assert np.abs(np.diff(images, axis=1)).mean() < 0.08
    assert np.abs(np.diff(images, axis=2)).mean() < 0.08


# files in $SOTTOVOCE_DATA


def test_given_files_are_read_and_scaled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = small_mnist()
    monkeypatch.setitem(DATASETS, "mnist", with_files("mnist", files))
    monkeypatch.setenv("SOTTOVOCE_DATA", str(tmp_path))
    (tmp_path / "mnist").mkdir()
    for name, content in files.items():
        (tmp_path / "mnist" / name).write_bytes(content)
    mnist = load("mnist")
    pixels = np.frombuffer(gzip.decompress(files["train-images-idx3-ubyte.gz"])[16:], np.uint8)
    np.testing.assert_array_equal(mnist.train_x, pixels.reshape(20, 784) / np.float32(255))
    assert (mnist.test_x.shape, mnist.test_y.shape) == ((5, 784), (5,))

    path = tmp_path / "mnist" / "train-images-idx3-ubyte.gz"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(DataError, match=r"train-images-idx3-ubyte\.gz .* must have the SHA-256"):
        load("mnist")


@pytest.mark.parametrize("name", ["mnist", "cifar10"])
def test_given_folder_without_the_files_is_not_filled(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SOTTOVOCE_DATA", str(tmp_path))
    monkeypatch.setattr("sottovoce.data.datasets.fetch", None)  # a download would fail loudly
    published = DATASETS[name].published
    assert published is not None
    with pytest.raises(DataError) as caught:
        load(name)
    sentence = str(caught.value)
    assert f"$SOTTOVOCE_DATA/{published.folder}/" in sentence
    assert all(file in sentence for file in published.files)
    assert "unset SOTTOVOCE_DATA" in sentence
    assert "\n" not in sentence


# downloads, from a server on this machine


def test_offline_is_one_sentence_with_files_and_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.delenv("SOTTOVOCE_DATA", raising=False)
    mnist = DATASETS["mnist"]
    assert mnist.published is not None
    dead = replace(mnist, published=replace(mnist.published, mirrors=(DEAD, DEAD)))
    monkeypatch.setitem(DATASETS, "mnist", dead)
    monkeypatch.setattr("pooch.os_cache", lambda _: tmp_path)
    with pytest.raises(DataError) as caught:
        load("mnist")
    sentence = str(caught.value)
    assert "mnist could not be downloaded" in sentence
    assert "mnist/ of the folder that SOTTOVOCE_DATA names" in sentence
    assert all(file in sentence for file in mnist.published.files)
    assert "\n" not in sentence


def test_second_mirror_then_cache(
    mirror: Mirror,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    files = small_mnist()
    mirror.hold(files)
    monkeypatch.setitem(DATASETS, "mnist", with_files("mnist", files))
    logger = pooch.get_logger()  # stands outside the tree of loggers, so it is listened to here
    level = logger.level
    logger.addHandler(caplog.handler)
    try:
        folder = fetch("mnist", base_urls=[DEAD, mirror.url], cache=tmp_path / "cache")
    finally:
        logger.removeHandler(caplog.handler)
    assert [r for r in caplog.records if r.name == "pooch"] == []
    assert logger.level == level
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == files
    assert sorted(mirror.asked) == sorted("/" + name for name in files)

    mirror.asked.clear()
    assert fetch("mnist", base_urls=[mirror.url], cache=tmp_path / "cache") == folder
    assert mirror.asked == []

    damaged = folder / "t10k-labels-idx1-ubyte.gz"
    damaged.write_bytes(b"damaged")
    fetch("mnist", base_urls=[mirror.url], cache=tmp_path / "cache")
    assert mirror.asked == ["/t10k-labels-idx1-ubyte.gz"]
    assert damaged.read_bytes() == files["t10k-labels-idx1-ubyte.gz"]


@pytest.mark.parametrize("name", ["acs", "adult"])
def test_census_files_are_fetched_one_by_one(
    name: str, mirror: Mirror, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    published = DATASETS[name].published
    assert published is not None
    files = {file: f"{name} {file}".encode() for file in published.files}
    mirror.hold(files)
    monkeypatch.setitem(DATASETS, name, with_files(name, files))
    folder = fetch(name, base_urls=[DEAD, mirror.url], cache=tmp_path / "cache")
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == files
    assert sorted(mirror.asked) == sorted("/" + file for file in files)


def test_corrupted_download_is_refused_and_not_kept(
    mirror: Mirror, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = small_mnist()
    monkeypatch.setitem(DATASETS, "mnist", with_files("mnist", files))
    mirror.hold(files | {"train-images-idx3-ubyte.gz": b"not the file"})
    with pytest.raises(DataError, match=r"train-images-idx3-ubyte\.gz from .*wrong checksum"):
        fetch("mnist", base_urls=[mirror.url, mirror.url], cache=tmp_path / "cache")
    assert not list((tmp_path / "cache").rglob("train-images*"))


def test_cifar10_comes_as_an_archive(
    mirror: Mirror, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = small_cifar10()
    archive = packed({f"cifar-10-batches-bin/{n}": c for n, c in files.items()} | {"../x": b"x"})
    mirror.hold({"cifar-10-binary.tar.gz": archive})
    monkeypatch.setitem(DATASETS, "cifar10", with_files("cifar10", files, archive))
    monkeypatch.delenv("SOTTOVOCE_DATA", raising=False)
    folder = fetch("cifar10", base_urls=[DEAD, mirror.url], cache=tmp_path / "cache")
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == files
    assert not (tmp_path / "cache" / "x").exists()

    monkeypatch.setattr("pooch.os_cache", lambda _: tmp_path / "cache")
    cifar10 = load("cifar10")  # from the cache: the public mirrors are out of reach
    assert (cifar10.train_x.shape, cifar10.test_x.shape) == ((10, 3072), (2, 3072))
    red_plane = np.frombuffer(files["data_batch_1.bin"][1:1025], np.uint8)
    np.testing.assert_array_equal(cifar10.train_x[0, ::3], red_plane / np.float32(255))
    assert mirror.asked == ["/cifar-10-binary.tar.gz"]


@pytest.mark.parametrize("fault", ["a file less", "not an archive"])
def test_an_archive_with_something_else_in_it(
    fault: str, mirror: Mirror, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = small_cifar10()
    inside = {f"cifar-10-batches-bin/{n}": c for n, c in files.items()}
    del inside["cifar-10-batches-bin/test_batch.bin"]
    archive = b"nothing" if fault == "not an archive" else packed(inside)
    mirror.hold({"cifar-10-binary.tar.gz": archive})
    monkeypatch.setitem(DATASETS, "cifar10", with_files("cifar10", files, archive))
    with pytest.raises(DataError, match=r"fetch it again$"):
        fetch("cifar10", base_urls=[mirror.url], cache=tmp_path / "cache")


def packed(files: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return buffer.getvalue()


# the formats


def test_idx_round_trip() -> None:
    values = np.arange(24, dtype=np.uint8).reshape(2, 3, 4)
    np.testing.assert_array_equal(parse_idx(idx(values)), values)


def test_cifar10_round_trip() -> None:
    planes = np.arange(2 * 3072, dtype=np.uint16).astype(np.uint8).reshape(2, 3, 32, 32)
    content = b"".join(bytes([label]) + rows.tobytes() for label, rows in enumerate(planes, 8))
    pixels, labels = parse_cifar10(content)
    assert labels.tolist() == [8, 9]
    np.testing.assert_array_equal(pixels.reshape(2, 32, 32, 3).transpose(0, 3, 1, 2), planes)
