"""Receipts, and the witness beside a vault: how an older copy is recognised.

A receipt says how far a ledger had come: its last line's number and hash, what was spent by then,
and what was promised for it. The witness is the newest receipt in a separate file (NAME.witness),
which is replaced as a whole after every write of the vault. A vault may be one write ahead of its
witness (after a crash between the two), never behind it.

Old copies of both files fit each other. Therefore the machine keeps a second witness in its state
folder, by the vault's id, and a vault's identity rests on it: every line has a random salt, so that
the hash of the newest one belongs to one file's history and no other.

    $SOTTOVOCE_STATE              else $XDG_STATE_HOME/sottovoce or ~/.local/state/sottovoce
        witness/ID                the newest receipt of the vault with this id
        witness/ID.lock           held by the one process that uses a file with this id
        datasets/MARK/ID          the vault keeps, or has kept, a ledger of the rows with this mark;
                                  it may say where the vault is
        key                       32 random bytes; MARK = HMAC-SHA256(key, fingerprint)

A vault without a witness here (another machine, a lost state folder, a fresh container) is used
only on the operator's recorded word (`rebinding`). Reading a vault writes nothing here: the reader
may be another account, with another state folder.
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import json
import os
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, Self

from sottovoce.client.vault import chain
from sottovoce.client.vault.chain import encode_canonical, is_hash
from sottovoce.client.vault.policy import MOST_COUNTED, Policy
from sottovoce.errors import InputError, VaultRefusal
from sottovoce.privacy.tank import FULL


def give_to_owner(descriptor: int, like: Path) -> None:
    """Give a new file or folder to the owner of another, where that is allowed.

    Only root may give files away, and only root opens a vault that belongs to another account; what
    root writes for a client must stay readable to it.
    """
    try:
        owner = like.stat()
    except OSError:  # nothing there yet: who makes the first file keeps it
        return
    created = os.fstat(descriptor)
    if (created.st_uid, created.st_gid) != (owner.st_uid, owner.st_gid):
        with contextlib.suppress(OSError):  # also of an account that a container does not know
            os.fchown(descriptor, owner.st_uid, owner.st_gid)


def refuse_reading(path: Path, error: OSError, unknown: str = "") -> NoReturn:
    """Refuse a file that cannot be read now. What it says is unknown, and nothing is lost."""
    if error.errno in (errno.EACCES, errno.EPERM):
        remedy = "run this as the account that the vault belongs to, or give it the file (chown)"
    elif error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG):
        remedy = "make its folder first, or correct the path"
    elif error.errno == errno.ELOOP:
        remedy = "a link may be another user's choice, so look who made it, and remove it"
    else:
        remedy = "this may pass, so try again; if it does not, check its folder and its disk"
    raise VaultRefusal(f"{path} cannot be read ({error.strerror}){unknown}; {remedy}") from None


_SCHEMA = "sottovoce.receipt/1"
_KEY_BYTES = 32


@dataclass(frozen=True)
class VaultReceipt:
    """How far a ledger had come. What follows the hash is known to the client's side only."""

    vault: str
    seq: int
    hash: str
    spent: int | None = None  # units of 2⁵⁰, all runs together
    alone: int | None = None  # the same by this client's own noise, whatever others do
    promised: Policy | None = None  # at the first release, whose terms of sums a backup may lack

    def __post_init__(self) -> None:
        if not isinstance(self.vault, str) or not 1 <= len(self.vault) <= 64:
            raise InputError.of("receipt.vault", self.vault, "an id", "copy the receipt whole")
        if type(self.seq) is not int or not 1 <= self.seq < 2**53:
            raise InputError.of("receipt.seq", self.seq, "a whole number ≥ 1", "copy it whole")
        if not is_hash(self.hash):
            raise InputError.of("receipt.hash", self.hash, "64 hex digits", "copy it whole")
        for name, most in (("spent", FULL), ("alone", MOST_COUNTED * FULL)):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or not 0 <= value <= most):
                raise InputError.of(f"receipt.{name}", value, f"from 0 to {most}", "copy it whole")

    def to_json(self) -> dict[str, Any]:
        """Return what leaves with an answer: number and hash, not what is spent."""
        return {"vault": self.vault, "seq": self.seq, "hash": self.hash}

    def to_proof(self) -> dict[str, Any]:
        """Return all of it, for the client's own files."""
        proof = {"schema": _SCHEMA, **self.to_json(), "spent": self.spent}
        if self.alone is not None:  # older receipts have neither this nor the promise
            proof["alone"] = self.alone
        return proof if self.promised is None else {**proof, "promised": self.promised.to_json()}

    @classmethod
    def from_json(cls, data: object) -> Self:
        """Read what `to_json` or `to_proof` wrote; refuse anything else."""
        if not isinstance(data, Mapping):
            raise InputError.of("receipt", data, "an object", "copy the receipt whole")
        keys = {"vault", "seq", "hash"}
        if not keys <= data.keys() <= keys | {"spent", "alone", "promised", "schema"}:
            raise InputError.of(
                "receipt", sorted(map(str, data)), "vault, seq, hash (and spent)", "copy it whole"
            )
        if data.get("schema", _SCHEMA) != _SCHEMA:
            raise InputError.of("receipt.schema", data["schema"], _SCHEMA, "copy it whole")
        promised = data.get("promised")
        if promised is not None:
            if not isinstance(promised, Mapping):
                raise InputError.of("receipt.promised", promised, "a policy", "copy it whole")
            promised = Policy.from_json(promised)
        spent, alone = data.get("spent"), data.get("alone")
        return cls(data["vault"], data["seq"], data["hash"], spent, alone, promised)

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read a receipt from its JSON text."""
        try:
            data = json.loads(text)
        except (ValueError, RecursionError):
            raise InputError.of("receipt", text, "a JSON object", "copy it whole") from None
        return cls.from_json(data)


def locate_witness(vault: Path) -> Path:
    """Return the path of a vault's witness."""
    return vault.with_name(vault.name + ".witness")


def locate_state() -> Path:
    """Return the folder in which this machine keeps what it knows of its vaults."""
    folder, shared = os.environ.get("SOTTOVOCE_STATE"), os.environ.get("XDG_STATE_HOME")
    try:
        base = Path(shared) if shared else Path.home() / ".local" / "state"
        return Path(folder) if folder else base / "sottovoce"
    except RuntimeError:  # an account without a home
        raise VaultRefusal(
            "there is no place for the machine's own witness, because this account has no home; "
            "set SOTTOVOCE_STATE to a folder that lasts"
        ) from None


def locate_machine_witness(vault: str) -> Path:
    """Return the path of this machine's own witness of a vault, by the vault's id."""
    return locate_state() / "witness" / vault


@contextlib.contextmanager
def open_state() -> Iterator[Path]:
    """Yield the state folder, created if need be; a failed write there becomes a refusal."""
    folder = locate_state()
    try:
        _make_folder(folder / "witness")
        yield folder
    except OSError as error:
        raise VaultRefusal(
            f"{folder}, where this machine keeps its own witnesses, cannot be written "
            f"({error.strerror}); make room, or set SOTTOVOCE_STATE to a folder that lasts"
        ) from None


def _make_folder(folder: Path) -> None:
    """Make a folder, durably, of the account that the folder above belongs to."""
    if folder.is_dir():
        return
    _make_folder(folder.parent)
    with contextlib.suppress(FileExistsError):  # another process made it
        folder.mkdir(mode=0o700)
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        give_to_owner(descriptor, folder.parent)
    finally:
        os.close(descriptor)
    sync_folder(folder.parent)


def find_ledgers(dataset: str) -> dict[str, str]:
    """Return the ids of all vaults seen with a ledger of these rows, and where they were noted."""
    key = _read_key()
    try:
        marks = [] if key is None else sorted(_locate_mark(key, dataset).iterdir())
        return {mark.name: _read_file(mark).decode("utf-8", "replace") for mark in marks}
    except FileNotFoundError:
        return {}
    except OSError as error:
        refuse_reading(locate_state(), error, ", so nobody can tell which rows have a ledger")


@contextlib.contextmanager
def hold_ledgers(dataset: str) -> Iterator[None]:
    """Be the only process that looks for ledgers of these rows and makes new ones; others wait."""
    import fcntl

    with open_state() as folder:
        marks = _locate_mark(_read_key() or _make_key(folder), dataset)
        _make_folder(marks)
        descriptor = os.open(marks, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
    try:
        yield
    finally:
        os.close(descriptor)


def note_ledger(dataset: str, vault: str, place: str = "") -> None:
    """Record that a vault keeps the ledger of these rows; durable when this returns."""
    with open_state() as folder:
        key = _read_key() or _make_key(folder)
        path = _locate_mark(key, dataset) / vault
        if path.exists():
            return
        _make_folder(path.parent)
        with contextlib.suppress(FileExistsError):  # another process notes it
            _create_file(path, place.encode(), like=folder)
        for changed in (path.parent, path.parent.parent, folder):
            sync_folder(changed)


def _locate_mark(key: bytes, dataset: str) -> Path:
    return locate_state() / "datasets" / hmac.new(key, dataset.encode(), "sha256").hexdigest()


def _read_key() -> bytes | None:
    """Return the key of the datasets' marks; None where no ledger was ever noted."""
    path = locate_state() / "key"
    try:
        key = _read_file(path)
    except (FileNotFoundError, NotADirectoryError):
        if not (locate_state() / "datasets").is_dir():
            return None
        key = b""
    except OSError as error:
        refuse_reading(path, error, ", so nobody can tell which rows have a ledger")
    if len(key) != _KEY_BYTES:
        raise VaultRefusal(
            f"{path} is missing or damaged, so nobody can tell which rows have a ledger already; "
            f"put it back, or remove it together with {locate_state() / 'datasets'}"
        )
    return key


def _make_key(folder: Path) -> bytes:
    """Draw the key once: if two processes do so at the same time, one wins."""
    draft = folder / f"key.{os.getpid()}.part"
    draft.unlink(missing_ok=True)  # of a process that was killed
    _create_file(draft, os.urandom(_KEY_BYTES), like=folder)
    with contextlib.suppress(FileExistsError):
        os.link(draft, folder / "key")
    draft.unlink()
    sync_folder(folder)
    return _read_file(folder / "key")


def read_machine_witness(vault: str) -> VaultReceipt | None:
    """Return what this machine has seen of a vault; None where it has seen nothing."""
    words = "remove it, and open the vault again to see what to say instead"
    path = locate_machine_witness(vault)
    return _read_receipt(path, f", so nobody can tell whether this is the newest; {words}", vault)


def _read_receipt(path: Path, if_damaged: str, vault: str | None = None) -> VaultReceipt | None:
    """Return a complete witness, of this vault where one is named; None where there is no file.

    For a witness that cannot be read the advice is another than for a damaged one: removing it, or
    restoring, would be wrong.
    """
    why = "is damaged"
    try:
        content = _read_file(path)
        why = why if content.rstrip().endswith(b"}") else "was cut short, as by a full disk"
        receipt = VaultReceipt.parse(content.decode("utf-8"))
        if receipt.spent is not None and vault in (None, receipt.vault):
            return receipt
    except (FileNotFoundError, NotADirectoryError):  # who writes it will say what is in the way
        return None
    except OSError as error:
        refuse_reading(path, error, ", so nobody can tell whether the vault is the newest")
    except (UnicodeDecodeError, InputError):
        pass
    raise VaultRefusal(f"{path} {why}{if_damaged}")


def _read_file(path: Path) -> bytes:
    """Read a small file; a link or a pipe that another user put there is not followed."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as file:
        return file.read()


def read_witness(vault: Path) -> VaultReceipt | None:
    """Return the witness of a vault; None where there is none. Refuse a damaged one."""
    remedy = f"remove it and run `sottovoce ledger rebind {vault.name} --restored`"
    return _read_receipt(locate_witness(vault), f"; {remedy}")


def write_witness(vault: Path, receipt: VaultReceipt, kind: str) -> None:
    """Replace the witness beside a vault."""
    _write_receipt(locate_witness(vault), receipt, vault, f"{kind}: witness written")


def write_machine_witness(receipt: VaultReceipt) -> None:
    """Replace the machine's own witness."""
    path = locate_machine_witness(receipt.vault)
    with open_state():
        _write_receipt(path, receipt, path if path.exists() else path.parent)


def _write_receipt(path: Path, receipt: VaultReceipt, like: Path, step: str = "") -> None:
    old = path.lstat().st_mode if path.exists() else 0
    mode = stat.S_IMODE(old) if stat.S_ISREG(old) else 0o600  # an operator's choice is kept
    content = (encode_canonical(receipt.to_proof()) + "\n").encode()
    write_secret(path, content, like, mode, step)


def write_secret(path: Path, content: bytes, like: Path, mode: int = 0o600, step: str = "") -> None:
    """Replace a small file durably: after a crash there is the old one or the new one.

    It is given to the owner of `like`, and others can read it only if `mode` says so. `step` names
    the moment before the new file takes the old one's place.
    """
    draft = path.with_name(path.name + ".part")
    draft.unlink(missing_ok=True)  # of a process that was killed, or somebody else's
    _create_file(draft, content, like, mode)
    if step:
        chain.pass_step(step)
    draft.replace(path)
    sync_folder(path.parent)


def _create_file(path: Path, content: bytes, like: Path, mode: int = 0o600) -> None:
    """Write a small new file, of the owner of `like`; its content is durable, its name not yet."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC  # EXCL follows no link
    descriptor = os.open(path, flags, 0o600)
    try:
        give_to_owner(descriptor, like)
        with contextlib.suppress(PermissionError):  # of a file system without modes
            os.fchmod(descriptor, mode)
        while content:  # a disk that becomes full takes a part of it, and then refuses the rest
            content = content[os.write(descriptor, content) :]
        os.fsync(descriptor)
    except OSError:
        path.unlink(missing_ok=True)
        raise
    finally:
        os.close(descriptor)


def sync_folder(folder: Path) -> None:
    """Make created, changed or removed names in a folder durable."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
