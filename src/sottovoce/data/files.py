"""Write the folders and files of a run whole or not at all, and read them with few kinds of errors.

A cut-off or edited file makes numpy and zipfile raise a dozen kinds of errors (EOFError, which a
command line takes for Ctrl-C; TokenError; zlib.error; MemoryError …). Here all of them become a
ValueError that says why; errors of the system stay OSErrors. Nothing is unpickled.
"""

from __future__ import annotations

import errno
import io
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from sottovoce.errors import InputError, RunError


def read_npz(path: Path, *names: str) -> dict[str, NDArray[Any]]:
    """Read the named arrays of an .npz, or all of them if none is named.

    >>> read_npz(Path(__file__))
    Traceback (most recent call last):
        ...
    ValueError: it is no .npz archive
    """
    with _open_array_file(path, b"PK", "it is no .npz archive") as file:
        with np.load(file, allow_pickle=False) as stored:
            missing = [name for name in names if name not in stored.files]
            if missing:
                raise ValueError(f"there is no array {missing[0]}")
            found = {name: stored[name] for name in names or stored.files}
        for name, array in found.items():
            if not isinstance(array, np.ndarray):  # the archive holds another file of that name
                raise ValueError(f"{name} is no array")
    return found


def read_npy(path: Path) -> NDArray[Any]:
    """Read the array of an .npy."""
    with _open_array_file(path, b"\x93NUMPY", "it is no .npy file") as file:
        array: NDArray[Any] = np.load(file, allow_pickle=False)
    return array


@contextmanager
def _open_array_file(path: Path, magic: bytes, otherwise: str) -> Iterator[BinaryIO]:
    # It is opened here, because numpy leaves a file open that it cannot read.
    with path.open("rb") as file:
        if file.read(len(magic)) != magic:
            raise ValueError(otherwise)
        file.seek(0)
        try:
            yield file
        except Exception as error:  # damaged bytes make parsers raise anything
            # A damaged archive names impossible offsets (EINVAL), or other compressed bytes (None).
            of_system = isinstance(error, OSError) and error.errno not in (None, errno.EINVAL)
            if isinstance(error, ValueError) or of_system:
                raise
            why = str(error) or type(error).__name__
            raise ValueError(f"it is damaged ({why})") from error


#: What using the content of a file raises where it is not what it should be.
DAMAGE = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError)


def why(error: Exception) -> str:
    """Return an error's message on one line of bounded length."""
    return " ".join(str(error).split())[:120]


def require_empty(folder: Path, *, resumable: bool = True) -> Path:
    """Return the folder if it is new or empty, else raise InputError. Nothing is made yet."""
    try:
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            remedy = "name another" + (", or resume the run that lies in it" if resumable else "")
            raise InputError.of("out", str(folder), "a new or empty folder", remedy)
    except OSError as error:
        raise RunError(f"{folder} cannot be read: {error.strerror}; name another") from None
    return folder


def make_folder(folder: Path) -> None:
    """Make the folder of a run."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunError(f"{folder} cannot be made: {error.strerror}; name another") from None


HOLD_SECONDS = 10.0  # whoever asks `is_held` has the lock for a moment, and a run waits for it


@contextmanager
def hold_folder(folder: Path | None, seconds: float = HOLD_SECONDS) -> Iterator[None]:
    """Make the folder of a run, and be the only process that plays it; of None nothing is held.

    It waits so many seconds for another process to end.
    The lock is on the folder itself, so that nothing is written, and the system ends it with the
    process, even after kill -9. Where the system has no such lock, nothing is held.
    """
    if folder is None:
        yield
        return
    make_folder(folder)
    descriptor, until = None, time.monotonic() + seconds
    while descriptor is None:
        try:
            descriptor = _lock_folder(folder, "LOCK_EX")
        except BlockingIOError:
            if time.monotonic() > until:
                raise RunError(
                    f"the run in {folder} goes on in another process; wait for its end or stop it"
                ) from None
            time.sleep(0.05)
        except OSError:
            break
    try:
        yield
    finally:
        if descriptor is not None:
            os.close(descriptor)


def is_held(folder: Path) -> bool | None:
    """Return whether a living process plays the run of this folder; None where it is not known."""
    try:
        os.close(_lock_folder(folder, "LOCK_SH"))
    except BlockingIOError:
        return True
    except OSError:
        return None
    return False


def _lock_folder(folder: Path, kind: str) -> int:
    """Return a descriptor that holds the lock; raise BlockingIOError if another process has it."""
    try:
        import fcntl
    except ImportError:
        raise OSError("this system has no flock") from None
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, getattr(fcntl, kind) | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def write_npz(path: Path, arrays: Mapping[str, Any], *, compressed: bool = True) -> None:
    """Write arrays to an .npz, whole or not at all."""
    buffer = io.BytesIO()
    (np.savez_compressed if compressed else np.savez)(buffer, **arrays)
    write_file(path, buffer.getvalue())


def write_file(path: Path, content: bytes) -> None:
    """Write a file so that a reader sees the old content or the new one, never a mixture."""
    unfinished = path.with_name(path.name + ".part")
    try:
        with unfinished.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(path)
    except BaseException:
        with suppress(OSError):  # half a file would take the room that is missing
            unfinished.unlink()
        raise
    sync_folder(path.parent)  # the new name must also survive a power cut


def sync_folder(folder: Path) -> None:
    """Write a folder's names to the disk, where the system opens folders; Windows does not."""
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except PermissionError:
        return
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
