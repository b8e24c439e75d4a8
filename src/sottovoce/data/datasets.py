"""Find, check and read the datasets digits, mnist, cifar10, acs, adult and ipums.

`digits` comes with the package (licence beside it, in digits.LICENSE.txt). The others are read in
their authors' formats from $SOTTOVOCE_DATA or downloaded; `datasets.toml` names folders, files and
addresses. Every file is compared with its digest each time it is read, wherever it came from, so a
mirror can fail but cannot change the data, and a parser needs no checks of its own.

The census tables acs, adult and ipums become numbers by **public knowledge only**: the categories
and bounds of `census.toml` are copied from what the publishers print about their files, never
computed from the rows. So the encoding is not a release, and no budget has to pay for it. Every
feature is in [0, 1] and a column contributes a vector of norm ≤ 1: for m columns **‖x‖ ≤ √m for
every possible row** (about 3 for the rows in the files). docs/data.md lists labels, columns and
features, and which columns are left out, and why.
"""

from __future__ import annotations

import contextlib
import csv
import gzip
import hashlib
import io
import logging
import os
import tarfile
import tempfile
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import TypeAlias, final
from urllib.parse import urlsplit

import numpy as np
from numpy.typing import NDArray

from sottovoce.errors import DataError, InputError

Bytes = NDArray[np.uint8]
Features: TypeAlias = NDArray[np.float32]
Read: TypeAlias = Callable[[str], bytes]  # returns the content of a file of the dataset
Pair: TypeAlias = tuple[Bytes | Features, Bytes]  # rows and their labels
Raw = tuple[Pair, Pair | None]  # training rows, and the test rows that come with them


def parse_idx(content: bytes) -> Bytes:
    """Unpack a gzipped IDX file of unsigned bytes, the format of MNIST.

    Layout: two zero bytes, 8 (unsigned bytes), the number of dimensions, each dimension as a
    big-endian 32-bit number, then the values.
    """
    raw = gzip.decompress(content)
    shape = np.frombuffer(raw, ">u4", raw[3], offset=4)
    return np.frombuffer(raw, np.uint8, offset=4 + shape.nbytes).reshape(shape)


def parse_cifar10(content: bytes) -> tuple[Bytes, Bytes]:
    """Return the images (n, 3072), channels last, and labels (n,) of one binary CIFAR-10 file.

    Layout: n records of 1 + 3·32·32 bytes: the label, then the red, green and blue planes.
    """
    records = np.frombuffer(content, np.uint8).reshape(-1, 1 + 3 * 32 * 32)
    planes = records[:, 1:].reshape(-1, 3, 32, 32)
    return planes.transpose(0, 2, 3, 1).reshape(len(records), -1), records[:, 0]


def _decode_mnist(read: Read, part: str) -> Pair:
    pixels = parse_idx(read(f"{part}-images-idx3-ubyte.gz"))
    return pixels.reshape(len(pixels), -1), parse_idx(read(f"{part}-labels-idx1-ubyte.gz"))


def _decode_files(parse: Callable[[bytes], Pair], read: Read, names: Sequence[str]) -> Pair:
    """Return rows and labels of several files, one after the other."""
    x, y = zip(*(parse(read(name)) for name in names), strict=True)
    return np.concatenate(x), np.concatenate(y)


Table: TypeAlias = Mapping[str, Sequence[str]]  # the cells of each column, as written

ABSENT = "N"  # how NIST writes a value that does not apply


@final
@dataclass(frozen=True)
class Choice:
    """A column with a public list of categories; `unknown` is the value that becomes zeros.

    One feature for each category; of two categories one feature, which is 1 for the first.
    """

    name: str
    categories: tuple[str, ...]
    unknown: str | None = None

    @property
    def width(self) -> int:
        """The number of its features."""
        return 1 if len(self.categories) == 2 else len(self.categories)

    def encode(self, cells: Sequence[str]) -> Features:
        """Return one row of 0 and 1 for each cell.

        >>> Choice("EDU", ("low", "high", "none")).encode(["high", "low"]).tolist()
        [[0.0, 1.0, 0.0], [1.0, 0.0, 0.0]]
        >>> Choice("SEX", ("1", "2"), unknown="?").encode(["1", "2", "?"]).tolist()
        [[1.0], [0.0], [0.0]]
        """
        rows = np.eye(len(self.categories) + 1, len(self.categories), dtype=np.float32)
        index = {category: i for i, category in enumerate(self.categories)}
        if self.unknown is not None:
            index[self.unknown] = len(self.categories)
        return rows[[index[cell] for cell in cells], : self.width]


@final
@dataclass(frozen=True)
class Number:
    """A column of numbers from `low` to `high`, both public; `absent` is the cell without one.

    Where a value may be absent, a second feature says so, and the first is then 0.
    """

    name: str
    low: float
    high: float
    log: bool = False
    absent: str | None = None

    @property
    def width(self) -> int:
        """The number of its features."""
        return 1 if self.absent is None else 2

    def encode(self, cells: Sequence[str]) -> Features:
        """Return (x − low) / (high − low), or with `log` the same of ln(1 + x − low).

        >>> Number("AGEP", 0, 99).encode(["0", "99"]).tolist()
        [[0.0], [1.0]]
        >>> Number("NPF", 2, 20, absent="N").encode(["11", "N"]).tolist()
        [[0.5, 0.0], [0.0, 1.0]]
        """
        numbers = [self.low if cell == self.absent else float(cell) for cell in cells]
        shifted = np.array(numbers) - self.low
        span = self.high - self.low
        scaled = np.log1p(shifted) / np.log1p(span) if self.log else shifted / span
        absent = [cell == self.absent for cell in cells]
        return np.stack([scaled, absent], axis=1).astype(np.float32)[:, : self.width]


Column: TypeAlias = Choice | Number


def encode_table(table: Table, columns: Sequence[Column]) -> Features:
    """Encode the rows of a table as x[rows, Σ width] in [0, 1], in the order of the columns."""
    return np.concatenate([c.encode(table[c.name]) for c in columns], axis=1)


def _load_columns(table: str, unknown: str | None = None) -> tuple[Column, ...]:
    """Return the columns of a table that are used, in the order of `census.toml`."""
    return tuple(
        Choice(name, tuple(public.split()), unknown)
        if isinstance(public, str)
        else Number(name, **public)
        for name, public in _PUBLIC[table].items()
    )


_PUBLIC = tomllib.loads((resources.files("sottovoce.data") / "census.toml").read_text("utf-8"))
ACS, ADULT = _load_columns("acs"), _load_columns("adult", unknown="?")
ACS_HEADER, ADULT_HEADER = (_PUBLIC["header"][table].split() for table in ("acs", "adult"))

THRESHOLD = 25_000  # dollars of total income (PINCP): more is label 1

IPUMS_FILE = "IPUMS-US.dat"
IPUMS_ROWS = 40_000
IPUMS_LARGEST = 1e6  # larger numbers are cut to it


def parse_acs(content: bytes) -> tuple[Features, Bytes]:
    """Parse one of NIST's excerpts of the American Community Survey into features and labels.

    Label 1: a total income (PINCP) above 25,000 dollars. Rows without an income (PINCP = N: people
    under 15) are dropped.
    """
    _, *lines = csv.reader(io.StringIO(content.decode("ascii")))
    income = ACS_HEADER.index("PINCP")
    known = [line for line in lines if line[income] != ABSENT]
    labels = [float(line[income]) > THRESHOLD for line in known]
    return encode_table(_list_columns(ACS_HEADER, known), ACS), np.array(labels, np.uint8)


def parse_adult(content: bytes) -> tuple[Features, Bytes]:
    """Parse `adult.data` or `adult.test`; label 1 is an income above 50,000.

    `fnlwgt` is left out (a weight of the sample); "?" becomes zeros. The test file begins with a
    remark and writes a full stop after each label.
    """
    lines = csv.reader(io.StringIO(content.decode("ascii")), skipinitialspace=True)
    rows = [line for line in lines if len(line) == len(ADULT_HEADER)]  # no remark, no empty line
    table = _list_columns(ADULT_HEADER, rows)
    labels = [cell.removesuffix(".") == ">50K" for cell in table["income"]]
    return encode_table(table, ADULT), np.array(labels, np.uint8)


def parse_ipums(content: bytes, rows: int = IPUMS_ROWS) -> tuple[Features, Bytes]:
    """Parse the authors' extract of IPUMS-US: lines of 58 numbers, the label last.

    (Lines of 59, which "58 attributes" could mean, are read too.) The meaning of the columns is not
    published, so that no bounds are known, and none are measured: x in [−1, 1] stays, a larger |x|
    becomes ±(1 + ln |x|), with |x| cut to 10⁶, so that no feature exceeds 15. Raises `DataError`
    for a file of another form, because no test has read the real one.
    """
    lines = [line.split() for line in content.decode("ascii", "replace").splitlines()]
    lines = [line for line in lines if line]
    fits = len(lines) == rows and {len(line) for line in lines} in ({58}, {59})
    try:
        values = np.array(lines if fits else [[np.nan]], dtype=np.float64)
    except ValueError:
        values = np.array([[np.nan]])
    labels = values[:, -1]
    if not np.isfinite(values).all() or not np.isin(labels, (0, 1)).all():
        raise DataError(
            f"{IPUMS_FILE} must be {rows} lines of 58 finite numbers, 0 or 1 the last, but is not; "
            "put the authors' file there"
        )
    x = values[:, :-1]
    size = np.abs(x).clip(1, IPUMS_LARGEST)  # 1, whose logarithm is 0, where x stays as it is
    squashed = np.where(np.abs(x) <= 1, x, np.sign(x) * (1 + np.log(size)))
    return squashed.astype(np.float32), labels.astype(np.uint8)


def decode(name: str, read: Read) -> Raw:
    """Decode the files of a dataset; `read` returns the content of one."""
    match name:
        case "mnist":
            return _decode_mnist(read, "train"), _decode_mnist(read, "t10k")
        case "cifar10":
            batches = [f"data_batch_{i}.bin" for i in range(1, 6)]
            train = _decode_files(parse_cifar10, read, batches)
            return train, _decode_files(parse_cifar10, read, ["test_batch.bin"])
        case "acs":
            files = ["national2018.csv", "national2019.csv"]
            return _decode_files(parse_acs, read, files), None
        case "adult":
            train, test = (
                _decode_files(parse_adult, read, [f"adult.{part}"]) for part in ("data", "test")
            )
            return train, test
        case _:
            return _decode_files(parse_ipums, read, [IPUMS_FILE]), None


def _list_columns(names: Sequence[str], lines: Sequence[Sequence[str]]) -> Table:
    """Return the cells of each column, of lines that have all columns."""
    return dict(zip(names, zip(*lines, strict=True), strict=True))


ENVIRONMENT = "SOTTOVOCE_DATA"
TIMEOUT_S = 30


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
    """Where the files of a dataset come from, and their digests."""

    folder: str
    files: Mapping[str, str]  # name → SHA-256, or "git:" and the id of the blob
    mirrors: Sequence[str]  # addresses that end in "/", tried in order; empty: no download
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
    """Read a dataset: pictures as x / white in [0, 1], tables as `encode_table` does.

    The scale does not depend on the data, so it costs no privacy. All but digits are read from
    $SOTTOVOCE_DATA or else fetched. Raises `DataError` when files are missing or damaged.
    """
    dataset = _find_dataset(name)
    if dataset.published is None:
        content = resources.files("sottovoce.data").joinpath("digits.npz").read_bytes()
        with np.load(io.BytesIO(content)) as stored:
            train, test = (stored["x"], stored["y"]), None
    else:
        folder, files = find(name), dataset.published.files
        train, test = decode(name, lambda file: _read_checked(folder / file, files[file]))
    train_x, train_y = train
    test_x, test_y = test or (train_x[:0], train_y[:0])
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
    published, given = _find_dataset(name).published, os.environ.get(ENVIRONMENT)
    if published is None or not given:
        return fetch(name)
    folder = Path(given) / published.folder
    missing = [file for file in published.files if not (folder / file).is_file()]
    if missing:
        remedy = f", or unset {ENVIRONMENT} to download them" if published.mirrors else ""
        raise DataError(
            f"{name} must be in ${ENVIRONMENT}/{published.folder}/, but {folder} has no "
            f"{', '.join(missing)}; put the files there{remedy}"
        )
    return folder


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
        known = [n for n, d in DATASETS.items() if d.published and d.published.mirrors]
        remedy = f"{name} comes with the package and needs no download"
        raise InputError.of("name", name, f"one of {', '.join(known)}", remedy)
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


def _scale(x: Bytes | Features, white: int | None) -> NDArray[np.float32]:
    return np.divide(x, np.float32(white or 1), dtype=np.float32)


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
    """Extract the files by name, so that no path in the archive is trusted.

    It has its digest, and each file is compared with its own when it is read.
    """
    try:
        with tarfile.open(archive) as tar:
            for file in published.files:
                member = tar.extractfile(f"{published.folder}/{file}")
                _write(folder / file, b"" if member is None else member.read())
    except (tarfile.TarError, KeyError, OSError) as error:
        raise DataError(
            f"{archive} cannot be unpacked ({type(error).__name__}); see that the disk has room, "
            "delete the archive and fetch it again"
        ) from None


def _write(path: Path, content: bytes) -> None:
    """Write a file whole or not at all, also when two processes fetch at the same time."""
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
        file.write(content)
    Path(file.name).replace(path)


def _load_datasets() -> dict[str, Dataset]:
    """Load `datasets.toml`, which says what each dataset is and where its files come from."""
    text = resources.files("sottovoce.data").joinpath("datasets.toml").read_text("utf-8")
    found = {}
    for name, table in tomllib.loads(text).items():
        if (published := table.pop("published", None)) is not None:
            published = Published(**published)
        found[name] = Dataset(**table | {"shape": tuple(table["shape"])}, published=published)
    return found


DATASETS = _load_datasets()
