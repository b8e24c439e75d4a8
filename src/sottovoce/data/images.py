"""The formats in which MNIST (IDX, gzipped) and CIFAR-10 (binary) are published."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from sottovoce.errors import DataError

Bytes = NDArray[np.uint8]
Raw = tuple[Bytes, Bytes, Bytes, Bytes]  # train x, train y, test x, test y


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
    """Images (n, 3072), channels last, and labels (n,) of one file of binary CIFAR-10.

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


def decode_mnist(read: Callable[[str], bytes]) -> Raw:
    """MNIST from its four files; `read` gives the content of a file."""

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


def decode_cifar10(read: Callable[[str], bytes]) -> Raw:
    """CIFAR-10 from its six files; `read` gives the content of a file."""
    batches = [
        parse_cifar10(read(file), file=file)
        for file in (f"data_batch_{i}.bin" for i in range(1, 6))
    ]
    test_x, test_y = parse_cifar10(read("test_batch.bin"), file="test_batch.bin")
    train_x = np.concatenate([x for x, _ in batches])
    return train_x, np.concatenate([y for _, y in batches]), test_x, test_y
