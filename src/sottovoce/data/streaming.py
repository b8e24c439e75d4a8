"""Rows too large for memory: a memory-mapped file, or any object that returns slices of rows.

A source has `shape`, `dtype` and slicing by row. It is never read whole: `Stored` is a view that
takes the place of an array and returns float32 rows (or int32 labels) a few at a time, in the order
in which they were dealt to clients.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, TypeGuard

import numpy as np
from numpy.typing import NDArray

from sottovoce.errors import InputError

#: An array larger than 1 / MEMORY_SHARE of the machine's memory is streamed, not copied.
MEMORY_SHARE = 4
BYTES = 8 << 20  # bytes read at a time where everything is read: labels, fingerprints
LONG_RUN = 8  # consecutive rows from which a slice is faster than fancy indexing


def is_streamed(rows: Any) -> bool:
    """Return whether these rows are to be streamed instead of being loaded into memory.

    It is true for a `np.memmap`, for an object with shape, dtype and slices that cannot become an
    array, and for an array that is larger, as float32, than a quarter of the machine's memory.
    """
    if isinstance(rows, np.memmap):
        return True
    if not all(hasattr(rows, name) for name in ("shape", "dtype", "__getitem__")):
        return False
    if not hasattr(rows, "__array__"):
        return True
    return 4 * float(np.prod(rows.shape, dtype=np.float64)) > read_memory_size() / MEMORY_SHARE


def read_memory_size() -> float:
    """Return the bytes of this machine's memory, or infinity if the system does not say."""
    try:
        return float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    except (AttributeError, OSError, ValueError):
        return float("inf")


@dataclass(frozen=True, eq=False)
class Stored:
    """A view of the rows `ids[start:stop]` of a source, or `start:stop` if there are no ids.

    >>> view = Stored.of(np.arange(12.0).reshape(6, 2), np.float32)
    >>> view[1:3].tolist(), view.take_rows(np.array([5, 0]))[0:2].tolist()
    ([[2.0, 3.0], [4.0, 5.0]], [[10.0, 11.0], [0.0, 1.0]])
    """

    source: Any
    dtype: np.dtype[Any]
    start: int
    stop: int
    ids: NDArray[np.int64] | None = None

    @classmethod
    def of(cls, source: Any, dtype: Any) -> Stored:
        """Return a view of all rows of a source."""
        return cls(source, np.dtype(dtype), 0, len(source))

    @property
    def shape(self) -> tuple[int, ...]:
        """(rows, numbers of a row), or (rows,) for labels; the shape of a row is flattened."""
        row_shape = self.source.shape[1:]
        return (len(self), int(np.prod(row_shape))) if row_shape else (len(self),)

    def __len__(self) -> int:
        return self.stop - self.start

    def take_rows(self, ids: NDArray[np.int64]) -> Stored:
        """Return a view of these rows of the view, in this order; nothing is read."""
        rows = ids + self.start if self.ids is None else self.ids[self.start + ids]
        return replace(self, start=0, stop=len(rows), ids=rows)

    def slice_rows(self, start: int, stop: int) -> Stored:
        """Return a view of the rows from `start` to `stop`."""
        return replace(self, start=self.start + start, stop=self.start + stop)

    def __getitem__(self, where: slice | NDArray[Any]) -> NDArray[Any]:
        rows = np.arange(*where.indices(len(self))) if isinstance(where, slice) else where
        out = np.empty((len(rows), *self.shape[1:]), self.dtype)
        self.read_rows(rows, out)
        return out

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        every = self[0 : len(self)]
        return every if dtype is None else every.astype(dtype)

    def read_rows(self, where: slice | NDArray[Any], out: NDArray[Any]) -> None:
        """Copy these rows of the view into `out`, by slices of the source where rows are many."""
        if isinstance(where, slice):
            where = np.arange(where.start, where.stop)
        rows = where + self.start if self.ids is None else self.ids[self.start + where]
        ends = np.flatnonzero(np.diff(rows) != 1) + 1
        if isinstance(self.source, np.ndarray) and len(rows) < LONG_RUN * (len(ends) + 1):
            np.copyto(out, self.source[rows].reshape(out.shape), casting="unsafe")
        else:
            stretches = zip([0, *ends.tolist()], [*ends.tolist(), len(rows)], strict=True)
            for a, b in stretches:
                if a < b:
                    piece = np.asarray(self.source[int(rows[a]) : int(rows[b - 1]) + 1])
                    np.copyto(out[a:b], piece.reshape(out[a:b].shape), casting="unsafe")
        _release_pages(self.source)
        require_finite(out, rows)

    def pieces(self) -> Iterator[NDArray[Any]]:
        """Yield all rows, a bounded number of bytes at a time."""
        width = int(np.prod(self.shape[1:])) * self.dtype.itemsize
        rows = max(1, BYTES // max(1, width))
        for first in range(0, len(self), rows):
            yield self[first : first + rows]

    def min(self) -> int:
        """Return the smallest number."""
        return int(min(piece.min() for piece in self.pieces()))

    def max(self) -> int:
        """Return the largest number."""
        return int(max(piece.max() for piece in self.pieces()))


def is_stored(rows: object) -> TypeGuard[Stored]:
    """Return whether these rows are a view of stored rows."""
    return isinstance(rows, Stored)


def require_finite(x: NDArray[Any], rows: int | NDArray[Any], name: str = "data") -> None:
    """Refuse a number that is missing or not finite; `rows` number the rows, or only the first."""
    if not x.size or (np.isfinite(x.min()) and np.isfinite(x.max())):  # no array of that size
        return
    bad = int((~np.isfinite(x.reshape(len(x), -1)).all(axis=1)).argmax())
    row = rows + bad if isinstance(rows, int) else rows[bad]
    raise InputError(
        f"row {row + 1} of {name} holds a number that is missing or not finite; fill it in with a "
        "public value (numpy.nan_to_num) or leave the row out"
    )


def _release_pages(source: Any) -> None:
    """Release the pages of a mapped file that were read, or they stay in this process's memory."""
    if not isinstance(source, np.memmap) or source.mode not in ("r", "r+"):
        return  # a private copy may hold changes that exist nowhere else
    base: Any = source
    while base is not None and not isinstance(base, mmap.mmap):
        base = getattr(base, "base", None)
    if base is not None and hasattr(mmap, "MADV_DONTNEED"):
        base.madvise(mmap.MADV_DONTNEED)
