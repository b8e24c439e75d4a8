"""Samples to predict from a file: numpy arrays or a table of numbers."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sottovoce.data import files
from sottovoce.errors import DataError, InputError


def read_samples(path: Path) -> NDArray[np.float32]:
    """The rows of a .npy, of the array `x` (or the only one) of a .npz, or of a .csv of numbers.

    A first line of a .csv that is not numbers is taken as its header.
    """
    readers = {".npy": files.read_npy, ".npz": _npz, ".csv": _csv}
    if path.suffix.lower() not in readers:
        raise InputError.of(
            "FILE", path.name, "a .npy, .npz or .csv file", "save the samples as one of these"
        )
    try:
        rows = readers[path.suffix.lower()](path)
        return np.asarray(rows, dtype=np.float32)
    except FileNotFoundError:
        raise InputError.of("FILE", str(path), "a file that exists", "check its name") from None
    except (OSError, ValueError, TypeError, csv.Error) as error:
        raise DataError(f"{path} cannot be read as samples: {files.why(error)}") from None


def _npz(path: Path) -> Any:
    stored = files.read_npz(path)
    if "x" not in stored and len(stored) != 1:
        raise ValueError(f"it holds the arrays {', '.join(stored)} and none is called x")
    return stored.get("x", next(iter(stored.values())))


def _csv(path: Path) -> Any:
    with path.open(newline="", encoding="utf-8") as file:
        lines = [row for row in csv.reader(file) if row]
    if lines and not _are_numbers(lines[0]):
        lines = lines[1:]
    for number, row in enumerate(lines, start=1):
        if not _are_numbers(row) or len(row) != len(lines[0]):
            raise ValueError(f"row {number} is not {len(lines[0])} numbers")
    return [[float(cell) for cell in row] for row in lines]


def _are_numbers(row: list[str]) -> bool:
    try:
        [float(cell) for cell in row]
    except ValueError:
        return False
    return True
