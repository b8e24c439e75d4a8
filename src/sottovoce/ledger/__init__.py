"""`sottovoce ledger`: what an operator does with a vault, as functions and as texts."""

from sottovoce.ledger.account import Account, Release, account, table
from sottovoce.ledger.certificate import export
from sottovoce.ledger.operate import act_as, backup, create, create_for, make, rebind, show
from sottovoce.ledger.verification import Check, Verified, verify

__all__ = [
    "Account",
    "Check",
    "Release",
    "Verified",
    "account",
    "act_as",
    "backup",
    "create",
    "create_for",
    "export",
    "make",
    "rebind",
    "show",
    "table",
    "verify",
]
