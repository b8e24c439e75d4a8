"""Find, check and read the datasets digits, mnist, cifar10, acs, adult and ipums.

`digits` comes with the package (licence beside it, in digits.LICENSE.txt). The others are read in
their authors' formats from $SOTTOVOCE_DATA or downloaded; `datasets.toml` names folders, files and
addresses. Every file is compared with its digest each time it is read, wherever it came from, so a
mirror can fail but cannot change the data.
"""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import io
import logging
import os
import tarfile
import tempfile
import tomllib
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
from numpy.typing import NDArray

from sottovoce.data import census
from sottovoce.errors import DataError, InputError

Bytes = NDArray[np.uint8]
RawImages = tuple[Bytes, Bytes, Bytes, Bytes]  # train x, train y, test x, test y


def parse_idx(content: bytes, *, file: str, dimensions: int) -> Bytes:
    """Unpack a gzipped IDX file of unsigned bytes, the format of MNIST.

    Layout: two zero bytes, 8 (unsigned bytes), the number of dimensions, each dimension as a
    big-endian 32-bit number, then the values. Raises `DataError` for anything else.

    >>> raw = bytes([0, 0, 8, 1, 0, 0, 0, 3, 7, 2, 1])
    >>> parse_idx(gzip.compress(raw), file="labels.gz", dimensions=1)
    array([7, 2, 1], dtype=uint8)
    """
    try:
        raw = gzip.decompress(content)
    except (OSError, EOFError, zlib.error):
        raise DataError(
            f"{file} is not a complete gzip file; fetch it again from where it came"
        ) from None
    start = 4 + 4 * dimensions
    if len(raw) < start or raw[:4] != bytes([0, 0, 8, dimensions]):
        raise DataError(
            f"{file} must begin with the IDX magic number {2048 + dimensions}, "
            f"got {int.from_bytes(raw[:4], 'big')}; fetch it again from where it came"
        )
    shape = tuple(int(n) for n in np.frombuffer(raw, ">u4", dimensions, offset=4))
    expected = start + int(np.prod(shape, dtype=object))
    if len(raw) != expected:
        raise DataError(
            f"{file} must unpack to {expected} bytes, got {len(raw)}; "
            "it is cut short or damaged, so fetch it again from where it came"
        )
    return np.frombuffer(raw, np.uint8, offset=start).reshape(shape)


def parse_cifar10(content: bytes, *, file: str) -> tuple[Bytes, Bytes]:
    """Return the images (n, 3072), channels last, and labels (n,) of one binary CIFAR-10 file.

    Layout: n records of 1 + 3·32·32 bytes: the label, then the red, green and blue planes.
    Raises `DataError` for anything else.

    >>> x, y = parse_cifar10(bytes([6]) + bytes([1] * 1024 + [2] * 1024 + [3] * 1024), file="a.bin")
    >>> y.tolist(), x.shape, x[0, :6].tolist()
    ([6], (1, 3072), [1, 2, 3, 1, 2, 3])
    """
    record = 1 + 3 * 32 * 32
    if not content or len(content) % record:
        raise DataError(
            f"{file} must be a whole number of {record}-byte records, got {len(content)} bytes; "
            "it is cut short or damaged, so fetch it again from where it came"
        )
    records = np.frombuffer(content, np.uint8).reshape(-1, record)
    labels = records[:, 0]
    if labels.max() > 9:
        raise DataError(
            f"{file} must hold labels 0 to 9, got {labels.max()}; "
            "it is not CIFAR-10, so fetch it again from where it came"
        )
    planes = records[:, 1:].reshape(-1, 3, 32, 32)
    return planes.transpose(0, 2, 3, 1).reshape(len(records), -1), labels


def decode_mnist(read: Callable[[str], bytes]) -> RawImages:
    """Decode MNIST from its four files; `read` returns the content of a file."""

    def images(file: str) -> Bytes:
        pixels = parse_idx(read(file), file=file, dimensions=3)
        return pixels.reshape(len(pixels), -1)

    def labels(file: str) -> Bytes:
        return parse_idx(read(file), file=file, dimensions=1)

    return (
        images("train-images-idx3-ubyte.gz"),
        labels("train-labels-idx1-ubyte.gz"),
        images("t10k-images-idx3-ubyte.gz"),
        labels("t10k-labels-idx1-ubyte.gz"),
    )


def decode_cifar10(read: Callable[[str], bytes]) -> RawImages:
    """Decode CIFAR-10 from its six files; `read` returns the content of a file."""
    batches = [
        parse_cifar10(read(file), file=file)
        for file in (f"data_batch_{i}.bin" for i in range(1, 6))
    ]
    test_x, test_y = parse_cifar10(read("test_batch.bin"), file="test_batch.bin")
    train_x = np.concatenate([x for x, _ in batches])
    return train_x, np.concatenate([y for _, y in batches]), test_x, test_y


ENVIRONMENT = "SOTTOVOCE_DATA"
TIMEOUT_S = 30

Features = NDArray[np.uint8] | NDArray[np.float32]
Raw = tuple[Features, Bytes, Features, Bytes]  # train x, train y, test x, test y


@dataclass(frozen=True, eq=False)
class Arrays:
    """One dataset in memory.

    A row of x is a flattened image of `shape` (height, width, channels), channels last, as float32
    in [0, 1], or the features of a table, of `shape` (features,); y holds class ids
    0 … classes − 1 as int32. A dataset without an official test set has an empty `test_x`.
    """

    train_x: NDArray[np.float32]
    train_y: NDArray[np.int32]
    test_x: NDArray[np.float32]
    test_y: NDArray[np.int32]
    classes: int
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Published:
    """Where the files of a dataset come from, their digests, and how they are decoded."""

    folder: str
    files: Mapping[str, str]  # name → SHA-256, or "git:" and the id of the blob
    mirrors: Sequence[str]  # addresses that end in "/", tried in order; empty: no download
    decode: Callable[[Callable[[str], bytes]], Raw]
    archive: Sequence[str] | None = None  # name and SHA-256, when the mirrors hold one archive


@dataclass(frozen=True)
class Dataset:
    """What is known about a dataset before it is read.

    `white` is the pixel value that becomes 1.0; a table has none.
    """

    classes: int
    shape: tuple[int, ...]
    white: int | None = None
    published: Published | None = None  # None: comes with the package


def load(name: str) -> Arrays:
    """Read a dataset: pictures as x / white in [0, 1], tables as `census` encodes them.

    The scale does not depend on the data, so it costs no privacy. All but digits are read from
    $SOTTOVOCE_DATA or else fetched. Raises `DataError` when files are missing or damaged.

    >>> digits = load("digits")
    >>> digits.train_x.shape, float(digits.train_x.max()), digits.test_x.shape, digits.shape
    ((1797, 64), 1.0, (0, 64), (8, 8, 1))
    """
    dataset = _find_dataset(name)
    if dataset.published is None:
        raw = _read_digits()
    else:
        folder = find(name)
        files = dataset.published.files
        raw = dataset.published.decode(lambda file: _read_checked(folder / file, files[file]))
    train_x, train_y, test_x, test_y = raw
    return Arrays(
        train_x=_scale(train_x, dataset.white),
        train_y=train_y.astype(np.int32),
        test_x=_scale(test_x, dataset.white),
        test_y=test_y.astype(np.int32),
        classes=dataset.classes,
        shape=dataset.shape if dataset.white else train_x.shape[1:],
    )


def find(name: str) -> Path:
    """Return the folder of the files: under $SOTTOVOCE_DATA if set, else the cache, filled now."""
    published = _find_dataset(name).published
    given = None if published is None else _find_given_folder(name, published)
    return given or fetch(name)


def fetch(name: str, *, base_urls: Sequence[str] | None = None, cache: Path | None = None) -> Path:
    """Download what is not yet in the cache, and return the folder that holds the files.

    The addresses are tried in order until one returns the file with the right SHA-256.
    `base_urls` replaces the public mirrors (each ends in "/"), `cache` the cache folder. Files that
    are already there and right cause no request.

    >>> fetch("digits")
    Traceback (most recent call last):
        ...
    sottovoce.errors.InputError: name must be one of mnist, cifar10, acs, adult, got 'digits'; \
digits comes with the package and needs no download
    """
    published = _find_dataset(name).published
    if published is None:
        raise InputError.of(
            "name",
            name,
            "one of "
            + ", ".join(n for n, d in DATASETS.items() if d.published and d.published.mirrors),
            f"{name} comes with the package and needs no download",
        )
    if not published.mirrors:
        raise DataError(
            f"{name} is not freely available and cannot be downloaded; if you own it, put "
            f"{', '.join(published.files)} in {published.folder}/ of the folder that "
            f"{ENVIRONMENT} names"
        )
    import pooch  # type: ignore[import-untyped]  # loaded here, because digits does not need it

    folder = (cache or Path(pooch.os_cache("sottovoce"))) / published.folder
    mirrors = published.mirrors if base_urls is None else base_urls
    missing = [f for f, sha in published.files.items() if not _has_digest(folder / f, sha)]
    if missing and published.archive is not None:
        archive_name, sha = published.archive
        archive = _download(name, published, archive_name, sha, mirrors, folder)
        _unpack(archive, published, folder)
        archive.unlink()  # only its files are read; keeping both would double the disk space
    else:
        for file in missing:
            _download(name, published, file, published.files[file], mirrors, folder)
    return folder


def _find_dataset(name: str) -> Dataset:
    if name not in DATASETS:
        raise InputError.of("data.name", name, "one of " + ", ".join(DATASETS), "choose one")
    return DATASETS[name]


def _scale(x: Features, white: int | None) -> NDArray[np.float32]:
    return np.divide(x, np.float32(white or 1), dtype=np.float32)


def _read_digits() -> Raw:
    content = resources.files("sottovoce.data").joinpath("digits.npz").read_bytes()
    with np.load(io.BytesIO(content)) as stored:
        x, y = stored["x"], stored["y"]
    return x, y, x[:0], y[:0]


def _find_given_folder(name: str, published: Published) -> Path | None:
    """Return the folder under $SOTTOVOCE_DATA, or None if that is not set (or empty)."""
    given = os.environ.get(ENVIRONMENT)
    if not given:
        return None
    folder = Path(given) / published.folder
    missing = [file for file in published.files if not (folder / file).is_file()]
    if missing:
        remedy = f", or unset {ENVIRONMENT} to download them" if published.mirrors else ""
        raise DataError(
            f"{name} must be in ${ENVIRONMENT}/{published.folder}/, but {folder} has no "
            f"{', '.join(missing)}; put the files there{remedy}"
        )
    return folder


def _read_checked(path: Path, known: str) -> bytes:
    """Return the content of a file after checking the digest of these same bytes."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise DataError(
            f"{path} cannot be read ({error.strerror}); make it readable or fetch it again"
        ) from None
    if _digest(content, known) != known:
        kind, short = ("git blob id", known[4:]) if known.startswith("git:") else ("SHA-256", known)
        raise DataError(
            f"{path} ({len(content)} bytes) must have the {kind} {short[:12]}…, but has another; "
            "it is cut short, damaged or another version, so replace it with the published file"
        )
    return content


def _digest(content: bytes, known: str) -> str:
    """Return the digest of a file, of the same kind as the known one."""
    if not known.startswith("git:"):
        return hashlib.sha256(content).hexdigest()
    # SHA-1 only names the file here and does not stop a forger; no stronger digest was published.
    blob = hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False)
    return "git:" + blob.hexdigest()


def _has_digest(path: Path, sha256: str) -> bool:
    with contextlib.suppress(DataError):
        _read_checked(path, sha256)
        return True
    return False


def _download(
    name: str, published: Published, file: str, sha256: str, mirrors: Sequence[str], folder: Path
) -> Path:
    import pooch

    logger = pooch.get_logger()
    level = logger.level
    logger.setLevel(logging.ERROR)  # pooch logs every download; an error below says what matters
    failures = []
    try:
        for mirror in mirrors:
            try:
                downloader = pooch.HTTPDownloader(timeout=TIMEOUT_S)
                return Path(
                    pooch.retrieve(
                        mirror + file, f"sha256:{sha256}", file, folder, downloader=downloader
                    )
                )
            except (OSError, ValueError) as error:
                # requests derives its errors from OSError; pooch reports a wrong hash as ValueError
                reason = type(error).__name__ if isinstance(error, OSError) else "wrong checksum"
                failures.append(f"{urlsplit(mirror).netloc}: {reason}")
    finally:
        logger.setLevel(level)
    raise DataError(
        f"{name} could not be downloaded ({file} from {', '.join(failures)}); try again online, or "
        f"put {', '.join(published.files)} in {published.folder}/ of the folder that "
        f"{ENVIRONMENT} names"
    )


def _unpack(archive: Path, published: Published, folder: Path) -> None:
    """Extract the files by name, so that no path in the archive is trusted."""
    try:
        with tarfile.open(archive) as tar:
            for file, sha256 in published.files.items():
                member = tar.extractfile(f"{published.folder}/{file}")
                content = b"" if member is None else member.read()
                if hashlib.sha256(content).hexdigest() != sha256:
                    raise DataError(
                        f"{file} in {archive} must have the SHA-256 {sha256[:12]}…, but has "
                        "another; delete the archive and fetch it again"
                    )
                _write(folder / file, content)
    except (tarfile.TarError, KeyError, EOFError, OSError, zlib.error) as error:
        raise DataError(
            f"{archive} must be an archive that holds {published.folder}/ with "
            f"{', '.join(published.files)}, but unpacking it failed ({type(error).__name__}); "
            "see that the disk has room, delete the archive and fetch it again"
        ) from None


def _write(path: Path, content: bytes) -> None:
    """Write a file whole or not at all, also when two processes fetch at the same time."""
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
        file.write(content)
    Path(file.name).replace(path)


_DECODERS: Mapping[str, Callable[[Callable[[str], bytes]], Raw]] = {
    "mnist": decode_mnist,
    "cifar10": decode_cifar10,
    "acs": census.decode_acs,
    "adult": census.decode_adult,
    "ipums": census.decode_ipums,
}


def _load_datasets() -> dict[str, Dataset]:
    """Load `datasets.toml`, which says what each dataset is and where its files come from."""
    text = resources.files("sottovoce.data").joinpath("datasets.toml").read_text("utf-8")
    found = {}
    for name, table in tomllib.loads(text).items():
        if (published := table.pop("published", None)) is not None:
            published = Published(**published, decode=_DECODERS[name])
        found[name] = Dataset(**table | {"shape": tuple(table["shape"])}, published=published)
    return found


DATASETS = _load_datasets()
