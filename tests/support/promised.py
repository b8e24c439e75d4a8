"""Members of a federation and what their guarantees promise, computed a second time."""

from __future__ import annotations

from sottovoce.client.messages import Receipt
from sottovoce.privacy import calibration
from sottovoce.server.members import Account, Member
from support.in_process import CLASSES, FEATURES


def member(i, account, kind="exact", unit="record"):
    return Member(
        name=f"client-{i}",
        vault=f"{i:032x}",
        samples=40,
        features=FEATURES,
        classes=CLASSES,
        unit=unit,
        clip=1.0,
        calibration=kind,
        floor=None,
        max_rounds=1000,
        account=account,
        receipt=Receipt(f"{i:032x}", 0, "0" * 64),
    )


def account(epsilon, delta=1e-5, *, first=None, kind="exact"):
    """What a vault tells; `first` is the ε it was made with, where it was tightened since."""
    worth = calibration.vault_capacity(first or epsilon, delta, calibration=kind)
    return Account(epsilon, delta, float(worth), 0.0)
