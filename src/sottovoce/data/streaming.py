"""Rows that stay where they are: a memory-mapped file, or anything that gives rows by slices.

A source has `shape`, `dtype` and slicing by row. It is never read whole: `Stored` is the view that
stands where an array would, and gives float32 rows (or int32 labels) a few at a time, in the order
in which they were dealt.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, TypeGuard

import numpy as np
from numpy.typing import NDArray

#: An array larger than this part of the machine's memory is streamed, not copied.
PART = 4
BYTES = 8 << 20  # read at a time where everything is read: labels, fingerprints
LONG_RUN = 8  # rows in a row from which slices are quicker than picking


def streams(rows: Any) -> bool:
    """Whether these rows are to be left where they are.

    A `np.memmap` is; so is what has shape, dtype and slices but is no array and cannot become one;
    so is any array that is larger, as float32, than a quarter of the machine's memory.

    >>> streams(np.zeros((3, 2))), streams([[1.0], [2.0]])
    (False, False)
    """
    if isinstance(rows, np.memmap):
        return True
    if not all(hasattr(rows, name) for name in ("shape", "dtype", "__getitem__")):
        return False
    if not hasattr(rows, "__array__"):
        return True
    return 4 * float(np.prod(rows.shape, dtype=np.float64)) > memory() / PART


def memory() -> float:
    """The bytes of this machine's memory, as far as the system says."""
    try:
        return float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    except (AttributeError, OSError, ValueError):
        return float("inf")


@dataclass(frozen=True, eq=False)
class Stored:
    """A view of a source: `ids[start:stop]` of its rows, or `start:stop` where there are none.

    >>> view = Stored.of(np.arange(12.0).reshape(6, 2), np.float32)
    >>> view[1:3].tolist(), view.at(np.array([5, 0]))[0:2].tolist()
    ([[2.0, 3.0], [4.0, 5.0]], [[10.0, 11.0], [0.0, 1.0]])
    """

    source: Any
    dtype: np.dtype[Any]
    start: int
    stop: int
    ids: NDArray[np.int64] | None = None

    @classmethod
    def of(cls, source: Any, dtype: Any) -> Stored:
        """All rows of a source."""
        return cls(source, np.dtype(dtype), 0, len(source))

    @property
    def shape(self) -> tuple[int, ...]:
        """(rows, numbers of a row), or (rows,) of labels: a row's own shape is flattened."""
        one = self.source.shape[1:]
        return (len(self), int(np.prod(one))) if one else (len(self),)

    def __len__(self) -> int:
        return self.stop - self.start

    def at(self, ids: NDArray[np.int64]) -> Stored:
        """A view of these rows of the view, in this order; nothing is read."""
        own = ids + self.start if self.ids is None else self.ids[self.start + ids]
        return replace(self, start=0, stop=len(own), ids=own)

    def between(self, start: int, stop: int) -> Stored:
        """A view of a stretch of the rows."""
        return replace(self, start=self.start + start, stop=self.start + stop)

    def __getitem__(self, where: slice | NDArray[Any]) -> NDArray[Any]:
        if isinstance(where, slice):
            start, stop, step = where.indices(len(self))
            where = slice(start, max(start, stop)) if step == 1 else np.arange(*(start, stop, step))
        count = where.stop - where.start if isinstance(where, slice) else len(where)
        out = np.empty((count, *self.shape[1:]), self.dtype)
        self.read(where, out)
        return out

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        every = self[0 : len(self)]
        return every if dtype is None else every.astype(dtype)

    def read(self, where: slice | NDArray[Any], out: NDArray[Any]) -> None:
        """These rows of the view into `out`; where none is left out, one slice of the source."""
        if isinstance(where, slice):
            first, last = self.start + where.start, self.start + where.stop
            if self.ids is None:
                self._copy(first, last, out)
                _release(self.source)
                return
            rows = self.ids[first:last]
        else:
            rows = where + self.start if self.ids is None else self.ids[self.start + where]
        ends = np.flatnonzero(np.diff(rows) != 1) + 1
        if isinstance(self.source, np.ndarray) and len(rows) < LONG_RUN * (len(ends) + 1):
            np.copyto(out, self.source[rows].reshape(out.shape), casting="unsafe")
        else:
            stretches = zip([0, *ends.tolist()], [*ends.tolist(), len(rows)], strict=True)
            for a, b in stretches:
                if a < b:
                    self._copy(int(rows[a]), int(rows[b - 1]) + 1, out[a:b])
        _release(self.source)

    def _copy(self, first: int, last: int, out: NDArray[Any]) -> None:
        np.copyto(out, np.asarray(self.source[first:last]).reshape(out.shape), casting="unsafe")

    def pieces(self) -> Iterator[NDArray[Any]]:
        """All rows, a bounded number of bytes at a time."""
        width = int(np.prod(self.shape[1:])) * self.dtype.itemsize
        rows = max(1, BYTES // max(1, width))
        for first in range(0, len(self), rows):
            yield self[first : first + rows]

    def min(self) -> int:
        """The least number there is."""
        return int(min(piece.min() for piece in self.pieces()))

    def max(self) -> int:
        """The largest number there is."""
        return int(max(piece.max() for piece in self.pieces()))


def is_stored(rows: object) -> TypeGuard[Stored]:
    """Whether these are left where they are."""
    return isinstance(rows, Stored)


def _release(source: Any) -> None:
    """Give back the pages of a mapped file that were read: they would count as ours for ever."""
    if not isinstance(source, np.memmap) or source.mode not in ("r", "r+"):
        return  # a private copy may hold changes that are nowhere else
    base: Any = source
    while base is not None and not isinstance(base, mmap.mmap):
        base = getattr(base, "base", None)
    if base is not None and hasattr(mmap, "MADV_DONTNEED"):
        base.madvise(mmap.MADV_DONTNEED)
