"""Folders and files of a run: written whole or not at all, read without surprises.

A cut-off or edited file makes numpy and zipfile raise a dozen kinds of errors (EOFError, which a
command line takes for Ctrl-C; TokenError; zlib.error; NotImplementedError; MemoryError …). Here all
of them become a ValueError that says why; what the system refuses stays an OSError. Nothing is ever
unpickled.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from sottovoce.errors import InputError, RunError


def read_npz(path: Path, *names: str) -> dict[str, NDArray[Any]]:
    """The arrays of an .npz by name: those that are named, or all of them.

    >>> read_npz(Path(__file__))
    Traceback (most recent call last):
        ...
    ValueError: it is no .npz archive
    """
    with _reading(path, b"PK", "it is no .npz archive") as file:
        with np.load(file, allow_pickle=False) as stored:
            missing = [name for name in names if name not in stored.files]
            if missing:
                raise ValueError(f"there is no array {missing[0]}")
            found = {name: stored[name] for name in names or stored.files}
        for name, array in found.items():
            if not isinstance(array, np.ndarray):  # a member that is something else
                raise ValueError(f"{name} is no array")
    return found


def read_npy(path: Path) -> NDArray[Any]:
    """The array of an .npy."""
    with _reading(path, b"\x93NUMPY", "it is no .npy file") as file:
        array: NDArray[Any] = np.load(file, allow_pickle=False)
    return array


@contextmanager
def _reading(path: Path, magic: bytes, otherwise: str) -> Iterator[BinaryIO]:
    # Opened here: numpy leaves a file open that turns out to be none of its own.
    with path.open("rb") as file:
        if file.read(len(magic)) != magic:
            raise ValueError(otherwise)
        file.seek(0)
        try:
            yield file
        except (OSError, ValueError):
            raise
        except Exception as error:  # whatever a parser stumbles over in damaged bytes
            why = str(error) or type(error).__name__
            raise ValueError(f"it is damaged ({why})") from error


def why(error: Exception) -> str:
    """What an error says, on one line of bounded length.

    >>> why(ValueError("one\\ntwo"))
    'one two'
    """
    return " ".join(str(error).split())[:120]


def require_empty(folder: Path, *, resumable: bool = True) -> Path:
    """The folder if it may be written to: it is new or empty. Nothing is made yet."""
    try:
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise InputError.of(
                "out",
                str(folder),
                "a new or empty folder",
                "name another" + (", or resume the run that lies in it" if resumable else ""),
            )
    except OSError as error:
        raise RunError(f"{folder} cannot be read: {error.strerror}; name another") from None
    return folder


def make_folder(folder: Path) -> None:
    """Make the folder of a run."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunError(f"{folder} cannot be made: {error.strerror}; name another") from None


def write_file(path: Path, content: bytes) -> None:
    """Write a file whole: a reader sees the old content or the new one, never a part."""
    part = path.with_name(path.name + ".part")
    with part.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)
    folder = os.open(path.parent, os.O_RDONLY)  # the new name must survive a power cut, too
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
