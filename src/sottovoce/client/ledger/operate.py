"""Making a vault, reading it, and binding it anew: the calls behind the command line."""

from __future__ import annotations

import json
import os
import pwd
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from sottovoce.client import vault as vaults
from sottovoce.client.ledger.account import Account, account
from sottovoce.client.node import Node
from sottovoce.client.vault import Policy, Receipt, Vault, fingerprint_file
from sottovoce.errors import InputError
from sottovoce.privacy.tank import FULL


def act_as(user: str | None, state: Path | None, *, beside: Path | None) -> None:
    """Become the user whose vault is made, for the rest of this process; set its state folder.

    Root makes no vault in somebody else's folder: its second witness would lie in root's home,
    where the client's own process never looks.
    """
    if state is not None:
        os.environ["SOTTOVOCE_STATE"] = str(state)
    if user is None:
        folder = None if beside is None else beside.absolute().parent
        if os.geteuid() == 0 and folder is not None and folder.exists() and folder.stat().st_uid:
            raise InputError(
                f"{folder} belongs to {folder.owner()}, and root's own second witness would be of "
                f"no use to it; add --user {folder.owner()}"
            )
        return
    try:
        owner = pwd.getpwnam(user)
    except KeyError:
        raise InputError.of("user", user, "a user of this machine", "make it first") from None
    if os.geteuid() == owner.pw_uid:
        return
    if os.geteuid() != 0:
        raise InputError.of("user", user, "yourself, unless you are root", "leave --user out")
    os.initgroups(user, owner.pw_gid)
    os.setgid(owner.pw_gid)
    os.setuid(owner.pw_uid)
    os.environ["HOME"] = owner.pw_dir


def create(
    path: str | Path,
    *,
    data: str | Path,
    samples: int | None = None,
    second_ledger: bool = False,
    **terms: Any,
) -> Account:
    """Make the vault of a data file; `terms` are those of `Policy`. The new vault's statement.

    The number of samples is the file's where the file tells it (.npz), and must be given else.
    Rows that have a ledger on this machine get another with `second_ledger`, which is recorded.
    """
    rows = _rows(samples, *fingerprint_file(data))
    policy = Policy(samples=rows[1], **terms)
    with Vault.create(path, policy, dataset=rows[0], second_ledger=second_ledger) as vault:
        return account(vault)


def make(
    path: str | Path | None,
    node: str | Path | None,
    *,
    second_ledger: bool = False,
    **terms: Any,
) -> Account:
    """Make a vault from a node file alone, or from a path, a data file and terms."""
    if node is not None:
        if path is not None or terms:
            extra = "VAULT" if path is not None else f"--{next(iter(terms)).replace('_', '-')}"
            raise InputError(f"{extra} stands in the node file already; leave it out")
        return create_for(node, second_ledger=second_ledger)
    if path is None:
        raise InputError("create needs a VAULT or a --node file that names it, one of the two")
    for name in ("data", "epsilon", "delta", "clip"):
        if name not in terms:
            raise InputError(f"--{name} is missing; it has no default (or give a --node file)")
    return create(path, second_ledger=second_ledger, **terms)


def create_for(node: str | Path, *, second_ledger: bool = False) -> Account:
    """Make the vault that a node file names, for its data and with its policy."""
    client = Node.load(node)
    rows = client.rows()
    policy = client.policy(len(rows.y))
    with Vault.create(
        client.vault, policy, dataset=rows.fingerprint, second_ledger=second_ledger
    ) as vault:
        return account(vault)


def show(path: str | Path) -> Account:
    """The statement of a vault; its data are not needed."""
    with Vault.open(path, dataset=None) as vault:
        return account(vault)


def backup(path: str | Path, out: str | Path) -> Receipt:
    """Write a backup of a vault to a new file; how far the vault has come in it."""
    return vaults.backup(path, out)


@dataclass(frozen=True)
class Rebound:
    """What binding a vault anew did."""

    text: str
    receipt: Receipt
    burnt: float = 0.0  # share of the first budget

    def to_json(self) -> dict[str, Any]:
        """One object."""
        return {"text": self.text, "burnt": self.burnt, "receipt": self.receipt.to_proof()}


def rebind(
    path: str | Path | None = None,
    *,
    data: str | Path | None = None,
    node: str | Path | None = None,
    overlap: str | None = None,
    samples: int | None = None,
    moved: bool = False,
    restored: bool = False,
    receipts: Sequence[str] = (),
    burn_rest: bool = False,
    nothing_since: bool = False,
    second_ledger: bool = False,
) -> Rebound:
    """Bind a vault to changed data, to another place, or to what a backup has left.

    A node file names vault and data by itself.
    """
    if (path is None) == (node is None):
        raise InputError("rebind needs a VAULT or a --node file that names it, one of the two")
    if [data is not None or node is not None, moved, restored].count(True) != 1:
        raise InputError(
            "rebind needs one of DATA (the records changed), --moved (the file was moved) or "
            "--restored (a backup was put back)"
        )
    if (receipts or burn_rest) and not restored:
        raise InputError("--receipt and --burn-rest belong to --restored; leave them out")
    if nothing_since and not (moved or restored):
        raise InputError("--nothing-since belongs to --moved and --restored; leave it out")
    if (overlap is not None or samples is not None) and data is node is None:
        raise InputError("--overlap and --samples belong to changed DATA; leave them out")
    if data is not None or node is not None:
        if overlap is None:
            raise InputError(
                "--overlap must be all, some or none: say which old records are among the new ones"
            )
        if node is not None:
            client = Node.load(node)
            found = client.rows()
            path, data = client.vault, client.data
            dataset, rows = _rows(samples, found.fingerprint, len(found.y))
        else:
            dataset, rows = _rows(samples, *fingerprint_file(cast(Path, data)))
        receipt = vaults.rebind(
            cast(Path, path),
            dataset=dataset,
            samples=rows,
            overlap=overlap,
            second_ledger=second_ledger,
        )
        return Rebound(f"{path} now keeps the ledger of {data}; every debit stays", receipt)
    path = cast(Path, path)
    if moved:
        receipt = vaults.move(path, nothing_since=nothing_since, second_ledger=second_ledger)
        return Rebound(f"{path} is in service; the original must not be used", receipt)
    proofs = [_receipt(text) for text in receipts]
    receipt, burnt = vaults.restore(
        path,
        receipts=proofs,
        burn_rest=burn_rest,
        nothing_since=nothing_since,
        second_ledger=second_ledger,
    )
    share = burnt / FULL
    text = (
        f"{path} is in service; {100 * share:.2f} % of its first budget was burnt for what is lost"
    )
    return Rebound(text, receipt, share)


def _rows(given: int | None, dataset: str, counted: int | None) -> tuple[str, int]:
    if counted is None and given is None:
        raise InputError(
            "--samples is missing: this kind of file does not tell how many rows it has"
        )
    if counted is not None and given not in (None, counted):
        raise InputError.of("samples", given, f"the file's {counted}", "leave it out")
    return dataset, given if counted is None else counted  # type: ignore[return-value]


def _receipt(text: str) -> Receipt:
    """A receipt as JSON, or the file that holds it: alone, in a statement or in a certificate."""
    if not text.lstrip().startswith("{"):
        try:
            text = Path(text).read_text("utf-8")
        except (OSError, UnicodeDecodeError):
            raise InputError.of(
                "receipt", text, "a receipt as JSON or a file that holds one", "check its name"
            ) from None
    try:
        data = json.loads(text)
    except (ValueError, RecursionError):
        raise InputError.of("receipt", text, "a JSON object", "copy it whole") from None
    return Receipt.from_json(
        data["receipt"] if isinstance(data, dict) and "receipt" in data else data
    )
